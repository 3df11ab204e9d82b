"""Replaying a batch that was left out: with the weights it met, pair by pair."""

import json
import shutil
import sys
from pathlib import Path

import PIL.Image
import pytest
import torch
from accelerate.state import AcceleratorState
from test_recipes import TINY, call

from mpp import UserError
from mpp.replay import main, replay

RUN = [*TINY, "train.steps=8", "train.log_every=1", "train.save_every=2", "train.keep=9", "train.ema=0.9"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with a checkpoint after every second one."""
    out = tmp_path_factory.mktemp("runs") / "a"
    with pytest.MonkeyPatch.context() as patch:
        assert call("pretrain", *RUN, f"out={out}", monkeypatch=patch) == 0
    return out


def leave_out(out: Path, step: int, checkpoint: int) -> None:
    """Mark a step, counted from 1, as left out, as if training had gone back to a checkpoint."""
    row = {"first": step - 1, "last": step - 1, "reason": "a test says so", "checkpoint": checkpoint}
    with (out / "skipped.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    name = f"checkpoints/step-{checkpoint:08d}"
    shutil.copytree(out / name, out / "faults" / f"step-{step - 1:08d}" / name)


def test_a_replayed_batch_has_the_loss_and_the_gradient_it_had(trained: Path, tmp_path: Path) -> None:
    """One step after the checkpoint, so that a step in between is trained again, too."""
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    out = tmp_path / "a"
    shutil.copytree(trained, out)
    for step, checkpoint in ((6, 4), (7, 6)):
        leave_out(out, step, checkpoint)
        AcceleratorState._reset_state(reset_partial_state=True)
        found = replay(out, step)
        assert found["step"] == step
        assert found["reason"] == "a test says so"
        # Step 7 follows step 6, which the second replay leaves out as the run would have.
        if step == 6:
            assert found["loss"] == pytest.approx(rows[step - 1]["loss"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(rows[step - 1]["grad_norm"], rel=1e-4)
        assert len(found["pairs"]) == 8
        norms = [pair["grad_norm"] for pair in found["pairs"]]
        assert norms == sorted(norms, reverse=True)
        ids = [number for pair in found["pairs"] for number in pair["ids"]]
        assert len(set(ids)) == 16
        with PIL.Image.open(found["picture"]) as picture:
            assert min(picture.size) > 100
    assert replay(out)["step"] == 7, "the last one"


def test_what_cannot_be_replayed_is_said_in_a_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no step of this run was left out"):
        replay(trained)
    out = tmp_path / "a"
    shutil.copytree(trained, out)
    leave_out(out, 3, 2)
    with pytest.raises(UserError, match="step 9 was not left out; these were: 3"):
        replay(out, 9)
    monkeypatch.setattr(sys, "argv", ["replay", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(sys, "argv", ["replay", str(out)])
    main()
    shown = capsys.readouterr().out
    assert "Step 3, left out because a test says so" in shown
    assert "batch-3.png" in shown


def test_a_run_that_diverges_tells_how_to_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wild"
    wild = [
        "optim.opt=momentum",
        "optim.lr=1e25",
        "train.clip=null",
        "schedule.decay=constant",
        "train.max_rollbacks=1",
    ]
    assert call("pretrain", *RUN, *wild, f"out={out}", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert "warning: the update made weights that are not finite at step" in said.out
    assert "after 1 rollback(s)" in said.err
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    found = replay(out)
    assert all(torch.isfinite(torch.tensor(pair["loss"])) for pair in found["pairs"])

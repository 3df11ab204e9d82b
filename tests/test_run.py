"""The run folder: configuration, metrics, status, one writer."""

import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import fill, largest_file, read_only, small_disk
from torch import nn
from training import CONFIG, build

from mpp import UserError
from mpp.recipes.common import make_optimizer
from mpp.stopping import EXIT_CODE, Preempted
from mpp.train import Run
from mpp.train.checkpoint import verify
from mpp.train.run import MAY_CHANGE, Lines, flatten, read_metrics


def test_a_run_with_checkpoints_refuses_another_configuration(tmp_path: Path):
    objective = build()
    run = Run(tmp_path / "run", CONFIG)
    changed = {**CONFIG, "train": {**CONFIG["train"], "steps": 7}, "optim": {"lr": 2e-5}}
    Run(tmp_path / "run", changed)  # nothing was trained yet
    run = Run(tmp_path / "run", CONFIG)
    assert run.step() == 0
    run.save(1, objective, make_optimizer(objective, opt="adamw", lr=1e-3))
    assert run.saved() == ""
    assert run.step() == 1
    Run(tmp_path / "run", json.loads(json.dumps(CONFIG)))  # lists for tuples, as YAML has it
    with pytest.raises(UserError) as refused:
        Run(tmp_path / "run", changed)
    for part in (
        "optim.betas: [0.9, 0.999] -> absent",
        "optim.lr: 1e-05 -> 2e-05",
        "another out=",
    ):
        assert part in str(refused.value)
    may = {**CONFIG, "train": {**CONFIG["train"], "workers": 4, "log_every": 1}, "probe": {"a": 2}}
    Run(tmp_path / "run", may, after=("probe",))
    with pytest.raises(UserError, match=r"probe\.a"):
        Run(tmp_path / "run", {**may, "probe": {"a": 3}})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out=.*file/run: cannot write there"):
        Run(tmp_path / "file" / "run", CONFIG)


def test_restoring_drops_metrics_that_will_be_made_again(tmp_path: Path):
    objective = build()
    optimizer = make_optimizer(objective, opt="adamw", lr=1e-3)
    run = Run(tmp_path, CONFIG)
    for step in range(1, 6):
        run.log({"step": step, "loss": 1.0 / step})
        if step == 3:
            run.save(step, objective, optimizer)
            assert run.saved() == ""
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # a crash cut this line short
    again = Run(tmp_path, CONFIG)
    assert again.restore(again.choose(), objective, optimizer)["step"] == 3
    assert [row["step"] for row in read_metrics(again.out)] == [1, 2, 3]
    shutil.rmtree(again.checkpoints)
    assert again.restore(again.choose(), objective, optimizer)["step"] == 0
    assert read_metrics(again.out) == []


def test_other_processes_write_nothing(tmp_path: Path):
    objective = build()
    run = Run(tmp_path / "run", CONFIG, main=False)
    run.log({"step": 1})
    run.save(1, objective, make_optimizer(objective, opt="adamw", lr=1e-3))
    assert not (tmp_path / "run").exists()


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def train_to(run: Run, *steps: int) -> None:
    """Checkpoints of these steps."""
    for step in steps:
        run.save(step, *small())
        assert run.saved() == ""


def with_values(**values: Any) -> dict[str, Any]:
    """CONFIG with other values: `train__workers=2`."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    for key, value in values.items():
        *groups, name = key.split("__")
        group = config
        for one in groups:
            group = group.setdefault(one, {})
        group[name] = value
    return config


def status(run: Run) -> dict[str, Any]:
    return json.loads((run.out / "status.json").read_text())


# ---------------------------------------------------------------------------------------------------- configuration


def test_allowed_changes_are_listed(tmp_path: Path):
    out = str(tmp_path / "run")
    with Run(out, with_values(out=out)) as run:
        assert run.changed == []
        train_to(run, 5)
    now = with_values(out="moved", train__workers=3, train__steps=9, probe__a=2)
    os.rename(out, tmp_path / "moved")
    with Run(tmp_path / "moved", now, after=("probe",)) as run:
        # What comes after training (`after`) and the folder's own name are no news.
        assert run.changed == ["train.steps: 1000 -> 9", "train.workers: 0 -> 3"]
    with Run(tmp_path / "moved", now) as run:
        assert run.changed == [], "what was said once is the configuration now"


@given(st.sets(st.sampled_from(sorted(MAY_CHANGE)), max_size=6), st.sets(st.sampled_from("abcdef"), max_size=4))
def test_every_key_is_allowed_or_named(tmp_path_factory: pytest.TempPathFactory, may: set[str], must_not: set[str]):
    out = tmp_path_factory.mktemp("run")
    with Run(out, with_values()) as run:
        train_to(run, 1)
    now = with_values(
        **{key.replace(".", "__"): "new" for key in may}, **{f"objective__{key}": "new" for key in must_not}
    )
    before = flatten(with_values())
    if must_not:
        kept = (out / "config.yaml").read_text()
        with pytest.raises(UserError) as refused:
            Run(out, now)
        for key in must_not:
            assert f"objective.{key}: absent -> new" in str(refused.value)
        assert not any(f"{key}:" in str(refused.value) for key in may)
        assert (out / "config.yaml").read_text() == kept
        now = {key: value for key, value in now.items() if key != "objective"}
    with Run(out, now) as run:  # a refusal leaves no lock behind
        assert run.changed == [f"{key}: {before.get(key, 'absent')} -> new" for key in sorted(may - {"out"})]


def test_a_run_that_has_done_no_step_may_become_another(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 0)
        run.note_bad({1: "a"})
    with Run(tmp_path, with_values(train__workers=7)) as run:
        assert run.choose() == 0, "what may change leaves the first checkpoint"
        assert run.known_bad() == {1: "a"}
    with Run(tmp_path, with_values(optim__lr=3.0)) as run:
        assert run.choose() is None, "another model's weights"
        assert run.known_bad() == {}
        train_to(run, 0, 1)
    with pytest.raises(UserError, match=r"optim\.lr: 3.0 -> 1e-05"):
        Run(tmp_path, CONFIG)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_become_another(tmp_path: Path):
    """Its owner may bring one back, which must then find its own configuration."""
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 1)
        (run.checkpoints / "step-00000001" / "state.json").unlink()
        with pytest.raises(UserError, match="every checkpoint"):
            run.choose()
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"optim\.lr"):
        Run(tmp_path, with_values(optim__lr=3.0))
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.parametrize("content", ["", "a: [", "\0\0\0", "- 1", "a: ${b}", "text"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: str):
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 1)
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml|another configuration") as refused:
        Run(tmp_path, CONFIG)
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------------------------------------------- status.json


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (None, {"state": "finished", "exit_code": 0}),
        (UserError("too bad"), {"state": "failed", "exit_code": 2, "message": "too bad"}),
        (KeyError("k"), {"state": "failed", "exit_code": 1, "message": "KeyError: 'k'"}),
        (OSError(5, "Input/output error"), {"state": "failed", "exit_code": 1}),
        (Preempted(15, 4), {"state": "preempted", "exit_code": EXIT_CODE, "signal": "SIGTERM"}),
        (Preempted(10), {"state": "preempted", "exit_code": EXIT_CODE, "signal": "SIGUSR1"}),
        (Preempted(2, 4), {"state": "preempted", "exit_code": 130, "signal": "SIGINT"}),
        (KeyboardInterrupt(), {"state": "preempted", "exit_code": 130, "signal": "SIGINT"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_status_says_how_a_run_ended(tmp_path: Path, error: BaseException | None, wanted: dict[str, Any]):
    def go() -> None:
        with Run(tmp_path, CONFIG) as run:
            assert {"state": "running", "step": 0}.items() <= status(run).items()
            train_to(run, 4)
            assert {"state": "running", "step": 4}.items() <= status(run).items()
            if error is not None:
                raise error

    if error is None:
        go()
    else:
        with pytest.raises(type(error)):
            go()
    found = json.loads((tmp_path / "status.json").read_text())
    assert (wanted | {"step": 4, "process": os.getpid(), "host": platform.node()}).items() <= found.items()
    assert found["began"] <= found["updated"]
    Run(tmp_path, CONFIG).close()  # it let go of the folder


def test_a_run_that_is_refused_leaves_the_status_of_the_one_that_was(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 1)
    before = (tmp_path / "status.json").read_text()
    with pytest.raises(UserError):
        Run(tmp_path, with_values(optim__lr=3.0))
    assert (tmp_path / "status.json").read_text() == before


# ---------------------------------------------------------------------------------------------------- full disks


def test_no_line_is_lost_to_a_full_disk(tmp_path: Path):
    lines = Lines(tmp_path / "lines.jsonl")
    assert lines.append([{"step": 1}, {"step": 2}]) == ""
    size = lines.path.stat().st_size
    for room in (0, size, size + 1, size + 13):  # not even the file, no byte more, halves of lines
        with largest_file(room):
            assert f"cannot write {lines.path} (File too large)" in lines.append([{"step": 3 + room}])
        assert [json.loads(line)["step"] for line in lines.path.read_text().splitlines()] == [1, 2]
    assert lines.append([{"step": 99}]) == ""
    wanted = [1, 2, *(3 + room for room in (0, size, size + 1, size + 13)), 99]
    assert [row["step"] for row in map(json.loads, lines.path.read_text().splitlines())] == wanted
    new = Lines(tmp_path / "new.jsonl")
    with largest_file(3):
        assert new.append([{"step": 1}])
    assert new.append([]) == ""
    assert new.path.read_text() == '{"step": 1}\n'


def test_a_run_on_a_disk_that_is_full_then_has_room_then_is_read_only(tmp_path: Path):
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        with Run(disk / "run", CONFIG) as run:
            train_to(run, 1)
            assert run.log({"step": 1}) == ""
            rubbish = fill(disk, leave=0)
            for step in range(2, 500):
                problem = run.log({"step": step})
            assert "No space left on device" in problem
            run.save(500, *small())
            assert "cannot write a checkpoint" in run.saved()
            assert "No space left" in run.save_failed
            with pytest.raises(UserError, match="cannot write there"):
                run.skip({"first": 1, "last": 2}, 1)
            assert run.skipped() == []
            run.note_bad({number: "x" * 50 for number in range(500)})
            assert run.known_bad() == {}
            rubbish.unlink()
            assert run.log({"step": 500}) == ""
            assert [row["step"] for row in read_metrics(run.out)] == list(range(1, 501))
            train_to(run, 500)
            assert run.save_failed == ""
            fill(disk, leave=0)
        # Neither the end of the run nor the beginning of the next one is a traceback.
        with pytest.raises(UserError, match=r"cannot write there .No space left"):
            Run(disk / "run", with_values(train__steps=1000, train__tracker="x" * 9000))
        (disk / "rubbish").unlink()
        with Run(disk / "run", CONFIG) as run:
            assert run.choose() == 500
        read_only(disk)
        with pytest.raises(UserError, match=r"cannot write there .Read-only"):
            Run(disk / "run", CONFIG)


@pytest.mark.parametrize(
    "rubbish",
    [b'{"step": 2, "lo', b"\0" * 300, b"\xff\xfe{", b"7\n", b"null\n[]\n", b'{"step": null}\n', b"\n\n", b"\x85"],
)
def test_lines_that_a_crash_has_spoilt_are_dropped(tmp_path: Path, rubbish: bytes):
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 3)
        for step in (1, 2, 3):
            run.log({"step": step, "loss": float("nan")})
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + rubbish)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3], "a run may be looked at while it writes"
    with Run(tmp_path, CONFIG) as run:
        run.restore(run.choose(), *small())
        assert file.read_bytes() == whole
        run.log({"step": 4})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------- which checkpoint


def damage(run: Run, step: int) -> None:
    file = run.checkpoints / f"step-{step:08d}" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoints_are_passed_over_named_and_kept(tmp_path: Path):
    said: list[str] = []
    with Run(tmp_path, CONFIG, keep=4) as run:
        train_to(run, 1, 2, 3, 4)
        damage(run, 4)
        damage(run, 3)
        assert run.choose(say=said.append) == 2
        assert len(said) == 2
        for line, step in zip(said, (4, 3), strict=True):
            assert f"step-{step:08d} is damaged (model.safetensors has another checksum)" in line
            assert f"kept as damaged-step-{step:08d}" in line
        assert run.saved_steps() == [1, 2]
        assert run.choose(say=said.append) == 2
        assert len(said) == 2, "said once"
        train_to(run, 3, 4, 5, 6, 7)
        damage(run, 7)
        assert run.choose(say=said.append) == 6
    names = {path.name for path in (tmp_path / "checkpoints").glob("damaged-*")}
    assert names == {"damaged-step-00000003", "damaged-step-00000004", "damaged-step-00000007"}, "not rotated away"


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_stays_stopped(tmp_path: Path):
    """To begin again without a word would cost days of training."""
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 1, 2)
        damage(run, 1)
        damage(run, 2)
    for _ in range(3):
        with (
            Run(tmp_path, CONFIG) as run,
            pytest.raises(UserError, match=r"damaged-step-00000001, damaged-step-00000002"),
        ):
            run.choose(say=lambda line: None)
    shutil.rmtree(tmp_path / "checkpoints")
    with Run(tmp_path, CONFIG) as run:
        assert run.choose() is None


def test_later_checkpoints_than_wanted_are_removed(tmp_path: Path):
    with Run(tmp_path, CONFIG, keep=5) as run:
        train_to(run, 0, 2, 4, 6)
        assert run.choose(5) == 4
        assert run.saved_steps() == [0, 2, 4]
        assert run.choose(4) == 4
        damage(run, 4)
        assert run.choose(4, say=lambda line: None) == 2
        assert run.choose(1) == 0
        assert run.saved_steps() == [0]


def test_the_checkpoint_of_a_fault_outlives_rotation(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        train_to(run, 2, 4)
        row = {"first": 4, "last": 5, "reason": "loss is nan", "checkpoint": 4, "ids": {"4": [1, 2]}}
        run.skip(row, 4)
        run.skip(row | {"first": 6}, None)
        kept = tmp_path / "faults" / "step-00000004" / "checkpoints" / "step-00000004"
        original = run.checkpoints / kept.name
        assert (kept / "model.safetensors").samefile(original / "model.safetensors"), "a second name, not a copy"
        run.skip(row, 4)  # once more, as after a crash
        train_to(run, 6, 8, 10)
        assert run.saved_steps() == [8, 10]
        assert not original.exists()
        assert verify(kept) == ""
        assert run.skipped() == [row, row | {"first": 6}, row]
    with Run(tmp_path, CONFIG) as run:
        assert len(run.skipped()) == 3


# ---------------------------------------------------------------------------------------------------- bad images


@given(st.lists(st.dictionaries(st.integers(0, 10**9), st.text(min_size=1, max_size=20), max_size=4), max_size=4))
def test_bad_images_are_remembered(tmp_path_factory: pytest.TempPathFactory, news: list[dict[int, str]]):
    """Whatever the files are called: line breaks become spaces, and what is no text its escape."""
    with Run(tmp_path_factory.mktemp("run"), CONFIG) as run:
        assert run.known_bad() == {}
        known: dict[int, str] = {}
        for new in news:
            run.note_bad(new)
            known |= {number: " ".join(message.splitlines()) for number, message in new.items()}
        assert run.known_bad() == known
        run.note_bad({3: "caf\udce9.png"})  # a name that is not UTF-8
        assert run.known_bad()[3] == "caf\\udce9.png"


def test_a_spoilt_list_of_bad_images_stops_nothing(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        run.note_bad({1: "one", 2: "two"})
        with run.bad_images.open("ab") as file:
            file.write(b"\n\0\xff\nx\ty\n12")
        assert run.known_bad() == {1: "one", 2: "two"}

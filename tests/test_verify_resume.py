"""The command that proves a resume, run for real with several seeds, and that it would notice what it looks for."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_launch import TINY, run

from mpp.verify_resume import first_difference, tensor_difference

COMMAND = [sys.executable, "-m", "mpp.verify_resume"]
SMALL = [override for override in TINY if not override.startswith(("train.steps=", "train.log_every="))]


@pytest.mark.parametrize(
    ("seed", "also"),
    [
        ("0", []),
        # Three epochs of eight steps; workers, accumulation, a running average and dropout.
        (
            "1",
            [
                "train.workers=2",
                "train.accumulation=2",
                "train.ema=0.9",
                "data.per_class=16",
                "+encoder.drop_path_rate=0",
            ],
        ),
        ("2", ["objective=supervised", "train.clip=null", "optim.opt=momentum", "optim.lr=0.01"]),
    ],
)
def test_the_command_finds_every_promise_kept(seed: str, also: list[str]) -> None:
    done = run(*COMMAND, "--seed", seed, "--kills", "2", *SMALL, *also)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    rows = 17 if "train.ema=0.9" in also else 15
    assert f"{rows} of {rows} hold" in done.stdout


def test_a_broken_run_is_told_apart_from_a_broken_promise() -> None:
    done = run(*COMMAND, "data=folder", "data.path=nowhere")
    assert done.returncode == 2
    assert "the run itself fails without being interrupted" in done.stderr
    assert "nowhere: no such folder" in done.stderr


LINES = [{"step": step, "samples": f"{step:x}", "loss": 1.0 / step} for step in range(1, 9)]


def test_the_first_difference_in_lines_is_named() -> None:
    assert first_difference(LINES, json.loads(json.dumps(LINES))) == ""
    assert first_difference(LINES, LINES[:3] + LINES[4:]) == "step 4 is missing"
    assert first_difference(LINES, [*LINES[:4], *LINES[3:]]) == "step 4 is there twice"
    changed = [{**line, "loss": math.nextafter(line["loss"], 2)} if line["step"] > 4 else line for line in LINES]
    assert first_difference(LINES, changed).startswith("step 5: loss is 0.2000")
    assert first_difference(LINES, changed, ("samples",)) == ""
    assert first_difference(LINES, [*LINES, {"step": 9}]) == "9 lines instead of 8"


def test_the_first_difference_in_tensors_is_named(tmp_path: Path) -> None:
    one = {"a": torch.ones(3), "b": torch.arange(4.0)}
    save_file(one, tmp_path / "one")
    save_file({**one, "b": one["b"] + torch.tensor([0, 0, 1e-6, 0])}, tmp_path / "other")
    save_file({"a": one["a"]}, tmp_path / "less")
    assert tensor_difference(tmp_path / "one", tmp_path / "one") == ("", 0.0)
    problem, largest = tensor_difference(tmp_path / "one", tmp_path / "other")
    assert problem.startswith("b differs by 9.5")
    assert tensor_difference(tmp_path / "one", tmp_path / "other", tolerance=1e-5) == ("", largest)
    assert tensor_difference(tmp_path / "one", tmp_path / "less")[0] == "names differ: b"

"""Slow proofs, run by hand with `make test-full`: the main job at its real size, on real images."""

import json
import signal
import time
from pathlib import Path

import pytest
from test_launch import BIN, TINY, run

from mpp.train.run import read_metrics
from mpp.verify_resume import Trial, first_difference, tensor_difference


@pytest.mark.full
def test_two_processes_that_were_killed_end_with_the_bits_of_two_that_were_not(tmp_path: Path) -> None:
    """Both at once, as when a machine goes away; with accumulation and a running average."""
    shared = [*TINY, "train.steps=24", "train.log_every=3", "train.save_every=4", "train.trace=true"]
    shared += ["train.accumulation=2", "train.ema=0.9"]
    straight, killed = (Trial(tmp_path / name, shared, processes=2, patience=200) for name in ("straight", "killed"))
    straight.start()
    assert straight.wait() == [0, 0]
    for target in (3, 10, 17):
        killed.start()
        assert killed.wait_for(lambda target=target: killed.done() >= target)
        killed.signal(signal.SIGKILL)
        assert killed.wait() == [-9, -9]
    killed.start()
    assert killed.wait() == [0, 0]
    assert first_difference(straight.trace(), killed.trace()) == ""
    assert first_difference(read_metrics(straight.out), read_metrics(killed.out)) == ""
    for name in ("model", "optimizer", "ema"):
        file = f"checkpoints/step-00000024/{name}.safetensors"
        assert tensor_difference(straight.out / file, killed.out / file) == ("", 0.0)


@pytest.mark.full
def test_quickstart_shows_what_pretraining_buys(tmp_path: Path) -> None:
    """Minutes on two cores; every control is beaten by more than its spread."""
    began = time.monotonic()
    launch = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--cpu"]
    done = run(*launch, "recipes/quickstart.py", f"out={tmp_path / 'q'}", timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "q" / "results.json").read_text())
    mean = {(row["protocol"], row["labels"], row["init"]): row["mean"] for row in rows}
    assert mean["linear_probe", 500, "mpp"] - mean["linear_probe", 500, "untrained"] > 0.07
    assert mean["linear_probe", 500, "mpp"] - mean["baseline", 500, "histogram"] > 0.07
    assert mean["finetune", 50, "mpp"] - mean["finetune", 50, "scratch"] > 0.07
    assert mean["finetune", 5, "mpp"] - mean["finetune", 5, "scratch"] > 0.03
    metrics = [json.loads(line) for line in (tmp_path / "q" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["loss"] < 0.4 * metrics[-1]["label_entropy"]
    assert time.monotonic() - began < 15 * 60

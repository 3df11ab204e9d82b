"""Slow proofs, run by hand with `make test-full`: the main job at its real size, on real images."""

import json
import time
from pathlib import Path

import pytest
from test_launch import BIN, run


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

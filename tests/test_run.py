"""The run folder: configuration, metrics, status, one writer."""

import json
import shutil
from pathlib import Path

import pytest
from training import CONFIG, build

from mpp import UserError
from mpp.recipes.common import make_optimizer
from mpp.train import Run
from mpp.train.run import read_metrics


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

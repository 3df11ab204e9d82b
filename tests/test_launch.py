"""Recipes as people start them: real launchers, several processes, kills, an installed wheel."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpp.data.loader import usable_cores

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
TINY = [
    "data.per_class=40",
    "data.test_per_class=10",
    "+encoder.depth=1",
    "train.batch_size=16",
    "train.steps=20",
    "train.log_every=5",
]
TWO = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]


def run(*command: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the repository, its output captured; one thread a process, so that two share the cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "NO_COLOR": "1", **environment}
    return subprocess.run(
        list(command), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps on one process, started as the README says."""
    out = tmp_path_factory.mktemp("runs") / "one"
    launch = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--cpu"]
    done = run(*launch, "recipes/pretrain.py", *TINY, f"out={out}")
    assert done.returncode == 0, done.stderr
    assert "1 process on cpu" in done.stdout
    return out


def test_accelerate_launch_leaves_a_whole_run(one_process: Path) -> None:
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints/step-00000020/model.safetensors",
        "encoder/model.safetensors",
        "encoder/config.json",
        "pictures/loss.png",
        "pictures/panel.png",
        "report.html",
    ):
        assert (one_process / name).is_file(), name
    rows = [json.loads(line) for line in (one_process / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[-1]["loss"] < rows[0]["loss"] < 6.3


def test_two_processes_end_with_the_weights_of_one(one_process: Path, tmp_path: Path) -> None:
    done = run(*TWO, "recipes/pretrain.py", *TINY, f"out={tmp_path / 'two'}")
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu" in done.stdout
    name = "checkpoints/step-00000020/model.safetensors"
    one, two = load_file(one_process / name), load_file(tmp_path / "two" / name)
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=0, atol=1e-5, msg=key)


def test_a_killed_run_continues_to_the_same_weights(one_process: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    # Plain python, with accumulation off and a checkpoint every fifth step, killed without warning after the first one.
    command = [sys.executable, "recipes/pretrain.py", *TINY, "train.save_every=5", f"out={out}"]
    # As many threads as `accelerate launch` gave the run that it is compared with: they are part of the bits.
    environment = {**os.environ, "OMP_NUM_THREADS": str(usable_cores())}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not list(out.glob("checkpoints/step-*[1-9]*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    reached = sorted(out.glob("checkpoints/step-*"))
    assert reached, "no checkpoint was written before the kill"
    if (out / "encoder").exists():
        pytest.skip("the run was over before it could be killed")
    done = run(*command, OMP_NUM_THREADS=environment["OMP_NUM_THREADS"])
    assert done.returncode == 0, done.stderr
    assert "continued from step" in done.stdout
    name = "checkpoints/step-00000020"
    for file in ("model.safetensors", "optimizer.safetensors"):
        straight, resumed = load_file(one_process / name / file), load_file(out / name / file)
        assert all(torch.equal(straight[key], resumed[key]) for key in straight), file
    losses = [
        [(row["step"], row["loss"]) for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
        for folder in (one_process, out)
    ]
    assert losses[0] == losses[1]


BATCHES = """
import sys, torch
from accelerate import Accelerator
from mpp.corruption import Corruption
from mpp.data import Loader, Plan, load_data
from mpp.data.loader import Images

def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == int(sys.argv[1]), accelerator.num_processes
    data = load_data("photos", per_class=40, test_per_class=10, crop_scale=(0.3, 1.0))
    corruption = Corruption(8, 64)
    for workers in map(int, sys.argv[3].split(",")):
        plan = Plan(len(data.train), 16, seed=3, rank=accelerator.process_index, world=accelerator.num_processes)
        images = Images(data.train, data.transform((32, 32)), channels=3, seed=3)
        seen = []
        for batch in Loader(images, plan, workers=workers).batches(0, 25):
            batch["masked"] = corruption.draw(batch["key"]).masked
            seen.append(batch)
        stacked = {name: torch.stack([batch[name] for batch in seen]) for name in seen[0]}
        torch.save(stacked, f"{sys.argv[2]}-{workers}-{accelerator.process_index}.pt")

if __name__ == "__main__":  # workers of Python 3.14 import this file
    main()
"""


def test_batches_do_not_depend_on_processes_or_workers(tmp_path: Path) -> None:
    """Sample ids, pixels and masks of the first 25 batches, across an epoch's end, on 1 and 2 real processes."""
    script = tmp_path / "batches.py"
    script.write_text(BATCHES)
    one = run(sys.executable, str(script), "1", str(tmp_path / "one"), "0,1,3")
    two = run(*TWO, str(script), "2", str(tmp_path / "two"), "0,1")
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    wanted = torch.load(tmp_path / "one-0-0.pt", weights_only=True)
    assert wanted["image"].shape == (25, 16, 3, 32, 32)
    assert len(wanted["id"][:20].unique()) == 320, "the first epoch holds every sample once"
    for workers in (1, 3):
        got = torch.load(tmp_path / f"one-{workers}-0.pt", weights_only=True)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    for workers in (0, 1):
        ranks = [torch.load(tmp_path / f"two-{workers}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for name in wanted:
            assert torch.equal(torch.cat([rank[name] for rank in ranks], dim=1), wanted[name]), name


def test_quickstart_on_two_processes(tmp_path: Path) -> None:
    """The whole job, tiny, on two processes: every row of results.json is there, and the report."""
    out = tmp_path / "quick"
    few = [
        "probe.labels=[5]",
        "probe.seeds=2",
        "finetune.labels=[5]",
        "finetune.seeds=2",
        "finetune.rates=[0.001,0.003]",
    ]
    few += ["finetune.held_out=5", "few.steps=2", "few.batch_size=16"]
    done = run(*TWO, "recipes/quickstart.py", *TINY, *few, "train.steps=4", f"out={out}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((out / "results.json").read_text())
    assert {(row["protocol"], row["init"]) for row in rows} == {
        ("linear_probe", "mpp"),
        ("linear_probe", "untrained"),
        ("baseline", "raw_knn"),
        ("baseline", "histogram"),
        ("finetune", "mpp"),
        ("finetune", "scratch"),
    }
    for row in rows:
        assert row["labels"] == 5
        assert row["seeds"] == 2
        assert 0 <= row["mean"] <= 1
        assert row["std"] is not None
    assert done.stdout.count("Accuracy on the test split") == 1, "one process prints"
    assert (out / "report.html").is_file()


def test_wheel(tmp_path: Path) -> None:
    """A built wheel holds everything, leaves nothing called eval or recipes at the top, and its recipes run."""
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    done = run(*build)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"mpp"}
    where = "import mpp, mpp.eval; print(mpp.__file__, mpp.eval.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    code = f"{where}; import runpy, sys; sys.argv = ['pretrain', *{[*TINY, 'train.steps=2', 'out=run']!r}]"
    code += "; runpy.run_module('mpp.recipes.pretrain', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(site)) == 2, "the wheel was imported, not the checkout"
    assert (tmp_path / "run" / "report.html").is_file()

"""The figures of docs/reliability.md that are timings: `python tests/measure_reliability.py`, on a quiet machine.

1. Seconds to the first batch and the first optimizer step of ten million images, from step 0 and from step 1,000,000.
2. Milliseconds for which a save stops the step, beside a save in the foreground, for ViT-B/16 with AdamW.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from test_faults import TenMillion
from training import build

from mpp import Encoder, MaskedPatchPrediction
from mpp.data import Loader, Plan, Transform
from mpp.data.loader import Images
from mpp.recipes.common import make_optimizer
from mpp.train import Run, fit
from mpp.train.checkpoint import Snapshot, Writer, write_checkpoint
from mpp.train.run import environment

REPEATS = 5


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def first_step(start: int) -> tuple[float, float]:
    """Seconds to the first batch with two workers, and to the end of the first step of a run continued at `start`."""
    images = Images(TenMillion(), Transform((8, 8)), channels=1, seed=1)  # type: ignore[arg-type]
    plan = Plan(len(images), 256, seed=1)
    began = time.perf_counter()
    next(iter(Loader(images, plan, workers=2).batches(start, start + 10)))
    to_batch = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        objective = build()
        optimizer = make_optimizer(objective, opt="adamw", lr=1e-3)
        fit(
            objective,
            Loader(images, plan),
            optimizer,
            steps=1,
            rate=lambda step: 1e-3,
            accelerator=Accelerator(cpu=True),
        )
        config = {"train": {"seed": 0}}
        Run(folder, config).close()
        if start:  # what a run that has come so far has left
            snapshot = Snapshot()
            snapshot.take(objective, optimizer)
            write_checkpoint(Path(folder) / "checkpoints", start, snapshot)
        began = time.perf_counter()
        with Run(folder, config) as run:
            fit(objective, Loader(images, plan), optimizer, steps=start + 1, rate=lambda step: 1e-3,
                accelerator=Accelerator(cpu=True), run=run)  # fmt: skip
        return to_batch, time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    times = {start: [first_step(start) for _ in range(REPEATS)] for start in (0, 1_000_000)}
    for start, pairs in times.items():
        batch, step = ([pair[i] for pair in pairs] for i in (0, 1))
        print(f"step {start:>9,}: first batch {spread(batch)} s; first step, from opening the run folder to the")
        print(f"                checkpoint after it, {spread(step)} s")

    objective = MaskedPatchPrediction(Encoder("vit_base_patch16_224"))
    optimizer = make_optimizer(objective, opt="adamw", lr=1e-3)
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    stops, background, foreground = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer()
        for step in range(1, REPEATS + 2):
            began = time.perf_counter()
            writer.save(Path(folder) / "background", step, objective, optimizer)
            stops.append(time.perf_counter() - began)
            assert writer.wait() is None
            background.append(time.perf_counter() - began)
            began, snapshot = time.perf_counter(), Snapshot()
            snapshot.take(objective, optimizer)
            write_checkpoint(Path(folder) / "foreground", step, snapshot)
            foreground.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in (Path(folder) / "background").glob(f"step-{REPEATS + 1:08d}/*"))
    print(f"ViT-B/16 with AdamW, {size / 1e9:.2f} GB a checkpoint, seconds:")
    print(f"  the step stops for  {stops[0]:.3f} at the first save, then {spread(stops[1:])}")
    print(f"  all of the save     {spread(background[1:])}")
    print(f"  in the foreground   {spread(foreground[1:])}")
    where = environment()
    print(json.dumps({key: where[key] for key in ("python", "packages", "machine", "commit")}))


if __name__ == "__main__":
    main()

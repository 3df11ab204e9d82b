"""Prove on your own configuration that a run can be interrupted: `python -m mpp.verify_resume [overrides]`.

Takes any overrides of recipes/pretrain.py, and before or after them

    --steps 24         length of each run
    --kills 3          SIGKILLs of the second run
    --processes 2      of the elastic runs
    --seed 0           of the moments at which runs are killed

It trains a few steps uninterrupted; again, killed at random moments and started again until it is through; again with
another number of workers; and again on another number of processes, stopped by SIGTERM in between. Then it compares
what was trained on, step by step, and what came of it, and exits with 1 if anything differs that must not.

Every run is a process of its own, forked from a server that has imported everything, so that a start takes a second.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file

from mpp.data.loader import usable_cores
from mpp.recipes import configuration
from mpp.recipes.display import make_console
from mpp.recipes.pretrain import pretrain
from mpp.stopping import EXIT_CODE, end_with_parent
from mpp.train.run import read_lines

INPUTS = ("samples", "crops", "masks")
TOLERANCE = 1e-5  # of weights between numbers of processes
TIMINGS = ("images_per_second", "seconds_left", "data_wait")
PATIENCE = 20.0  # times what the uninterrupted run took, and a minute, after which a run counts as hanging


# ---------------------------------------------------------------------------------------------------- runs


def _child(overrides: list[str], log: str, threads: int, environment: dict[str, str]) -> None:
    """One process of a run: the recipe as a user would start it, in a process group of its own."""
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
    os.environ |= environment
    multiprocessing.set_start_method(None, force=True)  # data workers start as they do for the user
    torch.set_num_threads(threads)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["recipes/pretrain.py", *overrides]
    configuration.main("pretrain", pretrain)


@dataclass
class Trial:
    """A run in a folder of its own, started as often as it takes.

    Args:
        out: run folder.
        overrides: of the recipe.
        processes: how many, by default.
        patience: seconds for one start.
    """

    out: Path
    overrides: list[str]
    processes: int = 1
    patience: float = math.inf
    _group: list[Any] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What the run has printed."""
        return self.out.with_suffix(".log")

    def start(self, processes: int | None = None) -> None:
        """Start the processes."""
        processes = processes or self.processes
        context = multiprocessing.get_context("forkserver")
        port = _free_port()
        self._group = []
        for rank in range(processes):
            environment = {"NO_COLOR": "1"}
            if processes > 1:  # as torchrun does it
                environment |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                    "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
            process = context.Process(
                target=_child,
                args=(
                    [*self.overrides, f"out={self.out}"],
                    str(self.log),
                    usable_cores() // processes or 1,
                    environment,
                ),
            )
            process.start()
            self._group.append(process)

    def signal(self, number: int) -> None:
        """Send a signal to all process groups."""
        for process in self._group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def wait(self) -> list[int]:
        """Exit codes, in the order of ranks; negative for signals."""
        deadline = time.monotonic() + self.patience
        for process in self._group:
            process.join(None if math.isinf(deadline) else max(0.0, deadline - time.monotonic()))
        if any(process.is_alive() for process in self._group):
            self.signal(signal.SIGKILL)
            raise Failed(f"a process did not end within {self.patience:.0f} s; see {self.log}")
        return [process.exitcode for process in self._group]

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Wait until something has come about; False if the processes ended before."""
        deadline = time.monotonic() + self.patience
        while not reached():
            if not any(process.is_alive() for process in self._group):
                return False
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise Failed(f"no progress within {self.patience:.0f} s; see {self.log}")
            time.sleep(0.002)
        return True

    def trace(self) -> list[dict[str, Any]]:
        """The lines of trace.jsonl."""
        return read_lines(self.out / "trace.jsonl")

    def done(self) -> int:
        """Steps in trace.jsonl so far."""
        trace = self.out / "trace.jsonl"
        return trace.read_bytes().count(b"\n") if trace.is_file() else 0

    def status(self) -> dict[str, Any]:
        """status.json."""
        return dict(json.loads((self.out / "status.json").read_text()))

    def checkpoint(self) -> Path | None:
        """The last checkpoint."""
        return max(self.out.glob("checkpoints/step-*"), default=None)


class Failed(Exception):  # noqa: N818
    """A run that cannot be judged: it hangs, or fails without being interrupted."""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# ---------------------------------------------------------------------------------------------------- comparing


def first_difference(wanted: list[dict[str, Any]], got: list[dict[str, Any]], keys: tuple[str, ...] = ()) -> str:
    """The first step at which two lists of lines differ, in words, or "". No `keys`: all but timings."""
    steps = [line["step"] for line in got]
    if doubled := next((step for step in steps if steps.count(step) > 1), None):
        return f"step {doubled} is there twice"
    if missing := sorted({line["step"] for line in wanted} - set(steps)):
        return f"step {missing[0]} is missing"
    if len(got) != len(wanted):
        return f"{len(got)} lines instead of {len(wanted)}"
    for one, other in zip(wanted, got, strict=True):
        for key in keys or sorted((one.keys() | other.keys()) - set(TIMINGS)):
            if one.get(key) != other.get(key):
                return f"step {one['step']}: {key} is {other.get(key)} instead of {one.get(key)}"
    return ""


def tensor_difference(wanted: Path, got: Path, *, tolerance: float = 0.0) -> tuple[str, float]:
    """The first tensor in which two safetensors files differ by more than `tolerance`, in words, or "", and the
    largest difference of all."""
    one, other, largest, found = load_file(wanted), load_file(got), 0.0, ""
    if one.keys() != other.keys():
        return f"names differ: {', '.join(sorted(one.keys() ^ other.keys())[:3])}", math.inf
    for name in one:
        same = one[name].shape == other[name].shape
        difference = (
            float((one[name].double() - other[name].double()).abs().max()) if same and one[name].numel() else 0.0
        )
        largest = max(largest, difference)
        equal = one[name].equal(other[name]) if tolerance == 0 else same and difference <= tolerance
        if not equal and not found:
            found = f"{name} differs by {difference:.1e}"
    return found, largest


# ---------------------------------------------------------------------------------------------------- the proof


@dataclass
class Row:
    """A line of the table."""

    promise: str
    problem: str
    detail: str

    @property
    def held(self) -> str:
        """The verdict, for the table."""
        return "FAIL" if self.problem else "pass"


def verify(
    folder: Path,
    overrides: list[str],
    *,
    steps: int,
    kills: int,
    processes: int,
    seed: int,
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Run everything below `folder`; the rows of the table. `say` hears what is being done."""
    rng = random.Random(seed)
    # Saves in the middle of logging intervals as well as at their ends.
    every = max(2, steps // 6)
    shared = [*overrides, f"train.steps={steps}", "train.log_every=3", f"train.save_every={every}", "train.trace=true"]
    rows: list[Row] = []

    say(f"{steps} steps uninterrupted")
    began = time.monotonic()
    straight = Trial(folder / "straight", shared)
    straight.start()
    if problem := _ended(straight):
        raise Failed(f"the run itself fails without being interrupted ({problem}):\n{straight.log.read_text()[-2000:]}")

    # ------------------------------------------------------------------ SIGKILL
    patience = 60 + PATIENCE * (time.monotonic() - began)
    say(f"the same, killed {kills} times")
    killed, moments = Trial(folder / "killed", shared, patience=patience), []
    for target in sorted(rng.sample(range(steps), kills)):
        killed.start()
        if killed.wait_for(lambda: killed.done() >= target):  # noqa: B023
            time.sleep(rng.random() * 0.3)  # in the middle of a step, or of a checkpoint
            killed.signal(signal.SIGKILL)
        if killed.wait() == [-signal.SIGKILL]:
            moments.append(killed.done())
    killed.start()
    problem = _ended(killed)
    if not moments and kills:
        problem = problem or "the run was over before a kill; use more --steps"
    rows.append(Row("SIGKILL: it finishes", problem, f"killed after step {', '.join(map(str, moments)) or 'none'}"))
    rows += _compare("SIGKILL", straight, killed)

    # ------------------------------------------------------------------ another number of workers
    now = 0 if any(override.startswith("train.workers=") and override[-1] != "0" for override in overrides) else 2
    say(f"the same with {now} workers")
    other = Trial(folder / "workers", [*shared, f"train.workers={now}"], patience=patience)
    other.start()
    rows.append(Row("workers: it finishes", _ended(other), f"with {now} workers"))
    rows += _compare("workers", straight, other)

    # ------------------------------------------------------------------ SIGTERM, and another number of processes
    devices = torch.cuda.device_count()
    between: list[str] = []
    note = ""
    if 0 < devices < processes:
        note = f"; {processes} processes need as many devices, accumulated instead"
        processes, between = 1, ["train.accumulation=2"]
    say(f"the same on 1, {processes} and 1 processes, stopped in between")
    elastic, problem, parts = Trial(folder / "elastic", shared, patience=patience), "", []
    for part, (count, also) in enumerate([(1, list[str]()), (processes, between)]):
        elastic.overrides = [*shared, *also]
        elastic.start(count)
        target = (part + 1) * steps // 3
        if elastic.wait_for(lambda: elastic.done() >= target):  # noqa: B023
            elastic.signal(signal.SIGTERM)
        codes, status = elastic.wait(), elastic.status()
        parts.append(f"{count} to step {status['step']}")
        if set(codes) != {EXIT_CODE} or (status["state"], status["exit_code"]) != ("preempted", EXIT_CODE):
            problem = problem or f"exit codes {codes}, status {status['state']}, see {elastic.log}"
    elastic.overrides = shared
    elastic.start()
    problem = problem or _ended(elastic)
    detail = f"processes: {', '.join(parts)}, 1 to the end{note}"
    rows.append(Row(f"SIGTERM: saves, exit code {EXIT_CODE}, status.json", problem, detail))
    wanted, got = straight.trace(), elastic.trace()
    rows.append(
        Row(
            "elastic: same samples, crops, masks, rates",
            first_difference(wanted, got, (*INPUTS, "lr")),
            f"{steps} steps",
        )
    )
    problem, largest = _tensors(straight, elastic, "model", tolerance=TOLERANCE)
    rows.append(Row(f"elastic: same weights to {TOLERANCE:g}", problem, f"largest difference {largest:.1e}"))
    return rows


def _ended(trial: Trial) -> str:
    """Wait for a run; what is wrong with how it ended, or ""."""
    codes = trial.wait()
    return "" if set(codes) == {0} else f"exit code {', '.join(map(str, codes))}, see {trial.log}"


def _tensors(one: Trial, other: Trial, file: str, *, tolerance: float = 0.0) -> tuple[str, float]:
    wanted, got = one.checkpoint(), other.checkpoint()
    if wanted is None or got is None or wanted.name != got.name:
        return "the last checkpoint is of another step", math.inf
    name = f"{file}.safetensors"
    return tensor_difference(wanted / name, got / name, tolerance=tolerance)


def _compare(name: str, one: Trial, other: Trial) -> list[Row]:
    """What must be equal to the last bit."""
    wanted, got = one.trace(), other.trace()
    metrics = first_difference(read_lines(one.out / "metrics.jsonl"), read_lines(other.out / "metrics.jsonl"))
    rows = [
        Row(f"{name}: same samples, crops, masks", first_difference(wanted, got, INPUTS), f"{len(wanted)} steps"),
        Row(f"{name}: same losses and rates", first_difference(wanted, got, ("loss", "lr")), f"{len(wanted)} steps"),
        Row(f"{name}: same lines in metrics.jsonl", metrics, f"{len(read_lines(one.out / 'metrics.jsonl'))} lines"),
    ]
    for file in ("model", "optimizer", "ema"):
        last = one.checkpoint()
        path = last / f"{file}.safetensors" if last is not None else None
        if path is not None and path.is_file():
            size = f"{path.stat().st_size:,} bytes"
            rows.append(Row(f"{name}: same {file}, bit for bit", _tensors(one, other, file)[0], size))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m mpp.verify_resume",
        usage="%(prog)s [--steps N] [--kills N] [--processes N] [--seed N] [--keep DIR] [overrides]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )
    parser.add_argument("--steps", type=int, default=24, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, default=None, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    if unknown := [override for override in overrides if override.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}")
    ours = ("out=", "train.steps=", "train.epochs=", "train.log_every=", "train.save_every=", "train.trace=")
    if given := [override for override in overrides if override.startswith(ours)]:
        parser.error(f"{given[0]} is set by this command; --steps gives the length, --keep a folder for the runs")
    if not (options.steps >= 6 and 0 <= options.kills < options.steps and options.processes >= 2):
        parser.error("give --steps of at least 6, fewer --kills than steps, and --processes of at least 2")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mpp.recipes.pretrain"])
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep {options.keep} is there already; name a new folder")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="mpp-verify-"))
    folder.mkdir(parents=True, exist_ok=True)
    began, console = time.monotonic(), make_console()
    try:
        rows = verify(folder, overrides, steps=options.steps, kills=options.kills, processes=options.processes,
                      seed=options.seed, say=console.print)  # fmt: skip
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    console.print(table(rows))
    failed = sum(row.held == "FAIL" for row in rows)
    seconds = time.monotonic() - began
    if failed and torch.cuda.is_available():
        console.print(
            "On a GPU some kernels sum in another order each time; two uninterrupted runs may differ as well."
        )
    console.print(
        f"{len(rows) - failed} of {len(rows)} hold; {options.steps} steps, kills seeded with {options.seed}, "
        f"{seconds:.0f} s" + (f"; the runs are in {folder}" if failed or options.keep else "")
    )
    if not failed and options.keep is None:
        shutil.rmtree(folder)
    sys.exit(1 if failed else 0)


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    shown = Table()
    for heading in ("promise", "", "what was seen"):
        shown.add_column(heading, overflow="fold")
    for row in rows:
        style = "bold red" if row.held == "FAIL" else "green"
        shown.add_row(row.promise, f"[{style}]{row.held}[/{style}]", escape(row.problem or row.detail))
    return shown


if __name__ == "__main__":
    main()

"""The run folder: everything a run leaves behind, and what the same command finds when it is started again.

out/config.yaml        the resolved configuration
    environment.json   versions, commit, machine, processes
    data.json          number of training images, and a checksum of their names and labels
    status.json        running, finished, preempted or failed, at which step, and the exit code that launchers hide
    metrics.jsonl      one line for each logging interval
    trace.jsonl        one line a step, checksums of what was trained on, if asked for
    bad_images.txt     images that could not be read and were replaced, if there are any
    skipped.jsonl      steps that were left out after a rollback, with their sample ids, if there are any
    faults/            the checkpoints those rollbacks went back to, for `python -m mpp.replay`
    checkpoints/       see checkpoint.py
    encoder/           the exported encoder (weights.py)
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from mpp.errors import LocalError, UserError
from mpp.stopping import Preempted
from mpp.train.checkpoint import Writer, checkpoints, clean, load_checkpoint, put_aside, remove, verify
from mpp.train.lock import Lock

# What may differ between the run that was and the one that continues it. Samples, crops, masks and the size of the
# batch do not depend on any of these; `train.steps` stretches the schedule.
MAY_CHANGE = {
    "out",
    "train.steps",
    "train.epochs",
    "train.accumulation",
    "train.max_batch_per_device",
    "train.workers",
    "train.log_every",
    "train.save_every",
    "train.keep",
    "train.keep_every",
    "train.tracker",
    "train.trace",
    "train.spike",
    "train.max_rollbacks",
    "train.max_bad",
}
PACKAGES = ("torch", "timm", "accelerate", "datasets", "hydra-core", "einops", "numpy", "pillow", "safetensors")
Result = TypeVar("Result")


class Run:
    """One run's folder, held against other processes until `close` or the end of the `with` block. Only the main
    process reads and writes it, but for `restore`.

    Args:
        out: the folder; made if it is not there.
        config: the resolved configuration, JSON-like.
        main: whether this is the main process.
        after: groups of the configuration that come after training and may differ when a run is continued.
        keep, keep_every: checkpoints to keep: the last so many, and those of every so many-th step.
        data: gives what a run that is continued must find again, `Data.fingerprint`.

    Attributes:
        changed: "key: before -> now" of what differs from the run that is continued, all of it allowed.

    Raises:
        UserError: the folder is in use, holds a run with another configuration (names the keys), or cannot be written.
    """

    def __init__(
        self,
        out: str | Path,
        config: dict[str, Any],
        *,
        main: bool = True,
        after: tuple[str, ...] = (),
        keep: int = 2,
        keep_every: int | None = None,
        data: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        if keep < 2:
            raise UserError(f"train.keep={keep}: keep at least 2 checkpoints, so that there is one to fall back to")
        self.out, self.config, self.main = Path(out), config, main
        self.checkpoints = self.out / "checkpoints"
        self.metrics, self.trace = Lines(self.out / "metrics.jsonl"), Lines(self.out / "trace.jsonl")
        self.bad_images, self._skipped = self.out / "bad_images.txt", self.out / "skipped.jsonl"
        self.changed: list[str] = []
        self.save_failed = ""
        self._keep, self._keep_every = keep, keep_every
        self._writer, self._began, self._last = Writer(), time.strftime("%Y-%m-%dT%H:%M:%S%z"), 0
        self._saving = 0
        self._lock: Lock | None = None
        if not main:
            return
        try:
            with self._writable():
                self._lock = Lock(self.out)
                self._check(after)
                fingerprint = data()
                self._check_data(fingerprint)
                clean(self.checkpoints)
                replace_text(self.out / "config.yaml", to_yaml(config))
                write_json(self.out / "environment.json", environment())
                write_json(self.out / "data.json", fingerprint)
        except UserError:
            self.close()
            raise
        self.status("running", step=self.step())

    def _check(self, after: tuple[str, ...]) -> None:
        wanted = self.config.get("train", {}).get("steps")
        if isinstance(wanted, int) and self.step() > wanted:
            raise UserError(
                f"{self.out} holds a run of {self.step():,} steps, more than train.steps={wanted:,}; "
                "give more, or choose another out="
            )
        before = load_config(self.out) if (self.out / "config.yaml").is_file() else None
        if before is None:
            if self.step():
                raise UserError(
                    f"{self.out} holds a run without its config.yaml; put that back, or choose another out="
                )
            return
        old, new = flatten(before), flatten(self.config)
        groups = tuple(f"{group}." for group in after)
        different = [
            key
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not key.startswith(groups)
        ]
        differences = {key: f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}" for key in different}
        refused = [line for key, line in differences.items() if key not in MAY_CHANGE]
        trained = self.step() > 0 or any(self.checkpoints.glob("damaged-*")) or (self.out / "results.json").is_file()
        if not trained:
            if refused:  # nothing was trained yet: what another configuration left is of no use
                for _, path in checkpoints(self.checkpoints):
                    remove(path)
                for path in (self._skipped, self.bad_images):
                    path.unlink(missing_ok=True)
            return
        if refused:
            raise UserError(
                f"{self.out} holds a run with another configuration ({'; '.join(refused)}); "
                "continue it with its own, or choose another out="
            )
        self.changed = [line for key, line in differences.items() if key != "out"]

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """What the disk refuses, as a UserError."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error).splitlines()[0][:200]
            raise UserError(f"out={self.out}: cannot write there ({reason})") from error

    def _check_data(self, now: dict[str, Any]) -> None:
        """Samples are known by their number, so a file that comes or goes would give all others other numbers."""
        file = self.out / "data.json"
        try:
            before = json.loads(file.read_text()) if self.step() and file.is_file() else now
        except ValueError:
            before = now  # damaged: nothing to compare with
        if before != now:
            raise UserError(
                f"the data are not those that {self.out} was begun with: {before.get('images')} training images then, "
                f"{now.get('images')} now, or other names, labels or order; bring them back, or choose another out="
            )

    # ------------------------------------------------------------------ its end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Preempted):
            self.status("preempted", exit_code=error.exit_code, signal=error.signal)
        elif isinstance(error, KeyboardInterrupt):
            self.status("preempted", exit_code=130, signal="SIGINT")
        elif error is not None:
            code, name = (2, "") if isinstance(error, UserError) else (1, f"{type(error).__name__}: ")
            self.status("failed", exit_code=code, message=f"{name}{error}")
        else:
            self.status("finished", exit_code=0)
        self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and let others have the folder."""
        self._writer.wait()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def status(self, state: str, *, step: int | None = None, **more: Any) -> None:
        """Write status.json (main process); a disk that takes nothing is no reason to stop."""
        self._last = self._last if step is None else step
        now = {
            "state": state,
            "step": self._last,
            **more,
            "process": os.getpid(),
            "host": platform.node(),
            "began": self._began,
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        if self.main:
            with suppress(OSError):
                # Not flushed to disk: it would stop the step, and after a power cut it is outdated anyway.
                replace_text(self.out / "status.json", json.dumps(now, indent=2) + "\n", flush=False)

    # ------------------------------------------------------------------ checkpoints

    def step(self) -> int:
        """Steps done at the last checkpoint, 0 without one."""
        found = checkpoints(self.checkpoints)
        return found[-1][0] if found else 0

    def saved_steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first."""
        return [step for step, _ in checkpoints(self.checkpoints)]

    def choose(self, at_most: int | None = None, say: Callable[[str], object] = print) -> int | None:
        """The step of the last sound checkpoint, None if there is none at all (main process).

        Damaged ones are renamed to `damaged-...` and `say` hears of it. Those after `at_most` are removed: they belong
        to a timeline that is left.

        Raises:
            UserError: there were checkpoints, and all of them are damaged.
        """
        for step, path in reversed(checkpoints(self.checkpoints)):
            if at_most is not None and step > at_most:
                remove(path)
            elif problem := verify(path):
                say(f"checkpoint {path} is damaged ({problem}); kept as {put_aside(path).name}, using the one before")
            else:
                return step
        if damaged := sorted(self.checkpoints.glob("damaged-*")):
            raise UserError(
                f"every checkpoint in {self.checkpoints} is damaged ({', '.join(path.name for path in damaged)}); "
                f"bring one back, or remove {self.checkpoints} to start from the beginning"
            )
        return None

    def restore(
        self, step: int | None, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None
    ) -> dict[str, Any]:
        """Go to the checkpoint of a step (every process), and drop the lines of later steps (main process).

        Returns:
            state.json; {"step": 0} for None, where model and optimizer are left as they are.

        Raises:
            UserError: it is damaged or of another model.
            LocalError: this process does not see it.
        """
        state: dict[str, Any] = {"step": 0}
        if step is not None:
            path = self.checkpoints / f"step-{step:08d}"
            if not path.is_dir():
                raise LocalError(f"{path} is not there for every process; give every machine the same run folder")
            state = load_checkpoint(path, model, optimizer, ema)
        if self.main:
            # Lines after the checkpoint belong to steps that will be done again.
            with self._writable():
                self.metrics.truncate(state["step"])
                self.trace.truncate(state["step"])
            self.status("running", step=state["step"])
        return state

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: nn.Module | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Begin to write a checkpoint (main process); `saved` tells how it went."""
        if self.main:
            assert self._writer.wait() is None, "ask `saved` first"
            also = {**(state or {}), "world": int(os.environ.get("WORLD_SIZE", "1"))}
            lines = [lines.path for lines in (self.metrics, self.trace) if lines.path.is_file()]
            how = {"keep": self._keep, "keep_every": self._keep_every, "flush": lines, "state": also}
            self._writer.save(self.checkpoints, step, model, optimizer, ema, **how)
            self._saving = step

    def saved(self, *, block: bool = True) -> str:
        """Wait for the checkpoint that is being written, if any: what went wrong with it, or "" (main process).

        `save_failed` holds the outcome of the last one. Without `block`, "" also if it is still being written.
        """
        writing = self._writer.pending
        error = self._writer.wait(block=block)
        if error is not None:
            self.save_failed = f"cannot write a checkpoint to {self.checkpoints} ({error.strerror or error})"
            return self.save_failed
        if writing and not self._writer.pending:
            self.save_failed = ""
            self.status("running", step=self._saving)
        return ""

    # ------------------------------------------------------------------ lines

    def log(self, row: dict[str, Any]) -> str:
        """Append a line to metrics.jsonl (main process); what went wrong, or "". Lines that the disk does not take are
        written with the next one."""
        return self.metrics.append([row]) if self.main else ""

    def skipped(self) -> list[dict[str, Any]]:
        """The rows of skipped.jsonl: steps `first` to `last`, from 0, that are left out, `reason`, and `ids` of each.

        Raises:
            UserError: the file is damaged.
        """
        return read_skipped(self.out)

    def skip(self, row: dict[str, Any], checkpoint: int | None) -> None:
        """Append to skipped.jsonl, and keep the checkpoint that training goes back to (main process)."""
        text = "".join(json.dumps(one) + "\n" for one in (*self.skipped(), row))
        with self._writable():
            replace_text(self._skipped, text)
            if checkpoint is not None:
                kept = self.out / "faults" / f"step-{row['first']:08d}" / "checkpoints"
                shutil.rmtree(kept, ignore_errors=True)
                source = self.checkpoints / f"step-{checkpoint:08d}"
                shutil.copytree(source, kept / source.name, copy_function=_link)

    def known_bad(self) -> dict[int, str]:
        """The lines of bad_images.txt: number of the sample -> file and reason."""
        if not self.bad_images.is_file():
            return {}
        lines = self.bad_images.read_text(encoding="utf-8", errors="replace").split("\n")
        parts = (line.partition("\t") for line in lines)
        return {int(number): message for number, tab, message in parts if tab and number.isdecimal()}

    def note_bad(self, bad: dict[int, str]) -> None:
        """Append to bad_images.txt (main process)."""
        if self.main:
            lines = "".join(f"{number}\t{' '.join(message.splitlines())}\n" for number, message in bad.items())
            with suppress(OSError):
                _append(self.bad_images, lines)


class Lines:
    """A file of JSON lines, each with its `step`, that loses none to a full disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []

    def append(self, rows: Iterable[dict[str, Any]]) -> str:
        """Add lines; what went wrong, or ""."""
        self._unwritten += [json.dumps(row) + "\n" for row in rows]
        try:
            _append(self.path, "".join(self._unwritten))
        except OSError as error:
            return f"cannot write {self.path} ({error.strerror or error}); its lines are kept for later"
        self._unwritten.clear()
        return ""

    def truncate(self, step: int) -> None:
        """Drop lines of steps after `step`, and what a crash cut short."""
        self._unwritten.clear()
        if self.path.is_file():
            before = self.path.read_text(errors="replace")
            after = "".join(line + "\n" for line in before.split("\n") if _step_of(line) <= step)
            if after != before:
                replace_text(self.path, after)


def on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """What `function` returns on the main process, on every process; a UserError is raised on every one as well."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = str(error)
    result, error_text = broadcast_object_list(outcome)
    if error_text is not None:
        raise UserError(error_text)
    return result


def read_skipped(out: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder's skipped.jsonl, none without it (see `Run.skipped`)."""
    file = Path(out) / "skipped.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        for row in rows:
            range(row["first"], row["last"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({error}); it tells which steps are left out: repair its lines, or remove the file to "
            "train them after all"
        ) from error
    return rows


def read_metrics(out: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a run folder's metrics.jsonl, none without it."""
    return read_lines(Path(out) / "metrics.jsonl")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of JSON lines that have a step, none without the file."""
    lines = file.read_text(errors="replace").split("\n") if file.is_file() else []
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]


def _append(file: Path, lines: str) -> None:
    """Append whole lines or, where the disk does not take them, nothing."""
    whole = file.stat().st_size if file.is_file() else 0
    try:
        with file.open("a", encoding="utf-8", errors="backslashreplace") as opened:
            opened.write(lines)
    except OSError:
        with suppress(OSError):
            os.truncate(file, whole)
        raise


def _link(source: str, target: str) -> None:
    """A second name for a file, or a copy where there are no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a crash cut short


def load_config(out: str | Path) -> dict[str, Any]:
    """The configuration of a run folder."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(Path(out) / "config.yaml"))
    except (ValueError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{out}/config.yaml cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(f"{out}/config.yaml is not a configuration")
    return {str(key): value for key, value in loaded.items()}


def to_yaml(config: dict[str, Any]) -> str:
    """YAML text of a JSON-like configuration."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people, replacing the file in one step."""
    replace_text(path, json.dumps(content, indent=2) + "\n")


def replace_text(path: Path, text: str, *, flush: bool = True) -> None:
    """Write a file in one step: another process reads the old text or the new one, never a part."""
    beside = path.with_name(f".{path.name}")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            if flush:  # or a machine that loses power may keep the new name of an empty file
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def environment() -> dict[str, Any]:
    """What a reader needs to place a run's numbers: versions, machine, processes and the commit."""
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--untracked-files=no"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package, None where that is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

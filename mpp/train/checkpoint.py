"""Checkpoints without pickle: a folder that is complete or not there at all, and that knows its own checksums.

    checkpoints/step-00001000/model.safetensors      the objective's state dict
                              ema.safetensors        its running average, if one is kept
                              optimizer.safetensors  "<parameter>|<moment>" for each optimizer moment
                              state.json             the step and what the caller adds
                              manifest.json          size and SHA-256 of each of these files

A checkpoint is copied to host memory, then written by a thread to a hidden folder beside, flushed to disk and renamed.
Only then are older ones removed, so a crash at any byte leaves the one before. There is no state of generators or
samplers to save: data and randomness are functions of the step.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mpp.errors import UserError

_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "manifest.json"


# ---------------------------------------------------------------------------------------------------- to host memory


@dataclass
class Snapshot:
    """A copy in host memory of everything that is trained: file names -> tensors, and what optimizers keep as numbers.

    As float32 tensors such numbers would be rounded, so they go to state.json.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None) -> None:
        """Copy the present state, into the memory of the copy before where there was one."""
        moments = _moments(model, optimizer)
        parts = {
            "model.safetensors": model.state_dict(),
            "optimizer.safetensors": {key: value for key, value in moments.items() if isinstance(value, Tensor)},
        }
        if ema is not None:
            parts["ema.safetensors"] = ema.state_dict()
        self.tensors = {file: self._copy(file, tensors) for file, tensors in parts.items()}
        self.numbers = {key: value for key, value in moments.items() if not isinstance(value, Tensor)}
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            torch.accelerator.synchronize()  # the copies were only queued

    def _copy(self, file: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        before, copies = self.tensors.get(file, {}), {}
        for name, tensor in tensors.items():
            host, on_cpu = before.get(name), tensor.device.type == "cpu"
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            copies[name] = host.copy_(tensor.detach(), non_blocking=not on_cpu)
        return copies

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())


# ---------------------------------------------------------------------------------------------------- to disk


def write_checkpoint(
    folder: Path,
    step: int,
    snapshot: Snapshot,
    state: dict[str, Any] | None = None,
    *,
    keep: int = 2,
    keep_every: int | None = None,
    flush: Iterable[Path] = (),
) -> Path:
    """Write the checkpoint of a step, then remove all but the last `keep` and every `keep_every`-th step.

    Args:
        folder: of all checkpoints.
        step: steps done.
        snapshot: what to write.
        state: JSON-like, joins state.json.
        keep, keep_every: what remains; see above.
        flush: files that must be on disk before this checkpoint is: the metrics of its steps.

    Raises:
        OSError: the disk is full or read-only; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, beside = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    if shutil.disk_usage(folder).free < 1.1 * snapshot.num_bytes:
        # Rather than fill a disk that others write to as well.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        for file, tensors in snapshot.tensors.items():
            _save(tensors, beside / file)
        _write_json(beside / "state.json", {"step": step, "optimizer_numbers": snapshot.numbers, **(state or {})})
        for file in snapshot.tensors:
            shutil.copymode(beside / "state.json", beside / file)  # safetensors' own is for the owner alone
        written = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in beside.iterdir()}
        _write_json(beside / _MANIFEST, written)
        for path in (*flush, *beside.iterdir(), beside):
            _flush(path)
        if final.exists():  # of a timeline that was left
            remove(final)
        beside.rename(final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for old, path in checkpoints(folder)[:-keep]:
        if not keep_every or old == 0 or old % keep_every:
            remove(path)
    return final


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a crash leaves no half of one."""
    trash = path.with_name(f".trash-{path.name}")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what a crash left half written or half removed."""
    for pattern in (".writing-*", ".trash-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> str:
    """What is wrong with a checkpoint by its own manifest, in words, or ""."""
    name = _MANIFEST
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, wanted in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != wanted["bytes"]:
                return f"{name} has {file.stat().st_size:,} bytes instead of {wanted['bytes']:,}"
            if _sha256(file) != wanted["sha256"]:
                return f"{name} has another checksum"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{_MANIFEST} cannot be read ({error})"
    missing = {"model.safetensors", "optimizer.safetensors", "state.json"} - manifest.keys()
    return f"{_MANIFEST} lacks {', '.join(sorted(missing))}" if missing else ""


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither used nor rotated away."""
    numbers = (f"damaged-{path.name}" + (f"-{i}" if i else "") for i in range(1000))
    aside = next(path.with_name(name) for name in numbers if not path.with_name(name).exists())
    path.rename(aside)
    return aside


class Writer:
    """Writes checkpoints in a thread, one at a time; a save waits for the one before and then only for the copy."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._snapshot = Snapshot()
        self._pending: Future[Path] | None = None

    @property
    def pending(self) -> bool:
        """Whether `wait` has an outcome to tell."""
        return self._pending is not None

    def save(
        self,
        folder: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: nn.Module | None = None,
        **how: Any,
    ) -> None:
        """Copy the state and leave the rest of `write_checkpoint` to the thread; first call `wait`."""
        assert self._pending is None
        self._snapshot.take(model, optimizer, ema)
        self._pending = self._thread.submit(write_checkpoint, folder, step, self._snapshot, **how)

    def wait(self, *, block: bool = True) -> OSError | None:
        """The outcome of the last save: None if it went well or, without `block`, is still being written."""
        if self._pending is None or (not block and not self._pending.done()):
            return None
        wait([self._pending])  # before it is forgotten: a signal may end the waiting, not the writing
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except OSError as error:
            return error
        return None


# ---------------------------------------------------------------------------------------------------- back


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, ema: nn.Module | None = None
) -> dict[str, Any]:
    """Restore model, optimizer and running average in place; returns state.json.

    Raises:
        UserError: the files are damaged or of another model.
    """
    try:
        if problem := verify(path):
            raise ValueError(problem)
        state = json.loads((path / "state.json").read_text())
        model.load_state_dict(load_file(path / "model.safetensors"))
        if optimizer is not None:
            saved = {**load_file(path / "optimizer.safetensors"), **state.pop("optimizer_numbers")}
            _set_moments(model, optimizer, saved)
        if ema is not None:
            ema.load_state_dict(load_file(path / "ema.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot resume from {path} ({reason})") from error
    return dict(state)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer remembers: "<parameter>|<moment>", and "<number of group>|step" where a group counts steps."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}|{moment}": value
        for parameter, its_moments in optimizer.state.items()
        for moment, value in its_moments.items()
    }
    groups = {f"{i}|step": group["step"] for i, group in enumerate(optimizer.param_groups) if "step" in group}
    return moments | groups


def _set_moments(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Through `load_state_dict`, which moves every moment to its parameter's device and type."""
    number: dict[Tensor, int] = {}
    state = optimizer.state_dict()
    for group, numbered in zip(optimizer.param_groups, state["param_groups"], strict=True):
        number.update(zip(group["params"], numbered["params"], strict=True))
    by_name = dict(model.named_parameters())
    moments: dict[int, dict[str, Any]] = {}
    for group in state["param_groups"]:  # of a step that rolled back, where nothing was remembered yet
        group.pop("step", None)
    for key, value in saved.items():
        name, moment = key.rsplit("|", 1)
        if name.isdecimal():
            state["param_groups"][int(name)][moment] = value
        else:
            moments.setdefault(number[by_name[name]], {})[moment] = value
    optimizer.load_state_dict({**state, "state": moments})
    if _moments(model, optimizer).keys() != saved.keys():
        raise ValueError("this optimizer does not take back what it remembered")


# ---------------------------------------------------------------------------------------------------- files


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # what safetensors makes of a write that fails
        raise OSError(errno.EIO, str(error), str(path)) from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

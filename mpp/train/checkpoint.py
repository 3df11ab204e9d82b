"""Checkpoints without pickle: a folder with two safetensors files and one JSON, complete or not there at all.

    checkpoints/step-00001000/model.safetensors      the objective's state dict
                              optimizer.safetensors  "<parameter>|<moment>" for each optimizer moment
                              state.json             the step and what the caller adds

A checkpoint is written to a hidden folder beside, flushed to disk and renamed, so that a crash leaves the one before.
There is no state of generators or samplers to save: data and randomness are functions of the step.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mpp.errors import UserError

_NAME = re.compile(r"step-(\d{8,})")


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2, **state: Any
) -> Path:
    """Write the checkpoint of a step and then remove all but the last `keep`. Call it on one process alone.

    Raises:
        OSError: the disk is full or read-only; earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final, beside = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        save_file(_on_cpu(model.state_dict()), beside / "model.safetensors")
        save_file(_on_cpu(_moments(model, optimizer)), beside / "optimizer.safetensors")
        counters = [_counters(group) for group in optimizer.param_groups]
        description = {"step": step, "optimizer_groups": counters, **state}
        (beside / "state.json").write_text(json.dumps(description, indent=2) + "\n")
        for path in (*beside.iterdir(), beside):
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        beside.rename(final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for _, old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Restore model and optimizer in place; returns state.json.

    Raises:
        UserError: the files are damaged or of another model.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        model.load_state_dict(load_file(path / "model.safetensors"))
        if optimizer is not None:
            _set_moments(model, optimizer, load_file(path / "optimizer.safetensors"))
            for group, counters in zip(optimizer.param_groups, state["optimizer_groups"], strict=True):
                group.update({name: torch.tensor(count) for name, count in counters.items()})
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot resume from {path} ({reason}); remove that folder to continue from the one before"
        ) from error
    return dict(state)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _counters(group: dict[str, Any]) -> dict[str, float]:
    """What an optimizer counts for a whole group (timm's LAMB its steps); settings come from the configuration."""
    return {"step": float(group["step"])} if "step" in group else {}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}|{moment}": torch.as_tensor(value)
        for parameter, moments in optimizer.state.items()
        for moment, value in moments.items()
    }


def _set_moments(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """Through `load_state_dict`, which moves every moment to its parameter's device and type."""
    number: dict[Tensor, int] = {}
    state = optimizer.state_dict()
    for group, numbered in zip(optimizer.param_groups, state["param_groups"], strict=True):
        number.update(zip(group["params"], numbered["params"], strict=True))
    by_name = dict(model.named_parameters())
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, moment = key.rsplit("|", 1)
        moments.setdefault(number[by_name[name]], {})[moment] = value
    optimizer.load_state_dict({**state, "state": moments})


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

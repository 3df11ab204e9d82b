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
        moments = _moments(model, optimizer)
        tensors = {key: value for key, value in moments.items() if isinstance(value, Tensor)}
        save_file(_on_cpu(tensors), beside / "optimizer.safetensors")
        # What an optimizer keeps as Python numbers comes back as such: as float32 tensors they would be rounded.
        numbers = {key: value for key, value in moments.items() if not isinstance(value, Tensor)}
        description = {"step": step, "optimizer_numbers": numbers, **state}
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
            saved = {**load_file(path / "optimizer.safetensors"), **state.pop("optimizer_numbers")}
            _set_moments(model, optimizer, saved)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot resume from {path} ({reason}); remove that folder to continue from the one before"
        ) from error
    return dict(state)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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
    for key, value in saved.items():
        name, moment = key.rsplit("|", 1)
        if name.isdecimal():
            state["param_groups"][int(name)][moment] = value
        else:
            moments.setdefault(number[by_name[name]], {})[moment] = value
    optimizer.load_state_dict({**state, "state": moments})
    if _moments(model, optimizer).keys() != saved.keys():
        raise ValueError("this optimizer does not take back what it remembered")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

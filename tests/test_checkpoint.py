"""Checkpoints: bit for bit there and back, atomic, checked, rotated; written in the background."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import build, digits, equal, moments, train

from mpp import UserError
from mpp.data.loader import Images
from mpp.recipes.common import make_optimizer
from mpp.train.checkpoint import Snapshot, checkpoints, load_checkpoint, write_checkpoint


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2, **state: Any
) -> Path:
    snapshot = Snapshot()
    snapshot.take(model, optimizer)
    return write_checkpoint(folder, step, snapshot, state, keep=keep)


@pytest.fixture(scope="module")
def images() -> Images:
    return digits()


@pytest.mark.parametrize("opt", ["adamw", "momentum", "lamb", "laprop"])
def test_a_checkpoint_restores_model_and_optimizer_bit_for_bit(tmp_path: Path, images: Images, opt: str):
    """What is restored also goes on as if it had never stopped."""
    objective = build()
    optimizer = train(objective, images, 3, opt=opt)
    path = save(tmp_path, 3, objective, optimizer, note="hello")
    again = build(seed=1)
    optimizer_again = make_optimizer(again, opt=opt, lr=1.0, weight_decay=0.1)
    assert not equal(again.state_dict(), objective.state_dict())
    state = load_checkpoint(path, again, optimizer_again)
    assert (state["step"], state["note"]) == (3, "hello")
    assert equal(again.state_dict(), objective.state_dict())
    assert moments(optimizer)
    assert equal(moments(optimizer_again), moments(optimizer))
    batch = images[0, torch.arange(8)]
    for one, its_optimizer in ((objective, optimizer), (again, optimizer_again)):
        for group in its_optimizer.param_groups:
            group["lr"] = 1e-3
        its_optimizer.zero_grad()
        one(batch)["loss"].backward()
        its_optimizer.step()
    assert equal(again.state_dict(), objective.state_dict())


def test_the_last_two_are_kept_and_unfinished_ones_ignored(tmp_path: Path):
    objective = build()
    optimizer = make_optimizer(objective, opt="adamw", lr=1e-3)
    assert checkpoints(tmp_path / "none") == []
    (tmp_path / ".writing-00000009").mkdir()
    for step in (2, 10, 100):
        save(tmp_path, step, objective, optimizer)
    assert checkpoints(tmp_path) == [(step, tmp_path / f"step-{step:08d}") for step in (10, 100)]
    save(tmp_path, 100, objective, optimizer, keep=1)  # the same step again
    assert [step for step, _ in checkpoints(tmp_path)] == [100]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-00000009", "step-00000100"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str, damage: str, images: Images):
    objective = build()
    path = save(tmp_path, 1, objective, train(objective, images, 1))
    target = path / file
    if damage == "gone":
        target.unlink()
    else:
        target.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    with pytest.raises(UserError, match=f"cannot resume from .*{path.name} "):
        load_checkpoint(path, objective, make_optimizer(objective, opt="adamw", lr=1e-3))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    objective = build()
    path = save(tmp_path, 1, objective, make_optimizer(objective, opt="adamw", lr=1e-3))
    with pytest.raises(UserError, match="cannot resume from"):
        load_checkpoint(path, build(patch_size=4))


def test_a_failed_write_leaves_the_checkpoint_before(tmp_path: Path, images: Images):
    objective = build()
    optimizer = train(objective, images, 1)
    save(tmp_path, 1, objective, optimizer)
    with pytest.raises(TypeError):
        save(tmp_path, 2, objective, optimizer, not_json=object())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path / "step-00000001", objective, optimizer)["step"] == 1

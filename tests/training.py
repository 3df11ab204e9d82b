"""What the tests of training share: a small objective on digits, and one way to train it."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp import Encoder, MaskedPatchPrediction
from mpp.data import Loader, Plan, Transform, load_data
from mpp.data.loader import Images
from mpp.recipes.common import make_optimizer
from mpp.train import fit

CONFIG = {
    "train": {"steps": 1000, "workers": 0, "seed": 0},
    "optim": {"lr": 1e-5, "betas": (0.9, 0.999)},
    "probe": {"a": 1},
}


def digits() -> Images:
    data = load_data("digits")
    return Images(data.train, Transform((8, 8), crop_scale=(0.4, 1.0)), channels=1, seed=1)


def build(seed: int = 0, **encoder: Any) -> MaskedPatchPrediction:
    torch.manual_seed(seed)
    return MaskedPatchPrediction(Encoder("vit_micro_patch2_8", channels=1, depth=1, **encoder))


def train(
    objective: nn.Module,
    images: Images,
    steps: int,
    *,
    opt: str = "adamw",
    batch_size: int = 16,
    accumulation: int = 1,
    rate: Callable[[int], float] = lambda step: 1e-3 * (1 + step),
    **also: Any,
) -> torch.optim.Optimizer:
    optimizer = make_optimizer(objective, opt=opt, lr=1.0, weight_decay=0.1)
    plan = Plan(len(images), batch_size, seed=1, accumulation=accumulation)
    fit(objective, Loader(images, plan), optimizer, steps=steps, rate=rate, accelerator=Accelerator(cpu=True), **also)
    return optimizer


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{i} {name}": torch.as_tensor(value)
        for i, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }

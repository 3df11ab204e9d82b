"""Which patches are to be predicted: `masked`, bool (B, N), True = to be predicted. The only mask polarity in the code.

Every sampler is exact: each image has the same number of masked patches, known as a Python int, so shapes are fixed and
nothing waits for the device (paper.md 3.3, row 5).
"""

import torch
from torch import Tensor

from mpp.errors import UserError
from mpp.randomness import bits


def num_masked(num_patches: int, ratio: float) -> int:
    """How many of N patches the ratio stands for, at least one: round(ratio * N), halves up (98 of 196 at 0.5).

    Raises:
        UserError: a ratio outside of (0, 1].
    """
    if not 0 < ratio <= 1:
        raise UserError(f"the corruption ratio must lie in (0, 1], got {ratio}")
    return max(1, int(ratio * num_patches + 0.5))


def random_mask(keys: Tensor, num_patches: int, count: int) -> Tensor:
    """`count` patches of each image, uniformly without replacement: keys int64 (B,) -> masked bool (B, N)."""
    order = bits(keys, "mask", num_patches).argsort(dim=1, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :count], True)


def indices(masked: Tensor, count: int) -> Tensor:
    """Positions of the True entries in raster order: bool (B, N) with `count` True a row -> int64 (B, count)."""
    return masked.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]


def take(x: Tensor, index: Tensor) -> Tensor:
    """The rows of each image that `index` names: (B, N, ...) and int64 (B, k) -> (B, k, ...)."""
    shape = index.shape + (1,) * (x.ndim - 2)
    return x.gather(1, index.view(shape).expand(*index.shape, *x.shape[2:]))

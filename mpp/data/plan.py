"""Which sample comes when, on which process: arithmetic on the step, with nothing held and nothing to skip."""

import torch

from mpp.errors import UserError
from mpp.randomness import Permutation, fold


class Plan:
    """The order of samples, as a pure function of the step.

    Step t takes positions [tG, (t+1)G) of an endless sequence of epochs of `steps_per_epoch` * G samples each, where G
    is the global batch; each epoch is a permutation of its own, and its tail of fewer than G samples is left out. A
    global batch is cut into micro-batches of `size` samples: process r of W takes, in its a-th accumulation step, the
    contiguous piece number a W + r. So neighbours 2i and 2i + 1 of the global batch, which are each other's donors,
    never part, and the samples of a step do not depend on W or A.

    Args:
        num_samples: samples in the set.
        batch_size: G, the global batch.
        seed: of the whole run.
        rank, world: this process and how many there are.
        accumulation: A, micro-batches a process takes in a step.

    Raises:
        UserError: the batch is larger than the set or does not divide into even micro-batches.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, accumulation: int = 1
    ) -> None:
        pieces = world * accumulation
        if batch_size < 2 or accumulation < 1:
            raise UserError(
                "train.batch_size must be at least 2 and train.accumulation at least 1, "
                f"got {batch_size} and {accumulation}"
            )
        if batch_size > num_samples:
            raise UserError(
                f"train.batch_size={batch_size} is larger than the data set of {num_samples} images; "
                f"use at most {num_samples // (2 * pieces) * 2 * pieces}"
                if num_samples >= 2 * pieces
                else f"the data set has {num_samples} image(s); training needs at least {2 * pieces}, in pairs, for "
                f"{world} process(es) x {accumulation} accumulation step(s)"
            )
        if batch_size % (2 * pieces):
            below, above = batch_size // (2 * pieces) * 2 * pieces, (batch_size // (2 * pieces) + 1) * 2 * pieces
            near = f"{below} or {above}" if below else f"{above}"
            raise UserError(
                f"train.batch_size={batch_size} gives {world} process(es) x {accumulation} accumulation step(s) "
                f"batches of {batch_size / pieces:g}; each needs an even number, so use a multiple of {2 * pieces}: "
                f"{near}"
            )
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world, self.accumulation = rank, world, accumulation
        self.size = batch_size // pieces
        self.steps_per_epoch = num_samples // batch_size
        self._order: tuple[int, Permutation] = (-1, Permutation(1, 0))

    def micro_batch(self, step: int, micro: int) -> tuple[int, torch.Tensor]:
        """Epoch and sample ids int64 (size,) of this process's `micro`-th micro-batch of a step."""
        return self._slice(step, (micro * self.world + self.rank) * self.size, self.size)

    def batch(self, step: int) -> tuple[int, torch.Tensor]:
        """Epoch and sample ids int64 (batch_size,) of a step's global batch."""
        return self._slice(step, 0, self.batch_size)

    def _slice(self, step: int, start: int, size: int) -> tuple[int, torch.Tensor]:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, Permutation(self.num_samples, fold(self.seed, "order", epoch)))
        start += step_in_epoch * self.batch_size
        return epoch, self._order[1](torch.arange(start, start + size))

"""Checksums of what a step was trained on, the same however the batch is split: what `mpp.verify_resume` compares."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.corruption import Corruption
from mpp.randomness import mix


class Trace:
    """Sums of 64-bit hashes over the samples of a step; int64 sums wrap and have no order.

    Args:
        objective: its `Corruption` modules, if it has any, tell the masks.
    """

    def __init__(self, objective: nn.Module) -> None:
        self.corruptions = [module for module in objective.modules() if isinstance(module, Corruption)]
        self._sums: list[Tensor] = []
        self._loss: list[Tensor] = []

    def add(self, batch: dict[str, Tensor], loss: Tensor) -> None:
        """A micro-batch with `id`, `key` and `image`, and its loss."""
        ids = batch["id"]
        masks = torch.zeros_like(ids)
        for corruption in self.corruptions:
            draw = corruption.draw(batch["key"])
            donors = ids[draw.donor_image][:, None] * corruption.num_patches + draw.donor_patch
            masks = masks + _hash_rows(donors * 4 + draw.kind)
        each = (ids, _hash_rows(batch["image"].flatten(1)), masks)
        self._sums.append(torch.stack([mix(mix(ids + 1) + values).sum() for values in each]))
        self._loss.append(loss.detach().float())

    def close(self, accelerator: Accelerator, done: int, lr: float) -> dict[str, Any]:
        """The line of the step that is done."""
        ids, pixels, masks = accelerator.gather(torch.stack(self._sums)).sum(dim=0).tolist()
        loss = float(accelerator.gather(torch.stack(self._loss)).double().mean())
        self._sums, self._loss = [], []
        return {"step": done, "samples": _hex(ids), "crops": _hex(pixels), "masks": _hex(masks), "loss": loss, "lr": lr}


def _hash_rows(values: Tensor) -> Tensor:
    """Whole numbers (B, n) -> int64 (B,), sensitive to every value and its place."""
    place = mix(torch.arange(1, values.shape[1] + 1, device=values.device)) | 1
    return ((values.long() + 1) * place).sum(dim=1)


def _hex(number: int) -> str:
    return f"{number & (2**64 - 1):016x}"

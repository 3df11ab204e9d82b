"""What to predict for a patch. Targets read pixels (raw uint8 or [0, 1]), never what the encoder normalised."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from mpp.errors import UserError

MAX_JOINT_CLASSES = 4096


class MeanColour:
    """Target 1 of the paper: the mean colour of the patch with `bits` bits a channel, as one class.

    With 3 bits and RGB these are 8 levels a channel and 512 classes, ``64 r + 8 g + b`` (paper.md 3.3, rows 9 and 10).
    With C channels the classes are joint while (2^bits)^C <= 4096; beyond that (5 channels of 3 bits, say) each channel
    is predicted by itself, 2^bits ways, and the loss is the mean over channels.

    Attributes:
        size: K, the outputs for each patch.
        joint: whether one class stands for all channels.
    """

    def __init__(self, channels: int, *, bits: int = 3) -> None:
        if not 1 <= bits <= 8:
            raise UserError(f"bits of the mean colour must be 1 to 8, got {bits}")
        self.channels, self.bits, self.levels = channels, bits, 2**bits
        self.joint = self.levels**channels <= MAX_JOINT_CLASSES
        self.size = self.levels**channels if self.joint else self.levels * channels

    def quantise(self, pixels: Tensor, patch: tuple[int, int]) -> Tensor:
        """Level of the mean of each patch and channel: mean first, then quantise.

        Args:
            pixels: (B, C, H, W), uint8 or floating point in [0, 1].
            patch: height and width of a patch.

        Returns:
            int64 (B, N, C) in [0, 2^bits). uint8 is summed in integers, so that every device agrees on every bin edge.
        """
        cells = rearrange(pixels, "b c (h p) (w q) -> b (h w) c (p q)", p=patch[0], q=patch[1])
        if pixels.dtype == torch.uint8:
            level = self.levels * cells.sum(-1, dtype=torch.int64) // (255 * cells.shape[-1])
        else:
            level = (self.levels * cells.float().mean(-1)).floor().to(torch.int64)
        return level.clamp(0, self.levels - 1)

    def labels(self, pixels: Tensor, patch: tuple[int, int]) -> Tensor:
        """Classes: (B, C, H, W) -> int64 (B, N) if joint, else (B, N, C)."""
        level = self.quantise(pixels, patch)
        if not self.joint:
            return level
        weight = self.levels ** torch.arange(self.channels - 1, -1, -1, device=level.device)
        return (level * weight).sum(-1)

    def _split(self, prediction: Tensor) -> Tensor:
        """Outputs (..., K) with the classes last: (..., K) if joint, else (..., C, 2^bits)."""
        return prediction if self.joint else rearrange(prediction, "... (c k) -> ... c k", c=self.channels)

    def loss(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats, in float32: outputs (B, k, K) and labels (B, k[, C]) -> scalar."""
        logits = self._split(prediction).float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Share of right classes, scalar."""
        return (self._split(prediction).argmax(-1) == labels).float().mean()

    def render(self, prediction: Tensor) -> Tensor:
        """The colour of the likeliest class, at the centre of its bin: outputs (..., K) -> [0, 1] (..., C)."""
        return self.colour(self._split(prediction).argmax(-1))

    def colour(self, labels: Tensor) -> Tensor:
        """The colour at the centre of a class's bin: labels (...) if joint, else (..., C) -> [0, 1] (..., C)."""
        if self.joint:
            shift = self.bits * torch.arange(self.channels - 1, -1, -1, device=labels.device)
            labels = (labels[..., None] >> shift) & (self.levels - 1)
        return (labels.float() + 0.5) / self.levels

    def entropy(self, labels: Tensor) -> float:
        """Entropy of the labels' distribution in nats, averaged over channels if not joint.

        It is the loss of the best constant guess, so a model below it has learned from the context.
        """
        columns = labels.reshape(-1, 1 if self.joint else self.channels)
        total = 0.0
        for column in columns.T:
            share = torch.bincount(column).double() / len(column)
            total -= float((share[share > 0] * share[share > 0].log()).sum())
        return total / columns.shape[1]

"""Training with labels on the same encoder: the paper's pre-training and fine-tuning heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpp.encoder import Encoder
from mpp.errors import UserError
from mpp.objectives.mpp import to_pixels


class Supervised(nn.Module):
    """Classify images from one vector of the encoder.

    Args:
        encoder: any `Encoder`.
        num_classes: number of labels.
        pool: "cls", the class token's output, as in the paper; or "mean" of the patches. After masked pre-training the
            class token's output is untrained (paper.md 3.3, row 17): take "mean".
        head: "linear", one zero-initialised layer, the paper's for fine-tuning: logits are exactly 0 and the first loss
            is ln K; or "tanh", a hidden layer of width D with tanh before it, the paper's for pre-training (3.1).
        loss: "softmax" cross-entropy; or "sigmoid", binary cross-entropy summed over classes, whose bias starts at -10,
            as the paper's authors did for ImageNet-21k and JFT (paper.md 1.3).

    Raises:
        UserError: an unknown pool, head or loss, or fewer than two classes.
    """

    name = "supervised"

    def __init__(
        self, encoder: Encoder, num_classes: int, *, pool: str = "cls", head: str = "linear", loss: str = "softmax"
    ) -> None:
        super().__init__()
        for key, value, known in (
            ("pool", pool, ("cls", "mean")),
            ("head", head, ("linear", "tanh")),
            ("loss", loss, ("softmax", "sigmoid")),
        ):
            if value not in known:
                raise UserError(f"objective.{key} must be {' or '.join(known)}, got {value!r}")
        if num_classes < 2:
            raise UserError(f"classification needs at least two classes, found {num_classes}")
        self.encoder, self.num_classes, self.pool, self.loss_name = encoder, num_classes, pool, loss
        self.pre_logits = (
            nn.Sequential(nn.Linear(encoder.dim, encoder.dim), nn.Tanh()) if head == "tanh" else nn.Identity()
        )
        self.head = nn.Linear(encoder.dim, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, -10.0 if loss == "sigmoid" else 0.0)

    def no_weight_decay(self) -> set[str]:
        """Positions and class token; biases and norms are exempt by their shape."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()}

    def logits(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> (B, num_classes), before any softmax or sigmoid."""
        return self.head(self.pre_logits(self.encoder(to_pixels(images)).pool(self.pool)))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch with `image` uint8 (B, C, H, W) and `label` int64 (B,) -> loss (mean over images) and accuracy."""
        logits, labels = self.logits(batch["image"]).float(), batch["label"]
        if self.loss_name == "softmax":
            loss = F.cross_entropy(logits, labels)
        else:
            onehot = F.one_hot(labels, self.num_classes).to(logits.dtype)
            loss = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none").sum(1).mean()
        with torch.no_grad():
            accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": loss, "accuracy": accuracy}

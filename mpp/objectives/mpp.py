"""Masked patch prediction (paper, section 4.6, appendix B.1.2): corrupt half of the patches, predict their colour."""

from torch import Tensor, nn

from mpp.corruption import Corruption
from mpp.encoder import Encoder
from mpp.masking import indices, take
from mpp.targets import MeanColour


def to_pixels(images: Tensor) -> Tensor:
    """uint8 (B, C, H, W) -> float32 in [0, 1]."""
    return images.float() / 255


class MaskedPatchPrediction(nn.Module):
    """Predict the mean colour of every corrupted patch from its own output.

    image -> pixels -> `encoder.embed` -> corruption -> `encoder.encode` -> linear head at corrupted patches -> loss.
    The head is one linear layer on the normed output (row 15 of paper.md 3.3), zero at the start, so the first loss is
    exactly ln K, ln 512 = 6.2383 for RGB.

    Args:
        encoder: any `Encoder`.
        bits: bits a channel of the colour.
        ratio, mask_ratio, donor_ratio, donor: see `Corruption`.
    """

    name = "mpp"

    def __init__(
        self,
        encoder: Encoder,
        *,
        bits: int = 3,
        ratio: float = 0.5,
        mask_ratio: float = 0.8,
        donor_ratio: float = 0.1,
        donor: str = "partner",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.corruption = Corruption(
            encoder.dim,
            encoder.num_patches,
            ratio=ratio,
            mask_ratio=mask_ratio,
            donor_ratio=donor_ratio,
            donor=donor,
        )
        self.target = MeanColour(encoder.channels, bits=bits)
        self.head = nn.Linear(encoder.dim, self.target.size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def no_weight_decay(self) -> set[str]:
        """Positions, class token and [mask]; biases and norms are exempt by their shape."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()} | {"corruption.mask_token"}

    def predict(self, images: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, C, H, W) and keys (B,) -> outputs (B, k, K) at the corrupted patches and their positions (B, k)."""
        tokens = self.encoder.embed(to_pixels(images))
        tokens, masked = self.corruption(tokens, keys)
        where = indices(masked, self.corruption.count)
        return self.head(take(self.encoder.encode(tokens).patches, where)), where

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch with `image` uint8 (B, C, H, W) and `key` int64 (B,) -> loss and accuracy over corrupted patches.

        The loss is the mean over all corrupted patches, kept and replaced ones too, and over nothing else (rows 7, 8).
        """
        prediction, where = self.predict(batch["image"], batch["key"])
        labels = take(self.target.labels(batch["image"], self.encoder.patch), where)
        return {"loss": self.target.loss(prediction, labels), "accuracy": self.target.accuracy(prediction, labels)}

"""Crops and flips in uint8, each a function of the sample's key. Resizing is torchvision's, with antialiasing."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from mpp.errors import UserError
from mpp.randomness import uniform


@dataclass(frozen=True)
class Transform:
    """What happens to a decoded image, uint8 (C, H, W), before it joins a batch.

    For training: a random resized crop of `crop_scale` of the area and aspect ratio 3/4 to 4/3 (log-uniform), the
    "inception crop", and a flip; without `crop_scale`, the whole image is resized. For evaluation: the shorter side is
    resized to size / `crop_pct` and the centre is cut out; of an image that would become more than 16 times as long as
    that, only the middle is resized, since a strip of 30,000 x 1 pixels would take gigabytes.

    Args:
        size: (height, width) of the result.
        crop_scale: smallest and largest share of the area; None for no random crop. The paper's is (0.05, 1).
        flip: probability of a horizontal flip.
        crop_pct: for evaluation, the share of the shorter side that the centre crop keeps.
        train: whether the random part is applied.
    """

    size: tuple[int, int]
    crop_scale: tuple[float, float] | None = None
    flip: float = 0.5
    crop_pct: float = 1.0
    train: bool = True

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise UserError(
                f"data.crop_scale must be two rising shares of the area in (0, 1], got {list(self.crop_scale)}"
            )
        if not 0 <= self.flip <= 1 or not 0 < self.crop_pct <= 1:
            raise UserError(
                f"data.flip lies in [0, 1] and data.crop_pct in (0, 1], got {self.flip} and {self.crop_pct}"
            )

    def evaluation(self) -> "Transform":
        """The same sizes without randomness."""
        return replace(self, train=False)

    def draw(self, keys: Tensor) -> list[list[float]]:
        """The random numbers of a batch of keys int64 (B,): one for the flip, and forty for a crop."""
        return uniform(keys, "crop", 1 if self.crop_scale is None else 41).tolist()

    def __call__(self, image: Tensor, draws: list[float]) -> Tensor:
        """uint8 (C, H, W) and the sample's row of `draw` -> uint8 (C, *size)."""
        height, width = image.shape[-2:]
        if not self.train:
            if (height, width) == self.size and self.crop_pct == 1:
                return image
            scale = max(self.size[0] / height, self.size[1] / width) / self.crop_pct
            rows, columns = (
                _middle(n, 16 * of / self.crop_pct / scale) for n, of in zip((height, width), self.size, strict=True)
            )
            image = image[:, rows, columns]
            height, width = image.shape[-2:]
            image = _resize(image, (max(self.size[0], round(height * scale)), max(self.size[1], round(width * scale))))
            return T.center_crop(image, list(self.size))
        if self.crop_scale is not None:
            top, left, tall, wide = _inception_crop(height, width, self.crop_scale, draws[1:])
            image = image[:, top : top + tall, left : left + wide]
        image = _resize(image, self.size)
        return image.flip(-1) if draws[0] < self.flip else image


def _middle(length: int, most: float) -> slice:
    """All of `length` pixels, or the middle ones if they are more than `most`."""
    cut = min(math.ceil((length - most) / 2), (length - 1) // 2) if length > most else 0
    return slice(cut, length - cut)


def _resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(image.shape[-2:]) == size:
        return image
    return T.resize(image, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)


def _inception_crop(
    height: int, width: int, scale: tuple[float, float], draws: list[float]
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop: ten tries of four draws each, then the whole image."""
    low, high = math.log(3 / 4), math.log(4 / 3)
    for i in range(0, 40, 4):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[i])
        ratio = math.exp(low + (high - low) * draws[i + 1])
        tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < tall <= height and 0 < wide <= width:
            return int(draws[i + 2] * (height - tall + 1)), int(draws[i + 3] * (width - wide + 1)), tall, wide
    return 0, 0, height, width


def to_tensor(array: "torch.Tensor | object") -> Tensor:
    """uint8 array (H, W) or (H, W, C) -> tensor (C, H, W)."""
    image = torch.as_tensor(array)
    return image[None] if image.ndim == 2 else image.permute(2, 0, 1)

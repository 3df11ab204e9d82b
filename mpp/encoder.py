"""The encoder: any timm Vision Transformer with one seam, `embed` and `encode`, between projection and positions.

The seam is where masked patch prediction corrupts tokens (paper, section 4.6: patch *embeddings* are replaced) and
where later objectives drop them. Parameters keep timm's names under the prefix `vit.`, so weights go in and out of timm
without conversion. This is the only file that knows timm's `VisionTransformer` from the inside; a test holds it equal
to `forward_features`, bit for bit.
"""

import difflib
import re
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import HybridEmbed, resample_abs_pos_embed
from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import mpp.models  # noqa: F401  registers our models with timm
from mpp.errors import UserError
from mpp.masking import take


class Features(NamedTuple):
    """What an encoder makes of a batch, after the final norm."""

    cls: Tensor | None
    """(B, D), the class token's output z_L^0 (Eq. 4); None for a ViT without a class token."""
    patches: Tensor
    """(B, N, D), one vector a patch, in raster order."""

    def pool(self, how: str) -> Tensor:
        """(B, D): the class token's output ("cls") or the mean of the patches ("mean")."""
        if how == "mean":
            return self.patches.mean(dim=1)
        if how == "cls":
            if self.cls is None:
                raise UserError("pool=cls needs an encoder with a class token; use pool=mean")
            return self.cls
        raise UserError(f"pool must be cls or mean, got {how!r}")


class Encoder(nn.Module):
    """A timm ViT that takes pixels in [0, 1] and normalises them privately.

    Args:
        name: any timm model that is a `VisionTransformer`, hybrids with a ResNet stem included.
        size: image side in pixels, or (height, width); None takes the model's own.
        channels: channels of the images.
        mean, std: per channel, of pixels in [0, 1]; None takes the model's own for 3 channels and 0.5, 0.5 otherwise
            (which maps pixels to [-1, 1], as the paper's code does).
        **timm_kwargs: passed to `timm.create_model`, for example `drop_path_rate=0.1` or `depth=6`. Plain values alone,
            and none that make timm read files or fetch what the name does not stand for: they may come from a stranger.

    Raises:
        UserError: no such model, not a ViT, an argument of that kind, or an image size that the patches do not divide.
    """

    _mean: Tensor
    _std: Tensor

    def __init__(
        self,
        name: str,
        *,
        size: int | tuple[int, int] | None = None,
        channels: int = 3,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **timm_kwargs: Any,
    ) -> None:
        super().__init__()
        if size is not None:
            timm_kwargs["img_size"] = (size, size) if isinstance(size, int) else tuple(size)
        # global_pool "" leaves the final norm before pooling ("avg" would move it behind) and suits every ViT.
        timm_kwargs = {"weight_init": "jax", **timm_kwargs, "global_pool": "", "fc_norm": False, "num_classes": 0}
        self.vit = _create(name, channels, timm_kwargs)
        self.name = name
        self.channels = channels
        self._timm_kwargs = {
            key: value
            for key, value in timm_kwargs.items()
            if key not in ("global_pool", "fc_norm", "num_classes", "img_size", "pretrained")
        }
        self._check_size()
        own = self.vit.pretrained_cfg or {}
        default = (own.get("mean"), own.get("std")) if channels == 3 else (None, None)
        self.mean = tuple(mean or default[0] or (0.5,) * channels)
        self.std = tuple(std or default[1] or (0.5,) * channels)
        if len(self.mean) != channels or len(self.std) != channels:
            raise UserError(
                f"encoder.mean and encoder.std need one number for each of {channels} channels, "
                f"got {len(self.mean)} and {len(self.std)}"
            )
        # Not in the state dict: it holds timm's names and nothing else; `config` carries these numbers.
        self.register_buffer("_mean", torch.tensor(self.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("_std", torch.tensor(self.std).view(1, -1, 1, 1), persistent=False)

    # ------------------------------------------------------------------ what it is

    @property
    def dim(self) -> int:
        """D, the width."""
        return int(self.vit.embed_dim)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        height, width = self.vit.patch_embed.img_size
        return int(height), int(width)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = self.vit.patch_embed.grid_size
        return int(rows), int(columns)

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width in pixels of the area that one patch stands for (the whole stride, for a hybrid)."""
        (height, width), (rows, columns) = self.size, self.grid
        return height // rows, width // columns

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid[0] * self.grid[1]

    def config(self) -> dict[str, Any]:
        """The keyword arguments that build this encoder again: `Encoder(**encoder.config())`."""
        return {
            "name": self.name,
            "size": list(self.size),
            "channels": self.channels,
            "mean": list(self.mean),
            "std": list(self.std),
            **self._timm_kwargs,
        }

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are not to decay: positions and tokens, which the 1-D rule would miss."""
        return {f"vit.{name}" for name in self.vit.no_weight_decay()}

    # ------------------------------------------------------------------ what it does

    def embed(self, pixels: Tensor) -> Tensor:
        """Normalise and project patches (E in Eq. 1): [0, 1] (B, C, H, W) -> (B, N, D), without positions."""
        return self.vit.patch_embed((pixels - self._mean) / self._std)

    def encode(self, tokens: Tensor, visible: Tensor | None = None) -> Features:
        """Add class token and positions, and run the blocks and the final norm (Eqs. 1 to 4).

        Args:
            tokens: (B, N, D) from `embed`, possibly corrupted.
            visible: indices (B, k) of the patches to keep; None keeps all.
        """
        vit = self.vit
        x = vit._pos_embed(tokens)
        if visible is not None:
            prefix, patches = x[:, : vit.num_prefix_tokens], x[:, vit.num_prefix_tokens :]
            x = torch.cat([prefix, take(patches, visible)], dim=1)
        x = vit.norm_pre(x)
        x = checkpoint_seq(vit.blocks, x) if vit.grad_checkpointing else vit.blocks(x)
        x = vit.norm(x)
        return Features(x[:, 0] if vit.cls_token is not None else None, x[:, vit.num_prefix_tokens :])

    def forward(self, pixels: Tensor) -> Features:
        """[0, 1] (B, C, H, W) -> Features."""
        return self.encode(self.embed(pixels))

    @torch.no_grad()
    def resize(self, size: int | tuple[int, int]) -> "Encoder":
        """Take images of another size, in place: patches stay, positions are resampled on their grid.

        Corner-aligned bilinear, as in the paper's released code (section 3.2; equals `scipy.ndimage.zoom(order=1)`);
        prefix entries are copied. Same size: nothing changes, bit for bit.
        """
        size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        if size == self.size:
            return self
        vit, old, old_grid = self.vit, self.vit.pos_embed, self.grid
        vit.set_input_size(img_size=size)
        self._check_size()
        if old is not None:
            resampled = resample_abs_pos_embed(
                old,
                new_size=list(self.grid),
                old_size=list(old_grid),
                num_prefix_tokens=0 if vit.no_embed_class else vit.num_prefix_tokens,
                interpolation="bilinear",
                antialias=False,
                align_corners=True,
            )
            vit.pos_embed = nn.Parameter(resampled.clone(), requires_grad=old.requires_grad)
        return self

    def _check_size(self) -> None:
        projection = self.vit.patch_embed
        ratio = projection.feature_ratio if isinstance(projection, HybridEmbed) else (1, 1)
        patch = projection.patch_size[0] * ratio[0], projection.patch_size[1] * ratio[1]
        _check_divisible(self.name, self.size, patch)


def _check_divisible(name: str, size: tuple[int, int], patch: tuple[int, int]) -> None:
    """Raises UserError unless the patch divides the image."""
    if size[0] % patch[0] or size[1] % patch[1]:
        near = [max(p, round(s / p) * p) for s, p in zip(size, patch, strict=True)]
        raise UserError(
            f"image size {size[0]} x {size[1]} is not divisible by the patch {patch[0]} x {patch[1]} of {name}; "
            f"use a multiple, for example {near[0]} x {near[1]}"
        )


# Arguments with which timm reads or fetches what somebody names, or builds something that is not the model.
NOT_TAKEN = frozenset({
    "cache_dir", "checkpoint_path", "device", "dtype", "exportable", "feature_cfg", "feature_cls", "features_only",
    "in_chans", "kwargs_filter", "model_cfg", "model_cls", "model_name", "no_jit", "out_indices", "pretrained_cfg",
    "pretrained_cfg_overlay", "pretrained_filter_fn", "pretrained_model_args", "pretrained_strict", "pruned",
    "scriptable", "use_naflex", "variant",
})  # fmt: skip


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Raises UserError for what a description of a model has no business to hold."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"encoder.name={name!r} is not the name of a timm model, without scheme or path")
    for key, value in kwargs.items():
        if key in NOT_TAKEN:
            raise UserError(f"encoder.{key} cannot be used: an encoder is built from its name and its shape alone")
        if not _is_plain(value):
            raise UserError(f"encoder.{key} must be a number, text, true, false, null or a list of these, got {value}")
    if not isinstance(kwargs.get("pretrained", False), bool):
        raise UserError(f"encoder.pretrained must be true or false, got {kwargs['pretrained']}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _create(name: str, channels: int, kwargs: dict[str, Any]) -> VisionTransformer:
    _check_arguments(name, kwargs)
    if not timm.is_model(name.split(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UserError(f"encoder.name={name} is not a timm model" + (f"; near: {', '.join(near)}" if near else ""))
    size = kwargs.get("img_size")
    if size is not None and min(size) < 1:
        raise UserError(f"the image size must be positive, got {size[0]} x {size[1]}")
    for refused, why in (
        ("dynamic_img_size", "sizes are fixed; set the size"),
        ("patch_drop_rate", "it would break the order of the patches"),
    ):
        if kwargs.get(refused):
            raise UserError(f"encoder.{refused} cannot be used: {why}")
    try:
        vit = timm.create_model(name, in_chans=channels, **kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(_why_not(name, size, error)) from error
    if not isinstance(vit, VisionTransformer):
        raise UserError(_not_a_vit(name, vit))
    return vit


def _why_not(name: str, size: tuple[int, int] | None, error: Exception) -> str:
    """Why timm could not build a model, in words; looks at the model with its own arguments to tell."""
    if isinstance(error, RuntimeError):  # timm's own, about names and weights, are for people
        return f"encoder.name={name}: {error}"
    with torch.device("meta"):
        plain = timm.create_model(name)
    if not isinstance(plain, VisionTransformer):
        return _not_a_vit(name, plain)
    if size is not None and isinstance(projection := plain.patch_embed, HybridEmbed):
        ratio, patch = projection.feature_ratio, projection.patch_size
        _check_divisible(name, size, (patch[0] * ratio[0], patch[1] * ratio[1]))
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"encoder.name={name} does not take these arguments: {reason}"


def _not_a_vit(name: str, model: nn.Module) -> str:
    return (
        f"encoder.name={name} is a {type(model).__name__}, not timm's VisionTransformer; "
        "take one that `timm.list_models('vit_*')` names"
    )

"""Two plain ViTs for the embedded data sets: small enough that two CPU cores pre-train them in minutes.

Both are timm's `VisionTransformer` with other numbers, so weights keep timm's names and anything that takes a timm ViT
takes these.
"""

from typing import Any

import timm
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer


def _vit(defaults: dict[str, Any], pretrained: bool, kwargs: dict[str, Any]) -> VisionTransformer:
    if pretrained:
        raise RuntimeError("the micro models have no pre-trained weights; pre-train one with recipes/pretrain.py")
    return timm.create_model("vit_tiny_patch16_224", **{**defaults, **kwargs})


@register_model
def vit_micro_patch4_32(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """32 x 32 pixels in 64 patches of 4 x 4; width 96, 3 layers, 3 heads; 0.35 M parameters."""
    return _vit(dict(img_size=32, patch_size=4, embed_dim=96, depth=3, num_heads=3), pretrained, kwargs)


@register_model
def vit_micro_patch2_8(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """8 x 8 pixels in 16 patches of 2 x 2; width 96, 4 layers, 3 heads; 0.45 M parameters."""
    return _vit(dict(img_size=8, patch_size=2, embed_dim=96, depth=4, num_heads=3), pretrained, kwargs)

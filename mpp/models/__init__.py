"""Models that timm lacks, registered with timm on import so that `timm.create_model` and `Encoder` find them."""

from mpp.models import micro

__all__ = ["micro"]

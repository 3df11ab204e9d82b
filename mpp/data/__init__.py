"""From files to batches: sources of images, deterministic order and crops, loading. uint8 until the device."""

from mpp.data.loader import Loader, read_batches
from mpp.data.plan import Plan
from mpp.data.sources import Data, load_data
from mpp.data.transforms import Transform

__all__ = ["Data", "Loader", "Plan", "Transform", "load_data", "read_batches"]

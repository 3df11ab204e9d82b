"""mpp: pre-train Vision Transformers on unlabelled images by masked patch prediction, and prove what it bought.

The letters that shapes use everywhere: `B` images, `N` patches, `T` tokens with prefix, `D` width, `P` patch side,
`C` channels, `K` outputs per patch, `L` layers, `H` heads.
"""

from mpp.encoder import Encoder, Features
from mpp.errors import UserError
from mpp.objectives.mpp import MaskedPatchPrediction
from mpp.objectives.supervised import Supervised
from mpp.version import __version__

__all__ = ["Encoder", "Features", "MaskedPatchPrediction", "Supervised", "UserError", "__version__"]

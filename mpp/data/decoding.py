"""One image file, undecoded, to one uint8 array: whatever Pillow reads, and one clear line where it cannot."""

import io
import struct
import warnings
from typing import Any

import numpy as np
import PIL.Image
from PIL.ImageOps import exif_transpose

from mpp.errors import UserError

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's name for each number of channels


def decode(image: dict[str, Any], channels: int) -> np.ndarray:
    """Undecoded `{"bytes", "path"}` -> uint8 (H, W, channels), upright (EXIF).

    Raises:
        UserError: the file cannot be read as an image; names it.
    """
    with open_image(image) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of odd but harmless metadata
        try:
            file.load()
            return _to_uint8(exif_transpose(file), channels)
        except DAMAGE as error:
            raise _unreadable(image, error) from error


DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    PIL.Image.DecompressionBombError,
    PIL.Image.DecompressionBombWarning,
)


def open_image(image: dict[str, Any]) -> PIL.Image.Image:
    """The header of an image; its pixels are read later."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)
            return PIL.Image.open(io.BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"])
    except DAMAGE as error:
        raise _unreadable(image, error) from error


def _unreadable(image: dict[str, Any], error: Exception) -> UserError:
    name = image["path"] or "an image without a name"
    return UserError(f"cannot read {name} as an image ({type(error).__name__}: {error}); repair or remove it")


def _to_uint8(file: PIL.Image.Image, channels: int) -> np.ndarray:
    if file.mode.startswith("I;16") or file.mode in ("I", "F"):
        # PIL would clip at 255. 16-bit files keep their high byte, floats are taken for [0, 1] if they lie there.
        wide = np.asarray(file, dtype=np.float64)
        peak = 65535.0 if file.mode != "F" else 255.0 if wide.max() > 1 else 1.0
        file = PIL.Image.fromarray((wide.clip(0, peak) * (255 / peak)).astype(np.uint8))
    if file.mode == "P":
        file = file.convert("RGBA" if "transparency" in file.info else "RGB")
    array = np.array(file.convert(MODES[channels]))
    return array if array.ndim == 3 else array[:, :, None]


def encode(array: np.ndarray) -> bytes:
    """uint8 (H, W) or (H, W, 3) -> the bytes of a PGM or PPM file: no compression, so that decoding is a copy."""
    kind = "P5" if array.ndim == 2 else "P6"
    return f"{kind} {array.shape[1]} {array.shape[0]} 255\n".encode() + array.tobytes()

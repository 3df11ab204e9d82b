"""One image file, undecoded, to one uint8 array: whatever Pillow reads, and one clear line where it cannot."""

import io
import os
import re
import stat
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO, TypeVar

import numpy as np
import PIL.Image
from PIL.ImageOps import exif_transpose

from mpp.errors import UserError

Result = TypeVar("Result")
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's name for each number of channels
# Not read: PostScript, for which Pillow would start Ghostscript, an interpreter, on the file; and what Pillow tells
# the name of but cannot decode by itself.
REFUSED = ("EPS", "MPEG", "BUFR", "GRIB", "HDF5", "WMF")


class BadImageError(UserError):
    """An image that cannot be read.

    Args:
        path: of its file; None if it has none.
        reason: why, in one line.
    """

    def __init__(self, path: str | None, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"cannot read {self.name()} as an image ({reason}); repair or remove it")

    def name(self, otherwise: str = "an image without a name") -> str:
        """The file's path, escaped where it would not print as one line."""
        if not self.path:
            return otherwise
        return self.path if self.path.isprintable() else ascii(self.path)[1:-1]


def decode(image: dict[str, Any] | None, channels: int) -> np.ndarray:
    """Undecoded `{"bytes", "path"}` -> uint8 (H, W, channels), upright (EXIF).

    The first frame of an animation. Alpha is dropped, not blended, if `channels` has none. Of 16 bits the high byte is
    kept. Floats are taken for [0, 1] if none is above 1, else for [0, 255].

    Raises:
        BadImageError: the file cannot be read as an image, or has more pixels than `PIL.Image.MAX_IMAGE_PIXELS`.
    """
    array = _read(image, lambda file: _to_array(file, channels))
    if array.dtype != np.uint8:
        array = _to_uint8(array, channels)
    return array if array.ndim == 3 else array[:, :, None]


def is_grey(image: dict[str, Any] | None) -> bool:
    """Whether an image has no colour, by its header.

    Raises:
        BadImageError: the header cannot be read.
    """
    mode = _read(image, lambda file: file.mode)
    return mode in ("1", "L", "LA", "I", "F") or mode.startswith("I;16")


def _read(image: dict[str, Any] | None, look: Callable[[PIL.Image.Image], Result]) -> Result:
    """What `look` makes of an opened image; nothing stays open."""
    given = image or {}
    path = given.get("path")
    if given.get("bytes") is None and not path:
        raise BadImageError(None, "there is neither a file nor its content")
    try:
        with _open(given) as stream, warnings.catch_warnings():
            if not stream.read(1):
                raise OSError("the file is empty")
            stream.seek(0)
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)  # of odd but harmless metadata
            with PIL.Image.open(stream, formats=_formats()) as file:
                return look(file)
    except Exception as error:
        # The one place where everything is caught: on a damaged file Pillow's plugins raise nearly anything, such as
        # IndexError, KeyError, TypeError, zlib.error, struct.error, AssertionError or MemoryError.
        raise BadImageError(path, _reason(error)) from error


def _open(image: dict[str, Any]) -> BinaryIO:
    # Opened here rather than by Pillow, so that it is closed for certain.
    if image.get("bytes") is not None:
        return io.BytesIO(image["bytes"])
    stream = open(image["path"], "rb", opener=_at_once)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError("this is no regular file")
    return stream


def _at_once(path: str, flags: int) -> int:
    """Open without waiting, as for somebody to write into a pipe that has the name of an image."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@cache
def _formats() -> tuple[str, ...]:
    PIL.Image.preinit()  # the common ones come first
    PIL.Image.init()
    return tuple(kind for kind in PIL.Image.ID if kind not in REFUSED)


@cache
def suffixes() -> frozenset[str]:
    """Suffixes of the files that can be read, in lower case and with their dot."""
    return frozenset(suffix for suffix, kind in PIL.Image.registered_extensions().items() if kind in _formats())


def _reason(error: Exception) -> str:
    """One line, the same for the same file."""
    text = " ".join(str(error).split())
    if isinstance(error, PIL.Image.DecompressionBombError | PIL.Image.DecompressionBombWarning):
        found = re.search(r"\d+", text)
        pixels = f"{int(found[0]):,} pixels" if found else "more pixels"
        return f"{pixels}, more than {PIL.Image.MAX_IMAGE_PIXELS:,}: a decompression bomb?"
    if isinstance(error, PIL.UnidentifiedImageError):
        return "not an image, or damaged from its beginning"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, OSError | SyntaxError) and text:  # Pillow's own words
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _to_array(file: PIL.Image.Image, channels: int) -> np.ndarray:
    """uint8 (H, W) or (H, W, C), or (H, W) of a wider type, upright."""
    file.load()
    file = exif_transpose(file)
    if file.mode.startswith("I;16") or file.mode in ("I", "F"):
        return np.array(file)  # Pillow would clip it at 255
    if file.mode == "P":
        file = file.convert("RGBA" if "transparency" in file.info else "RGB")
    return np.array(file.convert(MODES[channels]))


def _to_uint8(wide: np.ndarray, channels: int) -> np.ndarray:
    """One wide channel (H, W) -> uint8 (H, W, channels)."""
    if wide.dtype.kind == "f":
        wide = np.nan_to_num(wide.astype(np.float64))
        grey = (wide.clip(0, peak := 255.0 if wide.max() > 1 else 1.0) * (255 / peak)).astype(np.uint8)
    else:
        grey = (wide.clip(0, 65535) >> 8).astype(np.uint8)
    colour = grey[:, :, None].repeat(1 if channels < 3 else 3, axis=2)
    return colour if channels % 2 else np.concatenate([colour, np.full_like(colour[:, :, :1], 255)], axis=2)


def encode(array: np.ndarray) -> bytes:
    """uint8 (H, W) or (H, W, 3) -> the bytes of a PGM or PPM file: no compression, so that decoding is a copy."""
    kind = "P5" if array.ndim == 2 else "P6"
    return f"{kind} {array.shape[1]} {array.shape[0]} 255\n".encode() + array.tobytes()

"""Decoding: any image file becomes an upright 8-bit RGB image, or BadImage says why not."""

import contextlib
import io
import os
import warnings
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 89_478_485  # Pillow's own warning level: a quarter of a gigabyte as RGB


class BadImage(ValueError):
    """A file that cannot be used as an image; the message is the reason, in one line."""


def open_image(
    source: str | os.PathLike | bytes | BinaryIO | Image.Image, max_pixels: int = MAX_PIXELS, at_least: int = 0
) -> Image.Image:
    """The image in a file, upright and in RGB: first frame, 8 bits per channel, transparency over white.

    Args:
        source: a path, the file's bytes, an open binary file, or an image that Pillow has already opened.
        max_pixels: larger images are refused before they are decoded.
        at_least: if given, JPEGs may be decoded at a reduced scale that leaves both sides at least this long.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns about odd metadata, which is harmless, and about large images, which are refused below
            warnings.simplefilter("ignore")
            if isinstance(source, (str, os.PathLike)):
                with open(source, "rb") as file:
                    return _to_rgb(_decode(file, max_pixels, at_least))
            return _to_rgb(_decode(source, max_pixels, at_least))
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image in a known format") from None
    except Image.DecompressionBombError:
        # whatever is allowed here, Pillow has a limit of its own: twice the size at which it warns
        raise BadImage(f"more than {min(max_pixels, 2 * Image.MAX_IMAGE_PIXELS):,} pixels") from None
    except OSError as error:
        raise BadImage(_one_line(error.strerror or error)) from error
    # on broken files, decoders raise all sorts of errors: SyntaxError, struct.error, IndexError, ...
    except Exception as error:
        raise BadImage(f"{type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _decode(source: bytes | BinaryIO | Image.Image, max_pixels: int, at_least: int = 0) -> Image.Image:
    image = source if isinstance(source, Image.Image) else _open(source)
    width, height = image.size
    if width * height > max_pixels:
        raise BadImage(f"{width}x{height} is more than {max_pixels:,} pixels")
    if at_least:
        # ignored by formats that do not support it
        image.draft(None, (at_least, at_least))
    image.load()
    # an image with damaged EXIF data is still an image
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    return image


def _open(source: bytes | BinaryIO) -> Image.Image:
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    if not file.read(1):
        raise BadImage("empty file")
    file.seek(0)
    image = Image.open(file)
    if image.format == "EPS":
        raise BadImage("a PostScript file, which is a program and is not run")
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_eight_bits(np.asarray(image), image.mode))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Grey values of 16 bits or more, scaled to 0..255; Pillow's own conversion would clip them to white."""
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise BadImage("some pixels are not finite numbers")
    ranges = (1, 255, 65535) if mode == "F" else (65535,)
    largest = values.max()
    # floating-point files do not say what white is: take the smallest common range that holds all values
    white = next((white for white in ranges if largest <= white), largest)
    return np.rint(np.clip(values / white, 0, 1) * 255).astype(np.uint8)

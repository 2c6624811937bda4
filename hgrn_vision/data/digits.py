"""The packaged handwritten digits: 1,797 grey images of 8x8 pixels, ten classes.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0; digits.npz carries this attribution too.
"""

import functools
import importlib.resources

import numpy as np
from PIL import Image


@functools.cache
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8) with ink from 0 to 16, and labels (1797,)."""
    with (importlib.resources.files(__package__) / "digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)


def digit_image(index: int) -> Image.Image:
    """One digit as an image, white on black."""
    ink = load_digits()[0][index]
    return Image.fromarray((ink.astype(np.uint16) * 255 // 16).astype(np.uint8))

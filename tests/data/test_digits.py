"""The digits that come with the package."""

import importlib.resources

import numpy as np


def test_digits_carry_their_attribution():
    with np.load(importlib.resources.files("hgrn_vision.data") / "digits.npz") as arrays:
        assert "Alpaydin" in str(arrays["attribution"]) and "CC BY 4.0" in str(arrays["attribution"])
        assert arrays["images"].shape == (1797, 8, 8) and arrays["images"].max() == 16

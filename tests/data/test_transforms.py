"""From pixels to what a model wants, and back."""

import pytest
import torch

from hgrn_vision.data.spec import DataSpec
from hgrn_vision.data.transforms import normalise, unnormalise

SPEC = DataSpec((3, 4, 5), (0.1, 0.2, 0.3), (0.5, 0.25, 2.0), "bicubic", 1.0)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5)])
def test_pixels_are_normalised_channel_by_channel(shape):
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = pixels.clone()
    got = normalise(pixels, SPEC)
    assert got.dtype == torch.float32 and torch.equal(pixels, before)
    for channel in range(3):
        want = (pixels[..., channel, :, :].double() / 255 - SPEC.mean[channel]) / SPEC.std[channel]
        torch.testing.assert_close(got[..., channel, :, :].double(), want, atol=1e-6, rtol=1e-5)
    assert torch.equal((unnormalise(got, SPEC) * 255).round().byte(), pixels)


def test_pixels_of_another_scale_are_left_as_they_are():
    shares = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    before = shares.clone()
    got = normalise(shares, SPEC, scale=1)
    torch.testing.assert_close(got, normalise(shares * 255, SPEC), atol=1e-5, rtol=1e-5)
    assert torch.equal(shares, before)

"""From pixels to what a model expects, and back."""

import numpy as np
import pytest
import torch
from image_data import SPEC, config
from PIL import Image
from torchvision.transforms import Compose, Normalize, ToTensor

from hgrn_vision.data.loaders import EvalLoader, TrainLoader
from hgrn_vision.data.spec import DataSpec
from hgrn_vision.data.splits import open_splits
from hgrn_vision.data.transforms import BatchTransform, eval_transform, normalise, train_transform, unnormalise
from hgrn_vision.randomness import own_generators, seed_generators


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


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "v0", "original", "augmix-m5-w3"])
def test_every_policy_survives_many_images(policy):
    transform = train_transform(config(auto_augment=policy), SPEC)
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 8, 3), dtype=np.uint8))
    with own_generators():
        seed_generators(0)
        images = torch.stack([transform(image) for _ in range(150)])
    assert images.dtype == torch.uint8 and images.shape[1:] == SPEC.input_size and len(images.unique(dim=0)) > 100


def test_one_channel():
    spec = DataSpec((1, 8, 8), (0.5,), (0.2,), "bilinear", 1.0)
    train, validation = open_splits(config())
    assert next(TrainLoader(train, config(), spec).epoch(0))[0].images.shape == (16, 1, 8, 8)
    images = next(iter(EvalLoader(validation, config(), spec))).images
    assert np.array_equal(images[0, 0].numpy(), np.asarray(validation.load(0).convert("L")))


def test_normalisation_is_torchvisions():
    _, validation = open_splits(config())
    batch = next(iter(EvalLoader(validation, config(), SPEC)))
    expected = Compose([ToTensor(), Normalize(SPEC.mean, SPEC.std)])(validation.load(0))
    got = BatchTransform(config(), SPEC, 10).eval(batch.images)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-6)
    assert torch.equal(eval_transform(SPEC)(validation.load(0)), batch.images[0])


def test_targets_without_mixing_are_smoothed():
    plain = BatchTransform(config(mixup=0.0, cutmix=0.0, reprob=0.0, smoothing=0.1), SPEC, 4)
    images, targets = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), torch.tensor([2, 0])
    got, soft = plain.train(images, targets)
    torch.testing.assert_close(soft, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))
    assert torch.equal(got, plain.eval(images))


@pytest.mark.parametrize("settings", [dict(mixup=0.0), dict(cutmix=0.0), dict(mixup_mode="elem"), {}], ids=str)
def test_mixing_follows_the_seed(settings):
    mixing = BatchTransform(config(smoothing=0.0, **settings), SPEC, 4)
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    targets = torch.arange(8) % 4
    results = []
    for seed in (1, 1, 2):
        with own_generators():
            seed_generators(seed)
            results.append(mixing.train(images, targets))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(results[0][1].sum(1), torch.ones(8))


def test_random_erasing_has_an_effect():
    images, targets = torch.full((4, 3, 8, 8), 128, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    erased, _ = BatchTransform(config(mixup=0.0, cutmix=0.0, reprob=1.0), SPEC, 2).train(images, targets)
    assert all(len(image.unique()) > 3 for image in erased)

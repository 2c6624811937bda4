"""Settings for small data sets, by the number of images and their size."""

import pytest
import timm

from hgrn_vision.train.config import from_mapping
from hgrn_vision.train.finetune_recipe import (
    MAX_BAD_FRACTION,
    QUICK_EPOCHS,
    QUICK_FLOPS,
    QUICK_IMAGES,
    fitting_side,
    model_settings,
    quick_settings,
    recipe_settings,
)


@pytest.mark.parametrize("side, patch", [(8, 2), (16, 2), (17, 4), (64, 4), (65, 8), (128, 8), (129, 14), (224, 14)])
def test_patches_suit_the_side(side, patch):
    settings = model_settings(side)
    model = timm.create_model(settings["model"], depth=1, embed_dim=16, **settings["model_args"])
    assert model.patch_embed.patch_size == (patch, patch)
    assert side < 16 or 16 <= (side // patch) ** 2 <= 256


@pytest.mark.parametrize("side", [2, 8, 16, 17, 64, 100, 112])
def test_quick_patches_leave_at_most_64_tokens(side):
    patch = model_settings(side, quick=True)["model_args"]["patch_size"]
    assert patch % 2 == 0 and (side / patch) ** 2 <= 64


def test_a_side_that_patches_fill():
    settings = {"model": "hgrn_deit_tiny", "model_args": {"patch_size": 8}}
    assert [fitting_side(settings, side, exact=False) for side in (64, 71, 72, 3)] == [64, 64, 72, 8]
    assert fitting_side(settings, 72, exact=True) == 72
    # the model pads images to whole patches, unless it is told not to
    assert fitting_side(settings, 71, exact=True) == 71
    strict = {**settings, "model_args": {"patch_size": 8, "dynamic_img_pad": False}}
    with pytest.raises(ValueError, match="--img-size 71 is not a multiple of the model's patch size; 64 and 72 are"):
        fitting_side(strict, 71, exact=True)
    # a convolutional model has no patches
    assert fitting_side({"model": "test_resnet"}, 71, exact=True) == 71


@pytest.mark.parametrize("images, batch", [(10, 2), (32, 2), (64, 4), (500, 16), (512, 32), (10**6, 32)])
def test_batches_grow_with_the_data(images, batch):
    settings = recipe_settings(images, 64, trained=False)
    assert settings["batch_size"] == settings["micro_batch"] == batch
    assert recipe_settings(images, 64, trained=False, batch=96)["micro_batch"] == 48


def test_few_images_get_more_epochs_within_limits():
    def epochs(images, trained):
        return recipe_settings(images, 64, trained)["epochs"]

    assert (epochs(10**6, True), epochs(10**6, False)) == (30, 60)
    # 10 images are 5 steps: 300 of them are 60 epochs, 600 are 120
    assert (epochs(10, True), epochs(10, False)) == (60, 120)
    assert (epochs(2, True), epochs(2, False)) == (200, 200)
    given = recipe_settings(10, 64, trained=False, epochs=4)
    assert (given["epochs"], given["warmup_epochs"]) == (4, 0.8)


def test_new_weights_and_trained_ones():
    new, trained = (recipe_settings(1000, 64, trained) for trained in (False, True))
    names = ("patience", "lr", "layer_decay", "warmup_epochs", "max_bad_fraction")
    assert [new[name] for name in names] == [20, 1e-3, None, 3.0, MAX_BAD_FRACTION]
    assert [trained[name] for name in names] == [10, 5e-4, 0.75, 1.0, MAX_BAD_FRACTION]


def test_glyphs_are_not_mirrored_and_only_photographs_are_mixed():
    sides = {side: recipe_settings(1000, side, trained=False) for side in (31, 32, 95, 96)}
    assert {side: settings["hflip"] for side, settings in sides.items()} == {31: 0.0, 32: 0.5, 95: 0.5, 96: 0.5}
    assert [settings["mixup"] for settings in sides.values()] == [0.0, 0.0, 0.0, 0.2]
    assert [bool(settings["auto_augment"]) for settings in sides.values()] == [False, False, False, True]
    assert all(from_mapping(settings).workers == (0 if side == 31 else 2) for side, settings in sides.items())


def quick(images, **changes):
    settings = {**model_settings(112, quick=True), **recipe_settings(images, 112, trained=False), "img_size": 112}
    return quick_settings({**settings, **changes}, images, 10)


def test_quick_ends_long_epochs_early():
    short, long = quick(1000), quick(10**6)
    assert short["eval_images"] == long["eval_images"] == QUICK_IMAGES
    assert "epoch_steps" not in short and short["epochs"] > QUICK_EPOCHS
    assert long["epochs"] == QUICK_EPOCHS and long["epoch_steps"] < 10**6 // long["batch_size"]
    model = timm.create_model("hgrn_deit_tiny", num_classes=10, img_size=112, patch_size=14)
    flops = 6 * sum(p.numel() for p in model.parameters()) * 64 * long["batch_size"] * long["epoch_steps"] * 3
    assert flops == pytest.approx(QUICK_FLOPS, rel=0.01)
    assert short["warmup_epochs"] == min(3.0, short["epochs"] / 5) and long["warmup_epochs"] == QUICK_EPOCHS / 5


def test_quick_makes_nothing_longer():
    assert quick(100, epochs=5, warmup_epochs=0.5)["epochs"] == 5
    assert quick(100, epochs=5, warmup_epochs=0.5)["warmup_epochs"] == 0.5

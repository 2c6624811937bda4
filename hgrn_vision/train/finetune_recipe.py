"""Settings for up to a few thousand images, chosen by their number and size."""

import math
from typing import Any

import torch
from torch import nn

from .build import build_model
from .config import even_divisor, from_mapping

# the largest image side for each patch size, which gives 16 to 256 tokens
PATCHES = {16: 2, 64: 4, 128: 8}
MAX_BAD_FRACTION = 0.25  # a few broken files are no reason to stop
QUICK_SIDE = 112
# for starting from the packaged weights, whose training ended at these sizes; smaller images are enlarged
STARTER_SIDE, STARTER_QUICK_SIDE = 112, 84
# they have seen little and still have much to learn, in their first layers too; docs/starter.md has the measurements
STARTER_SETTINGS = {"lr": 2e-3, "layer_decay": 0.9}
QUICK_EPOCHS = 3
QUICK_IMAGES = 256
# two laptop cores train at about 50 GFLOP/s; four minutes of that leave one for reading and evaluating
QUICK_FLOPS = 240 * 50e9


def model_settings(side: int, quick: bool = False) -> dict[str, Any]:
    """The tiny model, to be trained from scratch, with patches that suit images of `side` pixels."""
    patch = next((patch for largest, patch in PATCHES.items() if side <= largest), None)
    if quick:
        # at most 8 by 8 tokens: cheaper images allow more steps, which new weights need most
        patch = 2 * math.ceil(side / 16)
    return {"model": "hgrn_deit_tiny", "model_args": {"patch_size": patch} if patch else {}}


def fitting_side(settings: dict[str, Any], side: int, exact: bool) -> int:
    """`side` rounded down to a multiple of the model's patch size, at least one patch.

    If it has to be exact, models that pad images take any side; for others a ValueError names the sides that fit.
    """
    patch_embed = getattr(_outline(settings), "patch_embed", None)
    patch = getattr(patch_embed, "patch_size", (1, 1))[0]
    fitting = max(patch, side // patch * patch)
    if exact and getattr(patch_embed, "dynamic_img_pad", False):
        return side
    if exact and fitting != side:
        raise ValueError(
            f"--img-size {side} is not a multiple of the model's patch size; {fitting} and {fitting + patch} are"
        )
    return fitting


def _outline(settings: dict[str, Any], classes: int = 2) -> nn.Module:
    """The model on the meta device: shapes without weights."""
    names = ("model", "model_args", "img_size")
    with torch.device("meta"):
        return build_model(from_mapping({name: settings[name] for name in names if name in settings}), classes)


def recipe_settings(
    images: int, side: int, trained: bool, batch: int | None = None, epochs: int | None = None
) -> dict[str, Any]:
    """All settings but the model's, for `images` training images at `side` pixels and trained or new weights."""
    batch = batch or 2 ** min(5, int(math.log2(max(images // 16, 2))))
    steps = max(1, images // batch)
    # few images make short epochs, so there have to be enough epochs to learn something
    epochs = epochs or min(200, max(30 if trained else 60, math.ceil((300 if trained else 600) / steps)))
    return {
        "epochs": epochs,
        "patience": 10 if trained else 20,
        "batch_size": batch,
        "micro_batch": even_divisor(batch, 64),
        "lr": 5e-4 if trained else 1e-3,
        "layer_decay": 0.75 if trained else None,
        "betas": (0.9, 0.999),
        "weight_decay": 0.05,
        "warmup_epochs": min(1.0 if trained else 3.0, epochs / 5),
        "repeats": 1,
        "max_bad_fraction": MAX_BAD_FRACTION,
        **_augmentation(side),
    }


def _augmentation(side: int) -> dict[str, Any]:
    """The augmentation that suits images of `side` pixels: glyphs must not be mirrored, photographs may be."""
    nothing = {"auto_augment": "", "color_jitter": 0.0, "hflip": 0.0, "mixup": 0.0, "cutmix": 0.0, "reprob": 0.0}
    if side < 32:
        return {**nothing, "scale": (0.8, 1.0), "crop_pct": 1.0, "workers": 0}
    if side < 96:
        return {**nothing, "scale": (0.5, 1.0), "color_jitter": 0.2, "hflip": 0.5, "crop_pct": 1.0, "workers": 2}
    lively = {"auto_augment": "rand-m7-mstd0.5-inc1", "hflip": 0.5, "reprob": 0.1, "mixup": 0.2, "cutmix": 0.0}
    return {**lively, "scale": (0.35, 1.0), "drop_path": 0.1, "workers": 2}


def quick_settings(settings: dict[str, Any], images: int, classes: int) -> dict[str, Any]:
    """`settings` cut down to what two laptop cores can do in about five minutes."""
    config, model = from_mapping(settings), _outline(settings, classes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = getattr(getattr(model, "patch_embed", None), "num_patches", None) or 256
    # per weight and token, two operations forward and four backward
    affordable = max(QUICK_EPOCHS, int(QUICK_FLOPS / (6 * parameters * tokens * config.batch_size)))
    steps = max(1, images // config.batch_size)
    epochs = min(config.epochs, affordable // steps)
    cut = {"eval_images": QUICK_IMAGES}
    if epochs < QUICK_EPOCHS:
        cut["epoch_steps"], epochs = min(steps, affordable // QUICK_EPOCHS), QUICK_EPOCHS
    return {**settings, **cut, "epochs": epochs, "warmup_epochs": min(config.warmup_epochs, epochs / 5)}

"""Named presets: each with the command that runs it and the result to expect."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import TrainConfig, from_mapping


@dataclass(frozen=True)
class Recipe:
    """Settings that differ from the defaults, and what they are known to reach."""

    command: str
    result: str
    settings: dict[str, Any]


RECIPES = {
    "paper": Recipe(
        "torchrun --nproc-per-node 8 train_imagenet.py /data/imagenet --recipe paper",
        "top-1 on ImageNet-1k: 74.40 with hgrn_deit_tiny, 80.09 with hgrn_deit_small (arXiv 2311.04823, table 7)",
        {},
    ),
    "released": Recipe(
        "torchrun --nproc-per-node 8 train_imagenet.py /data/imagenet --recipe released",
        "the settings in the authors' released code, for their own model; no result was published with them",
        {
            "model": "hgrn1d_vit_tiny",
            "lr": 2e-3,
            "betas": (0.9, 0.999),
            "weight_decay": 0.05,
            "clip_grad": 5.0,
            "warmup_epochs": 10.0,
            "crop_pct": 0.875,
            "precision": "fp32",
        },
    ),
    "deit": Recipe(
        "torchrun --nproc-per-node 8 train_imagenet.py /data/imagenet --recipe deit --model deit_tiny_patch16_224",
        "top-1 on ImageNet-1k: 72.2 with deit_tiny_patch16_224, 79.8 with deit_small_patch16_224 (arXiv 2012.12877)",
        {
            "model": "hgrn_deit_tiny_patch16_224",
            "batch_size": 1024,
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "weight_decay": 0.05,
            "clip_grad": 0.0,
            "drop_path": 0.1,
            "crop_pct": 0.875,
        },
    ),
    "digits": Recipe(
        "python train_imagenet.py",
        "top-1 above 97 on the held-out fifth of the 1,797 packaged digits, in three minutes on two cores",
        {
            "data": "digits",
            "model_args": {"patch_size": 2},
            "img_size": 8,
            "holdout": 0.2,
            "epochs": 18,
            "batch_size": 32,
            "micro_batch": 32,
            "lr": 2e-3,
            "weight_decay": 0.05,
            "warmup_epochs": 1.0,
            "repeats": 1,
            "auto_augment": "",
            "color_jitter": 0.0,
            "scale": (0.9, 1.0),
            "ratio": (0.95, 1.05),
            "hflip": 0.0,
            "mixup": 0.2,
            "cutmix": 0.0,
            "reprob": 0.0,
            "ema": 0.99,
            "crop_pct": 1.0,
            "workers": 0,
        },
    ),
}

# of `hgrn-vision distill`: the teacher's answer to a crop says more than any label, so light augmentation is enough
DISTILL = Recipe(
    "hgrn-vision distill photos/ --teacher resnet50.a1_in1k --output runs/student",
    "depends on the photographs and the teacher; docs/starter.md has what one such run reached",
    {
        "img_size": 84,
        "holdout": 0.01,
        "epochs": 30,
        "batch_size": 256,
        "micro_batch": 64,
        # in short trials students learned more from the same number of samples than with AdamW
        "opt": "muon",
        "lr": 5e-3,
        "weight_decay": 0.05,
        "warmup_epochs": 1.0,
        "ema": 0.999,
        "smoothing": 0.0,
        "repeats": 1,
        "auto_augment": "",
        "color_jitter": 0.0,
        "scale": (0.25, 1.0),
        "mixup": 0.0,
        "cutmix": 0.0,
        "reprob": 0.0,
        "crop_pct": 1.0,
        "workers": 1,
        "max_bad_fraction": 0.1,
    },
)


def resolve(settings: Mapping[str, Any]) -> TrainConfig:
    """The named recipe updated with `settings`; the default is recipe paper with data and digits without."""
    has_data = bool(settings.get("data") or settings.get("dataset"))
    name = settings.get("recipe") or ("paper" if has_data else "digits")
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(RECIPES)}")
    if name != "digits" and not has_data:
        raise ValueError(f"recipe {name} needs images, for example: {RECIPES[name].command}")
    if name == "digits" and has_data and settings.get("data") != "digits":
        raise ValueError("recipe digits is for the packaged digits; leave DATA out, or choose another recipe")
    return from_mapping({**RECIPES[name].settings, **settings, "recipe": name})

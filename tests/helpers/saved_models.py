"""Small models in folders, packaged weights, and images, for the tests of the commands."""

import json
from dataclasses import replace

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import get_pretrained_cfg, save_for_hf

from hgrn_vision import packaged

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2}
CLASSES = ["rose", "daisy <b>", "cornflower é"]


def small_model(num_classes=3, seed=0):
    """A model whose answers differ from image to image."""
    torch.manual_seed(seed)
    model = timm.create_model("hgrn_deit_tiny", num_classes=num_classes, **SMALL).eval()
    with torch.no_grad():
        model.head.weight.normal_()
        model.head.bias.zero_()
    return model


def save_model(folder, class_names=CLASSES, seed=0):
    """Write a model folder as a run does; returns the model."""
    model = small_model(len(class_names), seed)
    config = {"label_names": list(class_names)}
    save_for_hf(model, folder, model_config=config, model_args=dict(SMALL), safe_serialization=True)
    return model


def package_starter(folder, monkeypatch):
    """Put seeded weights in place of the packaged ones; returns their model."""
    torch.manual_seed(7)
    model = timm.create_model("hgrn_deit_tiny").eval()
    path = packaged.write_starter(model, folder)
    monkeypatch.setattr(packaged, "PRETRAINED", folder)
    cfg = replace(get_pretrained_cfg(packaged.STARTER), file=str(path))
    for name in ("hgrn_deit_tiny", packaged.STARTER):
        monkeypatch.setitem(timm.models._registry._model_pretrained_cfgs, name, cfg)
    return model


def edit_config(folder, **changes):
    """Change entries of a model folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_image(path, seed, size=(16, 16)):
    """Coarse colour noise, so that a small model tells one image from another."""
    colours = np.random.RandomState(seed).randint(0, 256, (2, 2, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours).resize(size, Image.NEAREST).save(path)
    return path


def write_photos(folder, counts, side=16):
    """Images of 16x16 pixels, `counts` of each class."""
    for label, (name, count) in enumerate(counts.items()):
        for number in range(count):
            write_image(folder / name / f"photo {number}.png", 100 * label + number, (side, side))
    return folder

"""Small models in folders, and pictures for them, for the tests of the commands."""

import json

import numpy as np
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import hgrn_vision  # noqa: F401

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2}
CLASSES = ["rose", "daisy <b>", "cornflower é"]


def small_model(num_classes=3, seed=0):
    """A model whose answers differ from picture to picture."""
    torch.manual_seed(seed)
    model = timm.create_model("hgrn_deit_tiny", num_classes=num_classes, **SMALL).eval()
    with torch.no_grad():
        model.head.weight.normal_()
        model.head.bias.zero_()
    return model


def save_model(folder, class_names=CLASSES, seed=0):
    """The model folder that a run leaves behind."""
    model = small_model(len(class_names), seed)
    config = {"label_names": list(class_names)}
    save_for_hf(model, folder, model_config=config, model_args=dict(SMALL), safe_serialization=True)
    return model


def edit_config(folder, **changes):
    """Change entries of a model folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_picture(path, seed, size=(16, 16)):
    """Coarse colour noise, so that a small model tells one picture from another."""
    colours = np.random.RandomState(seed).randint(0, 256, (2, 2, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours).resize(size, Image.NEAREST).save(path)
    return path

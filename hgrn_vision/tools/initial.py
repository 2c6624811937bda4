"""A trained model to begin from: the settings that build it again, and its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_state_dict

from hgrn_vision import load_checkpoint

from .loading import FOLDER, HUB, is_checkpoint, load_model

# models of the authors' released checkpoints, by width
RELEASED = {192: "hgrn1d_vit_tiny", 384: "hgrn1d_vit_small"}
# arguments that the training settings have a name of their own for
SETTINGS = ("num_classes", "img_size", "drop_path_rate", "in_chans")


@dataclass(frozen=True)
class Initial:
    """What a run begins from."""

    settings: dict[str, Any]
    weights: dict[str, torch.Tensor]
    title: str


def read_initial(where: str, model_name: str | None = None) -> Initial:
    """A run, a checkpoint, a model folder, hf-hub:NAME, or a bare weights file of the model `model_name`."""
    path = Path(where.removeprefix(FOLDER))
    if not where.startswith(HUB) and path.is_file() and not _is_described(path):
        return _read_weights(path, model_name)
    loaded = load_model(where, device="cpu")
    spec = loaded.spec
    repeat = 3 // len(spec.mean)
    settings = {
        "model": loaded.model.pretrained_cfg["architecture"],
        "model_args": {name: value for name, value in loaded.model_args.items() if name not in SETTINGS},
        "img_size": spec.input_size[1],
        "mean": spec.mean * repeat,
        "std": spec.std * repeat,
        "interpolation": spec.interpolation,
        "crop_pct": spec.crop_pct,
    }
    title = f"{where} ({settings['model']}, {len(loaded.class_names)} classes at {spec.input_size[1]} pixels)"
    return Initial(settings, loaded.model.state_dict(), title)


def _is_described(path: Path) -> bool:
    return is_checkpoint(path) or (path.parent / "config.json").is_file()


def _read_weights(path: Path, model_name: str | None) -> Initial:
    """A file with nothing beside it that says which model it is of."""
    name = model_name or _released_model(path)
    model = timm.create_model(name)
    load_checkpoint(model, path, drop_head=True)
    return Initial({"model": name}, model.state_dict(), f"{path} ({name})")


def _released_model(path: Path) -> str:
    try:
        tensors = load_state_dict(str(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is not a checkpoint that can be read safely: {reason}") from error
    bounds = tensors.get("lower_bounds")
    if bounds is None or bounds.shape[-1] not in RELEASED:
        raise ValueError(f"{path} does not say which model it is of: name it with --model")
    return RELEASED[bounds.shape[-1]]

"""Trained models for the commands: from a run, a model folder, a weights file or the Hugging Face hub."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from timm.data import resolve_data_config
from timm.layers import to_2tuple
from timm.models import is_model
from torch import nn

from hgrn_vision import load_checkpoint

from ..train.augment import eval_transform
from ..train.config import DataSpec
from ..train.distributed import choose_device

WEIGHTS = ("*.safetensors", "*.bin", "*.pth")
HUB = "hf-hub:"
FOLDER = "local-dir:"


@dataclass(frozen=True)
class LoadedModel:
    """A classifier in evaluation mode with what is needed to use it."""

    name: str
    model: nn.Module
    class_names: list[str]
    spec: DataSpec
    device: torch.device

    def prepare(self, image: Image.Image) -> torch.Tensor:
        """RGB image -> normalised float tensor (C, H, W), as the model saw its validation images."""
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (self.spec.mean, self.spec.std))
        return self._crop(image).float().div_(255).sub_(mean).div_(std)

    @cached_property
    def _crop(self) -> Callable[[Image.Image], torch.Tensor]:
        return eval_transform(self.spec)


def load_model(where: str, device: str = "auto", img_size: int | None = None, **model_args: Any) -> LoadedModel:
    """Load a trained classifier.

    Args:
        where: a run folder, a model folder (also as local-dir:FOLDER), a weights file in one, or hf-hub:NAME.
        device: cpu, cuda or another torch device; auto takes a GPU where there is one.
        img_size: side of the images; by default the one that the model was trained on.
        model_args: more arguments of timm.create_model, such as exportable=True.
    """
    target = choose_device(device)
    if where.startswith(HUB):
        name, model = where, _create(where, where, pretrained=True, **model_args)
    else:
        name = where.removeprefix(FOLDER)
        model, trained_size = _load_local(Path(name), model_args)
        img_size = img_size or trained_size
    _check_finite(model, name)
    class_names = _class_names(model, name)
    return LoadedModel(name, model.eval().to(target), class_names, _data_spec(model, img_size), target)


def _load_local(path: Path, model_args: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model, and the image size that it was constructed for where its description says one."""
    if not path.exists():
        raise ValueError(f"no model at {path}: expected a run, a model folder, a weights file or {HUB}NAME")
    folder = path if path.is_dir() else path.parent
    if (folder / "model").is_dir():
        folder = folder / "model"
    saved_args = _check_folder(folder).get("model_args") or {}
    model = _create(f"{FOLDER}{folder}", str(path), pretrained=path.is_dir(), **model_args)
    if path.is_file():
        load_checkpoint(model, path)
    return model, saved_args.get("img_size")


def _check_folder(folder: Path) -> dict[str, Any]:
    """The description in a model folder; refuses a folder that timm could not load, with the reason."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        raise ValueError(f"{folder} has a config.json but no weights: model.safetensors is missing")
    try:
        description = json.loads(config.read_text(encoding="utf-8"))
        architecture = description["architecture"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is not a model's description: {type(error).__name__} {error}") from error
    if not is_model(architecture):
        raise ValueError(f"{config} names the architecture {architecture!r}, which timm does not know")
    return description


def _create(timm_name: str, what: str, **model_args: Any) -> nn.Module:
    try:
        return timm.create_model(timm_name, **model_args)
    # what a damaged or foreign folder makes timm, torch and safetensors raise
    except (RuntimeError, TypeError, KeyError, SafetensorError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"cannot load the model of {what}: {reason}") from error


def _check_finite(model: nn.Module, name: str) -> None:
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: {key} holds values that are NaN or infinite")


def _class_names(model: nn.Module, name: str) -> list[str]:
    """The names of the head's outputs, their numbers where the model has none."""
    count = model.num_classes
    if not count:
        raise ValueError(f"{name} has no classification head")
    names = model.pretrained_cfg.get("label_names")
    if not names:
        return [str(i) for i in range(count)]
    if isinstance(names, dict):
        names = [names.get(str(i), names.get(i, i)) for i in range(max(map(int, names)) + 1)]
    names = [str(label) for label in names]
    if len(names) != count:
        raise ValueError(f"{name}: {len(names)} label names for a head of {count} classes; correct its config.json")
    if len(set(names)) != count:
        twice = next(label for label in names if names.count(label) > 1)
        raise ValueError(f"{name}: two classes are both named {twice!r}; correct its config.json")
    return names


def _data_spec(model: nn.Module, img_size: int | Sequence[int] | None) -> DataSpec:
    config = resolve_data_config(model=model)
    channels = getattr(model, "in_chans", config["input_size"][0])
    return DataSpec(
        input_size=(channels, *to_2tuple(img_size or config["input_size"][1:])),
        mean=tuple(config["mean"])[:channels],
        std=tuple(config["std"])[:channels],
        interpolation=config["interpolation"],
        crop_pct=config["crop_pct"],
    )

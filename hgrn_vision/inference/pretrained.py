"""Loading trained models, to use or to start a run from: a run, a folder, a file, the Hub, or the packaged weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from safetensors import SafetensorError
from timm.layers import set_layer_config, to_2tuple
from timm.models import get_arch_name, is_model, load_model_config_from_hf, load_state_dict
from torch import nn

from ..data.imagenet import imagenet_aliases, imagenet_names
from ..data.spec import DataSpec, resolve_spec
from ..data.transforms import eval_transform, normalise
from ..train.build import rebuild_model
from ..train.checkpoint import is_checkpoint, read
from ..train.distributed import choose_device
from ..weights import load_checkpoint

WEIGHTS = ("*.safetensors", "*.bin", "*.pth")
HUB = "hf-hub:"
FOLDER = "local-dir:"
# models of the authors' released checkpoints, by width
RELEASED = {192: "hgrn1d_vit_tiny", 384: "hgrn1d_vit_small"}
# constructor arguments that are training settings of their own
SETTINGS = ("num_classes", "img_size", "drop_path_rate", "in_chans")


@dataclass(frozen=True)
class LoadedModel:
    """A classifier in evaluation mode, with everything needed to use it."""

    name: str
    model: nn.Module
    class_names: list[str]
    spec: DataSpec
    device: torch.device
    model_args: dict[str, Any]  # the arguments of its constructor

    def prepare(self, image: Image.Image) -> torch.Tensor:
        """RGB image -> normalised float tensor (C, H, W), prepared like the validation images in training."""
        return normalise(self._crop(image), self.spec)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """The model's logits (B, classes) in float32, for uint8 images (B, C, H, W)."""
        return self.model(normalise(images.to(self.device), self.spec)).float()

    @property
    def aliases(self) -> list[tuple[str, ...]]:
        """Other names of each class if the classes are ImageNet's, else empty."""
        count = len(self.class_names)
        return imagenet_aliases(count) if self.class_names == imagenet_names(count) else []

    @cached_property
    def _crop(self) -> Callable[[Image.Image], torch.Tensor]:
        return eval_transform(self.spec)


def load_model(
    where: str,
    device: str = "auto",
    img_size: int | None = None,
    scriptable: bool | None = None,
    exportable: bool | None = None,
) -> LoadedModel:
    """Load a trained classifier.

    Args:
        where: a run folder, a model folder (also as local-dir:FOLDER), a checkpoint file of a run, a weights file in a
            model folder, hf-hub:NAME, or the registered name of a model whose weights come with the package.
        device: cpu, cuda or another torch device; auto picks a GPU if there is one.
        img_size: side of the images; by default the size that the model was trained for.
        scriptable: create the model in timm's scriptable mode.
        exportable: create the model in timm's exportable mode.
    """
    target = choose_device(device)
    name = where.removeprefix(FOLDER)
    with set_layer_config(scriptable=scriptable, exportable=exportable):
        if where.startswith(HUB):
            model = _create(where, where, pretrained=True)
            model_args = load_model_config_from_hf(where.removeprefix(HUB))[2] or {}
        elif Path(name).is_dir():
            model, model_args = _load_folder(Path(name))
        elif _is_name(where):
            model, model_args = _load_packaged(where), {}
        else:
            model, model_args = _load_file(Path(name))
    if "img_size" in model_args:
        # save_for_hf writes the architecture's default input size, not the size the model was built for
        size = (model.pretrained_cfg["input_size"][0], *to_2tuple(model_args["img_size"]))
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": size}
    _check_finite(model, name)
    class_names = _class_names(model, name)
    spec = resolve_spec(model, img_size=img_size)
    return LoadedModel(name, model.eval().to(target), class_names, spec, target, dict(model_args))


def _load_folder(folder: Path, pretrained: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a model folder or a run, and its constructor arguments."""
    if (folder / "model").is_dir():
        folder = folder / "model"
    elif (folder / "checkpoints").is_dir():
        raise ValueError(f"the run in {folder} has no model yet: it has not finished an epoch")
    saved_args = _check_folder(folder).get("model_args") or {}
    model = _create(f"{FOLDER}{folder}", str(folder), pretrained=pretrained)
    return model, saved_args


def packaged_models() -> dict[str, str]:
    """The models whose weights come with the package: registered names, and the same names with their tag."""
    return {get_arch_name(name): name for name in timm.list_models(module="hgrn", pretrained=True, include_tags=True)}


def _is_name(where: str) -> bool:
    """Whether this is a model's name in timm's registry; a folder or file of that name takes precedence."""
    return is_model(where) and not Path(where).exists()


def _load_packaged(name: str) -> nn.Module:
    packaged = packaged_models()
    if name not in packaged and name not in packaged.values():
        raise ValueError(f"the package has no weights for {name}, only for {', '.join(packaged)}")
    model = _create(name, name, pretrained=True)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": imagenet_names(model.num_classes)}
    return model


def _load_file(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a run's checkpoint, or in a weights file with a config.json beside it."""
    if not path.is_file():
        names = ", ".join(packaged_models())
        raise ValueError(f"no model at {path}: expected a run, model folder, weights file, {HUB}NAME or {names}")
    if is_checkpoint(path):
        checkpoint = read(path)
        model = rebuild_model(checkpoint)
        model.pretrained_cfg = {**model.pretrained_cfg, "label_names": checkpoint.class_names}
        return model, checkpoint.config["model_args"]
    model, model_args = _load_folder(path.parent, pretrained=False)
    load_checkpoint(model, path)
    return model, model_args


def _check_folder(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder; refuses a folder that timm could not load, and says why."""
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        raise ValueError(f"{folder} has a config.json but no weights: model.safetensors is missing")
    try:
        description = json.loads(config.read_text(encoding="utf-8"))
        architecture = description["architecture"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} does not describe a model: {type(error).__name__} {error}") from error
    if not is_model(architecture):
        raise ValueError(f"{config} names the architecture {architecture!r}, which timm does not know")
    return description


def _create(timm_name: str, what: str, **model_args: Any) -> nn.Module:
    try:
        return timm.create_model(timm_name, **model_args)
    # what timm and its libraries raise for a damaged folder or a name unknown to the hub
    except (RuntimeError, TypeError, KeyError, AssertionError, SafetensorError, HfHubHTTPError) as error:
        reason = " ".join(" ".join(str(error).splitlines()[:2]).split()) or type(error).__name__
        raise ValueError(f"cannot load the model from {what}: {reason}") from error


def _check_finite(model: nn.Module, name: str) -> None:
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: {key} holds values that are NaN or infinite")


def _class_names(model: nn.Module, name: str) -> list[str]:
    """The names of the head's outputs, or their numbers if the model has no names."""
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
        raise ValueError(f"{name}: {len(names)} label names for a head of {count} classes; fix its config.json")
    if len(set(names)) != count:
        twice = next(label for label in names if names.count(label) > 1)
        raise ValueError(f"{name}: two classes are both named {twice!r}; fix its config.json")
    return names


@dataclass(frozen=True)
class Initial:
    """What a run starts from."""

    settings: dict[str, Any]
    weights: dict[str, torch.Tensor]
    title: str
    packaged: bool = False  # weights that come with the package


def read_initial(where: str, model_name: str | None = None) -> Initial:
    """Read anything that `load_model` accepts, or a bare weights file of the model `model_name`."""
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
    packaged = _is_name(where)
    what = "weights that come with the package" if packaged else settings["model"]
    title = f"{where} ({what}, {len(loaded.class_names)} classes at {spec.input_size[1]} pixels)"
    return Initial(settings, loaded.model.state_dict(), title, packaged)


def _is_described(path: Path) -> bool:
    return is_checkpoint(path) or (path.parent / "config.json").is_file()


def _read_weights(path: Path, model_name: str | None) -> Initial:
    """Read a weights file that has no config.json beside it."""
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
        raise ValueError(f"{path} does not say which model it belongs to: name it with --model")
    return RELEASED[bounds.shape[-1]]

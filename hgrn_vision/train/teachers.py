"""Teachers for distillation: a timm model, a model folder, a run, or an ONNX file that onnxruntime runs."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from timm.data import DEFAULT_CROP_PCT, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from ..data.imagenet import imagenet_aliases, imagenet_names
from ..data.spec import DataSpec, resolve_spec
from ..data.transforms import normalise, resize, unnormalise

ONNX_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


class Answer(NamedTuple):
    """A teacher's answer to a batch: logits (B, classes), and its last feature map (B, C, H, W) if that is wanted."""

    logits: torch.Tensor
    map: torch.Tensor | None


@dataclass(frozen=True)
class Teacher:
    """A trained classifier, the pixels that it expects and the names of its classes."""

    name: str
    network: nn.Module  # normalised images -> Answer
    spec: DataSpec
    class_names: list[str] | None
    num_classes: int
    map_channels: int | None = None  # of its last feature map; None if that is not wanted
    digest: str = ""  # changes with its weights
    device: torch.device = torch.device("cpu")

    @property
    def aliases(self) -> list[tuple[str, ...]]:
        """Other names of each class, if the classes are ImageNet's: its WordNet id, and words of its own."""
        return imagenet_aliases(self.num_classes) or [()] * self.num_classes

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, spec: DataSpec) -> Answer:
        """The answer to images of any size, normalised as `spec` says."""
        images = resize(images, self.spec.input_size[-2:])
        if (spec.mean, spec.std) != (self.spec.mean, self.spec.std):
            images = normalise(unnormalise(images, spec), self.spec, scale=1)
        return self.network(images)


def open_teacher(
    name: str,
    side: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    maps: bool = False,
    device: torch.device | None = None,
) -> Teacher:
    """Load a teacher and try it on a batch of two blank images.

    Args:
        name: a timm name, local-dir:FOLDER, hf-hub:NAME, a run or model folder of ours, or a .onnx file.
        side: side of its images; its own by default.
        mean: mean of its pixels; its own by default.
        std: standard deviation of its pixels; its own by default.
        maps: whether its feature map is wanted too.
        device: where it runs; ONNX files run on the CPU.
    """
    device = device or torch.device("cpu")
    wanted = {key: value for key, value in (("mean", mean), ("std", std)) if value}
    open_one = _open_onnx if name.endswith(".onnx") else _open_timm
    network, spec, class_names = open_one(name, side, wanted, maps, device)
    answer = _try(name, network, torch.zeros(2, *spec.input_size, device=device))
    count = answer.logits.shape[-1]
    class_names = class_names or imagenet_names(count)
    if class_names and len(class_names) != count:
        raise ValueError(f"teacher {name} names {len(class_names)} classes but has {count} outputs")
    channels = answer.map.shape[1] if answer.map is not None else None
    return Teacher(name, network, spec, class_names, count, channels, _digest(name, network), device)


def _digest(name: str, network: nn.Module) -> str:
    digest = hashlib.sha256()
    if isinstance(network, _OnnxNetwork):
        digest.update(Path(name).read_bytes())
    for tensor in network.state_dict().values():
        digest.update(tensor.cpu().flatten().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _try(name: str, network: nn.Module, images: torch.Tensor) -> Answer:
    try:
        with torch.no_grad():
            return network(images)
    # models and runtimes raise all sorts of errors for images of a wrong size
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        size = "x".join(map(str, images.shape[1:]))
        raise ValueError(f"teacher {name} does not run on images of {size}: {reason}") from error


Opened = tuple[nn.Module, DataSpec, list[str] | None]  # the network, the pixels it expects, its class names


class _TimmNetwork(nn.Module):
    """A timm model that also returns its last feature map, if that is wanted."""

    def __init__(self, model: nn.Module, maps: bool) -> None:
        super().__init__()
        self.model, self.maps = model, maps

    def forward(self, images: torch.Tensor) -> Answer:
        if not self.maps:
            return Answer(self.model(images), None)
        features, maps = self.model.forward_intermediates(images, indices=1)
        return Answer(self.model.forward_head(features), maps[-1])


def _open_timm(name: str, side: int | None, wanted: dict[str, Any], maps: bool, device: torch.device) -> Opened:
    folder = Path(name)
    source = name
    if folder.is_dir():
        # a run keeps its model in a folder of its own
        source = f"local-dir:{folder / 'model' if (folder / 'model').is_dir() else folder}"
    arguments = {"img_size": side} if side else {}
    try:
        try:
            model = timm.create_model(source, pretrained=True, **arguments)
        except TypeError as error:
            # convolutional models take any size and have no argument for it
            if "'img_size'" not in str(error):
                raise
            model = timm.create_model(source, pretrained=True)
    except (RuntimeError, TypeError, AssertionError, KeyError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot create teacher {name}: {reason}") from error
    if maps and not hasattr(model, "forward_intermediates"):
        raise ValueError(f"teacher {name} has no feature maps; use --distill logits")
    if not model.num_classes:
        raise ValueError(f"teacher {name} has no classification head")
    spec = resolve_spec(model, **wanted)
    channels, *described = spec.input_size
    # the pretrained_cfg of a saved model has the size of its architecture, the patch embedding the one it was built for
    size = (side, side) if side else getattr(getattr(model, "patch_embed", None), "img_size", None) or described
    spec = spec._replace(input_size=(channels, *size))
    return _TimmNetwork(model.requires_grad_(False).eval().to(device), maps), spec, _timm_names(model)


def _timm_names(model: nn.Module) -> list[str] | None:
    names = model.pretrained_cfg.get("label_names")
    if isinstance(names, dict):
        names = [names.get(str(i), names.get(i, i)) for i in range(len(names))]
    return [str(name) for name in names] if names else None


class _OnnxNetwork(nn.Module):
    """An ONNX file behind the interface of a module; it runs on the CPU, in the file's own precision."""

    def __init__(self, session: Any, image: str, dtype: Any, outputs: list[str]) -> None:
        super().__init__()
        self.session, self.image, self.dtype, self.outputs = session, image, dtype, outputs

    def forward(self, images: torch.Tensor) -> Answer:
        pixels = images.detach().float().cpu().numpy().astype(self.dtype, copy=False)
        found = self.session.run(self.outputs, {self.image: np.ascontiguousarray(pixels)})
        found = [torch.from_numpy(np.asarray(values, dtype=np.float32)).to(images.device) for values in found]
        return Answer(*found, *[None] * (2 - len(found)))


def _open_onnx(name: str, side: int | None, wanted: dict[str, Any], maps: bool, device: torch.device) -> Opened:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("an ONNX teacher needs onnxruntime: pip install 'hgrn_vision[export]'") from error
    if not Path(name).is_file():
        raise ValueError(f"no such file: {name}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # otherwise its idle threads would spin while the student needs the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # what goes wrong is raised too, and is to be said once
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(name, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{name} is not an ONNX model that runs here: {' '.join(str(error).split())[:200]}") from error
    image, dtype, channels, own_sides = _image_input(name, session)
    logits, last_map = _outputs(name, session, maps)
    about = _metadata(session)
    input_size = about.get("input_size") or (channels, 224, 224)
    # sizes that are fixed in the file cannot be changed
    size = tuple(own or side or told for own, told in zip(own_sides, input_size[1:], strict=True))
    if side and size != (side, side):
        raise ValueError(f"{name} takes images of {size[0]}x{size[1]} pixels only, not {side}")
    pixels = {
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "interpolation": "bicubic",
        "crop_pct": DEFAULT_CROP_PCT,
    }
    pixels |= {key: about[key] for key in pixels if key in about} | wanted
    mean, std = (tuple(pixels[key])[:channels] for key in ("mean", "std"))
    spec = DataSpec((channels, *size), mean, std, pixels["interpolation"], pixels["crop_pct"])
    network = _OnnxNetwork(session, image, dtype, [output.name for output in (logits, last_map) if output])
    return network, spec, about.get("class_names")


def _image_input(name: str, session: Any) -> tuple[str, Any, int, list[int | None]]:
    """Name, type, channels and fixed sides of the only input, which has to be a batch of images."""
    inputs = session.get_inputs()
    first = inputs[0]
    shape = [size if isinstance(size, int) else None for size in first.shape]
    is_image = len(inputs) == 1 and len(shape) == 4 and shape[1] in (1, 3, None) and first.type in ONNX_TYPES
    if not is_image:
        found = ", ".join(f"{each.name} {each.type} {each.shape}" for each in inputs)
        raise ValueError(f"the input of {name} is not an image (batch, 1 or 3 channels, height, width): {found}")
    if shape[0] is not None:
        raise ValueError(f"{name} only takes batches of {shape[0]}; export it with a dynamic batch size")
    return first.name, ONNX_TYPES[first.type], shape[1] or 3, shape[2:]


def _outputs(name: str, session: Any, maps: bool) -> tuple[Any, Any]:
    """The output with the logits, and the one with the feature map if that is wanted."""
    outputs = session.get_outputs()
    logits = next((output for output in outputs if len(output.shape) == 2), None)
    if logits is None:
        raise ValueError(f"{name} has no output of shape (batch, classes)")
    last_map = next((output for output in outputs if len(output.shape) == 4), None) if maps else None
    if maps and last_map is None:
        raise ValueError(f"teacher {name} has no feature maps; use --distill logits")
    return logits, last_map


def _metadata(session: Any) -> dict[str, Any]:
    """The metadata that our own export writes into the file; usually empty for other files."""
    found = {}
    for key, value in session.get_modelmeta().custom_metadata_map.items():
        try:
            found[key] = json.loads(value)
        except ValueError:
            continue
    return found

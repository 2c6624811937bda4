"""A model as a graph of plain operators, and as an ONNX file: for `export`, and for `bench` in onnxruntime."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ..inference.pretrained import LoadedModel
from ..version import __version__

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

NEEDS = ("onnx", "onnxscript", "onnxruntime")
MOST_PATCHES = 128  # along a side: the exported scan covers their square


def check_installed(what: str, needs: Sequence[str] = NEEDS) -> None:
    """Refuse, before any work is done, what needs a package that is not there."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{what} needs {', '.join(missing)}: pip install 'hgrn_vision[export]'")


def open_session(path: Path, threads: int = 0, keep_memory: bool = True) -> "InferenceSession":
    """A file in onnxruntime, on CPUs.

    Args:
        path: the file.
        threads: how many compute; 0 for all cores.
        keep_memory: for the next call, which is faster; False gives it back to the system.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = keep_memory
    # threads of a session that is done would go on spinning, on the cores of the one that is timed next
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def write_onnx(loaded: LoadedModel, path: Path, input_name: str = "images") -> None:
    """ONNX operators; the metadata are properties of the file, their values JSON."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from .onnx_model import OPSET, OnnxModel, expand_scans

    names = dict(input_names=[input_name], output_names=["logits"])
    traced = trace(loaded, OnnxModel(loaded.model))
    program = torch.onnx.export(traced, dynamo=True, verbose=False, opset_version=OPSET, **names)
    expand_scans(program.model)
    # stack traces of the operators: a tenth of the file, with paths of this machine
    ClearMetadataAndDocStringPass()(program.model)
    program.model.metadata_props.update({key: json.dumps(value) for key, value in describe(loaded).items()})
    program.save(path, external_data=False)


def takes_any_size(loaded: LoadedModel) -> bool:
    """Whether the file can take images of other sizes than the model's own."""
    # the exporter takes a side of one patch for a constant
    return loaded.model.dynamic_img_size and all(
        side % patch == 0 and 2 <= side // patch <= MOST_PATCHES for side, patch in sides(loaded)
    )


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """What someone who has only the file needs to know."""
    return {
        "class_names": loaded.class_names,
        **loaded.spec._asdict(),
        "patch_size": loaded.model.patch_embed.patch_size,
        "any_size": takes_any_size(loaded),
        "architecture": loaded.model.pretrained_cfg.get("architecture"),
        "hgrn_vision": __version__,
    }


def trace(loaded: LoadedModel, model: nn.Module | None = None) -> ExportedProgram:
    """The model, or another form of it, as a graph for any number of images, and of any size where it can be."""
    dynamic = {0: Dim("batch")}
    if takes_any_size(loaded):
        height, width = loaded.model.patch_embed.patch_size
        dynamic[2] = height * Dim("rows", min=2, max=MOST_PATCHES)
        dynamic[3] = width * Dim("columns", min=2, max=MOST_PATCHES)
    images = torch.zeros(2, *loaded.spec.input_size)
    return torch.export.export(model or loaded.model, (images,), dynamic_shapes=(dynamic,), strict=False)


def sides(loaded: LoadedModel) -> list[tuple[int, int]]:
    """Height and width of the image, each with that of a patch."""
    return list(zip(loaded.spec.input_size[1:], loaded.model.patch_embed.patch_size, strict=True))

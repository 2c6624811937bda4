"""Weights that come with the package: where they are, how they are written, and how they are checked before use."""

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from .files import whole_file, write_text

PRETRAINED = Path(__file__).resolve().parent / "pretrained"
SUMS = "SHA256SUMS"
STARTER = "hgrn_deit_tiny.dist_photos"


def weights_file(name: str) -> str:
    """The path of a model's weights, by its name in timm's registry including the tag."""
    return str(PRETRAINED / f"{name}.safetensors")


def check_packaged(path: str | os.PathLike) -> None:
    """Refuse a packaged file that is missing or differs from the published one; files elsewhere are not checked."""
    path = Path(path)
    if path.parent != PRETRAINED:
        return
    wrong = ""
    if not path.is_file():
        wrong = "is missing"
    elif _read_sums(path.parent).get(path.name) != _sha256(path):
        wrong = f"is damaged: its SHA-256 is not the one in {SUMS}"
    if wrong:
        raise ValueError(
            f"{path} {wrong}; reinstall the package (pip install --force-reinstall --no-deps hgrn_vision), "
            "or in a clone run git checkout hgrn_vision/pretrained"
        )


def write_starter(model: nn.Module, folder: str | os.PathLike = PRETRAINED, name: str = STARTER) -> Path:
    """Write a model's weights in float16 and add them to SHA256SUMS, in the form that the package ships.

    Args:
        model: the trained model.
        folder: where the two files go; other lines of its SHA256SUMS are kept.
        name: the model's name in timm's registry, including the tag.
    """
    path = Path(folder) / f"{name}.safetensors"
    tensors = {key: _halve(key, tensor) for key, tensor in model.state_dict().items()}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    sums = {**_read_sums(path.parent), path.name: _sha256(path)}
    write_text(path.parent / SUMS, "".join(f"{digest}  {file}\n" for file, digest in sorted(sums.items())))
    return path


def _halve(name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    half = (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
    if not torch.isfinite(half).all():
        raise ValueError(f"{name} has values that float16 cannot hold")
    return half


def _read_sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each listed file, from a list in the format of sha256sum; empty if there is no list."""
    path = folder / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)
    return {name.removeprefix("*"): digest for digest, name in pairs}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

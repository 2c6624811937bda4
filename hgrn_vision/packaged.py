"""Weights that come with the package: where they are, how they are written, and the check before they are read."""

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
    """Where the weights of a model are, by its name in timm's registry with the tag."""
    return str(PRETRAINED / f"{name}.safetensors")


def check_packaged(path: str | os.PathLike) -> None:
    """Refuse a file of the package that is not the published one; files elsewhere are taken as they are."""
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
            f"{path} {wrong}; reinstall the package for a good one: pip install --force-reinstall --no-deps "
            "hgrn_vision, or in a clone git checkout hgrn_vision/pretrained"
        )


def write_starter(model: nn.Module, folder: str | os.PathLike = PRETRAINED, name: str = STARTER) -> Path:
    """Write a model's weights in float16, and their line in SHA256SUMS, as they go into the package.

    Args:
        model: the trained model.
        folder: where the two files go; other lines of its SHA256SUMS are kept.
        name: the model's name in timm's registry, with the tag.
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
        raise ValueError(f"{name} holds values that float16 cannot")
    return half


def _read_sums(folder: Path) -> dict[str, str]:
    """File names and their SHA-256, as sha256sum writes them; nothing where the list is not there."""
    path = folder / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)
    return {name.removeprefix("*"): digest for digest, name in pairs}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

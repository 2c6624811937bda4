"""Checkpoints: safetensors files whose metadata holds the rest of the state as JSON, and a checksum.

Nothing is ever unpickled. A file is written completely and read back before it replaces another, so that a crash or a
full disk leaves the last good checkpoint intact.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..files import sync, whole_file

_logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or was not written by this program."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue, and everything that its model needs to be used."""

    model: Tensors
    ema: Tensors | None = None  # averaged weights, in runs that average
    projection: Tensors | None = None  # from the student's features to the teacher's
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] = field(default_factory=list)
    train_images: int = 0
    about: dict[str, str] = field(default_factory=dict)

    def weights(self) -> Tensors:
        """The weights to evaluate and to export: the averaged ones if there are any."""
        return self.ema or self.model


def pack(value: Any, tensors: Tensors, name: str = "") -> Any:
    """`value` as JSON, with its tensors moved into `tensors` under their path."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {"items": [[key, pack(item, tensors, f"{prefix}{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(item, tensors, f"{prefix}{index}") for index, item in enumerate(value)]}
    return value


def unpack(value: Any, tensors: Tensors) -> Any:
    """The inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {key: unpack(item, tensors) for key, item in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def checksum(tensors: Tensors, state: str) -> str:
    """SHA-256 over the state and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and read it back before it takes the name `path`."""
    tensors: Tensors = {}
    # not asdict, which would copy every tensor
    state = json.dumps(pack({item.name: getattr(checkpoint, item.name) for item in fields(checkpoint)}, tensors))
    # safetensors refuses tensors that share memory, and the copy moves them off the GPU
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, {"state": state, "checksum": checksum(tensors, state)})
            read(temporary)
    except (OSError, SafetensorError, CheckpointError) as error:
        raise OSError(f"cannot write {path}: {error}; earlier checkpoints are intact") from error


def _same_file(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where links are not supported; neither is ever modified."""
    with whole_file(target) as temporary:
        temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def is_checkpoint(path: Path) -> bool:
    """Whether a file is the checkpoint of a run: a safetensors file with the run's state in its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return "state" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksum; raises CheckpointError if anything is wrong with it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies, because the tensors outlive the file, which a later checkpoint replaces
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error
    if "state" not in metadata or "checksum" not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of a run")
    if checksum(tensors, metadata["state"]) != metadata["checksum"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    contents = unpack(json.loads(metadata["state"]), tensors)
    unknown = contents.keys() - {item.name for item in fields(Checkpoint)}
    if unknown or "model" not in contents:
        what = f"it also holds {', '.join(sorted(unknown))}" if unknown else "it holds no model"
        raise CheckpointError(f"{path} is a checkpoint of another version: {what}")
    return Checkpoint(**contents)


class Checkpoints:
    """The checkpoints folder of a run: the last checkpoint, the one before it, and the best."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.next = folder / "next.safetensors"
        self.last = folder / "last.safetensors"
        self.previous = folder / "previous.safetensors"
        self.best = folder / "best.safetensors"
        self._last_is_good = self.last.exists()

    def save(self, checkpoint: Checkpoint, best: bool = False) -> None:
        """Save as the last checkpoint, and as the best one too if `best`; the old last becomes the previous one."""
        for leftover in self.folder.glob("*.tmp"):
            # left by a process that was killed
            leftover.unlink()
        write(self.next, checkpoint)
        if best:
            _same_file(self.next, self.best)
        # a damaged last checkpoint must not replace the good previous one that the run was resumed from
        if self._last_is_good:
            os.replace(self.last, self.previous)
        os.replace(self.next, self.last)
        sync(self.folder)
        self._last_is_good = True

    def load(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None for a new run."""
        damage = []
        for path in (self.last, self.previous):
            if not path.exists():
                continue
            try:
                checkpoint = read(path)
            except CheckpointError as error:
                damage.append(str(error))
                self._last_is_good = self._last_is_good and path != self.last
                continue
            for reason in damage:
                _logger.warning("%s; continuing from %s", reason, path)
            return checkpoint
        if damage:
            raise CheckpointError(
                f"no usable checkpoint: {'; '.join(damage)}; restore one, or remove {self.folder.parent} to start again"
            )
        return None

    def load_best(self) -> Checkpoint | None:
        """The best checkpoint; None if there is none or it is damaged, so that the next epoch makes a new one."""
        try:
            return read(self.best) if self.best.exists() else None
        except CheckpointError as error:
            _logger.warning("%s", error)
            return None

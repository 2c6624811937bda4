"""The files of a run folder beside the checkpoints: settings, log, unreadable images, the model for others to load."""

import csv
import io
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from timm.models import save_for_hf
from torch import nn

from ..data.batches import BadRecord
from ..version import __version__
from .config import TrainConfig

COLUMNS = (
    "epoch",
    "step",
    "lr",
    "train_loss",
    "val_loss",
    "val_top1",
    "val_top5",
    "images_per_second",
    "data_wait",
    "peak_memory",
    "skipped_steps",
)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one rename."""
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_log(path: Path, history: list[Mapping[str, Any]]) -> None:
    """log.csv from the rows in the checkpoint, so that it has one header and no gap, however often the run resumed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(path, text.getvalue())


def versions() -> dict[str, str]:
    """What a result may depend on besides the settings."""
    found = {"hgrn_vision": __version__, "python": platform.python_version()}
    for name in ("torch", "timm", "torchvision", "pillow", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["commit"] = _commit()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory(device: torch.device) -> float:
    """Most memory that this process has held on the device, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts in KiB, macOS in bytes
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


class BadImages:
    """The unreadable images met so far, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[tuple[str, str], BadRecord] = {}
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                self.add([BadRecord(r["split"], int(r["index"]), r["name"], r["reason"]) for r in csv.DictReader(file)])

    def add(self, records: list[BadRecord]) -> bool:
        """Whether one of `records` was new."""
        before = len(self.records)
        for record in records:
            self.records.setdefault((record.split, record.name), record)
        return len(self.records) > before

    def count(self, split: str) -> int:
        """Unreadable images of one split."""
        return sum(record.split == split for record in self.records.values())

    def write(self) -> None:
        """bad_images.csv, sorted."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(BadRecord._fields)
        writer.writerows(sorted(self.records.values()))
        write_text(self.path, text.getvalue())


def export_model(folder: Path, model: nn.Module, config: TrainConfig, class_names: list[str]) -> None:
    """A folder for timm.create_model('local-dir:FOLDER', pretrained=True), replaced as a whole."""
    arguments = dict(config.model_args)
    if config.img_size:
        arguments["img_size"] = config.img_size
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save_for_hf(model, str(new), {"label_names": class_names}, arguments, safe_serialization=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)

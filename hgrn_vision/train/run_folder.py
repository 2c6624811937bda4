"""The folder of a run: the files beside its checkpoints, and how the run is resumed."""

import csv
import io
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import save_for_hf
from torch import nn

from ..data.batches import BadRecord
from ..data.splits import Split, Stream
from ..files import whole_file, write_text
from .checkpoint import Checkpoint, Checkpoints
from .config import TrainConfig, recipe_changes
from .distributed import World
from .engine import Engine

_logger = logging.getLogger(__name__)

COLUMNS = (
    "epoch",
    "step",
    "lr",
    "train_loss",
    "val_loss",
    "val_top1",
    "val_top5",
    "agreement",
    "images_per_second",
    "data_wait",
    "peak_memory",
    "skipped_steps",
)
# settings that decide which images a step takes
ORDER = {"batch_size", "epoch_steps", "repeats", "seed", "training images"}


def write_log(path: Path, history: list[Mapping[str, Any]]) -> None:
    """Write log.csv from all rows so far, so that it has one header and no gaps however often the run was resumed."""
    text = io.StringIO()
    # only distillation measures agreement with a teacher
    columns = [name for name in COLUMNS if name != "agreement" or any(name in row for row in history)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(path, text.getvalue())


def write_duplicates(path: Path, duplicates: list[tuple[str, str, int]]) -> None:
    """Write near_duplicates.csv: photographs left out because they look like validation images."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("photograph", "looks_like", "different_bits"))
    writer.writerows(duplicates)
    write_text(path, text.getvalue(), errors="surrogateescape")


class BadImages:
    """The unreadable images found so far, each listed once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[tuple[str, str], BadRecord] = {}
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                self.add([BadRecord(r["split"], int(r["index"]), r["name"], r["reason"]) for r in csv.DictReader(file)])

    def add(self, records: list[BadRecord]) -> bool:
        """Add records; returns whether any of them was new."""
        before = len(self.records)
        for record in records:
            self.records.setdefault((record.split, record.name), record)
        return len(self.records) > before

    def count(self, split: str) -> int:
        """Number of unreadable images in one split."""
        return sum(record.split == split for record in self.records.values())

    def write(self) -> None:
        """Write bad_images.csv, sorted."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(BadRecord._fields)
        writer.writerows(sorted(self.records.values()))
        write_text(self.path, text.getvalue())


def export_model(folder: Path, model: nn.Module, config: TrainConfig, class_names: list[str]) -> None:
    """Write a folder for timm.create_model('local-dir:FOLDER', pretrained=True); an old one is replaced as a whole."""
    arguments = dict(config.model_args)
    if config.img_size:
        arguments["img_size"] = config.img_size
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write_model(new, model, arguments, class_names)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_model(folder: Path, model: nn.Module, model_args: dict[str, Any], class_names: list[str]) -> None:
    """Write config.json and model.safetensors as the Hugging Face hub expects them."""
    save_for_hf(model, str(folder), {"label_names": class_names}, model_args, safe_serialization=True)
    for path in list(folder.iterdir()):
        # timm leaves the weights readable only by their owner, and does not sync them to disk
        with whole_file(path) as temporary:
            os.replace(path, temporary)


def holds_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether the model folder holds exactly these weights."""
    try:
        exported = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError):
        return False
    return exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in exported)


def check_same_run(
    checkpoint: Checkpoint, config: TrainConfig, train: Split | Stream, output: Path, allow_change: bool
) -> set[str]:
    """Names of the recipe settings that differ from the checkpoint's; a ValueError if that is not allowed."""
    if checkpoint.class_names != train.class_names:
        raise ValueError(f"the run in {output} was trained on different classes; give another --output")
    changes = recipe_changes(checkpoint.config, config)
    if checkpoint.train_images != len(train):
        changes["training images"] = (checkpoint.train_images, len(train))
    listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())
    if changes and not allow_change:
        raise ValueError(
            f"the run in {output} was started with different settings: {listed}; "
            "use the old ones, give another --output, or --allow-change"
        )
    if changes:
        _logger.warning("continuing with changed settings: %s", listed)
    return set(changes)


def restore(engine: Engine, checkpoint: Checkpoint, changes: set[str], steps: int, indexed: bool) -> None:
    """Continue from a checkpoint.

    Args:
        engine: gets the state.
        checkpoint: a checkpoint of this run.
        changes: names of the recipe settings that differ from the checkpoint's.
        steps: optimizer steps per epoch.
        indexed: whether an epoch can be started in the middle.
    """
    try:
        engine.restore(checkpoint)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint does not fit these settings: {str(error).splitlines()[0]}") from error
    progress = engine.progress
    if changes:
        progress.rollbacks = 0
    if progress.step and (changes & ORDER or not indexed):
        _logger.warning("epoch %d starts over: the images it has already used are not known", progress.epoch + 1)
        progress.repeat_epoch()
    progress.updates = progress.epoch * steps + progress.step


def find_best(checkpoints: Checkpoints, engine: Engine, world: World) -> None:
    """Trust the best checkpoint itself over what the last one says about it.

    A run may be killed after an epoch's best checkpoint was written and before its last one was.
    """
    progress = engine.progress

    def recorded() -> dict[str, Any] | None:
        checkpoint = checkpoints.load_best()
        return checkpoint.progress["best"] if checkpoint else None

    best = world.on_main(recorded)
    if best is None:
        # missing or damaged: the next epoch writes a new one
        progress.best = None
    elif progress.best is None or best["val_top1"] > progress.best["val_top1"]:
        progress.best = best

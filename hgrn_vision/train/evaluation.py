"""Accuracy on labelled images, each counted exactly once on any number of processes.

Runs, `train --eval` and `evaluate` all use this module.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..data.batches import BadRecord, EvalBatch
from ..data.loaders import EvalLoader
from ..data.splits import open_validation
from ..data.transforms import BatchTransform
from .build import autocast, data_spec, rebuild_model
from .checkpoint import Checkpoints, read
from .config import TrainConfig, from_mapping
from .distributed import World, start
from .faults import memory_advice


class WrongSize(ValueError):
    """The model cannot take images of this size."""


class Confusion(NamedTuple):
    """Which classes were taken for which; only classes that occur, because a matrix of 10,000 would take 800 MB."""

    classes: np.ndarray  # (n,) classes that are true or predicted at least once
    counts: np.ndarray  # (n, n) images by true class (row) and predicted class (column)


@dataclass(frozen=True)
class Evaluation:
    """One row per readable image, in the order of the split; accuracies are in percent."""

    indices: np.ndarray
    targets: np.ndarray
    predictions: np.ndarray
    confidence: np.ndarray  # probability of the predicted class, from 0 to 1
    losses: np.ndarray
    ranks: np.ndarray  # number of classes ranked before the true one
    bad: list[BadRecord]

    @property
    def images(self) -> int:
        return len(self.targets)

    @property
    def loss(self) -> float:
        # fsum does not depend on the order of its terms, so the result does not depend on the number of ranks
        return math.fsum(self.losses) / self.images

    @property
    def top1(self) -> float:
        """Percent."""
        return 100 * int((self.predictions == self.targets).sum()) / self.images

    @property
    def top5(self) -> float:
        """Percent."""
        return 100 * int((self.ranks < 5).sum()) / self.images

    def confusion(self) -> Confusion:
        """Images by true and predicted class."""
        classes = np.union1d(self.targets, self.predictions)
        counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
        np.add.at(counts, (np.searchsorted(classes, self.targets), np.searchsorted(classes, self.predictions)), 1)
        return Confusion(classes, counts)

    def worst(self, count: int) -> np.ndarray:
        """Rows of up to `count` wrong answers, those with the highest loss first."""
        wrong = np.flatnonzero(self.predictions != self.targets)
        return wrong[np.argsort(-self.losses[wrong], kind="stable")][:count]


def evaluate(
    model: nn.Module, loader: EvalLoader, transform: BatchTransform, config: TrainConfig, world: World
) -> Evaluation:
    """Evaluate `model` in a run's precision and memory layout; it is left in evaluation mode."""
    model.eval()

    def logits(images: torch.Tensor) -> torch.Tensor:
        with memory_advice(config, world.size):
            images = transform.eval(images.to(world.device))
            if config.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with autocast(config, world.device):
                return model(images).float()

    return collect(logits, loader, world)


@torch.no_grad()
def collect(
    logits: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[EvalBatch], world: World | None = None
) -> Evaluation:
    """Evaluate anything that maps images to logits: a model in training, or a loaded one.

    Args:
        logits: from images (B, C, H, W) uint8 to logits (B, classes).
        batches: this process's share of the images.
        world: the processes that share them; by default this process has them all.
    """
    world = world or World()
    rows: list[tuple[np.ndarray, ...]] = []
    bad: list[BadRecord] = []
    for batch in batches:
        bad.extend(batch.bad)
        if len(batch.targets):
            rows.append(_rows(batch, logits(batch.images)))
    world.meet("the end of the evaluation")
    return _merge(world.gather((rows, bad)))


def _rows(batch: EvalBatch, logits: torch.Tensor) -> tuple[np.ndarray, ...]:
    targets = batch.targets.to(logits.device)
    own = logits.gather(1, targets[:, None])
    # ties go to the lower class number, as in predict; if the true class is NaN, all others rank before it
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    ranks = (~(logits <= own)).sum(-1) + ((logits == own) & earlier).sum(-1)
    columns = (
        batch.indices,
        targets,
        logits.argmax(-1),
        logits.softmax(-1).max(-1).values,
        nn.functional.cross_entropy(logits, targets, reduction="none").double(),
        ranks,
    )
    return tuple(column.cpu().numpy() for column in columns)


def _merge(parts: list[tuple[list[tuple[np.ndarray, ...]], list[BadRecord]]]) -> Evaluation:
    rows = [columns for part, _ in parts for columns in part]
    bad = sorted(record for _, records in parts for record in records)
    if not rows:
        first = f"; the first error: {bad[0].reason}" if bad else ""
        raise ValueError(f"none of the {len(bad)} validation images could be read{first}")
    merged = [np.concatenate(column) for column in zip(*rows, strict=True)]
    order = np.argsort(merged[0], kind="stable")
    return Evaluation(*(column[order] for column in merged), bad=bad)


@dataclass(frozen=True)
class Score:
    """What a checkpoint scored, and with which settings."""

    path: Path
    config: TrainConfig
    epoch: int
    evaluation: Evaluation
    main: bool  # whether this process is the main one, which reports


def score(path: str | Path, settings: dict[str, Any]) -> Score:
    """Evaluate a run's best checkpoint, or a checkpoint file; `settings` override the run's own."""
    file = find_checkpoint(Path(path))
    # the machine that evaluates need not be the one that trained
    here = {"device": "auto", "threads": 0, **settings}
    world = start(from_mapping({name: here[name] for name in ("device", "threads")}))
    checkpoint = world.on_main(lambda: read(file))
    config = from_mapping({**checkpoint.config, **here})
    validation = world.everywhere(lambda: open_validation(config, checkpoint.class_names))
    model = rebuild_model(checkpoint).to(world.device)
    if config.img_size and config.img_size != checkpoint.config["img_size"]:
        fit_size(model, config.img_size)
    spec = data_spec(config, model)
    loader = EvalLoader(validation, config, spec, world.rank, world.size)
    transform = BatchTransform(config, spec, model.num_classes)
    evaluation = evaluate(model, loader, transform, config, world)
    loader.close()
    world.close()
    return Score(file, config, checkpoint.progress["epoch"], evaluation, world.main)


def fit_size(model: nn.Module, side: int) -> None:
    """Let a trained model take square images of another size; position embeddings are resampled.

    Raises WrongSize if it cannot: the weights of MLP mixers, for example, are made for one number of patches.
    """
    first = next(model.parameters())
    channels = getattr(model, "in_chans", None) or model.pretrained_cfg["input_size"][0]
    try:
        if hasattr(model, "set_input_size"):
            model.set_input_size(img_size=side)
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, side, side, device=first.device, dtype=first.dtype))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WrongSize(f"the model cannot take images of {side} pixels: {reason}") from error


def find_checkpoint(path: Path) -> Path:
    """A run folder's best checkpoint, or its newest if there is no best; `path` itself if it is a file."""
    if path.is_file():
        return path
    folder = Checkpoints(path / "checkpoints")
    for candidate in (folder.best, folder.last, folder.previous):
        if candidate.exists():
            return candidate
    raise ValueError(f"{path} is neither a checkpoint file nor a run folder with one")

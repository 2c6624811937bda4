"""Accuracy on the validation images, each counted exactly once on any number of processes; of a run or a checkpoint."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass
class Evaluation:
    """One row for each readable validation image, in the order of the split."""

    indices: np.ndarray
    targets: np.ndarray
    predictions: np.ndarray
    confidence: np.ndarray
    losses: np.ndarray
    in_top5: np.ndarray
    bad: list[BadRecord]

    @property
    def images(self) -> int:
        return len(self.targets)

    @property
    def loss(self) -> float:
        # fsum does not depend on the order of its terms, so that the number of ranks leaves no trace
        return math.fsum(self.losses) / self.images

    @property
    def top1(self) -> float:
        """Percent."""
        return 100 * int((self.predictions == self.targets).sum()) / self.images

    @property
    def top5(self) -> float:
        """Percent."""
        return 100 * int(self.in_top5.sum()) / self.images

    def confusion(self, classes: int) -> np.ndarray:
        """Images by true class (row) and predicted class (column)."""
        table = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(table, (self.targets, self.predictions), 1)
        return table

    def worst(self, count: int) -> np.ndarray:
        """Rows of the wrong answers, those with the highest loss first."""
        wrong = np.flatnonzero(self.predictions != self.targets)
        return wrong[np.argsort(-self.losses[wrong], kind="stable")][:count]


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: EvalLoader, transform: BatchTransform, config: TrainConfig, world: World
) -> Evaluation:
    """Loss and accuracy of `model`, which is left in evaluation mode."""
    model.eval()
    columns: list[tuple[np.ndarray, ...]] = []
    bad: list[BadRecord] = []
    for batch in loader:
        bad.extend(batch.bad)
        if len(batch.targets):
            with memory_advice(config, world.size):
                columns.append(_score(model, batch, transform, config, world.device))
    world.meet("the end of the evaluation")
    return _merge(world.gather((columns, bad)))


def _score(
    model: nn.Module, batch: EvalBatch, transform: BatchTransform, config: TrainConfig, device: torch.device
) -> tuple[np.ndarray, ...]:
    images, targets = transform.eval(batch.images.to(device)), batch.targets.to(device)
    if config.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    with autocast(config, device):
        logits = model(images)
    logits = logits.float()
    top = logits.topk(min(5, logits.shape[-1])).indices
    columns = (
        batch.indices,
        targets,
        top[:, 0],
        logits.softmax(-1).max(-1).values,
        nn.functional.cross_entropy(logits, targets, reduction="none").double(),
        (top == targets[:, None]).any(-1),
    )
    return tuple(column.cpu().numpy() for column in columns)


def _merge(parts: list[tuple[list[tuple[np.ndarray, ...]], list[BadRecord]]]) -> Evaluation:
    rows = [columns for part, _ in parts for columns in part]
    bad = sorted(record for _, records in parts for record in records)
    if not rows:
        raise ValueError("not one validation image could be read")
    merged = [np.concatenate(column) for column in zip(*rows, strict=True)]
    order = np.argsort(merged[0], kind="stable")
    return Evaluation(*(column[order] for column in merged), bad=bad)


@dataclass(frozen=True)
class Score:
    """What a checkpoint reached, on which images."""

    path: Path
    config: TrainConfig
    epoch: int
    evaluation: Evaluation
    main: bool  # whether this process is the one to say so


def score(path: str | Path, settings: dict[str, Any]) -> Score:
    """Evaluate a run's best checkpoint, or a checkpoint file, with `settings` laid over the run's own."""
    file = find_checkpoint(Path(path))
    # the machine that evaluates need not be the one that trained
    here = {"device": "auto", "threads": 0, **settings}
    world = start(from_mapping({name: here[name] for name in ("device", "threads")}))
    contents = world.on_main(lambda: read(file))
    config = from_mapping({**contents["config"], **here})
    validation = world.everywhere(lambda: open_validation(config, contents["class_names"]))
    model = rebuild_model(contents).to(world.device)
    spec = data_spec(config, model)
    loader = EvalLoader(validation, config, spec, world.rank, world.size)
    transform = BatchTransform(config, spec, model.num_classes)
    evaluation = evaluate(model, loader, transform, config, world)
    loader.close()
    world.close()
    return Score(file, config, contents["progress"]["epoch"], evaluation, world.main)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint to use of a run folder, or the file itself."""
    if path.is_file():
        return path
    folder = Checkpoints(path / "checkpoints")
    for candidate in (folder.best, folder.last, folder.previous):
        if candidate.exists():
            return candidate
    raise ValueError(f"{path} is neither a checkpoint file nor a run folder with one")

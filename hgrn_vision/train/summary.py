"""Gathers what the report of a run shows."""

import contextlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..data.batches import BadRecord
from ..data.images import BadImage
from ..data.spec import DataSpec
from ..data.splits import Split, Stream
from ..data.transforms import BatchTransform, eval_transform
from ..report import GateLayer, Mistake, ReportData, write_report
from ..report.gates import GateStatistics
from .config import TrainConfig, to_mapping
from .engine import Progress
from .evaluation import Evaluation

MISTAKES = 24
GATE_IMAGES = 64


def write_summary(
    path: Path,
    config: TrainConfig,
    about: dict[str, str],
    progress: Progress,
    validation: Split | Stream,
    evaluation: Evaluation,
    bad: list[BadRecord],
    gates: list[GateLayer],
) -> None:
    """Write report.html from the evaluation of a run's best weights."""
    result = {
        "top1": evaluation.top1,
        "top5": evaluation.top5,
        "images": evaluation.images,
        "epoch": progress.best["epoch"] if progress.best else progress.epoch,
    }
    confusion = evaluation.confusion()
    write_report(
        path,
        ReportData(
            title=f"{config.model}, recipe {config.recipe}",
            command=about["command"],
            config=to_mapping(config),
            versions={name: value for name, value in about.items() if name != "command"},
            history=progress.history,
            result=result,
            class_names=[validation.class_names[label] for label in confusion.classes],
            confusion=confusion.counts,
            mistakes=_mistakes(validation, evaluation),
            gates=gates,
            bad_images=[record._asdict() for record in bad],
            notes=_notes(progress),
        ),
    )


def _mistakes(validation: Split | Stream, evaluation: Evaluation) -> list[Mistake]:
    if not validation.indexed:
        return []
    names = validation.class_names
    rows = evaluation.worst(MISTAKES)
    return [
        Mistake(
            image=validation.load(int(evaluation.indices[row])),
            name=validation.image_name(int(evaluation.indices[row])),
            true=names[evaluation.targets[row]],
            predicted=names[evaluation.predictions[row]],
            confidence=float(evaluation.confidence[row]),
        )
        for row in rows
    ]


def _notes(progress: Progress) -> list[str]:
    notes = []
    if progress.skipped:
        notes.append(f"Steps skipped because their loss or gradient was not finite: {progress.skipped}.")
    if progress.rollbacks:
        notes.append(f"Times that the run went back to its last checkpoint: {progress.rollbacks}.")
    return notes


@torch.no_grad()
def measure_gates(
    model: nn.Module, validation: Split | Stream, spec: DataSpec, transform: BatchTransform
) -> list[GateLayer]:
    """Mean, median and distribution of each layer's forget gate on validation images; none for models without them."""
    if not hasattr(model, "forget_gates") or not validation.indexed:
        return []
    images = _spread_images(validation, spec).to(next(model.parameters()).device)
    if not len(images):
        return []
    statistics = GateStatistics()
    statistics.update(model.forget_gates(transform.eval(images)))
    rows = zip(statistics.mean(), statistics.median(), statistics.histogram(), strict=True)
    return [GateLayer(float(mean), float(median), shares) for mean, median, shares in rows]


def _spread_images(validation: Split, spec: DataSpec) -> torch.Tensor:
    """Readable images taken evenly from the whole split, (B, C, H, W) uint8."""
    prepare = eval_transform(spec)
    images = []
    for index in np.linspace(0, len(validation) - 1, min(GATE_IMAGES, len(validation))).astype(int):
        with contextlib.suppress(BadImage):
            images.append(prepare(validation.load(int(index))))
    return torch.stack(images) if images else torch.empty(0, *spec.input_size, dtype=torch.uint8)

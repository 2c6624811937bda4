"""The report of a run: one HTML file that holds its charts and images and needs no network."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..files import write_text
from . import charts
from .confusion import confusion_figure
from .html import data_address, render_page
from .style import page_style, to_svg

MATRIX_CLASSES = 50  # beyond that, a table of the most confused pairs says more than a matrix
PAIRS = 30
BAD_ROWS = 100
IMAGE_SIDE = 224


@dataclass(frozen=True)
class Mistake:
    """An image with a wrong answer."""

    image: Image.Image
    name: str
    true: str
    predicted: str
    confidence: float  # the model's probability of its answer


@dataclass(frozen=True)
class GateLayer:
    """The forget gate's values in one layer."""

    mean: float
    median: float
    shares: np.ndarray  # share of the values in each of n equal parts of 0..1, (n,)


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows, as plain numbers, strings and images."""

    title: str
    command: str
    history: Sequence[Mapping[str, Any]] = ()  # rows of log.csv
    result: Mapping[str, Any] = field(default_factory=dict)  # top1, top5 (percent), images, epoch
    class_names: Sequence[str] = ()
    confusion: np.ndarray | None = None  # (C, C), true class by predicted class
    mistakes: Sequence[Mistake] = ()  # worst first
    gates: Sequence[GateLayer] = ()  # first layer first
    bad_images: Sequence[Mapping[str, Any]] = ()  # split, name, reason
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write_report(path: str | os.PathLike, data: ReportData) -> None:
    """Write the report; an older one stays intact until the new one replaces it."""
    # file names may contain bytes that are not text
    write_text(path, render(data), errors="replace")


def render(data: ReportData) -> str:
    """The page as text."""
    with page_style():
        charts = {name: to_svg(figure, name) for name, figure in _figures(data).items()}
    return render_page(
        "template.html",
        data=data,
        charts=charts,
        tiles=_tiles(data),
        mistakes=[(mistake, embed(mistake.image), min(mistake.image.size) < 64) for mistake in data.mistakes],
        pairs=confused_pairs(data.confusion, data.class_names) if len(data.class_names) > MATRIX_CLASSES else None,
        speed=_speed(data.history),
        bad_images=list(data.bad_images)[:BAD_ROWS],
    )


def _figures(data: ReportData) -> dict[str, Figure]:
    figures = {}
    if data.history:
        figures["accuracy"] = charts.accuracy_chart(data.history)
        figures["loss"] = charts.loss_chart(data.history)
        figures["learning rate"] = charts.rate_chart(data.history)
        figures["speed"] = charts.speed_chart(data.history)
    if data.confusion is not None and 0 < len(data.class_names) <= MATRIX_CLASSES:
        figures["confusion"] = confusion_figure(data.confusion, data.class_names)
    if data.gates:
        figures["gates"] = charts.gate_chart(data.gates)
    return figures


def _tiles(data: ReportData) -> list[tuple[str, str]]:
    """The headline numbers: (number, what it is)."""
    formats = {
        "top1": ("{:.2f}%", "top-1 accuracy"),
        "top5": ("{:.2f}%", "top-5 accuracy"),
        "images": ("{:,}", "validation images"),
        "epoch": ("{}", "best epoch"),
    }
    known = [(key, data.result[key]) for key in formats if data.result.get(key) is not None]
    return [(formats[key][0].format(value), formats[key][1]) for key, value in known]


def _speed(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the log says about speed: (what, number)."""
    rows = []
    for name, label, reduce, text in (
        ("images_per_second", "images per second, median of the epochs", np.median, "{:,.1f}"),
        ("data_wait", "time spent waiting for data", np.mean, "{:.1%}"),
        ("peak_memory", "peak memory", np.max, "{:,.0f} MiB"),
        ("skipped_steps", "steps skipped because of a non-finite loss or gradient", np.max, "{:.0f}"),
    ):
        values = charts.column(history, name)
        values = values[np.isfinite(values)]
        if len(values):
            rows.append((label, text.format(reduce(values))))
    return rows


def confused_pairs(confusion: np.ndarray | None, class_names: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """The most frequent mistakes: (true, predicted, count, share of the true class)."""
    if confusion is None:
        return []
    # ten thousand classes make a hundred million cells, of which few are non-zero
    true, guess = (side.astype(np.int32) for side in np.nonzero(confusion))
    true, guess = true[true != guess], guess[true != guess]
    counts = confusion[true, guess]
    largest = np.argsort(-counts, kind="stable")[:PAIRS]
    return [
        (class_names[t], class_names[g], int(count), count / confusion[t].sum())
        for t, g, count in zip(true[largest], guess[largest], counts[largest], strict=True)
    ]


def embed(image: Image.Image) -> str:
    """An image as a data: URL, to be embedded in a page; small ones are stored losslessly."""
    small = image.convert("RGB")
    buffer = io.BytesIO()
    if max(small.size) <= IMAGE_SIDE // 2:
        kind = "png"
        small.save(buffer, "PNG")
    else:
        kind = "jpeg"
        small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        small.save(buffer, "JPEG", quality=88)
    return data_address(buffer.getvalue(), kind)

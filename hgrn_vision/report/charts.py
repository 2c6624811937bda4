"""The charts of a run's report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .style import BLUE, GREEN, ORANGE


def column(history: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """One column of log.csv as numbers, NaN where it is empty."""
    return np.array([_number(row.get(name)) for row in history], dtype=float)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True)
    return figure, axes


def _curve(axes: Axes, history: Sequence[Mapping[str, Any]], name: str, label: str, color: str) -> None:
    epochs, values = column(history, "epoch"), column(history, name)
    known = np.isfinite(epochs) & np.isfinite(values)
    if known.any():
        # a line of one point would be invisible
        marker = "o" if known.sum() == 1 else None
        axes.plot(epochs[known], values[known], color=color, label=label, marker=marker)


def loss_chart(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Training and validation loss by epoch."""
    figure, axes = _axes("Loss")
    _curve(axes, history, "train_loss", "training (augmented)", BLUE)
    _curve(axes, history, "val_loss", "validation", ORANGE)
    _legend(axes)
    return figure


def accuracy_chart(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Validation accuracy by epoch, with the best epoch marked."""
    figure, axes = _axes("Validation accuracy")
    _curve(axes, history, "val_top5", "top-5", GREEN)
    _curve(axes, history, "val_top1", "top-1", ORANGE)
    epochs, top1 = column(history, "epoch"), column(history, "val_top1")
    if np.isfinite(top1).any():
        best = int(np.nanargmax(top1))
        axes.plot(
            epochs[best], top1[best], "o", color=ORANGE, label=f"best, {top1[best]:.2f}% at epoch {epochs[best]:.0f}"
        )
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=None))
    _legend(axes)
    return figure


def rate_chart(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Learning rate at the last step of each epoch."""
    figure, axes = _axes("Learning rate")
    _curve(axes, history, "lr", "learning rate", BLUE)
    _from_zero(axes)
    return figure


def speed_chart(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Training images per second over all processes."""
    figure, axes = _axes("Speed, images per second")
    _curve(axes, history, "images_per_second", "images per second", BLUE)
    _from_zero(axes)
    return figure


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * max(1e-12, axes.dataLim.ymax if axes.lines else 1))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def gate_chart(layers: Sequence[Any]) -> Figure:
    """Histogram of the forget gate's values in each layer, in order; the line is the median."""
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(2.75 * columns, 1.45 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    for number, axes in enumerate(grid.flat):
        if number >= len(layers):
            axes.set_visible(False)
            continue
        layer = layers[number]
        axes.stairs(layer.shares, np.linspace(0, 1, len(layer.shares) + 1), fill=True, color=BLUE)
        axes.axvline(layer.median, color=ORANGE, linewidth=1.4)
        axes.set_title(f"layer {number + 1}", loc="left")
        axes.set(xlim=(0, 1), yticks=[], xticks=[0, 0.5, 1])
        axes.spines["left"].set_visible(False)
        axes.tick_params(labelbottom=number + columns >= len(layers))
    return figure

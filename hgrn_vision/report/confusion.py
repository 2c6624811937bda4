"""The chart of a confusion matrix."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

NAMED = 40  # classes whose names still fit beside the matrix
NUMBERED = 20  # classes whose counts still fit into the cells
CELLS = 300  # cells along a side; with more classes, neighbours share a cell


def confusion_figure(counts: np.ndarray, class_names: Sequence[str]) -> Figure:
    """Share of each true class (row) that was predicted as each class (column); counts (C, C)."""
    classes = len(class_names)
    side = float(np.clip(0.32 * classes, 4.5, 11))
    figure = Figure(figsize=(side + 1.5, side + 0.5), layout="constrained")
    axes = figure.add_subplot()
    cells = _merge(counts)
    shares = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    # with many classes, confusions are small shares, which a linear scale would not show
    scale = PowerNorm(1 if classes <= NAMED else 0.4, vmin=0, vmax=1)
    image = axes.imshow(shares, cmap="Blues", norm=scale, interpolation="nearest", extent=_extent(classes))
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    axes.set(xlabel="predicted", ylabel="true")
    if classes <= NAMED:
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in class_names]
        # names are not formulas, even with dollar signs in them
        axes.set_xticks(range(classes), names, rotation=60, ha="right", rotation_mode="anchor", parse_math=False)
        axes.set_yticks(range(classes), names, parse_math=False)
    if classes <= NUMBERED:
        for (true, predicted), count in np.ndenumerate(counts):
            if count:
                ink = "white" if shares[true, predicted] > 0.5 else "black"
                axes.text(predicted, true, f"{count}", ha="center", va="center", fontsize=7, color=ink)
    return figure


def _extent(classes: int) -> tuple[float, float, float, float]:
    return -0.5, classes - 0.5, classes - 0.5, -0.5


def _merge(counts: np.ndarray) -> np.ndarray:
    """The same matrix, with neighbouring classes added up if there are too many for one chart."""
    classes = len(counts)
    if classes <= CELLS:
        return counts
    starts = np.arange(CELLS) * classes // CELLS
    return np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)

"""The charts of a study: curves with bands, the seeds as dots with their paired differences, top-1 by image size."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

from .style import BLUE, GREEN, ORANGE, VIOLET

COLOURS = (BLUE, ORANGE, GREEN, VIOLET, "#e0457b", "#0ea5b7", "#a3762b", "#64748b", "#b5b800", "#dc2626")
LINES = ("-", "--", ":")  # once the colours are used up, they repeat with the next of these


def look(number: int) -> dict[str, Any]:
    """Colour and line of the arm with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number // len(COLOURS) % len(LINES)]}


def curve_chart(arms: Sequence[Any], x_label: str) -> Figure:
    """Top-1 during training: the mean over the seeds, in a band from the lowest seed to the highest."""
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    axes = figure.add_subplot(title="Top-1 on held-out images, percent", xlabel=x_label)
    axes.grid(True)
    for number, arm in enumerate(arms):
        x, mean, low, high = band(arm.curves)
        if not len(x):
            continue
        style = look(number)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.16, linewidth=0)
        # a line of one point would be invisible
        axes.plot(x, mean, **style, marker="o" if len(x) == 1 else None, label=_short(arm.name))
    _legend(figure, axes)
    return figure


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, and the mean, lowest and highest value of the curves at each; curves may end early."""
    length = max((len(curve) for curve in curves), default=0)
    columns: list[list[float]] = [[], [], [], []]
    for place in range(length):
        points = [curve[place] for curve in curves if len(curve) > place and math.isfinite(curve[place][1])]
        if not points:
            continue
        x, y = (np.array(values) for values in zip(*points, strict=True))
        for column, value in zip(columns, (x.mean(), y.mean(), y.min(), y.max()), strict=True):
            column.append(float(value))
    return tuple(np.array(column) for column in columns)


def dot_chart(arms: Sequence[Any]) -> Figure:
    """A dot for each seed of each arm, and the arm's paired difference from the first with its 95% interval."""
    figure = Figure(figsize=(8.6, 1.1 + 0.36 * len(arms)), layout="constrained")
    dots, differences = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for number, arm in enumerate(arms):
        color = look(number)["color"]
        values = [value for value in arm.last if math.isfinite(value)]
        dots.plot(values, [number] * len(values), "o", color=color, alpha=0.65, markeredgewidth=0)
        if values:
            dots.plot([np.mean(values)], [number], "|", color=color, markersize=16, markeredgewidth=2)
        if arm.difference is not None and math.isfinite(arm.difference[0]):
            mean, low, high = arm.difference
            differences.plot([mean], [number], "o", color=color)
            if math.isfinite(low) and math.isfinite(high):
                differences.plot([low, high], [number, number], color=color, linewidth=2)
    dots.set_yticks(range(len(arms)), [_short(arm.name) for arm in arms], parse_math=False)
    # the first arm on top
    dots.set_ylim(len(arms) - 0.5, -0.5)
    dots.set(title="Top-1 after the last epoch, percent; | is the mean")
    differences.set(title=f"Difference from {_short(arms[0].name, 24)}, points")
    differences.title.set_parse_math(False)
    differences.axvline(0, color="#8b949e", linewidth=1)
    for axes in (dots, differences):
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


def size_chart(arms: Sequence[Any]) -> Figure:
    """Top-1 of the same weights at other image sizes; sizes that arms were trained at are marked."""
    figure = Figure(figsize=(8.6, 4.0), layout="constrained")
    axes = figure.add_subplot(title="Top-1 by image size, percent", xlabel="pixels per side", xscale="log")
    axes.grid(True)
    ticks = sorted({size for arm in arms for size, _, _ in arm.sizes})
    for number, arm in enumerate(arms):
        points = [(size, mean, std) for size, mean, std in arm.sizes if math.isfinite(mean)]
        if not points:
            continue
        x, mean, std = (np.array(values) for values in zip(*points, strict=True))
        style = look(number)
        axes.plot(x, mean, **style, marker="o", markersize=4, label=_short(arm.name))
        known = np.where(np.isfinite(std), std, 0.0)
        axes.fill_between(x, mean - known, mean + known, color=style["color"], alpha=0.14, linewidth=0)
    for side in sorted({arm.side for arm in arms}):
        axes.axvline(side, color="#8b949e", linewidth=1, linestyle=":")
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    _legend(figure, axes)
    return figure


def _short(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(figure: Figure, axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        legend = figure.legend(loc="outside right upper", fontsize=8)
        for text in legend.get_texts():
            # names are not formulas, even with dollar signs in them
            text.set_parse_math(False)

"""Figures of a model's inner workings: forget gates, token mixing, evidence."""

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from .style import BLUE, DIM, ORANGE, paper_style

AGAINST_FOR = LinearSegmentedColormap.from_list("against_for", ["#2563eb", "#ffffff", "#ef2d2d"])
FAINTEST = 1e-5  # smaller values are shown as this one


@paper_style()
def gate_figure(mean: np.ndarray, median: np.ndarray, shares: np.ndarray, bounds: np.ndarray) -> Figure:
    """Histogram of each layer's forget gate, and how gate and lower bound change with depth.

    Args:
        mean: (layers,).
        median: (layers,).
        shares: share of the values in each of equal parts of 0..1, (layers, bins).
        bounds: lower bounds, (layers, D).
    """
    layers = np.arange(1, len(mean) + 1)
    figure = Figure(figsize=(9.5, max(3.2, 0.42 * len(mean) + 1.4)), layout="constrained")
    ridges, lines = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _ridges(ridges, median, shares)

    low, high = np.quantile(bounds, (0.1, 0.9), axis=1)
    lines.fill_between(layers, low, high, color=DIM, alpha=0.25, linewidth=0, label="lower bound, 80% of channels")
    lines.plot(layers, bounds.mean(axis=1), color=DIM, linestyle="--", label="lower bound, mean")
    lines.plot(layers, mean, "o-", color=BLUE, label="forget gate, mean")
    lines.plot(layers, median, "o-", color=ORANGE, label="forget gate, median")
    lines.set(title="Gate and lower bound by depth", xlabel="layer", ylim=(-0.03, 1.03))
    lines.xaxis.set_major_locator(MaxNLocator(integer=True))
    lines.grid(True)
    lines.legend(loc="best", fontsize=8)
    return figure


def _ridges(axes: Axes, median: np.ndarray, shares: np.ndarray) -> None:
    """One histogram per layer, the first at the bottom, each overlapping the next a little."""
    depth, bins = shares.shape
    edges = np.linspace(0, 1, bins + 1)
    colors = matplotlib.colormaps["viridis"](np.linspace(0.15, 0.85, depth))
    for i in reversed(range(depth)):
        # a scale per layer: on a common one, the spike of a nearly constant gate would flatten all others
        heights = 1.25 * shares[i] / shares[i].max()
        axes.stairs(i + heights, edges, baseline=i, fill=True, color=colors[i], alpha=0.85, zorder=depth - i)
        axes.stairs(i + heights, edges, baseline=i, color="white", linewidth=0.7, zorder=depth - i)
        axes.plot([median[i]] * 2, [i, i + 0.9], color=ORANGE, linewidth=1.6, zorder=depth - i)
    axes.set(title="Forget gate values by layer (line: median)", xlabel="forget gate", ylabel="layer")
    axes.set(xlim=(0, 1), ylim=(-0.15, depth + 0.4), yticks=range(depth), yticklabels=range(1, depth + 1))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


@paper_style()
def mixing_figure(strengths: Mapping[int, np.ndarray], grid: tuple[int, int], token: int, scan: str) -> Figure:
    """|A| of some layers, and below each the row of one token, laid out as in the image.

    Args:
        strengths: the matrix (T, T) of each layer, by its number from 1.
        grid: rows and columns of patches.
        token: the token whose row is laid out.
        scan: where the scans run, for the title.
    """
    count = len(strengths)
    figure = Figure(figsize=(2.5 * count + 1.2, 5.6), layout="constrained")
    axes = figure.subplots(2, count, squeeze=False)
    values = np.stack(list(strengths.values()))
    norm = LogNorm(max(FAINTEST, np.quantile(values, 0.02)), max(values.max(), 10 * FAINTEST), clip=True)
    row, column = divmod(token, grid[1])
    tokens = grid[0] * grid[1]
    for i, (layer, strength) in enumerate(strengths.items()):
        extent = (0.5, tokens + 0.5, tokens + 0.5, 0.5)
        image = axes[0, i].imshow(strength, cmap="magma", norm=norm, interpolation="nearest", extent=extent)
        axes[0, i].set(title=f"layer {layer}", xlabel="from token")
        axes[1, i].imshow(strength[token].reshape(grid), cmap="magma", norm=norm, interpolation="nearest")
        axes[1, i].add_patch(_frame(row, column, "white"))
        axes[1, i].set(xticks=[], yticks=[])
        for half in axes[:, i]:
            half.spines[:].set_visible(False)
    axes[0, 0].set(ylabel="into the state of token")
    axes[1, 0].set(ylabel=f"into token {token + 1}, on the image")
    figure.colorbar(image, ax=axes, shrink=0.6, label="|A|, mean over channels", extend="min")
    figure.suptitle(f"Token mixing: {scan}", fontsize=9.5)
    return figure


@paper_style()
def evidence_figure(image: np.ndarray, cells: np.ndarray, patch: tuple[int, int], label: str) -> Figure:
    """The image as the model sees it, and over it what each patch adds to the log-probability of `label`.

    Args:
        image: (H, W, 3), uint8.
        cells: what each patch adds, (rows, columns).
        patch: height and width of a patch in pixels.
        label: name of the class.
    """
    height, width = image.shape[:2]
    figure = Figure(figsize=(8.6, 0.5 + 3.8 * min(height / width, 2)), layout="constrained")
    plain, overlaid = figure.subplots(1, 2)
    # in units of patches
    extent = (-0.5, width / patch[1] - 0.5, height / patch[0] - 0.5, -0.5)
    options = {"aspect": patch[0] / patch[1], "interpolation": "nearest"}
    plain.imshow(image, extent=extent, **options)
    grey = image @ np.array([0.299, 0.587, 0.114])
    overlaid.imshow(grey, cmap="gray", vmin=-60, vmax=300, extent=extent, **options)

    largest = max(float(np.abs(cells).max()), 1e-12)
    # patches that add nothing stay clear, so that the image shows through
    opacity = 0.75 * (np.abs(cells) / largest) ** 0.6
    heat = overlaid.imshow(cells, cmap=AGAINST_FOR, vmin=-largest, vmax=largest, alpha=opacity, **options)
    overlaid.add_patch(_frame(*np.unravel_index(cells.argmax(), cells.shape), "#ffd60a"))
    figure.colorbar(heat, ax=overlaid, shrink=0.85, label="added to the log-probability")
    plain.set_title("as the model sees it")
    overlaid.set_title(f"evidence for {_short(label)}", parse_math=False)
    for axes in (plain, overlaid):
        axes.set(xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])
        axes.spines[:].set_visible(False)
    return figure


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _frame(row: int, column: int, color: str) -> Rectangle:
    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=color, linewidth=1.8)

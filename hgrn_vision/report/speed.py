"""The chart of the benchmark: throughput and memory against image size."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .style import BLUE, GREEN, ORANGE, VIOLET, paper_style

COLOURS = (BLUE, GREEN, ORANGE, VIOLET)


@paper_style()
def speed_chart(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The rows of bench.csv as a chart: one column of panels per task, models solid, peers dashed."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(5.6 * max(1, len(tasks)), 7.2), layout="constrained")
    figure.suptitle("solid: recurrent models, dashed: their peers", fontsize=10)
    panels = figure.subplots(2, max(1, len(tasks)), squeeze=False)
    for task, (speed, memory) in zip(tasks, panels.T, strict=False):
        chosen = [row for row in rows if row["task"] == task]
        _draw(speed, chosen, "images_per_second", task, "images per second")
        _draw(memory, chosen, "memory_mb", f"memory of a step, {task}", "MB per million pixels", per_pixel=True)
    return figure


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]], column: str, title: str, label: str, per_pixel=False) -> None:
    for colour, model in zip(COLOURS * len(rows), dict.fromkeys(row["model"] for row in rows), strict=False):
        mine = [row for row in rows if row["model"] == model]
        sizes = [row["size"] for row in mine]
        scale = [1e6 / (row["batch"] * row["size"] ** 2) if per_pixel else 1.0 for row in mine]
        for prefix, name, style in (("", model, "o-"), ("peer_", mine[0]["peer"], "s--")):
            values = [row[prefix + column] * factor for row, factor in zip(mine, scale, strict=True)]
            axes.plot(sizes, values, style, color=colour, alpha=1.0 if not prefix else 0.55, label=name)
    axes.set(title=title, xlabel="pixels per side", ylabel=label, xscale="log")
    ticks = sorted({row["size"] for row in rows})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    if per_pixel:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True)
    axes.legend(fontsize=8)

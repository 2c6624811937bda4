"""The page of a study: one HTML file that holds its charts and needs no network."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..files import write_text
from .html import render_page
from .study_charts import curve_chart, dot_chart, look, size_chart
from .style import page_style, to_svg


@dataclass(frozen=True)
class StudyArm:
    """What the page shows about an arm, as plain numbers and strings; top-1 is in percent."""

    name: str
    sentence: str
    cells: Sequence[str]  # its row of the table
    last: Sequence[float]  # top-1 after the last epoch, for each seed
    difference: tuple[float, float, float] | None  # mean and 95% interval; None for the first arm
    curves: Sequence[Sequence[tuple[float, float]]]  # position and top-1, for each seed
    side: int  # of the images that it was trained on
    sizes: Sequence[tuple[int, float, float]] = ()  # image size, mean and standard deviation of top-1


@dataclass(frozen=True)
class StudyData:
    """Everything that the page shows."""

    title: str
    command: str
    arms: Sequence[StudyArm]
    columns: Sequence[str]  # headings of the table
    x_label: str  # of the curves
    notes: Sequence[str] = ()
    runs: Sequence[Mapping[str, Any]] = ()  # arm, seed, status, top-1 and the link to the run's own report
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)


def write_study(path: str | os.PathLike, data: StudyData) -> None:
    """Write the page; an older one stays intact until the new one replaces it."""
    write_text(path, render(data), errors="replace")


def render(data: StudyData) -> str:
    """The page as text."""
    figures = {}
    with page_style():
        if data.arms:
            figures["curves"] = curve_chart(data.arms, data.x_label)
            figures["seeds"] = dot_chart(data.arms)
        if any(arm.sizes for arm in data.arms):
            figures["sizes"] = size_chart(data.arms)
        charts = {name: to_svg(figure, name) for name, figure in figures.items()}
    colours = [look(number)["color"] for number in range(len(data.arms))]
    return render_page("study.html", data=data, charts=charts, rows=list(zip(data.arms, colours, strict=True)))

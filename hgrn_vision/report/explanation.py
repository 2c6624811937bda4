"""The page of an explanation: one HTML file that holds its pictures and needs no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2


@dataclass(frozen=True)
class ExplainedImage:
    """One image; pictures are PNG files."""

    name: str
    answers: Sequence[tuple[str, float]]  # class and probability, most probable first
    label: str  # the class that the evidence is for
    gain: float
    total: float
    evidence: bytes
    mixing: bytes


@dataclass(frozen=True)
class Explanation:
    """All that the page shows."""

    title: str
    gate_table: Sequence[tuple[int, float, float, float, float, float]]
    gates: bytes
    images: Sequence[ExplainedImage]


def render_explanation(data: Explanation) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["address"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return environment.get_template("explanation.html").render(data=data)

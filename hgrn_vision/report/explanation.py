"""The page of an explanation: one HTML file that holds its images and needs no network."""

from collections.abc import Sequence
from dataclasses import dataclass

from .html import render_page


@dataclass(frozen=True)
class ExplainedImage:
    """One image; its figures are PNG files."""

    name: str
    answers: Sequence[tuple[str, float]]  # class and probability, most probable first
    label: str  # the class that the evidence is for
    gain: float
    total: float
    evidence: bytes
    mixing: bytes


@dataclass(frozen=True)
class Explanation:
    """Everything that the page shows."""

    title: str
    gate_table: Sequence[tuple[int, float, float, float, float, float]]
    gates: bytes
    images: Sequence[ExplainedImage]


def render_explanation(data: Explanation) -> str:
    """The page as text."""
    return render_page("explanation.html", data=data)

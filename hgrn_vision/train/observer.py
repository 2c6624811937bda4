"""Callbacks through which a run reports its progress."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .engine import Progress

if TYPE_CHECKING:
    from .run import Run


class Observer:
    """Receives the events of a run. The command line shows them; this base class ignores them."""

    def packing(self, starts: Iterable[int], photos_each: int) -> Iterable[int]:
        """The photographs are about to be packed, `photos_each` for each of `starts`; returns the iterable to use."""
        return starts

    def began(self, run: "Run") -> None:
        """Everything is loaded and training is about to start."""

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        """One optimizer step is done."""

    def evaluating(self) -> None:
        """The validation images are being evaluated."""

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        """An epoch has ended with this row of log.csv."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended this time."""

    status: Literal["finished", "finished before", "stopped"]
    output: Path
    progress: Progress
    signal: str = ""

    @property
    def report(self) -> Path:
        return self.output / "report.html"

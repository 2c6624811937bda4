"""What `compare` shows while it runs: one line of progress, with the time left for the whole study."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from ..study.folder import RunResult
from ..study.plan import ArmPlan, Plan
from ..study.runs import StudyObserver
from ..train.engine import Progress
from ..train.run import Run
from ._console import SECONDS_BETWEEN_LINES


class Pace:
    """Estimates how long a step takes: measured if the arm has run, else in proportion to its multiply-adds."""

    def __init__(self, arms: Sequence[ArmPlan]) -> None:
        self.arms = {arm.arm.name: arm for arm in arms}
        self.seconds: dict[str, float] = {}  # per step

    def _cost(self, name: str) -> float:
        arm = self.arms[name]
        return arm.config.batch_size * (1.0 if math.isnan(arm.multiply_adds) else arm.multiply_adds)

    def of(self, name: str) -> float:
        """Seconds per step; NaN while nothing has been measured."""
        if name in self.seconds:
            return self.seconds[name]
        if not self.seconds:
            return math.nan
        known = [seconds / self._cost(other) for other, seconds in self.seconds.items()]
        return self._cost(name) * sum(known) / len(known)


class StudyDisplay(StudyObserver):
    """A progress bar over all steps of a study on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.told = 0.0

    def timing(self, plan: Plan) -> None:
        print(f"timing the steps of {len(plan.arms)} arms in turn, about 15 seconds each", flush=True)

    def opened(self, plan: Plan, results: Sequence[RunResult]) -> None:
        self.plan, self.pace = plan, Pace(plan.arms)
        for result in results:
            if result.steps:
                self.pace.seconds[result.arm] = result.training_seconds / result.steps
        done = {(result.arm, result.seed) for result in results}
        self.left = [arm for arm, seed in plan.runs if (arm.arm.name, seed) not in done]
        if results and self.left:
            print(f"{len(results)} of {len(plan.runs)} runs are already finished")
        total = sum(arm.steps for arm, _ in plan.runs)
        first = total - sum(arm.steps for arm in self.left)
        self.bar = tqdm(
            total=total,
            initial=first,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f}%|{bar}| {postfix}",
        )
        self.before = first

    def run_began(self, number: int, arm: ArmPlan, seed: int) -> None:
        self.arm, self.left = arm, self.left[1:]
        self.label = f"run {number} of {len(self.plan.runs)} ({arm.arm.name}, seed {seed})"
        self.begin, self.first, self.top1 = None, 0, math.nan

    def began(self, run: Run) -> None:
        self.begin, self.first = time.monotonic(), run.progress.updates

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        now = time.monotonic()
        name = self.arm.arm.name
        # evaluation takes time too, so the clock keeps running through it
        self.pace.seconds[name] = (now - self.begin) / max(1, progress.updates - self.first)
        seconds = self.pace.of(name) * max(0, self.arm.steps - progress.updates)
        seconds += sum(self.pace.of(arm.arm.name) * arm.steps for arm in self.left)
        left = tqdm.format_interval(seconds)
        top1 = "" if math.isnan(self.top1) else f", top-1 {self.top1:.2f}"
        text = f"{self.label}, loss {loss:.3f}{top1}, {left} left for the study"
        if not self.bar.disable:
            self.bar.n = self.before + progress.updates
            self.bar.set_postfix_str(text)
        elif now - self.told > SECONDS_BETWEEN_LINES:
            self.told = now
            print(f"{text}; step {progress.updates} of {self.arm.steps}", flush=True)

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        self.top1 = row["val_top1"]

    def run_ended(self, number: int, result: RunResult) -> None:
        self.before += self.arm.steps
        if not self.bar.disable:
            self.bar.n = self.before
        outcome = f"top-1 {result.top1_last:.2f} (best {result.top1_best:.2f}, epoch {result.best_epoch})"
        tqdm.write(f"{self.label}: {outcome if result.finished else 'diverged'}")
        sys.stdout.flush()

    def close(self) -> None:
        """Stop updating the bar, and leave it on the screen."""
        if self.bar is not None:
            self.bar.close()

"""How long a step takes, and how many steps fit into a run of so many minutes."""

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace

from ..train.config import TrainConfig
from ..train.engine import Progress
from ..train.observer import Observer
from ..train.run import Run, train

TURNS = 3
SECONDS = 5.0  # of steps per turn
WARM_UP = 2  # first steps, which allocate and compile and are not counted


class _Enough(Exception):
    """Enough steps were timed."""


class _Stopwatch(Observer):
    """Ends a run after `seconds` of steps, not counting the first ones."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.times = seconds, []

    def began(self, run: Run) -> None:
        self.last = time.perf_counter()

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.last = now
        counted = self.times[WARM_UP:]
        if counted and sum(counted) >= self.seconds:
            raise _Enough

    def finished_epoch(self, row: dict, best: bool) -> None:
        # evaluation does not count as training
        self.last = time.perf_counter()


def time_steps(configs: Mapping[str, TrainConfig], seconds: float = SECONDS) -> dict[str, float] | None:
    """Seconds per training step of each config, by name, including reading the images; None if asked to stop.

    The configs take turns of `seconds` each, so that other load on the machine affects all of them. The result is the
    median of all timed steps.
    """
    times: dict[str, list[float]] = {name: [] for name in configs}
    for _, (name, config) in itertools.product(range(TURNS), configs.items()):
        watch = _Stopwatch(seconds)
        quick = replace(config, eval_images=config.micro_batch, save_steps=0, save_minutes=0.0)
        quick = replace(quick, tensorboard=False, wandb="")
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Enough):
            if train(quick, folder, observer=watch).status == "stopped":
                return None
        # a run of only one or two steps has no others
        times[name] += watch.times[WARM_UP:] or watch.times
    return {name: statistics.median(values) for name, values in times.items()}


def fit_minutes(config: TrainConfig, minutes: float, seconds_per_step: float, steps: int) -> TrainConfig:
    """The config with as many steps as fit into `minutes`, its schedule stretched or shrunk accordingly.

    Each epoch gets its share of the steps. If that is more than `steps`, there are more epochs; if it is less than one
    step, fewer. Then the number of epochs is adjusted, by at most a factor of two, until at least 99.5% of the steps
    are used, or as many as possible. Warm-up keeps its share of all steps, and the learning rate ends at the same
    value.

    Args:
        config: settings with the number of epochs for equal steps.
        minutes: time for training, without evaluation.
        seconds_per_step: as measured.
        steps: largest number of steps in an epoch.
    """
    total = max(1, int(60 * minutes / seconds_per_step))
    wanted = max(min(config.epochs, total), math.ceil(total / steps))
    share = total / wanted
    lengths = range(math.ceil(0.5 * share), min(steps, int(1.5 * share)) + 1)
    length = min(lengths, key=lambda length: (max(total % length, total // 200), abs(total // length - wanted)))
    epochs = total // length
    return replace(
        config,
        epochs=epochs,
        epoch_steps=length,
        warmup_epochs=config.warmup_epochs * epochs / config.epochs,
    )

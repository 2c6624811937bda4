"""How long a step takes, and how long a run becomes that has minutes instead of epochs."""

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace

from .config import TrainConfig
from .engine import Progress
from .observer import Observer
from .run import Run, train

TURNS = 3
SECONDS = 5.0  # of steps in a turn
WARM_UP = 2  # steps that allocate and compile


class _Enough(Exception):
    """Enough steps were timed."""


class _Stopwatch(Observer):
    """Ends a run after some seconds of steps, not counting the first ones."""

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
        # evaluation is no training
        self.last = time.perf_counter()


def time_steps(configs: Mapping[str, TrainConfig], seconds: float = SECONDS) -> dict[str, float] | None:
    """Seconds of a training step of each config, by name, reading its images included; None if asked to stop.

    The configs take turns of so many seconds, so that whatever else the machine does meets all of them; the median of
    all steps counts.
    """
    times: dict[str, list[float]] = {name: [] for name in configs}
    for _, (name, config) in itertools.product(range(TURNS), configs.items()):
        watch = _Stopwatch(seconds)
        quick = replace(config, eval_images=config.micro_batch, save_steps=0, save_minutes=0.0)
        quick = replace(quick, tensorboard=False, wandb="")
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Enough):
            if train(quick, folder, observer=watch).status == "stopped":
                return None
        # a run of one or two steps has nothing else to measure
        times[name] += watch.times[WARM_UP:] or watch.times
    return {name: statistics.median(values) for name, values in times.items()}


def fit_minutes(config: TrainConfig, minutes: float, seconds_per_step: float, steps: int) -> TrainConfig:
    """The config with as many steps as fit into so many minutes, and its schedule stretched or shrunk to them.

    There are as many epochs as before, each with the steps that fit; where these are more than the images of an epoch
    give, there are more epochs. Warm-up stays the same share of all steps, and the learning rate ends where it did.

    Args:
        config: with the number of epochs that equal steps would take.
        minutes: of training, without evaluation.
        seconds_per_step: as measured.
        steps: of a whole epoch.
    """
    total = max(1, int(60 * minutes / seconds_per_step))
    epochs = max(min(config.epochs, total), math.ceil(total / steps))
    return replace(
        config,
        epochs=epochs,
        epoch_steps=total // epochs,
        warmup_epochs=config.warmup_epochs * epochs / config.epochs,
    )

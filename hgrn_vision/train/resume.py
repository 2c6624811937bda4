"""Going on from a checkpoint: whether it is the same run, and from where."""

import logging
from pathlib import Path
from typing import Any

from ..data.splits import Split, Stream
from .checkpoint import Checkpoints
from .config import TrainConfig, recipe_changes
from .distributed import World
from .engine import Engine

_logger = logging.getLogger(__name__)

# settings that decide which images a step takes
ORDER = {"batch_size", "epoch_steps", "repeats", "seed", "training images"}


def check_same_run(
    contents: dict[str, Any], config: TrainConfig, train: Split | Stream, output: Path, allow_change: bool
) -> set[str]:
    """Names of the recipe settings that differ from the checkpoint's; a ValueError where that is not allowed."""
    if contents["class_names"] != train.class_names:
        raise ValueError(f"the run in {output} was trained on other classes; give another --output")
    changes = recipe_changes(contents["config"], config)
    if contents["train_images"] != len(train):
        changes["training images"] = (contents["train_images"], len(train))
    listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changes.items())
    if changes and not allow_change:
        raise ValueError(
            f"the run in {output} was started with other settings: {listed}; "
            "use the old ones, give another --output, or --allow-change"
        )
    if changes:
        _logger.warning("continuing with changed settings: %s", listed)
    return set(changes)


def restore(engine: Engine, contents: dict[str, Any], changes: set[str], steps: int, indexed: bool) -> None:
    """Take up the state of a checkpoint, in an epoch of `steps` steps whose images may have no number."""
    try:
        engine.restore(contents)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"the checkpoint does not fit these settings: {str(error).splitlines()[0]}") from error
    progress = engine.progress
    if changes:
        progress.rollbacks = 0
    if progress.step and (changes & ORDER or not indexed):
        _logger.warning("epoch %d starts again: the images it has seen cannot be counted off", progress.epoch + 1)
        progress.repeat_epoch()
    progress.updates = progress.epoch * steps + progress.step


def find_best(checkpoints: Checkpoints, engine: Engine, world: World) -> None:
    """Trust the best checkpoint more than what the last one says of it.

    A run may be killed when an epoch's best has been written and the epoch's checkpoint has not.
    """
    progress = engine.progress
    best = world.on_main(lambda: (checkpoints.load_best() or {}).get("progress", {}).get("best"))
    if best is None:
        # lost or damaged: the next epoch makes a new one
        progress.best = None
    elif progress.best is None or best["val_top1"] > progress.best["val_top1"]:
        progress.best = best

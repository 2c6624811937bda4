"""TensorBoard and Weights & Biases, if they are installed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import TrainConfig, to_mapping


def _load(module: str, package: str, flag: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{flag} needs the package {package}: pip install {package}") from error


class TensorBoard:
    """Scalars as TensorBoard events in the run folder."""

    def __init__(self, output: Path, first_step: int) -> None:
        module = _load("torch.utils.tensorboard", "tensorboard", "--tensorboard")
        # steps after the checkpoint that a run resumes from will be logged again
        self.writer = module.SummaryWriter(str(output / "tensorboard"), purge_step=first_step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Scalars in a W&B project; a resumed run continues its own curves."""

    def __init__(self, output: Path, config: TrainConfig) -> None:
        wandb = _load("wandb", "wandb", "--wandb")
        name = output.resolve().name
        self.run = wandb.init(
            project=config.wandb, name=name, id=name, resume="allow", dir=str(output), config=to_mapping(config)
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        self.run.finish()


def check_trackers(config: TrainConfig) -> None:
    """Fail before the run starts if a requested tracker is not installed."""
    if config.tensorboard:
        _load("torch.utils.tensorboard", "tensorboard", "--tensorboard")
    if config.wandb:
        _load("wandb", "wandb", "--wandb")


def open_trackers(config: TrainConfig, output: Path, first_step: int) -> list[TensorBoard | WeightsAndBiases]:
    """The trackers that the settings ask for."""
    trackers: list[TensorBoard | WeightsAndBiases] = []
    if config.tensorboard:
        trackers.append(TensorBoard(output, first_step))
    if config.wandb:
        trackers.append(WeightsAndBiases(output, config))
    return trackers

"""The pixels that a model expects, and the settings that select the images."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from timm.data import resolve_data_config
from torch import nn

from .images import MAX_PIXELS


class DataSpec(NamedTuple):
    """The pixels that a model expects."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float


def resolve_spec(model: nn.Module, **instead: Any) -> DataSpec:
    """The pixels that a model expects according to its pretrained_cfg, except for what is given here.

    Args:
        model: any timm model.
        instead: img_size, mean, std, interpolation or crop_pct; None leaves the model's own.
    """
    config = resolve_data_config({name: value for name, value in instead.items() if value}, model=model)
    channels = getattr(model, "in_chans", config["input_size"][0])
    size = (channels, *config["input_size"][1:])
    mean, std = (tuple(value)[:channels] for value in (config["mean"], config["std"]))
    return DataSpec(size, mean, std, config["interpolation"], config["crop_pct"])


@dataclass(frozen=True)
class ImageSettings:
    """Which images to open outside a run; the names are those of a run's settings."""

    data: str = ""
    dataset: str = ""
    train_split: str = "train"
    val_split: str = "validation"
    holdout: float = 0.0
    eval_images: int | None = None
    classes: str = ""
    input_key: str = ""
    target_key: str = ""
    download: bool = False
    max_pixels: int = MAX_PIXELS
    # streaming readers need these too
    balance: bool = False
    micro_batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.holdout <= 1:
            raise ValueError(f"holdout must be between 0 and 1, got {self.holdout}")


class DataSettings(Protocol):
    """The settings that this package reads: a run's own, or any object that has those a function needs."""

    data: str
    dataset: str
    train_split: str
    val_split: str
    holdout: float
    eval_images: int | None
    classes: str
    input_key: str
    target_key: str
    download: bool
    max_pixels: int

    epoch_steps: int | None
    balance: bool
    batch_size: int
    micro_batch: int
    micro_batches: int
    seed: int
    repeats: int
    workers: int
    device: str

    views: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    hflip: float
    vflip: float
    color_jitter: float
    auto_augment: str
    reprob: float
    smoothing: float
    mixup: float
    cutmix: float
    mixup_prob: float
    mixup_switch: float
    mixup_mode: str

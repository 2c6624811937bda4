"""What a model expects of its pixels, and what is asked of the settings of a data set."""

from typing import NamedTuple, Protocol


class DataSpec(NamedTuple):
    """What the model expects of its pixels."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float


class DataSettings(Protocol):
    """The settings that are read here: a run's own, or any object that has those a function needs."""

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

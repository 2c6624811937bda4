"""The settings of a run: one dataclass, from which the flags, config.yaml and the check of a resumed run all follow."""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ..data.images import MAX_PIXELS


def recipe(default: Any, help: str) -> Any:
    """A field that decides what is learned: changing it on an existing run is refused."""
    return _field(default, help, "recipe")


def machine(default: Any, help: str) -> Any:
    """A field that decides where data is read and how fast the run is: it may change when a run is resumed."""
    return _field(default, help, "machine")


def _field(default: Any, help: str, kind: str) -> Any:
    metadata = {"help": help, "kind": kind}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run; the defaults are the paper's recipe (arXiv 2311.04823) with DeiT's augmentation."""

    data: str = machine("", "folder with train/ and val/, or the root of --dataset; the packaged digits if not given")
    dataset: str = recipe("", "name of a timm reader, such as torch/cifar10, hfds/..., wds/...; a folder tree if empty")
    train_split: str = recipe("train", "name of the training split")
    val_split: str = recipe("validation", "name of the validation split; folders may call it val")
    holdout: float = recipe(0.0, "share of the images held out for validation if there is no validation split")
    eval_images: int | None = recipe(None, "validate on this many images only")
    classes: str = recipe("", "file of class names, one per line, or the number of classes, for readers that name none")
    input_key: str = recipe("", "name of the image column or file extension, for readers that have several")
    target_key: str = recipe("", "name of the label column, for readers that have several")
    download: bool = machine(False, "let the reader of --dataset download what is missing")
    max_pixels: int = machine(MAX_PIXELS, "larger images are refused as decompression bombs")
    photos: tuple[str, ...] = machine((), "folders of photographs without labels, for a teacher to label")
    val: str = machine("", "folder of labelled images to validate on, sub-folders named after the teacher's classes")
    pack: int = recipe(0, "shorter side at which photographs are decoded and packed; 0 reads the files themselves")
    cache: str = machine("", "folder for packed photographs")
    views: int = recipe(0, "fixed views per photograph; the teacher's answers to them are kept; 0 asks it every time")

    model: str = recipe("hgrn_deit_tiny", "any timm model name")
    model_args: dict[str, Any] = recipe({}, "constructor arguments, such as patch_size=8 embed_dim=96")
    pretrained: bool = recipe(False, "start from the model's published weights, with a new head")
    img_size: int | None = recipe(None, "side of the square image; the model's own if not given")
    first_sizes: str = recipe("", "smaller image sides to start with: 56x8,70x4 is 8 epochs at 56 pixels, then 4 at 70")
    drop_path: float = recipe(0.0, "stochastic depth rate of the last block")
    freeze: str = recipe("", "body freezes all but the head; a number freezes that many layers from the input on")

    epochs: int = recipe(300, "passes over the training set")
    epoch_steps: int | None = recipe(None, "end each epoch after this many steps")
    patience: int = recipe(0, "end the run after this many epochs without a better top-1; 0 for never")
    balance: bool = recipe(False, "draw every class equally often, however many images it has")
    batch_size: int = recipe(2048, "images in an optimizer step, over all processes")
    micro_batch: int = recipe(128, "images per forward pass, with one seed for mixup and drop path; must be even")
    seed: int = recipe(0, "seed of order, augmentation, mixup, drop path and initial weights")

    opt: str = recipe("adamw", "any timm optimizer name")
    lr: float = recipe(2.5e-4, "peak learning rate for the whole batch, never rescaled")
    betas: tuple[float, float] = recipe((0.9, 0.98), "Adam's betas, for the optimizers that have them")
    opt_eps: float = recipe(1e-8, "Adam's epsilon, for the optimizers that have it")
    momentum: float = recipe(0.9, "momentum, for the optimizers that have it")
    weight_decay: float = recipe(0.1, "weight decay, not applied to biases, norms and what the model exempts")
    layer_decay: float | None = recipe(None, "factor on the learning rate for each layer further from the head")
    clip_grad: float = recipe(1.0, "largest gradient norm; 0 turns clipping off")
    sched: Literal["cosine", "tanh", "poly"] = recipe("cosine", "learning rate schedule, updated at every step")
    warmup_epochs: float = recipe(5.0, "epochs of linear warm-up")
    warmup_lr: float = recipe(1e-6, "learning rate at the first step of the warm-up")
    min_lr: float = recipe(1e-5, "learning rate at the end of the schedule")
    ema: float = recipe(0.0, "decay of the averaged weights, which are then evaluated and exported; 0 keeps none")

    loss: Literal["ce", "bce"] = recipe("ce", "cross entropy, or one binary cross entropy per class")
    smoothing: float = recipe(0.1, "label smoothing")
    repeats: int = recipe(3, "repeated augmentation: copies of each image per epoch, which then covers fewer images")
    auto_augment: str = recipe("rand-m9-mstd0.5-inc1", "timm auto-augment policy; empty for none")
    color_jitter: float = recipe(0.3, "colour jitter, used if there is no auto-augment policy")
    scale: tuple[float, float] = recipe((0.08, 1.0), "range of the random crop's area, as a share of the image")
    ratio: tuple[float, float] = recipe((0.75, 4 / 3), "range of the random crop's aspect ratio")
    hflip: float = recipe(0.5, "probability of a horizontal flip")
    vflip: float = recipe(0.0, "probability of a vertical flip")
    mixup: float = recipe(0.8, "mixup alpha; 0 for none")
    cutmix: float = recipe(1.0, "cutmix alpha; 0 for none")
    mixup_prob: float = recipe(1.0, "probability of mixup or cutmix for a micro-batch")
    mixup_switch: float = recipe(0.5, "probability of cutmix rather than mixup if both are on")
    mixup_mode: Literal["batch", "pair", "elem"] = recipe(
        "batch", "images that share a mixing weight: all, pairs, none"
    )
    reprob: float = recipe(0.25, "probability of random erasing")
    interpolation: str | None = recipe(None, "resampling filter; the model's own if not given")
    crop_pct: float | None = recipe(None, "share of the image kept in validation; the model's own if not given")
    mean: tuple[float, float, float] | None = recipe(None, "mean of the pixels; the model's own if not given")
    std: tuple[float, float, float] | None = recipe(
        None, "standard deviation of the pixels; the model's own if not given"
    )

    teacher: str = recipe("", "model to distil from: a timm name, local-dir:FOLDER, hf-hub:NAME, a run, an .onnx file")
    teacher_size: int | None = recipe(None, "side of the teacher's images; its own if not given")
    teacher_mean: tuple[float, float, float] | None = recipe(None, "mean of the teacher's pixels; its own if not given")
    teacher_std: tuple[float, float, float] | None = recipe(
        None, "standard deviation of the teacher's pixels; its own if not given"
    )
    distill: Literal["logits", "features", "both"] = recipe("logits", "what the student learns from the teacher")
    distill_weight: float = recipe(1.0, "weight of the distillation loss relative to the label loss")
    distill_temperature: float = recipe(1.0, "softmax temperature of distillation by logits")

    device: str = machine("auto", "cpu, cuda or another torch device; auto takes a GPU if there is one")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = machine(
        "auto", "autocast precision; auto is bf16 on CUDA devices, else fp32"
    )
    compile: bool = machine(False, "torch.compile the model")
    grad_checkpointing: bool = machine(False, "recompute activations in the backward pass to save memory")
    channels_last: bool = machine(False, "channels_last memory layout")
    workers: int = machine(8, "loader processes per rank")
    threads: int = machine(0, "CPU threads per rank; 0 leaves the choice to torch")
    save_steps: int = machine(0, "steps between checkpoints within an epoch; 0 for none")
    save_minutes: float = machine(15.0, "minutes between checkpoints within an epoch; 0 for none")
    timeout_minutes: float = machine(20.0, "longest wait for another rank before the run stops")
    max_bad_fraction: float = machine(0.01, "largest share of unreadable images in a split before the run stops")
    tensorboard: bool = machine(False, "write TensorBoard events into the run folder")
    wandb: str = machine("", "name of a Weights & Biases project to log to")

    # last, because from here on the name no longer means the function above
    recipe: str = recipe("paper", "named preset that the other settings start from")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one optimizer step, over all ranks."""
        return self.batch_size // self.micro_batch


def _check(config: TrainConfig) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(message)

    for name in ("epochs", "batch_size", "micro_batch", "repeats"):
        need(getattr(config, name) > 0, f"{name} must be at least 1, got {getattr(config, name)}")
    shares = ("drop_path", "smoothing", "holdout", "ema", "reprob", "hflip", "vflip", "mixup_prob", "max_bad_fraction")
    for name in shares:
        need(0 <= getattr(config, name) <= 1, f"{name} must be between 0 and 1, got {getattr(config, name)}")
    for name in (
        "lr",
        "weight_decay",
        "clip_grad",
        "warmup_epochs",
        "workers",
        "patience",
        "save_steps",
        "save_minutes",
        "views",
    ):
        need(getattr(config, name) >= 0, f"{name} must not be negative, got {getattr(config, name)}")
    if config.views:
        need(config.pack > 0 and bool(config.photos), "views need packed photographs: use distill with --pack SIDE")
        changed = any((config.mixup, config.cutmix, config.reprob))
        need(not changed, "mixup, cutmix and reprob change a view each time, so answers to it cannot be kept")
        need(config.distill == "logits", f"views need --distill logits: only logits are kept, not {config.distill}")
    begin = len(sides_by_epoch(config))
    need(begin < config.epochs or not begin, f"first_sizes takes {begin} epochs, leaving none of the {config.epochs}")
    known = config.freeze in ("", "body") or config.freeze.isdecimal()
    need(known, f"freeze must be body or a number of layers, got {config.freeze!r}")
    need(config.micro_batch % 2 == 0, f"micro_batch must be even (mixup pairs images), got {config.micro_batch}")
    need(
        config.batch_size % config.micro_batch == 0,
        f"batch_size {config.batch_size} is not a multiple of micro_batch {config.micro_batch}; "
        f"micro_batch {even_divisor(config.batch_size, config.micro_batch)} would work",
    )


def sides_by_epoch(config: "TrainConfig") -> list[int]:
    """The image side in each of the first epochs; after them it is img_size."""
    sides = []
    for part in filter(None, config.first_sizes.split(",")):
        side, times, epochs = part.partition("x")
        if not (side.isdecimal() and epochs.isdecimal() and int(side) and int(epochs)):
            raise ValueError(f"first_sizes must be SIDExEPOCHS,SIDExEPOCHS, such as 56x8,70x4; got {part!r}")
        sides += [int(side)] * int(epochs)
    return sides


def even_divisor(number: int, at_most: int) -> int:
    """The largest even number up to `at_most` that divides `number`; 2 if none does."""
    return next((d for d in range(min(number, at_most), 1, -1) if number % d == 0 and d % 2 == 0), 2)


def field_types() -> dict[str, Any]:
    """The annotation of every field, resolved."""
    return typing.get_type_hints(TrainConfig)


def describe(annotation: Any) -> tuple[Any, Any, bool]:
    """(base type, type arguments, optional) of a field's annotation."""
    if isinstance(annotation, types.UnionType):
        inner = next(a for a in typing.get_args(annotation) if a is not type(None))
        base, arguments, _ = describe(inner)
        return base, arguments, True
    return typing.get_origin(annotation) or annotation, typing.get_args(annotation), False


def convert(name: str, value: Any) -> Any:
    """`value`, from YAML or JSON, as the type of field `name`."""
    if name not in field_types():
        raise ValueError(f"unknown setting {name!r}; hgrn-vision train --print-config lists them all")
    base, arguments, optional = describe(field_types()[name])
    if value is None and optional:
        return None
    try:
        return _convert(base, arguments, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"setting {name}: {value!r} is not {_spell(base, arguments)}") from error


def _convert(base: Any, arguments: Any, value: Any) -> Any:
    if base is Literal:
        if value not in arguments:
            raise ValueError(value)
        return value
    if base is tuple:
        if isinstance(value, str):
            raise ValueError(value)
        if arguments[-1] is Ellipsis:
            return tuple(arguments[0](item) for item in value)
        if len(value) != len(arguments):
            raise ValueError(value)
        return tuple(kind(item) for kind, item in zip(arguments, value, strict=True))
    if base in (bool, dict, str) and not isinstance(value, base):
        raise TypeError(value)
    if base is int and (isinstance(value, bool) or int(value) != value):
        raise TypeError(value)
    return base(value)


def _spell(base: Any, arguments: Any) -> str:
    if base is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if base is tuple:
        return "a list" if arguments[-1] is Ellipsis else f"{len(arguments)} numbers"
    return {bool: "true or false", dict: "a mapping", str: "a string", int: "a whole number", float: "a number"}[base]


def from_mapping(settings: Mapping[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """`base` (or the defaults) updated with `settings`."""
    converted = {name: convert(name, value) for name, value in settings.items()}
    return replace(base or TrainConfig(), **converted)


def to_mapping(config: TrainConfig) -> dict[str, Any]:
    """The config as plain lists, numbers and strings, for YAML and JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, such as the config.yaml of a run."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings")
    content = {key: value for key, value in content.items() if key != "about"}
    if set(content) <= {"recipe", "machine"} and any(isinstance(value, dict) for value in content.values()):
        return {**content.get("recipe", {}), **content.get("machine", {})}
    return content


def read_value(text: str) -> Any:
    """A value as typed: what YAML reads in it, or the text itself where that is nothing."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    # YAML takes 1e-3 for a text
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value


def to_yaml(config: TrainConfig, about: Mapping[str, str] | None = None) -> str:
    """The text of config.yaml: settings of the recipe, settings of the machine, and the command and versions."""
    mapping = to_mapping(config)
    document: dict[str, Any] = {kind: {} for kind in ("recipe", "machine")}
    for item in fields(config):
        document[item.metadata["kind"]][item.name] = mapping[item.name]
    if about:
        document["about"] = dict(about)
    return yaml.dump(document, Dumper=_Lines, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


class _Lines(yaml.SafeDumper):
    """One line per setting: mappings as blocks, lists inline."""

    def represent_mapping(self, tag, mapping, flow_style=None):
        return super().represent_mapping(tag, mapping, flow_style=False)


def recipe_changes(old: Mapping[str, Any], new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Recipe fields whose value differs from the one a run was started with: name -> (old, new)."""
    mapping = to_mapping(new)
    names = [item.name for item in fields(new) if item.metadata["kind"] == "recipe" and item.name in old]
    return {name: (old[name], mapping[name]) for name in names if old[name] != mapping[name]}

"""The images of a run: finds the training and validation splits, and gives both the same classes."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data.readers import create_reader

from ..randomness import numpy_generator
from . import sources
from .images import MAX_PIXELS, BadImage, open_image
from .sources import Listing, Source
from .spec import DataSettings

_logger = logging.getLogger(__name__)

FOLDERS = {"train": ("train", "training"), "validation": ("val", "validation", "valid")}
STREAMS = ("wds/", "tfds/", "hfids/")


@dataclass(frozen=True)
class Split:
    """Numbered images, any of which can be read at any time."""

    name: str
    source: Source
    class_names: list[str]
    labels: np.ndarray  # (n,), indices into class_names
    rows: np.ndarray  # (n,), image numbers in the source
    max_pixels: int = MAX_PIXELS
    indexed = True

    def __len__(self) -> int:
        return len(self.rows)

    def image_name(self, index: int) -> str:
        """What to call an image in messages and lists."""
        return self.source.name(int(self.rows[index]))

    def load(self, index: int, at_least: int = 0) -> Image.Image:
        """An image as upright RGB, perhaps at a reduced scale if `at_least` is given; raises BadImage."""
        try:
            source = self.source.read(int(self.rows[index]))
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from error
        return open_image(source, self.max_pixels, at_least)

    def subset(self, indices: np.ndarray, name: str | None = None) -> "Split":
        """The images with these numbers, in this order."""
        return replace(self, name=name or self.name, labels=self.labels[indices], rows=self.rows[indices])


@dataclass(frozen=True)
class Stream:
    """Images that can only be read sequentially, by one of timm's iterable readers."""

    name: str
    reader: Any
    class_names: list[str]
    limit: int | None = None  # number of images to use; None for all
    max_pixels: int = MAX_PIXELS
    indexed = False
    labels = None

    def __len__(self) -> int:
        return min(self.reader.num_samples, self.limit or self.reader.num_samples)


def open_splits(config: DataSettings) -> tuple[Split | Stream, Split | Stream]:
    """The training and validation images, with classes matched by name."""
    if config.dataset.startswith(STREAMS):
        if config.balance:
            raise ValueError(f"--balance needs images that can be read in any order; {_where(config)} is a stream")
        train = _open_stream(config, "train", None)
        return train, _open_stream(config, "validation", train.class_names)
    listing, validation = _list_both(config)
    class_names = read_classes(config) or listing.class_names
    if len(class_names) < 2:
        raise ValueError(f"only one class ({class_names[0]}) in {_where(config)}; a classifier needs at least two")
    train = _match(listing, "train", class_names, config)
    if validation is not None:
        return train, limit(_match(validation, "validation", class_names, config), config)
    kept, held_out = stratified_holdout(train.labels, _holdout(config))
    if not len(held_out):
        raise ValueError(
            f"{_where(config)}: one image per class is too few to hold any out for validation; "
            "add images, or a val folder"
        )
    return train.subset(kept), limit(train.subset(held_out, "validation"), config)


def open_validation(
    config: DataSettings, class_names: list[str], aliases: Sequence[Sequence[str]] = ()
) -> Split | Stream:
    """The validation images alone, for a model that knows `class_names`.

    If there is no validation split, these are the images that the config holds out, or all if it holds out none. With
    `aliases`, folders may also be named after an alias or a class number.
    """
    if config.dataset.startswith(STREAMS):
        return _open_stream(config, "validation", class_names)
    listing = _list(config, "validation")
    if listing is not None:
        return limit(_match(listing, "validation", class_names, config, aliases), config)
    everything = _match(_list(config, "train"), "validation", class_names, config, aliases)
    if _holdout(config):
        everything = everything.subset(stratified_holdout(everything.labels, _holdout(config))[1])
    return limit(everything, config)


def steps_per_epoch(train: Split | Stream, config: DataSettings) -> int:
    """Optimizer steps in an epoch; images that do not fill a last batch are left out."""
    steps = len(train) // config.batch_size
    if not steps:
        raise ValueError(
            f"{len(train)} training images are fewer than one batch of {config.batch_size}; "
            f"lower --batch-size (and --micro-batch) to {max(2, len(train) // 2 * 2)} or less"
        )
    return min(steps, config.epoch_steps or steps)


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the images kept and of those held out: the same share of every class, at least one image, never all.

    The seed is not the run's, so that runs with different seeds are compared on the same images.
    """
    labels = np.asarray(labels)
    order = numpy_generator(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    starts = np.unique(labels[by_class], return_index=True)[1]
    held_out = []
    for members in np.split(by_class, starts[1:]):
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held_out.append(members[:count])
    held_out = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def _where(config: DataSettings) -> str:
    return " ".join(part for part in (config.dataset, config.data) if part) or "digits"


def _is_digits(config: DataSettings) -> bool:
    return not config.dataset and config.data in ("", "digits")


def _holdout(config: DataSettings) -> float:
    return config.holdout or (0.2 if _is_digits(config) else 0.0)


def _list_both(config: DataSettings) -> tuple[Listing, Listing | None]:
    validation = _list(config, "validation")
    if validation is None and not _holdout(config):
        raise ValueError(
            f"no validation images: {_where(config)} has no val or validation folder, and --holdout is 0; "
            "--holdout 0.2 would hold out a fifth of the training images"
        )
    return _list(config, "train"), validation


def _list(config: DataSettings, split: str) -> Listing | None:
    """The images of one split; None for validation if there is no such split, only training images to hold out from."""
    name = config.train_split if split == "train" else config.val_split
    if config.dataset:
        return _list_named(config, name)
    if _is_digits(config):
        return sources.list_digits() if split == "train" else None
    root = Path(config.data)
    if not root.exists():
        raise ValueError(f"no such file or folder: {root}")
    if root.is_file():
        return _list_file(root, split)
    folders = [name, *FOLDERS[split]]
    for folder in folders:
        if (root / folder).is_dir():
            inside = str(root / folder)
            return sources.list_tar(inside) if sources.has_tars(inside) else sources.list_folder(inside)
        if (root / f"{folder}.tar").is_file():
            return sources.list_tar(str(root / f"{folder}.tar"))
    if split == "train":
        return sources.list_tar(str(root)) if sources.has_tars(str(root)) else sources.list_folder(str(root))
    return None


def _list_named(config: DataSettings, split: str) -> Listing:
    """A split of a data set that timm knows by its prefix."""
    options = {"download": config.download or None, "input_key": config.input_key, "target_key": config.target_key}
    options = {key: value for key, value in options.items() if value}
    if config.dataset.startswith("torch/"):
        return sources.list_torchvision(config.dataset, config.data, split, **options)
    if config.dataset.startswith("hfds/"):
        return sources.list_huggingface(config.dataset, config.data, split, **options)
    raise ValueError(f"dataset {config.dataset!r} must start with torch/, hfds/, {', '.join(STREAMS)}")


def _list_file(path: Path, split: str) -> Listing | None:
    if path.suffix.lower() == ".csv":
        return sources.list_csv(str(path)) if split == "train" else None
    if path.suffix.lower() != ".tar":
        raise ValueError(f"{path} is neither a folder nor a .tar or .csv file")
    listing = sources.list_tar(str(path))
    part = sources.below(listing, FOLDERS[split])
    return listing if part is None and split == "train" else part


def _match(
    listing: Listing,
    name: str,
    class_names: list[str],
    config: DataSettings,
    aliases: Sequence[Sequence[str]] = (),
) -> Split:
    """The images whose class is among `class_names`, labelled with its index there."""
    if aliases:
        numbers = match_folders(listing, class_names, aliases)
    else:
        number = {class_name: i for i, class_name in enumerate(class_names)}
        numbers = np.array([number.get(class_name, -1) for class_name in listing.class_names])
    labels = numbers[listing.labels]
    unknown = Counter(listing.class_names[label] for label in listing.labels[labels < 0])
    if (labels < 0).all():
        raise ValueError(
            f"no {name} image of {_where(config)} has a class that the model knows: "
            f"found {some(listing.class_names)}, expected {some(class_names)}"
        )
    if unknown and name == "train":
        raise ValueError(f"{_where(config)} has training images of classes that are not listed: {some(unknown)}")
    if unknown:
        _logger.warning(
            "%d validation images are left out because their classes are not among the training classes: %s",
            unknown.total(),
            some(unknown),
        )
    rows = np.flatnonzero(labels >= 0)
    return Split(name, listing.source, class_names, labels[rows], rows, config.max_pixels)


def match_folders(listing: Listing, class_names: list[str], aliases: Sequence[Sequence[str]]) -> np.ndarray:
    """The class number of each folder, -1 if it matches none; names come before aliases, aliases before numbers."""
    known: dict[str, int] = {}
    for number in range(len(class_names)):
        known.setdefault(str(number), number)
    for number, names in enumerate(aliases):
        known.update({_plain(name): number for name in names})
    known.update({_plain(name): number for number, name in enumerate(class_names)})
    return np.array([known.get(_plain(folder), -1) for folder in listing.class_names])


def _plain(name: str) -> str:
    """A name in one spelling: lower case, with spaces for underscores and hyphens."""
    return name.lower().replace("_", " ").replace("-", " ").strip()


def some(names: Iterable[str]) -> str:
    """The first few of many names, for a message."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def limit(validation: Split, config: DataSettings) -> Split:
    """At most config.eval_images images, drawn at random but the same for every run."""
    if not config.eval_images or config.eval_images >= len(validation):
        return validation
    return validation.subset(np.sort(numpy_generator(0).permutation(len(validation))[: config.eval_images]))


def read_classes(config: DataSettings) -> list[str] | None:
    """Class names from config.classes: a text file with one per line, or the number of classes."""
    if not config.classes:
        return None
    if config.classes.isdigit():
        return [str(i) for i in range(int(config.classes))]
    names = Path(config.classes).read_text(encoding="utf-8").splitlines()
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{config.classes} names {some(repeated)} more than once")
    return names


def _open_stream(config: DataSettings, name: str, class_names: list[str] | None) -> Stream:
    """A split of a data set that can only be read sequentially."""
    training = name == "train"
    options = {"input_key": config.input_key or None, "target_key": config.target_key or None}
    if not config.dataset.startswith("wds/"):
        options["download"] = config.download
    with sources.one_line_errors(_where(config)):
        reader = create_reader(
            config.dataset,
            root=config.data or None,
            split=config.train_split if training else config.val_split,
            is_training=training,
            batch_size=config.micro_batch,
            seed=config.seed,
            # our own decoding converts images to RGB; tfds readers offer nothing else
            input_img_mode="RGB" if config.dataset.startswith("tfds/") else "",
            **options,
        )
    class_names = class_names or read_classes(config) or _stream_classes(reader, config)
    if not training:
        # every rank reads the whole stream and keeps its part: timm's own division repeats images and misses others
        reader.dist_rank, reader.dist_num_replicas = 0, 1
    return Stream(name, reader, class_names, None if training else config.eval_images, config.max_pixels)


def _stream_classes(reader: Any, config: DataSettings) -> list[str]:
    features = getattr(getattr(getattr(reader, "builder", None), "info", None), "features", None) or {}
    names = getattr(features.get(config.target_key or "label"), "names", None)
    if not names:
        raise ValueError(f"{_where(config)} does not name its classes: give --classes (a file or their number)")
    return list(names)

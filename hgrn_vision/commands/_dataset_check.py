"""A survey of a folder of images: classes, sizes, unreadable files, images on both sides of the split."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from ..data.images import BadImage
from ..data.sources import EXTENSIONS, MORE_EXTENSIONS
from ..data.splits import Split
from ..randomness import numpy_generator
from ._console import printable

LOOKED_AT = 5000  # images; a random sample of this size from larger sets
NAMED = 3  # examples that are printed
THUMBNAIL = 16  # side of the grey thumbnails that are compared
PHOTO_SIDE = 32  # smaller images are glyphs, icons, sprites
COLOURED = 16  # difference between channels of a pixel, in levels; JPEG makes grey images slightly coloured
ALIKE = 2.0  # root mean square difference, in grey levels, such as another JPEG quality causes


class Look(NamedTuple):
    """One image that was opened; size and thumbnail are None if it could not be read."""

    split: Split
    index: int
    size: tuple[int, int] | None
    thumbnail: np.ndarray | None
    reason: str
    coloured: bool = False

    @property
    def name(self) -> str:
        return self.split.image_name(self.index)


@dataclass(frozen=True)
class Survey:
    """What was found."""

    where: str
    train: Split
    validation: Split
    sizes: np.ndarray  # (n, 2) width and height of the readable images looked at
    looked_at: int
    bad: list[Look]
    twins: list[tuple[str, str]]  # names of a training and a validation image that look alike
    empty: list[str] = field(default_factory=list)  # class folders without images
    ignored: list[str] = field(default_factory=list)  # files without an image extension
    coloured: float = 0.0  # share of the readable images

    @property
    def side(self) -> int:
        """The median of the shorter sides."""
        return int(np.median(self.sizes.min(axis=1)))

    @property
    def photographs(self) -> bool:
        """Whether these look like photographs: most are in colour, and their usual size is not that of icons."""
        return self.side >= PHOTO_SIDE and self.coloured > 0.5

    def lines(self) -> Iterator[str]:
        """One summary line, then a few lines for each thing that needs attention."""
        train, validation = len(self.train), len(self.validation)
        classes = len(self.train.class_names)
        looked = "" if self.looked_at == train + validation else f" of {self.looked_at:,} checked"
        yield (
            f"Found {train + validation:,} images of {classes:,} classes in {self.where}: {train:,} for training "
            f"({self._per_class()} per class), {validation:,} for validation, {self._sizes()}, "
            f"{len(self.bad) or 'none'}{looked} unreadable, "
            f"{len(self.twins) or 'no'} suspected duplicate{'s' * (len(self.twins) != 1)} across the split."
        )
        yield from _examples("unreadable", [f"{look.name}: {look.reason}" for look in self.bad])
        yield from _examples("in training and validation", [f"{one} and {other}" for one, other in self.twins])
        yield from _examples("ignored, folder without images", self.empty)
        yield from _examples("ignored, no image extension", self.ignored)
        unseen = np.setdiff1d(np.arange(classes), self.validation.labels)
        yield from _examples("class without validation images", [self.train.class_names[label] for label in unseen])

    def _per_class(self) -> str:
        counts = np.bincount(self.train.labels, minlength=len(self.train.class_names))
        low, high = int(counts.min()), int(counts.max())
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"

    def _sizes(self) -> str:
        order = np.argsort(self.sizes.prod(axis=1), kind="stable")
        small, middle, large = ("x".join(map(str, self.sizes[order[i]])) for i in (0, len(order) // 2, -1))
        return f"{small} pixels" if small == large else f"{small} to {large} pixels, mostly about {middle}"


def _examples(what: str, items: list[str]) -> Iterator[str]:
    for item in items[:NAMED]:
        yield f"  {what}: {printable(item)}"
    if len(items) > NAMED:
        yield f"  {what}: {len(items) - NAMED:,} more"


def survey(where: str, train: Split, validation: Split, show_progress: bool = False) -> Survey:
    """Open the images of both splits, or a random 5,000 of them, and describe them."""
    everything = [(split, index) for split in (train, validation) for index in range(len(split))]
    if len(everything) > LOOKED_AT:
        drawn = np.sort(numpy_generator(0).permutation(len(everything))[:LOOKED_AT])
        everything = [everything[i] for i in drawn]
    with ThreadPoolExecutor() as threads:
        looks = list(
            tqdm(
                threads.map(_look, *zip(*everything, strict=True)),
                total=len(everything),
                desc="checking the images",
                disable=not show_progress,
                leave=False,
            )
        )
    good = [look for look in looks if look.size]
    bad = [look for look in looks if not look.size]
    if not good:
        raise ValueError(f"none of the {len(looks)} images in {where} can be read: {bad[0].name}: {bad[0].reason}")
    empty, ignored = _walk(train) if Path(where).is_dir() else ([], [])
    sizes = np.array([look.size for look in good])
    coloured = sum(look.coloured for look in good) / len(good)
    return Survey(where, train, validation, sizes, len(looks), bad, _twins(good, train), empty, ignored, coloured)


def _look(split: Split, index: int) -> Look:
    try:
        image = split.load(index)
    except BadImage as error:
        return Look(split, index, None, None, str(error))
    thumbnail = np.asarray(image.convert("L").resize((THUMBNAIL, THUMBNAIL)), dtype=np.float32).flatten()
    colours = np.asarray(image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.NEAREST), dtype=np.int16)
    return Look(split, index, image.size, thumbnail, "", bool(np.ptp(colours, axis=-1).max() > COLOURED))


def _twins(looks: list[Look], train: Split) -> list[tuple[str, str]]:
    """Pairs of a training and a validation image that look alike, at most one per validation image."""
    ours = [look for look in looks if look.split is train]
    theirs = [look for look in looks if look.split is not train]
    if not ours or not theirs:
        return []
    # integers up to 255: a sum of 256 of their products is exact in float32
    x, y = (torch.from_numpy(np.stack([look.thumbnail for look in side])) for side in (ours, theirs))
    distances = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T  # (ours, theirs)
    nearest, found = distances.min(0)
    alike = nearest <= x.shape[1] * ALIKE**2
    return [(ours[found[i]].name, theirs[i].name) for i in alike.nonzero().flatten().tolist()]


def _walk(train: Split) -> tuple[list[str], list[str]]:
    """Folders beside the class folders that hold no images, and files without an image extension."""
    root = getattr(train.source, "root", None)
    if root is None:
        return [], []
    classes = set(train.class_names)
    empty = [entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name not in classes]
    ignored = []
    for folder, _, files in os.walk(root):
        others = (name for name in files if not name.lower().endswith(EXTENSIONS + MORE_EXTENSIONS))
        ignored += [os.path.relpath(os.path.join(folder, name), root) for name in others]
    return sorted(name for name in empty if not name.startswith(".")), sorted(ignored)

"""The images of a distillation run: photographs that a teacher labels, and what the student is validated on."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..data import sources
from ..data.images import BadImage
from ..data.pack import Progress
from ..data.photos import Photos, hold_out, open_photos
from ..data.splits import Split, limit, match_folders, read_classes, some
from ..data.transforms import eval_transform, normalise
from .config import TrainConfig
from .teachers import Teacher

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhotoSplits:
    """The images that a distillation run learns from, and those that it is measured on."""

    photos: Photos
    train: Split
    agreement: Split  # held-out photographs, labelled with the teacher's first choice
    labelled: Split | None  # images of known class


def open_photo_splits(config: TrainConfig, teacher: Teacher, progress: Progress | None = None) -> PhotoSplits:
    """Find, pack and divide the photographs; the teacher labels those held out."""
    class_names = read_classes(config) or teacher.class_names
    if class_names is None:
        raise ValueError(f"teacher {teacher.name} does not name its classes: give --classes, a file with one per line")
    if len(class_names) != teacher.num_classes:
        raise ValueError(f"{len(class_names)} class names for the {teacher.num_classes} classes of {teacher.name}")
    labelled = open_labelled(config, class_names, teacher.aliases) if config.val else None
    photos = open_photos(config.photos, config.pack, Path(config.cache), config.max_pixels, labelled, progress)
    kept, held_out = hold_out(photos.rows, config.holdout)
    if not len(kept):
        raise ValueError(
            f"{', '.join(config.photos)}: holding out {len(held_out)} of {len(photos.rows)} photographs for validation "
            "leaves none to train on"
        )
    # the labels of the training images are never used
    nothing = np.zeros(len(photos.rows), dtype=np.int64)
    train = Split("train", photos.source, class_names, nothing[: len(kept)], kept, config.max_pixels)
    agreement = replace(train, name="agreement", labels=nothing[: len(held_out)], rows=held_out)
    agreement = _label(limit(agreement, config), teacher)
    return PhotoSplits(photos, train, agreement, limit(labelled, config) if labelled else None)


def _label(split: Split, teacher: Teacher, batch: int = 64) -> Split:
    """The readable images of a split, each labelled with the teacher's first choice."""
    transform = eval_transform(teacher.spec)
    labels, readable = [], []
    for start in range(0, len(split), batch):
        images = []
        for index in range(start, min(start + batch, len(split))):
            try:
                images.append(transform(split.load(index)))
                readable.append(split.rows[index])
            except BadImage:
                continue
        if images:
            answer = teacher(normalise(torch.stack(images).to(teacher.device), teacher.spec), teacher.spec)
            labels.append(answer.logits.argmax(-1).cpu().numpy())
    if not labels:
        raise ValueError(f"none of the {len(split)} photographs held out for validation could be read")
    return replace(split, rows=np.array(readable), labels=np.concatenate(labels))


def open_labelled(config: TrainConfig, class_names: list[str], aliases: Sequence[Sequence[str]]) -> Split:
    """The images of config.val, whose folders are named after classes: by name, WordNet id or number."""
    if not Path(config.val).is_dir():
        raise ValueError(f"no such folder: {config.val}")
    listing = sources.list_folder(config.val)
    numbers = match_folders(listing, class_names, aliases)
    labels = numbers[listing.labels]
    rows = np.flatnonzero(labels >= 0)
    if not len(rows):
        raise ValueError(
            f"no folder in {config.val} is named after a class of the teacher, by name, WordNet id or number: "
            f"found {some(listing.class_names)}, expected names such as {some(class_names)}"
        )
    unknown = Counter(listing.class_names[label] for label in listing.labels[labels < 0])
    if unknown:
        _logger.warning(
            "%d images in %s belong to no class and are left out: %s", unknown.total(), config.val, some(unknown)
        )
    return Split("validation", listing.source, class_names, labels[rows], rows, config.max_pixels)

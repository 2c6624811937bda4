"""Batches of numbered images: an epoch can start at any step, and any worker can make any batch."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ..randomness import fold, numpy_generator, own_generators, seed_generators
from .batches import BadRecord, EvalBatch, MicroBatch, eval_batch
from .images import BadImage
from .spec import DataSettings, DataSpec
from .splits import Split, steps_per_epoch
from .transforms import eval_transform, train_transform
from .workers import data_loader

REPLACEMENTS = 20  # unreadable images in a row after which the data set itself counts as unreadable


class MicroBatchKey(NamedTuple):
    """All that a loader process needs to make a micro-batch, so that it keeps no state between batches."""

    number: int
    rollbacks: int
    epoch: int
    positions: np.ndarray  # (B,), in the epoch's order
    indices: np.ndarray  # (B,), in the split


def epoch_order(images: int, config: DataSettings, epoch: int, length: int) -> np.ndarray:
    """The first `length` images of an epoch, as seed and epoch decide; each comes config.repeats times in a row."""
    order = numpy_generator(fold(config.seed, epoch)).permutation(images)
    return order[np.arange(length) // config.repeats]


def balanced_order(labels: np.ndarray, config: DataSettings, epoch: int, length: int) -> np.ndarray:
    """Like `epoch_order`, with every class equally often; no image repeats before all others of its class have come."""
    draw = numpy_generator(fold(config.seed, epoch))
    classes = np.unique(labels)
    draws = math.ceil(length / config.repeats / len(classes))
    columns = []
    for label in classes:
        members = np.flatnonzero(labels == label)
        rounds = [draw.permutation(members) for _ in range(math.ceil(draws / len(members)))]
        columns.append(np.concatenate(rounds)[:draws])
    rows = np.stack(columns, axis=1)  # (draws, classes)
    for row in rows:
        draw.shuffle(row)
    return rows.flatten()[np.arange(length) // config.repeats]


class EpochKeys:
    """The keys of one rank's micro-batches in an epoch, from a given step on."""

    def __init__(self, train: Split, config: DataSettings, numbers: range):
        self.labels, self.config, self.numbers = train.labels, config, numbers
        self.steps = steps_per_epoch(train, config)
        self.epoch = self.first_step = self.rollbacks = 0

    def __iter__(self) -> Iterator[MicroBatchKey]:
        size, count = self.config.batch_size, self.config.micro_batches
        if self.config.balance:
            order = balanced_order(self.labels, self.config, self.epoch, self.steps * size)
        else:
            order = epoch_order(len(self.labels), self.config, self.epoch, self.steps * size)
        for step, number in itertools.product(range(self.first_step, self.steps), self.numbers):
            # dealt like cards: repeats of an image go to different micro-batches, where mixup pairs them with others
            positions = np.arange(step * size + number, (step + 1) * size, count)
            yield MicroBatchKey(number, self.rollbacks, self.epoch, positions, order[positions])


class MicroBatches(Dataset):
    """Key -> micro-batch; a ValueError is returned as the item, because raising it in a worker loses its message."""

    def __init__(self, train: Split, config: DataSettings, spec: DataSpec):
        self.train, self.seed, self.transform = train, config.seed, train_transform(config, spec)
        self.views = config.views

    def __getitem__(self, key: MicroBatchKey) -> MicroBatch | ValueError:
        bad: list[BadRecord] = []
        images, targets, views = [], [], []
        with own_generators():
            for position, index in zip(key.positions.tolist(), key.indices.tolist(), strict=True):
                seed_generators(fold(self.seed, key.rollbacks, key.epoch, position))
                try:
                    image, index = self._load(index, bad)
                except ValueError as error:
                    return error
                if self.views:
                    views.append(int(self.train.rows[index]) * self.views + random.randrange(self.views))
                    # a view is the same in every epoch of every run
                    seed_generators(fold(views[-1]))
                images.append(self.transform(image))
                targets.append(int(self.train.labels[index]))
        seen = torch.tensor(views) if self.views else None
        return MicroBatch(key.number, torch.stack(images), torch.tensor(targets), bad, seen)

    def _load(self, index: int, bad: list[BadRecord]):
        """The image and its index; if it is unreadable, those of another one, drawn with the sample's own seed."""
        for _ in range(REPLACEMENTS):
            try:
                return self.train.load(index), index
            except BadImage as error:
                bad.append(BadRecord(self.train.name, index, self.train.image_name(index), str(error)))
                index = random.randrange(len(self.train))
        raise ValueError(f"{REPLACEMENTS} images in a row are unreadable, the last is {bad[-1].name}: {bad[-1].reason}")


class EvalBatches(Dataset):
    """Range of indices -> batch of the readable images in it."""

    def __init__(self, validation: Split, spec: DataSpec):
        self.validation, self.spec, self.transform = validation, spec, eval_transform(spec)

    def __getitem__(self, indices: range) -> EvalBatch:
        bad: list[BadRecord] = []
        images, readable = [], []
        for index in indices:
            try:
                images.append(self.transform(self.validation.load(index)))
                readable.append(index)
            except BadImage as error:
                bad.append(BadRecord(self.validation.name, index, self.validation.image_name(index), str(error)))
        return eval_batch(images, self.validation.labels[readable].tolist(), readable, bad, self.spec)


class IndexedEpochs:
    """Epochs over numbered images."""

    def __init__(self, train: Split, config: DataSettings, spec: DataSpec, numbers: range):
        self.keys = EpochKeys(train, config, numbers)
        self.loader = data_loader(MicroBatches(train, config, spec), config, config.workers, sampler=self.keys)
        self.close = self.loader.close

    def start(self, epoch: int, first_step: int, rollbacks: int) -> Iterator[MicroBatch]:
        self.keys.epoch, self.keys.first_step, self.keys.rollbacks = epoch, first_step, rollbacks
        return iter(self.loader)

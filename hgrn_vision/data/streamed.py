"""Batches from timm's iterable readers, which yield images in sequence: an epoch is always read from its beginning."""

import itertools
from collections.abc import Iterator

import torch
from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from ..randomness import fold, seed_generators
from .batches import BadRecord, EvalBatch, MicroBatch, eval_batch
from .images import BadImage, open_image
from .spec import DataSettings, DataSpec
from .splits import Stream
from .transforms import eval_transform, train_transform
from .workers import WorkerLoader, data_loader


def readable(stream: Stream, samples: Iterator, bad: list[BadRecord]) -> Iterator[tuple[Image.Image, int]]:
    """The images of `samples` as RGB with their labels; unreadable ones are added to `bad`."""
    for count, (image, target) in enumerate(samples):
        if not 0 <= target < len(stream.class_names):
            raise ValueError(f"label {target} in data with {len(stream.class_names)} classes; --classes sets them")
        try:
            yield open_image(image, stream.max_pixels), int(target)
        except BadImage as error:
            bad.append(BadRecord(stream.name, -1, f"image {count} of worker {get_worker_info().id}", str(error)))


def without_end(stream: Stream) -> Iterator:
    """The reader's images, over and over, so that unreadable ones do not make the last batch smaller."""
    while True:
        empty = True
        for sample in stream.reader:
            empty = False
            yield sample
        # a worker that was given no shard leaves the work to the others
        if empty:
            return


class StreamedMicroBatches(IterableDataset):
    """One worker's micro-batches; the augmentation of a sample is seeded by epoch, worker and count."""

    def __init__(self, train: Stream, config: DataSettings, spec: DataSpec, rank: int):
        self.train, self.config, self.rank = train, config, rank
        self.transform = train_transform(config, spec)
        self.epoch = self.rollbacks = 0

    def __iter__(self) -> Iterator[MicroBatch | ValueError]:
        info = get_worker_info()
        worker = self.rank * info.num_workers + info.id
        bad: list[BadRecord] = []
        samples = enumerate(readable(self.train, without_end(self.train), bad))
        try:
            while batch := list(itertools.islice(samples, self.config.micro_batch)):
                images = [self._augment(image, worker, count) for count, (image, _) in batch]
                targets = torch.tensor([target for _, (_, target) in batch])
                yield MicroBatch(0, torch.stack(images), targets, list(bad))
                bad.clear()
        # if it were raised in a worker, the error would arrive with a traceback as its message
        except ValueError as error:
            yield error

    def _augment(self, image: Image.Image, worker: int, count: int) -> torch.Tensor:
        seed_generators(fold(self.config.seed, self.rollbacks, self.epoch, worker, count))
        return self.transform(image)


class StreamedEpochs:
    """Epochs over images that can only be read sequentially."""

    def __init__(self, train: Stream, config: DataSettings, spec: DataSpec, rank: int):
        self.config, self.batches = config, StreamedMicroBatches(train, config, spec, rank)
        self.loader: WorkerLoader | None = None

    def start(self, epoch: int, first_step: int, rollbacks: int) -> Iterator[MicroBatch | ValueError]:
        if first_step:
            raise ValueError(
                f"{self.config.dataset} cannot start at step {first_step} of an epoch, only at its beginning"
            )
        # new workers each epoch: readers keep shuffling state, which would make an epoch depend on those before it
        self.close()
        self.batches.epoch, self.batches.rollbacks = epoch, rollbacks
        self.batches.train.reader.set_epoch(epoch)
        seed = fold(self.config.seed, epoch)
        self.loader = data_loader(self.batches, self.config, max(1, self.config.workers), seed=seed)
        return iter(self.loader)

    def close(self) -> None:
        """End the worker processes."""
        if self.loader is not None:
            self.loader.close()


class StreamedEvalBatches(IterableDataset):
    """One rank's batches of a validation stream: every rank reads all of it and keeps every world_size-th image."""

    def __init__(self, validation: Stream, config: DataSettings, spec: DataSpec, rank: int, world_size: int):
        self.validation, self.config, self.spec = validation, config, spec
        self.rank, self.world_size = rank, world_size
        self.transform = eval_transform(spec)

    def __iter__(self) -> Iterator[EvalBatch | ValueError]:
        info = get_worker_info()
        limit = self.validation.limit and len(range(info.id, self.validation.limit, info.num_workers))
        mine = itertools.islice(itertools.islice(self.validation.reader, limit), self.rank, None, self.world_size)
        bad: list[BadRecord] = []
        samples = readable(self.validation, mine, bad)
        try:
            while (batch := list(itertools.islice(samples, self.config.micro_batch))) or bad:
                images = [self.transform(image) for image, _ in batch]
                yield eval_batch(images, [target for _, target in batch], [-1] * len(batch), list(bad), self.spec)
                bad.clear()
        except ValueError as error:
            yield error

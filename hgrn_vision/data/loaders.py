"""The micro-batches of a training epoch and the batches of an evaluation.

Those of numbered images are the same for any number of ranks and workers, and wherever in the epoch a run was resumed.
Those of streams depend on the number of ranks and workers.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from .batches import EvalBatch, MicroBatch
from .indexed import EvalBatches, IndexedEpochs
from .spec import DataSettings, DataSpec
from .splits import Split, Stream, steps_per_epoch
from .streamed import StreamedEpochs, StreamedEvalBatches
from .workers import checked, data_loader


class TrainLoader:
    """This rank's micro-batches, decoded and augmented by worker processes."""

    def __init__(self, train: Split | Stream, config: DataSettings, spec: DataSpec, rank: int = 0, world_size: int = 1):
        self.numbers = rank_micro_batches(config, rank, world_size)
        self.steps = steps_per_epoch(train, config)
        if train.indexed:
            self.source = IndexedEpochs(train, config, spec, self.numbers)
        else:
            self.source = StreamedEpochs(train, config, spec, rank)

    def epoch(self, epoch: int, first_step: int = 0, rollbacks: int = 0) -> Iterator[list[MicroBatch]]:
        """One list of micro-batches per optimizer step, from step `first_step` on; earlier images are not read."""
        batches = self.source.start(epoch, first_step, rollbacks)
        for _ in range(first_step, self.steps):
            yield [checked(next(batches))._replace(number=number) for number in self.numbers]

    def close(self) -> None:
        """End the worker processes."""
        self.source.close()


def rank_micro_batches(config: DataSettings, rank: int, world_size: int) -> range:
    """Numbers of this rank's micro-batches in each step; a ValueError if the ranks cannot share them evenly."""
    count = config.micro_batches
    if count % world_size:
        possible = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ValueError(
            f"{world_size} processes cannot share {count} micro-batches evenly (batch_size {config.batch_size} / "
            f"micro_batch {config.micro_batch}): {possible} processes would work, or a smaller --micro-batch"
        )
    share = count // world_size
    return range(rank * share, (rank + 1) * share)


class EvalLoader:
    """This rank's part of the validation images; batches of numbered images are the same on any number of ranks."""

    def __init__(
        self, validation: Split | Stream, config: DataSettings, spec: DataSpec, rank: int = 0, world_size: int = 1
    ):
        if validation.indexed:
            dataset, mine = (
                EvalBatches(validation, spec),
                _ranges(len(validation), config.micro_batch)[rank::world_size],
            )
            self.loader = data_loader(dataset, config, config.workers, sampler=mine)
        else:
            dataset = StreamedEvalBatches(validation, config, spec, rank, world_size)
            self.loader = data_loader(dataset, config, max(1, config.workers))
        self.close = self.loader.close

    def __iter__(self) -> Iterator[EvalBatch]:
        for batch in self.loader:
            yield checked(batch)


def _ranges(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def read_ahead(validation: Split, spec: DataSpec, batch_size: int) -> Iterator[EvalBatch]:
    """All batches of a split in order, read by threads: for a single pass that needs no worker processes."""
    batches, pending = EvalBatches(validation, spec), deque[Future]()
    threads = min(8, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    try:
        for indices in _ranges(len(validation), batch_size):
            # at most one batch per thread is in progress or waiting, so that memory does not grow with the split
            if len(pending) == threads:
                yield pending.popleft().result()
            pending.append(pool.submit(batches.__getitem__, indices))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)

"""Starting and ending loader processes."""

import os
import signal
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..randomness import torch_generator
from .spec import DataSettings


def checked(batch: Any) -> Any:
    """A worker's batch; a ValueError sent instead of one is raised here, where it keeps its message."""
    if isinstance(batch, ValueError):
        raise batch
    return batch


class WorkerLoader(DataLoader):
    """A DataLoader whose workers can be ended before it is deleted."""

    def close(self) -> None:
        """End the worker processes."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None

    def check_worker_number_rationality(self) -> None:
        """Do not warn about more workers than cores: on slow disks, workers mostly wait."""


def data_loader(
    dataset: Dataset, config: DataSettings, workers: int, sampler: Iterable | None = None, seed: int = 0
) -> WorkerLoader:
    """A loader whose worker processes make whole batches of `dataset`."""
    cuda = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    return WorkerLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=cuda,
        collate_fn=_unchanged,
        worker_init_fn=_ignore_signals,
        # a generator of its own: otherwise starting an epoch would draw from the global one
        generator=torch_generator(seed),
    )


def _unchanged(item: Any) -> Any:
    return item


def _ignore_signals(worker: int) -> None:
    """Leave signals that are sent to all processes of a job to the main one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # SIGTERM cannot be ignored as well: it is the main process's last resort for ending its workers
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent_only, daemon=True).start()


def _obey_parent_only() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)

"""What can go wrong in a run: signals, divergence, memory, and how errors are put into one line."""

import signal
import threading
from contextlib import contextmanager

import torch

from .config import TrainConfig


class StopRequest:
    """Remembers that the process was asked to end, so that the current step is finished and saved first."""

    # Windows has no SIGUSR1
    SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]

    def __init__(self) -> None:
        self.name = ""
        self._before = {}

    def __enter__(self) -> "StopRequest":
        # only the main thread can set signal handlers
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame) -> None:
        # whoever presses Ctrl-C twice does not want to wait for the step
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


class Diverged(RuntimeError):
    """The loss or its gradient kept becoming infinite or NaN, even after going back to the last checkpoint."""


class OutOfMemory(ValueError):
    """A micro-batch did not fit into memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was too small; on CPUs PyTorch raises no type of its own for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def memory_advice(config: TrainConfig, ranks: int):
    """Turn an out-of-memory error into one line with the micro-batch to try."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        smaller = smaller_micro_batch(config, ranks)
        advice = f"try --micro-batch {smaller} (with --allow-change to resume)" if smaller else "use more devices"
        hint = "" if config.grad_checkpointing else ", or --grad-checkpointing"
        raise OutOfMemory(f"out of memory with micro-batch {config.micro_batch}: {advice}{hint}") from error


def smaller_micro_batch(config: TrainConfig, ranks: int) -> int | None:
    """The largest even micro-batch up to half the current one that divides the batch evenly over all ranks, if any."""
    for size in range(config.micro_batch // 2, 1, -1):
        if size % 2 == 0 and config.batch_size % (size * ranks) == 0:
            return size
    return None


def reason(error: BaseException) -> str:
    """The first line of an error's message, after its type where the message says little without it."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    # the message of a KeyError is only the key
    return f"{type(error).__name__}: {lines[0]}" if isinstance(error, KeyError) else lines[0]

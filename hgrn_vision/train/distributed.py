"""The processes of a run: their ranks, and how they agree."""

import os
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from timm.utils.distributed import is_distributed_env, world_info_from_env

from .config import TrainConfig

Result = TypeVar("Result")

# what torch and gloo say when the process at the other end is gone
_LOST = ("onnection closed", "onnection reset", "Broken pipe", "imed out", "imeout", "Socket", "NCCL", "gloo")


class LostRank(RuntimeError):
    """Another process of the run died or did not answer in time."""


@dataclass
class World:
    """This process among the processes of the run; with a single process no method waits."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    timeout: timedelta = timedelta(minutes=20)
    # a gloo group beside the one that moves gradients: agreements need no GPU, and gloo can name who is missing
    control: Any = None

    @property
    def main(self) -> bool:
        """Whether this process writes the files and reports to the user."""
        return self.rank == 0

    def on_main(self, function: Callable[[], Result]) -> Result:
        """Call `function` on rank 0; every rank gets its result, or raises its error."""
        outcome: list[Any] = [None]
        if self.main:
            outcome = [_attempt(function)]
        if self.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self.control)
        value, error = outcome[0]
        if error is not None:
            raise _shared(error)
        return value

    def everywhere(self, function: Callable[[], Result], before: str = "the start") -> Result:
        """Call `function` on every rank; if it fails on one, all raise, so that none waits for the others."""
        value, error = _attempt(function)
        self.meet(before)
        if not self.sum([error is not None])[0]:
            return value
        errors = self.gather(error)
        failed = next(rank for rank, each in enumerate(errors) if each is not None)
        raise _shared(errors[0] or ValueError(f"rank {failed}: {errors[failed]}"))

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum(self, numbers: Iterable[float]) -> list[float]:
        """Elementwise sum over the ranks."""
        numbers = list(numbers)
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def meet(self, before: str) -> None:
        """Wait for every rank; the error names those that did not arrive."""
        if self.size == 1:
            return
        error = self._call_roll(self.timeout)
        if error:
            minutes = self.timeout.total_seconds() / 60
            raise LostRank(f"rank {self.rank} waited up to {minutes:g} minutes before {before}: {error}")

    @contextmanager
    def watched(self, during: str):
        """Turn the many errors that a dead peer causes into one that says so."""
        try:
            yield
        except LostRank:
            raise
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in _LOST):
                raise
            reason = self._call_roll(timedelta(seconds=10)) or str(error).splitlines()[0]
            raise LostRank(f"rank {self.rank} lost another rank in {during}: {reason}") from error

    def _call_roll(self, timeout: timedelta) -> str | None:
        """Gloo's message that names the ranks which did not answer; None if all did."""
        try:
            dist.monitored_barrier(group=self.control, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def _attempt(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return function(), None
    except (ValueError, OSError, ImportError) as error:
        return None, error


def _shared(error: Exception) -> Exception:
    # every rank raises the same error, so only rank 0 needs to print it
    error.shared = True
    return error


def _place() -> tuple[int, int, int]:
    """Local rank, rank and number of processes, as set by torchrun or srun; a lone process is rank 0 of 1."""
    return world_info_from_env() if is_distributed_env() else (0, 0, 1)


def is_main() -> bool:
    """Whether this process writes the files and reports to the user; works before the processes have connected."""
    return World(rank=_place()[1]).main


def start(config: TrainConfig) -> World:
    """Join the processes that torchrun or srun started, or be the only one."""
    device = choose_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    local_rank, rank, size = _place()
    if size == 1:
        return World(device=device)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank))
    timeout = timedelta(minutes=config.timeout_minutes)
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps one store across restarts: without a prefix of their own, new ranks would try to reach dead ones
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt} of {size}", store)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=timeout, **options)
    return World(rank, size, device, timeout, dist.new_group(backend="gloo", timeout=timeout))


def choose_device(name: str) -> torch.device:
    """The requested device; auto is the accelerator if there is one, else the CPU."""
    if name == "auto":
        name = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device

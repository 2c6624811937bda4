"""What commands print and write: progress, warnings, output files, and exit codes of failed runs."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import torch
from tqdm import tqdm

from ..backend import choose, get_backend
from ..files import check_writable, whole_file
from ..train.build import DTYPES, precision
from ..train.config import TrainConfig
from ..train.distributed import LostRank, choose_device, is_main
from ..train.engine import Progress
from ..train.faults import Diverged
from ..train.observer import Observer
from ..train.run import Run

SECONDS_BETWEEN_LINES = 30
STDOUT = "-"


def exit_code(command: str, work: Callable[[], int]) -> int:
    """The exit code of `work`, or 3 if the run diverged, 1 if it lost a process.

    Other errors are raised, except on ranks where the main rank reports the same error: those return 2.
    """
    show_warnings()
    try:
        return work()
    except (ValueError, OSError, ImportError) as error:
        # an error that all ranks share is printed once
        if getattr(error, "shared", False) and not is_main():
            return 2
        raise
    except LostRank as error:
        print(f"hgrn-vision {command}: {error}", file=sys.stderr)
        return 1
    except Diverged as error:
        if is_main():
            print(f"hgrn-vision {command}: {error}", file=sys.stderr)
        return 3


def backend_details(config: TrainConfig) -> dict[str, str]:
    """The backend that runs our own models; empty for other models."""
    if not config.model.startswith("hgrn"):
        return {}
    device, name = choose_device(config.device), get_backend()
    dtype = DTYPES[precision(config, device)] or torch.float32
    return {"backend": choose(device, dtype) if name == "auto" else name}


class Display(Observer):
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.top1 = float("nan")
        self.told = 0.0

    def packing(self, starts: Iterable[int], photos_each: int) -> Iterable[int]:
        print("Packing the photographs, once for all runs that use them at this size.", flush=True)
        bar = tqdm(
            unit=" photographs", dynamic_ncols=True, disable=not sys.stderr.isatty(), total=len(starts) * photos_each
        )
        began = told = time.monotonic()
        for turn, start in enumerate(starts):
            yield start
            bar.update(photos_each)
            now, done = time.monotonic(), (turn + 1) * photos_each
            if bar.disable and now - told > SECONDS_BETWEEN_LINES:
                told, rate = now, done / (now - began)
                left = tqdm.format_interval((len(starts) - turn - 1) * photos_each / rate)
                print(f"packed {done:,} photographs  {rate:.0f} per second  left {left}", flush=True)
        bar.close()

    def began(self, run: Run) -> None:
        config, world = run.config, run.world
        parameters = sum(p.numel() for p in run.engine.model.parameters())
        self.epochs, self.steps, self.batch_size = config.epochs, run.steps, config.batch_size
        self.first, self.begin = run.progress.updates, time.monotonic()
        backend = f" ({run.about['backend']} backend)" if "backend" in run.about else ""
        print(
            f"{config.model}: {parameters:,} parameters, {len(run.class_names)} classes, "
            f"{len(run.train_split):,} training and {len(run.validation):,} validation images"
        )
        print(
            f"{world.size} x {world.device.type}{backend}, batch {config.batch_size} = {config.micro_batches} x "
            f"{config.micro_batch}, {config.epochs} epochs of {run.steps} steps, output {run.output}"
        )
        if run.photos:
            print(
                f"teacher {config.teacher} at {run.teacher.spec.input_size[-1]} pixels; excluded: "
                f"{len(run.photos.bad):,} unreadable photographs, {len(run.photos.duplicates):,} that look like "
                "validation images"
            )
        if run.resumed:
            print(f"continuing after step {run.progress.updates} (epoch {run.progress.epoch + 1})")
        sys.stdout.flush()
        total = self.epochs * self.steps
        self.bar = tqdm(
            total=total, initial=self.first, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def stepped(self, progress: Progress, loss: float, lr: float) -> None:
        rate = (progress.updates - self.first) * self.batch_size / (time.monotonic() - self.begin)
        self.bar.update(progress.updates - self.bar.n)
        if not self.bar.disable:
            self.bar.set_postfix_str(f"loss {loss:.4f}, top-1 {self.top1:.2f}, {rate:.0f} images/s")
        elif time.monotonic() - self.told > SECONDS_BETWEEN_LINES:
            self.told = time.monotonic()
            total, done = self.epochs * self.steps, progress.updates
            print(
                f"step {done}/{total}  loss {loss:.4f}  lr {lr:.2e}  {rate:.0f} images/s  "
                f"left {tqdm.format_interval((total - done) * self.batch_size / rate)}",
                flush=True,
            )

    def evaluating(self) -> None:
        if not self.bar.disable:
            self.bar.set_postfix_str("evaluating")

    def finished_epoch(self, row: dict[str, Any], best: bool) -> None:
        self.top1 = row["val_top1"]
        agreement = f"agreement {row['agreement']:.2f}  " if "agreement" in row else ""
        line = (
            f"epoch {row['epoch']}/{self.epochs}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}  "
            f"top-1 {row['val_top1']:.2f}{'*' if best else ' '} top-5 {row['val_top5']:.2f}  "
            f"{agreement}{row['images_per_second']:.0f} images/s  data wait {row['data_wait']:.0%}"
        )
        tqdm.write(line)
        sys.stdout.flush()

    def close(self) -> None:
        """Stop updating the bar, and leave it on the screen."""
        if self.bar is not None:
            self.bar.close()


class _Lines(logging.Handler):
    """Prints log messages without breaking the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def show_warnings() -> None:
    """Print the package's warnings as lines on standard error, from one process only."""
    logger = logging.getLogger("hgrn_vision")
    logger.handlers = [_Lines()] if is_main() else [logging.NullHandler()]
    logger.setLevel(logging.WARNING)


def check_free(paths: Iterable[str | os.PathLike], force: bool) -> None:
    """Refuse, before any work is done, what would overwrite a file, write a file twice or fail to write one."""
    paths = [path if path == STDOUT else os.path.abspath(path) for path in paths]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        where = "standard output" if twice == STDOUT else twice
        raise ValueError(f"two outputs cannot both go to {where}")
    for path in paths:
        if path == STDOUT:
            continue
        if os.path.isdir(path):
            raise ValueError(f"{path} is a folder, expected a file name")
        if os.path.lexists(path) and not force:
            raise ValueError(f"{path} already exists; choose another name, or overwrite it with --force")
        check_writable(os.path.dirname(path))


def printable(text: str) -> str:
    """`text` with replacements for what a terminal or page cannot show: control characters, invalid UTF-8."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@contextlib.contextmanager
def open_output(path: str | os.PathLike, binary: bool = False) -> Iterator[IO]:
    """An output file that appears only once it is complete; '-' is standard output."""
    if os.fspath(path) == STDOUT:
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout.buffer if binary else sys.stdout
        return
    # file names need not be valid UTF-8: their bytes are written unchanged
    text = {} if binary else {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    with whole_file(path) as temporary, open(temporary, "wb" if binary else "w", **text) as file:
        yield file

"""A teacher's answers to fixed views of photographs, kept in a file, so that it is asked about each view only once."""

import hashlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..data.pack import PackedPhotos
from ..data.spec import DataSpec
from .config import TrainConfig
from .teachers import Teacher

# settings that change what a view looks like; a run that changes one of them keeps its answers in another file
VIEW_SETTINGS = ("views", "scale", "ratio", "hflip", "vflip", "color_jitter", "auto_augment")


class KeptAnswers:
    """The logits (float16) of every view, by its number; a view whose checksum does not match has no answer yet.

    The processes of a machine share the file's memory. A resumed run repeats the same micro-batches, so the answers it
    finds are those that it would have been given.
    """

    def __init__(self, path: Path, views: int, classes: int) -> None:
        size = views * (4 + 2 * classes)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            # reserve the space now: writing to mapped memory on a full disk would kill the process
            getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(file.fileno(), 0, size)
        self.checksums = np.memmap(path, np.uint32, "r+", 0, (views,))
        self.logits = np.memmap(path, np.float16, "r+", 4 * views, (views, classes))

    def lookup(self, views: np.ndarray, ask: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The answers (B, classes) to views (B,); `ask` is called with the positions that have none yet."""
        answers = self.logits[views]
        checksums = [_checksum(answer) for answer in answers]
        missing = np.flatnonzero(self.checksums[views] != checksums)
        if len(missing):
            answers[missing] = ask(missing)
            self.logits[views[missing]] = answers[missing]
            # last, so that an answer does not count if the process is killed halfway through writing it
            self.checksums[views[missing]] = [_checksum(row) for row in answers[missing]]
        return answers

    def logits_of(self, teacher: Teacher, images: torch.Tensor, spec: DataSpec, views: torch.Tensor) -> torch.Tensor:
        """The teacher's logits for a micro-batch, asking it only about views that it has not seen."""

        def ask(missing: np.ndarray) -> np.ndarray:
            return teacher(images[torch.from_numpy(missing).to(images.device)], spec).logits.half().cpu().numpy()

        return torch.from_numpy(self.lookup(views.numpy(), ask)).to(images.device).float()


def _checksum(answer: np.ndarray) -> int:
    # never 0, which is what a new file is filled with
    return zlib.crc32(answer.tobytes()) or 1


def answers_path(config: TrainConfig, photos: PackedPhotos, teacher: Teacher, spec: DataSpec) -> Path:
    """The file for this teacher's answers to these views; all runs that ask the same share it."""
    digest = hashlib.sha256(photos.checksums.tobytes() + photos.names.tobytes())
    settings = [getattr(config, name) for name in VIEW_SETTINGS]
    digest.update(repr((teacher.digest, teacher.spec, spec, settings)).encode())
    return Path(config.cache) / f"{digest.hexdigest()[:12]}.answers"

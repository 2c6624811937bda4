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

# whatever changes a view, or how the teacher sees it, belongs to other answers
VIEW_SETTINGS = ("views", "scale", "ratio", "hflip", "vflip", "color_jitter", "auto_augment")


class KeptAnswers:
    """Logits (float16) by the number of a view, each with a checksum; views without a valid one are unanswered.

    The processes of a machine share the file's memory. A micro-batch is always the same images, so that a run which is
    killed and continued finds the very answers that it would have been given.
    """

    def __init__(self, path: Path, views: int, classes: int) -> None:
        size = views * (4 + 2 * classes)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            # now, while a full disk is an error and not yet a crash
            getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(file.fileno(), 0, size)
        self.checksums = np.memmap(path, np.uint32, "r+", 0, (views,))
        self.logits = np.memmap(path, np.float16, "r+", 4 * views, (views, classes))

    def lookup(self, views: np.ndarray, ask: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The answers (B, classes) to views (B,); `ask` gives those to the positions that have none yet."""
        answers = self.logits[views]
        checksums = [_checksum(answer) for answer in answers]
        missing = np.flatnonzero(self.checksums[views] != checksums)
        if len(missing):
            answers[missing] = ask(missing)
            self.logits[views[missing]] = answers[missing]
            # last: an answer that was half written when the process was killed does not count
            self.checksums[views[missing]] = [_checksum(row) for row in answers[missing]]
        return answers

    def logits_of(self, teacher: Teacher, images: torch.Tensor, spec: DataSpec, views: torch.Tensor) -> torch.Tensor:
        """The teacher's logits for a micro-batch, asking it only about views that it has not seen."""

        def ask(missing: np.ndarray) -> np.ndarray:
            return teacher(images[torch.from_numpy(missing).to(images.device)], spec).logits.half().cpu().numpy()

        return torch.from_numpy(self.lookup(views.numpy(), ask)).to(images.device).float()


def _checksum(answer: np.ndarray) -> int:
    # 0 is what an empty file holds
    return zlib.crc32(answer.tobytes()) or 1


def answers_path(config: TrainConfig, photos: PackedPhotos, teacher: Teacher, spec: DataSpec) -> Path:
    """Where the answers of this teacher to these views are kept, whichever run asks."""
    digest = hashlib.sha256(photos.checksums.tobytes() + photos.names.tobytes())
    settings = [getattr(config, name) for name in VIEW_SETTINGS]
    digest.update(repr((teacher.digest, teacher.spec, spec, settings)).encode())
    return Path(config.cache) / f"{digest.hexdigest()[:12]}.answers"

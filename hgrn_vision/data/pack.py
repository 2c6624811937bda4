"""Photographs kept decoded and small in one memory-mapped file, so that reading one costs a fraction of a millisecond.

The file holds the pixels of one photograph after the other, then an index, then a footer that locates and verifies the
index. It is built once, and rebuilt when a file was added, removed or changed, or when a different side is requested.
"""

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from ..files import whole_file
from .images import BadImage, open_image
from .near_duplicates import HASHED_SIDE, difference_hash
from .sources import Files

MAGIC = b"HGRNPACK"
FOOTER = struct.Struct("<QQ32s8s")  # where the index begins, its length, its SHA-256, MAGIC
AT_ONCE = 256  # photographs decoded at a time before they are written, which bounds memory


class DamagedPack(ValueError):
    """A file that is not a complete pack."""


@dataclass(frozen=True)
class PackedPhotos:
    """The photographs of a pack, by number; a source for splits."""

    path: str
    names: np.ndarray  # (n,) file names as bytes
    offsets: np.ndarray  # (n + 1,) where the pixels of each begin
    sizes: np.ndarray  # (n, 2) height, width
    checksums: np.ndarray  # (n,) CRC-32 of the pixels
    hashes: np.ndarray  # (n, 32) difference hashes
    bad: list[tuple[str, str]]  # name and reason of each photograph that could not be read

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return os.fsdecode(self.names[row])

    def read(self, row: int) -> Image.Image:
        pixels = self._pixels[self.offsets[row] : self.offsets[row + 1]]
        if zlib.crc32(pixels) != self.checksums[row]:
            raise DamagedPack(f"{self.path} is damaged at {self.name(row)}: remove it, and it will be rebuilt")
        height, width = self.sizes[row]
        return Image.fromarray(pixels.reshape(height, width, 3))

    @cached_property
    def _pixels(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def __getstate__(self) -> dict:
        # a loader process opens the file itself: a pickled memory map would be a copy of it
        return {key: value for key, value in self.__dict__.items() if key != "_pixels"}


Progress = Callable[[Iterable[int], int], Iterable[int]]


def open_pack(path: Path, files: Files, side: int, max_pixels: int, progress: Progress | None = None) -> PackedPhotos:
    """The pack at `path`; it is built first if it is missing, damaged, or made from other files or for another side."""
    wanted = fingerprint(files, side)
    try:
        return _read(path, wanted)
    except (OSError, DamagedPack):
        build(path, files, side, max_pixels, wanted, progress)
    return _read(path, wanted)


def fingerprint(files: Files, side: int) -> str:
    """A digest that changes when a file is added, removed, renamed or written to, or with the side."""
    digest = hashlib.sha256(f"{MAGIC!r} {side}".encode())
    for row in range(len(files.paths)):
        status = os.stat(files.read(row))
        digest.update(files.paths[row] + f" {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def build(path: Path, files: Files, side: int, max_pixels: int, mark: str, progress: Progress | None = None) -> None:
    """Write the pack of `files`, shrunk to a shorter side of at most `side`; unreadable files are listed in it."""
    index = _Index()

    def load(row: int) -> tuple[np.ndarray, np.ndarray] | str:
        try:
            image = open_image(files.read(row), max_pixels, at_least=max(side, HASHED_SIDE))
        except BadImage as error:
            return str(error)
        return np.asarray(shrink(image, side)), difference_hash(image)

    # threads are enough: Pillow releases the GIL while it decodes and resizes
    with whole_file(path) as temporary, open(temporary, "wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, len(files.paths), AT_ONCE)
        for start in progress(starts, AT_ONCE) if progress else starts:
            rows = range(start, min(start + AT_ONCE, len(files.paths)))
            for row, loaded in zip(rows, pool.map(load, rows), strict=True):
                index.add(files.name(row), loaded, file)
        if not index.names:
            raise ValueError(f"none of the {len(files.paths)} photographs could be read: {index.bad[0][1]}")
        index.write(file, mark)


class _Index:
    """What is known about the photographs written so far."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.offsets = [0]
        self.sizes: list[tuple[int, int]] = []
        self.checksums: list[int] = []
        self.hashes: list[np.ndarray] = []
        self.bad: list[tuple[str, str]] = []

    def add(self, name: str, loaded: tuple[np.ndarray, np.ndarray] | str, file: BinaryIO) -> None:
        if isinstance(loaded, str):
            self.bad.append((name, loaded))
            return
        pixels, hashed = loaded
        content = pixels.tobytes()
        file.write(content)
        self.names.append(os.fsencode(name))
        self.offsets.append(self.offsets[-1] + len(content))
        self.sizes.append(pixels.shape[:2])
        self.checksums.append(zlib.crc32(content))
        self.hashes.append(hashed)

    def write(self, file: BinaryIO, mark: str) -> None:
        content = io.BytesIO()
        np.savez(
            content,
            mark=np.array(mark),
            names=np.array(self.names),
            offsets=np.array(self.offsets, dtype=np.int64),
            sizes=np.array(self.sizes, dtype=np.int32),
            checksums=np.array(self.checksums, dtype=np.uint32),
            hashes=np.stack(self.hashes),
            bad=np.array(self.bad, dtype=str).reshape(-1, 2),
        )
        index = content.getvalue()
        file.write(index)
        file.write(FOOTER.pack(self.offsets[-1], len(index), hashlib.sha256(index).digest(), MAGIC))


def _read(path: Path, wanted: str) -> PackedPhotos:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FOOTER.size))
        footer = file.read()
        if len(footer) < FOOTER.size:
            raise DamagedPack(f"{path} is too short for a pack")
        begin, length, digest, magic = FOOTER.unpack(footer)
        if magic != MAGIC or begin + length + FOOTER.size != size:
            raise DamagedPack(f"{path} is not a complete pack")
        file.seek(begin)
        content = file.read(length)
    if hashlib.sha256(content).digest() != digest:
        raise DamagedPack(f"{path} has a damaged index")
    with np.load(io.BytesIO(content)) as index:
        if str(index["mark"]) != wanted:
            raise DamagedPack(f"{path} was made from other photographs")
        columns = {name: index[name] for name in ("names", "offsets", "sizes", "checksums", "hashes")}
        bad = [(str(name), str(reason)) for name, reason in index["bad"]]
    return PackedPhotos(str(path), **columns, bad=bad)


def shrink(image: Image.Image, side: int) -> Image.Image:
    """The image with its shorter side at most `side`; smaller images stay as they are."""
    scale = side / min(image.size)
    if scale >= 1:
        return image
    width, height = (round(n * scale) for n in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)

"""Photographs without labels, from any number of folders at any depth, except those that look like held-out images."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..randomness import numpy_generator
from .images import BadImage
from .near_duplicates import HASHED_SIDE, MOST_DIFFERENT_BITS, hashes_to_avoid, nearest
from .pack import PackedPhotos, Progress, open_pack
from .sources import EXTENSIONS, MORE_EXTENSIONS, Files, Source
from .splits import Split

HELD_OUT = 2000  # at most this many photographs, because the teacher labels them all at the start of a run


def list_photos(folders: Sequence[str]) -> Files:
    """Every image in the folders and below them."""
    paths = []
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"no such folder: {folder}")
        found = sorted(
            os.path.join(root, name)
            for root, _, names in os.walk(folder, followlinks=True)
            for name in names
            if name.lower().endswith(EXTENSIONS + MORE_EXTENSIONS) and not name.startswith(".")
        )
        if not found:
            raise ValueError(f"no images in {folder} or below it")
        paths += found
    return Files("", np.array([os.fsencode(path) for path in paths]))


def pack_path(cache: Path, folders: Sequence[str], side: int) -> Path:
    """The file for the pack of these folders, shared by all runs that read them at this side."""
    places = "\n".join(os.path.abspath(folder) for folder in folders)
    return cache / f"{hashlib.sha256(places.encode()).hexdigest()[:12]}-{side}.pack"


@dataclass(frozen=True)
class Photos:
    """Photographs to learn from, by number, and those that were left out."""

    source: Source
    rows: np.ndarray
    bad: list[tuple[str, str]]  # name, reason
    duplicates: list[tuple[str, str, int]]  # photograph, the held-out image it looks like, bits that differ


def open_photos(
    folders: Sequence[str], side: int, cache: Path, max_pixels: int, avoid: Split | None, progress: Progress | None
) -> Photos:
    """The photographs of `folders`, in a pack of `side` pixels, or file by file if `side` is 0.

    Args:
        folders: searched at any depth.
        side: shorter side of the photographs in the pack.
        cache: folder for the pack.
        max_pixels: larger images are refused.
        avoid: photographs that look like these images are left out; only in a pack, which stores their hashes.
        progress: wraps the loop that builds the pack.
    """
    files = list_photos(folders)
    if not side:
        return Photos(files, np.arange(len(files.paths)), [], [])
    packed = open_pack(pack_path(cache, folders, side), files, side, max_pixels, progress)
    duplicates = find_duplicates(packed, avoid) if avoid else []
    copies = {name for name, _, _ in duplicates}
    rows = [row for row in range(len(packed)) if packed.name(row) not in copies]
    return Photos(packed, np.array(rows), packed.bad, duplicates)


def find_duplicates(photos: PackedPhotos, held_out: Split) -> list[tuple[str, str, int]]:
    """(photograph, held-out image, bits that differ) for each near-duplicate of a held-out image."""
    hashes, numbers = [], []
    for index in range(len(held_out)):
        try:
            views = hashes_to_avoid(held_out.load(index, HASHED_SIDE))
        except BadImage:
            continue
        hashes.append(views)
        numbers += [index] * len(views)
    if not hashes:
        return []
    which, bits = nearest(photos.hashes, np.concatenate(hashes))
    return [
        (photos.name(row), held_out.image_name(numbers[which[row]]), int(bits[row]))
        for row in np.flatnonzero(bits <= MOST_DIFFERENT_BITS)
    ]


def hold_out(rows: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from and those to validate on; the same for every seed, so that runs can be compared."""
    count = min(HELD_OUT, max(1, round(share * len(rows))))
    order = numpy_generator(0).permutation(len(rows))
    return np.sort(rows[order[count:]]), np.sort(rows[order[:count]])

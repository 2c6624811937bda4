"""Where images come from: folders, tar files, CSV lists, torchvision and Hugging Face data sets, the packaged digits.

A source lists names and labels without decoding anything, and reads any image by its number. Sources hold arrays
instead of lists of objects: loader processes share an array's memory, but copy a list page by page as they read it.
"""

import contextlib
import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from timm.data import create_dataset
from timm.data.readers import create_reader
from timm.data.readers.img_extensions import add_img_extensions, del_img_extensions
from timm.data.readers.reader_image_folder import find_images_and_targets
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key

from .digits import digit_image, load_digits

EXTENSIONS = (".png", ".jpg", ".jpeg")  # timm's own
MORE_EXTENSIONS = (".jfif", ".bmp", ".gif", ".webp", ".avif", ".jp2", ".tif", ".tiff", ".pgm", ".ppm", ".pnm", ".tga")


class Source(Protocol):
    """Images by number."""

    def name(self, row: int) -> str:
        """What to call the image in messages and lists."""

    def read(self, row: int) -> Any:
        """The image in a form that `open_image` accepts."""


@dataclass(frozen=True)
class Listing:
    """A source with the class number of each image and the names of the classes."""

    source: Source
    labels: np.ndarray
    class_names: list[str]


def label_by_name(source: Source, names: Sequence[str]) -> Listing:
    """A listing from one class name per image, classes in natural order ('2' before '10')."""
    class_names = sorted(set(names), key=natural_key)
    number = {name: i for i, name in enumerate(class_names)}
    return Listing(source, np.array([number[name] for name in names], dtype=np.int64), class_names)


@dataclass(frozen=True)
class Files:
    """Files below a folder."""

    root: str
    paths: np.ndarray  # relative to the root, as the file system's bytes

    def name(self, row: int) -> str:
        return os.fsdecode(self.paths[row])

    def read(self, row: int) -> str:
        return os.path.join(self.root, self.name(row))


def list_folder(root: str) -> Listing:
    """Images in the sub-folders of `root`, at any depth; the first folder of an image's path is its class."""
    found, _ = find_images_and_targets(root, types=EXTENSIONS + MORE_EXTENSIONS, leaf_name_only=False)
    paths = [os.path.relpath(path, root) for path, _ in found]
    # file managers leave hidden files beside images, with the same extensions
    paths = [path for path in paths if not os.path.basename(path).startswith(".")]
    if not paths:
        raise ValueError(f"no images in {root}")
    inside = [path for path in paths if os.sep in path]
    if not inside:
        raise ValueError(f"{len(paths)} images are directly in {root}; expected one sub-folder per class")
    source = Files(root, np.array([os.fsencode(path) for path in inside]))
    return label_by_name(source, [path.split(os.sep, 1)[0] for path in inside])


def list_csv(path: str) -> Listing:
    """Images named by a CSV file with the columns file and label, files relative to the CSV's folder."""
    root = os.path.dirname(os.path.abspath(path))
    files, labels = [], []
    with open(path, newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream, skipinitialspace=True)
        try:
            if not {"file", "label"} <= set(reader.fieldnames or ()):
                raise ValueError(f"{path} must start with a line that names the columns file and label")
            for row in reader:
                files.append(_inside(root, row["file"], f"{path}, line {reader.line_num}"))
                labels.append((row["label"] or "").strip())
                if not labels[-1]:
                    raise ValueError(f"{path}, line {reader.line_num}: no label")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not files:
        raise ValueError(f"no images in {path}")
    return label_by_name(Files(root, np.array([os.fsencode(file) for file in files])), labels)


def _inside(root: str, file: str | None, where: str) -> str:
    """`file` relative to `root`, refused if it is outside."""
    if not file:
        raise ValueError(f"{where}: no file")
    relative = os.path.relpath(os.path.join(root, file), root)
    if relative.split(os.sep, 1)[0] == os.pardir:
        raise ValueError(f"{where}: {file} is outside the folder of the CSV file")
    return relative


@dataclass(frozen=True)
class TarMembers:
    """Members of uncompressed tar files, read by their offset: an open tar file cannot be shared by processes."""

    tars: list[str]
    names: np.ndarray
    places: np.ndarray  # (n, 3): which tar, offset, size

    def name(self, row: int) -> str:
        return os.fsdecode(self.names[row])

    def read(self, row: int) -> bytes:
        tar, offset, size = self.places[row].tolist()
        with open(self.tars[tar], "rb") as file:
            file.seek(offset)
            return file.read(size)


def list_tar(root: str) -> Listing:
    """Images in a tar file, a tar of tars or a folder of tars; the innermost folder (or tar) is the class."""
    try:
        with _more_extensions():
            reader = ReaderImageInTar(root)
    except Exception as error:
        raise ValueError(f"no images in {root}, or not an uncompressed tar file") from error
    tars, names, places = {}, [], []
    for member, parent, child in reader.samples:
        tar = tars.setdefault(os.path.join(root, parent) if parent else root, len(tars))
        places.append((tar, member.offset_data + (child.offset_data if child else 0), member.size))
        names.append(os.fsencode(f"{child.name}/{member.name}" if child else os.path.normpath(member.name)))
    source = TarMembers(list(tars), np.array(names), np.array(places, dtype=np.int64))
    return label_by_name(source, [reader.class_idx_to_name[label] for label in reader.targets])


def below(listing: Listing, folders: Sequence[str]) -> Listing | None:
    """The part of a tar file that lies below one of these top folders; None if it has none of them."""
    keep = np.array([os.fsdecode(name).split("/", 1)[0] in folders for name in listing.source.names])
    if not keep.any():
        return None
    source = replace(listing.source, names=listing.source.names[keep], places=listing.source.places[keep])
    return label_by_name(source, [listing.class_names[label] for label in listing.labels[keep]])


@contextlib.contextmanager
def _more_extensions() -> Iterator[None]:
    # timm's tar reader takes its extensions only from a global list
    add_img_extensions(MORE_EXTENSIONS)
    try:
        yield
    finally:
        del_img_extensions(MORE_EXTENSIONS)


def has_tars(root: str) -> bool:
    """Whether a folder contains tar files, not counting its sub-folders."""
    return any(Path(root).glob("*.tar"))


@dataclass(frozen=True)
class TorchvisionSet:
    """A torchvision data set; if it is made of files, they are read directly."""

    title: str
    dataset: Any

    def name(self, row: int) -> str:
        files = getattr(self.dataset, "imgs", None)
        return str(files[row][0]) if files else f"{self.title}[{row}]"

    def read(self, row: int) -> Any:
        files = getattr(self.dataset, "imgs", None)
        return files[row][0] if files else self.dataset[row][0]


def list_torchvision(name: str, root: str, split: str, **options: Any) -> Listing:
    """A data set that timm calls torch/NAME."""
    with one_line_errors(f"{name} in {root or '(no folder given)'}"):
        dataset = create_dataset(name, root=root or None, split=split, **options)
    targets = getattr(dataset, "targets", None)
    if targets is None:
        targets = [category for category, _ in dataset.index]  # iNaturalist
    labels = np.asarray(targets, dtype=np.int64)
    if labels.ndim == 2:  # QMNIST: the first column is the digit, the others its origin
        labels = labels[:, 0]
    # ImageNet's readable names are not unique, its WordNet identifiers are
    names = getattr(dataset, "wnids", None) or getattr(dataset, "all_categories", None) or dataset.classes
    return Listing(TorchvisionSet(name, dataset), labels, [str(name) for name in names])


@dataclass(frozen=True)
class HuggingFaceSet:
    """A Hugging Face data set with random access."""

    title: str
    reader: Any

    def name(self, row: int) -> str:
        return self.reader.filename(row) or f"{self.title}[{row}]"

    def read(self, row: int) -> Any:
        return self.reader[row][0]


def list_huggingface(name: str, root: str, split: str, **options: Any) -> Listing:
    """A data set that timm calls hfds/NAME."""
    with one_line_errors(name):
        reader = create_reader(name, root=root or None, split=split, **options)
        labels = list(reader.dataset[reader.label_key])
    if not reader.class_to_idx:
        return label_by_name(HuggingFaceSet(name, reader), [str(label) for label in labels])
    class_names = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
    return Listing(HuggingFaceSet(name, reader), np.array(labels, dtype=np.int64), class_names)


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn the many errors that readers raise for a missing data set into a ValueError."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {error}") from error


class Digits:
    """The packaged handwritten digits."""

    def name(self, row: int) -> str:
        return f"digits[{row}]"

    def read(self, row: int) -> Any:
        return digit_image(row)


def list_digits() -> Listing:
    """The packaged handwritten digits, all 1,797."""
    return Listing(Digits(), load_digits()[1], [str(digit) for digit in range(10)])

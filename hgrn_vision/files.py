"""Atomic writes: a file or folder appears under its name only once it is complete, whatever happens in between."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it is renamed to `path` when the `with` block ends without error.

    The file is synced to disk before it is renamed, and gets the permissions of the user's umask no matter how it was
    written. After an error nothing is left behind, and an earlier file at `path` is untouched. Missing parent folders
    are created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # a new file shows the umask; os.umask() can only read it by changing it, for all threads
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder beside `path` to write to; it is renamed to `path` when the `with` block ends without error.

    `path` must not exist, or must be an empty folder. After an error nothing is left behind. Missing parent folders are
    created.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_writable(folder: str | os.PathLike) -> None:
    """Refuse a folder that cannot be created or written to; nothing is created."""
    folder = Path(folder)
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise ValueError(f"{there} is not a folder; choose another output folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {there}; choose another output folder")


def write_text(path: str | os.PathLike, text: str, errors: str = "strict") -> None:
    """Write a UTF-8 file atomically; `errors` as for str.encode."""
    with whole_file(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors))


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

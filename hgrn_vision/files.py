"""Writing files and folders whole: half of one is never found under its name, whatever happens in between."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A path beside `path` to write to; what was written there gets its name when the `with` block ends without error.

    The file is on the disk before it gets its name, and has the permissions that the user's umask says, whoever wrote
    it. After an error nothing is left, and what had the name before keeps it. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # a new file shows what the umask is; asking for the umask would change it for a moment, for all threads
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
    """A new folder beside `path` to write to, which gets its name when the `with` block ends without error.

    `path` must not exist yet, or be an empty folder. After an error nothing is left. Missing folders are made.
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


def write_text(path: str | os.PathLike, text: str, errors: str = "strict") -> None:
    """Write a file of UTF-8 whole; `errors` as for str.encode."""
    with whole_file(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

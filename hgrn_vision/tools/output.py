"""Files that the commands write: never over something that is there, and complete or not at all."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO

from ..files import whole_file

STDOUT = "-"


def check_free(paths: Iterable[str | os.PathLike], force: bool) -> None:
    """Refuse before any work is done what would overwrite a file, or write two things into one."""
    paths = [path if path == STDOUT else os.path.abspath(path) for path in paths]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        where = "standard output" if twice == STDOUT else twice
        raise ValueError(f"two outputs cannot both go to {where}")
    for path in paths:
        if path != STDOUT and os.path.isdir(path):
            raise ValueError(f"{path} is a folder, expected the name of a file")
        if path != STDOUT and os.path.lexists(path) and not force:
            raise ValueError(f"{path} exists already; choose another name, or overwrite it with --force")


def printable(text: str) -> str:
    """`text` without what a terminal or a page could not show: control characters, bytes that are no UTF-8."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@contextlib.contextmanager
def open_output(path: str | os.PathLike, binary: bool = False) -> Iterator[IO]:
    """A file to write that gets its name only when all is written; '-' is standard output."""
    if os.fspath(path) == STDOUT:
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdout.buffer if binary else sys.stdout
        return
    # file names need not be valid UTF-8: their bytes go through as they are
    text = {} if binary else {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    with whole_file(path) as temporary, open(temporary, "wb" if binary else "w", **text) as file:
        yield file

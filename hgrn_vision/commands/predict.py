"""`hgrn-vision predict`: class names and probabilities for images, one row per input, in input order."""

import argparse
import contextlib
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from ..data.images import BadImage, open_image
from ..inference.classify import Answer, classify
from ..inference.pretrained import load_model
from ..report.gallery import Gallery, thumbnail
from ._console import STDOUT, check_free, open_output, printable
from ._flags import MODEL_HELP, add_inference_arguments, at_least_one, find_images

EXAMPLE = "hgrn-vision predict runs/flowers photos/ --top 3 --csv labels.csv --html labels.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="image, folder (all images below it), pattern such as 'a/*.png', or - to read a list from standard input",
    )
    parser.add_argument(
        "--top", type=at_least_one, default=5, metavar="K", help="number of classes listed per image (default 5)"
    )
    parser.add_argument("--csv", metavar="OUT", help="write a CSV table (here and below, - is standard output)")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list, one object per line")
    parser.add_argument("--html", metavar="OUT", help="write a page with the images and their labels")
    parser.add_argument("--force", action="store_true", help="overwrite output files")
    add_inference_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Predict; 1 if any input could not be read."""
    check_free([path for path in (args.csv, args.json, args.html) if path], args.force)
    loaded = load_model(args.model, args.device, args.img_size)
    answers = classify(
        loaded,
        find_images(args.files),
        lambda path: _read(path, args.max_pixels),
        args.batch_size,
        look=thumbnail if args.html else None,
    )
    top = min(args.top, len(loaded.class_names))
    failed = total = 0
    with contextlib.ExitStack() as stack:
        writers = _open_writers(args, f"Predictions of {loaded.name}", top, stack)
        for answer in _with_progress(answers, args):
            row = make_row(answer, loaded.class_names, top)
            for write in writers:
                write(row)
            total += 1
            failed += bool(row.reason)
    if failed:
        print(f"hgrn-vision predict: {failed} of {total} inputs could not be read", file=sys.stderr)
    return 1 if failed else 0


def _read(path: str, max_pixels: int) -> Image.Image:
    if os.path.isdir(path):
        raise BadImage("folder without images")
    return open_image(path, max_pixels)


def _with_progress(answers: Iterator[Answer], args: argparse.Namespace) -> Iterable[Answer]:
    """A progress bar on a terminal; only then are the inputs counted in advance."""
    rows_on_screen = sys.stdout.isatty() and (_wants_table(args) or STDOUT in (args.csv, args.json, args.html))
    if rows_on_screen or not sys.stderr.isatty():
        return answers
    total = None if "-" in args.files else sum(1 for _ in find_images(args.files))
    return tqdm(answers, total=total, unit=" images", file=sys.stderr)


class Row(NamedTuple):
    """One row of the result: the classes of an image, most likely first, or the reason why there are none."""

    path: str
    top: list[tuple[str, float]]
    reason: str = ""
    image: str | None = None


def make_row(answer: Answer, class_names: list[str], top: int) -> Row:
    """The `top` most likely classes of an answer."""
    if answer.probabilities is None:
        return Row(answer.item, [], answer.reason)
    # stable: ties go to the first class, as with argmax
    best = np.argsort(-answer.probabilities, kind="stable")[:top]
    return Row(answer.item, [(class_names[i], float(answer.probabilities[i])) for i in best], image=answer.extra)


Writer = Callable[[Row], None]


def _wants_table(args: argparse.Namespace) -> bool:
    return not (args.csv or args.json or args.html)


def _open_writers(args: argparse.Namespace, title: str, top: int, stack: contextlib.ExitStack) -> list[Writer]:
    writers = []
    if args.csv:
        writers.append(_csv_writer(stack.enter_context(open_output(args.csv)), top))
    if args.json:
        writers.append(stack.enter_context(_json_writer(stack.enter_context(open_output(args.json)))))
    if args.html:
        gallery = stack.enter_context(Gallery(stack.enter_context(open_output(args.html)), title))
        writers.append(lambda row: gallery.add(printable(row.path), row.image, row.top, row.reason))
    return writers or [_table_writer()]


def _csv_writer(file: IO[str], top: int) -> Writer:
    writer = csv.writer(file, lineterminator="\n")
    numbers = [""] + [f"_{i}" for i in range(2, top + 1)]
    writer.writerow(["file", *(f"{name}{n}" for n in numbers for name in ("label", "probability")), "error"])

    def write(row: Row) -> None:
        cells = [cell for label, probability in row.top for cell in (label, f"{probability:.6g}")]
        writer.writerow([row.path, *cells, *[""] * (2 * top - len(cells)), row.reason])

    return write


@contextlib.contextmanager
def _json_writer(file: IO[str]) -> Iterator[Writer]:
    separator = "[\n"

    def write(row: Row) -> None:
        nonlocal separator
        predictions = [{"label": label, "probability": float(f"{p:.6g}")} for label, p in row.top]
        file.write(separator + json.dumps({"file": row.path, "predictions": predictions, "error": row.reason or None}))
        separator = ",\n"

    yield write
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def _table_writer() -> Writer:
    sys.stdout.reconfigure(errors="replace")
    width = 0

    def write(row: Row) -> None:
        nonlocal width
        name = printable(row.path)
        # as wide as the longest name so far: rows are printed at once, not collected
        width = max(width, min(len(name), 60))
        answer = "  ".join(f"{label} {100 * p:.1f}%" for label, p in row.top) or f"unreadable: {row.reason}"
        print(f"{name:<{width}}  {answer}")

    return write

"""`hgrn-vision evaluate`: accuracy, per-class figures, confusions and calibration on labelled images."""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..data.batches import EvalBatch
from ..data.loaders import read_ahead
from ..data.spec import ImageSettings
from ..data.splits import Split, open_validation
from ..inference.metrics import Metrics, measure
from ..inference.pretrained import load_model
from ..report.confusion import confusion_figure
from ..report.style import paper_style, to_png
from ..train.evaluation import Evaluation, collect
from ._console import check_free, open_output, printable
from ._flags import MODEL_HELP, add_inference_arguments

EXAMPLE = "hgrn-vision evaluate runs/flowers flowers/ --output flowers-evaluation"
FILES = ("metrics.json", "classes.csv", "confusion.csv", "confusion.png", "predictions.csv")
ROWS = 20  # classes printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "data", help="folder with one sub-folder per class (or with val/), .tar, .csv of file,label, or digits"
    )
    parser.add_argument("--output", metavar="FOLDER", help=f"write {', '.join(FILES)} there")
    parser.add_argument("--force", action="store_true", help="overwrite these files")
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="evaluate only the share of DATA that a run with this --holdout held out",
    )
    add_inference_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate; 1 if any image could not be read."""
    if args.output:
        check_free([Path(args.output) / name for name in FILES], args.force)
    loaded = load_model(args.model, args.device, args.img_size)
    images = ImageSettings(args.data, holdout=args.holdout, max_pixels=args.max_pixels)
    split = open_validation(images, loaded.class_names, loaded.aliases)
    with tqdm(total=len(split), unit=" images", file=sys.stderr, disable=not sys.stderr.isatty()) as progress:
        evaluation = collect(loaded.logits, _counted(read_ahead(split, loaded.spec, args.batch_size), progress))
    metrics = measure(evaluation, len(loaded.class_names))
    _print_summary(metrics, loaded.class_names)
    if args.output:
        write_files(Path(args.output), metrics, evaluation, split)
    bad = len(evaluation.bad)
    if bad:
        print(f"hgrn-vision evaluate: {bad} of {len(split)} images could not be read", file=sys.stderr)
    return 1 if bad else 0


def _counted(batches: Iterable[EvalBatch], progress: tqdm) -> Iterator[EvalBatch]:
    for batch in batches:
        yield batch
        progress.update(len(batch.targets) + len(batch.bad))


def _print_summary(metrics: Metrics, class_names: list[str]) -> None:
    sys.stdout.reconfigure(errors="replace")
    for name, value in _headline(metrics).items():
        print(f"{name.replace('_', ' '):<18} {value if name == 'images' else f'{value:.2f}%'}")
    classes = np.flatnonzero(metrics.support)
    weakest = classes[np.argsort(metrics.f1[classes], kind="stable")][:ROWS]
    if len(classes) > ROWS:
        print(f"\nthe {ROWS} weakest of {len(classes)} classes (--output writes all)")
    shown = weakest if len(classes) > ROWS else classes
    width = max(5, *(len(printable(class_names[i])) for i in shown))
    print(f"\n{'class':<{width}}  images  precision  recall      F1")
    for i in shown:
        figures = (metrics.precision[i], metrics.recall[i], metrics.f1[i])
        precision, recall, f1 = ("-" if np.isnan(value) else f"{value:.1f}%" for value in figures)
        name = printable(class_names[i])
        print(f"{name:<{width}}  {metrics.support[i]:>6}  {precision:>9}  {recall:>6}  {f1:>6}")


def _headline(metrics: Metrics) -> dict[str, Any]:
    """The figures for the whole set."""
    names = ("top1", "top5", "macro_recall", "macro_f1", "calibration_error")
    return {"images": metrics.images, **{name: round(getattr(metrics, name), 4) for name in names}}


def write_files(folder: Path, metrics: Metrics, evaluation: Evaluation, split: Split) -> None:
    """Write the five files of an evaluation."""
    names = split.class_names
    with open_output(folder / "metrics.json") as file:
        json.dump({**_headline(metrics), "unreadable": len(evaluation.bad), "classes": len(names)}, file, indent=2)
        file.write("\n")
    figures = zip(metrics.support.tolist(), metrics.precision, metrics.recall, metrics.f1, strict=True)
    rows = ([name, n, *map(_cell, cells)] for name, (n, *cells) in zip(names, figures, strict=True))
    _write_csv(folder / "classes.csv", ["class", "images", "precision", "recall", "f1"], rows)
    present, counts = [names[label] for label in metrics.confusion.classes], metrics.confusion.counts
    rows = ([name, *row] for name, row in zip(present, map(np.ndarray.tolist, counts), strict=True))
    _write_csv(folder / "confusion.csv", ["true \\ predicted", *present], rows)
    with open_output(folder / "confusion.png", binary=True) as file, paper_style():
        file.write(to_png(confusion_figure(counts, present)))
    _write_csv(
        folder / "predictions.csv",
        ["file", "true", "predicted", "probability", "error"],
        _prediction_rows(evaluation, split),
    )


def _prediction_rows(evaluation: Evaluation, split: Split) -> Iterable[list[Any]]:
    names, bad = split.class_names, {record.index: record.reason for record in evaluation.bad}
    answers = zip(evaluation.predictions, evaluation.confidence, strict=True)
    for index in range(len(split)):
        predicted, probability, reason = "", "", bad.get(index, "")
        if not reason:
            label, confidence = next(answers)
            predicted, probability = names[label], f"{confidence:.6g}"
        yield [split.image_name(index), names[split.labels[index]], predicted, probability, reason]


def _cell(percent: float) -> str:
    """A percentage as a fraction, as classes.csv has it; empty for NaN."""
    return "" if np.isnan(percent) else f"{percent / 100:.6g}"


def _write_csv(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    with open_output(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)

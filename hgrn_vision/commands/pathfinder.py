"""`hgrn-vision pathfinder`: the Pathfinder task as PNG files in two class folders."""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from ..data.pathfinder import CLASSES, MIN_PIXELS, label, pathfinder_image
from ..files import whole_folder
from ._flags import at_least_one

EXAMPLE = "hgrn-vision pathfinder pathfinder/ --images 10000 --size 32 --seed 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("folder", help=f"new folder, with one sub-folder per class: {' and '.join(CLASSES)}")
    parser.add_argument(
        "--images", type=at_least_one, required=True, metavar="N", help="number of images, half of them in each class"
    )
    parser.add_argument("--size", type=at_least_one, default=32, metavar="PIXELS", help="side of an image (default 32)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="the same seed and size give the same images (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files; all of them or none."""
    folder = Path(args.folder)
    if folder.exists():
        raise ValueError(f"{folder} already exists; choose another name")
    if args.images < 2:
        raise ValueError("--images must be at least 2, one of each class")
    if args.size < MIN_PIXELS:
        raise ValueError(
            f"--size must be at least {MIN_PIXELS} pixels, got {args.size}: the dashes would not be visible"
        )
    digits = max(5, len(str(args.images - 1)))
    with whole_folder(folder) as temporary:
        for name in CLASSES:
            (temporary / name).mkdir()
        for number in tqdm(range(args.images), unit=" images", disable=not sys.stderr.isatty()):
            image = pathfinder_image(args.seed, number, args.size)
            image.save(temporary / label(number) / f"{number:0{digits}}.png")
    counts = [args.images // 2, args.images - args.images // 2]
    listed = ", ".join(f"{count:,} {name}" for count, name in zip(counts, CLASSES, strict=True))
    print(f"{args.images:,} images in {folder}: {listed}")
    return 0

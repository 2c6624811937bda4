"""`hgrn-vision digits`: the packaged handwritten digits as PNG files in class folders."""

import argparse
from pathlib import Path

from ..data.spec import ImageSettings
from ..data.splits import Split, open_splits
from ..files import whole_folder
from ..train.recipes import RECIPES

EXAMPLE = "hgrn-vision digits digits/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("folder", help="new folder, gets train/0 to val/9; split as in `hgrn-vision train`")


def run(args: argparse.Namespace) -> int:
    """Write the files; all of them or none."""
    folder = Path(args.folder)
    if folder.exists():
        raise ValueError(f"{folder} already exists; choose another name")
    # the same validation images as in the demo run, so that no run on the digits has trained on them
    train, validation = open_splits(ImageSettings("digits", holdout=RECIPES["digits"].settings["holdout"]))
    with whole_folder(folder) as temporary:
        for name, split in (("train", train), ("val", validation)):
            _write(split, temporary / name)
    print(f"{len(train):,} images in {folder / 'train'}, {len(validation):,} in {folder / 'val'}")
    return 0


def _write(split: Split, folder: Path) -> None:
    for index, (row, label) in enumerate(zip(split.rows, split.labels, strict=True)):
        path = folder / split.class_names[label] / f"{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        split.load(index).convert("L").save(path)

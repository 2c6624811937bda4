"""`hgrn-vision finetune`: from a folder of images to a classifier, with settings that suit small data."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from ..data.spec import ImageSettings
from ..data.splits import Split, open_splits
from ..inference.pretrained import Initial, read_initial
from ..train.config import TrainConfig, convert, from_mapping, read_yaml
from ..train.distributed import is_main
from ..train.finetune_recipe import (
    MAX_BAD_FRACTION,
    QUICK_SIDE,
    STARTER_QUICK_SIDE,
    STARTER_SETTINGS,
    STARTER_SIDE,
    fitting_side,
    model_settings,
    quick_settings,
    recipe_settings,
)
from ..train.observer import Outcome
from ..train.run import train
from ._console import Display, backend_details, exit_code
from ._dataset_check import Survey, survey
from ._flags import OF_PHOTOGRAPHS, add_setting_flags, given_settings

EXAMPLE = "hgrn-vision finetune flowers/ --output runs/flowers"
STARTER = "hgrn_deit_tiny"
NONE, NEW = "none", "new weights"
HOLDOUT = 0.2
LARGEST_SIDE = 224
PHOTOS = ("data", "dataset", "holdout", "classes", "train_split", "val_split", "max_pixels")
SHOWN = {
    "holdout": f"share to validate on if there is no val/ [{HOLDOUT}]",
    "model": "timm model, if training from scratch [hgrn_deit_tiny]",
    "img_size": "side to resize to [that of --init, or of the images]",
    "freeze": "body: train only the head; N: freeze first N layers",
    "epochs": "maximum passes over the images [30 or more]",
    "patience": "epochs without improvement before stopping [10 or 20]",
    "balance": "draw every class equally often",
    "batch_size": "images per step [2 to 32, depending on the data]",
    "lr": "peak learning rate [2e-3; 5e-4 for --init RUN, 1e-3 for none]",
    "seed": "seed of all randomness [0]",
    "device": "cpu, cuda, ... [a GPU if there is one]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that matter for small data; most other flags of `train` work too."""
    parser.usage = "%(prog)s PHOTOS --output RUN [--init MODEL] [--SETTING VALUE ...]"
    parser.add_argument("data", metavar="PHOTOS", help="folder of class folders, or of train/ and val/; or .csv")
    parser.add_argument("--output", metavar="RUN", required=True, help="run folder; a run in it is continued")
    parser.add_argument(
        "--init", metavar="MODEL", help=f"run, checkpoint, model, hf-hub:NAME or none [{STARTER} for photographs]"
    )
    parser.add_argument("--quick", action="store_true", help="a result in about five minutes on a laptop")
    parser.add_argument("--config", metavar="YAML", help="settings file; any setting of `hgrn-vision train`")
    parser.add_argument("--allow-change", action="store_true", help="continue a run with other settings")
    add_setting_flags(parser, leave_out=("data", "recipe", "pretrained", *OF_PHOTOGRAPHS), shown=SHOWN)


def run(args: argparse.Namespace) -> int:
    """Fine-tune; 0 if finished or stopped on request, 3 if the run diverged."""
    return exit_code("finetune", lambda: _finetune(args))


def _finetune(args: argparse.Namespace) -> int:
    output = Path(args.output)
    _check_output(output)
    given = {**(read_yaml(args.config) if args.config else {}), **given_settings(args)}
    given.pop("recipe", None)
    if Path(args.data).exists():
        # a folder that happens to be called digits is not the packaged data
        given["data"] = os.path.join(os.curdir, args.data)
    chosen = {name: convert(name, given[name]) for name in PHOTOS if name in given}
    photos = ImageSettings(**{"holdout": HOLDOUT, **chosen})
    splits = open_splits(photos)
    if not splits[0].indexed:
        raise ValueError(f"{photos.dataset} can only be read sequentially; use hgrn-vision train --pretrained instead")
    found = survey(args.data, *splits, show_progress=is_main() and sys.stderr.isatty())
    _check_readable(found, given.get("max_bad_fraction", MAX_BAD_FRACTION))
    init = choose_init(args.init, given, found)
    _check_same_start(output, init)
    initial = read_initial(init, given.get("model")) if init != NEW else None
    config = resolve(given, found, initial, args.quick)
    if is_main():
        print("\n".join([*found.lines(), _beginning(initial, config, args.init)]), flush=True)
    details = {"init": init, "images": next(found.lines()), **backend_details(config)}
    weights = initial.weights if initial else None
    command = shlex.join(["hgrn-vision", *sys.argv[1:]])
    with contextlib.closing(Display()) as display:
        outcome = train(config, output, command, args.allow_change, display, details, weights)
    if is_main():
        _show_outcome(outcome, config, *splits)
    return 0


def _check_output(output: Path) -> None:
    """Refuse a folder that holds anything but a run."""
    if output.is_dir() and any(output.iterdir()) and not (output / "checkpoints").is_dir():
        raise ValueError(f"{output} is not empty and is not a run; give another --output")


def choose_init(asked: str | None, given: dict[str, Any], found: Survey) -> str:
    """What to start from: --init if given, else the packaged weights for photographs and their model, else nothing."""
    if asked:
        return NEW if asked == NONE else asked
    theirs = given.get("model", STARTER) == STARTER and not given.get("model_args")
    return STARTER if theirs and found.photographs else NEW


def _check_same_start(output: Path, init: str) -> None:
    """Refuse to continue a run that started from other weights."""
    if (output / "config.yaml").is_file():
        about = yaml.safe_load((output / "config.yaml").read_text(encoding="utf-8")).get("about") or {}
        began = about.get("init")
        if began != init:
            same = f"--init {NONE if began == NEW else began}"
            raise ValueError(f"the run in {output} started from {began}, not {init}; give {same} or another --output")


def _check_readable(found: Survey, limit: float) -> None:
    if len(found.bad) > limit * found.looked_at:
        first = found.bad[0]
        raise ValueError(
            f"{len(found.bad)} of {found.looked_at} images in {found.where} are unreadable, more than "
            f"--max-bad-fraction {limit:g}; the first is {first.name}: {first.reason}"
        )


def resolve(given: dict[str, Any], found: Survey, initial: Initial | None, quick: bool) -> TrainConfig:
    """The settings that suit the data, then the initial model's, then the given ones; later ones take precedence."""
    images, classes = len(found.train), len(found.train.class_names)
    largest = QUICK_SIDE if quick else LARGEST_SIDE
    side = given.get("img_size") or min(found.side, largest)
    if initial:
        model = initial.settings
        own = min(model.get("img_size", LARGEST_SIDE), largest)
        if initial.packaged:
            own = STARTER_QUICK_SIDE if quick else STARTER_SIDE
        side = given.get("img_size") or own
    else:
        model = {} if "model" in given else model_settings(side, quick)
    side = fitting_side({**model, **given}, side, exact="img_size" in given)
    suited = recipe_settings(images, side, bool(initial), given.get("batch_size"), given.get("epochs"))
    if initial and initial.packaged:
        suited |= STARTER_SETTINGS
    settings = {"holdout": HOLDOUT, **suited, **model, **given, "img_size": side, "recipe": "finetune"}
    if quick:
        settings = {**quick_settings(settings, images, classes), **given, "img_size": side}
    return from_mapping(settings)


def _beginning(initial: Initial | None, config: TrainConfig, asked: str | None) -> str:
    """Where the weights come from, and what to expect."""
    seen = f"Image size: {config.img_size} pixels."
    if initial:
        frozen = {"": "the whole model is trained", "body": "only the head is trained"}
        learns = frozen.get(config.freeze, f"its first {config.freeze} layers are frozen")
        other = "" if asked else f" --init {NONE} would train from scratch."
        return f"Starting from {initial.title} with a new head; {learns}. {seen}{other}"
    return (
        f"Starting from scratch ({f'--init {NONE}' if asked else 'no --init'}): the model learns from these images "
        "alone. Expect this to need hundreds of images per class and many epochs; with fewer, starting from a trained "
        f"model helps more than any setting. {seen}"
    )


def _show_outcome(outcome: Outcome, config: TrainConfig, kept: Split, validation: Split) -> None:
    if outcome.status == "stopped":
        print(f"stopped at step {outcome.progress.updates} ({outcome.signal}); the same command continues")
        return
    progress = outcome.progress
    best = progress.best or progress.history[-1]
    images = min(len(validation), config.eval_images or len(validation))
    early = f", ended after {progress.epoch} of {config.epochs} epochs" if progress.epoch < config.epochs else ""
    print(
        f"{outcome.status}: top-1 {best['val_top1']:.2f}, top-5 {best['val_top5']:.2f} on {images:,} validation images "
        f"(epoch {best['epoch']}){early}"
    )
    run = shlex.quote(str(outcome.output))
    print(f"report:   {outcome.report}")
    held_out = f" --holdout {config.holdout:g}" if validation.source is kept.source else ""
    print(f"evaluate: hgrn-vision evaluate {run} {shlex.quote(os.path.normpath(config.data))}{held_out}")
    image = validation.source.read(validation.rows[0])
    example = shlex.quote(os.path.normpath(image)) if isinstance(image, str) else "IMAGE"
    print(f"predict:  hgrn-vision predict {run} {example}")
    if outcome.status == "finished before":
        print(f"again:    rm -r {run} first, or give another --output")

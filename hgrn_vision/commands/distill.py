"""`hgrn-vision distill`: train a small model on photographs without labels to answer like a good model."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from ..train.config import TrainConfig, even_divisor, from_mapping, read_yaml
from ..train.distributed import is_main
from ..train.observer import Outcome
from ..train.recipes import DISTILL
from ..train.run import train
from ._console import Display, backend_details, exit_code
from ._flags import add_setting_flags, given_settings

EXAMPLE = "hgrn-vision distill photos/ more/ --teacher resnet50.a1_in1k --output runs/student"
NOT_HERE = ("data", "dataset", "train_split", "val_split", "input_key", "target_key", "download", "photos", "recipe")
NOT_HERE += ("teacher", "balance", "loss", "smoothing", "distill_weight", "val")
SHOWN = {
    "model": "timm model of the student [hgrn_deit_tiny]",
    "pretrained": "start from the student's published weights",
    "img_size": "side of the student's images at the end [84]",
    "first_sizes": "start smaller: 56x8,70x4 is 8 epochs at 56, 4 at 70",
    "teacher_size": "side of the teacher's images [its own]",
    "distill": "match logits, feature maps, or both [logits]",
    "distill_temperature": "softmax temperature of the logits [1]",
    "classes": "file of class names, for teachers that have none",
    "holdout": "share of the photographs to validate on [0.01]",
    "pack": "side of the cached, decoded photographs; 0: no cache",
    "cache": "folder of that cache [photo-cache beside the run]",
    "views": "fixed crops per photo, answers kept [0: new crops]",
    "epochs": "passes over the photographs [30]",
    "epoch_steps": "end each epoch after this many steps",
    "batch_size": "images per step [256]",
    "lr": "peak learning rate [5e-3]",
    "device": "cpu, cuda, ... [a GPU if there is one]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that matter here; most other flags of `train` work too."""
    parser.usage = "%(prog)s PHOTOS [PHOTOS ...] --teacher MODEL --output RUN [--SETTING VALUE ...]"
    parser.add_argument(
        "photos", nargs="+", metavar="PHOTOS", help="folders of images, at any depth; no classes needed"
    )
    parser.add_argument(
        "--teacher", required=True, metavar="MODEL", help="timm name, local-dir:, hf-hub:, run, or .onnx file"
    )
    parser.add_argument("--output", metavar="RUN", required=True, help="run folder; a run in it is continued")
    parser.add_argument(
        "--val",
        default="",
        metavar="FOLDER",
        help="labelled images, in sub-folders named after the teacher's classes",
    )
    parser.add_argument("--config", metavar="YAML", help="settings file; any setting of `hgrn-vision train`")
    parser.add_argument("--allow-change", action="store_true", help="continue a run with other settings")
    add_setting_flags(parser, leave_out=NOT_HERE, shown=SHOWN)


def run(args: argparse.Namespace) -> int:
    """Distil; 0 if finished or stopped on request, 3 if the run diverged."""
    return exit_code("distill", lambda: _distill(args))


def resolve(args: argparse.Namespace) -> TrainConfig:
    """The settings from the recipe, the file and the flags; later ones take precedence."""
    given = {**(read_yaml(args.config) if args.config else {}), **given_settings(args)}
    cache = given.get("cache") or os.path.join(os.path.dirname(os.path.abspath(args.output)), "photo-cache")
    settings = {**DISTILL.settings, **given, "cache": cache, "recipe": "distill"}
    if "pack" not in given:
        # a margin for random crops
        settings["pack"] = round(1.125 * max(settings["img_size"], settings.get("teacher_size") or 0) / 8) * 8
    if "micro_batch" not in given:
        settings["micro_batch"] = even_divisor(settings["batch_size"], settings["micro_batch"])
    return from_mapping(settings)


def _distill(args: argparse.Namespace) -> int:
    output = Path(args.output)
    if output.is_dir() and any(output.iterdir()) and not (output / "checkpoints").is_dir():
        raise ValueError(f"{output} is not empty and is not a run; give another --output")
    config = resolve(args)
    with contextlib.closing(Display()) as display:
        command = shlex.join(["hgrn-vision", *sys.argv[1:]])
        outcome = train(config, output, command, args.allow_change, display, backend_details(config))
    if is_main():
        _show_outcome(outcome, config)
    return 0


def _show_outcome(outcome: Outcome, config: TrainConfig) -> None:
    if outcome.status == "stopped":
        print(f"stopped at step {outcome.progress.updates} ({outcome.signal}); the same command continues")
        return
    best = outcome.progress.best or outcome.progress.history[-1]
    accuracy = f", top-1 {best['val_top1']:.2f} on {config.val}" if config.val else ""
    print(f"{outcome.status}: agreement with the teacher {best['agreement']:.2f}{accuracy} (epoch {best['epoch']})")
    run = shlex.quote(str(outcome.output))
    print(f"report:   {outcome.report}")
    print(f"predict:  hgrn-vision predict {run} PHOTO...")
    print(f"finetune: hgrn-vision finetune FOLDER --init {run} --output NEW")
    print(f"share:    hgrn-vision publish {run} FOLDER")

"""`hgrn-vision train`: train a model on ImageNet, on your own images, or on the packaged digits."""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ..train import recipes
from ..train.config import TrainConfig, read_yaml, to_yaml
from ..train.distributed import is_main
from ..train.evaluation import score
from ..train.observer import Outcome
from ..train.run import train
from ._console import Display, backend_details, exit_code
from ._flags import OF_PHOTOGRAPHS, add_setting_flags, given_settings

EXAMPLE = "hgrn-vision train /data/imagenet --recipe paper"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command itself, then one for each setting."""
    parser.usage = "%(prog)s [DATA] [--recipe NAME] [--output DIR] [--SETTING VALUE ...]"
    parser.add_argument(
        "data",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="DATA",
        help="folder with train/ and val/, or the root of --dataset [the packaged digits]",
    )
    parser.add_argument(
        "--recipe",
        choices=recipes.RECIPES,
        default=argparse.SUPPRESS,
        help="named preset [paper if DATA is given, else digits]",
    )
    parser.add_argument(
        "--config", metavar="YAML", help="settings file; overrides the recipe, and is overridden by flags"
    )
    parser.add_argument("--output", metavar="DIR", help="run folder [runs/<recipe>-<model>]")
    parser.add_argument("--eval", metavar="RUN", help="only evaluate a run's best checkpoint, or a checkpoint file")
    parser.add_argument("--smoke", action="store_true", help="run a few steps of everything, to check that it works")
    parser.add_argument("--print-config", action="store_true", help="print all settings and stop")
    parser.add_argument("--allow-change", action="store_true", help="continue a run with other recipe settings")
    add_setting_flags(parser, leave_out=("data", "recipe", *OF_PHOTOGRAPHS))


def run(args: argparse.Namespace) -> int:
    """Train, or evaluate; 0 if finished or stopped on request, 3 if the run diverged."""
    return exit_code("train", lambda: _evaluate(args) if args.eval else _train(args, is_main()))


def resolve(args: argparse.Namespace) -> TrainConfig:
    """The settings from the recipe, the file and the flags; later ones take precedence."""
    return recipes.resolve({**(read_yaml(args.config) if args.config else {}), **given_settings(args)})


def _train(args: argparse.Namespace, main: bool) -> int:
    config = resolve(args)
    output = Path(args.output or f"runs/{config.recipe}-{config.model.replace('/', '_')}")
    if args.smoke:
        config, output = _shorten(config), _smoke_folder(args.output, output, main)
    if args.print_config:
        if main:
            print(to_yaml(config), end="")
        return 0
    if main and config.data == "digits" and "data" not in args:
        print("No data given: training on the handwritten digits that come with the package.")
    with contextlib.closing(Display()) as display:
        outcome = train(config, output, _command(), args.allow_change, display, backend_details(config))
    if main:
        _show_outcome(outcome, config)
    return 0


def _shorten(config: TrainConfig) -> TrainConfig:
    return replace(config, epochs=2, epoch_steps=4, warmup_epochs=0.0, eval_images=4 * config.micro_batch)


def _smoke_folder(given: str | None, output: Path, main: bool) -> Path:
    if given:
        return output
    folder = output.with_name(f"smoke-{output.name}")
    if main:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def _program() -> str:
    return "python train_imagenet.py" if Path(sys.argv[0]).name == "train_imagenet.py" else "hgrn-vision train"


def _command() -> str:
    """The command as typed, for the report."""
    arguments = sys.argv[1:] if "imagenet" in _program() else sys.argv[2:]
    ranks = os.environ.get("WORLD_SIZE", "1")
    launcher = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', ranks)} " if ranks != "1" else ""
    program = _program().removeprefix("python ") if launcher else _program()
    return f"{launcher}{program} {shlex.join(arguments)}".strip()


def _evaluate(args: argparse.Namespace) -> int:
    result = score(args.eval, given_settings(args))
    evaluation = result.evaluation
    if result.main:
        print(f"{result.path}: {result.config.model}, {result.epoch} epochs")
        print(f"top-1 {evaluation.top1:.3f}  top-5 {evaluation.top5:.3f}  loss {evaluation.loss:.6f}")
        print(f"{evaluation.images} images, {len(evaluation.bad)} unreadable")
        for record in evaluation.bad[:20]:
            print(f"  {record.name}: {record.reason}")
    return 0


def _show_outcome(outcome: Outcome, config: TrainConfig) -> None:
    if outcome.status == "stopped":
        print(
            f"stopped at step {outcome.progress.updates} ({outcome.signal or 'requested by another process'}); ", end=""
        )
        print("the same command continues")
        return
    best = outcome.progress.best or outcome.progress.history[-1]
    print(f"{outcome.status}: top-1 {best['val_top1']:.2f}, top-5 {best['val_top5']:.2f} (epoch {best['epoch']})")
    print(f"report:        {outcome.report}")
    print(f"evaluate:      {_program()} --eval {outcome.output}")
    print(f"predict:       python -m hgrn_vision predict {outcome.output} IMAGE...")
    print(f"use in Python: timm.create_model('local-dir:{outcome.output / 'model'}', pretrained=True)")
    if outcome.status == "finished before":
        print(f"start again:   rm -r {outcome.output} first, or give another --output")
    elif config.recipe == "digits":
        print("your photos:   python -m hgrn_vision finetune PHOTOS --output runs/photos (one folder per class inside)")

"""`hgrn-vision compare`: a study of several models or settings, with seeds, error bars and a report."""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ..study.definition import Study, read_study, study_from_mapping
from ..study.folder import ArmSummary, check_record, describe_study
from ..study.plan import Plan, make_plan
from ..study.report import sentence, spell, spell_count
from ..study.runs import run_study
from ._console import backend_details, exit_code
from ._flags import OF_PHOTOGRAPHS, add_setting_flags, at_least_one, given_settings
from ._study_display import StudyDisplay

EXAMPLE = 'hgrn-vision compare photos/ --arms hgrn_deit_tiny "no bound=hgrn_deit_tiny,lower_bound=none" --output STUDY'
YAML = (".yaml", ".yml")
OWN = ("arms", "seeds", "sizes", "sequence", "minutes_per_run", "modules")
SHOWN = {
    "recipe": "named preset [paper if DATA is given, else digits]",
    "model": "model of arms that only name settings [hgrn_deit_tiny]",
    "model_args": "constructor arguments of all arms",
    "img_size": "side of the images [the model's own]",
    "holdout": "share to hold out if DATA has no val folder",
    "epochs": "passes over the training images",
    "epoch_steps": "end each epoch after this many steps",
    "batch_size": "images per step",
    "micro_batch": "images per forward pass",
    "lr": "peak learning rate",
    "device": "cpu, cuda, ... [a GPU if there is one]",
    "threads": "CPU threads [torch's choice]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command, and those of `train`."""
    parser.usage = "%(prog)s [STUDY.yaml] [DATA] --arms ARM ARM [ARM ...] --output STUDY [--SETTING VALUE ...]"
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="a study file (.yaml), images as for train, or both; without images: the packaged digits",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="[NAME=]MODEL[,KEY=VALUE...], or NAME=KEY=VALUE[,...] for the shared model; "
        "keys are constructor arguments or settings of train",
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="S", help="run every arm once per seed (default 0 1 2)")
    parser.add_argument("--output", metavar="STUDY", help="study folder; a study in it is continued")
    parser.add_argument(
        "--minutes-per-run",
        type=float,
        metavar="M",
        help="train for equal time, not equal steps: steps are timed first, and each arm gets as many as fit",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=at_least_one,
        metavar="N",
        help="also evaluate at these image sizes, without further training",
    )
    parser.add_argument("--sequence", action="store_true", default=None, help="one token per pixel, one grey channel")
    parser.add_argument("--modules", nargs="+", metavar="FILE", help="Python files that register models with timm")
    parser.add_argument("--plan", action="store_true", help="show what would run, and stop")
    add_setting_flags(parser, leave_out=("data", "seed", *OF_PHOTOGRAPHS), shown=SHOWN)


def run(args: argparse.Namespace) -> int:
    """Run the study; 0 when it is done or stopped on request."""
    return exit_code("compare", lambda: _compare(args))


def resolve(args: argparse.Namespace) -> tuple[Study, str]:
    """The study and its folder, from the file and the flags; flags take precedence."""
    content = _content(args.inputs)
    content |= {name: value for name in OWN if (value := getattr(args, name)) is not None}
    content |= given_settings(args)
    output = args.output or content.pop("output", None)
    content.pop("output", None)
    if not output and not args.plan:
        raise ValueError("--output STUDY is missing: the folder of the study")
    return study_from_mapping(content), str(output or "")


def _content(inputs: list[str]) -> dict[str, Any]:
    """The contents of the study file, if there is one, with DATA if it was given."""
    files = [text for text in inputs if text.endswith(YAML)]
    data = [text for text in inputs if text not in files]
    if len(files) > 1 or len(data) > 1:
        raise ValueError(f"expected at most one study file and one DATA, got {shlex.join(inputs)}")
    content = read_study(files[0]) if files else {}
    return {**content, "data": data[0]} if data else content


def _compare(args: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "a study runs in one process; to use several GPUs, start several studies, each with its own --device"
        )
    study, output = resolve(args)
    plan = make_plan(study)
    if args.plan:
        _show_plan(plan)
        return 0
    # refuse before anything is printed
    check_record(Path(output), describe_study(study, {a.arm.name: a.config for a in plan.arms}, plan.images))
    _show_plan(plan)
    command = shlex.join(["hgrn-vision", *sys.argv[1:]])
    with contextlib.closing(StudyDisplay()) as display:
        outcome = run_study(plan, Path(output), command, display, backend_details)
    if not outcome.finished:
        print("stopped; the same command continues")
        return 0
    _show_summaries(outcome.summaries, plan)
    print(f"report: {outcome.output / 'report.html'}")
    print(f"tables: {outcome.output / 'summary.csv'}, {outcome.output / 'study.csv'}")
    return 0


def _show_plan(plan: Plan) -> None:
    images, seeds = plan.images, plan.study.seeds
    print(
        f"{len(plan.arms)} arms, {len(seeds)} seeds ({' '.join(map(str, seeds))}), {plan.training_images} training and "
        f"{images['validation']:,} held-out images of {images['classes']} classes"
    )
    width = max(3, *(len(arm.arm.name) for arm in plan.arms))
    print(f"{'arm':<{width}}  {'parameters':>10}  {'multiply-adds':>13}  {'images':>6}  steps per run")
    for arm in plan.arms:
        steps = f"{plan.study.minutes_per_run:g} minutes" if plan.study.minutes_per_run else f"{arm.steps:,}"
        cost = spell_count(arm.multiply_adds)
        print(f"{arm.arm.name:<{width}}  {spell_count(arm.parameters):>10}  {cost:>13}  {arm.side:>6}  {steps}")
    if plan.unequal_pixels:
        print(plan.unequal_pixels)
    sys.stdout.flush()


def _show_summaries(summaries: list[ArmSummary], plan: Plan) -> None:
    width = max(3, *(len(summary.arm) for summary in summaries))
    print(f"\n{'arm':<{width}}  {'last epoch':>14}  {'best epoch':>14}  {'images/s':>8}")
    for summary in summaries:
        speed = f"{summary.images_per_second:,.0f}"
        print(f"{summary.arm:<{width}}  {spell(summary.last):>14}  {spell(summary.best):>14}  {speed:>8}")
    print()
    for summary in summaries:
        print(sentence(summary, plan.arms[0].arm.name))

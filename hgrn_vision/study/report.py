"""Gathers what the report of a study shows, and puts the result into words."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from ..report.study import StudyArm, StudyData, write_study
from ..train.config import to_mapping
from .folder import ArmSummary, RunResult
from .plan import Plan
from .statistics import Difference, Spread

Logs = Mapping[tuple[str, int], Sequence[Mapping[str, str]]]

COLUMNS = ("runs", "parameters", "multiply-adds", "steps", "top-1, last epoch", "top-1, best epoch", "best epoch")
COLUMNS += ("difference, last epoch (95%)", "difference, best epoch (95%)", "images/s", "peak memory")


def write_study_page(
    path: Path,
    plan: Plan,
    results: Sequence[RunResult],
    summaries: Sequence[ArmSummary],
    logs: Logs,
    about: Mapping[str, str],
) -> None:
    """Write report.html from the runs so far; `logs` holds the rows of each run's log.csv."""
    sides = {arm.arm.name: arm.side for arm in plan.arms}
    by_time = bool(plan.study.minutes_per_run)
    arms = [_arm(summary, plan, results, logs, sides[summary.arm]) for summary in summaries]
    write_study(
        path,
        StudyData(
            title=_title(plan),
            command=about.get("command", ""),
            arms=arms,
            columns=COLUMNS,
            x_label="minutes of training" if by_time else "optimizer steps",
            notes=_notes(plan, results, summaries),
            runs=[_run_row(result) for result in results],
            settings=_shared_settings(plan),
            versions={name: value for name, value in about.items() if name != "command"},
        ),
    )


def sentence(summary: ArmSummary, first: str) -> str:
    """What the seeds say about an arm."""
    name = f"{summary.arm}: "
    diverged = f" {summary.diverged} of {summary.runs + summary.diverged} runs diverged and are left out."
    end = diverged if summary.diverged else ""
    if not summary.runs:
        return f"{name}no run has finished.{end}"
    top1 = f"top-1 {spell(summary.last)}"
    if summary.difference is None:
        return f"{name}{top1}; the others are compared with it.{end}"
    difference = summary.difference
    pairs = f"{difference.pairs} seed{'s' if difference.pairs != 1 else ''}"
    if difference.pairs == 0:
        return f"{name}{top1}; not compared with {first}, as no seed has finished in both.{end}"
    if difference.verdict == "not told apart":
        return f"{name}{top1}, not told apart from {first} by {pairs} ({spell_difference(difference)}).{end}"
    return f"{name}{top1}, {difference.verdict} {first} ({spell_difference(difference)}, {pairs}).{end}"


def spell(value: Spread) -> str:
    """Mean and standard deviation as text; a dash if there are no values."""
    if not value.count:
        return "-"
    return f"{value.mean:.2f}" if math.isnan(value.std) else f"{value.mean:.2f} ± {value.std:.2f}"


def spell_difference(difference: Difference | None) -> str:
    """A difference with its interval as text, in percentage points."""
    if difference is None or not difference.pairs:
        return ""
    if math.isinf(difference.low):
        return f"{difference.mean:+.2f}"
    return f"{difference.mean:+.2f}, {difference.low:+.2f} to {difference.high:+.2f}"


def spell_count(value: float) -> str:
    """A large number in thousands, millions or billions."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{letter}"
    return "-" if math.isnan(value) else f"{value:.0f}"


def _title(plan: Plan) -> str:
    config = plan.arms[0].config
    where = config.dataset or config.data or "digits"
    return f"{len(plan.arms)} arms, {len(plan.study.seeds)} seeds on {where}"


def _arm(summary: ArmSummary, plan: Plan, results: Sequence[RunResult], logs: Logs, side: int) -> StudyArm:
    runs = [result for result in results if result.arm == summary.arm]
    difference = summary.difference
    return StudyArm(
        name=summary.arm,
        sentence=sentence(summary, plan.arms[0].arm.name),
        cells=_cells(summary),
        last=[result.top1_last for result in runs if result.finished],
        difference=(difference.mean, difference.low, difference.high) if difference else None,
        curves=[_curve(logs[result.arm, result.seed], result, plan) for result in runs],
        side=side,
        sizes=[(size, value.mean, value.std) for size, value in summary.sizes.items()],
    )


def _cells(summary: ArmSummary) -> list[str]:
    number = "{:,.0f}".format
    known = bool(summary.runs)
    return [
        f"{summary.runs}" + (f" + {summary.diverged} diverged" if summary.diverged else ""),
        spell_count(summary.parameters),
        spell_count(summary.multiply_adds),
        number(summary.steps) if known else "-",
        spell(summary.last),
        spell(summary.best),
        f"{summary.best_epoch:.1f}" if known else "-",
        spell_difference(summary.difference),
        spell_difference(summary.difference_best),
        number(summary.images_per_second) if known else "-",
        f"{summary.peak_memory:,.0f} MiB" if known else "-",
    ]


def _curve(log: Sequence[Mapping[str, str]], result: RunResult, plan: Plan) -> list[tuple[float, float]]:
    """Top-1 after each epoch, by step, or by minutes if the arms have equal time."""
    batch = next(arm.config.batch_size for arm in plan.arms if arm.arm.name == result.arm)
    points, seconds, before = [], 0.0, 0
    for row in log:
        step = int(row["step"])
        seconds += (step - before) * batch / float(row["images_per_second"])
        before = step
        points.append((seconds / 60 if plan.study.minutes_per_run else float(step), float(row["val_top1"])))
    return points


def _run_row(result: RunResult) -> dict[str, str]:
    last, best = (f"{value:.2f}" if math.isfinite(value) else "-" for value in (result.top1_last, result.top1_best))
    if result.epochs:
        best += f" (epoch {result.best_epoch})"
    return {
        "arm": result.arm,
        "seed": str(result.seed),
        "status": result.status,
        "last": last,
        "best": best,
        "report": quote(f"{result.folder}/report.html"),
    }


def _notes(plan: Plan, results: Sequence[RunResult], summaries: Sequence[ArmSummary]) -> list[str]:
    images = plan.images
    notes = [
        f"Top-1 is measured on {images['validation']:,} held-out images of {images['classes']} classes, after training "
        f"on {plan.training_images} others. The best epoch is chosen on the held-out images themselves, which flatters "
        "every arm; the sentences above are about the last epoch, where nothing is chosen."
    ]
    total = len(plan.runs)
    if len(results) < total:
        notes.append(f"{len(results)} of {total} runs are done; the numbers are preliminary.")
    if plan.study.minutes_per_run:
        notes.append(
            f"Every run has {plan.study.minutes_per_run:g} minutes of training, not counting evaluation. Before the "
            "first run, steps of all arms were timed in turn, and each arm's schedule has as many steps as fit. "
            "The measured seconds per step are in study.yaml."
        )
    elif len({arm.steps for arm in plan.arms}) == 1:
        notes.append(f"Every run has the same budget of {plan.arms[0].steps:,} optimizer steps.")
    if plan.unequal_pixels:
        notes.append(plan.unequal_pixels)
    if plan.study.sequence:
        notes.append("Images are grey and read pixel by pixel, one token each, in raster order.")
    if any(summary.diverged for summary in summaries):
        notes.append("Runs whose loss became infinite or NaN and did not recover have diverged; means leave them out.")
    return notes


def _shared_settings(plan: Plan) -> dict[str, object]:
    mappings = [to_mapping(arm.config) for arm in plan.arms]
    same = {name: value for name, value in mappings[0].items() if all(each[name] == value for each in mappings)}
    return {name: value for name, value in same.items() if name != "seed"}

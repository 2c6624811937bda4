"""Runs a study: every arm with every seed, one after the other; the same call continues a study that was stopped."""

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..train.checkpoint import Checkpoints
from ..train.config import TrainConfig
from ..train.distributed import choose_device
from ..train.environment import versions
from ..train.evaluation import WrongSize, score
from ..train.faults import Diverged
from ..train.memory import forget_peak
from ..train.observer import Observer
from ..train.run import train
from .folder import (
    REPORT,
    RUNS,
    SUMMARY,
    ArmSummary,
    RunResult,
    check_record,
    describe_study,
    read_runs,
    summarise,
    working_on,
    write_record,
    write_runs,
    write_summary_table,
)
from .plan import ArmPlan, Plan
from .report import write_study_page
from .step_time import time_steps


class StudyObserver(Observer):
    """Receives the events of a study in addition to those of its runs."""

    def timing(self, plan: Plan) -> None:
        """Steps of all arms are about to be timed."""

    def opened(self, plan: Plan, results: Sequence[RunResult]) -> None:
        """The study is about to start, or to continue after these results."""

    def run_began(self, number: int, arm: ArmPlan, seed: int) -> None:
        """Run `number`, counted from 1, is about to start."""

    def run_ended(self, number: int, result: RunResult) -> None:
        """The run has a result."""


@dataclass(frozen=True)
class StudyOutcome:
    """How a study ended this time."""

    finished: bool  # False if it was asked to stop
    output: Path
    summaries: list[ArmSummary]


def run_study(
    plan: Plan,
    output: Path,
    command: str,
    observer: StudyObserver | None = None,
    details: Callable[[TrainConfig], dict[str, str]] = lambda config: {},
) -> StudyOutcome:
    """Start the study in folder `output`, or continue it.

    Args:
        plan: the whole study, including finished runs.
        output: folder for the tables, and a run folder for each arm and seed.
        command: what the user typed, for the record.
        observer: receives the events.
        details: what to record of a run with this config, beside the versions.
    """
    observer = observer or StudyObserver()
    about = {"command": command, **versions()}
    with working_on(output):
        plan, about = _open(plan, output, about, observer)
        if plan is None:
            return StudyOutcome(False, output, [])
        return _run_all(plan, output, command, about, observer, details)


def _run_all(
    plan: Plan,
    output: Path,
    command: str,
    about: dict[str, str],
    observer: StudyObserver,
    details: Callable[[TrainConfig], dict[str, str]],
) -> StudyOutcome:
    """Do every run that has no result yet."""
    results = read_runs(output / RUNS)
    done = {(result.arm, result.seed) for result in results}
    observer.opened(plan, results)
    for number, (arm, seed) in enumerate(plan.runs, 1):
        if (arm.arm.name, seed) in done:
            continue
        observer.run_began(number, arm, seed)
        result = _run(arm, seed, plan, output, command, observer, details(arm.config))
        if result is None:
            return StudyOutcome(False, output, _summaries(plan, results))
        results.append(result)
        _write_outcome(plan, output, results, about)
        observer.run_ended(number, result)
    if len(done) == len(plan.runs):
        # nothing was left to run, but the study may have been killed after the last run's row, before the other files
        _write_outcome(plan, output, results, about)
    return StudyOutcome(True, output, _summaries(plan, results))


def _open(
    plan: Plan, output: Path, about: dict[str, str], observer: StudyObserver
) -> tuple[Plan | None, dict[str, str]]:
    """The plan, fitted to the minutes per run if there are any, and the command and versions that started the study.

    The plan is None if the study was asked to stop.
    """
    configs = {arm.arm.name: arm.config for arm in plan.arms}
    description = describe_study(plan.study, configs, plan.images)
    record = check_record(output, description)
    new = record is None
    record = {**description, "about": about} if new else record
    minutes = plan.study.minutes_per_run
    if minutes:
        if new:
            observer.timing(plan)
            record["seconds_per_step"] = time_steps(configs)
            if record["seconds_per_step"] is None:
                return None, about
        pace = record["seconds_per_step"]
        plan = replace(plan, arms=[arm.fitted(minutes, pace[arm.arm.name]) for arm in plan.arms])
    if new:
        write_record(output, record)
    return plan, record.get("about", about)


def _run(
    arm: ArmPlan,
    seed: int,
    plan: Plan,
    output: Path,
    command: str,
    observer: StudyObserver,
    details: dict[str, str],
) -> RunResult | None:
    """Start or continue the run of an arm with a seed; None if it was asked to stop."""
    config = replace(arm.config, seed=seed)
    folder = output / arm.arm.folder / f"seed{seed}"
    forget_peak(choose_device(config.device))
    try:
        outcome = train(config, folder, command, observer=observer, details=details)
        if outcome.status == "stopped":
            return None
        history = outcome.progress.history
        # a diverging run may reach its end before it has gone back often enough to give up
        status = "finished" if math.isfinite(history[-1]["val_loss"]) else "diverged"
    except Diverged:
        checkpoint = Checkpoints(folder / "checkpoints").load()
        status, history = "diverged", checkpoint.progress["history"] if checkpoint else []
    sizes = _score_sizes(folder, config, plan.study.sizes) if status == "finished" else {}
    return _result(arm, seed, status, history, str(folder.relative_to(output)), sizes)


def _score_sizes(folder: Path, config: TrainConfig, sizes: Sequence[int]) -> dict[int, float]:
    """Top-1 of the last epoch's weights by image size; sizes that the model cannot take are left out."""
    found = {}
    for size in sizes:
        here = {name: getattr(config, name) for name in ("device", "threads", "workers", "data")}
        try:
            found[size] = score(folder / "checkpoints" / "last.safetensors", {**here, "img_size": size}).evaluation.top1
        except WrongSize:
            continue
    return found


def _result(
    arm: ArmPlan, seed: int, status: str, history: Sequence[Mapping[str, Any]], folder: str, sizes: dict[int, float]
) -> RunResult:
    last = history[-1] if history else {}
    best = max(history, key=lambda row: row["val_top1"], default={})
    rates = [row["images_per_second"] for row in history]
    steps = [0, *(row["step"] for row in history)]
    spent = [(b - a) * arm.config.batch_size / rate for a, b, rate in zip(steps, steps[1:], rates, strict=False)]
    return RunResult(
        arm=arm.arm.name,
        seed=seed,
        status=status,
        model=arm.config.model,
        parameters=arm.parameters,
        multiply_adds=arm.multiply_adds,
        epochs=len(history),
        steps=steps[-1],
        top1_last=float(last.get("val_top1", math.nan)),
        top1_best=float(best.get("val_top1", math.nan)),
        best_epoch=best.get("epoch", 0),
        val_loss_last=float(last.get("val_loss", math.nan)),
        train_loss_last=float(last.get("train_loss", math.nan)),
        images_per_second=statistics.median(rates) if rates else math.nan,
        peak_memory=max((row["peak_memory"] for row in history), default=math.nan),
        training_seconds=math.fsum(spent),
        folder=folder,
        sizes=sizes,
    )


def _summaries(plan: Plan, results: Sequence[RunResult]) -> list[ArmSummary]:
    return summarise(results, [arm.arm.name for arm in plan.arms], plan.study.sizes)


def _write_outcome(plan: Plan, output: Path, results: Sequence[RunResult], about: Mapping[str, str]) -> None:
    """Write study.csv, summary.csv and report.html, with the runs in the order of the plan."""
    order = {(arm.arm.name, seed): place for place, (arm, seed) in enumerate(plan.runs)}
    results = sorted(results, key=lambda result: order[result.arm, result.seed])
    summaries = _summaries(plan, results)
    write_runs(output / RUNS, results, plan.study.sizes)
    write_summary_table(output / SUMMARY, summaries, plan.study.sizes)
    logs = {(result.arm, result.seed): _read_log(output / result.folder / "log.csv") for result in results}
    write_study_page(output / REPORT, plan, results, summaries, logs, about)


def _read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a run's log.csv; none if the file was removed."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))

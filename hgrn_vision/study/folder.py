"""The folder of a study: its record, which later starts are checked against, and its tables."""

import contextlib
import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import yaml

from ..files import write_text
from ..train.config import TrainConfig, to_mapping
from .definition import Study
from .statistics import Difference, Spread, paired_difference, spread

RECORD, RUNS, SUMMARY, REPORT = "study.yaml", "study.csv", "summary.csv", "report.html"
LOCK = ".lock"
AT = "top1_at_"  # prefix of the columns for other image sizes


@dataclass(frozen=True)
class RunResult:
    """A row of study.csv; top-1 is in percent, on held-out images, and NaN if no epoch was finished."""

    arm: str
    seed: int
    status: str  # finished or diverged
    model: str
    parameters: int
    multiply_adds: float  # for one image; NaN if they cannot be counted
    epochs: int
    steps: int
    top1_last: float
    top1_best: float  # of the epoch that was chosen on the same images
    best_epoch: int
    val_loss_last: float
    train_loss_last: float
    images_per_second: float
    peak_memory: float
    training_seconds: float
    folder: str
    sizes: dict[int, float] = field(default_factory=dict)  # top-1 of the last epoch's weights by image size

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True)
class ArmSummary:
    """A row of summary.csv: an arm over the seeds that finished."""

    arm: str
    model: str
    runs: int
    diverged: int
    parameters: int
    multiply_adds: float
    steps: int
    last: Spread
    best: Spread
    best_epoch: float
    images_per_second: float
    peak_memory: float
    training_seconds: float
    difference: Difference | None  # from the first arm, at the last epoch; None for the first arm itself
    difference_best: Difference | None
    sizes: dict[int, Spread]


def summarise(results: Sequence[RunResult], arms: Sequence[str], sizes: Sequence[int]) -> list[ArmSummary]:
    """One summary per arm that has runs, in the order of `arms`."""
    summaries = []
    reference = [result for result in results if result.arm == arms[0] and result.finished]
    for number, arm in enumerate(arms):
        runs = [result for result in results if result.arm == arm]
        if not runs:
            continue
        done = [result for result in runs if result.finished]
        differences = [
            paired_difference({r.seed: getattr(r, name) for r in done}, {r.seed: getattr(r, name) for r in reference})
            for name in ("top1_last", "top1_best")
        ]
        first = runs[0]
        summaries.append(
            ArmSummary(
                arm=arm,
                model=first.model,
                runs=len(done),
                diverged=len(runs) - len(done),
                parameters=first.parameters,
                multiply_adds=first.multiply_adds,
                steps=max((r.steps for r in done), default=0),
                last=spread([r.top1_last for r in done]),
                best=spread([r.top1_best for r in done]),
                best_epoch=spread([r.best_epoch for r in done]).mean,
                images_per_second=spread([r.images_per_second for r in done]).mean,
                peak_memory=max((r.peak_memory for r in done), default=math.nan),
                training_seconds=spread([r.training_seconds for r in done]).mean,
                difference=differences[0] if number else None,
                difference_best=differences[1] if number else None,
                sizes={size: spread([r.sizes.get(size, math.nan) for r in done]) for size in sizes},
            )
        )
    return summaries


def write_runs(path: Path, results: Sequence[RunResult], sizes: Sequence[int]) -> None:
    """Write study.csv as a whole."""
    columns = [item.name for item in fields(RunResult) if item.name != "sizes"]
    rows = []
    for result in results:
        values = [getattr(result, name) for name in columns] + [result.sizes.get(size, math.nan) for size in sizes]
        # in full precision, because a later start reads the finished runs from here
        rows.append([_cell(value, repr) for value in values])
    _write_csv(path, [*columns, *(f"{AT}{size}" for size in sizes)], rows)


def read_runs(path: Path) -> list[RunResult]:
    """The rows of study.csv; none if there is no such file yet."""
    if not path.exists():
        return []
    kinds = {item.name: item.type for item in fields(RunResult) if item.name != "sizes"}
    results = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                values = {name: _parse(kind, row[name]) for name, kind in kinds.items()}
                sizes = {int(name.removeprefix(AT)): _parse(float, row[name]) for name in row if name.startswith(AT)}
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"{path} is not the table of a study: {error}") from error
            results.append(RunResult(**values, sizes=sizes))
    return results


def write_summary_table(path: Path, summaries: Sequence[ArmSummary], sizes: Sequence[int]) -> None:
    """Write summary.csv as a whole."""
    rows = [_summary_row(summary, sizes) for summary in summaries]
    _write_csv(path, list(rows[0]) if rows else [], [list(row.values()) for row in rows])


def _summary_row(summary: ArmSummary, sizes: Sequence[int]) -> dict[str, str]:
    row: dict[str, Any] = {}
    plain = ("arm", "model", "runs", "diverged", "parameters", "multiply_adds", "steps")
    row |= {name: getattr(summary, name) for name in plain}
    row |= {"top1_last": summary.last.mean, "top1_last_std": summary.last.std}
    row |= {"top1_best": summary.best.mean, "top1_best_std": summary.best.std, "best_epoch": summary.best_epoch}
    row |= {name: getattr(summary, name) for name in ("images_per_second", "peak_memory", "training_seconds")}
    for suffix, difference in (("", summary.difference), ("_best", summary.difference_best)):
        mean, low, high = (difference.mean, difference.low, difference.high) if difference else (math.nan,) * 3
        row |= {f"difference{suffix}": mean, f"difference{suffix}_low": low, f"difference{suffix}_high": high}
    row["verdict"] = summary.difference.verdict if summary.difference else ""
    for size in sizes:
        row |= {f"{AT}{size}": summary.sizes[size].mean, f"{AT}{size}_std": summary.sizes[size].std}
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any, spell: Callable[[float], str] = "{:.6g}".format) -> str:
    """The text of a cell, empty for NaN and infinity."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value.is_integer() else spell(value)


def _parse(kind: type, text: str) -> Any:
    return math.nan if kind is float and not text else kind(text)


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())


def describe_study(study: Study, configs: Mapping[str, TrainConfig], images: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a study: recipe, arms, seeds and images, which must not change; the path of the data may."""
    names = [item.name for item in fields(TrainConfig) if item.metadata["kind"] == "recipe" and item.name != "seed"]
    mappings = {arm: to_mapping(config) for arm, config in configs.items()}
    first = next(iter(mappings.values()))
    equal = [name for name in names if all(mapping[name] == first[name] for mapping in mappings.values())]
    arms = {arm: {name: each[name] for name in names if name not in equal} for arm, each in mappings.items()}
    own = {item.name: value for item in fields(Study)[2:] if (value := _plain(getattr(study, item.name)))}
    shared = {"data": first["data"], **{name: first[name] for name in equal}}
    return {**shared, "arms": arms, **own, "images": dict(images)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_record(folder: Path, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of the study in a folder; None if there is none yet, ValueError if it is that of another study."""
    path = folder / RECORD
    if not path.exists():
        if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no study; give another --output")
        return None
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not _is_record(record):
        raise ValueError(f"{path} is not the record of a study; give another --output")
    changes = differences(_flat(record), _flat(description))
    if changes:
        raise ValueError(
            f"{folder} holds another study: {', '.join(changes)}; use the old settings, or give another --output"
        )
    return record


def _is_record(content: Any) -> bool:
    """Whether this is what `describe_study` returns; a study file that the user wrote does not count the images."""
    if not isinstance(content, dict) or not isinstance(content.get("images"), dict):
        return False
    arms = content.get("arms")
    return isinstance(arms, dict) and all(isinstance(settings, dict) for settings in arms.values())


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change, by name: all settings of each arm, including shared ones, and those of the study."""
    own = ["seeds", "sizes", "sequence", "minutes_per_run", "images"]
    free = {"arms", "about", "seconds_per_step", "data", "modules", *own}
    shared = {name: value for name, value in description.items() if name not in free}
    flat = {name: description.get(name) or None for name in own}
    return flat | {f"arm {arm!r}": {**shared, **settings} for arm, settings in description["arms"].items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has changed, one line per change; a change that is the same in all arms is listed once."""
    changes = [f"{name} is gone" for name in old if name not in new] + [f"{name} is new" for name in new.keys() - old]
    in_arms: dict[str, list[str]] = {}
    for name in (name for name in old if name in new):
        before, after = old[name], new[name]
        if name.startswith("arm "):
            for key in dict.fromkeys([*before, *after]):
                if before.get(key) != after.get(key):
                    change = f"{key} {before.get(key)!r} -> {after.get(key)!r}"
                    in_arms.setdefault(change, []).append(name)
        elif before != after:
            changes.append(f"{name} {before!r} -> {after!r}")
    common = sum(name.startswith("arm ") for name in old if name in new)
    for change, arms in in_arms.items():
        changes += [change] if len(arms) == common else [f"{arm} {change}" for arm in arms]
    if not changes and list(old) != list(new):
        changes.append(f"order of the arms: {', '.join(name for name in new if name.startswith('arm '))}")
    return changes


@contextlib.contextmanager
def working_on(folder: Path) -> Iterator[None]:
    """Refuse a second process in the same study, with a lock that the system releases when the first one ends.

    The lock is on a file of its own, because the others are replaced when they change. A folder in which no study was
    begun is left as it was.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with open(path, "a") as file:
        # a process that began no study may have removed the file just now
        if not _lock(file) or not path.exists():
            raise ValueError(f"another process is working on the study in {folder}")
        try:
            yield
        finally:
            if not (folder / RECORD).exists():
                with contextlib.suppress(OSError):
                    path.unlink()
                    if is_new:
                        folder.rmdir()


def _lock(file: IO) -> bool:
    """Whether the file is now locked; True on systems without such locks."""
    try:
        # Windows has no such module
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write study.yaml, which `hgrn-vision compare` accepts as a study file."""
    text = yaml.dump(dict(record), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True, width=120)
    write_text(folder / RECORD, text)

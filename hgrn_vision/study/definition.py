"""A study: arms, each a model with settings of its own, trained with several seeds on the same images.

Whatever an arm does not set is the same for all.
"""

import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from timm.models import is_model, list_models

from ..train import recipes
from ..train.config import TrainConfig, convert, describe, field_types, from_mapping, read_value, read_yaml
from ..train.faults import reason

SETTINGS = {item.name for item in fields(TrainConfig)}
# settings that decide which images top-1 is measured on, and those that the study itself decides
SHARED = {
    "data",
    "dataset",
    "val_split",
    "holdout",
    "eval_images",
    "classes",
    "input_key",
    "target_key",
    "val",
    "photos",
}
SHARED |= {"seed", "recipe", "device", "threads", "wandb"}
ELSEWHERE = ("local-dir:", "hf-hub:")
SEQUENCE = {"patch_size": 1, "in_chans": 1}
MOST_MINUTES = 1_000_000


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a name, and settings that override those that all arms share."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The folder of its runs, inside the study's."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("._") or "arm"


@dataclass(frozen=True)
class Study:
    """Everything that decides a study's outcome.

    Args:
        settings: settings of `train`, for all arms.
        arms: the others are compared with the first one.
        seeds: every arm has one run with each.
        sizes: further image sizes at which trained weights are evaluated.
        sequence: read images as one token per pixel, with one grey channel.
        minutes_per_run: time for the steps of a run; 0 counts steps instead.
        modules: Python files or modules to import first, which register models with timm.
    """

    settings: dict[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: tuple[int, ...] = ()
    sequence: bool = False
    minutes_per_run: float = 0.0
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise ValueError(f"a study compares at least two arms, got {len(self.arms)}")
        _refuse_repeats("arms are named", [arm.name for arm in self.arms])
        _refuse_repeats("arms would share the folder", [arm.folder for arm in self.arms])
        if not self.seeds:
            raise ValueError("a study needs at least one seed, got none")
        _refuse_repeats("seeds are", self.seeds)
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes must be at least 1 pixel, got {min(self.sizes)}")
        if self.minutes_per_run < 0:
            raise ValueError(f"minutes_per_run must not be negative, got {self.minutes_per_run:g}")
        # also refuses NaN
        if not self.minutes_per_run <= MOST_MINUTES:
            raise ValueError(f"minutes_per_run must be at most {MOST_MINUTES:,}, got {self.minutes_per_run:g}")

    def configs(self) -> dict[str, TrainConfig]:
        """The settings of each arm, by name; the seed of a run is filled in later."""
        base = recipes.resolve(self.settings)
        if self.sequence:
            if not base.img_size:
                raise ValueError("a study of pixel sequences needs --img-size: every pixel is a token")
            base = replace(base, model_args={**base.model_args, **SEQUENCE})
        return {arm.name: _configure(base, arm) for arm in self.arms}


def _refuse_repeats(what: str, values: Sequence[Any]) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ValueError(f"two {what} {repeated[0]!r}")


def _configure(base: TrainConfig, arm: Arm) -> TrainConfig:
    own = dict(arm.settings)
    arguments = {**base.model_args, **own.pop("model_args", {})}
    # null removes an argument that all arms share
    own["model_args"] = {name: value for name, value in arguments.items() if value is not None}
    try:
        config = from_mapping(own, base)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error
    if not is_model(config.model) and not config.model.startswith(ELSEWHERE):
        raise ValueError(f"arm {arm.name!r}: timm has no model {config.model!r}{_hint(arm.name, config.model)}")
    return config


def _hint(name: str, model: str) -> str:
    """For an arm that was meant as an argument, not as a model whose name is mistyped."""
    if name == model or not name.isidentifier() or get_close_matches(model, list_models(), cutoff=0.8):
        return ""
    return f"; an argument of the shared model needs a name before it: NAME={name}={model}"


def arm_from_mapping(name: str, given: Mapping[str, Any] | str | None) -> Arm:
    """An arm from a study file; keys that are not settings of `train` are arguments of the model's constructor."""
    if isinstance(given, str):
        given = {"model": given}
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"arm {name!r} must be a model name or a mapping of settings, got {given!r}")
    given = dict(given or {})
    shared = sorted(given.keys() & SHARED)
    if shared:
        raise ValueError(f"arm {name!r} cannot have its own {shared[0]}, which is the same for all arms")
    settings = {key: convert(key, value) for key, value in given.items() if key in SETTINGS}
    arguments = {key: value for key, value in given.items() if key not in SETTINGS}
    if arguments or "model_args" in settings:
        settings["model_args"] = {**settings.get("model_args", {}), **arguments}
    return Arm(str(name), settings)


def parse_arm(text: str) -> Arm:
    """An arm from the command line: [NAME=]MODEL[,KEY=VALUE...], or NAME=KEY=VALUE[,...] for the shared model.

    A first KEY that is a setting of `train` needs no NAME, unless VALUE is the name of a model: then KEY is the name.
    """
    # commas inside brackets belong to a value
    first, *items = re.split(r",(?![^\[]*\])", text)
    parts = [part.strip() for part in first.split("=", 2)]
    name, given = text, {}
    if len(parts) == 1:
        given["model"] = parts[0]
    elif len(parts) == 3:
        name, items = parts[0], [f"{parts[1]}={parts[2]}", *items]
    elif parts[0] in SETTINGS and not is_model(parts[1]):
        items = [first, *items]
    else:
        name, given["model"] = parts
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise ValueError(f"arm {text!r}: expected KEY=VALUE after the model, got {item!r}")
        given[key] = _value(key, value)
    if not name:
        raise ValueError(f"arm {text!r} has no name before its '='")
    return arm_from_mapping(name, given)


def _value(key: str, text: str) -> Any:
    if key in SETTINGS:
        base, _, optional = describe(field_types()[key])
        if optional and text == "none":
            return None
        if base is str:
            return text
    return read_value(text)


def read_study(path: str | Path) -> dict[str, Any]:
    """The content of a study file: settings of `train`, and arms, seeds, sizes, ..., output."""
    content = read_yaml(path)
    modules = content.get("modules")
    if isinstance(modules, list):
        # paths of Python files are relative to the study file
        beside = Path(path).resolve().parent
        content["modules"] = [str(beside / name) if str(name).endswith(".py") else name for name in modules]
    # a study's own record adds these two, which are results and not settings
    return {key: value for key, value in content.items() if key not in ("images", "seconds_per_step")}


def study_from_mapping(content: Mapping[str, Any]) -> Study:
    """A study from the content of a file, already updated with the flags."""
    content = dict(content)
    arms = content.pop("arms", None) or ()
    if isinstance(arms, Mapping):
        arms = tuple(arm_from_mapping(name, given) for name, given in arms.items())
    elif not isinstance(arms, list | tuple):
        raise ValueError(f"arms must be a list or a mapping of names to settings, got {arms!r}")
    else:
        arms = tuple(arm if isinstance(arm, Arm) else parse_arm(str(arm)) for arm in arms)
    own = {item.name: content.pop(item.name) for item in fields(Study)[2:] if item.name in content}
    for name, kind in (("seeds", int), ("sizes", int), ("modules", str)):
        if name in own:
            own[name] = _several(name, own[name], kind)
    if not isinstance(own.get("minutes_per_run", 0), int | float) or not isinstance(own.get("sequence", False), bool):
        raise ValueError("minutes_per_run must be a number, and sequence true or false")
    settings = {key: convert(key, value) for key, value in content.items()}
    if "seed" in settings:
        raise ValueError("a study has seeds, one run of every arm for each; give --seeds instead of --seed")
    if settings.get("photos"):
        raise ValueError("a study measures top-1, which needs labels; it cannot train on photographs without them")
    return Study(settings, arms, **own)


def _several(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    values = [] if values is None else values
    if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
        raise ValueError(f"{name} must be a list of {'whole numbers' if kind is int else 'strings'}, got {values!r}")
    return tuple(values)


def import_modules(modules: Sequence[str]) -> None:
    """Import Python files or modules, so that the models they register with timm are known."""
    for module in modules:
        try:
            if module.endswith(".py"):
                _import_file(Path(module))
            else:
                importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"cannot import {module}: {reason(error)}") from error


def _import_file(path: Path) -> None:
    if path.stem in sys.modules:
        loaded = getattr(sys.modules[path.stem], "__file__", None)
        if loaded and Path(loaded).resolve() == path.resolve():
            return
        raise ImportError(f"the name {path.stem!r} is taken by {loaded or 'a part of Python'}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # timm's registry looks up the module by name
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise

"""What a study will do, checked before anything is trained."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.spec import DataSpec
from ..data.splits import Split, Stream, open_splits, steps_per_epoch
from ..train.build import build_model, data_spec
from ..train.config import TrainConfig
from ..train.cost import count_parameters, multiply_adds
from ..train.faults import reason
from .definition import Arm, Study, import_modules
from .step_time import fit_minutes


@dataclass(frozen=True)
class ArmPlan:
    """The runs of an arm, all alike except for their seed."""

    arm: Arm
    config: TrainConfig
    epoch_steps: int
    parameters: int
    multiply_adds: float  # for one image; NaN if they cannot be counted
    spec: DataSpec  # the pixels that its model expects

    @property
    def side(self) -> int:
        """Of its images, in pixels."""
        return self.spec.input_size[-1]

    @property
    def steps(self) -> int:
        """Optimizer steps of one run."""
        return self.config.epochs * self.epoch_steps

    def fitted(self, minutes: float, seconds_per_step: float) -> "ArmPlan":
        """The same arm with as many steps as fit into so many minutes of training."""
        config = fit_minutes(self.config, minutes, seconds_per_step, self.epoch_steps)
        return ArmPlan(self.arm, config, config.epoch_steps, self.parameters, self.multiply_adds, self.spec)


@dataclass(frozen=True)
class Plan:
    """All runs of a study."""

    study: Study
    arms: list[ArmPlan]
    images: dict[str, Any]  # counts of training, validation and classes; training by arm if it differs

    @property
    def runs(self) -> list[tuple[ArmPlan, int]]:
        """Arm and seed, in the order in which they run: all arms with one seed, then the next seed."""
        return [(arm, seed) for seed in self.study.seeds for arm in self.arms]

    @property
    def training_images(self) -> str:
        """The number of training images as text, with the names of the arms if it differs."""
        counts = self.images["training"]
        if isinstance(counts, int):
            return f"{counts:,}"
        arms: dict[int, list[str]] = {}
        for name, count in counts.items():
            arms.setdefault(count, []).append(name)
        return " or ".join(f"{count:,} ({', '.join(names)})" for count, names in arms.items())

    @property
    def unequal_pixels(self) -> str:
        """A sentence about arms whose models expect differently normalised pixels; empty if there are none."""
        arms: dict[tuple, list[str]] = {}
        for arm in self.arms:
            arms.setdefault((arm.spec.mean, arm.spec.std), []).append(arm.arm.name)
        if len(arms) == 1:
            return ""
        numbers = " ".join
        each = (
            f"{', '.join(names)}: mean {numbers(map(str, mean))}, std {numbers(map(str, std))}"
            for (mean, std), names in arms.items()
        )
        return f"Pixels are normalized as each model expects, unless the study sets mean and std: {'; '.join(each)}."


def make_plan(study: Study) -> Plan:
    """Plan the whole study, and check that its data exists and that its models can be built and take the images."""
    import_modules(study.modules)
    configs = study.configs()
    if study.minutes_per_run and any(config.first_sizes for config in configs.values()):
        raise ValueError("first_sizes counts epochs, whose number --minutes-per-run changes: use one or the other")
    opened: dict[str, tuple[Split | Stream, Split | Stream]] = {}
    arms, training = [], {}
    for arm in study.arms:
        config = configs[arm.name]
        # train_split is the only setting of the images that may differ between arms
        if config.train_split not in opened:
            opened[config.train_split] = open_splits(config)
        train, validation = opened[config.train_split]
        training[arm.name] = len(train)
        try:
            arms.append(_plan_arm(arm, config, train))
        except ValueError as error:
            raise ValueError(f"arm {arm.name!r}: {error}") from error
    counts = len(train) if len(set(training.values())) == 1 else training
    images = {"training": counts, "validation": len(validation), "classes": len(train.class_names)}
    return Plan(study, arms, images)


def _plan_arm(arm: Arm, config: TrainConfig, train: Split | Stream) -> ArmPlan:
    steps = steps_per_epoch(train, config)
    model = build_model(config, len(train.class_names))
    spec = data_spec(config, model)
    return ArmPlan(arm, config, steps, count_parameters(model), _cost(model, spec.input_size), spec)


def _cost(model: nn.Module, size: tuple[int, int, int]) -> float:
    try:
        return float(multiply_adds(model, size))
    except Exception:
        # some models do not run on the meta device; one that runs on zeros is good enough
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(1, *size))
        except Exception as error:
            raise ValueError(f"the model cannot take images of {size[1]}x{size[2]} pixels: {reason(error)}") from error
        return math.nan

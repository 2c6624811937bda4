"""Small training set-ups shared by several test files."""

from typing import Any

import torch

from hgrn_vision.data.loaders import EvalLoader, TrainLoader
from hgrn_vision.data.splits import open_splits, steps_per_epoch
from hgrn_vision.train.build import build_model, build_teacher, data_spec, describe_model
from hgrn_vision.train.config import TrainConfig, from_mapping
from hgrn_vision.train.distributed import World
from hgrn_vision.train.engine import Engine
from hgrn_vision.train.recipes import RECIPES

SMALL = {"patch_size": 2, "embed_dim": 16, "depth": 2}


def digits(**settings: Any) -> TrainConfig:
    """The digits recipe with a model of a few thousand parameters and a few steps."""
    small = {"recipe": "digits", "model_args": SMALL, "epochs": 2, "epoch_steps": 3, "eval_images": 64, "device": "cpu"}
    plain = {"batch_size": 64, "micro_batch": 32, "warmup_epochs": 0.0, "lr": 1e-3, "mixup": 0.0, "ema": 0.0}
    return from_mapping({**RECIPES["digits"].settings, **small, **plain, **settings})


class Setup:
    """The parts of a run, without its files."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.train, self.validation = open_splits(config)
        self.steps = steps_per_epoch(self.train, config)
        model = build_model(config, len(self.train.class_names))
        self.spec = data_spec(config, model)
        describe_model(model, self.spec)
        self.engine = Engine(config, World(), model, self.spec, self.steps, build_teacher(config, torch.device("cpu")))
        self.loader = TrainLoader(self.train, config, self.spec)
        self.eval_loader = EvalLoader(self.validation, config, self.spec)

    def run(self, steps: int) -> list[float]:
        """Losses of the next steps of the epoch."""
        progress = self.engine.progress
        batches = self.loader.epoch(progress.epoch, progress.step, progress.rollbacks)
        return [self.engine.step(next(batches)).loss for _ in range(steps)]

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.detach().flatten().clone() for tensor in self.engine.eval_model.state_dict().values()])

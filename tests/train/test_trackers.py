"""TensorBoard and Weights & Biases."""

import sys

import pytest
from training import digits

from hgrn_vision.train import trackers


def test_trackers_that_are_not_installed_say_so(monkeypatch):
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="--tensorboard needs the package tensorboard: pip install tensorboard"):
        trackers.check_trackers(digits(tensorboard=True))
    with pytest.raises(ImportError, match="--wandb needs the package wandb: pip install wandb"):
        trackers.check_trackers(digits(wandb="project"))

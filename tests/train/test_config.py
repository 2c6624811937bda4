"""Settings: one list, from which flags, files and the check of a resumed run follow."""

import argparse

import pytest
import yaml

from hgrn_vision.commands import train as tool
from hgrn_vision.train.config import TrainConfig, from_mapping, read_yaml, recipe_changes, to_mapping, to_yaml
from hgrn_vision.train.recipes import RECIPES


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_runs_own_settings_file_can_be_used_again(tmp_path):
    config = tool.resolve(parse("/data", "--model-args", "depth=3", "--recipe", "deit"))
    (tmp_path / "config.yaml").write_text(to_yaml(config, {"command": "x", "torch": "2"}))
    assert set(yaml.safe_load(to_yaml(config))) == {"recipe", "machine"}
    assert from_mapping(read_yaml(tmp_path / "config.yaml")) == config


def test_the_papers_recipe_is_the_papers_table():
    """The image column of the paper's configuration table."""
    config = tool.resolve(parse("/data", "--recipe", "paper"))
    table = (2048, 300, 5, 2.5e-4, "cosine", "adamw", 1e-8, (0.9, 0.98), 0.1, 1.0)
    names = "batch_size epochs warmup_epochs lr sched opt opt_eps betas weight_decay clip_grad"
    assert tuple(getattr(config, name) for name in names.split()) == table


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_its_command_and_its_result(name):
    recipe = RECIPES[name]
    from_mapping({**recipe.settings, "recipe": name})
    assert "train_imagenet.py" in recipe.command and recipe.result


def test_only_recipe_settings_count_as_changes():
    old = to_mapping(TrainConfig())
    new = from_mapping({"lr": 1, "betas": [0.9, 0.99], "workers": 1, "device": "cpu", "data": "/elsewhere"})
    assert recipe_changes(old, new) == {"lr": (2.5e-4, 1.0), "betas": ([0.9, 0.98], [0.9, 0.99])}

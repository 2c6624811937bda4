"""Settings: one list, from which flags, files and the check of a resumed run follow."""

import argparse
import ast
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml
from launcher import ROOT
from PIL import Image

from hgrn_vision.cli import main
from hgrn_vision.commands import train as tool
from hgrn_vision.commands._flags import OF_PHOTOGRAPHS
from hgrn_vision.randomness import fold
from hgrn_vision.train.config import TrainConfig, from_mapping, read_yaml, recipe_changes, to_mapping, to_yaml
from hgrn_vision.train.recipes import RECIPES


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)
    return parser.parse_args(arguments)


# one value other than the default for every setting, as typed
OTHER = {
    "data": ["/data"],
    "betas": ["--betas", "0.8", "0.9"],
    "scale": ["--scale", "0.5", "0.9"],
    "ratio": ["--ratio", "0.9", "1.1"],
    "mean": ["--mean", "0.1", "0.2", "0.3"],
    "std": ["--std", "0.1", "0.2", "0.3"],
    "model_args": ["--model-args", "depth=3", "lower_bound=none"],
    "batch_size": ["--batch-size", "4096"],
    "precision": ["--precision", "fp16"],
    "sched": ["--sched", "poly"],
    "loss": ["--loss", "bce"],
    "mixup_mode": ["--mixup-mode", "elem"],
    "distill": ["--distill", "features"],
    "recipe": ["--recipe", "deit"],
    "device": ["--device", "cpu"],
    "freeze": ["--freeze", "body"],
    "first_sizes": ["--first-sizes", "56x8,70x4"],
    "teacher_mean": ["--teacher-mean", "0.1", "0.2", "0.3"],
    "teacher_std": ["--teacher-std", "0.1", "0.2", "0.3"],
}


def typed(name: str, default) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return [flag]
    if isinstance(default, str):
        return [flag, "other"]
    return [flag, "4" if isinstance(default, int) or default is None else "0.375"]


@pytest.mark.parametrize("name", [item.name for item in fields(TrainConfig) if item.name not in OF_PHOTOGRAPHS])
def test_every_setting_has_a_flag(name):
    default = getattr(TrainConfig(), name)
    arguments = typed(name, default)
    if name != "data":
        arguments = ["/data", *arguments]
    assert getattr(tool.resolve(parse(*arguments)), name) != default


def test_flags_win_over_the_file_and_the_file_over_the_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: released\nlr: 0.5\nbetas: [0.1, 0.2]\n")
    config = tool.resolve(parse("/data", "--config", str(file), "--lr", "0.7"))
    assert (config.recipe, config.lr, config.betas) == ("released", 0.7, (0.1, 0.2))
    assert config.clip_grad == RECIPES["released"].settings["clip_grad"]


def test_a_runs_own_settings_file_can_be_used_again(tmp_path):
    config = tool.resolve(parse("/data", "--model-args", "depth=3", "--recipe", "deit"))
    (tmp_path / "config.yaml").write_text(to_yaml(config, {"command": "x", "torch": "2"}))
    assert set(yaml.safe_load(to_yaml(config))) == {"recipe", "machine"}
    assert from_mapping(read_yaml(tmp_path / "config.yaml")) == config


def test_the_papers_recipe_is_the_papers_table():
    """The column for images of the paper's configuration table."""
    config = tool.resolve(parse("/data", "--recipe", "paper"))
    table = (2048, 300, 5, 2.5e-4, "cosine", "adamw", 1e-8, (0.9, 0.98), 0.1, 1.0)
    names = "batch_size epochs warmup_epochs lr sched opt opt_eps betas weight_decay clip_grad"
    assert tuple(getattr(config, name) for name in names.split()) == table


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_its_command_and_its_result(name):
    recipe = RECIPES[name]
    from_mapping({**recipe.settings, "recipe": name})
    assert "train_imagenet.py" in recipe.command and recipe.result


def test_no_data_means_the_digits():
    assert tool.resolve(parse()).recipe == "digits"
    assert tool.resolve(parse("/data")).recipe == "paper"
    assert tool.resolve(parse("--dataset", "torch/cifar10")).recipe == "paper"


def test_only_recipe_settings_count_as_changes():
    old = to_mapping(TrainConfig())
    new = from_mapping({"lr": 1, "betas": [0.9, 0.99], "workers": 1, "device": "cpu", "data": "/elsewhere"})
    assert recipe_changes(old, new) == {"lr": (2.5e-4, 1.0), "betas": ([0.9, 0.98], [0.9, 0.99])}


@pytest.mark.parametrize("folder", ["data", "report", "train", "inference"])
def test_only_commands_print_and_parse(folder):
    """The rest is used from Python too: showing things is the command's part."""
    paths = list((ROOT / "hgrn_vision" / folder).glob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Name) and node.id == "print"), path
            assert not (isinstance(node, ast.Import) and "argparse" in [name.name for name in node.names]), path


def test_seeds_are_the_same_on_every_machine():
    assert fold(0, 1, 2) == 5458876493991123480
    assert len({fold(a, b) for a in range(40) for b in range(40)}) == 1600


BAD = [
    (["--recipe", "paper"], "recipe paper needs images"),
    (["/data", "--recipe", "digits"], "recipe digits is for the packaged digits"),
    (["--batch-size", "100", "--micro-batch", "64"], "micro_batch 50 would work"),
    (["--micro-batch", "7"], "micro_batch must be even"),
    (["--epochs", "0"], "epochs must be at least 1"),
    (["--smoothing", "2"], "smoothing must be between 0 and 1"),
    (["--lr", "-1"], "lr must not be negative"),
    (["--config", "missing.yaml"], "missing.yaml"),
    (["--config", "list.yaml"], "holds no settings"),
    (["--config", "broken.yaml"], "not a YAML file"),
    (["--config", "unknown.yaml"], "unknown setting 'learning_rate'"),
    (["--config", "wrong.yaml"], "setting epochs: 'many' is not a whole number"),
    (["--config", "recipe.yaml"], "unknown recipe 'mine'"),
    (["--device", "nonsense"], "device 'nonsense' cannot be used"),
    (["--model", "no_such_model"], "cannot create model no_such_model"),
    (["--model-args", "no_such=1"], "cannot create model hgrn_deit_tiny"),
    (["--opt", "no_such"], "optimizer no_such"),
    (["--teacher", "no_such"], "cannot create teacher no_such"),
    (["missing-folder"], "missing-folder"),
    (["empty-folder"], "no images in"),
    (["one-class"], "only one class (a)"),
    (["apart"], "no validation image of apart has a class that the model knows"),
    (["--output", "list.yaml/run"], "list.yaml"),
    (["--eval", "empty-folder"], "neither a checkpoint file nor a run folder"),
    (["--eval", "list.yaml"], "list.yaml is damaged or not a safetensors file"),
    (["--batch-size", "2000", "--micro-batch", "2000"], "fewer than one batch of 2000"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty-folder" / "train").mkdir(parents=True)
    (tmp_path / "empty-folder" / "val").mkdir()
    for path in ("one-class/train/a", "one-class/val/a", "apart/train/a", "apart/train/b", "apart/val/c"):
        (tmp_path / path).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / path / "1.png")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "unknown.yaml").write_text("learning_rate: 1\n")
    (tmp_path / "wrong.yaml").write_text("epochs: many\n")
    (tmp_path / "recipe.yaml").write_text("recipe: mine\n")
    small = [] if arguments[0] == "--model-args" else ["--model-args", "patch_size=2", "embed_dim=16", "depth=1"]
    assert main(["train", *arguments, *small]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_an_unknown_flag_is_code_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--learning-rate", "1"])
    assert "unrecognized arguments: --learning-rate" in capsys.readouterr().err


def test_the_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "train_imagenet.py", "--print-config"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["recipe"]["recipe"] == "digits"
    assert list(tmp_path.iterdir()) == []

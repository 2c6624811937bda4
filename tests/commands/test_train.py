"""hgrn-vision train: its flags, its recipes, what it prints, what it refuses."""

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from launcher import ROOT
from PIL import Image

from hgrn_vision.cli import main
from hgrn_vision.commands import train as tool
from hgrn_vision.commands._flags import OF_PHOTOGRAPHS
from hgrn_vision.data.batches import BadRecord
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.evaluation import Score
from hgrn_vision.train.observer import Outcome
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


def test_no_data_means_the_digits():
    assert tool.resolve(parse()).recipe == "digits"
    assert tool.resolve(parse("/data")).recipe == "paper"
    assert tool.resolve(parse("--dataset", "torch/cifar10")).recipe == "paper"


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


def test_an_evaluation_is_printed_once_with_the_first_unreadable_images(monkeypatch, capsys):
    bad = [BadRecord("validation", number, f"{number}.png", "empty file") for number in range(30)]
    evaluation = SimpleNamespace(top1=71.25, top5=90.5, loss=1.5, images=400, bad=bad)
    for main_rank in (False, True):
        result = Score(Path("runs/x/best"), TrainConfig(), 7, evaluation, main_rank)
        monkeypatch.setattr(tool, "score", lambda run, settings, result=result: result)
        assert main(["train", "--eval", "runs/x"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == (23 if main_rank else 0)
    assert lines[:3] == [
        f"runs/x/best: {TrainConfig().model}, 7 epochs",
        "top-1 71.250  top-5 90.500  loss 1.500000",
        "400 images, 30 unreadable",
    ]
    assert lines[-1] == "  19.png: empty file"


def test_a_smoke_run_is_short_and_stands_beside_the_real_one(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "train", lambda config, output, *_: calls.append((config, output)) or finished(output))
    leftover = tmp_path / "runs" / "smoke-digits-hgrn_deit_tiny" / "leftover"
    leftover.mkdir(parents=True)
    assert main(["train", "--smoke"]) == 0
    assert main(["train", "--smoke", "--output", "mine"]) == 0
    (config, output), (_, given) = calls
    assert (config.epochs, config.epoch_steps, config.eval_images) == (2, 4, 4 * config.micro_batch)
    assert config.warmup_epochs == 0
    assert (output, given) == (leftover.parent.relative_to(tmp_path), Path("mine")) and not leftover.exists()
    assert capsys.readouterr().out.startswith("No data given: training on the handwritten digits")


def finished(output, status="finished", **progress):
    rows = [{"epoch": 3, "val_top1": 87.654, "val_top5": 99.0}]
    return Outcome(status, Path(output), Progress(history=rows, **progress), "SIGTERM")


def test_what_is_said_at_the_end(capsys):
    config = tool.resolve(parse())
    tool._show_outcome(finished("runs/x"), config)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "finished: top-1 87.65, top-5 99.00 (epoch 3)"
    assert any("--eval runs/x" in line for line in lines) and "finetune PHOTOS" in lines[-1]
    tool._show_outcome(finished("runs/x", best={"epoch": 1, "val_top1": 90.0, "val_top5": 95.0}), config)
    assert "top-1 90.00, top-5 95.00 (epoch 1)" in capsys.readouterr().out
    tool._show_outcome(finished("runs/x", "finished before"), config)
    said = capsys.readouterr().out
    assert "rm -r runs/x first" in said and "PHOTOS" not in said
    tool._show_outcome(finished("runs/x", "stopped", updates=7), config)
    assert capsys.readouterr().out == "stopped at step 7 (SIGTERM); the same command continues\n"


@pytest.mark.parametrize(
    "argv, ranks, command",
    [
        (["/a/train_imagenet.py", "my data", "--lr", "1"], {}, "python train_imagenet.py 'my data' --lr 1"),
        (["/bin/hgrn-vision", "train", "--lr", "1"], {"WORLD_SIZE": "1"}, "hgrn-vision train --lr 1"),
        (["train_imagenet.py"], {"WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4 train_imagenet.py"),
        (
            ["train_imagenet.py", "d"],
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            "torchrun --nproc-per-node 8 train_imagenet.py d",
        ),
    ],
)
def test_the_command_for_the_report_is_the_one_that_was_typed(argv, ranks, command, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", argv)
    assert tool._command() == command

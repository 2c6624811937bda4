"""From images to a classifier: what is found, where the weights come from, what is left behind, what is refused."""

import csv
import os
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file
from saved_models import SMALL, package_starter, save_model, write_image, write_photos

import hgrn_vision  # noqa: F401
from hgrn_vision.cli import main
from hgrn_vision.commands._console import Display
from hgrn_vision.commands.finetune import _beginning, _check_readable, _show_outcome, choose_init, resolve
from hgrn_vision.data.splits import open_splits
from hgrn_vision.inference.pretrained import Initial
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.finetune_recipe import QUICK_FLOPS, STARTER_QUICK_SIDE, STARTER_SIDE
from hgrn_vision.train.observer import Outcome

CLASSES = ["red apple", "Grünkohl", "青い花"]
TINY = ["--model", "hgrn_deit_tiny", "--model-args", "patch_size=8", "embed_dim=16", "depth=1", "--img-size", "16"]
SHORT = ["--epochs", "1", "--batch-size", "4", "--workers", "0", "--device", "cpu"]
STILL = ["--lr", "0", "--min-lr", "0", "--warmup-lr", "0"]  # nothing learns


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), dict.fromkeys(CLASSES, 6))


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """A one-epoch run, started as a user would, from another folder."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main(["finetune", str(photos), "--output", str(output), *TINY, *SHORT]) == 0
    return output


def finetune(photos, output, *flags):
    return main(["finetune", str(photos), "--output", str(output), *SHORT, *flags])


def body(folder):
    """The weights of a model folder without its head."""
    weights = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in weights.items() if not name.startswith("head.")}


def test_images_become_a_run_and_the_command_to_use_it(photos, tmp_path, capsys):
    assert finetune(photos, tmp_path / "my run", *TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"Found 18 images of 3 classes in {photos}: 15 for training (5 per class), 3 for validation, "
        "16x16 pixels, none unreadable, no suspected duplicates across the split."
    )
    assert lines[1].startswith("Starting from scratch (no --init): ")
    kept = {path.name for path in (tmp_path / "my run").iterdir()}
    assert {"config.yaml", "log.csv", "checkpoints", "model", "report.html"} <= kept
    about = yaml.safe_load((tmp_path / "my run" / "config.yaml").read_text())["about"]
    assert about["init"] == "new weights" and about["images"] == lines[0]
    evaluate = next(line for line in lines if line.startswith("evaluate:")).removeprefix("evaluate:")
    assert evaluate.endswith(" --holdout 0.2") and main(shlex.split(evaluate)[1:]) == 0
    # of the three held-out images, as at the end of the run
    top1 = next(line for line in lines if line.startswith("finished:")).split()[2].rstrip(",")
    assert re.search(rf"images +3\ntop1 +{top1}%", capsys.readouterr().out)
    predict = next(line for line in lines if line.startswith("predict:")).removeprefix("predict:")
    assert main(shlex.split(predict)[1:]) == 0
    assert any(name in capsys.readouterr().out for name in CLASSES)


def sources(folder, run):
    """Everything that --init accepts, each with the folder of the model it refers to."""
    save_model(folder / "plain")
    return {
        "run": (str(run), run / "model"),
        "checkpoint": (str(run / "checkpoints" / "best.safetensors"), run / "model"),
        "model folder": (str(folder / "plain"), folder / "plain"),
        "local-dir": (f"local-dir:{folder / 'plain'}", folder / "plain"),
        "weights file": (str(folder / "plain" / "model.safetensors"), folder / "plain"),
        "hub": ("hf-hub:someone/flowers", folder / "plain"),
    }


@pytest.mark.parametrize("kind", ["run", "checkpoint", "model folder", "local-dir", "weights file", "hub"])
def test_the_head_is_new_and_the_rest_is_kept(kind, photos, finished, tmp_path, monkeypatch, capsys):
    where, folder = sources(tmp_path, finished)[kind]
    monkeypatch.setattr("timm.models._hub.hf_hub_download", lambda repo_id, filename, **_: str(folder / filename))
    assert finetune(photos, tmp_path / "run", "--init", where, *STILL) == 0
    kept, first = body(tmp_path / "run" / "model"), body(folder)
    assert {"lower_bound", "blocks.0.mixer.theta"} <= set(kept) == set(first)
    for name, tensor in first.items():
        assert torch.equal(kept[name], tensor), name
    heads = (load_file(f / "model.safetensors")["head.weight"] for f in (folder, tmp_path / "run" / "model"))
    assert not torch.equal(*heads)
    assert f"Starting from {where} (hgrn_deit_tiny, 3 classes at 16 pixels) with a new head" in capsys.readouterr().out


def test_photographs_begin_from_the_packaged_weights(tmp_path, monkeypatch, capsys):
    package_starter(tmp_path / "pretrained", monkeypatch)
    photos = write_photos(tmp_path / "photos", {"a": 4, "b": 4}, side=40)
    assert finetune(photos, tmp_path / "run", "--img-size", "28", *STILL) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("Starting from hgrn_deit_tiny (weights that come with the package, 1000 classes at ")
    assert line.endswith("Image size: 28 pixels. --init none would train from scratch.")
    first = timm.create_model("hgrn_deit_tiny", pretrained=True).state_dict()
    kept = body(tmp_path / "run" / "model")
    assert all(torch.equal(tensor, first[name]) for name, tensor in kept.items()) and len(kept) == len(first) - 2
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["about"]["init"] == "hgrn_deit_tiny"
    assert finetune(photos, tmp_path / "run", "--img-size", "28", *STILL, "--init", "none") == 2
    message = "started from hgrn_deit_tiny, not new weights; give --init hgrn_deit_tiny or another --output"
    assert message in capsys.readouterr().err


def test_a_damaged_package_is_reported_before_training(tmp_path, monkeypatch, capsys):
    package_starter(tmp_path / "pretrained", monkeypatch)
    (tmp_path / "pretrained" / "SHA256SUMS").unlink()
    photos = write_photos(tmp_path / "photos", {"a": 4, "b": 4}, side=40)
    assert finetune(photos, tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is damaged" in line and "reinstall the package" in line
    assert not (tmp_path / "run").exists()


def test_where_a_run_begins():
    photographs, others = SimpleNamespace(photographs=True), SimpleNamespace(photographs=False)
    for given in ({}, {"model": "hgrn_deit_tiny"}):
        assert choose_init(None, given, photographs) == "hgrn_deit_tiny"
    for found, given in ((others, {}), (photographs, {"model": "resnet18"}), (photographs, {"model_args": SMALL})):
        assert choose_init(None, given, found) == "new weights"
    assert choose_init("none", {}, photographs) == "new weights"
    assert choose_init("runs/x", {}, others) == "runs/x"


@pytest.mark.parametrize("quick, side", [(False, STARTER_SIDE), (True, STARTER_QUICK_SIDE)])
def test_settings_from_the_packaged_weights(quick, side):
    trained = {"model": "hgrn_deit_tiny", "model_args": {}, "img_size": 56}
    packaged = resolve({}, Found(1000, 500), Initial(trained, {}, "", packaged=True), quick)
    assert (packaged.img_size, packaged.lr, packaged.layer_decay) == (side, 2e-3, 0.9)
    # smaller images are enlarged, and given settings take precedence
    assert resolve({}, Found(1000, 32), Initial(trained, {}, "", packaged=True), quick).img_size == side
    given = {"img_size": 140, "lr": 0.125}
    assert resolve(given, Found(1000, 500), Initial(trained, {}, "", packaged=True), quick).lr == 0.125
    other = resolve({}, Found(1000, 500), Initial(trained, {}, ""), quick)
    assert (other.img_size, other.lr, other.layer_decay) == (56, 5e-4, 0.75)


def test_freezing_the_body_trains_only_the_head(photos, finished, tmp_path):
    assert finetune(photos, tmp_path / "run", "--init", str(finished), "--freeze", "body", "--lr", "0.1") == 0
    after = body(tmp_path / "run" / "model")
    assert all(torch.equal(after[name], tensor) for name, tensor in body(finished / "model").items())


def test_ctrl_c_leaves_whole_files_and_the_same_command_continues(photos, tmp_path, monkeypatch, capsys):
    command = [photos, tmp_path / "run", *TINY, "--epochs", "2"]

    class Interrupted(Display):
        def stepped(self, progress, loss, lr):
            if progress.updates == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("hgrn_vision.commands.finetune.Display", Interrupted)
    assert finetune(*command) == 0
    assert "stopped at step 2 (SIGINT); the same command continues" in capsys.readouterr().out
    left = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*")}
    assert left == {
        "config.yaml",
        "log.csv",
        "checkpoints",
        "checkpoints/last.safetensors",
        "checkpoints/previous.safetensors",
    }
    monkeypatch.undo()
    assert finetune(*command) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert finetune(*command) == 0
    assert "finished before" in capsys.readouterr().out


def test_a_folder_may_be_called_digits(photos, tmp_path, monkeypatch, capsys):
    """The name stands for the packaged data only if there is no such folder."""
    (tmp_path / "digits").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    assert finetune("digits", "run", *TINY) == 0
    assert "3 classes" in capsys.readouterr().out


def test_a_run_is_not_overwritten(photos, finished, tmp_path, capsys):
    log = (finished / "log.csv").read_bytes()
    assert finetune(photos, finished, *TINY, "--init", str(finished)) == 2
    assert finetune(photos, finished, *TINY, "--lr", "0.5") == 2
    assert finetune(photos, photos, *TINY) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "started from new weights, not" in first
    assert "was started with different settings: lr 0.001 -> 0.5" in second
    assert "is not empty and is not a run" in third
    assert (finished / "log.csv").read_bytes() == log


def test_a_csv_and_folders_of_splits(photos, tmp_path, capsys):
    files = sorted(path for path in photos.rglob("*.png"))
    rows = [f'"{path.relative_to(photos)}",{path.parent.name}' for path in files]
    (photos / "labels.csv").write_text("\n".join(["file,label", *rows]))
    assert finetune(photos / "labels.csv", tmp_path / "csv", *TINY) == 0
    (photos / "labels.csv").unlink()
    for split, digit in (("train", "01234"), ("val", "5")):
        for path in files:
            if path.stem[-1] in digit:
                target = tmp_path / "split" / split / path.relative_to(photos)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    assert finetune(tmp_path / "split", tmp_path / "splits", *TINY) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Found")]
    assert all("15 for training (5 per class), 3 for validation" in line for line in found) and len(found) == 2


def csv_of(*lines):
    def write(folder):
        (folder / "photos.csv").write_text("\n".join(lines) + "\n")
        return folder / "photos.csv"

    return write


def one_image_each(folder):
    return write_photos(folder / "few", {"a": 1, "b": 1})


def mostly_broken(folder):
    for number in range(8):
        (write_photos(folder / "broken", {"a": 4, "b": 4}) / "a" / f"{number}.jpg").write_bytes(b"")
    return folder / "broken"


def one_class(folder):
    return write_photos(folder / "one", {"a": 3})


def loose_files(folder):
    return write_photos(folder / "loose", {".": 3})


BAD = {
    "one image per class": (one_image_each, "one image per class is too few"),
    "mostly broken": (mostly_broken, "8 of 16 images in .* are unreadable, more than --max-bad-fraction 0.25"),
    "one class": (one_class, r"only one class \(a\)"),
    "no folders": (loose_files, "expected one sub-folder per class"),
    "nothing": (lambda folder: folder / "missing", "no such file or folder"),
    "no header": (csv_of("a.png,cat", "b.png,dog"), "must start with a line that names the columns file and label"),
    "wrong header": (csv_of("path,class", "a.png,cat"), "must start with a line that names the columns"),
    "outside": (csv_of("file,label", "a/../../b.png,cat"), "line 2: a/../../b.png is outside the folder"),
    "absolute": (csv_of("file,label", "/etc/passwd,cat"), "line 2: /etc/passwd is outside the folder"),
    "missing files": (csv_of("file,label", "a.png,a", "b.png,a", "c.png,b"), "none of the 3 images .* can be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(case, tmp_path, capsys):
    make, message = BAD[case]
    assert finetune(make(tmp_path), tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_bad_flags(photos, tmp_path, capsys):
    for flags, message in (
        (["--init", "nowhere"], "no model at nowhere"),
        (
            ["--model", "deit_tiny_patch16_224", "--img-size", "100"],
            "--img-size 100 is not a multiple of the model's patch size; 96 and 112 are",
        ),
        (["--freeze", "head"], "freeze must be body or a number of layers"),
        (["--batch-size", "64"], "fewer than one batch of 64"),
        ([*TINY, "--init", str(photos)], "is not a model folder"),
    ):
        assert main(["finetune", str(photos), "--output", str(tmp_path / "run"), *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "run").exists()


def test_ten_thousand_classes_in_a_csv(tmp_path, capsys):
    for number in range(4):
        write_image(tmp_path / f"{number}.png", number)
    rows = [f"{number % 4}.png,class {number // 2}" for number in range(20_000)]
    (tmp_path / "photos.csv").write_text("\n".join(["file,label", *rows]))
    short = ["--epoch-steps", "2", "--eval-images", "64"]
    assert finetune(tmp_path / "photos.csv", tmp_path / "run", *TINY, *short) == 0
    assert "20,000 images of 10,000 classes" in capsys.readouterr().out
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")["head.weight"].shape == (10_000, 16)


class Found:
    """What the settings depend on."""

    def __init__(self, images, side, classes=3):
        self.train, self.side = type("Images", (list,), {"class_names": ["x"] * classes})([None] * images), side


def test_settings_suit_the_data():
    small, large = (resolve({}, Found(1000, side), None, quick=False) for side in (8, 500))
    assert (small.img_size, small.model_args, small.hflip, small.auto_augment) == (8, {"patch_size": 2}, 0.0, "")
    assert (large.img_size, large.model_args, large.hflip) == (224, {}, 0.5) and large.auto_augment
    few = resolve({}, Found(10, 500), None, quick=False)
    assert few.batch_size == few.micro_batch == 2 and few.epochs > large.epochs
    trained = Initial({"model": "hgrn_deit_tiny", "model_args": SMALL, "img_size": 16, "crop_pct": 0.7}, {}, "")
    tuned = resolve({"epochs": 3}, Found(1000, 500), trained, quick=False)
    assert (tuned.img_size, tuned.crop_pct, tuned.layer_decay, tuned.epochs) == (16, 0.7, 0.75, 3)
    assert large.layer_decay is None and tuned.lr < large.lr and tuned.warmup_epochs < large.warmup_epochs < 5


@pytest.mark.parametrize("images", [50, 1000, 100_000])
def test_quick_is_five_minutes_of_arithmetic(images):
    config = resolve({}, Found(images, 500), None, quick=True)
    model = timm.create_model(config.model, img_size=config.img_size, **config.model_args)
    tokens = (config.img_size // model.patch_embed.patch_size[0]) ** 2
    # few tokens leave time for many steps, which new weights need most
    assert 36 <= tokens <= 64
    steps = config.epochs * min(config.epoch_steps or images, images // config.batch_size)
    flops = 6 * sum(p.numel() for p in model.parameters()) * tokens * steps * config.batch_size
    assert QUICK_FLOPS / 4 < flops < 1.05 * QUICK_FLOPS or config.epochs == 200
    assert config.img_size <= 112 and config.epochs >= 3 and config.warmup_epochs < config.epochs / 2


@pytest.mark.parametrize("side", [8, 16, 24, 40, 64, 90, 112, 500])
def test_quick_images_of_any_size_are_a_few_patches(side):
    config = resolve({}, Found(1000, side), None, quick=True)
    assert 16 <= (config.img_size // config.model_args["patch_size"]) ** 2 <= 64
    slow = resolve({}, Found(1000, side), None, quick=False)
    assert config.model_args["patch_size"] >= slow.model_args.get("patch_size", 14)


def test_help_fits_a_screen_and_has_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("finetune", "digits"):
        with pytest.raises(SystemExit, match="^0$"):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert len(text.splitlines()) <= 36 and f"example:  hgrn-vision {command}" in text


def test_a_demo_run_is_a_head_start(tmp_path, capsys):
    """A small model on the digits as PNG files; examples/finetune_digits.py shows it for the demo model."""
    small = ["--model-args", "patch_size=2", "embed_dim=32", "depth=2", "--lr", "0.005", "--device", "cpu"]
    assert main(["train", "--output", str(tmp_path / "demo"), *small, "--epochs", "5"]) == 0
    # and its last line names the next step
    assert re.search(r"hgrn_vision finetune PHOTOS --output \S+ \(one folder per class", capsys.readouterr().out)
    assert main(["digits", str(tmp_path / "images")]) == 0
    few_steps = ["--epochs", "1", "--epoch-steps", "15", "--device", "cpu", "--lr", "0.005"]
    reached = {}
    for start in (["--init", str(tmp_path / "demo")], ["--model", "hgrn_deit_tiny", *small, "--img-size", "8"]):
        output = tmp_path / start[0]
        assert main(["finetune", str(tmp_path / "images"), "--output", str(output), *few_steps, *start]) == 0
        with open(output / "log.csv", newline="") as file:
            reached[start[0]] = float(next(csv.DictReader(file))["val_top1"])
    assert reached["--init"] > reached["--model"] + 20, reached


def outcome(status="finished", **progress):
    rows = [{"epoch": 3, "val_top1": 87.654, "val_top5": 99.0}]
    return Outcome(status, Path("my run"), Progress(**{"epoch": 4, "history": rows, **progress}), "SIGTERM")


def test_what_is_said_at_the_end(photos, capsys):
    config = TrainConfig(data=f"{photos}/", holdout=0.2, epochs=4)
    splits = open_splits(config)
    _show_outcome(outcome(), config, *splits)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "finished: top-1 87.65, top-5 99.00 on 3 validation images (epoch 3)"
    assert lines[2] == f"evaluate: hgrn-vision evaluate 'my run' {photos} --holdout 0.2"
    best = {"epoch": 1, "val_top1": 90.0, "val_top5": 95.0}
    _show_outcome(outcome(epoch=2, best=best), replace(config, eval_images=2), *splits)
    words = "top-1 90.00, top-5 95.00 on 2 validation images (epoch 1), ended after 2 of 4 epochs"
    assert words in capsys.readouterr().out
    # a separate folder of validation images needs no --holdout
    _show_outcome(outcome("finished before"), config, splits[0], open_splits(TrainConfig())[1])
    said = capsys.readouterr().out
    assert "--holdout" not in said and "predict:  hgrn-vision predict 'my run' IMAGE" in said
    assert "again:    rm -r 'my run' first" in said
    _show_outcome(outcome("stopped", updates=7), config, *splits)
    assert capsys.readouterr().out == "stopped at step 7 (SIGTERM); the same command continues\n"


def test_what_is_said_at_the_beginning():
    initial, config = Initial({}, {}, "the model"), TrainConfig(img_size=32)
    said = "Starting from the model with a new head; {}. Image size: 32 pixels."
    assert _beginning(initial, config, "x") == said.format("the whole model is trained")
    assert _beginning(initial, replace(config, freeze="body"), "x") == said.format("only the head is trained")
    assert _beginning(initial, replace(config, freeze="3"), "x") == said.format("its first 3 layers are frozen")
    assert _beginning(initial, config, None).endswith("--init none would train from scratch.")
    assert _beginning(None, config, "none").startswith("Starting from scratch (--init none): ")


def test_a_quarter_of_the_images_may_be_unreadable():
    bad = [SimpleNamespace(name="a.png", reason="empty file")] * 2
    _check_readable(SimpleNamespace(bad=bad, looked_at=8, where="here"), 0.25)
    with pytest.raises(ValueError, match="2 of 7 images in here .* 0.25; the first is a.png: empty file"):
        _check_readable(SimpleNamespace(bad=bad, looked_at=7, where="here"), 0.25)


def test_given_settings_override_those_that_suit_the_data():
    given = {"epochs": 3, "lr": 0.125, "holdout": 0.5, "batch_size": 4, "warmup_epochs": 2.0, "model_args": SMALL}
    for quick in (False, True):
        config = resolve({**given, "img_size": 16}, Found(1000, 500), None, quick)
        assert {name: getattr(config, name) for name in given} == given and config.img_size == 16
    assert resolve({}, Found(1000, 500), None, quick=False).holdout == 0.2
    # a trained model's image size is reduced to what --quick allows
    trained = Initial({"model": "hgrn_deit_tiny", "model_args": {}, "img_size": 224}, {}, "")
    assert [resolve({}, Found(1000, 500), trained, quick).img_size for quick in (False, True)] == [224, 112]

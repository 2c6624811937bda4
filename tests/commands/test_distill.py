"""`hgrn-vision distill` from end to end, on made-up photographs and tiny models of both formats."""

import csv
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from launcher import Launcher
from photographs import scene, write_scenes
from saved_models import CLASSES, save_model

from hgrn_vision.cli import build_parser, main
from hgrn_vision.commands import distill
from hgrn_vision.train.checkpoint import read
from hgrn_vision.train.config import TrainConfig, read_yaml
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.observer import Outcome
from hgrn_vision.train.recipes import DISTILL

pytest.importorskip("onnxruntime")
# with everything switched on that could make a resumed run differ
TINY = shlex.split(
    "--model-args patch_size=4 embed_dim=16 depth=2 --img-size 12 --first-sizes 8x1 --epochs 3 --epoch-steps 4 "
    "--batch-size 8 --micro-batch 4 --mixup 0.5 --cutmix 0.5 --ema 0.9 --drop-path 0.2 --holdout 0.2 --device cpu "
    "--threads 1 --workers 1 --warmup-epochs 0"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photographs in two folders, labelled images, and one teacher in both formats."""
    folder = tmp_path_factory.mktemp("distill")
    write_scenes(folder / "photos" / "holiday" / "day 1", range(30))
    write_scenes(folder / "more", range(30, 50))
    (folder / "more" / "broken.jpg").write_bytes(b"no image")
    save_model(folder / "teacher")
    assert main(["export", str(folder / "teacher"), "--output", str(folder / "teacher.onnx")]) == 0
    for number, name in enumerate(CLASSES):
        (folder / "val" / name).mkdir(parents=True)
        for seed in range(100 + 5 * number, 105 + 5 * number):
            scene(seed).save(folder / "val" / name / f"{seed}.png")
    torch.onnx.export(torch.nn.Linear(3, 2), (torch.zeros(1, 3),), folder / "flat.onnx", dynamo=False)
    torch.onnx.export(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.Flatten()),
        (torch.zeros(1, 3, 8, 8),),
        folder / "unnamed.onnx",
        dynamo=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
    )
    torch.onnx.export(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()),
        (torch.zeros(1, 3, 8, 8),),
        folder / "wide.onnx",
        dynamo=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_axes={"images": {0: "batch", 2: "height", 3: "width"}, "logits": {0: "batch"}},
    )
    return folder


@pytest.fixture(scope="module")
def launch(place):
    launcher = Launcher(place, "distill")
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def finished(place, launch):
    """A function that runs a command to its end, once for all tests that inspect its output."""
    outputs = {}

    def run(name, *arguments):
        if name not in outputs:
            code, outputs[name] = launch.run(*arguments, "--output", place / name)
            assert code == 0, outputs[name]
        return place / name, outputs[name]

    return run


def labelled(teacher):
    return ["photos", "more", "--teacher", teacher, "--val", "val", *TINY, "--save-steps", 1]


UNLABELLED = ["photos", "more", "--teacher", "teacher.onnx", *TINY, "--epochs", 2, "--epoch-steps", 2]


def log(run):
    with open(run / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_same_run(got, want):
    for name in ("last", "best"):
        one, other = (read(run / "checkpoints" / f"{name}.safetensors") for run in (got, want))
        for part in ("model", "ema"):
            for key, tensor in getattr(other, part).items():
                assert torch.equal(getattr(one, part)[key], tensor), f"{name} {part} {key} differs"


@pytest.mark.parametrize("teacher", ["teacher", "teacher.onnx"])
def test_killed_and_resumed_it_ends_in_the_same_weights(place, launch, finished, teacher):
    killed = place / f"killed-{teacher}"
    whole, output = finished(f"whole-{teacher}", *labelled(teacher))
    assert "excluded: 1 unreadable photographs, 0 that look like" in output
    # between the two renames of a save
    moment = (signal.SIGKILL, "os.replace", "/last.safetensors", 4)
    code, output = launch.run(*labelled(teacher), "--output", killed, moment=moment)
    assert code == -signal.SIGKILL, output
    code, output = launch.run(*labelled(teacher), "--output", killed)
    assert code == 0 and "continuing after step" in output
    assert_same_run(killed, whole)
    assert [row["agreement"] for row in log(killed)] == [row["agreement"] for row in log(whole)]


def viewed(*more):
    flags = ["--views", 2, "--mixup", 0, "--cutmix", 0, "--save-steps", 1, *more]
    return ["photos", "more", "--teacher", "teacher.onnx", *TINY, *flags]


def test_answers_to_views_are_kept_and_a_killed_run_ends_in_the_same_weights(place, launch, finished):
    killed = place / "killed-views"
    whole, _ = finished("whole-views", *viewed("--cache", place / "cache-1"))
    arguments = [*viewed("--cache", place / "cache-2"), "--output", killed]
    code, output = launch.run(*arguments, moment=(signal.SIGKILL, "os.replace", "/last.safetensors", 6))
    assert code == -signal.SIGKILL, output
    # there are 50 photographs with two views each; 5 steps of 8 images ask about 40 at most
    (kept,) = (place / "cache-2").glob("*.answers")
    checksums = np.fromfile(kept, np.uint32, 100)
    assert 20 <= (checksums != 0).sum() <= 40
    code, output = launch.run(*arguments)
    assert code == 0 and "continuing after step" in output
    assert_same_run(killed, whole)
    (other,) = (place / "cache-1").glob("*.answers")
    assert kept.name == other.name and kept.read_bytes() == other.read_bytes()


def test_two_ranks_keep_the_answers_of_one(place, launch, finished):
    one, two = finished("whole-views", *viewed("--cache", place / "cache-1"))[0], place / "two-views"
    ranks = launch.start_ranks(2, *viewed("--cache", place / "cache-3"), "--output", two)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output
    for a, b in zip(log(one), log(two), strict=True):
        assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), rel=1e-4)
    files = [next((place / cache).glob("*.answers")) for cache in ("cache-1", "cache-3")]
    assert len({file.name for file in files}) == 1 and files[0].read_bytes() == files[1].read_bytes()


def test_two_ranks_see_what_one_sees(place, launch, finished):
    one, two = finished("one", *UNLABELLED)[0], place / "two"
    ranks = launch.start_ranks(2, *UNLABELLED, "--output", two)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output
    for a, b in zip(log(one), log(two), strict=True):
        assert float(a["train_loss"]) == pytest.approx(float(b["train_loss"]), rel=1e-4)


def test_a_run_knows_its_teacher_and_its_classes(place, finished):
    run, _ = finished("whole-teacher.onnx", *labelled("teacher.onnx"))
    assert read_yaml(run / "config.yaml")["teacher"] == "teacher.onnx"
    last = read(run / "checkpoints" / "last.safetensors")
    assert last.class_names == CLASSES and last.train_images == 40
    assert "broken.jpg" in (run / "bad_images.csv").read_text()
    assert (run / "report.html").exists()
    rows = log(run)
    assert len(rows) == 3
    # 15 labelled images, 10 held-out photographs
    assert all(
        float(row["val_top1"]) * 15 / 100 == pytest.approx(round(float(row["val_top1"]) * 15 / 100)) for row in rows
    )
    assert all(float(row["agreement"]) / 10 == pytest.approx(round(float(row["agreement"]) / 10)) for row in rows)
    assert main(["predict", str(run), str(place / "more" / "30.png")]) == 0


def test_it_learns_to_agree_with_its_teacher(place, launch, capsys):
    settings = shlex.split(
        "--model-args patch_size=4 embed_dim=32 depth=2 --img-size 16 --epochs 25 --batch-size 10 --micro-batch 10 "
        "--lr 5e-3 --scale 0.6 1 --holdout 0.4 --device cpu --threads 1 --workers 0 --ema 0.9 --warmup-epochs 1"
    )
    code, output = launch.run("photos", "more", "--teacher", "teacher", "--output", "learns", *settings)
    assert code == 0, output
    losses = [float(row["train_loss"]) for row in log(place / "learns")]
    assert losses[-1] < 0.5 * losses[0]
    answers = read(place / "learns" / "checkpoints" / "best.safetensors").progress["best"]
    assert answers["agreement"] > 60


def test_without_val_the_agreement_is_what_counts(finished):
    rows = log(finished("one", *UNLABELLED)[0])
    assert len(rows) == 2 and all(row["agreement"] == row["val_top1"] for row in rows)


def test_photographs_that_look_like_validation_images_are_listed(place, launch):
    shutil.copytree(place / "val" / CLASSES[0], place / "copies")
    code, output = launch.run(
        "photos", "copies", "--teacher", "teacher", "--val", "val", "--output", "copies-run", *TINY, "--epochs", 2
    )
    assert code == 0, output
    assert "5 that look like validation images" in output
    with open(place / "copies-run" / "near_duplicates.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert sorted(row["photograph"] for row in found) == [f"copies/{seed}.png" for seed in range(100, 105)]
    assert read(place / "copies-run" / "checkpoints" / "last.safetensors").train_images == 24


def test_features_files_without_a_pack_and_few_images_to_validate_on(place, launch):
    arguments = ["photos", "more", "--teacher", "teacher", "--val", "val", *TINY, "--distill", "both", "--pack", 0]
    code, output = launch.run(*arguments, "--output", "features", "--epochs", 2, "--epoch-steps", 2, "--eval-images", 4)
    assert code == 0, output
    assert "4 validation images" in output
    assert {row["agreement"] for row in log(place / "features")} <= {"0.0", "25.0", "50.0", "75.0", "100.0"}
    checkpoint = read(place / "features" / "checkpoints" / "last.safetensors")
    assert checkpoint.projection["weight"].shape == (32, 16, 1, 1)
    assert "broken.jpg" in (place / "features" / "bad_images.csv").read_text()


def test_a_student_may_begin_with_its_published_weights(place, launch):
    settings = "--pretrained --img-size 28 --lr 0 --warmup-lr 0 --min-lr 0 --warmup-epochs 0 --epochs 1 --epoch-steps 1"
    settings += " --batch-size 2 --micro-batch 2 --ema 0 --holdout 0.2 --device cpu --threads 1 --workers 0"
    command = ["photos", "--teacher", "teacher", *settings.split(), "--output", place / "published"]
    code, printed = launch.run(*command)
    assert code == 0, printed
    ours = read(place / "published" / "checkpoints" / "last.safetensors").model
    published = timm.create_model("hgrn_deit_tiny", pretrained=True).state_dict()
    assert ours["head.weight"].shape == (len(CLASSES), 192)
    for name in set(published) - {"head.weight", "head.bias"}:
        assert torch.equal(ours[name], published[name]), name


def test_sizes_grow(place, launch, monkeypatch):
    import hgrn_vision.train.engine as engine

    seen = []
    original = engine.resize
    monkeypatch.setattr(engine, "resize", lambda images, size: seen.append(tuple(size)) or original(images, size))
    monkeypatch.chdir(place)
    assert main([str(a) for a in ["distill", "photos", "--teacher", "teacher", "--output", "grows", *TINY]]) == 0
    steps = 3 * 2  # 24 photographs in batches of 8, two micro-batches each
    assert seen == [(8, 8)] * steps + [(12, 12)] * 2 * steps


BAD = [
    (["empty", "--teacher", "teacher"], "no images in empty"),
    (["nowhere", "--teacher", "teacher"], "no such folder: nowhere"),
    (["photos", "--teacher", "no_such"], "cannot create teacher no_such"),
    (["photos", "--teacher", "unnamed.onnx"], "teacher unnamed.onnx does not name its classes: give --classes"),
    (["photos", "--teacher", "flat.onnx"], "the input of flat.onnx is not an image"),
    (["photos", "--teacher", "wide.onnx", "--teacher-size", "4"], "wide.onnx does not run on images of 3x4x4"),
    (
        ["photos", "--teacher", "teacher", "--val", "photos"],
        "no folder in photos is named after a class of the teacher",
    ),
    (["photos", "--teacher", "teacher", "--val", "nowhere"], "no such folder: nowhere"),
    (["photos", "--teacher", "teacher", "--first-sizes", "56by8"], "first_sizes must be SIDExEPOCHS"),
    (["photos", "--teacher", "teacher", "--first-sizes", "8x3"], "first_sizes takes 3 epochs, leaving none of the 3"),
    (["photos", "--teacher", "teacher", "--output", "val"], "val is not empty and is not a run"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line_before_training(place, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(place)
    (place / "empty").mkdir(exist_ok=True)
    output = [] if "--output" in arguments else ["--output", "bad"]
    assert main(["distill", arguments[0], *TINY, *arguments[1:], *output]) == 2
    # what a runtime writes from outside Python counts too
    error = capfd.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (place / "bad" / "checkpoints").exists()


def test_class_names_from_a_file(place, launch):
    (place / "names.txt").write_text("one\ntwo\nthree\nfour\n")
    arguments = ["photos", "--teacher", "unnamed.onnx", "--classes", "names.txt", *TINY, "--epochs", 2]
    code, output = launch.run(*arguments, "--output", "named")
    assert code == 0, output
    assert read(place / "named" / "checkpoints" / "last.safetensors").class_names == ["one", "two", "three", "four"]


def test_settings_of_photographs(place):
    args = build_parser("distill").parse_args(
        ["distill", "a", "b", "--teacher", "t", "--output", str(place / "x"), "--val", "v", "--img-size", "98"]
    )
    config = distill.resolve(args)
    assert (config.photos, config.val, config.teacher) == (("a", "b"), "v", "t")
    assert (config.pack, config.cache) == (112, str(place / "photo-cache"))
    args = build_parser("distill").parse_args(
        ["distill", "a", "--teacher", "t", "--output", "x", "--teacher-size", "128", "--cache", "c", "--pack", "64"]
    )
    assert (distill.resolve(args).pack, distill.resolve(args).cache) == (64, "c")
    # somewhat larger than what either model sees, to leave a margin for crops
    args = build_parser("distill").parse_args(
        ["distill", "a", "--teacher", "t", "--output", "x", "--img-size", "84", "--teacher-size", "224"]
    )
    assert distill.resolve(args).pack == 256


@pytest.mark.parametrize("batch, parts", [(512, 64), (96, 48), (32, 32)])
def test_a_batch_is_split_evenly_whatever_its_size(batch, parts):
    given = ["distill", "a", "--teacher", "t", "--output", "x", "--batch-size", str(batch)]
    assert distill.resolve(build_parser("distill").parse_args(given)).micro_batch == parts
    given += ["--micro-batch", "16"]
    assert distill.resolve(build_parser("distill").parse_args(given)).micro_batch == 16


def test_flags_go_before_the_file_and_the_file_before_the_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 0.5\nepochs: 7\ncache: there\n")
    given = ["distill", "a", "--teacher", "t", "--output", "x", "--config", str(tmp_path / "mine.yaml"), "--lr", "0.7"]
    config = distill.resolve(build_parser("distill").parse_args(given))
    assert (config.lr, config.epochs, config.cache, config.recipe) == (0.7, 7, "there", "distill")
    assert config.batch_size == DISTILL.settings["batch_size"]


def test_what_is_said_at_the_end(capsys):
    row = {"epoch": 3, "agreement": 71.0, "val_top1": 40.0}
    for val, status, said in (
        ("", "finished", "finished: agreement with the teacher 71.00 (epoch 3)"),
        ("val", "finished before", "finished before: agreement with the teacher 71.00, top-1 40.00 on val (epoch 3)"),
        ("", "stopped", "stopped at step 9 (SIGINT); the same command continues"),
    ):
        progress = Progress(updates=9, best=row, history=[{**row, "epoch": 4}])
        distill._show_outcome(Outcome(status, Path("my run"), progress, "SIGINT"), TrainConfig(val=val))
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == said and (len(lines) == 1) == (status == "stopped")
        assert status == "stopped" or "hgrn-vision publish 'my run' FOLDER" in lines[-1]


def test_help_names_the_defaults_of_the_recipe():
    settings = vars(TrainConfig()) | DISTILL.settings
    named = {name: re.search(r"\[([\d.]+(e-\d+)?)\]$", text) for name, text in distill.SHOWN.items()}
    named = {name: float(found[1]) for name, found in named.items() if found}
    assert named == {name: settings[name] for name in named} and len(named) >= 6

"""A run and its folder: stopping and continuing, what it leaves behind, what it refuses."""

import csv
import logging
import os
import signal
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from training import SMALL, digits

from hgrn_vision.data.batches import BadRecord
from hgrn_vision.data.spec import DataSpec
from hgrn_vision.train import run
from hgrn_vision.train.build import build_model
from hgrn_vision.train.checkpoint import read
from hgrn_vision.train.config import from_mapping, read_yaml
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.evaluation import Evaluation, score
from hgrn_vision.train.observer import Observer
from hgrn_vision.train.run import Run, train
from hgrn_vision.train.run_folder import COLUMNS, BadImages


def log(output: Path) -> list[dict[str, str]]:
    with open(output / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Steps(Observer):
    """Records losses, and sends this process a signal after a step."""

    def __init__(self, stop_after: int = 0, number: int = signal.SIGTERM) -> None:
        self.losses: dict[int, float] = {}
        self.stop_after, self.number = stop_after, number

    def stepped(self, progress, loss, lr):
        self.losses[progress.updates] = loss
        if progress.updates == self.stop_after:
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with averaged weights: (config, folder)."""
    config = digits(ema=0.9, drop_path=0.1)
    output = tmp_path_factory.mktemp("finished") / "run"
    outcome = train(config, output, command="python train_imagenet.py --that")
    assert outcome.status == "finished"
    return config, output


def test_every_signal_stops_after_the_step_and_the_run_continues_exactly(tmp_path):
    config = digits(ema=0.9, drop_path=0.3, mixup=0.8, repeats=3, epochs=3, epoch_steps=4)
    whole, parts = Steps(), Steps()
    train(config, tmp_path / "whole", observer=whole)
    for after, number in [(1, signal.SIGTERM), (5, signal.SIGINT), (9, signal.SIGUSR1)]:
        observer = Steps(after, number)
        outcome = train(config, tmp_path / "parts", observer=observer)
        # the signal arrives after the step is over, so the run finishes the next one
        assert (outcome.status, outcome.signal) == ("stopped", signal.Signals(number).name)
        assert outcome.progress.updates == after + 1
        parts.losses |= observer.losses
    last = Steps()
    assert train(config, tmp_path / "parts", observer=last).status == "finished"
    assert parts.losses | last.losses == whole.losses
    got, want = (read(tmp_path / name / "checkpoints" / "last.safetensors") for name in ("parts", "whole"))
    for part in ("model", "ema"):
        for name, tensor in getattr(want, part).items():
            assert torch.equal(getattr(got, part)[name], tensor), f"{part} {name}"
    assert [row["step"] for row in log(tmp_path / "parts")] == ["4", "8", "12"]


def test_patience_ends_a_run_that_gets_no_better(tmp_path):
    config = digits(lr=0.0, warmup_lr=0.0, min_lr=0.0, epochs=9, epoch_steps=1, patience=2)
    assert train(config, tmp_path / "run").status == "finished"
    assert [row["epoch"] for row in log(tmp_path / "run")] == ["1", "2", "3"]
    assert (tmp_path / "run" / "report.html").exists()
    assert train(config, tmp_path / "run").status == "finished before"
    longer = train(replace(config, patience=3), tmp_path / "run", allow_change=True)
    assert (longer.status, longer.progress.epoch) == ("finished", 4)


def test_first_weights_are_for_new_runs_only(tmp_path):
    config = digits(lr=0.0, warmup_lr=0.0, min_lr=0.0, epochs=1, epoch_steps=1)
    first, other = (build_model(replace(config, seed=seed), 10).state_dict() for seed in (1, 2))
    train(config, tmp_path / "run", weights=first)
    train(replace(config, epochs=2), tmp_path / "run", allow_change=True, weights=other)
    model = read(tmp_path / "run" / "checkpoints" / "last.safetensors").model
    assert all(torch.equal(tensor, first[name]) for name, tensor in model.items() if not name.startswith("head."))


def test_signals_are_given_back_after_a_run(finished):
    config, output = finished
    before = signal.getsignal(signal.SIGTERM)
    train(config, output)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_folder_of_a_run(finished):
    config, output = finished
    assert {path.name for path in output.iterdir()} == {"config.yaml", "log.csv", "checkpoints", "model", "report.html"}
    assert tuple(log(output)[0]) == tuple(name for name in COLUMNS if name != "agreement")
    assert from_mapping(read_yaml(output / "config.yaml")) == config
    text = (output / "config.yaml").read_text()
    assert "commit: " in text and f"torch: {torch.__version__.split('+')[0]}" in text
    report = (output / "report.html").read_text()
    assert "python train_imagenet.py --that" in report
    assert "http://" not in report.replace("http://www.w3.org", "") and "<script src" not in report


def test_the_model_folder_holds_the_best_averaged_weights(finished):
    config, output = finished
    model = timm.create_model(f"local-dir:{output / 'model'}", pretrained=True).eval()
    best = read(output / "checkpoints" / "best.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, best.ema[name]), name
    cfg = model.pretrained_cfg
    assert cfg["label_names"] == [str(digit) for digit in range(10)] == best.class_names
    assert tuple(cfg["input_size"]) == (3, 8, 8) and cfg["crop_pct"] == 1.0
    assert len(model.blocks) == SMALL["depth"] and model.patch_embed.patch_size == (2, 2)


def test_score_is_the_logs_best(finished):
    _, output = finished
    result = score(output, {})
    best = max(log(output), key=lambda row: float(row["val_top1"]))
    assert result.evaluation.top1 == float(best["val_top1"])
    assert result.evaluation.loss == float(best["val_loss"])
    # half of the run's images, requested by a flag
    assert score(output / "checkpoints" / "last.safetensors", {"eval_images": 32}).evaluation.images == 32


def test_a_finished_run_changes_nothing(finished):
    config, output = finished
    before = files(output)
    outcome = train(config, output, command="python train_imagenet.py --that")
    assert outcome.status == "finished before"
    assert outcome.progress.best["val_top1"] == max(float(row["val_top1"]) for row in log(output))
    assert files(output) == before


def test_a_finished_run_without_its_report_writes_it_again(finished):
    config, output = finished
    (output / "report.html").unlink()
    assert train(config, output, command="python train_imagenet.py --that").status == "finished before"
    assert (output / "report.html").exists()


def test_changed_recipe_is_refused_and_changes_nothing(finished):
    config, output = finished
    before = files(output)
    with pytest.raises(ValueError, match=r"different settings: lr 0.001 -> 0.5, betas .*--allow-change"):
        train(replace(config, lr=0.5, betas=(0.1, 0.2)), output)
    with pytest.raises(ValueError, match=r"training images 1438 -> 899"):
        train(replace(config, holdout=0.5), output, allow_change=False)
    assert files(output) == before


def test_machine_settings_may_change_and_the_recipe_when_allowed(tmp_path, caplog):
    config = digits()
    train(config, tmp_path, observer=Steps(1))
    assert train(replace(config, workers=1, save_steps=1), tmp_path, observer=Steps(3)).status == "stopped"
    with caplog.at_level(logging.WARNING):
        outcome = train(replace(config, epochs=3, lr=0.01), tmp_path, allow_change=True)
    assert "epochs 2 -> 3, lr 0.001 -> 0.01" in caplog.text
    assert outcome.status == "finished" and len(log(tmp_path)) == 3
    # the schedule is the new one
    assert float(log(tmp_path)[1]["lr"]) > 0.001


def test_another_batch_size_starts_the_epoch_again(tmp_path, caplog):
    config = digits(epoch_steps=6)
    train(config, tmp_path, observer=Steps(8))
    with caplog.at_level(logging.WARNING):
        train(replace(config, batch_size=96, epoch_steps=4), tmp_path, allow_change=True)
    assert "epoch 2 starts over" in caplog.text
    assert [row["step"] for row in log(tmp_path)] == ["6", "8"]


def test_a_model_that_does_not_fit_the_checkpoint_is_one_line(finished):
    config, output = finished
    with pytest.raises(ValueError, match="does not fit these settings"):
        train(replace(config, model_args={**SMALL, "embed_dim": 24}), output, allow_change=True)


def test_the_best_is_never_replaced_by_a_worse_one(tmp_path, monkeypatch):
    """Top-1 rises and falls; the run is stopped and continued in between."""
    scores = iter([30.0, 70.0, 50.0, 60.0, 65.0])
    monkeypatch.setattr(Evaluation, "top1", property(lambda self: next(scores)))
    config = digits(epochs=4, epoch_steps=1)
    train(config, tmp_path, observer=Steps(2))
    train(config, tmp_path)
    best = read(tmp_path / "checkpoints" / "best.safetensors")
    assert best.progress["best"]["val_top1"] == 70.0 and best.progress["epoch"] == 2
    assert [float(row["val_top1"]) for row in log(tmp_path)] == [30, 70, 50, 60]


def test_a_best_that_is_ahead_of_the_last_checkpoint_is_kept(tmp_path, monkeypatch):
    """As if killed between writing the two: the repeated epoch is worse, perhaps because the machine is another."""
    scores = iter([30.0, 70.0, 50.0])
    monkeypatch.setattr(Evaluation, "top1", property(lambda self: next(scores, 20.0)))
    config = digits(epochs=2, epoch_steps=1)
    train(config, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    os.replace(checkpoints / "previous.safetensors", checkpoints / "last.safetensors")
    assert train(config, tmp_path).progress.best["val_top1"] == 70.0
    assert read(checkpoints / "best.safetensors").progress["best"]["val_top1"] == 70.0


def assert_model_is_the_best(output: Path) -> None:
    best, exported = (
        read(output / "checkpoints" / "best.safetensors"),
        load_file(output / "model" / "model.safetensors"),
    )
    assert exported.keys() == best.weights().keys()
    for name, tensor in best.weights().items():
        assert torch.equal(exported[name], tensor), f"{name} is not the best checkpoint's"


class Killed(BaseException):
    """Stands for SIGKILL: the run does not handle it."""


@pytest.mark.parametrize("epochs, again", [(2, "finished before"), (3, "finished")])
def test_a_kill_after_the_best_checkpoint_leaves_no_old_model(tmp_path, monkeypatch, epochs, again):
    scores = iter([30.0, 70.0])
    monkeypatch.setattr(Evaluation, "top1", property(lambda self: next(scores, 20.0)))
    whole = Run._write_epoch

    def write_epoch(self, best):
        if self.progress.epoch == 2:
            raise Killed
        whole(self, best)

    config = digits(epochs=epochs, epoch_steps=1, ema=0.9)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "_write_epoch", write_epoch)
        train(config, tmp_path)
    with pytest.raises(AssertionError, match="is not the best checkpoint's"):
        assert_model_is_the_best(tmp_path)
    assert train(config, tmp_path).status == again
    assert_model_is_the_best(tmp_path)


def test_a_run_that_finished_before_mends_its_model(tmp_path):
    config = digits(epochs=1, epoch_steps=1)
    train(config, tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    assert train(config, tmp_path).status == "finished before"
    assert_model_is_the_best(tmp_path)
    path.write_bytes(b"half of a file")
    train(config, tmp_path)
    assert_model_is_the_best(tmp_path)


def test_a_tie_after_a_replayed_epoch_leaves_no_old_model(tmp_path, monkeypatch):
    """Killed between best and last: the repeated epoch is as good as the best, so it is not a new best."""
    scores = iter([30.0, 70.0, 20.0, 70.0])
    monkeypatch.setattr(Evaluation, "top1", property(lambda self: next(scores, 20.0)))
    config = digits(epochs=2, epoch_steps=1)
    train(config, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    os.replace(checkpoints / "previous.safetensors", checkpoints / "last.safetensors")
    path = tmp_path / "model" / "model.safetensors"
    save_file(read(checkpoints / "last.safetensors").weights(), path)
    train(config, tmp_path)
    assert_model_is_the_best(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_checkpoint_costs_steps_but_not_the_result(tmp_path, damage, caplog, finished):
    config, whole = finished
    train(replace(config, save_steps=1), tmp_path, observer=Steps(4))
    path = tmp_path / "checkpoints" / "last.safetensors"
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"cut": data[:middle], "empty": b"", "flipped": flipped}[damage])
    with caplog.at_level(logging.WARNING):
        train(config, tmp_path)
    assert "continuing from" in caplog.text
    got, want = (read(folder / "checkpoints" / "last.safetensors").model for folder in (tmp_path, whole))
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_rolling_back_replays_with_other_randomness_and_resumes_exactly(tmp_path, monkeypatch):
    """The loss becomes NaN in steps 3 to 5 until the run has gone back once."""
    from hgrn_vision.train.engine import Engine

    whole = Engine._backward

    def backward(self, batch, count, last):
        loss = whole(self, batch, count, last)
        bad = self.progress.rollbacks == 0 and 2 <= self.progress.updates <= 4
        return loss * float("nan") if bad else loss

    monkeypatch.setattr(Engine, "_backward", backward)
    config = digits(mixup=0.8, epochs=1, epoch_steps=8, save_steps=1)
    calm, rolled, parts = Steps(), Steps(), Steps()
    outcome = train(config, tmp_path / "rolled", observer=rolled)
    assert (outcome.progress.rollbacks, outcome.progress.skipped) == (1, 3)
    assert outcome.progress.updates == 8
    train(config, tmp_path / "parts", observer=Steps(1))
    stopped = Steps(6)
    train(config, tmp_path / "parts", observer=stopped)
    train(config, tmp_path / "parts", observer=parts)
    assert {**stopped.losses, **parts.losses}.items() <= rolled.losses.items()
    monkeypatch.setattr(Engine, "_backward", whole)
    train(config, tmp_path / "calm", observer=calm)
    assert calm.losses[1] == rolled.losses[1] and calm.losses[3] != rolled.losses[3]


@pytest.fixture
def photos(tmp_path):
    """Two classes of 40 and 12 images of noise with a tint, some broken or odd."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for split, count in (("train", 40), ("val", 12)):
        for number, name in enumerate(("blue", "red")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                pixels[..., 2 * (1 - number)] //= 2
                Image.fromarray(pixels).save(folder / f"{i}.png")
    (root / "train" / "red" / "3.png").write_bytes((root / "train" / "red" / "3.png").read_bytes()[:200])
    (root / "train" / "blue" / "note.jpg").write_text("not an image")
    (root / "val" / "red" / "5.png").write_bytes(b"")
    Image.new("RGBA", (9, 30), (255, 0, 0, 40)).save(root / "train" / "red" / "odd.png")
    return root


def photo_config(photos: Path, **settings):
    shape = {"data": str(photos), "recipe": "paper", "batch_size": 16, "micro_batch": 8, "scale": (0.5, 1.0)}
    return digits(**{**shape, "holdout": 0.0, "epoch_steps": 5, "max_bad_fraction": 0.1, **settings})


def test_unreadable_images_are_listed_replaced_and_left_out(photos, tmp_path):
    outcome = train(photo_config(photos), tmp_path / "run")
    with open(tmp_path / "run" / "bad_images.csv", newline="") as file:
        bad = {(row["split"], row["name"]): row["reason"] for row in csv.DictReader(file)}
    assert set(bad) == {("train", "red/3.png"), ("train", "blue/note.jpg"), ("validation", "red/5.png")}
    assert all(bad.values())
    result = score(tmp_path / "run", {})
    assert (result.evaluation.images, [record.name for record in result.evaluation.bad]) == (23, ["red/5.png"])
    assert result.evaluation.top1 == outcome.progress.best["val_top1"]


def test_too_many_unreadable_images_end_the_run(photos, tmp_path):
    for i in range(10, 30):
        (photos / "train" / "blue" / f"{i}.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"of 82 train images are unreadable, more than --max-bad-fraction 0.1; .*csv"):
        train(photo_config(photos), tmp_path / "run")
    assert (tmp_path / "run" / "bad_images.csv").exists()
    # and again, although the list is no longer new
    with pytest.raises(ValueError, match="unreadable"):
        train(photo_config(photos), tmp_path / "run")


def test_other_classes_under_the_same_run_are_refused(photos, tmp_path):
    config = photo_config(photos, epoch_steps=1, epochs=1)
    train(config, tmp_path / "run")
    for split in ("train", "val"):
        (photos / split / "red").rename(photos / split / "green")
    with pytest.raises(ValueError, match="trained on different classes"):
        train(config, tmp_path / "run")


def test_evaluation_matches_classes_by_name(photos, tmp_path):
    """A validation folder without the first class must not shift the labels of the second."""
    train(photo_config(photos, epochs=1), tmp_path / "run")
    every = score(tmp_path / "run", {}).evaluation
    for path in (photos / "val" / "blue").iterdir():
        path.unlink()
    red = score(tmp_path / "run", {}).evaluation
    assert (red.targets == 1).all()
    assert (red.predictions == every.predictions[every.targets == 1]).all()


def test_trackers_get_every_step_and_epoch(tmp_path, monkeypatch):
    seen = []

    class Writer:
        def __init__(self, folder, purge_step):
            seen.append(("open", purge_step))

        def add_scalar(self, name, value, step):
            seen.append((name, step))

        def close(self):
            seen.append(("close", None))

    class Wandb:
        @staticmethod
        def init(**options):
            seen.append((options["project"], options["resume"]))
            return types.SimpleNamespace(
                log=lambda numbers, step: seen.append((len(numbers), step)), finish=lambda: None
            )

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    config = digits(tensorboard=True, wandb="project", epochs=1)
    train(config, tmp_path, observer=Steps(1))
    train(config, tmp_path)
    assert [step for name, step in seen if name == "step/loss"] == [1, 2, 3]
    assert [step for name, step in seen if name == "epoch/val_top1"] == [3]
    assert [step for name, step in seen if name == "open"] == [0, 2]
    assert ("project", "allow") in seen and (2, 1) in seen and (len(log(tmp_path)[0]), 3) in seen
    assert seen.count(("close", None)) == 2


@pytest.mark.parametrize(
    "seconds, settings, saves",
    [
        # one at the start and one at the end of the epoch in any case
        (0, {}, [0, 6]),
        (0, {"save_steps": 2}, [0, 2, 4, 6]),
        (20, {"save_minutes": 0.5}, [0, 3, 6]),
        (0, {"save_minutes": 0.5}, [0, 6]),
        # a minute of training is saved before any evaluation, even the last one
        (12, {}, [0, 6]),
        (13, {}, [0, 6, 6]),
    ],
)
def test_saves_by_steps_and_by_minutes(tmp_path, monkeypatch, seconds, settings, saves):
    """With a clock that stands still during a step and advances by `seconds` after it."""
    clock, saved = [0.0], []

    class Clock(Observer):
        def stepped(self, progress, loss, lr):
            clock[0] += seconds

    def save(self, best=False):
        saved.append(self.progress.updates)
        whole(self, best)

    whole = Run._save
    monkeypatch.setattr(Run, "_save", save)
    monkeypatch.setattr(
        run, "time", types.SimpleNamespace(monotonic=lambda: clock[0], perf_counter=run.time.perf_counter)
    )
    train(digits(epochs=1, epoch_steps=6, **settings), tmp_path, observer=Clock())
    assert saved == saves


def test_a_small_model_learns_the_digits(tmp_path):
    config = digits(
        model_args={"patch_size": 2, "embed_dim": 32, "depth": 2},
        epochs=8, epoch_steps=None, eval_images=None, lr=1e-2, warmup_epochs=1.0, batch_size=32,
    )  # fmt: skip
    assert train(config, tmp_path).progress.best["val_top1"] > 90


def part_of_a_run(**attributes) -> Run:
    """The parts of a run that one method needs."""
    part = Run.__new__(Run)
    vars(part).update(attributes)
    return part


def test_a_row_of_the_log_is_over_all_ranks(monkeypatch):
    """Two ranks that took the same time and the same memory."""
    monkeypatch.setattr(run, "peak_memory", lambda device: 100)
    world = types.SimpleNamespace(size=2, device=None, sum=lambda numbers: [2 * number for number in numbers])
    evaluation = types.SimpleNamespace(loss=1.5, top1=40.0, top5=80.0)
    progress = Progress(2, 10, 30, skipped=3, loss_sum=2.0, loss_count=4, seconds=5.0, waited=1.0)
    engine = types.SimpleNamespace(progress=progress, lr=0.125)
    part = part_of_a_run(engine=engine, world=world, config=digits(batch_size=64))
    assert part._row(evaluation) == {
        "epoch": 3,
        "step": 30,
        "lr": 0.125,
        "train_loss": 0.5,
        "val_loss": 1.5,
        "val_top1": 40.0,
        "val_top5": 80.0,
        "images_per_second": 10 * 64 / 5.0,
        "data_wait": 0.2,
        "peak_memory": 100,
        "skipped_steps": 3,
    }
    progress.loss_count = 0
    assert np.isnan(part._row(evaluation)["train_loss"])


@pytest.mark.parametrize("name", ["train", "validation"])
def test_the_share_of_unreadable_images_is_that_of_each_split(name, tmp_path):
    splits = [type("Images", (list,), {"name": each})([None] * 10) for each in ("train", "validation")]
    bad = BadImages(tmp_path / "bad_images.csv")
    config = digits(max_bad_fraction=0.1)
    part = part_of_a_run(bad_images=bad, config=config, train_split=splits[0], validation=splits[1])
    bad.add([BadRecord(name, 0, "a.png", "empty file")])
    part._write_bad_images(new=True)
    assert bad.path.exists()
    bad.add([BadRecord(name, 1, "b.png", "empty file")])
    with pytest.raises(ValueError, match=f"2 of 10 {name} images are unreadable, more than --max-bad-fraction 0.1"):
        part._write_bad_images(new=False)


def test_images_are_read_for_the_larger_of_student_and_teacher():
    spec = DataSpec((3, 56, 70), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)
    teacher = types.SimpleNamespace(spec=spec._replace(input_size=(1, 64, 64)))
    assert part_of_a_run(spec=spec, teacher=None)._pixels_to_read() == spec
    both = part_of_a_run(spec=spec, teacher=teacher)._pixels_to_read()
    assert both == spec._replace(input_size=(3, 64, 70))


def test_nothing_is_saved_in_a_streak_of_bad_steps_or_by_another_rank():
    for streak, main, due in ((0, True, True), (1, True, False), (0, False, False)):
        engine = types.SimpleNamespace(progress=Progress(step=2, updates=2, streak=streak))
        world = types.SimpleNamespace(main=main)
        part = part_of_a_run(engine=engine, world=world, config=digits(save_steps=1), steps=5, _saved_at=0.0)
        assert part._save_is_due() == due


def test_pretrained_weights_are_for_new_runs_only(tmp_path, monkeypatch):
    asked = []

    def build(config, num_classes, pretrained):
        asked.append(pretrained)
        return build_model(config, num_classes)

    monkeypatch.setattr(run, "build_model", build)
    config = digits(epochs=1, epoch_steps=2, pretrained=True)
    train(config, tmp_path, observer=Steps(1))
    train(config, tmp_path)
    assert asked == [True, False]

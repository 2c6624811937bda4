"""The files of a run folder beside the checkpoints, and how a run continues from its checkpoint."""

import csv
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from training import digits

from hgrn_vision.data.batches import BadRecord
from hgrn_vision.train.build import build_model
from hgrn_vision.train.checkpoint import Checkpoint
from hgrn_vision.train.config import to_mapping
from hgrn_vision.train.distributed import World
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.run_folder import (
    COLUMNS,
    BadImages,
    check_same_run,
    export_model,
    find_best,
    holds_weights,
    restore,
    write_duplicates,
    write_log,
)


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.reader(file))


def test_agreement_is_a_column_where_it_was_measured(tmp_path):
    row = dict.fromkeys(COLUMNS, 1)
    plain = {name: value for name, value in row.items() if name != "agreement"}
    write_log(tmp_path / "log.csv", [plain])
    assert rows(tmp_path / "log.csv") == [list(plain), ["1"] * len(plain)]
    write_log(tmp_path / "log.csv", [plain, row])
    assert rows(tmp_path / "log.csv")[0] == list(COLUMNS)
    write_log(tmp_path / "log.csv", [])
    assert rows(tmp_path / "log.csv") == [list(plain)]


def test_near_duplicates_may_have_names_that_are_not_text(tmp_path):
    write_duplicates(tmp_path / "near.csv", [("caf\udce9.png", "é, è.png", 3)])
    assert rows(tmp_path / "near.csv")[1] == ["caf\udce9.png", "é, è.png", "3"]


def test_an_unreadable_image_is_listed_once(tmp_path):
    bad = BadImages(tmp_path / "bad_images.csv")
    first = BadRecord("train", 7, "b.png", "empty file")
    assert bad.add([first, first._replace(name="a.png")])
    assert not bad.add([first._replace(reason="something else")])
    # the same name in another split is another image
    assert bad.add([first._replace(split="validation")])
    assert (bad.count("train"), bad.count("validation"), bad.count("agreement")) == (2, 1, 0)
    bad.write()
    names = [(row[0], row[2]) for row in rows(bad.path)]
    assert names == [("split", "name"), ("train", "a.png"), ("train", "b.png"), ("validation", "b.png")]
    again = BadImages(bad.path)
    assert again.records == bad.records and again.records["train", "b.png"] == first


def test_a_model_folder_is_replaced_as_a_whole(tmp_path, monkeypatch):
    config = digits(drop_path=0.25, img_size=8)
    model = build_model(config, 2)
    for leftover in ("model", "model.new", "model.old"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "leftover.txt").write_text("of another export")
    rename, whole = os.replace, []

    def watched(source, target):
        if Path(target) == tmp_path / "model":
            # a kill here leaves the old model and the new one
            whole.extend([(tmp_path / "model.old" / "leftover.txt").exists(), Path(source, "config.json").exists()])
        rename(source, target)

    monkeypatch.setattr(os, "replace", watched)
    export_model(tmp_path / "model", model, config, ["a", "b"])
    assert whole == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    # timm writes both sides and adds these since 1.0.31
    added = {"num_classes": 2, "in_chans": 3, "global_pool": "avg"}
    written = {name: value for name, value in described["model_args"].items() if (name, value) not in added.items()}
    assert written.pop("img_size") in (8, [8, 8])
    assert written == {**config.model_args, "drop_path_rate": 0.25}
    assert holds_weights(tmp_path / "model", model.state_dict())


def test_what_counts_as_the_same_weights(tmp_path):
    path, weights = tmp_path / "model.safetensors", {"a": torch.ones(2), "b": torch.zeros(3)}
    assert not holds_weights(tmp_path, weights)
    save_file(weights, path)
    assert holds_weights(tmp_path, weights)
    assert not holds_weights(tmp_path, {**weights, "b": torch.tensor([0.0, 0.0, 1e-8])})
    assert not holds_weights(tmp_path, {**weights, "c": torch.ones(1)})
    assert not holds_weights(tmp_path, {"a": weights["a"]})
    path.write_bytes(path.read_bytes()[:-1])
    assert not holds_weights(tmp_path, weights)


class Images(list):
    class_names = ["a", "b"]


def test_classes_in_another_order_are_other_classes():
    config, train = digits(), Images([0] * 5)
    same = Checkpoint({}, config=to_mapping(config), class_names=["a", "b"], train_images=5)
    assert check_same_run(same, config, train, Path("run"), allow_change=False) == set()
    with pytest.raises(ValueError, match="the run in run was trained on different classes"):
        check_same_run(replace(same, class_names=["b", "a"]), config, train, Path("run"), allow_change=True)
    fewer = replace(same, train_images=4)
    with pytest.raises(ValueError, match="training images 4 -> 5"):
        check_same_run(fewer, config, train, Path("run"), allow_change=False)
    assert check_same_run(fewer, replace(config, lr=1.0), train, Path("run"), True) == {"training images", "lr"}


def resumed(changes: set[str], indexed: bool = True, **progress) -> Progress:
    """Where a run of 10 steps per epoch is after `restore`."""
    engine = SimpleNamespace(progress=Progress(**progress), restore=lambda checkpoint: None)
    restore(engine, Checkpoint({}), changes, 10, indexed)
    return engine.progress


@pytest.mark.parametrize("name", ["batch_size", "epoch_steps", "repeats", "seed", "training images"])
def test_an_epoch_starts_over_when_its_order_is_another(name, caplog):
    with caplog.at_level(logging.WARNING):
        progress = resumed({name}, epoch=2, step=4, updates=24, loss_sum=1.0, loss_count=4)
    assert progress == Progress(epoch=2, updates=20) and "epoch 3 starts over" in caplog.text


def test_an_epoch_goes_on_when_its_order_is_the_same(caplog):
    # the number of updates follows from the steps per epoch, which may have changed
    progress = resumed({"lr"}, epoch=2, step=4, updates=34, rollbacks=2)
    assert (progress.step, progress.updates, progress.rollbacks) == (4, 24, 0)
    assert resumed(set(), epoch=2, step=4, updates=24, rollbacks=2).rollbacks == 2
    assert resumed({"seed"}, epoch=2, step=0, updates=20).updates == 20 and not caplog.records


def test_a_stream_can_only_start_an_epoch_over(caplog):
    assert resumed(set(), indexed=False, epoch=1, step=4, updates=14) == Progress(epoch=1, updates=10)
    assert "epoch 2 starts over" in caplog.text


def test_a_checkpoint_that_does_not_fit_is_one_line():
    def refuse(checkpoint):
        raise RuntimeError("size mismatch\nfor many weights")

    with pytest.raises(ValueError, match="^the checkpoint does not fit these settings: size mismatch$"):
        restore(SimpleNamespace(restore=refuse), Checkpoint({}), set(), 1, True)


@pytest.mark.parametrize(
    "said, kept, wanted",
    [(70.0, None, None), (70.0, 60.0, 70.0), (70.0, 80.0, 80.0), (None, 60.0, 60.0), (None, None, None)],
)
def test_the_best_checkpoint_knows_best(said, kept, wanted):
    """`said` is the best row in the last checkpoint, `kept` the one in the best checkpoint, None if that is lost."""

    def row(top1):
        return {"val_top1": top1} if top1 else None

    engine = SimpleNamespace(progress=Progress(best=row(said)))
    best = Checkpoint({}, progress={"best": row(kept)}) if kept else None
    find_best(SimpleNamespace(load_best=lambda: best), engine, World())
    assert engine.progress.best == row(wanted)

"""Data: what is found where, how classes are matched, and loaders that give the same batches however they are run."""

import importlib.resources
import io
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, Normalize, ToTensor

from hgrn_vision.data.indexed import balanced_order, epoch_order
from hgrn_vision.data.loaders import EvalLoader, TrainLoader, read_ahead
from hgrn_vision.data.spec import DataSettings, DataSpec
from hgrn_vision.data.splits import Split, open_splits, open_validation, steps_per_epoch, stratified_holdout
from hgrn_vision.data.transforms import BatchTransform, eval_transform, train_transform
from hgrn_vision.randomness import own_generators, seed_generators
from hgrn_vision.train.config import TrainConfig

SPEC = DataSpec((3, 8, 8), (0.5, 0.4, 0.3), (0.3, 0.2, 0.1), "bicubic", 1.0)
SMALL = dict(batch_size=64, micro_batch=16, workers=0)


def config(**settings) -> TrainConfig:
    return TrainConfig(**{**SMALL, **settings})


def png(color) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), color).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, content: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content or png((len(path.name), 0, 0)))


def tree(root, **classes: int) -> str:
    """Class folders with this many images each, the class's number as their red value."""
    for number, (name, count) in enumerate(classes.items()):
        for i in range(count):
            write(root / name / f"{i}.png", png((number * 10, i, 0)))
    return str(root)


def flat(loader: TrainLoader, epoch: int = 0, **position) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [batch for step in loader.epoch(epoch, **position) for batch in step]
    loader.close()
    return torch.cat([b.images for b in batches]), torch.cat([b.targets for b in batches])


# what is found


def test_digits_are_split_by_class_and_not_by_seed():
    train, validation = open_splits(config())
    assert (len(train), len(validation)) == (1438, 359)
    assert train.class_names == validation.class_names == list("0123456789")
    assert not set(train.rows) & set(validation.rows)
    shares = np.bincount(validation.labels) / (np.bincount(train.labels) + np.bincount(validation.labels))
    np.testing.assert_allclose(shares, 0.2, atol=0.003)
    np.testing.assert_array_equal(open_splits(config(seed=7, data="digits"))[1].rows, validation.rows)
    np.testing.assert_array_equal(open_validation(config(), train.class_names).rows, validation.rows)
    image = validation.load(3)
    assert image.size == (8, 8) and image.mode == "RGB" and image.getextrema()[0] == (0, 255)


def test_digits_carry_their_attribution():
    with np.load(importlib.resources.files("hgrn_vision.data") / "digits.npz") as arrays:
        assert "Alpaydin" in str(arrays["attribution"]) and "CC BY 4.0" in str(arrays["attribution"])
        assert arrays["images"].shape == (1797, 8, 8) and arrays["images"].max() == 16


def test_validation_classes_are_looked_up_by_name(tmp_path, caplog):
    tree(tmp_path / "train", **{"ant": 3, "Bär mit Hut": 2, "cat": 2, "dog": 1})
    tree(tmp_path / "val", **{"cat": 2, "dog": 1, "zebra": 4})
    (tmp_path / "val" / "ant").mkdir()
    write(tmp_path / "val" / "dog" / "deeper" / "2.JPG", png((1, 1, 1)))
    write(tmp_path / "val" / "dog" / "._2.jpg", b"a file manager's note")
    write(tmp_path / "val" / "dog" / "notes.txt", b"not an image")
    write(tmp_path / "val" / "stray.png")
    with caplog.at_level(logging.WARNING):
        train, validation = open_splits(config(data=str(tmp_path)))
    assert train.class_names == ["ant", "Bär mit Hut", "cat", "dog"]
    found = {validation.image_name(i): train.class_names[validation.labels[i]] for i in range(len(validation))}
    assert found == {"cat/0.png": "cat", "cat/1.png": "cat", "dog/0.png": "dog", "dog/deeper/2.JPG": "dog"}
    assert "4 validation images are left out" in caplog.text and "zebra" in caplog.text
    assert np.asarray(train.load(3))[0, 0].tolist() == [10, 0, 0]


def test_classes_are_in_natural_order(tmp_path):
    train, _ = open_splits(config(data=tree(tmp_path, **{"10": 2, "9": 2, "1": 2}), holdout=0.5))
    assert train.class_names == ["1", "9", "10"]


def test_plain_class_folders_hold_some_out(tmp_path):
    root = tree(tmp_path, a=10, b=5, c=1)
    train, validation = open_splits(config(data=root, holdout=0.2))
    assert np.bincount(train.labels).tolist() == [8, 4, 1]
    assert np.bincount(validation.labels).tolist() == [2, 1]
    assert len(open_validation(config(data=root), ["b", "a"])) == 15
    assert set(open_validation(config(data=root), ["b"]).labels) == {0}


def test_holdout_is_stratified_and_complete():
    labels = np.random.RandomState(0).randint(0, 7, 500)
    kept, held_out = stratified_holdout(labels, 0.3, seed=1)
    assert sorted([*kept, *held_out]) == list(range(500))
    np.testing.assert_allclose(np.bincount(labels[held_out]), 0.3 * np.bincount(labels), atol=0.51)
    assert not np.array_equal(held_out, stratified_holdout(labels, 0.3, seed=2)[1])


def broken_trees(tmp_path):
    tree(tmp_path / "one" / "train", cat=2)
    tree(tmp_path / "one" / "val", cat=2)
    tree(tmp_path / "apart" / "train", cat=2, dog=2)
    tree(tmp_path / "apart" / "val", rose=2, lily=2)
    tree(tmp_path / "noval" / "train", cat=2, dog=2)
    tree(tmp_path / "single", cat=1, dog=1)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    (tmp_path / "empty" / "val").mkdir()
    write(tmp_path / "loose" / "train" / "1.png")
    write(tmp_path / "loose" / "val" / "a" / "1.png")
    write(tmp_path / "notes.txt", b"hello")
    write(tmp_path / "hello.tar", b"hello")


@pytest.mark.parametrize(
    "name,holdout,message",
    [
        ("missing", 0, "no such file or folder"),
        ("empty", 0, "no images in"),
        ("one", 0, "only one class .cat."),
        ("apart", 0, "no validation image.*found lily, rose, expected cat, dog"),
        ("noval", 0, "no val or validation folder.*--holdout"),
        ("single", 0.2, "too few to hold any out"),
        ("loose", 0, "one sub-folder per class"),
        ("notes.txt", 0, "neither a folder nor a .tar or .csv file"),
        ("hello.tar", 0, "not an uncompressed tar file"),
    ],
)
def test_data_that_cannot_be_used_is_refused_in_one_line(tmp_path, name, holdout, message):
    broken_trees(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        open_splits(config(data=str(tmp_path / name), holdout=holdout))
    assert "\n" not in str(error.value)


def test_too_few_images_for_a_batch(tmp_path):
    train, _ = open_splits(config(data=tree(tmp_path, a=5, b=5), holdout=0.2))
    with pytest.raises(ValueError, match="8 training images are fewer than one batch of 64.* to 8 or less"):
        steps_per_epoch(train, config())


def test_csv(tmp_path):
    tree(tmp_path, a=3, b=3)
    rows = [f"{folder}/{i}.png,note,{label}\n" for folder, label in (("a", "x y"), ("b", "ü")) for i in range(3)]
    (tmp_path / "list.csv").write_text("file,remark,label\n" + "".join(rows), encoding="utf-8-sig")
    train, validation = open_splits(config(data=str(tmp_path / "list.csv"), holdout=0.3))
    assert train.class_names == ["x y", "ü"] and (len(train), len(validation)) == (4, 2)
    assert np.asarray(train.load(3))[0, 0, 0] == 10
    many = "file,label\n" + "".join(f"a/0.png,c{i}\na/1.png,c{i}\n" for i in range(10_000))
    (tmp_path / "many.csv").write_text(many)
    assert len(open_splits(config(data=str(tmp_path / "many.csv"), holdout=0.5))[0].class_names) == 10_000


@pytest.mark.parametrize(
    "text,message",
    [
        ("a/0.png,x\n", "must start with a line that names the columns file and label"),
        ("path,class\na/0.png,x\n", "must start with a line"),
        ("", "must start with a line"),
        ("file,label\n", "no images in"),
        ("file,label\n../secret.png,x\n", "line 2: ../secret.png lies outside"),
        ("file,label\na/0.png,x\n/etc/passwd,x\n", "line 3: /etc/passwd lies outside"),
        ("file,label\na/0.png\n", "line 2: no label"),
        ("file,label\n,x\n", "line 2: no file"),
        ("file,label\n\xff\n", "not a CSV file in UTF-8"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        open_splits(config(data=str(tmp_path / "list.csv"), holdout=0.5))


def pack(path, members: dict[str, bytes]) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def layouts(tmp_path) -> dict[str, str]:
    """The same images (red says the class, green the number, blue the split) in every layout that tars may have."""
    images = {
        part: {f"{name}/{i}.webp": png((red, i, blue)) for name, red in (("cat", 10), ("dog", 20)) for i in range(2)}
        for part, blue in (("train", 100), ("val", 200))
    }
    both = {f"./{part}/{name}": data for part, members in images.items() for name, data in members.items()}
    pack(tmp_path / "both.tar", both)
    for part, members in images.items():
        pack(tmp_path / "pair" / f"{part}.tar", members)
        by_class = {
            name: pack(
                tmp_path / "classes" / part / f"{name}.tar",
                {os.path.basename(key): data for key, data in members.items() if key.startswith(name)},
            )
            for name in ("cat", "dog")
        }
        pack(tmp_path / "nested" / f"{part}.tar", {f"{name}.tar": data for name, data in by_class.items()})
    return {name: str(tmp_path / name) for name in ("both.tar", "pair", "classes", "nested")}


def test_tar_files(tmp_path):
    for root in layouts(tmp_path).values():
        for split, blue in zip(open_splits(config(data=root)), (100, 200), strict=True):
            assert split.class_names == ["cat", "dog"] and len(split) == 4, root
            colors = [np.asarray(split.load(i))[0, 0].tolist() for i in range(4)]
            assert sorted(colors) == [[red, i, blue] for red in (10, 20) for i in range(2)], root
            assert [color[0] // 10 - 1 for color in colors] == split.labels.tolist(), root
            assert split.image_name(0).endswith(".webp")


def test_torchvision_sets(tmp_path):
    tree(tmp_path / "folder" / "train", cat=2, dog=2)
    tree(tmp_path / "folder" / "validation", cat=1, dog=1)
    write(tmp_path / "folder" / "train" / "cat" / "1.png", b"broken")
    train, validation = open_splits(config(dataset="torch/image_folder", data=str(tmp_path / "folder")))
    assert train.class_names == ["cat", "dog"] and validation.labels.tolist() == [0, 1]
    assert train.image_name(0).endswith("cat/0.png") and train.load(2).mode == "RGB"
    with pytest.raises(ValueError, match="not an image"):
        train.load(1)
    raw = tmp_path / "mnist" / "MNIST" / "raw"
    digits, labels = np.arange(5 * 28 * 28, dtype=np.uint8), bytes([3, 1, 4, 1, 5])
    for part in ("train", "t10k"):
        header = b"\0\0\x08\x03" + np.array([5, 28, 28], ">u4").tobytes()
        write(raw / f"{part}-images-idx3-ubyte", header + digits.tobytes())
        write(raw / f"{part}-labels-idx1-ubyte", b"\0\0\x08\x01" + np.array([5], ">u4").tobytes() + labels)
    train, _ = open_splits(config(dataset="torch/mnist", data=str(tmp_path / "mnist")))
    assert train.labels.tolist() == list(labels) and train.load(4).size == (28, 28)
    with pytest.raises(ValueError, match="torch/mnist"):
        open_splits(config(dataset="torch/mnist", data=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="must start with torch/"):
        open_splits(config(dataset="cifar10", data=str(tmp_path)))


def test_listed_classes_fix_the_order(tmp_path):
    root = tree(tmp_path / "data", ant=4, bee=4)
    (tmp_path / "classes.txt").write_text("bee\ncat\nant\n")
    train, _ = open_splits(config(data=root, holdout=0.5, classes=str(tmp_path / "classes.txt")))
    assert train.class_names == ["bee", "cat", "ant"] and set(train.labels) == {0, 2}
    (tmp_path / "classes.txt").write_text("bee\ncat\n")
    with pytest.raises(ValueError, match="not listed: ant"):
        open_splits(config(data=root, holdout=0.5, classes=str(tmp_path / "classes.txt")))


def test_eval_images_limits_validation_only():
    train, validation = open_splits(config(eval_images=50))
    assert (len(train), len(validation)) == (1438, 50) and len(set(validation.labels)) == 10


# order and augmentation


@pytest.fixture(scope="module")
def reference():
    """Two epochs of the digits in one process without workers."""
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(), SPEC)
    return flat(loader, 1), flat(loader, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bytes(reference, workers):
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=workers), SPEC)
    for epoch, expected in zip((1, 2), reference, strict=True):
        batches = [batch for step in loader.epoch(epoch) for batch in step]
        assert torch.equal(torch.cat([b.images for b in batches]), expected[0])
        assert torch.equal(torch.cat([b.targets for b in batches]), expected[1])
    loader.close()


def test_an_abandoned_epoch_leaves_nothing_behind(reference):
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=2), SPEC)
    next(loader.epoch(1))
    assert torch.equal(flat(loader, 2)[0], reference[1][0])


def test_ranks_share_the_same_global_batches(reference):
    train, _ = open_splits(config())
    for world_size in (2, 4):
        loaders = [TrainLoader(train, config(), SPEC, rank, world_size) for rank in range(world_size)]
        for step, parts in enumerate(zip(*(loader.epoch(1) for loader in loaders), strict=True)):
            batches = [batch for part in parts for batch in part]
            assert [batch.number for batch in batches] == [0, 1, 2, 3]
            expected = reference[0][0][step * 64 : (step + 1) * 64]
            assert torch.equal(torch.cat([b.images for b in batches]), expected)
    with pytest.raises(ValueError, match="3 processes cannot share 4 micro-batches .*: 1, 2, 4$"):
        TrainLoader(train, config(), SPEC, 0, 3)


class Counting:
    """A source that remembers what was read of it."""

    def __init__(self, source):
        self.source, self.reads = source, []

    def name(self, row):
        return self.source.name(row)

    def read(self, row):
        self.reads.append(row)
        return self.source.read(row)


def test_starting_in_the_middle_reads_only_what_follows(reference):
    train, _ = open_splits(config())
    counting = Counting(train.source)
    train = Split("train", counting, train.class_names, train.labels, train.rows)
    images, targets = flat(TrainLoader(train, config(), SPEC), 1, first_step=20)
    assert torch.equal(images, reference[0][0][20 * 64 :]) and torch.equal(targets, reference[0][1][20 * 64 :])
    assert len(counting.reads) == 2 * 64


def test_rollbacks_change_the_augmentation_and_not_the_order(reference):
    train, _ = open_splits(config())
    images, targets = flat(TrainLoader(train, config(), SPEC), 1, rollbacks=1)
    assert torch.equal(targets, reference[0][1]) and not torch.equal(images, reference[0][0])
    assert not torch.equal(flat(TrainLoader(train, config(seed=1), SPEC), 1)[1], targets)


def test_repeated_augmentation_draws_a_third_of_the_images_three_times():
    order = epoch_order(300, config(repeats=3), 0, 300)
    images, counts = np.unique(order, return_counts=True)
    assert len(images) == 100 and set(counts) == {3}
    assert len(np.unique(epoch_order(300, config(repeats=1), 0, 300))) == 300
    assert not np.array_equal(order, epoch_order(300, config(repeats=3), 1, 300))


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_balanced_epoch_has_every_class_equally_often(repeats):
    labels = np.repeat([0, 1, 2], [150, 7, 40])
    order = balanced_order(labels, config(repeats=repeats), 0, 180)
    assert np.bincount(labels[order]).tolist() == [60, 60, 60]
    for label in range(3):
        counts = np.bincount(order[labels[order] == label], minlength=len(labels))[labels == label]
        assert counts.max() - counts.min() <= repeats
    # every batch is balanced, not only the whole
    assert np.bincount(labels[order[:30]]).tolist() == [10, 10, 10]
    # and the classes take no fixed turns: micro-batches are dealt by position
    assert len(np.unique(labels[order].reshape(-1, 3 * repeats), axis=0)) == 6
    assert np.array_equal(order, balanced_order(labels, config(repeats=repeats), 0, 180))
    assert not np.array_equal(order, balanced_order(labels, config(repeats=repeats), 1, 180))


def test_repeats_of_an_image_differ_and_lie_in_different_micro_batches():
    train, _ = open_splits(config(repeats=3))
    step = next(TrainLoader(train, config(repeats=3), SPEC).epoch(0))
    # position p of the batch is image p // 4 of micro-batch p % 4
    repeats = [step[p % 4].images[p // 4] for p in range(3)]
    assert len({int(step[p % 4].targets[p // 4]) for p in range(3)}) == 1
    assert not torch.equal(repeats[0], repeats[1]) and not torch.equal(repeats[1], repeats[2])


def test_epoch_steps_caps_the_epoch():
    train, _ = open_splits(config())
    assert steps_per_epoch(train, config()) == 22
    assert len(list(TrainLoader(train, config(epoch_steps=3), SPEC).epoch(0))) == 3


def test_loading_leaves_the_global_generators_alone():
    train, validation = open_splits(config())
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    for workers in (0, 1):
        flat(TrainLoader(train, config(workers=workers, epoch_steps=1), SPEC))
        list(EvalLoader(validation, config(workers=workers), SPEC))
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1]) and torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m9-mstd0.5-inc1", "v0", "original", "augmix-m5-w3"])
def test_every_policy_survives_many_images(policy):
    transform = train_transform(config(auto_augment=policy), SPEC)
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 8, 3), dtype=np.uint8))
    with own_generators():
        seed_generators(0)
        images = torch.stack([transform(image) for _ in range(150)])
    assert images.dtype == torch.uint8 and images.shape[1:] == SPEC.input_size and len(images.unique(dim=0)) > 100


def test_one_channel():
    spec = DataSpec((1, 8, 8), (0.5,), (0.2,), "bilinear", 1.0)
    train, validation = open_splits(config())
    assert next(TrainLoader(train, config(), spec).epoch(0))[0].images.shape == (16, 1, 8, 8)
    images = next(iter(EvalLoader(validation, config(), spec))).images
    assert np.array_equal(images[0, 0].numpy(), np.asarray(validation.load(0).convert("L")))


# unreadable images


@pytest.fixture
def damaged(tmp_path):
    """40 images of two classes, four of them unreadable: truncated, empty, text, missing."""
    root = tmp_path / "damaged"
    tree(root, cat=20, dog=20)
    whole = (root / "cat" / "3.png").read_bytes()
    write(root / "cat" / "3.png", whole[:50])
    (root / "cat" / "7.png").write_bytes(b"")
    write(root / "dog" / "0.png", b"<html>not found</html>")
    split = open_validation(config(data=str(root)), ["cat", "dog"])
    (root / "dog" / "19.png").unlink()
    return split


BROKEN = {"cat/3.png", "cat/7.png", "dog/0.png", "dog/19.png"}


def test_unreadable_images_are_replaced_the_same_way_everywhere(damaged):
    runs = []
    for workers in (0, 2):
        settings = config(batch_size=8, micro_batch=4, repeats=1, workers=workers)
        loader = TrainLoader(damaged, settings, SPEC)
        batches = [batch for step in loader.epoch(0) for batch in step]
        loader.close()
        assert {record.name for batch in batches for record in batch.bad} == BROKEN
        assert all(len(batch.images) == 4 for batch in batches)
        runs.append(batches)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
        assert one.bad == other.bad
    reasons = {record.name: record.reason for batch in runs[0] for record in batch.bad}
    assert reasons["cat/7.png"] == "empty file" and "No such file" in reasons["dog/19.png"]


def test_the_replacement_keeps_its_own_label(tmp_path):
    """Cats are red 0, dogs red 10: with a broken dog among them, no image gets the other's label."""
    root = tree(tmp_path, cat=3, dog=5)
    write(tmp_path / "dog" / "2.png", b"broken")
    settings = config(
        data=root, batch_size=8, micro_batch=4, repeats=1, auto_augment="", color_jitter=0.0, interpolation="bilinear"
    )
    loader = TrainLoader(open_validation(settings, ["cat", "dog"]), settings, SPEC)
    for epoch in range(5):
        images, targets = flat(loader, epoch)
        assert (images[:, 0, 0, 0] // 10).tolist() == targets.tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_readable_stops_with_one_line(tmp_path, workers):
    for i in range(8):
        write(tmp_path / "ab"[i % 2] / f"{i}.png", b"broken")
    settings = config(data=str(tmp_path), batch_size=4, micro_batch=4, workers=workers)
    loader = TrainLoader(open_validation(settings, ["a", "b"]), settings, SPEC)
    with pytest.raises(ValueError, match="20 images in a row are unreadable, the last is [ab]/.*png: not a") as error:
        next(loader.epoch(0))
    assert "\n" not in str(error.value)
    loader.close()


def test_evaluation_leaves_unreadable_images_out(damaged):
    batches = list(EvalLoader(damaged, config(batch_size=2, micro_batch=2), SPEC))
    seen = torch.cat([batch.indices for batch in batches]).tolist()
    bad = [record for batch in batches for record in batch.bad]
    assert {record.name for record in bad} == BROKEN
    assert sorted(seen + [record.index for record in bad]) == list(range(40))
    assert torch.cat([batch.targets for batch in batches]).tolist() == damaged.labels[seen].tolist()


def test_a_batch_may_be_wholly_unreadable(tmp_path):
    root = tree(tmp_path, a=2, b=2)
    for name in ("a/0.png", "a/1.png"):
        write(tmp_path / name, b"broken")
    settings = config(data=root, batch_size=2, micro_batch=2)
    batches = list(EvalLoader(open_validation(settings, ["a", "b"]), settings, SPEC))
    assert [tuple(batch.images.shape) for batch in batches] == [(0, 3, 8, 8), (2, 3, 8, 8)]
    assert batches[0].targets.dtype == batches[0].indices.dtype == torch.int64


# evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_image_is_evaluated_once_in_the_same_batch(world_size):
    _, validation = open_splits(config(eval_images=101))
    whole = {int(b.indices[0]): b for b in EvalLoader(validation, config(workers=1), SPEC)}
    seen = []
    for rank in range(world_size):
        for batch in EvalLoader(validation, config(), SPEC, rank, world_size):
            same = whole[int(batch.indices[0])]
            assert torch.equal(batch.images, same.images) and torch.equal(batch.targets, same.targets)
            seen += batch.indices.tolist()
    assert sorted(seen) == list(range(101))


def test_more_ranks_than_batches():
    _, validation = open_splits(config(eval_images=20))
    counts = [sum(len(b.indices) for b in EvalLoader(validation, config(), SPEC, rank, 4)) for rank in range(4)]
    assert counts == [16, 4, 0, 0]


def test_reading_ahead_gives_the_same_batches_in_order(tmp_path):
    tree(tmp_path, a=21, b=20)
    write(tmp_path / "a" / "3.png", b"broken")
    validation = open_validation(config(data=str(tmp_path)), ["a", "b"])
    want, got = list(EvalLoader(validation, config(), SPEC)), list(read_ahead(validation, SPEC, 16))
    assert [len(batch.targets) for batch in got] == [15, 16, 9]
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True)) and ours.bad == theirs.bad


def test_reading_ahead_stops_at_a_few_batches_and_with_its_reader(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    validation, started = open_validation(config(), list("0123456789")), []
    monkeypatch.setattr(
        Split, "load", lambda self, index, load=Split.load: (started.append(index), load(self, index))[1]
    )
    batches = read_ahead(validation, SPEC, 10)
    next(batches)
    next(batches)
    # two that were handed over, and one for each thread
    assert max(started) < 40
    batches.close()
    assert len(started) <= 40


# on the device


def test_normalisation_is_torchvisions():
    _, validation = open_splits(config())
    batch = next(iter(EvalLoader(validation, config(), SPEC)))
    expected = Compose([ToTensor(), Normalize(SPEC.mean, SPEC.std)])(validation.load(0))
    got = BatchTransform(config(), SPEC, 10).eval(batch.images)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-6)
    assert torch.equal(eval_transform(SPEC)(validation.load(0)), batch.images[0])


def test_targets_without_mixing_are_smoothed():
    plain = BatchTransform(config(mixup=0.0, cutmix=0.0, reprob=0.0, smoothing=0.1), SPEC, 4)
    images, targets = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), torch.tensor([2, 0])
    got, soft = plain.train(images, targets)
    torch.testing.assert_close(soft, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))
    assert torch.equal(got, plain.eval(images))


@pytest.mark.parametrize("settings", [dict(mixup=0.0), dict(cutmix=0.0), dict(mixup_mode="elem"), {}], ids=str)
def test_mixing_follows_the_seed(settings):
    mixing = BatchTransform(config(smoothing=0.0, **settings), SPEC, 4)
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    targets = torch.arange(8) % 4
    results = []
    for seed in (1, 1, 2):
        with own_generators():
            seed_generators(seed)
            results.append(mixing.train(images, targets))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(results[0][1].sum(1), torch.ones(8))


def test_random_erasing_has_an_effect():
    images, targets = torch.full((4, 3, 8, 8), 128, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    erased, _ = BatchTransform(config(mixup=0.0, cutmix=0.0, reprob=1.0), SPEC, 2).train(images, targets)
    assert all(len(image.unique()) > 3 for image in erased)


# worker processes


def test_workers_outlive_signals_and_epochs():
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=2), SPEC)
    steps = loader.epoch(0)
    next(steps)
    processes = loader.source.loader._iterator._workers
    # by another process: only the one that started them may end them
    pids = [str(process.pid) for process in processes]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        subprocess.run(["kill", f"-{number.value}", *pids], check=True)
    assert len(list(steps)) == 21
    next(loader.epoch(1))
    assert loader.source.loader._iterator._workers == processes and all(p.is_alive() for p in processes)
    loader.close()
    # ended as they were told, none was killed
    assert [p.exitcode for p in processes] == [0, 0]


def test_an_error_elsewhere_is_not_held_up_by_workers(tmp_path):
    """They ignore others' signals, but the interpreter ends its workers by one before it waits for them."""
    program = tmp_path / "program.py"
    program.write_text(
        "from hgrn_vision.data.spec import DataSpec\n"
        "from hgrn_vision.train.config import TrainConfig\n"
        "from hgrn_vision.data.splits import open_splits\n"
        "from hgrn_vision.data.loaders import EvalLoader, TrainLoader\n"
        "config = TrainConfig(batch_size=64, micro_batch=16, workers=1)\n"
        "spec = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, 'bicubic', 1.0)\n"
        "train, validation = open_splits(config)\n"
        "steps, batches = TrainLoader(train, config, spec).epoch(0), iter(EvalLoader(validation, config, spec))\n"
        "next(steps), next(batches)\n"
        "raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, str(program)], check=False, timeout=120).returncode == 7


def test_loaders_can_be_sent_to_processes_that_are_not_forks():
    """What the workers get, pickled as under the spawn start method, makes the same batches."""
    train, _ = open_splits(config())
    source = TrainLoader(train, config(), SPEC).source
    dataset, keys = pickle.loads(pickle.dumps((source.loader.dataset, list(source.keys)[:4])))
    assert torch.equal(
        torch.cat([dataset[key].images for key in keys]), flat(TrainLoader(train, config(), SPEC))[0][:64]
    )


def test_tar_members_are_read_by_several_workers(tmp_path):
    images = {f"{'ab'[i % 2]}/{i}.png": png((i, i % 2, 0)) for i in range(64)}
    pack(tmp_path / "all.tar", images)
    settings = config(data=str(tmp_path / "all.tar"), holdout=0.5, workers=3, batch_size=2, micro_batch=2)
    _, validation = open_splits(settings)
    validation.load(0)
    count = 0
    for batch in EvalLoader(validation, settings, SPEC):
        assert batch.images[:, 1, 0, 0].tolist() == batch.targets.tolist() and not batch.bad
        count += len(batch.targets)
    assert count == len(validation) == 32


# images in turn


def test_webdataset_streams(tmp_path):
    pytest.importorskip("webdataset")
    for shard in range(3):
        members = {}
        for i in range(shard * 10, shard * 10 + 10):
            members |= {f"{i:03}.png": png((i * 8, 0, 0)), f"{i:03}.cls": str(i % 4).encode()}
        pack(tmp_path / f"set-{shard}.tar", members)
    names = "set-{0..2}.tar|30"
    settings = config(
        dataset="wds/",
        data=str(tmp_path),
        train_split=names,
        val_split=names,
        classes="4",
        batch_size=8,
        micro_batch=4,
        workers=2,
    )
    train, validation = open_splits(settings)
    assert not train.indexed and len(train) == 30 and train.class_names == ["0", "1", "2", "3"]
    loader = TrainLoader(train, settings, SPEC)
    first, again = flat(loader, 1), flat(TrainLoader(open_splits(settings)[0], settings, SPEC), 1)
    assert len(first[1]) == 24 and torch.equal(first[0], again[0]) and not torch.equal(flat(loader, 2)[0], first[0])
    with pytest.raises(ValueError, match="only at its beginning"):
        next(loader.epoch(1, first_step=2))
    reds = []
    for rank in range(2):
        for batch in EvalLoader(validation, settings, SPEC, rank, 2):
            assert (batch.images[:, 0, 0, 0] // 8 % 4).tolist() == batch.targets.tolist()
            reds += (batch.images[:, 0, 0, 0] // 8).tolist()
    assert sorted(reds) == list(range(30))
    with pytest.raises(ValueError, match="--classes"):
        open_splits(config(dataset="wds/", data=str(tmp_path), train_split=names))
    narrow = TrainLoader(open_splits(replace(settings, classes="2"))[0], settings, SPEC)
    with pytest.raises(ValueError, match="label 2 in data with 2 classes"):
        next(narrow.epoch(0))
    narrow.close()


def test_the_data_are_of_use_without_training():
    code = (
        "import sys, types\n"
        "from hgrn_vision.data.loaders import EvalLoader\n"
        "from hgrn_vision.data.spec import DataSpec\n"
        "from hgrn_vision.data.splits import open_validation\n"
        "settings = types.SimpleNamespace(data='digits', dataset='', holdout=0.2, eval_images=None, max_pixels=10**6,\n"
        "    train_split='train', val_split='validation', micro_batch=32, workers=0, device='cpu')\n"
        "validation = open_validation(settings, [str(digit) for digit in range(10)])\n"
        "spec = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, 'bicubic', 1.0)\n"
        "print(sum(len(batch.targets) for batch in EvalLoader(validation, settings, spec)))\n"
        "print([name for name in sys.modules if name.startswith('hgrn_vision.train')])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["359", "[]"]


def test_a_run_has_all_the_settings_that_data_ask_for():
    settings = TrainConfig()
    assert all(hasattr(settings, name) for name in DataSettings.__annotations__)

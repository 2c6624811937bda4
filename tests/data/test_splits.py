"""Splits: what is found where, how classes are matched by name, what is held out."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from image_data import SPEC, config, png, tree, write

from hgrn_vision.data import sources
from hgrn_vision.data.imagenet import imagenet_aliases, imagenet_names
from hgrn_vision.data.images import BadImage
from hgrn_vision.data.loaders import TrainLoader
from hgrn_vision.data.sources import Listing
from hgrn_vision.data.splits import (
    Split,
    match_folders,
    open_splits,
    open_validation,
    steps_per_epoch,
    stratified_holdout,
)

NAMES = ["rose", "daisy <b>", "cornflower é"]


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


def test_images_are_opened_as_the_split_was_told(monkeypatch):
    asked = []
    monkeypatch.setattr("hgrn_vision.data.splits.open_image", lambda *arguments: asked.append(arguments))
    train, _ = open_splits(config(max_pixels=99))
    train.load(3)
    train.subset(np.array([3])).load(0, 64)
    assert [arguments[1:] for arguments in asked] == [(99, 0), (99, 64)] and asked[0][0] is not None


def test_a_file_that_cannot_be_read_counts_as_a_bad_image():
    class Broken:
        def __init__(self, error):
            self.error = error

        def read(self, row):
            raise self.error

    for error, reason in ((OSError(5, "Input/output error"), "Input/output error"), (OSError("cut off"), "cut off")):
        split = Split("train", Broken(error), ["a"], np.zeros(1, int), np.arange(1))
        with pytest.raises(BadImage, match=f"^{reason}$"):
            split.load(0)


def test_splits_may_have_names_of_their_own(tmp_path):
    for number, name in enumerate(("mine", "theirs", "train", "val"), start=2):
        tree(tmp_path / name, a=number, b=number)
    named = open_splits(config(data=str(tmp_path), train_split="mine", val_split="theirs"))
    assert [len(split) for split in named] == [4, 6]
    assert [len(split) for split in open_splits(config(data=str(tmp_path)))] == [8, 10]


def test_data_sets_that_timm_knows_are_asked_for_by_split(monkeypatch):
    asked = []

    def listing(*arguments, **options):
        asked.append((*arguments, options))
        return Listing(None, np.array([0, 1]), ["a", "b"])

    monkeypatch.setattr(sources, "list_torchvision", listing)
    monkeypatch.setattr(sources, "list_huggingface", listing)
    open_splits(config(dataset="torch/cifar10", data="here", train_split="t", val_split="v", download=True))
    open_splits(config(dataset="hfds/own", data="", train_split="t", val_split="v", input_key="img", target_key="cls"))
    keys = {"input_key": "img", "target_key": "cls"}
    assert sorted(asked, key=str) == [
        ("hfds/own", "", "t", keys),
        ("hfds/own", "", "v", keys),
        ("torch/cifar10", "here", "t", {"download": True}),
        ("torch/cifar10", "here", "v", {"download": True}),
    ]
    with pytest.raises(ValueError, match="dataset 'cifar10' must start with torch/, hfds/, wds/, tfds/, hfids/"):
        open_splits(config(dataset="cifar10"))


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
    # a class of two images has one held out, however small the share
    labels = np.repeat([0, 1], [2, 10])
    assert np.bincount(labels[stratified_holdout(labels, 0.1)[1]]).tolist() == [1, 1]


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
    # mixup pairs images, so that batches are even
    for images, advised in ((7, 6), (1, 2)):
        with pytest.raises(ValueError, match=f"{images} training images are fewer .* to {advised} or less"):
            steps_per_epoch(train.subset(np.arange(images)), config())


def test_listed_classes_fix_the_order(tmp_path):
    root = tree(tmp_path / "data", ant=4, bee=4)
    (tmp_path / "classes.txt").write_text("bee\ncat\nant\n")
    train, _ = open_splits(config(data=root, holdout=0.5, classes=str(tmp_path / "classes.txt")))
    assert train.class_names == ["bee", "cat", "ant"] and set(train.labels) == {0, 2}
    (tmp_path / "classes.txt").write_text("bee\ncat\n")
    with pytest.raises(ValueError, match="not listed: ant"):
        open_splits(config(data=root, holdout=0.5, classes=str(tmp_path / "classes.txt")))
    (tmp_path / "classes.txt").write_text("bee\nant\nbee\n")
    with pytest.raises(ValueError, match="classes.txt names bee more than once"):
        open_splits(config(data=root, holdout=0.5, classes=str(tmp_path / "classes.txt")))


def test_eval_images_limits_validation_only():
    train, validation = open_splits(config(eval_images=50))
    assert (len(train), len(validation)) == (1438, 50) and len(set(validation.labels)) == 10


def test_a_limit_takes_images_of_all_classes(tmp_path):
    """Even if they are listed class by class; the order is kept, so that they are read in order."""
    settings = config(data=tree(tmp_path, a=12, b=12), eval_images=8)
    validation = open_validation(settings, ["a", "b"])
    assert len(validation) == 8 and set(validation.labels) == {0, 1}
    assert validation.rows.tolist() == sorted(validation.rows)


STREAM = dict(dataset="wds/", data="somewhere", train_split="t", val_split="v", classes="3")


def test_a_stream_is_as_long_as_its_limit(monkeypatch):
    readers = []

    def create_reader(name, **options):
        readers.append(SimpleNamespace(split=options["split"], num_samples=30, dist_rank=1, dist_num_replicas=2))
        return readers[-1]

    monkeypatch.setattr("hgrn_vision.data.splits.create_reader", create_reader)
    train, validation = open_splits(config(**STREAM, eval_images=20))
    assert (len(train), len(validation)) == (30, 20)
    assert (len(open_splits(config(**STREAM))[1]), len(open_splits(config(**STREAM, eval_images=99))[1])) == (30, 30)
    assert [reader.split for reader in readers[:2]] == ["t", "v"]
    # a model that is evaluated knows its classes
    assert train.class_names == ["0", "1", "2"]
    assert open_validation(config(**STREAM), ["a", "b"]).class_names == ["a", "b"]
    # timm divides the training images among the ranks; of the others every rank reads all and keeps its part
    assert [(reader.dist_rank, reader.dist_num_replicas) for reader in readers[:2]] == [(1, 2), (0, 1)]


# decoding is ours where they can leave it to us; a wds stream is a list of addresses, with nothing to download
@pytest.mark.parametrize("dataset, own", [("wds/", {"mode": ""}), ("tfds/flowers", {"mode": "RGB", "download": True})])
def test_what_streams_are_asked_for(monkeypatch, dataset, own):
    asked = []

    def create_reader(name, input_img_mode, **options):
        asked.append({"name": name, "mode": input_img_mode, **options})
        return SimpleNamespace(num_samples=30)

    monkeypatch.setattr("hgrn_vision.data.splits.create_reader", create_reader)
    changes = dict(dataset=dataset, seed=5, input_key="jpg", download=True, max_pixels=99)
    splits = open_splits(config(**{**STREAM, **changes}))
    shared = dict(name=dataset, root="somewhere", batch_size=16, seed=5, input_key="jpg", target_key=None, **own)
    assert asked == [{**shared, "split": "t", "is_training": True}, {**shared, "split": "v", "is_training": False}]
    assert [split.max_pixels for split in splits] == [99, 99]


def test_a_stream_cannot_be_balanced():
    with pytest.raises(ValueError, match="--balance needs images that can be read in any order; wds/ somewhere is"):
        open_splits(config(**STREAM, balance=True))


@pytest.mark.parametrize("folders", [NAMES, ["0", "1", "2"], ["Rose", "DAISY <B>", "2"], ["rose_", "daisy-<b>", "2"]])
def test_folders_are_named_by_class_or_number(folders):
    assert match_folders(Listing(None, np.arange(3), folders), NAMES, [()] * 3).tolist() == [0, 1, 2]


def test_a_name_goes_before_an_alias_and_an_alias_before_a_number():
    listing = Listing(None, np.arange(4), ["crane", "1", "bird", "2"])
    assert match_folders(listing, ["heron", "crane", "1"], [("bird", "crane"), (), ("2",)]).tolist() == [1, 2, 0, 2]
    assert match_folders(listing, ["a", "b", "c"], [("1",), (), ()]).tolist() == [-1, 0, -1, 2]


def test_folders_may_be_wordnet_ids():
    listing = Listing(None, np.arange(4), ["n02123045", "281", "tiger_cat", "nothing"])
    assert match_folders(listing, imagenet_names(1000), imagenet_aliases(1000)).tolist() == [281, 281, 282, -1]


def test_epoch_steps_caps_the_epoch():
    train, _ = open_splits(config())
    assert steps_per_epoch(train, config()) == 22
    assert len(list(TrainLoader(train, config(epoch_steps=3), SPEC).epoch(0))) == 3

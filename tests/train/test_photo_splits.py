"""The images of a distillation run: who labels them, which are held out, what is refused."""

import logging
import os

import numpy as np
import pytest
from image_data import SPEC, png, write
from torch import nn

from hgrn_vision.train import photo_splits
from hgrn_vision.train.config import TrainConfig
from hgrn_vision.train.photo_splits import open_photo_splits
from hgrn_vision.train.teachers import Answer, Teacher

COLOURS = ["red", "green", "blue"]


class Eye(nn.Module):
    """Answers with the dominant colour of an image."""

    def forward(self, images):
        return Answer(images.mean((2, 3)), None)


def teacher(class_names=COLOURS, classes=3):
    plain = SPEC._replace(mean=(0.0,) * 3, std=(1.0,) * 3)
    return Teacher("eye", Eye(), plain, class_names, classes)


def write_colours(folder, count):
    """Images that are red, green, blue in turn, named after their colour."""
    for number in range(count):
        write(folder / f"{number:03}-{COLOURS[number % 3]}.png", png(tuple(200 * (i == number % 3) for i in range(3))))
    return str(folder)


@pytest.fixture
def settings(tmp_path):
    def make(**changes):
        plain = {"photos": (str(tmp_path / "photos"),), "pack": 0, "cache": str(tmp_path / "cache"), "holdout": 0.25}
        return TrainConfig(**{**plain, **changes})

    return make


def colour(split, index):
    return os.path.basename(split.image_name(index)).split("-")[1].removesuffix(".png")


@pytest.mark.parametrize("pack", [0, 8])
def test_the_teacher_labels_what_is_held_out(tmp_path, settings, pack):
    write_colours(tmp_path / "photos", 280)
    splits = open_photo_splits(settings(pack=pack), teacher())
    # more than one batch of answers
    assert (len(splits.train), len(splits.agreement)) == (210, 70)
    rows = np.concatenate([splits.train.rows, splits.agreement.rows])
    assert sorted(rows) == list(range(280)) and splits.labelled is None
    assert splits.train.name == "train" and splits.agreement.name == "agreement"
    labels = [COLOURS[label] for label in splits.agreement.labels]
    assert labels == [colour(splits.agreement, index) for index in range(70)] and len(set(labels)) == 3
    assert len(splits.train.labels) == 210 and splits.train.class_names == COLOURS


def test_photographs_that_cannot_be_read_are_not_labelled(tmp_path, settings):
    write_colours(tmp_path / "photos", 16)
    held_out = open_photo_splits(settings(), teacher()).agreement
    names = [held_out.image_name(index) for index in range(4)]
    open(names[1], "wb").close()
    again = open_photo_splits(settings(), teacher()).agreement
    assert [again.image_name(index) for index in range(len(again))] == [names[0], names[2], names[3]]
    assert [COLOURS[label] for label in again.labels] == [colour(again, index) for index in range(3)]
    for name in names:
        open(name, "wb").close()
    with pytest.raises(ValueError, match="none of the 4 photographs held out for validation could be read"):
        open_photo_splits(settings(), teacher())


def test_labelled_images_are_matched_by_name_or_number(tmp_path, settings, caplog):
    write_colours(tmp_path / "photos", 16)
    for name, count in {"Blue": 3, "0": 2, "purple": 4}.items():
        for number in range(count):
            write(tmp_path / "val" / name / f"{number}.png", png((1, 2, number)))
    with caplog.at_level(logging.WARNING):
        splits = open_photo_splits(settings(val=str(tmp_path / "val")), teacher())
    found = {splits.labelled.image_name(i): int(splits.labelled.labels[i]) for i in range(len(splits.labelled))}
    assert found == {"0/0.png": 0, "0/1.png": 0, **{f"Blue/{i}.png": 2 for i in range(3)}}
    assert "4 images in" in caplog.text and "left out: purple" in caplog.text


def test_a_limit_holds_for_both_things_that_are_measured(tmp_path, settings):
    write_colours(tmp_path / "photos", 40)
    for number in range(9):
        write(tmp_path / "val" / "red" / f"{number}.png", png((1, 2, number)))
    splits = open_photo_splits(settings(val=str(tmp_path / "val"), eval_images=3), teacher())
    assert (len(splits.train), len(splits.agreement), len(splits.labelled)) == (30, 3, 3)


def test_what_is_refused(tmp_path, settings):
    write_colours(tmp_path / "photos", 1)
    with pytest.raises(ValueError, match="photos: holding out 1 of 1 photographs for validation leaves none"):
        open_photo_splits(settings(), teacher())
    with pytest.raises(ValueError, match="teacher eye does not name its classes: give --classes"):
        open_photo_splits(settings(), teacher(None))
    with pytest.raises(ValueError, match="3 class names for the 4 classes of eye"):
        open_photo_splits(settings(), teacher(classes=4))
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="2 class names for the 3 classes of eye"):
        open_photo_splits(settings(classes=str(tmp_path / "names.txt")), teacher())
    write(tmp_path / "val" / "purple" / "1.png")
    with pytest.raises(
        ValueError, match="no folder in .*val is named after a class.*found purple, expected .*red, green"
    ):
        open_photo_splits(settings(val=str(tmp_path / "val")), teacher())
    with pytest.raises(ValueError, match="no such folder: nowhere"):
        open_photo_splits(settings(val="nowhere"), teacher())


def test_names_from_a_file_go_before_the_teachers(tmp_path, settings):
    write_colours(tmp_path / "photos", 16)
    (tmp_path / "names.txt").write_text("rot\ngrün\nblau\n", encoding="utf-8")
    splits = open_photo_splits(settings(classes=str(tmp_path / "names.txt")), teacher())
    assert splits.train.class_names == splits.agreement.class_names == ["rot", "grün", "blau"]


def test_what_is_validated_on_is_not_learned_from(tmp_path, settings, monkeypatch):
    """Photographs are looked for among all labelled images, not only among those that are measured."""
    write_colours(tmp_path / "photos", 8)
    for number in range(6):
        write(tmp_path / "val" / "red" / f"{number}.png", png((number, 0, 0)))
    asked, progress = [], object()
    whole = photo_splits.open_photos

    def open_photos(folders, side, cache, max_pixels, avoid, shown):
        asked.append((max_pixels, len(avoid), shown))
        return whole(folders, side, cache, max_pixels, avoid, None)

    monkeypatch.setattr(photo_splits, "open_photos", open_photos)
    config = settings(val=str(tmp_path / "val"), eval_images=2, max_pixels=9999)
    splits = open_photo_splits(config, teacher(), progress)
    assert asked == [(9999, 6, progress)] and len(splits.labelled) == 2
    assert {split.max_pixels for split in (splits.train, splits.agreement, splits.labelled)} == {9999}

"""hgrn-vision pathfinder: files in two class folders, the same for the same seed."""

import numpy as np
import pytest
from PIL import Image

from hgrn_vision.cli import main
from hgrn_vision.data.pathfinder import pathfinder_image
from hgrn_vision.data.spec import ImageSettings
from hgrn_vision.data.splits import open_splits


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.png"))}


def test_two_class_folders_of_grey_images(tmp_path, capsys):
    for name in ("a", "b"):
        assert main(["pathfinder", str(tmp_path / name), "--images", "7", "--size", "24", "--seed", "5"]) == 0
    assert "7 images" in capsys.readouterr().out
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert list(files(tmp_path / "a")) == [
        *(f"connected/0000{number}.png" for number in (0, 2, 4, 6)),
        *(f"separate/0000{number}.png" for number in (1, 3, 5)),
    ]
    with Image.open(tmp_path / "a" / "separate" / "00003.png") as image:
        assert (image.mode, image.size) == ("L", (24, 24))
        np.testing.assert_array_equal(np.asarray(image), np.asarray(pathfinder_image(5, 3, 24)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    train, validation = open_splits(ImageSettings(str(tmp_path / "a"), holdout=0.3))
    assert train.class_names == ["connected", "separate"] and len(train) + len(validation) == 7


def test_more_images_begin_with_the_same_ones(tmp_path):
    for name, count in (("few", "2"), ("more", "4")):
        main(["pathfinder", str(tmp_path / name), "--images", count, "--seed", "1"])
    assert files(tmp_path / "few").items() <= files(tmp_path / "more").items()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--images", "0"], "'0' is not a positive integer"),
        (["--images", "1"], "--images must be at least 2"),
        (["--images", "4", "--size", "8"], "--size must be at least 16 pixels, got 8"),
        (["--images", "4", "--size", "32", "--seed", "x"], "invalid int value: 'x'"),
        ([], "--images"),
    ],
)
def test_bad_input_is_one_line(flags, words, tmp_path, capsys):
    try:
        code = main(["pathfinder", str(tmp_path / "new"), *flags])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused(tmp_path, capsys):
    assert main(["pathfinder", str(tmp_path), "--images", "4"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_nothing_is_left_half_written(tmp_path, monkeypatch, capsys):
    def full_disk(seed, number, size):
        if number == 3:
            raise OSError("no space left on device")
        return pathfinder_image(seed, number, size)

    monkeypatch.setattr("hgrn_vision.commands.pathfinder.pathfinder_image", full_disk)
    assert main(["pathfinder", str(tmp_path / "new"), "--images", "4", "--size", "16"]) == 2
    assert "no space left" in capsys.readouterr().err and not list(tmp_path.iterdir())

"""Photographs without labels: which are found, which are left out, which are held out."""

import os

import numpy as np
import pytest
from photographs import scene, write_scenes
from PIL import Image

from hgrn_vision.data.photos import hold_out, list_photos, open_photos
from hgrn_vision.data.sources import Files
from hgrn_vision.data.splits import Split


def test_any_number_of_folders_at_any_depth(tmp_path):
    one, two = write_scenes(tmp_path / "one", [1, 2]), write_scenes(tmp_path / "two" / "deep" / "er", [3])
    files = list_photos([str(tmp_path / "two"), one])
    assert [os.path.basename(files.read(row)) for row in range(3)] == ["03.png", "01.png", "02.png"]
    assert os.path.samefile(files.read(0), os.path.join(two, "03.png"))


@pytest.mark.parametrize("name, message", [("nowhere", "no such folder: .*nowhere"), ("empty", "no images in .*empty")])
def test_a_folder_without_images_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        list_photos([write_scenes(tmp_path / "photos", [1]), str(tmp_path / name)])


def test_what_looks_like_held_out_images_is_left_out_and_listed(tmp_path):
    photos = write_scenes(tmp_path / "photos", range(12))
    held_out = tmp_path / "held out"
    held_out.mkdir()
    for seed in (3, 8, 40):
        scene(seed).resize((60, 60), Image.BICUBIC).save(held_out / f"{seed}.png")
    names = sorted(os.listdir(held_out))
    files = Files(str(held_out), np.array([os.fsencode(name) for name in names]))
    avoid = Split("validation", files, ["x"], np.zeros(3, dtype=np.int64), np.arange(3))
    found = open_photos([photos], 32, tmp_path / "cache", 10**6, avoid, None)
    left = [os.path.basename(found.source.name(row)) for row in found.rows]
    assert left == [f"{seed:02}.png" for seed in range(12) if seed not in (3, 8)]
    assert sorted((os.path.basename(photo), like) for photo, like, _ in found.duplicates) == [
        ("03.png", "3.png"),
        ("08.png", "8.png"),
    ]
    assert len(open_photos([photos], 32, tmp_path / "cache", 10**6, None, None).rows) == 12


def test_without_a_pack_the_files_themselves_are_read(tmp_path):
    photos = write_scenes(tmp_path / "photos", [1, 2])
    found = open_photos([photos], 0, tmp_path / "cache", 10**6, None, None)
    assert isinstance(found.source, Files) and len(found.rows) == 2
    assert not (tmp_path / "cache").exists()


def test_hold_out_divides_the_rows_the_same_way_every_time():
    rows = np.arange(5, 1005)
    kept, held_out = hold_out(rows, 0.1)
    assert len(held_out) == 100 and np.array_equal(np.sort(np.concatenate([kept, held_out])), rows)
    assert np.array_equal(hold_out(rows, 0.1)[1], held_out)
    assert len(hold_out(np.arange(10**6), 0.1)[1]) == 2000
    assert len(hold_out(np.arange(3), 0.001)[1]) == 1

"""Photographs without labels: which are found, which are left out, which are held out."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from photographs import scene, write_scenes
from PIL import Image

from hgrn_vision.data.near_duplicates import difference_hash
from hgrn_vision.data.photos import find_duplicates, hold_out, list_photos, open_photos, pack_path
from hgrn_vision.data.sources import Files
from hgrn_vision.data.splits import Split


def test_any_number_of_folders_at_any_depth(tmp_path):
    one, two = write_scenes(tmp_path / "one", [1, 2]), write_scenes(tmp_path / "two" / "deep" / "er", [3])
    # as operating systems leave beside an image
    for name in ("._01.png", ".DS_Store", "notes.txt"):
        (tmp_path / "one" / name).touch()
    files = list_photos([str(tmp_path / "two"), one])
    assert len(files.paths) == 3
    assert [os.path.basename(files.read(row)) for row in range(3)] == ["03.png", "01.png", "02.png"]
    assert os.path.samefile(files.read(0), os.path.join(two, "03.png"))


def test_cameras_write_capitals_and_folders_may_be_links(tmp_path):
    os.rename(os.path.join(write_scenes(tmp_path / "elsewhere", [1]), "01.png"), tmp_path / "elsewhere" / "DSC01.PNG")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    files = list_photos([str(tmp_path / "photos")])
    assert [files.read(row) for row in range(len(files.paths))] == [str(tmp_path / "photos" / "link" / "DSC01.PNG")]


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


def test_held_out_images_that_cannot_be_read_are_passed_over(tmp_path):
    photos = write_scenes(tmp_path / "photos", [1, 2])
    held_out = tmp_path / "held out"
    held_out.mkdir()
    (held_out / "broken.png").write_bytes(b"no image")
    scene(2).save(held_out / "two.png")
    files = Files(str(held_out), np.array([b"broken.png", b"two.png"]))
    both = Split("validation", files, ["x"], np.zeros(2, dtype=np.int64), np.arange(2))
    found = open_photos([photos], 32, tmp_path / "cache", 10**6, both, None)
    assert [(os.path.basename(photo), like) for photo, like, _ in found.duplicates] == [("02.png", "two.png")]
    broken = both.subset(np.array([0]))
    assert open_photos([photos], 32, tmp_path / "cache", 10**6, broken, None).duplicates == []


def test_how_alike_is_too_alike(tmp_path):
    folder = write_scenes(tmp_path / "held out", [1])
    held_out = Split("validation", Files(folder, np.array([b"01.png"])), ["x"], np.zeros(1, int), np.arange(1))
    bits = np.unpackbits(difference_hash(scene(1)))
    hashes = np.stack([np.packbits(np.where(np.arange(256) < count, 1 - bits, bits)) for count in (24, 25, 0)])
    photos = SimpleNamespace(hashes=hashes, name=["24 differ", "25 differ", "same"].__getitem__)
    assert find_duplicates(photos, held_out) == [("24 differ", "01.png", 24), ("same", "01.png", 0)]


def test_runs_on_the_same_folders_share_a_pack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = pack_path(tmp_path, ["a", "b"], 96)
    assert path == pack_path(tmp_path, [str(tmp_path / "a"), "b/"], 96) and path.parent == tmp_path
    others = [
        pack_path(tmp_path, folders, side) for folders, side in ((["a"], 96), (["a", "b"], 112), (["b", "a"], 96))
    ]
    assert len({path, *others}) == 4

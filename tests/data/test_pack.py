"""Photographs in one file: what comes out is what went in, and damage or change is noticed."""

import os
import pickle

import numpy as np
import pytest
from PIL import Image

from hgrn_vision.data import pack
from hgrn_vision.data.near_duplicates import difference_hash
from hgrn_vision.data.pack import FOOTER, MAGIC, DamagedPack, open_pack, shrink
from hgrn_vision.data.photos import list_photos
from hgrn_vision.data.splits import Split


def write_photo(path, seed, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.RandomState(seed).randint(0, 256, (5, 5, 3)).astype(np.uint8)
    Image.fromarray(coarse).resize(size, Image.BICUBIC).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(("a.png", "deep/er/b.png", "deep/c.jpg", "é.png")):
        write_photo(tmp_path / "photos" / name, seed, (40 + seed, 30))
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"not a jpeg")
    (tmp_path / "photos" / ".hidden.png").write_bytes(b"")
    (tmp_path / "photos" / "notes.txt").write_text("no photograph")
    return tmp_path / "photos"


def open_it(folder, side=16, **options):
    return open_pack(folder.parent / "cache" / "it.pack", list_photos([str(folder)]), side, 10**6, **options)


def test_photos_come_back_in_order_and_small(folder):
    packed = open_it(folder)
    names = [os.path.relpath(packed.name(row), folder) for row in range(len(packed))]
    assert names == ["a.png", "deep/c.jpg", "deep/er/b.png", "é.png"]
    for row, name in enumerate(names):
        with Image.open(folder / name) as image:
            want = shrink(image.convert("RGB"), 16)
        assert packed.read(row).size == want.size
        assert min(want.size) == 16
        # a JPEG may have been decoded at a reduced scale
        tolerance = 40 if name.endswith("jpg") else 0
        assert np.abs(np.float32(packed.read(row)) - np.float32(want)).max() <= tolerance
    assert [(os.path.basename(name), bool(reason)) for name, reason in packed.bad] == [("broken.jpg", True)]


def test_hashes_are_of_the_photos_before_they_are_made_small(folder):
    packed = open_it(folder, side=8)
    with Image.open(folder / "a.png") as image:
        assert np.array_equal(packed.hashes[0], difference_hash(image))
        assert not np.array_equal(packed.hashes[0], difference_hash(shrink(image, 8)))


def test_photos_with_too_many_pixels_are_listed_and_left_out(folder):
    packed = open_pack(folder.parent / "cache" / "it.pack", list_photos([str(folder)]), 16, 40 * 30)
    assert [os.path.basename(packed.name(row)) for row in range(len(packed))] == ["a.png"]
    assert sum("is more than 1,200 pixels" in reason for _, reason in packed.bad) == 3


def test_many_photos_are_decoded_a_few_at_a_time(folder, monkeypatch):
    whole = [np.asarray(open_it(folder).read(row)) for row in range(4)]
    monkeypatch.setattr(pack, "AT_ONCE", 2)
    (folder.parent / "cache" / "it.pack").unlink()
    steps = []
    packed = open_it(folder, progress=lambda starts, each: steps.append((list(starts), each)) or starts)
    assert steps == [([0, 2, 4], 2)]
    assert len(packed) == 4 and all(np.array_equal(np.asarray(packed.read(row)), whole[row]) for row in range(4))


def test_small_photos_are_not_enlarged(folder):
    assert open_it(folder, side=100).read(0).size == (40, 30)


def test_large_jpegs_are_decoded_at_a_reduced_scale(tmp_path, monkeypatch):
    path = write_photo(tmp_path / "photos" / "large.jpg", 0, (640, 480))
    drafts = []
    original = Image.Image.draft

    def watch(image, mode, size):
        drafts.append(size)
        return original(image, mode, size)

    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.draft", lambda image, mode, size: watch(image, mode, size))
    assert min(open_it(path.parent).read(0).size) == 16
    assert drafts == [(64, 64)]


def test_it_is_built_once_and_again_when_something_changed(folder):
    builds = []

    def count(starts, photos_each):
        builds.append(list(starts))
        return starts

    open_it(folder, progress=count)
    open_it(folder, progress=count)
    assert len(builds) == 1
    write_photo(folder / "new.png", 9)
    assert len(open_it(folder, progress=count)) == 5
    os.utime(folder / "a.png", ns=(1, 1))
    open_it(folder, progress=count)
    # another file of the same time
    write_photo(folder / "a.png", 0, (50, 30))
    os.utime(folder / "a.png", ns=(1, 1))
    assert open_it(folder, progress=count).read(0).size == (27, 16)
    assert len(open_it(folder, side=8, progress=count)) == 5
    os.remove(folder / "a.png")
    assert len(open_it(folder, progress=count)) == 4
    assert len(builds) == 6


def flip_in_the_index(content):
    begin, *_ = FOOTER.unpack(content[-FOOTER.size :])
    middle = begin + content[begin:].index(b"hashes.npy") + 200
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE = {
    "end cut off": lambda content: content[:-10],
    "only the beginning": lambda content: content[:100],
    "empty": lambda content: b"",
    "end overwritten": lambda content: content[:-200] + bytes(200),
    "footer overwritten": lambda content: content[: -FOOTER.size] + FOOTER.pack(2**63, 2**63, bytes(32), MAGIC),
    "beginning cut off": lambda content: content[10:],
    "index": flip_in_the_index,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_built_again(folder, damage):
    first = np.asarray(open_it(folder).read(0))
    path = folder.parent / "cache" / "it.pack"
    path.write_bytes(damage(path.read_bytes()))
    assert np.array_equal(np.asarray(open_it(folder).read(0)), first)


def test_damaged_pixels_are_noticed_when_they_are_read(folder):
    open_it(folder)
    path = folder.parent / "cache" / "it.pack"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    packed = open_it(folder)
    with pytest.raises(DamagedPack, match=r"it\.pack is damaged at .*a\.png: remove it"):
        packed.read(0)
    packed.read(1)


def test_a_build_that_fails_leaves_nothing(folder):
    def stop(starts, photos_each):
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        open_it(folder, progress=stop)
    assert not any((folder.parent / "cache").iterdir())


def test_no_readable_photo_is_an_error(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"not a jpeg")
    with pytest.raises(ValueError, match="none of the 1 photographs could be read"):
        open_it(tmp_path / "photos")


def test_it_serves_a_split_in_another_process(folder):
    packed = open_it(folder)
    packed.read(0)
    copy = pickle.loads(pickle.dumps(packed))
    # a process opens the file itself: pickled pixels would be copied
    assert "_pixels" in vars(packed) and "_pixels" not in vars(copy)
    split = Split("train", copy, ["x"], np.zeros(4, dtype=np.int64), np.arange(4))
    assert np.array_equal(np.asarray(split.load(2)), np.asarray(packed.read(2)))

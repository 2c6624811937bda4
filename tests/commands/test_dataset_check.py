"""What is found in a folder of images before training, and how it is reported."""

import numpy as np
from PIL import Image
from saved_models import write_photos

from hgrn_vision.commands._dataset_check import survey
from hgrn_vision.data.splits import open_splits
from hgrn_vision.train.config import TrainConfig


def look_at(folder):
    return survey(str(folder), *open_splits(TrainConfig(data=str(folder), holdout=0.2)))


def make_grey(folder):
    for path in folder.rglob("*.png"):
        # a slight tint, like a JPEG of a scan
        grey = np.asarray(Image.open(path).convert("L")).astype(int)
        Image.fromarray(np.stack([grey + 3, grey, grey - 3], -1).clip(0, 255).astype(np.uint8)).save(path)
    return folder


def write_odd(folder):
    """A folder with every possible flaw, but still enough images to train on."""
    write_photos(folder, {"a": 12, "b": 2, "c": 1})
    (folder / "nothing here").mkdir()
    (folder / "a" / "notes.txt").write_text("not an image")
    (folder / "a" / "broken.png").write_text("not an image either")
    image = Image.open(folder / "a" / "photo 0.png")
    image.save(folder / "b" / "a jpeg.png", "JPEG")
    return folder


def test_findings_are_reported(tmp_path):
    folder = write_odd(tmp_path / "odd")
    train, validation = open_splits(TrainConfig(data=str(folder), holdout=0.2))
    found = list(survey(str(folder), train, validation).lines())
    assert "17 images of 3 classes" in found[0] and "(1 to 10 per class)" in found[0] and ", 1 unreadable, " in found[0]
    text = "\n".join(found[1:])
    assert "unreadable: a/broken.png: not an image in a known format" in text
    assert "ignored, folder without images: nothing here" in text
    assert "ignored, no image extension: a/notes.txt" in text
    assert "class without validation images: c" in text


def test_copies_across_the_split_are_suspected_and_others_are_not(tmp_path):
    noise = np.random.RandomState(0)
    images = [Image.fromarray(noise.randint(0, 256, (6, 8, 3)).astype(np.uint8)).resize((320, 240)) for _ in range(6)]
    for number, image in enumerate(images):
        path = tmp_path / ("train" if number < 4 else "val") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    # the same image, smaller and in another format
    images[1].resize((160, 120)).save(tmp_path / "val" / "b" / "copy.jpg", quality=80)
    found = survey(str(tmp_path), *open_splits(TrainConfig(data=str(tmp_path))))
    assert found.twins == [("b/1.png", "b/copy.jpg")]
    assert "1 suspected duplicate across" in next(found.lines())
    assert "160x120 to 320x240 pixels, mostly about 320x240" in next(found.lines())
    assert found.side == 240


def test_what_is_taken_for_photographs(tmp_path):
    large, small = (look_at(write_photos(tmp_path / f"{side}", {"a": 4, "b": 4}, side)) for side in (32, 31))
    grey = look_at(make_grey(write_photos(tmp_path / "grey", {"a": 4, "b": 4}, 64)))
    assert (large.photographs, small.photographs, grey.photographs) == (True, False, False)

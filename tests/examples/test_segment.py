"""examples/segment.py: scenes from digits, folders of images and masks, and what is refused."""

import struct
import zlib

import numpy as np
import pytest
import torch
from example_scripts import load_example
from PIL import Image
from torch import nn

pytest.importorskip("segmentation_models_pytorch", reason="needs the extra 'dense'")

segment = load_example("segment")


def write_pairs(folder, count=5, size=(40, 36), values=(0, 1)):
    """Images that are bright where their masks have the last value."""
    rng = np.random.RandomState(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for i in range(count):
        mask = np.full(size[::-1], values[0], np.uint8)
        mask[4:20, 5 : 20 + i] = values[-1]
        image = np.where(mask == values[-1], 200, 60)[..., None] + rng.randint(0, 30, (*mask.shape, 3))
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{i}.jpg")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    return folder / "images", folder / "masks"


def test_scenes():
    drawn = [segment.draw_scene(np.random.RandomState(seed), range(1437), 96) for seed in range(20)]
    for image, mask in drawn:
        assert image.shape == (96, 96, 3) and mask.shape == (96, 96) and image.dtype == mask.dtype == np.uint8
        assert 0.01 < (mask > 0).mean() < 0.7
    assert {int(v) for _, mask in drawn for v in np.unique(mask)} == set(range(segment.SCENE_CLASSES))
    again = segment.draw_scene(np.random.RandomState(0), range(1437), 96)
    assert all(map(np.array_equal, again, drawn[0]))


def test_iou_is_counted_over_labelled_pixels_of_padded_images():
    class Threshold(nn.Module):
        def forward(self, x):
            assert x.shape[2] % 32 == x.shape[3] % 32 == 0
            bright = x.mean(1, keepdim=True)
            return torch.cat([-bright, bright, torch.full_like(bright, -1e3)], 1)

    image = np.zeros((40, 50, 3), np.uint8)
    image[:, :20] = 255
    mask = np.zeros((40, 50), np.uint8)
    mask[:, :10] = 1
    mask[:, 45:] = segment.UNLABELLED
    background, bright, absent = segment.intersection_over_union(Threshold(), [(image, mask)], 3)
    assert (background, bright) == pytest.approx((25 / 35, 10 / 20)) and np.isnan(absent)


def test_learns_in_the_right_direction(tmp_path, capsys):
    options = ["--steps", "30", "--batch-size", "8", "--side", "64", "--output", str(tmp_path / "out")]
    iou = segment.run(options)
    out = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if line.startswith("step ")]
    assert losses[-1] < 0.8 * losses[0]
    # predicting only background would give 0.4
    assert iou > 0.55
    assert f"mean IoU {iou:.3f}" in out
    with Image.open(tmp_path / "out" / "result.png") as drawn:
        assert drawn.width > 400


def test_a_folder_of_images_and_masks(tmp_path, capsys):
    images, masks = write_pairs(tmp_path, values=(0, 255))
    output = tmp_path / "out"
    options = ["--steps", "6", "--batch-size", "2", "--side", "32", "--output", str(output)]
    assert segment.main([str(images), str(masks), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "U-Net with hgrn_pyramid_tiny, 2 classes, 4 training and 1 validation images"
    assert lines[-1].startswith("mean IoU 0.")
    import segmentation_models_pytorch as smp

    model = smp.from_pretrained(output / "unet").eval()
    image, mask = segment.read_pairs(images, masks, 32)[0][0]
    assert segment.predict(model, image).shape == mask.shape == (32, 36)
    # nothing is overwritten
    assert segment.main([str(images), str(masks), *options]) == 2
    assert "out is not an empty folder" in capsys.readouterr().err


def test_classes_are_the_values_of_the_masks(tmp_path):
    images, masks = write_pairs(tmp_path, values=(0, 7, 90))
    stray = np.asarray(Image.open(masks / "0.png")).copy()
    stray[0, :] = 7
    stray[-1, :] = 255
    palette = Image.fromarray(stray).convert("P")
    palette.putpalette([v for i in range(256) for v in (i, 255 - i, 0)])
    palette.putdata(stray.flatten().tolist())
    palette.save(masks / "0.png")
    pairs, classes = segment.read_pairs(images, masks, 36)
    assert classes == 3
    assert set(np.unique(pairs[0][1])) == {0, 1, 2, segment.UNLABELLED} and set(np.unique(pairs[1][1])) == {0, 2}
    assert pairs[0][1].shape == pairs[0][0].shape[:2] == (36, 40)


def with_alpha(classes):
    return Image.merge("LA", [Image.fromarray(classes), Image.new("L", classes.shape[::-1], 100)])


STORED = {
    "8 bits.png": Image.fromarray,
    "16 bits.png": lambda classes: Image.fromarray(classes.astype(np.uint16)),
    "32 bits.tif": lambda classes: Image.fromarray(classes.astype(np.int32)),
    "floats.tif": lambda classes: Image.fromarray(classes.astype(np.float32)),
    "alpha.png": with_alpha,
    "grey colours.png": lambda classes: Image.merge("RGB", [Image.fromarray(classes)] * 3),
}


@pytest.mark.parametrize("name", STORED)
def test_a_mask_is_what_its_file_stores(name, tmp_path):
    classes = np.array([[0, 1, 2], [200, 254, 255]], np.uint8)
    STORED[name](classes).save(tmp_path / name)
    assert np.array_equal(np.asarray(segment._read_mask(tmp_path / name)), classes)


def test_a_mask_of_one_bit(tmp_path):
    Image.fromarray(np.array([[False, True]])).save(tmp_path / "mask.png")
    assert np.asarray(segment._read_mask(tmp_path / "mask.png")).tolist() == [[0, 255]]


@pytest.mark.parametrize("values", [[[0, 1], [300, 400]], [[0, -1]], [[0.0, 1.5]], [[0.0, float("nan")]]], ids=str)
def test_values_that_are_no_classes(values, tmp_path):
    array = np.array(values)
    kind = np.float32 if array.dtype.kind == "f" else np.int32 if array.min() < 0 else np.uint16
    Image.fromarray(array.astype(kind)).save(tmp_path / "mask.tif")
    message = f"{tmp_path}/mask.tif: the values of a mask must be whole numbers from 0 to 255"
    with pytest.raises(ValueError, match=message):
        segment._read_mask(tmp_path / "mask.tif")


def test_the_weights_of_a_plain_model_go_into_the_encoder(tmp_path):
    import timm

    plain = timm.create_model("hgrn_deit_tiny_patch16_224", num_classes=3)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    model = segment.build(2, weights=str(tmp_path / "plain.pth"))
    assert torch.equal(model.encoder.model.model.blocks[3].mlp.fc1.weight, plain.blocks[3].mlp.fc1.weight)
    packaged = timm.create_model("hgrn_deit_tiny", pretrained=True).lower_bound
    assert torch.equal(segment.build(2).encoder.model.model.lower_bound, packaged)
    assert segment.build(2, weights="none").encoder.model.model.lower_bound.eq(1).all()


def spoil(folder, what):
    images, masks = folder / "images", folder / "masks"
    if what == "mask missing":
        (masks / "3.png").unlink()
    elif what == "image missing":
        (images / "3.jpg").unlink()
    elif what == "sizes":
        Image.new("L", (41, 36)).save(masks / "2.png")
    elif what == "colours":
        Image.new("RGB", (40, 36), (1, 2, 3)).save(masks / "2.png")
    elif what == "cmyk":
        Image.new("CMYK", (40, 36), (1, 1, 1, 0)).save(masks / "2.png", format="TIFF")
    elif what == "16 bits":
        Image.fromarray(np.full((36, 40), 300, np.uint16)).save(masks / "2.png")
    elif what == "huge":
        # the header of 20000 x 20000 pixels, without the pixels
        header = b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 8, 0, 0, 0, 0)
        chunks = struct.pack(">I", 13) + header + struct.pack(">II", zlib.crc32(header), 9) + b"IDAT"
        (masks / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    elif what == "jpeg":
        Image.new("L", (40, 36)).save(masks / "2.png", format="JPEG")
    elif what == "broken mask":
        (masks / "2.png").write_bytes(b"\x89PNG nothing")
    elif what == "broken image":
        (images / "2.jpg").write_text("not an image")
    elif what == "twice":
        Image.new("L", (40, 36)).save(masks / "2.bmp")
    elif what == "one value":
        for path in masks.iterdir():
            Image.new("L", (40, 36)).save(path)
    elif what == "empty":
        for path in images.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    "what, message",
    [
        ("mask missing", "1 of 5 files have no mask in {}/masks, for example {}/images/3.jpg"),
        ("image missing", "1 of 5 files have no image in {}/images, for example {}/masks/3.png"),
        ("sizes", "{}/images/2.jpg has 40x36 pixels, its mask {}/masks/2.png has 41x36"),
        ("colours", "{}/masks/2.png: a mask must have one channel of class numbers, not colours"),
        ("cmyk", "{}/masks/2.png: a mask must have one channel of class numbers, not colours"),
        ("16 bits", "{}/masks/2.png: the values of a mask must be whole numbers from 0 to 255"),
        ("huge", "{}/masks/2.png: more than 178,956,970 pixels"),
        ("jpeg", "{}/masks/2.png: JPEG changes the values of a mask; save masks as PNG"),
        ("broken mask", "{}/masks/2.png: not a readable image (UnidentifiedImageError)"),
        ("broken image", "{}/images/2.jpg: not an image in a known format"),
        ("twice", "{}/masks/2.bmp and 2.png differ only in their extension"),
        ("one value", "all masks in {}/masks have the value 0 everywhere; expected at least two classes"),
        ("empty", "{}/images has no files"),
    ],
)
def test_bad_folders(what, message, tmp_path, capsys):
    images, masks = write_pairs(tmp_path)
    spoil(tmp_path, what)
    assert segment.main([str(images), str(masks), "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"segment.py: {message.replace('{}', str(tmp_path))}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["nowhere", "masks"], "no such folder: nowhere"),
        (["images"], "expected two folders, IMAGES and MASKS, or none; got one"),
        (["--side", "100"], "--side must be a multiple of 32, got 100"),
        (["--steps", "0"], "--steps, --batch-size and --lr must be positive"),
        (["--lr", "nan"], "--steps, --batch-size and --lr must be positive"),
        (["--lr", "inf"], "--steps, --batch-size and --lr must be positive"),
        (["--weights", "nowhere.pth"], "no checkpoint file at nowhere.pth"),
        (["--model", "hgrn_deit_tiny"], "hgrn_deit_tiny has no maps at strides 4, 8, 16 and 32"),
        (["--model", "resnet18", "--weights", "plain.pth"], "--weights needs hgrn_pyramid_small, hgrn_pyramid_tiny"),
        (["--model", "nonesuch"], "unknown model nonesuch"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    assert segment.main([*options, "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["file", "file/x", "file/x/y"])
def test_an_output_folder_below_a_file(output, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(segment, "build", lambda *args: pytest.fail("built"))
    assert segment.main(["--output", output]) == 2
    assert capsys.readouterr().err == "segment.py: file is not a folder; choose another output folder\n"
    assert (tmp_path / "file").read_text() == "mine"


def test_without_segmentation_models(monkeypatch, tmp_path, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    assert segment.main(["--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "segment.py: segmentation_models_pytorch is not installed; pip install 'hgrn_vision[dense]' brings it\n"
    )

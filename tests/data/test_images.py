"""Decoding: each odd kind of file against pixels computed by hand."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from hgrn_vision.data.images import BadImage, open_image


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(height: int = 24, width: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)


def pixels(source, **options) -> np.ndarray:
    image = open_image(source, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_takes_paths_bytes_files_and_images(tmp_path):
    data = encode(Image.fromarray(noise()), "PNG")
    path = tmp_path / "photo of a cät.jpg"  # the extension is wrong on purpose
    path.write_bytes(data)
    for source in (path, str(path), data, io.BytesIO(data), Image.open(path)):
        np.testing.assert_array_equal(pixels(source), noise())


@pytest.mark.parametrize("format", ["TIFF", "PNG"])
def test_sixteen_bits_are_scaled_not_clipped(format):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    data = encode(Image.fromarray(ramp), format)
    got = pixels(data)[..., 0].astype(float)
    np.testing.assert_allclose(got, ramp / 257, atol=0.51)
    assert len(np.unique(got)) == 64


def test_sixteen_bit_pgm_and_float_tiff():
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)
    pgm = b"P5 8 8 65535\n" + ramp.astype(">u2").tobytes()
    np.testing.assert_allclose(pixels(pgm)[..., 0].ravel(), ramp / 257, atol=0.51)
    unit = (ramp / 65535).astype(np.float32).reshape(8, 8)
    np.testing.assert_allclose(pixels(encode(Image.fromarray(unit), "TIFF"))[..., 0], unit * 255, atol=0.51)
    black = encode(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")
    assert pixels(black).max() == 0


# a float TIFF does not say what white is: the smallest common range that holds its values, else its largest value
@pytest.mark.parametrize(
    "dtype, values, grey",
    [
        (np.float32, [0, 0.5, 1], [0, 128, 255]),
        (np.float32, [0, 1, 200], [0, 1, 200]),
        (np.float32, [0, 257, 65535], [0, 1, 255]),
        (np.float32, [0, 50_000, 100_000], [0, 128, 255]),
        (np.float32, [-5, 0, 1], [0, 0, 255]),
        (np.int32, [0, 1, 200], [0, 0, 1]),
        (np.int32, [0, 50_000, 100_000], [0, 128, 255]),
    ],
)
def test_the_range_of_a_tiff_is_guessed_from_its_largest_value(dtype, values, grey):
    data = encode(Image.fromarray(np.array([values], dtype)), "TIFF")
    assert pixels(data)[0, :, 0].tolist() == grey


def test_float_tiff_with_nan_is_refused():
    data = encode(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF")
    with pytest.raises(BadImage, match="not finite"):
        open_image(data)


def test_the_limit_that_refused_an_image_is_named(monkeypatch):
    data = encode(Image.fromarray(noise()), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match="^more than 200 pixels"):
        open_image(data, max_pixels=10**9)
    with pytest.raises(BadImage, match="^more than 50 pixels"):
        open_image(data, max_pixels=50)


def test_alpha_lies_over_white():
    rgba = np.dstack([noise(), np.tile(np.arange(0, 256, 8, dtype=np.uint8), (24, 1))])
    share = rgba[..., 3:] / 255
    expected = rgba[..., :3] * share + 255 * (1 - share)
    np.testing.assert_allclose(pixels(encode(Image.fromarray(rgba), "PNG")), expected, atol=1)


def test_transparent_palette_and_grey_with_transparency():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([0, 1])
    got = pixels(encode(palette, "PNG", transparency=0))
    np.testing.assert_array_equal(got, [[[255, 255, 255], [200, 100, 50]]])
    np.testing.assert_array_equal(pixels(encode(palette, "PNG")), [[[10, 20, 30], [200, 100, 50]]])
    grey = Image.new("L", (2, 1), 7)
    grey.putpixel((0, 0), 9)
    np.testing.assert_array_equal(pixels(encode(grey, "PNG", transparency=9))[0, :, 0], [255, 7])


def test_cmyk_jpeg():
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow: red
    np.testing.assert_allclose(pixels(encode(ink, "JPEG", quality=95))[8, 8], [255, 0, 0], atol=6)


@pytest.mark.parametrize("orientation,turn", [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_exif_orientation_is_applied(orientation, turn):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(noise()), "PNG", exif=exif)
    np.testing.assert_array_equal(pixels(data), np.rot90(noise(), turn))


def test_damaged_exif_does_not_matter():
    data = encode(Image.fromarray(noise()), "PNG", exif=b"Exif\0\0MM\0*\0\0\xff\xff\xff\xff")
    np.testing.assert_array_equal(pixels(data), noise())


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(format):
    frames = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    np.testing.assert_allclose(pixels(data)[8, 8], [255, 0, 0], atol=3)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_truncated_files_are_refused(format):
    data = encode(Image.fromarray(noise(64, 64)), format)
    for share in (0.02, 0.3, 0.6, 0.9):
        with pytest.raises(BadImage) as error:
            open_image(data[: int(len(data) * share)])
        assert str(error.value) and "\n" not in str(error.value) and " at 0x" not in str(error.value)


def test_flipped_bytes_never_raise_anything_else():
    random = np.random.RandomState(0)
    for format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        data = np.frombuffer(encode(Image.fromarray(noise()), format), np.uint8)
        for _ in range(40):
            broken = data.copy()
            broken[random.randint(0, len(data), 8)] = random.randint(0, 256, 8)
            with contextlib.suppress(BadImage):
                assert open_image(broken.tobytes()).mode == "RGB"


@pytest.mark.parametrize("data,reason", [(b"", "empty file"), (b"hello, world", "not an image")])
def test_what_is_not_an_image(data, reason):
    with pytest.raises(BadImage, match=reason):
        open_image(data)


def test_missing_files_and_folders_are_bad_images(tmp_path):
    with pytest.raises(BadImage, match="No such file"):
        open_image(tmp_path / "nothing.png")
    with pytest.raises(BadImage, match="Is a directory"):
        open_image(tmp_path)


def test_postscript_is_not_run():
    with pytest.raises(BadImage, match="PostScript"):
        open_image(encode(Image.new("RGB", (4, 4)), "EPS"))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims width x height pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(10_000, 10_000), (20_000, 20_000)])
def test_decompression_bombs_are_refused(size, recwarn):
    with pytest.raises(BadImage, match="more than 89,478,485 pixels"):
        open_image(bomb(*size))
    assert not recwarn


def test_the_limit_can_be_set():
    data = encode(Image.fromarray(noise(10, 10)), "PNG")
    assert open_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(BadImage, match="10x10 is more than 99 pixels"):
        open_image(data, max_pixels=99)


def test_one_pixel():
    np.testing.assert_array_equal(pixels(encode(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")), [[[1, 2, 3]]])

"""hgrn-vision predict: one row per input, in order, whatever the inputs are."""

import csv
import html.parser
import io
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
import weakref
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from saved_models import CLASSES, edit_config, package_starter, save_model, write_image

from hgrn_vision.cli import main
from hgrn_vision.commands import predict
from hgrn_vision.data.images import open_image
from hgrn_vision.inference.classify import classify
from hgrn_vision.inference.pretrained import load_model
from hgrn_vision.report import gallery

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path):
    save_model(tmp_path / "run" / "model")
    return str(tmp_path / "run")


@pytest.fixture
def images(tmp_path):
    return [str(write_image(tmp_path / "images" / f"{i}.png", i)) for i in range(5)]


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def rows_of(capsys, *argv):
    """Exit code and the rows of the CSV table."""
    code = main(["predict", *map(str, argv), "--csv", "-"])
    return code, table(capsys.readouterr().out)


def start(*argv, **kwargs):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "hgrn_vision", *map(str, argv)], env=environment, **kwargs)


def test_a_thousand_files_ten_of_them_broken(model, tmp_path, capsys):
    folder, broken = tmp_path / "many", set(range(7, 1000, 100))
    for i in range(1000):
        path = write_image(folder / f"{i:04}.png", i)
        if i in broken:
            path.write_bytes(path.read_bytes()[: 40 if i % 200 > 100 else 0])
    outputs = [str(tmp_path / f"out.{kind}") for kind in ("csv", "json", "html")]
    code = main(["predict", model, str(folder), "--csv", outputs[0], "--json", outputs[1], "--html", outputs[2]])
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == "" and captured.err.strip().endswith("10 of 1000 inputs could not be read")

    rows = table(Path(outputs[0]).read_text(encoding="utf-8"))
    assert [row["file"] for row in rows] == [str(folder / f"{i:04}.png") for i in range(1000)]
    assert {i for i, row in enumerate(rows) if row["error"]} == broken
    assert all((row["label"] == "") == bool(row["error"]) for row in rows)
    assert len({row["label"] for row in rows}) == len(CLASSES) + 1
    objects = json.loads(Path(outputs[1]).read_text())
    assert [(entry["file"], entry["error"] or "") for entry in objects] == [(row["file"], row["error"]) for row in rows]
    assert [entry["predictions"][0]["label"] for entry in objects if not entry["error"]] == [
        row["label"] for row in rows if not row["error"]
    ]
    assert Path(outputs[2]).read_text().count("<figure>") == 1000


def test_probabilities_are_the_models(model, images, capsys):
    network = timm.create_model(f"local-dir:{model}/model", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({"img_size": 16}, model=network))
    with torch.no_grad():
        batch = torch.stack([transform(Image.open(path)) for path in images])
        want = network(batch).softmax(-1).numpy()
    code, rows = rows_of(capsys, model, *images)
    assert code == 0
    for row, probabilities in zip(rows, want, strict=True):
        order = np.argsort(-probabilities)
        assert [row[f"label{n}"] for n in ("", "_2", "_3")] == [CLASSES[i] for i in order]
        got = [float(row[f"probability{n}"]) for n in ("", "_2", "_3")]
        np.testing.assert_allclose(got, probabilities[order], rtol=1e-4)


def test_top_k(model, images, capsys):
    _, rows = rows_of(capsys, model, images[0], "--top", 2)
    assert list(rows[0]) == ["file", "label", "probability", "label_2", "probability_2", "error"]
    assert main(["predict", model, images[0], "--top", "1"]) == 0
    assert capsys.readouterr().out.count("%") == 1


def test_every_kind_of_input_keeps_its_place(model, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "in"
    for name in ("b/2.png", "b/10.JPG", "a.png", "[x].png", "z/deep/er.webp"):
        write_image(folder / name, 1)
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{folder}/a.png\n\n{folder}/b\r\n".encode())))
    code, rows = rows_of(
        capsys, model, folder / "b/2.png", folder, "-", folder / "b/*", folder / "[x].png", folder / "?.gif", "empty"
    )
    assert code == 1
    inside = ["[x].png", "a.png", "b/10.JPG", "b/2.png", "z/deep/er.webp"]
    names = ["b/2.png", *inside, "a.png", "b/10.JPG", "b/2.png", "b/10.JPG", "b/2.png", "[x].png", "?.gif"]
    assert [row["file"] for row in rows] == [*(str(folder / name) for name in names), "empty"]
    assert [bool(row["error"]) for row in rows] == [False] * 12 + [True] * 2


def test_an_empty_list_gives_no_rows(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert rows_of(capsys, model, "-") == (0, [])
    assert main(["predict", model, "-", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def write_huge_png(path):
    """A real image of 20,000 x 20,000 grey pixels, a few kilobytes long."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compressor = zlib.compressobj()
    pixels = b"".join(compressor.compress(bytes(1 + 20000 // 8)) for _ in range(20000)) + compressor.flush()
    header = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def test_odd_images(model, tmp_path, capsys):
    write_image(tmp_path / "one.png", 0, (1, 1))
    write_image(tmp_path / "wide.png", 0, (600, 1))
    write_image(tmp_path / "real.png", 0).rename(tmp_path / "png_as.jpg")
    write_image(tmp_path / "real.png", 0).rename(tmp_path / "image.dat")
    (tmp_path / "text.png").write_text("this is not an image")
    (tmp_path / "nothing.png").touch()
    write_huge_png(tmp_path / "huge.png")
    (tmp_path / "folder.png").mkdir()
    names = ["one.png", "wide.png", "png_as.jpg", "image.dat", "text.png", "nothing.png", "huge.png", "folder.png"]
    code, rows = rows_of(capsys, model, *(tmp_path / name for name in names), tmp_path / "missing.png")
    assert code == 1
    reasons = [row["error"] for row in rows]
    assert reasons[:4] == [""] * 4
    assert reasons[4:] == [
        "not an image in a known format",
        "empty file",
        "more than 89,478,485 pixels",
        "folder without images",
        "No such file or directory",
    ]
    _, rows = rows_of(capsys, model, tmp_path / "wide.png", "--max-pixels", 599)
    assert rows[0]["error"] == "600x1 is more than 599 pixels"


def test_names_of_any_bytes(model, tmp_path, capsys):
    folder = os.fsencode(tmp_path / "größe 写真")
    os.mkdir(folder)
    names = ["blüte.png".encode(), b"\xff\xfe.png", b'two\nlines,".png']
    for i, name in enumerate(names):
        write_image(tmp_path / "real.png", i).rename(os.fsdecode(os.path.join(folder, name)))
    out = tmp_path / "out"
    argv = ["predict", model, os.fsdecode(folder)]
    assert main([*argv, "--csv", f"{out}.csv", "--json", f"{out}.json", "--html", f"{out}.html"]) == 0
    want = sorted(os.fsdecode(os.path.join(folder, name)) for name in names)
    with open(f"{out}.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == want
    assert [row["file"] for row in json.loads(Path(f"{out}.json").read_text())] == want
    assert "blüte.png" in Path(f"{out}.html").read_text(encoding="utf-8")
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("%" in line for line in lines)


class Page(html.parser.HTMLParser):
    """The images and the words of a page."""

    def __init__(self, text):
        super().__init__()
        self.images, self.words, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes["src"])
        assert not any(value and value.startswith("http") for value in attributes.values())

    def handle_data(self, data):
        self.words.append(data)


def test_gallery(model, images, tmp_path, monkeypatch):
    Path(images[3]).write_text("not an image")
    assert main(["predict", model, *images, "--html", str(tmp_path / "page.html")]) == 1
    page = Page((tmp_path / "page.html").read_text())
    assert len(page.images) == 4 and all(source.startswith("data:image/jpeg;base64,") for source in page.images)
    assert "not an image in a known format" in page.words
    # a class name is text, never markup
    assert "daisy <b>" in page.words and "b" not in page.tags
    assert "5 images, 1 of them unreadable." in "".join(page.words)

    monkeypatch.setattr(gallery, "MOST", 2)
    assert main(["predict", model, *images, "--html", str(tmp_path / "short.html")]) == 1
    short = Page((tmp_path / "short.html").read_text())
    assert len(short.images) == 2
    assert "5 images, 1 of them unreadable; the first 2 are shown." in "".join(short.words)


def test_outputs_are_not_overwritten(model, images, tmp_path, capsys):
    out = tmp_path / "out.csv"
    out.write_text("precious")
    assert main(["predict", model, *images, "--csv", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert main(["predict", model, *images, "--csv", str(out), "--force"]) == 0
    assert len(table(out.read_text())) == 5
    assert main(["predict", model, *images, "--csv", "a", "--json", "a"]) == 2
    assert main(["predict", model, *images, "--csv", "-", "--json", "-"]) == 2
    assert main(["predict", model, *images, "--html", str(tmp_path)]) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["hgrn-vision predict"] * 3


def test_an_interrupted_command_leaves_no_file(model, images, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        yield from (answer for answer, _ in zip(classify(*args, **kwargs), range(3), strict=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "classify", interrupted)
    out = tmp_path / "out"
    argv = ["--csv", f"{out}/a.csv", "--json", f"{out}/a.json", "--html", f"{out}/a.html"]
    assert main(["predict", model, *images, *argv]) == 130
    assert list(out.iterdir()) == []


def test_ctrl_c_and_a_closed_pipe_in_a_process_of_its_own(model, images, tmp_path):
    out = tmp_path / "out"
    waiting = start("predict", model, "-", "--csv", out / "a.csv", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    closed = start("predict", model, *images * 400, "--batch-size", 4, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # the reader leaves after one row
    assert b"%" in closed.stdout.readline()
    closed.stdout.close()
    waiting.stdin.write("\n".join(images).encode())
    waiting.stdin.flush()
    end = time.monotonic() + 900
    while not (out.exists() and list(out.iterdir())):
        assert waiting.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=900) == 130
    assert waiting.stderr.read().decode() == "hgrn-vision predict: interrupted\n"
    assert list(out.iterdir()) == []
    waiting.stdin.close()
    assert closed.wait(timeout=900) == 128 + signal.SIGPIPE
    assert closed.stderr.read() == b""


def test_memory_does_not_grow_with_the_number_of_files(model, images, tmp_path, monkeypatch):
    """Images are freed once they are classified, and rows once they are written."""
    numbers = itertools.count()
    alive, thumbnails, most = weakref.WeakValueDictionary(), weakref.WeakValueDictionary(), [0, 0]

    class Thumbnail(str):
        """Freed with its row; unlike a plain string it can have weak references."""

    def opened(*args):
        image = alive[next(numbers)] = open_image(*args)
        return image

    def small(image):
        thumbnail = thumbnails[next(numbers)] = Thumbnail(gallery.thumbnail(image))
        return thumbnail

    def made(*args):
        most[:] = max(most[0], len(alive)), max(most[1], len(thumbnails))
        return make_row(*args)

    make_row = predict.make_row
    monkeypatch.setattr(predict, "open_image", opened)
    monkeypatch.setattr(predict, "thumbnail", small)
    monkeypatch.setattr(predict, "make_row", made)
    outputs = [f"--{kind}={tmp_path / kind}" for kind in ("csv", "json", "html")]
    assert main(["predict", model, *images * 20, "--batch-size", "4", *outputs]) == 0
    assert len(table((tmp_path / "csv").read_text())) == 100
    # one batch is being written, another decoded, and the loop still holds the row before
    assert most[0] <= 8 and 4 <= most[1] <= 9


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def reconfigure(self, **options):
        pass


@pytest.mark.parametrize("output, shown", [("--csv=out.csv", True), ("--csv=-", False), ("--top=1", False)])
def test_no_progress_between_rows_on_a_screen(model, images, tmp_path, monkeypatch, output, shown):
    monkeypatch.chdir(tmp_path)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    assert main(["predict", model, *images, output]) == 0
    assert ("5/5" in sys.stderr.getvalue()) == shown


def test_progress_on_a_terminal(model, images, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["predict", model, *images, "--csv", str(tmp_path / "out.csv")]) == 0
    assert "5/5" in sys.stderr.getvalue() and " images" in sys.stderr.getvalue()


def test_another_image_size(model, images, capsys):
    _, usual = rows_of(capsys, model, images[0])
    _, larger = rows_of(capsys, model, images[0], "--img-size", 32)
    assert usual[0]["probability"] != larger[0]["probability"]
    _, padded = rows_of(capsys, model, images[0], "--img-size", 30)
    assert float(padded[0]["probability"]) not in (float(usual[0]["probability"]), float(larger[0]["probability"]))


def test_imagenet_classes_with_no_training(images, tmp_path, monkeypatch, capsys):
    network = package_starter(tmp_path / "pretrained", monkeypatch)
    code, rows = rows_of(capsys, "hgrn_deit_tiny", *images)
    assert code == 0 and len(rows) == 5
    loaded = load_model("hgrn_deit_tiny")
    for path, row in zip(images, rows, strict=True):
        with torch.no_grad():
            answer = network(loaded.prepare(open_image(path))[None]).softmax(-1)[0]
        # float16 may change the order of answers that are nearly equal
        assert float(row["probability"]) == pytest.approx(answer.max().item(), rel=0.02)
        assert answer[loaded.class_names.index(row["label"])] == pytest.approx(answer.max().item(), rel=0.02)


def test_bad_flags_and_models_end_in_one_line(model, images, tmp_path, capsys):
    edit_config(tmp_path / "run" / "model", label_names=["only", "two"])
    assert main(["predict", model, *images]) == 2
    assert main(["predict", str(tmp_path / "nowhere"), *images]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "2 label names for a head of 3 classes" in lines[0] and "no model at" in lines[1]
    for flags in (["--top", "0"], ["--batch-size", "x"], ["--max-pixels", "-1"]):
        with pytest.raises(SystemExit, match="^2$"):
            main(["predict", model, *images, *flags])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"argument {flags[0]}: '{flags[1]}' is not a positive integer" in line


@pytest.mark.parametrize("command", ["predict", "evaluate", "models", "doctor", "publish"])
def test_help_fits_a_screen_and_has_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="^0$"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 36
    assert f"example:  hgrn-vision {command}" in text

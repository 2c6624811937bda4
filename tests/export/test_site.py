"""hgrn-vision export --format web: the folder, and its page in a real browser."""

import csv
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from browser import find_chromium, node_package, ready_page
from photographs import scene
from PIL import Image
from saved_models import CLASSES, SMALL
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.export import site as web_folder
from hgrn_vision.inference.pretrained import load_model

RUNTIME = node_package("onnxruntime-web")
IN_BROWSER = pytest.mark.skipif(
    not (find_chromium() and RUNTIME), reason="needs chromium, and onnxruntime-web from npm (see CONTRIBUTING.md)"
)
PROBLEM = "document.getElementById('problem').textContent"
ANSWERS = (
    "Array.from(document.querySelectorAll('#answers:not(.waiting) li'), "
    "(li) => [li.children[0].textContent, Number(li.dataset.probability)])"
)


def save(folder, **arguments):
    """A run with a model of one block, and a log of two epochs."""
    torch.manual_seed(0)
    arguments = {**SMALL, "depth": 1, **arguments}
    model = timm.create_model("hgrn_deit_tiny", num_classes=3, **arguments)
    with torch.no_grad():
        model.head.weight.normal_(std=0.5)
    config = {"label_names": CLASSES}
    save_for_hf(model, folder / "model", model_config=config, model_args=arguments, safe_serialization=True)
    (folder / "log.csv").write_text("epoch,val_top1\n1,81.25\n2,62.5\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("trained") / "flowers")


@pytest.fixture(scope="module")
def site(run):
    """A page that loads its runtime from the network."""
    folder = run.parent / "site"
    assert main(["export", str(run), "--format", "web", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def offline_site(run, site):
    """The same with its own copy of the runtime."""
    folder = run.parent / "offline"
    shutil.copytree(site, folder)
    web_folder.write_site(folder, load_model(str(run), "cpu"), "flowers", 0.0, str(RUNTIME))
    return folder


@pytest.fixture
def page(browser, offline_site):
    with ready_page(browser, offline_site) as page:
        yield page


def answers(folder, images, tmp_path):
    """The answers of `predict`: the probability of every class for each image."""
    path = tmp_path / "answers.csv"
    files = [str(image) for image in images]
    assert main(["predict", str(folder), *files, "--top", "3", "--csv", str(path)]) in (0, 1)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{row[f"label{n}"]: float(row[f"probability{n}"]) for n in ("", "_2", "_3")} for row in rows]


def test_the_folder_is_complete(run, site, tmp_path):
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    models = {"onnx/model.onnx", "onnx/model_quantized.onnx"}
    assert files == {"index.html", "labels.json", "config.json", "preprocessor_config.json", *models}
    assert json.loads((site / "labels.json").read_text("utf-8")) == CLASSES
    text = (site / "index.html").read_text("utf-8")
    assert "81.2% of the run&#39;s validation images (epoch 1)" in text and "cornflower é" in text
    images = np.random.RandomState(0).standard_normal((64, 3, 16, 16)).astype(np.float32)
    with torch.no_grad():
        want = load_model(str(run), "cpu").model(torch.from_numpy(images)).numpy()
    # the second is a typical error, of logits up to 10; the largest of a few is a matter of chance
    for name, order, tolerance in (("model", np.inf, 1e-4), ("model_quantized", 2, 0.1 * want.size**0.5)):
        session = onnxruntime.InferenceSession(site / "onnx" / f"{name}.onnx", providers=["CPUExecutionProvider"])
        assert [put.name for put in session.get_outputs()] == ["logits"]
        [got] = session.run(None, {"pixel_values": images})
        assert np.linalg.norm((got - want).ravel(), order) < tolerance, name
    config = json.loads((site / "config.json").read_text("utf-8"))
    assert config["id2label"] == dict(zip("012", CLASSES, strict=True)) and config["label2id"]["rose"] == 0
    pixels = json.loads((site / "preprocessor_config.json").read_text("utf-8"))
    assert pixels["size"] == {"shortest_edge": 17} and pixels["crop_size"] == {"height": 16, "width": 16}


def test_bad_input_is_one_line(run, site, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("<h1>hello</h1>")
    (tmp_path / "file").touch()
    wide, grey = save(tmp_path / "wide", img_size=(16, 24)), save(tmp_path / "grey", in_chans=1)
    web = ["--format", "web", "--output"]
    cases = {
        "is not empty": [str(run), *web, str(tmp_path / "mine")],
        "mine is not empty": [str(run), *web, str(tmp_path / "mine"), "--force"],
        "is a file": [str(run), *web, str(tmp_path / "file")],
        "is not a folder": [str(run), *web, str(tmp_path / "file" / "site")],
        "already holds a page": [str(run), *web, str(site)],
        "not the npm package": [str(run), *web, str(tmp_path / "new"), "--runtime", str(tmp_path)],
        "3 channels of 16 x 24": [str(wide), *web, str(tmp_path / "new")],
        "1 channels of 16 x 16": [str(grey), *web, str(tmp_path / "new")],
        "--runtime needs --format web": [str(run), "--output", str(tmp_path / "a.onnx"), "--runtime", "."],
    }
    for message, argv in cases.items():
        assert main(["export", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "grey", "mine", "wide"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["index.html"]


def test_pages_that_python_could_not_equal_are_refused(run):
    loaded = load_model(str(run), "cpu")
    for changes in ({"interpolation": "nearest"}, {"crop_pct": 1.5}):
        object.__setattr__(loaded, "spec", loaded.spec._replace(**changes))
        with pytest.raises(ValueError, match="supports lanczos, bilinear"):
            web_folder.check_model(loaded)


@pytest.mark.parametrize("name", ["site", "old"])
def test_force_replaces_a_page(name, tmp_path):
    for folder, file in ((name, "labels.json"), (".new", "new")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    (tmp_path / name / "index.html").write_text('<meta name="generator" content="hgrn_vision 1">')
    web_folder.check_folder(tmp_path / name, force=True)
    with tempfile.TemporaryDirectory(dir=tmp_path) as work:
        new = (tmp_path / ".new").rename(Path(work) / name)
        web_folder.replace_folder(new, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]


def test_force_deletes_nothing_but_a_page(tmp_path, monkeypatch):
    page = tmp_path / "site"
    (page / ".git").mkdir(parents=True)
    (page / "index.html").write_text('<meta name="generator" content="hgrn_vision 1">')
    with pytest.raises(ValueError, match=r"holds more than a page \(\.git\)"):
        web_folder.check_folder(page, force=True)
    (page / ".git").rmdir()
    web_folder.check_folder(page, force=True)
    monkeypatch.chdir(page)
    with pytest.raises(ValueError, match="the current folder"):
        web_folder.check_folder(Path("."), force=True)


def test_the_version_of_the_runtime_is_its_own(tmp_path):
    package = tmp_path / "package.json"
    for text, version in (
        ('{"name": "onnxruntime-web", "version": "1.2.3"}', "1.2.3"),
        ('{"name": "my-shop", "version": "9.9.9"}', "(unknown version)"),
        ('{"name": "onnxruntime-web"}', "(unknown version)"),
        ("[1", "(unknown version)"),
        ("[1]", "(unknown version)"),
    ):
        package.write_text(text)
        for place in (tmp_path, tmp_path / "dist"):
            assert web_folder.runtime_version(place) == version


def test_a_page_that_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()
    with pytest.raises(FileNotFoundError, match="missing"):
        web_folder.replace_folder(tmp_path / "missing", tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["index.html"]


@pytest.mark.skipif(not RUNTIME, reason="onnxruntime-web is not installed")
def test_the_hashes_are_those_of_the_package():
    if json.loads((RUNTIME / "package.json").read_text())["version"] != web_folder.RUNTIME.version:
        pytest.skip("another version of onnxruntime-web")
    for file in (web_folder.RUNTIME.module, web_folder.RUNTIME.wasm):
        assert web_folder.describe_file(RUNTIME / "dist" / file.name) == file


@IN_BROWSER
def test_photographs_get_the_answers_of_predict(page, run, tmp_path):
    images = []
    for seed in range(20):
        suffix = ("jpg", "png", "webp")[seed % 3]
        images.append(tmp_path / f"{seed}.{suffix}")
        scene(seed, (60 + 13 * seed, 200 - 7 * seed)).save(images[-1], quality=90)
    # one image rotated by EXIF, one partly transparent, so that white shows through
    turned = scene(20, (150, 90)).getexif()
    turned[0x112] = 6
    scene(20, (150, 90)).save(tmp_path / "turned.jpg", exif=turned)
    hole = scene(21).convert("RGBA")
    hole.putalpha(scene(3, hole.size).convert("L"))
    hole.save(tmp_path / "hole.png")
    images += [tmp_path / "turned.jpg", tmp_path / "hole.png"]
    wanted = answers(run, images, tmp_path)
    assert len({max(want, key=want.get) for want in wanted}) > 1 and max(wanted[0].values()) > 0.4
    for image, want in zip(images, wanted, strict=True):
        page.run("document.getElementById('answers').replaceChildren()")
        page.drop(image)
        got = dict(page.wait(f"{PROBLEM} || ({ANSWERS}.length && {ANSWERS})"))
        assert got.keys() == want.keys() and list(got)[0] == max(want, key=want.get)
        for name in want:
            assert abs(got[name] - want[name]) < 0.02, (image, got, want)
    assert re.fullmatch(r"[\d.]+ m?s for the model, .*", page.run("document.getElementById('time').textContent"))


@pytest.mark.skipif(
    not (shutil.which("node") and node_package("@huggingface/transformers")), reason="no transformers.js"
)
def test_transformers_js_loads_the_folder(run, site, tmp_path):
    """Its image-classification pipeline, with either model; images of one colour, since it resizes differently."""
    Image.new("RGB", (64, 48), (200, 60, 20)).save(tmp_path / "a.png")
    (want,) = answers(run, [tmp_path / "a.png"], tmp_path)
    script = """
const [library, folder, name, image, dtype] = process.argv.slice(2);
const { env, pipeline } = await import(library);
env.allowRemoteModels = false;
env.localModelPath = folder;
const classify = await pipeline("image-classification", name, { dtype });
console.log(JSON.stringify(await classify(image, { top_k: 3 })));
"""
    (tmp_path / "run.mjs").write_text(script)
    library = node_package("@huggingface/transformers") / "dist" / "transformers.node.mjs"
    for dtype, tolerance in (("fp32", 1e-4), ("q8", 0.02)):
        command = ["node", tmp_path / "run.mjs", library, site.parent, site.name, tmp_path / "a.png", dtype]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        got = {answer["label"]: answer["score"] for answer in json.loads(done.stdout.splitlines()[-1])}
        assert got == pytest.approx(want, abs=tolerance), dtype

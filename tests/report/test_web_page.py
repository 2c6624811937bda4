"""The page that runs a model, in a real browser, with a model of two operators, since only the page is tested."""

import base64
import json
import shutil

import numpy as np
import onnx
import pytest
from browser import READY, find_chromium, node_package, ready_page, serve
from onnx import TensorProto, helper, numpy_helper
from photographs import scene

from hgrn_vision.report.web import Runtime, Site, describe_file, render_site

RUNTIME = node_package("onnxruntime-web")
pytestmark = pytest.mark.skipif(
    not (find_chromium() and RUNTIME), reason="needs chromium, and onnxruntime-web from npm (see CONTRIBUTING.md)"
)
FILES = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
CLASSES = [f"class {number}" for number in range(6)] + ["a name of several words that is too long for one line " * 3]
SPEC = {"size": 16, "resize": 17, "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic"}
CDN = "https://cdn.example/ort/"
PROBLEM = "document.getElementById('problem').textContent"
SHOWS = "document.getElementById('stage').dataset.shows"
ANSWERS = "document.querySelectorAll('#answers:not(.waiting) li').length"
CLEAR = "document.getElementById('answers').replaceChildren()"


def write_model(path):
    """The mean colour, times a matrix."""
    weights = np.random.RandomState(0).standard_normal((3, len(CLASSES))).astype(np.float32)
    arrays = [numpy_helper.from_array(np.array([2, 3]), "axes"), numpy_helper.from_array(weights, "weights")]
    nodes = [
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["logits"]),
    ]
    shapes = {"pixel_values": [1, 3, 16, 16], "logits": [1, len(CLASSES)]}
    source, target = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "colour", [source], [target], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def write_site(folder, address):
    """The page and its files; the runtime at an address."""
    folder.mkdir()
    write_model(folder / "model.onnx")
    (folder / "labels.json").write_text(json.dumps(CLASSES))
    runtime = Runtime("1.2.3", address, *(describe_file(RUNTIME / "dist" / name) for name in FILES))
    size = (folder / "model.onnx").stat().st_size
    site = Site("Colours", CLASSES, [("Images", "16 x 16")], SPEC, "model.onnx", size, "labels.json", runtime)
    (folder / "index.html").write_text(render_site(site, "9.9"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = write_site(tmp_path_factory.mktemp("sites") / "own", "runtime/")
    (folder / "runtime").mkdir()
    for name in FILES:
        shutil.copy(RUNTIME / "dist" / name, folder / "runtime")
    return folder


@pytest.fixture
def page(browser, site):
    with ready_page(browser, site) as page:
        yield page


@pytest.fixture
def photo(tmp_path):
    scene(0).save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def test_what_is_no_image_gives_a_sentence(page, photo, tmp_path):
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "broken.jpg").write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    (tmp_path / "noise.png").write_bytes(bytes(range(256)))
    cases = {
        "notes.txt": "“notes.txt” is not an image.",
        "empty.png": "“empty.png” is empty.",
        "broken.jpg": "“broken.jpg” is damaged, or in a format that this browser cannot show.",
        "noise.png": "“noise.png” is damaged, or in a format that this browser cannot show.",
    }
    for name, sentence in cases.items():
        page.drop(photo)
        page.wait(f"!{PROBLEM} && {ANSWERS}")
        page.drop(tmp_path / name)
        assert page.wait(PROBLEM) == sentence
        assert page.run(ANSWERS) == 0 and page.run(SHOWS) == "nothing"
    page.drop(photo)
    page.wait(f"!{PROBLEM} && {ANSWERS}")


def test_picker_clipboard_and_camera(page, photo):
    page.choose("#file", photo)
    page.wait(ANSWERS)
    page.run(CLEAR)
    data = base64.b64encode(photo.read_bytes()).decode()
    paste = f"""{{
        const data = new DataTransfer();
        const bytes = Uint8Array.from(atob("{data}"), (letter) => letter.charCodeAt(0));
        data.items.add(new File([bytes], "photo.jpg", {{ type: "image/jpeg" }}));
        dispatchEvent(new ClipboardEvent("paste", {{ clipboardData: data }}));
    }}"""
    page.run(paste)
    page.wait(ANSWERS)
    page.run("dispatchEvent(new ClipboardEvent('paste', { clipboardData: new DataTransfer() }))")
    assert page.run(PROBLEM) == "The clipboard holds no image."
    page.run(CLEAR)
    page.run("document.getElementById('camera').click()")
    page.wait(f"{SHOWS} === 'camera'")
    page.run("document.getElementById('shoot').click()")
    page.wait(f"{ANSWERS} && {SHOWS} === 'image'")
    assert page.run("document.getElementById('video').srcObject") is None


def test_keys_reach_everything(page, photo):
    page.drop(photo)
    page.wait(ANSWERS)
    reached = []
    for _ in range(6):
        page.press("Tab", 9)
        reached.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:5] == ["choose", "camera", "paste", "more", "SUMMARY"]
    page.run("document.getElementById('choose').focus()")
    for count, (key, code) in enumerate([("Enter", 13), (" ", 32)], page.pickers + 1):
        page.press(key, code)
        page.run("new Promise((resolve) => setTimeout(resolve, 100))")
        assert page.pickers == count, key
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.run("document.getElementById('more').focus()")
    page.press("Enter", 13)
    assert page.run(ANSWERS) == len(CLASSES) and page.run("document.activeElement.id") == "more"
    page.press("Enter", 13)
    assert page.run(ANSWERS) == 5
    page.run("document.getElementById('camera').focus()")
    page.press("Enter", 13)
    page.wait(f"{SHOWS} === 'camera' && document.activeElement.id === 'shoot'")
    page.press("Escape", 27)
    assert page.run(SHOWS) == "image" and page.run("document.activeElement.id") == "camera"


def test_a_screen_reader_is_told(page, photo):
    page.drop(photo)
    page.wait(ANSWERS)
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in nodes:
        if not node["ignored"]:
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert sorted(named["button"]) == ["Camera", "Choose image", "Paste", "Show 2 more classes"]
    assert "The image to classify" in named["image"] and {"main", "status", "alert", "heading"} <= named.keys()
    text = page.run("document.getElementById('status').textContent")
    assert text.startswith("Most likely ") and text.count("%") == 2
    assert len(named["listitem"]) == 5


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_it_fits_and_follows_the_system(page, photo, width):
    for dark in (False, True):
        page.resize(width, 800, dark)
        page.drop(photo, at=(width // 2, 300))
        page.wait(ANSWERS)
        page.run("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        assert page.run("document.documentElement.scrollWidth") == width
        ink = page.run("getComputedStyle(document.body).color").removeprefix("rgb(").removesuffix(")")
        assert (sum(map(int, ink.split(","))) > 3 * 128) is dark


@pytest.mark.parametrize("size", [(90, 40), (40, 90), (200, 160), (600, 500)], ids=str)
@pytest.mark.parametrize("width", [320, 1200])
def test_the_preview_is_large_and_undistorted(page, tmp_path, size, width):
    scene(1, size).save(tmp_path / "image.png")
    page.resize(width, 800)
    page.drop(tmp_path / "image.png", at=(width // 2, 300))
    page.wait(f"{ANSWERS} && document.getElementById('image').complete")
    rectangle = "(({ width, height }) => [width, height])(document.getElementById('%s').getBoundingClientRect())"
    shown, stage, frame = (page.run(rectangle % name) for name in ("image", "stage", "frame"))
    assert shown[0] / shown[1] == pytest.approx(size[0] / size[1], rel=0.01)
    assert max(shown) > 200 and shown[0] <= stage[0] and shown[1] <= stage[1]
    # what the model sees: a square of 16 of 17 pixels
    assert frame == pytest.approx([min(shown) * 16 / 17] * 2, rel=0.01)


def test_a_long_list_of_classes_goes_down_not_to_the_right(page):
    for width in (390, 1200):
        page.resize(width, 800)
        page.run("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        page.run("document.querySelector('.classes').innerHTML = '<li>a class</li>'.repeat(1000)")
        box = page.run(
            "(({ scrollWidth: a, clientWidth: b, scrollHeight: c, clientHeight: d }) => [a, b, c, d])"
            "(document.querySelector('.classes').parentElement)"
        )
        assert box[0] <= box[1] and box[2] > 2 * box[3], box


def test_a_phone_is_not_asked_to_drop(page):
    for width, word in ((390, "Tap"), (1200, "Drop")):
        page.resize(width, 800)
        assert page.run("document.getElementById('invitation').innerText").startswith(word)


def test_the_runtime_is_checked_before_it_runs(browser, tmp_path):
    """Loaded from another host, for which the test answers; if one byte is changed, the page refuses it."""
    files = {CDN + name: (RUNTIME / "dist" / name).read_bytes() for name in FILES}
    with serve(write_site(tmp_path / "site", CDN)) as address:
        browser.resize(1200, 900)
        browser.intercept(f"{CDN}*", files)
        browser.open(address)
        browser.wait(READY)
        assert {request for request in browser.requests if request.startswith("https:")} == set(files)
        files[CDN + FILES[0]] += b" "
        browser.open(address)
        assert browser.wait(PROBLEM).startswith("The runtime could not be loaded from cdn.example")
        assert not browser.run(READY) and not browser.run("document.getElementById('retry').hidden")
        files[CDN + FILES[0]] = files[CDN + FILES[0]][:-1]
        browser.run("document.getElementById('retry').click()")
        browser.wait(f"{READY} && !{PROBLEM}")
    browser.send("Fetch.disable")


def test_a_missing_model_and_a_page_from_the_disk_give_a_sentence(browser, site, tmp_path):
    shutil.copytree(site, tmp_path / "copy")
    (tmp_path / "copy" / "model.onnx").unlink()
    with serve(tmp_path / "copy") as address:
        browser.open(address)
        assert browser.wait(PROBLEM) == "The model could not be loaded: the server answered 404."
    browser.open(f"file://{site}/index.html")
    assert "python -m http.server" in browser.wait(f"location.protocol === 'file:' && {PROBLEM}")

"""The page that runs a model: what it may do, what it contains, and how its script prepares pixels."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from photographs import scene

from hgrn_vision.data.spec import DataSpec
from hgrn_vision.data.transforms import eval_transform, normalise
from hgrn_vision.report import web
from hgrn_vision.report.web import Runtime, RuntimeFile, Site, describe_file, render_site

CLASSES = ["rose", "daisy </script><b>", "cornflower é"]
FILES = RuntimeFile("a.mjs", 10, "sha384-aaaa"), RuntimeFile("b.wasm", 20, "sha384-bbbb")
SPEC = {"size": 12, "resize": 13, "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic"}


def page(address="https://cdn.example/ort/"):
    runtime = Runtime("1.2.3", address, *FILES)
    site = Site("<Flowers>", CLASSES, [("Images", "small & few")], SPEC, "m.onnx", 30, "labels.json", runtime)
    return render_site(site, "9.9")


def settings(text):
    return json.loads(re.search(r'<script type="application/json" id="site">(.*?)</script>', text, re.DOTALL)[1])


def test_names_are_text_and_settings_are_data():
    text = page()
    assert "<title>&lt;Flowers&gt;</title>" in text and "small &amp; few" in text
    assert "daisy &lt;/script&gt;&lt;b&gt;" in text and "cornflower é" in text
    assert text.count("</script>") == 3, "one end for each script: none within their text"
    got = settings(text)
    assert got["spec"] == SPEC and got["model"] == {"what": "The model", "url": "m.onnx", "bytes": 30}
    assert got["wasm"]["url"] == "https://cdn.example/ort/b.wasm" and got["wasm"]["integrity"] == "sha384-bbbb"
    assert got["module"]["bytes"] == 10


def test_the_model_is_loaded_when_all_is_defined():
    """The script of the model begins to load it, with what the others define."""
    script = re.findall(r"<script[^>]*>(.*?)</script>", page(), re.DOTALL)
    (own,) = [text for text in script if (web.SOURCES / "model.js").read_text("utf-8") in text]
    assert own.rstrip().endswith((web.SOURCES / "model.js").read_text("utf-8").rstrip())
    assert (web.SOURCES / "page.js").read_text("utf-8") in own and (web.SOURCES / "sources.js").read_text(
        "utf-8"
    ) in own


def test_the_page_may_talk_to_its_host_and_the_runtimes_only():
    def rules(text):
        policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1].replace("&#39;", "'")
        return dict(rule.split(" ", 1) for rule in policy.split("; "))

    assert rules(page())["default-src"] == "'none'"
    assert rules(page())["connect-src"] == "'self' https://cdn.example/ort/"
    assert rules(page("runtime/"))["connect-src"] == "'self'"
    assert "unsafe-inline" not in page()


def test_hashes_are_what_browsers_check(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"alert('Hello, world.');")
    # the example of the specification, https://www.w3.org/TR/SRI/
    want = "sha384-H8BRh8j48O9oYatfu5AZzq6A9RINhZO5H16dQZngK7T62em8MUt1FLm52t+eX6xO"
    assert describe_file(path) == RuntimeFile("a.txt", 23, want)


CASES = [
    ((90, 61), 16, 0.9, "bicubic"),
    ((61, 90), 16, 0.875, "bilinear"),
    ((7, 5), 24, 1.0, "lanczos"),
    ((60, 90), 31, 0.95, "hamming"),
    ((33, 33), 33, 1.0, "bicubic"),
    ((257, 129), 20, 0.9, "box"),
]
TALL = ((40, 300), 31, 0.95, "bicubic")


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_pixels_are_those_of_python(tmp_path):
    """The page's script, run by node, against the transforms that models are evaluated with."""
    script = (web.SOURCES / "pixels.js").read_text("utf-8")
    script += """
import { readFileSync, writeFileSync } from "node:fs";
for (const { width, height, source, target, ...spec } of JSON.parse(readFileSync(process.argv[2]))) {
  const bytes = readFileSync(source);
  const rows = (top, count) => bytes.subarray(top * width * 4, (top + count) * width * 4);
  writeFileSync(target, new Uint8Array(normalise(cropPixels(rows, width, height, spec), spec).buffer));
}
"""
    (tmp_path / "run.mjs").write_text(script, "utf-8")
    jobs, wanted = [], []
    for number, (size, side, crop_pct, interpolation) in enumerate([*CASES, TALL]):
        image = scene(number, size)
        spec = DataSpec((3, side, side), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), interpolation, crop_pct)
        source, target = tmp_path / f"{number}.rgba", tmp_path / f"{number}.f32"
        source.write_bytes(image.convert("RGBA").tobytes())
        pixels = {"size": side, "resize": int(side / crop_pct), "mean": spec.mean, "std": spec.std}
        files = {"source": str(source), "target": str(target)}
        jobs.append({"width": size[0], "height": size[1], "interpolation": interpolation, **pixels, **files})
        wanted.append(normalise(eval_transform(spec)(image), spec).numpy())
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run(["node", tmp_path / "run.mjs", tmp_path / "jobs.json"], check=True, cwd=tmp_path)
    for job, want in zip(jobs, wanted, strict=True):
        got = np.fromfile(job["target"], np.float32).reshape(want.shape)
        # Pillow resizes very tall images along y first, which rounds differently: a byte more or less
        atol = 1.01 / 255 / min(job["std"]) if job["height"] > 5 * job["width"] else 0
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=str(job))

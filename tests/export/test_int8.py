"""hgrn-vision export --int8: small files, their answers next to the model's, and what is printed about them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper
from saved_models import CLASSES, write_image, write_photos
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.commands import export
from hgrn_vision.export import int8
from hgrn_vision.export.int8 import quantize
from hgrn_vision.inference.pretrained import load_model

ROOT = Path(__file__).resolve().parents[2]
# wide enough for the weights to be most of the file
WIDE = {"img_size": 16, "patch_size": 4, "embed_dim": 256, "depth": 1}
COUNTS = dict.fromkeys(CLASSES, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose model tells images apart."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    torch.manual_seed(0)
    model = timm.create_model("hgrn_deit_tiny", num_classes=3, **WIDE)
    with torch.no_grad():
        model.head.weight.normal_(std=0.5)
    config = {"label_names": CLASSES}
    save_for_hf(model, folder / "model", model_config=config, model_args=WIDE, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), COUNTS)


@pytest.fixture(scope="module")
def exact(run):
    """The file in float32."""
    path = run.parent / "exact.onnx"
    assert main(["export", str(run), "--output", str(path)]) == 0
    return path


@pytest.fixture
def already_exported(exact, monkeypatch):
    """The exporter takes seconds, so it returns a file that was made before."""
    known = export.FORMATS["onnx"]._replace(write=lambda loaded, path: shutil.copyfile(exact, path))
    monkeypatch.setitem(export.FORMATS, "onnx", known)


def session(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def change(run, path, images):
    """Agreement in percent, largest change of a probability, and the answers of the file, image by image."""
    loaded, file = load_model(str(run), "cpu"), session(path)
    pixels = torch.stack([loaded.prepare(int8.open_unlabelled(str(images)).load(i)) for i in range(12)])
    with torch.no_grad():
        want = loaded.model(pixels).softmax(-1).numpy()
    # in the same batches, since ranges that are not fixed depend on the batch
    logits = [file.run(None, {"images": part.numpy()})[0] for part in pixels.split(int8.BATCH)]
    got = torch.from_numpy(np.concatenate(logits)).softmax(-1).numpy()
    return 100 * np.mean(want.argmax(1) == got.argmax(1)), np.abs(want - got).max(), got


@pytest.mark.parametrize("calibrated", [False, True], ids=["measured in every call", "calibrated"])
def test_a_small_file_with_nearly_the_same_answers(calibrated, run, exact, already_exported, photos, tmp_path, capsys):
    path = tmp_path / "int8.onnx"
    calibrate = ["--calibrate", str(photos)] if calibrated else []
    assert main(["export", str(run), "--int8", *calibrate, "--check", str(photos), "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert path.stat().st_size < 0.3 * exact.stat().st_size
    assert float(re.search(r"int8: (.*) times the size", printed)[1]) < 0.3
    assert session(path).get_modelmeta().custom_metadata_map == session(exact).get_modelmeta().custom_metadata_map
    onnx.checker.check_model(onnx.load(path))

    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert ("QuantizeLinear" in operators) == calibrated and ("DynamicQuantizeLinear" in operators) != calibrated
    assert {"Conv", "LayerNormalization"} <= operators and not operators & {"ConvInteger", "QLinearConv"}
    agreement, largest, got = change(run, path, photos)
    assert agreement >= 90 and 1e-6 < largest < 0.1
    told = re.search(r"12 images from .* top class for (.*)%, largest change of a probability (.*)\n", printed)
    assert float(told[1]) == pytest.approx(agreement, abs=0.01) and float(told[2]) == pytest.approx(largest, abs=2e-3)
    accuracy = re.search(r"top-1 (.*)% in float32, (.*)% in int8", printed)
    # sub-folders in the order of their names
    labels = np.repeat([CLASSES.index(name) for name in sorted(CLASSES)], 4)
    assert float(accuracy[2]) == pytest.approx(100 * np.mean(got.argmax(1) == labels), abs=0.01)
    assert (f"fixed on {photos}" if calibrated else "measured in every call") in printed

    image = write_image(tmp_path / "a.png", 3)
    command = [sys.executable, "-X", "utf8", ROOT / "examples" / "run_onnx.py", path, image]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and done.stdout.startswith(tuple(CLASSES)), done.stderr


def test_images_without_labels_and_the_packaged_ones(run, photos, exact, tmp_path, capsys):
    loaded = load_model(str(run), "cpu")
    flat = write_photos(tmp_path / "flat", {"": 5})
    quantize(exact, tmp_path / "small.onnx")
    found = int8.compare(loaded, tmp_path / "small.onnx", int8.open_images(str(flat), loaded))
    assert found.images == 5 and found.accuracy is None
    found = int8.compare(loaded, tmp_path / "small.onnx", int8.open_images(None, loaded))
    assert found.images == int8.FEW and found.accuracy is None and found.largest < 0.05
    digits = load_model(str(run), "cpu")
    digits.class_names[:] = "012"
    split = int8.open_images(None, digits)
    assert set(split.labels) == {0, 1, 2} and int8.compare(digits, tmp_path / "small.onnx", split).accuracy
    # numbers in place of names that a model does not have are not those of digits
    del digits.model.pretrained_cfg["label_names"]
    assert set(int8.open_images(None, digits).labels) == {-1}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the 1 images"):
        int8.compare(loaded, tmp_path / "small.onnx", int8.open_images(str(tmp_path / "broken"), loaded))


def test_the_page_runs_the_small_model(run, photos, tmp_path, capsys):
    folder = tmp_path / "site"
    argv = ["export", str(run), "--format", "web", "--int8", "--calibrate", str(photos), "--output", str(folder)]
    assert main(argv) == 0
    assert f"12 images from {photos}: same top class" in capsys.readouterr().out
    text = (folder / "index.html").read_text("utf-8")
    assert "This page runs onnx/model_quantized.onnx" in text and '"url": "onnx/model_quantized.onnx"' in text
    operators = {node.op_type for node in onnx.load(folder / "onnx" / "model_quantized.onnx").graph.node}
    assert "QuantizeLinear" in operators
    assert {path.name for path in (folder / "onnx").iterdir()} == {"model.onnx", "model_quantized.onnx"}


def test_a_file_that_answers_with_nan_is_not_written(run, already_exported, photos, tmp_path, monkeypatch, capsys):
    found = int8.Change(12, 0.0, float("nan"), None)
    monkeypatch.setattr(int8, "compare", lambda *args: found)
    argv = ["export", str(run), "--int8", "--check", str(photos), "--output", str(tmp_path / "a.onnx")]
    assert main(argv) == 1
    assert "NaN" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line(run, photos, tmp_path, monkeypatch, capsys):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no image")
    (tmp_path / "taken.onnx").write_text("mine")
    nowhere, output = str(tmp_path / "none"), ["--output", str(tmp_path / "new.pt2")]
    cases = {
        "--int8 works with --format onnx and web, not pt2": ["--int8", "--format", "pt2", *output],
        "onnx and web, not torchscript": ["--int8", "--format", "torchscript", *output],
        "--calibrate needs --int8": ["--calibrate", str(photos), *output],
        "--check needs --int8": ["--check", str(photos), *output],
        f"no images in {empty}": ["--int8", "--calibrate", str(empty), "--check", str(photos), *output],
        f"no images in {empty} or": ["--int8", "--check", str(empty), *output],
        f"none of 1 images in {broken} could be read": ["--int8", "--calibrate", str(broken), *output],
        f"no such folder: {nowhere}": ["--int8", "--calibrate", nowhere, "--check", str(photos), *output],
        f"no such file or folder: {nowhere}": ["--int8", "--check", nowhere, *output],
        "already exists": ["--int8", "--output", str(tmp_path / "taken.onnx")],
    }
    for message, argv in cases.items():
        assert main(["export", str(run), *argv]) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty", "taken.onnx"]
    assert (tmp_path / "taken.onnx").read_text() == "mine"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    assert main(["export", str(run), "--int8", *output]) == 2
    assert "needs onnxruntime: pip install 'hgrn_vision[export]'" in capsys.readouterr().err


def test_quantised_weights_take_a_quarter(tmp_path):
    """Also where the exporter has noted the shape of a weight that the quantizer transposes."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, n]) for name, n in (("x", 256), ("y", 192))]
    weights = np.random.RandomState(0).standard_normal((192, 256)).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    noted = [helper.make_tensor_value_info("w", TensorProto.FLOAT, [192, 256])]
    graph = helper.make_graph(
        [node], "g", info[:1], info[1:], [numpy_helper.from_array(weights, "w")], value_info=noted
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "a.onnx")
    quantize(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert (tmp_path / "b.onnx").stat().st_size < 0.3 * (tmp_path / "a.onnx").stat().st_size
    x = np.random.RandomState(1).standard_normal((2, 256)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "b.onnx", providers=["CPUExecutionProvider"])
    assert np.abs(session.run(None, {"x": x})[0] - x @ weights.T).max() < 1

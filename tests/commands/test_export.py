"""hgrn-vision export: files that answer as the model does, without this package, at sizes not seen by the exporter."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from saved_models import CLASSES, SMALL, write_image
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.commands import export
from hgrn_vision.data.images import open_image
from hgrn_vision.inference.pretrained import load_model

ROOT = Path(__file__).resolve().parents[2]
OTHER_SHAPES = [(1, 3, 16, 16), (5, 3, 8, 60), (2, 3, 36, 24), (1, 3, 512, 8)]


def save(folder, **arguments):
    """A run folder with a one-block model, since the exporter takes seconds per block."""
    arguments = {**SMALL, "depth": 1, **arguments}
    model = timm.create_model("hgrn_deit_tiny", num_classes=3, **arguments)
    config = {"label_names": CLASSES}
    save_for_hf(model, folder / "model", model_config=config, model_args=arguments, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("trained") / "run")


def answers(run, images):
    with torch.no_grad():
        return load_model(str(run), "cpu").model(torch.from_numpy(images)).numpy()


def check_metadata(about):
    assert about["class_names"] == CLASSES
    assert about["input_size"] == [3, 16, 16] and about["patch_size"] == [4, 4] and about["any_size"] is True
    assert about["mean"] == pytest.approx([0.485, 0.456, 0.406]) and about["std"] == pytest.approx(
        [0.229, 0.224, 0.225]
    )
    assert about["interpolation"] == "bicubic" and about["crop_pct"] == 0.9


def check_answers(run, call):
    for shape in OTHER_SHAPES:
        images = np.random.RandomState(1).standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(call(images), answers(run, images), atol=1e-4, err_msg=str(shape))


def test_onnx(run, tmp_path):
    path = tmp_path / "flowers.onnx"
    assert main(["export", str(run), "--output", str(path)]) == 0
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    properties = session.get_modelmeta().custom_metadata_map
    check_metadata({key: json.loads(value) for key, value in properties.items()})
    check_answers(run, lambda images: session.run(["logits"], {"images": images})[0])
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    # neither the sources nor their paths
    assert b"torch_scan" not in path.read_bytes()
    for size in ((16, 16), (90, 61), (33, 200)):
        check_example(run, path, write_image(tmp_path / f"{size}.jpg", 3, size))


def test_the_example_reads_images_of_one_channel(tmp_path):
    run, path = save(tmp_path / "grey", in_chans=1), tmp_path / "grey.onnx"
    assert main(["export", str(run), "--output", str(path)]) == 0
    check_example(run, path, write_image(tmp_path / "a.png", 3, (40, 25)))


def test_the_example_runs_the_model_of_a_page(run, tmp_path):
    assert main(["export", str(run), "--format", "web", "--output", str(tmp_path / "site")]) == 0
    check_example(run, tmp_path / "site" / "onnx" / "model.onnx", write_image(tmp_path / "a.png", 3, (40, 25)))


def check_example(run, path, image):
    """The example script gives the package's answers although neither the package nor torch can be imported."""
    blocked = "import sys, runpy; sys.modules.update(dict.fromkeys(['torch', 'timm', 'hgrn_vision', 'onnx']))"
    command = f"{blocked}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = ROOT / "examples" / "run_onnx.py"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", command, script, path, image],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    want = answers(run, load_model(str(run), "cpu").prepare(open_image(image))[None].numpy())[0]
    name = CLASSES[want.argmax()]
    assert done.stdout.startswith(name)
    np.testing.assert_allclose(np.array(done.stdout[len(name) :].split(), dtype=float), want, atol=1e-4)


def test_pt2(run, tmp_path, capsys):
    path = tmp_path / "flowers.pt2"
    assert main(["export", str(run), "--format", "pt2", "--output", str(path)]) == 0
    assert "largest difference from the model" in capsys.readouterr().out
    extra = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=extra)
    check_metadata(json.loads(extra["metadata.json"]))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {target.namespace for target in targets if hasattr(target, "namespace")} == {"aten"}
    module = program.module()
    check_answers(run, lambda images: module(torch.from_numpy(images)).detach().numpy())
    assert b"torch_scan" not in path.read_bytes()


def test_torchscript(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--format", "torchscript"]) == 0
    extra = {"metadata.json": ""}
    module = torch.jit.load("run.torchscript", _extra_files=extra)
    check_metadata(json.loads(extra["metadata.json"]))
    check_answers(run, lambda images: module(torch.from_numpy(images)).detach().numpy())


def test_torchscript_takes_any_size_even_where_onnx_does_not(tmp_path):
    # a side that is no multiple of the patch is padded, which only ONNX files fix
    save(tmp_path / "run", img_size=18)
    assert main(["export", str(tmp_path / "run"), "--format", "torchscript", "--output", str(tmp_path / "a.pt")]) == 0
    extra = {"metadata.json": ""}
    module = torch.jit.load(tmp_path / "a.pt", _extra_files=extra)
    assert json.loads(extra["metadata.json"])["any_size"] is True
    images = np.random.RandomState(1).standard_normal((1, 3, 25, 30)).astype(np.float32)
    np.testing.assert_allclose(module(torch.from_numpy(images)).detach(), answers(tmp_path / "run", images), atol=1e-4)


ABLATIONS = [
    {"data_dependent_theta": True, "bidirectional": False},
    {"forget_gate": "none", "lower_bound": "none", "output_gate": False},
    {"gate_after_norm": True, "complex_state": False},
    {"scan": "2d", "local_conv": 3},
]


@pytest.mark.parametrize(
    "ablation", ABLATIONS, ids=["rotation by token", "no gates", "released, real", "rows and columns"]
)
def test_ablated_models_take_any_size(ablation, tmp_path):
    save(tmp_path, **ablation)
    program = export.trace(load_model(str(tmp_path), "cpu", exportable=True)).module()
    check_answers(tmp_path, lambda images: program(torch.from_numpy(images)).detach().numpy())


FIXED = {
    "by request": {"dynamic_img_size": False},
    "one row": {"img_size": (4, 16)},
    "padded": {"img_size": (18, 16)},
}


@pytest.mark.parametrize("arguments", FIXED.values(), ids=FIXED)
def test_fixed_size(arguments, tmp_path):
    save(tmp_path, **arguments)
    loaded = load_model(str(tmp_path), "cpu", exportable=True)
    assert export.describe(loaded)["any_size"] is False
    program = export.trace(loaded).module()
    for count in (1, 2, 5):
        images = torch.randn(count, *loaded.spec.input_size)
        torch.testing.assert_close(program(images), loaded.model(images), atol=1e-5, rtol=1e-5)


def test_fixed_size_on_request(run, tmp_path):
    path = tmp_path / "flowers.onnx"
    assert main(["export", str(run), "--fixed-size", "--output", str(path)]) == 0
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["any_size"]) is False
    assert session.get_inputs()[0].shape[1:] == [3, 16, 16]
    for count in (1, 4):
        images = np.random.RandomState(1).standard_normal((count, 3, 16, 16)).astype(np.float32)
        np.testing.assert_allclose(session.run(None, {"images": images})[0], answers(run, images), atol=1e-4)


def test_fixed_at_another_size_than_the_model_was_created_for(run, tmp_path):
    path = tmp_path / "flowers.torchscript"
    size = ["--img-size", "24", "--fixed-size"]
    assert main(["export", str(run), "--format", "torchscript", "--output", str(path), *size]) == 0
    images = torch.randn(2, 3, 24, 24)
    module = torch.jit.load(path)
    np.testing.assert_allclose(module(images).detach().numpy(), answers(run, images.numpy()), atol=1e-4)
    with pytest.raises(torch.jit.Error, match="16x16 pixels does not match the model's 24x24"):
        module(images[:, :, :16, :16])


def onnx_graph(folder, fixed_size, **arguments):
    loaded = load_model(str(save(folder, **arguments)), "cpu", exportable=True)
    loaded.model.dynamic_img_size = not fixed_size
    export.write_onnx(loaded, folder / "model.onnx")
    return onnx.shape_inference.infer_shapes(onnx.load(folder / "model.onnx"), strict_mode=True).graph


ONNX_VARIANTS = {
    "plain": {},
    "one direction, no gate": {"bidirectional": False, "output_gate": False},
    "rows and columns": {"scan": "2d", "local_conv": 3},
    "released, real": {"gate_after_norm": True, "complex_state": False},
    "no bound": {"lower_bound": "none", "local_conv": 5},
    "rotation by token": {"data_dependent_theta": True},
}


@pytest.mark.parametrize("arguments", ONNX_VARIANTS.values(), ids=ONNX_VARIANTS)
def test_every_variant_as_onnx(arguments, tmp_path):
    """Each mixer has a layout of its own in the file, and must still be the model at any size."""
    torch.manual_seed(1)
    onnx_graph(tmp_path, False, **arguments)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    check_answers(tmp_path, lambda images: session.run(["logits"], {"images": images})[0])


def test_onnx_with_as_many_tokens_as_it_takes(run, tmp_path):
    """128 x 128 patches: errors of the states grow no further than the decays reach."""
    path = tmp_path / "flowers.onnx"
    assert main(["export", str(run), "--output", str(path)]) == 0
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = np.random.RandomState(1).standard_normal((1, 3, 512, 512)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"images": images})[0], answers(run, images), atol=1e-5)


@pytest.mark.parametrize("fixed_size", [False, True], ids=["any size", "fixed size"])
def test_onnx_operators(fixed_size, tmp_path):
    """Recurrences and rotations are one operator each, and nothing is in float64, which WebGPU does not have."""
    graph = onnx_graph(tmp_path, fixed_size)
    bodies = [node.attribute for node in graph.node if node.op_type == "Scan"]
    steps = [
        [node.op_type for node in attribute.g.node] for body in bodies for attribute in body if attribute.name == "body"
    ]
    assert steps == [["RotaryEmbedding", "Add"]] * 2
    assert sum(node.op_type == "Transpose" for node in graph.node) <= 3
    types = {tensor.data_type for tensor in graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.input, *graph.output]}
    assert onnx.TensorProto.FLOAT in types and onnx.TensorProto.DOUBLE not in types


@pytest.mark.parametrize("fixed_size, most", [(False, 700), (True, 660)], ids=["any size", "fixed size"])
def test_number_of_onnx_operators(fixed_size, most, tmp_path):
    """For 12 blocks, including those in the bodies of scans."""
    one, two = (
        operators(onnx_graph(tmp_path / str(depth), fixed_size, depth=depth, img_size=224, patch_size=16))
        for depth in (1, 2)
    )
    assert one + 11 * (two - one) <= most


def operators(graph):
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return len(graph.node) + sum(map(operators, bodies))


def test_a_file_that_differs_is_removed(run, tmp_path, monkeypatch, capsys):
    loads = []

    def load_another(*args, **kwargs):
        """The model to export, then one with other weights to compare with."""
        loaded = load_model(*args, **kwargs)
        if loads:
            with torch.no_grad():
                loaded.model.head.bias.add_(2e-4)
        loads.append(loaded)
        return loaded

    monkeypatch.setattr(export, "load_model", load_another)
    path = tmp_path / "wrong.torchscript"
    assert main(["export", str(run), "--format", "torchscript", "--output", str(path)]) == 1
    assert len(loads) == 2 and "differs from the model by 2.0e-04" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nan_does_not_count_as_agreement(run, tmp_path, monkeypatch, capsys):
    def broken(kind, path, inputs):
        return {name: np.full((len(images), 3), np.nan, np.float32) for name, images in inputs.items()}

    monkeypatch.setattr(export, "_run_elsewhere", broken)
    assert main(["export", str(run), "--format", "torchscript", "--output", str(tmp_path / "nan.pt")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line(run, tmp_path, monkeypatch, capsys):
    taken = tmp_path / "taken.onnx"
    taken.write_text("mine")
    folder = tmp_path / "vit"
    save_for_hf(timm.create_model("test_vit", num_classes=3), folder, safe_serialization=True)
    unreadable = tmp_path / "empty"
    unreadable.mkdir()
    cases = {
        "already exists": [str(run), "--output", str(taken)],
        "not an HGRN model": [str(folder), "--output", str(tmp_path / "a.onnx")],
        "no config.json": [str(unreadable), "--output", str(tmp_path / "a.onnx")],
        "ends in .pt2": [str(run), "--format", "pt2", "--output", str(tmp_path / "a.bin")],
        "is a folder": [str(run), "--output", str(tmp_path)],
        "out of memory; try smaller": [str(run), "--img-size", "10000000", "--output", str(tmp_path / "a.onnx")],
    }
    for message, argv in cases.items():
        assert main(["export", *argv]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert taken.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "taken.onnx", "vit"]

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    assert main(["export", str(run), "--output", str(tmp_path / "a.onnx")]) == 2
    assert "needs onnxscript: pip install 'hgrn_vision[export]'" in capsys.readouterr().err


def test_interrupt_leaves_nothing(run, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hgrn_vision", "export", str(run), "--output", str(tmp_path / "a.onnx")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("exporting")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130 and error == "hgrn-vision export: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_force_overwrites(run, tmp_path):
    path = tmp_path / "old.torchscript"
    path.write_text("old")
    assert main(["export", str(run), "--format", "torchscript", "--output", str(path), "--force"]) == 0
    assert path.stat().st_size > 1000
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.torchscript"]


def test_default_name(run, tmp_path):
    weights = tmp_path / "best.safetensors"
    weights.touch()
    assert export.default_name(str(run)) == "run"
    assert export.default_name(str(weights)) == "best"
    assert export.default_name("hf-hub:someone/hgrn.v1") == "hgrn.v1"

"""hgrn-vision explain: its numbers against independent ones, its map against a digit that moves, its files."""

import csv
import html.parser

import numpy as np
import pytest
import timm
import torch
from ablations import ABLATIONS, ablations, random_model
from PIL import Image
from saved_models import CLASSES, SMALL, save_model, write_image
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.commands import explain as command
from hgrn_vision.commands.explain import GateRow, gate_table
from hgrn_vision.data.images import open_image
from hgrn_vision.inference.pretrained import load_model
from hgrn_vision.report.gates import GateStatistics


def explain(*argv):
    return main(["explain", *map(str, argv), "--steps", "2"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected_bounds(model):
    """The paper's formula for the lower bounds, in numpy."""
    depth, width = len(model.blocks), model.embed_dim
    if model.lower_bound is None:
        return np.zeros((depth, width))
    gamma = model.lower_bound.detach().double().numpy()
    p = np.exp(gamma) / np.exp(gamma).sum(axis=0)
    bounds = p.cumsum(axis=0) - p[0]
    return bounds[::-1] if model.lower_bound_kind == "decreasing" else bounds


def hooked_gates(model, images, forget_gate):
    """The forget gate of every layer from what forward hooks see of the projections, one flat array per layer."""
    seen = {}
    for i, block in enumerate(model.blocks):
        block.mixer.in_proj.register_forward_hook(lambda module, args, out, i=i: seen.update({i: (module, out)}))
    with torch.no_grad():
        model(images)
    gates = []
    for i, bound in enumerate(expected_bounds(model)):
        module, out = seen[i]
        D = model.embed_dim
        if forget_gate == "full":
            f = (out.double() + module.bias.detach().double())[..., 2 * D : 3 * D].numpy()
            gates.append((bound + (1 - bound) * sigmoid(f)).ravel())
        else:
            gates.append(np.broadcast_to(bound if forget_gate == "bound_only" else 1.0, (*out.shape[:2], D)).ravel())
    return gates


def check_table(table, model, images, forget_gate):
    gates, bounds = hooked_gates(model, images, forget_gate), expected_bounds(model)
    assert [row.layer for row in table] == [1, 2]
    for column, want in {
        "mean": [gate.mean() for gate in gates],
        "median": [np.median(gate) for gate in gates],
        "bound_mean": bounds.mean(axis=1),
        "bound_min": bounds.min(axis=1),
        "bound_max": bounds.max(axis=1),
    }.items():
        np.testing.assert_allclose([getattr(row, column) for row in table], want, atol=1e-5, err_msg=column)


@ablations
def test_gate_table_equals_what_hooks_measure(ablation):
    model = random_model(**ablation)
    images = torch.randn(3, 3, 16, 16)
    statistics = GateStatistics()
    with torch.no_grad():
        for part in images.split(2):
            statistics.update(model.forget_gates(part))
        table = gate_table(statistics, model.layer_bounds().numpy())
    check_table(table, model, images, ablation.get("forget_gate", "full"))
    shares = statistics.histogram(64)
    for i, gate in enumerate(hooked_gates(model, images, ablation.get("forget_gate", "full"))):
        want = np.histogram(gate.astype(np.float32), 64, (0, 1))[0] / gate.size
        np.testing.assert_allclose(shares[i], want, atol=2 / gate.size)


@pytest.mark.parametrize("name", ["full", "no forget gate", "one direction", "rows and columns"])
def test_command_on_ablated_models(name, tmp_path, capsys):
    ablation = ABLATIONS[name]
    model = random_model(**ablation)
    save_for_hf(model, tmp_path / "model", model_args={**SMALL, **ablation}, safe_serialization=True)
    image, output = write_image(tmp_path / "a.png", 0), tmp_path / "out"
    assert explain(tmp_path, image, "--output", output) == 0
    with open(output / "gates.csv", newline="") as file:
        table = [GateRow(**{key: float(value) for key, value in row.items()}) for row in csv.DictReader(file)]
    images = load_model(str(tmp_path), "cpu").prepare(open_image(image))[None]
    check_table(table, model, images, ablation.get("forget_gate", "full"))
    assert f"{table[1].median:.3f}" in capsys.readouterr().out


class Sources(html.parser.HTMLParser):
    """Addresses that a page would fetch."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]


@pytest.fixture
def run(tmp_path):
    save_model(tmp_path / "run" / "model")
    return tmp_path / "run"


def test_files_and_page(run, tmp_path, capsys):
    images = [
        write_image(tmp_path / "a" / "pixel $x$.png", 0, (1, 1)),
        write_image(tmp_path / "b" / "pixel $x$.png", 1, (50, 20)),
    ]
    output = tmp_path / "out"
    assert explain(run, *images, "--output", output, "--layers", 2, "--class", "cornflower é") == 0
    files = ["1-pixel__x_-evidence.png", "1-pixel__x_-mixing.png", "2-pixel__x_-evidence.png", "2-pixel__x_-mixing.png"]
    assert sorted(path.name for path in output.iterdir()) == sorted([*files, "gates.csv", "gates.png", "index.html"])
    for path in output.glob("*.png"):
        with Image.open(path) as image:
            assert image.width > 300 and len(np.unique(np.asarray(image.convert("L")))) > 10
    page = (output / "index.html").read_text(encoding="utf-8")
    sources = Sources(page).found
    assert len(sources) == 5 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "pixel $x$.png" in page and "cornflower é" in page and "daisy &lt;b&gt;" in page
    assert str(output / "index.html") in capsys.readouterr().out


@pytest.mark.parametrize("label", [None, *CLASSES])
def test_evidence_is_for_the_class_that_was_asked_for(run, tmp_path, monkeypatch, label):
    targets, pixels = [], []
    found, draw = command.evidence, command.evidence_figure
    monkeypatch.setattr(command, "evidence", lambda *args: targets.append(args[2]) or found(*args))
    monkeypatch.setattr(command, "evidence_figure", lambda *args: pixels.append(args[0]) or draw(*args))
    path = write_image(tmp_path / "a.png", 0)
    asked = ["--class", label] if label else []
    assert explain(run, path, "--output", tmp_path / "out", *asked) == 0
    loaded = load_model(str(run), "cpu")
    with torch.no_grad():
        answer = int(loaded.model(loaded.prepare(open_image(path))[None]).argmax())
    assert targets == [CLASSES.index(label) if label else answer]
    # drawn over the pixels that the model saw
    seen = loaded.prepare(open_image(path)).permute(1, 2, 0).numpy() * loaded.spec.std + loaded.spec.mean
    assert pixels[0].shape == (16, 16, 3) and np.abs(pixels[0] - 255 * seen).max() < 0.51


def test_nothing_is_overwritten_silently(run, tmp_path, capsys):
    image, output = write_image(tmp_path / "a.png", 0), tmp_path / "out"
    output.mkdir()
    (output / "index.html").write_text("mine")
    assert explain(run, image, "--output", output) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["index.html"]
    assert explain(run, image, "--output", output, "--force") == 0
    assert (output / "index.html").read_text() != "mine"


def test_bad_input_is_one_line_and_writes_nothing(run, tmp_path, capsys):
    good, output = write_image(tmp_path / "good.png", 0), tmp_path / "out"
    broken, large = tmp_path / "broken.png", tmp_path / "large.png"
    broken.write_bytes(good.read_bytes()[:40])
    Image.new("1", (20000, 20000)).save(large)
    folder = tmp_path / "vit" / "model"
    save_for_hf(timm.create_model("test_vit", num_classes=3), folder, safe_serialization=True)
    cases = {
        "broken.png": (run, good, broken),
        "large.png: more than": (run, large),
        "missing.png": (run, tmp_path / "missing.png"),
        "has 2 layers": (run, good, "--layers", 3),
        "its classes are rose": (run, good, "--class", "nettle"),
        "not an HGRN model": (folder, good),
        "is a file": (run, good, "--output", good),
    }
    for message, argv in cases.items():
        argv = argv if "--output" in argv else (*argv, "--output", output)
        assert explain(*argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not output.exists()

"""hgrn-vision explain: its numbers against independent ones, its map against a digit that moves, its files."""

import csv
import html.parser
import itertools

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from saved_models import CLASSES, SMALL, save_model, write_image
from timm.models import save_for_hf

from hgrn_vision.cli import main
from hgrn_vision.commands.explain import GateRow, gate_table
from hgrn_vision.data.digits import load_digits
from hgrn_vision.data.images import open_image
from hgrn_vision.inference.interpret import evidence, mixing_matrix, mixing_strength
from hgrn_vision.inference.pretrained import load_model
from hgrn_vision.report.gates import GateStatistics

ABLATIONS = {
    "full": {},
    "no input gate": {"input_gate": False},
    "bound only": {"forget_gate": "bound_only"},
    "no forget gate": {"forget_gate": "none", "lower_bound": "none"},
    "no lower bound": {"lower_bound": "none"},
    "decreasing bounds": {"lower_bound": "decreasing"},
    "one direction": {"bidirectional": False},
    "real state": {"complex_state": False},
    "rotation by token": {"data_dependent_theta": True},
    "gate after norm": {"gate_after_norm": True},
    "rows and columns": {"scan": "2d"},
    "rows and columns, one direction": {"scan": "2d", "bidirectional": False, "local_conv": 3},
    "rows and columns, rotation by token": {"scan": "2d", "data_dependent_theta": True},
}
ablations = pytest.mark.parametrize("ablation", ABLATIONS.values(), ids=ABLATIONS)


def random_model(**arguments):
    """A model none of whose parameters is what it was set to at first."""
    model = timm.create_model("hgrn_deit_tiny", num_classes=3, **SMALL, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


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
    """The forget gate of every layer from what forward hooks see of the projections, one flat array a layer."""
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


@ablations
def test_mixing_matrix_times_c_is_the_state(ablation):
    model = random_model(**ablation)
    images = torch.randn(2, 3, 16, 16)
    normed, projected = {}, {}
    for i, block in enumerate(model.blocks):
        block.mixer.norm.register_forward_pre_hook(lambda module, args, i=i: normed.update({i: args[0]}))
        block.mixer.in_proj.register_forward_hook(lambda module, args, out, i=i: projected.update({i: out}))
    with torch.no_grad():
        model(images)
        recurrences = list(model.recurrences(images))
        for i, recurrence in enumerate(recurrences):
            state = normed[i]  # gated, but for the variant whose gate follows the norm
            gate = (
                projected[i][..., -2 * model.embed_dim :] + model.blocks[i].mixer.in_proj.bias[-2 * model.embed_dim :]
            )
            for image in range(2):
                matrix = mixing_matrix(recurrence, image)
                c = torch.complex(*recurrence.c[image].double().unbind(1))  # (T, D)
                h = torch.einsum("dts,sd->td", matrix.to(c.dtype), c)
                got = torch.cat([h.real, h.imag], dim=-1)
                if not model.blocks[i].mixer.gate_after_norm:
                    got = got * gate[image].double().sigmoid()
                torch.testing.assert_close(got.float(), state[image].float(), atol=1e-5, rtol=1e-5)
                # the diagonal of both directions adds up, since nothing has turned there yet
                strength = matrix.abs().mean(dim=0).float()
                torch.testing.assert_close(torch.from_numpy(mixing_strength(recurrence, image)), strength)
    if ablation.get("bidirectional") is False:
        assert np.triu(mixing_strength(recurrences[0]), 1).max() == 0


def scene(digit, row, column):
    """A digit on a dark, noisy ground of 16x16 pixels, normalised."""
    image = 0.05 * torch.rand(1, 16, 16)
    image[:, row : row + 8, column : column + 8] += torch.from_numpy(digit / 16).float()
    return (image.clamp(0, 1).expand(3, -1, -1) - 0.5) / 0.5


@pytest.fixture(scope="module")
def digits_model():
    """A small model that has learned digits anywhere in the image."""
    torch.manual_seed(0)
    digits, labels = load_digits()
    places = torch.Generator().manual_seed(0)
    model = timm.create_model("hgrn_deit_tiny", num_classes=10, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    steps = 120
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(0, 1500, (64,), generator=places).tolist()
        corners = (4 * torch.randint(0, 3, (64, 2), generator=places)).tolist()
        images = torch.stack([scene(digits[i], *corner) for i, corner in zip(chosen, corners, strict=True)])
        loss = torch.nn.functional.cross_entropy(model(images), torch.from_numpy(labels[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def test_strongest_cell_follows_the_digit(digits_model):
    digits, _ = load_digits()
    for number, row, column in itertools.product(range(1500, 1504), (0, 4, 8), (0, 4, 8)):
        image = scene(digits[number], row, column)
        answer = int(digits_model(image[None]).argmax())
        found = evidence(digits_model, image, answer, steps=32)
        assert found.cells.shape == (4, 4)
        y, x = np.unravel_index(found.cells.argmax(), found.cells.shape)
        where = f"digit {number} at {row}, {column}: strongest cell {y}, {x}"
        assert row <= 4 * y < row + 8 and column <= 4 * x < column + 8, where


def test_evidence_adds_up_to_the_gain(digits_model):
    digits, _ = load_digits()
    image = scene(digits[1500], 4, 8)
    empty = image.flatten(1).median(dim=1).values.view(3, 1, 1).expand_as(image)
    with torch.no_grad():
        scores = digits_model(torch.stack([image, empty])).log_softmax(dim=-1)
    for target in range(3):
        found = evidence(digits_model, image, target, steps=256)
        gain = float(scores[0, target] - scores[1, target])
        assert found.gain == pytest.approx(gain, abs=1e-5)
        assert found.cells.sum() == pytest.approx(gain, abs=0.02)


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


def test_class_changes_the_evidence(run):
    loaded = load_model(str(run), "cpu")
    image = torch.randn(3, 16, 16)
    maps = [evidence(loaded.model, image, target, steps=2).cells for target in range(len(CLASSES))]
    assert np.abs(maps[0] - maps[1]).max() > 1e-3


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
        "knows the classes rose": (run, good, "--class", "nettle"),
        "not an HGRN model": (folder, good),
        "is a file": (run, good, "--output", good),
    }
    for message, argv in cases.items():
        argv = argv if "--output" in argv else (*argv, "--output", output)
        assert explain(*argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not output.exists()

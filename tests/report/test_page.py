"""The report: every number that goes in can be read on the page, and the page is self-contained."""

import base64
import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from hgrn_vision.report import GateLayer, Mistake, ReportData, charts, style, write_report
from hgrn_vision.report.page import confused_pairs, embed, render

HOSTILE = '<script>alert("$x$")</script> & Söhne'


def history(epochs: int = 5) -> list[dict]:
    """Rows as csv.DictReader returns them, with one evaluation missing."""
    rows = [
        {
            "epoch": str(epoch),
            "lr": f"{0.001 / epoch}",
            "train_loss": f"{2 / epoch}",
            "val_loss": f"{1.5 / epoch}",
            "val_top1": f"{20 * epoch - (epoch == epochs)}",
            "val_top5": "99.5",
            "images_per_second": f"{100 + epoch}",
            "data_wait": "0.25",
            "peak_memory": "1234.4",
            "skipped_steps": "0",
        }
        for epoch in range(1, epochs + 1)
    ]
    if epochs > 2:
        rows[1]["val_top1"] = ""
    return rows


def gates(layers: int) -> list[GateLayer]:
    return [GateLayer(0.1 + 0.05 * i, 0.123 + 0.05 * i, (np.arange(10) + i) / (45 + 10 * i)) for i in range(layers)]


@pytest.fixture
def data() -> ReportData:
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (300, 400, 3), dtype=np.uint8))
    return ReportData(
        title=f"model {HOSTILE}",
        command=f"python train_imagenet.py --output '{HOSTILE}'",
        history=history(),
        result={"top1": 97.123, "top5": 99.9, "images": 12345, "epoch": 4},
        class_names=["cat", HOSTILE, "dog"],
        confusion=np.array([[51, 2, 3], [4, 52, 6], [7, 8, 53]]),
        mistakes=[
            Mistake(image, HOSTILE, "cat", "dog", 0.876),
            Mistake(image.resize((8, 8)), "b", HOSTILE, "cat", 1),
        ],
        gates=gates(5),
        bad_images=[{"split": "train", "index": 3, "name": HOSTILE, "reason": "empty file"}],
        config={"lr": 0.001, "note": HOSTILE},
        versions={"torch": "9.9.9"},
        notes=[HOSTILE],
    )


class Page(HTMLParser):
    """Collects what a browser would see: tags with their attributes, and text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)


def test_every_number_and_name_is_there(data, tmp_path):
    write_report(tmp_path / "report.html", data)
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    for expected in ("97.12%", "99.90%", "12,345", "torch 9.9.9", "88%", "empty file", "103.0", "25.0%", "1,234 MiB"):
        assert expected in text, expected
    for number in (51, 2, 3, 4, 52, 6, 7, 8, 53):
        assert re.search(rf"\b{number}\b", text), number
    for layer in data.gates:
        assert f"{layer.mean:.3f} {layer.median:.3f}" in text
    assert "best, 80.00% at epoch 4" not in text and "best, 99.00% at epoch 5" in text


def test_the_page_is_self_contained(data):
    page = render(data)
    tags = Page(page).tags
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    sources = [
        value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href", "xlink:href")
    ]
    assert len(sources) >= 2 and all(source.startswith(("data:image/", "#")) for source in sources)
    assert "http://" not in page and "https://" not in page
    identifiers = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(identifiers)


def test_names_are_text_and_never_markup(data):
    page = render(data)
    assert "<script" not in page
    assert Page(page).text.count(HOSTILE) >= 7


def test_the_same_data_give_the_same_page(data):
    assert render(data) == render(data)


def test_charts_are_whole_and_follow_the_page(data):
    page = render(data)
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 6 and style.PAGE_INK not in page
    for drawing in drawings:
        # inside a page the namespace of links need not be declared
        ElementTree.fromstring(drawing.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
        assert "currentColor" in drawing


def lines(figure: Figure) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def test_curves_show_the_log():
    drawn = lines(charts.accuracy_chart(history()))
    np.testing.assert_allclose(drawn["top-1"], [[1, 20], [3, 60], [4, 80], [5, 99]])
    np.testing.assert_allclose(drawn["best, 99.00% at epoch 5"], [[5, 99]])
    drawn = lines(charts.loss_chart(history()))
    np.testing.assert_allclose(drawn["training (augmented)"][:, 1], 2 / np.arange(1, 6))
    np.testing.assert_allclose(drawn["validation"][:, 1], 1.5 / np.arange(1, 6))
    assert charts.rate_chart(history()).axes[0].get_ylim()[1] > 0.001
    assert charts.loss_chart(history(1)).axes[0].lines[0].get_marker() == "o"


@pytest.mark.parametrize("layers", [1, 5, 12, 24])
def test_one_histogram_a_layer(layers):
    shown = [axes for axes in charts.gate_chart(gates(layers)).axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [f"layer {i + 1}" for i in range(layers)]
    values, edges, _ = shown[-1].patches[0].get_data()
    np.testing.assert_allclose(values, gates(layers)[-1].shares)
    assert shown[-1].lines[0].get_xdata()[0] == gates(layers)[-1].median


def test_many_classes_are_shown_as_pairs(data):
    names = [f"class {i}" for i in range(200)]
    confusion = np.diag(np.full(200, 40))
    confusion[3, 150], confusion[199, 0] = 10, 25
    page = Page(render(replace(data, class_names=names, confusion=confusion))).text
    assert "Confusion matrix" not in page
    assert "class 199 class 0 25 38.5% class 3 class 150 10 20.0%" in page
    assert confused_pairs(np.diag([3, 4]), ["a", "b"]) == []


def test_a_report_of_nothing(tmp_path):
    write_report(tmp_path / "report.html", ReportData(title="t", command="c"))
    assert "No epoch has been finished yet" in (tmp_path / "report.html").read_text()


def test_columns_without_numbers_are_left_out(data):
    rows = [{"epoch": 1, "train_loss": "nan", "val_top1": None}]
    text = Page(render(replace(data, history=rows))).text
    assert "images per second, median" not in text and "Loss" in text


def test_images_are_embedded(data):
    for mistake, size, kind in zip(data.mistakes, ((224, 168), (8, 8)), ("jpeg", "png"), strict=True):
        head, _, body = embed(mistake.image).partition(",")
        assert head == f"data:image/{kind};base64"
        assert Image.open(io.BytesIO(base64.b64decode(body))).size == size


def test_names_that_are_no_text(data, tmp_path):
    write_report(tmp_path / "r.html", replace(data, notes=["caf\udce9.png"]))
    assert "caf?.png" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_failed_report_leaves_the_old_one(data, tmp_path):
    write_report(tmp_path / "report.html", data)
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(AttributeError, match="NoneType"):
        write_report(tmp_path / "report.html", replace(data, gates=[None]))
    assert (tmp_path / "report.html").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_matplotlib_is_left_as_it_was(data):
    settings = dict(matplotlib.rcParams)
    render(data)
    assert dict(matplotlib.rcParams) == settings
    program = (
        "import sys; from hgrn_vision.report import ReportData\nfrom hgrn_vision.report.page import render\n"
        "render(ReportData('t', 'c', history=[{'epoch': 1}])); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

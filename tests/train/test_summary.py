"""What goes into the report of a run."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from training import Setup, digits

from hgrn_vision.data.batches import BadRecord
from hgrn_vision.data.images import BadImage
from hgrn_vision.data.splits import Split, open_splits
from hgrn_vision.data.transforms import eval_transform, normalise
from hgrn_vision.report import ReportData
from hgrn_vision.train import summary
from hgrn_vision.train.engine import Progress
from hgrn_vision.train.evaluation import Evaluation
from hgrn_vision.train.summary import GATE_IMAGES, _spread_images, measure_gates, write_summary


def test_the_gates_are_those_of_images_from_the_whole_split():
    setup = Setup(digits())
    model = setup.engine.model.eval()
    layers = measure_gates(model, setup.validation, setup.spec, setup.engine.transform)
    rows = np.linspace(0, len(setup.validation) - 1, GATE_IMAGES).astype(int)
    images = torch.stack([eval_transform(setup.spec)(setup.validation.load(int(row))) for row in rows])
    with torch.no_grad():
        gates = model.forget_gates(normalise(images, setup.spec))
    assert len(layers) == len(gates)
    for layer, values in zip(layers, gates, strict=True):
        values = values.double().numpy()
        np.testing.assert_allclose([layer.mean, layer.median], [values.mean(), np.median(values)], atol=1e-5)
        counts = np.histogram(values, len(layer.shares), (0, 1))[0]
        np.testing.assert_allclose(layer.shares, counts / values.size, atol=1e-3)


def test_models_without_gates_and_images_that_cannot_be_read_have_none(monkeypatch):
    setup = Setup(digits())
    assert measure_gates(torch.nn.Linear(2, 2), setup.validation, setup.spec, setup.engine.transform) == []
    unreadable = setup.validation.subset(np.array([], dtype=int))
    assert measure_gates(setup.engine.model, unreadable, setup.spec, setup.engine.transform) == []


def report(monkeypatch, validation, evaluation, progress, bad=()) -> ReportData:
    """What write_summary passes to the report."""
    written = []
    monkeypatch.setattr(summary, "write_report", lambda path, data: written.append((path, data)))
    about = {"command": "hgrn-vision train", "torch": "9.9"}
    write_summary(Path("report.html"), digits(), about, progress, validation, evaluation, list(bad), ["gates"])
    ((path, data),) = written
    assert path == Path("report.html") and data.command == "hgrn-vision train" and data.versions == {"torch": "9.9"}
    assert data.gates == ["gates"] and data.history == progress.history
    return data


# four images of two classes, two of them wrong: number 40 badly, number 10 less so
EVALUATION = Evaluation(
    indices=np.array([4, 10, 11, 40]),
    targets=np.array([7, 3, 3, 7]),
    predictions=np.array([7, 9, 3, 3]),
    confidence=np.array([0.9, 0.8, 0.7, 0.6]),
    losses=np.array([0.1, 1.0, 0.2, 3.0]),
    ranks=np.array([0, 1, 0, 6]),
    bad=[],
)


def test_a_report_is_of_the_best_epoch_and_of_its_mistakes(monkeypatch):
    validation = open_splits(digits())[1]
    progress = Progress(epoch=5, best={"epoch": 3}, history=[{"epoch": 1}], skipped=2)
    bad = [BadRecord("train", 1, "a.png", "empty file")]
    data = report(monkeypatch, validation, EVALUATION, progress, bad)
    assert data.result == {"top1": 50.0, "top5": 75.0, "images": 4, "epoch": 3}
    assert data.class_names == ["3", "7", "9"] and data.confusion.tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert [(m.true, m.predicted, m.confidence) for m in data.mistakes] == [("7", "3", 0.6), ("3", "9", 0.8)]
    assert [m.name for m in data.mistakes] == [validation.image_name(40), validation.image_name(10)]
    assert np.array_equal(np.asarray(data.mistakes[0].image), np.asarray(validation.load(40)))
    assert data.bad_images == [{"split": "train", "index": 1, "name": "a.png", "reason": "empty file"}]
    assert data.notes == ["Steps skipped because their loss or gradient was not finite: 2."]


def test_a_report_of_a_stream_and_of_a_run_without_a_best_epoch(monkeypatch):
    stream = SimpleNamespace(indexed=False, class_names=list("0123456789"))
    data = report(monkeypatch, stream, EVALUATION, Progress(epoch=5, rollbacks=2))
    assert data.result["epoch"] == 5 and data.mistakes == []
    assert data.notes == ["Times that the run went back to its last checkpoint: 2."]
    assert report(monkeypatch, stream, EVALUATION, Progress()).notes == []


def test_images_that_cannot_be_read_are_left_out_of_the_gates(monkeypatch):
    setup = Setup(digits())
    load = Split.load

    def unreadable(self, index):
        if index == 0:
            raise BadImage("empty file")
        return load(self, index)

    monkeypatch.setattr(Split, "load", unreadable)
    assert len(_spread_images(setup.validation, setup.spec)) == GATE_IMAGES - 1
    assert len(measure_gates(setup.engine.model, setup.validation, setup.spec, setup.engine.transform)) == 2
    stream = SimpleNamespace(indexed=False)
    assert measure_gates(setup.engine.model, stream, setup.spec, setup.engine.transform) == []

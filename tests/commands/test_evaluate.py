"""hgrn-vision evaluate: figures checked by counting, labels equal to predict's, classes matched by name."""

import csv
import json
import shutil
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from saved_models import CLASSES, package_starter, save_model, write_image

from hgrn_vision.cli import main
from hgrn_vision.commands.evaluate import FILES
from hgrn_vision.data.splits import stratified_holdout


@pytest.fixture
def model(tmp_path):
    save_model(tmp_path / "run" / "model")
    return str(tmp_path / "run")


@pytest.fixture
def data(tmp_path):
    """Twelve images per class, in folders whose order is not the model's."""
    folder = tmp_path / "data"
    for i in range(36):
        write_image(folder / CLASSES[i % 3] / f"{i}.png", i)
    return folder


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def evaluate(model, data, output, *flags):
    code = main(["evaluate", model, str(data), "--output", str(output), *flags])
    return code, json.loads((output / "metrics.json").read_text()), read_csv(output / "predictions.csv")


def test_files_of_an_evaluation(model, data, tmp_path, capsys):
    out = tmp_path / "out"
    code, metrics, predictions = evaluate(model, data, out)
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    pairs = Counter((row["true"], row["predicted"]) for row in predictions)
    assert sum(pairs.values()) == metrics["images"] == 36
    right = {name: pairs[name, name] for name in CLASSES}
    assert metrics["top1"] == pytest.approx(100 * sum(right.values()) / 36, abs=1e-4)
    assert 0 < metrics["top1"] < 100
    assert metrics["top5"] == 100

    for row in read_csv(out / "classes.csv"):
        name = row["class"]
        called = sum(count for (_, predicted), count in pairs.items() if predicted == name)
        assert int(row["images"]) == 12
        assert float(row["recall"]) == pytest.approx(right[name] / 12, abs=1e-5)
        assert (float(row["precision"]) if called else 0) == pytest.approx(right[name] / max(called, 1), abs=1e-5)
        assert float(row["f1"]) == pytest.approx(2 * right[name] / (12 + called), abs=1e-5)
    matrix = {row.pop("true \\ predicted"): row for row in read_csv(out / "confusion.csv")}
    assert {(t, p): int(n) for t, row in matrix.items() for p, n in row.items() if n != "0"} == dict(pairs)
    with Image.open(out / "confusion.png") as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(1 << 20)) > 10
    text = capsys.readouterr().out
    assert f"{metrics['top1']:.2f}%" in text and all(name in text for name in CLASSES)


def test_of_many_classes_the_weakest_are_shown(model, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hgrn_vision.commands.evaluate.ROWS", 2)
    evaluate(model, data, tmp_path / "out")
    text = capsys.readouterr().out
    assert "the 2 weakest of 3 classes (--output writes all)" in text
    by_f1 = sorted(read_csv(tmp_path / "out" / "classes.csv"), key=lambda row: float(row["f1"]))
    table = text.split("precision")[1]
    assert [row["class"] for row in by_f1 if row["class"] in table] == [row["class"] for row in by_f1[:2]]


def test_labels_equal_those_of_predict(model, data, tmp_path, capsys):
    (data / CLASSES[1] / "broken.png").write_text("not an image")
    code, metrics, predictions = evaluate(model, data, tmp_path / "out", "--batch-size", "7")
    assert code == 1
    assert metrics["images"] == 36 and metrics["unreadable"] == 1
    assert "1 of 37 images could not be read" in capsys.readouterr().err
    assert main(["predict", model, str(data), "--csv", str(tmp_path / "out.csv")]) == 1
    predicted = {row["file"]: row for row in read_csv(tmp_path / "out.csv")}
    assert len(predicted) == len(predictions) == 37
    for row in predictions:
        other = predicted[str(data / row["file"])]
        assert (row["predicted"], row["error"]) == (other["label"], other["error"])
        if row["predicted"]:
            assert float(row["probability"]) == pytest.approx(float(other["probability"]), rel=1e-4)


def test_folder_tar_and_csv_give_the_same(model, data, tmp_path):
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(data, arcname=".")
    with open(tmp_path / "data" / "list.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label"])
        writer.writerows([path.relative_to(data), path.parent.name] for path in data.glob("*/*.png"))
    (tmp_path / "split").mkdir()
    shutil.copytree(data, tmp_path / "split" / "val", ignore=shutil.ignore_patterns("*.csv"))
    sources = [data, tmp_path / "data.tar", data / "list.csv", tmp_path / "split"]
    results = [evaluate(model, source, tmp_path / f"out{i}")[1] for i, source in enumerate(sources)]
    assert all(result == results[0] for result in results)


def test_classes_are_matched_by_name(model, data, tmp_path, capsys, caplog):
    shutil.rmtree(data / CLASSES[0])
    write_image(data / "a cat" / "1.png", 1)
    _, metrics, predictions = evaluate(model, data, tmp_path / "out")
    assert metrics["images"] == 24
    assert {row["true"] for row in predictions} == set(CLASSES[1:])
    assert "a cat" in caplog.text
    absent = read_csv(tmp_path / "out" / "classes.csv")[0]
    assert (absent["class"], absent["images"], absent["recall"]) == (CLASSES[0], "0", "")
    for name in CLASSES[1:]:
        shutil.rmtree(data / name)
    capsys.readouterr()
    assert main(["evaluate", model, str(data)]) == 2
    error = capsys.readouterr().err
    assert "has a class that the model knows" in error and "a cat" in error and error.count("\n") == 1


def test_imagenet_folders_go_by_name_wordnet_id_or_number(tmp_path, monkeypatch, caplog, capsys):
    package_starter(tmp_path / "pretrained", monkeypatch)
    folders = {
        "golden retriever": "golden retriever",
        "n02012849": "crane (n02012849)",
        "817": "sports car",
        "Granny_Smith": "Granny Smith",
        "crane": None,  # a bird or a machine
    }
    for number, name in enumerate(folders):
        write_image(tmp_path / "photos" / name / "1.png", number, (48, 48))
    _, metrics, predictions = evaluate("hgrn_deit_tiny", tmp_path / "photos", tmp_path / "out")
    assert metrics["images"] == 4 and metrics["classes"] == 1000
    assert {row["file"].split("/")[0]: row["true"] for row in predictions} == {
        folder: name for folder, name in folders.items() if name
    }
    assert "1 validation images are left out" in caplog.text and "crane" in caplog.text
    # a user's own classes have no numbers
    save_model(tmp_path / "run" / "model")
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "photos")]) == 2
    assert "has a class that the model knows" in capsys.readouterr().err


def test_only_what_was_held_out(model, data, tmp_path):
    everything = evaluate(model, data, tmp_path / "all")[2]
    labels = np.array([CLASSES.index(row["true"]) for row in everything])
    held_out = stratified_holdout(labels, 0.25)[1]
    part = evaluate(model, data, tmp_path / "part", "--holdout", "0.25")[2]
    assert [row["file"] for row in part] == [everything[i]["file"] for i in held_out]
    assert len(part) == 9


def test_outputs_are_not_overwritten(model, data, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "confusion.csv").write_text("precious")
    argv = ["evaluate", model, str(data), "--output", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "confusion.csv already exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["confusion.csv"]
    assert main([*argv, "--force"]) == 0
    assert "precious" not in (tmp_path / "out" / "confusion.csv").read_text()


def test_nothing_readable(model, data, capsys):
    for path in data.glob("*/*.png"):
        path.write_bytes(b"")
    assert main(["evaluate", model, str(data)]) == 2
    assert "none of the 36 validation images could be read; the first error: empty file" in capsys.readouterr().err

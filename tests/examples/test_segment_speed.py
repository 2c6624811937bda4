"""examples/segment_speed.py: a table and a chart at sizes that take no time."""

import sys

import pytest
from example_scripts import load_example
from PIL import Image

pytest.importorskip("segmentation_models_pytorch", reason="needs the extra 'dense'")

speed = load_example("segment_speed")


def test_a_table_and_a_chart(tmp_path, capsys):
    chart = tmp_path / "chart.png"
    assert speed.main(["--sizes", "64", "96", "--seconds", "0.01", "--chart", str(chart)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for task in speed.TASKS:
        for size in (64, 96):
            named = [line.split("  ")[-1] for line in lines if line.split()[:2] == [task, str(size)]]
            assert named == [speed.U_NET, speed.HGRN_DPT, speed.VIT_DPT]
    with Image.open(chart) as drawn:
        assert drawn.width > 600


def test_cpu_time_is_that_of_one_thread(tmp_path, monkeypatch, capsys):
    threads, asked = speed.torch.get_num_threads(), []

    def best_times(steps, device, seconds, cpu_time):
        asked.append((speed.torch.get_num_threads(), cpu_time))
        return [0.25] * len(steps)

    monkeypatch.setattr(speed, "best_times", best_times)
    options = ["--sizes", "64", "--tasks", "inference", "--chart", str(tmp_path / "chart.png")]
    try:
        assert speed.main([*options, "--cpu-time"]) == 0
        assert "CPU threads: 1, one image, CPU time, best" in capsys.readouterr().out
        speed.torch.set_num_threads(2)
        assert speed.main(options) == 0
        assert "CPU threads: 2, one image, best" in capsys.readouterr().out
    finally:
        speed.torch.set_num_threads(threads)
    assert asked == [(1, True), (2, False)]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--sizes", "100"], "--sizes must be multiples of 32, at least 64, got 100"),
        (["--sizes", "32"], "--sizes must be multiples of 32, at least 64, got 32"),
        (["--seconds", "0"], "--seconds must be positive and finite, got 0"),
        (["--seconds", "nan"], "--seconds must be positive and finite, got nan"),
        (["--seconds", "inf"], "--seconds must be positive and finite, got inf"),
        (["--chart", "nowhere/chart.png"], "--chart: no such folder: nowhere"),
        (["--chart", "docs"], "--chart: docs is a folder, expected a file name"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(speed, "build_models", lambda: pytest.fail("built"))
    assert speed.main(options) == 2
    assert capsys.readouterr().err == f"segment_speed.py: {message}\n"


def test_a_folder_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "build_models", lambda: pytest.fail("built"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert speed.main(["--chart", str(tmp_path / "chart.png")]) == 2
    assert capsys.readouterr().err == f"segment_speed.py: cannot write to {tmp_path}; choose another output folder\n"


def test_without_segmentation_models(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    assert speed.main(["--chart", str(tmp_path / "chart.png")]) == 2
    assert "is not installed; pip install 'hgrn_vision[dense]' brings it" in capsys.readouterr().err

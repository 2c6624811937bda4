"""The benchmark command on small models: its table, its chart, its figures."""

import csv
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hgrn_vision import cli
from hgrn_vision.commands import bench


@pytest.fixture
def small_models(monkeypatch):
    create = bench.timm.create_model
    small = dict(patch_size=8, embed_dim=24, depth=2, num_classes=5)

    def create_small(name, **kwargs):
        return create(name, **kwargs, **small, **({} if name.startswith("hgrn") else {"num_heads": 2}))

    monkeypatch.setattr(bench.timm, "create_model", create_small)


def test_table_and_chart(small_models, tmp_path, capsys):
    argv = [
        "bench",
        "--models",
        "hgrn_deit_tiny_patch16_224",
        "--peers",
        "deit_tiny_patch16_224",
        "--sizes",
        "16",
        "32",
    ]
    argv += ["--batch", "4", "2", "--seconds", "0.01", "--output", str(tmp_path)]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert [(r["task"], r["size"], r["batch"]) for r in rows] == [
        ("inference", "16", "4"),
        ("inference", "32", "2"),
        ("latency", "16", "1"),
        ("training", "16", "4"),
        ("training", "32", "2"),
    ]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(
            float(row["images_per_second"]) / float(row["peer_images_per_second"]), rel=1e-3
        )
        assert float(row["share_of_products"]) > 0
    assert printed.count("hgrn_deit_tiny_patch16_224") == 5 and "cpu backend" in printed
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(argv) == 2  # nothing is overwritten silently
    assert "--force" in capsys.readouterr().err


@pytest.mark.machine
def test_peak_memory_sees_what_a_step_allocates():
    def step():
        torch.zeros(2**24).add_(1)  # 64 MB

    assert bench.peak_memory(step, torch.device("cpu")) == pytest.approx(2**26, rel=0.1)


def test_matmuls_are_those_of_the_model(small_models):
    model = bench._create("hgrn_deit_tiny_patch16_224", 16)
    images = torch.randn(2, 3, 16, 16)
    step = bench.matmuls_step(model, images, backward=False)
    with FlopCounterMode(display=False) as counter:
        step()
    tokens, d = 2 * 4, 24
    blocks = 2 * tokens * (5 + 2 + 4 + 2) * d * d
    want = 2 * (blocks + tokens * 3 * 8 * 8 * d + 2 * d * 5)
    assert counter.get_total_flops() == want


def test_best_times_takes_turns():
    calls = []
    times = bench.best_times([lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), 0.0)
    assert calls == ["a", "b"] * 4 and all(0 <= t < math.inf for t in times)

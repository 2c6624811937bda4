"""The benchmark command on small models: its table, its chart, its figures."""

import argparse
import csv
import functools
import importlib.util
import itertools
import math
import time

import numpy as np
import onnxruntime
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hgrn_vision import cli
from hgrn_vision.commands import bench
from hgrn_vision.report.speed import speed_chart

PAIR = ["--models", "hgrn_deit_tiny_patch16_224", "--peers", "deit_tiny_patch16_224"]


@pytest.fixture
def small_models(monkeypatch):
    create = bench.timm.create_model
    small = dict(patch_size=8, embed_dim=24, depth=2, num_classes=5)

    def create_small(name, **kwargs):
        return create(name, **kwargs, **small, **({} if name.startswith("hgrn") else {"num_heads": 2}))

    monkeypatch.setattr(bench.timm, "create_model", create_small)


def test_table_and_chart(small_models, tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(bench, "speed_chart", lambda rows: drawn.extend(rows) or speed_chart(rows))
    argv = ["bench", *PAIR, "--sizes", "16", "32", "--batch", "4", "2", "--seconds", "0.01", "--output", str(tmp_path)]
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
        assert row["runtime"] == "torch" and float(row["share_of_matmuls"]) > 0
    assert printed.count("hgrn_deit_tiny_patch16_224") == 5 and "cpu backend" in printed
    assert printed.count("  deit_tiny_patch16_224\n") == 5
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    # the speed of a single image is not comparable with that of batches
    assert [row["task"] for row in drawn] == ["inference"] * 2 + ["training"] * 2
    assert cli.main(argv) == 2  # nothing is overwritten silently
    assert "--force" in capsys.readouterr().err


def test_constructor_arguments_belong_to_a_model(small_models, tmp_path, capsys):
    ours, peer = "hgrn_deit_tiny_patch16_224,local_conv=3,scan=2d", "hgrn_deit_tiny_patch16_224"
    argv = ["bench", "--models", ours, "--peers", peer, "--sizes", "16", "--tasks", "latency", "--seconds", "0.01"]
    assert cli.main([*argv, "--output", str(tmp_path)]) == 0
    (row,) = csv.DictReader((tmp_path / "bench.csv").open())
    assert (row["model"], row["peer"]) == (ours, peer)
    model = bench._create(ours, 16)
    assert model.blocks[0].mixer.scan == "2d" and model.blocks[0].mixer.local_conv.weight.shape[-1] == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hgrn_deit_tinny,local_conv=3", "unknown model 'hgrn_deit_tinny'"),
        ("hgrn_deit_tiny,lr=1", "lr is a training setting"),
        ("hgrn_deit_tiny,sidewise=1", "sidewise"),
        ("hgrn_deit_tiny,local_conv=4", "local_conv"),
    ],
)
def test_models_that_cannot_be_made(tmp_path, capsys, name, message):
    argv = ["bench", "--models", name, "--sizes", "28", "--tasks", "latency", "--output", str(tmp_path)]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "32", "8"], "bench: deit_tiny_patch16_224 cannot run at 8 pixels: Calculated padded input size"),
        (
            ["--models", "hgrn_deit_tiny_patch16_224", "hgrn_deit_tiny_patch16_224,embed_dim=-4"],
            "hgrn_deit_tiny_patch16_224,embed_dim=-4 cannot run at 32 pixels: Trying to create tensor with negative",
        ),
        (["--peers", "deit_tiny_patch16_224,num_heads=5"], "deit_tiny_patch16_224,num_heads=5 cannot run at 32 pixels"),
        # batch norm in training sees one value per channel
        (
            ["--peers", "resnet10t", "--tasks", "training", "--batch", "1"],
            "resnet10t cannot run at 32 pixels: Expected more than 1",
        ),
        (["--device", "foo"], "device 'foo' cannot be used: Expected one of cpu, cuda"),
        (["--output", "file"], "file is not a folder; choose another output folder"),
        (["--output", "file/bench"], "file is not a folder; choose another output folder"),
    ],
)
def test_nothing_is_measured_if_a_line_could_not_be(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench, "best_times", lambda *args: pytest.fail("measured"))
    argv = ["bench", *PAIR, "--sizes", "32", "--tasks", "latency", "inference", "--output", "new"]
    assert cli.main([*argv, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_for_onnxruntime_are_written_before_anything_is_measured(small_models, tmp_path, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setattr(bench, "onnx_export", refuse)
    monkeypatch.setattr(bench, "best_times", lambda *args: pytest.fail("measured"))
    argv = ["bench", *PAIR, "--runtime", "onnxruntime", "--sizes", "16", "--output", str(tmp_path / "new")]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error == "hgrn-vision bench: deit_tiny_patch16_224 cannot run at 16 pixels: no such operator\n"
    assert not (tmp_path / "new").exists()


def test_models_are_tried_once_at_each_size_as_they_will_run(small_models, tmp_path, monkeypatch):
    tried, create = [], bench._create

    def create_and_watch(name, size):
        model = create(name, size)
        model.register_forward_pre_hook(
            lambda model, args: tried.append((name.partition("_")[0], *args[0].shape[::3], model.training))
        )
        return model

    monkeypatch.setattr(bench, "_create", create_and_watch)
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail(f"measured {tried}"))
    argv = ["bench", *PAIR, "--sizes", "16", "32", "--batch", "4", "1", "--output", str(tmp_path)]
    with pytest.raises(pytest.fail.Exception):
        cli.main(argv)
    shapes = [(1, 16, False), (1, 32, False), (2, 16, True), (1, 32, True)]
    assert tried == [(name, *shape) for shape in shapes for name in ("hgrn", "deit")]


def test_onnxruntime_runs_files_of_both(small_models, tmp_path, capsys, monkeypatch):
    files, options = [], []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, path, settings, **kwargs):
            files.append(path.name)
            options.append((settings.intra_op_num_threads, settings.enable_cpu_mem_arena))
            super().__init__(path, settings, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    argv = ["bench", *PAIR, "--runtime", "onnxruntime", "--sizes", "16", "16", "--batch", "4", "2", "--threads", "1"]
    threads = torch.get_num_threads()
    assert cli.main([*argv, "--seconds", "0.01", "--output", str(tmp_path)]) == 0
    torch.set_num_threads(threads)
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    found = [(row["runtime"], row["task"], row["batch"]) for row in rows]
    assert found == [
        ("onnxruntime", "inference", "4"),
        ("onnxruntime", "inference", "2"),
        ("onnxruntime", "latency", "1"),
    ]
    for row in rows:
        assert row["share_of_matmuls"] == "" and row["peer"] == "deit_tiny_patch16_224"
        assert float(row["ratio"]) == pytest.approx(
            float(row["images_per_second"]) / float(row["peer_images_per_second"]), rel=1e-3
        )
    # for memory and for time, ours and the peer's, with equal settings
    pair = ["hgrn_deit_tiny_patch16_224-16.onnx", "deit_tiny_patch16_224-16.onnx"]
    assert files == 6 * pair and options == 3 * [(1, False), (1, False), (1, True), (1, True)]
    printed = capsys.readouterr().out
    assert "1 CPU threads, float32, onnxruntime 1." in printed and "nan" not in printed


def test_the_files_answer_as_the_models_do(small_models, tmp_path, monkeypatch):
    made = []
    create = bench._create
    monkeypatch.setattr(bench, "_create", lambda *args, **kwargs: made.append(create(*args, **kwargs)) or made[-1])
    images = torch.randn(3, 3, 16, 16)
    for name in ("hgrn_deit_tiny_patch16_224", "deit_tiny_patch16_224"):
        step = bench.onnx_step(bench.open_session(bench._onnx_file(name, 16, tmp_path)), images.numpy())
        with torch.no_grad():
            np.testing.assert_allclose(step()[0], made[-1](images).numpy(), atol=1e-4)


def test_our_file_takes_any_size_as_an_exported_one_does(small_models, tmp_path):
    session = bench.open_session(bench._onnx_file("hgrn_deit_tiny_patch16_224", 32, tmp_path))
    assert bench.onnx_step(session, np.zeros((2, 3, 48, 80), np.float32))()[0].shape == (2, 5)


BAD = {
    "cannot train; use --tasks inference latency": ["--tasks", "inference", "training"],
    "measures float32 on CPUs": ["--dtype", "bfloat16"],
    "on CPUs; leave out --device": ["--device", "cuda"],
}


@pytest.mark.parametrize("message", BAD)
def test_what_onnxruntime_cannot_do_is_one_line(message, tmp_path, capsys):
    argv = ["bench", "--runtime", "onnxruntime", *BAD[message], "--output", str(tmp_path / "new")]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_machine_without_onnxruntime(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    assert cli.main(["bench", "--runtime", "onnxruntime", "--output", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert "--runtime onnxruntime needs onnxruntime: pip install 'hgrn_vision[export]'" in error
    assert error.count("\n") == 1 and not (tmp_path / "new").exists()


@pytest.mark.machine
def test_peak_memory_sees_what_a_step_allocates():
    def step():
        torch.zeros(2**24).add_(1)  # 64 MB

    assert bench.peak_memory(step, torch.device("cpu")) == pytest.approx(2**26, rel=0.1)


def test_the_system_counts_memory_in_kibibytes(monkeypatch):
    class Status(str):
        def read_text(self):
            return "Name:\tpython\nVmHWM:\t    3000 kB\nVmRSS:\t    2000 kB\n" if self == "/proc/self/status" else ""

    monkeypatch.setattr(bench, "Path", Status)
    assert (bench._status("VmRSS"), bench._status("VmHWM")) == (2000 * 1024, 3000 * 1024)


# a convolution of each channel by itself is no matmul
@pytest.mark.parametrize("arguments", ["", ",local_conv=3"])
def test_matmuls_are_those_of_the_model(small_models, arguments):
    model = bench._create(f"hgrn_deit_tiny_patch16_224{arguments}", 16)
    images = torch.randn(2, 3, 16, 16)
    step = bench.matmuls_step(model, images, backward=False)
    model(images)  # no longer recorded
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


def test_cpu_time_leaves_out_what_others_take():
    step = functools.partial(time.sleep, 0.05)
    (waited,), (computed,) = (bench.best_times([step], torch.device("cpu"), 0.0, cpu) for cpu in (False, True))
    assert waited >= 0.05 > computed


def settings(*argv):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench._settings(parser.parse_args(argv))


def test_a_peer_for_each_model_a_batch_for_each_size_and_one_image_for_the_latency():
    found = settings("--tasks", "inference", "latency")
    sizes, first = {224: 32, 384: 10, 512: 6, 768: 2, 1024: 1}, {224: 1}
    assert found == [
        (model, peer, task, size, batch)
        for model, peer in zip(bench.MODELS, ["deit_tiny_patch16_224", "deit_small_patch16_224"], strict=True)
        for task, shapes in (("inference", sizes), ("latency", first))
        for size, batch in shapes.items()
    ]
    one = settings("--peers", "resnet18", "--sizes", "4000", "--tasks", "training")
    assert one == [(model, "resnet18", "training", 4000, 1) for model in bench.MODELS]
    for models, peers in ((3, 2), (1, 2)):
        with pytest.raises(
            ValueError, match=f"{peers} --peers for {models} --models; give one for each, or one for all"
        ):
            settings("--models", *["hgrn_deit_base"] * models, "--peers", *["resnet18"] * peers)
    with pytest.raises(ValueError, match="must be positive"):
        settings("--threads", "-1")
    for seconds in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"--seconds must be positive and finite, got {seconds}"):
            settings("--seconds", seconds)
    with pytest.raises(ValueError, match="--batch needs one positive number"):
        settings("--sizes", "224", "--batch", "0")


@pytest.mark.parametrize(
    ("model", "peer"),
    [
        ("hgrn_deit_small_patch16_224", "deit_small_patch16_224"),
        ("hgrn2d_deit_tiny", "deit_tiny_patch16_224"),
        ("hgrn_deit_base_patch16_224,local_conv=3", "deit_base_patch16_224"),
        ("hgrn1d_vit_small", "deit_small_patch16_224"),
    ],
)
def test_the_peer_of_a_model_is_the_deit_of_its_size(model, peer):
    assert settings("--models", model, "--sizes", "224", "--tasks", "latency") == [(model, peer, "latency", 224, 1)]


def test_a_model_without_a_deit_needs_a_peer(tmp_path, capsys):
    argv = ["bench", "--models", "hgrn_deit_tiny", "vit_tiny_patch16_224", "--output", str(tmp_path / "new")]
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == (
        "hgrn-vision bench: vit_tiny_patch16_224 has no DeiT to compare with; name its peer with --peers\n"
    )


@pytest.mark.parametrize("task", bench.RUNTIMES["torch"])
def test_a_row_is_made_of_what_was_measured(small_models, monkeypatch, task):
    monkeypatch.setattr(bench, "best_times", lambda steps, device, seconds: [0.5, 0.25, 0.125])
    memory = iter([3 * 2**20, 5 * 2**20])
    monkeypatch.setattr(bench, "peak_memory", lambda step, device: next(memory))
    name, peer = "hgrn_deit_tiny_patch16_224", "deit_tiny_patch16_224"
    row = bench.measure(name, peer, task, 16, 4, torch.device("cpu"), torch.float32, 1.0)
    assert row == bench.Row(
        runtime="torch",
        task=task,
        size=16,
        batch=4,
        model=name,
        peer=peer,
        images_per_second=8.0,
        peer_images_per_second=16.0,
        ratio=0.5,
        share_of_matmuls=0.25,
        memory_mb=3.0,
        peer_memory_mb=5.0,
        ns_per_pixel=5e8 / (4 * 256),
        bytes_per_pixel=3 * 2**20 / (4 * 256),
    )


def test_training_learns_and_inference_does_not():
    model, images = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)), torch.ones(2, 3, 2, 2)
    before = model[1].weight.clone()
    step = bench.inference_step(model, images)
    assert not step().requires_grad and not model.training
    assert torch.equal(model[1].weight, before)
    bench.training_step(model, images)()
    assert model.training and not torch.equal(model[1].weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_matmuls_of_training_have_a_backward_pass(small_models):
    model = bench._create("hgrn_deit_tiny_patch16_224", 16)
    images, flops = torch.randn(2, 3, 16, 16), []
    for backward in (False, True):
        step = bench.matmuls_step(model, images, backward)
        with FlopCounterMode(display=False) as counter:
            step()
        flops.append(counter.get_total_flops())
    assert flops[1] == 3 * flops[0]


def test_the_best_time_counts_until_the_seconds_are_over(monkeypatch):
    """With a clock that only the steps advance."""
    clock, calls = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def step(*seconds):
        times = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def go():
            calls.append(seconds)
            clock[0] += next(times)

        return go

    # the first call of each warms it up
    assert bench.best_times([step(1, 5, 3, 4), step(1, 2, 2, 9)], torch.device("cpu"), 20.0) == [3, 2]
    assert len(calls) == 2 * (1 + 3)
    calls.clear()
    assert bench.best_times([step(1, 1, 1, 1, 0.5, 2)], torch.device("cpu"), 4.0) == [0.5]
    assert len(calls) == 1 + 5

"""Loader processes: signals, generators, errors, what they can be sent."""

import pickle
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from image_data import SPEC, config, flat, png, write, write_tar

from hgrn_vision.data.loaders import EvalLoader, TrainLoader
from hgrn_vision.data.splits import open_splits, open_validation
from hgrn_vision.data.workers import data_loader


def test_loading_leaves_the_global_generators_alone():
    train, validation = open_splits(config())
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    for workers in (0, 1):
        flat(TrainLoader(train, config(workers=workers, epoch_steps=1), SPEC))
        list(EvalLoader(validation, config(workers=workers), SPEC))
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1]) and torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_readable_stops_with_one_line(tmp_path, workers):
    for i in range(8):
        write(tmp_path / "ab"[i % 2] / f"{i}.png", b"broken")
    settings = config(data=str(tmp_path), batch_size=4, micro_batch=4, workers=workers)
    loader = TrainLoader(open_validation(settings, ["a", "b"]), settings, SPEC)
    with pytest.raises(ValueError, match="20 images in a row are unreadable, the last is [ab]/.*png: not a") as error:
        next(loader.epoch(0))
    assert "\n" not in str(error.value)
    loader.close()


def test_workers_outlive_signals_and_epochs():
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=2), SPEC)
    steps = loader.epoch(0)
    next(steps)
    processes = loader.source.loader._iterator._workers
    # sent by another process: only the one that started them may end them
    pids = [str(process.pid) for process in processes]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        subprocess.run(["kill", f"-{number.value}", *pids], check=True)
    assert len(list(steps)) == 21
    next(loader.epoch(1))
    assert loader.source.loader._iterator._workers == processes and all(p.is_alive() for p in processes)
    loader.close()
    # ended when told to, and not killed
    assert [p.exitcode for p in processes] == [0, 0]


def test_an_error_elsewhere_is_not_held_up_by_workers(tmp_path):
    """They ignore signals from others, but the interpreter ends its workers with a signal before it waits for them."""
    program = tmp_path / "program.py"
    program.write_text(
        "from hgrn_vision.data.spec import DataSpec\n"
        "from hgrn_vision.train.config import TrainConfig\n"
        "from hgrn_vision.data.splits import open_splits\n"
        "from hgrn_vision.data.loaders import EvalLoader, TrainLoader\n"
        "config = TrainConfig(batch_size=64, micro_batch=16, workers=1)\n"
        "spec = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, 'bicubic', 1.0)\n"
        "train, validation = open_splits(config)\n"
        "steps, batches = TrainLoader(train, config, spec).epoch(0), iter(EvalLoader(validation, config, spec))\n"
        "next(steps), next(batches)\n"
        "raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, str(program)], check=False, timeout=900).returncode == 7


def test_loaders_can_be_sent_to_processes_that_are_not_forks():
    """What the workers get, pickled as under the spawn start method, makes the same batches."""
    train, _ = open_splits(config())
    source = TrainLoader(train, config(), SPEC).source
    dataset, keys = pickle.loads(pickle.dumps((source.loader.dataset, list(source.keys)[:4])))
    assert torch.equal(
        torch.cat([dataset[key].images for key in keys]), flat(TrainLoader(train, config(), SPEC))[0][:64]
    )


def test_tar_members_are_read_by_several_workers(tmp_path):
    images = {f"{'ab'[i % 2]}/{i}.png": png((i, i % 2, 0)) for i in range(64)}
    write_tar(tmp_path / "all.tar", images)
    settings = config(data=str(tmp_path / "all.tar"), holdout=0.5, workers=3, batch_size=2, micro_batch=2)
    _, validation = open_splits(settings)
    validation.load(0)
    count = 0
    for batch in EvalLoader(validation, settings, SPEC):
        assert batch.images[:, 1, 0, 0].tolist() == batch.targets.tolist() and not batch.bad
        count += len(batch.targets)
    assert count == len(validation) == 32


@pytest.mark.parametrize(
    "device, gpu, pinned", [("cpu", True, False), ("cuda:1", False, True), ("auto", True, True), ("auto", False, False)]
)
def test_memory_is_pinned_for_a_gpu_alone(device, gpu, pinned, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert data_loader([], config(device=device), 0).pin_memory == pinned

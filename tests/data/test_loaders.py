"""Loaders give the same batches however they are run."""

import os
import subprocess
import sys

import pytest
import torch
from image_data import SPEC, config, flat, tree, write

from hgrn_vision.data.loaders import EvalLoader, TrainLoader, read_ahead
from hgrn_vision.data.splits import Split, open_splits, open_validation


@pytest.fixture(scope="module")
def reference():
    """Two epochs of the digits in one process without workers."""
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(), SPEC)
    return flat(loader, 1), flat(loader, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_bytes(reference, workers):
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=workers), SPEC)
    for epoch, expected in zip((1, 2), reference, strict=True):
        batches = [batch for step in loader.epoch(epoch) for batch in step]
        assert torch.equal(torch.cat([b.images for b in batches]), expected[0])
        assert torch.equal(torch.cat([b.targets for b in batches]), expected[1])
    loader.close()


def test_an_abandoned_epoch_leaves_nothing_behind(reference):
    train, _ = open_splits(config())
    loader = TrainLoader(train, config(workers=2), SPEC)
    next(loader.epoch(1))
    assert torch.equal(flat(loader, 2)[0], reference[1][0])


def test_ranks_share_the_same_global_batches(reference):
    train, _ = open_splits(config())
    for world_size in (2, 4):
        loaders = [TrainLoader(train, config(), SPEC, rank, world_size) for rank in range(world_size)]
        for step, parts in enumerate(zip(*(loader.epoch(1) for loader in loaders), strict=True)):
            batches = [batch for part in parts for batch in part]
            assert [batch.number for batch in batches] == [0, 1, 2, 3]
            expected = reference[0][0][step * 64 : (step + 1) * 64]
            assert torch.equal(torch.cat([b.images for b in batches]), expected)
        assert step == 21
    with pytest.raises(ValueError, match="3 processes cannot share 4 micro-batches .*: 1, 2, 4 processes would work"):
        TrainLoader(train, config(), SPEC, 0, 3)


class Counting:
    """A source that remembers what was read from it."""

    def __init__(self, source):
        self.source, self.reads = source, []

    def name(self, row):
        return self.source.name(row)

    def read(self, row):
        self.reads.append(row)
        return self.source.read(row)


def test_starting_in_the_middle_reads_only_what_follows(reference):
    train, _ = open_splits(config())
    counting = Counting(train.source)
    train = Split("train", counting, train.class_names, train.labels, train.rows)
    images, targets = flat(TrainLoader(train, config(), SPEC), 1, first_step=20)
    assert torch.equal(images, reference[0][0][20 * 64 :]) and torch.equal(targets, reference[0][1][20 * 64 :])
    assert len(counting.reads) == 2 * 64


def test_rollbacks_change_the_augmentation_and_not_the_order(reference):
    train, _ = open_splits(config())
    images, targets = flat(TrainLoader(train, config(), SPEC), 1, rollbacks=1)
    assert torch.equal(targets, reference[0][1]) and not torch.equal(images, reference[0][0])
    assert not torch.equal(flat(TrainLoader(train, config(seed=1), SPEC), 1)[1], targets)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_image_is_evaluated_once_in_the_same_batch(world_size):
    _, validation = open_splits(config(eval_images=101))
    whole = {int(b.indices[0]): b for b in EvalLoader(validation, config(workers=1), SPEC)}
    seen = []
    for rank in range(world_size):
        for batch in EvalLoader(validation, config(), SPEC, rank, world_size):
            same = whole[int(batch.indices[0])]
            assert torch.equal(batch.images, same.images) and torch.equal(batch.targets, same.targets)
            seen += batch.indices.tolist()
    assert sorted(seen) == list(range(101))


def test_more_ranks_than_batches():
    _, validation = open_splits(config(eval_images=20))
    counts = [sum(len(b.indices) for b in EvalLoader(validation, config(), SPEC, rank, 4)) for rank in range(4)]
    assert counts == [16, 4, 0, 0]


def test_reading_ahead_gives_the_same_batches_in_order(tmp_path):
    tree(tmp_path, a=21, b=20)
    write(tmp_path / "a" / "3.png", b"broken")
    validation = open_validation(config(data=str(tmp_path)), ["a", "b"])
    want, got = list(EvalLoader(validation, config(), SPEC)), list(read_ahead(validation, SPEC, 16))
    assert [len(batch.targets) for batch in got] == [15, 16, 9]
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True)) and ours.bad == theirs.bad


def test_reading_ahead_stops_at_a_few_batches_and_with_its_reader(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    validation, started = open_validation(config(), list("0123456789")), []
    monkeypatch.setattr(
        Split, "load", lambda self, index, load=Split.load: (started.append(index), load(self, index))[1]
    )
    batches = read_ahead(validation, SPEC, 10)
    next(batches)
    next(batches)
    # two that were returned, and one for each thread
    assert max(started) < 40
    batches.close()
    assert len(started) <= 40


def test_the_data_are_of_use_without_training():
    code = (
        "import sys, types\n"
        "from hgrn_vision.data.loaders import EvalLoader\n"
        "from hgrn_vision.data.spec import DataSpec\n"
        "from hgrn_vision.data.splits import open_validation\n"
        "settings = types.SimpleNamespace(data='digits', dataset='', holdout=0.2, eval_images=None, max_pixels=10**6,\n"
        "    train_split='train', val_split='validation', micro_batch=32, workers=0, device='cpu')\n"
        "validation = open_validation(settings, [str(digit) for digit in range(10)])\n"
        "spec = DataSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3, 'bicubic', 1.0)\n"
        "print(sum(len(batch.targets) for batch in EvalLoader(validation, settings, spec)))\n"
        "print([name for name in sys.modules if name.startswith('hgrn_vision.train')])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["359", "[]"]

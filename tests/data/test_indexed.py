"""The order of an epoch, and images that cannot be read."""

import numpy as np
import pytest
import torch
from image_data import SPEC, config, flat, tree, write

from hgrn_vision.data.indexed import balanced_order, epoch_order
from hgrn_vision.data.loaders import EvalLoader, TrainLoader
from hgrn_vision.data.splits import open_splits, open_validation


def test_repeated_augmentation_draws_a_third_of_the_images_three_times():
    order = epoch_order(300, config(repeats=3), 0, 300)
    images, counts = np.unique(order, return_counts=True)
    assert len(images) == 100 and set(counts) == {3}
    assert len(np.unique(epoch_order(300, config(repeats=1), 0, 300))) == 300
    assert not np.array_equal(order, epoch_order(300, config(repeats=3), 1, 300))


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_balanced_epoch_has_every_class_equally_often(repeats):
    labels = np.repeat([0, 1, 2], [150, 7, 40])
    order = balanced_order(labels, config(repeats=repeats), 0, 180)
    assert np.bincount(labels[order]).tolist() == [60, 60, 60]
    for label in range(3):
        counts = np.bincount(order[labels[order] == label], minlength=len(labels))[labels == label]
        assert counts.max() - counts.min() <= repeats
    # every batch is balanced, not only the whole epoch
    assert np.bincount(labels[order[:30]]).tolist() == [10, 10, 10]
    # and the classes do not come in a fixed order: micro-batches are dealt by position
    assert len(np.unique(labels[order].reshape(-1, 3 * repeats), axis=0)) == 6
    assert np.array_equal(order, balanced_order(labels, config(repeats=repeats), 0, 180))
    assert not np.array_equal(order, balanced_order(labels, config(repeats=repeats), 1, 180))


def test_repeats_of_an_image_differ_and_lie_in_different_micro_batches():
    train, _ = open_splits(config(repeats=3))
    step = next(TrainLoader(train, config(repeats=3), SPEC).epoch(0))
    # position p of the batch is image p // 4 of micro-batch p % 4
    repeats = [step[p % 4].images[p // 4] for p in range(3)]
    assert len({int(step[p % 4].targets[p // 4]) for p in range(3)}) == 1
    assert not torch.equal(repeats[0], repeats[1]) and not torch.equal(repeats[1], repeats[2])


@pytest.fixture
def damaged(tmp_path):
    """40 images of two classes, four of them unreadable: truncated, empty, text, missing."""
    root = tmp_path / "damaged"
    tree(root, cat=20, dog=20)
    whole = (root / "cat" / "3.png").read_bytes()
    write(root / "cat" / "3.png", whole[:50])
    (root / "cat" / "7.png").write_bytes(b"")
    write(root / "dog" / "0.png", b"<html>not found</html>")
    split = open_validation(config(data=str(root)), ["cat", "dog"])
    (root / "dog" / "19.png").unlink()
    return split


BROKEN = {"cat/3.png", "cat/7.png", "dog/0.png", "dog/19.png"}


def test_unreadable_images_are_replaced_the_same_way_everywhere(damaged):
    runs = []
    for workers in (0, 2):
        settings = config(batch_size=8, micro_batch=4, repeats=1, workers=workers)
        loader = TrainLoader(damaged, settings, SPEC)
        batches = [batch for step in loader.epoch(0) for batch in step]
        loader.close()
        assert {record.name for batch in batches for record in batch.bad} == BROKEN
        assert all(len(batch.images) == 4 for batch in batches)
        runs.append(batches)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
        assert one.bad == other.bad
    reasons = {record.name: record.reason for batch in runs[0] for record in batch.bad}
    assert reasons["cat/7.png"] == "empty file" and "No such file" in reasons["dog/19.png"]


def test_the_replacement_keeps_its_own_label(tmp_path):
    """Cats are red 0, dogs red 10: with a broken dog among them, no image gets the label of another."""
    root = tree(tmp_path, cat=3, dog=5)
    write(tmp_path / "dog" / "2.png", b"broken")
    settings = config(
        data=root, batch_size=8, micro_batch=4, repeats=1, auto_augment="", color_jitter=0.0, interpolation="bilinear"
    )
    loader = TrainLoader(open_validation(settings, ["cat", "dog"]), settings, SPEC)
    for epoch in range(5):
        images, targets = flat(loader, epoch)
        assert (images[:, 0, 0, 0] // 10).tolist() == targets.tolist()


def test_evaluation_leaves_unreadable_images_out(damaged):
    batches = list(EvalLoader(damaged, config(batch_size=2, micro_batch=2), SPEC))
    seen = torch.cat([batch.indices for batch in batches]).tolist()
    bad = [record for batch in batches for record in batch.bad]
    assert {record.name for record in bad} == BROKEN
    assert sorted(seen + [record.index for record in bad]) == list(range(40))
    assert torch.cat([batch.targets for batch in batches]).tolist() == damaged.labels[seen].tolist()


@pytest.mark.parametrize("repeats, length", [(1, 31), (2, 32), (3, 29), (1, 2)])
def test_a_balanced_epoch_may_end_in_the_middle_of_a_round(repeats, length):
    labels = np.repeat([0, 1, 2], [5, 1, 9])
    order = balanced_order(labels, config(repeats=repeats), 0, length)
    counts = np.bincount(labels[order], minlength=3)
    assert len(order) == length and counts.max() - counts.min() <= repeats

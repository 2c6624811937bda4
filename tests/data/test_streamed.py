"""Images that are read in sequence: the batches of one worker, without processes and with them."""

import io
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from image_data import SPEC, config, flat, png, write_tar
from torch.utils.data import get_worker_info

from hgrn_vision.data import streamed
from hgrn_vision.data.batches import BadRecord
from hgrn_vision.data.loaders import EvalLoader, TrainLoader
from hgrn_vision.data.splits import open_splits
from hgrn_vision.train.config import TrainConfig

CONFIG = TrainConfig(batch_size=4, micro_batch=2, workers=3)


@pytest.fixture(autouse=True)
def worker(monkeypatch):
    """Make this process look like worker 1 of 3."""
    info = SimpleNamespace(id=1, num_workers=3)
    monkeypatch.setattr(streamed, "get_worker_info", lambda: get_worker_info() or info)
    return info


def red_file(red: int) -> io.BytesIO:
    return io.BytesIO(png((red, 0, 0)))


class Reader:
    """Files with these red values and the labels 0, 1, 0, ...; None is a file that cannot be read."""

    def __init__(self, *reds):
        self.reds, self.passes = reds, 0

    def __iter__(self):
        self.passes += 1
        assert self.passes < 100, "read without end"
        for number, red in enumerate(self.reds):
            yield (io.BytesIO(b"no image") if red is None else red_file(red)), number % 2


def stream(*reds, **settings):
    settings = {"class_names": ["a", "b"], "max_pixels": 10**6, "name": "train", "limit": None, **settings}
    return SimpleNamespace(reader=Reader(*reds), **settings)


def reds(images) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def test_what_cannot_be_read_is_listed_and_left_out():
    bad, train = [], stream(10, None, 30)
    found = list(streamed.readable(train, iter(train.reader), bad))
    assert [(image.getpixel((0, 0))[0], label) for image, label in found] == [(10, 0), (30, 0)]
    assert bad == [BadRecord("train", -1, "image 1 of worker 1", "not an image in a known format")]


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_that_are_no_class(label):
    with pytest.raises(ValueError, match=f"label {label} in data with 2 classes; --classes sets them"):
        next(streamed.readable(stream(), iter([(red_file(1), label)]), []))


def test_images_come_over_and_over_unless_there_are_none():
    train = stream(1, 2, 3)
    labels = [label for _, label in itertools.islice(streamed.without_end(train), 8)]
    assert labels == [0, 1, 0] * 2 + [0, 1] and train.reader.passes == 3
    assert list(streamed.without_end(stream())) == []


def test_micro_batches_are_full_and_name_what_is_missing_once():
    batches = streamed.StreamedMicroBatches(stream(10, None, 30), CONFIG, SPEC, rank=0)
    first, second, third = itertools.islice(batches, 3)
    assert [batch.targets.tolist() for batch in (first, second, third)] == [[0, 0], [0, 0], [0, 0]]
    # one pass over the files for each
    names = [[record.name for record in batch.bad] for batch in (first, second, third)]
    assert names == [["image 1 of worker 1"], ["image 4 of worker 1"], ["image 7 of worker 1"]]


def test_a_sample_is_augmented_by_its_place(worker, monkeypatch):
    seeds = []
    monkeypatch.setattr(streamed, "fold", lambda *numbers: seeds.append(numbers) or 0)
    batches = streamed.StreamedMicroBatches(stream(1, 2), TrainConfig(seed=7, micro_batch=2, workers=3), SPEC, rank=2)
    batches.epoch, batches.rollbacks = 5, 4
    list(itertools.islice(batches, 2))
    # seed, rollbacks, epoch, the worker among those of all ranks, how many images it has made
    assert seeds == [(7, 4, 5, 2 * 3 + 1, count) for count in range(4)]


def test_an_error_is_handed_on_as_a_value():
    batches = list(streamed.StreamedMicroBatches(stream(1, 2, class_names=["a"]), CONFIG, SPEC, rank=0))
    assert len(batches) == 1 and "label 1 in data with 1 classes" in str(batches[0])
    (error,) = streamed.StreamedEvalBatches(stream(1, 2, class_names=["a"]), CONFIG, SPEC, 0, 1)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("rank, mine", [(0, [[10, 30], [50]]), (1, [[20, 40]])])
def test_ranks_share_the_images_of_an_evaluation(rank, mine):
    batches = streamed.StreamedEvalBatches(stream(10, 20, 30, 40, 50), CONFIG, SPEC, rank, 2)
    assert [reds(batch.images) for batch in batches] == mine


def test_the_last_batch_of_an_evaluation_may_hold_bad_images_alone():
    first, last = streamed.StreamedEvalBatches(stream(10, 20, None), CONFIG, SPEC, 0, 1)
    assert (len(first.images), first.bad) == (2, [])
    assert len(last.images) == 0 and [record.name for record in last.bad] == ["image 2 of worker 1"]


@pytest.mark.parametrize("number, count", [(0, 2), (1, 2), (2, 1)])
def test_a_limit_is_shared_by_the_workers(worker, number, count):
    worker.id = number
    batches = streamed.StreamedEvalBatches(stream(*range(9), limit=5), CONFIG, SPEC, 0, 1)
    assert sum(len(batch.images) for batch in batches) == count


def test_an_epoch_starts_at_its_beginning_with_workers_of_its_own(monkeypatch):
    events = []

    def data_loader(batches, config, workers, seed):
        events.append(("open", workers, batches.epoch, batches.rollbacks))
        return Loader()

    class Loader(list):
        def close(self):
            events.append("close")

    monkeypatch.setattr(streamed, "data_loader", data_loader)
    train = stream(1, 2)
    train.reader.set_epoch = lambda epoch: events.append(("reader", epoch))
    epochs = streamed.StreamedEpochs(train, TrainConfig(workers=0), SPEC, 0)
    epochs.start(3, 0, 1)
    epochs.start(4, 0, 2)
    epochs.close()
    # at least one worker: only workers know their number
    assert events == [("reader", 3), ("open", 1, 3, 1), "close", ("reader", 4), ("open", 1, 4, 2), "close"]
    with pytest.raises(ValueError, match="cannot start at step 2 of an epoch"):
        epochs.start(5, 2, 0)


def test_webdataset_streams(tmp_path):
    pytest.importorskip("webdataset")
    for shard in range(3):
        members = {}
        for i in range(shard * 10, shard * 10 + 10):
            members |= {f"{i:03}.png": png((i * 8, 0, 0)), f"{i:03}.cls": str(i % 4).encode()}
        write_tar(tmp_path / f"set-{shard}.tar", members)
    names = "set-{0..2}.tar|30"
    settings = config(
        dataset="wds/",
        data=str(tmp_path),
        train_split=names,
        val_split=names,
        classes="4",
        batch_size=8,
        micro_batch=4,
        workers=2,
    )
    train, validation = open_splits(settings)
    assert not train.indexed and len(train) == 30 and train.class_names == ["0", "1", "2", "3"]
    loader = TrainLoader(train, settings, SPEC)
    first, again = flat(loader, 1), flat(TrainLoader(open_splits(settings)[0], settings, SPEC), 1)
    assert len(first[1]) == 24 and torch.equal(first[0], again[0]) and not torch.equal(flat(loader, 2)[0], first[0])
    with pytest.raises(ValueError, match="only at its beginning"):
        next(loader.epoch(1, first_step=2))
    reds = []
    for rank in range(2):
        for batch in EvalLoader(validation, settings, SPEC, rank, 2):
            assert (batch.images[:, 0, 0, 0] // 8 % 4).tolist() == batch.targets.tolist()
            reds += (batch.images[:, 0, 0, 0] // 8).tolist()
    assert sorted(reds) == list(range(30))
    with pytest.raises(ValueError, match="--classes"):
        open_splits(config(dataset="wds/", data=str(tmp_path), train_split=names))
    narrow = TrainLoader(open_splits(replace(settings, classes="2"))[0], settings, SPEC)
    with pytest.raises(ValueError, match="label 2 in data with 2 classes"):
        next(narrow.epoch(0))
    narrow.close()

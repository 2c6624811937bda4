"""Images are classified in batches, and read a little ahead."""

import os
import threading
from concurrent.futures import Future

import pytest
from saved_models import save_model, write_image

from hgrn_vision.data.images import open_image
from hgrn_vision.inference.classify import classify
from hgrn_vision.inference.pretrained import load_model


@pytest.fixture
def loaded(tmp_path):
    save_model(tmp_path / "model")
    return load_model(str(tmp_path / "model"))


@pytest.fixture
def images(tmp_path):
    return [str(write_image(tmp_path / "images" / f"{i}.png", i)) for i in range(5)]


def test_only_a_few_batches_are_read_ahead(loaded, images):
    drawn = []

    def endless():
        while True:
            drawn.append(images[len(drawn) % 5])
            yield drawn[-1]

    answers = classify(loaded, endless(), open_image, batch_size=4)
    for count in range(1, 30):
        assert next(answers).item == drawn[count - 1]
        # one batch is answered while the next is decoded
        assert len(drawn) == 4 * ((count - 1) // 4) + 8
    answers.close()


def test_images_that_are_no_longer_wanted_are_not_read(loaded, images, monkeypatch):
    """Of the batch that is decoded ahead, only images that a thread has started on are finished."""
    read, cancelled, started, released = [], [], threading.Event(), threading.Event()
    cancel = Future.cancel

    def reading(path):
        read.append(path)
        if len(read) == 5:
            started.set()
            released.wait(900)
        return open_image(path)

    def cancelling(future):
        cancelled.append(cancel(future))
        if len(cancelled) == 4:
            released.set()

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(Future, "cancel", cancelling)
    answers = classify(loaded, images * 4, reading, batch_size=4)
    next(answers)
    assert started.wait(900)
    answers.close()
    assert cancelled == [False, True, True, True] and len(read) == 5

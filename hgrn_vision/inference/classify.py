"""Classifying many images in batches and in order: threads decode ahead, and memory use does not grow."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image

from ..data.images import BadImage
from .pretrained import LoadedModel

Item = TypeVar("Item")


class Answer(NamedTuple, Generic[Item]):
    """The result for one input: a probability for each class, or the reason why there are none."""

    item: Item
    probabilities: np.ndarray | None
    reason: str = ""
    extra: Any = None  # what `look` made of the image


def classify(
    loaded: LoadedModel,
    items: Iterable[Item],
    read: Callable[[Item], Image.Image],
    batch_size: int = 32,
    look: Callable[[Image.Image], Any] | None = None,
) -> Iterator[Answer]:
    """One answer per item, in the order of the items.

    Args:
        loaded: the model.
        items: what to classify; read at most two batches ahead.
        read: returns an item's RGB image, or raises BadImage.
        batch_size: images per forward pass.
        look: called with every decoded image; its result is the answer's `extra`.
    """

    def decode(item: Item) -> tuple[torch.Tensor, Any]:
        image = read(item)
        return loaded.prepare(image), look(image) if look else None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        pending: deque[tuple[Item, Future]] = deque()
        source = iter(items)
        try:
            while True:
                # one batch is decoded while the model runs on the other
                for item in itertools.islice(source, 2 * batch_size - len(pending)):
                    pending.append((item, pool.submit(decode, item)))
                if not pending:
                    return
                batch = [pending.popleft() for _ in range(min(batch_size, len(pending)))]
                yield from _answer(loaded, batch)
        finally:
            for _, future in pending:
                future.cancel()


def _answer(loaded: LoadedModel, batch: list[tuple[Any, Future]]) -> Iterator[Answer]:
    images, answers = [], []
    for item, future in batch:
        try:
            tensor, extra = future.result()
        except BadImage as error:
            answers.append(Answer(item, None, str(error)))
            continue
        images.append(tensor)
        answers.append(Answer(item, None, extra=extra))
    rows = iter(_probabilities(loaded, images)) if images else iter(())
    for answer in answers:
        yield answer if answer.reason else answer._replace(probabilities=next(rows))


@torch.inference_mode()
def _probabilities(loaded: LoadedModel, images: list[torch.Tensor]) -> np.ndarray:
    logits = loaded.model(torch.stack(images).to(loaded.device))  # (B, classes)
    return logits.float().softmax(dim=-1).cpu().numpy()

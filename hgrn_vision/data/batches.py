"""The batches that loader processes return."""

from typing import NamedTuple

import torch

from .spec import DataSpec


class BadRecord(NamedTuple):
    """An image that could not be read; the index is -1 if images have no numbers."""

    split: str
    index: int
    name: str
    reason: str


class MicroBatch(NamedTuple):
    """Micro-batch `number` of an optimizer step: images (B, C, H, W) uint8, targets (B,) int64.

    If each image has a fixed number of views, `views` (B,) holds the numbers of those shown.
    """

    number: int
    images: torch.Tensor
    targets: torch.Tensor
    bad: list[BadRecord]
    views: torch.Tensor | None = None


class EvalBatch(NamedTuple):
    """Images (B, C, H, W) uint8, targets (B,) and indices (B,) int64; unreadable images are left out, so B may be 0."""

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    bad: list[BadRecord]


def eval_batch(
    images: list[torch.Tensor], targets: list[int], indices: list[int], bad: list[BadRecord], spec: DataSpec
) -> EvalBatch:
    """The images that could be read, as tensors of the right shape even when there are none."""
    empty = torch.empty(0, *spec.input_size, dtype=torch.uint8)
    return EvalBatch(
        torch.stack(images) if images else empty,
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(indices, dtype=torch.int64),
        bad,
    )

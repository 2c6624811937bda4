"""What loader processes return."""

import torch
from image_data import SPEC, config, tree, write

from hgrn_vision.data.loaders import EvalLoader
from hgrn_vision.data.splits import open_validation


def test_a_batch_may_be_wholly_unreadable(tmp_path):
    root = tree(tmp_path, a=2, b=2)
    for name in ("a/0.png", "a/1.png"):
        write(tmp_path / name, b"broken")
    settings = config(data=root, batch_size=2, micro_batch=2)
    batches = list(EvalLoader(open_validation(settings, ["a", "b"]), settings, SPEC))
    assert [tuple(batch.images.shape) for batch in batches] == [(0, 3, 8, 8), (2, 3, 8, 8)]
    assert batches[0].targets.dtype == batches[0].indices.dtype == torch.int64

"""From logits to an evaluation."""

from collections import Counter

import numpy as np
import pytest
import timm
import torch
from training import SMALL

from hgrn_vision.data.batches import BadRecord, EvalBatch
from hgrn_vision.inference.metrics import measure
from hgrn_vision.train.evaluation import WrongSize, collect, find_checkpoint, fit_size


def evaluation_of(logits, true):
    """The evaluation of these logits, which come in two batches, the last images first."""
    logits, true, indices = torch.as_tensor(logits), torch.as_tensor(true), torch.arange(len(true))
    answers = iter([logits[7:], logits[:7]])
    batches = [EvalBatch(torch.empty(0), true[part], indices[part], []) for part in (slice(7, None), slice(7))]
    return collect(lambda images: next(answers), batches)


def test_top_5_among_many_classes():
    rng = np.random.RandomState(0)
    # rounded, so that many classes tie: the lowest class number wins
    logits, true = rng.normal(size=(300, 20)).round(), rng.randint(0, 20, 300)
    evaluation = evaluation_of(logits, true)
    metrics = measure(evaluation, 20)
    order = [sorted(range(20), key=lambda i, row=row: -row[i]) for row in logits]
    assert evaluation.ranks.tolist() == [classes.index(label) for classes, label in zip(order, true, strict=True)]
    assert evaluation.predictions.tolist() == [classes[0] for classes in order]
    hits = [label in classes[:5] for classes, label in zip(order, true, strict=True)]
    assert metrics.top5 == pytest.approx(100 * np.mean(hits)) and 0 < metrics.top1 < metrics.top5 < 100
    assert metrics.confusion.counts.sum() == 300 and metrics.confusion.counts.shape == (20, 20)
    wanted = Counter(zip(true, evaluation.predictions, strict=True))
    assert {cell: n for cell, n in np.ndenumerate(metrics.confusion.counts) if n} == wanted


def test_logits_that_are_not_numbers_are_in_no_top_5():
    logits = np.zeros((10, 20))
    logits[:, 3:] = np.nan
    evaluation = evaluation_of(logits, np.full(10, 19))
    assert evaluation.ranks.tolist() == [20] * 10 and evaluation.top5 == 0


def test_images_come_in_the_order_of_the_split_and_the_worst_mistakes_first():
    logits = np.zeros((10, 3))
    true = np.arange(10) % 3
    logits[np.arange(10), true] = np.arange(10)
    # slightly wrong, and badly wrong
    logits[4], logits[8] = (5, 0, 0), (50, 0, 0)
    evaluation = evaluation_of(logits, true)
    assert evaluation.indices.tolist() == list(range(10)) and evaluation.targets.tolist() == true.tolist()
    assert evaluation.worst(5).tolist() == [8, 4] and evaluation.worst(1).tolist() == [8]
    assert (evaluation.top1, evaluation.top5, evaluation.images) == (80.0, 100.0, 10)
    assert evaluation.confidence[8] == pytest.approx(1) and evaluation.confidence[0] == pytest.approx(1 / 3)
    want = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(true)).item()
    assert evaluation.loss == pytest.approx(want)


def test_nothing_to_evaluate_is_an_error():
    bad = [BadRecord("validation", 1, "b.png", "empty file"), BadRecord("validation", 0, "a.png", "not an image")]
    batch = EvalBatch(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), bad)
    with pytest.raises(ValueError, match="none of the 2 validation images could be read; the first error: not an im"):
        collect(pytest.fail, [batch])


def test_the_best_checkpoint_of_a_run_or_the_one_that_there_is(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="run is neither a checkpoint file nor a run folder with one"):
        find_checkpoint(tmp_path / "run")
    for name in ("previous", "last", "best"):
        (folder / f"{name}.safetensors").touch()
        assert find_checkpoint(tmp_path / "run") == folder / f"{name}.safetensors"
    assert find_checkpoint(folder / "last.safetensors") == folder / "last.safetensors"


def test_other_sizes_resample_position_embeddings_and_mixers_have_none():
    deit = timm.create_model("deit_tiny_patch16_224", img_size=8, patch_size=2, embed_dim=24, depth=1, num_classes=3)
    weights = {name: tensor.clone() for name, tensor in deit.state_dict().items()}
    fit_size(deit, 16)
    assert deit.pos_embed.shape[1] == 1 + 64 and deit(torch.zeros(1, 3, 16, 16)).shape == (1, 3)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in deit.state_dict().items() if n != "pos_embed")
    hgrn = timm.create_model("hgrn_deit_tiny", img_size=8, **SMALL)
    fit_size(hgrn, 11)
    assert torch.isfinite(hgrn(torch.zeros(1, 3, 11, 11))).all()
    mixer = timm.create_model("gmlp_ti16_224", img_size=32)
    with pytest.raises(WrongSize, match="cannot take images of 48 pixels"):
        fit_size(mixer, 48)

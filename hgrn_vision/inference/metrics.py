"""How good the answers of a model are: accuracy, figures of each class, confusions, calibration."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..data.splits import Split
from .classify import Answer

BINS = 15  # of the calibration error, of equal width in confidence


@dataclass(frozen=True)
class Results:
    """What the model said of each readable picture, and why the others could not be read."""

    index: np.ndarray  # (n,) numbers in the split
    true: np.ndarray  # (n,) classes
    predicted: np.ndarray  # (n,) classes
    confidence: np.ndarray  # (n,) probability of the predicted class
    rank: np.ndarray  # (n,) classes that the model found likelier than the true one
    bad: list[tuple[int, str]]  # number in the split, reason


def collect(answers: Iterable[Answer], split: Split) -> Results:
    """The answers to a split, without their probabilities."""
    rows, bad = [], []
    for index, probabilities, reason, _ in answers:
        if probabilities is None:
            bad.append((index, reason))
            continue
        true, predicted = int(split.labels[index]), int(probabilities.argmax())
        # of equal probabilities the first class comes first, as in predict
        rank = (probabilities > probabilities[true]).sum() + (probabilities[:true] == probabilities[true]).sum()
        rows.append((index, true, predicted, probabilities[predicted], rank))
    index, true, predicted, confidence, rank = zip(*rows, strict=True) if rows else [()] * 5
    return Results(
        np.array(index, dtype=np.int64),
        np.array(true, dtype=np.int64),
        np.array(predicted, dtype=np.int64),
        np.array(confidence, dtype=np.float64),
        np.array(rank, dtype=np.int64),
        bad,
    )


@dataclass(frozen=True)
class Metrics:
    """Figures of an evaluation; those of a class are NaN where there is nothing to divide by."""

    images: int
    top1: float
    top5: float
    calibration_error: float
    precision: np.ndarray  # (C,)
    recall: np.ndarray  # (C,)
    f1: np.ndarray  # (C,)
    support: np.ndarray  # (C,) pictures of the class
    present: np.ndarray  # classes that are true or predicted at least once
    confusion: np.ndarray  # (present, present), rows true, columns predicted

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that have pictures."""
        return float(self.f1[self.support > 0].mean())

    @property
    def macro_recall(self) -> float:
        """Mean recall of the classes that have pictures, also called balanced accuracy."""
        return float(self.recall[self.support > 0].mean())


def measure(results: Results, classes: int) -> Metrics:
    """Everything that is reported, from each picture's answer."""
    true, predicted = results.true, results.predicted
    hit = true == predicted
    support, called = np.bincount(true, minlength=classes), np.bincount(predicted, minlength=classes)
    right = np.bincount(true[hit], minlength=classes)
    # only classes that occur: a full matrix of ten thousand classes would be 800 MB
    present = np.union1d(true, predicted)
    confusion = np.zeros((len(present), len(present)), dtype=np.int32)
    np.add.at(confusion, (np.searchsorted(present, true), np.searchsorted(present, predicted)), 1)
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = right / called, right / support, 2 * right / (support + called)
    return Metrics(
        images=len(true),
        top1=float(hit.mean()),
        top5=float((results.rank < 5).mean()),
        calibration_error=calibration_error(results.confidence, hit),
        precision=precision,
        recall=recall,
        f1=f1,
        support=support,
        present=present,
        confusion=confusion,
    )


def calibration_error(confidence: np.ndarray, hit: np.ndarray) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over bins of confidence."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - hit, minlength=BINS)
    return float(np.abs(gaps).sum() / len(hit))

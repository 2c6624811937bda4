"""The quality of a model's answers: accuracy, per-class figures, confusions, calibration."""

from dataclasses import dataclass

import numpy as np

from ..train.evaluation import Confusion, Evaluation

BINS = 15  # for the calibration error, of equal width in confidence


@dataclass(frozen=True)
class Metrics:
    """Figures of an evaluation, in percent; a per-class figure is NaN where it would divide by zero."""

    images: int
    top1: float
    top5: float
    calibration_error: float
    precision: np.ndarray  # (C,)
    recall: np.ndarray  # (C,)
    f1: np.ndarray  # (C,)
    support: np.ndarray  # (C,) number of images in the class
    confusion: Confusion

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that have images."""
        return float(self.f1[self.support > 0].mean())

    @property
    def macro_recall(self) -> float:
        """Mean recall of the classes that have images, also called balanced accuracy."""
        return float(self.recall[self.support > 0].mean())


def measure(evaluation: Evaluation, classes: int) -> Metrics:
    """All figures of an evaluation, for a model with `classes` classes."""
    true, predicted = evaluation.targets, evaluation.predictions
    hit = true == predicted
    support, called = np.bincount(true, minlength=classes), np.bincount(predicted, minlength=classes)
    right = 100 * np.bincount(true[hit], minlength=classes)
    with np.errstate(invalid="ignore"):
        precision, recall, f1 = right / called, right / support, 2 * right / (support + called)
    return Metrics(
        images=evaluation.images,
        top1=evaluation.top1,
        top5=evaluation.top5,
        calibration_error=calibration_error(evaluation.confidence, hit),
        precision=precision,
        recall=recall,
        f1=f1,
        support=support,
        confusion=evaluation.confusion(),
    )


def calibration_error(confidence: np.ndarray, hit: np.ndarray) -> float:
    """Expected calibration error in percent: |confidence - accuracy| of each confidence bin, weighted by its images."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - hit, minlength=BINS)
    return float(100 * np.abs(gaps).sum() / len(hit))

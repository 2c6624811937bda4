"""Figures of an evaluation."""

import numpy as np
import pytest

from hgrn_vision.inference.metrics import calibration_error, measure
from hgrn_vision.train.evaluation import Evaluation


def test_ten_thousand_classes_need_no_full_matrix():
    rng = np.random.RandomState(0)
    true, predicted = rng.randint(0, 10000, 50), rng.randint(0, 10000, 50)
    ones = np.ones(50)
    metrics = measure(Evaluation(np.arange(50), true, predicted, ones, ones, ones, []), 10000)
    assert metrics.confusion.counts.shape == (len({*true, *predicted}),) * 2
    assert metrics.confusion.classes.tolist() == sorted({*true, *predicted})
    assert metrics.support.sum() == 50


def test_calibration_error():
    # ten answers of confidence 0.81 of which six are right, ten of 0.3 of which three are
    confidence = np.array([0.81] * 10 + [0.3] * 10)
    hit = np.array([True] * 6 + [False] * 4 + [True] * 3 + [False] * 7)
    assert calibration_error(confidence, hit) == pytest.approx((21 + 0) / 2)
    # 0.999 and 1.0 share the last of the bins, errors inside a bin cancel
    assert calibration_error(np.array([1.0, 0.999]), np.array([True, True])) == pytest.approx(0.05)

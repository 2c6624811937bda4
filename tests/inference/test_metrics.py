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


def test_figures_of_each_class_by_hand():
    true, predicted = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 1])
    # two of three right, then one of two, then none; class 3 has no images and is never an answer
    confidence = np.array([0.9, 0.9, 0.9, 0.5, 0.5, 0.5])
    metrics = measure(Evaluation(np.arange(6), true, predicted, confidence, np.ones(6), np.zeros(6), []), 4)
    assert (metrics.images, metrics.top1, metrics.top5) == (6, 50.0, 100.0)
    assert metrics.support.tolist() == [3, 2, 1, 0]
    np.testing.assert_allclose(metrics.recall, [200 / 3, 50, 0, np.nan])
    np.testing.assert_allclose(metrics.precision, [100, 100 / 3, 0, np.nan])
    np.testing.assert_allclose(metrics.f1, [80, 40, 0, np.nan])
    assert metrics.macro_recall == pytest.approx((200 / 3 + 50) / 3) and metrics.macro_f1 == pytest.approx(40)
    # 0.9 in 2.7 of which 2 are right, 0.5 in 1.5 of which 1 is
    assert metrics.calibration_error == pytest.approx(100 * (0.7 + 0.5) / 6)


def test_calibration_error():
    # ten answers of confidence 0.81 of which six are right, ten of 0.3 of which three are
    confidence = np.array([0.81] * 10 + [0.3] * 10)
    hit = np.array([True] * 6 + [False] * 4 + [True] * 3 + [False] * 7)
    assert calibration_error(confidence, hit) == pytest.approx((21 + 0) / 2)
    # 0.999 and 1.0 share the last of the bins, errors inside a bin cancel
    assert calibration_error(np.array([1.0, 0.999]), np.array([True, True])) == pytest.approx(0.05)
    # 15 bins of equal width: one more right answer between 0.6 and 2/3 does not make up for one too few above 2/3
    assert calibration_error(np.array([0.65, 0.67]), np.array([True, False])) == pytest.approx(100 * (0.35 + 0.67) / 2)
    assert calibration_error(np.array([0.61, 0.66]), np.array([True, False])) == pytest.approx(100 * 0.27 / 2)

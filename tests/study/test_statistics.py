"""Statistics of a few seeds, against values computed by hand."""

import math

import pytest

from hgrn_vision.study.statistics import paired_difference, spread


def test_mean_and_standard_deviation():
    # deviations -2, 0, 2: their squares add up to 8, divided by 2 is 4
    assert (spread([90.0, 92.0, 94.0]).mean, spread([90.0, 92.0, 94.0]).std) == (92.0, 2.0)
    one = spread([90.0])
    assert (one.mean, one.count) == (90.0, 1) and math.isnan(one.std)
    assert math.isnan(spread([]).mean) and spread([math.nan, 3.0]).count == 1


@pytest.mark.parametrize(
    "values, low, high, verdict",
    [
        # differences 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.30265, half = 4.30265 / sqrt(3) = 2.48414
        ({0: 51.0, 1: 62.0, 2: 73.0}, 2 - 2.48414, 2 + 2.48414, "not told apart"),
        # differences 4, 5, 6
        ({0: 54.0, 1: 65.0, 2: 76.0}, 5 - 2.48414, 5 + 2.48414, "above"),
        # differences -6, -5, -4
        ({0: 44.0, 1: 55.0, 2: 66.0}, -5 - 2.48414, -5 + 2.48414, "below"),
        # two pairs, differences 1 and 3: mean 2, s = sqrt(2), t(0.975, 1) = 12.7062, half = 12.7062
        ({0: 51.0, 2: 73.0}, 2 - 12.7062, 2 + 12.7062, "not told apart"),
    ],
)
def test_paired_difference(values, low, high, verdict):
    found = paired_difference(values, {0: 50.0, 1: 60.0, 2: 70.0, 9: 1.0})
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert (found.verdict, found.pairs) == (verdict, len(values))


def test_pairing_takes_the_seeds_own_luck_out():
    """Values vary by 20 points between seeds, differences by 0.2: t(0.975, 3) = 3.18245, s = 0.129099, n = 4."""
    reference = {0: 50.0, 1: 60.0, 2: 70.0, 3: 55.0}
    better = {0: 51.0, 1: 61.1, 2: 71.2, 3: 55.9}
    found = paired_difference(better, reference)
    assert (found.mean, found.high - found.mean) == pytest.approx((1.05, 3.18245 * 0.129099 / 2), abs=1e-4)
    assert found.verdict == "above"


def test_one_seed_tells_nothing_apart():
    found = paired_difference({0: 90.0}, {0: 10.0})
    assert (found.mean, found.low, found.high, found.verdict) == (80.0, -math.inf, math.inf, "not told apart")
    assert paired_difference({0: 90.0}, {1: 10.0}).pairs == 0
    # a run without a finished epoch has no top-1
    assert paired_difference({0: 90.0, 1: math.nan}, {0: 80.0, 1: 70.0}).pairs == 1

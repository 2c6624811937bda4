"""What a few seeds can tell: mean and standard deviation, and how far apart two arms are, seed by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divided by n - 1); NaN if there are too few values."""

    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with a 95% interval from Student's t, which is infinite for fewer than two pairs."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> str:
        """Where the interval lies: above zero, below it, or around it."""
        if self.low > 0:
            return "above"
        return "below" if self.high < 0 else "not told apart"


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of the finite values."""
    values = [value for value in values if math.isfinite(value)]
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Spread(mean, math.sqrt(squares / (count - 1)) if count > 1 else math.nan, count)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """`values` minus `reference`, both by seed, over the seeds that have a finite value in both.

    Runs with the same seed share the order of the images and their augmentation, so their difference tends to vary less
    than the values do. The interval is mean +- t(0.975, n - 1) s / sqrt(n) and assumes a normal distribution.
    """
    pairs = [values[seed] - reference[seed] for seed in values if seed in reference]
    found = spread(pairs)
    if found.count < 2:
        return Difference(found.mean, -math.inf, math.inf, found.count)
    half = float(stats.t.ppf(0.975, found.count - 1)) * found.std / math.sqrt(found.count)
    return Difference(found.mean, found.mean - half, found.mean + half, found.count)

"""The statistics of forget gates that the report of a run and `explain` show."""

import numpy as np
import torch

# cells in which gate values are counted: the median is exact to 2e-6, in memory that does not grow with the images
FINE_CELLS = 2**18
BINS = 64  # of the histograms that are drawn


class GateStatistics:
    """Mean, median and histogram of every layer's forget gate, over any number of images."""

    def __init__(self) -> None:
        self.counts = self.sums = None

    def update(self, gates: list[torch.Tensor]) -> None:
        """Count the values of model.forget_gates."""
        counts = [torch.histc(gate.float().cpu(), FINE_CELLS, 0, 1).numpy() for gate in gates]
        sums = [gate.double().sum().item() for gate in gates]
        self.counts = np.add(0 if self.counts is None else self.counts, np.array(counts, dtype=np.int64))
        self.sums = np.add(0 if self.sums is None else self.sums, sums)

    def mean(self) -> np.ndarray:
        """(layers,)"""
        return self.sums / self.counts.sum(axis=1)

    def median(self) -> np.ndarray:
        """(layers,)"""
        up_to = self.counts.cumsum(axis=1)
        total = up_to[:, -1:]
        # the median of an even number of values lies between the two in the middle
        middle = [(up_to <= rank).sum(axis=1) for rank in ((total - 1) // 2, total // 2)]
        return (np.mean(middle, axis=0) + 0.5) / FINE_CELLS

    def histogram(self, bins: int = BINS) -> np.ndarray:
        """Share of the values in each of `bins` equal parts of 0..1, (layers, bins); bins divides FINE_CELLS."""
        coarse = self.counts.reshape(len(self.counts), bins, -1).sum(axis=2)
        # NaN weights give gates that are in no cell
        return coarse / np.maximum(coarse.sum(axis=1, keepdims=True), 1)

"""What the charts of a report draw, read from the charts themselves."""

import numpy as np
import pytest

from hgrn_vision.report import GateLayer, charts

HISTORY = [
    {"epoch": 1, "lr": 0.1, "train_loss": 3, "val_loss": 2.5, "val_top1": 20, "val_top5": 60, "images_per_second": 50},
    # as csv.DictReader returns a missing evaluation
    {"epoch": "2", "lr": "0.2", "train_loss": "2", "val_loss": "", "val_top1": "", "images_per_second": ""},
    {"epoch": 3, "lr": 0.05, "train_loss": 1, "val_loss": 2, "val_top1": 40, "val_top5": 80, "images_per_second": 70},
    {"epoch": 4, "lr": 0, "train_loss": 1, "val_loss": 2, "val_top1": 30, "val_top5": 90, "images_per_second": 60},
]  # fmt: skip
CHARTS = {
    charts.loss_chart: {
        "training (augmented)": ([1, 2, 3, 4], [3, 2, 1, 1]),
        "validation": ([1, 3, 4], [2.5, 2, 2]),
    },
    charts.accuracy_chart: {
        "top-5": ([1, 3, 4], [60, 80, 90]),
        "top-1": ([1, 3, 4], [20, 40, 30]),
        "best, 40.00% at epoch 3": ([3], [40]),
    },
    charts.rate_chart: {"learning rate": ([1, 2, 3, 4], [0.1, 0.2, 0.05, 0])},
    charts.speed_chart: {"images per second": ([1, 3, 4], [50, 70, 60])},
}


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.__name__)
def test_every_curve_is_drawn(chart):
    (axes,) = chart(HISTORY).axes
    curves = {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}
    assert curves == CHARTS[chart]
    assert (axes.get_legend() is None) == (len(curves) == 1)


@pytest.mark.parametrize("chart, top", [(charts.rate_chart, 0.2), (charts.speed_chart, 70)])
def test_rates_start_at_zero(chart, top):
    (axes,) = chart(HISTORY).axes
    low, high = axes.get_ylim()
    assert low == 0 and top < high < 1.2 * top


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.__name__)
def test_one_epoch_is_seen_and_none_is_no_error(chart):
    (axes,) = chart(HISTORY[:1]).axes
    assert axes.lines and all(line.get_marker() == "o" for line in axes.lines)
    (axes,) = chart([]).axes
    assert not axes.lines and axes.get_legend() is None


@pytest.mark.parametrize("layers, rows, columns", [(1, 1, 1), (4, 1, 4), (6, 2, 4), (12, 3, 4)])
def test_gates_of_every_layer(layers, rows, columns):
    given = [GateLayer(0.5, 0.1 * i, np.array([i, 1, 2]) / (i + 3)) for i in range(layers)]
    figure = charts.gate_chart(given)
    assert figure.axes[0].get_gridspec().get_geometry() == (rows, columns)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [f"layer {i + 1}" for i in range(layers)]
    for i, axes in enumerate(shown):
        (stairs,) = axes.patches
        np.testing.assert_allclose(stairs.get_data().values, np.array([i, 1, 2]) / (i + 3))
        np.testing.assert_allclose(stairs.get_data().edges, [0, 1 / 3, 2 / 3, 1])
        (median,) = axes.lines
        assert median.get_xdata()[0] == pytest.approx(0.1 * i)

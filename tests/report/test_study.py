"""The page of a study and its charts."""

import math
import re

import numpy as np
import pytest

from hgrn_vision.report.study import StudyArm, StudyData, render, write_study
from hgrn_vision.report.study_charts import band, curve_chart, dot_chart, look, size_chart


def arm(
    name="a",
    last=(50.0, 52.0),
    difference=None,
    curves=(((1.0, 40.0), (2.0, 50.0)), ((1.0, 44.0), (2.0, 52.0))),
    **more,
):
    return StudyArm(name, f"{name}: it is so.", ["1", "2"], last, difference, curves, 64, **more)


def test_a_band_reaches_from_the_lowest_seed_to_the_highest():
    x, mean, low, high = band([[(1, 40.0), (2, 50.0), (3, 60.0)], [(1, 44.0), (2, math.nan)]])
    assert x.tolist() == [1, 2, 3]
    assert (mean.tolist(), low.tolist(), high.tolist()) == ([42, 50, 60], [40, 50, 60], [44, 50, 60])
    assert [len(column) for column in band([])] == [0, 0, 0, 0]


def test_the_curves_are_means_in_bands():
    (axes,) = curve_chart([arm(), arm("b", curves=[])], "steps").axes
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[1, 42], [2, 51]]
    (shade,) = axes.collections
    assert {tuple(point) for point in shade.get_paths()[0].vertices} >= {(1, 40), (1, 44), (2, 50), (2, 52)}


def test_a_curve_of_one_point_is_seen():
    curves = (((5.0, 40.0),), ((5.0, 44.0),))
    (axes,) = curve_chart([arm(), arm("short", curves=curves)], "steps").axes
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]


def test_the_first_arm_is_on_top_and_names_are_no_formulas():
    arms = [arm("$x$ " + 40 * "y"), arm("$z$", sizes=[(32, 1.0, 0.5)])]
    dots, differences = (figure := dot_chart(arms)).axes
    bottom, top = dots.get_ylim()
    assert top < 0 < 1 < bottom
    labels = dots.get_yticklabels()
    assert [label.get_text() for label in labels] == ["$x$ " + 27 * "y" + "…", "$z$"]
    assert differences.get_title() == "Difference from $x$ " + 19 * "y" + "…, points"
    for chart in (curve_chart(arms, "steps"), size_chart(arms)):
        (legend,) = chart.legends
        labels += legend.get_texts()
    assert len(labels) == 5 and not figure.legends
    assert not any(text.get_parse_math() for text in [*labels, differences.title])


def test_each_seed_is_a_dot_and_each_difference_has_its_interval():
    dots, differences = dot_chart([arm(), arm("b", (48.0, math.nan), (-3.0, -5.0, -1.0))]).axes
    first, mean, second, _ = dots.lines
    assert first.get_xydata().tolist() == [[50, 0], [52, 0]] and mean.get_xdata()[0] == 51
    assert second.get_xydata().tolist() == [[48, 1]]
    points = [line.get_xdata() for line in differences.lines]
    assert [-3.0] in [list(x) for x in points] and [-5.0, -1.0] in [list(x) for x in points]
    # one seed has no interval
    lone = dot_chart([arm(), arm("b", (48.0,), (-3.0, -math.inf, math.inf))]).axes[1]
    assert all(np.isfinite(line.get_xdata()).all() for line in lone.lines)


def test_models_that_cannot_take_a_size_have_no_point_there():
    sizes = [(64, 50.0, 1.0), (128, math.nan, math.nan), (256, 40.0, math.nan)]
    (axes,) = size_chart([arm(sizes=sizes)]).axes
    assert axes.lines[0].get_xydata().tolist() == [[64, 50], [256, 40]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "128", "256"]
    assert axes.lines[-1].get_xdata()[0] == 64
    # one seed has no deviation, and the band no width there
    (shade,) = axes.collections
    corners = {tuple(point) for point in shade.get_paths()[0].vertices}
    assert corners >= {(64, 49), (64, 51), (256, 40)} and all(map(math.isfinite, np.array([*corners]).flat))


def test_the_page_holds_all_it_shows(tmp_path):
    arms = [arm("<b>$x$"), arm("b", difference=(1.0, -2.0, 4.0), sizes=[(32, 1.0, 0.5)])]
    run = {"arm": "b", "seed": "0", "status": "finished", "last": "1", "best": "2", "report": "b/seed0/report.html"}
    data = StudyData(
        "title", "the command", arms, ["one", "two"], "steps", ["a note"], [run], {"lr": 1}, {"torch": "2"}
    )
    write_study(tmp_path / "report.html", data)
    page = (tmp_path / "report.html").read_text()
    assert page == render(data)
    assert "&lt;b&gt;$x$: it is so." in page and "<b>$x$" not in page
    assert page.count("<svg") == 3 and "Other image sizes" in page and 'href="b/seed0/report.html"' in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page) and "<script" not in page
    write_study(tmp_path / "odd.html", StudyData("caf\udce9", "c", arms[:1], [], "steps"))
    assert "caf?" in (tmp_path / "odd.html").read_text(encoding="utf-8")
    without = render(StudyData("t", "c", arms[:1], [], "steps"))
    assert "Other image sizes" not in without and without.count("<svg") == 2


@pytest.mark.parametrize("number", range(25))
def test_many_arms_look_different(number):
    assert all(look(number) != look(other) for other in range(number))

"""The Pathfinder task: the drawings are as its description says."""

import hashlib
import itertools
import math

import numpy as np
import pytest

from hgrn_vision.data.pathfinder import draw, label, pathfinder_image, render

DRAWINGS = [draw(3, number, 32) for number in range(40)]


def curves(drawing):
    return np.split(drawing.dashes, np.cumsum((6, 6, 2, 2)))


def test_dashes_gaps_and_turns_are_as_described():
    for drawing in DRAWINGS:
        assert [len(curve) for curve in curves(drawing)] == [6, 6, 2, 2, 2]
        for curve in curves(drawing):
            steps = np.diff(curve.reshape(-1, 2), axis=0)
            lengths = np.linalg.norm(steps, axis=1)
            assert lengths[::2] == pytest.approx(2.5, abs=0.05) and lengths[1::2] == pytest.approx(1.5, abs=0.05)
            angles = np.degrees(np.arctan2(*steps.T[::-1]))
            turns = (np.diff(angles[::2]) + 180) % 360 - 180
            assert np.abs(turns).max() < 43  # positions are rounded


def test_curves_stay_inside_and_clear_of_each_other():
    for drawing in DRAWINGS:
        assert drawing.dashes.min() >= 2.5 and drawing.dashes.max() <= 29.5
        lines = [np.concatenate([np.linspace(a, b, 9) for a, b in curve]) for curve in curves(drawing)]
        for one, other in itertools.combinations(lines, 2):
            assert np.linalg.norm(one[:, None] - other[None], axis=-1).min() > 3.4


def test_the_class_is_whether_the_dots_end_one_curve():
    for number, drawing in enumerate(DRAWINGS):
        ends = [{tuple(curve[0, 0]), tuple(curve[-1, 1])} for curve in curves(drawing)[:2]]
        dots = [tuple(dot) for dot in drawing.dots]
        on = [next(i for i, pair in enumerate(ends) if dot in pair) for dot in dots]
        assert dots[0] != dots[1] and label(number) == ("connected" if on == [0, 0] else "separate")
        assert on in ([0, 0], [0, 1])
    assert {label(number) for number in (0, 2)} == {"connected"} and label(1) == label(3) == "separate"


def test_the_distance_of_the_dots_tells_nothing():
    for drawing in DRAWINGS:
        first = curves(drawing)[0]
        assert abs(math.dist(*drawing.dots) - math.dist(first[0, 0], first[-1, 1])) <= 0.5


def test_pixels_are_white_on_the_lines_and_black_elsewhere():
    drawing = DRAWINGS[0]
    for size in (32, 96):
        pixels, scale = render(drawing, size), size / 32
        assert pixels.shape == (size, size) and pixels.dtype == np.uint8
        for x, y in (drawing.dots * scale).astype(int):
            assert pixels[y, x] > 200
        for x, y in (drawing.dashes.mean(1) * scale).astype(int):
            assert pixels[y, x] > 50
        assert (pixels == 0).mean() > 0.6
    # the ink grows with the square of the size
    small, large = (render(drawing, size).astype(float).mean() for size in (32, 128))
    assert small == pytest.approx(large, rel=0.15)


def test_the_same_seed_draws_the_same_image_on_every_machine():
    pixels = [np.asarray(pathfinder_image(0, number, 32)) for number in range(4)]
    assert hashlib.sha256(np.stack(pixels).tobytes()).hexdigest().startswith("1f413e0baff02101")
    assert not np.array_equal(pixels[0], np.asarray(pathfinder_image(1, 0, 32)))
    assert not np.array_equal(pixels[0], pixels[2])

"""The Pathfinder task: are the two dots joined by a dashed curve, or do they lie on different ones?

After Linsley et al., Learning long-range spatial dependencies with horizontal gated recurrent units (2018, arXiv
1805.08315), in the version of the Long Range Arena (arXiv 2011.04006): 32x32 grey pixels, read one by one.

An image depends only on the seed, its side and its number: `randomness.fold` turns the three into the seed of a NumPy
RandomState. A side is 32 units long, whatever the number of pixels; every draw is uniform, and positions are rounded to
1/64 of a unit.

1. A curve is a row of dashes, each a straight line of 2.5 units. Each dash turns by up to 40 degrees to either side of
   the one before it, and begins 1.5 units, in its own direction, from that one's end. The first dash begins anywhere
   and points anywhere. A curve is drawn again if it comes within 2.5 units of the border or within 3.5 units of an
   earlier curve; distances are taken between points at most half a unit apart along both curves, gaps included. The
   draws for a curve are x and y of its beginning, a turn for each dash, and then its first direction, which replaces
   the first turn.
2. The first two curves have six dashes each. Of the four pairs of an end of the first and an end of the second, the
   candidate is the one whose distance is closest to that between the two ends of the first. If the two distances differ
   by more than half a unit, both curves are drawn again. Three distractors of two dashes each follow. After 100 failed
   attempts at a curve, the whole image starts over.
3. Images with an even number are connected: the dots are the two ends of the first curve. In the others they are the
   candidate pair, one end of each curve. So the curves of both classes are drawn alike, and the distance between the
   dots gives nothing away: the dashes have to be followed.
4. White on black: dashes are 1 unit wide, dots have a radius of 1.3 units. The brightness of a pixel is 255 times
   min(1, max(0, r + 1/2 - d)), rounded, where d is the distance in pixels from its centre to a line or dot, and r is
   half the line's width or the dot's radius in pixels; the brightest line or dot counts.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from ..randomness import fold, numpy_generator

CLASSES = ("separate", "connected")
SIDE = 32  # units along a side
MIN_PIXELS = 16  # along a side: with fewer, dashes and gaps blur into the same grey
DASH, GAP, TURN = 2.5, 1.5, math.radians(40)
MARGIN, CLEARANCE, SAME_DISTANCE = 2.5, 3.5, 0.5
LENGTHS = (6, 6, 2, 2, 2)  # dashes of each curve; the first two may carry the dots
ATTEMPTS = 100
WIDTH, RADIUS = 1.0, 1.3
# positions are rounded to 1/64 of a unit: the last digit of a sine differs between machines, and images must not
GRID = 64


class Drawing(NamedTuple):
    """What an image shows, in units."""

    dashes: np.ndarray  # (n, 2, 2) beginning and end of each, as x and y
    dots: np.ndarray  # (2, 2)


def label(number: int) -> str:
    """The class of the image with this number."""
    return CLASSES[number % 2 == 0]


def pathfinder_image(seed: int, number: int, size: int) -> Image.Image:
    """One image of the task, 8-bit grey."""
    return Image.fromarray(render(draw(seed, number, size), size))


def draw(seed: int, number: int, size: int) -> Drawing:
    """Where the dashes and dots of an image are."""
    generator = numpy_generator(fold(seed, size, number))
    curves = None
    while curves is None:
        curves = _draw_curves(generator)
    dots = _ends(curves[0]) if label(number) == "connected" else _separate_ends(*curves[:2])
    return Drawing(np.concatenate(curves), np.array(dots))


def _draw_curves(generator: np.random.RandomState) -> list[np.ndarray] | None:
    """The curves of an image; None if one of them could not be placed."""
    curves: list[np.ndarray] = []
    for length in LENGTHS:
        taken = np.concatenate([_points(curve) for curve in curves]) if curves else np.empty((0, 2))
        attempts = (_draw_curve(generator, length) for _ in range(ATTEMPTS))
        curve = next((curve for curve in attempts if _fits(curve, taken)), None)
        if curve is None:
            return None
        curves.append(curve)
        if len(curves) == 2 and abs(math.dist(*_separate_ends(*curves)) - math.dist(*_ends(curves[0]))) > SAME_DISTANCE:
            return None
    return curves


def _draw_curve(generator: np.random.RandomState, dashes: int) -> np.ndarray:
    """A curve as (dashes, 2, 2), which may leave the image."""
    start, angles = generator.uniform(0, SIDE, 2), generator.uniform(-TURN, TURN, dashes)
    angles[0] = generator.uniform(0, 2 * math.pi)
    angles = angles.cumsum()
    steps = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None] * [[GAP], [DASH]]  # (dashes, gap and dash, 2)
    steps[0, 0] = start
    corners = steps.reshape(-1, 2).cumsum(0)
    return np.rint(corners * GRID).reshape(dashes, 2, 2) / GRID


def _fits(curve: np.ndarray, taken: np.ndarray) -> bool:
    """Whether a curve is inside the image and clear of the points of earlier ones."""
    # first, because most curves leave the image and distances take most of the time
    if curve.min() < MARGIN or curve.max() > SIDE - MARGIN:
        return False
    distances = np.square(_points(curve)[:, None] - taken).sum(-1)
    return bool((distances >= CLEARANCE**2).all())


def _points(curve: np.ndarray) -> np.ndarray:
    """Points along a curve, gaps included, at most half a unit apart."""
    corners = curve.reshape(-1, 2)
    shares = np.linspace(0, 1, 6)[:, None, None]
    return (corners[:-1] * (1 - shares) + corners[1:] * shares).reshape(-1, 2)


def _ends(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return curve[0, 0], curve[-1, 1]


def _separate_ends(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One end of each curve: the pair whose distance is closest to that between the ends of the first."""
    wanted = math.dist(*_ends(first))
    pairs = itertools.product(_ends(first), _ends(second))
    return min(pairs, key=lambda pair: abs(math.dist(*pair) - wanted))


def render(drawing: Drawing, size: int) -> np.ndarray:
    """The pixels of a drawing, (size, size) uint8."""
    scale = size / SIDE
    centres = np.arange(size) + 0.5
    pixels = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 1, 2)  # x, y of each pixel, row by row
    begin, end = (drawing.dashes * scale).swapaxes(0, 1)
    along = end - begin
    share = ((pixels - begin) * along).sum(-1) / np.square(along).sum(-1)
    nearest = begin + share.clip(0, 1)[..., None] * along
    lines = WIDTH * scale / 2 - np.sqrt(np.square(pixels - nearest).sum(-1).min(-1))
    dots = RADIUS * scale - np.sqrt(np.square(pixels - drawing.dots * scale).sum(-1).min(-1))
    ink = (np.maximum(lines, dots) + 0.5).clip(0, 1)
    return np.floor(ink * 255 + 0.5).astype(np.uint8).reshape(size, size)

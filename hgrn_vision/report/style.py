"""How charts look: colours, matplotlib settings, and conversion to SVG and PNG.

Charts in pages are SVG and take the text colour of the page around them, so that they suit light and dark pages.
Others are PNG.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Iterator

import matplotlib
from matplotlib.figure import Figure

PAGE_INK = "#010203"  # placeholder, shown in the page's own colour
PAPER_INK, DIM = "#1f2328", "#8b949e"
BLUE, ORANGE, GREEN, VIOLET = "#3b82f6", "#ea7a30", "#17a673", "#8b5cf6"

_COMMON = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
PAGE = {
    **_COMMON,
    "svg.fonttype": "none",
    "text.color": PAGE_INK,
    "axes.labelcolor": PAGE_INK,
    "axes.edgecolor": PAGE_INK,
    "axes.titlesize": 9.0,
    "grid.color": PAGE_INK,
    "grid.alpha": 0.12,
    "xtick.color": PAGE_INK,
    "ytick.color": PAGE_INK,
    "lines.linewidth": 1.8,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}
PAPER = {
    **_COMMON,
    "text.color": PAPER_INK,
    "axes.labelcolor": PAPER_INK,
    "axes.edgecolor": DIM,
    "axes.titlesize": 9.5,
    "grid.color": DIM,
    "grid.alpha": 0.25,
    "xtick.color": PAPER_INK,
    "ytick.color": PAPER_INK,
}


@contextlib.contextmanager
def page_style() -> Iterator[None]:
    """Matplotlib settings for figures in pages; the caller's own are restored afterwards."""
    with matplotlib.rc_context(PAGE):
        yield


@contextlib.contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib settings for figures that become PNG files; the caller's own are restored afterwards."""
    with matplotlib.rc_context(PAPER):
        yield


def to_svg(figure: Figure, name: str) -> str:
    """A figure as an <svg> element for a page; `name` must be unique there."""
    buffer = io.StringIO()
    # with a fixed salt, the ids of elements are not random
    with matplotlib.rc_context({**PAGE, "svg.hashsalt": name}), warnings.catch_warnings():
        # text stays text in SVG, and browsers have fonts for letters that matplotlib's font lacks
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(PAGE_INK, "currentColor")
    # charts share element ids, which must be unique on a page
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{name.replace(' ', '-')}-", svg)
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{name}">', svg, count=1)


def to_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    with paper_style():
        figure.savefig(buffer, format="png", dpi=150, facecolor="white", bbox_inches="tight")
    return buffer.getvalue()

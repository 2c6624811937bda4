"""A page of images with their predicted labels: one self-contained file, written as the answers arrive."""

import io
from collections.abc import Sequence
from types import TracebackType
from typing import IO

from PIL import Image

from .html import data_address, template

SIDE = 176  # of a thumbnail, in pixels
MOST = 2000  # images on a page; browsers slow down beyond that

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --ink: #1f2328; --dim: #656d76; --card: #f6f8fa; --bar: #2a78d6; --bad: #c9352b }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #8d96a0; --card: #161b22; --bar: #4c9aff; --bad: #ff7b72 }
}
body { margin: 2rem auto; max-width: 78rem; padding: 0 1rem; font: 14px/1.45 system-ui, sans-serif; color: var(--ink) }
h1 { font-size: 1.3rem; overflow-wrap: anywhere }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem }
figure { margin: 0; padding: .75rem; border-radius: 8px; background: var(--card) }
figure div { height: {{ side }}px; display: grid; place-items: center; color: var(--bad) }
img { width: 100%; height: {{ side }}px; object-fit: contain }
p { margin: .3rem 0; color: var(--dim); overflow-wrap: anywhere }
ol { list-style: none; margin: .4rem 0 0; padding: 0 }
li { display: flex; justify-content: space-between; gap: .5rem; overflow-wrap: anywhere;
  background: linear-gradient(var(--bar), var(--bar)) no-repeat left bottom / var(--share) 2px }
li:first-child { font-weight: 600 }
</style>
<h1>{{ title }}</h1>
<main>
"""
_CARD = """<figure>
<div>{% if image %}<img src="{{ image }}" alt="{{ name }}">{% else %}{{ reason }}{% endif %}</div>
<p>{{ name }}</p>
<ol>{% for label, share in labels %}<li style="--share: {{ '%.1f%%' % (100 * share) }}">\
<span>{{ label }}</span><span>{{ '%.1f%%' % (100 * share) }}</span></li>{% endfor %}</ol>
</figure>
"""
_FOOT = """</main>
<p>{{ total }} images{% if bad %}, {{ bad }} of them unreadable{% endif %}\
{% if total > shown %}; the first {{ shown }} are shown{% endif %}.</p>
</html>
"""


def thumbnail(image: Image.Image) -> str:
    """A small version of the image as a data: URL, to be embedded in a page."""
    small = image.copy()
    small.thumbnail((2 * SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return data_address(buffer.getvalue(), "jpeg")


class Gallery:
    """Writes the page to `file`, and its end when the `with` block is left without an error."""

    def __init__(self, file: IO[str], title: str):
        self._card, self._foot = template(_CARD), template(_FOOT)
        self._file = file
        self.total = self.bad = 0
        file.write(template(_HEAD).render(title=title, side=SIDE))

    def add(self, name: str, image: str | None, labels: Sequence[tuple[str, float]], reason: str = "") -> None:
        """Add an image with its labels and their probabilities, or with the reason why it has none."""
        self.total += 1
        self.bad += image is None
        if self.total <= MOST:
            self._file.write(self._card.render(name=name, image=image, labels=labels, reason=reason))

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is None:
            shown = min(self.total, MOST)
            self._file.write(self._foot.render(total=self.total, bad=self.bad, shown=shown))

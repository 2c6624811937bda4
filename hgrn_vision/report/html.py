"""Self-contained pages, which need no network."""

import base64
import functools
from pathlib import Path

import jinja2


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["address"] = lambda png: data_address(png, "png")
    return environment


def render_page(template: str, **values: object) -> str:
    """The page of a template in this folder, as text."""
    return _environment().get_template(template).render(**values)


def template(text: str) -> jinja2.Template:
    """A template for a part of a page that is written piece by piece."""
    return _environment().from_string(text)


def data_address(image: bytes, kind: str) -> str:
    """The contents of an image file as a data: URL, to be embedded in a page."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"

"""Pages that hold all they show and need no network."""

import base64
from pathlib import Path

import jinja2


def render_page(template: str, **values: object) -> str:
    """The page of a template in this folder, as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["address"] = lambda png: data_address(png, "png")
    return environment.get_template(template).render(**values)


def data_address(picture: bytes, kind: str) -> str:
    """The contents of a picture file as an address that a page can carry in itself."""
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"

"""The page that runs an exported model in a browser: one HTML file that contains its style and scripts."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .html import render_page

SOURCES = Path(__file__).parent / "web"


@dataclass(frozen=True)
class RuntimeFile:
    """A file of onnxruntime-web."""

    name: str
    bytes: int
    integrity: str  # as browsers check it: sha384-...


@dataclass(frozen=True)
class Runtime:
    """Where the page loads onnxruntime-web from."""

    version: str
    address: str  # of the folder with its files, ending in a slash
    module: RuntimeFile
    wasm: RuntimeFile


@dataclass(frozen=True)
class Site:
    """What the page shows, and the files that it loads."""

    title: str
    classes: Sequence[str]
    card: Sequence[tuple[str, str]]  # rows about the model: what, text
    spec: dict[str, Any]  # size, resize, mean, std, interpolation
    model: str
    model_bytes: int
    labels: str
    runtime: Runtime


def describe_file(path: Path) -> RuntimeFile:
    """A file's name, size, and the hash by which browsers check it."""
    data = path.read_bytes()
    return RuntimeFile(path.name, len(data), _hash(data, "sha384"))


def render_site(site: Site, version: str) -> str:
    """The text of index.html; `version` is that of this package."""
    # model.js comes last, because it starts loading the model at once
    style, script = _source("page.css"), _source("page.js", "sources.js", "model.js")
    return render_page(
        "web/page.html",
        site=site,
        settings=_settings(site),
        version=version,
        policy=_policy(site.runtime, style, script),
        style=style,
        script=script,
        worker=_source("pixels.js", "worker.js"),
    )


def _source(*names: str) -> str:
    return "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in names)


def _settings(site: Site) -> dict[str, Any]:
    """What the page's script reads."""
    runtime = {
        key: {"what": "The runtime", "url": site.runtime.address + file.name, "bytes": file.bytes}
        | {"integrity": file.integrity}
        for key, file in (("module", site.runtime.module), ("wasm", site.runtime.wasm))
    }
    model = {"what": "The model", "url": site.model, "bytes": site.model_bytes}
    return {"spec": site.spec, "labels": site.labels, "model": model, **runtime}


def _policy(runtime: Runtime, style: str, script: str) -> str:
    """The content security policy: the page may only talk to its own host, and to the runtime's if that is another."""
    elsewhere = f" {runtime.address}" if "://" in runtime.address else ""
    rules = {
        "default-src": "'none'",
        "script-src": f"'{_hash(script.encode())}' 'wasm-unsafe-eval' blob:",
        "style-src": f"'{_hash(style.encode())}'",
        "connect-src": f"'self'{elsewhere}",
        "img-src": "blob: data:",
        "media-src": "blob: mediastream:",
        "worker-src": "blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(data: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}-{base64.b64encode(hashlib.new(algorithm, data).digest()).decode()}"

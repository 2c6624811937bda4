"""The folder of `export --format web`: a page that runs the model, in a layout that transformers.js can load too."""

import contextlib
import csv
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from ..files import write_text
from ..inference.pretrained import LoadedModel, packaged_models
from ..report.web import Runtime, RuntimeFile, Site, describe_file, render_site
from ..version import __version__

INPUT = "pixel_values"  # transformers.js's name for the input images
MODEL, SMALL_MODEL, LABELS, PAGE = "onnx/model.onnx", "onnx/model_quantized.onnx", "labels.json", "index.html"
PARTS = {PAGE, LABELS, "config.json", "preprocessor_config.json", "onnx", "runtime"}
MODULE, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
# the hashes are those of the files in the npm package of this version
RUNTIME = Runtime(
    "1.30.0",
    "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/",
    RuntimeFile(MODULE, 73054, "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG"),
    RuntimeFile(WASM, 14239897, "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM"),
)
# the filters that the page supports, with Pillow's numbers, which transformers.js uses
FILTERS = {"lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that is not empty; with --force, it may hold an earlier page, but nothing else."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file, expected a new or empty folder")
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the current folder, which cannot be replaced by a page; give another one")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    page = folder / PAGE
    ours = page.is_file() and 'name="generator" content="hgrn_vision' in page.read_text("utf-8", "replace")
    if not ours:
        raise ValueError(f"{folder} is not empty; give a new or empty folder")
    if not force:
        raise ValueError(f"{folder} already holds a page; give another folder, or replace it with --force")
    others = sorted({path.name for path in folder.iterdir()} - PARTS)
    if others:
        raise ValueError(f"{folder} holds more than a page ({', '.join(others[:3])}), which --force would delete")


def find_runtime(folder: str) -> Path:
    """The folder of onnxruntime-web's files inside its npm package."""
    for place in (Path(folder) / "dist", Path(folder)):
        if (place / MODULE).is_file() and (place / WASM).is_file():
            return place
    raise ValueError(
        f"{folder} is not the npm package onnxruntime-web: it lacks dist/{MODULE} or dist/{WASM}; "
        f"npm install onnxruntime-web@{RUNTIME.version} puts it into node_modules/onnxruntime-web"
    )


def check_model(loaded: LoadedModel) -> None:
    """Refuse a model whose images the page could not prepare as Python does."""
    channels, height, width = loaded.spec.input_size
    if channels != 3 or height != width:
        raise ValueError(
            f"--format web needs square colour images; {loaded.name} takes {channels} channels of {height} x {width} "
            "pixels (--img-size N makes them square)"
        )
    if loaded.spec.interpolation not in FILTERS or not 0 < loaded.spec.crop_pct <= 1:
        raise ValueError(
            f"--format web supports {', '.join(FILTERS)} resizing and a crop_pct of at most 1; {loaded.name} needs "
            f"{loaded.spec.interpolation} and {loaded.spec.crop_pct}"
        )


def write_site(
    folder: Path, loaded: LoadedModel, title: str, worst: float, runtime: str | None, small: bool = False
) -> None:
    """Write everything except the two models, which are already there.

    Args:
        folder: the folder with the models in its onnx/.
        loaded: the model in these files.
        title: heading of the page.
        worst: largest difference between the logits of the file and of the model.
        runtime: folder of the npm package onnxruntime-web, to copy from; None to load it from a CDN.
        small: make the page run the quantized model.
    """
    model = SMALL_MODEL if small else MODEL
    for name, content in (
        (LABELS, loaded.class_names),
        ("config.json", _config(loaded)),
        ("preprocessor_config.json", _preprocessor(loaded)),
    ):
        write_text(folder / name, json.dumps(content, indent=1, ensure_ascii=False) + "\n", "replace")
    site = Site(
        title=title,
        classes=loaded.class_names,
        card=_card(folder, loaded, worst, model),
        spec=_pixels(loaded),
        model=model,
        model_bytes=(folder / model).stat().st_size,
        labels=LABELS,
        runtime=_copy_runtime(folder, find_runtime(runtime)) if runtime else RUNTIME,
    )
    write_text(folder / PAGE, render_site(site, __version__), "replace")


def replace_folder(new: Path, folder: Path) -> None:
    """Move a finished folder to its final name; an earlier folder there is kept until then."""
    old = new.with_name(f"{new.name}.old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise


def _pixels(loaded: LoadedModel) -> dict[str, Any]:
    """How the page prepares an image."""
    spec = loaded.spec
    size = spec.input_size[-1]
    return {
        "size": size,
        "resize": math.floor(size / spec.crop_pct),
        "mean": list(spec.mean),
        "std": list(spec.std),
        "interpolation": spec.interpolation,
    }


def _preprocessor(loaded: LoadedModel) -> dict[str, Any]:
    """How transformers.js prepares an image: the same way, but resized by its own platform."""
    pixels = _pixels(loaded)
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": pixels["resize"]},
        "resample": FILTERS[pixels["interpolation"]],
        "do_center_crop": True,
        "crop_size": {"height": pixels["size"], "width": pixels["size"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": pixels["mean"],
        "image_std": pixels["std"],
    }


def _config(loaded: LoadedModel) -> dict[str, Any]:
    """config.json for transformers.js, which loads models by type: a ViT has one input and returns logits."""
    names = loaded.class_names
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": loaded.spec.input_size[-1],
        "num_channels": loaded.spec.input_size[0],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "hgrn_vision": {"architecture": loaded.model.pretrained_cfg.get("architecture"), "version": __version__},
    }


def _card(folder: Path, loaded: LoadedModel, worst: float, model: str) -> list[tuple[str, str]]:
    pixels = _pixels(loaded)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    sizes = {name: (folder / name).stat().st_size / 1e6 for name in (MODEL, SMALL_MODEL)}
    architecture = loaded.model.pretrained_cfg.get("architecture")
    packaged = packaged_models().get(loaded.name)
    rows = [
        ("Architecture", f"{architecture}, {parameters:,} parameters"),
        ("Weights", f"{packaged}, which come with hgrn_vision") if packaged else None,
        _accuracy(Path(loaded.name) / "log.csv"),
        (
            "Images",
            f"{pixels['size']} × {pixels['size']} pixels: the shorter side is resized to {pixels['resize']} "
            f"({pixels['interpolation']}), then the centre is cropped out",
        ),
        (
            "Files",
            f"{MODEL}, {sizes[MODEL]:.1f} MB: float32, logits within {worst:.1e} of PyTorch's. "
            f"{SMALL_MODEL}, {sizes[SMALL_MODEL]:.1f} MB: 8-bit weights. This page runs {model}.",
        ),
    ]
    return [row for row in rows if row]


def _accuracy(log: Path) -> tuple[str, str] | None:
    """The accuracy of a run's best epoch, from its log; None if there is no log."""
    if not log.is_file():
        return None
    with open(log, newline="", encoding="utf-8") as file:
        epochs = [row for row in csv.DictReader(file) if row.get("val_top1")]
    if not epochs:
        return None
    best = max(epochs, key=lambda row: float(row["val_top1"]))
    return "Accuracy", f"{float(best['val_top1']):.1f}% of the run's validation images (epoch {best['epoch']})"


def _copy_runtime(folder: Path, source: Path) -> Runtime:
    """Copy onnxruntime-web into the folder."""
    target = folder / "runtime"
    target.mkdir()
    for name in (MODULE, WASM):
        shutil.copyfile(source / name, target / name)
    return Runtime(runtime_version(source), "runtime/", describe_file(target / MODULE), describe_file(target / WASM))


def runtime_version(source: Path) -> str:
    """The version in the package.json of onnxruntime-web, beside its files or above them."""
    for place in (source, source.parent):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            package = json.loads((place / "package.json").read_text("utf-8"))
            if package["name"] == "onnxruntime-web":
                return package["version"]
    return "(unknown version)"

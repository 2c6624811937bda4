"""`hgrn-vision explain`: draw a model's forget gates, token mixing and evidence for its answers."""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from ..data.images import MAX_PIXELS, BadImage, open_image
from ..data.transforms import unnormalise
from ..inference.interpret import describe_scan, evidence, mixing_strength
from ..inference.pretrained import LoadedModel, load_model
from ..report.explanation import ExplainedImage, Explanation, render_explanation
from ..report.gates import GateStatistics
from ..report.interpret_figures import evidence_figure, gate_figure, mixing_figure
from ..report.style import to_png
from ._console import check_free, open_output, printable
from ._flags import MODEL_HELP, at_least_one, find_images

EXAMPLE = "hgrn-vision explain runs/flowers rose.jpg tulip.jpg --output explained"
ANSWERS = 5
SHOWN_LAYERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image, folder, or pattern such as 'a/*.png'")
    parser.add_argument(
        "--output",
        default="explanation",
        metavar="FOLDER",
        help="folder for index.html, PNGs and gates.csv (default: explanation)",
    )
    parser.add_argument(
        "--layers", type=at_least_one, nargs="+", metavar="N", help="layers to draw token mixing for, counted from 1"
    )
    parser.add_argument("--class", dest="label", metavar="NAME", help="show evidence for this class (default: top-1)")
    parser.add_argument(
        "--steps", type=at_least_one, default=64, metavar="N", help="gradients averaged for each map (default 64)"
    )
    parser.add_argument(
        "--img-size", type=at_least_one, metavar="N", help="side of the model's input (default: as trained)"
    )
    parser.add_argument("--max-pixels", type=at_least_one, default=MAX_PIXELS, metavar="N", help="refuse larger images")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--force", action="store_true", help="overwrite files in the folder")


def run(args: argparse.Namespace) -> int:
    """Explain; nothing is written unless every image can be read."""
    paths = list(find_images(args.images))
    names = _file_names(paths)
    folder = Path(args.output)
    _check_folder(folder, names, args.force)
    loaded = load_model(args.model, args.device, args.img_size)
    layers = _chosen_layers(loaded, args.layers)
    target = _class_number(loaded, args.label)
    inputs = [_read(loaded, path, args.max_pixels) for path in paths]

    statistics, images = GateStatistics(), []
    # without a terminal there is no bar: the line printed for each image shows the progress
    with tqdm(inputs, unit="image", disable=None) as progress:
        for path, name, tensor in zip(paths, names, progress, strict=True):
            image = explain_image(loaded, tensor, printable(path), layers, target, args.steps, statistics)
            _write(folder / f"{name}-evidence.png", image.evidence)
            _write(folder / f"{name}-mixing.png", image.mixing)
            images.append(image)
            tqdm.write(f"{image.name}: {image.answers[0][0]} ({image.answers[0][1]:.1%})", file=sys.stdout)

    _write_summary(folder, loaded, statistics, images)
    print(f"wrote {folder / 'index.html'} and {2 * len(images) + 1} images")
    return 0


def explain_image(
    loaded: LoadedModel,
    tensor: torch.Tensor,
    name: str,
    layers: Sequence[int],
    target: int | None,
    steps: int,
    statistics: GateStatistics,
) -> ExplainedImage:
    """Analyse and draw one image (C, H, W); its gate values are added to the statistics."""
    model, tensor = loaded.model, tensor.to(loaded.device)
    with torch.no_grad():
        probabilities = model(tensor[None])[0].float().softmax(dim=-1).cpu().numpy()
        gates, strengths = [], {}
        for number, recurrence in enumerate(model.recurrences(tensor[None]), start=1):
            gates.append(recurrence.decay)
            if number in layers:
                strengths[number] = mixing_strength(recurrence)
    statistics.update(gates)
    best = probabilities.argsort()[::-1][:ANSWERS]
    target = int(best[0]) if target is None else target
    label = printable(loaded.class_names[target])
    found = evidence(model, tensor, target, steps)
    scan = describe_scan(recurrence)
    return ExplainedImage(
        name=name,
        answers=[(printable(loaded.class_names[i]), float(probabilities[i])) for i in best],
        label=label,
        gain=found.gain,
        total=float(found.cells.sum()),
        evidence=to_png(evidence_figure(_pixels(loaded, tensor), found.cells, model.patch_embed.patch_size, label)),
        mixing=to_png(mixing_figure(strengths, found.cells.shape, int(found.cells.argmax()), scan)),
    )


class GateRow(NamedTuple):
    """One layer of the gate table."""

    layer: int
    mean: float
    median: float
    bound_mean: float
    bound_min: float
    bound_max: float


def gate_table(statistics: GateStatistics, bounds: np.ndarray) -> list[GateRow]:
    """The paper's table of forget gates, with the lower bounds (layers, D)."""
    columns = (statistics.mean(), statistics.median(), bounds.mean(axis=1), bounds.min(axis=1), bounds.max(axis=1))
    return [GateRow(i + 1, *map(float, row)) for i, row in enumerate(zip(*columns, strict=True))]


def _write_summary(folder: Path, loaded: LoadedModel, statistics: GateStatistics, images: list[ExplainedImage]) -> None:
    depth = len(loaded.model.blocks)
    bounds = loaded.model.layer_bounds()[:depth].detach().cpu().numpy()
    table = gate_table(statistics, bounds)
    print(f"{'layer':>5} {'mean':>7} {'median':>7} {'bound':>7}")
    for row in table:
        print(f"{row.layer:>5} {row.mean:>7.3f} {row.median:>7.3f} {row.bound_mean:>7.3f}")
    with open_output(folder / "gates.csv") as file:
        writer = csv.writer(file)
        writer.writerow(GateRow._fields)
        writer.writerows(table)
    chart = to_png(gate_figure(statistics.mean(), statistics.median(), statistics.histogram(), bounds))
    _write(folder / "gates.png", chart)
    page = render_explanation(Explanation(f"What {printable(loaded.name)} does", table, chart, images))
    _write(folder / "index.html", page.encode())


def _write(path: Path, content: bytes) -> None:
    with open_output(path, binary=True) as file:
        file.write(content)


def _file_names(paths: list[str]) -> list[str]:
    """A short base name for each image's files, made unique by a number."""
    digits = len(str(len(paths)))
    stems = ["".join(c if c.isalnum() or c in "-_." else "_" for c in Path(path).stem[:40]) for path in paths]
    return [f"{i:0{digits}d}-{stem}" for i, stem in enumerate(stems, start=1)]


def _check_folder(folder: Path, names: list[str], force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder")
    files = ["index.html", "gates.csv", "gates.png"]
    files += [f"{name}-{kind}.png" for name in names for kind in ("evidence", "mixing")]
    check_free([folder / file for file in files], force)


def _chosen_layers(loaded: LoadedModel, asked: list[int] | None) -> list[int]:
    if not hasattr(loaded.model, "recurrences"):
        raise ValueError(f"{loaded.name} is not an HGRN model: it has no forget gates to explain")
    depth = len(loaded.model.blocks)
    if asked is None:
        return sorted({round(layer) for layer in np.linspace(1, depth, min(SHOWN_LAYERS, depth))})
    if max(asked) > depth:
        raise ValueError(f"--layers {max(asked)}: {loaded.name} has {depth} layers")
    return asked


def _class_number(loaded: LoadedModel, label: str | None) -> int | None:
    if label is None:
        return None
    if label not in loaded.class_names:
        known = ", ".join(loaded.class_names[:10]) + (", ..." if len(loaded.class_names) > 10 else "")
        raise ValueError(f"--class {label!r} is not a class of {loaded.name}; its classes are {known}")
    return loaded.class_names.index(label)


def _read(loaded: LoadedModel, path: str, max_pixels: int) -> torch.Tensor:
    try:
        return loaded.prepare(open_image(path, max_pixels))
    except BadImage as error:
        raise ValueError(f"{printable(os.fspath(path))}: {error}") from error


def _pixels(loaded: LoadedModel, tensor: torch.Tensor) -> np.ndarray:
    """The model's input converted back to pixels, (H, W, 3)."""
    pixels = (unnormalise(tensor, loaded.spec) * 255).round().clamp(0, 255).byte()
    return pixels.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy()

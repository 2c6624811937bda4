"""`hgrn-vision export`: write a model in standard operators, for use without this package: a file or a web page."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..data.splits import Split
from ..export import int8, run_exported, site
from ..export.onnx_file import MOST_PATCHES, NEEDS, check_installed, describe, sides, takes_any_size, trace, write_onnx
from ..files import check_writable, whole_file
from ..inference.pretrained import LoadedModel, load_model
from ..randomness import numpy_generator
from ._console import check_free
from ._flags import MODEL_HELP, at_least_one

EXAMPLE = "hgrn-vision export runs/flowers --format onnx --output flowers.onnx"
TOLERANCE = 1e-4
METADATA = "metadata.json"


class Format(NamedTuple):
    """An export format."""

    suffix: str
    needs: tuple[str, ...]
    write: Callable[[LoadedModel, Path], None]


def write_pt2(loaded: LoadedModel, path: Path) -> None:
    """Write a program for torch.export.load; the metadata are an extra file in it."""
    program = trace(loaded)
    for node in program.graph.nodes:
        # stack traces contain paths of this machine
        node.meta.pop("stack_trace", None)
    torch.export.save(program, path, extra_files={METADATA: json.dumps(describe(loaded))})


def write_torchscript(loaded: LoadedModel, path: Path) -> None:
    """Write a module for torch.jit.load and libtorch; the metadata are an extra file in it."""
    about = {**describe(loaded), "any_size": loaded.model.dynamic_img_size}
    torch.jit.script(loaded.model).save(str(path), _extra_files={METADATA: json.dumps(about)})


def write_web(loaded: LoadedModel, folder: Path) -> None:
    """Write the model of a page; the rest follows once the model has been checked."""
    (folder / site.MODEL).parent.mkdir(parents=True)
    write_onnx(loaded, folder / site.MODEL, site.INPUT)


FORMATS = {
    "onnx": Format(".onnx", NEEDS, write_onnx),
    "pt2": Format(".pt2", (), write_pt2),
    "torchscript": Format(".torchscript", (), write_torchscript),
    "web": Format("-web", NEEDS, write_web),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--format", choices=FORMATS, default="onnx", help="file format, or web: a page (default onnx)")
    parser.add_argument(
        "--output", metavar="PATH", help="output file, or folder of the page (default: the model's name)"
    )
    parser.add_argument("--img-size", type=at_least_one, metavar="N", help="side of the images (default: as trained)")
    parser.add_argument(
        "--fixed-size",
        action="store_true",
        help="take only images of this size, in batches of any size; makes the graph smaller",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file, or an earlier page")
    parser.add_argument("--int8", action="store_true", help="onnx, web: quantize to 8 bits, and show what that changes")
    parser.add_argument("--calibrate", metavar="FOLDER", help="with --int8: fix activation ranges on these images")
    parser.add_argument(
        "--check",
        metavar="FOLDER",
        help="with --int8: images to compare answers on, and accuracy if sub-folders are the model's classes "
        "(default: those of --calibrate, else the packaged digits)",
    )
    parser.add_argument(
        "--runtime",
        metavar="FOLDER",
        help="web: copy onnxruntime-web from its npm package, for offline use (default: load it from a CDN)",
    )


def run(args: argparse.Namespace) -> int:
    """Export and check; the file is kept only if it gives the model's answers."""
    kind, web = FORMATS[args.format], args.format == "web"
    check_installed(f"--format {args.format}", kind.needs)
    _check_int8(args)
    path = Path(args.output or default_name(args.model) + ("-int8" if args.int8 and not web else "") + kind.suffix)
    if args.format == "pt2" and path.suffix != kind.suffix:
        raise ValueError(f"PyTorch only loads pt2 files whose name ends in .pt2, got {path}")
    _check_output(path, args)
    loaded = load_model(args.model, "cpu", args.img_size, exportable=True)
    if not hasattr(loaded.model, "recurrences"):
        raise ValueError(f"{loaded.name} is not an HGRN model; timm has export scripts for its own")
    if args.fixed_size:
        _fix_size(loaded)
    # if the model refuses this size, its own error message appears here
    loaded.model(torch.zeros(1, *loaded.spec.input_size))
    if web:
        site.check_model(loaded)
    # report a folder without usable images now, not after the export
    images = int8.open_images(args.check or args.calibrate, loaded) if args.int8 else None
    calibration = int8.calibration_batches(args.calibrate, loaded) if args.calibrate else None
    path.parent.mkdir(parents=True, exist_ok=True)
    # in a temporary folder under the final name, since archives store the name under which they were created
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        print(f"exporting {loaded.name} to {path}; this may take a minute or two", flush=True)
        with warnings.catch_warnings():
            # deprecation notes from within PyTorch, and its advice to use torch.export instead of TorchScript
            warnings.simplefilter("ignore")
            kind.write(loaded, partial)
        # compare with the model as it is normally loaded, not with the exportable variant
        reference = load_model(args.model, "cpu", args.img_size)
        if args.fixed_size:
            _fix_size(reference)
        exact = partial / site.MODEL if web else partial
        worst = largest_difference(reference, "onnx" if web else args.format, exact)
        if not worst <= TOLERANCE:
            message = f"the exported file differs from the model by {worst:.1e}; nothing was written"
            print(f"hgrn-vision export: {message}", file=sys.stderr)
            return 1
        result = partial
        if web or args.int8:
            result = partial / site.SMALL_MODEL if web else partial.with_name(f"int8-{path.name}")
            int8.quantize(exact, result, calibration)
        if args.int8 and not _report_change(reference, exact, result, images, args):
            return 1
        if web:
            site.write_site(partial, loaded, default_name(args.model), worst, args.runtime, args.int8)
            site.replace_folder(partial, path)
        else:
            with whole_file(path) as temporary:
                os.replace(result, temporary)
    size = sum(file.stat().st_size for file in (path.rglob("*") if web else [path])) / 1e6
    before = " in float32" if args.int8 else ""
    print(f"wrote {path}, {size:.1f} MB; largest difference from the model{before} {worst:.1e}")
    if web:
        print(f"try it: python -m http.server -d {path}, then open http://localhost:8000 in a browser")
    return 0


def _fix_size(loaded: LoadedModel) -> None:
    loaded.model.set_input_size(loaded.spec.input_size[1:])
    loaded.model.dynamic_img_size = False


def _check_int8(args: argparse.Namespace) -> None:
    if args.int8 and args.format not in ("onnx", "web"):
        raise ValueError(f"--int8 works with --format onnx and web, not {args.format}")
    for flag in ("calibrate", "check"):
        if getattr(args, flag) and not args.int8:
            raise ValueError(f"--{flag} needs --int8")


def _report_change(loaded: LoadedModel, exact: Path, small: Path, images: Split, args: argparse.Namespace) -> bool:
    """Print what quantization changed; False if the file answers with NaN."""
    change = int8.compare(loaded, small, images)
    where = args.check or args.calibrate or "the packaged digits (no --check given)"
    how = f"fixed on {args.calibrate}" if args.calibrate else "measured in every call"
    size = small.stat().st_size / exact.stat().st_size
    print(f"  int8: {size:.2f} times the size of float32, activation ranges {how}")
    print(
        f"  {change.images} images from {where}: same top class for {change.agreement:.2f}%, "
        f"largest change of a probability {change.largest:.4f}"
    )
    if change.accuracy:
        print("  top-1 {:.2f}% in float32, {:.2f}% in int8".format(*change.accuracy))
    if not change.largest <= 1:
        print("hgrn-vision export: the int8 file answers with NaN; nothing was written", file=sys.stderr)
        return False
    return True


def _check_output(path: Path, args: argparse.Namespace) -> None:
    """Refuse, before any work is done, an output that could not be written at the end."""
    if args.format != "web":
        if args.runtime:
            raise ValueError("--runtime needs --format web")
        check_free([path], args.force)
        return
    site.check_folder(path, args.force)
    check_writable(path.parent)
    if args.runtime:
        site.find_runtime(args.runtime)


def default_name(model: str) -> str:
    """The last part of the model's path: the name of a run, of a weights file, of a model on the hub."""
    path = Path(model.rpartition(":")[2])
    name = (path.resolve() if path.exists() else path).with_suffix("" if path.is_file() else path.suffix).name
    return name or "model"


@torch.no_grad()
def largest_difference(loaded: LoadedModel, kind: str, path: Path) -> float:
    """The largest difference between the logits of a model and of its file, which runs without this package."""
    inputs = {" x ".join(map(str, images.shape)): images for images in _examples(loaded)}
    outputs = _run_elsewhere(kind, path, inputs)
    differences = []
    for shape, images in inputs.items():
        differences.append(np.abs(loaded.model(torch.from_numpy(images)).numpy() - outputs[shape]).max())
        print(f"  images {shape}: largest difference {differences[-1]:.1e}")
    # unlike Python's max, this one keeps NaN
    return float(np.max(differences))


def _run_elsewhere(kind: str, path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        exchange = [os.path.join(folder, name) for name in ("inputs.npz", "outputs.npz")]
        np.savez(exchange[0], **inputs)
        command = [sys.executable, "-W", "ignore", run_exported.__file__, kind, os.path.abspath(path), *exchange]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"the exported file does not run and was removed: {reason}")
        with np.load(exchange[1]) as arrays:
            return dict(arrays)


def _examples(loaded: LoadedModel) -> Iterator[np.ndarray]:
    """Random images (B, C, H, W) in batches of several sizes, and in other image sizes if the file takes them."""
    channels, *own = loaded.spec.input_size
    shapes = [(1, *own), (3, *own)]
    if takes_any_size(loaded):
        height, width = (patch * min(side // patch + 1, MOST_PATCHES) for side, patch in sides(loaded))
        shapes += [(2, height, width), (1, 2 * loaded.model.patch_embed.patch_size[0], width)]
    generator = numpy_generator(0)
    for count, *size in shapes:
        yield generator.standard_normal((count, channels, *size)).astype(np.float32)

"""Time and memory of segmentation by image size: U-Net and DPT with HGRN encoders, and DPT with a ViT encoder.

    python examples/segment_speed.py [--sizes 224 384 512 768 1024] [--chart docs/segment-speed.png]

One image at a time, inference and training (forward and backward), on all CPU cores; half an hour with the defaults.
--cpu-time uses one thread and counts its CPU time, for a machine that others use too.
The ViT is timm's vit_tiny_patch16_224 in smp.DPT. hgrn_deit_tiny_patch16_224 runs in smp.DPT too, so that these two
differ only in the encoder. The U-Net is that of segment.py.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import nn
from tqdm import tqdm

import hgrn_vision  # noqa: F401  registers the models
from hgrn_vision.cli import Parser
from hgrn_vision.commands.bench import best_times, inference_step, peak_memory
from hgrn_vision.files import check_writable, whole_file
from hgrn_vision.report.style import BLUE, GREEN, ORANGE, paper_style
from hgrn_vision.train.memory import keep_freed_memory

CLASSES = 21
DEVICE = torch.device("cpu")
TASKS = ("inference", "training")
U_NET, HGRN_DPT, VIT_DPT = "U-Net, hgrn_pyramid_tiny", "DPT, hgrn_deit_tiny_patch16_224", "DPT, vit_tiny_patch16_224"
STYLES = {U_NET: (BLUE, "o-"), HGRN_DPT: (GREEN, "^-"), VIT_DPT: (ORANGE, "s--")}


def build_models() -> dict[str, nn.Module]:
    try:
        import segmentation_models_pytorch as smp
    except ModuleNotFoundError:
        raise ImportError(
            "segmentation_models_pytorch is not installed; pip install 'hgrn_vision[dense]' brings it"
        ) from None
    options = dict(encoder_weights=None, classes=CLASSES)
    return {
        U_NET: smp.Unet("tu-hgrn_pyramid_tiny", **options),
        HGRN_DPT: smp.DPT("tu-hgrn_deit_tiny_patch16_224", decoder_readout="ignore", **options),
        VIT_DPT: smp.DPT("tu-vit_tiny_patch16_224", decoder_readout="ignore", dynamic_img_size=True, **options),
    }


def training_step(model: nn.Module, images: torch.Tensor) -> Callable[[], object]:
    """Forward and backward."""
    model.train()
    labels = torch.zeros(len(images), *images.shape[2:], dtype=torch.long)

    def step():
        F.cross_entropy(model(images), labels).backward()
        model.zero_grad()

    return step


def measure(models: dict[str, nn.Module], task: str, size: int, seconds: float, cpu_time: bool) -> list[dict[str, Any]]:
    """One row per model: the best of interleaved runs."""
    images = torch.randn(1, 3, size, size)
    make_step = training_step if task == "training" else inference_step
    steps = [make_step(model, images) for model in models.values()]
    memory = [peak_memory(step, DEVICE) / 2**20 for step in steps]
    times = best_times(steps, DEVICE, seconds, cpu_time)
    return [
        dict(task=task, size=size, model=name, ms=1000 * time, mb=mb)
        for name, time, mb in zip(models, times, memory, strict=True)
    ]


@paper_style()
def draw(rows: Sequence[dict[str, Any]], path: Path, time_label: str) -> None:
    """Draw time beside memory, one row per task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(8.8, 3.2 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for task, row_of_panels in zip(tasks, panels, strict=True):
        for axes, key, label in zip(row_of_panels, ("ms", "mb"), (time_label, "MB at the peak of a step"), strict=True):
            for name, (colour, style) in STYLES.items():
                mine = [row for row in rows if (row["task"], row["model"]) == (task, name)]
                axes.plot([row["size"] for row in mine], [row[key] for row in mine], style, color=colour, label=name)
            axes.set(title=task, xlabel="pixels per side", ylabel=label, xscale="log", yscale="log")
            sizes = sorted({row["size"] for row in rows})
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.grid(True)
    panels[0, 0].legend(fontsize=8)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def run(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="segment_speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 384, 512, 768, 1024], metavar="PIXELS")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="seconds per task and size, at least three runs (default: 6)"
    )
    parser.add_argument("--chart", type=Path, default=Path("docs/segment-speed.png"), metavar="PNG")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the CPU time that it takes")
    args = parser.parse_args(argv)
    # batch norm needs more than one position on the coarsest map
    if min(args.sizes) < 64 or any(size % 32 for size in args.sizes):
        raise ValueError(f"--sizes must be multiples of 32, at least 64, got {' '.join(map(str, args.sizes))}")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds must be positive and finite, got {args.seconds:g}")
    if not args.chart.parent.is_dir():
        raise ValueError(f"--chart: no such folder: {args.chart.parent}")
    if args.chart.is_dir():
        raise ValueError(f"--chart: {args.chart} is a folder, expected a file name")
    check_writable(args.chart.parent)
    keep_freed_memory()
    models = build_models()
    rows = []
    if args.cpu_time:
        torch.set_num_threads(1)
    threads, clock = torch.get_num_threads(), "CPU time, " if args.cpu_time else ""
    print(f"CPU threads: {threads}, one image, {clock}best of interleaved runs")
    print(f"{'task':<10}{'side':>6}{'ms':>10}{'MB':>8}  model")
    settings = [(task, size) for task in args.tasks for size in args.sizes]
    for task, size in tqdm(settings, disable=not sys.stderr.isatty(), leave=False):
        measured = measure(models, task, size, args.seconds, args.cpu_time)
        rows += measured
        for row in measured:
            tqdm.write(f"{task:<10}{size:>6}{row['ms']:>10.1f}{row['mb']:>8.0f}  {row['model']}", file=sys.stdout)
        sys.stdout.flush()
    draw(rows, args.chart, "ms of CPU time per image" if args.cpu_time else "ms per image")
    print(f"chart: {args.chart}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input gives one line and exit code 2."""
    try:
        run(argv)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"segment_speed.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("segment_speed.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

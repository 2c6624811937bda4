"""Compare fine-tuning a demo run with training from scratch, on the digits as PNG files: curves, and steps to 95%.

    python examples/finetune_digits.py FOLDER [--demo RUN] [flags of hgrn-vision finetune, for both]

The demo run has never seen the validation images. Both runs and curves.png are written to FOLDER; without --demo, a
demo run is trained there first. Takes a quarter of an hour on two cores.
"""

import argparse
import csv
from pathlib import Path

from matplotlib.figure import Figure

from hgrn_vision.cli import main

TARGET = 95.0
# validation every five steps, and no early stopping, so that the curves can be compared
STEPS = ["--epoch-steps", "5", "--epochs", "80", "--patience", "0"]


def run(*command: str) -> None:
    if main(command):
        raise SystemExit(f"failed: hgrn-vision {' '.join(command)}")


def curve(folder: Path) -> tuple[list[int], list[float]]:
    """Steps and top-1 on the validation images."""
    with open(folder / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [int(row["step"]) for row in rows], [float(row["val_top1"]) for row in rows]


def draw(curves: dict[str, tuple[list[int], list[float]]], path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel="top-1 on unseen digits (%)", ylim=(0, 100))
    for name, (steps, top1) in curves.items():
        axes.plot(steps, top1, label=name)
    axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demo", type=Path, metavar="RUN", help="a finished run of `hgrn-vision train`")
    args, flags = parser.parse_known_args()
    images, demo = args.folder / "images", args.demo or args.folder / "demo"
    if not args.demo:
        run("train", "--output", str(demo))
    if not images.exists():
        run("digits", str(images))
    curves = {}
    for name, start in (("from the demo run", ["--init", str(demo)]), ("from scratch", [])):
        output = args.folder / name.replace(" ", "-")
        run("finetune", str(images), "--output", str(output), *start, *STEPS, *flags)
        if not (output / "report.html").exists():
            raise SystemExit("stopped; the same command continues")
        curves[name] = curve(output)
    draw(curves, args.folder / "curves.png")
    print()
    for name, (steps, top1) in curves.items():
        reached = next((step for step, value in zip(steps, top1, strict=True) if value >= TARGET), None)
        print(f"{name:<18} {TARGET:g}% after {reached or f'over {steps[-1]}'} steps, best {max(top1):.2f}%")
    print(f"curves: {args.folder / 'curves.png'}")


if __name__ == "__main__":
    compare()

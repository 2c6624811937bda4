"""Train a U-Net with an hgrn_pyramid_tiny encoder on your images and masks, or on scenes made of the packaged digits.

    python examples/segment.py IMAGES MASKS [--weights MODEL.safetensors]
    python examples/segment.py

MASKS holds one file per image, with the same name except for the extension and the same size. Its grey values or
palette indices are the classes; if there are at least two others, 255 marks pixels without a label. Without folders,
the scenes show handwritten digits over clutter, and the mask is their ink: above 0.8 mean IoU after three minutes on
two cores.

The output folder gets result.png (images, masks and predictions side by side) and unet/, which
segmentation_models_pytorch.from_pretrained loads.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from tqdm import tqdm

import hgrn_vision  # noqa: F401  registers the models
from hgrn_vision.cli import Parser
from hgrn_vision.data.digits import digit_image
from hgrn_vision.data.images import BadImage, open_image
from hgrn_vision.files import check_writable, whole_file
from hgrn_vision.packaged import STARTER, check_packaged, weights_file
from hgrn_vision.randomness import fold, numpy_generator, seed_weights
from hgrn_vision.report.style import paper_style

UNLABELLED = 255
TINY = "hgrn_pyramid_tiny"
SCENE_CLASSES = 2  # background and digit
STRIDE = 32  # smp's U-Nets take sides that are multiples of this
SECONDS_BETWEEN_LINES = 10

Pair = tuple[np.ndarray, np.ndarray]  # image (H, W, 3), mask (H, W), both bytes


def draw_scene(rng: np.random.RandomState, choices: Sequence[int], side: int) -> Pair:
    """One or two digits over clutter; the mask is 1 where a digit has ink, 0 elsewhere."""
    coarse = rng.randint(0, 150, (3, 3, 3)).astype(np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(3, 9)):
        # thinner than ink, but of any colour
        style = dict(width=int(rng.randint(1, 1 + side // 32)))
        colour = tuple(int(n) for n in rng.randint(0, 256, 3))
        (left, right), (top, bottom) = np.sort(rng.randint(-side // 8, side + side // 8, (2, 2))).tolist()
        if rng.rand() < 0.5:
            draw.ellipse((left, top, right, bottom), outline=colour, **style)
        else:
            ends = (left, top, right, bottom) if rng.rand() < 0.5 else (left, bottom, right, top)
            draw.line(ends, fill=colour, **style)
    mask = Image.new("L", (side, side))
    for _ in range(rng.randint(1, 3)):
        index = int(choices[rng.randint(len(choices))])
        size = int(side * rng.uniform(0.45, 0.75))
        where = tuple(rng.randint(-size // 8, side - 7 * size // 8, 2).tolist())
        # enlarged 8x8 pixels are blurred: raise the contrast, so that the ink has edges
        ink = digit_image(index).resize((size, size), Image.Resampling.BICUBIC)
        ink = ink.point(lambda value: min(255, max(0, 3 * value - 255)))
        image.paste(tuple(rng.randint(170, 256, 3).tolist()), where, ink)
        mask.paste(1, where, ink.point(lambda value: 255 * (value > 127)))
    noise = rng.normal(0, 8, (side, side, 3))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8), np.array(mask)


def scenes(split: str, count: int, side: int, seed: int) -> list[Pair]:
    """The scenes of one split; no digit of a validation scene appears in training."""
    digits = range(1437) if split == "train" else range(1437, 1797)
    return [draw_scene(numpy_generator(fold(seed, split == "train", i)), digits, side) for i in range(count)]


def read_pairs(images: Path, masks: Path, side: int) -> tuple[list[Pair], int]:
    """Images with their masks, resized so that the shorter side has `side` pixels, and the number of classes."""
    files = [_by_name(folder) for folder in (images, masks)]
    for own, other, what in ((*files, "mask"), (*files[::-1], "image")):
        alone = sorted(own.keys() - other.keys())
        if alone:
            where = masks if what == "mask" else images
            raise ValueError(f"{len(alone)} of {len(own)} files have no {what} in {where}, for example {own[alone[0]]}")
    if len(files[0]) < 2:
        raise ValueError(f"{images} has one image; training and validation need at least one each")
    pairs = [_read_pair(files[0][name], files[1][name], side) for name in tqdm(sorted(files[0]), **_bar("reading"))]
    values = sorted({int(value) for _, mask in pairs for value in np.unique(mask)})
    if UNLABELLED in values and len(values) > 2:
        values.remove(UNLABELLED)
    if len(values) < 2:
        raise ValueError(f"all masks in {masks} have the value {values[0]} everywhere; expected at least two classes")
    table = np.full(256, UNLABELLED, np.uint8)
    table[values] = np.arange(len(values))
    return [(image, table[mask]) for image, mask in pairs], len(values)


def _by_name(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder}")
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise ValueError(f"{folder} has no files")
    named = {path.stem: path for path in files}
    if len(named) < len(files):
        twice = next(path for path in files if named[path.stem] != path)
        raise ValueError(f"{twice} and {named[twice.stem].name} differ only in their extension")
    return named


def _read_pair(image_path: Path, mask_path: Path, side: int) -> Pair:
    try:
        image = open_image(image_path)
    except BadImage as error:
        raise ValueError(f"{image_path}: {error}") from None
    mask = _read_mask(mask_path)
    if image.size != mask.size:
        sizes = ["x".join(map(str, file.size)) for file in (image, mask)]
        raise ValueError(f"{image_path} has {sizes[0]} pixels, its mask {mask_path} has {sizes[1]}")
    scale = side / min(image.size)
    size = tuple(max(side, round(length * scale)) for length in image.size)
    image, mask = image.resize(size, Image.Resampling.BICUBIC), mask.resize(size, Image.Resampling.NEAREST)
    return np.asarray(image), np.asarray(mask)


def _read_mask(path: Path) -> Image.Image:
    try:
        with Image.open(path) as mask:
            mask.load()
    except Image.DecompressionBombError:
        raise ValueError(f"{path}: more than {2 * Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path}: not a readable image ({type(error).__name__})") from None
    if mask.format == "JPEG":
        raise ValueError(f"{path}: JPEG changes the values of a mask; save masks as PNG")
    if mask.mode == "1":
        return mask.convert("L")
    if mask.mode in ("RGB", "RGBA"):
        red, green, blue = mask.convert("RGB").split()
        if red.tobytes() != green.tobytes() or red.tobytes() != blue.tobytes():
            raise ValueError(f"{path}: a mask must have one channel of class numbers, not colours")
        return red
    if mask.mode not in ("L", "LA", "P", "F") and not mask.mode.startswith("I"):
        raise ValueError(f"{path}: a mask must have one channel of class numbers, not colours")
    # a palette's indices are the classes, not its colours
    values = np.asarray(mask.getchannel("L") if mask.mode == "LA" else mask)
    if not np.isin(values, np.arange(256)).all():
        raise ValueError(f"{path}: the values of a mask must be whole numbers from 0 to 255")
    return Image.fromarray(values.astype(np.uint8))


def crop(rng: np.random.RandomState, pair: Pair, side: int) -> Pair:
    """A random square, mirrored half of the time."""
    top, left = (rng.randint(length - side + 1) for length in pair[1].shape)
    step = rng.choice((1, -1))
    return tuple(array[top : top + side, left : left + side][:, ::step] for array in pair)


def to_batch(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised images (B, 3, H, W) and classes (B, H, W)."""
    images = torch.from_numpy(np.stack([image for image, _ in pairs])).float() / 255
    images = (images - torch.tensor(IMAGENET_DEFAULT_MEAN)) / torch.tensor(IMAGENET_DEFAULT_STD)
    return images.permute(0, 3, 1, 2), torch.from_numpy(np.stack([mask for _, mask in pairs])).long()


def predict(model: nn.Module, image: np.ndarray) -> np.ndarray:
    """The predicted class of every pixel of an image (H, W, 3), from a model in evaluation mode."""
    height, width = image.shape[:2]
    batch, _ = to_batch([(image, image[..., 0])])
    with torch.inference_mode():
        logits = model(F.pad(batch, (0, -width % STRIDE, 0, -height % STRIDE)))
    return logits[0, :, :height, :width].argmax(0).numpy()


def intersection_over_union(model: nn.Module, pairs: Sequence[Pair], classes: int) -> np.ndarray:
    """IoU of each class over all pixels of the pairs; NaN for a class that is neither present nor predicted."""
    counts = np.zeros((classes, classes), np.int64)  # true by predicted
    model.eval()
    for image, mask in pairs:
        labelled = mask != UNLABELLED
        true, predicted = mask[labelled].astype(np.int64), predict(model, image)[labelled]
        counts += np.bincount(classes * true + predicted, minlength=classes**2).reshape(classes, classes)
    model.train()
    both, either = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    return np.where(either > 0, both / np.maximum(either, 1), np.nan)


@paper_style()
def draw_result(path: Path, model: nn.Module, pairs: Sequence[Pair], classes: int) -> None:
    """Draw images beside their masks and predictions, one row per image."""
    model.eval()
    colours = (255 * colormaps["tab20"](np.arange(classes) % 20)[:, :3]).astype(np.uint8)
    colours[0] = 30
    figure = Figure(figsize=(6.3, 2.1 * len(pairs)), layout="constrained")
    rows = figure.subplots(len(pairs), 3, squeeze=False)
    for row, (image, mask) in zip(rows, pairs, strict=True):
        drawn = np.where((mask == UNLABELLED)[..., None], 255, colours[np.minimum(mask, classes - 1)])
        for axes, content in zip(row, (image, drawn, colours[predict(model, image)]), strict=True):
            axes.imshow(content, interpolation="nearest")
            axes.set_axis_off()
    for axes, title in zip(rows[0], ("image", "mask", "prediction"), strict=True):
        axes.set_title(title)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def build(classes: int, encoder: str = TINY, weights: str | None = None) -> nn.Module:
    """smp's U-Net with a pyramid as its encoder.

    Args:
        classes: channels of the output.
        encoder: name of the model in timm's registry.
        weights: file with the weights of a plain model of the same width, or 'none' for untrained ones; by default
            the packaged weights if the encoder is Tiny.
    """
    try:
        import segmentation_models_pytorch as smp
    except ModuleNotFoundError:
        raise ImportError(
            "segmentation_models_pytorch is not installed; pip install 'hgrn_vision[dense]' brings it"
        ) from None
    if not timm.is_model(encoder):
        raise ValueError(f"unknown model {encoder}; there are {', '.join(timm.list_models(module='pyramid'))}")
    try:
        model = smp.Unet(f"tu-{encoder}", encoder_weights=None, classes=classes)
    except ValueError:
        raise ValueError(f"{encoder} has no maps at strides 4, 8, 16 and 32, which the U-Net needs") from None
    if weights is None and encoder == TINY:
        weights = weights_file(STARTER)
        check_packaged(weights)
    if weights not in (None, "none"):
        pyramids = timm.list_models(module="pyramid")
        if encoder not in pyramids:
            raise ValueError(f"--weights needs {', '.join(pyramids)}, got --model {encoder}")
        hgrn_vision.load_checkpoint(model.encoder.model.model, weights, drop_head=True)
    return model


def train(model: nn.Module, pairs: Sequence[Pair], validation: Sequence[Pair], classes: int, args) -> float:
    """Train for args.steps steps and print the progress; returns the mean IoU of the validation images."""
    from segmentation_models_pytorch.losses import DiceLoss

    dice = DiceLoss("multiclass", ignore_index=UNLABELLED)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.15)
    began = told = time.monotonic()
    bar = tqdm(total=args.steps, **_bar("training"))
    model.train()
    for step in range(1, args.steps + 1):
        rng = numpy_generator(fold(args.seed, step))
        images, masks = to_batch([args.sample(rng, pairs) for _ in range(args.batch_size)])
        logits = model(images)
        # Dice loss too, so that small classes count against a large background
        loss = F.cross_entropy(logits, masks, ignore_index=UNLABELLED) + 0.5 * dice(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.update()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if step == args.steps or step % max(1, args.steps // 5) == 0:
            iou = np.nanmean(intersection_over_union(model, validation, classes))
            tqdm.write(_line(step, args, began, loss, f"  mean IoU {iou:.3f}"))
            told = time.monotonic()
        elif bar.disable and time.monotonic() - told > SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            print(_line(step, args, began, loss), flush=True)
    bar.close()
    return float(iou)


def _line(step: int, args, began: float, loss: torch.Tensor, more: str = "") -> str:
    rate = step * args.batch_size / (time.monotonic() - began)
    return f"step {step}/{args.steps}  loss {loss.item():.3f}{more}  {rate:.0f} images/s"


def _bar(what: str) -> dict:
    return dict(desc=what, dynamic_ncols=True, disable=not sys.stderr.isatty(), leave=False)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="segment.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("images", nargs="?", type=Path, help="folder of images")
    parser.add_argument("masks", nargs="?", type=Path, help="folder of masks")
    parser.add_argument("--output", type=Path, default=Path("runs/segment"), metavar="DIR", help="new or empty folder")
    parser.add_argument("--model", default=TINY, help="encoder (default: %(default)s)")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="weights of a plain model for the encoder, or none (default for Tiny: the packaged ones)",
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step (default: %(default)s)")
    parser.add_argument("--side", type=int, help="side of the crops (default: 256; 96 for scenes)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--holdout", type=float, default=0.2, help="share to validate on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.images and not args.masks:
        raise ValueError("expected two folders, IMAGES and MASKS, or none; got one")
    args.side = args.side or (256 if args.images else 96)
    if args.side % STRIDE or args.side < STRIDE:
        raise ValueError(f"--side must be a multiple of {STRIDE}, got {args.side}")
    if args.steps < 1 or args.batch_size < 1 or not 0 < args.lr < math.inf or not 0 < args.holdout < 1:
        raise ValueError("--steps, --batch-size and --lr must be positive and finite, --holdout between 0 and 1")
    check_writable(args.output)
    if args.output.is_dir() and any(args.output.iterdir()):
        raise ValueError(f"{args.output} is not an empty folder; choose another --output")
    return args


def run(argv: Sequence[str] | None = None) -> float:
    """Train and write the output folder; returns the mean IoU."""
    args = parse(argv)
    if args.images:
        pairs, classes = read_pairs(args.images, args.masks, args.side)
        order = numpy_generator(args.seed).permutation(len(pairs))
        held = min(len(pairs) - 1, max(1, round(args.holdout * len(pairs))))
        validation, pairs = [pairs[i] for i in order[:held]], [pairs[i] for i in order[held:]]
        args.sample = lambda rng, pairs: crop(rng, pairs[rng.randint(len(pairs))], args.side)
    else:
        classes, pairs = SCENE_CLASSES, []
        validation = scenes("validation", 64, args.side, args.seed)
        args.sample = lambda rng, _: draw_scene(rng, range(1437), args.side)
    seed_weights(args.seed)
    model = build(classes, args.model, args.weights)
    drawn = f"{len(pairs)} training" if pairs else "freshly drawn training"
    print(f"U-Net with {args.model}, {classes} classes, {drawn} and {len(validation)} validation images", flush=True)
    iou = train(model, pairs, validation, classes, args)
    args.output.mkdir(parents=True, exist_ok=True)
    draw_result(args.output / "result.png", model, validation[:6], classes)
    model.save_pretrained(args.output / "unet", metrics={"mean IoU": round(iou, 4)})
    print(f"mean IoU {iou:.3f}; images: {args.output / 'result.png'}, model: {args.output / 'unet'}")
    return iou


def main(argv: Sequence[str] | None = None) -> int:
    """Run; bad input gives one line and exit code 2."""
    try:
        run(argv)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"segment.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("segment.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

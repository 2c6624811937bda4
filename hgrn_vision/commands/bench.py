"""`hgrn-vision bench`: our models against timm's, interleaved in one process, in PyTorch or onnxruntime."""

import argparse
import csv
import ctypes
import itertools
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.utils.onnx import onnx_export
from torch import nn
from tqdm import tqdm

from ..backend import choose
from ..data.spec import resolve_spec
from ..export.onnx_file import check_installed, open_session, write_onnx
from ..inference.pretrained import LoadedModel
from ..kernels import cpu_block
from ..report.speed import speed_chart
from ..report.style import to_png
from ..study.definition import parse_arm
from ..train.distributed import choose_device
from ..train.memory import keep_freed_memory
from ._console import check_free, open_output

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

EXAMPLE = "hgrn-vision bench --sizes 224 384 --output runs/bench"
MODELS = ["hgrn_deit_tiny_patch16_224", "hgrn_deit_small_patch16_224"]
RUNTIMES = {"torch": ("inference", "latency", "training"), "onnxruntime": ("inference", "latency")}  # and their tasks
COLUMNS = {"task": 10, "size": 6, "batch": 6, "images/s": 10, "peer": 8, "ratio": 7, "share": 7, "MB": 7, "peer MB": 9}
Step = Callable[[], object]


@dataclass
class Row:
    """One line of the table: a model at one image size, next to its peer."""

    runtime: str
    task: str
    size: int
    batch: int
    model: str
    peer: str
    images_per_second: float
    peer_images_per_second: float
    ratio: float
    share_of_matmuls: float  # time of the model's linear layers alone, over the model's time; NaN in onnxruntime
    memory_mb: float  # peak during a step, beyond what was in use before it
    peer_memory_mb: float
    ns_per_pixel: float
    bytes_per_pixel: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", default=MODELS, help="models to measure: NAME or NAME,local_conv=3"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="a model to compare each with, or one for all [DeiT of the same size]",
    )
    parser.add_argument(
        "--sizes", nargs="+", type=int, metavar="PIXELS", default=[224, 384, 512, 768, 1024], help="image sides"
    )
    parser.add_argument(
        "--batch", nargs="+", type=int, metavar="N", help="batch size for each image size [as many pixels as 32 at 224]"
    )
    parser.add_argument("--tasks", nargs="+", choices=RUNTIMES["torch"], help="what to time [all the runtime supports]")
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        default="torch",
        help="onnxruntime: run ONNX files, on CPUs [torch]",
    )
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="seconds to spend per line [6]")
    parser.add_argument("--device", help="torch device [cuda, else cpu]")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights [float32]"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads [all cores]")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), metavar="DIR", help="output folder [runs/bench]"
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    table, chart = args.output / "bench.csv", args.output / "bench.png"
    check_free([table, chart], args.force)
    device, dtype = choose_device(_device(args)), getattr(torch, args.dtype)
    if args.threads:
        torch.set_num_threads(args.threads)
    if device.type == "cpu":
        keep_freed_memory()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _try_models(settings, device, dtype, Path(folder) if args.runtime == "onnxruntime" else None)
        print(f"{where}, {args.dtype}, {_engine(args, device, dtype)}, best of interleaved runs", flush=True)
        print(f"{'':36}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "  compared with")
        for setting in tqdm(settings, disable=not sys.stderr.isatty(), unit="line"):
            if args.runtime == "torch":
                rows.append(measure(*setting, device, dtype, args.seconds))
            else:
                rows.append(measure_onnx(*setting, Path(folder), torch.get_num_threads(), args.seconds))
            tqdm.write(_line(rows[-1]), file=sys.stdout)
    _write_table(table, rows)
    with open_output(chart, binary=True) as file:
        file.write(to_png(speed_chart([asdict(row) for row in rows if row.task != "latency"])))
    print("share: time of the linear layers alone, as a share of the model's; MB: peak memory of a step")
    print(f"table: {table}\nchart: {chart}")
    return 0


def _settings(args: argparse.Namespace) -> list[tuple[str, str, str, int, int]]:
    peers = args.peers or [_default_peer(name) for name in args.models]
    for name in (*args.models, *peers):
        _parse(name)
    if len(peers) not in (1, len(args.models)):
        raise ValueError(f"got {len(peers)} --peers for {len(args.models)} --models; give one for each, or one for all")
    peers = peers * len(args.models) if len(peers) == 1 else peers
    if min(args.sizes) < 1 or (args.threads or 1) < 1:
        raise ValueError("--sizes and --threads must be positive")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds must be positive and finite, got {args.seconds:g}")
    if args.runtime == "onnxruntime":
        check_installed("--runtime onnxruntime")
        if (args.device or "cpu") != "cpu" or args.dtype != "float32":
            raise ValueError("--runtime onnxruntime measures float32 on CPUs; leave out --device and --dtype")
    if _device(args).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that PyTorch can use")
    tasks = args.tasks or RUNTIMES[args.runtime]
    if not set(tasks) <= set(RUNTIMES[args.runtime]):
        raise ValueError(f"--runtime {args.runtime} cannot train; use --tasks {' '.join(RUNTIMES[args.runtime])}")
    batches = args.batch or [max(1, int(32 * (224 / size) ** 2)) for size in args.sizes]
    if len(batches) != len(args.sizes) or min(batches) < 1:
        raise ValueError(f"--batch needs one positive number for each of the {len(args.sizes)} sizes")
    shapes = list(zip(args.sizes, batches, strict=True))
    settings = []
    for (name, peer), task in itertools.product(zip(args.models, peers, strict=True), tasks):
        # latency is measured for one image of the first size
        for size, batch in [(args.sizes[0], 1)] if task == "latency" else shapes:
            settings.append((name, peer, task, size, batch))
    return settings


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and constructor arguments of a model as typed: NAME[,ARGUMENT=VALUE...]."""
    settings = dict(parse_arm(text).settings)
    name, arguments = settings.pop("model", text), settings.pop("model_args", {})
    if not timm.is_model(name):
        raise ValueError(f"unknown model {name!r}; `hgrn-vision models` and timm.list_models() list the known ones")
    if settings:
        raise ValueError(f"{text}: {min(settings)} is a training setting, not a constructor argument of the model")
    return name, arguments


def _default_peer(text: str) -> str:
    """timm's DeiT of a model's size."""
    size = re.match(r"hgrn.*_(tiny|small|base)", _parse(text)[0])
    if not size:
        raise ValueError(f"{text} has no DeiT to compare with; name its peer with --peers")
    return f"deit_{size[1]}_patch16_224"


def _device(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() and args.runtime == "torch" else "cpu")


def _engine(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> str:
    """What runs the models."""
    if args.runtime == "torch":
        return f"{choose(device, dtype)} backend"
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def _try_models(
    settings: list[tuple[str, str, str, int, int]], device: torch.device, dtype: torch.dtype, folder: Path | None
) -> None:
    """Run each model once at each size, so that one that cannot run is refused before anything is measured.

    Args:
        settings: what will be measured.
        device: where the models run.
        dtype: that of their weights.
        folder: for the ONNX files that will be measured; None if PyTorch runs the models.
    """
    tries = dict.fromkeys(
        # a second image, since batch norm may refuse to train on one
        (name, size, task == "training", min(batch, 2) if task == "training" else 1)
        for *pair, task, size, batch in settings
        for name in pair
    )
    for name, size, training, batch in tqdm(tries, "trying", disable=not sys.stderr.isatty(), leave=False):
        try:
            model = _create(name, size).to(device=device, dtype=dtype).train(training)
            with torch.no_grad():
                model(torch.randn(batch, 3, size, size, device=device, dtype=dtype))
            if folder:
                _onnx_file(name, size, folder)
        # constructors and exporters raise all sorts of errors
        except Exception as error:
            reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{name} cannot run at {size} pixels: {reason}") from error


def measure(name: str, peer: str, task: str, size: int, batch: int, device, dtype, seconds: float) -> Row:
    """Time a model, its peer and its matmuls in turn; each figure is the best of several runs."""
    images = torch.randn(batch, 3, size, size, device=device, dtype=dtype)
    make_step = training_step if task == "training" else inference_step
    models = [_create(model, size).to(device=device, dtype=dtype) for model in (name, peer)]
    ours, theirs = (make_step(model, images) for model in models)
    memory, peer_memory = peak_memory(ours, device), peak_memory(theirs, device)
    matmuls = matmuls_step(models[0], images, backward=task == "training")
    times = best_times([ours, theirs, matmuls], device, seconds)
    return _row("torch", name, peer, task, size, batch, times, [memory, peer_memory])


def measure_onnx(
    name: str, peer: str, task: str, size: int, batch: int, folder: Path, threads: int, seconds: float
) -> Row:
    """Time the ONNX files of a model and its peer in turn; the files stay in `folder` for the next call."""
    files = [_onnx_file(model, size, folder) for model in (name, peer)]
    images, cpu = torch.randn(batch, 3, size, size).numpy(), torch.device("cpu")
    # a session that keeps its memory would allocate none in the step that is measured
    memory = [peak_memory(onnx_step(open_session(file, threads, keep_memory=False), images), cpu) for file in files]
    times = best_times([onnx_step(open_session(file, threads), images) for file in files], cpu, seconds)
    return _row("onnxruntime", name, peer, task, size, batch, [*times, math.nan], memory)


def _onnx_file(name: str, size: int, folder: Path) -> Path:
    """The ONNX file of a model, as `export` writes it or, for other models, as timm does: for images of one size."""
    path = folder / f"{name}-{size}.onnx"
    if path.exists():
        return path
    model = _create(name, size, exportable=True).eval()
    with warnings.catch_warnings():
        # deprecation notes from within PyTorch
        warnings.simplefilter("ignore")
        if hasattr(model, "recurrences"):
            spec, classes = resolve_spec(model, img_size=size), [str(i) for i in range(model.num_classes)]
            write_onnx(LoadedModel(name, model, classes, spec, torch.device("cpu"), {}), path)
        else:
            onnx_export(model, str(path), input_size=(3, size, size), batch_size=2)
    return path


def _row(
    runtime: str, name: str, peer: str, task: str, size: int, batch: int, times: list[float], memory: list[float]
) -> Row:
    """A row from the seconds of the model, its peer and its matmuls, and the bytes of the first two."""
    time_ours, time_theirs, time_matmuls = times
    return Row(
        runtime=runtime,
        task=task,
        size=size,
        batch=batch,
        model=name,
        peer=peer,
        images_per_second=batch / time_ours,
        peer_images_per_second=batch / time_theirs,
        ratio=time_theirs / time_ours,
        share_of_matmuls=time_matmuls / time_ours,
        memory_mb=memory[0] / 2**20,
        peer_memory_mb=memory[1] / 2**20,
        ns_per_pixel=1e9 * time_ours / (batch * size**2),
        bytes_per_pixel=memory[0] / (batch * size**2),
    )


def _create(name: str, size: int, **more: Any) -> nn.Module:
    model, arguments = _parse(name)
    try:
        return timm.create_model(model, img_size=size, **arguments, **more)
    except TypeError as error:
        # models that work at any size need no such argument
        if "'img_size'" not in str(error):
            raise
        return timm.create_model(model, **arguments, **more)


def inference_step(model: nn.Module, images: torch.Tensor) -> Step:
    model.eval()

    def step():
        with torch.inference_mode():
            return model(images)

    return step


def onnx_step(session: "InferenceSession", images: np.ndarray) -> Step:
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: images})


def training_step(model: nn.Module, images: torch.Tensor) -> Step:
    """Forward, backward and an AdamW update; every label is class 0."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def step():
        F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def matmuls_step(model: nn.Module, images: torch.Tensor, backward: bool) -> Step:
    """The model's linear layers and dense convolutions alone, on inputs of the same shapes: a limit to its speed."""
    matmuls, inputs = [], {}

    def record(layer, args):
        shape = args[0].shape
        inputs.setdefault(shape, torch.randn(shape, device=images.device, dtype=images.dtype, requires_grad=backward))
        matmuls.append((layer, inputs[shape]))

    kinds = (nn.Linear, nn.Conv2d)
    # a depthwise convolution is not a matmul
    layers = [m for m in model.modules() if isinstance(m, kinds) and getattr(m, "groups", 1) == 1]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()

    def matmul(layer, x):
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        return F.linear(x, layer.weight)

    def step():
        with torch.inference_mode(not backward):
            for layer, x in matmuls:
                y = matmul(layer, x)
                if backward:
                    torch.autograd.grad(y, (layer.weight, x), torch.empty_like(y))

    return step


def best_times(steps: list[Step], device: torch.device, seconds: float, cpu_time: bool = False) -> list[float]:
    """The shortest time of each step; steps take turns until the time is used up, at least three times each.

    Args:
        steps: what to time.
        device: where they run.
        seconds: how long to repeat them.
        cpu_time: count the seconds that this process computes, not those in which others have the CPU.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    best = [math.inf] * len(steps)
    for step in steps:
        step()
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= 3 and time.perf_counter() > end:
            return best
        for i, step in enumerate(steps):
            _synchronize(device)
            start = clock()
            step()
            _synchronize(device)
            best[i] = min(best[i], clock() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(step: Step, device: torch.device) -> float:
    """Peak bytes of a step, beyond what was in use before it; NaN if the system does not report it."""
    step()  # allocates what outlives a step, such as the optimizer's state
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - held
    try:
        # return freed memory to the system and reset its peak count
        cpu_block.release_memory()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        held = _status("VmRSS")
        step()
        return _status("VmHWM") - held
    except (OSError, AttributeError):
        return math.nan


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _line(row: Row) -> str:
    cells = [row.task, row.size, row.batch, f"{row.images_per_second:.1f}", f"{row.peer_images_per_second:.1f}"]
    share = "-" if math.isnan(row.share_of_matmuls) else f"{row.share_of_matmuls:.0%}"
    cells += [f"{row.ratio:.2f}x", share, f"{row.memory_mb:.0f}", f"{row.peer_memory_mb:.0f}"]
    figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
    return f"{row.model:36}{figures}  {row.peer}"


def _write_table(path: Path, rows: list[Row]) -> None:
    with open_output(path) as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in asdict(row).items()} for row in rows)


def _cell(value: str | float) -> str | int:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else f"{value:.6g}"

"""Compiles every Triton kernel for every target without a GPU, and reports what the compiled code will cost.

    python -m hgrn_vision.kernels.aot --target sm_80 gfx942 --dtype bf16

The exit code is 1 if a kernel needs more registers than its target's limit, spills, uses a stack or an atomic
operation, or if the scan in one pass, or of a grid, moves more than PASS_BYTES times the least bytes. Registers,
spills, stack, shared memory and atomics are read from the compiled code. Loads, stores and bytes are counted in the
compiled Triton IR, each times the trip count of its loop: what a launch accesses first comes from memory, what it
accesses again from a cache. That the cache still holds it, and all times, are a model, not a measurement.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from unittest import mock

import torch
from tqdm import tqdm

TARGETS = {  # name: backend, architecture, threads per warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx90a": ("hip", "gfx90a", 64),
}
REGISTERS = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 176, "gfx90a": 176}  # at most, per thread
PASS_BYTES = 1.3
COMPILE_SECONDS = 30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IR_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# the shapes of HGRN-Tiny and HGRN-Small, 16 x 16 tokens
B, T, WIDTHS, SIDE = 128, 256, {"tiny": 192, "small": 384}, 16
# two for a sequence, one for the rows and columns of a grid
PATHS = ("chunks", "one pass", "grid")
PARAMETERS = ("lower_bound", "rotation", "bias")
WORKSPACES = ("ends", "starts")  # of the sequence kernels: written in a program's first sweep, read in its second
# peak bytes and bf16 operations per second, from NVIDIA's data sheets (SXM, 80 GB)
GPUS = {"A100": (2.04e12, 312e12), "H100": (3.35e12, 989e12)}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as triton_scan makes it, over sequences of `tokens` tokens."""

    path: str
    step: str
    kernel: str
    tokens: int
    programs: int
    channels_per_thread: int
    tensors: tuple[torch.dtype | None, ...]
    constants: tuple[tuple[str, int], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0]


@dataclass
class Report:
    """What a kernel compiled for a target costs, with traffic per token and channel; no seconds if it was cached."""

    target: str
    path: str
    step: str
    kernel: str
    dtype: str
    gate: bool | None
    directions: int
    registers: int
    spills: int
    stack: int
    shared: int
    atomics: int
    seconds: float | None
    loads: float
    stores: float
    memory: float
    cache: float
    sums: float
    failures: list[str] = field(default_factory=list)


def record_launches(
    path: str, dtype: torch.dtype, fields: int, directions: int, D: int = WIDTHS["tiny"]
) -> list[Launch]:
    """The launches of a forward and a backward pass with a bias, recorded on tensors without memory."""
    from . import triton_scan

    launches = []
    step = "forward"

    def record(kernel, programs, channels_per_thread, *tensors, T, WIDTH=1, **constants):
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        name = kernel.__name__
        launches.append(Launch(path, step, name, T, programs, channels_per_thread, dtypes, tuple(constants.items())))

    x = torch.empty(B, T, fields * D, dtype=dtype, device="meta")
    dout = torch.empty(B, T, 2 * D, dtype=dtype, device="meta")
    parameters = [torch.empty(shape, device="meta") for shape in ((D,), (directions, D), (fields * D,))]
    with (
        mock.patch.object(triton_scan, "launch", record),
        mock.patch.object(triton_scan, "one_pass", lambda *_: path == "one pass"),
    ):
        width = SIDE if path == "grid" else 0
        _, states = triton_scan.forward(x, *parameters, width)
        step = "backward"
        triton_scan.backward(dout, x, *parameters, states, width)
    return launches


def compile_launch(launch: Launch, target: str) -> Report:
    """Compile as a launch on 16-byte aligned tensors below 2 GB would, and read the resources of the result."""
    from triton import compile, knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import triton_scan

    kernel = getattr(triton_scan, launch.kernel)
    constants = dict(launch.constants)
    backend, _, lanes = TARGETS[target]
    signature, constexprs, attributes = {}, {}, {}
    known = [["tt.divisibility", 16]] + ([["tt.pointer_range", 32]] if backend == "hip" else [])
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
        elif name in ("T", "WIDTH"):
            signature[name] = "i32"
        elif launch.tensors[i] is None:
            signature[name], constexprs[(i,)] = "constexpr", None
        else:
            signature[name], attributes[(i,)] = IR_TYPES[launch.tensors[i]], known
    hits = []
    knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    options = {"num_warps": triton_scan.warps(lanes, launch.channels_per_thread), **triton_scan.OPTIONS}
    start = cpu_seconds()
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    seconds = None if all(hits) else cpu_seconds() - start
    resources = read_cubin(compiled.asm) if backend == "cuda" else read_amdgcn(compiled.asm["amdgcn"])
    element_size = {
        name: dtype.itemsize for name, dtype in zip(kernel.arg_names, launch.tensors, strict=False) if dtype is not None
    }
    return Report(
        target=target,
        path=launch.path,
        step=launch.step,
        kernel=name_of(launch),
        dtype=next(name for name, dtype in DTYPES.items() if dtype == launch.dtype),
        gate={5: True, 3: False}.get(constants.get("FIELDS")),
        directions=constants["K"],
        seconds=seconds,
        shared=compiled.metadata.shared,
        **resources,
        **traffic(compiled.asm["ttir"], launch, element_size),
    )


def name_of(launch: Launch) -> str:
    """The kernel's name, and which of its uses this is."""
    constants = dict(launch.constants)
    name = launch.kernel.removesuffix("_kernel") + ("_adjoint" if constants.get("ADJOINT") else "")
    if launch.path == "grid":
        name = name.replace("sequence", "columns" if constants["COLUMNS"] else "rows")
    return name


def cpu_seconds() -> float:
    """CPU time of this process and the assemblers it ran, which other processes hardly affect."""
    return sum(os.times()[:4])


def read_cubin(asm: dict) -> dict[str, int]:
    """Registers, spilled values, stack bytes and atomic operations of NVIDIA code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()

        def read(tool, *flags):
            return subprocess.run([tool.path, *flags, file.name], capture_output=True, text=True, check=True).stdout

        usage = read(knobs.nvidia.cuobjdump, "--dump-resource-usage")
        instructions = read(knobs.nvidia.nvdisasm)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "registers": int(registers),
        "stack": int(stack),
        # nothing in the kernels has an address, so every store to local memory is a spill
        "spills": len(re.findall(r"\bSTL\b", instructions)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", asm["ptx"])),
    }


def read_amdgcn(code: str) -> dict[str, int]:
    """Registers, spilled values, stack bytes and atomic operations of AMD code."""

    def note(name):
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])

    return {
        "registers": note("vgpr_count"),
        "stack": note("private_segment_fixed_size"),
        "spills": note("vgpr_spill_count") + note("sgpr_spill_count"),
        "atomics": len(re.findall(r"\b(?:global|flat|buffer|ds)_atomic", code)),
    }


def memory_operations(ir: str) -> Iterator[tuple[str, str, int, bool]]:
    """The loads and stores of a kernel in Triton IR: operation, kernel argument, loop (0: none), whether repeated.

    An access is repeated if the same pass of the loop has already accessed the same pointer in the same way.
    """
    root: dict[str, str] = {}
    seen = set()
    loop, loops = 0, 0
    for line in ir.splitlines():
        if "scf.for" in line:
            loops += 1
            loop = loops
        elif "scf.yield" in line:
            loop = 0
        elif step := re.match(r"\s*(%\S+) = tt\.(?:addptr|splat) (%[^\s,]+)", line):
            root[step[1]] = root.get(step[2], step[2])
        elif access := re.search(r"\btt\.(load|store) (%[^\s,]+)", line):
            again = (access[0], loop) in seen
            seen.add((access[0], loop))
            yield access[1], root[access[2]].removeprefix("%"), loop, again


def rounds_of_loop(launch: Launch) -> int:
    """Trip count of a kernel's last loop; that of a sweep before it is one less."""
    constants = dict(launch.constants)
    if launch.kernel == "carry_kernel":
        return launch.tokens // constants["CT"] // constants["BATCH"]
    if launch.kernel == "forward_sequence_kernel":
        return launch.tokens // constants["GT"]
    if launch.kernel == "backward_sequence_kernel":
        return launch.tokens // constants["CT"]
    return constants["CT"] // (constants["GT"] if "GT" in constants else constants["BATCH"])


def traffic(ir: str, launch: Launch, element_size: dict[str, int]) -> dict[str, float]:
    """Loads and stores of a launch per token and channel, and how many of their bytes memory and caches serve.

    A kernel's last loop accesses all that it works on, and any loop before it a part of that: memory serves the first
    access, a cache the second. Caches also serve the parameters, which all programs share.
    """
    constants = dict(launch.constants)
    operations = list(memory_operations(ir))
    last = max(loop for _, _, loop, _ in operations)
    rounds = rounds_of_loop(launch)
    count: Counter = Counter()
    for operation, argument, loop, again in operations:
        times = {0: 1, last: rounds}.get(loop, rounds - 1)
        blocks = times * launch.programs * constants["BD"] / (B * T * constants["D"])
        count[operation] += blocks
        complete = argument not in PARAMETERS and loop in (0, last) and not again
        first = operation == "store" if argument in WORKSPACES else complete
        count["memory" if first else "cache"] += blocks * element_size[argument]
        if argument == "sums":
            count["sums"] += blocks * element_size[argument]
    return {
        "loads": count["load"],
        "stores": count["store"],
        "memory": count["memory"],
        "cache": count["cache"],
        "sums": count["sums"],
    }


def judge(report: Report) -> None:
    """Note the limits that a kernel exceeds."""
    if report.registers > REGISTERS[report.target]:
        report.failures.append(f"{report.registers} registers, at most {REGISTERS[report.target]}")
    for name in ("spills", "stack", "atomics"):
        if getattr(report, name):
            report.failures.append(f"{name} {getattr(report, name)}, none allowed")


def scan_bytes(reports: Sequence[Report]) -> list[dict]:
    """Bytes per token and channel of a whole forward and backward, and the least that any scan must move."""
    reports = [report for report in reports if report.target == reports[0].target]
    rows = []
    for path, step, dtype, gate, directions in dict.fromkeys(map(_variant, reports)):
        if gate is None:
            continue
        # the carry is in float32 and has no gate, whatever the input
        known = ((path, step, dtype, gate, directions), (path, step, "fp32", None, directions))
        parts = [report for report in reports if _variant(report) in known]
        # torch adds up the partial sums
        memory = sum(report.memory + report.sums for report in parts)
        cache = sum(report.cache for report in parts)
        once, least = least_bytes(path, step, 5 if gate else 3, DTYPES[dtype].itemsize)
        row = dict(path=path, step=step, dtype=dtype, gate=gate, directions=directions)
        rows.append(row | dict(memory=memory, cache=cache, once=once, least=least, ratio=memory / least))
    return rows


def least_bytes(path: str, step: str, fields: int, size: int) -> tuple[int, int]:
    """Bytes per token and channel if every tensor is moved once, and the least that the launches of a path can move.

    They only differ for a grid: one launch for rows and one for columns both read the input, except for the output
    gate, which rows do not need in forward, and the first hands its share to the second in float32.
    """
    read, written = (fields, 2) if step == "forward" else (fields + 2, fields)
    once = (read + written) * size
    if path != "grid":
        return once, once
    rows = 3 if step == "forward" else read
    return once, (rows + read + written) * size + 2 * written * 4


def _variant(report: Report) -> tuple:
    return report.path, report.step, report.dtype, report.gate, report.directions


def matmul_seconds(rows: int, inner: int, columns: int, bandwidth: float, operations: float) -> float:
    """Time of a bf16 matmul at the peak bandwidth or throughput, whichever limits it."""
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    return max(moved / bandwidth, 2 * rows * inner * columns / operations)


def roofline(rows: Sequence[dict]) -> list[dict]:
    """Predicted microseconds of the mixer's scan and of its two matmuls, bf16, gated, both directions."""
    from . import triton_scan

    rows = [row for row in rows if (row["dtype"], row["gate"], row["directions"]) == ("bf16", True, 2)]
    predictions = []
    for (gpu, peak), (size, D), row in product(GPUS.items(), WIDTHS.items(), rows):
        matmuls = 0.0
        for inner, columns in ((D, 5 * D), (2 * D, D)):
            if row["step"] == "forward":
                matmuls += matmul_seconds(B * T, inner, columns, *peak)
            else:
                matmuls += matmul_seconds(B * T, columns, inner, *peak) + matmul_seconds(inner, B * T, columns, *peak)
        moved = dict(scan=row["memory"], uncached=row["memory"] + row["cache"], least=row["least"])
        scans = {name: 1e6 * count * B * T * D / peak[0] for name, count in moved.items()}
        # a grid has only one path
        taken = row["path"] in ("grid", "one pass" if triton_scan.one_pass(B, T, D) else "chunks")
        where = dict(gpu=gpu, size=size, step=row["step"], path=row["path"], taken=taken)
        predictions.append(where | scans | dict(matmuls=1e6 * matmuls))
    return predictions


def compile_all(targets: Sequence[str], dtypes: Sequence[str]) -> list[Report]:
    """A report on every distinct kernel of every variant, compiled by two processes."""
    variants = [
        record_launches(path, DTYPES[dtype], *variant)
        for dtype, path, *variant in product(dtypes, PATHS, (5, 3), (2, 1))
        # a grid in one direction is the same kernel with less in it
        if path != "grid" or variant[1] == 2
    ]
    launches = list(dict.fromkeys(launch for variant in variants for launch in variant))
    jobs = [(launch, target) for target in targets for launch in launches]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_launch, *job) for job in jobs]
        return [future.result() for future in tqdm(futures, "compiling", unit="kernel", disable=None)]


def print_table(rows: Sequence[dict]) -> None:
    """Print rows with equal keys as aligned columns."""

    def text(value):
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [list(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)))


def print_reports(reports: Sequence[Report], moved: Sequence[dict], predictions: Sequence[dict]) -> None:
    print(f"Compiled kernels, D={WIDTHS['tiny']}; loads, stores and bytes per token and channel, from the Triton IR")
    print("(memory: bytes that a launch accesses first; cache: bytes that it accesses again; sums: part of memory)")
    hidden = ("step", "failures")
    print_table([{k: v for k, v in asdict(report).items() if k not in hidden} for report in reports])
    print("\nBytes per token and channel, all kernels of a step")
    print("(once: if every tensor is moved once; least: for the launches of this path; grid: rows, then columns)")
    print_table(moved)
    if predictions:
        print(f"\nMODEL, not measured: microseconds at peak bandwidth or throughput, bf16, batch {B}, {T} tokens")
        print("(chunks, one pass: the two paths of a sequence; grid: rows and columns)")
        print("(taken: whether this path runs at this shape; scan: with the bytes of memory above; uncached: if no")
        print("cache held anything; least: with the least bytes; matmuls: both projections of the mixer)")
        print_table(predictions)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="aot", description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=list(TARGETS), metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], metavar="NAME", help=", ".join(DTYPES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    for flag, known in (("target", TARGETS), ("dtype", DTYPES)):
        unknown = [name for name in getattr(args, flag) if name not in known]
        if unknown:
            raise ValueError(f"--{flag} {unknown[0]!r} is unknown, choose from {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 within all limits, 1 if a limit is exceeded, 2 for wrong arguments or without triton."""
    # triton would interpret the kernels instead of compiling them
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        args = parse(argv)
        reports = compile_all(args.target, args.dtype)
    except (ValueError, ImportError) as error:
        print(f"aot: {error}", file=sys.stderr)
        return 2
    for report in reports:
        judge(report)
    moved = scan_bytes(reports)
    predictions = roofline(moved)
    if args.json:
        print(json.dumps({"kernels": [asdict(report) for report in reports], "scan": moved, "model": predictions}))
    else:
        print_reports(reports, moved, predictions)
    over = [row for row in moved if row["path"] != "chunks" and row["ratio"] > PASS_BYTES]
    for row in over:
        name = f"{row['path']} {row['step']} {row['dtype']} gate={row['gate']} directions={row['directions']}"
        print(f"FAILED {name}: {row['ratio']:.2f} times the least bytes, at most {PASS_BYTES}", file=sys.stderr)
    for report in reports:
        name = f"{report.target} {report.kernel} {report.dtype} gate={report.gate} directions={report.directions}"
        for failure in report.failures:
            print(f"FAILED {name}: {failure}", file=sys.stderr)
        if report.seconds and report.seconds > COMPILE_SECONDS:
            print(
                f"warning: {name} took {report.seconds:.0f} s to compile, more than {COMPILE_SECONDS}", file=sys.stderr
            )
    return 1 if over or any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

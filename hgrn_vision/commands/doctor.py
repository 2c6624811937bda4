"""`hgrn-vision doctor`: what this machine has, which backend it would use, and whether the backends are correct."""

import argparse
import os
import platform
import shutil
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from ..backend import BACKENDS, ENVIRONMENT, backend_for, get_backend, unavailable
from ..kernels import cpu_build, reference
from ..randomness import torch_generator
from ..scan import hgru_scan
from ..train.environment import versions

EXAMPLE = "hgrn-vision doctor"
# largest error divided by largest value, of the output and of every gradient, against the float64 reference
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
HOMES = {"triton": "cuda", "cpu": "cpu"}  # the devices of the backends that have kernels
LEAST_SPACE = 2**30  # bytes


@dataclass
class Diagnosis:
    """The findings: what keeps the package from working, and what would make it faster."""

    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no flags of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the findings and what to do about them; 1 if there is a problem."""
    diagnosis = Diagnosis()
    _print("versions", ", ".join(f"{name} {version}" for name, version in _versions().items()))
    threads = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} of them for torch"
    _print("machine", f"{platform.system()} {platform.machine()}, {threads}")
    devices = find_devices(diagnosis)
    _print("devices", *(f"{device}: {text}" for device, text in devices.items()))
    _print("backend", *(describe_choice(device, diagnosis) for device in devices))
    _print("compiler", *describe_compiler())
    _print("self-test", *self_tests(list(devices), diagnosis))
    _print("space", *describe_space(diagnosis))
    for advice in diagnosis.advice:
        print(f"advice: {advice}")
    for problem in diagnosis.problems:
        print(f"to do: {problem}")
    if not diagnosis.problems:
        print("ready")
    return 1 if diagnosis.problems else 0


def _print(title: str, *lines: str) -> None:
    for line in lines:
        print(f"{title:<10} {line}", flush=True)
        title = ""


def _versions() -> dict[str, str]:
    found = versions()
    found.pop("gpu", None)
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "not installed"
    return found


def find_devices(diagnosis: Diagnosis) -> dict[torch.device, str]:
    """The devices that torch can use, with their names."""
    devices = {torch.device("cpu"): cpu_name()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[torch.device("cuda", index)] = f"{properties.name}, {_gigabytes(properties.total_memory)}"
    if torch.backends.mps.is_available():
        devices[torch.device("mps")] = "Apple GPU"
    if len(devices) == 1 and shutil.which("nvidia-smi"):
        diagnosis.advice.append("there is an NVIDIA driver, but torch sees no GPU: install a CUDA build of torch")
    return devices


def cpu_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_choice(device: torch.device, diagnosis: Diagnosis) -> str:
    """The backend that a model on `device` would use, and why."""
    try:
        chosen = backend_for(torch.empty(0, device=device), None)
    except (ValueError, RuntimeError) as error:
        diagnosis.problems.append(f"correct or unset {ENVIRONMENT}: {error}")
        return f"{device}: none, {error}"
    if get_backend() != "auto":
        return f"{device}: {chosen}, because {ENVIRONMENT} asks for it"
    if chosen != "torch":
        return f"{device}: {chosen}, the fused kernels for such tensors"
    fused = next((backend for backend, home in HOMES.items() if home == device.type), None)
    if fused is None:
        return f"{device}: torch, there are no fused kernels for {device.type} tensors"
    reason = unavailable(fused)
    diagnosis.advice.append(f"models on {device} would be faster with the {fused} backend, which cannot run: {reason}")
    return f"{device}: torch, because {fused} cannot run: {reason}"


def describe_compiler() -> list[str]:
    """The C compiler for the cpu backend, and the folder that caches what it builds."""
    try:
        command, version = cpu_build.compiler()
        folder = cpu_build.cache_folder()
    except RuntimeError as error:
        return [f"none: {error}"]
    text = f"{' '.join(command)}: {version.strip().splitlines()[0]}"
    if folder is None:
        return [text, "cache: none (no folder that only this user can write to), so every process builds the kernels"]
    return [text, f"cache: {folder}, {len(list(folder.glob('*.so')))} libraries"]


def self_tests(devices: list[torch.device], diagnosis: Diagnosis) -> list[str]:
    """One line per backend and device: the largest error against the reference, or why it was not run."""
    lines = []
    for backend in BACKENDS[1:]:
        able = [device for device in devices if device.type == HOMES.get(backend, device.type)]
        reason = unavailable(backend)
        if reason or not able:
            lines.append(f"{backend}: not run, {reason or 'no GPU that it has kernels for'}")
            continue
        for device in able:
            lines.append(_test_backend(backend, device, diagnosis))
    return lines


def _test_backend(backend: str, device: torch.device, diagnosis: Diagnosis) -> str:
    errors = []
    for dtype, tolerance in TOLERANCE.items():
        try:
            error = scan_error(backend, device, dtype)
        except RuntimeError as failure:
            reason = " ".join(str(failure).split())
            diagnosis.problems.append(
                f"backend {backend} fails on {device}, choose another with {ENVIRONMENT}: {reason}"
            )
            return f"{backend} on {device}: FAILED, {reason}"
        errors.append(f"{error:.1e} in {str(dtype).removeprefix('torch.')}")
        # written so that NaN fails too
        if not error <= tolerance:
            diagnosis.problems.append(
                f"backend {backend} gives wrong results on {device} (error {errors[-1]}, expected {tolerance:g}): "
                f"choose another with {ENVIRONMENT}, and report it"
            )
            return f"{backend} on {device}: WRONG, error {', '.join(errors)}"
    return f"{backend} on {device}: ok, error {', '.join(errors)}"


def scan_error(backend: str, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of the scans' results and gradients against the float64 reference."""
    generator = torch_generator(0)
    # more than two chunks of tokens, and not a whole number of vectors
    B, T, D, K = 2, 150, 40, 2
    grids = None, (10, 15)
    x = torch.randn(B, T, 5 * D, generator=generator).to(dtype)
    bound, theta = torch.rand(D, generator=generator), torch.randn(K, D, generator=generator)
    bias = torch.randn(5 * D, generator=generator)
    dout = torch.randn(B, T, 2 * D, generator=generator).to(dtype)

    def values(scan, place, **options) -> list[torch.Tensor]:
        leaves = [tensor.to(place).requires_grad_() for tensor in (x, bound, theta, bias)]
        out = scan(*leaves, **options)
        gradients = torch.autograd.grad(out, leaves, dout.to(out))
        return [tensor.detach().double().cpu() for tensor in (out, *gradients)]

    errors = []
    for grid in grids:
        got = values(hgru_scan, device, backend=backend, grid=grid)
        want = values(reference.hgru_scan, "cpu", grid=grid)
        errors += [(a - b).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True)]
    return torch.stack(errors).max().item()


def describe_space(diagnosis: Diagnosis) -> list[str]:
    """Free disk where runs would be written, and free memory."""
    free = shutil.disk_usage(Path.cwd()).free
    lines = [f"disk: {_gigabytes(free)} free in {Path.cwd()}"]
    if free < LEAST_SPACE:
        diagnosis.problems.append(f"free some disk space in {Path.cwd()}: only {_gigabytes(free)} left")
    memory = available_memory()
    lines.append(f"memory: {_gigabytes(memory)} available" if memory else f"memory: unknown on {sys.platform}")
    if memory and memory < LEAST_SPACE:
        diagnosis.problems.append(f"close other programs: only {_gigabytes(memory)} of memory left")
    return lines


def available_memory() -> int | None:
    """Bytes that programs can still allocate without swapping; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"

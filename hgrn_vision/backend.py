"""Which implementation runs: Triton kernels on GPUs, C kernels on CPUs, plain PyTorch operations elsewhere."""

import importlib
import logging
import os
from functools import lru_cache

import torch
from timm.layers import is_exportable, is_scriptable

_logger = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "cpu", "torch")
ENVIRONMENT = "HGRN_VISION_BACKEND"
_DEVICES = {"triton": ("cuda",), "cpu": ("cpu",)}
_DTYPES = {
    "triton": (torch.float16, torch.bfloat16, torch.float32),
    "cpu": (torch.bfloat16, torch.float32, torch.float64),
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_chosen: str | None = None


class set_backend:
    """Choose the backend for what follows, or inside a `with`: 'auto', 'triton', 'cpu' or 'torch'.

    A backend asked for by name raises where it cannot run; 'auto' takes the fastest that can.
    """

    def __init__(self, name: str):
        global _chosen
        _check_name(name, "set_backend")
        self.previous = _chosen
        _chosen = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc) -> None:
        global _chosen
        _chosen = self.previous


def get_backend() -> str:
    """What set_backend chose, else what the environment variable HGRN_VISION_BACKEND says, else 'auto'."""
    if _chosen is not None:
        return _chosen
    name = os.environ.get(ENVIRONMENT) or "auto"
    _check_name(name, ENVIRONMENT)
    return name


def _check_name(name: str, where: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{where}: backend must be one of {', '.join(BACKENDS)}, got {name!r}")


@lru_cache
def kernels(backend: str, operation: str = "scan"):
    """The module of a backend's kernels for an operation, imported on first use."""
    return importlib.import_module(f"hgrn_vision.kernels.{backend}_{operation}")


@lru_cache
def unavailable(backend: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why a backend cannot run on this machine, or None if it can; builds the CPU's kernels where that is to do."""
    try:
        kernels(backend)
    except ImportError as error:
        return str(error)
    return kernels(backend, "library").unavailable(dtype) if backend == "cpu" else None


def _unfit(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot take such a tensor, or None if it can."""
    if backend == "torch" or device.type == "meta":
        return None
    if device.type not in _DEVICES[backend] and not (backend == "triton" and _interpreted()):
        return f"it has no kernels for {device.type} tensors"
    if dtype not in _DTYPES[backend]:
        return f"it has no kernels for {dtype}"
    return unavailable(backend, dtype)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def choose(device: torch.device, dtype: torch.dtype) -> str:
    """The backend that 'auto' takes for such tensors; says so once."""
    backend = {"cuda": "triton", "cpu": "cpu"}.get(device.type, "torch")
    reason = _unfit(backend, device, dtype)
    if reason:
        _logger.info("torch backend for %s on %s: %s cannot run, %s", dtype, device.type, backend, reason)
        return "torch"
    _logger.info("%s backend for %s on %s", backend, dtype, device.type)
    return backend


def resolve(x: torch.Tensor, name: str | None) -> str:
    """The backend to run for x: `name` if given, else the one that was set, else what 'auto' takes."""
    name = get_backend() if name is None else name
    # what is scripted, traced or exported must hold plain operations
    if name == "auto" and (is_scriptable() or is_exportable() or torch.jit.is_tracing()):
        return "torch"
    return _resolve(name, x.device, x.dtype)


@torch.compiler.assume_constant_result
def _resolve(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if name == "auto":
        return choose(device, dtype)
    _check_name(name, "hgru_scan")
    reason = _unfit(name, device, dtype)
    if reason:
        raise RuntimeError(f"backend {name!r} was asked for but cannot run: {reason}; 'auto' takes one that can")
    return name


def needs_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Whether an operation on these tensors must be seen by autograd, a compiler, a tracer, a mode or a transform.

    If not, its kernel can be called at once: PyTorch's dispatcher costs as much as the scan of a small image.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    grad = torch.is_grad_enabled()
    return any(t is not None and (type(t) not in _PLAIN or t.is_meta or (grad and t.requires_grad)) for t in tensors)

"""Which implementation runs: Triton kernels on GPUs, C kernels on CPUs, plain PyTorch operations elsewhere.

A backend is a row of TABLE: the devices and dtypes it supports, and a module for each operation it has kernels for.
Such a module implements its operation's protocol in OPERATIONS. Its functions take and return plain tensors whose
shapes, dtypes and devices have already been checked. An operation without a module runs as plain PyTorch operations.
"""

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import torch
from timm.layers import is_exportable, is_scriptable

_logger = logging.getLogger(__name__)

ENVIRONMENT = "HGRN_VISION_BACKEND"
Tensor = torch.Tensor


class ScanKernels(Protocol):
    """The scan defined in kernels/reference.py, over one sequence (width 0) or a grid with rows of `width` tokens."""

    @staticmethod
    def states_shape(B: int, T: int, D: int, K: int, width: int = 0) -> tuple[int, ...]:
        """The shape of the states that forward saves for backward."""

    @staticmethod
    def forward(
        x: Tensor, lower_bound: Tensor, theta: Tensor, bias: Tensor | None, width: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The gated states (B, T, 2D) in the dtype of x, and the states for backward in the dtype of lower_bound."""

    @staticmethod
    def backward(
        dout: Tensor, x: Tensor, lower_bound: Tensor, theta: Tensor, bias: Tensor | None, states: Tensor, width: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dx, dbias (empty without a bias), dlower_bound and dtheta."""


class GluKernels(Protocol):
    """SiLU(a) * v with [a | v] = x + bias, x (..., 2H)."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None) -> Tensor:
        """(..., H) in the dtype of x."""

    @staticmethod
    def backward(dout: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """dx and dbias (empty without a bias)."""


class ConvKernels(Protocol):
    """The depthwise convolution of tokens x (B, T, D) in rows of `width` with weight (D, 1, side, side)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, width: int) -> Tensor:
        """(B, T, D) in the dtype of x."""

    @staticmethod
    def backward(dout: Tensor, x: Tensor, weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """dx and dweight."""


class BlockKernels(Protocol):
    """A residual block with an output gate and without dropout, in inference."""

    @staticmethod
    def is_faster(x: Tensor) -> bool:
        """Whether forward can run here for tokens x (B, T, D) and is faster than the separate layers."""

    @staticmethod
    def weights_of(block: torch.nn.Module, lower_bound: Tensor) -> dict[str, Tensor | None]:
        """The weights that forward takes, by their path in the block; None for those that the block lacks."""

    @staticmethod
    def fits(x: Tensor, weights: Mapping[str, Tensor]) -> bool:
        """Whether the weights have the dtype and shapes that tokens x require."""

    @staticmethod
    def forward(
        x: Tensor,
        weights: Mapping[str, Tensor],
        eps: tuple[float, float, float],
        grid: tuple[int, int] | None = None,
        rows_and_columns: bool = False,
        conv: Tensor | None = None,
    ) -> Tensor:
        """The block's output; `eps` holds the epsilons of norm1, the mixer's norm and norm2."""


OPERATIONS = {"scan": ScanKernels, "glu": GluKernels, "conv": ConvKernels, "block": BlockKernels}


@dataclass(frozen=True)
class Backend:
    """The devices and dtypes a backend supports, and its module in kernels/ for each operation."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    modules: Mapping[str, str]


TABLE = {
    "triton": Backend(("cuda",), (torch.float16, torch.bfloat16, torch.float32), {"scan": "triton_scan"}),
    "cpu": Backend(
        ("cpu",),
        (torch.bfloat16, torch.float32, torch.float64),
        {"scan": "cpu_scan", "glu": "cpu_glu", "conv": "cpu_conv", "block": "cpu_block"},
    ),
    # plain operations take any device and dtype
    "torch": Backend((), (), {}),
}
BACKENDS = ("auto", *TABLE)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_chosen: str | None = None


class set_backend:
    """Choose the backend from here on, or inside a `with` block: 'auto', 'triton', 'cpu' or 'torch'.

    A backend requested by name raises an error where it cannot run. 'auto' picks the device's kernels if they can run,
    otherwise plain PyTorch.
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
    """The backend from set_backend, else from the environment variable HGRN_VISION_BACKEND, else 'auto'."""
    if _chosen is not None:
        return _chosen
    name = os.environ.get(ENVIRONMENT) or "auto"
    _check_name(name, ENVIRONMENT)
    return name


def _check_name(name: str, where: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{where}: backend must be one of {', '.join(BACKENDS)}, got {name!r}")


def has_kernels(backend: str, operation: str) -> bool:
    """Whether a backend has its own kernels for an operation."""
    return operation in TABLE[backend].modules


@lru_cache
def kernels(backend: str, operation: str) -> ModuleType:
    """A backend's module for an operation, imported on first use."""
    return importlib.import_module(f"hgrn_vision.kernels.{TABLE[backend].modules[operation]}")


@lru_cache
def unavailable(backend: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why a backend cannot run on this machine, or None if it can; builds the C kernels if they are not built yet."""
    try:
        for operation in TABLE[backend].modules:
            kernels(backend, operation)
    except ImportError as error:
        return str(error)
    if backend == "cpu":
        from .kernels import cpu_library

        return cpu_library.unavailable(dtype)
    return None


def _unfit(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot take such a tensor, or None if it can."""
    if backend == "torch" or device.type == "meta":
        return None
    if device.type not in TABLE[backend].devices and not (backend == "triton" and _interpreted()):
        return f"it has no kernels for {device.type} tensors"
    if dtype not in TABLE[backend].dtypes:
        return f"it has no kernels for {dtype}"
    return unavailable(backend, dtype)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def choose(device: torch.device, dtype: torch.dtype) -> str:
    """The backend that 'auto' picks for such tensors; logs the choice once."""
    backend = {"cuda": "triton", "cpu": "cpu"}.get(device.type, "torch")
    reason = _unfit(backend, device, dtype)
    if reason:
        _logger.info("torch backend for %s on %s: %s cannot run, %s", dtype, device.type, backend, reason)
        return "torch"
    _logger.info("%s backend for %s on %s", backend, dtype, device.type)
    return backend


def backend_for(x: torch.Tensor, name: str | None) -> str:
    """The backend to use for x: `name` if given, else the one that was set, else what 'auto' picks."""
    name = get_backend() if name is None else name
    # a scripted, traced or exported model must consist of plain operations
    if name == "auto" and (is_scriptable() or is_exportable() or torch.jit.is_tracing()):
        return "torch"
    return _checked(name, x.device, x.dtype)


@torch.compiler.assume_constant_result
def _checked(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend of that name; an error if it cannot take such tensors."""
    if name == "auto":
        return choose(device, dtype)
    _check_name(name, "hgru_scan")
    reason = _unfit(name, device, dtype)
    if reason:
        raise RuntimeError(f"backend {name!r} was requested but cannot run: {reason}; 'auto' picks one that can")
    return name


def needs_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd, a compiler, a tracer, a mode or a transform must see an operation on these tensors.

    If not, its kernel can be called directly: PyTorch's dispatcher costs as much as the scan of a small image.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    grad = torch.is_grad_enabled()
    return any(t is not None and (type(t) not in _PLAIN or t.is_meta or (grad and t.requires_grad)) for t in tensors)

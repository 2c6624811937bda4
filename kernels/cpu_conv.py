"""Launchers of the CPU kernels for the depthwise convolution over the grid of tokens (cpu_conv.c).

Functions here take and return plain tensors: dtypes, shapes and devices are checked by the caller.
"""

import torch

from .cpu_library import ROWS, call, threads


def forward(x: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens x (B, T, D) in rows of `width`, convolved with weight (D, 1, side, side), zero beyond the image."""
    return _convolve(x, by_tap(weight, x.dtype), width)


def backward(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dx, dweight) for dout (B, T, D)."""
    taps = by_tap(weight, x.dtype)
    side = taps.shape[0]
    dout, sizes = dout.contiguous(), _sizes(x, width, side)
    partial = torch.empty(x.shape[0], -(-sizes[1] // ROWS), *taps.shape, dtype=taps.dtype)
    dtaps = torch.empty(taps.shape, dtype=taps.dtype)
    call("conv_backward_weight", x, dout, x.contiguous(), partial, dtaps, *sizes, threads(x))
    dweight = dtaps.permute(2, 0, 1).reshape(weight.shape).to(weight.dtype)
    return _convolve(dout, taps.flip(0, 1).contiguous(), width), dweight


def by_tap(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight (D, 1, side, side) with channels last, (side, side, D), in the dtype that the kernels compute in."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return weight.squeeze(1).permute(1, 2, 0).to(real).contiguous()


def _convolve(x: torch.Tensor, taps: torch.Tensor, width: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    call("conv_forward", x, x.contiguous(), taps, out, *_sizes(x, width, taps.shape[0]), threads(x))
    return out


def _sizes(x: torch.Tensor, width: int, side: int) -> tuple[int, int, int, int, int]:
    B, T, D = x.shape
    return B, T // width, width, D, side

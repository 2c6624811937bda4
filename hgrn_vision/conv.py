"""local_conv: a depthwise convolution over the token grid, as one operation."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function

from .backend import backend_for, has_kernels, kernels, needs_dispatcher
from .scan import check_grid


@register_notrace_function
def local_conv(
    x: torch.Tensor, weight: torch.Tensor, grid: tuple[int, int], backend: str | None = None
) -> torch.Tensor:
    """Convolve each channel over neighbouring tokens, with zeros beyond the edge of the image.

    Args:
        x: tokens (B, H W, D), row by row.
        weight: (D, 1, side, side), side odd.
        grid: (H, W).
        backend: as for hgru_scan.

    Returns:
        Tokens (B, H W, D).
    """
    if torch.jit.is_scripting():
        return _plain(x, weight, grid)
    check_grid(grid, x.shape[1])
    if weight.shape[-1] % 2 == 0:
        raise ValueError(f"local_conv: the side of the kernel must be odd, got {weight.shape[-1]}")
    backend = backend_for(x, backend)
    # the kernel computes in the dtype of x; autocast may want another
    if not has_kernels(backend, "conv") or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return _plain(x, weight, grid)
    if needs_dispatcher(x, weight):
        return _local_conv(x, weight, grid[1], backend)
    return kernels(backend, "conv").forward(x, weight, grid[1])


def _plain(x: torch.Tensor, weight: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    # channels stay last in memory
    x = x.unflatten(1, [grid[0], grid[1]]).permute(0, 3, 1, 2)
    x = F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return x.permute(0, 2, 3, 1).flatten(1, 2)


@torch.library.custom_op("hgrn_vision::local_conv", mutates_args=())
def _local_conv(x: torch.Tensor, weight: torch.Tensor, width: int, backend: str) -> torch.Tensor:
    return kernels(backend, "conv").forward(x, weight, width)


@_local_conv.register_fake
def _(x, weight, width, backend):
    return x.new_empty(x.shape)


@torch.library.custom_op("hgrn_vision::local_conv_backward", mutates_args=())
def _local_conv_backward(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, width: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels(backend, "conv").backward(dout, x, weight, width)


@_local_conv_backward.register_fake
def _(dout, x, weight, width, backend):
    return x.new_empty(x.shape), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output):
    x, weight, ctx.width, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dout):
    return *_local_conv_backward(dout, *ctx.saved_tensors, ctx.width, ctx.backend), None, None


_local_conv.register_autograd(_backward, setup_context=_save_for_backward)

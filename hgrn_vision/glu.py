"""glu: the activation of the channel mixer, as one operation that reads its input from memory once."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function

from .backend import backend_for, has_kernels, kernels, needs_dispatcher


@register_notrace_function
def glu(x: torch.Tensor, bias: torch.Tensor | None, backend: str | None = None) -> torch.Tensor:
    """SiLU(a + bias_a) * (v + bias_v).

    Args:
        x: pre-activations (..., 2H) = [a | v], without the bias.
        bias: (2H,).
        backend: as for hgru_scan.

    Returns:
        (..., H).
    """
    if torch.jit.is_scripting():
        return _plain(x, bias)
    if x.shape[-1] % 2 or (bias is not None and bias.shape != x.shape[-1:]):
        got = None if bias is None else tuple(bias.shape)
        raise ValueError(f"glu: x must be (..., 2H) with a bias (2H,), got {tuple(x.shape)} with a bias {got}")
    backend = backend_for(x, backend)
    # there is no kernel for GPUs: torch.compile fuses the plain operations
    if bias is None or not has_kernels(backend, "glu"):
        return _plain(x, bias)
    return _glu(x, bias, backend) if needs_dispatcher(x, bias) else kernels(backend, "glu").forward(x, bias)


def _plain(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        x = x + bias.to(x.dtype)
    a, v = x.chunk(2, dim=-1)
    return F.silu(a) * v


@torch.library.custom_op("hgrn_vision::glu", mutates_args=())
def _glu(x: torch.Tensor, bias: torch.Tensor, backend: str) -> torch.Tensor:
    return kernels(backend, "glu").forward(x, bias)


@_glu.register_fake
def _(x, bias, backend):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("hgrn_vision::glu_backward", mutates_args=())
def _glu_backward(
    dout: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels(backend, "glu").backward(dout, x, bias)


@_glu_backward.register_fake
def _(dout, x, bias, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save_for_backward(ctx, inputs, output):
    x, bias, ctx.backend = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, dout):
    return *_glu_backward(dout, *ctx.saved_tensors, ctx.backend), None


_glu.register_autograd(_backward, setup_context=_save_for_backward)

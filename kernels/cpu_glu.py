"""Launchers of the fused CPU kernels for the GLU's activation (cpu_glu.c).

Functions here take and return plain tensors: dtypes, shapes and devices are checked by the caller.
"""

import torch

from .cpu_library import ROWS, call, threads


def forward(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU(a) * v with [a | v] = x + bias, x (..., 2H)."""
    H = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], H, dtype=x.dtype)
    call("glu_forward", x, x.contiguous(), _bias(bias, x), out, x.numel() // (2 * H), H, threads(x))
    return out


def backward(dout: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dx, dbias) for dout (..., H); dbias is empty without a bias."""
    H = x.shape[-1] // 2
    N = x.numel() // (2 * H)
    dx = torch.empty(x.shape, dtype=x.dtype)
    biases = _bias(bias, x)
    dbias = torch.empty(2 * H, dtype=biases.dtype)
    partial = torch.empty(-(-N // ROWS), 2 * H, dtype=biases.dtype)
    call("glu_backward", x, dout.contiguous(), x.contiguous(), biases, partial, dx, dbias, N, H, threads(x))
    return dx, dbias.to(bias.dtype) if bias is not None else torch.empty(0, dtype=dbias.dtype)


def _bias(bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.zeros(x.shape[-1], dtype=dtype) if bias is None else bias.to(dtype).contiguous()

"""hgru_scan: the gated recurrence as one operation."""

import torch
from timm.layers import register_notrace_function

from .backend import backend_for, has_kernels, kernels, needs_dispatcher
from .kernels import torch_scan


@register_notrace_function
def hgru_scan(
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None = None,
    backend: str | None = None,
    grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The gates, the recurrence in one or both directions and the output gate of an HGRU layer, as one operation.

    Args:
        x: pre-activations (B, T, 5D) = [c_re | c_im | f | g_re | g_im], or (B, T, 3D) without the output gate.
        lower_bound: lower bound of the forget gate, (D,), in float64 if x is, else in float32.
        theta: rotation per step, (K, D), same dtype: K = 2 scans in both directions, K = 1 from first to last. On a
            grid the first row applies to scans to the right and downwards, the second to the left and upwards.
        bias: bias of the projection that made x, added here; same dtype as lower_bound.
        backend: 'triton', 'cpu', 'torch' or 'auto'; by default the one that `set_backend` chose.
        grid: (H, W) of tokens in row-major order, to scan rows and columns and sum their states; None scans all tokens
            as one sequence.

    Returns:
        The gated states (B, T, 2D) = [Re | Im] in the dtype of x.
    """
    if torch.jit.is_scripting():
        return torch_scan.hgru_scan(x, lower_bound, theta, bias, grid)
    _check(x, lower_bound, theta, bias)
    if grid is not None:
        check_grid(grid, x.shape[1])
    backend = backend_for(x, backend)
    if not has_kernels(backend, "scan"):
        return torch_scan.hgru_scan(x, lower_bound, theta, bias, grid)
    width = 0 if grid is None else grid[1]
    if needs_dispatcher(x, lower_bound, theta, bias):
        return _scan(x, lower_bound, theta, bias, backend, width)[0]
    return kernels(backend, "scan").forward(x, lower_bound, theta, bias, width)[0]


def check_grid(grid: tuple[int, int], T: int) -> None:
    """Refuse a grid that does not match the number of tokens."""
    if len(grid) != 2:
        raise ValueError(f"grid must be (H, W), got {tuple(grid)}; x has {T} tokens")
    H, W = grid
    if H < 0:
        raise ValueError(f"a grid of {H} x {W} has no tokens, x has {T}")
    if H * W != T:
        raise ValueError(f"a grid of {H} x {W} has {H * W} tokens, x has {T}")


def _check(x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None) -> None:
    D = lower_bound.shape[-1] if lower_bound.dim() == 1 else 0
    if D == 0:
        raise ValueError(f"hgru_scan: lower_bound must be (D,) with D > 0, got {tuple(lower_bound.shape)}")
    if x.dim() != 3 or x.shape[-1] not in (3 * D, 5 * D):
        raise ValueError(f"hgru_scan: x must be (B, T, 3D) or (B, T, 5D) with D={D}, got {tuple(x.shape)}")
    if x.shape[1] == 0:
        raise ValueError(f"hgru_scan: x has no tokens, shape {tuple(x.shape)}")
    if theta.dim() != 2 or theta.shape[0] not in (1, 2) or theta.shape[1] != D:
        raise ValueError(f"hgru_scan: theta must be (1, {D}) or (2, {D}), got {tuple(theta.shape)}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(
            f"hgru_scan: bias must be ({x.shape[-1]},) like the last dimension of x, got {tuple(bias.shape)}"
        )
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"hgru_scan: x must be a floating-point tensor, got {x.dtype}")
    state_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, tensor in (("lower_bound", lower_bound), ("theta", theta), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != state_dtype:
            raise ValueError(f"hgru_scan: {name} must be {state_dtype} when x is {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"hgru_scan: {name} is on {tensor.device}, x on {x.device}; move them to one device")


# compilers cache graphs on disk under this name: a new layout of the states needs a new name
@torch.library.custom_op("hgrn_vision::scan", mutates_args=())
def _scan(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, backend: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated states, and the states from which backward recomputes the rest; width 0 means one sequence."""
    return kernels(backend, "scan").forward(x, lower_bound, theta, bias, width)


@_scan.register_fake
def _(x, lower_bound, theta, bias, backend, width):
    B, T, _ = x.shape
    K, D = theta.shape
    return x.new_empty(B, T, 2 * D), lower_bound.new_empty(kernels(backend, "scan").states_shape(B, T, D, K, width))


@torch.library.custom_op("hgrn_vision::scan_backward", mutates_args=())
def _scan_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    backend: str,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return kernels(backend, "scan").backward(dout, x, lower_bound, theta, bias, states, width)


@_scan_backward.register_fake
def _(dout, x, lower_bound, theta, bias, states, backend, width):
    dbias = lower_bound.new_empty(0) if bias is None else torch.empty_like(bias)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, dbias, torch.empty_like(lower_bound), torch.empty_like(theta)


def _save_for_backward(ctx, inputs, output):
    x, lower_bound, theta, bias, ctx.backend, ctx.width = inputs
    ctx.save_for_backward(x, lower_bound, theta, bias, output[1])


def _backward(ctx, dout, _):
    x, lower_bound, theta, bias, states = ctx.saved_tensors
    dx, dbias, dlower_bound, dtheta = _scan_backward(dout, x, lower_bound, theta, bias, states, ctx.backend, ctx.width)
    return dx, dlower_bound, dtheta, None if bias is None else dbias, None, None


_scan.register_autograd(_backward, setup_context=_save_for_backward)

"""Launchers of the fused CPU kernels for the HGRU scan, of a sequence (cpu_scan_*.c) or a grid (cpu_grid_*.c).

Functions here take and return plain tensors: dtypes, shapes and devices are checked by the caller.
"""

import torch

from .cpu_library import BAND, BD, CHUNK, call, threads

# gradients summed over tokens and batch: five biases, the lower bound, two angles
SUMS = 8
# values that backward keeps per token and channel of a grid
TAPE = 11


def chunk_length(T: int) -> int:
    """Tokens per chunk: if possible, there is a multiple of four chunks, which threads can share evenly."""
    return -(-T // (4 * -(-T // (4 * CHUNK))))


def states_shape(B: int, T: int, D: int, K: int, width: int = 0) -> tuple[int, int, int, int]:
    """Shape of the states that enter each chunk of tokens: (B, chunks, [Re, Im] of each direction, channels).

    A grid saves none (0 chunks): its rows and columns are short enough to be scanned again in backward.
    """
    return B, 0 if width else -(-T // chunk_length(T)), 2 * K, _padded(D)


def forward(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of x (B, T, 5D or 3D) as the reference defines it: out (B, T, 2D), and the states that backward needs.

    Tokens are one sequence, or a grid with rows of `width`.
    """
    B, T, columns = x.shape
    K, D = theta.shape
    fields, real = columns // D, lower_bound.dtype
    out = torch.empty(B, T, 2 * _padded(D), dtype=x.dtype)
    states = torch.empty(states_shape(B, T, D, K, width), dtype=real)
    inputs = _pad(x, D), *_constants(lower_bound, theta, bias, fields), channels_buffer(lower_bound)
    # gates of a batch row and channel block
    tokens = torch.empty(_places(x, D), T, 3 * BD, dtype=real)
    sizes = B, T, _padded(D), fields, K
    if width:
        sums = torch.empty(_places(x, D), T, 2 * BD, dtype=real)
        call("grid_forward", x, *inputs, tokens, sums, out, *sizes, width, threads(x))
    else:
        decays = torch.empty(B, states.shape[1], _padded(D), dtype=real)
        call("scan_forward", x, *inputs, tokens, decays, states, out, *sizes, chunk_length(T), threads(x))
    return _crop(out, D), states


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    width: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dx, dbias, dlower_bound, dtheta) for dout (B, T, 2D); dbias is empty without a bias."""
    B, T, columns = x.shape
    K, D = theta.shape
    fields, real = columns // D, lower_bound.dtype
    dx = torch.empty(B, T, fields * _padded(D), dtype=x.dtype)
    sums = torch.empty(SUMS, _padded(D), dtype=real)
    inputs = _pad(dout, D), _pad(x, D), *_constants(lower_bound, theta, bias, fields)
    channels = channels_buffer(lower_bound)
    sizes = B, T, _padded(D), fields, K
    if width:
        tapes = torch.empty(_places(x, D), T, TAPE * BD, dtype=real)
        trails = torch.empty(threads(x), max(width, T // width * min(width, BAND)), 4 * BD, dtype=real)
        partial = torch.empty(B, T // width + -(-width // BAND), SUMS, _padded(D), dtype=real)
        workspace = channels, tapes, trails, partial
        call("grid_backward", x, *inputs, *workspace, dx, sums, *sizes, width, trails.shape[1], threads(x))
    else:
        decays = torch.empty(B, states.shape[1], _padded(D), dtype=real)
        adjoints = torch.empty(states.shape, dtype=real)
        partial = torch.empty(B, states.shape[1], SUMS, _padded(D), dtype=real)
        workspace = states.contiguous(), channels, decays, adjoints, partial
        call("scan_backward", x, *inputs, *workspace, dx, sums, *sizes, chunk_length(T), threads(x))
    # copies: the results of an operator may not share memory
    dbias = sums[:fields, :D].flatten().clone() if bias is not None else torch.empty(0, dtype=sums.dtype)
    return _crop(dx, D), dbias, sums[5, :D].clone(), sums[6 : 6 + K, :D].clone()


def _places(x: torch.Tensor, D: int) -> int:
    """Batch rows and channel blocks that are processed at once: the blocks of a single row, or one per thread."""
    return _padded(D) // BD if x.shape[0] == 1 else threads(x)


def channels_buffer(like: torch.Tensor) -> torch.Tensor:
    """A buffer for what the kernels keep per channel: five biases, the lower bound, two rotations of four parts."""
    return torch.empty(14, _padded(like.shape[0]), dtype=like.dtype)


def _padded(D: int) -> int:
    return -(-D // BD) * BD


def _pad(t: torch.Tensor, D: int) -> torch.Tensor:
    """Contiguous, each row of D channels padded with zeros to a multiple of BD."""
    if D % BD == 0:
        return t.contiguous()
    return torch.nn.functional.pad(t.unflatten(-1, (-1, D)), (0, _padded(D) - D)).flatten(-2)


def _crop(t: torch.Tensor, D: int) -> torch.Tensor:
    return t if D % BD == 0 else t.unflatten(-1, (-1, _padded(D)))[..., :D].flatten(-2)


def _constants(
    lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, fields: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    D = lower_bound.shape[0]
    bias = lower_bound.new_zeros(fields * D) if bias is None else bias
    return _pad(lower_bound, D), _pad(theta, D), _pad(bias, D)

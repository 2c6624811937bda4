"""The HGRU scan in plain PyTorch operations, vectorized over tokens: for scripting, export, and where no kernel runs.

The rotation is first taken out of the recurrence: with phi_t the angle turned up to token t, exp(-i phi_t) h_t obeys a
recurrence whose decay is real, so that one real scan serves both parts, every ablation and both directions.
Everything here is differentiable by autograd, and all but the scan of exported graphs compiles in TorchScript.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F

# with a symbolic number of tokens, a chunk has EXPORT_CHUNK tokens and a chunk of chunks as many chunks; there are at
# most 2**EXPORT_LEVELS chunks of chunks, which makes 16384 tokens or 128 x 128 patches
EXPORT_CHUNK = 8
EXPORT_LEVELS = 8


def hgru_scan(
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None = None,
    grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The scan of `kernels/reference.py` (same arguments), computed in the dtype of lower_bound, returned in x's."""
    D = lower_bound.shape[0]
    z = x.to(lower_bound.dtype)
    if bias is not None:
        z = z + bias
    c, f, g = z.split([2 * D, D, x.shape[-1] - 3 * D], dim=-1)
    # from sigmoid(-f), because 1 - sigmoid(f) cancels where the decay is near 1
    rest = (1 - lower_bound) * torch.sigmoid(-f)
    c = F.silu(c).unflatten(-1, (2, D))  # (B, T, 2, D)
    h = scan_tokens(1 - rest, rest.unsqueeze(-2) * c, theta, grid).flatten(-2)  # (B, T, 2D)
    if x.shape[-1] == 5 * D:
        h = h * torch.sigmoid(g)
    return h.to(x.dtype)


def scan_tokens(
    decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor, grid: tuple[int, int] | None
) -> torch.Tensor:
    """The recurrence along all tokens, or along the rows and along the columns of their grid, summed.

    Args:
        decay: (B, T, D).
        x: real and imaginary parts of the input, (B, T, 2, D).
        theta: rotation per token, (K, D), or each token's own, (B, T, K, D).
        grid: (H, W), or None for one sequence of all tokens.
    """
    if grid is None:
        return complex_scan(decay, x, theta)
    H, W = grid
    total = torch.zeros_like(x)
    for columns in (False, True):
        turns = theta if theta.dim() == 2 else lines(theta, H, W, columns)
        h = complex_scan(lines(decay, H, W, columns), lines(x, H, W, columns), turns)
        h = h.unflatten(0, (-1, W if columns else H))  # (B, lines, tokens of each, 2, D)
        total = total + (h.transpose(1, 2) if columns else h).flatten(1, 2)
    return total


def lines(x: torch.Tensor, H: int, W: int, columns: bool) -> torch.Tensor:
    """The rows (B H, W, ...) or the columns (B W, H, ...) of tokens (B, H W, ...)."""
    x = x.unflatten(1, (H, W))
    return (x.transpose(1, 2) if columns else x).flatten(0, 1)


def turned_angles(theta: torch.Tensor, T: int) -> torch.Tensor:
    """Angle turned up to each token, counted from where each direction starts, (K, 1 or B, T, D).

    Args:
        theta: rotation per token, (K, D), or each token's own, (B, T, K, D).
        T: number of tokens.
    """
    if theta.dim() == 4:
        forward = theta[:, :, 0].cumsum(dim=1)
        if theta.shape[2] == 1:
            return forward.unsqueeze(0)
        return torch.stack([forward, theta[:, :, 1].flip(1).cumsum(dim=1)])
    # in float64: in float32, after 100 tokens t * theta is off by as much as the state's own rounding
    steps = torch.arange(T, device=theta.device, dtype=torch.float32 if theta.device.type == "mps" else torch.float64)
    return (theta.to(steps.dtype).unsqueeze(1) * steps.unsqueeze(-1)).unsqueeze(1)


def complex_scan(decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Sum over directions of h_t = decay_t exp(i theta_t) h_(t-1) + x_t, (B, T, 2, D).

    Args:
        decay: (B, T, D).
        x: real and imaginary parts, (B, T, 2, D).
        theta: as for turned_angles; the second direction starts at the last token.
    """
    if torch.jit.is_scripting():
        return _both_ways(decay, x, turned_angles(theta, x.shape[1]))
    if torch.compiler.is_exporting():
        return _exported_scan(decay, x, theta) if theta.dim() == 2 else _exported_turns(decay, x, theta)
    return _both_ways(decay, x, turned_angles(theta, x.shape[1]))


def _both_ways(decay: torch.Tensor, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """complex_scan from the angles (K, 1 or B, T, D) turned up to each token."""
    h = _rotating_scan(decay, x, angles[0])
    if angles.shape[0] == 2:
        h = h + _rotating_scan(decay.flip(1), x.flip(1), angles[1]).flip(1)
    return h


def _rotating_scan(decay: torch.Tensor, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """One direction: decay (B, T, D), x (B, T, 2, D), angle (1 or B, T, D)."""
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    h = _chunked_scan(decay.unsqueeze(-2), _rotate(x.flatten(-2), cos, -sin).unflatten(-1, (2, -1)))
    return _rotate(h.flatten(-2), cos, sin).unflatten(-1, (2, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (..., 2D) = [Re | Im], rotated."""
    re, im = x.chunk(2, dim=-1)
    return torch.cat([re * cos - im * sin, re * sin + im * cos], dim=-1)


def _chunked_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_(t-1) + x_t over dim 1, in about 2 sqrt(T) steps: within all chunks at once, then across them."""
    T = x.shape[1]
    C = math.ceil(math.sqrt(T))
    N = (T + C - 1) // C
    if N * C > T:
        decay, x = _pad_tokens(decay, N * C - T), _pad_tokens(x, N * C - T)
    local, reach = _local_scan(decay.unflatten(1, (N, C)), x.unflatten(1, (N, C)))
    # the last states of the chunks, one after the other
    ends, reaches = local[:, :, -1:].split(1, dim=1), reach[:, :, -1:].split(1, dim=1)
    carry = torch.zeros_like(ends[0])
    carries = [carry]
    for n in range(N - 1):
        carry = torch.addcmul(ends[n], reaches[n], carry)
        carries.append(carry)
    states = torch.addcmul(local, reach, torch.cat(carries, dim=1))
    return states.flatten(1, 2)[:, :T]


def _pad_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """Sequences (B, T, ...) with `count` zeros after their last token."""
    return F.pad(x, [0, 0] * (x.dim() - 2) + [0, count])


def _local_scan(decay: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence along dim 2 within each chunk, from zero, and the product of its decays up to each token."""
    decays, xs = decay.split(1, dim=2), x.split(1, dim=2)
    states, reaches = [xs[0]], [decays[0]]
    for i in range(1, len(xs)):
        states.append(torch.addcmul(xs[i], decays[i], states[-1]))
        reaches.append(reaches[-1] * decays[i])
    return torch.cat(states, dim=2), torch.cat(reaches, dim=2)


def _exported_scan(decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """complex_scan as a graph of few operators, none in float64, for a fixed or a symbolic length.

    Runtimes fuse none of this, so most of the time goes into reading and writing. Therefore both directions share the
    decays, neither is flipped, and angles count from the start of each chunk, which makes them constants of the graph
    at any length. Chunks are scanned twice: from zero for the states that leave them, then from the states that enter
    them.
    """
    B, T, _, D = x.shape
    C, N = _export_chunks(T)
    decays = _fill_chunks(decay, C, N).unsqueeze(-2)  # (B, N, C, 1, D)
    x = _fill_chunks(x.flatten(2), C, N).reshape(1, B * N, C, 2 * D)
    angle = theta.double()
    inputs, units = [], []
    for k in range(theta.shape[0]):
        cos, sin = _powers(angle[k], C, x.dtype)
        units.append((cos, sin) if k == 0 else (cos.flip(1), sin.flip(1)))
        turned = _rotate(x, units[k][0], -units[k][1])
        inputs.append(turned.reshape(B, N, C, 2, D).split(1, dim=2))
    steps = decays.split(1, dim=2)
    leaving = [_states(steps, xs, None, k == 1)[-1] for k, xs in enumerate(inputs)]
    entering = _entering_states(decays.prod(2), leaving, C * angle)
    directions = []
    for k, xs in enumerate(inputs):
        states = _states(steps, xs, entering[k], k == 1)
        h = torch.cat(states if k == 0 else states[::-1], dim=2)
        directions.append(_rotate(h.reshape(1, B * N, C, 2 * D), *units[k]))
    return _first(reduce(torch.add, directions).reshape(B, N * C, 2, D), T)


def _exported_turns(decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """_exported_scan with each token's own rotation, (B, T, K, D), which is taken out of the whole sequence."""
    directions = []
    for k, angle in enumerate(turned_angles(theta, x.shape[1])):
        cos, sin = (angle.cos(), angle.sin()) if k == 0 else (angle.cos().flip(1), angle.sin().flip(1))
        turned = _rotate(x.flatten(2), cos, -sin).reshape(x.shape)
        # the remaining recurrence is real: one direction without rotation
        still = theta.new_zeros(1, theta.shape[-1])
        if k == 1:
            h = _exported_scan(decay.flip(1), turned.flip(1), still).flip(1)
        else:
            h = _exported_scan(decay, turned, still)
        directions.append(_rotate(h.flatten(2), cos, sin).reshape(x.shape))
    return reduce(torch.add, directions)


def _export_chunks(T: int) -> tuple[int, int]:
    """Length and number of the chunks of an exported scan."""
    if isinstance(T, int):
        # the length that needs the least padding
        C = min(range(min(T, 6), 12), key=lambda C: (-T % C, abs(C - EXPORT_CHUNK)))
        return C, (T + C - 1) // C
    # at least two chunks, because the exporter treats a size of one as a constant
    return EXPORT_CHUNK, (T + 2 * EXPORT_CHUNK - 1) // EXPORT_CHUNK


def _fill_chunks(x: torch.Tensor, C: int, N: int) -> torch.Tensor:
    """Sequences (B, T, ...) padded with zeros at their end, in chunks (B, N, C, ...)."""
    if not isinstance(N, int):
        x = _first(_pad_tokens(x, 2 * C - 1), N * C)
    elif x.shape[1] < N * C:
        x = _pad_tokens(x, N * C - x.shape[1])
    return x.unflatten(1, (N, C))


def _first(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens of sequences (B, T, ...)."""
    if isinstance(count, int):
        return x[:, :count]
    # not a slice, for which the exporter compares the two lengths: its program would refuse images of some sizes
    return x.index_select(1, torch.arange(count, device=x.device))


def _powers(angle: torch.Tensor, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts of exp(i n angle), n < count, each (1, count, D), in a dtype; angle (D,) in float64."""
    if isinstance(count, int):
        angles = angle * torch.arange(count, device=angle.device).double().view(1, -1, 1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
    # without float64: n, below 2**11, times a fraction of 12 bits is exact in float32, so whole turns drop out of it
    turns = angle / (2 * math.pi)
    turns = turns - turns.floor()
    high = (turns * 4096).round() / 4096
    low = (turns - high).to(dtype)
    n = torch.arange(count, device=angle.device).to(dtype).view(1, -1, 1)
    turned = n * high.to(dtype)
    angles = (turned - turned.floor() + n * low) * (2 * math.pi)
    return angles.cos(), angles.sin()


def _states(
    decays: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], h: torch.Tensor | None, backward: bool
) -> list[torch.Tensor]:
    """h = decay h + x, step by step from the first or, if backward, from the last; h None stands for zero."""
    states = []
    for decay, x in zip(decays, xs, strict=True) if not backward else zip(decays[::-1], xs[::-1], strict=True):
        h = x if h is None else x + decay * h
        states.append(h)
    return states


def _entering_states(reach: torch.Tensor, leaving: list[torch.Tensor], angle: torch.Tensor) -> list[torch.Tensor]:
    """The state that enters each chunk, (B, N, 1, 2, D) for each direction.

    Args:
        reach: product of each chunk's decays, (B, N, 1, D).
        leaving: the state after each chunk if it starts from zero, (B, N, 1, 2, D) for each direction.
        angle: angle turned by a chunk, (K, D).
    """
    B, N, _, _, D = leaving[0].shape
    units = [_powers(a, N, reach.dtype) for a in angle]
    # from here on both directions run from first to last
    ends, reaches = [], []
    for k, h in enumerate(leaving):
        h = h.reshape(1, B, N, 2 * D)
        cos, sin = units[k]
        ends.append(_rotate(h if k == 0 else h.flip(2), cos, -sin).reshape(B, N, 1, 2, D))
        reaches.append((reach if k == 0 else reach.flip(1)).unsqueeze(2))
    decay, x = torch.cat(reaches, dim=2), torch.cat(ends, dim=2)  # (B, N, K, 1, D), (B, N, K, 2, D)
    states = _chunked_scan(decay, x) if isinstance(N, int) else _symbolic_scan(decay, x)
    states = _first(F.pad(states, [0, 0, 0, 0, 0, 0, 1, 0]), N)
    entering = []
    for k, h in enumerate(states.split(1, dim=2)):
        h = _rotate(h.reshape(1, B, N, 2 * D), *units[k])
        entering.append((h if k == 0 else h.flip(2)).reshape(B, N, 1, 2, D))
    return entering


def _symbolic_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_(t-1) + x_t over dim 1 of symbolic length: in chunks of fixed length, carried by doubling."""
    T = x.shape[1]
    C, N = _export_chunks(T)
    local, reach = _local_scan(_fill_chunks(decay, C, N), _fill_chunks(x, C, N))
    # nothing enters the first chunk; indices before it are clamped to it and therefore contribute nothing
    chunks = torch.arange(N, device=x.device)
    has_previous = (chunks > 0).to(x.dtype).view(-1, 1, 1, 1)
    previous = (chunks - 1).clamp(min=0)
    h = local[:, :, -1].index_select(1, previous) * has_previous
    decay = reach[:, :, -1].index_select(1, previous) * has_previous
    for level in range(EXPORT_LEVELS):
        source = (chunks - 2**level).clamp(min=0)
        h = torch.addcmul(h, decay, h.index_select(1, source))
        decay = decay * decay.index_select(1, source)
    return _first(torch.addcmul(local, reach, h.unsqueeze(2)).flatten(1, 2), T)

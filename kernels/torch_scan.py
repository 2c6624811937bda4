"""The HGRU scan in plain PyTorch operations, vectorized over tokens: for scripting, export, and where no kernel runs.

The rotation is taken out of the recurrence first: with phi_t the angle turned up to token t, exp(-i phi_t) h_t obeys a
recurrence whose decay is real, so that one real scan serves both parts, every ablation and both directions.
Everything here is differentiable by autograd and compiles in TorchScript.
"""

import math

import torch
import torch.nn.functional as F

# with a symbolic number of tokens, chunks have this length and there are at most 2**EXPORT_LEVELS of them:
# 16384 tokens, 128 x 128 patches
EXPORT_CHUNK = 16
EXPORT_LEVELS = 10


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
    c = F.silu(z[..., : 2 * D]).unflatten(-1, (2, D))  # (B, T, 2, D)
    f = z[..., 2 * D : 3 * D]
    decay = lower_bound + (1 - lower_bound) * torch.sigmoid(f)
    # 1 - decay, by sigmoid(-f): a subtraction would cancel where the decay is near 1
    rest = (1 - lower_bound) * torch.sigmoid(-f)
    h = scan_tokens(decay, rest.unsqueeze(-2) * c, theta, grid).flatten(-2)  # (B, T, 2D)
    if x.shape[-1] == 5 * D:
        h = h * torch.sigmoid(z[..., 3 * D :])
    return h.to(x.dtype)


def scan_tokens(
    decay: torch.Tensor, x: torch.Tensor, theta: torch.Tensor, grid: tuple[int, int] | None
) -> torch.Tensor:
    """The recurrence along all tokens, or along the rows and along the columns of their grid, summed.

    Args:
        decay: (B, T, D).
        x: real and imaginary parts of the input, (B, T, 2, D).
        theta: rotation per token, (K, D), or of each token, (B, T, K, D).
        grid: (H, W), or None for one sequence of all tokens.
    """
    if grid is None:
        return complex_scan(decay, x, turned_angles(theta, x.shape[1]))
    H, W = grid
    total = torch.zeros_like(x)
    for columns in (False, True):
        angles = turned_angles(theta if theta.dim() == 2 else lines(theta, H, W, columns), H if columns else W)
        h = complex_scan(lines(decay, H, W, columns), lines(x, H, W, columns), angles)
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
        theta: the turn of every step, (K, D), or of each token's own, (B, T, K, D).
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


def complex_scan(decay: torch.Tensor, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Sum over directions of h_t = decay_t exp(i (angle_t - angle_(t-1))) h_(t-1) + x_t.

    Args:
        decay: (B, T, D).
        x: real and imaginary parts, (B, T, 2, D).
        angles: (K, 1 or B, T, D), counted from where each direction starts: the second one starts at the last token.
    """
    if angles.shape[0] == 1:
        return _rotating_scan(decay, x, angles[0])
    if isinstance(x.shape[1], int):
        return _rotating_scan(decay, x, angles[0]) + _rotating_scan(decay.flip(1), x.flip(1), angles[1]).flip(1)
    # an exported graph spells out every step of the scan: scanning both directions at once takes half as many
    h = _rotating_scan(torch.stack([decay, decay.flip(1)]), torch.stack([x, x.flip(1)]), angles)
    return h[0] + h[1].flip(1)


def _rotating_scan(decay: torch.Tensor, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """One direction, or several along a leading dimension: decay and angle (..., T, D), x (..., T, 2, D)."""
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    decay = decay.unsqueeze(-2)
    x = _rotate(x, cos, -sin)
    h = _chunked_scan(decay, x) if isinstance(x.shape[-3], int) else _symbolic_scan(decay, x)
    return _rotate(h, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    re, im = x[..., 0, :], x[..., 1, :]
    return torch.stack([re * cos - im * sin, re * sin + im * cos], dim=-2)


def _chunked_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """h_t = decay_t h_(t-1) + x_t over dim 1, in about 2 sqrt(T) steps: all chunks at once, then their carries."""
    T = x.shape[1]
    C = math.ceil(math.sqrt(T))
    N = (T + C - 1) // C
    padding = [0, 0, 0, 0, 0, N * C - T]
    decays = F.pad(decay, padding).unflatten(1, (N, C)).unbind(2)  # C of (B, N, 1, D)
    xs = F.pad(x, padding).unflatten(1, (N, C)).unbind(2)

    h, reach = xs[0], decays[0]
    local, reaches = [h], [reach]
    for i in range(1, C):
        h = torch.addcmul(xs[i], decays[i], h)
        reach = reach * decays[i]
        local.append(h)
        reaches.append(reach)

    # h and reach are now those of each chunk's last token
    carry = torch.zeros_like(h[:, 0])
    carries = [carry]
    for n in range(N - 1):
        carry = torch.addcmul(h[:, n], reach[:, n], carry)
        carries.append(carry)
    entering = torch.stack(carries, dim=1).unsqueeze(2)  # (B, N, 1, 2, D)
    states = torch.addcmul(torch.stack(local, dim=2), torch.stack(reaches, dim=2), entering)
    return states.flatten(1, 2)[:, :T]


def _symbolic_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same recurrence over dim -3 when its length is symbolic: chunks of a fixed length, carries by doubling.

    Chunks are gathered, with at least one to spare: padding and reshaping to a multiple of the chunk make the exporter
    compare lengths, and its program then refuses images of some sizes.
    """
    T = x.shape[-3]
    chunks = torch.arange(T // EXPORT_CHUNK + 2, device=x.device)
    local, reaches = [], []
    for i in range(EXPORT_CHUNK):
        # past the end the last token is repeated, which affects no real token
        source = (chunks * EXPORT_CHUNK + i).clamp(max=T - 1)
        step, h = decay.index_select(-3, source), x.index_select(-3, source)  # (..., N, 1, D), (..., N, 2, D)
        local.append(torch.addcmul(h, step, local[-1]) if local else h)
        reaches.append(reaches[-1] * step if reaches else step)

    # nothing enters the first chunk; indices before it are clamped to it and so contribute nothing
    previous, has_previous = (chunks - 1).clamp(min=0), (chunks > 0).to(x.dtype).view(-1, 1, 1)
    entering = local[-1].index_select(-3, previous) * has_previous
    reach = reaches[-1].index_select(-3, previous) * has_previous
    for level in range(EXPORT_LEVELS):
        source = (chunks - 2**level).clamp(min=0)
        entering = torch.addcmul(entering, reach, entering.index_select(-3, source))
        reach = reach * reach.index_select(-3, source)
    states = torch.addcmul(torch.stack(local, dim=-3), torch.stack(reaches, dim=-3), entering.unsqueeze(-3))
    return states.flatten(-4, -3).index_select(-3, torch.arange(T, device=x.device))

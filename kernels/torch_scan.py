"""The HGRU scan in plain PyTorch operations, vectorised over tokens: scripting, export, and wherever no kernel runs.

The rotation is taken out of the recurrence first: with phi_t the angle turned up to token t, exp(-i phi_t) h_t obeys a
recurrence whose decay is real, so that one real scan serves both parts, every ablation and both directions.
Everything here is differentiable by autograd and compiles in TorchScript.
"""

import math

import torch
import torch.nn.functional as F

# levels of the doubling scan when the number of tokens is symbolic: 2**13 tokens, 1440 pixels a side at patch 16
EXPORT_LEVELS = 13


def hgru_scan(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The scan of `kernels/reference.py` (same arguments), computed in the dtype of lower_bound, returned in x's."""
    D = lower_bound.shape[0]
    z = x.to(lower_bound.dtype)
    if bias is not None:
        z = z + bias
    c = F.silu(z[..., : 2 * D]).unflatten(-1, (2, D))  # (B, T, 2, D)
    f = z[..., 2 * D : 3 * D]
    decay = lower_bound + (1 - lower_bound) * torch.sigmoid(f)
    # sigmoid(-f) rather than 1 - sigmoid(f), which cancels where the gate is open
    keep = (1 - lower_bound) * torch.sigmoid(-f)
    h = complex_scan(decay, keep.unsqueeze(-2) * c, constant_angles(theta, x.shape[1])).flatten(-2)  # (B, T, 2D)
    if x.shape[-1] == 5 * D:
        h = h * torch.sigmoid(z[..., 3 * D :])
    return h.to(x.dtype)


def constant_angles(theta: torch.Tensor, T: int) -> torch.Tensor:
    """Angle turned up to each token when every step turns by theta (K, D): (K, 1, T, D).

    In float64, since a float32 product t * theta is off by as much as the state's own rounding after 100 tokens.
    """
    steps = torch.arange(T, device=theta.device, dtype=torch.float32 if theta.device.type == "mps" else torch.float64)
    return (theta.to(steps.dtype).unsqueeze(1) * steps.unsqueeze(-1)).unsqueeze(1)


def complex_scan(decay: torch.Tensor, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Sum over directions of h_t = decay_t exp(i (angle_t - angle_(t-1))) h_(t-1) + x_t.

    Args:
        decay: (B, T, D).
        x: real and imaginary parts, (B, T, 2, D).
        angles: (K, 1 or B, T, D), counted from where each direction starts: the second one starts at the last token.
    """
    h = _rotating_scan(decay, x, angles[0])
    if angles.shape[0] == 2:
        h = h + _rotating_scan(decay.flip(1), x.flip(1), angles[1]).flip(1)
    return h


def _rotating_scan(decay: torch.Tensor, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    decay = decay.unsqueeze(-2)  # (B, T, 1, D)
    x = _rotate(x, cos, -sin)
    if torch.jit.is_scripting():
        h = _chunked_scan(decay, x)
    else:
        # a loop over chunks would fix the number of tokens in an exported graph
        h = _doubling_scan(decay, x) if torch.compiler.is_exporting() else _chunked_scan(decay, x)
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


def _doubling_scan(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same recurrence in log2(T) steps without a loop over tokens; T may be symbolic."""
    T = x.shape[1]
    levels = (T - 1).bit_length() if isinstance(T, int) else EXPORT_LEVELS
    for level in range(levels):
        shift = [0, 0, 0, 0, 2**level, 0]
        x = torch.addcmul(x, decay, F.pad(x, shift)[:, :T])
        decay = decay * F.pad(decay, shift)[:, :T]
    return x

"""The definition of the HGRU scan: one token at a time, in float64.

The values and gradients (by autograd) of every backend are tested against this file, so it shares no code with any of
them and is written to be checked against the paper's equations by eye.
"""

import torch


def hgru_scan(
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None = None,
    grid: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Gated complex recurrence over tokens, in one or both directions, along all tokens or along rows and columns.

    Args:
        x: pre-activations (B, T, 5D) = [c_re | c_im | f | g_re | g_im], or (B, T, 3D) without the output gate.
        lower_bound: the lower bound gamma of the forget gate, (D,).
        theta: rotation per token, (K, D): K = 1 first to last token, K = 2 also last to first, states summed.
        bias: added to x first, (5D,) or (3D,).
        grid: (H, W) if the tokens are those of an image, row by row: the state of a token is then the sum of the
            recurrences along its row and along its column, each of which starts from zero at the border.

    Returns:
        (B, T, 2D) = [Re | Im] of the gated states, in float64.
    """
    x, lower_bound, theta = x.double(), lower_bound.double(), theta.double()
    if bias is not None:
        x = x + bias.double()
    D = lower_bound.shape[0]
    c_re, c_im, f = x[..., :D], x[..., D : 2 * D], x[..., 2 * D : 3 * D]
    c = torch.complex(c_re * torch.sigmoid(c_re), c_im * torch.sigmoid(c_im))
    decay = lower_bound + (1 - lower_bound) * torch.sigmoid(f)
    rest = (1 - lower_bound) * torch.sigmoid(-f)  # 1 - decay, without cancellation where the decay is near 1

    tokens = torch.arange(x.shape[1])
    # the tokens of each sequence, (sequences, length): one of all tokens, or the rows and then the columns
    ways = [tokens[None]] if grid is None else [tokens.view(grid), tokens.view(grid).T]
    total = torch.zeros_like(c)
    for sequences in ways:
        length = sequences.shape[1]
        decays, inputs = decay[:, sequences].unbind(2), (rest * c)[:, sequences].unbind(2)  # each (B, sequences, D)
        for direction, angle in enumerate(theta):
            rotation = torch.complex(torch.cos(angle), torch.sin(angle))
            h = torch.zeros_like(inputs[0])
            states = [h] * length
            for t in range(length) if direction == 0 else reversed(range(length)):
                h = decays[t] * rotation * h + inputs[t]
                states[t] = h
            in_sequence = torch.stack(states, dim=2).flatten(1, 2)
            total = total + in_sequence[:, sequences.flatten().argsort()]

    h = torch.cat([total.real, total.imag], dim=-1)
    if x.shape[-1] == 5 * D:
        h = torch.sigmoid(x[..., 3 * D :]) * h
    return h

"""Analysis of what a model does with images: token mixing as in the paper, and the evidence in each patch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..layers import Recurrence

STEPS_AT_ONCE = 8


def mixing_rows(decay: torch.Tensor, input_gate: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of Lambda, the matrix of a scan without its rotation: row t holds the weight of each token in state t.

    Args:
        decay: decay of one image's tokens, in the order of the scan, (T, D).
        input_gate: factor of the input, (T, D).

    Yields:
        input_gate_s decay_(s+1) ... decay_t for every token s, zero after t, (T, D).
    """
    # repeated multiplication rather than differences of summed logarithms, which fail for a decay of zero
    row = torch.zeros_like(input_gate)
    for t in range(len(decay)):
        row = row * decay[t]
        row[t] = input_gate[t]
        yield row


def scanned_lines(recurrence: Recurrence) -> list[torch.Tensor]:
    """The token numbers of every sequence that a layer scans: all tokens, or each row and each column."""
    tokens = torch.arange(recurrence.decay.shape[1])
    return [tokens] if recurrence.grid is None else [*tokens.view(recurrence.grid), *tokens.view(recurrence.grid).T]


def mixing_matrix(recurrence: Recurrence, image: int = 0) -> torch.Tensor:
    """The complex token-mixing matrix A of a layer in every channel, h = A c, summed over directions: (D, T, T)."""
    T, D = recurrence.decay.shape[1:]
    matrix = torch.zeros(D, T, T, dtype=torch.complex128, device=recurrence.decay.device)
    for line in scanned_lines(recurrence):
        total = 0
        for direction, angle in enumerate(recurrence.angles(line, image)):  # (tokens of the line, D)
            decay, input_gate = recurrence.decay[image, line], recurrence.input_gate[image, line]
            if direction == 1:
                decay, input_gate = decay.flip(0), input_gate.flip(0)
            decays = torch.stack(list(mixing_rows(decay, input_gate)))
            turned = angle.unsqueeze(1) - angle.unsqueeze(0)
            one = torch.polar(decays.to(turned.dtype), turned).permute(2, 0, 1)
            total = total + (one.flip(1, 2) if direction == 1 else one)
        matrix[:, line[:, None], line] += total
    return matrix


def mixing_strength(recurrence: Recurrence, image: int = 0) -> np.ndarray:
    """|A| of each scan of a layer, averaged over channels and summed over the scans, (T, T).

    The rotation does not change absolute values, so only the gates matter.
    """
    T = recurrence.decay.shape[1]
    total = recurrence.decay.new_zeros(T, T)
    for line in scanned_lines(recurrence):
        decay, input_gate = recurrence.decay[image, line], recurrence.input_gate[image, line]
        strength = torch.stack([row.mean(dim=-1) for row in mixing_rows(decay, input_gate)])
        if scans_both_ways(recurrence):
            rows = mixing_rows(decay.flip(0), input_gate.flip(0))
            strength = strength + torch.stack([row.mean(dim=-1) for row in rows]).flip(0, 1)
        total[line[:, None], line] += strength
    return total.cpu().numpy()


def scans_both_ways(recurrence: Recurrence) -> bool:
    """Whether a layer scans from both ends."""
    return recurrence.theta.shape[-2] == 2


def describe_scan(recurrence: Recurrence) -> str:
    """The directions of a layer's scans, as a caption for its mixing matrix."""
    both = scans_both_ways(recurrence)
    if recurrence.grid is None:
        return "below the diagonal first to last token, above it last to first" if both else "first to last token"
    return "along rows and columns, both ways" if both else "along rows to the right and columns downwards"


class Evidence(NamedTuple):
    """Where in the image the answer comes from."""

    cells: np.ndarray  # (H, W) of patches; what each adds to the log-probability of the class
    gain: float  # log-probability of the class for the image minus that for the empty image


def evidence(model: nn.Module, image: torch.Tensor, target: int, steps: int = 64) -> Evidence:
    """What each patch contributes to the log-probability of a class, by integrated gradients (arXiv 1703.01365).

    There is no class token whose attention could be shown. The scans spread the content of each patch over all tokens,
    so the tokens of the last block no longer tell where something was seen. So this measures the contribution of the
    pixels themselves: the gradient, averaged along the straight line from an empty image to this one, times the
    difference of the two. The contributions sum to the gain in log-probability, up to an error that shrinks as `steps`
    grows. The empty image has the image's median colour, so that a plain background does not count as evidence.

    Args:
        model: a classifier in evaluation mode.
        image: normalised, (C, H, W).
        target: number of the class.
        steps: number of points on that line.
    """
    empty = image.flatten(1).median(dim=1).values.view(-1, 1, 1).expand_as(image)
    shares = (torch.arange(steps, device=image.device) + 0.5) / steps
    total = torch.zeros_like(image)
    for share in shares.split(STEPS_AT_ONCE):
        points = (empty + share.view(-1, 1, 1, 1) * (image - empty)).requires_grad_()
        score = class_scores(model(points))[:, target].sum()
        total += torch.autograd.grad(score, points)[0].sum(dim=0)
    pixels = ((image - empty) * total / steps).sum(dim=0)  # (H, W)
    with torch.no_grad():
        at_end, at_start = class_scores(model(torch.stack([image, empty])))[:, target].tolist()
    height, width = model.patch_embed.patch_size
    # the model pads images to whole patches
    pixels = F.pad(pixels, (0, -pixels.shape[1] % width, 0, -pixels.shape[0] % height))
    cells = pixels.unfold(0, height, height).unfold(1, width, width).sum(dim=(2, 3))
    return Evidence(cells.cpu().numpy(), at_end - at_start)


def class_scores(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, or the output itself if there is only one."""
    return logits.log_softmax(dim=-1) if logits.shape[-1] > 1 else logits

"""Analysis of what a model does with images: forget gates and token mixing as in the paper, and evidence by patch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS_AT_ONCE = 8


def mixing_rows(decay: torch.Tensor, input_gate: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of Lambda, the matrix of a scan without its rotation: row t holds the share of each token in state t.

    Args:
        decay: of one image, in the order of the scan, (T, D).
        input_gate: factor of the input, (T, D).

    Yields:
        keep_s decay_(s+1) ... decay_t for every token s, zero after t, (T, D).
    """
    # one multiplication per token instead of differences of summed logarithms, which a decay of zero would break
    row = torch.zeros_like(input_gate)
    for t in range(len(decay)):
        row = row * decay[t]
        row[t] = input_gate[t]
        yield row


def mixing_matrix(recurrence: NamedTuple, image: int = 0) -> torch.Tensor:
    """The complex token-mixing matrix A of a layer in every channel, h = A c, summed over directions: (D, T, T)."""
    matrix = 0
    for direction, angles in enumerate(recurrence.angles):
        angle = angles[min(image, len(angles) - 1)]  # (T, D)
        decay, input_gate = recurrence.decay[image], recurrence.input_gate[image]
        if direction == 1:
            decay, input_gate = decay.flip(0), input_gate.flip(0)
        decays = torch.stack(list(mixing_rows(decay, input_gate)))  # (T, T, D)
        turned = angle.unsqueeze(1) - angle.unsqueeze(0)
        one = torch.polar(decays.to(turned.dtype), turned).permute(2, 0, 1)
        matrix = matrix + (one.flip(1, 2) if direction == 1 else one)
    return matrix


def mixing_strength(recurrence: NamedTuple, image: int = 0) -> np.ndarray:
    """|A| of a layer, averaged over channels and summed over directions, (T, T).

    The rotation does not change absolute values, so that the decays are enough.
    """
    decay, input_gate = recurrence.decay[image], recurrence.input_gate[image]
    strength = torch.stack([row.mean(dim=-1) for row in mixing_rows(decay, input_gate)])
    if len(recurrence.angles) == 2:
        rows = mixing_rows(decay.flip(0), input_gate.flip(0))
        strength = strength + torch.stack([row.mean(dim=-1) for row in rows]).flip(0, 1)
    return strength.cpu().numpy()


class Evidence(NamedTuple):
    """Where the answer comes from."""

    cells: np.ndarray  # (H, W) of patches; what each adds to the log-probability of the class
    gain: float  # log-probability of the class on the image, less that on the empty image


def evidence(model: nn.Module, image: torch.Tensor, target: int, steps: int = 64) -> Evidence:
    """What each patch contributes to the log-probability of a class, by integrated gradients (arXiv 1703.01365).

    There is no class token whose attention could be shown, and the scans of both directions carry what a patch holds
    to all tokens, so that the tokens of the last block no longer say where something was seen. Hence the contribution
    of the pixels themselves: the gradient, averaged along the straight line from an empty image to this one, times the
    difference. Summed over the whole image the contributions are exactly the gain in log-probability, up to the number
    of steps, which can be checked. The empty image has the image's median colour: a plain background is no evidence.

    Args:
        model: a classifier in evaluation mode.
        image: normalised, (C, H, W).
        target: number of the class.
        steps: points on that line.
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
    # images that are not whole patches are padded by the model
    pixels = F.pad(pixels, (0, -pixels.shape[1] % width, 0, -pixels.shape[0] % height))
    cells = pixels.unfold(0, height, height).unfold(1, width, width).sum(dim=(2, 3))
    return Evidence(cells.cpu().numpy(), at_end - at_start)


def class_scores(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities; the output itself where there is only one."""
    return logits.log_softmax(dim=-1) if logits.shape[-1] > 1 else logits

"""What a model costs before it is trained: parameters, and multiply-adds for one image."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..hgrn import HgrnDeit


def count_parameters(model: nn.Module) -> int:
    """How many parameters the model has, frozen ones included."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model: nn.Module, input_size: tuple[int, int, int]) -> int:
    """Multiply-adds for one image: matmuls, convolutions, attention and the recurrence of our own models.

    Norms and activation functions are not counted. Nothing is computed: tensors on the meta device are shapes alone.
    """
    shapes = copy.deepcopy(model).eval().to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shapes(torch.empty(1, *input_size, device="meta"))
    cost = counter.get_total_flops() // 2
    if isinstance(model, HgrnDeit):
        height, width = model.patch_embed.dynamic_feat_size(input_size[1:])
        cost += recurrence_cost(model, height * width)
    return cost


def recurrence_cost(model: nn.Module, tokens: int) -> int:
    """Multiply-adds of the gated recurrence for an image of `tokens` tokens."""
    cost = 0
    for block in model.blocks:
        mixer = block.mixer
        directions = (1 + mixer.bidirectional) * (2 if mixer.scan == "2d" else 1)
        # per token and channel: 1 for the decay, 2 for its complement times c, 2 for the output gate;
        # in each direction 2 for the rotation times the decay, 4 for their product times the state
        cost += (3 + 2 * mixer.output_gate + 6 * directions) * tokens * mixer.dim
    return cost

"""Saving memory in training: autograd keeps the recipe of a tensor that is cheap to compute again, not the tensor."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def recomputed(tensor: torch.Tensor, function: Callable[[], torch.Tensor]) -> AbstractContextManager:
    """Where autograd would save `tensor` inside this context, it saves `function`, which makes the tensor anew.

    Args:
        tensor: what the operations inside take as their input.
        function: gives the same values; called once in backward, without autograd.
    """
    # a compiler decides itself what to keep, and a symbolic trace computes nothing
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or isinstance(tensor, torch.fx.Proxy):
        return nullcontext()
    pointer, numel = tensor.data_ptr(), tensor.numel()

    def pack(saved: torch.Tensor):
        # autograd saves the tensor itself or a view of it as a matrix
        is_ours = saved.numel() == numel and saved.data_ptr() == pointer
        return saved.shape if is_ours else saved

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.no_grad():
            return function().view(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

"""Saving memory in training: tensors that are cheap to compute are not saved for backward but recomputed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def recomputed(tensor: torch.Tensor, function: Callable[[], torch.Tensor]) -> AbstractContextManager:
    """A context in which autograd does not save `tensor` but calls `function` in backward to recompute it.

    Args:
        tensor: an input of the operations in the context.
        function: returns the same values; called without autograd, once per use in backward.
    """
    # torch.compile decides for itself what to save, and a symbolic trace computes nothing
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

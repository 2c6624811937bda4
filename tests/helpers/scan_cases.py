"""Inputs and error measures shared by the tests of the scan's backends."""

import torch


def inputs(B, T, D, K, parts, dtype=torch.float64, scale=1.0, grad=True):
    """x, lower_bound, theta, bias of a scan, made in float64 so that every dtype gets the same numbers, rounded."""
    generator = torch.Generator().manual_seed(B * 1000003 + T * 1009 + D * 31 + K * 7 + parts)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = (
        (scale * normal(B, T, parts * D)).to(dtype),
        torch.rand(D, generator=generator, dtype=torch.float64).to(state_dtype),
        normal(K, D).to(state_dtype),
        normal(parts * D).to(state_dtype),
    )
    return tuple(tensor.requires_grad_(grad) for tensor in tensors)


def with_grads(scan, x, lower_bound, theta, bias, **kwargs):
    """The output and every gradient of a scan for a fixed gradient of its output, by name."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, lower_bound, theta, bias)]
    out = scan(*leaves[:3], bias=leaves[3], **kwargs)
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(x.dtype)
    out.backward(dout.to(out.dtype))
    names = ("x", "lower_bound", "theta", "bias")
    grads = {f"d{name}": leaf.grad for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
    return {"out": out.detach(), **grads}


def relative_error(got, want):
    """Largest error over largest magnitude."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300)).item()

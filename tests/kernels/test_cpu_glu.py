"""The launchers of the GLU's kernels: strides and dtypes of their inputs."""

import pytest
import torch
import torch.nn.functional as F

from hgrn_vision.kernels import cpu_glu, cpu_library

REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C kernels here: {REASON}")


def wanted(x, bias, dout):
    """Output and gradients in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, bias)]
    a, v = (leaves[0] + leaves[1]).chunk(2, dim=-1)
    out = F.silu(a) * v
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def test_any_strides():
    x, bias, dout = (
        torch.randn(34, 5, 7).permute(1, 2, 0),
        torch.randn(34, 2)[:, 1],
        torch.randn(17, 7, 5).permute(2, 1, 0),
    )
    assert not (x.is_contiguous() or bias.is_contiguous() or dout.is_contiguous())
    got = cpu_glu.forward(x, bias), *cpu_glu.backward(dout, x, bias)
    for ours, theirs in zip(got, wanted(x, bias, dout), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype, bias_dtype", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)])
def test_the_gradient_of_the_bias_has_its_dtype(dtype, bias_dtype):
    x, bias, dout = torch.randn(3, 10).to(dtype), torch.randn(10).to(bias_dtype), torch.randn(3, 5).to(dtype)
    dx, dbias = cpu_glu.backward(dout, x, bias)
    assert (dx.dtype, dbias.dtype) == (dtype, bias_dtype)
    torch.testing.assert_close(dbias.double(), wanted(x, bias, dout)[2], atol=2e-2, rtol=2e-2)


def test_no_bias_has_no_gradient():
    dx, dbias = cpu_glu.backward(torch.randn(3, 5), torch.randn(3, 10), None)
    assert dx.shape == (3, 10) and dbias.shape == (0,)

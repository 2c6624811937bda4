"""The C kernels of the GLU against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from hgrn_vision.kernels import cpu_glu, cpu_library

ROWS = cpu_library.ROWS
REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C kernels here: {REASON}")


def wanted(x, bias, dout):
    """Output and gradients in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, bias)]
    a, v = (leaves[0] + leaves[1]).chunk(2, dim=-1)
    out = F.silu(a) * v
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def error(got, want):
    """Maximum error over maximum magnitude."""
    assert got.shape == want.shape
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", cpu_library.DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 17, 2 * 33), (3, 41, 2 * 128)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_matches_float64(dtype, shape, with_bias):
    x, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1]) * with_bias
    dout = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    want, want_dx, want_dbias = wanted(x, bias, dout)
    given = bias.to(torch.float64 if dtype == torch.float64 else torch.float32) if with_bias else None
    out = cpu_glu.forward(x, given)
    dx, dbias = cpu_glu.backward(dout, x, given)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    assert out.dtype == dx.dtype == dtype
    assert error(out, want) <= tolerance and error(dx, want_dx) <= tolerance
    assert error(dbias, want_dbias) <= min(tolerance, 2e-6) if with_bias else dbias.numel() == 0


@pytest.mark.parametrize("dtype, ulp", [(torch.float32, 2**-23), (torch.float64, 2**-52)])
def test_gates_keep_their_precision_when_saturated(dtype, ulp):
    a = torch.linspace(-80, 80, 4001, dtype=dtype)
    silu = cpu_glu.forward(torch.stack([a, torch.ones_like(a)], dim=-1), None).squeeze(-1)
    want = a.double() / (1 + (-a.double()).exp())
    assert ((silu.double() - want).abs() <= 4 * ulp * want.abs()).all()


def test_nan_and_infinity_are_not_hidden():
    a = torch.tensor([float("inf"), float("nan"), 1000.0, -1000.0])
    silu = cpu_glu.forward(torch.stack([a, torch.ones(4)], dim=-1), None).squeeze(-1)
    torch.testing.assert_close(silu, torch.tensor([float("inf"), float("nan"), 1000.0, 0.0]), equal_nan=True)


def test_small_gradients_are_not_lost_in_a_large_one():
    """What rows add to the gradient of the bias is summed in float64: in float32, 20 would vanish beside 40 * 2^24."""
    dout = torch.zeros(17 * ROWS, 1)
    dout[0], dout[ROWS::ROWS] = 2**24, 0.5
    x = torch.tensor([40.0, 0.0]).repeat(len(dout), 1)
    assert cpu_glu.backward(dout, x, torch.zeros(2))[1].tolist() == [0.0, 40 * 2**24 + 16 * 20]


def test_the_kernels_are_told_the_number_of_threads(monkeypatch):
    told = {}
    monkeypatch.setattr(cpu_glu, "call", lambda name, like, *args: told.update({name: args[-1]}))
    monkeypatch.setattr(cpu_glu, "threads", lambda x: 7)
    x, bias = torch.randn(3, 10), torch.randn(10)
    cpu_glu.backward(cpu_glu.forward(x, bias), x, bias)
    assert told == {"glu_forward": 7, "glu_backward": 7}


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

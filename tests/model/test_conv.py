"""local_conv: the same values from every backend, under autograd and torch.compile."""

import pytest
import torch

from hgrn_vision.backend import unavailable
from hgrn_vision.conv import _local_conv, _plain, local_conv
from hgrn_vision.kernels import cpu_conv

needs_kernel = pytest.mark.skipif(bool(unavailable("cpu")), reason="no C kernels here")


def inputs(dtype=torch.float64, grad=True):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 12, 6, dtype=dtype), torch.randn(6, 1, 3, 3, dtype=dtype)
    return x.requires_grad_(grad), weight.requires_grad_(grad)


def test_each_token_is_the_sum_of_its_weighted_neighbours():
    x, weight = inputs(grad=False)
    image = torch.nn.functional.pad(x.unflatten(1, (3, 4)), (0, 0, 1, 1, 1, 1))  # (B, H + 2, W + 2, D)
    want = sum(weight[:, 0, a, b] * image[:, a : a + 3, b : b + 4] for a in range(3) for b in range(3)).flatten(1, 2)
    for backend in ("auto", "torch"):
        assert (local_conv(x, weight, (3, 4), backend) - want).abs().max() < 1e-12


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradcheck(backend):
    assert torch.autograd.gradcheck(lambda x, weight: local_conv(x, weight, (3, 4), backend), inputs())


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "side, grid, message",
    [(3, (3, 5), "a grid of 3 x 5 has 15 tokens, x has 12"), (4, (3, 4), "the side of the kernel must be odd, got 4")],
)
def test_bad_input_is_one_clear_line(backend, side, grid, message):
    with pytest.raises(ValueError, match=message) as error:
        local_conv(torch.randn(2, 12, 6), torch.randn(6, 1, side, side), grid, backend)
    assert "\n" not in str(error.value)


@needs_kernel
def test_operation():
    torch.library.opcheck(_local_conv, (*inputs(torch.float32), 4, "cpu"))


@needs_kernel
def test_when_the_kernel_runs(monkeypatch):
    calls, forward = [], cpu_conv.forward
    monkeypatch.setattr(cpu_conv, "forward", lambda *args: calls.append(1) or forward(*args))
    x, weight = inputs(torch.float32, grad=False)
    want = local_conv(x, weight, (3, 4))
    assert len(calls) == 1
    compiled = torch.compile(local_conv, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, (3, 4)), want) and len(calls) == 2
    local_conv(x, weight, (3, 4), "torch")
    with torch.autocast("cpu", torch.bfloat16):
        assert local_conv(x, weight, (3, 4)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="type.*should be the same"):
        local_conv(x, weight.double(), (3, 4))
    scripted = torch.jit.script(_plain)
    torch.testing.assert_close(scripted(x, weight, (3, 4)), want)
    assert len(calls) == 2

"""The parts of a model that is laid out for ONNX, each against the same in float64."""

import pytest
import torch
from torch import nn

from hgrn_vision.commands._onnx_model import _units, without_biases


def test_angles_are_exact_far_from_the_start():
    """In float32 alone, the angle turned after 128 rows of 128 tokens would be off by a thousandth."""
    theta = torch.rand(2, 64, dtype=torch.float64) * 6
    for positions in (torch.arange(128), 128 * torch.arange(128), torch.arange(128, 129)):
        for k, (cos, sin) in enumerate(_units(theta, positions)):
            assert cos.dtype == sin.dtype == torch.float32
            angles = (positions if k == 0 else positions.flip(0)).double().view(-1, 1, 1) * theta[k]
            torch.testing.assert_close(
                torch.complex(cos, sin).to(torch.complex128), torch.exp(1j * angles), atol=2e-6, rtol=0
            )


@pytest.fixture
def norm_and_linears():
    """Random weights, with biases larger than those of a new model, and all in float64."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(40, eps=1e-5, dtype=torch.float64)
    linears = [nn.Linear(40, width, dtype=torch.float64) for width in (7, 64)]
    for parameter in [*norm.parameters(), *(linear.bias for linear in linears)]:
        nn.init.normal_(parameter, std=3)
    return norm, linears


def test_a_norm_carries_the_biases_of_the_layers_after_it(norm_and_linears):
    norm, linears = norm_and_linears
    # tokens of any mean and size, and one whose channels are all equal, which the norm turns into zeros
    x = torch.randn(50, 40, dtype=torch.float64) * torch.logspace(-3, 3, 50).unsqueeze(1) + torch.randn(50, 1) * 10
    x[0] = 2
    plain, without = without_biases(norm, linears)
    assert [linear.bias for linear in without] == [None, None]
    for linear, other in zip(linears, without, strict=True):
        torch.testing.assert_close(other(plain(x)), linear(norm(x)), atol=1e-10, rtol=1e-10)


def test_biases_in_float32_are_as_exact_as_before(norm_and_linears):
    norm, linears = norm_and_linears
    x = torch.randn(50, 40, dtype=torch.float64)
    exact = [linear(norm(x)) for linear in linears]
    plain, without = without_biases(norm.float(), [linear.float() for linear in linears])
    for linear, other, want in zip(linears, without, exact, strict=True):
        before = (linear(norm(x.float())) - want).abs().max()
        assert (other(plain(x.float())) - want).abs().max() < 4 * before


@pytest.mark.parametrize(
    "norm",
    [nn.RMSNorm(8), nn.Identity(), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, bias=False)],
    ids=["RMSNorm", "no norm", "no weight", "no bias"],
)
def test_other_norms_leave_the_biases_alone(norm):
    linears = [nn.Linear(8, 8)]
    assert without_biases(norm, linears) == (norm, linears)


def test_the_model_keeps_its_weights(norm_and_linears):
    norm, linears = norm_and_linears
    before = [parameter.clone() for module in (norm, *linears) for parameter in module.parameters()]
    without_biases(norm, linears)
    after = [parameter for module in (norm, *linears) for parameter in module.parameters()]
    assert all(map(torch.equal, before, after))

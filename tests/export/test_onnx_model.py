"""The parts of a model that is laid out for ONNX, each against the same in float64."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim

from hgrn_vision.export.onnx_model import (
    OPSET,
    expand_scans,
    into_pairs,
    out_of_pairs,
    scan_lines,
    scan_pairs,
    without_biases,
)


@pytest.mark.parametrize("count", range(1, 8))
def test_pairs_hold_the_first_and_the_last(count):
    tokens = torch.arange(10, 10 + count)
    pairs = into_pairs(tokens).view(-1, 2)
    assert (pairs.sum(1) == 20 + count - 1).all() and pairs[:, 0].tolist() == sorted(pairs[:, 0].tolist())
    assert out_of_pairs(pairs.flatten(), count).tolist() == tokens.tolist()


class Faded(nn.Module):
    """What the scans of a mixer put out, (T, B, 2D), for theta of one direction or two."""

    def __init__(self, theta, pairs):
        super().__init__()
        self.turns, self.pairs = (theta.cos().float(), theta.sin().float()), pairs

    def forward(self, decay, x):
        if not self.pairs:
            return scan_lines(decay, x, self.turns)
        T = x.shape[0]
        return out_of_pairs(scan_pairs(into_pairs(decay), into_pairs(x), self.turns, T), T)


def faded(decay, x, theta):
    """Token by token, in float64."""
    decay, x = decay.double(), torch.complex(*x.double().chunk(2, -1))
    total = torch.zeros_like(x)
    for k, angle in enumerate(theta):
        h = torch.zeros_like(x[0])
        for t in range(len(x)) if k == 0 else reversed(range(len(x))):
            before = decay[t] * torch.exp(1j * angle) * h
            total[t] += before
            h = before + x[t]
    return torch.cat([total.real, total.imag], -1)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, None], ids=lambda length: f"{length or 'any number of'} tokens")
@pytest.mark.parametrize("directions, pairs", [(2, True), (2, False), (1, False)], ids=["pairs", "two ways", "one way"])
def test_scans_match_a_loop_over_tokens(directions, pairs, length, tmp_path):
    torch.manual_seed(0)
    B, D = 3, 5
    theta = torch.rand(directions, D, dtype=torch.float64) * 6
    make = lambda T: (torch.rand(T, B, D), torch.randn(T, B, 2 * D))  # noqa: E731
    tokens = {0: Dim("tokens", min=4)} if length is None else None
    program = torch.export.export(Faded(theta, pairs), make(length or 8), dynamic_shapes=(tokens, tokens), strict=False)
    file = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=OPSET, input_names=["decay", "x"])
    expand_scans(file.model)
    file.save(tmp_path / "scan.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "scan.onnx", providers=["CPUExecutionProvider"])
    for T in [length] if length else [4, 5, 8, 301]:
        decay, x = make(T)
        [got] = session.run(None, {"decay": decay.numpy(), "x": x.numpy()})
        np.testing.assert_allclose(got, faded(decay, x, theta), atol=1e-5, rtol=1e-5)


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

"""The mixer and its ablations against the paper's equations, written out again here, token by token."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hgrn_vision.layers import AblatedHgru, Glu, Hgru, RmsNorm, lower_bounds

B, T, D = 2, 12, 6
GRID = (3, 4)


def plain_hgru(
    layer,
    x,
    lower_bound,
    *,
    input_gate=True,
    output_gate=True,
    forget_gate="full",
    data_dependent_theta=False,
    bidirectional=True,
    gate_after_norm=False,
    scan="1d",
):
    """The equations of the paper's section 3 on one layer's weights, one token at a time.

    In two dimensions those of the authors' BiHgru2d: the same recurrence along every row and every column of GRID.
    """
    rows = dict(c_re=D, c_im=D)
    if forget_gate == "full":
        rows["f"] = D
    if output_gate:
        rows["g"] = 2 * D
    weights = dict(zip(rows, layer.in_proj.weight.split(list(rows.values())), strict=True))
    biases = dict(zip(rows, layer.in_proj.bias.split(list(rows.values())), strict=True))
    part = {name: x @ weights[name].T + biases[name] for name in rows}
    c = torch.complex(F.silu(part["c_re"]), F.silu(part["c_im"]))

    h = torch.zeros(B, T, D, dtype=torch.complex128)
    H, W = GRID
    lines = [[i * W + j for j in range(W)] for i in range(H)] + [[i * W + j for i in range(H)] for j in range(W)]
    for line, k in product(lines if scan == "2d" else [range(T)], range(2 if bidirectional else 1)):
        state = torch.zeros(B, D, dtype=torch.complex128)
        for t in line if k == 0 else reversed(line):
            theta = layer.theta_proj(x[:, t]).split(D, dim=-1)[k] if data_dependent_theta else layer.theta[k]
            if forget_gate == "full":
                decay = lower_bound + (1 - lower_bound) * torch.sigmoid(part["f"][:, t])
            else:
                decay = lower_bound if forget_gate == "bound_only" else torch.ones(D)
            gated = c[:, t] if forget_gate == "none" or not input_gate else (1 - decay) * c[:, t]
            state = decay * torch.exp(1j * theta) * state + gated
            h[:, t] += state
    o = torch.cat([h.real, h.imag], dim=-1)
    if gate_after_norm:
        o = layer.norm(o) * F.silu(part["g"])
    else:
        o = layer.norm(torch.sigmoid(part["g"]) * o if output_gate else o)
    return o @ layer.out_proj.weight.T + layer.out_proj.bias


def randomised(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer.double()


ABLATIONS = [
    {},
    dict(bidirectional=False),
    dict(output_gate=False),
    dict(gate_after_norm=True),
    dict(input_gate=False),
    dict(forget_gate="bound_only"),
    dict(forget_gate="none"),
    dict(data_dependent_theta=True),
    dict(data_dependent_theta=True, bidirectional=False),
    dict(forget_gate="none", output_gate=False, bidirectional=False),
    dict(input_gate=False, gate_after_norm=True),
    dict(scan="2d"),
    dict(scan="2d", gate_after_norm=True),
    dict(scan="2d", bidirectional=False),
    dict(scan="2d", output_gate=False),
    dict(scan="2d", data_dependent_theta=True),
    dict(scan="2d", forget_gate="none"),
]


def make_mixer(options):
    ablated = {"input_gate", "forget_gate", "data_dependent_theta"} & set(options)
    return (AblatedHgru if ablated else Hgru)(D, **options)


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_mixer_computes_the_papers_equations(options):
    layer = randomised(make_mixer(options))
    x = torch.randn(B, T, D, dtype=torch.float64)
    lower_bound = torch.rand(D, dtype=torch.float64)
    assert (layer(x, lower_bound, grid=GRID) - plain_hgru(layer, x, lower_bound, **options)).abs().max() < 1e-10


@pytest.mark.parametrize("options", ABLATIONS[1:], ids=str)
def test_every_ablation_changes_the_numbers_and_drops_what_it_does_not_use(options):
    full, ablated = randomised(Hgru(D)), randomised(make_mixer(options))
    shared = {
        name: tensor
        for name, tensor in full.state_dict().items()
        if name in ablated.state_dict() and ablated.state_dict()[name].shape == tensor.shape
    }
    ablated.load_state_dict(shared, strict=False)
    x = torch.randn(B, T, D, dtype=torch.float64)
    lower_bound = torch.rand(D, dtype=torch.float64)
    out = ablated(x, lower_bound, grid=GRID)
    assert (out - full(x, lower_bound)).abs().max() > 1e-3
    out.pow(2).sum().backward()
    idle = [name for name, p in ablated.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert idle == []


def test_real_state_is_a_zero_theta_in_the_same_layout():
    layer = randomised(Hgru(D, complex_state=False))
    assert "theta" not in dict(layer.named_parameters())
    assert layer.theta.shape == (2, D) and not layer.theta.any()
    x, lower_bound = torch.randn(B, T, D, dtype=torch.float64), torch.rand(D, dtype=torch.float64)
    assert (layer(x, lower_bound) - plain_hgru(layer, x, lower_bound)).abs().max() < 1e-10


@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize("scan", ["1d", "2d"])
def test_the_local_convolution_mixes_the_neighbours_of_each_token(scan, side):
    layer, plain = randomised(Hgru(D, scan=scan, local_conv=side)), Hgru(D, scan=scan).double()
    weight = layer.local_conv.weight  # (D, 1, side, side)
    plain.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "local" not in name})
    x, lower_bound = torch.randn(B, T, D, dtype=torch.float64), torch.rand(D, dtype=torch.float64)
    H, W = GRID
    mixed = torch.zeros_like(x)
    for i, j, di, dj in product(range(H), range(W), range(side), range(side)):
        row, column = i + di - side // 2, j + dj - side // 2
        if 0 <= row < H and 0 <= column < W:
            mixed[:, i * W + j] += weight[:, 0, di, dj] * x[:, row * W + column]
    want = plain(mixed, lower_bound, grid=GRID)
    assert (layer(x, lower_bound, grid=GRID) - want).abs().max() < 1e-10
    recurrences = layer.recurrence(x, lower_bound, GRID), plain.recurrence(mixed, lower_bound, GRID)
    assert (recurrences[0].c - recurrences[1].c).abs().max() < 1e-12


@pytest.mark.parametrize("options", [dict(scan="2d"), dict(local_conv=3), dict(scan="2d", input_gate=False)], ids=str)
def test_a_missing_or_mismatched_grid_is_one_clear_line(options):
    layer, x, lower_bound = make_mixer(options), torch.randn(B, T, D), torch.rand(D)
    with pytest.raises(ValueError, match="needs the grid of its 12 tokens"):
        layer(x, lower_bound)
    # a class token before those of the patches
    with pytest.raises(ValueError, match="a grid of 3 x 4 has 12 tokens, x has 13"):
        layer(torch.randn(B, T + 1, D), lower_bound, grid=GRID)


def test_theta_starts_as_rotary_angles():
    theta = Hgru(8).theta
    want = torch.tensor([10000.0 ** (-2 * j / 8) for j in range(8)])
    torch.testing.assert_close(theta, want.expand(2, 8))


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_lower_bounds_grow_from_zero_and_stay_below_one(scale):
    gamma = scale * (2 * torch.rand(12, 64) - 1)
    gamma[0] = -scale  # the hardest case: the bounds come closest to 1
    bounds = lower_bounds(gamma, "increasing")
    p = gamma.double().softmax(dim=0)
    torch.testing.assert_close(bounds.double(), p.cumsum(0) - p[0], rtol=0, atol=1e-6)
    assert (bounds[0] == 0).all()
    assert (bounds.diff(dim=0) >= 0).all()
    assert (bounds < 1).all()


def test_other_kinds_of_lower_bounds():
    gamma = torch.randn(4, 3)
    torch.testing.assert_close(lower_bounds(gamma, "decreasing"), lower_bounds(gamma, "increasing").flip(0))
    torch.testing.assert_close(lower_bounds(gamma, "independent"), torch.sigmoid(gamma))
    assert lower_bounds(gamma.bfloat16(), "increasing").dtype == torch.float32
    assert lower_bounds(gamma.double(), "increasing").dtype == torch.float64


def test_decay_is_at_least_the_lower_bound():
    layer = AblatedHgru(D)
    lower_bound = torch.rand(D)
    decay, input_gate = layer.gates(10 * torch.randn(B, T, 5 * D), lower_bound)
    assert (decay >= lower_bound).all() and (decay <= 1).all()
    torch.testing.assert_close(input_gate, 1 - decay, rtol=0, atol=1e-6)


@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU])
def test_glu(act):
    glu = Glu(D, 10, act_layer=act).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    a = x @ glu.fc1.weight[:10].T + glu.fc1.bias[:10]
    v = x @ glu.fc1.weight[10:].T + glu.fc1.bias[10:]
    want = (act()(a) * v) @ glu.fc2.weight.T + glu.fc2.bias
    torch.testing.assert_close(glu(x), want)


def test_rms_norm():
    x = torch.randn(3, D, dtype=torch.float64)
    want = x / (x.square().sum(-1, keepdim=True).sqrt() / D**0.5 + 1e-8)
    torch.testing.assert_close(RmsNorm()(x), want)
    assert torch.isfinite(RmsNorm()(torch.zeros(1, D))).all()

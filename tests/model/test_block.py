import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import hgrn_vision
from hgrn_vision.block import Block
from hgrn_vision.kernels import cpu_block, cpu_library, reference
from hgrn_vision.layers import Hgru

REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(
    bool(REASON) or not cpu_block.is_faster(torch.empty(1, 1, 32)), reason=f"no kernel for blocks here: {REASON}"
)


def make_block(D=64, H=100, bidirectional=True, scan="1d", local_conv=0, **kwargs):
    torch.manual_seed(D + H)
    args = dict(proj_drop=0.0, drop_path=0.0, norm_layer=nn.LayerNorm, act_layer=nn.SiLU, device=None, dtype=None)
    args |= kwargs
    shared = {name: args[name] for name in ("proj_drop", "norm_layer")}
    mixer = Hgru(D, bidirectional, scan=scan, local_conv=local_conv, **shared)
    block = Block(mixer, H / D, **args).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def expected(block, x, lower_bound, grid=None):
    """The block from its definition, in float64; the convolution is torch's."""
    x, w = x.double(), {name: value.double() for name, value in block.state_dict().items()}
    D = x.shape[-1]

    def norm(y, name):
        return F.layer_norm(y, y.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(y, name):
        return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

    y = norm(x, "norm1")
    if block.mixer.local_conv is not None:
        weight = w["mixer.local_conv.weight"]
        image = y.unflatten(1, grid).permute(0, 3, 1, 2)
        y = F.conv2d(image, weight, padding=weight.shape[-1] // 2, groups=D).flatten(2).mT
    scanned = grid if block.mixer.scan == "2d" else None
    h = reference.hgru_scan(linear(y, "mixer.in_proj"), lower_bound.double(), w["mixer.theta"], grid=scanned)
    assert h.shape[-1] == 2 * D
    x = x + linear(norm(h, "mixer.norm"), "mixer.out_proj")
    a, v = linear(norm(x, "norm2"), "mlp.fc1").chunk(2, dim=-1)
    return x + linear(F.silu(a) * v, "mlp.fc2")


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the kernel for whole blocks."""
    made, kernel = [], cpu_block.forward
    monkeypatch.setattr(cpu_block, "forward", lambda *args: made.append(1) or kernel(*args))
    return made


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize(
    "B, T, D, H, bidirectional",
    [
        (1, 1, 32, 7, True),
        (1, 196, 192, 384, True),
        (2, 300, 96, 64, True),
        (3, 37, 64, 100, False),
        (9, 65, 32, 100, True),
        (23, 16, 64, 128, True),
        (2, 600, 32, 64, True),
    ],
)
def test_matches_the_definition(calls, threads, B, T, D, H, bidirectional):
    block = make_block(D, H, bidirectional)
    x, lower_bound = torch.randn(B, T, D), torch.rand(D)
    want = expected(block, x, lower_bound)
    for number in (1, 2, 3, 8):
        threads(number)
        calls.clear()
        assert error(block(x, lower_bound), want) <= 2e-6
        assert error(block.double()(x.double(), lower_bound.double()), want) <= 1e-12
        block.float()
        assert len(calls) == 2


@pytest.mark.parametrize(
    "B, grid, D, H, bidirectional",
    [
        (1, (1, 1), 32, 7, True),
        (1, (14, 14), 192, 384, True),
        (1, (40, 41), 32, 64, True),
        (3, (5, 19), 64, 100, False),
        (23, (3, 5), 64, 128, True),
        (2, (1, 600), 32, 64, True),
        (5, (600, 1), 32, 64, True),
    ],
)
def test_rows_and_columns_match_the_definition(calls, threads, B, grid, D, H, bidirectional):
    block = make_block(D, H, bidirectional, scan="2d")
    x, lower_bound = torch.randn(B, grid[0] * grid[1], D), torch.rand(D)
    want = expected(block, x, lower_bound, grid)
    for number in (1, 2, 3):
        threads(number)
        calls.clear()
        assert error(block(x, lower_bound, grid), want) <= 2e-6
        assert error(block.double()(x.double(), lower_bound.double(), grid), want) <= 1e-12
        block.float()
        assert len(calls) == 2


@pytest.mark.parametrize("scan", ["1d", "2d"])
@pytest.mark.parametrize("B, grid, side", [(1, (40, 41), 3), (23, (3, 5), 5), (5, (14, 14), 3), (2, (1, 600), 5)])
def test_a_local_convolution_matches_the_definition(calls, threads, scan, B, grid, side):
    block = make_block(scan=scan, local_conv=side)
    x, lower_bound = torch.randn(B, grid[0] * grid[1], 64), torch.rand(64)
    want = expected(block, x, lower_bound, grid)
    for number in (1, 2, 3):
        threads(number)
        assert error(block(x, lower_bound, grid), want) <= 2e-6
    assert len(calls) == 3
    assert error(block.double()(x.double(), lower_bound.double(), grid), want) <= 1e-12


def test_a_grid_that_does_not_fit_is_refused_before_the_kernel():
    block, x = make_block(scan="2d"), torch.randn(2, 12, 64)
    with pytest.raises(ValueError, match="a grid of 3 x 5 has 15 tokens, x has 12"):
        block(x, torch.rand(64), (3, 5))
    with pytest.raises(ValueError, match="needs the grid of its 12 tokens"):
        block(x, torch.rand(64))


def test_takes_any_strides(calls):
    block, x, lower_bound = make_block(), torch.randn(64, 2, 30), torch.rand(2, 64)[0]
    block.mlp.fc1.weight.data = block.mlp.fc1.weight.data.t().contiguous().t()
    want = expected(block, x.permute(1, 2, 0), lower_bound)
    assert error(block(x.permute(1, 2, 0), lower_bound), want) <= 2e-6 and calls


@pytest.mark.parametrize("scan, side", [("1d", 0), ("2d", 0), ("2d", 3)])
def test_stays_within_its_buffers(monkeypatch, scan, side):
    block, grid = make_block(scan=scan, local_conv=side), (10, 15)
    x, lower_bound = torch.randn(2, 150, 64), torch.rand(64)
    want, made, empty = block(x, lower_bound, grid), [], torch.empty

    def guarded_empty(*size, **kwargs):
        shape = empty(*size, device="meta").shape
        memory = torch.full((shape.numel() + 256,), 12345.0, **kwargs)
        made.append((memory, shape.numel()))
        return memory[128 : 128 + shape.numel()].view(shape)

    monkeypatch.setattr(cpu_block, "_kept", threading.local())
    monkeypatch.setattr(torch, "empty", guarded_empty)
    assert torch.equal(block(x, lower_bound, grid), want)
    assert len(made) == 3 and all((m[:128] == 12345).all() and (m[128 + n :] == 12345).all() for m, n in made)


def test_threads_do_not_share_their_memory():
    block, x, lower_bound = make_block(), torch.randn(16, 2, 50, 64), torch.rand(64)
    want = [block(image, lower_bound) for image in x]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda image: block(image, lower_bound), x))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nan_is_not_hidden():
    block, x, lower_bound = make_block(), torch.randn(2, 40, 64), torch.rand(64)
    x[1, 3, 5] = float("nan")
    out = block(x, lower_bound)
    assert out[1].isnan().all() and not out[0].isnan().any()


def replace_forward(layer):
    forward = layer.forward
    layer.forward = lambda *args: forward(*args)


class OtherNorm(nn.LayerNorm):
    pass


WATCHES = {
    "hook of the mixer's norm": lambda block: block.mixer.norm.register_forward_hook(lambda *_: None),
    "hook before fc2": lambda block: block.mlp.fc2.register_forward_pre_hook(lambda *_: None),
    "hook of the last dropout": lambda block: block.mlp.proj_drop.register_forward_hook(lambda *_: None),
    "hook of the mixer": lambda block: block.mixer.register_forward_hook(lambda *_: None),
    "wrapper of in_proj": lambda block: replace_forward(block.mixer.in_proj),
    "weight made on the way": lambda block: nn.utils.parametrizations.weight_norm(block.mlp.fc1),
    "another norm": lambda block: setattr(block, "norm2", OtherNorm(64)),
    "norm without a bias": lambda block: setattr(block, "norm1", nn.LayerNorm(64, bias=False)),
    "another activation": lambda block: setattr(block.mlp, "act", nn.GELU()) or setattr(block.mlp, "fused", False),
    "half of it in float64": lambda block: block.mlp.fc2.double(),
    "hook of the convolution": lambda block: block.mixer.local_conv.register_forward_hook(lambda *_: None),
    "another convolution": lambda block: setattr(block.mixer, "local_conv", nn.Identity()),
    "a convolution in float64": lambda block: block.mixer.local_conv.double(),
}


@pytest.mark.parametrize("change", WATCHES.values(), ids=WATCHES)
def test_layers_run_one_by_one_where_a_kernel_would_behave_differently(calls, change):
    block = make_block(local_conv=3)
    change(block)
    try:
        block(torch.randn(2, 9, 64), torch.rand(64), (3, 3))
    except (RuntimeError, TypeError) as failure:  # as from any layer with weights of another dtype or other arguments
        assert re.search("dtype|type.*should be the same|positional", str(failure))
    assert not calls


def test_gradients_of_tokens_pass_through_frozen_weights(calls):
    """As for a map of what an image is recognised by."""
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64, requires_grad=True), torch.rand(64)
    (dx,) = torch.autograd.grad(block(x, lower_bound).square().sum(), x)
    (want,) = torch.autograd.grad(expected(block, x, lower_bound).square().sum(), x)
    assert error(dx, want) <= 1e-5 and not calls


def test_autocast_runs_the_layers_one_by_one(calls):
    """Under autocast a block may get float32 tokens although its matmuls should run in bfloat16."""
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64), torch.rand(64)
    with torch.autocast("cpu", torch.bfloat16):
        block(x, lower_bound)
    assert not calls


def test_each_norm_has_its_own_epsilon(calls):
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64), torch.rand(64)
    for norm, eps in ((block.norm1, 0.1), (block.mixer.norm, 1.0), (block.norm2, 10.0)):
        norm.eps = eps
    fused = block(x, lower_bound)
    assert calls
    with hgrn_vision.set_backend("torch"):
        torch.testing.assert_close(fused, block(x, lower_bound), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, shape", [("mlp.fc1", (64, 64)), ("mixer.out_proj", (64, 64)), ("norm2", (32,))])
def test_weights_of_a_wrong_shape_are_an_error_as_from_any_layer(calls, name, shape):
    block = make_block()
    block.get_submodule(name).weight = nn.Parameter(torch.randn(shape), requires_grad=False)
    with pytest.raises((RuntimeError, ValueError), match=r"got \(2, 9, 64\)|18x128 and 64x64|weight of shape \[32\]"):
        block(torch.randn(2, 9, 64), torch.rand(64))
    with pytest.raises(RuntimeError, match=r"input of size\[2, 9, 96\]"):
        make_block()(torch.randn(2, 9, 96), torch.rand(64))
    assert not calls


def test_traces_record_the_operations_whatever_backend_is_asked_for():
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64), torch.rand(64)
    with hgrn_vision.set_backend("cpu"), torch.no_grad():
        traced = torch.jit.trace(block, (torch.randn(2, 9, 64), lower_bound), check_trace=False)
        torch.testing.assert_close(traced(x, lower_bound), block(x, lower_bound))


@pytest.mark.parametrize("path", cpu_library.BLOCK_WEIGHTS)
def test_every_weight_reaches_the_kernel_by_its_name(calls, path):
    """Changing one weight changes the kernel's output just as it changes the definition's."""
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64), torch.rand(64)
    before = block(x, lower_bound)
    weight = lower_bound if path == "lower_bound" else block.get_parameter(path)
    weight.copy_(weight.flip(0) * 0.7)
    after = block(x, lower_bound)
    assert error(after, expected(block, x, lower_bound)) <= 2e-6 and len(calls) == 2
    assert not torch.allclose(after, before, rtol=1e-3)


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_are_called_for_each_layer(calls, register):
    block, seen = make_block(), []
    x, lower_bound = torch.randn(2, 9, 64), torch.rand(64)
    handle = getattr(nn.modules.module, register)(lambda layer, *_: seen.append(layer))
    watched = block(x, lower_bound)
    handle.remove()
    assert {block.norm1, block.mixer.in_proj, block.mixer.norm, block.mlp.fc2} <= set(seen) and not calls
    torch.testing.assert_close(block(x, lower_bound), watched)
    assert calls


def test_where_it_is_used(calls, threads):
    model = timm.create_model("hgrn_deit_tiny", img_size=28, num_classes=3).eval()
    x = torch.randn(2, 3, 28, 28)
    want = model(x).detach()
    assert not calls, "autograd needs the layers"
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
        assert len(calls) == 12
        with hgrn_vision.set_backend("torch"):
            torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        model.to(torch.bfloat16)(x.bfloat16())
        assert model.float()(x[:0]).shape == (0, 3)
        torch.jit.trace(model, x, check_trace=False)
        torch.compile(model, backend="eager", fullgraph=True)(x)
        timm.create_model("hgrn1d_vit_tiny", img_size=28).eval()(x)
        timm.create_model("hgrn_deit_tiny", img_size=28, output_gate=False).eval()(x)
    assert len(calls) == 12
    with torch.inference_mode():
        model(x)
    assert len(calls) == 24
    # what was created in inference mode can be used outside it
    cpu_block.release_memory()
    with torch.inference_mode():
        want = model(x).clone()
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert torch.equal(model.requires_grad_(False)(x), want)
    assert len(calls) == 60


def test_without_a_matmul_to_call(calls, monkeypatch):
    monkeypatch.setattr(cpu_block, "_blas", lambda dtype: None)
    block, x, lower_bound = make_block(), torch.randn(2, 9, 64), torch.rand(64)
    assert error(block(x, lower_bound), expected(block, x, lower_bound)) <= 2e-6 and not calls


@pytest.mark.parametrize("options", [dict(proj_drop=0.5), dict(drop_path=0.5)], ids=str)
def test_dropout_that_is_left_on_in_evaluation_has_an_effect(options):
    block, x, lower_bound = make_block(**options), torch.randn(8, 9, 64), torch.rand(64)
    assert torch.equal(block(x, lower_bound), block(x, lower_bound))
    for layer in (block.drop_path, block.mixer.proj_drop, block.mlp.proj_drop):
        layer.train()
        works = bool(getattr(layer, "p", 0) or getattr(layer, "drop_prob", 0))
        assert torch.equal(block(x, lower_bound), block(x, lower_bound)) != works
        layer.eval()

"""Cases of the Triton kernels; test_triton_scan.py runs them in a process where triton interprets, or on a GPU."""

import os
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from hgrn_vision.kernels import reference, triton_scan
from hgrn_vision.kernels.triton_math import locate, locate_sequence
from hgrn_vision.scan import _scan, hgru_scan

CT = triton_scan.CT
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("out", "dx", "dbias", "dlower_bound", "dtheta")
# half a unit in the last place; the interpreter truncates float32 to bf16 instead of rounding it
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}

if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction

    # a launch patches triton's language; doing so again in every call inside a kernel takes nine tenths of the time
    InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


@pytest.fixture(params=["chunks", "one pass"])
def path(request, monkeypatch):
    """Each path of the 1D scan in turn, even though a test has few programs."""
    monkeypatch.setattr(triton_scan, "ONE_PASS_PROGRAMS", 1 if request.param == "one pass" else 10**9)
    return request.param


def make_inputs(B, T, D, K=2, fields=5, bias=True, scale=1.0, gamma=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(T * 1000 + D)
    x = (scale * torch.randn(B, T, fields * D, generator=generator)).to(dtype)
    lower_bound = torch.rand(D, generator=generator) if gamma is None else torch.full((D,), gamma)
    theta = 3 * torch.rand(K, D, generator=generator)
    bias = torch.randn(fields * D, generator=generator) if bias else None
    dout = torch.randn(B, T, 2 * D, generator=generator).to(dtype)
    return [None if t is None else t.to(DEVICE) for t in (x, bias, lower_bound, theta, dout)]


def by_kernel(x, bias, lower_bound, theta, dout, grid=None):
    width = 0 if grid is None else grid[1]
    out, states = triton_scan.forward(x, lower_bound, theta, bias, width)
    assert states.shape == triton_scan.states_shape(*x.shape[:2], *theta.shape[::-1], width)
    assert states.dtype == torch.float32
    grads = triton_scan.backward(dout, x, lower_bound, theta, bias, states, width)
    assert out.dtype == grads[0].dtype == x.dtype and all(grad.dtype == torch.float32 for grad in grads[1:])
    return dict(zip(NAMES, (out, *grads), strict=True))


def by_reference(x, bias, lower_bound, theta, dout, grid=None):
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, bias, lower_bound, theta)]
    out = reference.hgru_scan(leaves[0], leaves[2], leaves[3], leaves[1], grid)
    grads = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], dout.double()))
    grads = [dout.new_empty(0) if t is None else next(grads) for t in leaves]
    return dict(zip(NAMES, [out.detach(), *grads], strict=True))


def by_loop(*inputs, grid=None):
    """The reference in float32."""
    with mock.patch.object(torch.Tensor, "double", torch.Tensor.float):
        return by_reference(*inputs, grid=grid)


def channel_errors(got, want, D):
    """Largest error of each channel over the channel's own largest magnitude, where that is a normal float32."""
    error, largest = ((t.abs().reshape(-1, D).amax(0)) for t in (got.double() - want, want))
    return torch.where(largest > 1e-30, error / largest, 0.0)


def check(*inputs, grid=None):
    """No further off than 2e-6 of the largest magnitude, or than the reference in float32, apart from rounding."""
    got, want, single = (run(*inputs, grid=grid) for run in (by_kernel, by_reference, by_loop))
    for name in NAMES:
        assert got[name].shape == want[name].shape, name
        if want[name].numel():
            allowed = max(2e-6 * want[name].abs().max(), (single[name] - want[name]).abs().max())
            error = (got[name].double() - want[name]).abs() - ROUNDING[got[name].dtype] * want[name].abs()
            assert error.max() <= allowed, name


@pytest.mark.parametrize(
    "T, K, fields", [(1, 2, 5), (CT - 1, 1, 5), (CT, 2, 3), (CT + 1, 1, 3), (CT + 1, 2, 5), (37, 1, 5), (37, 2, 3)]
)
def test_matches_reference(T, K, fields):
    check(*make_inputs(2 if T <= CT + 1 else 1, T, 3, K, fields, bias=(T + K) % 2 == 1))


@pytest.mark.parametrize("T, K, fields", [(1, 2, 5), (3, 1, 5), (8, 2, 3), (9, 1, 3), (CT + 5, 2, 5)])
def test_one_pass_matches_reference(monkeypatch, T, K, fields):
    monkeypatch.setattr(triton_scan, "ONE_PASS_PROGRAMS", 1)
    check(*make_inputs(2, T, 3, K, fields, bias=(T + K) % 2 == 0))


GRIDS = [((1, 7), 2, 5), ((6, 1), 2, 3), ((3, 5), 1, 5), ((3, 5), 2, 5), ((9, 2), 1, 3), ((16, 16), 2, 5)]


@pytest.mark.parametrize("grid, K, fields", GRIDS, ids=str)
def test_grid_matches_reference(grid, K, fields):
    B = 1 if grid == (16, 16) else 2
    check(*make_inputs(B, grid[0] * grid[1], 3, K, fields, bias=grid != (9, 2)), grid=grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grid_in_half_precision(dtype):
    """Rows hand their share to columns in float32, so the output is rounded once."""
    check(*make_inputs(1, 15, 5, dtype=dtype), grid=(3, 5))


@pytest.mark.skipif(INTERPRETED, reason="4,096 tokens take minutes in the interpreter")
def test_large_grid_matches_reference():
    check(*make_inputs(1, 64 * 64, 3), grid=(64, 64))


def test_one_pass_where_programs_fill_a_gpu():
    """Many short sequences: 512 programs of 64 channels, for which no states are saved."""
    for B, T, D, expected in [
        (512, 1024, 64, True),
        (511, 1024, 64, False),
        (512, 1025, 64, False),
        (171, 1, 129, True),
        (170, 1, 192, False),
        (0, 4, 64, False),
    ]:
        assert triton_scan.one_pass(B, T, D) == expected, (B, T, D)
        chunks = triton_scan.states_shape(B, T, D, 2)[1]
        assert chunks == (0 if expected else -(-T // CT)), (B, T, D)


@pytest.mark.parametrize("T", [CT, CT + 1])
def test_one_channel(T):
    check(*make_inputs(1, T, 1))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's exponentials are approximate, those of the loop are not")
@pytest.mark.parametrize("T, gamma", [(CT, 0.935), (37, 0.999)])
def test_each_channel_is_as_exact_as_the_loop(monkeypatch, path, T, gamma):
    """Sums over tokens can cancel to any degree, so one channel says little: check the middle and the tail of many."""
    D = 512
    monkeypatch.setattr(triton_scan, "BD", D)
    inputs = make_inputs(1, T, D, gamma=gamma)
    got, want, single = by_kernel(*inputs), by_reference(*inputs), by_loop(*inputs)
    for name in NAMES:
        ours, loops = (channel_errors(result[name], want[name], D) for result in (got, single))
        assert ours.median() <= loops.median() and ours.quantile(0.9) <= loops.quantile(0.9), name


@pytest.mark.parametrize("T, K, fields", [(1, 2, 5), (2, 1, 3)])
def test_each_channel_of_large_inputs(monkeypatch, path, T, K, fields):
    """Tiny gates, decays and their gradients keep their digits, in all but the few channels where terms cancel."""
    D = 512
    monkeypatch.setattr(triton_scan, "BD", D)
    inputs = make_inputs(1, T, D, K, fields, bias=False, scale=30, gamma=0.0)
    got, want, single = by_kernel(*inputs), by_reference(*inputs), by_loop(*inputs)
    for name in NAMES:
        if want[name].numel():
            ours, loops = (channel_errors(result[name], want[name], D) for result in (got, single))
            assert (ours > loops.clamp_min(2e-6)).sum() <= 0.02 * D, name


def test_width_no_multiple_of_the_block(path):
    check(*make_inputs(1, CT + 1, triton_scan.BD + 6))


@pytest.mark.parametrize("gamma", [0.0, 1 - 1e-4])
def test_lower_bounds_at_the_ends(gamma):
    check(*make_inputs(1, 37, 5, gamma=gamma))


def test_large_inputs(path):
    check(*make_inputs(1, 37, 5, scale=30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(path, dtype):
    check(*make_inputs(1, CT + 3, 5, dtype=dtype))


def test_more_chunks_than_a_batch_of_the_carry():
    check(*make_inputs(1, 196, 5))


def test_long():
    check(*make_inputs(1, 1000, 2, fields=3, gamma=1 - 1e-4))


def test_long_in_one_pass(monkeypatch):
    monkeypatch.setattr(triton_scan, "ONE_PASS_PROGRAMS", 1)
    check(*make_inputs(1, 300, 2, fields=3, gamma=1 - 1e-4))


def test_any_strides():
    x, bias, lower_bound, theta, dout = make_inputs(2, CT + 1, 3)
    want = by_kernel(x, bias, lower_bound, theta, torch.full_like(dout, 0.5))
    x, bias, lower_bound = (torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0] for t in (x, bias, lower_bound))
    assert not x.is_contiguous()
    got = by_kernel(x, bias, lower_bound, theta.t().contiguous().t(), dout.new_tensor(0.5).expand_as(dout))
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name


def test_empty_batch(path):
    for bias in (True, False):
        inputs = make_inputs(0, 7, 6, bias=bias)
        result = by_kernel(*inputs)
        assert result["out"].shape == (0, 7, 12) and result["dx"].shape == inputs[0].shape
        assert result["dbias"].shape == (30 if bias else 0,) and result["dtheta"].shape == (2, 6)
        assert all(not result[name].any() for name in NAMES)


@pytest.mark.parametrize("K, fields", [(2, 5), (1, 3)])
def test_stays_within_its_buffers(monkeypatch, path, K, fields):
    check_buffers(monkeypatch, K, fields, None, launches=2 if path == "one pass" else 6)


@pytest.mark.parametrize("K, fields", [(2, 5), (1, 3)])
def test_grid_stays_within_its_buffers(monkeypatch, K, fields):
    check_buffers(monkeypatch, K, fields, (2, 7), launches=4)


def check_buffers(monkeypatch, K, fields, grid, launches):
    """Every tensor of every launch lies between NaNs: none is read or overwritten, and repeats give the same bits."""
    inputs = make_inputs(1, CT + 1 if grid is None else 14, 3, K, fields)
    want = by_kernel(*inputs, grid=grid)
    launch = triton_scan.launch
    made = []

    def guarded_launch(kernel, programs, channels_per_thread, *tensors, **constants):
        memory = {}
        for tensor in tensors:
            if tensor is not None and id(tensor) not in memory:
                memory[id(tensor)] = tensor.new_full((tensor.numel() + 4096,), torch.nan)
                memory[id(tensor)][2048:-2048] = tensor.flatten()
        guarded = [None if t is None else memory[id(t)][2048:-2048].view(t.shape) for t in tensors]
        launch(kernel, programs, channels_per_thread, *guarded, **constants)
        for tensor, copy in zip(tensors, guarded, strict=True):
            if tensor is not None:
                tensor.copy_(copy)
                assert memory[id(tensor)][:2048].isnan().all() and memory[id(tensor)][-2048:].isnan().all()
        made.append(kernel)

    monkeypatch.setattr(triton_scan, "launch", guarded_launch)
    got = by_kernel(*inputs, grid=grid)
    assert len(made) == launches
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name


@triton.jit
def locate_kernel(first, T, STEP, CT: tl.constexpr, SEQUENCE: tl.constexpr):
    if SEQUENCE:
        i_c, i_t, _ = locate_sequence(T, STEP, 1, 1)
    else:
        i_c, i_t, _, _ = locate(T, 1, CT, 1)
    tl.store(first + i_c, i_t)


@pytest.mark.parametrize("sequence", [False, True])
def test_tokens_past_two_billion_are_found(sequence):
    """Numbers of 32 bits would begin again below zero."""
    first = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    # rows of the batch with 2^30 tokens: two chunks, or two sequences that lie interleaved
    locate_kernel[(8,)](first, 2**29 if sequence else 2**30, 2, CT=2**29, SEQUENCE=sequence)
    assert first.tolist() == [i // 2 * 2**30 + i % 2 * (1 if sequence else 2**29) for i in range(8)]


@pytest.mark.parametrize("field", [1, 2])
def test_nan_is_not_hidden(path, field):
    x, bias, lower_bound, theta, dout = make_inputs(1, CT + 2, 3, K=1, fields=3)
    x[0, 4, field * 3] = torch.nan
    result = by_kernel(x, bias, lower_bound, theta, dout)
    # a causal scan hands it on to later tokens of its channel, and only to them
    bad = result["out"][0].isnan()
    assert bad[4:, 3].all() and not bad[:4].any() and not bad[:, [1, 2, 4, 5]].any()
    assert result["dx"][0, 4, field * 3].isnan() and result["dbias"][field * 3].isnan()


def test_operation(path):
    check_operation(None)


def test_operation_on_a_grid():
    check_operation((3, 1))


def check_operation(grid):
    """Checks the operation that models call: its autograd, and what a compiler sees of it."""
    x, bias, lower_bound, theta, dout = make_inputs(1, 3, 2)
    leaves = [t.requires_grad_() for t in (x, lower_bound, theta, bias)]
    out = hgru_scan(*leaves, backend="triton", grid=grid)
    want = by_reference(*(t.detach() for t in (x, bias, lower_bound, theta, dout)), grid=grid)
    grads = torch.autograd.grad(out, [x, bias, lower_bound, theta], dout)
    for name, value in zip(NAMES, (out, *grads), strict=True):
        torch.testing.assert_close(value.double(), want[name], rtol=2e-6, atol=2e-6, msg=name)
    torch.library.opcheck(_scan, (*leaves, "triton", 0 if grid is None else grid[1]))

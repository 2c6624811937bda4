import functools

import pytest
import torch
import torch.nn.functional as F

from hgrn_vision.kernels import cpu_glu, cpu_library, cpu_scan, reference

CHUNK, BD = cpu_library.CHUNK, cpu_library.BD
REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no CPU kernels here: {REASON}")
NAMES = ("out", "dx", "dbias", "dlower_bound", "dtheta")


def make_inputs(B, T, D, K=2, rows=5, bias=True, scale=1.0):
    """Inputs in float64 that bf16 represents exactly where it matters, so that one reference serves all dtypes."""
    generator = torch.Generator().manual_seed(T * 1000 + D)
    x = (scale * torch.randn(B, T, rows * D, generator=generator)).bfloat16().double()
    lower_bound = torch.rand(D, generator=generator).double()
    theta = torch.rand(K, D, generator=generator).mul(3).double()
    dout = torch.randn(B, T, 2 * D, generator=generator).bfloat16().double()
    return x, torch.randn(rows * D, generator=generator).double() if bias else None, lower_bound, theta, dout


def float32_loop(x, lower_bound, theta, bias, grid=None):
    """The reference's loop in float32: what a careful user would write, to see how wrong that is."""
    x = x + bias if bias is not None else x
    c_re, c_im, f, *g = x.split(lower_bound.shape[0], dim=-1)
    c = torch.complex(F.silu(c_re), F.silu(c_im))
    decay = lower_bound + (1 - lower_bound) * f.sigmoid()
    total = 0
    for transposed in (False,) if grid is None else (False, True):
        H, W = (1, x.shape[1]) if grid is None else grid
        lines = [t.unflatten(1, (H, W)) for t in (decay, c)]
        decays, inputs = (t.transpose(1, 2) if transposed else t for t in lines)  # (B, lines, tokens, D)
        n = decays.shape[2]
        for k, angle in enumerate(theta):
            h, states = 0, []
            for t in range(n) if k == 0 else reversed(range(n)):
                a = decays[:, :, t]
                h = torch.polar(a, angle.expand_as(a)) * h + (1 - a) * inputs[:, :, t]
                states.append(h)
            both = torch.stack(states if k == 0 else states[::-1], dim=2)
            total = total + (both.transpose(1, 2) if transposed else both).flatten(1, 2)
    out = torch.cat([total.real, total.imag], dim=-1)
    return torch.cat(g, dim=-1).sigmoid() * out if g else out


def by_autograd(function, x, bias, lower_bound, theta, dout):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, bias, lower_bound, theta)]
    out = function(leaves[0], leaves[2], leaves[3], leaves[1])
    grads = iter(torch.autograd.grad(out, [t for t in leaves if t is not None], dout))
    grads = [dout.new_empty(0) if t is None else next(grads) for t in leaves]
    return dict(zip(NAMES, [out.detach(), *grads], strict=True))


def by_kernel(dtype, x, bias, lower_bound, theta, dout, grid=None):
    real = torch.float64 if dtype == torch.float64 else torch.float32
    x, dout = x.to(dtype), dout.to(dtype)
    lower_bound, theta, bias = lower_bound.to(real), theta.to(real), None if bias is None else bias.to(real)
    width = 0 if grid is None else grid[1]
    out, states = cpu_scan.forward(x, lower_bound, theta, bias, width)
    assert states.shape == cpu_scan.states_shape(*x.shape[:2], theta.shape[1], theta.shape[0], width)
    result = dict(zip(NAMES, (out, *cpu_scan.backward(dout, x, lower_bound, theta, bias, states, width)), strict=True))
    assert all(result[name].dtype == (dtype if name in ("out", "dx") else real) for name in NAMES)
    return result


def error(got, want):
    """Maximum error over maximum magnitude."""
    assert got.shape == want.shape
    return ((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)).item() if want.numel() else 0.0


def check(*inputs, grid=None):
    # the reference must see what the kernel gets in float32
    inputs = [None if t is None else t.float().double() for t in inputs]
    want = by_autograd(functools.partial(reference.hgru_scan, grid=grid), *inputs)
    for name, value in by_kernel(torch.float64, *inputs, grid=grid).items():
        assert error(value, want[name]) <= 1e-12, name
    loop = None
    for name, value in by_kernel(torch.float32, *inputs, grid=grid).items():
        if error(value, want[name]) > 2e-6:
            careful = functools.partial(float32_loop, grid=grid)
            loop = loop or by_autograd(careful, *[None if t is None else t.float() for t in inputs])
            assert error(value, want[name]) <= error(loop[name], want[name]), name
    for name, value in by_kernel(torch.bfloat16, *inputs, grid=grid).items():
        rounding = 2**-8 if name in ("out", "dx") else 0
        slack = 2e-5 * want[name].abs().max() if value.numel() else 0
        assert ((value.double() - want[name]).abs() <= rounding * want[name].abs() + slack).all(), name


@pytest.mark.parametrize("T", [1, CHUNK - 1, CHUNK, CHUNK + 1, 37, 196, 1000])
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("rows", [3, 5])
def test_matches_reference(T, K, rows):
    check(*make_inputs(2, T, 5 if T == 1000 else BD + 5, K, rows, bias=(T + K + rows) % 2 == 0))


# with one row, one column, fewer columns than are scanned together, and more
GRIDS = [(1, 7), (6, 1), (1, 1), (3, 5), (5, 3), (4, cpu_library.BAND), (7, 2 * cpu_library.BAND + 3), (16, 16)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("B, K, rows", [(2, 2, 5), (1, 2, 3), (2, 1, 3), (1, 1, 5)])
def test_a_grid_matches_reference(grid, B, K, rows):
    check(*make_inputs(B, grid[0] * grid[1], BD + 5, K, rows, bias=(B + rows) % 2 == 0), grid=grid)


@pytest.mark.parametrize("B", [1, 2])
def test_a_large_grid_matches_reference(B):
    check(*make_inputs(B, 64 * 64, 3), grid=(64, 64))


@pytest.mark.parametrize("gamma", [0.0, 0.99999])
def test_lower_bounds_at_the_ends_on_a_grid(gamma):
    x, bias, lower_bound, theta, dout = make_inputs(1, 12 * 13, 8, scale=5)
    check(x, bias, torch.full_like(lower_bound, gamma), theta, dout, grid=(12, 13))


@pytest.mark.parametrize("D", [1, BD - 1, BD, BD + 1, 3 * BD])
def test_any_width(D):
    check(*make_inputs(3, 40, D))


@pytest.mark.parametrize("gamma", [0.0, 0.999, 0.99999])
def test_lower_bounds_at_the_ends(gamma):
    x, bias, lower_bound, theta, dout = make_inputs(2, 196, 8)
    check(x, bias, torch.full_like(lower_bound, gamma), theta, dout)


def test_large_inputs():
    check(*make_inputs(2, 70, 8, scale=30))


def test_gates_that_forget_nearly_everything():
    """A decay of 1e-7 keeps all its digits, which 1 - (1 - decay) would lose."""
    x, bias, lower_bound, theta, dout = make_inputs(2, 3, 4)
    x[..., 8:12] = -16
    check(x, None, torch.zeros_like(lower_bound), theta, dout)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("T", [1, 33, 196, 4 * CHUNK + 1])
def test_one_batch_row_is_shared_out_by_chunks(T, K):
    check(*make_inputs(1, T, 2 * BD, K))


def test_many_chunks():
    check(*make_inputs(1, 1024 + 3 * CHUNK + 1, 2))


def test_chunks_fit_and_go_to_threads_in_equal_numbers():
    lengths = {T: cpu_scan.chunk_length(T) for T in range(1, 5000)}
    assert all(1 <= length <= CHUNK for length in lengths.values())
    assert [-(-T // lengths[T]) for T in (196, 256, 576, 1024, 4096)] == [8, 8, 20, 32, 128]


@pytest.mark.parametrize("D", [BD, BD + 3])
def test_any_strides(D):
    x, bias, lower_bound, theta, dout = (t.float() for t in make_inputs(2, 40, D))
    want = by_kernel(torch.float32, x, bias, lower_bound, theta, torch.full_like(dout, 0.5))
    spread = [torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0] for t in (x, bias, lower_bound)]
    assert not spread[0].is_contiguous()
    got = by_kernel(torch.float32, *spread, theta.t().contiguous().t(), torch.tensor(0.5).expand_as(dout))
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name
    even = 4 * D  # four of the five parts, so that there are two halves for every D
    assert torch.equal(cpu_glu.forward(x[..., :even], None), cpu_glu.forward(spread[0][..., :even], None))


def test_empty_batch():
    for rows in (3, 5):
        x, bias, lower_bound, theta, dout = make_inputs(0, 7, 6, rows=rows)
        result = by_kernel(torch.float32, x, bias, lower_bound, theta, dout)
        assert result["out"].shape == (0, 7, 12) and result["dx"].shape == x.shape
        assert all(not result[name].any() for name in NAMES[2:])
    out = cpu_glu.forward(torch.empty(0, 7, 12), None)
    dx, dbias = cpu_glu.backward(out, torch.empty(0, 7, 12), torch.zeros(12))
    assert out.shape == (0, 7, 6) and dx.shape == (0, 7, 12) and not dbias.any()


@pytest.fixture
def guarded_memory(monkeypatch):
    """Puts what torch.empty returns between sentinels; calling the fixture tells whether they are intact."""
    made = []
    empty = torch.empty

    def guarded_empty(*size, **kwargs):
        shape = empty(*size, device="meta").shape
        memory = torch.full((shape.numel() + 256,), 12345.0, **kwargs)
        made.append((memory, shape.numel()))
        return memory[128 : 128 + shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    yield lambda: all((m[:128] == 12345).all() and (m[128 + n :] == 12345).all() for m, n in made) and len(made)
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", cpu_library.DTYPES)
@pytest.mark.parametrize(
    "B, T, K, rows, grid",
    [
        (2, CHUNK + 1, 2, 5, None),
        (2, 3, 1, 3, None),
        (1, 4 * CHUNK + 1, 2, 5, None),
        (2, 57, 2, 5, (3, 19)),
        (1, 57, 1, 3, (19, 3)),
    ],
)
def test_stays_within_its_buffers(guarded_memory, dtype, B, T, K, rows, grid):
    inputs = make_inputs(B, T, 2 * BD, K, rows)
    want = by_kernel(dtype, *inputs, grid=grid)

    def between_nans(t):
        memory = torch.full((t.numel() + 512,), float("nan"), dtype=t.dtype)
        memory[256:-256] = t.flatten()
        return memory[256:-256].view(t.shape)

    got = by_kernel(dtype, *map(between_nans, inputs), grid=grid)
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name
    x, bias, dout = inputs[0][..., : 2 * BD], inputs[1][: 2 * BD], inputs[4][..., :BD]
    cpu_glu.forward(between_nans(x.to(dtype)), between_nans(bias))
    cpu_glu.backward(between_nans(dout.to(dtype)), between_nans(x.to(dtype)), bias)
    assert guarded_memory()


@pytest.mark.parametrize("dtype", cpu_library.DTYPES)
@pytest.mark.parametrize("B, T, grid", [(3, 50, None), (1, 150, None), (3, 50, (5, 10)), (1, 153, (9, 17))])
def test_bits_do_not_depend_on_threads(dtype, B, T, grid):
    inputs = make_inputs(B, T, 96)
    x, dout = inputs[0].to(dtype), inputs[4].repeat(1, 1, 2)[..., :240].to(dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            result = by_kernel(dtype, *inputs, grid=grid) | {"glu": cpu_glu.forward(x, inputs[1])}
            result |= dict(zip(("glu_dx", "glu_dbias"), cpu_glu.backward(dout, x, inputs[1]), strict=True))
            results.append(result)
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, value in result.items():
            assert torch.equal(value, results[0][name]), name


def test_nan_is_not_hidden():
    x, bias, lower_bound, theta, dout = (t.float() for t in make_inputs(1, 40, BD, K=1))
    x[0, 10, 3] = float("nan")
    for dtype in cpu_library.DTYPES:
        result = by_kernel(dtype, x, bias, lower_bound, theta, dout)
        # a causal scan hands it on to later tokens of its channel, and only to them
        bad = torch.zeros(40, 2 * BD, dtype=torch.bool)
        bad[10:, [3]] = True
        assert (result["out"][0].isnan() | ~bad).all() and not result["out"][0, :10].isnan().any()
        assert not result["out"][0][:, [0, 1, 2, 4]].isnan().any()
        assert result["dx"][0, 10, 3].isnan() and result["dbias"][3].isnan()


def test_the_kernels_are_told_the_number_of_threads(monkeypatch):
    told = {}
    monkeypatch.setattr(cpu_scan, "call", lambda name, like, *args: told.update({name: args[-1]}))
    monkeypatch.setattr(cpu_scan, "threads", lambda x: 7)
    x, bias, lower_bound, theta, dout = make_inputs(2, 40, BD)
    for width in (0, 8):
        states = cpu_scan.forward(x, lower_bound, theta, bias, width)[1]
        cpu_scan.backward(dout, x, lower_bound, theta, bias, states, width)
    assert told == dict.fromkeys(["scan_forward", "scan_backward", "grid_forward", "grid_backward"], 7)

"""hgru_scan against the float64 reference and against the paper's matrices; its errors."""

import pytest
import torch
from scan_cases import inputs, relative_error, with_grads

from hgrn_vision import hgru_scan
from hgrn_vision.kernels import reference

SHAPES = [(1, 1, 1), (2, 2, 3), (2, 37, 5), (1, 196, 16), (3, 64, 7)]


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("parts", [3, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_backend_matches_reference(shape, parts, K):
    args = inputs(*shape, K, parts)
    got = with_grads(hgru_scan, *args, backend="torch")
    want = with_grads(reference.hgru_scan, *args)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name


GRIDS = [(1, 7), (6, 1), (3, 5), (16, 16), (9, 7)]


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("parts", [3, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_torch_backend_on_a_grid_matches_reference(grid, parts, K):
    args = inputs(2, grid[0] * grid[1], 3, K, parts)
    got = with_grads(hgru_scan, *args, backend="torch", grid=grid)
    want = with_grads(reference.hgru_scan, *args, grid=grid)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name


def test_a_large_grid_matches_reference():
    args = inputs(1, 64 * 64, 2, 2, 5)
    got = with_grads(hgru_scan, *args, backend="torch", grid=(64, 64))
    want = with_grads(reference.hgru_scan, *args, grid=(64, 64))
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name


class Scan(torch.nn.Module):
    """The scan of images (B, rows, columns, 5D) as a module, since only modules are exported."""

    def __init__(self, lower_bound, theta):
        super().__init__()
        self.register_buffer("lower_bound", lower_bound)
        self.register_buffer("theta", theta)

    def forward(self, x):
        return hgru_scan(x.flatten(1, 2), self.lower_bound, self.theta, backend="torch")


def exported_scan(rows, columns, K, dtype, dynamic):
    x, lower_bound, theta, _ = inputs(2, rows * columns, 3, K, 5, dtype=dtype, grad=False)
    sides = {i: torch.export.Dim(f"side{i}", min=2, max=128) for i in (1, 2)} if dynamic else None
    args = (x.unflatten(1, (rows, columns)),)
    return torch.export.export(Scan(lower_bound, theta), args, dynamic_shapes=(sides,), strict=False).module()


def error_of(program, rows, columns, K, dtype, memory=0):
    x, *_ = inputs(2, rows * columns, 3, K, 5, dtype=dtype, grad=False)
    x[..., 6:9] += memory
    want = reference.hgru_scan(x, program.lower_bound, program.theta)
    return relative_error(program(x.unflatten(1, (rows, columns))), want)


@pytest.mark.parametrize("K", [1, 2])
def test_an_exported_graph_for_any_size_matches_reference(K):
    program = exported_scan(5, 10, K, torch.float64, dynamic=True)
    for size in ((2, 2), (3, 3), (2, 4), (5, 5), (7, 7), (3, 21), (8, 8), (5, 13), (14, 14), (31, 33)):
        assert error_of(program, *size, K, torch.float64) < 1e-12, size


def test_an_exported_graph_is_exact_in_float32_for_the_largest_size():
    program = exported_scan(5, 10, 2, torch.float32, dynamic=True)
    # with gates this open, states remember all of it
    assert error_of(program, 128, 128, 2, torch.float32, memory=12) < 1e-5


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("T", [1, 2, 5, 13, 37, 97, 196])
def test_an_exported_graph_for_one_size_matches_reference(T, K):
    program = exported_scan(1, T, K, torch.float64, dynamic=False)
    assert error_of(program, 1, T, K, torch.float64) < 1e-12


def test_torch_backend_is_vectorised_over_tokens():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # views are free: only operations that compute count
            self.calls += not func.is_view
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        hgru_scan(*inputs(1, 256, 8, 2, 5, dtype=torch.float32), backend="torch")
    assert 0 < counter.calls < 256


def dense_mixing_matrix(decay, theta, direction):
    """A = Lambda * Theta of the paper, (B, T, T, D): row t, column s, by its definition."""
    B, T, D = decay.shape
    A = torch.zeros(B, T, T, D, dtype=torch.complex128)
    for t in range(T):
        for s in range(T):
            steps = range(s + 1, t + 1) if direction == 0 else range(t, s)
            if (s <= t) if direction == 0 else (s >= t):
                product = torch.ones(B, D, dtype=torch.float64)
                for k in steps:
                    product = product * decay[:, k]
                phase = torch.exp(1j * abs(t - s) * theta.to(torch.complex128))
                A[:, t, s] = (1 - decay[:, s]) * product * phase
    return A


@pytest.mark.parametrize("K", [1, 2])
def test_equals_the_dense_token_mixing_matrix(K):
    B, T, D = 2, 12, 5
    x, lower_bound, theta, _ = inputs(B, T, D, K, 3, grad=False)
    c = torch.complex(*torch.nn.functional.silu(x[..., : 2 * D]).unflatten(-1, (2, D)).unbind(-2))
    decay = lower_bound + (1 - lower_bound) * torch.sigmoid(x[..., 2 * D :])
    h = sum(torch.einsum("btsd,bsd->btd", dense_mixing_matrix(decay, theta[k], k), c) for k in range(K))
    want = torch.cat([h.real, h.imag], dim=-1)
    assert (hgru_scan(x, lower_bound, theta) - want).abs().max() < 1e-10
    assert (reference.hgru_scan(x, lower_bound, theta) - want).abs().max() < 1e-10


@pytest.mark.parametrize("K", [1, 2])
def test_a_grid_equals_dense_matrices_of_its_rows_and_columns(K):
    B, H, W, D = 2, 3, 4, 5
    x, lower_bound, theta, _ = inputs(B, H * W, D, K, 3, grad=False)
    c = torch.complex(*torch.nn.functional.silu(x[..., : 2 * D]).unflatten(-1, (2, D)).unbind(-2)).unflatten(1, (H, W))
    decay = (lower_bound + (1 - lower_bound) * torch.sigmoid(x[..., 2 * D :])).unflatten(1, (H, W))
    h = torch.zeros_like(c)
    for k in range(K):
        for i in range(H):
            h[:, i] += torch.einsum("btsd,bsd->btd", dense_mixing_matrix(decay[:, i], theta[k], k), c[:, i])
        for j in range(W):
            h[:, :, j] += torch.einsum("btsd,bsd->btd", dense_mixing_matrix(decay[:, :, j], theta[k], k), c[:, :, j])
    want = torch.cat([h.real, h.imag], dim=-1).flatten(1, 2)
    assert (hgru_scan(x, lower_bound, theta, grid=(H, W)) - want).abs().max() < 1e-10
    assert (reference.hgru_scan(x, lower_bound, theta, grid=(H, W)) - want).abs().max() < 1e-10


def test_reversing_tokens_and_swapping_thetas_reverses_the_output():
    x, lower_bound, theta, bias = inputs(2, 19, 4, 2, 5, grad=False)
    out = hgru_scan(x, lower_bound, theta, bias=bias)
    mirrored = hgru_scan(x.flip(1), lower_bound, theta.flip(0), bias=bias).flip(1)
    torch.testing.assert_close(out, mirrored, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [None, (2, 3)])
def test_gradcheck(grid):
    assert torch.autograd.gradcheck(lambda *args: hgru_scan(*args, grid=grid), inputs(1, 6, 2, 2, 5))


def test_memory_follows_the_lower_bound():
    T, D = 50, 2
    x = torch.zeros(1, T, 3 * D, dtype=torch.float64)
    x[:, 0, :D] = 3.0  # only the first token carries information
    x[:, 1:, 2 * D :] = -40.0  # every later forget gate is closed
    lower_bound = torch.tensor([0.0, 0.9999], dtype=torch.float64)
    h = hgru_scan(x, lower_bound, torch.zeros(1, D, dtype=torch.float64))[0, :, :D].abs()
    assert h[1, 0] < 1e-15
    assert h[-1, 1] > 0.99 * h[0, 1] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_rounding_of_the_output(dtype):
    args = inputs(2, 33, 6, 2, 5, dtype=dtype, grad=False)
    want = reference.hgru_scan(*args).to(dtype)
    got = hgru_scan(*args, backend="torch")
    assert got.dtype == dtype
    # equal except where the exact value is near a rounding boundary
    assert ((got - want).abs() <= torch.finfo(dtype).eps * want.abs()).all()


def bad(**changes):
    x, lower_bound, theta, bias = inputs(2, 4, 3, 2, 5, dtype=torch.float32, grad=False)
    args = dict(x=x, lower_bound=lower_bound, theta=theta, bias=bias)
    return {**args, **{name: change(args[name]) for name, change in changes.items()}}


@pytest.mark.parametrize(
    "args, message",
    [
        (bad(x=lambda t: t[0]), r"x must be \(B, T, 3D\) or \(B, T, 5D\) with D=3, got \(4, 15\)"),
        (bad(x=lambda t: t[..., :14]), r"with D=3, got \(2, 4, 14\)"),
        (bad(x=lambda t: t[:, :0]), "no tokens"),
        (bad(x=lambda t: t.long()), "floating-point"),
        (bad(theta=lambda t: t[0]), r"theta must be \(1, 3\) or \(2, 3\), got \(3,\)"),
        (bad(theta=lambda t: t.bfloat16()), "theta must be torch.float32 when x is torch.float32, got torch.bfloat16"),
        (bad(x=lambda t: t.double()), "lower_bound must be torch.float64"),
        (bad(lower_bound=lambda t: t[None]), "lower_bound must be"),
        (bad(bias=lambda t: t[:9]), r"bias must be \(15,\)"),
        (bad(theta=lambda t: t.to("meta")), "theta is on meta, x on cpu"),
        (bad() | {"grid": (2, 3)}, "a grid of 2 x 3 has 6 tokens, x has 4"),
        (bad() | {"grid": (-2, -2)}, "a grid of -2 x -2 has no tokens, x has 4"),
        (bad() | {"grid": (0, 4)}, "a grid of 0 x 4 has 0 tokens, x has 4"),
        (bad() | {"grid": (4,)}, r"grid must be \(H, W\), got \(4,\); x has 4 tokens"),
    ],
)
def test_bad_input_is_one_clear_line(args, message):
    with pytest.raises(ValueError, match=message) as error:
        hgru_scan(**args)
    assert "\n" not in str(error.value)

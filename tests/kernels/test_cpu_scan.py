import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hgrn_vision.kernels import cpu_build, cpu_glu, cpu_library, cpu_scan, reference

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


@pytest.mark.parametrize("dtype", cpu_library.DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 17, 2 * 33), (3, 41, 2 * 128)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_glu_matches_float64(dtype, shape, with_bias):
    x, bias = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    dout = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    leaves = [x.double().requires_grad_(), bias.double().requires_grad_()]
    a, v = (leaves[0] + leaves[1] if with_bias else leaves[0]).chunk(2, dim=-1)
    want = F.silu(a) * v
    want_dx, want_dbias = torch.autograd.grad(want, leaves, dout.double(), allow_unused=True)

    given = bias.to(torch.float64 if dtype == torch.float64 else torch.float32) if with_bias else None
    out = cpu_glu.forward(x, given)
    dx, dbias = cpu_glu.backward(dout, x, given)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    assert out.dtype == dx.dtype == dtype
    assert error(out, want.detach()) <= tolerance and error(dx, want_dx) <= tolerance
    assert error(dbias, want_dbias) <= min(tolerance, 2e-6) if with_bias else dbias.numel() == 0


@pytest.mark.parametrize("dtype, ulp", [(torch.float32, 2**-23), (torch.float64, 2**-52)])
def test_gates_keep_their_precision_when_saturated(dtype, ulp):
    a = torch.linspace(-80, 80, 4001, dtype=dtype)
    silu = cpu_glu.forward(torch.stack([a, torch.ones_like(a)], dim=-1), None).squeeze(-1)
    want = a.double() / (1 + (-a.double()).exp())
    assert ((silu.double() - want).abs() <= 4 * ulp * want.abs()).all()


def test_nan_and_infinity_are_not_hidden():
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
    a = torch.tensor([float("inf"), float("nan"), 1000.0, -1000.0])
    silu = cpu_glu.forward(torch.stack([a, torch.ones(4)], dim=-1), None).squeeze(-1)
    torch.testing.assert_close(silu, torch.tensor([float("inf"), float("nan"), 1000.0, 0.0]), equal_nan=True)


def run(code, **environment):
    """Run Python code in a process of its own, with the kernel modules imported."""
    program = "import torch; from hgrn_vision.kernels import cpu_glu, cpu_library, cpu_scan\n" + code
    path = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("numel, want", [(32768, 3), (32767, 1)])
def test_as_many_threads_as_torch_is_told_where_the_work_is_worth_it(numel, want, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert cpu_library.threads(torch.empty(numel)) == want


def test_every_kernel_is_told_the_number_of_threads(monkeypatch):
    told = {}
    for module in (cpu_scan, cpu_glu):
        monkeypatch.setattr(module, "call", lambda name, like, *args: told.update({name: args[-1]}))
        monkeypatch.setattr(module, "threads", lambda x: 7)
    x, bias, lower_bound, theta, dout = make_inputs(2, 40, BD)
    states = cpu_scan.forward(x, lower_bound, theta, bias)[1]
    cpu_scan.backward(dout, x, lower_bound, theta, bias, states)
    states = cpu_scan.forward(x, lower_bound, theta, bias, 8)[1]
    cpu_scan.backward(dout, x, lower_bound, theta, bias, states, 8)
    x, bias = x[..., : 2 * BD], bias[: 2 * BD]
    cpu_glu.backward(cpu_glu.forward(x, bias), x, bias)
    names = [f"{operation}_{way}" for operation in ("scan", "grid", "glu") for way in ("forward", "backward")]
    assert told == dict.fromkeys(names, 7)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
LARGE = "x, bound, theta = torch.randn(8, 64, 160), torch.rand(32), torch.rand(2, 32)\n"


@needs_proc
def test_shares_the_process_with_torch():
    """One OpenMP runtime, denormals left alone, nothing printed."""
    code = """
tiny = lambda: (torch.tensor([1e-30]) * torch.tensor([1e-10])).item() > 0
assert tiny()
cpu_scan.forward(x, bound, theta, None)
maps = open('/proc/self/maps').read()
print(tiny())
print(*{line.split()[-1] for line in maps.splitlines() if 'gomp' in line or 'iomp' in line}, sep='\\n')
"""
    lines = run(LARGE + code).communicate()[0].splitlines()
    assert lines[0] == "True"
    assert len(lines) == 2


@pytest.mark.machine
@needs_proc
def test_starts_the_threads_it_is_told():
    code = """
import os
tasks = lambda: len(os.listdir('/proc/self/task'))
cpu_scan.forward(x, bound, theta, None)
torch.set_num_threads(3)
alone = tasks()
cpu_scan.forward(x, bound, theta, None)
print(tasks() - alone)
"""
    assert run(LARGE + code).communicate()[0] == "2\n"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Kernels not yet loaded, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library._library.cache_clear()
    yield tmp_path / "hgrn_vision"
    monkeypatch.undo()
    cpu_library._library.cache_clear()


def works():
    return cpu_glu.forward(torch.tensor([[0.0, 1.0]]), None).tolist() == [[0.0]]


def test_processes_that_build_at_once(fresh):
    code = "print(cpu_library.unavailable(), cpu_glu.forward(torch.tensor([[0.0, 1.0]]), None).tolist())"
    both = [run(code) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["None [[0.0]]\n"] * 2
    assert fresh.stat().st_mode & 0o777 == 0o700
    kept = list(fresh.iterdir())
    assert kept and all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}\.so", path.name) for path in kept)
    modified = {path: path.stat().st_mtime_ns for path in kept}
    assert cpu_library.unavailable() is None and works()
    assert {path: path.stat().st_mtime_ns for path in fresh.iterdir()} == modified


def test_truncated_library_is_built_again(fresh):
    assert cpu_library.unavailable() is None
    (library,) = fresh.iterdir()
    whole = library.read_bytes()
    # a new file: the one that is loaded must stay intact
    library.unlink()
    library.write_bytes(whole[: len(whole) // 2])
    cpu_library._library.cache_clear()
    assert cpu_library.unavailable() is None and works()
    (library,) = fresh.iterdir()
    assert len(library.read_bytes()) == len(whole)


def test_cache_folder_that_cannot_be_made(fresh, monkeypatch):
    fresh.parent.joinpath("file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh.parent / "file"))
    assert cpu_library.unavailable() is None and works()
    assert not fresh.exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_cache_folder_of_someone_else_is_not_used(fresh):
    fresh.mkdir()
    os.chown(fresh, 12345, 12345)
    assert cpu_library.unavailable() is None and works()
    assert not list(fresh.iterdir())


@pytest.mark.parametrize(
    "compiler, says", [("/bin/false", "status 1"), ("no-such-cc", "No such file"), (None, "no C compiler")]
)
def test_no_compiler(fresh, monkeypatch, compiler, says):
    if compiler:
        monkeypatch.setenv("CC", compiler)
    else:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(fresh))
    reason = cpu_library.unavailable()
    assert says in reason and "\n" not in reason
    with pytest.raises(RuntimeError, match="cannot be used"):
        works()


def test_failed_build_names_the_error(fresh, monkeypatch):
    monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-include", "no_such_header.h"))
    assert "no_such_header.h" in cpu_library.unavailable()


def test_compiler_without_openmp_builds_for_one_thread(fresh, monkeypatch):
    monkeypatch.setattr(cpu_build, "_openmp_runtime", lambda: "/no/such/libgomp.so")
    assert cpu_library.unavailable() is None and works()

"""The C kernel of the depthwise convolution against torch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from hgrn_vision.kernels import cpu_conv, cpu_library

BD, ROWS = cpu_library.BD, cpu_library.ROWS
REASON = cpu_library.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C kernels here: {REASON}")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8}


def make_inputs(B, grid, D, side):
    generator = torch.Generator().manual_seed(100 * grid[1] + D)
    tokens = B, grid[0] * grid[1], D
    shapes = tokens, (D, 1, side, side), tokens
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


def wanted(x, weight, dout, grid):
    """Output and gradients in float64."""
    leaves = [tensor.requires_grad_() for tensor in (x.clone(), weight.clone())]
    image = leaves[0].unflatten(1, grid).permute(0, 3, 1, 2)
    out = F.conv2d(image, leaves[1], padding=weight.shape[-1] // 2, groups=len(weight)).flatten(2).mT
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize(
    "B, grid, D", [(1, (1, 1), 1), (2, (1, 7), 5), (3, (2, 1), BD), (2, (ROWS + 3, 4), 2 * BD + 6), (1, (16, 16), BD)]
)
def test_matches_float64(B, grid, D, side):
    x, weight, dout = make_inputs(B, grid, D, side)
    want = wanted(x, weight, dout, grid)
    for dtype, tolerance in TOLERANCE.items():
        given = x.to(dtype), weight.to(dtype), dout.to(dtype)
        got = cpu_conv.forward(*given[:2], grid[1]), *cpu_conv.backward(given[2], *given[:2], grid[1])
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype and ours.shape == theirs.shape
            assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_any_strides():
    x, weight, dout = (t.float() for t in make_inputs(2, (3, 5), 7, 3))
    want = cpu_conv.forward(x, weight, 5), *cpu_conv.backward(torch.full_like(dout, 0.5), x, weight, 5)
    spread = [torch.stack([t, torch.full_like(t, torch.nan)], dim=-1)[..., 0] for t in (x, weight)]
    assert not spread[0].is_contiguous()
    got = cpu_conv.forward(*spread, 5), *cpu_conv.backward(torch.tensor(0.5).expand_as(dout), *spread, 5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_reads_nothing_beyond_the_images():
    """Tokens lie between NaNs, and no image sees another."""
    x, weight, dout = (t.float() for t in make_inputs(2, (3, 5), 7, 5))
    want = cpu_conv.forward(x, weight, 5), *cpu_conv.backward(dout, x, weight, 5)
    guarded = []
    for t in (x, weight, dout):
        memory = torch.full((t.numel() + 512,), torch.nan)
        memory[256:-256] = t.flatten()
        guarded.append(memory[256:-256].view(t.shape))
    x, weight, dout = guarded
    got = cpu_conv.forward(x, weight, 5), *cpu_conv.backward(dout, x, weight, 5)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    x[1] = torch.nan
    assert torch.equal(cpu_conv.forward(x, weight, 5)[0], want[0][0])


def test_bits_do_not_depend_on_threads():
    x, weight, dout = (t.float() for t in make_inputs(3, (ROWS + 5, 20), 2 * BD, 3))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((cpu_conv.forward(x, weight, 20), *cpu_conv.backward(dout, x, weight, 20)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, results[0], strict=True))


def test_small_gradients_are_not_lost_in_a_large_one():
    """What images add to the gradient of the weight is added up in float64: in float32, 1 would vanish beside 2^24."""
    dout = torch.ones(9, 1, 1)
    dout[0] = 2**24
    dweight = cpu_conv.backward(dout, torch.ones(9, 1, 1), torch.ones(1, 1, 3, 3), 1)[1]
    assert dweight[0, 0, 1, 1].item() == 2**24 + 8


def test_the_kernels_are_told_the_number_of_threads(monkeypatch):
    told = []
    monkeypatch.setattr(cpu_conv, "call", lambda name, like, *args: told.append((name, args[-1])))
    monkeypatch.setattr(cpu_conv, "threads", lambda x: 7)
    x, weight, dout = make_inputs(1, (2, 3), 4, 3)
    cpu_conv.forward(x, weight, 3)
    cpu_conv.backward(dout, x, weight, 3)
    assert told == [("conv_forward", 7), ("conv_backward_weight", 7), ("conv_forward", 7)]

"""The HGRU scan as fused Triton kernels: complex state in registers, float32 throughout, no atomics.

There are two paths. In chunks (`triton_chunks`), CT tokens per program: three launches each way, aggregate, carry and
apply, fill a GPU even with one long sequence, but read the input from memory twice. In one pass (`triton_sequence`), a
program takes its channels through a whole sequence, and caches serve its second visit; it needs enough sequences to
fill a GPU by themselves, see `one_pass`. Bytes per token and channel that memory serves, in bf16 with output gate and
both directions at 256 tokens, and the least that any scan must move:

    step      chunks  one pass  least
    forward    23.75     15.97     14
    backward   42.50     28.19     24

A grid always takes the second path, with one launch for its rows, which writes its share in float32, and one for its
columns, which adds that share to its own. The input is thus read twice, except for the output gate in forward: on 16 x
16 tokens, memory serves 39.00 bytes forward and 92.00 backward, where two such launches must move at least 36 and 78.

Sums over tokens (bias, lower bound, theta) are written as one partial sum per program, so that repeats are bit-equal.

An error that is the same at every token adds up over all of them. So a state is multiplied by decay exp(i theta)
rounded once, computed from 1 - decay, which is accurate where the decay is close to 1, and from exp(i theta) in two
parts.

Registers per thread, without spills, as `aot.py` reports them (bf16, both directions, output gate):

    kernel              sm_80  sm_90  sm_100  gfx942  gfx90a
    forward_aggregate      64     64      64      66      70
    forward_apply         121    123     122      82      68
    backward_aggregate     72     72      64      67      64
    backward_apply        121    122     120     158     125
    carry                  56     56      55      50      50

A complex number is a pair (re, im) of blocks. Names: `i_` index, `o_` offset, `p_` pointer, `b_` block of channels.
"""

import torch
import triton

from .triton_chunks import (
    backward_aggregate_kernel,
    backward_apply_kernel,
    carry_kernel,
    forward_aggregate_kernel,
    forward_apply_kernel,
)
from .triton_sequence import backward_sequence_kernel, forward_sequence_kernel

CT = 16  # tokens per chunk: chunks of 8 would move twice the carries
GT = dict(forward=4, backward=2)  # tokens held in registers at once
KEPT = dict(forward=4, backward=4)  # in one pass, the first sweep keeps a state every so many tokens
BATCH = dict(aggregate=4, carry=8)  # tokens or chunks whose loads are in flight at once
BD = 64  # channels per program
ONE_PASS_TOKENS, ONE_PASS_PROGRAMS = 1024, 512
# loads are batched by hand, so no software pipeline; fused multiply-add is set because its default changes
OPTIONS = dict(num_stages=1, enable_fp_fusion=True)
Inputs = tuple[torch.Tensor | None, ...]


def one_pass(B: int, T: int, D: int) -> bool:
    """Whether one program per batch row and block of channels should do better than chunks in parallel.

    A pass moves fewer bytes and in forward computes fewer gates, but it has fewer programs to hide latency with. 512
    programs of two warps are about two warps per scheduler of an H100, and more on a smaller GPU, which should be
    enough because the gates of a group do not wait for each other. The number is fixed, because a compiler asks for the
    shape of the states without a device. With more than 1,024 tokens, a batch that large is many times what an L2 cache
    holds, and a pass gains little.
    """
    return T <= ONE_PASS_TOKENS and B * ((D + BD - 1) // BD) >= ONE_PASS_PROGRAMS


def states_shape(B: int, T: int, D: int, K: int, width: int = 0) -> tuple[int, int, int, int]:
    """Shape of what forward saves for backward: the states entering each chunk and 1 - the product of its decays.

    Nothing is saved (0 chunks) in one pass and for a grid, where backward computes the states itself.
    """
    return B, 0 if width or one_pass(B, T, D) else (T + CT - 1) // CT, 2 * K + 1, D


def token_and_chunk_rotation(theta: torch.Tensor) -> torch.Tensor:
    """cos and sin of theta and of CT theta, each pair followed by its rounding errors: (K, 2, 4, D)."""
    steps = torch.arange(1, CT + 1, CT - 1, dtype=torch.float64, device=theta.device)
    angle = theta[:, None] * steps[:, None]  # (K, 2, D)
    exact = torch.stack((angle.cos(), angle.sin()), dim=2)
    return torch.cat((exact.float(), (exact - exact.float()).float()), dim=2)


def warps(lanes: int, channels_per_thread: int) -> int:
    """Warps per program, for `lanes` threads per warp."""
    return max(1, BD // (lanes * channels_per_thread))


def launch(kernel, programs: int, channels_per_thread: int, *tensors: torch.Tensor | None, **constants) -> None:
    """Run a kernel on the device of its tensors, on that device's current stream."""
    device = tensors[0].device
    # 32 on NVIDIA, 64 on most AMD; the interpreter runs on CPU tensors and has no warps
    lanes = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, **constants, num_warps=warps(lanes, channels_per_thread), **OPTIONS)


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors, copied if they are not contiguous (an expanded gradient, a slice)."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def forward_chunks(inputs: Inputs, states: torch.Tensor, out: torch.Tensor, shape: dict[str, int]) -> None:
    """out and states of the 1D scan, chunks in parallel."""
    B, chunks = states.shape[:2]
    blocks = triton.cdiv(shape["D"], BD)
    x_shape = dict(CT=CT, BD=BD, **shape)
    inputs = (*inputs, states)
    launch(forward_aggregate_kernel, B * chunks * blocks, 2, *inputs, BATCH=BATCH["aggregate"], **x_shape)
    carry(states, states, inputs[2], ADJOINT=False, **x_shape)
    launch(forward_apply_kernel, B * chunks * blocks, 2, *inputs, out, GT=GT["forward"], **x_shape)


def carry(states: torch.Tensor, ends: torch.Tensor, rotation: torch.Tensor, K: int, D: int, FIELDS: int, **constants):
    """Replace what each chunk adds, `ends`, by the states or adjoints that enter it."""
    programs = ends.shape[0] * K * triton.cdiv(D, BD)
    shape = dict(K=K, D=D, ROWS=ends.shape[2], BATCH=BATCH["carry"], **constants)
    launch(carry_kernel, programs, 1, states, ends, rotation, **shape)


def forward_sequences(inputs: Inputs, other: torch.Tensor | None, out: torch.Tensor, shape: dict[str, int]) -> None:
    """out of every sequence in one pass, with `other` added to the states."""
    x, D, group = inputs[0], shape["D"], KEPT["forward"]
    sequences = x.shape[0] * x.shape[1] // shape["T"]
    ends = None
    if shape["K"] == 2:
        ends = x.new_empty(sequences, triton.cdiv(shape["T"], group), 2, D, dtype=torch.float32)
    programs = sequences * triton.cdiv(D, BD)
    launch(forward_sequence_kernel, programs, 1, *inputs, ends, other, out, GT=group, BD=BD, **shape)


def forward_grid(inputs: Inputs, width: int, out: torch.Tensor, shape: dict[str, int]) -> None:
    """out of the scan of a grid with rows of `width` tokens."""
    height, gate = shape["T"] // width, shape["FIELDS"] == 5
    rows = torch.empty_like(out, dtype=torch.float32)
    forward_sequences(inputs, None, rows, shape | dict(T=width, WIDTH=1, COLUMNS=False, GATE=False))
    forward_sequences(inputs, rows, out, shape | dict(T=height, WIDTH=width, COLUMNS=True, GATE=gate))


def forward(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, T, 2D) in the dtype of x, and what backward needs besides the input, `states_shape` in float32.

    Args:
        x: (B, T, 5D) = [c_re | c_im | f | g_re | g_im] or (B, T, 3D) without the output gate; bf16, fp16 or float32.
        lower_bound: (D,), float32.
        theta: (K, D), float32; K = 1 first to last token, K = 2 also last to first.
        bias: (5D,) or (3D,), float32, added to x first.
        width: tokens per row of a grid, whose rows and columns are scanned; 0 if tokens are one sequence.
    """
    x, lower_bound, bias = contiguous(x, lower_bound, bias)
    (K, D), (B, T, columns) = theta.shape, x.shape
    states = x.new_empty(states_shape(B, T, D, K, width), dtype=torch.float32)
    out = x.new_empty(B, T, 2 * D)
    inputs = (x, lower_bound, token_and_chunk_rotation(theta), bias)
    shape = dict(T=T, D=D, K=K, FIELDS=columns // D)
    if B == 0:
        pass
    elif width:
        forward_grid(inputs, width, out, shape)
    elif one_pass(B, T, D):
        forward_sequences(inputs, None, out, dict(WIDTH=1, COLUMNS=False, GATE=columns == 5 * D, **shape))
    else:
        forward_chunks(inputs, states, out, shape)
    return out, states


def backward_chunks(inputs: Inputs, states: torch.Tensor, dx: torch.Tensor, shape: dict[str, int]) -> torch.Tensor:
    """dx of the 1D scan, chunks in parallel; returns the sums of every chunk."""
    B, chunks = states.shape[:2]
    D, K = shape["D"], shape["K"]
    programs = B * chunks * triton.cdiv(D, BD)
    x_shape = dict(CT=CT, BD=BD, **shape)
    adjoints = states.new_empty(B, chunks, 2 * K, D)
    sums = states.new_empty(B * chunks, sum(rows_of_sums(inputs, shape)), D)
    launch(backward_aggregate_kernel, programs, 2, *inputs, adjoints, BATCH=BATCH["aggregate"], **x_shape)
    carry(states, adjoints, inputs[3], ADJOINT=True, **x_shape)
    launch(backward_apply_kernel, programs, 1, *inputs, states, adjoints, dx, sums, GT=GT["backward"], **x_shape)
    return sums


def backward_sequences(
    inputs: Inputs, other: torch.Tensor | None, dx: torch.Tensor, shape: dict[str, int]
) -> torch.Tensor:
    """dx of every sequence in one pass, with `other` added to it; returns the sums of every sequence."""
    x, D, K, group = inputs[1], shape["D"], shape["K"], KEPT["backward"]
    sequences = x.shape[0] * x.shape[1] // shape["T"]
    starts = x.new_empty(sequences, triton.cdiv(shape["T"], group), 2 * K, D, dtype=torch.float32)
    sums = x.new_empty(sequences, sum(rows_of_sums(inputs, shape)), D, dtype=torch.float32)
    programs = sequences * triton.cdiv(D, BD)
    constants = dict(CT=group, GT=GT["backward"], BD=BD, **shape)
    launch(backward_sequence_kernel, programs, 1, *inputs, starts, other, dx, sums, **constants)
    return sums


def backward_grid(inputs: Inputs, width: int, dx: torch.Tensor, shape: dict[str, int]) -> torch.Tensor:
    """dx of the scan of a grid with rows of `width` tokens; returns the sums of every row and column."""
    rows = torch.empty_like(dx, dtype=torch.float32)
    sums = backward_sequences(inputs, None, rows, shape | dict(T=width, WIDTH=1, COLUMNS=False))
    columns = shape | dict(T=shape["T"] // width, WIDTH=width, COLUMNS=True)
    return torch.cat([sums, backward_sequences(inputs, rows, dx, columns)])


def rows_of_sums(inputs: Inputs, shape: dict[str, int]) -> list[int]:
    """How many rows dlower_bound, dtheta and dbias have in a program's sums."""
    return [1, shape["K"], 0 if inputs[-1] is None else shape["FIELDS"]]


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    lower_bound: torch.Tensor,
    theta: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    width: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx in the dtype of x, and dbias (empty without a bias), dlower_bound and dtheta in float32.

    Args:
        dout: gradient of the output, (B, T, 2D).
        x, lower_bound, theta, bias: as given to forward.
        states: from forward.
        width: as given to forward.
    """
    dout, x, lower_bound, bias, states = contiguous(dout, x, lower_bound, bias, states)
    (K, D), (B, T, columns) = theta.shape, x.shape
    dx = torch.empty_like(x)
    inputs = (dout, x, lower_bound, token_and_chunk_rotation(theta), bias)
    shape = dict(T=T, D=D, K=K, FIELDS=columns // D)
    rows = rows_of_sums(inputs, shape)
    if B == 0:
        sums = states.new_empty(0, sum(rows), D)
    elif width:
        sums = backward_grid(inputs, width, dx, shape)
    elif one_pass(B, T, D):
        sums = backward_sequences(inputs, None, dx, dict(WIDTH=1, COLUMNS=False, **shape))
    else:
        sums = backward_chunks(inputs, states, dx, shape)
    dlower_bound, dtheta, dbias = (part.sum(0, dtype=torch.float64).float() for part in sums.split(rows, dim=1))
    return dx, dbias.flatten(), dlower_bound.flatten(), dtheta

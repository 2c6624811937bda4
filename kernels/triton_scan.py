"""The HGRU scan as fused Triton kernels: chunks of tokens in parallel, complex state in registers, float32 throughout.

Forward is three launches: `aggregate` finds what each chunk of CT tokens adds to the state and by how much it decays
it, `carry` walks over the chunks, and `apply` redoes each chunk from the state that enters it and writes the output.
Backward has the same three steps for the adjoints, whose angles are conjugated and whose directions are swapped; it
reads the input and the states that enter each chunk again, so nothing else is saved and no intermediate reaches
memory. Sums over tokens (bias, lower bound, theta) leave as one partial sum per program: no atomics, bit-equal repeats.

An error that is the same at every token adds up over all of them. So a state is multiplied by decay exp(i theta)
rounded once, from 1 - decay, which keeps its digits where the decay is close to 1, and from exp(i theta) in two parts.

An apply kernel needs states that run up the chunk and states that run down it. It sweeps once to keep the ones where
each group of GT tokens begins, then holds one group at a time: unrolling all 16 tokens instead took 255 registers per
thread in backward and 70 seconds to compile for sm_80, seven times what 8 tokens took, nearly all of it in triton's
coalescing pass. Chunks of 16 move half the carries of chunks of 8: 24.75 bytes per token and channel forward and
43.5 backward in bf16, of which 14 and 24 are the input and output themselves. Registers per thread, nothing spilled, as
`aot.py` finds them (bf16, both directions, output gate):

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
import triton.language as tl

from .triton_math import (
    accumulate,
    add,
    advance,
    cross,
    decayed,
    dot,
    hand_back,
    load_dh,
    load_forget,
    load_input,
    load_pair,
    load_rows,
    load_token,
    load_turns,
    locate,
    pick,
    put,
    repeat,
    rotate,
    scale,
    sigmoid_pair,
    store_rows,
    subtract,
    where_inside,
    zero,
)

CT = 16  # tokens per chunk
GT = dict(forward=4, backward=2)  # tokens of a chunk held in registers at once
BATCH = dict(aggregate=4, carry=8)  # tokens, chunks whose loads are in flight at once
BD = 64  # channels per program
# loads are batched by hand, so no software pipeline; fused multiply-add is named because its default changes
OPTIONS = dict(num_stages=1, enable_fp_fusion=True)


@triton.jit(do_not_specialize=["T"])
def forward_aggregate_kernel(
    x,  # (B, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D): a token's and a chunk's step, [cos | sin | what the rounding of each left over]
    bias,  # (FIELDS D,) or None
    states,  # (B, chunks, 2K + 1, D): [h | r | 1 - product of decays]
    T,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    BD: tl.constexpr,
    BATCH: tl.constexpr,
):
    """What a chunk adds to the states of both directions, and 1 - the product of its decays, in one ascending sweep."""
    i_c, i_t, left, o_d = locate(T, D, CT, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_range = 1.0 - tl.load(lower_bound + o_d, mask=mask, other=0.0)
    turns = load_turns(rotation + o_d, K, D, mask)
    h = zero(BD)
    r = zero(BD)
    b_rests = tl.full([BD], 0.0, tl.float32)
    weight = (tl.full([BD], 1.0, tl.float32), b_rests)
    for i in range(0, tl.minimum(left, CT), BATCH):
        p_x = x + (i_t + i) * (FIELDS * D) + o_d
        for t in tl.static_range(BATCH):
            b_rest, u = load_input(p_x + t * FIELDS * D, b_bias, b_range, D, where_inside(o_d, i + t, left, D))
            h = advance(h, b_rest, u, turns[0])
            b_rests = tl.fma(b_rest, 1.0 - b_rests, b_rests)
            if K == 2:
                # the reverse state needs no sweep of its own: u reaches the chunk's first token by the decays before it
                r = add(r, rotate(u, weight))
                weight = rotate(weight, decayed(b_rest, turns[1]))
    store_rows(states + i_c * (2 * K + 1) * D + o_d, h + r if K == 2 else h, D, mask)
    tl.store(states + (i_c * (2 * K + 1) + 2 * K) * D + o_d, b_rests, mask=mask)


@triton.jit(do_not_specialize=["T"])
def carry_kernel(
    states,  # (B, chunks, 2K + 1, D), for 1 - the product of each chunk's decays
    ends,  # (B, chunks, ROWS, D): what each chunk adds, replaced by the state that enters it
    rotation,  # (K, 2, 4, D)
    T,
    D: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    ADJOINT: tl.constexpr,
    CT: tl.constexpr,
    BD: tl.constexpr,
    BATCH: tl.constexpr,
):
    """The states or adjoints entering each chunk: sequential over chunks, one program per batch row and direction."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    i_k = tl.program_id(0) // BLOCKS % K
    i_b = (tl.program_id(0) // (BLOCKS * K)).to(tl.int64)
    o_d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    mask = o_d < D
    CHUNKS = (T + CT - 1) // CT
    descending = i_k == (0 if ADJOINT else 1)
    turn = load_rows(rotation + (8 * i_k + 4) * D + o_d, 4, D, mask)
    if ADJOINT:
        turn = (turn[0], -turn[1], turn[2], -turn[3])
    h = zero(BD)
    for i in range(0, CHUNKS, BATCH):
        # a store keeps later loads from being moved up, so load for several chunks first
        rests, added = (), ()
        for j in tl.static_range(BATCH):
            i_n = tl.minimum(i + j, CHUNKS - 1)
            i_c = i_b * CHUNKS + tl.where(descending, CHUNKS - 1 - i_n, i_n)
            rests += (tl.load(states + (i_c * (2 * K + 1) + 2 * K) * D + o_d, mask=mask, other=0.0),)
            added += (load_rows(ends + (i_c * ROWS + 2 * i_k) * D + o_d, 2, D, mask),)
        for j in tl.static_range(BATCH):
            i_n = tl.minimum(i + j, CHUNKS - 1)
            i_c = i_b * CHUNKS + tl.where(descending, CHUNKS - 1 - i_n, i_n)
            store_rows(ends + (i_c * ROWS + 2 * i_k) * D + o_d, h, D, where_inside(o_d, i + j, CHUNKS, D))
            h = advance(h, rests[j], added[j], turn)


@triton.jit(do_not_specialize=["T"])
def forward_apply_kernel(
    x,  # (B, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D)
    bias,  # (FIELDS D,) or None
    states,  # (B, chunks, 2K + 1, D), entering each chunk
    out,  # (B, T, 2D)
    T,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    GT: tl.constexpr,
    BD: tl.constexpr,
):
    """The output of a chunk, from its first group of GT tokens to the last.

    One sweep down keeps the reverse state where each group ends; then group by group a sweep down holds GT reverse
    states in registers and a sweep up adds the forward ones, gates and writes.
    """
    i_c, i_t, left, o_d = locate(T, D, CT, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_range = 1.0 - tl.load(lower_bound + o_d, mask=mask, other=0.0)
    turns = load_turns(rotation + o_d, K, D, mask)
    state = load_rows(states + i_c * (2 * K + 1) * D + o_d, 2 * K, D, mask)
    h = (state[0], state[1])
    r = zero(BD)
    if K == 2:
        r = (state[2], state[3])

    groups = (tl.minimum(left, CT) + GT - 1) // GT
    ends = repeat(r, CT // GT)
    if K == 2:
        for i in range(groups - 1, 0, -1):
            p_x = x + (i_t + i * GT) * (FIELDS * D) + o_d
            for t in tl.static_range(GT - 1, -1, -1):
                inside = where_inside(o_d, i * GT + t, left, D)
                b_rest, u = load_input(p_x + t * FIELDS * D, b_bias, b_range, D, inside)
                r = advance(r, b_rest, u, turns[1])
            ends = put(ends, i - 1, r)

    for i in range(groups):
        r = pick(ends, i)
        p_x = x + (i_t + i * GT) * (FIELDS * D) + o_d
        p_out = out + (i_t + i * GT) * (2 * D) + o_d
        held, gates = (), ()
        for t in tl.static_range(GT - 1, -1, -1):
            inside = where_inside(o_d, i * GT + t, left, D)
            b_rest, u = load_input(p_x + t * FIELDS * D, b_bias, b_range, D, inside)
            if K == 2:
                r = advance(r, b_rest, u, turns[1])
            if FIELDS == 5:
                gates = (load_pair(p_x + t * FIELDS * D, b_bias, 3, D, inside),) + gates
            held = ((b_rest, u, r),) + held
        for t in tl.static_range(GT):
            b_rest, u, r_here = held[t]
            h = advance(h, b_rest, u, turns[0])
            y = h
            if K == 2:
                y = add(h, r_here)
            if FIELDS == 5:
                g = sigmoid_pair(gates[t])[0]
                y = (g[0] * y[0], g[1] * y[1])
            store_rows(p_out + t * 2 * D, y, D, where_inside(o_d, i * GT + t, left, D))


@triton.jit(do_not_specialize=["T"])
def backward_aggregate_kernel(
    dout,  # (B, T, 2D)
    x,  # (B, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D)
    bias,  # (FIELDS D,) or None
    adjoints,  # (B, chunks, 2K, D): [p | q]
    T,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    BD: tl.constexpr,
    BATCH: tl.constexpr,
):
    """What a chunk adds to the adjoints p of the forward and q of the reverse states, in one ascending sweep."""
    i_c, i_t, left, o_d = locate(T, D, CT, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_range = 1.0 - tl.load(lower_bound + o_d, mask=mask, other=0.0)
    turns = load_turns(rotation + o_d, K, D, mask)
    p = zero(BD)
    q = zero(BD)
    weight = (tl.full([BD], 1.0, tl.float32), tl.full([BD], 0.0, tl.float32))
    for i in range(0, tl.minimum(left, CT), BATCH):
        p_x = x + (i_t + i) * (FIELDS * D) + o_d
        p_dout = dout + (i_t + i) * (2 * D) + o_d
        for t in tl.static_range(BATCH):
            inside = where_inside(o_d, i + t, left, D)
            b_rest = b_range * load_forget(p_x + t * FIELDS * D, b_bias, D, inside)[1]
            dh = load_dh(p_x + t * FIELDS * D, p_dout + t * 2 * D, b_bias, D, FIELDS, inside)[0]
            weight = hand_back(weight, b_rest, turns[0])
            p = add(p, rotate(dh, weight))
            if K == 2:
                q = hand_back(add(q, dh), b_rest, turns[1])
    store_rows(adjoints + i_c * (2 * K) * D + o_d, p + q if K == 2 else p, D, mask)


@triton.jit
def differentiate(token, p, w, h, q, b_bound, turns, K: tl.constexpr, FIELDS: tl.constexpr):
    """A token's dx and its terms of the sums [dlower_bound | dtheta | dbias], after moving h and q on to it.

    p is the adjoint of the token's forward state, w the next token's reverse state times e^(i theta).
    """
    forget, c, slope, dh, closed = token
    b_mu, b_nu = forget
    b_rest = (1.0 - b_bound) * b_nu
    # dtheta is a multiple of the decay, so here it must not be 1 - rest, which has lost a small decay's digits
    b_decay = b_bound + (1.0 - b_bound) * b_mu
    v = rotate(h, turns[0])
    h = add(v, scale(b_rest, subtract(c, v)))
    b_ddecay = dot(p, v)
    dtheta = (b_decay * cross(v, p),)
    dstate = p
    if K == 2:
        q = add(q, dh)
        b_ddecay += dot(q, w)
        dtheta += (b_decay * cross(w, q),)
        dstate = add(p, q)
        q = hand_back(q, b_rest, turns[1])
        v = add(v, w)
    b_ddecay -= dot(c, dstate)
    dx = (b_rest * dstate[0] * slope[0], b_rest * dstate[1] * slope[1], b_rest * b_mu * b_ddecay)
    if FIELDS == 5:
        y = add(v, scale(b_rest, subtract(scale(K, c), v)))
        dx += (closed[0] * y[0], closed[1] * y[1])
    return h, q, dx, (b_nu * b_ddecay,) + dtheta + dx


@triton.jit(do_not_specialize=["T"])
def backward_apply_kernel(
    dout,  # (B, T, 2D)
    x,  # (B, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D)
    bias,  # (FIELDS D,) or None
    states,  # (B, chunks, 2K + 1, D), entering each chunk
    adjoints,  # (B, chunks, 2K, D), entering each chunk
    dx,  # (B, T, FIELDS D)
    sums,  # (B, chunks, SUMS, D): [dlower_bound | dtheta | dbias], the last only where there is a bias
    T,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    GT: tl.constexpr,
    BD: tl.constexpr,
):
    """dx of a chunk, from the last group of GT tokens to the first, and the chunk's part of the sums.

    Every token needs h and q, which run upwards, and r and p, which run downwards. One sweep up keeps h and q where
    each group starts; then group by group a sweep down holds GT tokens in registers and a sweep up writes them.
    """
    i_c, i_t, left, o_d = locate(T, D, CT, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_bound = tl.load(lower_bound + o_d, mask=mask, other=0.0)
    b_range = 1.0 - b_bound
    turns = load_turns(rotation + o_d, K, D, mask)
    state = load_rows(states + i_c * (2 * K + 1) * D + o_d, 2 * K, D, mask)
    adjoint = load_rows(adjoints + i_c * (2 * K) * D + o_d, 2 * K, D, mask)
    h = (state[0], state[1])
    p = (adjoint[0], adjoint[1])
    r = zero(BD)
    q = zero(BD)
    if K == 2:
        r = (state[2], state[3])
        q = (adjoint[2], adjoint[3])

    groups = (tl.minimum(left, CT) + GT - 1) // GT
    starts = repeat(h + q, CT // GT)
    for i in range(1, groups):
        p_x = x + (i_t + (i - 1) * GT) * (FIELDS * D) + o_d
        p_dout = dout + (i_t + (i - 1) * GT) * (2 * D) + o_d
        for t in tl.static_range(GT):
            b_rest, u = load_input(p_x + t * FIELDS * D, b_bias, b_range, D, mask)
            h = advance(h, b_rest, u, turns[0])
            if K == 2:
                dh = load_dh(p_x + t * FIELDS * D, p_dout + t * 2 * D, b_bias, D, FIELDS, mask)[0]
                q = hand_back(add(q, dh), b_rest, turns[1])
        starts = put(starts, i, h + q)

    SUMS: tl.constexpr = 1 + K if bias is None else 1 + K + FIELDS
    total = repeat(tl.full([BD], 0.0, tl.float32), SUMS)
    for i in range(groups - 1, -1, -1):
        start = pick(starts, i)
        h = (start[0], start[1])
        q = (start[2], start[3])
        p_x = x + (i_t + i * GT) * (FIELDS * D) + o_d
        p_dx = dx + (i_t + i * GT) * (FIELDS * D) + o_d
        p_dout = dout + (i_t + i * GT) * (2 * D) + o_d
        held = ()
        for t in tl.static_range(GT - 1, -1, -1):
            inside = where_inside(o_d, i * GT + t, left, D)
            token = load_token(p_x + t * FIELDS * D, p_dout + t * 2 * D, b_bias, D, FIELDS, inside)
            b_rest = b_range * token[0][1]
            w = r
            if K == 2:
                w = rotate(r, turns[1])
                r = advance(r, b_rest, scale(b_rest, token[1]), turns[1])
            p = add(p, token[3])
            held = ((token, p, w),) + held
            p = hand_back(p, b_rest, turns[0])
        for t in tl.static_range(GT):
            token, p_here, w = held[t]
            h, q, b_dx, terms = differentiate(token, p_here, w, h, q, b_bound, turns, K, FIELDS)
            total = accumulate(total, terms)
            store_rows(p_dx + t * FIELDS * D, b_dx, D, where_inside(o_d, i * GT + t, left, D))
    store_rows(sums + i_c * SUMS * D + o_d, total, D, mask)


def states_shape(B: int, T: int, D: int, K: int, width: int = 0) -> tuple[int, int, int, int]:
    """Shape of what forward saves for backward: the states entering each chunk and 1 - the product of its decays."""
    return B, (T + CT - 1) // CT, 2 * K + 1, D


def token_and_chunk_rotation(theta: torch.Tensor) -> torch.Tensor:
    """cos and sin of theta and of CT theta, each pair followed by what its rounding left over: (K, 2, 4, D)."""
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


def forward(
    x: torch.Tensor, lower_bound: torch.Tensor, theta: torch.Tensor, bias: torch.Tensor | None, width: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, T, 2D) in the dtype of x, and what backward needs besides the input, `states_shape` in float32.

    Args:
        x: (B, T, 5D) = [c_re | c_im | f | g_re | g_im] or (B, T, 3D) without the output gate; bf16, fp16 or float32.
        lower_bound: (D,), float32.
        theta: (K, D), float32; K = 1 first to last token, K = 2 also last to first.
        bias: (5D,) or (3D,), float32, added to x first.
    """
    x, lower_bound, bias = contiguous(x, lower_bound, bias)
    (K, D), (B, T, width) = theta.shape, x.shape
    blocks, chunks = triton.cdiv(D, BD), triton.cdiv(T, CT)
    rotation = token_and_chunk_rotation(theta)
    states = x.new_empty(states_shape(B, T, D, K, width), dtype=torch.float32)
    out = x.new_empty(B, T, 2 * D)
    if B > 0:
        shape = dict(T=T, D=D, K=K, CT=CT, BD=BD)
        x_shape = dict(FIELDS=width // D, **shape)
        inputs = (x, lower_bound, rotation, bias, states)
        launch(forward_aggregate_kernel, B * chunks * blocks, 2, *inputs, BATCH=BATCH["aggregate"], **x_shape)
        ends = dict(ROWS=2 * K + 1, ADJOINT=False, BATCH=BATCH["carry"])
        launch(carry_kernel, B * K * blocks, 1, states, states, rotation, **ends, **shape)
        launch(forward_apply_kernel, B * chunks * blocks, 2, *inputs, out, GT=GT["forward"], **x_shape)
    return out, states


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
    """
    dout, x, lower_bound, bias, states = contiguous(dout, x, lower_bound, bias, states)
    (K, D), (B, T, width) = theta.shape, x.shape
    blocks, chunks = triton.cdiv(D, BD), triton.cdiv(T, CT)
    rotation = token_and_chunk_rotation(theta)
    adjoints = states.new_empty(B, chunks, 2 * K, D)
    rows = [1, K, 0 if bias is None else width // D]
    sums = states.new_empty(B * chunks, sum(rows), D)
    dx = torch.empty_like(x)
    if B > 0:
        shape = dict(T=T, D=D, K=K, CT=CT, BD=BD)
        x_shape = dict(FIELDS=width // D, **shape)
        inputs = (dout, x, lower_bound, rotation, bias)
        launch(
            backward_aggregate_kernel, B * chunks * blocks, 2, *inputs, adjoints, BATCH=BATCH["aggregate"], **x_shape
        )
        ends = dict(ROWS=2 * K, ADJOINT=True, BATCH=BATCH["carry"])
        launch(carry_kernel, B * K * blocks, 1, states, adjoints, rotation, **ends, **shape)
        inputs += (states, adjoints, dx, sums)
        launch(backward_apply_kernel, B * chunks * blocks, 1, *inputs, GT=GT["backward"], **x_shape)
    dlower_bound, dtheta, dbias = (part.sum(0, dtype=torch.float64).float() for part in sums.split(rows, dim=1))
    return dx, dbias.flatten(), dlower_bound.flatten(), dtheta

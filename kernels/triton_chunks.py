"""Kernels of the scan with chunks of CT tokens in parallel: aggregate, carry and apply, each a launch of its own.

`aggregate` finds what each chunk adds to the state and by how much it decays it, `carry` walks over the chunks, and
`apply` scans each chunk again from the state that enters it and writes. Backward has the same three steps for the
adjoints, with opposite angles and directions. It reads the input and the states that enter each chunk again, so nothing
else is saved.

An apply kernel needs states that run up the chunk and states that run down it. It sweeps once to keep those that enter
each group of GT tokens, then holds one group at a time: unrolling all 16 tokens instead took 255 registers per thread
in backward and 70 seconds to compile for sm_80, seven times what 8 tokens took, nearly all of it in triton's coalescing
pass.
"""

import triton
import triton.language as tl

from .triton_group import ascend, backward_group, forward_group
from .triton_math import (
    add,
    advance,
    decayed,
    hand_back,
    load_dh,
    load_forget,
    load_input,
    load_rows,
    load_turns,
    locate,
    pick,
    put,
    repeat,
    rotate,
    store_rows,
    where_inside,
    zero,
)


@triton.jit(do_not_specialize=["T"])
def forward_aggregate_kernel(
    x,  # (B, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D): of a token and of a chunk, [cos | sin | the rounding error of each]
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
                # the reverse state needs no sweep of its own: u reaches the chunk's first token through earlier decays
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
    """The states or adjoints that enter each chunk, one chunk after the other.

    There is one program per batch row, direction and block of channels.
    """
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
        # loads are not moved up past a store, so load for several chunks first
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

    One sweep down keeps the reverse state where each group ends; then, group by group, a sweep down holds GT reverse
    states in registers and a sweep up adds the forward ones, applies the output gate and writes.
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
        p_x = x + (i_t + i * GT) * (FIELDS * D) + o_d
        p_out = out + (i_t + i * GT) * (2 * D) + o_d
        tail = left - i * GT
        r = pick(ends, i)
        h = forward_group(p_x, None, p_out, h, r, b_bias, b_range, turns, o_d, tail, 1, D, FIELDS, K, FIELDS == 5, GT)


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
    sums,  # (B, chunks, SUMS, D): [dlower_bound | dtheta | dbias], the last only if there is a bias
    T,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    GT: tl.constexpr,
    BD: tl.constexpr,
):
    """dx of a chunk, from the last group of GT tokens to the first, and the chunk's part of the sums.

    Every token needs h and q, which run up, and r and p, which run down. One sweep up keeps h and q where each group
    starts; then, group by group, a sweep down holds GT tokens in registers and a sweep up writes them.
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
        tail = left - (i - 1) * GT
        h, q = ascend(p_dout, p_x, h, q, b_bias, b_range, turns, o_d, tail, 1, D, FIELDS, K, GT)
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
        tail = left - i * GT
        p, r, total = backward_group(
            p_dout, p_x, None, p_dx, h, q, p, r, total, b_bias, b_bound, turns, o_d, tail, 1, D, FIELDS, K, GT
        )
    store_rows(sums + i_c * SUMS * D + o_d, total, D, mask)

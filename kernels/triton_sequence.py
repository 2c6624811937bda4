"""Kernels of the scan in one pass: one program per sequence and block of channels walks through all its tokens.

A program sweeps its sequence once in one direction and keeps a state every few tokens, then sweeps it in the other
direction, a group of tokens at a time, and writes. The second sweep starts where the first has ended and reads what
that has just read, so caches serve it. Sequences start from zero, so backward needs nothing from forward.

Sequences are the batch rows of the 1D scan, or the rows or columns of a grid. In a grid, the launch for the rows writes
its share in float32, and the launch for the columns adds that to its own.
"""

import triton
import triton.language as tl

from .triton_group import ascend, backward_group, forward_group
from .triton_math import (
    advance,
    load_input,
    load_rows,
    load_turns,
    locate_sequence,
    repeat,
    store_rows,
    where_inside,
    zero,
)


@triton.jit(do_not_specialize=["T", "WIDTH"])
def forward_sequence_kernel(
    x,  # (sequences, T, FIELDS D), with the tokens of a sequence STEP apart
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D)
    bias,  # (FIELDS D,) or None
    ends,  # (sequences, groups, 2, D), a workspace: the reverse states past each group; None if K = 1
    other,  # like out, in float32: added to the states; or None
    out,  # (sequences, T, 2D)
    T,
    WIDTH,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    GT: tl.constexpr,
    BD: tl.constexpr,
):
    """The output of a sequence: one sweep down for the reverse states, one up that adds the forward ones and writes."""
    STEP = WIDTH if COLUMNS else 1
    i_s, i_t, o_d = locate_sequence(T, STEP, D, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_range = 1.0 - tl.load(lower_bound + o_d, mask=mask, other=0.0)
    turns = load_turns(rotation + o_d, K, D, mask)
    groups = (T + GT - 1) // GT
    h = zero(BD)
    r = zero(BD)
    if K == 2:
        p_ends = ends + i_s * groups * (2 * D) + o_d
        for i in range(groups - 1, 0, -1):
            p_x = x + (i_t + i * GT * STEP) * (FIELDS * D) + o_d
            for t in tl.static_range(GT - 1, -1, -1):
                inside = where_inside(o_d, i * GT + t, T, D)
                b_rest, u = load_input(p_x + t * STEP * (FIELDS * D), b_bias, b_range, D, inside)
                r = advance(r, b_rest, u, turns[1])
            store_rows(p_ends + i * (2 * D), r, D, mask)
        tl.debug_barrier()

    for i in range(groups):
        if K == 2:
            r = load_rows(p_ends + (i + 1) * (2 * D), 2, D, where_inside(o_d, i + 1, groups, D))
        p_x = x + (i_t + i * GT * STEP) * (FIELDS * D) + o_d
        p_other = None if other is None else other + (i_t + i * GT * STEP) * (2 * D) + o_d
        p_out = out + (i_t + i * GT * STEP) * (2 * D) + o_d
        left = T - i * GT
        h = forward_group(p_x, p_other, p_out, h, r, b_bias, b_range, turns, o_d, left, STEP, D, FIELDS, K, GATE, GT)


@triton.jit(do_not_specialize=["T", "WIDTH"])
def backward_sequence_kernel(
    dout,  # (sequences, T, 2D), with the tokens of a sequence STEP apart
    x,  # (sequences, T, FIELDS D)
    lower_bound,  # (D,)
    rotation,  # (K, 2, 4, D)
    bias,  # (FIELDS D,) or None
    starts,  # (sequences, chunks, 2K, D), a workspace: h and q that enter each chunk of CT tokens
    other,  # like dx, in float32: added to it; or None
    dx,  # (sequences, T, FIELDS D)
    sums,  # (sequences, SUMS, D): [dlower_bound | dtheta | dbias], the last only if there is a bias
    T,
    WIDTH,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    CT: tl.constexpr,
    GT: tl.constexpr,
    BD: tl.constexpr,
):
    """dx of a sequence and its part of the sums: one sweep up for h and q, one down for p and r that writes."""
    STEP = WIDTH if COLUMNS else 1
    i_s, i_t, o_d = locate_sequence(T, STEP, D, BD)
    mask = o_d < D
    b_bias = None if bias is None else load_rows(bias + o_d, FIELDS, D, mask)
    b_bound = tl.load(lower_bound + o_d, mask=mask, other=0.0)
    b_range = 1.0 - b_bound
    turns = load_turns(rotation + o_d, K, D, mask)
    CHUNKS = (T + CT - 1) // CT
    p_starts = starts + i_s * CHUNKS * (2 * K * D) + o_d
    h = zero(BD)
    q = zero(BD)
    for i in range(1, CHUNKS):
        p_x = x + (i_t + (i - 1) * CT * STEP) * (FIELDS * D) + o_d
        p_dout = dout + (i_t + (i - 1) * CT * STEP) * (2 * D) + o_d
        h, q = ascend(p_dout, p_x, h, q, b_bias, b_range, turns, o_d, CT, STEP, D, FIELDS, K, CT)
        store_rows(p_starts + i * (2 * K * D), h + q if K == 2 else h, D, mask)
    tl.debug_barrier()

    SUMS: tl.constexpr = 1 + K if bias is None else 1 + K + FIELDS
    total = repeat(tl.full([BD], 0.0, tl.float32), SUMS)
    p = zero(BD)
    r = zero(BD)
    for i in range(CHUNKS - 1, -1, -1):
        p_x = x + (i_t + i * CT * STEP) * (FIELDS * D) + o_d
        p_other = None if other is None else other + (i_t + i * CT * STEP) * (FIELDS * D) + o_d
        p_dx = dx + (i_t + i * CT * STEP) * (FIELDS * D) + o_d
        p_dout = dout + (i_t + i * CT * STEP) * (2 * D) + o_d
        left = T - i * CT
        # the first chunk starts from zero, which is not stored
        start = load_rows(p_starts + i * (2 * K * D), 2 * K, D, where_inside(o_d, 0, i, D))
        h = (start[0], start[1])
        if K == 2:
            q = (start[2], start[3])
        entering = ((h, q),)
        for j in tl.static_range(0, CT - GT, GT):
            p_j = p_x + j * STEP * (FIELDS * D)
            d_j = p_dout + j * STEP * (2 * D)
            h, q = ascend(d_j, p_j, h, q, b_bias, b_range, turns, o_d, left - j, STEP, D, FIELDS, K, GT)
            entering += ((h, q),)
        for j in tl.static_range(CT // GT - 1, -1, -1):
            h, q = entering[j]
            o_j = j * GT * STEP * (FIELDS * D)
            p, r, total = backward_group(
                p_dout + j * GT * STEP * (2 * D),
                p_x + o_j,
                None if other is None else p_other + o_j,
                p_dx + o_j,
                h,
                q,
                p,
                r,
                total,
                b_bias,
                b_bound,
                turns,
                o_d,
                left - j * GT,
                STEP,
                D,
                FIELDS,
                K,
                GT,
            )
    store_rows(sums + i_s * SUMS * D + o_d, total, D, mask)

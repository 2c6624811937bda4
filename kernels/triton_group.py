"""What the apply and sequence kernels do with a group of GT tokens: hold it in registers and sweep it down, then up.

The tokens of a sequence are STEP apart: 1 along a row, the width of the grid along a column.
"""

import triton
import triton.language as tl

from .triton_math import (
    accumulate,
    add,
    advance,
    cross,
    dot,
    hand_back,
    load_dh,
    load_input,
    load_pair,
    load_rows,
    load_token,
    rotate,
    scale,
    sigmoid_pair,
    store_rows,
    subtract,
    where_inside,
)


@triton.jit
def forward_group(
    p_x,
    p_other,
    p_out,
    h,
    r,
    b_bias,
    b_range,
    turns,
    o_d,
    left,
    STEP,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    GT: tl.constexpr,
):
    """Write a group's output from the states that enter it, h from below and r from above; returns h past the group.

    If there is an `other`, it is added to the states; with GATE, the output gate is applied.
    """
    # loads are not moved up past a store, so store when the whole group is done
    held, written = (), ()
    for t in tl.static_range(GT - 1, -1, -1):
        inside = where_inside(o_d, t, left, D)
        b_rest, u = load_input(p_x + t * STEP * (FIELDS * D), b_bias, b_range, D, inside)
        if K == 2:
            r = advance(r, b_rest, u, turns[1])
        held = ((b_rest, u, r),) + held
    for t in tl.static_range(GT):
        inside = where_inside(o_d, t, left, D)
        b_rest, u, r_here = held[t]
        h = advance(h, b_rest, u, turns[0])
        y = h
        if K == 2:
            y = add(h, r_here)
        if p_other is not None:
            y = add(y, load_pair(p_other + t * STEP * (2 * D), None, 0, D, inside))
        if GATE:
            g = sigmoid_pair(load_pair(p_x + t * STEP * (FIELDS * D), b_bias, 3, D, inside))[0]
            y = (g[0] * y[0], g[1] * y[1])
        written += (y,)
    for t in tl.static_range(GT):
        store_rows(p_out + t * STEP * (2 * D), written[t], D, where_inside(o_d, t, left, D))
    return h


@triton.jit
def ascend(
    p_dout,
    p_x,
    h,
    q,
    b_bias,
    b_range,
    turns,
    o_d,
    left,
    STEP,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    COUNT: tl.constexpr,
):
    """h and q past COUNT tokens."""
    for t in tl.static_range(COUNT):
        inside = where_inside(o_d, t, left, D)
        p_t = p_x + t * STEP * (FIELDS * D)
        b_rest, u = load_input(p_t, b_bias, b_range, D, inside)
        h = advance(h, b_rest, u, turns[0])
        if K == 2:
            dh = load_dh(p_t, p_dout + t * STEP * (2 * D), b_bias, D, FIELDS, inside)[0]
            q = hand_back(add(q, dh), b_rest, turns[1])
    return h, q


@triton.jit
def differentiate(token, p, w, h, q, b_bound, turns, K: tl.constexpr, FIELDS: tl.constexpr):
    """h and q past a token, its dx, and its terms of the sums [dlower_bound | dtheta | dbias].

    p is the adjoint of the token's forward state, w the next token's reverse state times e^(i theta).
    """
    forget, c, slope, dh, closed = token
    b_mu, b_nu = forget
    b_rest = (1.0 - b_bound) * b_nu
    # dtheta is a multiple of the decay, which must not be computed as 1 - rest here: that is inaccurate if it is small
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


@triton.jit
def backward_group(
    p_dout,
    p_x,
    p_other,
    p_dx,
    h,
    q,
    p,
    r,
    total,
    b_bias,
    b_bound,
    turns,
    o_d,
    left,
    STEP,
    D: tl.constexpr,
    FIELDS: tl.constexpr,
    K: tl.constexpr,
    GT: tl.constexpr,
):
    """Write a group's dx and add to the sums, from h and q that enter it from below and p and r from above.

    Returns p and r past the group, and the sums. If there is an `other`, it is added to dx (and not to the sums).
    """
    b_range = 1.0 - b_bound
    held, written = (), ()
    for t in tl.static_range(GT - 1, -1, -1):
        inside = where_inside(o_d, t, left, D)
        p_t = p_x + t * STEP * (FIELDS * D)
        token = load_token(p_t, p_dout + t * STEP * (2 * D), b_bias, D, FIELDS, inside)
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
        if p_other is not None:
            inside = where_inside(o_d, t, left, D)
            b_dx = accumulate(b_dx, load_rows(p_other + t * STEP * (FIELDS * D), FIELDS, D, inside))
        written += (b_dx,)
    for t in tl.static_range(GT):
        store_rows(p_dx + t * STEP * (FIELDS * D), written[t], D, where_inside(o_d, t, left, D))
    return p, r, total

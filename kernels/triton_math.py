"""Pieces of the Triton kernels: complex arithmetic, gates and loads on blocks of channels.

A complex number is a pair (re, im) of blocks, and what a program keeps of several tokens is a tuple of them: tuples are
unrolled when the kernel is compiled, so that everything in them lives in registers. Fused multiply-adds are explicit,
so that the interpreter rounds as the hardware does.
"""

import inspect

import triton
import triton.language as tl

# newer versions of triton can ask for a reciprocal in one instruction; with others it is a full-range division
APPROX = tl.constexpr("approx" in inspect.signature(tl.fdiv).parameters)


@triton.jit
def rotate(z, w):
    """z w."""
    return tl.fma(w[0], z[0], -w[1] * z[1]), tl.fma(w[0], z[1], w[1] * z[0])


@triton.jit
def add(z, w):
    return z[0] + w[0], z[1] + w[1]


@triton.jit
def subtract(z, w):
    return z[0] - w[0], z[1] - w[1]


@triton.jit
def scale(b_a, z):
    return b_a * z[0], b_a * z[1]


@triton.jit
def dot(z, w):
    """Re(conj(z) w)."""
    return tl.fma(z[0], w[0], z[1] * w[1])


@triton.jit
def cross(z, w):
    """Im(conj(z) w)."""
    return tl.fma(z[0], w[1], -z[1] * w[0])


@triton.jit
def zero(BD: tl.constexpr):
    return tl.full([BD], 0.0, tl.float32), tl.full([BD], 0.0, tl.float32)


@triton.jit
def repeat(value, COUNT: tl.constexpr):
    values = ()
    for _i in tl.static_range(COUNT):
        values += (value,)
    return values


@triton.jit
def select(condition, value, other):
    """value where the condition holds, else other; both tuples of blocks."""
    chosen = ()
    for i in tl.static_range(len(value)):
        chosen += (tl.where(condition, value[i], other[i]),)
    return chosen


@triton.jit
def pick(values, i):
    """values[i] for an i known only at run time, because registers have no addresses."""
    chosen = values[0]
    for j in tl.static_range(1, len(values)):
        chosen = select(i == j, values[j], chosen)
    return chosen


@triton.jit
def put(values, i, value):
    """The values with values[i] replaced, for an i known only at run time."""
    changed = ()
    for j in tl.static_range(len(values)):
        changed += (select(i == j, value, values[j]),)
    return changed


@triton.jit
def accumulate(sums, terms):
    total = ()
    for i in tl.static_range(len(sums)):
        total += (sums[i] + terms[i],)
    return total


@triton.jit
def sigmoid(b_x):
    """sigmoid(x) and 1 - sigmoid(x), both without cancellation; NaN stays NaN."""
    # base 2 and the clamp keep both exponential and reciprocal to one instruction, with nothing lost above 2^-125
    b_x = tl.clamp(b_x, -87.0, 105.0, propagate_nan=tl.PropagateNan.ALL)
    b_power = b_x * -1.4426950408889634
    # what the power loses by rounding grows with x, to 4e-6 of the exponential
    b_lost = -tl.fma(b_power, 0.6931471805599453, b_x)
    b_e = tl.exp2(b_power)
    b_e = tl.fma(b_e, b_lost, b_e)
    b_s = tl.fdiv(1.0, 1.0 + b_e, approx=True) if APPROX else 1.0 / (1.0 + b_e)
    return b_s, b_e * b_s


@triton.jit
def sigmoid_pair(x):
    s_re, n_re = sigmoid(x[0])
    s_im, n_im = sigmoid(x[1])
    return (s_re, s_im), (n_re, n_im)


@triton.jit
def silu_pair(x):
    """SiLU of both parts, and its slope."""
    s, n = sigmoid_pair(x)
    c = (x[0] * s[0], x[1] * s[1])
    return c, (s[0] + c[0] * n[0], s[1] + c[1] * n[1])


@triton.jit
def locate(T, D: tl.constexpr, CT: tl.constexpr, BD: tl.constexpr):
    """The program's chunk (counted over the batch), its first token, the tokens left from there on, its channels."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    i_c = tl.program_id(0) // BLOCKS
    o_d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    CHUNKS = (T + CT - 1) // CT
    i_t = i_c % CHUNKS * CT
    return i_c.to(tl.int64), (i_c // CHUNKS).to(tl.int64) * T + i_t, T - i_t, o_d


@triton.jit
def locate_sequence(T, STEP, D: tl.constexpr, BD: tl.constexpr):
    """The program's sequence of T tokens, its first token, its channels; STEP sequences are interleaved in memory."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    i_s = tl.program_id(0) // BLOCKS
    o_d = tl.program_id(0) % BLOCKS * BD + tl.arange(0, BD)
    return i_s.to(tl.int64), (i_s // STEP).to(tl.int64) * (T * STEP) + i_s % STEP, o_d


@triton.jit
def where_inside(o_d, t, left, D: tl.constexpr):
    """Mask of the channels below D, empty for a token past the end."""
    return o_d < tl.where(t < left, D, 0)


@triton.jit
def load_rows(p, ROWS: tl.constexpr, D: tl.constexpr, mask):
    rows = ()
    for i in tl.static_range(ROWS):
        rows += (tl.load(p + i * D, mask=mask, other=0.0),)
    return rows


@triton.jit
def store_rows(p, rows, D: tl.constexpr, mask):
    for i in tl.static_range(len(rows)):
        tl.store(p + i * D, rows[i].to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_field(p_x, b_bias, FIELD: tl.constexpr, D: tl.constexpr, mask, other=0.0):
    b_x = tl.load(p_x + FIELD * D, mask=mask, other=other).to(tl.float32)
    if b_bias is not None:
        b_x += b_bias[FIELD]
    return b_x


@triton.jit
def load_pair(p_x, b_bias, FIELD: tl.constexpr, D: tl.constexpr, mask):
    return load_field(p_x, b_bias, FIELD, D, mask), load_field(p_x, b_bias, FIELD + 1, D, mask)


@triton.jit
def load_forget(p_x, b_bias, D: tl.constexpr, mask):
    """mu and 1 - mu; a token past the end forgets nothing and lets nothing in."""
    return sigmoid(load_field(p_x, b_bias, 2, D, mask, float("inf")))


@triton.jit
def load_input(p_x, b_bias, b_range, D: tl.constexpr, mask):
    """The rest 1 - decay, and what enters the state, (1 - decay) c."""
    b_rest = b_range * load_forget(p_x, b_bias, D, mask)[1]
    c = silu_pair(load_pair(p_x, b_bias, 0, D, mask))[0]
    return b_rest, scale(b_rest, c)


@triton.jit
def load_dh(p_x, p_dout, b_bias, D: tl.constexpr, FIELDS: tl.constexpr, mask):
    """The gradient of the sum of the two states, and the same times 1 - g (or itself without an output gate)."""
    dh = load_pair(p_dout, None, 0, D, mask)
    closed = dh
    if FIELDS == 5:
        g, n = sigmoid_pair(load_pair(p_x, b_bias, 3, D, mask))
        dh = (dh[0] * g[0], dh[1] * g[1])
        closed = (dh[0] * n[0], dh[1] * n[1])
    return dh, closed


@triton.jit
def load_token(p_x, p_dout, b_bias, D: tl.constexpr, FIELDS: tl.constexpr, mask):
    """What backward needs of a token: (mu, 1 - mu), c and its slope, the states' gradient and that times 1 - g."""
    forget = load_forget(p_x, b_bias, D, mask)
    c, slope = silu_pair(load_pair(p_x, b_bias, 0, D, mask))
    dh, closed = load_dh(p_x, p_dout, b_bias, D, FIELDS, mask)
    return forget, c, slope, dh, closed


@triton.jit
def load_turns(p_rotation, K: tl.constexpr, D: tl.constexpr, mask):
    """The rotation of a token in each direction: cos, sin and the rounding error of each."""
    turns = ()
    for i in tl.static_range(K):
        turns += (load_rows(p_rotation + 8 * i * D, 4, D, mask),)
    return turns


@triton.jit
def decayed(b_rest, turn):
    """decay e^(i theta), each part rounded once."""
    return turn[0] + tl.fma(-b_rest, turn[0], turn[2]), turn[1] + tl.fma(-b_rest, turn[1], turn[3])


@triton.jit
def advance(h, b_rest, u, turn):
    """decay e^(i theta) h + u."""
    b_a, b_b = decayed(b_rest, turn)
    return tl.fma(b_a, h[0], tl.fma(-b_b, h[1], u[0])), tl.fma(b_a, h[1], tl.fma(b_b, h[0], u[1]))


@triton.jit
def hand_back(p, b_rest, turn):
    """decay e^(-i theta) p: what the adjoint of a state adds to that of the state before it."""
    b_a, b_b = decayed(b_rest, turn)
    return tl.fma(b_a, p[0], b_b * p[1]), tl.fma(b_a, p[1], -b_b * p[0])

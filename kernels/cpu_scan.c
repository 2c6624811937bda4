/* The HGRU scan (arXiv 2311.04823) on CPUs, forward and backward: reference.py defines it, cpu_scan.py launches it.
 *
 * With h and r the complex states of the two directions, and x the pre-activations of c, decay and g:
 *
 *   h[t] = decay[t] exp(i theta[0]) h[t-1] + (1 - decay[t]) c[t]    first token to last
 *   r[t] = decay[t] exp(i theta[1]) r[t+1] + (1 - decay[t]) c[t]    last token to first
 *   out[t] = g[t] (h[t] + r[t])                                     on real and imaginary parts
 *
 * A unit of work is one batch row and BLOCK channels. Channels are independent, so every loop over `d` becomes vector
 * code; tokens are not, so a unit goes through them in chunks of CHUNK and keeps all intermediate values in its core's
 * cache. What travels through memory is the input, the result, and the states that enter each chunk, from which
 * backward computes the others again.
 *
 * Units do not depend on the number of threads, and sums are taken in the order of tokens, chunks and batch rows: the
 * results are the same to the last bit for any number of threads. */
#include <math.h>

#include "cpu_math.h"

/* the rows of D channels that make up a token of x */
enum { C_RE, C_IM, FORGET, G_RE, G_IM };

/* the gradients that are summed over tokens and batch: biases by row of x, the lower bound, two angles */
enum { LOWER_BOUND = 5, THETA, SUMS = THETA + 2 };

/* chunks whose gates stay in cache between the two passes of forward; those of the others are computed twice */
enum { KEPT = 1024 / CHUNK };

/* how many tokens ahead memory is fetched, and the elements of a cache line */
enum { AHEAD = 8, LINE = 64 / sizeof(elem) };

typedef struct {
    int64_t T, D, chunks;
    int64_t rows; /* of x: 5 with an output gate, 3 without */
    int64_t K;    /* directions */
} shape;

typedef struct {
    real re[BLOCK], im[BLOCK];
} state;

/* exp(i theta) and what its rounding left over: an error that is the same at each token adds up over all of them */
typedef struct {
    state high, low;
} rotation;

/* what is constant over the tokens of a unit */
typedef struct {
    real bias[5][BLOCK], lower_bound[BLOCK];
    rotation turn[2];
} channels;

/* a token's 1 - decay, which keeps its digits where the decay is close to 1, and its input (1 - decay) c */
typedef struct {
    real rest[BLOCK];
    state input;
} token;

static inline int64_t chunk_length(int64_t i, shape s) { return i + 1 < s.chunks ? CHUNK : s.T - i * CHUNK; }

static inline void read_state(state *restrict h, const real *restrict from, int64_t D) {
    memcpy(h->re, from, sizeof h->re);
    memcpy(h->im, from + D, sizeof h->im);
}

static inline void write_state(real *restrict to, const state *restrict h, int64_t D) {
    memcpy(to, h->re, sizeof h->re);
    memcpy(to + D, h->im, sizeof h->im);
}

/* turns (K, [high, low], [Re, Im], D) of BLOCK channels, from theta (K, D) */
static void make_turns(real *turns, const real *theta, int64_t d, shape s) {
    for (int64_t k = 0; k < s.K; k++)
        for (int64_t j = d; j < d + BLOCK; j++) {
            const double exact[2] = {cos(theta[k * s.D + j]), sin(theta[k * s.D + j])};
            for (int part = 0; part < 2; part++) {
                const real high = (real)exact[part];
                turns[(4 * k + part) * s.D + j] = high;
                turns[(4 * k + 2 + part) * s.D + j] = (real)(exact[part] - high);
            }
        }
}

static channels gather_channels(const real *lower_bound, const real *turns, const real *bias, int64_t d, shape s) {
    channels c = {0};
    memcpy(c.lower_bound, lower_bound + d, sizeof c.lower_bound);
    for (int row = 0; row < s.rows; row++) memcpy(c.bias[row], bias + row * s.D + d, sizeof c.bias[row]);
    for (int k = 0; k < s.K; k++) {
        read_state(&c.turn[k].high, turns + 4 * k * s.D + d, s.D);
        read_state(&c.turn[k].low, turns + (4 * k + 2) * s.D + d, s.D);
    }
    return c;
}

/* a unit's parts of two tokens lie far apart, which hardware does not foresee: without this, backward takes twice as
 * long */
static inline void fetch(const elem *row, int64_t rows, int64_t D) {
    for (const elem *end = row + rows * D; row < end; row += D)
        for (int d = 0; d < BLOCK; d += LINE) __builtin_prefetch(row + d, 0);
}

static inline void fetch_to_write(const elem *row, int64_t rows, int64_t D) {
    for (const elem *end = row + rows * D; row < end; row += D)
        for (int d = 0; d < BLOCK; d += LINE) __builtin_prefetch(row + d, 1);
}

static inline void open_gates(token *restrict at, const elem *restrict x, const channels *restrict c, int64_t D) {
    for (int d = 0; d < BLOCK; d++) {
        real c_re = load(x[C_RE * D + d]) + c->bias[C_RE][d], c_im = load(x[C_IM * D + d]) + c->bias[C_IM][d];
        gate forget = sigmoid(load(x[FORGET * D + d]) + c->bias[FORGET][d]);
        real rest = (1 - c->lower_bound[d]) * forget.off;
        at->rest[d] = rest;
        at->input.re[d] = rest * (c_re * sigmoid(c_re).on);
        at->input.im[d] = rest * (c_im * sigmoid(c_im).on);
    }
}

/* decay exp(i theta), rounded once */
static inline real decayed(real rest, real high, real low) { return high + (low - rest * high); }

/* h = decay exp(i theta) h + input, grouped so that only two operations wait for the token before */
static inline void advance(state *restrict h, const token *restrict at, const rotation *restrict turn) {
    for (int d = 0; d < BLOCK; d++) {
        real re = h->re[d], im = h->im[d];
        real a = decayed(at->rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->rest[d], turn->high.im[d], turn->low.im[d]);
        h->re[d] = a * re + (at->input.re[d] - b * im);
        h->im[d] = a * im + (at->input.im[d] + b * re);
    }
}

static inline void emit(elem *restrict out, const state *restrict h, const state *restrict r, const elem *restrict x,
                        const channels *restrict c, shape s) {
    for (int d = 0; d < BLOCK; d++) {
        real re = h->re[d] + r->re[d], im = h->im[d] + r->im[d];
        if (s.rows == 5) {
            re *= sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).on;
            im *= sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).on;
        }
        out[d] = store(re);
        out[s.D + d] = store(im);
    }
}

/* x, states (chunks, 2K, D) and out are those of the unit's batch row, from its first channel on */
static void forward_unit(const elem *restrict x, const channels *restrict c, real *restrict states, elem *restrict out,
                         shape s) {
    static _Thread_local token kept[KEPT + 1][CHUNK];
    const int64_t stride = s.rows * s.D;
    state h = {0}, r = {0}, reverse[CHUNK] = {0};

    for (int64_t i = s.chunks - 1; s.K == 2 && i >= 0; i--) {
        token *tokens = kept[i < KEPT ? i : KEPT];
        const elem *x_chunk = x + i * CHUNK * stride;
        write_state(states + (4 * i + 2) * s.D, &r, s.D);
        for (int64_t t = chunk_length(i, s) - 1; t >= 0; t--) {
            fetch(x_chunk + (t - AHEAD) * stride, s.rows, s.D);
            open_gates(tokens + t, x_chunk + t * stride, c, s.D);
            advance(&r, tokens + t, &c->turn[1]);
        }
    }
    for (int64_t i = 0; i < s.chunks; i++) {
        token *tokens = kept[i < KEPT ? i : KEPT];
        const elem *x_chunk = x + i * CHUNK * stride;
        elem *out_chunk = out + i * CHUNK * 2 * s.D;
        const int64_t n = chunk_length(i, s);
        for (int64_t t = 0; (s.K == 1 || i >= KEPT) && t < n; t++) {
            fetch(x_chunk + (t + AHEAD) * stride, s.rows, s.D);
            open_gates(tokens + t, x_chunk + t * stride, c, s.D);
        }
        if (s.K == 2) read_state(&r, states + (4 * i + 2) * s.D, s.D);
        for (int64_t t = n - 1; s.K == 2 && t >= 0; t--) {
            advance(&r, tokens + t, &c->turn[1]);
            reverse[t] = r;
        }
        write_state(states + 2 * s.K * i * s.D, &h, s.D);
        for (int64_t t = 0; t < n; t++) {
            fetch_to_write(out_chunk + (t + AHEAD) * 2 * s.D, 2, s.D);
            advance(&h, tokens + t, &c->turn[0]);
            emit(out_chunk + t * 2 * s.D, &h, &reverse[t], x_chunk + t * stride, c, s);
        }
    }
}

static inline real sum_of(real *lanes) {
    for (int n = BLOCK / 2; n > 0; n /= 2)
        for (int j = 0; j < n; j++) lanes[j] += lanes[j + n];
    return lanes[0];
}

/* LayerNorm of one token in place; width is a multiple of BLOCK */
static void normalize(elem *restrict out, const real *restrict weight, const real *restrict shift, real eps,
                      int64_t width) {
    real sums[BLOCK] = {0}, squares[BLOCK] = {0};
    for (int64_t i = 0; i < width; i += BLOCK)
        for (int j = 0; j < BLOCK; j++) sums[j] += load(out[i + j]);
    const real mean = sum_of(sums) / (real)width;
    for (int64_t i = 0; i < width; i += BLOCK)
        for (int j = 0; j < BLOCK; j++) {
            real difference = load(out[i + j]) - mean;
            squares[j] += difference * difference;
        }
    const real scale = (real)(1 / sqrt((double)(sum_of(squares) / (real)width + eps)));
    for (int64_t i = 0; i < width; i++) out[i] = store((load(out[i]) - mean) * scale * weight[i] + shift[i]);
}

/* x (B, T, rows, D), lower_bound (D), theta (K, D), bias (rows, D), states (B, chunks, 2K, D), out (B, T, 2, D);
 * weight and shift (2, D) are those of a LayerNorm of out, or null for none; turns (K, 2, 2, D) is room to work in;
 * D is a multiple of BLOCK */
void scan_forward(const elem *x, const real *lower_bound, const real *theta, const real *bias, const real *weight,
                  const real *shift, real *turns, real *states, elem *out, double eps, int64_t B, int64_t T, int64_t D,
                  int64_t rows, int64_t K, int64_t threads) {
    const shape s = {T, D, (T + CHUNK - 1) / CHUNK, rows, K};
    /* a thread that does all channels of a batch row normalizes them while they are in its core's cache */
    const int whole = weight && (B % threads == 0 || B >= 4 * threads);
    const int64_t span = whole ? D : BLOCK;
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for
        for (int64_t d = 0; d < D; d += BLOCK) make_turns(turns, theta, d, s);
        #pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < B * D; first += span) {
            const int64_t b = first / D;
            elem *out_b = out + b * T * 2 * D;
            for (int64_t d = first % D; d < first % D + span; d += BLOCK) {
                const channels c = gather_channels(lower_bound, turns, bias, d, s);
                forward_unit(x + b * T * rows * D + d, &c, states + b * s.chunks * 2 * K * D + d, out_b + d, s);
            }
            for (int64_t t = 0; whole && t < T; t++) normalize(out_b + t * 2 * D, weight, shift, (real)eps, 2 * D);
        }
        #pragma omp for
        for (int64_t t = 0; t < (weight && !whole ? B * T : 0); t++)
            normalize(out + t * 2 * D, weight, shift, (real)eps, 2 * D);
    }
}

/* a token on the way back: its part in the sweeps, and the slopes that turn their results into dx */
typedef struct {
    token gates;
    real slope_forget[BLOCK], slope_bound[BLOCK]; /* of the decay, by the forget gate's x and by the lower bound */
    state c, slope_c;                             /* SiLU of the input, and its derivative */
    state dstate, slope_g; /* g dout, the gradient of h + r; dout dg / dx, to be multiplied by h + r */
    state turned, q;       /* exp(i theta[0]) h[t-1]; the adjoint of r[t], zero in causal scans */
} tape;

static inline void record_input(tape *restrict at, const elem *restrict x, const channels *restrict c, int64_t D) {
    for (int d = 0; d < BLOCK; d++) {
        real x_re = load(x[C_RE * D + d]) + c->bias[C_RE][d], x_im = load(x[C_IM * D + d]) + c->bias[C_IM][d];
        gate re = sigmoid(x_re), im = sigmoid(x_im), forget = sigmoid(load(x[FORGET * D + d]) + c->bias[FORGET][d]);
        real c_re = x_re * re.on, c_im = x_im * im.on;
        real rest = (1 - c->lower_bound[d]) * forget.off;
        at->gates.rest[d] = rest;
        at->gates.input.re[d] = rest * c_re;
        at->gates.input.im[d] = rest * c_im;
        at->slope_forget[d] = rest * forget.on;
        at->slope_bound[d] = forget.off;
        at->c.re[d] = c_re;
        at->c.im[d] = c_im;
        at->slope_c.re[d] = re.on + c_re * re.off;
        at->slope_c.im[d] = im.on + c_im * im.off;
    }
}

static inline void record_output(tape *restrict at, const elem *restrict dout, const elem *restrict x,
                                 const channels *restrict c, shape s) {
    for (int d = 0; d < BLOCK; d++) {
        real re = load(dout[d]), im = load(dout[s.D + d]);
        if (s.rows == 5) {
            gate g_re = sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]);
            gate g_im = sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]);
            re *= g_re.on;
            im *= g_im.on;
            at->slope_g.re[d] = re * g_re.off;
            at->slope_g.im[d] = im * g_im.off;
        }
        at->dstate.re[d] = re;
        at->dstate.im[d] = im;
    }
}

static inline void record_rest(tape *restrict at, const elem *restrict x, const channels *restrict c, int64_t D) {
    for (int d = 0; d < BLOCK; d++)
        at->gates.rest[d] = (1 - c->lower_bound[d]) * sigmoid(load(x[FORGET * D + d]) + c->bias[FORGET][d]).off;
}

static inline void record_turned(tape *restrict at, const state *restrict h, const rotation *restrict turn) {
    for (int d = 0; d < BLOCK; d++) {
        at->turned.re[d] = turn->high.re[d] * h->re[d] - turn->high.im[d] * h->im[d];
        at->turned.im[d] = turn->high.re[d] * h->im[d] + turn->high.im[d] * h->re[d];
    }
}

/* q[t] from what token t-1 handed on, and what token t hands on: decay exp(-i theta) q[t] */
static inline void record_adjoint(tape *restrict at, state *restrict handed, const rotation *restrict turn) {
    for (int d = 0; d < BLOCK; d++) {
        real re = handed->re[d] + at->dstate.re[d], im = handed->im[d] + at->dstate.im[d];
        real a = decayed(at->gates.rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->gates.rest[d], turn->high.im[d], turn->low.im[d]);
        at->q.re[d] = re;
        at->q.im[d] = im;
        handed->re[d] = a * re + b * im;
        handed->im[d] = a * im - b * re;
    }
}

/* dx of a token but for its output gate, from the adjoints p and q of h and r, with r that of token t+1; `handed` comes
 * with what token t+1 hands on to p and leaves with what token t does; `both` receives h + r */
static inline void differentiate(elem *restrict dx, real (*restrict sums)[BLOCK], state *restrict handed,
                                 state *restrict both, const state *restrict r, const tape *restrict at,
                                 const rotation *restrict turn, shape s) {
    const real directions = (real)s.K;
    for (int d = 0; d < BLOCK; d++) {
        real rest = at->gates.rest[d], in_re = at->gates.input.re[d], in_im = at->gates.input.im[d];
        real h_re = at->turned.re[d], h_im = at->turned.im[d];
        real r_re = turn[1].high.re[d] * r->re[d] - turn[1].high.im[d] * r->im[d];
        real r_im = turn[1].high.re[d] * r->im[d] + turn[1].high.im[d] * r->re[d];
        real p_re = handed->re[d] + at->dstate.re[d], p_im = handed->im[d] + at->dstate.im[d];
        real q_re = at->q.re[d], q_im = at->q.im[d];
        real pq_re = p_re + q_re, pq_im = p_im + q_im;

        real ddecay = (p_re * h_re + p_im * h_im) + (q_re * r_re + q_im * r_im);
        ddecay -= at->c.re[d] * pq_re + at->c.im[d] * pq_im;
        real dc_re = rest * pq_re * at->slope_c.re[d], dc_im = rest * pq_im * at->slope_c.im[d];
        real dforget = ddecay * at->slope_forget[d];
        dx[C_RE * s.D + d] = store(dc_re);
        dx[C_IM * s.D + d] = store(dc_im);
        dx[FORGET * s.D + d] = store(dforget);
        sums[C_RE][d] += dc_re;
        sums[C_IM][d] += dc_im;
        sums[FORGET][d] += dforget;
        sums[LOWER_BOUND][d] += ddecay * at->slope_bound[d];
        sums[THETA][d] += (1 - rest) * (p_im * h_re - p_re * h_im);
        sums[THETA + 1][d] += (1 - rest) * (q_im * r_re - q_re * r_im);
        both->re[d] = (1 - rest) * (h_re + r_re) + directions * in_re;
        both->im[d] = (1 - rest) * (h_im + r_im) + directions * in_im;

        real a = decayed(rest, turn[0].high.re[d], turn[0].low.re[d]);
        real b = decayed(rest, turn[0].high.im[d], turn[0].low.im[d]);
        handed->re[d] = a * p_re + b * p_im;
        handed->im[d] = a * p_im - b * p_re;
    }
}

static inline void differentiate_gate(elem *restrict dx, real (*restrict sums)[BLOCK], const state *restrict both,
                                      const tape *restrict at, int64_t D) {
    for (int d = 0; d < BLOCK; d++) {
        real dg_re = at->slope_g.re[d] * both->re[d], dg_im = at->slope_g.im[d] * both->im[d];
        dx[G_RE * D + d] = store(dg_re);
        dx[G_IM * D + d] = store(dg_im);
        sums[G_RE][d] += dg_re;
        sums[G_IM][d] += dg_im;
    }
}

/* what enters each chunk of the adjoints of r, first token to last; `at` is room for one token */
static void enter_adjoints(real *restrict adjoints, const elem *restrict dout, const elem *restrict x,
                           const channels *restrict c, tape *restrict at, shape s) {
    state q = {0};
    for (int64_t t = 0; t < s.T; t++) {
        const elem *x_t = x + t * s.rows * s.D, *dout_t = dout + t * 2 * s.D;
        if (t % CHUNK == 0) write_state(adjoints + t / CHUNK * 2 * s.D, &q, s.D);
        fetch(x_t + AHEAD * s.rows * s.D, s.rows, s.D);
        fetch(dout_t + AHEAD * 2 * s.D, 2, s.D);
        record_output(at, dout_t, x_t, c, s);
        record_rest(at, x_t, c, s.D);
        record_adjoint(at, &q, &c->turn[1]);
    }
}

/* pointers as in forward_unit; adjoints (chunks, 2, D) is room to work in, total (SUMS, D) receives the unit's sums */
static void backward_unit(const elem *restrict dout, const elem *restrict x, const channels *restrict c,
                          const real *restrict states, real *restrict adjoints, elem *restrict dx,
                          double *restrict total, shape s) {
    static _Thread_local tape tapes[CHUNK];
    const int64_t stride = s.rows * s.D;
    double unit_sums[SUMS][BLOCK] = {{0}};
    state h, r, p = {0}, q, both;

    if (s.K == 2) enter_adjoints(adjoints, dout, x, c, tapes, s);
    for (int64_t i = s.chunks - 1; i >= 0; i--) {
        const elem *x_chunk = x + i * CHUNK * stride, *dout_chunk = dout + i * CHUNK * 2 * s.D;
        elem *dx_chunk = dx + i * CHUNK * stride;
        real sums[SUMS][BLOCK] = {{0}};
        const int64_t n = chunk_length(i, s);
        read_state(&h, states + 2 * s.K * i * s.D, s.D);
        if (s.K == 2) {
            read_state(&r, states + (4 * i + 2) * s.D, s.D);
            read_state(&q, adjoints + 2 * i * s.D, s.D);
        }
        for (int64_t t = 0; t < n; t++) {
            tape *at = tapes + t;
            record_input(at, x_chunk + t * stride, c, s.D);
            record_output(at, dout_chunk + t * 2 * s.D, x_chunk + t * stride, c, s);
            record_turned(at, &h, &c->turn[0]);
            advance(&h, &at->gates, &c->turn[0]);
            if (s.K == 2)
                record_adjoint(at, &q, &c->turn[1]);
            else
                at->q = (state){0};
        }
        for (int64_t t = n - 1; t >= 0; t--) {
            fetch_to_write(dx_chunk + (t - AHEAD) * stride, s.rows, s.D);
            if (s.K == 1) r = (state){0};
            differentiate(dx_chunk + t * stride, sums, &p, &both, &r, tapes + t, c->turn, s);
            advance(&r, &tapes[t].gates, &c->turn[1]);
            if (s.rows == 5) differentiate_gate(dx_chunk + t * stride, sums, &both, tapes + t, s.D);
        }
        for (int j = 0; j < SUMS; j++)
            for (int d = 0; d < BLOCK; d++) unit_sums[j][d] += sums[j][d];
    }
    for (int j = 0; j < SUMS; j++) memcpy(total + j * s.D, unit_sums[j], sizeof unit_sums[j]);
}

/* dout (B, T, 2, D), dx like x, total (SUMS, D); turns, adjoints (B, chunks, 2, D) and partial (B, SUMS, D) are room
 * to work in */
void scan_backward(const elem *dout, const elem *x, const real *lower_bound, const real *theta, const real *bias,
                   const real *states, real *turns, real *adjoints, double *partial, elem *dx, real *total, int64_t B,
                   int64_t T, int64_t D, int64_t rows, int64_t K, int64_t threads) {
    const shape s = {T, D, (T + CHUNK - 1) / CHUNK, rows, K};
    const int64_t blocks = D / BLOCK;
    for (int64_t d = 0; d < D; d += BLOCK) make_turns(turns, theta, d, s);
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t unit = 0; unit < B * blocks; unit++) {
        const int64_t b = unit / blocks, d = unit % blocks * BLOCK;
        const channels c = gather_channels(lower_bound, turns, bias, d, s);
        backward_unit(dout + b * T * 2 * D + d, x + b * T * rows * D + d, &c, states + b * s.chunks * 2 * K * D + d,
                      adjoints + b * s.chunks * 2 * D + d, dx + b * T * rows * D + d, partial + b * SUMS * D + d, s);
    }
    for (int64_t i = 0; i < SUMS * D; i++) {
        double sum = 0;
        for (int64_t b = 0; b < B; b++) sum += partial[b * SUMS * D + i];
        total[i] = (real)sum;
    }
}

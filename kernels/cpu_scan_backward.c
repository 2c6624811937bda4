/* The HGRU scan on CPUs, backward; cpu_scan.h explains it, cpu_scan.py launches it.
 *
 * The adjoints p of h and q of r are scans as well, in the opposite directions and with opposite angles. */
#include "cpu_scan.h"

/* a token in backward: its part in the sweeps, and the slopes that turn their results into dx */
typedef struct {
    token gates;
    real decay[BD];                         /* accurate even where it is close to 0 */
    real slope_forget[BD], slope_bound[BD]; /* of the decay, by the forget gate's x and by the lower bound */
    state c, slope_c;                       /* SiLU of the input, and its derivative */
    state dstate, slope_g;                  /* g dout, the gradient of h + r; dout dg / dx, to be multiplied by h + r */
    state turned, q;                        /* exp(i theta[0]) h[t-1]; the adjoint of r[t], zero in causal scans */
} tape;

static inline void record_input(tape *restrict at, const elem *restrict x, const channels *restrict c, int64_t D) {
    for (int d = 0; d < BD; d++) {
        real x_re = load(x[C_RE * D + d]) + c->bias[C_RE][d], x_im = load(x[C_IM * D + d]) + c->bias[C_IM][d];
        gate re = sigmoid(x_re), im = sigmoid(x_im), forget = sigmoid(load(x[FORGET * D + d]) + c->bias[FORGET][d]);
        real c_re = x_re * re.on, c_im = x_im * im.on;
        real rest = (1 - c->lower_bound[d]) * forget.off;
        at->gates.rest[d] = rest;
        at->gates.input.re[d] = rest * c_re;
        at->gates.input.im[d] = rest * c_im;
        at->decay[d] = c->lower_bound[d] + (1 - c->lower_bound[d]) * forget.on;
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
    for (int d = 0; d < BD; d++) {
        real re = load(dout[d]), im = load(dout[s.D + d]);
        if (s.fields == 5) {
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

static inline void record_turned(tape *restrict at, const state *restrict h, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        at->turned.re[d] = turn->high.re[d] * h->re[d] - turn->high.im[d] * h->im[d];
        at->turned.im[d] = turn->high.re[d] * h->im[d] + turn->high.im[d] * h->re[d];
    }
}

/* from what the token before passed on to what this one does: decay exp(-i theta) (handed + input) */
static inline void hand_on(state *restrict handed, const token *restrict at, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        real re = handed->re[d] + at->input.re[d], im = handed->im[d] + at->input.im[d];
        real a = decayed(at->rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->rest[d], turn->high.im[d], turn->low.im[d]);
        handed->re[d] = a * re + b * im;
        handed->im[d] = a * im - b * re;
    }
}

/* q[t], and what token t passes on to q */
static inline void record_adjoint(tape *restrict at, state *restrict handed, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        real re = handed->re[d] + at->dstate.re[d], im = handed->im[d] + at->dstate.im[d];
        real a = decayed(at->gates.rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->gates.rest[d], turn->high.im[d], turn->low.im[d]);
        at->q.re[d] = re;
        at->q.im[d] = im;
        handed->re[d] = a * re + b * im;
        handed->im[d] = a * im - b * re;
    }
}

/* dx of token t, except for its output gate, from the adjoints p and q of h and r; r is that of token t+1; `handed` is
 * what token t+1 passes on to p, and becomes what token t does; `both` receives h + r */
static inline void differentiate(elem *restrict dx, real (*restrict sums)[BD], state *restrict handed,
                                 state *restrict both, const state *restrict r, const tape *restrict at,
                                 const rotation *restrict turn, shape s) {
    const real directions = (real)s.K;
    for (int d = 0; d < BD; d++) {
        real decay = at->decay[d], rest = at->gates.rest[d];
        real in_re = at->gates.input.re[d], in_im = at->gates.input.im[d];
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
        sums[THETA][d] += decay * (p_im * h_re - p_re * h_im);
        sums[THETA + 1][d] += decay * (q_im * r_re - q_re * r_im);
        both->re[d] = decay * (h_re + r_re) + directions * in_re;
        both->im[d] = decay * (h_im + r_im) + directions * in_im;

        real a = decayed(rest, turn[0].high.re[d], turn[0].low.re[d]);
        real b = decayed(rest, turn[0].high.im[d], turn[0].low.im[d]);
        handed->re[d] = a * p_re + b * p_im;
        handed->im[d] = a * p_im - b * p_re;
    }
}

static inline void differentiate_gate(elem *restrict dx, real (*restrict sums)[BD], const state *restrict both,
                                      const tape *restrict at, int64_t D) {
    for (int d = 0; d < BD; d++) {
        real dg_re = at->slope_g.re[d] * both->re[d], dg_im = at->slope_g.im[d] * both->im[d];
        dx[G_RE * D + d] = store(dg_re);
        dx[G_IM * D + d] = store(dg_im);
        sums[G_RE][d] += dg_re;
        sums[G_IM][d] += dg_im;
    }
}

typedef struct {
    const elem *dout, *x;
    const channels *c;
    real *decays, *adjoints, *partial;
    const real *states;
    elem *dx;
    shape s;
} backward;

static _Thread_local tape tapes[CHUNK];

/* the parts of chunk i of batch row b and channel block j */
typedef struct {
    const elem *dout, *x;
    elem *dx;
    const real *states;
    real *decays, *adjoints, *partial;
    int64_t n;
} part;

static inline part part_of(const backward *f, int64_t b, int64_t i, int64_t j) {
    const shape s = f->s;
    const int64_t t = b * s.T + i * s.length, chunk = b * s.chunks + i, d = j * BD;
    return (part){
        .dout = f->dout + t * 2 * s.D + d,
        .x = f->x + t * s.fields * s.D + d,
        .dx = f->dx + t * s.fields * s.D + d,
        .states = f->states + chunk * 2 * s.K * s.D + d,
        .decays = f->decays + chunk * s.D + d,
        .adjoints = f->adjoints + chunk * 2 * s.K * s.D + d,
        .partial = f->partial + chunk * SUMS * s.D + d,
        .n = chunk_length(i, s),
    };
}

/* 1 - decay, and g dout, the input of the adjoints */
static inline void open_adjoint(token *restrict at, const elem *restrict dout, const elem *restrict x,
                                const channels *restrict c, shape s) {
    for (int d = 0; d < BD; d++) {
        real re = load(dout[d]), im = load(dout[s.D + d]);
        if (s.fields == 5) {
            re *= sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).on;
            im *= sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).on;
        }
        at->rest[d] = (1 - c->lower_bound[d]) * sigmoid(load(x[FORGET * s.D + d]) + c->bias[FORGET][d]).off;
        at->input.re[d] = re;
        at->input.im[d] = im;
    }
}

/* what a chunk passes on to p and q if they enter it as zero */
static void enter(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    const shape s = f->s;
    const channels *c = f->c + j;
    const part at = part_of(f, b, i, j);
    token tokens[CHUNK];
    state p = {0}, q = {0};
    real decay[BD];
    for (int d = 0; d < BD; d++) decay[d] = 1;
    for (int64_t t = 0; t < at.n; t++) {
        const elem *x = at.x + t * s.fields * s.D, *dout = at.dout + t * 2 * s.D;
        fetch(x + AHEAD * s.fields * s.D, s.fields, s.D);
        fetch(dout + AHEAD * 2 * s.D, 2, s.D);
        open_adjoint(tokens + t, dout, x, c, s);
        if (s.K == 2) hand_on(&q, tokens + t, &c->turn[1]);
        for (int d = 0; d < BD; d++) decay[d] -= decay[d] * tokens[t].rest[d];
    }
    for (int64_t t = at.n - 1; t >= 0; t--) hand_on(&p, tokens + t, &c->turn[0]);
    memcpy(at.decays, decay, sizeof decay);
    write_state(at.adjoints, &p, s.D);
    if (s.K == 2) write_state(at.adjoints + 2 * s.D, &q, s.D);
}

static void carry_channels(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    (void)i;
    const shape s = f->s;
    const part at = part_of(f, b, 0, j);
    carry(at.adjoints, 2 * s.K * s.D, at.decays, &f->c[j].turn[0], -1, -1, s);
    if (s.K == 2) carry(at.adjoints + 2 * s.D, 4 * s.D, at.decays, &f->c[j].turn[1], 1, -1, s);
}

/* dx of a chunk, and its part of the sums */
static void leave(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    const shape s = f->s;
    const channels *c = f->c + j;
    const part at = part_of(f, b, i, j);
    const int64_t stride = s.fields * s.D;
    real sums[SUMS][BD] = {{0}};
    state h, r = {0}, p, q = {0}, both;
    read_state(&h, at.states, s.D);
    read_state(&p, at.adjoints, s.D);
    if (s.K == 2) {
        read_state(&r, at.states + 2 * s.D, s.D);
        read_state(&q, at.adjoints + 2 * s.D, s.D);
    }
    for (int64_t t = 0; t < at.n; t++) {
        fetch_to_write(at.dx + t * stride, s.fields, s.D);
        record_input(tapes + t, at.x + t * stride, c, s.D);
        record_output(tapes + t, at.dout + t * 2 * s.D, at.x + t * stride, c, s);
        record_turned(tapes + t, &h, &c->turn[0]);
        advance(&h, &tapes[t].gates, &c->turn[0]);
        if (s.K == 2)
            record_adjoint(tapes + t, &q, &c->turn[1]);
        else
            tapes[t].q = q;
    }
    for (int64_t t = at.n - 1; t >= 0; t--) {
        differentiate(at.dx + t * stride, sums, &p, &both, &r, tapes + t, c->turn, s);
        if (s.K == 2) advance(&r, &tapes[t].gates, &c->turn[1]);
        if (s.fields == 5) differentiate_gate(at.dx + t * stride, sums, &both, tapes + t, s.D);
    }
    for (int row = 0; row < SUMS; row++) memcpy(at.partial + row * s.D, sums[row], sizeof sums[row]);
}

void add_up(real *total, const real *parts, int64_t n, int64_t D) {
    #pragma omp for
    for (int64_t first = 0; first < SUMS * D; first += BD) {
        double sum[BD] = {0};
        for (int64_t i = 0; i < n; i++)
            for (int d = 0; d < BD; d++) sum[d] += parts[i * SUMS * D + first + d];
        for (int d = 0; d < BD; d++) total[first + d] = (real)sum[d];
    }
}

/* dout (B, T, 2, D), dx like x, total (SUMS, D); workspace: c (D / BD), decays (B, chunks, D),
 * adjoints like states, partial (B, chunks, SUMS, D) */
void scan_backward(const elem *dout, const elem *x, const real *lower_bound, const real *theta, const real *bias,
                   const real *states, channels *c, real *decays, real *adjoints, real *partial, elem *dx,
                   real *total, int64_t B, int64_t T, int64_t D, int64_t fields, int64_t K, int64_t length,
                   int64_t threads) {
    const shape s = {T, D, fields, K, length, (T + length - 1) / length, 1};
    const backward f = {dout, x, c, decays, adjoints, partial, states, dx, s};
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, lower_bound, theta, bias, s);
        run_steps((steps){enter, carry_channels, leave}, &f, B, s);
        add_up(total, partial, B * s.chunks, D);
    }
}

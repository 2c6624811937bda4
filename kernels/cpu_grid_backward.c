/* The HGRU scan of a grid's rows and columns on CPUs, backward; cpu_scan.h explains it, cpu_scan.py launches it.
 *
 * A line is a row or a column. Each is swept up once, for h and the adjoint q of r, and down once, for r and the
 * adjoint p of h. What lines contribute to a token's gradients adds up, so rows and columns only add to the token's
 * tape, and dx follows from it at the end. Nothing is needed from forward. */
#include "cpu_scan.h"

/* a token between the steps: its gates, g dout, and what its lines have added */
typedef struct {
    token gates;
    real decay[BD];         /* accurate even where it is close to 0 */
    state dstate;           /* the gradient of the sum of its states */
    state turned, adjoints; /* sums over its states of exp(i theta) times the state before, and of their adjoints */
    real slope[BD];         /* the gradient of the decay, except through the input */
} tape;

/* what the sweep up leaves for the sweep down */
typedef struct {
    state turned, q;
} trail;

static inline void open_tape(tape *restrict at, const elem *restrict dout, const elem *restrict x,
                             const channels *restrict c, shape s) {
    memset(at, 0, sizeof *at);
    open_gates(&at->gates, x, c, s.D);
    for (int d = 0; d < BD; d++) {
        gate forget = sigmoid(load(x[FORGET * s.D + d]) + c->bias[FORGET][d]);
        real re = load(dout[d]), im = load(dout[s.D + d]);
        if (s.fields == 5) {
            re *= sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).on;
            im *= sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).on;
        }
        at->decay[d] = c->lower_bound[d] + (1 - c->lower_bound[d]) * forget.on;
        at->dstate.re[d] = re;
        at->dstate.im[d] = im;
    }
}

/* exp(i theta) h, where h is the state before */
static inline void record_turned(trail *restrict to, const state *restrict h, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        to->turned.re[d] = turn->high.re[d] * h->re[d] - turn->high.im[d] * h->im[d];
        to->turned.im[d] = turn->high.re[d] * h->im[d] + turn->high.im[d] * h->re[d];
    }
}

/* the adjoint of this token's r, and what it passes on to the next token's */
static inline void record_adjoint(trail *restrict to, state *restrict handed, const tape *restrict at,
                                  const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        real re = handed->re[d] + at->dstate.re[d], im = handed->im[d] + at->dstate.im[d];
        real a = decayed(at->gates.rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->gates.rest[d], turn->high.im[d], turn->low.im[d]);
        to->q.re[d] = re;
        to->q.im[d] = im;
        handed->re[d] = a * re + b * im;
        handed->im[d] = a * im - b * re;
    }
}

/* add a line to a token's tape; r is that of the token above; `handed` is what that one passes on to p, and becomes
 * what this one does */
static inline void add_line(tape *restrict at, real (*restrict dtheta)[BD], state *restrict handed,
                            const state *restrict r, const trail *restrict up, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        real h_re = up->turned.re[d], h_im = up->turned.im[d], q_re = up->q.re[d], q_im = up->q.im[d];
        real r_re = turn[1].high.re[d] * r->re[d] - turn[1].high.im[d] * r->im[d];
        real r_im = turn[1].high.re[d] * r->im[d] + turn[1].high.im[d] * r->re[d];
        real p_re = handed->re[d] + at->dstate.re[d], p_im = handed->im[d] + at->dstate.im[d];
        at->turned.re[d] += h_re + r_re;
        at->turned.im[d] += h_im + r_im;
        at->adjoints.re[d] += p_re + q_re;
        at->adjoints.im[d] += p_im + q_im;
        at->slope[d] += (p_re * h_re + p_im * h_im) + (q_re * r_re + q_im * r_im);
        dtheta[0][d] += at->decay[d] * (p_im * h_re - p_re * h_im);
        dtheta[1][d] += at->decay[d] * (q_im * r_re - q_re * r_im);
        real a = decayed(at->gates.rest[d], turn[0].high.re[d], turn[0].low.re[d]);
        real b = decayed(at->gates.rest[d], turn[0].high.im[d], turn[0].low.im[d]);
        handed->re[d] = a * p_re + b * p_im;
        handed->im[d] = a * p_im - b * p_re;
    }
}

/* sweep `lines` lines of n tokens side by side, a line's tokens `step` apart; trails (n, lines) */
static void sweep(tape *tapes, trail *trails, real (*dtheta)[BD], const channels *c, int64_t n, int64_t step,
                  int64_t lines, shape s) {
    state h[BAND] = {{{0}, {0}}}, r[BAND] = {{{0}, {0}}};
    state p[BAND] = {{{0}, {0}}}, q[BAND] = {{{0}, {0}}};
    for (int64_t t = 0; t < n; t++)
        for (int64_t j = 0; j < lines; j++) {
            const tape *at = tapes + t * step + j;
            trail *to = trails + t * lines + j;
            record_turned(to, &h[j], &c->turn[0]);
            advance(&h[j], &at->gates, &c->turn[0]);
            if (s.K == 2)
                record_adjoint(to, &q[j], at, &c->turn[1]);
            else
                to->q = q[j];
        }
    for (int64_t t = n - 1; t >= 0; t--)
        for (int64_t j = 0; j < lines; j++) {
            tape *at = tapes + t * step + j;
            add_line(at, dtheta, &p[j], &r[j], trails + t * lines + j, c->turn);
            if (s.K == 2) advance(&r[j], &at->gates, &c->turn[1]);
        }
}

/* a token's dx and its part of the sums, from its tape */
static inline void differentiate(elem *restrict dx, real (*restrict sums)[BD], const tape *restrict at,
                                 const elem *restrict x, const channels *restrict c, shape s) {
    for (int d = 0; d < BD; d++) {
        real x_re = load(x[C_RE * s.D + d]) + c->bias[C_RE][d], x_im = load(x[C_IM * s.D + d]) + c->bias[C_IM][d];
        gate re = sigmoid(x_re), im = sigmoid(x_im), forget = sigmoid(load(x[FORGET * s.D + d]) + c->bias[FORGET][d]);
        real c_re = x_re * re.on, c_im = x_im * im.on, rest = at->gates.rest[d];
        real ddecay = at->slope[d] - (c_re * at->adjoints.re[d] + c_im * at->adjoints.im[d]);
        real dc_re = rest * at->adjoints.re[d] * (re.on + c_re * re.off);
        real dc_im = rest * at->adjoints.im[d] * (im.on + c_im * im.off);
        real dforget = ddecay * (rest * forget.on);
        dx[C_RE * s.D + d] = store(dc_re);
        dx[C_IM * s.D + d] = store(dc_im);
        dx[FORGET * s.D + d] = store(dforget);
        sums[C_RE][d] += dc_re;
        sums[C_IM][d] += dc_im;
        sums[FORGET][d] += dforget;
        sums[LOWER_BOUND][d] += ddecay * forget.off;
    }
}

static inline void differentiate_gate(elem *restrict dx, real (*restrict sums)[BD], const tape *restrict at,
                                      const elem *restrict x, const channels *restrict c, shape s) {
    const real states = (real)(2 * s.K);
    for (int d = 0; d < BD; d++) {
        real re = at->decay[d] * at->turned.re[d] + states * at->gates.input.re[d];
        real im = at->decay[d] * at->turned.im[d] + states * at->gates.input.im[d];
        real dg_re = re * (at->dstate.re[d] * sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).off);
        real dg_im = im * (at->dstate.im[d] * sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).off);
        dx[G_RE * s.D + d] = store(dg_re);
        dx[G_IM * s.D + d] = store(dg_im);
        sums[G_RE][d] += dg_re;
        sums[G_IM][d] += dg_im;
    }
}

typedef struct {
    const elem *dout, *x;
    const channels *c;
    tape *tapes;
    trail *trails;
    int64_t trails_per_thread;
    real *partial;
    elem *dx;
    int64_t B;
    shape s;
} backward;

/* the tapes of a batch row and channel block; no two that are processed at once share them */
static inline tape *tapes_of(const backward *f, int64_t j) {
    return f->tapes + (f->B == 1 ? j : thread_number()) * f->s.T;
}

static inline trail *trails_of_thread(const backward *f) { return f->trails + thread_number() * f->trails_per_thread; }

/* the sums of row i, or of band i - chunks */
static inline real *partial_of(const backward *f, int64_t b, int64_t i, int64_t j) {
    return f->partial + (b * (f->s.chunks + f->s.bands) + i) * SUMS * f->s.D + j * BD;
}

static inline void write_sums(real *partial, real (*sums)[BD], int64_t D) {
    for (int row = 0; row < SUMS; row++) memcpy(partial + row * D, sums[row], sizeof sums[row]);
}

/* open a row's tapes and add the row to them */
static void enter(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    const shape s = f->s;
    const int64_t first = b * s.T + i * s.length;
    tape *tapes = tapes_of(f, j) + i * s.length;
    real sums[SUMS][BD] = {{0}};
    for (int64_t t = 0; t < s.length; t++) {
        const elem *x = f->x + (first + t) * s.fields * s.D + j * BD, *dout = f->dout + (first + t) * 2 * s.D + j * BD;
        fetch(x + AHEAD * s.fields * s.D, s.fields, s.D);
        fetch(dout + AHEAD * 2 * s.D, 2, s.D);
        open_tape(tapes + t, dout, x, f->c + j, s);
    }
    sweep(tapes, trails_of_thread(f), sums + THETA, f->c + j, s.length, 1, 1, s);
    write_sums(partial_of(f, b, i, j), sums, s.D);
}

/* add a band of columns to the tapes */
static void cross_band(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    const shape s = f->s;
    const int64_t first = i * BAND, columns = s.length - first < BAND ? s.length - first : BAND;
    real sums[SUMS][BD] = {{0}};
    sweep(tapes_of(f, j) + first, trails_of_thread(f), sums + THETA, f->c + j, s.chunks, s.length, columns, s);
    write_sums(partial_of(f, b, s.chunks + i, j), sums, s.D);
}

/* dx of a row, and its part of the sums */
static void leave(const void *scan, int64_t b, int64_t i, int64_t j) {
    const backward *f = scan;
    const shape s = f->s;
    const int64_t stride = s.fields * s.D, first = b * s.T + i * s.length;
    const tape *tapes = tapes_of(f, j) + i * s.length;
    real *partial = partial_of(f, b, i, j), sums[SUMS][BD];
    for (int row = 0; row < SUMS; row++) memcpy(sums[row], partial + row * s.D, sizeof sums[row]);
    for (int64_t t = 0; t < s.length; t++) {
        const elem *x = f->x + (first + t) * stride + j * BD;
        elem *dx = f->dx + (first + t) * stride + j * BD;
        fetch(x + AHEAD * stride, s.fields, s.D);
        fetch_to_write(dx + AHEAD * stride, s.fields, s.D);
        differentiate(dx, sums, tapes + t, x, f->c + j, s);
        if (s.fields == 5) differentiate_gate(dx, sums, tapes + t, x, f->c + j, s);
    }
    write_sums(partial, sums, s.D);
}

/* dout (B, T, 2, D), dx like x, total (SUMS, D); workspace: c (D / BD), tapes (threads, or D / BD if B is 1, T), trails
 * (threads, trails_per_thread: enough for a row and for a band), partial (B, rows + bands, SUMS, D) */
void grid_backward(const elem *dout, const elem *x, const real *lower_bound, const real *theta, const real *bias,
                   channels *c, tape *tapes, trail *trails, real *partial, elem *dx, real *total, int64_t B, int64_t T,
                   int64_t D, int64_t fields, int64_t K, int64_t width, int64_t trails_per_thread, int64_t threads) {
    const shape s = {T, D, fields, K, width, T / width, bands_of(width)};
    const backward f = {dout, x, c, tapes, trails, trails_per_thread, partial, dx, B, s};
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, lower_bound, theta, bias, s);
        run_steps((steps){enter, cross_band, leave}, &f, B, s);
        add_up(total, partial, B * (s.chunks + s.bands), D);
    }
}

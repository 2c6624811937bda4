/* The HGRU scan on CPUs, forward; cpu_scan.h explains it, cpu_scan.py launches it. */
#include "cpu_scan.h"

#include <math.h>

static channels channels_from(int64_t d, const real *lower_bound, const real *theta, const real *bias, shape s) {
    channels c = {0};
    memcpy(c.lower_bound, lower_bound + d, sizeof c.lower_bound);
    for (int row = 0; row < s.fields; row++) memcpy(c.bias[row], bias + row * s.D + d, sizeof c.bias[row]);
    for (int k = 0; k < s.K; k++)
        for (int j = 0; j < BD; j++) {
            const double angle = theta[k * s.D + d + j], re = cos(angle), im = sin(angle);
            rotation *turn = &c.turn[k];
            turn->high.re[j] = (real)re;
            turn->high.im[j] = (real)im;
            turn->low.re[j] = (real)(re - turn->high.re[j]);
            turn->low.im[j] = (real)(im - turn->high.im[j]);
        }
    return c;
}

void make_channels(channels *c, const real *lower_bound, const real *theta, const real *bias, shape s) {
    #pragma omp for
    for (int64_t d = 0; d < s.D; d += BD) c[d / BD] = channels_from(d, lower_bound, theta, bias, s);
}

typedef struct {
    double re[BD], im[BD];
} exact;

static inline void multiply(exact *restrict a, const exact *restrict b) {
    for (int d = 0; d < BD; d++) {
        double re = a->re[d] * b->re[d] - a->im[d] * b->im[d];
        a->im[d] = a->re[d] * b->im[d] + a->im[d] * b->re[d];
        a->re[d] = re;
    }
}

/* exp(i n theta) */
static exact turn_steps(const rotation *turn, int64_t n, int sign) {
    exact square, power;
    for (int d = 0; d < BD; d++) {
        square.re[d] = (double)turn->high.re[d] + turn->low.re[d];
        square.im[d] = sign * ((double)turn->high.im[d] + turn->low.im[d]);
        power.re[d] = 1;
        power.im[d] = 0;
    }
    for (; n > 0; n /= 2) {
        if (n % 2) multiply(&power, &square);
        const exact copy = square;
        multiply(&square, &copy);
    }
    return power;
}

void carry(real *states, int64_t stride, const real *decays, const rotation *turn, int step, int sign, shape s) {
    /* the last chunk may be shorter, but no state passes through it: none enters it, or none is needed after it */
    const exact turned = turn_steps(turn, s.length, sign);
    exact h = {{0}, {0}};
    for (int64_t n = 0, i = step < 0 ? s.chunks - 1 : 0; n < s.chunks; n++, i += step) {
        state end;
        real *at = states + i * stride;
        read_state(&end, at, s.D);
        for (int d = 0; d < BD; d++) {
            at[d] = (real)h.re[d];
            at[s.D + d] = (real)h.im[d];
        }
        multiply(&h, &turned);
        for (int d = 0; d < BD; d++) {
            h.re[d] = decays[i * s.D + d] * h.re[d] + end.re[d];
            h.im[d] = decays[i * s.D + d] * h.im[d] + end.im[d];
        }
    }
}

static inline void emit(elem *restrict out, const state *restrict h, const state *restrict r, const elem *restrict x,
                        const channels *restrict c, shape s) {
    for (int d = 0; d < BD; d++) {
        real re = h->re[d] + r->re[d], im = h->im[d] + r->im[d];
        if (s.fields == 5) {
            re *= sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).on;
            im *= sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).on;
        }
        out[d] = store(re);
        out[s.D + d] = store(im);
    }
}

void enter_chunk(token *tokens, real *decays, real *states, const elem *x, const channels *c, int64_t i, shape s) {
    const int64_t stride = s.fields * s.D, n = chunk_length(i, s);
    token *at = tokens + i * s.length;
    state h = {0}, r = {0};
    real decay[BD];
    for (int d = 0; d < BD; d++) decay[d] = 1;
    for (int64_t t = 0; t < n; t++) {
        fetch(x + (t + AHEAD) * stride, s.fields, s.D);
        open_gates(at + t, x + t * stride, c, s.D);
        advance(&h, at + t, &c->turn[0]);
        for (int d = 0; d < BD; d++) decay[d] -= decay[d] * at[t].rest[d];
    }
    for (int64_t t = n - 1; s.K == 2 && t >= 0; t--) advance(&r, at + t, &c->turn[1]);
    memcpy(decays + i * s.D, decay, sizeof decay);
    write_state(states + 2 * s.K * i * s.D, &h, s.D);
    if (s.K == 2) write_state(states + (4 * i + 2) * s.D, &r, s.D);
}

void carry_states(real *states, const real *decays, const channels *c, shape s) {
    carry(states, 2 * s.K * s.D, decays, &c->turn[0], 1, 1, s);
    if (s.K == 2) carry(states + 2 * s.D, 4 * s.D, decays, &c->turn[1], -1, 1, s);
}

void leave_chunk(elem *out, const token *tokens, const real *states, const elem *x, const channels *c, int64_t i,
                 shape s) {
    const int64_t stride = s.fields * s.D, n = chunk_length(i, s);
    const token *at = tokens + i * s.length;
    state h, r, reverse[CHUNK] = {0};
    if (s.K == 2) read_state(&r, states + (4 * i + 2) * s.D, s.D);
    for (int64_t t = n - 1; s.K == 2 && t >= 0; t--) {
        advance(&r, at + t, &c->turn[1]);
        reverse[t] = r;
    }
    read_state(&h, states + 2 * s.K * i * s.D, s.D);
    for (int64_t t = 0; t < n; t++) {
        fetch_to_write(out + (t + AHEAD) * 2 * s.D, 2, s.D);
        advance(&h, at + t, &c->turn[0]);
        emit(out + t * 2 * s.D, &h, &reverse[t], x + t * stride, c, s);
    }
}

void run_steps(steps of, const void *scan, int64_t B, shape s) {
    const int64_t channel_blocks = s.D / BD;
    if (B == 1) {
        /* static: in the last loop, a thread then finds its chunks in its cache */
        #pragma omp for schedule(static)
        for (int64_t unit = 0; unit < s.chunks * channel_blocks; unit++)
            of.enter(scan, 0, unit / channel_blocks, unit % channel_blocks);
        #pragma omp for
        for (int64_t unit = 0; unit < s.bands * channel_blocks; unit++)
            of.carry(scan, 0, unit / channel_blocks, unit % channel_blocks);
        #pragma omp for schedule(static)
        for (int64_t unit = 0; unit < s.chunks * channel_blocks; unit++)
            of.leave(scan, 0, unit / channel_blocks, unit % channel_blocks);
    } else {
        #pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < B * channel_blocks; unit++) {
            const int64_t b = unit / channel_blocks, j = unit % channel_blocks;
            for (int64_t i = 0; i < s.chunks; i++) of.enter(scan, b, i, j);
            for (int64_t i = 0; i < s.bands; i++) of.carry(scan, b, i, j);
            for (int64_t i = 0; i < s.chunks; i++) of.leave(scan, b, i, j);
        }
    }
}

typedef struct {
    const elem *x;
    const channels *c;
    token *tokens;
    real *decays, *states;
    elem *out;
    int64_t B;
    shape s;
} forward;

/* the gates of a batch row and channel block; no two that are processed at once share them */
static inline token *tokens_of(const forward *f, int64_t j) {
    return f->tokens + (f->B == 1 ? j : thread_number()) * f->s.T;
}

static inline const elem *x_of(const forward *f, int64_t b, int64_t i, int64_t j) {
    return f->x + (b * f->s.T + i * f->s.length) * f->s.fields * f->s.D + j * BD;
}

static inline real *decays_of(const forward *f, int64_t b, int64_t j) {
    return f->decays + b * f->s.chunks * f->s.D + j * BD;
}

static inline real *states_of(const forward *f, int64_t b, int64_t j) {
    return f->states + b * f->s.chunks * 2 * f->s.K * f->s.D + j * BD;
}

static void enter(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    enter_chunk(tokens_of(f, j), decays_of(f, b, j), states_of(f, b, j), x_of(f, b, i, j), f->c + j, i, f->s);
}

static void carry_channels(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    (void)i;
    carry_states(states_of(f, b, j), decays_of(f, b, j), f->c + j, f->s);
}

static void leave(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    elem *out = f->out + (b * f->s.T + i * f->s.length) * 2 * f->s.D + j * BD;
    leave_chunk(out, tokens_of(f, j), states_of(f, b, j), x_of(f, b, i, j), f->c + j, i, f->s);
}

/* x (B, T, fields, D), lower_bound (D), theta (K, D), bias (fields, D), states (B, chunks, 2K, D), out (B, T, 2, D);
 * workspace: c (D / BD), tokens (threads, or D / BD if B is 1, T), decays (B, chunks, D); D is a multiple of BD */
void scan_forward(const elem *x, const real *lower_bound, const real *theta, const real *bias, channels *c,
                  token *tokens, real *decays, real *states, elem *out, int64_t B, int64_t T, int64_t D, int64_t fields,
                  int64_t K, int64_t length, int64_t threads) {
    const shape s = {T, D, fields, K, length, (T + length - 1) / length, 1};
    const forward f = {x, c, tokens, decays, states, out, B, s};
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, lower_bound, theta, bias, s);
        run_steps((steps){enter, carry_channels, leave}, &f, B, s);
    }
}

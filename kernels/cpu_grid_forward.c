/* The HGRU scan of a grid's rows and columns on CPUs, forward; cpu_scan.h explains it, cpu_scan.py launches it.
 *
 * The four states of a token share its gates, which are computed once. Rows are scanned one by one, columns in bands,
 * row by row: a band's tokens of a row are adjacent in memory, and nothing is transposed. */
#include "cpu_scan.h"

static inline void set_sums(real *restrict re, real *restrict im, const state *restrict h) {
    memcpy(re, h->re, sizeof h->re);
    memcpy(im, h->im, sizeof h->im);
}

static inline void add_to_sums(real *restrict re, real *restrict im, const state *restrict h) {
    for (int d = 0; d < BD; d++) {
        re[d] += h->re[d];
        im[d] += h->im[d];
    }
}

void enter_row(token *tokens, state_sums sums, const elem *x, const channels *c, int64_t i, shape s) {
    const int64_t stride = s.fields * s.D, first = i * s.length;
    token *at = tokens + first;
    real *re = sums.re + first * sums.next, *im = sums.im + first * sums.next;
    for (int64_t t = 0; t < s.length; t++) {
        fetch(x + (t + AHEAD) * stride, s.fields, s.D);
        open_gates(at + t, x + t * stride, c, s.D);
    }
    state h = {0}, r = {0};
    for (int64_t t = 0; t < s.length; t++) {
        advance(&h, at + t, &c->turn[0]);
        set_sums(re + t * sums.next, im + t * sums.next, &h);
    }
    for (int64_t t = s.length - 1; s.K == 2 && t >= 0; t--) {
        advance(&r, at + t, &c->turn[1]);
        add_to_sums(re + t * sums.next, im + t * sums.next, &r);
    }
}

/* one direction of the columns from `first` to `end`, by rows from the top (step 1) or from the bottom (-1) */
static void cross(const token *tokens, state_sums sums, const rotation *turn, int64_t first, int64_t end, int step,
                  shape s) {
    state h[BAND] = {{{0}, {0}}};
    for (int64_t n = 0, i = step < 0 ? s.chunks - 1 : 0; n < s.chunks; n++, i += step)
        for (int64_t j = first; j < end; j++) {
            const int64_t t = i * s.length + j;
            advance(&h[j - first], tokens + t, turn);
            add_to_sums(sums.re + t * sums.next, sums.im + t * sums.next, &h[j - first]);
        }
}

void cross_columns(const token *tokens, state_sums sums, const channels *c, int64_t band, shape s) {
    const int64_t first = band * BAND, end = first + BAND < s.length ? first + BAND : s.length;
    cross(tokens, sums, &c->turn[0], first, end, 1, s);
    if (s.K == 2) cross(tokens, sums, &c->turn[1], first, end, -1, s);
}

static inline void emit(elem *restrict out, const real *restrict re, const real *restrict im, const elem *restrict x,
                        const channels *restrict c, shape s) {
    for (int d = 0; d < BD; d++) {
        real h_re = re[d], h_im = im[d];
        if (s.fields == 5) {
            h_re *= sigmoid(load(x[G_RE * s.D + d]) + c->bias[G_RE][d]).on;
            h_im *= sigmoid(load(x[G_IM * s.D + d]) + c->bias[G_IM][d]).on;
        }
        out[d] = store(h_re);
        out[s.D + d] = store(h_im);
    }
}

void leave_row(elem *out, state_sums sums, const elem *x, const channels *c, int64_t i, shape s) {
    const int64_t stride = s.fields * s.D, first = i * s.length;
    const real *re = sums.re + first * sums.next, *im = sums.im + first * sums.next;
    for (int64_t t = 0; t < s.length; t++) {
        fetch_to_write(out + (t + AHEAD) * 2 * s.D, 2, s.D);
        emit(out + t * 2 * s.D, re + t * sums.next, im + t * sums.next, x + t * stride, c, s);
    }
}

typedef struct {
    const elem *x;
    const channels *c;
    token *tokens;
    real *sums;
    elem *out;
    int64_t B;
    shape s;
} forward;

/* the place in the workspace of a batch row and channel block; no two that are processed at once share it */
static inline int64_t place_of(const forward *f, int64_t j) { return (f->B == 1 ? j : thread_number()) * f->s.T; }

static inline state_sums sums_of(const forward *f, int64_t j) {
    real *first = f->sums + place_of(f, j) * 2 * BD;
    return (state_sums){first, first + BD, 2 * BD};
}

static inline const elem *x_of(const forward *f, int64_t b, int64_t i, int64_t j) {
    return f->x + (b * f->s.T + i * f->s.length) * f->s.fields * f->s.D + j * BD;
}

static void enter(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    enter_row(f->tokens + place_of(f, j), sums_of(f, j), x_of(f, b, i, j), f->c + j, i, f->s);
}

static void cross_band(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    (void)b;
    cross_columns(f->tokens + place_of(f, j), sums_of(f, j), f->c + j, i, f->s);
}

static void leave(const void *scan, int64_t b, int64_t i, int64_t j) {
    const forward *f = scan;
    elem *out = f->out + (b * f->s.T + i * f->s.length) * 2 * f->s.D + j * BD;
    leave_row(out, sums_of(f, j), x_of(f, b, i, j), f->c + j, i, f->s);
}

/* x (B, T, fields, D), lower_bound (D), theta (K, D), bias (fields, D), out (B, T, 2, D); workspace: c (D / BD), and
 * for each thread, or for each channel block if B is 1, tokens (T) and sums (T, 2, BD); D is a multiple of BD, T of
 * `width` */
void grid_forward(const elem *x, const real *lower_bound, const real *theta, const real *bias, channels *c,
                  token *tokens, real *sums, elem *out, int64_t B, int64_t T, int64_t D, int64_t fields, int64_t K,
                  int64_t width, int64_t threads) {
    const shape s = {T, D, fields, K, width, T / width, bands_of(width)};
    const forward f = {x, c, tokens, sums, out, B, s};
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, lower_bound, theta, bias, s);
        run_steps((steps){enter, cross_band, leave}, &f, B, s);
    }
}

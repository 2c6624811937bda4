/* The HGRU scan (arXiv 2311.04823) on CPUs: what forward and backward share. reference.py defines the scan.
 *
 * With h and r the complex states of the two directions, and x the pre-activations of c, decay and g:
 *
 *   h[t] = decay[t] exp(i theta[0]) h[t-1] + (1 - decay[t]) c[t]    first token to last
 *   r[t] = decay[t] exp(i theta[1]) r[t+1] + (1 - decay[t]) c[t]    last token to first
 *   out[t] = g[t] (h[t] + r[t])                                     on real and imaginary parts
 *
 * Channels are independent: a block of BD channels is processed together, and every loop over `d` becomes vector code.
 * Tokens are not, but a chunk of them acts linearly on the state that enters it: first each chunk is scanned from a
 * state of zero, then the states are carried from chunk to chunk, then each chunk is scanned from the state that enters
 * it. Threads can thus share chunks as freely as batch rows.
 *
 * Neither the chunks nor the order of any sum depend on the number of threads, so that results are the same to the last
 * bit for any number of them. */
#ifndef CPU_SCAN_H
#define CPU_SCAN_H

#include "cpu_math.h"

#ifdef _OPENMP
#include <omp.h>
static inline int64_t thread_number(void) { return omp_get_thread_num(); }
#else
static inline int64_t thread_number(void) { return 0; }
#endif

/* the fields of D channels each that make up a token of x */
enum { C_RE, C_IM, FORGET, G_RE, G_IM };

/* how many tokens ahead memory is fetched, and the elements per cache line */
enum { AHEAD = 8, LINE = 64 / sizeof(elem) };

typedef struct {
    int64_t T, D;
    int64_t fields;         /* of x: 5 with an output gate, 3 without */
    int64_t K;              /* directions */
    int64_t length, chunks; /* tokens per chunk, CHUNK at most unless it is a grid's row; the last may have fewer */
    int64_t bands;          /* parts of the step between the chunks: the bands of a grid's columns, 1 for a sequence */
} shape;

typedef struct {
    real re[BD], im[BD];
} state;

/* exp(i theta) and its rounding error, which is the same at each token and would add up over all of them */
typedef struct {
    state high, low;
} rotation;

/* what is constant over the tokens of a channel block */
typedef struct {
    real bias[5][BD], lower_bound[BD];
    rotation turn[2];
} channels;

/* a token's 1 - decay, which stays accurate where the decay is close to 1, and its input (1 - decay) c */
typedef struct {
    real rest[BD];
    state input;
} token;

static inline int64_t chunk_length(int64_t i, shape s) { return i + 1 < s.chunks ? s.length : s.T - i * s.length; }

static inline void read_state(state *restrict h, const real *restrict from, int64_t D) {
    memcpy(h->re, from, sizeof h->re);
    memcpy(h->im, from + D, sizeof h->im);
}

static inline void write_state(real *restrict to, const state *restrict h, int64_t D) {
    memcpy(to, h->re, sizeof h->re);
    memcpy(to + D, h->im, sizeof h->im);
}

/* the same channel block of consecutive tokens lies far apart, which hardware does not predict: without this, backward
 * takes twice as long */
static inline void fetch(const elem *row, int64_t rows, int64_t D) {
    for (const elem *end = row + rows * D; row < end; row += D)
        for (int d = 0; d < BD; d += LINE) __builtin_prefetch(row + d, 0);
}

static inline void fetch_to_write(const elem *row, int64_t rows, int64_t D) {
    for (const elem *end = row + rows * D; row < end; row += D)
        for (int d = 0; d < BD; d += LINE) __builtin_prefetch(row + d, 1);
}

/* decay exp(i theta), rounded once */
static inline real decayed(real rest, real high, real low) { return high + (low - rest * high); }

/* h = decay exp(i theta) h + input, grouped so that only two operations depend on the token before */
static inline void advance(state *restrict h, const token *restrict at, const rotation *restrict turn) {
    for (int d = 0; d < BD; d++) {
        real re = h->re[d], im = h->im[d];
        real a = decayed(at->rest[d], turn->high.re[d], turn->low.re[d]);
        real b = decayed(at->rest[d], turn->high.im[d], turn->low.im[d]);
        h->re[d] = a * re + (at->input.re[d] - b * im);
        h->im[d] = a * im + (at->input.im[d] + b * re);
    }
}

static inline void open_gates(token *restrict at, const elem *restrict x, const channels *restrict c, int64_t D) {
    for (int d = 0; d < BD; d++) {
        real c_re = load(x[C_RE * D + d]) + c->bias[C_RE][d], c_im = load(x[C_IM * D + d]) + c->bias[C_IM][d];
        gate forget = sigmoid(load(x[FORGET * D + d]) + c->bias[FORGET][d]);
        real rest = (1 - c->lower_bound[d]) * forget.off;
        at->rest[d] = rest;
        at->input.re[d] = rest * (c_re * sigmoid(c_re).on);
        at->input.im[d] = rest * (c_im * sigmoid(c_im).on);
    }
}

/* c (D / BD) from lower_bound (D), theta (K, D) and bias (fields, D); to be called by all threads of a team */
void make_channels(channels *c, const real *lower_bound, const real *theta, const real *bias, shape s);

/* Replaces the states that chunks end with if they start from zero by the states that enter them: `states` (chunks,
 * stride) of one direction, upwards or downwards as `step` is 1 or -1. `decays` (chunks, D) are the products of the
 * chunks' decays, `sign` is the sign of the angle. */
void carry(real *states, int64_t stride, const real *decays, const rotation *turn, int step, int sign, shape s);

/* The three steps of forward for BD channels of one batch row. x and out are those of chunk i; tokens (T), decays
 * (chunks, D) and states (chunks, 2K, D) are those of the batch row. All start at the first of the channels. */
void enter_chunk(token *tokens, real *decays, real *states, const elem *x, const channels *c, int64_t i, shape s);
void carry_states(real *states, const real *decays, const channels *c, shape s);
void leave_chunk(elem *out, const token *tokens, const real *states, const elem *x, const channels *c, int64_t i,
                 shape s);

/* The scan of a grid has three steps too: its chunks are its rows, `length` tokens each, and the step between them
 * scans its columns, in bands of BAND. The states of a token are summed in `re` and `im`; those of the next token are
 * `next` elements further. If x is `real`, the sums can take the place of its C_RE and C_IM, which the first step reads
 * before it writes. */
typedef struct {
    real *re, *im;
    int64_t next;
} state_sums;

/* number of bands of a grid's columns */
static inline int64_t bands_of(int64_t width) { return (width + BAND - 1) / BAND; }

void enter_row(token *tokens, state_sums sums, const elem *x, const channels *c, int64_t i, shape s);
void cross_columns(const token *tokens, state_sums sums, const channels *c, int64_t band, shape s);
void leave_row(elem *out, state_sums sums, const elem *x, const channels *c, int64_t i, shape s);

/* the gradients that are summed over tokens and batch: a bias per field of x, the lower bound, two angles */
enum { LOWER_BOUND = 5, THETA, SUMS = THETA + 2 };

/* total (SUMS, D) = the sum of `parts` (n, SUMS, D), in order; to be called by all threads of a team */
void add_up(real *total, const real *parts, int64_t n, int64_t D);

/* a scan in three steps: for chunk i, or band i, of batch row b and channel block j */
typedef struct {
    void (*enter)(const void *scan, int64_t b, int64_t i, int64_t j);
    void (*carry)(const void *scan, int64_t b, int64_t i, int64_t j);
    void (*leave)(const void *scan, int64_t b, int64_t i, int64_t j);
} steps;

/* The threads of a team share batch rows and channel blocks; if there is only one batch row, chunks and bands too. */
void run_steps(steps of, const void *scan, int64_t B, shape s);

#endif

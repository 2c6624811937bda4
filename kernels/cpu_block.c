/* A whole HGRN block on CPUs without its intermediate tensors, for inference; cpu_scan.py launches it.
 *
 *   x = x + out_proj(norm(scan(in_proj(norm1(x)))))
 *   x = x + fc2(glu(fc1(norm2(x))))
 *
 * All but the scan works on one token at a time: a thread takes a slice of tokens from norm1 to the scan's first step,
 * and again from its last step to the end, and what it needs in between stays in its core's cache. Slices are whole
 * chunks of one image. The products are those of the BLAS library that torch uses. */
#include "cpu_scan.h"

#include <math.h>

#include "cpu_glu.h"

/* the Fortran interface of ?gemm; libraries whose integers have 32 bits read the lower half of these */
typedef void blas(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const real *,
                  const real *, const int64_t *, const real *, const int64_t *, const real *, real *, const int64_t *);

/* in the order of the launcher; weights of products are (out, in) */
typedef struct {
    const real *norm1_weight, *norm1_bias, *in_weight, *in_bias, *lower_bound, *theta;
    const real *norm_weight, *norm_bias, *out_weight, *out_bias;
    const real *norm2_weight, *norm2_bias, *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias;
} weights;

typedef struct {
    const weights *w;
    const channels *c;
    blas *gemm;
    real eps1, eps, eps2;
    const real *x;
    real *out;
    int64_t H;         /* hidden channels of the GLU */
    int64_t per_slice; /* chunks */
    shape s;
} block;

/* room for an image: z (T, 5, D), tokens (D / BLOCK, T), decays (chunks, D), states (chunks, 2K, D) */
typedef struct {
    real *z;
    token *tokens;
    real *decays, *states;
} image_room;

static image_room image_room_at(real *room, shape s) {
    real *tokens = room + s.T * 5 * s.D, *decays = tokens + s.T * 3 * s.D;
    return (image_room){room, (token *)tokens, decays, decays + s.chunks * s.D};
}

/* out (n, width) = x (n, inner) weight^T, or that added to out */
static void multiply(const block *f, real *out, const real *x, const real *weight, int64_t n, int64_t inner,
                     int64_t width, int add) {
    const real one = 1, factor = (real)add;
    f->gemm("T", "N", &width, &n, &inner, &one, weight, &inner, x, &inner, &factor, out, &width);
}

static inline real sum_of(real *lanes) {
    for (int n = BLOCK / 2; n > 0; n /= 2)
        for (int j = 0; j < n; j++) lanes[j] += lanes[j + n];
    return lanes[0];
}

/* LayerNorm of n tokens; width is a multiple of BLOCK */
static void normalize(real *restrict out, const real *restrict x, const real *restrict weight,
                      const real *restrict bias, real eps, int64_t n, int64_t width) {
    for (const real *end = x + n * width; x < end; x += width, out += width) {
        real sums[BLOCK] = {0}, squares[BLOCK] = {0};
        for (int64_t i = 0; i < width; i += BLOCK)
            for (int j = 0; j < BLOCK; j++) sums[j] += x[i + j];
        const real mean = sum_of(sums) / (real)width;
        for (int64_t i = 0; i < width; i += BLOCK)
            for (int j = 0; j < BLOCK; j++) squares[j] += (x[i + j] - mean) * (x[i + j] - mean);
        const real scale = (real)(1 / sqrt((double)(sum_of(squares) / (real)width + eps)));
        for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
    }
}

static void add_bias(real *restrict out, const real *restrict bias, int64_t n, int64_t D) {
    for (const real *end = out + n * D; out < end; out += D)
        for (int64_t d = 0; d < D; d++) out[d] += bias[d];
}

/* the chunks, first token and number of tokens of slice k of image b */
typedef struct {
    int64_t first, end, start, at, n;
} slice;

static slice slice_of(const block *f, int64_t b, int64_t k) {
    const shape s = f->s;
    const int64_t first = k * f->per_slice;
    const int64_t end = first + f->per_slice < s.chunks ? first + f->per_slice : s.chunks;
    const int64_t start = first * s.length, stop = end < s.chunks ? end * s.length : s.T;
    return (slice){first, end, start, b * s.T + start, stop - start};
}

static void enter_slice(const block *f, int64_t b, int64_t k, image_room r, real *room) {
    const shape s = f->s;
    const slice at = slice_of(f, b, k);
    real *z = r.z + at.start * 5 * s.D;
    normalize(room, f->x + at.at * s.D, f->w->norm1_weight, f->w->norm1_bias, f->eps1, at.n, s.D);
    multiply(f, z, room, f->w->in_weight, at.n, s.D, 5 * s.D, 0);
    for (int64_t d = 0; d < s.D; d += BLOCK)
        for (int64_t i = at.first; i < at.end; i++)
            enter_chunk(r.tokens + d / BLOCK * s.T, r.decays + d, r.states + d,
                        r.z + i * s.length * 5 * s.D + d, f->c + d / BLOCK, i, s);
}

/* room (n, max(2D, H)) and more (n, 2 max(D, H)) */
static void leave_slice(const block *f, int64_t b, int64_t k, image_room r, real *room, real *more) {
    const shape s = f->s;
    const weights *w = f->w;
    const slice at = slice_of(f, b, k);
    real *out = f->out + at.at * s.D;
    for (int64_t d = 0; d < s.D; d += BLOCK)
        for (int64_t i = at.first; i < at.end; i++)
            leave_chunk(more + (i - at.first) * s.length * 2 * s.D + d, r.tokens + d / BLOCK * s.T, r.states + d,
                        r.z + i * s.length * 5 * s.D + d, f->c + d / BLOCK, i, s);
    normalize(room, more, w->norm_weight, w->norm_bias, f->eps, at.n, 2 * s.D);
    memcpy(out, f->x + at.at * s.D, at.n * s.D * sizeof *out);
    add_bias(out, w->out_bias, at.n, s.D);
    multiply(f, out, room, w->out_weight, at.n, 2 * s.D, s.D, 1);

    normalize(room, out, w->norm2_weight, w->norm2_bias, f->eps2, at.n, s.D);
    add_bias(out, w->fc2_bias, at.n, s.D);
    multiply(f, more, room, w->fc1_weight, at.n, s.D, 2 * f->H, 0);
    glu_rows(room, more, w->fc1_bias, at.n, f->H);
    multiply(f, out, room, w->fc2_weight, at.n, f->H, s.D, 1);
}

static void carry_image(const block *f, int64_t j, image_room r) {
    carry_states(r.states + j * BLOCK, r.decays + j * BLOCK, f->c + j, f->s);
}

/* x and out (B, T, D). Room to work in: c (D / BLOCK), and `room` with `per_thread` for each thread, then `per_image`
 * for each image that is worked on at once: as many as threads if `by_image`, else all. */
void block_forward(const real *x, const weights *w, blas *gemm, channels *c, real *room, real *out, double eps1,
                   double eps, double eps2, int64_t B, int64_t T, int64_t D, int64_t H, int64_t K, int64_t length,
                   int64_t per_slice, int64_t per_thread, int64_t per_image, int64_t by_image, int64_t threads) {
    const shape s = {T, D, 5, K, length, (T + length - 1) / length};
    const block f = {w, c, gemm, (real)eps1, (real)eps, (real)eps2, x, out, H, per_slice, s};
    const int64_t blocks = D / BLOCK, slices = (s.chunks + per_slice - 1) / per_slice;
    real *images = room + threads * per_thread;
    make_channels(c, w->lower_bound, w->theta, w->in_bias, s, threads);
    #pragma omp parallel num_threads(threads)
    {
        real *own = room + thread_number() * per_thread;
        real *more = own + per_slice * length * (2 * D > H ? 2 * D : H);
        if (by_image) {
            const image_room r = image_room_at(images + thread_number() * per_image, s);
            #pragma omp for schedule(dynamic)
            for (int64_t b = 0; b < B; b++) {
                for (int64_t k = 0; k < slices; k++) enter_slice(&f, b, k, r, own);
                for (int64_t j = 0; j < blocks; j++) carry_image(&f, j, r);
                for (int64_t k = 0; k < slices; k++) leave_slice(&f, b, k, r, own, more);
            }
        } else {
            #pragma omp for schedule(dynamic)
            for (int64_t unit = 0; unit < B * slices; unit++) {
                const int64_t b = unit / slices;
                enter_slice(&f, b, unit % slices, image_room_at(images + b * per_image, s), own);
            }
            #pragma omp for
            for (int64_t unit = 0; unit < B * blocks; unit++)
                carry_image(&f, unit % blocks, image_room_at(images + unit / blocks * per_image, s));
            #pragma omp for schedule(dynamic)
            for (int64_t unit = 0; unit < B * slices; unit++) {
                const int64_t b = unit / slices;
                leave_slice(&f, b, unit % slices, image_room_at(images + b * per_image, s), own, more);
            }
        }
    }
}

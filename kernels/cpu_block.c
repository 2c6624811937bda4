/* A whole HGRN block on CPUs without its intermediate tensors, for inference; cpu_scan.py launches it.
 *
 *   x = x + out_proj(norm(scan(in_proj(norm1(x)))))
 *   x = x + fc2(glu(fc1(norm2(x))))
 *
 * All but the scan works on one token at a time: a thread takes a slice of tokens from norm1 to the scan's first step,
 * and again from its last step to the end, and what it needs in between stays in its core's cache. Slices are whole
 * chunks of one image. The products are those of the BLAS library that torch uses; if it is MKL, weights are brought
 * into the order in which it multiplies once and not for each slice. */
#include "cpu_scan.h"

#include <math.h>

#include "cpu_glu.h"

/* the Fortran interfaces of ?gemm, ?gemm_pack and ?gemm_compute; libraries whose integers have 32 bits read the lower
 * half of these */
typedef void gemm_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const real *,
                           const real *, const int64_t *, const real *, const int64_t *, const real *, real *,
                           const int64_t *);
typedef void pack_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const real *,
                           const real *, const int64_t *, real *);
typedef void compute_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                              const real *, const int64_t *, const real *, const int64_t *, const real *, real *,
                              const int64_t *);

/* the last two are null where there are none */
typedef struct {
    gemm_function *gemm;
    pack_function *pack;
    compute_function *compute;
} blas;

/* in the order of the launcher; weights of products are (out, in) */
typedef struct {
    const real *norm1_weight, *norm1_bias, *in_weight, *in_bias, *lower_bound, *theta;
    const real *norm_weight, *norm_bias, *out_weight, *out_bias;
    const real *norm2_weight, *norm2_bias, *fc1_weight, *fc1_bias, *fc2_weight, *fc2_bias;
} weights;

/* a layer of products: weight (width, inner), and its packed form, or null if there is none */
typedef struct {
    const real *weight;
    real *packed;
    int64_t inner, width;
} linear;

enum { IN, OUT, FC1, FC2, LINEARS };

typedef struct {
    const weights *w;
    const channels *c;
    const blas *products;
    linear linears[LINEARS];
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

static void pack(const block *f, const linear *by, int64_t n) {
    const real one = 1;
    f->products->pack("A", "T", &by->width, &n, &by->inner, &one, by->weight, &by->inner, by->packed);
}

/* out (n, width) = x (n, inner) weight^T, or that added to out */
static void multiply(const block *f, real *out, const real *x, int which, int64_t n, int add) {
    const linear *by = &f->linears[which];
    const real one = 1, factor = (real)add;
    if (by->packed)
        f->products->compute("P", "N", &by->width, &n, &by->inner, by->packed, &by->inner, x, &by->inner, &factor, out,
                             &by->width);
    else
        f->products->gemm("T", "N", &by->width, &n, &by->inner, &one, by->weight, &by->inner, x, &by->inner, &factor,
                          out, &by->width);
}

/* LayerNorm of n tokens */
static void normalize(real *restrict out, const real *restrict x, const real *restrict weight,
                      const real *restrict bias, real eps, int64_t n, int64_t width) {
    for (const real *end = x + n * width; x < end; x += width, out += width) {
        real sum = 0, squares = 0;
        #pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += x[i];
        const real mean = sum / (real)width;
        #pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
        const real scale = (real)(1 / sqrt((double)(squares / (real)width + eps)));
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
    multiply(f, z, room, IN, at.n, 0);
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
    multiply(f, out, room, OUT, at.n, 1);

    normalize(room, out, w->norm2_weight, w->norm2_bias, f->eps2, at.n, s.D);
    add_bias(out, w->fc2_bias, at.n, s.D);
    multiply(f, more, room, FC1, at.n, 0);
    glu_rows(room, more, w->fc1_bias, at.n, f->H);
    multiply(f, out, room, FC2, at.n, 1);
}

static void carry_image(const block *f, int64_t j, image_room r) {
    carry_states(r.states + j * BLOCK, r.decays + j * BLOCK, f->c + j, f->s);
}

/* x and out (B, T, D). Room to work in: c (D / BLOCK), `packed` with `per_linear`, or 0, for each of the products, and `room`
 * with `per_thread` for each thread, then `per_image` for each image that is worked on at once: as many as threads if
 * `by_image`, else all. */
void block_forward(const real *x, const weights *w, const blas *products, channels *c, real *packed, real *room,
                   real *out, double eps1, double eps, double eps2, int64_t B, int64_t T, int64_t D, int64_t H,
                   int64_t K, int64_t length, int64_t per_slice, int64_t per_linear, int64_t per_thread,
                   int64_t per_image, int64_t by_image, int64_t threads) {
    const shape s = {T, D, 5, K, length, (T + length - 1) / length};
    const linear linears[LINEARS] = {
        [IN] = {w->in_weight, per_linear ? packed : 0, D, 5 * D},
        [OUT] = {w->out_weight, per_linear ? packed + per_linear : 0, 2 * D, D},
        [FC1] = {w->fc1_weight, per_linear ? packed + 2 * per_linear : 0, D, 2 * H},
        [FC2] = {w->fc2_weight, per_linear ? packed + 3 * per_linear : 0, H, D},
    };
    block f = {w, c, products, {{0}}, (real)eps1, (real)eps, (real)eps2, x, out, H, per_slice, s};
    memcpy(f.linears, linears, sizeof linears);
    const int64_t blocks = D / BLOCK, slices = (s.chunks + per_slice - 1) / per_slice;
    real *images = room + threads * per_thread;
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, w->lower_bound, w->theta, w->in_bias, s);
        #pragma omp for schedule(dynamic)
        for (int i = 0; i < (per_linear ? LINEARS : 0); i++) pack(&f, &f.linears[i], per_slice * length);
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
            /* not dynamic: a thread finds in its cache what it made of the same slices before */
            #pragma omp for schedule(static)
            for (int64_t unit = 0; unit < B * slices; unit++) {
                const int64_t b = unit / slices;
                enter_slice(&f, b, unit % slices, image_room_at(images + b * per_image, s), own);
            }
            #pragma omp for
            for (int64_t unit = 0; unit < B * blocks; unit++)
                carry_image(&f, unit % blocks, image_room_at(images + unit / blocks * per_image, s));
            #pragma omp for schedule(static)
            for (int64_t unit = 0; unit < B * slices; unit++) {
                const int64_t b = unit / slices;
                leave_slice(&f, b, unit % slices, image_room_at(images + b * per_image, s), own, more);
            }
        }
    }
}

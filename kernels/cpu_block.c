/* A whole HGRN block on CPUs without its intermediate tensors, for inference; cpu_block.py launches it.
 *
 *   x = x + out_proj(norm(scan(in_proj(conv(norm1(x))))))
 *   x = x + fc2(glu(fc1(norm2(x))))
 *
 * Everything but the scan, and the convolution if there is one, works on one token at a time: a thread takes a slice of
 * tokens from norm1 to the scan's first step, and again from its last step to the end, so that intermediate results
 * stay in its core's cache. A slice is either a number of whole chunks of one image (its rows, if rows and columns are
 * scanned) or several small images. The matmuls are those of the BLAS library that torch uses; if that is MKL, weights
 * are packed once, not for each slice. */
#include "cpu_scan.h"

#include <math.h>

#include "cpu_conv.h"
#include "cpu_glu.h"

/* the Fortran interfaces of ?gemm, ?gemm_pack and ?gemm_compute; libraries with 32-bit integers read the lower half of
 * these */
typedef void gemm_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const real *,
                           const real *, const int64_t *, const real *, const int64_t *, const real *, real *,
                           const int64_t *);
typedef void pack_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *, const real *,
                           const real *, const int64_t *, real *);
typedef void compute_function(const char *, const char *, const int64_t *, const int64_t *, const int64_t *,
                              const real *, const int64_t *, const real *, const int64_t *, const real *, real *,
                              const int64_t *);

/* the last two are null if the library lacks them */
typedef struct {
    gemm_function *gemm;
    pack_function *pack;
    compute_function *compute;
} blas;

/* cpu_library.py lists the weights and their shapes, and defines BLOCK_WEIGHTS as their names: *norm1_weight, ... */
typedef struct {
    const real BLOCK_WEIGHTS;
} weights;

/* a linear layer: weight (width, inner), and its packed form, or null if there is none */
typedef struct {
    const real *weight;
    real *packed;
    int64_t inner, width;
} linear;

enum { IN, OUT, FC1, FC2, LINEARS };

typedef struct {
    const weights *w;
    const channels *c;
    const blas *library;
    linear linears[LINEARS];
    real eps1, eps, eps2;
    const real *x;
    real *out;
    int64_t B, H;      /* images, and hidden channels of the GLU */
    int64_t per_slice; /* chunks */
    int64_t group;     /* images that are processed together; if more than one, all tokens are one slice */
    int grid;          /* whether rows and columns are scanned */
    const real *conv;  /* weight of the convolution, null if there is none */
    window window;
    shape s;
} block;

/* what is kept of images from the first step to the last, one image after the other: z (T, 5, D), tokens (D / BD, T),
 * normed (T, D) if there is a convolution, and, unless they are grids, decays (chunks, D), states (chunks, 2K, D) */
typedef struct {
    real *z;
    token *tokens;
    real *normed, *decays, *states;
} image_buffers;

static image_buffers image_buffers_at(const block *f, real *buffers) {
    const shape s = f->s;
    real *tokens = buffers + f->group * s.T * 5 * s.D, *normed = tokens + f->group * s.T * 3 * s.D;
    real *decays = normed + (f->conv ? f->group * s.T * s.D : 0);
    return (image_buffers){buffers, (token *)tokens, normed, decays, decays + f->group * s.chunks * s.D};
}

static image_buffers buffers_of_image(image_buffers r, int64_t g, shape s) {
    return (image_buffers){r.z + g * s.T * 5 * s.D, r.tokens + g * s.D / BD * s.T, r.normed + g * s.T * s.D,
                           r.decays + g * s.chunks * s.D, r.states + g * s.chunks * 2 * s.K * s.D};
}

static void pack(const block *f, const linear *by, int64_t n) {
    const real one = 1;
    f->library->pack("A", "T", &by->width, &n, &by->inner, &one, by->weight, &by->inner, by->packed);
}

/* out (n, width) = x (n, inner) weight^T, or that added to out */
static void multiply(const block *f, real *out, const real *x, int which, int64_t n, int add) {
    const linear *by = &f->linears[which];
    const real one = 1, factor = (real)add;
    if (by->packed)
        f->library->compute("P", "N", &by->width, &n, &by->inner, by->packed, &by->inner, x, &by->inner, &factor, out,
                            &by->width);
    else
        f->library->gemm("T", "N", &by->width, &n, &by->inner, &one, by->weight, &by->inner, x, &by->inner, &factor,
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

/* slice k of the group of images that starts at b: the number of images, the first chunk and the end of the chunks, the
 * first row in z and in x, and the number of rows */
typedef struct {
    int64_t images, first, end, start, at, n;
} slice;

static slice slice_of(const block *f, int64_t b, int64_t k) {
    const shape s = f->s;
    const int64_t images = b + f->group < f->B ? f->group : f->B - b;
    const int64_t first = k * f->per_slice;
    const int64_t end = first + f->per_slice < s.chunks ? first + f->per_slice : s.chunks;
    const int64_t start = first * s.length, stop = end < s.chunks ? end * s.length : s.T;
    return (slice){images, first, end, start, b * s.T + start, images * (stop - start)};
}

/* the states of a grid's tokens are summed in z, whose inputs have been read by then */
static state_sums sums_in(real *z, int64_t D) { return (state_sums){z + C_RE * D, z + C_IM * D, 5 * D}; }

/* norm1 of a slice: the convolution needs that of neighbouring slices too, so it runs before any slice is entered */
static void norm_slice(const block *f, int64_t b, int64_t k, image_buffers buffers) {
    const slice at = slice_of(f, b, k);
    const int64_t D = f->s.D;
    normalize(buffers.normed + at.start * D, f->x + at.at * D, f->w->norm1_weight, f->w->norm1_bias, f->eps1, at.n, D);
}

static void enter_slice(const block *f, int64_t b, int64_t k, image_buffers buffers, real *normed) {
    const shape s = f->s;
    const slice at = slice_of(f, b, k);
    const int64_t n = at.n / at.images;
    if (f->conv)
        for (int64_t g = 0; g < at.images; g++)
            convolve(normed + g * n * s.D, buffers_of_image(buffers, g, s).normed, f->conv, at.start, n, f->window);
    else
        normalize(normed, f->x + at.at * s.D, f->w->norm1_weight, f->w->norm1_bias, f->eps1, at.n, s.D);
    multiply(f, buffers.z + at.start * 5 * s.D, normed, IN, at.n, 0);
    for (int64_t g = 0; g < at.images; g++) {
        const image_buffers r = buffers_of_image(buffers, g, s);
        for (int64_t d = 0; d < s.D; d += BD)
            for (int64_t i = at.first; i < at.end; i++) {
                token *tokens = r.tokens + d / BD * s.T;
                const real *z = r.z + i * s.length * 5 * s.D + d;
                if (f->grid)
                    enter_row(tokens, sums_in(r.z + d, s.D), z, f->c + d / BD, i, s);
                else
                    enter_chunk(tokens, r.decays + d, r.states + d, z, f->c + d / BD, i, s);
            }
    }
}

/* workspace: normed (rows, max(2D, H)), wide (rows, 2 max(D, H)) */
static void leave_slice(const block *f, int64_t b, int64_t k, image_buffers buffers, real *normed, real *wide) {
    const shape s = f->s;
    const weights *w = f->w;
    const slice at = slice_of(f, b, k);
    real *out = f->out + at.at * s.D;
    for (int64_t g = 0; g < at.images; g++) {
        const image_buffers r = buffers_of_image(buffers, g, s);
        real *h = wide + g * s.T * 2 * s.D;
        for (int64_t d = 0; d < s.D; d += BD)
            for (int64_t i = at.first; i < at.end; i++) {
                real *to = h + (i - at.first) * s.length * 2 * s.D + d;
                const real *z = r.z + i * s.length * 5 * s.D + d;
                if (f->grid)
                    leave_row(to, sums_in(r.z + d, s.D), z, f->c + d / BD, i, s);
                else
                    leave_chunk(to, r.tokens + d / BD * s.T, r.states + d, z, f->c + d / BD, i, s);
            }
    }
    normalize(normed, wide, w->mixer_norm_weight, w->mixer_norm_bias, f->eps, at.n, 2 * s.D);
    memcpy(out, f->x + at.at * s.D, at.n * s.D * sizeof *out);
    add_bias(out, w->mixer_out_proj_bias, at.n, s.D);
    multiply(f, out, normed, OUT, at.n, 1);

    normalize(normed, out, w->norm2_weight, w->norm2_bias, f->eps2, at.n, s.D);
    add_bias(out, w->mlp_fc2_bias, at.n, s.D);
    multiply(f, wide, normed, FC1, at.n, 0);
    glu_rows(normed, wide, w->mlp_fc1_bias, at.n, f->H);
    multiply(f, out, normed, FC2, at.n, 1);
}

/* the step between the chunks of an image, for channel block j: scan band i of its columns, or carry the states */
static void carry_image(const block *f, int64_t i, int64_t j, image_buffers r) {
    if (f->grid)
        cross_columns(r.tokens + j * f->s.T, sums_in(r.z + j * BD, f->s.D), f->c + j, i, f->s);
    else
        carry_states(r.states + j * BD, r.decays + j * BD, f->c + j, f->s);
}

/* each thread takes whole images; to be called by all threads of a team, as is share_images */
static void run_images(const block *f, real *images, real *normed, real *wide, int64_t slices) {
    const shape s = f->s;
    const image_buffers buffers = image_buffers_at(f, images);
    #pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < f->B; b += f->group) {
        for (int64_t k = 0; f->conv && k < slices; k++) norm_slice(f, b, k, buffers);
        for (int64_t k = 0; k < slices; k++) enter_slice(f, b, k, buffers, normed);
        for (int64_t g = 0; g < slice_of(f, b, 0).images; g++)
            for (int64_t u = 0; u < s.D / BD * s.bands; u++)
                carry_image(f, u % s.bands, u / s.bands, buffers_of_image(buffers, g, s));
        for (int64_t k = 0; k < slices; k++) leave_slice(f, b, k, buffers, normed, wide);
    }
}

/* threads share the slices of each image */
static void share_images(const block *f, real *images, int64_t per_image, real *normed, real *wide, int64_t slices) {
    const shape s = f->s;
    const int64_t B = f->B, units = s.D / BD * s.bands;
    #define BUFFERS(b) image_buffers_at(f, images + (b) * per_image)
    if (f->conv) {
        #pragma omp for schedule(static)
        for (int64_t unit = 0; unit < B * slices; unit++)
            norm_slice(f, unit / slices, unit % slices, BUFFERS(unit / slices));
    }
    /* static: in the last loop, a thread then finds its slices in its cache */
    #pragma omp for schedule(static)
    for (int64_t unit = 0; unit < B * slices; unit++)
        enter_slice(f, unit / slices, unit % slices, BUFFERS(unit / slices), normed);
    #pragma omp for
    for (int64_t unit = 0; unit < B * units; unit++)
        carry_image(f, unit % s.bands, unit % units / s.bands, BUFFERS(unit / units));
    #pragma omp for schedule(static)
    for (int64_t unit = 0; unit < B * slices; unit++)
        leave_slice(f, unit / slices, unit % slices, BUFFERS(unit / slices), normed, wide);
    #undef BUFFERS
}

/* x and out (B, T, D), conv (side, side, D), not read if side is 0. Workspace: c (D / BD); `packed`, of `per_linear`
 * elements per linear layer (0: not packed); `rows`, of `per_thread` elements per thread; `images`, of `group` times
 * `per_image` elements per thread or, if group is 0 and threads share the slices of each image, of `per_image` elements
 * per image. Images have rows of `width` tokens; if `grid`, these are the chunks, and columns are scanned too. */
void block_forward(const real *x, const weights *w, const real *conv, const blas *library, channels *c, real *packed,
                   real *rows, real *images, real *out, double eps1, double eps, double eps2, int64_t B, int64_t T,
                   int64_t D, int64_t H, int64_t K, int64_t length, int64_t per_slice, int64_t group,
                   int64_t per_linear, int64_t per_thread, int64_t per_image, int64_t grid, int64_t width, int64_t side,
                   int64_t threads) {
    const shape s = {T, D, 5, K, length, (T + length - 1) / length, grid ? bands_of(length) : 1};
    block f = {
        .w = w,
        .c = c,
        .library = library,
        .linears =
            {
                [IN] = {w->mixer_in_proj_weight, per_linear ? packed : 0, D, 5 * D},
                [OUT] = {w->mixer_out_proj_weight, per_linear ? packed + per_linear : 0, 2 * D, D},
                [FC1] = {w->mlp_fc1_weight, per_linear ? packed + 2 * per_linear : 0, D, 2 * H},
                [FC2] = {w->mlp_fc2_weight, per_linear ? packed + 3 * per_linear : 0, H, D},
            },
        .eps1 = (real)eps1,
        .eps = (real)eps,
        .eps2 = (real)eps2,
        .x = x,
        .out = out,
        .B = B,
        .H = H,
        .per_slice = per_slice,
        .group = group ? group : 1,
        .grid = (int)grid,
        .conv = side ? conv : 0,
        .window = {width ? T / width : 0, width, D, side},
        .s = s,
    };
    const int64_t slices = (s.chunks + per_slice - 1) / per_slice;
    #pragma omp parallel num_threads(threads)
    {
        make_channels(c, w->lower_bound, w->mixer_theta, w->mixer_in_proj_bias, s);
        #pragma omp for schedule(dynamic)
        for (int i = 0; i < (per_linear ? LINEARS : 0); i++) pack(&f, &f.linears[i], per_slice * length * f.group);
        real *normed = rows + thread_number() * per_thread;
        real *wide = normed + per_slice * length * f.group * (2 * D > H ? 2 * D : H);
        if (group)
            run_images(&f, images + thread_number() * group * per_image, normed, wide, slices);
        else
            share_images(&f, images, per_image, normed, wide, slices);
    }
}

/* The depthwise convolution over the grid of tokens on CPUs, zero beyond the image; cpu_conv.py launches it.
 *
 * Channels are independent and adjacent in memory: loops over them become vector code. Sums are taken in the order of
 * rows, so that results are the same to the last bit for any number of threads. */
#include "cpu_conv.h"

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* the taps, counted along one side, that a token at `at` of `size` has neighbours for */
typedef struct {
    int64_t first, end;
} taps;

static inline taps taps_at(int64_t at, int64_t size, int64_t side) {
    const int64_t half = side / 2;
    return (taps){at < half ? half - at : 0, smaller(side, size - at + half)};
}

static inline void add_products(real *restrict sum, const elem *restrict x, const real *restrict weight, int n) {
    for (int d = 0; d < n; d++) sum[d] += load(x[d]) * weight[d];
}

/* `n` channels, at most BD, of the token at (i, j); x, weight and out start at the first of these channels */
static inline void convolve_token(elem *out, const elem *x, const real *weight, int64_t i, int64_t j, int n, window w) {
    const taps rows = taps_at(i, w.H, w.side), columns = taps_at(j, w.W, w.side);
    real sum[BD] = {0};
    for (int64_t a = rows.first; a < rows.end; a++)
        for (int64_t b = columns.first; b < columns.end; b++) {
            const elem *neighbour = x + ((i + a - w.side / 2) * w.W + j + b - w.side / 2) * w.D;
            add_products(sum, neighbour, weight + (a * w.side + b) * w.D, n);
        }
    for (int d = 0; d < n; d++) out[d] = store(sum[d]);
}

void convolve(elem *out, const elem *x, const real *weight, int64_t first, int64_t n, window w) {
    for (int64_t t = first; t < first + n; t++, out += w.D) {
        int64_t d = 0;
        /* full blocks first: the compiler knows their number of channels */
        for (; d + BD <= w.D; d += BD) convolve_token(out + d, x + d, weight + d, t / w.W, t % w.W, BD, w);
        if (d < w.D) convolve_token(out + d, x + d, weight + d, t / w.W, t % w.W, (int)(w.D - d), w);
    }
}

/* x and out (B, H, W, D), weight (side, side, D) */
void conv_forward(const elem *x, const real *weight, elem *out, int64_t B, int64_t H, int64_t W, int64_t D,
                  int64_t side, int64_t threads) {
    const window w = {H, W, D, side};
    #pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < B * H; row++)
        convolve(out + row * W * D, x + row / H * H * W * D, weight, row % H * W, W, w);
}

/* what rows `first` to `end` of an image add to the gradient of the weight, for `n` channels from d on */
static void correlate(real *partial, const elem *dout, const elem *x, int64_t first, int64_t end, int64_t d, int n,
                      window w) {
    for (int64_t tap = 0; tap < w.side * w.side; tap++) memset(partial + tap * w.D + d, 0, n * sizeof *partial);
    for (int64_t t = first * w.W; t < end * w.W; t++) {
        const int64_t i = t / w.W, j = t % w.W;
        const taps rows = taps_at(i, w.H, w.side), columns = taps_at(j, w.W, w.side);
        real grad[BD];
        for (int c = 0; c < n; c++) grad[c] = load(dout[t * w.D + d + c]);
        for (int64_t a = rows.first; a < rows.end; a++)
            for (int64_t b = columns.first; b < columns.end; b++) {
                const elem *neighbour = x + ((i + a - w.side / 2) * w.W + j + b - w.side / 2) * w.D + d;
                add_products(partial + (a * w.side + b) * w.D + d, neighbour, grad, n);
            }
    }
}

/* dout and x (B, H, W, D), dweight (side, side, D); workspace: partial (B, units of ROWS rows, side, side, D) */
void conv_backward_weight(const elem *dout, const elem *x, real *partial, real *dweight, int64_t B, int64_t H,
                          int64_t W, int64_t D, int64_t side, int64_t threads) {
    const window w = {H, W, D, side};
    const int64_t units = (H + ROWS - 1) / ROWS, blocks = (D + BD - 1) / BD, size = side * side * D;
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < B * units * blocks; job++) {
            const int64_t unit = job / blocks, d = job % blocks * BD, first = unit % units * ROWS;
            const int64_t image = unit / units * H * W * D;
            const int n = (int)smaller(BD, D - d);
            correlate(partial + unit * size, dout + image, x + image, first, smaller(H, first + ROWS), d, n, w);
        }
        #pragma omp for
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t unit = 0; unit < B * units; unit++) sum += partial[unit * size + i];
            dweight[i] = (real)sum;
        }
    }
}

/* The activation of the gated linear unit on CPUs, SiLU(a) * v, forward and backward; cpu_scan.py launches it.
 *
 * A row of x is [a | v], both of H channels and still without their bias. A unit of work is ROWS rows, however many
 * threads there are, and sums are taken in the order of rows: the number of threads does not change a bit. */
#include "cpu_math.h"

enum { COLUMNS = 64 };

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void forward_row(const elem *restrict a, const elem *restrict v, const real *restrict bias, elem *restrict out,
                        int64_t H) {
    for (int64_t j = 0; j < H; j++) {
        real x = load(a[j]) + bias[j];
        out[j] = store(x * sigmoid(x).on * (load(v[j]) + bias[H + j]));
    }
}

/* x (N, 2H), bias (2H), out (N, H) */
void glu_forward(const elem *x, const real *bias, elem *out, int64_t N, int64_t H, int64_t threads) {
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t first = 0; first < N; first += ROWS)
        for (int64_t n = first; n < smaller(first + ROWS, N); n++)
            forward_row(x + n * 2 * H, x + n * 2 * H + H, bias, out + n * H, H);
}

static void backward_row(const elem *restrict dout, const elem *restrict a, const elem *restrict v,
                         const real *restrict bias, elem *restrict da, elem *restrict dv, elem *restrict out,
                         real *restrict sum_a, real *restrict sum_v, int64_t H) {
    for (int64_t j = 0; j < H; j++) {
        real x = load(a[j]) + bias[j], value = load(v[j]) + bias[H + j], grad = load(dout[j]);
        gate g = sigmoid(x);
        real silu = x * g.on;
        real grad_a = grad * value * (g.on + silu * g.off), grad_v = grad * silu;
        da[j] = store(grad_a);
        dv[j] = store(grad_v);
        if (out) out[j] = store(silu * value);
        sum_a[j] += grad_a;
        sum_v[j] += grad_v;
    }
}

/* dout (N, H), dx like x, dbias (2H); partial (units, 2H) is room to work in. `out` (N, H), or null, receives forward's
 * result again, so that it need not be kept for the backward of the layer that follows. */
void glu_backward(const elem *dout, const elem *x, const real *bias, real *partial, elem *dx, real *dbias, elem *out,
                  int64_t N, int64_t H, int64_t threads) {
    const int64_t units = (N + ROWS - 1) / ROWS;
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t unit = 0; unit < units; unit++) {
        real *sums = partial + unit * 2 * H;
        memset(sums, 0, 2 * H * sizeof *sums);
        for (int64_t n = unit * ROWS; n < smaller((unit + 1) * ROWS, N); n++)
            backward_row(dout + n * H, x + n * 2 * H, x + n * 2 * H + H, bias, dx + n * 2 * H, dx + n * 2 * H + H,
                         out ? out + n * H : 0, sums, sums + H, H);
    }
    #pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < 2 * H; first += COLUMNS) {
        const int64_t columns = smaller(COLUMNS, 2 * H - first);
        double sum[COLUMNS] = {0};
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t j = 0; j < columns; j++) sum[j] += partial[unit * 2 * H + first + j];
        for (int64_t j = 0; j < columns; j++) dbias[first + j] = (real)sum[j];
    }
}

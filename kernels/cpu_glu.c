/* The activation of the gated linear unit on CPUs, SiLU(a) * v, forward and backward; cpu_glu.py launches it.
 *
 * A row of x is [a | v], both of H channels and without the bias. A unit of work is ROWS rows, and sums are taken in
 * the order of rows, so that results are the same to the last bit for any number of threads. */
#include "cpu_glu.h"

enum { COLUMNS = 64 };

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static void forward_row(const elem *restrict a, const elem *restrict v, const real *restrict bias, elem *restrict out,
                        int64_t H) {
    for (int64_t j = 0; j < H; j++) {
        real x = load(a[j]) + bias[j];
        out[j] = store(x * sigmoid(x).on * (load(v[j]) + bias[H + j]));
    }
}

void glu_rows(elem *out, const elem *x, const real *bias, int64_t n, int64_t H) {
    for (int64_t i = 0; i < n; i++) forward_row(x + i * 2 * H, x + i * 2 * H + H, bias, out + i * H, H);
}

/* x (N, 2H), bias (2H), out (N, H) */
void glu_forward(const elem *x, const real *bias, elem *out, int64_t N, int64_t H, int64_t threads) {
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t first = 0; first < N; first += ROWS)
        glu_rows(out + first * H, x + first * 2 * H, bias, smaller(ROWS, N - first), H);
}

static void backward_row(const elem *restrict dout, const elem *restrict a, const elem *restrict v,
                         const real *restrict bias, elem *restrict da, elem *restrict dv, real *restrict sums,
                         int64_t H) {
    for (int64_t j = 0; j < H; j++) {
        real x = load(a[j]) + bias[j], grad = load(dout[j]);
        gate g = sigmoid(x);
        real silu = x * g.on;
        real grad_a = grad * (load(v[j]) + bias[H + j]) * (g.on + silu * g.off), grad_v = grad * silu;
        da[j] = store(grad_a);
        dv[j] = store(grad_v);
        sums[j] += grad_a;
        sums[H + j] += grad_v;
    }
}

/* dout (N, H), dx like x, dbias (2H); partial (units, 2H) is workspace */
void glu_backward(const elem *dout, const elem *x, const real *bias, real *partial, elem *dx, real *dbias, int64_t N,
                  int64_t H, int64_t threads) {
    const int64_t units = (N + ROWS - 1) / ROWS;
    #pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t unit = 0; unit < units; unit++) {
        real *sums = partial + unit * 2 * H;
        memset(sums, 0, 2 * H * sizeof *sums);
        for (int64_t n = unit * ROWS; n < smaller((unit + 1) * ROWS, N); n++) {
            const elem *x_n = x + n * 2 * H;
            elem *dx_n = dx + n * 2 * H;
            backward_row(dout + n * H, x_n, x_n + H, bias, dx_n, dx_n + H, sums, H);
        }
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

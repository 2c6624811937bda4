/* Element types and the sigmoid, shared by the CPU kernels.
 *
 * A kernel is compiled once for each dtype of the activations, with -DHGRN_F32, -DHGRN_F64 or -DHGRN_BF16.
 * `elem` is the type of tensor elements, `real` the type of computations. The functions are scalar and branch-free, so
 * that loops over channels that call them become vector code. */
#ifndef CPU_MATH_H
#define CPU_MATH_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
/* otherwise gcc also computes what follows a clamped exponent for its limits, with denormals: four times slower */
#pragma GCC optimize("no-tree-pre")
#endif

#ifdef HGRN_F64
typedef double real;
typedef int64_t word;
#else
typedef float real;
typedef int32_t word;
#endif

#ifdef HGRN_BF16
typedef uint16_t elem;
#else
typedef real elem;
#endif

static inline word word_of(real x) {
    word w;
    memcpy(&w, &x, sizeof w);
    return w;
}

static inline real real_of(word w) {
    real x;
    memcpy(&x, &w, sizeof x);
    return x;
}

#ifdef HGRN_BF16
static inline real load(elem x) { return real_of((word)((uint32_t)x << 16)); }

static inline elem store(real x) {
    uint32_t w = (uint32_t)word_of(x);
    uint32_t nearest_even = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    return (elem)(x == x ? nearest_even : w >> 16 | 0x40); /* rounding would turn some NaNs into infinity */
}
#else
static inline real load(elem x) { return x; }
static inline elem store(real x) { return x; }
#endif

#ifdef HGRN_F64
#define LIMIT 708.0
#define MANTISSA 52
#define SHIFT (0x1.8p52 + 1023)
#define LOG2E 0x1.71547652b82fep0
#define LN2_HI 6.93147180369123816490e-01
#define LN2_LO 1.90821492927058770002e-10
static const real Q[] = {2.082653660942339e-09,  2.511214450956187e-08,  2.75575827954688e-07,  2.7557234558733526e-06,
                         2.4801586924603454e-05, 1.9841269896681005e-04, 1.3888888889117266e-03, 8.333333333316918e-03,
                         4.166666666666609e-02,  1.6666666666666682e-01, 0.5};
#else
#define LIMIT 87.0f
#define MANTISSA 23
#define SHIFT (0x1.8p23f + 127)
#define LOG2E 0x1.715476p0f
#define LN2_HI 0.693359375f
#define LN2_LO -2.12194440e-4f
static const real Q[] = {1.3905036e-03f, 8.3663119e-03f, 4.1666865e-02f, 1.6666545e-01f, 0.5f};
#endif

/* exp(x) to about one unit in the last place, for x clamped to +-LIMIT, where neither it nor its inverse leaves the
 * normal numbers: x = n ln 2 + r, and exp(r) = 1 + r + r^2 q(r) with q fitted for the least relative error.
 * Adding SHIFT rounds to the integer n and leaves it, with the exponent's bias, in the lowest bits of the sum; LN2_HI
 * is short enough for n LN2_HI to be exact. */
static inline real exponential(real x) {
    x = x < -LIMIT ? -LIMIT : x > LIMIT ? LIMIT : x; /* a NaN stays one */
    real shifted = x * LOG2E + SHIFT;
    real n = shifted - SHIFT;
    real r = (x - n * LN2_HI) - n * LN2_LO;
    real q = Q[0];
    for (unsigned i = 1; i < sizeof Q / sizeof *Q; i++) q = q * r + Q[i];
    return ((q * r + 1) * r + 1) * real_of((word)((uint64_t)word_of(shifted) << MANTISSA));
}

/* sigmoid(x) and 1 - sigmoid(x), both to full relative precision: neither is computed by subtraction */
typedef struct {
    real on, off;
} gate;

static inline gate sigmoid(real x) {
    real e = exponential(-x);
    real on = 1 / (1 + e);
    return (gate){on, e * on};
}

#endif

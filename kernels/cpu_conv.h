/* The depthwise convolution over the grid of tokens on CPUs. */
#ifndef CPU_CONV_H
#define CPU_CONV_H

#include "cpu_math.h"

/* images of H x W tokens of D channels, and the side of the window around a token, an odd number */
typedef struct {
    int64_t H, W, D, side;
} window;

/* out (n, D): tokens `first` to `first + n` of an image x (H, W, D), convolved; weight (side, side, D) */
void convolve(elem *out, const elem *x, const real *weight, int64_t first, int64_t n, window w);

#endif

/* The activation of the gated linear unit on CPUs. */
#ifndef CPU_GLU_H
#define CPU_GLU_H

#include "cpu_math.h"

/* out (n, H) = SiLU(a) * v with [a | v] = x (n, 2H) + bias (2H) */
void glu_rows(elem *out, const elem *x, const real *bias, int64_t n, int64_t H);

#endif

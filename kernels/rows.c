// rows: what a ring of keys and values moves and sums beside attention itself (Liu et al. 2023; cp_ring.c).
//
// A token's keys and values are C channels in the middle of a wider row. To travel they are packed; their gradients come
// back packed, and join a sum that lies as the rows do:
//
//     in, sum [N,stride]   │ q       │ k   v │   ─ pack →   │ k   v │   out, part [N,C]
//                          │ q       │ k   v │   ←  add ─   │ k   v │
//                           in, sum point ↑ here
//
// Sums stay fp32 around the whole ring and are rounded once, at its end.
// Cost: one pass, no arithmetic to speak of. Bytes an element: pack 2 × floatX, add 12, round 4 + floatX, fill 4.
#include <string.h>
#include "kernels/kernels.h"

void rows_pack(floatX *out, const floatX *in, size_t stride, size_t N, size_t C) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) memcpy(out + n * C, in + n * stride, C * sizeof *out);
}

void rows_add(float *sum, size_t stride, const float *part, size_t N, size_t C) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        float *s = sum + n * stride;
        const float *p = part + n * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) s[c] += p[c];
    }
}

void rows_round(floatX *out, const float *in, size_t n) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = to_floatX(in[i]);
}

void rows_fill(float *x, float value, size_t n) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) x[i] = value;
}

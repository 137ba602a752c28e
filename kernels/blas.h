// What matmul.c and flash_attention.c share: BLAS multiplies fp32, one thread a call; the tensors may be bf16.
//
//   floatX in memory ──load_rows──> fp32 block ──sgemm──> fp32 sums ──rounded once──> floatX in memory
#ifndef BLAS_H
#define BLAS_H

#include <cblas.h>
#include <omp.h>
#include "kernels.h"

// The split over threads is ours (OpenMP): each thread calls BLAS on a part of the output of its own, so the order of a
// sum does not depend on how BLAS would share it out. OpenBLAS built on OpenMP takes its own number of threads to be
// ours too, hence the second line.
static inline void blas_single_thread(void) {
    if (openblas_get_num_threads() == 1) return;
    int threads = omp_get_max_threads();
    openblas_set_num_threads(1);
    omp_set_num_threads(threads);
}

// Do products take bf16 values? Then everything that enters one is rounded, also what is computed in fp32 (p, ds).
static inline bool bf16_products(void) {
    return sizeof(floatX) == sizeof(bf16) || matmul_inputs_bf16;
}

// x [n] as products take it, in place.
static inline void round_inputs(float *x, size_t n) {
    if (!bf16_products()) return;
#pragma omp simd
    for (size_t i = 0; i < n; i++) x[i] = bf16_to_float(float_to_bf16(x[i]));
}

// copy [rows, cols] = x, whose rows are ld apart, as products take it.
static inline void load_rows(float *copy, const floatX *x, size_t ld, size_t rows, size_t cols) {
    for (size_t i = 0; i < rows; i++)
#pragma omp simd
        for (size_t j = 0; j < cols; j++) copy[i * cols + j] = to_float(x[i * ld + j]);
    if (sizeof(floatX) == sizeof(float)) round_inputs(copy, rows * cols);
}

// out [m,n] = alpha · a [m,r] · b [r,n] + beta · out; a or b may be stored transposed ('T', else 'N').
static inline void sgemm(char a_is, char b_is, size_t m, size_t n, size_t r, float alpha, const float *a,
                         size_t a_ld, const float *b, size_t b_ld, float beta, float *out, size_t out_ld) {
    cblas_sgemm(CblasRowMajor, a_is == 'T' ? CblasTrans : CblasNoTrans, b_is == 'T' ? CblasTrans : CblasNoTrans,
                (int)m, (int)n, (int)r, alpha, a, (int)a_ld, b, (int)b_ld, beta, out, (int)out_ld);
}

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

#endif

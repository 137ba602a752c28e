// layernorm and rmsnorm: give every token's row of C channels the same scale, then a learned one.
//
//     layernorm  x̂ = (x − mean) / √(variance + eps)      out = x̂ · weight + bias     (Ba et al. 2016)
//     rmsnorm    x̂ =  x         / √(mean of x² + eps)    out = x̂ · weight            (Zhang & Sennrich 2019)
//
// rmsnorm is layernorm with the mean held at 0 and no bias, so one loop serves both. The residual connection before
// the norm is fused: its sum is read while it is still in the cache.
//
// Backward: with g = dout · weight, the gradient that reaches x is g less its parts along the two directions that
// the norm has taken out of x, the constant and x̂ itself:
//
//     dx = rstd · (g − mean(g) − x̂ · mean(g · x̂))        dweight = Σ rows dout · x̂        dbias = Σ rows dout
//
// The sums over rows are taken in blocks of rows, whose number does not depend on the number of threads, and then
// over the blocks in order: the same bits for any number of threads.
//
// Cost: each array is read or written once; the passes over a row after the first find it in the L1 cache.
#include <math.h>
#include "kernels/kernels.h"

static const float EPS = 1e-5f;

// out = a + b, of one row
static void residual_row(floatX *out, const floatX *a, const floatX *b, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) out[i] = to_floatX(to_float(a[i]) + to_float(b[i]));
}

// mean NULL: rmsnorm
static void norm_forward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                         const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const floatX *x = inp + n * C;
        if (residual) {
            // normalise what is stored: backward sees x rounded, so forward must too
            residual_row(sum + n * C, x, residual + n * C, C);
            x = sum + n * C;
        }
        float m = 0.0f;
        if (mean) {
            // Distances from the first channel, not from 0: a large offset that all channels share would eat the
            // bits of their differences.
            float first = to_float(x[0]), distance = 0.0f;
#pragma omp simd reduction(+ : distance)
            for (size_t c = 0; c < C; c++) distance += to_float(x[c]) - first;
            mean[n] = m = first + distance / (float)C;
        }
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (size_t c = 0; c < C; c++) {
            float d = to_float(x[c]) - m;
            squares += d * d;
        }
        float r = 1.0f / sqrtf(squares / (float)C + EPS);
        rstd[n] = r;

        floatX *o = out + n * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++)
            o[c] =
                to_floatX((to_float(x[c]) - m) * r * to_float(weight[c]) + (bias ? to_float(bias[c]) : 0.0f));
    }
}

void layernorm_forward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                       const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C) {
    norm_forward(out, mean, rstd, sum, inp, residual, weight, bias, N, C);
}

void rmsnorm_forward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                     const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C) {
    (void)mean, (void)bias;
    norm_forward(out, NULL, rstd, sum, inp, residual, weight, NULL, N, C);
}

enum { BLOCKS = 64 }; // of rows, at most

// mean and dbias NULL: rmsnorm
static void norm_backward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout,
                          const floatX *dresidual, const floatX *inp, const floatX *weight, const float *mean,
                          const float *rstd, size_t N, size_t C, void *workspace) {
    size_t rows = (N + BLOCKS - 1) / BLOCKS, blocks = (N + rows - 1) / rows;
    float *partial = workspace; // [blocks, 2, C]: the block's share of dweight and of dbias

#pragma omp parallel for
    for (size_t block = 0; block < blocks; block++) {
        float *dw = partial + block * 2 * C, *db = dw + C;
        memset(dw, 0, 2 * C * sizeof *dw);
        for (size_t n = block * rows; n < N && n < (block + 1) * rows; n++) {
            const floatX *dy = dout + n * C, *x = inp + n * C;
            float m = mean ? mean[n] : 0.0f, r = rstd[n], mean_g = 0.0f, mean_gx = 0.0f;
#pragma omp simd reduction(+ : mean_g, mean_gx)
            for (size_t c = 0; c < C; c++) {
                float d = to_float(dy[c]), xhat = (to_float(x[c]) - m) * r, g = d * to_float(weight[c]);
                mean_g += g;
                mean_gx += g * xhat;
                dw[c] += d * xhat;
                db[c] += d;
            }
            mean_g = mean ? mean_g / (float)C : 0.0f;
            mean_gx /= (float)C;

            floatX *dx = dinp + n * C;
            const floatX *dres = dresidual ? dresidual + n * C : NULL;
#pragma omp simd
            for (size_t c = 0; c < C; c++) {
                float xhat = (to_float(x[c]) - m) * r, g = to_float(dy[c]) * to_float(weight[c]);
                dx[c] = to_floatX((dres ? to_float(dres[c]) : 0.0f) + r * (g - mean_g - xhat * mean_gx));
            }
        }
    }
    // 1/rows of the work above: not worth a second parallel loop
    for (size_t block = 1; block < blocks; block++) {
#pragma omp simd
        for (size_t i = 0; i < 2 * C; i++) partial[i] += partial[block * 2 * C + i];
    }
#pragma omp simd
    for (size_t c = 0; c < C; c++) dweight[c] = to_floatX(to_float(dweight[c]) + partial[c]);
    if (!dbias) return;
#pragma omp simd
    for (size_t c = 0; c < C; c++) dbias[c] = to_floatX(to_float(dbias[c]) + partial[C + c]);
}

void layernorm_backward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout,
                        const floatX *dresidual, const floatX *inp, const floatX *weight, const float *mean,
                        const float *rstd, size_t N, size_t C, void *workspace) {
    norm_backward(dinp, dweight, dbias, dout, dresidual, inp, weight, mean, rstd, N, C, workspace);
}

void rmsnorm_backward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout, const floatX *dresidual,
                      const floatX *inp, const floatX *weight, const float *mean, const float *rstd, size_t N,
                      size_t C, void *workspace) {
    (void)mean, (void)dbias;
    norm_backward(dinp, dweight, NULL, dout, dresidual, inp, weight, NULL, rstd, N, C, workspace);
}

size_t norm_backward_workspace(size_t N, size_t C) {
    return (N < BLOCKS ? N : BLOCKS) * 2 * C * sizeof(float);
}

void residual_forward(floatX *out, const floatX *a, const floatX *b, size_t n) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) out[i] = to_floatX(to_float(a[i]) + to_float(b[i]));
}

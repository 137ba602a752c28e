// grad_norm: Σ g², of which the clip takes the root when all ranks have added theirs.
//
//     g   |  4096  |  4096  |  …  | rest |      one sum a block, in double, by any thread
//             s₀       s₁             s_k       then s₀ + s₁ + … by one
//
// The blocks do not depend on the number of threads, so neither do the bits of the sum.
// Cost: one read of the gradient. In double, because squares of a bf16 gradient leave fp32's range, and because a
// billion terms in fp32 would lose the small ones.
#include "kernels/kernels.h"

enum { BLOCK = 4096 };

void grad_norm_squared(double *sum, const floatX *grad, const float *grad32, size_t n, void *workspace) {
    size_t blocks = (n + BLOCK - 1) / BLOCK;
    double *partial = workspace; // [blocks]
#pragma omp parallel for
    for (size_t block = 0; block < blocks; block++) {
        size_t begin = block * BLOCK, count = n - begin < BLOCK ? n - begin : BLOCK;
        float copy[BLOCK]; // stays in the L1 cache
        if (!grad32) {
#pragma omp simd
            for (size_t i = 0; i < count; i++) copy[i] = to_float(grad[begin + i]);
        }
        const float *g = grad32 ? grad32 + begin : copy;
        double squares = 0.0;
#pragma omp simd reduction(+ : squares)
        for (size_t i = 0; i < count; i++) squares += (double)g[i] * g[i];
        partial[block] = squares;
    }
    double total = 0.0;
    for (size_t block = 0; block < blocks; block++) total += partial[block];
    *sum += total;
}

size_t grad_norm_workspace(size_t n) {
    return (n + BLOCK - 1) / BLOCK * sizeof(double);
}

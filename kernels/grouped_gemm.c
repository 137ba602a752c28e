// grouped_gemm: the three products of a linear layer for several weights in one call, the experts' of a rank. Their rows stand one
// behind the other, as many for each as it got; on the CPU one group's product follows the other's (matmul.c), each on all threads.
// Cost: 2·M·N·K operations, M the rows of all groups.
#include "kernels.h"

void grouped_gemm_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                          const size_t *rows, size_t groups, size_t stride, size_t K, size_t N,
                          void *workspace) {
    for (size_t g = 0; g < groups; inp += rows[g] * K, out += rows[g] * N, g++)
        if (rows[g])
            matmul_forward(out, inp, weight + g * stride, bias ? bias + g * stride : NULL, rows[g], K, N,
                           workspace);
}

void grouped_gemm_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, const size_t *rows,
                                 size_t groups, size_t stride, size_t K, size_t N, void *workspace) {
    for (size_t g = 0; g < groups; dout += rows[g] * N, dinp += rows[g] * K, g++)
        if (rows[g]) matmul_backward_input(dinp, dout, weight + g * stride, rows[g], K, N, workspace);
}

void grouped_gemm_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, const size_t *rows,
                                  size_t groups, size_t stride, size_t K, size_t N, void *workspace) {
    for (size_t g = 0; g < groups; dout += rows[g] * N, inp += rows[g] * K, g++)
        if (rows[g]) matmul_backward_weight(dweight + g * stride, dout, inp, rows[g], K, N, workspace);
}

size_t grouped_gemm_workspace(size_t M, size_t K, size_t N) {
    return matmul_workspace(M, K, N);
}

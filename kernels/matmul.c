// matmul: a linear layer's three products, and the bias.
//
//     forward          out     [M,N]  = inp  [M,K] · weight [N,K]ᵀ + bias
//     backward input   dinp    [M,K]  = dout [M,N] · weight [N,K]
//     backward weight  dweight [N,K] += dout [M,N]ᵀ · inp   [M,K]
//
// All three are one sum, out [m,n] (+)= Σ_r a [m,r] · b [n,r], whose operands lie in memory this way round or the other.
// The output is cut into blocks that the threads share; a block is summed panel by panel along r:
//
//        r ───>           n ───>
//     m ┌────┬────┬──┐  ┌───────┬───────┐
//     │ │░░░░│    │  │  │░░░░░░░│       │   ░ · ░: one sgemm, single-threaded. bf16 operands are turned into fp32
//     v ├────┼────┼──┤  ├───────┼───────┤   just before it, panel by panel, and the finished block is rounded once.
//       └────┴────┴──┘  └───────┴───────┘
//
// Panels have a fixed length, so a sum is cut the same way whatever the number of threads.
// Cost: 2·M·N·K operations each; a workspace of three small tiles a thread (none of it touched in plain fp32).
// After Goto & van de Geijn (2008), whose inner layers are OpenBLAS's.
#include "blas.h"

KernelFlops kernel_flops;
bool matmul_inputs_bf16;

enum {
    DIRECT = 1024, // largest block edge where BLAS reads and writes the tensors themselves
    TILE = 256,    // ... and where they are converted: three tiles stay in a core's cache
    PANEL = 256,   // length of a panel along the sum
    SMALLEST = 32, // not worth a thread of its own
};

typedef struct {
    const floatX *x;
    size_t ld;
    bool transposed; // element (i, r) is x[i·ld + r], transposed x[r·ld + i]
} Operand;

// Elements i.. and r.. of an operand as products take them: where they lie, or copied. *ld: from one row to the next.
static const float *load(float *copy, size_t *ld, Operand a, size_t i, size_t rows, size_t r, size_t depth) {
    const floatX *x = a.transposed ? a.x + r * a.ld + i : a.x + i * a.ld + r;
    size_t height = a.transposed ? depth : rows, width = a.transposed ? rows : depth;
    *ld = bf16_products() ? width : a.ld;
    if (!bf16_products()) return (const float *)(const void *)x;
    load_rows(copy, x, a.ld, height, width);
    return copy;
}

static size_t cut(size_t length, size_t parts) {
    size_t part = (length + parts - 1) / parts;
    return (part + 15) / 16 * 16; // BLAS's inner loops like whole vectors
}

// out [m,n] = a · bᵀ + bias [n], or with `add` out += a · bᵀ.
static void product(floatX *out, size_t m, size_t n, size_t length, Operand a, Operand b, const floatX *bias,
                    bool add, float *workspace) {
    size_t edge = bf16_products() ? TILE : DIRECT, threads = (size_t)omp_get_max_threads();
    size_t down = (m + edge - 1) / edge, across = (n + edge - 1) / edge;
    // Few blocks: cut the longer side until every thread gets equally many.
    while (down * across % threads && down * across < 8 * threads &&
           (m > SMALLEST * down || n > SMALLEST * across))
        if (m * across > n * down)
            down++;
        else
            across++;
    size_t height = cut(m, down), width = cut(n, across);

    blas_single_thread();
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (size_t i = 0; i < m; i += height)
        for (size_t j = 0; j < n; j += width) {
            float *a_copy = workspace + (size_t)omp_get_thread_num() * 3 * TILE * TILE;
            float *b_copy = a_copy + TILE * TILE, *sum_copy = b_copy + TILE * TILE;
            size_t rows = smaller(height, m - i), cols = smaller(width, n - j);
            floatX *block = out + i * n + j;
            bool direct = sizeof(floatX) == sizeof(float);
            float *sum = direct ? (float *)(void *)block : sum_copy;
            size_t ld = direct ? n : cols;

            for (size_t k = 0; k < rows && (bias || (add && !direct)); k++)
                for (size_t l = 0; l < cols; l++)
                    sum[k * ld + l] = to_float(bias ? bias[j + l] : block[k * n + l]);
            for (size_t r = 0; r < length; r += PANEL) {
                size_t depth = smaller(PANEL, length - r), a_ld, b_ld;
                const float *a_panel = load(a_copy, &a_ld, a, i, rows, r, depth);
                const float *b_panel = load(b_copy, &b_ld, b, j, cols, r, depth);
                sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'N' : 'T', rows, cols, depth, 1, a_panel, a_ld,
                      b_panel, b_ld, r > 0 || bias || add, sum, ld);
            }
            for (size_t k = 0; k < rows && !direct; k++)
                for (size_t l = 0; l < cols; l++) block[k * n + l] = to_floatX(sum[k * ld + l]);
        }
}

size_t matmul_workspace(size_t M, size_t K, size_t N) {
    (void)M, (void)K, (void)N; // big matrices take more tiles, not bigger ones
    return (size_t)omp_get_max_threads() * 3 * TILE * TILE * sizeof(float);
}

void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t M,
                    size_t K, size_t N, void *workspace) {
    product(out, M, N, K, (Operand){inp, K, false}, (Operand){weight, K, false}, bias, false, workspace);
    kernel_flops.gemm_forward += 2.0 * M * N * K;
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, size_t M, size_t K, size_t N,
                           void *workspace) {
    product(dinp, M, K, N, (Operand){dout, N, false}, (Operand){weight, K, true}, NULL, false, workspace);
    kernel_flops.gemm_backward += 2.0 * M * N * K;
}

void matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                            size_t N, void *workspace) {
    product(dweight, N, K, M, (Operand){dout, N, true}, (Operand){inp, K, true}, NULL, true, workspace);
    kernel_flops.gemm_backward += 2.0 * M * N * K;
}

void matmul_gelu_forward(floatX *out, floatX *pre, const floatX *inp, const floatX *weight, const floatX *bias,
                         size_t M, size_t K, size_t N, void *workspace) {
    matmul_forward(pre, inp, weight, bias, M, K, N, workspace);
    gelu_forward(out, pre, M, N);
}

void matmul_backward_bias(floatX *dbias, const floatX *dout, size_t M, size_t N, void *workspace) {
    (void)workspace;
    enum { COLS = 64 };
#pragma omp parallel for
    for (size_t j = 0; j < N; j += COLS) {
        float sum[COLS] = {0};
        size_t cols = smaller(COLS, N - j);
        for (size_t i = 0; i < M; i++)
            for (size_t l = 0; l < cols; l++) sum[l] += to_float(dout[i * N + j + l]);
        for (size_t l = 0; l < cols; l++) dbias[j + l] = to_floatX(to_float(dbias[j + l]) + sum[l]);
    }
}

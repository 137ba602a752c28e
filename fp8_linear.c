// A block's linear layers in 8-bit floating point (--fp8): the three products of each run on numbers of one byte, with twice
// the rate of bf16 where there are tensor cores for them. What is kept, summed and sent stays floatX.
//
// One scale for a whole tensor would have to suit its largest value, and what is 2^15 times smaller would lose its digits. So
// each 128 numbers along the sum share a scale of their own, or of a weight each 128×128; kernels/fp8_gemm.c has the numbers,
// the scales and the sum. A product wants both operands with the sum along their rows, another direction in each of the three:
//
//     F   out [M,N] = inp [M,K] · weight [N,K]ᵀ + bias          I   dinp [M,K] = dout [M,N] · weight [N,K]
//
//             inp            weight                                     dout           weightᵀ
//          ┌─────┬─────┐   ┌─────┬─────┐                             ┌─────┬─────┐   ┌─────┬─────┐
//          ├─────┼─────┤   │     │     │                             ├─────┼─────┤   │     │     │
//        M ├─────┼─────┤ N ├─────┼─────┤                           M ├─────┼─────┤ K ├─────┼─────┤
//          └─────┴─────┘   │     │     │                             └─────┴─────┘   │     │     │
//              K ──>       └─────┴─────┘                                 N ──>       └─────┴─────┘
//              1×128       128×128, K ──>                                1×128       128×128, N ──>
//
//     W   dweight [N,K] += doutᵀ [N,M] · inp [M,K]: a sum over tokens, so a tile is 128 tokens of one channel
//
// The square blocks of weightᵀ are those of weight, turned: the same bytes and scales. Tiles of 1×128 do not turn, so W
// rounds inp and dout anew, from floatX.
//
// Formats: E4M3 (4 bits of exponent, 3 of mantissa) for all, for with so many scales no tensor needs a wide range. `hybrid`
// gives dout, in I and W, the format made for gradients, E5M2, which reaches 2^15 times as far with half the accuracy.
// A value rounded to 3 bits of mantissa is off by 2.6 % (rms), so a product of two by 3.7 %: noise without a mean, of which
// a sum over layers and tokens leaves little. Embedding, head, norms and attention are not done in 8 bits.
//
// Cost: nothing is kept. Operands are rounded into the workspace just before their product, M·(K + N) bytes or M·N + 2·N·K;
// weights twice in each micro-batch, though they change once a step: keeping their bytes would take 1 byte a parameter, 2
// with the turned ones. In a bf16 build rounding moves 6·M·(K + N) + 7·N·K bytes for the 6·M·N·K operations of a layer: for
// M = 8,192 and N = K = 4,096 half a gigabyte, 0.16 ms of an H100's 3.35 TB/s, beside 0.42 ms at its peak of 1,979 TFLOP/s.
//
// DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", §3.3; E4M3 and E5M2: Micikevicius et al. 2022.
#include "train.h"

// ---- the workspace: two rounded operands, then what fp8_gemm needs --------------------------------------------------------

static size_t tiles(size_t n) {
    return (n + FP8_TILE - 1) / FP8_TILE;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

// Rounded up to 64 bytes: kernels load 16 at a time.
static size_t taken(size_t n) {
    return (n + 63) / 64 * 64;
}

// The next n bytes of the workspace.
static void *take(char **workspace, size_t n) {
    void *place = *workspace;
    *workspace += taken(n);
    return place;
}

// Bytes of the scales of a [rows, columns] whose tiles lie along its rows: 1×128, and 128×128 (see kernels.h).
static size_t row_scales(size_t rows, size_t columns) {
    return tiles(columns) * rows * sizeof(float);
}

static size_t block_scales(size_t rows, size_t columns) {
    return tiles(rows) * ((tiles(columns) + 3) / 4 * 4) * sizeof(float);
}

static size_t row_bytes(size_t rows, size_t columns) {
    return taken(rows * columns) + taken(row_scales(rows, columns));
}

static size_t block_bytes(size_t rows, size_t columns) {
    return taken(rows * columns) + taken(block_scales(rows, columns));
}

size_t linear_workspace(const Model *m, size_t M, size_t K, size_t N) {
    if (m->config.fp8 == FP8_NONE) return matmul_workspace(M, K, N);
    size_t forward = row_bytes(M, K) + block_bytes(N, K) + fp8_gemm_workspace(M, K, N);
    size_t input = row_bytes(M, N) + block_bytes(N, K) + block_bytes(K, N) + fp8_gemm_workspace(M, N, K);
    size_t weight = row_bytes(N, M) + row_bytes(K, M) + fp8_gemm_workspace(N, M, K);
    return larger(forward, larger(input, weight));
}

// ---- operands: rounded into the next place of the workspace ---------------------------------------------------------------

static Fp8Format gradient_format(const Model *m) {
    return m->config.fp8 == FP8_HYBRID ? FP8_E5M2 : FP8_E4M3;
}

// x [rows, columns], the sum along a row.
static Fp8Matrix by_rows(char **workspace, const floatX *x, size_t rows, size_t columns, Fp8Format format) {
    fp8 *q = take(workspace, rows * columns);
    float *scale = take(workspace, row_scales(rows, columns));
    fp8_quantize(q, scale, x, rows, columns, format);
    return (Fp8Matrix){q, scale, format, false};
}

// xᵀ [columns, rows] of x [rows, columns], the sum down a column of x.
static Fp8Matrix by_columns(char **workspace, const floatX *x, size_t rows, size_t columns, Fp8Format format) {
    fp8 *q = take(workspace, rows * columns);
    float *scale = take(workspace, row_scales(columns, rows));
    fp8_quantize_transposed(q, scale, x, rows, columns, format);
    return (Fp8Matrix){q, scale, format, false};
}

// A weight [N, K] as it is, and turned: [K, N].
static Fp8Matrix by_blocks(char **workspace, const floatX *weight, size_t N, size_t K) {
    fp8 *q = take(workspace, N * K);
    float *scale = take(workspace, block_scales(N, K));
    fp8_quantize_blocks(q, scale, NULL, NULL, weight, N, K, FP8_E4M3);
    return (Fp8Matrix){q, scale, FP8_E4M3, true};
}

static Fp8Matrix by_blocks_turned(char **workspace, const floatX *weight, size_t N, size_t K) {
    fp8 *q = take(workspace, N * K), *turned = take(workspace, N * K);
    float *scale = take(workspace, block_scales(N, K)), *turned_scale = take(workspace, block_scales(K, N));
    fp8_quantize_blocks(q, scale, turned, turned_scale, weight, N, K, FP8_E4M3);
    return (Fp8Matrix){turned, turned_scale, FP8_E4M3, true};
}

// ---- the three products of a layer ----------------------------------------------------------------------------------------

void linear_forward(const Model *m, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                    size_t M, size_t K, size_t N) {
    char *workspace = m->workspace;
    if (m->config.fp8 == FP8_NONE) {
        matmul_forward(out, inp, weight, bias, M, K, N, workspace);
        return;
    }
    Fp8Matrix a = by_rows(&workspace, inp, M, K, FP8_E4M3), b = by_blocks(&workspace, weight, N, K);
    fp8_gemm(out, a, b, bias, false, M, K, N, workspace);
}

void linear_backward_input(const Model *m, floatX *dinp, const floatX *dout, const floatX *weight, size_t M,
                           size_t K, size_t N) {
    char *workspace = m->workspace;
    if (m->config.fp8 == FP8_NONE) {
        matmul_backward_input(dinp, dout, weight, M, K, N, workspace);
        return;
    }
    Fp8Matrix a = by_rows(&workspace, dout, M, N, gradient_format(m));
    Fp8Matrix b = by_blocks_turned(&workspace, weight, N, K);
    fp8_gemm(dinp, a, b, NULL, false, M, N, K, workspace);
}

void linear_backward_weight(const Model *m, floatX *dweight, const floatX *dout, const floatX *inp, size_t M,
                            size_t K, size_t N) {
    char *workspace = m->workspace;
    if (m->config.fp8 == FP8_NONE) {
        matmul_backward_weight(dweight, dout, inp, M, K, N, workspace);
        return;
    }
    Fp8Matrix a = by_columns(&workspace, dout, M, N, gradient_format(m));
    Fp8Matrix b = by_columns(&workspace, inp, M, K, FP8_E4M3);
    fp8_gemm(dweight, a, b, NULL, true, N, M, K, workspace);
}

// ---- of experts: one after the other, for a tile must not hold rows of two ----------------------------------------------------

size_t linear_workspace_grouped(const Model *m, size_t M, size_t K, size_t N) {
    return m->config.fp8 == FP8_NONE ? grouped_gemm_workspace(M, K, N) : linear_workspace(m, M, K, N);
}

void linear_forward_grouped(const Model *m, floatX *out, const floatX *inp, const floatX *weight,
                            const floatX *bias, Groups g, size_t K, size_t N) {
    if (m->config.fp8 == FP8_NONE) {
        grouped_gemm_forward(out, inp, weight, bias, g.rows, g.n, g.stride, K, N, m->workspace);
        return;
    }
    for (size_t i = 0; i < g.n; inp += g.rows[i] * K, out += g.rows[i] * N, i++)
        if (g.rows[i])
            linear_forward(m, out, inp, weight + i * g.stride, bias ? bias + i * g.stride : NULL, g.rows[i], K,
                           N);
}

void linear_backward_input_grouped(const Model *m, floatX *dinp, const floatX *dout, const floatX *weight,
                                   Groups g, size_t K, size_t N) {
    if (m->config.fp8 == FP8_NONE) {
        grouped_gemm_backward_input(dinp, dout, weight, g.rows, g.n, g.stride, K, N, m->workspace);
        return;
    }
    for (size_t i = 0; i < g.n; dout += g.rows[i] * N, dinp += g.rows[i] * K, i++)
        if (g.rows[i]) linear_backward_input(m, dinp, dout, weight + i * g.stride, g.rows[i], K, N);
}

void linear_backward_weight_grouped(const Model *m, floatX *dweight, const floatX *dout, const floatX *inp,
                                    Groups g, size_t K, size_t N) {
    if (m->config.fp8 == FP8_NONE) {
        grouped_gemm_backward_weight(dweight, dout, inp, g.rows, g.n, g.stride, K, N, m->workspace);
        return;
    }
    for (size_t i = 0; i < g.n; dout += g.rows[i] * N, inp += g.rows[i] * K, i++)
        if (g.rows[i]) linear_backward_weight(m, dweight + i * g.stride, dout, inp, g.rows[i], K, N);
}

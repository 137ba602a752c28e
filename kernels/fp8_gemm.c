// fp8_gemm: matrix products over 8-bit floating-point numbers (Micikevicius et al. 2022) that share scales by tiles
// (DeepSeek-V3, 2024, §3.3).
//
//            sign exponent mantissa    largest   smallest     An 8-bit number says where in its tile's range a value
//     E4M3     1      4       3            448      2^−9      lies, to 3 or 4 bits; how large the range is, the scale
//     E5M2     1      5       2         57,344     2^−16      says. A huge number spoils its own 128 neighbours only.
//
//          K ──>                               K ──>
//        ┌───────┬───────┬────┐             ┌───────┬───────┬────┐
//      M ├───────┼───────┼────┤           N │       │       │    │   a · bᵀ = Σ over tiles of K:
//        ├───────┼───────┼────┤             │128×128│       │    │   scale_a · scale_b · Σ in the tile q_a q_b
//        │ 1×128 │       │    │             ├───────┼───────┼────┤
//        activations, gradients             weights
//
// A product of two such numbers is exact in fp32, and a sum of 128 nearly. Tensor cores of Hopper keep about 14 bits of a
// sum, so it must not become long: after each 128 it is scaled and joins a sum in full fp32 (promotion, §3.3.2).
// fp8_accumulator_bits shows here what that is good for.
// Cost: 2·M·N·K operations, K·(M + N) bytes read instead of twice (bf16) or four times (fp32) as many.
#include <math.h>
#include "blas.h"

int fp8_accumulator_bits;

// ---------------------------------------------------------------------------------------------------------
// The numbers. A code without its sign counts the format's numbers upwards from 0: 2^mantissa of them in each power of
// two, equally far apart, and below the smallest power as far apart as in it (the subnormal ones).
typedef struct {
    int mantissa, bias;
    float largest;
} Format;
static const Format formats[] = {[FP8_E4M3] = {3, 7, 448.0f}, [FP8_E5M2] = {2, 15, 57344.0f}};

static float power_of_two(int n) { // −126..127
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// To nearest, ties to even; what is too large becomes the largest, NaN 0x7f.
static fp8 encode(float x, Format f) {
    uint32_t bits;
    float size = fminf(fabsf(x), f.largest);
    memcpy(&bits, &size, sizeof bits);
    int exponent = (int)(bits >> 23) - 127, lowest = 1 - f.bias;
    if (exponent < lowest) exponent = lowest;
    int count = (int)rintf(size * power_of_two(f.mantissa - exponent)); // in units of this power's spacing
    int code = ((exponent - lowest) << f.mantissa) + count;             // a count of 2^(mantissa + 1) carries
    return (fp8)(isnan(x) ? 0x7f : (signbit(x) ? 0x80 : 0) + code);
}

static float decode(fp8 q, Format f) {
    int code = q & 0x7f, power = code >> f.mantissa, count = code & ((1 << f.mantissa) - 1);
    if (power > 0) power--, count += 1 << f.mantissa;
    float size = (float)count * power_of_two(power + 1 - f.bias - f.mantissa);
    if (size > f.largest) size = f.mantissa == 2 && code == 0x7c ? INFINITY : NAN;
    return q & 0x80 ? -size : size;
}

// ---------------------------------------------------------------------------------------------------------
// Quantising. q of element (i, j) of the tile is down · i + right · j further on; the scale is returned.
static float quantize_tile(fp8 *q, size_t down, size_t right, const floatX *x, size_t ld, size_t rows,
                           size_t cols, Format f) {
    float amax = 0, poison = 0; // 0 times a number is 0, but for inf and NaN
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) {
            float v = to_float(x[i * ld + j]);
            amax = fmaxf(amax, fabsf(v));
            poison += v * 0;
        }
    float scale = isnan(poison) ? NAN : amax / f.largest;
    if (scale == 0) scale = 1; // zeros, or so small that their scale is none
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < cols; j++) q[i * down + j * right] = encode(to_float(x[i * ld + j]) / scale, f);
    return scale;
}

void fp8_quantize(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format) {
#pragma omp parallel for
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < K; j += FP8_TILE)
            scale[j / FP8_TILE * M + i] = quantize_tile(q + i * K + j, K, 1, x + i * K + j, K, 1,
                                                        smaller(FP8_TILE, K - j), formats[format]);
}

void fp8_quantize_transposed(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format) {
#pragma omp parallel for
    for (size_t i = 0; i < M; i += FP8_TILE)
        for (size_t j = 0; j < K; j++)
            scale[i / FP8_TILE * K + j] = quantize_tile(q + j * M + i, 1, M, x + i * K + j, K,
                                                        smaller(FP8_TILE, M - i), 1, formats[format]);
}

// Scales of 128×128 tiles in a row of them, with the padding that cuBLASLt asks for.
static size_t block_columns(size_t n) {
    return ((n + FP8_TILE - 1) / FP8_TILE + 3) / 4 * 4;
}

void fp8_quantize_blocks(fp8 *q, float *scale, fp8 *q_transposed, float *scale_transposed, const floatX *x,
                         size_t N, size_t K, Fp8Format format) {
    size_t across = block_columns(K), across_transposed = block_columns(N);
    memset(scale, 0, (N + FP8_TILE - 1) / FP8_TILE * across * sizeof *scale);
    if (q_transposed)
        memset(scale_transposed, 0, (K + FP8_TILE - 1) / FP8_TILE * across_transposed * sizeof *scale);
#pragma omp parallel for
    for (size_t i = 0; i < N; i += FP8_TILE)
        for (size_t j = 0; j < K; j += FP8_TILE) {
            size_t rows = smaller(FP8_TILE, N - i), cols = smaller(FP8_TILE, K - j);
            const floatX *tile = x + i * K + j;
            scale[i / FP8_TILE * across + j / FP8_TILE] =
                quantize_tile(q + i * K + j, K, 1, tile, K, rows, cols, formats[format]);
            if (q_transposed)
                scale_transposed[j / FP8_TILE * across_transposed + i / FP8_TILE] =
                    quantize_tile(q_transposed + j * N + i, 1, N, tile, K, rows, cols, formats[format]);
        }
}

// ---------------------------------------------------------------------------------------------------------
// The product, a tile of 128×128 of the output at a time.
enum { ELEMENTS = FP8_TILE * FP8_TILE };

// Rows i.. and columns k.. of a matrix, without their scales.
static void decode_tile(float *tile, Fp8Matrix x, const float *values, size_t K, size_t i, size_t rows,
                        size_t k, size_t depth) {
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < depth; c++) tile[r * depth + c] = values[x.q[(i + r) * K + k + c]];
}

static float scale_of(Fp8Matrix x, size_t row, size_t rows, size_t k, size_t K) {
    size_t tile = k / FP8_TILE;
    return x.scale[x.blocks ? row / FP8_TILE * block_columns(K) + tile : tile * rows + row];
}

// The sum of products as an accumulator of so many bits has it, which drops what lies below.
static float truncated_sum(const float *a, const float *b, size_t n, int bits) {
    float sum = 0;
    for (size_t k = 0; k < n; k++) {
        uint32_t word;
        sum += a[k] * b[k];
        memcpy(&word, &sum, sizeof word);
        word &= ~0u << (24 - bits);
        memcpy(&sum, &word, sizeof word);
    }
    return sum;
}

static void multiply(float *out, const float *a, const float *b, size_t m, size_t n, size_t depth) {
    if (fp8_accumulator_bits == 0) {
        sgemm('N', 'T', m, n, depth, 1, a, depth, b, depth, 0, out, n);
        return;
    }
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++)
            out[i * n + j] = truncated_sum(a + i * depth, b + j * depth, depth, fp8_accumulator_bits);
}

size_t fp8_gemm_workspace(size_t M, size_t K, size_t N) {
    (void)M, (void)K, (void)N;
    return (size_t)omp_get_max_threads() * 4 * ELEMENTS * sizeof(float);
}

void fp8_gemm(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K, size_t N,
              void *workspace) {
    float a_values[256], b_values[256];
    for (int code = 0; code < 256; code++) {
        a_values[code] = decode((fp8)code, formats[a.format]);
        b_values[code] = decode((fp8)code, formats[b.format]);
    }
    blas_single_thread();
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (size_t i = 0; i < M; i += FP8_TILE)
        for (size_t j = 0; j < N; j += FP8_TILE) {
            float *a_tile = (float *)workspace + (size_t)omp_get_thread_num() * 4 * ELEMENTS;
            float *b_tile = a_tile + ELEMENTS, *part = b_tile + ELEMENTS, *sum = part + ELEMENTS;
            size_t m = smaller(FP8_TILE, M - i), n = smaller(FP8_TILE, N - j);

            memset(sum, 0, m * n * sizeof *sum);
            for (size_t k = 0; k < K; k += FP8_TILE) {
                size_t depth = smaller(FP8_TILE, K - k);
                decode_tile(a_tile, a, a_values, K, i, m, k, depth);
                decode_tile(b_tile, b, b_values, K, j, n, k, depth);
                multiply(part, a_tile, b_tile, m, n, depth);
                for (size_t r = 0; r < m; r++) {
                    float a_scale = scale_of(a, i + r, M, k, K);
                    for (size_t c = 0; c < n; c++)
                        // in this order: the scales' own product may be inf, and 0 times that NaN
                        sum[r * n + c] += part[r * n + c] * a_scale * scale_of(b, j + c, N, k, K);
                }
            }
            for (size_t r = 0; r < m; r++)
                for (size_t c = 0; c < n; c++) {
                    floatX *o = out + (i + r) * N + j + c;
                    float start = (bias ? to_float(bias[j + c]) : 0) + (add ? to_float(*o) : 0);
                    *o = to_floatX(start + sum[r * n + c]);
                }
        }
    kernel_flops.gemm_fp8 += 2.0 * M * N * K;
}

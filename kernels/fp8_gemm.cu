// fp8_gemm: fp8_gemm.c says what it computes; here the products come from tensor cores. (fp8_quantize.cu makes the bytes.)
//
// On Hopper it is cuBLASLt's product, where it takes such operands: fp8 tensor cores are reached there by wgmma alone, an
// instruction that four warps give together and whose operands lie in shared memory. Elsewhere a block sums 128×128 of
// the result, 8 warps with 64×32 each, while the next 128 of K come in:
//
//                       b  128×128 ×2          part [64×32 a warp, in registers] = a · bᵀ over 128 of K
//                      ┌───┬───┬───┬───┐         │  · scale_a · scale_b
//     a  128×128 ×2    │ 0 │ 1 │ 2 │ 3 │         v  promotion (see fp8_gemm.c)
//                      │ 4 │ 5 │ 6 │ 7 │       sum  [64×32 a warp, in registers]
//
// Where there are no fp8 tensor cores (sm_80, and on Hopper, where mma.sync does not reach them) the bytes become bf16,
// which holds every fp8 number, in registers.
// Cost: 2·M·N·K operations; for 4 million of them a block loads 32 KB.
#include <cuda_fp8.h>
#include "kernels/cublaslt.cuh"
#include "kernels/ladder.h"

enum { TILE = FP8_TILE, THREADS = 256 };

struct Stage {
    fp8 a[TILE][TILE], b[TILE][TILE];
    float scale[2 * TILE]; // of a's rows, then of b's
};

static __device__ inline float scale_at(Fp8Matrix x, size_t row, size_t rows, size_t k, size_t K) {
    size_t width = ceil_div(K, (size_t)TILE * 4) * 4;
    return x.scale[x.blocks ? row / TILE * width + k / TILE : k / TILE * rows + row];
}

// Columns k.. of rows first.. of q [rows,K] into shared memory, with 0 outside of it. The 16-byte pieces of a row trade
// places by the row's number, so that neither these stores nor ldmatrix meet in a bank.
template <bool IS_B>
static __device__ inline void fetch(fp8 (&tile)[TILE][TILE], const fp8 *q, size_t first, size_t rows, size_t k,
                                    size_t K, bool aligned) {
    int piece = threadIdx.x % 8;
    size_t column = k + piece * 16;
#pragma unroll
    for (int r = threadIdx.x / 8; r < TILE; r += THREADS / 8) {
        // Row 8t + 2n + j of each 32 of b goes to place 8n + 2t + j: of the n-th product a lane gets columns 2t and 2t + 1,
        // so that in the end it has 8 neighbours of the result.
        int place = IS_B ? (r & ~31) | (r >> 1 & 3) << 3 | (r >> 3 & 3) << 1 | (r & 1) : r;
        fp8 *to = tile[place] + ((piece ^ place) & 7) * 16;
        const fp8 *from = q + (first + r) * K + column;
        if (aligned) {
            cp_async_16(to, from, IN_RANGE(first + r < rows && column < K) ? 16 : 0);
        } else {
            unsigned words[4] = {};
#pragma unroll
            for (int i = 0; i < 16; i++)
                if (IN_RANGE(first + r < rows && column + i < K))
                    words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
            *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// The compute capability: 90 is Hopper.
static int architecture() {
    int device, major, minor;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return major * 10 + minor;
}

// An instruction of sm_89 and sm_120; on Hopper the assembler makes conversions and products of fp16 of it, so there we
// take bf16, as for sm_80.
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define FP8_CORES true
#elif defined(EMU)
#define FP8_CORES (architecture() == 89 || architecture() >= 120)
#else
#define FP8_CORES false
#endif

// Four fp8 numbers as two pairs of bf16. Exponent and mantissa move to where bf16 has its own; the bias is made up for by
// a factor, which is right for subnormal numbers too. (NaN and inf become numbers: where there are any, the scale is NaN.)
template <Fp8Format F>
static __device__ inline void to_bf16(uint32_t &first, uint32_t &second, uint32_t bytes) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t apart = __byte_perm(bytes, 0, half ? 0x3424 : 0x1404); // each in the upper byte of 16 bits
        uint32_t moved = F == FP8_E4M3 ? apart >> 4 & 0x07f007f0 : apart >> 3 & 0x0fe00fe0;
        moved |= apart & 0x80008000;
        __nv_bfloat162 pair;
        memcpy(&pair, &moved, sizeof pair);
        pair = __hmul2(pair, __float2bfloat162_rn(F == FP8_E4M3 ? 0x1p120f : 0x1p112f));
        memcpy(half ? &second : &first, &pair, sizeof pair);
    }
}

// d [16,8] += a [16,32] · b [32,8]
template <Fp8Format A, Fp8Format B>
static __device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (FP8_CORES) {
        if constexpr (A == FP8_E4M3 && B == FP8_E4M3) mma_e4m3(d, a, b0, b1);
        if constexpr (A == FP8_E4M3 && B == FP8_E5M2) mma_e4m3_e5m2(d, a, b0, b1);
        if constexpr (A == FP8_E5M2 && B == FP8_E4M3) mma_e5m2_e4m3(d, a, b0, b1);
        if constexpr (A == FP8_E5M2 && B == FP8_E5M2) mma_e5m2(d, a, b0, b1);
    } else {
        // Two products of 16 along k. Which 16 is all the same, as long as a and b agree.
        uint32_t x[4], y[2];
        to_bf16<A>(x[0], x[2], a[0]);
        to_bf16<A>(x[1], x[3], a[1]);
        to_bf16<B>(y[0], y[1], b0);
        mma_bf16(d, x, y[0], y[1]);
        to_bf16<A>(x[0], x[2], a[2]);
        to_bf16<A>(x[1], x[3], a[3]);
        to_bf16<B>(y[0], y[1], b1);
        mma_bf16(d, x, y[0], y[1]);
    }
}

// Eight neighbours of a row of the result.
template <int V>
static __device__ inline void store8(floatX *out, const floatX *bias, bool add, const float (&sum)[8],
                                     size_t inside) {
#pragma unroll
    for (unsigned i = 0; i < 8; i += V)
        if (IN_RANGE(i < inside)) {
            Vec<floatX, V> o, had = {}, b = {};
            if (add) had = load<V>(out + i);
            if (bias) b = load<V>(bias + i);
#pragma unroll
            for (int j = 0; j < V; j++) o.x[j] = to_floatX(sum[i + j] + to_float(b.x[j]) + to_float(had.x[j]));
            store(out + i, o);
        }
}

template <Fp8Format A, Fp8Format B>
static __global__ void __launch_bounds__(THREADS, 1)
    multiply_kernel(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                    size_t N, bool aligned, bool out_aligned) {
    extern __shared__ __align__(128) unsigned char smem[];
    Stage *stages = reinterpret_cast<Stage *>(smem); // [2]
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    size_t first_row = (size_t)blockIdx.x * TILE, first_column = (size_t)blockIdx.y * TILE;

    // Of this thread's row of a, or of b.
    const bool of_a = thread < TILE;
    const size_t scale_row = of_a ? first_row + thread : first_column + thread - TILE;
    auto next_scale = [&](size_t k) {
        return IN_RANGE(scale_row < (of_a ? M : N)) ? scale_at(of_a ? a : b, scale_row, of_a ? M : N, k, K)
                                                    : 0.0f;
    };

    float sum[4][4][4] = {};
    fetch<false>(stages[0].a, a.q, first_row, M, 0, K, aligned);
    fetch<true>(stages[0].b, b.q, first_column, N, 0, K, aligned);
    cp_async_commit();
    stages[0].scale[thread] = next_scale(0);
    int now = 0;
    for (size_t k = 0; k < K; k += TILE) {
        Stage &s = stages[now], &next = stages[now ^= 1];
        float scale = 0;
        cp_async_wait<0>();
        __syncthreads(); // all of s has come, and nobody reads from next any more
        if (k + TILE < K) {
            fetch<false>(next.a, a.q, first_row, M, k + TILE, K, aligned);
            fetch<true>(next.b, b.q, first_column, N, k + TILE, K, aligned);
            cp_async_commit();
            scale = next_scale(k + TILE); // under way while we multiply
        }

        float part[4][4][4] = {};
#pragma unroll
        for (int kk = 0; kk < TILE / 16; kk += 2) { // 32 of k, two pieces
            uint32_t y[2][4];
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                int r = warp_column + pair * 16 + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(y[pair], s.b[r] + ((kk + lane / 8 % 2) ^ (r & 7)) * 16);
            }
#pragma unroll
            for (int m = 0; m < 4; m++) {
                uint32_t x[4];
                int r = warp_row + m * 16 + lane % 16;
                ldmatrix_x4(x, s.a[r] + ((kk + lane / 16) ^ (r & 7)) * 16);
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma<A, B>(part[m][n], x, y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
            }
        }

        // Promotion. Columns 2t, 2t+1 of the n-th product are 8t + 2n, 8t + 2n + 1 of the warp's 32.
        float b_scale[8];
#pragma unroll
        for (int i = 0; i < 8; i++) b_scale[i] = s.scale[TILE + warp_column + 8 * t + i];
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float a_scale = s.scale[warp_row + m * 16 + half * 8 + g];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float &total = sum[m][i / 2][half * 2 + i % 2];
                    total = fmaf(part[m][i / 2][half * 2 + i % 2] * a_scale, b_scale[i], total);
                }
            }
        next.scale[thread] = scale;
    }

    size_t column = first_column + warp_column + 8 * t, inside = column < N ? N - column : 0;
    if (bias) bias += column;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            size_t row = first_row + warp_row + m * 16 + half * 8 + g;
            float eight[8];
#pragma unroll
            for (int i = 0; i < 8; i++) eight[i] = sum[m][i / 2][half * 2 + i % 2];
            if (IN_RANGE(row < M)) {
                if (out_aligned)
                    store8<VECTOR>(out + row * N + column, bias, add, eight, inside);
                else
                    store8<1>(out + row * N + column, bias, add, eight, inside);
            }
        }
}

template <Fp8Format A, Fp8Format B>
static void launch(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                   size_t N) {
    dim3 grid(ceil_div(M, (size_t)TILE), ceil_div(N, (size_t)TILE));
    size_t smem = 2 * sizeof(Stage);
    bool in = aligned16(K, a.q, b.q), o = aligned16(N * sizeof *out, out, bias);
    cuda_check(
        (cudaFuncSetAttribute(multiply_kernel<A, B>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem)));
    multiply_kernel<A, B><<<grid, THREADS, smem, compute_stream>>>(out, a, b, bias, add, M, K, N, in, o);
    launched("multiply");
}

void fp8_gemm_mma(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                  size_t N, void *workspace) {
    (void)workspace;
    static decltype(launch<FP8_E4M3, FP8_E4M3>) *const launches[2][2] = {
        {launch<FP8_E4M3, FP8_E4M3>, launch<FP8_E4M3, FP8_E5M2>},
        {launch<FP8_E5M2, FP8_E4M3>, launch<FP8_E5M2, FP8_E5M2>}};
    launches[a.format][b.format](out, a, b, bias, add, M, K, N);
}

// ---------------------------------------------------------------------------------------------------------
// The product by cuBLASLt (its documentation, "128-element 1D and 128×128 2D block scaling"): sm_90 alone, not 128×128
// tiles on both sides, not E5M2 on both, no bias but bf16; rows of 16 bytes, and of scales too.
static CublasOperand operand(Fp8Matrix x, bool transposed) {
    return {x.q, x.format == FP8_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, transposed, x.scale,
            x.blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F};
}

void fp8_gemm(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K, size_t N,
              void *workspace) {
    bool legal = CUBLAS_TILE_SCALES && architecture() == 90 && !(a.blocks && b.blocks) &&
                 !(a.format == FP8_E5M2 && b.format == FP8_E5M2) && !(bias && CUBLAS_TYPE == CUDA_R_32F) &&
                 M % 4 == 0 && N % 4 == 0 &&
                 aligned16(K | N * sizeof *out, a.q, b.q, a.scale, b.scale, out, bias);
    if (!legal ||
        !cublas_product({out, CUBLAS_TYPE, operand(b, true), operand(a, false), bias, NULL, add, N, M, K},
                        workspace))
        fp8_gemm_mma(out, a, b, bias, add, M, K, N, workspace);
    kernel_flops.gemm_fp8 += 2.0 * M * N * K;
}

size_t fp8_gemm_workspace(size_t M, size_t K, size_t N) {
    (void)M, (void)K, (void)N;
    return CUBLAS_BYTES;
}

// ---------------------------------------------------------------------------------------------------------
// The ladder.

// A thread an element, which decodes what it needs as it goes: every byte of a is read N times, of b M times.
static __device__ inline float decode(fp8 q, Fp8Format format) {
    return __half2float(__nv_cvt_fp8_to_halfraw(q, format == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2));
}
static __global__ void __launch_bounds__(THREADS)
    multiply_naive_kernel(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M,
                          size_t K, size_t N) {
    size_t element = (size_t)blockIdx.x * blockDim.x + threadIdx.x, row = element / N, column = element % N;
    if (!IN_RANGE(row < M)) return;
    float sum = 0;
    for (size_t k = 0; k < K; k += TILE) {
        float part = 0;
        for (size_t i = k; i < k + TILE; i++)
            if (IN_RANGE(i < K))
                part += decode(a.q[row * K + i], a.format) * decode(b.q[column * K + i], b.format);
        sum += part * scale_at(a, row, M, k, K) * scale_at(b, column, N, k, K);
    }
    float start = (bias ? to_float(bias[column]) : 0.0f) + (add ? to_float(out[element]) : 0.0f);
    out[element] = to_floatX(start + sum);
}

void fp8_gemm_naive(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                    size_t N, void *workspace) {
    (void)workspace;
    size_t grid = ceil_div(M * N, (size_t)THREADS);
    multiply_naive_kernel<<<grid, THREADS, 0, compute_stream>>>(out, a, b, bias, add, M, K, N);
    launched("multiply_naive");
}

// Quantising for fp8_gemm, whose .c half says what that computes: numbers become bytes, each tile with a scale of its own.
//
// A block holds 128×128 numbers in registers, so x is read once whichever way its tiles run. A thread has 4 rows of 16
// columns: 16 bytes of q in each row, and for the transpose 4 bytes of q in each of 16 columns, which meet their
// neighbours in shared memory.
//
//     8 threads across            one of them
//     ┌────┬────┬─             16 columns
//     ├────┼────┼─   32     4 ┌──────────┐ ──> 4 × 16 bytes of q
//     ├────┼────┼─  down rows └──────────┘ ──> 16 × 4 bytes of qᵀ
//
// Cost: one read of x and one write of q, half of that (bf16), for about 12 operations a number: bound by memory.
#include <cuda_fp8.h>
#include "kernels/cuda.cuh"

enum { TILE = FP8_TILE, THREADS = 256, TALL = 4, WIDE = 16 /* rows and columns of a thread */ };
enum Tiles { ROWS, COLUMNS, BLOCKS }; // 1×128, 128×1, 128×128

static size_t tiles(size_t n) {
    return ceil_div(n, (size_t)TILE);
}

// amax is the bits of a float, which grow as it does; inf is beyond every number and NaN beyond inf.
static __device__ inline float scale_of(unsigned amax, Fp8Format format) {
    if (amax >= 0x7f800000) return __uint_as_float(0x7fc00000);
    float scale = __uint_as_float(amax) / (format == FP8_E4M3 ? 448.0f : 57344.0f);
    return scale == 0.0f ? 1.0f : scale;
}

// Division by a scale, without the branches and the slow reciprocal that `/` takes each time: r = 1/s once, then x·r, and
// what is left of x corrects it. That rounds as a division does (after Markstein 1990; tests hold it to one) where nothing
// underflows: so tiny scales, and what they divide, are first multiplied by a power of two.
struct Divisor {
    float up, s, r;

    explicit __device__ Divisor(float scale)
        : up(scale < 0x1p-80f ? 0x1p100f : 1.0f), s(scale * up), r(1.0f / s) {
    }
    __device__ float quotient(float x) const {
        x *= up;
        float q = x * r, exact = fmaf(fmaf(-s, q, x), r, q);
        return exact == 0.0f ? q : exact; // q still has its sign
    }
};

// The maximum over lanes that differ in these bits of their number.
template <int FIRST, int LAST> static __device__ inline unsigned lanes_max(unsigned x) {
#pragma unroll
    for (int bit = FIRST; bit <= LAST; bit *= 2) x = max(x, __shfl_xor_sync(0xffffffff, x, bit));
    return x;
}

// 16 bytes of q, of which so many are inside its row.
template <bool ALIGNED> static __device__ inline void store_bytes(fp8 *q, uint4 bytes, size_t inside) {
    const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    if (ALIGNED) {
        if (IN_RANGE(inside > 0)) *reinterpret_cast<uint4 *>(q) = bytes;
    } else {
#pragma unroll
        for (unsigned i = 0; i < 16; i++)
            if (IN_RANGE(i < inside)) q[i] = (fp8)(words[i / 4] >> i % 4 * 8);
    }
}

// The scale of a 128×128 tile; the last tile of a row has the padding to write too.
static __device__ inline void store_scale(float *scale, unsigned row, unsigned tile, unsigned tiles, float s) {
    size_t width = (tiles + 3) / 4 * 4, n = tile + 1 < tiles ? 1 : width - tile;
    if (IN_RANGE(threadIdx.x < n)) scale[row * width + tile + threadIdx.x] = threadIdx.x == 0 ? s : 0.0f;
}

// x [M,K] to q [M,K], unless tiles run along columns, and to qt [K,M], unless they run along rows (or qt is NULL).
template <Tiles TILES, bool ALIGNED>
static __global__ void __launch_bounds__(THREADS, 2)
    quantize_kernel(fp8 *q, float *scale, fp8 *qt, float *scale_t, const floatX *x, size_t M, size_t K,
                    Fp8Format format) {
    __shared__ unsigned amax[TILE]; // of column c of a thread across at [8c + across], or [0] of all
    __shared__ uint4 columns[TILE][TILE / 16];
    int thread = threadIdx.x, across = thread % 8, down = thread / 8;
    size_t first_row = (size_t)blockIdx.x * TILE, first_column = (size_t)blockIdx.y * TILE;
    size_t row = first_row + down * TALL, column = first_column + across * WIDE;

    float v[TALL][WIDE] = {};
    constexpr int V = ALIGNED ? VECTOR : 1;
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
        for (int c = 0; c < WIDE; c += V)
            if (IN_RANGE(row + r < M && column + c < K)) {
                Vec<floatX, V> some = load<V>(x + (row + r) * K + column + c);
#pragma unroll
                for (int i = 0; i < V; i++) v[r][c + i] = to_float(some.x[i]);
            }

    float row_scale[TALL], column_scale[WIDE];
    unsigned row_max[TALL] = {}, column_max[WIDE] = {};
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            unsigned size = __float_as_uint(fabsf(v[r][c]));
            row_max[r] = max(row_max[r], size);
            column_max[c] = max(column_max[c], size);
        }
    if constexpr (TILES == ROWS) {
#pragma unroll
        for (int r = 0; r < TALL; r++) {
            row_scale[r] = scale_of(lanes_max<1, 4>(row_max[r]), format);
            if (across == 0 && IN_RANGE(row + r < M)) scale[blockIdx.y * M + row + r] = row_scale[r];
        }
    } else {
        if (IN_RANGE(thread < TILE)) amax[thread] = 0;
        __syncthreads();
        if (TILES == BLOCKS) {
            unsigned all = max(max(row_max[0], row_max[1]), max(row_max[2], row_max[3]));
            all = lanes_max<1, 16>(all);
            if (thread % WARP == 0) atomicMax(&amax[0], all);
        } else {
#pragma unroll
            for (int c = 0; c < WIDE; c++) {
                unsigned all = lanes_max<8, 16>(column_max[c]);
                if (thread % WARP < 8) atomicMax(&amax[c * 8 + across], all);
            }
        }
        __syncthreads();
        if (TILES == BLOCKS) {
            row_scale[0] = scale_of(amax[0], format);
            store_scale(scale, blockIdx.x, blockIdx.y, gridDim.y, row_scale[0]);
            if (qt) store_scale(scale_t, blockIdx.y, blockIdx.x, gridDim.x, row_scale[0]);
        } else {
#pragma unroll
            for (int c = 0; c < WIDE; c++) {
                column_scale[c] = scale_of(amax[c * 8 + across], format);
                if (down == 0 && IN_RANGE(column + c < K))
                    scale_t[blockIdx.x * K + column + c] = column_scale[c];
            }
        }
    }

    unsigned bytes[TALL][WIDE / 4] = {}; // four columns a word
    auto round_two = [&](int r, int c, const Divisor &s, const Divisor &t) {
        float2 pair = make_float2(s.quotient(v[r][c]), t.quotient(v[r][c + 1]));
        unsigned two = format == FP8_E4M3 ? __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)
                                          : __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E5M2);
        bytes[r][c / 4] |= two << c % 4 * 8;
    };
    if (TILES == COLUMNS) {
#pragma unroll
        for (int c = 0; c < WIDE; c += 2) {
            Divisor s(column_scale[c]), t(column_scale[c + 1]);
#pragma unroll
            for (int r = 0; r < TALL; r++) round_two(r, c, s, t);
        }
    } else {
#pragma unroll
        for (int r = 0; r < TALL; r++) {
            Divisor s(row_scale[TILES == ROWS ? r : 0]);
#pragma unroll
            for (int c = 0; c < WIDE; c += 2) round_two(r, c, s, s);
        }
    }

    if constexpr (TILES != COLUMNS) {
#pragma unroll
        for (int r = 0; r < TALL; r++)
            if (IN_RANGE(row + r < M))
                store_bytes<ALIGNED>(q + (row + r) * K + column,
                                     make_uint4(bytes[r][0], bytes[r][1], bytes[r][2], bytes[r][3]),
                                     column < K ? K - column : 0);
    }
    if constexpr (TILES != ROWS) {
        if (!qt) return;
#pragma unroll
        for (int c = 0; c < WIDE;
             c++) { // a word of four rows; words trade places, so that no two lanes meet in a bank
            unsigned pick = c % 4 | (c % 4 + 4) << 4;
            unsigned low = __byte_perm(bytes[0][c / 4], bytes[1][c / 4], pick);
            unsigned high = __byte_perm(bytes[2][c / 4], bytes[3][c / 4], pick);
            reinterpret_cast<unsigned *>(columns[across * WIDE + c])[down ^ across * 4] =
                __byte_perm(low, high, 0x5410);
        }
        __syncthreads();
#pragma unroll
        for (int c = down; c < TILE; c += THREADS / 8) {
            size_t begin = first_row + across * 16;
            if (IN_RANGE(first_column + c < K))
                store_bytes<ALIGNED>(qt + (first_column + c) * M + begin, columns[c][across ^ c / WIDE],
                                     begin < M ? M - begin : 0);
        }
    }
}

void fp8_quantize(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format) {
    dim3 grid(tiles(M), tiles(K));
    if (aligned16(K, x, q))
        quantize_kernel<ROWS, true>
            <<<grid, THREADS, 0, compute_stream>>>(q, scale, NULL, NULL, x, M, K, format);
    else
        quantize_kernel<ROWS, false>
            <<<grid, THREADS, 0, compute_stream>>>(q, scale, NULL, NULL, x, M, K, format);
    launched("quantize");
}

void fp8_quantize_transposed(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format) {
    dim3 grid(tiles(M), tiles(K));
    if (aligned16(K | M, x, q))
        quantize_kernel<COLUMNS, true>
            <<<grid, THREADS, 0, compute_stream>>>(NULL, NULL, q, scale, x, M, K, format);
    else
        quantize_kernel<COLUMNS, false>
            <<<grid, THREADS, 0, compute_stream>>>(NULL, NULL, q, scale, x, M, K, format);
    launched("quantize, transposed");
}

void fp8_quantize_blocks(fp8 *q, float *scale, fp8 *qt, float *scale_t, const floatX *x, size_t N, size_t K,
                         Fp8Format format) {
    dim3 grid(tiles(N), tiles(K));
    if (aligned16(qt ? N | K : K, x, q, qt))
        quantize_kernel<BLOCKS, true>
            <<<grid, THREADS, 0, compute_stream>>>(q, scale, qt, scale_t, x, N, K, format);
    else
        quantize_kernel<BLOCKS, false>
            <<<grid, THREADS, 0, compute_stream>>>(q, scale, qt, scale_t, x, N, K, format);
    launched("quantize, blocks");
}

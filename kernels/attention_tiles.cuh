// What the forward and the backward of flash attention share: tiles, their products, the way out.
//
// Tiles of q, k, v and do lie in shared memory, tiles of scores in the registers of a warp, spread over its lanes as the
// tensor cores leave them and take them (PTX ISA, m16n8k16): of 16 rows and 8 columns, lane 4g + t holds
//
//     x[0], x[1]   row g,     columns 2t and 2t+1           columns 0 1 │ 2 3 │ 4 5 │ 6 7
//     x[2], x[3]   row g + 8, columns 2t and 2t+1           row 0     lane 0│  1  │  2  │  3
//                                                           row 1     lane 4│  5  │  6  │  7     and so on
//
// so a row lies in four lanes, and what a row's lanes must agree on takes two shuffles. x[m][n][4] are the registers of a
// larger tile: strip m of 16 rows, n-th eight columns. The fp32 build multiplies without tensor cores but keeps the
// arrangement: only the two products differ, and the sizes of the tiles.
#ifndef ATTENTION_TILES_CUH
#define ATTENTION_TILES_CUH

#include "kernels/attention_shape.h"
#include "kernels/cuda.cuh"

enum { WARPS = 4, THREADS = WARPS * WARP };

// Sizes by the type that tiles are kept in, bf16 or float, such that a block's tiles take the same bytes in both, and by
// channels: sums of more than 64 leave registers for scores of no more than 32 columns of a tile at a time, a slice.
template <typename T, int D> struct Sizes {
    static const int TENSOR = sizeof(T) == 2;
    static const int STRIPS = TENSOR ? 2 : 1;    // of 16 rows, a warp: forward, dq
    static const int ROWS = WARPS * 16 * STRIPS; // queries of a block: forward, dq
    static const int COLUMNS = TENSOR ? 64 : 32; // keys at a time: forward
    static const int SLICE = TENSOR && D > 64 ? 32 : COLUMNS;
    static const int DQ_COLUMNS = COLUMNS / 2;   // keys at a time: dq
    static const int KEYS = WARPS * 16;          // of a block: dk and dv
    static const int QUERIES = TENSOR ? 64 : 16; // at a time: dk and dv
    static const int QUERY_SLICE = TENSOR && D > 64 ? 32 : QUERIES;
};

// What a thread block works on. Of all heads the blocks with the most to do come first (causal, they differ), so that the
// grid ends with short ones. 32 heads at a time: their keys and values, 16 MB in GPT-2 at T = 2,048, stay in the L2 cache.
struct Work {
    int head, block; // the head counts over all sequences; block 0 is the longest
};
static __device__ inline Work work(int heads, int blocks) {
    const int GROUP = 32;
    int first = blockIdx.x / (GROUP * blocks) * GROUP, i = blockIdx.x % (GROUP * blocks),
        wide = min(GROUP, heads - first);
    return {first + i % wide, i / wide};
}

// ---------------------------------------------------------------------------------------------------------
// A tile: rows of D elements in shared memory, in chunks of 16 bytes. The chunks that eight rows have in one place are read
// at once (ldmatrix), so they must lie in eight different groups of banks: the chunks of each 128 bytes (of each
// 64, where a row is an odd number of them: D = 96 in bf16) are permuted by the row's number.
template <int D, typename T> static __device__ inline T *cell(T *tile, unsigned row, unsigned channel) {
    const unsigned chunk = 16 / sizeof(T), together = D * sizeof(T) % 128 == 0 ? 8 : 4,
                   group = together * chunk;
    unsigned shuffle = together == 8 ? row % 8 : row / 2 % 4;
    return tile + row * D + channel / group * group + (channel % group / chunk ^ shuffle) * chunk +
           channel % chunk;
}

// How inputs of products come: are rows aligned, such that 16 bytes are loaded at once? Does an fp32 build round them to
// bf16 (--matmul bf16)? Then tiles come through registers, where that is done, and p and ds go through round().
struct Inputs {
    bool aligned, rounded;

    template <int M, int N> __device__ void round(float (&p)[M][N][4]) const {
        if (sizeof(floatX) == sizeof(float) && rounded)
#pragma unroll
            for (int i = 0; i < 4 * M * N; i++) {
                float &x = p[i / 4 / N][i / 4 % N][i % 4];
                x = product_input(x, true);
            }
    }
};

// Copies a tile of ROWS rows; rows and channels beyond those that exist become zeros. The copy of aligned rows is
// asynchronous, and belongs to the next group committed. A thread has one place in every 8th or 16th row, so that the
// permutation is the same in all of them.
template <int ROWS, int D, typename T>
static __device__ inline void load_tile(T *tile, const floatX *from, size_t stride, int rows, int channels,
                                        Inputs inputs) {
    const int chunk = 16 / sizeof(T), lanes = D * sizeof(T) > 128 ? 16 : 8, step = THREADS / lanes;
    int first = threadIdx.x / lanes;
    for (int channel = threadIdx.x % lanes * chunk; channel < D; channel += lanes * chunk) {
        T *to = cell<D>(tile, first, channel);
        const floatX *x = from + first * stride + channel;
        if (sizeof(T) == sizeof(floatX) && inputs.aligned && (sizeof(T) == sizeof(bf16) || !inputs.rounded)) {
#pragma unroll
            for (int row = 0; row < ROWS; row += step, x += step * stride)
                cp_async_16(to + row * D, x, IN_RANGE(first + row < rows && channel < channels) ? 16 : 0);
        } else {
#pragma unroll 1
            for (int row = 0; row < ROWS; row += step, x += step * stride) {
                Vec<T, chunk> v;
#pragma unroll
                for (int e = 0; e < chunk; e++) {
                    floatX one =
                        IN_RANGE(first + row < rows && channel + e < channels) ? x[e] : to_floatX(0.0f);
                    if constexpr (sizeof(T) == sizeof(float))
                        v.x[e] = product_input(one, inputs.rounded);
                    else
                        v.x[e] = one;
                }
                store(to + row * D, v);
            }
        }
    }
}

// The same rows of two tensors, as one group.
template <int ROWS, int D, typename T>
static __device__ inline void load_pair(T *a_tile, T *b_tile, const floatX *a, const floatX *b, size_t a_stride,
                                        size_t b_stride, int rows, int channels, Inputs inputs) {
    load_tile<ROWS, D>(a_tile, a, a_stride, rows, channels, inputs);
    load_tile<ROWS, D>(b_tile, b, b_stride, rows, channels, inputs);
    cp_async_commit();
}

// ---------------------------------------------------------------------------------------------------------
// The two products of a warp, on tensor cores:
//     multiply_rows   sum [16·M, 8·N] += rows of a · rows of b      both in shared memory    (s = q kᵀ)
//     multiply        sum [16·M, D]   += p [16·M, 8·N] · b [8·N, D]   p in registers           (o = p v)
#ifdef PRECISION_BF16
template <int D, int M, int N>
static __device__ inline void multiply_rows(float (&sum)[M][N][4], bf16 *a, bf16 *b) {
    int row = threadIdx.x % 8, matrix = threadIdx.x % WARP / 8; // what this lane names of an ldmatrix
#pragma unroll D / 32 // half of it: all would cost registers that are not there
    for (int channel = 0; channel < D; channel += 16) {
        uint32_t a_part[M][4], b_part[4];
        bf16 *a_rows = cell<D>(a, matrix % 2 * 8 + row, channel + matrix / 2 * 8);
        bf16 *b_rows = cell<D>(b, matrix / 2 * 8 + row, channel + matrix % 2 * 8);
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(a_part[m], a_rows + 16 * m * D);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b_part, b_rows + 8 * n * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(sum[m][n], a_part[m], b_part[0], b_part[1]);
                mma_bf16(sum[m][n + 1], a_part[m], b_part[2], b_part[3]);
            }
        }
    }
}

static __device__ inline uint32_t pair(float low, float high) {
    __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &two, sizeof bits);
    return bits;
}

template <int D, int M, int N>
static __device__ inline void multiply(float (&sum)[M][D / 8][4], const float (&p)[M][N][4], bf16 *b) {
    int row = threadIdx.x % 8, matrix = threadIdx.x % WARP / 8;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t p_part[M][4], b_part[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                p_part[m][i] = pair(p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            ldmatrix_x4_trans(b_part, cell<D>(b, matrix % 2 * 8 + row, 8 * n + matrix / 2 * 8) + 8 * k * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_bf16(sum[m][n], p_part[m], b_part[0], b_part[1]);
                mma_bf16(sum[m][n + 1], p_part[m], b_part[2], b_part[3]);
            }
        }
    }
}
#endif

// The same without tensor cores, in fp32: each lane computes its elements, and asks its neighbours for their p.
template <int D, int M, int N>
static __device__ inline void multiply_rows(float (&sum)[M][N][4], float *a, float *b) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    for (int channel = 0; channel < D; channel += 4) {
        Vec<float, 4> x[M][2];
#pragma unroll
        for (int m = 0; m < 2 * M; m++) x[m / 2][m % 2] = load<4>(cell<D>(a, 8 * m + g, channel));
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            Vec<float, 4> y = load<4>(cell<D>(b, n / 2 * 8 + 2 * t + n % 2, channel));
#pragma unroll
            for (int m = 0; m < 2 * M; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sum[m / 2][n / 2][m % 2 * 2 + n % 2] += x[m / 2][m % 2].x[e] * y.x[e];
        }
    }
}

template <int D, int M, int N>
static __device__ inline void multiply(float (&sum)[M][D / 8][4], const float (&p)[M][N][4], float *b) {
    int quad = threadIdx.x % WARP / 4 * 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < 8 * N; k++) {
        float x[M][2];
#pragma unroll
        for (int m = 0; m < 2 * M; m++)
            x[m / 2][m % 2] = __shfl_sync(0xffffffff, p[m / 2][k / 8][m % 2 * 2 + k % 2], quad + k % 8 / 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            Vec<float, 2> y = load<2>(cell<D>(b, k, 8 * n + 2 * t));
#pragma unroll
            for (int i = 0; i < 4 * M; i++) sum[i / 4][n][i % 4] += x[i / 4][i % 4 / 2] * y.x[i % 2];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// −∞ for scores of keys that a query does not see: later ones, or, where nothing is masked, ones beyond the last.
// The scores start at row and column; keys are the columns, or the rows (TRANSPOSED).
template <bool TRANSPOSED, int M, int N>
static __device__ inline void hide(float (&scores)[M][N][4], int row, int column, bool causal, int keys) {
    row += threadIdx.x % WARP / 4, column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = row + 16 * m + i / 2 * 8, c = column + 8 * n + i % 2;
                int key = TRANSPOSED ? r : c, query = TRANSPOSED ? c : r;
                if (key > (causal ? query : keys - 1)) scores[m][n][i] = -INFINITY;
            }
}

// ---------------------------------------------------------------------------------------------------------
// Results leave through shared memory, so that a lane stores 16 bytes: eight rows of fp32 at a time, in the warp's own
// rows of a tile that it needs no more. Chunks of 16 bytes are permuted such that neither side meets bank conflicts.
template <int D> static __device__ inline float *staged(float *stage, int row, int channel) {
    return stage + row * D + (channel / 4 ^ (row * D + channel) / 32 % 2 ^ row % 4 * 2) * 4 + channel % 4;
}

// ADD: out = keep · out + what is staged, where lane 4g knows keep of row g.
template <int D, int V, bool ADD, typename O>
static __device__ inline void store_staged(O *out, size_t stride, int rows, int channels, float *stage,
                                           float keep) {
    const int part = V < 4 ? V : 4;
    for (int i = threadIdx.x % WARP * V; i < 8 * D; i += WARP * V) {
        int row = i / D, channel = i % D;
        float kept = ADD ? __shfl_sync(0xffffffff, keep, row * 4) : 0.0f;
        if (!IN_RANGE(row < rows && channel < channels)) continue;
        O *to = out + row * stride + channel;
        Vec<O, V> v;
        if (ADD) v = load<V>(to);
#pragma unroll
        for (int e = 0; e < V; e += part) {
            Vec<float, part> x = load<part>(staged<D>(stage, row, channel + e));
#pragma unroll
            for (int j = 0; j < part; j++)
                if constexpr (ADD)
                    v.x[e + j] = kept * v.x[e + j] + x.x[j];
                else
                    v.x[e + j] = to_floatX(x.x[j]);
        }
        store(to, v);
    }
}

// Rows g (half 0) or g+8 (half 1) of a strip, times take: to out, or into the fp32 sums of a ring (the other is NULL).
// `rows` of the eight exist; `place` is where the first starts.
template <int D>
static __device__ inline void store_rows(floatX *out, float *block, size_t place, size_t stride, int rows,
                                         int channels, bool aligned, float *stage, const float (&x)[D / 8][4],
                                         int half, float take, float keep) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    __syncwarp(); // the stage's last readers are done
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        store(staged<D>(stage, g, 8 * n + 2 * t),
              Vec<float, 2>{x[n][2 * half] * take, x[n][2 * half + 1] * take});
    __syncwarp();
    if (out && aligned)
        store_staged<D, VECTOR, false>(out + place, stride, rows, channels, stage, keep);
    else if (out)
        store_staged<D, 1, false>(out + place, stride, rows, channels, stage, keep);
    else if (aligned)
        store_staged<D, 4, true>(block + place, stride, rows, channels, stage, keep);
    else
        store_staged<D, 1, true>(block + place, stride, rows, channels, stage, keep);
}

// ---------------------------------------------------------------------------------------------------------
// for launches

// Pairs of a query and a key in the tiles that blocks of `rows` queries visit: causal, the keys up to their last query.
static inline double pairs_by_query(AttentionShape s, size_t rows) {
    double pairs = 0;
    for (size_t first = 0; first < s.Tq; first += rows) {
        size_t end = min(first + rows, s.Tq);
        pairs += (double)(end - first) * (s.causal ? end : s.Tk);
    }
    return pairs * s.B * s.H;
}

#endif

// Flash attention on a GPU, forward; flash_attention.c has the formulas, attention_tiles.cuh the tiles and their products.
// For heads of up to 128 channels.
//
//     a block   128 queries of one head: its four warps take 32 each, and all of them walk over the keys together
//
//                    keys, 64 at a time ──>
//                  ┌────┬────┬────┬────┐     While one tile of keys and values is multiplied, the next one is on its way
//          warp 0  │░░░░│░░░░│╲   │    │     from global memory (cp.async). The scores that the tensor cores leave in a
//          warp 1  │░░░░│░░░░│ ╲  │    │     warp's registers are also how they take p for o += p v: p never leaves them.
//          warp 2  │░░░░│░░░░│  ╲ │    │
//          warp 3  │░░░░│░░░░│   ╲│    │     causal: tiles right of the diagonal are not visited, only those on it are
//                  └────┴────┴────┴────┘     masked.
//
// Bytes, with E = sizeof(floatX), Br queries a block (bf16: 128, fp32: 64), seen(i) the keys that the i-th block of queries
// sees, up to its last query (Tk where nothing is masked):
//     B·H · (2·Tq·D·E + 4·Tq + Σᵢ seen(i)·2·D·E)            q, o and lse once; k, v once a block of queries
// Operations: 4·D for each query and key of the tiles visited. Around a ring, o and lse are read once more, in fp32.
// FlashAttention: Dao et al. 2022; split over queries, o scaled once: Dao 2023; ring attention's blocks: Liu et al. 2023.
#include "kernels/attention_tiles.cuh"
#include "kernels/ladder.h"

// (score − top)/√D · log2 e: p is 2 to this. In fp32 builds both are scaled and rounded first, as the backward will find
// them.
static __device__ inline float exponent(float score, float top, float root) {
#ifdef PRECISION_BF16
    return (score - top) * (root * LOG2E);
#else
    return (__fmul_rn(score, root) - __fmul_rn(top, root)) * LOG2E;
#endif
}

// The scores become p = e^((s − max)/√D); what was summed before is scaled down where a row's maximum has risen, which
// soon becomes rare. Scores may have overflowed to −∞: while a row has no others, 0 takes the place of its maximum.
// Each lane's part of a row's sum stays its own.
template <int M, int N, int W>
static __device__ inline void online_softmax(float (&scores)[M][N][4], float (&max)[M][2], float (&sum)[M][2],
                                             float (&acc)[M][W][4], float root) {
    float shrink[M][2];
    bool risen = false;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        int m = i / 2, half = i % 2;
        float top = max[m][half];
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        risen |= top > max[m][half];
        float shift = top == -INFINITY ? 0.0f : top;
        shrink[m][half] = power_of_2(exponent(max[m][half], shift, root));
        max[m][half] = top;
        sum[m][half] *= shrink[m][half];
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            float &p = scores[m][n / 2][2 * half + n % 2];
            sum[m][half] += p = power_of_2(exponent(p, shift, root));
        }
    }
    if (__any_sync(0xffffffff, risen))
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4 * W; i++) acc[m][i / 4][i % 4] *= shrink[m][i % 4 / 2];
}

template <typename T, int D, int STAGES> struct ForwardTiles {
    T q[Sizes<T, D>::ROWS * D], k[STAGES][Sizes<T, D>::COLUMNS * D], v[STAGES][Sizes<T, D>::COLUMNS * D];
};

static __device__ inline float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// STAGES 2: the next tile is loaded while one is multiplied; 1: after it. One of o and o_block is NULL.
template <typename T, int D, int STAGES>
static __global__ void __launch_bounds__(THREADS, 2)
    flash_forward_kernel(floatX *o, float *o_block, float *lse, const floatX *q, const floatX *k,
                         const floatX *v, AttentionShape s, Inputs inputs) {
    const int M = Sizes<T, D>::STRIPS, ROWS = Sizes<T, D>::ROWS, COLUMNS = Sizes<T, D>::COLUMNS;
    const int SLICE = Sizes<T, D>::SLICE;
    extern __shared__ __align__(128) unsigned char smem[];
    ForwardTiles<T, D, STAGES> &tiles = *reinterpret_cast<ForwardTiles<T, D, STAGES> *>(smem);
    int blocks = ceil_div<int>(s.Tq, ROWS);
    Work share = work(s.B * s.H, blocks);
    int first = (blocks - 1 - share.block) * ROWS, b = share.head / (int)s.H, h = share.head % (int)s.H;
    int keys = s.causal ? min(first + ROWS, (int)s.Tk) : s.Tk, steps = ceil_div(keys, COLUMNS);
    size_t kv_at = at(b, s.kv_tokens, 0, s.kv_stride, h / (int)(s.H / s.KV), s.D);
    int warp_row = threadIdx.x / WARP * 16 * M, mine = first + warp_row; // the warp's first row
    float root = 1.0f / sqrtf((float)s.D);

    float acc[M][D / 8][4] = {}, max[M][2], sum[M][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * M; i++) max[i / 2][i % 2] = -INFINITY;
    if (steps > 0) {
        load_tile<ROWS, D>(tiles.q, q + at(b, s.q_tokens, first, s.q_stride, h, s.D), s.q_stride, s.Tq - first,
                           s.D, inputs);
        load_pair<COLUMNS, D>(tiles.k[0], tiles.v[0], k + kv_at, v + kv_at, s.kv_stride, s.kv_stride, keys, s.D,
                              inputs);
    }
    for (int step = 0; step < steps; step++) {
        int key = step * COLUMNS, next = key + COLUMNS, buffer = step % STAGES;
        cp_async_wait<0>();
        __syncthreads(); // this step's tiles are here, and everyone is done with the last step's
        if (STAGES == 2 && next < keys)
            load_pair<COLUMNS, D>(tiles.k[buffer ^ 1], tiles.v[buffer ^ 1], k + kv_at + next * s.kv_stride,
                                  v + kv_at + next * s.kv_stride, s.kv_stride, s.kv_stride, keys - next, s.D,
                                  inputs);

#pragma unroll 1
        for (int slice = 0; slice < COLUMNS; slice += SLICE) {
            float p[M][SLICE / 8][4] = {};
            multiply_rows<D>(p, tiles.q + warp_row * D, tiles.k[buffer] + slice * D);
            if (key + slice + SLICE > (s.causal ? mine + 1 : keys))
                hide<false>(p, mine, key + slice, s.causal, keys);
            online_softmax(p, max, sum, acc, root);
            inputs.round(p);
            multiply<D>(acc, p, tiles.v[buffer] + slice * D);
        }

        if (STAGES == 1 && next < keys) {
            __syncthreads();
            load_pair<COLUMNS, D>(tiles.k[0], tiles.v[0], k + kv_at + next * s.kv_stride,
                                  v + kv_at + next * s.kv_stride, s.kv_stride, s.kv_stride, keys - next, s.D,
                                  inputs);
        }
    }

    float *stage = reinterpret_cast<float *>(tiles.q + warp_row * D);
    lse += share.head * s.q_tokens;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        int eight = mine + 8 * i, row = eight + threadIdx.x % WARP / 4;
        float l = sum[i / 2][i % 2];
        l += __shfl_xor_sync(0xffffffff, l, 1);
        l += __shfl_xor_sync(0xffffffff, l, 2);
        float part = __fmul_rn(max[i / 2][i % 2], root) + logf(l); // no keys: −∞ + log 0
        // A row without keys is 0, and where a block's scores are all −∞ a ring keeps what it has; alone they are NaN.
        float take = l == 0.0f && (o_block || steps == 0) ? 0.0f : 1.0f / l, keep = 1.0f, merged = part;
        if (o_block && l != 0.0f) {
            // weights of the earlier blocks and of this one: σ of differences, where an exp of them might overflow
            float before = IN_RANGE(row < (int)s.Tq) ? lse[row] : -INFINITY;
            keep = sigmoid(before - part), take *= sigmoid(part - before);
            merged = fmaxf(before, part) + log1pf(expf(-fabsf(before - part)));
        }
        store_rows<D>(o, o_block, at(b, s.q_tokens, eight, s.o_stride, h, s.D), s.o_stride, s.Tq - eight, s.D,
                      inputs.aligned, stage, acc[i / 2], i % 2, take, keep);
        if (threadIdx.x % 4 == 0 && IN_RANGE(row < (int)s.Tq) && !(o_block && l == 0.0f)) lse[row] = merged;
    }
}

// ---------------------------------------------------------------------------------------------------------
// launches

template <typename T, int D, int STAGES>
static void launch_forward(floatX *o, float *o_block, float *lse, const floatX *q, const floatX *k,
                           const floatX *v, AttentionShape s) {
    s = with_tokens(s);
    Inputs inputs = {
        aligned16((s.D | s.q_stride | s.kv_stride | s.o_stride) * sizeof(floatX), o, o_block, q, k, v),
        matmul_inputs_bf16};
    unsigned blocks = ceil_div<size_t>(s.Tq, Sizes<T, D>::ROWS) * s.H * s.B;
    int size = sizeof(ForwardTiles<T, D, STAGES>);
    cuda_check(cudaFuncSetAttribute(flash_forward_kernel<T, D, STAGES>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, size));
    flash_forward_kernel<T, D, STAGES>
        <<<blocks, THREADS, size, compute_stream>>>(o, o_block, lse, q, k, v, s, inputs);
    launched("flash_attention_forward");
    kernel_flops.attention_forward += 2 * 2.0 * pairs_by_query(s, Sizes<T, D>::ROWS) * s.D;
}

enum { MOST_CHANNELS = 128 };

size_t flash_attention_most_channels(void) {
    return MOST_CHANNELS;
}

template <typename T, int STAGES>
static void forward(floatX *o, float *o_block, float *lse, const floatX *q, const floatX *k, const floatX *v,
                    AttentionShape s) {
    if (s.D <= 64)
        launch_forward<T, 64, STAGES>(o, o_block, lse, q, k, v, s);
    else if (s.D <= 96)
        launch_forward<T, 96, STAGES>(o, o_block, lse, q, k, v, s);
    else
        launch_forward<T, MOST_CHANNELS, STAGES>(o, o_block, lse, q, k, v, s);
}

void flash_attention_forward(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace) {
    (void)workspace;
    forward<floatX, 2>(o, NULL, lse, q, k, v, s);
}

void flash_attention_forward_block(float *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                   AttentionShape s, void *workspace) {
    (void)workspace;
    forward<floatX, 2>(NULL, o, lse, q, k, v, s);
}

// ---------------------------------------------------------------------------------------------------------
// The ladder. Tiles of fp32 numbers and no tensor cores: what the fp32 build does, on tiles converted from bf16.
void flash_attention_forward_plain(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                   AttentionShape s, void *workspace) {
    (void)workspace;
    forward<float, 1>(o, NULL, lse, q, k, v, s);
}

// Tensor cores, but each tile is waited for, then multiplied, then the next one asked for. (In fp32 builds,
// which have no tensor cores, this is `plain` itself.)
void flash_attention_forward_single(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, void *workspace) {
    (void)workspace;
    forward<floatX, 1>(o, NULL, lse, q, k, v, s);
}

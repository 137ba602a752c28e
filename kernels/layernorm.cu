// layernorm and rmsnorm on a GPU; layernorm.c has the formulas, and one kernel serves both norms here too.
//
// A row is needed four times (mean twice, variance, result) and must come from memory once. So it stays in shared
// memory between the passes, where each thread reads back what it wrote itself. Rows of up to 4 KB have a warp
// each, whose sums are shuffles; a longer row has the whole block:
//
//     shared memory of a block   │ weight │ bias │ row of warp 0 │ … │ row of warp 7 │   C ≤ 2048 in bf16
//                                │ weight │ bias │ row of all warps                  │   longer
//                                                  and, where there are any, the residuals of these rows
//
// Weight and bias are read once a block, and a block walks over many rows: the grid has at most 4 blocks for
// each of 128 SMs. Rows too long for shared memory are read again from memory, or from the cache, by the same
// code.
//
// Backward keeps dout and x of its rows. A row's own threads turn them into dinp, which takes two sums over the
// row; then the block's threads, each for its channels, add all its rows to the block's share of dweight and
// dbias:
//
//              channels ─→                 rows ─→ a warp or the block each: mean(g), mean(g · x̂), dinp
//       rows │ dout and x, kept │          channels ↓ a thread each: Σ dout · x̂, Σ dout
//
// A second kernel adds the blocks' shares in order. The number of blocks follows from N and C alone, so the
// bits are the same on any card.
// Bytes: every array once, weight and bias once a block. At C = 768, N = 16,384 in bf16 that is forward 1.6 %
// more with a residual, 3 % without; backward 1 %, and as workspace the blocks' shares, 8·C each, once out and
// once in (6 %; rmsnorm reads back half of it).
#include "kernels/cuda.cuh"
#include "kernels/ladder.h"

enum {
    THREADS = 256,
    WARPS = THREADS / WARP,
    ADDERS = WARP * WARP,     // threads that add shares
    LONGEST_OF_A_WARP = 4096, // bytes of a row
    SMS = 128,                // a round number near those of the cards in question
    BLOCKS_AN_SM = 4,
    SHARED_OF_AN_SM = 218 << 10, // of an H100, less what the system and the sums take
};
#define EPS 1e-5f

// How many blocks: so many that all are on an H100 at once if each takes `shared` bytes.
static unsigned blocks_for(size_t N, size_t rows, size_t shared) {
    size_t an_sm = min(max(SHARED_OF_AN_SM / shared, (size_t)1), (size_t)BLOCKS_AN_SM);
    return (unsigned)min(ceil_div(N, rows), an_sm * SMS);
}

// Does a block get so much dynamic shared memory on this card?
static bool fits(size_t bytes) {
    int device, most;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes + 1024 <= (size_t)most; // 1 KB for the sums
}

// V elements on their way into shared memory; the thread has its own once they have arrived().
template <int V> static __device__ inline void fetch(floatX *to, const floatX *from) {
    if constexpr (V == 1)
        *to = *from;
    else
        cp_async_16(to, from);
}
static __device__ inline void arrived() {
    cp_async_commit();
    cp_async_wait<0>();
}

// ROWS rows at a time in a block, so THREADS / ROWS threads a row, a warp or all; they get the sum. Two sums in
// turn take different `shared`: then the barrier in the later one stands between the earlier one and the next.
template <int ROWS> static __device__ inline float row_sum(float x, float *shared) {
    return ROWS == 1 ? block_sum(x, shared) : warp_sum(x);
}

// ---------------------------------------------------------------------------------------------------------
// Forward. mean NULL: rmsnorm.
struct Forward {
    floatX *out;
    float *mean, *rstd;
    floatX *sum;
    const floatX *inp, *residual, *weight, *bias;
    size_t N, C;
    bool keep; // weight, bias and the rows in shared memory
};

template <int V, int ROWS> static __global__ void __launch_bounds__(THREADS, 4) norm_forward_kernel(Forward a) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float sums[2][WARPS];
    constexpr int TEAM = THREADS / ROWS; // threads of a row
    constexpr int STEP = TEAM * V;       // channels from one of a thread's vectors to its next
    const size_t C = a.C, first = threadIdx.x % TEAM * V, team = threadIdx.x / TEAM;
    const floatX *weight = a.weight, *bias = a.bias;
    floatX *kept_weight = reinterpret_cast<floatX *>(smem), *kept_bias = kept_weight + C;
    floatX *kept = kept_bias + (1 + team) * C, *kept_residual = kept + ROWS * C;
    if (a.keep) {
        for (size_t c = threadIdx.x * V; c < C; c += THREADS * V) {
            store(kept_weight + c, load<V>(weight + c));
            if (bias) store(kept_bias + c, load<V>(bias + c));
        }
        weight = kept_weight;
        bias = bias ? kept_bias : NULL;
        __syncthreads();
    }

    int turn = 0;
    for (size_t n = blockIdx.x * ROWS + team; n < a.N; n += gridDim.x * ROWS) {
        const floatX *row = a.inp + n * C, *residual = a.residual ? a.residual + n * C : NULL;
        if (a.keep) {
            for (size_t c = first; c < C; c += STEP) {
                fetch<V>(kept + c, row + c);
                if (residual) fetch<V>(kept_residual + c, residual + c);
            }
            arrived();
            row = kept;
            residual = residual ? kept_residual : NULL;
        }
        float x[V];
        if (residual) {
            // normalise what is stored: backward sees x rounded, so forward must too
            floatX *sum = a.sum + n * C;
            for (size_t c = first; c < C; c += STEP) {
                float r[V];
                load_floats<V>(x, row + c);
                load_floats<V>(r, residual + c);
                for (int k = 0; k < V; k++) x[k] += r[k];
                store_floats<V>(sum + c, x);
                if (a.keep) store_floats<V>(kept + c, x);
            }
            if (!a.keep) row = sum;
        }

        // Twice: from 0, then from the mean so found. These distances are small, and their sum rounds off next
        // to nothing, however large an offset all channels share.
        float m = 0.0f;
        for (int i = 0; a.mean && i < 2; i++) {
            float distance = 0.0f;
            for (size_t c = first; c < C; c += STEP) {
                load_floats<V>(x, row + c);
                for (int k = 0; k < V; k++) distance += x[k] - m;
            }
            m += row_sum<ROWS>(distance, sums[turn ^= 1]) / (float)C;
        }
        float squares = 0.0f;
        for (size_t c = first; c < C; c += STEP) {
            load_floats<V>(x, row + c);
            for (int k = 0; k < V; k++) squares += (x[k] - m) * (x[k] - m);
        }
        const float r = 1.0f / sqrtf(row_sum<ROWS>(squares, sums[turn ^= 1]) / (float)C + EPS);
        if (first == 0) {
            if (a.mean) a.mean[n] = m;
            a.rstd[n] = r;
        }

        for (size_t c = first; c < C; c += STEP) {
            float w[V], b[V] = {0};
            load_floats<V>(x, row + c);
            load_floats<V>(w, weight + c);
            if (bias) load_floats<V>(b, bias + c);
            for (int k = 0; k < V; k++) x[k] = (x[k] - m) * r * w[k] + b[k];
            store_floats<V>(a.out + n * C + c, x);
        }
    }
}

template <int V, int ROWS> static void launch_forward(Forward a) {
    size_t shared = (2 + (a.residual ? 2 : 1) * ROWS) * a.C * sizeof(floatX);
    unsigned blocks = blocks_for(a.N, ROWS, shared);
    a.keep = fits(shared);
    if (!a.keep) shared = 0;
    cuda_check(cudaFuncSetAttribute(norm_forward_kernel<V, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared));
    norm_forward_kernel<V, ROWS><<<blocks, THREADS, shared, compute_stream>>>(a);
    launched("norm_forward");
}

static void norm_forward(Forward a) {
    const size_t bytes = a.C * sizeof(floatX);
    const bool vectors = aligned16(bytes, a.out, a.sum, a.inp, a.residual, a.weight, a.bias);
    if (bytes <= LONGEST_OF_A_WARP)
        vectors ? launch_forward<VECTOR, WARPS>(a) : launch_forward<1, WARPS>(a);
    else
        vectors ? launch_forward<VECTOR, 1>(a) : launch_forward<1, 1>(a);
}

void layernorm_forward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                       const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C) {
    norm_forward({out, mean, rstd, sum, inp, residual, weight, bias, N, C, true});
}

void rmsnorm_forward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                     const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C) {
    (void)mean, (void)bias;
    norm_forward({out, NULL, rstd, sum, inp, residual, weight, NULL, N, C, true});
}

// ---------------------------------------------------------------------------------------------------------
// Backward. mean NULL: rmsnorm.
struct Backward {
    floatX *dinp;
    const floatX *dout, *dresidual, *inp, *weight;
    const float *mean, *rstd;
    float *share; // [blocks, 2, C]: each block's of dweight and of dbias
    size_t N, C;
    bool keep; // the share, the rows and weight in shared memory
};

// One lane reads for its warp.
static __device__ inline float read_once(const float *from) {
    float x = 0.0f;
    if (threadIdx.x % WARP == 0) x = *from;
    return __shfl_sync(0xffffffff, x, 0);
}

template <int V, int ROWS>
static __global__ void __launch_bounds__(THREADS, 4) norm_backward_kernel(Backward a) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float sums[2][WARPS], means[ROWS], rstds[ROWS];
    constexpr int TEAM = THREADS / ROWS, STEP = TEAM * V;
    constexpr int W = V == 1 ? 1 : 4 / sizeof(floatX); // channels in a word of shared memory
    const size_t C = a.C, first = threadIdx.x % TEAM * V, team = threadIdx.x / TEAM;
    float *share = a.share + blockIdx.x * 2 * C;
    float *dweight = a.keep ? reinterpret_cast<float *>(smem) : share, *dbias = dweight + C;
    floatX *kept_dout = reinterpret_cast<floatX *>(smem + 2 * C * sizeof(float));
    floatX *kept_inp = kept_dout + ROWS * C;
    const floatX *weight = a.weight;
    if (a.keep) {
        floatX *kept_weight = kept_inp + ROWS * C;
        for (size_t c = threadIdx.x * V; c < C; c += THREADS * V) store(kept_weight + c, load<V>(weight + c));
        weight = kept_weight;
        __syncthreads();
    }
    const float zeros[W] = {0};
    for (size_t c = threadIdx.x * W; c < C; c += THREADS * W) {
        store_floats<W>(dweight + c, zeros);
        store_floats<W>(dbias + c, zeros);
    }

    for (size_t n0 = blockIdx.x * ROWS; n0 < a.N; n0 += gridDim.x * ROWS) {
        const size_t rows = min((size_t)ROWS, a.N - n0);
        const floatX *dout = a.keep ? kept_dout : a.dout + n0 * C, *inp = a.keep ? kept_inp : a.inp + n0 * C;

        // each row by its threads
        if (IN_RANGE(team < rows)) {
            const size_t n = n0 + team, skip = team * C;
            if (a.keep) {
                for (size_t c = first; c < C; c += STEP) {
                    fetch<V>(kept_dout + skip + c, a.dout + n * C + c);
                    fetch<V>(kept_inp + skip + c, a.inp + n * C + c);
                }
            }
            const float m = a.mean ? read_once(a.mean + n) : 0.0f, r = read_once(a.rstd + n);
            arrived();
            float mean_g = 0.0f, mean_gx = 0.0f, x[V], d[V], w[V];
            for (size_t c = first; c < C; c += STEP) {
                load_floats<V>(x, inp + skip + c);
                load_floats<V>(d, dout + skip + c);
                load_floats<V>(w, weight + c);
                for (int k = 0; k < V; k++) {
                    mean_g += d[k] * w[k];
                    mean_gx += d[k] * w[k] * ((x[k] - m) * r);
                }
            }
            mean_g = a.mean ? row_sum<ROWS>(mean_g, sums[0]) / (float)C : 0.0f;
            mean_gx = row_sum<ROWS>(mean_gx, sums[1]) / (float)C;
            for (size_t c = first; c < C; c += STEP) {
                float dx[V] = {0};
                load_floats<V>(x, inp + skip + c);
                load_floats<V>(d, dout + skip + c);
                load_floats<V>(w, weight + c);
                if (a.dresidual) load_floats<V>(dx, a.dresidual + n * C + c);
                for (int k = 0; k < V; k++) dx[k] += r * (d[k] * w[k] - mean_g - (x[k] - m) * r * mean_gx);
                store_floats<V>(a.dinp + n * C + c, dx);
            }
            if (first == 0) means[team] = m, rstds[team] = r;
        }
        __syncthreads(); // all rows are there

        // each channel by its thread
        for (size_t c = threadIdx.x * W; c < C; c += THREADS * W) {
            float dw[W], db[W], x[W], d[W];
            load_floats<W>(dw, dweight + c);
            load_floats<W>(db, dbias + c);
            for (size_t i = 0; i < rows; i++) {
                load_floats<W>(x, inp + i * C + c);
                load_floats<W>(d, dout + i * C + c);
                for (int k = 0; k < W; k++) {
                    dw[k] += d[k] * ((x[k] - means[i]) * rstds[i]);
                    db[k] += d[k];
                }
            }
            store_floats<W>(dweight + c, dw);
            store_floats<W>(dbias + c, db);
        }
        __syncthreads(); // nobody needs these rows any more
    }

    for (size_t c = threadIdx.x * W; a.keep && c < C; c += THREADS * W) {
        float sum[W];
        load_floats<W>(sum, dweight + c);
        store_floats<W>(share + c, sum);
        load_floats<W>(sum, dbias + c);
        store_floats<W>(share + C + c, sum);
    }
}

// dweight, dbias += the sums over the blocks' shares of 32 columns: warp w adds shares w, w + 32, …; then warp
// 0 adds the warps' sums, in order.
static __global__ void __launch_bounds__(ADDERS)
    add_shares_kernel(floatX *dweight, floatX *dbias, const float *share, unsigned shares, size_t C,
                      size_t columns) {
    __shared__ float sums[WARP][WARP];
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    size_t column = (size_t)blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (IN_RANGE(column < columns))
        for (unsigned i = warp; i < shares; i += WARP) sum += share[i * 2 * C + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || !IN_RANGE(column < columns)) return;
    for (unsigned w = 1; w < WARP; w++) sum += sums[w][lane];
    floatX *to = column < C ? dweight + column : dbias + (column - C);
    *to = to_floatX(to_float(*to) + sum);
}

template <int V, int ROWS> static void launch_backward(Backward a, floatX *dweight, floatX *dbias) {
    size_t shared = 2 * a.C * sizeof(float) + (2 * ROWS + 1) * a.C * sizeof(floatX);
    const unsigned blocks = blocks_for(a.N, ROWS, shared);
    a.keep = fits(shared);
    if (!a.keep) shared = 0;
    cuda_check(cudaFuncSetAttribute(norm_backward_kernel<V, ROWS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)shared));
    norm_backward_kernel<V, ROWS><<<blocks, THREADS, shared, compute_stream>>>(a);
    launched("norm_backward");
    const size_t columns = dbias ? 2 * a.C : a.C;
    add_shares_kernel<<<ceil_div<size_t>(columns, WARP), ADDERS, 0, compute_stream>>>(dweight, dbias, a.share,
                                                                                      blocks, a.C, columns);
    launched("add_shares");
}

static void norm_backward(Backward a, floatX *dweight, floatX *dbias) {
    const size_t bytes = a.C * sizeof(floatX);
    const bool vectors = aligned16(bytes, a.dinp, a.dout, a.dresidual, a.inp, a.weight, a.share);
    if (bytes <= LONGEST_OF_A_WARP)
        vectors ? launch_backward<VECTOR, WARPS>(a, dweight, dbias)
                : launch_backward<1, WARPS>(a, dweight, dbias);
    else
        vectors ? launch_backward<VECTOR, 1>(a, dweight, dbias) : launch_backward<1, 1>(a, dweight, dbias);
}

void layernorm_backward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout,
                        const floatX *dresidual, const floatX *inp, const floatX *weight, const float *mean,
                        const float *rstd, size_t N, size_t C, void *workspace) {
    norm_backward({dinp, dout, dresidual, inp, weight, mean, rstd, (float *)workspace, N, C, true}, dweight,
                  dbias);
}

void rmsnorm_backward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout, const floatX *dresidual,
                      const floatX *inp, const floatX *weight, const float *mean, const float *rstd, size_t N,
                      size_t C, void *workspace) {
    (void)mean, (void)dbias;
    norm_backward({dinp, dout, dresidual, inp, weight, NULL, rstd, (float *)workspace, N, C, true}, dweight,
                  NULL);
}

size_t norm_backward_workspace(size_t N, size_t C) {
    return min(N, (size_t)BLOCKS_AN_SM * SMS) * 2 * C * sizeof(float);
}

// ---------------------------------------------------------------------------------------------------------
template <int V>
static __global__ void __launch_bounds__(THREADS)
    residual_forward_kernel(floatX *out, const floatX *a, const floatX *b, size_t n) {
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (!IN_RANGE(i < n)) return;
    float x[V], y[V];
    load_floats<V>(x, a + i);
    load_floats<V>(y, b + i);
    for (int k = 0; k < V; k++) x[k] += y[k];
    store_floats<V>(out + i, x);
}

void residual_forward(floatX *out, const floatX *a, const floatX *b, size_t n) {
    if (aligned16(n * sizeof(floatX), out, a, b)) {
        unsigned blocks = ceil_div<size_t>(n, THREADS * VECTOR);
        residual_forward_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(out, a, b, n);
    } else {
        unsigned blocks = ceil_div<size_t>(n, THREADS);
        residual_forward_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(out, a, b, n);
    }
    launched("residual_forward");
}

// ---------------------------------------------------------------------------------------------------------
// The ladder. A thread a row, as on the CPU: neighbouring threads read C elements apart, so of each 32 bytes
// that memory sends, a load uses one element.
static __global__ void __launch_bounds__(THREADS) layernorm_forward_naive_kernel(Forward a) {
    const size_t n = (size_t)blockIdx.x * THREADS + threadIdx.x, C = a.C;
    if (!IN_RANGE(n < a.N)) return;
    const floatX *x = a.inp + n * C;
    if (a.residual) {
        floatX *sum = a.sum + n * C;
        for (size_t c = 0; c < C; c++) sum[c] = to_floatX(to_float(x[c]) + to_float(a.residual[n * C + c]));
        x = sum;
    }
    float m = 0.0f, squares = 0.0f;
    for (int i = 0; i < 2; i++) {
        float distance = 0.0f;
        for (size_t c = 0; c < C; c++) distance += to_float(x[c]) - m;
        m += distance / (float)C;
    }
    for (size_t c = 0; c < C; c++) {
        const float distance = to_float(x[c]) - m;
        squares += distance * distance;
    }
    const float r = 1.0f / sqrtf(squares / (float)C + EPS);
    for (size_t c = 0; c < C; c++)
        a.out[n * C + c] = to_floatX((to_float(x[c]) - m) * r * to_float(a.weight[c]) + to_float(a.bias[c]));
    a.mean[n] = m;
    a.rstd[n] = r;
}

void layernorm_forward_naive(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                             const floatX *residual, const floatX *weight, const floatX *bias, size_t N,
                             size_t C) {
    Forward a = {out, mean, rstd, sum, inp, residual, weight, bias, N, C, false};
    layernorm_forward_naive_kernel<<<ceil_div<size_t>(N, THREADS), THREADS, 0, compute_stream>>>(a);
    launched("layernorm_forward_naive");
}

// A warp a row: neighbouring lanes read side by side. But one element at a time, and the row four times,
// after the first from the cache if it is still there; weight and bias once a row.
void layernorm_forward_warp(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                            const floatX *residual, const floatX *weight, const floatX *bias, size_t N,
                            size_t C) {
    Forward a = {out, mean, rstd, sum, inp, residual, weight, bias, N, C, false};
    const unsigned blocks = ceil_div<size_t>(N, WARPS);
    norm_forward_kernel<1, WARPS><<<blocks, THREADS, 0, compute_stream>>>(a);
    launched("layernorm_forward_warp");
}

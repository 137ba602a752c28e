// cross_entropy on a GPU; cross_entropy.c says what its three steps compute, and why there are three.
//
//     local     a block a row:  a thread keeps its largest logit so far and Σ exp(x − largest); when the largest grows,
//                               the sum is rescaled to it (Milakov & Gimelshein 2018). The block takes the largest of
//                               all, and the sum of the sums, rescaled to that.
//     rescale   a thread a row
//     global    a block a row:  logits become (softmax − onehot) · dloss, in place: a thread writes no vector but the
//                               one that it has just read
//
// Where rows do not start at multiples of 16 bytes, a vector is one element. NaN finds its way through the sum: fmaxf
// forgets it, exp does not.
// Cost: 2 reads of [N,V] and 1 write of [N,Vp]; with dloss = 0 one read. A kernel that did all of it would find a row's
// second read in cache, but has to know all of the row: the ladder's does, of a vocabulary that is not cut. Two exp an
// element, in bf16 one instruction each: at 16 a clock and multiprocessor they take less time than the bytes.
#include <math.h>
#include "kernels/cuda.cuh"
#include "kernels/ladder.h"

enum { THREADS = 512 };

// Σ exp(x − from) as Σ exp(x − to), to ≥ from. A sum of nothing (both −inf) stays 0.
static __device__ inline float rescale(float sum, float from, float to) {
    return from == to ? sum : sum * exp_of(from - to);
}

// Elements of a vector at column v that lie beyond the vocabulary become `value`.
template <int W> static __device__ inline void set_padding(float (&x)[W], int v, int V, float value) {
    if (v + W <= V) return;
    for (int i = 0; i < W; i++)
        if (v + i >= V) x[i] = value;
}

struct MaxSum {
    float max, sum;
};

// max, and Σ exp(x − max), of V logits (none: −inf, 0). All threads get it.
template <int W> static __device__ inline MaxSum row_max_sum(const floatX *row, int V) {
    __shared__ float shared_max[WARP], shared_sum[WARP];
    float max = -INFINITY, sum = 0.0f;
    for (int v = threadIdx.x * W; v < V; v += THREADS * W) {
        float x[W], larger = max;
        load_floats<W>(x, row + v);
        set_padding<W>(x, v, V, -INFINITY);
        for (int i = 0; i < W; i++) larger = fmaxf(larger, x[i]);
        sum = rescale(sum, max, larger);
        max = larger;
        float shift = max == -INFINITY ? 0.0f : max; // exp(−inf − 0) = 0
        for (int i = 0; i < W; i++) sum += exp_of(x[i] - shift);
    }
    MaxSum row_s = {block_max(max, shared_max), 0.0f};
    row_s.sum = block_sum(rescale(sum, max, row_s.max), shared_sum);
    return row_s;
}

// Columns [0, V) become their gradient, those up to Vp 0; target is a column, or none of them.
template <int W>
static __device__ inline void row_gradient(floatX *row, MaxSum s, int target, float dloss, int V, int Vp) {
    float share = 1.0f / s.sum;
    for (int v = threadIdx.x * W; v < Vp; v += THREADS * W) {
        float x[W] = {};
        if (v < V) load_floats<W>(x, row + v);
        for (int i = 0; i < W; i++) {
            float p = exp_of(x[i] - s.max) * share;
            x[i] = (v + i == target ? p - 1.0f : p) * dloss;
        }
        set_padding<W>(x, v, V, 0.0f);
        store_floats<W>(row + v, x);
    }
}

static __device__ inline float loss_of(MaxSum s, float target_logit) {
    return logf(s.sum) - (target_logit - s.max);
}

template <typename T> struct Rows { // [N]
    T *max, *sum, *target;
};

template <int W>
static __global__ void __launch_bounds__(THREADS, 3)
    read_slice_kernel(Rows<float> r, const floatX *logits, const int32_t *targets, int32_t first, int V,
                      int Vp) {
    size_t n = blockIdx.x;
    const floatX *row = logits + n * Vp;
    int target = targets[n] - first;
    if (targets[n] < 0) V = 0; // all of the row is padding
    MaxSum s = row_max_sum<W>(row, V);
    if (threadIdx.x == 0) {
        r.max[n] = s.max;
        r.sum[n] = s.sum;
        r.target[n] = IN_RANGE(0 <= target && target < V) ? to_float(row[target]) : 0.0f;
    }
}

static __global__ void __launch_bounds__(THREADS)
    rescale_sums_kernel(float *sum, const float *max, const float *global_max, size_t N) {
    size_t n = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (IN_RANGE(n < N)) sum[n] = rescale(sum[n], max[n], global_max[n]);
}

template <int W>
static __global__ void __launch_bounds__(THREADS, 3)
    write_slice_kernel(float *losses, floatX *logits, const int32_t *targets, int32_t first,
                       Rows<const float> r, float dloss, int V, int Vp) {
    size_t n = blockIdx.x;
    MaxSum s = {r.max[n], r.sum[n]};
    int target = targets[n];
    bool counts = target >= 0;
    if (threadIdx.x == 0) losses[n] = counts ? loss_of(s, r.target[n]) : 0.0f;
    if (dloss != 0.0f) row_gradient<W>(logits + n * Vp, s, target - first, dloss, counts ? V : 0, Vp);
}

void cross_entropy_local(float *max, float *sum, float *target, const floatX *logits, const int32_t *targets,
                         int32_t first, size_t N, size_t V, size_t Vp) {
    Rows<float> r = {max, sum, target};
    if (aligned16(Vp * sizeof(floatX), logits))
        read_slice_kernel<VECTOR><<<N, THREADS, 0, compute_stream>>>(r, logits, targets, first, V, Vp);
    else
        read_slice_kernel<1><<<N, THREADS, 0, compute_stream>>>(r, logits, targets, first, V, Vp);
    launched("read_slice");
}

void cross_entropy_rescale(float *sum, const float *max, const float *global_max, size_t N) {
    rescale_sums_kernel<<<ceil_div(N, (size_t)THREADS), THREADS, 0, compute_stream>>>(sum, max, global_max, N);
    launched("rescale_sums");
}

void cross_entropy_global(float *losses, floatX *logits, const int32_t *targets, int32_t first,
                          const float *global_max, const float *sum, const float *target, float dloss, size_t N,
                          size_t V, size_t Vp) {
    Rows<const float> r = {global_max, sum, target};
    if (aligned16(Vp * sizeof(floatX), logits))
        write_slice_kernel<VECTOR>
            <<<N, THREADS, 0, compute_stream>>>(losses, logits, targets, first, r, dloss, V, Vp);
    else
        write_slice_kernel<1>
            <<<N, THREADS, 0, compute_stream>>>(losses, logits, targets, first, r, dloss, V, Vp);
    launched("write_slice");
}

// ---------------------------------------------------------------------------------------------------------
// The ladder: three passes, for the maximum, the sum and the gradient, an element at a time.
static __global__ void __launch_bounds__(THREADS, 3)
    cross_entropy_naive_kernel(float *losses, floatX *logits, const int32_t *targets, float dloss, int V,
                               int Vp) {
    __shared__ float shared_max[WARP], shared_sum[WARP];
    floatX *row = logits + (size_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x];
    bool counts = target >= 0;
    if (!counts) V = 0;
    float target_logit =
        counts && threadIdx.x == 0 ? to_float(row[target]) : 0.0f; // before its gradient stands there
    MaxSum s = {-INFINITY, 0.0f};
    for (int v = threadIdx.x; v < V; v += THREADS) s.max = fmaxf(s.max, to_float(row[v]));
    s.max = block_max(s.max, shared_max);
    for (int v = threadIdx.x; v < V; v += THREADS) s.sum += exp_of(to_float(row[v]) - s.max);
    s.sum = block_sum(s.sum, shared_sum);
    if (threadIdx.x == 0) losses[blockIdx.x] = counts ? loss_of(s, target_logit) : 0.0f;
    if (dloss != 0.0f) row_gradient<1>(row, s, target, dloss, V, Vp);
}

void cross_entropy_naive(float *losses, floatX *logits, const int32_t *targets, float dloss, size_t N, size_t V,
                         size_t Vp) {
    cross_entropy_naive_kernel<<<N, THREADS, 0, compute_stream>>>(losses, logits, targets, dloss, V, Vp);
    launched("cross_entropy_naive");
}

// grad_norm on a GPU: Σ g², in an order that n alone decides.
//
//     g          | thread 0 | thread 1 | …        16 bytes each, and again one stride of the grid further on
//     partial      s₀  s₁  …  s_k                 one a block: each thread's sum, then the tree of warp and block
//     *sum +=      the same tree over the partials, in a second launch of one block
//
// Neither the order of blocks nor the place where the array begins changes a bit of it: an array that does not start at
// a multiple of 16 bytes is read in smaller loads, but each element by the same thread.
// Cost: one read of the gradient; a conversion to double and a multiply-add an element. Double, because the square of a
// bf16 gradient may be no float. Data centre GPUs hide that behind the memory; with fp64 units at 1/64 of the fp32 rate
// (consumer cards) a bf16 gradient takes about twice as long as its bytes do.
#include "kernels/cuda.cuh"

enum { THREADS = 256, MOST_BLOCKS = 512 /* all of which run at once on a large GPU */, TOGETHER = 4 };

static size_t n_blocks(size_t n) {
    size_t blocks = ceil_div(n, (size_t)THREADS * 8 * TOGETHER), most = MOST_BLOCKS;
    return blocks < most ? blocks : most;
}

template <int V> static __device__ inline double add_squares(double sum, const float (&g)[V]) {
    for (int i = 0; i < V; i++) sum += (double)g[i] * g[i];
    return sum;
}
template <int V, typename T> static __device__ inline double add_squares(double sum, const T *grad) {
    float g[V];
    load_floats<V>(g, grad);
    return add_squares(sum, g);
}

// V elements a load: 16 bytes, or one element where the array is not aligned
template <typename T, int V>
static __global__ void __launch_bounds__(THREADS, 4) squares_kernel(double *partial, const T *grad, size_t n) {
    __shared__ double shared[WARP];
    constexpr int MINE = 16 / sizeof(T), LOADS = MINE / V;
    const size_t stride = (size_t)gridDim.x * THREADS * MINE;
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * MINE;
    double sum = 0;
    // As many bytes must be on their way as the memory takes to answer: a thread asks for 64 before it waits.
    for (; i + (TOGETHER - 1) * stride + MINE <= n; i += TOGETHER * stride) {
        float g[TOGETHER * LOADS][V];
#pragma unroll
        for (int k = 0; k < TOGETHER * LOADS; k++)
            load_floats<V>(g[k], grad + i + k / LOADS * stride + k % LOADS * V);
#pragma unroll
        for (int k = 0; k < TOGETHER * LOADS; k++) sum = add_squares(sum, g[k]);
    }
    for (; i < n; i += stride)
        if (IN_RANGE(i + MINE <= n))
            for (int j = 0; j < MINE; j += V) sum = add_squares<V>(sum, grad + i + j);
        else
            for (size_t j = i; IN_RANGE(j < n); j++) sum = add_squares<1>(sum, grad + j);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(MOST_BLOCKS)
    add_partials_kernel(double *sum, const double *partial, size_t blocks) {
    __shared__ double shared[WARP];
    double total = block_sum(IN_RANGE(threadIdx.x < blocks) ? partial[threadIdx.x] : 0.0, shared);
    if (threadIdx.x == 0) *sum += total;
}

template <typename T> static void launch_squares(double *partial, const T *grad, size_t n) {
    if (aligned16(0, grad))
        squares_kernel<T, 16 / sizeof(T)><<<n_blocks(n), THREADS, 0, compute_stream>>>(partial, grad, n);
    else
        squares_kernel<T, 1><<<n_blocks(n), THREADS, 0, compute_stream>>>(partial, grad, n);
    launched("squares");
}

void grad_norm_squared(double *sum, const floatX *grad, const float *grad32, size_t n, void *workspace) {
    double *partial = (double *)workspace; // [n_blocks]
    if (grad32)
        launch_squares(partial, grad32, n);
    else
        launch_squares(partial, grad, n);
    add_partials_kernel<<<1, MOST_BLOCKS, 0, compute_stream>>>(sum, partial, n_blocks(n));
    launched("add_partials");
}

size_t grad_norm_workspace(size_t n) {
    return n_blocks(n) * sizeof(double);
}

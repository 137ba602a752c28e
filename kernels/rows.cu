// rows on a GPU; rows.c has the picture.
//
// All four are as fast as memory: a thread has V elements side by side, the 16 bytes of one instruction. In a wide
// array it must find them: element i stands in row i / C, and each row before that leaves stride − C elements out.
//
//     packed  [0 1 2 3][4 5 6 7][8 …          wide  · · · 0 1 2 3 4 5 6 7 · · · · 8 …        C = 8
//              thread 0   1        2                      └────── C ────┘└ stride − C ┘
//
// That is a division a thread, of 64 bits at worst: ~100 instructions (20 where 32 bits do, which the compiler looks
// at), and while memory moves 32 bytes an H100 has time for 250. V is 1 where an array or a row does not start on
// 16 bytes, or C is no multiple of so many.
//
// Bytes an element: pack reads and writes a floatX, add reads two floats and writes one, round reads a float and writes
// a floatX, fill writes a float. Each once.
#include "kernels/cuda.cuh"

enum { THREADS = 256, FLOATS = 4 /* in 16 bytes */ };

template <int V> static __device__ inline size_t my_first() {
    return ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    rows_pack_kernel(floatX *out, const floatX *in, size_t stride, size_t n, size_t C) {
    size_t i = my_first<V>();
    if (!IN_RANGE(i < n)) return;
    store(out + i, load<V>(in + i + i / C * (stride - C)));
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    rows_add_kernel(float *sum, size_t stride, const float *part, size_t n, size_t C) {
    size_t i = my_first<V>();
    if (!IN_RANGE(i < n)) return;
    float *to = sum + i + i / C * (stride - C);
    Vec<float, V> s = load<V>(to), p = load<V>(part + i);
    for (int k = 0; k < V; k++) s.x[k] += p.x[k];
    store(to, s);
}

// In bf16 builds V floats become V numbers half as long: a warp leaves no gap in either array.
template <int V>
static __global__ void __launch_bounds__(THREADS) rows_round_kernel(floatX *out, const float *in, size_t n) {
    size_t i = my_first<V>();
    if (!IN_RANGE(i < n)) return;
    float x[V];
    load_floats<V>(x, in + i);
    store_floats<V>(out + i, x);
}

template <int V>
static __global__ void __launch_bounds__(THREADS) rows_fill_kernel(float *x, float value, size_t n) {
    size_t i = my_first<V>();
    if (!IN_RANGE(i < n)) return;
    Vec<float, V> v;
    for (int k = 0; k < V; k++) v.x[k] = value;
    store(x + i, v);
}

// ---------------------------------------------------------------------------------------------------------
static unsigned blocks(size_t n, int V) {
    return ceil_div(n, (size_t)THREADS * V);
}

void rows_pack(floatX *out, const floatX *in, size_t stride, size_t N, size_t C) {
    size_t n = N * C;
    if (aligned16((C | stride) * sizeof(floatX), out, in))
        rows_pack_kernel<VECTOR><<<blocks(n, VECTOR), THREADS, 0, compute_stream>>>(out, in, stride, n, C);
    else
        rows_pack_kernel<1><<<blocks(n, 1), THREADS, 0, compute_stream>>>(out, in, stride, n, C);
    launched("rows_pack");
}

void rows_add(float *sum, size_t stride, const float *part, size_t N, size_t C) {
    size_t n = N * C;
    if (aligned16((C | stride) * sizeof(float), sum, part))
        rows_add_kernel<FLOATS><<<blocks(n, FLOATS), THREADS, 0, compute_stream>>>(sum, stride, part, n, C);
    else
        rows_add_kernel<1><<<blocks(n, 1), THREADS, 0, compute_stream>>>(sum, stride, part, n, C);
    launched("rows_add");
}

void rows_round(floatX *out, const float *in, size_t n) {
    if (aligned16(n * sizeof(float), out, in))
        rows_round_kernel<FLOATS><<<blocks(n, FLOATS), THREADS, 0, compute_stream>>>(out, in, n);
    else
        rows_round_kernel<1><<<blocks(n, 1), THREADS, 0, compute_stream>>>(out, in, n);
    launched("rows_round");
}

void rows_fill(float *x, float value, size_t n) {
    if (aligned16(n * sizeof(float), x))
        rows_fill_kernel<FLOATS><<<blocks(n, FLOATS), THREADS, 0, compute_stream>>>(x, value, n);
    else
        rows_fill_kernel<1><<<blocks(n, 1), THREADS, 0, compute_stream>>>(x, value, n);
    launched("rows_fill");
}

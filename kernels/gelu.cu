// gelu and swiglu on a GPU; gelu.c has the formulas.
//
// Nothing is shared between elements, so the kernels are as fast as memory: a thread loads 16 bytes of each
// array by one instruction and stores 16. What it does with them must stay below ~30 instructions an element,
// or an H100 computes longer than it loads: the sigmoid is one exp and one division, approximate ones where the
// result is rounded to bf16.
//
//     gelu   thread   0     1     2 …       swiglu   row  │ gate: 0 1 2 … │ up: 0 1 2 … │   a thread takes
//            inp   [8 x] [8 x] [8 x] …               out  │ 0 1 2 …       │              the same place of both
//
// Elements, of 2 or 4 bytes each: gelu reads and writes each once (backward two reads), swiglu reads 2F and
// writes F a row (backward 3F and 2F).
#include "kernels/cuda.cuh"
#include "kernels/ladder.h"

#define LINEAR 1.595769122f  // 2 √(2/π), as in gelu.c
#define CUBIC  0.0713548162f // 0.044715 · LINEAR

enum { THREADS = 128 };

static __device__ inline float sigmoid(float x) {
#ifdef PRECISION_BF16
    return __fdividef(1.0f, 1.0f + exp_of(-x));
#else
    return 1.0f / (1.0f + exp_of(-x));
#endif
}

// ---------------------------------------------------------------------------------------------------------
// gelu: a thread has V elements of n.
template <int V>
static __global__ void __launch_bounds__(THREADS)
    gelu_forward_kernel(floatX *out, const floatX *inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (!IN_RANGE(i < n)) return;
    Vec<floatX, V> v = load<V>(inp + i);
    for (int k = 0; k < V; k++) {
        float x = to_float(v.x[k]);
        v.x[k] = to_floatX(x * sigmoid(x * fmaf(CUBIC, x * x, LINEAR)));
    }
    store(out + i, v);
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    gelu_backward_kernel(floatX *dinp, const floatX *dout, const floatX *inp, size_t n) {
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (!IN_RANGE(i < n)) return;
    Vec<floatX, V> v = load<V>(inp + i), d = load<V>(dout + i);
    for (int k = 0; k < V; k++) {
        float x = to_float(v.x[k]), square = x * x, s = sigmoid(x * fmaf(CUBIC, square, LINEAR));
        float bend = x * s * (1.0f - s) * fmaf(3.0f * CUBIC, square, LINEAR);
        // beyond ±16 the bend is 0, but for an x² of inf it would come out as 0 · inf
        d.x[k] = to_floatX(to_float(d.x[k]) * (s + (square > 256.0f ? 0.0f : bend)));
    }
    store(dinp + i, d);
}

void gelu_forward(floatX *out, const floatX *inp, size_t N, size_t F) {
    size_t n = N * F;
    if (!aligned16(n * sizeof(floatX), out, inp)) return gelu_forward_naive(out, inp, N, F);
    unsigned blocks = ceil_div<size_t>(n, THREADS * VECTOR);
    gelu_forward_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(out, inp, n);
    launched("gelu_forward");
}

void gelu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F) {
    size_t n = N * F;
    if (aligned16(n * sizeof(floatX), dinp, dout, inp)) {
        unsigned blocks = ceil_div<size_t>(n, THREADS * VECTOR);
        gelu_backward_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(dinp, dout, inp, n);
    } else {
        unsigned blocks = ceil_div<size_t>(n, THREADS);
        gelu_backward_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(dinp, dout, inp, n);
    }
    launched("gelu_backward");
}

// ---------------------------------------------------------------------------------------------------------
// swiglu: a row takes `pieces` blocks side by side, a thread has V channels of it.
struct Piece {
    size_t row, channel;
};

template <int V> static __device__ inline Piece my_piece(unsigned pieces) {
    return {blockIdx.x / pieces, ((size_t)(blockIdx.x % pieces) * THREADS + threadIdx.x) * V};
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    swiglu_forward_kernel(floatX *out, const floatX *inp, unsigned pieces, size_t F) {
    Piece p = my_piece<V>(pieces);
    if (!IN_RANGE(p.channel < F)) return;
    const floatX *gate = inp + p.row * 2 * F + p.channel;
    Vec<floatX, V> g = load<V>(gate), up = load<V>(gate + F);
    for (int k = 0; k < V; k++) {
        float x = to_float(g.x[k]);
        g.x[k] = to_floatX(x * sigmoid(x) * to_float(up.x[k]));
    }
    store(out + p.row * F + p.channel, g);
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(floatX *dinp, const floatX *dout, const floatX *inp, unsigned pieces, size_t F) {
    Piece p = my_piece<V>(pieces);
    if (!IN_RANGE(p.channel < F)) return;
    size_t gate = p.row * 2 * F + p.channel;
    Vec<floatX, V> g = load<V>(inp + gate), up = load<V>(inp + gate + F);
    Vec<floatX, V> d = load<V>(dout + p.row * F + p.channel);
    for (int k = 0; k < V; k++) {
        float x = to_float(g.x[k]), s = sigmoid(x), dy = to_float(d.x[k]);
        g.x[k] = to_floatX(dy * to_float(up.x[k]) * s * (1.0f + x * (1.0f - s)));
        up.x[k] = to_floatX(dy * x * s);
    }
    store(dinp + gate, g);
    store(dinp + gate + F, up);
}

void swiglu_forward(floatX *out, const floatX *inp, size_t N, size_t F) {
    if (aligned16(F * sizeof(floatX), out, inp)) {
        unsigned pieces = ceil_div<size_t>(F, THREADS * VECTOR);
        swiglu_forward_kernel<VECTOR><<<N * pieces, THREADS, 0, compute_stream>>>(out, inp, pieces, F);
    } else {
        unsigned pieces = ceil_div<size_t>(F, THREADS);
        swiglu_forward_kernel<1><<<N * pieces, THREADS, 0, compute_stream>>>(out, inp, pieces, F);
    }
    launched("swiglu_forward");
}

void swiglu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F) {
    if (aligned16(F * sizeof(floatX), dinp, dout, inp)) {
        unsigned pieces = ceil_div<size_t>(F, THREADS * VECTOR);
        swiglu_backward_kernel<VECTOR><<<N * pieces, THREADS, 0, compute_stream>>>(dinp, dout, inp, pieces, F);
    } else {
        unsigned pieces = ceil_div<size_t>(F, THREADS);
        swiglu_backward_kernel<1><<<N * pieces, THREADS, 0, compute_stream>>>(dinp, dout, inp, pieces, F);
    }
    launched("swiglu_backward");
}

// ---------------------------------------------------------------------------------------------------------
// The ladder. One element a thread: the same bytes, but an instruction for each 2 or 4 of them, and memory
// waits for instructions. (It is also the path of arrays that do not start or end on 16 bytes.)
void gelu_forward_naive(floatX *out, const floatX *inp, size_t N, size_t F) {
    unsigned blocks = ceil_div<size_t>(N * F, THREADS);
    gelu_forward_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(out, inp, N * F);
    launched("gelu_forward_naive");
}

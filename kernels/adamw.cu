// adamw on a GPU: the whole bucket moves in one launch.
//
//     thread   | 0 | 1 | 2 | …                        4 elements each: 16 bytes of an fp32 array, and no more, so that
//     bucket   |  matrix, decays  | bias | matrix …   what a warp loads at once lies side by side in every array
//     bound    0                  a      b            an element behind an odd number of bounds decays
//
// A thread finds its place among the bounds by bisection. They come with the launch's parameters, so from the constant
// cache; ranges that find no place there take another launch, over the elements from the first of them on.
// Where an array does not start at a multiple of 16 bytes (a shard may begin anywhere) a thread has one element. The
// multiply-adds are written out as fmaf, so that both ways give the same bits.
// Cost: no arithmetic to speak of. Bytes an element: 28 in fp32, and in bf16 with masters (reads g, w, m, v; writes w,
// m, v and the rounded copy). The formulas are in adamw.c.
#include <math.h>
#include "kernels/cuda.cuh"
#include "kernels/ladder.h"

enum { THREADS = 256, ELEMENTS = 4, MOST_RANGES = 248 /* parameters of a launch are 4 KB at most */ };

struct Arrays {
    floatX *weight;
    float *master, *m, *v;
    const floatX *grad;
    const float *grad32;
};
struct Step {
    float lr, beta1, beta2, eps, weight_decay, grad_scale, m_correction, v_correction;
    unsigned n_bounds;
    size_t bound[2 * MOST_RANGES]; // ascending: beginning and end of each range that decays
};
static_assert(sizeof(Arrays) + 2 * sizeof(size_t) + sizeof(Step) <= 4096, "parameters of a launch");

// How many bounds are at i or before?
static __device__ inline unsigned bounds_until(const Step &s, size_t i) {
    unsigned begin = 0, end = s.n_bounds;
    while (begin < end) {
        unsigned middle = (begin + end) / 2;
        if (s.bound[middle] <= i)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

template <int V> static __device__ inline void update(const Arrays &x, size_t i, const Step &s) {
    float g[V], w[V], m[V], v[V];
    load_floats<V>(m, x.m + i);
    load_floats<V>(v, x.v + i);
    if (x.master)
        load_floats<V>(w, x.master + i);
    else
        load_floats<V>(w, x.weight + i);
    if (x.grad32)
        load_floats<V>(g, x.grad32 + i);
    else
        load_floats<V>(g, x.grad + i);

    unsigned bounds = bounds_until(s, i);
    for (int j = 0; j < V; j++) {
        while (bounds < s.n_bounds && s.bound[bounds] <= i + j) bounds++;
        float decay = bounds % 2 ? s.weight_decay : 0.0f, gj = s.grad_scale * g[j];
        m[j] = fmaf(s.beta1, m[j], (1.0f - s.beta1) * gj);
        v[j] = fmaf(s.beta2, v[j], (1.0f - s.beta2) * gj * gj);
        float step = m[j] * s.m_correction / (sqrtf(v[j] * s.v_correction) + s.eps);
        w[j] = fmaf(-s.lr, fmaf(decay, w[j], step), w[j]);
    }
    store_floats<V>(x.m + i, m);
    store_floats<V>(x.v + i, v);
    if (x.master) store_floats<V>(x.master + i, w);
    store_floats<V>(x.weight + i, w);
}

// Elements [begin, end), V a thread
template <int V>
static __global__ void __launch_bounds__(THREADS, 4) adamw_kernel(Arrays x, size_t begin, size_t end, Step s) {
    size_t i = begin + ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (IN_RANGE(i + V <= end))
        update<V>(x, i, s);
    else
        for (; IN_RANGE(i < end); i++) update<1>(x, i, s); // fewer than V are left
}

static size_t blocks(size_t n, int V) {
    return ceil_div(n, (size_t)THREADS * V);
}

static Step step_of(AdamW a) {
    Step s = {};
    s.lr = a.lr, s.beta1 = a.beta1, s.beta2 = a.beta2, s.eps = a.eps;
    s.weight_decay = a.weight_decay, s.grad_scale = a.grad_scale;
    s.m_correction = (float)(1.0 / (1.0 - pow(a.beta1, (double)a.step)));
    s.v_correction = (float)(1.0 / (1.0 - pow(a.beta2, (double)a.step)));
    return s;
}

void adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad, const float *grad32,
                  size_t n, AdamW a) {
    Step s = step_of(a);
    for (size_t begin = 0, end, range = 0; begin < n; begin = end) {
        for (s.n_bounds = 0; s.n_bounds < 2 * MOST_RANGES && range < a.n_decay; range++) {
            s.bound[s.n_bounds++] = a.decay[2 * range];
            s.bound[s.n_bounds++] = a.decay[2 * range + 1];
        }
        end = range < a.n_decay ? a.decay[2 * range] : n; // where the first range begins that finds no place
        if (begin == end) continue;                       // empty ranges, all of them
        Arrays x = {weight, master, m, v, grad, grad32};
        if (aligned16(begin * sizeof(floatX), weight, master, m, v, grad, grad32))
            adamw_kernel<ELEMENTS>
                <<<blocks(end - begin, ELEMENTS), THREADS, 0, compute_stream>>>(x, begin, end, s);
        else
            adamw_kernel<1><<<blocks(end - begin, 1), THREADS, 0, compute_stream>>>(x, begin, end, s);
        launched("adamw");
    }
}

// ---------------------------------------------------------------------------------------------------------
template <int V> static __device__ inline void accumulate_at(float *acc, floatX *grad) {
    float a[V], g[V];
    load_floats<V>(a, acc);
    load_floats<V>(g, grad);
    for (int j = 0; j < V; j++) a[j] += g[j], g[j] = 0.0f;
    store_floats<V>(acc, a);
    store_floats<V>(grad, g);
}

template <int V>
static __global__ void __launch_bounds__(THREADS, 4) accumulate_kernel(float *acc, floatX *grad, size_t n) {
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * V;
    if (IN_RANGE(i + V <= n))
        accumulate_at<V>(acc + i, grad + i);
    else
        for (; IN_RANGE(i < n); i++) accumulate_at<1>(acc + i, grad + i);
}

void gradient_accumulate(float *acc, floatX *grad, size_t n) {
    if (aligned16(0, acc, grad))
        accumulate_kernel<ELEMENTS><<<blocks(n, ELEMENTS), THREADS, 0, compute_stream>>>(acc, grad, n);
    else
        accumulate_kernel<1><<<blocks(n, 1), THREADS, 0, compute_stream>>>(acc, grad, n);
    launched("accumulate");
}

// ---------------------------------------------------------------------------------------------------------
// The ladder: a launch for each piece between two bounds, one element a thread.
void adamw_update_naive(floatX *weight, float *master, float *m, float *v, const floatX *grad,
                        const float *grad32, size_t n, AdamW a) {
    Step s = step_of(a);
    for (size_t piece = 0, begin = 0, end; piece <= 2 * a.n_decay; piece++, begin = end) {
        end = piece == 2 * a.n_decay ? n : a.decay[piece];
        if (begin == end) continue;
        s.n_bounds = piece % 2, s.bound[0] = 0; // all of the piece lies behind one bound, or before any
        Arrays x = {weight, master, m, v, grad, grad32};
        adamw_kernel<1><<<blocks(end - begin, 1), THREADS, 0, compute_stream>>>(x, begin, end, s);
        launched("adamw");
    }
}

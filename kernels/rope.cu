// rope on a GPU; rope.c has the formula.
//
// A thread takes V pairs of channels of one token, loads their cosines and sines once, and turns these pairs of
// every head:
//
//     row of a token   │ head 0: lo … │ hi … │ head 1: lo … │ hi … │ …     thread 0: the first V channels
//                           └── pair ──┘          └── pair ──┘               of each lo and hi; 1: the next V
//
// Bytes: the rotated heads once in, once out; the table (8 bytes a pair) once a token, however many heads there
// are.
#include "kernels/cuda.cuh"

enum { THREADS = 128, HEADS = 4 /* loaded at once */ };

static __global__ void __launch_bounds__(THREADS)
    rope_table_kernel(float *table, const int32_t *positions, size_t T, size_t D, float theta) {
    size_t entry = (size_t)blockIdx.x * THREADS + threadIdx.x; // of T · D/2
    if (!IN_RANGE(entry < T * (D / 2))) return;
    size_t t = entry / (D / 2), i = entry % (D / 2);
    // double: at position 100,000 an fp32 angle is good to 0.01 only. In half turns, of which whole ones are
    // easily taken off; of large angles in radians sin and cos need π to many digits, and local memory to
    // multiply by it.
    double half_turns = positions[t] * pow((double)theta, -2.0 * (double)i / (double)D) / 3.14159265358979324;
    double sine, cosine;
    sincospi(half_turns, &sine, &cosine);
    table[2 * entry] = (float)cosine;
    table[2 * entry + 1] = (float)sine;
}

void rope_table(float *table, const int32_t *positions, size_t T, size_t D, float theta) {
    unsigned blocks = ceil_div<size_t>(T * (D / 2), THREADS);
    rope_table_kernel<<<blocks, THREADS, 0, compute_stream>>>(table, positions, T, D, theta);
    launched("rope_table");
}

// direction 1 turns forward, −1 back
template <int V>
static __global__ void __launch_bounds__(THREADS, 4)
    rotate_kernel(floatX *x, const float *table, size_t tokens, size_t T, size_t heads, size_t D, size_t stride,
                  float direction) {
    const size_t half = D / 2, thread = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const size_t token = thread / (half / V), i = thread % (half / V) * V;
    if (!IN_RANGE(token < tokens)) return;
    const float *entry = table + (token % T * half + i) * 2;
    float angle[2][V]; // cos, sin, cos, sin, …
    load_floats<V>(angle[0], entry);
    load_floats<V>(angle[1], entry + V);
    for (size_t h = 0; h < heads; h += HEADS) {
        floatX *x0 = x + token * stride + h * D + i;
        Vec<floatX, V> lo[HEADS], hi[HEADS];
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            if (!IN_RANGE(h + j < heads)) break;
            lo[j] = load<V>(x0 + j * D);
            hi[j] = load<V>(x0 + j * D + half);
        }
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            if (!IN_RANGE(h + j < heads)) break;
            for (int k = 0; k < V; k++) {
                float cosine = angle[2 * k / V][2 * k % V],
                      sine = angle[(2 * k + 1) / V][(2 * k + 1) % V] * direction;
                float a = to_float(lo[j].x[k]), b = to_float(hi[j].x[k]);
                lo[j].x[k] = to_floatX(a * cosine - b * sine);
                hi[j].x[k] = to_floatX(b * cosine + a * sine);
            }
            store(x0 + j * D, lo[j]);
            store(x0 + j * D + half, hi[j]);
        }
    }
}

static void rotate(floatX *x, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride,
                   float direction) {
    const bool vectors = aligned16(D / 2 * sizeof(floatX), x, table) && aligned16(stride * sizeof(floatX), x);
    const size_t threads = B * T * (D / 2) / (vectors ? VECTOR : 1);
    const unsigned blocks = ceil_div<size_t>(threads, THREADS);
    if (vectors)
        rotate_kernel<VECTOR>
            <<<blocks, THREADS, 0, compute_stream>>>(x, table, B * T, T, heads, D, stride, direction);
    else
        rotate_kernel<1>
            <<<blocks, THREADS, 0, compute_stream>>>(x, table, B * T, T, heads, D, stride, direction);
    launched("rope");
}

void rope_forward(floatX *x, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride) {
    rotate(x, table, B, T, heads, D, stride, 1.0f);
}

void rope_backward(floatX *dx, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride) {
    rotate(dx, table, B, T, heads, D, stride, -1.0f);
}

// What every CUDA kernel here stands on: launches that are checked, 16 bytes at a time, sums over a warp and a block.
//
//     a thread    holds VECTOR elements of floatX (precision.h: float or bf16), the 16 bytes that one instruction loads
//     a warp      32 threads; sums go across it by shuffles, always the same tree, so always the same bits
//     a block     its warps' sums meet in shared memory
//
// The sources are CUDA, and also C++ for dev/emu (EMU), which runs them on a CPU. It asks for little: explicit template
// arguments at launches, guards written IN_RANGE(condition) so that a test can leave one out, dynamic shared memory
// under the name smem, instructions through ptx.cuh.
#ifndef CUDA_CUH
#define CUDA_CUH

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include "kernels/kernels.h"
#include "kernels/ptx.cuh"

#ifndef EMU
#define IN_RANGE(condition) (condition)
#endif

// The stream that all kernels run on; matmul.cu holds it.
extern cudaStream_t compute_stream;

// Ends the program where CUDA (by a cudaError_t) or cuBLASLt (0) refuses a call, in such words. In a library alone (matmul.cu):
// a line, and exit.
extern "C" void (*kernels_fail)(const char *file, int line, const char *call, const char *words, int error);

#define cuda_check(call) cuda_check_at(call, #call, __FILE__, __LINE__)
static inline void cuda_check_at(cudaError_t error, const char *call, const char *file, int line) {
    if (error != cudaSuccess) kernels_fail(file, line, call, cudaGetErrorString(error), (int)error);
}
// After every launch: did it start?
#define launched(kernel) cuda_check_at(cudaGetLastError(), kernel, __FILE__, __LINE__)

enum { WARP = 32 };

template <typename T> static __host__ __device__ inline T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// ---------------------------------------------------------------------------------------------------------
// V elements of T side by side, loaded and stored by one instruction (V·sizeof(T): 16 or a smaller power of two).
enum { VECTOR = 16 / sizeof(floatX) };

template <typename T, int V> struct alignas(V * sizeof(T)) Vec { T x[V]; };

template <int V, typename T> static __device__ inline Vec<T, V> load(const T *from) {
    return *reinterpret_cast<const Vec<T, V> *>(from);
}
template <int V, typename T> static __device__ inline void store(T *to, const Vec<T, V> &v) {
    *reinterpret_cast<Vec<T, V> *>(to) = v;
}

// V elements of floatX or float as floats, and back; more than 16 bytes take several loads or stores.
template <int V, typename T> static __device__ inline void load_floats(float (&x)[V], const T *from) {
    constexpr int P = V * sizeof(T) > 16 ? 16 / sizeof(T) : V;
    for (int v = 0; v < V; v += P) {
        Vec<T, P> piece = load<P>(from + v);
        for (int i = 0; i < P; i++) {
            if constexpr (sizeof(T) == sizeof(float))
                x[v + i] = piece.x[i];
            else
                x[v + i] = to_float(piece.x[i]);
        }
    }
}
template <int V, typename T> static __device__ inline void store_floats(T *to, const float (&x)[V]) {
    constexpr int P = V * sizeof(T) > 16 ? 16 / sizeof(T) : V;
    for (int v = 0; v < V; v += P) {
        Vec<T, P> piece;
        for (int i = 0; i < P; i++) {
            if constexpr (sizeof(T) == sizeof(float))
                piece.x[i] = x[v + i];
            else
                piece.x[i] = to_floatX(x[v + i]);
        }
        store<P>(to + v, piece);
    }
}

// Are these pointers, and the bytes from one row to the next, multiples of 16? (NULL is.)
static inline bool aligned16(size_t row_bytes, const void *a, const void *b = NULL, const void *c = NULL,
                             const void *d = NULL, const void *e = NULL, const void *f = NULL) {
    return ((row_bytes | (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e |
             (uintptr_t)f) &
            15) == 0;
}

// 2^x and e^x: one instruction where results are rounded to bf16.
#define LOG2E 1.442695041f
static __device__ inline float power_of_2(float x) {
#ifdef PRECISION_BF16
    return exp2_approx(x);
#else
    return exp2f(x);
#endif
}
static __device__ inline float exp_of(float x) {
#ifdef PRECISION_BF16
    return exp2_approx(x * LOG2E);
#else
    return expf(x);
#endif
}

// x as a matrix product takes it: rounded to bf16 in bf16 builds, and where `round` (matmul_inputs_bf16) says so.
static __device__ inline float product_input(float x, bool round) {
    return sizeof(floatX) == sizeof(bf16) || round ? bf16_to_float(float_to_bf16(x)) : x;
}
#ifdef PRECISION_BF16
static __device__ inline float product_input(bf16 x, bool) {
    return bf16_to_float(x);
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Sums and maxima: every thread gets the result.
template <typename T> static __device__ inline T warp_sum(T x) { // float or double
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
    return x;
}

static __device__ inline float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lanes));
    return x;
}

// All threads of the block take part; one sum at a time may use `shared` [warps], and a barrier must stand between two.
template <typename T> static __device__ inline T block_sum(T x, T *shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_sum(IN_RANGE(lane < warps) ? shared[lane] : T(0));
}

static __device__ inline float block_max(float x, float *shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_max(IN_RANGE(lane < warps) ? shared[lane] : -INFINITY);
}

#endif

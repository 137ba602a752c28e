// Small kernels for tests/test_emu_check.py. Each is there twice: with one fault (F), which the checked emulator must find
// and name, and without it, when it must be silent. The counted ones below do what can be counted by hand.
#include "kernels/cuda.cuh"
#include "kernels/ptx.cuh"

enum { THREADS = 64 };

// ---- races -------------------------------------------------------------------------------------------------------------
template <bool F> static __global__ void barrier_missing(float *out) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = (float)threadIdx.x;
    if (!F) __syncthreads();
    out[threadIdx.x] = x[THREADS - 1 - threadIdx.x];
}

// the next round overwrites what is still read
template <bool F> static __global__ void barrier_too_late(float *out) {
    __shared__ float x[THREADS];
    float sum = 0;
    for (int i = 0; i < 3; i++) {
        x[threadIdx.x] = (float)(i + threadIdx.x);
        __syncthreads();
        sum += x[THREADS - 1 - threadIdx.x];
        if (!F) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

template <bool F> static __global__ void syncwarp_missing(float *out) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = (float)threadIdx.x;
    if (!F) __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1];
}

template <bool F> static __global__ void shuffle_for_syncwarp(float *out) { // it orders no memory
    __shared__ float x[THREADS];
    x[threadIdx.x] = (float)threadIdx.x;
    float y = __shfl_xor_sync(0xffffffff, (float)threadIdx.x, 1);
    if (!F) __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1] + y;
}

// lanes 0-15 meet, and read of 0-15 (or of 16-31)
template <bool F> static __global__ void half_of_a_warp(float *out) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = (float)threadIdx.x;
    if (threadIdx.x % WARP < 16) {
        __syncwarp(0xffff);
        out[threadIdx.x] = x[threadIdx.x ^ (F ? 16 : 8)];
    }
}

template <bool F> static __global__ void syncwarp_for_barrier(float *out) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = (float)threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ (F ? 32 : 16)];
}

template <bool F> static __global__ void two_blocks_write_one_place(float *out) {
    if (threadIdx.x == 0) out[F ? 0 : blockIdx.x] = 1;
}

template <bool F> static __global__ void a_block_reads_what_another_writes(float *out) {
    if (blockIdx.x == 0)
        out[threadIdx.x] = 1;
    else
        out[threadIdx.x + THREADS] = out[threadIdx.x + (F ? 0 : THREADS)];
}

// Every block has shared memory of its own. The fault is in a header's function: the message has the line that calls it.
template <bool F> static __global__ void two_sums(float *out) {
    __shared__ float shared[32];
    float sum = block_sum(1.0f, shared);
    if (!F) __syncthreads();
    sum += block_sum(2.0f, shared);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// A warp reads, then the lane that was first writes. The others have read by then: a shuffle brings them there, and orders no
// memory.
template <bool F> static __global__ void first_reader_writes(float *out, int *turn) {
    __shared__ float x[1];
    if (threadIdx.x == 0) x[0] = 1;
    __syncthreads();
    bool first = false;
    float y = 0;
    if (threadIdx.x < WARP) {
        first = atomicAdd(turn, 1) == 0;
        y = x[0];
        y += __shfl_xor_sync(0xffffffff, y, 1);
    }
    if (!F) __syncthreads();
    if (first) x[0] = 2;
    out[threadIdx.x] = y;
}
// Its own warp is in order with it, the other is not.
template <bool F> static __global__ void first_of_two_warps_writes(float *out, int *turn) {
    __shared__ float x[1];
    if (threadIdx.x == 0) x[0] = 1;
    __syncthreads();
    bool first = atomicAdd(turn, 1) == 0;
    float y = x[0];
    __syncwarp();
    if (!F) __syncthreads();
    if (first) x[0] = 2;
    out[threadIdx.x] = y;
}

// memcpy, of a size that only the launch knows, and of a long one
template <bool F> static __global__ void memcpy_races(float *out, int n) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = 1;
    if (!F) __syncthreads();
    if (threadIdx.x == 0) memcpy(out, x, (size_t)n * sizeof *x);
}
template <bool F> static __global__ void long_memcpy_races(float *out) {
    __shared__ float x[THREADS];
    x[threadIdx.x] = 1;
    if (!F) __syncthreads();
    if (threadIdx.x == 0) memcpy(out, x, sizeof x);
}

// 2-byte neighbours do not touch; a word does
template <bool F> static __global__ void half_words(unsigned short *out) {
    out[threadIdx.x] = 1;
    if (F && threadIdx.x % 2 == 0) *(uint32_t *)&out[threadIdx.x] = 2;
}

template <bool F> static __global__ void plain_beside_atomic(int *out) {
    atomicAdd(out, 1);
    if (F && threadIdx.x == 0) *out = 0;
}

// ---- cp.async ----------------------------------------------------------------------------------------------------------
template <bool F> static __global__ void wait_missing(float *out, const float *in) {
    __shared__ __align__(16) float x[4 * THREADS];
    cp_async_16(&x[4 * threadIdx.x], &in[4 * threadIdx.x]);
    cp_async_commit();
    if (!F) cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x];
}

template <bool F> static __global__ void barrier_after_wait_missing(float *out, const float *in) {
    __shared__ __align__(16) float x[4 * THREADS];
    cp_async_16(&x[4 * threadIdx.x], &in[4 * threadIdx.x]);
    cp_async_commit();
    cp_async_wait<0>();
    if (!F) __syncthreads();
    out[threadIdx.x] = x[threadIdx.x];
}

// two groups, the older is awaited
template <bool F> static __global__ void wait_for_too_few(float *out, const float *in) {
    __shared__ __align__(16) float x[2][4 * THREADS];
    for (int i = 0; i < 2; i++) {
        cp_async_16(&x[i][4 * threadIdx.x], &in[4 * threadIdx.x]);
        cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    out[threadIdx.x] = x[F ? 1 : 0][threadIdx.x];
}

template <bool F> static __global__ void buffer_refilled_too_early(float *out, const float *in) {
    __shared__ __align__(16) float x[2][4 * THREADS];
    float sum = 0;
    cp_async_16(&x[0][4 * threadIdx.x], &in[4 * threadIdx.x]);
    cp_async_commit();
    for (int i = 0; i < 4; i++) {
        cp_async_wait<0>();
        if (!F) __syncthreads();
        if (i < 3) cp_async_16(&x[(i + 1) % 2][4 * threadIdx.x], &in[4 * threadIdx.x]);
        cp_async_commit();
        if (F) __syncthreads();
        sum += x[i % 2][THREADS - 1 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

// ---- where -------------------------------------------------------------------------------------------------------------
template <bool F> static __global__ void read_past_the_end(float *out, const float *in, int n) {
    out[threadIdx.x] = in[n - THREADS + threadIdx.x + (F ? 1 : 0)];
}
template <bool F> static __global__ void write_past_the_end(float *out, int n) {
    out[n - THREADS + threadIdx.x + (F ? 1 : 0)] = 0;
}
template <bool F> static __global__ void vector_past_the_end(float *out, int n) { // the last vector sticks out
    Vec<float, 4> zero = {};
    if (threadIdx.x == 0) store(&out[n / 4 * 4 - (F ? 0 : 4)], zero);
}
template <bool F> static __global__ void write_before_the_start(float *out) {
    out[(int)threadIdx.x - (F ? 1 : 0)] = 0;
}
template <bool F> static __global__ void past_dynamic_shared_memory(float *out) {
    extern __shared__ __align__(128) unsigned char smem[];
    float *x = (float *)smem;
    x[threadIdx.x + (F ? 1 : 0)] = 1;
    out[threadIdx.x] = 1;
}
template <bool F> static __global__ void memset_past_the_end(float *out, int n) {
    if (threadIdx.x == 0) memset(out, 0, (size_t)(n + (F ? 1 : 0)) * sizeof *out);
}
static __global__ void __launch_bounds__(THREADS) other_kernel(float **its) {
    __shared__ float x[THREADS];
    if (threadIdx.x == 0) *its = x;
}
static __device__ float *of_a_function() { // whose array any kernel may use
    __shared__ float x[THREADS];
    return x;
}
template <bool F> static __global__ void array_of_another_kernel(float *out, float *const *its) {
    float *x = F ? *its : of_a_function();
    x[threadIdx.x] = 1;
    out[threadIdx.x] = x[threadIdx.x];
}
template <bool F> static __global__ void misaligned(float *out) {
    Vec<float, 4> zero = {};
    if (threadIdx.x == 0) store(&out[F ? 2 : 4], zero);
}
template <bool F> static __global__ void host_memory(float *out, const float *host, const float *device) {
    out[threadIdx.x] = (F ? host : device)[threadIdx.x];
}
template <bool F> static __global__ void freed_memory(float *out, const float *before, const float *now) {
    out[threadIdx.x] = (F ? before : now)[threadIdx.x];
}

// ---- written -----------------------------------------------------------------------------------------------------------
template <bool F> static __global__ void unwritten_shared(float *out) {
    __shared__ float x[2 * THREADS];
    x[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x + (F ? THREADS : 0)];
}
template <bool F> static __global__ void unwritten_global(float *out, const float *fresh, const float *in) {
    out[threadIdx.x] = (F ? fresh : in)[threadIdx.x];
}
// 3 of 4 written: may be masked. none: not.
template <bool F> static __global__ void partly_written_vector(float *out) {
    if (threadIdx.x) return;
    for (int i = 0; i < 3; i++) out[i] = 1;
    Vec<float, 4> x = load<4>(&out[F ? 4 : 0]);
    out[8] = x.x[0];
}

// ---- counted -----------------------------------------------------------------------------------------------------------
template <int Stride> static __global__ void words(float *out) { // 32 words of shared memory, Stride apart
    __shared__ float x[32 * 32];
    x[Stride * threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x] = x[Stride * (threadIdx.x ^ 1)];
}
static __global__ void one_word(float *out) { // all read the same
    __shared__ float x[1];
    if (threadIdx.x == 0) x[0] = 1;
    __syncwarp();
    out[threadIdx.x] = x[0];
}
static __global__ void vectors(float *out,
                               const float *in) { // 16 bytes a lane, from global to shared memory and on
    __shared__ Vec<float, 4> x[32];
    x[threadIdx.x] = load<4>(&in[4 * threadIdx.x]);
    store(&out[4 * threadIdx.x], x[threadIdx.x]);
}
// ldmatrix of 32 rows of 128 bytes, chunk `4` of each; swizzled: row r has chunk c at c ^ (r % 8).
template <bool Swizzled> static __global__ void matrices(float *out) {
    __shared__ __align__(16) uint32_t x[32][32];
    int row = (int)threadIdx.x, chunk = Swizzled ? 4 ^ (row % 8) : 4;
    for (int i = 0; i < 32; i++) x[i][row] = 0;
    __syncwarp();
    uint32_t r[4];
    ldmatrix_x4(r, &x[row][4 * chunk]);
    out[row] = (float)r[0];
}
template <int Stride> static __global__ void strided(float *out, const float *in) {
    out[threadIdx.x] = in[Stride * threadIdx.x];
}
static __global__ void rows(float *out, const float *in,
                            const float *weight) { // each of 4 blocks reads the weight
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    out[i] = in[i] * weight[threadIdx.x];
    __syncthreads();
}

// ---- called from Python ------------------------------------------------------------------------------------------------
enum { N = 1023 };
static float *array(bool written) { // of N zeros, or of nothing yet
    void *p;
    cuda_check(cudaMalloc(&p, N * sizeof(float)));
    if (written) cuda_check(cudaMemset(p, 0, N * sizeof(float)));
    return (float *)p;
}
static const char *what_the_device_says() {
    cudaError_t error = cudaDeviceSynchronize();
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// Runs a kernel with its fault or without → what the device says then, "" if all is well, NULL: no such kernel.
#define RUN(kernel, grid, bytes, ...)                                                                          \
    if (!strcmp(name, #kernel)) {                                                                              \
        if (fault)                                                                                             \
            kernel<true><<<grid, THREADS, bytes>>>(__VA_ARGS__);                                               \
        else                                                                                                   \
            kernel<false><<<grid, THREADS, bytes>>>(__VA_ARGS__);                                              \
        return what_the_device_says();                                                                         \
    }
extern "C" const char *emu_fault(const char *name, bool fault) {
    static float host[THREADS];
    float *out = array(true), *in = array(true), *fresh = array(false), *before = array(true);
    cuda_check(cudaFree(before));
    RUN(barrier_missing, 1, 0, out)
    RUN(barrier_too_late, 1, 0, out)
    RUN(syncwarp_missing, 1, 0, out)
    RUN(shuffle_for_syncwarp, 1, 0, out)
    RUN(half_of_a_warp, 1, 0, out)
    RUN(syncwarp_for_barrier, 1, 0, out)
    RUN(two_blocks_write_one_place, 2, 0, out)
    RUN(a_block_reads_what_another_writes, 2, 0, out)
    RUN(two_sums, 2, 0, out)
    RUN(first_reader_writes, 1, 0, out, (int *)in)
    RUN(first_of_two_warps_writes, 1, 0, out, (int *)in)
    RUN(memcpy_races, 1, 0, out, THREADS)
    RUN(long_memcpy_races, 1, 0, out)
    RUN(half_words, 1, 0, (unsigned short *)out)
    RUN(plain_beside_atomic, 2, 0, (int *)out)
    RUN(wait_missing, 1, 0, out, in)
    RUN(barrier_after_wait_missing, 1, 0, out, in)
    RUN(wait_for_too_few, 1, 0, out, in)
    RUN(buffer_refilled_too_early, 1, 0, out, in)
    RUN(read_past_the_end, 1, 0, out, in, N)
    RUN(write_past_the_end, 1, 0, out, N)
    RUN(vector_past_the_end, 1, 0, out, N)
    RUN(write_before_the_start, 1, 0, out)
    RUN(past_dynamic_shared_memory, 1, THREADS * sizeof(float), out)
    RUN(memset_past_the_end, 1, 0, out, N)
    other_kernel<<<1, THREADS>>>((float **)in);
    RUN(array_of_another_kernel, 1, 0, out, (float **)in)
    cuda_check(cudaMemset(in, 0, N * sizeof *in));
    RUN(misaligned, 1, 0, out)
    RUN(host_memory, 1, 0, out, host, in)
    RUN(freed_memory, 1, 0, out, before, in)
    RUN(unwritten_shared, 1, 0, out)
    RUN(unwritten_global, 1, 0, out, fresh, in)
    RUN(partly_written_vector, 1, 0, fresh)
    return NULL;
}

// Runs one of the counted kernels: one warp, or 4 blocks of 64 threads for `rows`.
#define COUNT(label, kernel, grid, threads, ...)                                                               \
    if (!strcmp(name, label)) {                                                                                \
        kernel<<<grid, threads>>>(__VA_ARGS__);                                                                \
        return what_the_device_says();                                                                         \
    }
extern "C" const char *emu_counted(const char *name) {
    float *out = array(true), *in = array(true), *weight = array(true);
    COUNT("words 1", words<1>, 1, 32, out)
    COUNT("words 2", words<2>, 1, 32, out)
    COUNT("words 31", words<31>, 1, 32, out)
    COUNT("words 32", words<32>, 1, 32, out)
    COUNT("one word", one_word, 1, 32, out)
    COUNT("vectors", vectors, 1, 32, out, in)
    COUNT("matrices", matrices<false>, 1, 32, out)
    COUNT("matrices, swizzled", matrices<true>, 1, 32, out)
    COUNT("strided 1", strided<1>, 1, 32, out, in)
    COUNT("strided 2", strided<2>, 1, 32, out, in)
    COUNT("strided 8", strided<8>, 1, 32, out, in)
    COUNT("rows", rows, 4, 64, out, in, weight)
    return NULL;
}

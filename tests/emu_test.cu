// Small kernels for tests/test_emu.py: each does one thing that dev/emu must do, or must refuse.
#include <stdlib.h>
#include <string>
#include "kernels/cuda.cuh"

cudaStream_t compute_stream;

static std::string said; // what the last test has to report

// The error of all work so far, if there is one; it ends here.
static std::string trouble() {
    cudaError_t at_once = cudaGetLastError(), error = at_once ? at_once : cudaDeviceSynchronize();
    return error ? std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error) : "fine";
}

template <typename T> static T *device(size_t n) {
    T *p;
    cuda_check(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <typename T> static T *device(size_t n, const T *host) {
    T *p = device<T>(n);
    cuda_check(cudaMemcpy(p, host, n * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <typename T> static void report(const T *p, size_t n) {
    T *host = (T *)malloc(n * sizeof(T));
    cuda_check(cudaMemcpy(host, p, n * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) said += (i ? " " : "") + std::to_string(host[i]);
    free(host);
}
#define TEST(name)                                                                                             \
    static void name();                                                                                        \
    struct name##_ {                                                                                           \
        name##_() {                                                                                            \
            add(#name, name);                                                                                  \
        }                                                                                                      \
    } name##_;                                                                                                 \
    static void name()
struct Test {
    const char *name;
    void (*run)();
} tests[100];
static int count;
static void add(const char *name, void (*run)()) {
    tests[count++] = {name, run};
}

extern "C" const char *emu_test(const char *name) {
    said.clear();
    for (int i = 0; i < count; i++)
        if (tests[i].name == std::string(name)) return tests[i].run(), said.c_str();
    return "no such test";
}

// ---- indices, arguments ------------------------------------------------------------------------------------------------
struct Pair {
    double a;
    char b;
};
template <typename T, int V>
static __global__ void __launch_bounds__(1024) index_kernel(T *out, Pair pair, short bias) {
    size_t block = blockIdx.x + gridDim.x * (blockIdx.y + (size_t)gridDim.y * blockIdx.z);
    size_t thread = threadIdx.x + blockDim.x * (threadIdx.y + (size_t)blockDim.y * threadIdx.z);
    size_t threads = (size_t)blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] += (T)(block * threads + thread) * V + (T)pair.a + pair.b + bias;
}
TEST(indices) {
    int *out = device<int>(3 * 4 * 5 * 2 * 3 * 7);
    cuda_check(cudaMemset(out, 0, 2520 * sizeof(int)));
    Pair pair = {10, 2};
    index_kernel<int, 2><<<dim3(3, 4, 5), dim3(2, 3, 7), 0, compute_stream>>>(out, pair, -7);
    pair.a = 1000; // arguments were copied at the launch
    report(out, 2520);
}

// ---- order -------------------------------------------------------------------------------------------------------------
static __global__ void order_kernel(unsigned *next, unsigned *out) {
    out[atomicAdd(next, 1u)] = blockIdx.x * 1000 + threadIdx.x;
    __syncthreads();
    out[atomicAdd(next, 1u)] = blockIdx.x * 1000 + threadIdx.x;
}
TEST(order) {
    unsigned *next = device<unsigned>(1), *out = device<unsigned>(2 * 6 * 80);
    cuda_check(cudaMemset(next, 0, sizeof *next));
    order_kernel<<<6, 80, 0, compute_stream>>>(next, out);
    report(out, 2 * 6 * 80);
}

// ---- where threads meet ------------------------------------------------------------------------------------------------
static __global__ void barrier_kernel(int *out) {
    __shared__ int x[96];
    x[threadIdx.x] = threadIdx.x + 1;
    __syncthreads(); // all have written
    int y = x[95 - threadIdx.x];
    __syncthreads(); // all have read
    x[threadIdx.x] = -1;
    out[threadIdx.x] = y;
    x[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0) + 100 * __syncthreads_or(threadIdx.x == 50) +
                     1000 * __syncthreads_and(threadIdx.x != 50);
    out[96 + threadIdx.x] = x[threadIdx.x];
}
TEST(barriers) {
    int *out = device<int>(192);
    barrier_kernel<<<1, 96, 0, compute_stream>>>(out);
    report(out, 192);
}

static __global__ void shuffle_kernel(int *out) {
    int x = threadIdx.x * threadIdx.x, i = threadIdx.x;
    unsigned half = i % 32 < 16 ? 0xffff : 0xffff0000;
    out[i] = __shfl_sync(0xffffffff, x, 5), out += 64;
    out[i] = __shfl_sync(0xffffffff, x, i + 3, 8), out += 64;
    out[i] = __shfl_up_sync(0xffffffff, x, 3, 16), out += 64;
    out[i] = __shfl_down_sync(0xffffffff, x, 3, 16), out += 64;
    out[i] = __shfl_xor_sync(0xffffffff, x, 9, 8), out += 64;
    out[i] = __shfl_xor_sync(0xffffffff, x, 6), out += 64;
    if (i % 32 < 16)
        out[i] = __shfl_xor_sync(half, x, 1); // halves of a warp apart
    else
        out[i] = __shfl_down_sync(half, x, 2, 16);
    out += 64;
    out[i] = (int)(__shfl_sync(0xffffffff, x * 4294967296.0 * 3 + 1, 7) / 4294967296.0), out += 64; // 64 bits
    out[i] = __ballot_sync(half, i % 5 == 0), out += 64;
    out[i] = __any_sync(0xffffffff, i == 40) + 2 * __all_sync(0xffffffff, i < 32), out += 64;
    out[i] = __match_any_sync(0xffffffff, i % 7), out += 64;
    out[i] = __reduce_max_sync(0xffffffff, -x), out += 64;
    out[i] = __reduce_add_sync(half, x);
}
TEST(shuffles) {
    int *out = device<int>(13 * 64);
    shuffle_kernel<<<1, 64, 0, compute_stream>>>(out);
    report(out, 13 * 64);
}

static __global__ void partial_kernel(int *out) { // 40 threads: the last warp has 8
    int x = threadIdx.x;
    __syncwarp(); // a small warp
    x += __shfl_xor_sync(0xffffffff, x, 1);
    __syncthreads();
    out[threadIdx.x] = x;
}
TEST(partial_warp) {
    int *out = device<int>(40);
    partial_kernel<<<1, 40, 0, compute_stream>>>(out);
    report(out, 40);
}

static __global__ void atomics_kernel(int *i, unsigned *u, unsigned long long *l, float *f) {
    atomicAdd(i, 2), atomicSub(i + 1, 3), atomicMax(i + 2, (int)threadIdx.x - 5),
        atomicMin(i + 3, (int)threadIdx.x - 5);
    atomicOr(u, 1u << threadIdx.x), atomicAnd(u + 1, ~(1u << threadIdx.x)), atomicXor(u + 2, threadIdx.x),
        atomicExch(u + 3, 7);
    atomicCAS(u + 4, threadIdx.x, threadIdx.x + 1);
    atomicAdd(l, 1ull << 40), atomicAdd(f, 0.5f);
}
TEST(atomics) {
    int *i = device<int>(4);
    unsigned *u = device<unsigned>(5);
    unsigned long long *l = device<unsigned long long>(1);
    float *f = device<float>(1);
    cudaMemset(i, 0, 16), cudaMemset(u, 0, 20), cudaMemset(l, 0, 8), cudaMemset(f, 0, 4);
    atomics_kernel<<<1, 10, 0, compute_stream>>>(i, u, l, f);
    report(i, 4), said += "; ", report(u, 5), said += "; ", report(l, 1), said += "; ", report(f, 1);
}

static __global__ void divergent_kernel(int which) {
    if (which == 0) {
        if (threadIdx.x < 32)
            __syncthreads();
        else
            __syncthreads();
    }
    if (which == 1 && threadIdx.x == 3) return;
    if (which == 2 && threadIdx.x >= 32) __syncwarp();
    if (which == 3) {
        if (threadIdx.x % 2)
            __syncwarp();
        else
            __shfl_sync(0xffffffff, 1, 0);
    }
    if (which == 4) {
        if (threadIdx.x % 2)
            __syncwarp(0xaaaaaaaa);
        else
            __syncwarp(0x5fffffff);
    }
    if (which == 5 && threadIdx.x == 0) __syncwarp(0xfffffffe);
    if (which == 6 && threadIdx.x < 16) __shfl_sync(0xffff, 1, 20);
    if (which == 7 && threadIdx.x == 1) __syncwarp(0x3);
    if (which == 8 && threadIdx.x == 63) __shfl_sync(0xffffffff, 1, 0);
    __syncthreads();
    if (which == 9 && threadIdx.x < 10) return;
    if (which == 9) __syncwarp();
}
static void divergent(int which) {
    divergent_kernel<<<1, 64, 0, compute_stream>>>(which);
    said = trouble();
}
TEST(nothing_divergent) {
    divergent(-1);
}
TEST(two_barriers) {
    divergent(0);
}
TEST(ended_before_barrier) {
    divergent(1);
}
TEST(a_warp_meets_alone) {
    divergent(2);
}
TEST(warp_meets_in_two_places) {
    divergent(3);
}
TEST(masks_overlap) {
    divergent(4);
}
TEST(mask_lacks_itself) {
    divergent(5);
}
TEST(shuffle_from_outside) {
    divergent(6);
}
TEST(half_meets_barrier) {
    divergent(7);
}
TEST(lane_alone) {
    divergent(8);
}
TEST(ended_before_syncwarp) {
    divergent(9);
}

// ---- shared memory -----------------------------------------------------------------------------------------------------
template <typename T> static __device__ inline T from_template(int i) {
    __shared__ T x[40];
    T old = x[i];
    x[i] = (T)i;
    return old;
}
static __global__ void poison_kernel(unsigned *out) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ unsigned x[32];
    unsigned *dynamic = (unsigned *)smem, i = threadIdx.x;
    out[blockIdx.x] &= x[i] & dynamic[i] & from_template<unsigned>((int)i) & from_template<int>((int)i + 8);
    x[i] = dynamic[i] = 0;
}
TEST(shared_memory_is_poisoned) {
    unsigned *out = device<unsigned>(3); // which is poison too
    poison_kernel<<<3, 32, 128, compute_stream>>>(out);
    report(out, 3);
}

static __global__ void smem_kernel(size_t byte) {
    extern __shared__ __align__(128) unsigned char smem[];
    smem[byte] = 1;
}
template <int V> static __global__ void big_kernel(float *out) {
    extern __shared__ __align__(128) unsigned char smem[];
    if (threadIdx.x == 0) ((float *)smem)[0] = V, *out = ((float *)smem)[0];
}
TEST(past_dynamic_shared_memory) {
    smem_kernel<<<1, 1, 1000, compute_stream>>>(999);
    said = trouble() + "; ";
    smem_kernel<<<1, 1, 1000, compute_stream>>>(1000);
    said += trouble();
}
TEST(shared_memory_limits) {
    float *out = device<float>(1);
    auto launch = [=](size_t size) {
        big_kernel<1><<<1, 1, size, compute_stream>>>(out);
        said += trouble() + "; ";
    };
    cuda_check(
        cudaFuncSetAttribute(big_kernel<2>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000)); // not of <1>
    launch(48 * 1024), launch(48 * 1024 + 1);
    cuda_check(cudaFuncSetAttribute(big_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000));
    launch(100000), launch(100001);
    said += cudaFuncSetAttribute(big_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024)
                ? "no "
                : "yes ";
    said += cudaFuncSetAttribute(big_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1)
                ? "no"
                : "yes";
}

// ---- launches ----------------------------------------------------------------------------------------------------------
static __global__ void no_kernel() {
}
TEST(launch_limits) {
    auto launch = [](dim3 grid, dim3 block) {
        no_kernel<<<grid, block, 0, compute_stream>>>();
        said += std::string(cudaGetErrorName(cudaGetLastError())) + " ";
    };
    launch(1, 1024), launch(1, 1025), launch(1, dim3(32, 33)), launch(0, 1), launch(1, 0),
        launch(dim3(1, 65536), 1);
    launch(dim3(1, 1, 65536), 1), launch(dim3(1, 65535), 1), launch(100000, 1), launch(1, dim3(1, 1, 65));
    said += trouble();
}

static __global__ void __launch_bounds__(96, 2) bounded_kernel() {
}
template <int V>
static __global__ void __launch_bounds__(64 + 1) bounded_template_kernel() { // its name on the next line
}
TEST(launch_bounds) {
    for (unsigned threads : {65, 66, 96, 97}) {
        bounded_kernel<<<1, threads, 0, compute_stream>>>();
        said += trouble() + "; ";
        bounded_template_kernel<1><<<1, threads, 0, compute_stream>>>();
        said += trouble() + "; ";
    }
}

extern "C" void emu_set_arch(int sm);
TEST(
    shared_memory_of_cards) { // for each: the most a block may have; may it be asked for, and launched, and one byte more?
    float *out = device<float>(1);
    for (int sm : {80, 86, 89, 90, 120}) {
        int most;
        emu_set_arch(sm);
        cuda_check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        said += std::to_string(most);
        for (int size : {most, most + 1}) {
            bool asked =
                !cudaFuncSetAttribute(big_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
            if (!asked) { // as if it had been, on a larger card
                emu_set_arch(90);
                cudaFuncSetAttribute(big_kernel<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
                emu_set_arch(sm);
            }
            cudaGetLastError();
            big_kernel<1><<<1, 1, (size_t)size, compute_stream>>>(out);
            said += std::string(asked ? " asked" : " refused") + (trouble() == "fine" ? " runs" : " fails");
        }
        said += "; ";
    }
}

static __global__ void write_kernel(char *p) {
    *p = 1;
}
static void write(char *p) {
    write_kernel<<<1, 1, 0, compute_stream>>>(p);
    said += trouble();
}
TEST(write_past_the_end) {
    write(device<char>(1000) + 1000);
}
TEST(write_far_past_the_end) {
    char *p = device<char>(1000);
    device<char>(1000);
    write(p + 1024);
}
static __global__ void two_faults_kernel(char *p) {
    p[1000] = 1;
    *(volatile char *)(uintptr_t)p[1001] = 1; // (char)0xff
}
TEST(first_of_two_faults) {
    two_faults_kernel<<<1, 1, 0, compute_stream>>>(device<char>(1000));
    said = trouble();
}
TEST(write_before_the_start) {
    write(device<char>(1000) - 1);
}
TEST(write_to_null) {
    write(NULL);
}
static __global__ void vector_kernel(float *p) {
    *(float4 *)p = make_float4(p[4], p[5], p[6], p[7]);
}
TEST(misaligned) {
    float *p = device<float>(100);
    vector_kernel<<<1, 1, 0, compute_stream>>>(p);
    said = trouble() + "; ";
    vector_kernel<<<1, 1, 0, compute_stream>>>(p + 1);
    said += trouble();
}
TEST(write_to_freed) {
    char *p = device<char>(1000);
    cuda_check(cudaFree(p));
    write(p);
}
static __global__ void count_kernel(int *out) {
    int threads = __syncthreads_count(1);
    if (threadIdx.x == 0) *out = threads;
}
TEST(reset) {
    barriers(); // leaves idle fibers
    write_kernel<<<1, 1, 0, compute_stream>>>(NULL);
    write_kernel<<<1, 1, 0, compute_stream>>>(NULL); // never runs
    said = trouble() + "; ";
    char *p = NULL;
    said += cudaMalloc(&p, 1) == cudaErrorLaunchFailure && cudaGetLastError() == cudaErrorLaunchFailure
                ? "sticky; "
                : "not sticky; ";
    cudaDeviceReset();
    divergent_kernel<<<1, 64, 0, compute_stream>>>(1); // fibers are left in the middle
    said += trouble() + "; ";
    cudaDeviceReset();
    int *count = device<int>(1);
    count_kernel<<<1, 1024, 0, compute_stream>>>(count);
    report(count, 1);
}
static __device__ __noinline__ int deeper(int n) {
    volatile char memory[1000];
    memory[n % 1000] = (char)n;
    return n < 0 ? 0 : deeper(n + 1) + memory[n % 1000];
}
static __global__ void deep_kernel(int *out) {
    *out = deeper(0);
}
TEST(stack_overflow) {
    deep_kernel<<<1, 1, 0, compute_stream>>>(device<int>(1));
    said = trouble();
}

// ---- memory ------------------------------------------------------------------------------------------------------------
TEST(host_access_to_new) {
    said = std::to_string(*(volatile int *)device<int>(1));
}
TEST(host_access) {
    int host = 1, *p = device<int>(1, &host);
    said = std::to_string(*(volatile int *)p);
}
TEST(copies) {
    char host[100] = {1, 2, 3}, *p = device(100, host), *q = device<char>(100);
    auto copy = [](void *to, const void *from, size_t n, cudaMemcpyKind kind) {
        said += cudaMemcpy(to, from, n, kind) ? "no " : "yes ";
        cudaGetLastError();
    };
    copy(q, p, 100, cudaMemcpyDeviceToDevice), copy(host, q, 100, cudaMemcpyDeviceToHost),
        copy(host, p, 50, cudaMemcpyDefault);
    copy(p, host, 101, cudaMemcpyHostToDevice), copy(p + 1, host, 100, cudaMemcpyHostToDevice),
        copy(host, p, 101, cudaMemcpyDeviceToHost);
    copy(p, host, 100, cudaMemcpyDeviceToHost), copy(host, p, 100, cudaMemcpyHostToDevice),
        copy(host + 50, host, 50, cudaMemcpyDeviceToDevice);
    copy(p - 1, host, 1, cudaMemcpyHostToDevice);
    said += cudaMemset(p, 0, 101) ? "no " : "yes ";
    said += cudaFree(p + 1) ? "no " : "yes ";
    said += cudaFree(p) ? "no " : "yes ";
    said += cudaFree(p) ? "no " : "yes ";
    said += std::to_string(host[2]);
}
TEST(new_memory) {
    said = std::to_string((uintptr_t)device<char>(1) % 256 + (uintptr_t)device<double>(1000) % 256) + " ";
    report(device<int>(1), 1);
}

// ---- streams and events ------------------------------------------------------------------------------------------------
static __global__ void note_kernel(unsigned *next, unsigned *out, unsigned what) {
    out[(*next)++] = what;
}
static unsigned *next_, *notes;
static void start_notes() {
    next_ = device<unsigned>(1), notes = device<unsigned>(32);
    cuda_check(cudaMemset(next_, 0, 4));
    cuda_check(cudaDeviceSynchronize());
}
static void note(cudaStream_t stream, unsigned what) {
    note_kernel<<<1, 1, 0, stream>>>(next_, notes, what);
    launched("note");
}
TEST(streams) { // 1x and 2x: two streams; 3x: the default one; 4x: one that does not mind it
    cudaStream_t one, two, free;
    cuda_check(cudaStreamCreate(&one)), cuda_check(cudaStreamCreateWithFlags(&two, cudaStreamDefault));
    cuda_check(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
    start_notes();
    note(free, 40), note(one, 10), note(two, 20), note(one, 11), note(two, 21), note(NULL, 30), note(one, 12),
        note(two, 22), note(free, 41);
    cuda_check(cudaDeviceSynchronize());
    report(notes, 9);
    cuda_check(cudaStreamDestroy(one)), cuda_check(cudaStreamDestroy(two)), cuda_check(cudaStreamDestroy(free));
}
TEST(events) { // 20 waits for 11
    cudaStream_t one, two;
    cudaEvent_t event;
    cuda_check(cudaStreamCreate(&one)), cuda_check(cudaStreamCreate(&two)), cuda_check(cudaEventCreate(&event));
    start_notes();
    note(one, 10), note(one, 11);
    cuda_check(cudaEventRecord(event, one));
    cuda_check(cudaStreamWaitEvent(two, event));
    note(two, 20), note(one, 12);
    said += cudaEventQuery(event) == cudaErrorNotReady && cudaStreamQuery(one) == cudaErrorNotReady
                ? "not ready; "
                : "ready; ";
    cuda_check(cudaEventSynchronize(event));
    said += cudaEventQuery(event) == cudaSuccess ? "ready; " : "not ready; ";
    report(notes, 4);
    cuda_check(cudaEventDestroy(event)), cuda_check(cudaStreamDestroy(one)), cuda_check(cudaStreamDestroy(two));
}
TEST(deferred) { // a copy reads the host's memory when its turn comes
    cudaStream_t stream;
    cuda_check(cudaStreamCreate(&stream));
    int host = 1, *p = device<int>(1);
    cuda_check(cudaMemcpyAsync(p, &host, 4, cudaMemcpyHostToDevice, stream));
    host = 2;
    cuda_check(cudaStreamSynchronize(stream));
    report(p, 1);
}

static cudaStream_t both[2]; // the first one made is where a program computes
static void start_both() {
    cuda_check(cudaStreamCreateWithFlags(&both[0], cudaStreamNonBlocking));
    cuda_check(cudaStreamCreateWithFlags(&both[1], cudaStreamNonBlocking));
    start_notes();
}
TEST(moods) { // 1x computes, 2x is another stream, which waits for 11
    cudaEvent_t event;
    start_both(), cuda_check(cudaEventCreate(&event));
    note(both[0], 10), note(both[1], 20), note(both[0], 11);
    cuda_check(cudaEventRecord(event, both[0]));
    note(both[1], 21), note(both[0], 12);
    cuda_check(cudaStreamWaitEvent(both[1], event));
    cuda_check(cudaEventDestroy(event)); // when the last stream has waited for it
    note(both[0], 13), note(both[1], 22);
    cuda_check(cudaDeviceSynchronize());
    report(notes, 7);
}
TEST(
    questions) { // run one piece of work each, until there is none; or, in some moods, only when there were many
    start_both();
    note(both[0], 10), note(both[0], 11), note(both[1], 20);
    int questions = 1;
    while (cudaStreamQuery(both[0]) == cudaErrorNotReady || cudaStreamQuery(both[1]) == cudaErrorNotReady)
        questions++;
    said = std::to_string(questions) + " ";
    cuda_check(cudaStreamDestroy(both[1])), cuda_check(cudaStreamDestroy(both[0]));
    report(notes, 3);
}
TEST(host_access_after_a_question) {
    start_both();
    note(both[0], 10), note(both[0], 11);
    while (cudaStreamQuery(both[0]) == cudaErrorNotReady && *(volatile char *)&said == -1) {
    }
    said = std::to_string(*(volatile unsigned *)notes);
}
// What the compute stream writes (1) is copied on another stream to where it then reads it. With all events, without the first
// or the second one.
static void copied(bool before, bool after) {
    int *a = device<int>(1), *b = device<int>(1), *c = device<int>(1);
    cudaEvent_t e, f;
    start_both(), cuda_check(cudaEventCreate(&e)), cuda_check(cudaEventCreate(&f));
    for (int *p : {a, b, c}) cuda_check(cudaMemset(p, 0, 4));
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemsetAsync(a, 1, 4, both[0]));
    cuda_check(cudaEventRecord(e, both[0]));
    if (before) cuda_check(cudaStreamWaitEvent(both[1], e));
    cuda_check(cudaMemcpyAsync(b, a, 4, cudaMemcpyDeviceToDevice, both[1]));
    cuda_check(cudaEventRecord(f, both[1]));
    if (after) cuda_check(cudaStreamWaitEvent(both[0], f));
    cuda_check(cudaMemcpyAsync(c, b, 4, cudaMemcpyDeviceToDevice, both[0]));
    cuda_check(cudaDeviceSynchronize());
    report(c, 1);
}
TEST(copied_in_order) {
    copied(true, true);
}
TEST(copied_too_early) {
    copied(false, true);
}
TEST(read_too_early) {
    copied(true, false);
}

// ---- guards ------------------------------------------------------------------------------------------------------------
static __global__ void guard_kernel(char *out, int n) {
    int i = (int)threadIdx.x;
    if (IN_RANGE(i < n)) out[i] = (char)i;
}
TEST(guards) {
    char *out = device<char>(60);
    guard_kernel<<<1, 64, 0, compute_stream>>>(out, 60);
    said = trouble();
}

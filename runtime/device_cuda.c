// A GPU as a device: one for each rank, or one that some ranks share.
//
// The host queues its work and runs ahead. What it reads and writes goes through two pieces of pinned memory, by turns, for
// only from there can a GPU copy while the host goes on:
//
//     copy in      host   fills 0 ─ fills 1 ─ waits for 0 ─ fills 0 ─ ...
//                  GPU              copies 0 ────────────── copies 1 ─ ...
//     copy out     the GPU fills one piece while the host empties the other
//
// The host waits by asking, and lets messages go on between two questions. A call of CUDA's that waits would not: the rank
// would serve nobody meanwhile, and two that wait for each other's messages would do so forever.
//
// A moment is an event on the stream. CUDA only tells how long it was from one event to another, in a float, so there is a
// base: an event whose time on the host's clock is known. The two clocks drift apart, by some 10 us a second, and a
// float's milliseconds get coarser; so there is a new base where the host waits for the stream, once a second at most.
// A moment belongs to the base before it: within a step all have the same one, and keep their order.
#include "cuda.h"
#include "device_half.h"
#include "fail.h"
#include "log.h"
#include "kernels/precision.h"
#include <ctype.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 4 << 20, BASES = 16 };

static int gpus, sharers = 1; // that this rank sees; ranks that use the one it has taken
static struct cudaDeviceProp gpu;

static struct {
    void *memory;
    cudaEvent_t done; // with the copy that last used it
} piece[2];
static unsigned turn; // the next piece to use, modulo 2

static struct {
    cudaEvent_t event;
    double at; // on CLOCK_MONOTONIC
} base[BASES];
static unsigned n_bases; // that there were; the last ones are kept

static cudaEvent_t *spare; // events for moments that nobody has
static size_t n_spare, n_events;

// ---- errors and waiting -----------------------------------------------------------------------------------------------
// What CUDA, or another library (error 0), says to a call.
static void refused(const char *file, int line, const char *call, const char *words, int error) {
    static const struct {
        const char *error, *hint;
    } hints[] = {
        {"cudaErrorIllegalAddress",
         "; of an earlier kernel: CUDA_LAUNCH_BLOCKING=1 says which, make DEVICE=emu CHECKED=1 where"},
        {"cudaErrorNoKernelImageForDevice",
         "; built for another card: make clean, and make CUDA_ARCH=-arch=native here"},
    };
    const char *name = cudaGetErrorName((cudaError_t)error), *hint = "";
    if (strcmp(name, "cudaErrorMemoryAllocation") == 0) device_out_of_memory(MEM_LIBRARIES, 0);
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++)
        if (strcmp(name, hints[i].error) == 0) hint = hints[i].hint;
    fail(EXIT_RUNTIME, "%s:%d: %s: %s%s", file, line, call, words, hint);
}

void cuda_checked(cudaError_t error, const char *call, const char *file, int line) {
    if (error != cudaSuccess) refused(file, line, call, cudaGetErrorString(error), (int)error);
}

// What a question that could not be answered yes leaves behind is no error of the next launch.
static bool is_done(cudaError_t answer, const char *call, int line) {
    if (answer == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        cuda_checked(answer, call, __FILE__, line);
    return answer == cudaSuccess;
}

bool cuda_reached(cudaEvent_t event) {
    return is_done(cudaEventQuery(event), "cudaEventQuery(event)", __LINE__);
}

static void pass_time(void) {
    device_while_waiting();
    sched_yield();
}

void cuda_wait(cudaEvent_t event) {
    while (!cuda_reached(event)) pass_time();
}

// Where the stream is empty. Tried again where something came between.
static void take_base(void) {
    unsigned i = n_bases++ % BASES;
    if (!base[i].event) cuda_check(cudaEventCreate(&base[i].event));
    for (int try = 0; try < 5; try++) {
        double before = seconds_now();
        cuda_check(cudaEventRecord(base[i].event, compute_stream));
        while (!cuda_reached(base[i].event)) {
        }
        double after = seconds_now();
        base[i].at = (before + after) / 2;
        if (after - before < 20e-6) break;
    }
}

void device_synchronize(void) {
    while (!is_done(cudaStreamQuery(compute_stream), "cudaStreamQuery(compute_stream)", __LINE__)) pass_time();
    if (seconds_now() - base[(n_bases - 1) % BASES].at > 1) take_base();
}

// ---- the device -------------------------------------------------------------------------------------------------------
void device_open(int local_rank) {
    cudaError_t error = cudaGetDeviceCount(&gpus);
    if (error != cudaSuccess || gpus == 0)
        fail_all(EXIT_USAGE, "no GPU here (cudaGetDeviceCount: %s); nearest: make DEVICE=cpu",
                 cudaGetErrorString(error ? error : cudaErrorNoDevice));
    int number = local_rank % gpus;
    cuda_check(cudaGetDeviceProperties(&gpu, number));
    if (gpu.major < 8)
        fail_all(EXIT_USAGE, "%s: kernels are for sm_80 and newer; nearest: make DEVICE=cpu", device_name());
    cuda_check(cudaSetDevice(number));
    cuda_check(cudaStreamCreateWithFlags(&compute_stream, cudaStreamNonBlocking));
    kernels_fail = refused;
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaMallocHost(&piece[i].memory, PIECE));
        cuda_check(cudaEventCreateWithFlags(&piece[i].done, cudaEventDisableTiming));
    }
    take_base();
}

int device_count(void) {
    return gpus;
}

uint64_t device_id(void) {
    uint64_t id = 0xcbf29ce484222325u; // FNV-1a
    for (size_t i = 0; i < sizeof gpu.uuid.bytes; i++)
        id = (id ^ (unsigned char)gpu.uuid.bytes[i]) * 0x100000001b3u;
    return id;
}

void device_share(int ranks) {
    sharers = ranks;
}

const char *device_name(void) {
    static char name[sizeof gpu.name + 32];
    snprintf(name, sizeof name, "%s (sm_%d%d)", gpu.name, gpu.major, gpu.minor);
    return name;
}

bool device_has_fp8(void) {
    return 10 * gpu.major + gpu.minor >= 89;
}

// Dense products of bf16 by tensor cores with fp32 sums, and fp32 without them, in 10¹² operations a second, from NVIDIA's
// data sheets and white papers. The first whose words are in the GPU's name counts, so what narrows a name stands
// first. 0: less than the chip of that name, and how much less depends.
static const struct {
    const char *name;
    double bf16, fp32;
} peaks[] = {
    {"MIG", 0, 0},
    {"Laptop", 0, 0},
    {"B200", 2250, 75},
    {"GH200", 989, 67},
    {"H200 NVL", 835, 60},
    {"H200", 989, 67},
    {"H100 NVL", 835, 60},
    {"H100 PCIe", 756, 51},
    {"H100", 989, 67},
    {"H20", 148, 44},
    {"A100", 312, 19.5},
    {"L40S", 362, 91.6},
    {"L4", 121, 30.3},
    {"A10", 125, 31.2},
    {"RTX 6000 Ada", 364, 91.1},
    {"RTX A6000", 154.8, 38.7},
    {"RTX 5090 D", 0, 0},
    {"RTX 5090", 209.5, 104.8},
    {"RTX 4090 D", 0, 0},
    {"RTX 4090", 165, 82.6},
    {"RTX 3090 Ti", 80, 40},
    {"RTX 3090", 71, 35.6},
};

// Whole words: L4 is not in "NVIDIA L40".
static bool has_words(const char *name, const char *words) {
    for (const char *at = name; (at = strstr(at, words)); at++)
        if ((at == name || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[strlen(words)]))
            return true;
    return false;
}

double device_peak_flops(int threads, bool bf16) {
    (void)threads;
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (has_words(gpu.name, peaks[i].name)) return 1e12 * (bf16 ? peaks[i].bf16 : peaks[i].fp32);
    return 0;
}

// ---- its memory -------------------------------------------------------------------------------------------------------
void *device_take(size_t bytes) {
    void *memory;
    cudaError_t error = cudaMalloc(&memory, bytes ? bytes : 1); // NULL would be the answer to none
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return NULL;
    }
    cuda_check(error);
    device_zero(memory, bytes);
    return memory;
}

void device_give_back(void *memory) {
    device_synchronize(); // as cudaFree would, without letting messages go on
    cuda_check(cudaFree(memory));
}

// A rank's even share of what the GPU has given away. Ranks that share it hold about the same, so that each is told of its
// own and of an even part of the rest, be that of other programs.
static size_t share_in_use(void) {
    size_t left, total;
    cuda_check(cudaMemGetInfo(&left, &total));
    return (total - left) / (size_t)sharers;
}

void device_enter_rest(MemCategory category) {
    ptrdiff_t rest = (ptrdiff_t)(share_in_use() - ledger.total);
    ptrdiff_t least = -(ptrdiff_t)ledger.held[category]; // no category holds less than nothing
    ledger_add(category, rest > least ? rest : least);
}

size_t device_free_memory(void) {
    size_t left, total;
    cuda_check(cudaMemGetInfo(&left, &total));
    return left / (size_t)sharers;
}

size_t device_process_peak(void) {
    return share_in_use();
}

// ---- what is queued ---------------------------------------------------------------------------------------------------
void device_zero(void *memory, size_t bytes) {
    if (bytes) cuda_check(cudaMemsetAsync(memory, 0, bytes, compute_stream));
}

void device_copy(void *out, const void *inp, size_t bytes) {
    if (bytes) cuda_check(cudaMemcpyAsync(out, inp, bytes, cudaMemcpyDeviceToDevice, compute_stream));
}

static size_t piece_bytes(size_t bytes, size_t number) { // the last is shorter
    return bytes - number * PIECE < PIECE ? bytes - number * PIECE : PIECE;
}

void device_copy_in(void *device, const void *host, size_t bytes) {
    for (size_t k = 0; k * PIECE < bytes; k++) {
        unsigned i = turn++ % 2;
        cuda_wait(piece[i].done);
        memcpy(piece[i].memory, (const char *)host + k * PIECE, piece_bytes(bytes, k));
        cuda_check(cudaMemcpyAsync((char *)device + k * PIECE, piece[i].memory, piece_bytes(bytes, k),
                                   cudaMemcpyHostToDevice, compute_stream));
        cuda_check(cudaEventRecord(piece[i].done, compute_stream));
    }
}

void device_copy_out(void *host, const void *device, size_t bytes) {
    size_t pieces = (bytes + PIECE - 1) / PIECE;
    for (size_t k = 0; k <= pieces; k++) {
        if (k < pieces) { // asks for one, queued behind any copy in that still reads this piece,
            cuda_check(cudaMemcpyAsync(piece[k % 2].memory, (const char *)device + k * PIECE,
                                       piece_bytes(bytes, k), cudaMemcpyDeviceToHost, compute_stream));
            cuda_check(cudaEventRecord(piece[k % 2].done, compute_stream));
        }
        if (k > 0) { // ... and empties the one before it
            cuda_wait(piece[(k - 1) % 2].done);
            memcpy((char *)host + (k - 1) * PIECE, piece[(k - 1) % 2].memory, piece_bytes(bytes, k - 1));
        }
    }
    if (bytes == 0) device_synchronize();
}

// ---- moments ----------------------------------------------------------------------------------------------------------
Moment device_moment_on(cudaStream_t stream) {
    if (n_spare == 0) { // one more, and room for all to come back
        spare = realloc(spare, ++n_events * sizeof *spare);
        if (!spare) fail(EXIT_RUNTIME, "no memory for %zu events", n_events);
        cuda_check(cudaEventCreate(&spare[n_spare++]));
    }
    Moment m = {seconds_now(), spare[--n_spare]};
    cuda_check(cudaEventRecord(m.event, stream));
    return m;
}

Moment device_moment(void) {
    return device_moment_on(compute_stream);
}

bool device_moment_reached(Moment m) {
    return !m.event || cuda_reached(m.event);
}

double device_moment_seconds(Moment m) {
    if (!m.event) return m.seconds;
    cuda_wait(m.event);
    unsigned i = n_bases - 1;
    while (i > 0 && n_bases - i < BASES && base[i % BASES].at > m.seconds) i--;
    float ms;
    cuda_check(cudaEventElapsedTime(&ms, base[i % BASES].event, m.event));
    spare[n_spare++] = m.event;
    return fmax(m.seconds, base[i % BASES].at + 1e-3 * (double)ms); // not before it was asked for
}

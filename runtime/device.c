// The CPU as a device: memory comes from the heap, everything is synchronous. The ledger is the same on every device.
#include "device.h"
#include "fail.h"
#include "trace.h"
#include <cblas.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *const mem_name[MEM_CATEGORIES] = {
    [MEM_WEIGHTS] = "weights",
    [MEM_GRADIENTS] = "gradients",
    [MEM_MASTER] = "master",
    [MEM_OPTIMIZER] = "optimizer",
    [MEM_WHOLE_BUCKETS] = "whole_buckets",
    [MEM_TIED] = "tied_embedding",
    [MEM_ACTIVATIONS] = "activations",
    [MEM_DOUT] = "dout",
    [MEM_LOGITS] = "logits",
    [MEM_COMMUNICATION] = "communication",
    [MEM_WORKSPACE] = "workspace",
};
Ledger ledger;
static bool dry;

void ledger_add(MemCategory category, ptrdiff_t bytes) {
    size_t *held = &ledger.held[category], *peak = &ledger.peak[category];
    *held += (size_t)bytes;
    ledger.total += (size_t)bytes;
    if (*held > *peak) *peak = *held;
    if (ledger.total > ledger.total_peak) ledger.total_peak = ledger.total;
}

void ledger_live(MemCategory category, ptrdiff_t bytes) {
    if (bytes == 0) return;
    size_t *live = &ledger.live[category], *peak = &ledger.live_peak[category];
    *live += (size_t)bytes;
    ledger.live_total += (size_t)bytes;
    if (*live > *peak) *peak = *live;
    if (ledger.live_total > ledger.live_total_peak) ledger.live_total_peak = ledger.live_total;
    trace_memory();
}

void *device_alloc(MemCategory category, size_t bytes) {
    void *memory;
    if (dry)
        memory = (void *)(uintptr_t)(64 + ledger.total); // tells buffers apart; never followed
    else if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0)
        fail(EXIT_RUNTIME, "no memory for %.2f GB of %s, with %.2f GB held", bytes * 1e-9, mem_name[category],
             ledger.total * 1e-9);
    else
        memset(memory, 0, bytes);
    ledger_add(category, (ptrdiff_t)bytes);
    return memory;
}

void device_free(MemCategory category, void *memory, size_t bytes) {
    if (!memory) return;
    ledger_add(category, -(ptrdiff_t)bytes);
    if (!dry) free(memory);
}

void device_dry_run(bool on) {
    dry = on;
    memset(&ledger, 0, sizeof ledger);
}

void *host_alloc(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail(EXIT_RUNTIME, "no memory for a table of %zu · %zu bytes", count, size);
    return memory;
}

void device_zero(void *memory, size_t bytes) {
    memset(memory, 0, bytes);
}

void device_copy_in(void *device, const void *host, size_t bytes) {
    memcpy(device, host, bytes);
}

void device_copy_out(void *host, const void *device, size_t bytes) {
    memcpy(host, device, bytes);
}

void device_copy(void *out, const void *inp, size_t bytes) {
    memcpy(out, inp, bytes);
}

void device_synchronize(void) {
}

// A number from a file that holds just that, or SIZE_MAX ("max", or no such file).
static size_t read_size(const char *path) {
    FILE *f = fopen(path, "r");
    unsigned long long x;
    bool ok = f && fscanf(f, "%llu", &x) == 1;
    if (f) fclose(f);
    return ok ? (size_t)x : SIZE_MAX;
}

size_t device_free_memory(int local_ranks) {
    size_t available = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kilobytes;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1) available = (size_t)kilobytes * 1024;
    if (f) fclose(f);
    size_t limit = read_size("/sys/fs/cgroup/memory.max"), used = read_size("/sys/fs/cgroup/memory.current");
    if (limit != SIZE_MAX && used != SIZE_MAX) {
        size_t left = limit > used ? limit - used : 0;
        if (left < available) available = left;
    }
    return available / (size_t)local_ranks;
}

// Not getrusage's maximum: that remembers the process that started this one.
size_t device_process_peak(void) {
    FILE *f = fopen("/proc/self/status", "r");
    char line[128];
    unsigned long long kilobytes = 0;
    while (f && fgets(line, sizeof line, f) && sscanf(line, "VmHWM: %llu kB", &kilobytes) != 1) {
    }
    if (f) fclose(f);
    return (size_t)kilobytes * 1024;
}

const char *device_name(void) {
    static char name[128] = "CPU";
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %127[^\n]", name) == 1) break;
    if (f) fclose(f);
    return name;
}

double device_matmul_rate(int threads) {
    enum { N = 1024, TRIES = 5 };
    float *a = aligned_alloc(64, 3 * sizeof(float) * N * N);
    if (!a) return 0;
    for (size_t i = 0; i < 3 * (size_t)N * N; i++) a[i] = (float)(i % 7) * 0.1f;
    double best = 0;
    int own = omp_get_max_threads();
    openblas_set_num_threads(threads);
    for (int i = 0; i < TRIES; i++) {
        struct timespec t0, t1;
        clock_gettime(CLOCK_MONOTONIC, &t0);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, N, 1, a, N, a + N * N, N, 0, a + 2 * N * N,
                    N);
        clock_gettime(CLOCK_MONOTONIC, &t1);
        double seconds = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
        if (i > 0 && 2.0 * N * N * N / seconds > best)
            best = 2.0 * N * N * N / seconds; // the first one warms up
    }
    openblas_set_num_threads(1);
    omp_set_num_threads(own); // an OpenBLAS made with OpenMP takes its number of threads to be ours too
    free(a);
    return best;
}

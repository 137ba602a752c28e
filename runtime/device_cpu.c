// The CPU as a device: its memory is the heap, and everything has been done when the call returns.
#include "device.h"
#include "device_half.h"
#include "log.h"
#include <cblas.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int sharers = 1;

void device_open(int local_rank) {
    (void)local_rank;
}

uint64_t device_id(void) {
    return 0;
}

void device_share(int ranks) {
    sharers = ranks;
}

int device_count(void) {
    return 0;
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

bool device_has_fp8(void) {
    return true;
}

double device_peak_flops(int threads, bool bf16) {
    (void)bf16;
    enum { N = 1024, TRIES = 5 };
    float *a = aligned_alloc(64, 3 * sizeof(float) * N * N);
    if (!a) return 0;
    for (size_t i = 0; i < 3 * (size_t)N * N; i++) a[i] = (float)(i % 7) * 0.1f;
    double best = 0;
    int own = omp_get_max_threads();
    openblas_set_num_threads(threads);
    for (int i = 0; i < TRIES; i++) {
        double began = seconds_now();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, N, 1, a, N, a + N * N, N, 0, a + 2 * N * N,
                    N);
        double seconds = seconds_now() - began;
        if (i > 0 && 2.0 * N * N * N / seconds > best)
            best = 2.0 * N * N * N / seconds; // the first one warms up
    }
    openblas_set_num_threads(1);
    omp_set_num_threads(own); // an OpenBLAS made with OpenMP takes its number of threads to be ours too
    free(a);
    return best;
}

// ---- its memory -------------------------------------------------------------------------------------------------------
void *device_take(size_t bytes) {
    void *memory;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0) return NULL;
    return memset(memory, 0, bytes);
}

void device_give_back(void *memory) {
    free(memory);
}

void device_enter_rest(MemCategory category) {
    (void)category;
}

// A number from a file that holds just that, or SIZE_MAX ("max", or no such file).
static size_t read_size(const char *path) {
    FILE *f = fopen(path, "r");
    unsigned long long x;
    bool ok = f && fscanf(f, "%llu", &x) == 1;
    if (f) fclose(f);
    return ok ? (size_t)x : SIZE_MAX;
}

size_t device_free_memory(void) {
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
    return available / (size_t)sharers;
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

// ---- what is queued ---------------------------------------------------------------------------------------------------
void device_zero(void *memory, size_t bytes) {
    memset(memory, 0, bytes);
}

void device_copy(void *out, const void *inp, size_t bytes) {
    memcpy(out, inp, bytes);
}

void device_copy_in(void *device, const void *host, size_t bytes) {
    memcpy(device, host, bytes);
}

void device_copy_out(void *host, const void *device, size_t bytes) {
    memcpy(host, device, bytes);
}

void device_synchronize(void) {
}

Moment device_moment(void) {
    return (Moment){seconds_now(), NULL};
}

bool device_moment_reached(Moment m) {
    (void)m;
    return true;
}

double device_moment_seconds(Moment m) {
    return m.seconds;
}

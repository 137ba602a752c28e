// Every collective against sums made by one rank alone, in the order that comm.h promises: the bits must agree. First on the
// host's memory, then on the device's, by each transport (NCCL sums in an order of its own: there, numbers of which every sum
// is exact).
// Runs on any number of ranks. A check that fails on one rank is remembered, so that all ranks stay in step; at the
// end of each test the ranks ask each other. With an argument, the program shows one way to start or to end instead.
#include "runtime/comm.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/launch.h"
#include "runtime/log.h"
#include "runtime/trace.h"
#include "runtime/watchdog.h"
#include "kernels/precision.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#undef fail // cmocka's
#include <math.h>
#ifdef USE_MPI
#include <mpi.h>
#endif
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static Comm *world;
#include "tests/on_all_ranks.h"

// ---- inputs, and the answers ----------------------------------------------------------------------------------------

static uint32_t hash(uint32_t rank, size_t i) {
    uint64_t x = (uint64_t)i * 0x9E3779B97F4A7C15u + rank * 0xD1B54A32D192ED03u + 1;
    x ^= x >> 29, x *= 0xBF58476D1CE4E5B9u, x ^= x >> 32;
    return (uint32_t)x;
}

// Element i of what a rank brings. Floats of many sizes, so that another order of the sums gives other bits; or small ones, of
// which it does not.
static bool exact;
static void put(void *at, DType t, int rank, size_t i) {
    uint32_t h = hash((uint32_t)rank, i);
    float f = exact ? (float)(h % 9) - 4 : ldexpf((float)(int32_t)h, -31 + (int)(h % 8));
    switch (t) {
    case DTYPE_F32:
        memcpy(at, &f, 4);
        break;
    case DTYPE_BF16:
        memcpy(at, &(bf16){float_to_bf16(f)}, 2);
        break;
    case DTYPE_F64:
        memcpy(at, &(double){exact ? f : f * 1.000000001}, 8);
        break;
    case DTYPE_I32:
        memcpy(at, &(int32_t){(int32_t)(h >> 4)}, 4);
        break;
    case DTYPE_I64:
        memcpy(at, &(int64_t){(int64_t)h << 20}, 8);
        break;
    case DTYPE_U8:
        memcpy(at, &(uint8_t){(uint8_t)h}, 1);
        break;
    }
}

static void accumulate(void *sum, const void *x, DType t) {
    float f, g;
    double d, e;
    int32_t i, j;
    int64_t k, l;
    switch (t) {
    case DTYPE_F32:
        memcpy(&f, sum, 4), memcpy(&g, x, 4), f += g, memcpy(sum, &f, 4);
        break;
    case DTYPE_F64:
        memcpy(&d, sum, 8), memcpy(&e, x, 8), d += e, memcpy(sum, &d, 8);
        break;
    case DTYPE_I32:
        memcpy(&i, sum, 4), memcpy(&j, x, 4), i += j, memcpy(sum, &i, 4);
        break;
    case DTYPE_I64:
        memcpy(&k, sum, 8), memcpy(&l, x, 8), k += l, memcpy(sum, &k, 8);
        break;
    case DTYPE_BF16: {
        bf16 a, b;
        memcpy(&a, sum, 2), memcpy(&b, x, 2);
        a = float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
        memcpy(sum, &a, 2);
        break;
    }
    default:
        abort();
    }
}

// A buffer between two fences; buffer_free checks that they stand.
enum { FENCE = 64 };
static char *buffer(size_t bytes) {
    char *b = malloc(bytes + 2 * FENCE);
    memset(b, 0x5a, bytes + 2 * FENCE);
    memset(b + FENCE, 0xa5, bytes);
    return b + FENCE;
}
static void buffer_free(char *b, size_t bytes) {
    for (size_t i = 0; i < FENCE; i++) check(b[(ptrdiff_t)i - FENCE] == 0x5a && b[bytes + i] == 0x5a);
    free(b - FENCE);
}

// [count] of what the rank `who` brings, in a new buffer.
static char *brought(size_t count, DType t, int who) {
    char *b = buffer(count * dtype_size(t));
    for (size_t i = 0; i < count; i++) put(b + i * dtype_size(t), t, who, i);
    return b;
}

// [count]: shard s summed from rank s + 1 round to rank s; member[] are the world ranks (they seed what is brought).
static char *ring_sum(size_t count, DType t, const int *member, int size) {
    char *b = buffer(count * dtype_size(t));
    for (int s = 0; s < size; s++)
        for (size_t i = comm_shard_begin(count, size, s); i < comm_shard_begin(count, size, s + 1); i++) {
            char *sum = b + i * dtype_size(t), x[8];
            put(sum, t, member[(s + 1) % size], i);
            for (int r = 2; r <= size; r++) put(x, t, member[(s + r) % size], i), accumulate(sum, x, t);
        }
    return b;
}

// For the maximum: among the floats some minus infinities, here and there on all ranks; and NaN, but where NCCL passes over it.
static float *brought_max(size_t count, int who) {
    float *x = (float *)brought(count, DTYPE_F32, who);
    for (size_t i = 0; i < count; i++) {
        uint32_t h = hash((uint32_t)who + 1000, i) % 16;
        if (i % 7 == 3 || h < 3) x[i] = -INFINITY;
        if (h == 3 && !exact) x[i] = NAN;
    }
    return x;
}

static float *largest(size_t count, const int *member, int size) {
    float *max = brought_max(count, member[0]);
    for (int r = 1; r < size; r++) {
        float *x = brought_max(count, member[r]);
        for (size_t i = 0; i < count; i++)
            if (x[i] > max[i] || isnan(x[i])) max[i] = x[i];
        buffer_free((char *)x, count * sizeof *x);
    }
    return max;
}

static size_t shard_bytes(const Comm *c, size_t count, DType t, int r) {
    return (comm_shard_begin(count, c->size, r + 1) - comm_shard_begin(count, c->size, r)) * dtype_size(t);
}

// Every collective once on c, at this count, with its bits, its untouched surroundings and its counted bytes.
static void try_all(Comm *c, const int *member, size_t count, DType t) {
    const size_t item = dtype_size(t), bytes = count * item;
    const int r = c->rank, right = (r + 1) % c->size;
    const size_t from = comm_shard_begin(count, c->size, r) * item;
    const size_t mine = shard_bytes(c, count, t, r), next = shard_bytes(c, count, t, right);
    char *in = brought(count, t, member[r]), *copy = brought(count, t, member[r]);
    CommCount before[COMM_OPS];
    memcpy(before, c->count, sizeof before);
#define SENT(op) (c->count[op].bytes - before[op].bytes)

    if (t != DTYPE_U8) {
        char *sum = ring_sum(count, t, member, c->size), *shard = buffer(mine);
        comm_wait(comm_host_reduce_scatter(c, shard, in, count, t));
        check(memcmp(shard, sum + from, mine) == 0);
        check(memcmp(in, copy, bytes) == 0);
        check(SENT(OP_REDUCE_SCATTER) == bytes - mine);

        comm_wait(comm_host_reduce_scatter(c, in + from, in, count, t)); // out inside in
        check(memcmp(in + from, shard, mine) == 0);
        memcpy(in + from, copy + from, mine);
        check(memcmp(in, copy, bytes) == 0);

        comm_wait(comm_host_all_reduce(c, in, count, t));
        check(memcmp(in, sum, bytes) == 0);
        check(memcmp(in + from, shard, mine) == 0);
        check(SENT(OP_ALL_REDUCE) == (bytes - mine) + (bytes - next));
        if (count % (size_t)c->size == 0)
            check(SENT(OP_ALL_REDUCE) == 2 * bytes / (size_t)c->size * (size_t)(c->size - 1));

        char *all = buffer(bytes);
        comm_wait(comm_host_all_gather(c, all, shard, count, t));
        check(memcmp(all, sum, bytes) == 0);
        buffer_free(all, bytes);
        buffer_free(shard, mine);
        buffer_free(sum, bytes);
    }

    if (t == DTYPE_F32) {
        float *max = largest(count, member, c->size), *x = brought_max(count, member[r]);
        memcpy(before, c->count, sizeof before);
        comm_wait(comm_host_all_reduce_max(c, x, count));
        check(memcmp(x, max, bytes) == 0);
        check(SENT(OP_ALL_REDUCE_MAX) == (bytes - mine) + (bytes - next) && SENT(OP_ALL_REDUCE) == 0);
        check(c->count[OP_ALL_REDUCE_MAX].calls == before[OP_ALL_REDUCE_MAX].calls + 1);
        buffer_free((char *)x, bytes);
        buffer_free((char *)max, bytes);
    }

    char *expected = buffer(bytes), *all = buffer(bytes);
    for (int s = 0; s < c->size; s++)
        for (size_t i = comm_shard_begin(count, c->size, s); i < comm_shard_begin(count, c->size, s + 1); i++)
            put(expected + i * item, t, member[s], i);
    memcpy(before, c->count, sizeof before);
    comm_wait(comm_host_all_gather(c, all, copy + from, count, t));
    check(memcmp(all, expected, bytes) == 0);
    check(SENT(OP_ALL_GATHER) == bytes - next);
    memset(all, 0x11, bytes);
    memcpy(all + from, copy + from, mine);
    comm_wait(comm_host_all_gather(c, all + from, all + from, 0, t)); // nothing to do
    comm_wait(comm_host_all_gather(c, all, all + from, count, t));    // in inside out
    check(memcmp(all, expected, bytes) == 0);

    for (int root = 0; root < c->size; root++) {
        memcpy(before, c->count, sizeof before);
        char *told = brought(count, t, member[root]);
        memset(all, 0x22, bytes);
        if (r == root) memcpy(all, told, bytes);
        comm_wait(comm_host_broadcast(c, all, count, t, root));
        check(memcmp(all, told, bytes) == 0);
        check(SENT(OP_BROADCAST) == (right == root ? 0 : bytes));
        buffer_free(told, bytes);
        if (bytes > 1 << 20 && root == 1) break; // the other roots are the same chain
    }
    buffer_free(all, bytes);
    buffer_free(expected, bytes);
    buffer_free(copy, bytes);
    buffer_free(in, bytes);
}

static int *members_of_world(void) {
    int *member = malloc((size_t)world->size * sizeof *member);
    for (int r = 0; r < world->size; r++) member[r] = r;
    return member;
}

// ---- the tests ------------------------------------------------------------------------------------------------------

static void test_shards(void **state) {
    (void)state;
    for (size_t count = 0; count < 40; count++)
        for (int size = 1; size < 10; size++) {
            check(comm_shard_begin(count, size, 0) == 0 && comm_shard_begin(count, size, size) == count);
            for (int r = 0; r + 1 < size; r++) {
                size_t a = comm_shard_begin(count, size, r + 1) - comm_shard_begin(count, size, r);
                size_t b = comm_shard_begin(count, size, r + 2) - comm_shard_begin(count, size, r + 1);
                check(a == b || a == b + 1);
            }
        }
    check(comm_shard_begin((size_t)5 << 32, 5, 3) == (size_t)3 << 32);
    agree();
}

static void test_small_counts(void **state) {
    (void)state;
    int *member = members_of_world();
    const size_t n = (size_t)world->size, counts[] = {0, 1, n - 1, n, n + 1, 2 * n - 1, 13, 64 * n, 1000, 1001};
    for (DType t = DTYPE_F32; t <= DTYPE_U8; t++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) try_all(world, member, counts[i], t);
    free(member);
    agree();
}

// Around the length of a slice (512 KiB): one more or one less element in some of the shards, and many slices.
static void test_large_counts(void **state) {
    (void)state;
    int *member = members_of_world();
    const size_t n = (size_t)world->size, slice = (512 << 10) / 4;
    try_all(world, member, n * slice + 1, DTYPE_F32);
    try_all(world, member, n * slice - 1, DTYPE_F32);
    try_all(world, member, 5 * n * slice + n - 1, DTYPE_F32);
    try_all(world, member, 3 * n * slice + 3, DTYPE_BF16);
    try_all(world, member, n * slice + 2, DTYPE_F64);
    try_all(world, member, 3 * n * slice * 4 + 5, DTYPE_U8);
    free(member);
    agree();
}

// A barrier is passed by nobody before everybody has come.
static void test_barrier(void **state) {
    (void)state;
    for (int late = 0; late < world->size; late++) {
        double came = 0, left;
        struct timespec now;
        if (world->rank == late) nanosleep(&(struct timespec){0, 30000000}, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now), came = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        comm_wait(comm_barrier(world));
        clock_gettime(CLOCK_MONOTONIC, &now), left = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
        if (comm_host().hosts == 1) check(-comm_max(world, -left) >= comm_max(world, came));
    }
    check(world->count[OP_BARRIER].bytes == 0 && world->count[OP_BARRIER].calls == (uint64_t)world->size);
    agree();
}

static void test_split(void **state) {
    (void)state;
    Comm *list[8];
    int before = comm_list(NULL, 0);
    Comm *half = comm_split(world, world->rank % 2, -world->rank, "half"); // ranks in reversed order
    Comm *alone = comm_split(world, world->rank, 0, "alone");
    check(half->size == (world->size + 1 - world->rank % 2) / 2 && alone->size == 1 && alone->rank == 0);
    check(strcmp(half->name, "half") == 0);
    check(comm_list(list, 8) == before + 2 && list[0] == world && list[before] == half &&
          list[before + 1] == alone);

    int32_t *place = calloc((size_t)half->size, sizeof *place);
    place[half->rank] = world->rank;
    comm_wait(comm_host_all_gather(half, place, place + half->rank, (size_t)half->size, DTYPE_I32));
    for (int r = 0; r + 1 < half->size; r++) check(place[r] == place[r + 1] + 2);
    check(place[half->size - 1] == world->rank % 2);
    for (DType t = DTYPE_F32; t <= DTYPE_U8; t++)
        try_all(half, place, 1003, t), try_all(alone, &world->rank, 1003, t);
    try_all(half, place, 1 << 19, DTYPE_F32);
    for (int op = 0; op < COMM_OPS; op++) check(alone->count[op].bytes == 0);
    check(alone->count[OP_ALL_REDUCE].calls == 5 && alone->count[OP_ALL_REDUCE_MAX].calls == 1);

    Comm *quarter = comm_split(half, half->rank / 2, 0, "quarter"); // a group of a group
    check(quarter->rank == half->rank % 2);
    check(comm_sum(quarter, 1) == quarter->size);
    comm_free(quarter);
    comm_free(alone);
    comm_free(half);
    check(comm_list(list, 8) == before);
    free(place);
    agree();
}

// Many works under way on two groups, awaited in an order that differs from rank to rank.
static void test_in_flight(void **state) {
    (void)state;
    enum { WORKS = 6, COUNT = 100003 };
    int *member = members_of_world();
    Comm *other = comm_split(world, 0, 0, "other");
    float *buf[2 * WORKS], *sum = (float *)ring_sum(COUNT, DTYPE_F32, member, world->size);
    Work work[2 * WORKS];
    for (int i = 0; i < 2 * WORKS; i++) {
        buf[i] = (float *)brought(COUNT, DTYPE_F32, world->rank);
        work[i] = comm_host_all_reduce(i % 2 ? world : other, buf[i], COUNT, DTYPE_F32);
        check(work[i].comm == (i % 2 ? world : other));
    }
    for (int i = 0; i < 2; i++) check(work[i].sequence + WORKS - 1 == work[2 * WORKS - 2 + i].sequence);
    Comm *first = world->rank % 2 ? world : other;
    int last = world->rank % 2 ? 2 * WORKS - 1 : 2 * WORKS - 2;
    comm_wait(work[last]); // then all works of `first` are done
    for (int i = 0; i < 2 * WORKS; i++)
        if (work[i].comm == first) check(memcmp(buf[i], sum, COUNT * 4) == 0);
    for (int i = 2 * WORKS - 1; i >= 0; i--) comm_wait(work[i]);
    for (int i = 0; i < 2 * WORKS; i++) {
        check(memcmp(buf[i], sum, COUNT * 4) == 0);
        buffer_free((char *)buf[i], COUNT * 4);
    }

    // A chain on one group: each work reads what the one before it writes, and nobody waits in between.
    float *in = (float *)brought(COUNT, DTYPE_F32, world->rank), *all = (float *)buffer(COUNT * 4);
    size_t from = comm_shard_begin(COUNT, world->size, world->rank);
    size_t mine = comm_shard_begin(COUNT, world->size, world->rank + 1) - from;
    float *shard = (float *)buffer(mine * 4);
    comm_host_reduce_scatter(world, shard, in, COUNT, DTYPE_F32);
    comm_host_all_gather(world, all, shard, COUNT, DTYPE_F32);
    comm_wait(comm_host_broadcast(world, all, COUNT, DTYPE_F32, 0));
    check(memcmp(all, sum, COUNT * 4) == 0);
    buffer_free((char *)shard, mine * 4);
    buffer_free((char *)all, COUNT * 4);
    buffer_free((char *)in, COUNT * 4);
    buffer_free((char *)sum, COUNT * 4);
    comm_free(other);
    free(member);
    agree();
}

// Messages travel in comm_progress alone; a work that is done by then costs comm_wait nothing.
static void test_progress(void **state) {
    (void)state;
    enum { COUNT = 2000003 };
    int *member = members_of_world();
    Comm *other = comm_split(world, 0, 0, "other");
    float *buf = (float *)brought(COUNT, DTYPE_F32, world->rank);
    float *sum = (float *)ring_sum(COUNT, DTYPE_F32, member, world->size);
    comm_wait(comm_barrier(world));
    Work w = comm_host_all_reduce(other, buf, COUNT, DTYPE_F32);
    time_t deadline = time(NULL) + 20;
    while (memcmp(buf, sum, COUNT * 4) != 0 && time(NULL) < deadline) comm_progress(), sched_yield();
    check(memcmp(buf, sum, COUNT * 4) == 0);
    comm_wait(comm_barrier(world));
    comm_progress();
    comm_wait(w);
    check(other->count[OP_ALL_REDUCE].exposed_ms == 0);

    // Awaited while another rank is late, it is exposed.
    if (world->rank == 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
    comm_wait(comm_barrier(other));
    if (world->rank != 0) check(other->count[OP_BARRIER].exposed_ms > 20);
    buffer_free((char *)sum, COUNT * 4);
    buffer_free((char *)buf, COUNT * 4);
    comm_free(other);
    free(member);
    agree();
}

static void test_small_things(void **state) {
    (void)state;
    const int n = world->size, r = world->rank;
    check(comm_sum(world, r + 1) == n * (n + 1) / 2);
    check(comm_max(world, -10.0 - r) == -10);
    check(comm_max(world, r == n / 2 ? 1e300 : -INFINITY) == 1e300);
    for (int sick = 0; sick < n; sick++) check(isnan(comm_max(world, r == sick ? NAN : r)));
    check(isnan(comm_sum(world, r == 0 ? NAN : 1)));
    check(comm_all_true(world, true));
    for (int liar = 0; liar < n; liar++) check(!comm_all_true(world, r != liar));
    Host host = comm_host();
    check(host.hosts == 1 && host.host == 0 && host.local_rank == r && host.local_size == n);
    check(launch_rank() == r && launch_size() == n && launch_local_rank() == r && launch_local_size() == n);
    agree();
}

static void test_staging(void **state) {
    (void)state;
    const size_t slice = 512 << 10;
    if (device_count() > 0) { // the ring's sums are not in its memory
        check(comm_staging_bytes(1000, DTYPE_F32, 4) == 0);
        return agree();
    }
    check(comm_staging_bytes(1000, DTYPE_F32, 1) == 0 && comm_staging_bytes(0, DTYPE_F32, 4) == 0);
    check(comm_staging_bytes(1000, DTYPE_F32, 4) == 2 * 250 * 4);
    check(comm_staging_bytes(1001, DTYPE_BF16, 4) == 2 * 251 * 2);
    check(comm_staging_bytes(slice / 4 * 6 * 2, DTYPE_F32, 6) == 2 * 2 * slice); // two slices a shard
    check(comm_staging_bytes((size_t)1 << 40, DTYPE_F64, 8) == 2 * 4 * slice);
    agree();
}

static void test_never_started(void **state) {
    (void)state;
    comm_wait((Work){0});
    agree();
}

// World ranks of the groups' first members: even ranks from below, odd ranks from above.
static void test_first(void **state) {
    (void)state;
    int n = world->size, r = world->rank;
    Comm *half = comm_split(world, r % 2, r % 2 ? -r : r, "half");
    check(world->first == 0);
    check(half->first == (r % 2 == 0 ? 0 : (n - 1) % 2 ? n - 1 : n - 2));
    comm_free(half);
    agree();
}

static void test_clock_offset(void **state) {
    (void)state;
    double offset = comm_clock_offset(world);
    check(world->rank > 0 || offset == 0);
    check(comm_host().hosts > 1 || fabs(offset) < 0.05); // the clock is the same one
    agree();
}

static const CommNote *note_of(const CommNotes *notes, const char *name) {
    for (int i = 0; i < COMM_MOST; i++)
        if (strcmp(notes->group[i].name, name) == 0) return &notes->group[i];
    return NULL;
}

static void test_notes(void **state) {
    (void)state;
    CommNotes notes;
    float x[12] = {0}, all[12];
    comm_notes(&notes);
    check(!note_of(&notes, "noted"));
    Comm *c = comm_split(world, world->rank % 2, 0, "noted");
    comm_wait(comm_host_all_reduce(c, x, 12, DTYPE_F32));
    Work w = comm_host_all_gather(c, all, x, 10, DTYPE_BF16);
    comm_notes(&notes);
    const CommNote *n = note_of(&notes, "noted");
    check(n && n->first == world->rank % 2 && n->started == 2 && (n->done == 1 || n->done == 2));
    check(n && n->last.op == OP_ALL_GATHER && n->last.type == DTYPE_BF16 && n->last.count == 10);
    check(n && n->turn.op == OP_ALL_GATHER && n->turn.type == DTYPE_BF16 && n->turn.count == 10);
    check(notes.waiting == -1 && &notes.group[notes.latest] == n);
    comm_wait(w);
    comm_notes(&notes);
    n = note_of(&notes, "noted");
    check(n && n->done == 2 && n->started == 2 && notes.waiting == -1);
    comm_free(c);
    comm_notes(&notes);
    check(!note_of(&notes, "noted"));
    agree();
}

// Starts, watches over something, ends, and does so again.
static void test_watchdog(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        watchdog_start(world, 60);
        float x[100] = {(float)world->rank};
        for (int j = 0; j < 20; j++) comm_wait(comm_host_all_reduce(world, x, 100, DTYPE_F32));
        if (i == 2) nanosleep(&(struct timespec){1, 0}, NULL); // so that some reports are sent
        watchdog_stop();
    }
    agree();
}

// A wait may be longer than the timeout: only one in which nothing moves is a fault.
static void test_long_wait(void **state) {
    (void)state;
    Work w = {0};
    watchdog_start(world, 1.5);
    for (int i = 0; i < 6; i++) {
        if (world->rank > 0) nanosleep(&(struct timespec){0, 500000000}, NULL);
        w = comm_barrier(world);
        if (world->rank > 0) comm_wait(w);
    }
    comm_wait(w); // for all six of them
    watchdog_stop();
    agree();
}

// Rank 0 goes into what waits for the others without moving messages, and has a work under way that they wait for first.
static void test_waits_that_move_nothing(void **state) {
    (void)state;
    float x[100] = {0};
    watchdog_start(world, 4);
    for (int i = 0; i < 2; i++) {
        comm_wait(comm_barrier(world));
        if (world->rank != 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
        Work w = comm_host_all_reduce(world, x, 100, DTYPE_F32);
        if (world->rank != 0) comm_wait(w);
        if (i == 0)
            comm_clock_offset(world);
        else
            comm_free(comm_split(world, 0, 0, "late"));
    }
    watchdog_stop();
    agree();
}

// ---- on the device's memory -------------------------------------------------------------------------------------------

// [bytes] of the device, with what the host's are.
static char *on_device(const char *host, size_t bytes) {
    char *d = device_alloc(MEM_COMMUNICATION, bytes);
    if (bytes) device_copy_in(d, host, bytes);
    return d;
}

static bool same_on_device(const char *device, const char *host, size_t bytes) {
    char *copy = buffer(bytes);
    if (bytes) device_copy_out(copy, device, bytes);
    bool same = memcmp(copy, host, bytes) == 0;
    buffer_free(copy, bytes);
    return same;
}

// As try_all.
static void try_device(Comm *c, const int *member, size_t count, DType t) {
    const size_t item = dtype_size(t), bytes = count * item;
    const int r = c->rank, right = (r + 1) % c->size;
    const size_t from = comm_shard_begin(count, c->size, r) * item;
    const size_t mine = shard_bytes(c, count, t, r), next = shard_bytes(c, count, t, right);
    char *host = brought(count, t, member[r]), *in = on_device(host, bytes);
    char *all = device_alloc(MEM_COMMUNICATION, bytes), *shard = device_alloc(MEM_COMMUNICATION, mine);
    CommCount before[COMM_OPS];
    memcpy(before, c->count, sizeof before);

    if (t != DTYPE_U8) {
        char *sum = ring_sum(count, t, member, c->size), *mixed = brought(count, t, member[r]);
        memcpy(mixed + from, sum + from, mine);
        comm_wait(comm_reduce_scatter(c, shard, in, count, t));
        check(same_on_device(shard, sum + from, mine));
        check(same_on_device(in, host, bytes));
        check(SENT(OP_REDUCE_SCATTER) == bytes - mine);
        comm_wait(comm_reduce_scatter(c, in + from, in, count, t)); // out inside in
        check(same_on_device(in, mixed, bytes));
        comm_wait(comm_all_gather(c, all, shard, count, t));
        check(same_on_device(all, sum, bytes));
        device_copy_in(in, host, bytes);
        comm_wait(comm_all_reduce(c, in, count, t));
        check(same_on_device(in, sum, bytes));
        check(SENT(OP_ALL_REDUCE) == (bytes - mine) + (bytes - next));
        check(c->count[OP_REDUCE_SCATTER].calls == before[OP_REDUCE_SCATTER].calls + 2);
        buffer_free(mixed, bytes);
        buffer_free(sum, bytes);
    }

    if (t == DTYPE_F32) {
        char *max = (char *)largest(count, member, c->size), *x = (char *)brought_max(count, member[r]);
        memcpy(before, c->count, sizeof before);
        device_copy_in(in, x, bytes);
        comm_wait(comm_all_reduce_max(c, (float *)in, count));
        check(same_on_device(in, max, bytes));
        check(SENT(OP_ALL_REDUCE_MAX) == (bytes - mine) + (bytes - next) && SENT(OP_ALL_REDUCE) == 0);
        buffer_free(x, bytes);
        buffer_free(max, bytes);
    }

    char *expected = buffer(bytes);
    for (int s = 0; s < c->size; s++)
        for (size_t i = comm_shard_begin(count, c->size, s); i < comm_shard_begin(count, c->size, s + 1); i++)
            put(expected + i * item, t, member[s], i);
    device_zero(all, bytes);
    device_copy_in(in, host, bytes);
    memcpy(before, c->count, sizeof before);
    comm_wait(comm_all_gather(c, all, in + from, count, t));
    check(same_on_device(all, expected, bytes));
    check(SENT(OP_ALL_GATHER) == bytes - next);
    comm_wait(comm_all_gather(c, in, in + from, count, t)); // in inside out
    check(same_on_device(in, expected, bytes));

    for (int root = 0; root < c->size; root++) {
        memcpy(before, c->count, sizeof before);
        char *told = brought(count, t, member[root]);
        device_zero(all, bytes);
        if (r == root) device_copy_in(all, told, bytes);
        comm_wait(comm_broadcast(c, all, count, t, root));
        check(same_on_device(all, told, bytes));
        check(SENT(OP_BROADCAST) == (right == root ? 0 : bytes));
        buffer_free(told, bytes);
    }
    device_free(MEM_COMMUNICATION, shard, mine);
    device_free(MEM_COMMUNICATION, all, bytes);
    device_free(MEM_COMMUNICATION, in, bytes);
    buffer_free(expected, bytes);
    buffer_free(host, bytes);
}

// Many works under way on two groups and one of one, awaited in an order that differs from rank to rank, with words of the
// hosts between them.
static void device_in_flight(Comm *a, Comm *b, Comm *alone, const int *member) {
    enum { WORKS = 4, COUNT = 20003, BYTES = COUNT * 4 };
    Comm *const group[] = {a, b, alone};
    char *host = brought(COUNT, DTYPE_F32, world->rank), *buf[3 * WORKS], *copy[WORKS];
    char *sum = ring_sum(COUNT, DTYPE_F32, member, world->size);
    Work work[3 * WORKS];
    for (int i = 0; i < 3 * WORKS; i++) {
        buf[i] = on_device(host, BYTES);
        if (i % 3 < 2) {
            work[i] = comm_all_reduce(group[i % 3], buf[i], COUNT, DTYPE_F32);
        } else {
            copy[i / 3] = device_alloc(MEM_COMMUNICATION, BYTES);
            work[i] = comm_all_gather(alone, copy[i / 3], buf[i], COUNT, DTYPE_F32);
        }
        if (i == WORKS) check(comm_sum(a, 1) == a->size);
        comm_progress();
    }
    Comm *first = world->rank % 2 ? a : b;
    for (int i = 3 * WORKS - 1; i >= 0; i--) // the last of it, which is for all of it
        if (work[i].comm == first) {
            comm_wait(work[i]);
            break;
        }
    for (int i = 0; i < 3 * WORKS; i++)
        if (work[i].comm == first) check(same_on_device(buf[i], sum, BYTES));
    for (int i = 3 * WORKS - 1; i >= 0; i--) comm_wait(work[i]), comm_wait(work[0]);
    for (int i = 0; i < 3 * WORKS; i++) {
        check(i % 3 == 2 ? same_on_device(copy[i / 3], host, BYTES) : same_on_device(buf[i], sum, BYTES));
        if (i % 3 == 2) device_free(MEM_COMMUNICATION, copy[i / 3], BYTES);
        device_free(MEM_COMMUNICATION, buf[i], BYTES);
    }

    // A chain on one group: each work reads what the one before it writes, and nobody waits in between. Its input is queued
    // just before, and written over as soon as it may be.
    size_t from = comm_shard_begin(COUNT, a->size, a->rank) * 4;
    size_t mine = comm_shard_begin(COUNT, a->size, a->rank + 1) * 4 - from;
    char *in = device_alloc(MEM_COMMUNICATION, BYTES), *shard = device_alloc(MEM_COMMUNICATION, mine);
    char *all = device_alloc(MEM_COMMUNICATION, BYTES), *other = on_device(host, BYTES);
    device_copy(in, other, BYTES);
    Work reduced = comm_reduce_scatter(a, shard, in, COUNT, DTYPE_F32);
    comm_all_gather(a, all, shard, COUNT, DTYPE_F32);
    Work last = comm_broadcast(a, all, COUNT, DTYPE_F32, a->size - 1);
    comm_wait(reduced);
    device_zero(in, BYTES);
    check(same_on_device(shard, sum + from, mine));
    comm_wait(last);
    device_copy(other, all, BYTES);
    device_zero(all, BYTES);
    check(same_on_device(other, sum, BYTES));
    device_free(MEM_COMMUNICATION, other, BYTES);
    device_free(MEM_COMMUNICATION, all, BYTES);
    device_free(MEM_COMMUNICATION, shard, mine);
    device_free(MEM_COMMUNICATION, in, BYTES);
    buffer_free(sum, BYTES);
    buffer_free(host, BYTES);
}

// The ranks as a grid two wide: each is in a row and in a column, as in a group of tensor and one of data parallelism.
//
//     0 1      Works of both are under way at the same time, started by turns, and awaited in another order: the last first; or
//     2 3      all of the row's before the column's, and at odd ranks the other way round. Then a column sums what its rows
//     4 ...    have summed.
static void crossing_groups(void) {
    enum { WORKS = 12, COUNT = 5003, BYTES = COUNT * 4 };
    const int rank = world->rank;
    Comm *group[] = {comm_split(world, rank / 2, rank, "row"), comm_split(world, rank % 2, rank, "column")};
    for (int round = 0; round < 3; round++) { // from max on: the first work of a group may be one
        char *buf[WORKS], *out[WORKS], *want[WORKS];
        size_t from[2], mine[2];
        Work work[WORKS];
        for (int g = 0; g < 2; g++) {
            from[g] = comm_shard_begin(COUNT, group[g]->size, group[g]->rank) * 4;
            mine[g] = shard_bytes(group[g], COUNT, DTYPE_F32, group[g]->rank);
        }
        for (int i = 0; i < WORKS; i++) {
            const int g = i % 2, what = (i / 2 + round + 1) % 4, size = group[g]->size;
            int *member = calloc((size_t)size, sizeof *member);
            for (int r = 0; r < size; r++) member[r] = g == 0 ? rank / 2 * 2 + r : rank % 2 + 2 * r;
            char *host = what == 1 ? (char *)brought_max(COUNT, rank) : brought(COUNT, DTYPE_F32, rank);
            want[i] =
                what == 1 ? (char *)largest(COUNT, member, size) : ring_sum(COUNT, DTYPE_F32, member, size);
            buf[i] = on_device(host, BYTES);
            out[i] = device_alloc(MEM_COMMUNICATION, BYTES);
            if (what == 0) work[i] = comm_all_reduce(group[g], buf[i], COUNT, DTYPE_F32);
            if (what == 1) work[i] = comm_all_reduce_max(group[g], (float *)buf[i], COUNT);
            if (what == 2) work[i] = comm_reduce_scatter(group[g], out[i] + from[g], buf[i], COUNT, DTYPE_F32);
            if (what == 3) { // gathered where it is scattered, and nobody waits in between
                comm_reduce_scatter(group[g], out[i] + from[g], buf[i], COUNT, DTYPE_F32);
                work[i] = comm_all_gather(group[g], out[i], out[i] + from[g], COUNT, DTYPE_F32);
            }
            if ((i + rank) % 3 == 0) comm_progress();
            buffer_free(host, BYTES);
            free(member);
        }
        for (int k = 0; k < WORKS; k++)
            comm_wait(work[round == 0 ? WORKS - 1 - k : 2 * (k % (WORKS / 2)) + (k / (WORKS / 2) + rank) % 2]);
        for (int i = 0; i < WORKS; i++) {
            const int g = i % 2, what = (i / 2 + round + 1) % 4;
            char *result = what < 2 ? buf[i] : out[i];
            size_t begin = what == 2 ? from[g] : 0, bytes = what == 2 ? mine[g] : BYTES;
            check(same_on_device(result + begin, want[i] + begin, bytes));
            device_free(MEM_COMMUNICATION, buf[i], BYTES);
            device_free(MEM_COMMUNICATION, out[i], BYTES);
            buffer_free(want[i], BYTES);
        }
    }
    float *x = malloc(BYTES), sum = 0;
    for (int i = 0; i < COUNT; i++) x[i] = (float)(rank + 1);
    for (int r = 0; r < world->size; r++)
        if (r / 2 * 2 + rank % 2 < world->size) sum += (float)(r + 1);
    char *d = on_device((char *)x, BYTES);
    for (int g = 0; g < 2; g++) comm_wait(comm_all_reduce(group[g], d, COUNT, DTYPE_F32));
    for (int i = 0; i < COUNT; i++) x[i] = sum;
    check(same_on_device(d, (char *)x, BYTES));
    device_free(MEM_COMMUNICATION, d, BYTES);
    free(x);
    comm_free(group[1]);
    comm_free(group[0]);
}

// cmocka's handler takes the place of the emulator's, which opens the device's memory when it is touched.
static struct sigaction before_cmocka;

// More than the two pieces in which copies go, of memory that changes at once; then, what waits for how much.
static void test_device_copies(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    const size_t bytes = ((size_t)13 << 20) + 5;
    char *host = brought(bytes, DTYPE_U8, 0), *same = brought(bytes, DTYPE_U8, 0);
    char *device = device_alloc(MEM_COMMUNICATION, bytes);
    device_copy_in(device, host, bytes);
    memset(host, 0, bytes);
    check(same_on_device(device, same, bytes));

    device_zero(device, bytes);
    Moment zeroed = device_moment();
    device_copy_out(NULL, NULL, 0); // for all that is queued
    double now = seconds_now();
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    check(device_moment_seconds(zeroed) < now + 0.01);
    device_zero(device, bytes);
    check(device_moment_seconds(device_moment()) > now); // for that moment
    device_free(MEM_COMMUNICATION, device, bytes);
    buffer_free(same, bytes);
    buffer_free(host, bytes);
    agree();
}

// Memory goes back while a GPU waits for another one, whose host waits for a word of this one.
static void give_back_while_waiting(Comm *all) {
    char *x = device_alloc(MEM_COMMUNICATION, 400), *other = device_alloc(MEM_COMMUNICATION, 400);
    float word[100] = {0};
    watchdog_start(world, 4);
    comm_wait(comm_barrier(world));
    if (world->rank != 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
    Work w = comm_host_all_reduce(world, word, 100, DTYPE_F32);
    if (world->rank != 0) comm_wait(w);
    comm_wait(comm_all_reduce(all, x, 100, DTYPE_F32));
    device_free(MEM_COMMUNICATION, other, 400);
    comm_wait(w);
    watchdog_stop();
    device_free(MEM_COMMUNICATION, x, 400);
}

static void try_transport(Transport transport) {
    sigaction(SIGSEGV, &before_cmocka, NULL);
    int *member = members_of_world(), before = comm_list(NULL, 0);
    exact = transport == TRANSPORT_NCCL;
    comm_use(transport);
    Comm *all = comm_split(world, 0, 0, "all"), *second = comm_split(world, 0, 0, "second");
    Comm *half = comm_split(world, world->rank % 2, -world->rank, "half"); // ranks in reversed order
    Comm *alone = comm_split(world, world->rank, 0, "alone");
    int *place = calloc((size_t)half->size, sizeof *place);
    comm_wait(comm_host_all_gather(half, place, &world->rank, (size_t)half->size, DTYPE_I32));
    const size_t n = (size_t)world->size, counts[] = {0, 1, n - 1, n, 2 * n - 1, 64 * n, 1001};
    for (DType t = DTYPE_F32; t <= DTYPE_U8; t++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) try_device(all, member, counts[i], t);
        try_device(half, place, 1003, t), try_device(alone, &world->rank, 1003, t);
    }
    try_device(all, member, n * ((512 << 10) / 4) + 1, DTYPE_F32);
    try_device(all, member, 300000, DTYPE_BF16);
    for (int op = 0; op < COMM_OPS; op++)
        check(alone->count[op].bytes == 0 && alone->count[op].exposed_ms >= 0);
    check(alone->count[OP_ALL_REDUCE].calls == 5 && alone->count[OP_ALL_REDUCE_MAX].calls == 1);
    device_in_flight(all, second, alone, member);
    crossing_groups();
    give_back_while_waiting(all);

    // Awaited while another rank is late, it is exposed.
    double was = all->count[OP_ALL_REDUCE].exposed_ms;
    char *x = device_alloc(MEM_COMMUNICATION, 400);
    device_synchronize();
    comm_wait(comm_barrier(world));
    if (world->rank == 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
    comm_wait(comm_all_reduce(all, x, 100, DTYPE_F32));
    device_synchronize();
    comm_list(NULL, 0);
    if (world->rank != 0) check(all->count[OP_ALL_REDUCE].exposed_ms - was > 20);
    device_free(MEM_COMMUNICATION, x, 400);

    comm_free(alone);
    comm_free(half);
    comm_free(second);
    comm_free(all);
    check(comm_list(NULL, 0) == before);
    free(place);
    free(member);
    exact = false;
    agree();
}

static void test_device_mpi(void **state) {
    (void)state;
    try_transport(TRANSPORT_MPI);
}

// NCCL takes a GPU for each rank.
static void test_device_nccl(void **state) {
    (void)state;
    if (device_count() > 0 && device_count() < comm_host().local_size) return;
    try_transport(TRANSPORT_NCCL);
}

// A GPU's waits for messages are in the trace, even where their group is freed before it has come to them. So are both ends
// of a message, with the same number.
static void test_waits_of_a_freed_group(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    char path[64], line[256], *x = device_alloc(MEM_COMMUNICATION, 400);
    snprintf(path, sizeof path, "/tmp/test_comm.%d", (int)getpid());
    comm_use(TRANSPORT_MPI);
    Comm *brief = comm_split(world, 0, 0, "brief");
    trace_open(world, path);
    Work w = comm_all_reduce(brief, x, 100, DTYPE_F32);
    for (int i = 0; i < 1000; i++) device_zero(x + 200, 200);
    comm_wait(w);
    comm_free(brief);
    Comm *two = world->size > 1 ? comm_channel(world, 1, 0, "two") : NULL;
    for (int i = 0; two && i < 2; i++)
        comm_wait(two->rank == 0 ? comm_send(two, x, 10, DTYPE_F32) : comm_receive(two, x, 10, DTYPE_F32));
    if (two) comm_free(two);
    trace_close(world);
    device_free(MEM_COMMUNICATION, x, 400);
    int waits = 0, sends = 0, receives = 0;
    FILE *f = world->rank == 0 ? fopen(path, "r") : NULL;
    while (f && fgets(line, sizeof line, f)) {
        waits += strstr(line, "wait for all_reduce") != NULL;
        if (strstr(line, "\"send\"") && strstr(line, "\"number\":2"))
            *(strstr(line, "\"bytes\":40") ? &sends : &receives) += 1;
    }
    if (f && world->size > 1) check(sends == 1 && receives == 1);
    if (f && device_count() > 0) check(waits == (world->size > 1 ? world->size : 0));
    if (f) fclose(f), unlink(path);
    agree();
}

// ---- messages ---------------------------------------------------------------------------------------------------------

// Channels: to the right and to the left between neighbours, a second one to the right, and from the last rank to rank 0.
typedef struct {
    Comm *c;
    int from, to;
} Line;
static const char *const line_name[] = {"right", "left", "second"};
static int open_lines(Line *line) {
    int n = 0;
    for (int r = 0; r + 1 < world->size; r++) {
        line[n++] = (Line){.from = r, .to = r + 1};
        line[n++] = (Line){.from = r + 1, .to = r};
        line[n++] = (Line){.from = r, .to = r + 1};
    }
    if (world->size > 2) line[n++] = (Line){.from = world->size - 1, .to = 0};
    for (Line *l = line; l < line + n; l++) {
        l->c = comm_channel(world, l->from, l->to, line_name[(l - line) % 3]);
        bool ours = world->rank == l->from || world->rank == l->to;
        check(!l->c == !ours);
        check(!ours || (l->c->size == 2 && l->c->rank == (world->rank == l->to) && l->c->first == l->from));
    }
    return n;
}

// Some messages on each line, all under way together; awaited in another order than started, each rank in its own.
static void many_messages(Line *line, int n, bool on_host) {
    const struct {
        size_t count;
        DType type;
    } kind[] = {{1001, DTYPE_F32},
                {0, DTYPE_F32},
                {(on_host ? 5 : 1) * (512 << 10) / 4 + 3, DTYPE_F32}, // more slices than lanes; two
                {1, DTYPE_BF16},
                {7777, DTYPE_BF16}};
    enum { KINDS = sizeof kind / sizeof *kind };
    struct {
        Work work;
        char *buf, *want;
    } *message = calloc((size_t)(n * KINDS), sizeof *message), *m;
    uint64_t sent = 0;
    for (int i = 0; i < n * KINDS; i++) {
        Line *l = &line[i % n];
        int k = (i / n + i % n) % KINDS; // large ones beside small ones
        size_t count = kind[k].count, bytes = count * dtype_size(kind[k].type);
        if (!l->c) continue;
        bool sends = world->rank == l->from;
        m = &message[i];
        m->want = brought(count, kind[k].type, 100 * i + l->from);
        if (on_host) {
            m->buf = sends ? brought(count, kind[k].type, 100 * i + l->from) : buffer(bytes);
            m->work = sends ? comm_host_send(l->c, m->buf, count, kind[k].type)
                            : comm_host_receive(l->c, m->buf, count, kind[k].type);
        } else {
            m->buf = device_alloc(MEM_COMMUNICATION, bytes);
            char *made = on_device(m->want, bytes);
            if (sends) device_copy(m->buf, made, bytes); // queued
            m->work = sends ? comm_send(l->c, m->buf, count, kind[k].type)
                            : comm_receive(l->c, m->buf, count, kind[k].type);
            device_free(MEM_COMMUNICATION, made, bytes);
        }
        if (sends) sent += bytes;
        if ((i + world->rank) % 3 == 0) comm_progress();
    }
    for (int j = 0; j < n * KINDS; j++) {
        const int i = world->rank % 2 ? n * KINDS - 1 - j : (j + n / 2) % (n * KINDS);
        const int k = (i / n + i % n) % KINDS;
        size_t bytes = kind[k].count * dtype_size(kind[k].type);
        m = &message[i];
        if (!m->work.comm) continue;
        comm_wait(m->work);
        check(on_host ? memcmp(m->buf, m->want, bytes) == 0 : same_on_device(m->buf, m->want, bytes));
        if (on_host)
            buffer_free(m->buf, bytes);
        else
            device_zero(m->buf, bytes), device_free(MEM_COMMUNICATION, m->buf, bytes);
        buffer_free(m->want, bytes);
    }
    free(message);
    for (Line *l = line; l < line + n; l++) {
        if (!l->c) continue;
        CommCount *count = &l->c->count[OP_SEND];
        check(count->calls == KINDS);
        sent -= count->bytes; // of all that this rank sends
        check((count->bytes > 0) == (world->rank == l->from));
        for (int op = 0; op < COMM_OPS; op++) check(op == OP_SEND || l->c->count[op].calls == 0);
        *count = (CommCount){0};
    }
    check(sent == 0);
}

// Each message goes through all ranks, and a kernel's copy in between, with the next two already on their way.
static void relay(Line *line) {
    enum { MESSAGES = 8, SLOTS = 3, COUNT = 3001, BYTES = COUNT * 4 };
    const int me = world->rank, last = world->size - 1;
    Comm *left = me > 0 ? line[3 * (me - 1)].c : NULL, *right = me < last ? line[3 * me].c : NULL;
    char *in[SLOTS], *out[SLOTS];
    Work received[SLOTS] = {0}, sent[SLOTS] = {0};
    for (int i = 0; i < SLOTS; i++) {
        in[i] = device_alloc(MEM_COMMUNICATION, BYTES), out[i] = device_alloc(MEM_COMMUNICATION, BYTES);
        if (left) received[i] = comm_receive(left, in[i], COUNT, DTYPE_F32);
    }
    for (int i = 0; i < MESSAGES; i++) {
        const int slot = i % SLOTS;
        char *want = brought(COUNT, DTYPE_F32, i);
        if (left)
            comm_wait(received[slot]);
        else
            device_copy_in(in[slot], want, BYTES);
        comm_wait(sent[slot]); // the buffer is free
        device_copy(out[slot], in[slot], BYTES);
        if (right) sent[slot] = comm_send(right, out[slot], COUNT, DTYPE_F32);
        if (left && i + SLOTS < MESSAGES) received[slot] = comm_receive(left, in[slot], COUNT, DTYPE_F32);
        if (!right) check(same_on_device(out[slot], want, BYTES));
        buffer_free(want, BYTES);
    }
    for (int i = 0; i < SLOTS; i++) {
        comm_wait(sent[i]);
        device_free(MEM_COMMUNICATION, in[i], BYTES), device_free(MEM_COMMUNICATION, out[i], BYTES);
    }
    if (left) left->count[OP_SEND] = (CommCount){0};
    if (right) right->count[OP_SEND] = (CommCount){0};
}

static void try_channels(bool on_host) {
    int before = comm_list(NULL, 0), mine = 0;
    Line *line = calloc((size_t)(3 * world->size), sizeof *line);
    int n = open_lines(line);
    for (Line *l = line; l < line + n; l++) mine += l->c != NULL;
    check(comm_list(NULL, 0) == before + mine);
    many_messages(line, n, on_host);
    if (!on_host) relay(line);
    for (Line *l = line; l < line + n; l++)
        if (l->c) comm_free(l->c);
    check(comm_list(NULL, 0) == before);
    free(line);
}

static void test_channels(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    try_channels(true);
    agree();
}

static void test_channels_on_a_device(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    comm_use(TRANSPORT_MPI);
    try_channels(false);
    agree();
    if (device_count() > 0 && device_count() < comm_host().local_size) return;
    comm_use(TRANSPORT_NCCL);
    try_channels(false);
    agree();
}

// A message does not wait for those of other channels, and one end may be far ahead of the other.
static void test_message_passes_others(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    if (world->size == 1) return;
    Comm *a = comm_channel(world, 1, 0, "slow"), *b = comm_channel(world, 1, 0, "fast");
    float x[2] = {0}, y[3] = {0}, two[2] = {2, 3}, three[3] = {4, 5, 6};
    if (world->rank == 0) {
        Work slow = comm_host_receive(a, x, 2, DTYPE_F32), last = {0};
        for (int i = 0; i < 3; i++) last = comm_host_receive(b, y + i, 1, DTYPE_F32);
        comm_wait(last);
        check(y[0] == 4 && y[1] == 5 && y[2] == 6 && x[1] == 0);
        comm_wait(comm_barrier(world));
        comm_wait(slow);
        check(x[0] == 2 && x[1] == 3);
    } else {
        for (int i = 0; i < 3 && b; i++) comm_wait(comm_host_send(b, three + i, 1, DTYPE_F32));
        comm_wait(comm_barrier(world));
        if (a) comm_wait(comm_host_send(a, two, 2, DTYPE_F32));
    }
    if (b) check(b->count[OP_SEND].calls == 3 && b->count[OP_SEND].bytes == (world->rank ? 12 : 0));

    // A send is done once its receiver takes it, however small it is.
    if (a && world->rank == 0) {
        comm_wait(comm_barrier(a));
        nanosleep(&(struct timespec){0, 200000000}, NULL);
        comm_wait(comm_host_receive(a, x, 2, DTYPE_F32));
    } else if (a) {
        comm_wait(comm_barrier(a));
        comm_wait(comm_host_send(a, two, 2, DTYPE_F32));
        check(a->count[OP_SEND].exposed_ms > 20);
    }
    if (a) comm_free(b), comm_free(a);
    agree();
}

// ---- shifts -----------------------------------------------------------------------------------------------------------

// A ring, on the host's memory or the device's, and the world ranks of its members.
typedef struct {
    Comm *c;
    bool on_host;
    int *member;
} Circle;

static int member_at(const Circle *l, int rank) {
    return l->member[((rank % l->c->size) + l->c->size) % l->c->size];
}
static Work shift(const Circle *l, char *out, const char *in, size_t count, DType t) {
    return (l->on_host ? comm_host_shift : comm_shift)(l->c, out, in, count, t);
}

// [bytes] of the memory in which the ring shifts, with what `with` has, in a copy that is queued; or with other things.
static char *place(const Circle *l, const char *with, size_t bytes) {
    char *p = l->on_host ? buffer(bytes) : device_alloc(MEM_COMMUNICATION, bytes);
    if (l->on_host && with) memcpy(p, with, bytes);
    if (l->on_host) return p;
    char *made = with ? on_device(with, bytes) : NULL;
    if (with)
        device_copy(p, made, bytes), device_free(MEM_COMMUNICATION, made, bytes);
    else
        device_zero(p, bytes);
    return p;
}
// Does it hold what this rank has brought? And no longer, afterwards.
static bool holds(const Circle *l, char *p, size_t count, DType t, int who) {
    size_t bytes = count * dtype_size(t);
    char *want = brought(count, t, who);
    bool same = l->on_host ? memcmp(p, want, bytes) == 0 : same_on_device(p, want, bytes);
    l->on_host ? (void)memset(p, 0x33, bytes) : device_zero(p, bytes);
    buffer_free(want, bytes);
    return same;
}
static void give_back(const Circle *l, char *p, size_t bytes) {
    if (l->on_host)
        buffer_free(p, bytes);
    else
        device_free(MEM_COMMUNICATION, p, bytes);
}

// Some shifts in a row, of which each sends what the one before it brings; nobody waits in between.
static void go_round(const Circle *l, size_t count, DType t, int times) {
    Comm *c = l->c;
    const size_t bytes = count * dtype_size(t);
    char *mine = brought(count, t, l->member[c->rank]),
         *buf[2] = {place(l, mine, bytes), place(l, NULL, bytes)};
    CommCount before[COMM_OPS];
    memcpy(before, c->count, sizeof before);
    Work last = {0};
    for (int i = 0; i < times; i++) {
        last = shift(l, buf[(i + 1) % 2], buf[i % 2], count, t);
        if ((i + world->rank) % 3 == 0) comm_progress();
    }
    comm_wait(last);
    check(holds(l, buf[times % 2], count, t, member_at(l, c->rank - times)));
    check(holds(l, buf[(times + 1) % 2], count, t, member_at(l, c->rank - times + 1))); // is left as it was
    check(c->count[OP_SHIFT].calls == before[OP_SHIFT].calls + (uint64_t)times);
    check(SENT(OP_SHIFT) == (c->size > 1 ? (size_t)times * bytes : 0));
    give_back(l, buf[0], bytes), give_back(l, buf[1], bytes);
    buffer_free(mine, bytes);
}

// Shifts this way round and that under way at the same time, with sums beside them, awaited by each rank in its own order.
static void both_ways(const Circle *a, const Circle *b, Comm *sums) {
    enum { WORKS = 9, COUNT = 20003, BYTES = COUNT * 4 };
    const Circle *ring[] = {a, b};
    char *in[WORKS], *out[WORKS], *mine = brought(COUNT, DTYPE_F32, world->rank);
    char *sum = ring_sum(COUNT, DTYPE_F32, sums->size == world->size ? a->member : &world->rank, sums->size);
    Work work[WORKS];
    for (int i = 0; i < WORKS; i++) {
        in[i] = place(a, mine, BYTES), out[i] = place(a, NULL, BYTES);
        if (i % 3 < 2)
            work[i] = shift(ring[i % 3], out[i], in[i], COUNT, DTYPE_F32);
        else
            work[i] = (a->on_host ? comm_host_all_reduce : comm_all_reduce)(sums, in[i], COUNT, DTYPE_F32);
    }
    for (int i = 0; i < WORKS; i++) comm_wait(work[world->rank % 2 ? WORKS - 1 - i : (5 * i) % WORKS]);
    for (int i = 0; i < WORKS; i++) {
        const Circle *l = ring[i % 3 % 2];
        if (i % 3 == 2)
            check(a->on_host ? memcmp(in[i], sum, BYTES) == 0 : same_on_device(in[i], sum, BYTES));
        else
            check(holds(l, out[i], COUNT, DTYPE_F32, member_at(l, l->c->rank - 1)) &&
                  holds(l, in[i], COUNT, DTYPE_F32, world->rank));
        give_back(a, in[i], BYTES), give_back(a, out[i], BYTES);
    }
    buffer_free(sum, BYTES);
    buffer_free(mine, BYTES);
}

static Circle circle_of(Comm *c, bool on_host) {
    Circle l = {c, on_host, NULL};
    l.member = calloc((size_t)l.c->size, sizeof *l.member);
    comm_wait(comm_host_all_gather(l.c, l.member, &world->rank, (size_t)l.c->size, DTYPE_I32));
    return l;
}
static Circle circle(int color, int key, const char *name, bool on_host) {
    return circle_of(comm_ring(world, color, key, name), on_host);
}

// Where rank 0 is late, its neighbours wait: the right one for what it sends, the left one until it takes.
static void late_neighbour(const Circle *l) {
    Comm *c = l->c;
    double was = c->count[OP_SHIFT].exposed_ms;
    char *in = place(l, NULL, 400), *out = place(l, NULL, 400);
    if (!l->on_host) device_synchronize();
    comm_wait(comm_barrier(c));
    if (c->rank == 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
    comm_wait(shift(l, out, in, 100, DTYPE_F32));
    if (!l->on_host) device_synchronize();
    comm_list(NULL, 0);
    if (c->rank == 1 || (c->rank != 0 && c->rank == c->size - 1))
        check(c->count[OP_SHIFT].exposed_ms - was > 20);
    give_back(l, in, 400), give_back(l, out, 400);
}

static void try_shifts(bool on_host) {
    int before = comm_list(NULL, 0), rank = world->rank;
    exact = true; // sums are not what is tried here
    Circle ring[] = {circle(0, rank, "ring", on_host), circle(0, -rank, "back", on_host),
                     circle(rank % 2, -rank, "half", on_host), circle(rank, 0, "alone", on_host)};
    Comm *sums = comm_split(world, 0, 0, "sums");
    check(ring[1].c->rank == world->size - 1 - rank && ring[3].c->size == 1 && !ring[0].c->parent);
    const size_t slice = 512 << 10, counts[] = {0, 1, 2, 13, 1001, (size_t)world->size + 1};
    for (int i = 0; i < 4; i++) {
        for (DType t = DTYPE_F32; t <= DTYPE_U8; t++)
            for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
                go_round(&ring[i], counts[k], t, 1), go_round(&ring[i], counts[k], t, 2);
        go_round(&ring[i], 777, DTYPE_F32, 2 * world->size + 1); // more than once round
        go_round(&ring[i], slice / 4 + 1, DTYPE_F32, 1);         // around a slice,
        go_round(&ring[i], slice / 2 - 1, DTYPE_BF16, 3);
        if (on_host || i == 0) go_round(&ring[i], 5 * slice / 4 + 3, DTYPE_F32, 3); // more slices than lanes
        go_round(&ring[i], 100, DTYPE_F64, 4);                                      // smaller again
        for (int op = 0; op < COMM_OPS; op++)
            check(op == OP_SHIFT || op == OP_ALL_GATHER || ring[i].c->count[op].calls == 0);
    }
    for (int i = 0; i < COMM_OPS; i++) check(ring[3].c->count[i].bytes == 0);
    both_ways(&ring[0], &ring[1], sums);
    late_neighbour(&ring[1]);
    comm_free(sums);
    for (int i = 3; i >= 0; i--) comm_free(ring[i].c), free(ring[i].member);
    check(comm_list(NULL, 0) == before);
    exact = false;
}

static void test_shifts(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    try_shifts(true);
    agree();
}

static void test_shifts_on_a_device(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    comm_use(TRANSPORT_MPI);
    try_shifts(false);
    agree();
    if (device_count() < comm_host().local_size) return;
    comm_use(TRANSPORT_NCCL);
    try_shifts(false);
    agree();
}

// ---- all-to-alls ------------------------------------------------------------------------------------------------------

// One that is under way, and back: what comes is sent home before anybody has waited for it.
typedef struct {
    const Circle *l;
    DType type;
    size_t row, bytes[2], sent; // bytes of a row, of the two buffers, to others there and back
    char *here, *there, *home;  // on the host or the device
    char *is_here, *is_there, *is_home;
    CommCount before;
    Work there_and_back;
} Exchange;

static size_t rows_between(int from, int to, int part, size_t most) {
    uint32_t h = hash((uint32_t)(1000 + from * 64 + to), (size_t)part);
    return h % 3 == 0 ? 0 : h / 3 % (most + 1);
}

// Parts with a row between them, from the buffer's end or from its beginning; returns its rows.
static size_t lay(CommRows *table, size_t parts, bool from_end) {
    size_t rows = 1;
    for (size_t k = 0; k < parts; k++) {
        CommRows *r = &table[from_end ? parts - 1 - k : k];
        r->first = rows;
        rows += r->rows + 1;
    }
    return rows;
}

static Exchange exchange(const Circle *l, int parts, size_t width, size_t most, DType t) {
    Comm *c = l->c;
    size_t n = (size_t)(c->size * parts);
    Exchange x = {.l = l, .type = t, .row = width * dtype_size(t), .before = c->count[OP_ALL_TO_ALL]};
    CommRows *out = calloc(n, sizeof *out), *in = calloc(n, sizeof *in);
    for (int k = 0; k < (int)n; k++) {
        int other = l->member[k / parts], me = l->member[c->rank];
        out[k].rows = rows_between(me, other, k % parts, most);
        in[k].rows = rows_between(other, me, k % parts, most);
        if (other != me) x.sent += (out[k].rows + in[k].rows) * x.row;
    }
    x.bytes[0] = lay(out, n, true) * x.row, x.bytes[1] = lay(in, n, false) * x.row;
    x.is_here = buffer(x.bytes[0]), x.is_there = buffer(x.bytes[1]), x.is_home = buffer(x.bytes[0]);
    x.home = place(l, x.is_home, x.bytes[0]), x.there = place(l, x.is_there, x.bytes[1]);
    for (int k = 0; k < (int)n; k++) { // what a part holds, says who sends it to whom
        int other = l->member[k / parts], me = l->member[c->rank], i = k % parts;
        char *from = x.is_here + out[k].first * x.row, *to = x.is_there + in[k].first * x.row;
        for (size_t j = 0; j < out[k].rows * width; j++)
            put(from + j * dtype_size(t), t, (me * 64 + other) * parts + i, j);
        for (size_t j = 0; j < in[k].rows * width; j++)
            put(to + j * dtype_size(t), t, (other * 64 + me) * parts + i, j);
        if (out[k].rows) memcpy(x.is_home + out[k].first * x.row, from, out[k].rows * x.row);
    }
    x.here = place(l, x.is_here, x.bytes[0]);
    Work (*start)(Comm *, void *, const CommRows *, const void *, const CommRows *, int, size_t, DType) =
        l->on_host ? comm_host_all_to_all : comm_all_to_all;
    start(c, x.there, in, x.here, out, parts, width, t);
    x.there_and_back = start(c, x.home, out, x.there, in, parts, width, t);
    memset(out, 0xff, n * sizeof *out), memset(in, 0xff, n * sizeof *in);
    free(out), free(in);
    return x;
}

static void exchanged(Exchange *x) {
    const Circle *l = x->l;
    const CommCount *now = &l->c->count[OP_ALL_TO_ALL];
    char *are[] = {x->here, x->there, x->home}, *want[] = {x->is_here, x->is_there, x->is_home};
    comm_wait(x->there_and_back);
    for (int i = 0; i < 3; i++) {
        size_t bytes = x->bytes[i % 2];
        check(l->on_host ? memcmp(are[i], want[i], bytes) == 0 : same_on_device(are[i], want[i], bytes));
        give_back(l, are[i], bytes), buffer_free(want[i], bytes);
    }
    check(now->calls == x->before.calls + 2 && now->bytes == x->before.bytes + x->sent);
}

// Where rank 0 is late to take what all others send it, they wait, though nothing comes for them.
static void late_receiver(const Circle *l) {
    Comm *c = l->c;
    double was = c->count[OP_ALL_TO_ALL].exposed_ms;
    CommRows *out = calloc((size_t)c->size, sizeof *out), *in = calloc((size_t)c->size, sizeof *in);
    char *from = place(l, NULL, 4), *to = place(l, NULL, (size_t)c->size * 4);
    out[0].rows = c->rank > 0;
    for (int r = 1; r < c->size && c->rank == 0; r++) in[r] = (CommRows){(size_t)r, 1};
    if (!l->on_host) device_synchronize();
    comm_wait(comm_barrier(c));
    if (c->rank == 0) nanosleep(&(struct timespec){0, 50000000}, NULL);
    comm_wait((l->on_host ? comm_host_all_to_all : comm_all_to_all)(c, to, in, from, out, 1, 1, DTYPE_F32));
    if (!l->on_host) device_synchronize();
    comm_list(NULL, 0);
    if (c->rank > 0) check(c->count[OP_ALL_TO_ALL].exposed_ms - was > 20);
    give_back(l, from, 4), give_back(l, to, (size_t)c->size * 4);
    free(out), free(in);
}

static void try_all_to_alls(bool on_host) {
    int before = comm_list(NULL, 0), rank = world->rank;
    const char *names[] = {"mesh", "back", "half", "alone"};
    int colors[] = {0, 0, rank % 2, rank}, keys[] = {rank, -rank, -rank, 0};
    const size_t slice = 512 << 10;
    Circle mesh[4];
    for (int i = 0; i < 4; i++) mesh[i] = circle_of(comm_mesh(world, colors[i], keys[i], names[i]), on_host);
    for (int i = 0; i < 4; i++) {
        for (DType t = DTYPE_F32; t <= DTYPE_U8; t++)
            for (int parts = 1; parts <= 4; parts++) {
                Exchange x = exchange(&mesh[i], parts, 3, 7, t);
                exchanged(&x);
            }
        size_t widest =
            i == 0 ? 5 * slice / 4 + 1 : slice / 4 + 1; // a row has more slices than there are lanes
        Exchange wide = exchange(&mesh[i], 1, widest, 1, DTYPE_F32);
        exchanged(&wide);
        Exchange none = exchange(&mesh[i], 2, 5, 0, DTYPE_F32);
        exchanged(&none);
        for (int op = 0; op < COMM_OPS; op++)
            check(op == OP_ALL_TO_ALL || op == OP_ALL_GATHER || mesh[i].c->count[op].calls == 0);
    }
    check(mesh[3].c->count[OP_ALL_TO_ALL].bytes == 0);
    Exchange a = exchange(&mesh[0], 2, 1001, 30, DTYPE_F32), b = exchange(&mesh[1], 3, 500, 30, DTYPE_BF16);
    if (rank % 2) exchanged(&a);
    exchanged(&b);
    if (rank % 2 == 0) exchanged(&a);
    late_receiver(&mesh[1]);
    for (int i = 3; i >= 0; i--) comm_free(mesh[i].c), free(mesh[i].member);
    check(comm_list(NULL, 0) == before);
}

static void test_all_to_alls(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    try_all_to_alls(true);
    agree();
}

static void test_all_to_alls_on_a_device(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    comm_use(TRANSPORT_MPI);
    try_all_to_alls(false);
    agree();
    if (device_count() < comm_host().local_size) return;
    comm_use(TRANSPORT_NCCL);
    try_all_to_alls(false);
    agree();
}

// ---- other ways to start and to end, for test_comm.py ---------------------------------------------------------------

static volatile sig_atomic_t caught;
static void catch (int signal) {
    caught = signal;
}

// A pipeline of four: each rank sends to the right, and the answers come back. Then something happens to rank 2, and the others
// wait for it in a chain; or 2 and 3 each wait for a message of the other; or they go on, while 0 waits for 1, and 1 for 2.
static void pipeline(bool on_device, const char *what) {
    Comm *right[3], *left[3];
    for (int r = 0; r < 3; r++) {
        right[r] = comm_channel(world, r, r + 1, "right");
        left[r] = comm_channel(world, r + 1, r, "left");
    }
    const int me = world->rank;
    char *x = device_alloc(MEM_COMMUNICATION, 400);
    bool slow = strcmp(what, "slow") == 0, circle = strcmp(what, "circle") == 0;
    for (int i = 0; i < 3; i++) {
        if (i == 2 && me == 2 && strcmp(what, "stopped") == 0) sleep(1), raise(SIGSTOP); // a report has come
        if (i == 2 && me == 2 && strcmp(what, "killed") == 0) raise(SIGKILL);
        if (i == 2 && me == 2 && strcmp(what, "asleep") == 0) pause();
        if (i == 2 && me == 2 && circle) comm_wait(comm_receive(left[2], x, 100, DTYPE_F32));
        for (int k = 0; k < 9 && i == 2 && slow && me >= 2; k++) { // for 4.5 seconds
            if (me == 3) nanosleep(&(struct timespec){0, 500000000}, NULL);
            comm_wait(me == 3 ? comm_send(left[2], x, 100, DTYPE_F32)
                              : comm_receive(left[2], x, 100, DTYPE_F32));
        }
        if (me > 0) comm_wait(comm_receive(right[me - 1], x, 100, DTYPE_F32));
        if (me < 3) comm_wait(comm_send(right[me], x, 100, DTYPE_F32));
        if (me < 3) comm_wait(comm_receive(left[me], x, 100, DTYPE_F32));
        if (me > 0) comm_wait(comm_send(left[me - 1], x, 100, DTYPE_F32));
        if (on_device) device_synchronize();
    }
}

// Some shifts round a ring, until rank 2 does not come to the third one, or with another count, or leaves it out; or all do
// not wait for the first, and look.
static void shifts(const char *memory, const char *what) {
    const int me = world->rank;
    Comm *ring = comm_ring(world, 0, 0, "ring");
    bool unawaited = strcmp(what, "unawaited") == 0;
    char *mine = brought(100, DTYPE_F32, me), *in = on_device(mine, 400),
         *out = device_alloc(MEM_COMMUNICATION, 400);
    char *want = brought(100, DTYPE_F32, (me + world->size - 1) % world->size), *seen = on_device(mine, 400);
    for (int i = 0; i < 3; i++) {
        if (i == 2 && me == 2 && strcmp(what, "stopped") == 0) sleep(1), raise(SIGSTOP); // a report has come
        if (i == 2 && me == 2 && strcmp(what, "asleep") == 0) pause();
        if (i == 2 && me == 2 && strcmp(what, "left-out") == 0) continue;
        size_t count = i == 2 && me == 2 && strcmp(what, "count") == 0 ? 99 : 100;
        Work w = (*memory == 'h' ? comm_host_shift : comm_shift)(ring, out, in, count, DTYPE_F32);
        if (unawaited && i == 0) {
            device_copy(seen, out, 400);
            device_synchronize();
            bool right = same_on_device(seen, want, 400);
            comm_wait(w);
            right = comm_all_true(world, right);
            if (me == 0) puts(right ? "right" : "wrong");
        }
        comm_wait(w);
        if (*memory != 'h') device_synchronize();
        if (unawaited) check(same_on_device(out, want, 400));
    }
    device_free(MEM_COMMUNICATION, seen, 400);
    device_free(MEM_COMMUNICATION, out, 400);
    device_free(MEM_COMMUNICATION, in, 400);
    buffer_free(want, 400);
    buffer_free(mine, 400);
}

static bool dealt; // to three hosts in turn, for mode "hosts"
#ifdef USE_MPI
int MPI_Comm_split_type(MPI_Comm c, int type, int key, MPI_Info info, MPI_Comm *out) {
    return dealt ? PMPI_Comm_split(c, 2 - key % 3, key, out) : PMPI_Comm_split_type(c, type, key, info, out);
}
#endif

static int show(const char *mode, int argc, char **argv) {
    if (strcmp(mode, "who") == 0) {
        printf("%d %d %d %d\n", launch_rank(), launch_size(), launch_local_rank(), launch_local_size());
        return 0;
    }
    int threads = launch_threads();
    if (strcmp(mode, "fail-all-early") == 0) {
        if (launch_rank() == 0)
            nanosleep(&(struct timespec){0, 300000000}, NULL); // the others must not end before
        fail_all(EXIT_USAGE, "--tp %d does not divide %d heads", 3, 8);
    }
    if (strcmp(mode, "fail-early") == 0 && launch_rank() == launch_size() - 1)
        fail(EXIT_USAGE, "cannot open %s", "x");
    dealt = strcmp(mode, "hosts") == 0;
    world = comm_init(&argc, &argv);
    bool last = world->rank == world->size - 1;
    if (strcmp(mode, "fail-all") == 0) fail_all(EXIT_USAGE, "--tp %d does not divide %d heads", 3, 8);
    if (strcmp(mode, "fail") == 0 && last) fail(EXIT_RUNTIME, "cannot open %s", "x");
    if (strcmp(mode, "killed") == 0 && last) raise(SIGKILL);
    if (strcmp(mode, "crossed") == 0) { // two works of which every message has the same size, in two orders
        float x[512] = {0}, y[512] = {0}, mine[512] = {0};
        size_t shard = comm_shard_begin(512, world->size, 1);
        watchdog_start(world, 3);
        if (world->rank == 0) comm_host_reduce_scatter(world, mine, x, 512, DTYPE_F32);
        Work w = comm_host_all_gather(world, y, mine + shard, 512, DTYPE_F32);
        if (world->rank > 0) w = comm_host_reduce_scatter(world, mine, x, 512, DTYPE_F32);
        comm_wait(w);
        watchdog_stop();
    }
    if (strcmp(mode, "stopped") == 0) { // it is early, and stops when it has come to nothing but the watchdog
        if (world->rank == 0) nanosleep(&(struct timespec){0, 200000000}, NULL);
        watchdog_start(world, 3);
        if (last) nanosleep(&(struct timespec){1, 0}, NULL), raise(SIGSTOP);
    }
    if (strcmp(mode, "ends-early") == 0) { // one leaves out a work, and is watched over until all have come
        float x[100] = {0};
        watchdog_start(world, 3);
        if (!last) comm_wait(comm_host_all_reduce(world, x, 100, DTYPE_F32));
        watchdog_stop();
    }
    if (strcmp(mode, "missing") ==
        0) { // on the device, by the transport that is named: the last rank does not come
        device_open(launch_local_rank());
        watchdog_start(world, 3);
        comm_use(strcmp(argv[2], "nccl") == 0 ? TRANSPORT_NCCL : TRANSPORT_MPI);
        Comm *all = comm_split(world, 0, 0, "all");
        char *x = device_alloc(MEM_COMMUNICATION, 400);
        for (int i = 0; i < 3; i++) {
            if (i == 2 && last) strcmp(argv[3], "stopped") == 0 ? raise(SIGSTOP) : pause();
            comm_wait(comm_all_reduce(all, x, 100, DTYPE_F32));
            device_synchronize();
        }
    }
    if (strcmp(mode, "pipeline") == 0) { // by the transport that is named, or on the host
        bool on_device = argv[2][0] != 'h';
        device_open(launch_local_rank());
        watchdog_start(world, 2);
        if (on_device) comm_use(strcmp(argv[2], "nccl") == 0 ? TRANSPORT_NCCL : TRANSPORT_MPI);
        pipeline(on_device, argv[3]);
        watchdog_stop();
        if (last) puts("through");
    }
    if (strcmp(mode, "ring") == 0) { // the same
        device_open(launch_local_rank());
        watchdog_start(world, 2);
        comm_use(strcmp(argv[2], "nccl") == 0 ? TRANSPORT_NCCL : TRANSPORT_MPI);
        shifts(argv[2], argv[3]);
        watchdog_stop();
    }
    if (strcmp(mode, "start") == 0) {
        char line[512], *end = line;
        end += sprintf(end, "rank %d of %d, %d threads, omp %d, cores", world->rank, world->size, threads,
                       omp_get_max_threads());
#ifdef __linux__
        cpu_set_t cores;
        sched_getaffinity(0, sizeof cores, &cores);
        for (int i = 0; i < 64; i++)
            if (CPU_ISSET(i, &cores)) end += sprintf(end, " %d", i);
#endif
        end += sprintf(end, ", arguments");
        for (int i = 2; i < argc; i++) end += snprintf(end, 64, " %s", argv[i]);
        puts(line);
    }
    if (dealt) {
        Host h = comm_host();
        printf("rank %d: %d of %d on host %d of %d\n", world->rank, h.local_rank, h.local_size, h.host,
               h.hosts);
    }
    if (strcmp(mode, "save") ==
        0) { // as the training loop does: once one rank is told to end, all save and end
        signal(SIGUSR1, catch), signal(SIGTERM, catch);
        comm_wait(comm_barrier(world));
        if (world->rank == 0) puts("ready"), fflush(stdout);
        while (comm_all_true(world, !caught)) nanosleep(&(struct timespec){0, 10000000}, NULL);
        nanosleep(&(struct timespec){2, 500000000}, NULL); // a slow disk; a signal may come again
        printf("rank %d saved\n", world->rank);
    }
    comm_wait(comm_barrier(world)); // the last rank may never come
    comm_finalize();
    return 0;
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--ranks") == 0) launch_ranks(atoi(argv[i + 1]), argc, argv, &(sig_atomic_t){0});
    if (argc > 1 && argv[1][0] != '-') return show(argv[1], argc, argv);
    device_open(launch_local_rank());
    device_free(MEM_COMMUNICATION, device_alloc(MEM_COMMUNICATION, 1), 1);
    sigaction(SIGSEGV, NULL, &before_cmocka);
    world = comm_init(&argc, &argv);
    if (world->rank != 0 && !freopen("/dev/null", "w", stdout)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_small_counts),
        cmocka_unit_test(test_large_counts),
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_in_flight),
        cmocka_unit_test(test_progress),
        cmocka_unit_test(test_small_things),
        cmocka_unit_test(test_staging),
        cmocka_unit_test(test_never_started),
        cmocka_unit_test(test_first),
        cmocka_unit_test(test_clock_offset),
        cmocka_unit_test(test_notes),
        cmocka_unit_test(test_watchdog),
        cmocka_unit_test(test_long_wait),
        cmocka_unit_test(test_waits_that_move_nothing),
        cmocka_unit_test(test_device_copies),
        cmocka_unit_test(test_device_mpi),
        cmocka_unit_test(test_device_nccl),
        cmocka_unit_test(test_waits_of_a_freed_group),
        cmocka_unit_test(test_channels),
        cmocka_unit_test(test_channels_on_a_device),
        cmocka_unit_test(test_message_passes_others),
        cmocka_unit_test(test_shifts),
        cmocka_unit_test(test_shifts_on_a_device),
        cmocka_unit_test(test_all_to_alls),
        cmocka_unit_test(test_all_to_alls_on_a_device),
    };
    // A rank that leaves a test must not leave the others waiting.
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    if (getenv("TESTS")) cmocka_set_test_filter(getenv("TESTS"));
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    comm_finalize();
    return failed != 0;
}

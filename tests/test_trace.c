// A trace of things that are known, for test_trace.py: what is written, and when it is said to have been.
//
// trace.c is compiled in a second time here, with clocks that are wrong: rank r's is r · 1000 s ahead and gains r ms a second.
#include <time.h>
#include <unistd.h>
double skewed_now(void);
#define seconds_now       skewed_now
#define comm_host         two_hosts
#define comm_clock_offset known_offset
#define device_moment     skewed_moment
#define trace_open        skewed_trace_open
#define trace_begin       skewed_trace_begin
#define trace_end         skewed_trace_end
#define trace_span        skewed_trace_span
#define trace_memory      skewed_trace_memory
#define trace_close       skewed_trace_close
#include "../runtime/trace.c"
#include "../runtime/launch.h"

static int rank;

static long real_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1000000000L * t.tv_sec + t.tv_nsec;
}

static double skewed(double real) {
    return real * (1 + 1e-3 * rank) + 1000 * rank;
}

double skewed_now(void) {
    return skewed(1e-9 * (double)real_ns());
}

Moment skewed_moment(void) {
    return (Moment){skewed_now(), NULL};
}

Host two_hosts(void) {
    return (Host){.local_size = 1, .hosts = 2};
}

double known_offset(Comm *world) {
    (void)world;
    double now = 1e-9 * (double)real_ns();
    return now - skewed(now);
}

// The span's number is the real time at which it begins.
static void real_time_span(const char *name) {
    long real = real_ns();
    trace_end("clock", name, real, trace_begin(), 0);
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--ranks") == 0) launch_ranks(atoi(argv[i + 1]), argc, argv, &(sig_atomic_t){0});
    Comm *world = comm_init(&argc, &argv);
    rank = world->rank;

    ledger.live[MEM_WEIGHTS] = 1000;
    trace_memory();
    Moment early = trace_begin();
    trace_end("compute", "before the trace", 0, early, 0);
    if (rank == 0) usleep(100000); // the others do not know before where the trace begins
    trace_open(world, argv[1]);
    trace_end("compute", "begun before the trace", 0, early, 0);

    // More than are sent at once, and another number on each rank.
    Moment outer = trace_begin();
    for (long i = 0; i < 5000 * (rank + 1); i++) {
        Moment began = trace_begin();
        trace_end("compute", "inner", i, began, (size_t)i);
        ledger.live[MEM_ACTIVATIONS] = (size_t)i % 2 * 64;
        trace_memory();
        trace_memory(); // nothing has changed
    }
    trace_end("compute", "outer", -1, outer, 0);
    trace_end("zeta", "plain", -1, trace_begin(), 0);
    trace_end("a \"quoted\" \\ group", "two\nlines, µ", -1, trace_begin(), 7);

    for (int i = 0; i < 5; i++) {
        real_time_span("tick");
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    ledger.live[MEM_OPTIMIZER] = 300; // two categories, one sample
    ledger.live[MEM_WEIGHTS] = 2000;
    trace_memory();
    trace_close(world);
    trace_end("compute", "after the trace", 0, trace_begin(), 0);
    comm_finalize();
    return 0;
}

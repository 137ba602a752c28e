// What may go wrong in a run, by order of FAULT=KIND:RANK:N (and :SECONDS for sleep): on that rank,
//
//     skip    its N-th reduction over dp is left out               stop    there the process stops itself (SIGSTOP)
//     swap    it starts after the next collective of the group     sleep   there it does nothing, for ever or SECONDS
//     nan     the N-th matmul_backward_weight writes a NaN         flip    after the N-th adamw_update a weight differs
//     deaf    its first N calls of rank 0's watchdog are refused           in its lowest bit
//     cut     its line to rank 0's watchdog is cut at report N
//     drift   as flip, a second moment                             master  as flip, an fp32 master
//     late    the launcher takes SECONDS to hear that the rank ends the job (N does not matter)
//
// The first four over another group: skip@tp, stop@tp, sleep@tp. (What is awaited at once cannot be swapped.) A channel is a
// group of two: "skip@F to stage 1" leaves out a send or a receive, by the rank; swap puts it behind the next message of
// another channel, and nobody awaits it (the ring does not mind, NCCL does); and
//
//     again   the N-th message of the channel is sent, or received, a second time
//
// Nothing of that is in the program: it is linked anew, with --wrap for the functions below (see the Makefile).
#include "kernels/kernels.h"
#include "runtime/comm.h"
#include "runtime/fail.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mpi.h>

static struct {
    char kind[40];
    const char *group;
    int rank, n;
    double seconds;
} fault;

static void read_order(void) {
    if (fault.n) return;
    fault.seconds = 1e9;
    const char *order = getenv("FAULT");
    if (!order || sscanf(order, "%39[^:]:%d:%d:%lf", fault.kind, &fault.rank, &fault.n, &fault.seconds) < 3)
        fail_all(EXIT_USAGE, "FAULT is not KIND:RANK:N");
    char *at = strchr(fault.kind, '@');
    if (at) *at = 0;
    fault.group = at ? at + 1 : "dp";
}

static bool ordered(const char *kind) {
    read_order();
    return strcmp(kind, fault.kind) == 0 && launch_rank() == fault.rank;
}

// Is this the N-th time on that rank?
static bool happens(const char *kind, int *times) {
    return ordered(kind) && ++*times == fault.n;
}

static void sleep_at_fault(void) {
    for (double slept = 0; slept < fault.seconds; slept += 0.1) usleep(100000); // MPI must not be called here
}

// ---- collectives ----------------------------------------------------------------------------------------------------

typedef struct {
    CommOp op;
    Comm *comm;
    void *out;
    const void *in;
    size_t count;
    DType type;
} Call;

Work __real_comm_all_reduce(Comm *c, void *buf, size_t count, DType t);
Work __real_comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t);
Work __real_comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t);

static Work start(Call c) {
    return c.op == OP_ALL_REDUCE       ? __real_comm_all_reduce(c.comm, c.out, c.count, c.type)
           : c.op == OP_REDUCE_SCATTER ? __real_comm_reduce_scatter(c.comm, c.out, c.in, c.count, c.type)
                                       : __real_comm_all_gather(c.comm, c.out, c.in, c.count, c.type);
}

static uint64_t started_on(const Comm *c) {
    CommNotes notes;
    comm_notes(&notes);
    for (int i = 0; i < COMM_MOST; i++)
        if (strcmp(notes.group[i].name, c->name) == 0 && notes.group[i].first == c->first)
            return notes.group[i].started;
    return 0;
}

static Work pass(Call c) {
    static int skips, swaps, stops, sleeps;
    static Call later; // a call that waits for the next one to pass it
    read_order();
    if (strcmp(c.comm->name, fault.group) != 0) return start(c);
    if (c.op != OP_ALL_GATHER) {
        if (happens("stop", &stops)) raise(SIGSTOP);
        if (happens("sleep", &sleeps)) sleep_at_fault();
        if (happens("skip", &skips)) return (Work){.comm = NULL};
        if (happens("swap", &swaps)) {
            later = c;
            return (Work){.comm = c.comm, .sequence = started_on(c.comm) + 2};
        }
    }
    Work w = start(c);
    if (later.comm) start(later);
    later.comm = NULL;
    return w;
}

Work __wrap_comm_all_reduce(Comm *c, void *buf, size_t count, DType t);
Work __wrap_comm_all_reduce(Comm *c, void *buf, size_t count, DType t) {
    return pass((Call){.op = OP_ALL_REDUCE, .comm = c, .out = buf, .count = count, .type = t});
}
Work __wrap_comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t);
Work __wrap_comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t) {
    return pass((Call){OP_REDUCE_SCATTER, c, out, in, count, t});
}
Work __wrap_comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t);
Work __wrap_comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t) {
    return pass((Call){OP_ALL_GATHER, c, out, in, count, t});
}

// ---- messages -------------------------------------------------------------------------------------------------------

typedef struct {
    Comm *channel;
    void *buffer;
    size_t count;
    DType type;
} Message;

Work __real_comm_send(Comm *channel, const void *buffer, size_t count, DType t);
Work __real_comm_receive(Comm *channel, void *buffer, size_t count, DType t);

static Work start_message(Message x) {
    return x.channel->rank == 0 ? __real_comm_send(x.channel, x.buffer, x.count, x.type)
                                : __real_comm_receive(x.channel, x.buffer, x.count, x.type);
}

static Work pass_message(Message x) {
    static int skips, swaps, stops, sleeps, agains;
    static Message later; // one that waits for the next one to pass it
    read_order();
    if (strcmp(x.channel->name, fault.group) == 0) {
        if (happens("stop", &stops)) raise(SIGSTOP);
        if (happens("sleep", &sleeps)) sleep_at_fault();
        if (happens("skip", &skips)) return (Work){.comm = NULL};
        if (happens("again", &agains)) start_message(x);
        if (happens("swap", &swaps)) {
            later = x;
            return (Work){.comm = NULL};
        }
    }
    Message first = later;
    bool passes = first.channel && first.channel != x.channel;
    if (first.channel) later.channel = NULL;
    if (first.channel && !passes) start_message(first); // of one channel, they keep their order
    Work w = start_message(x);
    if (passes) start_message(first);
    return w;
}

Work __wrap_comm_send(Comm *channel, const void *buffer, size_t count, DType t);
Work __wrap_comm_send(Comm *channel, const void *buffer, size_t count, DType t) {
    return pass_message((Message){channel, (void *)buffer, count, t});
}
Work __wrap_comm_receive(Comm *channel, void *buffer, size_t count, DType t);
Work __wrap_comm_receive(Comm *channel, void *buffer, size_t count, DType t) {
    return pass_message((Message){channel, buffer, count, t});
}

// ---- numbers --------------------------------------------------------------------------------------------------------

void __real_matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                                   size_t N, void *workspace);
void __wrap_matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                                   size_t N, void *workspace);
void __wrap_matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                                   size_t N, void *workspace) {
    static int times;
    __real_matmul_backward_weight(dweight, dout, inp, M, K, N, workspace);
    if (happens("nan", &times)) memset(&dweight[N * K / 2], 0xff, sizeof *dweight); // in fp32 as in bf16
}

void __real_adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad,
                         const float *grad32, size_t n, AdamW a);
void __wrap_adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad,
                         const float *grad32, size_t n, AdamW a);
void __wrap_adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad,
                         const float *grad32, size_t n, AdamW a) {
    static int times;
    __real_adamw_update(weight, master, m, v, grad, grad32, n, a);
    unsigned char *byte = ordered("flip")     ? (unsigned char *)&weight[n / 2]
                          : ordered("drift")  ? (unsigned char *)&v[n / 2]
                          : ordered("master") ? (unsigned char *)&master[n / 2]
                                              : NULL;
    if (byte && ++times == fault.n) *byte ^= 1; // the lowest bit, on a little-endian machine
}

// ---- the end --------------------------------------------------------------------------------------------------------

int __real_MPI_Abort(MPI_Comm c, int code);
int __wrap_MPI_Abort(MPI_Comm c, int code);
int __wrap_MPI_Abort(MPI_Comm c, int code) {
    if (ordered("late")) sleep_at_fault();
    return __real_MPI_Abort(c, code);
}

// ---- the watchdog's line --------------------------------------------------------------------------------------------

int __real_connect(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *to, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *to, socklen_t length) {
    static int times;
    if (ordered("deaf") && times++ < fault.n) {
        errno = ECONNREFUSED;
        return -1;
    }
    return __real_connect(fd, to, length);
}

ssize_t __real_send(int fd, const void *report, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *report, size_t bytes, int flags);
ssize_t __wrap_send(int fd, const void *report, size_t bytes, int flags) {
    static int times;
    if (happens("cut", &times)) shutdown(fd, SHUT_RDWR);
    return __real_send(fd, report, bytes, flags);
}

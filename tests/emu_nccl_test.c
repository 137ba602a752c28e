// The emulator's streams and NCCL as a C program meets them, for tests/test_emu_nccl.py: each mode prints what it sees.
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rank, size;
static cudaStream_t compute; // the first stream
static ncclComm_t world;

static void die(const char *call, const char *why, int line) {
    printf("rank %d, line %d: %s: %s\n", rank, line, call, why);
    fflush(stdout);
    MPI_Abort(MPI_COMM_WORLD, 1);
}
#define cuda(call) cuda_at(call, #call, __LINE__)
#define nccl(call) nccl_at(call, #call, __LINE__)
static void cuda_at(cudaError_t error, const char *call, int line) {
    if (error) die(call, cudaGetErrorString(error), line);
}
static void nccl_at(ncclResult_t result, const char *call, int line) {
    if (result) die(call, ncclGetLastError(NULL), line);
}
static void check(bool right, const char *what) {
    if (!right) die("wrong", what, 0);
}

static ncclComm_t group(MPI_Comm mpi) {
    int r, n;
    ncclUniqueId id;
    ncclComm_t comm;
    MPI_Comm_rank(mpi, &r), MPI_Comm_size(mpi, &n);
    if (r == 0) nccl(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, mpi);
    nccl(ncclCommInitRank(&comm, n, id, r));
    return comm;
}
static void *device(size_t bytes) {
    void *p;
    cuda(cudaMalloc(&p, bytes ? bytes : 1));
    return p;
}
static cudaStream_t stream(void) {
    cudaStream_t s;
    cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}
static cudaEvent_t event(void) {
    cudaEvent_t e;
    cuda(cudaEventCreate(&e));
    return e;
}
// `to` goes on when what is queued on `from` is done.
static void order(cudaStream_t from, cudaStream_t to) {
    cudaEvent_t e = event();
    cuda(cudaEventRecord(e, from)), cuda(cudaStreamWaitEvent(to, e, 0)), cuda(cudaEventDestroy(e));
}
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- all collectives, types, places -----------------------------------------------------------------------------------
static const size_t type_size[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static void store(void *p, size_t i, ncclDataType_t type, double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    switch (type) {
    case ncclInt8:
        ((int8_t *)p)[i] = (int8_t)x;
        break;
    case ncclUint8:
        ((uint8_t *)p)[i] = (uint8_t)x;
        break;
    case ncclInt32:
        ((int32_t *)p)[i] = (int32_t)x;
        break;
    case ncclUint32:
        ((uint32_t *)p)[i] = (uint32_t)x;
        break;
    case ncclInt64:
        ((int64_t *)p)[i] = (int64_t)x;
        break;
    case ncclUint64:
        ((uint64_t *)p)[i] = (uint64_t)x;
        break;
    case ncclFloat32:
        ((float *)p)[i] = f;
        break;
    case ncclFloat64:
        ((double *)p)[i] = x;
        break;
    case ncclBfloat16:
        ((uint16_t *)p)[i] = (uint16_t)(bits >> 16);
        break; // exact for these small numbers
    default:
        check(false, "type");
    }
}
// Small, so that sums are exact in every type.
static double value(int r, size_t i) {
    return (double)((7 * (size_t)r + 3 * i) % 11 + 1);
}
static double folded(size_t i, ncclRedOp_t op) {
    double x = value(0, i);
    for (int r = 1; r < size; r++) {
        double y = value(r, i);
        x = op == ncclProd ? x * y : op == ncclMax ? fmax(x, y) : op == ncclMin ? fmin(x, y) : x + y;
    }
    return op == ncclAvg ? x / size : x;
}

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, OPS };

static void one(int what, ncclDataType_t type, ncclRedOp_t op, size_t n, bool in_place) {
    size_t item = type_size[type], all = (size_t)size * n, me = (size_t)rank, root = (size_t)size - 1;
    size_t sent = what == REDUCE_SCATTER ? all : n, received = what == ALL_GATHER ? all : n;
    char *host = malloc(all * item + 1), *want = malloc(all * item + 1), *send, *receive;
    if (in_place) {
        char *buffer = device(all * item);
        send = what == ALL_GATHER ? buffer + me * n * item : buffer;
        receive = what == REDUCE_SCATTER ? buffer + me * n * item : buffer;
    } else
        send = device(sent * item), receive = device(received * item);
    for (size_t i = 0; i < sent; i++) store(host, i, type, value(rank, i));
    cuda(cudaMemcpyAsync(send, host, sent * item, cudaMemcpyHostToDevice, compute));
    int r = (int)root;
    if (what == ALL_REDUCE) nccl(ncclAllReduce(send, receive, n, type, op, world, compute));
    if (what == REDUCE_SCATTER) nccl(ncclReduceScatter(send, receive, n, type, op, world, compute));
    if (what == ALL_GATHER) nccl(ncclAllGather(send, receive, n, type, world, compute));
    if (what == BROADCAST) nccl(ncclBroadcast(send, receive, n, type, r, world, compute));
    if (what == REDUCE) nccl(ncclReduce(send, receive, n, type, op, r, world, compute));
    for (size_t i = 0; i < received; i++)
        store(want, i, type,
              what == ALL_REDUCE       ? folded(i, op)
              : what == REDUCE_SCATTER ? folded(me * n + i, op)
              : what == ALL_GATHER     ? value((int)(i / n), i % n)
              : what == BROADCAST      ? value((int)root, i)
                                       : folded(i, op));
    char *got = malloc(all * item + 1);
    if (what != REDUCE || me == root) {
        cuda(cudaMemcpyAsync(got, receive, received * item, cudaMemcpyDeviceToHost, compute));
        cuda(cudaStreamSynchronize(compute));
        if (memcmp(got, want, received * item)) {
            printf("rank %d: operation %d, type %d, op %d, count %zu, in place %d\n", rank, what, type, op, n,
                   in_place);
            check(false, "result");
        }
    }
    cuda(cudaStreamSynchronize(compute));
    cuda(cudaFree(send < receive ? send : receive));
    if (!in_place) cuda(cudaFree(send < receive ? receive : send));
    free(host), free(want), free(got);
}

static void collectives(void) {
    const ncclDataType_t types[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                    ncclUint64, ncclFloat32, ncclFloat64, ncclBfloat16};
    const size_t counts[] = {0, 1, 7, 1001};
    for (int what = 0; what < OPS; what++)
        for (size_t t = 0; t < sizeof types / sizeof *types; t++)
            for (size_t n = 0; n < 4; n++)
                for (int in_place = 0; in_place < 2; in_place++)
                    one(what, types[t], ncclSum, counts[n], in_place);
    for (ncclRedOp_t op = ncclProd; op < ncclNumOps; op++)
        for (int in_place = 0; in_place < 2; in_place++) {
            one(ALL_REDUCE, ncclFloat64, op, 100, in_place);
            one(REDUCE_SCATTER, ncclFloat32, op, 100, in_place);
            if (op != ncclAvg) one(REDUCE, ncclInt64, op, 100, in_place);
        }
    // Maxima: minus infinity is a number like others, and a NaN gives way, as in fmaxf.
    bool last = rank == size - 1;
    float odd[4] = {-INFINITY, last ? -3 : -INFINITY, last ? -3 : NAN, NAN}, *on = device(sizeof odd);
    cuda(cudaMemcpyAsync(on, odd, sizeof odd, cudaMemcpyHostToDevice, compute));
    nccl(ncclAllReduce(on, on, 4, ncclFloat32, ncclMax, world, compute));
    cuda(cudaMemcpyAsync(odd, on, sizeof odd, cudaMemcpyDeviceToHost, compute));
    cuda(cudaStreamSynchronize(compute));
    check(odd[0] == -INFINITY && odd[1] == -3 && odd[2] == -3 && isnan(odd[3]), "maximum");
    // Sums that are not exact: the same bits on every rank.
    enum { N = 20000 };
    float *x = malloc(N * sizeof *x), *first = malloc(N * sizeof *x), *d = device(N * sizeof *x);
    for (int i = 0; i < N; i++) x[i] = sinf((float)(i * (rank + 1)));
    cuda(cudaMemcpyAsync(d, x, N * sizeof *x, cudaMemcpyHostToDevice, compute));
    nccl(ncclAllReduce(d, d, N, ncclFloat32, ncclSum, world, compute));
    cuda(cudaMemcpyAsync(x, d, N * sizeof *x, cudaMemcpyDeviceToHost, compute));
    cuda(cudaStreamSynchronize(compute));
    memcpy(first, x, N * sizeof *x);
    MPI_Bcast(first, N, MPI_FLOAT, 0, MPI_COMM_WORLD);
    check(!memcmp(first, x, N * sizeof *x), "bits");
    for (int i = 0; i < N; i++) {
        double want = 0;
        for (int r = 1; r <= size; r++) want += sinf((float)(i * r));
        check(fabs(x[i] - want) < 1e-5, "sum");
    }
    uint64_t h = 0;
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        h = h * 31 + bits;
    }
    if (rank == 0) printf("bits %016lx\n", (unsigned long)h);
}

// Several communicators and streams at once, with groups of calls, while the host asks now this and now that.
static void several(void) {
    enum { COMMS = 3, ROUNDS = 40, N = 3000 };
    MPI_Comm pair, rest;
    MPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, &pair);
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &rest);
    ncclComm_t comm[COMMS] = {world, group(pair), group(rest)};
    cudaStream_t s[COMMS] = {stream(), stream(), stream()};
    float *buffer[COMMS], *host = malloc(N * sizeof(float)), want[COMMS];
    for (int k = 0; k < COMMS; k++) {
        buffer[k] = device(N * sizeof(float)), want[k] = 1;
        for (int i = 0; i < N; i++) host[i] = 1;
        cuda(cudaMemcpy(buffer[k], host, N * sizeof(float), cudaMemcpyHostToDevice));
    }
    for (int round = 0; round < ROUNDS; round++) {
        if (round % 3 == 0) nccl(ncclGroupStart());
        for (int k = 0; k < COMMS; k++) { // a group's calls may come in any order
            int j = round % 3 == 0 && rank % 2 ? COMMS - 1 - k : k, n;
            nccl(ncclCommCount(comm[j], &n));
            nccl(ncclAllReduce(buffer[j], buffer[j], N, ncclFloat32, ncclAvg, comm[j], s[j]));
        }
        if (round % 3 == 0) nccl(ncclGroupEnd());
        for (int k = 0; k < COMMS; k++)
            if ((round + rank) % 5 == k) cuda(cudaStreamSynchronize(s[k]));
        if (round % 4 == 1)
            while (cudaStreamQuery(s[round % COMMS]) == cudaErrorNotReady) {
            }
    }
    cuda(cudaDeviceSynchronize());
    for (int k = 0; k < COMMS; k++) {
        cuda(cudaMemcpy(host, buffer[k], N * sizeof(float), cudaMemcpyDeviceToHost));
        for (int i = 0; i < N; i++) check(host[i] == want[k], "average of ones");
        cuda(cudaStreamDestroy(s[k]));
        if (k) nccl(ncclCommDestroy(comm[k]));
    }
}

// Messages between all ranks, in one group of calls and by turns: with itself in the middle of collectives, in rounds.
static void messages(void) {
    enum { N = 5000, ROUNDS = 12 };
    const size_t counts[] = {0, 1, 777, N};
    size_t bytes = N * sizeof(float);
    float *host = malloc(bytes), *out = device(bytes), *total = device(bytes), *in[8];
    cudaStream_t s = stream();
    for (int r = 0; r < size; r++) in[r] = device(bytes);
    for (int round = 0; round < ROUNDS; round++) {
        size_t n = counts[round % 4];
        bool grouped = round % 3 != 0;
        for (size_t i = 0; i < N; i++) host[i] = (float)(rank * 100 + round) + (float)i;
        cuda(cudaMemcpyAsync(out, host, bytes, cudaMemcpyHostToDevice, compute));
        order(compute, s);
        if (grouped) nccl(ncclGroupStart());
        for (int k = 0; k < size; k++) // in a group each has an order of its own
            for (int other = 0; other < size; other++) {
                int r = grouped ? (other + rank * (round % 2)) % size : other;
                if (r == rank || k != (grouped ? 0 : r < rank ? r : rank)) continue;
                bool sends_first = grouped ? round % 2 : rank < r;
                if (sends_first) nccl(ncclSend(out, n, ncclFloat32, r, world, s));
                nccl(ncclRecv(in[r], n, ncclFloat32, r, world, s));
                if (!sends_first) nccl(ncclSend(out, n, ncclFloat32, r, world, s));
            }
        if (grouped) nccl(ncclGroupEnd());
        nccl(ncclAllReduce(out, total, n, ncclFloat32, ncclSum, world, s));
        order(s, compute);
        for (int r = 0; r < size; r++) {
            if (r == rank) continue;
            cuda(cudaMemcpyAsync(host, in[r], bytes, cudaMemcpyDeviceToHost, compute));
            cuda(cudaStreamSynchronize(compute));
            for (size_t i = 0; i < n; i++) check(host[i] == (float)(r * 100 + round) + (float)i, "message");
        }
    }
}

// Each rank of a communicator sends to the next one round and receives from the one before it, in one group of calls.
static void shift(float *out, const float *in, size_t send, size_t receive, ncclComm_t comm, cudaStream_t s) {
    int me, n;
    nccl(ncclCommUserRank(comm, &me)), nccl(ncclCommCount(comm, &n));
    nccl(ncclGroupStart());
    nccl(ncclSend(in, send, ncclFloat32, (me + 1) % n, comm, s));
    nccl(ncclRecv(out, receive, ncclFloat32, (me + n - 1) % n, comm, s));
    nccl(ncclGroupEnd());
}

// Twice round and one further, with nobody waiting in between: each sends what has come; on another communicator backwards.
static void ring(void) {
    enum { N = 300000, BYTES = N * sizeof(float) };
    const size_t counts[] = {0, 1, 777, N};
    MPI_Comm other_way;
    MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &other_way);
    ncclComm_t comm[2] = {world, group(other_way)};
    cudaStream_t s[2] = {stream(), stream()};
    float *host = malloc(BYTES), *buffer[2][2];
    for (int k = 0; k < 4; k++) buffer[k / 2][k % 2] = device(BYTES);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        const size_t n = counts[c];
        const int hops = 2 * size + 1;
        for (int way = 0; way < 2; way++) {
            for (size_t i = 0; i < n; i++) host[i] = (float)(1000 * rank) + (float)(i % 999);
            cuda(cudaMemcpy(buffer[way][0], host, n * sizeof *host, cudaMemcpyHostToDevice));
        }
        for (int hop = 0; hop < hops; hop++)
            for (int way = 0; way < 2; way++)
                shift(buffer[way][(hop + 1) % 2], buffer[way][hop % 2], n, n, comm[way], s[way]);
        for (int back = 0; back < 2; back++) // what has come, and what has been sent
            for (int way = 0; way < 2; way++) {
                int who = ((rank + (way ? 1 : -1) * (hops - back)) % size + size) % size;
                order(s[way], compute);
                float *from = buffer[way][(hops + back) % 2];
                cuda(cudaMemcpyAsync(host, from, n * sizeof *host, cudaMemcpyDeviceToHost, compute));
                cuda(cudaStreamSynchronize(compute));
                for (size_t i = 0; i < n; i++)
                    check(host[i] == (float)(1000 * who) + (float)(i % 999), "what comes round");
            }
    }
    nccl(ncclCommDestroy(comm[1]));
}

// The same ring, with the send before the receive: nobody takes what all send.
static void ring_in_turns(void) {
    float *a = device(400), *b = device(400);
    cuda(cudaMemset(a, 0, 400));
    nccl(ncclSend(a, 100, ncclFloat32, (rank + 1) % size, world, compute));
    nccl(ncclRecv(b, 100, ncclFloat32, (rank + size - 1) % size, world, compute));
    double began = seconds();
    while (seconds() < began + 1) check(cudaStreamQuery(compute) == cudaErrorNotReady, "all wait");
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("all wait\n"), fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    _Exit(0);
}

// ---- what is refused ---------------------------------------------------------------------------------------------------
// Waits as a program would that looks at CUDA and at NCCL.
static void wait_for_trouble(cudaStream_t s) {
    ncclResult_t async = ncclSuccess;
    cudaError_t error;
    do {
        error = cudaStreamQuery(s);
        ncclCommGetAsyncError(world, &async);
    } while (error == cudaErrorNotReady && !async);
    printf("rank %d: %s: %s\n", rank, async ? ncclGetErrorString(async) : "no error",
           async ? ncclGetLastError(world) : "-");
    fflush(stdout);
    error = cudaStreamSynchronize(s); // comes back
    check(!async == !error, "both know");
    MPI_Barrier(MPI_COMM_WORLD);
    _Exit(0);
}

static void mismatch(const char *how) {
    float *a = device(400), *b = device(400 * 8);
    bool odd = rank == 1;
    cuda(cudaMemset(a, 0, 400)), cuda(cudaMemset(b, 0, 400 * 8));
    nccl(ncclAllReduce(a, a, 10, ncclFloat32, ncclSum, world, compute));
    if (!strcmp(how, "two sends"))
        nccl(ncclSend(a, 100, ncclFloat32, 1 - rank, world, compute));
    else if (!strcmp(how, "two receives"))
        nccl(ncclRecv(a, 100, ncclFloat32, 1 - rank, world, compute));
    else if (!strcmp(how, "receive count") || !strcmp(how, "receive type")) {
        size_t n = !strcmp(how, "receive count") ? 99 : 100;
        if (!odd) nccl(ncclSend(a, 100, ncclFloat32, 1, world, compute));
        if (odd) nccl(ncclRecv(a, n, n == 99 ? ncclFloat32 : ncclInt32, 0, world, compute));
    } else if (!strcmp(how, "send alone") && odd)
        nccl(ncclSend(a, 100, ncclFloat32, 0, world, compute));
    else if (!strcmp(how, "ring"))
        shift(b, a, 100 - odd, 100, world, compute);
    else if (!strcmp(how, "op") && odd)
        nccl(ncclReduceScatter(b, a, 100, ncclFloat32, ncclSum, world, compute));
    else if (!strcmp(how, "root"))
        nccl(ncclBroadcast(a, a, 100, ncclFloat32, odd, world, compute));
    else
        nccl(ncclAllReduce(a, a, !strcmp(how, "count") && odd ? 99 : 100,
                           !strcmp(how, "type") && odd ? ncclInt32 : ncclFloat32,
                           !strcmp(how, "redop") && odd ? ncclMax : ncclSum, world, compute));
    wait_for_trouble(compute);
}

// Two communicators, whose calls two ranks make in two orders: on one stream (which would wait for ever) or on two.
static void crossed(const char *streams) {
    MPI_Comm low;
    MPI_Comm_split(MPI_COMM_WORLD, rank > 1, rank, &low);
    ncclComm_t small = group(low), comm[2] = {world, small};
    cudaStream_t s[2] = {compute, *streams == '2' ? stream() : compute};
    float *a[2] = {device(400), device(400)};
    for (int k = 0; k < 2; k++) {
        int j = rank == 1 ? 1 - k : k;
        nccl(ncclAllReduce(a[j], a[j], 100, ncclFloat32, ncclSum, comm[j], s[j]));
    }
    wait_for_trouble(compute);
}

// The buffer of a call is written while it is under way, from another stream: here after it has begun for certain.
static void touched(const char *what) {
    float *in = device(400), *out = device(400);
    bool sent = !strcmp(what, "sent"), received = !strcmp(what, "received");
    cudaStream_t s = stream();
    cuda(cudaMemsetAsync(in, 0, 400, compute));
    order(compute, s);
    if (rank == 0) {
        if (sent) nccl(ncclSend(in, 100, ncclFloat32, 1, world, s));
        if (received) nccl(ncclRecv(out, 100, ncclFloat32, 1, world, s));
        if (!sent && !received) nccl(ncclAllReduce(in, out, 100, ncclFloat32, ncclSum, world, s));
        for (int i = 0; i < 1000; i++) cudaStreamQuery(s); // begins; the others have not
        if (received) {                                    // NaN until it is there
            unsigned char now[400];
            cuda(cudaMemcpyAsync(now, out, 400, cudaMemcpyDeviceToHost, compute));
            cuda(cudaStreamSynchronize(compute));
            for (int i = 0; i < 400; i++) check(now[i] == 0xff, "nothing may be read before it is there");
        }
        cuda(cudaMemsetAsync(sent || !strcmp(what, "input") ? in : out, 1, 400, compute));
        cuda(cudaStreamSynchronize(compute));
        MPI_Barrier(MPI_COMM_WORLD);
    } else {
        MPI_Barrier(MPI_COMM_WORLD);
        if (sent) nccl(ncclRecv(out, 100, ncclFloat32, 0, world, s));
        if (received) nccl(ncclSend(in, 100, ncclFloat32, 0, world, s));
        if (!sent && !received) nccl(ncclAllReduce(in, out, 100, ncclFloat32, ncclSum, world, s));
    }
    wait_for_trouble(s);
}

static void refused(void) {
    float *a = device(4000), host[10];
    ncclResult_t r;
    ncclUniqueId nonsense = {"?"};
    ncclComm_t none;
#define SAY(call) r = call, printf("%s: %s\n", ncclGetErrorString(r), ncclGetLastError(world))
    SAY(ncclAllReduce(a, a, 1001, ncclFloat32, ncclSum, world, compute));
    SAY(ncclAllReduce(host, a, 10, ncclFloat32, ncclSum, world, compute));
    SAY(ncclAllReduce(a, a + 1, 10, ncclFloat32, ncclSum, world, compute));
    SAY(ncclAllReduce(a, a, 10, ncclFloat16, ncclSum, world, compute));
    SAY(ncclBroadcast(a, a, 10, ncclFloat32, 1, world, compute));
    SAY(ncclAllReduce(a, a, 10, ncclFloat32, ncclSum, NULL, compute));
    SAY(ncclSend(host, 10, ncclFloat32, 0, world, compute));
    SAY(ncclSend(a, 10, ncclFloat32, 1, world, compute));
    SAY(ncclRecv(a, 10, ncclFloat32, 0, world, compute));
    SAY(ncclGroupEnd());
    SAY(ncclCommInitRank(&none, 1, nonsense, 0));
}

static void duplicate(void) { // devices as EMU_DEVICES has them
    ncclUniqueId id;
    ncclComm_t comm;
    if (rank == 0) nccl(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    ncclResult_t r = ncclCommInitRank(&comm, size, id, rank);
    printf("rank %d: %s: %s\n", rank, ncclGetErrorString(r), ncclGetLastError(NULL));
}

// Rank 0 stands in a collective that nobody else comes to, and leaves it.
static void aborted(void) {
    float *a = device(400);
    cuda(cudaMemset(a, 0, 400));
    if (rank == 0) {
        nccl(ncclAllReduce(a, a, 100, ncclFloat32, ncclSum, world, compute));
        for (int i = 0; i < 1000; i++) check(cudaStreamQuery(compute) == cudaErrorNotReady, "alone");
        nccl(ncclCommAbort(world));
        cuda(cudaStreamSynchronize(compute));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("left\n");
}

// ---- streams -----------------------------------------------------------------------------------------------------------
// What a missing order of streams does. Another stream adds up over all ranks what the compute stream wrote, or sends it
// round; then that uses it.
static void missing(const char *what, bool round) {
    float ones[100], zeros[100] = {0}, got[100], *a = device(400), *b = device(400);
    float *c = round ? device(400) : a;
    cudaStream_t s = stream();
    for (int i = 0; i < 100; i++) ones[i] = 1;
    cuda(cudaMemcpy(a, zeros, 400, cudaMemcpyHostToDevice)),
        cuda(cudaMemcpy(b, zeros, 400, cudaMemcpyHostToDevice));
    cuda(cudaMemcpyAsync(a, ones, 400, cudaMemcpyHostToDevice, compute));
    if (strcmp(what, "before")) order(compute, s);
    if (round)
        shift(c, a, 100, 100, world, s);
    else
        nccl(ncclAllReduce(a, c, 100, ncclFloat32, ncclSum, world, s));
    if (strcmp(what, "after")) order(s, compute);
    cuda(cudaMemcpyAsync(b, c, 400, cudaMemcpyDeviceToDevice, compute));
    if (strcmp(what, "host"))
        cuda(cudaMemcpyAsync(got, b, 400, cudaMemcpyDeviceToHost, compute)),
            cuda(cudaStreamSynchronize(compute));
    else { // the host reads, and changes, what copies are still to move
        memset(got, 0, sizeof got);
        cuda(cudaMemcpyAsync(got, b, 400, cudaMemcpyDeviceToHost, compute));
    }
    bool right = true;
    for (int i = 0; i < 100; i++) right &= got[i] == (round ? 1 : (float)size);
    if (cudaDeviceSynchronize()) right = false;
    MPI_Allreduce(MPI_IN_PLACE, &right, 1, MPI_C_BOOL, MPI_LAND, MPI_COMM_WORLD);
    if (rank == 0) printf("%s\n", right ? "right" : "wrong");
}

// Rank 0 waits for a message of rank 1, which first waits for what rank 0 has queued.
static void host_waits(void) {
    float *a = device(400);
    int message = 0, all = 0;
    cuda(cudaMemset(a, 0, 400));
    nccl(ncclAllReduce(a, a, 100, ncclFloat32, ncclSum, world, compute));
    if (rank == 0) {
        MPI_Request r[1];
        MPI_Irecv(&message, 1, MPI_INT, size - 1, 0, MPI_COMM_WORLD, r);
        while (!all) MPI_Testall(1, r, &all, MPI_STATUSES_IGNORE);
        printf("came %d\n", message);
    }
    cuda(cudaStreamSynchronize(compute));
    message = 7;
    if (rank == size - 1) MPI_Send(&message, 1, MPI_INT, 0, 0, MPI_COMM_WORLD);
}

// What questions cost: of 150 allocations, two are used, or one is, while rank 0 waits for rank 1.
static void polling(void) {
    float *a[150], *b = device(1 << 20);
    for (int i = 0; i < 150; i++) a[i] = device(1 << 20);
    cuda(cudaDeviceSynchronize());
    double began = seconds();
    for (int i = 0; i < 10000; i++) cudaStreamQuery(compute);
    double nothing = seconds() - began;
    for (int i = 0; i < 1000; i++) cuda(cudaMemcpyAsync(b, a[i % 150], 4, cudaMemcpyDeviceToDevice, compute));
    int n = 0;
    for (began = seconds(); cudaStreamQuery(compute) == cudaErrorNotReady;) n++;
    double copies = seconds() - began;
    cudaEvent_t e = event();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank) MPI_Barrier(MPI_COMM_WORLD);
    nccl(ncclAllReduce(b, b, 1 << 18, ncclFloat32, ncclSum, world, compute));
    cuda(cudaEventRecord(e, compute));
    began = seconds();
    if (!rank) {
        for (int i = 0; i < 10000; i++) cudaEventQuery(e);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    double waiting = seconds() - began;
    cuda(cudaEventSynchronize(e));
    if (!rank)
        printf("{\"nothing\": %g, \"copies\": %g, \"turns\": %d, \"waiting\": %g}\n", nothing, copies, n,
               waiting);
}

static void settings(void) {
    int count = -1;
    size_t free_, total, bytes = 300 << 20;
    struct cudaDeviceProp p;
    void *a, *b;
    cudaError_t e = cudaGetDeviceCount(&count);
    printf("%d devices, %s\n", count, cudaGetErrorName(e));
    cudaGetLastError();
    cuda(cudaGetDeviceProperties(&p, 0));
    cuda(cudaMemGetInfo(&free_, &total));
    printf("sm_%d%d, %zu MB of %zu\n", p.major, p.minor, free_ / 1000000, total / 1000000);
    for (int i = 0; i < 2; i++) printf("%s ", cudaGetErrorName(cudaMalloc(i ? &b : &a, bytes)));
    cudaGetLastError();
    cuda(cudaDeviceSynchronize()); // it does not stick
    cuda(cudaFree(a));
    printf("%s %s\n", cudaGetErrorName(cudaMalloc(&b, bytes)), cudaGetErrorName(cudaSetDevice(count)));
}

static void times(void) { // 50 ms of the host between two events
    cudaEvent_t a = event(), b = event(), untimed;
    float ms;
    struct timespec nap = {0, 50 * 1000 * 1000};
    cuda(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    cuda(cudaEventRecord(a, compute)), cuda(cudaEventSynchronize(a));
    nanosleep(&nap, NULL);
    cuda(cudaEventRecord(b, compute)), cuda(cudaEventRecord(untimed, compute));
    printf("%s ", cudaGetErrorName(cudaEventElapsedTime(&ms, a, b)));
    cuda(cudaDeviceSynchronize());
    cuda(cudaEventElapsedTime(&ms, a, b));
    printf("%.1f %s\n", ms, cudaGetErrorName(cudaEventElapsedTime(&ms, a, untimed)));
}

// ---- the emulator in an executable: kernels of tests/emu_test.cu -------------------------------------------------------
const char *emu_test(const char *name);

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "", *how = argc > 2 ? argv[2] : "";
    if (!strcmp(mode, "kernel")) return printf("%s\n", emu_test(how)), 0;
    if (!strcmp(mode, "settings")) return settings(), 0;
    int devices = 0;
    cuda(cudaFree(NULL)); // the device is there before MPI, as in the program
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &(int){0});
    MPI_Comm_rank(MPI_COMM_WORLD, &rank), MPI_Comm_size(MPI_COMM_WORLD, &size);
    cuda(cudaGetDeviceCount(&devices)), cuda(cudaSetDevice(rank % devices));
    compute = stream();
    if (!strcmp(mode, "duplicate")) return duplicate(), MPI_Finalize();
    world = group(MPI_COMM_WORLD);
    if (!strcmp(mode, "collectives")) collectives();
    if (!strcmp(mode, "several")) several();
    if (!strcmp(mode, "messages")) messages();
    if (!strcmp(mode, "ring")) ring();
    if (!strcmp(mode, "ring-in-turns")) ring_in_turns();
    if (!strcmp(mode, "mismatch")) mismatch(how);
    if (!strcmp(mode, "crossed")) crossed(how);
    if (!strcmp(mode, "touched")) touched(how);
    if (!strcmp(mode, "refused")) refused();
    if (!strcmp(mode, "aborted")) aborted();
    if (!strcmp(mode, "missing")) missing(how, argc > 3);
    if (!strcmp(mode, "host-waits")) host_waits();
    if (!strcmp(mode, "polling")) polling();
    if (!strcmp(mode, "times")) times();
    if (!strcmp(mode, "host-access")) *(volatile float *)device(4) = 1;
    if (strcmp(mode, "aborted")) nccl(ncclCommDestroy(world));
    MPI_Finalize();
    if (rank == 0) printf("done\n");
}

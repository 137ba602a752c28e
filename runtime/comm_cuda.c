// Messages of a GPU: each group has a stream, and its works are queued there beside those of the compute stream.
//
//     compute   | backward of block 3 | backward of block 2 |  ...         | wait | optimizer
//                          ready: o \                                        o : done
//     group's stream                 \-- reduce_scatter of block 3 ---------/
//
// A work begins when the compute stream has come to the point of its start (event `ready`), and the compute stream goes on
// from a comm_wait once the group's stream is through with the work (event `done`). The host only queues, and runs ahead.
//
// Who carries the bytes?
//     a group of one  nobody: a copy on the GPU, where two places differ
//     NCCL            one of its calls for each of ours where shards are equal. ZeRO's differ by an element where ranks do
//                     not divide the count: then one ncclReduce or ncclBroadcast a shard, in one group of calls, with the
//                     same bytes. Shifts and all-to-alls are sends and receives, in one group of calls, too. In which order
//                     it sums is NCCL's choice, for all_reduce and reduce_scatter apart.
//     MPI             the ring of comm.c, on the host: buffer down, round the ring, up again. So any number of ranks
//                     shares a GPU. The host has to be there when a copy has come down (comm_progress), and comm_wait
//                     stays until the last copy is queued. The works of a group take turns: one buffer a group.
//
// Cost: three events a work and two a wait, and a few microseconds of the host. Bytes are counted as comm.c's ring sends them;
// NCCL may use trees or the switches' sums, and send fewer. With MPI, twice the buffer over PCIe, and page-locked host memory
// as large as a group's largest buffer; for shifts and all-to-alls, as the two buffers of one.
// NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html
#include "comm_ring.h"
#include "cuda.h"
#include "device.h"
#include "fail.h"
#include "trace.h"

#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef USE_MPI
#include <nccl.h>
#else
#include "no_nccl.h"
#endif

// A work between its start and the moment when the host has seen it done.
typedef struct Flight {
    struct Flight *next;
    Comm *comm;
    uint64_t sequence;
    CommOp op;
    DType type;
    size_t count;
    const void *in; // device memory, as comm.h says; in place: in == out
    void *out;
    int root;
    CommRows *received, *sending; // all_to_all: [size, parts], one behind the other
    int parts;
    size_t sent;
    Moment ready, began, done; // on the compute stream; on the group's stream
    bool begun, queued;        // is all of it on the group's stream, `done` included?
} Flight;

// The compute stream waits from `before` to `after`.
typedef struct Wait {
    struct Wait *next;
    CommOp op;
    uint64_t sequence;
    Moment before, after;
} Wait;

struct CommStream {
    Comm *comm;
    cudaStream_t stream;
    Flight *first, *last;         // under way, in order of their start
    uint64_t started;             // works, where the ring does not number them
    uint64_t done;                // the last that the host has seen done, by sequence
    uint64_t awaited;             // the compute stream goes on after this one
    Wait *first_wait, *last_wait; // not yet counted
    Purpose purpose;              // what it carries
    bool by_ring;                 // staged through the host?
    char *host;                   // page-locked: the buffer of the work whose turn it is
    size_t host_bytes;            // its size
    cudaEvent_t down;             // the copy to it is done
    ncclComm_t nccl;              // NULL: not by NCCL
    Noted *noted;                 // NCCL's works among the watchdog's notes, for the ring does not know them
    char noted_name[32];          // "dp on NCCL"
    struct CommStream *next;
};

static struct CommStream *streams;
static bool used; // has comm_use said how?
static Transport transport;

#define nccl_check(call) nccl_checked(call, #call, __LINE__)
static void nccl_checked(ncclResult_t result, const char *call, int line) {
    if (result == ncclSuccess) return;
    const char *detail = ncclGetLastError(NULL);
    if (strstr(detail, "out of memory")) device_out_of_memory(MEM_LIBRARIES, 0); // it has no result of its own
    fail(EXIT_RUNTIME, "%s:%d: %s: %s (%s)", __FILE__, line, call, ncclGetErrorString(result), detail);
}

// ---- what NCCL carries ------------------------------------------------------------------------------------------------

// What comm.c's ring sends for such a work, on this rank.
static size_t ring_sends(const Flight *f) {
    const Comm *c = f->comm;
    size_t item = dtype_size(f->type), whole = f->count * item, mine = own_piece(c, f->count, f->type).bytes;
    size_t rows = 0;
    int right = (c->rank + 1) % c->size;
    size_t next =
        (comm_shard_begin(f->count, c->size, right + 1) - comm_shard_begin(f->count, c->size, right)) * item;
    switch (f->op) {
    case OP_ALL_REDUCE:
    case OP_ALL_REDUCE_MAX:
        return whole - mine + whole - next;
    case OP_REDUCE_SCATTER:
        return whole - mine;
    case OP_ALL_GATHER:
        return whole - next;
    case OP_SHIFT:
        return whole;
    case OP_ALL_TO_ALL:
        for (int i = 0; i < c->size * f->parts; i++)
            if (i / f->parts != c->rank) rows += f->sending[i].rows;
        return rows * whole;
    default: // broadcast, send: the last of the chain sends nothing
        return right == f->root ? 0 : whole;
    }
}

// Each shard by itself, to or from its owner: the others' second buffer is not used. Empty ones need no call.
static void nccl_by_shards(const Flight *f, ncclDataType_t type) {
    struct CommStream *s = f->comm->stream;
    int size = f->comm->size, me = f->comm->rank;
    nccl_check(ncclGroupStart());
    for (int r = 0; r < size; r++) {
        size_t begin = comm_shard_begin(f->count, size, r), n = comm_shard_begin(f->count, size, r + 1) - begin;
        size_t offset = begin * dtype_size(f->type);
        if (n == 0) continue;
        char *part = (char *)(f->op == OP_REDUCE_SCATTER ? f->in : f->out) + offset;
        if (f->op == OP_REDUCE_SCATTER)
            nccl_check(ncclReduce(part, r == me ? f->out : part, n, type, ncclSum, r, s->nccl, s->stream));
        else
            nccl_check(ncclBroadcast(r == me ? f->in : part, part, n, type, r, s->nccl, s->stream));
    }
    nccl_check(ncclGroupEnd());
}

static int right_of(const Comm *c) {
    return (c->rank + 1) % c->size;
}
static int left_of(const Comm *c) {
    return (c->rank + c->size - 1) % c->size;
}

// A send and a receive, of which none waits for the other.
static void nccl_shift(const struct CommStream *s, const void *in, void *out, size_t n, ncclDataType_t type) {
    nccl_check(ncclGroupStart());
    nccl_check(ncclSend(in, n, type, right_of(s->comm), s->nccl, s->stream));
    nccl_check(ncclRecv(out, n, type, left_of(s->comm), s->nccl, s->stream));
    nccl_check(ncclGroupEnd());
}

// What a rank has for itself in an all-to-all.
static void copy_own_rows(const Flight *f, cudaStream_t stream) {
    size_t row = f->count * dtype_size(f->type);
    for (int i = f->comm->rank * f->parts; i < (f->comm->rank + 1) * f->parts; i++)
        if (f->sending[i].rows)
            cuda_check(cudaMemcpyAsync((char *)f->out + f->received[i].first * row,
                                       (const char *)f->in + f->sending[i].first * row,
                                       f->sending[i].rows * row, cudaMemcpyDeviceToDevice, stream));
}

// A message for each part.
static void nccl_all_to_all(const Flight *f, ncclDataType_t type) {
    const struct CommStream *s = f->comm->stream;
    size_t row = f->count * dtype_size(f->type);
    nccl_check(ncclGroupStart());
    for (int i = 0; i < f->comm->size * f->parts; i++) {
        CommRows out = f->sending[i], in = f->received[i];
        const char *from = (const char *)f->in + out.first * row;
        char *to = (char *)f->out + in.first * row;
        int other = i / f->parts;
        if (other == f->comm->rank) continue;
        if (out.rows) nccl_check(ncclSend(from, out.rows * f->count, type, other, s->nccl, s->stream));
        if (in.rows) nccl_check(ncclRecv(to, in.rows * f->count, type, other, s->nccl, s->stream));
    }
    nccl_check(ncclGroupEnd());
    copy_own_rows(f, s->stream);
}

static void nccl_start(const Flight *f) {
    static const ncclDataType_t type_of[] = {
        [DTYPE_F32] = ncclFloat32, [DTYPE_BF16] = ncclBfloat16, [DTYPE_F64] = ncclFloat64,
        [DTYPE_I32] = ncclInt32,   [DTYPE_I64] = ncclInt64,     [DTYPE_U8] = ncclUint8};
    struct CommStream *s = f->comm->stream;
    size_t size = (size_t)f->comm->size, each = f->count / size;
    bool shards = f->op == OP_REDUCE_SCATTER || f->op == OP_ALL_GATHER;
    ncclDataType_t type = type_of[f->type];
    if (f->count == 0) return;
    if (shards && f->count % size != 0)
        nccl_by_shards(f, type);
    else if (f->op == OP_REDUCE_SCATTER)
        nccl_check(ncclReduceScatter(f->in, f->out, each, type, ncclSum, s->nccl, s->stream));
    else if (f->op == OP_ALL_GATHER)
        nccl_check(ncclAllGather(f->in, f->out, each, type, s->nccl, s->stream));
    else if (f->op == OP_ALL_REDUCE)
        nccl_check(ncclAllReduce(f->in, f->out, f->count, type, ncclSum, s->nccl, s->stream));
    else if (f->op == OP_ALL_REDUCE_MAX)
        nccl_check(ncclAllReduce(f->in, f->out, f->count, type, ncclMax, s->nccl, s->stream));
    else if (f->op == OP_BROADCAST)
        nccl_check(ncclBroadcast(f->in, f->out, f->count, type, f->root, s->nccl, s->stream));
    else if (f->op == OP_SHIFT)
        nccl_shift(s, f->in, f->out, f->count, type);
    else if (f->op == OP_ALL_TO_ALL)
        nccl_all_to_all(f, type);
    else if (f->comm->rank == f->root)
        nccl_check(ncclSend(f->in, f->count, type, 1, s->nccl, s->stream));
    else
        nccl_check(ncclRecv(f->out, f->count, type, f->root, s->nccl, s->stream));
}

// ---- a work's way -----------------------------------------------------------------------------------------------------

static void begin(Flight *f) {
    struct CommStream *s = f->comm->stream;
    cuda_check(cudaStreamWaitEvent(s->stream, f->ready.event, 0));
    f->began = device_moment_on(s->stream);
    f->begun = true;
}

static void end(Flight *f) {
    f->done = device_moment_on(f->comm->stream->stream);
    f->queued = true;
}

static bool from_root(CommOp op) {
    return op == OP_BROADCAST || op == OP_SEND;
}

// How much of the staging buffer a work needs: what is sent, and behind it what is received where that is another buffer.
static size_t sent_room(const Flight *f) {
    size_t bytes = f->count * dtype_size(f->type);
    return f->op == OP_ALL_TO_ALL ? ring_extent(f->comm, f->sending, f->parts) * bytes : bytes;
}
static size_t room_of(const Flight *f) {
    size_t bytes = f->count * dtype_size(f->type);
    return f->op == OP_ALL_TO_ALL ? sent_room(f) + ring_extent(f->comm, f->received, f->parts) * bytes
           : f->op == OP_SHIFT    ? 2 * bytes
                                  : bytes;
}

// The ring asks for the buffer, when the works before this one are through: what it reads of it goes down to the host.
static void *fetch(void *self) {
    Flight *f = self;
    struct CommStream *s = f->comm->stream;
    size_t room = room_of(f);
    if (!f->begun) {
        if (!s->host || s->host_bytes < room) {
            if (s->first != f) return NULL; // the last work's buffer may still be on its way up
            if (s->host) cuda_check(cudaFreeHost(s->host));
            s->host_bytes = room ? room : 1;
            cudaError_t error = cudaMallocHost((void **)&s->host, s->host_bytes);
            if (error == cudaErrorMemoryAllocation)
                fail(EXIT_RUNTIME, "group %s: the host has no %.6f GB to lock for --comm mpi", f->comm->name,
                     (double)s->host_bytes * 1e-9);
            cuda_check(error);
        }
        Piece down = {0, sent_room(f)};
        if (f->op == OP_ALL_GATHER) down = own_piece(f->comm, f->count, f->type);
        if (from_root(f->op) && f->comm->rank != f->root) down.bytes = 0;
        begin(f);
        if (down.bytes)
            cuda_check(
                cudaMemcpyAsync(s->host + down.offset, f->in, down.bytes, cudaMemcpyDeviceToHost, s->stream));
        cuda_check(cudaEventRecord(s->down, s->stream));
    }
    return cuda_reached(s->down) ? s->host : NULL;
}

static void put_back_rows(const Flight *f, const char *host) {
    size_t row = f->count * dtype_size(f->type);
    for (const CommRows *r = f->received; r < f->received + f->comm->size * f->parts; r++)
        if (r->rows)
            cuda_check(cudaMemcpyAsync((char *)f->out + r->first * row, host + r->first * row, r->rows * row,
                                       cudaMemcpyHostToDevice, f->comm->stream->stream));
}

// The ring is done: what it has written goes up.
static void put_back(void *self, size_t sent) {
    Flight *f = self;
    struct CommStream *s = f->comm->stream;
    Piece up = {0, f->count * dtype_size(f->type)};
    if (f->op == OP_REDUCE_SCATTER) up = own_piece(f->comm, f->count, f->type);
    if (f->op == OP_SHIFT) up.offset = up.bytes; // behind what it has sent
    if (from_root(f->op) && f->comm->rank == f->root) up.bytes = 0;
    if (f->op == OP_ALL_TO_ALL)
        put_back_rows(f, s->host + sent_room(f));
    else if (up.bytes)
        cuda_check(cudaMemcpyAsync(f->out, s->host + up.offset, up.bytes, cudaMemcpyHostToDevice, s->stream));
    f->sent = sent;
    end(f);
}

static Work start(Comm *c, Flight flight) {
    struct CommStream *s = c->stream;
    flight.comm = c;
    if (!s) fail(EXIT_RUNTIME, "group %s carries no device memory: it is older than comm_use", c->name);
    // What warm_up has not done would connect here, and take memory that nobody has counted.
    assert((s->purpose == FOR_SHIFTS) == (flight.op == OP_SHIFT));
    assert((s->purpose == FOR_ALL_TO_ALLS) == (flight.op == OP_ALL_TO_ALL));
    if (c->size == 1) { // nobody to wait for
        c->count[flight.op].calls++;
        if (flight.op == OP_ALL_TO_ALL)
            copy_own_rows(&flight, compute_stream), free(flight.received);
        else if (flight.out != flight.in)
            device_copy(flight.out, flight.in, flight.count * dtype_size(flight.type));
        return (Work){0};
    }
    Flight *f = host_alloc(1, sizeof *f);
    *f = flight;
    f->ready = device_moment();
    *(s->first ? &s->last->next : &s->first) = f;
    s->last = f;
    if (s->by_ring) { // which also counts and notes it
        Staged staged = {fetch, put_back, f};
        Work w = f->op == OP_ALL_TO_ALL
                     ? ring_start_staged_rows(c, f->received, f->sending, f->parts, f->count, f->type, staged)
                     : ring_start_staged(c, f->op, f->count, f->type, f->root, staged);
        f->sequence = w.sequence;
        return (Work){c, f->sequence, true};
    }
    f->sequence = ++s->started;
    f->sent = ring_sends(f);
    c->count[f->op].calls++;
    c->count[f->op].bytes += f->sent;
    begin(f);
    note_start(s->noted, f->sequence, f->op, f->type, f->count);
    if (s->first == f) note_turn(s->noted, f->op, f->type, f->count);
    nccl_start(f);
    end(f);
    return (Work){c, f->sequence, true};
}

// ---- the end of it ----------------------------------------------------------------------------------------------------

// Counts, traces and frees the works that are done.
static bool retire(struct CommStream *s) {
    bool moved = false;
    for (Flight *f; (f = s->first) && f->queued && cuda_reached(f->done.event); moved = true) {
        device_moment_seconds(f->ready); // for its event
        Moment began = {.seconds = device_moment_seconds(f->began)};
        Moment done = {.seconds = device_moment_seconds(f->done)};
        s->done = f->sequence;
        s->first = f->next;
        trace_span(s->comm->name, comm_op_name[f->op], (long)f->sequence, began, done, f->sent);
        free(f->received);
        free(f);
        if (!s->noted) continue;
        note_done(s->noted, s->done);
        note_moved();
        if ((f = s->first)) note_turn(s->noted, f->op, f->type, f->count);
    }
    return moved;
}

// Counts the waits that are over.
static void count_waits(struct CommStream *s) {
    for (Wait *w; (w = s->first_wait) && cuda_reached(w->after.event); free(w)) {
        Moment before = {.seconds = device_moment_seconds(w->before)};
        Moment after = {.seconds = device_moment_seconds(w->after)};
        s->comm->count[w->op].exposed_ms += 1e3 * (after.seconds - before.seconds);
        s->first_wait = w->next;
        trace_span("compute", comm_wait_name[w->op], (long)w->sequence, before, after, 0);
    }
}

static void look_for_errors(const struct CommStream *s) {
    ncclResult_t error;
    nccl_check(ncclCommGetAsyncError(s->nccl, &error));
    if (error == ncclSuccess || error == ncclInProgress) return;
    const char *detail = ncclGetLastError(s->nccl);
    fail(EXIT_RUNTIME, "group %s: NCCL: %s (%s; has another rank ended?)", s->comm->name,
         ncclGetErrorString(error), detail);
}

bool comm_advance(void) {
    bool moved = ring_advance();
    for (struct CommStream *s = streams; s; s = s->next) {
        moved |= retire(s);
        count_waits(s);
        if (s->nccl && s->first) look_for_errors(s);
    }
    return moved;
}

// While the host waits for its GPU: does that wait for other ranks? It does where NCCL has begun and is not done.
static void progress_while_waiting(void) {
    const Flight *oldest = NULL;
    comm_progress();
    for (struct CommStream *s = streams; s; s = s->next) {
        const Flight *f = s->noted ? s->first : NULL;
        if (f && cuda_reached(f->began.event) && (!oldest || f->ready.seconds < oldest->ready.seconds))
            oldest = f;
    }
    note_poll(oldest ? oldest->comm->stream->noted : NULL);
}

void comm_wait(Work w) {
    if (!w.comm) return;
    if (!w.device) {
        ring_wait(w);
        return;
    }
    struct CommStream *s = w.comm->stream;
    retire(s);
    if (s->done >= w.sequence || s->awaited >= w.sequence) return;
    Flight *f = s->first;
    while (f->sequence != w.sequence) f = f->next;
    Wait wait = {.op = f->op, .sequence = w.sequence, .before = device_moment()};
    if (s->by_ring) ring_finish((Work){.comm = w.comm, .sequence = w.sequence}); // f may be done then, and gone
    if (s->done < w.sequence) cuda_check(cudaStreamWaitEvent(compute_stream, f->done.event, 0));
    s->awaited = w.sequence;
    wait.after = device_moment();
    Wait *kept = host_alloc(1, sizeof *kept);
    *kept = wait;
    *(s->first_wait ? &s->last_wait->next : &s->first_wait) = kept;
    s->last_wait = kept;
}

// ---- groups -----------------------------------------------------------------------------------------------------------

void comm_use(Transport t) {
    transport = t;
    used = true;
    device_while_waiting = progress_while_waiting;
}

// NCCL connects two ranks where they first need it, in the call, which then does not return before the other one has come;
// and takes buffers for that. So each kind of call that a group is for is made once while the watchdog looks, and before
// memory is counted.
static void warm_up(struct CommStream *s) {
    size_t n = (size_t)s->comm->size;
    float *x;
    cuda_check(cudaMalloc((void **)&x, n * sizeof *x));
    cuda_check(cudaMemsetAsync(x, 0, n * sizeof *x, s->stream));
    if (s->purpose == FOR_SHIFTS) {
        nccl_shift(s, x, x + 1, 1, ncclFloat32);
    } else if (s->purpose == FOR_ALL_TO_ALLS) {
        nccl_check(ncclGroupStart());
        for (int r = 0; r < s->comm->size; r++)
            if (r != s->comm->rank) {
                nccl_check(ncclSend(x + s->comm->rank, 1, ncclFloat32, r, s->nccl, s->stream));
                nccl_check(ncclRecv(x + r, 1, ncclFloat32, r, s->nccl, s->stream));
            }
        nccl_check(ncclGroupEnd());
    } else if (s->purpose == FOR_MESSAGES && s->comm->rank == 0) {
        nccl_check(ncclSend(x, n, ncclFloat32, 1, s->nccl, s->stream));
    } else if (s->purpose == FOR_MESSAGES) {
        nccl_check(ncclRecv(x, n, ncclFloat32, 0, s->nccl, s->stream));
    } else {
        nccl_check(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, s->nccl, s->stream));
        nccl_check(ncclAllReduce(x, x, n, ncclFloat32, ncclMax, s->nccl, s->stream));
        nccl_check(ncclReduceScatter(x, x + s->comm->rank, 1, ncclFloat32, ncclSum, s->nccl, s->stream));
        nccl_check(ncclAllGather(x + s->comm->rank, x, 1, ncclFloat32, s->nccl, s->stream));
        nccl_check(ncclReduce(x, x, n, ncclFloat32, ncclSum, 0, s->nccl, s->stream));
        nccl_check(ncclBroadcast(x, x, n, ncclFloat32, 0, s->nccl, s->stream));
    }
    cuda_check(cudaEventRecord(s->down, s->stream));
    while (!cuda_reached(s->down)) sched_yield();
    cuda_check(cudaFree(x));
}

static void connect_nccl(struct CommStream *s) {
    Comm *c = s->comm;
    ncclUniqueId id = {0};
    if (c->rank == 0) nccl_check(ncclGetUniqueId(&id));
    comm_wait(comm_host_broadcast(c, &id, sizeof id, DTYPE_U8, 0));
    snprintf(s->noted_name, sizeof s->noted_name, "%s on NCCL", c->name);
    s->noted = note_group(s->noted_name, c->first);
    note_turn(s->noted, OP_BARRIER, DTYPE_U8, 0); // where the watchdog sees those who wait below
    note_moved();
    note_wait(s->noted);
    nccl_check(ncclCommInitRank(&s->nccl, c->size, id, c->rank));
    warm_up(s);
    note_wait(NULL);
    c->count[OP_BROADCAST] = (CommCount){0}; // users count from here
}

void comm_connect(Comm *c, Purpose purpose) {
    if (!used) return; // nothing of it will be on a device
    struct CommStream *s = c->stream = host_alloc(1, sizeof *s), **last = &streams;
    s->comm = c;
    s->purpose = purpose;
    cuda_check(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    cuda_check(cudaEventCreateWithFlags(&s->down, cudaEventDisableTiming));
    while (*last) last = &(*last)->next;
    *last = s;
    s->by_ring = c->size > 1 && transport == TRANSPORT_MPI;
    if (c->size > 1 && transport == TRANSPORT_NCCL) connect_nccl(s);
}

void comm_disconnect(Comm *c) {
    struct CommStream *s = c->stream, **link = &streams;
    if (!s) return;
    while (s->first && s->first->sequence <= s->awaited) comm_progress();
    if (s->first) fail(EXIT_RUNTIME, "group %s ends with a %s under way", c->name, comm_op_name[s->first->op]);
    if (s->first_wait) cuda_wait(s->last_wait->after.event);
    count_waits(s);
    while (*link != s) link = &(*link)->next;
    *link = s->next;
    if (s->noted) note_free(s->noted);
    if (s->nccl) nccl_check(ncclCommDestroy(s->nccl));
    cuda_check(cudaStreamDestroy(s->stream));
    cuda_check(cudaEventDestroy(s->down));
    if (s->host) cuda_check(cudaFreeHost(s->host));
    free(s);
    c->stream = NULL;
}

// The ring sums in the host's memory.
size_t comm_staging_bytes(size_t count, DType t, int size) {
    return (void)count, (void)t, (void)size, 0;
}

// ---- the collectives --------------------------------------------------------------------------------------------------

Work comm_all_reduce(Comm *c, void *buf, size_t count, DType t) {
    return start(c, (Flight){.op = OP_ALL_REDUCE, .in = buf, .out = buf, .count = count, .type = t});
}
Work comm_all_reduce_max(Comm *c, float *buf, size_t count) {
    return start(c,
                 (Flight){.op = OP_ALL_REDUCE_MAX, .in = buf, .out = buf, .count = count, .type = DTYPE_F32});
}
Work comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t) {
    return start(c, (Flight){.op = OP_REDUCE_SCATTER, .in = in, .out = out, .count = count, .type = t});
}
Work comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t) {
    return start(c, (Flight){.op = OP_ALL_GATHER, .in = in, .out = out, .count = count, .type = t});
}
Work comm_broadcast(Comm *c, void *buf, size_t count, DType t, int root) {
    return start(c,
                 (Flight){.op = OP_BROADCAST, .in = buf, .out = buf, .count = count, .type = t, .root = root});
}
Work comm_send(Comm *channel, const void *buf, size_t count, DType t) {
    assert(channel->size == 2 && channel->rank == 0);
    return start(channel, (Flight){.op = OP_SEND, .in = buf, .count = count, .type = t});
}
Work comm_receive(Comm *channel, void *buf, size_t count, DType t) {
    assert(channel->size == 2 && channel->rank == 1);
    return start(channel, (Flight){.op = OP_SEND, .out = buf, .count = count, .type = t});
}
Work comm_shift(Comm *ring, void *out, const void *in, size_t count, DType t) {
    assert(out != in || count == 0);
    return start(ring, (Flight){.op = OP_SHIFT, .in = in, .out = out, .count = count, .type = t});
}
Work comm_all_to_all(Comm *mesh, void *out, const CommRows *received, const void *in, const CommRows *sent,
                     int parts, size_t width, DType t) {
    size_t n = (size_t)(mesh->size * parts);
    CommRows *tables = host_alloc(2 * n, sizeof *tables);
    memcpy(tables, received, n * sizeof *tables);
    memcpy(tables + n, sent, n * sizeof *tables);
    assert(out != in || ring_extent(mesh, sent, parts) * width == 0);
    return start(mesh, (Flight){.op = OP_ALL_TO_ALL,
                                .in = in,
                                .out = out,
                                .count = width,
                                .type = t,
                                .received = tables,
                                .sending = tables + n,
                                .parts = parts});
}

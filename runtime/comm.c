// The ring: collectives on the host's memory, made of messages to the right-hand neighbour. On the CPU there are no others.
//
// The ranks of a Comm stand in a circle, and a buffer is cut into as many shards as there are ranks. Reduce-scatter,
// for 4 ranks, seen from shard 0, whose owner is rank 0:
//
//     hop 0             hop 1                   hop 2
//     rank 1 --x1--> rank 2 --x1+x2--> rank 3 --x1+x2+x3--> rank 0: adds x0, keeps the sum
//
// The other shards travel at the same time, each one place further round, so that in every hop every rank sends one
// shard and receives one. All-gather is the same walk without the sums: each owner's shard goes round and is kept on
// the way. All-reduce is the one, then the other. all_reduce_max walks like it, and keeps the larger of two in place of
// their sum.
//
// A shard is cut again, into slices of at most SLICE_BYTES. LANES slices travel at a time, each at its own pace: while
// one is added, the others are on their way; and what is received and not yet added takes little memory.
//
// Cost for n bytes and N ranks: reduce-scatter and all-gather send (N-1)/N · n a rank, all-reduce twice that, which is
// the least possible; N-1 hops a slice, 2(N-1) for all-reduce. Broadcast passes slices along a chain: n bytes a rank, none
// from the last one; a message goes from one rank to one other. A shift is n bytes a rank, in one hop. In an all-to-all each part
// goes straight to its rank, first those for rank + 1, then for rank + 2, …: in each of these rounds a rank sends to one other and
// receives from one. Barrier: log2 N empty messages a rank (dissemination: Hensgen, Finkel & Manber 1988).
// With --comm mpi a GPU's buffer takes this way, too, staged through the host: fetched when its turn has come, and put back
// when the ring is done with it (Staged, comm_ring.h).
// Paper: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
#include "comm_ring.h"
#include "device.h"
#include "fail.h"
#include "log.h"
#include "trace.h"
#include "../kernels/precision.h"

#include <assert.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef USE_MPI
#include <mpi.h>
#else
#include "no_mpi.h"
#endif

// A slice also keeps MPI's int counts far from their end, however large the buffer.
enum { SLICE_BYTES = 512 << 10, LANES = 4 };
enum { TAG_CLOCK = 32767 }; // the largest that every MPI has

const char *const comm_op_name[COMM_OPS] = {"all_reduce", "all_reduce_max", "reduce_scatter",
                                            "all_gather", "broadcast",      "send",
                                            "shift",      "all_to_all",     "barrier"};
const char *const comm_wait_name[COMM_OPS] = {
    "wait for all_reduce", "wait for all_reduce_max", "wait for reduce_scatter",
    "wait for all_gather", "wait for broadcast",      "wait for send",
    "wait for shift",      "wait for all_to_all",     "wait for barrier"};

// One hop of one slice: what goes out, what comes in, and what becomes of it.
typedef struct {
    const void *send; // [sent bytes]
    void *receive;    // [received bytes]
    size_t sent, received;
    int to, from;     // MPI_PROC_NULL: nobody, because there is nothing to say
    const void *mine; // [received bytes] to combine with what comes in, unless NULL
    void *keep;       // [received bytes] where that then goes, unless NULL
} Hop;

typedef struct {
    size_t slice; // the one that travels here; the next one is slice + LANES
    int hop;      // how many it has behind it
    bool posted;  // is the next one under way?
    Hop now;
    MPI_Request requests[2];
} Lane;

// Of an all-to-all: the part that this rank sends to rank + distance, and the one that it receives from rank − distance.
typedef struct {
    int distance;
    size_t slice;  // the first of it
    Piece out, in; // of the two buffers
} Exchange;

// A collective under way, or waiting for its turn.
typedef struct Task {
    struct Task *next;
    uint64_t sequence;
    CommOp op;
    DType type;
    size_t count;
    const void *in; // reductions, send, shift: [count]; all_gather: this rank's shard; all_to_all: its rows
    void *own;      // where this rank's shard of the result goes
    void *out;      // all_reduce, all_gather, broadcast, receive, shift: [count]; all_to_all: its rows
    int root;
    int parts;
    Exchange *exchange;            // all_to_all: [size, parts] by distance, and their end
    size_t behind;                 // shift, all_to_all: where out begins in a staged buffer, in bytes
    size_t slice, slices, arrived; // elements in a slice; slices in all; slices that have made all their hops
    int hops;                      // that a slice makes
    int tag;                       // of lane 0's messages
    Staged staged;                 // where the buffer is a device's: fetched first, and then the turn begins
    bool begun;
    double began; // for the trace: when its turn came,
    size_t sent;  // and what this rank has sent for it
    Lane lane[LANES];
} Task;

struct CommRing {
    Comm comm; // what users hold is the first part of this
    MPI_Comm mpi;
    Task *first, *last;     // the queue; only the first is under way
    uint64_t started, done; // works, in order of their start
    char *staging;          // sums that are on their way through this rank: two slices a lane
    size_t staging_bytes;
    struct Noted *noted;
    struct CommRing *next;
};

static struct CommRing *rings; // every Comm alive
static Comm *world;
static Host host;

#define mpi_check(call) mpi_checked(call, #call, __LINE__)
static void mpi_checked(int error, const char *call, int line) {
    if (error == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(error, text, &length);
    fail(EXIT_RUNTIME, "%s:%d: %s: %s (has another rank ended?)", __FILE__, line, call, text);
}

// ---- notes for the watchdog -----------------------------------------------------------------------------------------
struct Noted {
    _Atomic(const char *) name; // NULL: this place is free
    atomic_int first;
    atomic_uint_least64_t started, done, last, turn; // the last two packed, as below
};
static Noted noted[COMM_MOST];
static atomic_int noted_latest, noted_wait = -1, noted_poll = -1; // places in it
static _Atomic double noted_moved, polled;                        // when
static atomic_bool halted;

// Stores and loads that order nothing else: plain moves, which only must not tear.
#define note(place, value) atomic_store_explicit(&(place), value, memory_order_relaxed)
#define read_note(place)   atomic_load_explicit(&(place), memory_order_relaxed)

static uint64_t packed(CommOp op, DType type, size_t count) {
    return (uint64_t)count << 8 | (uint64_t)op << 4 | (uint64_t)type;
}
static CommStep unpacked(uint64_t step) {
    return (CommStep){(CommOp)(step >> 4 & 15), (DType)(step & 15), step >> 8};
}

Noted *note_group(const char *name, int first) {
    for (Noted *n = noted; n < noted + COMM_MOST; n++)
        if (!read_note(n->name)) {
            note(n->first, first), note(n->started, 0), note(n->done, 0), note(n->last, 0), note(n->turn, 0);
            note(n->name, name);
            return n;
        }
    fail_all(EXIT_RUNTIME, "a rank is in %d groups at most, and group %s is one more", COMM_MOST, name);
}

void note_free(Noted *n) {
    note(n->name, NULL);
}

void note_start(Noted *n, uint64_t started, CommOp op, DType t, size_t count) {
    note(n->started, started);
    note(n->last, packed(op, t, count));
    note(noted_latest, (int)(n - noted));
}

void note_turn(Noted *n, CommOp op, DType t, size_t count) {
    note(n->turn, packed(op, t, count));
}

void note_done(Noted *n, uint64_t done) {
    note(n->done, done);
}

void note_moved(void) {
    note(noted_moved, seconds_now());
}

void note_wait(const Noted *n) {
    note(noted_wait, n ? (int)(n - noted) : -1);
}

void note_poll(const Noted *n) {
    note(noted_poll, n ? (int)(n - noted) : -1);
    note(polled, seconds_now());
}

void comm_notes(CommNotes *notes) {
    *notes = (CommNotes){
        .latest = read_note(noted_latest), .waiting = read_note(noted_wait), .moved = read_note(noted_moved)};
    if (notes->waiting < 0 && seconds_now() - read_note(polled) < 1) notes->waiting = read_note(noted_poll);
    for (int i = 0; i < COMM_MOST; i++) {
        Noted *n = &noted[i];
        CommNote *copy = &notes->group[i];
        const char *name = read_note(n->name);
        if (!name) continue;
        strncpy(copy->name, name, sizeof copy->name - 1);
        copy->first = read_note(n->first);
        copy->started = read_note(n->started), copy->done = read_note(n->done);
        copy->last = unpacked(read_note(n->last)), copy->turn = unpacked(read_note(n->turn));
        notes->groups = i + 1;
    }
}

// ---- the sums -------------------------------------------------------------------------------------------------------

size_t dtype_size(DType t) {
    return (const size_t[]){4, 2, 8, 4, 8, 1}[t];
}

// sum [n] += x [n]
typedef void Add(void *sum, const void *x, size_t n);
#define ADD(name, type, sum_of_a_and_b)                                                                        \
    static void name(void *sum, const void *x, size_t n) {                                                     \
        type *restrict s = sum;                                                                                \
        for (size_t i = 0; i < n; i++) {                                                                       \
            type a = s[i], b = ((const type *)x)[i];                                                           \
            s[i] = sum_of_a_and_b;                                                                             \
        }                                                                                                      \
    }
ADD(add_f32, float, a + b)
ADD(add_bf16, bf16, float_to_bf16(bf16_to_float(a) + bf16_to_float(b)))
ADD(add_f64, double, a + b)
ADD(add_i32, int32_t, a + b)
ADD(add_i64, int64_t, a + b)
ADD(max_f32, float, a > b || isnan(a) ? a : b) // where b is NaN, it is the answer, too
static Add *const add[] = {add_f32, add_bf16, add_f64, add_i32, add_i64, NULL}; // by DType

// ---- what travels when ----------------------------------------------------------------------------------------------

size_t comm_shard_begin(size_t count, int size, int r) {
    size_t each = count / (size_t)size, longer = count % (size_t)size, rank = (size_t)r;
    return rank * each + (rank < longer ? rank : longer);
}

static size_t slice_items(size_t longest, DType t) {
    size_t most = SLICE_BYTES / dtype_size(t);
    return longest < most ? longest : most;
}

size_t ring_staging_bytes(size_t count, DType t, int size) {
    if (size == 1 || count == 0) return 0;
    size_t longest = comm_shard_begin(count, size, 1), slice = slice_items(longest, t);
    size_t slices = (longest + slice - 1) / slice;
    return 2 * (slices < LANES ? slices : LANES) * slice * dtype_size(t);
}

static int around(const Comm *c, int rank) {
    return (rank + c->size) % c->size;
}

static void *at(const void *base, size_t offset) { // in bytes; an empty buffer may be NULL
    return offset ? (char *)base + offset : (void *)base;
}

// Slice j of the elements begin..end, in bytes. Shards may differ by an element: the last slice of one may be empty.
static Piece piece(const Task *t, size_t j, size_t begin, size_t end) {
    begin += j * t->slice;
    size_t items = begin >= end ? 0 : end - begin < t->slice ? end - begin : t->slice;
    return (Piece){begin * dtype_size(t->type), items * dtype_size(t->type)};
}
Piece own_piece(const Comm *c, size_t count, DType t) {
    size_t begin = comm_shard_begin(count, c->size, c->rank);
    return (Piece){begin * dtype_size(t),
                   (comm_shard_begin(count, c->size, c->rank + 1) - begin) * dtype_size(t)};
}
static Piece shard_piece(const Comm *c, const Task *t, size_t j, int rank) {
    int shard = around(c, rank);
    return piece(t, j, comm_shard_begin(t->count, c->size, shard),
                 comm_shard_begin(t->count, c->size, shard + 1));
}

// Hop k sends on what hop k-1 has summed, so two places a lane take turns.
static Hop reduce_hop(const Comm *c, const Task *t, size_t j, int k) {
    Piece out = shard_piece(c, t, j, c->rank - 1 - k), in = shard_piece(c, t, j, c->rank - 2 - k);
    size_t lane = j % LANES, place = t->slice * dtype_size(t->type);
    void *before = at(c->ring->staging, (2 * lane + (k + 1) % 2) * place);
    void *now = at(c->ring->staging, (2 * lane + k % 2) * place);
    return (Hop){.send = k == 0 ? at(t->in, out.offset) : before,
                 .sent = out.bytes,
                 .receive = now,
                 .received = in.bytes,
                 .mine = at(t->in, in.offset),
                 .keep = k == c->size - 2 ? at(t->own, j * place) : NULL};
}

static Hop gather_hop(const Comm *c, const Task *t, size_t j, int k) {
    Piece out = shard_piece(c, t, j, c->rank - k), in = shard_piece(c, t, j, c->rank - 1 - k);
    return (Hop){.send = at(t->out, out.offset),
                 .sent = out.bytes,
                 .receive = at(t->out, in.offset),
                 .received = in.bytes};
}

// Hop 0 takes a slice from the left, hop 1 passes it on; the chain begins at root and ends at its left.
static Hop broadcast_hop(const Comm *c, const Task *t, size_t j, int k) {
    Piece slice = piece(t, j, 0, t->count);
    void *place = at(t->out, slice.offset);
    if (k == 0) return (Hop){.receive = place, .received = c->rank == t->root ? 0 : slice.bytes};
    return (Hop){.send = place, .sent = around(c, c->rank + 1) == t->root ? 0 : slice.bytes};
}

// One hop: from the sender, the channel's rank 0, to its right.
static Hop send_hop(const Comm *c, const Task *t, size_t j) {
    Piece slice = piece(t, j, 0, t->count);
    if (c->rank == t->root) return (Hop){.send = at(t->in, slice.offset), .sent = slice.bytes};
    return (Hop){.receive = at(t->out, slice.offset), .received = slice.bytes};
}

// One hop, in which all ranks send.
static Hop shift_hop(const Task *t, size_t j) {
    Piece slice = piece(t, j, 0, t->count);
    return (Hop){.send = at(t->in, slice.offset),
                 .sent = slice.bytes,
                 .receive = at(t->out, slice.offset),
                 .received = slice.bytes};
}

// Parts differ in length, and what a rank receives in a round from what it sends. Slice k of a part travels in lane k mod LANES on
// both sides, for each takes a multiple of LANES slices for it. Where one has nothing to say in a slice, it asks nobody.
static size_t exchange_slices(Piece out, Piece in) {
    size_t most = out.bytes > in.bytes ? out.bytes : in.bytes;
    return (most + LANES * SLICE_BYTES - 1) / (LANES * SLICE_BYTES) * LANES;
}

static void plan_exchange(const Comm *c, Task *t, const CommRows *received, const CommRows *sent, int parts) {
    size_t row = t->count * dtype_size(t->type), slices = 0;
    Exchange *e = t->exchange = host_alloc((size_t)(c->size * parts) + 1, sizeof *e);
    for (int d = 0; d < c->size; d++)
        for (int i = 0; i < parts; i++, e++) {
            CommRows out = sent[around(c, c->rank + d) * parts + i];
            CommRows in = received[around(c, c->rank - d) * parts + i];
            assert(d > 0 || out.rows == in.rows);
            *e = (Exchange){d, slices, {out.first * row, out.rows * row}, {in.first * row, in.rows * row}};
            if (d > 0) slices += exchange_slices(e->out, e->in);
        }
    e->slice = slices; // the end
    t->parts = parts;
}

static Piece slice_of(Piece part, size_t k) {
    size_t begin = k * SLICE_BYTES, left = part.bytes > begin ? part.bytes - begin : 0;
    return (Piece){part.offset + begin, left < SLICE_BYTES ? left : SLICE_BYTES};
}

static Hop all_to_all_hop(const Comm *c, const Task *t, size_t j) {
    const Exchange *e = t->exchange;
    while (e[1].slice <= j) e++;
    Piece out = slice_of(e->out, j - e->slice), in = slice_of(e->in, j - e->slice);
    return (Hop){.send = at(t->in, out.offset),
                 .sent = out.bytes,
                 .to = out.bytes ? around(c, c->rank + e->distance) : MPI_PROC_NULL,
                 .receive = at(t->out, in.offset),
                 .received = in.bytes,
                 .from = in.bytes ? around(c, c->rank - e->distance) : MPI_PROC_NULL};
}

static Hop next_hop(const Comm *c, const Task *t, const Lane *lane) {
    size_t j = lane->slice;
    int k = lane->hop, reduce_hops = t->op == OP_ALL_GATHER ? 0 : c->size - 1;
    if (t->op == OP_BARRIER) // after hop k, this rank knows that the 2^(k+1) - 1 ranks on its left have come
        return (Hop){.to = around(c, c->rank + (1 << k)), .from = around(c, c->rank - (1 << k))};
    if (t->op == OP_ALL_TO_ALL) return all_to_all_hop(c, t, j);
    Hop hop = t->op == OP_BROADCAST ? broadcast_hop(c, t, j, k)
              : t->op == OP_SEND    ? send_hop(c, t, j)
              : t->op == OP_SHIFT   ? shift_hop(t, j)
              : k < reduce_hops     ? reduce_hop(c, t, j, k)
                                    : gather_hop(c, t, j, k - reduce_hops);
    hop.to = hop.sent ? around(c, c->rank + 1) : MPI_PROC_NULL;
    hop.from = hop.received ? around(c, c->rank - 1) : MPI_PROC_NULL;
    return hop;
}

// ---- progress -------------------------------------------------------------------------------------------------------

// Is the buffer there?
static bool is_here(const Comm *c, Task *t) {
    if (!t->staged.fetch) return true;
    void *buf = t->staged.fetch(t->staged.self);
    if (!buf) return false;
    t->out = buf, t->own = at(buf, own_piece(c, t->count, t->type).offset);
    t->in = t->op == OP_ALL_GATHER ? t->own : buf;
    if (t->behind) t->out = at(buf, t->behind);
    return true;
}

// A task's turn has come. Not earlier: the works before it may be writing what it reads.
static void begin(Comm *c, Task *t) {
    struct CommRing *ring = c->ring;
    t->begun = true;
    t->began = seconds_now();
    note_turn(ring->noted, t->op, t->type, t->count);
    bool reduces = t->op <= OP_REDUCE_SCATTER;
    size_t staging = reduces ? ring_staging_bytes(t->count, t->type, c->size) : 0;
    if (staging > ring->staging_bytes) {
        free(ring->staging);
        ring->staging = host_alloc(1, staging);
        ring->staging_bytes = staging;
    }
    if (t->op == OP_ALL_GATHER || (c->size == 1 && t->own)) { // this rank's shard is not brought by anybody
        size_t bytes = own_piece(c, t->count, t->type).bytes;
        if (t->own != t->in && bytes) memmove(t->own, t->in, bytes);
    }
    for (const Exchange *e = t->exchange; e < t->exchange + t->parts; e++) // with itself
        if (e->in.bytes) memcpy(at(t->out, e->in.offset), at(t->in, e->out.offset), e->in.bytes);
    for (int i = 0; i < LANES; i++) t->lane[i].slice = (size_t)i;
}

static void post(Comm *c, Task *t, int i) {
    Lane *lane = &t->lane[i];
    Hop *hop = &lane->now;
    *hop = next_hop(c, t, lane);
    MPI_Comm mpi = c->ring->mpi;
    int tag = t->tag + i;
    mpi_check(MPI_Irecv(hop->receive, (int)hop->received, MPI_BYTE, hop->from, tag, mpi, &lane->requests[0]));
    // A message or a shift has left once its receiver takes it, as with NCCL; not once the system has buffered it.
    bool taken = t->op == OP_SEND || t->op == OP_SHIFT || t->op == OP_ALL_TO_ALL;
    int (*send)(const void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *) =
        taken ? MPI_Issend : MPI_Isend;
    mpi_check(send(hop->send, (int)hop->sent, MPI_BYTE, hop->to, tag, mpi, &lane->requests[1]));
    c->count[t->op].bytes += hop->sent;
    t->sent += hop->sent;
    lane->posted = true;
}

// Takes lane i as far as it goes without waiting.
static bool advance_lane(Comm *c, Task *t, int i) {
    Lane *lane = &t->lane[i];
    bool moved = false;
    while (lane->slice < t->slices) {
        if (!lane->posted) post(c, t, i);
        int both;
        mpi_check(MPI_Testall(2, lane->requests, &both, MPI_STATUSES_IGNORE));
        if (!both) break;
        Hop *hop = &lane->now;
        size_t bytes = hop->received;
        Add *combine = t->op == OP_ALL_REDUCE_MAX ? max_f32 : add[t->type];
        if (hop->mine && bytes) combine(hop->receive, hop->mine, bytes / dtype_size(t->type));
        if (hop->keep && bytes) memcpy(hop->keep, hop->receive, bytes);
        lane->posted = false;
        moved = true;
        if (++lane->hop == t->hops) {
            t->arrived++;
            lane->hop = 0;
            lane->slice += LANES;
        }
    }
    return moved;
}

static Moment now(void) { // by the host's clock
    return (Moment){.seconds = seconds_now()};
}

// Moves the first work of the queue, and once it is done, the next. Says whether anything moved.
static bool advance(Comm *c) {
    struct CommRing *ring = c->ring;
    bool moved = false;
    for (Task *t; (t = ring->first);) {
        if (!t->begun && !is_here(c, t)) break;
        if (!t->begun) begin(c, t);
        for (int i = 0; i < LANES; i++) moved |= advance_lane(c, t, i);
        if (t->arrived < t->slices) break;
        ring->done = t->sequence;
        note_done(ring->noted, ring->done);
        if (t->staged.put_back)
            t->staged.put_back(t->staged.self, t->sent);
        else if (c->size > 1)
            trace_span(c->name, comm_op_name[t->op], (long)t->sequence, (Moment){.seconds = t->began}, now(),
                       t->sent);
        ring->first = t->next;
        free(t->exchange);
        free(t);
        moved = true;
    }
    return moved;
}

bool ring_advance(void) {
    bool moved = false;
    for (struct CommRing *ring = rings; ring; ring = ring->next) moved |= advance(&ring->comm);
    return moved;
}

static bool advance_all(void) {
    if (read_note(halted)) return usleep(1000), false;
    return comm_advance();
}

void comm_halt(void) {
    note(halted, true);
}

void comm_progress(void) {
    advance_all();
}

// Says of which work a message is. A rank that leaves a collective out, or starts two the wrong way round, would else
// have its numbers added to what they do not belong to, wherever the sizes agree. So they meet nothing, all wait, and
// the watchdog names who does not fit.
static int tag_of(const Task *t) {
    uint64_t x = (t->sequence ^ packed(t->op, t->type, t->count) << 20) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
    return LANES * (int)((x >> 32) % (TAG_CLOCK / LANES));
}

static Work start(Comm *c, Task task) {
    struct CommRing *ring = c->ring;
    Task *t = host_alloc(1, sizeof *t);
    assert(task.op > OP_REDUCE_SCATTER || add[task.type]); // bytes are not added
    *t = task;
    t->sequence = ++ring->started;
    t->tag = tag_of(t);
    note_start(ring->noted, ring->started, t->op, t->type, t->count);
    c->count[t->op].calls++;
    if (c->size > 1 && t->op == OP_BARRIER) {
        t->slices = 1;
        while (1 << t->hops < c->size) t->hops++;
    } else if (t->op == OP_ALL_TO_ALL) {
        t->slices = t->exchange[c->size * t->parts].slice;
        t->hops = 1;
    } else if (c->size > 1 && t->count > 0) {
        bool whole = t->op == OP_BROADCAST || t->op == OP_SEND || t->op == OP_SHIFT;
        size_t longest = whole ? t->count : comm_shard_begin(t->count, c->size, 1);
        t->slice = slice_items(longest, t->type);
        t->slices = (longest + t->slice - 1) / t->slice;
        bool both = t->op == OP_ALL_REDUCE || t->op == OP_ALL_REDUCE_MAX;
        t->hops = t->op == OP_BROADCAST ? 2 : both ? 2 * (c->size - 1) : c->size - 1; // a message's: 1
        if (t->op == OP_SHIFT) t->hops = 1;
    }
    *(ring->first ? &ring->last->next : &ring->first) = t;
    ring->last = t;
    advance(c);                                          // the first messages leave now
    return (Work){.comm = c, .sequence = ring->started}; // t may be done, and gone
}

// Other ranks may be short of a core to run on, so an idle turn is given away. Where the buffer is not here yet, it is not
// the others that this rank waits for.
void ring_finish(Work w) {
    struct CommRing *ring = w.comm->ring;
    note_moved();
    while (ring->done < w.sequence) {
        note_wait(ring->first->begun ? ring->noted : NULL);
        if (advance_all())
            note_moved();
        else
            sched_yield();
    }
    note_wait(NULL);
}

void ring_wait(Work w) {
    struct CommRing *ring = w.comm->ring;
    if (ring->done >= w.sequence) return;
    double began = seconds_now();
    Task *t = ring->first;
    while (t->sequence != w.sequence) t = t->next;
    CommOp op = t->op;
    ring_finish(w);
    w.comm->count[op].exposed_ms += 1e3 * (seconds_now() - began);
    if (w.comm->size > 1)
        trace_span("compute", comm_wait_name[op], (long)w.sequence, (Moment){.seconds = began}, now(), 0);
}

// ---- the collectives ------------------------------------------------------------------------------------------------

Work ring_start_staged(Comm *c, CommOp op, size_t count, DType t, int root, Staged staged) {
    size_t behind = op == OP_SHIFT ? count * dtype_size(t) : 0;
    return start(c,
                 (Task){.op = op, .type = t, .count = count, .root = root, .behind = behind, .staged = staged});
}

static Work start_rows(Comm *c, Task t, const CommRows *received, const CommRows *sent, int parts) {
    plan_exchange(c, &t, received, sent, parts);
    return start(c, t);
}

Work ring_start_staged_rows(Comm *c, const CommRows *received, const CommRows *sent, int parts, size_t width,
                            DType t, Staged staged) {
    Task task = {.op = OP_ALL_TO_ALL, .type = t, .count = width, .staged = staged};
    task.behind = ring_extent(c, sent, parts) * width * dtype_size(t);
    return start_rows(c, task, received, sent, parts);
}

size_t ring_extent(const Comm *c, const CommRows *table, int parts) {
    size_t most = 0;
    for (const CommRows *r = table; r < table + c->size * parts; r++)
        if (r->rows && r->first + r->rows > most) most = r->first + r->rows;
    return most;
}

static void *own_place(const Comm *c, void *whole, size_t count, DType t) {
    return at(whole, own_piece(c, count, t).offset);
}

Work comm_host_all_reduce(Comm *c, void *buf, size_t count, DType t) {
    void *own = own_place(c, buf, count, t);
    return start(c, (Task){.op = OP_ALL_REDUCE, .type = t, .count = count, .in = buf, .own = own, .out = buf});
}

Work comm_host_all_reduce_max(Comm *c, float *buf, size_t count) {
    void *own = own_place(c, buf, count, DTYPE_F32);
    return start(
        c,
        (Task){.op = OP_ALL_REDUCE_MAX, .type = DTYPE_F32, .count = count, .in = buf, .own = own, .out = buf});
}

Work comm_host_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t) {
    return start(c, (Task){.op = OP_REDUCE_SCATTER, .type = t, .count = count, .in = in, .own = out});
}

Work comm_host_all_gather(Comm *c, void *out, const void *in, size_t count, DType t) {
    void *own = own_place(c, out, count, t);
    return start(c, (Task){.op = OP_ALL_GATHER, .type = t, .count = count, .in = in, .own = own, .out = out});
}

Work comm_host_broadcast(Comm *c, void *buf, size_t count, DType t, int root) {
    return start(c, (Task){.op = OP_BROADCAST, .type = t, .count = count, .out = buf, .root = root});
}

Work comm_host_send(Comm *channel, const void *buf, size_t count, DType t) {
    assert(channel->size == 2 && channel->rank == 0);
    return start(channel, (Task){.op = OP_SEND, .type = t, .count = count, .in = buf});
}

Work comm_host_receive(Comm *channel, void *buf, size_t count, DType t) {
    assert(channel->size == 2 && channel->rank == 1);
    return start(channel, (Task){.op = OP_SEND, .type = t, .count = count, .out = buf});
}

Work comm_host_shift(Comm *c, void *out, const void *in, size_t count, DType t) {
    assert(out != in || count == 0);
    return start(c, (Task){.op = OP_SHIFT, .type = t, .count = count, .in = in, .own = out, .out = out});
}

Work comm_host_all_to_all(Comm *c, void *out, const CommRows *received, const void *in, const CommRows *sent,
                          int parts, size_t width, DType t) {
    assert(out != in || ring_extent(c, sent, parts) * width == 0);
    Task task = {.op = OP_ALL_TO_ALL, .type = t, .count = width, .in = in, .out = out};
    return start_rows(c, task, received, sent, parts);
}

Work comm_barrier(Comm *c) {
    return start(c, (Task){.op = OP_BARRIER});
}

double comm_sum(Comm *c, double x) {
    comm_wait(comm_host_all_reduce(c, &x, 1, DTYPE_F64));
    return x;
}

// Every rank's x.
static double *gather_all(Comm *c, double x) {
    size_t n = (size_t)c->size;
    double *all = host_alloc(n, sizeof *all);
    comm_wait(comm_host_all_gather(c, all, &x, n, DTYPE_F64));
    return all;
}

double comm_max(Comm *c, double x) {
    double *all = gather_all(c, x), max = x;
    for (int r = 0; r < c->size; r++)
        if (all[r] > max || isnan(all[r])) max = all[r]; // one NaN among the ranks is the answer on all of them
    free(all);
    return max;
}

bool comm_all_true(Comm *c, bool mine) {
    return comm_sum(c, mine ? 0 : 1) == 0;
}

// ---- clocks ---------------------------------------------------------------------------------------------------------

static void message(Comm *c, bool mine, double *seconds, int other) {
    MPI_Request request;
    int n = sizeof *seconds, done = 0;
    if (mine)
        mpi_check(MPI_Isend(seconds, n, MPI_BYTE, other, TAG_CLOCK, c->ring->mpi, &request));
    else
        mpi_check(MPI_Irecv(seconds, n, MPI_BYTE, other, TAG_CLOCK, c->ring->mpi, &request));
    for (;; sched_yield()) {
        mpi_check(MPI_Testall(1, &request, &done, MPI_STATUSES_IGNORE));
        if (done) return;
    }
}

// Rank 0 tells one rank after another what its clock says. The answer was on its way for at most the time that the
// question and it took together: the shortest knows best, and its error is at most half of that.
double comm_clock_offset(Comm *c) {
    enum { TIMES = 20 };
    double offset = 0, shortest = INFINITY, theirs = 0;
    comm_wait(comm_barrier(c));
    for (int r = 1; r < c->size && c->rank == 0; r++)
        for (int i = 0; i < TIMES; i++) {
            message(c, false, &theirs, r);
            theirs = seconds_now();
            message(c, true, &theirs, r);
        }
    for (int i = 0; i < TIMES && c->rank != 0; i++) {
        double asked = seconds_now();
        message(c, true, &asked, 0);
        message(c, false, &theirs, 0);
        double answered = seconds_now();
        if (answered - asked >= shortest) continue;
        shortest = answered - asked;
        offset = theirs - (asked + answered) / 2;
    }
    return offset;
}

// ---- groups ---------------------------------------------------------------------------------------------------------

static int first_of(MPI_Comm mpi) {
    MPI_Group members, all;
    int first;
    mpi_check(MPI_Comm_group(mpi, &members));
    mpi_check(MPI_Comm_group(MPI_COMM_WORLD, &all));
    mpi_check(MPI_Group_translate_ranks(members, 1, &(int){0}, all, &first));
    mpi_check(MPI_Group_free(&members));
    mpi_check(MPI_Group_free(&all));
    return first;
}

// Takes over the MPI communicator.
static Comm *comm_of(MPI_Comm mpi, const char *name) {
    struct CommRing *ring = host_alloc(1, sizeof *ring), **end = &rings;
    Comm *c = &ring->comm;
    c->name = name;
    c->ring = ring;
    ring->mpi = mpi;
    mpi_check(MPI_Comm_rank(mpi, &c->rank));
    mpi_check(MPI_Comm_size(mpi, &c->size));
    c->first = first_of(mpi);
    ring->noted = note_group(name, c->first);
    while (*end) end = &(*end)->next;
    return *end = ring, c;
}

// A word, 0 at first, in memory that the ranks of this host share: a file without a name, which the others open through
// rank 0's descriptor, and know by its inode (in a container, the same pid may be another process). MPI's own shared
// windows do not work under Open MPI's monitoring. NULL where it cannot be had.
static atomic_int *shared_word(Comm *neighbours) {
    struct {
        int pid, fd;
        struct stat file;
    } first = {.pid = getpid(), .fd = -1};
    if (neighbours->rank == 0) {
        first.fd = memfd_create("ultrascale", MFD_CLOEXEC);
        if (ftruncate(first.fd, sizeof(atomic_int)) < 0 || fstat(first.fd, &first.file) < 0) first.pid = 0;
    }
    comm_wait(comm_host_broadcast(neighbours, &first, sizeof first, DTYPE_U8, 0));
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", first.pid, first.fd);
    struct stat mine;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    bool same = fd >= 0 && fstat(fd, &mine) == 0 && mine.st_dev == first.file.st_dev &&
                mine.st_ino == first.file.st_ino;
    void *word = same ? mmap(NULL, sizeof(atomic_int), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    comm_wait(comm_barrier(neighbours)); // all have opened it
    if (fd >= 0) close(fd);
    if (neighbours->rank == 0 && first.fd >= 0) close(first.fd);
    return word == MAP_FAILED ? NULL : word;
}

Comm *comm_init(int *argc, char ***argv) {
    int provided;
    // Without a launcher, Open MPI would start a daemon for this one rank, and want ssh for that.
    setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
    // Nor has it anybody to share a directory with: two such programs at a time would take it from each other.
    if (launch_size() == 1) setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
    // Over TCP a slice goes to the kernel whole, and travels while this process computes. By default it would ask
    // first whether it may come, and the answer wait until the other side is between two operations: half of the
    // overlap lost.
    setenv("OMPI_MCA_btl_tcp_eager_limit", "1048576", 0);
    setenv("OMPI_MCA_btl_tcp_max_send_size", "1048576", 0);
    mpi_check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
    fail_abort = comm_abort;
    device_while_waiting = comm_progress;
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)); // groups inherit it
    MPI_Comm mpi, here;
    mpi_check(MPI_Comm_dup(MPI_COMM_WORLD, &mpi));
    world = comm_of(mpi, "world");
    if (world->size != launch_size())
        fail_all(EXIT_USAGE,
                 "the launcher started %d ranks, but MPI sees %d; use the mpirun of the MPI that this is built "
                 "with (srun --mpi=pmix), and no launcher for a build with MPI=0",
                 launch_size(), world->size);
    mpi_check(MPI_Comm_split_type(mpi, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, &here));
    Comm *neighbours = comm_of(here, "host");
    host.local_rank = neighbours->rank, host.local_size = neighbours->size;
    fail_spoken = shared_word(neighbours);
    int first = neighbours->first; // of this host's ranks
    comm_free(neighbours);
    double *firsts = gather_all(world, first);
    for (int r = 0; r < world->size; r++)
        if (firsts[r] == r) host.hosts++, host.host += r < first;
    free(firsts);
    memset(world->count, 0, sizeof world->count); // users count from here
    return world;
}

Host comm_host(void) {
    return host;
}

static Comm *split(Comm *parent, int color, int key, const char *name, Purpose purpose) {
    MPI_Comm mpi;
    ring_wait((Work){.comm = parent, .sequence = parent->ring->started}); // MPI_Comm_split would not move it
    mpi_check(MPI_Comm_split(parent->ring->mpi, color, key, &mpi));
    if (color == MPI_UNDEFINED) return NULL;
    Comm *c = comm_of(mpi, name);
    comm_connect(c, purpose);
    return c;
}

Comm *comm_split(Comm *parent, int color, int key, const char *name) {
    return split(parent, color, key, name, FOR_COLLECTIVES);
}

Comm *comm_ring(Comm *parent, int color, int key, const char *name) {
    return split(parent, color, key, name, FOR_SHIFTS);
}

Comm *comm_mesh(Comm *parent, int color, int key, const char *name) {
    return split(parent, color, key, name, FOR_ALL_TO_ALLS);
}

Comm *comm_channel(Comm *parent, int from, int to, const char *name) {
    assert(from != to);
    bool mine = parent->rank == from || parent->rank == to;
    Comm *c = split(parent, mine ? 0 : MPI_UNDEFINED, parent->rank != from, name, FOR_MESSAGES);
    if (c) c->parent = parent;
    return c;
}

void comm_free(Comm *c) {
    struct CommRing *ring = c->ring, **link = &rings;
    comm_disconnect(c);
    if (ring->first)
        fail(EXIT_RUNTIME, "group %s ends with a %s under way", c->name, comm_op_name[ring->first->op]);
    while (*link != ring) link = &(*link)->next;
    *link = ring->next;
    note_free(ring->noted);
    mpi_check(MPI_Comm_free(&ring->mpi));
    free(ring->staging);
    free(ring);
}

int comm_list(Comm **list, int max) {
    int n = 0;
    advance_all(); // what a GPU has done by now is counted
    for (struct CommRing *ring = rings; ring; ring = ring->next, n++)
        if (n < max) list[n] = &ring->comm;
    return n;
}

void comm_finalize(void) {
    while (rings) comm_free(&rings->comm);
    world = NULL;
    fail_abort = _exit;
    fail_spoken = NULL;
    mpi_check(MPI_Finalize());
}

_Noreturn void comm_abort(int code) {
    if (world && world->size > 1) MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}

// Groups of ranks and what they say to each other.
//
// A Comm is an ordered set of ranks. A collective starts now and is awaited later:
//     Work w = comm_reduce_scatter(c, out, in, count, DTYPE_F32);  ...compute...  comm_wait(w);
// It reads what the compute stream has written before the call; after comm_wait the compute stream sees its result.
// Until then, neither buffer may be touched. Works on one Comm complete in the order in which they were started, and
// all ranks of the Comm must start them in the same order.
//
// Buffers are the device's memory. What the host has to say (counters, names, hashes) goes through comm_host_*: the same
// collectives on the host's memory. comm.c holds these, for all devices, and on the CPU they are the same thing
// (comm_cpu.c). On a GPU (comm_cuda.c) each group has a stream of its own, on which NCCL sums and sends; or, with --comm mpi,
// the device's buffers are copied to the host, travel by the ring, and are copied back. There comm_wait makes the compute
// stream wait, not the host, but for what the ring still has to bring. The order of NCCL's sums is NCCL's own.
//
// The ring: reductions and all_gather over MPI_Isend/MPI_Irecv (Patarasuk & Yuan 2009): size − 1 hops (twice
// that for all_reduce and its max), in each of which a rank sends to rank + 1 and receives from rank − 1. The order of the
// sums is fixed: shard s is summed along the ring, starting at rank s + 1 and ending at its owner, rank s. bf16 is added in
// fp32 and rounded once a hop.
// A group of one is still a group: its collectives copy, and send nothing.
//
// Messages between two ranks go through channels: groups of two, in which one rank sends and the other receives. Works on
// several channels are under way side by side. In a shift all ranks of a group send at once, each to its right-hand neighbour,
// rank + 1; in an all-to-all each sends to each, as much as it has for it. All works that two ranks share, on whatever channels
// and groups, both start in the same order: then none of them waits for one that comes later.
#ifndef COMM_H
#define COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F64,
    DTYPE_I32,
    DTYPE_I64,
    DTYPE_U8
} DType; // DTYPE_U8: moved, never added
size_t dtype_size(DType t);

typedef enum {
    OP_ALL_REDUCE,
    OP_ALL_REDUCE_MAX,
    OP_REDUCE_SCATTER, // up to here, numbers are combined
    OP_ALL_GATHER,
    OP_BROADCAST,
    OP_SEND,  // on channels, at both ends
    OP_SHIFT, // one place round
    OP_ALL_TO_ALL,
    OP_BARRIER,
    COMM_OPS
} CommOp;
extern const char *const comm_op_name[COMM_OPS];

typedef struct {
    uint64_t calls;
    uint64_t bytes;    // sent by this rank, counted where they are sent (NCCL's: as the ring would send them)
    double exposed_ms; // time that compute has waited: the host in comm_wait, on a GPU the compute stream
} CommCount;

typedef struct Comm {
    const char *name;    // "world", "dp": how counters, traces and error messages call it
    int rank, size;      // mine, and how many
    int first;           // the world rank of its rank 0: tells groups of the same name apart
    struct Comm *parent; // of a channel: the group it was made from; NULL: no channel
    CommCount count[COMM_OPS];
    struct CommRing *ring;     // private: MPI communicator, queue of works, staging buffers
    struct CommStream *stream; // private, on a GPU: its stream, its works, NCCL's communicator
} Comm;

typedef struct {
    Comm *comm;
    uint64_t sequence; // the number of this work on its Comm; comm_wait returns once all up to it are done
    bool device;       // it is a work on device memory, and these are numbered apart (on a GPU)
} Work;

// How device memory travels. On the CPU there is the ring alone.
typedef enum { TRANSPORT_NCCL, TRANSPORT_MPI } Transport;
#define TRANSPORTS "nccl|mpi"
// Before the first comm_split, which connects the new group by it. A group that is older carries no device memory, on a GPU.
void comm_use(Transport t);

// Starts MPI (or, built with MPI=0, a world of one) and returns the group of all ranks.
Comm *comm_init(int *argc, char ***argv);
// Ends MPI in good order: every rank must come here, with no work under way.
void comm_finalize(void);
// Ends every rank of the job with this exit code, from any one of them.
_Noreturn void comm_abort(int code);
// From any thread: nothing moves any more, and comm_wait does not return. For the moment between a verdict and the end,
// in which MPI would complain of peers that are gone.
void comm_halt(void);
// The ranks of parent that pass the same color, ordered by (key, parent rank). Collective over the parent.
Comm *comm_split(Comm *parent, int color, int key, const char *name);
// A channel: the group of two ranks of the parent, of which `from` sends and `to`, another one, receives. Its rank 0 is the
// sender; NULL on all other ranks. Collective over the parent. Nothing but messages travels on it.
Comm *comm_channel(Comm *parent, int from, int to, const char *name);
// comm_split, for a group in which shifts travel and no other device memory.
Comm *comm_ring(Comm *parent, int color, int key, const char *name);
// comm_split, for a group in which all-to-alls travel and no other device memory.
Comm *comm_mesh(Comm *parent, int color, int key, const char *name);
void comm_free(Comm *c);
// Every Comm alive, for the end-of-run table of counters (a GPU's waits are counted once they are over; here at the latest);
// returns how many, fills up to max.
int comm_list(Comm **list, int max);

// Where rank r's shard of `count` elements begins; shard r ends where r + 1's begins, the last at count. Shards
// differ in length by at most one element, the longer ones first. ZeRO, the ring and checkpoints cut alike.
size_t comm_shard_begin(size_t count, int size, int r);
// What a Comm of this size keeps in device memory for the sums under way, once it has reduced `count` elements: a constant
// at most. Over the reductions of a Comm, the largest counts.
size_t comm_staging_bytes(size_t count, DType t, int size);

// Sum of buf [count] over the group, in place, same bits on every rank: reduce_scatter, then all_gather (NCCL has its own).
Work comm_all_reduce(Comm *c, void *buf, size_t count, DType t);
// Largest of buf [count] over the group, in place, same bits on every rank. NaN where any rank has NaN, by the ring; NCCL
// passes over a NaN, as fmaxf does.
Work comm_all_reduce_max(Comm *c, float *buf, size_t count);
// in [count] summed over the group; this rank's shard of the sum is written to out [its shard's length].
// out may lie inside in, at the shard's own place. in is not changed elsewhere.
Work comm_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t);
// out [count] from every rank's shard, in [its shard's length]; in may lie inside out, at the shard's own place.
Work comm_all_gather(Comm *c, void *out, const void *in, size_t count, DType t);
// buf [count] of rank root goes to all.
Work comm_broadcast(Comm *c, void *buf, size_t count, DType t, int root);
// A message: the sender's buf [count] comes into the receiver's. The k-th that is sent on a channel is the k-th that is
// received. A receive may be started long before; a send is done once its receiver takes it.
Work comm_send(Comm *channel, const void *buf, size_t count, DType t);
Work comm_receive(Comm *channel, void *buf, size_t count, DType t);
// Every rank's in [count] goes to its right-hand neighbour's out [count], and this rank's out is its left one's in. in and
// out are two buffers. A shift is done once the right-hand one takes it, too.
Work comm_shift(Comm *ring, void *out, const void *in, size_t count, DType t);
// Some rows of a buffer, from row `first` on.
typedef struct {
    size_t first, rows;
} CommRows;
// Rows of `width` elements from every rank to every rank, in `parts` parts for each: the rows sent[p·parts + i] of in are part i
// for rank p, and received[p·parts + i] of out is where part i from rank p goes. A part has as many rows where it is received as
// where it is sent; 0 is legal. in and out are two buffers; the tables are read before the call returns. An all-to-all is done
// once all others take their parts, too.
Work comm_all_to_all(Comm *mesh, void *out, const CommRows *received, const void *in, const CommRows *sent,
                     int parts, size_t width, DType t);
// The same on the host's memory.
Work comm_host_all_reduce(Comm *c, void *buf, size_t count, DType t);
Work comm_host_all_reduce_max(Comm *c, float *buf, size_t count);
Work comm_host_reduce_scatter(Comm *c, void *out, const void *in, size_t count, DType t);
Work comm_host_all_gather(Comm *c, void *out, const void *in, size_t count, DType t);
Work comm_host_broadcast(Comm *c, void *buf, size_t count, DType t, int root);
Work comm_host_send(Comm *channel, const void *buf, size_t count, DType t);
Work comm_host_receive(Comm *channel, void *buf, size_t count, DType t);
Work comm_host_shift(Comm *c, void *out, const void *in, size_t count, DType t);
Work comm_host_all_to_all(Comm *c, void *out, const CommRows *received, const void *in, const CommRows *sent,
                          int parts, size_t width, DType t);
Work comm_barrier(Comm *c); // of the hosts

// Returns once w and everything started before it on its Comm is done (on a GPU: once the compute stream is told to wait
// for that); at once for (Work){0}, which was never started. A test loop, with a progress call in it.
void comm_wait(Work w);
// Moves whatever is under way; called between the operations of a block, so that messages travel during compute.
void comm_progress(void);

// Small things at once: each starts its collective and waits for it.
double comm_sum(Comm *c, double x); // the same bits on every rank
double comm_max(Comm *c, double x);
bool comm_all_true(Comm *c, bool mine); // do all ranks say true?
// Seconds to add to this rank's CLOCK_MONOTONIC to have rank 0's, by the shortest of some messages there and back.
// Collective over the world.
double comm_clock_offset(Comm *world);

// Ranks on this host: local rank and local size of the world; on how many hosts it runs, and which of them this is, from 0,
// in the order of their first ranks.
typedef struct {
    int local_rank, local_size, hosts, host;
} Host;
Host comm_host(void);

// What a rank does just now, as the main thread notes it with a few stores and any thread may read it (watchdog.c). Parts
// of a note may be newer than others while something moves; where nothing moves, it is exact.
// Groups that a rank is in at a time: some for each axis, four channels for each of its stages, and NCCL's notes apart.
enum { COMM_MOST = 160 };
typedef struct {
    CommOp op;
    DType type;
    uint64_t count;
} CommStep;
typedef struct {
    char name[24];
    int first; // name and first say which group
    uint64_t started, done;
    CommStep last, turn; // the one that was started last, and the one that is under way: number done + 1
} CommNote;
typedef struct {
    int latest;   // the group, of those below, that a work was started in last
    int waiting;  // in which one comm_wait is, or the GPU for which the host waits; −1: in none
    double moved; // since when nothing has moved (CLOCK_MONOTONIC, seconds)
    int groups;   // how many of the next are in use, with gaps: in a gap the name is empty
    CommNote group[COMM_MOST];
} CommNotes;
void comm_notes(CommNotes *notes);

#endif

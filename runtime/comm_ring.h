// What comm.c (groups, the ring on the host's memory, notes for the watchdog) and the device's half of it (comm_cpu.c or
// comm_cuda.c) tell each other.
#ifndef COMM_RING_H
#define COMM_RING_H

#include "comm.h"

// ---- the ring, for the half -------------------------------------------------------------------------------------------
// Device memory staged through the host: fetched when the turn of its work has come, put back when the ring is done with it.
typedef struct {
    void *(*fetch)(void *self);                // the host's copy, [count], once it is there; NULL before
    void (*put_back)(void *self, size_t sent); // sent: bytes that this rank has sent for it
    void *self;
} Staged;
// Starts a collective in place in such a buffer (each rank's shard at its own place), or one end of a message; or a shift,
// which sends its first [count], and receives behind that in [count] more.
Work ring_start_staged(Comm *c, CommOp op, size_t count, DType t, int root, Staged staged);
// An all-to-all in such a buffer: in, as far as its rows reach (ring_extent), and out behind it.
Work ring_start_staged_rows(Comm *c, const CommRows *received, const CommRows *sent, int parts, size_t width,
                            DType t, Staged staged);
// How many rows a buffer has, at least, in which a table of comm_all_to_all has its parts.
size_t ring_extent(const Comm *c, const CommRows *table, int parts);
// comm_wait for a work of the ring;
void ring_wait(Work w);
// ... and what of it does not count the time.
void ring_finish(Work w);
// Moves all rings. Did anything move?
bool ring_advance(void);
// comm_staging_bytes, wherever the ring sums.
size_t ring_staging_bytes(size_t count, DType t, int size);
// This rank's shard of a buffer, in bytes.
typedef struct {
    size_t offset, bytes;
} Piece;
Piece own_piece(const Comm *c, size_t count, DType t);
extern const char *const comm_wait_name[COMM_OPS]; // "wait for all_reduce", ...

// ---- the half, for comm.c ---------------------------------------------------------------------------------------------
// What travels in a group of comm_split, comm_channel, comm_ring, comm_mesh.
typedef enum { FOR_COLLECTIVES, FOR_MESSAGES, FOR_SHIFTS, FOR_ALL_TO_ALLS } Purpose;
void comm_connect(Comm *c, Purpose purpose); // a new group;
void comm_disconnect(Comm *c);               // before it is freed
bool comm_advance(void); // moves all that is under way, ring_advance's included. Did anything move?

// ---- notes, the main thread's: a few stores each ------------------------------------------------------------------------
typedef struct Noted Noted;
Noted *note_group(const char *name, int first); // name stays where it is
void note_free(Noted *n);
void note_start(Noted *n, uint64_t started, CommOp op, DType t, size_t count);
void note_turn(Noted *n, CommOp op, DType t, size_t count);
void note_done(Noted *n, uint64_t done);
void note_moved(void);
// The host waits in this group, until it says otherwise; NULL: in none.
void note_wait(const Noted *n);
// The host waits just now, as it does again and again while it waits for its GPU; it holds for a second.
void note_poll(const Noted *n);

#endif

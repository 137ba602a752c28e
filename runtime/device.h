// The device that computes, and its memory: every allocation belongs to a named category, and the ledger knows how much of
// each is held, now and at peak; and how much of what is held is live: holds values that something will still read.
//
// All that a step needs is reserved before the first step, so that a run that will not fit says so at once. The same
// code that reserves also predicts: in a dry run, device_alloc enters the ledger and takes no memory.
//
// Kernels, copies and fills are queued on one stream, the compute stream, and run in that order. On the CPU (device_cpu.c)
// each has been done when its call returns; on a GPU (device_cuda.c) the host runs ahead, and waits where it reads a
// result: in device_copy_out and device_synchronize.
#ifndef DEVICE_H
#define DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    MEM_WEIGHTS,
    MEM_GRADIENTS,
    MEM_MASTER,        // fp32 copies of bf16 weights
    MEM_OPTIMIZER,     // AdamW's two moments
    MEM_WHOLE_BUCKETS, // ZeRO-2's and -3's: gradients and weights that are whole while in use
    MEM_TIED, // the tied embedding's whole gradient (ZeRO-2 and -3) and weights (ZeRO-3): used at both ends
    MEM_ACTIVATIONS,
    MEM_DOUT, // output gradients that wait for W
    MEM_LOGITS,
    MEM_COMMUNICATION,
    MEM_WORKSPACE,
    MEM_CONTEXT,     // a GPU's: what it holds for a process, and other processes' where they share it
    MEM_LIBRARIES,   // cuBLASLt's and NCCL's, and the kernels' own code
    MEM_UNACCOUNTED, // what it holds beyond all that: allocations rounded up, say
    MEM_CATEGORIES
} MemCategory;
extern const char *const mem_name[MEM_CATEGORIES]; // "weights", "gradients", ...

typedef struct {
    size_t held[MEM_CATEGORIES]; // now
    size_t peak[MEM_CATEGORIES]; // the most ever
    size_t total, total_peak;    // all categories together
    size_t live[MEM_CATEGORIES], live_peak[MEM_CATEGORIES], live_total, live_total_peak;
} Ledger;
extern Ledger ledger;

// ---- the device -------------------------------------------------------------------------------------------------------
// Takes this rank's device, before MPI starts: of the GPUs that it sees number local_rank, round and round. fail_all (exit
// 2) where there is none.
void device_open(int local_rank);
// The same number on all ranks that use this GPU, and on no others. Of a CPU: 0.
uint64_t device_id(void);
// So many ranks use this device, which is what "shared evenly" below means.
void device_share(int ranks);
// GPUs that this rank sees; 0: the CPU computes.
int device_count(void);
const char *device_name(void);
// Can it multiply 8-bit floating-point numbers (--fp8)? The CPU can, by emulating; a GPU from sm_89 on.
bool device_has_fp8(void);
// Floating-point operations a second that MFU is measured against: of a CPU, those of a 1024³ fp32 product on this many
// cores; of a GPU, its published dense peak for products of fp32, or of bf16. 0: a GPU that is not in the table.
double device_peak_flops(int threads, bool bf16);

// ---- its memory -------------------------------------------------------------------------------------------------------
// Zero-filled, aligned to 64 bytes. Where the system refuses, device_out_of_memory is called, and must not return.
void *device_alloc(MemCategory category, size_t bytes);
void device_free(MemCategory category, void *memory, size_t bytes);
extern void (*device_out_of_memory)(MemCategory asked, size_t bytes);
// On: device_alloc only counts, and returns addresses that must not be followed. Turning it on or off clears the ledger, but
// for context, libraries and unaccounted.
void device_dry_run(bool on);

// Enters memory that a library or the ring holds: +bytes taken, −bytes given back.
void ledger_add(MemCategory category, ptrdiff_t bytes);
// What of the held memory comes alive (+bytes) or is read no more (−bytes): what --trace draws over time.
void ledger_live(MemCategory category, ptrdiff_t bytes);
// Enters what a GPU holds beyond the ledger, shared evenly among the ranks that use it, as this category's: what has come
// since the last such call. All ranks of the host have come that far, and none goes on. A CPU enters nothing.
void device_enter_rest(MemCategory category);
// What this rank can still be given: free memory of the GPU, or of the machine (or its container), shared evenly.
size_t device_free_memory(void);
// The most memory that this process has held, libraries and all; 0 where the system does not say. Of a GPU: what is in
// use now, shared evenly among the ranks that use it.
size_t device_process_peak(void);

// Zero-filled memory of the host, outside the ledger: tables and staging. fail (exit 3) where there is none.
void *host_alloc(size_t count, size_t size);

// ---- what is queued on the compute stream -------------------------------------------------------------------------------
void device_zero(void *memory, size_t bytes);
void device_copy(void *out, const void *inp, size_t bytes);
// host may change as soon as this returns.
void device_copy_in(void *device, const void *host, size_t bytes);
// ... and these two wait: for the copy, and for all that is queued. While a GPU is waited for, device_while_waiting is
// called again and again (comm_progress, once there are groups).
void device_copy_out(void *host, const void *device, size_t bytes);
void device_synchronize(void);
extern void (*device_while_waiting)(void);

// A moment in the order of the compute stream. On the CPU it is now; on a GPU it is when the stream gets there.
typedef struct {
    double seconds;           // CLOCK_MONOTONIC, of the call
    struct CUevent_st *event; // a GPU's: when it was reached (NULL: at the call)
} Moment;
Moment device_moment(void);
bool device_moment_reached(Moment m);
// When it was, on CLOCK_MONOTONIC; waits until it has come. Once for each moment, for its event is used again.
double device_moment_seconds(Moment m);

#endif

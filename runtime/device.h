// Memory: every allocation belongs to a named category, and the ledger knows how much of each is held, now and at peak;
// and how much of what is held is live: holds values that something will still read.
//
// All that a step needs is reserved before the first step, so that a run that will not fit says so at once. The same
// code that reserves also predicts: in a dry run, device_alloc enters the ledger and takes no memory.
#ifndef DEVICE_H
#define DEVICE_H

#include <stdbool.h>
#include <stddef.h>

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

// Zero-filled, aligned to 64 bytes. fail (exit 3) where the system refuses.
void *device_alloc(MemCategory category, size_t bytes);
void device_free(MemCategory category, void *memory, size_t bytes);
// On: device_alloc only counts, and returns addresses that must not be followed. Turning it on or off clears the ledger.
void device_dry_run(bool on);

// Enters memory that a library or the ring holds: +bytes taken, −bytes given back.
void ledger_add(MemCategory category, ptrdiff_t bytes);
// What of the held memory comes alive (+bytes) or is read no more (−bytes): what --trace draws over time.
void ledger_live(MemCategory category, ptrdiff_t bytes);
// Zero-filled memory of the host, outside the ledger: tables and staging. fail (exit 3) where there is none.
void *host_alloc(size_t count, size_t size);

void device_zero(void *memory, size_t bytes);
void device_copy_in(void *device, const void *host, size_t bytes);
void device_copy_out(void *host, const void *device, size_t bytes);
void device_copy(void *out, const void *inp, size_t bytes);
void device_synchronize(void);
// What this rank can still be given: free memory of the machine (or its container), shared among its local ranks.
size_t device_free_memory(int local_ranks);
// The most memory that this process has held, libraries and all; 0 where the system does not say.
size_t device_process_peak(void);
const char *device_name(void);
// Floating-point operations a second of a 1024³ fp32 product on this many cores: what MFU is measured against.
double device_matmul_rate(int threads);

#endif

// What all devices have in common: the ledger, and dry runs, in which it is all there is.
#include "device.h"
#include "device_half.h"
#include "fail.h"
#include "trace.h"
#include <stdint.h>
#include <stdlib.h>

const char *const mem_name[MEM_CATEGORIES] = {
    [MEM_WEIGHTS] = "weights",
    [MEM_GRADIENTS] = "gradients",
    [MEM_MASTER] = "master",
    [MEM_OPTIMIZER] = "optimizer",
    [MEM_WHOLE_BUCKETS] = "whole_buckets",
    [MEM_TIED] = "tied_embedding",
    [MEM_ACTIVATIONS] = "activations",
    [MEM_DOUT] = "dout",
    [MEM_LOGITS] = "logits",
    [MEM_COMMUNICATION] = "communication",
    [MEM_WORKSPACE] = "workspace",
    [MEM_CONTEXT] = "context",
    [MEM_LIBRARIES] = "libraries",
    [MEM_UNACCOUNTED] = "unaccounted",
};
Ledger ledger;
static bool dry;

void ledger_add(MemCategory category, ptrdiff_t bytes) {
    size_t *held = &ledger.held[category], *peak = &ledger.peak[category];
    *held += (size_t)bytes;
    ledger.total += (size_t)bytes;
    if (*held > *peak) *peak = *held;
    if (ledger.total > ledger.total_peak) ledger.total_peak = ledger.total;
}

void ledger_live(MemCategory category, ptrdiff_t bytes) {
    if (bytes == 0) return;
    size_t *live = &ledger.live[category], *peak = &ledger.live_peak[category];
    *live += (size_t)bytes;
    ledger.live_total += (size_t)bytes;
    if (*live > *peak) *peak = *live;
    if (ledger.live_total > ledger.live_total_peak) ledger.live_total_peak = ledger.live_total;
    trace_memory();
}

static void out_of_memory(MemCategory asked, size_t bytes) {
    fail(EXIT_RUNTIME, "no memory for %.6f GB of %s, with %.6f GB held", (double)bytes * 1e-9, mem_name[asked],
         (double)ledger.total * 1e-9);
}
void (*device_out_of_memory)(MemCategory asked, size_t bytes) = out_of_memory;

static void do_nothing(void) {
}
void (*device_while_waiting)(void) = do_nothing;

void *device_alloc(MemCategory category, size_t bytes) {
    void *memory = dry ? (void *)(uintptr_t)(64 + ledger.total) // tells buffers apart; never followed
                       : device_take(bytes);
    if (!memory) device_out_of_memory(category, bytes);
    ledger_add(category, (ptrdiff_t)bytes);
    return memory;
}

void device_free(MemCategory category, void *memory, size_t bytes) {
    if (!memory) return;
    ledger_add(category, -(ptrdiff_t)bytes);
    if (!dry) device_give_back(memory);
}

void device_dry_run(bool on) {
    Ledger before = ledger;
    dry = on;
    ledger = (Ledger){0};
    for (int c = MEM_CONTEXT; c < MEM_CATEGORIES; c++) ledger_add((MemCategory)c, (ptrdiff_t)before.held[c]);
}

void *host_alloc(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail(EXIT_RUNTIME, "no memory for a table of %zu · %zu bytes", count, size);
    return memory;
}

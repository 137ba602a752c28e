// What happened when, on every rank: --trace FILE writes one Chrome trace, which ui.perfetto.dev opens.
//
// A rank is a process there (pid = rank), "compute" and each group of ranks are its threads. Everything is kept in memory
// until trace_close: recording costs a few nanoseconds, and nothing where no trace was asked for. Where a GPU computes, what is
// drawn is when it came there, not when the host asked for it (device.h's Moment): an event of a microsecond at each end.
#ifndef TRACE_H
#define TRACE_H

#include <stddef.h>
#include "comm.h"
#include "device.h"

// Begins to record, with every rank's clock measured against rank 0's. Without a path nothing is ever recorded. fail (exit
// 2) names a path that rank 0 cannot write. Collective over the world.
void trace_open(Comm *world, const char *path);
// Now, on the compute stream: where a span begins. (Moment){0} where nothing is recorded.
Moment trace_begin(void);
// What began then ends now, on the compute stream. track and name stay where they are until trace_close (string constants,
// names of groups). number tells alike spans apart (a micro-batch, a sequence number), −1: none; bytes sent, 0: none.
void trace_end(const char *track, const char *name, long number, Moment began, size_t bytes);
// The same with both ends given: on another stream, or on the host's clock, as (Moment){.seconds = seconds_now()}. Moments
// with an event are the trace's from here on; give it none where nothing is recorded.
void trace_span(const char *track, const char *name, long number, Moment began, Moment ended, size_t bytes);
// The ledger's live bytes by category, as they are from now on, on the compute stream.
void trace_memory(void);
// Collects every rank's events and writes the file. fail (exit 3) on a full disk. Collective over the world.
void trace_close(Comm *world);

#endif

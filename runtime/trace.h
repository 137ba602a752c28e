// What happened when, on every rank: --trace FILE writes one Chrome trace, which ui.perfetto.dev opens.
//
// A rank is a process there (pid = rank), "compute" and each group of ranks are its threads. Everything is kept in memory
// until trace_close: recording costs a few nanoseconds, and nothing where no trace was asked for.
#ifndef TRACE_H
#define TRACE_H

#include <stddef.h>
#include "comm.h"

// Begins to record, with every rank's clock measured against rank 0's. Without a path nothing is ever recorded. fail (exit
// 2) names a path that rank 0 cannot write. Collective over the world.
void trace_open(Comm *world, const char *path);
// Now, in seconds: where a span begins. 0 where nothing is recorded.
double trace_begin(void);
// What began then ends now. track and name stay where they are until trace_close (string constants, names of groups). number
// tells alike spans apart (a micro-batch, a sequence number), −1: none; bytes sent, 0: none.
void trace_end(const char *track, const char *name, long number, double began, size_t bytes);
// The ledger's live bytes by category, as they are now.
void trace_memory(void);
// Collects every rank's events and writes the file. fail (exit 3) on a full disk. Collective over the world.
void trace_close(Comm *world);

#endif

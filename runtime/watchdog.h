// Who is missing when nothing moves: a thread a rank that makes no MPI calls, and a side socket to rank 0.
//
// MPI cannot say who is missing. So every rank notes what it does (comm_notes: a few stores), and its thread reports
// that to rank 0 over TCP, twice a second. When a rank has waited without any movement for longer than the timeout, rank
// 0's thread lays all reports side by side, names the ranks that were not heard of, have not come, came with something
// else, or wait for each other, and ends the job with exit code 3. Slow is not stuck: any movement, also of those for whom
// it waits in turn, starts the time anew.
#ifndef WATCHDOG_H
#define WATCHDOG_H

#include "comm.h"

// Starts the threads; nothing to do in a world of one. timeout: seconds in which nothing moves, in comm_wait or on a
// GPU that waits for others. Collective.
void watchdog_start(Comm *world, double timeout);
// Ends them, before comm_finalize. Collective.
void watchdog_stop(void);

#endif

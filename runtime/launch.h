// ./train --ranks N ...: the program starts itself under mpirun, with what a small machine needs.
#ifndef LAUNCH_H
#define LAUNCH_H

#include <signal.h>

// Runs `mpirun -n ranks <this program> <argv without --ranks>` and ends with its exit code: oversubscribed, unbound,
// yielding when idle, root allowed, OMP_NUM_THREADS = max(1, cores ÷ ranks) unless set. SIGTERM and SIGUSR1 sent to
// this process reach every rank as SIGUSR1, with all the time they need to save.
// Returns only where the process already runs in a world of that many ranks (then --ranks is only checked).
// fail_all (exit 2) where mpirun is missing, the build has no MPI, or a launcher started another number of ranks.
// A signal that came before, and was noted in *asked_before (not 0), is passed on too.
void launch_ranks(int ranks, int argc, char **argv, const volatile sig_atomic_t *asked_before);

// Called first thing under any launcher: where MPI's launcher bound this rank to too few cores, sets its affinity to
// its own cores ÷ local ranks, and OMP's thread count to match (unless OMP_NUM_THREADS is set). Returns the threads.
int launch_threads(void);

#endif

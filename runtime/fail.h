// How the program ends when something is wrong: one line, from one rank, and an exit code that says whose turn it is.
#ifndef FAIL_H
#define FAIL_H

#include <stdatomic.h>

enum {
    EXIT_USAGE = 2,  // a flag or a file: the user can mend it
    EXIT_RUNTIME = 3 // the run itself: a disk, a peer, a number that is not one
};

// Every rank finds this error alike (a flag, a size): rank 0 prints "train: ...", all end with the code.
// The printf format has no newline. Works before MPI_Init too.
_Noreturn void fail_all(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// This rank alone may have found it (a file it could not open): it prints, and ends the whole job.
_Noreturn void fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// From comm_init to comm_finalize: how both of them end the job (before and after it is _exit),
extern void (*fail_abort)(int code);
// and a word that the ranks of this host share, NULL before and after: the first to set it is the one that speaks.
extern atomic_int *fail_spoken;

// This process's rank as the launcher tells it, known before MPI_Init: OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK or
// SLURM_PROCID; 0 where none is set. launch_size likewise, 1 where none is set; launch_local_rank and
// launch_local_size count the ranks of this host alone.
int launch_rank(void);
int launch_size(void);
int launch_local_rank(void);
int launch_local_size(void);

#endif

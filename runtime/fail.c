// How the program ends when something is wrong. Before MPI_Init a process can only end itself: the launcher sees the
// exit code and ends the others. After it, comm_init has put MPI_Abort into fail_abort.
#include "fail.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// Not exit: handlers registered with atexit (MPI's, a sanitizer's) must not change the code, or wait for a peer.
void (*fail_abort)(int code) = _exit;

atomic_int *fail_spoken;

// Prints the line at once, so that those of several ranks do not mix, and ends the job. `rank` is -1 where it does not
// matter.
static _Noreturn void end(int rank, int code, const char *format, va_list arguments) {
    char who[32] = "", message[1920], line[2048];
    if (fail_spoken && atomic_exchange(fail_spoken, 1)) {
        sleep(5); // another rank has spoken, and the end comes from there; only the launcher is slow
    } else {
        if (rank >= 0) snprintf(who, sizeof who, "rank %d: ", rank);
        vsnprintf(message, sizeof message, format, arguments);
        snprintf(line, sizeof line, "train: %s%s\n", who, message);
        fflush(stdout);
        fputs(line, stderr);
        fflush(stderr);
    }
    fail_abort(code);
    _exit(code);
}

_Noreturn void fail_all(int code, const char *format, ...) {
    if (launch_rank() != 0) {
        // Ending first would make the launcher end rank 0 before it has spoken. So wait to be ended; nobody comes where
        // rank 0 did not find the error after all (another host's files), and then it is said here.
        signal(SIGTERM, SIG_DFL);
        sleep(5);
    }
    va_list arguments;
    va_start(arguments, format);
    end(launch_rank() ? launch_rank() : -1, code, format, arguments);
}

_Noreturn void fail(int code, const char *format, ...) {
    // Where several hosts find the same, the lowest rank speaks: the others are ended while they wait for their turn.
    if (launch_rank() > 0) {
        signal(SIGTERM, SIG_DFL);
        usleep(300000 * (launch_rank() < 10 ? (unsigned)launch_rank() : 10));
    }
    va_list arguments;
    va_start(arguments, format);
    end(launch_size() > 1 ? launch_rank() : -1, code, format, arguments);
}

// ---- what the launcher says in the environment: Open MPI, PMIx, MPICH and Intel MPI, Slurm -------------------------

static int first_set(const char *const names[], int otherwise) {
    for (; *names; names++) {
        const char *value = getenv(*names);
        if (value && *value) return atoi(value);
    }
    return otherwise;
}

int launch_rank(void) {
    return first_set((const char *[]){"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", NULL},
                     0);
}

int launch_size(void) {
    // Not SLURM_NTASKS: a shell inside salloc or sbatch has it too, and is one process. Only srun sets the step's.
    return first_set((const char *[]){"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", NULL}, 1);
}

int launch_local_rank(void) {
    return first_set((const char *[]){"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID",
                                      "SLURM_LOCALID", NULL},
                     0);
}

// Slurm writes the ranks of each host as "4(x2),3": two hosts of 4, then one of 3.
static int slurm_local_size(void) {
    const char *list = getenv("SLURM_STEP_TASKS_PER_NODE"), *node = getenv("SLURM_NODEID");
    int before = node ? atoi(node) : 0, tasks = 1;
    while (list && *list) {
        char *end;
        int hosts = 1;
        tasks = (int)strtol(list, &end, 10);
        if (sscanf(end, "(x%d)", &hosts) == 1) end += 1; // past the "(", to find the next comma from here
        if (before < hosts) return tasks;
        before -= hosts;
        while (*end && *end != ',') end++;
        list = *end ? end + 1 : end;
    }
    return tasks;
}

int launch_local_size(void) {
    return first_set((const char *[]){"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", NULL},
                     slurm_local_size());
}

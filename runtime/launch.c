// ./train --ranks 8 is `mpirun -n 8 ./train` with the settings that a small machine needs, and one process in front:
//
//     ./train --ranks 8 ---- mpirun ---- rank 0 ... rank 7
//
// The one in front passes signals on. mpirun answers SIGTERM by killing the ranks, after a fixed pause at best; it
// forwards SIGUSR1 to them and waits. To a rank both mean "save and end", so SIGTERM is passed on as SIGUSR1. mpirun is
// put in a process group of its own, because Ctrl-C, timeout(1) and schedulers send signals to whole groups.
// (Why not a longer pause, odls_base_sigkill_timeout? It is sat out after every failed rank, too, even when all have
// ended long ago. And with none, mpirun 4.1 sometimes hangs after ranks that end inside MPI_Init.)
#include "launch.h"
#include "fail.h"

#include <errno.h>
#include <omp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#endif

// Settings go by the environment: other MPIs ignore what they do not know, and what the user has set stays.
static const struct {
    const char *name, *value;
} settings[] = {
    {"OMPI_ALLOW_RUN_AS_ROOT", "1"}, // containers
    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
    {"OMPI_MCA_rmaps_base_oversubscribe", "1"}, // more ranks than cores
    {"OMPI_MCA_hwloc_base_binding_policy", "none"},
    {"OMPI_MCA_mpi_yield_when_idle", "1"},
    {"OMPI_MCA_orte_execute_quiet", "1"},                        // an error is one line, and the program's own
    {"PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"}, // Open MPI 5's names
    {"PRTE_MCA_hwloc_default_binding_policy", "none"},
};

static pid_t mpirun;
static volatile sig_atomic_t asked; // did a signal ask the job to end?

static void pass_on(int signal) {
    asked = 1;
    kill(mpirun, signal == SIGTERM ? SIGUSR1 : signal);
    if (signal == SIGTERM || signal == SIGUSR1) alarm(1);
}

// mpirun forwards nothing before its ranks run: say it again until it ends. To a rank, once or often is the same.
static void again(int signal) {
    (void)signal;
    kill(mpirun, SIGUSR1);
    alarm(1);
}

// True also for mpirun -n 1. (srun -n 1 is no launcher to us: an interactive shell inside salloc looks like that.)
static bool launched(void) {
    return launch_size() > 1 || getenv("OMPI_COMM_WORLD_SIZE");
}

// In the child: becomes mpirun.
static _Noreturn void become_mpirun(int ranks, int argc, char **argv) {
    int cores = omp_get_num_procs(), threads = cores > ranks ? cores / ranks : 1, n = 0;
    char count[16], each[16], **command = calloc((size_t)argc + 4, sizeof *command);
    if (!command) fail_all(EXIT_RUNTIME, "no memory to start mpirun");
    snprintf(count, sizeof count, "%d", ranks);
    snprintf(each, sizeof each, "%d", threads);
    command[n++] = "mpirun";
    command[n++] = "-n";
    command[n++] = count;
    command[n++] = argv[0];
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--ranks") == 0)
            i++; // and its value
        else
            command[n++] = argv[i];

    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        setenv(settings[i].name, settings[i].value, 0);
    setenv("TRAIN_ON_TERMINAL", isatty(STDOUT_FILENO) ? "1" : "0", 1); // see log.c
    setenv("OMP_NUM_THREADS", each, 0);
    if (ranks * atoi(getenv("OMP_NUM_THREADS")) > cores) setenv("OMP_WAIT_POLICY", "passive", 0);

    setpgid(0, 0);
    if (!freopen("/dev/null", "r", stdin)) fail_all(EXIT_RUNTIME, "cannot open /dev/null: %s", strerror(errno));
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGTERM); // no ranks without the process in front, even where that is killed
#endif
    execvp(command[0], command);
    fail_all(EXIT_USAGE, "--ranks %d needs mpirun, and starting it failed: %s; `make deps` installs it", ranks,
             strerror(errno));
}

void launch_ranks(int ranks, int argc, char **argv, const volatile sig_atomic_t *asked_before) {
    if (ranks < 1) fail_all(EXIT_USAGE, "--ranks %d: a run has at least 1 rank", ranks);
    if (ranks == launch_size()) return;
    if (launched())
        fail_all(EXIT_USAGE,
                 "--ranks %d, but the launcher has started %d; nearest: --ranks %d, or leave it out", ranks,
                 launch_size(), launch_size());
#ifndef USE_MPI
    fail_all(EXIT_USAGE, "--ranks %d needs MPI, and this build has none (make MPI=1); nearest: --ranks 1",
             ranks);
#endif
    fflush(NULL);
    mpirun = fork();
    if (mpirun < 0) fail_all(EXIT_RUNTIME, "cannot start mpirun: %s", strerror(errno));
    if (mpirun == 0) become_mpirun(ranks, argc, argv);

    const int passed[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
    for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
        if (signal(passed[i], pass_on) == SIG_IGN) signal(passed[i], SIG_IGN); // nohup
    signal(SIGALRM, again);
    if (*asked_before) pass_on(SIGTERM);
    int status;
    while (waitpid(mpirun, &status, 0) < 0 && errno == EINTR) {
    }
    // mpirun says like a shell which signal ended a rank.
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code > 128 && !asked)
        fail_all(EXIT_RUNTIME, "a rank was ended by signal %d (%s)%s", code - 128, strsignal(code - 128),
                 code - 128 == SIGKILL ? ": was there not enough memory?" : "");
    exit(code);
}

// ---- threads --------------------------------------------------------------------------------------------------------

#ifdef __linux__
// Lets every thread of this process run on these cores. A BLAS has started some before main, bound like the process.
static void run_on(const cpu_set_t *cores) {
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return;
    for (struct dirent *task; (task = readdir(tasks));)
        if (*task->d_name != '.') sched_setaffinity(atoi(task->d_name), sizeof *cores, cores);
    closedir(tasks);
}

// The cores of this host that the process may ask for, whatever it is bound to now: asking for all yields these.
static cpu_set_t cores_of_host(void) {
    cpu_set_t bound, all;
    sched_getaffinity(0, sizeof bound, &bound);
    memset(&all, 0xff, sizeof all);
    sched_setaffinity(0, sizeof all, &all);
    sched_getaffinity(0, sizeof all, &all);
    sched_setaffinity(0, sizeof bound, &bound);
    return all;
}

// Gives this rank `threads` cores of the host where it is bound to fewer; returns how many the host has.
static void unbind(const cpu_set_t *host, int threads) {
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    if (CPU_COUNT(&mine) >= threads) return;
    int cores = CPU_COUNT(host), first = launch_local_rank() * threads % cores, seen = 0;
    CPU_ZERO(&mine);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, host) && (seen++ - first + cores) % cores < threads) CPU_SET(cpu, &mine);
    run_on(&mine);
}
#endif

int launch_threads(void) {
    if (!launched()) return omp_get_max_threads();
    int cores = omp_get_num_procs();
#ifdef __linux__
    cpu_set_t host = cores_of_host();
    cores = CPU_COUNT(&host);
#endif
    int threads = cores / launch_local_size() > 1 ? cores / launch_local_size() : 1;
    if (getenv("OMP_NUM_THREADS"))
        threads = omp_get_max_threads();
    else
        omp_set_num_threads(threads);
#ifdef __linux__
    unbind(&host, threads);
#endif
    return threads;
}

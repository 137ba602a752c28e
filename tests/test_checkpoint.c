// Checkpoints: pieces cut in odd ways over any number of ranks, hostile headers, and a save that fails or dies
// at every single system call that it makes.
//
// Alone, it runs everything; under mpirun, what several ranks do together. With arguments it is a tool for
// tests/test_checkpoint.py:
//   test_checkpoint save DIR STEP    saves a checkpoint whose values follow from STEP; exit code 1 if it fails
//                                    (CRASH=RANK:N in the environment: that rank dies at its N-th system call)
//   test_checkpoint load DIR         finds the newest, checks every value, prints its step
//   test_checkpoint dump FILE NAME   the tensor's values, as fp32, to stdout
#include "runtime/checkpoint.h"
#include "runtime/fail.h" // before cmocka, which has a macro of the name fail

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[64]; // where the running test keeps its files
static Comm *world;  // NULL in the tests that fork: their children call comm_init

// ---- system calls that we can make fail, fall short or kill: the linker takes ours before libc's
// -------------------

static struct {
    bool on;
    int calls, fail_at, error; // the fail_at-th call (from 0) fails with this error; −1: none
    int kill_at;               // at that call the process dies, as if the power had gone; −1: never
    bool clumsy;               // writes and reads stop short, and are interrupted
    bool slow;                 // all but writes take a while
    int writes;
    size_t written;
    char log[4096]; // "call name\n" of each; repeated writes once
} sys;

static void arm(int fail_at, int error, int kill_at) {
    memset(&sys, 0, sizeof sys);
    sys.on = true;
    sys.fail_at = fail_at;
    sys.error = error;
    sys.kill_at = kill_at;
}

// Counts a call that changes the disk; true where it must fail.
static bool tripped(const char *what, const char *path) {
    if (!sys.on) return false;
    if (sys.slow && strcmp(what, "write") != 0) usleep(20000);
    char line[128];
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    int n = snprintf(line, sizeof line, "%s %s\n", what, strstr(path, dir) ? name : "elsewhere");
    size_t end = strlen(sys.log);
    bool again = end >= (size_t)n && strcmp(sys.log + end - n, line) == 0;
    if (!again && end + (size_t)n < sizeof sys.log) strcpy(sys.log + end, line);
    int call = sys.calls++;
    if (call == sys.kill_at) kill(getpid(), SIGKILL);
    errno = sys.error;
    return call == sys.fail_at;
}

static bool tripped_fd(const char *what, int fd) {
    char link[32], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    return tripped(what, path);
}

static bool interrupted(void) {
    static unsigned n;
    if (!sys.on || !sys.clumsy || n++ % 3) return false;
    errno = EINTR;
    return true;
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
    if (tripped_fd("write", fd) || interrupted()) return -1;
    if (sys.on && sys.clumsy && n > 100) n = n / 2;
    sys.writes++;
    sys.written += n;
    return syscall(SYS_pwrite64, fd, data, n, offset);
}

ssize_t pread(int fd, void *data, size_t n, off_t offset) {
    if (interrupted()) return -1;
    if (sys.on && sys.clumsy && n > 100) n = n / 2;
    return syscall(SYS_pread64, fd, data, n, offset);
}

int fsync(int fd) {
    return tripped_fd("sync", fd) || interrupted() ? -1 : (int)syscall(SYS_fsync, fd);
}

int ftruncate(int fd, off_t n) {
    return tripped_fd("length", fd) ? -1 : (int)syscall(SYS_ftruncate, fd, n);
}

int mkdir(const char *path, mode_t mode) {
    return tripped("mkdir", path) ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int rename(const char *from, const char *to) {
    return tripped("rename", from) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlink(const char *path) {
    return tripped("unlink", path) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int rmdir(const char *path) {
    return tripped("rmdir", path) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

// ---- a model whose every value follows from its step
// ---------------------------------------------------------------

static float value(long step, int tensor, size_t i) {
    uint32_t x = (uint32_t)step * 0x9e3779b9u + (uint32_t)tensor * 0x85ebca6bu + (uint32_t)i * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    return (float)(int32_t)x * 0x1p-31f;
}

static const TensorInfo tensors[] = {
    {"wte.weight", 2, {257, 48}},
    {"blocks.0.norm1.weight", 1, {48}},
    {"blocks.0.attention.out.weight", 2, {48, 96}}, // by columns
    {"odd \"name\" \\ ü", 1, {1009}},
    {"one", 1, {1}},
    {"wide", 2, {3, 400000}}, // larger than a block
};
enum { TENSORS = sizeof tensors / sizeof *tensors };
static int used = TENSORS; // tests that save a hundred times do without the wide one

static size_t elements(int t) {
    return tensors[t].shape[0] * (tensors[t].ndim == 2 ? tensors[t].shape[1] : 1);
}

static Piece cut(long step, int tensor, size_t offset, size_t run, size_t stride, size_t runs) {
    Piece p = {tensor, offset, run, stride, runs, malloc(run * runs * sizeof(float) + 1)};
    for (size_t r = 0; r < runs; r++)
        for (size_t i = 0; i < run; i++) p.data[r * run + i] = value(step, tensor, offset + r * stride + i);
    return p;
}

// This rank's pieces: linear shards, column slices, every size-th element, and pieces in no particular order.
static int cut_all(long step, int rank, int size, Piece *pieces) {
    int n = 0;
    for (int t = used - 1; t >= 0; t--) {
        size_t count = elements(t), begin = comm_shard_begin(count, size, rank);
        size_t end = rank + 1 < size ? comm_shard_begin(count, size, rank + 1) : count;
        if (t == 2) {
            size_t C = tensors[t].shape[1], left = comm_shard_begin(C, size, rank), half;
            size_t right = rank + 1 < size ? comm_shard_begin(C, size, rank + 1) : C;
            half = (right - left) / 2; // two slices that touch in every row
            pieces[n++] = cut(step, t, left + half, right - left - half, C, tensors[t].shape[0]);
            pieces[n++] = cut(step, t, left, half, C, tensors[t].shape[0]);
        } else if (t == 3) {
            pieces[n++] =
                cut(step, t, (size_t)rank, 1, (size_t)size, (count + (size_t)(size - 1 - rank)) / (size_t)size);
        } else if (t == 0) {
            size_t middle = begin + (end - begin) / 3;
            pieces[n++] = cut(step, t, middle, end - middle, 0, 1);
            pieces[n++] = cut(step, t, begin, middle - begin, 0, 1);
        } else {
            pieces[n++] = cut(step, t, begin, end - begin, 0, 1);
        }
    }
    return n;
}

// step names the directory, values the numbers in it (as metadata, too).
static bool save_values(Comm *c, const char *to, long step, long values, int keep) {
    Piece pieces[2 * TENSORS];
    int n = cut_all(values, c->rank, c->size, pieces);
    char text[32];
    snprintf(text, sizeof text, "%ld", values);
    const Meta meta[] = {{"values", text}, {"quote\"", "line\nü\\"}, {"empty", ""}};
    const TensorFile files[] = {{"weights.safetensors", tensors, used, pieces, n, meta, 3},
                                {"optimizer.safetensors", tensors, used, pieces, n, meta, 1}};
    bool ok = checkpoint_save(c, to, step, files, 2, keep);
    for (int i = 0; i < n; i++) free(pieces[i].data);
    return ok;
}

// Is every value of every file there, of this save (−1: of any one)? Returns which.
static long check_values(const char *checkpoint, long values) {
    static const char *const names[] = {"weights.safetensors", "optimizer.safetensors"};
    for (int f = 0; f < 2; f++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", checkpoint, names[f]);
        SafeTensors *s = safetensors_open(path);
        assert_int_equal(safetensors_count(s), used);
        if (values < 0) values = atol(safetensors_meta(s, "values"));
        assert_int_equal(atol(safetensors_meta(s, "values")), values);
        for (int t = 0; t < used; t++) {
            int i = safetensors_find(s, tensors[t].name);
            assert_true(i >= 0);
            const size_t *shape;
            assert_int_equal(safetensors_shape(s, i, &shape), tensors[t].ndim);
            for (int d = 0; d < tensors[t].ndim; d++) assert_int_equal(shape[d], tensors[t].shape[d]);
            size_t n = elements(t), wrong = 0;
            float *data = malloc(n * sizeof(float));
            safetensors_read(s, (Piece){i, 0, n, 0, 1, data});
            for (size_t k = 0; k < n; k++) wrong += !(data[k] == value(values, t, k));
            assert_int_equal(wrong, 0);
            free(data);
        }
        safetensors_close(s);
    }
    return values;
}

// The newest checkpoint, all values checked.
static long load(const char *from, long *values) {
    char found[512];
    long step = checkpoint_find(from, found, sizeof found);
    long v = check_values(found, -1);
    if (values) *values = v;
    return step;
}

// ---- a directory for the tests, shared by the ranks, and what stands in it
// -----------------------------------------

static char name_buffer[8][256];

// dir/format, in one of eight buffers that take turns.
static const char *in_dir(const char *format, ...) {
    static int turn;
    char *s = name_buffer[turn++ % 8];
    int n = snprintf(s, 256, "%s/", dir);
    va_list a;
    va_start(a, format);
    vsnprintf(s + n, 256 - (size_t)n, format, a);
    va_end(a);
    return s;
}

static void barrier(void) {
    if (world) comm_wait(comm_barrier(world));
}

static int no_dir(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    return launch_rank() == 0 ? system(command) : 0;
}

static int new_dir(void **state) {
    (void)state;
    used = TENSORS;
    // The parent of all ranks is the same launcher: its number makes a name that they share.
    snprintf(dir, sizeof dir, "%s/test_checkpoint.%d", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
             (int)(launch_size() > 1 ? getppid() : getpid()));
    barrier();
    if (no_dir() || (launch_rank() == 0 && mkdir(dir, 0700)))
        return -1; // a test that was aborted has left its own
    barrier();
    return 0;
}

static int remove_dir(void **state) {
    (void)state;
    sys.on = false;
    barrier();
    int code = no_dir();
    barrier();
    return code;
}

static bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

static void put_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

// A step's directory without a single tensor, marked or not: enough for whoever lists and removes them.
static void put_step(const char *name, long marker) {
    assert_int_equal(mkdir(in_dir("%s", name), 0700), 0);
    put_file(in_dir("%s/weights.safetensors", name), "", 0);
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", marker);
    if (marker >= 0) put_file(in_dir("%s/complete", name), text, (size_t)n);
}

// What a child process did: its exit code (−signal where one ended it) and the first lines that it said.
typedef struct {
    int code, lines;
    char text[4096];
} Said;

static Said finish(pid_t pid, const char *stderr_file) {
    Said s = {0};
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    s.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    FILE *f = fopen(stderr_file, "r");
    size_t n = fread(s.text, 1, sizeof s.text - 1, f);
    fclose(f);
    for (size_t i = 0; i < n; i++) s.lines += s.text[i] == '\n';
    return s;
}

static pid_t start(int (*child)(const char *), const char *argument, const char *stderr_file) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL); // nothing of this test stays when it fails
    int fd = open(stderr_file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(fd, 2);
    _exit(child(argument));
}

static Said in_child(int (*child)(const char *), const char *argument) {
    return finish(start(child, argument, in_dir("stderr")), in_dir("stderr"));
}

// ---- several ranks together
// ----------------------------------------------------------------------------------------

static void round_trip(void **state) {
    (void)state;
    assert_true(save_values(world, dir, 7, 7, 2));
    char found[512];
    assert_int_equal(checkpoint_find(dir, found, sizeof found), 7);
    assert_string_equal(found, in_dir("step-00000007"));
    check_values(found, 7);
    assert_int_equal(checkpoint_find(in_dir("step-00000007/"), found, sizeof found), 7);

    // Read in other cuts than it was written in: this rank's columns of each matrix, and a stretch from its
    // middle.
    SafeTensors *s = safetensors_open(in_dir("step-00000007/weights.safetensors"));
    assert_string_equal(safetensors_meta(s, "quote\""), "line\nü\\");
    assert_string_equal(safetensors_meta(s, "empty"), "");
    assert_null(safetensors_meta(s, "absent"));
    assert_int_equal(safetensors_find(s, "wte"), -1);
    for (int t = 0; t < TENSORS; t++) {
        int i = safetensors_find(s, tensors[t].name);
        assert_string_equal(safetensors_name(s, i), tensors[t].name);
        if (tensors[t].ndim != 2) continue;
        size_t R = tensors[t].shape[0], C = tensors[t].shape[1],
               left = comm_shard_begin(C, world->size, world->rank);
        Piece cuts[] = {{i, left, C / 3, C, R, NULL}, {i, C + 3, 2 * C - 7, 0, 1, NULL}, {i, 1, 5, 7, 6, NULL}};
        for (int k = left + C / 3 > C; k < 3; k++) {
            Piece p = cuts[k];
            p.data = malloc(p.run * p.runs * sizeof(float));
            safetensors_read(s, p);
            for (size_t r = 0; r < p.runs; r++)
                for (size_t e = 0; e < p.run; e++)
                    assert_true(p.data[r * p.run + e] == value(7, t, p.offset + r * p.stride + e));
            free(p.data);
        }
    }
    safetensors_close(s);
}

static void data_is_aligned_and_in_order(void **state) {
    (void)state;
    FILE *f = NULL;
    uint64_t length;
    for (long values = 1; values < 100000000; values *= 10) { // headers of eight lengths
        assert_true(save_values(world, dir, 1, values, 1));
        if (f) fclose(f);
        f = fopen(in_dir("step-00000001/weights.safetensors"), "r");
        assert_int_equal(fread(&length, 8, 1, f), 1);
        assert_int_equal(length % 8, 0);
        barrier();
    }
    char *json = calloc(1, length + 1), *at = json;
    assert_int_equal(fread(json, 1, length, f), length);
    fclose(f);
    assert_int_equal(json[0], '{');
    size_t end = 0;
    for (int t = 0; t < TENSORS; t++) { // the offsets in the order of the header
        char expected[64];
        snprintf(expected, sizeof expected, "\"data_offsets\":[%zu,%zu]", end, end + 4 * elements(t));
        at = strstr(at, expected);
        assert_non_null(at);
        end += 4 * elements(t);
    }
    free(json);
}

// Pieces that touch are written together, in whichever pieces their runs lie.
static void touching_pieces_are_joined(void **state) {
    (void)state;
    enum { R = 1 << 15, C = 32 };
    const TensorInfo info[] = {{"columns", 2, {R * (size_t)world->size, C}},
                               {"after", 1, {(size_t)world->size * R * C}}};
    float *data = calloc(R * C, sizeof(float));
    size_t mine = (size_t)world->rank * R;
    Piece p[] = {{0, mine * C + 10, C - 10, C, R, data},
                 {1, mine * C, R * C, 0, 1, data},
                 {0, mine * C, 10, C, R, data}};
    TensorFile file = {"weights.safetensors", info, 2, p, 3, NULL, 0};
    arm(-1, 0, -1);
    assert_true(checkpoint_save(world, dir, 1, &file, 1, 1));
    sys.on = false;
    size_t bytes = 2 * (size_t)R * C * sizeof(float);
    assert_true(sys.written >= bytes && sys.written < bytes + 4096);
    assert_true(sys.writes <= (int)(bytes >> 20) + 4); // the header, the marker, and an end of each stretch
    free(data);
}

static void writes_that_stop_short_are_continued(void **state) {
    (void)state;
    arm(-1, 0, -1);
    sys.clumsy = true;
    assert_true(save_values(world, dir, 3, 3, 1));
    assert_int_equal(load(dir, NULL), 3);
    sys.on = false;
}

static void keeps_the_newest(void **state) {
    (void)state;
    long steps[] = {10, 20, 99999999, 100000000, 200000000};
    for (int i = 0; i < 5; i++) assert_true(save_values(world, dir, steps[i], steps[i], 2));
    assert_false(exists(in_dir("step-00000020")) || exists(in_dir("step-99999999")));
    assert_true(exists(in_dir("step-100000000")) && exists(in_dir("step-200000000")));
    // Back to an earlier step: the later ones belong to another course of the run, and stay.
    barrier();
    for (long step = 40; step <= 60; step += 10) assert_true(save_values(world, dir, step, step, 2));
    assert_false(exists(in_dir("step-00000040")));
    assert_true(exists(in_dir("step-00000050")) && exists(in_dir("step-00000060")));
    assert_true(exists(in_dir("step-100000000")));
    assert_int_equal(load(dir, NULL), 200000000);
}

// Where rank 0 is slow, the others come no earlier: the directory is made, and what is not kept is gone.
static void nobody_returns_early(void **state) {
    (void)state;
    const char *where = in_dir("made/slowly");
    used = TENSORS - 1;
    arm(-1, 0, -1);
    sys.slow = world->rank == 0;
    checkpoint_lock(world, where);
    assert_true(exists(where));
    assert_true(save_values(world, where, 1, 1, 1));
    assert_true(save_values(world, where, 2, 2, 1));
    assert_false(exists(in_dir("made/slowly/step-00000001")));
    sys.on = false;
    checkpoint_unlock();
}

// What must be on the disk before what, call by call: a crash of the machine is not one of the process, and may
// lose whatever no sync had secured.
static void everything_in_its_order(void **state) {
    (void)state;
    static const char *const others = "write weights.safetensors\nsync weights.safetensors\n"
                                      "write optimizer.safetensors\nsync optimizer.safetensors\n";
    static const char *const first = "mkdir .step-00000002.partial\n"
                                     "write weights.safetensors\nlength weights.safetensors\n"
                                     "write weights.safetensors\nsync weights.safetensors\n"
                                     "write optimizer.safetensors\nlength optimizer.safetensors\n"
                                     "write optimizer.safetensors\nsync optimizer.safetensors\n"
                                     "sync .step-00000002.partial\n";
    char expected[2048];
    assert_true(save_values(world, dir, 1, 1, 1));
    for (int again = 0; again < 2; again++) {
        arm(-1, 0, -1);
        assert_true(save_values(world, dir, 2, 2, 1));
        sys.on = false;
        const char *gone = again ? ".step-00000002.old" : "step-00000001";
        int n = snprintf(expected, sizeof expected,
                         "%srename step-00000002\nrename .step-00000002.partial\nsync %s\n"
                         "write complete\nsync complete\nsync step-00000002\nunlink complete\nsync %s\n",
                         first, strrchr(dir, '/') + 1, gone);
        if (world->rank != 0) {
            assert_string_equal(sys.log, others);
            continue;
        }
        assert_memory_equal(sys.log, expected, (size_t)n);
        n = snprintf(expected, sizeof expected, "rmdir %s\n", gone); // its files before, in any order
        assert_string_equal(sys.log + strlen(sys.log) - n, expected);
    }
}

static void the_same_step_again(void **state) {
    (void)state;
    for (long values = 1; values <= 3; values++) {
        assert_true(save_values(world, dir, 5, values, 2));
        assert_int_equal(check_values(in_dir("step-00000005"), -1), values);
        assert_false(exists(in_dir(".step-00000005.old")));
        barrier();
    }
}

static void what_crashes_left_is_cleared(void **state) {
    (void)state;
    assert_true(save_values(world, dir, 10, 10, 9));
    assert_true(save_values(world, dir, 20, 20, 9));
    if (world->rank == 0) {
        put_step(".step-00000004.partial", -1);
        put_step(".step-00000030.partial", 30); // a marker does not make it whole
        put_step("step-00000007", -1);          // died between rename and marker, or while being removed
        put_step("step-00000020x", -1);         // not ours
        put_file(in_dir("notes"), "x", 1);
        // Died while step 20 was being replaced: the old one waits, the new one is not marked.
        assert_int_equal(rename(in_dir("step-00000020"), in_dir(".step-00000020.old")), 0);
        put_step("step-00000020", -1);
        // Died after marking the new step 10, before removing the old one.
        put_step(".step-00000010.old", 10);
    }
    barrier();
    char found[512];
    assert_int_equal(checkpoint_find(dir, found, sizeof found), 20);
    assert_string_equal(found, in_dir(".step-00000020.old"));
    barrier();
    assert_true(save_values(world, dir, 30, 30, 9));
    assert_false(exists(in_dir(".step-00000004.partial")) || exists(in_dir(".step-00000030.partial")));
    assert_false(exists(in_dir("step-00000007")) || exists(in_dir(".step-00000010.old")));
    assert_false(exists(in_dir(".step-00000020.old")));
    assert_true(exists(in_dir("step-00000020x")) && exists(in_dir("notes")));
    assert_int_equal(check_values(in_dir("step-00000010"), -1), 10);
    assert_int_equal(check_values(in_dir("step-00000020"), -1), 20);
    assert_int_equal(load(dir, NULL), 30);
}

// Makes one system call after the other fail, on one rank: the save is refused in one line on every rank,
// nothing of it stays, the earlier checkpoint is as it was. step 10 is there; 20 is new, 10 again replaces it.
static void failing_calls(long step, int failing_rank) {
    bool was_there = step == 10;
    used = TENSORS - 1;
    assert_true(save_values(world, dir, 10, 10, 2));
    int refused = 0, kept = 0;
    for (int n = 0;; n++) {
        if (world->rank == 0) truncate(in_dir("stderr"), 0);
        barrier();
        int terminal = dup(2), fd = open(in_dir("stderr"), O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(fd, 2);
        close(fd);
        arm(world->rank == failing_rank ? n : -1, n % 2 ? ENOSPC : EIO, -1);
        bool ok = save_values(world, dir, step, step + 1, 2);
        sys.on = false;
        dup2(terminal, 2);
        close(terminal);
        assert_int_equal(comm_sum(world, ok), ok * world->size); // the same answer everywhere
        barrier();
        char text[2048] = "";
        FILE *f = fopen(in_dir("stderr"), "r");
        size_t bytes = fread(text, 1, sizeof text - 1, f), lines = 0;
        fclose(f);
        for (size_t i = 0; i < bytes; i++) lines += text[i] == '\n';
        if (ok) {
            assert_int_equal(check_values(in_dir("step-%08ld", step), -1), step + 1);
        } else {
            assert_int_equal(lines, 1);
            assert_non_null(strstr(text, "train: cannot "));
            assert_non_null(strstr(text, dir));
            assert_non_null(strstr(text, strerror(n % 2 ? ENOSPC : EIO)));
            assert_int_equal(check_values(in_dir("step-00000010"), -1), 10);
            assert_true(was_there || !exists(in_dir("step-%08ld", step)));
            assert_false(exists(in_dir(".step-%08ld.partial", step)) ||
                         exists(in_dir(".step-%08ld.old", step)));
            refused++;
        }
        barrier();
        bool over = comm_max(world, world->rank == failing_rank && sys.calls <= n) > 0;
        if (over) break;
        kept += ok; // failed after the marker: what was left to do is done by the next save
        if (ok) {
            barrier();
            assert_true(save_values(world, dir, 10, 10, 2)); // as before
            if (!was_there && world->rank == 0) {
                char command[256];
                snprintf(command, sizeof command, "rm -r %s", in_dir("step-%08ld", step));
                assert_int_equal(system(command), 0);
            }
            barrier();
        }
    }
    // Rank 0: mkdir, per file header, length, data, sync; sync, rename, sync, marker, two syncs. The others
    // write and sync.
    if (failing_rank == 0)
        assert_true(refused >= 1 + 2 * 4 + 6);
    else
        assert_true(refused >= 2 * 2);
    assert_true(failing_rank != 0 || !was_there || kept > 0); // the old one's removal
}

static void calls_fail_on_rank_0(void **state) {
    (void)state;
    failing_calls(20, 0);
}

static void calls_fail_while_a_step_is_replaced(void **state) {
    (void)state;
    failing_calls(10, 0);
}

static void calls_fail_on_the_last_rank(void **state) {
    (void)state;
    failing_calls(20, world->size - 1);
}

// ---- headers that lie
// ----------------------------------------------------------------------------------------------

static int open_and_read(const char *path) {
    SafeTensors *s = safetensors_open(path);
    for (int i = 0; i < safetensors_count(s); i++) {
        const size_t *shape;
        size_t n = 1;
        for (int d = 0, dims = safetensors_shape(s, i, &shape); d < dims; d++) n *= shape[d];
        float *data = malloc(n * sizeof(float) + 1);
        safetensors_read(s, (Piece){i, 0, n, 0, 1, data});
        free(data);
    }
    safetensors_close(s);
    return 0;
}

static size_t put_header(const char *path, const char *header, size_t data_bytes) {
    size_t length = strlen(header);
    char *bytes = calloc(1, 8 + length + data_bytes);
    memcpy(bytes, &(uint64_t){length}, 8);
    memcpy(bytes + 8, header, length);
    put_file(path, bytes, 8 + length + data_bytes);
    free(bytes);
    return 8 + length + data_bytes;
}

#define T(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void hostile_headers(void **state) {
    (void)state;
    static const struct {
        const char *header, *says;
    } bad[] = {
        {"", "JSON"},
        {"[]", "JSON"},
        {"{", "JSON"},
        {"{\"a\":" T("F32", "[4]", "[0,16]"), "JSON"},
        {"{\"a\":" T("F32", "[4]", "[0,16]") "} {}", "JSON"},
        {"{\"a\":3}", "lacks"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4]}}", "lacks"},
        {"{\"a\":{\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,16]}}", "lacks"},
        {"{\"a\":" T("I64", "[2]", "[0,16]") "}", "none of F32, F16 and BF16"},
        {"{\"a\":" T("F8", "[16]", "[0,16]") "}", "none of F32, F16 and BF16"},
        {"{\"a\":" T("F32", "[4]", "[0]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[0,16,16]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[-16,0]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[16,0]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[0.5,16.5]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[0,1e999]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[0,\"16\"]") "}", "ascending pair"},
        {"{\"a\":" T("F32", "[4]", "[0,20]") "}", "past the end"},
        {"{\"a\":" T("F32", "[4]", "[16,32]") "}", "past the end"},
        {"{\"a\":" T("F32", "[-4]", "[0,16]") "}", "no whole number"},
        {"{\"a\":" T("F32", "[4.5]", "[0,16]") "}", "no whole number"},
        {"{\"a\":" T("F32", "[null]", "[0,16]") "}", "no whole number"},
        {"{\"a\":" T("F32", "[5]", "[0,16]") "}", "do not match"},
        {"{\"a\":" T("F16", "[4]", "[0,16]") "}", "do not match"},
        {"{\"a\":" T("F32", "[]", "[0,16]") "}", "do not match"},
        {"{\"a\":" T("F32", "[4611686018427387904]", "[0,16]") "}", "no whole number"},
        {"{\"a\":" T("F32", "[4294967296,4294967296]", "[0,0]") "}", "counted"},
        {"{\"a\":" T("F32", "[4294967296,1073741828]", "[0,16]") "}", "do not match"}, // 2⁶⁴ + 16 bytes
        {"{\"a\":" T("F32", "[2147483648,2147483648]", "[0,0]") "}", "do not match"},  // 2⁶⁴ bytes
        {"{\"a\":" T("F32", "[1,1,1,1,1,1,1,1,4]", "[0,16]") "}", "8 dimensions"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") "}", "follow the last"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[3]", "[4,16]") "}", "begins at 4"},
        {"{\"a\":" T("F32", "[1]", "[0,4]") ",\"b\":" T("F32", "[2]", "[8,16]") "}", "begins at 8"},
        {"{\"a\":" T("F32", "[4]", "[0,16]") ",\"b\":" T("F32", "[4]", "[0,16]") "}", "begins at 0"},
        {"{\"a\":" T("F32", "[2]", "[0,8]") ",\"a\":" T("F32", "[2]", "[8,16]") "}", "two tensors are named a"},
        {"{\"a\\nb\":" T("F32", "[4]", "[0,16]") "}", "control character"},
        {"{\"__metadata__\":3,\"a\":" T("F32", "[4]", "[0,16]") "}", "__metadata__"},
        {"{\"__metadata__\":{\"k\":3},\"a\":" T("F32", "[4]", "[0,16]") "}", "__metadata__"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_header(in_dir("bad"), bad[i].header, 16);
        Said s = in_child(open_and_read, in_dir("bad"));
        if (s.code != 2 || s.lines != 1 || !strstr(s.text, bad[i].says) || !strstr(s.text, in_dir("bad")))
            fail_msg("%s: code %d, \"%s\", wanted \"%s\"", bad[i].header, s.code, s.text, bad[i].says);
    }
    put_header(in_dir("good"), "{\"b\":" T("F16", "[2,2]", "[8,16]") ",\"a\":" T("F32", "[2]", "[0,8]") "}  ",
               16);
    assert_int_equal(in_child(open_and_read, in_dir("good")).code, 0);
    put_header(in_dir("good"), "{\"b\":" T("F32", "[]", "[0,4]") ",\"a\":" T("BF16", "[0,7]", "[0,0]") "}", 4);
    assert_int_equal(in_child(open_and_read, in_dir("good")).code, 0);
}

static void not_even_a_header(void **state) {
    (void)state;
    put_file(in_dir("empty"), "", 0);
    put_file(in_dir("seven"), "\1\0\0\0\0\0\0", 7);
    put_file(in_dir("long"), "\3\0\0\0\0\0\0\0{}", 10);
    put_file(in_dir("huge"), "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    put_file(in_dir("text"), "these are words, not tensors", 28);
    assert_int_equal(mkfifo(in_dir("pipe"), 0600), 0);
    static const char *const wrong[][2] = {
        {"empty", "0 bytes"},    {"seven", "7 bytes"},       {"long", "a header of 3 bytes in a file of 10"},
        {"huge", "cut short"},   {"text", "cut short"},      {"pipe", "no regular file"},
        {".", "is a directory"}, {"absent", "No such file"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *path = in_dir("%s", wrong[i][0]);
        Said s = in_child(open_and_read, path);
        if (s.code != 2 || s.lines != 1 || !strstr(s.text, path) || !strstr(s.text, wrong[i][1]))
            fail_msg("%s: code %d, \"%s\"", path, s.code, s.text);
    }
}

// Bytes changed at random: refused in one line or read, and nothing else.
static void damaged_headers(void **state) {
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"},\"a\":" T(
        "F32", "[2,2]", "[0,16]") ",\"b\":" T("BF16", "[4]", "[16,24]") "}";
    size_t n = put_header(in_dir("whole"), header, 24);
    char *bytes = malloc(n);
    int refused = 0;
    srand(1);
    for (int round = 0; round < 300; round++) {
        FILE *f = fopen(in_dir("whole"), "r");
        assert_int_equal(fread(bytes, 1, n, f), n);
        fclose(f);
        static const char likely[] = "0123456789[]{},:\"-.eE\\u";
        for (int k = 0; k <= round % 3; k++) {
            size_t at = (size_t)rand() % n;
            bytes[at] = (char)(round % 2 ? rand() : likely[(size_t)rand() % (sizeof likely - 1)]);
        }
        put_file(in_dir("damaged"), bytes, round % 10 ? n : (size_t)rand() % n);
        Said s = in_child(open_and_read, in_dir("damaged"));
        if (!(s.code == 0 && s.lines == 0) && !(s.code == 2 && s.lines == 1))
            fail_msg("round %d: code %d, \"%s\"", round, s.code, s.text);
        refused += s.code == 2;
    }
    assert_true(refused > 100 && refused < 300);
    free(bytes);
}

// All 65,536 halves and bfloats, against arithmetic.
static void two_byte_values(void **state) {
    (void)state;
    enum { N = 65536 };
    static uint16_t raw[N];
    static float data[N];
    for (int i = 0; i < N; i++) raw[i] = (uint16_t)i;
    for (int half = 0; half < 2; half++) {
        FILE *f = fopen(in_dir("two"), "w");
        const char *header = half ? "{\"x\":" T("F16", "[65536]", "[0,131072]") "}"
                                  : "{\"x\":" T("BF16", "[65536]", "[0,131072]") "}";
        fwrite(&(uint64_t){strlen(header)}, 8, 1, f);
        fputs(header, f);
        fwrite(raw, 2, N, f);
        fclose(f);
        SafeTensors *s = safetensors_open(in_dir("two"));
        safetensors_read(s, (Piece){0, 0, N, 0, 1, data});
        int mantissa_bits = half ? 10 : 7, top = half ? 31 : 255, bias = half ? 15 : 127;
        for (int i = 0; i < N; i++) {
            int exponent = i >> mantissa_bits & top, mantissa = i & ((1 << mantissa_bits) - 1);
            double x = exponent ? ldexp(1 + ldexp(mantissa, -mantissa_bits), exponent - bias)
                                : ldexp(mantissa, 1 - bias - mantissa_bits);
            if (exponent == top && mantissa)
                assert_true(isnan(data[i]));
            else
                assert_true(data[i] == (float)(exponent == top ? INFINITY : x) * (i & 0x8000 ? -1 : 1));
            assert_int_equal(!!signbit(data[i]), i >> 15);
        }
        float odd[3 * 5];
        safetensors_read(s, (Piece){0, 16385, 3, 4099, 5, odd});
        for (int r = 0; r < 5; r++)
            assert_memory_equal(odd + 3 * r, data + 16385 + 4099 * r, 3 * sizeof(float));
        safetensors_close(s);
    }
}

// Beyond 4 GiB, where a 32-bit offset would have come round. The file is a hole but for its end.
static void far_into_a_large_file(void **state) {
    (void)state;
    static const char header[] = "{\"x\":" T("F32", "[1342177283]", "[0,5368709132]") "}";
    size_t n = 1342177283, data = put_header(in_dir("large"), header, 0);
    float last[3] = {1, 2, 3}, got[4] = {0};
    FILE *f = fopen(in_dir("large"), "r+");
    assert_int_equal(fseeko(f, (off_t)(data + sizeof(float) * (n - 3)), SEEK_SET), 0);
    assert_int_equal(fwrite(last, sizeof last, 1, f), 1);
    fclose(f);
    SafeTensors *s = safetensors_open(in_dir("large"));
    safetensors_read(s, (Piece){0, n - 4, 4, 0, 1, got});
    assert_true(got[0] == 0 && memcmp(got + 1, last, sizeof last) == 0);
    safetensors_read(s, (Piece){0, n - 3 - 2 * ((size_t)1 << 29), 1, (size_t)1 << 29, 3, got});
    assert_true(got[0] == 0 && got[1] == 0 && got[2] == 1);
    safetensors_close(s);
}

// ---- finding
// -------------------------------------------------------------------------------------------------------

static int find_only(const char *path) {
    char found[512];
    checkpoint_find(path, found, sizeof found);
    return 0;
}

static void finding_names_the_nearest(void **state) {
    (void)state;
    const struct {
        const char *path, *says;
    } wrong[] = {
        {"", "has no checkpoint"},
        {"absent", "does not exist"},
        {"file", "is a file"},
        {"only", "has no whole checkpoint; step-00000100 is incomplete"},
        {"runs/step-00000100", "step-00000100 is incomplete; nearest: "},
        {"runs/step-00000060", "step-00000060 does not exist; nearest: "},
    };
    put_file(in_dir("file"), "x", 1);
    assert_int_equal(mkdir(in_dir("only"), 0700), 0);
    put_step("only/step-00000100", -1);
    assert_int_equal(mkdir(in_dir("runs"), 0700), 0);
    put_step("runs/step-00000050", 50);
    put_step("runs/.step-00000090.old", 90);
    put_step("runs/step-00000100", -1);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        Said s = in_child(find_only, in_dir("%s", wrong[i].path));
        if (s.code != 2 || s.lines != 1 || !strstr(s.text, wrong[i].says))
            fail_msg("%s: code %d, \"%s\"", wrong[i].path, s.code, s.text);
        if (i == 4) assert_non_null(strstr(s.text, in_dir("runs/.step-00000090.old")));
        if (i == 5) assert_non_null(strstr(s.text, in_dir("runs/step-00000050")));
    }
    char found[512];
    assert_int_equal(rename(in_dir("runs/step-00000050"), in_dir("runs/best")), 0);
    assert_int_equal(checkpoint_find(in_dir("runs/best"), found, sizeof found), 50); // its marker knows
    put_step("runs/step-00000002", 2);
    put_step("runs/step-100000000", 100000000);
    assert_int_equal(checkpoint_find(in_dir("runs"), found, sizeof found), 100000000); // by number, not by name
    put_file(in_dir("runs/step-100000000/complete"), "", 0); // made, but lost before it was synced
    assert_int_equal(checkpoint_find(in_dir("runs"), found, sizeof found), 90);
}

// ---- processes that die
// --------------------------------------------------------------------------------------------

// "step values kill_at delay": saves; dies at a system call (≥ 0), or whenever the parent kills it.
static int save_and_die(const char *argument) {
    long step, values;
    int kill_at;
    sscanf(argument, "%ld %ld %d", &step, &values, &kill_at);
    Comm *c = comm_init(NULL, NULL);
    arm(-1, 0, kill_at);
    for (;;) {
        if (!save_values(c, dir, step, values, 2)) return 1;
        if (kill_at >= 0) return 0;
        step += values % 2, values++; // without end: a new step, the same step again, ...
    }
}

// Dies before each system call in turn. Whatever it was doing, a whole checkpoint is found, and a later save
// succeeds.
static void dying_at_every_call(long step) {
    char argument[64];
    used = TENSORS - 1;
    snprintf(argument, sizeof argument, "10 10 1000000");
    assert_int_equal(in_child(save_and_die, argument).code, 0);
    int olds = 0, news = 0;
    for (int n = 0;; n++) {
        snprintf(argument, sizeof argument, "%ld 11 %d", step, n);
        Said s = in_child(save_and_die, argument);
        if (s.code != 0 && s.code != -SIGKILL) fail_msg("call %d: code %d, \"%s\"", n, s.code, s.text);
        long values, found = load(dir, &values);
        assert_true((found == 10 && values == 10) || (found == step && values == 11));
        olds += values == 10;
        news += values == 11;
        if (s.code == 0) {
            assert_int_equal(values, 11);
            break;
        }
        if (values == 11) { // dies after marking: back to the start
            char command[256];
            snprintf(command, sizeof command, "rm -rf %s/step* %s/.step*", dir, dir);
            assert_int_equal(system(command), 0);
            assert_int_equal(in_child(save_and_die, "10 10 1000000").code, 0);
        }
    }
    assert_true(olds >= 15 && news >= 1);
    assert_false(exists(in_dir(".step-%08ld.partial", step)) || exists(in_dir(".step-%08ld.old", step)));
}

static void dies_while_saving(void **state) {
    (void)state;
    dying_at_every_call(20);
}

static void dies_while_replacing(void **state) {
    (void)state;
    dying_at_every_call(10);
}

static void killed_at_random_moments(void **state) {
    (void)state;
    long last = 0;
    srand(2);
    for (int round = 0; round < 12; round++) {
        char argument[64];
        snprintf(argument, sizeof argument, "%d %d -1", 100 * (round + 1), 100 * (round + 1));
        pid_t pid = start(save_and_die, argument, in_dir("stderr"));
        while (!exists(in_dir("step-%08d/complete", 100 * (round + 1))) && waitpid(pid, NULL, WNOHANG) == 0)
            usleep(1000);
        usleep((useconds_t)(rand() % 60000));
        kill(pid, SIGKILL);
        assert_int_equal(finish(pid, in_dir("stderr")).code, -SIGKILL);
        long step = load(dir, NULL);
        assert_true(step > last);
        last = step;
    }
}

static int hold_lock(const char *where) {
    Comm *c = comm_init(NULL, NULL);
    checkpoint_lock(c, where);
    fputs("held\n", stderr);
    pause();
    return 0;
}

static int take_lock(const char *where) {
    Comm *c = comm_init(NULL, NULL);
    checkpoint_lock(c, where);
    checkpoint_unlock();
    checkpoint_lock(c, where);
    return 0;
}

static void one_run_a_directory(void **state) {
    (void)state;
    const char *where = in_dir("made/on the/way"), *said = in_dir("holder");
    pid_t holder = start(hold_lock, where, said);
    struct stat st = {0};
    for (int i = 0; i < 1000 && st.st_size == 0; i++, usleep(10000)) stat(said, &st);
    Said s = in_child(take_lock, where);
    assert_int_equal(s.code, 2);
    assert_non_null(strstr(s.text, "train: another running program saves into"));
    assert_non_null(strstr(s.text, where));
    kill(holder, SIGKILL); // its lock goes with it, the file stays
    finish(holder, said);
    assert_true(exists(in_dir("made/on the/way/.lock")));
    assert_int_equal(in_child(take_lock, where).code, 0);
    put_file(in_dir("file"), "x", 1);
    s = in_child(take_lock, in_dir("file/runs"));
    assert_int_equal(s.code, 2);
    assert_non_null(strstr(s.text, in_dir("file")));
}

// ---- the tool
// ------------------------------------------------------------------------------------------------------

static int dump(const char *file, const char *name) {
    SafeTensors *s = safetensors_open(file);
    int i = safetensors_find(s, name);
    if (i < 0) return 1;
    const size_t *shape;
    size_t n = 1;
    for (int d = 0, dims = safetensors_shape(s, i, &shape); d < dims; d++) n *= shape[d];
    float *data = malloc(n * sizeof(float));
    safetensors_read(s, (Piece){i, 0, n, 0, 1, data});
    bool ok = fwrite(data, sizeof(float), n, stdout) == n && fflush(stdout) == 0;
    free(data);
    safetensors_close(s);
    return ok ? 0 : 1;
}

static int tool(int argc, char **argv) {
    if (strcmp(argv[1], "dump") == 0 && argc == 4) return dump(argv[2], argv[3]);
    if (strcmp(argv[1], "load") == 0 && argc == 3) {
        printf("%ld\n", load(argv[2], NULL));
        return 0;
    }
    if (strcmp(argv[1], "save") != 0 || argc != 4) return 2;
    Comm *c = comm_init(&argc, &argv);
    checkpoint_lock(c, argv[2]);
    int rank, call;
    const char *crash = getenv("CRASH");
    if (crash && sscanf(crash, "%d:%d", &rank, &call) == 2 && rank == c->rank) arm(-1, 0, call);
    long step = atol(argv[3]);
    bool ok = save_values(c, argv[2], step, step, 2);
    sys.on = false;
    comm_finalize();
    return ok ? 0 : 1;
}

#define IN_NEW_DIR(test) cmocka_unit_test_setup_teardown(test, new_dir, remove_dir)

int main(int argc, char **argv) {
    if (argc > 1) return tool(argc, argv);
    const struct CMUnitTest alone[] = {
        IN_NEW_DIR(hostile_headers),          IN_NEW_DIR(not_even_a_header),
        IN_NEW_DIR(damaged_headers),          IN_NEW_DIR(two_byte_values),
        IN_NEW_DIR(far_into_a_large_file),    IN_NEW_DIR(finding_names_the_nearest),
        IN_NEW_DIR(dies_while_saving),        IN_NEW_DIR(dies_while_replacing),
        IN_NEW_DIR(killed_at_random_moments), IN_NEW_DIR(one_run_a_directory),
    };
    const struct CMUnitTest together[] = {
        IN_NEW_DIR(round_trip),
        IN_NEW_DIR(data_is_aligned_and_in_order),
        IN_NEW_DIR(touching_pieces_are_joined),
        IN_NEW_DIR(writes_that_stop_short_are_continued),
        IN_NEW_DIR(keeps_the_newest),
        IN_NEW_DIR(nobody_returns_early),
        IN_NEW_DIR(everything_in_its_order),
        IN_NEW_DIR(the_same_step_again),
        IN_NEW_DIR(what_crashes_left_is_cleared),
        IN_NEW_DIR(calls_fail_on_rank_0),
        IN_NEW_DIR(calls_fail_while_a_step_is_replaced),
        IN_NEW_DIR(calls_fail_on_the_last_rank),
    };
    int wrong = launch_size() > 1 ? 0 : cmocka_run_group_tests(alone, NULL, NULL);
    world = comm_init(&argc, &argv);
    setenv("CMOCKA_TEST_ABORT", "1", 1); // a rank that leaves a test must not leave the others waiting
    wrong += cmocka_run_group_tests(together, NULL, NULL);
    comm_finalize();
    return wrong;
}

// Checkpoints that survive a crash at any moment, a full disk, and a change of layout.
//
// A checkpoint is a list of named tensors, not of ranks: each rank writes the pieces that it holds to their
// places in one shared file, so that a run on another number of ranks finds the same file. Which rank writes
// where, of four:
//
//     length   JSON header      wte.weight [V,C]     attention.out.weight [C,H·D]
//     8 bytes  padded to 8  |  0000111122223333   |  0123 0123 0123 0123 ...      |  weights.safetensors
//                              linear shards         columns, row by row
//
// One save, in the order that makes it safe (Pillai et al. 2014, "All file systems are not created equal"):
//
//     .step-N.partial/   every file written and synced, the directory synced, every rank asked
//     step-N/            renamed, the parent synced
//     step-N/complete    written, synced: from here on the checkpoint counts
//     only now are older ones removed, marker first
//
// Where step-N is there already (a resumed run saves a step again), it waits as .step-N.old until the new one
// is marked; .old counts as a checkpoint as long as step-N has no marker. The marker holds the step.
//
// Cost: the bytes of the tensors, once over all ranks, in writes of BLOCK wherever a rank's pieces touch; an
// fsync a rank and file; a few small messages a file.
#include "checkpoint.h"
#include "device.h"
#include "fail.h"
#include "../kernels/precision.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors data is little-endian, and is written as it lies");

#ifndef TEMP_FAILURE_RETRY // glibc's: call again where a signal came in between
#define TEMP_FAILURE_RETRY(call)                                                                               \
    ({                                                                                                         \
        long result;                                                                                           \
        do result = (call);                                                                                    \
        while (result == -1 && errno == EINTR);                                                                \
        result;                                                                                                \
    })
#endif

#define MARKER "complete"
#define BLOCK  ((size_t)1 << 20) // elements in one read or write, where that many lie together

static float block[BLOCK]; // on their way between pieces and a file

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) fail(EXIT_RUNTIME, "no memory for %zu bytes of checkpoint tables", bytes);
    return memory;
}

// ---------------------------------------------------------------------------------------------------------
// Paths and directories

typedef struct {
    char s[PATH_MAX];
} Path;

static Path join(const char *dir, const char *name) {
    Path p;
    if (snprintf(p.s, sizeof p.s, "%s/%s", dir, name) >= (int)sizeof p.s)
        fail_all(EXIT_USAGE, "the path %.60s.../%s is longer than %d bytes", dir, name, PATH_MAX - 1);
    return p;
}

typedef enum { STEP, OLD, PARTIAL, KINDS } Kind;

static Path step_name(long step, Kind kind) {
    static const char *const suffix[KINDS] = {"", ".old", ".partial"};
    Path p;
    snprintf(p.s, sizeof p.s, "%sstep-%08ld%s", kind == STEP ? "" : ".", step, suffix[kind]);
    return p;
}

static Path step_path(const char *dir, long step, Kind kind) {
    return join(dir, step_name(step, kind).s);
}

// Is this exactly a name that step_name gives? Nothing else in the user's directory is ever touched.
static bool parse_name(const char *name, long *step, Kind *kind) {
    if (sscanf(name + (name[0] == '.'), "step-%ld", step) != 1 || *step < 0) return false;
    for (*kind = STEP; *kind < KINDS; (*kind)++)
        if (strcmp(name, step_name(*step, *kind).s) == 0) return true;
    return false;
}

// The step in a checkpoint's marker; −1 where there is no marker or an empty one, −2 where it cannot be read.
static long marker_step(const char *checkpoint) {
    FILE *f = fopen(join(checkpoint, MARKER).s, "re");
    if (!f) return errno == ENOENT || errno == ENOTDIR ? -1 : -2;
    long step;
    bool found = fscanf(f, "%ld", &step) == 1 && step >= 0;
    bool broken = ferror(f);
    fclose(f);
    return found ? step : broken ? -2 : -1;
}

typedef struct {
    long step;
    Kind kind;
    long marker; // as marker_step gives it; whole where ≥ 0
} Found;

static int by_step(const void *a, const void *b) {
    const Found *x = a, *y = b;
    return x->step != y->step ? (x->step > y->step) - (x->step < y->step)
                              : (x->kind > y->kind) - (x->kind < y->kind);
}

// What lies in dir, by step: returns how many, in *found (to be freed); −1 and errno where dir cannot be read.
static int scan(const char *dir, Found **found) {
    *found = NULL;
    DIR *d = opendir(dir);
    if (!d) return -1;
    int n = 0, room = 0;
    for (struct dirent *e; (e = readdir(d));) {
        Found f;
        if (!parse_name(e->d_name, &f.step, &f.kind)) continue;
        f.marker = marker_step(join(dir, e->d_name).s);
        if (n == room) {
            room = 2 * room + 16;
            *found = realloc(*found, room * sizeof **found);
            if (!*found) fail(EXIT_RUNTIME, "no memory for the list of checkpoints in %s", dir);
        }
        (*found)[n++] = f;
    }
    closedir(d);
    if (n) qsort(*found, n, sizeof **found, by_step);
    return n;
}

static bool sync_directory(const char *dir) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return false;
    bool ok = TEMP_FAILURE_RETRY(fsync(fd)) == 0 || errno == EINVAL; // where a file system syncs no directories
    int error = errno;
    close(fd);
    errno = error;
    return ok;
}

// Nothing in it but what a save writes? A directory that holds anything else is somebody's own, and stays.
static bool only_ours(const char *path) {
    DIR *d = opendir(path);
    bool ours = d != NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *dot = strrchr(e->d_name, '.');
        ours = ours && (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !strcmp(e->d_name, MARKER) ||
                        (dot && !strcmp(dot, ".safetensors")));
    }
    if (d) closedir(d);
    return ours;
}

// The marker goes first, for good: a crash half-way must not leave a marked checkpoint with files missing.
static void remove_checkpoint(const char *path) {
    if (!only_ours(path)) return;
    if (unlink(join(path, MARKER).s) == 0) sync_directory(path);
    DIR *d = opendir(path);
    if (d) {
        for (struct dirent *e; (e = readdir(d));)
            if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) unlink(join(path, e->d_name).s);
        closedir(d);
    }
    if (rmdir(path) && errno != ENOENT) fprintf(stderr, "train: cannot remove %s: %s\n", path, strerror(errno));
}

// What a crash left behind: half-written and half-removed checkpoints go, one that waited for its successor
// returns.
static void tidy(const char *dir) {
    Found *found;
    int n = scan(dir, &found);
    for (int i = 0; i < n; i++)
        if (found[i].kind == PARTIAL || found[i].marker == -1)
            remove_checkpoint(step_path(dir, found[i].step, found[i].kind).s);
    for (int i = 0; i < n; i++) {
        if (found[i].kind != OLD || found[i].marker < 0) continue;
        Path old = step_path(dir, found[i].step, OLD), step = step_path(dir, found[i].step, STEP);
        if (access(step.s, F_OK) == 0) // marked, or the first loop had removed it
            remove_checkpoint(old.s);
        else
            rename(old.s, step.s);
    }
    free(found);
}

// Older than the newest `keep` of those up to this step. Later steps (this run went back to an earlier one)
// stay.
static void prune(const char *dir, long step, int keep) {
    Found *found;
    int n = scan(dir, &found), whole = 0;
    for (int i = 0; i < n; i++) whole += found[i].kind == STEP && found[i].marker >= 0 && found[i].step <= step;
    for (int i = 0; i < n && whole > (keep > 1 ? keep : 1); i++) {
        if (found[i].kind != STEP || found[i].marker < 0) continue;
        remove_checkpoint(step_path(dir, found[i].step, STEP).s);
        whole--;
    }
    free(found);
}

// ---------------------------------------------------------------------------------------------------------
// The lock: flock(2), which the system drops when its holder ends, however it ends.

static int lock_fd = -1;

static void make_directories(const char *dir) {
    Path path = join(dir, ""), parent = {.s = {dir[0] == '/' ? '/' : '.'}}; // join: a slash at the end as well
    for (char *p = path.s + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        if (mkdir(path.s, 0777) == 0)
            sync_directory(parent.s); // or a crash could lose the directory with its checkpoints
        else if (errno != EEXIST)
            fail(EXIT_USAGE, "cannot make the directory %s: %s", path.s, strerror(errno));
        parent = path;
        *p = '/';
    }
}

void checkpoint_lock(Comm *c, const char *dir) {
    Path path = join(dir, ".lock");
    if (c->rank == 0) {
        make_directories(dir);
        lock_fd = open(path.s, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (lock_fd < 0) fail(EXIT_USAGE, "cannot save into %s: %s", dir, strerror(errno));
        if (TEMP_FAILURE_RETRY(flock(lock_fd, LOCK_EX | LOCK_NB))) {
            if (errno == EWOULDBLOCK)
                fail(EXIT_USAGE, "another running program saves into %s; give this one a directory of its own",
                     dir);
            fprintf(stderr, "train: %s cannot be locked (%s): nothing keeps a second run from saving there\n",
                    dir, strerror(errno));
        }
    }
    comm_wait(comm_barrier(c));
}

// The file stays: were it removed, two runs could hold locks on two files of that name.
void checkpoint_unlock(void) {
    if (lock_fd >= 0) close(lock_fd);
    lock_fd = -1;
}

// ---------------------------------------------------------------------------------------------------------
// Saving

// The first thing that went wrong on this rank.
typedef struct {
    char text[PATH_MAX + 200];
} Failure;

static bool failed(Failure *f, const char *what, const char *path) {
    if (!f->text[0]) snprintf(f->text, sizeof f->text, "cannot %s %s: %s", what, path, strerror(errno));
    return false;
}

// Did every rank come this far? If not, the first that failed says why.
static bool agree(Comm *c, const Failure *f) {
    if (comm_all_true(c, !f->text[0])) return true;
    int first = -(int)comm_max(c, f->text[0] ? -c->rank : -c->size);
    if (c->rank == first) fprintf(stderr, "train: %s\n", f->text);
    return false;
}

static bool write_all(int fd, const void *data, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n =
            TEMP_FAILURE_RETRY(pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done)));
        if (n == 0) errno = EIO;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

// Some file systems tell only here that the data did not reach the disk.
static bool sync_and_close(int fd) {
    bool ok = TEMP_FAILURE_RETRY(fsync(fd)) == 0;
    int error = errno;
    if (close(fd) && errno != EINTR && ok) return false;
    errno = error;
    return ok;
}

static size_t elements(const TensorInfo *t) {
    size_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

// The length of the header as 8 bytes, the header, and spaces up to a multiple of 8. Returns its bytes in
// *size.
static char *build_header(const TensorFile *file, size_t *size) {
    cJSON *header = cJSON_CreateObject();
    cJSON *meta = cJSON_AddObjectToObject(header, "__metadata__");
    for (int i = 0; i < file->n_meta; i++)
        cJSON_AddStringToObject(meta, file->meta[i].key, file->meta[i].value);
    size_t begin = 0;
    for (int i = 0; i < file->n_tensors; i++) {
        const TensorInfo *t = &file->tensors[i];
        size_t end = begin + sizeof(float) * elements(t);
        cJSON *tensor = cJSON_AddObjectToObject(header, t->name);
        cJSON_AddStringToObject(tensor, "dtype", "F32");
        cJSON *shape = cJSON_AddArrayToObject(tensor, "shape");
        for (int d = 0; d < t->ndim; d++) cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)t->shape[d]));
        cJSON *offsets = cJSON_AddArrayToObject(tensor, "data_offsets");
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
        cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)end));
        begin = end;
    }
    char *json = cJSON_PrintUnformatted(header);
    cJSON_Delete(header);
    if (!json) fail(EXIT_RUNTIME, "no memory for the header of %s", file->name);
    uint64_t length = strlen(json), padded = (length + 7) / 8 * 8;
    *size = 8 + padded;
    char *bytes = allocate(*size);
    memcpy(bytes, &padded, 8);
    memcpy(bytes + 8, json, length);
    memset(bytes + 8 + length, ' ', padded - length);
    cJSON_free(json);
    return bytes;
}

// A piece on its way into the file: its next run, as a position in the file.
typedef struct {
    size_t position, run, stride, runs; // bytes, bytes, bytes, how many are left
    const char *data;
} Cursor;

static int by_position(const void *a, const void *b) {
    const Cursor *x = a, *y = b;
    return (x->position > y->position) - (x->position < y->position);
}

// Restores the heap's order (least position on top) after the top has moved on.
static void sift(Cursor *heap, int n) {
    for (int i = 0, least = 0;; i = least) {
        for (int child = 2 * i + 1; child <= 2 * i + 2; child++)
            if (child < n && heap[child].position < heap[least].position) least = child;
        if (least == i) return;
        Cursor t = heap[i];
        heap[i] = heap[least];
        heap[least] = t;
    }
}

// Writes this rank's pieces in the file's order, whichever piece a run comes from, so that all that touch are
// joined.
static bool write_pieces(int fd, size_t data, const TensorFile *file) {
    size_t *begin = allocate(sizeof(size_t) * (size_t)file->n_tensors);
    for (int i = 0; i < file->n_tensors; i++) {
        begin[i] = data;
        data += sizeof(float) * elements(&file->tensors[i]);
    }
    Cursor *heap = allocate(sizeof(Cursor) * (size_t)file->n_pieces);
    int n = 0;
    for (int i = 0; i < file->n_pieces; i++) {
        const Piece *p = &file->pieces[i];
        if (p->run && p->runs)
            heap[n++] = (Cursor){.position = begin[p->tensor] + sizeof(float) * p->offset,
                                 .run = sizeof(float) * p->run,
                                 .stride = sizeof(float) * p->stride,
                                 .runs = p->runs,
                                 .data = (const char *)p->data};
    }
    if (n) qsort(heap, (size_t)n, sizeof *heap, by_position); // sorted, it is a heap

    char *bytes = (char *)block;
    size_t start = 0, used = 0; // the block holds the file's bytes [start, start + used)
    bool ok = true;
    while (ok && n) {
        Cursor *c = &heap[0];
        for (size_t done = 0; ok && done < c->run;) {
            if (used == sizeof block || start + used != c->position + done) {
                ok = write_all(fd, bytes, used, start);
                start = c->position + done;
                used = 0;
            }
            size_t part = c->run - done < sizeof block - used ? c->run - done : sizeof block - used;
            device_copy_out(bytes + used, c->data + done, part);
            used += part;
            done += part;
        }
        c->position += c->stride;
        c->data += c->run;
        if (--c->runs == 0) heap[0] = heap[--n];
        sift(heap, n);
    }
    ok = ok && write_all(fd, bytes, used, start);
    int error = errno;
    free(heap);
    free(begin);
    errno = error;
    return ok;
}

// Rank 0 makes the file with its header and its full length; then all write into it.
static bool write_file(Comm *c, const char *dir, const TensorFile *file, Failure *failure) {
    Path path = join(dir, file->name);
    int fd = -1;
    size_t header_size = 0, total = 0, mine = 0;
    for (int i = 0; i < file->n_tensors; i++) total += elements(&file->tensors[i]);
    for (int i = 0; i < file->n_pieces; i++) mine += file->pieces[i].run * file->pieces[i].runs;
    if (comm_sum(c, (double)mine) <
        (double)total) // a hole would read as zeros: a mistake in the caller's pieces
        fail_all(EXIT_RUNTIME, "%s: the ranks hold fewer elements than its tensors have, %zu", path.s, total);
    if (c->rank == 0) {
        char *header = build_header(file, &header_size);
        fd = open(path.s, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0 || !write_all(fd, header, header_size, 0) ||
            TEMP_FAILURE_RETRY(ftruncate(fd, (off_t)(header_size + sizeof(float) * total))))
            failed(failure, "write", path.s);
        free(header);
    }
    header_size = (size_t)comm_max(c, (double)header_size);
    bool ok = agree(c, failure);
    if (ok) {
        if (c->rank != 0) fd = open(path.s, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || !write_pieces(fd, header_size, file)) failed(failure, "write", path.s);
    }
    if (fd >= 0 && !sync_and_close(fd)) failed(failure, "write", path.s);
    return ok && agree(c, failure);
}

static bool write_marker(const char *checkpoint, long step, Failure *failure) {
    Path path = join(checkpoint, MARKER);
    int fd = open(path.s, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    char text[32];
    bool ok = fd >= 0 && write_all(fd, text, (size_t)snprintf(text, sizeof text, "%ld\n", step), 0);
    if (!ok) failed(failure, "write", path.s);
    if (fd >= 0 && !sync_and_close(fd)) ok = failed(failure, "write", path.s);
    return ok && (sync_directory(checkpoint) || failed(failure, "sync", checkpoint));
}

// From written and synced to marked: the only part of a save that an earlier checkpoint of the same step can
// notice.
static void publish(const char *dir, long step, Failure *failure) {
    Path partial = step_path(dir, step, PARTIAL), whole = step_path(dir, step, STEP),
         old = step_path(dir, step, OLD);
    if (!sync_directory(partial.s)) {
        failed(failure, "sync", partial.s);
        return;
    }
    bool again = rename(whole.s, old.s) == 0;
    if (!again && errno != ENOENT) {
        failed(failure, "rename", whole.s);
        return;
    }
    if (rename(partial.s, whole.s))
        failed(failure, "rename", partial.s);
    else if (!sync_directory(dir))
        failed(failure, "sync", dir);
    else if (write_marker(whole.s, step, failure)) {
        if (again) remove_checkpoint(old.s);
        return;
    }
    remove_checkpoint(whole.s);
    if (again) rename(old.s, whole.s);
}

bool checkpoint_save(Comm *c, const char *dir, long step, const TensorFile *files, int n_files, int keep) {
    Path partial = step_path(dir, step, PARTIAL);
    Failure failure = {.text = ""};
    if (c->rank == 0) {
        tidy(dir);
        if (mkdir(partial.s, 0777)) failed(&failure, "make", partial.s);
    }
    bool ok = agree(c, &failure);
    for (int i = 0; i < n_files && ok; i++) ok = write_file(c, partial.s, &files[i], &failure);
    if (ok) {
        if (c->rank == 0) publish(dir, step, &failure);
        ok = agree(c, &failure);
    }
    if (c->rank == 0) {
        if (ok)
            prune(dir, step, keep);
        else
            remove_checkpoint(partial.s);
    }
    comm_wait(comm_barrier(c)); // what this call leaves on the disk is there on every rank's return
    return ok;
}

// ---------------------------------------------------------------------------------------------------------
// Finding

// Does path look like DIR/step-N? Then the whole checkpoint in DIR with the nearest step is worth naming.
_Noreturn static void fail_naming_nearest(const char *path, const char *what) {
    Path p = join(path, ".");
    char *end = strrchr(p.s, '/');
    while (end > p.s && *end == '/') *end-- = 0;
    char *slash = strrchr(p.s, '/');
    const char *name = slash ? slash + 1 : p.s;
    long step, nearest = -1;
    Kind kind, nearest_kind = STEP;
    if (parse_name(name, &step, &kind)) {
        Path parent = {.s = "."};
        if (slash) snprintf(parent.s, sizeof parent.s, "%.*s", (int)(slash - p.s), p.s);
        Found *found;
        int n = scan(parent.s, &found);
        for (int i = 0; i < n; i++)
            if (found[i].kind != PARTIAL && found[i].marker >= 0 &&
                (nearest < 0 || labs(found[i].step - step) < labs(nearest - step)))
                nearest = found[i].step, nearest_kind = found[i].kind;
        free(found);
        if (nearest >= 0)
            fail_all(EXIT_USAGE, "%s %s; nearest: %s", p.s, what, step_path(parent.s, nearest, nearest_kind).s);
    }
    fail_all(EXIT_USAGE, "%s %s", p.s, what);
}

long checkpoint_newest(const char *dir) {
    Found *found;
    long newest = -1;
    for (int i = 0, n = scan(dir, &found); i < n; i++)
        if (found[i].kind == STEP && found[i].marker >= 0) newest = found[i].step;
    free(found);
    return newest;
}

long checkpoint_find(const char *path, char *out, size_t out_size) {
    Path p;
    long step = marker_step(path);
    if (step >= 0) {
        snprintf(p.s, sizeof p.s, "%s", path);
    } else {
        struct stat st;
        if (stat(path, &st)) fail_naming_nearest(path, errno == ENOENT ? "does not exist" : strerror(errno));
        if (!S_ISDIR(st.st_mode)) fail_naming_nearest(path, "is a file, and a checkpoint is a directory");
        if (access(join(path, "weights.safetensors").s, F_OK) == 0) fail_naming_nearest(path, "is incomplete");
        Found *found;
        int n = scan(path, &found), best = -1;
        if (n < 0) fail_all(EXIT_USAGE, "cannot read %s: %s", path, strerror(errno));
        for (int i = 0; i < n; i++)
            if (found[i].kind != PARTIAL && found[i].marker >= 0 &&
                (best < 0 || found[i].step > found[best].step))
                best = i;
        if (best < 0 && n)
            fail_all(EXIT_USAGE, "%s has no whole checkpoint; %s is incomplete", path,
                     step_name(found[n - 1].step, found[n - 1].kind).s);
        if (best < 0) fail_naming_nearest(path, "has no checkpoint");
        step = found[best].step;
        p = step_path(path, step, found[best].kind);
        free(found);
    }
    if (snprintf(out, out_size, "%s", p.s) >= (int)out_size)
        fail_all(EXIT_USAGE, "the path %.60s... is longer than %zu bytes", p.s, out_size - 1);
    return step;
}

// ---------------------------------------------------------------------------------------------------------
// Reading safetensors, ours and others'. Nothing in the header is believed before it is checked.

enum { MAX_DIMS = 8 };
#define MAX_HEADER ((size_t)100 << 20) // the format's own limit

typedef enum { F32, F16, BF16, FILE_DTYPES } FileDType;
static const char *const file_dtype_name[FILE_DTYPES] = {"F32", "F16", "BF16"};
static const size_t file_dtype_size[FILE_DTYPES] = {4, 2, 2};

typedef struct {
    const char *name;
    FileDType dtype;
    int ndim;
    size_t shape[MAX_DIMS];
    size_t elements, begin, end; // bytes from the start of the data
} Tensor;

struct SafeTensors {
    Path path;
    int fd;
    cJSON *header;   // names and metadata live here
    size_t data;     // where it starts in the file
    Tensor *tensors; // by name
    int n;
};

static int by_begin(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const Tensor *)a)->name, ((const Tensor *)b)->name);
}

// Reads all `bytes`; false at the end of the file or an error (errno, 0 at the end).
static bool read_all(int fd, void *data, size_t bytes, size_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = TEMP_FAILURE_RETRY(pread(fd, (char *)data + done, bytes - done, (off_t)(offset + done)));
        if (n == 0) errno = 0;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

// A whole number from 0 to 2⁵³, beyond which a JSON number would not be exact.
static bool whole_number(const cJSON *item, size_t *value) {
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    if (!(x >= 0 && x <= 9007199254740992.0)) return false;
    *value = (size_t)x;
    return (double)*value == x;
}

static bool printable(const char *s) {
    for (; *s; s++)
        if ((unsigned char)*s < ' ' || *s == 127) return false;
    return true;
}

// Checks one entry of the header by itself. Returns what is wrong with it, or NULL.
static const char *parse_tensor(const cJSON *item, size_t data_bytes, Tensor *t) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (!cJSON_IsString(dtype) || !cJSON_IsArray(shape) || !cJSON_IsArray(offsets))
        return "lacks its dtype, shape or data_offsets";
    for (t->dtype = F32; t->dtype < FILE_DTYPES; t->dtype++)
        if (strcmp(dtype->valuestring, file_dtype_name[t->dtype]) == 0) break;
    if (t->dtype == FILE_DTYPES) return "has a dtype that is none of F32, F16 and BF16";
    t->ndim = 0;
    t->elements = 1;
    const cJSON *dim;
    cJSON_ArrayForEach(dim, shape) {
        if (t->ndim == MAX_DIMS) return "has more than 8 dimensions";
        size_t *size = &t->shape[t->ndim++];
        if (!whole_number(dim, size)) return "has a dimension that is no whole number";
        if (__builtin_mul_overflow(t->elements, *size, &t->elements))
            return "has more elements than can be counted";
    }
    if (cJSON_GetArraySize(offsets) != 2 || !whole_number(cJSON_GetArrayItem(offsets, 0), &t->begin) ||
        !whole_number(cJSON_GetArrayItem(offsets, 1), &t->end) || t->begin > t->end)
        return "has data_offsets that are no ascending pair of whole numbers";
    if (t->end > data_bytes) return "reaches past the end of the file";
    size_t bytes;
    if (__builtin_mul_overflow(t->elements, file_dtype_size[t->dtype], &bytes) || bytes != t->end - t->begin)
        return "has data_offsets that do not match its shape and dtype";
    return NULL;
}

SafeTensors *safetensors_open(const char *path) {
    SafeTensors *s = allocate(sizeof *s);
    memset(s, 0, sizeof *s);
    if (snprintf(s->path.s, sizeof s->path.s, "%s", path) >= (int)sizeof s->path.s)
        fail_all(EXIT_USAGE, "the path %.60s... is longer than %d bytes", path, PATH_MAX - 1);
    struct stat st;
    s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe must not make us wait
    if (s->fd < 0 || fstat(s->fd, &st)) fail_all(EXIT_USAGE, "cannot open %s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) fail_all(EXIT_USAGE, "%s is a directory; a safetensors file is wanted", path);
    if (!S_ISREG(st.st_mode)) fail_all(EXIT_USAGE, "%s is no regular file", path);

    size_t file_bytes = (size_t)st.st_size;
    uint64_t length;
    if (file_bytes < 8)
        fail_all(EXIT_USAGE, "%s is cut short: %zu bytes, a safetensors file has 8 and more", path, file_bytes);
    if (!read_all(s->fd, &length, 8, 0)) fail_all(EXIT_USAGE, "cannot read %s: %s", path, strerror(errno));
    if (length > file_bytes - 8 || length > MAX_HEADER)
        fail_all(EXIT_USAGE, "%s is cut short or no safetensors file: a header of %llu bytes in a file of %zu",
                 path, (unsigned long long)length, file_bytes);
    s->data = 8 + (size_t)length;
    char *json = allocate((size_t)length + 1);
    if (!read_all(s->fd, json, (size_t)length, 8))
        fail_all(EXIT_USAGE, "cannot read %s: %s", path, strerror(errno));
    json[length] = 0;
    s->header = cJSON_ParseWithLengthOpts(json, (size_t)length + 1, NULL, true);
    free(json);
    if (!cJSON_IsObject(s->header))
        fail_all(EXIT_USAGE, "%s is no safetensors file: its header is no JSON object", path);

    s->tensors = allocate(sizeof(Tensor) * (size_t)cJSON_GetArraySize(s->header));
    bool has_meta = false;
    const cJSON *item;
    cJSON_ArrayForEach(item, s->header) {
        if (!printable(item->string))
            fail_all(EXIT_USAGE, "%s: a tensor's name has a control character in it", path);
        if (strcmp(item->string, "__metadata__") == 0) {
            const cJSON *value;
            bool strings = cJSON_IsObject(item) && !has_meta;
            cJSON_ArrayForEach(value, item) strings = strings && cJSON_IsString(value);
            if (!strings) fail_all(EXIT_USAGE, "%s: __metadata__ is not one object of strings", path);
            has_meta = true;
            continue;
        }
        Tensor *t = &s->tensors[s->n++];
        t->name = item->string;
        const char *wrong = parse_tensor(item, file_bytes - s->data, t);
        if (wrong) fail_all(EXIT_USAGE, "%s: tensor %.100s %s", path, t->name, wrong);
    }
    // The data has neither overlaps nor gaps, and ends where the file ends.
    qsort(s->tensors, (size_t)s->n, sizeof(Tensor), by_begin);
    size_t end = 0;
    for (int i = 0; i < s->n; end = s->tensors[i++].end)
        if (s->tensors[i].begin != end)
            fail_all(EXIT_USAGE, "%s: tensor %.100s begins at %zu, where the data before it ends at %zu", path,
                     s->tensors[i].name, s->tensors[i].begin, end);
    if (end != file_bytes - s->data)
        fail_all(EXIT_USAGE, "%s: %zu bytes follow the last tensor", path, file_bytes - s->data - end);
    qsort(s->tensors, (size_t)s->n, sizeof(Tensor), by_name);
    for (int i = 1; i < s->n; i++)
        if (by_name(&s->tensors[i - 1], &s->tensors[i]) == 0)
            fail_all(EXIT_USAGE, "%s: two tensors are named %.100s", path, s->tensors[i].name);
    return s;
}

void safetensors_close(SafeTensors *s) {
    close(s->fd);
    cJSON_Delete(s->header);
    free(s->tensors);
    free(s);
}

int safetensors_count(const SafeTensors *s) {
    return s->n;
}

const char *safetensors_name(const SafeTensors *s, int i) {
    return s->tensors[i].name;
}

int safetensors_find(const SafeTensors *s, const char *name) {
    const Tensor key = {.name = name};
    const Tensor *t = bsearch(&key, s->tensors, (size_t)s->n, sizeof(Tensor), by_name);
    return t ? (int)(t - s->tensors) : -1;
}

int safetensors_shape(const SafeTensors *s, int i, const size_t **shape) {
    *shape = s->tensors[i].shape;
    return s->tensors[i].ndim;
}

const char *safetensors_meta(const SafeTensors *s, const char *key) {
    const cJSON *meta = cJSON_GetObjectItemCaseSensitive(s->header, "__metadata__");
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(meta, key));
}

// IEEE 754 half precision: 1 bit of sign, 5 of exponent (bias 15), 10 of mantissa.
static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff, bits;
    if (exponent == 0) { // zero, or a subnormal: mantissa · 2⁻²⁴, exact in fp32
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    bits = sign | (exponent == 31 ? 255 : exponent + 127 - 15) << 23 | mantissa << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Elements [first, first + count) of a tensor. Two-byte values are read into the far half of out and widened
// from the front: element i is written over none that is still to be read.
static void read_elements(SafeTensors *s, const Tensor *t, size_t first, size_t count, float *out) {
    size_t size = file_dtype_size[t->dtype];
    char *raw = (char *)out + (sizeof(float) - size) * count;
    if (!read_all(s->fd, raw, size * count, s->data + t->begin + size * first))
        fail(EXIT_USAGE, "cannot read %s of %s: %s", t->name, s->path.s,
             errno ? strerror(errno) : "the file was cut short");
    if (t->dtype == F32) return;
    for (size_t i = 0; i < count; i++) {
        uint16_t x;
        memcpy(&x, raw + 2 * i, sizeof x);
        out[i] = t->dtype == F16 ? half_to_float(x) : bf16_to_float(x);
    }
}

void safetensors_read(SafeTensors *s, Piece p) {
    const Tensor *t = &s->tensors[p.tensor];
    if (p.run == 0 || p.runs == 0) return;
    if (p.runs == 1 || p.stride == p.run)
        p = (Piece){p.tensor, p.offset, p.run * p.runs, p.run * p.runs, 1, p.data};
    if (p.offset + (p.runs - 1) * p.stride + p.run > t->elements)
        fail(EXIT_USAGE, "%s: tensor %s has %zu elements, fewer than are asked for", s->path.s, t->name,
             t->elements);
    // Short runs are read together with what lies between them: one large read is cheaper than many small ones.
    size_t group = p.stride <= BLOCK ? BLOCK / p.stride : 1;
    for (size_t r = 0, n; r < p.runs; r += n) {
        n = p.runs - r < group ? p.runs - r : group;
        size_t first = p.offset + r * p.stride;
        float *out = p.data + r * p.run;
        if (n == 1) {
            read_elements(s, t, first, p.run, out);
        } else {
            read_elements(s, t, first, (n - 1) * p.stride + p.run, block);
            for (size_t i = 0; i < n; i++) memcpy(out + i * p.run, block + i * p.stride, p.run * sizeof(float));
        }
    }
}

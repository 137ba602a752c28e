// Tokens from files: which T + 1 tokens are sequence number g?
//
//   --data a.bin b.bin, T = 4. The last token of a window is the target of its last input and the first input of the
//   next window, so windows overlap by one token. They never cross from one file into the next.
//
//   a.bin   . . 0 0 0 0 1 1 1 1 2 2 2 2 2 .        b.bin   . 3 3 3 3 4 4 4 4 4
//           └─┘ shift of this epoch, ≤ slack               └ each file has a shift of its own
//
//   epoch e visits the windows in the order perm(0), perm(1), ...: here perhaps 3 0 4 1 2
//
// Everything is computed from (seed, g): no rank keeps a position, so a run resumes at any step, on any layout, and
// sees what it would have seen. A file of n tokens has (n-1)/T windows and slack (n-1) mod T: that many tokens do not
// fit, and the shift, 0 .. slack, decides at which end they are left over.
//
// perm is a Feistel network (Luby and Rackoff, 1988): split an index into two halves (L, R), four times replace it by
// (R, L xor hash(R)). Each round can be undone whatever the hash is, so the whole is a permutation, of the power of four
// that is not less than the number of windows. Where it leads outside, it is applied again until it leads back
// ("cycle walking"; Black and Rogaway, 2002): still a permutation, at most 4 times on average, no memory.
//
// Files are mapped, not read: a process may map a thousand shards, but not keep a thousand files open. They must not
// change meanwhile. Tokens are little-endian, as the machines are.
//
// A shard (.bin) is llm.c's: 256 int32 of header (magic, version, count, zeros), then the tokens.
#include "data.h"
#include "fail.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = 256 * sizeof(int32_t) };

typedef struct {
    const char *name;
    int32_t magic, version;
    size_t token_bytes;
    int vocab;
} Kind;

static const Kind text = {"a text", 0, 0, 1, 256};
static const Kind shards[] = {
    {"a shard of uint16", 20240520, 1, 2, 50257},  // GPT-2's tokens
    {"a shard of uint32", 20240801, 7, 4, 128256}, // Llama 3's
};

typedef struct {
    char *name;
    const Kind *kind;
    void *map; // [bytes]
    size_t bytes;
    const void *tokens; // [n], in the map
    uint64_t n;
    uint64_t first, count; // of which this part has [first, first + count)
    uint64_t windows;      // of this part
} File;

struct Data {
    File *files; // [n_files]
    int n_files;
    size_t T;
    uint64_t seed, tokens, windows;
};

// ---- opening -----------------------------------------------------------------------------------------------------

static const Kind *shard_kind(const char *name, const int32_t *header, size_t bytes) {
    if (bytes < HEADER_BYTES) {
        fail_all(EXIT_USAGE, "%s is cut short: %zu bytes, a shard's header alone has %d", name, bytes,
                 HEADER_BYTES);
    }
    const size_t n_kinds = sizeof shards / sizeof *shards;
    const Kind *kind = shards;
    while (kind < shards + n_kinds && kind->magic != header[0]) kind++;
    if (kind == shards + n_kinds) {
        fail_all(EXIT_USAGE,
                 "%s is no token shard: magic %" PRId32 ", known are %" PRId32 " (uint16) and %" PRId32
                 " (uint32); a text must not be named .bin",
                 name, header[0], shards[0].magic, shards[1].magic);
    }
    if (header[1] != kind->version) {
        fail_all(EXIT_USAGE, "%s: version %" PRId32 " of magic %" PRId32 " is not supported, only %" PRId32,
                 name, header[1], kind->magic, kind->version);
    }
    const size_t held = bytes - HEADER_BYTES;
    if (held != (size_t)header[2] * kind->token_bytes) {
        fail_all(EXIT_USAGE,
                 "%s: the header says %" PRId32 " tokens, the file holds %zu (%zu bytes of %zu each)", name,
                 header[2], held / kind->token_bytes, held, kind->token_bytes);
    }
    return kind;
}

static void file_open(File *f, const char *name) {
    struct stat st;
    // Looked at before it is opened: opening a pipe would wait for its writer.
    if (stat(name, &st) != 0) fail_all(EXIT_USAGE, "cannot open %s: %s", name, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        fail_all(EXIT_USAGE, "%s is a directory; name the files in it, %s%s*.bin say", name, name,
                 name[strlen(name) - 1] == '/' ? "" : "/");
    }
    if (!S_ISREG(st.st_mode)) fail_all(EXIT_USAGE, "%s is not a file on a disk; copy it to one", name);
    if (st.st_size == 0) fail_all(EXIT_USAGE, "%s is empty", name);

    const int fd = open(name, O_RDONLY);
    if (fd < 0) fail_all(EXIT_USAGE, "cannot open %s: %s", name, strerror(errno));
    f->bytes = (size_t)st.st_size;
    f->map = mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (f->map == MAP_FAILED) fail_all(EXIT_USAGE, "cannot map %s: %s", name, strerror(errno));
    close(fd);

    const char *extension = strrchr(name, '.');
    const int is_shard = extension && strcasecmp(extension, ".bin") == 0;
    const size_t header_bytes = is_shard ? HEADER_BYTES : 0;
    f->name = strdup(name);
    f->kind = is_shard ? shard_kind(name, f->map, f->bytes) : &text;
    f->tokens = (const char *)f->map + header_bytes;
    f->n = (f->bytes - header_bytes) / f->kind->token_bytes;
}

static void check_length(const char *where, const char *name, uint64_t n, size_t T) {
    if (n < 2) {
        fail_all(EXIT_USAGE,
                 "%s%s holds %" PRIu64 " tokens; the shortest sequence needs 2, an input and its target", where,
                 name, n);
    }
    if (n <= T) {
        fail_all(EXIT_USAGE,
                 "%s%s holds %" PRIu64
                 " tokens; --seq %zu needs %zu (inputs and their targets); nearest: --seq %" PRIu64,
                 where, name, n, T, T + 1, n - 1);
    }
}

// The files' tokens stand in a row, and the part is cut from that row: a training and a held-out part share no token.
// Where the cut leaves less than a window of a file, that rest is in no window.
static void take_part(Data *d, DataPart part) {
    uint64_t total = 0;
    for (int i = 0; i < d->n_files; i++) total += d->files[i].n;
    const uint64_t cut = total - total / 10;
    const uint64_t begin = part == DATA_LAST_TENTH ? cut : 0;
    const uint64_t end = part == DATA_FIRST_NINE_TENTHS ? cut : total;

    uint64_t start = 0; // of this file, in the row
    for (int i = 0; i < d->n_files; i++) {
        File *f = &d->files[i];
        const uint64_t from = begin > start ? begin : start;
        const uint64_t to = end < start + f->n ? end : start + f->n;
        if (from < to) {
            f->first = from - start;
            f->count = to - from;
            f->windows = (f->count - 1) / d->T;
        }
        d->tokens += f->count;
        d->windows += f->windows;
        start += f->n;
    }
    // Every whole file has a window: a part without one lies within one file, the last.
    if (d->windows == 0) {
        check_length(part == DATA_LAST_TENTH ? "the tenth held out of " : "the nine tenths to train on of ",
                     d->files[d->n_files - 1].name, d->tokens, d->T);
    }
}

Data *data_open(char *const *files, int n_files, size_t T, uint64_t seed, DataPart part) {
    Data *d = calloc(1, sizeof *d);
    d->files = calloc((size_t)n_files, sizeof *d->files);
    d->n_files = n_files;
    d->T = T;
    d->seed = seed;
    for (int i = 0; i < n_files; i++) {
        File *f = &d->files[i];
        file_open(f, files[i]);
        if (f->kind != d->files[0].kind) {
            fail_all(EXIT_USAGE, "%s is %s, %s is %s: one run takes files of one kind", d->files[0].name,
                     d->files[0].kind->name, f->name, f->kind->name);
        }
        check_length("", f->name, f->n, T);
    }
    take_part(d, part);
    return d;
}

void data_close(Data *d) {
    for (int i = 0; i < d->n_files; i++) {
        munmap(d->files[i].map, d->files[i].bytes);
        free(d->files[i].name);
    }
    free(d->files);
    free(d);
}

// ---- what there is -----------------------------------------------------------------------------------------------

int data_vocab(const Data *d) {
    return d->files[0].kind->vocab;
}

uint64_t data_tokens(const Data *d) {
    return d->tokens;
}

uint64_t data_windows(const Data *d) {
    return d->windows;
}

// splitmix64's step (Steele, Lea and Flood, 2014): neighbouring numbers in, unrelated numbers out.
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static uint64_t hash(uint64_t a, uint64_t b, uint64_t c) {
    return mix(mix(mix(a) + b) + c);
}

uint64_t data_fingerprint(const Data *d) {
    uint64_t h = 0;
    for (int i = 0; i < d->n_files; i++) {
        const char *slash = strrchr(d->files[i].name, '/');
        for (const char *c = slash ? slash + 1 : d->files[i].name; *c; c++) h = mix(h + (unsigned char)*c);
        h = hash(h, 0, d->files[i].bytes);
    }
    return h;
}

// ---- reading -----------------------------------------------------------------------------------------------------

// A permutation of 0 .. n-1, for each key another.
static uint64_t permute(uint64_t i, uint64_t n, uint64_t seed, uint64_t epoch) {
    unsigned half = 1; // bits in L and in R
    while (half < 32 && n > UINT64_C(1) << 2 * half) half++;
    const uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t L = i >> half, R = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const uint64_t next = L ^ (hash(seed, 4 * epoch + round, R) & mask);
            L = R;
            R = next;
        }
        i = L << half | R;
    } while (i >= n);
    return i;
}

static uint32_t token_at(const File *f, uint64_t i) {
    switch (f->kind->token_bytes) {
    case 1:
        return ((const uint8_t *)f->tokens)[i];
    case 2:
        return ((const uint16_t *)f->tokens)[i];
    default:
        return ((const uint32_t *)f->tokens)[i];
    }
}

// Window w of the files in order, each file shifted as this epoch says; epoch = NULL: not shifted.
static void read_window(const Data *d, uint64_t w, const uint64_t *epoch, int vocab, int32_t *tokens) {
    const File *f = d->files;
    for (; w >= f->windows; f++) w -= f->windows;
    uint64_t first = f->first + w * d->T;
    if (epoch) {
        const uint64_t slack = f->count - 1 - f->windows * d->T;
        first += hash(mix(d->seed), *epoch, (uint64_t)(f - d->files)) % (slack + 1);
    }
    for (size_t t = 0; t <= d->T; t++) {
        const uint32_t token = token_at(f, first + t);
        if (token >= (uint32_t)vocab) {
            fail(EXIT_USAGE,
                 "%s: token %" PRIu64 " is %" PRIu32 ", outside the vocabulary of %d; --vocab %" PRIu64
                 " takes it",
                 f->name, first + t, token, vocab, (uint64_t)token + 1);
        }
        tokens[t] = (int32_t)token;
    }
}

void data_train_sequence(Data *d, uint64_t g, int vocab, int32_t *tokens) {
    const uint64_t epoch = g / d->windows;
    read_window(d, permute(g % d->windows, d->windows, d->seed, epoch), &epoch, vocab, tokens);
}

void data_window(Data *d, uint64_t w, int vocab, int32_t *tokens) {
    read_window(d, w, NULL, vocab, tokens);
}

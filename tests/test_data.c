// The data loader: sequences against the files' own bytes, the order of an epoch, and every way a file can be wrong.
//
// With arguments it is a tool for tests/test_tokenize.py:
//   test_data T FILE…    prints the vocabulary, then the T inputs of each window in file order, a line each
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/data.h"

enum { HEADER = 1024, BIG_VOCAB = 1 << 30 };

// ---- files to test with, all in one directory ---------------------------------------------------------------------

static char dir[] = "/tmp/test_data.XXXXXX";

static int make_dir(void **state) {
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", dir);
    return system(command);
}

// "name" in the directory; the caller does not free it.
static char *path(const char *name) {
    static char paths[4096][64];
    static int n;
    char *p = paths[n++ % 4096];
    snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void append(const char *name, const void *bytes, size_t n) {
    FILE *f = fopen(name, "ab");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static char *text_file(const char *name, const char *bytes, size_t n) {
    char *p = path(name);
    unlink(p);
    append(p, bytes, n);
    return p;
}

static char *shard(const char *name, int32_t magic, int32_t version, int32_t count, const void *tokens,
                   size_t bytes) {
    const int32_t header[256] = {magic, version, count};
    char *p = text_file(name, (const char *)header, sizeof header);
    append(p, tokens, bytes);
    return p;
}

// Tokens first, first + 1, ...
static char *shard16(const char *name, uint16_t first, int n) {
    uint16_t *tokens = malloc((size_t)n * sizeof *tokens);
    for (int i = 0; i < n; i++) tokens[i] = (uint16_t)(first + i);
    char *p = shard(name, 20240520, 1, n, tokens, (size_t)n * sizeof *tokens);
    free(tokens);
    return p;
}

static char *shard32(const char *name, uint32_t first, int n) {
    uint32_t *tokens = malloc((size_t)n * sizeof *tokens);
    for (int i = 0; i < n; i++) tokens[i] = first + (uint32_t)i;
    char *p = shard(name, 20240801, 7, n, tokens, (size_t)n * sizeof *tokens);
    free(tokens);
    return p;
}

// ---- what is read --------------------------------------------------------------------------------------------------

static void text_windows_are_the_files_bytes(void **state) {
    (void)state;
    char bytes[1000];
    for (int i = 0; i < 1000; i++) bytes[i] = (char)(i * 37 + i / 7); // bytes above 127 among them
    char *file = text_file("a.txt", bytes, sizeof bytes);
    Data *d = data_open(&file, 1, 64, 1, DATA_ALL);
    assert_int_equal(data_vocab(d), 256);
    assert_int_equal(data_tokens(d), 1000);
    assert_int_equal(data_windows(d), 999 / 64);
    int32_t tokens[65];
    for (uint64_t w = 0; w < data_windows(d); w++) {
        data_window(d, w, 256, tokens);
        for (uint64_t t = 0; t <= 64; t++) assert_int_equal(tokens[t], (unsigned char)bytes[w * 64 + t]);
    }
    data_close(d);
}

static void shards_of_both_widths(void **state) {
    (void)state;
    int32_t tokens[8];
    char *file = shard16("w.bin", 50000, 22);
    Data *d = data_open(&file, 1, 7, 1, DATA_ALL);
    assert_int_equal(data_vocab(d), 50257);
    assert_int_equal(data_windows(d), 3); // 22 = 3 · 7 + 1
    data_window(d, 2, 50257, tokens);
    for (int t = 0; t < 8; t++) assert_int_equal(tokens[t], 50014 + t);
    data_close(d);

    file = shard32("x.BIN", 128000, 21);
    d = data_open(&file, 1, 7, 1, DATA_ALL);
    assert_int_equal(data_vocab(d), 128256);
    assert_int_equal(data_windows(d), 2); // 21: one short of three windows
    data_window(d, 1, 128256, tokens);
    for (int t = 0; t < 8; t++) assert_int_equal(tokens[t], 128007 + t);
    data_close(d);
}

// One window more at the very last token, and T = 1.
static void the_last_token_counts(void **state) {
    (void)state;
    int32_t tokens[65];
    char *file = shard16("exact.bin", 100, 65);
    Data *d = data_open(&file, 1, 64, 1, DATA_ALL);
    assert_int_equal(data_windows(d), 1);
    for (uint64_t g = 0; g < 5; g++) { // no slack, so no epoch shifts it
        data_train_sequence(d, g, 50257, tokens);
        for (int t = 0; t <= 64; t++) assert_int_equal(tokens[t], 100 + t);
    }
    data_close(d);

    d = data_open(&file, 1, 1, 1, DATA_ALL);
    assert_int_equal(data_windows(d), 64);
    data_window(d, 63, 50257, tokens);
    assert_int_equal(tokens[0], 163);
    assert_int_equal(tokens[1], 164);
    data_close(d);
}

static void windows_do_not_cross_files(void **state) {
    (void)state;
    char *files[] = {shard16("c0.bin", 1000, 20), shard16("c1.bin", 2000, 9), shard16("c2.bin", 3000, 35)};
    Data *d = data_open(files, 3, 8, 5, DATA_ALL);
    assert_int_equal(data_tokens(d), 64);
    assert_int_equal(data_windows(d), 2 + 1 + 4);
    const int first[] = {1000, 1008, 2000, 3000, 3008, 3016, 3024};
    int32_t tokens[9];
    for (uint64_t w = 0; w < 7; w++) {
        data_window(d, w, 50257, tokens);
        for (int t = 0; t < 9; t++) assert_int_equal(tokens[t], first[w] + t);
    }
    for (uint64_t g = 0; g < 700; g++) { // nor do the shifted windows
        data_train_sequence(d, g, 50257, tokens);
        for (int t = 1; t < 9; t++) assert_int_equal(tokens[t], tokens[0] + t);
        const int last = tokens[8] < 2000 ? 1019 : tokens[8] < 3000 ? 2008 : 3034;
        assert_true(tokens[8] <= last);
    }
    data_close(d);
}

// Makes the file larger without using more of the disk: zeros, but for three marks at each of the places, in bytes.
static void stretch(const char *file, int64_t bytes, const void *marks, size_t n, int64_t at0, int64_t at1) {
    const int fd = open(file, O_WRONLY);
    assert_int_equal(ftruncate(fd, bytes), 0);
    assert_int_equal(pwrite(fd, marks, n, at0), n);
    assert_int_equal(pwrite(fd, marks, n, at1), n);
    close(fd);
}

static void shards_beyond_2_gib(void **state) {
    (void)state;
    const int64_t bytes = INT64_C(3) << 30, n = (bytes - HEADER) / 2, place = (INT64_C(1) << 31) + 100;
    const uint16_t marks[3] = {11, 12, 13};
    char *file = shard("big.bin", 20240520, 1, (int32_t)n, "", 0);
    stretch(file, bytes, marks, sizeof marks, place, bytes - (int64_t)sizeof marks);

    const size_t T = 512;
    Data *d = data_open(&file, 1, T, 1, DATA_ALL);
    assert_int_equal(data_tokens(d), n);
    int32_t tokens[513];
    const uint64_t at = (uint64_t)(place - HEADER) / 2; // as a token
    data_window(d, at / T, 50257, tokens);
    for (uint64_t t = 0; t <= T; t++) {
        assert_int_equal(tokens[t], t >= at % T && t < at % T + 3 ? 11 + t - at % T : 0);
    }
    data_close(d);

    d = data_open(&file, 1, 1, 1, DATA_ALL);
    data_window(d, data_windows(d) - 1, 50257, tokens);
    assert_int_equal(tokens[0], 12);
    assert_int_equal(tokens[1], 13);
    data_close(d);
    unlink(file);
}

// A text has a token a byte, so that its token numbers pass 2³² too.
static void texts_beyond_4_gib(void **state) {
    (void)state;
    const int64_t bytes = INT64_C(5) << 30, place = bytes - bytes / 10;
    char *file = text_file("big.txt", "", 0);
    stretch(file, bytes, "abc", 3, place, bytes - 3);
    int32_t tokens[2];
    Data *d = data_open(&file, 1, 1, 1, DATA_ALL);
    assert_int_equal(data_tokens(d), bytes);
    data_window(d, (uint64_t)bytes - 2, 256, tokens);
    assert_int_equal(tokens[0], 'b');
    assert_int_equal(tokens[1], 'c');
    data_window(d, (uint64_t)place, 256, tokens);
    assert_int_equal(tokens[0], 'a');
    for (uint64_t g = 0; g < 4 * data_windows(d); g += data_windows(d) / 3) {
        data_train_sequence(d, g, 256, tokens);
    }
    data_close(d);

    d = data_open(&file, 1, 1, 1, DATA_LAST_TENTH);
    assert_int_equal(data_tokens(d), bytes / 10);
    data_window(d, 0, 256, tokens);
    assert_int_equal(tokens[0], 'a');
    assert_int_equal(tokens[1], 'b');
    data_close(d);
    unlink(file);
}

// ---- the order of an epoch -----------------------------------------------------------------------------------------

// With T = 1 and tokens 0, 1, 2, ... a sequence's first token is its window.
static uint64_t window_of(Data *d, uint64_t g) {
    int32_t tokens[2];
    data_train_sequence(d, g, BIG_VOCAB, tokens);
    assert_int_equal(tokens[1], tokens[0] + 1);
    return (uint64_t)tokens[0];
}

static void assert_each_once(Data *d, uint64_t epoch) {
    const uint64_t n = data_windows(d);
    char *seen = calloc(n, 1);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t w = window_of(d, epoch * n + i);
        assert_true(w < n);
        assert_false(seen[w]);
        seen[w] = 1;
    }
    free(seen);
}

static void an_epoch_sees_each_window_once(void **state) {
    (void)state;
    const int sizes[] = {255, 256, 257, 1000, 4095, 4096, 4097, 65535, 65536, 65537};
    for (int i = 0; i < 80 + 10; i++) {
        char *file = shard32("perm.bin", 0, (i < 80 ? i + 1 : sizes[i - 80]) + 1);
        Data *d = data_open(&file, 1, 1, 7, DATA_ALL);
        for (uint64_t epoch = 0; epoch < 3; epoch++) assert_each_once(d, epoch);
        data_close(d);
    }
}

static int n_equal(Data *a, uint64_t epoch_a, Data *b, uint64_t epoch_b, int n) {
    int equal = 0;
    for (uint64_t i = 0; i < (uint64_t)n; i++) {
        equal += window_of(a, epoch_a * (uint64_t)n + i) == window_of(b, epoch_b * (uint64_t)n + i);
    }
    return equal;
}

// Two unrelated orders of n windows agree in about one place, a good one has about one place where w + 1 follows w.
static void orders_of_seeds_and_epochs_are_unrelated(void **state) {
    (void)state;
    enum { N = 5000, FEW = 12 };
    char *file = shard32("order.bin", 0, N + 1);
    Data *d1 = data_open(&file, 1, 1, 1, DATA_ALL), *d2 = data_open(&file, 1, 1, 2, DATA_ALL);
    Data *again = data_open(&file, 1, 1, 1, DATA_ALL);
    for (uint64_t epoch = 0; epoch < 4; epoch++) {
        assert_int_equal(n_equal(d1, epoch, again, epoch, N), N);
        assert_true(n_equal(d1, epoch, d1, epoch + 1, N) < FEW);
        assert_true(n_equal(d1, epoch, d2, epoch, N) < FEW);
        assert_true(n_equal(d1, epoch, d2, epoch + 1, N) < FEW); // seeds 1, 2 and epochs e, e + 1 do not cancel
        assert_true(n_equal(d1, epoch + 1, d2, epoch, N) < FEW);
        int fixed = 0, followed = 0;
        double first_half = 0; // mean window of the first half of the epoch: N/2, give or take √(N/12)
        for (uint64_t i = 0; i < N; i++) {
            const uint64_t w = window_of(d1, epoch * N + i);
            fixed += w == i;
            followed += i + 1 < N && window_of(d1, epoch * N + i + 1) == w + 1;
            if (i < N / 2) first_half += (double)w / (N / 2.0);
        }
        assert_true(fixed < FEW && followed < FEW);
        assert_true(first_half > 0.48 * N && first_half < 0.52 * N);
    }
    data_close(d1);
    data_close(d2);
    data_close(again);
}

static void each_epoch_shifts_within_the_slack(void **state) {
    (void)state;
    enum { T = 10, WINDOWS = 6, SLACK = 4, EPOCHS = 60 };
    char *file = shard16("shift.bin", 0, WINDOWS * T + 1 + SLACK);
    Data *d = data_open(&file, 1, T, 3, DATA_ALL);
    assert_int_equal(data_windows(d), WINDOWS);
    int seen[SLACK + 1] = {0};
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        int count[WINDOWS] = {0}, shift = -1;
        for (uint64_t i = 0; i < WINDOWS; i++) {
            int32_t tokens[T + 1];
            data_train_sequence(d, epoch * WINDOWS + i, 50257, tokens);
            if (i == 0) shift = tokens[0] % T;
            assert_int_equal(tokens[0] % T, shift); // one shift for the whole epoch
            assert_true(shift <= SLACK);
            count[tokens[0] / T]++;
        }
        for (int w = 0; w < WINDOWS; w++) assert_int_equal(count[w], 1);
        seen[shift]++;
    }
    for (int s = 0; s <= SLACK; s++) assert_true(seen[s] > 0 && seen[s] < EPOCHS / 2);
    data_close(d);
}

// ---- the part held out ---------------------------------------------------------------------------------------------

// Marks the tokens (numbers below n) that the windows of a part use, over some epochs.
static void mark(char *const *files, int n_files, DataPart part, char *used, int n) {
    enum { T = 7 };
    Data *d = data_open(files, n_files, T, 9, part);
    assert_int_equal(data_tokens(d), part == DATA_LAST_TENTH ? n / 10 : n - n / 10);
    int32_t tokens[T + 1];
    for (uint64_t g = 0; g < 50 * data_windows(d); g++) {
        data_train_sequence(d, g, 50257, tokens);
        for (int t = 0; t <= T; t++) {
            assert_int_equal(tokens[t], tokens[0] + t);
            used[tokens[t]] = 1;
        }
    }
    for (uint64_t w = 0; w < data_windows(d); w++) data_window(d, w, 50257, tokens);
    data_close(d);
}

static void assert_split(char *const *files, int n_files, int n) {
    char *train = calloc((size_t)n, 1), *held_out = calloc((size_t)n, 1);
    mark(files, n_files, DATA_FIRST_NINE_TENTHS, train, n);
    mark(files, n_files, DATA_LAST_TENTH, held_out, n);
    const int cut = n - n / 10;
    int n_used = 0;
    for (int i = 0; i < n; i++) {
        assert_false(train[i] && i >= cut);
        assert_false(held_out[i] && i < cut);
        n_used += train[i] + held_out[i];
    }
    assert_true(n_used >
                n - 8); // what is left out is less than a window, where the cut falls near a file's edge
    free(train);
    free(held_out);
}

static void the_split_shares_no_token(void **state) {
    (void)state;
    for (int n = 80; n < 100; n++) { // the shift moves the cut past every remainder
        char *one = shard16("s.bin", 0, n);
        assert_split(&one, 1, n);
    }
    for (int n0 = 880; n0 < 920; n0++) { // the cut, at 900, in the first file, on its edge, in the second
        char *two[] = {shard16("s0.bin", 0, n0), shard16("s1.bin", (uint16_t)n0, 1000 - n0)};
        assert_split(two, 2, 1000);
    }
}

static void the_fingerprint_is_of_names_and_sizes(void **state) {
    (void)state;
    mkdir(path("elsewhere"), 0700);
    char *files[] = {
        text_file("p.txt", "0123456789", 10),
        text_file("elsewhere/p.txt", "9876543210", 10),
        text_file("q.txt", "0123456789", 10),
        text_file("p.text", "0123456789x", 11),
        text_file("elsewhere/p.text", "0123456789", 10),
    };
    uint64_t f[6];
    for (int i = 0; i < 6; i++) {
        Data *d = data_open(i == 5 ? files + 2 : files + i, i == 5 ? 2 : 1, 2, 1, DATA_ALL);
        f[i] = data_fingerprint(d);
        data_close(d);
    }
    assert_int_equal(f[0], f[1]); // same name, same size, another directory
    for (int i = 1; i < 6; i++) {
        for (int j = i + 1; j < 6; j++) assert_true(f[i] != f[j]);
    }
}

// ---- what is refused -----------------------------------------------------------------------------------------------

// Opens and reads in a child process; it must end with exit code 2 and one line that contains the expected words.
static void assert_refused(char *const *files, int n_files, size_t T, DataPart part, int vocab,
                           const char *expected) {
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDERR_FILENO);
        Data *d = data_open(files, n_files, T, 1, part);
        int32_t *tokens = malloc((T + 1) * sizeof *tokens);
        for (uint64_t w = 0; w < data_windows(d); w++) data_window(d, w, vocab ? vocab : data_vocab(d), tokens);
        _exit(0);
    }
    close(pipes[1]);
    char said[1024];
    size_t n = 0;
    for (ssize_t more = 1; more > 0 && n<sizeof said - 1; n += more> 0 ? (size_t)more : 0) {
        more = read(pipes[0], said + n, sizeof said - 1 - n);
    }
    said[n] = '\0';
    close(pipes[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    const char *end = strchr(said, '\n');
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 2 || !strstr(said, expected) || !end || end[1] != '\0') {
        fail_msg("status %#x, expected exit code 2 and one line with \"%s\", got \"%s\"", (unsigned)status,
                 expected, said);
    }
}

static void refused(char *file, size_t T, const char *expected) {
    assert_refused(&file, 1, T, DATA_ALL, 0, expected);
}

static void what_is_no_file_is_refused(void **state) {
    (void)state;
    refused(path("absent.txt"), 8, "absent.txt: No such file or directory");
    refused(path("absent.bin"), 8, "absent.bin: No such file or directory");
    refused(dir, 8, "is a directory; name the files in it");
    refused(text_file("empty.txt", "", 0), 8, "empty.txt is empty");
    refused(text_file("empty.bin", "", 0), 8, "empty.bin is empty");
    assert_int_equal(mkfifo(path("fifo.txt"), 0600), 0);
    refused(path("fifo.txt"), 8, "fifo.txt is not a file on a disk");
    if (geteuid() != 0) { // root may read everything
        char *locked = text_file("locked.txt", "0123456789", 10);
        chmod(locked, 0);
        refused(locked, 8, "locked.txt: Permission denied");
    }
}

static void wrong_headers_are_refused(void **state) {
    (void)state;
    uint16_t tokens[100] = {0};
    refused(text_file("cut.bin", "\x48\xd7\x34\x01\x01\x00\x00\x00", 8), 8, "cut.bin is cut short: 8 bytes");
    refused(shard("eval.bin", 20240522, 1, 100, tokens, 200), 8,
            "eval.bin is no token shard: magic 20240522, known are 20240520 (uint16) and 20240801 (uint32)");
    refused(shard("v2.bin", 20240520, 2, 100, tokens, 200), 8, "v2.bin: version 2 of magic 20240520");
    refused(shard("v1.bin", 20240801, 1, 50, tokens, 200), 8, "v1.bin: version 1 of magic 20240801");
    refused(shard("less.bin", 20240520, 1, 101, tokens, 200), 8,
            "less.bin: the header says 101 tokens, the file holds 100");
    refused(shard("more.bin", 20240520, 1, 99, tokens, 200), 8,
            "more.bin: the header says 99 tokens, the file holds 100");
    refused(shard("odd.bin", 20240520, 1, 99, tokens, 199), 8, "odd.bin: the header says 99 tokens");
    refused(shard("wide.bin", 20240801, 7, 100, tokens, 200), 8,
            "wide.bin: the header says 100 tokens, the file holds 50");
    refused(shard("negative.bin", 20240520, 1, -1, tokens, 200), 8, "negative.bin: the header says -1 tokens");
    refused(shard("none.bin", 20240520, 1, 0, tokens, 0), 8, "none.bin holds 0 tokens");
}

static void too_short_is_refused(void **state) {
    (void)state;
    char bytes[200];
    memset(bytes, 'a', sizeof bytes);
    refused(text_file("t64.txt", bytes, 64), 64,
            "t64.txt holds 64 tokens; --seq 64 needs 65 (inputs and their targets); nearest: --seq 63");
    refused(text_file("t1.txt", bytes, 1), 1, "t1.txt holds 1 tokens; the shortest sequence needs 2");
    refused(shard16("b64.bin", 0, 64), 64, "b64.bin holds 64 tokens; --seq 64 needs 65");
    char *files[] = {text_file("long.txt", bytes, 200), text_file("short.txt", bytes, 30)};
    assert_refused(files, 2, 64, DATA_ALL, 0, "short.txt holds 30 tokens; --seq 64 needs 65");

    char *one = text_file("t100.txt", bytes, 100);
    assert_refused(&one, 1, 64, DATA_LAST_TENTH, 0, "t100.txt holds 10 tokens; --seq 64 needs 65");
    assert_refused(&one, 1, 95, DATA_FIRST_NINE_TENTHS, 0, "t100.txt holds 90 tokens; --seq 95 needs 96");
    one = text_file("t9.txt", bytes, 9);
    assert_refused(&one, 1, 4, DATA_LAST_TENTH, 0, "t9.txt holds 0 tokens; the shortest sequence needs 2");
}

static void mixed_kinds_are_refused(void **state) {
    (void)state;
    char bytes[100] = "text";
    char *mixed[] = {shard16("m.bin", 0, 100), text_file("m.txt", bytes, 100)};
    assert_refused(mixed, 2, 8, DATA_ALL, 0, "m.txt is a text: one run takes files of one kind");
    char *widths[] = {shard16("m16.bin", 0, 100), shard32("m32.bin", 0, 100)};
    assert_refused(widths, 2, 8, DATA_ALL, 0, "m16.bin is a shard of uint16");
}

static void tokens_outside_the_vocabulary_are_refused(void **state) {
    (void)state;
    char *file = shard16("v16.bin", 50240, 100); // 50,257 is token 17
    assert_refused(&file, 1, 8, DATA_ALL, 0,
                   "v16.bin: token 17 is 50257, outside the vocabulary of 50257; --vocab 50258 takes it");
    file = shard32("v32.bin", UINT32_MAX - 50, 50); // negative, were it an int
    assert_refused(&file, 1, 8, DATA_ALL, 0, "v32.bin: token 0 is 4294967245, outside");
    file = text_file("v.txt", "abcdefghijklmnopqrstuvwxyz\xff", 27);
    assert_refused(&file, 1, 26, DATA_ALL, 128, "v.txt: token 26 is 255, outside the vocabulary of 128");
}

// ---- the tool --------------------------------------------------------------------------------------------------------

static int print_windows(size_t T, char *const *files, int n_files) {
    Data *d = data_open(files, n_files, T, 1, DATA_ALL);
    int32_t *tokens = malloc((T + 1) * sizeof *tokens);
    printf("%d\n", data_vocab(d));
    for (uint64_t w = 0; w < data_windows(d); w++) {
        data_window(d, w, BIG_VOCAB, tokens);
        for (size_t t = 0; t < T; t++) printf("%" PRId32 "%c", tokens[t], t + 1 < T ? ' ' : '\n');
    }
    free(tokens);
    data_close(d);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 2) return print_windows(strtoul(argv[1], NULL, 10), argv + 2, argc - 2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_windows_are_the_files_bytes),
        cmocka_unit_test(shards_of_both_widths),
        cmocka_unit_test(the_last_token_counts),
        cmocka_unit_test(windows_do_not_cross_files),
        cmocka_unit_test(shards_beyond_2_gib),
        cmocka_unit_test(texts_beyond_4_gib),
        cmocka_unit_test(an_epoch_sees_each_window_once),
        cmocka_unit_test(orders_of_seeds_and_epochs_are_unrelated),
        cmocka_unit_test(each_epoch_shifts_within_the_slack),
        cmocka_unit_test(the_split_shares_no_token),
        cmocka_unit_test(the_fingerprint_is_of_names_and_sizes),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(wrong_headers_are_refused),
        cmocka_unit_test(too_short_is_refused),
        cmocka_unit_test(mixed_kinds_are_refused),
        cmocka_unit_test(tokens_outside_the_vocabulary_are_refused),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}

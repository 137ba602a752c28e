// What happened when: kept in memory while the run goes on, written at its end.
//
// A rank's clock is its own, and starts anywhere. So before and after the run each rank asks rank 0 for the time:
//
//     offset     o0 ------- in between, on a straight line ------- o1       what to add to this clock to get rank 0's
//                trace_open                              trace_close
//
// A clock that runs too fast by the same amount all the time is set right by that; what is left is the error of the two
// measurements, half a message's way there and back at most. Ranks of one host read the same clock, and ask nobody.
//
// On a GPU a moment is an event of a stream, and its time is known once the stream has come there. They are asked for some
// thousands of spans at a time, of the oldest, so that the host need not wait for what it has just queued.
//
// The file: Chrome's trace-event format (Duff & others, "Trace Event Format", 2016), an event a line. Each rank writes
// its own lines, sends them to rank 0 some thousands at a time, and rank 0 puts them into the file.
#include "trace.h"
#include "device.h"
#include "fail.h"
#include "log.h"
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    Moment began, ended;
    const char *track, *name;
    long number;
    size_t bytes;
} Span;

typedef struct { // a category's live bytes, from then on
    Moment at;
    bool together; // with the one before, and at its moment
    int category;
    size_t bytes;
} Change;

typedef struct {
    double at, offset; // on this rank's clock; seconds from there to the trace's time
} ClockReading;

enum { LINES_AT_ONCE = 4096, MOMENTS_AT_ONCE = 2048 };

static bool recording;
static const char *file_path;
static FILE *file; // rank 0's
static ClockReading opened, closed;
static double origin; // on rank 0's clock: where the trace's time begins
static Span *spans;
static Change *changes;
static size_t n_spans, span_room, n_changes, change_room;
static size_t known_spans, known_changes; // the first ones: their moments are times
static size_t live[MEM_CATEGORIES];       // as in the last sample
static bool used[MEM_CATEGORIES];         // was it ever more than nothing?

// items, with room for one more.
static void *with_room(void *items, size_t count, size_t *room, size_t size) {
    if (count < *room) return items;
    *room = *room ? 2 * *room : 1024;
    items = realloc(items, *room * size);
    if (!items)
        fail(EXIT_RUNTIME, "--trace %s: no memory for %zu events; trace fewer --steps", file_path, *room);
    return items;
}

static ClockReading read_clock(Comm *world) {
    double offset = comm_host().hosts > 1 ? comm_clock_offset(world) : 0;
    return (ClockReading){seconds_now(), offset - origin};
}

void trace_open(Comm *world, const char *path) {
    if (!path) return;
    file_path = path;
    if (world->rank == 0 && !(file = fopen(path, "w")))
        fail(EXIT_USAGE, "--trace %s: %s", path, strerror(errno));
    origin = seconds_now();
    comm_wait(comm_host_broadcast(world, &origin, 1, DTYPE_F64, 0));
    opened = read_clock(world);
    recording = true;
    trace_memory();
}

static void become_known(Moment *m) {
    *m = (Moment){device_moment_seconds(*m), NULL};
}

// All but the newest `rest` spans and changes get their times; where some are to be left, without waiting for any.
static void find_times(size_t rest) {
    for (; known_spans + rest < n_spans; known_spans++) {
        Span *s = &spans[known_spans];
        if (rest && !device_moment_reached(s->ended)) break;
        become_known(&s->began);
        become_known(&s->ended);
        if (s->ended.seconds < s->began.seconds) s->ended = s->began; // by the error of two clocks
    }
    for (; known_changes + rest < n_changes; known_changes++) {
        Change *c = &changes[known_changes];
        if (rest && !c->together && !device_moment_reached(c->at)) break;
        if (c->together)
            c->at = c[-1].at;
        else
            become_known(&c->at);
    }
}

Moment trace_begin(void) {
    return recording ? device_moment() : (Moment){0};
}

void trace_end(const char *track, const char *name, long number, Moment began, size_t bytes) {
    if (recording) trace_span(track, name, number, began, device_moment(), bytes);
}

void trace_span(const char *track, const char *name, long number, Moment began, Moment ended, size_t bytes) {
    if (!recording) return;
    if (began.seconds < opened.at) { // it began before the trace did: its events alone are given back
        become_known(&began);
        become_known(&ended);
        return;
    }
    spans = with_room(spans, n_spans, &span_room, sizeof *spans);
    spans[n_spans++] = (Span){began, ended, track, name, number, bytes};
    if (n_spans - known_spans > 2 * MOMENTS_AT_ONCE) find_times(MOMENTS_AT_ONCE);
}

void trace_memory(void) {
    if (!recording) return;
    Moment now = {0};
    bool together = false;
    for (int i = 0; i < MEM_CATEGORIES; i++) {
        if (ledger.live[i] == live[i]) continue;
        if (!together) now = device_moment();
        changes = with_room(changes, n_changes, &change_room, sizeof *changes);
        changes[n_changes++] = (Change){now, together, i, live[i] = ledger.live[i]};
        used[i] |= live[i] > 0;
        together = true;
    }
}

// ---- the file -------------------------------------------------------------------------------------------------------

// The threads of this rank in the trace: "compute", then the others by name.
typedef struct {
    const char **name;
    size_t count, room;
} Tracks;

static int by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static size_t track_number(const Tracks *t, const char *name) { // count: not there
    size_t i = 0;
    while (i < t->count && t->name[i] != name && strcmp(t->name[i], name) != 0) i++;
    return i;
}

static Tracks find_tracks(void) {
    Tracks t = {0};
    for (size_t i = 0; i <= n_spans; i++) {
        const char *name = i == 0 ? "compute" : spans[i - 1].track;
        if (track_number(&t, name) < t.count) continue;
        t.name = with_room(t.name, t.count, &t.room, sizeof *t.name);
        t.name[t.count++] = name;
    }
    qsort(t.name + 1, t.count - 1, sizeof *t.name, by_name);
    return t;
}

// A span stands before those inside it.
static int by_time(const void *a, const void *b) {
    const Span *x = a, *y = b;
    if (x->began.seconds != y->began.seconds) return x->began.seconds < y->began.seconds ? -1 : 1;
    return x->ended.seconds > y->ended.seconds ? -1 : x->ended.seconds < y->ended.seconds;
}

// Nanoseconds from the trace's beginning: whole ones, so that what lies inside another span still does when rounded.
static int64_t trace_time(double at) {
    double way = closed.at > opened.at ? (at - opened.at) / (closed.at - opened.at) : 0;
    return llround(1e9 * (at + opened.offset + way * (closed.offset - opened.offset)));
}

static void put_string(FILE *out, const char *s) {
    putc('"', out);
    for (; *s; s++) {
        if ((unsigned char)*s < ' ')
            fprintf(out, "\\u%04x", (unsigned)*s);
        else
            fprintf(out, *s == '"' || *s == '\\' ? "\\%c" : "%c", *s);
    }
    putc('"', out);
}

static void put_time(FILE *out, const char *key, int64_t ns) { // in microseconds, whatever the locale
    fprintf(out, ",\"%s\":%s%lld.%03lld", key, ns < 0 ? "-" : "", llabs(ns) / 1000, llabs(ns) % 1000);
}

static void put_names(FILE *out, int rank, const Tracks *t) {
    fprintf(out, "%s\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_name\",\"args\":{\"name\":\"rank %d\"}}",
            rank ? "," : "", rank, rank);
    fprintf(out, ",\n{\"ph\":\"M\",\"pid\":%d,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
            rank, rank);
    for (size_t i = 0; i < t->count; i++) {
        fprintf(out,
                ",\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%zu,\"name\":\"thread_name\",\"args\":{\"name\":", rank,
                i);
        put_string(out, t->name[i]);
        fprintf(out, "}},\n{\"ph\":\"M\",\"pid\":%d,\"tid\":%zu,\"name\":\"thread_sort_index\"", rank, i);
        fprintf(out, ",\"args\":{\"sort_index\":%zu}}", i);
    }
}

static void put_span(FILE *out, int rank, const Tracks *t, const Span *s) {
    int64_t began = trace_time(s->began.seconds);
    fprintf(out, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%zu", rank, track_number(t, s->track));
    put_time(out, "ts", began);
    put_time(out, "dur", trace_time(s->ended.seconds) - began);
    fprintf(out, ",\"name\":");
    put_string(out, s->name);
    fprintf(out, ",\"args\":{");
    if (s->number >= 0) fprintf(out, "\"number\":%ld%s", s->number, s->bytes ? "," : "");
    if (s->bytes) fprintf(out, "\"bytes\":%zu", s->bytes);
    fprintf(out, "}}");
}

// What is live after change i.
static void put_memory(FILE *out, int rank, size_t i) {
    static size_t now[MEM_CATEGORIES];
    now[changes[i].category] = changes[i].bytes;
    if (i + 1 < n_changes && changes[i + 1].together) return; // one sample
    fprintf(out, ",\n{\"ph\":\"C\",\"pid\":%d,\"name\":\"memory\"", rank);
    put_time(out, "ts", trace_time(changes[i].at.seconds));
    const char *separator = ",\"args\":{";
    for (int c = 0; c < MEM_CATEGORIES; c++) {
        if (!used[c]) continue;
        fprintf(out, "%s\"%s\":%zu", separator, mem_name[c], now[c]);
        separator = ",";
    }
    fprintf(out, "}}");
}

// The next lines of this rank: *text, to be freed; returns how many bytes, 0 at the end. part counts from 0.
static size_t next_lines(int rank, const Tracks *t, size_t part, char **text) {
    size_t bytes = 0, from = part * LINES_AT_ONCE, to = from + LINES_AT_ONCE;
    FILE *out = open_memstream(text, &bytes);
    if (!out) fail(EXIT_RUNTIME, "--trace %s: %s", file_path, strerror(errno));
    if (part == 0) put_names(out, rank, t);
    for (size_t i = from; i < to && i < n_spans; i++) put_span(out, rank, t, &spans[i]);
    for (size_t i = from; i < to && i < n_changes; i++) put_memory(out, rank, i);
    if (fclose(out) != 0) fail(EXIT_RUNTIME, "--trace %s: %s", file_path, strerror(errno));
    return bytes;
}

static void write_file(const char *text, size_t bytes) {
    if (fwrite(text, 1, bytes, file) != bytes || fflush(file) != 0)
        fail(EXIT_RUNTIME, "--trace %s: %s", file_path, strerror(errno));
}

// Rank r's lines, from there to rank 0 and into the file.
static void write_rank(Comm *world, int r, const Tracks *t) {
    int64_t bytes = 1;
    for (size_t part = 0; bytes > 0; part++) {
        char *text = NULL;
        if (world->rank == r) bytes = (int64_t)next_lines(r, t, part, &text);
        comm_wait(comm_host_broadcast(world, &bytes, 1, DTYPE_I64, r));
        if (world->rank != r) text = host_alloc((size_t)bytes, 1);
        comm_wait(comm_host_broadcast(world, text, (size_t)bytes, DTYPE_U8, r));
        if (world->rank == 0) write_file(text, (size_t)bytes);
        free(text);
    }
}

void trace_close(Comm *world) {
    if (!recording) return;
    recording = false;
    find_times(0);
    closed = read_clock(world);
    qsort(spans, n_spans, sizeof *spans, by_time);
    Tracks t = find_tracks();
    static const char first[] = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", last[] = "\n]}\n";
    if (world->rank == 0) write_file(first, strlen(first));
    for (int r = 0; r < world->size; r++) write_rank(world, r, &t);
    if (world->rank == 0) {
        write_file(last, strlen(last));
        if (fclose(file) != 0) fail(EXIT_RUNTIME, "--trace %s: %s", file_path, strerror(errno));
    }
    free(t.name);
    free(spans);
    free(changes);
}

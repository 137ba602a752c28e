// The log file and the terminal: rank 0 writes, the others keep quiet.
#include "log.h"
#include "fail.h"
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static FILE *file;
static const char *file_path;
static bool quiet;
static int status_width; // characters of the status line that stand on the terminal

void log_open(const char *path, bool append) {
    if (!path || launch_rank() != 0) return;
    file = fopen(path, append ? "a" : "w");
    file_path = path;
    if (!file) fail(EXIT_USAGE, "--log %s: %s", path, strerror(errno));
}

void log_event(cJSON *event) {
    if (file) {
        char *text = cJSON_PrintUnformatted(event);
        if (!text || fprintf(file, "%s\n", text) < 0 || fflush(file) != 0)
            fail(EXIT_RUNTIME, "--log %s: %s", file_path, strerror(errno));
        cJSON_free(text);
    }
    cJSON_Delete(event);
}

void log_close(void) {
    if (file && fclose(file) != 0) fail(EXIT_RUNTIME, "--log %s: %s", file_path, strerror(errno));
    file = NULL;
}

void say_quiet(bool on) {
    quiet = on;
}

void say(const char *format, ...) {
    if (quiet || launch_rank() != 0) return;
    if (status_width) printf("\n");
    status_width = 0;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    fflush(stdout);
}

// mpirun gives its ranks terminals of their own, whatever its output goes to: --ranks says what is at the other end.
static bool on_terminal(void) {
    const char *told = getenv("TRAIN_ON_TERMINAL");
    return told ? *told == '1' : launch_size() == 1 && isatty(STDOUT_FILENO);
}

void status_line(bool keep, const char *format, ...) {
    if (quiet || launch_rank() != 0) return;
    bool terminal = on_terminal();
    va_list args;
    va_start(args, format);
    if (terminal) printf("\r");
    int width = vprintf(format, args);
    va_end(args);
    if (terminal && width < status_width) printf("%*s", status_width - width, "");
    if (keep || !terminal) printf("\n");
    status_width = keep || !terminal ? 0 : width;
    fflush(stdout);
}

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

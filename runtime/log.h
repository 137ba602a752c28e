// What a run says: JSON lines for programs (--log), one line of status for people.
#ifndef LOG_H
#define LOG_H

#include <stdbool.h>
#include <cjson/cJSON.h>

// Only rank 0 opens it; without a path every log_event is discarded. A resumed run appends to what is there. fail (exit 2)
// names a path that cannot be written.
void log_open(const char *path, bool append);
// Writes the object as one line and frees it. fail (exit 3) on a full disk. Does nothing but free where no log is open.
void log_event(cJSON *event);
void log_close(void);

// The status line of rank 0: updated in place on a terminal, a line each elsewhere; `keep` leaves it standing and goes on below.
void status_line(bool keep, const char *format, ...) __attribute__((format(printf, 2, 3)));
// An ordinary line on standard output, from rank 0 alone, clear of the status line. --quiet drops both.
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_quiet(bool quiet);

double seconds_now(void); // a clock that only goes forward

#endif

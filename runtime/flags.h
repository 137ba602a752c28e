// Command-line flags as a table: --name value, a switch stands alone. Every fault is one line that names the flag,
// the value and what would be right, exit code 2.
#ifndef FLAGS_H
#define FLAGS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    FLAG_GROUP,  // a heading of --help; name is its text
    FLAG_SWITCH, // bool
    FLAG_INT,    // long, min ≤ value ≤ max
    FLAG_REAL,   // double, finite, min ≤ value ≤ max
    FLAG_CHOICE, // int, the index in choices
    FLAG_TEXT,   // const char *
    FLAG_FILES   // FlagFiles: all words up to the next flag
} FlagKind;

typedef struct {
    char **path;
    int count;
} FlagFiles;

typedef struct {
    const char *name; // without the dashes
    FlagKind kind;
    void *value; // what it sets; holds the default before flags_parse
    const char *help;
    double min, max;     // of a number
    const char *choices; // of a choice: "none|selective|full"
} Flag;

// Reads argv into the values; --help prints the table with its defaults and exits with 0.
void flags_parse(const Flag *flags, size_t n, int argc, char **argv, const char *about);
// Was the flag that sets this value on the command line?
bool flag_given(const void *value);
// The word of choices ("a|b|c") with this index; a static buffer, good until the next call.
const char *flag_choice(const char *choices, int index);

#endif

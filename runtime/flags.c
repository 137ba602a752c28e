// The flag table's reader: exact names, whole numbers, and a guess at what was meant.
#include "flags.h"
#include "fail.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FLAGS = 128 };
static const void *given[MAX_FLAGS];
static size_t n_given;

bool flag_given(const void *value) {
    for (size_t i = 0; i < n_given; i++)
        if (given[i] == value) return true;
    return false;
}

// The i-th word of "a|b|c": its start and length, or NULL past the last.
static const char *choice_word(const char *choices, int i, size_t *length) {
    for (; i > 0 && choices; i--) {
        choices = strchr(choices, '|');
        if (choices) choices++;
    }
    if (choices) *length = strcspn(choices, "|");
    return choices;
}

const char *flag_choice(const char *choices, int index) {
    static char word[64];
    size_t length = 0;
    const char *start = choice_word(choices, index, &length);
    snprintf(word, sizeof word, "%.*s", (int)length, start ? start : "");
    return word;
}

// Levenshtein's distance between a and the first b_length characters of b.
static size_t edit_distance(const char *a, const char *b, size_t b_length) {
    size_t row[128];
    if (b_length > 127) b_length = 127;
    for (size_t j = 0; j <= b_length; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[b_length];
}

static const char *nearest_flag(const Flag *flags, size_t n, const char *word) {
    const char *best = "help";
    size_t best_distance = edit_distance("help", word, strlen(word));
    for (size_t i = 0; i < n; i++) {
        if (flags[i].kind == FLAG_GROUP) continue;
        if (strncmp(flags[i].name, word, strlen(word)) == 0) return flags[i].name; // cut short
        size_t distance = edit_distance(flags[i].name, word, strlen(word));
        if (distance < best_distance) {
            best_distance = distance;
            best = flags[i].name;
        }
    }
    return best;
}

static void set_choice(const Flag *f, const char *word) {
    const char *best = NULL;
    size_t best_length = 0, best_distance = (size_t)-1, length = 0;
    const char *start;
    for (int i = 0; (start = choice_word(f->choices, i, &length)); i++) {
        size_t distance = edit_distance(word, start, length);
        if (distance == 0) {
            *(int *)f->value = i;
            return;
        }
        if (distance < best_distance) {
            best_distance = distance;
            best = start;
            best_length = length;
        }
    }
    fail_all(EXIT_USAGE, "--%s %s: not one of %s; nearest: %.*s", f->name, word, f->choices, (int)best_length,
             best);
}

static void set_number(const Flag *f, const char *word) {
    char *end;
    errno = 0;
    double x = strtod(word, &end);
    const char *kind = f->kind == FLAG_INT ? "a whole number" : "a number";
    if (end == word || *end || !isfinite(x)) fail_all(EXIT_USAGE, "--%s %s: not %s", f->name, word, kind);
    if (f->kind == FLAG_INT && x != floor(x))
        fail_all(EXIT_USAGE, "--%s %s: not a whole number; nearest: %.0f", f->name, word, nearbyint(x));
    if (x < f->min || x > f->max)
        fail_all(EXIT_USAGE, "--%s %s: outside %.15g to %.15g; nearest: %.15g", f->name, word, f->min, f->max,
                 x < f->min ? f->min : f->max);
    if (f->kind == FLAG_INT)
        *(long *)f->value = (long)x;
    else
        *(double *)f->value = x;
}

static void print_default(const Flag *f) {
    switch (f->kind) {
    case FLAG_INT:
        if (*(long *)f->value >= 0) printf(" (%ld)", *(long *)f->value);
        break;
    case FLAG_REAL:
        if (*(double *)f->value >= 0) printf(" (%g)", *(double *)f->value);
        break;
    case FLAG_CHOICE:
        if (*(int *)f->value >= 0) printf(" (%s)", flag_choice(f->choices, *(int *)f->value));
        break;
    default:
        break;
    }
}

static void print_help(const Flag *flags, size_t n, const char *about) {
    static const char *const operand[] = {
        [FLAG_INT] = " N", [FLAG_REAL] = " X", [FLAG_TEXT] = " PATH", [FLAG_FILES] = " FILE…"};
    printf("%s\n", about);
    for (size_t i = 0; i < n; i++) {
        const Flag *f = &flags[i];
        if (f->kind == FLAG_GROUP) {
            printf("\n%s\n", f->name);
            continue;
        }
        char left[160];
        if (f->kind == FLAG_CHOICE && strlen(f->choices) < 24)
            snprintf(left, sizeof left, "--%s %s", f->name, f->choices);
        else if (f->kind == FLAG_CHOICE || f->kind == FLAG_SWITCH)
            snprintf(left, sizeof left, "--%s%s", f->name, f->kind == FLAG_CHOICE ? " NAME" : "");
        else
            snprintf(left, sizeof left, "--%s%s", f->name, operand[f->kind]);
        printf("  %-34s %s", left, f->help);
        if (f->kind == FLAG_CHOICE && strlen(f->choices) >= 24) printf(": %s", f->choices);
        print_default(f);
        printf("\n");
    }
}

void flags_parse(const Flag *flags, size_t n, int argc, char **argv, const char *about) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            if (launch_rank() == 0) print_help(flags, n, about);
            exit(0);
        }
    }
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strncmp(word, "--", 2) != 0)
            fail_all(EXIT_USAGE, "%s: not a flag; flags start with two dashes, see --help", word);
        const Flag *f = NULL;
        for (size_t j = 0; j < n && !f; j++)
            if (flags[j].kind != FLAG_GROUP && strcmp(flags[j].name, word + 2) == 0) f = &flags[j];
        if (!f && strchr(word, '='))
            fail_all(EXIT_USAGE, "%s: write the value after a space; nearest: %.*s %s", word,
                     (int)strcspn(word, "="), word, strchr(word, '=') + 1);
        if (!f) fail_all(EXIT_USAGE, "%s: no such flag; nearest: --%s", word, nearest_flag(flags, n, word + 2));
        if (flag_given(f->value)) fail_all(EXIT_USAGE, "--%s: given twice", f->name);
        if (n_given < MAX_FLAGS) given[n_given++] = f->value;
        if (f->kind == FLAG_SWITCH) {
            *(bool *)f->value = true;
            continue;
        }
        if (i + 1 == argc || strncmp(argv[i + 1], "--", 2) == 0)
            fail_all(EXIT_USAGE, "--%s: needs a value: %s", f->name, f->help);
        if (f->kind == FLAG_FILES) {
            FlagFiles *files = f->value;
            files->path = &argv[i + 1];
            while (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) files->count++, i++;
            continue;
        }
        const char *value = argv[++i];
        if (f->kind == FLAG_CHOICE)
            set_choice(f, value);
        else if (f->kind == FLAG_TEXT && !*value)
            fail_all(EXIT_USAGE, "--%s: its value is empty: %s", f->name, f->help);
        else if (f->kind == FLAG_TEXT)
            *(const char **)f->value = value;
        else
            set_number(f, value);
    }
}

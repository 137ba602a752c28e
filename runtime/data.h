// Tokens: any text file (its bytes are the tokens) or llm.c's shards (.bin), one file or several, in windows of T + 1.
//
// Which sequences a step sees is a function of the seed, the step and the global batch alone, never of the layout:
// sequence number g = step · global batch + i is window perm(g mod windows) of epoch g ÷ windows, where perm is a
// permutation keyed by (seed, epoch), computed, not stored. Each epoch shifts the windows by an offset of its own.
#ifndef DATA_H
#define DATA_H

#include <stddef.h>
#include <stdint.h>

typedef struct Data Data;

// A part of the tokens: a text without a validation file holds out its last tenth. Several files are cut as if they
// stood in a row. The two parts have no token in common.
typedef enum { DATA_ALL, DATA_FIRST_NINE_TENTHS, DATA_LAST_TENTH } DataPart;

// Opens and checks every file (one at least); T ≥ 1 is the sequence length. Headers are checked against file sizes, all
// files must have the same kind. Token values are checked as they are read. fail_all (exit 2) names the file and what is
// wrong: missing, a directory, empty, cut short, wrong magic, count not matching, shorter than T + 1.
Data *data_open(char *const *files, int n_files, size_t T, uint64_t seed, DataPart part);
void data_close(Data *d);

// Vocabulary that the kind of file implies: 256, 50257 or 128256.
int data_vocab(const Data *d);
uint64_t data_tokens(const Data *d);
// Windows of T + 1 tokens in order, without overlap of their inputs, for evaluation.
uint64_t data_windows(const Data *d);
// A fingerprint of the files' names' last parts and sizes, so that a resume with other data can be noticed.
uint64_t data_fingerprint(const Data *d);

// Sequence number g of the training order, T + 1 tokens. fail (exit 2) on a token ≥ vocab, naming file and offset.
void data_train_sequence(Data *d, uint64_t g, int vocab, int32_t *tokens);
// Window w in file order, T + 1 tokens.
void data_window(Data *d, uint64_t w, int vocab, int32_t *tokens);

#endif

// Checkpoints: safetensors files that every rank writes its own pieces of, and that appear whole or not at all.
//
// DIR/step-00000100/ holds weights.safetensors, optimizer.safetensors and the marker `complete`. It is written as
// DIR/.step-00000100.partial, every file and directory synced, every rank asked whether it succeeded, renamed, and
// marked last: a crash at any moment leaves the previous checkpoint whole. The format: 8 bytes of header length
// (little-endian), a JSON header {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}}, the data.
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "comm.h"

typedef struct {
    const char *name;
    int ndim;
    size_t shape[2]; // checkpoints are fp32
} TensorInfo;

// A part of a tensor that this rank holds: `runs` runs of `run` consecutive elements, the first at element `offset`
// of the whole tensor, `stride` elements apart there; in memory they follow one another at data: the device's where it is
// saved from, the host's where it is read to.
typedef struct {
    int tensor;
    size_t offset, run, stride, runs;
    float *data;
} Piece;

typedef struct {
    const char *key, *value;
} Meta;

typedef struct {
    const char *name; // "weights.safetensors"
    const TensorInfo *tensors;
    int n_tensors;
    const Piece *pieces; // this rank's
    int n_pieces;
    const Meta *meta;
    int n_meta;
} TensorFile;

// Takes DIR (made if missing) for this run: fail (exit 2) where another running program saves into it. A lock left by a
// run that has ended is no obstacle. Rank 0 of the Comm holds it until checkpoint_unlock. Collective.
void checkpoint_lock(Comm *c, const char *dir);
void checkpoint_unlock(void);

// Writes DIR/step-NNNNNNNN from every rank's pieces, then removes all but the newest `keep` up to this step, and partial ones that an
// earlier crash left. Collective. Returns true; or false after printing one line that names the file and the reason
// (a full disk): then nothing of this checkpoint remains and the earlier ones are untouched. Every rank gets the same answer.
bool checkpoint_save(Comm *c, const char *dir, long step, const TensorFile *files, int n_files, int keep);

// The highest step that dir holds a whole checkpoint of; −1 where there is none.
long checkpoint_newest(const char *dir);
// The checkpoint that PATH means: itself if it is one, else the newest whole one in it. Writes its path to out, returns its
// step. fail_all (exit 2) where there is none.
long checkpoint_find(const char *path, char *out, size_t out_size);

// A safetensors file opened for reading: header parsed and checked (sizes, overlaps, bounds) before anything is used.
// dtypes F32, F16, BF16 are read as fp32. fail_all (exit 2) names the file and what is wrong.
typedef struct SafeTensors SafeTensors;
SafeTensors *safetensors_open(const char *path);
void safetensors_close(SafeTensors *s);
int safetensors_count(const SafeTensors *s);
// The i-th tensor's name and shape (all dimensions; the array is the file's own).
const char *safetensors_name(const SafeTensors *s, int i);
int safetensors_find(const SafeTensors *s, const char *name);             // index, or −1
int safetensors_shape(const SafeTensors *s, int i, const size_t **shape); // number of dimensions
const char *safetensors_meta(const SafeTensors *s, const char *key);      // NULL if absent
// Reads one piece (piece.tensor is an index of this file). fail (exit 2) on a short or failed read.
void safetensors_read(SafeTensors *s, Piece piece);

#endif

// A model's values: where they start, how they are saved and come back, and whether all copies are alike.
#ifndef STATE_H
#define STATE_H

#include "train.h"

// What makes two models the same model: written into checkpoints, taken from there where no flag says otherwise.
enum { MODEL_SETTINGS = 13, DENSE_SETTINGS = 6 }; // the rest: of a model with experts
typedef struct {
    const char *name, *flag;
    size_t offset; // of the number (long) in Config
} ModelSetting;
extern const ModelSetting model_settings[MODEL_SETTINGS];
long *setting(const Config *c, int i);

// A number in (0, 1) that depends on (seed, name, i) alone: every layout starts from the same model, and samples alike.
uint64_t random_stream(uint64_t seed, const char *name);
double random_uniform(uint64_t stream, uint64_t i);

// Initial values, or those of a safetensors file, or all that a run needs to go on from a checkpoint. fail (exit 2) names
// the file and what does not fit this model.
void state_init(Model *m);
void state_load_weights(Model *m, const char *path);
void state_resume(Model *m, const char *checkpoint);
// Writes DIR/step-NNNNNNNN (--save), a shard a rank. Collective. False where it failed, after a line that says why.
// fail (exit 3) where a weight is not finite.
bool state_save(Model *m, long step);

// Every rank's copy of a weight has the same bits, and at ZeRO-0 of its master and moments: fail (exit 3) names the first
// parameter of which one rank's differs. Collective.
void state_check_replicas(const Model *m, long step);

#endif

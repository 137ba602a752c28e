// Schedules of a pipeline, as data: who holds which layers, and in which order each rank does what. pp_1f1b.c has the idea.
#ifndef PP_1F1B_H
#define PP_1F1B_H

#include "config.h"
#include <stdbool.h>

// Four letters name the work: F is a forward, I the gradient of an input, W the gradient of the weights, B both.
typedef enum { PASS_F, PASS_I, PASS_W, PASS_B } Pass;

// A *stage* is one of the pieces of the model that a pipeline is made of: neighbouring units (train.h), of which unit 0 is the
// embedding, 1 … L are the blocks, L + 1 is the head. A rank holds one or, with virtual stages, several: its *chunks*.
typedef struct {
    int stage;
    int first_unit, last_unit; // both its own
    long first_block, blocks;  // those of them that are blocks: `blocks` from first_block of the model on
} Chunk;

// One pass of one chunk and micro-batch.
typedef struct {
    Pass pass;
    int chunk, micro;
    double start, end; // as played
    // Places in memory. slot: of activations, from F to the end of W (or B); dout: of gradients of outputs, from I to the end of
    // W; head: of what the head keeps, from F to I, in its chunk alone.
    int slot, dout, head;
} Action;

// What a rank does in a step, in this order.
typedef struct {
    Action *action;
    long n;
    int slots, douts, heads; // the most that are in use at a time
} RankPlan;

typedef struct {
    const Config *config;
    long micro_batches;
    bool forward_only;
    RankPlan *rank; // [pp]
    double end;     // when the last rank is through, as played
} Plan;

enum { MOST_CHUNKS = 16 }; // of a rank

// Times of one chunk's F, I and W of a micro-batch; B takes I and W. They order messages: where real times differ, a rank may
// wait longer, and nothing else.
typedef struct {
    double f, i, w;
} Costs;
#define UNIT_COSTS ((Costs){1, 1, 1})

// Does the schedule take so many micro-batches a step?
bool pp_accepts(const Config *c, long micro_batches);
// Is W an action of its own, later than I?
bool pp_defers_w(const Config *c);
// Which units rank r of the pipeline holds: chunk [virtual_stages].
void pp_chunks(const Config *c, int r, Chunk *chunk);
// Which rank of the pipeline holds a stage.
int pp_rank_of(const Config *c, int stage);
// Is the embedding tied, and are its two ends on two ranks?
bool pp_ties(const Config *c);

// What all ranks do in a step (or, forward_only, in an evaluation), played with these costs. c must stay where it is.
Plan *pp_plan(const Config *c, long micro_batches, bool forward_only, Costs costs);
void pp_free(Plan *plan);

// What a stage hands on to another rank's.
typedef struct {
    double leaves; // as played
    int link;      // the same for all of one stage and pass
    int from, to;  // stages
    Pass pass;     // PASS_F; PASS_I for I and B
    int micro;
} Message;
// Those that a rank sends or receives in a plan, in the order in which it starts them: [*n], to be freed.
Message *pp_messages(const Plan *plan, int rank, long *n);

#endif

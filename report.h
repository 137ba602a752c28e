// What a run says of itself: predictions before it, a line a step, a table after it. Nothing here changes the model.
#ifndef REPORT_H
#define REPORT_H

#include "runtime/device.h"
#include "train.h"

// Bytes that a rank sends in a step, the mean over the ranks of its place in the pipeline: one that owns a longer shard
// sends a few bytes less.
typedef struct {
    double gradients, weights; // over dp and cp together
    // Over tp: the residual stream and its gradient, the loss, gradients that are sums of parts.
    double rows, logits, partial;
    double gates;          // and of experts: who chose whom, and gates' gradients
    double ring;           // over cp: keys, values and their gradients
    double copies, counts; // over ep, where routing is even: tokens' copies; how many there are
    double sums;           // over those who share sequences, for the balance loss
    double messages, tied; // over pp, and of a tied embedding's gradient between its two ends
} Sent;
// What a rank in one place of the pipeline has, needs and sends: of m, as it is laid out and predicted for that place.
typedef struct {
    Chunk chunk[MOST_CHUNKS];
    long layers;
    double parameters;
    Sent sent;
    Ledger memory;
} Place;
Place report_place(const Model *m, Ledger predicted);
// --dry-run: parameters, FLOPs, bytes held (by ZeRO stage too) and sent, and the classic estimates beside ours; of a pipeline
// all places [pp], and more of the one for which m is laid out; and the schedule.
void report_dry_run(const Model *m, const Place *place);
// Model state of a rank in the usual convention (Rajbhandari et al. 2020, "ZeRO", figure 1): 2 + 2 + 12 bytes a
// parameter in a bf16 build (optimizer: two moments and the fp32 masters), 4 + 4 + 8 in an fp32 build; fp32 accumulation
// of bf16 gradients adds 4 to them. Each part is divided by the ranks from its stage on. What ZeRO-2 and -3 hold whole
// while it is in use is not in it.
typedef struct {
    double weights, gradients, optimizer;
} ZeroBytes;
ZeroBytes zero_bytes(double parameters, double ranks, int stage, bool accumulate_fp32);
// Of a rank of m: what all of dp hold, and experts, which fewer do.
ZeroBytes report_state(const Model *m, int stage);
// --explain (report_explain.c): the grid, the buckets and the messages of a step.
void report_explain(const Model *m);
// A pipeline's schedule: a picture, bubble and peaks; and the same for --json.
void report_schedule(const Plan *plan);
struct cJSON *report_schedule_json(const Plan *plan);
// The memory table; measured is NULL where nothing ran yet.
void report_memory(const Ledger *predicted, const Ledger *measured);
// The flags that would make a rank smaller: "--micro-batch, --seq, …".
const char *report_smaller(const Model *m);
// From now on, where memory is refused, the run fails (exit 3) with what was asked for, these flags and the table. m and
// predicted stay where they are.
void report_out_of_memory(const Model *m, const Ledger *predicted);

// peak_flops: operations a second that count as 100 %, of all ranks together.
void report_start(const Model *m, const Ledger *predicted, int threads, double peak_flops);
typedef struct {
    long step; // finished ones
    double loss, grad_norm, lr, seconds;
} StepReport;
void report_step(const Model *m, StepReport r, double peak_flops);
void report_validation(long step, double loss);
// Collective: the log's last event holds every rank's memory and messages.
void report_end(const Model *m, const Ledger *predicted, double loss, double peak_before, double peak_after);

// ---- what report.c and report_explain.c share ----------------------------------------------------------------------------
long report_world(const Config *c);
// The grid: "pp 2 × dp 4 × cp 2 × tp 8"; pp and cp where they are more than one rank.
const char *report_grid(const Config *c);
// Pairs of a query and a key that rank r of cp computes of each sequence and head, of so many tokens, in this order.
double report_pairs(const Config *c, CpOrder order, long r);
// The most of them on a rank, over the mean.
double report_imbalance(const Config *c, CpOrder order);
// Elements of a token's keys and values on a rank: of its key/value heads, which query heads share.
size_t report_keys(const Config *c);
// Bytes an element of the gradients that travel. Weights travel as floatX.
size_t report_gradient_size(const Config *c);
const char *report_type(size_t size);
// What of the model a pipeline rank's chunks are: "embedding, blocks 0-3; …".
const char *report_units(const Config *c, const Chunk *chunk);
// How often ZeRO-3 gathers a bucket's weights in a step: for forwards, for backwards.
typedef struct {
    long forward, backward;
} Gathers;
Gathers *report_gathers(const Model *m); // [n_buckets], to be freed
// Is the rank's list F B F B …? Then all micro-batches gather alike, and this says which buckets a backward does not.
bool report_alternates(const Config *c);
void report_not_gathered(const Model *m, const Gathers *gathers);

#endif

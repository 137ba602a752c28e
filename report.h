// What a run says of itself: predictions before it, a line a step, a table after it. Nothing here changes the model.
#ifndef REPORT_H
#define REPORT_H

#include "runtime/device.h"
#include "train.h"

// --dry-run: parameters, FLOPs, bytes held (by ZeRO stage too) and sent, and the classic estimates beside ours.
void report_dry_run(const Model *m, const Ledger *predicted);
// Model state of a rank in the usual convention (Rajbhandari et al. 2020, "ZeRO", figure 1): 2 + 2 + 12 bytes a
// parameter in a bf16 build (optimizer: two moments and the fp32 masters), 4 + 4 + 8 in an fp32 build; fp32 accumulation
// of bf16 gradients adds 4 to them. Each part is divided by the ranks from its stage on. What ZeRO-2 and -3 hold whole
// while it is in use is not in it.
typedef struct {
    double weights, gradients, optimizer;
} ZeroBytes;
ZeroBytes zero_bytes(double parameters, double ranks, int stage, bool accumulate_fp32);
// --explain: the grid, the buckets and the messages of a step.
void report_explain(const Model *m);
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

#endif

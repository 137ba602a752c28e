// What a run is, and the data that it reads: filled in and checked before anything else happens.
#ifndef CONFIG_H
#define CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include "runtime/data.h"
#include "runtime/flags.h"

// ---- What a run is: one field a flag ------------------------------------------------------------------------------
typedef enum { ARCH_GPT2, ARCH_LLAMA } Arch;
#define ARCHS "gpt2|llama"
typedef enum { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;
typedef enum { ATTENTION_FLASH, ATTENTION_NAIVE } Attention;
typedef enum { MATMUL_FP32, MATMUL_BF16 } MatmulInputs;
typedef enum { FP8_NONE = -1, FP8_ALL_E4M3, FP8_HYBRID } Fp8Recipe;
#define FP8_RECIPES "e4m3|hybrid"
typedef enum { SCHEDULE_AFAB, SCHEDULE_1F1B, SCHEDULE_INTERLEAVED, SCHEDULE_ZB_H1, SCHEDULE_ZBV } Schedule;
#define SCHEDULES "afab|1f1b|interleaved|zb-h1|zbv"
typedef enum { ORDER_ZIGZAG, ORDER_CONTIGUOUS } CpOrder;
#define CP_ORDERS "zigzag|contiguous"
typedef enum { BALANCE_AUX, BALANCE_BIAS, BALANCE_NONE } Balance;
#define BALANCES "aux|bias|none"

typedef struct {
    // model
    int model, arch;
    long layers, heads, kv_heads, hidden, ffn, vocab, seq;
    double rope_theta;
    bool tie;
    // experts
    long experts, topk, shared_experts, expert_ffn, moe_every, route_groups, route_nodes; // experts 0: dense
    int balance;
    // data
    FlagFiles data, val;
    long seed;
    // step
    long micro_batch, accum, batch_tokens, steps, warmup;
    double lr, min_lr, beta1, beta2, weight_decay, grad_clip;
    // parallel
    long ranks, dp, zero, tp, cp, pp, virtual_stages, ep;
    double bucket_mb;
    int comm, cp_order, schedule;
    bool no_overlap, sp;
    // memory and precision
    int recompute, attention, matmul;
    int fp8; // Fp8Recipe
    bool grad_accum_fp32, lazy_optimizer;
    // run
    long eval_every, eval_batches, sample, save_every, keep;
    long check_replicas;
    const char *init, *save, *resume, *log, *trace;
    double timeout, peak_tflops;
    bool dry_run, json, explain, quiet;
    // derived
    long positions;    // rows of the learned position table: ≥ seq (gpt2); 0 (llama)
    long padded_vocab; // rows in memory of a rank's slice of the vocabulary
    long global_batch; // sequences a step, over all ranks
    long local_seq;    // tokens of each sequence that a rank has: seq / cp
    long dp_cp;        // ranks that hold the same parameters and see other tokens: dp · cp
    long replicas;     // those of them that hold the same experts: dp_cp / ep
} Config;

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define NOT_GIVEN     (-1) // the default of a number that follows from others

// The run's; m->config is a copy. flag_given(&config.x): the command line has it.
extern Config config;
extern Data *train_data, *val_data; // NULL where a dry run reads nothing, and where nothing is held out

// Everything about flags, files and sizes is checked here, before MPI starts and before memory is taken. Returns the step
// to go on from, and the checkpoint's path ("": a new run).
long configure(int argc, char **argv, char *checkpoint, size_t checkpoint_size);

// Does block l have experts? Every --moe-every-th has.
static inline bool has_experts(const Config *c, long l) {
    return c->experts > 0 && (l + 1) % c->moe_every == 0;
}
// How many blocks have.
static inline long expert_blocks(const Config *c) {
    return c->experts > 0 ? c->layers / c->moe_every : 0;
}
// Some weight is held by more than one rank.
bool has_replicas(const Config *c);
// What is legal but does nothing is said, so that nobody waits for an effect.
void say_without_effect(const Config *c);

#endif

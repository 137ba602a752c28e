// What a run is: its flags, the presets of models, what a checkpoint says of its own model, and what is refused.
//
// A value comes from the first of these that has it, and all are checked before MPI starts or memory is taken:
//
//     a flag  ->  a preset that was asked for  ->  the checkpoint's own description  ->  the default preset
#include "config.h"
#include "state.h"
#include "runtime/checkpoint.h"
#include "runtime/fail.h"
#include "runtime/launch.h"
#include "runtime/log.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- flags ----------------------------------------------------------------------------------------------------------

Config config = {
    .arch = NOT_GIVEN,
    .layers = NOT_GIVEN,
    .heads = NOT_GIVEN,
    .kv_heads = NOT_GIVEN,
    .hidden = NOT_GIVEN,
    .ffn = NOT_GIVEN,
    .vocab = NOT_GIVEN,
    .seq = NOT_GIVEN,
    .rope_theta = NOT_GIVEN,
    .experts = NOT_GIVEN,
    .topk = NOT_GIVEN,
    .shared_experts = NOT_GIVEN,
    .expert_ffn = NOT_GIVEN,
    .moe_every = NOT_GIVEN,
    .route_groups = NOT_GIVEN,
    .route_nodes = NOT_GIVEN,
    .balance = NOT_GIVEN,
    .seed = 1337,
    .micro_batch = 8,
    .accum = 1,
    .batch_tokens = NOT_GIVEN,
    .steps = 200,
    .warmup = 20,
    .lr = 1e-3,
    .min_lr = NOT_GIVEN,
    .beta1 = 0.9,
    .beta2 = 0.95,
    .weight_decay = 0.1,
    .grad_clip = 1,
    .ranks = NOT_GIVEN,
    .dp = NOT_GIVEN,
    .tp = 1,
    .cp = 1,
    .pp = 1,
    .ep = 1,
    .virtual_stages = NOT_GIVEN,
    .schedule = SCHEDULE_1F1B,
    .comm = NOT_GIVEN,
    .fp8 = FP8_NONE,
    .eval_batches = 8,
    .keep = 2,
    .timeout = 600,
    .peak_tflops = NOT_GIVEN,
};

typedef struct {
    Arch arch;
    long layers, heads, kv_heads, hidden, ffn, vocab, seq; // vocab 0: as the data has it
    double rope_theta;
    bool tie;
} Preset;

typedef struct {
    long experts, topk, shared_experts, expert_ffn, route_groups, route_nodes;
    Balance balance;
} ExpertPreset;

// clang-format off
#define PRESET_NAMES "gpt2-tiny|llama-tiny|gpt2-124M|gpt2-355M|gpt2-774M|gpt2-1558M|" \
                     "llama-0.5B|llama-1B|llama-3B|llama-8B|llama-70B|llama-405B|gpt3-175B|" \
                     "moe-tiny|mixtral-8x7B|deepseek-v3"
static const Preset presets[] = { // in the order of PRESET_NAMES
    // arch      layers heads kv  hidden   ffn   vocab   seq  theta  tied
    {ARCH_GPT2,     4,   8,   8,   128,   512,      0,   64,      0, true},
    {ARCH_LLAMA,    4,   8,   4,   128,   352,      0,   64,  10000, false},
    {ARCH_GPT2,    12,  12,  12,   768,  3072,  50257, 1024,      0, true},
    {ARCH_GPT2,    24,  16,  16,  1024,  4096,  50257, 1024,      0, true},
    {ARCH_GPT2,    36,  20,  20,  1280,  5120,  50257, 1024,      0, true},
    {ARCH_GPT2,    48,  25,  25,  1600,  6400,  50257, 1024,      0, true},
    {ARCH_LLAMA,   24,  20,   4,  1280,  3840,  32000, 2048,  10000, true},
    {ARCH_LLAMA,   16,  32,   8,  2048,  8192, 128256, 8192, 500000, true},
    {ARCH_LLAMA,   28,  24,   8,  3072,  8192, 128256, 8192, 500000, true},
    {ARCH_LLAMA,   32,  32,   8,  4096, 14336, 128256, 8192, 500000, false},
    {ARCH_LLAMA,   80,  64,   8,  8192, 28672, 128256, 8192, 500000, false},
    {ARCH_LLAMA,  126, 128,   8, 16384, 53248, 128256, 8192, 500000, false},
    {ARCH_GPT2,    96,  96,  96, 12288, 49152,  50257, 2048,      0, true},
    {ARCH_LLAMA,    4,   8,   4,   128,   352,      0,   64,  10000, false},
    {ARCH_LLAMA,   32,  32,   8,  4096, 14336,  32000, 4096, 1000000, false},
    {ARCH_LLAMA,   61, 128,   8,  7168, 18432, 129280, 4096,  10000, false},
};
static const ExpertPreset expert_presets[] = { // of the last ones; all others are dense
    // experts topk shared ffn groups nodes
    {  8,  2,  0,   352,  1,  1, BALANCE_AUX},
    {  8,  2,  0, 14336,  1,  1, BALANCE_AUX},
    {256,  8,  1,  2048,  8,  4, BALANCE_BIAS}, // its attention (MLA) as GQA, experts in its first three blocks, too
};

#define SCHEDULES_AND_ALIAS SCHEDULES "|gpipe"
#define COUNT 1e12 // more than any count of anything here
enum { MOST_LAYERS = 10000, MOST_SEQ = 10000000, MOST_ACCUM = 1000000 };
enum { MOST_STARTED = 100000, MOST_RANKS = 1000000000 }; // ranks; the second where nothing runs
static const Flag flags[] = {
    {"model", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"model",      FLAG_CHOICE, &config.model, "preset; a flag beside it overrides its value", 0, 0, PRESET_NAMES},
    {"arch",       FLAG_CHOICE, &config.arch, "block", 0, 0, ARCHS},
    {"layers",     FLAG_INT,  &config.layers, "blocks", 1, MOST_LAYERS, NULL},
    {"heads",      FLAG_INT,  &config.heads, "query heads", 1, 1e4, NULL},
    {"kv-heads",   FLAG_INT,  &config.kv_heads, "key/value heads; divides heads", 1, 1e4, NULL},
    {"hidden",     FLAG_INT,  &config.hidden, "channels of the residual stream", 1, 1e6, NULL},
    {"ffn",        FLAG_INT,  &config.ffn, "channels inside the MLP", 1, 1e7, NULL},
    {"vocab",      FLAG_INT,  &config.vocab, "tokens in the vocabulary; else as the data has it", 1, 1e7, NULL},
    {"seq",        FLAG_INT,  &config.seq, "tokens a sequence (T)", 1, MOST_SEQ, NULL},
    {"rope-theta", FLAG_REAL, &config.rope_theta, "base of the rotary angles (llama)", 1, 1e12, NULL},
    {"tie",        FLAG_SWITCH, &config.tie, "the head shares the embedding's weights (gpt2 always does)", 0, 0, NULL},
    {"experts", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"experts",    FLAG_INT,  &config.experts, "MLPs, of which a router picks some for each token; 0: one MLP", 0, MOE_MOST_EXPERTS, NULL},
    {"topk",       FLAG_INT,  &config.topk, "experts a token", 1, MOE_MOST_EXPERTS, NULL},
    {"shared-experts", FLAG_INT, &config.shared_experts, "and those that every token goes through", 0, 1e4, NULL},
    {"expert-ffn", FLAG_INT,  &config.expert_ffn, "channels inside an expert; else --ffn", 1, 1e7, NULL},
    {"moe-every",  FLAG_INT,  &config.moe_every, "every N-th block has experts, the others one MLP", 1, MOST_LAYERS, NULL},
    {"balance",    FLAG_CHOICE, &config.balance, "even load by a loss (aux), by a bias on the choice, or not", 0, 0, BALANCES},
    {"route-groups", FLAG_INT, &config.route_groups, "groups of experts, for --route-nodes", 1, MOE_MOST_EXPERTS, NULL},
    {"route-nodes", FLAG_INT, &config.route_nodes, "groups that a token may go to; else all", 1, MOE_MOST_EXPERTS, NULL},
    {"data", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"data",       FLAG_FILES, &config.data, "text (bytes) or llm.c token shards (.bin); else this repository's text", 0, 0, NULL},
    {"val",        FLAG_FILES, &config.val, "the same, for evaluation; else the last tenth of a text", 0, 0, NULL},
    {"seed",       FLAG_INT,  &config.seed, "of initial weights, data order and samples", 0, COUNT, NULL},
    {"step", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"micro-batch",  FLAG_INT, &config.micro_batch, "sequences a data-parallel rank and micro-batch (B)", 1, 1e5, NULL},
    {"accum",        FLAG_INT, &config.accum, "micro-batches a step", 1, MOST_ACCUM, NULL},
    {"batch-tokens", FLAG_INT, &config.batch_tokens, "tokens a step over all ranks; accum follows", 1, COUNT, NULL},
    {"steps",        FLAG_INT, &config.steps, "optimizer steps", 1, COUNT, NULL},
    {"lr",           FLAG_REAL, &config.lr, "peak learning rate", 0, 1e3, NULL},
    {"warmup",       FLAG_INT, &config.warmup, "steps of linear warm-up, then a cosine", 0, COUNT, NULL},
    {"min-lr",       FLAG_REAL, &config.min_lr, "where the cosine ends; else lr / 10", 0, 1e3, NULL},
    {"beta1",        FLAG_REAL, &config.beta1, "AdamW's first moment", 0, 0.999999, NULL},
    {"beta2",        FLAG_REAL, &config.beta2, "AdamW's second moment", 0, 0.999999, NULL},
    {"weight-decay", FLAG_REAL, &config.weight_decay, "of matrices", 0, 1e3, NULL},
    {"grad-clip",    FLAG_REAL, &config.grad_clip, "largest gradient norm; 0: none", 0, 1e9, NULL},
    {"parallel", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"ranks",      FLAG_INT, &config.ranks, "start this many ranks here, under mpirun", 1, MOST_STARTED, NULL},
    {"dp",         FLAG_INT, &config.dp, "data-parallel ranks; follows from the rest", 1, 1e5, NULL},
    {"zero",       FLAG_INT, &config.zero, "shard over dp and cp: 1 the optimizer, 2 gradients too, 3 weights too; with --pp best 1: 2 and 3 send every micro-batch", 0, 3, NULL},
    {"bucket-mb",  FLAG_REAL, &config.bucket_mb, "merge neighbouring blocks' buckets up to N MB of weights", 0, 1e6, NULL},
    {"tp",         FLAG_INT, &config.tp, "tensor-parallel ranks: they share every matrix", 1, 1e4, NULL},
    {"sp",         FLAG_SWITCH, &config.sp, "and the rows between the matrices (sequence parallelism)", 0, 0, NULL},
    {"cp",         FLAG_INT, &config.cp, "context-parallel ranks: they share every sequence", 1, 1e4, NULL},
    {"cp-order",   FLAG_CHOICE, &config.cp_order, "how a sequence is cut; zigzag gives all ranks the same work", 0, 0, CP_ORDERS},
    {"pp",         FLAG_INT, &config.pp, "pipeline-parallel ranks: each holds some of the layers", 1, 1e4, NULL},
    {"schedule",   FLAG_CHOICE, &config.schedule, "order of work in a pipeline; gpipe is afab", 0, 0, SCHEDULES_AND_ALIAS},
    {"ep",         FLAG_INT, &config.ep, "expert-parallel ranks, of dp: they share the experts", 1, 1e4, NULL},
    {"virtual-stages", FLAG_INT, &config.virtual_stages, "stages a rank (interleaved)", 1, MOST_CHUNKS, NULL},
    {"comm",       FLAG_CHOICE, &config.comm, "GPUs: NCCL (where each rank has its own), or through the host", 0, 0, TRANSPORTS},
    {"no-overlap", FLAG_SWITCH, &config.no_overlap, "wait for every message where it leaves", 0, 0, NULL},
    {"memory", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"recompute",  FLAG_CHOICE, &config.recompute, "forward work done again in the backward", 0, 0, "none|selective|full"},
    {"attention",  FLAG_CHOICE, &config.attention, "tiles, or the whole T×T matrix", 0, 0, "flash|naive"},
    {"grad-accum-fp32", FLAG_SWITCH, &config.grad_accum_fp32, "sum bf16 gradients in fp32", 0, 0, NULL},
    {"lazy-optimizer", FLAG_SWITCH, &config.lazy_optimizer, "reserve AdamW's moments at the end of step 1", 0, 0, NULL},
    {"precision", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"matmul",     FLAG_CHOICE, &config.matmul, "what inputs of matrix products are rounded to", 0, 0, "fp32|bf16"},
    {"fp8",        FLAG_CHOICE, &config.fp8, "the blocks' linear layers in 8 bits; hybrid: gradients as E5M2", 0, 0, FP8_RECIPES},
    {"run", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"eval-every", FLAG_INT, &config.eval_every, "evaluate every N steps; 0: at the end", 0, COUNT, NULL},
    {"eval-batches", FLAG_INT, &config.eval_batches, "global batches of an evaluation", 1, COUNT, NULL},
    {"sample",     FLAG_INT, &config.sample, "write N tokens at the end", 0, 1e9, NULL},
    {"init",       FLAG_TEXT, &config.init, "start from the weights in this safetensors file", 0, 0, NULL},
    {"save",       FLAG_TEXT, &config.save, "write checkpoints to this directory", 0, 0, NULL},
    {"save-every", FLAG_INT, &config.save_every, "every N steps; 0: at the end", 0, COUNT, NULL},
    {"keep",       FLAG_INT, &config.keep, "how many checkpoints stay", 1, 1e6, NULL},
    {"resume",     FLAG_TEXT, &config.resume, "go on from the newest checkpoint in this directory", 0, 0, NULL},
    {"log",        FLAG_TEXT, &config.log, "write JSON lines", 0, 0, NULL},
    {"trace",      FLAG_TEXT, &config.trace, "write a Chrome trace of all ranks (ui.perfetto.dev)", 0, 0, NULL},
    {"timeout",    FLAG_REAL, &config.timeout, "seconds of silence before who is missing is named; longer than a save takes", 1, 1e6, NULL},
    {"check-replicas", FLAG_INT, &config.check_replicas, "compare all copies of each weight every N steps; 0: never", 0, COUNT, NULL},
    {"peak-tflops", FLAG_REAL, &config.peak_tflops, "a rank's peak, for MFU; else measured (CPU) or published (GPU)", 1e-6, 1e6, NULL},
    {"dry-run",    FLAG_SWITCH, &config.dry_run, "say what the run would need and send, and end", 0, 0, NULL},
    {"json",       FLAG_SWITCH, &config.json, "as JSON (with --dry-run)", 0, 0, NULL},
    {"explain",    FLAG_SWITCH, &config.explain, "print groups, parameters and messages, and end", 0, 0, NULL},
    {"quiet",      FLAG_SWITCH, &config.quiet, "print nothing but errors", 0, 0, NULL},
};
// clang-format on

// ---- filling in -----------------------------------------------------------------------------------------------------

// A number of the file's description, at least so large; 0 where it has none.
static long meta_number(const SafeTensors *s, const char *path, const char *name, long least) {
    const char *text = safetensors_meta(s, name);
    if (!text) return 0;
    char *end;
    long x = strtol(text, &end, 10);
    if (*end || x < least || x > 10000000)
        fail_all(EXIT_USAGE, "%s: its metadata says %s = %s", path, name, text);
    return x;
}

static void take_setting(const SafeTensors *s, const char *path, int i) {
    long *value = setting(&config, i), least = value == &config.shared_experts ? 0 : 1;
    long saved = meta_number(s, path, model_settings[i].name, least);
    // A dense model's description says nothing of experts.
    bool dense = value == &config.experts && safetensors_meta(s, "layers");
    if (!safetensors_meta(s, model_settings[i].name) && !dense) return;
    if (*value == NOT_GIVEN) *value = saved;
    if (*value != saved)
        fail_all(EXIT_USAGE, "--%s %ld: %s holds another model; nearest: %ld", model_settings[i].flag, *value,
                 path, saved);
}

// Scores are sigmoids where a bias balances them, and a softmax else: two models.
static void take_router(const SafeTensors *s, const char *path) {
    Config *c = &config;
    const char *router = safetensors_meta(s, "router");
    if (!router) return;
    bool sigmoid = strcmp(router, "sigmoid") == 0;
    if (!sigmoid && strcmp(router, "softmax") != 0)
        fail_all(EXIT_USAGE, "%s: its metadata says router = %s; known: softmax, sigmoid", path, router);
    if (c->balance == NOT_GIVEN) c->balance = sigmoid ? BALANCE_BIAS : BALANCE_AUX;
    if ((c->balance == BALANCE_BIAS) != sigmoid)
        fail_all(EXIT_USAGE, "--balance %s: the scores of %s are a %s; nearest: %s",
                 flag_choice(BALANCES, c->balance), path, router, sigmoid ? "bias" : "aux");
}

// The model as a checkpoint describes it.
static void config_from_file(const char *path) {
    Config *c = &config;
    SafeTensors *s = safetensors_open(path);
    const char *arch = safetensors_meta(s, "arch"), *tie = safetensors_meta(s, "tie");
    const char *theta = safetensors_meta(s, "rope_theta");
    long length = meta_number(s, path, "seq", 1), trained = meta_number(s, path, "trained_seq", 1);
    if (arch) {
        if (strcmp(arch, "llama") != 0 && strcmp(arch, "gpt2") != 0)
            fail_all(EXIT_USAGE, "%s: its metadata says arch = %s; known: %s", path, arch, ARCHS);
        int saved = strcmp(arch, "llama") == 0 ? ARCH_LLAMA : ARCH_GPT2;
        if (c->arch != NOT_GIVEN && c->arch != saved)
            fail_all(EXIT_USAGE, "--arch %s: %s holds another model; nearest: %s", flag_choice(ARCHS, c->arch),
                     path, arch);
        c->arch = saved;
    }
    for (int i = 0; i < MODEL_SETTINGS; i++) take_setting(s, path, i);
    if (c->experts > 0) take_router(s, path);
    if (tie && c->tie && strcmp(tie, "1") != 0)
        fail_all(EXIT_USAGE, "--tie: %s holds a model with a head of its own; leave the flag out", path);
    if (tie) c->tie = strcmp(tie, "1") == 0;
    if (theta && c->rope_theta == NOT_GIVEN) c->rope_theta = strtod(theta, NULL);
    if (!(c->rope_theta == NOT_GIVEN || c->rope_theta >= 1))
        fail_all(EXIT_USAGE, "%s: its metadata says rope_theta = %s", path, theta);
    if (length) {
        if (c->seq == NOT_GIVEN) c->seq = trained ? trained : length;
        if (c->arch == ARCH_GPT2 && c->seq > length)
            fail_all(EXIT_USAGE, "--seq %ld: longer than the position table of %s; nearest: %ld", c->seq, path,
                     length);
        c->positions = length;
    }
    safetensors_close(s);
}

static void fill_in(long *value, long otherwise) {
    if (*value == NOT_GIVEN) *value = otherwise;
}

// Of a preset without experts: two of those that --experts asks for, each like the MLP.
static void experts_from_preset(Config *c) {
    static const ExpertPreset dense = {.topk = 2, .route_groups = 1};
    size_t first = LENGTH(presets) - LENGTH(expert_presets), model = (size_t)c->model;
    const ExpertPreset *p = model < first ? &dense : &expert_presets[model - first];
    fill_in(&c->experts, p->experts);
    if (c->topk == NOT_GIVEN) c->topk = p->topk < c->experts ? p->topk : c->experts;
    fill_in(&c->shared_experts, p->shared_experts);
    fill_in(&c->expert_ffn, p->expert_ffn && !flag_given(&config.ffn) ? p->expert_ffn : c->ffn);
    fill_in(&c->moe_every, 1);
    bool grouped = c->route_groups == NOT_GIVEN || c->route_groups == p->route_groups;
    fill_in(&c->route_groups, p->route_groups);
    fill_in(&c->route_nodes, grouped && p->route_nodes ? p->route_nodes : c->route_groups);
    if (c->balance == NOT_GIVEN) c->balance = p->balance;
}

// Sizes that are still open come from the preset.
static void config_from_preset(void) {
    Config *c = &config;
    const Preset *p = &presets[c->model];
    if (c->arch == NOT_GIVEN) c->arch = p->arch;
    if (c->arch == (int)p->arch) c->tie |= p->tie;
    // Where the preset ties one size to another, the ratio is kept: multi-head stays multi-head, 4·hidden stays so.
    if (c->kv_heads == NOT_GIVEN && c->heads != NOT_GIVEN && p->kv_heads == p->heads) c->kv_heads = c->heads;
    if (c->ffn == NOT_GIVEN && c->hidden != NOT_GIVEN && p->ffn % p->hidden == 0)
        c->ffn = p->ffn / p->hidden * c->hidden;
    const long value[] = {p->layers, p->heads, p->kv_heads, p->hidden, p->ffn, p->vocab};
    for (size_t i = 0; i < LENGTH(value); i++)
        if (*setting(c, (int)i) == NOT_GIVEN && value[i] > 0) *setting(c, (int)i) = value[i];
    experts_from_preset(c);
}

// A resumed run goes on in the data order of the run that it resumes.
static void seed_from_run(const char *checkpoint) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", checkpoint);
    SafeTensors *s = safetensors_open(path);
    const char *seed = safetensors_meta(s, "seed");
    if (seed) config.seed = strtol(seed, NULL, 10);
    safetensors_close(s);
}

// ---- what is refused ------------------------------------------------------------------------------------------------

// Refuses x where `step` does not divide it, and suggests the multiples of `step` on both sides of x.
static void must_divide(const char *flag, long x, const char *by, long step) {
    long below = x / step * step;
    if (below == x) return;
    if (below == 0)
        fail_all(EXIT_USAGE, "--%s %ld: not a multiple of %s = %ld; nearest: %ld", flag, x, by, step, step);
    fail_all(EXIT_USAGE, "--%s %ld: not a multiple of %s = %ld; nearest: %ld or %ld", flag, x, by, step, below,
             below + step);
}

#define MOST_PASSES 2e6 // of a step's micro-batches through stages: the plan lists them all

// Sizes are counted in 64 bits. What would not fit there is refused, in a dry run too, before it is multiplied.
static void check_countable(const Config *c) {
    double rows = (double)c->micro_batch * (double)c->local_seq, C = (double)c->hidden, F = (double)c->ffn;
    double scores = (double)c->heads * (c->attention == ATTENTION_NAIVE ? (double)c->seq : 1);
    double copies = (double)c->topk * (6 * C + 6 * (double)c->expert_ffn) + (double)c->experts;
    double activations = rows * ((double)c->layers * (16 * C + 6 * F + scores + copies) + 2 * (double)c->vocab);
    double experts = (double)(c->experts + c->shared_experts) * (double)c->expert_ffn;
    double parameters = (double)c->layers * C * (4 * C + 3 * F + 3 * experts + (double)c->experts) +
                        (2 * (double)c->vocab + (double)c->positions) * C;
    // Micro-batches in flight at once, of the whole model: no schedule has more.
    double in_flight = (double)c->accum;
    if (c->schedule != SCHEDULE_AFAB) in_flight = fmin(in_flight, 2 * (double)c->pp - 1);
    double bytes = 4 * activations * in_flight + 20 * parameters;
    if (bytes > 1e18)
        fail_all(EXIT_USAGE,
                 "--layers %ld --hidden %ld --micro-batch %ld --seq %ld: a rank would need %.1e GB; nearest: "
                 "smaller",
                 c->layers, c->hidden, c->micro_batch, c->seq, bytes * 1e-9);
    double passes = (double)c->accum * (double)(c->pp * c->virtual_stages);
    if (passes > MOST_PASSES)
        fail_all(EXIT_USAGE,
                 "--%s %ld: %ld micro-batches through %ld stages, more than %.0f in all; nearest: fewer",
                 c->batch_tokens == NOT_GIVEN ? "accum" : "batch-tokens",
                 c->batch_tokens == NOT_GIVEN ? c->accum : c->batch_tokens, c->accum, c->pp * c->virtual_stages,
                 MOST_PASSES);
    double tokens = rows * (double)c->accum * (double)c->dp_cp;
    if (tokens > 1e18)
        fail_all(EXIT_USAGE, "--micro-batch %ld --accum %ld --dp %ld: %.1e tokens a step; nearest: fewer",
                 c->micro_batch, c->accum, c->dp, tokens);
}

// Why so many tensor-parallel ranks cannot share this model evenly; NULL: they can.
static const char *tp_fault(const Config *c, long tp) {
    static char fault[64];
    if (c->heads % tp != 0)
        snprintf(fault, sizeof fault, "does not divide %ld attention heads", c->heads);
    else if (c->kv_heads % tp != 0 && tp % c->kv_heads != 0)
        snprintf(fault, sizeof fault, "can neither split nor copy %ld key/value heads evenly", c->kv_heads);
    else if (c->ffn % tp != 0 && expert_blocks(c) < c->layers)
        snprintf(fault, sizeof fault, "does not divide --ffn %ld", c->ffn);
    else if (c->expert_ffn % tp != 0 && c->experts)
        snprintf(fault, sizeof fault, "does not divide --expert-ffn %ld", c->expert_ffn);
    else if (c->vocab < tp)
        snprintf(fault, sizeof fault, "is more than the %ld tokens of the vocabulary", c->vocab);
    else
        return NULL;
    return fault;
}

// Those that one data-parallel rank takes of the world.
static long inner_ranks(const Config *c) {
    return c->tp * c->cp * c->pp;
}

// The ranks of the run. One process answers for any number where nothing runs.
static long run_size(const Config *c) {
    bool asks = c->dry_run || c->explain;
    if (c->ranks != NOT_GIVEN) return c->ranks;
    long inner = inner_ranks(c);
    if (asks && c->dp != NOT_GIVEN) return c->dp * inner;
    return asks && launch_size() == 1 ? inner : launch_size();
}

// What the length of a sequence must be a multiple of: each rank of cp has an equal part of it, two (zigzag) or one, and --sp
// cuts that among tp.
static long sequence_unit(const Config *c) {
    long unit = c->sp ? c->tp : 1;
    if (c->cp > 1 && c->cp_order == ORDER_ZIGZAG && unit % 2 != 0) unit *= 2;
    return c->cp * unit;
}

static void check_tp(Config *c) {
    if (tp_fault(c, c->tp)) {
        long below = c->tp - 1, above = c->tp + 1; // 1 is always right
        while (tp_fault(c, below)) below--;
        while (above <= c->heads && tp_fault(c, above)) above++;
        char more[32] = "";
        if (above <= c->heads) snprintf(more, sizeof more, " or %ld", above);
        fail_all(EXIT_USAGE, "--tp %ld %s; nearest: %ld%s", c->tp, tp_fault(c, c->tp), below, more);
    }
    if (c->tp == 1) c->sp = false; // all rows are one rank's
}

// Do dp, tp, cp and pp make the run's ranks?
static bool grid_agrees(const Config *c) {
    long world = run_size(c), inner = inner_ranks(c);
    return c->dp == NOT_GIVEN ? world % inner == 0 : world == c->dp * inner;
}

// The schedule's name, and how many stages a rank has of it.
static void check_schedule(Config *c) {
    if (strcmp(flag_choice(SCHEDULES_AND_ALIAS, c->schedule), "gpipe") == 0) c->schedule = SCHEDULE_AFAB;
    bool any = c->schedule == SCHEDULE_INTERLEAVED;
    long usual = any || c->schedule == SCHEDULE_ZBV ? 2 : 1, v = c->virtual_stages;
    if (v == NOT_GIVEN) v = c->virtual_stages = usual;
    if (any ? v < usual : v != usual)
        fail_all(EXIT_USAGE,
                 "--virtual-stages %ld: --schedule %s has %ld%s a rank; nearest: %ld, or --schedule %s", v,
                 flag_choice(SCHEDULES, c->schedule), usual, any ? " or more" : "", usual,
                 v == 1 ? "1f1b" : "interleaved");
}

// Would another pipeline than c's do, if dp follows? Micro-batches that fit neither are another fault.
static bool pp_fits(const Config *c, const Config *other) {
    long world = run_size(other), inner = inner_ranks(other), dp = world / inner, accum = c->accum;
    if (dp * inner != world || other->pp * other->virtual_stages > other->layers) return false;
    if (c->batch_tokens != NOT_GIVEN) accum = c->batch_tokens / (c->micro_batch * c->seq * dp);
    return pp_accepts(other, accum) || !pp_accepts(c, accum);
}

// Takes from tp, cp and pp of another grid than c's what must go for it to be legal, if dp follows. 1 always is.
static void make_legal(const Config *c, Config *o) {
    while (run_size(o) % o->tp != 0 || tp_fault(o, o->tp) || (o->sp && o->seq % o->tp != 0)) o->tp--;
    while (run_size(o) % (o->tp * o->cp) != 0 || o->seq % sequence_unit(o) != 0) o->cp--;
    while (o->pp > 1 && !pp_fits(c, o)) o->pp--;
}

static void add_flag(char *flags, size_t size, const char *name, long value) {
    size_t n = strlen(flags);
    snprintf(flags + n, size - n, "%s--%s %ld", n ? " " : "", name, value);
}

// What of the world one data-parallel rank takes, as flags: "--tp 2 --pp 4".
static const char *inner_flags(const Config *c) {
    static char flags[96];
    flags[0] = '\0';
    if (c->tp > 1 || inner_ranks(c) == 1) add_flag(flags, sizeof flags, "tp", c->tp);
    if (c->cp > 1) add_flag(flags, sizeof flags, "cp", c->cp);
    if (c->pp > 1) add_flag(flags, sizeof flags, "pp", c->pp);
    return flags;
}

// What makes another grid of c's, as flags.
static const char *changed_flags(const Config *c, const Config *other) {
    static char flags[96];
    long dp = run_size(other) / inner_ranks(other);
    flags[0] = '\0';
    if (other->tp != c->tp) add_flag(flags, sizeof flags, "tp", other->tp);
    if (other->cp != c->cp) add_flag(flags, sizeof flags, "cp", other->cp);
    if (other->pp != c->pp) add_flag(flags, sizeof flags, "pp", other->pp);
    if (flag_given(&config.dp) && c->dp != dp) add_flag(flags, sizeof flags, "dp", dp);
    return flags;
}

// More stages than layers. Names a pipeline that has not, and the layers for this one.
static void refuse_stages(const Config *c) {
    long stages = c->pp * c->virtual_stages, v = c->layers / c->pp;
    char given[64] = "", nearest[112], layers[40] = "";
    if (flag_given(&config.virtual_stages))
        snprintf(given, sizeof given, " --virtual-stages %ld", c->virtual_stages);
    else if (c->virtual_stages > 1)
        snprintf(given, sizeof given, " --schedule %s", flag_choice(SCHEDULES, c->schedule));
    Config other = *c;
    other.pp--;
    make_legal(c, &other);
    if (c->schedule == SCHEDULE_INTERLEAVED && v >= 2)
        snprintf(nearest, sizeof nearest, "--virtual-stages %ld", v);
    else
        snprintf(nearest, sizeof nearest, "%s", changed_flags(c, &other));
    if (!c->init && !c->resume && stages <= MOST_LAYERS && grid_agrees(c))
        snprintf(layers, sizeof layers, ", or --layers %ld", stages);
    fail_all(EXIT_USAGE, "--pp %ld%s: %ld stages, and --layers %ld; nearest: %s%s", c->pp, given, stages,
             c->layers, nearest, layers);
}

static void check_pp(Config *c) {
    check_schedule(c);
    if (c->pp > 1 && c->pp * c->virtual_stages > c->layers) refuse_stages(c);
    if (c->pp > 1 || c->schedule == SCHEDULE_AFAB) return;
    // Alone, a rank waits for no other: no order is better.
    c->schedule = SCHEDULE_1F1B;
    c->virtual_stages = 1;
}

// Who cuts a sequence, in words.
static const char *sequence_cuts(const Config *c) {
    static char cuts[160];
    bool zigzag = c->cp_order == ORDER_ZIGZAG;
    int n = 0;
    if (c->cp > 1)
        n = snprintf(cuts, sizeof cuts, "--cp-order %s cuts it into %s--cp %ld equal parts",
                     flag_choice(CP_ORDERS, c->cp_order), zigzag ? "2 · " : "", c->cp);
    if (c->cp > 1 && c->sp)
        snprintf(cuts + n, sizeof cuts - (size_t)n, ", and --sp each rank's tokens into --tp %ld", c->tp);
    else if (c->sp)
        snprintf(cuts, sizeof cuts, "--sp cuts it into --tp %ld equal parts", c->tp);
    return cuts;
}

// A sequence that cannot be cut as it should. One that is shorter than that has parts needs fewer ranks.
static void refuse_sequence(const Config *c) {
    long unit = sequence_unit(c), below = c->seq / unit * unit, above = below + unit;
    bool longer = c->arch == ARCH_LLAMA || above <= c->positions ||
                  !(c->init || c->resume); // has the file such positions?
    longer = longer && above <= MOST_SEQ;
    char nearest[160], more[40] = "";
    Config other = *c;
    if (c->cp > 1)
        other.cp--;
    else
        other.tp--;
    make_legal(c, &other);
    if (below > 0 && longer) snprintf(more, sizeof more, " or %ld", above);
    if (below == 0 && longer && grid_agrees(c)) snprintf(more, sizeof more, ", or --seq %ld", above);
    if (below > 0)
        snprintf(nearest, sizeof nearest, "%ld%s", below, more);
    else if (c->cp == 1 && longer)
        snprintf(nearest, sizeof nearest, "%ld", above);
    else
        snprintf(nearest, sizeof nearest, "%s%s", changed_flags(c, &other), more);
    fail_all(EXIT_USAGE, "--seq %ld: %s; nearest: %s", c->seq, sequence_cuts(c), nearest);
}

static void check_cp(Config *c) {
    if (c->cp == 1) c->cp_order = ORDER_CONTIGUOUS; // a sequence is one part
    if (c->cp > 1 && c->attention == ATTENTION_NAIVE) {
        bool flash = (size_t)(c->hidden / c->heads) <= flash_attention_most_channels();
        Config alone = *c;
        alone.cp = 1;
        fail_all(EXIT_USAGE,
                 "--attention naive: it keeps whole rows of scores, and keys of --cp %ld ranks come in blocks; "
                 "nearest: %s",
                 c->cp, flash ? "flash" : changed_flags(c, &alone));
    }
    if (c->seq % sequence_unit(c) != 0) refuse_sequence(c);
}

// Flash attention on a GPU takes heads of so many channels at most.
static void check_heads(const Config *c) {
    size_t D = (size_t)(c->hidden / c->heads), most = flash_attention_most_channels();
    if (c->attention != ATTENTION_FLASH || D <= most) return;
    long heads = (c->hidden - 1) / (long)most + 1; // the fewest that make a head small enough, and are legal
    while (heads < c->hidden && (c->hidden % heads != 0 || heads % c->kv_heads != 0 ||
                                 (c->arch == ARCH_LLAMA && c->hidden / heads % 2 != 0)))
        heads++;
    char nearest[48] = "";
    Config alone = *c;
    alone.cp = 1; // as naive attention needs it
    if (heads < c->hidden) snprintf(nearest, sizeof nearest, "--heads %ld, or ", heads);
    fail_all(EXIT_USAGE,
             "--hidden %ld: %zu channels a head; flash attention on this device takes %zu at most; nearest: "
             "%s--attention naive%s%s",
             c->hidden, D, most, nearest, c->cp > 1 ? " " : "", changed_flags(c, &alone));
}

static void refuse_world(const Config *c, long world) {
    long inner = inner_ranks(c), below = world / inner * inner, above = below + inner;
    Config other = *c;
    if (c->dp != NOT_GIVEN && c->dp * inner <= MOST_STARTED)
        fail_all(EXIT_USAGE, "--dp %ld: with %s it takes %ld ranks, the run has %ld; nearest: --ranks %ld",
                 c->dp, inner_flags(c), c->dp * inner, world, c->dp * inner);
    make_legal(c, &other);
    char ranks[64] = "";
    if (above > MOST_STARTED) above = 0;
    if (c->dp != NOT_GIVEN) above = below = 0;
    if (below && above)
        snprintf(ranks, sizeof ranks, "--ranks %ld or %ld, or ", below, above);
    else if (below || above)
        snprintf(ranks, sizeof ranks, "--ranks %ld, or ", below + above);
    fail_all(EXIT_USAGE, "%s: needs %ld ranks, or a multiple of that; the run has %ld; nearest: %s%s",
             inner_flags(c), inner, world, ranks, changed_flags(c, &other));
}

// The grid, for this many ranks.
static void check_grid(Config *c, long world) {
    long inner = inner_ranks(c), groups = world / inner;
    if (world > MOST_RANKS)
        fail_all(EXIT_USAGE, "--dp %ld %s: %ld ranks, more than %d; nearest: fewer", groups, inner_flags(c),
                 world, MOST_RANKS);
    if (groups * inner != world) refuse_world(c, world);
    if (c->dp == NOT_GIVEN) c->dp = groups;
    if (c->dp != groups)
        fail_all(EXIT_USAGE, "--dp %ld: the run has %ld rank%s and %s; nearest: %ld", c->dp, world,
                 world == 1 ? "" : "s", inner_flags(c), groups);
}

// What the schedule asks of a step's micro-batches, in words.
static const char *micro_batches_wanted(const Config *c) {
    static char wanted[96];
    const char *name = flag_choice(SCHEDULES, c->schedule);
    if (c->schedule == SCHEDULE_INTERLEAVED)
        snprintf(wanted, sizeof wanted, "--schedule %s takes a multiple of --pp %ld", name, c->pp);
    else if (c->schedule == SCHEDULE_ZBV)
        snprintf(wanted, sizeof wanted, "--schedule %s needs at least 2 · --pp %ld − 1 micro-batches", name,
                 c->pp);
    else
        snprintf(wanted, sizeof wanted, "--schedule %s needs at least --pp %ld micro-batches", name, c->pp);
    return wanted;
}

// Micro-batches a step: as given, or as many as --batch-tokens are, and such that the schedule takes them.
static void check_accum(Config *c) {
    bool by_tokens = c->batch_tokens != NOT_GIVEN;
    long one = by_tokens ? c->micro_batch * c->seq * c->dp : 1, asked = by_tokens ? c->batch_tokens : c->accum;
    if ((double)one > COUNT)
        fail_all(EXIT_USAGE,
                 "--batch-tokens %ld: one micro-batch of all ranks is %ld; nearest: a smaller --micro-batch",
                 asked, one);
    long m = asked / one, below = m, above = m + 1;
    while (below > 0 && !pp_accepts(c, below)) below--;
    while (!pp_accepts(c, above)) above++;
    char nearest[64];
    if (below > 0 && (by_tokens || above <= MOST_ACCUM))
        snprintf(nearest, sizeof nearest, "%ld or %ld", below * one, above * one);
    else
        snprintf(nearest, sizeof nearest, "%ld", (below > 0 ? below : above) * one);
    if (m * one != asked)
        fail_all(EXIT_USAGE, "--batch-tokens %ld: not a multiple of micro-batch · seq · dp = %ld; nearest: %s",
                 asked, one, nearest);
    if (by_tokens && flag_given(&config.accum) && c->accum != m)
        fail_all(EXIT_USAGE, "--accum %ld: --batch-tokens %ld needs %ld; give one of the two", c->accum, asked,
                 m);
    c->accum = m;
    if (pp_accepts(c, m)) return;
    if (by_tokens)
        fail_all(EXIT_USAGE, "--batch-tokens %ld: %ld micro-batch%s, but %s; nearest: %s", asked, m,
                 m == 1 ? "" : "es", micro_batches_wanted(c), nearest);
    fail_all(EXIT_USAGE, "--accum %ld: %s; nearest: %s", m, micro_batches_wanted(c), nearest);
}

// Divides x all of these? (0 is divided by all.)
typedef struct {
    long of[2];
} Divided;

static bool divides_all(long x, Divided d) {
    return d.of[0] % x == 0 && d.of[1] % x == 0;
}

// Refuses what does not, for this reason. 1 always does.
static void refuse_divisor(const char *flag, long x, const char *what, long of, Divided d) {
    long below = x - 1, above = x + 1;
    char more[32] = "";
    while (!divides_all(below, d)) below--;
    while (above <= of && !divides_all(above, d)) above++;
    if (above <= of) snprintf(more, sizeof more, " or %ld", above);
    fail_all(EXIT_USAGE, "--%s %ld does not divide %s%ld%s; nearest: %ld%s", flag, x, what, of,
             *what ? "" : " experts", below, more);
}

// The experts and the router of a model that has some.
static void check_experts(Config *c) {
    if (c->experts == 0) {
        c->topk = c->shared_experts = c->expert_ffn = 0;
        c->route_groups = c->route_nodes = 1;
        return;
    }
    if (c->topk > c->experts)
        fail_all(EXIT_USAGE, "--topk %ld: more than --experts %ld; nearest: %ld", c->topk, c->experts,
                 c->experts);
    if (c->moe_every > c->layers)
        fail_all(EXIT_USAGE,
                 "--moe-every %ld: more than --layers %ld, so that no block has experts; nearest: %ld",
                 c->moe_every, c->layers, c->layers);
    if (c->experts % c->route_groups != 0)
        refuse_divisor("route-groups", c->route_groups, "", c->experts, (Divided){{c->experts, 0}});
    if (c->route_nodes > c->route_groups)
        fail_all(EXIT_USAGE, "--route-nodes %ld: more than --route-groups %ld; nearest: %ld", c->route_nodes,
                 c->route_groups, c->route_groups);
    long each = c->experts / c->route_groups, least = (c->topk + each - 1) / each;
    if (c->route_nodes < least)
        fail_all(EXIT_USAGE,
                 "--route-nodes %ld: %ld experts a group make %ld, fewer than --topk %ld; nearest: %ld",
                 c->route_nodes, each, c->route_nodes * each, c->topk, least);
}

static void check_ep(Config *c) {
    Divided both = {{c->experts, c->dp}};
    if (c->ep > 1 && c->experts == 0)
        fail_all(EXIT_USAGE, "--ep %ld: the model has no experts; nearest: 1, or --experts %ld", c->ep, c->ep);
    if (c->experts % c->ep != 0) refuse_divisor("ep", c->ep, "", c->experts, both);
    if (c->dp % c->ep != 0) refuse_divisor("ep", c->ep, "--dp ", c->dp, both);
}

// Derives what follows and refuses what cannot be.
static void config_check(Config *c) {
    must_divide("hidden", c->hidden, "--heads", c->heads);
    must_divide("heads", c->heads, "--kv-heads", c->kv_heads);
    check_experts(c);
    check_tp(c);
    check_pp(c);
    check_cp(c);
    check_grid(c, run_size(c));
    c->local_seq = c->seq / c->cp;
    c->dp_cp = c->dp * c->cp;
    check_ep(c);
    c->replicas = c->dp_cp / c->ep;
    check_accum(c);
    check_countable(c);
    if (c->arch == ARCH_LLAMA && c->hidden / c->heads % 2 != 0)
        fail_all(EXIT_USAGE, "--hidden %ld: %ld channels a head cannot be paired for rotation; nearest: %ld",
                 c->hidden, c->hidden / c->heads, c->hidden + c->heads);
    check_heads(c);
    if (c->arch == ARCH_GPT2) c->tie = true;
    if (c->arch == ARCH_LLAMA) c->positions = 0;
    c->padded_vocab = ((c->vocab - 1) / c->tp + 64) / 64 * 64; // of the largest slice
    if (c->min_lr == NOT_GIVEN) c->min_lr = c->lr / 10;
    if (c->min_lr > c->lr)
        fail_all(EXIT_USAGE, "--min-lr %g: above --lr %g; nearest: %g", c->min_lr, c->lr, c->lr);
    c->global_batch = c->micro_batch * c->accum * c->dp;
    if (c->save_every && !c->save) fail_all(EXIT_USAGE, "--save-every %ld: needs --save DIR", c->save_every);
    if (c->log && c->trace && strcmp(c->log, c->trace) == 0)
        fail_all(EXIT_USAGE, "--trace %s: --log writes there; nearest: %s.json", c->trace, c->trace);
    if (c->init && c->resume)
        fail_all(EXIT_USAGE, "--init %s: --resume brings its own weights; give one of the two", c->init);
    if (c->json && !c->dry_run) fail_all(EXIT_USAGE, "--json: goes with --dry-run");
}

// ---- data -----------------------------------------------------------------------------------------------------------

Data *train_data, *val_data;

// Opens what --data and --val name. A text without --val holds out its last tenth, if that is a window long.
static void open_data(Config *c) {
    static char *repository[] = {REPOSITORY_TEXT};
    if (c->dry_run && !c->data.count) { // nothing is read
        if (c->vocab == NOT_GIVEN) c->vocab = 256;
        return;
    }
    FlagFiles files = c->data.count ? c->data : (FlagFiles){repository, 1};
    size_t T = (size_t)c->seq;
    uint64_t seed = (uint64_t)c->seed;
    train_data = data_open(files.path, files.count, T, seed, DATA_ALL);
    if (c->vocab == NOT_GIVEN) c->vocab = data_vocab(train_data);
    if (c->val.count) {
        val_data = data_open(c->val.path, c->val.count, T, seed, DATA_ALL);
        if (data_vocab(val_data) != data_vocab(train_data))
            fail_all(
                EXIT_USAGE,
                "--val %s: another kind of tokens than those of --data; both must be texts, or alike shards",
                c->val.path[0]);
    } else if (data_vocab(train_data) == 256 && data_tokens(train_data) / 10 > T) {
        data_close(train_data);
        train_data = data_open(files.path, files.count, T, seed, DATA_FIRST_NINE_TENTHS);
        val_data = data_open(files.path, files.count, T, seed, DATA_LAST_TENTH);
    }
    if (!val_data && c->eval_every) fail_all(EXIT_USAGE, "--eval-every %ld: needs --val FILE", c->eval_every);
}

static void check_data(const Config *c) {
    if (!train_data || c->explain || data_windows(train_data) >= (uint64_t)c->global_batch) return;
    fail_all(
        EXIT_USAGE,
        "--data %s: %llu sequences of %ld tokens, one step takes %ld; nearest: fewer --micro-batch, --accum or "
        "--dp",
        c->data.count ? c->data.path[0] : REPOSITORY_TEXT, (unsigned long long)data_windows(train_data), c->seq,
        c->global_batch);
}

// ---- all of it ------------------------------------------------------------------------------------------------------

long configure(int argc, char **argv, char *checkpoint, size_t checkpoint_size) {
    Config *c = &config;
    flags_parse(flags, LENGTH(flags), argc, argv,
                "train: GPT-2 and Llama-style language models, on any number of ranks.\n"
                "usage: ./train [flags], ./train --ranks 2 [flags], mpirun -n 2 ./train [flags]");
    say_quiet(c->quiet);
    long step = c->resume ? checkpoint_find(c->resume, checkpoint, checkpoint_size) : 0;
    if (c->resume) c->lazy_optimizer = false; // the moments come with the weights
    char weights[PATH_MAX];
    snprintf(weights, sizeof weights, "%s/weights.safetensors", checkpoint);
    const char *file = c->resume ? weights : c->init;
    if (flag_given(&config.model)) config_from_preset();
    if (file) config_from_file(file);
    config_from_preset();
    const Preset *p = &presets[c->model];
    if (c->seq == NOT_GIVEN) c->seq = p->seq;
    if (c->positions == 0) c->positions = c->seq > p->seq ? c->seq : p->seq;
    if (c->rope_theta == NOT_GIVEN) c->rope_theta = p->rope_theta > 0 ? p->rope_theta : 10000;
    if (c->resume && !flag_given(&config.seed)) seed_from_run(checkpoint);
    open_data(c);
    config_check(c);
    check_data(c);
    if (step >= c->steps)
        fail_all(EXIT_USAGE, "--steps %ld: %s stands at step %ld already; nearest: %ld", c->steps, checkpoint,
                 step, step + 1);
    return step;
}

// ---- what has no effect ---------------------------------------------------------------------------------------------

// Some weight is held by more than one rank: over dp all are, below ZeRO-3; over tp those that are not cut; over pp a tied
// embedding, unless both ends are one rank's.
bool has_replicas(const Config *c) {
    return c->tp > 1 || (c->dp_cp > 1 && c->zero < 3) || (c->tie && c->pp > 1 && c->schedule != SCHEDULE_ZBV);
}

static void say_no_experts(void) {
    static const struct {
        const char *name;
        const void *value;
    } of_experts[] = {{"topk", &config.topk},
                      {"shared-experts", &config.shared_experts},
                      {"expert-ffn", &config.expert_ffn},
                      {"moe-every", &config.moe_every},
                      {"balance", &config.balance},
                      {"route-groups", &config.route_groups},
                      {"route-nodes", &config.route_nodes}};
    for (size_t i = 0; i < LENGTH(of_experts); i++)
        if (flag_given(of_experts[i].value)) say("--%s changes nothing: no --experts", of_experts[i].name);
}

void say_without_effect(const Config *c) {
    bool bf16_build = sizeof(floatX) == 2;
    if (c->recompute == RECOMPUTE_SELECTIVE && c->attention == ATTENTION_FLASH)
        say("--recompute selective changes nothing: flash attention already computes the scores again");
    if (c->grad_accum_fp32 && !bf16_build)
        say("--grad-accum-fp32 changes nothing: this build's gradients are fp32");
    if (c->arch == ARCH_GPT2 && flag_given(&config.rope_theta))
        say("--rope-theta changes nothing: gpt2 learns its positions");
    if (flag_given(&config.keep) && !c->save) say("--keep changes nothing: no --save");
    if (flag_given(&config.eval_batches) && !val_data)
        say("--eval-batches changes nothing: no validation data");
    if (c->zero > 0 && c->dp_cp == 1)
        say("--zero %ld changes nothing: one data-parallel rank holds all shards", c->zero);
    if (flag_given(&config.sp) && c->tp == 1)
        say("--sp changes nothing: one tensor-parallel rank holds all rows");
    if (flag_given(&config.cp_order) && c->cp == 1)
        say("--cp-order changes nothing: one context-parallel rank holds whole sequences");
    if (c->experts == 0)
        say_no_experts();
    else if (flag_given(&config.route_groups) && c->route_nodes == c->route_groups)
        say("--route-groups changes nothing: --route-nodes %ld lets a token go to all of them", c->route_nodes);
    if (flag_given(&config.virtual_stages) && c->pp == 1)
        say("--virtual-stages changes nothing: one pipeline-parallel rank holds all stages");
    if (flag_given(&config.schedule) && c->pp == 1 && (c->schedule != SCHEDULE_AFAB || c->accum == 1))
        say("--schedule changes nothing: one pipeline-parallel rank waits for no other");
    if (c->zero > 1 && c->dp_cp > 1 && c->pp > 1 && c->accum > 1)
        say("--zero %ld with --pp sums gradients over dp after each of %ld micro-batches; --zero 1 sends less: "
            "once "
            "a step",
            c->zero, c->accum);
    bool alone = c->dp_cp * c->tp * c->pp == 1;
    if (flag_given(&config.comm) && alone) say("--comm changes nothing: one rank sends no messages");
    if (c->no_overlap && alone) say("--no-overlap changes nothing: one rank sends no messages");
    if (flag_given(&config.lazy_optimizer) && c->resume)
        say("--lazy-optimizer changes nothing: a resumed run has its moments before the first step");
    if (c->check_replicas && !has_replicas(c))
        say("--check-replicas changes nothing: every weight is held once");
    if (flag_given(&config.matmul) && bf16_build) say("--matmul changes nothing: this build's values are bf16");
}

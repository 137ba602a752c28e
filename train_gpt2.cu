// Trains GPT-2 and Llama-style language models. Reads top to bottom:
//
//   flags -> configuration -> data -> parameters -> memory -> a block, forward and backward -> the model
//         -> one training step -> evaluation, sampling -> main
//
// Host code only, compiled as C11 on every device. What a strategy of parallelism does stands in its own file (dp_zero.c, tp_sp.c),
// what an operation computes in kernels/, where values come from and are saved in state.c, what is printed in report.c, and
// runtime/ is plumbing: memory, messages, files.
//
// Four letters name the work: F is a forward, I the gradient of an input, W the gradient of the weights, B both. (As sizes,
// B, T, C, F … are those of train.h.) W's products have functions of their own, to stand where a rank would else only wait.
#include "train.h"
#include "report.h"
#include "state.h"
#include "runtime/checkpoint.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/launch.h"
#include "runtime/log.h"
#include "runtime/trace.h"
#include "runtime/watchdog.h"
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// =====================================================================================================================
// Flags
// =====================================================================================================================

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define NOT_GIVEN     (-1) // the default of a number that follows from others

static Config config = {
    .arch = NOT_GIVEN,
    .layers = NOT_GIVEN,
    .heads = NOT_GIVEN,
    .kv_heads = NOT_GIVEN,
    .hidden = NOT_GIVEN,
    .ffn = NOT_GIVEN,
    .vocab = NOT_GIVEN,
    .seq = NOT_GIVEN,
    .rope_theta = NOT_GIVEN,
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

// clang-format off
#define PRESET_NAMES "gpt2-tiny|llama-tiny|gpt2-124M|gpt2-355M|gpt2-774M|gpt2-1558M|" \
                     "llama-0.5B|llama-1B|llama-3B|llama-8B|llama-70B|llama-405B|gpt3-175B"
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
};

#define COUNT 1e12 // more than any count of anything here
static const Flag flags[] = {
    {"model", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"model",      FLAG_CHOICE, &config.model, "preset; a flag beside it overrides its value", 0, 0, PRESET_NAMES},
    {"arch",       FLAG_CHOICE, &config.arch, "block", 0, 0, ARCHS},
    {"layers",     FLAG_INT,  &config.layers, "blocks", 1, 1e4, NULL},
    {"heads",      FLAG_INT,  &config.heads, "query heads", 1, 1e4, NULL},
    {"kv-heads",   FLAG_INT,  &config.kv_heads, "key/value heads; divides heads", 1, 1e4, NULL},
    {"hidden",     FLAG_INT,  &config.hidden, "channels of the residual stream", 1, 1e6, NULL},
    {"ffn",        FLAG_INT,  &config.ffn, "channels inside the MLP", 1, 1e7, NULL},
    {"vocab",      FLAG_INT,  &config.vocab, "tokens in the vocabulary; else as the data has it", 1, 1e7, NULL},
    {"seq",        FLAG_INT,  &config.seq, "tokens a sequence (T)", 1, 1e7, NULL},
    {"rope-theta", FLAG_REAL, &config.rope_theta, "base of the rotary angles (llama)", 1, 1e12, NULL},
    {"tie",        FLAG_SWITCH, &config.tie, "the head shares the embedding's weights (gpt2 always does)", 0, 0, NULL},
    {"data", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"data",       FLAG_FILES, &config.data, "text (bytes) or llm.c token shards (.bin); else this repository's text", 0, 0, NULL},
    {"val",        FLAG_FILES, &config.val, "the same, for evaluation; else the last tenth of a text", 0, 0, NULL},
    {"seed",       FLAG_INT,  &config.seed, "of initial weights, data order and samples", 0, COUNT, NULL},
    {"step", FLAG_GROUP, NULL, "", 0, 0, NULL},
    {"micro-batch",  FLAG_INT, &config.micro_batch, "sequences a data-parallel rank and micro-batch (B)", 1, 1e5, NULL},
    {"accum",        FLAG_INT, &config.accum, "micro-batches a step", 1, 1e6, NULL},
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
    {"ranks",      FLAG_INT, &config.ranks, "start this many ranks here, under mpirun", 1, 1e5, NULL},
    {"dp",         FLAG_INT, &config.dp, "data-parallel ranks; follows from the rest", 1, 1e5, NULL},
    {"zero",       FLAG_INT, &config.zero, "shard over dp: 1 the optimizer, 2 gradients too, 3 weights too", 0, 3, NULL},
    {"bucket-mb",  FLAG_REAL, &config.bucket_mb, "merge neighbouring blocks' buckets up to N MB of weights", 0, 1e6, NULL},
    {"tp",         FLAG_INT, &config.tp, "tensor-parallel ranks: they share every matrix", 1, 1e4, NULL},
    {"sp",         FLAG_SWITCH, &config.sp, "and the rows between the matrices (sequence parallelism)", 0, 0, NULL},
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

// =====================================================================================================================
// Configuration: flags, a preset that was asked for, the checkpoint's own description, the default preset; in this order,
// each filling in what is still open, and checked before anything is allocated
// =====================================================================================================================

// A number of the file's description; 0 where it has none.
static long meta_number(const SafeTensors *s, const char *path, const char *name) {
    const char *text = safetensors_meta(s, name);
    if (!text) return 0;
    char *end;
    long x = strtol(text, &end, 10);
    if (*end || x < 1 || x > 10000000) fail_all(EXIT_USAGE, "%s: its metadata says %s = %s", path, name, text);
    return x;
}

static void take_setting(const SafeTensors *s, const char *path, int i) {
    long *value = setting(&config, i), saved = meta_number(s, path, model_settings[i].name);
    if (!saved) return;
    if (*value == NOT_GIVEN) *value = saved;
    if (*value != saved)
        fail_all(EXIT_USAGE, "--%s %ld: %s holds another model; nearest: %ld", model_settings[i].flag, *value,
                 path, saved);
}

// The model as a checkpoint describes it.
static void config_from_file(const char *path) {
    Config *c = &config;
    SafeTensors *s = safetensors_open(path);
    const char *arch = safetensors_meta(s, "arch"), *tie = safetensors_meta(s, "tie");
    const char *theta = safetensors_meta(s, "rope_theta");
    long length = meta_number(s, path, "seq"), trained = meta_number(s, path, "trained_seq");
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
    for (int i = 0; i < MODEL_SETTINGS; i++)
        if (*setting(c, i) == NOT_GIVEN && value[i] > 0) *setting(c, i) = value[i];
}

// Refuses x where `step` does not divide it, and suggests the multiples of `step` on both sides of x.
static void must_divide(const char *flag, long x, const char *by, long step) {
    long below = x / step * step;
    if (below == x) return;
    if (below == 0)
        fail_all(EXIT_USAGE, "--%s %ld: not a multiple of %s = %ld; nearest: %ld", flag, x, by, step, step);
    fail_all(EXIT_USAGE, "--%s %ld: not a multiple of %s = %ld; nearest: %ld or %ld", flag, x, by, step, below,
             below + step);
}

// Sizes are counted in 64 bits. What would not fit there is refused, in a dry run too, before it is multiplied.
static void check_countable(const Config *c) {
    double rows = (double)c->micro_batch * (double)c->seq, C = (double)c->hidden, F = (double)c->ffn;
    double scores = (double)c->heads * (c->attention == ATTENTION_NAIVE ? (double)c->seq : 1);
    double activations = rows * ((double)c->layers * (16 * C + 6 * F + scores) + 2 * (double)c->vocab);
    double parameters =
        (double)c->layers * C * (4 * C + 3 * F) + (2 * (double)c->vocab + (double)c->positions) * C;
    double bytes = 4 * activations + 20 * parameters;
    if (bytes > 1e18)
        fail_all(EXIT_USAGE,
                 "--layers %ld --hidden %ld --micro-batch %ld --seq %ld: a rank would need %.1e GB; nearest: "
                 "smaller",
                 c->layers, c->hidden, c->micro_batch, c->seq, bytes * 1e-9);
    double tokens = rows * (double)c->accum * (double)c->dp;
    if (tokens > 1e18)
        fail_all(EXIT_USAGE, "--micro-batch %ld --accum %ld --dp %ld: %.1e tokens a step; nearest: fewer",
                 c->micro_batch, c->accum, c->dp, tokens);
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
    if (heads < c->hidden) snprintf(nearest, sizeof nearest, "--heads %ld, or ", heads);
    fail_all(EXIT_USAGE,
             "--hidden %ld: %zu channels a head; flash attention on this device takes %zu at most; nearest: "
             "%s--attention naive",
             c->hidden, D, most, nearest);
}

// Why so many tensor-parallel ranks cannot share this model evenly; NULL: they can.
static const char *tp_fault(const Config *c, long tp) {
    static char fault[64];
    if (c->heads % tp != 0)
        snprintf(fault, sizeof fault, "does not divide %ld attention heads", c->heads);
    else if (c->kv_heads % tp != 0 && tp % c->kv_heads != 0)
        snprintf(fault, sizeof fault, "can neither split nor copy %ld key/value heads evenly", c->kv_heads);
    else if (c->ffn % tp != 0)
        snprintf(fault, sizeof fault, "does not divide --ffn %ld", c->ffn);
    else if (c->vocab < tp)
        snprintf(fault, sizeof fault, "is more than the %ld tokens of the vocabulary", c->vocab);
    else
        return NULL;
    return fault;
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
    if (!c->sp || c->seq % c->tp == 0) return;
    long below = c->seq / c->tp * c->tp, above = below + c->tp;
    bool longer = c->arch == ARCH_LLAMA || above <= c->positions ||
                  !(c->init || c->resume); // has the file such positions?
    char nearest[48];
    if (below == 0 || !longer)
        snprintf(nearest, sizeof nearest, "%ld", below ? below : above);
    else
        snprintf(nearest, sizeof nearest, "%ld or %ld", below, above);
    fail_all(EXIT_USAGE, "--seq %ld: --sp cuts it into --tp %ld equal parts; nearest: %s", c->seq, c->tp,
             nearest);
}

// The grid, for this many ranks.
static void check_grid(Config *c, long world) {
    long groups = world / c->tp;
    if (groups * c->tp != world) {
        char below[32] = "";
        if (groups > 0) snprintf(below, sizeof below, "%ld or ", groups * c->tp);
        long tp = c->tp - 1; // 1 is always right
        while (world % tp != 0 || tp_fault(c, tp)) tp--;
        fail_all(EXIT_USAGE,
                 "--tp %ld: needs %ld ranks, or a multiple of that; the run has %ld; nearest: --ranks %s%ld, "
                 "or --tp %ld",
                 c->tp, c->tp, world, below, (groups + 1) * c->tp, tp);
    }
    if (c->dp == NOT_GIVEN) c->dp = groups;
    if (c->dp != groups)
        fail_all(EXIT_USAGE, "--dp %ld: the run has %ld rank%s and --tp %ld; nearest: %ld", c->dp, world,
                 world == 1 ? "" : "s", c->tp, groups);
}

// Derives what follows and refuses what cannot be, for this many ranks.
static void config_check(Config *c, long world) {
    must_divide("hidden", c->hidden, "--heads", c->heads);
    must_divide("heads", c->heads, "--kv-heads", c->kv_heads);
    check_tp(c);
    check_grid(c, world);
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
    if (c->batch_tokens != NOT_GIVEN) {
        long micro = c->micro_batch * c->seq * c->dp;
        must_divide("batch-tokens", c->batch_tokens, "micro-batch · seq · dp", micro);
        if (flag_given(&config.accum) && c->accum != c->batch_tokens / micro)
            fail_all(EXIT_USAGE, "--accum %ld: --batch-tokens %ld needs %ld; give one of the two", c->accum,
                     c->batch_tokens, c->batch_tokens / micro);
        c->accum = c->batch_tokens / micro;
    }
    c->global_batch = c->micro_batch * c->accum * c->dp;
    if (c->save_every && !c->save) fail_all(EXIT_USAGE, "--save-every %ld: needs --save DIR", c->save_every);
    if (c->log && c->trace && strcmp(c->log, c->trace) == 0)
        fail_all(EXIT_USAGE, "--trace %s: --log writes there; nearest: %s.json", c->trace, c->trace);
    if (c->init && c->resume)
        fail_all(EXIT_USAGE, "--init %s: --resume brings its own weights; give one of the two", c->init);
    if (c->json && !c->dry_run) fail_all(EXIT_USAGE, "--json: goes with --dry-run");
}

static Data *train_data, *val_data;

// Some weight is held by more than one rank: over dp all are, below ZeRO-3; over tp those that are not cut.
static bool has_replicas(const Config *c) {
    return c->tp > 1 || (c->dp > 1 && c->zero < 3);
}

// What is legal but does nothing is said, so that nobody waits for an effect.
static void say_without_effect(const Config *c) {
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
    if (c->zero > 0 && c->dp == 1)
        say("--zero %ld changes nothing: one data-parallel rank holds all shards", c->zero);
    if (flag_given(&config.sp) && c->tp == 1)
        say("--sp changes nothing: one tensor-parallel rank holds all rows");
    bool alone = c->dp * c->tp == 1;
    if (flag_given(&config.comm) && alone) say("--comm changes nothing: one rank sends no messages");
    if (c->no_overlap && alone) say("--no-overlap changes nothing: one rank sends no messages");
    if (flag_given(&config.lazy_optimizer) && c->resume)
        say("--lazy-optimizer changes nothing: a resumed run has its moments before the first step");
    if (c->check_replicas && !has_replicas(c))
        say("--check-replicas changes nothing: every weight is held once");
    if (flag_given(&config.matmul) && bf16_build) say("--matmul changes nothing: this build's values are bf16");
}

// =====================================================================================================================
// Data
// =====================================================================================================================

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
    if (!train_data || data_windows(train_data) >= (uint64_t)c->global_batch) return;
    fail_all(
        EXIT_USAGE,
        "--data %s: %llu sequences of %ld tokens, one step takes %ld; nearest: fewer --micro-batch or --accum",
        c->data.count ? c->data.path[0] : REPOSITORY_TEXT, (unsigned long long)data_windows(train_data), c->seq,
        c->global_batch);
}

// =====================================================================================================================
// Parameters: a table of names and shapes
// =====================================================================================================================

// Channels, channels of all query and of all key/value heads, channels in the MLP, vocabulary, positions.
typedef enum { DIM_NONE, DIM_C, DIM_Q, DIM_KV, DIM_F, DIM_V, DIM_P } Dim;
enum { GPT2 = 1 << ARCH_GPT2, LLAMA = 1 << ARCH_LLAMA, BOTH = GPT2 | LLAMA };
#define STD          0.02f // of initial weights, as GPT-2 has it
#define STD_RESIDUAL -2    // STD / √(2L): what is added to the residual stream 2L times
#define ONES         -1

typedef struct {
    const char *name;
    Dim rows, cols;
    Split split;
    float init;
    int archs;
    size_t
        place; // where in Block (or Ends) its address goes; the first of a fused set has the place of the set
} ParamSpec;

#define FUSED           SIZE_MAX // continues the matrix of the parameter before it
#define AT(type, field) offsetof(type, field)
// clang-format off
static const ParamSpec embedding_params[] = {
    {"wte.weight", DIM_V, DIM_C, SPLIT_ROWS, STD, BOTH, AT(Ends, wte)},
    {"wpe.weight", DIM_P, DIM_C, SPLIT_NONE, STD, GPT2, AT(Ends, wpe)},
};
static const ParamSpec block_params[] = {
    {"norm1.weight",         DIM_C,  DIM_NONE, SPLIT_NONE,     ONES,         BOTH,  AT(Block, norm1_weight)},
    {"norm1.bias",           DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, norm1_bias)},
    {"attention.q.weight",   DIM_Q,  DIM_C,    SPLIT_HEADS,    STD,          BOTH,  AT(Block, qkv_weight)},
    {"attention.k.weight",   DIM_KV, DIM_C,    SPLIT_KV_HEADS, STD,          BOTH,  FUSED},
    {"attention.v.weight",   DIM_KV, DIM_C,    SPLIT_KV_HEADS, STD,          BOTH,  FUSED},
    {"attention.q.bias",     DIM_Q,  DIM_NONE, SPLIT_HEADS,    0,            GPT2,  AT(Block, qkv_bias)},
    {"attention.k.bias",     DIM_KV, DIM_NONE, SPLIT_KV_HEADS, 0,            GPT2,  FUSED},
    {"attention.v.bias",     DIM_KV, DIM_NONE, SPLIT_KV_HEADS, 0,            GPT2,  FUSED},
    {"attention.out.weight", DIM_C,  DIM_Q,    SPLIT_COLUMNS,  STD_RESIDUAL, BOTH,  AT(Block, out_weight)},
    {"attention.out.bias",   DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, out_bias)},
    {"norm2.weight",         DIM_C,  DIM_NONE, SPLIT_NONE,     ONES,         BOTH,  AT(Block, norm2_weight)},
    {"norm2.bias",           DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, norm2_bias)},
    {"mlp.gate.weight",      DIM_F,  DIM_C,    SPLIT_ROWS,     STD,          LLAMA, AT(Block, up_weight)},
    {"mlp.up.weight",        DIM_F,  DIM_C,    SPLIT_ROWS,     STD,          LLAMA, FUSED},
    {"mlp.up.weight",        DIM_F,  DIM_C,    SPLIT_ROWS,     STD,          GPT2,  AT(Block, up_weight)},
    {"mlp.up.bias",          DIM_F,  DIM_NONE, SPLIT_ROWS,     0,            GPT2,  AT(Block, up_bias)},
    {"mlp.down.weight",      DIM_C,  DIM_F,    SPLIT_COLUMNS,  STD_RESIDUAL, BOTH,  AT(Block, down_weight)},
    {"mlp.down.bias",        DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, down_bias)},
};
static const ParamSpec head_params[] = {
    {"norm.weight", DIM_C, DIM_NONE, SPLIT_NONE, ONES, BOTH, AT(Ends, norm_weight)},
    {"norm.bias",   DIM_C, DIM_NONE, SPLIT_NONE, 0,    GPT2, AT(Ends, norm_bias)},
    {"head.weight", DIM_V, DIM_C,    SPLIT_ROWS, STD,  BOTH, AT(Ends, head_weight)}, // last: left out when tied
};
// clang-format on

static size_t dim_size(const Config *c, Dim d) {
    const long size[] = {[DIM_NONE] = 1,        [DIM_C] = c->hidden,
                         [DIM_Q] = c->hidden,   [DIM_KV] = c->hidden / c->heads * c->kv_heads,
                         [DIM_F] = c->ffn,      [DIM_V] = c->vocab,
                         [DIM_P] = c->positions};
    return (size_t)size[d];
}

// Appends the parameters of one unit to the table; prefix is "" or "blocks.3.".
static void add_unit(Model *m, const char *prefix, const ParamSpec *spec, size_t n) {
    const Config *c = &m->config;
    for (size_t i = 0; i < n; i++) {
        if (!(spec[i].archs & 1 << c->arch)) continue;
        Param *p = &m->param[m->n_params++];
        snprintf(p->name, sizeof p->name, "%s%s", prefix, spec[i].name);
        p->ndim = spec[i].cols == DIM_NONE ? 1 : 2;
        p->rows = dim_size(c, spec[i].rows);
        p->cols = dim_size(c, spec[i].cols);
        p->split = spec[i].split;
        p->unit = m->n_units;
        tp_slice(c, p, m->grid.tp->rank);
        p->size = (spec[i].rows == DIM_V ? (size_t)c->padded_vocab : p->slice_rows) * p->slice_cols;
        p->init = spec[i].init == STD_RESIDUAL ? STD / sqrtf(2 * (float)c->layers) : spec[i].init;
        p->place = spec[i].place;
        m->parameters += p->rows * p->cols;
    }
    m->n_units++;
}

// The table of parameters: names and shapes, no memory for their values yet.
static void model_layout(Model *m) {
    const Config *c = &m->config;
    size_t L = (size_t)c->layers;
    m->param =
        host_alloc(LENGTH(embedding_params) + L * LENGTH(block_params) + LENGTH(head_params), sizeof(Param));
    add_unit(m, "", embedding_params, LENGTH(embedding_params));
    for (size_t l = 0; l < L; l++) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "blocks.%zu.", l);
        add_unit(m, prefix, block_params, LENGTH(block_params));
    }
    add_unit(m, "", head_params, LENGTH(head_params) - (c->tie ? 1 : 0));
    m->not_finite.param = -1;
    m->norm_forward = c->arch == ARCH_GPT2 ? layernorm_forward : rmsnorm_forward;
    m->norm_backward = c->arch == ARCH_GPT2 ? layernorm_backward : rmsnorm_backward;
    m->act_forward = c->arch == ARCH_GPT2 ? gelu_forward : swiglu_forward;
    m->act_backward = c->arch == ARCH_GPT2 ? gelu_backward : swiglu_backward;
}

// =====================================================================================================================
// Memory: all that a step needs, reserved before the first one
// =====================================================================================================================

// Points a Block or Ends, of weights or of gradients, into the buckets.
static void place_params(Model *m) {
    for (int i = 0; i < m->n_params; i++) {
        const Param *p = &m->param[i];
        if (p->place == FUSED) continue;
        const Bucket *b = &m->bucket[p->bucket];
        bool ends = p->unit == 0 || p->unit == m->n_units - 1;
        char *w = ends ? (char *)&m->ends : (char *)&m->block[p->unit - 1];
        char *d = ends ? (char *)&m->d_ends : (char *)&m->d_block[p->unit - 1];
        *(floatX **)(w + p->place) = b->weight + p->offset;
        *(floatX **)(d + p->place) = b->grad + p->offset;
    }
    if (m->config.tie) {
        m->ends.head_weight = m->ends.wte;
        m->d_ends.head_weight = m->d_ends.wte;
    }
}

static floatX *alloc_x(MemCategory category, size_t n) {
    return device_alloc(category, n * sizeof(floatX));
}

static float *alloc_f(MemCategory category, size_t n) {
    return device_alloc(category, n * sizeof(float));
}

// Sizes of one block, as its functions use them (train.h): rows, here and of all tp ranks together, channels, and the widths
// of qkv and of the MLP's input.
typedef struct {
    size_t N, R, C, H, KV, D, A, F, QKV, U;
} BlockSize;

static BlockSize block_size(const Model *m) {
    const Config *c = &m->config;
    size_t tp = (size_t)c->tp, N = m->B * m->T, C = (size_t)c->hidden, D = C / (size_t)c->heads;
    size_t H = (size_t)c->heads / tp, KV = c->kv_heads > c->tp ? (size_t)c->kv_heads / tp : 1,
           F = (size_t)c->ffn / tp;
    return (BlockSize){.N = N,
                       .R = c->sp ? N / tp : N,
                       .C = C,
                       .H = H,
                       .KV = KV,
                       .D = D,
                       .A = H * D,
                       .F = F,
                       .QKV = (H + 2 * KV) * D,
                       .U = c->arch == ARCH_LLAMA ? 2 * F : F};
}

static AttentionShape attention_shape(const Model *m) {
    BlockSize s = block_size(m);
    return (AttentionShape){m->B, m->T, m->T, s.H, s.KV, s.D, s.QKV, s.QKV, s.A, .causal = true};
}

// What blocks keep. Recomputation shares: under `full` all blocks write one set of buffers, which the backward fills again
// from the block's own x; under `selective` all write one attention matrix.
static void reserve_activations(Model *m) {
    const Config *c = &m->config;
    BlockSize s = block_size(m);
    MemCategory cat = MEM_ACTIVATIONS;
    for (long l = 0; l < c->layers; l++) {
        Activations *a = &m->acts[l];
        if (l > 0) *a = m->acts[0];
        if (l == 0 || c->recompute != RECOMPUTE_FULL) {
            if (c->arch == ARCH_GPT2) a->mean1 = alloc_f(cat, s.R), a->mean2 = alloc_f(cat, s.R);
            a->rstd1 = alloc_f(cat, s.R);
            a->h1 = alloc_x(cat, s.R * s.C);
            a->qkv = alloc_x(cat, s.N * s.QKV);
            if (c->attention == ATTENTION_FLASH) a->lse = alloc_f(cat, s.N * s.H);
            a->o = alloc_x(cat, s.N * s.A);
            a->x_mid = alloc_x(cat, s.R * s.C);
            a->rstd2 = alloc_f(cat, s.R);
            a->h2 = alloc_x(cat, s.R * s.C);
            a->up = alloc_x(cat, s.N * s.U);
            a->act = alloc_x(cat, s.N * s.F);
        }
        if (c->attention == ATTENTION_NAIVE && (l == 0 || c->recompute == RECOMPUTE_NONE))
            a->probs = alloc_x(cat, s.N * s.H * m->T);
        a->x = alloc_x(cat, s.R * s.C);
    }
    Activations *head = &m->acts[c->layers];
    if (c->arch == ARCH_GPT2) head->mean1 = alloc_f(cat, s.R);
    head->rstd1 = alloc_f(cat, s.R);
    head->h1 = alloc_x(cat, s.R * s.C);
    head->x = alloc_x(cat, s.R * s.C);
}

enum { LOGIT_ROWS = 5 }; // numbers a row of the loss: m->logit_stats, m->losses

// Bytes that a unit brings to life.
typedef struct {
    size_t whole, kept;    // activations: while it computes, and from its F to its B
    size_t logits;         // from its F to its B
    size_t dy, inside, dx; // output gradients of its B: what it gets, what stays in it, what it hands on
} LiveBytes;

static LiveBytes live_bytes(const Model *m, int unit) {
    const Config *c = &m->config;
    BlockSize s = block_size(m);
    size_t x = s.R * s.C * sizeof(floatX), wide = s.N * (s.QKV + s.U) * sizeof(floatX),
           row = s.N * sizeof(float);
    size_t norm = s.R * sizeof(float) * (c->arch == ARCH_GPT2 ? 2 : 1);
    if (unit == 0) return (LiveBytes){.dy = x}; // its output is the first block's x
    if (unit == m->n_units - 1)
        return (LiveBytes){.whole = 2 * x + norm,
                           .kept = 2 * x + norm,
                           .logits = s.N * (size_t)c->padded_vocab * sizeof(floatX) + LOGIT_ROWS * row,
                           .dx = x};
    bool flash = c->attention == ATTENTION_FLASH;
    size_t scores = flash ? s.H * row : s.N * s.H * m->T * sizeof(floatX);
    size_t whole = 4 * x + s.N * s.A * sizeof(floatX) + wide + 2 * norm + scores + s.N * s.F * sizeof(floatX);
    size_t kept[] = {whole, flash ? whole : whole - scores, x}; // by recomputation: none, selective, full
    return (LiveBytes){.whole = whole, .kept = kept[c->recompute], .dy = x, .inside = wide + x, .dx = x};
}

// Enters them around its F or B. Before B, what F did not keep is computed again.
static void enter_live(const Model *m, int unit, Pass pass, bool begins) {
    LiveBytes b = live_bytes(m, unit);
    ptrdiff_t whole = (ptrdiff_t)b.whole, again = (ptrdiff_t)(b.whole - b.kept);
    if (pass == FORWARD) {
        ledger_live(MEM_ACTIVATIONS, begins ? whole : -again);
        ledger_live(MEM_LOGITS, begins ? (ptrdiff_t)b.logits : 0);
    } else {
        ledger_live(MEM_ACTIVATIONS, begins ? again : -whole);
        ledger_live(MEM_LOGITS, begins ? 0 : -(ptrdiff_t)b.logits);
        ledger_live(MEM_DOUT, begins ? (ptrdiff_t)(b.inside + b.dx) : -(ptrdiff_t)(b.inside + b.dy));
    }
}

// After a forward without a backward nothing is read again.
static void forget_activations(void) {
    ledger_live(MEM_ACTIVATIONS, -(ptrdiff_t)ledger.live[MEM_ACTIVATIONS]);
    ledger_live(MEM_LOGITS, -(ptrdiff_t)ledger.live[MEM_LOGITS]);
}

static size_t largest(size_t n, const size_t *x) {
    size_t best = 0;
    for (size_t i = 0; i < n; i++)
        if (x[i] > best) best = x[i];
    return best;
}

static void model_reserve(Model *m) {
    const Config *c = &m->config;
    m->B = (size_t)c->micro_batch;
    m->T = (size_t)c->seq;
    BlockSize s = block_size(m);
    size_t Vp = (size_t)c->padded_vocab, bucket = 0;

    dp_reserve(m);
    tp_reserve(m);
    for (int i = 0; i < m->n_buckets; i++)
        if (m->bucket[i].count > bucket) bucket = m->bucket[i].count;
    place_params(m);
    reserve_activations(m);
    for (int i = 0; i < 2; i++) { // only the residual stream's gradient of two blocks is needed at once
        OutputGrads *d = &m->dout[i];
        if (i > 0) *d = m->dout[0];
        d->down = alloc_x(MEM_DOUT, s.R * s.C);
        if (i > 0) continue;
        d->up = alloc_x(MEM_DOUT, s.N * s.U);
        d->out = alloc_x(MEM_DOUT, s.R * s.C);
        d->qkv = alloc_x(MEM_DOUT, s.N * s.QKV);
    }
    m->logits = alloc_x(MEM_LOGITS, s.N * Vp);
    m->logit_stats = alloc_f(MEM_LOGITS, (LOGIT_ROWS - 1) * s.N);
    m->losses = alloc_f(MEM_LOGITS, s.N);
    m->temp_c = alloc_x(MEM_WORKSPACE, s.N * s.C);
    m->temp_f = alloc_x(MEM_WORKSPACE, s.N * s.F);
    m->tokens = device_alloc(MEM_WORKSPACE, s.N * sizeof(int32_t));
    m->targets = device_alloc(MEM_WORKSPACE, s.N * sizeof(int32_t));
    m->positions = device_alloc(MEM_WORKSPACE, m->T * sizeof(int32_t));
    if (c->arch == ARCH_LLAMA) m->rope = alloc_f(MEM_WORKSPACE, m->T * s.D);
    m->squares = device_alloc(MEM_WORKSPACE, ((size_t)m->n_params + 1) * sizeof(double));
    const size_t workspace[] = {linear_workspace(m, s.N, s.C, s.QKV),
                                linear_workspace(m, s.N, s.A, s.C),
                                linear_workspace(m, s.N, s.C, s.U),
                                linear_workspace(m, s.N, s.F, s.C),
                                matmul_workspace(s.N, s.C, Vp),
                                norm_backward_workspace(s.R, s.C),
                                embedding_backward_workspace(m->B, m->T, s.C, m->param[0].slice_rows),
                                c->attention == ATTENTION_FLASH ? flash_attention_workspace(attention_shape(m))
                                                                : naive_attention_workspace(attention_shape(m)),
                                grad_norm_workspace(bucket)};
    m->workspace = device_alloc(MEM_WORKSPACE, largest(LENGTH(workspace), workspace));
    ledger_live(MEM_WORKSPACE, (ptrdiff_t)ledger.held[MEM_WORKSPACE]);
}

// =====================================================================================================================
// A block: F, I and W
// =====================================================================================================================

static void attention_forward(const Model *m, const Activations *a) {
    BlockSize s = block_size(m);
    const floatX *q = a->qkv, *k = q + s.A, *v = k + s.KV * s.D;
    if (a->probs)
        naive_attention_forward(a->o, a->probs, q, k, v, attention_shape(m), m->workspace);
    else
        flash_attention_forward(a->o, a->lse, q, k, v, attention_shape(m), m->workspace);
}

// do_ [N, A] is the gradient of a->o; dqkv [N, A+2·KV·D] is written.
static void attention_backward(const Model *m, const Activations *a, floatX *dqkv, const floatX *do_) {
    BlockSize s = block_size(m);
    size_t k = s.A, v = k + s.KV * s.D;
    if (a->probs)
        naive_attention_backward(dqkv, dqkv + k, dqkv + v, do_, a->probs, a->qkv, a->qkv + k, a->qkv + v,
                                 attention_shape(m), m->workspace);
    else
        flash_attention_backward(dqkv, dqkv + k, dqkv + v, do_, a->o, a->lse, a->qkv, a->qkv + k, a->qkv + v,
                                 attention_shape(m), m->workspace);
}

// Rows are there now.
static floatX *arrived(Rows r) {
    comm_wait(r.work);
    return r.x;
}

// Of the tp ranks' partial sums, one has the bias in it.
static const floatX *once(const Model *m, const floatX *bias) {
    return m->grid.tp->rank == 0 ? bias : NULL;
}

// acts[l].x -> acts[l + 1].x. Between operations, here and in the backward, messages under way get their turn (comm_progress).
static void block_forward(Model *m, long l) {
    BlockSize s = block_size(m);
    const Block *w = &m->block[l];
    Activations *a = &m->acts[l];
    floatX *y = m->temp_c; // what attention, then the MLP, adds to the residual stream

    m->norm_forward(a->h1, a->mean1, a->rstd1, NULL, a->x, NULL, w->norm1_weight, w->norm1_bias, s.R, s.C);
    Rows h = tp_enter(m, a->h1, 0);
    linear_forward(m, a->qkv, arrived(h), w->qkv_weight, w->qkv_bias, s.N, s.C, s.QKV);
    if (m->rope) rope_forward(a->qkv, m->rope, m->B, m->T, s.H + s.KV, s.D, s.QKV);
    comm_progress();
    attention_forward(m, a);
    comm_progress();
    linear_forward(m, y, a->o, w->out_weight, once(m, w->out_bias), s.N, s.A, s.C);
    Rows sum = tp_exit(m, y);

    m->norm_forward(a->h2, a->mean2, a->rstd2, a->x_mid, a->x, arrived(sum), w->norm2_weight, w->norm2_bias,
                    s.R, s.C);
    h = tp_enter(m, a->h2, 0);
    comm_progress();
    linear_forward(m, a->up, arrived(h), w->up_weight, w->up_bias, s.N, s.C, s.U);
    comm_progress();
    m->act_forward(a->act, a->up, s.N, s.F);
    linear_forward(m, y, a->act, w->down_weight, once(m, w->down_bias), s.N, s.F, s.C);
    sum = tp_exit(m, y);
    residual_forward(m->acts[l + 1].x, a->x_mid, arrived(sum), s.R * s.C);
}

// W of the MLP, and of attention: two products each of what F and I left behind; no weights needed. All rows [N, C] of dy, the
// gradient of the second's output, are there; those of h, the first's input, may be on their way.
static void mlp_backward_weight(const Model *m, long l, const floatX *dy, Rows h) {
    BlockSize s = block_size(m);
    const Block *dw = &m->d_block[l];
    linear_backward_weight(m, dw->down_weight, dy, m->acts[l].act, s.N, s.F, s.C);
    comm_progress();
    linear_backward_weight(m, dw->up_weight, m->dout[l & 1].up, arrived(h), s.N, s.C, s.U);
    comm_progress();
}

static void attention_backward_weight(const Model *m, long l, const floatX *dy, Rows h) {
    BlockSize s = block_size(m);
    const Block *dw = &m->d_block[l];
    linear_backward_weight(m, dw->out_weight, dy, m->acts[l].o, s.N, s.A, s.C);
    comm_progress();
    linear_backward_weight(m, dw->qkv_weight, m->dout[l & 1].qkv, arrived(h), s.N, s.C, s.QKV);
    comm_progress();
}

// I is the forward's lines from the last to the first. W stands beside I's sums over tp, for it needs none of them. Norms' and
// biases' gradients are taken on the way.
static void block_backward(Model *m, long l) {
    BlockSize s = block_size(m);
    const Block *w = &m->block[l], *dw = &m->d_block[l];
    const Activations *a = &m->acts[l];
    const OutputGrads *d = &m->dout[l & 1];
    floatX *dx = m->dout[(l - 1) & 1].down;
    floatX *dact = m->temp_f, *dh = m->temp_c; // gradients of act, and of h2, o, h1 in turn
    bool biases = m->config.arch == ARCH_GPT2;

    Rows dy = tp_enter(m, d->down, 0), h = tp_enter(m, a->h2, 1);
    linear_backward_input(m, dact, arrived(dy), w->down_weight, s.N, s.F, s.C);
    m->act_backward(d->up, dact, a->up, s.N, s.F);
    comm_progress();
    linear_backward_input(m, dh, d->up, w->up_weight, s.N, s.C, s.U);
    Rows sum = tp_exit(m, dh);
    mlp_backward_weight(m, l, dy.x, h);
    m->norm_backward(d->out, dw->norm2_weight, dw->norm2_bias, arrived(sum), d->down, a->x_mid, w->norm2_weight,
                     a->mean2, a->rstd2, s.R, s.C, m->workspace);

    dy = tp_enter(m, d->out, 0), h = tp_enter(m, a->h1, 1);
    linear_backward_input(m, dh, arrived(dy), w->out_weight, s.N, s.A, s.C);
    comm_progress();
    attention_backward(m, a, d->qkv, dh);
    comm_progress();
    if (m->rope) rope_backward(d->qkv, m->rope, m->B, m->T, s.H + s.KV, s.D, s.QKV);
    linear_backward_input(m, dh, d->qkv, w->qkv_weight, s.N, s.C, s.QKV);
    sum = tp_exit(m, dh);
    attention_backward_weight(m, l, dy.x, h);
    m->norm_backward(dx, dw->norm1_weight, dw->norm1_bias, arrived(sum), d->out, a->x, w->norm1_weight,
                     a->mean1, a->rstd1, s.R, s.C, m->workspace);

    if (!biases) return;
    matmul_backward_bias(dw->down_bias, d->down, s.R, s.C, m->workspace);
    matmul_backward_bias(dw->up_bias, d->up, s.N, s.U, m->workspace);
    matmul_backward_bias(dw->out_bias, d->out, s.R, s.C, m->workspace);
    matmul_backward_bias(dw->qkv_bias, d->qkv, s.N, s.QKV, m->workspace);
}

// What the forward did not keep is computed again, by the same code, into the same buffers.
static void block_recompute(Model *m, long l) {
    if (m->config.recompute == RECOMPUTE_FULL) block_forward(m, l);
    if (m->config.recompute == RECOMPUTE_SELECTIVE && m->config.attention == ATTENTION_NAIVE)
        attention_forward(m, &m->acts[l]);
}

// =====================================================================================================================
// The model: embedding, blocks, head
// =====================================================================================================================

// Each tp rank looks up the tokens of its slice of the vocabulary; the sum has them all.
static void embedding_unit_forward(Model *m) {
    BlockSize s = block_size(m);
    floatX *x = m->temp_c;
    embedding_forward(x, m->tokens, m->ends.wte, once(m, m->ends.wpe), m->positions, m->B, m->T, s.C);
    Rows sum = tp_exit(m, x);
    device_copy(m->acts[0].x, arrived(sum), s.R * s.C * sizeof(floatX));
}

static void embedding_unit_backward(Model *m) {
    BlockSize s = block_size(m);
    Rows dx = tp_enter(m, m->dout[1].down, 0);
    embedding_backward(m->d_ends.wte, m->d_ends.wpe, arrived(dx), m->tokens, m->positions, m->B, m->T, s.C,
                       m->param[0].slice_rows, m->workspace);
}

// The head's F: final norm, logits, the loss of each row; with dloss ≠ 0 the logits become their own gradient at once.
static void head_forward(Model *m, float dloss) {
    BlockSize s = block_size(m);
    Activations *a = &m->acts[m->config.layers];
    m->norm_forward(a->h1, a->mean1, a->rstd1, NULL, a->x, NULL, m->ends.norm_weight, m->ends.norm_bias, s.R,
                    s.C);
    Rows h = tp_enter(m, a->h1, 0);
    matmul_forward(m->logits, arrived(h), m->ends.head_weight, NULL, s.N, s.C, (size_t)m->config.padded_vocab,
                   m->workspace);
    tp_cross_entropy(m, dloss);
}

static void head_backward(Model *m) {
    BlockSize s = block_size(m);
    const Activations *a = &m->acts[m->config.layers];
    size_t Vp = (size_t)m->config.padded_vocab;
    floatX *dh = m->temp_c, *dx = m->dout[(m->config.layers - 1) & 1].down;
    Rows h = tp_enter(m, a->h1, 1);
    matmul_backward_input(dh, m->logits, m->ends.head_weight, s.N, s.C, Vp, m->workspace);
    Rows sum = tp_exit(m, dh);
    matmul_backward_weight(m->d_ends.head_weight, m->logits, arrived(h), s.N, s.C, Vp, m->workspace);
    m->norm_backward(dx, m->d_ends.norm_weight, m->d_ends.norm_bias, arrived(sum), NULL, a->x,
                     m->ends.norm_weight, a->mean1, a->rstd1, s.R, s.C, m->workspace);
}

static void unit_forward(Model *m, int unit, float dloss) {
    if (unit == 0)
        embedding_unit_forward(m);
    else if (unit < m->n_units - 1)
        block_forward(m, unit - 1);
    else
        head_forward(m, dloss);
}

static void unit_backward(Model *m, int unit) {
    if (unit == m->n_units - 1) {
        head_backward(m);
    } else if (unit > 0) {
        block_recompute(m, unit - 1);
        block_backward(m, unit - 1);
    } else {
        embedding_unit_backward(m);
    }
}

// F or B of one unit: its parameters are there before, its gradients on their way after.
static void run_unit(Model *m, int unit, Pass pass, float dloss) {
    static const char *const name[3][2] = {
        {"embedding F", "embedding B"}, {"block F", "block B"}, {"head F", "head B"}};
    int kind = unit == 0 ? 0 : unit < m->n_units - 1 ? 1 : 2;
    dp_begin(m, unit, pass);
    Moment began = trace_begin();
    enter_live(m, unit, pass, true);
    if (pass == FORWARD)
        unit_forward(m, unit, dloss);
    else
        unit_backward(m, unit);
    enter_live(m, unit, pass, false);
    trace_end("compute", name[kind][pass], kind == 1 ? unit - 1 : -1, began, 0);
    dp_end(m, unit, pass);
}

// F of the whole model on the micro-batch in m->tokens. Returns the sum of the losses of its rows.
static double model_forward(Model *m, float dloss) {
    for (int unit = 0; unit < m->n_units; unit++) run_unit(m, unit, FORWARD, dloss);
    double sum = 0;
    float *losses = m->host_losses;
    device_copy_out(losses, m->losses, m->B * m->T * sizeof(float));
    for (size_t i = 0; i < m->B * m->T; i++) sum += losses[i];
    return sum;
}

// I and W of the whole model, from the logits' gradient that model_forward left.
static void model_backward(Model *m) {
    for (int unit = m->n_units - 1; unit >= 0; unit--) run_unit(m, unit, BACKWARD, 0);
}

// =====================================================================================================================
// One training step
// =====================================================================================================================

// Global positions of the local tokens, and the rotary angles that follow.
static void set_positions(Model *m) {
    int32_t *position = host_alloc(m->T, sizeof(int32_t));
    for (size_t t = 0; t < m->T; t++) position[t] = (int32_t)t;
    device_copy_in(m->positions, position, m->T * sizeof(int32_t));
    if (m->rope) rope_table(m->rope, m->positions, m->T, block_size(m).D, (float)m->config.rope_theta);
    free(position);
}

// Row b of the micro-batch becomes window [T + 1]: its first T tokens are inputs, its last T their targets.
static void set_row(Model *m, size_t b, const int32_t *window) {
    memcpy(m->host_tokens + b * m->T, window, m->T * sizeof(int32_t));
    memcpy(m->host_targets + b * m->T, window + 1, m->T * sizeof(int32_t));
}

// Tokens become rows of this rank's slice of the vocabulary, or −1.
static void send_rows(Model *m) {
    const Param *wte = &m->param[0];
    for (int32_t *t = m->host_tokens; t < m->host_tokens + m->B * m->T; t++) {
        size_t row = (size_t)*t - wte->row; // below 0 it is very large
        *t = row < wte->slice_rows ? (int32_t)row : -1;
    }
    device_copy_in(m->tokens, m->host_tokens, m->B * m->T * sizeof(int32_t));
    device_copy_in(m->targets, m->host_targets, m->B * m->T * sizeof(int32_t));
}

// Sequence i of the global batch goes to micro-batch i / (B · ranks), there to rank i / B mod ranks, row i mod B.
static void load_micro_batch(Model *m, long step, long micro) {
    const Config *c = &m->config;
    const Comm *dp = m->grid.dp;
    for (size_t b = 0; b < m->B; b++) {
        uint64_t i = ((uint64_t)micro * (uint64_t)dp->size + (uint64_t)dp->rank) * m->B + b;
        data_train_sequence(train_data, (uint64_t)step * (uint64_t)c->global_batch + i, (int)c->vocab,
                            m->window);
        set_row(m, b, m->window);
    }
    send_rows(m);
}

static double learning_rate(const Config *c, long step) {
    if (step < c->warmup) return c->lr * (double)(step + 1) / (double)c->warmup;
    if (step >= c->steps) return c->min_lr;
    double progress = (double)(step - c->warmup) / (double)(c->steps - c->warmup);
    return c->min_lr + 0.5 * (c->lr - c->min_lr) * (1 + cos(M_PI * progress));
}

static volatile sig_atomic_t stop_signal; // SIGUSR1 or SIGTERM: finish the step, save, end

static void on_signal(int signal_number) {
    stop_signal = signal_number;
}

typedef struct {
    double loss, grad_norm; // of the global batch; the norm before clipping
    bool stop;              // some rank was told to end
} StepResult;

// Says where a number that is none came from: the rank that first had one in a gradient of its own, and the parameter.
static _Noreturn void fail_not_finite(Model *m, long step, StepResult r) {
    Comm *world = m->grid.world;
    int param = m->not_finite.param;
    double place = INFINITY; // in the order of micro-batches, then of ranks
    if (param >= 0) place = (double)m->not_finite.micro * world->size + world->rank;
    double first = -comm_max(world, -place);
    if (isinf(first))
        fail_all(EXIT_RUNTIME,
                 "step %ld: the loss is %g, the gradient's norm %g, while each rank's own gradient is finite; "
                 "nothing is saved",
                 step, r.loss, r.grad_norm);
    param = (int)comm_sum(world, place == first ? param : 0);
    fail_all(EXIT_RUNTIME,
             "step %ld: the loss is %g, the gradient's norm %g; it began on rank %d, in the gradient of %s; "
             "nothing is saved",
             step, r.loss, r.grad_norm, (int)fmod(first, world->size), m->param[param].name);
}

static StepResult train_step(Model *m, long step) {
    const Config *c = &m->config;
    double tokens = (double)c->global_batch * (double)c->seq;
    enum { LOSS, STOP, SUMS };
    double sums[SUMS] = {0, 0};

    for (long micro = 0; micro < c->accum; micro++) {
        load_micro_batch(m, step, micro);
        Moment forward = trace_begin();
        sums[LOSS] += model_forward(m, (float)(1 / tokens));
        trace_end("compute", "forward", micro, forward, 0);
        Moment backward = trace_begin();
        model_backward(m);
        trace_end("compute", "backward", micro, backward, 0);
    }
    tp_sum_gradients(m);
    double norm = dp_grad_norm(m);
    if (m->grid.tp->rank > 0) sums[LOSS] = 0; // it is the same on all tp ranks
    sums[STOP] = stop_signal != 0;
    comm_wait(comm_host_all_reduce(m->grid.world, sums, SUMS, DTYPE_F64));

    StepResult r = {.loss = sums[LOSS] / tokens, .grad_norm = norm, .stop = sums[STOP] > 0};
    if (!isfinite(r.loss) || !isfinite(r.grad_norm)) fail_not_finite(m, step + 1, r);
    Moment optimizer = trace_begin();
    dp_optimizer_step(m, r.grad_norm, (OptimizerStep){.lr = (float)learning_rate(c, step), .step = step + 1});
    trace_end("compute", "optimizer", step + 1, optimizer, 0);
    return r;
}

// =====================================================================================================================
// Evaluation and sampling: F alone; nothing of the training state changes, and their FLOPs are not counted
// =====================================================================================================================

// Mean loss over the first --eval-batches global batches of the validation set, or all of it where that is less. Rows
// beyond its end have no targets.
static double evaluate(Model *m) {
    const Config *c = &m->config;
    Comm *dp = m->grid.dp;
    uint64_t n = data_windows(val_data), most = (uint64_t)c->eval_batches * (uint64_t)c->global_batch;
    if (n > most) n = most;
    KernelFlops trained = kernel_flops;
    double sum = 0;
    for (uint64_t first = 0; first < n; first += (uint64_t)dp->size * m->B) {
        for (size_t b = 0; b < m->B; b++) {
            uint64_t w = first + (uint64_t)dp->rank * m->B + b;
            data_window(val_data, w < n ? w : 0, (int)c->vocab, m->window);
            set_row(m, b, m->window);
            if (w >= n) memset(m->host_targets + b * m->T, 0xff, m->T * sizeof(int32_t));
        }
        send_rows(m);
        sum += model_forward(m, 0);
        forget_activations();
    }
    kernel_flops = trained;
    return comm_sum(dp, sum) / ((double)n * (double)c->seq);
}

// Draws from softmax(logits) with u in (0, 1).
static int32_t draw(const floatX *logits, long V, double u) {
    float most = -INFINITY;
    double total = 0, seen = 0;
    for (long i = 0; i < V; i++) most = fmaxf(most, to_float(logits[i]));
    for (long i = 0; i < V; i++) total += exp(to_float(logits[i]) - most);
    for (long i = 0; i < V; i++) {
        seen += exp(to_float(logits[i]) - most);
        if (seen >= u * total) return (int32_t)i;
    }
    return (int32_t)V - 1;
}

// Writes `count` tokens of the model's own, each drawn from the distribution after the last T. Every rank draws the same.
static void sample(Model *m, long count, long step) {
    const Config *c = &m->config;
    const Param *wte = &m->param[0]; // the columns of the logits are its rows
    size_t B = m->B, T = m->T, V = (size_t)c->vocab, tp = c->sp ? (size_t)c->tp : 1;
    bool text = V == 256;
    int32_t *token = host_alloc((size_t)count + 1, sizeof(int32_t));
    floatX *logits = host_alloc(V, sizeof(floatX));
    char *out = host_alloc((size_t)count + 1, 12);
    size_t length = 0;
    token[0] = text ? '\n' : (int32_t)V - 1; // a text starts a line; GPT-2's last token is its end of text
    KernelFlops trained = kernel_flops;
    m->B = 1;
    memset(m->host_targets, 0xff, T * sizeof(int32_t));
    // All ranks go on or none: at ZeRO-3 a forward takes all of them.
    long i = 1;
    for (; i <= count && comm_all_true(m->grid.world, !stop_signal); i++) {
        size_t seen = (size_t)i < T ? (size_t)i : T;
        m->T = (seen + tp - 1) / tp * tp; // no token sees those behind it
        memset(m->host_tokens, 0, m->T * sizeof(int32_t));
        memcpy(m->host_tokens, token + i - (long)seen, seen * sizeof(int32_t));
        send_rows(m);
        model_forward(m, 0);
        forget_activations();
        device_copy_out(logits + wte->row, m->logits + (seen - 1) * (size_t)c->padded_vocab,
                        wte->slice_rows * sizeof(floatX));
        comm_wait(comm_host_all_gather(m->grid.tp, logits, logits + wte->row, V, FLOAT_X));
        token[i] =
            draw(logits, (long)V,
                 random_uniform(random_stream((uint64_t)c->seed, "sample") ^ (uint64_t)step, (uint64_t)i));
        bool printable = (token[i] >= 32 && token[i] < 127) || token[i] == '\n' || token[i] == '\t';
        length += (size_t)(text ? sprintf(out + length, "%c", printable ? token[i] : '?')
                                : sprintf(out + length, "%d ", token[i]));
    }
    const char *cut = i <= count ? ", asked to end" : "";
    say("sample of %ld %s after step %ld%s:\n%s", i - 1, text ? "bytes" : "tokens", step, cut, out);
    m->B = B;
    m->T = T;
    kernel_flops = trained;
    free(token);
    free(logits);
    free(out);
}

// =====================================================================================================================
// main
// =====================================================================================================================

// A resumed run goes on in the data order of the run that it resumes.
static void seed_from_run(const char *checkpoint) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/optimizer.safetensors", checkpoint);
    SafeTensors *s = safetensors_open(path);
    const char *seed = safetensors_meta(s, "seed");
    if (seed) config.seed = strtol(seed, NULL, 10);
    safetensors_close(s);
}

// The ranks of the run. One process answers for any number where nothing runs.
static long run_size(const Config *c) {
    bool asks = c->dry_run || c->explain;
    if (c->ranks != NOT_GIVEN) return c->ranks;
    if (asks && c->dp != NOT_GIVEN) return c->dp * c->tp;
    return asks && launch_size() == 1 ? c->tp : launch_size();
}

// Everything about flags, files and sizes is checked here, before MPI starts and before memory is taken. Returns the step
// to go on from, and the checkpoint's path.
static long configure(int argc, char **argv, char *checkpoint, size_t checkpoint_size) {
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
    config_check(c, run_size(c));
    check_data(c);
    if (step >= c->steps)
        fail_all(EXIT_USAGE, "--steps %ld: %s stands at step %ld already; nearest: %ld", c->steps, checkpoint,
                 step, step + 1);
    return step;
}

// Predicts by reserving in a ledger alone, and refuses what the machine cannot hold. Workspaces are those of this process's
// threads: a dry run of many ranks on few cores counts a little more than each of them will take.
static Ledger predict(Model *m) {
    bool lazy = m->config.lazy_optimizer;
    size_t before = ledger.total; // context and libraries
    device_dry_run(true);
    m->config.lazy_optimizer = false;
    model_reserve(m);
    m->config.lazy_optimizer = lazy;
    Ledger predicted = ledger;
    device_dry_run(false);
    if (m->config.dry_run || m->config.explain) return predicted; // of a machine that need not be this one
    // The least that any rank finds free, so that all decide alike. With --lazy-optimizer the moments are not counted: that run
    // is to fail where it asks for them, after its first backward.
    size_t available = (size_t)-comm_max(m->grid.world, -(double)device_free_memory());
    size_t needed = (size_t)comm_max(
        m->grid.world, (double)(predicted.total_peak - before - (lazy ? predicted.peak[MEM_OPTIMIZER] : 0)));
    if (needed > available) {
        report_memory(&predicted, NULL);
        fail_all(EXIT_USAGE, "a rank needs %.3f GB, %.3f GB are free; smaller: %s", (double)needed * 1e-9,
                 (double)available * 1e-9, report_smaller(m));
    }
    return predicted;
}

// This rank's device, taken before MPI starts; what it cannot do is refused.
static void open_device(Config *c) {
    device_open(launch_local_rank());
    bool gpu = device_count() > 0;
    if (c->comm == NOT_GIVEN) c->comm = gpu ? TRANSPORT_NCCL : TRANSPORT_MPI;
    if (c->comm == TRANSPORT_NCCL && !gpu)
        fail_all(EXIT_USAGE, "--comm nccl: this build computes on the CPU; nearest: mpi");
    if (c->fp8 != FP8_NONE && !device_has_fp8())
        fail_all(EXIT_USAGE, "--fp8 %s: %s has no fp8 (sm_89 and newer have); nearest: leave the flag out",
                 flag_choice(FP8_RECIPES, c->fp8), device_name());
}

// Which ranks use one GPU, counted by its number: a launcher may show each of them another one. NCCL wants one a rank.
static void share_device(Config *c, Comm *world) {
    if (device_count() == 0) {
        device_share(comm_host().local_size);
        return;
    }
    size_t n = (size_t)world->size;
    uint64_t *id = host_alloc(n, sizeof *id), mine = device_id();
    comm_wait(comm_host_all_gather(world, id, &mine, n, DTYPE_I64));
    int most = 0, here = 0;
    for (size_t r = 0; r < n; r++) {
        int alike = 0;
        for (size_t other = 0; other < n; other++) alike += id[other] == id[r];
        if (alike > most) most = alike;
        if (id[r] == mine) here = alike;
    }
    free(id);
    // Has a host fewer GPUs than ranks?
    bool crowded = comm_max(world, comm_host().local_size > device_count()) > 0;
    if (c->comm == TRANSPORT_NCCL && most > 1) {
        // Enough GPUs, and yet one taken twice: the launcher has not told ranks which of the host they are.
        if (flag_given(&config.comm) || !crowded)
            fail_all(EXIT_USAGE, "--comm nccl: %d ranks share a GPU, and NCCL takes one each; nearest: mpi",
                     most);
        say("%d ranks share a GPU: their messages go through the host (--comm mpi)", most);
        c->comm = TRANSPORT_MPI;
    }
    device_share(here);
}

// What a GPU has come to hold beyond the ledger since the last call is what it is for: its context at first, NCCL once
// groups are connected, other libraries' and kernels' code after the first step, and what is left nobody knows.
static void enter_rest(Comm *world, MemCategory category) {
    if (device_count() == 0) return;
    device_synchronize();
    comm_wait(comm_barrier(world));
    device_enter_rest(category);
    comm_wait(comm_barrier(world));
}

// rank = dp · TP + tp (a dry run is rank 0).
static void make_grid(const Config *c, Grid *g) {
    int tp = (int)c->tp, rank = g->world->rank, holders = c->tp > c->kv_heads ? tp / (int)c->kv_heads : 1;
    g->dp = comm_split(g->world, rank % tp, rank, "dp");
    g->tp = comm_split(g->world, rank / tp, rank, "tp");
    g->kv = comm_split(g->world, rank / holders, rank, "kv");
    double host = comm_host().host;
    bool crosses = comm_max(g->tp, host) != -comm_max(g->tp, -host);
    if (comm_max(g->world, crosses) > 0)
        say("warning: --tp %d: a group crosses hosts, and each block waits for its messages; best is one host",
            tp);
}

int main(int argc, char **argv) {
    struct sigaction on_stop = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &on_stop, NULL);
    sigaction(SIGTERM, &on_stop, NULL);
    signal(SIGXFSZ, SIG_IGN); // a file-size limit is an error of the write, and is reported as one
    signal(SIGPIPE, SIG_IGN); // a reader of the output that goes away ends no training
    char checkpoint[PATH_MAX - 32] = "";
    long first_step = configure(argc, argv, checkpoint, sizeof checkpoint);
    if (config.ranks != NOT_GIVEN && !config.dry_run && !config.explain)
        launch_ranks((int)config.ranks, argc, argv, &stop_signal);
    int threads = launch_threads();
    bool trains = !config.dry_run && !config.explain;
    if (trains) open_device(&config);
    Comm *world = comm_init(&argc, &argv);
    watchdog_start(world, config.timeout);
    matmul_inputs_bf16 = config.matmul == MATMUL_BF16 && sizeof(floatX) == 4;

    Model m = {
        .config = config, .grid = {.world = world}, .data = train_data ? data_fingerprint(train_data) : 0};
    Config *c = &m.config;
    m.bf16_products = sizeof(floatX) == 2 || matmul_inputs_bf16 || c->fp8 != FP8_NONE;
    Ledger predicted = {0};
    report_out_of_memory(&m, &predicted);
    if (trains) {
        share_device(c, world);
        enter_rest(world, MEM_CONTEXT);
        comm_use((Transport)c->comm);
    }
    make_grid(c, &m.grid);
    if (trains) enter_rest(world, MEM_LIBRARIES);
    model_layout(&m);
    m.acts = host_alloc((size_t)c->layers + 1, sizeof *m.acts);
    m.block = host_alloc((size_t)c->layers, sizeof *m.block);
    m.d_block = host_alloc((size_t)c->layers, sizeof *m.d_block);
    predicted = predict(&m);
    if (c->explain) report_explain(&m);
    if (c->dry_run) report_dry_run(&m, &predicted);
    if (!trains) {
        watchdog_stop();
        comm_finalize();
        return 0;
    }
    say_without_effect(c);
    if (c->save) checkpoint_lock(world, c->save);
    if (c->save && checkpoint_newest(c->save) > first_step)
        say("note: %s already holds step %ld of an earlier run, which a later --resume will take for the "
            "newest",
            c->save, checkpoint_newest(c->save));
    log_open(c->log, c->resume); // after the lock: a run that is refused must not touch another's log

    trace_open(world, c->trace);
    model_reserve(&m);
    m.host_tokens = host_alloc(m.B * m.T, sizeof(int32_t));
    m.host_targets = host_alloc(m.B * m.T, sizeof(int32_t));
    m.host_losses = host_alloc(m.B * m.T, sizeof(float));
    m.window = host_alloc(m.T + 1, sizeof(int32_t));
    set_positions(&m);
    if (c->resume)
        state_resume(&m, checkpoint);
    else if (c->init)
        state_load_weights(&m, c->init);
    else
        state_init(&m);

    enter_rest(world, MEM_UNACCOUNTED);

    double rate_before = c->peak_tflops > 0 ? c->peak_tflops * 1e12 * world->size
                                            : comm_sum(world, device_peak_flops(threads, m.bf16_products));
    report_start(&m, &predicted, threads, rate_before);
    if (!val_data) say("no evaluation: no --val, and no text long enough to hold out its last tenth");

    StepResult r = {0};
    long step = first_step;
    bool saved = true;
    while (step < c->steps && !r.stop) {
        double start = seconds_now();
        r = train_step(&m, step);
        device_synchronize();
        step++;
        report_step(&m,
                    (StepReport){step, r.loss, r.grad_norm, learning_rate(c, step - 1), seconds_now() - start},
                    rate_before);
        bool last = step == c->steps;
        if (step == first_step + 1) enter_rest(world, MEM_LIBRARIES); // loaded where they were first called
        if (c->check_replicas && step % c->check_replicas == 0) state_check_replicas(&m, step);
        if (c->save && (last || r.stop || (c->save_every && step % c->save_every == 0)))
            saved = state_save(&m, step);
        if (!saved) comm_abort(EXIT_RUNTIME); // checkpoint_save has said why
        if (val_data && !r.stop && (last || (c->eval_every && step % c->eval_every == 0)))
            report_validation(step, evaluate(&m));
    }
    if (c->check_replicas && has_replicas(c) && step / c->check_replicas > first_step / c->check_replicas)
        say("all copies of every weight are alike, bit by bit, at every step that --check-replicas looked at");
    if (r.stop) say("asked to end at step %ld%s", step, c->save ? ", saved" : "; nothing saved without --save");
    if (c->sample && !r.stop) sample(&m, c->sample, step);

    for (int i = 0; i < m.n_buckets; i++)
        comm_wait(m.bucket[i].gather); // the last step's, which no forward has awaited
    enter_rest(world, MEM_UNACCOUNTED);
    double rate_after =
        c->peak_tflops > 0 ? rate_before : comm_sum(world, device_peak_flops(threads, m.bf16_products));
    report_end(&m, &predicted, r.loss, rate_before, rate_after);
    trace_close(world);
    log_close();
    checkpoint_unlock();
    watchdog_stop();
    comm_finalize();
    return 0;
}

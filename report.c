// What a run says of itself. A reader of the training program may skip this file.
#include "report.h"
#include "runtime/fail.h"
#include "runtime/log.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

// Floating-point operations a token, forward and backward, in PaLM's convention (Chowdhery et al. 2022, App. B): 6 a
// parameter, without the embedding's look-up tables and with the head once, and 12 · L · H·D · T for attention as if unmasked.
// HFU adds what recomputation does again: a forward of the blocks, or attention's two products.
typedef struct {
    double weights, attention, recomputed;
} TokenFlops;

static TokenFlops token_flops(const Model *m) {
    const Config *c = &m->config;
    double C = (double)c->hidden, attention = 12.0 * (double)c->layers * C * (double)c->seq, blocks = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->unit >= 1 && p->unit <= c->layers) blocks += (double)p->rows * (double)p->cols;
    double tables = (double)c->positions * C * (c->arch == ARCH_GPT2) + (c->tie ? 0 : (double)c->vocab * C);
    TokenFlops f = {6 * ((double)m->parameters - tables), attention, 0};
    if (c->recompute == RECOMPUTE_FULL) f.recomputed = 2 * blocks + attention / 3;
    if (c->recompute == RECOMPUTE_SELECTIVE && c->attention == ATTENTION_NAIVE) f.recomputed = attention / 3;
    return f;
}

// The estimate most often quoted for a layer's activations (Korthikanti et al. 2022, eq. 1 to 5): 2-byte values, dropout
// masks kept. Of the 34 bytes a token and channel, 10 are kept by all of t tensor-parallel ranks, and with --sp none. Ours
// is smaller in a bf16 build: no dropout, and flash attention keeps no matrix. (The first, as a rule of thumb, leaves out the embedding's output, s·b·h; the others count it.)
typedef struct {
    double flash, matrix, selective, full; // bytes of all layers
} ClassicActivations;

static ClassicActivations classic_activations(const Config *c) {
    double sbh = (double)c->seq * (double)c->micro_batch * (double)c->hidden, L = (double)c->layers;
    double t = (double)c->tp, rows = c->sp ? t : 1; // by which that of norms and residuals is divided
    double layer = 10 / rows + 24 / t, scores = 5 * (double)c->heads * (double)c->seq / (double)c->hidden / t;
    return (ClassicActivations){.flash = layer * sbh * L,
                                .matrix = (layer + scores) * sbh * L + sbh / rows,
                                .selective = layer * sbh * L + sbh / rows,
                                .full = 2 * sbh * L / rows + sbh / rows};
}

static long world_size(const Config *c) {
    return c->dp * c->tp;
}

// Parameters of which this rank holds a slice.
static double rank_parameters(const Model *m) {
    double sum = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        sum += (double)p->slice_rows * (double)p->slice_cols;
    return sum;
}

// Bytes an element of the gradients that travel. Weights travel as floatX.
static size_t gradient_size(const Config *c) {
    return c->grad_accum_fp32 ? sizeof(float) : sizeof(floatX);
}

static const char *type_name(size_t size) {
    return size == 4 ? "fp32" : "bf16";
}

// What ZeRO-3 does not gather again for a backward: the last two buckets are still whole in the two slots, and the
// first either is too (the tied embedding, in memory of its own) or has a backward that reads no weights.
// So the others are last_gathered, …, 2, 1: none, where last_gathered < 1.
static int last_gathered(const Model *m) {
    return m->n_buckets - 3;
}

// Bytes that a rank sends in a step, the mean over the ranks: one that owns a longer shard sends a few bytes less.
typedef struct {
    double gradients, weights; // over dp
    // Over tp: the residual stream and its gradient, the loss, gradients that are sums of parts.
    double rows, logits, partial;
} Sent;

// The rows [N, C] that a micro-batch sends over tp, in units of a reduce-scatter or an all-gather: at the embedding, each
// block, and the head (tp_sp.c).
typedef struct {
    int embedding, block, head;
} RowsSent;

static RowsSent rows_sent(const Config *c) {
    int passes =
        c->recompute == RECOMPUTE_FULL ? 3 : 2; // F, again, I: two all-reduces each, or with --sp their halves
    return c->sp ? (RowsSent){.embedding = 2, .block = 4 * passes + 2, .head = 3}
                 : (RowsSent){.embedding = 2, .block = 4 * passes, .head = 2};
}

static Sent sent_per_step(const Model *m) {
    const Config *c = &m->config;
    double all = 0, gathered_twice = 0, N = (double)c->dp, tp = (double)c->tp, micro_batches = (double)c->accum;
    for (int i = 0; i < m->n_buckets; i++) {
        all += (double)m->bucket[i].count;
        if (i >= 1 && i <= last_gathered(m)) gathered_twice += (double)m->bucket[i].count;
    }
    const double reduced[] = {2 * all, all, micro_batches * all, micro_batches * all};
    const double gathered[] = {0, all, all, micro_batches * (all + gathered_twice)};
    double tokens = (double)c->micro_batch * (double)c->seq;
    RowsSent rows = rows_sent(c);
    Sent sent = {.gradients = reduced[c->zero] * (N - 1) / N * (double)gradient_size(c),
                 .weights = gathered[c->zero] * (N - 1) / N * sizeof(floatX),
                 .rows = micro_batches * (rows.embedding + (double)c->layers * rows.block + rows.head) *
                         tokens * (double)c->hidden * (tp - 1) / tp * sizeof(floatX),
                 .logits = micro_batches * 3 * 2 * (tp - 1) / tp * tokens * sizeof(float)};
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        sent.partial +=
            2 * (p->parts - 1.0) / p->parts * (double)p->size * (double)gradient_size(c) / (c->zero ? N : 1);
    return sent;
}

static double sent_over_tp(Sent s) {
    return s.rows + s.logits + s.partial;
}

ZeroBytes zero_bytes(double parameters, double ranks, int stage, bool accumulate_fp32) {
    bool mixed = sizeof(floatX) == 2;
    double sum = mixed && accumulate_fp32 ? 4 : 0;
    return (ZeroBytes){.weights = sizeof(floatX) * parameters / (stage >= 3 ? ranks : 1),
                       .gradients = (sizeof(floatX) + sum) * parameters / (stage >= 2 ? ranks : 1),
                       .optimizer = (mixed ? 12 : 8) * parameters / (stage >= 1 ? ranks : 1)};
}

// The table as text, to be freed. measured: NULL in a dry run.
static char *memory_table(const Ledger *predicted, const Ledger *measured) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (!out) fail(EXIT_RUNTIME, "no memory for a table");
    fprintf(out, "\nmemory of a rank, GB      predicted%s", measured ? "   measured" : "");
    for (int i = 0; i <= MEM_CATEGORIES; i++) {
        bool total = i == MEM_CATEGORIES;
        size_t p = total ? predicted->total_peak : predicted->peak[i];
        size_t r = measured ? (total ? measured->total_peak : measured->peak[i]) : 0;
        if (i >= MEM_CONTEXT && !total && p == 0 && r == 0) continue; // on a CPU there are none
        fprintf(out, "\n  %-21s %11.6f", total ? "total" : mem_name[i], (double)p * 1e-9);
        if (measured) fprintf(out, "%11.6f", (double)r * 1e-9);
    }
    fclose(out);
    return text;
}

void report_memory(const Ledger *predicted, const Ledger *measured) {
    char *text = memory_table(predicted, measured);
    say("%s", text);
    free(text);
}

const char *report_smaller(const Model *m) {
    const Config *c = &m->config;
    static char flags[128];
    snprintf(flags, sizeof flags, "--micro-batch, --seq, %s%s%s%s%s",
             c->recompute == RECOMPUTE_FULL ? "" : "--recompute full, ",
             c->dp > 1 && c->zero < 3 ? "--zero 3, " : "", c->tp > 1 && !c->sp ? "--sp, " : "",
             c->tp < c->heads ? "a larger --tp, " : "", c->dp > 1 ? "fewer --ranks" : "a smaller --model");
    return flags;
}

static const Model *watched;
static const Ledger *watched_prediction;

// bytes: 0 where a library has asked, and does not say for how many.
static void out_of_memory(MemCategory asked, size_t bytes) {
    char much[32] = "what is asked";
    if (bytes) snprintf(much, sizeof much, "%.6f GB", (double)bytes * 1e-9);
    fail(EXIT_RUNTIME, "no memory for %s of %s, with %.6f GB held; smaller: %s%s", much, mem_name[asked],
         (double)ledger.total * 1e-9, report_smaller(watched), memory_table(watched_prediction, &ledger));
}

void report_out_of_memory(const Model *m, const Ledger *predicted) {
    watched = m, watched_prediction = predicted;
    device_out_of_memory = out_of_memory;
}

static cJSON *memory_json(const double *bytes) { // [MEM_CATEGORIES + 1], the last the peak of all together
    cJSON *o = cJSON_CreateObject();
    for (int i = 0; i < MEM_CATEGORIES; i++) cJSON_AddNumberToObject(o, mem_name[i], bytes[i]);
    cJSON_AddNumberToObject(o, "peak", bytes[MEM_CATEGORIES]);
    return o;
}

static void ledger_numbers(const Ledger *l, double *bytes) {
    for (int i = 0; i < MEM_CATEGORIES; i++) bytes[i] = (double)l->peak[i];
    bytes[MEM_CATEGORIES] = (double)l->total_peak;
}

static void live_numbers(const Ledger *l, double *bytes) {
    for (int i = 0; i < MEM_CATEGORIES; i++) bytes[i] = (double)l->live_peak[i];
    bytes[MEM_CATEGORIES] = (double)l->live_total_peak;
}

// Of ZeRO-3, in a backward.
static void say_not_gathered(const Model *m) {
    int last = m->n_buckets - 1;
    bool two = last - 1 > 0;
    say("  not gathered for the backward: %s%s%s (still whole), %s (%s)", two ? m->bucket[last - 1].name : "",
        two ? " and " : "", m->bucket[last].name, m->bucket[0].name,
        m->config.tie ? "tied: whole all the while" : "its backward reads no weights");
}

static cJSON *zero_table_json(const Model *m) {
    cJSON *table = cJSON_CreateArray();
    for (int stage = 0; stage <= 3; stage++) {
        ZeroBytes z = zero_bytes(rank_parameters(m), (double)m->config.dp, stage, m->config.grad_accum_fp32);
        cJSON *row = cJSON_CreateObject();
        cJSON_AddNumberToObject(row, "stage", stage);
        cJSON_AddNumberToObject(row, "weights", z.weights);
        cJSON_AddNumberToObject(row, "gradients", z.gradients);
        cJSON_AddNumberToObject(row, "optimizer", z.optimizer);
        cJSON_AddNumberToObject(row, "total", z.weights + z.gradients + z.optimizer);
        cJSON_AddItemToArray(table, row);
    }
    return table;
}

static void zero_table(const Model *m) {
    const Config *c = &m->config;
    ZeroBytes one = zero_bytes(1, 1, 0, c->grad_accum_fp32);
    char slices[64] = "";
    if (c->tp > 1)
        snprintf(slices, sizeof slices, ", tp %ld (%.0f parameters here)", c->tp, rank_parameters(m));
    say("\nmodel state of a rank by ZeRO stage, dp %ld%s: %.0f + %.0f + %.0f bytes a parameter%s", c->dp,
        slices, one.weights, one.gradients, one.optimizer,
        sizeof(floatX) == 2 ? ", masters with the optimizer" : "");
    say("(the usual table: without padding, whole buckets in use and the tied embedding's own memory%s)",
        one.gradients > sizeof(floatX) ? "; it counts bf16 gradients beside the fp32 sum at every stage" : "");
    say("GB           weights   gradients   optimizer       total   total GiB");
    for (int stage = 0; stage <= 3; stage++) {
        ZeroBytes z = zero_bytes(rank_parameters(m), (double)c->dp, stage, c->grad_accum_fp32);
        double total = z.weights + z.gradients + z.optimizer;
        say("  --zero %d %11.6f %11.6f %11.6f %11.6f %11.6f%s", stage, z.weights * 1e-9, z.gradients * 1e-9,
            z.optimizer * 1e-9, total * 1e-9, total / 0x1p30, stage == c->zero ? "  <- this run" : "");
    }
}

// What is sent, in words: a line for the gradients, one for the weights.
static void say_sent(const Model *m) {
    const Config *c = &m->config;
    Sent sent = sent_per_step(m);
    static const char *const how[] = {"all-reduced once", "reduce-scattered once",
                                      "reduce-scattered after each micro-batch",
                                      "reduce-scattered after each micro-batch"};
    say("%.6f GB sent by each rank a step", (sent.gradients + sent.weights + sent_over_tp(sent)) * 1e-9);
    if (c->tp > 1) {
        RowsSent rows = rows_sent(c);
        say("  %.6f GB of rows over tp, %s, as %s: a micro-batch sends (tp-1)/tp of them %d times for "
            "the embedding, %ld · %d for the blocks, %d for the head",
            sent.rows * 1e-9, c->sp ? "reduce-scattered and all-gathered" : "all-reduced",
            type_name(sizeof(floatX)), rows.embedding, c->layers, rows.block, rows.head);
        say("  %.6f GB of the loss's maxima and sums over tp, no logits", sent.logits * 1e-9);
        if (sent.partial > 0)
            say("  %.6f GB of gradients of which tp ranks hold parts, as %s", sent.partial * 1e-9,
                type_name(gradient_size(c)));
    }
    if (c->dp == 1) return;
    say("  %.6f GB of gradients, %s, as %s", sent.gradients * 1e-9, how[c->zero], type_name(gradient_size(c)));
    if (c->zero == 1 || c->zero == 2)
        say("  %.6f GB of weights, all-gathered after the step, as %s", sent.weights * 1e-9,
            type_name(sizeof(floatX)));
    if (c->zero < 3) return;
    say("  %.6f GB of weights, all-gathered for each forward and each backward, as %s", sent.weights * 1e-9,
        type_name(sizeof(floatX)));
    say_not_gathered(m);
}

void report_dry_run(const Model *m, const Ledger *predicted) {
    const Config *c = &m->config;
    double P = (double)m->parameters, GB = 1e-9, GiB = 1 / 0x1p30;
    TokenFlops f = token_flops(m);
    ClassicActivations a = classic_activations(c);
    double tokens = (double)c->global_batch * (double)c->seq;
    if (c->json) {
        double bytes[MEM_CATEGORIES + 1];
        ledger_numbers(predicted, bytes);
        cJSON *o = cJSON_CreateObject(), *classic = cJSON_AddObjectToObject(o, "classic_activations");
        Sent sent = sent_per_step(m);
        cJSON_AddNumberToObject(o, "world", (double)world_size(c));
        cJSON_AddNumberToObject(o, "dp", (double)c->dp);
        cJSON_AddNumberToObject(o, "tp", (double)c->tp);
        cJSON_AddBoolToObject(o, "sp", c->sp);
        cJSON_AddNumberToObject(o, "zero", (double)c->zero);
        cJSON_AddNumberToObject(o, "params", P);
        cJSON_AddNumberToObject(o, "accum", (double)c->accum);
        cJSON_AddNumberToObject(o, "tokens_per_step", tokens);
        cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
        cJSON_AddNumberToObject(o, "checkpoint_bytes", 12 * P);
        cJSON_AddNumberToObject(o, "sent_per_step", sent.gradients + sent.weights + sent_over_tp(sent));
        cJSON_AddNumberToObject(o, "sent_over_dp", sent.gradients + sent.weights);
        cJSON_AddNumberToObject(o, "sent_over_tp", sent_over_tp(sent));
        cJSON_AddNumberToObject(classic, "flash", a.flash);
        cJSON_AddNumberToObject(classic, "matrix", a.matrix);
        cJSON_AddNumberToObject(classic, "selective", a.selective);
        cJSON_AddNumberToObject(classic, "full", a.full);
        cJSON_AddItemToObject(o, "memory", memory_json(bytes));
        cJSON_AddItemToObject(o, "zero_table", zero_table_json(m));
        char *text = cJSON_Print(o);
        say("%s", text);
        cJSON_free(text);
        cJSON_Delete(o);
        return;
    }
    say("%s: %zu parameters (%.1f M); 16 bytes each: %.1f GB; checkpoint, 12 bytes each: %.1f GB",
        flag_choice(ARCHS, c->arch), m->parameters, P * 1e-6, 16 * P * GB, 12 * P * GB);
    say("%ld rank%s = dp %ld × tp %ld, %ld sequences of %ld tokens a micro-batch, accumulation %ld: %.0f "
        "tokens a step",
        world_size(c), world_size(c) == 1 ? "" : "s", c->dp, c->tp, c->micro_batch, c->seq, c->accum, tokens);
    say("%.3g GFLOP a token (PaLM: 6 a parameter %.3g, attention %.3g), recomputed beside it %.3g",
        1e-9 * (f.weights + f.attention), 1e-9 * f.weights, 1e-9 * f.attention, 1e-9 * f.recomputed);
    say_sent(m);
    report_memory(predicted, NULL);
    zero_table(m);
    static const char *const formula[] = {"34 + 5as/h", "10 + 24/t + 5as/ht", "(34 + 5as/h)/t"};
    say("\nclassic estimate of activations, 2-byte values with dropout, s·b·h·L times            GB       GiB");
    say("  %s, t = %ld", formula[c->tp == 1 ? 0 : c->sp ? 2 : 1], c->tp);
    say("  no recomputation, flash attention (no 5as/h)  %36.2f %9.4f", a.flash * GB, a.flash * GiB);
    say("  no recomputation, the T×T matrix kept         %36.2f %9.4f", a.matrix * GB, a.matrix * GiB);
    say("  selective                                     %36.2f %9.4f", a.selective * GB, a.selective * GiB);
    say("  full                                          %36.2f %9.4f", a.full * GB, a.full * GiB);
    double state = 16 * rank_parameters(m);
    say("  16 bytes a parameter here + activations with flash %31.2f %9.4f", (state + a.flash) * GB,
        (state + a.flash) * GiB);
}

// Neighbouring buckets of one size, from bucket `first` on in steps of +1 or −1, as one line of a list.
typedef struct {
    int n;
    char name[80];
} Alike;

static Alike alike(const Model *m, int first, int end, int step) { // end: the first that is not looked at
    const Bucket *b = &m->bucket[first];
    int n = 1;
    while (first + n * step != end && b[n * step].count == b->count) n++;
    if (n < 3) n = 1; // two lines say it as well
    Alike a = {.n = n};
    if (n == 1) snprintf(a.name, sizeof a.name, "%s", b->name);
    if (n > 1) snprintf(a.name, sizeof a.name, "%s to %s, each", b->name, b[(n - 1) * step].name);
    return a;
}

// One collective on each bucket from `first` to `last`, whose elements have `size` bytes.
static void explain_collectives(const Model *m, const char *op, int times, int first, int last, size_t size) {
    int step = first <= last ? 1 : -1, N = (int)m->config.dp;
    char factor[16] = "";
    if (times > 1) snprintf(factor, sizeof factor, "%d · ", times);
    for (int i = first; i != last + step;) {
        Alike a = alike(m, i, last + step, step);
        say("    %s of %-26s  %s%d piece%s of %zu bytes", op, a.name, factor, N - 1,
            times * (N - 1) == 1 ? "" : "s",
            comm_shard_begin(m->bucket[i].count, N, 1) * size); // rank 0's, the longest
        i += a.n * step;
    }
}

// Ranks as a table, a tp group a line, a dp group a column; and what of the data, and of a bucket, each line holds.
static void explain_grid(const Config *c, const Bucket *example) {
    say("grid: %ld rank%s = dp %ld × tp %ld", world_size(c), world_size(c) == 1 ? "" : "s", c->dp, c->tp);
    if (c->tp > 1)
        say("(a line is a tp group: the same sequences, other slices; ranks below each other, a dp group)");
    for (long d = 0; d < c->dp; d++) {
        char shard[128] = "", others[32] = "";
        size_t begin = comm_shard_begin(example->count, (int)c->dp, (int)d);
        size_t end = comm_shard_begin(example->count, (int)c->dp, (int)d + 1);
        if (c->zero > 0 && begin < end)
            snprintf(shard, sizeof shard, "; shard of %s: elements %zu to %zu", example->name, begin, end - 1);
        else if (c->zero > 0)
            snprintf(shard, sizeof shard, "; shard of %s: empty", example->name);
        if (c->tp > 1) snprintf(others, sizeof others, " to %ld", d * c->tp + c->tp - 1);
        say("  rank%s %ld%s: in micro-batch j, sequences %ld to %ld of each %ld%s", c->tp > 1 ? "s" : "",
            d * c->tp, others, d * c->micro_batch, (d + 1) * c->micro_batch - 1, c->dp * c->micro_batch, shard);
    }
    static const char *const gradients[] = {
        "whole", "whole; after the last micro-batch its shard holds the sum over the ranks",
        "its shard of the sum; whole, in one of two slots, while they are computed and reduced",
        "its shard of the sum; whole, in one of two slots, while they are computed and reduced"};
    say("\nwhat a rank holds of a bucket, like %s", example->name);
    say("  weights          %s",
        c->zero < 3 ? "whole" : "its shard; whole, in one of two slots, while they are used");
    say("  gradients        %s", gradients[c->zero]);
    say("  optimizer state  %s", c->zero < 1 ? "whole" : "its shard");
    if (c->zero >= 2 && c->tie)
        say("the tied embedding is used at both ends: while %s whole, memory of its own holds %s",
            c->zero == 2 ? "its gradient is" : "its weights and its gradient are",
            c->zero == 2 ? "it" : "them");
}

static void explain_dp_messages(const Model *m) {
    const Config *c = &m->config;
    size_t gradient = gradient_size(c), weight = sizeof(floatX);
    int last = m->n_buckets - 1;
    char each[64];
    snprintf(each, sizeof each, c->accum == 1 ? "the micro-batch" : "each of %ld micro-batches", c->accum);
    say("\nmessages of a step in a dp group: what each rank sends its neighbour on the ring 0 -> %ld%s -> 0%s",
        c->tp, c->dp > 2 ? " -> …" : "", c->tp > 1 ? ", and so from each tp rank" : "");
    if (c->zero == 3) {
        say("  in the forward of %s, a bucket ahead of its use", each);
        explain_collectives(m, "all-gather", 1, 0, last, weight);
        say("  in its backward, a gather a bucket ahead of its use, a reduction when a bucket is done");
        if (last_gathered(m) >= 1) explain_collectives(m, "all-gather", 1, last_gathered(m), 1, weight);
        say_not_gathered(m);
    } else if (c->zero == 2) {
        say("  in the backward of %s, when a bucket is done", each);
    } else {
        say("  in the backward%s, when a bucket is done", c->accum == 1 ? "" : " of the last micro-batch");
    }
    explain_collectives(m, c->zero ? "reduce-scatter" : "all-reduce", c->zero ? 1 : 2, last, 0, gradient);
}

// One line of a micro-batch's messages over tp.
static void explain_rows(const Config *c, const char *why, bool sum) {
    int pieces = (int)c->tp - 1;
    size_t rows = (size_t)c->micro_batch * (size_t)c->seq * (size_t)c->hidden;
    say("    %-14s of rows, %-38s  %s%d piece%s of %zu bytes",
        sum ? c->sp ? "reduce-scatter" : "all-reduce" : "all-gather", why, sum && !c->sp ? "2 · " : "", pieces,
        pieces == 1 && (c->sp || !sum) ? "" : "s", comm_shard_begin(rows, (int)c->tp, 1) * sizeof(floatX));
}

static void explain_tp_messages(const Model *m) {
    const Config *c = &m->config;
    size_t N = (size_t)c->micro_batch * (size_t)c->seq;
    say("\nmessages in a tp group, each micro-batch, on the ring 0 -> 1%s -> 0; rows are [%zu, %ld] of %s",
        c->tp > 2 ? " -> …" : "", N, c->hidden, type_name(sizeof(floatX)));
    say("  F of the embedding");
    explain_rows(c, "of looked-up tokens", true);
    say("  F of each block%s", c->recompute == RECOMPUTE_FULL ? ", and again before its backward" : "");
    if (c->sp) explain_rows(c, "into attention", false);
    explain_rows(c, "out of attention", true);
    if (c->sp) explain_rows(c, "into the MLP", false);
    explain_rows(c, "out of the MLP", true);
    say("  F of the head");
    if (c->sp) explain_rows(c, "into the logits", false);
    say("    all-reduce (maximum), then all-reduce, of %zu and of %zu bytes: no logits", N * sizeof(float),
        2 * N * sizeof(float));
    say("  B of the head");
    if (c->sp) explain_rows(c, "into W", false);
    explain_rows(c, "gradient, beside W", true);
    say("  B of each block");
    if (c->sp) explain_rows(c, "gradient, into the MLP", false);
    if (c->sp) explain_rows(c, "the MLP's input, for W", false);
    explain_rows(c, "gradient, out of the MLP, beside W", true);
    if (c->sp) explain_rows(c, "gradient, into attention", false);
    if (c->sp) explain_rows(c, "attention's input, for W", false);
    explain_rows(c, "gradient, out of attention, beside W", true);
    if (c->sp) say("  B of the embedding");
    if (c->sp) explain_rows(c, "gradient", false);
}

// Bytes of the gradients of which several tp ranks compute parts: those of key/value heads, or all others.
static double partial_bytes(const Model *m, bool kv) {
    double sum = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->parts > 1 && (p->split == SPLIT_KV_HEADS) == kv)
            sum += (double)p->size * (double)gradient_size(&m->config);
    return sum;
}

// What is sent when all gradients are there, and after the step.
static void explain_last_messages(const Model *m) {
    const Config *c = &m->config;
    const char *part = c->zero && c->dp > 1 ? ", of which each dp rank has a shard" : "";
    say("\nand once a step, after the last backward");
    if (partial_bytes(m, false) > 0)
        say("    all-reduce over tp of %.0f bytes of gradients that are sums of its ranks' parts (+)%s",
            partial_bytes(m, false), part);
    if (partial_bytes(m, true) > 0)
        say("    all-reduce over kv, tp ranks that hold the same key/value head (0 to %ld, …), of %.0f bytes "
            "of (+)%s",
            c->tp / c->kv_heads - 1, partial_bytes(m, true), part);
    say("    all-reduce over all ranks of 16 bytes for the loss, of 8 for the gradient's norm");
    if (c->dp == 1 || (c->zero != 1 && c->zero != 2)) return;
    say("  after the optimizer's step, awaited by the next forward");
    explain_collectives(m, "all-gather", 1, 0, m->n_buckets - 1, sizeof(floatX));
}

// Which rows or columns of p each tp rank holds.
static void explain_slices(const Config *c, const Param *p, char *out, size_t size) {
    enum { MOST = 8 };
    size_t n = 0;
    if (p->split == SPLIT_NONE) return;
    for (int r = 0; r < c->tp && r < MOST; r++) {
        Param of = *p;
        tp_slice(c, &of, r);
        size_t from = p->split == SPLIT_COLUMNS ? of.col : of.row,
               to = from + (p->split == SPLIT_COLUMNS ? of.slice_cols : of.slice_rows) - 1;
        n += (size_t)snprintf(out + n, size - n, "%s %zu-%zu", r ? " |" : ":", from, to);
    }
    if (c->tp > MOST) snprintf(out + n, size - n, " | …");
}

// The grid, who holds what, and the messages of a step.
void report_explain(const Model *m) {
    static const char *const split[] = {"whole", "rows", "columns", "rows by heads", "rows by key/value heads"};
    const Config *c = &m->config;
    int last = m->n_buckets - 1;
    explain_grid(c, &m->bucket[1]);
    say("\nbuckets and parameters (the last column: how tensor parallelism %s)",
        c->tp > 1 ? "cuts it, by tp rank; +: gradients are sums of the ranks' parts" : "would cut it");
    for (int i = 0; i < m->n_buckets;) {
        Alike a = alike(m, i, i <= 1 || i == last ? i + 1 : last, 1);
        say("  %s: %zu elements", a.name, m->bucket[i].count);
        const Param *first = m->param + m->bucket[i].first_param, *end = first + m->bucket[i].n_params;
        for (const Param *p = first; p < end; p++) {
            if (p->unit > 1 && p->unit <= c->layers) continue; // all blocks are alike
            char slices[256] = "";
            if (c->tp > 1) explain_slices(c, p, slices, sizeof slices);
            say("    %-32s %8zu × %-8zu %s%s%s", p->name, p->rows, p->cols, split[p->split], slices,
                p->parts > 1 ? " +" : "");
        }
        i += a.n;
    }
    if (c->tp > 1) explain_tp_messages(m);
    if (c->dp > 1) explain_dp_messages(m);
    if (world_size(c) > 1)
        explain_last_messages(m);
    else
        say("\nno messages: one rank");
}

void report_start(const Model *m, const Ledger *predicted, int threads, double peak_flops) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    double bytes[MEM_CATEGORIES + 1];
    ledger_numbers(predicted, bytes);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "start");
    cJSON_AddNumberToObject(o, "world", m->grid.world->size);
    cJSON_AddNumberToObject(o, "hosts", comm_host().hosts);
    cJSON_AddNumberToObject(o, "dp", m->grid.dp->size);
    cJSON_AddNumberToObject(o, "tp", m->grid.tp->size);
    cJSON_AddBoolToObject(o, "sp", c->sp);
    static const char *const groups[] = {"cp", "pp", "ep"}; // of one rank each, in this version
    for (int i = 0; i < 3; i++) cJSON_AddNumberToObject(o, groups[i], 1);
    cJSON_AddNumberToObject(o, "zero", (double)c->zero);
    cJSON_AddNumberToObject(o, "threads", threads); // of rank 0, and the cores that they may run on
    cJSON_AddNumberToObject(o, "cores", omp_get_num_procs());
    cJSON_AddNumberToObject(o, "params", (double)m->parameters);
    cJSON_AddNumberToObject(o, "active_params", (double)m->parameters);
    cJSON_AddNumberToObject(o, "tokens_per_step", (double)c->global_batch * (double)c->seq);
    cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
    cJSON_AddNumberToObject(o, "peak_flops", peak_flops);
    cJSON_AddItemToObject(o, "predicted", memory_json(bytes));
    log_event(o);
    char hosts[32] = "";
    if (comm_host().hosts > 1) snprintf(hosts, sizeof hosts, "%d hosts, ", comm_host().hosts);
    char grid[64] = "";
    if (c->tp > 1) snprintf(grid, sizeof grid, " (dp %ld × tp %ld%s)", c->dp, c->tp, c->sp ? ", --sp" : "");
    say("%s, %s, %.2f M parameters, vocabulary %ld; %d rank%s%s of %d thread%s on %s%s; %.0f tokens a step, "
        "%.2f "
        "MFLOP each",
        flag_choice(ARCHS, c->arch), sizeof(floatX) == 2 ? "bf16" : "fp32", (double)m->parameters * 1e-6,
        c->vocab, m->grid.world->size, m->grid.world->size == 1 ? "" : "s", grid, threads,
        threads == 1 ? "" : "s", hosts, device_name(), (double)c->global_batch * (double)c->seq,
        1e-6 * (f.weights + f.attention));
}

void report_step(const Model *m, StepReport r, double peak_flops) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    double tokens_per_s = (double)c->global_batch * (double)c->seq / r.seconds;
    double mfu =
        peak_flops > 0 ? tokens_per_s * (f.weights + f.attention) / peak_flops : NAN; // NaN: null in JSON
    long left = lround((double)(c->steps - r.step) * r.seconds);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "step");
    cJSON_AddNumberToObject(o, "step", (double)r.step);
    cJSON_AddNumberToObject(o, "loss", r.loss);
    cJSON_AddNumberToObject(o, "grad_norm", r.grad_norm);
    cJSON_AddNumberToObject(o, "lr", r.lr);
    cJSON_AddNumberToObject(o, "ms", 1e3 * r.seconds);
    cJSON_AddNumberToObject(o, "tokens_per_s", tokens_per_s);
    cJSON_AddNumberToObject(o, "mfu", mfu);
    cJSON_AddNumberToObject(o, "hfu", mfu * (1 + f.recomputed / (f.weights + f.attention)));
    log_event(o);
    char share[32] = ""; // of a GPU whose peak is not known
    if (!isnan(mfu)) snprintf(share, sizeof share, "MFU %.0f %%  ", 100 * mfu);
    status_line(r.step == c->steps,
                "step %ld/%ld  loss %.4f  norm %.2f  lr %.1e  %.1f ms  %.0f tok/s  %s%.2f GB  %ld:%02ld left",
                r.step, c->steps, r.loss, r.grad_norm, r.lr, 1e3 * r.seconds, tokens_per_s, share,
                (double)ledger.total_peak * 1e-9, left / 60, left % 60);
}

void report_validation(long step, double loss) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "val");
    cJSON_AddNumberToObject(o, "step", (double)step);
    cJSON_AddNumberToObject(o, "loss", loss);
    log_event(o);
    say("step %ld: validation loss %.4f", step, loss);
}

// What this rank has sent, by group and operation. Exposed is the time in which it has only waited.
static void report_messages(Comm *const *comm, int n_comms) {
    say("\nmessages of a rank                calls            GB   exposed s");
    for (int i = 0; i < n_comms * COMM_OPS; i++) {
        CommCount n = comm[i / COMM_OPS]->count[i % COMM_OPS];
        if (n.calls && comm[i / COMM_OPS]->size > 1)
            say("  %-8s %-16s %12llu %13.6f %11.3f", comm[i / COMM_OPS]->name, comm_op_name[i % COMM_OPS],
                (unsigned long long)n.calls, (double)n.bytes * 1e-9, n.exposed_ms * 1e-3);
    }
}

// The last event: memory and messages of every rank, gathered to all.
void report_end(const Model *m, const Ledger *predicted, double loss, double peak_before, double peak_after) {
    // A rank's numbers: memory held, memory live, then the counters of each group and operation.
    enum {
        COMMS = COMM_MOST,
        LIVE = MEM_CATEGORIES + 1,
        COUNTS = 2 * LIVE,
        NUMBERS = COUNTS + COMMS * COMM_OPS * 3
    };
    Comm *world = m->grid.world, *comm[COMMS];
    int n_comms = comm_list(comm, COMMS), size = world->size;
    double *all = host_alloc((size_t)size * NUMBERS, sizeof(double)),
           *mine = all + (size_t)world->rank * NUMBERS;
    ledger_numbers(&ledger, mine);
    live_numbers(&ledger, mine + LIVE);
    for (int i = 0; i < n_comms * COMM_OPS; i++) {
        CommCount count = comm[i / COMM_OPS]->count[i % COMM_OPS];
        double *x = mine + COUNTS + 3 * i;
        x[0] = (double)count.calls, x[1] = (double)count.bytes, x[2] = count.exposed_ms;
    }
    comm_wait(comm_host_all_gather(world, all, mine, (size_t)size * NUMBERS, DTYPE_F64));

    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "end");
    cJSON *memory = cJSON_AddArrayToObject(o, "memory"), *messages = cJSON_AddArrayToObject(o, "comm");
    for (int r = 0; r < size; r++) {
        const double *x = all + (size_t)r * NUMBERS;
        cJSON *row = memory_json(x);
        cJSON_AddNumberToObject(row, "rank", r);
        cJSON_AddItemToObject(row, "live", memory_json(x + LIVE));
        cJSON_AddItemToArray(memory, row);
        for (int i = 0; i < n_comms * COMM_OPS; i++) {
            const double *y = x + COUNTS + 3 * i;
            if (y[0] == 0 || comm[i / COMM_OPS]->size == 1) continue;
            row = cJSON_CreateObject();
            cJSON_AddNumberToObject(row, "rank", r);
            cJSON_AddStringToObject(row, "group", comm[i / COMM_OPS]->name);
            cJSON_AddStringToObject(row, "op", comm_op_name[i % COMM_OPS]);
            cJSON_AddNumberToObject(row, "calls", y[0]);
            cJSON_AddNumberToObject(row, "bytes", y[1]);
            cJSON_AddNumberToObject(row, "exposed_ms", y[2]);
            cJSON_AddItemToArray(messages, row);
        }
    }
    cJSON *flops = cJSON_AddObjectToObject(o, "flops"); // of rank 0
    cJSON_AddNumberToObject(flops, "gemm_forward", kernel_flops.gemm_forward);
    cJSON_AddNumberToObject(flops, "gemm_backward", kernel_flops.gemm_backward);
    cJSON_AddNumberToObject(flops, "gemm_fp8", kernel_flops.gemm_fp8);
    cJSON_AddNumberToObject(flops, "attention_forward", kernel_flops.attention_forward);
    cJSON_AddNumberToObject(flops, "attention_backward", kernel_flops.attention_backward);
    cJSON_AddNumberToObject(o, "loss", loss);
    cJSON_AddNumberToObject(o, "peak_flops", peak_after);
    log_event(o);
    free(all);

    report_memory(predicted, &ledger);
    say("  %-21s %11.6f   by the classic estimate, with 2-byte values", "(activations)",
        classic_activations(&m->config).matrix * 1e-9);
    size_t process = device_process_peak();
    if (process) say("  %-21s %22.6f", "the whole process", (double)process * 1e-9);
    if (size > 1) report_messages(comm, n_comms);
    if (m->config.peak_tflops > 0) return;
    if (device_count() > 0 && peak_after > 0)
        say("\nMFU: PaLM's convention, against the GPUs' published dense peak for %s, %.0f TFLOP/s in all",
            m->bf16_products ? "bf16" : "fp32", peak_after * 1e-12);
    else if (device_count() > 0)
        say("\nno MFU: the peak of %s is not known here; --peak-tflops sets it", device_name());
    else
        say("\nMFU: PaLM's convention, against a 1024³ sgemm on all ranks: %.1f GFLOP/s before the run, %.1f "
            "after",
            peak_before * 1e-9, peak_after * 1e-9);
}

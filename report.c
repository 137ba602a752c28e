// What a run says of itself. A reader of the training program may skip this file.
#include "report.h"
#include "runtime/fail.h"
#include "runtime/log.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- who holds what ----------------------------------------------------------------------------------------------------

long report_world(const Config *c) {
    return c->pp * c->dp_cp * c->tp;
}

const char *report_grid(const Config *c) {
    static char text[128];
    int n = 0;
    if (c->pp > 1) n += sprintf(text + n, "pp %ld × ", c->pp);
    n += sprintf(text + n, "dp %ld", c->dp);
    if (c->ep > 1) n += sprintf(text + n, " (ep %ld)", c->ep);
    n += sprintf(text + n, " × ");
    if (c->cp > 1) n += sprintf(text + n, "cp %ld × ", c->cp);
    sprintf(text + n, "tp %ld", c->tp);
    return text;
}

static long layers_here(const Config *c, const Chunk *chunk) {
    long n = 0;
    for (const Chunk *k = chunk; k < chunk + c->virtual_stages; k++) n += k->blocks;
    return n;
}

const char *report_units(const Config *c, const Chunk *chunk) {
    static char text[(MOST_CHUNKS + 1) * 64];
    int n = 0;
    for (const Chunk *k = chunk; k < chunk + c->virtual_stages; k++) {
        long from = k->first_block, to = from + k->blocks - 1;
        n += sprintf(text + n, "%s", k == chunk ? "" : "; ");
        if (c->virtual_stages > 1) n += sprintf(text + n, "stage %d: ", k->stage);
        if (k->first_unit == 0) n += sprintf(text + n, "embedding, ");
        n += from == to ? sprintf(text + n, "block %ld", from) : sprintf(text + n, "blocks %ld-%ld", from, to);
        if (k->last_unit > c->layers) n += sprintf(text + n, ", head");
        if (k->last_unit > c->layers && pp_ties(c)) n += sprintf(text + n, " and a copy of the embedding");
    }
    return text;
}

// Parameters of which this rank holds a slice: of experts, or all others.
static double held_parameters(const Model *m, bool experts) {
    double sum = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->here && (p->expert >= 0) == experts) sum += (double)p->slice_rows * (double)p->slice_cols;
    return sum;
}

static double rank_parameters(const Model *m) {
    return held_parameters(m, false) + held_parameters(m, true);
}

static double active_parameters(const Model *m) {
    return (double)(m->parameters - m->inactive);
}

size_t report_gradient_size(const Config *c) {
    return c->grad_accum_fp32 ? sizeof(float) : sizeof(floatX);
}

const char *report_type(size_t size) {
    return size == 4 ? "fp32" : "bf16";
}

// ---- estimates ---------------------------------------------------------------------------------------------------------

// Floating-point operations a token, forward and backward, in PaLM's convention (Chowdhery et al. 2022, App. B): 6 a
// parameter that a token goes through, without the embedding's look-up tables and with the head once, and 12 · L · H·D · T for attention as if unmasked.
// HFU adds what recomputation does again: a forward of the blocks, or attention's two products.
typedef struct {
    double weights, attention, recomputed;
} TokenFlops;

static TokenFlops token_flops(const Model *m) {
    const Config *c = &m->config;
    double C = (double)c->hidden, attention = 12.0 * (double)c->layers * C * (double)c->seq,
           blocks = -(double)m->inactive;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->unit >= 1 && p->unit <= c->layers) blocks += (double)p->rows * (double)p->cols;
    double tables = (double)c->positions * C * (c->arch == ARCH_GPT2) + (c->tie ? 0 : (double)c->vocab * C);
    TokenFlops f = {6 * (active_parameters(m) - tables), attention, 0};
    if (c->recompute == RECOMPUTE_FULL) f.recomputed = 2 * blocks + attention / 3;
    if (c->recompute == RECOMPUTE_SELECTIVE && c->attention == ATTENTION_NAIVE) f.recomputed = attention / 3;
    return f;
}

// The estimate most often quoted for a layer's activations (Korthikanti et al. 2022, eq. 1 to 5): 2-byte values, dropout
// masks kept. Of the 34 bytes a token and channel, 10 are kept by all of t tensor-parallel ranks, and with --sp none. Each of cp
// ranks has s/cp tokens, but scores over all s keys. Ours is smaller in a bf16 build: no dropout, and flash attention keeps no
// matrix. (The first, as a rule of thumb, leaves out the embedding's output, s·b·h; the others count it.)
// In a pipeline a rank keeps those of its own layers, for each micro-batch in flight: of 1F1B the first of p ranks has 1/p of the
// layers, p times.
typedef struct {
    double flash, matrix, selective, full; // bytes of a rank's layers
} ClassicActivations;

static double classic_state(const Model *m) {
    return 16 * rank_parameters(m);
}

static long chunks_in_flight(const Model *m) {
    return m->plan->rank[m->pp_rank].slots;
}

static ClassicActivations classic_activations(const Model *m) {
    const Config *c = &m->config;
    double flight = (double)chunks_in_flight(m), L = (double)m->blocks * flight;
    double sbh = (double)c->local_seq * (double)c->micro_batch * (double)c->hidden;
    double t = (double)c->tp, rows = c->sp ? t : 1; // by which that of norms and residuals is divided
    double layer = 10 / rows + 24 / t, scores = 5 * (double)c->heads * (double)c->seq / (double)c->hidden / t;
    double embedding = m->chunk_of[0] < 0 ? 0 : sbh / rows * flight;
    return (ClassicActivations){.flash = layer * sbh * L,
                                .matrix = (layer + scores) * sbh * L + embedding,
                                .selective = layer * sbh * L + embedding,
                                .full = 2 * sbh * L / rows + embedding};
}

// Worked out from the rule, not asked of cp_ring.c, which counts them. A zigzag rank has two chunks of c tokens: its own keys are
// seen causally, and of each other rank's half of the keys by all its queries, or all by half. A contiguous one sees all keys of
// the ranks before it, and none of those behind.
double report_pairs(const Config *c, CpOrder order, long r) {
    double t = (double)c->seq / (double)c->cp, own = t * (t + 1) / 2; // t = 2c
    return own + t * t * (order == ORDER_ZIGZAG ? (double)(c->cp - 1) / 2 : (double)r);
}

double report_imbalance(const Config *c, CpOrder order) {
    double most = report_pairs(c, order, c->cp - 1), sum = 0; // the last one has the most
    for (long r = 0; r < c->cp; r++) sum += report_pairs(c, order, r);
    return most * (double)c->cp / sum;
}

size_t report_keys(const Config *c) {
    long heads = c->kv_heads > c->tp ? c->kv_heads / c->tp : 1;
    return 2 * (size_t)heads * (size_t)(c->hidden / c->heads);
}

static CpOrder other_order(const Config *c) {
    return c->cp_order == ORDER_ZIGZAG ? ORDER_CONTIGUOUS : ORDER_ZIGZAG;
}

// ---- what is sent ------------------------------------------------------------------------------------------------------

// Which buckets' weights are whole while a step goes on, and how often they had to be gathered for that. Worked out here from the
// rules, and not asked of dp_zero.c: what is predicted is held against what that has counted.
typedef struct {
    const Model *m;
    bool *whole;      // [n_buckets]
    int in_slot[4];   // the bucket that stands in a slot, or stood there last; −1: none yet
    Gathers *gathers; // [n_buckets]
} Walk;

static void walk_gather(Walk *w, int i, Pass pass) {
    const Model *m = w->m;
    bool own_memory = m->config.tie && m->bucket[i].first_unit == 0;
    int *slot = &w->in_slot[i < m->n_dense ? i & 1 : 2 + ((i - m->n_dense) & 1)];
    if (w->whole[i]) return;
    if (!own_memory && *slot >= 0) w->whole[*slot] = false;
    if (!own_memory) *slot = i;
    w->whole[i] = true;
    ++*(pass == PASS_F ? &w->gathers[i].forward : &w->gathers[i].backward);
}

static bool reads_weights(int unit, Pass pass) {
    return pass == PASS_F || (pass != PASS_W && unit > 0);
}

// The neighbour of bucket i that comes next in this pass.
static void walk_next(Walk *w, int i, Pass pass) {
    const Model *m = w->m;
    int next = pass == PASS_F ? i + 1 : i - 1;
    bool follows = next >= 0 && next < m->n_buckets && (next < m->n_dense) == (i < m->n_dense) &&
                   m->bucket[next].chunk == m->bucket[i].chunk;
    if (follows && reads_weights(m->bucket[next].first_unit, pass)) walk_gather(w, next, pass);
}

// A pass of one unit, as dp_begin and dp_end (dp_zero.c) have it.
static void walk_unit(Walk *w, int unit, Pass pass) {
    const Model *m = w->m;
    int i = m->bucket_of[unit], experts = m->experts_bucket_of[unit];
    int tied = m->config.tie && unit == m->n_units - 1 ? m->bucket_of[0] : -1;
    if (!reads_weights(unit, pass) && unit > 0) return; // W
    if (reads_weights(unit, pass)) {
        if (tied >= 0) walk_gather(w, tied, pass);
        walk_gather(w, i, pass);
        if (experts >= 0) walk_gather(w, experts, pass);
        walk_next(w, i, pass);
        if (experts >= 0) walk_next(w, experts, pass);
    }
    if (pass == PASS_F) return;
    if (experts >= 0) w->whole[experts] = false;
    if (unit == m->bucket[i].first_unit) w->whole[i] = false;
    if (tied >= 0 && m->bucket[tied].chunk < 0) w->whole[tied] = false;
}

Gathers *report_gathers(const Model *m) {
    const RankPlan *plan = &m->plan->rank[m->pp_rank];
    size_t n = (size_t)m->n_buckets;
    Walk w = {m, host_alloc(n, sizeof(bool)), {-1, -1, -1, -1}, host_alloc(n, sizeof(Gathers))};
    for (const Action *a = plan->action; a < plan->action + plan->n; a++) {
        const Chunk *k = &m->chunk[a->chunk];
        for (int i = 0; i <= k->last_unit - k->first_unit && a->pass != PASS_W; i++)
            walk_unit(&w, a->pass == PASS_F ? k->first_unit + i : k->last_unit - i, a->pass);
    }
    free(w.whole);
    return w.gathers;
}

bool report_alternates(const Config *c) {
    return c->pp == 1 && c->schedule == SCHEDULE_1F1B;
}

void report_not_gathered(const Model *m, const Gathers *gathers) {
    char still[128] = "";
    for (int i = 1; i < m->n_buckets; i++) {
        size_t n = strlen(still);
        if (!gathers[i].backward)
            snprintf(still + n, sizeof still - n, "%s%s", n ? " and " : "", m->bucket[i].name);
    }
    say("  not gathered for the backward: %s (still whole), %s (%s)", still, m->bucket[0].name,
        m->config.tie ? "tied: whole all the while" : "its backward reads no weights");
}

// The rows [N, C] that a micro-batch sends over tp, in units of a reduce-scatter or an all-gather: at the embedding, each
// block, and the head (tp_sp.c), as far as they are this rank's.
typedef struct {
    int embedding, block, head;
    int experts; // a block that has nothing but experts, whose W needs no rows of others
} RowsSent;

static RowsSent rows_sent(const Model *m) {
    const Config *c = &m->config;
    // F, again, I: two all-reduces each, or with --sp their halves; and W's gathers, two, or four where it comes later.
    int passes = c->recompute == RECOMPUTE_FULL ? 3 : 2, weights = !c->sp ? 0 : pp_defers_w(c) ? 4 : 2;
    return (RowsSent){.embedding = m->chunk_of[0] >= 0 ? 2 : 0,
                      .block = 4 * passes + weights,
                      .experts = 4 * passes + weights / 2,
                      .head = m->chunk_of[m->n_units - 1] < 0 ? 0
                              : c->sp                         ? 3
                                                              : 2};
}

// Messages that leave this rank for another of the pipeline, one micro-batch.
static long messages_sent(const Model *m) {
    const Config *c = &m->config;
    int last = (int)(c->pp * c->virtual_stages) - 1;
    long n = 0;
    for (const Chunk *k = m->chunk; k < m->chunk + c->virtual_stages; k++) {
        n += k->stage < last && pp_rank_of(c, k->stage + 1) != m->pp_rank;
        n += k->stage > 0 && pp_rank_of(c, k->stage - 1) != m->pp_rank;
    }
    return n;
}

// Bytes over cp of a block and micro-batch: in each pass its keys and values come by the other ranks, and in the backward their
// gradients, too, which end with their owner.
static double ring_sent(const Config *c) {
    int passes = c->recompute == RECOMPUTE_FULL ? 3 : 2;
    double elements = (double)c->micro_batch * (double)c->local_seq * (double)report_keys(c);
    return (double)(c->cp - 1) * elements * (double)((size_t)passes * sizeof(floatX) + sizeof(float));
}

// Blocks of this rank that have experts.
static long expert_blocks_here(const Model *m) {
    long n = 0;
    for (int unit = 0; unit < m->n_units; unit++) n += m->experts_bucket_of[unit] >= 0;
    return n;
}

static long blocks_of_experts_alone(const Model *m) {
    return m->config.shared_experts ? 0 : expert_blocks_here(m);
}

// What the routers of a rank send in a micro-batch, where each expert gets as many copies: two all-to-alls in each pass; the gates'
// gradients, and with --sp each rank's part of the choice; the balance loss's two sums.
static void add_experts_sent(const Model *m, Sent *sent) {
    const Config *c = &m->config;
    double passes = c->recompute == RECOMPUTE_FULL ? 3 : 2, tp = (double)c->tp, ep = (double)c->ep;
    double copies = (double)c->micro_batch * (double)c->local_seq * (double)c->topk, E = (double)c->experts;
    double times = (double)c->accum * (double)expert_blocks_here(m), group = (double)c->cp * (c->sp ? tp : 1);
    sent->copies = times * passes * 2 * copies * (double)c->hidden * sizeof(floatX) * (ep - 1) / ep;
    sent->counts = times * (ep - 1) * E * sizeof(int32_t);
    sent->gates = times * copies * (c->sp ? 4 : 2) * sizeof(float) * (tp - 1) / tp;
    if (c->balance == BALANCE_AUX)
        sent->sums = times * 2 * (group - 1) / group * 2 * (double)c->micro_batch * E * sizeof(float);
}

static Sent sent_per_step(const Model *m) {
    const Config *c = &m->config;
    double all = 0, gathered = 0, N = (double)c->dp_cp, tp = (double)c->tp, micro_batches = (double)c->accum;
    Gathers *gathers = c->zero == 3 ? report_gathers(m) : NULL;
    for (int i = 0; i < m->n_buckets; i++) {
        double ranks = m->bucket[i].ranks, count = (double)m->bucket[i].count * (ranks - 1) / ranks;
        all += count;
        gathered += count * (gathers ? (double)(gathers[i].forward + gathers[i].backward) : c->zero > 0);
    }
    free(gathers);
    const double reduced[] = {2 * all, all, micro_batches * all, micro_batches * all};
    double tokens = (double)c->micro_batch * (double)c->local_seq;
    double x = tokens * (double)c->hidden * sizeof(floatX);
    double gradient = (double)report_gradient_size(c), shards = c->zero ? N : 1;
    bool head = m->chunk_of[m->n_units - 1] >= 0;
    RowsSent rows = rows_sent(m);
    double blocks = (double)layers_here(c, m->chunk), alone = (double)blocks_of_experts_alone(m);
    Sent sent = {.gradients = reduced[c->zero] * gradient,
                 .weights = gathered * sizeof(floatX),
                 .rows = micro_batches *
                         (rows.embedding + (blocks - alone) * rows.block + alone * rows.experts + rows.head) *
                         x * (tp - 1) / tp,
                 .logits = head ? micro_batches * 3 * 2 * (tp - 1) / tp * tokens * sizeof(float) : 0,
                 .ring = micro_batches * blocks * ring_sent(c),
                 .messages = micro_batches * (double)messages_sent(m) * x / (c->sp ? tp : 1)};
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->here) sent.partial += 2 * (p->parts - 1.0) / p->parts * (double)p->size * gradient / shards;
    if (pp_ties(c) && m->bucket_of[0] >= 0)
        sent.tied = (double)m->bucket[m->bucket_of[0]].count * gradient / shards;
    add_experts_sent(m, &sent);
    return sent;
}

static double sent_over_tp(Sent s) {
    return s.rows + s.logits + s.partial + s.gates;
}

static double sent_over_pp(Sent s) {
    return s.messages + s.tied;
}

static double sent_over_ep(Sent s) {
    return s.copies + s.counts;
}

static double sent_in_all(Sent s) {
    return s.gradients + s.weights + s.ring + s.sums + sent_over_ep(s) + sent_over_tp(s) + sent_over_pp(s);
}

Place report_place(const Model *m, Ledger predicted) {
    const Config *c = &m->config;
    Place place = {.layers = layers_here(c, m->chunk),
                   .parameters = rank_parameters(m),
                   .sent = sent_per_step(m),
                   .memory = predicted};
    memcpy(place.chunk, m->chunk, (size_t)c->virtual_stages * sizeof *m->chunk);
    return place;
}

// ---- memory ------------------------------------------------------------------------------------------------------------

ZeroBytes zero_bytes(double parameters, double ranks, int stage, bool accumulate_fp32) {
    bool mixed = sizeof(floatX) == 2;
    double sum = mixed && accumulate_fp32 ? 4 : 0;
    return (ZeroBytes){.weights = sizeof(floatX) * parameters / (stage >= 3 ? ranks : 1),
                       .gradients = (sizeof(floatX) + sum) * parameters / (stage >= 2 ? ranks : 1),
                       .optimizer = (mixed ? 12 : 8) * parameters / (stage >= 1 ? ranks : 1)};
}

ZeroBytes report_state(const Model *m, int stage) {
    const Config *c = &m->config;
    ZeroBytes z = zero_bytes(held_parameters(m, false), (double)c->dp_cp, stage, c->grad_accum_fp32);
    ZeroBytes experts = zero_bytes(held_parameters(m, true), (double)c->replicas, stage, c->grad_accum_fp32);
    z.weights += experts.weights, z.gradients += experts.gradients, z.optimizer += experts.optimizer;
    return z;
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
    static char flags[160];
    // Could twice as many ranks share a sequence?
    bool contiguous = c->cp > 1 && c->cp_order == ORDER_CONTIGUOUS;
    long parts = 2 * c->cp * (contiguous ? 1 : 2), sp = c->sp ? c->tp : 1;
    bool cut = c->attention == ATTENTION_FLASH && c->seq % parts == 0 && c->seq / (2 * c->cp) % sp == 0;
    snprintf(flags, sizeof flags, "--micro-batch, --seq, %s%s%s%s%s%s%s%s%s",
             c->recompute == RECOMPUTE_FULL ? "" : "--recompute full, ",
             c->dp_cp > 1 && c->zero < 3 ? "--zero 3, " : "", c->tp > 1 && !c->sp ? "--sp, " : "",
             c->tp < c->heads ? "a larger --tp, " : "", cut ? "a larger --cp, " : "",
             c->experts % (2 * c->ep) == 0 && c->dp % (2 * c->ep) == 0 && c->experts ? "a larger --ep, " : "",
             c->pp * c->virtual_stages < c->layers ? "a larger --pp, " : "",
             c->schedule == SCHEDULE_AFAB && c->accum > 1 ? "fewer --accum, " : "",
             c->dp > 1 ? "fewer --ranks" : "a smaller --model");
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

static cJSON *zero_table_json(const Model *m) {
    cJSON *table = cJSON_CreateArray();
    for (int stage = 0; stage <= 3; stage++) {
        ZeroBytes z = report_state(m, stage);
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
    char slices[128] = "";
    int n = 0;
    if (c->cp > 1) n += sprintf(slices + n, " × cp %ld", c->cp);
    if (c->ep > 1) n += sprintf(slices + n, " (experts over %ld)", c->replicas);
    if (c->tp > 1) n += sprintf(slices + n, ", tp %ld", c->tp);
    if (c->tp * c->pp * c->ep > 1) sprintf(slices + n, " (%.0f parameters here)", rank_parameters(m));
    say("\nmodel state of a rank by ZeRO stage, dp %ld%s: %.0f + %.0f + %.0f bytes a parameter%s", c->dp,
        slices, one.weights, one.gradients, one.optimizer,
        sizeof(floatX) == 2 ? ", masters with the optimizer" : "");
    say("(the usual table: without padding, whole buckets in use and the tied embedding's own memory%s)",
        one.gradients > sizeof(floatX) ? "; it counts bf16 gradients beside the fp32 sum at every stage" : "");
    say("GB           weights   gradients   optimizer       total   total GiB");
    for (int stage = 0; stage <= 3; stage++) {
        ZeroBytes z = report_state(m, stage);
        double total = z.weights + z.gradients + z.optimizer;
        say("  --zero %d %11.6f %11.6f %11.6f %11.6f %11.6f%s", stage, z.weights * 1e-9, z.gradients * 1e-9,
            z.optimizer * 1e-9, total * 1e-9, total / 0x1p30, stage == c->zero ? "  <- this run" : "");
    }
}

// What is sent, in words: a line for the gradients, one for the weights.
static void say_sent(const Model *m, Sent sent) {
    const Config *c = &m->config;
    static const char *const how[] = {"all-reduced once", "reduce-scattered once",
                                      "reduce-scattered after each micro-batch",
                                      "reduce-scattered after each micro-batch"};
    char who[48] = "each rank";
    if (c->pp > 1) snprintf(who, sizeof who, "pipeline rank %d", m->pp_rank);
    say("%.6f GB sent by %s a step", sent_in_all(sent) * 1e-9, who);
    if (c->pp > 1)
        say("  %.6f GB to other stages, as %s: %ld message%s a micro-batch, each its rows%s",
            sent.messages * 1e-9, report_type(sizeof(floatX)), messages_sent(m),
            messages_sent(m) == 1 ? "" : "s", c->sp ? "/tp" : "");
    if (sent.tied > 0)
        say("  %.6f GB of the tied embedding's gradient, all-reduced between first and last stage, as %s",
            sent.tied * 1e-9, report_type(report_gradient_size(c)));
    if (c->tp > 1) {
        RowsSent rows = rows_sent(m);
        long alone = blocks_of_experts_alone(m), others = layers_here(c, m->chunk) - alone;
        char blocks[64] = "";
        if (others) snprintf(blocks, sizeof blocks, "%ld · %d%s", others, rows.block, alone ? " + " : "");
        if (alone)
            snprintf(blocks + strlen(blocks), sizeof blocks - strlen(blocks), "%ld · %d", alone, rows.experts);
        say("  %.6f GB of rows over tp, %s, as %s: a micro-batch sends (tp-1)/tp of them %d times for "
            "the embedding, %s for the blocks, %d for the head",
            sent.rows * 1e-9, c->sp ? "reduce-scattered and all-gathered" : "all-reduced",
            report_type(sizeof(floatX)), rows.embedding, blocks, rows.head);
        if (rows.head) say("  %.6f GB of the loss's maxima and sums over tp, no logits", sent.logits * 1e-9);
        if (sent.partial > 0)
            say("  %.6f GB of gradients of which tp ranks hold parts, as %s", sent.partial * 1e-9,
                report_type(report_gradient_size(c)));
    }
    if (c->ep > 1)
        say("  %.6f GB of tokens' copies over ep, as %s, where routing is even: (ep-1)/ep of %ld a token, %d "
            "times a block; and "
            "%.6f GB of their counts",
            sent.copies * 1e-9, report_type(sizeof(floatX)), c->topk, c->recompute == RECOMPUTE_FULL ? 6 : 4,
            sent.counts * 1e-9);
    if (sent.gates > 0)
        say("  %.6f GB of gates' gradients%s over tp", sent.gates * 1e-9,
            c->sp ? ", and of who chose which expert," : "");
    if (sent.sums > 0) say("  %.6f GB of the balance loss's sums over each sequence", sent.sums * 1e-9);
    if (c->cp > 1)
        say("  %.6f GB of keys and values over cp, forward%s and backward as %s, and of their gradients as "
            "fp32: %ld shift%s each a layer, %zu elements a token (key/value heads alone)",
            sent.ring * 1e-9, c->recompute == RECOMPUTE_FULL ? ", again" : "", report_type(sizeof(floatX)),
            c->cp - 1, c->cp == 2 ? "" : "s", report_keys(c));
    if (c->dp_cp == 1) return;
    say("  %.6f GB of gradients, %s, as %s", sent.gradients * 1e-9, how[c->zero],
        report_type(report_gradient_size(c)));
    if (c->zero == 1 || c->zero == 2)
        say("  %.6f GB of weights, all-gathered after the step, as %s", sent.weights * 1e-9,
            report_type(sizeof(floatX)));
    if (c->zero < 3) return;
    say("  %.6f GB of weights, all-gathered for each forward and each backward, as %s", sent.weights * 1e-9,
        report_type(sizeof(floatX)));
    if (!report_alternates(c)) return;
    Gathers *gathers = report_gathers(m);
    report_not_gathered(m, gathers);
    free(gathers);
}

static void sent_json(cJSON *o, Sent sent) {
    cJSON_AddNumberToObject(o, "sent_per_step", sent_in_all(sent));
    cJSON_AddNumberToObject(o, "sent_over_dp", sent.gradients + sent.weights);
    cJSON_AddNumberToObject(o, "sent_over_cp", sent.ring);
    cJSON_AddNumberToObject(o, "sent_over_tp", sent_over_tp(sent));
    cJSON_AddNumberToObject(o, "sent_over_pp", sent_over_pp(sent));
    cJSON_AddNumberToObject(o, "sent_over_ep", sent_over_ep(sent));
    cJSON_AddNumberToObject(o, "sent_over_sequence", sent.sums);
}

// Attention's work on each rank of cp: in this run's order, and beside it in the other one.
static void attention_json(cJSON *o, const Config *c) {
    cJSON *attention = cJSON_AddObjectToObject(o, "attention");
    for (int order = ORDER_ZIGZAG; order <= ORDER_CONTIGUOUS; order++) {
        cJSON *of = cJSON_AddObjectToObject(attention, flag_choice(CP_ORDERS, order));
        cJSON *pairs = cJSON_AddArrayToObject(of, "pairs");
        for (long r = 0; r < c->cp; r++)
            cJSON_AddItemToArray(pairs, cJSON_CreateNumber(report_pairs(c, order, r)));
        cJSON_AddNumberToObject(of, "most_over_mean", report_imbalance(c, order));
    }
}

static void attention_line(const Config *c, const char *what, CpOrder order) {
    enum { MOST = 8 };
    char text[MOST * 24] = "";
    int n = sprintf(text, "%.0f", report_pairs(c, order, 0));
    if (order == ORDER_ZIGZAG) {
        say("%s%s %s on each of %ld cp ranks", what, flag_choice(CP_ORDERS, order), text, c->cp);
        return;
    }
    for (long r = 1; r < c->cp && r < MOST - 1; r++)
        n += sprintf(text + n, ", %.0f", report_pairs(c, order, r));
    if (c->cp >= MOST)
        sprintf(text + n, "%s%.0f", c->cp == MOST ? ", " : " … ", report_pairs(c, order, c->cp - 1));
    say("%s%s %s by cp rank, the most %.3f times the mean", what, flag_choice(CP_ORDERS, order), text,
        report_imbalance(c, order));
}

static void attention_table(const Config *c) {
    attention_line(c, "attention, pairs of a query and a key of a sequence and head: ", c->cp_order);
    attention_line(c, "  --cp-order ", other_order(c));
}

// All places of a pipeline, and its schedule.
static void pipeline_json(cJSON *o, const Model *m, const Place *place) {
    const Config *c = &m->config;
    cJSON *stages = cJSON_AddArrayToObject(o, "stages");
    for (int r = 0; r < c->pp; r++) {
        double bytes[MEM_CATEGORIES + 1];
        ledger_numbers(&place[r].memory, bytes);
        cJSON *row = cJSON_CreateObject(), *numbers = cJSON_AddArrayToObject(row, "stages");
        for (int k = 0; k < c->virtual_stages; k++)
            cJSON_AddItemToArray(numbers, cJSON_CreateNumber(place[r].chunk[k].stage));
        cJSON_AddNumberToObject(row, "rank", r);
        cJSON_AddNumberToObject(row, "layers", (double)place[r].layers);
        cJSON_AddNumberToObject(row, "params", place[r].parameters);
        sent_json(row, place[r].sent);
        cJSON_AddItemToObject(row, "memory", memory_json(bytes));
        cJSON_AddItemToArray(stages, row);
    }
    cJSON_AddNumberToObject(o, "pp_rank", m->pp_rank); // of whom the rest is
    cJSON_AddItemToObject(o, "schedule", report_schedule_json(m->plan));
}

static void dry_run_json(const Model *m, const Place *place) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    ClassicActivations a = classic_activations(m);
    double bytes[MEM_CATEGORIES + 1], P = (double)m->parameters;
    ledger_numbers(&place[m->pp_rank].memory, bytes);
    cJSON *o = cJSON_CreateObject(), *classic = cJSON_AddObjectToObject(o, "classic_activations");
    cJSON_AddNumberToObject(o, "world", (double)report_world(c));
    cJSON_AddNumberToObject(o, "pp", (double)c->pp);
    cJSON_AddNumberToObject(o, "dp", (double)c->dp);
    cJSON_AddNumberToObject(o, "cp", (double)c->cp);
    cJSON_AddStringToObject(o, "cp_order", flag_choice(CP_ORDERS, c->cp_order));
    cJSON_AddNumberToObject(o, "local_seq", (double)c->local_seq);
    cJSON_AddNumberToObject(o, "tp", (double)c->tp);
    cJSON_AddBoolToObject(o, "sp", c->sp);
    cJSON_AddNumberToObject(o, "zero", (double)c->zero);
    cJSON_AddNumberToObject(o, "ep", (double)c->ep);
    cJSON_AddNumberToObject(o, "params", P);
    cJSON_AddNumberToObject(o, "active_params", active_parameters(m));
    cJSON_AddNumberToObject(o, "accum", (double)c->accum);
    cJSON_AddNumberToObject(o, "tokens_per_step", (double)c->global_batch * (double)c->seq);
    cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
    cJSON_AddNumberToObject(o, "checkpoint_bytes", 12 * P);
    sent_json(o, place[m->pp_rank].sent);
    cJSON_AddNumberToObject(classic, "flash", a.flash);
    cJSON_AddNumberToObject(classic, "matrix", a.matrix);
    cJSON_AddNumberToObject(classic, "selective", a.selective);
    cJSON_AddNumberToObject(classic, "full", a.full);
    cJSON_AddNumberToObject(o, "classic_state", classic_state(m)); // beside them
    cJSON_AddItemToObject(o, "memory", memory_json(bytes));
    cJSON_AddItemToObject(o, "zero_table", zero_table_json(m));
    if (c->cp > 1) attention_json(o, c);
    if (c->pp > 1) pipeline_json(o, m, place);
    char *text = cJSON_Print(o);
    say("%s", text);
    cJSON_free(text);
    cJSON_Delete(o);
}

// ", 1.2 M of them active".
static const char *active_text(const Model *m) {
    static char text[48];
    if (m->inactive) snprintf(text, sizeof text, ", %.2f M of them active", active_parameters(m) * 1e-6);
    return text;
}

static void pipeline_table(const Model *m, const Place *place) {
    const Config *c = &m->config;
    say("\npipeline   layers     parameters   GB in all  activations  in flight   GB sent   holds");
    for (int r = 0; r < c->pp; r++)
        say("  rank %-3d %7ld %14.0f %11.6f %12.6f %10d %9.6f   %s", r, place[r].layers, place[r].parameters,
            (double)place[r].memory.total_peak * 1e-9, (double)place[r].memory.peak[MEM_ACTIVATIONS] * 1e-9,
            m->plan->rank[r].slots, sent_in_all(place[r].sent) * 1e-9, report_units(c, place[r].chunk));
    say("(in flight: micro-batches whose activations are kept%s; sent: in a step, the mean over its ranks)",
        c->virtual_stages > 1 ? ", of one chunk each" : "");
    say("\nof pipeline rank %d, which needs the most memory:", m->pp_rank);
}

static void classic_table(const Model *m) {
    const Config *c = &m->config;
    ClassicActivations a = classic_activations(m);
    double GB = 1e-9, GiB = 1 / 0x1p30, state = classic_state(m);
    char tokens[64] = "";
    static const char *const formula[] = {"34 + 5as/h", "10 + 24/t + 5as/ht", "(34 + 5as/h)/t"};
    say("\nclassic estimate of activations, 2-byte values with dropout, s·b·h·L times            GB       GiB");
    if (c->cp > 1) snprintf(tokens, sizeof tokens, ", s = %ld here, the s in 5as/h %ld", c->local_seq, c->seq);
    say("  %s, t = %ld%s", formula[c->tp == 1 ? 0 : c->sp ? 2 : 1], c->tp, tokens);
    if (c->pp > 1)
        say("  L: %ld layers%s, %ld times in flight", m->blocks, c->virtual_stages > 1 ? " of a chunk" : "",
            chunks_in_flight(m));
    say("  no recomputation, flash attention (no 5as/h)  %36.2f %9.4f", a.flash * GB, a.flash * GiB);
    say("  no recomputation, the T×T matrix kept         %36.2f %9.4f", a.matrix * GB, a.matrix * GiB);
    say("  selective                                     %36.2f %9.4f", a.selective * GB, a.selective * GiB);
    say("  full                                          %36.2f %9.4f", a.full * GB, a.full * GiB);
    say("  16 bytes a parameter here + activations with flash %31.2f %9.4f", (state + a.flash) * GB,
        (state + a.flash) * GiB);
    say("  (with full recomputation instead: %.2f GB, %.4f GiB)", (state + a.full) * GB,
        (state + a.full) * GiB);
}

void report_dry_run(const Model *m, const Place *place) {
    const Config *c = &m->config;
    double P = (double)m->parameters, GB = 1e-9;
    TokenFlops f = token_flops(m);
    char here[32] = "";
    if (c->json) {
        dry_run_json(m, place);
        return;
    }
    if (c->cp > 1) snprintf(here, sizeof here, " (%ld of each here)", c->local_seq);
    say("%s: %zu parameters (%.1f M%s); 16 bytes each: %.1f GB; checkpoint, 12 bytes each: %.1f GB",
        flag_choice(ARCHS, c->arch), m->parameters, P * 1e-6, active_text(m), 16 * P * GB, 12 * P * GB);
    say("%ld rank%s = %s, %ld sequences of %ld tokens%s a micro-batch, accumulation %ld: %.0f tokens a step",
        report_world(c), report_world(c) == 1 ? "" : "s", report_grid(c), c->micro_batch, c->seq, here,
        c->accum, (double)c->global_batch * (double)c->seq);
    say("%.3g GFLOP a token (PaLM: 6 a parameter %.3g, attention %.3g), recomputed beside it %.3g",
        1e-9 * (f.weights + f.attention), 1e-9 * f.weights, 1e-9 * f.attention, 1e-9 * f.recomputed);
    if (c->cp > 1) attention_table(c);
    if (c->pp > 1) report_schedule(m->plan);
    if (c->pp > 1) pipeline_table(m, place);
    say_sent(m, place[m->pp_rank].sent);
    report_memory(&place[m->pp_rank].memory, NULL);
    zero_table(m);
    classic_table(m);
}

// ---- a run -----------------------------------------------------------------------------------------------------------

void report_start(const Model *m, const Ledger *predicted, int threads, double peak_flops) {
    const Config *c = &m->config;
    TokenFlops f = token_flops(m);
    double bytes[MEM_CATEGORIES + 1];
    ledger_numbers(predicted, bytes);
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "start");
    cJSON_AddNumberToObject(o, "world", m->grid.world->size);
    cJSON_AddNumberToObject(o, "hosts", comm_host().hosts);
    cJSON_AddNumberToObject(o, "dp", (double)m->grid.dp->size / m->grid.cp->size);
    cJSON_AddNumberToObject(o, "cp", m->grid.cp->size);
    cJSON_AddStringToObject(o, "cp_order", flag_choice(CP_ORDERS, c->cp_order));
    cJSON_AddNumberToObject(o, "tp", m->grid.tp->size);
    cJSON_AddBoolToObject(o, "sp", c->sp);
    cJSON_AddNumberToObject(o, "pp", m->grid.pp->size);
    cJSON_AddNumberToObject(o, "virtual_stages", (double)c->virtual_stages);
    cJSON_AddStringToObject(o, "schedule", flag_choice(SCHEDULES, c->schedule));
    cJSON_AddNumberToObject(o, "ep", m->grid.ep->size);
    cJSON_AddNumberToObject(o, "zero", (double)c->zero);
    cJSON_AddNumberToObject(o, "threads", threads); // of rank 0, and the cores that they may run on
    cJSON_AddNumberToObject(o, "cores", omp_get_num_procs());
    cJSON_AddNumberToObject(o, "params", (double)m->parameters);
    cJSON_AddNumberToObject(o, "active_params", active_parameters(m));
    cJSON_AddNumberToObject(o, "tokens_per_step", (double)c->global_batch * (double)c->seq);
    cJSON_AddNumberToObject(o, "flops_per_token", f.weights + f.attention);
    cJSON_AddNumberToObject(o, "peak_flops", peak_flops);
    cJSON_AddItemToObject(o, "predicted", memory_json(bytes));
    log_event(o);
    char hosts[32] = "";
    if (comm_host().hosts > 1) snprintf(hosts, sizeof hosts, "%d hosts, ", comm_host().hosts);
    char grid[192] = "", order[32] = "", schedule[32] = "";
    if (c->cp > 1) snprintf(order, sizeof order, ", %s", flag_choice(CP_ORDERS, c->cp_order));
    if (c->pp > 1) snprintf(schedule, sizeof schedule, ", %s", flag_choice(SCHEDULES, c->schedule));
    if (c->tp * c->cp * c->pp * c->ep > 1)
        snprintf(grid, sizeof grid, " (%s%s%s%s)", report_grid(c), c->sp ? ", --sp" : "", order, schedule);
    say("%s, %s, %.2f M parameters%s, vocabulary %ld; %d rank%s%s of %d thread%s on %s%s; %.0f tokens a step, "
        "%.2f "
        "MFLOP each",
        flag_choice(ARCHS, c->arch), sizeof(floatX) == 2 ? "bf16" : "fp32", (double)m->parameters * 1e-6,
        active_text(m), c->vocab, m->grid.world->size, m->grid.world->size == 1 ? "" : "s", grid, threads,
        threads == 1 ? "" : "s", hosts, device_name(), (double)c->global_batch * (double)c->seq,
        1e-6 * (f.weights + f.attention));
}

// What routers did: "load" is the fullest expert of the worst block, over the mean.
static cJSON *router_json(const Model *m) {
    const Config *c = &m->config;
    const RouterStep *r = m->experts.step;
    cJSON *o = cJSON_CreateObject(), *share = cJSON_AddArrayToObject(o, "share");
    char hash[20];
    for (long l = 0; l < c->layers; l++) {
        const double *tokens = r->tokens + l * c->experts;
        cJSON *row = cJSON_CreateArray();
        double all = 0;
        for (long e = 0; e < c->experts; e++) all += tokens[e];
        for (long e = 0; e < c->experts; e++) cJSON_AddItemToArray(row, cJSON_CreateNumber(tokens[e] / all));
        if (has_experts(c, l))
            cJSON_AddItemToArray(share, row);
        else
            cJSON_Delete(row);
    }
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)r->hash);
    cJSON_AddNumberToObject(o, "load", r->load);
    if (c->balance == BALANCE_AUX) cJSON_AddNumberToObject(o, "balance_loss", r->balance_loss);
    cJSON_AddNumberToObject(o, "sent", r->sent);
    cJSON_AddNumberToObject(o, "sent_groups", r->sent_groups);
    cJSON_AddNumberToObject(o, "groups", r->groups);
    cJSON_AddNumberToObject(o, "most_groups", r->most_groups);
    cJSON_AddNumberToObject(o, "margin", isinf(r->margin) ? NAN : r->margin); // NaN: null
    cJSON_AddStringToObject(o, "hash", hash);
    return o;
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
    if (expert_blocks(c)) cJSON_AddItemToObject(o, "router", router_json(m));
    log_event(o);
    char load[32] = "", share[32] = ""; // of a GPU whose peak is not known
    if (expert_blocks(c)) snprintf(load, sizeof load, "load %.2f  ", m->experts.step->load);
    if (!isnan(mfu)) snprintf(share, sizeof share, "MFU %.0f %%  ", 100 * mfu);
    status_line(r.step == c->steps,
                "step %ld/%ld  loss %.4f  norm %.2f  %slr %.1e  %.1f ms  %.0f tok/s  %s%.2f GB  %ld:%02ld left",
                r.step, c->steps, r.loss, r.grad_norm, load, r.lr, 1e3 * r.seconds, tokens_per_s, share,
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

// What this rank has sent in a group, by operation. Exposed is the time in which it has only waited.
typedef struct {
    const Comm *comm;
    CommCount count[COMM_OPS];
} Counted;
enum { MOST_GROUPS = 16 };

// The groups that all ranks have, in the same order; what goes through channels, which differ from rank to rank, is counted in
// the groups that these were made from. Returns how many.
static int count_messages(Counted *group) {
    static Comm *comm[COMM_MOST];
    int n_comms = comm_list(comm, COMM_MOST), n = 0;
    for (int i = 0; i < n_comms; i++) {
        Counted *of = group;
        while (of < group + n && of->comm != comm[i]->parent) of++;
        if (of == group + n && n == MOST_GROUPS) continue;
        if (of == group + n) group[n++].comm = comm[i];
        for (int op = 0; op < COMM_OPS; op++) {
            of->count[op].calls += comm[i]->count[op].calls;
            of->count[op].bytes += comm[i]->count[op].bytes;
            of->count[op].exposed_ms += comm[i]->count[op].exposed_ms;
        }
    }
    return n;
}

static void report_messages(const Counted *group, int n) {
    say("\nmessages of a rank                calls            GB   exposed s");
    for (int i = 0; i < n * COMM_OPS; i++) {
        CommCount count = group[i / COMM_OPS].count[i % COMM_OPS];
        if (count.calls && group[i / COMM_OPS].comm->size > 1)
            say("  %-8s %-16s %12llu %13.6f %11.3f", group[i / COMM_OPS].comm->name, comm_op_name[i % COMM_OPS],
                (unsigned long long)count.calls, (double)count.bytes * 1e-9, count.exposed_ms * 1e-3);
    }
}

// A rank's numbers, as they are gathered: memory held, live and predicted, then attention's pairs, copies of tokens that went to
// other ranks' experts and came from them, and the counters of each group and operation.
enum {
    LIVE = MEM_CATEGORIES + 1,
    PREDICTED = 2 * LIVE,
    PAIRS = 3 * LIVE,
    COPIES_SENT,
    COPIES_RECEIVED,
    COUNTS,
    NUMBERS = COUNTS + MOST_GROUPS * COMM_OPS * 3
};

// The ranks of a pipeline hold different things: of each place in it, who holds the most.
static void report_places(const Config *c, const double *all) {
    long ranks = c->dp_cp * c->tp;
    for (long place = 0; place < c->pp; place++) {
        const double *most = all + place * ranks * NUMBERS;
        for (long r = 1; r < ranks; r++) {
            const double *x = all + (place * ranks + r) * NUMBERS;
            if (x[MEM_CATEGORIES] > most[MEM_CATEGORIES]) most = x;
        }
        say("  total, pipeline %-5ld %11.6f%11.6f", place, most[PREDICTED + MEM_CATEGORIES] * 1e-9,
            most[MEM_CATEGORIES] * 1e-9);
    }
}

// Of attention's work in a cp group, the most that a rank of it has counted over the mean; of all groups, the largest.
static double counted_imbalance(const Config *c, const double *all) {
    double largest = 0;
    for (long i = 0; i < report_world(c) / c->cp; i++) { // groups, by the rank that is first in them
        const double *x = all + (i / c->tp * c->cp * c->tp + i % c->tp) * NUMBERS + PAIRS;
        double most = 0, sum = 0;
        for (long r = 0; r < c->cp; r++) {
            double pairs = x[r * c->tp * NUMBERS];
            most = fmax(most, pairs), sum += pairs;
        }
        if (sum > 0) largest = fmax(largest, most * (double)c->cp / sum);
    }
    return largest;
}

static void report_attention(const Config *c, const double *all) {
    double least = INFINITY, most = 0;
    for (long r = 0; r < report_world(c); r++) {
        double pairs = all[r * NUMBERS + PAIRS];
        least = fmin(least, pairs), most = fmax(most, pairs);
    }
    char range[64];
    int n = sprintf(range, "%.0f", least);
    if (most > least) sprintf(range + n, " to %.0f", most);
    say("\nattention: a rank computed %s pairs of a query and a key of one head, in both passes of all steps; "
        "the "
        "most in a cp group: %.3f times the mean (%s: %.3f)",
        range, counted_imbalance(c, all), flag_choice(CP_ORDERS, other_order(c)),
        report_imbalance(c, other_order(c)));
}

// The last event: memory, work and messages of every rank, gathered to all.
void report_end(const Model *m, const Ledger *predicted, double loss, double peak_before, double peak_after) {
    const Config *c = &m->config;
    Counted group[MOST_GROUPS] = {{0}};
    Comm *world = m->grid.world;
    int n_groups = count_messages(group), size = world->size;
    double *all = host_alloc((size_t)size * NUMBERS, sizeof(double)),
           *mine = all + (size_t)world->rank * NUMBERS;
    ledger_numbers(&ledger, mine);
    live_numbers(&ledger, mine + LIVE);
    ledger_numbers(predicted, mine + PREDICTED);
    mine[PAIRS] = m->ring.pairs;
    mine[COPIES_SENT] = (double)m->experts.all_sent, mine[COPIES_RECEIVED] = (double)m->experts.all_received;
    for (int i = 0; i < n_groups * COMM_OPS; i++) {
        CommCount count = group[i / COMM_OPS].count[i % COMM_OPS];
        double *x = mine + COUNTS + 3 * i;
        x[0] = (double)count.calls, x[1] = (double)count.bytes, x[2] = count.exposed_ms;
    }
    comm_wait(comm_host_all_gather(world, all, mine, (size_t)size * NUMBERS, DTYPE_F64));

    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "event", "end");
    cJSON *memory = cJSON_AddArrayToObject(o, "memory"), *messages = cJSON_AddArrayToObject(o, "comm");
    cJSON *attention = c->cp > 1 ? cJSON_AddArrayToObject(o, "attention") : NULL;
    cJSON *experts = expert_blocks(c) ? cJSON_AddArrayToObject(o, "experts") : NULL;
    for (int r = 0; r < size; r++) {
        const double *x = all + (size_t)r * NUMBERS;
        cJSON *row = memory_json(x);
        cJSON_AddNumberToObject(row, "rank", r);
        cJSON_AddItemToObject(row, "live", memory_json(x + LIVE));
        cJSON_AddItemToObject(row, "predicted", memory_json(x + PREDICTED));
        cJSON_AddItemToArray(memory, row);
        if (attention) {
            row = cJSON_CreateObject();
            cJSON_AddNumberToObject(row, "rank", r);
            cJSON_AddNumberToObject(row, "pairs", x[PAIRS]);
            cJSON_AddItemToArray(attention, row);
        }
        if (experts) {
            row = cJSON_CreateObject();
            cJSON_AddNumberToObject(row, "rank", r);
            cJSON_AddNumberToObject(row, "sent", x[COPIES_SENT]);
            cJSON_AddNumberToObject(row, "received", x[COPIES_RECEIVED]);
            cJSON_AddItemToArray(experts, row);
        }
        for (int i = 0; i < n_groups * COMM_OPS; i++) {
            const double *y = x + COUNTS + 3 * i;
            if (y[0] == 0 || group[i / COMM_OPS].comm->size == 1) continue;
            row = cJSON_CreateObject();
            cJSON_AddNumberToObject(row, "rank", r);
            cJSON_AddStringToObject(row, "group", group[i / COMM_OPS].comm->name);
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

    report_memory(predicted, &ledger);
    say("  %-21s %11.6f   by the classic estimate, with 2-byte values", "(activations)",
        classic_activations(m).matrix * 1e-9);
    size_t process = device_process_peak();
    if (process) say("  %-21s %22.6f", "the whole process", (double)process * 1e-9);
    if (c->pp > 1) report_places(c, all);
    if (c->cp > 1) report_attention(c, all);
    free(all);
    if (size > 1) report_messages(group, n_groups);
    if (c->peak_tflops > 0) return;
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

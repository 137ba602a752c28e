// Who holds what, and who says what to whom when: --explain, and the picture of a pipeline's schedule in --dry-run. A reader of
// the training program may skip this file.
#include "report.h"
#include "runtime/log.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- a pipeline's schedule ---------------------------------------------------------------------------------------------

enum { PICTURE_COLUMNS = 104, PICTURE_RANKS = 16 };

// What a rank does when, `unit` columns for each unit of time: 3 is F of micro-batch 3, b3 its B, i3 I, w3 W (the last digit of its
// number), each where its time ends. Or (chunks) of which chunk each is.
static void draw(const RankPlan *rank, char *line, int columns, int unit, bool chunks) {
    static const char letter[] = {[PASS_F] = 0, [PASS_I] = 'i', [PASS_W] = 'w', [PASS_B] = 'b'};
    memset(line, chunks ? ' ' : '.', (size_t)columns);
    line[columns] = 0;
    for (const Action *a = rank->action; a < rank->action + rank->n; a++) {
        long from = lround(a->start) * unit, to = lround(a->end) * unit;
        if (to > columns) break;
        memset(line + from, ' ', (size_t)(to - from));
        line[to - 1] = chunks ? "0123456789abcdef"[a->chunk] : (char)('0' + a->micro % 10);
        if (!chunks && letter[a->pass]) line[to - 2] = letter[a->pass];
    }
}

static void picture(const Plan *plan) {
    const Config *c = plan->config;
    bool split = pp_defers_w(c), chunks = c->virtual_stages > 1;
    int unit = split ? 2 : 1, most = PICTURE_COLUMNS / unit * unit;
    long all = lround(plan->end) * unit, columns = all < most ? all : most;
    char line[PICTURE_COLUMNS + 1], more[48] = "";
    if (all > columns) snprintf(more, sizeof more, " … %ld more", (all - columns) / unit);
    say("\nschedule %s, %ld micro-batches, time in units of %s's F (F = I = W%s)",
        flag_choice(SCHEDULES, c->schedule), plan->micro_batches, chunks ? "a chunk" : "a stage",
        split ? "" : ", B = I + W");
    for (int r = 0; r < c->pp && r < PICTURE_RANKS; r++) {
        draw(&plan->rank[r], line, (int)columns, unit, false);
        say("  rank %-3d %s%s", r, line, more);
        if (!chunks) continue;
        draw(&plan->rank[r], line, (int)columns, unit, true);
        say("    chunk  %s", line);
    }
    if (c->pp > PICTURE_RANKS) say("  … %ld more ranks", c->pp - PICTURE_RANKS);
    say("  (3: F of micro-batch 3%s, %s; a dot: idle%s)", plan->micro_batches > 10 ? " (or 13, 23, …)" : "",
        split ? "i3 its I, w3 its W" : "b3 its B",
        chunks ? "; below, which of the rank's chunks it is of" : "");
}

// What a schedule makes a rank wait and hold: as simulated, or as the formulas of pp_1f1b.c say.
typedef struct {
    double bubble;                  // time that a rank is idle, in units of a chunk's F
    double idle_fraction, overhead; // of all the time, and of the time that the work takes
} Bubble;

static Bubble bubble_of(const Plan *plan, double idle) {
    double work = 3 * (double)plan->micro_batches * (double)plan->config->virtual_stages;
    return (Bubble){idle, idle / (idle + work), idle / work};
}

static Bubble simulated_bubble(const Plan *plan) {
    const RankPlan *first = &plan->rank[0]; // all have as much to do
    double work = 0;
    for (const Action *a = first->action; a < first->action + first->n; a++) work += a->end - a->start;
    return bubble_of(plan, plan->end - work);
}

static Bubble formula_bubble(const Plan *plan) {
    const Config *c = plan->config;
    static const int units[] = {[SCHEDULE_AFAB] = 3,
                                [SCHEDULE_1F1B] = 3,
                                [SCHEDULE_INTERLEAVED] = 3,
                                [SCHEDULE_ZB_H1] = 1,
                                [SCHEDULE_ZBV] = 1};
    return bubble_of(plan, (double)((c->pp - 1) * units[c->schedule]));
}

static const char *const bubble_formula[] = {[SCHEDULE_AFAB] = "(p-1)(F+I+W)",
                                             [SCHEDULE_1F1B] = "(p-1)(F+I+W)",
                                             [SCHEDULE_INTERLEAVED] = "(p-1)(F+I+W)",
                                             [SCHEDULE_ZB_H1] = "(p-1)(F+I-W)",
                                             [SCHEDULE_ZBV] = "(p-1)F"};

// The most chunks' micro-batches whose activations rank r holds, and of these that wait for W (with the one whose I is done now).
static long in_flight(const Plan *plan, int r) {
    return plan->rank[r].slots;
}

static long formula_in_flight(const Plan *plan, int r) {
    const Config *c = plan->config;
    long p = c->pp, v = c->virtual_stages, m = plan->micro_batches, n = m;
    if (c->schedule == SCHEDULE_1F1B) n = p - r;
    if (c->schedule == SCHEDULE_INTERLEAVED) n = 2 * (p - r - 1) + (v - 1) * p + 1;
    if (c->schedule == SCHEDULE_ZB_H1) n = p;
    if (c->schedule == SCHEDULE_ZBV) n = 2 * p;
    return n < m * v ? n : m * v;
}

static long pending_w(const Plan *plan, int r) {
    return pp_defers_w(plan->config) ? plan->rank[r].douts : 0;
}

static long formula_pending_w(const Plan *plan, int r) {
    (void)plan;
    return r + 1; // zb-h1's
}

typedef long OfRank(const Plan *plan, int r);

static void say_ranks(const char *what, const Plan *plan, OfRank *number) {
    char text[PICTURE_RANKS * 12] = "";
    int n = 0;
    for (int r = 0; r < plan->config->pp && r < PICTURE_RANKS; r++)
        n += sprintf(text + n, " %ld", number(plan, r));
    say("  %s%s%s", what, text, plan->config->pp > PICTURE_RANKS ? " …" : "");
}

void report_schedule(const Plan *plan) {
    const Config *c = plan->config;
    Bubble s = simulated_bubble(plan), f = formula_bubble(plan);
    picture(plan);
    say("  bubble of a rank     simulated %5.0f units: idle fraction %5.2f %% of the time, overhead %5.2f %% "
        "of the work",
        s.bubble, 100 * s.idle_fraction, 100 * s.overhead);
    say("    %-18s formula   %5.0f units: idle fraction %5.2f %%, overhead %5.2f %%",
        bubble_formula[c->schedule], f.bubble, 100 * f.idle_fraction, 100 * f.overhead);
    say_ranks("in flight, by rank:  simulated", plan, in_flight);
    say_ranks("                     formula  ", plan, formula_in_flight);
    if (!pp_defers_w(c)) return;
    say_ranks("waiting for W:       simulated", plan, pending_w);
    if (c->schedule == SCHEDULE_ZB_H1) say_ranks("                     formula  ", plan, formula_pending_w);
}

static void bubble_json(cJSON *o, Bubble b) {
    cJSON_AddNumberToObject(o, "bubble", b.bubble);
    cJSON_AddNumberToObject(o, "idle_fraction", b.idle_fraction);
    cJSON_AddNumberToObject(o, "bubble_overhead", b.overhead);
}

static void ranks_json(cJSON *o, const char *name, const Plan *plan, OfRank *number) {
    cJSON *list = cJSON_AddArrayToObject(o, name);
    for (int r = 0; r < plan->config->pp; r++)
        cJSON_AddItemToArray(list, cJSON_CreateNumber((double)number(plan, r)));
}

cJSON *report_schedule_json(const Plan *plan) {
    const Config *c = plan->config;
    cJSON *o = cJSON_CreateObject(), *formula = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "name", flag_choice(SCHEDULES, c->schedule));
    cJSON_AddNumberToObject(o, "virtual_stages", (double)c->virtual_stages);
    cJSON_AddNumberToObject(o, "end", plan->end);
    bubble_json(o, simulated_bubble(plan));
    ranks_json(o, "in_flight", plan, in_flight);
    ranks_json(o, "pending_w", plan, pending_w);
    bubble_json(formula, formula_bubble(plan));
    ranks_json(formula, "in_flight", plan, formula_in_flight);
    if (c->schedule == SCHEDULE_ZB_H1) ranks_json(formula, "pending_w", plan, formula_pending_w);
    cJSON_AddItemToObject(o, "formula", formula);
    return o;
}

// ---- --explain -----------------------------------------------------------------------------------------------------------

// Neighbouring buckets of one size, from bucket `first` on in steps of +1 or −1, as one line of a list.
typedef struct {
    int n;
    char name[80];
} Alike;

static Alike alike(const Model *m, int first, int end, int step) { // end: the first that is not looked at
    const Bucket *b = &m->bucket[first];
    int n = 1;
    while (first + n * step != end && b[n * step].count == b->count && b[n * step].chunk == b->chunk) n++;
    if (n < 3) n = 1; // two lines say it as well
    Alike a = {.n = n};
    if (n == 1) snprintf(a.name, sizeof a.name, "%s", b->name);
    if (n > 1) snprintf(a.name, sizeof a.name, "%s to %s, each", b->name, b[(n - 1) * step].name);
    return a;
}

// One collective on each bucket from `first` to `last`, all of one kind, whose elements have `size` bytes.
static void explain_kind(const Model *m, const char *op, int times, int first, int last, size_t size) {
    int step = first <= last ? 1 : -1, N = m->bucket[first].ranks;
    char factor[16] = "";
    if (times > 1) snprintf(factor, sizeof factor, "%d · ", times);
    for (int i = first; i != last + step && N > 1;) {
        Alike a = alike(m, i, last + step, step);
        say("    %s of %-26s  %s%d piece%s of %zu bytes", op, a.name, factor, N - 1,
            times * (N - 1) == 1 ? "" : "s",
            comm_shard_begin(m->bucket[i].count, N, 1) * size); // rank 0's, the longest
        i += a.n * step;
    }
}

// The same of dense buckets from `first` to `last`, and of all of experts, in the same direction.
static void explain_collectives(const Model *m, const char *op, int times, int first, int last, size_t size) {
    int from = m->n_dense, to = m->n_buckets - 1;
    explain_kind(m, op, times, first, last, size);
    if (from <= to && first <= last) explain_kind(m, op, times, from, to, size);
    if (from <= to && first > last) explain_kind(m, op, times, to, from, size);
}

// Which tokens of its sequences rank r of cp has: "tokens 0-7 and 56-63 of ".
static const char *tokens_of(const Config *c, long r) {
    static char text[96];
    long T = c->local_seq, half = T / 2, second = (2 * c->cp - 1 - r) * half;
    if (c->cp == 1) return "";
    if (c->cp_order == ORDER_CONTIGUOUS)
        sprintf(text, "tokens %ld-%ld of ", r * T, (r + 1) * T - 1);
    else
        sprintf(text, "tokens %ld-%ld and %ld-%ld of ", r * half, (r + 1) * half - 1, second,
                second + half - 1);
    return text;
}

// The ranks of one place in the pipeline, a tp group a line, a dp group a column, and in this cp groups one below the other; and
// what of the data, and of a bucket of the first place, each line holds.
static void explain_place(const Config *c, long place, const Bucket *example) {
    for (long i = 0; i < c->dp_cp; i++) {
        char shard[128] = "", others[32] = "";
        long rank = (place * c->dp_cp + i) * c->tp, d = i / c->cp;
        size_t begin = comm_shard_begin(example->count, (int)c->dp_cp, (int)i);
        size_t end = comm_shard_begin(example->count, (int)c->dp_cp, (int)i + 1);
        if (c->zero > 0 && place == 0 && begin < end)
            snprintf(shard, sizeof shard, "; shard of %s: elements %zu to %zu", example->name, begin, end - 1);
        else if (c->zero > 0 && place == 0)
            snprintf(shard, sizeof shard, "; shard of %s: empty", example->name);
        if (c->tp > 1) snprintf(others, sizeof others, " to %ld", rank + c->tp - 1);
        say("  rank%s %ld%s: in micro-batch j, %ssequences %ld to %ld of each %ld%s", c->tp > 1 ? "s" : "",
            rank, others, tokens_of(c, i % c->cp), d * c->micro_batch, (d + 1) * c->micro_batch - 1,
            c->dp * c->micro_batch, shard);
    }
}

static void explain_grid(const Config *c, const Bucket *example) {
    say("grid: %ld rank%s = %s", report_world(c), report_world(c) == 1 ? "" : "s", report_grid(c));
    if (c->tp > 1)
        say("(a line is a tp group: the same sequences, other slices; ranks below each other, a dp group)");
    if (c->cp > 1)
        say("(ranks below each other in lines 1 to %ld%s are a cp group: the same sequences, other tokens)",
            c->cp, c->dp > 1 ? ", in the next ones, …" : "");
    if (c->pp > 1)
        say("(ranks at the same place below each \"pipeline rank\" are a pp group: the same sequences, other "
            "layers)");
    for (long place = 0; place < c->pp; place++) {
        Chunk chunk[MOST_CHUNKS];
        pp_chunks(c, (int)place, chunk);
        if (c->pp > 1) say("pipeline rank %ld: %s", place, report_units(c, chunk));
        explain_place(c, place, example);
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

// ZeRO-3's, where micro-batches take turns, so that a bucket's weights may be gone in between.
static void explain_gathers(const Model *m, const Gathers *gathers) {
    say("  a bucket ahead of its use; so often a step, in forwards + in backwards");
    for (int i = 0; i < m->n_buckets; i++) {
        int N = m->bucket[i].ranks;
        if (N == 1) continue;
        say("    all-gather of %-26s  (%ld + %ld) · %d piece%s of %zu bytes", m->bucket[i].name,
            gathers[i].forward, gathers[i].backward, N - 1, N == 2 ? "" : "s",
            comm_shard_begin(m->bucket[i].count, N, 1) * sizeof(floatX));
    }
}

static void explain_dp_messages(const Model *m) {
    const Config *c = &m->config;
    size_t gradient = report_gradient_size(c), weight = sizeof(floatX);
    int last = m->n_dense - 1;
    bool alternates = report_alternates(c);
    Gathers *gathers = report_gathers(m);
    char each[64];
    snprintf(each, sizeof each, c->accum == 1 ? "the micro-batch" : "each of %ld micro-batches", c->accum);
    say("\nmessages of a step in a dp group: what each rank sends its neighbour on the ring 0 -> %ld%s -> 0%s",
        c->tp, c->dp_cp > 2 ? " -> …" : "", c->tp > 1 ? ", and so from each tp rank" : "");
    if (c->pp > 1) say("  (of pipeline rank 0's buckets; the other places' groups send theirs)");
    if (c->zero == 3 && !alternates) {
        explain_gathers(m, gathers);
        say("  in the backward of %s, when a bucket is done%s", each, pp_defers_w(c) ? ", with its W" : "");
    } else if (c->zero == 3) {
        say("  in the forward of %s, a bucket ahead of its use", each);
        explain_collectives(m, "all-gather", 1, 0, last, weight);
        say("  in its backward, a gather a bucket ahead of its use, a reduction when a bucket is done");
        int again = last; // all from here down to 1
        while (again > 0 && !gathers[again].backward) again--;
        if (again >= 1) explain_collectives(m, "all-gather", 1, again, 1, weight);
        report_not_gathered(m, gathers);
    } else if (c->zero == 2) {
        say("  in the backward of %s, when a bucket is done", each);
    } else {
        say("  in the backward%s, when a bucket is done", c->accum == 1 ? "" : " of the last micro-batch");
    }
    explain_collectives(m, c->zero ? "reduce-scatter" : "all-reduce", c->zero ? 1 : 2, last, 0, gradient);
    free(gathers);
}

// One line of a micro-batch's messages over tp.
static void explain_rows(const Config *c, const char *why, bool sum) {
    int pieces = (int)c->tp - 1;
    size_t rows = (size_t)c->micro_batch * (size_t)c->local_seq * (size_t)c->hidden;
    say("    %-14s of rows, %-38s  %s%d piece%s of %zu bytes",
        sum ? c->sp ? "reduce-scatter" : "all-reduce" : "all-gather", why, sum && !c->sp ? "2 · " : "", pieces,
        pieces == 1 && (c->sp || !sum) ? "" : "s", comm_shard_begin(rows, (int)c->tp, 1) * sizeof(floatX));
}

// Where W is put off, what it gathers is gathered then, the gradients once more.
static void explain_block_backward(const Config *c) {
    bool split = pp_defers_w(c);
    // Experts have been sent their rows: their W gathers none.
    bool mlp_gathers = c->sp && (c->shared_experts || expert_blocks(c) < c->layers);
    const char *beside = split ? "" : ", beside W";
    char mlp[48], attention[48];
    snprintf(mlp, sizeof mlp, "gradient, out of the MLP%s", beside);
    snprintf(attention, sizeof attention, "gradient, out of attention%s", beside);
    say("  %c of each block", split ? 'I' : 'B');
    if (c->sp) explain_rows(c, "gradient, into the MLP", false);
    if (mlp_gathers && !split) explain_rows(c, "the MLP's input, for W", false);
    explain_rows(c, mlp, true);
    if (c->sp) explain_rows(c, "gradient, into attention", false);
    if (c->sp && !split) explain_rows(c, "attention's input, for W", false);
    explain_rows(c, attention, true);
    if (!c->sp || !split) return;
    say("  W of each block");
    if (mlp_gathers) explain_rows(c, "the MLP's gradient", false);
    if (mlp_gathers) explain_rows(c, "the MLP's input", false);
    explain_rows(c, "attention's gradient", false);
    explain_rows(c, "attention's input", false);
}

static void explain_tp_messages(const Model *m) {
    const Config *c = &m->config;
    size_t N = (size_t)c->micro_batch * (size_t)c->local_seq;
    say("\nmessages in a tp group, each micro-batch, on the ring 0 -> 1%s -> 0; rows are [%zu, %ld] of %s",
        c->tp > 2 ? " -> …" : "", N, c->hidden, report_type(sizeof(floatX)));
    if (c->pp > 1) say("  (a rank's are those of the units that it has)");
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
    explain_block_backward(c);
    if (c->sp) say("  B of the embedding");
    if (c->sp) explain_rows(c, "gradient", false);
}

// Once round, but for the last hop.
static void explain_shifts(const Config *c, const char *what, size_t size) {
    size_t n = (size_t)c->micro_batch * (size_t)c->local_seq * report_keys(c);
    say("    shift of %s, %-44s  %ld piece%s of %zu bytes", report_type(size), what, c->cp - 1,
        c->cp == 2 ? "" : "s", n * size);
}

static void explain_cp_messages(const Model *m) {
    const Config *c = &m->config;
    size_t E = report_keys(c), heads = E / 2 / (size_t)(c->hidden / c->heads);
    say("\nmessages in a cp group, each micro-batch, on the ring 0 -> %ld%s -> 0: [%ld, %zu], of %zu key/value "
        "head%s",
        c->tp, c->cp > 2 ? " -> …" : "", c->micro_batch * c->local_seq, E, heads, heads == 1 ? "" : "s");
    if (c->pp > 1) say("  (a rank's are those of the blocks that it has)");
    say("  F of each block%s", c->recompute == RECOMPUTE_FULL ? ", and again before its backward" : "");
    explain_shifts(c, "keys and values", sizeof(floatX));
    say("  %c of each block", pp_defers_w(c) ? 'I' : 'B');
    explain_shifts(c, "keys and values", sizeof(floatX));
    explain_shifts(c, "their gradients, a step behind, to the owner", sizeof(float));
}

// Bytes of the gradients of which several tp ranks compute parts: those of key/value heads, or all others.
static double partial_bytes(const Model *m, bool kv) {
    double sum = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->here && p->parts > 1 && (p->split == SPLIT_KV_HEADS) == kv)
            sum += (double)p->size * (double)report_gradient_size(&m->config);
    return sum;
}

// What is sent when all gradients are there, and after the step.
static void explain_last_messages(const Model *m) {
    const Config *c = &m->config;
    const char *part = c->zero && c->dp_cp > 1 ? ", of which each dp rank has a shard" : "";
    say("\nand once a step, after the last backward");
    if (partial_bytes(m, false) > 0)
        say("    all-reduce over tp of %.0f bytes of gradients that are sums of its ranks' parts (+)%s",
            partial_bytes(m, false), part);
    if (partial_bytes(m, true) > 0)
        say("    all-reduce over kv, tp ranks that hold the same key/value head (0 to %ld, …), of %.0f bytes "
            "of (+)%s",
            c->tp / c->kv_heads - 1, partial_bytes(m, true), part);
    if (pp_ties(c))
        say("    all-reduce over pipeline ranks 0 and %ld of %.0f bytes of the tied embedding's gradient%s",
            c->pp - 1, (double)m->bucket[0].count * (double)report_gradient_size(c), part);
    say("    all-reduce over all ranks of 16 bytes for the loss, of 8 for the gradient's norm");
    if (expert_blocks(c))
        say("    all-reduce over all ranks of %ld bytes of what routers have chosen",
            (c->layers * (c->experts + 3) + 2) * (long)sizeof(uint64_t));
    if (c->dp_cp == 1 || (c->zero != 1 && c->zero != 2)) return;
    say("  after the optimizer's step, awaited by the next forward");
    explain_collectives(m, "all-gather", 1, 0, m->n_dense - 1, sizeof(floatX));
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

static void explain_pp_messages(const Model *m) {
    enum { MOST = 24 };
    const Config *c = &m->config;
    const char *schedule = flag_choice(SCHEDULES, c->schedule);
    size_t rows = (size_t)c->micro_batch * (size_t)c->local_seq / (size_t)(c->sp ? c->tp : 1);
    size_t items = rows * (size_t)c->hidden;
    long n;
    Message *list = pp_messages(m->plan, m->pp_rank, &n);
    say("\nmessages of a step in a pp group, --schedule %s: each [%zu, %ld] of %s, %zu bytes", schedule, rows,
        c->hidden, report_type(sizeof(floatX)), items * sizeof(floatX));
    say("  F hands on the residual stream to the next stage, %s its gradient to the one before",
        pp_defers_w(c) ? "I" : "B");
    say("  those of pipeline rank %d, %ld in all, in the order in which both sides start them", m->pp_rank, n);
    for (const Message *x = list; x < list + n && x < list + MOST; x++) {
        int from = pp_rank_of(c, x->from), to = pp_rank_of(c, x->to);
        char name = x->pass == PASS_F ? 'F' : pp_defers_w(c) ? 'I' : 'B';
        say("    %s pipeline rank %d: of %c, micro-batch %d, stage %d to stage %d",
            from == m->pp_rank ? "to  " : "from", from == m->pp_rank ? to : from, name, x->micro, x->from,
            x->to);
    }
    if (n > MOST) say("    … %ld more", n - MOST);
    free(list);
}

// The parameters of bucket i. All blocks are alike, but that some have experts, and so are all experts: those of the first are
// named.
static void explain_bucket(const Model *m, int i) {
    static const char *const split[] = {"whole", "rows", "columns", "rows by heads", "rows by key/value heads"};
    const Config *c = &m->config;
    const Param *first = m->param + m->bucket[i].first_param, *end = first + m->bucket[i].n_params;
    for (const Param *p = first; p < end; p++) {
        bool here = p->here && p->bucket == i, block = p->unit > 0 && p->unit <= c->layers;
        bool shown = p->unit == 1 || (m->n_dense < m->n_buckets && p->unit == m->bucket[m->n_dense].first_unit);
        if (!here || (block && !shown) || p->expert > first->expert) continue;
        char slices[256] = "";
        if (c->tp > 1) explain_slices(c, p, slices, sizeof slices);
        say("    %-32s %8zu × %-8zu %s%s%s", p->name, p->rows, p->cols, split[p->split], slices,
            p->parts > 1 ? " +" : "");
    }
}

// Who sends tokens to whose experts, and what else routers have to say.
static void explain_expert_messages(const Model *m) {
    const Config *c = &m->config;
    char I = pp_defers_w(c) ? 'I' : 'B';
    size_t copies = (size_t)c->micro_batch * (size_t)c->local_seq * (size_t)c->topk;
    size_t bytes = copies * (size_t)c->hidden * sizeof(floatX),
           sums = 2 * (size_t)c->micro_batch * (size_t)c->experts;
    say("\nmessages of each block with experts and micro-batch");
    if (c->ep > 1) {
        say("  in an ep group, ranks 0, %ld%s, each to each; rank 0 has experts 0 to %ld", c->cp * c->tp,
            c->ep > 2 ? ", …" : "", c->experts / c->ep - 1);
        say("    F: all-gather of %ld counts; copies of tokens to experts, and their outputs home%s",
            c->experts,
            c->recompute == RECOMPUTE_FULL ? "; these two again before the backward, by the same route" : "");
        say("    %c: gradients of outputs to experts, and of inputs home", I);
        say("    but the counts, each an all-to-all of a rank's [%zu, %ld] of %s: %zu bytes to each other one, "
            "where routing is "
            "even",
            copies, c->hidden, report_type(sizeof(floatX)), bytes / (size_t)c->ep);
    }
    if (c->tp > 1 && c->sp)
        say("  in a tp group, F: all-gather of the experts chosen, and of the gates, %zu bytes each",
            copies * sizeof(float));
    if (c->tp > 1)
        say("  in a tp group, %c: all-reduce of the gates' gradients, %zu bytes", I, copies * sizeof(float));
    if (c->balance == BALANCE_AUX && c->cp * (c->sp ? c->tp : 1) > 1)
        say("  among the ranks that share a sequence, F: all-reduce of the balance loss's sums, %zu bytes",
            sums * sizeof(float));
}

// The grid, who holds what, and the messages of a step.
void report_explain(const Model *m) {
    const Config *c = &m->config;
    int last = m->n_dense - 1, blocks_end = m->bucket[last].last_unit > c->layers ? last : last + 1;
    char whose[32] = "";
    if (c->pp > 1) snprintf(whose, sizeof whose, " of pipeline rank %d", m->pp_rank);
    explain_grid(c, &m->bucket[1]);
    say("\nbuckets and parameters%s (the last column: how tensor parallelism %s)", whose,
        c->tp > 1 ? "cuts it, by tp rank; +: gradients are sums of the ranks' parts" : "would cut it");
    for (int i = 0; i < m->n_buckets;) {
        int end = i >= m->n_dense ? m->n_buckets : i <= 1 || i == blocks_end ? i + 1 : blocks_end;
        Alike a = alike(m, i, end, 1);
        say("  %s: %zu elements%s", a.name, m->bucket[i].count, i == m->n_dense ? ", each expert's:" : "");
        explain_bucket(m, i);
        i += a.n;
    }
    if (c->pp > 1) explain_pp_messages(m);
    if (c->cp > 1) explain_cp_messages(m);
    if (expert_blocks(c) && c->ep * c->cp * c->tp > 1) explain_expert_messages(m);
    if (c->tp > 1) explain_tp_messages(m);
    if (c->dp_cp > 1) explain_dp_messages(m);
    if (report_world(c) > 1)
        explain_last_messages(m);
    else
        say("\nno messages: one rank");
}

// Pipeline parallelism: each rank holds some of the layers, a *stage* of the model, and micro-batches pass from one to the next.
//
// A stage waits for the one before it in a forward (F), and for the one behind it in a backward: I, the gradient of its input, is
// what that hands on; W, the gradient of weights, concerns nobody else; B is I and W. So ranks stand idle while a step's
// pipeline fills and drains: the *bubble*. A schedule says in which order each rank does what, so as to make the bubble small, or
// the memory. 4 ranks, 4 micro-batches; a digit is F of that one, b and the digit B, which takes twice as long:
//
//     afab (GPipe): all F, then all B         1f1b: as few micro-batches in flight as keep the ranks busy
//
//     0   0123         b0b1b2b3               0   0123      b0 b1 b2 b3
//     1    0123      b0b1b2b3                 1    012    b03b1 b2 b3
//     2     0123   b0b1b2b3                   2     01  b02b13b2 b3
//     3      0123b0b1b2b3                     3      0b01b12b23b3
//
// With p ranks, m micro-batches and v stages a rank, each of which takes f, i and w for its F, I and W of one micro-batch:
//
//                    bubble               in flight on rank r: micro-batches, each of one stage
//     afab           (p−1)(f+i+w)         m
//     1f1b           (p−1)(f+i+w)         min(p−r, m)
//     interleaved    (p−1)(f+i+w)         min(2(p−r−1) + (v−1)p + 1, mv)
//     zb-h1          (p−1)(f+i−w)         p; r+1 of them wait for their W alone     (where W is the shortest of the three)
//     zbv            (p−1)f               2p; 2r+1 of them wait for their W alone   (where all three take as long)
//
//     interleaved    Rank r has the stages r, r+p, r+2p …, v times as short each: so are f, i and w, the bubble with them, and
//                    what one micro-batch of one stage keeps. A micro-batch is at the last rank after p short stages, not long ones.
//     zb-h1          1f1b with I in B's place, for the stage before waits for I alone. Rank r puts W off by r micro-batches, and
//                    does these where it would only wait, at the end. So all ranks keep p micro-batches, as 1f1b's first does.
//     zbv            Rank r has the stages r and 2p−1−r, half as long: a V whose both ends are rank 0's, so that the way back
//                    begins on the rank where the way there ends.
//
// Messages: [R, C], the residual stream or its gradient, one each a micro-batch for each pair of neighbouring stages on two ranks.
// There are p−1 such pairs; of interleaved vp−1, of zbv 2(p−1).
//
// A schedule is data (pp_1f1b.h): a list of actions for each rank. pp_plan writes the lists, then plays them through with given
// times: what begins when, how much is in flight. From that follow memory, the picture of --dry-run, and the order of messages.
// run_plan (train_gpt2.cu) does what the list says.
//
// Messages go through channels, one for each pair of neighbouring stages and direction, so that none can be taken for another.
// Every rank plays the same plan; so two ranks know one order for all messages between them, over all channels, and both start
// each in that order: else one might wait for what the other starts later (NCCL's rule). A receive is posted as soon as it has a
// buffer, long before it is needed. A channel has as many buffers at the receiver as messages wait there in the played plan, so
// that none has to wait at the sender; there it has two, one to be written while the other leaves.
//
// A tied embedding is needed at both ends. Where these are two ranks, each holds its bucket (with wpe, so that both cut the same
// shards), and once a step they sum up what they have of its gradient.
//
// Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021, "Efficient Large-Scale Language Model Training on GPU
// Clusters" (1F1B, interleaved); Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (zb-h1) and "Pipeline Parallelism with
// Controllable Memory" (zbv).
#include "train.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- who holds what ----------------------------------------------------------------------------------------------------

static int stages(const Config *c) {
    return (int)(c->pp * c->virtual_stages);
}

static int stage_of(const Config *c, int rank, int chunk) {
    int p = (int)c->pp;
    if (c->schedule == SCHEDULE_ZBV) return chunk == 0 ? rank : 2 * p - 1 - rank;
    return chunk * p + rank;
}

int pp_rank_of(const Config *c, int stage) {
    int p = (int)c->pp;
    return c->schedule == SCHEDULE_ZBV && stage >= p ? 2 * p - 1 - stage : stage % p;
}

static int chunk_of(const Config *c, int stage) {
    return stage / (int)c->pp;
}

// The blocks as evenly as can be, the longer stages first; with the first the embedding, with the last the head.
void pp_chunks(const Config *c, int r, Chunk *chunk) {
    int n = stages(c);
    size_t L = (size_t)c->layers;
    for (int k = 0; k < c->virtual_stages; k++) {
        int s = stage_of(c, r, k);
        long first = (long)comm_shard_begin(L, n, s), end = (long)comm_shard_begin(L, n, s + 1);
        chunk[k] = (Chunk){.stage = s,
                           .first_unit = s == 0 ? 0 : (int)first + 1,
                           .last_unit = (int)end + (s == n - 1),
                           .first_block = first,
                           .blocks = end - first};
    }
}

// ---- schedules ---------------------------------------------------------------------------------------------------------

bool pp_defers_w(const Config *c) {
    return c->schedule == SCHEDULE_ZB_H1 || c->schedule == SCHEDULE_ZBV;
}

bool pp_accepts(const Config *c, long m) {
    long p = c->pp;
    switch ((Schedule)c->schedule) {
    case SCHEDULE_INTERLEAVED:
        return m % p == 0;
    case SCHEDULE_ZB_H1:
        return m >= p;
    case SCHEDULE_ZBV:
        return m >= 2 * p - 1;
    default:
        return true;
    }
}

// A rank's list while it is written. Every chunk takes micro-batches in their order, in every pass.
typedef struct {
    RankPlan *plan;
    int next[PASS_B + 1][MOST_CHUNKS];
} Writer;

static void put(Writer *w, Pass pass, int chunk) {
    w->plan->action[w->plan->n++] = (Action){.pass = pass, .chunk = chunk, .micro = w->next[pass][chunk]++};
}

static void put_n(Writer *w, long times, Pass pass, int chunk) {
    for (long i = 0; i < times; i++) put(w, pass, chunk);
}

static long smaller(long a, long b) {
    return a < b ? a : b;
}

static void write_afab(Writer *w, long m) {
    put_n(w, m, PASS_F, 0);
    put_n(w, m, PASS_B, 0);
}

// As many F as fill the ranks behind this one; then one for each B. Of zb-h1, I stands for B, and W follows r micro-batches later:
// rank r has r of them to fill its end with.
static void write_1f1b(Writer *w, long m, long p, long r, bool defers_w) {
    long ahead = smaller(p - 1 - r, m);
    put_n(w, ahead, PASS_F, 0);
    for (long j = 0; j < m; j++) {
        if (ahead + j < m) put(w, PASS_F, 0);
        put(w, defers_w ? PASS_I : PASS_B, 0);
        if (defers_w && j >= r) put(w, PASS_W, 0);
    }
    if (defers_w) put_n(w, smaller(r, m), PASS_W, 0);
}

// p micro-batches at a time go through the first chunk of all ranks, then through the second, … The k-th F is of chunk
// k/p mod v, the k-th B of that from behind. Ahead of the first B go the F of the chunks before the last one, p each, and two for
// each rank behind this one: on its way there and back.
static void write_interleaved(Writer *w, long m, long p, long v, long r) {
    long all = m * v, ahead = smaller(2 * (p - r - 1) + (v - 1) * p, all);
    for (long k = 0; k < all + ahead; k++) {
        if (k < all) put(w, PASS_F, (int)(k / p % v));
        if (k >= ahead) put(w, PASS_B, (int)(v - 1 - (k - ahead) / p % v));
    }
}

static void put_i_and_w(Writer *w, int chunk) {
    put(w, PASS_I, chunk);
    put(w, PASS_W, chunk);
}

static void write_zbv(Writer *w, long m, long p, long r) {
    // F on the way down the V, until the first micro-batch comes back up; then of both, until it is at the head, on rank 0.
    put_n(w, 2 * p - 2 * r - 1, PASS_F, 0);
    for (long k = 0; k < r; k++) put(w, PASS_F, 1), put(w, PASS_F, 0);
    // Gradients begin with the upper chunk, and are at the lower one after p − r of them.
    for (long k = 0; k < p - r; k++) put(w, PASS_F, 1), put_i_and_w(w, 1);
    // Full: all passes of both chunks, by turns.
    while (w->next[PASS_F][1] < m) {
        if (w->next[PASS_F][0] < m) put(w, PASS_F, 0);
        put_i_and_w(w, 0);
        put(w, PASS_F, 1);
        put_i_and_w(w, 1);
    }
    // No F is left. I first, for others wait for it; what is left of W comes where they would be waited for.
    for (long k = 0; k < r; k++) put(w, PASS_I, 0), put(w, PASS_I, 1);
    for (long k = 0; k < p - r; k++) put_i_and_w(w, 0);
    put_n(w, m - w->next[PASS_W][1], PASS_W, 1);
    put_n(w, m - w->next[PASS_W][0], PASS_W, 0);
}

// F alone: the same orders without the way back.
static void write_forward(Writer *w, const Config *c, long m, long r) {
    long p = c->pp;
    if (c->schedule == SCHEDULE_ZBV) {
        long ahead = smaller(2 * p - 2 * r - 1, m);
        put_n(w, ahead, PASS_F, 0);
        for (long j = 0; j < m; j++) {
            put(w, PASS_F, 1);
            if (ahead + j < m) put(w, PASS_F, 0);
        }
        return;
    }
    for (long j = 0; j < m; j += p)
        for (int k = 0; k < c->virtual_stages; k++) put_n(w, smaller(p, m - j), PASS_F, k);
}

static void write_plan(RankPlan *plan, const Config *c, int r, long m, bool forward_only) {
    Writer w = {.plan = plan};
    long p = c->pp, v = c->virtual_stages;
    plan->action = host_alloc((size_t)((pp_defers_w(c) ? 3 : 2) * m * v), sizeof(Action));
    if (forward_only)
        write_forward(&w, c, m, r);
    else if (c->schedule == SCHEDULE_AFAB)
        write_afab(&w, m);
    else if (c->schedule == SCHEDULE_INTERLEAVED)
        write_interleaved(&w, m, p, v, r);
    else if (c->schedule == SCHEDULE_ZBV)
        write_zbv(&w, m, p, r);
    else
        write_1f1b(&w, m, p, r, pp_defers_w(c));
}

// ---- played through ------------------------------------------------------------------------------------------------------

// When a stage is through with F, and with I (or B), of a micro-batch; −1: not yet. In all [2 · stages, micro_batches].
static double *end_time(double *all, const Plan *plan, int stage, Pass pass, long micro) {
    return &all[(2 * stage + (pass != PASS_F)) * plan->micro_batches + micro];
}

// When all is done that the action needs, but for its rank; −1: something is not.
static double ready(double *all, const Plan *plan, const Action *a, int stage) {
    int last = stages(plan->config) - 1;
    if (a->pass == PASS_F) return stage == 0 ? 0 : *end_time(all, plan, stage - 1, PASS_F, a->micro);
    if (a->pass == PASS_W) return *end_time(all, plan, stage, PASS_I, a->micro);
    double own = *end_time(all, plan, stage, PASS_F, a->micro);
    if (stage == last || own < 0) return own;
    double behind = *end_time(all, plan, stage + 1, PASS_I, a->micro);
    return behind < 0 ? -1 : fmax(own, behind);
}

// Each rank does its next action as soon as it and what that needs are ready.
static void play(Plan *plan, Costs costs) {
    const Config *c = plan->config;
    const double cost[] = {costs.f, costs.i, costs.w, costs.i + costs.w};
    size_t n = 2 * (size_t)stages(c) * (size_t)plan->micro_batches;
    double *all = host_alloc(n, sizeof *all);
    long *next = host_alloc((size_t)c->pp, sizeof *next), left = 0;
    for (size_t i = 0; i < n; i++) all[i] = -1;
    for (int r = 0; r < c->pp; r++) left += plan->rank[r].n;
    for (int r = 0, stuck = 0; left > 0; r = (r + 1) % (int)c->pp) {
        RankPlan *rank = &plan->rank[r];
        long before = next[r];
        for (; next[r] < rank->n; next[r]++, left--) {
            Action *a = &rank->action[next[r]];
            int stage = stage_of(c, r, a->chunk);
            double from = ready(all, plan, a, stage), free = next[r] ? a[-1].end : 0;
            if (from < 0) break;
            a->start = fmax(from, free);
            a->end = a->start + cost[a->pass];
            plan->end = fmax(plan->end, a->end);
            if (a->pass != PASS_W) *end_time(all, plan, stage, a->pass, a->micro) = a->end;
        }
        stuck = next[r] > before ? 0 : stuck + 1;
        if (stuck > c->pp)
            fail_all(EXIT_RUNTIME, "a schedule whose ranks wait for each other: rank %d before action %ld", r,
                     next[r]);
    }
    free(all);
    free(next);
}

// ---- memory ------------------------------------------------------------------------------------------------------------

// Places of one kind: the last one that was given back is taken first.
typedef struct {
    int *returned, n, most; // [n] of them; places there are
    int *of;                // [chunks · micro_batches] who has which
} Places;

static int take(Places *p, size_t who) {
    return p->of[who] = p->n ? p->returned[--p->n] : p->most++;
}

static void give_back(Places *p, size_t who) {
    p->returned[p->n++] = p->of[who];
}

static void find_places(RankPlan *plan, const Config *c, int r, long m, bool forward_only) {
    size_t n = (size_t)(c->virtual_stages * m);
    Places slots = {0}, douts = {0}, heads = {0}, *const all[] = {&slots, &douts, &heads};
    for (int i = 0; i < 3; i++) {
        all[i]->returned = host_alloc(n, sizeof(int));
        all[i]->of = host_alloc(n, sizeof(int));
    }
    for (Action *a = plan->action; a < plan->action + plan->n; a++) {
        size_t who = (size_t)(a->chunk * m + a->micro);
        bool head = stage_of(c, r, a->chunk) == stages(c) - 1,
             backward = a->pass == PASS_I || a->pass == PASS_B,
             done = a->pass == PASS_W || a->pass == PASS_B || forward_only;
        if (a->pass == PASS_F) take(&slots, who);
        if (a->pass == PASS_F && head) take(&heads, who);
        if (backward) take(&douts, who);
        a->slot = slots.of[who], a->dout = douts.of[who], a->head = heads.of[who];
        if (head && (backward || forward_only)) give_back(&heads, who);
        if (done) give_back(&slots, who);
        if (done && !forward_only) give_back(&douts, who);
    }
    plan->slots = slots.most, plan->douts = douts.most, plan->heads = heads.most;
    for (int i = 0; i < 3; i++) free(all[i]->returned), free(all[i]->of);
}

Plan *pp_plan(const Config *c, long micro_batches, bool forward_only, Costs costs) {
    Plan *plan = host_alloc(1, sizeof *plan);
    *plan = (Plan){.config = c, .micro_batches = micro_batches, .forward_only = forward_only};
    plan->rank = host_alloc((size_t)c->pp, sizeof *plan->rank);
    for (int r = 0; r < c->pp; r++) {
        write_plan(&plan->rank[r], c, r, micro_batches, forward_only);
        find_places(&plan->rank[r], c, r, micro_batches, forward_only);
    }
    play(plan, costs);
    return plan;
}

void pp_free(Plan *plan) {
    for (int r = 0; plan && r < plan->config->pp; r++) free(plan->rank[r].action);
    if (plan) free(plan->rank);
    free(plan);
}

// ---- messages ----------------------------------------------------------------------------------------------------------

// What a stage hands on to the next (F), or back (I): each such link has a channel, unless both stages are one rank's.
typedef struct {
    int from, to; // stages
    Pass pass;
} Link;

static int links(const Config *c) {
    return 2 * stages(c);
}

// False: at the end of the model there is none.
static bool link_of(const Config *c, int id, Link *l) {
    *l = (Link){.from = id / 2, .to = id / 2 + (id % 2 ? -1 : 1), .pass = id % 2 ? PASS_I : PASS_F};
    return l->to >= 0 && l->to < stages(c);
}

static int in_order(const void *a, const void *b) {
    const Message *x = a, *y = b;
    if (x->leaves != y->leaves) return x->leaves < y->leaves ? -1 : 1;
    return x->link - y->link; // on one link, no two leave at a time
}

Message *pp_messages(const Plan *plan, int rank, long *n) {
    const Config *c = plan->config;
    Message *list = host_alloc((size_t)(4 * c->virtual_stages * plan->micro_batches), sizeof *list);
    *n = 0;
    for (int r = 0; r < c->pp; r++)
        for (const Action *a = plan->rank[r].action; a < plan->rank[r].action + plan->rank[r].n; a++) {
            Link l;
            int id = 2 * stage_of(c, r, a->chunk) + (a->pass != PASS_F);
            if (a->pass == PASS_W || !link_of(c, id, &l)) continue;
            int to = pp_rank_of(c, l.to);
            if (to != r && (to == rank || r == rank))
                list[(*n)++] = (Message){a->end, id, l.from, l.to, l.pass, a->micro};
        }
    qsort(list, (size_t)*n, sizeof *list, in_order);
    return list;
}

// This rank's end of a link, or both where both stages are here.
typedef struct {
    Comm *comm; // NULL: both are here
    int id;     // the link's
    int peer;   // the other rank of the pipeline
    bool sends;
    int n;
    floatX **buffer; // [n], by turns
    Work *work;      // [n], the last message of each
    // Messages of this plan: written into a buffer, copied out of one, and under way (a send has left, a receive is posted).
    long written, read, started;
} End;

// All that passes between this rank and one other, in the order in which both start it.
typedef struct {
    End **end; // [n] of each message
    long n, next;
} Talk;

enum { OUT, IN };
struct Pipeline {
    Comm **channel;           // [links]; NULL: not this rank's
    End all[4 * MOST_CHUNKS]; // [n] this rank's ends, each once,
    int n;
    End *end[MOST_CHUNKS][2][2]; // and by chunk, pass (F, I), and direction; NULL: there is no such stage
    Talk *talk;                  // [pp] by the other rank, of the plan that runs
    bool checked;
};

static End *end_of(const Model *m, int chunk, Pass pass, int direction) {
    return m->pipeline->end[chunk][pass != PASS_F][direction];
}

static void make_pipeline(Model *m) {
    m->pipeline = host_alloc(1, sizeof *m->pipeline);
    m->pipeline->channel = host_alloc((size_t)links(&m->config), sizeof *m->pipeline->channel);
}

void pp_connect(Model *m) {
    const Config *c = &m->config;
    make_pipeline(m);
    for (int id = 0; id < links(c); id++) {
        Link l;
        if (!link_of(c, id, &l) || pp_rank_of(c, l.from) == pp_rank_of(c, l.to)) continue;
        char *name = host_alloc(1, 24);
        snprintf(name, 24, "%c to stage %d", l.pass == PASS_F ? 'F' : 'I', l.to);
        m->pipeline->channel[id] = comm_channel(m->grid.pp, pp_rank_of(c, l.from), pp_rank_of(c, l.to), name);
    }
}

// When a stage begins, or ends, a pass of each micro-batch: [micro_batches], to be freed.
static double *moments(const Plan *plan, int stage, Pass pass, bool ends) {
    double *t = host_alloc((size_t)plan->micro_batches, sizeof *t);
    const RankPlan *rank = &plan->rank[pp_rank_of(plan->config, stage)];
    for (const Action *a = rank->action; a < rank->action + rank->n; a++)
        if (a->chunk == chunk_of(plan->config, stage) && a->pass != PASS_W &&
            (a->pass == PASS_F) == (pass == PASS_F))
            t[a->micro] = ends ? a->end : a->start;
    return t;
}

// The most messages of a link that are there and not yet needed.
static int most_waiting(const Plan *plan, Link l) {
    double *sent = moments(plan, l.from, l.pass, true), *needed = moments(plan, l.to, l.pass, false);
    long most = 1;
    for (long k = 0, first = 0; k < plan->micro_batches; k++) {
        while (needed[first] < sent[k]) first++; // message k itself is needed later than it is sent
        if (k - first + 1 > most) most = k - first + 1;
    }
    free(sent);
    free(needed);
    return (int)most;
}

static size_t message_items(const Model *m) {
    size_t rows = m->B * m->T;
    return (m->config.sp ? rows / (size_t)m->config.tp : rows) * (size_t)m->config.hidden;
}

// One end more, with its buffers: of a receiver as many as messages wait there, in a step or an evaluation; of a sender two.
static void add_end(Model *m, int id, Link l, const Plan *evaluation) {
    struct Pipeline *pipe = m->pipeline;
    int from = pp_rank_of(&m->config, l.from), to = pp_rank_of(&m->config, l.to), n = 2;
    bool sends = from == m->pp_rank;
    if (to == m->pp_rank) {
        n = most_waiting(m->plan, l);
        int then = evaluation && l.pass == PASS_F ? most_waiting(evaluation, l) : 0;
        if (then > n) n = then;
    }
    End *e = &pipe->all[pipe->n++];
    *e = (End){.comm = pipe->channel[id], .id = id, .peer = sends ? to : from, .sends = sends, .n = n};
    e->buffer = host_alloc((size_t)n, sizeof *e->buffer);
    e->work = host_alloc((size_t)n, sizeof *e->work);
    for (int i = 0; i < n; i++)
        e->buffer[i] = device_alloc(MEM_COMMUNICATION, message_items(m) * sizeof(floatX));
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)((size_t)n * message_items(m) * sizeof(floatX)));
    if (sends) pipe->end[chunk_of(&m->config, l.from)][id % 2][OUT] = e;
    if (to == m->pp_rank) pipe->end[chunk_of(&m->config, l.to)][id % 2][IN] = e;
}

void pp_reserve(Model *m) {
    const Config *c = &m->config;
    if (!m->pipeline) make_pipeline(m);
    m->pipeline->n = 0;
    memset(m->pipeline->end, 0, sizeof m->pipeline->end);
    // An evaluation: once the pipeline is full, each round of p micro-batches is like the one before. (With one stage a rank each
    // message is needed at once.)
    Plan *evaluation = c->virtual_stages > 1 ? pp_plan(c, 4 * c->pp, true, UNIT_COSTS) : NULL;
    for (int id = 0; id < links(c); id++) {
        Link l;
        if (!link_of(c, id, &l)) continue;
        if (pp_rank_of(c, l.from) == m->pp_rank || pp_rank_of(c, l.to) == m->pp_rank)
            add_end(m, id, l, evaluation);
    }
    pp_free(evaluation);
    // What the ring keeps of a tied embedding's sum.
    const Bucket *b = m->bucket_of[0] < 0 ? NULL : &m->bucket[m->bucket_of[0]];
    size_t staging = 0;
    if (b && pp_ties(c))
        staging = comm_staging_bytes(b->own_end - b->own, b->own_grad32 ? DTYPE_F32 : FLOAT_X, 2);
    ledger_add(MEM_COMMUNICATION, (ptrdiff_t)staging);
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)staging);
}

// Writes down the messages of this rank's ends, by the rank at the other one.
static void write_talks(Model *m, const Plan *plan) {
    struct Pipeline *pipe = m->pipeline;
    const Config *c = &m->config;
    long n;
    Message *list = pp_messages(plan, m->pp_rank, &n);
    for (int r = 0; pipe->talk && r < c->pp; r++) free(pipe->talk[r].end);
    free(pipe->talk);
    pipe->talk = host_alloc((size_t)c->pp, sizeof *pipe->talk);
    for (const Message *x = list; x < list + n; x++) {
        bool sends = pp_rank_of(c, x->from) == m->pp_rank;
        End *e = end_of(m, chunk_of(c, sends ? x->from : x->to), x->pass, sends ? OUT : IN);
        Talk *t = &pipe->talk[e->peer];
        if (!t->end) t->end = host_alloc((size_t)n, sizeof *t->end);
        t->end[t->n++] = e;
    }
    free(list);
}

// Before the first message: have both ends of each talk written down the same?
static void check_talks(const Model *m) {
    size_t p = (size_t)m->config.pp, me = (size_t)m->pp_rank;
    uint64_t *hash = host_alloc(p * p, sizeof *hash); // [rank, other]
    for (size_t r = 0; r < p; r++) {
        const Talk *t = &m->pipeline->talk[r];
        if (t->n) hash[me * p + r] = message_items(m);
        for (long k = 0; k < t->n; k++)
            hash[me * p + r] = (hash[me * p + r] ^ (uint64_t)(t->end[k]->id + 1)) * 0x100000001b3u;
    }
    comm_wait(comm_host_all_gather(m->grid.pp, hash, hash + me * p, p * p, DTYPE_I64));
    for (size_t r = 0; r < p * p; r++)
        if (hash[r] != hash[r % p * p + r / p])
            fail_all(
                EXIT_RUNTIME,
                "pipeline ranks %zu and %zu have other orders or sizes of messages; are their flags alike?",
                r / p, r % p);
    free(hash);
}

// Starts what can be started: a message that is written, a receive whose buffer has been read.
static void start_messages(Model *m) {
    size_t n = message_items(m);
    for (Talk *t = m->pipeline->talk; t < m->pipeline->talk + m->config.pp; t++)
        for (; t->next < t->n; t->next++) {
            End *e = t->end[t->next];
            long k = e->started;
            if (e->sends ? k == e->written : k == e->read + e->n) break;
            Work *work = &e->work[k % e->n];
            floatX *buffer = e->buffer[k % e->n];
            *work = e->sends ? under_way(m, comm_send(e->comm, buffer, n, FLOAT_X))
                             : comm_receive(e->comm, buffer, n, FLOAT_X);
            e->started++;
        }
}

void pp_start(Model *m, const Plan *plan) {
    struct Pipeline *pipe = m->pipeline;
    write_talks(m, plan);
    if (!pipe->checked) check_talks(m);
    pipe->checked = true;
    for (End *e = pipe->all; e < pipe->all + pipe->n; e++) e->written = e->read = e->started = 0;
    start_messages(m);
}

void pp_receive(Model *m, int chunk, Pass pass, floatX *x) {
    End *e = end_of(m, chunk, pass, IN);
    assert(!e->comm || e->started > e->read); // it is posted
    comm_wait(e->work[e->read % e->n]);
    device_copy(x, e->buffer[e->read % e->n], message_items(m) * sizeof(floatX));
    e->read++;
    start_messages(m);
}

floatX *pp_buffer(Model *m, int chunk, Pass pass) {
    End *e = end_of(m, chunk, pass, OUT);
    assert(!e->comm || e->written - e->started < e->n); // what was there before is under way
    comm_wait(e->work[e->written % e->n]);              // the message that left from there before
    return e->buffer[e->written % e->n];
}

void pp_send(Model *m, int chunk, Pass pass) {
    end_of(m, chunk, pass, OUT)->written++;
    start_messages(m);
}

// ---- a tied embedding ----------------------------------------------------------------------------------------------------

bool pp_ties(const Config *c) {
    return c->tie && pp_rank_of(c, 0) != pp_rank_of(c, stages(c) - 1);
}

void pp_sum_gradients(const Model *m) {
    if (!pp_ties(&m->config) || m->bucket_of[0] < 0) return;
    const Bucket *b = &m->bucket[m->bucket_of[0]];
    comm_wait(b->reduce);
    void *grad = b->own_grad32 ? (void *)b->own_grad32 : b->own_grad;
    comm_wait(comm_all_reduce(m->grid.tied, grad, b->own_end - b->own, b->own_grad32 ? DTYPE_F32 : FLOAT_X));
}

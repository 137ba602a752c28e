// Every schedule's lists, for up to 16 ranks, 64 micro-batches and 8 chunks a rank, against what is known of them: each action
// once and after what it needs, bubbles, micro-batches in flight. All is counted here, from the actions and their times.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "../train.h"

enum { MOST_RANKS = 16, MOST_MICRO = 64, MOST_VIRTUAL = 8 };
static const char *const NAME[] = {"afab", "1f1b", "interleaved", "zb-h1", "zbv"};

// Of these all sums are exact in binary.
static const Costs COSTS[] = {{1, 1, 1}, {2, 2, 1}, {1, 1.25, 0.75}, {1, 3, 3}, {3, 1, 2}};
enum { COSTS_N = sizeof COSTS / sizeof *COSTS };

typedef struct {
    Schedule schedule;
    long p, m, v;
    Costs cost;
    bool forward_only;
} Case;

static void must(bool holds, const Case *c, int rank, const char *what, double got, double want) {
    if (!holds)
        fail_msg("%s%s, p %ld, m %ld, v %ld, costs %g %g %g, rank %d: %s %g, expected %g", NAME[c->schedule],
                 c->forward_only ? " forward" : "", c->p, c->m, c->v, c->cost.f, c->cost.i, c->cost.w, rank,
                 what, got, want);
}

static void must_equal(const Case *c, int rank, const char *what, double got, double want) {
    must(got == want, c, rank, what, got, want);
}

static Config config_of(const Case *c) {
    return (Config){.schedule = (int)c->schedule, .pp = c->p, .virtual_stages = c->v};
}

static bool splits(const Case *c) {
    return c->schedule == SCHEDULE_ZB_H1 || c->schedule == SCHEDULE_ZBV;
}

static int stage_at(const Case *c, int rank, int chunk) {
    if (c->schedule == SCHEDULE_ZBV) return chunk ? 2 * (int)c->p - 1 - rank : rank;
    return chunk * (int)c->p + rank;
}

static int last_stage(const Case *c) {
    return (int)(c->p * c->v) - 1;
}

static bool legal(Schedule s, long p, long m) {
    if (s == SCHEDULE_INTERLEAVED) return m % p == 0;
    if (s == SCHEDULE_ZB_H1) return m >= p;
    return s != SCHEDULE_ZBV || m >= 2 * p - 1;
}

// ---- what the literature says ------------------------------------------------------------------------------------------

// Per rank. zb-h1's is F + I − W in its paper: so long as W is the shortest of the three, which is all that fills the bubble.
static double bubble(const Case *c) {
    double f = c->cost.f, i = c->cost.i, w = c->cost.w;
    if (c->schedule == SCHEDULE_ZB_H1) return (double)(c->p - 1) * (f + i - fmin(w, fmin(f, i)));
    if (c->schedule == SCHEDULE_ZBV) return (double)(c->p - 1) * f;
    return (double)(c->p - 1) * (f + i + w);
}

static long smaller(long a, long b) {
    return a < b ? a : b;
}

static long in_flight(const Case *c, int r) {
    switch (c->schedule) {
    case SCHEDULE_AFAB:
        return c->m;
    case SCHEDULE_1F1B:
        return smaller(c->p - r, c->m);
    case SCHEDULE_INTERLEAVED:
        return smaller(2 * (c->p - r - 1) + (c->v - 1) * c->p + 1, c->m * c->v);
    case SCHEDULE_ZB_H1:
        return c->p;
    default:
        return 2 * c->p;
    }
}

// How many have had their I, but not their W; one of them is at it.
static long pending_w(const Case *c, int r) {
    return c->schedule == SCHEDULE_ZB_H1 ? r + 1 : c->schedule == SCHEDULE_ZBV ? 2 * r + 1 : 1;
}

// ---- what the lists say ------------------------------------------------------------------------------------------------

typedef enum { OF_F, OF_I, OF_W, KINDS } Kind; // a B is at once I and W
static const Action *of[KINDS][MOST_RANKS * MOST_VIRTUAL * MOST_MICRO];

static const Action **at(const Case *c, Kind kind, int stage, int micro) {
    return &of[kind][stage * c->m + micro];
}

static void note(const Case *c, int r, Kind kind, const Action *a) {
    const Action **place = at(c, kind, stage_at(c, r, a->chunk), a->micro);
    must(!*place, c, r, "a second time, in micro-batch", a->micro, -1);
    *place = a;
}

// Every pass of every chunk and micro-batch, once; and a chunk takes micro-batches in order, so that what one end of a
// channel sends is what the other expects.
static void check_complete(const Case *c, const Plan *plan) {
    for (int k = 0; k < KINDS; k++) memset(of[k], 0, (size_t)(c->p * c->v * c->m) * sizeof *of[k]);
    long passes = c->forward_only ? 1 : 2 + splits(c);
    for (int r = 0; r < c->p; r++) {
        int next[PASS_B + 1][MOST_VIRTUAL] = {0};
        must_equal(c, r, "actions", (double)plan->rank[r].n, (double)(c->m * c->v * passes));
        for (const Action *a = plan->rank[r].action; a < plan->rank[r].action + plan->rank[r].n; a++) {
            must(a->chunk >= 0 && a->chunk < c->v, c, r, "chunk", a->chunk, 0);
            must(a->micro >= 0 && a->micro < c->m, c, r, "micro-batch", a->micro, 0);
            must(a->pass == PASS_F || (!c->forward_only && splits(c) == (a->pass != PASS_B)), c, r, "pass",
                 a->pass, 0);
            must_equal(c, r, "out of order: micro-batch", a->micro, next[a->pass][a->chunk]++);
            if (a->pass == PASS_F) note(c, r, OF_F, a);
            if (a->pass == PASS_I || a->pass == PASS_B) note(c, r, OF_I, a);
            if (a->pass == PASS_W || a->pass == PASS_B) note(c, r, OF_W, a);
        }
    }
}

// When the last of what an action needs is done.
static double needed_until(const Case *c, int r, const Action *a) {
    int stage = stage_at(c, r, a->chunk);
    if (a->pass == PASS_F) return stage ? (*at(c, OF_F, stage - 1, a->micro))->end : 0;
    if (a->pass == PASS_W) return (*at(c, OF_I, stage, a->micro))->end;
    double own = (*at(c, OF_F, stage, a->micro))->end;
    return stage == last_stage(c) ? own : fmax(own, (*at(c, OF_I, stage + 1, a->micro))->end);
}

static void check_times(const Case *c, const Plan *plan) {
    const double takes[] = {c->cost.f, c->cost.i, c->cost.w, c->cost.i + c->cost.w};
    double last = 0;
    for (int r = 0; r < c->p; r++) {
        double now = 0;
        for (const Action *a = plan->rank[r].action; a < plan->rank[r].action + plan->rank[r].n; a++) {
            must_equal(c, r, "not as soon as can be: starts", a->start, fmax(now, needed_until(c, r, a)));
            must_equal(c, r, "ends", a->end, a->start + takes[a->pass]);
            now = a->end;
        }
        last = fmax(last, now);
    }
    must_equal(c, -1, "end of the plan", plan->end, last);
}

static double idle_inside(const RankPlan *plan) {
    double idle = 0;
    for (long k = 1; k < plan->n; k++) idle += plan->action[k].start - plan->action[k - 1].end;
    return idle;
}

static void check_bubble(const Case *c, const Plan *plan) {
    double got = plan->end - (double)(c->m * c->v) * (c->cost.f + c->cost.i + c->cost.w);
    bool even = c->cost.f == c->cost.i && c->cost.w <= c->cost.f;
    if (c->schedule != SCHEDULE_ZBV || even)
        must_equal(c, -1, "bubble", got, bubble(c));
    else // it is made for equal times
        must(got >= bubble(c), c, -1, "bubble", got, bubble(c));
    for (int r = 0; r < c->p && c->schedule == SCHEDULE_ZBV && even && c->cost.w == c->cost.f; r++)
        must_equal(c, r, "idle inside", idle_inside(&plan->rank[r]), 0);
}

// A rank's places of one kind: who is in each, and how many there are.
typedef struct {
    const char *name;
    int who[MOST_VIRTUAL * MOST_MICRO]; // 0: nobody
    int places, in_use, most;
} Memory;

static void enters(const Case *c, int r, Memory *m, int place, int who) {
    must(place >= 0 && place < m->places, c, r, m->name, place, m->places);
    must_equal(c, r, "already there", m->who[place], 0);
    m->who[place] = who;
    if (++m->in_use > m->most) m->most = m->in_use;
}

static void is_in(const Case *c, int r, Memory *m, int place, int who) {
    must(place >= 0 && place < m->places, c, r, m->name, place, m->places);
    must_equal(c, r, m->name, m->who[place], who);
}

static void leaves(Memory *m, int place) {
    m->who[place] = 0;
    m->in_use--;
}

static void check_memory_of(const Case *c, const RankPlan *plan, int r) {
    Memory slot = {.name = "slot", .places = plan->slots}, dout = {.name = "dout", .places = plan->douts},
           head = {.name = "head", .places = plan->heads};
    for (const Action *a = plan->action; a < plan->action + plan->n; a++) {
        int who = 1 + a->chunk * (int)c->m + a->micro;
        bool heads = stage_at(c, r, a->chunk) == last_stage(c);
        if (a->pass == PASS_F) enters(c, r, &slot, a->slot, who);
        if (a->pass == PASS_F && heads) enters(c, r, &head, a->head, who);
        if (a->pass == PASS_I || a->pass == PASS_B) enters(c, r, &dout, a->dout, who);
        is_in(c, r, &slot, a->slot, who);
        if (a->pass != PASS_F) is_in(c, r, &dout, a->dout, who);
        if (heads && a->pass != PASS_W) is_in(c, r, &head, a->head, who);
        if (heads && (c->forward_only || a->pass == PASS_I || a->pass == PASS_B)) leaves(&head, a->head);
        if (c->forward_only || a->pass == PASS_W || a->pass == PASS_B) leaves(&slot, a->slot);
        if (a->pass == PASS_W || a->pass == PASS_B) leaves(&dout, a->dout);
    }
    must_equal(c, r, "in use at the end", slot.in_use + dout.in_use + head.in_use, 0);
    must_equal(c, r, "slots", plan->slots, slot.most);
    must_equal(c, r, "douts", plan->douts, dout.most);
    must_equal(c, r, "heads", plan->heads, head.most);
    must_equal(c, r, "in flight", slot.most, (double)(c->forward_only ? 1 : in_flight(c, r)));
    must_equal(c, r, "waiting for W", dout.most, (double)(c->forward_only ? 0 : pending_w(c, r)));
}

static void check_memory(const Case *c, const Plan *plan) {
    for (int r = 0; r < c->p; r++) check_memory_of(c, &plan->rank[r], r);
}

// ---- all of them -------------------------------------------------------------------------------------------------------

typedef void Check(const Case *c);

static void check_step(const Case *c) {
    Config config = config_of(c);
    Plan *plan = pp_plan(&config, c->m, false, c->cost);
    assert_ptr_equal(plan->config, &config);
    assert_int_equal(plan->micro_batches, c->m);
    check_complete(c, plan);
    check_times(c, plan);
    check_memory(c, plan);
    check_bubble(c, plan);
    pp_free(plan);
}

static void check_forward(const Case *c) {
    Config config = config_of(c);
    Plan *plan = pp_plan(&config, c->m, true, c->cost);
    check_complete(c, plan);
    check_times(c, plan);
    check_memory(c, plan);
    bool whole_groups = c->schedule != SCHEDULE_ZBV && c->m % c->p == 0;
    if (c->v == 1 || whole_groups)
        must_equal(c, -1, "end", plan->end, (double)(c->m * c->v + c->p - 1) * c->cost.f);
    pp_free(plan);
}

static void for_chunks(Schedule s, Check *check, Case c) {
    long least = s == SCHEDULE_INTERLEAVED || s == SCHEDULE_ZBV ? 2 : 1;
    long most = s == SCHEDULE_INTERLEAVED ? MOST_VIRTUAL : least;
    for (c.v = least; c.v <= most; c.v++) check(&c);
}

static void for_each(Schedule s, Check *check, Case c, bool any_m) {
    c.schedule = s;
    for (c.p = 1; c.p <= MOST_RANKS; c.p++)
        for (c.m = 1; c.m <= MOST_MICRO; c.m++)
            if (any_m || legal(s, c.p, c.m)) for_chunks(s, check, c);
}

static void steps(Schedule s) {
    for (int k = 0; k < COSTS_N; k++) for_each(s, check_step, (Case){.cost = COSTS[k]}, false);
}

static void afab(void **state) {
    (void)state;
    steps(SCHEDULE_AFAB);
}

static void one_f_one_b(void **state) {
    (void)state;
    steps(SCHEDULE_1F1B);
}

static void interleaved(void **state) {
    (void)state;
    steps(SCHEDULE_INTERLEAVED);
}

static void zb_h1(void **state) {
    (void)state;
    steps(SCHEDULE_ZB_H1);
}

static void zbv(void **state) {
    (void)state;
    steps(SCHEDULE_ZBV);
}

// An evaluation takes as many micro-batches as it likes, in every schedule.
static void forward_alone(void **state) {
    (void)state;
    for (int s = 0; s <= SCHEDULE_ZBV; s++)
        for_each((Schedule)s, check_forward, (Case){.cost = {1, 1, 1}, .forward_only = true}, true);
}

static void numbers_of_micro_batches(void **state) {
    (void)state;
    for (Case c = {0}; c.schedule <= SCHEDULE_ZBV; c.schedule++)
        for (c.p = 1; c.p <= MOST_RANKS; c.p++)
            for (c.m = 1; c.m <= 2 * MOST_MICRO; c.m++) {
                c.v = 2;
                Config config = config_of(&c);
                must_equal(&c, -1, "accepted", pp_accepts(&config, c.m), legal(c.schedule, c.p, c.m));
            }
}

// ---- one of each, written out ------------------------------------------------------------------------------------------

// Pass, chunk and micro-batch, in words of three letters.
static const char letter[] = "FIWB";
static void check_order(Schedule s, long m, long v, const char *const order[2]) {
    Case c = {.schedule = s, .p = 2, .m = m, .v = v, .cost = {1, 1, 1}};
    Config config = config_of(&c);
    Plan *plan = pp_plan(&config, m, false, c.cost);
    for (int r = 0; r < 2; r++) {
        char got[256] = "", *end = got;
        for (const Action *a = plan->rank[r].action; a < plan->rank[r].action + plan->rank[r].n; a++)
            end += sprintf(end, " %c%d%d", letter[a->pass], a->chunk, a->micro);
        assert_string_equal(got + 1, order[r]);
    }
    pp_free(plan);
}

static void orders(void **state) {
    (void)state;
    check_order(SCHEDULE_AFAB, 3, 1,
                (const char *const[]){"F00 F01 F02 B00 B01 B02", "F00 F01 F02 B00 B01 B02"});
    check_order(SCHEDULE_1F1B, 3, 1,
                (const char *const[]){"F00 F01 B00 F02 B01 B02", "F00 B00 F01 B01 F02 B02"});
    check_order(SCHEDULE_INTERLEAVED, 4, 2,
                (const char *const[]){"F00 F01 F10 F11 F02 B10 F03 B11 F12 B00 F13 B01 B12 B13 B02 B03",
                                      "F00 F01 F10 B10 F11 B11 F02 B00 F03 B01 F12 B12 F13 B13 B02 B03"});
    check_order(
        SCHEDULE_ZB_H1, 3, 1,
        (const char *const[]){"F00 F01 I00 W00 F02 I01 W01 I02 W02", "F00 I00 F01 I01 W00 F02 I02 W01 W02"});
    check_order(SCHEDULE_ZBV, 4, 2,
                (const char *const[]){"F00 F01 F02 F10 I10 W10 F11 I11 W11 F03 I00 W00 "
                                      "F12 I12 W12 I01 W01 F13 I13 W13 I02 W02 I03 W03",
                                      "F00 F10 F01 F11 I10 W10 F02 I00 W00 F12 I11 W11 "
                                      "F03 I01 W01 F13 I12 W12 I02 I13 I03 W02 W13 W03"});
}

// ---- who holds what ----------------------------------------------------------------------------------------------------

static void check_chunks(const Case *c, long layers) {
    Config config = config_of(c);
    config.layers = layers;
    Chunk of_stage[MOST_RANKS * MOST_VIRTUAL], chunk[MOST_VIRTUAL];
    int n = last_stage(c) + 1, next = 0;
    for (int r = 0; r < c->p; r++) {
        pp_chunks(&config, r, chunk);
        for (int k = 0; k < c->v; k++) {
            must_equal(c, r, "stage", chunk[k].stage, stage_at(c, r, k));
            of_stage[chunk[k].stage] = chunk[k];
        }
    }
    for (int s = 0; s < n; s++) { // units are the embedding, the blocks, the head
        long blocks = layers / n + (s < layers % n);
        must_equal(c, -1, "first unit", of_stage[s].first_unit, next);
        next = of_stage[s].last_unit + 1;
        must_equal(c, -1, "units", next - of_stage[s].first_unit, (double)(blocks + (s == 0) + (s == n - 1)));
    }
    must_equal(c, -1, "units in all", next, (double)(layers + 2));
}

static void check_layers(const Case *c) {
    for (long layers = c->p * c->v; layers <= 3 * c->p * c->v; layers++) check_chunks(c, layers);
}

static void layers_are_spread(void **state) {
    (void)state;
    for (Case c = {0}; c.schedule <= SCHEDULE_ZBV; c.schedule++)
        for (c.p = 1; c.p <= MOST_RANKS; c.p++) for_chunks(c.schedule, check_layers, c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_of_micro_batches),
        cmocka_unit_test(layers_are_spread),
        cmocka_unit_test(orders),
        cmocka_unit_test(afab),
        cmocka_unit_test(one_f_one_b),
        cmocka_unit_test(interleaved),
        cmocka_unit_test(zb_h1),
        cmocka_unit_test(zbv),
        cmocka_unit_test(forward_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

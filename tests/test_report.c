// The table of ZeRO's paper and of the playbook: model state of a rank by stage, 16 bytes a parameter in mixed precision. And
// what a schedule's simulation gives: what the formulas say. And attention's work on context-parallel ranks: pairs, counted one
// by one.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <cjson/cJSON.h>
#include "../report.h"

static void assert_near(double a, double b) {
    assert_true(fabs(a - b) < 1e-12 * b);
}

static double total(double parameters, double ranks, int stage, bool accumulate_fp32) {
    ZeroBytes z = zero_bytes(parameters, ranks, stage, accumulate_fp32);
    return z.weights + z.gradients + z.optimizer;
}

static void the_playbooks_table(void **state) {
    (void)state;
    static const struct {
        double parameters, GB, with_fp32_sums;
    } model[] = {{1e9, 16, 20}, {7e9, 112, 140}, {70e9, 1120, 1400}, {405e9, 6480, 8100}};
    bool mixed = sizeof(floatX) == 2;
    for (size_t i = 0; i < sizeof model / sizeof *model; i++) {
        assert_near(total(model[i].parameters, 1, 0, false) * 1e-9, model[i].GB);
        // An fp32 build's gradients are fp32 sums already.
        assert_near(total(model[i].parameters, 1, 0, true) * 1e-9,
                    mixed ? model[i].with_fp32_sums : model[i].GB);
        for (int stage = 1; stage <= 3; stage++) // one rank holds all shards
            assert_near(total(model[i].parameters, 1, stage, false) * 1e-9, model[i].GB);
    }
}

static void stages_on_eight_ranks(void **state) {
    (void)state;
    static const double mixed[] = {112, 38.5, 26.25, 14}, fp32[] = {112, 63, 38.5, 14}; // 2 + 2 + 12, 4 + 4 + 8
    for (int stage = 0; stage <= 3; stage++)
        assert_near(total(7e9, 8, stage, false) * 1e-9, (sizeof(floatX) == 2 ? mixed : fp32)[stage]);
}

static double number(const cJSON *o, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(o, name)->valuedouble;
}

static double of_rank(const cJSON *o, const char *name, int r) {
    return cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(o, name), r)->valuedouble;
}

// p ranks, m micro-batches, v chunks: --dry-run's numbers, beside the formulas that stand next to them, and these once more.
static void assert_schedule(Schedule schedule, long p, long m, long v) {
    Config c = {.pp = p, .virtual_stages = v, .schedule = schedule};
    Plan *plan = pp_plan(&c, m, false, UNIT_COSTS);
    cJSON *o = report_schedule_json(plan), *formula = cJSON_GetObjectItemCaseSensitive(o, "formula");
    bool split = schedule == SCHEDULE_ZB_H1 || schedule == SCHEDULE_ZBV;
    double pd = (double)p, work = 3 * (double)(m * v), bubble = split ? pd - 1 : 3 * (pd - 1);
    assert_true(number(o, "bubble") == bubble && number(formula, "bubble") == bubble);
    assert_near(number(o, "idle_fraction"), bubble / (bubble + work));
    assert_near(number(o, "bubble_overhead"), bubble / work);
    if (!split) assert_near(number(o, "idle_fraction"), (pd - 1) / (double)(v * m + p - 1));
    if (!split) assert_near(number(o, "bubble_overhead"), (pd - 1) / (double)(v * m));
    for (int r = 0; r < p; r++) {
        long ahead = 2 * (p - r - 1) + (v - 1) * p + 1;
        const long most[] = {m, p - r < m ? p - r : m, ahead < m * v ? ahead : m * v, p, 2 * p};
        assert_true(of_rank(o, "in_flight", r) == (double)most[schedule]);
        assert_true(of_rank(formula, "in_flight", r) == (double)most[schedule]);
        if (!split) assert_true(of_rank(o, "pending_w", r) == 0);
        if (schedule == SCHEDULE_ZB_H1) assert_true(of_rank(o, "pending_w", r) == r + 1);
    }
    cJSON_Delete(o);
    pp_free(plan);
}

static void schedules_are_as_the_formulas_say(void **state) {
    (void)state;
    for (long p = 2; p <= 16; p++)
        for (long m = 1; m <= 64; m++) {
            assert_schedule(SCHEDULE_AFAB, p, m, 1);
            assert_schedule(SCHEDULE_1F1B, p, m, 1);
            if (m >= p) assert_schedule(SCHEDULE_ZB_H1, p, m, 1);
            if (m >= 2 * p - 1) assert_schedule(SCHEDULE_ZBV, p, m, 2);
            for (long v = 2; v <= 8 && m % p == 0; v++) assert_schedule(SCHEDULE_INTERLEAVED, p, m, v);
        }
}

// Does rank r have this position? Of 2·cp chunks it has the r-th from the front and the r-th from the back; or the r-th of cp.
static bool has_token(const Config *c, CpOrder order, long r, long position) {
    long chunk = position / (c->seq / (2 * c->cp));
    if (order == ORDER_CONTIGUOUS) return chunk / 2 == r;
    return chunk == r || 2 * c->cp - 1 - chunk == r;
}

static void pairs_of_cp_ranks(void **state) {
    (void)state;
    for (long cp = 1; cp <= 8; cp++)
        for (long odd = 1; odd <= 5; odd += 2)
            for (int order = ORDER_ZIGZAG; order <= ORDER_CONTIGUOUS; order++) {
                Config c = {.cp = cp, .seq = 2 * cp * odd};
                double most = 0, sum = 0;
                for (long r = 0; r < cp; r++) {
                    double pairs = 0;
                    for (long q = 0; q < c.seq; q++)
                        for (long k = 0; k <= q; k++) pairs += has_token(&c, order, r, q);
                    assert_true(report_pairs(&c, order, r) == pairs);
                    most = fmax(most, pairs), sum += pairs;
                }
                assert_near(report_imbalance(&c, order), most * (double)cp / sum);
                if (order == ORDER_ZIGZAG) assert_true(report_imbalance(&c, order) == 1);
            }
    Config four = {.cp = 4, .seq = 131072}; // of long sequences (2cp − 1)/cp
    assert_true(fabs(report_imbalance(&four, ORDER_CONTIGUOUS) - 1.75) < 1e-4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_playbooks_table), cmocka_unit_test(stages_on_eight_ranks),
        cmocka_unit_test(schedules_are_as_the_formulas_say), cmocka_unit_test(pairs_of_cp_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

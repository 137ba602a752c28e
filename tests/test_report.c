// The table of ZeRO's paper and of the playbook: model state of a rank by stage, 16 bytes a parameter in mixed precision.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_playbooks_table),
                                       cmocka_unit_test(stages_on_eight_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

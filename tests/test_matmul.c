// matmul on inputs that leave no room for a tolerance: small integers, whose sums fp32 holds exactly in any order. The
// expected value is computed in integers here and rounded to floatX once, and the kernel must give its very bits: in
// bf16 too, where rounding twice, or a sum kept in bf16, would show.
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "kernels/kernels.h"

enum { GUARD = 64 };

static uint64_t seed = 1;
static uint32_t next(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static floatX *integers(size_t n) { // −8..8
    floatX *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = to_floatX((float)(next() % 17) - 8);
    return x;
}

// An output: NaN (all bits set), or a copy of what is to be added to, with a guard behind it.
static floatX *output(const floatX *start, size_t n) {
    floatX *x = malloc((n + GUARD) * sizeof *x);
    memset(x, 0xff, (n + GUARD) * sizeof *x);
    if (start) memcpy(x, start, n * sizeof *x);
    return x;
}

static void *workspace(size_t bytes) {
    void *w = aligned_alloc(64, (bytes + GUARD + 63) / 64 * 64);
    memset(w, 0xff, bytes + GUARD);
    return w;
}

static void check_guard(const void *end) {
    for (size_t i = 0; i < GUARD; i++) assert_int_equal(((const unsigned char *)end)[i], 0xff);
}

static void check(const char *what, const floatX *got, const long *want, size_t rows, size_t cols) {
    for (size_t i = 0; i < rows * cols; i++) {
        floatX w = to_floatX((float)want[i]);
        if (memcmp(&w, got + i, sizeof w) != 0)
            fail_msg("%s [%zu,%zu] at %zu: %g, want %g", what, i / cols, i % cols, i, to_float(got[i]),
                     to_float(w));
    }
    check_guard(got + rows * cols);
}

// want [m,n] = start + Σ_r a [i,r] b [j,r], with elements i and r of a a_i and a_r apart
static long *reference(const floatX *start, size_t start_row, size_t m, size_t n, size_t length,
                       const floatX *a, size_t a_i, size_t a_r, const floatX *b, size_t b_j, size_t b_r) {
    long *want = malloc(m * n * sizeof *want);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            long sum = start ? (long)to_float(start[i * start_row + j]) : 0;
            for (size_t r = 0; r < length; r++)
                sum += (long)to_float(a[i * a_i + r * a_r]) * (long)to_float(b[j * b_j + r * b_r]);
            want[i * n + j] = sum;
        }
    return want;
}

static void check_sizes(size_t M, size_t K, size_t N) {
    floatX *inp = integers(M * K), *weight = integers(N * K), *bias = integers(N), *dout = integers(M * N);
    floatX *stored = integers(N * K);
    size_t bytes = matmul_workspace(M, K, N);
    char *w = workspace(bytes);

    floatX *out = output(NULL, M * N);
    long *want = reference(bias, 0, M, N, K, inp, K, 1, weight, K, 1);
    matmul_forward(out, inp, weight, bias, M, K, N, w);
    check("out with bias", out, want, M, N);
    free(out), free(want);

    out = output(NULL, M * N);
    want = reference(NULL, 0, M, N, K, inp, K, 1, weight, K, 1);
    matmul_forward(out, inp, weight, NULL, M, K, N, w);
    check("out", out, want, M, N);
    free(out), free(want);

    floatX *dinp = output(NULL, M * K);
    want = reference(NULL, 0, M, K, N, dout, N, 1, weight, 1, K);
    matmul_backward_input(dinp, dout, weight, M, K, N, w);
    check("dinp", dinp, want, M, K);
    free(dinp), free(want);

    floatX *dweight = output(stored, N * K);
    want = reference(stored, K, N, K, M, dout, 1, N, inp, 1, K);
    matmul_backward_weight(dweight, dout, inp, M, K, N, w);
    check("dweight", dweight, want, N, K);
    free(dweight), free(want);

    floatX one = to_floatX(1), *dbias = output(bias, N);
    want = reference(bias, 0, 1, N, M, &one, 0, 0, dout, 1, N);
    matmul_backward_bias(dbias, dout, M, N, w);
    check("dbias", dbias, want, 1, N);
    free(dbias), free(want);

    check_guard(w + bytes);
    free(inp), free(weight), free(bias), free(dout), free(stored), free(w);
}

static const size_t sizes[][3] = {{1, 1, 1},       {1, 5, 3},     {7, 1, 9},      {9, 6, 1},
                                  {17, 33, 65},    {64, 64, 64},  {70, 130, 200}, {255, 256, 257},
                                  {300, 257, 513}, {1100, 3, 40}, {3, 1030, 2061}};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void test_exact(void **state) {
    (void)state;
    int threads = omp_get_max_threads();
    for (int t = 1; t <= 5; t += 2) {
        omp_set_num_threads(t);
        for (size_t i = 0; i < SIZES; i++) check_sizes(sizes[i][0], sizes[i][1], sizes[i][2]);
    }
    omp_set_num_threads(threads);
}

// --matmul bf16 in an fp32 build: the products of rounded inputs, exactly; nothing else is rounded.
static void test_rounded_inputs(void **state) {
    (void)state;
    if (sizeof(floatX) != sizeof(float)) skip();
    size_t M = 70, K = 300, N = 270;
    float *inp = malloc(M * K * sizeof(float)), *weight = malloc(N * K * sizeof(float)),
          *bias = malloc(N * sizeof(float));
    floatX *inp_rounded = malloc(M * K * sizeof(floatX)), *weight_rounded = malloc(N * K * sizeof(floatX));
    // 9 bits of mantissa where bf16 has 8; 256 + 1, odd, is a tie and goes down to 256, 256 + 3 up to 260
    for (size_t i = 0; i < M * K; i++) {
        inp[i] = (float)(256 + next() % 4);
        inp_rounded[i] = to_floatX(inp[i] == 257 ? 256 : inp[i] == 259 ? 260 : inp[i]);
    }
    for (size_t i = 0; i < N * K; i++)
        weight[i] = (float)(next() % 3) - 1, weight_rounded[i] = to_floatX(weight[i]);
    for (size_t i = 0; i < N; i++) bias[i] = 257;
    floatX *out = output(NULL, M * N), *x = (floatX *)(void *)inp, *y = (floatX *)(void *)weight,
           *z = (floatX *)(void *)bias;
    long *want = reference(z, 0, M, N, K, inp_rounded, K, 1, weight_rounded, K, 1);
    void *w = workspace(matmul_workspace(M, K, N));
    matmul_inputs_bf16 = true;
    matmul_forward(out, x, y, z, M, K, N, w);
    matmul_inputs_bf16 = false;
    check("out of rounded inputs", out, want, M, N);

    floatX *plain = output(NULL, M * N);
    matmul_forward(plain, x, y, z, M, K, N, w);
    assert_memory_not_equal(plain, out, M * N * sizeof *out);
    free(inp), free(weight), free(bias), free(inp_rounded), free(weight_rounded), free(out), free(want),
        free(w);
    free(plain);
}

// On real numbers the order of a sum shows: the same bits again, whichever thread took which block.
static void test_deterministic(void **state) {
    (void)state;
    int threads = omp_get_max_threads();
    for (size_t i = 0; i < SIZES; i++) {
        size_t M = sizes[i][0], K = sizes[i][1], N = sizes[i][2], total = M * N + M * K + N * K + N;
        floatX *inp = integers(M * K), *weight = integers(N * K), *dout = integers(M * N);
        for (size_t j = 0; j < M * K; j++) inp[j] = to_floatX(to_float(inp[j]) * 0.1f);
        for (size_t j = 0; j < N * K; j++) weight[j] = to_floatX(to_float(weight[j]) * 0.7f);
        for (size_t j = 0; j < M * N; j++) dout[j] = to_floatX(to_float(dout[j]) * 0.3f);
        for (int t = 1; t <= 4; t++) {
            omp_set_num_threads(t);
            void *w = workspace(matmul_workspace(M, K, N));
            floatX *run[2];
            for (int r = 0; r < 2; r++) {
                floatX *out = run[r] = calloc(total, sizeof *out), *dinp = out + M * N, *dweight = dinp + M * K;
                matmul_forward(out, inp, weight, dout, M, K, N, w);
                matmul_backward_input(dinp, dout, weight, M, K, N, w);
                matmul_backward_weight(dweight, dout, inp, M, K, N, w);
                matmul_backward_bias(dweight + N * K, dout, M, N, w);
            }
            assert_memory_equal(run[0], run[1], total * sizeof(floatX));
            free(run[0]), free(run[1]), free(w);
        }
        free(inp), free(weight), free(dout);
    }
    omp_set_num_threads(threads);
}

static void test_flops(void **state) {
    (void)state;
    floatX *x = integers(12 * 30), *out = output(NULL, 12 * 30);
    void *w = workspace(matmul_workspace(4, 5, 6));
    kernel_flops = (KernelFlops){0};
    matmul_forward(out, x, x, x, 4, 5, 6, w);
    assert_true(kernel_flops.gemm_forward == 240 && kernel_flops.gemm_backward == 0);
    matmul_backward_input(out, x, x, 4, 5, 6, w);
    matmul_backward_weight(x, x + 60, x + 120, 4, 5, 6, w);
    matmul_backward_bias(x, x + 60, 4, 6, w);
    assert_true(kernel_flops.gemm_forward == 240 && kernel_flops.gemm_backward == 480);
    free(x), free(out), free(w);
}

// The largest vocabulary of the presets takes no more workspace than a small layer does.
static void test_workspace(void **state) {
    (void)state;
    assert_true(matmul_workspace(8192, 4096, 128256) <= (size_t)omp_get_max_threads() << 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact),         cmocka_unit_test(test_rounded_inputs),
        cmocka_unit_test(test_deterministic), cmocka_unit_test(test_flops),
        cmocka_unit_test(test_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

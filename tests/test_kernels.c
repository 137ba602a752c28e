// The kernels that are not matrix products, against plain double-precision references written here from the formulas.
//
// Every output starts as NaN, every array lies between guard elements, every kernel runs with 1, 2 and 3 threads and
// must give the same bits each time, on odd sizes and on inputs that random numbers do not give.
#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>
#include "kernels/kernels.h"
#include "kernels/vecmath.h"

// ---------------------------------------------------------------------------------------------------------
// arrays between guards

#ifdef __SANITIZE_ADDRESS__
enum { GUARD = 0 }; // it guards the ends itself, reads too
#else
enum { GUARD = 64 };
#endif

static struct {
    unsigned char *base;
    size_t bytes;
} arrays[256];
static size_t n_arrays;

static void *array(size_t bytes) {
    unsigned char *base = malloc(bytes + 2 * GUARD);
    assert_non_null(base);
    assert_true(n_arrays < sizeof arrays / sizeof *arrays);
    memset(base, 0xff, bytes + 2 * GUARD); // NaN as fp32, bf16 and double, −1 as an integer
    arrays[n_arrays].base = base;
    arrays[n_arrays++].bytes = bytes;
    return base + GUARD;
}

// Checks the guards of all arrays and frees those made since there were `keep`.
static void release(size_t keep) {
    unsigned char intact[64];
    memset(intact, 0xff, sizeof intact);
    for (size_t i = 0; i < n_arrays; i++) {
        const unsigned char *before = arrays[i].base, *after = before + GUARD + arrays[i].bytes;
        if (memcmp(before, intact, GUARD) != 0 || memcmp(after, intact, GUARD) != 0)
            fail_msg("array %zu of %zu bytes: written outside", i, arrays[i].bytes);
    }
    while (n_arrays > keep) free(arrays[--n_arrays].base);
}

static floatX *poisoned(size_t n) {
    return array(n * sizeof(floatX));
}

static float *poisoned32(size_t n) {
    return array(n * sizeof(float));
}

static void *copy(const void *x, size_t bytes) {
    return memcpy(array(bytes), x, bytes);
}

// ---------------------------------------------------------------------------------------------------------
// inputs

static uint64_t state = 42;

static double uniform(void) { // in [−1, 1)
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)state / 9223372036854775808.0;
}

typedef enum { RANDOM, ONE_HOT, CONSTANT, HUGE_VALUES, N_KINDS } Kind;

static floatX *filled(size_t rows, size_t C, Kind kind) {
    floatX *x = poisoned(rows * C);
    for (size_t n = 0; n < rows; n++) {
        double level = 100.1 + (double)n; // no sum of these is exact in fp32
        for (size_t c = 0; c < C; c++) {
            double value = uniform();
            if (kind == ONE_HOT) value = c == n % C ? 1e4 : 0.0;
            if (kind == CONSTANT) value = level;
            if (kind == HUGE_VALUES) value *= 1e4;
            x[n * C + c] = to_floatX((float)value);
        }
    }
    return x;
}

static floatX *random_array(size_t n) {
    return filled(1, n, RANDOM);
}

static double at(const floatX *x, size_t i) {
    return to_float(x[i]);
}

// ---------------------------------------------------------------------------------------------------------
// comparisons: relative to the rounding of floatX, plus `slack` for what the inputs' size explains. NaN never passes.

static const double REL = sizeof(floatX) == 2 ? 1.0 / 256 : 1e-6;

static void near_at(int line, const char *what, size_t i, double got, double want, double rel, double slack) {
    if (!(fabs(got - want) <= rel * fabs(want) + slack))
        fail_msg("line %d: %s[%zu] is %.9g, not %.9g (± %.3g)", line, what, i, got, want,
                 rel * fabs(want) + slack);
}
#define NEAR(x, i, want, slack)   near_at(__LINE__, #x, i, to_float((x)[i]), want, REL, slack)
#define NEAR32(x, i, want, slack) near_at(__LINE__, #x, i, (x)[i], want, 1e-6, slack)

// relative error of an fp32 sum of n terms; the second part is for builds that do not vectorise it (sanitizers)
static double sum_error(size_t n) {
    return 1e-6 + 1e-8 * (double)n;
}

static const int THREADS[] = {1, 2, 3};
#define EACH_THREADS(k) for (size_t k = 0; k < 3 && (omp_set_num_threads(THREADS[k]), true); k++)

// the first of the thread counts sets the bits, the others must give them again
#define SAME_BITS(k, first, x, bytes)                                                                          \
    do {                                                                                                       \
        if ((k) == 0) first = x;                                                                               \
        assert_memory_equal(first, x, bytes);                                                                  \
    } while (0)

static const size_t NS[] = {1, 17, 150}, CS[] = {1, 7, 48, 72, 1600};
#define EACH_SIZE(N, C)                                                                                        \
    for (size_t N##i = 0; N##i < 3; N##i++)                                                                    \
        for (size_t C##i = 0, N = NS[N##i], C; C##i < 5 && (C = CS[C##i], true); C##i++)

// ---------------------------------------------------------------------------------------------------------
static void test_exp(void **unused) {
    (void)unused;
    for (uint64_t i = 0; i <= UINT32_MAX; i += 509) {
        uint32_t bits = (uint32_t)i;
        float x;
        memcpy(&x, &bits, sizeof x);
        float y = fast_expf(x), s = fast_sigmoidf(x);
        double want = exp((double)x);
        if (isnan(x)) {
            assert_true(isnan(y) && isnan(s));
            continue;
        }
        if (want < 0x1p-125) {
            if (!(y >= 0.0f && y <= 0x1p-125)) fail_msg("exp(%.9g) is %.9g", x, y);
        } else if (!(y == (float)want || fabs(y - want) <= 1.2e-7 * want)) { // equal: inf
            fail_msg("exp(%.9g) is %.9g, not %.9g", x, y, want);
        }
        near_at(__LINE__, "sigmoid", i, s, 1.0 / (1.0 + exp(-(double)x)), 3e-7, 0x1p-125);
    }
    assert_true(fast_expf(-INFINITY) == 0.0f && fast_expf(INFINITY) == INFINITY && fast_expf(0.0f) == 1.0f);
}

// ---------------------------------------------------------------------------------------------------------
static void test_embedding(void **unused) {
    (void)unused;
    static const struct {
        size_t B, T, C, V;
        bool wpe;
        size_t elsewhere; // of so many tokens one has no row in this table (0: none)
    } cases[] = {{1, 1, 1, 1, true, 0},   {2, 17, 7, 5, true, 0},    {3, 8, 48, 50, false, 0},
                 {1, 64, 72, 3, true, 0}, {2, 5, 1600, 9, false, 0}, {4, 33, 65, 300, true, 0},
                 {1, 1, 1, 1, true, 1},   {2, 17, 7, 5, true, 3},    {3, 8, 48, 50, false, 2},
                 {2, 9, 72, 3, false, 1}, {2, 64, 72, 1, true, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t B = cases[i].B, T = cases[i].T, C = cases[i].C, V = cases[i].V, P = T + 10, N = B * T;
        const floatX *wte = random_array(V * C), *wpe = cases[i].wpe ? random_array(P * C) : NULL;
        const floatX *dout = random_array(N * C), *dwte0 = random_array(V * C), *dwpe0 = random_array(P * C);
        int32_t *tokens = array(N * sizeof *tokens), *positions = array(T * sizeof *positions);
        for (size_t n = 0; n < N; n++) // the last row of the table stays unused, the first is used most
            tokens[n] = (int32_t)(uniform() > 0.5 || V == 1 ? 0 : (uniform() + 1) / 2 * (double)(V - 1));
        for (size_t n = 0; n < N && cases[i].elsewhere; n += cases[i].elsewhere) tokens[n] = -1;
        for (size_t t = 0; t < T; t++)
            positions[t] = (int32_t)(P - 2 - t); // neither from 0, nor ascending, nor all

        void *first_out = NULL, *first_dwte = NULL, *first_dwpe = NULL;
        EACH_THREADS(k) {
            floatX *out = poisoned(N * C);
            embedding_forward(out, tokens, wte, wpe, positions, B, T, C);
            for (size_t j = 0; j < N * C; j++) {
                size_t n = j / C, c = j % C;
                double token = tokens[n] < 0 ? 0.0 : at(wte, (size_t)tokens[n] * C + c);
                double position = wpe ? at(wpe, (size_t)positions[n % T] * C + c) : 0.0;
                NEAR(out, j, token + position, 0);
            }

            floatX *dwte = copy(dwte0, V * C * sizeof *dwte), *dwpe = copy(dwpe0, P * C * sizeof *dwpe);
            embedding_backward(dwte, wpe ? dwpe : NULL, dout, tokens, positions, B, T, C, V,
                               array(embedding_backward_workspace(B, T, C, V)));
            for (size_t j = 0; j < V * C; j++) {
                double want = at(dwte0, j);
                bool used = false;
                for (size_t n = 0; n < N; n++) {
                    if (tokens[n] != (int32_t)(j / C)) continue;
                    want += at(dout, n * C + j % C);
                    used = true;
                }
                NEAR(dwte, j, want, 1e-5);
                if (!used) assert_memory_equal(dwte + j, dwte0 + j, sizeof *dwte);
            }
            for (size_t j = 0; j < P * C; j++) {
                double want = at(dwpe0, j);
                bool used = false;
                for (size_t n = 0; n < N && wpe; n++) {
                    if ((size_t)positions[n % T] != j / C) continue;
                    want += at(dout, n * C + j % C);
                    used = true;
                }
                NEAR(dwpe, j, want, 1e-6);
                if (!used) assert_memory_equal(dwpe + j, dwpe0 + j, sizeof *dwpe);
            }
            SAME_BITS(k, first_out, out, N * C * sizeof *out);
            SAME_BITS(k, first_dwte, dwte, V * C * sizeof *dwte);
            SAME_BITS(k, first_dwpe, dwpe, P * C * sizeof *dwpe);
        }
        release(0);
    }
}

// a bf16 sum is rounded once: 300 ones and a 1 make 301, which bf16 holds as 300 or 302; adding ones to a bf16 stops
// at 256
static void test_embedding_sum_is_wide(void **unused) {
    (void)unused;
    enum { N = 300 };
    int32_t *tokens = array(N * sizeof *tokens), *positions = array(N * sizeof *positions);
    memset(tokens, 0, N * sizeof *tokens);
    for (int32_t t = 0; t < N; t++) positions[t] = t;
    floatX *dout = poisoned(N), *dwte = poisoned(1);
    for (size_t n = 0; n < N; n++) dout[n] = to_floatX(1.0f);
    dwte[0] = to_floatX(1.0f);
    embedding_backward(dwte, NULL, dout, tokens, positions, 1, N, 1, 1,
                       array(embedding_backward_workspace(1, N, 1, 1)));
    assert_true(to_float(dwte[0]) == to_float(to_floatX(301.0f)));
    release(0);
}

// ---------------------------------------------------------------------------------------------------------
// What a norm's row is in double: x̂ and 1/√. xhat [C].
static double norm_row(double *xhat, double *mean, const floatX *x, size_t C, bool rms) {
    double squares = 0.0;
    *mean = 0.0;
    for (size_t c = 0; c < C && !rms; c++) *mean += at(x, c) / (double)C;
    for (size_t c = 0; c < C; c++) squares += (at(x, c) - *mean) * (at(x, c) - *mean);
    double rstd = 1.0 / sqrt(squares / (double)C + 1e-5);
    for (size_t c = 0; c < C; c++) xhat[c] = (at(x, c) - *mean) * rstd;
    return rstd;
}

static double largest(const double *x, size_t n) {
    double max = 0.0;
    for (size_t i = 0; i < n; i++) max = fmax(max, fabs(x[i]));
    return max;
}

static void check_norm(bool rms, size_t N, size_t C, Kind kind, bool with_residual) {
    NormForward *forward = rms ? rmsnorm_forward : layernorm_forward;
    NormBackward *backward = rms ? rmsnorm_backward : layernorm_backward;
    const floatX *inp = filled(N, C, kind), *residual = with_residual ? filled(N, C, kind) : NULL;
    const floatX *weight = random_array(C), *bias = random_array(C), *dout = random_array(N * C);
    const floatX *dresidual = with_residual ? random_array(N * C) : NULL;
    const floatX *dweight0 = random_array(C), *dbias0 = random_array(C);
    size_t bytes = N * C * sizeof(floatX), kept = n_arrays;

    void *first_out = NULL, *first_dinp = NULL, *first_dweight = NULL, *first_dbias = NULL;
    EACH_THREADS(k) {
        floatX *out = poisoned(N * C), *sum = with_residual ? poisoned(N * C) : NULL;
        float *mean = rms ? NULL : poisoned32(N), *rstd = poisoned32(N);
        forward(out, mean, rstd, sum, inp, residual, weight, rms ? NULL : bias, N, C);
        const floatX *x = with_residual ? sum : inp;
        floatX *dinp = poisoned(N * C), *dweight = copy(dweight0, C * sizeof *dweight);
        floatX *dbias = copy(dbias0, C * sizeof *dbias);
        void *workspace = array(norm_backward_workspace(N, C));
        backward(dinp, dweight, rms ? NULL : dbias, dout, dresidual, x, weight, mean, rstd, N, C, workspace);

        double *xhat = array(C * sizeof *xhat), *want_dweight = array(C * sizeof *xhat);
        double *want_dbias = array(C * sizeof *xhat), sum_slack = 1e-6;
        for (size_t c = 0; c < C; c++) {
            want_dweight[c] = at(dweight0, c);
            want_dbias[c] = at(dbias0, c);
        }
        for (size_t n = 0; n < N; n++) {
            size_t row = n * C;
            double want_mean, want_rstd = norm_row(xhat, &want_mean, x + row, C, rms), X = largest(xhat, C);
            // the error of x̂: a few roundings, and the rounding of the mean, which is exact for a constant row
            double slack = sum_error(C) * X + (kind == CONSTANT ? 0.0 : 1.2e-7 * fabs(want_mean) * want_rstd);
            if (!rms) NEAR32(mean, n, want_mean, sum_error(C) / want_rstd);
            NEAR32(rstd, n, want_rstd, sum_error(C) * want_rstd);
            double mean_g = 0.0, mean_gx = 0.0;
            for (size_t c = 0; c < C; c++) {
                if (with_residual) NEAR(sum, row + c, at(inp, row + c) + at(residual, row + c), 0);
                NEAR(out, row + c, xhat[c] * at(weight, c) + (rms ? 0.0 : at(bias, c)), slack + 1e-7);
                double g = at(dout, row + c) * at(weight, c);
                mean_g += rms ? 0.0 : g / (double)C;
                mean_gx += g * xhat[c] / (double)C;
                want_dweight[c] += at(dout, row + c) * xhat[c];
                want_dbias[c] += at(dout, row + c);
            }
            for (size_t c = 0; c < C; c++) {
                double want = want_rstd * (at(dout, row + c) * at(weight, c) - mean_g - xhat[c] * mean_gx);
                if (with_residual) want += at(dresidual, row + c);
                NEAR(dinp, row + c, want, 1e-7 + want_rstd * (1 + X) * (sum_error(C) + 3 * slack));
            }
            sum_slack += slack + 1e-7;
        }
        for (size_t c = 0; c < C; c++) {
            NEAR(dweight, c, want_dweight[c], sum_slack);
            if (!rms) NEAR(dbias, c, want_dbias[c], sum_slack);
        }
        if (rms) assert_memory_equal(dbias, dbias0, C * sizeof *dbias);
        if (kind == CONSTANT && !rms) { // nothing but the bias is left, to the bit
            for (size_t n = 0; n < N; n++) assert_memory_equal(out + n * C, bias, C * sizeof *out);
        }
        if (with_residual) { // dinp in dresidual's place
            floatX *in_place = copy(dresidual, bytes);
            floatX *dw = copy(dweight0, C * sizeof *dw), *db = copy(dbias0, C * sizeof *db);
            backward(in_place, dw, rms ? NULL : db, dout, in_place, x, weight, mean, rstd, N, C, workspace);
            assert_memory_equal(in_place, dinp, bytes);
            assert_memory_equal(dw, dweight, C * sizeof *dw);
        }
        SAME_BITS(k, first_out, out, bytes);
        SAME_BITS(k, first_dinp, dinp, bytes);
        SAME_BITS(k, first_dweight, dweight, C * sizeof *dweight);
        SAME_BITS(k, first_dbias, dbias, C * sizeof *dbias);
    }
    release(kept);
    release(0);
}

static void test_norms(void **unused) {
    (void)unused;
    EACH_SIZE(N, C) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            for (int option = 0; option < 4; option++) check_norm(option & 1, N, C, (Kind)kind, option & 2);
        }
    }
}

static void test_residual(void **unused) {
    (void)unused;
    EACH_SIZE(N, C) {
        size_t n = N * C, bytes = n * sizeof(floatX);
        const floatX *a = random_array(n), *b = random_array(n);
        EACH_THREADS(k) {
            floatX *out = poisoned(n), *in_a = copy(a, bytes), *in_b = copy(b, bytes);
            residual_forward(out, a, b, n);
            residual_forward(in_a, in_a, b, n);
            residual_forward(in_b, a, in_b, n);
            for (size_t i = 0; i < n; i++) NEAR(out, i, at(a, i) + at(b, i), 0);
            assert_memory_equal(in_a, out, bytes);
            assert_memory_equal(in_b, out, bytes);
        }
        release(0);
    }
}

// ---------------------------------------------------------------------------------------------------------
static void test_rope(void **unused) {
    (void)unused;
    static const struct {
        size_t B, T, heads, D;
        int32_t first; // position
        float theta;
    } cases[] = {{1, 1, 1, 2, 0, 1e4f},    {2, 17, 3, 16, 0, 1e4f},    {2, 5, 4, 48, 7, 1e4f},
                 {1, 9, 2, 72, 100, 5e5f}, {3, 4, 1, 128, 8000, 5e5f}, {1, 2, 2, 64, 130000, 1e4f}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t B = cases[i].B, T = cases[i].T, heads = cases[i].heads, D = cases[i].D;
        size_t stride = (heads + 1) * D + 3, n = B * T * stride,
               bytes = n * sizeof(floatX); // the rest is not rotated
        const floatX *x = random_array(n);
        int32_t *positions = array(T * sizeof *positions);
        for (size_t t = 0; t < T; t++) positions[t] = cases[i].first + 3 * (int32_t)t;
        void *first_y = NULL;
        EACH_THREADS(k) {
            float *table = poisoned32(T * D);
            rope_table(table, positions, T, D, cases[i].theta);
            floatX *y = copy(x, bytes);
            rope_forward(y, table, B, T, heads, D, stride);
            for (size_t j = 0; j < n; j++) {
                size_t channel = j % stride, half = D / 2, d = channel % D;
                if (channel >= heads * D) {
                    assert_memory_equal(y + j, x + j, sizeof *y);
                    continue;
                }
                // the pair as a complex number, turned by e^(i angle)
                size_t lo = d < half ? j : j - half, hi = lo + half;
                double angle =
                    positions[j / stride % T] * pow(cases[i].theta, -2.0 * (double)(d % half) / (double)D);
                double want = d < half ? at(x, lo) * cos(angle) - at(x, hi) * sin(angle)
                                       : at(x, lo) * sin(angle) + at(x, hi) * cos(angle);
                NEAR(y, j, want, 3e-7);
                near_at(__LINE__, "norm of the pair", j, hypot(at(y, lo), at(y, hi)),
                        hypot(at(x, lo), at(x, hi)), REL, 3e-7);
                if (positions[j / stride % T] == 0) assert_memory_equal(y + j, x + j, sizeof *y);
            }
            floatX *back = copy(y, bytes);
            rope_backward(back, table, B, T, heads, D, stride);
            for (size_t j = 0; j < n; j++) NEAR(back, j, at(x, j), 2 * REL);
            SAME_BITS(k, first_y, y, bytes);
        }
        release(0);
    }
}

// ---------------------------------------------------------------------------------------------------------
static void test_rows(void **unused) {
    (void)unused;
    EACH_SIZE(N, C) {
        size_t stride = 3 + C + 5, first = 3, n = N * C, wide = N * stride;
        const floatX *in = random_array(wide);
        float *sum0 = poisoned32(wide), *part = poisoned32(n);
        for (size_t i = 0; i < wide; i++) sum0[i] = (float)uniform();
        for (size_t i = 0; i < n; i++) part[i] = (float)uniform();
        EACH_THREADS(k) {
            floatX *out = poisoned(n), *halved = poisoned(n);
            float *sum = copy(sum0, wide * sizeof *sum), *x = poisoned32(n);
            rows_pack(out, in + first, stride, N, C);
            rows_add(sum + first, stride, part, N, C);
            rows_round(halved, part, n);
            rows_fill(x, -INFINITY, n);
            for (size_t i = 0; i < n; i++) {
                assert_memory_equal(out + i, in + i / C * stride + first + i % C, sizeof *out);
                assert_true(to_float(halved[i]) == to_float(to_floatX(part[i])));
                assert_true(x[i] == -INFINITY);
            }
            for (size_t i = 0; i < wide; i++) {
                size_t row = i / stride, channel = i % stride - first; // before first: very large
                assert_true(sum[i] == sum0[i] + (channel < C ? part[row * C + channel] : 0.0f));
            }
        }
        release(0);
    }
}

// ---------------------------------------------------------------------------------------------------------
static const double EDGES[] = {0.0, -0.0, 1e-30, -1e-30, 16.0, -16.0, 88.0, -88.0,
                               1e4, -1e4, 1e15,  -1e15,  1e20, -1e20, 1e30};

// input of an activation: random, with the edges strewn in
static floatX *activation_input(size_t n) {
    floatX *x = random_array(n);
    for (size_t i = 0; i < n; i++) {
        size_t edge = i / 5 % (sizeof EDGES / sizeof *EDGES);
        x[i] = to_floatX((float)(i % 5 == 3 ? EDGES[edge] : 8.0 * at(x, i)));
    }
    return x;
}

static void test_gelu(void **unused) {
    (void)unused;
    EACH_SIZE(N, F) {
        size_t n = N * F, bytes = n * sizeof(floatX);
        const floatX *inp = activation_input(n), *dout = random_array(n);
        void *first_out = NULL, *first_dinp = NULL;
        EACH_THREADS(k) {
            floatX *out = poisoned(n), *dinp = poisoned(n), *in_place = copy(dout, bytes);
            gelu_forward(out, inp, N, F);
            gelu_backward(dinp, dout, inp, N, F);
            gelu_backward(in_place, in_place, inp, N, F);
            for (size_t i = 0; i < n; i++) {
                double x = at(inp, i), root = sqrt(2.0 / acos(-1.0)),
                       t = tanh(root * (x + 0.044715 * x * x * x));
                double slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
                NEAR(out, i, 0.5 * x * (1 + t), 2e-7);
                NEAR(dinp, i, at(dout, i) * slope, 1e-6);
            }
            assert_memory_equal(in_place, dinp, bytes);
            SAME_BITS(k, first_out, out, bytes);
            SAME_BITS(k, first_dinp, dinp, bytes);
        }
        release(0);
    }
}

static void test_swiglu(void **unused) {
    (void)unused;
    EACH_SIZE(N, F) {
        size_t n = N * F, bytes = n * sizeof(floatX);
        floatX *inp = random_array(2 * n);
        const floatX *gates = activation_input(n), *dout = random_array(n);
        for (size_t i = 0; i < n; i++) inp[i / F * 2 * F + i % F] = gates[i];
        void *first_out = NULL, *first_dinp = NULL;
        EACH_THREADS(k) {
            floatX *out = poisoned(n), *dinp = poisoned(2 * n);
            swiglu_forward(out, inp, N, F);
            swiglu_backward(dinp, dout, inp, N, F);
            for (size_t i = 0; i < n; i++) {
                size_t gate = i / F * 2 * F + i % F, up = gate + F;
                double g = at(inp, gate), u = at(inp, up), s = 1.0 / (1.0 + exp(-g)), d = at(dout, i);
                NEAR(out, i, g * s * u, 1e-30);
                NEAR(dinp, gate, d * u * (s + g * s * (1 - s)), 1e-6);
                NEAR(dinp, up, d * g * s, 1e-30);
            }
            SAME_BITS(k, first_out, out, bytes);
            SAME_BITS(k, first_dinp, dinp, 2 * bytes);
        }
        release(0);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Losses and gradients over a vocabulary in `slices` unequal slices, each in rows of its own width (1: all of it, Vp).
static void cross_entropy_in(size_t slices, float *losses, floatX *logits, const int32_t *targets, float dloss,
                             size_t N, size_t V, size_t Vp) {
    size_t begin[4], width[3];
    for (size_t i = 0; i <= slices; i++) begin[i] = V * i * (i + 1) / (slices * (slices + 1));
    floatX *piece[3];
    float *max[3], *sum[3], *target[3], *all_max = poisoned32(N), *all_sum = poisoned32(N),
                                        *all_target = poisoned32(N);
    for (size_t i = 0; i < slices; i++) {
        size_t count = begin[i + 1] - begin[i];
        width[i] = slices == 1 ? Vp : count + (size_t[]){0, 200, 3}[i];
        piece[i] = poisoned(N * width[i]); // NaN in the padding
        for (size_t n = 0; n < N; n++)
            memcpy(piece[i] + n * width[i], logits + n * Vp + begin[i], count * sizeof *logits);
        max[i] = poisoned32(N), sum[i] = poisoned32(N), target[i] = poisoned32(N);
        cross_entropy_local(max[i], sum[i], target[i], piece[i], targets, (int32_t)begin[i], N, count,
                            width[i]);
        for (size_t n = 0; n < N; n++) {
            if (targets[n] < 0)
                assert_true(max[i][n] == -INFINITY && sum[i][n] == 0.0f && target[i][n] == 0.0f);
            all_max[n] = i == 0 ? max[i][n] : fmaxf(all_max[n], max[i][n]);
            all_target[n] = i == 0 ? target[i][n] : all_target[n] + target[i][n];
        }
    }
    for (size_t i = 0; i < slices; i++) {
        cross_entropy_rescale(sum[i], max[i], all_max, N);
        for (size_t n = 0; n < N; n++) {
            if (targets[n] < 0) assert_true(sum[i][n] == 0.0f); // not NaN, though all maxima are −inf
            all_sum[n] = i == 0 ? sum[i][n] : all_sum[n] + sum[i][n];
        }
    }
    memset(logits, 0, dloss == 0.0f ? 0 : N * Vp * sizeof *logits);
    for (size_t i = 0; i < slices; i++) {
        size_t count = begin[i + 1] - begin[i];
        float *mine = poisoned32(N);
        cross_entropy_global(mine, piece[i], targets, (int32_t)begin[i], all_max, all_sum, all_target, dloss, N,
                             count, width[i]);
        if (i > 0) assert_memory_equal(mine, losses, N * sizeof *mine); // every rank has the same
        memcpy(losses, mine, N * sizeof *mine);
        for (size_t n = 0; n < N; n++) {
            memcpy(logits + n * Vp + begin[i], piece[i] + n * width[i], count * sizeof *logits);
            for (size_t v = count; v < width[i] && dloss != 0.0f; v++)
                assert_true(at(piece[i], n * width[i] + v) == 0.0);
        }
    }
}

static void check_cross_entropy(size_t slices, size_t N, size_t V, size_t Vp, Kind kind) {
    const floatX *values = filled(N, V, kind);
    floatX *logits = poisoned(N * Vp);
    for (size_t i = 0; i < N * Vp; i++) logits[i] = to_floatX(NAN); // stays in the padding: it must not be read
    int32_t *targets = array(N * sizeof *targets);
    for (size_t n = 0; n < N; n++) {
        memcpy(logits + n * Vp, values + n * V, V * sizeof *logits);
        targets[n] = (int32_t)(n % 4 == 0 ? V - 1 : n % 4 == 1 ? n % V : (uniform() + 1) / 2 * (double)V);
        if (n % 4 == 3) targets[n] = -1;
    }
    const float dloss = 0.25f;
    size_t bytes = N * Vp * sizeof *logits;
    void *first_grad = NULL;
    EACH_THREADS(k) {
        float *losses = poisoned32(N), *losses_only = poisoned32(N);
        floatX *grad = copy(logits, bytes), *kept = copy(logits, bytes);
        cross_entropy_in(slices, losses, grad, targets, dloss, N, V, Vp);
        cross_entropy_in(slices, losses_only, kept, targets, 0.0f, N, V, Vp);
        assert_memory_equal(kept, logits, bytes);
        assert_memory_equal(losses_only, losses, N * sizeof *losses);
        for (size_t n = 0; n < N; n++) {
            const floatX *row = logits + n * Vp;
            double max = -INFINITY, sum = 0.0;
            for (size_t v = 0; v < V; v++) max = fmax(max, at(row, v));
            for (size_t v = 0; v < V; v++) sum += exp(at(row, v) - max);
            bool counts = targets[n] >= 0;
            double target = counts ? at(row, (size_t)targets[n]) : 0.0;
            NEAR32(losses, n, counts ? log(sum) + max - target : 0.0, counts ? sum_error(V) : 0.0);
            for (size_t v = 0; v < Vp; v++) {
                double want = v < V && counts ? exp(at(row, v) - max) / sum - (v == (size_t)targets[n]) : 0.0;
                NEAR(grad, n * Vp + v, dloss * want, v < V && counts ? 0.1 * sum_error(V) : 0.0);
            }
        }
        SAME_BITS(k, first_grad, grad, bytes);
    }
    release(0);
}

static void test_cross_entropy(void **unused) {
    (void)unused;
    static const size_t cases[][3] = {{1, 1, 1},   {1, 1, 8},      {1, 7, 64},      {17, 7, 8},
                                      {5, 48, 64}, {17, 250, 256}, {9, 1600, 1600}, {4, 50257, 50304}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int kind = 0; kind < N_KINDS; kind++)
            for (size_t slices = 1; slices <= 3; slices++)
                if (slices < 2 || cases[i][1] >= 7)
                    check_cross_entropy(slices, cases[i][0], cases[i][1], cases[i][2], (Kind)kind);
    }
}

// A NaN among the logits must show in the loss, whatever its sign and place; nothing but −inf has no loss either.
static void test_cross_entropy_nan(void **unused) {
    (void)unused;
    for (size_t slices = 1; slices <= 3; slices++) {
        for (size_t i = 0; i <= 2 * 40; i++) {
            float loss = 0.0f;
            int32_t target = 0;
            floatX *logits = random_array(40);
            if (i < 2 * 40) logits[i / 2] = to_floatX(i % 2 ? NAN : -NAN);
            for (size_t v = 0; v < 40 && i == 2 * 40; v++) logits[v] = to_floatX(-INFINITY);
            cross_entropy_in(slices, &loss, logits, &target, 1.0f, 1, 40, 40);
            assert_true(isnan(loss));
            release(0);
        }
    }
}

// Logits of −inf, in some slices no others: they take no mass.
static void test_cross_entropy_infinite(void **unused) {
    (void)unused;
    for (size_t slices = 1; slices <= 3; slices++) {
        float loss;
        int32_t target = 39;
        floatX *logits = random_array(40);
        for (size_t v = 0; v < 38; v++) logits[v] = to_floatX(-INFINITY);
        logits[38] = logits[39];
        cross_entropy_in(slices, &loss, logits, &target, 1.0f, 1, 40, 40);
        NEAR32(&loss, 0, log(2.0), 0);
        for (size_t v = 0; v < 40; v++) NEAR(logits, v, v < 38 ? 0.0 : v == 38 ? 0.5 : -0.5, 0);
        release(0);
    }
}

// ---------------------------------------------------------------------------------------------------------
static void check_adamw(size_t n, const size_t *decay, size_t n_decay, bool with_master, bool with_grad32) {
    enum { STEPS = 5 };
    floatX *weight0 = random_array(n);
    size_t kept = n_arrays;
    uint64_t seed = state;
    void *first_weight = NULL, *first_m = NULL;
    EACH_THREADS(k) {
        state = seed;
        floatX *weight = copy(weight0, n * sizeof *weight);
        float *master = with_master ? poisoned32(n) : NULL, *m = poisoned32(n), *v = poisoned32(n);
        double *want_w = array(n * sizeof *want_w), *want_m = array(n * sizeof *want_w);
        double *want_v = array(n * sizeof *want_w);
        for (size_t i = 0; i < n; i++) {
            want_w[i] = at(weight0, i);
            if (with_master) master[i] = to_float(weight0[i]);
            want_m[i] = want_v[i] = m[i] = v[i] = 0.0f;
        }
        for (long step = 1; step <= STEPS; step++) {
            AdamW a = {.lr = 0.01f * (float)step,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .eps = 1e-5f,
                       .weight_decay = 0.2f,
                       .grad_scale = 0.5f,
                       .step = step,
                       .decay = decay,
                       .n_decay = n_decay};
            floatX *grad = random_array(n);
            float *grad32 = NULL;
            for (size_t i = 0; i < n; i += 3) grad[i] = to_floatX(0.0f); // never a gradient: the decay alone
            if (with_grad32) {
                grad32 = poisoned32(n);
                for (size_t i = 0; i < n; i++) grad32[i] = to_float(grad[i]) * 1.001f; // not a bf16
            }
            adamw_update(weight, master, m, v, with_grad32 ? NULL : grad, grad32, n, a);
            for (size_t i = 0; i < n; i++) {
                double g = a.grad_scale * (with_grad32 ? grad32[i] : at(grad, i)), wd = 0.0;
                for (size_t d = 0; d < n_decay; d++)
                    if (decay[2 * d] <= i && i < decay[2 * d + 1]) wd = a.weight_decay;
                want_m[i] = a.beta1 * want_m[i] + (1.0 - a.beta1) * g;
                want_v[i] = a.beta2 * want_v[i] + (1.0 - a.beta2) * g * g;
                double m_hat = want_m[i] / (1.0 - pow(a.beta1, (double)step));
                double v_hat = want_v[i] / (1.0 - pow(a.beta2, (double)step));
                want_w[i] -= a.lr * (m_hat / (sqrt(v_hat) + a.eps) + wd * want_w[i]);
            }
        }
        for (size_t i = 0; i < n; i++) {
            NEAR32(m, i, want_m[i], 1e-7);
            NEAR32(v, i, want_v[i], 1e-7);
            if (with_master) {
                NEAR32(master, i, want_w[i], 1e-6);
                assert_true(weight[i] == to_floatX(master[i]));
            } else {
                NEAR(weight, i, want_w[i], sizeof(floatX) == 2 ? STEPS * REL : 1e-6);
            }
        }
        SAME_BITS(k, first_weight, weight, n * sizeof *weight);
        SAME_BITS(k, first_m, m, n * sizeof *m);
    }
    release(kept);
    release(0);
}

static void test_adamw(void **unused) {
    (void)unused;
    static const size_t sizes[] = {1, 17, 3077};
    for (size_t i = 0; i < 3; i++) {
        size_t n = sizes[i];
        const size_t all[] = {0, n}, one[] = {n / 3, n / 2},
                     some[] = {0, n / 4, n / 4, n / 4, n / 2, n - n / 8};
        for (int option = 0; option < 4; option++) {
            check_adamw(n, NULL, 0, option & 1, option & 2);
            check_adamw(n, all, 1, option & 1, option & 2);
            check_adamw(n, one, 1, option & 1, option & 2);
            check_adamw(n, some, 3, option & 1, option & 2);
        }
    }
}

static void test_gradient_accumulate(void **unused) {
    (void)unused;
    EACH_SIZE(N, C) {
        size_t n = N * C;
        EACH_THREADS(k) {
            float *acc = poisoned32(n);
            double *want = array(n * sizeof *want);
            for (size_t i = 0; i < n; i++) acc[i] = 100.0f, want[i] = 100.0;
            for (int micro = 0; micro < 3; micro++) {
                floatX *grad = random_array(n);
                for (size_t i = 0; i < n; i++) want[i] += at(grad, i);
                gradient_accumulate(acc, grad, n);
                for (size_t i = 0; i < n; i++) assert_true(to_float(grad[i]) == 0.0f);
            }
            for (size_t i = 0; i < n; i++) NEAR32(acc, i, want[i], 0);
        }
        release(0);
    }
}

static void test_grad_norm(void **unused) {
    (void)unused;
    static const size_t sizes[] = {1, 17, 4095, 4096, 4097, 100003};
    for (size_t i = 0; i < 6; i++) {
        size_t n = sizes[i];
        for (int with_grad32 = 0; with_grad32 < 2; with_grad32++) {
            floatX *grad = random_array(n);
            float *grad32 = poisoned32(n);
            for (int giant = 1; giant >= 0; giant--) {
                // 1: its square is no float; 0: the small terms must not be lost
                grad[n / 2] = to_floatX(giant ? 3e30f : 0.0f);
                double want = 2.0, first = 0.0;
                for (size_t j = 0; j < n; j++) {
                    grad32[j] = to_float(grad[j]) * 1.001f;
                    double g = with_grad32 ? grad32[j] : to_float(grad[j]);
                    want += g * g;
                }
                EACH_THREADS(k) {
                    double sum = 2.0;
                    void *workspace = array(grad_norm_workspace(n));
                    grad_norm_squared(&sum, with_grad32 ? NULL : grad, with_grad32 ? grad32 : NULL, n,
                                      workspace);
                    near_at(__LINE__, "grad_norm", n, sum, want, 1e-13, 0);
                    if (k == 0) first = sum;
                    assert_memory_equal(&first, &sum, sizeof sum);
                }
            }
            double sum = 0.0;
            grad[n - 1] = to_floatX(NAN);
            grad_norm_squared(&sum, grad, NULL, n, array(grad_norm_workspace(n)));
            assert_true(isnan(sum));
            release(0);
        }
    }
}

int main(int argc, char **argv) {
    (void)argc;
    // Three threads on fewer cores must sleep, not spin, while they wait for each other; OpenMP reads this at start.
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp),
        cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_sum_is_wide),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_residual),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_gelu),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_cross_entropy_nan),
        cmocka_unit_test(test_cross_entropy_infinite),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_gradient_accumulate),
        cmocka_unit_test(test_grad_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

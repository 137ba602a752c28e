// Flash and naive attention, forward and backward, against the formulas in double precision, written out below.
//
// Rows are wider than their heads: what lies between holds NaN in inputs, where reading it would spoil a result, and in
// outputs, where it must still be there afterwards. What is to be written starts as NaN too.
#include <math.h>
#include <omp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "kernels/kernels.h"

static const bool fp32 = sizeof(floatX) == sizeof(float);

static uint64_t seed = 1;
static float uniform(void) { // −1..1
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(seed >> 32) / 2147483648.0f;
}

// ---------------------------------------------------------------------------------------------------------
// one problem: its inputs, its outputs, and what they ought to be

typedef struct {
    floatX *q, *k, *v, *do_, *o, *dq, *dk, *dv, *p;
    float *lse;
} Tensors;

typedef struct {
    double *o, *lse, *dq, *dk, *dv, *p; // heads side by side, nothing between the rows
} Reference;

static size_t rows_q(AttentionShape s) {
    return s.B * s.Tq;
}
static size_t rows_k(AttentionShape s) {
    return s.B * s.Tk;
}

static void *nan_filled(size_t bytes) {
    void *x = malloc(bytes + 1); // + 1: Tk may be 0
    memset(x, 0xff, bytes);
    return x;
}

static floatX *matrix(size_t rows, size_t stride) {
    return nan_filled(rows * stride * sizeof(floatX));
}

static void fill(floatX *x, size_t rows, size_t stride, size_t width) {
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < width; j++) x[i * stride + j] = to_floatX(2 * uniform());
}

static Tensors tensors(AttentionShape s) {
    Tensors t = {.q = matrix(rows_q(s), s.q_stride),
                 .k = matrix(rows_k(s), s.kv_stride),
                 .v = matrix(rows_k(s), s.kv_stride),
                 .do_ = matrix(rows_q(s), s.o_stride),
                 .o = matrix(rows_q(s), s.o_stride),
                 .dq = matrix(rows_q(s), s.q_stride),
                 .dk = matrix(rows_k(s), s.kv_stride),
                 .dv = matrix(rows_k(s), s.kv_stride),
                 .p = matrix(rows_q(s) * s.H, s.Tk),
                 .lse = nan_filled(s.B * s.H * s.Tq * sizeof(float))};
    fill(t.q, rows_q(s), s.q_stride, s.H * s.D);
    fill(t.k, rows_k(s), s.kv_stride, s.KV * s.D);
    fill(t.v, rows_k(s), s.kv_stride, s.KV * s.D);
    fill(t.do_, rows_q(s), s.o_stride, s.H * s.D);
    return t;
}

static void free_tensors(Tensors t) {
    free(t.q), free(t.k), free(t.v), free(t.do_), free(t.o), free(t.dq), free(t.dk), free(t.dv), free(t.p),
        free(t.lse);
}

static Reference reference(Tensors t, AttentionShape s) {
    size_t nq = rows_q(s) * s.H * s.D, nk = rows_k(s) * s.KV * s.D, D = s.D;
    Reference r = {.o = calloc(nq + 1, sizeof(double)),
                   .lse = calloc(s.B * s.H * s.Tq, sizeof(double)),
                   .dq = calloc(nq + 1, sizeof(double)),
                   .dk = calloc(nk + 1, sizeof(double)),
                   .dv = calloc(nk + 1, sizeof(double)),
                   .p = calloc(s.B * s.H * s.Tq * s.Tk + 1, sizeof(double))};
    double scale = 1 / sqrt((double)D);
    for (size_t b = 0; b < s.B; b++)
        for (size_t h = 0; h < s.H; h++)
            for (size_t i = 0; i < s.Tq; i++) {
                size_t row = b * s.Tq + i, kv = h / (s.H / s.KV), seen = s.causal ? i + 1 : s.Tk;
                double *p = r.p + ((b * s.H + h) * s.Tq + i) * s.Tk, *o = r.o + (row * s.H + h) * D;
                double *dq = r.dq + (row * s.H + h) * D, max = -INFINITY, sum = 0, delta = 0;
                const floatX *q = t.q + row * s.q_stride + h * D, *d_o = t.do_ + row * s.o_stride + h * D;
                for (size_t j = 0; j < seen; j++) {
                    for (size_t d = 0; d < D; d++)
                        p[j] +=
                            (double)to_float(q[d]) * to_float(t.k[(b * s.Tk + j) * s.kv_stride + kv * D + d]);
                    p[j] *= scale;
                    max = fmax(max, p[j]);
                }
                for (size_t j = 0; j < seen; j++) sum += p[j] = exp(p[j] - max);
                r.lse[(b * s.H + h) * s.Tq + i] = max + log(sum);
                for (size_t j = 0; j < seen; j++) {
                    p[j] /= sum;
                    for (size_t d = 0; d < D; d++)
                        o[d] += p[j] * to_float(t.v[(b * s.Tk + j) * s.kv_stride + kv * D + d]);
                }
                for (size_t d = 0; d < D; d++) delta += to_float(d_o[d]) * o[d];
                for (size_t j = 0; j < seen; j++) {
                    const floatX *k = t.k + (b * s.Tk + j) * s.kv_stride + kv * D;
                    const floatX *v = t.v + (b * s.Tk + j) * s.kv_stride + kv * D;
                    double dp = 0, *dk = r.dk + ((b * s.Tk + j) * s.KV + kv) * D;
                    double *dv = r.dv + ((b * s.Tk + j) * s.KV + kv) * D;
                    for (size_t d = 0; d < D; d++) dp += (double)to_float(d_o[d]) * to_float(v[d]);
                    double ds = p[j] * (dp - delta) * scale;
                    for (size_t d = 0; d < D; d++) {
                        dq[d] += ds * to_float(k[d]);
                        dk[d] += ds * to_float(q[d]);
                        dv[d] += p[j] * to_float(d_o[d]);
                    }
                }
            }
    return r;
}

static void free_reference(Reference r) {
    free(r.o), free(r.lse), free(r.dq), free(r.dk), free(r.dv), free(r.p);
}

// ---------------------------------------------------------------------------------------------------------

typedef enum { FLASH, NAIVE } Kind;

static void run(Kind kind, Tensors t, AttentionShape s) {
    size_t bytes = kind == FLASH ? flash_attention_workspace(s) : naive_attention_workspace(s), guard = 64;
    unsigned char *w = aligned_alloc(64, (bytes + guard + 63) / 64 * 64);
    memset(w, 0xff, bytes + guard);
    if (kind == FLASH) {
        flash_attention_forward(t.o, t.lse, t.q, t.k, t.v, s, w);
        flash_attention_backward(t.dq, t.dk, t.dv, t.do_, t.o, t.lse, t.q, t.k, t.v, s, w);
    } else {
        naive_attention_forward(t.o, t.p, t.q, t.k, t.v, s, w);
        naive_attention_backward(t.dq, t.dk, t.dv, t.do_, t.p, t.q, t.k, t.v, s, w);
    }
    for (size_t i = 0; i < guard; i++) assert_int_equal(w[bytes + i], 0xff);
    free(w);
}

// got [rows, width of stride] within `tolerance` of the largest value that the tensor should have, or of `least`.
static void check(const char *what, const floatX *got, size_t stride, const double *want, size_t rows,
                  size_t width, double tolerance, double least) {
    double largest = least;
    for (size_t i = 0; i < rows * width; i++) largest = fmax(largest, fabs(want[i]));
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < stride; j++) {
            double x = to_float(got[i * stride + j]);
            if (j >= width ? !isnan(x) : !(fabs(x - want[i * width + j]) <= tolerance * largest))
                fail_msg("%s [%zu,%zu]: %.9g, want %.9g (largest %.3g)", what, i, j, x,
                         j < width ? want[i * width + j] : NAN, largest);
        }
}

static double largest(const floatX *x, size_t rows, size_t stride, size_t width) {
    double max = 0;
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < width; j++) max = fmax(max, fabs(to_float(x[i * stride + j])));
    return max;
}

static void check_all(Kind kind, Tensors t, Reference r, AttentionShape s, double tolerance) {
    run(kind, t, s);
    check("o", t.o, s.o_stride, r.o, rows_q(s), s.H * s.D, tolerance, 0);
    check("dq", t.dq, s.q_stride, r.dq, rows_q(s), s.H * s.D, tolerance,
          largest(t.k, rows_k(s), s.kv_stride, s.KV * s.D)); // dq may cancel to nothing: T = 1
    check("dk", t.dk, s.kv_stride, r.dk, rows_k(s), s.KV * s.D, tolerance,
          largest(t.q, rows_q(s), s.q_stride, s.H * s.D));
    check("dv", t.dv, s.kv_stride, r.dv, rows_k(s), s.KV * s.D, tolerance, 0);
    if (kind == NAIVE) {
        check("p", t.p, s.Tk, r.p, rows_q(s) * s.H, s.Tk, tolerance, 0);
        for (size_t i = 0; s.causal && i < rows_q(s) * s.H; i++)
            for (size_t j = i % s.Tq + 1; j < s.Tk; j++) assert_true(to_float(t.p[i * s.Tk + j]) == 0);
    } else
        for (size_t i = 0; i < s.B * s.H * s.Tq; i++)
            if (!(fabs(t.lse[i] - r.lse[i]) <= 2e-6 * fmax(1, fabs(r.lse[i]))))
                fail_msg("lse [%zu]: %.9g, want %.9g", i, (double)t.lse[i], r.lse[i]);
}

static double tolerance(void) {
    return fp32 ? 1e-5 : 3e-2;
}

static void check_shape(AttentionShape s) {
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        Tensors t = tensors(s);
        Reference r = reference(t, s);
        check_all(kind, t, r, s, tolerance());
        free_reference(r), free_tensors(t);
    }
}

static AttentionShape shape(size_t B, size_t Tq, size_t Tk, size_t H, size_t KV, size_t D, bool causal) {
    return (AttentionShape){B, Tq, Tk, H, KV, D, H * D + 5, KV * D + 3, H * D + 1, .causal = causal};
}

static void test_lengths(void **state) {
    (void)state;
    const size_t T[] = {1, 2, 17, 63, 64, 65, 127, 191, 192, 193, 260};
    for (size_t i = 0; i < sizeof T / sizeof *T; i++) {
        check_shape(shape(1, T[i], T[i], 2, 2, 16, true));
        check_shape(shape(1, T[i], 1, 2, 2, 16, false));
        check_shape(shape(1, 3, T[i], 2, 2, 16, false));
        check_shape(shape(1, T[i], 261 - T[i], 2, 2, 16, false));
    }
}

static void test_head_sizes(void **state) {
    (void)state;
    const size_t D[] = {1, 3, 16, 48, 64, 72, 96, 127, 128, 160};
    for (size_t i = 0; i < sizeof D / sizeof *D; i++) {
        check_shape(shape(1, 70, 70, 1, 1, D[i], true));
        check_shape(shape(1, 66, 200, 2, 1, D[i], false));
    }
}

static void test_groups(void **state) {
    (void)state;
    int threads = omp_get_max_threads();
    for (int n = 1; n <= 3; n++) {
        omp_set_num_threads(n);
        check_shape(shape(3, 67, 67, 6, 2, 8, true));
        check_shape(shape(2, 5, 130, 4, 1, 8, false));
        check_shape(shape(2, 130, 9, 3, 3, 8, false));
    }
    omp_set_num_threads(threads);
}

// q, k and v as three places in one row, and their gradients likewise, as the block of a model has them.
static void test_packed(void **state) {
    (void)state;
    size_t B = 2, T = 75, H = 4, KV = 2, D = 12, row = (H + 2 * KV) * D;
    AttentionShape s = {B, T, T, H, KV, D, row, row, H * D, .causal = true};
    floatX *qkv = matrix(B * T, row), *dqkv = matrix(B * T, row);
    fill(qkv, B * T, row, row);
    Tensors t = tensors(s), packed = t;
    packed.q = qkv, packed.k = qkv + H * D, packed.v = packed.k + KV * D;
    packed.dq = dqkv, packed.dk = dqkv + H * D, packed.dv = packed.dk + KV * D;
    Reference r = reference(packed, s);
    double *want = malloc(B * T * row * sizeof *want);
    for (size_t i = 0; i < B * T; i++) {
        memcpy(want + i * row, r.dq + i * H * D, H * D * sizeof *want);
        memcpy(want + i * row + H * D, r.dk + i * KV * D, KV * D * sizeof *want);
        memcpy(want + i * row + (H + KV) * D, r.dv + i * KV * D, KV * D * sizeof *want);
    }
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        run(kind, packed, s);
        check("o", t.o, s.o_stride, r.o, B * T, H * D, tolerance(), 0);
        check("dqkv", dqkv, row, want, B * T, row, tolerance(), 0);
        memset(dqkv, 0xff, B * T * row * sizeof *dqkv);
    }
    free(want), free(qkv), free(dqkv), free_reference(r), free_tensors(t);
}

// ---------------------------------------------------------------------------------------------------------
// what random numbers do not give

typedef enum { ONE_HOT, EQUAL_KEYS, ZERO, HUGE_SCORES, RISING, FALLING, STRUCTURES } Structure;

// Integers, and √D = 4, so that even scores of 835 million, among which one key wins, are exact. Rising scores raise the
// running maximum with every key.
static void structure(Tensors t, AttentionShape s, Structure which) {
    for (size_t i = 0; i < rows_k(s); i++)
        for (size_t d = 0; d < s.D; d++) {
            float unit = d == i % s.D, key[] = {d == 3, 2, 0, (float)(256 * i), (float)i, -(float)i};
            float query[] = {unit, 1, 0, 4096, 1, 1};
            t.q[i * s.q_stride + d] = to_floatX(query[which]);
            t.k[i * s.kv_stride + d] = to_floatX(key[which]);
            if (which == ONE_HOT || which == ZERO)
                t.v[i * s.kv_stride + d] = to_floatX(which == ONE_HOT ? unit : 0);
        }
}

static void test_structured(void **state) {
    (void)state;
    for (Structure which = 0; which < STRUCTURES; which++)
        for (int causal = 0; causal <= 1; causal++)
            for (Kind kind = FLASH; kind <= NAIVE; kind++) {
                AttentionShape s = shape(1, 200, 200, 1, 1, 16, causal);
                Tensors t = tensors(s);
                structure(t, s, which);
                Reference r = reference(t, s);
                check_all(kind, t, r, s, fp32 ? 1e-5 : 0.1); // a rounded o: 200 queries' errors add up in dk
                free_reference(r), free_tensors(t);
            }
}

// Softmax over two keys is a logistic curve: with D = 1, q = −x, keys 0 and 1 and values 0 and 1, o = 1/(1 + e^x). Down
// to where floats end, relative to itself: the exponential's own accuracy.
static void test_exponential(void **state) {
    (void)state;
    enum { N = 8192 };
    AttentionShape s = {1, N, 2, 1, 1, 1, 1, 1, 1, .causal = false};
    Tensors t = tensors(s);
    for (size_t i = 0; i < N; i++) t.q[i] = to_floatX(-(float)i / 64); // to −128
    t.k[0] = t.v[0] = to_floatX(0), t.k[1] = t.v[1] = to_floatX(1);
    run(FLASH, t, s);
    for (size_t i = 0; i < N; i++) {
        double x = to_float(t.q[i]), want = 1 / (1 + exp(-x)), got = to_float(t.o[i]);
        double bound = x < -86.5 ? 1.2e-37 : want * (fp32 ? 4e-7 : 4e-3 * 2);
        if (!(fabs(got - want) <= bound)) fail_msg("at %g: %.9g, want %.9g", x, got, want);
    }
    assert_true(to_float(t.o[N - 1]) == 0);
    free_tensors(t);
}

static void check_zero(const floatX *x, size_t rows, size_t stride, size_t width) {
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < width; j++) assert_true(to_float(x[i * stride + j]) == 0);
}

// Queries without keys: no output, no gradient, and no NaN. A ring has such blocks.
static void test_no_keys(void **state) {
    (void)state;
    AttentionShape s = shape(1, 70, 0, 2, 1, 8, false);
    Tensors t = tensors(s);
    run(FLASH, t, s);
    check_zero(t.o, 70, s.o_stride, 16);
    check_zero(t.dq, 70, s.q_stride, 16);
    for (size_t i = 0; i < 140; i++) assert_true(t.lse[i] == -INFINITY);
    free_tensors(t);

    // rows whose lse says that they saw nothing get and give nothing, beside keys that others see
    s = shape(1, 70, 100, 2, 1, 8, false);
    t = tensors(s);
    for (size_t i = 0; i < 140; i++) t.lse[i] = -INFINITY;
    fill(t.o, 70, s.o_stride, 16);
    void *w = aligned_alloc(64, (flash_attention_workspace(s) + 63) / 64 * 64);
    flash_attention_backward(t.dq, t.dk, t.dv, t.do_, t.o, t.lse, t.q, t.k, t.v, s, w);
    check_zero(t.dq, 70, s.q_stride, 16);
    check_zero(t.dk, 100, s.kv_stride, 8);
    check_zero(t.dv, 100, s.kv_stride, 8);
    free(w), free_tensors(t);
}

// The backward of some of the keys, given o and lse over all of them, is those keys' share: what a ring relies on.
static void test_part_of_the_keys(void **state) {
    (void)state;
    AttentionShape s = shape(1, 70, 210, 2, 1, 16, false), part = s;
    Tensors t = tensors(s);
    Reference r = reference(t, s);
    run(FLASH, t, s);
    size_t first = 77;
    floatX *dq[2];
    for (int i = 0; i < 2; i++) {
        part.Tk = i == 0 ? first : s.Tk - first;
        size_t at = i == 0 ? 0 : first * s.kv_stride;
        dq[i] = matrix(rows_q(s), s.q_stride);
        void *w = aligned_alloc(64, (flash_attention_workspace(part) + 63) / 64 * 64);
        flash_attention_backward(dq[i], t.dk + at, t.dv + at, t.do_, t.o, t.lse, t.q, t.k + at, t.v + at, part,
                                 w);
        free(w);
    }
    for (size_t i = 0; i < rows_q(s) * s.q_stride; i++)
        dq[0][i] = to_floatX(to_float(dq[0][i]) + to_float(dq[1][i]));
    check("dq", dq[0], s.q_stride, r.dq, rows_q(s), s.H * s.D, tolerance(), 0);
    check("dk", t.dk, s.kv_stride, r.dk, rows_k(s), s.KV * s.D, tolerance(), 0);
    check("dv", t.dv, s.kv_stride, r.dv, rows_k(s), s.KV * s.D, tolerance(), 0);
    free(dq[0]), free(dq[1]), free_reference(r), free_tensors(t);
}

// ---------------------------------------------------------------------------------------------------------
// a ring: the keys come in blocks, of sequences that lie apart, and fp32 sums take each block's part

typedef struct {
    float *o, *lse, *delta, *dq, *dk, *dv;
} Sums;

static float *filled_with(float x, size_t n) {
    float *sums = malloc(n * sizeof *sums);
    for (size_t i = 0; i < n; i++) sums[i] = x;
    return sums;
}

static void free_sums(Sums r) {
    free(r.o), free(r.lse), free(r.delta), free(r.dq), free(r.dk), free(r.dv);
}

// [rows, width] of rows `stride` apart, as check() takes them: rounded to floatX, which costs less than its bars
static floatX *as_floatX(const float *x, size_t rows, size_t stride) {
    floatX *y = malloc(rows * stride * sizeof *y);
    for (size_t i = 0; i < rows * stride; i++) y[i] = to_floatX(x[i]);
    return y;
}

static void check_sum(const char *name, const float *x, size_t stride, const double *want, size_t rows,
                      size_t width, double other) {
    floatX *y = as_floatX(x, rows, stride);
    for (size_t i = 0; i < rows; i++) memset(y + i * stride + width, 0xff, (stride - width) * sizeof *y);
    check(name, y, stride, want, rows, width, tolerance(), other);
    free(y);
}

static AttentionShape part_of(AttentionShape s, size_t queries, size_t keys, bool causal) {
    s.q_tokens = s.Tq, s.kv_tokens = s.Tk;
    s.Tq = queries, s.Tk = keys, s.causal = causal;
    return s;
}

// Queries from `query` on (in each sequence) meet keys [first, first + part.Tk).
static void ring_forward(Sums r, Tensors t, AttentionShape part, size_t query, size_t first) {
    void *w = aligned_alloc(64, (flash_attention_workspace(part) + 63) / 64 * 64);
    flash_attention_forward_block(r.o + query * part.o_stride, r.lse + query, t.q + query * part.q_stride,
                                  t.k + first * part.kv_stride, t.v + first * part.kv_stride, part, w);
    free(w);
}

static void ring_backward(Sums r, Tensors t, AttentionShape part, size_t query, size_t first) {
    void *w = aligned_alloc(64, (flash_attention_workspace(part) + 63) / 64 * 64);
    size_t kv = first * part.kv_stride;
    flash_attention_backward_block(r.dq + query * part.q_stride, r.dk + kv, r.dv + kv,
                                   t.do_ + query * part.o_stride, r.delta + query, r.lse + query,
                                   t.q + query * part.q_stride, t.k + kv, t.v + kv, part, w);
    free(w);
}

typedef struct {
    size_t query, first, queries, keys;
    bool causal;
} Visit;

// The visits, one after another, give what the whole of s gives. Where no block has been yet, o may hold anything finite.
static void check_ring(AttentionShape s, Tensors t, const Visit *visits, size_t n) {
    Reference r = reference(t, s);
    size_t nq = rows_q(s), nk = rows_k(s), rows = s.B * s.H * s.Tq;
    Sums sums = {filled_with(1e30f, nq * s.o_stride),
                 filled_with(-INFINITY, rows),
                 filled_with(NAN, rows),
                 filled_with(0, nq * s.q_stride),
                 filled_with(0, nk * s.kv_stride),
                 filled_with(0, nk * s.kv_stride)};
    for (size_t i = 0; i < n; i++)
        ring_forward(sums, t, part_of(s, visits[i].queries, visits[i].keys, visits[i].causal), visits[i].query,
                     visits[i].first);
    check_sum("o", sums.o, s.o_stride, r.o, nq, s.H * s.D, 0);
    for (size_t i = 0; i < nq; i++)
        for (size_t j = s.H * s.D; j < s.o_stride; j++) assert_true(sums.o[i * s.o_stride + j] == 1e30f);
    for (size_t i = 0; i < rows; i++)
        if (!(fabs(sums.lse[i] - r.lse[i]) <= 2e-6 * fmax(1, fabs(r.lse[i]))))
            fail_msg("lse [%zu]: %.9g, want %.9g", i, (double)sums.lse[i], r.lse[i]);

    for (size_t i = 0; i < nq; i++)
        for (size_t j = 0; j < s.H * s.D; j++) t.o[i * s.o_stride + j] = to_floatX(sums.o[i * s.o_stride + j]);
    flash_attention_delta(sums.delta, t.do_, t.o, s);
    for (size_t i = 0; i < n; i++)
        ring_backward(sums, t, part_of(s, visits[i].queries, visits[i].keys, visits[i].causal), visits[i].query,
                      visits[i].first);
    check_sum("dq", sums.dq, s.q_stride, r.dq, nq, s.H * s.D, largest(t.k, nk, s.kv_stride, s.KV * s.D));
    check_sum("dk", sums.dk, s.kv_stride, r.dk, nk, s.KV * s.D, largest(t.q, nq, s.q_stride, s.H * s.D));
    check_sum("dv", sums.dv, s.kv_stride, r.dv, nk, s.KV * s.D, 0);
    free_sums(sums), free_reference(r);
}

// Blocks of equal and unequal lengths, one of them empty, in any order; each sequence lies apart from the next.
static void test_ring_of_blocks(void **state) {
    (void)state;
    const size_t cuts[][5] = {{0, 210}, {0, 1, 210}, {0, 105, 105, 210}, {0, 64, 192, 193, 210}};
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
        AttentionShape s = shape(2, 70, 210, 4, 2, 16, false);
        Tensors t = tensors(s);
        Visit visits[4] = {{0}};
        size_t n = 0;
        for (; n < 4 && cuts[c][n] < 210; n++)
            visits[n] = (Visit){0, cuts[c][n], 70, cuts[c][n + 1] - cuts[c][n], false};
        check_ring(s, t, visits, n);
        Visit first = visits[0];
        visits[0] = visits[n - 1], visits[n - 1] = first;
        check_ring(s, t, visits, n);
        free_tensors(t);
    }
}

// Causal attention in four chunks, two and two of which meet: what ring attention does with zig-zag chunks.
static void test_ring_of_chunks(void **state) {
    (void)state;
    AttentionShape s = shape(2, 140, 140, 2, 1, 24, true);
    Tensors t = tensors(s);
    const Visit visits[] = {{0, 0, 35, 35, true},
                            {35, 35, 35, 35, true},
                            {70, 70, 70, 70, true},
                            {35, 0, 105, 35, false},
                            {70, 35, 70, 35, false}};
    check_ring(s, t, visits, sizeof visits / sizeof *visits);
    free_tensors(t);
}

// Scores whose exponentials no float holds, the largest first, last, or alone.
static void test_ring_of_big_scores(void **state) {
    (void)state;
    const Structure kinds[] = {HUGE_SCORES, RISING, FALLING};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        AttentionShape s = shape(1, 200, 200, 1, 1, 16, false);
        Tensors t = tensors(s);
        structure(t, s, kinds[i]);
        for (size_t row = 0; row < s.Tq; row++) // one query's do is enough; 200 would add their roundings up
            for (size_t d = 0; row > 0 && d < s.D; d++) t.do_[row * s.o_stride + d] = to_floatX(0);
        const Visit visits[] = {{0, 100, 200, 50, false}, {0, 0, 200, 100, false}, {0, 150, 200, 50, false}};
        check_ring(s, t, visits, 3);
        free_tensors(t);
    }
}

// Keys whose scores overflow to −∞ weigh nothing, also where they fill a whole tile or block before the others come. A
// row that has only such is NaN.
static void test_scores_that_overflow(void **state) {
    (void)state;
    AttentionShape s = shape(1, 5, 230, 1, 1, 16, false);
    Tensors t = tensors(s);
    for (size_t i = 0; i < s.Tq; i++) t.q[i * s.q_stride] = to_floatX(1e30f);
    for (size_t i = 0; i < s.Tk; i++) t.k[i * s.kv_stride] = to_floatX(i < 200 ? -1e30f : 0);
    const Visit visits[] = {{0, 0, 5, 100, false}, {0, 100, 5, 130, false}};
    Reference r = reference(t, s);
    for (Kind kind = FLASH; kind <= NAIVE; kind++) check_all(kind, t, r, s, tolerance());
    check_ring(s, t, visits, 2);

    s.Tk = 200;
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        memset(t.o, 0, rows_q(s) * s.o_stride * sizeof *t.o);
        run(kind, t, s);
        for (size_t i = 0; i < s.Tq; i++) assert_true(isnan(to_float(t.o[i * s.o_stride])));
    }
    free_reference(r), free_tensors(t);
}

// Two empty blocks merge to an empty one: o and lse stay to the last bit, and so they do after real blocks.
static void test_ring_of_nothing(void **state) {
    (void)state;
    AttentionShape s = shape(1, 70, 30, 2, 1, 8, false), empty = part_of(s, 70, 0, false);
    Tensors t = tensors(s);
    Sums sums = {.o = filled_with(7, 70 * s.o_stride), .lse = filled_with(-INFINITY, 140)};
    float *o = malloc(70 * s.o_stride * sizeof *o), *lse = malloc(140 * sizeof *lse);
    for (int blocks = 0; blocks < 2; blocks++) {
        if (blocks > 0) ring_forward(sums, t, part_of(s, 70, 30, false), 0, 0);
        memcpy(o, sums.o, 70 * s.o_stride * sizeof *o), memcpy(lse, sums.lse, 140 * sizeof *lse);
        ring_forward(sums, t, empty, 0, 0);
        ring_forward(sums, t, empty, 0, 0);
        assert_memory_equal(sums.o, o, 70 * s.o_stride * sizeof *o);
        assert_memory_equal(sums.lse, lse, 140 * sizeof *lse);
    }
    free(o), free(lse), free_sums(sums), free_tensors(t);
}

// ---------------------------------------------------------------------------------------------------------

static void assert_same(Tensors a, Tensors b, AttentionShape s) {
    assert_memory_equal(a.o, b.o, rows_q(s) * s.o_stride * sizeof(floatX));
    assert_memory_equal(a.dq, b.dq, rows_q(s) * s.q_stride * sizeof(floatX));
    assert_memory_equal(a.dk, b.dk, rows_k(s) * s.kv_stride * sizeof(floatX));
    assert_memory_equal(a.dv, b.dv, rows_k(s) * s.kv_stride * sizeof(floatX));
}

// The same bits again, and with any number of threads.
static void test_deterministic(void **state) {
    (void)state;
    AttentionShape s = shape(2, 300, 300, 6, 2, 24, true);
    int threads = omp_get_max_threads();
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        Tensors first = {0};
        for (int n = 0; n <= 3; n++) {
            omp_set_num_threads(n > 0 ? n : 2);
            seed = 9;
            Tensors t = tensors(s);
            run(kind, t, s);
            if (n == 0)
                first = t;
            else
                assert_same(first, t, s), free_tensors(t);
        }
        free_tensors(first);
    }
    omp_set_num_threads(threads);
}

// --matmul bf16 in an fp32 build: inputs that are rounded already make no difference; o shows that p is too.
static void test_rounded_inputs(void **state) {
    (void)state;
    if (!fp32) skip();
    AttentionShape s = shape(2, 70, 70, 4, 2, 16, true);
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        seed = 3;
        Tensors t = tensors(s);
        seed = 3;
        Tensors rounded = tensors(s);
        floatX *inputs[] = {rounded.q, rounded.k, rounded.v, rounded.do_};
        size_t sizes[] = {rows_q(s) * s.q_stride, rows_k(s) * s.kv_stride, rows_k(s) * s.kv_stride,
                          rows_q(s) * s.o_stride};
        for (int x = 0; x < 4; x++)
            for (size_t i = 0; i < sizes[x]; i++)
                inputs[x][i] = to_floatX(bf16_to_float(float_to_bf16(to_float(inputs[x][i]))));
        Reference r = reference(rounded, s);
        matmul_inputs_bf16 = true;
        run(kind, t, s);
        check_all(kind, rounded, r, s, 1e-2);
        matmul_inputs_bf16 = false;
        assert_same(t, rounded, s);

        double error = 0;
        for (size_t i = 0; i < rows_q(s); i++)
            for (size_t j = 0; j < s.H * s.D; j++)
                error = fmax(error, fabs(to_float(t.o[i * s.o_stride + j]) - r.o[i * s.H * s.D + j]));
        assert_true(error > 1e-4);
        free_reference(r), free_tensors(t), free_tensors(rounded);
    }
}

// One query of powers of two: dk = ds · q/4 and dv = p · do are single products, as round as ds and p were.
static void test_rounded_p_and_ds(void **state) {
    (void)state;
    if (!fp32) skip();
    AttentionShape s = shape(1, 1, 50, 1, 1, 16, false);
    for (Kind kind = FLASH; kind <= NAIVE; kind++) {
        Tensors t = tensors(s);
        for (size_t d = 0; d < s.D; d++) t.q[d] = t.do_[d] = to_floatX(d % 2 ? 0.5f : -1);
        matmul_inputs_bf16 = true;
        run(kind, t, s);
        matmul_inputs_bf16 = false;
        for (size_t i = 0; i < rows_k(s) * s.kv_stride; i++) {
            float dk = to_float(t.dk[i]), dv = to_float(t.dv[i]);
            if (i % s.kv_stride < s.D)
                assert_true(bf16_to_float(float_to_bf16(dk)) == dk && bf16_to_float(float_to_bf16(dv)) == dv);
        }
        free_tensors(t);
    }
}

static void count_flops(Kind kind, AttentionShape s, double *forward, double *backward) {
    Tensors t = tensors(s);
    kernel_flops = (KernelFlops){0};
    run(kind, t, s);
    *forward = kernel_flops.attention_forward, *backward = kernel_flops.attention_backward;
    free_tensors(t);
}

static void test_flops(void **state) {
    (void)state;
    double forward, backward;
    for (int causal = 0; causal <= 1; causal++) {
        AttentionShape s = shape(2, 300, 300, 4, 2, 8, causal);
        double one_product = 2.0 * s.B * s.H * s.Tq * s.Tk * s.D;
        count_flops(NAIVE, s, &forward, &backward);
        assert_true(forward == 2 * one_product && backward == 4 * one_product);
        count_flops(FLASH, s, &forward, &backward);
        assert_true(backward * 2 == forward * 5);
        if (!causal) assert_true(forward == 2 * one_product);
        // the triangle, and at most half a tile of 64 a query more
        else
            assert_true(forward > one_product && forward < one_product * (1 + 66.0 / 300));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_head_sizes),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_structured),
        cmocka_unit_test(test_exponential),
        cmocka_unit_test(test_no_keys),
        cmocka_unit_test(test_part_of_the_keys),
        cmocka_unit_test(test_deterministic),
        cmocka_unit_test(test_rounded_inputs),
        cmocka_unit_test(test_rounded_p_and_ds),
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_ring_of_blocks),
        cmocka_unit_test(test_ring_of_chunks),
        cmocka_unit_test(test_ring_of_big_scores),
        cmocka_unit_test(test_scores_that_overflow),
        cmocka_unit_test(test_ring_of_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

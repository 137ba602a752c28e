// Attention twice: flash, which never holds the matrix of scores, and naive, which does.
//
// Flash walks over the keys one tile at a time. The softmax of a query needs the largest score and the sum of
// exponentials over *all* its keys; of those seen so far it keeps the max m and the sum l, and when a later tile raises
// m, what was summed before is scaled down by e^(m_old − m_new). At the end o = acc / l, and lse = m + log l is all that
// the backward needs to compute any p = e^(s − lse) again.
//
//            queries ──> (tiles of 64)
//     keys  ┌────┬────┬────┬────┐
//      │    │╲░░░│░░░░│░░░░│░░░░│   causal: only ░ is computed, and the half tiles on the diagonal. The last tile of keys
//      v    │  ╲░│░░░░│░░░░│░░░░│   ends where the tile of queries ends.
//           └────┤╲░░░│░░░░│░░░░│
//                │  ╲░│░░░░│░░░░│   A tile is kept [keys, queries]: what belongs to a query (m, l, lse, delta) then
//                └────┤╲░░░│░░░░│   lies along the vector registers, and no max or sum ever goes across one.
//
//     forward    s = q kᵀ/√D    o = p v                                                       2 products
//     backward   s again   dp = do vᵀ   dv += pᵀ do   dq += ds k   dk += dsᵀ q                5 products
//                where p = e^(s − lse),  ds = p ∘ (dp − delta),  delta = Σ_d do ∘ o  (= Σ_keys p ∘ dp)
//
// Cost: lse [B,H,Tq] kept instead of p [B,H,Tq,Tk], for one product more. The products are small sgemms; where they take
// bf16, p and ds are rounded too, and sums stay fp32. The threads share (sequence, head, query tile) forward and
// (sequence, key/value head) backward, whose dk and dv are summed over query heads and tiles in a fixed order.
// Around a ring (Liu et al. 2023) the keys come in blocks. A block's o_b and lse_b join what earlier ones gave, in fp32:
//     o ← σ(lse − lse_b) o + σ(lse_b − lse) o_b        lse ← log(e^lse + e^lse_b)
// A row that sees no key of a block (lse_b = −∞) stays as it is, also one that has seen none so far. Without a ring
// the walk is the same, and its result is written instead.
// FlashAttention: Dao et al. 2022; o scaled by 1/l once, at the end: Dao 2023; online softmax: Milakov & Gimelshein 2018.
#include <math.h>
#include "attention_shape.h"
#include "blas.h"
#include "vecmath.h"

enum {
    BQ = 64,  // queries of a tile
    BK = 192, // keys of a tile: up to D = 80, BQ·BK·D is small enough for OpenBLAS to skip its packing
};

// n floats, rounded up to whole cache lines, so that threads share none.
static size_t lines(size_t n) {
    return (n + 15) / 16 * 16;
}

static float *take(float **workspace, size_t n) {
    float *taken = *workspace;
    *workspace += lines(n);
    return taken;
}

// The part of the workspace that is this thread's.
static float *my_part(float *workspace, size_t floats) {
    return workspace + floats * (size_t)omp_get_thread_num();
}

// out [D,BQ] = x [rows,D] transposed: with the short side D as rows, sgemm runs a third faster.
static void transpose(float *out, const float *x, size_t rows, size_t D) {
    for (size_t i = 0; i < rows; i++)
        for (size_t d = 0; d < D; d++) out[d * BQ + i] = x[i * D + d];
}

static void store_rows(floatX *out, size_t stride, const float *x, size_t rows, size_t D) {
    for (size_t i = 0; i < rows; i++)
        for (size_t d = 0; d < D; d++) out[i * stride + d] = to_floatX(x[i * D + d]);
}

// Where results of [tokens, heads, D] go: written to `out`, or into the fp32 `sum` of a ring (the other is NULL).
typedef struct {
    floatX *out;
    float *sum;
} Result;

static void put_gradient(Result to, size_t place, size_t stride, const float *x, size_t rows, size_t D) {
    if (to.out) return store_rows(to.out + place, stride, x, rows, D);
    for (size_t i = 0; i < rows; i++)
        for (size_t d = 0; d < D; d++) to.sum[place + i * stride + d] += x[i * D + d];
}

static float one_over_root(size_t D) {
    return 1 / sqrtf((float)D);
}

// How many keys queries 0..end−1 see.
static size_t keys_before(size_t end, AttentionShape s) {
    return s.causal ? smaller(end, s.Tk) : s.Tk;
}

// scores [nk,BQ] = k [nk,D] · qt [D,BQ] / √D, −∞ where key k0 + j comes after query q0 + i.
static void tile_scores(float *scores, const float *k, const float *qt, size_t k0, size_t nk, size_t q0,
                        size_t nq, AttentionShape s) {
    sgemm('N', 'N', nk, nq, s.D, one_over_root(s.D), k, s.D, qt, BQ, 0, scores, BQ);
    for (size_t j = k0 < q0 ? q0 - k0 : 0; s.causal && j < nk; j++) {
        size_t before = smaller(nq, k0 + j - q0);
        for (size_t i = 0; i < before; i++) scores[j * BQ + i] = -INFINITY;
    }
}

// Turns scores [nk,BQ] into p = e^(s − m), brings m and l [BQ] up to date, and says in scale [BQ] what the sums so far
// are to be multiplied with. Scores may have overflowed to −∞: while a query has no others, 0 takes the place of its m.
static void online_softmax(float *scores, float *m, float *l, float *scale, size_t nk, size_t nq) {
    float shift[BQ];
    memcpy(scale, m, nq * sizeof *m);
    for (size_t j = 0; j < nk; j++)
#pragma omp simd
        for (size_t i = 0; i < nq; i++) m[i] = scores[j * BQ + i] > m[i] ? scores[j * BQ + i] : m[i];
#pragma omp simd
    for (size_t i = 0; i < nq; i++) {
        shift[i] = m[i] == -INFINITY ? 0 : m[i];
        scale[i] = fast_expf(scale[i] - shift[i]);
        l[i] *= scale[i];
    }
    for (size_t j = 0; j < nk; j++)
#pragma omp simd
        for (size_t i = 0; i < nq; i++) {
            float p = fast_expf(scores[j * BQ + i] - shift[i]);
            scores[j * BQ + i] = p;
            l[i] += p;
        }
}

static float sigmoid(float x) {
    return 1 / (1 + expf(-x));
}

// A row of a block's results joins those of earlier blocks; no exp of a difference that could overflow.
static void merge_row(float *o, float *lse, const float *o_block, float lse_block, size_t D) {
    if (lse_block == -INFINITY) return;
    float keep = sigmoid(*lse - lse_block), take = sigmoid(lse_block - *lse);
    *lse = fmaxf(*lse, lse_block) + log1pf(expf(-fabsf(*lse - lse_block)));
    for (size_t d = 0; d < D; d++) o[d] = keep * o[d] + take * o_block[d];
}

// The floats of one thread, backward; the forward takes the first six of the arrays.
static size_t thread_floats(AttentionShape s) {
    return 5 * BQ * s.D + 2 * BK * s.D + 2 * BK * BQ + 2 * lines(s.Tk * s.D);
}

static void forward(Result o, float *lse, const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                    void *workspace) {
    s = with_tokens(s);
    size_t D = s.D, pairs = 0; // of a query and a key, as computed
    blas_single_thread();
#pragma omp parallel for collapse(3) schedule(dynamic) reduction(+ : pairs)
    for (size_t b = 0; b < s.B; b++)
        for (size_t h = 0; h < s.H; h++)
            for (size_t q0 = 0; q0 < s.Tq; q0 += BQ) {
                float *w = my_part(workspace, thread_floats(s));
                float *q_tile = take(&w, BQ * D), *qt = take(&w, D * BQ), *acc = take(&w, BQ * D);
                float *k_tile = take(&w, BK * D), *v_tile = take(&w, BK * D), *p = take(&w, BK * BQ);
                size_t nq = smaller(BQ, s.Tq - q0), keys = keys_before(q0 + nq, s);
                float m[BQ], l[BQ], scale[BQ];
                for (size_t i = 0; i < nq; i++) m[i] = -INFINITY, l[i] = 0;
                memset(acc, 0, nq * D * sizeof *acc);
                load_rows(q_tile, q + at(b, s.q_tokens, q0, s.q_stride, h, D), s.q_stride, nq, D);
                transpose(qt, q_tile, nq, D);

                for (size_t k0 = 0; k0 < keys; k0 += BK) {
                    size_t nk = smaller(BK, keys - k0),
                           kv_at = at(b, s.kv_tokens, k0, s.kv_stride, h / (s.H / s.KV), D);
                    load_rows(k_tile, k + kv_at, s.kv_stride, nk, D);
                    load_rows(v_tile, v + kv_at, s.kv_stride, nk, D);
                    tile_scores(p, k_tile, qt, k0, nk, q0, nq, s);
                    online_softmax(p, m, l, scale, nk, nq);
                    round_inputs(p, nk * BQ);
                    for (size_t i = 0; i < nq; i++)
                        for (size_t d = 0; d < D; d++) acc[i * D + d] *= scale[i];
                    sgemm('T', 'N', nq, D, nk, 1, p, BQ, v_tile, D, 1, acc, D);
                    pairs += nq * nk;
                }
                float *rows_lse = lse + (b * s.H + h) * s.q_tokens + q0;
                size_t o_at = at(b, s.q_tokens, q0, s.o_stride, h, D);
                for (size_t i = 0; i < nq; i++) {
                    float row_lse = m[i] + logf(l[i]); // no keys: −∞ + log 0
                    for (size_t d = 0; d < D; d++) acc[i * D + d] *= keys == 0 ? 0 : 1 / l[i]; // only −∞: NaN
                    if (o.sum)
                        merge_row(o.sum + o_at + i * s.o_stride, rows_lse + i, acc + i * D, row_lse, D);
                    else
                        rows_lse[i] = row_lse;
                }
                if (o.out) store_rows(o.out + o_at, s.o_stride, acc, nq, D);
            }
    kernel_flops.attention_forward += 2 * 2.0 * pairs * D;
}

void flash_attention_forward(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace) {
    forward((Result){.out = o}, lse, q, k, v, s, workspace);
}

void flash_attention_forward_block(float *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                   AttentionShape s, void *workspace) {
    forward((Result){.sum = o}, lse, q, k, v, s, workspace);
}

void flash_attention_delta(float *delta, const floatX *do_, const floatX *o, AttentionShape s) {
    s = with_tokens(s);
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < s.B; b++)
        for (size_t t = 0; t < s.Tq; t++)
            for (size_t h = 0; h < s.H; h++) {
                size_t place = at(b, s.q_tokens, t, s.o_stride, h, s.D);
                float row[s.D], sum = 0;
                load_rows(row, do_ + place, 0, 1, s.D); // as products take it
#pragma omp simd reduction(+ : sum)
                for (size_t d = 0; d < s.D; d++) sum += row[d] * to_float(o[place + d]);
                delta[(b * s.H + h) * s.q_tokens + t] = sum;
            }
}

static void backward(Result dq, Result dk, Result dv, const floatX *do_, const float *delta, const float *lse,
                     const floatX *q, const floatX *k, const floatX *v, AttentionShape s, void *workspace) {
    s = with_tokens(s);
    size_t D = s.D, pairs = 0;
    float root = one_over_root(D);
    blas_single_thread();
#pragma omp parallel for collapse(2) schedule(dynamic) reduction(+ : pairs)
    for (size_t b = 0; b < s.B; b++)
        for (size_t kv = 0; kv < s.KV; kv++) {
            float *w = my_part(workspace, thread_floats(s));
            float *q_tile = take(&w, BQ * D), *qt = take(&w, D * BQ), *dq_acc = take(&w, BQ * D);
            float *k_tile = take(&w, BK * D), *v_tile = take(&w, BK * D), *p = take(&w, BK * BQ);
            float *do_tile = take(&w, BQ * D), *dot = take(&w, D * BQ), *ds = take(&w, BK * BQ);
            float *dk_acc = take(&w, s.Tk * D), *dv_acc = take(&w, s.Tk * D);
            memset(dk_acc, 0, s.Tk * D * sizeof *dk_acc);
            memset(dv_acc, 0, s.Tk * D * sizeof *dv_acc);

            size_t group = s.H / s.KV;
            for (size_t h = kv * group; h < (kv + 1) * group; h++)
                for (size_t q0 = 0; q0 < s.Tq; q0 += BQ) {
                    size_t nq = smaller(BQ, s.Tq - q0), keys = keys_before(q0 + nq, s);
                    size_t q_at = at(b, s.q_tokens, q0, s.q_stride, h, D);
                    load_rows(q_tile, q + q_at, s.q_stride, nq, D);
                    load_rows(do_tile, do_ + at(b, s.q_tokens, q0, s.o_stride, h, D), s.o_stride, nq, D);
                    transpose(qt, q_tile, nq, D);
                    transpose(dot, do_tile, nq, D);
                    memset(dq_acc, 0, nq * D * sizeof *dq_acc);
                    const float *rows_delta = delta + (b * s.H + h) * s.q_tokens + q0;
                    float shift[BQ];
                    for (size_t i = 0; i < nq; i++) {
                        float row = lse[(b * s.H + h) * s.q_tokens + q0 + i];
                        shift[i] = row == -INFINITY ? INFINITY : row; // no keys: p = e^−∞ = 0
                    }

                    for (size_t k0 = 0; k0 < keys; k0 += BK) {
                        size_t nk = smaller(BK, keys - k0), kv_at = at(b, s.kv_tokens, k0, s.kv_stride, kv, D);
                        load_rows(k_tile, k + kv_at, s.kv_stride, nk, D);
                        load_rows(v_tile, v + kv_at, s.kv_stride, nk, D);
                        tile_scores(p, k_tile, qt, k0, nk, q0, nq, s);
                        sgemm('N', 'N', nk, nq, D, 1, v_tile, D, dot, BQ, 0, ds,
                              BQ); // dp; ds follows in its place
                        for (size_t j = 0; j < nk; j++)
#pragma omp simd
                            for (size_t i = 0; i < nq; i++) {
                                p[j * BQ + i] = fast_expf(p[j * BQ + i] - shift[i]);
                                ds[j * BQ + i] = p[j * BQ + i] * (ds[j * BQ + i] - rows_delta[i]);
                            }
                        round_inputs(p, nk * BQ);
                        round_inputs(ds, nk * BQ);
                        sgemm('N', 'N', nk, D, nq, 1, p, BQ, do_tile, D, 1, dv_acc + k0 * D, D);
                        sgemm('N', 'N', nk, D, nq, root, ds, BQ, q_tile, D, 1, dk_acc + k0 * D, D);
                        sgemm('T', 'N', nq, D, nk, root, ds, BQ, k_tile, D, 1, dq_acc, D);
                        pairs += nq * nk;
                    }
                    put_gradient(dq, q_at, s.q_stride, dq_acc, nq, D);
                }
            size_t kv_at = at(b, s.kv_tokens, 0, s.kv_stride, kv, D);
            put_gradient(dk, kv_at, s.kv_stride, dk_acc, s.Tk, D);
            put_gradient(dv, kv_at, s.kv_stride, dv_acc, s.Tk, D);
        }
    kernel_flops.attention_backward += 5 * 2.0 * pairs * D;
}

static size_t delta_floats(AttentionShape s) {
    return lines(s.B * s.H * with_tokens(s).q_tokens);
}

void flash_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *o,
                              const float *lse, const floatX *q, const floatX *k, const floatX *v,
                              AttentionShape s, void *workspace) {
    float *delta = workspace;
    flash_attention_delta(delta, do_, o, s);
    backward((Result){.out = dq}, (Result){.out = dk}, (Result){.out = dv}, do_, delta, lse, q, k, v, s,
             delta + delta_floats(s));
}

void flash_attention_backward_block(float *dq, float *dk, float *dv, const floatX *do_, const float *delta,
                                    const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, void *workspace) {
    backward((Result){.sum = dq}, (Result){.sum = dk}, (Result){.sum = dv}, do_, delta, lse, q, k, v, s,
             workspace);
}

size_t flash_attention_workspace(AttentionShape s) {
    return (delta_floats(s) + (size_t)omp_get_max_threads() * thread_floats(s)) * sizeof(float);
}

size_t flash_attention_most_channels(void) {
    return SIZE_MAX;
}

// ---------------------------------------------------------------------------------------------------------
// naive: rows of p [Tq,Tk] as the textbook has them, a tile of queries and all their keys at a time.

static size_t naive_floats(AttentionShape s) {
    return 3 * BQ * s.D + 2 * BQ * s.Tk + 4 * lines(s.Tk * s.D);
}

void naive_attention_forward(floatX *o, floatX *p, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace) {
    size_t D = s.D, Tk = s.Tk;
    blas_single_thread();
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (size_t b = 0; b < s.B; b++)
        for (size_t h = 0; h < s.H; h++)
            for (size_t q0 = 0; q0 < s.Tq; q0 += BQ) {
                float *w = my_part(workspace, naive_floats(s));
                float *q_tile = take(&w, BQ * D), *acc = take(&w, BQ * D), *rows = take(&w, BQ * Tk);
                float *keys = take(&w, Tk * D), *values = take(&w, Tk * D);
                size_t nq = smaller(BQ, s.Tq - q0), kv_at = at(b, Tk, 0, s.kv_stride, h / (s.H / s.KV), D);
                load_rows(q_tile, q + at(b, s.Tq, q0, s.q_stride, h, D), s.q_stride, nq, D);
                load_rows(keys, k + kv_at, s.kv_stride, Tk, D);
                load_rows(values, v + kv_at, s.kv_stride, Tk, D);

                sgemm('N', 'T', nq, Tk, D, one_over_root(D), q_tile, D, keys, D, 0, rows, Tk);
                for (size_t i = 0; i < nq; i++) {
                    float *row = rows + i * Tk, m = -INFINITY, l = 0;
                    size_t seen = keys_before(q0 + i + 1, s);
                    for (size_t j = 0; j < seen; j++) m = row[j] > m ? row[j] : m;
#pragma omp simd reduction(+ : l)
                    for (size_t j = 0; j < seen; j++) {
                        row[j] = fast_expf(row[j] - m);
                        l += row[j];
                    }
                    for (size_t j = 0; j < Tk; j++) row[j] = j < seen ? row[j] / l : 0;
                }
                store_rows(p + ((b * s.H + h) * s.Tq + q0) * Tk, Tk, rows, nq, Tk);
                round_inputs(rows, nq * Tk);
                sgemm('N', 'N', nq, D, Tk, 1, rows, Tk, values, D, 0, acc, D);
                store_rows(o + at(b, s.Tq, q0, s.o_stride, h, D), s.o_stride, acc, nq, D);
            }
    kernel_flops.attention_forward += 2 * 2.0 * s.B * s.H * s.Tq * Tk * D;
}

void naive_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *p,
                              const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                              void *workspace) {
    size_t D = s.D, Tk = s.Tk, group = s.H / s.KV;
    float root = one_over_root(D);
    blas_single_thread();
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (size_t b = 0; b < s.B; b++)
        for (size_t kv = 0; kv < s.KV; kv++) {
            float *w = my_part(workspace, naive_floats(s));
            float *q_tile = take(&w, BQ * D), *dq_tile = take(&w, BQ * D), *rows = take(&w, BQ * Tk);
            float *keys = take(&w, Tk * D), *values = take(&w, Tk * D);
            float *do_tile = take(&w, BQ * D), *ds = take(&w, BQ * Tk);
            float *dk_acc = take(&w, Tk * D), *dv_acc = take(&w, Tk * D);
            size_t kv_at = at(b, Tk, 0, s.kv_stride, kv, D);
            load_rows(keys, k + kv_at, s.kv_stride, Tk, D);
            load_rows(values, v + kv_at, s.kv_stride, Tk, D);
            memset(dk_acc, 0, Tk * D * sizeof *dk_acc);
            memset(dv_acc, 0, Tk * D * sizeof *dv_acc);

            for (size_t h = kv * group; h < (kv + 1) * group; h++)
                for (size_t q0 = 0; q0 < s.Tq; q0 += BQ) {
                    size_t nq = smaller(BQ, s.Tq - q0), q_at = at(b, s.Tq, q0, s.q_stride, h, D);
                    load_rows(q_tile, q + q_at, s.q_stride, nq, D);
                    load_rows(do_tile, do_ + at(b, s.Tq, q0, s.o_stride, h, D), s.o_stride, nq, D);
                    load_rows(rows, p + ((b * s.H + h) * s.Tq + q0) * Tk, Tk, nq, Tk);

                    sgemm('N', 'T', nq, Tk, D, 1, do_tile, D, values, D, 0, ds, Tk); // dp
                    for (size_t i = 0; i < nq; i++) {
                        float delta = 0;
#pragma omp simd reduction(+ : delta)
                        for (size_t j = 0; j < Tk; j++) delta += rows[i * Tk + j] * ds[i * Tk + j];
#pragma omp simd
                        for (size_t j = 0; j < Tk; j++)
                            ds[i * Tk + j] = rows[i * Tk + j] * (ds[i * Tk + j] - delta);
                    }
                    round_inputs(ds, nq * Tk);
                    sgemm('T', 'N', Tk, D, nq, 1, rows, Tk, do_tile, D, 1, dv_acc, D);
                    sgemm('T', 'N', Tk, D, nq, root, ds, Tk, q_tile, D, 1, dk_acc, D);
                    sgemm('N', 'N', nq, D, Tk, root, ds, Tk, keys, D, 0, dq_tile, D);
                    store_rows(dq + q_at, s.q_stride, dq_tile, nq, D);
                }
            store_rows(dk + kv_at, s.kv_stride, dk_acc, Tk, D);
            store_rows(dv + kv_at, s.kv_stride, dv_acc, Tk, D);
        }
    kernel_flops.attention_backward += 4 * 2.0 * s.B * s.H * s.Tq * Tk * D;
}

size_t naive_attention_workspace(AttentionShape s) {
    return (size_t)omp_get_max_threads() * naive_floats(s) * sizeof(float);
}

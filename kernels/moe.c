// moe: a mixture of experts but for its MLPs. A router scores E experts for each token and sends it to the best k; copies are
// sorted by expert, so that each finds its rows side by side; and what comes back is summed, each copy weighed by its gate.
//
//     inp [N,C]     pairs, k = 2        sorted by expert: out [N·k,C]
//                                       place
//     token 0       0·B  1·C            0: A of 1   ┐ expert A
//     token 1       2·A  3·C      ->    1: A of 2   ┘                   permute writes a row to k places, combine
//     token 2       4·A  5·B            2: B of 0   ┐ expert B          sums the k rows that stand there
//                                       3: B of 2   ┘
//                                       4: C of 0   ┐ expert C
//                                       5: C of 1   ┘
//
// The choice of experts has no gradient; the gates have: of the chosen s_j, g_j = s_j / Σ s (k > 1), so
// ds_j = (dg_j − Σ_i dg_i g_i) / Σ s, and from scores to logits by the derivative of softmax or sigmoid.
// All of the router is fp32, and each row is summed alike however many there are, so that a token's experts are the same
// wherever it is computed.
// Cost: the router's product, 2·N·C·E operations and twice that backward; permute and combine move N·k rows each.
//
// Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers" (the balance loss);
// DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", §2.1.2 (sigmoid, groups, bias).
#include <math.h>
#include "kernels/kernels.h"

#define TINY 1e-20f // beside a sum of scores that are all 0

// ---- the router's product ---------------------------------------------------------------------------------------------------

void moe_router_forward(float *logits, const floatX *inp, const floatX *weight, size_t N, size_t C, size_t E) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t e = 0; e < E; e++) {
            const floatX *x = inp + n * C, *w = weight + e * C;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t c = 0; c < C; c++) sum += to_float(x[c]) * to_float(w[c]);
            logits[n * E + e] = sum;
        }
    kernel_flops.gemm_forward += 2.0 * N * C * E;
}

void moe_router_backward_input(floatX *dinp, const float *dlogits, const floatX *weight, size_t N, size_t C,
                               size_t E) {
    enum { STRIP = 64 }; // channels at a time
#pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t first = 0; first < C; first += STRIP) {
            size_t width = C - first < STRIP ? C - first : STRIP;
            floatX *d = dinp + n * C + first;
            float sum[STRIP];
            for (size_t c = 0; c < width; c++) sum[c] = to_float(d[c]);
            for (size_t e = 0; e < E; e++) {
                const floatX *w = weight + e * C + first;
                float dlogit = dlogits[n * E + e];
#pragma omp simd
                for (size_t c = 0; c < width; c++) sum[c] += dlogit * to_float(w[c]);
            }
            for (size_t c = 0; c < width; c++) d[c] = to_floatX(sum[c]);
        }
    kernel_flops.gemm_backward += 2.0 * N * C * E;
}

size_t moe_router_workspace(size_t N, size_t C, size_t E) {
    (void)N, (void)C, (void)E;
    return 0;
}

void moe_router_backward_weight(floatX *dweight, const float *dlogits, const floatX *inp, size_t N, size_t C,
                                size_t E, void *workspace) {
    (void)workspace;
    enum { STRIP = 64 };
#pragma omp parallel for collapse(2)
    for (size_t e = 0; e < E; e++)
        for (size_t first = 0; first < C; first += STRIP) {
            size_t width = C - first < STRIP ? C - first : STRIP;
            float sum[STRIP] = {0};
            for (size_t n = 0; n < N; n++) {
                const floatX *x = inp + n * C + first;
                float dlogit = dlogits[n * E + e];
#pragma omp simd
                for (size_t c = 0; c < width; c++) sum[c] += dlogit * to_float(x[c]);
            }
            floatX *d = dweight + e * C + first;
            for (size_t c = 0; c < width; c++) d[c] = to_floatX(to_float(d[c]) + sum[c]);
        }
    kernel_flops.gemm_backward += 2.0 * N * C * E;
}

// ---- the choice -------------------------------------------------------------------------------------------------------------

static void logits_to_scores(float *x, MoeRouting r) {
    float most = -INFINITY, sum = 0;
    for (size_t e = 0; e < r.experts; e++) most = fmaxf(most, x[e]);
    for (size_t e = 0; e < r.experts; e++) {
        x[e] = r.sigmoid ? 1 / (1 + expf(-x[e])) : expf(x[e] - most);
        sum += x[e];
    }
    for (size_t e = 0; e < r.experts && !r.sigmoid; e++) x[e] /= sum;
}

// The place in [begin, end) of the largest value that is not taken, the first of equal ones; end: all are taken.
static size_t best_of(const float *value, const bool *taken, size_t begin, size_t end) {
    size_t best = end;
    for (size_t i = begin; i < end; i++)
        if (!taken[i] && (best == end || value[i] > value[best])) best = i;
    return best;
}

// Takes the experts of all groups but the best ones out of the choice. Returns the margin between the last good group and the
// first bad one.
static float limit_groups(bool *taken, const float *value, MoeRouting r) {
    size_t each = r.experts / r.groups, top = r.topk / r.group_limit;
    float score[MOE_MOST_EXPERTS] = {0}, last = INFINITY;
    bool seen[MOE_MOST_EXPERTS] = {false}, good[MOE_MOST_EXPERTS] = {false};
    if (r.group_limit == r.groups) return INFINITY;
    if (top < 1) top = 1;
    for (size_t g = 0; g < r.groups; g++) {
        score[g] = 0;
        for (size_t i = 0; i < top && i < each; i++) {
            size_t e = best_of(value, seen, g * each, (g + 1) * each);
            seen[e] = true;
            score[g] += value[e];
        }
    }
    for (size_t i = 0; i < r.group_limit; i++) {
        size_t g = best_of(score, good, 0, r.groups);
        good[g] = true;
        last = score[g];
    }
    for (size_t e = 0; e < r.experts; e++) taken[e] = !good[e / each];
    return last - score[best_of(score, good, 0, r.groups)];
}

void moe_route(float *logits, int32_t *index, float *gate, float *margin, const float *bias, size_t N,
               MoeRouting r) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        float *score = logits + n * r.experts, value[MOE_MOST_EXPERTS], sum = 0;
        bool taken[MOE_MOST_EXPERTS] = {false};
        logits_to_scores(score, r);
        for (size_t e = 0; e < r.experts; e++) {
            value[e] = score[e] + (bias ? bias[e] : 0);
            if (isnan(value[e])) value[e] = -INFINITY;
        }
        margin[n] = limit_groups(taken, value, r);
        for (size_t j = 0; j < r.topk; j++) {
            size_t e = best_of(value, taken, 0, r.experts);
            taken[e] = true;
            index[n * r.topk + j] = (int32_t)e;
            gate[n * r.topk + j] = score[e];
            sum += score[e];
        }
        size_t next = best_of(value, taken, 0, r.experts);
        if (next < r.experts) margin[n] = fminf(margin[n], value[index[n * r.topk + r.topk - 1]] - value[next]);
        for (size_t j = 0; j < r.topk && r.topk > 1; j++) gate[n * r.topk + j] /= sum + TINY;
    }
}

void moe_route_backward(float *dlogits, const float *dgate, const int32_t *index, const float *gate,
                        const float *scores, const float *chosen, float factor, size_t first, size_t N,
                        size_t T, MoeRouting r) {
    size_t E = r.experts, k = r.topk;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const float *s = scores + n * E, *dg = dgate + n * k, *g = gate + n * k;
        const float *f = factor != 0 ? chosen + (first + n) / T * E : NULL;
        const int32_t *e_of = index + n * k;
        float *d = dlogits + n * E, sum = TINY, common = 0, mean = 0;
        for (size_t e = 0; e < E; e++) d[e] = f ? factor * f[e] : 0;
        for (size_t j = 0; j < k; j++) sum += s[e_of[j]], common += dg[j] * g[j];
        for (size_t j = 0; j < k; j++) d[e_of[j]] += k > 1 ? (dg[j] - common) / sum : dg[j];
        for (size_t e = 0; e < E; e++) mean += s[e] * d[e];
        for (size_t e = 0; e < E; e++) d[e] = s[e] * (r.sigmoid ? (1 - s[e]) * d[e] : d[e] - mean);
    }
}

// ---- what is counted --------------------------------------------------------------------------------------------------------

void moe_sequence_sums(float *sums, const int32_t *index, const float *scores, size_t first, size_t N, size_t B,
                       size_t T, MoeRouting r) {
    size_t E = r.experts, k = r.topk;
    for (size_t i = 0; i < 2 * B * E; i++) sums[i] = 0;
#pragma omp parallel for
    for (size_t b = 0; b < B; b++) {
        float *chosen = sums + b * E, *score = sums + (B + b) * E;
        size_t begin = b * T > first ? b * T - first : 0, end = (b + 1) * T > first ? (b + 1) * T - first : 0;
        for (size_t n = begin; n < end && n < N; n++) {
            for (size_t j = 0; j < k; j++) chosen[index[n * k + j]]++;
            for (size_t e = 0; e < E; e++) score[e] += scores[n * E + e];
        }
    }
}

void moe_balance_loss(double *sum, const float *sums, size_t B, size_t E) {
    for (size_t i = 0; i < B * E; i++) *sum += (double)sums[i] * (double)sums[B * E + i];
}

static uint64_t mix(uint64_t x) { // the finaliser of splitmix64 (Steele et al. 2014)
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void moe_observe(uint64_t *seen, float *least, const int32_t *index, const float *margin,
                 const int32_t *positions, uint64_t layer, uint64_t sequence, size_t first, size_t N, size_t T,
                 MoeRouting r) {
    size_t E = r.experts, each = E / r.groups;
    for (size_t n = 0; n < N; n++) {
        size_t b = (first + n) / T, t = (first + n) % T;
        uint64_t token = mix(mix(layer << 40 ^ (sequence + b)) ^ (uint64_t)positions[t]), met = 0;
        for (size_t j = 0; j < r.topk; j++) {
            const int32_t *e = index + n * r.topk;
            size_t i = 0;
            while (i < j && (size_t)e[i] / each != (size_t)e[j] / each) i++;
            met += i == j; // the first one of its group
            seen[e[j]]++;
            seen[E] += mix(token + (uint64_t)e[j] + 1);
        }
        seen[E + 1] += met;
        if (met > seen[E + 2]) seen[E + 2] = met;
        *least = fminf(*least, margin[n]);
    }
}

// ---- sorted by expert -------------------------------------------------------------------------------------------------------

void moe_sort(int32_t *place, int32_t *count, const int32_t *index, size_t pairs, size_t E) {
    int32_t next[MOE_MOST_EXPERTS];
    for (size_t e = 0; e < E; e++) count[e] = 0;
    for (size_t i = 0; i < pairs; i++) count[index[i]]++;
    next[0] = 0;
    for (size_t e = 1; e < E; e++) next[e] = next[e - 1] + count[e - 1];
    for (size_t i = 0; i < pairs; i++) place[i] = next[index[i]]++;
}

void moe_permute(floatX *out, const floatX *inp, const float *gate, const int32_t *place, size_t N, size_t k,
                 size_t C) {
#pragma omp parallel for
    for (size_t i = 0; i < N * k; i++) {
        const floatX *x = inp + i / k * C;
        floatX *y = out + (size_t)place[i] * C;
        float g = gate ? gate[i] : 1;
#pragma omp simd
        for (size_t c = 0; c < C; c++) y[c] = to_floatX(g * to_float(x[c]));
    }
}

void moe_combine(floatX *out, const floatX *rows, const float *gate, const int32_t *place, bool add, size_t N,
                 size_t k, size_t C) {
    enum { STRIP = 64 };
#pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (size_t first = 0; first < C; first += STRIP) {
            size_t width = C - first < STRIP ? C - first : STRIP;
            floatX *y = out + n * C + first;
            float sum[STRIP];
            for (size_t c = 0; c < width; c++) sum[c] = add ? to_float(y[c]) : 0;
            for (size_t j = 0; j < k; j++) {
                const floatX *x = rows + (size_t)place[n * k + j] * C + first;
                float g = gate ? gate[n * k + j] : 1;
#pragma omp simd
                for (size_t c = 0; c < width; c++) sum[c] += g * to_float(x[c]);
            }
            for (size_t c = 0; c < width; c++) y[c] = to_floatX(sum[c]);
        }
}

void moe_gate_backward(float *dgate, const floatX *dout, const floatX *rows, const int32_t *place, size_t N,
                       size_t k, size_t C) {
#pragma omp parallel for
    for (size_t i = 0; i < N * k; i++) {
        const floatX *d = dout + i / k * C, *x = rows + (size_t)place[i] * C;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t c = 0; c < C; c++) sum += to_float(d[c]) * to_float(x[c]);
        dgate[i] = sum;
    }
}

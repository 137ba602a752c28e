// cross entropy: how surprised the model is by the token that came, −log p(target), and the gradient in one go.
//
//     loss = log Σ exp(logits) − logits[target]        dlogits = (softmax(logits) − onehot(target)) · dloss
//
// The vocabulary lies in slices, one a rank; what lies apart meets in three numbers a row:
//
//     a row of logits   | rank 0's V columns | padding |     | rank 1's V columns | padding |    padding takes no mass,
//     local               max, sum, target's logit             max, sum, target's logit          and has gradient 0
//                               └────────────── the largest max of all ──────────────┘
//     rescale             sum, from that max                   sum, from that max
//                               └───────── all sums, and the target's logit ─────────┘
//     global              loss, gradient                       loss, gradient
//
// A group of one has a slice that is all of the vocabulary: the same steps, and nothing to tell anyone.
// The logits are by far the largest array of a small model, so their gradient takes their place. The row's maximum
// is subtracted before exp, which then never overflows (Σ ≥ 1). A row belongs to one thread.
// Cost: two reads and one write of [N,Vp]; with dloss = 0 one read. exp is computed twice rather than stored: in bf16
// there is no place to keep it exactly.
// Source: Megatron-LM (Shoeybi et al. 2019, §3).
#include "kernels/kernels.h"
#include "kernels/vecmath.h"

// A float's bits as an integer of the same order, and back; NaN is above inf. Compilers vectorise the maximum of
// integers, but not always that of floats, because of NaN.
static inline int32_t ordered_bits(int32_t bits) {
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static float row_max(const floatX *row, size_t V) {
    int32_t max = INT32_MIN;
#pragma omp simd reduction(max : max)
    for (size_t v = 0; v < V; v++) {
        float x = to_float(row[v]);
        int32_t bits;
        memcpy(&bits, &x, sizeof bits);
        bits = ordered_bits(bits);
        max = bits > max ? bits : max;
    }
    max = ordered_bits(max);
    float x;
    memcpy(&x, &max, sizeof x);
    return x;
}

typedef struct {
    float max, sum, target; // Σ exp(logits − max); the target's logit
} Row;

// A row without a target is as one without logits.
static Row row_read(const floatX *row, int32_t token, int32_t first, size_t V) {
    if (token < 0) return (Row){-INFINITY, 0.0f, 0.0f};
    float max = row_max(row, V), sum = 0.0f;
    float shift = max == -INFINITY ? 0.0f : max; // where all are −inf, so that exp makes 0 of them, not NaN
#pragma omp simd reduction(+ : sum)
    for (size_t v = 0; v < V; v++) sum += fast_expf(to_float(row[v]) - shift);
    size_t target = (size_t)token - (size_t)first; // below 0 it is very large
    return (Row){max, sum, target < V ? to_float(row[target]) : 0.0f};
}

static void row_write(floatX *row, float *loss, Row r, int32_t token, int32_t first, float dloss, size_t V,
                      size_t Vp) {
    *loss = token < 0 ? 0.0f : logf(r.sum) - (r.target - r.max);
    if (dloss == 0.0f) return;
    if (token < 0) V = 0; // nothing but padding
    float scale = dloss / r.sum;
#pragma omp simd
    for (size_t v = 0; v < V; v++) row[v] = to_floatX(fast_expf(to_float(row[v]) - r.max) * scale);
    size_t target = (size_t)token - (size_t)first;
    if (target < V) row[target] = to_floatX((fast_expf(r.target - r.max) / r.sum - 1.0f) * dloss);
    memset(row + V, 0, (Vp - V) * sizeof *row);
}

void cross_entropy_local(float *max, float *sum, float *target, const floatX *logits, const int32_t *targets,
                         int32_t first, size_t N, size_t V, size_t Vp) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        Row r = row_read(logits + n * Vp, targets[n], first, V);
        max[n] = r.max, sum[n] = r.sum, target[n] = r.target;
    }
}

// One exp a row, beside 2·V: not worth a second thread.
void cross_entropy_rescale(float *sum, const float *max, const float *global_max, size_t N) {
    for (size_t n = 0; n < N; n++)
        if (max[n] != global_max[n]) // a sum of nothing (both −inf) stays 0
            sum[n] *= fast_expf(max[n] - global_max[n]);
}

void cross_entropy_global(float *losses, floatX *logits, const int32_t *targets, int32_t first,
                          const float *global_max, const float *sum, const float *target, float dloss, size_t N,
                          size_t V, size_t Vp) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        Row r = {global_max[n], sum[n], target[n]};
        row_write(logits + n * Vp, losses + n, r, targets[n], first, dloss, V, Vp);
    }
}

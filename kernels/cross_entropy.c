// cross entropy: how surprised the model is by the token that came, −log p(target), and the gradient in one go.
//
//     loss = log Σ exp(logits) − logits[target]        dlogits = (softmax(logits) − onehot(target)) · dloss
//
//     a row of logits   |  0 … V−1: softmax  |  V … Vp−1: padding, takes no mass, gradient 0  |
//
// The logits are by far the largest array of a small model, so their gradient takes their place. The row's maximum
// is subtracted before exp, which then never overflows (Σ ≥ 1). A row belongs to one thread.
// Cost: one read and one write of [N,Vp] from memory; a row's later passes find it in cache. exp is computed twice
// rather than stored: in bf16 there is no place to keep it exactly.
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

void cross_entropy_forward_backward(float *losses, floatX *logits, const int32_t *targets, float dloss,
                                    size_t N, size_t V, size_t Vp) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        floatX *row = logits + n * Vp;
        if (targets[n] < 0) {
            losses[n] = 0.0f;
            if (dloss != 0.0f) memset(row, 0, Vp * sizeof *row);
            continue;
        }
        float max = row_max(row, V), sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (size_t v = 0; v < V; v++) sum += fast_expf(to_float(row[v]) - max);

        float target = to_float(row[targets[n]]) - max;
        losses[n] = logf(sum) - target;
        if (dloss == 0.0f) continue;

        float scale = dloss / sum;
#pragma omp simd
        for (size_t v = 0; v < V; v++) row[v] = to_floatX(fast_expf(to_float(row[v]) - max) * scale);
        row[targets[n]] = to_floatX((fast_expf(target) / sum - 1.0f) * dloss);
        memset(row + V, 0, (Vp - V) * sizeof *row);
    }
}

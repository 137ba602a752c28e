// adamw (Loshchilov & Hutter 2019): every weight moves by its own gradient, averaged and scaled to its usual size.
//
//     m ← β1 m + (1−β1) g         m̂ = m / (1−β1^step)
//     v ← β2 v + (1−β2) g²        v̂ = v / (1−β2^step)
//     w ← w − lr (m̂ / (√v̂ + eps) + decay · w)
//
// m and v start from 0; the divisions undo that. The decay acts on w directly, not through g (that is the W), and on
// matrices alone, which are ranges of the bucket:
//
//     bucket   |  matrix, decays  | bias |  matrix, decays  | norm |        decay = 0,a, b,c
//              0                  a      b                  c      n
//
// Cost: no arithmetic to speak of; reads g and reads and writes w, m, v, 28 bytes an element in fp32. So everything
// that must touch these arrays happens here in one pass: the clip's scale, the rounded copy of the master weights.
#include <math.h>
#include "kernels/kernels.h"

enum { BLOCK = 1024 }; // elements at a time: the copies of a block stay in the L1 cache

static float *widen(float *copy, const floatX *x, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; i++) copy[i] = to_float(x[i]);
    return copy;
}

void adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad, const float *grad32,
                  size_t n, AdamW a) {
    float m_correction = (float)(1.0 / (1.0 - pow(a.beta1, (double)a.step)));
    float v_correction = (float)(1.0 / (1.0 - pow(a.beta2, (double)a.step)));
    // Odd pieces of the bucket are the decay ranges, even ones what lies between. They have no element in common,
    // so that no thread need wait for another after a piece.
#pragma omp parallel
    for (size_t piece = 0; piece <= 2 * a.n_decay; piece++) {
        size_t begin = piece == 0 ? 0 : a.decay[piece - 1], end = piece == 2 * a.n_decay ? n : a.decay[piece];
        float decay = piece % 2 ? a.weight_decay : 0.0f;
#pragma omp for nowait
        for (size_t i = begin; i < end; i += BLOCK) {
            size_t count = end - i < BLOCK ? end - i : BLOCK;
            float g_copy[BLOCK], w_copy[BLOCK], *mi = m + i, *vi = v + i;
            const float *g = grad32 ? grad32 + i : widen(g_copy, grad + i, count);
            float *w = master ? master + i : widen(w_copy, weight + i, count);
#pragma omp simd
            for (size_t j = 0; j < count; j++) {
                float gj = a.grad_scale * g[j];
                mi[j] = a.beta1 * mi[j] + (1.0f - a.beta1) * gj;
                vi[j] = a.beta2 * vi[j] + (1.0f - a.beta2) * gj * gj;
                w[j] -= a.lr * (mi[j] * m_correction / (sqrtf(vi[j] * v_correction) + a.eps) + decay * w[j]);
            }
#pragma omp simd
            for (size_t j = 0; j < count; j++) weight[i + j] = to_floatX(w[j]);
        }
    }
}

void gradient_accumulate(float *acc, floatX *grad, size_t n) {
#pragma omp parallel for simd
    for (size_t i = 0; i < n; i++) {
        acc[i] += to_float(grad[i]);
        grad[i] = to_floatX(0.0f);
    }
}

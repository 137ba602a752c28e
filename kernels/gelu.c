// gelu and swiglu: the non-linearity between the two matrices of the MLP.
//
//     gelu    x · ½ (1 + tanh u),  u = √(2/π) (x + 0.044715 x³)     (Hendrycks & Gimpel 2016)
//     swiglu  silu(gate) · up,     silu(x) = x · σ(x)               (Shazeer 2020)
//
// ½ (1 + tanh u) = σ(2u), so both are x times a sigmoid, which costs one exp and, unlike 1 + tanh u, loses no digits
// where x is very negative. Backward uses σ' = σ (1 − σ).
// Cost: one pass over the arrays; nothing is kept from forward but its input.
#include "kernels/kernels.h"
#include "kernels/vecmath.h"

// 2u = x (LINEAR + CUBIC x²); fmaf, because without it gcc may not fuse the two in standard C
#define LINEAR 1.595769122f  // 2 √(2/π)
#define CUBIC  0.0713548162f // 0.044715 of it

void gelu_forward(floatX *out, const floatX *inp, size_t N, size_t F) {
#pragma omp parallel for simd
    for (size_t i = 0; i < N * F; i++) {
        float x = to_float(inp[i]);
        out[i] = to_floatX(x * fast_sigmoidf(x * fmaf(CUBIC, x * x, LINEAR)));
    }
}

void gelu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F) {
#pragma omp parallel for simd
    for (size_t i = 0; i < N * F; i++) {
        float x = to_float(inp[i]);
        float square = x * x, s = fast_sigmoidf(x * fmaf(CUBIC, square, LINEAR));
        float bend = x * s * (1.0f - s) * fmaf(3.0f * CUBIC, square, LINEAR);
        // beyond ±16 s is 0 or 1 to the last bit and the bend 0, but for an x² of inf it would come out as 0 · inf
        dinp[i] = to_floatX(to_float(dout[i]) * (s + (square > 256.0f ? 0.0f : bend)));
    }
}

void swiglu_forward(floatX *out, const floatX *inp, size_t N, size_t F) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        floatX *o = out + n * F;
        const floatX *gate = inp + n * 2 * F, *up = gate + F;
#pragma omp simd
        for (size_t f = 0; f < F; f++) {
            float g = to_float(gate[f]);
            o[f] = to_floatX(g * fast_sigmoidf(g) * to_float(up[f]));
        }
    }
}

void swiglu_backward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const floatX *d = dout + n * F, *gate = inp + n * 2 * F, *up = gate + F;
        floatX *dgate = dinp + n * 2 * F, *dup = dgate + F;
#pragma omp simd
        for (size_t f = 0; f < F; f++) {
            float g = to_float(gate[f]), s = fast_sigmoidf(g), dy = to_float(d[f]);
            dgate[f] = to_floatX(dy * to_float(up[f]) * s * (1.0f + g * (1.0f - s)));
            dup[f] = to_floatX(dy * g * s);
        }
    }
}

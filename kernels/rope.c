// rope: a token's position as a rotation (RoFormer, Su et al. 2021).
//
// Channels i and i + D/2 of a head are the two coordinates of a point; the token at position p turns it by p · θ^(−2i/D):
//
//     head [D]   x₀ x₁ … │ x_{D/2} …        x_i' = x_i cos − x_{i+D/2} sin
//                └───pair───┘               x_{i+D/2}' = x_{i+D/2} cos + x_i sin
//
// The product of a query and a key then depends on the difference of their positions alone. A rotation's inverse is
// its transpose, so backward turns the gradients back by the same angle.
// Cost: reads and writes the rotated heads once; the table of angles is small and stays in cache.
#include <math.h>
#include "kernels/kernels.h"

void rope_table(float *table, const int32_t *positions, size_t T, size_t D, float theta) {
#pragma omp parallel for
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < D / 2; i++) {
            // double: at position 100,000 an fp32 angle is good to 0.01 only
            double angle = positions[t] * pow(theta, -2.0 * (double)i / (double)D);
            float *entry = table + (t * (D / 2) + i) * 2;
            entry[0] = (float)cos(angle);
            entry[1] = (float)sin(angle);
        }
    }
}

// direction 1 turns forward, −1 back
static void rotate(floatX *x, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride,
                   float direction) {
    size_t half = D / 2;
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0; t < T; t++) {
            const float *entry = table + t * D; // [D/2, 2]
            for (size_t h = 0; h < heads; h++) {
                floatX *lo = x + (b * T + t) * stride + h * D, *hi = lo + half;
#pragma omp simd
                for (size_t i = 0; i < half; i++) {
                    float cosine = entry[2 * i], sine = entry[2 * i + 1] * direction;
                    float a = to_float(lo[i]), b = to_float(hi[i]);
                    lo[i] = to_floatX(a * cosine - b * sine);
                    hi[i] = to_floatX(b * cosine + a * sine);
                }
            }
        }
    }
}

void rope_forward(floatX *x, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride) {
    rotate(x, table, B, T, heads, D, stride, 1.0f);
}

void rope_backward(floatX *dx, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride) {
    rotate(dx, table, B, T, heads, D, stride, -1.0f);
}

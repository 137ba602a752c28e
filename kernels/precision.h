// floatX: the type of weights, activations and gradients. A build has one of them (make PRECISION=fp32|bf16).
#ifndef PRECISION_H
#define PRECISION_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16; // the upper half of an fp32: 8 bits of exponent, 7 of mantissa

static inline float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Round to nearest, ties to even. NaN stays NaN (rounding its bits up could turn it into an infinity).
static inline bf16 float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

#ifdef PRECISION_BF16
typedef bf16 floatX;
static inline float to_float(floatX x) {
    return bf16_to_float(x);
}
static inline floatX to_floatX(float f) {
    return float_to_bf16(f);
}
#else
typedef float floatX;
static inline float to_float(floatX x) {
    return x;
}
static inline floatX to_floatX(float f) {
    return f;
}
#endif

#endif

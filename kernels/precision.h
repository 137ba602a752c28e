// floatX: the type of weights, activations and gradients. A build has one of them (make PRECISION=fp32|bf16).
#ifndef PRECISION_H
#define PRECISION_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__) || defined(EMU) // CUDA has the type; the bits are the same

#include <cuda_bf16.h>
typedef __nv_bfloat16 bf16;
#define PRECISION_FUNCTION static __host__ __device__ inline

PRECISION_FUNCTION float bf16_to_float(bf16 x) {
    return __bfloat162float(x);
}
PRECISION_FUNCTION bf16 float_to_bf16(float f) {
    return __float2bfloat16_rn(f);
}

#else

typedef uint16_t bf16; // the upper half of an fp32: 8 bits of exponent, 7 of mantissa
#define PRECISION_FUNCTION static inline

PRECISION_FUNCTION float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Round to nearest, ties to even. NaN stays NaN (rounding its bits up could turn it into an infinity).
PRECISION_FUNCTION bf16 float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

#endif

#ifdef PRECISION_BF16
typedef bf16 floatX;
PRECISION_FUNCTION float to_float(floatX x) {
    return bf16_to_float(x);
}
PRECISION_FUNCTION floatX to_floatX(float f) {
    return float_to_bf16(f);
}
#else
typedef float floatX;
PRECISION_FUNCTION float to_float(floatX x) {
    return x;
}
PRECISION_FUNCTION floatX to_floatX(float f) {
    return f;
}
#endif

#endif

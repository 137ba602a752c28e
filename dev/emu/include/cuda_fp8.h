// The two 8-bit formats, as CUDA has them (Micikevicius et al. 2022): conversions from fp32, and back by way of
// fp16, which holds every fp8 number exactly. What kernels are likely to use of NVIDIA's header.
//
//              sign exponent mantissa   largest      infinity   NaN                 smallest
//     E4M3       1      4       3          448         none     0x7f, 0xff             2^−9
//     E5M2       1      5       2       57,344         0x7c     0x7d..0x7f, also −     2^−16
//
// Rounding is to nearest, ties to even; what is too large saturates or (__NV_NOSAT) becomes infinity or NaN; a
// NaN becomes 0x7f. tests/test_emu_types.py compares all of it with NVIDIA's functions.
#ifndef EMU_CUDA_FP8_H
#define EMU_CUDA_FP8_H

#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t; // the first in the low byte
typedef unsigned int __nv_fp8x4_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

struct __half_raw { // fp16: 5 bits of exponent, 10 of mantissa
    unsigned short x;
};
struct __half2_raw {
    unsigned short x, y;
};

static __host__ __device__ inline __nv_fp8_storage_t
__nv_cvt_float_to_fp8(const float f, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t format) {
    const int mantissa = format == __NV_E4M3 ? 3 : 2, bias = format == __NV_E4M3 ? 7 : 15;
    const uint32_t largest = format == __NV_E4M3 ? 0x7e : 0x7b;
    uint32_t bits, magnitude, code;
    memcpy(&bits, &f, sizeof bits);
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= (uint32_t)(127 - bias + 1) << 23) { // a normal number: change the bias, round the mantissa
        int dropped = 23 - mantissa;
        uint32_t rebased = magnitude - ((uint32_t)(127 - bias) << 23);
        code = (rebased + (1u << (dropped - 1)) - 1 + (rebased >> dropped & 1)) >> dropped;
    } else { // a subnormal one: a float added that has the format's smallest number as its last bit
        uint32_t last_bit = (uint32_t)(127 + 23 + 1 - bias - mantissa) << 23;
        float shift, sum;
        memcpy(&shift, &last_bit, sizeof shift);
        memcpy(&sum, &magnitude, sizeof sum);
        sum += shift;
        memcpy(&code, &sum, sizeof code);
        code -= last_bit;
    }
    if (code > largest) code = saturate == __NV_SATFINITE ? largest : format == __NV_E4M3 ? 0x7f : 0x7c;
    return (__nv_fp8_storage_t)((bits >> 24 & 0x80) | code);
}
static __host__ __device__ inline __nv_fp8x2_storage_t
__nv_cvt_float2_to_fp8x2(const float2 f, const __nv_saturation_t saturate,
                         const __nv_fp8_interpretation_t format) {
    return (__nv_fp8x2_storage_t)(__nv_cvt_float_to_fp8(f.x, saturate, format) |
                                  __nv_cvt_float_to_fp8(f.y, saturate, format) << 8);
}

static __host__ __device__ inline __half_raw __nv_cvt_fp8_to_halfraw(const __nv_fp8_storage_t x,
                                                                     const __nv_fp8_interpretation_t format) {
    unsigned sign = (x & 0x80u) << 8, code = x & 0x7fu;
    if (format == __NV_E5M2) return {(unsigned short)(code > 0x7c ? 0x7fff : x << 8)};
    if (code == 0x7f) return {0x7fff};
    if (code >= 8) return {(unsigned short)(sign | ((code << 7) + (8 << 10)))};
    unsigned exponent = 9,
             mantissa = code << 7; // subnormal, but not in fp16: move its first bit out of the mantissa
    if (code == 0) return {(unsigned short)sign};
    while (mantissa < 0x400) mantissa <<= 1, exponent--;
    return {(unsigned short)(sign | exponent << 10 | (mantissa & 0x3ff))};
}
static __host__ __device__ inline __half2_raw
__nv_cvt_fp8x2_to_halfraw2(const __nv_fp8x2_storage_t x, const __nv_fp8_interpretation_t format) {
    return {__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)x, format).x,
            __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(x >> 8), format).x};
}

// fp16 as a value, for its conversion to fp32 alone. An fp16 is an fp32 with 13 bits of mantissa less and
// another bias.
struct __half {
    unsigned short bits;

    __half() = default;
    __half(__half_raw raw) : bits(raw.x) {
    }
};
static __host__ __device__ inline float __half2float(__half h) {
    uint32_t magnitude = h.bits & 0x7fffu, bits = magnitude << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    f *= 0x1p112f; // the bias, subnormals too
    memcpy(&bits, &f, sizeof bits);
    if (magnitude == 0x7c00) bits = 0x7f800000;
    bits = magnitude > 0x7c00 ? 0x7fffffff : bits | (h.bits & 0x8000u) << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}

#endif

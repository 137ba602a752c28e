// bf16 as CUDA has it: the upper half of an fp32, in ones and twos. What kernels are likely to use of NVIDIA's header.
//
// Rounding is to nearest, ties to even; every NaN becomes 0x7fff, as on the device (tests/test_emu_types.py
// compares all of it with NVIDIA's functions). Sums, products and quotients of two are computed in fp32 and
// rounded once more, which gives the bits of one rounding since 24 ≥ 2·8 + 2 (Figueroa 1995). Mixed arithmetic,
// a bf16 and a float, is ambiguous here as it is there: convert first.
#ifndef EMU_CUDA_BF16_H
#define EMU_CUDA_BF16_H

#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

struct __nv_bfloat16;
static __host__ __device__ inline float __bfloat162float(__nv_bfloat16 a);
static __host__ __device__ inline unsigned short bf16_bits(float f); // rounded

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(bf16_bits(f)) {
    }
    operator float() const {
        return __bfloat162float(*this);
    }
};

static __host__ __device__ inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) {
    return a.bits;
}
static __host__ __device__ inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 a;
    a.bits = bits;
    return a;
}

static __host__ __device__ inline float __bfloat162float(__nv_bfloat16 a) {
    uint32_t bits = (uint32_t)a.bits << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static __host__ __device__ inline unsigned short bf16_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (unsigned short)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}
static __host__ __device__ inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    return f;
}
static __host__ __device__ inline __nv_bfloat16 __float2bfloat16(float f) {
    return __float2bfloat16_rn(f);
}

#define BF16_OPERATOR(op)                                                                                      \
    static __host__ __device__ inline __nv_bfloat16 operator op(const __nv_bfloat16 &a,                        \
                                                                const __nv_bfloat16 &b) {                      \
        return __float2bfloat16_rn(__bfloat162float(a) op __bfloat162float(b));                                \
    }                                                                                                          \
    static __host__ __device__ inline __nv_bfloat16 &operator op##=(__nv_bfloat16 &a,                          \
                                                                    const __nv_bfloat16 &b) {                  \
        return a = a op b;                                                                                     \
    }
BF16_OPERATOR(+)
BF16_OPERATOR(-)
BF16_OPERATOR(*)
BF16_OPERATOR(/)
#undef BF16_OPERATOR

#define BF16_COMPARISON(op)                                                                                    \
    static __host__ __device__ inline bool operator op(const __nv_bfloat16 &a, const __nv_bfloat16 &b) {       \
        return __bfloat162float(a) op __bfloat162float(b);                                                     \
    }
BF16_COMPARISON(==)
BF16_COMPARISON(!=)
BF16_COMPARISON(<)
BF16_COMPARISON(<=)
BF16_COMPARISON(>)
BF16_COMPARISON(>=)
#undef BF16_COMPARISON

static __host__ __device__ inline __nv_bfloat16 operator-(const __nv_bfloat16 &a) {
    return __float2bfloat16_rn(-__bfloat162float(a));
}

// Two side by side, the lower one first: one 32-bit register of a matrix instruction.
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static __host__ __device__ inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
    return {low, high};
}
static __host__ __device__ inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
static __host__ __device__ inline __nv_bfloat162 __float22bfloat162_rn(float2 f) {
    return __floats2bfloat162_rn(f.x, f.y);
}
static __host__ __device__ inline __nv_bfloat162 __float2bfloat162_rn(float f) {
    return __floats2bfloat162_rn(f, f);
}
static __host__ __device__ inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) {
    return a.x;
}
static __host__ __device__ inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) {
    return a.y;
}
static __host__ __device__ inline float __low2float(__nv_bfloat162 a) {
    return __bfloat162float(a.x);
}
static __host__ __device__ inline float __high2float(__nv_bfloat162 a) {
    return __bfloat162float(a.y);
}
static __host__ __device__ inline float2 __bfloat1622float2(__nv_bfloat162 a) {
    return make_float2(__low2float(a), __high2float(a));
}
static __host__ __device__ inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {a.x * b.x, a.y * b.y};
}

#endif

// The machine instructions that kernels use beyond CUDA C++, one wrapper each; the only place with `asm`.
//
// Every instruction that touches memory, or waits, is `volatile` with a "memory" clobber: the compiler may
// neither drop it nor move a load or store across it (tests/test_cuda_static.py checks the text). dev/emu/ptx.h
// answers the same calls on a CPU. Which lane holds what (g = lane / 4, t = lane % 4; PTX ISA 8, "Warp-level
// matrix instructions"):
//
//     bf16 m16n8k16    a[0] row g, columns 2t, 2t+1  a[1] row g+8  a[2] row g, columns 2t+8, 2t+9  a[3] row g+8
//                      b0   column g, k = 2t, 2t+1    b1   k = 2t+8, 2t+9
//                      d[0], d[1] row g, columns 2t, 2t+1             d[2], d[3] row g+8
//     fp8 m16n8k32     the same, four bytes for two bf16: columns 4t..4t+3, and +16 where columns were +8
#ifndef PTX_CUH
#define PTX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef EMU
#include "dev/emu/ptx.h"
#else

// sm_80: 16 bytes from global to shared memory, not through registers; both 16-byte aligned. `bytes` < 16: the
// rest is filled with zeros (0: nothing is read). Done when this thread has waited for its group, and for
// others after a barrier.
static __device__ inline void cp_async_16(void *shared, const void *global, uint32_t bytes = 16) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes)
        : "memory");
}
// The copies so far that are in no group yet become one.
static __device__ inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Pending` of this thread's youngest groups are under way.
template <int Pending> static __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// sm_75: four 8×8 matrices of 16-bit elements from shared memory. Lane 8j + i names the 16-byte row i of matrix
// j; lane L gets elements 2(L%4) and +1 of row L/4 of each (trans: rows 2(L%4) and +1 of column L/4).
static __device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
static __device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// sm_80: d [16,8] += a [16,16] · b [16,8], bf16 products summed in fp32.
static __device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x in one instruction, to 2 ulp; subnormal results are 0. (e^x = 2^(x · log2 e).)
static __device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sm_89: d [16,8] += a [16,32] · b [32,8], products of fp8 numbers (a, b: E4M3 or E5M2) summed: on sm_89's fp8
// tensor cores (and on Hopper's, which only wgmma reaches) the sum may keep fewer bits than fp32 has. For sm_90
// the assembler turns this instruction into conversions and an mma of fp16.
#define MMA_FP8(name, a_type, b_type)                                                                          \
    static __device__ inline void name(float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {        \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." a_type "." b_type                                \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                              \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
    }
MMA_FP8(mma_e4m3, "e4m3", "e4m3")
MMA_FP8(mma_e4m3_e5m2, "e4m3", "e5m2")
MMA_FP8(mma_e5m2_e4m3, "e5m2", "e4m3")
MMA_FP8(mma_e5m2, "e5m2", "e5m2")

#endif
#endif

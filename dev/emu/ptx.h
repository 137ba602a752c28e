// kernels/ptx.cuh on a CPU: the same calls, with the call's place in the sources (EMU_HERE) behind. Nothing is
// touched here, only handed to ptx.cpp: this header is compiled with the kernels, whose every access is
// watched.
#ifndef EMU_PTX_H
#define EMU_PTX_H

#include "dev/emu/emu.h"

namespace emu {

void copy_async(void *shared, const void *global, uint32_t bytes, Site site);
void copy_commit(Site site);
void copy_wait(size_t pending, Site site);
void load_matrices(uint32_t r[4], const void *row, bool transposed, Site site);
void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, Site site);
enum Fp8Pair { E4M3, E4M3_E5M2, E5M2_E4M3, E5M2 }; // the formats of a and b
void mma_fp8(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1, Fp8Pair formats, Site site);
float exp2_approx(float x);

} // namespace emu

static inline void cp_async_16(void *shared, const void *global, uint32_t bytes = 16, EMU_HERE) {
    emu::copy_async(shared, global, bytes, site);
}
static inline void cp_async_commit(EMU_HERE) {
    emu::copy_commit(site);
}
template <int Pending> static inline void cp_async_wait(EMU_HERE) {
    emu::copy_wait(Pending, site);
}

static inline void ldmatrix_x4(uint32_t (&r)[4], const void *row, EMU_HERE) {
    emu::load_matrices(r, row, false, site);
}
static inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, EMU_HERE) {
    emu::load_matrices(r, row, true, site);
}

static inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
    emu::mma_bf16(d, a, b0, b1, site);
}
static inline void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
    emu::mma_fp8(d, a, b0, b1, emu::E4M3, site);
}
static inline void mma_e4m3_e5m2(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
    emu::mma_fp8(d, a, b0, b1, emu::E4M3_E5M2, site);
}
static inline void mma_e5m2_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
    emu::mma_fp8(d, a, b0, b1, emu::E5M2_E4M3, site);
}
static inline void mma_e5m2(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_HERE) {
    emu::mma_fp8(d, a, b0, b1, emu::E5M2, site);
}

static inline float exp2_approx(float x) {
    return emu::exp2_approx(x);
}

#endif

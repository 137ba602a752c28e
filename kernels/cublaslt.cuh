// A product through cuBLASLt, for matmul.cu, which holds it, and fp8_gemm.cu.
//
// The library thinks in columns: what we store as [rows, columns], row after row, it takes for [columns, rows].
#ifndef CUBLASLT_CUH
#define CUBLASLT_CUH

#include <cublasLt.h>
#include "kernels/cuda.cuh"

// Scales by tiles, for fp8, came with CUDA 12.9. An older toolkit gets stand-ins for their names, and no such product.
#if defined(EMU) || CUBLAS_VERSION >= 120900
enum { CUBLAS_TILE_SCALES = true };
#else
enum {
    CUBLAS_TILE_SCALES = false,
    CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F = 4,
    CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F = 5
};
#define CUBLASLT_MATMUL_DESC_A_SCALE_MODE ((cublasLtMatmulDescAttributes_t)31)
#define CUBLASLT_MATMUL_DESC_B_SCALE_MODE ((cublasLtMatmulDescAttributes_t)32)
#endif

static const cudaDataType_t CUBLAS_TYPE = sizeof(floatX) == sizeof(bf16) ? CUDA_R_16BF : CUDA_R_32F;

struct CublasOperand {
    const void *x;
    cudaDataType_t type;
    bool transposed;
    const float *scale; // fp8: of its tiles
    int32_t scale_mode;
};

// In columns: out [m,n] = op(a) [m,k] · op(b) [k,n] + bias [m] (NULL: none), or out += (add); all of them packed.
// pre [m,n] where not NULL: that result, and out = gelu of it.
struct CublasProduct {
    void *out;
    cudaDataType_t type;
    CublasOperand a, b;
    const void *bias;
    void *pre;
    bool add;
    size_t m, n, k;
};
// False: the library has nothing for this one. workspace: CUBLAS_BYTES of device memory, at any address.
bool cublas_product(const CublasProduct &p, void *workspace);

// Bytes of workspace: NVIDIA's advice for Hopper, and room to align where they begin.
enum {
    CUBLAS_ALIGNMENT = 256,
    CUBLAS_WORKSPACE = 32 << 20,
    CUBLAS_BYTES = CUBLAS_WORKSPACE + CUBLAS_ALIGNMENT
};

#endif

// Every conversion of cuda_bf16.h and cuda_fp8.h, and the numbers of cublasLt.h, written to stdout: compiled
// once with dev/emu's headers and once with NVIDIA's, it must write the same bytes (tests/test_emu_types.py).
// Floats come from stdin.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cublasLt.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

template <typename T> static void put(const T &x) {
    fwrite(&x, sizeof x, 1, stdout);
}
static __nv_bfloat16 bf16_of(unsigned bits) {
    return __ushort_as_bfloat16((unsigned short)bits);
}
static void put(const __nv_bfloat162 &x) {
    put(__bfloat16_as_ushort(x.x)), put(__bfloat16_as_ushort(x.y));
}

static void from_float(float f) {
    put(__bfloat16_as_ushort(__float2bfloat16_rn(f))), put(__bfloat16_as_ushort(__float2bfloat16(f)));
    put(__bfloat16_as_ushort(__nv_bfloat16(f)));
    put(__floats2bfloat162_rn(f, -f)), put(__float2bfloat162_rn(f)),
        put(__float22bfloat162_rn(make_float2(-f, f)));
    for (__nv_fp8_interpretation_t format : {__NV_E4M3, __NV_E5M2})
        for (__nv_saturation_t saturation : {__NV_NOSAT, __NV_SATFINITE}) {
            put(__nv_cvt_float_to_fp8(f, saturation, format));
            put(__nv_cvt_float2_to_fp8x2(make_float2(f, -f), saturation, format));
        }
}

static void to_float(unsigned bits) {
    __nv_bfloat16 x = bf16_of(bits);
    __nv_bfloat162 two = __halves2bfloat162(x, bf16_of(bits ^ 0x8001));
    put(__bfloat162float(x)), put((float)x);
    put(__low2float(two)), put(__high2float(two)), put(__bfloat1622float2(two).y);
    put(__bfloat16_as_ushort(__low2bfloat16(two))), put(__bfloat16_as_ushort(__high2bfloat16(two)));
    __half_raw half;
    half.x = (unsigned short)bits;
    put(__half2float(__half(half)));
    for (__nv_fp8_interpretation_t format : {__NV_E4M3, __NV_E5M2}) {
        if (bits < 256) put(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)bits, format).x);
        put(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)bits, format));
    }
}

static void arithmetic(__nv_bfloat16 a, __nv_bfloat16 b) {
    for (__nv_bfloat16 x : {a + b, a - b, a * b, a / b, -a}) put(__bfloat16_as_ushort(x));
    for (bool x : {a == b, a != b, a<b, a <= b, a> b, a >= b}) put(x);
    put(__hmul2(__halves2bfloat162(a, b), __halves2bfloat162(b, b)));
    __nv_bfloat16 sum = a;
    sum += b, sum *= a, sum -= b, sum /= b;
    put(__bfloat16_as_ushort(sum));
}

static void numbers() {
    int all[] = {
        CUDA_R_32F,
        CUDA_R_16BF,
        CUDA_R_8F_E4M3,
        CUDA_R_8F_E5M2,
        CUBLAS_STATUS_SUCCESS,
        CUBLAS_STATUS_NOT_INITIALIZED,
        CUBLAS_STATUS_INVALID_VALUE,
        CUBLAS_STATUS_EXECUTION_FAILED,
        CUBLAS_STATUS_NOT_SUPPORTED,
        CUBLAS_OP_N,
        CUBLAS_OP_T,
        CUBLAS_COMPUTE_32F,
        CUBLASLT_EPILOGUE_DEFAULT,
        CUBLASLT_EPILOGUE_BIAS,
        CUBLASLT_EPILOGUE_GELU_AUX,
        CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_MATMUL_DESC_TRANSA,
        CUBLASLT_MATMUL_DESC_TRANSB,
        CUBLASLT_MATMUL_DESC_EPILOGUE,
        CUBLASLT_MATMUL_DESC_BIAS_POINTER,
        CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
        CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
        CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
        CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
        CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE,
        CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
        CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
        CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
        CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        CUBLASLT_REDUCTION_SCHEME_NONE,
        CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
        __NV_NOSAT,
        __NV_SATFINITE,
        __NV_E4M3,
        __NV_E5M2,
        sizeof(cublasLtMatmulHeuristicResult_t),
        sizeof(cublasLtMatmulAlgo_t),
        sizeof(__nv_bfloat162),
        alignof(__nv_bfloat162),
    };
    for (int number : all) put(number);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "from_float"))
        for (float f; fread(&f, sizeof f, 1, stdin) == 1;) from_float(f);
    if (!strcmp(what, "to_float"))
        for (unsigned bits = 0; bits < 1 << 16; bits++) to_float(bits);
    if (!strcmp(what, "arithmetic"))
        for (float two[2]; fread(two, sizeof two, 1, stdin) == 1;)
            arithmetic(__float2bfloat16(two[0]), __float2bfloat16(two[1]));
    if (!strcmp(what, "numbers")) numbers();
    return 0;
}

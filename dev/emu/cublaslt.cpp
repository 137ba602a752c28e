// cuBLASLt's products, plainly: what the library is asked is checked as the library checks it, or more
// strictly, and then computed by loops, in its turn on the stream, as a kernel is.
//
//     D [m, n] = epilogue(alpha · op(A) · op(B) + beta · C), column-major
//
// Sums run in fp32 (no TF32) over k = 0, 1, 2…, those of fp8 numbers in parts of 128 that are scaled and added.
// The library promises no order. What it demands (cuBLAS 13, "cublasLtMatmul", and "1D and 2D block scaling"):
//
//     A, B    C, D            bias
//     fp32    fp32            fp32
//     bf16    bf16 or fp32    as D
//     fp8     bf16 or fp32    bf16   only on 9.0; A transposed, B not; not both E5M2; scales of 128 or 128×128
//                                    numbers, not both of the latter; k a multiple of 16, m and n of 4;
//                                    matrices, scales, leading dimensions, columns of D multiples of 16 bytes
//
// aux has D's type; its leading dimension is a multiple of 8. An algorithm is good for the problem and the
// alignments for which it was found; it may use all of the workspace that the caller allows, and scribbles over the
// beginning. Where a reduction in D or in D's type is allowed, parts of k are added in any order, and rounded.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include "dev/emu/emu.h"

enum { TILE = 128, SCRIBBLED = 1 << 16 /* bytes of the workspace */ };

// What the heuristic answers CUBLAS_STATUS_NOT_SUPPORTED to, as the library may: 1 an auxiliary output, 2 fp8.
static unsigned refused;
extern "C" void emu_set_refused(unsigned what) {
    refused = what;
}

// ---------------------------------------------------------------------------------------------------------
// The descriptors: values that attributes set

struct cublasLtMatmulDescOpaque_t {
    int32_t transpose_a, transpose_b, epilogue, bias_type, aux_type, a_mode, b_mode;
    int64_t aux_ld;
    const char *bias, *a_scale, *b_scale;
    char *aux;
};
struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;
};
struct cublasLtMatmulPreferenceOpaque_t {
    size_t workspace;
    uint32_t reduction, alignment[4]; // of A, B, C, D
};
typedef cublasLtMatmulDescOpaque_t Desc;
typedef cublasLtMatrixLayoutOpaque_t Layout;
typedef cublasLtMatmulPreferenceOpaque_t Preference;

static cublasStatus_t set(void *field, size_t field_size, const void *value, size_t size) {
    if (!value || size != field_size) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(field, value, size);
    return CUBLAS_STATUS_SUCCESS;
}
#define ATTRIBUTE(name, field)                                                                                 \
    case name:                                                                                                 \
        return set(&(field), sizeof(field), value, size)

const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "the library is not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "an invalid value was passed";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "execution on the device failed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "this combination is not supported";
    }
    return "unknown status";
}

struct cublasLtContext {};
enum { HANDLE = 8000000 }; // bytes of device memory
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (!emu::library_takes(HANDLE)) return CUBLAS_STATUS_ALLOC_FAILED;
    *handle = new cublasLtContext;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    emu::library_takes(-HANDLE);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *desc = new Desc();
    (*desc)->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    (*desc)->bias_type = (*desc)->aux_type = -1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t size) {
    switch (attribute) {
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSA, desc->transpose_a);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSB, desc->transpose_b);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE, desc->epilogue);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_POINTER, desc->bias);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, desc->bias_type);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, desc->aux);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, desc->aux_ld);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, desc->aux_type);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, desc->a_scale);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, desc->b_scale);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, desc->a_mode);
        ATTRIBUTE(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, desc->b_mode);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    *layout = new Layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = new Preference{0, UINT32_MAX, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t size) {
    switch (attribute) {
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, preference->workspace);
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, preference->reduction);
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, preference->alignment[0]);
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, preference->alignment[1]);
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, preference->alignment[2]);
        ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, preference->alignment[3]);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------
// What is legal

static size_t size_of(int type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1;
}
static bool is_fp8(int type) {
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}
static bool has_bias(const Desc &desc) {
    return desc.epilogue == CUBLASLT_EPILOGUE_BIAS || desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}
static bool has_aux(const Desc &desc) {
    return desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
}

struct Problem {
    Desc desc;
    Layout A, B, C, D;
};
static uint64_t m(const Problem &p) {
    return p.D.rows;
}
static uint64_t n(const Problem &p) {
    return p.D.cols;
}
static uint64_t k(const Problem &p) {
    return p.desc.transpose_a ? p.A.rows : p.A.cols;
}

static bool fp8_supported(const Problem &p, const uint32_t alignment[4]) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    auto scaled = [](int mode, const char *scale) {
        return (uintptr_t)scale % 16 == 0 && (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
                                              mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
    };
    bool aligned = p.A.ld % 16 == 0 && p.B.ld % 16 == 0 && p.D.ld * size_of(p.D.type) % 16 == 0 &&
                   p.C.ld * size_of(p.C.type) % 16 == 0;
    for (int i = 0; i < 4; i++) aligned &= alignment[i] % 16 == 0;
    return major == 9 && minor == 0 && p.desc.transpose_a == CUBLAS_OP_T && p.desc.transpose_b == CUBLAS_OP_N &&
           is_fp8(p.B.type) && !(p.A.type == CUDA_R_8F_E5M2 && p.B.type == CUDA_R_8F_E5M2) &&
           scaled(p.desc.a_mode, p.desc.a_scale) && scaled(p.desc.b_mode, p.desc.b_scale) &&
           (p.desc.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ||
            p.desc.b_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) &&
           aligned && k(p) % 16 == 0 && m(p) % 4 == 0 && n(p) % 4 == 0 && m(p) * size_of(p.D.type) % 16 == 0 &&
           !has_aux(p.desc) && !(refused & 2);
}

static cublasStatus_t check(const Problem &p, const uint32_t alignment[4]) {
    const Desc &desc = p.desc;
    for (const Layout *l : {&p.A, &p.B, &p.C, &p.D})
        if (l->rows == 0 || l->cols == 0 || l->ld < (int64_t)l->rows) return CUBLAS_STATUS_INVALID_VALUE;
    uint64_t b_rows = desc.transpose_b ? p.B.cols : p.B.rows, b_cols = desc.transpose_b ? p.B.rows : p.B.cols;
    uint64_t a_rows = desc.transpose_a ? p.A.cols : p.A.rows;
    if (a_rows != m(p) || b_cols != n(p) || b_rows != k(p) || p.C.rows != m(p) || p.C.cols != n(p))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && !has_bias(desc) && !has_aux(desc))
        return CUBLAS_STATUS_NOT_SUPPORTED;

    if (p.C.type != p.D.type || is_fp8(p.D.type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (is_fp8(p.A.type)) {
        if (!fp8_supported(p, alignment)) return CUBLAS_STATUS_NOT_SUPPORTED;
    } else if (p.A.type != p.B.type || (p.A.type == CUDA_R_32F && p.D.type != CUDA_R_32F) || desc.a_mode ||
               desc.b_mode)
        return CUBLAS_STATUS_NOT_SUPPORTED;

    int bias_type = is_fp8(p.A.type) ? CUDA_R_16BF : p.D.type;
    if (has_bias(desc)) {
        if ((uintptr_t)desc.bias % 16)
            return CUBLAS_STATUS_INVALID_VALUE; // kernels that read vectors were seen
        if ((desc.bias_type == -1 ? (int)p.D.type : desc.bias_type) != bias_type)
            return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (has_aux(desc)) {
        if (desc.aux_ld < (int64_t)m(p)) return CUBLAS_STATUS_INVALID_VALUE;
        if ((desc.aux_type != -1 && desc.aux_type != (int)p.D.type) || desc.aux_ld % 8 ||
            (uintptr_t)desc.aux % 16 || refused & 1)
            return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// What an algorithm holds: for which problem it was found, whatever its pointers.
struct Algorithm {
    uint64_t problem, workspace;
    uint32_t alignment[4], reduction;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

static uint64_t hash(const Problem &p) {
    uint64_t h = 0;
    auto add = [&](uint64_t x) { h = (h ^ x) * 0x9e3779b97f4a7c15u, h ^= h >> 32; };
    for (const Layout *l : {&p.A, &p.B, &p.C, &p.D})
        add(l->type), add(l->rows), add(l->cols), add((uint64_t)l->ld);
    for (int32_t x : {p.desc.transpose_a, p.desc.transpose_b, p.desc.epilogue, p.desc.bias_type,
                      p.desc.aux_type, p.desc.a_mode, p.desc.b_mode})
        add((uint32_t)x);
    add((uint64_t)p.desc.aux_ld);
    return h;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                              cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    *found = 0;
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!desc || !A || !B || !C || !D || !preference || wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    Problem p = {*desc, *A, *B, *C, *D};
    cublasStatus_t status = check(p, preference->alignment);
    if (status != CUBLAS_STATUS_SUCCESS) return status;

    results[0] = {};
    Algorithm algorithm = {hash(p), preference->workspace, {}, preference->reduction};
    memcpy(algorithm.alignment, preference->alignment, sizeof algorithm.alignment);
    memcpy(&results[0].algo, &algorithm, sizeof algorithm);
    results[0].workspaceSize = algorithm.workspace;
    results[0].wavesCount = 1;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------
// The product

static float read(const void *x, int type, size_t i) {
    switch (type) {
    case CUDA_R_32F:
        return ((const float *)x)[i];
    case CUDA_R_16BF:
        return __bfloat162float(((const __nv_bfloat16 *)x)[i]);
    case CUDA_R_8F_E4M3:
        return __half2float(__nv_cvt_fp8_to_halfraw(((const uint8_t *)x)[i], __NV_E4M3));
    default:
        return __half2float(__nv_cvt_fp8_to_halfraw(((const uint8_t *)x)[i], __NV_E5M2));
    }
}
static void write(void *x, int type, size_t i, float value) {
    if (type == CUDA_R_32F)
        ((float *)x)[i] = value;
    else
        ((__nv_bfloat16 *)x)[i] = __float2bfloat16_rn(value);
}

static float rounded(float value, int type) {
    return type == CUDA_R_32F ? value : __bfloat162float(__float2bfloat16_rn(value));
}

struct Product {
    Problem p;
    const void *A, *B, *C;
    void *D, *workspace;
    float alpha, beta;
    Algorithm algorithm;
    emu::Site site;
};

static size_t bytes(const Layout &l) {
    return ((l.cols - 1) * (size_t)l.ld + l.rows) * size_of(l.type);
}

// What a device would find out, or not: pointers that are not what they were said to be. True if all is well.
static bool check_memory(const Product &w) {
    const Problem &p = w.p;
    struct Range {
        const char *name;
        const void *x;
        size_t size, alignment;
        bool used;
    };
    size_t parts = (k(p) + TILE - 1) / TILE;
    Layout aux = {p.D.type, m(p), n(p), p.desc.aux_ld};
    auto scales = [&](int mode, size_t rows) {
        return sizeof(float) * (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                    ? parts * rows
                                    : (rows + TILE - 1) / TILE * ((parts + 3) / 4 * 4));
    };
    const uint32_t *alignment = w.algorithm.alignment;
    bool fp8 = is_fp8(p.A.type);
    Range ranges[] = {
        {"D", w.D, bytes(p.D), alignment[3], true},
        {"aux", p.desc.aux, bytes(aux), 1, has_aux(p.desc)},
        {"workspace", w.workspace, w.algorithm.workspace, 1, w.algorithm.workspace > 0},
        {"A", w.A, bytes(p.A), alignment[0], true},
        {"B", w.B, bytes(p.B), alignment[1], true},
        {"C", w.C, bytes(p.C), alignment[2], w.beta != 0 && w.C != w.D},
        {"bias", p.desc.bias, m(p) * size_of(fp8 ? CUDA_R_16BF : p.D.type), 1, has_bias(p.desc)},
        {"scales of A", p.desc.a_scale, scales(p.desc.a_mode, m(p)), 1, fp8},
        {"scales of B", p.desc.b_scale, scales(p.desc.b_mode, n(p)), 1, fp8},
    };
    enum { WRITTEN = 3 }; // the first of them: nothing else may lie there
    int i = 0;
    for (const Range &r : ranges) {
        if (r.used && (uintptr_t)r.x % r.alignment)
            return emu::error(w.site, "cublasLtMatmul: %s, %p, is not aligned to %zu bytes", r.name, r.x,
                              r.alignment),
                   false;
        if (r.used && !emu::on_device(r.x, r.size))
            return emu::error(w.site, "cublasLtMatmul: %s, %zu bytes at %p, is not inside device memory",
                              r.name, r.size, r.x),
                   false;
        for (int j = 0; j < i && j < WRITTEN; j++) {
            const Range &other = ranges[j];
            if (r.used && other.used && (char *)r.x < (char *)other.x + other.size &&
                (char *)other.x < (char *)r.x + r.size)
                return emu::error(w.site, "cublasLtMatmul: %s overlaps %s", r.name, other.name), false;
        }
        i++;
    }
    return true;
}

// Rows i.. of op(X) over part r.. of k, as floats [depth, rows] with `width` from one k to the next.
static void load(float *to, size_t width, const void *x, const Layout &l, bool along_k, size_t i, size_t rows,
                 size_t r, size_t depth) {
    for (size_t column = 0; column < (along_k ? rows : depth); column++)
        for (size_t row = 0; row < (along_k ? depth : rows); row++) {
            size_t a = along_k ? column : row, b = along_k ? row : column; // which row of op(X), which k
            to[b * width + a] =
                along_k ? read(x, l.type, (i + a) * l.ld + r + b) : read(x, l.type, (r + b) * l.ld + i + a);
        }
}

static float scale(const float *scales, int mode, size_t row, size_t rows, size_t part, size_t parts) {
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F ? scales[part * rows + row]
                                                           : scales[row / TILE * ((parts + 3) / 4 * 4) + part];
}

typedef float Vector __attribute__((vector_size(64))); // 16 rows of D

// Tiles of D, TILE each way; parts of TILE along k; inside, 16 rows × 4 columns of sums in registers.
static void multiply(const Product &w) {
    enum { WIDE = 16, COLUMNS = 4 };
    const Problem &p = w.p;
    static Vector a[TILE * TILE / WIDE], sums[TILE * TILE / WIDE];
    static float b[TILE * TILE];
    bool fp8 = is_fp8(p.A.type);
    bool rough =
        w.algorithm.reduction & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
    size_t parts = (k(p) + TILE - 1) / TILE, first = rough ? emu::random_order() % parts : 0;

    for (size_t j = 0; j < n(p); j += TILE)
        for (size_t i = 0; i < m(p); i += TILE) {
            size_t rows = std::min<size_t>(TILE, m(p) - i), cols = std::min<size_t>(TILE, n(p) - j);
            memset(sums, 0, sizeof sums);
            for (size_t turn = 0; turn < parts; turn++) {
                size_t part = (first + turn) % parts, r = part * TILE, depth = std::min<size_t>(TILE, k(p) - r);
                load((float *)a, TILE, w.A, p.A, p.desc.transpose_a, i, rows, r, depth);
                load(b, TILE, w.B, p.B, !p.desc.transpose_b, j, cols, r, depth);
                float a_scale[TILE], b_scale[TILE];
                for (size_t x = 0; x < rows && fp8; x++)
                    a_scale[x] = scale((const float *)p.desc.a_scale, p.desc.a_mode, i + x, m(p), part, parts);
                for (size_t y = 0; y < cols && fp8; y++)
                    b_scale[y] = scale((const float *)p.desc.b_scale, p.desc.b_mode, j + y, n(p), part, parts);

                for (size_t y = 0; y < cols; y += COLUMNS)
                    for (size_t x = 0; x < rows; x += WIDE) {
                        Vector s[COLUMNS];
                        for (int c = 0; c < COLUMNS; c++)
                            s[c] = fp8 ? Vector{} : sums[((y + c) * TILE + x) / WIDE];
                        for (size_t z = 0; z < depth; z++)
#pragma GCC unroll 4
                            for (int c = 0; c < COLUMNS; c++)
                                s[c] += a[(z * TILE + x) / WIDE] * b[z * TILE + y + c];
                        for (int c = 0; c < COLUMNS; c++)
                            for (int e = 0; e < WIDE && fp8; e++)
                                if (x + e < rows && y + c < cols)
                                    sums[((y + c) * TILE + x) / WIDE][e] +=
                                        s[c][e] * (a_scale[x + e] * b_scale[y + c]);
                        for (int c = 0; c < COLUMNS && !fp8; c++) sums[((y + c) * TILE + x) / WIDE] = s[c];
                    }
                for (size_t x = 0; x < TILE * TILE && rough; x++)
                    write(sums, CUDA_R_32F, x, rounded(((const float *)sums)[x], p.D.type));
            }
            for (size_t y = 0; y < cols; y++)
                for (size_t x = 0; x < rows; x++) {
                    float value = w.alpha * ((const float *)sums)[y * TILE + x];
                    if (w.beta != 0) value += w.beta * read(w.C, p.C.type, (j + y) * p.C.ld + i + x);
                    if (has_bias(p.desc)) value += read(p.desc.bias, fp8 ? CUDA_R_16BF : p.D.type, i + x);
                    if (has_aux(p.desc)) {
                        write(p.desc.aux, p.D.type, (j + y) * p.desc.aux_ld + i + x, value);
                        value *=
                            0.5f * (1 + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
                    }
                    write(w.D, p.D.type, (j + y) * p.D.ld + i + x, value);
                }
        }
}

static void run(void *context) {
    Product w = *(Product *)context;
    delete (Product *)context;
    if (!check_memory(w)) return;
    memset(w.workspace, 0xa5, std::min<size_t>(w.algorithm.workspace, SCRIBBLED));
    multiply(w);
    for (size_t j = 0; j < n(w.p); j++) {
        size_t column = m(w.p) * size_of(w.p.D.type);
        emu::watch_host_write((char *)w.D + j * w.p.D.ld * size_of(w.p.D.type), column);
        if (has_aux(w.p.desc))
            emu::watch_host_write(w.p.desc.aux + j * w.p.desc.aux_ld * size_of(w.p.D.type), column);
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t A_layout, const void *B,
                              cublasLtMatrixLayout_t B_layout, const void *beta, const void *C,
                              cublasLtMatrixLayout_t C_layout, void *D, cublasLtMatrixLayout_t D_layout,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_size,
                              cudaStream_t stream, emu::Site site) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!desc || !alpha || !beta || !A || !B || !D || !A_layout || !B_layout || !C_layout || !D_layout || !algo)
        return CUBLAS_STATUS_INVALID_VALUE;
    Product w = {{*desc, *A_layout, *B_layout, *C_layout, *D_layout},
                 A,
                 B,
                 C,
                 D,
                 workspace,
                 *(const float *)alpha,
                 *(const float *)beta,
                 {},
                 site};
    memcpy(&w.algorithm, algo, sizeof w.algorithm);
    cublasStatus_t status = check(w.p, w.algorithm.alignment);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (w.algorithm.problem != hash(w.p) || w.algorithm.workspace > workspace_size ||
        (uintptr_t)workspace % 256 || (w.beta != 0 && !C) || (C == D && C_layout->ld != D_layout->ld) ||
        (has_bias(*desc) && !desc->bias) || (has_aux(*desc) && !desc->aux) ||
        (is_fp8(A_layout->type) && (!desc->a_scale || !desc->b_scale)))
        return CUBLAS_STATUS_INVALID_VALUE;
    emu::enqueue(stream, run, new Product(w));
    return CUBLAS_STATUS_SUCCESS;
}

// matmul: a linear layer's three products go to NVIDIA's library, cuBLASLt; the bias's gradient is a kernel of our own.
//
// The library's matrices run down the columns, ours along the rows, so it sees each of ours transposed and is asked for
// the transposed result:
//
//     ours, by rows                                    the library's, by columns: out [m,n] = op(a) · op(b)
//     out     [M,N]  = inp  [M,K] · weight [N,K]ᵀ      outᵀ     [N,M]  =  weight · inpᵀ     a = weight, turned   b = inp
//     dinp    [M,K]  = dout [M,N] · weight [N,K]       dinpᵀ    [K,M]  =  weightᵀ · doutᵀ   a = weight           b = dout
//     dweight [N,K] += dout [M,N]ᵀ · inp   [M,K]       dweightᵀ [K,N] +=  inpᵀ · dout       a = inp              b = dout, turned
//
// Sums are fp32: no TF32, and where the library cuts a long sum into parts, it may only add these in fp32 and in a fixed
// order, so that a result has the same bits every time. bias and gelu are fused into the product: the result is written
// once where it would be written, read and written again.
// Cost: 2·M·N·K operations each. What the library answers for a shape is kept: asking takes longer than a small product.
#include "kernels/cublaslt.cuh"
#include "kernels/ladder.h"

static void print_and_exit(const char *file, int line, const char *call, const char *words, int) {
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, words);
    exit(3);
}

extern "C" {
KernelFlops kernel_flops;
bool matmul_inputs_bf16;
void (*kernels_fail)(const char *file, int line, const char *call, const char *words,
                     int error) = print_and_exit;
}
cudaStream_t compute_stream;

#define cublas_check(call) cublas_check_at(call, #call, __FILE__, __LINE__)
static void cublas_check_at(cublasStatus_t status, const char *call, const char *file, int line) {
    int error = status == CUBLAS_STATUS_ALLOC_FAILED ? cudaErrorMemoryAllocation : 0;
    if (status != CUBLAS_STATUS_SUCCESS) kernels_fail(file, line, call, cublasLtGetStatusString(status), error);
}

// ---------------------------------------------------------------------------------------------------------
// A plan: the descriptions of one kind of product, and how the library will compute it.
enum { PLANS = 64, KEY = 16 }; // of a model there are fewer; beyond that the oldest goes

struct Plan {
    size_t key[KEY]; // everything that the answer depends on
    bool possible;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algorithm;
};

static cublasLtHandle_t library() {
    static cublasLtHandle_t handle;
    if (!handle) cublas_check(cublasLtCreate(&handle));
    return handle;
}

template <typename T> static void set(Plan &plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    cublas_check(cublasLtMatmulDescSetAttribute(plan.product, attribute, &value, sizeof value));
}
// The same of what an older library may not know.
template <typename T> static bool knows(Plan &plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    return cublasLtMatmulDescSetAttribute(plan.product, attribute, &value, sizeof value) ==
           CUBLAS_STATUS_SUCCESS;
}
template <typename T>
static void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
                T value) {
    cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

// The largest power of two, up to 256, that divides the address (NULL: 256).
static uint32_t alignment(const void *p) {
    uintptr_t bits = (uintptr_t)p | CUBLAS_ALIGNMENT;
    return (uint32_t)(bits & -bits);
}

// The first place from p on that is as aligned as the library's workspace must be.
static char *aligned(void *p) {
    return (char *)(ceil_div((uintptr_t)p, (uintptr_t)CUBLAS_ALIGNMENT) * CUBLAS_ALIGNMENT);
}

static uint32_t epilogue(const CublasProduct &p) {
    return (p.pre ? CUBLASLT_EPILOGUE_GELU_AUX : 0) | (p.bias ? CUBLASLT_EPILOGUE_BIAS : 0) |
           (p.pre || p.bias ? 0 : CUBLASLT_EPILOGUE_DEFAULT);
}

// What differs from call to call.
static void set_pointers(Plan &plan, const CublasProduct &p) {
    if (p.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.pre) set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.pre);
    if (p.a.scale) set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a.scale);
    if (p.b.scale) set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b.scale);
}

static void make(Plan &plan, const CublasProduct &p) {
    if (plan.product) {
        cublas_check(cublasLtMatmulDescDestroy(plan.product));
        for (cublasLtMatrixLayout_t layout : {plan.a, plan.b, plan.out})
            cublas_check(cublasLtMatrixLayoutDestroy(layout));
    }
    cublas_check(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(plan, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(plan, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(p));
    if (p.bias) set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)p.type);
    if (p.pre) set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)p.m);
    set_pointers(plan, p);

    size_t a_rows = p.a.transposed ? p.k : p.m, b_rows = p.b.transposed ? p.n : p.k;
    cublas_check(cublasLtMatrixLayoutCreate(&plan.a, p.a.type, a_rows, p.m * p.k / a_rows, (int64_t)a_rows));
    cublas_check(cublasLtMatrixLayoutCreate(&plan.b, p.b.type, b_rows, p.k * p.n / b_rows, (int64_t)b_rows));
    cublas_check(cublasLtMatrixLayoutCreate(&plan.out, p.type, p.m, p.n, (int64_t)p.m));

    plan.possible = (!p.a.scale || knows(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, p.a.scale_mode)) &&
                    (!p.b.scale || knows(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, p.b.scale_mode));
    if (!plan.possible) return;

    // The library may not know better than this how pointers are aligned; of rows it knows by their length.
    cublasLtMatmulPreference_t wish;
    cublas_check(cublasLtMatmulPreferenceCreate(&wish));
    set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)CUBLAS_WORKSPACE);
    set(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.a.x));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.b.x));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.out));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.out));
    cublasLtMatmulHeuristicResult_t answer = {};
    int answers = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(library(), plan.product, plan.a, plan.b, plan.out,
                                                           plan.out, wish, 1, &answer, &answers);
    // For gelu and fp8 there is another way, so whatever the library lacks is no error. A wrong question is one.
    bool other_way = p.pre || p.a.scale;
    bool wrong = status == CUBLAS_STATUS_INVALID_VALUE || status == CUBLAS_STATUS_NOT_INITIALIZED;
    if (wrong || (!other_way && status != CUBLAS_STATUS_NOT_SUPPORTED))
        cublas_check_at(status, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
    plan.possible = status == CUBLAS_STATUS_SUCCESS && answers > 0;
    plan.algorithm = answer.algo;
    cublas_check(cublasLtMatmulPreferenceDestroy(wish));
}

bool cublas_product(const CublasProduct &p, void *workspace) {
    static Plan plans[PLANS]; // their keys begin with m, so that an empty one is never found
    static size_t made;
    const size_t key[KEY] = {p.m,
                             p.n,
                             p.k,
                             (size_t)p.type,
                             alignment(p.out),
                             epilogue(p),
                             alignment(p.bias),
                             alignment(p.pre),
                             (size_t)p.a.type,
                             p.a.transposed,
                             alignment(p.a.x),
                             (size_t)p.a.scale_mode,
                             (size_t)p.b.type,
                             p.b.transposed,
                             alignment(p.b.x),
                             (size_t)p.b.scale_mode};
    size_t i = 0;
    while (i < PLANS && memcmp(plans[i].key, key, sizeof key) != 0) i++;
    Plan &plan = plans[i < PLANS ? i : made++ % PLANS];
    if (i == PLANS) {
        make(plan, p);
        memcpy(plan.key, key, sizeof key);
    }
    if (!plan.possible) return false;
    set_pointers(plan, p);
    float one = 1, beta = p.add;
    cublas_check(cublasLtMatmul(library(), plan.product, &one, p.a.x, plan.a, p.b.x, plan.b, &beta, p.out,
                                plan.out, p.out, plan.out, &plan.algorithm, aligned(workspace),
                                CUBLAS_WORKSPACE, compute_stream));
    return true;
}

// ---------------------------------------------------------------------------------------------------------
// The three products.
template <int V>
static __global__ void __launch_bounds__(256, 4) round_inputs_kernel(bf16 *copy, const floatX *x, size_t n) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (IN_RANGE(i < n)) {
        Vec<floatX, V> v = load<V>(x + i);
        Vec<bf16, V> rounded;
        for (int j = 0; j < V; j++) rounded.x[j] = float_to_bf16(to_float(v.x[j]));
        store(copy + i, rounded);
    }
}

// x [n] as products take it: x, or under --matmul bf16 a copy in the workspace, which then begins behind it.
static CublasOperand operand(const floatX *x, size_t n, bool transposed, void *&workspace) {
    if (sizeof(floatX) == sizeof(bf16) || !matmul_inputs_bf16) return {x, CUBLAS_TYPE, transposed, NULL, 0};
    bf16 *copy = (bf16 *)aligned(workspace);
    workspace = copy + n;
    if (aligned16(n * sizeof *x, x))
        round_inputs_kernel<VECTOR><<<ceil_div(n, (size_t)256 * VECTOR), 256, 0, compute_stream>>>(copy, x, n);
    else
        round_inputs_kernel<1><<<ceil_div(n, (size_t)256), 256, 0, compute_stream>>>(copy, x, n);
    launched("round_inputs");
    return {copy, CUDA_R_16BF, transposed, NULL, 0};
}

static bool product(floatX *out, const floatX *a, bool a_transposed, const floatX *b, bool b_transposed,
                    const floatX *bias, floatX *pre, bool add, size_t m, size_t n, size_t k, void *workspace) {
    CublasOperand left = operand(a, m * k, a_transposed, workspace);
    CublasOperand right = operand(b, k * n, b_transposed, workspace);
    if (bias && !aligned16(0, bias)) { // the library may read it in vectors, and cannot be told not to
        void *copy = aligned(workspace);
        workspace = (floatX *)copy + m;
        cuda_check(cudaMemcpyAsync(copy, bias, m * sizeof *bias, cudaMemcpyDeviceToDevice, compute_stream));
        bias = (const floatX *)copy;
    }
    return cublas_product({out, CUBLAS_TYPE, left, right, bias, pre, add, m, n, k}, workspace);
}
#define must(call) cublas_check((call) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED)

void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t M,
                    size_t K, size_t N, void *workspace) {
    must(product(out, weight, true, inp, false, bias, NULL, false, N, M, K, workspace));
    kernel_flops.gemm_forward += 2.0 * M * N * K;
}

// gelu in the library is quick and rough: good enough for a result in bf16, not in fp32. pre's rows have a rule of
// their own there, a multiple of 8 elements.
void matmul_gelu_forward(floatX *out, floatX *pre, const floatX *inp, const floatX *weight, const floatX *bias,
                         size_t M, size_t K, size_t N, void *workspace) {
    if (sizeof(floatX) == sizeof(bf16) && N % 8 == 0 && aligned16(0, pre) &&
        product(out, weight, true, inp, false, bias, pre, false, N, M, K, workspace)) {
        kernel_flops.gemm_forward += 2.0 * M * N * K;
        return;
    }
    matmul_forward(pre, inp, weight, bias, M, K, N, workspace);
    gelu_forward(out, pre, M, N);
}

void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, size_t M, size_t K, size_t N,
                           void *workspace) {
    must(product(dinp, weight, false, dout, false, NULL, NULL, false, K, M, N, workspace));
    kernel_flops.gemm_backward += 2.0 * M * N * K;
}

void matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                            size_t N, void *workspace) {
    must(product(dweight, inp, false, dout, true, NULL, NULL, true, K, N, M, workspace));
    kernel_flops.gemm_backward += 2.0 * M * N * K;
}

// ---------------------------------------------------------------------------------------------------------
// The bias's gradient: sums of columns. A block takes ROWS rows of a strip as wide as one load of a warp, each of its
// warps every eighth row. The blocks' sums are a matrix too, a short one, that the same kernel sums with dbias.
//
//     dout [M,N]   ┌───────┬───────┬─           parts [M/ROWS,N]
//      ROWS rows   │ block │ block │                 ┌───────┬─
//                  ├───────┼───────┼─      ──>       ├───────┼─      ──>    dbias [N] +=
//                  │       │       │                 └───────┴─
//
// Cost: one read of dout, and of parts a write and a read: 1/64 of that in bf16.
enum { ROWS = 256, THREADS = 256, WARPS = THREADS / WARP };

// out [M/rows,N] = or (ADD) += the sums of so many rows each
template <typename In, typename Out, int V, bool ADD>
static __global__ void __launch_bounds__(THREADS, 4)
    sum_rows_kernel(Out *out, const In *x, size_t M, size_t N, size_t rows) {
    constexpr int PITCH = WARP + WARP / V; // keeps what a warp reads below in 32 banks
    __shared__ float sums[WARPS][V * PITCH];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    size_t begin = blockIdx.y * rows, end = begin + rows < M ? begin + rows : M;

    size_t column = ((size_t)blockIdx.x * WARP + lane) * V;
    float sum[V] = {};
    if (IN_RANGE(column < N)) {
#pragma unroll 4
        for (size_t row = begin + warp; row < end; row += WARPS) {
            Vec<In, V> v = load<V>(x + row * N + column);
            for (int j = 0; j < V; j++) sum[j] += (float)v.x[j];
        }
    }
    for (int j = 0; j < V; j++) sums[warp][j * PITCH + lane] = sum[j];
    __syncthreads();

    int i = threadIdx.x;
    const bool summed = IN_RANGE(i < WARP * V);
    column = (size_t)blockIdx.x * WARP * V + i;
    if (summed && IN_RANGE(column < N)) {
        float total = ADD ? (float)out[blockIdx.y * N + column] : 0.0f;
        for (int w = 0; w < WARPS; w++) total += sums[w][i % V * PITCH + i / V];
        out[blockIdx.y * N + column] = Out(total);
    }
}

void matmul_backward_bias(floatX *dbias, const floatX *dout, size_t M, size_t N, void *workspace) {
    float *parts = (float *)aligned(workspace);
    size_t blocks = ceil_div(M, (size_t)ROWS);
    dim3 wide(ceil_div(N, (size_t)WARP * VECTOR), blocks), narrow(ceil_div(N, (size_t)WARP), blocks);
    if (aligned16(N * sizeof *dout, dout))
        sum_rows_kernel<floatX, float, VECTOR, false>
            <<<wide, THREADS, 0, compute_stream>>>(parts, dout, M, N, ROWS);
    else
        sum_rows_kernel<floatX, float, 1, false>
            <<<narrow, THREADS, 0, compute_stream>>>(parts, dout, M, N, ROWS);
    launched("sum_rows");
    sum_rows_kernel<float, floatX, 1, true>
        <<<narrow.x, THREADS, 0, compute_stream>>>(dbias, parts, blocks, N, blocks);
    launched("sum_rows of parts");
}

size_t matmul_workspace(size_t M, size_t K, size_t N) {
    size_t a = M * K, b = N * K, c = M * N, smallest = a < b ? (a < c ? a : c) : (b < c ? b : c);
    size_t copies = matmul_inputs_bf16 ? (a + b + c - smallest) * sizeof(bf16) + 2 * CUBLAS_ALIGNMENT : 0;
    size_t partial = ceil_div(M, (size_t)ROWS) * N * sizeof(float) + CUBLAS_ALIGNMENT;
    copies += N * sizeof(floatX) + CUBLAS_ALIGNMENT; // the bias
    return CUBLAS_BYTES + copies > partial ? CUBLAS_BYTES + copies : partial;
}

// ---------------------------------------------------------------------------------------------------------
// The ladder.

// One thread a column: N of them for M·N numbers, too few to keep the memory busy.
static __global__ void __launch_bounds__(256)
    sum_rows_naive_kernel(floatX *dbias, const floatX *x, size_t M, size_t N) {
    size_t column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (IN_RANGE(column < N)) {
        float sum = 0;
        for (size_t row = 0; row < M; row++) sum += to_float(x[row * N + column]);
        dbias[column] = to_floatX(to_float(dbias[column]) + sum);
    }
}

void matmul_backward_bias_naive(floatX *dbias, const floatX *dout, size_t M, size_t N, void *workspace) {
    (void)workspace;
    sum_rows_naive_kernel<<<ceil_div(N, (size_t)THREADS), THREADS, 0, compute_stream>>>(dbias, dout, M, N);
    launched("sum_rows_naive");
}

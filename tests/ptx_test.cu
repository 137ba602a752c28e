// The instructions of kernels/ptx.cuh, one warp at a time: the same source for nvcc and for dev/emu, so that a
// GPU's answers can be laid beside the emulator's. Fragments go in and come out as they are, 32 lanes ×
// registers, so a test sees the layout itself (tests/test_emu_types.py). All pointers are to host memory; 0 is
// success, anything else a cudaError_t.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <stdint.h>
#include "kernels/ptx.cuh"

enum { LANES = 32, THREADS = 64 };

// A copy on the device, for as long as a function runs; taken back where the host's array is not const.
template <typename T> struct Device {
    T *x = NULL, *host;
    size_t n;
    Device(const T *from, size_t n) : host(NULL), n(n) {
        if (cudaMalloc(&x, n * sizeof(T)) == cudaSuccess)
            cudaMemcpy(x, from, n * sizeof(T), cudaMemcpyHostToDevice);
    }
    Device(T *both, size_t n) : Device((const T *)both, n) {
        host = both;
    }
    ~Device() {
        if (host) cudaMemcpy(host, x, n * sizeof(T), cudaMemcpyDeviceToHost);
        cudaFree(x);
    }
};

static int finished() {
    cudaError_t launch = cudaGetLastError(), run = cudaDeviceSynchronize();
    return launch ? launch : run;
}

// ---- ldmatrix: four 8×8 matrices from shared memory, rows 16 bytes apart ------------------------------------
static __global__ void ldmatrix_kernel(uint32_t *out, const uint4 *matrices, bool transposed) {
    __shared__ uint4 rows[LANES];
    rows[threadIdx.x] = matrices[threadIdx.x];
    __syncthreads();
    uint32_t r[4];
    if (transposed)
        ldmatrix_x4_trans(r, &rows[threadIdx.x]);
    else
        ldmatrix_x4(r, &rows[threadIdx.x]);
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

// ---- mma: registers of every lane in, sums out --------------------------------------------------------------
enum { BF16, E4M3_E4M3, E4M3_E5M2, E5M2_E4M3, E5M2_E5M2 };

template <int Formats> static __global__ void mma_kernel(float *d, const uint32_t *a, const uint32_t *b) {
    float sum[4];
    uint32_t left[4];
    for (int i = 0; i < 4; i++) sum[i] = d[threadIdx.x * 4 + i], left[i] = a[threadIdx.x * 4 + i];
    uint32_t b0 = b[threadIdx.x * 2], b1 = b[threadIdx.x * 2 + 1];
    if (Formats == BF16) mma_bf16(sum, left, b0, b1);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
    if (Formats == E4M3_E4M3) mma_e4m3(sum, left, b0, b1);
    if (Formats == E4M3_E5M2) mma_e4m3_e5m2(sum, left, b0, b1);
    if (Formats == E5M2_E4M3) mma_e5m2_e4m3(sum, left, b0, b1);
    if (Formats == E5M2_E5M2) mma_e5m2(sum, left, b0, b1);
#endif
    for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = sum[i];
}

// ---- approximate arithmetic ---------------------------------------------------------------------------------
static __global__ void exp2_kernel(float *y, const float *x, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += LANES) y[i] = exp2_approx(x[i]);
}

// ---- cp.async: two warps walk over tiles, two buffers: while one is added up, the next tile is on its way ---
// sums [THREADS, 4] = Σ over tiles of what the *neighbour* copied, [tiles, THREADS, 4]; the last tile ends
// after `bytes` of each 16, and zeros stand for the rest.
template <int Pending>
static __global__ void pipeline_kernel(float *sums, const float *tiles, int n, uint32_t bytes) {
    __shared__ __align__(16) float buffer[2][THREADS][4];
    int mine = threadIdx.x, theirs = THREADS - 1 - threadIdx.x;
    float sum[4] = {0, 0, 0, 0};
    auto fetch = [&](int tile) {
        if (tile < n)
            cp_async_16(buffer[tile % 2][mine], tiles + ((size_t)tile * THREADS + mine) * 4,
                        tile == n - 1 ? bytes : 16);
        cp_async_commit();
    };
    fetch(0);
    for (int tile = 0; tile < n; tile++) {
        fetch(tile + 1);
        cp_async_wait<Pending>(); // 1: all but the youngest group, so this tile's is there (2: it may not be)
        __syncthreads();          // and the others'
        for (int i = 0; i < 4; i++) sum[i] += buffer[tile % 2][theirs][i];
        __syncthreads(); // before it is written over
    }
    for (int i = 0; i < 4; i++) sums[mine * 4 + i] = sum[i];
}

// ---- all of them at work: out [16, 8] = A [16, K] · B [K, 8], bf16, row-major, K a multiple of 8 ------------
static __global__ void product_kernel(float *out, const __nv_bfloat16 *A, const __nv_bfloat16 *B, int K) {
    __shared__ __align__(16) __nv_bfloat16 a[16][16], b[16][8];
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    float d[4] = {0, 0, 0, 0};
    for (int k = 0; k < K; k += 16) {
        int row = lane % 16, half = lane / 16 * 8; // 16 rows of two 16-byte halves; of B, 16 rows of one
        cp_async_16(&a[row][half], A + (k + half < K ? row * K + k + half : 0), k + half < K ? 16 : 0);
        if (half == 0) cp_async_16(b[row], B + (k + row < K ? (k + row) * 8 : 0), k + row < K ? 16 : 0);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        uint32_t left[4], right[4];
        ldmatrix_x4(left, &a[row][half]); // rows 0..7, 8..15 of the left half, then of the right one: a0..a3
        ldmatrix_x4_trans(right, b[row]); // k = 0..7 and 8..15: b0, b1 (and both again)
        mma_bf16(d, left, right[0], right[1]);
        __syncthreads();
    }
    out[g * 8 + 2 * t] = d[0], out[g * 8 + 2 * t + 1] = d[1];
    out[(g + 8) * 8 + 2 * t] = d[2], out[(g + 8) * 8 + 2 * t + 1] = d[3];
}

// ---- what is forbidden, one kind a launch -------------------------------------------------------------------
static __global__ void misuse_kernel(uint4 *global, int kind) {
    __shared__ uint4 rows[LANES + 1];
    uint32_t r[4];
    char *row = (char *)&rows[threadIdx.x];
    if (kind == 0) ldmatrix_x4(r, row + 2);                                 // not aligned
    if (kind == 1) ldmatrix_x4(r, &global[threadIdx.x]);                    // not shared memory
    if (kind == 2) cp_async_16(row + 8, &global[threadIdx.x]);              // not aligned
    if (kind == 3) cp_async_16(row, (char *)&global[threadIdx.x] + 4);      // not aligned
    if (kind == 4) cp_async_16(row, row);                                   // not from global memory
    if (kind == 5) cp_async_16(&global[threadIdx.x], &global[threadIdx.x]); // not to shared memory
    if (kind == 6) cp_async_16(row, &global[LANES + threadIdx.x]);          // beyond the array
    if (kind == 7 && threadIdx.x != 3) ldmatrix_x4(r, row);                 // a lane is missing
    if (kind == 8) cp_async_16(row, &global[threadIdx.x], 17);              // more than there is room for
}

extern "C" {
int ptx_ldmatrix(uint32_t *out, const uint16_t *matrices, int transposed) {
    Device<uint32_t> o(out, 4 * LANES);
    Device<uint16_t> m(matrices, 8 * LANES);
    ldmatrix_kernel<<<1, LANES>>>(o.x, (const uint4 *)m.x, transposed != 0);
    return finished();
}

int ptx_mma(float *d, const uint32_t *a, const uint32_t *b, int formats) {
    Device<float> sums(d, 4 * LANES);
    Device<uint32_t> left(a, 4 * LANES), right(b, 2 * LANES);
    if (formats == BF16) mma_kernel<BF16><<<1, LANES>>>(sums.x, left.x, right.x);
    if (formats == E4M3_E4M3) mma_kernel<E4M3_E4M3><<<1, LANES>>>(sums.x, left.x, right.x);
    if (formats == E4M3_E5M2) mma_kernel<E4M3_E5M2><<<1, LANES>>>(sums.x, left.x, right.x);
    if (formats == E5M2_E4M3) mma_kernel<E5M2_E4M3><<<1, LANES>>>(sums.x, left.x, right.x);
    if (formats == E5M2_E5M2) mma_kernel<E5M2_E5M2><<<1, LANES>>>(sums.x, left.x, right.x);
    return finished();
}

int ptx_exp2(float *y, const float *x, size_t n) {
    Device<float> out(y, n), in(x, n);
    exp2_kernel<<<1, LANES>>>(out.x, in.x, n);
    return finished();
}

int ptx_pipeline(float *sums, const float *tiles, int n, uint32_t bytes, int pending) {
    Device<float> out(sums, 4 * THREADS), in(tiles, (size_t)n * 4 * THREADS);
    if (pending == 1) pipeline_kernel<1><<<1, THREADS>>>(out.x, in.x, n, bytes);
    if (pending == 2) pipeline_kernel<2><<<1, THREADS>>>(out.x, in.x, n, bytes);
    return finished();
}

int ptx_product(float *out, const uint16_t *A, const uint16_t *B, int K) {
    Device<float> d(out, 16 * 8);
    Device<uint16_t> a(A, (size_t)16 * K), b(B, (size_t)8 * K);
    product_kernel<<<1, LANES>>>(d.x, (const __nv_bfloat16 *)a.x, (const __nv_bfloat16 *)b.x, K);
    return finished();
}

int ptx_misuse(int kind) {
    uint4 zeros[LANES] = {};
    Device<uint4> global((const uint4 *)zeros, LANES);
    misuse_kernel<<<1, LANES>>>(global.x, kind);
    return finished();
}
int ptx_arch() { // 90 is sm_90
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    return 10 * major + minor;
}
const char *ptx_error() {
    return cudaGetErrorString(cudaGetLastError());
}
}

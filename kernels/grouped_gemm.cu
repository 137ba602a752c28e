// grouped_gemm on a GPU: the experts' products, those of all groups in one launch.
//
// Each of the three is out [i,j] (+)= Σ_r a [i,r] · b [j,r], whose operands lie in memory this way round or the other. A block has
// a tile of one group's result; rows of two groups never meet in a tile, so that the last one of a group may be almost empty:
//
//                        i                     j       r
//     forward            a group's rows        N       K        out = inp · weightᵀ + bias
//     backward input     a group's rows        K       N        dinp = dout · weight
//     backward weight    N                     K       a group's rows     dweight += doutᵀ · inp
//
//     b  [64,32]ᵀ  ┌────────┐
//                  └────────┘     32 of r at a time pass through shared memory, in the order of r; the next ones are on their way
//     a  [64,32]   ┌────────┐     there while these are multiplied. bf16: mma.sync, 32×32 a warp; fp32: 8×4 a thread.
//        ┌──┐      │  sum   │
//        └──┘      └────────┘
//
// Where a group begins only the host knows; the table goes along with the launch.
// Cost: 2·M·N·K operations. A tile of a and one of b, 8 KB in bf16, are loaded for 2·64·64·32 of them: enough for the experts of
// a model in training, not a library's product (matmul.cu); with one group that is several times as fast on Hopper.
#include "kernels/cuda.cuh"

enum { TILE = 64, DEPTH = 32, THREADS = 128, MOST_GROUPS = 256 }; // more groups: another launch

// Of the groups of a launch: in which row the first begins, where the rows of each end, and where its tiles do.
struct Table {
    uint32_t begin, end[MOST_GROUPS], tiles[MOST_GROUPS];
};

struct Product {
    floatX *out; // [I,J]
    const floatX *a, *b;
    size_t lda, ldb;     // element (i, r) is a[i·lda + r], turned a[r·lda + i]
    const floatX *bias;  // NULL: none
    size_t I, J, R;      // of which one, of the rows, is the table's
    size_t stride;       // from one group's weight and bias to the next one's
    bool round, aligned; // --matmul bf16; is 16 bytes at a time a way to read a and b?
};

// ---------------------------------------------------------------------------------------------------------
// Tiles in shared memory, and what is made of two. [64,32]: the 16-byte pieces of a row trade places by the row's number, so that
// neither copies nor reads of eight rows meet in a bank; [32,64], turned: rows begin 16 bytes further on each time.
template <bool TURNED> struct Tile {
    alignas(16) floatX x[TURNED ? DEPTH : TILE][TURNED ? TILE + VECTOR : DEPTH];

    __device__ floatX *at(int i, int r) {
        constexpr int PIECES = DEPTH / VECTOR, TOGETHER = 8 / PIECES; // rows in 128 bytes, all banks
        return TURNED ? &x[r][i] : &x[i][(r / VECTOR ^ i / TOGETHER % PIECES) * VECTOR + r % VECTOR];
    }
};

// The tile whose first element is (i, r), with 0 beyond i_end and r_end.
template <bool TURNED>
static __device__ inline void fetch(Tile<TURNED> &tile, const floatX *x, size_t ld, size_t i, size_t i_end,
                                    size_t r, size_t r_end, bool aligned) {
    constexpr int COLS = TURNED ? TILE : DEPTH;
    const size_t row = TURNED ? r : i, rows = TURNED ? r_end : i_end;
    const size_t col = TURNED ? i : r, cols = TURNED ? i_end : r_end;
#pragma unroll
    for (int at = threadIdx.x * VECTOR; at < TILE * DEPTH; at += THREADS * VECTOR) {
        const size_t my_row = row + at / COLS, my_col = col + at % COLS;
        floatX *to = TURNED ? tile.at(at % COLS, at / COLS) : tile.at(at / COLS, at % COLS);
        const floatX *from = x + my_row * ld + my_col;
        if (aligned) {
            cp_async_16(to, from, IN_RANGE(my_row < rows && my_col < cols) ? 16 : 0);
        } else {
            for (int v = 0; v < VECTOR; v++)
                to[v] = IN_RANGE(my_row < rows && my_col + v < cols) ? from[v] : to_floatX(0);
        }
    }
}

#ifdef PRECISION_BF16

// 16 × 16 of a tile from (i, r) on, as mma_bf16 takes a: quarters (0,0), (8,0), (0,8), (8,8) of (i, r).
static __device__ inline void quarters(uint32_t (&q)[4], Tile<false> &t, int i, int r) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4(q, t.at(i + lane % 16, r + lane / 16 * 8));
}
static __device__ inline void quarters(uint32_t (&q)[4], Tile<true> &t, int i, int r) {
    const int lane = threadIdx.x % WARP;
    ldmatrix_x4_trans(q, t.at(i + lane / 8 % 2 * 8, r + lane / 16 * 8 + lane % 8));
}

// A warp has 32 × 32 of the tile: 2 × 4 results of mma_bf16.
struct Sum {
    float x[2][4][4];

    template <bool TA, bool TB> __device__ void add(Tile<TA> &a, Tile<TB> &b, bool) {
        const int i = threadIdx.x / WARP / 2 * 32, j = threadIdx.x / WARP % 2 * 32;
#pragma unroll
        for (int r = 0; r < DEPTH; r += 16) {
            uint32_t left[2][4], right[2][4];
            for (int k = 0; k < 2; k++)
                quarters(left[k], a, i + 16 * k, r), quarters(right[k], b, j + 16 * k, r);
            for (int k = 0; k < 2; k++)
                for (int l = 0; l < 4; l++)
                    mma_bf16(x[k][l], left[k], right[l / 2][l % 2], right[l / 2][l % 2 + 2]);
        }
    }
    template <typename Write> __device__ void each(Write write) const { // write(i, j, its sum)
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int i = warp / 2 * 32 + lane / 4, j = warp % 2 * 32 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int k = n / 16, l = n / 4 % 4, e = n % 4;
            write(i + 16 * k + e / 2 * 8, j + 8 * l + e % 2, x[k][l][e]);
        }
    }
};

#else

// (i, r), (i, r + 1), …
static __device__ inline void four(float (&x)[4], Tile<false> &t, int i, int r, bool round) {
    load_floats<4>(x, t.at(i, r));
    for (int v = 0; v < 4; v++) x[v] = product_input(x[v], round);
}
static __device__ inline void four(float (&x)[4], Tile<true> &t, int i, int r, bool round) {
    for (int v = 0; v < 4; v++) x[v] = product_input(*t.at(i, r + v), round);
}

// A thread has each eighth row, and of it each sixteenth column.
struct Sum {
    float x[8][4];

    template <bool TA, bool TB> __device__ void add(Tile<TA> &a, Tile<TB> &b, bool round) {
        const int i = threadIdx.x / 16, j = threadIdx.x % 16;
        for (int r = 0; r < DEPTH; r += 4) {
            float left[4], right[4][4];
#pragma unroll
            for (int l = 0; l < 4; l++) four(right[l], b, j + 16 * l, r, round);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                four(left, a, i + 8 * k, r, round);
                for (int l = 0; l < 4; l++)
                    for (int v = 0; v < 4; v++) x[k][l] += left[v] * right[l][v];
            }
        }
    }
    template <typename Write> __device__ void each(Write write) const {
        const int i = threadIdx.x / 16, j = threadIdx.x % 16;
#pragma unroll
        for (int n = 0; n < 32; n++) write(i + n / 4 * 8, j + n % 4 * 16, x[n / 4][n % 4]);
    }
};

#endif

// ---------------------------------------------------------------------------------------------------------
// TA, TB: a and b are turned. BY_ROWS: the groups' rows are i; else they are r, and out is the weight's gradient, += .
template <bool TA, bool TB, bool BY_ROWS>
static __global__ void __launch_bounds__(THREADS, 4) grouped_gemm_kernel(Product p, Table t) {
    __shared__ Tile<TA> a_tile[2];
    __shared__ Tile<TB> b_tile[2];
    unsigned g = blockIdx.z, tile = blockIdx.y;
    while (BY_ROWS && t.tiles[g] <= tile) g++; // the first one that ends behind this tile
    if (BY_ROWS && g) tile -= t.tiles[g - 1];
    const size_t begin = g ? t.end[g - 1] : t.begin, end = t.end[g], offset = g * p.stride;
    const size_t i = (BY_ROWS ? begin : 0) + (size_t)tile * TILE, i_end = BY_ROWS ? end : p.I;
    const size_t j = (size_t)blockIdx.x * TILE, r_end = BY_ROWS ? p.R : end;
    const floatX *b = p.b + (BY_ROWS ? offset : 0);
    floatX *out = p.out + (BY_ROWS ? 0 : offset);
    size_t r = BY_ROWS ? 0 : begin;
    if (r == r_end) return; // a group without rows

    Sum sum = {};
    auto fetch_next = [&](int stage) {
        if (r < r_end) fetch(a_tile[stage], p.a, p.lda, i, i_end, r, r_end, p.aligned);
        if (r < r_end) fetch(b_tile[stage], b, p.ldb, j, p.J, r, r_end, p.aligned);
        cp_async_commit();
        r += DEPTH;
    };
    fetch_next(0);
    for (int stage = 0; r < r_end + DEPTH; stage ^= 1) { // r: of the next ones
        fetch_next(stage ^ 1);
        cp_async_wait<1>();
        __syncthreads();
        sum.add(a_tile[stage], b_tile[stage], p.round);
        __syncthreads();
    }
    sum.each([&](int row, int col, float x) {
        const size_t column = j + col;
        if (!IN_RANGE(i + row < i_end && column < p.J)) return;
        floatX *to = out + (i + row) * p.J + column;
        *to = to_floatX(x + (!BY_ROWS ? to_float(*to) : p.bias ? to_float(p.bias[offset + column]) : 0));
    });
}

// ---------------------------------------------------------------------------------------------------------
template <bool TA, bool TB, bool BY_ROWS> static void launch(Product p, const size_t *rows, size_t groups) {
    size_t row = 0;
    p.round = matmul_inputs_bf16;
    p.aligned = aligned16((p.lda | p.ldb | p.stride) * sizeof(floatX), p.a, p.b);
    for (size_t first = 0; first < groups; first += MOST_GROUPS) {
        const unsigned left = groups - first, n = min(left, (unsigned)MOST_GROUPS);
        Table t = {};
        unsigned tiles = 0;
        t.begin = row;
        for (unsigned g = 0; g < n; g++) {
            t.end[g] = row += rows[first + g];
            t.tiles[g] = tiles += ceil_div<size_t>(rows[first + g], TILE);
        }
        const dim3 grid(ceil_div<size_t>(p.J, TILE), BY_ROWS ? tiles : ceil_div<size_t>(p.I, TILE),
                        BY_ROWS ? 1 : n);
        if (tiles) grouped_gemm_kernel<TA, TB, BY_ROWS><<<grid, THREADS, 0, compute_stream>>>(p, t);
        launched("grouped_gemm");
        if (BY_ROWS)
            p.b += n * p.stride;
        else
            p.out += n * p.stride;
        if (p.bias) p.bias += n * p.stride;
    }
}

static double flops(const size_t *rows, size_t groups, size_t K, size_t N) {
    double M = 0;
    for (size_t g = 0; g < groups; g++) M += rows[g];
    return 2 * M * N * K;
}

void grouped_gemm_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                          const size_t *rows, size_t groups, size_t stride, size_t K, size_t N, void *) {
    launch<false, false, true>({out, inp, weight, K, K, bias, 0, N, K, stride, false, false}, rows, groups);
    kernel_flops.gemm_forward += flops(rows, groups, K, N);
}

void grouped_gemm_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, const size_t *rows,
                                 size_t groups, size_t stride, size_t K, size_t N, void *) {
    launch<false, true, true>({dinp, dout, weight, N, K, NULL, 0, K, N, stride, false, false}, rows, groups);
    kernel_flops.gemm_backward += flops(rows, groups, K, N);
}

void grouped_gemm_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, const size_t *rows,
                                  size_t groups, size_t stride, size_t K, size_t N, void *) {
    launch<true, true, false>({dweight, dout, inp, N, K, NULL, N, K, 0, stride, false, false}, rows, groups);
    kernel_flops.gemm_backward += flops(rows, groups, K, N);
}

// The products need none; the bias's gradient (matmul_backward_bias) does, and comes with them.
size_t grouped_gemm_workspace(size_t M, size_t K, size_t N) {
    return matmul_workspace(M, K, N);
}

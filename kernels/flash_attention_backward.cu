// Flash attention on a GPU, backward; flash_attention.c has the formulas, attention_tiles.cuh the tiles and their products.
//
// Two kernels, each of which computes p = e^(s − lse) and ds = p ∘ (dp − delta) again, 7 products in place of 5: dq
// is summed over keys, dk and dv over queries, so in one kernel one of them would need atomics. Here every gradient has one
// owner, and no sum depends on who comes first.
//
//     dk, dv    a block owns 64 keys and walks over the queries of all heads that read them, with keys as rows:
//               sᵀ = k qᵀ, dpᵀ = v doᵀ, dv += pᵀ do, dk += dsᵀ q                               4 products
//     dq        a block owns 128 queries (fp32: 64) and walks over the keys: s, dp, dq += ds k    3 products
//
// Bytes, with E, Br and seen(i) as in flash_attention.cu, seeing(j) the queries that see the j-th 64 keys (Tq where nothing
// is masked):
//     delta     B·H · (2·Tq·D·E + 4·Tq)                                     do, o and delta once
//     dq        B·H · (3·Tq·D·E + 8·Tq + Σᵢ seen(i)·2·D·E)                  q, do, dq, lse and delta once
//     dk, dv    B·KV · 4·Tk·D·E + B·H · Σⱼ seeing(j)·(2·D·E + 8)            k, v, dk and dv once; q, do once a tile of keys
// Workspace: delta, nothing else.
#include "kernels/attention_tiles.cuh"

// What the backward knows of a query. One without keys, or beyond the last, has p = e^−∞ = 0.
static __device__ inline float2 query_row(const float *lse, const float *delta, size_t row, bool exists) {
    if (!IN_RANGE(exists)) return {INFINITY, 0.0f};
    return {lse[row] == -INFINITY ? INFINITY : lse[row], delta[row]};
}

// p in place of a score, ds in place of dp. The score is scaled, rounded, and only then compared with lse, as it was when
// lse came about: a score of a billion is off by many units, but by the same ones.
static __device__ inline void softmax_gradient(float &score, float &dp, float lse, float delta, float root) {
    score = power_of_2((__fmul_rn(score, root) - lse) * LOG2E);
    dp = score * (dp - delta);
}

template <typename T, int D> struct DqTiles {
    T q[Sizes<T, D>::ROWS * D], dout[Sizes<T, D>::ROWS * D];
    T k[2][Sizes<T, D>::DQ_COLUMNS * D], v[2][Sizes<T, D>::DQ_COLUMNS * D];
    float2 rows[Sizes<T, D>::ROWS]; // lse and delta
};

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 2)
    flash_dq_kernel(floatX *dq, float *dq_block, const floatX *dout, const float *delta, const float *lse,
                    const floatX *q, const floatX *k, const floatX *v, AttentionShape s, Inputs inputs) {
    const int M = Sizes<T, D>::STRIPS, ROWS = Sizes<T, D>::ROWS, COLUMNS = Sizes<T, D>::DQ_COLUMNS,
              N = COLUMNS / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    DqTiles<T, D> &tiles = *reinterpret_cast<DqTiles<T, D> *>(smem);
    int blocks = ceil_div<int>(s.Tq, ROWS);
    Work share = work(s.B * s.H, blocks);
    int first = (blocks - 1 - share.block) * ROWS, b = share.head / (int)s.H, h = share.head % (int)s.H;
    int keys = s.causal ? min(first + ROWS, (int)s.Tk) : s.Tk, steps = ceil_div(keys, COLUMNS);
    size_t kv_at = at(b, s.kv_tokens, 0, s.kv_stride, h / (int)(s.H / s.KV), s.D);
    int warp_row = threadIdx.x / WARP * 16 * M, mine = first + warp_row; // the warp's first row
    float root = 1.0f / sqrtf((float)s.D);

    float acc[M][D / 8][4] = {};
    if (IN_RANGE(threadIdx.x < ROWS))
        tiles.rows[threadIdx.x] = query_row(lse, delta, share.head * s.q_tokens + first + threadIdx.x,
                                            first + (int)threadIdx.x < (int)s.Tq);
    if (steps > 0) {
        load_pair<ROWS, D>(tiles.q, tiles.dout, q + at(b, s.q_tokens, first, s.q_stride, h, s.D),
                           dout + at(b, s.q_tokens, first, s.o_stride, h, s.D), s.q_stride, s.o_stride,
                           s.Tq - first, s.D, inputs);
        load_pair<COLUMNS, D>(tiles.k[0], tiles.v[0], k + kv_at, v + kv_at, s.kv_stride, s.kv_stride, keys, s.D,
                              inputs);
    }
    for (int step = 0; step < steps; step++) {
        int key = step * COLUMNS, next = key + COLUMNS, buffer = step % 2;
        cp_async_wait<0>();
        __syncthreads();
        if (next < keys)
            load_pair<COLUMNS, D>(tiles.k[buffer ^ 1], tiles.v[buffer ^ 1], k + kv_at + next * s.kv_stride,
                                  v + kv_at + next * s.kv_stride, s.kv_stride, s.kv_stride, keys - next, s.D,
                                  inputs);

        float p[M][N][4] = {}, ds[M][N][4] = {};
        multiply_rows<D>(p, tiles.q + warp_row * D, tiles.k[buffer]);
        multiply_rows<D>(ds, tiles.dout + warp_row * D, tiles.v[buffer]); // dp so far
        if (next > (s.causal ? mine + 1 : keys)) hide<false>(p, mine, key, s.causal, keys);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 row = tiles.rows[warp_row + 16 * m + 8 * half + threadIdx.x % WARP / 4];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++)
                        softmax_gradient(p[m][n][i], ds[m][n][i], row.x, row.y, root);
            }
        inputs.round(ds);
        multiply<D>(acc, ds, tiles.k[buffer]);
    }

    float *stage = reinterpret_cast<float *>(tiles.q + warp_row * D);
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        int eight = mine + 8 * i;
        store_rows<D>(dq, dq_block, at(b, s.q_tokens, eight, s.q_stride, h, s.D), s.q_stride, s.Tq - eight, s.D,
                      inputs.aligned, stage, acc[i / 2], i % 2, root, 1.0f);
    }
}

template <typename T, int D> struct DkvTiles {
    T k[Sizes<T, D>::KEYS * D], v[Sizes<T, D>::KEYS * D];
    T q[2][Sizes<T, D>::QUERIES * D], dout[2][Sizes<T, D>::QUERIES * D];
    float2 rows[2][Sizes<T, D>::QUERIES]; // lse and delta
};

template <typename T, int D>
static __global__ void __launch_bounds__(THREADS, 2)
    flash_dkv_kernel(floatX *dk, floatX *dv, float *dk_block, float *dv_block, const floatX *dout,
                     const float *delta, const float *lse, const floatX *q, const floatX *k, const floatX *v,
                     AttentionShape s, Inputs inputs) {
    const int KEYS = Sizes<T, D>::KEYS, QUERIES = Sizes<T, D>::QUERIES;
    const int SLICE = Sizes<T, D>::QUERY_SLICE;
    extern __shared__ __align__(128) unsigned char smem[];
    DkvTiles<T, D> &tiles = *reinterpret_cast<DkvTiles<T, D> *>(smem);
    Work share = work(s.B * s.KV, ceil_div<int>(s.Tk, KEYS));
    int first = share.block * KEYS, b = share.head / (int)s.KV, kv = share.head % (int)s.KV;
    int group = s.H / s.KV;
    int start = s.causal ? first : 0, per_head = ceil_div((int)s.Tq - start, QUERIES), steps = per_head * group;
    int warp_row = threadIdx.x / WARP * 16, mine = first + warp_row, t = threadIdx.x % 4;
    float root = 1.0f / sqrtf((float)s.D);

    float dk_acc[1][D / 8][4] = {}, dv_acc[1][D / 8][4] = {};
    float2 row;
    load_pair<KEYS, D>(tiles.k, tiles.v, k + at(b, s.kv_tokens, first, s.kv_stride, kv, s.D),
                       v + at(b, s.kv_tokens, first, s.kv_stride, kv, s.D), s.kv_stride, s.kv_stride,
                       s.Tk - first, s.D, inputs);
    for (int step = -1; step < steps; step++) { // step −1 only asks for the first tiles
        int buffer = step & 1, query = start + step % per_head * QUERIES;
        if (step >= 0) {
            if (IN_RANGE(threadIdx.x < QUERIES)) tiles.rows[buffer][threadIdx.x] = row;
            cp_async_wait<0>();
            __syncthreads();
        }
        if (step + 1 < steps) {
            size_t h = kv * group + (step + 1) / per_head;
            int next = start + (step + 1) % per_head * QUERIES;
            load_pair<QUERIES, D>(tiles.q[buffer ^ 1], tiles.dout[buffer ^ 1],
                                  q + at(b, s.q_tokens, next, s.q_stride, h, s.D),
                                  dout + at(b, s.q_tokens, next, s.o_stride, h, s.D), s.q_stride, s.o_stride,
                                  s.Tq - next, s.D, inputs);
            if (threadIdx.x < QUERIES)
                row = query_row(lse, delta, (b * s.H + h) * s.q_tokens + next + threadIdx.x,
                                next + (int)threadIdx.x < (int)s.Tq);
        }
        if (step < 0) continue;

#pragma unroll 1
        for (int slice = 0; slice < QUERIES; slice += SLICE) {
            float p[1][SLICE / 8][4] = {}, ds[1][SLICE / 8][4] = {}; // keys are the rows, queries the columns
            multiply_rows<D>(p, tiles.k + warp_row * D, tiles.q[buffer] + slice * D);
            multiply_rows<D>(ds, tiles.v + warp_row * D, tiles.dout[buffer] + slice * D); // dp so far
            if (s.causal && query + slice < mine + 15) hide<true>(p, mine, query + slice, true, 0);
#pragma unroll
            for (int n = 0; n < SLICE / 8; n++) {
                Vec<float2, 2> two = load<2>(&tiles.rows[buffer][slice + 8 * n + 2 * t]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    softmax_gradient(p[0][n][i], ds[0][n][i], two.x[i % 2].x, two.x[i % 2].y, root);
            }
            inputs.round(p), inputs.round(ds);
            multiply<D>(dv_acc, p, tiles.dout[buffer] + slice * D);
            multiply<D>(dk_acc, ds, tiles.q[buffer] + slice * D);
        }
    }

    float *stage = reinterpret_cast<float *>(tiles.k + warp_row * D);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int eight = mine + 8 * half;
        size_t place = at(b, s.kv_tokens, eight, s.kv_stride, kv, s.D);
        store_rows<D>(dk, dk_block, place, s.kv_stride, s.Tk - eight, s.D, inputs.aligned, stage, dk_acc[0],
                      half, root, 1.0f);
        store_rows<D>(dv, dv_block, place, s.kv_stride, s.Tk - eight, s.D, inputs.aligned, stage, dv_acc[0],
                      half, 1.0f, 1.0f);
    }
}

// delta = Σ_d do ∘ o: half a warp a row of a head, V channels a lane
template <int V>
static __global__ void __launch_bounds__(THREADS)
    flash_delta_kernel(float *delta, const floatX *dout, const floatX *o, AttentionShape s, bool round) {
    size_t i =
        (size_t)blockIdx.x * (THREADS / 16) + threadIdx.x / 16; // token by token, their heads side by side
    size_t h = i % s.H, t = i / s.H % s.Tq, b = i / s.H / s.Tq;
    bool exists = IN_RANGE(b < s.B);
    size_t place = at(b, s.q_tokens, t, s.o_stride, h, s.D);
    float sum = 0.0f;
    for (size_t d = threadIdx.x % 16 * V; exists && d < s.D; d += 16 * V) {
        Vec<floatX, V> x = load<V>(dout + place + d), y = load<V>(o + place + d);
#pragma unroll
        for (int e = 0; e < V; e++) sum += product_input(x.x[e], round) * to_float(y.x[e]);
    }
    for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (exists && threadIdx.x % 16 == 0) delta[(b * s.H + h) * s.q_tokens + t] = sum;
}

// ---------------------------------------------------------------------------------------------------------
// launches

// Pairs of a query and a key in the tiles that blocks of `keys` keys visit: causal, the queries from their first key on.
static double pairs_by_key(AttentionShape s, size_t keys) {
    double pairs = 0;
    for (size_t first = 0; first < s.Tk; first += keys)
        pairs += (double)(min(first + keys, s.Tk) - first) * (s.causal ? s.Tq - first : s.Tq);
    return pairs * s.B * s.H;
}

void flash_attention_delta(float *delta, const floatX *do_, const floatX *o, AttentionShape s) {
    s = with_tokens(s);
    unsigned blocks = ceil_div<size_t>(s.B * s.Tq * s.H, THREADS / 16);
    if (aligned16((s.D | s.o_stride) * sizeof(floatX), do_, o))
        flash_delta_kernel<VECTOR>
            <<<blocks, THREADS, 0, compute_stream>>>(delta, do_, o, s, matmul_inputs_bf16);
    else
        flash_delta_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(delta, do_, o, s, matmul_inputs_bf16);
    launched("flash_attention_delta");
}

// Where gradients go: written, or added to the fp32 sums of a ring (the others are NULL).
struct Gradients {
    floatX *dq, *dk, *dv;
    float *dq_block, *dk_block, *dv_block;
};

template <int D>
static void launch_backward(Gradients to, const floatX *do_, const float *delta, const float *lse,
                            const floatX *q, const floatX *k, const floatX *v, AttentionShape s) {
    s = with_tokens(s);
    bool aligned = aligned16((s.D | s.q_stride | s.kv_stride | s.o_stride) * sizeof(floatX), do_, q, k, v) &&
                   aligned16(0, to.dq, to.dk, to.dv, to.dq_block, to.dk_block, to.dv_block);
    Inputs inputs = {aligned, matmul_inputs_bf16};
    if (s.Tk > 0) {
        unsigned blocks = ceil_div<size_t>(s.Tk, Sizes<floatX, D>::KEYS) * s.KV * s.B;
        int size = sizeof(DkvTiles<floatX, D>);
        cuda_check(cudaFuncSetAttribute(flash_dkv_kernel<floatX, D>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, size));
        flash_dkv_kernel<floatX, D><<<blocks, THREADS, size, compute_stream>>>(
            to.dk, to.dv, to.dk_block, to.dv_block, do_, delta, lse, q, k, v, s, inputs);
        launched("flash_attention_backward: dk, dv");
    }
    unsigned blocks = ceil_div<size_t>(s.Tq, Sizes<floatX, D>::ROWS) * s.H * s.B;
    int size = sizeof(DqTiles<floatX, D>);
    cuda_check(
        cudaFuncSetAttribute(flash_dq_kernel<floatX, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, size));
    flash_dq_kernel<floatX, D>
        <<<blocks, THREADS, size, compute_stream>>>(to.dq, to.dq_block, do_, delta, lse, q, k, v, s, inputs);
    launched("flash_attention_backward: dq");
    kernel_flops.attention_backward += 4 * 2.0 * pairs_by_key(s, Sizes<floatX, D>::KEYS) * s.D;
    kernel_flops.attention_backward += 3 * 2.0 * pairs_by_query(s, Sizes<floatX, D>::ROWS) * s.D;
}

static void backward(Gradients to, const floatX *do_, const float *delta, const float *lse, const floatX *q,
                     const floatX *k, const floatX *v, AttentionShape s) {
    if (s.D <= 64)
        launch_backward<64>(to, do_, delta, lse, q, k, v, s);
    else if (s.D <= 96)
        launch_backward<96>(to, do_, delta, lse, q, k, v, s);
    else
        launch_backward<128>(to, do_, delta, lse, q, k, v, s);
}

void flash_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *o,
                              const float *lse, const floatX *q, const floatX *k, const floatX *v,
                              AttentionShape s, void *workspace) {
    float *delta = (float *)workspace;
    flash_attention_delta(delta, do_, o, s);
    backward({dq, dk, dv, NULL, NULL, NULL}, do_, delta, lse, q, k, v, s);
}

void flash_attention_backward_block(float *dq, float *dk, float *dv, const floatX *do_, const float *delta,
                                    const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, void *workspace) {
    (void)workspace;
    backward({NULL, NULL, NULL, dq, dk, dv}, do_, delta, lse, q, k, v, s);
}

size_t flash_attention_workspace(AttentionShape s) {
    return s.B * s.H * with_tokens(s).q_tokens * sizeof(float); // delta
}

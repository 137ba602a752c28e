// Naive attention on a GPU, the textbook's: every matrix in full, one product after another. What flash attention saves.
//
//     forward    s = q kᵀ/√D    p = softmax of rows of s    o = p v                              2 products
//     backward   dp = do vᵀ     ds = p ∘ (dp − Σ p ∘ dp)    dq = ds k    dk = dsᵀ q    dv = pᵀ do    4 products
//
// One kernel makes all six products: a thread an element of the result, whose operands it fetches one by one. Nothing is
// kept near, so each multiply-add waits for two loads from a cache.
// Bytes: s, and dp in its place, are [B,H,Tq,Tk] fp32 in the workspace, p is as large in floatX; at T = 1024 and 12 heads of
// a batch of 4 that is 200 MB written and read three times, where q, k, v and o are 25 MB.
#include "kernels/cuda.cuh"

enum { SIDE = 16, THREADS = 128 };

static __device__ inline void set(float &x, float y) {
    x = y;
}
#ifdef PRECISION_BF16
static __device__ inline void set(bf16 &x, float y) {
    x = float_to_bf16(y);
}
#endif

// Matrices of all heads of all sequences: element (row, column) of head h of sequence b stands at
// b · sequence + h · head + row · this + column · that. A transposed matrix only swaps the last two.
template <typename T> struct Matrices {
    T *x;
    size_t sequence, head, row, column;

    __device__ T &at(size_t b, size_t h, size_t i, size_t j) const {
        return x[b * sequence + h * head + i * row + j * column];
    }
    Matrices transposed() const {
        return {x, sequence, head, column, row};
    }
};

// out [rows, columns] = scale · Σ a [rows, inner] · b [inner, columns], for each of out's `heads`. A matrix that has fewer
// heads than the others (GQA) is shared by a group of theirs; where that is out, it is the sum over the group.
template <typename Out, typename A, typename B>
static __global__ void __launch_bounds__(SIDE *SIDE)
    product_kernel(Matrices<Out> out, Matrices<A> a, Matrices<B> b, float scale, size_t heads, size_t a_heads,
                   size_t b_heads, size_t rows, size_t columns, size_t inner, bool round) {
    size_t tiles = ceil_div<size_t>(columns, SIDE), tile = blockIdx.x % (tiles * ceil_div<size_t>(rows, SIDE));
    size_t head = blockIdx.x / (tiles * ceil_div<size_t>(rows, SIDE)), sequence = head / heads,
           h = head % heads;
    size_t i = tile / tiles * SIDE + threadIdx.x / SIDE, j = tile % tiles * SIDE + threadIdx.x % SIDE;
    if (!IN_RANGE(i < rows && j < columns)) return;
    size_t all = max(max(a_heads, b_heads), heads), group = all / heads;
    float sum = 0.0f;
    for (size_t one = h * group; one < (h + 1) * group; one++) // of the heads of q
        for (size_t k = 0; k < inner; k++)
            sum += product_input(a.at(sequence, one / (all / a_heads), i, k), round) *
                   product_input(b.at(sequence, one / (all / b_heads), k, j), round);
    set(out.at(sequence, h, i, j), scale * sum);
}

template <typename Out, typename A, typename B>
static void product(Matrices<Out> out, Matrices<A> a, Matrices<B> b, float scale, size_t sequences,
                    size_t heads, size_t a_heads, size_t b_heads, size_t rows, size_t columns, size_t inner) {
    unsigned blocks = ceil_div<size_t>(rows, SIDE) * ceil_div<size_t>(columns, SIDE) * heads * sequences;
    product_kernel<Out, A, B><<<blocks, SIDE * SIDE, 0, compute_stream>>>(
        out, a, b, scale, heads, a_heads, b_heads, rows, columns, inner, matmul_inputs_bf16);
    launched("naive_attention: product");
}

// A warp a row: p = softmax of the scores that the row's query sees, and 0 for the others.
static __global__ void __launch_bounds__(THREADS)
    softmax_kernel(floatX *p, const float *scores, size_t rows, size_t Tq, size_t Tk, bool causal) {
    size_t row = (size_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (!IN_RANGE(row < rows)) return; // the whole warp
    size_t seen = causal ? row % Tq + 1 : Tk;
    p += row * Tk, scores += row * Tk;
    float top = -INFINITY, sum = 0.0f;
    for (size_t j = lane; j < seen; j += WARP) top = fmaxf(top, scores[j]);
    top = warp_max(top);
    for (size_t j = lane; j < seen; j += WARP) sum += expf(scores[j] - top);
    sum = warp_sum(sum);
    for (size_t j = lane; j < Tk; j += WARP) p[j] = to_floatX(j < seen ? expf(scores[j] - top) / sum : 0.0f);
}

// A warp a row: ds = p ∘ (dp − Σ p ∘ dp), in place of dp.
static __global__ void __launch_bounds__(THREADS)
    softmax_backward_kernel(float *dp, const floatX *p, size_t rows, size_t Tk, bool round) {
    size_t row = (size_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (!IN_RANGE(row < rows)) return;
    p += row * Tk, dp += row * Tk;
    float delta = 0.0f;
    for (size_t j = lane; j < Tk; j += WARP) delta += product_input(p[j], round) * dp[j];
    delta = warp_sum(delta);
    for (size_t j = lane; j < Tk; j += WARP) dp[j] = product_input(p[j], round) * (dp[j] - delta);
}

// [tokens, heads, D] as matrices [tokens, D], and [B,H,Tq,Tk] as matrices [Tq,Tk]
template <typename T> static Matrices<T> heads_of(T *x, size_t tokens, size_t stride, size_t D) {
    return {x, tokens * stride, D, stride, 1};
}
template <typename T> static Matrices<T> square(T *x, AttentionShape s) {
    return {x, s.H * s.Tq * s.Tk, s.Tq * s.Tk, s.Tk, 1};
}

void naive_attention_forward(floatX *o, floatX *p, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace) {
    float *scores = (float *)workspace;
    size_t rows = s.B * s.H * s.Tq;
    Matrices<const floatX> Q = heads_of(q, s.Tq, s.q_stride, s.D), K = heads_of(k, s.Tk, s.kv_stride, s.D);
    Matrices<const floatX> V = heads_of(v, s.Tk, s.kv_stride, s.D), P = square<const floatX>(p, s);
    product(square(scores, s), Q, K.transposed(), 1 / sqrtf((float)s.D), s.B, s.H, s.H, s.KV, s.Tq, s.Tk, s.D);
    softmax_kernel<<<ceil_div<size_t>(rows, THREADS / WARP), THREADS, 0, compute_stream>>>(
        p, scores, rows, s.Tq, s.Tk, s.causal);
    launched("naive_attention: softmax");
    product(heads_of(o, s.Tq, s.o_stride, s.D), P, V, 1.0f, s.B, s.H, s.H, s.KV, s.Tq, s.D, s.Tk);
    kernel_flops.attention_forward += 2 * 2.0 * s.B * s.H * s.Tq * s.Tk * s.D;
}

void naive_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *p,
                              const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                              void *workspace) {
    float *ds = (float *)workspace, root = 1 / sqrtf((float)s.D);
    size_t rows = s.B * s.H * s.Tq;
    Matrices<const floatX> Q = heads_of(q, s.Tq, s.q_stride, s.D), K = heads_of(k, s.Tk, s.kv_stride, s.D);
    Matrices<const floatX> V = heads_of(v, s.Tk, s.kv_stride, s.D), dO = heads_of(do_, s.Tq, s.o_stride, s.D);
    Matrices<const float> dS = square<const float>(ds, s);
    product(square(ds, s), dO, V.transposed(), 1.0f, s.B, s.H, s.H, s.KV, s.Tq, s.Tk, s.D);
    softmax_backward_kernel<<<ceil_div<size_t>(rows, THREADS / WARP), THREADS, 0, compute_stream>>>(
        ds, p, rows, s.Tk, matmul_inputs_bf16);
    launched("naive_attention: softmax backward");
    product(heads_of(dq, s.Tq, s.q_stride, s.D), dS, K, root, s.B, s.H, s.H, s.KV, s.Tq, s.D, s.Tk);
    product(heads_of(dk, s.Tk, s.kv_stride, s.D), dS.transposed(), Q, root, s.B, s.KV, s.H, s.H, s.Tk, s.D,
            s.Tq);
    product(heads_of(dv, s.Tk, s.kv_stride, s.D), square(p, s).transposed(), dO, 1.0f, s.B, s.KV, s.H, s.H,
            s.Tk, s.D, s.Tq);
    kernel_flops.attention_backward += 4 * 2.0 * s.B * s.H * s.Tq * s.Tk * s.D;
}

size_t naive_attention_workspace(AttentionShape s) {
    return s.B * s.H * s.Tq * s.Tk * sizeof(float);
}

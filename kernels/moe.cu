// moe on a GPU; moe.c says what it computes, and has the picture.
//
// Of what moves rows (permute, combine, the gates' gradients) a warp has a row, 16 bytes a lane: as fast as memory. The router has
// few columns, E, and long sums, over C or N:
//
//     logits      a warp has ROWS tokens, and goes through all weights for them
//     dinp        a thread has V channels of a token, and goes through the experts
//     dweight     a warp has an expert and 32·V channels for PART tokens; a second kernel adds the parts, in order
//
// The choice is a warp's for a token: k times it looks for the best of the E values, which lie in shared memory; what is taken
// becomes NaN there. The sort is a block's for an expert: it counts the pairs of smaller ones, which come before, and then goes
// through all pairs again to seat its own, in order. So that reads all pairs 2·E times, from the cache: at 64 Ki pairs and 256
// experts 128 MB.
//
// Atomics are of integers alone, and of minima: no order changes a bit.
// Bytes: permute reads each row once for k written, combine k for one; of the router, N·(C + 3·E) and E·C in all, each way.
#include "kernels/cuda.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP };
#define TINY 1e-20f // beside a sum of scores that are all 0

static __device__ inline int lane_of() {
    return threadIdx.x % WARP;
}
// The row that this warp has, of those that a grid of blocks has.
static __device__ inline size_t my_row() {
    return (size_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
}
static unsigned blocks_of(size_t rows, size_t a_block) {
    return ceil_div(rows, a_block);
}

// ---------------------------------------------------------------------------------------------------------
// The router's product.
enum { ROWS = 4 };

template <int V>
static __global__ void __launch_bounds__(THREADS)
    router_forward_kernel(float *logits, const floatX *inp, const floatX *weight, size_t N, size_t C,
                          size_t E) {
    const size_t first = my_row() * ROWS;
    for (size_t e = 0; e < E; e++) {
        float sum[ROWS] = {};
        for (size_t c = lane_of() * V; c < C; c += WARP * V) {
            float w[V], x[V];
            load_floats<V>(w, weight + e * C + c);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (IN_RANGE(first + r < N)) {
                    load_floats<V>(x, inp + (first + r) * C + c);
                    for (int v = 0; v < V; v++) sum[r] += x[v] * w[v];
                }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float total = warp_sum(sum[r]);
            if (lane_of() == r && IN_RANGE(first + r < N)) logits[(first + r) * E + e] = total;
        }
    }
}

void moe_router_forward(float *logits, const floatX *inp, const floatX *weight, size_t N, size_t C, size_t E) {
    const unsigned blocks = blocks_of(N, WARPS * ROWS);
    if (aligned16(C * sizeof(floatX), inp, weight))
        router_forward_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(logits, inp, weight, N, C, E);
    else
        router_forward_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(logits, inp, weight, N, C, E);
    launched("moe_router_forward");
    kernel_flops.gemm_forward += 2.0 * N * C * E;
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    router_backward_input_kernel(floatX *dinp, const float *dlogits, const floatX *weight, size_t N, size_t C,
                                 size_t E) {
    const size_t n = my_row();
    if (!IN_RANGE(n < N)) return;
    for (size_t c = lane_of() * V; c < C; c += WARP * V) {
        float sum[V], w[V];
        load_floats<V>(sum, dinp + n * C + c);
        for (size_t e = 0; e < E; e++) {
            load_floats<V>(w, weight + e * C + c);
            for (int v = 0; v < V; v++) sum[v] += dlogits[n * E + e] * w[v];
        }
        store_floats<V>(dinp + n * C + c, sum);
    }
}

void moe_router_backward_input(floatX *dinp, const float *dlogits, const floatX *weight, size_t N, size_t C,
                               size_t E) {
    const unsigned blocks = blocks_of(N, WARPS);
    if (aligned16(C * sizeof(floatX), dinp, weight))
        router_backward_input_kernel<VECTOR>
            <<<blocks, THREADS, 0, compute_stream>>>(dinp, dlogits, weight, N, C, E);
    else
        router_backward_input_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(dinp, dlogits, weight, N, C, E);
    launched("moe_router_backward_input");
    kernel_flops.gemm_backward += 2.0 * N * C * E;
}

// Tokens that a warp adds up in a row.
enum { PART = 128 };

template <int V>
static __global__ void __launch_bounds__(THREADS)
    router_parts_kernel(float *parts, const float *dlogits, const floatX *inp, size_t N, size_t C, size_t E) {
    const size_t e = (size_t)blockIdx.y * WARPS + threadIdx.x / WARP,
                 c = ((size_t)blockIdx.x * WARP + lane_of()) * V;
    const size_t begin = (size_t)blockIdx.z * PART, end = begin + PART < N ? begin + PART : N;
    if (!IN_RANGE(e < E && c < C)) return;
    float sum[V] = {}, x[V];
#pragma unroll 4
    for (size_t n = begin; n < end; n++) {
        load_floats<V>(x, inp + n * C + c);
        for (int v = 0; v < V; v++) sum[v] += dlogits[n * E + e] * x[v];
    }
    store_floats<V>(parts + (blockIdx.z * E + e) * C + c, sum);
}

static __global__ void __launch_bounds__(THREADS)
    router_add_parts_kernel(floatX *dweight, const float *parts, size_t n_parts, size_t n) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (!IN_RANGE(i < n)) return;
    float sum = 0;
    for (size_t p = 0; p < n_parts; p++) sum += parts[p * n + i];
    dweight[i] = to_floatX(to_float(dweight[i]) + sum);
}

template <int V> static dim3 part_blocks(size_t N, size_t C, size_t E) {
    return dim3(ceil_div<size_t>(C, WARP * V), ceil_div<size_t>(E, WARPS), ceil_div<size_t>(N, PART));
}

void moe_router_backward_weight(floatX *dweight, const float *dlogits, const floatX *inp, size_t N, size_t C,
                                size_t E, void *workspace) {
    float *parts = (float *)workspace; // [N/PART,E,C]
    if (aligned16(C * sizeof(floatX), inp, parts))
        router_parts_kernel<VECTOR>
            <<<part_blocks<VECTOR>(N, C, E), THREADS, 0, compute_stream>>>(parts, dlogits, inp, N, C, E);
    else
        router_parts_kernel<1>
            <<<part_blocks<1>(N, C, E), THREADS, 0, compute_stream>>>(parts, dlogits, inp, N, C, E);
    launched("moe_router_parts");
    router_add_parts_kernel<<<blocks_of(E * C, THREADS), THREADS, 0, compute_stream>>>(
        dweight, parts, ceil_div<size_t>(N, PART), E * C);
    launched("moe_router_add_parts");
    kernel_flops.gemm_backward += 2.0 * N * C * E;
}

size_t moe_router_workspace(size_t N, size_t C, size_t E) {
    return ceil_div<size_t>(N, PART) * E * C * sizeof(float);
}

// ---------------------------------------------------------------------------------------------------------
// The choice.
enum { ROUTE_WARPS = 4, ROUTE_THREADS = ROUTE_WARPS * WARP };

// A value, and where it stands: the larger comes first, of equal ones that with the lower place. place = end: none is left.
struct Best {
    float value;
    unsigned place;
};

// The best of value [begin, end) that is not taken, of a whole warp. From begin 0 on a lane looks at the places that it fills when
// it goes through all, so that nobody has to wait between the two.
static __device__ inline Best best_of(const float *value, unsigned begin, unsigned end) {
    Best best = {0, end};
    for (unsigned i = begin + lane_of(); i < end; i += WARP)
        if (!isnan(value[i]) && (best.place == end || value[i] > best.value)) best = {value[i], i};
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        const float v = __shfl_xor_sync(0xffffffff, best.value, lanes);
        const unsigned place = __shfl_xor_sync(0xffffffff, best.place, lanes);
        const bool better = v > best.value || (v == best.value && place < best.place);
        if (place < end && (best.place == end || better)) best = {v, place};
    }
    return best;
}

static __device__ inline void take(float *value, unsigned place) {
    __syncwarp(); // all have looked
    if (lane_of() == 0) value[place] = NAN;
    __syncwarp();
}

// Takes the experts of all groups but the best ones out of the choice: moe.c's limit_groups. copy [E], score [groups].
static __device__ inline float limit_groups(float *value, float *copy, float *score, MoeRouting r) {
    const unsigned E = r.experts, groups = r.groups, each = E / groups;
    const unsigned top = r.topk / r.group_limit > 1 ? r.topk / r.group_limit : 1;
    for (unsigned e = lane_of(); e < E; e += WARP) copy[e] = value[e];
    for (unsigned g = 0; g < groups; g++) {
        float sum = 0;
        for (unsigned i = 0; i < top && i < each; i++) {
            const Best b = best_of(copy, g * each, (g + 1) * each);
            take(copy, b.place);
            sum += b.value;
        }
        if (lane_of() == 0) score[g] = sum;
    }
    __syncwarp();
    Best last = {0, 0};
    for (unsigned i = 0; i < r.group_limit; i++) {
        last = best_of(score, 0, groups);
        take(score, last.place);
    }
    const Best next = best_of(score, 0, groups);
    for (unsigned e = lane_of(); e < E; e += WARP)
        if (!isnan(score[e / each])) value[e] = NAN;
    return last.value - next.value;
}

static __global__ void __launch_bounds__(ROUTE_THREADS)
    route_kernel(float *logits, int32_t *index, float *gate, float *margin, const float *bias, size_t N,
                 MoeRouting r) {
    extern __shared__ unsigned char smem[];
    const size_t n = my_row(), E = r.experts, k = r.topk;
    if (!IN_RANGE(n < N)) return;
    float *value = (float *)(void *)smem + threadIdx.x / WARP * 3 * E;
    float *score = logits + n * E, most = -INFINITY, sum = 0;
    for (size_t e = lane_of(); e < E; e += WARP) most = fmaxf(most, score[e]);
    most = warp_max(most);
    for (size_t e = lane_of(); e < E; e += WARP) {
        const float s = r.sigmoid ? 1 / (1 + expf(-score[e])) : expf(score[e] - most);
        sum += s;
        score[e] = s;
    }
    sum = warp_sum(sum);
    for (size_t e = lane_of(); e < E; e += WARP) {
        if (!r.sigmoid) score[e] /= sum;
        const float v = score[e] + (bias ? bias[e] : 0);
        value[e] = isnan(v) ? -INFINITY : v;
    }
    float least = r.group_limit < r.groups ? limit_groups(value, value + E, value + 2 * E, r) : INFINITY;
    Best last = {0, 0};
    sum = 0;
    for (size_t j = 0; j < k; j++) {
        last = best_of(value, 0, E);
        take(value, last.place);
        sum += score[last.place];
        if (lane_of() == 0) index[n * k + j] = last.place;
    }
    const Best next = best_of(value, 0, E);
    if (next.place < E) least = fminf(least, last.value - next.value);
    if (lane_of() == 0) margin[n] = least;
    __syncwarp();
    for (size_t j = lane_of(); j < k; j += WARP)
        gate[n * k + j] = score[index[n * k + j]] / (k > 1 ? sum + TINY : 1);
}

void moe_route(float *logits, int32_t *index, float *gate, float *margin, const float *bias, size_t N,
               MoeRouting r) {
    const size_t shared = ROUTE_WARPS * 3 * r.experts * sizeof(float);
    const unsigned blocks = blocks_of(N, ROUTE_WARPS);
    route_kernel<<<blocks, ROUTE_THREADS, shared, compute_stream>>>(logits, index, gate, margin, bias, N, r);
    launched("moe_route");
}

static __global__ void __launch_bounds__(THREADS)
    route_backward_kernel(float *dlogits, const float *dgate, const int32_t *index, const float *gate,
                          const float *scores, const float *chosen, float factor, size_t first, size_t N,
                          size_t T, MoeRouting r) {
    const size_t n = my_row(), E = r.experts, k = r.topk;
    if (!IN_RANGE(n < N)) return;
    const float *s = scores + n * E, *f = factor != 0 ? chosen + (first + n) / T * E : NULL;
    float *d = dlogits + n * E, sum = 0, common = 0, mean = 0;
    for (size_t e = lane_of(); e < E; e += WARP) d[e] = f ? factor * f[e] : 0;
    for (size_t j = lane_of(); j < k; j += WARP) {
        sum += s[index[n * k + j]];
        common += dgate[n * k + j] * gate[n * k + j];
    }
    sum = warp_sum(sum) + TINY, common = warp_sum(common);
    __syncwarp();
    for (size_t j = lane_of(); j < k; j += WARP)
        d[index[n * k + j]] += k > 1 ? (dgate[n * k + j] - common) / sum : dgate[n * k + j];
    __syncwarp();
    for (size_t e = lane_of(); e < E; e += WARP) mean += s[e] * d[e];
    mean = warp_sum(mean);
    for (size_t e = lane_of(); e < E; e += WARP) d[e] = s[e] * (r.sigmoid ? (1 - s[e]) * d[e] : d[e] - mean);
}

void moe_route_backward(float *dlogits, const float *dgate, const int32_t *index, const float *gate,
                        const float *scores, const float *chosen, float factor, size_t first, size_t N,
                        size_t T, MoeRouting r) {
    route_backward_kernel<<<blocks_of(N, WARPS), THREADS, 0, compute_stream>>>(
        dlogits, dgate, index, gate, scores, chosen, factor, first, N, T, r);
    launched("moe_route_backward");
}

// ---------------------------------------------------------------------------------------------------------
// What is counted.

// A block has 32 experts of a sequence, a lane one of them, and each warp every eighth token.
static __global__ void __launch_bounds__(THREADS)
    sequence_sums_kernel(float *sums, const int32_t *index, const float *scores, size_t first, size_t N,
                         size_t T, MoeRouting r) {
    __shared__ float shared[2][WARPS][WARP];
    const size_t b = blockIdx.y, E = r.experts, k = r.topk, e = (size_t)blockIdx.x * WARP + lane_of();
    const size_t begin = b * T > first ? b * T - first : 0, warp = threadIdx.x / WARP;
    size_t end = (b + 1) * T > first ? (b + 1) * T - first : 0;
    if (end > N) end = N;
    float chosen = 0, score = 0;
    for (size_t n = begin + warp; n < end; n += WARPS) {
        for (size_t j = 0; j < k; j++) chosen += (size_t)index[n * k + j] == e;
        if (IN_RANGE(e < E)) score += scores[n * E + e];
    }
    shared[0][warp][lane_of()] = chosen, shared[1][warp][lane_of()] = score;
    __syncthreads();
    if (warp < 2 && IN_RANGE(e < E)) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += shared[warp][w][lane_of()];
        sums[(warp * gridDim.y + b) * E + e] = sum;
    }
}

void moe_sequence_sums(float *sums, const int32_t *index, const float *scores, size_t first, size_t N, size_t B,
                       size_t T, MoeRouting r) {
    sequence_sums_kernel<<<dim3(ceil_div<size_t>(r.experts, WARP), B), THREADS, 0, compute_stream>>>(
        sums, index, scores, first, N, T, r);
    launched("moe_sequence_sums");
}

static __global__ void __launch_bounds__(THREADS)
    balance_loss_kernel(double *sum, const float *sums, size_t n) {
    __shared__ double shared[WARP];
    double mine = 0;
    for (size_t i = threadIdx.x; i < n; i += THREADS) mine += (double)sums[i] * sums[n + i];
    mine = block_sum(mine, shared);
    if (threadIdx.x == 0) *sum += mine;
}

void moe_balance_loss(double *sum, const float *sums, size_t B, size_t E) {
    balance_loss_kernel<<<1, THREADS, 0, compute_stream>>>(sum, sums, B * E);
    launched("moe_balance_loss");
}

typedef unsigned long long u64;

static __device__ inline u64 mix(u64 x) { // as moe.c's
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// A thread has a token. Its block adds up in shared memory first.
static __global__ void __launch_bounds__(THREADS)
    observe_kernel(u64 *seen, float *least, const int32_t *index, const float *margin, const int32_t *positions,
                   u64 layer, u64 sequence, size_t first, size_t N, size_t T, MoeRouting r) {
    __shared__ u64 hash, groups, most;
    __shared__ int smallest;
    __shared__ unsigned copies[MOE_MOST_EXPERTS];
    const size_t n = (size_t)blockIdx.x * THREADS + threadIdx.x, E = r.experts, each = E / r.groups;
    for (size_t e = threadIdx.x; e < E; e += THREADS) copies[e] = 0;
    if (threadIdx.x == 0) hash = groups = most = 0, smallest = __float_as_int(INFINITY);
    __syncthreads();
    if (IN_RANGE(n < N)) {
        const size_t b = (first + n) / T, t = (first + n) % T;
        const u64 token = mix(mix(layer << 40 ^ (sequence + b)) ^ (u64)positions[t]);
        const int32_t *e = index + n * r.topk;
        u64 sum = 0, met = 0;
        for (size_t j = 0; j < r.topk; j++) {
            size_t i = 0;
            while (i < j && e[i] / each != e[j] / each) i++;
            met += i == j; // the first one of its group
            sum += mix(token + (u64)e[j] + 1);
            atomicAdd(&copies[e[j]], 1u);
        }
        atomicAdd(&hash, sum);
        atomicAdd(&groups, met);
        atomicMax(&most, met);
        // (Of floats that are no less than 0, the bits have the same order.)
        if (margin[n] >= 0) atomicMin(&smallest, __float_as_int(margin[n]));
    }
    __syncthreads();
    for (size_t i = threadIdx.x; i < E; i += THREADS)
        if (copies[i]) atomicAdd(&seen[i], (u64)copies[i]);
    if (threadIdx.x != 0) return;
    atomicAdd(&seen[E], hash);
    atomicAdd(&seen[E + 1], groups);
    atomicMax(&seen[E + 2], most);
    atomicMin((int *)(void *)least, smallest);
}

void moe_observe(uint64_t *seen, float *least, const int32_t *index, const float *margin,
                 const int32_t *positions, uint64_t layer, uint64_t sequence, size_t first, size_t N, size_t T,
                 MoeRouting r) {
    observe_kernel<<<blocks_of(N, THREADS), THREADS, 0, compute_stream>>>(
        (u64 *)(void *)seen, least, index, margin, positions, layer, sequence, first, N, T, r);
    launched("moe_observe");
}

// ---------------------------------------------------------------------------------------------------------
// Sorted by expert.
static __global__ void __launch_bounds__(THREADS)
    sort_kernel(int32_t *place, int32_t *count, const int32_t *index, size_t pairs) {
    __shared__ int mine[WARPS];
    const int expert = blockIdx.x, lane = lane_of(), warp = threadIdx.x / WARP;
    int before = 0, seated = 0;
    for (size_t i = threadIdx.x; i < pairs; i += THREADS) before += index[i] < expert;
    before = warp_sum(before);
    if (lane == 0) mine[warp] = before;
    __syncthreads();
    int next = 0;
    for (int w = 0; w < WARPS; w++) next += mine[w];
    for (size_t begin = 0; begin < pairs; begin += THREADS) {
        const size_t i = begin + threadIdx.x;
        const bool is = IN_RANGE(i < pairs) && index[i] == expert;
        const unsigned votes = __ballot_sync(0xffffffff, is);
        __syncthreads(); // all have read the last ones' numbers
        if (lane == 0) mine[warp] = __popc(votes);
        __syncthreads();
        int here = next + seated + __popc(votes & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) here += mine[w];
            seated += mine[w];
        }
        if (is) place[i] = here;
    }
    if (threadIdx.x == 0) count[expert] = seated;
}

void moe_sort(int32_t *place, int32_t *count, const int32_t *index, size_t pairs, size_t E) {
    sort_kernel<<<E, THREADS, 0, compute_stream>>>(place, count, index, pairs);
    launched("moe_sort");
}

// A warp has a pair.
template <int V>
static __global__ void __launch_bounds__(THREADS)
    permute_kernel(floatX *out, const floatX *inp, const float *gate, const int32_t *place, size_t pairs,
                   size_t k, size_t C) {
    const size_t i = my_row();
    if (!IN_RANGE(i < pairs)) return;
    const floatX *from = inp + i / k * C;
    floatX *to = out + (size_t)place[i] * C;
    const float g = gate ? gate[i] : 1;
    for (size_t c = lane_of() * V; c < C; c += WARP * V) {
        float x[V];
        load_floats<V>(x, from + c);
        for (int v = 0; v < V; v++) x[v] *= g;
        store_floats<V>(to + c, x);
    }
}

void moe_permute(floatX *out, const floatX *inp, const float *gate, const int32_t *place, size_t N, size_t k,
                 size_t C) {
    const unsigned blocks = blocks_of(N * k, WARPS);
    if (aligned16(C * sizeof(floatX), out, inp))
        permute_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(out, inp, gate, place, N * k, k, C);
    else
        permute_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(out, inp, gate, place, N * k, k, C);
    launched("moe_permute");
}

// A warp has a token.
template <int V>
static __global__ void __launch_bounds__(THREADS)
    combine_kernel(floatX *out, const floatX *rows, const float *gate, const int32_t *place, bool add, size_t N,
                   size_t k, size_t C) {
    const size_t n = my_row();
    if (!IN_RANGE(n < N)) return;
    for (size_t c = lane_of() * V; c < C; c += WARP * V) {
        float sum[V] = {}, x[V];
        if (add) load_floats<V>(sum, out + n * C + c);
        for (size_t j = 0; j < k; j++) {
            load_floats<V>(x, rows + (size_t)place[n * k + j] * C + c);
            const float g = gate ? gate[n * k + j] : 1;
            for (int v = 0; v < V; v++) sum[v] += g * x[v];
        }
        store_floats<V>(out + n * C + c, sum);
    }
}

void moe_combine(floatX *out, const floatX *rows, const float *gate, const int32_t *place, bool add, size_t N,
                 size_t k, size_t C) {
    const unsigned blocks = blocks_of(N, WARPS);
    if (aligned16(C * sizeof(floatX), out, rows))
        combine_kernel<VECTOR><<<blocks, THREADS, 0, compute_stream>>>(out, rows, gate, place, add, N, k, C);
    else
        combine_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(out, rows, gate, place, add, N, k, C);
    launched("moe_combine");
}

// A warp has a pair.
template <int V>
static __global__ void __launch_bounds__(THREADS)
    gate_backward_kernel(float *dgate, const floatX *dout, const floatX *rows, const int32_t *place,
                         size_t pairs, size_t k, size_t C) {
    const size_t i = my_row();
    if (!IN_RANGE(i < pairs)) return;
    const floatX *d = dout + i / k * C, *x = rows + (size_t)place[i] * C;
    float sum = 0;
    for (size_t c = lane_of() * V; c < C; c += WARP * V) {
        float a[V], b[V];
        load_floats<V>(a, d + c);
        load_floats<V>(b, x + c);
        for (int v = 0; v < V; v++) sum += a[v] * b[v];
    }
    sum = warp_sum(sum);
    if (lane_of() == 0) dgate[i] = sum;
}

void moe_gate_backward(float *dgate, const floatX *dout, const floatX *rows, const int32_t *place, size_t N,
                       size_t k, size_t C) {
    const unsigned blocks = blocks_of(N * k, WARPS);
    if (aligned16(C * sizeof(floatX), dout, rows))
        gate_backward_kernel<VECTOR>
            <<<blocks, THREADS, 0, compute_stream>>>(dgate, dout, rows, place, N * k, k, C);
    else
        gate_backward_kernel<1><<<blocks, THREADS, 0, compute_stream>>>(dgate, dout, rows, place, N * k, k, C);
    launched("moe_gate_backward");
}

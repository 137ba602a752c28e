// embedding on a GPU; embedding.c says what it computes.
//
// Forward: a warp copies or adds a row, 16 bytes a lane.
//
// Backward needs the places of each token side by side, in order. A radix sort from the least significant digit
// does it: a stable sort by each 8 bits of the token, the lowest first, leaves places sorted by token and,
// within a token, as they were. A warp has a stretch of STRETCH places, and one pass over one digit takes three
// kernels:
//
//     count      how often each of the 256 digits stands in each stretch
//     scan       where in the new order each stretch's first place of each digit goes: after all smaller
//                digits, and after this digit in the stretches before
//     scatter    32 places at a time go there; lanes with the same digit see each other by votes and take
//                consecutive seats
//
// Then a run of places has one row of the table. A warp adds up to PART places of a run, in order, for 32·V
// channels:
//
//     sorted places   │ run of token 2 │ run of token 7                      │ run of token 9 │
//     warps           │ a part         │ part   │ part   │ part   │ rest     │ a part         │
//                       into the table   ↓ fp32, and a second kernel adds these, in order
//
// so that a token that stands everywhere is not one warp's work, and no order is left to chance: no atomics but
// counts. Tokens of −1, whose rows are another rank's, are sorted as token V: the last run, which no warp adds.
// Bytes: forward reads 2 rows and writes 1 a token. Backward reads dout once for each table, and reads and
// writes each row that has a token here. The integers, those of the sort and those by which a warp finds its
// run, are many requests and few sectors: at C = 768 in bf16 a third of the bytes asked for, an eighth of the
// sectors, and most of these are in a cache.
#include <utility>
#include "kernels/cuda.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / WARP,
    DIGITS = 256, // of 8 bits
    STRETCH = 512,
    PART = 128,
};
static_assert(THREADS == DIGITS, "scan_kernel has a thread a digit");

// ---------------------------------------------------------------------------------------------------------
template <int V>
static __global__ void __launch_bounds__(THREADS)
    embedding_forward_kernel(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                             const int32_t *positions, size_t N, size_t T, size_t C) {
    const size_t n = (size_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (!IN_RANGE(n < N)) return;
    const floatX *token = tokens[n] < 0 ? NULL : wte + tokens[n] * C,
                 *position = wpe ? wpe + positions[n % T] * C : NULL;
    for (size_t c = threadIdx.x % WARP * V; c < C; c += WARP * V) {
        float x[V] = {}, p[V];
        if (token) load_floats<V>(x, token + c);
        if (position) {
            load_floats<V>(p, position + c);
            for (int k = 0; k < V; k++) x[k] += p[k];
        }
        store_floats<V>(out + n * C + c, x);
    }
}

void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       const int32_t *positions, size_t B, size_t T, size_t C) {
    const size_t N = B * T;
    const unsigned blocks = ceil_div<size_t>(N, WARPS);
    if (aligned16(C * sizeof(floatX), out, wte, wpe))
        embedding_forward_kernel<VECTOR>
            <<<blocks, THREADS, 0, compute_stream>>>(out, tokens, wte, wpe, positions, N, T, C);
    else
        embedding_forward_kernel<1>
            <<<blocks, THREADS, 0, compute_stream>>>(out, tokens, wte, wpe, positions, N, T, C);
    launched("embedding_forward");
}

// ---------------------------------------------------------------------------------------------------------
// The sort. Places that a pass finds in order [N], or 0, 1, 2, … before the first (order NULL); digit `shift`
// bits up.
struct Pass {
    const uint32_t *order;
    const int32_t *tokens;
    uint32_t *count; // [stretches, DIGITS], then where the next one goes
    unsigned N, V, shift;
};

static __device__ inline unsigned place_at(const Pass &p, unsigned i) {
    return p.order ? p.order[i] : i;
}
static __device__ inline unsigned digit_of(const Pass &p, unsigned place) {
    const unsigned token = min((unsigned)p.tokens[place], p.V); // −1 is the largest of all
    return token >> p.shift & (DIGITS - 1);
}

static __global__ void __launch_bounds__(THREADS) count_kernel(Pass p) {
    __shared__ uint32_t count[WARPS][DIGITS];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, stretch = blockIdx.x * WARPS + warp;
    const unsigned begin = stretch * STRETCH, end = min(p.N, begin + STRETCH);
    if (!IN_RANGE(begin < p.N)) return;
    for (unsigned d = lane; d < DIGITS; d += WARP) count[warp][d] = 0;
    __syncwarp();
    for (unsigned i = begin + lane; i - lane < end; i += WARP)
        if (IN_RANGE(i < end)) atomicAdd(&count[warp][digit_of(p, place_at(p, i))], 1);
    __syncwarp();
    for (unsigned d = lane; d < DIGITS; d += WARP) p.count[(size_t)stretch * DIGITS + d] = count[warp][d];
}

static __global__ void __launch_bounds__(DIGITS) scan_kernel(uint32_t *count, unsigned stretches) {
    __shared__ uint32_t total[DIGITS];
    const unsigned digit = threadIdx.x;
    uint32_t sum = 0, next = 0;
    for (unsigned s = 0; s < stretches; s++) sum += count[(size_t)s * DIGITS + digit];
    total[digit] = sum;
    __syncthreads();
    for (unsigned d = 0; d < digit; d++) next += total[d];
    for (unsigned s = 0; s < stretches; s++) {
        uint32_t *here = count + (size_t)s * DIGITS + digit, n = *here;
        *here = next;
        next += n;
    }
}

static __global__ void __launch_bounds__(THREADS) scatter_kernel(uint32_t *sorted, Pass p) {
    __shared__ uint32_t next[WARPS][DIGITS];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, stretch = blockIdx.x * WARPS + warp;
    const unsigned begin = stretch * STRETCH, end = min(p.N, begin + STRETCH);
    if (!IN_RANGE(begin < p.N)) return;
    for (unsigned d = lane; d < DIGITS; d += WARP) next[warp][d] = p.count[(size_t)stretch * DIGITS + d];
    for (unsigned i = begin + lane; i - lane < end; i += WARP) {
        const bool inside = IN_RANGE(i < end);
        const unsigned place = inside ? place_at(p, i) : 0, digit = inside ? digit_of(p, place) : 0;
        unsigned same = __ballot_sync(0xffffffff, inside); // lanes with my digit
        for (unsigned bit = 1; bit < DIGITS; bit *= 2) {
            unsigned votes = __ballot_sync(0xffffffff, digit & bit);
            same &= digit & bit ? votes : ~votes;
        }
        const unsigned before = __popc(same & ((1u << lane) - 1));
        __syncwarp(); // the last 32 have moved `next` on
        if (inside) sorted[next[warp][digit] + before] = place;
        __syncwarp(); // all have read it
        if (inside && before == 0) next[warp][digit] += __popc(same);
    }
}

// first[token] and end[token] of each run, but that of −1; the tokens that do not stand here keep nothing.
static __global__ void __launch_bounds__(THREADS)
    runs_kernel(uint32_t *first, uint32_t *end, const uint32_t *sorted, const int32_t *tokens, unsigned N) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (!IN_RANGE(i < N)) return;
    const int32_t token = tokens[sorted[i]];
    if (!IN_RANGE(token >= 0)) return;
    const bool as_before = IN_RANGE(i > 0) && tokens[sorted[i - 1]] == token;
    const bool as_after = IN_RANGE(i + 1 < N) && tokens[sorted[i + 1]] == token;
    if (!as_before) first[token] = i;
    if (!as_after) end[token] = i + 1;
}

// ---------------------------------------------------------------------------------------------------------
// The sums. sum [V] = Σ of `count` rows of x, in order: rows[0], rows[1], … or (NULL) 0, step, …; x points at the first
// of the V channels.
template <int V, typename T>
static __device__ inline void sum_rows(float (&sum)[V], const T *x, const uint32_t *rows, size_t step,
                                       size_t count, size_t C) {
    for (int k = 0; k < V; k++) sum[k] = 0.0f;
#pragma unroll 4
    for (size_t i = 0; i < count; i++) {
        float v[V];
        load_floats<V>(v, x + (rows ? rows[i] : i * step) * C);
        for (int k = 0; k < V; k++) sum[k] += v[k];
    }
}
// to [V] += sum, in one rounding
template <int V> static __device__ inline void add(floatX *to, const float (&sum)[V]) {
    float v[V];
    load_floats<V>(v, to);
    for (int k = 0; k < V; k++) v[k] += sum[k];
    store_floats<V>(to, v);
}

struct Runs {
    const uint32_t *sorted, *first, *end;
    const int32_t *tokens;
    float *parts; // [slots, 2, C]
    unsigned N;
};

// Parts of long runs that start among 128 sorted places are two at most: a run's first part, which is whole,
// and a later one.
static __device__ inline float *part_sum(const Runs &r, unsigned i, bool first, size_t C) {
    return r.parts + (i / PART * 2 + (first ? 0 : 1)) * C;
}

template <int V>
static __global__ void __launch_bounds__(THREADS)
    add_parts_kernel(floatX *dwte, const floatX *dout, Runs r, size_t C) {
    const unsigned i = blockIdx.x * WARPS + threadIdx.x / WARP;
    const size_t c = ((size_t)blockIdx.y * WARP + threadIdx.x % WARP) * V;
    if (!IN_RANGE(i < r.N && c < C)) return;
    const int32_t token = r.tokens[r.sorted[i]];
    if (!IN_RANGE(token >= 0)) return;
    const unsigned first = r.first[token], end = r.end[token];
    if ((i - first) % PART) return;
    float sum[V];
    sum_rows<V>(sum, dout + c, r.sorted + i, 0, min(end - i, (unsigned)PART), C);
    if (end - first <= PART)
        add<V>(dwte + token * C + c, sum);
    else
        store_floats<V>(part_sum(r, i, i == first, C) + c, sum);
}

template <int V>
static __global__ void __launch_bounds__(THREADS) add_long_runs_kernel(floatX *dwte, Runs r, size_t C) {
    const unsigned i = blockIdx.x * WARPS + threadIdx.x / WARP;
    const size_t c = ((size_t)blockIdx.y * WARP + threadIdx.x % WARP) * V;
    if (!IN_RANGE(i < r.N && c < C)) return;
    const int32_t token = r.tokens[r.sorted[i]];
    if (!IN_RANGE(token >= 0)) return;
    const unsigned end = r.end[token];
    if (r.first[token] != i || end - i <= PART) return;
    float sum[V], rest[V];
    load_floats<V>(sum, part_sum(r, i, true, C) + c);
    sum_rows<V>(rest, part_sum(r, i + PART, false, C) + c, NULL, 2, (end - i - 1) / PART, C);
    for (int k = 0; k < V; k++) sum[k] += rest[k];
    add<V>(dwte + token * C + c, sum);
}

// a position stands once in each sequence
template <int V>
static __global__ void __launch_bounds__(THREADS)
    add_positions_kernel(floatX *dwpe, const floatX *dout, const int32_t *positions, size_t B, size_t T,
                         size_t C) {
    const size_t t = (size_t)blockIdx.x * WARPS + threadIdx.x / WARP,
                 c = ((size_t)blockIdx.y * WARP + threadIdx.x % WARP) * V;
    if (!IN_RANGE(t < T && c < C)) return;
    float sum[V];
    sum_rows<V>(sum, dout + t * C + c, NULL, T, B, C);
    add<V>(dwpe + positions[t] * C + c, sum);
}

template <int V>
static void add_rows(floatX *dwte, floatX *dwpe, const floatX *dout, Runs r, const int32_t *positions, size_t B,
                     size_t T, size_t C) {
    const unsigned pieces = ceil_div<size_t>(C, WARP * V);
    const dim3 blocks(ceil_div<size_t>(r.N, WARPS), pieces);
    add_parts_kernel<V><<<blocks, THREADS, 0, compute_stream>>>(dwte, dout, r, C);
    launched("add_parts");
    add_long_runs_kernel<V><<<blocks, THREADS, 0, compute_stream>>>(dwte, r, C);
    launched("add_long_runs");
    if (!dwpe) return;
    const dim3 position_blocks(ceil_div<size_t>(T, WARPS), pieces);
    add_positions_kernel<V><<<position_blocks, THREADS, 0, compute_stream>>>(dwpe, dout, positions, B, T, C);
    launched("add_positions");
}

// ---------------------------------------------------------------------------------------------------------
static size_t slots(size_t N) {
    return ceil_div<size_t>(N, PART);
}
static size_t stretches(size_t N) {
    return ceil_div<size_t>(N, STRETCH);
}

void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, const int32_t *tokens,
                        const int32_t *positions, size_t B, size_t T, size_t C, size_t V, void *workspace) {
    const unsigned N = (unsigned)(B * T);
    float *parts = (float *)workspace;
    uint32_t *count = (uint32_t *)(parts + slots(N) * 2 * C), *first = count + stretches(N) * DIGITS,
             *end = first + V;
    uint32_t *sorted = end + V, *other = sorted + N;

    Pass p = {NULL, tokens, count, N, (unsigned)V, 0};
    const unsigned blocks = ceil_div<size_t>(stretches(N), WARPS);
    do {
        count_kernel<<<blocks, THREADS, 0, compute_stream>>>(p);
        launched("count");
        scan_kernel<<<1, DIGITS, 0, compute_stream>>>(count, (unsigned)stretches(N));
        launched("scan");
        scatter_kernel<<<blocks, THREADS, 0, compute_stream>>>(sorted, p);
        launched("scatter");
        p.order = sorted;
        std::swap(sorted, other);
        p.shift += 8;
    } while (V >> p.shift);
    runs_kernel<<<ceil_div<size_t>(N, THREADS), THREADS, 0, compute_stream>>>(first, end, p.order, tokens, N);
    launched("runs");

    Runs r = {p.order, first, end, tokens, parts, N};
    if (aligned16(C * sizeof(floatX), dwte, dwpe, dout, workspace))
        add_rows<VECTOR>(dwte, dwpe, dout, r, positions, B, T, C);
    else
        add_rows<1>(dwte, dwpe, dout, r, positions, B, T, C);
}

size_t embedding_backward_workspace(size_t B, size_t T, size_t C, size_t V) {
    const size_t N = B * T;
    return slots(N) * 2 * C * sizeof(float) + (stretches(N) * DIGITS + 2 * V + 2 * N) * sizeof(uint32_t);
}

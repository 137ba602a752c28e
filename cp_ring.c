// Context parallelism: the ranks of a cp group share every sequence. Each has some of its tokens, and attention, which lets a token
// see all those before it, is the one operation in which they need each other: keys and values go round a ring and meet the queries
// of every rank (Ring Attention). No rank ever holds the whole sequence, nor the matrix of all scores.
//
// Of a causal sequence, equal parts are not equal work: the last token sees all, the first only itself. So it is cut into 2·cp
// chunks, and rank i has chunk i and chunk 2cp−1−i (zig-zag). Here cp = 3; down are the queries of a rank, across the keys, by the
// rank that owns them; a number is the step of the ring at which a square of scores is computed, ╲ (step 0) is causal:
//
//     --cp-order contiguous          --cp-order zigzag, squares half as wide
//              0   1   2                      0   1   2   2   1   0
//     rank 0   ╲                     rank 0   ╲
//     rank 1   1   ╲                 rank 1   1   ╲
//     rank 2   2   1   ╲             rank 2   2   1   ╲
//                                    rank 2   2   1   0   ╲
//     1 : 3 : 5 half squares         rank 1   1   0   2   2   ╲
//                                    rank 0   0   2   1   1   2   ╲        two squares a rank at every step
//
// A rank's keys and values are a *block*. At step 0 its queries see its own, causally: local order is the sequence's order. At step s
// the block of rank i−s (mod cp) has come. Where s ≤ i, that rank's first chunk is before both of ours, its second after both: all
// queries see the first half of its keys. Else both are after our first chunk and before our second: the second half of the
// queries sees all of its keys. With c tokens a chunk that is 2c² pairs of a query and a key either way, and 2c²+c at step 0.
// (Contiguous, blocks go round all the same; those of ranks behind it are of no use to a rank, which then waits.)
//
//     step s       attention with the block of rank i−s
//                  meanwhile this block leaves for rank i+1, and that of step s+1 comes from rank i−1
//
// What the blocks give is merged in fp32, whatever floatX is, each weighed by its log-sum-exp (flash_attention.c has the formula).
// Backward the blocks go round once more. A probability is e^(score − lse), with the lse of *all* keys, so no block needs another.
// The gradient of a rank's queries stays with it; those of a block follow the block, in fp32, one step behind: of rank 0's, with
// cp = 3, rank 1 computes a part at step 1 and sends it on; rank 2 at step 2 adds its own and sends the sum home; and rank 0 adds
// what it has of step 0. So they make as many hops as the block, and each is on its way while the next block is computed.
//
// Cost, a layer and micro-batch, with E = 2·KV·D elements for a token's keys and values (KV heads alone: GQA sends less), and N
// tokens here: each rank sends
//     forward    (cp−1) · N·E of floatX                                   (again with --recompute full)
//     backward   (cp−1) · N·E of floatX, and (cp−1) · N·E of fp32
// and activations are 1/cp of what they were. All other operations see tokens one by one, by their positions in the sequence (rope,
// learned ones). Each rank has seen some of the tokens, so gradients of parameters are summed over dp and cp together (dp_zero.c),
// and ZeRO shards over both.
//
// Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped Attention" (equal parts,
// unequal work); Grattafiori et al. 2024, "The Llama 3 Herd of Models", §3.3.2 (2·cp chunks); Dao et al. 2022, "FlashAttention".
#include "train.h"
#include "runtime/device.h"
#include <math.h>

// ---- who has which tokens ------------------------------------------------------------------------------------------------

void cp_positions(const Config *c, int r, size_t T, int32_t *position) {
    size_t half = T / 2, first = (size_t)r * half, second = (size_t)(2 * c->cp - 1 - r) * half;
    for (size_t t = 0; t < T; t++)
        position[t] = (int32_t)(c->cp_order == ORDER_CONTIGUOUS ? (size_t)r * T + t
                                : t < half                      ? first + t
                                                                : second + t - half);
}

size_t cp_local_tokens(const Config *c, size_t tokens) {
    size_t cp = (size_t)c->cp, tp = c->sp ? (size_t)c->tp : 1, step = c->cp_order == ORDER_ZIGZAG ? 2 : 1;
    if (tp % step != 0) tp *= step; // two chunks, and --sp cuts their rows among tp
    step = tp > step ? tp : step;
    return ((tokens + cp - 1) / cp + step - 1) / step * step;
}

// ---- memory --------------------------------------------------------------------------------------------------------------

// Elements of the keys and values of all of a rank's tokens.
static size_t keys_count(AttentionShape s) {
    return s.B * s.Tk * 2 * s.KV * s.D;
}

void cp_reserve(Model *m, AttentionShape s) {
    Ring *r = &m->ring;
    if (m->config.cp == 1) return;
    size_t n = keys_count(s), N = s.B * s.Tq;
    for (int i = 0; i < 2; i++) {
        r->block[i] = device_alloc(MEM_COMMUNICATION, n * sizeof(floatX));
        r->part[i] = device_alloc(MEM_COMMUNICATION, n * sizeof(float));
    }
    r->arrived = device_alloc(MEM_COMMUNICATION, n * sizeof(float));
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)(n * (2 * sizeof(floatX) + 3 * sizeof(float))));
    r->sum = device_alloc(MEM_WORKSPACE, N * s.q_stride * sizeof(float));
    r->delta = device_alloc(MEM_WORKSPACE, N * s.H * sizeof(float));
}

// ---- a step of the ring --------------------------------------------------------------------------------------------------

// Which of this rank's queries, from `query` on, meet how many of a block's keys.
typedef struct {
    size_t query, queries, keys;
    bool causal;
} Meeting;

static Meeting meeting(Model *m, AttentionShape s, int step) {
    size_t T = s.Tq;
    bool zigzag = m->config.cp_order == ORDER_ZIGZAG;
    bool before = step <= m->grid.cp->rank; // is the block's owner
    Meeting meet = {.queries = T, .keys = T};
    if (step == 0)
        meet.causal = true;
    else if (zigzag && before)
        meet.keys = T / 2;
    else if (zigzag)
        meet.query = meet.queries = T / 2;
    else if (!before)
        meet.queries = 0;
    double pairs = meet.causal ? (double)T * (double)(T + 1) / 2 : (double)meet.queries * (double)meet.keys;
    m->ring.pairs += (double)s.B * pairs;
    return meet;
}

// Keys and values of one block, their gradients; and in both the elements from one token to the next.
typedef struct {
    const floatX *k, *v;
    float *dk, *dv;
    size_t stride;
} Keys;

// This rank's own lie in qkv, and their gradients in sum; the others' in messages that have come and will leave.
static Keys keys_of(const Model *m, AttentionShape s, int step, const floatX *qkv) {
    size_t width = s.KV * s.D;
    const floatX *k = step == 0 ? qkv + s.o_stride : m->ring.block[step & 1];
    float *dk = step == 0 ? m->ring.sum + s.o_stride : m->ring.part[step & 1];
    return (Keys){k, k + width, dk, dk + width, step == 0 ? s.q_stride : 2 * width};
}

// The shape of what meets, in tensors of all this rank's tokens.
static AttentionShape shape_of(AttentionShape s, Meeting meet, size_t kv_stride) {
    s.q_tokens = s.kv_tokens = s.Tq;
    s.Tq = meet.queries, s.Tk = meet.keys;
    s.kv_stride = kv_stride;
    s.causal = meet.causal;
    return s;
}

// The block of this step goes on to the right, and the next one comes from the left.
static Work pass_on(const Model *m, AttentionShape s, int step) {
    floatX *const *block = m->ring.block;
    if (step == m->config.cp - 1) return (Work){0}; // it has been everywhere
    return under_way(m, comm_shift(m->grid.cp, block[(step + 1) & 1], block[step & 1], keys_count(s), FLOAT_X));
}

// ---- attention -----------------------------------------------------------------------------------------------------------

void cp_attention_forward(Model *m, floatX *o, float *lse, const floatX *qkv, AttentionShape s) {
    size_t width = s.KV * s.D, N = s.B * s.Tq;
    float *sum = m->ring.sum; // of o
    if (m->config.cp == 1) {
        flash_attention_forward(o, lse, qkv, qkv + s.o_stride, qkv + s.o_stride + width, s, m->workspace);
        return;
    }
    rows_pack(m->ring.block[0], qkv + s.o_stride, s.q_stride, N, 2 * width);
    device_zero(sum, N * s.o_stride * sizeof(float));
    rows_fill(lse, -INFINITY, N * s.H); // nothing yet
    for (int step = 0; step < m->config.cp; step++) {
        Work next = pass_on(m, s, step);
        Meeting meet = meeting(m, s, step);
        Keys x = keys_of(m, s, step, qkv);
        if (meet.queries)
            flash_attention_forward_block(sum + meet.query * s.o_stride, lse + meet.query,
                                          qkv + meet.query * s.q_stride, x.k, x.v, shape_of(s, meet, x.stride),
                                          m->workspace);
        comm_progress();
        comm_wait(next);
    }
    rows_round(o, sum, N * s.o_stride);
}

void cp_attention_backward(Model *m, floatX *dqkv, const floatX *do_, const floatX *o, const float *lse,
                           const floatX *qkv, AttentionShape s) {
    Ring *r = &m->ring;
    size_t width = s.KV * s.D, N = s.B * s.Tq, n = keys_count(s);
    if (m->config.cp == 1) {
        const floatX *k = qkv + s.o_stride;
        floatX *dk = dqkv + s.o_stride;
        flash_attention_backward(dqkv, dk, dk + width, do_, o, lse, qkv, k, k + width, s, m->workspace);
        return;
    }
    Work gradients = {0}; // of the block before this step's, on their way
    rows_pack(r->block[0], qkv + s.o_stride, s.q_stride, N, 2 * width);
    device_zero(r->sum, N * s.q_stride * sizeof(float));
    flash_attention_delta(r->delta, do_, o, s);
    for (int step = 0; step < m->config.cp; step++) {
        Work next = pass_on(m, s, step);
        Meeting meet = meeting(m, s, step);
        Keys x = keys_of(m, s, step, qkv);
        if (step > 0) device_zero(x.dk, n * sizeof(float));
        if (meet.queries)
            flash_attention_backward_block(r->sum + meet.query * s.q_stride, x.dk, x.dv,
                                           do_ + meet.query * s.o_stride, r->delta + meet.query,
                                           lse + meet.query, qkv + meet.query * s.q_stride, x.k, x.v,
                                           shape_of(s, meet, x.stride), m->workspace);
        comm_progress();
        comm_wait(gradients);
        if (step > 1) rows_add(x.dk, 2 * width, r->arrived, N, 2 * width); // at step 1 no rank has come before
        if (step > 0) gradients = under_way(m, comm_shift(m->grid.cp, r->arrived, x.dk, n, DTYPE_F32));
        comm_wait(next);
    }
    comm_wait(gradients); // home
    rows_add(r->sum + s.o_stride, s.q_stride, r->arrived, N, 2 * width);
    rows_round(dqkv, r->sum, N * s.q_stride);
}

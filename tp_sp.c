// Tensor parallelism: the ranks of a tp group see the same sequences, and each holds a slice of every large matrix. --sp,
// sequence parallelism, has them share the rows, too (tokens), wherever a row is handled by itself: in norms and
// residual additions.
//
// A product y = x·W (W drawn as [in, out]) can be cut in two ways. By output, a rank has some columns of W, needs all of x,
// and gets those columns of y: no message. By input, a rank has some rows of W, needs those columns of x, and gets one term of
// a sum that is y. So the second kind takes what the first one gives, and two products need one sum, after the second:
//
//       x            Wup             act            Wdown          y, a term of the sum
//     ┌─────┐    ┌──┬──┬──┬──┐    ┌──┬──┬──┬──┐    ┌────────┐      ┌─────┐
//     │ all │  · │ 0│ 1│ 2│ 3│ -> │ 0│ 1│ 2│ 3│  · ├── 0 ───┤  ->  │  0  │ + 1 + 2 + 3
//     │ [N, │    │  │  │  │  │    │  │  │  │  │    ├── 1 ───┤      │ [N, │
//     │  C] │    │  │  │  │  │    │  │  │  │  │    ├── 2 ───┤      │  C] │
//     └─────┘    └──┴──┴──┴──┘    └──┴──┴──┴──┘    └── 3 ───┘      └─────┘
//
// What stands between the two works on columns (GELU, SwiGLU: of a sum they are not the sum, so the other order would need
// one more message) or on whole heads (attention): q, k, v and out are such a pair, too, cut by heads. Megatron-LM says
// column- and row-parallel. In memory weights are [out, in], so that Split (train.h) says ROWS and COLUMNS.
//
// Backward, from right to left: dact = dy·Wdownᵀ needs all of dy and gives a rank's own columns; dx = dup·Wupᵀ is a term of a
// sum. So rows enter a pair and leave it, four times a block, in F and I (gradients of inputs), of attention and of the MLP:
//
//                    tp_enter       tp_exit            units sent a block and micro-batch, of (tp−1)/tp · N·C elements
//     --tp           nothing        all-reduce         4 · 2 = 8
//     --tp --sp      all-gather     reduce-scatter     4 · (1 + 1) + 2: W (gradients of weights) gathers again what q, k, v
//                                                      and up were given, rather than have F keep it whole
//
// An all-reduce is a reduce-scatter and an all-gather, the same bytes; --sp puts norms and residual additions between the
// two, on N/tp rows a rank, and no rank keeps an activation that another keeps. Rows are the B·T tokens in their order, so a
// rank's lie in one piece: a stretch of a sequence where B is 1, else some sequences or parts of them.
//
// The embedding and the head are cut by the vocabulary: a rank looks up the tokens that it has, zeros stand for the others,
// and the sum has them all; and it has its columns of the logits, [N, V/tp]. No logit leaves its rank: of each row, the
// largest (one all-reduce), then the sum of exp and the target's logit (another).
//
// Not cut are norms, learned positions and the biases of out and down. And where tp exceeds the key/value heads, each of these
// is held by tp/KV neighbours, one for some of its query heads. Held by many, and each computes a part of the gradient: k and v
// then; with --sp norms and biases, of which a rank has seen its own rows. These are summed once a step (tp_sum_gradients). The
// rest comes out of the same numbers on each, by the same operations: the same bits.
// Checkpoints hold whole tensors (state.c), each element written once, so that any tp reads what any other has saved.
//
// Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
// Models" (--sp).
#include "train.h"
#include "runtime/device.h"

// ---- slices ------------------------------------------------------------------------------------------------------------

void tp_slice(const Config *c, Param *p, int rank) {
    int tp = (int)c->tp, kv_heads = (int)c->kv_heads;
    int slices = p->split == SPLIT_NONE ? 1 : p->split == SPLIT_KV_HEADS && kv_heads < tp ? kv_heads : tp;
    int holders = tp / slices, slice = rank / holders;
    bool by_columns = p->split == SPLIT_COLUMNS;
    size_t n = by_columns ? p->cols : p->rows;
    size_t begin = comm_shard_begin(n, slices, slice), end = comm_shard_begin(n, slices, slice + 1);
    p->row = by_columns ? 0 : begin;
    p->slice_rows = by_columns ? p->rows : end - begin;
    p->col = by_columns ? begin : 0;
    p->slice_cols = by_columns ? end - begin : p->cols;
    p->counted = rank % holders == 0;
    bool rows_are_cut =
        c->sp && p->unit > 0 && p->expert < 0; // the embedding's backward gathers them, as experts do
    p->parts = p->split == SPLIT_KV_HEADS || rows_are_cut ? holders : 1; // holders: 1, of what is cut by tp
}

// ---- gradients that are sums of parts ------------------------------------------------------------------------------------

static Comm *over(const Model *m, const Param *p) {
    return p->parts == 1 || !p->here ? NULL : p->split == SPLIT_KV_HEADS ? m->grid.kv : m->grid.tp;
}

// Neighbours in a bucket whose gradients are summed over the same ranks.
typedef struct {
    Comm *comm;
    int ranks; // of comm; in a dry run comm itself has one
    const Bucket *bucket;
    size_t begin, end;
} Run;

// The next run from parameter *i on, which is moved behind it. False: there are no more.
static bool next_run(const Model *m, int *i, Run *run) {
    while (*i < m->n_params && !over(m, &m->param[*i])) ++*i;
    if (*i == m->n_params) return false;
    const Param *p = &m->param[*i];
    const Bucket *b = &m->bucket[p->bucket];
    *run = (Run){.comm = over(m, p), .ranks = p->parts, .bucket = b, .begin = p->offset};
    for (; *i < m->n_params; ++*i) {
        p = &m->param[*i];
        if (&m->bucket[p->bucket] != b || over(m, p) != run->comm) break;
        run->end = p->offset + p->size;
    }
    return true;
}

void tp_sum_gradients(const Model *m) {
    Run run;
    Work last[2] = {{0}}; // of each group; the works of one are done in their order
    for (int i = 0; next_run(m, &i, &run);) {
        const Bucket *b = run.bucket;
        size_t begin = run.begin > b->own ? run.begin : b->own,
               end = run.end < b->own_end ? run.end : b->own_end;
        if (begin >= end) continue;
        comm_wait(b->reduce);
        size_t at = begin - b->own;
        void *grad = b->own_grad32 ? (void *)(b->own_grad32 + at) : b->own_grad + at;
        last[run.comm == m->grid.kv] =
            comm_all_reduce(run.comm, grad, end - begin, b->own_grad32 ? DTYPE_F32 : FLOAT_X);
    }
    comm_wait(last[0]);
    comm_wait(last[1]);
}

// ---- memory ------------------------------------------------------------------------------------------------------------

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

void tp_reserve(Model *m) {
    const Config *c = &m->config;
    size_t N = m->B * m->T, all_rows = N * (size_t)c->hidden, held = 0;
    for (int i = 0; c->sp && i < 2; i++)
        m->gathered[i] = device_alloc(MEM_COMMUNICATION, all_rows * sizeof(floatX));
    if (c->sp) held += 2 * all_rows * sizeof(floatX);

    // What the ring keeps of sums under way, in each group; of gradients, as if a shard had as much of them as one can.
    int tp = (int)c->tp;
    size_t in_kv = 0,
           in_tp = larger(comm_staging_bytes(all_rows, FLOAT_X, tp), comm_staging_bytes(2 * N, DTYPE_F32, tp));
    Run run;
    for (int i = 0; next_run(m, &i, &run);) {
        size_t *most = run.comm == m->grid.kv ? &in_kv : &in_tp;
        DType type = run.bucket->own_grad32 ? DTYPE_F32 : FLOAT_X;
        size_t n = run.end - run.begin,
               own = c->zero == 0 ? n : comm_shard_begin(run.bucket->count, (int)c->dp_cp, 1);
        *most = larger(*most, comm_staging_bytes(n < own ? n : own, type, run.ranks));
    }
    ledger_add(MEM_COMMUNICATION, (ptrdiff_t)(in_tp + in_kv));
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)(held + in_tp + in_kv));
}

// ---- rows --------------------------------------------------------------------------------------------------------------

Rows tp_enter(const Model *m, floatX *x, int place) {
    if (!m->config.sp) return (Rows){.x = x};
    floatX *all = m->gathered[place];
    size_t count = m->B * m->T * (size_t)m->config.hidden;
    return (Rows){all, under_way(m, comm_all_gather(m->grid.tp, all, x, count, FLOAT_X))};
}

Rows tp_exit(const Model *m, floatX *partial) {
    Comm *tp = m->grid.tp;
    size_t count = m->B * m->T * (size_t)m->config.hidden;
    if (!m->config.sp) return (Rows){partial, under_way(m, comm_all_reduce(tp, partial, count, FLOAT_X))};
    floatX *here = partial + comm_shard_begin(count, tp->size, tp->rank);
    return (Rows){here, under_way(m, comm_reduce_scatter(tp, here, partial, count, FLOAT_X))};
}

// ---- the vocabulary ----------------------------------------------------------------------------------------------------

void tp_cross_entropy(const Model *m, floatX *logits, float dloss) {
    const Param *wte = &m->param[0]; // the head has the same rows
    size_t N = m->B * m->T, V = wte->slice_rows, Vp = (size_t)m->config.padded_vocab;
    int32_t first = (int32_t)wte->row;
    float *max = m->logit_stats, *global_max = max + N, *sum = global_max + N, *target = sum + N;
    cross_entropy_local(max, sum, target, logits, m->targets, first, N, V, Vp);
    device_copy(global_max, max, N * sizeof(float));
    comm_wait(comm_all_reduce_max(m->grid.tp, global_max, N));
    cross_entropy_rescale(sum, max, global_max, N);
    comm_wait(comm_all_reduce(m->grid.tp, sum, 2 * N, DTYPE_F32)); // and target, which lies behind it
    cross_entropy_global(m->losses, logits, m->targets, first, global_max, sum, target, dloss, N, V, Vp);
}

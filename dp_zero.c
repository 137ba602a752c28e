// Data parallelism and ZeRO: every rank sees other sequences; what they share is the gradient. --zero says what else.
//
//                      weights    gradients   optimizer     elements sent a step and rank, × (N−1)/N
//     --zero 0 (DDP)   whole      whole       whole         2Ψ       all-reduce of the gradient
//     --zero 1         whole      whole       a shard       2Ψ       reduce-scatter of it, all-gather of the new weights
//     --zero 2         whole      a shard     a shard       (a+1)Ψ   a reduce-scatters, the same all-gather
//     --zero 3 (FSDP)  a shard    a shard     a shard       < 3aΨ    a times: gather for F, gather for I, reduce-scatter
//
// (Ψ parameters, N ranks, a micro-batches a step; F is a forward, I the part of a backward that reads weights.) An
// all-reduce is a reduce-scatter and an all-gather. DDP does both to the gradient, so that every rank can take the same
// step on all weights. ZeRO steps between the two: each rank on the shard of which it has the sum, with the optimizer's
// state of that shard alone; then the new weights are gathered. The same messages, the same sums, and by the ring (comm.c) the
// same bits.
//
// Messages travel while the backward goes on, bucket by bucket, for the last block's gradient is complete first:
//
//     compute    | head | block 3 | block 2 | block 1 | block 0 | embedding |
//     messages          | head | block 3 | block 2 | block 1 | block 0 |     | embedding |   only this one is waited for
//
// What is not kept whole is whole for a while, in one of two slots that buckets take by turns: one is computed, the
// other on its way. ZeRO-3 gathers weights like that, the next bucket's beside the F or I of this one. ZeRO-2 and -3
// reduce gradients like that, after every micro-batch, since they have no place to sum them up whole. The tied
// embedding, used at both ends of the model, has a place of its own, and stays whole from its F to the head's I. Three
// buckets ZeRO-3 gathers once, not twice: the embedding (its own backward needs no weights), and the last two, still
// whole when the backward starts. (So it is where F and B take turns. In a pipeline it is up to the schedule what is still
// whole; --explain counts the gathers. A rank's buckets are those of its chunks, and none is gathered ahead for another chunk.)
//
// The loss is divided by the number of target tokens of the *global* batch before backward (dloss, in train_step), so
// gradients are summed, not averaged, and any number of ranks takes the same step.
//
// Rajbhandari et al. 2020, "ZeRO"; Li et al. 2020, "PyTorch Distributed"; Zhao et al. 2023, "PyTorch FSDP".
#include "train.h"
#include "runtime/device.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// ---- buckets -----------------------------------------------------------------------------------------------------------

// Does a unit share the bucket of the one before it? Not the embedding, which is used at both ends; not units of two chunks; and
// not the head, which adds to gradients in I, with blocks whose W is put off.
static bool may_share(const Model *m, int unit) {
    bool head = unit == m->n_units - 1;
    return unit > 1 && m->chunk_of[unit] == m->chunk_of[unit - 1] && !(head && pp_defers_w(&m->config));
}

// Which units share a bucket: from the head backwards, neighbours come together up to --bucket-mb. This rank's are numbered from
// the front, chunk by chunk.
static void group_units(Model *m) {
    double limit = m->config.bucket_mb * 1e6 / sizeof(floatX);
    size_t *unit_count = host_alloc((size_t)m->n_units, sizeof *unit_count);
    bool *joined = host_alloc((size_t)m->n_units, sizeof *joined); // to the unit before
    size_t count = 0;
    for (const Param *p = m->param; p < m->param + m->n_params; p++)
        if (p->expert < 0) unit_count[p->unit] += p->size;
    for (int u = m->n_units - 1; u > 0; u--) {
        count += unit_count[u];
        joined[u] = may_share(m, u) && (double)(count + unit_count[u - 1]) <= limit;
        if (!joined[u]) count = 0;
    }
    m->bucket_of = host_alloc((size_t)m->n_units, sizeof *m->bucket_of);
    for (int u = 0; u < m->n_units; u++) m->bucket_of[u] = -1;
    if (m->param[0].here) m->bucket_of[0] = m->n_buckets++; // the copy of a tied one, too
    for (int k = 0; k < m->config.virtual_stages; k++)
        for (int u = m->chunk[k].first_unit; u <= m->chunk[k].last_unit; u++)
            if (u > 0) m->bucket_of[u] = joined[u] ? m->n_buckets - 1 : m->n_buckets++;
    m->n_dense = m->n_buckets;
    m->experts_bucket_of = host_alloc((size_t)m->n_units, sizeof *m->experts_bucket_of);
    for (int u = 0; u < m->n_units; u++) m->experts_bucket_of[u] = -1;
    for (int k = 0; k < m->config.virtual_stages; k++)
        for (int u = m->chunk[k].first_unit; u <= m->chunk[k].last_unit; u++)
            if (u > 0 && u < m->n_units - 1 && has_experts(&m->config, u - 1))
                m->experts_bucket_of[u] = m->n_buckets++;
    free(unit_count);
    free(joined);
}

static void name_bucket(Bucket *b, int last, bool experts) {
    if (experts) {
        snprintf(b->name, sizeof b->name, "experts %d", b->first_unit - 1);
        return;
    }
    int n = b->first_unit == 0      ? snprintf(b->name, sizeof b->name, "embedding")
            : b->first_unit == last ? snprintf(b->name, sizeof b->name, "head")
                                    : snprintf(b->name, sizeof b->name, "block %d", b->first_unit - 1);
    if (b->last_unit == b->first_unit) return;
    if (b->last_unit == last)
        snprintf(b->name + n, sizeof b->name - (size_t)n, "-head");
    else
        snprintf(b->name + n, sizeof b->name - (size_t)n, "-%d", b->last_unit - 1);
}

static bool is_experts(const Model *m, int i) {
    return i >= m->n_dense;
}

// Between a bucket's first parameter and its last there may be others': experts stand in the table where their block does.
static bool is_in(const Model *m, const Param *p, const Bucket *b) {
    return p->here && &m->bucket[p->bucket] == b;
}

static void fill_buckets(Model *m) {
    group_units(m);
    m->bucket = host_alloc((size_t)m->n_buckets, sizeof(Bucket));
    for (int i = 0; i < m->n_params; i++) {
        Param *p = &m->param[i];
        if (!p->here) continue;
        p->bucket = p->expert < 0 ? m->bucket_of[p->unit] : m->experts_bucket_of[p->unit];
        Bucket *b = &m->bucket[p->bucket];
        if (b->count == 0) b->first_param = i, b->first_unit = p->unit, b->chunk = m->chunk_of[p->unit];
        b->n_params = i + 1 - b->first_param;
        b->last_unit = p->unit;
        p->offset = b->count;
        b->count += p->size;
    }
    for (Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++) {
        bool experts = is_experts(m, (int)(b - m->bucket));
        name_bucket(b, m->n_units - 1, experts);
        b->comm = experts ? m->grid.replicas : m->grid.dp;
        b->ranks = (int)(experts ? m->config.replicas : m->config.dp_cp);
        b->decay = host_alloc(2 * (size_t)b->n_params, sizeof(size_t));
    }
}

static size_t own_count(const Bucket *b) {
    return b->own_end - b->own;
}

// Which elements are this rank's. Not of comm->size: a dry run is one process, and answers for rank 0 of many.
static void cut(Model *m) {
    for (Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++) {
        b->shard = comm_shard_begin(b->count, b->ranks, b->comm->rank);
        b->shard_end = comm_shard_begin(b->count, b->ranks, b->comm->rank + 1);
        b->own = m->config.zero == 0 ? 0 : b->shard;
        b->own_end = m->config.zero == 0 ? b->count : b->shard_end;
        b->n_decay = 0;
        for (const Param *p = m->param + b->first_param; p < m->param + b->first_param + b->n_params; p++) {
            size_t begin = p->offset, end = p->offset + p->size;
            if (begin < b->own) begin = b->own;
            if (end > b->own_end) end = b->own_end;
            if (!is_in(m, p, b) || p->ndim == 1 || begin >= end) continue; // vectors do not decay
            b->decay[2 * b->n_decay] = begin - b->own;
            b->decay[2 * b->n_decay++ + 1] = end - b->own;
        }
    }
}

// ---- memory ----------------------------------------------------------------------------------------------------------

static bool is_tied_embedding(const Model *m, int i) {
    return m->config.tie && m->bucket[i].first_unit == 0;
}

enum { SLOTS = 4 }; // two for experts' buckets, two for all others
static int slot_of(const Model *m, int i) {
    return is_experts(m, i) ? 2 + ((i - m->n_dense) & 1) : i & 1;
}

// Memory for all of bucket i: its own where it stays, else a slot that it shares with every second bucket of its kind.
static void *whole_memory(const Model *m, int i, size_t item, bool stays, MemCategory category,
                          void *slots[SLOTS]) {
    const Bucket *b = &m->bucket[i];
    void **slot = &slots[slot_of(m, i)];
    if (stays) return device_alloc(category, b->count * item);
    if (is_tied_embedding(m, i)) return device_alloc(MEM_TIED, b->count * item);
    if (!*slot) {
        size_t most = 0;
        for (int j = i; j < m->n_buckets; j++) // (a tied embedding has come before)
            if (slot_of(m, j) == slot_of(m, i) && m->bucket[j].count > most) most = m->bucket[j].count;
        *slot = device_alloc(MEM_WHOLE_BUCKETS, most * item);
    }
    return *slot;
}

// What stays holds values that are read again from now on.
static void *lasting(MemCategory category, size_t bytes) {
    ledger_live(category, (ptrdiff_t)bytes);
    return device_alloc(category, bytes);
}

static void reserve_optimizer(Bucket *b) {
    b->m = lasting(MEM_OPTIMIZER, own_count(b) * sizeof(float));
    b->v = lasting(MEM_OPTIMIZER, own_count(b) * sizeof(float));
}

static void reserve_weights(Model *m, int i, void *slots[SLOTS]) {
    Bucket *b = &m->bucket[i];
    bool stay = m->config.zero < 3;
    b->weight = whole_memory(m, i, sizeof(floatX), stay, MEM_WEIGHTS, slots);
    if (stay) ledger_live(MEM_WEIGHTS, (ptrdiff_t)(b->count * sizeof(floatX)));
    b->own_weight = stay ? b->weight + b->own : lasting(MEM_WEIGHTS, own_count(b) * sizeof(floatX));
    if (FLOAT_X == DTYPE_BF16) b->master = lasting(MEM_MASTER, own_count(b) * sizeof(float));
}

static void reserve_gradients(Model *m, int i, void *slots[SLOTS], void *slots32[SLOTS]) {
    Bucket *b = &m->bucket[i];
    bool stay = m->config.zero < 2, sum_in_fp32 = m->config.grad_accum_fp32 && FLOAT_X == DTYPE_BF16;
    b->grad = whole_memory(m, i, sizeof(floatX), stay, MEM_GRADIENTS, slots);
    b->grad32 = sum_in_fp32 ? whole_memory(m, i, sizeof(float), stay, MEM_GRADIENTS, slots32) : NULL;
    b->own_grad = NULL;
    b->own_grad32 = NULL;
    if (sum_in_fp32)
        b->own_grad32 = stay ? b->grad32 + b->own : device_alloc(MEM_GRADIENTS, own_count(b) * sizeof(float));
    else
        b->own_grad = stay ? b->grad + b->own : device_alloc(MEM_GRADIENTS, own_count(b) * sizeof(floatX));
}

void dp_reserve(Model *m) {
    void *weights[SLOTS] = {NULL}, *gradients[SLOTS] = {NULL}, *sums[SLOTS] = {NULL};
    size_t staging[2] = {0}; // the ring's, for the largest bucket; and for the largest of experts
    if (!m->bucket) fill_buckets(m);
    cut(m);
    for (int i = 0; i < m->n_buckets; i++) {
        Bucket *b = &m->bucket[i];
        reserve_weights(m, i, weights);
        reserve_gradients(m, i, gradients, sums);
        b->m = b->v = NULL;
        if (!m->config.lazy_optimizer) reserve_optimizer(b);
        size_t bytes = comm_staging_bytes(b->count, b->grad32 ? DTYPE_F32 : FLOAT_X, b->ranks);
        size_t *most = &staging[is_experts(m, i)];
        if (bytes > *most) *most = bytes;
    }
    ledger_add(MEM_COMMUNICATION, (ptrdiff_t)(staging[0] + staging[1]));
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)(staging[0] + staging[1]));
}

// ---- messages --------------------------------------------------------------------------------------------------------

// Bucket i's weights are whole, or will be once their gather is done (true); or are old, or their place is another's
// (false).
static void set_whole(Model *m, int i, bool whole) {
    Bucket *b = &m->bucket[i];
    ptrdiff_t bytes = (ptrdiff_t)(b->count * sizeof(floatX));
    if (m->config.zero == 3 && whole != b->whole)
        ledger_live(is_tied_embedding(m, i) ? MEM_TIED : MEM_WHOLE_BUCKETS, whole ? bytes : -bytes);
    b->whole = whole;
}

// Starts to gather bucket i's weights, unless they are whole or coming.
static void gather(Model *m, int i) {
    Bucket *b = &m->bucket[i];
    if (b->whole) return;
    for (int j = 0; j < m->n_buckets; j++)
        if (m->bucket[j].weight == b->weight) set_whole(m, j, false); // whoever had the slot
    set_whole(m, i, true);
    b->gather = under_way(m, comm_all_gather(b->comm, b->weight, b->own_weight, b->count, FLOAT_X));
}

static void share_weights(Model *m, int i) {
    // What else stands there whole, beside this rank's own part, is from before the step.
    set_whole(m, i, m->config.zero == 0);
    if (m->config.zero < 3) gather(m, i);
}

void dp_share_weights(Model *m) {
    for (int i = 0; i < m->n_buckets; i++) share_weights(m, i);
}

// What of a bucket's gradient is alive when it is whole.
static void gradient_live(const Model *m, int i, int sign) {
    const Bucket *b = &m->bucket[i];
    ptrdiff_t bytes = (ptrdiff_t)(b->count * (sizeof(floatX) + (b->grad32 ? sizeof(float) : 0)));
    ledger_live(m->config.zero < 2        ? MEM_GRADIENTS
                : is_tied_embedding(m, i) ? MEM_TIED
                                          : MEM_WHOLE_BUCKETS,
                sign * bytes);
}

static void own_gradient_live(const Model *m, int i, int sign) {
    const Bucket *b = &m->bucket[i];
    if (m->config.zero < 2) return; // a part of the whole one
    ledger_live(MEM_GRADIENTS, sign * (ptrdiff_t)(own_count(b) * (b->grad32 ? sizeof(float) : sizeof(floatX))));
}

// Bucket i's sum is in this rank's own part (at ZeRO-0, everywhere), and the slot it stood in is free.
static void finish_reduction(Model *m, int i) {
    Bucket *b = &m->bucket[i];
    if (!b->reducing) return;
    comm_wait(b->reduce);
    b->reducing = false;
    if (m->config.zero >= 2) gradient_live(m, i, -1);
}

// Bucket i's gradient is to be added to: by I and W of one micro-batch.
static void open_gradient(Model *m, int i) {
    Bucket *b = &m->bucket[i];
    bool stays = m->config.zero < 2;
    if (b->open) return; // by another block in it, or, tied, by the head
    b->open = true;
    if (stays && b->summed > 0) return; // the micro-batches sum up in place
    for (int j = 0; j < m->n_buckets; j++)
        if (m->bucket[j].grad == b->grad) finish_reduction(m, j); // whoever had the slot
    gradient_live(m, i, 1);
    if (b->summed == 0) own_gradient_live(m, i, 1);
    device_zero(b->grad, b->count * sizeof(floatX));
    if (b->grad32) device_zero(b->grad32, b->count * sizeof(float));
    // The sum over ranks so far goes into the next one: its owner starts from it, all others from zero.
    if (b->summed > 0 && b->grad32)
        device_copy(b->grad32 + b->own, b->own_grad32, own_count(b) * sizeof(float));
    else if (b->summed > 0)
        device_copy(b->grad + b->own, b->own_grad, own_count(b) * sizeof(floatX));
}

// Σ g² of each of the bucket's parameters, on this rank before any sum: finite where all of g is. To be read when the host
// waits anyway (find_not_finite), for a look at once would keep the device waiting at every bucket. Cost: a read of the
// gradient, and on a GPU two small kernels a parameter.
static void square_gradients(Model *m, const Bucket *b) {
    for (int i = b->first_param; i < b->first_param + b->n_params; i++) {
        const Param *p = &m->param[i];
        if (!is_in(m, p, b)) continue;
        grad_norm_squared(&m->squares[i], b->grad + p->offset, b->grad32 ? b->grad32 + p->offset : NULL,
                          p->size, m->workspace);
    }
}

static void find_not_finite(Model *m) {
    if (m->not_finite.param >= 0) return;
    double *squares = host_alloc((size_t)m->n_params, sizeof *squares);
    device_copy_out(squares, m->squares, (size_t)m->n_params * sizeof *squares);
    int i = m->n_params - 1;
    while (i >= 0 && isfinite(squares[i])) i--;
    m->not_finite.param = i; // −1: none
    if (i >= 0) m->not_finite.micro = m->bucket[m->param[i].bucket].summed;
    free(squares);
}

void dp_find_not_finite(Model *m) {
    if (m->config.zero >= 2 && m->config.accum > 1) find_not_finite(m);
}

// What is in the gradient moves to its fp32 sum, if there is one.
static void bank_gradient(Bucket *b) {
    if (b->grad32) gradient_accumulate(b->grad32, b->grad, b->count);
}

// One more micro-batch is in. The sum over ranks starts when there is nothing more to add, or no place to keep it.
static void close_gradient(Model *m, int i) {
    Bucket *b = &m->bucket[i];
    bank_gradient(b);
    b->open = false;
    b->summed++;
    if (m->config.zero < 2 && b->summed < m->config.accum) return;
    square_gradients(m, b);
    void *whole = b->grad32 ? (void *)b->grad32 : b->grad,
         *own = b->grad32 ? (void *)b->own_grad32 : b->own_grad;
    DType type = b->grad32 ? DTYPE_F32 : FLOAT_X;
    b->reducing = true;
    b->reduce = under_way(m, m->config.zero == 0 ? comm_all_reduce(b->comm, whole, b->count, type)
                                                 : comm_reduce_scatter(b->comm, own, whole, b->count, type));
}

// Does a pass of a unit read its weights, and add to its gradients? W's products are of activations alone; the embedding's own
// backward reads no weights; and the two ends, embedding and head, do all of theirs in I.
static bool reads_weights(int unit, Pass pass) {
    return pass == PASS_F || (pass != PASS_W && unit > 0);
}

static bool adds_gradients(const Model *m, int unit, Pass pass) {
    bool block = unit > 0 && unit < m->n_units - 1;
    return pass == PASS_B || pass == (block ? PASS_W : PASS_I);
}

// The bucket of a tied embedding, where the unit is the head; else −1.
static int shared_by(const Model *m, int unit) {
    return m->config.tie && unit == m->n_units - 1 ? m->bucket_of[0] : -1;
}

// The buckets that a pass of the unit uses: of the head, the tied embedding's; its own; of a block with experts, theirs.
enum { MOST_USED = 2 };
static int used_by(const Model *m, int unit, int used[MOST_USED]) {
    int n = 0, tied = shared_by(m, unit);
    if (tied >= 0) used[n++] = tied;
    used[n++] = m->bucket_of[unit];
    if (m->experts_bucket_of[unit] >= 0) used[n++] = m->experts_bucket_of[unit];
    return n;
}

// The next of the chunk's buckets of this kind is on its way while bucket i is computed.
static void gather_next(Model *m, int i, Pass pass) {
    int next = pass == PASS_F ? i + 1 : i - 1;
    if (next < 0 || next >= m->n_buckets || is_experts(m, next) != is_experts(m, i)) return;
    if (m->bucket[next].chunk != m->bucket[i].chunk) return;
    if (reads_weights(m->bucket[next].first_unit, pass)) gather(m, next);
}

void dp_begin(Model *m, int unit, Pass pass) {
    int used[MOST_USED], n = used_by(m, unit, used), tied = shared_by(m, unit);
    if (reads_weights(unit, pass)) {
        for (int k = 0; k < n; k++) gather(m, used[k]);
        for (int k = 0; k < n; k++) comm_wait(m->bucket[used[k]].gather);
        for (int k = 0; k < n; k++)
            if (used[k] != tied) gather_next(m, used[k], pass);
    }
    for (int k = n - 1; k >= 0 && adds_gradients(m, unit, pass); k--) open_gradient(m, used[k]);
}

static void end_bucket(Model *m, int i, Pass pass, bool added) {
    if (m->config.zero == 3 && pass != PASS_W) set_whole(m, i, false);
    if (added) close_gradient(m, i);
}

void dp_end(Model *m, int unit, Pass pass) {
    int i = m->bucket_of[unit], experts = m->experts_bucket_of[unit], tied = shared_by(m, unit);
    bool added = adds_gradients(m, unit, pass);
    if (pass == PASS_F) return;
    if (experts >= 0) end_bucket(m, experts, pass, added);
    if (unit == m->bucket[i].first_unit) end_bucket(m, i, pass, added);
    if (tied < 0) return;
    Bucket *b = &m->bucket[tied];
    if (b->chunk < 0)
        end_bucket(m, tied, pass, added);
    else if (b->chunk != m->chunk_of[unit])
        bank_gradient(b); // the embedding is to come, but other micro-batches' heads may come before it
}

// ---- the step --------------------------------------------------------------------------------------------------------

// *sum += Σ g² over what of elements [begin, end) of the bucket lies in this rank's shard.
static void square_shard(const Model *m, double *sum, const Bucket *b, size_t begin, size_t end) {
    begin = begin > b->shard ? begin : b->shard;
    end = end < b->shard_end ? end : b->shard_end;
    if (begin >= end) return;
    grad_norm_squared(sum, b->own_grad ? b->own_grad + (begin - b->own) : NULL,
                      b->own_grad32 ? b->own_grad32 + (begin - b->own) : NULL, end - begin, m->workspace);
}

double dp_grad_norm(Model *m) {
    // Each rank squares its own shard of the sum, and of that what no other tp rank counts, so that the work is shared,
    // every element is counted once, and all stages add up the same numbers in the same order.
    double *sum = m->squares + m->n_params, squares;
    device_zero(sum, sizeof *sum);
    for (int i = m->n_buckets - 1; i >= 0; i--) finish_reduction(m, i);
    for (const Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++) {
        size_t begin = 0, end = 0; // neighbours together
        for (const Param *p = m->param + b->first_param; p < m->param + b->first_param + b->n_params; p++) {
            if (!is_in(m, p, b) || !p->counted) continue;
            if (p->offset > end) {
                square_shard(m, sum, b, begin, end);
                begin = p->offset;
            }
            end = p->offset + p->size;
        }
        square_shard(m, sum, b, begin, end);
    }
    device_copy_out(&squares, sum, sizeof squares);
    find_not_finite(m); // in the last micro-batch
    return sqrt(comm_sum(m->grid.world, squares));
}

void dp_optimizer_step(Model *m, double grad_norm, OptimizerStep s) {
    const Config *c = &m->config;
    double clip = c->grad_clip > 0 && grad_norm > c->grad_clip ? c->grad_clip / grad_norm : 1;
    for (int i = 0; i < m->n_buckets; i++) { // in the order in which the next forward needs them
        Bucket *b = &m->bucket[i];
        if (!b->m) reserve_optimizer(b);
        AdamW a = {.lr = s.lr,
                   .beta1 = (float)c->beta1,
                   .beta2 = (float)c->beta2,
                   .eps = 1e-8f,
                   .weight_decay = (float)c->weight_decay,
                   .grad_scale = (float)clip,
                   .step = s.step,
                   .decay = b->decay,
                   .n_decay = b->n_decay};
        adamw_update(b->own_weight, b->master, b->m, b->v, b->own_grad, b->own_grad32, own_count(b), a);
        if (m->config.zero < 2)
            gradient_live(m, i, -1);
        else
            own_gradient_live(m, i, -1);
        b->summed = 0;
        share_weights(m, i);
        comm_progress();
    }
    device_zero(m->squares, (size_t)m->n_params * sizeof *m->squares);
}

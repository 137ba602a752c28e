// Data parallelism: every rank holds the whole model and sees other sequences; what they share is the gradient.
//
//      rank 0:  its sequences -> its gradient --+          +--> the same step -> the same weights
//      rank 1:  its sequences -> its gradient --+-- sum ---+--> the same step -> the same weights
//      rank 2:  its sequences -> its gradient --+          +--> the same step -> the same weights
//
// The loss is divided by the number of target tokens of the *global* batch before backward (dloss, in train_step), so the
// gradients are summed, not averaged, and any number of ranks takes the same step. The sum is an all-reduce over each bucket, once a
// step, after the last micro-batch: with accumulation the earlier ones stay at home.
//
// Cost a step and rank, Ψ parameters, N ranks: 2Ψ(N−1)/N elements sent (a ring's reduce-scatter and all-gather), nothing held but the
// gradients and the ring's staging, 4 MiB at most. Li et al. 2020, "PyTorch Distributed".
#include "train.h"
#include "runtime/device.h"
#include <math.h>

static const DType grad_type = sizeof(floatX) == 4 ? DTYPE_F32 : DTYPE_BF16;

static void reserve_optimizer(Bucket *b) {
    b->m = device_alloc(MEM_OPTIMIZER, b->count * sizeof(float));
    b->v = device_alloc(MEM_OPTIMIZER, b->count * sizeof(float));
}

void dp_reserve(Model *m) {
    size_t staging = 0; // the ring's, for the largest bucket
    for (int i = 0; i < m->n_buckets; i++) {
        Bucket *b = &m->bucket[i];
        b->weight = device_alloc(MEM_WEIGHTS, b->count * sizeof(floatX));
        b->grad = device_alloc(MEM_GRADIENTS, b->count * sizeof(floatX));
        if (grad_type == DTYPE_BF16) {
            b->master = device_alloc(MEM_MASTER, b->count * sizeof(float));
            if (m->config.grad_accum_fp32) b->grad32 = device_alloc(MEM_GRADIENTS, b->count * sizeof(float));
        }
        b->m = b->v = NULL;
        if (!m->config.lazy_optimizer || m->config.resume) reserve_optimizer(b);
        size_t bytes = comm_staging_bytes(b->count, b->grad32 ? DTYPE_F32 : grad_type,
                                          (int)m->config.dp); // not grid.dp: a dry run is one process
        if (bytes > staging) staging = bytes;
    }
    ledger_add(MEM_COMMUNICATION, (ptrdiff_t)staging);
}

void dp_clear_gradients(Model *m) {
    for (Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++) {
        device_zero(b->grad, b->count * sizeof(floatX));
        if (b->grad32) device_zero(b->grad32, b->count * sizeof(float));
    }
}

void dp_accumulate_gradients(Model *m) {
    for (Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++)
        if (b->grad32) gradient_accumulate(b->grad32, b->grad, b->count);
}

void dp_reduce_gradients(Model *m) {
    Work last = {0};
    for (int i = m->n_buckets - 1; i >= 0; i--) { // the order in which a backward finishes them
        Bucket *b = &m->bucket[i];
        last = b->grad32 ? comm_all_reduce(m->grid.dp, b->grad32, b->count, DTYPE_F32)
                         : comm_all_reduce(m->grid.dp, b->grad, b->count, grad_type);
    }
    comm_wait(last); // a group's works end in the order in which they began
}

double dp_grad_norm(Model *m) {
    // Each rank squares its own shard of the sum, so that the work is shared and every element is counted once.
    Comm *dp = m->grid.dp;
    double squares = 0;
    for (int i = 0; i < m->n_buckets; i++) {
        const Bucket *b = &m->bucket[i];
        size_t begin = comm_shard_begin(b->count, dp->size, dp->rank);
        size_t end = comm_shard_begin(b->count, dp->size, dp->rank + 1);
        if (begin < end)
            grad_norm_squared(&squares, b->grad + begin, b->grad32 ? b->grad32 + begin : NULL, end - begin,
                              m->workspace);
    }
    return sqrt(comm_sum(dp, squares));
}

void dp_optimizer_step(Model *m, double grad_norm, OptimizerStep s) {
    const Config *c = &m->config;
    double clip = c->grad_clip > 0 && grad_norm > c->grad_clip ? c->grad_clip / grad_norm : 1;
    for (int i = 0; i < m->n_buckets; i++) {
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
        adamw_update(b->weight, b->master, b->m, b->v, b->grad, b->grad32, b->count, a);
    }
}

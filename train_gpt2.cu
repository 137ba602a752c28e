// Trains GPT-2 and Llama-style language models. Reads top to bottom:
//
//   parameters -> memory -> a block, forward and backward -> the model -> one training step
//              -> evaluation, sampling -> main
//
// Host code only, compiled as C11 on every device. What a strategy of parallelism does stands in its own file (dp_zero.c, tp_sp.c,
// cp_ring.c, pp_1f1b.c, ep_moe.c), what an operation computes in kernels/, what a run is (flags, presets, data) in config.c, where values
// come from and are saved in state.c, what is printed in report.c and report_explain.c, and runtime/ is plumbing: memory, messages,
// files.
//
// Four letters name the work: F is a forward, I the gradient of an input, W the gradient of the weights, B both. (As sizes,
// B, T, C, F … are those of train.h.) W's products have functions of their own, to stand where a rank would else only wait:
// for a sum over tp, or, put off by a schedule, for another rank of the pipeline.
#include "train.h"
#include "config.h"
#include "report.h"
#include "state.h"
#include "runtime/checkpoint.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/launch.h"
#include "runtime/log.h"
#include "runtime/trace.h"
#include "runtime/watchdog.h"
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// =====================================================================================================================
// Parameters: a table of names and shapes
// =====================================================================================================================

// Channels, channels of all query and of all key/value heads, channels in the MLP, vocabulary, positions, experts.
typedef enum { DIM_NONE, DIM_C, DIM_Q, DIM_KV, DIM_F, DIM_V, DIM_P, DIM_E } Dim;
enum { GPT2 = 1 << ARCH_GPT2, LLAMA = 1 << ARCH_LLAMA, BOTH = GPT2 | LLAMA };
#define STD          0.02f // of initial weights, as GPT-2 has it
#define STD_RESIDUAL -2    // STD / √(2L): what is added to the residual stream 2L times
#define ONES         -1

typedef struct {
    const char *name;
    Dim rows, cols;
    Split split;
    float init;
    int archs;
    size_t
        place; // where in Block, Mlp or Ends its address goes; the first of a fused set has the place of the set
} ParamSpec;

#define FUSED           SIZE_MAX // continues the matrix of the parameter before it
#define AT(type, field) offsetof(type, field)
// clang-format off
static const ParamSpec embedding_params[] = {
    {"wte.weight", DIM_V, DIM_C, SPLIT_ROWS, STD, BOTH, AT(Ends, wte)},
    {"wpe.weight", DIM_P, DIM_C, SPLIT_NONE, STD, GPT2, AT(Ends, wpe)},
};
static const ParamSpec block_params[] = {
    {"norm1.weight",         DIM_C,  DIM_NONE, SPLIT_NONE,     ONES,         BOTH,  AT(Block, norm1_weight)},
    {"norm1.bias",           DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, norm1_bias)},
    {"attention.q.weight",   DIM_Q,  DIM_C,    SPLIT_HEADS,    STD,          BOTH,  AT(Block, qkv_weight)},
    {"attention.k.weight",   DIM_KV, DIM_C,    SPLIT_KV_HEADS, STD,          BOTH,  FUSED},
    {"attention.v.weight",   DIM_KV, DIM_C,    SPLIT_KV_HEADS, STD,          BOTH,  FUSED},
    {"attention.q.bias",     DIM_Q,  DIM_NONE, SPLIT_HEADS,    0,            GPT2,  AT(Block, qkv_bias)},
    {"attention.k.bias",     DIM_KV, DIM_NONE, SPLIT_KV_HEADS, 0,            GPT2,  FUSED},
    {"attention.v.bias",     DIM_KV, DIM_NONE, SPLIT_KV_HEADS, 0,            GPT2,  FUSED},
    {"attention.out.weight", DIM_C,  DIM_Q,    SPLIT_COLUMNS,  STD_RESIDUAL, BOTH,  AT(Block, out_weight)},
    {"attention.out.bias",   DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, out_bias)},
    {"norm2.weight",         DIM_C,  DIM_NONE, SPLIT_NONE,     ONES,         BOTH,  AT(Block, norm2_weight)},
    {"norm2.bias",           DIM_C,  DIM_NONE, SPLIT_NONE,     0,            GPT2,  AT(Block, norm2_bias)},
};
// One of a block without experts; all shared experts together; and each other.
static const ParamSpec mlp_params[] = {
    {"gate.weight", DIM_F, DIM_C,    SPLIT_ROWS,    STD,          LLAMA, AT(Mlp, up_weight)},
    {"up.weight",   DIM_F, DIM_C,    SPLIT_ROWS,    STD,          LLAMA, FUSED},
    {"up.weight",   DIM_F, DIM_C,    SPLIT_ROWS,    STD,          GPT2,  AT(Mlp, up_weight)},
    {"up.bias",     DIM_F, DIM_NONE, SPLIT_ROWS,    0,            GPT2,  AT(Mlp, up_bias)},
    {"down.weight", DIM_C, DIM_F,    SPLIT_COLUMNS, STD_RESIDUAL, BOTH,  AT(Mlp, down_weight)},
    {"down.bias",   DIM_C, DIM_NONE, SPLIT_NONE,    0,            GPT2,  AT(Mlp, down_bias)},
};
static const ParamSpec router_params[] = {
    {"router.weight", DIM_E, DIM_C, SPLIT_NONE, STD, BOTH, AT(Block, router_weight)},
};
static const ParamSpec head_params[] = {
    {"norm.weight", DIM_C, DIM_NONE, SPLIT_NONE, ONES, BOTH, AT(Ends, norm_weight)},
    {"norm.bias",   DIM_C, DIM_NONE, SPLIT_NONE, 0,    GPT2, AT(Ends, norm_bias)},
    {"head.weight", DIM_V, DIM_C,    SPLIT_ROWS, STD,  BOTH, AT(Ends, head_weight)}, // last: left out when tied
};
// clang-format on

// A set of parameters of one unit.
typedef struct {
    const char *prefix; // "" or "blocks.3.mlp."
    size_t base;        // where in Block (or Ends) what their places are counted from stands
    long ffn;           // F
    int expert;         // whose they are; −1: of none
} Owner;

static size_t dim_size(const Config *c, Dim d, long ffn) {
    const long size[] = {[DIM_NONE] = 1,         [DIM_C] = c->hidden,
                         [DIM_Q] = c->hidden,    [DIM_KV] = c->hidden / c->heads * c->kv_heads,
                         [DIM_F] = ffn,          [DIM_V] = c->vocab,
                         [DIM_P] = c->positions, [DIM_E] = c->experts};
    return (size_t)size[d];
}

// Appends parameters of the unit that is being made.
static void add_params(Model *m, Owner of, const ParamSpec *spec, size_t n) {
    const Config *c = &m->config;
    long own = of.expert < 0 ? 0 : c->experts / c->ep; // experts of a rank
    for (size_t i = 0; i < n; i++) {
        if (!(spec[i].archs & 1 << c->arch)) continue;
        Param *p = &m->param[m->n_params++];
        snprintf(p->name, sizeof p->name, "%s%s", of.prefix, spec[i].name);
        p->ndim = spec[i].cols == DIM_NONE ? 1 : 2;
        p->rows = dim_size(c, spec[i].rows, of.ffn);
        p->cols = dim_size(c, spec[i].cols, of.ffn);
        p->split = spec[i].split;
        p->unit = m->n_units;
        p->expert = of.expert;
        tp_slice(c, p, m->grid.tp->rank);
        p->here = m->chunk_of[p->unit] >= 0 && (of.expert < 0 || of.expert / own == m->grid.ep->rank);
        if (p->unit == 0 && pp_ties(c) && m->pp_rank == c->pp - 1)
            p->here = true, p->counted = false; // the last stage's copy, which the first one counts
        p->size = (spec[i].rows == DIM_V ? (size_t)c->padded_vocab : p->slice_rows) * p->slice_cols;
        p->init = spec[i].init == STD_RESIDUAL ? STD / sqrtf(2 * (float)c->layers) : spec[i].init;
        bool follows = spec[i].place == FUSED || (of.expert >= 0 && of.expert % own > 0);
        p->place = follows ? FUSED : of.base + spec[i].place;
        m->parameters += p->rows * p->cols;
        if (of.expert >= c->topk)
            m->inactive += p->rows * p->cols; // a token goes through topk of them, all alike
    }
}

static void add_block(Model *m, long l) {
    const Config *c = &m->config;
    char prefix[32], mlp[48], expert[72];
    bool experts = has_experts(c, l);
    snprintf(prefix, sizeof prefix, "blocks.%ld.", l);
    snprintf(mlp, sizeof mlp, "%smlp.%s", prefix, experts ? "shared." : "");
    add_params(m, (Owner){prefix, 0, 0, -1}, block_params, LENGTH(block_params));
    Owner of = {mlp, AT(Block, mlp), experts ? c->shared_experts * c->expert_ffn : c->ffn, -1};
    if (of.ffn) add_params(m, of, mlp_params, LENGTH(mlp_params));
    snprintf(mlp, sizeof mlp, "%smlp.", prefix);
    if (experts) add_params(m, (Owner){mlp, 0, 0, -1}, router_params, LENGTH(router_params));
    for (int e = 0; experts && e < c->experts; e++) {
        snprintf(expert, sizeof expert, "%sexperts.%d.", mlp, e);
        add_params(m, (Owner){expert, AT(Block, expert), c->expert_ffn, e}, mlp_params, LENGTH(mlp_params));
    }
    m->n_units++;
}

// Which units this rank of the pipeline has.
static void model_chunks(Model *m) {
    const Config *c = &m->config;
    free(m->chunk), free(m->chunk_of);
    m->chunk = host_alloc((size_t)c->virtual_stages, sizeof *m->chunk);
    m->chunk_of = host_alloc((size_t)c->layers + 2, sizeof *m->chunk_of);
    pp_chunks(c, m->pp_rank, m->chunk);
    for (int unit = 0; unit < c->layers + 2; unit++) m->chunk_of[unit] = -1;
    m->blocks = 0;
    for (int k = 0; k < c->virtual_stages; k++) {
        for (int unit = m->chunk[k].first_unit; unit <= m->chunk[k].last_unit; unit++) m->chunk_of[unit] = k;
        if (m->chunk[k].blocks > m->blocks) m->blocks = m->chunk[k].blocks;
    }
}

// The table of parameters: names and shapes of all, wherever they are; no memory for their values yet. May be called again, for
// another place in the pipeline.
static void model_layout(Model *m) {
    const Config *c = &m->config;
    model_chunks(m);
    for (int i = 0; i < m->n_buckets; i++) free(m->bucket[i].decay);
    free(m->bucket), free(m->bucket_of), free(m->experts_bucket_of), free(m->param);
    m->parameters = m->inactive = 0;
    m->n_params = m->n_units = m->n_buckets = 0;
    m->bucket = NULL;
    size_t in_block =
        LENGTH(block_params) + LENGTH(router_params) + (1 + (size_t)c->experts) * LENGTH(mlp_params);
    m->param = host_alloc(LENGTH(embedding_params) + (size_t)c->layers * in_block + LENGTH(head_params),
                          sizeof(Param));
    Owner ends = {"", 0, 0, -1};
    add_params(m, ends, embedding_params, LENGTH(embedding_params));
    m->n_units++;
    for (long l = 0; l < c->layers; l++) add_block(m, l);
    add_params(m, ends, head_params, LENGTH(head_params) - (c->tie ? 1 : 0));
    m->n_units++;
    m->not_finite.param = -1;
    m->norm_forward = c->arch == ARCH_GPT2 ? layernorm_forward : rmsnorm_forward;
    m->norm_backward = c->arch == ARCH_GPT2 ? layernorm_backward : rmsnorm_backward;
    m->act_forward = c->arch == ARCH_GPT2 ? gelu_forward : swiglu_forward;
    m->act_backward = c->arch == ARCH_GPT2 ? gelu_backward : swiglu_backward;
}

// =====================================================================================================================
// Memory: all that a step needs, reserved before the first one
// =====================================================================================================================

// Points a Block or Ends, of weights or of gradients, into the buckets.
static void place_params(Model *m) {
    for (int i = 0; i < m->n_params; i++) {
        const Param *p = &m->param[i];
        if (p->place == FUSED || !p->here) continue;
        const Bucket *b = &m->bucket[p->bucket];
        bool ends = p->unit == 0 || p->unit == m->n_units - 1;
        char *w = ends ? (char *)&m->ends : (char *)&m->block[p->unit - 1];
        char *d = ends ? (char *)&m->d_ends : (char *)&m->d_block[p->unit - 1];
        *(floatX **)(w + p->place) = b->weight + p->offset;
        *(floatX **)(d + p->place) = b->grad + p->offset;
    }
    if (m->config.tie) {
        m->ends.head_weight = m->ends.wte;
        m->d_ends.head_weight = m->d_ends.wte;
    }
}

static floatX *alloc_x(MemCategory category, size_t n) {
    return device_alloc(category, n * sizeof(floatX));
}

static float *alloc_f(MemCategory category, size_t n) {
    return device_alloc(category, n * sizeof(float));
}

// Sizes of one block, as its functions use them (train.h): rows, here and of all tp ranks together, channels, and the widths
// of qkv and of the MLP's input. F is 0 where it has experts and no shared ones.
typedef struct {
    size_t N, R, C, H, KV, D, A, F, QKV, U;
    bool experts;
} BlockSize;

static long block_ffn(const Config *c, long l) {
    return has_experts(c, l) ? c->shared_experts * c->expert_ffn : c->ffn;
}

// But for the MLP's, which not all blocks have alike.
static BlockSize sizes(const Model *m) {
    const Config *c = &m->config;
    size_t tp = (size_t)c->tp, N = m->B * m->T, C = (size_t)c->hidden, D = C / (size_t)c->heads;
    size_t H = (size_t)c->heads / tp, KV = c->kv_heads > c->tp ? (size_t)c->kv_heads / tp : 1;
    return (BlockSize){
        .N = N, .R = c->sp ? N / tp : N, .C = C, .H = H, .KV = KV, .D = D, .A = H * D, .QKV = (H + 2 * KV) * D};
}

static BlockSize block_size(const Model *m, long l) {
    BlockSize s = sizes(m);
    s.F = (size_t)(block_ffn(&m->config, l) / m->config.tp);
    s.U = m->config.arch == ARCH_LLAMA ? 2 * s.F : s.F;
    s.experts = has_experts(&m->config, l);
    return s;
}

// Of memory that the i-th blocks of all of this rank's chunks share (i = −1: all blocks) the largest sizes.
static BlockSize widest(const Model *m, long i) {
    BlockSize most = sizes(m);
    for (const Chunk *k = m->chunk; k < m->chunk + m->config.virtual_stages; k++)
        for (long j = 0; j < k->blocks; j++) {
            BlockSize s = block_size(m, k->first_block + j);
            if (i >= 0 && i != j) continue;
            if (s.F > most.F) most.F = s.F, most.U = s.U;
            most.experts |= s.experts;
        }
    return most;
}

static AttentionShape attention_shape(const Model *m) {
    BlockSize s = sizes(m);
    return (AttentionShape){m->B, m->T, m->T, s.H, s.KV, s.D, s.QKV, s.QKV, s.A, .causal = true};
}

// All that a block's forward writes, but x and the route, and the attention matrix where that is shared.
static void reserve_block(const Model *m, Activations *a, BlockSize s) {
    const Config *c = &m->config;
    MemCategory cat = MEM_ACTIVATIONS;
    if (c->arch == ARCH_GPT2) a->mean1 = alloc_f(cat, s.R), a->mean2 = alloc_f(cat, s.R);
    a->rstd1 = alloc_f(cat, s.R);
    a->h1 = alloc_x(cat, s.R * s.C);
    a->qkv = alloc_x(cat, s.N * s.QKV);
    if (c->attention == ATTENTION_FLASH) a->lse = alloc_f(cat, s.N * s.H);
    a->o = alloc_x(cat, s.N * s.A);
    a->x_mid = alloc_x(cat, s.R * s.C);
    a->rstd2 = alloc_f(cat, s.R);
    a->h2 = alloc_x(cat, s.R * s.C);
    a->up = alloc_x(cat, s.N * s.U);
    a->act = alloc_x(cat, s.N * s.F);
    if (s.experts) a->experts = moe_reserve_activations(m);
}

// What F keeps, for each micro-batch in flight. Recomputation shares: under `selective` all blocks write one attention matrix;
// under `full` all of F write one set of buffers, which a backward fills again from the block's own x; where W is put off, each
// block that waits for it has a set of its own.
static void reserve_activations(Model *m) {
    const Config *c = &m->config;
    const RankPlan *plan = &m->plan->rank[m->pp_rank];
    BlockSize s = sizes(m);
    bool full = c->recompute == RECOMPUTE_FULL, naive = c->attention == ATTENTION_NAIVE;
    long kept = plan->slots * m->blocks, again = pp_defers_w(c) ? plan->douts * m->blocks : 0;
    floatX *probs = naive && c->recompute != RECOMPUTE_NONE ? alloc_x(MEM_ACTIVATIONS, s.N * s.H * m->T) : NULL;
    m->acts = host_alloc((size_t)kept, sizeof *m->acts);
    m->rebuilt = host_alloc((size_t)again + 1, sizeof *m->rebuilt);
    for (Activations *a = m->acts; a < m->acts + kept; a++) {
        BlockSize of = widest(m, (a - m->acts) % m->blocks);
        a->x = alloc_x(MEM_ACTIVATIONS, s.R * s.C);
        if (of.experts) a->route = moe_reserve_route(m);
        if (!full) reserve_block(m, a, of);
        a->probs = naive && !probs ? alloc_x(MEM_ACTIVATIONS, s.N * s.H * m->T) : probs;
    }
    for (Activations *a = m->rebuilt; full && a <= m->rebuilt + again; a++)
        reserve_block(m, a, widest(m, a == m->rebuilt ? -1 : (a - m->rebuilt - 1) % m->blocks)),
            a->probs = probs;

    m->head = host_alloc((size_t)plan->heads, sizeof *m->head);
    for (HeadActivations *h = m->head; h < m->head + plan->heads; h++) {
        if (c->arch == ARCH_GPT2) h->mean = alloc_f(MEM_ACTIVATIONS, s.R);
        h->rstd = alloc_f(MEM_ACTIVATIONS, s.R);
        h->h1 = alloc_x(MEM_ACTIVATIONS, s.R * s.C);
        h->x = alloc_x(MEM_ACTIVATIONS, s.R * s.C);
        h->logits = alloc_x(MEM_LOGITS, s.N * (size_t)c->padded_vocab);
    }
    m->logit_stats = plan->heads ? alloc_f(MEM_LOGITS, 4 * s.N) : NULL;
    m->losses = plan->heads ? alloc_f(MEM_LOGITS, s.N) : NULL;
}

// Gradients of outputs. Where W follows its I at once, block by block, those inside a block are needed for one block at a time,
// those of the residual stream for two; where it is put off, all have their own.
static void reserve_output_gradients(Model *m) {
    const RankPlan *plan = &m->plan->rank[m->pp_rank];
    bool deferred = pp_defers_w(&m->config), first = m->chunk_of[0] >= 0;
    m->dout = host_alloc((size_t)(plan->douts * m->blocks), sizeof *m->dout);
    for (long i = 0; i < plan->douts * m->blocks; i++) {
        OutputGrads *d = &m->dout[i];
        if (!deferred && i > 0) *d = m->dout[i > 1 ? i - 2 : 0];
        BlockSize s = widest(m, deferred ? i % m->blocks : -1);
        if (!deferred && i > 1) continue;
        d->down = alloc_x(MEM_DOUT, s.R * s.C);
        if (!deferred && i == 1) continue;
        d->up = alloc_x(MEM_DOUT, s.N * s.U);
        d->out = alloc_x(MEM_DOUT, s.R * s.C);
        d->qkv = alloc_x(MEM_DOUT, s.N * s.QKV);
        d->norms = alloc_x(MEM_DOUT, 4 * s.C);
        if (s.experts) d->experts = moe_reserve_gradients(m);
    }
    // Of the embedding's output: "block -1" of those two.
    if (first && (deferred || m->blocks == 1))
        m->d_embedding = alloc_x(MEM_DOUT, sizes(m).R * sizes(m).C);
    else if (first)
        m->d_embedding = m->dout[1].down;
}

// Bytes that a unit brings to life.
typedef struct {
    size_t whole, kept; // activations: while it computes, and from its F to its last gradient
    size_t shared; // of these: the attention matrix that all compute again in the same place, until I is done
    size_t logits; // from its F to its B
    size_t dy, inside, dx; // output gradients of its B: what it gets, what stays in it, what it hands on
} LiveBytes;

// M: copies that a block's experts have of its micro-batch.
static LiveBytes live_bytes(const Model *m, int unit, size_t M) {
    const Config *c = &m->config;
    bool block = unit > 0 && unit < m->n_units - 1;
    BlockSize s = block ? block_size(m, unit - 1) : sizes(m);
    ExpertBytes experts = s.experts ? moe_bytes(m, M) : (ExpertBytes){0};
    bool first = m->chunk[m->chunk_of[unit]].first_unit == unit; // what it hands on is a message
    size_t x = s.R * s.C * sizeof(floatX), wide = s.N * (s.QKV + s.U) * sizeof(floatX);
    size_t norm = s.R * sizeof(float) * (c->arch == ARCH_GPT2 ? 2 : 1);
    size_t inside = wide + x + 4 * s.C * sizeof(floatX) + experts.gradients;
    if (unit == 0) return (LiveBytes){.dy = x}; // its output is the first block's x
    if (unit == m->n_units - 1)
        return (LiveBytes){.whole = 2 * x + norm,
                           .kept = 2 * x + norm,
                           .logits = s.N * (size_t)c->padded_vocab * sizeof(floatX),
                           .dx = x};
    bool flash = c->attention == ATTENTION_FLASH;
    size_t scores = flash ? s.N * s.H * sizeof(float) : s.N * s.H * m->T * sizeof(floatX);
    size_t whole = 4 * x + s.N * s.A * sizeof(floatX) + wide + 2 * norm + scores + s.N * s.F * sizeof(floatX) +
                   experts.activations + experts.route;
    size_t kept[] = {whole, flash ? whole : whole - scores, x + experts.route}; // by recomputation
    return (LiveBytes){.whole = whole,
                       .kept = kept[c->recompute],
                       .shared = flash || c->recompute == RECOMPUTE_NONE ? 0 : scores,
                       .dy = x,
                       .inside = inside,
                       .dx = first ? 0 : x};
}

// Enters them around its passes. Before I, what F did not keep is computed again; after W nothing of the unit is needed; the
// embedding and the head have no W.
static void enter_live(const Model *m, int unit, Pass pass, const Route *route, bool begins) {
    bool even = pass == PASS_F && begins; // until routing says how many copies come
    LiveBytes b = live_bytes(m, unit, even || !route ? m->B * m->T * (size_t)m->config.topk : route->M);
    ptrdiff_t whole = (ptrdiff_t)b.whole, again = (ptrdiff_t)(b.whole - b.kept);
    bool block = unit > 0 && unit < m->n_units - 1;
    if (pass == PASS_F) {
        ledger_live(MEM_ACTIVATIONS, begins ? whole : -again);
        ledger_live(MEM_LOGITS, begins ? (ptrdiff_t)b.logits : 0);
    } else if (begins && pass != PASS_W) {
        ledger_live(MEM_ACTIVATIONS, again);
        ledger_live(MEM_DOUT, (ptrdiff_t)(b.inside + b.dx));
    } else if (!begins && pass == PASS_I && block) {
        ledger_live(MEM_ACTIVATIONS, -(ptrdiff_t)b.shared);
    } else if (!begins) {
        ledger_live(MEM_ACTIVATIONS, pass == PASS_W ? (ptrdiff_t)b.shared - whole : -whole);
        ledger_live(MEM_LOGITS, -(ptrdiff_t)b.logits);
        ledger_live(MEM_DOUT, -(ptrdiff_t)(b.inside + b.dy));
    }
}

// After a forward without a backward nothing is read again.
static void forget_activations(void) {
    ledger_live(MEM_ACTIVATIONS, -(ptrdiff_t)ledger.live[MEM_ACTIVATIONS]);
    ledger_live(MEM_LOGITS, -(ptrdiff_t)ledger.live[MEM_LOGITS]);
}

static size_t largest(size_t n, const size_t *x) {
    size_t best = 0;
    for (size_t i = 0; i < n; i++)
        if (x[i] > best) best = x[i];
    return best;
}

static void model_reserve(Model *m) {
    const Config *c = &m->config;
    m->B = (size_t)c->micro_batch;
    m->T = (size_t)c->local_seq;
    BlockSize s = widest(m, -1);
    size_t Vp = (size_t)c->padded_vocab, bucket = 0;

    dp_reserve(m);
    tp_reserve(m);
    cp_reserve(m, attention_shape(m));
    pp_reserve(m);
    for (int i = 0; i < m->n_buckets; i++)
        if (m->bucket[i].count > bucket) bucket = m->bucket[i].count;
    place_params(m);
    reserve_activations(m);
    reserve_output_gradients(m);
    m->temp_c = alloc_x(MEM_WORKSPACE, s.N * s.C);
    m->temp_f = alloc_x(MEM_WORKSPACE, s.N * s.F);
    m->tokens = device_alloc(MEM_WORKSPACE, s.N * sizeof(int32_t));
    m->targets = device_alloc(MEM_WORKSPACE, s.N * sizeof(int32_t));
    m->positions = device_alloc(MEM_WORKSPACE, m->T * sizeof(int32_t));
    if (c->arch == ARCH_LLAMA) m->rope = alloc_f(MEM_WORKSPACE, m->T * s.D);
    m->squares = device_alloc(MEM_WORKSPACE, ((size_t)m->n_params + 1) * sizeof(double));
    const size_t workspace[] = {linear_workspace(m, s.N, s.C, s.QKV),
                                linear_workspace(m, s.N, s.A, s.C),
                                linear_workspace(m, s.N, s.C, s.U),
                                linear_workspace(m, s.N, s.F, s.C),
                                matmul_workspace(s.N, s.C, Vp),
                                norm_backward_workspace(s.R, s.C),
                                embedding_backward_workspace(m->B, m->T, s.C, m->param[0].slice_rows),
                                c->attention == ATTENTION_FLASH ? flash_attention_workspace(attention_shape(m))
                                                                : naive_attention_workspace(attention_shape(m)),
                                grad_norm_workspace(bucket)};
    m->workspace_bytes = largest(LENGTH(workspace), workspace);
    m->workspace = device_alloc(MEM_WORKSPACE, m->workspace_bytes);
    moe_reserve(m);
    ledger_live(MEM_WORKSPACE, (ptrdiff_t)ledger.held[MEM_WORKSPACE]);
}

// =====================================================================================================================
// A block: F, I and W
// =====================================================================================================================

static void attention_forward(Model *m, Activations a) {
    BlockSize s = sizes(m);
    const floatX *q = a.qkv, *k = q + s.A, *v = k + s.KV * s.D;
    if (a.probs)
        naive_attention_forward(a.o, a.probs, q, k, v, attention_shape(m), m->workspace);
    else
        cp_attention_forward(m, a.o, a.lse, a.qkv, attention_shape(m));
}

// do_ [N, A] is the gradient of a.o; dqkv [N, A+2·KV·D] is written.
static void attention_backward(Model *m, Activations a, floatX *dqkv, const floatX *do_) {
    BlockSize s = sizes(m);
    size_t k = s.A, v = k + s.KV * s.D;
    if (a.probs)
        naive_attention_backward(dqkv, dqkv + k, dqkv + v, do_, a.probs, a.qkv, a.qkv + k, a.qkv + v,
                                 attention_shape(m), m->workspace);
    else
        cp_attention_backward(m, dqkv, do_, a.o, a.lse, a.qkv, attention_shape(m));
}

// Rows are there now.
static floatX *arrived(Rows r) {
    comm_wait(r.work);
    return r.x;
}

// Of the tp ranks' partial sums, one has the bias in it.
static const floatX *once(const Model *m, const floatX *bias) {
    return m->grid.tp->rank == 0 ? bias : NULL;
}

// h [N, C] -> part [N, C], a term of a sum over tp.
static void mlp_forward(Model *m, long l, Activations a, const floatX *h, floatX *part) {
    BlockSize s = block_size(m, l);
    const Mlp *w = &m->block[l].mlp;
    linear_forward(m, a.up, h, w->up_weight, w->up_bias, s.N, s.C, s.U);
    comm_progress();
    m->act_forward(a.act, a.up, s.N, s.F);
    linear_forward(m, part, a.act, w->down_weight, once(m, w->down_bias), s.N, s.F, s.C);
}

// a.x -> y: block l on [R, C]. Between operations, here and in the backward, messages under way get their turn (comm_progress).
static void block_forward(Model *m, long l, Activations a, floatX *y) {
    BlockSize s = block_size(m, l);
    const Block *w = &m->block[l];
    floatX *part = m->temp_c; // what attention, then the MLP, adds to the residual stream
    Work copies = {0};

    m->norm_forward(a.h1, a.mean1, a.rstd1, NULL, a.x, NULL, w->norm1_weight, w->norm1_bias, s.R, s.C);
    Rows h = tp_enter(m, a.h1, 0);
    linear_forward(m, a.qkv, arrived(h), w->qkv_weight, w->qkv_bias, s.N, s.C, s.QKV);
    if (m->rope) rope_forward(a.qkv, m->rope, m->B, m->T, s.H + s.KV, s.D, s.QKV);
    comm_progress();
    attention_forward(m, a);
    comm_progress();
    linear_forward(m, part, a.o, w->out_weight, once(m, w->out_bias), s.N, s.A, s.C);
    Rows sum = tp_exit(m, part);

    m->norm_forward(a.h2, a.mean2, a.rstd2, a.x_mid, a.x, arrived(sum), w->norm2_weight, w->norm2_bias, s.R,
                    s.C);
    h = tp_enter(m, a.h2, 0);
    comm_progress();
    if (s.experts) moe_route_tokens(m, l, a);
    if (s.experts) copies = moe_send(m, a, arrived(h));
    if (s.F) mlp_forward(m, l, a, arrived(h), part); // without experts the only one, with them the shared ones
    if (s.experts) moe_forward(m, l, a, copies, part, s.F > 0);
    sum = tp_exit(m, part);
    residual_forward(y, a.x_mid, arrived(sum), s.R * s.C);
}

// I of the MLP: dy [N, C] -> dh [N, C], a term of a sum over tp.
static void mlp_backward_input(Model *m, long l, Activations a, OutputGrads d, const floatX *dy, floatX *dh) {
    BlockSize s = block_size(m, l);
    const Mlp *w = &m->block[l].mlp;
    floatX *dact = m->temp_f;
    linear_backward_input(m, dact, dy, w->down_weight, s.N, s.F, s.C);
    m->act_backward(d.up, dact, a.up, s.N, s.F);
    comm_progress();
    linear_backward_input(m, dh, d.up, w->up_weight, s.N, s.C, s.U);
}

// W of the MLP, of attention, and of what is no matrix: two products each of what F and I left behind; no weights needed. dy, the
// gradient of the second's output, and h, the first's input, may be on their way.
static void mlp_backward_weight(const Model *m, long l, Activations a, OutputGrads d, Rows dy, Rows h) {
    BlockSize s = block_size(m, l);
    const Mlp *dw = &m->d_block[l].mlp;
    const floatX *dout = arrived(dy), *inp = arrived(h);
    if (s.experts) moe_backward_weight(m, l, a, d);
    if (s.F == 0) return;
    linear_backward_weight(m, dw->down_weight, dout, a.act, s.N, s.F, s.C);
    comm_progress();
    linear_backward_weight(m, dw->up_weight, d.up, inp, s.N, s.C, s.U);
    comm_progress();
}

static void attention_backward_weight(const Model *m, long l, Activations a, OutputGrads d, Rows dy, Rows h) {
    BlockSize s = block_size(m, l);
    const Block *dw = &m->d_block[l];
    linear_backward_weight(m, dw->out_weight, arrived(dy), a.o, s.N, s.A, s.C);
    comm_progress();
    linear_backward_weight(m, dw->qkv_weight, d.qkv, arrived(h), s.N, s.C, s.QKV);
    comm_progress();
}

// I has summed up norms' gradients on its way, and left them in d.norms, so that I needs no place in the bucket.
static void vectors_backward_weight(const Model *m, long l, OutputGrads d) {
    BlockSize s = block_size(m, l);
    const Block *dw = &m->d_block[l];
    floatX *dnorm1 = d.norms, *dnorm2 = dnorm1 + 2 * s.C;
    residual_forward(dw->norm1_weight, dw->norm1_weight, dnorm1, s.C);
    residual_forward(dw->norm2_weight, dw->norm2_weight, dnorm2, s.C);
    if (m->config.arch != ARCH_GPT2) return; // it alone has biases
    residual_forward(dw->norm1_bias, dw->norm1_bias, dnorm1 + s.C, s.C);
    residual_forward(dw->norm2_bias, dw->norm2_bias, dnorm2 + s.C, s.C);
    if (s.F) matmul_backward_bias(dw->mlp.down_bias, d.down, s.R, s.C, m->workspace);
    if (s.F) matmul_backward_bias(dw->mlp.up_bias, d.up, s.N, s.U, m->workspace);
    matmul_backward_bias(dw->out_bias, d.out, s.R, s.C, m->workspace);
    matmul_backward_bias(dw->qkv_bias, d.qkv, s.N, s.QKV, m->workspace);
}

// I: the forward's lines from the last to the first, d.down -> dx [R, C]. With `weights` it is B: W's products stand beside I's
// sums over tp, for they need none of them.
static void block_backward_input(Model *m, long l, Activations a, OutputGrads d, floatX *dx, bool weights) {
    BlockSize s = block_size(m, l);
    const Block *w = &m->block[l];
    floatX *dh = m->temp_c; // gradients of h2, o, h1 in turn
    floatX *dnorm1 = d.norms, *dnorm2 = dnorm1 + 2 * s.C;
    Rows h = {0};
    Work copies = {0};
    device_zero(d.norms, 4 * s.C * sizeof(floatX));

    Rows dy = tp_enter(m, d.down, 0);
    if (weights && s.F) h = tp_enter(m, a.h2, 1);
    if (s.experts) copies = moe_send_gradients(m, a, d, arrived(dy));
    if (s.F) mlp_backward_input(m, l, a, d, arrived(dy), dh);
    if (s.experts) moe_backward_input(m, l, a, d, copies, dh, s.F > 0);
    Rows sum = tp_exit(m, dh);
    if (weights) mlp_backward_weight(m, l, a, d, dy, h);
    floatX *dh2 = arrived(sum);
    if (s.experts) moe_backward_router(m, l, d, dh2);
    m->norm_backward(d.out, dnorm2, dnorm2 + s.C, dh2, d.down, a.x_mid, w->norm2_weight, a.mean2, a.rstd2, s.R,
                     s.C, m->workspace);

    dy = tp_enter(m, d.out, 0);
    if (weights) h = tp_enter(m, a.h1, 1);
    linear_backward_input(m, dh, arrived(dy), w->out_weight, s.N, s.A, s.C);
    comm_progress();
    attention_backward(m, a, d.qkv, dh);
    comm_progress();
    if (m->rope) rope_backward(d.qkv, m->rope, m->B, m->T, s.H + s.KV, s.D, s.QKV);
    linear_backward_input(m, dh, d.qkv, w->qkv_weight, s.N, s.C, s.QKV);
    sum = tp_exit(m, dh);
    if (weights) attention_backward_weight(m, l, a, d, dy, h);
    m->norm_backward(dx, dnorm1, dnorm1 + s.C, arrived(sum), d.out, a.x, w->norm1_weight, a.mean1, a.rstd1, s.R,
                     s.C, m->workspace);
    if (weights) vectors_backward_weight(m, l, d);
}

// W: of what F and I have left behind.
static void block_backward_weight(Model *m, long l, Activations a, OutputGrads d) {
    Rows none = {0};
    bool mlp = block_size(m, l).F > 0; // experts have had their rows from all ranks
    mlp_backward_weight(m, l, a, d, mlp ? tp_enter(m, d.down, 0) : none, mlp ? tp_enter(m, a.h2, 1) : none);
    attention_backward_weight(m, l, a, d, tp_enter(m, d.out, 0), tp_enter(m, a.h1, 1));
    vectors_backward_weight(m, l, d);
}

// What the forward did not keep is computed again, by the same code. y [R, C] is what comes out; nobody needs it.
static void block_recompute(Model *m, long l, Activations a, floatX *y) {
    m->experts.replays = true;
    if (m->config.recompute == RECOMPUTE_FULL) block_forward(m, l, a, y);
    m->experts.replays = false;
    if (m->config.recompute == RECOMPUTE_SELECTIVE && m->config.attention == ATTENTION_NAIVE)
        attention_forward(m, a);
}

// =====================================================================================================================
// The model: embedding, blocks, head; and the passes of a chunk of it
// =====================================================================================================================

// Each tp rank looks up the tokens of its slice of the vocabulary; the sum has them all.
static void embedding_unit_forward(Model *m, floatX *y) {
    BlockSize s = sizes(m);
    floatX *x = m->temp_c;
    embedding_forward(x, m->tokens, m->ends.wte, once(m, m->ends.wpe), m->positions, m->B, m->T, s.C);
    Rows sum = tp_exit(m, x);
    device_copy(y, arrived(sum), s.R * s.C * sizeof(floatX));
}

static void embedding_unit_backward(Model *m) {
    BlockSize s = sizes(m);
    Rows dx = tp_enter(m, m->d_embedding, 0);
    embedding_backward(m->d_ends.wte, m->d_ends.wpe, arrived(dx), m->tokens, m->positions, m->B, m->T, s.C,
                       m->param[0].slice_rows, m->workspace);
}

// The head's F: final norm, logits, the loss of each row; with dloss ≠ 0 the logits become their own gradient at once.
static void head_forward(Model *m, HeadActivations a, float dloss) {
    BlockSize s = sizes(m);
    m->norm_forward(a.h1, a.mean, a.rstd, NULL, a.x, NULL, m->ends.norm_weight, m->ends.norm_bias, s.R, s.C);
    Rows h = tp_enter(m, a.h1, 0);
    matmul_forward(a.logits, arrived(h), m->ends.head_weight, NULL, s.N, s.C, (size_t)m->config.padded_vocab,
                   m->workspace);
    tp_cross_entropy(m, a.logits, dloss);
}

// I and W together, whatever the schedule: logits that wait for their W would be the largest thing on the rank.
static void head_backward(Model *m, HeadActivations a, floatX *dx) {
    BlockSize s = sizes(m);
    size_t Vp = (size_t)m->config.padded_vocab;
    floatX *dh = m->temp_c;
    Rows h = tp_enter(m, a.h1, 1);
    matmul_backward_input(dh, a.logits, m->ends.head_weight, s.N, s.C, Vp, m->workspace);
    Rows sum = tp_exit(m, dh);
    matmul_backward_weight(m->d_ends.head_weight, a.logits, arrived(h), s.N, s.C, Vp, m->workspace);
    m->norm_backward(dx, m->d_ends.norm_weight, m->d_ends.norm_bias, arrived(sum), NULL, a.x,
                     m->ends.norm_weight, a.mean, a.rstd, s.R, s.C, m->workspace);
}

// Where block `i` of the action's chunk keeps what for its micro-batch. Under full recomputation all but x is in memory that F
// shares, and where W is put off has a place of its own from I on.
static Activations activations(const Model *m, const Action *a, long i) {
    Activations kept = m->acts[a->slot * m->blocks + i];
    if (m->config.recompute != RECOMPUTE_FULL) return kept;
    bool own = a->pass == PASS_I || a->pass == PASS_W;
    Activations shared = m->rebuilt[own ? 1 + a->dout * m->blocks + i : 0];
    shared.x = kept.x;
    shared.route = kept.route;
    return shared;
}

// Where a unit puts what it hands on, the residual stream (F) or its gradient: where the next unit of the pass finds it; or, the last
// of the chunk, in the buffer of a message.
static floatX *unit_output(Model *m, const Action *a, int unit) {
    const Chunk *k = &m->chunk[a->chunk];
    long i = unit - 1 - k->first_block; // its place among the chunk's blocks
    if (a->pass == PASS_F) {
        if (unit == k->last_unit) return pp_buffer(m, a->chunk, PASS_F);
        return i + 1 < k->blocks ? activations(m, a, i + 1).x : m->head[a->head].x;
    }
    if (unit == k->first_unit) return pp_buffer(m, a->chunk, PASS_I);
    return i > 0 ? m->dout[a->dout * m->blocks + i - 1].down : m->d_embedding;
}

static void unit_forward(Model *m, const Action *a, int unit, float dloss) {
    if (unit == 0)
        embedding_unit_forward(m, unit_output(m, a, unit));
    else if (unit < m->n_units - 1)
        block_forward(m, unit - 1, activations(m, a, unit - 1 - m->chunk[a->chunk].first_block),
                      unit_output(m, a, unit));
    else
        head_forward(m, m->head[a->head], dloss);
}

static void unit_backward(Model *m, const Action *a, int unit) {
    if (unit == m->n_units - 1) {
        head_backward(m, m->head[a->head], unit_output(m, a, unit));
    } else if (unit > 0) {
        long i = unit - 1 - m->chunk[a->chunk].first_block;
        Activations acts = activations(m, a, i);
        OutputGrads d = m->dout[a->dout * m->blocks + i];
        if (a->pass == PASS_W) {
            block_backward_weight(m, unit - 1, acts, d);
            return;
        }
        floatX *dx = unit_output(m, a, unit);
        block_recompute(m, unit - 1, acts, dx);
        block_backward_input(m, unit - 1, acts, d, dx, a->pass == PASS_B);
    } else {
        embedding_unit_backward(m);
    }
}

// A pass of one unit: its parameters are there before, its gradients on their way after.
static void run_unit(Model *m, const Action *a, int unit, float dloss) {
    static const char *const name[3][4] = {{"embedding F", "embedding B", NULL, "embedding B"},
                                           {"block F", "block I", "block W", "block B"},
                                           {"head F", "head B", NULL, "head B"}};
    int kind = unit == 0 ? 0 : unit < m->n_units - 1 ? 1 : 2;
    if (a->pass == PASS_W && kind != 1) return; // the two ends do W with I
    dp_begin(m, unit, a->pass);
    Moment began = trace_begin();
    bool experts = kind == 1 && has_experts(&m->config, unit - 1);
    const Route *route = experts ? activations(m, a, unit - 1 - m->chunk[a->chunk].first_block).route : NULL;
    enter_live(m, unit, a->pass, route, true);
    if (a->pass == PASS_F)
        unit_forward(m, a, unit, dloss);
    else
        unit_backward(m, a, unit);
    enter_live(m, unit, a->pass, route, false);
    trace_end("compute", name[kind][a->pass], kind == 1 ? unit - 1 : -1, began, 0);
    dp_end(m, unit, a->pass);
}

// F of a chunk, from the embedding or from the rank before. Returns the sum of the losses of its rows: 0 but where the head is.
static double chunk_forward(Model *m, const Action *a, float dloss) {
    const Chunk *k = &m->chunk[a->chunk];
    if (k->first_unit > 0) pp_receive(m, a->chunk, PASS_F, activations(m, a, 0).x);
    for (int unit = k->first_unit; unit <= k->last_unit; unit++) run_unit(m, a, unit, dloss);
    if (k->last_unit < m->n_units - 1) {
        pp_send(m, a->chunk, PASS_F);
        return 0;
    }
    double sum = 0;
    float *losses = m->host_losses;
    device_copy_out(losses, m->losses, m->B * m->T * sizeof(float));
    for (size_t i = 0; i < m->B * m->T; i++) sum += losses[i];
    return sum;
}

// I or B of a chunk, from the logits' gradient that F left, or from what the stage behind has sent; or W, from what F and I left.
static void chunk_backward(Model *m, const Action *a) {
    const Chunk *k = &m->chunk[a->chunk];
    bool receives = a->pass != PASS_W && k->last_unit < m->n_units - 1;
    floatX *dy = m->dout[a->dout * m->blocks + k->blocks - 1].down;
    if (receives) pp_receive(m, a->chunk, PASS_I, dy);
    if (receives) ledger_live(MEM_DOUT, (ptrdiff_t)live_bytes(m, k->last_unit, 0).dy);
    for (int unit = k->last_unit; unit >= k->first_unit; unit--) run_unit(m, a, unit, 0);
    if (a->pass != PASS_W && k->first_unit > 0) pp_send(m, a->chunk, PASS_I);
}

// =====================================================================================================================
// One training step
// =====================================================================================================================

// How many tokens of a sequence are here: their global positions, and the rotary angles that follow.
static void set_positions(Model *m, size_t T) {
    m->T = T;
    cp_positions(&m->config, m->grid.cp->rank, T, m->host_positions);
    device_copy_in(m->positions, m->host_positions, T * sizeof(int32_t));
    if (m->rope) rope_table(m->rope, m->positions, T, sizes(m).D, (float)m->config.rope_theta);
}

// Row b of the micro-batch becomes this rank's part of a window [--seq + 1]: each token's target is the one behind it.
static void set_row(Model *m, size_t b, const int32_t *window) {
    for (size_t t = 0; t < m->T; t++) {
        m->host_tokens[b * m->T + t] = window[m->host_positions[t]];
        m->host_targets[b * m->T + t] = window[m->host_positions[t] + 1];
    }
}

// Tokens become rows of this rank's slice of the vocabulary, or −1.
static void send_rows(Model *m) {
    const Param *wte = &m->param[0];
    for (int32_t *t = m->host_tokens; t < m->host_tokens + m->B * m->T; t++) {
        size_t row = (size_t)*t - wte->row; // below 0 it is very large
        *t = row < wte->slice_rows ? (int32_t)row : -1;
    }
    device_copy_in(m->tokens, m->host_tokens, m->B * m->T * sizeof(int32_t));
    device_copy_in(m->targets, m->host_targets, m->B * m->T * sizeof(int32_t));
}

// Row b of a micro-batch is this sequence of the global batch: i goes to micro-batch i / (B · DP), there to the ranks of dp
// i / B mod DP, row i mod B.
static uint64_t sequence_of(const Model *m, long micro, size_t b) {
    const Config *c = &m->config;
    return ((uint64_t)micro * (uint64_t)c->dp + (uint64_t)(m->grid.dp->rank / c->cp)) * m->B + b;
}

static void load_micro_batch(Model *m, long step, long micro) {
    const Config *c = &m->config;
    for (size_t b = 0; b < m->B; b++) {
        uint64_t i = sequence_of(m, micro, b);
        data_train_sequence(train_data, (uint64_t)step * (uint64_t)c->global_batch + i, (int)c->vocab,
                            m->window);
        set_row(m, b, m->window);
    }
    send_rows(m);
}

static double learning_rate(const Config *c, long step) {
    if (step < c->warmup) return c->lr * (double)(step + 1) / (double)c->warmup;
    if (step >= c->steps) return c->min_lr;
    double progress = (double)(step - c->warmup) / (double)(c->steps - c->warmup);
    return c->min_lr + 0.5 * (c->lr - c->min_lr) * (1 + cos(M_PI * progress));
}

static volatile sig_atomic_t stop_signal; // SIGUSR1 or SIGTERM: finish the step, save, end

static void on_signal(int signal_number) {
    stop_signal = signal_number;
}

typedef struct {
    double loss, grad_norm; // of the global batch; the norm before clipping
    bool stop;              // some rank was told to end
} StepResult;

// Says where a number that is none came from: the rank that first had one in a gradient of its own, and the parameter.
static _Noreturn void fail_not_finite(Model *m, long step, StepResult r) {
    Comm *world = m->grid.world;
    int param = m->not_finite.param;
    double place = INFINITY; // in the order of micro-batches, then of a backward, then of ranks
    if (param >= 0)
        place =
            ((double)m->not_finite.micro * m->n_params + (m->n_params - 1 - param)) * world->size + world->rank;
    double first = -comm_max(world, -place);
    if (isinf(first))
        fail_all(EXIT_RUNTIME,
                 "step %ld: the loss is %g, the gradient's norm %g, while each rank's own gradient is finite; "
                 "nothing is saved",
                 step, r.loss, r.grad_norm);
    param = m->n_params - 1 - (int)fmod(floor(first / world->size), m->n_params);
    fail_all(EXIT_RUNTIME,
             "step %ld: the loss is %g, the gradient's norm %g; it began on rank %d, in the gradient of %s; "
             "nothing is saved",
             step, r.loss, r.grad_norm, (int)fmod(first, world->size), m->param[param].name);
}

// Brings a micro-batch's tokens and targets: of this step, or of whatever `of` says.
typedef void Load(Model *m, long of, long micro);

// The embedding needs tokens, in F and I, the head targets, in F. A rank has one micro-batch of them at a time.
static void need_micro_batch(Model *m, const Action *a, Load *load, long of) {
    const Chunk *k = &m->chunk[a->chunk];
    bool first = k->first_unit == 0, last = k->last_unit == m->n_units - 1;
    if (m->loaded == a->micro || !((first && a->pass != PASS_W) || (last && a->pass == PASS_F))) return;
    load(m, of, a->micro);
    m->loaded = a->micro;
}

// As the trace calls it: "forward", or of several chunks "forward of chunk 1".
static const char *action_name(const Model *m, const Action *a) {
    static const char *const pass[] = {"forward", "input gradients", "weight gradients", "backward"};
    static char name[PASS_B + 1][MOST_CHUNKS][32];
    if (m->config.virtual_stages == 1) return pass[a->pass];
    char *text = name[a->pass][a->chunk];
    if (!text[0]) snprintf(text, sizeof name[0][0], "%s of chunk %d", pass[a->pass], a->chunk);
    return text;
}

// Runs this rank's list of a plan: F B F B …, where one rank trains. Returns the sum of the losses of its rows.
static double run_plan(Model *m, const Plan *plan, Load *load, long of, float dloss) {
    const RankPlan *mine = &plan->rank[m->pp_rank];
    double loss = 0;
    m->loaded = -1;
    pp_start(m, plan);
    for (const Action *a = mine->action; a < mine->action + mine->n; a++) {
        need_micro_batch(m, a, load, of);
        m->first_sequence = sequence_of(m, a->micro, 0);
        Moment began = trace_begin();
        switch (a->pass) {
        case PASS_F:
            loss += chunk_forward(m, a, dloss);
            break;
        case PASS_I:
        case PASS_W:
        case PASS_B:
            dp_find_not_finite(m);
            chunk_backward(m, a);
        }
        if (plan->forward_only) forget_activations();
        trace_end("compute", action_name(m, a), a->micro, began, 0);
    }
    return loss;
}

static StepResult train_step(Model *m, long step) {
    const Config *c = &m->config;
    double tokens = (double)c->global_batch * (double)c->seq;
    enum { LOSS, STOP, SUMS };
    moe_begin_step(m);
    double sums[SUMS] = {run_plan(m, m->plan, load_micro_batch, step, (float)(1 / tokens)), stop_signal != 0};

    moe_end_step(m);
    tp_sum_gradients(m);
    pp_sum_gradients(m);
    double norm = dp_grad_norm(m);
    if (m->grid.tp->rank > 0) sums[LOSS] = 0; // it is the same on all tp ranks
    comm_wait(comm_host_all_reduce(m->grid.world, sums, SUMS, DTYPE_F64));

    StepResult r = {.loss = sums[LOSS] / tokens, .grad_norm = norm, .stop = sums[STOP] > 0};
    if (!isfinite(r.loss) || !isfinite(r.grad_norm)) fail_not_finite(m, step + 1, r);
    Moment optimizer = trace_begin();
    dp_optimizer_step(m, r.grad_norm, (OptimizerStep){.lr = (float)learning_rate(c, step), .step = step + 1});
    trace_end("compute", "optimizer", step + 1, optimizer, 0);
    return r;
}

// =====================================================================================================================
// Evaluation and sampling: F alone; nothing of the training state changes, and their FLOPs are not counted
// =====================================================================================================================

// Rows beyond the end of the n windows have no targets.
static void load_validation(Model *m, long n, long micro) {
    for (size_t b = 0; b < m->B; b++) {
        uint64_t w = sequence_of(m, micro, b);
        data_window(val_data, w < (uint64_t)n ? w : 0, (int)m->config.vocab, m->window);
        set_row(m, b, m->window);
        if (w >= (uint64_t)n) memset(m->host_targets + b * m->T, 0xff, m->T * sizeof(int32_t));
    }
    send_rows(m);
}

// Sums of losses: whoever has the head has them, all tp ranks alike.
static double sum_of_losses(const Model *m, double mine) {
    return comm_sum(m->grid.world, m->grid.tp->rank == 0 ? mine : 0);
}

// Mean loss over the first --eval-batches global batches of the validation set, or all of it where that is less.
static double evaluate(Model *m) {
    const Config *c = &m->config;
    uint64_t n = data_windows(val_data), most = (uint64_t)c->eval_batches * (uint64_t)c->global_batch;
    if (n > most) n = most;
    long at_once = c->dp * c->micro_batch;
    Plan *plan = pp_plan(c, ((long)n + at_once - 1) / at_once, true, UNIT_COSTS);
    KernelFlops trained = kernel_flops;
    double pairs = m->ring.pairs, sum = run_plan(m, plan, load_validation, (long)n, 0);
    kernel_flops = trained;
    m->ring.pairs = pairs;
    pp_free(plan);
    return sum_of_losses(m, sum) / ((double)n * (double)c->seq);
}

// Draws from softmax(logits) with u in (0, 1).
static int32_t draw(const floatX *logits, long V, double u) {
    float most = -INFINITY;
    double total = 0, seen = 0;
    for (long i = 0; i < V; i++) most = fmaxf(most, to_float(logits[i]));
    for (long i = 0; i < V; i++) total += exp(to_float(logits[i]) - most);
    for (long i = 0; i < V; i++) {
        seen += exp(to_float(logits[i]) - most);
        if (seen >= u * total) return (int32_t)i;
    }
    return (int32_t)V - 1;
}

static void load_sample(Model *m, long of, long micro) {
    (void)of, (void)micro;
    set_row(m, 0, m->window);
    memset(m->host_targets, 0xff, m->T * sizeof(int32_t));
    send_rows(m);
}

// The next token, from the logits after the last of those seen. Where these are, every rank draws the same.
static int32_t next_token(Model *m, size_t seen, floatX *logits, double u) {
    const Param *wte = &m->param[0]; // the columns of the logits are its rows
    size_t V = (size_t)m->config.vocab;
    int32_t token = 0;
    size_t last = 0;
    while (last < m->T && (size_t)m->host_positions[last] != seen - 1) last++;
    if (m->chunk_of[m->n_units - 1] >= 0 && last < m->T) {
        device_copy_out(logits + wte->row, m->head[0].logits + last * (size_t)m->config.padded_vocab,
                        wte->slice_rows * sizeof(floatX));
        comm_wait(comm_host_all_gather(m->grid.tp, logits, logits + wte->row, V, FLOAT_X));
        token = draw(logits, (long)V, u);
    }
    return (int32_t)comm_sum(m->grid.cp, comm_sum(m->grid.pp, token));
}

// Writes `count` tokens of the model's own, each drawn from the distribution after the last --seq.
static void sample(Model *m, long count, long step) {
    const Config *c = &m->config;
    size_t B = m->B, T = m->T, V = (size_t)c->vocab, most = (size_t)c->seq;
    bool text = V == 256;
    int32_t *token = host_alloc((size_t)count + 1, sizeof(int32_t));
    floatX *logits = host_alloc(V, sizeof(floatX));
    char *out = host_alloc((size_t)count + 1, 12);
    size_t length = 0;
    token[0] = text ? '\n' : (int32_t)V - 1; // a text starts a line; GPT-2's last token is its end of text
    KernelFlops trained = kernel_flops;
    double pairs = m->ring.pairs;
    Plan *plan = pp_plan(c, 1, true, UNIT_COSTS);
    m->B = 1;
    // All ranks go on or none: at ZeRO-3 a forward takes all of them.
    long i = 1;
    for (; i <= count && comm_all_true(m->grid.world, !stop_signal); i++) {
        size_t seen = (size_t)i < most ? (size_t)i : most, here = cp_local_tokens(c, seen);
        if (here != m->T) set_positions(m, here);
        memset(m->window, 0, (most + 1) * sizeof(int32_t)); // no token sees those behind it
        memcpy(m->window, token + i - (long)seen, seen * sizeof(int32_t));
        run_plan(m, plan, load_sample, 0, 0);
        uint64_t stream = random_stream((uint64_t)c->seed, "sample") ^ (uint64_t)step;
        token[i] = next_token(m, seen, logits, random_uniform(stream, (uint64_t)i));
        bool printable = (token[i] >= 32 && token[i] < 127) || token[i] == '\n' || token[i] == '\t';
        length += (size_t)(text ? sprintf(out + length, "%c", printable ? token[i] : '?')
                                : sprintf(out + length, "%d ", token[i]));
    }
    const char *cut = i <= count ? ", asked to end" : "";
    say("sample of %ld %s after step %ld%s:\n%s", i - 1, text ? "bytes" : "tokens", step, cut, out);
    m->B = B;
    set_positions(m, T);
    kernel_flops = trained;
    m->ring.pairs = pairs;
    pp_free(plan);
    free(token);
    free(logits);
    free(out);
}

// =====================================================================================================================
// main
// =====================================================================================================================

// Predicts by reserving in a ledger alone, and refuses what the machine cannot hold. Workspaces are those of this process's
// threads: a dry run of many ranks on few cores counts a little more than each of them will take.
static Ledger predict(Model *m) {
    bool lazy = m->config.lazy_optimizer;
    size_t before = ledger.total; // context and libraries
    device_dry_run(true);
    m->config.lazy_optimizer = false;
    model_reserve(m);
    m->config.lazy_optimizer = lazy;
    Ledger predicted = ledger;
    device_dry_run(false);
    free(m->acts), free(m->rebuilt), free(m->dout), free(m->head); // they point to nothing
    if (m->config.dry_run || m->config.explain) return predicted;  // of a machine that need not be this one
    // The least that any rank finds free, so that all decide alike. With --lazy-optimizer the moments are not counted: that run
    // is to fail where it asks for them, after its first backward.
    size_t available = (size_t)-comm_max(m->grid.world, -(double)device_free_memory());
    size_t needed = (size_t)comm_max(
        m->grid.world, (double)(predicted.total_peak - before - (lazy ? predicted.peak[MEM_OPTIMIZER] : 0)));
    if (needed > available) {
        report_memory(&predicted, NULL);
        fail_all(EXIT_USAGE, "a rank needs %.3f GB, %.3f GB are free; smaller: %s", (double)needed * 1e-9,
                 (double)available * 1e-9, report_smaller(m));
    }
    return predicted;
}

// Answers for each place in the pipeline; in the end m is laid out for the one that needs the most memory.
static void dry_run(Model *m) {
    int largest = 0;
    if (!m->config.json) say_without_effect(&m->config);
    Place *place = host_alloc((size_t)m->config.pp, sizeof *place);
    for (int r = 0; r < m->config.pp; r++) {
        m->pp_rank = r;
        model_layout(m);
        place[r] = report_place(m, predict(m));
        if (place[r].memory.total_peak > place[largest].memory.total_peak) largest = r;
    }
    m->pp_rank = largest;
    model_layout(m);
    predict(m);
    report_dry_run(m, place);
    free(place);
}

// This rank's device, taken before MPI starts; what it cannot do is refused.
static void open_device(Config *c) {
    device_open(launch_local_rank());
    bool gpu = device_count() > 0;
    if (c->comm == NOT_GIVEN) c->comm = gpu ? TRANSPORT_NCCL : TRANSPORT_MPI;
    if (c->comm == TRANSPORT_NCCL && !gpu)
        fail_all(EXIT_USAGE, "--comm nccl: this build computes on the CPU; nearest: mpi");
    if (c->fp8 != FP8_NONE && !device_has_fp8())
        fail_all(EXIT_USAGE, "--fp8 %s: %s has no fp8 (sm_89 and newer have); nearest: leave the flag out",
                 flag_choice(FP8_RECIPES, c->fp8), device_name());
}

// Which ranks use one GPU, counted by its number: a launcher may show each of them another one. NCCL wants one a rank.
static void share_device(Config *c, Comm *world) {
    if (device_count() == 0) {
        device_share(comm_host().local_size);
        return;
    }
    size_t n = (size_t)world->size;
    uint64_t *id = host_alloc(n, sizeof *id), mine = device_id();
    comm_wait(comm_host_all_gather(world, id, &mine, n, DTYPE_I64));
    int most = 0, here = 0;
    for (size_t r = 0; r < n; r++) {
        int alike = 0;
        for (size_t other = 0; other < n; other++) alike += id[other] == id[r];
        if (alike > most) most = alike;
        if (id[r] == mine) here = alike;
    }
    free(id);
    // Has a host fewer GPUs than ranks?
    bool crowded = comm_max(world, comm_host().local_size > device_count()) > 0;
    if (c->comm == TRANSPORT_NCCL && most > 1) {
        // Enough GPUs, and yet one taken twice: the launcher has not told ranks which of the host they are.
        if (flag_given(&config.comm) || !crowded)
            fail_all(EXIT_USAGE, "--comm nccl: %d ranks share a GPU, and NCCL takes one each; nearest: mpi",
                     most);
        say("%d ranks share a GPU: their messages go through the host (--comm mpi)", most);
        c->comm = TRANSPORT_MPI;
    }
    device_share(here);
}

// What a GPU has come to hold beyond the ledger since the last call is what it is for: its context at first, NCCL once
// groups are connected, other libraries' and kernels' code after the first step, and what is left nobody knows.
static void enter_rest(Comm *world, MemCategory category) {
    if (device_count() == 0) return;
    device_synchronize();
    comm_wait(comm_barrier(world));
    device_enter_rest(category);
    comm_wait(comm_barrier(world));
}

// rank = ((pp · DP + dp) · CP + cp) · TP + tp (a dry run is rank 0).
static void make_grid(const Config *c, Grid *g) {
    int tp = (int)c->tp, cp = (int)c->cp, in_stage = (int)c->dp_cp * tp, rank = g->world->rank;
    int holders = c->tp > c->kv_heads ? tp / (int)c->kv_heads : 1;
    g->pp = comm_split(g->world, rank % in_stage, rank, "pp");
    g->dp = comm_split(g->world, rank / in_stage * tp + rank % tp, rank, "dp");
    g->cp = comm_ring(g->world, rank / (cp * tp) * tp + rank % tp, rank, "cp");
    g->tp = comm_split(g->world, rank / tp, rank, "tp");
    int ep = (int)c->ep, inner = cp * tp, dp = rank / inner; // of the world: pp · DP + dp
    int replicas = (rank / in_stage * ep + dp % ep) * tp + rank % tp,
        sequence = c->sp ? dp : dp * tp + rank % tp;
    bool aux =
        c->experts > 0 && c->balance == BALANCE_AUX; // a group that has nothing to say is each rank alone
    g->ep = comm_mesh(g->world, dp / ep * inner + rank % inner, rank, "ep");
    g->replicas = comm_split(g->world, c->experts ? replicas : rank, rank, "replicas");
    g->sequence = comm_split(g->world, aux ? sequence : rank, rank, "sequence");
    g->kv = comm_split(g->world, rank / holders, rank, "kv");
    bool end = pp_ties(c) && (g->pp->rank == 0 || g->pp->rank == g->pp->size - 1);
    g->tied = comm_split(g->world, end ? rank % in_stage : in_stage + rank, rank, "tied"); // others: each alone
    double host = comm_host().host;
    bool crosses = comm_max(g->tp, host) != -comm_max(g->tp, -host);
    if (comm_max(g->world, crosses) > 0)
        say("warning: --tp %d: a group crosses hosts, and each block waits for its messages; best is one host",
            tp);
}

int main(int argc, char **argv) {
    struct sigaction on_stop = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &on_stop, NULL);
    sigaction(SIGTERM, &on_stop, NULL);
    signal(SIGXFSZ, SIG_IGN); // a file-size limit is an error of the write, and is reported as one
    signal(SIGPIPE, SIG_IGN); // a reader of the output that goes away ends no training
    char checkpoint[PATH_MAX - 32] = "";
    long first_step = configure(argc, argv, checkpoint, sizeof checkpoint);
    bool trains = !config.dry_run && !config.explain;
    if (!trains) signal(SIGUSR1, SIG_DFL), signal(SIGTERM, SIG_DFL); // there is nothing to save
    if (trains && config.ranks != NOT_GIVEN) launch_ranks((int)config.ranks, argc, argv, &stop_signal);
    int threads = launch_threads();
    if (trains) open_device(&config);
    Comm *world = comm_init(&argc, &argv);
    watchdog_start(world, config.timeout);
    matmul_inputs_bf16 = config.matmul == MATMUL_BF16 && sizeof(floatX) == 4;

    Model m = {
        .config = config, .grid = {.world = world}, .data = train_data ? data_fingerprint(train_data) : 0};
    Config *c = &m.config;
    m.bf16_products = sizeof(floatX) == 2 || matmul_inputs_bf16 || c->fp8 != FP8_NONE;
    Ledger predicted = {0};
    report_out_of_memory(&m, &predicted);
    if (trains) {
        share_device(c, world);
        enter_rest(world, MEM_CONTEXT);
        comm_use((Transport)c->comm);
    }
    make_grid(c, &m.grid);
    m.pp_rank = m.grid.pp->rank;
    if (trains) pp_connect(&m);
    if (trains) enter_rest(world, MEM_LIBRARIES);
    m.plan = pp_plan(c, c->accum, false, UNIT_COSTS);
    model_layout(&m);
    m.block = host_alloc((size_t)c->layers, sizeof *m.block);
    m.d_block = host_alloc((size_t)c->layers, sizeof *m.d_block);
    predicted = predict(&m);
    if (c->explain) report_explain(&m);
    if (c->dry_run) dry_run(&m);
    if (!trains) {
        watchdog_stop();
        comm_finalize();
        return 0;
    }
    say_without_effect(c);
    if (c->save) checkpoint_lock(world, c->save);
    if (c->save && checkpoint_newest(c->save) > first_step)
        say("note: %s already holds step %ld of an earlier run, which a later --resume will take for the "
            "newest",
            c->save, checkpoint_newest(c->save));
    log_open(c->log, c->resume); // after the lock: a run that is refused must not touch another's log

    trace_open(world, c->trace);
    model_reserve(&m);
    m.host_tokens = host_alloc(m.B * m.T, sizeof(int32_t));
    m.host_targets = host_alloc(m.B * m.T, sizeof(int32_t));
    m.host_losses = host_alloc(m.B * m.T, sizeof(float));
    m.window = host_alloc((size_t)c->seq + 1, sizeof(int32_t));
    m.host_positions = host_alloc(m.T, sizeof(int32_t));
    set_positions(&m, m.T);
    if (c->resume)
        state_resume(&m, checkpoint);
    else if (c->init)
        state_load_weights(&m, c->init);
    else
        state_init(&m);

    enter_rest(world, MEM_UNACCOUNTED);

    double rate_before = c->peak_tflops > 0 ? c->peak_tflops * 1e12 * world->size
                                            : comm_sum(world, device_peak_flops(threads, m.bf16_products));
    report_start(&m, &predicted, threads, rate_before);
    if (!val_data) say("no evaluation: no --val, and no text long enough to hold out its last tenth");

    StepResult r = {0};
    long step = first_step;
    bool saved = true;
    while (step < c->steps && !r.stop) {
        double start = seconds_now();
        r = train_step(&m, step);
        device_synchronize();
        step++;
        report_step(&m,
                    (StepReport){step, r.loss, r.grad_norm, learning_rate(c, step - 1), seconds_now() - start},
                    rate_before);
        bool last = step == c->steps;
        if (step == first_step + 1) enter_rest(world, MEM_LIBRARIES); // loaded where they were first called
        if (c->check_replicas && step % c->check_replicas == 0) state_check_replicas(&m, step);
        if (c->save && (last || r.stop || (c->save_every && step % c->save_every == 0)))
            saved = state_save(&m, step);
        if (!saved) comm_abort(EXIT_RUNTIME); // checkpoint_save has said why
        if (val_data && !r.stop && (last || (c->eval_every && step % c->eval_every == 0)))
            report_validation(step, evaluate(&m));
    }
    if (c->check_replicas && has_replicas(c) && step / c->check_replicas > first_step / c->check_replicas)
        say("all copies of every weight are alike, bit by bit, at every step that --check-replicas looked at");
    if (r.stop) say("asked to end at step %ld%s", step, c->save ? ", saved" : "; nothing saved without --save");
    if (c->sample && !r.stop) sample(&m, c->sample, step);

    for (int i = 0; i < m.n_buckets; i++)
        comm_wait(m.bucket[i].gather); // the last step's, which no forward has awaited
    enter_rest(world, MEM_UNACCOUNTED);
    double rate_after =
        c->peak_tflops > 0 ? rate_before : comm_sum(world, device_peak_flops(threads, m.bf16_products));
    report_end(&m, &predicted, r.loss, rate_before, rate_after);
    trace_close(world);
    log_close();
    checkpoint_unlock();
    watchdog_stop();
    comm_finalize();
    return 0;
}

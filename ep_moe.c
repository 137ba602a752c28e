// Mixture of experts: in place of one MLP a block has E of them, the *experts*, and a router sends each token to the k that suit it
// best. So parameters grow with E, and work with k. Expert parallelism (--ep) has ep data-parallel neighbours share the experts:
// each holds E/ep of every block's, and tokens travel to them.
//
//     route       scores = softmax or sigmoid(h2 · router), fp32; the k best of E; gates = their scores, for k > 1 divided by
//                 their sum. No capacity, nothing is dropped.
//     dispatch    copies sorted by expert; all-to-all to the experts' ranks. How many come is told first.
//     experts     the rows of each side by side: two products for all of them in one call (grouped_gemm), the MLP's function between
//     combine     all-to-all home; a token's sum of the k outputs, each weighed by its gate
//
// With ep = 2, k = 1 and experts A, B on rank 0, C, D on rank 1:
//
//     rank 0   tokens 0 1 2 3  ->  A A C D  ─┐ ┌─>  A A│A  B      rows of A, then of B; in each, rank 0's first
//                                            ├─┤
//     rank 1   tokens 4 5 6 7  ->  A B C C  ─┘ └─>  C│C C  D
//
// Backward is the way back: gate · dy goes to the experts, their input's gradients come home and are added up; a gate's own
// gradient is dy · (what came back), so outputs are kept where they are summed. The choice has no gradient. Where a forward is done
// again (--recompute full), the route is the one that was kept.
//
// Shared experts are an MLP that all tokens go through, and runs while the copies are on their way. Under --tp each expert is cut
// like any MLP, and all ranks of tp send all their rows: what comes home is a term of the sum that tp_exit makes. The router is
// not cut; with --sp each rank routes its own rows, and tells the others.
//
// A rank's experts see the tokens of all ep ranks, so their gradient is summed over fewer: the dp/ep · cp *replicas* that hold
// the same experts, at the scale of the global batch; ZeRO shards them over these (dp_zero.c).
//
// What keeps the load even, for a router that sends all to a few makes them better and is right to go on:
//     --balance aux     a loss for each sequence, ALPHA · E · Σ_e f_e · P_e: f_e the share of its copies that e was chosen for, P_e the
//                       mean of its score. Both are sums over all ranks that have a part of the sequence.
//     --balance bias    no loss: a bias joins the score for the choice alone, and after each step moves by GAMMA towards those
//                       that got fewer tokens of the global batch than the mean
// --route-nodes M: a token goes to experts of at most M groups (one a host, say), so that it crosses to few hosts.
//
// Cost, a layer and micro-batch of N tokens here: four all-to-alls (dispatch and combine, forward and backward) of N·k·C elements,
// (1 − 1/ep) of them to other ranks where routing is even; six with --recompute full. The router's 6·N·C·E operations, and
// N·k·(2·C + U + F) elements kept. Which ranks get how many rows only routing knows: memory for them is taken for an even load,
// and grows, entered in the ledger, when more come: at worst ep·N·min(k, E/ep).
//
// Shazeer et al. 2017, "Outrageously Large Neural Networks"; Lepikhin et al. 2020, "GShard" (ep); Fedus et al. 2021, "Switch
// Transformers" (aux); DeepSeek-AI 2024, "DeepSeek-V3", §2.1.2 (bias, shared experts, node-limited).
#include "train.h"
#include "runtime/device.h"
#include <math.h>
#include <stdlib.h>

#define ALPHA 0.01  // of the balance loss, beside the tokens' (Switch Transformers)
#define GAMMA 0.001 // by which a bias moves in a step (DeepSeek-V3)

// Sizes, as this file uses them: rows here and of all tp ranks, the experts of a rank, an expert's F and U; and the first of this
// rank's rows.
typedef struct {
    size_t N, R, first, C, E, k, own, F, U;
} Size;

static Size size_of(const Model *m) {
    const Config *c = &m->config;
    size_t N = m->B * m->T, R = c->sp ? N / (size_t)c->tp : N, F = (size_t)(c->expert_ffn / c->tp);
    return (Size){.N = N,
                  .R = R,
                  .first = c->sp ? R * (size_t)m->grid.tp->rank : 0,
                  .C = (size_t)c->hidden,
                  .E = (size_t)c->experts,
                  .k = (size_t)c->topk,
                  .own = (size_t)(c->experts / c->ep),
                  .F = F,
                  .U = c->arch == ARCH_LLAMA ? 2 * F : F};
}

static MoeRouting routing(const Config *c) {
    return (MoeRouting){.experts = (size_t)c->experts,
                        .topk = (size_t)c->topk,
                        .sigmoid = c->balance == BALANCE_BIAS,
                        .groups = (size_t)c->route_groups,
                        .group_limit = (size_t)c->route_nodes};
}

// Experts of block l lie one behind the other in their bucket.
static Groups groups(const Model *m, long l, const Route *r) {
    size_t own = size_of(m).own;
    return (Groups){r->rows, own, m->bucket[m->experts_bucket_of[l + 1]].count / own};
}

// ---- memory --------------------------------------------------------------------------------------------------------------

// Room for so many rows. What was there is lost.
static void grow(Growing *g, size_t rows, size_t width, MemCategory category) {
    if (rows <= g->rows) return;
    if (g->x) {
        device_free(category, g->x, g->rows * width * sizeof(floatX));
        rows += rows / 8; // the next step may bring a few more
    }
    g->x = device_alloc(category, rows * width * sizeof(floatX));
    g->rows = rows;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t workspace(const Model *m, size_t M) {
    Size s = size_of(m);
    return larger(larger(linear_workspace_grouped(m, M, s.C, s.U), linear_workspace_grouped(m, M, s.F, s.C)),
                  moe_router_workspace(s.R, s.C, s.E));
}

// What lives within an F or I, for M rows; and the workspace that products of so many take.
static void reserve_rows(Model *m, size_t M) {
    Size s = size_of(m);
    size_t bytes = workspace(m, M);
    grow(&m->experts.rows, M, s.C, MEM_WORKSPACE);
    grow(&m->experts.act, M, s.F, MEM_WORKSPACE);
    if (bytes <= m->workspace_bytes) return;
    if (m->workspace) device_free(MEM_WORKSPACE, m->workspace, m->workspace_bytes);
    m->workspace = device_alloc(MEM_WORKSPACE, m->workspace_bytes = bytes);
}

void moe_reserve(Model *m) {
    const Config *c = &m->config;
    Experts *x = &m->experts;
    Size s = size_of(m);
    size_t L = (size_t)c->layers;
    *x = (Experts){0};
    if (expert_blocks(c) == 0) return;
    x->sorted = device_alloc(MEM_COMMUNICATION, s.N * s.k * s.C * sizeof(floatX));
    ledger_live(MEM_COMMUNICATION, (ptrdiff_t)(s.N * s.k * s.C * sizeof(floatX)));
    reserve_rows(m, s.N * s.k);
    x->margin = device_alloc(MEM_WORKSPACE, s.R * sizeof(float));
    x->dgate = device_alloc(MEM_WORKSPACE, s.N * s.k * sizeof(float));
    x->count = device_alloc(MEM_WORKSPACE, s.E * sizeof(int32_t));
    x->host_count = host_alloc(s.E, sizeof(int32_t));
    x->all_counts = host_alloc((size_t)c->ep * s.E, sizeof(int32_t));
    x->seen = device_alloc(MEM_WORKSPACE, L * (s.E + 3) * sizeof(uint64_t));
    x->least = device_alloc(MEM_WORKSPACE, L * sizeof(float));
    x->balance_loss = device_alloc(MEM_WORKSPACE, sizeof(double));
    x->bias = device_alloc(MEM_WORKSPACE, L * s.E * sizeof(float));
    x->host_bias = host_alloc(L * s.E, sizeof(float));
    x->step = host_alloc(1, sizeof(RouterStep));
    x->step->tokens = host_alloc(L * s.E, sizeof(double));
}

Route *moe_reserve_route(const Model *m) {
    const Config *c = &m->config;
    Size s = size_of(m);
    Route *r = host_alloc(1, sizeof *r);
    r->scores = device_alloc(MEM_ACTIVATIONS, s.R * s.E * sizeof(float));
    r->index = device_alloc(MEM_ACTIVATIONS, s.N * s.k * sizeof(int32_t));
    r->place = device_alloc(MEM_ACTIVATIONS, s.N * s.k * sizeof(int32_t));
    r->gate = device_alloc(MEM_ACTIVATIONS, s.N * s.k * sizeof(float));
    if (c->balance == BALANCE_AUX) r->chosen = device_alloc(MEM_ACTIVATIONS, 2 * m->B * s.E * sizeof(float));
    r->sent = host_alloc(s.E, sizeof *r->sent);
    r->received = host_alloc(s.E, sizeof *r->received);
    r->rows = host_alloc(s.own, sizeof *r->rows);
    return r;
}

ExpertActivations *moe_reserve_activations(const Model *m) {
    Size s = size_of(m);
    ExpertActivations *a = host_alloc(1, sizeof *a);
    grow(&a->x, s.N * s.k, s.C, MEM_ACTIVATIONS);
    grow(&a->up, s.N * s.k, s.U, MEM_ACTIVATIONS);
    grow(&a->act, s.N * s.k, s.F, MEM_ACTIVATIONS);
    a->back = device_alloc(MEM_ACTIVATIONS, s.N * s.k * s.C * sizeof(floatX));
    return a;
}

ExpertGrads *moe_reserve_gradients(const Model *m) {
    Size s = size_of(m);
    ExpertGrads *d = host_alloc(1, sizeof *d);
    grow(&d->out, s.N * s.k, s.C, MEM_DOUT);
    grow(&d->up, s.N * s.k, s.U, MEM_DOUT);
    d->logits = device_alloc(MEM_DOUT, s.R * s.E * sizeof(float));
    return d;
}

ExpertBytes moe_bytes(const Model *m, size_t M) {
    Size s = size_of(m);
    size_t sums = m->config.balance == BALANCE_AUX ? 2 * m->B * s.E : 0;
    return (ExpertBytes){.route =
                             (s.R * s.E + s.N * s.k + sums) * sizeof(float) + 2 * s.N * s.k * sizeof(int32_t),
                         .activations = (M * (s.C + s.U + s.F) + s.N * s.k * s.C) * sizeof(floatX),
                         .gradients = M * (s.C + s.U) * sizeof(floatX) + s.R * s.E * sizeof(float)};
}

// ---- who goes where ----------------------------------------------------------------------------------------------------------

// The weight of Σ chosen · Σ scores in the gradient's loss: f_e = chosen / (k·T), P_e = Σ scores / T, and the mean over sequences.
static double balance_factor(const Config *c) {
    double T = (double)c->seq;
    return ALPHA * (double)c->experts / ((double)c->topk * T * T * (double)c->global_batch);
}

// Copies by rank and expert, of all ranks of ep: what leaves this one and what comes, and where it stands.
static void lay_out(const Model *m, Route *r) {
    Size s = size_of(m);
    size_t me = (size_t)m->grid.ep->rank, ep = (size_t)m->config.ep, first = 0;
    const int32_t *count = m->experts.all_counts;
    for (size_t e = 0; e < s.E; e++) {
        r->sent[e] = (CommRows){first, (size_t)count[me * s.E + e]};
        first += r->sent[e].rows;
    }
    r->M = 0;
    for (size_t i = 0; i < s.own; i++) {
        size_t begin = r->M;
        for (size_t p = 0; p < ep; p++) {
            CommRows *rows = &r->received[p * s.own + i];
            *rows = (CommRows){r->M, (size_t)count[p * s.E + me * s.own + i]};
            r->M += rows->rows;
        }
        r->rows[i] = r->M - begin;
    }
}

// Copies that leave the rank, and its groups.
static void count_sent(Model *m, const Route *r) {
    Experts *x = &m->experts;
    Size s = size_of(m);
    size_t me = (size_t)m->grid.ep->rank, each = s.E / (size_t)m->config.route_groups;
    size_t first_group = me * s.own / each, last_group = ((me + 1) * s.own - 1) / each;
    for (size_t e = 0; e < s.E; e++) {
        bool mine = e / s.own == me, near = e / each >= first_group && e / each <= last_group;
        size_t from_here = r->sent[me * s.own + e % s.own].rows;
        if (!mine) x->sent += r->sent[e].rows;
        if (!mine) x->all_sent += r->sent[e].rows;
        if (!near) x->sent_groups += r->sent[e].rows;
        if (mine) x->all_received += r->rows[e % s.own] - from_here;
    }
}

void moe_route_tokens(Model *m, long l, Activations a) {
    const Config *c = &m->config;
    Experts *x = &m->experts;
    Route *r = a.route;
    Size s = size_of(m);
    MoeRouting how = routing(c);
    size_t at = (size_t)l * s.E;
    int32_t *index = r->index + s.first * s.k;
    float *gate = r->gate + s.first * s.k;
    Work gates = {0};
    if (x->replays) return;
    moe_router_forward(r->scores, a.h2, m->block[l].router_weight, s.R, s.C, s.E);
    moe_route(r->scores, index, gate, x->margin, c->balance == BALANCE_BIAS ? x->bias + at : NULL, s.R, how);
    if (c->sp) {
        comm_wait(comm_all_gather(m->grid.tp, r->index, index, s.N * s.k, DTYPE_I32));
        gates = under_way(m, comm_all_gather(m->grid.tp, r->gate, gate, s.N * s.k, DTYPE_F32));
    }
    if (x->counts && c->balance == BALANCE_AUX) {
        moe_sequence_sums(r->chosen, index, r->scores, s.first, s.R, m->B, m->T, how);
        x->sums = under_way(m, comm_all_reduce(m->grid.sequence, r->chosen, 2 * m->B * s.E, DTYPE_F32));
    }
    if (x->counts)
        moe_observe(x->seen + (size_t)l * (s.E + 3), x->least + l, index, x->margin, m->positions, (uint64_t)l,
                    m->first_sequence, s.first, s.R, m->T, how);
    moe_sort(r->place, x->count, r->index, s.N * s.k, s.E);
    device_copy_out(x->host_count, x->count, s.E * sizeof(int32_t));
    comm_wait(comm_host_all_gather(m->grid.ep, x->all_counts, x->host_count, (size_t)c->ep * s.E, DTYPE_I32));
    comm_wait(gates);
    lay_out(m, r);
    if (x->counts) count_sent(m, r);
    // The ledger has an even load's until now.
    ledger_live(MEM_ACTIVATIONS,
                (ptrdiff_t)moe_bytes(m, r->M).activations - (ptrdiff_t)moe_bytes(m, s.N * s.k).activations);
}

// To the experts, or home: sorted rows and the rows of experts change places.
static Work to_experts(const Model *m, const Route *r, floatX *rows, const floatX *sorted) {
    Size s = size_of(m);
    return under_way(m,
                     comm_all_to_all(m->grid.ep, rows, r->received, sorted, r->sent, (int)s.own, s.C, FLOAT_X));
}

static void home(const Model *m, const Route *r, floatX *sorted, const floatX *rows) {
    Size s = size_of(m);
    comm_wait(comm_all_to_all(m->grid.ep, sorted, r->sent, rows, r->received, (int)s.own, s.C, FLOAT_X));
}

// ---- F -----------------------------------------------------------------------------------------------------------------------

Work moe_send(Model *m, Activations a, const floatX *h) {
    Size s = size_of(m);
    ExpertActivations *x = a.experts;
    size_t M = a.route->M;
    reserve_rows(m, M);
    grow(&x->x, M, s.C, MEM_ACTIVATIONS);
    grow(&x->up, M, s.U, MEM_ACTIVATIONS);
    grow(&x->act, M, s.F, MEM_ACTIVATIONS);
    moe_permute(m->experts.sorted, h, NULL, a.route->place, s.N, s.k, s.C);
    return to_experts(m, a.route, x->x.x, m->experts.sorted);
}

void moe_forward(Model *m, long l, Activations a, Work sent, floatX *part, bool add) {
    Size s = size_of(m);
    const Mlp *w = &m->block[l].expert;
    ExpertActivations *x = a.experts;
    Groups g = groups(m, l, a.route);
    floatX *rows = m->experts.rows.x;
    const floatX *down_bias = m->grid.tp->rank == 0 ? w->down_bias : NULL; // once in the sum over tp
    comm_wait(sent);
    if (a.route->M) {
        linear_forward_grouped(m, x->up.x, x->x.x, w->up_weight, w->up_bias, g, s.C, s.U);
        comm_progress();
        m->act_forward(x->act.x, x->up.x, a.route->M, s.F);
        linear_forward_grouped(m, rows, x->act.x, w->down_weight, down_bias, g, s.F, s.C);
    }
    home(m, a.route, x->back, rows);
    moe_combine(part, x->back, a.route->gate, a.route->place, add, s.N, s.k, s.C);
    comm_wait(m->experts.sums);
    m->experts.sums = (Work){0};
    if (m->experts.counts && !m->experts.replays && a.route->chosen && m->grid.sequence->rank == 0)
        moe_balance_loss(m->experts.balance_loss, a.route->chosen, m->B, s.E);
}

// ---- I and W -----------------------------------------------------------------------------------------------------------------

Work moe_send_gradients(Model *m, Activations a, OutputGrads d, const floatX *dy) {
    Size s = size_of(m);
    Experts *x = &m->experts;
    const Route *r = a.route;
    reserve_rows(m, r->M);
    grow(&d.experts->out, r->M, s.C, MEM_DOUT);
    grow(&d.experts->up, r->M, s.U, MEM_DOUT);
    moe_permute(x->sorted, dy, r->gate, r->place, s.N, s.k, s.C);
    Work sent = to_experts(m, r, d.experts->out.x, x->sorted);
    moe_gate_backward(x->dgate, dy, a.experts->back, r->place, s.N, s.k, s.C);
    x->gates = under_way(m, comm_all_reduce(m->grid.tp, x->dgate, s.N * s.k, DTYPE_F32));
    return sent;
}

void moe_backward_input(Model *m, long l, Activations a, OutputGrads d, Work sent, floatX *dh, bool add) {
    Size s = size_of(m);
    Experts *x = &m->experts;
    const Mlp *w = &m->block[l].expert;
    const Route *r = a.route;
    Groups g = groups(m, l, r);
    comm_wait(sent);
    if (r->M) {
        linear_backward_input_grouped(m, x->act.x, d.experts->out.x, w->down_weight, g, s.F, s.C);
        m->act_backward(d.experts->up.x, x->act.x, a.experts->up.x, r->M, s.F);
        comm_progress();
        linear_backward_input_grouped(m, x->rows.x, d.experts->up.x, w->up_weight, g, s.C, s.U);
    }
    home(m, r, x->sorted, x->rows.x);
    moe_combine(dh, x->sorted, NULL, r->place, add, s.N, s.k, s.C);
    comm_wait(x->gates);
    size_t own = s.first * s.k;
    float factor = r->chosen ? (float)balance_factor(&m->config) : 0;
    moe_route_backward(d.experts->logits, x->dgate + own, r->index + own, r->gate + own, r->scores, r->chosen,
                       factor, s.first, s.R, m->T, routing(&m->config));
}

void moe_backward_router(const Model *m, long l, OutputGrads d, floatX *dh2) {
    Size s = size_of(m);
    moe_router_backward_input(dh2, d.experts->logits, m->block[l].router_weight, s.R, s.C, s.E);
}

// gpt2 alone has biases.
static void bias_backward(const Model *m, floatX *dbias, const floatX *dout, Groups g, size_t width) {
    if (!dbias) return;
    for (size_t i = 0; i < g.n; dout += g.rows[i++] * width)
        if (g.rows[i]) matmul_backward_bias(dbias + i * g.stride, dout, g.rows[i], width, m->workspace);
}

void moe_backward_weight(const Model *m, long l, Activations a, OutputGrads d) {
    Size s = size_of(m);
    const Block *dw = &m->d_block[l];
    const ExpertActivations *x = a.experts;
    const ExpertGrads *dx = d.experts;
    Groups g = groups(m, l, a.route);
    linear_backward_weight_grouped(m, dw->expert.down_weight, dx->out.x, x->act.x, g, s.F, s.C);
    comm_progress();
    linear_backward_weight_grouped(m, dw->expert.up_weight, dx->up.x, x->x.x, g, s.C, s.U);
    comm_progress();
    bias_backward(m, dw->expert.down_bias, dx->out.x, g, s.C);
    bias_backward(m, dw->expert.up_bias, dx->up.x, g, s.U);
    moe_router_backward_weight(dw->router_weight, dx->logits, a.h2, s.R, s.C, s.E, m->workspace);
}

// ---- a step -------------------------------------------------------------------------------------------------------

// Sums over all ranks: each token's router is one rank's, but without --sp all ranks of tp do the same.
static void sum_up(Model *m) {
    const Config *c = &m->config;
    Experts *x = &m->experts;
    RouterStep *step = x->step;
    size_t L = (size_t)c->layers, E = (size_t)c->experts, width = E + 3, n = L * width;
    bool mine = c->sp || m->grid.tp->rank == 0;
    enum { SENT, SENT_GROUPS, SUMS };
    uint64_t *sum = host_alloc(n + SUMS, sizeof *sum), most = 0;
    float *least = host_alloc(L, sizeof *least), smallest = INFINITY;
    double loss;
    device_copy_out(sum, x->seen, n * sizeof *sum);
    device_copy_out(least, x->least, L * sizeof *least);
    device_copy_out(&loss, x->balance_loss, sizeof loss);
    for (size_t l = 0; l < L; l++) {
        uint64_t *of = sum + l * width + E, hash = of[0]; // its halves: sums of many must not overflow
        if (of[2] > most) most = of[2];
        smallest = fminf(smallest, least[l]);
        of[0] = hash & UINT32_MAX, of[2] = hash >> 32;
    }
    for (size_t i = 0; i < n && !mine; i++) sum[i] = 0;
    if (m->grid.tp->rank == 0) sum[n + SENT] = x->sent, sum[n + SENT_GROUPS] = x->sent_groups;
    comm_wait(comm_host_all_reduce(m->grid.world, sum, n + SUMS, DTYPE_I64));

    double copies = 0, met = 0;
    step->hash = 0, step->load = 0;
    for (size_t l = 0; l < L; l++) {
        double all = 0, largest = 0;
        for (size_t e = 0; e < E; e++) {
            double tokens = step->tokens[l * E + e] = (double)sum[l * width + e];
            all += tokens, largest = fmax(largest, tokens);
        }
        step->hash += sum[l * width + E] + (sum[l * width + E + 2] << 32);
        met += (double)sum[l * width + E + 1], copies += all;
        if (all > 0) step->load = fmax(step->load, largest * (double)E / all);
    }
    step->groups = met * (double)c->topk / copies;
    step->most_groups = comm_max(m->grid.world, (double)most);
    step->margin = -comm_max(m->grid.world, -(double)smallest);
    step->sent = (double)sum[n + SENT], step->sent_groups = (double)sum[n + SENT_GROUPS];
    step->balance_loss =
        comm_sum(m->grid.world, mine ? loss : 0) * balance_factor(c) / ALPHA / (double)expert_blocks(c);
    free(sum);
    free(least);
}

void moe_begin_step(Model *m) {
    const Config *c = &m->config;
    Experts *x = &m->experts;
    size_t L = (size_t)c->layers, E = (size_t)c->experts;
    if (expert_blocks(c) == 0) return;
    x->counts = true;
    x->sent = x->sent_groups = 0;
    device_zero(x->seen, L * (E + 3) * sizeof *x->seen);
    device_zero(x->balance_loss, sizeof *x->balance_loss);
    rows_fill(x->least, INFINITY, L);
}

void moe_end_step(Model *m) {
    const Config *c = &m->config;
    Experts *x = &m->experts;
    size_t L = (size_t)c->layers, E = (size_t)c->experts;
    if (expert_blocks(c) == 0) return;
    x->counts = false;
    sum_up(m);
    for (size_t l = 0; l < L && c->balance == BALANCE_BIAS; l++) {
        const double *tokens = x->step->tokens + l * E;
        double mean = 0;
        for (size_t e = 0; e < E; e++) mean += tokens[e] / (double)E;
        for (size_t e = 0; e < E; e++)
            x->host_bias[l * E + e] += (float)(GAMMA * ((tokens[e] < mean) - (tokens[e] > mean)));
    }
    if (c->balance == BALANCE_BIAS) device_copy_in(x->bias, x->host_bias, L * E * sizeof(float));
}

// Ring attention by itself, on any number of ranks: each holds its tokens of whole sequences, and what cp_attention_* gives is held
// against the formulas in double precision, written out below, over the whole sequences. On a device by each transport.
//
// All that the ring works in starts as NaN, as do the outputs: what is read before it is written spoils a result.
// With the argument "error": how far bf16 is off on these ranks, and on one.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#undef fail // cmocka's
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/launch.h"
#include "train.h"

static const bool fp32 = sizeof(floatX) == sizeof(float);
static Comm *world;
static struct sigaction before_cmocka; // cmocka's handler takes the place of the emulator's
#include "tests/on_all_ranks.h"

// ---- whole sequences, and the answers ---------------------------------------------------------------------------------

// T tokens in all. Rows [B·T] as the model has them: q, k and v side by side.
typedef struct {
    size_t B, T, H, KV, D;
} Problem;
static size_t width_q(Problem p) {
    return p.H * p.D;
}
static size_t width_row(Problem p) {
    return (p.H + 2 * p.KV) * p.D;
}

typedef struct {
    floatX *qkv, *do_; // [B·T, A+E], [B·T, A]
    double *o, *lse;   // [B·T, A], [B, H, T]
    double *dqkv;      // [B·T, A+E]
} Whole;

static uint64_t seed;
static floatX *random_rows(size_t n) {
    floatX *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = to_floatX((float)(int32_t)(seed >> 32) / 0x1p30f);
    }
    return x;
}

// One head of one sequence.
static void head_reference(Whole w, Problem p, size_t b, size_t h) {
    size_t A = width_q(p), W = width_row(p), D = p.D, kv = h / (p.H / p.KV);
    double scale = 1 / sqrt((double)D), *s = malloc(p.T * sizeof *s);
    const floatX *q = w.qkv + b * p.T * W + h * D, *k = w.qkv + b * p.T * W + A + kv * D, *v = k + p.KV * D;
    const floatX *d_o = w.do_ + b * p.T * A + h * D;
    double *o = w.o + b * p.T * A + h * D, *dq = w.dqkv + (q - w.qkv), *dk = w.dqkv + (k - w.qkv),
           *dv = dk + p.KV * D;
    for (size_t i = 0; i < p.T; i++) {
        double max = -INFINITY, sum = 0, delta = 0;
        for (size_t j = 0; j <= i; j++) {
            s[j] = 0;
            for (size_t d = 0; d < D; d++) s[j] += (double)to_float(q[i * W + d]) * to_float(k[j * W + d]);
            max = fmax(max, s[j] *= scale);
        }
        for (size_t j = 0; j <= i; j++) sum += s[j] = exp(s[j] - max);
        w.lse[(b * p.H + h) * p.T + i] = max + log(sum);
        for (size_t j = 0; j <= i; j++) {
            s[j] /= sum;
            for (size_t d = 0; d < D; d++) o[i * A + d] += s[j] * to_float(v[j * W + d]);
        }
        for (size_t d = 0; d < D; d++) delta += to_float(d_o[i * A + d]) * o[i * A + d];
        for (size_t j = 0; j <= i; j++) {
            double dp = 0;
            for (size_t d = 0; d < D; d++) dp += (double)to_float(d_o[i * A + d]) * to_float(v[j * W + d]);
            double ds = s[j] * (dp - delta) * scale;
            for (size_t d = 0; d < D; d++) {
                dq[i * W + d] += ds * to_float(k[j * W + d]);
                dk[j * W + d] += ds * to_float(q[i * W + d]);
                dv[j * W + d] += s[j] * to_float(d_o[i * A + d]);
            }
        }
    }
    free(s);
}

// The same on all ranks, each of which works out some heads of it.
static Whole whole(Problem p) {
    size_t N = p.B * p.T, A = width_q(p), W = width_row(p);
    seed = N * 1000 + W;
    Whole w = {.qkv = random_rows(N * W), .do_ = random_rows(N * A)};
    w.o = calloc(N * A, sizeof(double)), w.lse = calloc(N * p.H, sizeof(double));
    w.dqkv = calloc(N * W, sizeof(double));
    for (size_t i = 0; i < p.B * p.H; i++)
        if ((int)(i % (size_t)world->size) == world->rank) head_reference(w, p, i / p.H, i % p.H);
    comm_wait(comm_host_all_reduce(world, w.o, N * A, DTYPE_F64));
    comm_wait(comm_host_all_reduce(world, w.lse, N * p.H, DTYPE_F64));
    comm_wait(comm_host_all_reduce(world, w.dqkv, N * W, DTYPE_F64));
    return w;
}
static void whole_free(Whole w) {
    free(w.qkv), free(w.do_), free(w.o), free(w.lse), free(w.dqkv);
}

// ---- this rank's part --------------------------------------------------------------------------------------------------

static void *place(size_t bytes) { // holds NaN
    void *host = malloc(bytes), *device = device_alloc(MEM_WORKSPACE, bytes);
    memset(host, 0xff, bytes);
    device_copy_in(device, host, bytes);
    free(host);
    return device;
}

typedef struct {
    Model m;
    AttentionShape s;
    int32_t *position;
    floatX *qkv, *do_, *o, *dqkv; // in device memory
    float *lse;
} Part;

// The rows [B·t, width] of a rank's tokens.
static floatX *rows_of(const floatX *all, Problem p, const Part *part, size_t width) {
    size_t t = part->s.Tq;
    floatX *x = malloc(p.B * t * width * sizeof *x), *device = place(p.B * t * width * sizeof *x);
    for (size_t i = 0; i < p.B * t; i++)
        memcpy(x + i * width, all + (i / t * p.T + (size_t)part->position[i % t]) * width, width * sizeof *x);
    device_copy_in(device, x, p.B * t * width * sizeof *x);
    free(x);
    return device;
}

static size_t ring_keys(AttentionShape s) {
    return s.B * s.Tk * 2 * s.KV * s.D;
}

static void ring_is_nan(Part *x) {
    Ring *r = &x->m.ring;
    size_t n = ring_keys(x->s), N = x->s.B * x->s.Tq;
    void *memory[] = {r->block[0], r->block[1], r->part[0], r->part[1], r->arrived, r->sum, r->delta};
    size_t bytes[] = {n * sizeof(floatX),    n * sizeof(floatX), n * 4, n * 4, n * 4,
                      N * x->s.q_stride * 4, N * x->s.H * 4};
    for (size_t i = 0; i < LENGTH(memory); i++) {
        void *nan = malloc(bytes[i]);
        memset(nan, 0xff, bytes[i]);
        if (memory[i]) device_copy_in(memory[i], nan, bytes[i]);
        free(nan);
    }
}

static Part part_of(Problem p, Whole w, CpOrder order) {
    size_t t = p.T / (size_t)world->size, A = width_q(p), W = width_row(p);
    Part x = {.s = {p.B, t, t, p.H, p.KV, p.D, W, W, A, .causal = true},
              .position = malloc(t * sizeof(int32_t))};
    x.m.config = (Config){.cp = world->size, .cp_order = (int)order, .tp = 1, .seq = (long)p.T};
    x.m.grid.cp = comm_ring(world, 0, world->rank, "cp");
    x.m.workspace = place(flash_attention_workspace(x.s));
    cp_positions(&x.m.config, world->rank, t, x.position);
    cp_reserve(&x.m, x.s);
    ring_is_nan(&x);
    x.qkv = rows_of(w.qkv, p, &x, W), x.do_ = rows_of(w.do_, p, &x, A);
    x.o = place(p.B * t * A * sizeof(floatX)), x.dqkv = place(p.B * t * W * sizeof(floatX));
    x.lse = place(p.B * t * p.H * sizeof(float));
    return x;
}

static void part_free(Part x) {
    size_t N = x.s.B * x.s.Tq, n = ring_keys(x.s);
    Ring r = x.m.ring;
    for (int i = 0; i < 2 && r.sum; i++) {
        device_free(MEM_COMMUNICATION, r.block[i], n * sizeof(floatX));
        device_free(MEM_COMMUNICATION, r.part[i], n * sizeof(float));
    }
    if (r.sum) {
        device_free(MEM_COMMUNICATION, r.arrived, n * sizeof(float));
        device_free(MEM_WORKSPACE, r.sum, N * x.s.q_stride * sizeof(float));
        device_free(MEM_WORKSPACE, r.delta, N * x.s.H * sizeof(float));
    }
    device_free(MEM_WORKSPACE, x.m.workspace, flash_attention_workspace(x.s));
    device_free(MEM_WORKSPACE, x.qkv, N * x.s.q_stride * sizeof(floatX));
    device_free(MEM_WORKSPACE, x.dqkv, N * x.s.q_stride * sizeof(floatX));
    device_free(MEM_WORKSPACE, x.do_, N * x.s.o_stride * sizeof(floatX));
    device_free(MEM_WORKSPACE, x.o, N * x.s.o_stride * sizeof(floatX));
    device_free(MEM_WORKSPACE, x.lse, N * x.s.H * sizeof(float));
    comm_free(x.m.grid.cp);
    free(x.position);
}

// What has come out, on the host.
typedef struct {
    floatX *o, *dqkv;
    float *lse;
} Results;

static void *on_host(const void *device, size_t bytes) {
    void *host = malloc(bytes);
    device_copy_out(host, device, bytes);
    return host;
}
static Results results(const Part *x) {
    size_t N = x->s.B * x->s.Tq;
    return (Results){on_host(x->o, N * x->s.o_stride * sizeof(floatX)),
                     on_host(x->dqkv, N * x->s.q_stride * sizeof(floatX)),
                     on_host(x->lse, N * x->s.H * sizeof(float))};
}
static bool same_bits(Results a, Results b, AttentionShape s) {
    size_t N = s.B * s.Tq;
    return memcmp(a.o, b.o, N * s.o_stride * sizeof(floatX)) == 0 &&
           memcmp(a.dqkv, b.dqkv, N * s.q_stride * sizeof(floatX)) == 0 &&
           memcmp(a.lse, b.lse, N * s.H * sizeof(float)) == 0;
}
static void results_free(Results r) {
    free(r.o), free(r.dqkv), free(r.lse);
}

// ---- how far off -------------------------------------------------------------------------------------------------------

// Of all ranks together: the error's norm over the truth's, and the largest error over the truth's largest.
typedef struct {
    double rms, largest;
} Error;

// Of columns from … of rows [B·t, width], whose tokens stand at these positions; NULL: of whole sequences, here on one rank.
static Error error_of(const floatX *x, const double *truth, Problem p, size_t t, const int32_t *position,
                      size_t width, size_t from, size_t columns) {
    double off = 0, norm = 0, most = 0, largest = 0;
    for (size_t i = 0; i < p.B * t; i++) {
        const double *y = truth + (position ? i / t * p.T + (size_t)position[i % t] : i) * width;
        for (size_t c = from; c < from + columns; c++) {
            double e = (double)to_float(x[i * width + c]) - y[c];
            off += e * e, norm += y[c] * y[c];
            most = fmax(most, isnan(e) ? INFINITY : fabs(e)), largest = fmax(largest, fabs(y[c]));
        }
    }
    if (position) {
        off = comm_sum(world, off), norm = comm_sum(world, norm);
        most = comm_max(world, most), largest = comm_max(world, largest);
    }
    return (Error){isnan(off) ? INFINITY : sqrt(off / norm), most / largest};
}

enum { O, DQ, DK, DV, TENSORS };
static const char *const tensor_name[TENSORS] = {"o", "dq", "dk", "dv"};

static void errors_of(Error *e, Results r, Whole w, Problem p, size_t t, const int32_t *position) {
    size_t A = width_q(p), W = width_row(p), E = p.KV * p.D;
    e[O] = error_of(r.o, w.o, p, t, position, A, 0, A);
    e[DQ] = error_of(r.dqkv, w.dqkv, p, t, position, W, 0, A);
    e[DK] = error_of(r.dqkv, w.dqkv, p, t, position, W, A, E);
    e[DV] = error_of(r.dqkv, w.dqkv, p, t, position, W, A + E, E);
}

// fp32: sums of at most T terms; bf16: of results rounded once, though p and ds are rounded too where a device has products of
// bf16 alone.
static void check_results(Part *x, Whole w, Problem p) {
    Results r = results(x);
    Error e[TENSORS];
    errors_of(e, r, w, p, x->s.Tq, x->position);
    for (int i = 0; i < TENSORS; i++) {
        bool near = e[i].rms <= (fp32 ? 2e-6 : 8e-3) && e[i].largest <= (fp32 ? 5e-6 : 2e-2);
        if (!near && world->rank == 0)
            fprintf(stderr, "%s is off by %.3g, at most %.3g: B %zu, T %zu, H %zu, KV %zu, D %zu, %s\n",
                    tensor_name[i], e[i].rms, e[i].largest, p.B, p.T, p.H, p.KV, p.D,
                    x->m.config.cp_order == ORDER_ZIGZAG ? "zigzag" : "contiguous");
        check(near);
    }
    for (size_t i = 0; i < p.B * p.H * x->s.Tq; i++) {
        double truth = w.lse[i / x->s.Tq * p.T + (size_t)x->position[i % x->s.Tq]];
        check(fabs(r.lse[i] - truth) <= (fp32 ? 1e-5 : 1e-4));
    }
    results_free(r);
}

// ---- what it costs -----------------------------------------------------------------------------------------------------

// Pairs of a query and a key of one head that rank r sees in one pass, counted one by one.
static double pairs_seen(const Config *c, Problem p, int r) {
    size_t t = p.T / (size_t)c->cp;
    int32_t *position = malloc(t * sizeof *position);
    cp_positions(c, r, t, position);
    double seen = 0;
    for (size_t i = 0; i < t; i++) seen += position[i] + 1;
    free(position);
    return (double)p.B * seen;
}

// Of a rank that shares its keys: each pass over the ring is counted as it is, by its messages and by its work.
static void check_costs(const Part *x, Problem p, int forwards, int backwards) {
    const Config *c = &x->m.config;
    const CommCount *n = x->m.grid.cp->count;
    uint64_t hops = (uint64_t)(world->size - 1), keys = ring_keys(x->s);
    check(n[OP_SHIFT].calls == hops * (uint64_t)(forwards + 2 * backwards));
    check(n[OP_SHIFT].bytes ==
          hops * keys * ((uint64_t)(forwards + backwards) * sizeof(floatX) + 4 * (uint64_t)backwards));
    for (int op = 0; op < COMM_OPS; op++) check(op == OP_SHIFT || n[op].calls == 0);
    double passes = forwards + backwards, seen = 0;
    if (world->size == 1) return; // no ring: nobody to compare with
    // A rank's queries see as many keys as stand before them, whoever has these. All ranks: of whole sequences half of T².
    check(x->m.ring.pairs == passes * pairs_seen(c, p, world->rank));
    for (int r = 0; r < world->size; r++) seen += pairs_seen(c, p, r);
    check(seen == (double)p.B * (double)p.T * (double)(p.T + 1) / 2);
    if (c->cp_order == ORDER_ZIGZAG)
        check(x->m.ring.pairs * (double)world->size == passes * seen); // to all the same
    else
        check(x->m.ring.pairs == passes * (double)p.B * (double)x->s.Tq *
                                     ((double)(x->s.Tq + 1) / 2 + (double)world->rank * (double)x->s.Tq));
}

// ---- the tests ---------------------------------------------------------------------------------------------------------

static void attend(Part *x) {
    cp_attention_forward(&x->m, x->o, x->lse, x->qkv, x->s);
    cp_attention_backward(&x->m, x->dqkv, x->do_, x->o, x->lse, x->qkv, x->s);
}

// Twice, and once more with each message awaited where it leaves: what the ring works in may hold anything, and the bits agree.
static void try_one(Problem p, CpOrder order) {
    Whole w = whole(p);
    Part x = part_of(p, w, order);
    attend(&x);
    check_results(&x, w, p);
    Results first = results(&x);
    for (int again = 0; again < 2; again++) {
        if (again) x.m.config.no_overlap = true;
        ring_is_nan(&x);
        attend(&x);
        if (again == 0) cp_attention_forward(&x.m, x.o, x.lse, x.qkv, x.s); // as recomputation does
        Results r = results(&x);
        check(same_bits(first, r, x.s));
        results_free(r);
    }
    check_costs(&x, p, 4, 3);
    results_free(first);
    part_free(x);
    whole_free(w);
}

static void try_all(void) {
    size_t cp = (size_t)world->size;
    const Problem problems[] = {
        {1, cp * 2, 1, 1, 16}, // chunks of one token
        {2, cp * 2 * 3, 2, 1, 40},
        {2, cp * 2 * 7, 4, 2, 16}, // and where no emulator is slow
        {1, cp * 2 * 33, 3, 3, 40},
    };
    size_t n = device_count() > 0 ? 2 : LENGTH(problems);
    for (size_t i = 0; i < n; i++)
        for (int order = ORDER_ZIGZAG; order <= ORDER_CONTIGUOUS; order++) try_one(problems[i], (CpOrder)order);
    try_one((Problem){1, cp * 5, 2, 1, 16}, ORDER_CONTIGUOUS); // whose parts no chunks cut in two
}

// On the CPU there is one.
static bool has_nccl(void) {
    return device_count() >= comm_host().local_size;
}
static Transport best_transport(void) {
    return has_nccl() ? TRANSPORT_NCCL : TRANSPORT_MPI;
}

static void test_ring(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    comm_use(TRANSPORT_MPI);
    try_all();
    agree();
    if (!has_nccl()) return;
    comm_use(TRANSPORT_NCCL);
    try_all();
    agree();
}

// Ranks are late, each in its turn, and each attends several times, with other queries and keys: no message meets the next one's.
static void test_one_after_another(void **state) {
    (void)state;
    sigaction(SIGSEGV, &before_cmocka, NULL);
    Problem p = {1, (size_t)world->size * 2 * 9, 2, 1, 16};
    comm_use(best_transport());
    Whole w = whole(p);
    Part x = part_of(p, w, ORDER_ZIGZAG);
    size_t N = p.B * x.s.Tq, bytes = N * x.s.q_stride * sizeof(floatX);
    floatX *zero = device_alloc(MEM_WORKSPACE, bytes), *in = x.qkv;
    for (int turn = 0; turn < 6; turn++) {
        if (turn % world->size == world->rank) nanosleep(&(struct timespec){0, 20000000}, NULL);
        x.qkv = turn % 2 ? in : zero;
        attend(&x);
    }
    check_results(&x, w, p);
    device_free(MEM_WORKSPACE, zero, bytes);
    part_free(x);
    whole_free(w);
    agree();
}

// Every position once, in the sequence's order on each rank; zigzag: as many late ones as early ones.
static void test_positions(void **state) {
    (void)state;
    for (long cp = 1; cp <= 9; cp++)
        for (int order = ORDER_ZIGZAG; order <= ORDER_CONTIGUOUS; order++)
            for (size_t t = order == ORDER_ZIGZAG ? 2 : 1; t <= 14; t += order == ORDER_ZIGZAG ? 2 : 1) {
                Config c = {.cp = cp, .cp_order = order, .tp = 1};
                int seen[9 * 14] = {0};
                for (int r = 0; r < cp; r++) {
                    int32_t position[14];
                    long sum = 0, T = cp * (long)t;
                    cp_positions(&c, r, t, position);
                    for (size_t i = 0; i < t; i++) {
                        assert_in_range(position[i], i ? position[i - 1] + 1 : 0, T - 1);
                        seen[position[i]]++, sum += position[i];
                        if (order == ORDER_CONTIGUOUS) assert_int_equal(position[i], r * (long)t + (long)i);
                    }
                    if (order == ORDER_ZIGZAG) assert_int_equal(2 * sum, (long)t * (T - 1));
                }
                for (size_t i = 0; i < (size_t)cp * t; i++) assert_int_equal(seen[i], 1);
            }
}

// Zigzag ranks see as many pairs at every step, whoever's keys are there.
static void test_work_of_a_step(void **state) {
    (void)state;
    enum { T = 10 }; // of each
    for (int cp = 1; cp <= 9; cp++)
        for (int r = 0; r < cp; r++)
            for (int step = 0; step < cp; step++) {
                Config c = {.cp = cp, .cp_order = ORDER_ZIGZAG, .tp = 1};
                int32_t query[T], key[T];
                cp_positions(&c, r, T, query), cp_positions(&c, (r - step + cp) % cp, T, key);
                int seen = 0;
                for (int i = 0; i < T * T; i++) seen += key[i % T] <= query[i / T];
                assert_int_equal(seen, step == 0 ? T * (T + 1) / 2 : T * T / 2);
            }
}

// As many tokens as all ranks together need, and as few as can be cut: in two, where zigzag does, and then over tp.
static void test_local_tokens(void **state) {
    (void)state;
    for (long cp = 1; cp <= 9; cp++)
        for (long tp = 1; tp <= 6; tp++)
            for (int sp = 0; sp <= 1; sp++)
                for (int order = ORDER_ZIGZAG; order <= ORDER_CONTIGUOUS; order++)
                    for (size_t tokens = 1; tokens < 80; tokens++) {
                        Config c = {.cp = cp, .cp_order = order, .tp = tp, .sp = sp};
                        size_t t = 1; // the smallest that will do
                        while (t * (size_t)cp < tokens || (order == ORDER_ZIGZAG && t % 2) ||
                               (sp && t % (size_t)tp))
                            t++;
                        assert_int_equal(cp_local_tokens(&c, tokens), t);
                    }
}

// ---- bf16 --------------------------------------------------------------------------------------------------------------

// The same inputs on one rank, by what it does without a ring.
static Results alone(Problem p, Whole w) {
    size_t N = p.B * p.T, A = width_q(p), W = width_row(p);
    AttentionShape s = {p.B, p.T, p.T, p.H, p.KV, p.D, W, W, A, .causal = true};
    floatX *qkv = place(N * W * sizeof *qkv), *do_ = place(N * A * sizeof *do_), *o = place(N * A * sizeof *o);
    floatX *dqkv = place(N * W * sizeof *dqkv), *k = qkv + A, *v = k + p.KV * p.D, *dk = dqkv + A;
    float *lse = place(N * p.H * sizeof *lse);
    void *workspace = place(flash_attention_workspace(s));
    device_copy_in(qkv, w.qkv, N * W * sizeof *qkv), device_copy_in(do_, w.do_, N * A * sizeof *do_);
    flash_attention_forward(o, lse, qkv, k, v, s, workspace);
    flash_attention_backward(dqkv, dk, dk + p.KV * p.D, do_, o, lse, qkv, k, v, s, workspace);
    return (Results){on_host(o, N * A * sizeof *o), on_host(dqkv, N * W * sizeof *dqkv),
                     on_host(lse, N * p.H * 4)};
}

static int show_errors(size_t T) {
    Problem p = {1, T, 4, 2, 40};
    comm_use(best_transport());
    Whole w = whole(p);
    Error one[TENSORS], all[TENSORS];
    errors_of(one, alone(p, w), w, p, p.T, NULL);
    Part x = part_of(p, w, ORDER_ZIGZAG);
    attend(&x);
    errors_of(all, results(&x), w, p, x.s.Tq, x.position);
    for (int i = 0; i < TENSORS && world->rank == 0; i++)
        printf("%s rms %.6g %.6g largest %.6g %.6g\n", tensor_name[i], one[i].rms, all[i].rms, one[i].largest,
               all[i].largest);
    comm_free(x.m.grid.cp);
    comm_finalize();
    return 0;
}

int main(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--ranks") == 0) launch_ranks(atoi(argv[i + 1]), argc, argv, &(sig_atomic_t){0});
    device_open(launch_local_rank());
    device_free(MEM_COMMUNICATION, device_alloc(MEM_COMMUNICATION, 1), 1);
    sigaction(SIGSEGV, NULL, &before_cmocka);
    world = comm_init(&argc, &argv);
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "error") == 0) return show_errors((size_t)atoi(argv[i + 1]));
    if (world->rank != 0 && !freopen("/dev/null", "w", stdout)) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_positions),         cmocka_unit_test(test_work_of_a_step),
        cmocka_unit_test(test_local_tokens),      cmocka_unit_test(test_ring),
        cmocka_unit_test(test_one_after_another),
    };
    setenv("CMOCKA_TEST_ABORT", "1", 1); // a rank that leaves a test must not leave the others waiting
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    comm_finalize();
    return failed != 0;
}

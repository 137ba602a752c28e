// A model's values: where they start, how they are saved and come back, and whether all copies are alike.
//
// A rank holds the masters and moments of its own part of each bucket: all of it, or from ZeRO-1 on a shard. It starts,
// writes and reads that part of each parameter and nothing else. Checkpoints know whole tensors only, so that what one
// layout has saved any other can read:
//
//     saved by 4 ranks      |  rank 0  |  rank 1  |  rank 2  |  rank 3  |      pieces of the bucket's tensors
//     read by 3             |    rank 0    |    rank 1    |    rank 2   |
#include "state.h"
#include "runtime/checkpoint.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/log.h"
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const ModelSetting model_settings[MODEL_SETTINGS] = {
    {"layers", "layers", offsetof(Config, layers)},
    {"heads", "heads", offsetof(Config, heads)},
    {"kv_heads", "kv-heads", offsetof(Config, kv_heads)},
    {"hidden", "hidden", offsetof(Config, hidden)},
    {"ffn", "ffn", offsetof(Config, ffn)},
    {"vocab", "vocab", offsetof(Config, vocab)},
    {"experts", "experts", offsetof(Config, experts)},
    {"topk", "topk", offsetof(Config, topk)},
    {"shared_experts", "shared-experts", offsetof(Config, shared_experts)},
    {"expert_ffn", "expert-ffn", offsetof(Config, expert_ffn)},
    {"moe_every", "moe-every", offsetof(Config, moe_every)},
    {"route_groups", "route-groups", offsetof(Config, route_groups)},
    {"route_nodes", "route-nodes", offsetof(Config, route_nodes)},
};

long *setting(const Config *c, int i) {
    return (long *)(void *)((char *)c + model_settings[i].offset);
}

// ---- this rank's own part -----------------------------------------------------------------------------------------------

// The elements of this rank's slice of parameter p that lie between begin and end of its bucket, counted from the slice's
// first. The padding is no part.
typedef struct {
    size_t begin, end;
} Range;

static Range part(const Param *p, size_t begin, size_t end) {
    size_t n = p->slice_rows * p->slice_cols, from = begin > p->offset ? begin - p->offset : 0,
           to = end > p->offset ? end - p->offset : 0;
    return (Range){from < n ? from : n, to < n ? to : n};
}

// The part of p whose optimizer this rank is, and where it stands in the bucket's own arrays.
static Range own_part(const Model *m, const Param *p) {
    if (!p->here) return (Range){0, 0};
    const Bucket *b = &m->bucket[p->bucket];
    return part(p, b->own, b->own_end);
}

static size_t own_place(const Model *m, const Param *p) {
    return p->offset + own_part(m, p).begin - m->bucket[p->bucket].own;
}

// Where element i of the slice stands in the whole parameter.
static size_t global_index(const Param *p, size_t i) {
    return (p->row + i / p->slice_cols) * p->cols + p->col + i % p->slice_cols;
}

// A range of the slice, whose values follow one another at data, as pieces of the whole tensor: of a slice of rows, one; of a
// slice of columns, the rest of a row, whole rows of the slice, and the beginning of one.
enum { MOST_PIECES = 3 };
static int pieces(Piece *out, const Param *p, Range r, int tensor, float *data) {
    size_t width = p->slice_cols < p->cols ? p->slice_cols : r.end;
    int n = 0;
    for (size_t i = r.begin, taken; i < r.end; i += taken, data += taken) {
        size_t left = r.end - i, rest = width - i % width;
        size_t runs = rest == width && left >= width ? left / width : 1, run = rest < left ? rest : left;
        out[n++] = (Piece){.tensor = tensor,
                           .offset = global_index(p, i),
                           .run = run,
                           .stride = p->cols,
                           .runs = runs,
                           .data = data};
        taken = run * runs;
    }
    return n;
}

// Writes this rank's own part of a parameter from fp32 values on the host. The vocabulary's padding stays zero.
static void set_own(Model *m, const Param *p, const float *value) {
    Bucket *b = &m->bucket[p->bucket];
    size_t n = own_part(m, p).end - own_part(m, p).begin, place = own_place(m, p);
    if (b->master) device_copy_in(b->master + place, value, n * sizeof(float));
    floatX *rounded = host_alloc(n, sizeof(floatX));
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) rounded[i] = to_floatX(value[i]);
    device_copy_in(b->own_weight + place, rounded, n * sizeof(floatX));
    free(rounded);
}

// ---- initial values -----------------------------------------------------------------------------------------------------

// An initial value is a function of (seed, parameter, element): every layout starts from the same model.
static uint64_t mix(uint64_t x) { // the finaliser of splitmix64 (Steele et al. 2014)
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// A stream of random numbers for a name: FNV-1a of it, and the seed.
uint64_t random_stream(uint64_t seed, const char *name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return mix(seed) ^ h;
}

double random_uniform(uint64_t stream, uint64_t i) {
    return ((double)(mix(mix(stream + 0x9e3779b97f4a7c15u) + i * 0x9e3779b97f4a7c15u) >> 11) + 0.5) * 0x1p-53;
}

static float initial_value(const Param *p, uint64_t stream, size_t i) {
    if (p->init <= 0) return -p->init;
    double u = random_uniform(stream, 2 * i), v = random_uniform(stream, 2 * i + 1);
    return (float)(p->init * sqrt(-2 * log(u)) * cos(2 * M_PI * v)); // Box-Muller
}

void state_init(Model *m) {
    for (const Param *p = m->param; p < m->param + m->n_params; p++) {
        uint64_t stream = random_stream((uint64_t)m->config.seed, p->name);
        Range own = own_part(m, p);
        if (own.begin == own.end) continue;
        float *value = host_alloc(own.end - own.begin, sizeof(float));
#pragma omp parallel for
        for (size_t j = own.begin; j < own.end; j++)
            value[j - own.begin] = initial_value(p, stream, global_index(p, j));
        set_own(m, p, value);
        free(value);
    }
    dp_share_weights(m);
}

// ---- saved ---------------------------------------------------------------------------------------------------------

enum { MAX_META = 24 };
typedef struct {
    Meta meta[MAX_META];
    char value[MAX_META][32];
    int n;
} MetaList;

static void add_meta(MetaList *list, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void add_meta(MetaList *list, const char *key, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(list->value[list->n], sizeof list->value[0], format, args);
    va_end(args);
    list->meta[list->n] = (Meta){key, list->value[list->n]};
    list->n++;
}

static void add_model_meta(MetaList *list, const Config *c) {
    add_meta(list, "arch", "%s", flag_choice(ARCHS, c->arch));
    int n = c->experts ? MODEL_SETTINGS : DENSE_SETTINGS;
    for (int i = 0; i < n; i++) add_meta(list, model_settings[i].name, "%ld", *setting(c, i));
    if (c->experts) add_meta(list, "router", "%s", c->balance == BALANCE_BIAS ? "sigmoid" : "softmax");
    add_meta(list, "seq", "%ld", c->positions ? c->positions : c->seq);
    add_meta(list, "trained_seq", "%ld", c->seq);
    add_meta(list, "rope_theta", "%.9g", c->rope_theta);
    add_meta(list, "tie", "%d", c->tie);
}

// The part of parameter p that lies in this rank's shard of its bucket, where no other tp rank counts it: every element is
// written by one rank.
static int shard_pieces(Piece *out, const Model *m, const Param *p, int tensor, float *own_values) {
    if (!p->here || !p->counted) return 0;
    const Bucket *b = &m->bucket[p->bucket];
    Range r = part(p, b->shard, b->shard_end);
    if (r.begin == r.end) return 0;
    return pieces(out, p, r, tensor, own_values + (p->offset + r.begin - b->own));
}

static float *master_weights(const Bucket *b) {
    return b->master ? b->master : (float *)(void *)b->own_weight;
}

// The last update may have left what no loss has seen yet.
static void must_be_finite(Model *m, long step) {
    double *sum = m->squares + m->n_params, squares;
    device_zero(sum, sizeof *sum);
    for (const Bucket *b = m->bucket; b < m->bucket + m->n_buckets; b++) {
        size_t n = b->own_end - b->own;
        if (n) grad_norm_squared(sum, NULL, master_weights(b), n, m->workspace);
    }
    device_copy_out(&squares, sum, sizeof squares);
    if (!isfinite(comm_sum(m->grid.world, squares)))
        fail_all(EXIT_RUNTIME, "step %ld: the weights are not finite; this step is not saved", step);
}

// What no gradient moves, and is a part of the model all the same: the biases of --balance bias, fp32, of each block with experts.
typedef char BalanceName[48];
static int balance_names(const Config *c, BalanceName *name) { // [layers]; returns how many
    int n = 0;
    for (long l = 0; l < c->layers && c->balance == BALANCE_BIAS; l++)
        if (has_experts(c, l)) snprintf(name[n++], sizeof *name, "blocks.%ld.mlp.router.balance", l);
    return n;
}

// The block of the i-th of them. All ranks that have it have it whole.
static long balance_block(const Config *c, int i) {
    return (i + 1) * c->moe_every - 1;
}

bool state_save(Model *m, long step) {
    for (int i = 0; i < m->n_buckets; i++)
        comm_wait(m->bucket[i].gather); // it reads own weights, and so does this
    must_be_finite(m, step);
    const Config *c = &m->config;
    int n = m->n_params;
    BalanceName *balance = host_alloc((size_t)c->layers, sizeof *balance);
    int biases = balance_names(c, balance);
    TensorInfo *tensor = host_alloc(3 * (size_t)n + (size_t)biases, sizeof *tensor);
    Piece *piece = host_alloc(MOST_PIECES * 3 * (size_t)n + (size_t)biases, sizeof *piece),
          *of_moments = piece + MOST_PIECES * n + biases;
    int n_pieces = 0, n_of_moments = 0;
    char(*moment)[104] = host_alloc(2 * (size_t)n, sizeof *moment);
    for (int i = 0; i < n; i++) {
        const Param *p = &m->param[i];
        Bucket *b = &m->bucket[p->bucket];
        tensor[i] = (TensorInfo){p->name, p->ndim, {p->rows, p->cols}};
        n_pieces += shard_pieces(piece + n_pieces, m, p, i, master_weights(b));
        for (int k = 0; k < 2; k++) { // the optimizer's file holds NAME.m and NAME.v, side by side
            int j = 2 * i + k;
            snprintf(moment[j], sizeof *moment, "%s.%c", p->name, k == 0 ? 'm' : 'v');
            tensor[n + biases + j] = (TensorInfo){moment[j], p->ndim, {p->rows, p->cols}};
            n_of_moments += shard_pieces(of_moments + n_of_moments, m, p, j, k == 0 ? b->m : b->v);
        }
    }
    for (int i = 0; i < biases; i++) {
        long l = balance_block(c, i), E = c->experts;
        tensor[n + i] = (TensorInfo){balance[i], 1, {(size_t)E, 1}};
        bool writes = m->chunk_of[l + 1] >= 0 && m->grid.dp->rank == 0 && m->grid.tp->rank == 0;
        if (writes)
            piece[n_pieces++] = (Piece){.tensor = n + i,
                                        .run = (size_t)E,
                                        .stride = (size_t)E,
                                        .runs = 1,
                                        .data = m->experts.bias + l * E};
    }
    MetaList model = {.n = 0}, run = {.n = 0};
    add_model_meta(&model, c);
    add_meta(&run, "step", "%ld", step);
    add_meta(&run, "seed", "%ld", c->seed);
    add_meta(&run, "global_batch", "%ld", c->global_batch);
    add_meta(&run, "data", "%016llx", (unsigned long long)m->data);
    const TensorFile files[] = {
        {"weights.safetensors", tensor, n + biases, piece, n_pieces, model.meta, model.n},
        {"optimizer.safetensors", tensor + n + biases, 2 * n, of_moments, n_of_moments, run.meta, run.n},
    };
    bool saved = checkpoint_save(m->grid.world, c->save, step, files, 2, (int)c->keep);
    free(tensor);
    free(piece);
    free(moment);
    free(balance);
    return saved;
}

// ---- read back ------------------------------------------------------------------------------------------------------------

// Which of the file's tensors is this, which must have this shape?
static int find_tensor(SafeTensors *s, const char *path, const char *name, int ndim, size_t rows, size_t cols) {
    int i = safetensors_find(s, name);
    if (i < 0) fail_all(EXIT_USAGE, "%s: holds no tensor %s", path, name);
    const size_t *shape;
    int dimensions = safetensors_shape(s, i, &shape);
    size_t its_rows = dimensions > 0 ? shape[0] : 0, its_cols = dimensions > 1 ? shape[1] : 1;
    if (dimensions != ndim || its_rows != rows || its_cols != cols)
        fail_all(EXIT_USAGE, "%s: %s is %zu × %zu, this model's is %zu × %zu", path, name, its_rows, its_cols,
                 rows, cols);
    return i;
}

// Reads this rank's own part of parameter p to the host, after a look at the tensor's shape. NULL where it has none;
// else to be freed.
static float *read_own(const Model *m, SafeTensors *s, const char *path, const Param *p, const char *name) {
    int i = find_tensor(s, path, name, p->ndim, p->rows, p->cols);
    Range own = own_part(m, p);
    size_t n = own.end - own.begin;
    if (n == 0) return NULL;
    float *value = host_alloc(n, sizeof(float));
    Piece piece[MOST_PIECES];
    int n_pieces = pieces(piece, p, own, i, value);
    for (int k = 0; k < n_pieces; k++) safetensors_read(s, piece[k]);
    return value;
}

// The balance biases, which every rank keeps whole, of all blocks.
static void load_balance(Model *m, SafeTensors *s, const char *path, BalanceName *name, int n) {
    size_t E = (size_t)m->config.experts;
    for (int i = 0; i < n; i++) {
        float *value = m->experts.host_bias + (size_t)balance_block(&m->config, i) * E;
        int tensor = find_tensor(s, path, name[i], 1, E, 1);
        safetensors_read(s, (Piece){.tensor = tensor, .run = E, .stride = E, .runs = 1, .data = value});
    }
    if (n) device_copy_in(m->experts.bias, m->experts.host_bias, (size_t)m->config.layers * E * sizeof(float));
}

void state_load_weights(Model *m, const char *path) {
    SafeTensors *s = safetensors_open(path);
    BalanceName *balance = host_alloc((size_t)m->config.layers, sizeof *balance);
    int biases = balance_names(&m->config, balance);
    if (safetensors_count(s) > m->n_params + biases)
        fail_all(EXIT_USAGE, "%s: holds %d tensors, this model has %d", path, safetensors_count(s),
                 m->n_params + biases);
    load_balance(m, s, path, balance, biases);
    free(balance);
    for (const Param *p = m->param; p < m->param + m->n_params; p++) {
        float *value = read_own(m, s, path, p, p->name);
        if (value) set_own(m, p, value);
        free(value);
    }
    safetensors_close(s);
    dp_share_weights(m);
}

// Everything else that a run needs to go on as if it had not stopped.
static void load_optimizer(Model *m, const char *path) {
    const Config *c = &m->config;
    SafeTensors *s = safetensors_open(path);
    for (const Param *p = m->param; p < m->param + m->n_params; p++) {
        const Bucket *b = &m->bucket[p->bucket];
        size_t bytes = (own_part(m, p).end - own_part(m, p).begin) * sizeof(float);
        for (int k = 0; k < 2; k++) {
            char name[104];
            snprintf(name, sizeof name, "%s.%c", p->name, k == 0 ? 'm' : 'v');
            float *value = read_own(m, s, path, p, name);
            if (value) device_copy_in((k == 0 ? b->m : b->v) + own_place(m, p), value, bytes);
            free(value);
        }
    }
    const char *batch = safetensors_meta(s, "global_batch"), *data = safetensors_meta(s, "data");
    char fingerprint[32];
    snprintf(fingerprint, sizeof fingerprint, "%016llx", (unsigned long long)m->data);
    if (batch && strtol(batch, NULL, 10) != c->global_batch)
        say("note: the checkpoint was made with %s sequences a step, this run takes %ld", batch,
            c->global_batch);
    if (data && strcmp(data, fingerprint) != 0) say("note: the checkpoint was made with other data");
    safetensors_close(s);
}

void state_resume(Model *m, const char *checkpoint) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/weights.safetensors", checkpoint);
    state_load_weights(m, path);
    snprintf(path, sizeof path, "%s/optimizer.safetensors", checkpoint);
    load_optimizer(m, path);
    say("resumed %s", checkpoint);
}

// ---- compared -------------------------------------------------------------------------------------------------------------

static uint64_t hash_of(uint64_t h, const void *device, size_t bytes) {
    size_t words = (bytes + 7) / 8;
    uint64_t *word = host_alloc(words, sizeof *word);
    device_copy_out(word, device, bytes);
    for (size_t i = 0; i < words; i++) h = mix(h ^ word[i]);
    free(word);
    return h;
}

// What of parameter p this rank holds that others hold too: a word that is the same for all of them. Of the weights, whole below
// ZeRO-3, the ranks of dp have copies; of the optimizer's state, at ZeRO-0; else each has its shard of them. Over tp, whoever has
// the same slice.
static uint64_t copies_of(const Model *m, const Param *p, bool whole) {
    const Comm *holders = m->bucket[p->bucket].comm;
    uint64_t slice = p->row * p->cols + p->col, shard = whole ? 0 : (uint64_t)holders->rank;
    return slice * (uint64_t)holders->size + shard;
}

typedef struct {
    uint64_t copies, hash;
} Copy;

static void compare_copies(const Param *p, const Copy *copy, size_t stride, size_t ranks, long step) {
    size_t odd = 0, fewest = ranks, holders = 0, first = 0; // first: of these holders
    for (size_t r = 0; r < ranks; r++) {
        size_t alike = 0, held = 0, before = r;
        for (size_t other = 0; other < ranks; other++) {
            const Copy *a = copy + r * stride, *b = copy + other * stride;
            if (a->copies != b->copies) continue;
            if (held++ == 0) before = other;
            alike += a->hash == b->hash;
        }
        if (alike < held && alike <= fewest) odd = r, fewest = alike, holders = held, first = before;
    }
    if (holders == 0) return; // all alike
    char others[32] = "the other ranks'";
    if (holders == 2) snprintf(others, sizeof others, "rank %zu's", first);
    fail_all(EXIT_RUNTIME, "step %ld: rank %zu's copy of %s differs from %s", step, odd, p->name, others);
}

// Compares the hashes of all copies, and names the first parameter of which one rank's differs from most.
void state_check_replicas(const Model *m, long step) {
    Comm *world = m->grid.world;
    enum { WEIGHT, STATE, KINDS };
    size_t n = KINDS * (size_t)m->n_params, ranks = (size_t)world->size;
    Copy *copy = host_alloc(ranks * n, sizeof *copy), *mine = copy + (size_t)world->rank * n;
    for (size_t i = 0; i < (size_t)m->n_params; i++) {
        const Param *p = &m->param[i];
        const Bucket *b = &m->bucket[p->bucket];
        if (!p->here) {
            mine[KINDS * i + WEIGHT] = mine[KINDS * i + STATE] = (Copy){UINT64_MAX, 0}; // of nothing, all alike
            continue;
        }
        Range own = own_part(m, p);
        size_t count = own.end - own.begin, place = own_place(m, p);
        bool whole = m->config.zero < 3;
        comm_wait(b->gather);
        mine[KINDS * i + WEIGHT] =
            (Copy){copies_of(m, p, whole), whole   ? hash_of(0, b->weight + p->offset, p->size * sizeof(floatX))
                                           : count ? hash_of(0, b->own_weight + place, count * sizeof(floatX))
                                                   : 0};
        float *const state[] = {b->master, b->m, b->v};
        uint64_t h = 0;
        for (int k = 0; k < 3 && count; k++)
            if (state[k]) h = hash_of(h, state[k] + place, count * sizeof(float));
        mine[KINDS * i + STATE] = (Copy){copies_of(m, p, m->config.zero == 0), h};
    }
    comm_wait(comm_host_all_gather(world, copy, mine, ranks * n * sizeof *copy / sizeof(uint64_t), DTYPE_I64));
    for (size_t i = 0; i < n; i++) compare_copies(&m->param[i / KINDS], copy + i, n, ranks, step);
    free(copy);
}

// The words that all files share, in reading order: where a rank stands (Grid), what is learned (Param, Bucket), the model that
// is trained (Model). Then the strategies, a few prototypes each. What a run is, is in config.h; in which order a rank does what,
// in pp_1f1b.h.
//
// Sizes, everywhere: B sequences a micro-batch, T tokens of each on this rank, N = B·T rows, C channels (--hidden), H query heads,
// KV key/value heads, D = C/H channels a head, F channels inside the MLP (--ffn), V the vocabulary, Vp padded, L layers; E experts,
// of which a token goes to k.
#ifndef TRAIN_H
#define TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "config.h"
#include "kernels/kernels.h"
#include "pp_1f1b.h"
#include "runtime/comm.h"

// ---- Where a rank stands -------------------------------------------------------------------------------------------
// rank = ((pp · DP + dp) · CP + cp) · TP + tp: tensor parallelism, which sends most, is among neighbours, and the pipeline, which
// sends least, goes from host to host.
typedef struct {
    Comm *world;    // every rank
    Comm *pp;       // the ranks that hold other layers of the same model, and see the same tokens
    Comm *dp;       // those that hold the same parameters and see other tokens: rank dp · CP + cp of DP · CP
    Comm *cp;       // those of dp that see the same sequences, other tokens of them
    Comm *tp;       // the ranks that share each matrix, and see the same tokens
    Comm *ep;       // ep neighbours of dp, of one place in cp: they share the experts of each block
    Comm *replicas; // those of dp that hold the same experts: rank (dp / ep) · CP + cp
    Comm *sequence; // those that see parts of the same sequences: of cp, and with --sp of tp
    Comm *kv;       // those of tp that hold the same key/value heads: more than one where tp > --kv-heads
    Comm
        *tied; // those of pp that hold a tied embedding: the first stage's, and the last one's if it is another
} Grid;

// ---- What is learned -------------------------------------------------------------------------------------------------
// Which way tensor parallelism cuts a tensor: its rows, which are a product's outputs (Megatron-LM's column-parallel), its
// columns, which are inputs (row-parallel), or rows by whole (key/value) heads.
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_HEADS, SPLIT_KV_HEADS } Split;

typedef struct {
    char name[96];     // "blocks.3.mlp.up.weight"
    int ndim;          // 1: [rows], 2: [rows, cols], row-major, [out, in]
    size_t rows, cols; // the true shape; cols = 1 where ndim is 1
    Split split;
    // This rank's slice of it: from row and column on, so many rows and columns.
    size_t row, col, slice_rows, slice_cols;
    bool here;    // does this rank hold it, or is it another stage's?
    bool counted; // of the ranks of tp and pp with this very slice, this is the one that counts and saves it
    int parts;    // tp ranks among which its gradient is a sum of parts; 1: each computes all of it
    size_t size;  // elements in memory: the slice, and the padding of a vocabulary
    int expert;   // whose it is; −1: of none
    int unit, bucket; // the bucket: where it is here
    size_t offset;    // of its first element in the bucket
    float init;       // standard deviation of the initial values; 0: zeros; −1: ones
    size_t place;     // offset of the pointer to it in Block or Ends
} Param;

// A unit is the embedding (unit 0), a block (1 … L) or the head (L + 1). All parameters of one unit, or of several
// neighbours of a chunk (--bucket-mb; never the embedding), lie in one flat buffer: what data parallelism reduces, ZeRO
// shards and ZeRO-3 gathers. The experts of a block lie in one of their own, for fewer ranks hold the same. Of its elements, this
// rank's *shard* is the part that a reduce-scatter brings it; *its own* are those that its optimizer updates: all of them at
// ZeRO-0, the shard from ZeRO-1 on.
typedef struct {
    char name[32];
    int chunk; // −1: the last stage's copy of a tied embedding
    int first_unit, last_unit;
    int first_param, n_params; // all of its own are among these
    Comm *comm;                // the ranks that hold the same: grid.dp, of experts grid.replicas
    int ranks;                 // so many; in a dry run comm itself has one
    size_t count;              // elements
    size_t shard, shard_end;   // from, up to
    size_t own, own_end;
    // Whole: [count]. ZeRO-3's weights and ZeRO-2's gradients are whole while they are used, and share this memory
    // with other buckets.
    floatX *weight, *grad;
    float *grad32; // fp32 sum of the micro-batches' gradients (--grad-accum-fp32 in a bf16 build), or NULL
    // What stays: [own_end − own]; where the whole ones stay, the first three point into them.
    floatX *own_weight, *own_grad;
    float *own_grad32;
    float *master, *m, *v;  // fp32 weights (bf16 builds) and AdamW's moments
    size_t *decay, n_decay; // ranges of its own elements that decay: the matrices
    // Where it stands.
    bool whole; // the weights are, or will be once their gather is done
    bool
        open; // the gradient is being added to: by one micro-batch; a tied one (zbv) by heads of later ones, too
    bool reducing; // its reduction is under way, or not waited for yet
    long summed;   // micro-batches of this step that are in the gradient
    Work gather, reduce;
} Bucket;

// ---- The model ---------------------------------------------------------------------------------------------------------
// From here on H, KV, F and V are what this rank has of them, and A = H·D channels of attention: H/tp, F/tp … of the whole. R
// rows of the residual stream are here: all N, or with --sp N/tp.
//
// An MLP's parameters, or their gradients: places in a bucket. gate and up lie side by side there, so that they are one matrix, as
// do q, k and v below.
typedef struct {
    floatX *up_weight, *up_bias; // [U, C]; U = F (gpt2), 2F (llama: gate, then up); biases exist in gpt2 only
    floatX *down_weight, *down_bias; // [C, F]
} Mlp;

// A block's. One without experts has an MLP; one with experts has it where some are shared, as one that is so much wider.
typedef struct {
    floatX *norm1_weight, *norm1_bias; // [C]
    floatX *qkv_weight, *qkv_bias;     // [A+2·KV·D, C]
    floatX *out_weight, *out_bias;     // [C, A]
    floatX *norm2_weight, *norm2_bias; // [C]
    Mlp mlp;
    floatX *router_weight; // [E, C]
    Mlp expert;            // the first of this rank's; the others follow, all of one size
} Block;

typedef struct {
    floatX *wte, *wpe;               // [Vp, C], [positions, C] or NULL
    floatX *norm_weight, *norm_bias; // [C]
    floatX *head_weight;             // [Vp, C]; the same place as wte when tied
} Ends;

// Where a block sends its tokens' copies: decided in F, and replayed whenever it is computed again.
typedef struct {
    float *scores;          // [R, E]
    int32_t *index, *place; // [N, k] the experts of each token; and where each copy stands, sorted by expert
    float *gate;            // [N, k]
    float *chosen;          // [2, B, E] what the balance loss needs (moe_sequence_sums)
    CommRows *sent,
        *received; // [E] host: by rank and expert of it, this rank's sorted rows; and by rank and own expert, those of x
    size_t *rows; // [E/ep] host: that each of this rank's experts has been given
    size_t M;     // Σ rows
} Route;

// Rows of which only routing knows how many there will be: the memory grows when more come than ever before.
typedef struct {
    floatX *x;
    size_t rows; // that there is room for
} Growing;

// What experts keep of an F, their F and U being those of one expert, and leave of an I.
typedef struct {
    Growing x, up, act; // [M, C], [M, U], [M, F]
    floatX *back;       // [N·k, C] their outputs, home again
} ExpertActivations;
typedef struct {
    Growing out, up; // [M, C], [M, U]
    float *logits;   // [R, E] of the router
} ExpertGrads;

// What a block's forward keeps for its backward, one micro-batch. On the right, bytes a token and channel where floatX has
// two, with f = F/C and g = KV/H of the whole model, t = tp ≤ KV: gpt2 8 + (8 + 4f)/t in all (g = 1), llama 8 + (4 + 4g + 6f)/t;
// with --sp the 8 is divided by t, too. fp32 statistics come on top.
typedef struct {
    floatX *x;            // [R, C]          the residual stream as it enters                 2
    float *mean1, *rstd1; // [R]
    floatX *h1;           // [R, C]          input of qkv                                     2
    floatX *qkv;          // [N, A+2·KV·D]   q 2, k and v 4g                                  (2 + 4g)/t
    float *lse;           // [B, H, T]       flash: log-sum-exp of each row of scores
    floatX *probs;        // [B, H, T, T]    naive: the softmax output
    floatX *o;            // [N, A]          attention's output                               2/t
    floatX *x_mid;        // [R, C]          the residual stream between attention and MLP    2
    float *mean2, *rstd2; // [R]
    floatX *h2;           // [R, C]          input of the MLP                                 2
    floatX *up;           // [N, U]          input of the non-linearity                       2f/t, llama 4f/t
    floatX *act;          // [N, F]          its output                                       2f/t
    Route *route;         // NULL: never a block with experts
    ExpertActivations *experts;
} Activations;

// What W needs, beside activations: the gradients of a block's four matrix products' outputs; and what I has summed of norms'.
typedef struct {
    floatX *down;  // [R, C]: the gradient of the residual stream as it leaves
    floatX *up;    // [N, U]
    floatX *out;   // [R, C]: the same, between MLP and attention
    floatX *qkv;   // [N, A+2·KV·D]
    floatX *norms; // [4, C]: of norm1's weight and bias, of norm2's
    ExpertGrads *experts;
} OutputGrads;

// What the head keeps of one micro-batch.
typedef struct {
    floatX *x, *h1;     // [R, C]: the residual stream at its end, and normalised
    float *mean, *rstd; // [R]
    floatX *logits;     // [N, Vp], then their gradient
} HeadActivations;

// What goes round in ring attention, and what is summed up meanwhile. E = 2·KV·D: keys and values of a token.
typedef struct {
    floatX *block[2]; // [N, E] keys and values: those that are used, and the next ones on their way
    float *part[2];   // [N, E] gradients of a block's: this rank's part, then all so far, on their way right
    float *arrived;   // [N, E] those that have come from the left
    float *sum;       // [N, A+E]: o [N, A], or the gradients of this rank's own q, k and v
    float *delta;     // [B, H, T]
    double pairs;     // of a query and a key that this rank has computed, of one head, in all passes
} Ring;

// What all blocks with experts share, and what a run says of its routers.
typedef struct {
    floatX *sorted;    // [N·k, C] copies, sorted by expert, on their way
    Growing rows, act; // [M, C], [M, F] what lives within one F or I
    float *margin;     // [R]
    float *dgate;      // [N, k]
    int32_t *count, *host_count,
        *all_counts;  // [E] copies for each expert; and, on the host, those of all ranks of ep [ep, E]
    Work sums, gates; // on their way: of Route.chosen; of dgate
    bool replays;     // the route is there already: a forward is done again
    bool counts;      // it is training: what is routed counts
    // Since the step began, on this rank: moe_observe's [L, E+3] and [L]; the balance loss; and copies that have left the rank,
    // and its groups of experts.
    uint64_t *seen;
    float *least;
    double *balance_loss;
    uint64_t sent, sent_groups;
    uint64_t all_sent, all_received; // copies that went to other ranks, and came, in all passes of F in the run
    float *bias, *host_bias;         // [L, E] --balance bias: what is added to scores, for the choice alone
    struct RouterStep *step;         // of the last step, over all ranks
} Experts;

// What routers did in a step, over all ranks.
typedef struct RouterStep {
    double *tokens; // [L, E] copies by expert
    double load;    // the largest over the mean, of the worst block
    double balance_loss, margin;
    double sent,
        sent_groups; // copies that went to another rank; to an expert in none of the groups of their own rank
    double groups, most_groups; // that a token has met: the mean, and the most
    uint64_t hash;
} RouterStep;

typedef struct {
    Config config;
    Grid grid;
    Param *param;
    int n_params;
    Bucket *bucket;
    int n_buckets, n_dense; // experts' come last, from n_dense on
    int n_units;
    int *bucket_of, *experts_bucket_of, *chunk_of; // [n_units]; −1: another rank's, or none
    int pp_rank;   // place in the pipeline: that of grid.pp, but a dry run answers for each in turn
    Chunk *chunk;  // [virtual_stages]
    long blocks;   // of its largest chunk
    uint64_t data; // fingerprint of the training data
    // Some matrix products have inputs of 16 or fewer bits: the peak that MFU is held against is theirs.
    bool bf16_products;
    size_t parameters; // true count: without the vocabulary's padding
    size_t inactive;   // of them those that a token does not go through: of E − k experts a block

    Ends ends, d_ends;
    Block *block, *d_block; // [L]

    // One micro-batch, as it stands: B · T = N rows.
    size_t B, T;
    int32_t *tokens, *targets;                    // [B, T]; a target of −1 is none
    int32_t *host_tokens, *host_targets, *window; // and one whole sequence [--seq + 1]
    int32_t *positions, *host_positions;          // [T] global position of each local token
    float *rope;                                  // [T, D/2, 2] (llama)
    long loaded;                                  // which of the step's; −1: none
    uint64_t first_sequence;                      // of the micro-batch that is computed: which of the step's
    // And those in flight, by Action.slot, .dout and .head. Under full recomputation acts has x alone; the rest is rebuilt.
    Activations *acts;           // [slots, blocks]
    Activations *rebuilt;        // F's, and where W is put off [1 + douts · blocks]
    OutputGrads *dout;           // [douts, blocks]
    floatX *d_embedding;         // [R, C]: gradient of the embedding's output
    HeadActivations *head;       // [heads]
    float *logit_stats;          // [4, N]: largest on this rank, largest of all, sum of exp, the target's
    float *losses, *host_losses; // [N], and a copy that the host can read
    floatX *temp_c, *temp_f;     // [N, C], [N, F]: what lives within one F or I
    floatX *gathered[2];         // [N, C]: rows that --sp brings together
    void *workspace;             // for kernels,
    size_t workspace_bytes;      // so large
    double *squares; // [n_params + 1]: Σ g² of each parameter on this rank; one more, for a sum over many

    Ring ring;
    Experts experts;

    Plan *plan;                // of a step
    struct Pipeline *pipeline; // messages between stages (pp_1f1b.c)

    // The first parameter whose gradient was not finite on this rank, before any sum (−1: none), and in which micro-batch.
    struct {
        int param;
        long micro;
    } not_finite;

    NormForward *norm_forward;
    NormBackward *norm_backward;
    ActivationForward *act_forward;
    ActivationBackward *act_backward;
} Model;

// A message of values that are floatX; and --no-overlap, which waits for every message where it leaves.
#define FLOAT_X (sizeof(floatX) == 4 ? DTYPE_F32 : DTYPE_BF16)
static inline Work under_way(const Model *m, Work w) {
    if (m->config.no_overlap) comm_wait(w);
    return w;
}

// The optimizer's settings in one step.
typedef struct {
    float lr;
    long step; // from 1
} OptimizerStep;

// ---- fp8_linear.c: a block's linear layers, in floatX or (--fp8) in 8 bits -------------------------------------------------
// As matmul_* of kernels.h: rows M, weight [N,K]; they use m->workspace.
void linear_forward(const Model *m, floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                    size_t M, size_t K, size_t N);
void linear_backward_input(const Model *m, floatX *dinp, const floatX *dout, const floatX *weight, size_t M,
                           size_t K, size_t N);
void linear_backward_weight(const Model *m, floatX *dweight, const floatX *dout, const floatX *inp, size_t M,
                            size_t K, size_t N);
// enough for all three
size_t linear_workspace(const Model *m, size_t M, size_t K, size_t N);
// The same of neighbouring experts' layers, as grouped_gemm_* of kernels.h.
typedef struct {
    const size_t *rows; // [n] of each, host memory
    size_t n, stride;
} Groups;
void linear_forward_grouped(const Model *m, floatX *out, const floatX *inp, const floatX *weight,
                            const floatX *bias, Groups g, size_t K, size_t N);
void linear_backward_input_grouped(const Model *m, floatX *dinp, const floatX *dout, const floatX *weight,
                                   Groups g, size_t K, size_t N);
void linear_backward_weight_grouped(const Model *m, floatX *dweight, const floatX *dout, const floatX *inp,
                                    Groups g, size_t K, size_t N);
size_t linear_workspace_grouped(const Model *m, size_t M, size_t K, size_t N); // of M rows in all

// ---- dp_zero.c: data parallelism -----------------------------------------------------------------------------------------
// Fills the buckets (once), and reserves their weights, gradients and optimizer state (the last at first use with
// --lazy-optimizer).
void dp_reserve(Model *m);
// Around a unit's F, I, W or B. Begin: where the pass reads weights (F and I), they are whole, and the next bucket's are on their
// way; where it adds to gradients (W; of the embedding and the head I), they are ready to be added to. End: once all units of the
// bucket are through, ZeRO-3 lets go of weights, and the sum over ranks of gradients starts (below ZeRO-2, with the last
// micro-batch). A tied embedding's gradient is begun by the head.
void dp_begin(Model *m, int unit, Pass pass);
void dp_end(Model *m, int unit, Pass pass);
// Own weights have changed (initial values, a file's, a step's). Where every rank keeps the whole ones but updates a shard
// (ZeRO-1 and -2), an all-gather a bucket starts; at ZeRO-3 the next dp_begin gathers.
void dp_share_weights(Model *m);
// Remembers the first parameter, as a backward comes by, of which this rank itself had a gradient that is not finite. Before each
// backward: from ZeRO-2 on a look at the last one, which waits for the device; below, gradients are looked at in dp_grad_norm.
void dp_find_not_finite(Model *m);
// Waits for the reductions. The global gradient's L2 norm, over the world, every distinct element counted once.
double dp_grad_norm(Model *m);
// Clips by the norm, takes one AdamW step on what is this rank's own, and shares the weights.
void dp_optimizer_step(Model *m, double grad_norm, OptimizerStep s);

// ---- tp_sp.c: tensor and sequence parallelism ------------------------------------------------------------------------------
// Fills in which slice of p a tp rank holds, whether it is the one that counts it, and whose gradients make the whole.
void tp_slice(const Config *c, Param *p, int rank);
// Memory for gathered rows, and what sums under way take.
void tp_reserve(Model *m);

// Rows on their way: x is there once work is done.
typedef struct {
    floatX *x;
    Work work;
} Rows;
// Into a product that is cut by output (q, k and v; up; the head): all rows [N, C], of which x [R, C] are here. With --sp
// gathered, in m->gathered[place], as two may be needed at a time; without, they are x.
Rows tp_enter(const Model *m, floatX *x, int place);
// Out of a product that is cut by input (out, down): this rank's rows [R, C] of the sum over tp of partial [N, C], inside partial.
Rows tp_exit(const Model *m, floatX *partial);

// From logits [N, Vp], of which each rank has the columns of its slice of the vocabulary, to m->losses [N]; with dloss ≠ 0 the
// logits become their own gradient.
void tp_cross_entropy(const Model *m, floatX *logits, float dloss);
// Of parameters held by several tp ranks of which each has seen a part: sums that part of the gradient which is this rank's
// own, once its sum over dp is there.
void tp_sum_gradients(const Model *m);

// ---- cp_ring.c: context parallelism -------------------------------------------------------------------------------------------
// Which positions of a sequence rank r of cp has, as T local tokens: position [T], ascending.
void cp_positions(const Config *c, int r, size_t T, int32_t *position);
// Of a sequence of so many tokens or more (a sample's first ones), the least T that --cp and --sp can cut.
size_t cp_local_tokens(const Config *c, size_t tokens);
// Memory for what goes round. s here and below: of a rank's own queries and keys, side by side in rows of qkv.
void cp_reserve(Model *m, AttentionShape s);
// Causal flash attention of this rank's queries over the keys of all ranks of cp. qkv [N, A+E], o [N, A], lse [B, H, T].
void cp_attention_forward(Model *m, floatX *o, float *lse, const floatX *qkv, AttentionShape s);
// do_ [N, A] is the gradient of o; dqkv [N, A+E] is written.
void cp_attention_backward(Model *m, floatX *dqkv, const floatX *do_, const floatX *o, const float *lse,
                           const floatX *qkv, AttentionShape s);

// ---- ep_moe.c: mixture of experts ----------------------------------------------------------------------------------------------
// Memory that all blocks with experts share; of one, what it keeps of a route, of F, and leaves of I. For an even load: where more
// copies come, it grows.
void moe_reserve(Model *m);
Route *moe_reserve_route(const Model *m);
ExpertActivations *moe_reserve_activations(const Model *m);
ExpertGrads *moe_reserve_gradients(const Model *m);
// Bytes of these that are in use with M copies.
typedef struct {
    size_t route, activations, gradients;
} ExpertBytes;
ExpertBytes moe_bytes(const Model *m, size_t M);
// F of block l, on a.h2 [R, C] and all rows of it, h [N, C]: decides who goes where (or replays it); sends the copies; and, once
// `sent` is done, computes this rank's experts, sends their outputs home, and writes their weighed sum to part [N, C], or adds it.
void moe_route_tokens(Model *m, long l, Activations a);
Work moe_send(Model *m, Activations a, const floatX *h);
void moe_forward(Model *m, long l, Activations a, Work sent, floatX *part, bool add);
// I, from dy [N, C], the gradient of that sum: sends it to the experts, and writes or adds h's gradient to dh [N, C], a term of a sum over
// tp; the router's part, of which there is one, is added to this rank's rows of that sum, dh2 [R, C].
Work moe_send_gradients(Model *m, Activations a, OutputGrads d, const floatX *dy);
void moe_backward_input(Model *m, long l, Activations a, OutputGrads d, Work sent, floatX *dh, bool add);
void moe_backward_router(const Model *m, long l, OutputGrads d, floatX *dh2);
void moe_backward_weight(const Model *m, long l, Activations a, OutputGrads d);
// Around a step's passes, which alone count. It is over: what its routers did is summed up over all ranks, and --balance bias moves
// its biases.
void moe_begin_step(Model *m);
void moe_end_step(Model *m);

// ---- pp_1f1b.c: pipeline parallelism; its schedules are in pp_1f1b.h ---------------------------------------------------------
// Opens the channels between stages. Collective over pp; not in a dry run.
void pp_connect(Model *m);
// Buffers for what is under way in m->plan, and in any evaluation.
void pp_reserve(Model *m);
// Before the first action of a plan: the first receives are posted. The first time collective over pp: fail_all (exit 3) where
// two ranks' messages do not fit.
void pp_start(Model *m, const Plan *plan);
// What a pass of a chunk begins with, from the neighbouring stage, into x [R, C]: for F the residual stream, else its gradient.
void pp_receive(Model *m, int chunk, Pass pass, floatX *x);
// Where the pass is to write what it hands on [R, C], once the message that left from there before is gone; and: it is written, and
// leaves when its turn has come.
floatX *pp_buffer(Model *m, int chunk, Pass pass);
void pp_send(Model *m, int chunk, Pass pass);
// Where the two ends of a tied embedding are on two ranks: sums this rank's own part of its gradient over both, once its sum over
// dp is there.
void pp_sum_gradients(const Model *m);

#endif

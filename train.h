// The words that all files share, in reading order: what a run is (Config), where a rank stands (Grid), what is learned
// (Param, Bucket), and the model that is trained (Model). Then the strategies, a few prototypes each.
//
// Sizes, everywhere: B sequences a micro-batch, T tokens a sequence, N = B·T rows, C channels (--hidden), H query heads,
// KV key/value heads, D = C/H channels a head, F channels inside the MLP (--ffn), V the vocabulary, Vp padded, L layers.
#ifndef TRAIN_H
#define TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kernels/kernels.h"
#include "runtime/comm.h"
#include "runtime/data.h"
#include "runtime/flags.h"

// ---- What a run is: one field a flag ------------------------------------------------------------------------------
typedef enum { ARCH_GPT2, ARCH_LLAMA } Arch;
#define ARCHS "gpt2|llama"
typedef enum { RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL } Recompute;
typedef enum { ATTENTION_FLASH, ATTENTION_NAIVE } Attention;
typedef enum { MATMUL_FP32, MATMUL_BF16 } MatmulInputs;

typedef struct {
    // model
    int model, arch;
    long layers, heads, kv_heads, hidden, ffn, vocab, seq;
    double rope_theta;
    bool tie;
    // data
    FlagFiles data, val;
    long seed;
    // step
    long micro_batch, accum, batch_tokens, steps, warmup;
    double lr, min_lr, beta1, beta2, weight_decay, grad_clip;
    // parallel
    long ranks, dp;
    // memory and precision
    int recompute, attention, matmul;
    bool grad_accum_fp32, lazy_optimizer;
    // run
    long eval_every, eval_batches, sample, save_every, keep;
    const char *init, *save, *resume, *log;
    double peak_tflops;
    bool dry_run, json, explain, quiet;
    // derived
    long positions; // rows of the learned position table: ≥ seq (gpt2); 0 (llama)
    long padded_vocab;
    long global_batch; // sequences a step, over all ranks
} Config;

// ---- Where a rank stands -------------------------------------------------------------------------------------------
typedef struct {
    Comm *world; // every rank
    Comm *dp;    // the ranks that hold the same parameters and see other sequences
} Grid;

// ---- What is learned -------------------------------------------------------------------------------------------------
// Which way tensor parallelism cuts a tensor: output rows, input columns, or rows by whole (key/value) heads.
typedef enum { SPLIT_NONE, SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_HEADS, SPLIT_KV_HEADS } Split;

typedef struct {
    char name[64];      // "blocks.3.mlp.up.weight"
    int ndim;           // 1: [rows], 2: [rows, cols], row-major, [out, in]
    size_t rows, cols;  // the true shape; cols = 1 where ndim is 1
    size_t padded_rows; // rows in memory: the vocabulary is padded, all else is not
    Split split;
    int bucket;
    size_t offset; // of its first element in the bucket
    float init;    // standard deviation of the initial values; 0: zeros; −1: ones
    size_t place;  // where its address stands in Block or Ends
} Param;

// All parameters of one unit (the embedding, a block, the head) in one flat buffer: what data parallelism reduces.
typedef struct {
    char name[32];
    int first_param, n_params;
    size_t count; // elements
    floatX *weight, *grad;
    float *grad32; // fp32 sum of the micro-batches' gradients (--grad-accum-fp32 in a bf16 build), or NULL
    float *master, *m, *v;  // fp32 weights (bf16 builds) and AdamW's moments
    size_t *decay, n_decay; // ranges of elements that decay: the matrices
} Bucket;

// ---- The model ---------------------------------------------------------------------------------------------------------
// A block's parameters, or their gradients: places in its bucket. q, k and v lie side by side there, as do gate and up,
// so that each set is one matrix.
typedef struct {
    floatX *norm1_weight, *norm1_bias; // [C]; biases exist in gpt2 only
    floatX *qkv_weight, *qkv_bias;     // [(H+2KV)·D, C]
    floatX *out_weight, *out_bias;     // [C, H·D]
    floatX *norm2_weight, *norm2_bias; // [C]
    floatX *up_weight, *up_bias;       // [U, C]; U = F (gpt2), 2F (llama: gate, then up)
    floatX *down_weight, *down_bias;   // [C, F]
} Block;

typedef struct {
    floatX *wte, *wpe;               // [Vp, C], [positions, C] or NULL
    floatX *norm_weight, *norm_bias; // [C]
    floatX *head_weight;             // [Vp, C]; the same place as wte when tied
} Ends;

// What a block's forward keeps for its backward, one micro-batch. On the right, bytes a token and channel where floatX has
// two: gpt2 16 + 4f in all (g = 1), llama 12 + 4g + 6f, with f = F/C and g = KV/H; fp32 statistics come on top.
typedef struct {
    floatX *x;            // [N, C]          the residual stream as it enters                 2
    float *mean1, *rstd1; // [N]
    floatX *h1;           // [N, C]          input of qkv                                     2
    floatX *qkv;          // [N, (H+2KV)·D]  q 2, k and v 4g                                  2 + 4g
    float *lse;           // [B, H, T]       flash: log-sum-exp of each row of scores
    floatX *probs;        // [B, H, T, T]    naive: the softmax output
    floatX *o;            // [N, C]          attention's output                               2
    floatX *x_mid;        // [N, C]          the residual stream between attention and MLP    2
    float *mean2, *rstd2; // [N]
    floatX *h2;           // [N, C]          input of the MLP                                 2
    floatX *up;           // [N, U]          input of the non-linearity                       2f, llama 4f
    floatX *act;          // [N, F]          its output                                       2f
} Activations;

// The gradients of a block's four matrix products' outputs: what W needs, beside activations.
typedef struct {
    floatX *down; // [N, C]: the gradient of the residual stream as it leaves
    floatX *up;   // [N, U]
    floatX *out;  // [N, C]: the same, between MLP and attention
    floatX *qkv;  // [N, (H+2KV)·D]
} OutputGrads;

typedef struct {
    Config config;
    Grid grid;
    Param *param;
    int n_params;
    Bucket *bucket;
    int n_buckets;
    size_t parameters; // true count: without the vocabulary's padding

    Ends ends, d_ends;
    Block *block, *d_block; // [L]

    // One micro-batch, as it stands: B · T = N rows.
    size_t B, T;
    int32_t *tokens, *targets;                    // [B, T]; a target of −1 is none
    int32_t *host_tokens, *host_targets, *window; // and one sequence [T + 1]
    int32_t *positions;                           // [T] global position of each local token
    float *rope;                                  // [T, D/2, 2] (llama)
    Activations *acts;                            // [L + 1]; the last holds the head's x, h1 and statistics
    OutputGrads dout[2];         // block l's is dout[l & 1], the embedding's ("block −1") dout[1]
    floatX *logits;              // [N, Vp], then their gradient
    float *losses, *host_losses; // [N], and a copy that the host can read
    floatX *temp_c, *temp_f;     // [N, C], [N, F]: what lives within one F or I
    void *workspace;             // for kernels

    NormForward *norm_forward;
    NormBackward *norm_backward;
    ActivationForward *act_forward;
    ActivationBackward *act_backward;
} Model;

// The optimizer's settings in one step.
typedef struct {
    float lr;
    long step; // from 1
} OptimizerStep;

// ---- dp_zero.c: data parallelism -----------------------------------------------------------------------------------------
// Reserves the buckets' weights, gradients and optimizer state (the last at first use with --lazy-optimizer).
void dp_reserve(Model *m);
// A step begins: gradients are zero. A micro-batch ends: with fp32 accumulation its gradient joins the sum.
void dp_clear_gradients(Model *m);
void dp_accumulate_gradients(Model *m);
// Sums every bucket's gradient over the data-parallel ranks, one all-reduce a bucket. Call after the last micro-batch.
void dp_reduce_gradients(Model *m);
// The global gradient's L2 norm, every distinct element counted once; call after the reduction.
double dp_grad_norm(Model *m);
// Clips by the norm and takes one AdamW step on every bucket.
void dp_optimizer_step(Model *m, double grad_norm, OptimizerStep s);

#endif

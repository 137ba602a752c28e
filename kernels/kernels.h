// Every operation of the model: what it computes, on which shapes, and what it needs.
//
// One pair of files an operation: NAME.c says what it computes, on the CPU (OpenMP); NAME.cu makes it fast, in CUDA.
// flash_attention holds the naive attention too, layernorm RMSNorm and the residual, gelu SwiGLU. Two have more than one
// .cu: flash_attention (also flash_attention_backward.cu and naive_attention.cu) and fp8_gemm (also fp8_quantize.cu).
// Conventions, those of llm.c:
//  - out, inp, dout, dinp: forward reads inp and writes out; backward reads dout and writes dinp.
//  - gradients of parameters are added (+=), gradients of activations are written (=), except where stated.
//  - N is rows (tokens of a micro-batch, B·T), C channels, V the vocabulary, Vp the vocabulary padded for the kernels.
//  - matrices are row-major, weights are [out, in].
//  - no kernel allocates: NAME_workspace() says how many bytes to hand in as `workspace`, at least; a kernel without
//    such a function needs none.
//  - every backward is deterministic: the same inputs and the same number of threads give the same bits.
//  - statistics (mean, rstd, log-sum-exp, losses) are fp32; sums run in fp32 or wider whatever floatX is.
//  - pointers are to device memory, where there is a device, but for structs; every call is queued on compute_stream.
// Kernels know tensors, never ranks. Callers pass legal sizes (all ≥ 1; flash attention's Tk may be 0); what CUDA or
// cuBLASLt refuses ends the process with one line and exit code 3.
#ifndef KERNELS_H
#define KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "precision.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------
// The work done so far by the matrix products of this process, in floating-point operations (a multiply and an
// add are two), counted where it is done: attention counts the tiles that it really computes.
typedef struct {
    double gemm_forward, gemm_backward, attention_forward, attention_backward;
    double gemm_fp8; // all products of 8-bit numbers, of forward and backward together
} KernelFlops;
extern KernelFlops kernel_flops;

// Round the inputs of matrix products to bf16 (--matmul bf16: autocast's numbers in an fp32 build).
extern bool matmul_inputs_bf16;

// ---------------------------------------------------------------------------------------------------------
// embedding: a row of the token table plus a row of the position table.
// out [B,T,C], tokens [B,T] in [0,V), wte [V,C], wpe [.,C] or NULL, positions [T]: the global position of each
// local token (the same for every sequence).
// Where wte is a slice of the vocabulary, −1 is a token that it does not hold: its row of wte counts as zeros.
void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       const int32_t *positions, size_t B, size_t T, size_t C);
// dwte [V,C] += , dwpe += (or NULL). Tokens are sorted first, so that each row has one owner and no atomics.
// A token of −1 adds nothing to dwte; to dwpe it does.
void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, const int32_t *tokens,
                        const int32_t *positions, size_t B, size_t T, size_t C, size_t V, void *workspace);
size_t embedding_backward_workspace(size_t B, size_t T, size_t C, size_t V);

// ---------------------------------------------------------------------------------------------------------
// layernorm: out = (x − mean) · rstd · weight + bias over each row of C (Ba et al. 2016), and
// rmsnorm: out = x · rstd · weight (Zhang & Sennrich 2019); both with eps = 1e-5 and both fused with the residual
// connection before them: x = inp + residual, stored in sum. Without one, residual and sum are NULL and x = inp.
// All of out, sum, inp, residual are [N,C], weight and bias [C], mean and rstd [N].
// One signature for both, so that the block can hold either by pointer: rmsnorm leaves mean and bias alone (NULL).
typedef void NormForward(floatX *out, float *mean, float *rstd, floatX *sum, const floatX *inp,
                         const floatX *residual, const floatX *weight, const floatX *bias, size_t N, size_t C);
NormForward layernorm_forward, rmsnorm_forward;
// dinp = dresidual + gradient through the norm (dresidual NULL: none); inp is the normalised x (sum, where there was
// a residual). dweight, dbias [C] +=. dinp may be the same array as dresidual, not as dout.
typedef void NormBackward(floatX *dinp, floatX *dweight, floatX *dbias, const floatX *dout,
                          const floatX *dresidual, const floatX *inp, const floatX *weight, const float *mean,
                          const float *rstd, size_t N, size_t C, void *workspace);
NormBackward layernorm_backward, rmsnorm_backward;
size_t norm_backward_workspace(size_t N, size_t C);
// out = a + b, n elements: the residual connection where no norm follows. out may be a or b.
void residual_forward(floatX *out, const floatX *a, const floatX *b, size_t n);

// ---------------------------------------------------------------------------------------------------------
// rope: rotary position embedding (Su et al. 2021), pairing channel i with i + D/2 as Llama does.
// table [T, D/2, 2] = cos, sin of positions[t] · theta^(−2i/D); fill it once.
void rope_table(float *table, const int32_t *positions, size_t T, size_t D, float theta);
// Rotates in place the first `heads` heads of D channels of each token's row; rows are `stride` elements apart.
// x [B,T,stride]. The backward rotates gradients back by the same angles.
void rope_forward(floatX *x, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride);
void rope_backward(floatX *dx, const float *table, size_t B, size_t T, size_t heads, size_t D, size_t stride);

// ---------------------------------------------------------------------------------------------------------
// matmul: out [M,N] = inp [M,K] · weight [N,K]ᵀ + bias [N] (NULL: none).
void matmul_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias, size_t M,
                    size_t K, size_t N, void *workspace);
// dinp [M,K] = dout [M,N] · weight [N,K]
void matmul_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, size_t M, size_t K, size_t N,
                           void *workspace);
// dweight [N,K] += dout [M,N]ᵀ · inp [M,K]
void matmul_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, size_t M, size_t K,
                            size_t N, void *workspace);
// dbias [N] += column sums of dout [M,N]
void matmul_backward_bias(floatX *dbias, const floatX *dout, size_t M, size_t N, void *workspace);
// pre [M,N] as matmul_forward's out, out [M,N] = gelu(pre): one pass over the result less where a library fuses the two
void matmul_gelu_forward(floatX *out, floatX *pre, const floatX *inp, const floatX *weight, const floatX *bias,
                         size_t M, size_t K, size_t N, void *workspace);
// enough for all five
size_t matmul_workspace(size_t M, size_t K, size_t N);

// ---------------------------------------------------------------------------------------------------------
// fp8_gemm: matrix products over 8-bit numbers, each tile of 128 (or 128×128) with an fp32 scale of its own
// (DeepSeek-V3, 2024, §3.3). value = q · scale, scale = amax of the tile / the format's largest (1 for a tile of
// zeros); a quotient beyond the largest saturates. A tile that holds an inf or NaN has a NaN scale, so that none is lost.
typedef uint8_t fp8;
typedef enum { FP8_E4M3, FP8_E5M2 } Fp8Format; // largest 448 and 57,344
enum { FP8_TILE = 128 };
// Scales lie as cuBLASLt wants them: of 1×128 tiles [⌈K/128⌉, M], of 128×128 tiles [⌈N/128⌉, ⌈K/128⌉ rounded up to 4],
// with 0 in the padding.
// q [M,K] and 1×128 scales of x [M,K]: activations, output gradients
void fp8_quantize(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format);
// q [K,M] and 1×128 scales of xᵀ [K,M]: the operands of the weight's gradient, whose sum runs over M
void fp8_quantize_transposed(fp8 *q, float *scale, const floatX *x, size_t M, size_t K, Fp8Format format);
// q [N,K] and 128×128 scales of x [N,K]: weights; q_transposed [K,N] and its scales too where not NULL
void fp8_quantize_blocks(fp8 *q, float *scale, fp8 *q_transposed, float *scale_transposed, const floatX *x,
                         size_t N, size_t K, Fp8Format format);
typedef struct {
    const fp8 *q; // [rows, K]
    const float *scale;
    Fp8Format format;
    bool blocks; // the scales are of 128×128 tiles, not of 1×128
} Fp8Matrix;
// out [M,N] = a [M,K] · b [N,K]ᵀ + bias [N] (NULL: none), or out += (add). The sum over each 128 of K is scaled and joins
// an fp32 sum (promotion, §3.3.2: tensor cores of Hopper keep ~14 bits of it). Counted as gemm_fp8.
void fp8_gemm(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K, size_t N,
              void *workspace);
size_t fp8_gemm_workspace(size_t M, size_t K, size_t N);
// fp8_gemm.c only: the bits that a sum keeps inside each 128 of K (0: all of fp32's), to show what promotion is good for.
extern int fp8_accumulator_bits;

// ---------------------------------------------------------------------------------------------------------
// attention: o = softmax(q kᵀ / √D, keys ≤ query if causal) v, one head at a time; query head h reads the
// key/value head h / (H/KV) (GQA, Ainslie et al. 2023).
// A token's heads lie side by side; consecutive tokens are `*_stride` elements apart, so q, k and v may be three
// places in one [B,T,(H+2KV)·D] row. A batch's sequences follow one another: T · stride elements apart.
typedef struct {
    size_t B, Tq, Tk; // sequences, queries and keys of each (causal: Tq = Tk, query t sees keys 0..t)
    size_t H, KV;     // query heads, key/value heads (KV divides H)
    size_t D;         // channels a head (flash: at most flash_attention_most_channels())
    size_t q_stride, kv_stride, o_stride;
    bool causal;
    // Tokens from one sequence to the next, where queries or keys are a part of longer sequences (0: Tq, Tk).
    // They hold for lse and delta too: head h of sequence b starts at (b·H + h) · q_tokens.
    size_t q_tokens, kv_tokens;
} AttentionShape;

// flash: tiles of the score matrix with an online softmax (Dao et al. 2022, Alg. 1; Dao 2023): the Tq×Tk matrix never
// exists. Keeps lse [B,H,Tq], the log of each row's sum of exponentials, natural log (−inf for a row without keys).
void flash_attention_forward(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace);
// dq, dk, dv written with the strides of q, k, v; do_ with o's. Scores are computed again from lse: five products
// to the forward's two (on CUDA seven: dq has a kernel of its own, so that no gradient needs atomics).
void flash_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *o,
                              const float *lse, const floatX *q, const floatX *k, const floatX *v,
                              AttentionShape s, void *workspace);
size_t flash_attention_workspace(AttentionShape s);
size_t flash_attention_most_channels(void); // 128 on CUDA, SIZE_MAX on a CPU

// Attention over a ring (Liu et al. 2023): the keys come in blocks, one call a block, and the results stay fp32.
// o and lse take the block's part: what they hold of earlier blocks is weighed against it (lse = −inf: nothing yet;
// start with that, and o of any finite value). o has o's strides.
void flash_attention_forward_block(float *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                   AttentionShape s, void *workspace);
// delta [B,H,Tq] = Σ_d do ∘ o, once for all blocks.
void flash_attention_delta(float *delta, const floatX *do_, const floatX *o, AttentionShape s);
// dq, dk, dv += the block's part, p taken from the *final* lse.
void flash_attention_backward_block(float *dq, float *dk, float *dv, const floatX *do_, const float *delta,
                                    const float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, void *workspace);

// naive: keeps the softmax output p [B,H,Tq,Tk]; four products backward. The textbook, and what flash saves. Whole
// sequences only: q_tokens and kv_tokens are ignored.
void naive_attention_forward(floatX *o, floatX *p, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace);
void naive_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *p,
                              const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                              void *workspace);
size_t naive_attention_workspace(AttentionShape s);

// ---------------------------------------------------------------------------------------------------------
// rows: what a ring of keys and values (cp_ring.c) packs, sums and rounds. Rows of C elements stand `stride` ≥ C apart,
// where they are part of wider ones, and begin anywhere in them.
// out [N,C] = the first C of each row of in [N,stride]
void rows_pack(floatX *out, const floatX *in, size_t stride, size_t N, size_t C);
// the first C of each row of sum [N,stride] += part [N,C], fp32
void rows_add(float *sum, size_t stride, const float *part, size_t N, size_t C);
// out [n] = in [n] rounded to floatX; out may be in (fp32 builds)
void rows_round(floatX *out, const float *in, size_t n);
// x [n] = value
void rows_fill(float *x, float value, size_t n);

// ---------------------------------------------------------------------------------------------------------
// moe: what a mixture of experts does beside its MLPs (Shazeer et al. 2017): it routes each of N tokens to k of E experts,
// sorts the copies by expert, and joins what comes back. Copy j of token n is pair n·k + j. All of the router is fp32.
enum { MOE_MOST_EXPERTS = 1024 };
typedef struct {
    size_t experts, topk; // E ≤ MOE_MOST_EXPERTS; k ≤ E
    // Scores are the sigmoid of each logit (DeepSeek-V3), else the softmax over a row. Gates are the scores of the chosen, for
    // k > 1 divided by their sum.
    bool sigmoid;
    // Node-limited routing (DeepSeek-V3, §2.1.2): of `groups` equal groups of neighbouring experts only the best group_limit may
    // be chosen from, by the sum of each one's top max(1, k / group_limit) of score + bias. 1, 1: no groups.
    size_t groups, group_limit;
} MoeRouting;

// The router's product: logits [N,E] = inp [N,C] · weight [E,C]ᵀ, each row summed alike, whatever N is.
void moe_router_forward(float *logits, const floatX *inp, const floatX *weight, size_t N, size_t C, size_t E);
// dinp [N,C] += dlogits [N,E] · weight: what else has used inp is in there already
void moe_router_backward_input(floatX *dinp, const float *dlogits, const floatX *weight, size_t N, size_t C,
                               size_t E);
// dweight [E,C] += dlogits [N,E]ᵀ · inp [N,C]
void moe_router_backward_weight(floatX *dweight, const float *dlogits, const floatX *inp, size_t N, size_t C,
                                size_t E, void *workspace);
size_t moe_router_workspace(size_t N, size_t C, size_t E);

// logits [N,E] become scores, in place. index [N,k]: the experts with the largest score + bias [E] (NULL: 0), the best first, of
// equal ones that with the lower number; NaN counts as the least. gate [N,k]. margin [N]: how much the last one chosen, or the last
// group, is better than the first one left out (INFINITY where none is).
void moe_route(float *logits, int32_t *index, float *gate, float *margin, const float *bias, size_t N,
               MoeRouting r);
// dlogits [N,E] from dgate [N,k]. With factor ≠ 0 the balance loss joins: Σ over sequences and experts of factor · chosen ·
// Σ scores (moe_sequence_sums), so that each score of a row has factor · chosen [B,E] of its sequence in its gradient. Row n is token
// first + n of [B,T].
void moe_route_backward(float *dlogits, const float *dgate, const int32_t *index, const float *gate,
                        const float *scores, const float *chosen, float factor, size_t first, size_t N,
                        size_t T, MoeRouting r);
// sums [2,B,E] =: of the tokens of each sequence that are among the N rows, how many have chosen an expert, and the sum of its
// scores. Rows as above.
void moe_sequence_sums(float *sums, const int32_t *index, const float *scores, size_t first, size_t N, size_t B,
                       size_t T, MoeRouting r);
// *sum += Σ over sequences and experts of chosen · Σ scores, of sums [2,B,E]
void moe_balance_loss(double *sum, const float *sums, size_t B, size_t E);
// What a run says of its router, += over tokens: seen [E] copies by expert; seen[E] a hash of (layer, sequence, position, expert) of
// each copy, the same in whatever order and on whatever ranks they are added up; seen[E+1] groups met, of all tokens;
// seen[E+2] the most that one token has met. *least is the least margin so far. Rows as above, of sequences `sequence`,
// sequence + 1, …; positions [T].
void moe_observe(uint64_t *seen, float *least, const int32_t *index, const float *margin,
                 const int32_t *positions, uint64_t layer, uint64_t sequence, size_t first, size_t N, size_t T,
                 MoeRouting r);

// place [N·k]: where each pair stands when all are sorted by expert, in each by pair. count [E]: copies by expert.
void moe_sort(int32_t *place, int32_t *count, const int32_t *index, size_t pairs, size_t E);
// out [N·k,C]: row place[n·k + j] = (gate[n·k + j] or, gate NULL, 1) · inp [n]
void moe_permute(floatX *out, const floatX *inp, const float *gate, const int32_t *place, size_t N, size_t k,
                 size_t C);
// out [N,C] = or (add) += Σ_j (gate[n·k + j] or 1) · rows [place[n·k + j]], j ascending, rounded once
void moe_combine(floatX *out, const floatX *rows, const float *gate, const int32_t *place, bool add, size_t N,
                 size_t k, size_t C);
// dgate [N,k]: dout [n] · rows [place[n·k + j]]
void moe_gate_backward(float *dgate, const floatX *dout, const floatX *rows, const int32_t *place, size_t N,
                       size_t k, size_t C);

// ---------------------------------------------------------------------------------------------------------
// grouped_gemm: the three products of matmul for several weights at a time, the experts'. The rows of inp and out are those of
// group 0, then of group 1, …: rows[g] of each (host memory; 0 is legal), M in all. Group g's weight [N,K] and bias [N] are at
// weight + g · stride and bias + g · stride (bias NULL: none).
void grouped_gemm_forward(floatX *out, const floatX *inp, const floatX *weight, const floatX *bias,
                          const size_t *rows, size_t groups, size_t stride, size_t K, size_t N,
                          void *workspace);
void grouped_gemm_backward_input(floatX *dinp, const floatX *dout, const floatX *weight, const size_t *rows,
                                 size_t groups, size_t stride, size_t K, size_t N, void *workspace);
// dweight += , of a group without rows nothing
void grouped_gemm_backward_weight(floatX *dweight, const floatX *dout, const floatX *inp, const size_t *rows,
                                  size_t groups, size_t stride, size_t K, size_t N, void *workspace);
// enough for all three, with up to M rows
size_t grouped_gemm_workspace(size_t M, size_t K, size_t N);

// ---------------------------------------------------------------------------------------------------------
// The MLP's non-linearity; one signature for both, so that the block can hold either by pointer.
// gelu (tanh form, Hendrycks & Gimpel 2016): out [N,F], inp [N,F].
// swiglu (Shazeer 2020): out [N,F] = silu(gate) · up; inp [N,2F] with gate in channels 0..F, up in F..2F.
typedef void ActivationForward(floatX *out, const floatX *inp, size_t N, size_t F);
ActivationForward gelu_forward, swiglu_forward;
// dinp has inp's shape. gelu: dinp may be the same array as dout.
typedef void ActivationBackward(floatX *dinp, const floatX *dout, const floatX *inp, size_t N, size_t F);
ActivationBackward gelu_backward, swiglu_backward;

// ---------------------------------------------------------------------------------------------------------
// cross_entropy: losses [N] = log Σ exp(logits) − logits[target], over the whole vocabulary.
// A target [N] of −1 marks a row without one: loss 0, gradient 0.
// logits [N,Vp] become their own gradient, (softmax − onehot) · dloss, 0 in the padding; with dloss = 0 (evaluation,
// sampling) they are left as they are.
// A rank holds a slice of the vocabulary (Megatron-LM, Shoeybi et al. 2019, §3), tokens [first, first + V), in the first V
// columns of rows Vp wide; targets are tokens of the whole. No logit leaves its rank, only three numbers a row do, between
// three steps (a rank that holds all of it has nobody to tell, and hands its own numbers on, max as global_max):
//   cross_entropy_local    max, sum [N] = Σ exp(logits − max), target [N] = the target's logit, 0 where another holds it;
//                          −inf and 0 where all logits are −inf, or there is no target (all-reduce by maximum: global_max)
//   cross_entropy_rescale  sum becomes Σ exp(logits − global_max)          (all-reduce by sum: sum, target)
//   cross_entropy_global   losses, and logits become their gradient, from global_max and the sums over ranks
void cross_entropy_local(float *max, float *sum, float *target, const floatX *logits, const int32_t *targets,
                         int32_t first, size_t N, size_t V, size_t Vp);
void cross_entropy_rescale(float *sum, const float *max, const float *global_max, size_t N);
void cross_entropy_global(float *losses, floatX *logits, const int32_t *targets, int32_t first,
                          const float *global_max, const float *sum, const float *target, float dloss, size_t N,
                          size_t V, size_t Vp);

// ---------------------------------------------------------------------------------------------------------
// adamw (Loshchilov & Hutter 2019), over a whole bucket in one pass: the clip is fused as grad_scale, decay applies
// to n_decay ranges [decay[2i], decay[2i+1]) of elements (matrices), ascending.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    long step;           // counts from 1, for the bias corrections
    const size_t *decay; // host memory
    size_t n_decay;
} AdamW;
// weight [n] is the rounded copy of master [n] (fp32); without masters (fp32 builds) master = NULL and weight is updated.
// The gradient is grad [n], or grad32 [n] where that is not NULL (fp32 accumulation). m, v [n] are the moments.
void adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad, const float *grad32,
                  size_t n, AdamW a);
// acc [n] += grad [n]; grad = 0: a micro-batch's bf16 gradient joins the fp32 sum (--grad-accum-fp32).
void gradient_accumulate(float *acc, floatX *grad, size_t n);

// grad_norm: *sum (device memory too) += Σ grad² in a fixed order of partial sums, whatever the number of threads; the
// gradient is grad [n], or grad32 [n] where that is not NULL.
void grad_norm_squared(double *sum, const floatX *grad, const float *grad32, size_t n, void *workspace);
size_t grad_norm_workspace(size_t n);

#ifdef __cplusplus
}
#endif

#endif

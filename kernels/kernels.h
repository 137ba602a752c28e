// Every operation of the model: what it computes, on which shapes, and what it needs.
//
// One file an operation: NAME.c says what it computes, on the CPU (OpenMP); flash_attention.c holds the naive attention too,
// layernorm.c RMSNorm and the residual, gelu.c SwiGLU.
// Conventions, those of llm.c:
//  - out, inp, dout, dinp: forward reads inp and writes out; backward reads dout and writes dinp.
//  - gradients of parameters are added (+=), gradients of activations are written (=), except where stated.
//  - N is rows (tokens of a micro-batch, B·T), C channels, V the vocabulary, Vp the vocabulary padded for the kernels.
//  - matrices are row-major, weights are [out, in].
//  - no kernel allocates: NAME_workspace() says how many bytes to hand in as `workspace`, at least; a kernel without
//    such a function needs none.
//  - every backward is deterministic: the same inputs and the same number of threads give the same bits.
//  - statistics (mean, rstd, log-sum-exp, losses) are fp32; sums run in fp32 or wider whatever floatX is.
// Kernels know tensors, never ranks, and have no errors of their own: callers pass legal sizes (all ≥ 1).
#ifndef KERNELS_H
#define KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "precision.h"

// ---------------------------------------------------------------------------------------------------------
// The work done so far by the matrix products of this process, in floating-point operations (a multiply and an
// add are two), counted where it is done: attention counts the tiles that it really computes.
typedef struct {
    double gemm_forward, gemm_backward, attention_forward, attention_backward;
} KernelFlops;
extern KernelFlops kernel_flops;

// Round the inputs of matrix products to bf16 (--matmul bf16: autocast's numbers in an fp32 build).
extern bool matmul_inputs_bf16;

// ---------------------------------------------------------------------------------------------------------
// embedding: a row of the token table plus a row of the position table.
// out [B,T,C], tokens [B,T] in [0,V), wte [V,C], wpe [.,C] or NULL, positions [T]: the global position of each
// local token (the same for every sequence).
void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       const int32_t *positions, size_t B, size_t T, size_t C);
// dwte [V,C] += , dwpe += (or NULL). Tokens are sorted first, so that each row has one owner and no atomics.
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
// enough for all four
size_t matmul_workspace(size_t M, size_t K, size_t N);

// ---------------------------------------------------------------------------------------------------------
// attention: o = softmax(q kᵀ / √D, keys ≤ query if causal) v, one head at a time; query head h reads the
// key/value head h / (H/KV) (GQA, Ainslie et al. 2023).
// A token's heads lie side by side; consecutive tokens are `*_stride` elements apart, so q, k and v may be three
// places in one [B,T,(H+2KV)·D] row. A batch's sequences follow one another: T · stride elements apart.
typedef struct {
    size_t B, Tq, Tk; // sequences, queries and keys of each (causal: Tq = Tk, query t sees keys 0..t)
    size_t H, KV, D;  // query heads, key/value heads (KV divides H), channels a head
    size_t q_stride, kv_stride, o_stride;
    bool causal;
} AttentionShape;

// flash: tiles of the score matrix with an online softmax (Dao et al. 2022, Alg. 1; Dao 2023): the Tq×Tk matrix never
// exists. Keeps lse [B,H,Tq], the log of each row's sum of exponentials, natural log (−inf for a row without keys).
void flash_attention_forward(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace);
// dq, dk, dv written with the strides of q, k, v; do_ with o's. Scores are computed again from lse: five products
// to the forward's two.
void flash_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *o,
                              const float *lse, const floatX *q, const floatX *k, const floatX *v,
                              AttentionShape s, void *workspace);
size_t flash_attention_workspace(AttentionShape s);

// naive: keeps the softmax output p [B,H,Tq,Tk]; four products backward. The textbook, and what flash saves.
void naive_attention_forward(floatX *o, floatX *p, const floatX *q, const floatX *k, const floatX *v,
                             AttentionShape s, void *workspace);
void naive_attention_backward(floatX *dq, floatX *dk, floatX *dv, const floatX *do_, const floatX *p,
                              const floatX *q, const floatX *k, const floatX *v, AttentionShape s,
                              void *workspace);
size_t naive_attention_workspace(AttentionShape s);

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
// cross_entropy: losses [N] = log Σ exp(logits) − logits[target], over the true vocabulary V of rows Vp wide.
// A target of −1 marks a row without one: loss 0, gradient 0.
// logits [N,Vp] become their own gradient, (softmax − onehot) · dloss, 0 in the padding; with dloss = 0 (evaluation,
// sampling) they are left as they are.
void cross_entropy_forward_backward(float *losses, floatX *logits, const int32_t *targets, float dloss,
                                    size_t N, size_t V, size_t Vp);

// ---------------------------------------------------------------------------------------------------------
// adamw (Loshchilov & Hutter 2019), over a whole bucket in one pass: the clip is fused as grad_scale, decay applies
// to n_decay ranges [decay[2i], decay[2i+1]) of elements (matrices), ascending.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    long step; // counts from 1, for the bias corrections
    const size_t *decay;
    size_t n_decay;
} AdamW;
// weight [n] is the rounded copy of master [n] (fp32); without masters (fp32 builds) master = NULL and weight is updated.
// The gradient is grad [n], or grad32 [n] where that is not NULL (fp32 accumulation). m, v [n] are the moments.
void adamw_update(floatX *weight, float *master, float *m, float *v, const floatX *grad, const float *grad32,
                  size_t n, AdamW a);
// acc [n] += grad [n]; grad = 0: a micro-batch's bf16 gradient joins the fp32 sum (--grad-accum-fp32).
void gradient_accumulate(float *acc, floatX *grad, size_t n);

// grad_norm: *sum += Σ grad² in a fixed order of partial sums, whatever the number of threads; the gradient is grad [n],
// or grad32 [n] where that is not NULL.
void grad_norm_squared(double *sum, const floatX *grad, const float *grad32, size_t n, void *workspace);
size_t grad_norm_workspace(size_t n);

#endif

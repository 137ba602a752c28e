// The earlier rungs of each kernel's ladder, slow to fast: the operation's signature, a suffix, and one line "what changed".
// The tests hold each to the same bars as the operation; dev/bench/kernels.py times them side by side.
#ifndef LADDER_H
#define LADDER_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// layernorm_forward, from a thread a row over a warp a row to what stands in layernorm.cu
NormForward layernorm_forward_naive, layernorm_forward_warp;
// gelu_forward, an element a thread
ActivationForward gelu_forward_naive;

// cross_entropy
// naive: the three steps in one, of a vocabulary that is not cut: three passes over a row, its maximum, its sum and its
// gradient, an element at a time. Then maximum and sum in one pass, 16 bytes a load.
void cross_entropy_naive(float *losses, floatX *logits, const int32_t *targets, float dloss, size_t N, size_t V,
                         size_t Vp);

// adamw
// naive: an element a thread, a launch for each piece of the bucket that decays or does not. Then one launch, 4 elements a
// thread.
void adamw_update_naive(floatX *weight, float *master, float *m, float *v, const floatX *grad,
                        const float *grad32, size_t n, AdamW a);

// matmul_backward_bias
// naive: a thread a column. Then a warp a strip of columns, 16 bytes a load, and partial sums, so that all of the GPU reads.
void matmul_backward_bias_naive(floatX *dbias, const floatX *dout, size_t M, size_t N, void *workspace);

// fp8_gemm
// naive: a thread an element, which decodes as it goes. mma: tiles in shared memory, tensor cores; what fp8_gemm itself does
// wherever cuBLASLt has no kernel for such scales.
void fp8_gemm_naive(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                    size_t N, void *workspace);
void fp8_gemm_mma(floatX *out, Fp8Matrix a, Fp8Matrix b, const floatX *bias, bool add, size_t M, size_t K,
                  size_t N, void *workspace);

// flash_attention_forward
// plain: tiles of fp32 numbers, no tensor cores. single: tensor cores (bf16 builds), one buffer for a tile of keys: it is
// waited for, then multiplied. Then two, so that one tile is loaded while another is multiplied. (Before all: naive_attention.)
void flash_attention_forward_plain(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                   AttentionShape s, void *workspace);
void flash_attention_forward_single(floatX *o, float *lse, const floatX *q, const floatX *k, const floatX *v,
                                    AttentionShape s, void *workspace);

#ifdef __cplusplus
}
#endif

#endif

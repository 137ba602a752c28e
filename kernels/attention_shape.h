// What an AttentionShape means, for both halves of attention.
#ifndef ATTENTION_SHAPE_H
#define ATTENTION_SHAPE_H

#include "kernels/kernels.h"

// Where head h of token t of sequence b starts.
PRECISION_FUNCTION size_t at(size_t b, size_t tokens, size_t t, size_t stride, size_t h, size_t D) {
    return (b * tokens + t) * stride + h * D;
}

// s with what 0 stands for.
PRECISION_FUNCTION AttentionShape with_tokens(AttentionShape s) {
    if (s.q_tokens == 0) s.q_tokens = s.Tq;
    if (s.kv_tokens == 0) s.kv_tokens = s.Tk;
    return s;
}

#endif

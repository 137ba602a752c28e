// embedding: a token becomes the row of the token table that it names, plus the row of its position.
//
// Backward, a row of the table gathers the gradients of every place where its token stands:
//
//     tokens   7 2 7 7 2          sorted   2: places 1 4        row 2 += dout[1] + dout[4]
//     place    0 1 2 3 4                   7: places 0 2 3      row 7 += dout[0] + dout[2] + dout[3]
//
// Added as they come, two threads could meet in one row: atomics, and a sum in another order each time. Instead the
// places are sorted by token (a counting sort), each row has one owner, and its sum runs in the order of the places,
// in fp32, and joins the table in one rounding.
// A token of −1 has its row on another rank: here it stands for a row of zeros, and is not among the sorted places.
// Cost: reads and writes N·C elements; the sort is O(N + V) and not worth a second thread.
#include "kernels/kernels.h"

void embedding_forward(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                       const int32_t *positions, size_t B, size_t T, size_t C) {
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < B; b++) {
        for (size_t t = 0; t < T; t++) {
            size_t n = b * T + t;
            floatX *o = out + n * C;
            const floatX *token = tokens[n] < 0 ? NULL : wte + (size_t)tokens[n] * C;
            const floatX *position = wpe ? wpe + (size_t)positions[t] * C : NULL;
            if (!token && !position) {
                memset(o, 0, C * sizeof *o);
                continue;
            }
            if (!token || !position) {
                memcpy(o, token ? token : position, C * sizeof *o);
                continue;
            }
#pragma omp simd
            for (size_t c = 0; c < C; c++) o[c] = to_floatX(to_float(token[c]) + to_float(position[c]));
        }
    }
}

enum { CHANNELS = 64 }; // of a row, summed at a time: the partial sum stays in the L1 cache

// row [width] += Σ dout[place] over `count` places; dout points at the first of these channels, its rows are C wide.
// places NULL: every `step`-th row instead, from row 0.
static void add_rows(floatX *row, const floatX *dout, const size_t *places, size_t step, size_t count, size_t C,
                     size_t width) {
    float sum[CHANNELS] = {0};
    for (size_t i = 0; i < count; i++) {
        const floatX *d = dout + (places ? places[i] : i * step) * C;
#pragma omp simd
        for (size_t c = 0; c < width; c++) sum[c] += to_float(d[c]);
    }
#pragma omp simd
    for (size_t c = 0; c < width; c++) row[c] = to_floatX(to_float(row[c]) + sum[c]);
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

void embedding_backward(floatX *dwte, floatX *dwpe, const floatX *dout, const int32_t *tokens,
                        const int32_t *positions, size_t B, size_t T, size_t C, size_t V, void *workspace) {
    size_t N = B * T;
    size_t *end = workspace;  // [V], while sorting: where the next place of each token goes; after it: its end
    size_t *places = end + V; // those whose token has its row here, sorted by token: `held` of N
    size_t held = 0;
    memset(end, 0, V * sizeof *end);
    for (size_t i = 0; i < N; i++)
        if (tokens[i] >= 0) end[tokens[i]]++;
    for (size_t v = 0; v < V; v++) {
        size_t count = end[v];
        end[v] = held;
        held += count;
    }
    for (size_t i = 0; i < N; i++)
        if (tokens[i] >= 0) places[end[tokens[i]]++] = i;

#pragma omp parallel
    {
        // dynamic, because one token may stand in most places
#pragma omp for collapse(2) schedule(dynamic, 16) nowait
        for (size_t i = 0; i < held; i++) {
            for (size_t c = 0; c < C; c += CHANNELS) {
                int32_t token = tokens[places[i]];
                bool first = i == 0 || tokens[places[i - 1]] != token;
                if (first)
                    add_rows(dwte + (size_t)token * C + c, dout + c, places + i, 0, end[token] - i, C,
                             smaller(CHANNELS, C - c));
            }
        }
        if (dwpe) {
            // a position stands once in each sequence
#pragma omp for collapse(2)
            for (size_t t = 0; t < T; t++) {
                for (size_t c = 0; c < C; c += CHANNELS)
                    add_rows(dwpe + (size_t)positions[t] * C + c, dout + t * C + c, NULL, T, B, C,
                             smaller(CHANNELS, C - c));
            }
        }
    }
}

size_t embedding_backward_workspace(size_t B, size_t T, size_t C, size_t V) {
    (void)C;
    return (V + B * T) * sizeof(size_t);
}

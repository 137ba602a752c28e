"""Can the tests fail? Each mutant is one named break in a copy of the tree; some test must notice it (make mutants).

A mutant is (file, what stands there, what takes its place, the tests that should notice). The copy takes the built objects
along, so that only what the break touches is compiled again.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, build
from kernels import PRECISIONS, library

LAW = "tests/test_law.py::test_random_layouts"
RANKS = "tests/test_law.py::test_every_pair_of_options"
TEN_STEPS = "tests/test_oracle.py::test_ten_steps"
GRADIENTS = "tests/test_oracle.py::test_gradients"

SUMS = "tests/test_law.py::test_many_micro_batches_two_orders_of_sums"
SENT = "tests/test_memory.py::test_bytes_sent_are_counted"
HELD = "tests/test_memory.py::test_bytes_held_by_zero_stage"
RESHARD = "tests/test_resume.py::test_from_any_layout_into_any_other"
NOT_A_NUMBER = "tests/test_cases.py::test_not_a_number_on_one_rank"
REPLICA = "tests/test_cases.py::test_one_replica_differs"
COPIES = f"{REPLICA}_over_tp"
PROGRAM, PRODUCTS = "tests/test_emu_program.py", "tests/test_fp8.py::test_error_of_the_three_products"
COLLECTIVES, DEVICE = "tests/test_comm.py::test_collectives[2]", "tests/test_comm.py::test_collectives_on_a_device"
PIPE, ALL_ELSE = f"{PROGRAM}::test_a_pipeline_over_nccl", f"{PROGRAM}::test_a_pipeline_with_all_else"
SAMPLE = "tests/test_resume.py::test_the_same_weights_whoever_holds_them"
NO_BIT, STAGES = "tests/test_law.py::test_a_pipeline_moves_no_bit[False-llama]", "tests/test_memory.py::test_pipelines"
SCHEDULES = "tests/test_units.py::test_units[test_schedule-fp32]"
LARGE = "megabytes=9,precision=bf16,accum_fp32={},recompute=none,attention=naive,c={}"  # of STAGES
LARGE_ZB = LARGE.format(False, "{'pp': 2, 'schedule': 'zb-h1', 'accum': 3, 'arch': 'llama', 'tie': False},dp=2,zero=2")
LARGE_ZBV = LARGE.format(True, "{'pp': 2, 'schedule': 'zbv', 'v': 2, 'accum': 3, 'layers': 6},dp=2,zero=3")
CONTEXT = "tests/test_context.py"
RING, RING_DEVICE, RING_ERROR = (f"{CONTEXT}::{test}" for test in (
    "test_ring[3-fp32]", "test_ring_on_a_device", "test_error_of_bf16[cpu-8-768]"))
PARTS, MESSAGES = f"{CONTEXT}::test_the_same_model", f"{CONTEXT}::test_every_message_and_every_pair"
EXPERTS = "tests/test_experts.py"
FIVE, SENT_EP = f"{EXPERTS}::test_five_dimensions", f"{EXPERTS}::test_bytes_are_what_the_routing_says"
EXTREME, ROOM = f"{EXPERTS}::test_all_tokens_to_one_rank_or_two", f"{EXPERTS}::test_bytes_held_of_experts"
ROUTER = "tests/test_oracle.py::test_gradients_of_experts"
MOVED, MESH = f"{EXPERTS}::test_a_checkpoint_goes_to_any_number_of_ranks", "tests/test_comm.py::test_in_larger_rings"
UNITS, FP8, CHECK = "tests/test_units.py", "tests/test_cuda_fp8.py", "tests/test_emu_check.py"

MUTANTS = {
    # data parallelism: what is summed, when
    "a bucket is not reduced": (
        "dp_zero.c", "    square_gradients(m, b);\n    void *whole", "    if (i == 1) return;\n    void *whole",
        LAW),
    "the sum over ranks comes a micro-batch early": (
        "dp_zero.c", "b->summed < m->config.accum) return;", "b->summed + 1 < m->config.accum) return;", RANKS),
    "ZeRO-1 reduces after every micro-batch": (
        "dp_zero.c", "if (m->config.zero < 2 && b->summed < m->config.accum)",
        "if (m->config.zero < 1 && b->summed < m->config.accum)", RANKS),
    "ZeRO-2 reduces after the last micro-batch alone": (
        "dp_zero.c", "if (m->config.zero < 2 && b->summed < m->config.accum)",
        "if (m->config.zero < 3 && b->summed < m->config.accum)", RANKS),
    "the shard's sum is not carried on": (
        "dp_zero.c", "device_copy(b->grad + b->own, b->own_grad, own_count(b) * sizeof(floatX));", ";", RANKS),
    "the shard's fp32 sum is not carried on": (
        "dp_zero.c", "device_copy(b->grad32 + b->own, b->own_grad32, own_count(b) * sizeof(float));", ";", SUMS),
    "the shard's sum is carried to the bucket's start": (
        "dp_zero.c", "device_copy(b->grad + b->own, b->own_grad,", "device_copy(b->grad, b->own_grad,", RANKS),
    "accumulated gradients are not cleared": (
        "dp_zero.c", "device_zero(b->grad, b->count * sizeof(floatX));\n    if (b->grad32) device_zero",
        "if (b->grad32) device_zero", TEN_STEPS),
    "fp32 sums are not cleared": (
        "dp_zero.c", "if (b->grad32) device_zero(b->grad32, b->count * sizeof(float));", "", SUMS),
    "fp32 sums travel as bf16": (
        "dp_zero.c", "DType type = b->grad32 ? DTYPE_F32 : FLOAT_X;", "DType type = FLOAT_X;", SENT),
    "a tied embedding is done with the head": (
        "dp_zero.c", "if (b->chunk < 0)\n        end_bucket", "if (true)\n        end_bucket", RANKS),
    "a tied embedding begins anew after the head": (
        "dp_zero.c", "if (b->open) return;", "if (b->open && i) return;", RANKS),
    "the embedding's reduction is not waited for": (
        "dp_zero.c", "i >= 0; i--) finish_reduction", "i > 0; i--) finish_reduction", LAW),
    "a slot is taken before its reduction is done": (
        "dp_zero.c", "if (m->bucket[j].grad == b->grad) finish_reduction(m, j);",
        "if (j == i) finish_reduction(m, j);", "tests/test_emu_program.py::test_slots_that_buckets_share[2-nccl-1]"),
    # ... where the weights are
    "new weights are not shared": ("dp_zero.c", "        share_weights(m, i);\n        comm_progress();", "", RANKS),
    "old weights stay": ("dp_zero.c", "set_whole(m, i, m->config.zero == 0);", "set_whole(m, i, true);", RANKS),
    "the next weights take the slot in use": (
        "dp_zero.c", "next = pass == PASS_F ? i + 1 : i - 1", "next = pass == PASS_F ? i + 2 : i - 2", RANKS),
    "weights are not gathered for I": (
        "dp_zero.c", "return pass == PASS_F || (pass != PASS_W && unit > 0);", "return pass == PASS_F;", RANKS),
    "who lost the slot does not know": ("dp_zero.c", "set_whole(m, j, false); //", "; //", RANKS),
    "weights are gathered for the embedding's backward": (
        "dp_zero.c", "return pass == PASS_F || (pass != PASS_W && unit > 0);", "return pass != PASS_W;", SENT),
    "what is still whole is gathered again": ("dp_zero.c", "    if (b->whole) return;\n", "", SENT),
    "buckets are numbered from the back": (
        "dp_zero.c", "    free(joined);\n", "    free(joined);\n    for (int u = 1; u < m->n_units; u++)\n"
        "        if (m->bucket_of[u] > 0) m->bucket_of[u] = m->n_buckets - m->bucket_of[u];\n", SENT),
    "blocks never share a bucket": ("dp_zero.c", "joined[u] ? m->n_buckets - 1 : m->n_buckets++;", "m->n_buckets++;", HELD),
    # ... and the step
    "the norm counts all that is a rank's own": (
        "dp_zero.c", "begin = begin > b->shard ? begin : b->shard;", "begin = begin > b->shard ? begin : b->own;",
        RANKS),
    "the norm is of the bucket's start": (
        "dp_zero.c", "b->own_grad + (begin - b->own) : NULL", "b->own_grad : NULL", RANKS),
    "the norm is a rank's own": ("dp_zero.c", "sqrt(comm_sum(m->grid.world, squares))", "sqrt(squares)", LAW),
    "the norm is of one slice": (
        "dp_zero.c", "comm_sum(m->grid.world, squares)", "comm_sum(m->grid.dp, squares)", RANKS),
    "the norm counts every copy of a norm": ("dp_zero.c", "if (!is_in(m, p, b) || !p->counted) continue;", "if (!is_in(m, p, b)) continue;", RANKS),
    "the clip forgets the norm": ("dp_zero.c", "c->grad_clip / grad_norm : 1", "c->grad_clip : 1", TEN_STEPS),
    "decay is not cut to the shard": ("dp_zero.c", "if (end > b->own_end) end = b->own_end;", "", RANKS),
    "decay is counted from the bucket's start": (
        "dp_zero.c", "b->decay[2 * b->n_decay] = begin - b->own;", "b->decay[2 * b->n_decay] = begin;", RANKS),
    "vectors decay like matrices": (
        "dp_zero.c", "!is_in(m, p, b) || p->ndim == 1 || begin >= end", "!is_in(m, p, b) || begin >= end", TEN_STEPS),
    # what is found out
    "replicas are not compared": ("state.c", "if (holders == 0) return;", "if (holders >= 0) return;", REPLICA),
    "another rank's replica is blamed": (
        "state.c", "odd = r, fewest = alike", "odd = ranks - 1 - r, fewest = alike", REPLICA),
    "copies over tp are not compared": (
        "state.c", "return slice * (uint64_t)holders->size",
        "return (slice + (uint64_t)m->grid.tp->rank) * (uint64_t)holders->size", COPIES),
    "slices are compared with each other": (
        "state.c", "uint64_t slice = p->row * p->cols + p->col,", "uint64_t slice = 0 * p->row,", RANKS),
    "shards are compared with each other": (
        "state.c", "shard = whole ? 0 : (uint64_t)holders->rank;", "shard = whole ? 0 : 0;", COPIES),
    "a NaN is looked for after the sum": (
        "dp_zero.c", "    square_gradients(m, b);\n    void *whole",
        "    if (!b->grad32) comm_wait(comm_all_reduce(m->grid.dp, b->grad, b->count, FLOAT_X));\n"
        "    square_gradients(m, b);\n    void *whole",
        NOT_A_NUMBER),
    "the last rank with a NaN is named": (
        "train_gpt2.cu", "* world->size + world->rank;", "* world->size - world->rank;",
        "tests/test_cases.py::test_not_a_number_at_every_stage"),
    "the first micro-batch is always named": (
        "dp_zero.c", "m->not_finite.micro = m->bucket[m->param[i].bucket].summed;", "m->not_finite.micro = 1;",
        NOT_A_NUMBER),
    # the step
    "the loss is scaled by a rank's own batch": (
        "train_gpt2.cu", "(float)(1 / tokens)", "(float)((double)m->grid.dp->size / tokens)", RANKS),
    "ranks see the same sequences": (
        "train_gpt2.cu", "(uint64_t)(m->grid.dp->rank / c->cp)) * m->B + b;", "0) * m->B + b;", LAW),
    "the warm-up starts at zero": ("train_gpt2.cu", "c->lr * (double)(step + 1)", "c->lr * (double)step", TEN_STEPS),
    "nothing is computed again": ("train_gpt2.cu", "        block_recompute(m, unit - 1, acts, dx);\n", "", GRADIENTS),
    "rows past the validation set count": (
        "train_gpt2.cu", "if (w >= (uint64_t)n) memset(", "if (w > (uint64_t)n) memset(",
        "tests/test_run.py::test_evaluation_is_the_same_everywhere"),
    "a NaN is trained on": (
        "train_gpt2.cu", "if (!isfinite(r.loss) || !isfinite(r.grad_norm))", "if (r.loss > 1e30)",
        "tests/test_cases.py::test_alone"),
    "all tensors start alike": (
        "state.c", "return mix(seed) ^ h;", "return mix(seed);", "tests/test_run.py::test_initial_values"),
    # tensor and sequence parallelism: slices
    "every tp rank holds the first slice": ("tp_sp.c", "slice = rank / holders;", "slice = 0 * rank / holders;", RANKS),
    "key/value heads go round": ("tp_sp.c", "slice = rank / holders;", "slice = rank % slices;", RANKS),
    "the first columns are everybody's": ("tp_sp.c", "p->col = by_columns ? begin : 0;", "p->col = 0;", RANKS),
    "copies of key/value heads are counted": (
        "tp_sp.c", "p->counted = rank % holders == 0;", "p->counted = slices > 1 || rank == 0;", RANKS),
    "all slices start as the first one": ("state.c", "(p->row + i / p->slice_cols)", "(i / p->slice_cols)", RANKS),
    "slices of columns start as the first one": ("state.c", "p->col + i % p->slice_cols", "i % p->slice_cols", RANKS),
    "a token is a row, whoever has it": (
        "train_gpt2.cu", "size_t row = (size_t)*t - wte->row;", "size_t row = (size_t)*t;", RANKS),
    "tp ranks see other sequences": (
        "train_gpt2.cu", "(uint64_t)(m->grid.dp->rank / c->cp))", "(uint64_t)(m->grid.world->rank / c->cp))", RANKS),
    # ... and sums
    "key/value heads' gradients stay parts": (
        "tp_sp.c", "p->split == SPLIT_KV_HEADS || rows_are_cut ?", "p->split != SPLIT_KV_HEADS && rows_are_cut ?",
        RANKS),
    "norms' gradients stay parts": (
        "tp_sp.c", "p->split == SPLIT_KV_HEADS || rows_are_cut ?", "p->split == SPLIT_KV_HEADS ?", RANKS),
    "positions are summed by all who have seen all rows": (
        "tp_sp.c", "c->sp && p->unit > 0 &&", "c->sp &&", RANKS),
    "norms are summed where all ranks see all rows": ("tp_sp.c", "c->sp && p->unit > 0 &&", "p->unit > 0 &&", RANKS),
    "a run begins with the bucket": ("tp_sp.c", "size_t at = begin - b->own;", "size_t at = 0;", RANKS),
    "a run stops in its last parameter": (
        "tp_sp.c", "run->end = p->offset + p->size;", "run->end = p->offset + (p->size > 1 ? p->size / 2 : 1);", RANKS),
    "gathers over tp overlap whatever --no-overlap says": (
        "tp_sp.c", "under_way(m, comm_all_gather(m->grid.tp, all, x, count, FLOAT_X))",
        "comm_all_gather(m->grid.tp, all, x, count, FLOAT_X)", "tests/test_cases.py::test_no_overlap_over_tp"),
    "every rank takes the first rows": ("tp_sp.c", "return (Rows){here,", "return (Rows){partial,", RANKS),
    "attention's biases are added by all": ("train_gpt2.cu", "once(m, w->out_bias)", "w->out_bias", RANKS),
    "the MLP's biases are added by all": ("train_gpt2.cu", "once(m, w->down_bias)", "w->down_bias", RANKS),
    "positions are added by all": ("train_gpt2.cu", "once(m, m->ends.wpe)", "m->ends.wpe", RANKS),
    "what W needs takes the place of what I needs": (
        "train_gpt2.cu", "h = tp_enter(m, a.h2, 1);", "h = tp_enter(m, a.h2, 0);", RANKS),
    "the loss is counted by every tp rank": (
        "train_gpt2.cu", "if (m->grid.tp->rank > 0) sums[LOSS] = 0;", ";", RANKS),
    # ... and the loss
    "a slice's sum is not rescaled": ("tp_sp.c", "cross_entropy_rescale(sum, max, global_max, N);", ";", RANKS),
    "the largest logit is this rank's": (
        "tp_sp.c", "comm_wait(comm_all_reduce_max(m->grid.tp, global_max, N));", ";", RANKS),
    "the target's logit is one rank's alone": ("tp_sp.c", "m->grid.tp, sum, 2 * N,", "m->grid.tp, sum, N,", RANKS),
    "each slice counts its tokens from zero": (
        "tp_sp.c", "first = (int32_t)wte->row;", "first = (int32_t)(0 * wte->row);", RANKS),
    # context parallelism: who has which tokens
    "zigzag ranks have neighbouring tokens": (
        "cp_ring.c", "c->cp_order == ORDER_CONTIGUOUS ? (size_t)r * T + t", "c->cp >= 1 ? (size_t)r * T + t", RING),
    "contiguous ranks have two chunks": ("cp_ring.c", "c->cp_order == ORDER_CONTIGUOUS ? ", "c->cp < 1 ? ", RING),
    "the later chunk is from the start": ("cp_ring.c", "(size_t)(2 * c->cp - 1 - r) * half;", "(size_t)(c->cp + r) * half;", RING),
    "an odd number is cut in two, and over tp": ("cp_ring.c", "if (tp % step != 0) tp *= step;", "", RING),
    "too few tokens are handed out": ("cp_ring.c", "(tokens + cp - 1) / cp + step - 1", "tokens / cp + step - 1", RING),
    "a token's target is the next one here": (
        "train_gpt2.cu", "window[m->host_positions[t] + 1];", "window[m->host_positions[t + 1 < m->T ? t + 1 : t]];", PARTS),
    "all cp ranks have the first part": (
        "train_gpt2.cu", "cp_positions(&m->config, m->grid.cp->rank, T,", "cp_positions(&m->config, 0, T,", PARTS),
    "positions count the tokens here": (
        "train_gpt2.cu", "device_copy_in(m->positions, m->host_positions, T * sizeof(int32_t));",
        "for (size_t t = 0; t < T; t++) device_copy_in(m->positions + t, &(int32_t){(int32_t)t}, 4);", PARTS),
    "cp ranks see other sequences": (
        "train_gpt2.cu", "(uint64_t)(m->grid.dp->rank / c->cp))", "(uint64_t)(m->grid.dp->rank % c->dp))", PARTS),
    "gradients are summed over dp alone": (
        "train_gpt2.cu", "g->dp = comm_split(g->world, rank / in_stage * tp + rank % tp,",
        "g->dp = comm_split(g->world, rank / in_stage * tp * cp + rank % (tp * cp),", PARTS),
    "the loss is scaled by what one cp rank has": (
        "train_gpt2.cu", "double tokens = (double)c->global_batch * (double)c->seq;",
        "double tokens = (double)c->global_batch * (double)c->local_seq;", PARTS),
    "shards are of dp ranks": (
        "dp_zero.c", ": m->config.dp_cp);", ": m->config.dp);", PARTS),
    "a sample's positions are the first ones'": (
        "train_gpt2.cu", "if (here != m->T) set_positions(m, here);", "m->T = here;", PARTS),
    "every cp rank's last token is the last one": (
        "train_gpt2.cu", "(size_t)m->host_positions[last] != seen - 1) last++;", "last + 1 < m->T) last++;", PARTS),
    "only who has the last token knows the next": (
        "train_gpt2.cu", "comm_sum(m->grid.cp, comm_sum(m->grid.pp, token))", "comm_sum(m->grid.pp, token)", PARTS),
    # ... who meets whom
    "who is before is taken for who is behind": (
        "cp_ring.c", "before = step <= m->grid.cp->rank;", "before = step > m->grid.cp->rank;", RING),
    "one rank too few is before": ("cp_ring.c", "before = step <= m->grid.cp->rank;", "before = step < m->grid.cp->rank;", RING),
    "early queries see late keys": ("cp_ring.c", "        meet.keys = T / 2;", "        ;", RING),
    "the first half of the queries sees the keys behind it": (
        "cp_ring.c", "meet.query = meet.queries = T / 2;", "meet.queries = T / 2;", RING),
    "all queries see the keys between": ("cp_ring.c", "meet.query = meet.queries = T / 2;", ";", RING),
    "queries meet the second half of earlier keys": (
        "cp_ring.c", "        Keys x = keys_of(m, s, step, qkv);\n        if (meet.queries)",
        "        Keys x = keys_of(m, s, step, qkv);\n        if (meet.keys < s.Tq) x.k += meet.keys * x.stride;\n"
        "        if (meet.queries)", RING),
    "the second half of earlier keys has the gradient": (
        "cp_ring.c", "        if (step > 0) device_zero(x.dk, n * sizeof(float));",
        "        if (step > 0) device_zero(x.dk, n * sizeof(float));\n"
        "        if (meet.keys < s.Tq) x.dk += meet.keys * x.stride;", RING),
    "later ranks' keys are seen": ("cp_ring.c", "        meet.queries = 0;", "        ;", RING),
    "a rank's own keys are seen by all": ("cp_ring.c", "        meet.causal = true;", "        ;", RING),
    "all blocks are causal": ("cp_ring.c", "    s.causal = meet.causal;\n", "", RING),
    "a part of a sequence is a sequence": ("cp_ring.c", "    s.q_tokens = s.kv_tokens = s.Tq;\n", "", RING),
    "a token's values are the next one's keys": (
        "cp_ring.c", "step == 0 ? s.q_stride : 2 * width};", "step == 0 ? s.q_stride : width};", RING),
    "queries go round": (
        "cp_ring.c", "rows_pack(m->ring.block[0], qkv + s.o_stride,", "rows_pack(m->ring.block[0], qkv,", RING),
    # ... what is merged, and what is summed
    "the first merge is with anything": ("cp_ring.c", "rows_fill(lse, -INFINITY, N * s.H); //", "; //", RING),
    "the first merge is with a sum of one": ("cp_ring.c", "rows_fill(lse, -INFINITY, N * s.H);", "rows_fill(lse, 0, N * s.H);", RING),
    "o is merged into what was there": ("cp_ring.c", "    device_zero(sum, N * s.o_stride * sizeof(float));\n", "", RING),
    "half the queries merge with the other half's sums": (
        "cp_ring.c", "sum + meet.query * s.o_stride, lse + meet.query,", "sum + meet.query * s.o_stride, lse,", RING),
    "half the queries have the other half's delta": ("cp_ring.c", "r->delta + meet.query,", "r->delta,", RING),
    "half the queries have the other half's do": ("cp_ring.c", "do_ + meet.query * s.o_stride,", "do_,", RING),
    "gradients of queries start with anything": (
        "cp_ring.c", "    device_zero(r->sum, N * s.q_stride * sizeof(float));\n", "", RING),
    "a part holds the one before it": (
        "cp_ring.c", "        if (step > 0) device_zero(x.dk, n * sizeof(float));\n", "", RING),
    "a rank's own part is left out": (
        "cp_ring.c", "    rows_add(r->sum + s.o_stride, s.q_stride, r->arrived, N, 2 * width);\n", "", RING),
    "what comes home is added twice": (
        "cp_ring.c", "comm_wait(gradients); // home\n",
        "comm_wait(gradients); // home\n    rows_add(r->sum + s.o_stride, s.q_stride, r->arrived, N, 2 * width);\n", RING),
    "the first part has come from somewhere": ("cp_ring.c", "if (step > 1) rows_add", "if (step > 0) rows_add", RING),
    "the second part forgets the first": ("cp_ring.c", "if (step > 1) rows_add", "if (step > 2) rows_add", RING),
    "gradients travel rounded": (
        "cp_ring.c", "        if (step > 0) gradients",
        "        for (size_t i = 0; step > 0 && i < n; i++) x.dk[i] = to_float(to_floatX(x.dk[i]));\n"
        "        if (step > 0) gradients", RING_ERROR),
    "o is rounded block by block": (
        "cp_ring.c", "        comm_progress();\n        comm_wait(next);\n", "        comm_progress();\n        comm_wait(next);\n"
        "        for (size_t i = 0; i < N * s.o_stride; i++) sum[i] = to_float(to_floatX(sum[i]));\n", RING_ERROR),
    # ... and what is under way
    "the next block comes into the one in use": (
        "cp_ring.c", "        Work next = pass_on(m, s, step);\n        Meeting meet = meeting(m, s, step);\n"
        "        Keys x = keys_of(m, s, step, qkv);\n        if (meet.queries)",
        "        floatX **b = m->ring.block;\n        device_copy(b[1], b[0], keys_count(s) * sizeof(floatX));\n"
        "        Work next = step < m->config.cp - 1 ? comm_shift(m->grid.cp, b[0], b[1], keys_count(s), FLOAT_X) : (Work){0};\n"
        "        Meeting meet = meeting(m, s, step);\n        Keys x = keys_of(m, s, step, qkv);\n"
        "        if (step > 0) x.k = b[0], x.v = x.k + width;\n        if (meet.queries)", f"{RING_DEVICE}[3-2]"),
    "a block is used before it has come": (
        "cp_ring.c", "qkv + s.o_stride : m->ring.block[step & 1];", "qkv + s.o_stride : m->ring.block[(step + 1) & 1];", RING),
    "a block is sent on from where it will come": (
        "cp_ring.c", "block[(step + 1) & 1], block[step & 1], keys_count(s)", "block[step & 1], block[(step + 1) & 1], keys_count(s)",
        RING),
    "gradients all leave from one buffer": ("cp_ring.c", "m->ring.part[step & 1];", "m->ring.part[0];", f"{RING_DEVICE}[3-1]"),
    "gradients leave before what has come is in them": (
        "cp_ring.c", "        if (step > 1) rows_add(x.dk, 2 * width, r->arrived, N, 2 * width); // at step 1 no rank has come before\n"
        "        if (step > 0) gradients = under_way(m, comm_shift(m->grid.cp, r->arrived, x.dk, n, DTYPE_F32));\n",
        "        if (step > 0) gradients = under_way(m, comm_shift(m->grid.cp, r->arrived, x.dk, n, DTYPE_F32));\n"
        "        if (step > 1) rows_add(x.dk, 2 * width, r->arrived, N, 2 * width);\n", f"{RING_DEVICE}[3-2]"),
    "a block goes all the way home": ("cp_ring.c", "if (step == m->config.cp - 1) return", "if (step == m->config.cp) return", RING),
    "a rank's work is one sequence's": ("cp_ring.c", "(double)s.B * pairs;", "pairs;", RING),
    "an evaluation's work counts": (
        "train_gpt2.cu", "    m->ring.pairs = pairs;\n    pp_free(plan);\n    return", "    (void)pairs;\n    pp_free(plan);\n    return",
        MESSAGES),
    "gradients over cp are said to travel as floatX": (
        "report.c", "(double)((size_t)passes * sizeof(floatX) + sizeof(float));", "(double)((size_t)passes + 1) * sizeof(floatX);",
        "tests/test_memory.py::test_context_parallel_runs"),
    # pipeline parallelism: schedules
    "1f1b takes one more F ahead": (
        "pp_1f1b.c", "long ahead = smaller(p - 1 - r, m);", "long ahead = smaller(p - r, m);", SCHEDULES),
    "zb-h1's last W are forgotten": ("pp_1f1b.c", "if (defers_w) put_n(w, smaller(r, m), PASS_W, 0);", "", SCHEDULES),
    "interleaved takes too few F ahead": (
        "pp_1f1b.c", "smaller(2 * (p - r - 1) + (v - 1) * p, all)", "smaller((p - r - 1) + (v - 1) * p, all)", SCHEDULES),
    "interleaved changes chunks after each micro-batch": (
        "pp_1f1b.c", "put(w, PASS_F, (int)(k / p % v));", "put(w, PASS_F, (int)(k % v));", SCHEDULES),
    "zbv takes one more F ahead": (
        "pp_1f1b.c", "put_n(w, 2 * p - 2 * r - 1, PASS_F, 0);", "put_n(w, 2 * p - 2 * r, PASS_F, 0);", SCHEDULES),
    "zbv does not put W off": (
        "pp_1f1b.c", "put(w, PASS_I, 0), put(w, PASS_I, 1);", "put_i_and_w(w, 0), put(w, PASS_I, 1);", SCHEDULES),
    "zbv accepts too few micro-batches": ("pp_1f1b.c", "return m >= 2 * p - 1;", "return m >= 2 * p - 2;", SCHEDULES),
    "a rank is without its last unit": (
        "pp_1f1b.c", ".last_unit = (int)end + (s == n - 1),", ".last_unit = (int)end,", SCHEDULES),
    "two stages have one block": (
        "pp_1f1b.c", "s == 0 ? 0 : (int)first + 1,", "s == 0 ? 0 : (int)first,", SCHEDULES),
    "zbv's way back starts at rank 0": (
        "pp_1f1b.c", "return chunk == 0 ? rank : 2 * p - 1 - rank;", "return chunk == 0 ? rank : p + rank;", SCHEDULES),
    "played, I waits for nobody": ("pp_1f1b.c", "if (stage == last || own < 0) return own;", "return own;", SCHEDULES),
    "played, a rank does two things at a time": (
        "pp_1f1b.c", "free = next[r] ? a[-1].end : 0;", "free = next[r] ? a[-1].start : 0;", SCHEDULES),
    "played, B costs no W": ("pp_1f1b.c", "costs.w, costs.i + costs.w};", "costs.w, costs.i};", SCHEDULES),
    "the plan ends with rank 0": (
        "pp_1f1b.c", "plan->end = fmax(plan->end, a->end);", "if (r == 0) plan->end = fmax(plan->end, a->end);", SCHEDULES),
    "slots are never given back": ("pp_1f1b.c", "if (done) give_back(&slots, who);", ";", SCHEDULES),
    "heads are kept until W": (
        "pp_1f1b.c", "if (head && (backward || forward_only)) give_back", "if (head && done) give_back", SCHEDULES),
    "a place is given to two": (
        "pp_1f1b.c", "p->n ? p->returned[--p->n] : p->most++;", "p->n ? p->returned[p->n - 1] : p->most++;", SCHEDULES),
    "W comes before its I": (
        "pp_1f1b.c", "        put(w, defers_w ? PASS_I : PASS_B, 0);\n        if (defers_w && j >= r) put(w, PASS_W, 0);",
        "        if (defers_w && j >= r) put(w, PASS_W, 0);\n        put(w, defers_w ? PASS_I : PASS_B, 0);", SCHEDULES),
    "a W is of the micro-batch behind": (
        "pp_1f1b.c", ".micro = w->next[pass][chunk]++}", ".micro = w->next[pass][chunk]++ + (pass == PASS_W)}", SCHEDULES),
    # ... messages
    "a receive takes a buffer that is not read yet": (
        "pp_1f1b.c", "k == e->read + e->n) break;", "k == e->read + e->n + 1) break;", f"{PIPE}[afab-2]"),
    "a message leaves before it is written": ("pp_1f1b.c", "k == e->written :", "k == e->written + 1 :", f"{PIPE}[1f1b-1]"),
    "a message leaves from one place, and is written to another": (
        "pp_1f1b.c", "floatX *buffer = e->buffer[k % e->n];", "floatX *buffer = e->buffer[(k + 1) % e->n];",
        f"{PIPE}[1f1b-1]"),
    "each end starts first what it sends": (
        "pp_1f1b.c", "    qsort(list, (size_t)*n, sizeof *list, in_order);\n",
        "    qsort(list, (size_t)*n, sizeof *list, in_order);\n    for (Message *x = list + 1, y; x < list + *n; x++)\n"
        "        if (x->leaves == x[-1].leaves && pp_rank_of(c, x->from) == rank) y = *x, *x = x[-1], x[-1] = y;\n",
        f"{PIPE}[1f1b-1]"),
    "messages start in the order of ranks": (
        "pp_1f1b.c", "    qsort(list, (size_t)*n, sizeof *list, in_order);\n", "    (void)in_order;\n", NO_BIT),
    "orders of messages are not compared": (
        "pp_1f1b.c", "if (!pipe->checked) check_talks(m);", "", "tests/test_faults.py::test_ranks_with_different_flags"),
    "compute waits for its last message": (
        "pp_1f1b.c", "to = pp_rank_of(&m->config, l.to), n = 2;", "to = pp_rank_of(&m->config, l.to), n = 1;", STAGES),
    # ... a tied embedding at both ends
    "a tied embedding's ends each have a gradient": ("train_gpt2.cu", "    pp_sum_gradients(m);\n", "", f"{PIPE}[1f1b-1]"),
    "a tied embedding's gradient is summed twice": (
        "train_gpt2.cu", "    pp_sum_gradients(m);\n", "    pp_sum_gradients(m);\n    pp_sum_gradients(m);\n",
        f"{PIPE}[1f1b-1]"),
    "the norm counts a tied embedding's copy": (
        "train_gpt2.cu", "p->here = true, p->counted = false;", "p->here = true;", f"{PIPE}[1f1b-1]"),
    "a tied embedding's copy is never closed": (
        "dp_zero.c", "    if (b->chunk < 0)\n        end_bucket(m, tied, pass, added);",
        "    if (b->chunk < 0)\n        (void)added;", f"{PIPE}[1f1b-1]"),
    "the head does not open a tied embedding's gradient": (
        "dp_zero.c", "k = n - 1; k >= 0 && adds", "k = n - 1; k >= (tied >= 0) && adds", f"{PIPE}[1f1b-1]"),
    # ... a rank's list
    "all micro-batches keep what F keeps in one place": (
        "train_gpt2.cu", "m->acts[a->slot * m->blocks + i]", "m->acts[0 * a->slot + i]", NO_BIT),
    "all that wait for W have one place": (
        "train_gpt2.cu", "OutputGrads d = m->dout[a->dout * m->blocks + i];", "OutputGrads d = m->dout[i];", NO_BIT),
    "all heads have one place": (
        "train_gpt2.cu", "head_forward(m, m->head[a->head], dloss);", "head_forward(m, m->head[0], dloss);", NO_BIT),
    "a chunk begins with the first one's blocks": (
        "train_gpt2.cu", "long i = unit - 1 - k->first_block;", "long i = unit - 1 - m->chunk[0].first_block;", NO_BIT),
    "a block writes over its own input": (
        "train_gpt2.cu", "activations(m, a, i + 1).x : m->head", "activations(m, a, i).x : m->head", GRADIENTS),
    "what waits for W is computed again where F is": (
        "train_gpt2.cu", "own ? 1 + a->dout * m->blocks + i : 0", "0 * own",
        f"{ALL_ELSE}[zbv-2-2-fp32-{{'--comm': 'mpi', '--recompute': 'full'}}]"),
    "blocks that wait for W are computed again in one place": (
        "train_gpt2.cu", "own ? 1 + a->dout * m->blocks + i : 0", "own ? 1 + a->dout * m->blocks : 0",
        f"{ALL_ELSE}[zbv-2-2-fp32-{{'--comm': 'mpi', '--recompute': 'full'}}]"),
    "the embedding's I has another micro-batch's tokens": (
        "train_gpt2.cu", "(first && a->pass != PASS_W)", "(first && a->pass == PASS_F)", NO_BIT),
    "a step begins with the last one's tokens": ("train_gpt2.cu", "    m->loaded = -1;\n", "", TEN_STEPS),
    "sums of norms' gradients are not cleared": (
        "train_gpt2.cu", "    device_zero(d.norms, 4 * s.C * sizeof(floatX));\n", "", TEN_STEPS),
    "norms' gradients are left where I summed them": (
        "train_gpt2.cu", "    residual_forward(dw->norm1_weight, dw->norm1_weight, dnorm1, s.C);\n", "", GRADIENTS),
    "what W gathers takes one place": (
        "train_gpt2.cu", "none, mlp ? tp_enter(m, a.h2, 1) : none", "none, mlp ? tp_enter(m, a.h2, 0) : none",
        f"{PROGRAM}::test_pipelines[['--tp', 2]-zb-h1-llama-nccl-1]"),
    "ends that are no matrix wait for W": (
        "dp_zero.c", "pass == (block ? PASS_W : PASS_I);", "pass == (block ? PASS_W : PASS_W);", NO_BIT),
    "a head ahead sums in bf16": (
        "dp_zero.c", "bank_gradient(b); //", "(void)b; //", "tests/test_law.py::test_a_head_ahead_sums_in_fp32"),
    "a head with blocks whose W comes later": (
        "dp_zero.c", " && !(head && pp_defers_w(&m->config));", " && (head || true);", f"{STAGES}[{LARGE_ZB}]"),
    "chunks share a bucket": (
        "dp_zero.c", "m->chunk_of[unit] == m->chunk_of[unit - 1] &&", "m->chunk_of[unit - 1] >= 0 &&", f"{STAGES}[{LARGE_ZBV}]"),
    "the next chunk's weights come with the last block's": (
        "dp_zero.c", "    if (m->bucket[next].chunk != m->bucket[i].chunk) return;\n", "",
        f"{STAGES}[{LARGE_ZBV}]"),
    # ... what is alive
    "what a chunk hands on stays alive": (
        "train_gpt2.cu", "first ? 0 : x};", "first ? x : x};", STAGES),
    "what a chunk is handed is not alive": (
        "train_gpt2.cu", "if (receives) ledger_live(MEM_DOUT, (ptrdiff_t)live_bytes(m, k->last_unit, 0).dy);", "", STAGES),
    "an evaluation's activations stay alive": (
        "train_gpt2.cu", "if (plan->forward_only) forget_activations();", "", STAGES),
    # ... and an evaluation
    "the last micro-batch of an evaluation is left out": (
        "train_gpt2.cu", "((long)n + at_once - 1) / at_once", "((long)n) / at_once",
        "tests/test_run.py::test_evaluation_is_the_same_everywhere"),
    "ranks evaluate the same windows": (
        "train_gpt2.cu", "uint64_t w = sequence_of(m, micro, b);",
        "uint64_t w = (uint64_t)micro * (uint64_t)m->config.dp * m->B + b;", "tests/test_run.py::test_evaluation_is_the_same_everywhere"),
    "every tp rank counts the loss of an evaluation": (
        "train_gpt2.cu", "m->grid.tp->rank == 0 ? mine : 0", "mine", SAMPLE),
    "interleaved has as many micro-batches as it likes": (
        "pp_1f1b.c", "put_n(w, smaller(p, m - j), PASS_F, k);", "put_n(w, p, PASS_F, k);", SCHEDULES),
    # checkpoints and data
    "slices of columns lie side by side": ("state.c", ".stride = p->cols,", ".stride = p->slice_cols,", RESHARD),
    "a shard begins with a row of the slice": ("state.c", "rest = width - i % width;", "rest = width;", RESHARD),
    "the padding is saved": (
        "state.c", "size_t n = p->slice_rows * p->slice_cols, from", "size_t n = p->size, from", GRADIENTS),
    "weights and moments are read from the tensor's start": (
        "state.c", "pieces(piece, p, own, i, value);", "pieces(piece, p, (Range){0, n}, i, value);", RESHARD),
    "moments go to the shard's start": (
        "state.c", "(k == 0 ? b->m : b->v) + own_place(m, p), value", "(k == 0 ? b->m : b->v), value", RESHARD),
    "masters are rounded as they are read": (
        "state.c", "if (b->master) device_copy_in(b->master + place, value, n * sizeof(float));",
        "for (size_t i = 0; b->master && i < n; i++) b->master[place + i] = to_float(to_floatX(value[i]));",
        "tests/test_resume.py::test_nothing_is_rounded_on_the_way"),
    "AdamW's moments change places": (
        "state.c", "device_copy_in((k == 0 ? b->m : b->v)", "device_copy_in((k == 1 ? b->m : b->v)",
        "tests/test_resume.py::test_bit_for_bit"),
    "epochs are alike": (
        "runtime/data.c", "const uint64_t epoch = g / d->windows;", "const uint64_t epoch = 0 * g;",
        "tests/test_units.py"),
    "NaN is a number": ("runtime/flags.c", " || !isfinite(x)", "", "tests/test_cases.py::test_alone"),
    "all is well that ends": (
        "runtime/launch.c", "WIFEXITED(status) ? WEXITSTATUS(status)", "WIFEXITED(status) ? 0",
        "tests/test_resume.py::test_killed_at_any_moment"),
    "whoever fails speaks": (
        "runtime/fail.c", "fail_spoken && atomic_exchange(fail_spoken, 1)", "fail_spoken && 0",
        "tests/test_cases.py::test_one_speaks_where_the_end_is_slow"),
    # who waits for whom
    "who waits for the slow is impatient": (
        "runtime/watchdog.c", "patience = seconds_now() + grace;", "patience = 0;",
        "tests/test_comm.py::test_a_slow_pipeline_is_not_stuck"),
    "numbers of messages contradict each other": (
        "runtime/watchdog.c", "bool channel = g->last.op == OP_SEND || h->last.op == OP_SEND;", "bool channel = false;",
        "tests/test_comm.py::test_who_waits_in_a_circle"),
    "those for whom others wait, in turn, may do what they like": (
        "runtime/watchdog.c", "    follow(wants, chain);\n", "", "tests/test_comm.py::test_a_slow_pipeline_is_not_stuck"),
    "who waits for a circle is in it": (
        "runtime/watchdog.c", "if (v == IN_A_CIRCLE) close_circle(wants, blamed);", "",
        "tests/test_comm.py::test_who_waits_in_a_circle"),
    # the ring
    "the ring stops a hop early": (
        "runtime/comm.c", "2 * (c->size - 1) : c->size - 1", "2 * (c->size - 1) : c->size - 2",
        "tests/test_comm.py::test_collectives"),
    "a send is done once it is buffered": (
        "runtime/comm.c", "bool taken = t->op == OP_SEND || t->op", "bool taken = t->op",
        "tests/test_comm.py::test_collectives[2]"),
    "a shift is done once it is buffered": (
        "runtime/comm.c", "bool taken = t->op == OP_SEND || t->op == OP_SHIFT || t->op", "bool taken = t->op == OP_SEND || t->op",
        "tests/test_comm.py::test_who_is_missing_in_a_ring[host-left-out]"),
    "an all-to-all is done once it is buffered": (
        "runtime/comm.c", " || t->op == OP_SHIFT || t->op == OP_ALL_TO_ALL;", " || t->op == OP_SHIFT;", "tests/test_comm.py::test_collectives[2]"),
    "a part takes as many slices as it has": (
        "runtime/comm.c", "SLICE_BYTES) * LANES;", "SLICE_BYTES) * LANES - (most < SLICE_BYTES);", MESH),
    "a part goes the wrong way round": (
        "runtime/comm.c", "around(c, c->rank + e->distance) : MPI_PROC_NULL", "around(c, c->rank - e->distance) : MPI_PROC_NULL", MESH),
    "what a rank sends itself stays": (
        "runtime/comm.c", "if (e->in.bytes) memcpy(at(t->out, e->in.offset), at(t->in, e->out.offset), e->in.bytes);", ";", MESH),
    "rows come up to where they went down": (
        "runtime/comm_cuda.c", "put_back_rows(f, s->host + sent_room(f));", "put_back_rows(f, s->host);", f"{DEVICE}[1-2]"),
    "bytes are counted twice": ("runtime/comm.c", "bytes += hop->sent;", "bytes += 2 * hop->sent;", SENT),
    # a device
    "what NCCL sends is counted for the wrong shard": ("runtime/comm_cuda.c", "return whole - next;", "return whole - mine;", f"{DEVICE}[1-2]"),
    "shards are all of one length": ("runtime/comm_cuda.c", "if (shards && f->count % size != 0)", "if (!shards)", f"{DEVICE}[1-2]"),
    "each rank takes a shared GPU for its own": (
        "runtime/device_cuda.c", "return left / (size_t)sharers;", "return left;", f"{PROGRAM}::test_refused[half of one]"),
    "NCCL on a shared GPU": ("train_gpt2.cu", "TRANSPORT_NCCL && most > 1)", "TRANSPORT_NCCL && most > 2)",
        f"{PROGRAM}::test_refused[nccl on a shared GPU]"),
    "each rank sees for itself whether GPUs are too few": (
        "train_gpt2.cu", "comm_max(world, comm_host().local_size > device_count()) > 0;", "comm_host().local_size > device_count();",
        f"{PROGRAM}::test_ranks_that_share_a_gpu"),
    "what libraries take is not entered": (
        "train_gpt2.cu", "if (step == first_step + 1) enter_rest(world, MEM_LIBRARIES);", "", f"{PROGRAM}::test_memory"),
    "a resumed run's moments are not counted": (
        "config.c", "if (c->resume) c->lazy_optimizer = false;", "", f"{PROGRAM}::test_a_resumed_run_is_not_lazy"),
    "heads of any width": ("config.c", "ATTENTION_FLASH || D <= most) return;", "ATTENTION_FLASH || most) return;",
        f"{PROGRAM}::test_refused[wide heads]"),
    "out of memory without the table": (
        "report.c", "memory_table(watched_prediction, &ledger));", '"");',
        f"{PROGRAM}::test_out_of_memory_says_what_and_what_would_help"),
    # 8 bits
    "W's tiles lie along channels": (
        "fp8_linear.c", "by_columns(&workspace, dout, M, N,", "by_rows(&workspace, dout, M, N,", PRODUCTS),
    "hybrid is e4m3": (
        "fp8_linear.c", "m->config.fp8 == FP8_HYBRID ? FP8_E5M2 : FP8_E4M3", "m->config.fp8 == FP8_HYBRID ? FP8_E4M3 : FP8_E4M3",
        PRODUCTS),
    "the scales of a turned weight are not turned": (
        "fp8_linear.c", "(Fp8Matrix){turned, turned_scale,", "(Fp8Matrix){turned, scale,", PRODUCTS),
    # kernels
    "scores are not scaled": (
        "kernels/flash_attention.c", "return 1 / sqrtf((float)D);", "return 1 + 0 * (float)D;", GRADIENTS),
    "gelu has another constant": ("kernels/gelu.c", "0.0713548162f", "0.07f", GRADIENTS),
    "rotations are not turned back": ("kernels/rope.c", "stride, -1.0f)", "stride, 1.0f)", GRADIENTS),
    "padding takes softmax mass": (
        "kernels/cross_entropy.c", "row_read(logits + n * Vp, targets[n], first, V)",
        "row_read(logits + n * Vp, targets[n], first, Vp)", GRADIENTS),
    "no bias correction": (
        "kernels/adamw.c", "(sqrtf(vi[j] * v_correction) + a.eps)", "(sqrtf(vi[j]) + a.eps)", TEN_STEPS),
    "a ring's blocks are not weighed": (
        "kernels/flash_attention.c", "float keep = sigmoid(*lse - lse_block)", "float keep = 1", UNITS),
    "a block without keys is merged": (
        "kernels/flash_attention.c", "if (lse_block == -INFINITY) return;", "", UNITS),
    "a slice's sum keeps its own maximum": (
        "kernels/cross_entropy.c", "fast_expf(max[n] - global_max[n])", "fast_expf(0 * (max[n] - global_max[n]))", UNITS),
    "every slice has the target": (
        "kernels/cross_entropy.c", "return (Row){max, sum, target < V ?", "return (Row){max, sum, target < SIZE_MAX ?", UNITS),
    "fp8 knows no subnormal numbers": (
        "kernels/fp8_gemm.c", "if (exponent < lowest) exponent = lowest;", "if (exponent < lowest) return 0;", FP8),
    # CUDA kernels
    "a warp's sum forgets half its lanes": (
        "kernels/cuda.cuh", "int lanes = WARP / 2; lanes > 0; lanes /= 2) x += ", "int lanes = WARP / 4; lanes > 0; lanes /= 2) x += ",
        "tests/test_cuda_norms.py"),
    "what a query summed is not scaled down": (
        "kernels/flash_attention.cu", "sum[m][half] *= shrink[m][half];", "", "tests/test_cuda_attention.py"),
    "the second query head of a group is left out": (
        "kernels/flash_attention_backward.cu", "steps = per_head * group;", "steps = per_head;", "tests/test_cuda_attention.py"),
    "a division in which the rest underflows": ("kernels/fp8_quantize.cu", "scale < 0x1p-80f ? 0x1p100f : 1.0f", "1.0f", FP8),
    "only the first heads of attention": (
        "kernels/attention_tiles.cuh", "int first = blockIdx.x / (GROUP * blocks) * GROUP", "int first = 0",
        "tests/test_cuda_attention.py"),
    "promotion forgets a's scale": ("kernels/fp8_gemm.cu", "* a_scale, b_scale[i], total)", "+ 0 * a_scale, b_scale[i], total)", FP8),
    "nothing decays": (
        "kernels/adamw.cu", "float decay = bounds % 2 ?", "float decay = bounds % 2 > 1 ?", "tests/test_cuda_adamw.py"),
    # the emulator
    "races are not looked for": ("dev/emu/check.cpp", "if (watch_races) check_race", "if (!watch_races) check_race", CHECK),
    "two that send to each other fit": (
        "dev/emu/nccl.cpp", "return is_message(b.op) && a.op != b.op;", "return is_message(b.op);",
        "tests/test_emu_nccl.py::test_calls_that_do_not_match[two sends]"),
    "a reader does not race": ("dev/emu/check.cpp", "if (!in_order(reader[k])) race(", "if (in_order(reader[k]) && 0) race(", CHECK),
    # experts: who has them, and who sums up their gradients
    "experts are summed over all of dp": (
        "dp_zero.c", "b->comm = experts ? m->grid.replicas : m->grid.dp;", "b->comm = m->grid.dp;", FIVE),
    "shards of experts are of dp ranks": (
        "dp_zero.c", "(experts ? m->config.replicas : m->config.dp_cp)", "(m->config.dp_cp)", ROOM),
    "experts take slots of others": (
        "dp_zero.c", "return is_experts(m, i) ? 2 + ((i - m->n_dense) & 1) : i & 1;", "return i & 1;", RANKS),
    "ranks of ep are not neighbours in dp": (
        "train_gpt2.cu", "comm_mesh(g->world, dp / ep * inner + rank % inner, rank, \"ep\")",
        "comm_mesh(g->world, dp % (g->world->size / inner / ep) * inner + rank % inner, rank, \"ep\")", FIVE),
    # ... the route
    "a route that is replayed is made again": ("ep_moe.c", "    if (x->replays) return;\n", "", SENT_EP),
    "an evaluation is counted": ("ep_moe.c", "    x->counts = false;\n    sum_up(m);", "    sum_up(m);", FIVE),
    "positions are those of the rank": ("ep_moe.c", "m->positions, (uint64_t)l,", "m->positions, (uint64_t)(l + m->grid.cp->rank),", FIVE),
    "every rank's sequences are the first": (
        "ep_moe.c", "m->first_sequence, s.first, s.R, m->T, how);", "0 * m->first_sequence, s.first, s.R, m->T, how);", FIVE),
    "all ranks of tp count": ("ep_moe.c", "bool mine = c->sp || m->grid.tp->rank == 0;", "bool mine = true;", RANKS),
    "copies come in another order": (
        "ep_moe.c", "&r->received[p * s.own + i];", "&r->received[(ep - 1 - p) * s.own + i];", FIVE),
    "the balance loss is of a rank's own part": (
        "ep_moe.c", "r->chosen, 2 * m->B * s.E, DTYPE_F32)", "r->chosen, m->B * s.E, DTYPE_F32)", FIVE),
    # ... the way there and back
    "there is room for an even load": ("ep_moe.c", "    grow(&x->up, M, s.U, MEM_ACTIVATIONS);\n", "", f"{EXTREME}[(5,)]"),
    "all ranks of tp add an expert's bias": (
        "ep_moe.c", "m->grid.tp->rank == 0 ? w->down_bias : NULL;", "w->down_bias;", RANKS),
    "a gate's gradient is of a rank's own part": (
        "ep_moe.c", "comm_all_reduce(m->grid.tp, x->dgate, s.N * s.k, DTYPE_F32)", "comm_all_reduce(m->grid.tp, x->dgate, 1, DTYPE_F32)",
        FIVE),
    "experts overwrite what shared ones gave": (
        "train_gpt2.cu", "moe_forward(m, l, a, copies, part, s.F > 0);", "moe_forward(m, l, a, copies, part, false);", ROUTER),
    "the router's own gradient does not join": (
        "train_gpt2.cu", "    if (s.experts) moe_backward_router(m, l, d, dh2);\n", "", ROUTER),
    # ... what balances it
    "a bias moves the other way": (
        "ep_moe.c", "(tokens[e] < mean) - (tokens[e] > mean)", "(tokens[e] > mean) - (tokens[e] < mean)",
        f"{EXPERTS}::test_bias_balances_as_aux_does"),
    "a bias is not saved": ("state.c", ".data = m->experts.bias + l * E", ".data = m->experts.bias", f"{MOVED}[bias]"),
    "a bias is not read": ("state.c", "    load_balance(m, s, path, balance, biases);\n", "", f"{MOVED}[bias]"),
}  # fmt: skip

# ---- waits ---------------------------------------------------------------------------------------------------------------
# Each wait, event and record of the strategies, state.c, train_gpt2.cu and runtime/, and who notices when it is left
# out. On the emulator that is certain: its streams run in the order that shows it (EMU_SEED=1: compute first, 2: the
# others first; the first number of DEVICE's).
WAITING = ("comm_wait", "ring_wait", "ring_finish", "cudaEventRecord", "cudaStreamWaitEvent", "cuda_wait", "device_synchronize")
WAITING = re.compile(rf"(cuda_check\()?\b({'|'.join(WAITING)})\((\))?|\b(arrived)\((\w+)\)")
BITS = f"{PROGRAM}::test_the_order_of_streams_changes_no_bit"
BITS_DP = f"{BITS}[dp=2,zero=2,comm=nccl,accum=2]"
BITS_SP = f"{BITS}[tp=2,sp=True,comm=nccl,arch=llama,kv_heads=1]"
EMU_EXPERTS = "--experts 4 --topk 2 --route-groups 2 --route-nodes 1 --shared-experts 1"
BITS_EP = f"{BITS}[dp=2,ep=2,tp=2,sp=True,comm=nccl,experts={EMU_EXPERTS},layers=1]"
STREAMS = f"{PROGRAM}::test_pipelines"
OF_W = f"{STREAMS}[['--tp', 2]-zb-h1-llama-nccl-1]"
SOUND, CHECKPOINT = "tests/test_run.py::test_sound_replicas", "tests/test_checkpoint.py::test_in_c[3]"
TRACE, EARLY = "tests/test_trace.py::test_what_is_written[3-plain]", "tests/test_comm.py::test_an_early_rank_is_watched_over[2]"
WAITS = {
    "train.h": {"if (m->config.no_overlap) comm_wait(w);": "tests/test_run.py::test_no_overlap"},
    "dp_zero.c": {
        "comm_wait(b->reduce);": BITS_DP,
        "comm_wait(m->bucket[used[k]].gather);": BITS_DP,
    },
    "pp_1f1b.c": {
        "comm_wait(comm_host_all_gather(m->grid.pp, hash,": "tests/test_cases.py::test_fewer_micro_batches_than_stages",
        "comm_wait(e->work[e->read % e->n]);": f"{PIPE}[1f1b-1]",
        "comm_wait(e->work[e->written % e->n]);": f"{PIPE}[1f1b-1]",
        "comm_wait(b->reduce);": f"{STREAMS}[['--zero', 1]-1f1b-gpt2-nccl-1]",
        "comm_wait(comm_all_reduce(m->grid.tied,": f"{PIPE}[1f1b-1]",
    },
    "state.c": {
        "comm_wait(b->gather);": SOUND,
        "comm_wait(comm_host_all_gather(world, copy,": SOUND,
    },
    "cp_ring.c": {
        "        comm_progress();\n        comm_wait(next);": f"{RING_DEVICE}[3-1]",
        "comm_progress();\n        comm_wait(gradients);": f"{RING_DEVICE}[3-1]",
        "DTYPE_F32));\n        comm_wait(next);": f"{RING_DEVICE}[3-1]",
        "comm_wait(gradients); // home": f"{RING_DEVICE}[3-1]",
    },
    "ep_moe.c": {
        "comm_wait(comm_all_gather(m->grid.tp, r->index,": BITS_EP,
        "comm_wait(comm_host_all_gather(m->grid.ep,": BITS_EP,
        "comm_wait(gates);": BITS_EP,
        "comm_wait(comm_all_to_all(m->grid.ep, sorted, r->sent,": BITS_EP,
        "comm_wait(sent);\n    if (a.route->M) {": BITS_EP,
        "comm_wait(m->experts.sums);": BITS_EP,
        "comm_wait(sent);\n    if (r->M) {": BITS_EP,
        "comm_wait(x->gates);": BITS_EP,
        "comm_wait(comm_host_all_reduce(m->grid.world, sum,": BITS_EP,
    },
    "tp_sp.c": {
        "comm_wait(b->reduce);": "tests/test_faults.py::test_a_late_rank_changes_no_number",
        "comm_wait(last[0]);": BITS_SP,
        "comm_wait(last[1]);": BITS_SP,
        "comm_wait(comm_all_reduce_max(m->grid.tp,": BITS_SP,
        "comm_wait(comm_all_reduce(m->grid.tp, sum,": BITS_SP,
    },
    "train_gpt2.cu": {
        "    comm_wait(r.work);": BITS_SP,
        "a.qkv, arrived(h),": BITS_SP,
        "a.x_mid, a.x, arrived(sum),": BITS_SP,
        "moe_send(m, a, arrived(h));": BITS_EP,
        "mlp_forward(m, l, a, arrived(h), part);": BITS_SP,
        "a.x_mid, arrived(sum),": BITS_SP,
        "const floatX *dout = arrived(dy), *inp = arrived(h);": OF_W,
        "(m, dw->out_weight, arrived(dy),": OF_W,
        "d.qkv, arrived(h),": BITS_SP,
        "moe_send_gradients(m, a, d, arrived(dy));": BITS_EP,
        "mlp_backward_input(m, l, a, d, arrived(dy), dh);": BITS_SP,
        "floatX *dh2 = arrived(sum);": BITS_SP,
        "(m, dh, arrived(dy),": BITS_SP,
        "dnorm1 + s.C, arrived(sum),": BITS_SP,
        "device_copy(y, arrived(sum),": BITS_SP,
        "m->d_ends.wpe, arrived(dx),": BITS_SP,
        "a.logits, arrived(h), m->ends": BITS_SP,
        "a.logits, arrived(h), s.N": BITS_SP,
        "m->d_ends.norm_bias, arrived(sum),": BITS_SP,
        "comm_wait(comm_host_all_reduce(m->grid.world, sums,": RANKS,
        "comm_wait(comm_host_all_gather(m->grid.tp, logits,": SAMPLE,
        "comm_wait(comm_host_all_gather(world, id,": f"{PROGRAM}::test_ranks_that_share_a_gpu",
        "        comm_wait(m.bucket[i].gather); //":
            "tests/test_memory.py::test_a_run_with_no_evaluation_sends_what_is_said",
    },
    "runtime/comm.c": {
        "    ring_finish(w);": COLLECTIVES,
        "comm_wait(comm_host_all_reduce(c, &x, 1": COLLECTIVES,
        "comm_wait(comm_host_all_gather(c, all, &x": COLLECTIVES,
        "comm_wait(comm_barrier(c));": COLLECTIVES,
        "comm_wait(comm_host_broadcast(neighbours": "tests/test_cases.py::test_one_speaks_where_the_end_is_slow",
        "comm_wait(comm_barrier(neighbours));": COLLECTIVES,
        "ring_wait((Work){.comm = parent": COLLECTIVES,
    },
    "runtime/comm_cpu.c": {"if (w.comm) ring_wait(w);": COLLECTIVES},
    "runtime/comm_cuda.c": {
        "cuda_check(cudaStreamWaitEvent(s->stream, f->ready.event, 0));": f"{DEVICE}[2-2]",
        "        cuda_check(cudaEventRecord(s->down, s->stream));": f"{DEVICE}[1-2]",
        "        ring_wait(w);": f"{DEVICE}[1-2]",
        "if (s->by_ring) ring_finish(": f"{DEVICE}[1-2]",
        "cuda_check(cudaStreamWaitEvent(compute_stream, f->done.event, 0));": f"{DEVICE}[1-2]",
        "comm_wait(comm_host_broadcast(c, &id": f"{DEVICE}[1-2]",
        "if (s->first_wait) cuda_wait(s->last_wait->after.event);": f"{DEVICE}[2-2]",
    },
    "runtime/device_cuda.c": {
        "cuda_check(cudaEventRecord(base[i].event, compute_stream));": f"{DEVICE}[1-1]",
        "device_synchronize(); // as cudaFree": f"{DEVICE}[1-2]",
        "cuda_wait(piece[i].done);": f"{DEVICE}[1-1]",
        "cuda_check(cudaEventRecord(piece[i].done, compute_stream));": f"{DEVICE}[1-1]",
        "cuda_check(cudaEventRecord(piece[k % 2].done, compute_stream));": f"{DEVICE}[1-1]",
        "cuda_wait(piece[(k - 1) % 2].done);": f"{DEVICE}[1-1]",
        "if (bytes == 0) device_synchronize();": f"{DEVICE}[1-1]",
        "cuda_check(cudaEventRecord(m.event, stream));": f"{DEVICE}[1-1]",
        "cuda_wait(m.event);": f"{DEVICE}[1-1]",
    },
    "runtime/trace.c": {
        "comm_wait(comm_host_broadcast(world, &origin": "tests/test_trace.py::test_clocks_that_are_wrong",
        "comm_wait(comm_host_broadcast(world, &bytes": TRACE,
        "comm_wait(comm_host_broadcast(world, text": TRACE,
    },
    "runtime/watchdog.c": {
        "comm_wait(comm_host_broadcast(world, &invitation": EARLY,
        "comm_wait(comm_barrier(world));": EARLY,
    },
    "runtime/checkpoint.c": {
        "comm_wait(comm_barrier(c));\n}": CHECKPOINT,
        "comm_wait(comm_barrier(c)); // what this call leaves": CHECKPOINT,
    },
}  # fmt: skip
UNNOTICED = {  # and why
    ("train_gpt2.cu", "    device_synchronize();\n    comm_wait(comm_barrier(world));"):
        "ranks that share a GPU ask what all of them hold; the emulator plays one for each",
    ("train_gpt2.cu", "    device_enter_rest(category);\n    comm_wait(comm_barrier(world));"): "as above",
    ("train_gpt2.cu", "        device_synchronize();\n        step++;"):
        "a GPU's time of the step ends here; what the host reads of it waits by itself",
    ("state.c", "comm_wait(m->bucket[i].gather);"): "comm.h's rule; but a gather leaves a rank's own weights as they are",
    ("runtime/comm_cuda.c", "cuda_check(cudaEventRecord(s->down, s->stream));\n    while"):
        "cudaFree waits, too, but may hold what NCCL's own threads need for that; these the emulator has not",
}


def without_waiting(text):
    """comm_wait(comm_barrier(c)) becomes (void)(comm_barrier(c)), arrived(rows) rows.x: what is started still is."""

    def left(m):
        return f"{m[5]}.x" if m[4] else "(void)0" if m[3] else "((void)(" if m[1] else "(void)("

    return WAITING.sub(left, text)


for file, waits in WAITS.items():
    for text, test in waits.items():
        MUTANTS[f"{file}: without {' '.join(text.split())}"] = (file, text, without_waiting(text), test)


def test_every_wait_is_a_mutant():
    missing = []
    strategies = [ROOT / file for file in ("train.h", "dp_zero.c", "tp_sp.c", "cp_ring.c", "pp_1f1b.c", "ep_moe.c", "state.c",
                                         "train_gpt2.cu")]
    for path in [*strategies, *sorted((ROOT / "runtime").glob("*.c"))]:
        file, text = str(path.relative_to(ROOT)), path.read_text()
        known = [*WAITS.get(file, ()), *(t for f, t in UNNOTICED if f == file)]
        assert all(text.count(t) == 1 for t in known), known
        places = [(text.index(t), text.index(t) + len(t)) for t in known]
        for m in WAITING.finditer(text):
            line = text[text.rindex("\n", 0, m.start()) + 1 : text.index("\n", m.end())]
            if line[0] == " " and not any(begin <= m.start() < end for begin, end in places):  # else a definition
                missing.append(f"{file}: {line.strip()}")
    assert not missing, missing


def test_every_mutant_has_one_place():
    """A break whose text is gone from the sources would be found out only by make mutants."""
    places = {name: (ROOT / file).read_text().count(before) for name, (file, before, _, _) in MUTANTS.items()}
    assert set(places.values()) == {1}, {name: n for name, n in places.items() if n != 1}


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_some_test_notices(name, tmp_path):
    file, before, after, tests = MUTANTS[name]
    built = [build(precision).parent for precision in PRECISIONS]
    if cuda := file.startswith("dev/emu/") or file.endswith((".cu", ".cuh")) and file.startswith("kernels/"):
        built += [library("emu", precision).parent for precision in PRECISIONS]
    if emu := tests.startswith((DEVICE, PROGRAM, RING_DEVICE)):
        built.append(build(device="emu").parent)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    tree = tmp_path / "tree"
    for path in filter(lambda path: path and (ROOT / path).is_file(), listed):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path)
    for directory in built:
        shutil.copytree(directory, tree / directory.relative_to(ROOT), symlinks=True)
    text = (tree / file).read_text()
    (tree / file).write_text(text.replace(before, after))
    env = {**os.environ, "SEED": "7", "CFLAGS_MORE": "-Wno-error"}  # a warning is not what should notice
    targets = [["kernels", "DEVICE=emu", f"PRECISION={precision}"] for precision in PRECISIONS if cuda]
    for target in [[], *targets, *([["build/emu-fp32/train", "DEVICE=emu"]] if emu else [])]:
        made = subprocess.run(["make", "-C", tree, *target], env=env, capture_output=True, text=True)
        assert made.returncode == 0, f"the mutant does not build:\n{made.stderr}"

    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    r = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=900)
    assert r.returncode == 1, f"{name}: nothing noticed (pytest ended with {r.returncode})\n{r.stdout[-2000:]}"

"""What CUDA kernels move, counted access by access on the checked emulator: no byte more than the operation asks for.

Every load and store is counted as the kernel asks for it, whether or not a cache would have had it. Scratch memory is counted
apart. Where the whole size takes too long, three smaller ones are counted: a kernel that walks over rows moves a + b·rows
bytes, and the fit must leave nothing over.
"""
import functools

import numpy as np
import pytest

from kernel_cases import SMALL, Sizes, attention_shape, count
from kernels import DEVICE, PRECISIONS, Kernels, in_child, isolated, library

pytestmark = pytest.mark.skipif(DEVICE != "emu", reason="only the emulator counts bytes")


@functools.lru_cache(None)
def counted(name, precision, **sizes):
    """What one call moves (kernel_cases.count), at GPT-2's sizes but for those given."""
    kind, got = in_child(lambda: count(name, precision, Sizes(**sizes)))
    if kind != "done":
        pytest.fail(f"{name} {precision}: {got}", pytrace=False)
    return got


@pytest.fixture(params=PRECISIONS)
def precision(request):
    library("emu", request.param, checked=True)
    return request.param


def bulk(got):
    """The share of the bytes that the kernel with the most of them moves 16 at a time."""
    most = max(got["kernels"], key=lambda c: c["global_read"] + c["global_written"])
    return most["in_16_bytes"] / (most["global_read"] + most["global_written"])


# ---- one pass, nothing twice -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["layernorm_forward", "layernorm_backward", "rmsnorm_forward", "rmsnorm_backward"])
def test_norms_read_weights_once_a_block(precision, name):
    """16,384 rows of 768: within 5 % of each byte once, although every block needs the weights."""
    got = counted(name, precision)
    print(f"{name} {precision}: {got['operands'] / got['moved']:.4f} of the least, scratch {got['scratch']:,} bytes")
    assert got["moved"] <= got["operands"] <= 1.05 * got["moved"]
    assert bulk(got) > 0.95


def fitted(name, precision, key, axis, at):
    """The bytes under `key` at `axis` = at, from three sizes of that axis; and what they leave over."""
    xs = [at // 32, at // 16, at // 8] if axis != "T" else [2, 3, 5]
    runs = [counted(name, precision, **({"B": 1, "T": x} if axis == "T" else {axis: x})) for x in xs]
    slope, constant = np.polyfit(xs, [r[key] for r in runs], 1)
    over = max(abs(constant + slope * x - r[key]) / max(r[key], 1) for x, r in zip(xs, runs))
    return constant + slope * at, over, runs[-1]


# bf16 beside fp32: a thread takes 4 elements of both, 8 bytes and 16, so that a warp leaves no gap in either.
IN_16 = {("adamw_update", "bf16"): 24 / 28, ("gradient_accumulate", "bf16"): 8 / 12, ("rows_round", "bf16"): 4 / 6}


@pytest.mark.parametrize("name, axis, at", [
    ("gelu_forward", "T", 16384), ("gelu_backward", "T", 16384), ("swiglu_forward", "T", 16384),
    ("swiglu_backward", "T", 16384), ("residual_forward", "T", 16384), ("rows_pack", "T", 16384), ("rows_add", "T", 16384),
    ("rows_round", "T", 16384), ("rows_fill", "T", 16384),
    ("adamw_update", "n", 1 << 23), ("gradient_accumulate", "n", 1 << 23), ("grad_norm_squared", "n", 1 << 23)])
def test_each_element_once(precision, name, axis, at):
    operands, over, _ = fitted(name, precision, "operands", axis, at)
    scratch, _, run = fitted(name, precision, "scratch", axis, at)
    least, _, _ = fitted(name, precision, "moved", axis, at)
    print(f"{name} {precision}: {operands / least:.4f} of the least, scratch {scratch:,.0f} bytes, fit within {over:.1e}")
    assert over < 1e-3
    assert 0.999 * least <= operands <= 1.05 * least
    assert bulk(run) > 0.95 * IN_16.get((name, precision), 1)
    if (name, precision) in IN_16:
        most = max(run["kernels"], key=lambda c: c["sectors"])
        assert most["sectors"] <= 1.01 * most["ideal_sectors"]


@pytest.mark.parametrize("step, writes", [("local", 0), ("global", 1)])
def test_cross_entropy_reads_logits_once_a_step(precision, step, writes):
    """GPT-2's vocabulary: one read of each logit, and one write by the step that makes it its gradient."""
    name, V, Vp, logit = f"cross_entropy_{step}", Sizes.V, Sizes.Vp, 2 if precision == "bf16" else 4
    read, written = max(counted(name, precision, B=1, T=3)["arrays"].values())
    assert read <= 3 * (V * logit + 16 + logit)  # a row ends within a vector, and thread 0 looks the target up
    assert written == 3 * Vp * logit * writes
    least, _, _ = fitted(name, precision, "moved", "T", 16384)
    operands, over, run = fitted(name, precision, "operands", "T", 16384)
    print(f"{name} {precision}: {operands / least:.4f} of the least, fit within {over:.1e}")
    assert over < 1e-3 and operands <= 1.05 * least  # every thread asks for the row's target
    assert bulk(run) > 0.95


# ---- attention: the formulas at the heads of flash_attention.cu and flash_attention_backward.cu --------------------------
SHAPES = [dict(B=1, T=256, H=2, KV=2, D=64), dict(B=2, T=200, H=2, KV=1, D=64), dict(B=1, T=129, H=1, KV=1, D=128)]


def seen(T, rows):
    """Keys that blocks of so many queries see, all blocks together: up to the last query of each."""
    return sum(min(T, first + rows) for first in range(0, T, rows))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_moves_what_its_formula_says(precision, shape):
    B, T, H, KV, D = shape.values()
    E, Br, keys = (2, 128, 64) if precision == "bf16" else (4, 64, 64)
    forward = B * H * (2 * T * D * E + 4 * T + seen(T, Br) * 2 * D * E)
    got = counted("flash_attention_forward", precision, **shape)
    assert got["operands"] == forward, f"{got['operands']:,} bytes, {forward:,} by the formula"
    assert bulk(got) > 0.95

    seeing = sum(T - first for first in range(0, T, keys))
    delta = B * H * (2 * T * D * E + 4 * T)
    dq = B * H * (3 * T * D * E + 8 * T + seen(T, Br) * 2 * D * E)
    dkdv = B * KV * 4 * T * D * E + B * H * seeing * (2 * D * E + 8)
    got = counted("flash_attention_backward", precision, **shape)
    moved = got["operands"] + got["scratch"]
    assert moved == delta + dq + dkdv, f"{moved:,} bytes, {delta:,} + {dq:,} + {dkdv:,} by the formula"


@isolated
def test_flash_attention_never_has_the_matrix():
    """Its scratch memory grows as the sequence does."""
    with Kernels("emu", "fp32", checked=True) as k:
        short, long = (k.call("flash_attention_workspace", attention_shape(Sizes(T=T))) for T in (4096, 8192))
    assert 0 < long == 2 * short


# ---- shared memory -------------------------------------------------------------------------------------------------------
# Extra wavefronts by design, where there are more than 2 % of them: kernel → (at most, why)
CONFLICTS = {
    "count_kernel": (0.5, "a histogram: lanes count the digits that their tokens happen to have"),
    "scatter_kernel": (0.6, "the same digits, where each goes next"),
}


@pytest.mark.parametrize("name, D", [
    *((name, SMALL.D) for name in (
        "embedding_backward", "layernorm_forward", "layernorm_backward", "cross_entropy_local", "matmul_backward_bias",
        "fp8_quantize", "fp8_quantize_transposed", "fp8_quantize_blocks", "fp8_gemm_mma", "naive_attention_forward",
        "naive_attention_backward", "grad_norm_squared", "grouped_gemm_forward", "grouped_gemm_backward_input",
        "grouped_gemm_backward_weight", "moe_route", "moe_sort", "moe_observe", "moe_sequence_sums")),
    *((f"flash_attention_{pass_}", D) for pass_ in ("forward", "backward") for D in (64, 96, 128))])
def test_bank_conflicts_are_few(precision, name, D):
    for c in counted(name, precision, **{**vars(SMALL), "D": D})["kernels"]:
        share = c["extra_wavefronts"] / max(c["wavefronts"], 1)
        allowed, _ = CONFLICTS.get(c["kernel"], (0.02, None))
        assert share <= allowed, f"{c['kernel']}: {c['extra_wavefronts']:,} of {c['wavefronts']:,} wavefronts are extra"

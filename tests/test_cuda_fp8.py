"""fp8_gemm: quantised bytes and scales bit for bit, products against double precision."""
import contextlib
import ctypes

import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import (DEVICE, FP8_E4M3, FP8_E5M2, KINDS, PRECISIONS, Kernels, check, filled, from_bf16, isolated, rel_l2,
                     rounded, same_bits)

LARGEST = {FP8_E4M3: 448.0, FP8_E5M2: 57344.0}
EDGES = (1, 17, 127, 128, 129, 257)
HOPPER_BITS = 13  # at least, of a sum over 128 in its fp8 tensor cores, which cuBLASLt takes there


# ---- the truth ----------------------------------------------------------------------------------------------------
def magnitudes(format):
    """What the codes 0, 1, 2… stand for, up to the largest number."""
    mantissa, bias = (3, 7) if format == FP8_E4M3 else (2, 15)
    codes = np.arange(0x7F if format == FP8_E4M3 else 0x7C)
    power, count = codes >> mantissa, codes & ((1 << mantissa) - 1)
    return np.where(power > 0, (count + (1 << mantissa)) * 2.0 ** (power - bias - mantissa), count * 2.0 ** (1 - bias - mantissa))


def cast(x, format):
    """The codes of finite numbers: to the nearest, of two equally near ones the even, and the largest for all beyond."""
    numbers, size = magnitudes(format), np.abs(np.asarray(x, np.float64))
    above = np.searchsorted(numbers, size).clip(1, len(numbers) - 1)
    lower, upper = size - numbers[above - 1], numbers[above] - size
    code = np.where((upper < lower) | ((upper == lower) & (above % 2 == 0)), above, above - 1)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def value(q, format):
    return np.where(q & 0x80, -1, 1) * magnitudes(format)[q & 0x7F]


def up(n, to):
    return (n + to - 1) // to * to


def quantized(x, format, down, across):
    """Codes of x [rows, cols] in tiles of down × across, and the tiles' scales."""
    rows, cols = x.shape
    padded = np.zeros((up(rows, down), up(cols, across)), np.float32)
    padded[:rows, :cols] = x
    tiles = padded.reshape(up(rows, down) // down, down, up(cols, across) // across, across)
    amax = np.abs(tiles).max(axis=(1, 3))
    scale = amax / np.float32(LARGEST[format])
    scale = np.where(np.isfinite(amax), np.where(scale == 0, np.float32(1), scale), np.float32(np.nan)).astype(np.float32)
    with np.errstate(all="ignore"):
        q = cast(np.nan_to_num(tiles / scale[:, None, :, None]), format)
    q = np.where(np.isnan(scale)[:, None, :, None], 0x7F, q).astype(np.uint8)
    return q.reshape(padded.shape)[:rows, :cols], scale


def block_scales(scale):
    """With the padding that the layout has."""
    return np.pad(scale, ((0, 0), (0, -scale.shape[1] % 4)))


def truth_of(x, format):
    """What the three functions make of x, by their arrays' names."""
    row_q, row_scale = quantized(x, format, 1, 128)
    turned_q, turned_scale = quantized(x.T, format, 1, 128)
    block_q, block_scale = quantized(x, format, 128, 128)
    return {"q": row_q, "scale": row_scale.T, "turned": turned_q, "turned scale": turned_scale.T,
            "block q": block_q, "block scale": block_scales(block_scale), "block turned": block_q.T,
            "block turned scale": block_scales(block_scale.T)}


# ---- the halves ----------------------------------------------------------------------------------------------------
def quantize(k, x, format, shift=0):
    """All that can be made of x."""
    M, K = x.shape
    inp, truth = k.floatX(x, shift=shift), truth_of(np.zeros_like(x), format)
    out = {name: k.out(*a.shape, dtype=a.dtype, shift=shift if a.dtype == np.uint8 else 0) for name, a in truth.items()}
    k.call("fp8_quantize", out["q"], out["scale"], inp, M, K, format)
    k.call("fp8_quantize_transposed", out["turned"], out["turned scale"], inp, M, K, format)
    k.call("fp8_quantize_blocks", out["block q"], out["block scale"], out["block turned"], out["block turned scale"], inp,
           M, K, format)
    got = {name: o.get() for name, o in out.items()}
    k.call("fp8_quantize_blocks", out["block q"], out["block scale"], None, None, inp, M, K, format)
    assert (out["block q"].get() == got["block q"]).all()
    return got


def same(got, want):
    for name, w in want.items():
        g = got[name]
        bits = (g.view(np.uint32), np.ascontiguousarray(w).view(np.uint32)) if g.dtype == np.float32 else (g, w)
        where = np.argwhere(bits[0] != bits[1])
        assert not where.size, f"{name}{where[0]} is {g[tuple(where[0])]}, not {w[tuple(where[0])]}"


def every_code(precision):
    """Rows of 128 with a scale of 1, in which every bf16 number that E5M2 does not clip occurs, or fp32 near a tie."""
    x = from_bf16(np.arange(1 << 16, dtype=np.uint16))
    if precision == "fp32":
        r = np.random.default_rng(SEED)
        ties = np.float32(2.0) ** r.integers(-12, 9, 1 << 14) * (1 + r.integers(0, 16, 1 << 14).astype(np.float32) / 16)
        x = np.concatenate([np.nextafter(ties, np.float32(np.inf)), ties, np.nextafter(ties, np.float32(0)), -ties])
    return x


@pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2])
@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_every_code(precision, format):
    x = every_code(precision)
    x = x[np.abs(x) <= LARGEST[format]]
    rows = np.full((up(x.size, 127) // 127, 128), LARGEST[format], np.float32)
    rows[:, 1:].flat[: x.size] = x
    want, scale = quantized(rows, format, 1, 128)
    assert (scale == 1).all() and (want == cast(rows, format)).all()
    for device in ("cpu", DEVICE):
        with Kernels(device, precision) as k:
            q, scales = k.out(*rows.shape, dtype=np.uint8), k.out(1, len(rows), dtype=np.float32)
            k.call("fp8_quantize", q, scales, k.floatX(rows), *rows.shape, format)
            same({"q": q.get(), "scale": scales.get()}, {"q": want, "scale": scale.T})


def spoilt(r, M, K, kind):
    """Inputs that random numbers do not give."""
    x = filled(r, M, K, kind if kind in KINDS else "random").astype(np.float32)
    if kind == "zeros":
        x[:128, :128] = 0
    if kind == "tiny":
        x[:] = np.float32(1e-43) * np.sign(x)  # so small that amax / 448 is 0, or a few of the last bits
    if kind == "small":  # about where the rest of a division underflows
        x *= np.exp2(r.uniform(-140, -70, (M, 1))).astype(np.float32)
    if kind in ("inf", "nan"):
        x[M // 2, K // 2] = np.inf if kind == "inf" else np.nan
    if kind == "gaussian":
        x = r.normal(size=(M, K)) * np.exp(r.uniform(-20, 20, (M, 1)))
    return x


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_quantize(precision):
    r = np.random.default_rng(SEED)
    axes = {"M": EDGES, "K": EDGES + (144,), "format": (FP8_E4M3, FP8_E5M2), "shift": (0, 1),
            "kind": KINDS + ("zeros", "tiny", "small", "inf", "nan", "gaussian")}
    for case in covering(axes, seed=SEED)[:40]:
        x = rounded(spoilt(r, case["M"], case["K"], case["kind"]), precision).astype(np.float32)
        want = truth_of(x, case["format"])
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            k.seed(int(r.integers(1, 1000)))
            for half in (cpu, k):
                try:
                    same(quantize(half, x, case["format"], case["shift"]), want)
                except AssertionError as e:
                    raise AssertionError(f"{half.device} {label(case)}: {e}") from None


# ---- products ------------------------------------------------------------------------------------------------------
def operand(r, rows, K, format, blocks, kind="random"):
    """Codes, scales as the layout has them, and the values they stand for."""
    x = filled(r, rows, K, kind) * np.exp(r.uniform(-3, 3, (rows, 1)))
    q, scale = quantized(x.astype(np.float32), format, 128 if blocks else 1, 128)
    full = np.repeat(np.repeat(scale, 128 if blocks else 1, axis=0)[:rows], 128, axis=1)[:, :K]
    return {"q": q, "scale": block_scales(scale) if blocks else np.ascontiguousarray(scale.T), "format": format,
            "blocks": blocks, "value": value(q, format) * full.astype(np.float64)}


def gemm(k, function, a, b, bias=None, start=None, shift=0, workspace=None, scale_shifts=(0, 0)):
    M, K, N = *a["q"].shape, len(b["q"])
    a, b = (k.fp8_matrix(k.put(x["q"], shift=shift), k.put(x["scale"], shift=s), x["format"], x["blocks"])
            for x, s in zip((a, b), scale_shifts))
    out = k.out(M, N, shift=shift) if start is None else k.floatX(start, written=True, shift=shift)
    k.call(function, out, a, b, None if bias is None else k.floatX(bias, shift=shift), start is not None, M, K, N,
           workspace or k.workspace("fp8_gemm", M, K, N))
    return out.get()


def architecture(k, sm):
    if k.device == "emu":
        k.lib.emu_set_arch(sm)


@contextlib.contextmanager
def accumulator(cpu, bits):
    """The CPU half's sums keep so many bits (0: all)."""
    kept = ctypes.c_int.in_dll(cpu.lib, "fp8_accumulator_bits")
    kept.value = bits
    try:
        yield
    finally:
        kept.value = 0


def product(a, b, bias, start):
    truth = a["value"] @ b["value"].T
    return truth + (0 if bias is None else bias) + (0 if start is None else start)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_gemm(precision):
    """Every rung on every architecture: cuBLASLt's kernels (sm_90, and shapes it takes), fp8 mma (sm_89), bf16 mma."""
    r = np.random.default_rng(SEED)
    axes = {"M": EDGES + (132,), "K": EDGES + (272,), "N": EDGES + (136,), "sm": (80, 89, 90), "shift": (0, 1),
            "function": ("fp8_gemm", "fp8_gemm", "fp8_gemm_mma", "fp8_gemm_naive"), "add": (False, True),
            "bias": (False, True), "formats": ((0, 0), (0, 1), (1, 0), (1, 1)), "blocks": (0, 1, 2, 3)}
    cases = covering(axes, lambda c: c["function"] != "fp8_gemm_naive" or c["M"] * c["N"] < 20000, seed=SEED, tries=10)[:36]
    aligned = dict(M=132, K=272, N=136, shift=0, function="fp8_gemm", sm=90)
    cases += [dict(aligned, add=add, bias=bias, formats=formats, blocks=blocks) for add, bias, formats, blocks
              in ((False, True, (0, 0), 2), (True, False, (1, 0), 0), (False, False, (0, 1), 1), (False, False, (0, 0), 3))]
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        spaces = [half.workspace("fp8_gemm", 257, 272, 257) for half in (cpu, k)]
        for case in cases:
            M, K, N = case["M"], case["K"], case["N"]
            a = operand(r, M, K, case["formats"][0], bool(case["blocks"] & 1))
            b = operand(r, N, K, case["formats"][1], bool(case["blocks"] & 2))
            bias = rounded(filled(r, 1, N)[0], precision) if case["bias"] else None
            start = rounded(filled(r, M, N), precision) if case["add"] else None
            architecture(k, case["sm"])
            k.seed(int(r.integers(1, 1000)))
            want = gemm(cpu, "fp8_gemm", a, b, bias, start, workspace=spaces[0])
            got = gemm(k, case["function"], a, b, bias, start, case["shift"], spaces[1])
            truth, by_library = product(a, b, bias, start), k.device == "cuda" and case["function"] == "fp8_gemm"
            bar = want
            if by_library:
                with accumulator(cpu, HOPPER_BITS):
                    bar = gemm(cpu, "fp8_gemm", a, b, bias, start, workspace=spaces[0])
            for half, result in ("cpu", want), (k.device, got):
                check(f"{half} {label(case)}", result, truth, precision=precision, K=min(K, 128), cpu=bar,
                      torch=rounded(truth, precision) if precision == "bf16" else None,
                      largest=2.0**-HOPPER_BITS * 8 if by_library and precision == "fp32" else None)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_same_bits(precision):
    r = np.random.default_rng(SEED)
    a, b = operand(r, 140, 272, FP8_E4M3, False), operand(r, 136, 272, FP8_E4M3, True)
    with Kernels(DEVICE, precision) as k:
        workspace = k.workspace("fp8_gemm", 140, 272, 136)
        for sm in (80, 89):
            architecture(k, sm)
            same_bits(k, lambda k: {"out": gemm(k, "fp8_gemm", a, b, workspace=workspace)})
        same_bits(k, lambda k: quantize(k, a["value"].astype(np.float32), FP8_E4M3))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_scales_off_alignment(precision):
    """What the library took with aligned scales goes another way where one side's are not."""
    r = np.random.default_rng(SEED)
    a, b = operand(r, 132, 272, FP8_E4M3, False), operand(r, 136, 272, FP8_E4M3, True)
    truth = product(a, b, None, None)
    with Kernels(DEVICE, precision) as k:
        architecture(k, 90)
        for shifts in (0, 0), (1, 0), (0, 1), (0, 0):
            if DEVICE == "emu":
                k.lib.emu_sites.restype = ctypes.c_size_t
                k.lib.emu_sites(None, 0, True)
            bar = 4e-3 if precision == "bf16" else 2.0**-HOPPER_BITS if DEVICE == "cuda" and not any(shifts) else 1e-6
            assert rel_l2(gemm(k, "fp8_gemm", a, b, scale_shifts=shifts), truth) < bar
            if DEVICE == "emu":  # the sites of our kernel are passed where the library has no part
                text = ctypes.create_string_buffer(k.lib.emu_sites(None, 0, False))
                k.lib.emu_sites(text, len(text), False)
                assert (b"multiply" in text.value) == any(shifts), (shifts, text.value)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_far_scales(precision):
    """Scales whose own product is inf, beside sums of 0; and one far up, one far down."""
    a, b = (operand(np.random.default_rng(SEED), rows, 128, FP8_E4M3, False) for rows in (3, 2))
    for x, scales in (a, [1e22, 1e-15, 1e22]), (b, [1e22, 1e-20]):
        x["scale"][:] = scales
        x["q"][0] = 0  # a row of zeros, with the largest scale
    a["q"][2, 1:], b["q"][1, 1:] = 0, 0  # one term, of a finite product
    a["value"], b["value"] = (value(x["q"], FP8_E4M3) * x["scale"].T.astype(np.float64) for x in (a, b))
    truth = product(a, b, None, None)
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        for half, function, sm in ((cpu, "fp8_gemm", 0), (k, "fp8_gemm_mma", 80), (k, "fp8_gemm_mma", 89),
                                   (k, "fp8_gemm_naive", 90)):
            architecture(half, sm)
            got = gemm(half, function, a, b)
            bar = 1e-6 if precision == "fp32" else 4e-3
            assert np.allclose(got, truth, rtol=bar, atol=0), (half.device, function, sm, got, truth)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_nan(precision):
    """A NaN or an infinity in a tile spoils what the tile has a part in, and nothing else."""
    r = np.random.default_rng(SEED)
    x, y = filled(r, 132, 272), filled(r, 136, 272)
    x[3, 5], y[130, 200] = np.inf, np.nan
    spoilt = np.zeros((132, 136), bool)
    spoilt[3], spoilt[:, 128:] = True, True  # one row of 1×128 tiles, one of 128×128
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        for half, sm in (cpu, 0), (k, 80), (k, 89), (k, 90):
            architecture(half, sm)
            a, a_scale, b, b_scale = (half.out(*shape, dtype=dtype) for shape, dtype in (
                ((132, 272), np.uint8), ((3, 132), np.float32), ((136, 272), np.uint8), ((2, 4), np.float32)))
            half.call("fp8_quantize", a, a_scale, half.floatX(x), 132, 272, FP8_E4M3)
            half.call("fp8_quantize_blocks", b, b_scale, None, None, half.floatX(y), 136, 272, FP8_E4M3)
            a, b = half.fp8_matrix(a, a_scale, FP8_E4M3), half.fp8_matrix(b, b_scale, FP8_E4M3, True)
            out = half.out(132, 136)
            half.call("fp8_gemm", out, a, b, None, False, 132, 272, 136, half.workspace("fp8_gemm", 132, 272, 136))
            assert (np.isnan(out.get()) == spoilt).all(), (half.device, sm)


def truncated(a, b, bits):
    """One long sum of products whose accumulator keeps so many bits."""
    sum_ = np.zeros((len(a), len(b)), np.float32)
    for k in range(a.shape[1]):
        sum_ = ((sum_ + np.outer(a[:, k], b[:, k]).astype(np.float32)).view(np.uint32) & (0xFFFFFFFF << 24 - bits & 0xFFFFFFFF)
                ).astype(np.uint32).view(np.float32)
    return sum_


@isolated
def test_promotion():
    """What scaling and adding each 128 in fp32 is good for, where the accumulator of a product has 14 bits."""
    r = np.random.default_rng(SEED)
    a, b = (operand(r, 16, 4096, FP8_E4M3, False) for _ in range(2))
    for x in (a, b):
        x["q"] = x["q"] & 0x7F  # the same sign: sums grow
        x["scale"][:] = 1
        x["value"] = value(x["q"], FP8_E4M3)
    truth = product(a, b, None, None)
    long = rel_l2(truncated(a["value"].astype(np.float32), b["value"].astype(np.float32), 14), truth)
    with Kernels("cpu", "fp32") as cpu, Kernels(DEVICE, "fp32") as k:
        assert rel_l2(gemm(cpu, "fp8_gemm", a, b), truth) < 1e-6
        with accumulator(cpu, 14):
            errors = {"cpu": rel_l2(gemm(cpu, "fp8_gemm", a, b), truth)}
        if DEVICE == "emu":
            architecture(k, 89)
            k.lib.emu_set_fp8_bits(14)
            errors["emu"] = rel_l2(gemm(k, "fp8_gemm", a, b), truth)
            k.lib.emu_set_fp8_bits(0)
    for half, error in errors.items():
        assert 1e-5 < error < long / 16, f"{half}: error {error:.3g} with promotion, {long:.3g} without"


@isolated
def test_flops():
    r = np.random.default_rng(SEED)
    a, b = operand(r, 4, 16, FP8_E4M3, False), operand(r, 8, 16, FP8_E4M3, True)
    for device in ("cpu", DEVICE):
        with Kernels(device, "fp32") as k:
            before = k.flops.gemm_fp8
            gemm(k, "fp8_gemm", a, b)
            gemm(k, "fp8_gemm", a, b, start=np.zeros((4, 8)))
            assert k.flops.gemm_fp8 - before == 2 * 2 * 4 * 16 * 8
            assert k.flops.gemm_forward == k.flops.gemm_backward == 0


# ---- for the mutants -----------------------------------------------------------------------------------------------
def small_quantize(M, K):
    def run(k):
        x = rounded(filled(np.random.default_rng(1), M, K), k.precision).astype(np.float32)
        got = quantize(k, x, FP8_E5M2)
        same(got, truth_of(x, FP8_E5M2))
        return got

    return run


def small_gemm(M, K, N, function, sm):
    def run(k):
        r = np.random.default_rng(1)
        a, b = operand(r, M, K, FP8_E4M3, False), operand(r, N, K, FP8_E4M3, True)
        bias, start = (rounded(filled(r, rows, N), k.precision) for rows in (1, M))
        architecture(k, sm)
        got = gemm(k, function, a, b, bias[0], start)
        architecture(k, 90)
        assert rel_l2(got, product(a, b, bias[0], start)) < (1e-6 if k.precision == "fp32" else 1e-2)
        return {"out": got}

    return run


SMALL = [("fp8 quantize aligned", small_quantize(144, 144)), ("fp8 quantize ragged", small_quantize(131, 129)),
         ("fp8 gemm aligned", small_gemm(130, 400, 136, "fp8_gemm_mma", 89)),
         ("fp8 gemm ragged", small_gemm(130, 259, 133, "fp8_gemm_mma", 80)),
         ("fp8 gemm naive", small_gemm(5, 131, 9, "fp8_gemm_naive", 80))]

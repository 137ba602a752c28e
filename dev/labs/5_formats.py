#!/usr/bin/env python3
"""Lab 5: what a number format can hold, and what it loses (dev/labs/5_formats.md).

    python3 dev/labs/5_formats.py
"""
import ctypes
import math
import os
import random
import struct

import lab

# bits of exponent and of mantissa; does the highest exponent stand for inf and NaN alone?
FORMATS = {"fp32": (8, 23, True), "fp16": (5, 10, True), "bf16": (8, 7, True), "E4M3": (4, 3, False), "E5M2": (5, 2, True)}
FP8 = {"E4M3": 0, "E5M2": 1}  # Fp8Format of kernels/kernels.h
TILE = 128
ACCUMS = [1, 8, 64, 512]
OUTLIERS, QUANTIZED = [1e3, 1e4, 1e5, 1e6], "E4M3"
BITS = 14  # of an accumulator
RUNS = ["fp32", "--matmul bf16", "--fp8 e4m3", "--fp8 hybrid"]


# ---- the kernels of this repository -----------------------------------------------------------------------------------
class Fp8Matrix(ctypes.Structure):
    _fields_ = [("q", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("format", ctypes.c_int), ("blocks", ctypes.c_bool)]


def address(array):
    return ctypes.cast(array, ctypes.c_void_p)


def floats(x):
    return (ctypes.c_float * len(x))(*x)


class Library:
    """kernels/*.c of one precision."""

    def __init__(self, precision):
        directory = f"build/cpu-{precision}"
        options = ["DEVICE=cpu", f"PRECISION={precision}", f"{directory}/libkernels.so"]
        self.lib = ctypes.CDLL(str(lab.make(*options)))

    def __call__(self, function, *args):
        """With numbers as size_t; they do for an enum and a bool too."""
        self.lib[function](*(ctypes.c_size_t(x) if isinstance(x, int) else x for x in args))

    def workspace(self, name, *sizes):
        bytes_ = self.lib[f"{name}_workspace"]
        bytes_.restype = ctypes.c_size_t
        return ctypes.create_string_buffer(bytes_(*map(ctypes.c_size_t, sizes)) + 64)

    def quantize(self, x, rows, format):
        """(codes, scales) of x [rows, K]; a scale for 128 of a row."""
        K = len(x) // rows
        q, scale = (ctypes.c_uint8 * len(x))(), (ctypes.c_float * (rows * -(-K // TILE)))()
        self("fp8_quantize", q, scale, floats(x), rows, K, FP8[format])
        return q, scale

    def fp8_product(self, a, b, M, N, K, format="E4M3", bits=0):
        """a [M, K] · b [N, K]ᵀ, both (codes, scales)."""
        ctypes.c_int.in_dll(self.lib, "fp8_accumulator_bits").value = bits
        out = (ctypes.c_float * (M * N))()
        left, right = (Fp8Matrix(address(q), address(scale), FP8[format], False) for q, scale in (a, b))
        self("fp8_gemm", out, left, right, None, 0, M, K, N, self.workspace("fp8_gemm", M, K, N))
        ctypes.c_int.in_dll(self.lib, "fp8_accumulator_bits").value = 0
        return list(out)

    def product(self, a, b, M, N, K, bf16=False):
        ctypes.c_bool.in_dll(self.lib, "matmul_inputs_bf16").value = bf16
        out = (ctypes.c_float * (M * N))()
        self("matmul_forward", out, floats(a), floats(b), None, M, K, N, self.workspace("matmul", M, K, N))
        ctypes.c_bool.in_dll(self.lib, "matmul_inputs_bf16").value = False
        return list(out)


def distance(got, truth):
    """‖got − truth‖ / ‖truth‖"""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(got, truth)) / sum(y * y for y in truth))


# ---- formats ----------------------------------------------------------------------------------------------------------
def by_bits(name):
    """largest, smallest normal, smallest of all, spacing at 1, numbers from 1 to 2"""
    exponent, m, reserved = FORMATS[name]
    bias = 2 ** (exponent - 1) - 1
    largest = (2 - 2.0**-m) * 2.0**bias if reserved else (2 - 2 * 2.0**-m) * 2.0 ** (bias + 1)  # E4M3: NaN is the last code
    return largest, 2.0 ** (1 - bias), 2.0 ** (1 - bias - m), 2.0**-m, 2**m


def fp16(x):
    try:
        return struct.unpack("e", struct.pack("e", x))[0]
    except OverflowError:
        return math.inf


def round_trip(library, name):
    """A function: numbers → what the format makes of them. fp16 is Python's, for the program has none."""
    if name == "fp32":
        return lambda x: [ctypes.c_float(v).value for v in x]
    if name == "fp16":
        return lambda x: [fp16(v) for v in x]
    if name == "bf16":  # a product with 1, of inputs rounded to bf16
        return lambda x: library.product(x, [1.0], len(x), 1, 1, bf16=True)
    largest = round(1 / library.quantize([1.0], 1, name)[1][0])  # the scale of a tile is its largest / the format's

    def fp8(x):
        """Beside the format's largest the scale is 1; then that goes, and a product with 1 turns codes into floats."""
        pairs = [v for number in x for v in (largest, max(-largest, min(number, largest)))]
        q, scale = library.quantize(pairs, len(x), name)
        for i in range(0, len(q), 2):
            q[i] = 0
        return library.fp8_product((q, scale), library.quantize([largest, 1.0], 1, name), len(x), 1, 2, name)

    return fp8


def kept(rounded, x):
    """Those that rounding leaves alone."""
    return [x for x, y in zip(x, rounded(x)) if x == y]


def powers_of_two(rounded):
    return kept(rounded, [2.0**k for k in range(-160, 160)])


def spacing_at(power, rounded):
    """From a power of two to the next number."""
    return min(kept(rounded, [power * (1 + 2.0**-k) for k in range(30)])) - power


def measured(rounded):
    """The same five, from what rounding does to numbers."""
    powers = powers_of_two(rounded)
    largest = part = powers[-1]
    while kept(rounded, [largest + part / 2]):
        part /= 2
        largest += part
    spacing = spacing_at(1, rounded)
    full = [p for p in powers if kept(rounded, [p * (1 + spacing)])]
    window = min(1.0, 1024 * spacing)  # count what occurs there, by steps of a quarter of the spacing
    seen = {y for y in rounded([1 + i * spacing / 4 for i in range(round(4 * window / spacing))]) if y < 1 + window}
    return largest, full[0], powers[0], spacing, round(len(seen) / window)


def formats(library):
    print("\nfive formats: what follows from their bits, and what rounding shows (fp16: Python's, all else: this program's)")
    rows = []
    for name, (exponent, m, _) in FORMATS.items():
        for how, values in (("by its bits", by_bits(name)), ("measured", measured(round_trip(library, name)))):
            rows.append([f"{name} {how}", f"1+{exponent}+{m}", *(f"{x:.7g}" for x in values)])
    lab.table(["format", "bits", "largest", "smallest normal", "smallest", "spacing at 1", "numbers from 1 to 2"], rows)


# ---- sums in bf16 -----------------------------------------------------------------------------------------------------
def bf16(x):
    """The bits of numbers that bf16 has."""
    return (ctypes.c_uint16 * len(x))(*(struct.unpack("I", struct.pack("f", v))[0] >> 16 for v in x))


def value(bits):
    return struct.unpack("f", struct.pack("I", bits << 16))[0]


def sums(library):
    terms, rows = 4096, []
    for x in (1.0, 1.25, 2.0**-13):
        total, more, wide = bf16([0.0]), bf16([x]), floats([0.0])
        stalls = None
        for _ in range(terms):
            before = total[0]
            library("residual_forward", total, total, more, 1)  # bf16 + bf16, rounded to bf16
            library("gradient_accumulate", wide, bf16([x]), 1)  # fp32 += bf16, which becomes 0
            if total[0] == before and stalls is None:
                stalls = value(before)
        predicted = 2.0 ** (math.ceil(math.log2(x)) + 8)  # from there on, x is half a spacing or less
        cells = x, predicted, stalls, stalls / x, value(total[0]), wide[0]
        rows.append([f"{cell:.6g}" for cell in cells])
    print(f"\nadding the same number again and again, {terms} times")
    lab.table(["x", "bf16 stalls at, predicted", "measured", "times x", "bf16 in the end", "fp32 += bf16"], rows)


def accumulation(a, program):
    rows = []
    for accum in ACCUMS[1::2] if a.quick else ACCUMS:
        flags = ["--accum", accum, "--micro-batch", 1, "--seq", 32, "--steps", 1, "--warmup", 5]
        runs = [lab.train(a, *flags), lab.train(a, *flags, program=program),
                lab.train(a, *flags, "--grad-accum-fp32", program=program)]  # fmt: skip
        norms = [run.norm[0] for run in runs]
        rows.append([accum, *(f"{n:.4f}" for n in norms), *(f"{100 * (n / norms[0] - 1):+.2f} %" for n in norms[1:])])
    print("\ngradient norm of the first step: so many micro-batches of one sequence, summed in bf16 or in fp32")
    lab.table(["--accum", "fp32 build", "bf16 build", "and --grad-accum-fp32", "bf16 off by", "with fp32 sums off by"], rows)


# ---- fp8 --------------------------------------------------------------------------------------------------------------
def expected(x, scales):
    """Relative error of x by its tiles' scales: a number is off by its spacing/√12, or gone if below half the spacing."""
    _, smallest_normal, _, at_1, _ = by_bits(QUANTIZED)
    off = 0.0
    for i, v in enumerate(x):
        scale = scales[i // TILE]
        power = 2.0 ** (math.frexp(v / scale)[1] - 1)
        spacing = scale * at_1 * max(power, smallest_normal)  # below that it stays
        off += v * v if abs(v) < spacing / 2 else spacing**2 / 12
    return math.sqrt(off / sum(v * v for v in x))


def amax(x):
    return max(map(abs, x))


def outliers(library):
    """One huge number in a matrix of Gaussian ones: what becomes of the products of the other rows?"""
    r, M, N, K = random.Random(1), 64, 64, 4 * TILE
    largest = by_bits(QUANTIZED)[0]
    # The last place of each tile is free: the largest of the whole matrix there makes all tiles' scales one.
    last = range(TILE - 1, M * K, TILE)
    x = [0.0 if i % TILE == TILE - 1 else r.gauss(0, 1) for i in range(M * K)]
    w = [0.0 if i % TILE == TILE - 1 else r.gauss(0, 1) for i in range(N * K)]
    right, rows = library.quantize(w, N, QUANTIZED), []
    others = x[K:]  # outliers come into row 0, which is not looked at
    tiles = [amax(others[i : i + TILE]) / largest for i in range(0, len(others), TILE)]
    of_w = expected(w, [amax(w[i : i + TILE]) / largest for i in range(0, len(w), TILE)])
    for outlier in OUTLIERS:
        x[0] = outlier
        truth = library.product(x, w, M, N, K)[N:]
        whole = list(x)
        for i in last:
            whole[i] = outlier
        q, scale = library.quantize(whole, M, QUANTIZED)
        for i in last:
            q[i] = 0
        lefts = library.quantize(x, M, QUANTIZED), (q, scale)
        errors = [distance(library.fp8_product(left, right, M, N, K, QUANTIZED)[N:], truth) for left in lefts]
        predicted = [math.hypot(expected(others, s), of_w) for s in (tiles, [outlier / largest] * len(tiles))]
        rows.append([f"{outlier:.0e}", *(f"{e:.4f}" for pair in zip(predicted, errors) for e in pair)])
    print(f"\na product in {QUANTIZED} beside an outlier: relative error, with a scale for each 128 and with one for all")
    lab.table(["outlier", "tiles, predicted", "tiles", "one scale, predicted", "one scale"], rows)


def truncated(products, bits):
    """Their sum in an accumulator of so many bits, which drops what is below."""
    total, mask = 0.0, 0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF
    for p in products:
        word = struct.unpack("I", struct.pack("f", total + p))[0] & mask
        total = struct.unpack("f", struct.pack("I", word))[0]
    return total


def lost(K, products):
    """The share that goes missing in a sum of K of these: each loses what it has below the last bit of the sum so far."""
    mean = sum(products) / len(products)

    def below(bit):
        return sum(p % bit for p in products) / len(products)

    bits = [2.0 ** (math.floor(math.log2(k * mean)) - BITS + 1) for k in range(1, K + 1)]
    each = {bit: below(bit) for bit in set(bits)}
    return sum(each[bit] for bit in bits) / (K * mean)


def promotion(library, quick):
    r, n, rows = random.Random(2), 4, []
    for K in (128, 1024, 4096) if quick else (128, 256, 512, 1024, 2048, 4096):
        # a 1 in each tile, so that all have the same scale and the sum can go straight through
        both = [[1.0 if k % TILE == 0 else r.random() for _ in range(n) for k in range(K)] for _ in range(2)]
        a, b = (library.quantize(x, n, "E4M3") for x in both)
        exact, promoted = (library.fp8_product(a, b, n, n, K, bits=bits) for bits in (0, BITS))
        codes = [round_trip(library, "E4M3")([448 * v for v in x]) for x in both]  # as numbers, without the scale
        rows_of = [[x[i : i + K] for i in range(0, n * K, K)] for x in codes]
        pairs = [[x * y for x, y in zip(u, v)] for u in rows_of[0] for v in rows_of[1]]
        through = [truncated(products, BITS) * a[1][0] * b[1][0] for products in pairs]
        rows.append([K, *(f"{100 * x:.3f} %" for x in (lost(K, pairs[0]), distance(through, exact), lost(TILE, pairs[0]),
                                                       distance(promoted, exact)))])  # fmt: skip
    print(f"\na sum of K products in an accumulator of {BITS} bits: the share that is lost")
    lab.table(["K", "straight through, predicted", "straight through", "promoted each 128, predicted", "promoted"], rows)


def training(a):
    runs = {}
    for name in RUNS:
        flags = name.split() if name != "fp32" else []
        runs[name] = lab.train(a, *flags, "--steps", 4 if a.quick else 80, "--warmup", 5)
    whole, rows = runs["fp32"], []
    for name, run in runs.items():
        gaps = [abs(x - y) for x, y in zip(run.loss, whole.loss)]
        tail = run.loss[-10:]
        losses = run.loss[0], run.loss[-1], sum(tail) / len(tail)
        rows.append([name, *(f"{x:.4f}" for x in losses), f"{sum(gaps) / len(gaps):.1e}", f"{max(gaps):.1e}"])
    print("\nthe same model, by what its matrix products multiply")
    lab.table(["run", "first loss", "last loss", "mean of the last 10", "apart from fp32, mean", "at most"], rows)
    return runs


# ---- the picture ------------------------------------------------------------------------------------------------------
COLOURS = ["#5b6f84", "#4e79a7", "#59a14f", "#f28e2b", "#e15759"]


def draw(plt, library, runs):
    figure, (spacing, losses) = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for name, colour in zip(FORMATS, COLOURS):
        rounded = round_trip(library, name)
        powers = powers_of_two(rounded)
        spacing.loglog(powers, [spacing_at(p, rounded) / p for p in powers], label=name, color=colour, lw=2)
    spacing.set(xlabel="magnitude", ylabel="spacing ÷ magnitude", title="how far is the next number? (measured)")
    spacing.legend(frameon=False)
    for name, colour in zip(RUNS[1:], COLOURS[2:]):
        gaps = [abs(x - y) for x, y in zip(runs[name].loss, runs["fp32"].loss)]
        losses.semilogy(range(1, len(gaps) + 1), gaps, label=name, color=colour)
    losses.set(xlabel="step", ylabel="|loss − fp32's|", title="what training makes of it")
    losses.legend(frameon=False)
    return figure


def main():
    a = lab.begin(__doc__)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # much here is small: threads that spin would be in the way
    fp32, bf16_ = Library("fp32"), Library("bf16")
    formats(fp32)
    sums(bf16_)
    accumulation(a, lab.make("DEVICE=cpu", "PRECISION=bf16", "build/cpu-bf16/train"))
    outliers(fp32)
    promotion(fp32, a.quick)
    runs = training(a)
    if plt := lab.pyplot("the formats"):
        lab.save(draw(plt, fp32, runs), a, "5_formats.png")


if __name__ == "__main__":
    main()

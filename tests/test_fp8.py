"""--fp8: how exact the three products of a linear layer are in 8 bits, and what a run makes of it.

The layer is fp8_linear.c itself, compiled beside the CPU's kernels; tests/test_cuda_fp8.py holds the kernels to their definition.
"""
import ctypes
import subprocess
import tempfile

import numpy as np
import pytest

from conftest import ROOT, SEED
from kernels import FP8_E4M3, FP8_E5M2, Kernels, isolated, library, rel_l2
from test_cuda_fp8 import LARGEST, accumulator, cast, operand, truncated, value
from test_cuda_fp8 import gemm as product_of

RECIPES = {"e4m3": 0, "hybrid": 1}  # Fp8Recipe of train.h
MANTISSA, LOWEST = {FP8_E4M3: 3, FP8_E5M2: 2}, {FP8_E4M3: -6, FP8_E5M2: -14}  # bits; exponent of the smallest normal number


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- a linear layer ------------------------------------------------------------------------------------------------
LAYER = """
#include "train.h"
static Model m;
size_t bytes(int recipe, size_t M, size_t K, size_t N) { m.config.fp8 = recipe; return linear_workspace(&m, M, K, N); }
void use(void *workspace) { m.workspace = workspace; }
void F(void *out, void *inp, void *weight, void *bias, size_t M, size_t K, size_t N) {
    linear_forward(&m, out, inp, weight, bias, M, K, N);
}
void I(void *dinp, void *dout, void *weight, size_t M, size_t K, size_t N) {
    linear_backward_input(&m, dinp, dout, weight, M, K, N);
}
void W(void *dweight, void *dout, void *inp, size_t M, size_t K, size_t N) {
    linear_backward_weight(&m, dweight, dout, inp, M, K, N);
}
"""


class Layer:
    """fp8_linear.c over the kernels `k`, which check that nothing is written outside of its arrays and its workspace."""

    def __init__(self, k, recipe):
        self.k, self.recipe = k, RECIPES.get(recipe, -1)
        with tempfile.TemporaryDirectory() as d:
            made = [f"{d}/layer.so", "-x", "c", "-", str(ROOT / "fp8_linear.c"), "-x", "none", str(library("cpu", k.precision))]
            flags = ["-std=c11", "-O1", "-shared", "-fPIC", *(["-DPRECISION_BF16"] if k.precision == "bf16" else [])]
            subprocess.run(["cc", "-I", ROOT, *flags, "-o", *made], input=LAYER, text=True, check=True)
            self.lib = ctypes.CDLL(made[0])
        self.lib.bytes.restype = ctypes.c_size_t

    def call(self, name, out, *arrays, sizes):
        sizes = [ctypes.c_size_t(n) for n in sizes]
        self.lib.use(self.k.out(self.lib.bytes(self.recipe, *sizes), dtype=np.uint8))
        getattr(self.lib, name)(out, *(None if a is None else self.k.floatX(a) for a in arrays), *sizes)
        return out.get().astype(np.float64)

    def products(self, inp, weight, dout, bias=None, start=None):
        """The results of F, I and W."""
        (M, K), N = inp.shape, len(weight)
        start = self.k.floatX(np.zeros((N, K)) if start is None else start, written=True)
        return {"F": self.call("F", self.k.out(M, N), inp, weight, bias, sizes=(M, K, N)),
                "I": self.call("I", self.k.out(M, K), dout, weight, sizes=(M, K, N)),
                "W": self.call("W", start, dout, inp, sizes=(M, K, N))}


def data(kind, M, K, N):
    """inp [M,K], weight [N,K] and dout [M,N], in fp32's numbers."""
    r = np.random.default_rng(SEED)
    inp, weight, dout = r.normal(size=(M, K)), 0.02 * r.normal(size=(N, K)), 1e-5 * r.normal(size=(M, N))
    if kind == "channels":  # a few are 100 times as large, as transformers have them
        inp[:, r.choice(K, 16, replace=False)] *= 100
        dout[:, r.choice(N, 16, replace=False)] *= 100
    if kind == "log-normal":  # one number in a hundred is a hundred times the median
        inp, dout = inp * np.exp(2 * r.normal(size=inp.shape)), dout * np.exp(2 * r.normal(size=dout.shape))
    if kind == "tokens":  # a token's numbers are alike, those of another may be a millionth
        inp, dout = inp * np.exp(r.uniform(-7, 7, (M, 1))), dout * np.exp(r.uniform(-7, 7, (M, 1)))
    return [x.astype(np.float32).astype(np.float64) for x in (inp, weight, dout)]


def truth(inp, weight, dout):
    return {"F": inp @ weight.T, "I": dout @ weight, "W": dout.T @ inp}


# ---- how large the error should be ---------------------------------------------------------------------------------
# Between 2^e and 2^(e+1) numbers with m bits of mantissa are 2^(e−m) apart, so rounding is off by anything up to half of that,
# equally likely: variance (2^(e−m))² / 12. Where all sizes in that range are equally likely as logarithms, the mean square of
# the numbers themselves is 4^e · 3 / (2 ln 2). The ratio's root is the relative error of one number: 2^−m · 0.196, 2.45 % for
# E4M3, 4.9 % for E5M2. Errors are independent, and so are the terms of a sum: a product of two such operands is off by
# √(a² + b²), however long the sum: 3.47 % for two E4M3, 5.5 % for E4M3 with E5M2.
ONE_NUMBER = {f: 2.0 ** -m / 12**0.5 / (3 / (2 * np.log(2))) ** 0.5 for f, m in MANTISSA.items()}


def expected(recipe, name):
    return np.hypot(ONE_NUMBER[FP8_E4M3], ONE_NUMBER[FP8_E5M2 if recipe == "hybrid" and name != "F" else FP8_E4M3])


def variance(x, format, tile):
    """Of the rounding error of each number, in tiles of this shape (None: one scale for all). Below 2^LOWEST of its scale a number
    is as far from its neighbours as there, and what is less than half of that is lost: the error is itself."""
    rows, columns = x.shape
    down, across = tile or (rows, columns)
    padded = np.zeros((-(-rows // down) * down, -(-columns // across) * across))
    padded[:rows, :columns] = np.abs(x)
    amax = padded.reshape(-1, down, padded.shape[1] // across, across).max(axis=(1, 3))
    amax = np.repeat(np.repeat(amax, down, 0), across, 1)[:rows, :columns]
    scale = (amax / LARGEST[format]).clip(1e-300)
    size = np.abs(x) / scale
    gap = 2.0 ** (np.floor(np.log2(size.clip(2.0 ** LOWEST[format]))) - MANTISSA[format])
    return np.where(np.abs(x) == amax, 0, np.where(size < gap / 2, size**2, gap**2 / 12) * scale**2)


def predicted(recipe, inp, weight, dout):
    """The same from the numbers at hand, with their scales: what E[Σ error²] / Σ truth² is."""
    gradient = FP8_E5M2 if recipe == "hybrid" else FP8_E4M3
    W = weight, variance(weight, FP8_E4M3, (128, 128))
    sides = {"F": ((inp, variance(inp, FP8_E4M3, (1, 128))), W),
             "I": ((dout, variance(dout, gradient, (1, 128))), [x.T for x in W]),
             "W": ([x.T for x in (dout, variance(dout, gradient, (128, 1)))],
                   [x.T for x in (inp, variance(inp, FP8_E4M3, (128, 1)))])}
    return {name: ((va @ (b * b).T + (a * a) @ vb.T + va @ vb.T).sum() / ((a @ b.T) ** 2).sum()) ** 0.5
            for name, ((a, va), (b, vb)) in sides.items()}


# The prediction holds to a few percent where many numbers share the sum, and less well where a handful are nearly all of it.
WITHIN = {"normal": 1.04, "channels": 1.3, "tokens": 1.15, "log-normal": 1.6}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", WITHIN)
@isolated
def test_error_of_the_three_products(kind, recipe):
    x = data(kind, 264, 400, 300)
    with Kernels("cpu", "fp32") as k:
        got = Layer(k, recipe).products(*x)
    exact, theory = truth(*x), predicted(recipe, *x)
    for name in "FIW":
        error, factor = rel_l2(got[name], exact[name]), WITHIN[kind]
        print(f"{kind:10} {recipe:6} {name}: error {error:.4f}, from the numbers {theory[name]:.4f},",
              f"from mantissas {expected(recipe, name):.4f}")
        assert theory[name] / factor < error < theory[name] * factor, name
        if kind == "normal":  # sizes are not quite as likely as logarithms
            assert expected(recipe, name) / 1.1 < error < expected(recipe, name) * 1.1, name


def error_of_rows(got, exact):
    """The relative error of a row (a token), its root mean square over rows: no row hides behind a larger one."""
    return (((got - exact) ** 2).sum(1) / (exact**2).sum(1)).mean() ** 0.5


@isolated
def test_one_scale_for_a_tensor():
    """... keeps the largest tokens and loses the small ones, in the subnormal numbers and below. Tiles keep all of them alike.

    (Channels 100 times as large are no trouble for either: E4M3 reaches over 2^15 with all its digits.)"""
    for kind in "tokens", "channels":
        inp, weight, dout = data(kind, 264, 400, 300)
        with Kernels("cpu", "fp32") as k:
            tiles = error_of_rows(Layer(k, "e4m3").products(inp, weight, dout)["F"], inp @ weight.T)
        scales = [np.abs(x).max() / LARGEST[FP8_E4M3] for x in (inp, weight)]
        rounded = [value(cast(x / s, FP8_E4M3), FP8_E4M3) * s for x, s in zip((inp, weight), scales)]
        tensor = error_of_rows(rounded[0] @ rounded[1].T, inp @ weight.T)
        va, vb = (variance(x, FP8_E4M3, None) for x in (inp, weight))
        terms = va @ (weight**2).T + inp**2 @ vb.T + va @ vb.T
        theory = (terms.sum(1) / ((inp @ weight.T) ** 2).sum(1)).mean() ** 0.5
        print(f"{kind}: one scale {tensor:.4f} (predicted {theory:.4f}), tiles {tiles:.4f}")
        assert theory / 1.1 < tensor < theory * 1.1
        if kind == "tokens":
            assert tensor > 5 * tiles and tiles < 1.1 * expected("e4m3", "F")


@pytest.mark.parametrize("bits", [13, 14])
@pytest.mark.parametrize("signs", ["both", "one"])
@isolated
def test_promotion(signs, bits):
    """A sum of 4,096 in an accumulator of so many bits: the longer it is, the more of each term falls off its end. With a new
    sum for each 128, added in fp32 (fp8_gemm.c), what is dropped is in proportion to the short sums."""
    r = np.random.default_rng(SEED)
    a, b = (operand(r, 24, 4096, FP8_E4M3, False) for _ in range(2))
    for x in (a, b):
        x["q"] = x["q"] & 0x7F if signs == "one" else x["q"]
        x["scale"][:] = 1
        x["value"] = value(x["q"], FP8_E4M3)
    exact = a["value"] @ b["value"].T
    without = rel_l2(truncated(a["value"].astype(np.float32), b["value"].astype(np.float32), bits), exact)
    with Kernels("cpu", "fp32") as cpu, accumulator(cpu, bits):
        promoted = rel_l2(product_of(cpu, "fp8_gemm", a, b), exact)
    print(f"{signs} signs, {bits} bits: {without:.2e} without promotion, {promoted:.2e} with, {without / promoted:.1f} times less")
    assert 2.0 ** (-bits - 4) < promoted
    assert without > (16 if signs == "one" else 3) * promoted


# ---- sizes, options --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@isolated
def test_any_size(precision):
    """One number, rows of no whole tile, many rows; the bias is added, the weight's gradient joins what is there."""
    r = np.random.default_rng(SEED)
    for M, K, N in (1, 1, 1), (11, 48, 77), (130, 257, 3), (600, 130, 130):
        inp, weight, dout, bias, start = (r.normal(size=s) for s in ((M, K), (N, K), (M, N), N, (N, K)))
        with Kernels("cpu", precision) as k:
            got = Layer(k, "e4m3").products(inp, weight, dout, bias, start)
        exact = truth(inp, weight, dout)
        for name, more in (("F", bias), ("I", 0), ("W", start)):
            assert rel_l2(got[name], exact[name] + more) < 0.06, (M, K, N, name)


@isolated
def test_without_the_flag():
    """The same functions are matmul_* then, to the bit."""
    inp, weight, dout = data("normal", 19, 40, 30)
    with Kernels("cpu", "fp32") as k:
        got, space = Layer(k, None).products(inp, weight, dout), k.workspace("matmul", 19, 40, 30)
        out, dinp, dweight = k.out(19, 30), k.out(19, 40), k.floatX(np.zeros((30, 40)), written=True)
        inp, weight, dout = map(k.floatX, (inp, weight, dout))
        k.call("matmul_forward", out, inp, weight, None, 19, 40, 30, space)
        k.call("matmul_backward_input", dinp, dout, weight, 19, 40, 30, space)
        k.call("matmul_backward_weight", dweight, dout, inp, 19, 40, 30, space)
        for name, want in ("F", out), ("I", dinp), ("W", dweight):
            assert (got[name] == want.get()).all(), name
        assert k.flops.gemm_fp8 == 0


# ---- the program -----------------------------------------------------------------------------------------------------
SMALL = "--layers 2 --hidden 48 --heads 4 --ffn 77 --seq 11 --micro-batch 3 --peak-tflops 1 --steps 3".split()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_odd_sizes_and_what_is_counted(arch, precision, text, train):
    """No size is a multiple of 16. All four layers of a block, forward and both of backward, and nothing else, are in 8 bits."""
    tokens, multiplied = 3 * 3 * 11, 2 * (4 * 48 * 48 + (3 if arch == "llama" else 2) * 48 * 77)
    flags = ["--arch", arch, "--kv-heads", 4, *SMALL, "--data", text]
    plain = train(*flags, precision=precision)
    curves = {}
    for recipe, recompute in ("e4m3", "none"), ("e4m3", "full"), ("hybrid", "none"):
        r = train(*flags, "--fp8", recipe, "--recompute", recompute, precision=precision)
        flops, head = r.one("end")["flops"], 2 * tokens * 48 * 256
        assert flops["gemm_fp8"] == 2 * tokens * multiplied * (4 if recompute == "full" else 3)
        assert (flops["gemm_forward"], flops["gemm_backward"]) == (head, 2 * head)
        curves[recipe, recompute] = r.curve("loss") + r.curve("grad_norm")
        assert np.abs(np.subtract(r.curve("loss"), plain.curve("loss"))).max() < 0.02
    assert curves["e4m3", "none"] == curves["e4m3", "full"], "the same numbers computed again are the same"
    assert curves["e4m3", "none"] != curves["hybrid", "none"]
    assert plain.one("end")["flops"]["gemm_fp8"] == 0


@pytest.mark.parametrize("word, nearest", [("e5m2", "e4m3"), ("hybird", "hybrid"), ("bf16", None)])
def test_refusals(word, nearest, train):
    r = train("--fp8", word, fails=True)
    assert r.code == 2 and len(r.stderr.splitlines()) == 1, f"{r}"
    assert f"--fp8 {word}: not one of e4m3|hybrid; nearest: " in r.stderr, f"{r}"
    assert nearest is None or r.stderr.endswith(f"nearest: {nearest}\n"), f"{r}"


# A run as one makes it: a rate that learns fast, a warm-up, 512 tokens a step. (Of a seed for which no batch of the fp32 run
# has a gradient many times the usual: such a batch's loss is itself a matter of chance.)
RUN = "--steps 50 --lr 1e-3 --warmup 10 --micro-batch 8 --seed 7 --peak-tflops 1".split()


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_loss_curves(model, text, train):
    """8 bits learn as 32 do: at each of 50 steps the loss is the same but for 0.02. So do 16."""
    flags = ["--model", model, *RUN, "--data", text]
    fp32 = train(*flags)
    curve = fp32.curve("loss")
    assert curve[-1] < curve[0] - 2 and max(fp32.curve("grad_norm")[5:]) < 10
    for name, r in (("bf16 build", train(*flags, precision="bf16")), ("fp8 e4m3", train(*flags, "--fp8", "e4m3")),
                    ("fp8 hybrid", train(*flags, "--fp8", "hybrid"))):
        gaps = np.abs(np.subtract(r.curve("loss"), curve))
        print(f"{model} {name}: largest gap {gaps.max():.4f} at step {gaps.argmax() + 1};",
              f"last loss {r.curve('loss')[-1]:.4f}, fp32 {curve[-1]:.4f}")
        assert 1e-5 < gaps.max() < 0.02, name


def test_two_ranks(text, train):
    """ZeRO-3 over two ranks: other tiles of tokens, so another rounding, but the same run."""
    flags = ["--model", "llama-tiny", "--steps", 10, "--warmup", 5, "--data", text, "--peak-tflops", 1, "--fp8", "e4m3"]
    two = train(*flags, "--micro-batch", 3, "--zero", 3, ranks=2)
    one = train(*flags, "--micro-batch", 6)
    gaps = np.abs(np.subtract(one.curve("loss"), two.curve("loss")))
    print(f"largest gap {gaps.max():.5f}")
    assert gaps.max() < 2e-3

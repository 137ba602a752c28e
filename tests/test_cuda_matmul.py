"""matmul.cu: a linear layer's products through cuBLASLt, and the bias's gradient, against double precision."""
import ctypes

import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits, torch_bf16

SIZES = (1, 7, 16, 17, 72, 129)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


# What comes of inp, weight, bias, dout, and the dweight and dbias that are added to: in numpy and in PyTorch.
FORMULAS = {
    "out": lambda i, w, b, d, dw, db: i @ w.T + b,
    "out without bias": lambda i, w, b, d, dw, db: i @ w.T,
    "dinp": lambda i, w, b, d, dw, db: d @ w,
    "dweight": lambda i, w, b, d, dw, db: dw + d.T @ i,
    "dbias": lambda i, w, b, d, dw, db: db + d.sum(0),
}


def inputs(r, M, K, N, kind, precision):
    shapes = (M, K), (N, K), (1, N), (M, N), (N, K), (1, N)
    arrays = [rounded(filled(r, *shape, kind if n in (0, 3) else "random"), precision) for n, shape in enumerate(shapes)]
    return [a[0] if len(a) == 1 and n in (2, 5) else a for n, a in enumerate(arrays)]


ARRAYS = "inp", "weight", "bias", "dout", "dweight", "dbias", "out", "dinp"


def layer(k, arrays, shift=0, workspace=None, shifted=ARRAYS):
    """All five, and the rung of dbias; `shifted` arrays lie `shift` elements off alignment."""
    off = [shift * (name in shifted) for name in ARRAYS]
    inp, weight, bias, dout = (k.floatX(a, shift=s) for a, s in zip(arrays[:4], off))
    dweight, dbias, naive = (k.floatX(arrays[i], written=True, shift=off[i]) for i in (4, 5, 5))
    (M, K), N = arrays[0].shape, len(arrays[1])
    w = workspace or k.workspace("matmul", M, K, N)
    out, plain, pre, activated, plain_pre, plain_activated = (k.out(M, N, shift=off[6]) for _ in range(6))
    dinp = k.out(M, K, shift=off[7])
    k.call("matmul_forward", out, inp, weight, bias, M, K, N, w)
    k.call("matmul_forward", plain, inp, weight, None, M, K, N, w)
    k.call("matmul_gelu_forward", activated, pre, inp, weight, bias, M, K, N, w)
    k.call("matmul_gelu_forward", plain_activated, plain_pre, inp, weight, None, M, K, N, w)
    k.call("matmul_backward_input", dinp, dout, weight, M, K, N, w)
    k.call("matmul_backward_weight", dweight, dout, inp, M, K, N, w)
    k.call("matmul_backward_bias", dbias, dout, M, N, w)
    if k.has("matmul_backward_bias_naive"):
        k.call("matmul_backward_bias_naive", naive, dout, M, N, w)
    else:
        k.call("matmul_backward_bias", naive, dout, M, N, w)
    return {"out": out.get(), "out without bias": plain.get(), "dinp": dinp.get(), "dweight": dweight.get(),
            "dbias": dbias.get(), "dbias naive": naive.get(), "pre": pre.get(), "pre without bias": plain_pre.get(),
            "gelu": activated.get(), "gelu without bias": plain_activated.get()}


def compare(name, got, want, arrays, precision):
    (M, K), N = arrays[0].shape, len(arrays[1])
    length = {"dinp": N, "dweight": M, "dbias": M}
    for result in got:
        formula = FORMULAS[result.replace(" naive", "").replace("gelu", "out").replace("pre", "out")]
        truth, g, w = formula(*arrays), got[result], want[result]
        expected = torch_bf16(formula, *arrays) if precision == "bf16" else None
        if "gelu" in result:  # its error is a part of its argument, not of gelu(−9): held against the sum of both
            pre = result.replace("gelu", "pre")
            truth, g, w = truth + gelu(truth), g.astype(float) + got[pre], w.astype(float) + want[pre]
            if precision == "bf16":
                expected = expected + torch_bf16(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), expected)
        check(f"{result} {name}", g, truth, precision=precision, K=length.get(result.split()[0], K), cpu=w, torch=expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_layer(precision):
    r = np.random.default_rng(SEED)
    cases = covering({"M": SIZES + (600,), "K": SIZES, "N": SIZES + (272,), "kind": KINDS, "shift": (0, 1)}, seed=SEED)
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        big = [half.workspace("matmul", 600, 129, 272) for half in (cpu, k)]
        for case in cases:
            arrays = inputs(r, case["M"], case["K"], case["N"], case["kind"], precision)
            want = layer(cpu, arrays, workspace=big[0])
            k.seed(int(r.integers(1, 1000)))
            compare(label(case), layer(k, arrays, case["shift"], big[1]), want, arrays, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_same_bits(precision):
    """Sums of columns over blocks: in one order, whatever the order of the blocks."""
    r = np.random.default_rng(SEED)
    with Kernels(DEVICE, precision) as k:
        for N in (7, 272):
            arrays = inputs(r, 600, 8, N, "random", precision)
            workspace = k.workspace("matmul", 600, 8, N)
            same_bits(k, lambda k: layer(k, arrays, workspace=workspace))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_flops(precision):
    r = np.random.default_rng(SEED)
    with Kernels(DEVICE, precision) as k:
        for N in (7, 16):
            before = k.flops.gemm_forward, k.flops.gemm_backward
            layer(k, inputs(r, 3, 5, N, "random", precision))
            assert k.flops.gemm_forward - before[0] == 4 * 2 * 3 * 5 * N
            assert k.flops.gemm_backward - before[1] == 2 * 2 * 3 * 5 * N


@pytest.mark.parametrize("N", [7, 16])
@isolated
def test_bf16_inputs(N):
    """--matmul bf16 in an fp32 build: inputs of products are rounded, nothing else is."""
    r = np.random.default_rng(SEED)
    arrays = inputs(r, 300, 72, N, "random", "fp32")
    products = [rounded(a, "bf16") if n in (0, 1, 3) else a for n, a in enumerate(arrays)]
    with Kernels("cpu", "fp32") as cpu, Kernels(DEVICE, "fp32") as k:
        for half in (cpu, k):
            ctypes.c_bool.in_dll(half.lib, "matmul_inputs_bf16").value = True
        for shift in (0, 1):
            want, got = layer(cpu, arrays), layer(k, arrays, shift)
            for name in ("dbias", "dbias naive"):  # no product
                truth = FORMULAS["dbias"](*arrays)
                check(name, got.pop(name), truth, precision="fp32", K=300, cpu=want[name])
            compare(f"N={N}, bf16 inputs", got, want, products, "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_plans(precision):
    """More shapes than the table of plans holds, the first ones again; then each array off alignment alone."""
    r = np.random.default_rng(SEED)
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        workspace = k.workspace("matmul", 40, 8, 8)
        one_by_one = [(40, (name,)) for name in ARRAYS]
        for M, shifted in [(M, ()) for M in range(1, 41)] + [(1, ()), (1, ARRAYS), (40, ARRAYS)] + one_by_one:
            arrays = inputs(r, M, 8, 8, "random", precision)
            got = layer(k, arrays, 1, workspace, shifted)
            compare(f"M={M}, off alignment: {shifted}", got, layer(cpu, arrays), arrays, precision)


@pytest.mark.skipif(DEVICE != "emu", reason="a library that says no, at will, is the emulator's")
@isolated
def test_refused():
    """Where the library has no gelu for a shape, two kernels do it."""
    r = np.random.default_rng(SEED)
    arrays = inputs(r, 17, 16, 24, "random", "bf16")
    with Kernels("cpu", "bf16") as cpu, Kernels(DEVICE, "bf16") as k:
        k.lib.emu_set_refused(1)
        compare("refused", layer(k, arrays), layer(cpu, arrays), arrays, "bf16")


# ---- for the mutants -----------------------------------------------------------------------------------------------
def small_layer(M, K, N):
    def run(k):
        r = np.random.default_rng(1)
        arrays = inputs(r, M, K, N, "random", k.precision)
        got = layer(k, arrays)
        for name in ("out", "dinp", "dweight", "dbias", "dbias naive"):
            truth = FORMULAS[name.replace(" naive", "")](*arrays)
            assert rel_l2(got[name], truth) < (1e-6 if k.precision == "fp32" else 1e-2), name
        return got

    return run


def small_bf16_inputs(k):
    """--matmul bf16, where the build is fp32."""
    inputs_bf16 = ctypes.c_bool.in_dll(k.lib, "matmul_inputs_bf16")
    inputs_bf16.value = True
    r = np.random.default_rng(1)
    arrays = inputs(r, 9, 7, 13, "random", k.precision)
    got = layer(k, arrays)
    inputs_bf16.value = False
    assert rel_l2(got["out"], FORMULAS["out"](*arrays)) < 1e-2
    return got


SMALL = [("matmul aligned", small_layer(300, 8, 272)), ("matmul ragged", small_layer(300, 7, 13)),
         ("matmul on bf16 inputs", small_bf16_inputs)]

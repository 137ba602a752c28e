"""grouped_gemm.cu: products of several weights at a time, against double precision, whoever has how many rows."""
import ctypes

import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import DEVICE, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits, torch_bf16

ROWS = {"one": [70], "some": [66, 0, 1, 64], "none": [0, 0, 0], "last": [0, 0, 5], "many": [(7 * g) % 3 for g in range(300)]}
SIZES = (1, 7, 16, 72)


class Layer:
    """Weights [N,K] and biases [N] of all groups, one group's behind the other's; rows of all groups."""

    def __init__(self, rows, K, N, precision, kind="random"):
        r, M, G = np.random.default_rng(SEED), sum(rows), len(rows)
        self.rows, self.K, self.N = np.array(rows, np.uintp), K, N
        self.stride = N * K + N + (3 if N * K % 8 else 8)  # something stands between them
        self.flat, self.dflat = (rounded(filled(r, G, self.stride), precision) for _ in range(2))
        self.inp, self.dout = (rounded(filled(r, M, n, kind), precision) for n in (K, N))
        self.start = np.cumsum([0, *rows])

    def of(self, flat, g):
        return flat[g, : self.N * self.K].reshape(self.N, self.K), flat[g, self.N * self.K :][: self.N]

    def truth(self, formula):
        """formula(weight, bias, dweight, inp, dout) of each group, one behind the other."""
        parts = []
        for g in range(len(self.rows)):
            w, b = self.of(self.flat, g)
            rows = slice(self.start[g], self.start[g + 1])
            parts.append(formula(w, b, self.of(self.dflat, g)[0], self.inp[rows], self.dout[rows]))
        return np.concatenate([p.ravel() for p in parts])

    def run(self, k, shift=0):
        K, N, M, G = self.K, self.N, int(self.rows.sum()), len(self.rows)
        weight, inp, dout = (k.floatX(a, shift=shift) for a in (self.flat, self.inp, self.dout))
        bias = weight.ptr + N * K * weight.dtype.itemsize
        grads = k.floatX(self.dflat, written=True, shift=shift)
        table, w = self.rows.ctypes.data, k.workspace("grouped_gemm", M, K, N)
        out, plain, dinp = (k.out(M, n, shift=shift) for n in (N, N, K))
        k.call("grouped_gemm_forward", out, inp, weight, bias, table, G, self.stride, K, N, w)
        k.call("grouped_gemm_forward", plain, inp, weight, None, table, G, self.stride, K, N, w)
        k.call("grouped_gemm_backward_input", dinp, dout, weight, table, G, self.stride, K, N, w)
        k.call("grouped_gemm_backward_weight", grads, dout, inp, table, G, self.stride, K, N, w)
        after = grads.get().reshape(G, self.stride)
        assert np.array_equal(after[:, N * K :], self.dflat[:, N * K :].astype(np.float32)), "what stands between weights"
        return {"out": out.get().ravel(), "plain": plain.get().ravel(), "dinp": dinp.get().ravel(),
                "dweight": after[:, : N * K].ravel().copy()}


FORMULAS = {
    "out": lambda w, b, dw, x, d: x @ w.T + b,
    "plain": lambda w, b, dw, x, d: x @ w.T,
    "dinp": lambda w, b, dw, x, d: d @ w,
    "dweight": lambda w, b, dw, x, d: dw + d.T @ x,
}


def compare(name, layer, got, want, precision, inputs=None):
    length = {"dinp": layer.N, "dweight": max(1, int(layer.rows.max()))}
    for result, formula in FORMULAS.items():
        if not want[result].size:
            continue
        expected = layer.truth(lambda *a: torch_bf16(formula, *a)) if precision == "bf16" else None
        check(f"{result} {name}", got[result], (inputs or layer).truth(formula), precision=precision,
              K=length.get(result, layer.K), cpu=want[result], torch=expected)  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_layer(precision):
    axes = {"rows": list(ROWS), "K": SIZES, "N": SIZES, "shift": (0, 1), "kind": ("random", "one_hot", "constant")}
    for case in covering(axes, lambda c: c["rows"] != "many" or c["K"] * c["N"] <= 16, seed=SEED):
        layer = Layer(ROWS[case["rows"]], case["K"], case["N"], precision, case["kind"])
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            want, got = layer.run(cpu), layer.run(k, case["shift"])
        compare(label(case), layer, got, want, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_same_bits_and_flops(precision):
    layer = Layer(ROWS["some"], 72, 40, precision)
    with Kernels(DEVICE, precision) as k:
        same_bits(k, layer.run)
        forward, backward = k.flops.gemm_forward, k.flops.gemm_backward
        layer.run(k)
        one = 2 * 131 * 72 * 40
        assert (k.flops.gemm_forward - forward, k.flops.gemm_backward - backward) == (2 * one, 2 * one)


@isolated
def test_bf16_inputs():
    """--matmul bf16 in an fp32 build: inputs of products are rounded, sums and biases are not."""
    layer, rounded_ = Layer(ROWS["some"], 72, 40, "fp32"), Layer(ROWS["some"], 72, 40, "fp32")
    rounded_.inp, rounded_.dout = rounded(layer.inp, "bf16"), rounded(layer.dout, "bf16")
    rounded_.flat[:, : 72 * 40] = rounded(layer.flat[:, : 72 * 40], "bf16")
    with Kernels("cpu", "fp32") as cpu, Kernels(DEVICE, "fp32") as k:
        for half in (cpu, k):
            ctypes.c_bool.in_dll(half.lib, "matmul_inputs_bf16").value = True
        compare("bf16 inputs", layer, layer.run(k), layer.run(cpu), "fp32", rounded_)


# ---- for the mutants -------------------------------------------------------------------------------------------------------
def small(rows, K, N, shift=0):
    def run(k):
        layer = Layer(rows, K, N, k.precision)
        got = layer.run(k, shift)
        for name, formula in FORMULAS.items():
            assert rel_l2(got[name], layer.truth(formula)) < (1e-5 if k.precision == "fp32" else 2e-2), name
        return got

    return run


SMALL = [("grouped_gemm", small([70, 0, 1, 64], 72, 136)), ("grouped_gemm_unaligned", small([3, 67], 37, 9, 1))]

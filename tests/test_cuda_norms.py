"""layernorm.cu: both norms and the residual, against their formulas in double."""
import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import (
    DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, rungs, same_bits, torch_bf16)

torch.set_num_threads(1)  # its threads and those of the test beside this one would wait for each other
EPS = float(np.float32(1e-5))
ARRAYS = ("out", "sum", "inp", "residual", "weight", "bias", "dinp", "dout", "dresidual")  # walked 16 bytes at a time


# ---- the formulas --------------------------------------------------------------------------------------------------
def statistics(x, op):
    mean = x.mean(1) if op == "layernorm" else np.zeros(len(x))
    return mean, 1 / np.sqrt(((x - mean[:, None]) ** 2).mean(1) + EPS)


def norm(x, w, b, op):
    mean, rstd = statistics(x, op)
    return (x - mean[:, None]) * rstd[:, None] * w + (b if op == "layernorm" else 0)


def gradients(dout, x, w, mean, rstd, op):
    """dx, dweight, dbias"""
    xhat, g = (x - mean[:, None]) * rstd[:, None], dout * w
    mean_g = g.mean(1, keepdims=True) if op == "layernorm" else 0
    dx = rstd[:, None] * (g - mean_g - xhat * (g * xhat).mean(1, keepdims=True))
    return dx, (dout * xhat).sum(0), dout.sum(0)


def torch_norm(op):
    def function(x, w, b):
        if op == "layernorm":
            return torch.nn.functional.layer_norm(x, x.shape[1:], w, b, 1e-5)
        x = x.float()
        return (x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5)).bfloat16() * w

    return function


def torch_gradients(op, residual):
    def function(dout, x, w, b, dresidual, dw, db):
        for leaf in (x, w, b):
            leaf.requires_grad_()
        torch_norm(op)(x, w, b).backward(dout)
        return (x.grad + dresidual if residual else x.grad), dw + w.grad, db + (b.grad if op == "layernorm" else 0)

    return function


# ---- one call --------------------------------------------------------------------------------------------------------
def forward(k, name, x, residual, w, b, off=()):
    """off: the arrays that do not start on 16 bytes"""
    (N, C), shift = x.shape, {a: int(a in off) for a in ARRAYS}
    layernorm = name.startswith("layernorm")
    out, sum_, rstd = k.out(N, C, shift=shift["out"]), k.out(N, C, shift=shift["sum"]), k.out(N, dtype=np.float32)
    mean = k.out(N, dtype=np.float32) if layernorm else None
    res = None if residual is None else k.floatX(residual, shift=shift["residual"])
    k.call(name, out, mean, rstd, None if residual is None else sum_, k.floatX(x, shift=shift["inp"]), res,
           k.floatX(w, shift=shift["weight"]), k.floatX(b, shift=shift["bias"]) if layernorm else None, N, C)
    got = {"out": out.get(), "rstd": rstd.get()}
    if layernorm:
        got["mean"] = mean.get()
    return got if residual is None else {**got, "sum": sum_.get()}


def backward(k, op, dout, x, w, mean, rstd, dresidual, in_place, dw, db, off=()):
    (N, C), shift = x.shape, {a: int(a in off) for a in ARRAYS}
    layernorm = op == "layernorm"
    dres = None if dresidual is None else k.floatX(dresidual, written=in_place, shift=shift["dresidual"])
    dinp = dres if in_place else k.out(N, C, shift=shift["dinp"])
    dweight, dbias = k.floatX(dw, written=True), k.floatX(db, written=True) if layernorm else None
    k.call(f"{op}_backward", dinp, dweight, dbias, k.floatX(dout, shift=shift["dout"]), dres,
           k.floatX(x, shift=shift["inp"]), k.floatX(w, shift=shift["weight"]), k.put(mean) if layernorm else None,
           k.put(rstd), N, C, k.workspace("norm_backward", N, C))
    got = {"dinp": dinp.get(), "dweight": dweight.get()}
    return {**got, "dbias": dbias.get()} if layernorm else got


# ---- one case --------------------------------------------------------------------------------------------------------
def inputs(seed, precision, N, C, kind):
    r = np.random.default_rng(seed)
    offset = {"random": 0.25, "huge": 2500}.get(kind, 0)  # no mean of nearly 0, whose error would be all of it
    x = rounded(filled(r, N, C, kind) + offset, precision)
    return r, x, rounded(1 + filled(r, 1, C)[0] / 2, precision), rounded(filled(r, 1, C)[0], precision)


def hold_forward(precision, op, N, C, kind, residual, off=(), name=None):
    r, x, w, b = inputs(SEED, precision, N, C, kind)
    res = rounded(filled(r, N, C, kind), precision) if residual else None
    name = name or f"{op}_forward"
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        reference = forward(cpu, f"{op}_forward", x, res, w, b)
        got = same_bits(k, lambda k: forward(k, name, x, res, w, b, off))
    case = f"{name} {N}×{C} {kind}{' residual' * residual} {off}: "
    if residual:
        x = rounded(x + res, precision)
        assert np.array_equal(got["sum"], x), case + "sum"
    mean, rstd = statistics(x, op)
    expected = torch_bf16(torch_norm(op), x, w, b) if precision == "bf16" else None
    K = C * C if name.endswith("_naive") else C  # one thread adds C numbers in a row: its errors may all point one way
    check(case + "out", got["out"], norm(x, w, b, op), precision=precision, K=K, cpu=reference["out"], torch=expected)
    check(case + "rstd", got["rstd"], rstd, precision="fp32", K=K, cpu=reference["rstd"])
    if op == "layernorm":
        check(case + "mean", got["mean"], mean, precision="fp32", K=K, cpu=reference["mean"])


def hold_backward(precision, op, N, C, kind, dres, off=()):
    """dres: "none", "apart", or "in place": dinp is the same array"""
    r, x, w, b = inputs(SEED, precision, N, C, kind)
    dout, dresidual, dw, db = (rounded(filled(r, n, C), precision) for n in (N, N, 1, 1))
    mean, rstd = (s.astype(np.float32) for s in statistics(x, op))
    call = (op, dout, x, w, mean, rstd, None if dres == "none" else dresidual, dres == "in place", dw[0], db[0])
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        reference = backward(cpu, *call)
        got = same_bits(k, lambda k: backward(k, *call, off))
    dx, dweight, dbias = gradients(dout, x, w, mean.astype(float), rstd.astype(float), op)
    truth = {"dinp": dx + dresidual * (dres != "none"), "dweight": dw[0] + dweight, "dbias": db[0] + dbias}
    expected = dict.fromkeys(truth)
    if precision == "bf16":
        answers = torch_bf16(torch_gradients(op, dres != "none"), dout, x, w, b, dresidual, dw[0], db[0])
        expected = dict(zip(truth, answers))
    for what in got:
        check(f"{op} {N}×{C} {kind} dresidual {dres} {off}: {what}", got[what], truth[what], precision=precision,
              K=C if what == "dinp" else N, cpu=reference[what], torch=expected[what])


# ---- the tests -------------------------------------------------------------------------------------------------------
# A warp has rows of 4 KB at most; of 40,008 channels not even one row fits into shared memory.
AXES = {
    "op": ["layernorm", "rmsnorm"],
    "N": [1, 3, 17],
    "C": [1, 7, 72, 768, 1600, 4099, 12288, 40008],
    "kind": KINDS,
    "off": [(), ARRAYS],
}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_forward(precision):
    for case in covering({**AXES, "residual": [False, True]}, seed=SEED):
        hold_forward(precision, **case)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_backward(precision):
    axes = {**AXES, "C": [2, *AXES["C"][1:]], "dres": ["none", "apart", "in place"]}  # of one channel all cancels out
    for case in covering(axes, seed=SEED):
        hold_backward(precision, **case)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_backward_of_one_channel(precision):
    r, x, w, b = inputs(SEED, precision, 9, 1, "random")
    dout, rstd = rounded(filled(r, 9, 1), precision), statistics(x, "layernorm")[1].astype(np.float32)
    with Kernels(DEVICE, precision) as k:
        mean = x[:, 0].astype(np.float32)
        got = backward(k, "layernorm", dout, x, w, mean, rstd, None, False, np.ones(1), np.zeros(1))
    assert np.abs(got["dinp"]).max() <= 2.0**-22 * rstd.max() * np.abs(w).max() and got["dweight"] == 1
    check("dbias", got["dbias"], dout.sum(0), precision=precision, K=9, cpu=dout.sum(0), torch=dout.sum(0))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_more_rows_than_blocks_take_at_once(precision):
    """… with a warp a row, and where shared memory has room for one block on an SM, or none"""
    for N, C in [(4105, 8), (130, 14000)]:
        hold_forward(precision, "layernorm", N, C, "random", True)
    for N, C in [(4105, 8), (130, 8000), (130, 14000)]:
        hold_backward(precision, "layernorm", N, C, "random", "none")


@pytest.mark.skipif(DEVICE != "emu", reason="which card it is, only the emulator lets us say")
@isolated
def test_a_card_with_less_shared_memory(precision="fp32"):
    Kernels(DEVICE, precision).lib.emu_set_arch(89)
    for C in (768, 8000):
        hold_forward(precision, "layernorm", 3, C, "random", True)
        hold_backward(precision, "layernorm", 3, C, "random", "none")


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_one_array_off_alignment(precision):
    for array in ARRAYS:
        if array not in ("dinp", "dout", "dresidual"):
            hold_forward(precision, "layernorm", 3, 72, "random", True, (array,))
        if array not in ("out", "sum", "residual", "bias"):
            hold_backward(precision, "layernorm", 3, 72, "random", "apart", (array,))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_ladder(precision):
    axes = {"N": [1, 17, 300], "C": [1, 72, 1600], "kind": KINDS, "residual": [False, True]}
    for name in rungs("layernorm_forward")[:-1]:
        for case in covering(axes, seed=SEED):
            hold_forward(precision, "layernorm", name=name, **case)


def residual(k, a, b, out="apart", off=()):
    x, y = (k.floatX(v, written=out == name, shift=int(name in off)) for v, name in ((a, "a"), (b, "b")))
    o = {"a": x, "b": y}.get(out) or k.out(a.size, shift=int("out" in off))
    k.call("residual_forward", o, x, y, a.size)
    return {"out": o.get()}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_residual(precision):
    r = np.random.default_rng(SEED)
    axes = {"n": [1, 7, 2048, 5008], "out": ["apart", "a", "b"], "off": [(), ("a",), ("b",), ("out",)], "kind": KINDS}
    for case in covering(axes, seed=SEED):
        a, b = (rounded(filled(r, 1, case["n"], case["kind"])[0], precision) for _ in range(2))
        with Kernels(DEVICE, precision) as k:
            got = same_bits(k, lambda k: residual(k, a, b, case["out"], case["off"]))["out"]
        assert np.array_equal(got, rounded(a + b, precision)), label(case)


# ---- for the mutants: together they reach every barrier, wait and guard ----------------------------------------------
def small_forward(N, C, with_residual, name="layernorm_forward"):
    def run(k):
        r, x, w, b = inputs(1, k.precision, N, C, "random")
        res = rounded(filled(r, N, C), k.precision) if with_residual else None
        got = forward(k, name, x, res, w, b)
        x = rounded(x + res, k.precision) if with_residual else x
        assert rel_l2(got["out"], norm(x, w, b, "layernorm")) < (1e-5 if k.precision == "fp32" else 4e-3)
        return got

    return run


def small_backward(N, C):
    def run(k):
        r, x, w, b = inputs(1, k.precision, N, C, "random")
        dout, zeros = rounded(filled(r, N, C), k.precision), np.zeros(C)
        mean, rstd = (s.astype(np.float32) for s in statistics(x, "layernorm"))
        got = backward(k, "layernorm", dout, x, w, mean, rstd, None, False, zeros, zeros)
        truth = gradients(dout, x, w, mean.astype(float), rstd.astype(float), "layernorm")
        for what, right in zip(("dinp", "dweight", "dbias"), truth):
            assert rel_l2(got[what], right) < (1e-5 if k.precision == "fp32" else 4e-3), what
        return got

    return run


def small_residual(k):
    a, b = rounded(filled(np.random.default_rng(1), 2, 2056), k.precision)
    got = residual(k, a, b)
    assert np.array_equal(got["out"], rounded(a + b, k.precision))
    return got


SMALL = [
    ("layernorm, a warp a row", small_forward(17, 72, True)),
    ("layernorm, unaligned", small_forward(11, 7, False)),
    ("layernorm, a block a row", small_forward(3, 4096, False)),
    ("layernorm backward, a warp a row", small_backward(4105, 8)),
    ("layernorm backward, a block a row", small_backward(130, 8000)),
    ("layernorm backward, unaligned", small_backward(11, 7)),
    ("residual", small_residual),
    ("layernorm, naive", small_forward(17, 7, False, "layernorm_forward_naive")),
]

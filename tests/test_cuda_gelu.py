"""gelu.cu: gelu and swiglu against their formulas in double, on awkward shapes and inputs."""
import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import (
    DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, rungs, same_bits, torch_bf16)

torch.set_num_threads(1)  # its threads and those of the test beside this one would wait for each other


# ---- the formulas --------------------------------------------------------------------------------------------------
def sigmoid(x):
    small = np.exp(-np.abs(x))  # never too large
    return np.where(x > 0, 1, small) / (1 + small)


def twice_u(x):
    """gelu is x · ½ (1 + tanh u) = x · sigmoid(2u); written so, it keeps its digits where x is very negative."""
    return 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)


def gelu(x):
    return x * sigmoid(twice_u(x))


def gelu_gradient(dout, x):
    s = sigmoid(twice_u(x))
    return dout * (s + x * s * sigmoid(-twice_u(x)) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2))


def swiglu(x):
    gate, up = np.split(x, 2, axis=1)
    return gate * sigmoid(gate) * up


def swiglu_gradient(dout, x):
    gate, up = np.split(x, 2, axis=1)
    s = sigmoid(gate)
    return np.concatenate([dout * up * s * (1 + gate * sigmoid(-gate)), dout * gate * s], axis=1)


def torch_gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def torch_swiglu(x):
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def torch_gradient(function):
    def gradient(dout, x):
        function(x.requires_grad_()).backward(dout)
        return x.grad

    return gradient


OPS = {"gelu": (1, gelu, gelu_gradient, torch_gelu), "swiglu": (2, swiglu, swiglu_gradient, torch_swiglu)}


# ---- one call --------------------------------------------------------------------------------------------------------
def forward(k, name, x, off=()):
    """off: the arrays that do not start on 16 bytes"""
    N, F = x.shape[0], x.shape[1] // (2 if name.startswith("swiglu") else 1)
    out = k.out(N, F, shift=int("out" in off))
    k.call(name, out, k.floatX(x, shift=int("inp" in off)), N, F)
    return {"out": out.get()}


def backward(k, op, dout, x, in_place=False, off=()):
    d = k.floatX(dout, written=in_place, shift=int("dout" in off))
    dinp = d if in_place else k.out(*x.shape, shift=int("dinp" in off))
    k.call(f"{op}_backward", dinp, d, k.floatX(x, shift=int("inp" in off)), *dout.shape)
    return {"dinp": dinp.get()}


# ---- the tests -------------------------------------------------------------------------------------------------------
AXES = {"N": [1, 3, 17], "F": [1, 7, 72, 1600, 3079, 3080], "kind": KINDS}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_forward(precision):
    r = np.random.default_rng(SEED)
    names = [*rungs("gelu_forward"), "swiglu_forward"]
    for case in covering({"name": names, **AXES, "off": [(), ("inp",), ("out",)]}, seed=SEED):
        wide, formula, _, reference = OPS[case["name"].split("_")[0]]
        x = rounded(filled(r, case["N"], wide * case["F"], case["kind"]), precision)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            want = forward(cpu, case["name"].removesuffix("_naive"), x)["out"]
            got = same_bits(k, lambda k: forward(k, case["name"], x, case["off"]))["out"]
        expected = torch_bf16(reference, x) if precision == "bf16" else None
        check(label(case), got, formula(x), precision=precision, cpu=want, torch=expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_backward(precision):
    r = np.random.default_rng(SEED)
    axes = {"op": list(OPS), **AXES, "in_place": [False, True], "off": [(), ("inp",), ("dout",), ("dinp",)]}
    legal = lambda case: not (case["in_place"] and (case["op"] == "swiglu" or "dinp" in case["off"]))
    for case in covering(axes, legal, seed=SEED):
        wide, _, gradient, reference = OPS[case["op"]]
        x = rounded(filled(r, case["N"], wide * case["F"], case["kind"]), precision)
        dout = rounded(filled(r, case["N"], case["F"]), precision)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            want = backward(cpu, case["op"], dout, x)["dinp"]
            got = same_bits(k, lambda k: backward(k, case["op"], dout, x, case["in_place"], case["off"]))["dinp"]
        expected = torch_bf16(torch_gradient(reference), dout, x) if precision == "bf16" else None
        check(label(case), got, gradient(dout, x), precision=precision, cpu=want, torch=expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_digits_at_both_ends(precision):
    """Each element by itself: tails keep their digits, and where x² overflows the slope is still 0 or 1."""
    x = rounded(np.linspace(-5, 5, 2001)[None], precision)
    far = rounded(np.array([[-3e38, -1e25, -1e4, -17, -16, 16, 17, 1e4, 1e25, 3e38]]), precision)
    within = 2.0**-18 if precision == "fp32" else 2.0**-7
    with Kernels(DEVICE, precision) as k:
        out = forward(k, "gelu_forward", x)["out"]
        assert (np.abs(out - gelu(x)) <= within * np.abs(gelu(x))).all()
        assert np.array_equal(forward(k, "gelu_forward", far)["out"], np.maximum(far, 0))
        assert np.array_equal(backward(k, "gelu", np.ones_like(far), far)["dinp"], far > 0)


# ---- for the mutants: together they reach every guard ----------------------------------------------------------------
def small(op, N, F, name=None):
    def run(k):
        wide, formula, gradient, _ = OPS[op]
        r = np.random.default_rng(1)
        x, dout = (rounded(filled(r, N, c), k.precision) for c in (wide * F, F))
        got = {**forward(k, name or f"{op}_forward", x), **backward(k, op, dout, x)}
        for what, truth in ("out", formula(x)), ("dinp", gradient(dout, x)):
            assert rel_l2(got[what], truth) < (1e-6 if k.precision == "fp32" else 4e-3), what
        return got

    return run


SMALL = [
    ("gelu", small("gelu", 3, 1600)),
    ("gelu, unaligned", small("gelu", 3, 7)),
    ("swiglu", small("swiglu", 3, 1600)),
    ("swiglu, unaligned", small("swiglu", 3, 7)),
]

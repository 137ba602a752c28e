"""rows.cu: packing, adding, rounding and filling, to the bit: each is one operation an element, which IEEE 754 defines."""
import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import DEVICE, PRECISIONS, Kernels, filled, isolated, raw, rounded, same_bits

LARGEST = float(np.finfo(np.float32).max)
# Numbers that a careless rounding gets wrong: ties, up and down; what becomes an infinity, or is one; no longer normal.
EDGES = [0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-23, LARGEST, -LARGEST, np.inf, -np.inf,
         2.0**-126, 3 * 2.0**-134, -(2.0**-149)]


# ---- one call of each -------------------------------------------------------------------------------------------------
# off: elements by which arrays begin beside 16 bytes; in and sum are entered `first` channels into their first row
def pack(k, wide, first, C, off=(0, 0)):
    N, stride = wide.shape
    out, x = k.out(N, C, shift=off[0]), k.floatX(wide, shift=off[1])
    k.call("rows_pack", out, x.ptr + first * x.dtype.itemsize, stride, N, C)
    return {"out": out.get()}


def add(k, wide, first, part, off=(0, 0)):
    sum_ = k.put(wide, written=True, shift=off[0])
    k.call("rows_add", sum_.ptr + 4 * first, wide.shape[1], k.put(part, shift=off[1]), *part.shape)
    return {"sum": sum_.get()}


def round_(k, x, off=(0, 0)):
    out = k.out(x.size, shift=off[0])
    k.call("rows_round", out, k.put(x, shift=off[1]), x.size)
    return {"out": out.get()}


def fill(k, value, n, off=0):
    x = k.out(n, dtype=np.float32, shift=off)
    k.call("rows_fill", x, value, n)
    return {"x": x.get()}


def inputs(case, precision):
    """(wide [N, stride], rounded; part [N, C]) as floats"""
    r, N, C = np.random.default_rng(SEED), case["N"], case["C"]
    wide = rounded(filled(r, N, case["first"] + C + case["after"]), precision)
    return wide.astype(np.float32), filled(r, N, C).astype(np.float32)


def columns(case):
    return slice(case["first"], case["first"] + case["C"])


def added(case, wide, part):
    want = wide.copy()
    want[:, columns(case)] += part
    return want


def same(got, want):
    return raw(got) == raw(np.ascontiguousarray(want, np.float32))


# ---- the tests --------------------------------------------------------------------------------------------------------
AXES = {
    "N": [1, 3, 37],
    "C": [1, 4, 8, 15, 64, 72, 516, 1030],
    "first": [0, 8, 64, 3, 4],  # channels of the row before these: q, say
    "after": [0, 8, 16, 4, 5],
    "off": [(0, 0), (1, 0), (0, 1), (1, 1)],
}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rows_in_wider_rows(precision):
    for case in covering(AXES, lambda c: c["first"] + c["after"] or c["C"] > 1, seed=SEED):
        wide, part = inputs(case, precision)
        first, C, off = case["first"], case["C"], case["off"]
        for truth, run in (
                ({"out": wide[:, columns(case)]}, lambda k, off=(0, 0): pack(k, wide, first, C, off)),
                ({"sum": added(case, wide, part)}, lambda k, off=(0, 0): add(k, wide, first, part, off))):
            with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
                want, got = run(cpu), same_bits(k, lambda k: run(k, off))
            for name in truth:
                assert same(got[name], truth[name]) and same(want[name], truth[name]), f"{name}, {label(case)}"


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_round_and_fill(precision):
    r = np.random.default_rng(SEED)
    for case in covering({"n": [1, 4, 31, 1024, 4100], "off": AXES["off"], "value": [0.0, -np.inf, 0.1]}, seed=SEED):
        n, off, value = case.values()
        x = filled(r, 1, n)[0].astype(np.float32)
        x[: len(EDGES)] = EDGES[:n]
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            want, got = round_(cpu, x), same_bits(k, lambda k: round_(k, x, off))
            filled_, on_cpu = same_bits(k, lambda k: fill(k, value, n, off[0])), fill(cpu, value, n)
        with np.errstate(over="ignore"):
            truth = rounded(x, precision)
        assert same(got["out"], truth) and same(want["out"], truth), label(case)
        assert same(filled_["x"], [value] * n) and same(on_cpu["x"], [value] * n), label(case)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_nan_stays(precision):
    x = np.zeros(33, np.float32)
    x.view(np.uint32)[[0, 17, 32]] = 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF  # the last carry into what is no NaN
    for device in "cpu", DEVICE:
        with Kernels(device, precision) as k:
            got = round_(k, x)["out"]
        assert np.array_equal(np.isnan(got), np.isnan(x)), device


@isolated
def test_round_in_place():
    x = np.array([*EDGES, np.pi], np.float32)
    for device in "cpu", DEVICE:
        with Kernels(device, "fp32") as k:
            buffer = k.put(x, written=True)
            k.call("rows_round", buffer, buffer, x.size)
            assert same(buffer.get(), x), device


# ---- for the mutants: together they reach every guard ----------------------------------------------------------------
def small(N, C, first, after, off=(0, 0)):
    def run(k):
        case = {"N": N, "C": C, "first": first, "after": after}
        wide, part = inputs(case, k.precision)
        x = part.ravel()
        got = {**pack(k, wide, first, C, off), **add(k, wide, first, part, off), **fill(k, 2.5, x.size, off[0])}
        got["rounded"] = round_(k, x, off)["out"]
        assert same(got["out"], wide[:, columns(case)]) and same(got["sum"], added(case, wide, part))
        assert same(got["rounded"], rounded(x, k.precision)) and same(got["x"], np.full(x.size, 2.5))
        return got

    return run


SMALL = [  # vectors fit; they do not: for the length of a row, the stride alone, where rows begin, where an array does
    ("rows", small(5, 72, 64, 8)), ("rows, odd", small(5, 7, 3, 1)), ("rows, odd length", small(5, 70, 0, 10)),
    ("rows, odd stride", small(5, 72, 64, 3)), ("rows, odd beginning", small(5, 72, 3, 5)),
    ("rows, first array shifted", small(5, 72, 64, 8, (1, 0))), ("rows, second array shifted", small(5, 72, 64, 8, (0, 1)))]

"""rope.cu: the table of angles and the rotation, against double."""
import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits


# ---- the formulas --------------------------------------------------------------------------------------------------
def angles(positions, D, theta):
    """[T, D/2, 2]"""
    a = positions[:, None].astype(float) * float(np.float32(theta)) ** (-2 * np.arange(D // 2) / D)
    return np.stack([np.cos(a), np.sin(a)], axis=2)


def rotated(x, table, heads, D, direction):
    """x [B, T, stride]"""
    half, out = D // 2, x.copy()
    cosine, sine = table[:, :, 0], table[:, :, 1] * direction
    for h in range(heads):
        lo, hi = x[:, :, h * D : h * D + half], x[:, :, h * D + half : (h + 1) * D]
        out[:, :, h * D : h * D + half] = lo * cosine - hi * sine
        out[:, :, h * D + half : (h + 1) * D] = hi * cosine + lo * sine
    return out


# ---- one call --------------------------------------------------------------------------------------------------------
def make_table(k, positions, D, theta):
    table = k.out(len(positions), D // 2, 2, dtype=np.float32)
    k.call("rope_table", table, k.put(positions), len(positions), D, theta)
    return {"table": table.get()}


def rotate(k, name, x, table, heads, D, off=()):
    """off: the arrays that do not start on 16 bytes"""
    buffer = k.floatX(x, written=True, shift=int("x" in off))
    k.call(name, buffer, k.put(table, shift=int("table" in off)), *x.shape[:2], heads, D, x.shape[2])
    return {"x": buffer.get()}


# ---- the tests -------------------------------------------------------------------------------------------------------
@isolated
def test_table():
    r = np.random.default_rng(SEED)
    for case in covering({"T": [1, 17, 130], "D": [2, 6, 64, 72, 128], "theta": [1e4, 5e5]}, seed=SEED):
        positions = r.integers(0, 1 << 17, case["T"], dtype=np.int32)
        positions[0] = (1 << 17) - 1
        with Kernels("cpu") as cpu, Kernels(DEVICE) as k:
            want = make_table(cpu, positions, case["D"], case["theta"])["table"]
            got = same_bits(k, lambda k: make_table(k, positions, case["D"], case["theta"]))["table"]
        truth = angles(positions, case["D"], case["theta"])
        check(label(case), got, truth, precision="fp32", cpu=want, largest=2.0**-23)


AXES = {
    "name": ["rope_forward", "rope_backward"],
    "B": [1, 2],
    "T": [1, 17, 64],
    "heads": [1, 3, 4, 9],
    "D": [2, 6, 16, 48, 64, 72, 96, 128],
    "beside": [0, 16, 9],  # elements of a row that are no part of these heads: what the values take
    "kind": KINDS,
    "off": [(), ("x",), ("table",)],
}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rotation(precision):
    r = np.random.default_rng(SEED)
    for case in covering(AXES, seed=SEED):
        name, B, T, heads, D, beside, kind, off = case.values()
        x = rounded(filled(r, B * T, heads * D + beside, kind), precision).reshape(B, T, -1)
        table = angles(r.permutation(5 * T)[:T], D, 1e4).astype(np.float32)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            want = rotate(cpu, name, x, table, heads, D)["x"]
            got = same_bits(k, lambda k: rotate(k, name, x, table, heads, D, off))["x"]
        truth = rotated(x, table.astype(float), heads, D, 1 if name == "rope_forward" else -1)
        once = rounded(truth, "bf16") if precision == "bf16" else None
        check(label(case), got, truth, precision=precision, cpu=want, torch=once)
        assert np.array_equal(got[:, :, heads * D :], x[:, :, heads * D :]), label(case)


# ---- for the mutants: together they reach every guard ----------------------------------------------------------------
def small_rotation(heads, D):
    def run(k):
        r, positions = np.random.default_rng(1), np.arange(21, dtype=np.int32)
        x = rounded(filled(r, 2 * 21, heads * D), k.precision).reshape(2, 21, -1)
        got = make_table(k, positions, D, 1e4)
        got.update(rotate(k, "rope_forward", x, got["table"], heads, D))
        assert np.abs(got["table"] - angles(positions, D, 1e4)).max() < 2.0**-23
        truth = rotated(x, got["table"].astype(float), heads, D, 1)
        assert rel_l2(got["x"], truth) < (1e-6 if k.precision == "fp32" else 4e-3)
        return got

    return run


SMALL = [("rope", small_rotation(3, 64)), ("rope, unaligned", small_rotation(2, 14))]

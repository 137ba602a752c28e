"""grad_norm.cu: sums of squares that leave fp32's range, on every path to the one order of their terms."""
import numpy as np
import pytest

from conftest import SEED
from kernels import DEVICE, PRECISIONS, Kernels, isolated, rounded, same_bits

PER_BLOCK, MOST_BLOCKS = 256 * 8 * 4, 512  # elements a block takes at a time; beyond so many blocks each comes again
SIZES = [1, 31, PER_BLOCK - 1, PER_BLOCK, PER_BLOCK + 1, 4097, 100_003, PER_BLOCK * MOST_BLOCKS + 12_345]
BAR = 1e-13  # relative; sums of a few dozen terms a thread, then a tree, are nearer in double


def norm(k, gradient, grad32, shift=0, start=2.0):
    total = k.put(np.array([start]), written=True)
    g = None if grad32 else k.floatX(gradient, shift=shift)
    g32 = k.put(np.float32(gradient), shift=shift) if grad32 else None
    k.call("grad_norm_squared", total, g, g32, gradient.size, k.workspace("grad_norm", gradient.size))
    return {"sum": total.get()}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_sums(precision):
    r = np.random.default_rng(SEED)
    for n in SIZES:
        for grad32 in (False, True):
            for giant in 0.0, 3e30:  # 0: small terms must not be lost; else one's square is no float
                gradient = r.uniform(-1, 1, n) * 10 ** r.uniform(-3, 3, n)  # so wide that no order gives another's bits
                gradient[n // 2] = giant
                gradient = rounded(gradient, "fp32" if grad32 else precision)
                want = 2.0 + np.sum(gradient * gradient)
                with Kernels(DEVICE, precision) as k:
                    got = same_bits(k, lambda k: norm(k, gradient, grad32))["sum"][0]
                    unaligned = norm(k, gradient, grad32, shift=3)["sum"][0]
                assert abs(got - want) <= BAR * want, f"{n} grad32={grad32} {giant}: {got!r}, not {want!r}"
                assert got == unaligned, f"{n} grad32={grad32} {giant}: the place of the array changes the sum"


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_not_finite(precision):
    for n in 1, 31, 4097:
        for place in {0, n // 2, n - 1}:
            for value, right in (np.nan, np.isnan), (np.inf, np.isposinf):
                gradient = np.zeros(n)
                gradient[place] = value
                with Kernels(DEVICE, precision) as k:
                    assert right(norm(k, gradient, False)["sum"][0]), f"{value} at {place} of {n}"


def small(grad32, shift):
    def run(k):
        n = 7 * PER_BLOCK // 2 + 5
        gradient = rounded(np.random.default_rng(SEED).uniform(-1, 1, n), k.precision)
        got = norm(k, gradient, grad32, shift)
        want = 2.0 + np.sum(gradient * gradient)
        assert abs(got["sum"][0] - want) <= BAR * want
        return got

    return run


SMALL = [("grad_norm", small(False, 0)), ("grad_norm_fp32_unaligned", small(True, 1))]

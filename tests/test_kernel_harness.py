"""Would tests/kernels.py notice? Each of its promises, broken once."""
import ctypes
import os
import time

import numpy as np
import pytest
import torch

from kernels import DEVICE, PRECISIONS, Kernels, check, from_bf16, in_child, isolated, library, rel_l2, rounded, same_bits, to_bf16


def failure(function, seconds=60):
    kind, text = in_child(function, seconds)
    assert kind == "failed"
    return text


def gelu(N, F, out=None, device="cpu", **options):
    """gelu_forward over an input of N·F and an output of `out` elements"""
    with Kernels(device, "fp32") as k:
        x = k.floatX(np.ones((N, F)))
        y = x if out is None else k.out(out, **options)
        k.call("gelu_forward", y, x, N, F)


def test_writing_beyond_an_array_is_noticed():
    in_bounds = in_child(lambda: gelu(4, 7, out=28, shift=1))
    assert in_bounds == ("done", None)
    assert "written beyond its end" in failure(lambda: gelu(4, 7, out=27))
    assert "an input was written" in failure(lambda: gelu(4, 7))

    def before():
        with Kernels("cpu", "fp32") as k:
            x, y = k.floatX(np.ones(8)), k.out(8)
            k.call("gelu_forward", y.ptr - 4, x, 1, 8)

    assert "written before its beginning" in failure(before)


def test_a_dead_process_fails_one_test():
    def dies():
        os.write(2, b"last words\n")
        ctypes.CDLL(None).exit(3)

    assert "ended with 3\nlast words" in failure(dies)
    assert "ended with -11" in failure(lambda: ctypes.string_at(0))
    assert "longer than 1 s" in failure(lambda: time.sleep(60), seconds=1)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        isolated(lambda: pytest.skip("not here"))()


@pytest.mark.skipif(DEVICE != "emu", reason="some GPUs read the host's memory")
def test_device_errors_have_a_message():
    def host_pointer():
        with Kernels("emu", "fp32", checked=True) as k:
            k.call("gelu_forward", k.out(64), np.ones(64, np.float32).ctypes.data, 1, 64)

    library("emu", "fp32", checked=True)
    assert "gelu_forward_kernel, block" in failure(host_pointer)


def test_bars():
    r = np.random.default_rng(0)
    truth = r.standard_normal(1000)
    good = truth.astype(np.float32)
    check("good", good, truth, precision="fp32", cpu=good)
    for name, wrong in {
        "NaN": np.where(np.arange(1000) == 7, np.nan, good), "inf": np.where(np.arange(1000) == 7, np.inf, good),
        "off everywhere": good * (1 + 1e-6), "one off": good + (np.arange(1000) == 7) * 4e-6, "short": good[:999],
    }.items():
        with pytest.raises(AssertionError, match="x"):
            check("x", wrong, truth, precision="fp32", cpu=good)
            pytest.fail(name)
    with pytest.raises(AssertionError):
        check("truth", good, np.where(truth > 2, np.nan, truth), precision="fp32", cpu=good)
    check("inf", np.array([-np.inf, 1]), np.array([-np.inf, 1]), precision="fp32", cpu=np.array([-np.inf, 1]))
    with pytest.raises(AssertionError):
        check("other inf", np.array([np.inf, 1]), np.array([-np.inf, 1]), precision="fp32", cpu=np.array([-np.inf, 1]))
    coarse = rounded(truth, "bf16")
    check("bf16", coarse, truth, precision="bf16", torch=coarse)
    with pytest.raises(AssertionError):
        check("bf16", coarse * (1 + 2**-7), truth, precision="bf16", torch=coarse)
    assert rel_l2([0, 0], [0, 0]) == 0 and rel_l2([0, 1e-30], [0, 0]) == np.inf and rel_l2([np.nan], [1]) == np.inf


def test_bf16_is_pytorchs():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[: 1 << 15] &= 0xFFFF8000  # ties
    x = np.concatenate([bits.view(np.float32), np.array([np.inf, -np.inf, np.nan, 0, -0.0], np.float32)])
    assert np.array_equal(from_bf16(to_bf16(x)), torch.from_numpy(x).bfloat16().float().numpy(), equal_nan=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_other_bits_are_noticed(precision):
    turns = iter(range(3))
    with Kernels("cpu", precision) as k:
        with pytest.raises(AssertionError, match="out: other bits with seed 3"):
            same_bits(k, lambda k: {"out": np.float32(next(turns) == 2)[None]})

"""embedding.cu: rows out of the tables, and gradients into them, against numpy in double."""
import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits

LONG = 90  # rows of the position table


# ---- one call --------------------------------------------------------------------------------------------------------
def forward(k, tokens, positions, wte, wpe, off=()):
    """off: the arrays that do not start on 16 bytes; wpe None: no table of positions"""
    (B, T), C = tokens.shape, wte.shape[1]
    out = k.out(B, T, C, shift=int("out" in off))
    k.call("embedding_forward", out, k.put(tokens), k.floatX(wte, shift=int("wte" in off)),
           None if wpe is None else k.floatX(wpe, shift=int("wpe" in off)), k.put(positions), B, T, C)
    return {"out": out.get()}


def backward(k, tokens, positions, dout, dwte, dwpe, off=()):
    (B, T), (V, C) = tokens.shape, dwte.shape
    dte = k.floatX(dwte, written=True, shift=int("dwte" in off))
    dpe = None if dwpe is None else k.floatX(dwpe, written=True, shift=int("dwpe" in off))
    k.call("embedding_backward", dte, dpe, k.floatX(dout, shift=int("dout" in off)), k.put(tokens), k.put(positions),
           B, T, C, V, k.workspace("embedding_backward", B, T, C, V))
    return {"dwte": dte.get()} if dwpe is None else {"dwte": dte.get(), "dwpe": dpe.get()}


def drawn(r, how, B, T, V, elsewhere=0.0):
    """Tokens: "any", "frequent" (a few have most places), "equal", "last" (of the vocabulary), "distinct".

    elsewhere: the share of −1, tokens whose rows are another rank's"""
    tokens = drawn_here(r, how, B, T, V)
    return np.where(r.random((B, T)) < elsewhere, np.int32(-1), tokens)


def drawn_here(r, how, B, T, V):
    if how == "frequent":
        return np.minimum(r.zipf(1.3, (B, T)) - 1, V - 1).astype(np.int32)
    if how == "distinct":
        return r.permutation(max(V, B * T))[: B * T].reshape(B, T).astype(np.int32)
    if how == "any":
        return r.integers(0, V, (B, T), dtype=np.int32)
    return np.full((B, T), {"equal": V // 2, "last": V - 1}[how], np.int32)


def rows_of(wte, tokens):
    """The tokens' rows, of zeros where they are another rank's."""
    return np.where(tokens[..., None] < 0, np.float32(0), wte[tokens])


def add_rows(dwte, tokens, dout):
    here = tokens.ravel() >= 0
    np.add.at(dwte, tokens.ravel()[here], dout.reshape(tokens.size, -1)[here])


# ---- the tests -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_forward(precision):
    r = np.random.default_rng(SEED)
    axes = {"B": [1, 3], "T": [1, 17, 64], "C": [1, 7, 72, 768, 1600], "V": [1, 300],
            "tokens": ["any", "equal", "last"], "positions": [False, True], "kind": KINDS,
            "off": [(), ("out",), ("wte",), ("wpe",)], "elsewhere": [0.0, 0.6, 1.0]}
    for case in covering(axes, seed=SEED):
        B, T, C, V, how, positions_too, kind, off, elsewhere = case.values()
        tokens, positions = drawn(r, how, B, T, V, elsewhere), r.permutation(LONG)[:T].astype(np.int32)
        wte, wpe = (rounded(filled(r, n, C, kind), precision) for n in (V, LONG))
        with Kernels(DEVICE, precision) as k:
            got = same_bits(k, lambda k: forward(k, tokens, positions, wte, wpe if positions_too else None, off))["out"]
        want = rows_of(wte, tokens) + wpe[positions] * positions_too
        assert np.array_equal(got, rounded(want, precision)), label(case)


def test_forward_copies():
    """Without positions −0 stays −0 and an infinity itself."""
    row = np.array([[0.0, -0.0, np.inf, -np.inf, 1e-40, 1, 2, 3]], np.float32)
    with Kernels(DEVICE, "fp32") as k:
        got = forward(k, np.zeros((1, 2), np.int32), np.arange(2, dtype=np.int32), row, None)["out"]
    assert got.tobytes() == row.tobytes() * 2


def hold_backward(precision, B, T, C, V, how, positions_too, kind="random", off=(), elsewhere=0.0):
    r = np.random.default_rng(SEED)
    tokens, positions = drawn(r, how, B, T, V, elsewhere), r.permutation(T + 9)[:T].astype(np.int32)
    dout = rounded(filled(r, B * T, C, kind), precision).reshape(B, T, C)
    # large beside a dout, so that one rounding and many differ
    dwte, dwpe = (rounded(100 * filled(r, n, C), precision) for n in (V, T + 9))
    truth = {"dwte": dwte.copy(), "dwpe": dwpe.copy()}
    add_rows(truth["dwte"], tokens, dout)
    np.add.at(truth["dwpe"], positions, dout.sum(0))
    call = (tokens, positions, dout, dwte, dwpe if positions_too else None)
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        want = backward(cpu, *call)
        got = same_bits(k, lambda k: backward(k, *call, off))
    case = f"{B}×{T}×{C} of {V} {how} {kind} {off}, {elsewhere} elsewhere: "
    for what in got:
        once = rounded(truth[what], "bf16") if precision == "bf16" else None
        longest = np.bincount(tokens.ravel() + 1).max() if what == "dwte" else B
        check(case + what, got[what], truth[what], precision=precision, K=longest, cpu=want[what], torch=once)
    unused = np.setdiff1d(np.arange(V), tokens)
    assert np.array_equal(got["dwte"][unused], dwte[unused]), case + "a row that no token names"


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_backward(precision):
    axes = {"B": [1, 3], "T": [1, 17, 64, 150], "C": [1, 7, 72, 768, 1600], "V": [1, 300, 513],
            "how": ["any", "frequent", "equal", "last", "distinct"], "positions_too": [False, True], "kind": KINDS,
            "off": [(), ("dwte",), ("dwpe",), ("dout",)], "elsewhere": [0.0, 0.6, 1.0]}
    legal = lambda case: case["how"] != "distinct" or case["V"] >= case["B"] * case["T"]
    for case in covering(axes, legal, seed=SEED):
        hold_backward(precision, **case)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_backward_of_many_places(precision):
    """Several stretches to sort, in several blocks; runs of many parts; vocabularies of one, two and three digits."""
    hold_backward(precision, 5, 900, 8, 256, "frequent", False)
    hold_backward(precision, 3, 400, 7, 257, "any", True)
    hold_backward(precision, 1, 700, 8, 65537, "distinct", False)
    hold_backward(precision, 2, 600, 16, 70001, "last", False)
    hold_backward(precision, 4, 256, 8, 2, "any", False)
    hold_backward(precision, 2, 128, 8, 300, "equal", False)  # two parts, with no place left over


@pytest.mark.parametrize("V", [1, 255, 256, 257, 65535, 65536])
@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rows_of_other_ranks(precision, V):
    """The last token has one long run, whatever digits −1 shares with it."""
    hold_backward(precision, 3, 250, 8, V, "last", True, elsewhere=0.5)


# ---- for the mutants: together they reach every barrier and guard ----------------------------------------------------
def small(B, T, C, V, elsewhere=0.0):
    def run(k):
        r = np.random.default_rng(1)
        tokens, positions = drawn(r, "frequent", B, T, V, elsewhere), r.permutation(T).astype(np.int32)
        wte, wpe, dout = (rounded(filled(r, n, C), k.precision) for n in (V, T, B * T))
        got = forward(k, tokens, positions, wte, wpe)
        assert np.array_equal(got["out"], rounded(rows_of(wte, tokens) + wpe[positions], k.precision))
        got.update(backward(k, tokens, positions, dout.reshape(B, T, C), wte, wpe))
        truth = {"dwte": wte.copy(), "dwpe": wpe.copy()}
        add_rows(truth["dwte"], tokens, dout)
        np.add.at(truth["dwpe"], positions, dout.reshape(B, T, C).sum(0))
        for what in truth:
            assert rel_l2(got[what], truth[what]) < (1e-6 if k.precision == "fp32" else 4e-3), what
        return got

    return run


SMALL = [("embedding", small(3, 205, 72, 300)), ("embedding, unaligned", small(1, 37, 7, 5)),
         ("embedding, a slice", small(3, 205, 72, 255, 0.5))]

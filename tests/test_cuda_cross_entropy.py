"""cross_entropy.cu: a vocabulary that is one slice, and one in several, against the formula in double."""
import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import DEVICE, KINDS, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits, torch_bf16

NAIVE = "cross_entropy_naive"
DLOSS = 0.25
AXES = {
    "N": [1, 3, 5],
    # a vector is 4 or 8 columns, a step of the block 2048 or 4096
    "columns": [(1, 1), (1, 8), (7, 7), (7, 8), (50, 64), (257, 264), (1600, 1600), (5003, 5120), (4097, 4097)],
    "kind": KINDS,
    "shift": [0, 1],
    "naive": [False, True],
}


def truth(x, targets, V):
    """Losses and gradients (of DLOSS) of rows of logits, by the formula; the padding of x may hold anything."""
    losses, grad = np.zeros(len(x)), np.zeros(x.shape)
    for n, target in enumerate(targets):
        if target >= 0:
            logits = x[n, :V] - x[n, :V].max()
            p = np.exp(logits)
            losses[n] = np.log(p.sum()) - logits[target]
            grad[n, :V] = p / p.sum()
            grad[n, target] -= 1
    return losses, DLOSS * grad


def torch_gradient(x, targets, V):
    def backward(logits):
        target, f = torch.from_numpy(targets).long(), torch.nn.functional
        f.cross_entropy(logits.requires_grad_(), target, ignore_index=-1, reduction="sum").backward()
        return logits.grad * DLOSS

    return np.pad(torch_bf16(backward, x[:, :V]), [(0, 0), (0, x.shape[1] - V)])


def logits_and_targets(r, N, V, Vp, kind, precision):
    """The padding is NaN: nothing may come of it. Of four targets one is the last column, one is none."""
    x = np.full((N, Vp), np.nan)
    x[:, :V] = rounded(filled(r, N, V, kind), precision)
    targets = r.integers(0, V, N).astype(np.int32)
    targets[0::4], targets[2::4] = V - 1, -1
    return x, targets


def whole(k, x, targets, V, naive=False, dloss=DLOSS, shift=0):
    """One rank has all of the vocabulary; naive: the ladder's kernel."""
    N, Vp = x.shape
    losses, max_, sum_, target = (k.out(N, dtype=np.float32) for _ in range(4))
    logits, targets = k.floatX(x, written=True, shift=shift), k.put(targets)
    if naive:
        k.call(NAIVE, losses, logits, targets, dloss, N, V, Vp)
    else:
        k.call("cross_entropy_local", max_, sum_, target, logits, targets, 0, N, V, Vp)
        k.call("cross_entropy_rescale", sum_, max_, max_, N)
        k.call("cross_entropy_global", losses, logits, targets, 0, max_, sum_, target, dloss, N, V, Vp)
    return {"losses": losses.get(), "logits": logits.get()}


def compare(what, got, reference, x, targets, V, precision):
    losses, grad = truth(x, targets, V)
    check(f"{what} losses", got["losses"], losses, precision="fp32", cpu=reference["losses"], K=V)
    bar = torch_gradient(x, targets, V) if precision == "bf16" else None
    check(f"{what} gradient", got["logits"], grad, precision=precision, cpu=reference["logits"], torch=bar, K=V)
    assert not got["logits"][:, V:].any() and not got["logits"][targets < 0].any()


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rows(precision):
    r = np.random.default_rng(SEED)
    for case in [*covering(AXES), dict(N=2, columns=(50257, 50304), kind="random", shift=0, naive=False)]:
        N, (V, Vp), naive, shift = case["N"], case["columns"], case["naive"], case["shift"]
        x, targets = logits_and_targets(r, N, V, Vp, case["kind"], precision)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            reference = whole(cpu, x, targets, V)
            got = same_bits(k, lambda k: whole(k, x, targets, V, naive, shift=shift))
            kept = whole(k, x, targets, V, naive, dloss=0.0, shift=shift)
        compare(label(case), got, reference, x, targets, V, precision)
        assert np.array_equal(kept["losses"], got["losses"])
        assert np.array_equal(kept["logits"], x.astype(np.float32), equal_nan=True), f"{label(case)}: dloss = 0"


# ---- slices --------------------------------------------------------------------------------------------------------
def sliced(k, x, targets, ends, widths, shift=0):
    """The same by as many ranks as there are ends; each holds its columns in rows of its own width."""
    N, column = len(x), k.put(targets)
    ranks, first = [], 0
    for end, width in zip(ends, widths):
        piece = np.full((N, width), np.nan)
        piece[:, : end - first] = x[:, first:end]
        max_, sum_, target = (k.out(N, dtype=np.float32) for _ in range(3))
        logits = k.floatX(piece, written=True, shift=shift)
        k.call("cross_entropy_local", max_, sum_, target, logits, column, first, N, end - first, width)
        ranks.append((first, end, width, logits, max_, sum_.get(), target.get()))
        first = end
    local_max = np.stack([max_.get() for *_, max_, _, _ in ranks])
    global_max = k.put(local_max.max(0))
    rescaled = []
    for *_, max_, sum_, _ in ranks:
        sum_ = k.put(sum_, written=True)
        k.call("cross_entropy_rescale", sum_, max_, global_max, N)
        rescaled.append(sum_.get())
    total, target = k.put(np.sum(rescaled, 0, np.float32)), k.put(np.sum([t for *_, t in ranks], 0, np.float32))
    sums = np.stack([s for *_, s, _ in ranks])
    got = {"max": local_max, "sum": sums, "rescaled": np.stack(rescaled), "logits": np.zeros(x.shape, np.float32)}
    for first, end, width, logits, *_ in ranks:
        losses, V = k.out(N, dtype=np.float32), end - first
        k.call("cross_entropy_global", losses, logits, column, first, global_max, total, target, DLOSS, N, V, width)
        got["logits"][:, first:end] = logits.get()[:, :V]
        assert not logits.get()[:, V:].any(), "the padding of a slice"
        assert np.array_equal(got.setdefault("losses", losses.get()), losses.get(), equal_nan=True), "ranks differ"
    return got


SLICES = [  # ends, widths of rows
    ([50], [50]),
    ([7, 40, 50], [8, 40, 16]),
    ([1, 2, 2100, 4200], [1, 8, 2112, 2101]),
    ([3, 5, 9], [5120, 64, 128]),  # most is padding: of a slice, and of the place where another's target would stand
]


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_slices(precision):
    r = np.random.default_rng(SEED)
    for N, (ends, widths) in [(5, s) for s in SLICES] + [(1, SLICES[-1])]:
        for kind in (*KINDS, "empty"):  # empty: a slice of logits that are all −inf
            V = ends[-1]
            x, targets = logits_and_targets(r, N, V, V, "random" if kind == "empty" else kind, precision)
            if kind == "empty":
                x[:, ends[0] : V - 1] = -np.inf
                targets[:] = np.where(targets >= 0, V - 1, -1)
            for shift in 0, 1:
                with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
                    reference = sliced(cpu, x, targets, ends, widths)
                    got = same_bits(k, lambda k: sliced(k, x, targets, ends, widths, shift))
                compare(f"{ends} {kind}", got, reference, x, targets, V, precision)
                for i, first in enumerate([0, *ends[:-1]]):
                    part, what = x[:, first : ends[i]], f"of slice {i} of {ends} {kind}"
                    largest = np.where(targets < 0, -np.inf, part.max(1))
                    assert np.array_equal(got["max"][i], largest.astype(np.float32)), f"maximum {what}"
                    sums = np.exp(part - np.where(np.isfinite(largest), largest, np.inf)[:, None]).sum(1)
                    bars = dict(precision="fp32", cpu=reference["sum"][i], K=part.shape[1])
                    check(f"sum {what}", got["sum"][i], sums, **bars)
                    with np.errstate(invalid="ignore"):  # without a target all maxima are −inf, and the sum stays 0
                        factor = np.where(targets < 0, 1, np.exp(largest - x.max(1)))
                    three = got["rescaled"][i], sums * factor, reference["rescaled"][i]
                    g, t, bars["cpu"] = (np.where(s < 1e-36, 0, s) for s in three)  # below it an fp32 sum loses bits
                    if precision == "bf16":  # exp_of rounds exponents, of −88 to 0, as floats: 88·2⁻²⁴ of a sum at most
                        bars["K"] = max(bars["K"], 22**2)
                    check(f"rescaled sum {what}", g, t, **bars)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_not_finite(precision):
    """A NaN or inf among the logits, or nothing but −inf: the loss is NaN. One −inf is a logit like others."""
    V, ends, widths = 41, [20, 41], [24, 21]
    r = np.random.default_rng(SEED)
    x = np.full((4 * V, 48), np.nan)
    x[:, :V] = rounded(filled(r, 4 * V, V), precision)
    targets = np.full(4 * V, V // 2, np.int32)
    for i in range(V):
        x[4 * i, i], x[4 * i + 1, i], x[4 * i + 2, i] = np.nan, -np.nan, np.inf
        x[4 * i + 3, i] = -np.inf
    x[3, :V] = -np.inf
    targets[7::4][targets[7::4] == np.arange(1, V)] -= 1  # a target of −inf has an infinite loss
    nan_expected = np.arange(4 * V) % 4 != 3
    nan_expected[3] = True
    for device in "cpu", DEVICE:
        with Kernels(device, precision) as k:
            forms = [whole(k, x, targets, V), sliced(k, x[:, :V], targets, ends, widths)]
            if k.has(NAIVE):
                forms.append(whole(k, x, targets, V, naive=True))
        for i, got in enumerate(forms):
            nan = np.isnan(got["losses"])
            assert np.array_equal(nan, nan_expected), (device, i, np.flatnonzero(nan != nan_expected))
            assert not got["logits"][:, V:].any(), "padding"


# ---- small runs for the mutants ------------------------------------------------------------------------------------
def small(run):
    def check_small(k):
        r, got = np.random.default_rng(SEED), {}
        for V, Vp in (5003, 5120), (7, 7):
            x, targets = logits_and_targets(r, 3, V, Vp, "random", k.precision)
            got[V] = run(k, x, targets, V)
            for name, want in zip(("losses", "logits"), truth(x, targets, V)):
                bar = 1e-5 if k.precision == "fp32" or name == "losses" else 4e-3
                assert rel_l2(got[V][name], want) < bar, name
        return {f"{name} {V}": array for V, arrays in got.items() for name, array in arrays.items()}

    return check_small


def small_slices(k, x, targets, V):
    got = sliced(k, x[:, :V], targets, [V - 4, V], [x.shape[1], 4])
    return got | {"logits": np.pad(got["logits"], [(0, 0), (0, x.shape[1] - V)])}


SMALL = [
    ("cross_entropy", small(whole)),
    ("cross_entropy_naive", small(lambda *args: whole(*args, naive=True))),
    ("cross_entropy_slices", small(small_slices)),
]

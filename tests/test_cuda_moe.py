"""moe.cu: the router's products and its choice, what is counted of it, and rows that are sorted by expert and come back."""
import numpy as np
import pytest

from conftest import SEED, covering, label
from kernels import DEVICE, PRECISIONS, Kernels, MoeRouting, check, filled, isolated, raw, rounded, same_bits, torch_bf16


def both(precision, run):
    """run(k) on the CPU, and three times on the device."""
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        return run(cpu), same_bits(k, run)


# ---- the router's products ---------------------------------------------------------------------------------------------
PRODUCTS = {
    "logits": lambda x, w, d, dx, dw: x @ w.T,
    "dinp": lambda x, w, d, dx, dw: dx + d @ w,
    "dweight": lambda x, w, d, dx, dw: dw + d.T @ x,
}


def products(k, arrays, shift=0):
    x, w, d, dx, dw = arrays
    (N, C), E = x.shape, len(w)
    inp, weight = k.floatX(x, shift=shift), k.floatX(w, shift=shift)
    dlogits, logits = k.put(d.astype(np.float32)), k.out(N, E, dtype=np.float32)
    dinp, dweight = k.floatX(dx, written=True, shift=shift), k.floatX(dw, written=True, shift=shift)
    k.call("moe_router_forward", logits, inp, weight, N, C, E)
    k.call("moe_router_backward_input", dinp, dlogits, weight, N, C, E)
    k.call("moe_router_backward_weight", dweight, dlogits, inp, N, C, E, k.workspace("moe_router", N, C, E))
    return {"logits": logits.get(), "dinp": dinp.get(), "dweight": dweight.get()}


def operands(r, N, C, E, precision):
    shapes = (N, C), (E, C), (N, E), (N, C), (E, C)
    return [rounded(filled(r, *s), "fp32" if i == 2 else precision) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_router_products(precision):
    r = np.random.default_rng(SEED)
    for case in covering({"N": [1, 5, 33, 300], "C": [1, 8, 72, 264], "E": [1, 2, 8, 9, 40], "shift": [0, 1]}, seed=SEED):
        arrays = operands(r, case["N"], case["C"], case["E"], precision)
        want, got = both(precision, lambda k: products(k, arrays, case["shift"] if k.device != "cpu" else 0))
        length = {"logits": case["C"], "dinp": case["E"], "dweight": case["N"]}
        for name, formula in PRODUCTS.items():
            small = name != "logits" and precision == "bf16"  # logits are fp32 in both builds
            expected = torch_bf16(formula, *arrays) if small else None
            check(f"{name} {label(case)}", got[name], formula(*arrays), precision=precision if small else "fp32",
                  K=length[name], cpu=want[name], torch=expected)  # fmt: skip


# ---- the choice ----------------------------------------------------------------------------------------------------------
def scores_of(logits, sigmoid):
    if sigmoid:
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def routed(logits, bias, how):
    """(scores, index, gate, margin) in double, by sorting: the larger first, of equal ones the one that comes first."""
    E, k, groups, limit = how.experts, how.topk, how.groups, how.group_limit
    scores = scores_of(logits.astype(np.float64), how.sigmoid)
    value, margin = scores + bias, np.full(len(logits), np.inf)
    if limit < groups:
        top = -np.sort(-value.reshape(-1, groups, E // groups), -1)[:, :, : max(1, k // limit)].sum(-1)
        order = np.argsort(-top, -1, kind="stable")
        ranked = np.take_along_axis(top, order, -1)
        margin = ranked[:, limit - 1] - ranked[:, limit]
        value = value.copy()
        np.put_along_axis(value.reshape(-1, groups, E // groups), order[:, limit:, None], -np.inf, 1)
    order = np.argsort(-value, -1, kind="stable")
    ranked = np.take_along_axis(value, order, -1)
    if k < E and np.isfinite(ranked[:, k]).all():
        margin = np.minimum(margin, ranked[:, k - 1] - ranked[:, k])
    index = order[:, :k]
    gate = np.take_along_axis(scores, index, -1)
    return scores, index, gate / gate.sum(-1, keepdims=True) if k > 1 else gate, margin


def route(k, logits, bias, how):
    N, E = logits.shape
    scores = k.put(logits, written=True)
    index, gate = k.out(N, how.topk, dtype=np.int32), k.out(N, how.topk, dtype=np.float32)
    margin = k.out(N, dtype=np.float32)
    k.call("moe_route", scores, index, gate, margin, None if bias is None else k.put(bias), N, how)
    return {"scores": scores.get(), "index": index.get(), "gate": gate.get(), "margin": margin.get()}


# (E, k, groups, limit)
ROUTES = [(1, 1, 1, 1), (8, 1, 1, 1), (8, 2, 1, 1), (8, 8, 1, 1), (8, 3, 4, 2), (40, 6, 1, 1), (64, 8, 8, 4), (256, 8, 8, 4),
          (6, 2, 3, 1), (12, 4, 3, 2), (40, 7, 5, 5)]  # fmt: skip
CLEAR = 1e-5  # a margin that rounding does not turn


@isolated
def test_route():
    r = np.random.default_rng(SEED)
    for case in covering({"route": ROUTES, "sigmoid": [False, True], "bias": [False, True], "N": [1, 3, 50]}, seed=SEED):
        how = MoeRouting(*case["route"][:2], case["sigmoid"], *case["route"][2:])
        logits = r.normal(0, 2, (case["N"], how.experts)).astype(np.float32)
        bias = r.normal(0, 0.1, how.experts).astype(np.float32) if case["bias"] else None
        scores, index, gate, margin = routed(logits, 0 if bias is None else bias.astype(np.float64), how)
        want, got = both("fp32", lambda k: route(k, logits, bias, how))
        clear = (margin > CLEAR) if how.topk > 1 else np.ones(len(margin), bool) & (margin > CLEAR)
        assert clear.sum() >= 0.7 * len(clear) - 1, label(case)
        for name, half in ("the CPU", want), ("the device", got):
            chosen = np.sort(half["index"][clear], -1), np.sort(index[clear], -1)
            assert np.array_equal(*chosen), f"{name}, {label(case)}"
            assert np.allclose(np.sort(half["gate"][clear], -1), np.sort(gate[clear], -1), rtol=3e-6, atol=0), f"{name}, {label(case)}"
            assert np.allclose(half["scores"], scores, rtol=2e-6, atol=1e-9), f"{name}, {label(case)}"
            finite = np.isfinite(margin)
            assert np.array_equal(finite, np.isfinite(half["margin"])), f"{name}, {label(case)}"
            assert np.allclose(half["margin"][finite], margin[finite], rtol=0, atol=2e-6), f"{name}, {label(case)}"


@isolated
def test_ties_and_numbers_that_are_none():
    """Of equal scores the expert with the lower number; NaN comes last; a row of nothing else chooses the first experts."""
    tied = np.repeat([[1, 0, 1, 0, 1, 1, 0, 2]], 3, 0).astype(np.float32)
    tied[1, [0, 7]] = np.nan
    tied[2] = np.nan
    for sigmoid, second in (True, [2, 4, 5]), (False, [0, 1, 2]):  # a softmax with one NaN has no other numbers
        how = MoeRouting(8, 3, sigmoid, 1, 1)
        for half in both("fp32", lambda k: route(k, tied, None, how)):
            assert half["index"].tolist() == [[7, 0, 2], second, [0, 1, 2]], (sigmoid, half["index"])
            assert half["margin"][0] == 0 and np.isnan(half["gate"][2]).all()
    how = MoeRouting(8, 2, True, 4, 1)  # groups of two: equal sums, the first of them
    for half in both("fp32", lambda k: route(k, np.zeros((1, 8), np.float32), None, how)):
        assert half["index"].tolist() == [[0, 1]] and half["margin"][0] == 0


def route_backward(k, dgate, index, gate, scores, chosen, factor, first, T, how):
    N = len(index)
    dlogits = k.out(N, how.experts, dtype=np.float32)
    arrays = [k.put(a.astype(np.float32)) for a in (dgate, gate, scores, chosen)]
    k.call("moe_route_backward", dlogits, arrays[0], k.put(index.astype(np.int32)), *arrays[1:], factor, first, N, T, how)
    return {"dlogits": dlogits.get()}


@isolated
def test_route_backward():
    """The gates' derivative, and the balance loss's, as numbers' differences have them."""
    r = np.random.default_rng(SEED)
    for case in covering({"route": ROUTES, "sigmoid": [False, True], "factor": [0.0, 0.3], "first": [0, 9], "N": [1, 25]}, seed=SEED):
        how, N, first, T = MoeRouting(*case["route"][:2], case["sigmoid"], *case["route"][2:]), case["N"], case["first"], 10
        logits = r.normal(0, 1, (N, how.experts))
        scores, index, gate, _ = routed(logits, 0, how)
        dgate, chosen = r.normal(0, 1, gate.shape), r.integers(0, 9, ((first + N) // T + 1, how.experts)).astype(float)

        def value(logits):
            s = scores_of(logits, how.sigmoid)
            g = np.take_along_axis(s, index, -1)
            g = g / g.sum(-1, keepdims=True) if how.topk > 1 else g
            return (g * dgate).sum(-1) + case["factor"] * (s * chosen[(first + np.arange(N)) // T]).sum(-1)

        truth, step = np.zeros_like(logits), 1e-5
        for e in range(how.experts):
            moved = logits.copy()
            moved[:, e] += step
            truth[:, e] += value(moved) / 2 / step
            moved[:, e] -= 2 * step
            truth[:, e] -= value(moved) / 2 / step
        for half in both("fp32", lambda k: route_backward(k, dgate, index, gate, scores, chosen, case["factor"], first, T, how)):
            assert np.allclose(half["dlogits"], truth, rtol=0, atol=2e-6 * max(1, np.abs(truth).max())), label(case)


# ---- what is counted -----------------------------------------------------------------------------------------------------
def counted(k, index, scores, margin, positions, first, B, T, how):
    N, E = scores.shape
    at, of = k.put(index.astype(np.int32)), k.put(scores)
    sums, loss = k.out(2, B, E, dtype=np.float32), k.put(np.array([3.0]), written=True)
    seen, least = k.put(np.arange(E + 3, dtype=np.uint64), written=True), k.put(np.float32([0.5]), written=True)
    k.call("moe_sequence_sums", sums, at, of, first, N, B, T, how)
    k.call("moe_balance_loss", loss, sums, B, E)
    k.call("moe_observe", seen, least, at, k.put(margin), k.put(positions), 7, 1000, first, N, T, how)
    return {"sums": sums.get(), "loss": loss.get(), "seen": seen.get(), "least": least.get()}


@isolated
def test_what_is_counted():
    r = np.random.default_rng(SEED)
    for case in covering({"route": ROUTES, "B": [1, 3], "T": [1, 20], "part": [(0, 1), (0.3, 0.8)]}, seed=SEED):
        (E, k, groups, limit), B, T = case["route"], case["B"], case["T"]
        how, first, end = MoeRouting(E, k, False, groups, limit), int(case["part"][0] * B * T), max(1, int(case["part"][1] * B * T))
        first = min(first, end - 1)
        N = end - first
        index = np.array([r.permutation(E)[:k] for _ in range(N)])
        scores, margin = r.uniform(0, 1, (N, E)).astype(np.float32), r.uniform(0, 1, N).astype(np.float32)
        margin[0] = np.inf
        positions = r.permutation(100)[:T].astype(np.int32)
        want, got = both("fp32", lambda kernels: counted(kernels, index, scores, margin, positions, first, B, T, how))
        truth = np.zeros((2, B, E))
        for n in range(N):
            np.add.at(truth[0, (first + n) // T], index[n], 1)
            truth[1, (first + n) // T] += scores[n]
        met = [len(set(row // (E // groups))) for row in index]
        for half in want, got:
            assert np.array_equal(half["sums"][0], truth[0]) and np.allclose(half["sums"][1], truth[1], rtol=1e-5), label(case)
            assert np.allclose(half["loss"], 3 + (truth[0] * truth[1]).sum(), rtol=1e-5), label(case)
            assert np.array_equal(half["seen"][:E], np.arange(E) + truth[0].sum(0).astype(np.uint64)), label(case)
            assert half["seen"][E + 1] == E + 1 + sum(met) and half["seen"][E + 2] == max(E + 2, *met), label(case)
            assert half["least"][0] == min(0.5, margin.min()), label(case)
        assert raw(want["seen"]) == raw(got["seen"]), f"another hash, {label(case)}"


@isolated
def test_a_hash_knows_who_went_where():
    """The same copies in another order have the same hash; one copy elsewhere, or of another layer or position, has not."""
    how, r = MoeRouting(8, 2, False, 1, 1), np.random.default_rng(SEED)
    index, positions = np.array([r.permutation(8)[:2] for _ in range(6)]), np.arange(6, dtype=np.int32)

    def hash_of(k, index, positions, layer=0, sequence=0):
        seen, least = k.put(np.zeros(11, np.uint64), written=True), k.put(np.float32([1]), written=True)
        margin = k.put(np.ones(len(index), np.float32))
        k.call("moe_observe", seen, least, k.put(index.astype(np.int32)), margin, k.put(positions), layer, sequence, 0,
               len(index), len(index), how)  # fmt: skip
        return int(seen.get()[8])

    for device in "cpu", DEVICE:
        with Kernels(device, "fp32") as k:
            one, back = hash_of(k, index, positions), hash_of(k, index[::-1].copy(), positions[::-1].copy())
            moved = index.copy()
            moved[3, 0] = next(e for e in range(8) if e not in index[3])
            others = [hash_of(k, moved, positions), hash_of(k, index, positions, layer=1), hash_of(k, index, positions, sequence=1),
                      hash_of(k, index, (positions + 1).astype(np.int32))]  # fmt: skip
            assert one == back and len({one, *others}) == 5


# ---- sorted by expert ----------------------------------------------------------------------------------------------------
def moved(k, index, E, x, y, gate, off=0):
    (N, topk), C = index.shape, x.shape[1]
    place, count = k.out(N * topk, dtype=np.int32), k.out(E, dtype=np.int32)
    inp, rows = k.floatX(x, shift=off), k.floatX(y, shift=off)
    gates = k.put(gate.astype(np.float32))
    k.call("moe_sort", place, count, k.put(index.astype(np.int32)), N * topk, E)
    got = {"place": place.get(), "count": count.get()}
    for name, g in ("", None), (" weighed", gates):
        out = k.out(N * topk, C, shift=off)
        k.call("moe_permute", out, inp, g, place, N, topk, C)
        got["permuted" + name] = out.get()
        for add in False, True:
            out = k.floatX(x, written=True, shift=off)
            k.call("moe_combine", out, rows, g, place, add, N, topk, C)
            got[("added" if add else "combined") + name] = out.get()
    dgate = k.out(N, topk, dtype=np.float32)
    k.call("moe_gate_backward", dgate, inp, rows, place, N, topk, C)
    return {**got, "dgate": dgate.get()}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rows_come_and_go(precision):
    r = np.random.default_rng(SEED)
    axes = {"N": [1, 7, 90, 700], "E": [(1, 1), (8, 1), (8, 3), (40, 6), (5, 5)], "C": [1, 8, 40, 264], "one": [False, True], "off": [0, 1]}
    for case in covering(axes, lambda c: c["N"] < 700 or c["C"] <= 8, seed=SEED):
        N, (E, k), C = case["N"], case["E"], case["C"]
        index = np.array([(np.arange(k) + E - k) if case["one"] else r.permutation(E)[:k] for _ in range(N)])
        x, y = (rounded(filled(r, n, C), precision) for n in (N, N * k))
        gate = r.uniform(0, 1, (N, k)).astype(np.float32)
        want, got = both(precision, lambda kernels: moved(kernels, index, E, x, y, gate, case["off"] if kernels.device != "cpu" else 0))
        order = np.argsort(index.ravel(), kind="stable")
        place = np.argsort(order, kind="stable")
        back = y[place].reshape(N, k, C)
        g = gate.astype(np.float64)
        truth = {"permuted": x[order // k], "permuted weighed": (x[:, None] * g[:, :, None]).reshape(-1, C)[order],
                 "combined": back.sum(1), "added": x + back.sum(1), "combined weighed": (back * g[:, :, None]).sum(1),
                 "added weighed": x + (back * g[:, :, None]).sum(1)}  # fmt: skip
        for half in want, got:
            assert np.array_equal(half["place"], place), label(case)
            assert np.array_equal(half["count"], np.bincount(index.ravel(), minlength=E)), label(case)
            assert np.array_equal(half["permuted"], truth["permuted"]), label(case)
        for name, t in truth.items():
            once = rounded(t, precision)  # in bf16: the sum rounded once
            check(f"{name} {label(case)}", got[name], t, precision=precision, K=k, cpu=want[name], torch=once if precision == "bf16" else None)
        check(f"dgate {label(case)}", got["dgate"], (x[:, None] * back).sum(-1), precision="fp32", K=C, cpu=want["dgate"])


# ---- for the mutants: together they reach every guard ----------------------------------------------------------------------
def small(N, C, E, topk, groups, limit, sigmoid, shift):
    def run(k):
        r = np.random.default_rng(1)
        how = MoeRouting(E, topk, sigmoid, groups, limit)
        arrays = operands(r, N, C, E, k.precision)
        got = products(k, arrays, shift)
        for name, formula in PRODUCTS.items():
            assert np.allclose(got[name], formula(*arrays), rtol=2e-2, atol=1e-1 if k.precision == "bf16" else 1e-4), name
        logits = r.normal(0, 2, (N, E)).astype(np.float32)
        scores, index, gate, _ = routed(logits, 0, how)
        got |= route(k, logits, None, how)
        assert np.array_equal(np.sort(got["index"], -1), np.sort(index, -1)) and np.allclose(got["scores"], scores, rtol=1e-5)
        got |= route_backward(k, gate, index, gate, scores, np.ones((N // 10 + 1, E)), 0.5, 0, 10, how)
        got |= counted(k, index, got["scores"], got["margin"], np.arange(10, dtype=np.int32), 0, N // 10 + 1, 10, how)
        assert got["seen"][:E].sum() == N * topk + E * (E - 1) // 2
        x, y = (rounded(filled(r, n, C), k.precision) for n in (N, N * topk))
        got |= moved(k, index, E, x, y, gate, shift)
        place = np.argsort(np.argsort(index.ravel(), kind="stable"), kind="stable")
        assert np.array_equal(got["place"], place)
        assert np.allclose(got["combined"], y[place].reshape(N, topk, C).sum(1), rtol=1e-2, atol=1e-2)
        return got

    return run


SMALL = [("moe", small(150, 72, 8, 3, 4, 2, True, 0)), ("moe_unaligned", small(37, 15, 5, 2, 1, 1, False, 1)),
         ("moe_many_experts", small(270, 8, 40, 4, 1, 1, False, 0))]  # fmt: skip

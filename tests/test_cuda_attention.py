"""flash_attention.cu and naive_attention.cu: against the formulas in double, on awkward shapes and inputs, whole and in a ring."""
import ctypes

import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import DEVICE, PRECISIONS, AttentionShape, Kernels, check, isolated, rel_l2, rounded, rungs, same_bits, torch_bf16

# Lengths around the tiles of both precisions (16, 32, 64, 128), heads of channels that tiles have and that they have not.
SHAPES = {
    "Tq": [1, 17, 63, 65, 130], "Tk": [1, 17, 64, 127, 129], "heads": [(1, 1), (2, 2), (3, 1), (4, 2)], "B": [1, 2],
    "D": [16, 20, 48, 64, 72, 96, 128], "causal": [False, True], "packed": [False, True], "shift": [0, 1],
    "kind": ["random", "equal keys", "one winner", "rising", "zero"],
}


def legal(case):
    if (case["causal"] or case["packed"]) and case["Tq"] != case["Tk"]:
        return False
    return case["B"] * case["heads"][0] * case["Tq"] * case["Tk"] <= 40000


def cases(seed, **only):
    axes = {**SHAPES, **only, "Tq": [1, 17, 63, 65, 129], "Tk": [1, 17, 63, 65, 129]}
    same = {**axes, "causal": [True], "Tk": ["as Tq"]}
    made = covering(same, lambda c: legal({**c, "Tk": c["Tq"]}), seed) + covering(axes, legal, seed)
    return [{**c, "Tk": c["Tq"] if c["Tk"] == "as Tq" else c["Tk"]} for c in made]


# ---- a problem, and its solution in double ---------------------------------------------------------------------------
class Problem:
    """q, do [B,Tq,H,D], k, v [B,Tk,KV,D], rounded to the precision; o, lse, dq, dk, dv as they ought to be.

    shift: 1, all arrays start off alignment, or the name of the only one that does."""

    def __init__(self, r, precision, *, B=1, Tq, Tk, heads=(1, 1), D, causal=False, packed=False, shift=0, kind="random"):
        H, KV = heads
        self.precision, self.packed, self.shift = precision, packed, shift
        self.B, self.Tq, self.Tk, self.H, self.KV, self.D, self.causal = B, Tq, Tk, H, KV, D, causal
        q, k = r.uniform(-2, 2, (B, Tq, H, D)), r.uniform(-2, 2, (B, Tk, KV, D))
        if kind == "equal keys":
            k[:] = k[:, :1]
        if kind == "one winner":  # scores up to 1e7 √D, far apart: all weight lies on one key
            q, k = np.full_like(q, 1e3), np.broadcast_to(64.0 * np.arange(Tk)[None, :, None, None], k.shape)
        if kind == "rising":  # each key raises the maximum
            q, k = np.ones_like(q), np.broadcast_to(np.arange(Tk)[None, :, None, None] / 8, k.shape)
        if kind == "overflow":  # scores of −∞, but for the last 30 keys
            q[..., 0], k[..., 0] = 1e30, 0
            k[:, : Tk - 30, :, 0] = -1e30
        if kind == "zero":
            q, k = 0 * q, 0 * k
        v, do = r.uniform(-2, 2, (B, Tk, KV, D)), r.uniform(-2, 2, (B, Tq, H, D))
        self.q, self.k, self.v, self.do = (rounded(x, precision) for x in (q, k, v, do))
        self.solve()

    def off(self, name):
        return self.shift if isinstance(self.shift, int) else int(name == self.shift)

    def solve(self):
        k, v = (np.repeat(x, self.H // self.KV, 2) for x in (self.k, self.v))
        s = np.einsum("bihd,bjhd->bhij", self.q, k) / np.sqrt(self.D)
        if self.causal:
            s = np.where(np.tri(self.Tq, dtype=bool), s, -np.inf)
        top = s.max(-1, keepdims=True, initial=-1e300)
        p = np.exp(s - top)
        sum_ = p.sum(-1, keepdims=True)
        self.p = p / np.where(sum_ == 0, 1, sum_)
        with np.errstate(divide="ignore"):
            self.lse = (top + np.log(sum_))[..., 0]
        self.o = np.einsum("bhij,bjhd->bihd", self.p, v)
        dp = np.einsum("bihd,bjhd->bhij", self.do, v)
        ds = self.p * (dp - (self.p * dp).sum(-1, keepdims=True)) / np.sqrt(self.D)
        self.dq = np.einsum("bhij,bjhd->bihd", ds, k)
        self.dk, self.dv = (
            x.reshape(self.B, self.Tk, self.KV, -1, self.D).sum(3)
            for x in (np.einsum("bhij,bihd->bjhd", ds, self.q), np.einsum("bhij,bihd->bjhd", self.p, self.do)))

    def torch(self):
        """p, o, dq, dk, dv as PyTorch has them in bf16, by the textbook."""
        def attention(q, k, v, do):
            for x in (q, k, v):
                x.requires_grad_()
            wide_k, wide_v = (x.repeat_interleave(self.H // self.KV, 2) for x in (k, v))
            s = torch.einsum("bihd,bjhd->bhij", q, wide_k) / self.D**0.5
            if self.causal:
                s = s.masked_fill(~torch.ones(self.Tq, self.Tk, dtype=torch.bool).tril(), -torch.inf)
            p = s.softmax(-1)
            o = torch.einsum("bhij,bjhd->bihd", p, wide_v)
            o.backward(do)
            return p, o, q.grad, k.grad, v.grad

        return dict(zip(("p", "o", "dq", "dk", "dv"), torch_bf16(attention, self.q, self.k, self.v, self.do)))

    def check(self, got, cpu, name):
        expected = self.torch() if self.precision == "bf16" else {}
        K, unit = max(self.Tq * self.H // self.KV, self.Tk, self.D), 2.0**-9 if self.precision == "bf16" else 2.0**-22
        for x in got:
            truth = getattr(self, x)
            if x == "lse":
                check(f"{name}: lse", got[x], truth, precision="fp32", cpu=cpu[x], K=self.D)
                continue
            # ds is a small difference of do·v and do·o, where o was rounded; what that costs goes times k, or q
            factor = {"dq": self.k, "dk": self.q}.get(x)
            noise = 0 if factor is None else np.abs(factor).max() * np.abs(self.do).max() * np.abs(self.v).max()
            size, default = np.abs(truth).max(), 2.0**-6 if self.precision == "bf16" else 2.0**-20 * K**0.5
            if size < (4 * unit if self.precision == "bf16" else 4096 * unit) * noise:
                assert np.abs(got[x] - truth).max() <= 8 * unit * noise, f"{name}: {x} off by {np.abs(got[x] - truth).max()}"
            else:
                check(f"{name}: {x}", got[x], truth, precision=self.precision, cpu=cpu.get(x), K=K, torch=expected.get(x),
                      largest=max(default, 8 * unit * noise / size if size else 0))


# ---- on a device -----------------------------------------------------------------------------------------------------
class Tensors:
    """The problem's arrays on a device, rows wider than their heads or q, k and v in one row; NaN between."""

    def __init__(self, k, p):
        self.k, self.p = k, p
        H, KV, D = p.H, p.KV, p.D
        unit = 16 if D % 8 == 0 else 1  # aligned where it can be
        o_stride = (H + 1) * D if unit > 1 else H * D + 3
        q_stride = kv_stride = (H + 2 * KV) * D + unit
        if not p.packed:
            q_stride, kv_stride = H * D + unit, KV * D + unit
        self.s = AttentionShape(B=p.B, Tq=p.Tq, Tk=p.Tk, H=H, KV=KV, D=D, q_stride=q_stride, kv_stride=kv_stride,
                                o_stride=o_stride, causal=p.causal)
        if p.packed:
            qkv = self.rows([p.q, p.k, p.v], p.Tq, q_stride)
            self.q = k.floatX(qkv, shift=p.off("q"))
            at = self.q.nbytes // qkv.size * D
            self.k_, self.v = (ctypes.c_void_p(self.q.ptr + at * n) for n in (H, H + KV))
        else:
            self.q, self.k_, self.v = (
                k.floatX(self.rows([x], x.shape[1], stride), shift=p.off(name))
                for x, stride, name in ((p.q, q_stride, "q"), (p.k, kv_stride, "k"), (p.v, kv_stride, "v")))
        self.do = k.floatX(self.rows([p.do], p.Tq, o_stride), shift=p.off("do"))

    def rows(self, parts, T, stride):
        out, at = np.full((self.p.B, T, stride), np.nan), 0
        for x in parts:
            width = x.shape[2] * self.p.D
            out[:, :, at : at + width] = x.reshape(self.p.B, T, width)
            at += width
        return out

    def heads(self, buffer, n, at=0):
        """Heads at.. at + n of what stands there, and nothing else written."""
        x, D = buffer.get(), self.p.D
        got = x[:, :, at * D : (at + n) * D].reshape(*x.shape[:2], n, D)
        return got

    def untouched(self, buffer, n):
        assert np.isnan(buffer.get()[:, :, n * self.p.D :]).all(), "written between rows"

    def forward(self, name):
        p, s, k = self.p, self.s, self.k
        o, lse = k.out(p.B, p.Tq, s.o_stride, shift=p.off("o")), k.out(p.B, p.H, p.Tq, dtype=np.float32)
        k.call(name, o, lse, self.q, self.k_, self.v, s, k.workspace("flash_attention", s))
        self.untouched(o, p.H)
        self.o, self.lse = o, lse
        return {"o": self.heads(o, p.H), "lse": lse.get()}

    def naive_forward(self):
        p, s, k = self.p, self.s, self.k
        o, self.probs = k.out(p.B, p.Tq, s.o_stride, shift=p.off("o")), k.out(p.B, p.H, p.Tq, p.Tk)
        k.call("naive_attention_forward", o, self.probs, self.q, self.k_, self.v, s, k.workspace("naive_attention", s))
        self.untouched(o, p.H)
        return {"o": self.heads(o, p.H), "p": self.probs.get()}

    def backward(self, op="flash"):
        p, s, k = self.p, self.s, self.k
        if p.packed:
            dq = k.out(p.B, p.Tq, s.q_stride, shift=p.off("dq"))
            at = dq.nbytes // dq.get().size * p.D
            dk, dv = (ctypes.c_void_p(dq.ptr + at * n) for n in (p.H, p.H + p.KV))
        else:
            dq = k.out(p.B, p.Tq, s.q_stride, shift=p.off("dq"))
            dk, dv = (k.out(p.B, p.Tk, s.kv_stride, shift=p.off(name)) for name in ("dk", "dv"))
        inputs = (self.o, self.lse) if op == "flash" else (self.probs,)
        k.call(f"{op}_attention_backward", dq, dk, dv, self.do, *inputs, self.q, self.k_, self.v, s,
               k.workspace(f"{op}_attention", s))
        if p.packed:
            self.untouched(dq, p.H + 2 * p.KV)
            return {"dq": self.heads(dq, p.H), "dk": self.heads(dq, p.KV, p.H), "dv": self.heads(dq, p.KV, p.H + p.KV)}
        self.untouched(dq, p.H), self.untouched(dk, p.KV), self.untouched(dv, p.KV)
        return {"dq": self.heads(dq, p.H), "dk": self.heads(dk, p.KV), "dv": self.heads(dv, p.KV)}


def flash(k, p):
    t = Tensors(k, p)
    return {**t.forward("flash_attention_forward"), **t.backward()}


def naive(k, p):
    t = Tensors(k, p)
    return {**t.naive_forward(), **t.backward("naive")}


def ring(k, p, visits):
    """Each visit (queries, keys, causal; the first two are slices) adds its part: forward, then backward."""
    t, s, f32 = Tensors(k, p), Tensors(k, p).s, np.float32
    o = k.put(np.full((p.B, p.Tq, s.o_stride), 1e30, f32), written=True, shift=p.off("o"))
    lse = k.put(np.full((p.B, p.H, p.Tq), -np.inf, f32), written=True)
    dq = k.put(np.zeros((p.B, p.Tq, s.q_stride), f32), written=True, shift=p.off("dq"))
    dk, dv = (k.put(np.zeros((p.B, p.Tk, s.kv_stride), f32), written=True, shift=p.off(name)) for name in ("dk", "dv"))
    item = t.do.nbytes // t.do.get().size

    def at(buffer, first, stride, size):
        return ctypes.c_void_p((buffer.ptr if hasattr(buffer, "ptr") else buffer.value) + first * stride * size)

    def parts():
        for queries, keys, causal in visits:
            i, j = queries.start, keys.start
            part = AttentionShape(B=p.B, Tq=queries.stop - i, Tk=keys.stop - j, H=p.H, KV=p.KV, D=p.D, q_stride=s.q_stride,
                                  kv_stride=s.kv_stride, o_stride=s.o_stride, causal=causal, q_tokens=p.Tq, kv_tokens=p.Tk)
            qkv = at(t.q, i, s.q_stride, item), at(t.k_, j, s.kv_stride, item), at(t.v, j, s.kv_stride, item)
            yield i, j, part, qkv, k.workspace("flash_attention", part)

    for i, j, part, qkv, workspace in parts():
        k.call("flash_attention_forward_block", at(o, i, s.o_stride, 4), at(lse, i, 1, 4), *qkv, part, workspace)
    rows = o.get()
    assert (rows[:, :, p.H * p.D :] == np.float32(1e30)).all(), "written between rows"
    got = {"o": t.heads(o, p.H), "lse": lse.get()}
    o_rounded, delta = k.floatX(rows, shift=p.off("o")), k.out(p.B, p.H, p.Tq, dtype=f32)
    k.call("flash_attention_delta", delta, t.do, o_rounded, s)
    for i, j, part, qkv, workspace in parts():
        k.call("flash_attention_backward_block", at(dq, i, s.q_stride, 4), at(dk, j, s.kv_stride, 4), at(dv, j, s.kv_stride, 4),
               at(t.do, i, s.o_stride, item), at(delta, i, 1, 4), at(lse, i, 1, 4), *qkv, part, workspace)
    for x, heads in ((dq, p.H), (dk, p.KV), (dv, p.KV)):
        assert (x.get()[:, :, heads * p.D :] == 0).all(), "written between rows"
    return {**got, "dq": t.heads(dq, p.H), "dk": t.heads(dk, p.KV), "dv": t.heads(dv, p.KV)}


def blocks(Tq, Tk, *cuts):
    return [(slice(0, Tq), slice(a, b), False) for a, b in zip((0, *cuts), (*cuts, Tk))]


def chunks(T):
    """Causal attention as a zig-zag ring of two has it: two chunks of each, the rest without a mask."""
    a, b, c = T // 4, T // 2, T
    return [(slice(0, a), slice(0, a), True), (slice(a, b), slice(a, b), True), (slice(b, c), slice(b, c), True),
            (slice(a, c), slice(0, a), False), (slice(b, c), slice(a, b), False)]


# ---- the tests -------------------------------------------------------------------------------------------------------
def run_cases(op, precision, seed, *more, **only):
    r = np.random.default_rng(SEED + seed)
    for case in [*cases(SEED + seed, **only), *more]:
        p = Problem(r, precision, **case)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            k.seed(SEED + seed)
            p.check(op(k, p), op(cpu, p), label(case))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_flash(precision):
    more_than_a_group = dict(B=3, heads=(24, 12), Tq=66, Tk=66, D=16, causal=True)  # of heads (attention_tiles.cuh: work)
    run_cases(flash, precision, 1, more_than_a_group)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_naive(precision):
    run_cases(naive, precision, 2, B=[1], D=[20, 64])


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_every_rung(precision):
    r = np.random.default_rng(SEED)
    for name in rungs("flash_attention_forward")[:-1]:
        for case in (dict(Tq=130, Tk=130, D=96, causal=True), dict(Tq=3, Tk=129, heads=(2, 1), D=20), dict(Tq=65, Tk=1, D=64)):
            p = Problem(r, precision, **case)
            with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
                p.check(Tensors(k, p).forward(name), flash(cpu, p), f"{name} {label(case)}")


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_ring(precision):
    r = np.random.default_rng(SEED)
    for case, visits in (
        (dict(Tq=70, Tk=150, D=64, B=2, heads=(2, 1)), blocks(70, 150, 1, 1, 65)),  # one block of no keys
        (dict(Tq=131, Tk=131, D=16, causal=True, packed=True), chunks(131)),
        (dict(Tq=70, Tk=70, D=72, B=2, heads=(4, 2), causal=True), chunks(70)),  # parts of queries, of several sequences
        (dict(Tq=5, Tk=230, D=16, kind="overflow"), blocks(5, 230, 100)),  # the first block weighs nothing
        (dict(Tq=20, Tk=90, D=20, B=2, shift=1), blocks(20, 90, 40)[::-1]),
        (dict(Tq=40, Tk=96, D=128, kind="one winner"), blocks(40, 96, 32, 64)),
        (dict(Tq=40, Tk=96, D=128, kind="one winner"), blocks(40, 96, 32, 64)[::-1]),
    ):
        p = Problem(r, precision, **case)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            p.check(ring(k, p, visits), ring(cpu, p, visits), label(case))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_one_array_off_alignment(precision):
    r = np.random.default_rng(SEED)
    for name in ("q", "k", "v", "do", "o", "dq", "dk", "dv"):
        p = Problem(r, precision, Tq=17, Tk=17, D=16, shift=name)
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            for op in (flash, lambda k, p: ring(k, p, blocks(17, 17, 5))):
                p.check(op(k, p), op(cpu, p), name)


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_scores_that_overflow(precision):
    """Keys with scores of −∞ have p = 0, also where a row's first tiles hold no others. A row of nothing else is NaN."""
    p = Problem(np.random.default_rng(SEED), precision, Tq=5, Tk=230, D=80, kind="overflow")
    with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
        for op in (flash, naive):
            p.check(op(k, p), op(cpu, p), "overflow")
        p.k[..., 0] = -1e30
        for each in (cpu, k):
            for o in Tensors(each, p).forward("flash_attention_forward")["o"], Tensors(each, p).naive_forward()["o"]:
                assert np.isnan(o).all()


@isolated
def test_rounded_inputs():
    """--matmul bf16: q, k, v, do, p and ds enter products rounded, as in the CPU half, whose every rounding is found again."""
    def with_inputs_bf16(k):
        ctypes.c_bool.in_dll(k.lib, "matmul_inputs_bf16").value = True
        return k

    for shift in (0, 1):  # at most 32 keys: one tile, so that p is rounded after the same maximum is taken off
        p = Problem(np.random.default_rng(SEED), "fp32", B=2, Tq=70, Tk=30, heads=(4, 2), D=16, shift=shift)
        with Kernels("cpu", "fp32") as cpu, Kernels(DEVICE, "fp32") as k:
            results = [[op(with_inputs_bf16(each), p) for each in (cpu, k)] for op in (flash, naive)]
            p.q, p.k, p.v, p.do = (rounded(x, "bf16") for x in (p.q, p.k, p.v, p.do))
            p.solve()
            for expected, got in results:
                for x in ("o", "dq", "dk", "dv"):
                    p_and_ds = rel_l2(expected[x], getattr(p, x))  # the error that rounding these two leaves
                    assert 1e-4 < p_and_ds < 1e-2 and rel_l2(got[x], expected[x]) < p_and_ds / 20, x


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_rows_without_keys(precision):
    """No keys: o = 0, lse = −∞, no gradient. Two empty blocks merge to an empty one."""
    p = Problem(np.random.default_rng(SEED), precision, Tq=70, Tk=1, heads=(2, 1), D=64)
    with Kernels(DEVICE, precision) as k:
        t = Tensors(k, p)
        t.s.Tk = 0
        got = {**t.forward("flash_attention_forward"), **t.backward()}
        assert (got["o"] == 0).all() and (got["lse"] == -np.inf).all() and (got["dq"] == 0).all()
        assert np.isnan(got["dk"]).all()  # not a row to write
        lse, o = k.put(got["lse"], written=True), k.put(np.full((1, 70, t.s.o_stride), 7, np.float32), written=True)
        for _ in range(2):
            k.call("flash_attention_forward_block", o, lse, t.q, t.k_, t.v, t.s, None)
        assert (o.get() == 7).all() and (lse.get() == -np.inf).all()

        t.s.Tk = 1  # rows whose lse says that they saw nothing give nothing to keys that others see
        t.o, t.lse = k.floatX(np.ones((1, 70, t.s.o_stride))), lse
        assert all((x == 0).all() for x in t.backward().values())


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_same_bits(precision):
    p = Problem(np.random.default_rng(SEED), precision, B=2, Tq=66, Tk=66, heads=(4, 2), D=48, causal=True)
    for op in (flash, naive, lambda k, p: ring(k, p, chunks(66))):
        with Kernels(DEVICE, precision) as k:
            same_bits(k, lambda k: op(k, p))


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_flops(precision):
    """Pairs in the tiles that are visited, two operations a channel and product: 2 forward, 4 for dk and dv, 3 for dq."""
    rows, keys = (128, 64) if precision == "bf16" else (64, 64)
    for causal in (False, True):
        p = Problem(np.random.default_rng(SEED), precision, B=2, Tq=130, Tk=130, heads=(2, 1), D=16, causal=causal)
        with Kernels(DEVICE, precision) as k:
            before = k.flops.attention_forward, k.flops.attention_backward
            flash(k, p)
            starts = [range(0, 130, n) for n in (rows, keys)]
            by_query = sum((min(a + rows, 130) - a) * (min(a + rows, 130) if causal else 130) for a in starts[0])
            by_key = sum((min(a + keys, 130) - a) * (130 - a if causal else 130) for a in starts[1])
            assert k.flops.attention_forward - before[0] == 2 * 2 * 16 * 4 * by_query
            assert k.flops.attention_backward - before[1] == 2 * 16 * 4 * (3 * by_query + 4 * by_key)


# ---- small cases, for the mutants --------------------------------------------------------------------------------------
def small(op, **case):
    def run(k):
        p = Problem(np.random.default_rng(1), k.precision, **case)
        got = op(k, p)
        for x in got:
            bar = 2e-6 if x == "lse" else 1e-5 if k.precision == "fp32" else 3e-2
            assert rel_l2(got[x], getattr(p, x)) < bar, x
        return got

    return run


SMALL = [
    ("flash", small(flash, Tq=130, Tk=130, heads=(2, 1), D=64, causal=True)),
    ("flash, any alignment", small(flash, Tq=9, Tk=70, heads=(2, 1), D=20)),
    ("ring", small(lambda k, p: ring(k, p, chunks(70)), Tq=70, Tk=70, heads=(2, 1), D=72, causal=True)),
    ("ring, any alignment", small(lambda k, p: ring(k, p, blocks(9, 40, 17)), Tq=9, Tk=40, D=20)),
    *((name, small(lambda k, p, name=name: Tensors(k, p).forward(name), Tq=67, Tk=67, D=64, causal=True))
      for name in rungs("flash_attention_forward")[:-1]),
    ("naive", small(naive, Tq=17, Tk=17, heads=(3, 1), D=20, causal=True)),
]

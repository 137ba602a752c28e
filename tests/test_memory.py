"""Bytes: what the ledger counts while the program runs, what --dry-run predicts, and what the formulas say.

The formulas are written here again, from the table in train.h and from the papers, not taken from the program.
"""

import itertools
import json
import re
import statistics
import subprocess
import time
from collections import Counter

import numpy as np
import pytest

import reference
from conftest import build, close, covering, environment, label, run_program
from test_trace import rank_plan, stages_of

STATE = "weights gradients master optimizer whole_buckets tied_embedding".split()
CATEGORIES = [*STATE, *"activations dout logits communication workspace".split()]
GB, GIB = 1e9, 2**30
MODEL = dict(arch="gpt2", layers=3, hidden=32, heads=4, kv_heads=4, ffn=96, vocab=261, seq=24, tie=True, positions=64,
             tp=1, sp=False, pp=1, schedule="1f1b", v=1, accum=1, place=0)  # place: in the pipeline # fmt: skip
B = 3


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def dry_run(*flags, precision="fp32"):
    r = run_program(build(precision), ["--dry-run", "--json", *flags])
    assert r.code == 0 and not r.stderr, f"{r}"
    return json.loads(r.stdout)


def model(**changes):
    c = {**MODEL, **changes}
    if c["arch"] == "gpt2":
        c["tie"] = True
    return c


def flags(c, *more):
    out = ["--arch", c["arch"], "--seq", c["seq"], "--micro-batch", B, *(["--tie"] if c["tie"] else [])]
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        out += [f"--{name.replace('_', '-')}", c[name]]
    if c["tp"] > 1:
        out += ["--tp", c["tp"], *(["--sp"] if c["sp"] else [])]
    if c["pp"] > 1:
        out += ["--pp", c["pp"], "--schedule", c["schedule"], "--virtual-stages", c["v"], "--accum", c["accum"]]
    return [*out, *more]


# ---- parameters ----------------------------------------------------------------------------------------------------
def widths(c):
    """Of a tensor-parallel rank: channels of its query heads, of its key/value heads (one at least), and in its MLP."""
    D, t = c["hidden"] // c["heads"], c["tp"]
    return c["heads"] // t * D, max(c["kv_heads"] // t, 1) * D, c["ffn"] // t


def vocabulary(c):
    """Rows of a rank's slice, the largest of them, padded."""
    return -(-(-(-c["vocab"] // c["tp"])) // 64) * 64


def tensors(c, V):
    """Of the embedding, of each block and of the head: (elements, parts) of each tensor that a tp rank holds.

    parts names the ranks whose parts make up its gradient: "tp", where each has seen other rows; "kv", where each has
    seen other query heads of the same key/value heads; or None: each has all of it."""
    C, gpt2 = c["hidden"], c["arch"] == "gpt2"
    A, KV, F = widths(c)
    rows, kv = "tp" if c["sp"] else None, "kv" if c["tp"] > c["kv_heads"] else None

    def bias(n, parts):
        return [(n, parts)] if gpt2 else []

    norm = [(C, rows), *bias(C, rows)]
    attention = [(A * C, None), (2 * KV * C, kv), *bias(A, None), *bias(2 * KV, kv), (C * A, None), *bias(C, rows)]
    mlp = [((1 if gpt2 else 2) * F * C, None), *bias(F, None), (C * F, None), *bias(C, rows)]
    embedding = [(V * C, None), *([(c["positions"] * C, None)] if gpt2 else [])]
    head = [*norm, *([] if c["tie"] else [(V * C, None)])]
    return [embedding, *[[*norm, *attention, *norm, *mlp]] * c["layers"], head]


def size(unit):
    return sum(elements for elements, _ in unit)


def buckets(c, padded):
    """Elements of the embedding, of each block and of the head: those in a rank's memory, or the model's own."""
    return list(map(size, tensors(c, vocabulary(c)) if padded else tensors({**c, "tp": 1}, c["vocab"])))


PUBLISHED = {
    "gpt2-124M": 124_439_808,
    "gpt2-355M": 354_823_168,
    "gpt2-774M": 774_030_080,
    "gpt2-1558M": 1_557_611_200,
    "llama-0.5B": 489_288_960,  # the blog post's model
    "llama-1B": 1_235_814_400,  # Llama 3.2
    "llama-3B": 3_212_749_824,
    "llama-8B": 8_030_261_248,  # Llama 3
    "llama-70B": 70_553_706_496,
    "llama-405B": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_parameter_counts(preset):
    assert dry_run("--model", preset)["params"] == PUBLISHED[preset]


def test_gpt3():
    """Brown et al. 2020, table 2.1: 96 layers of 12,288 channels, "175 billion"."""
    shape = model(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=50257, positions=2048)
    got = dry_run("--model", "gpt3-175B")["params"]
    assert got == sum(buckets(shape, False)) and close(got, 175e9, 0.01)


SHAPES = [model(), model(kv_heads=2), model(arch="llama"), model(arch="llama", tie=False, kv_heads=1)]


@pytest.mark.parametrize("c", SHAPES, ids=lambda c: f"{c['arch']}-kv{c['kv_heads']}-tie{c['tie']}")
@pytest.mark.parametrize("precision, extra, per_parameter", [
    ("fp32", [], dict(weights=4, gradients=4, master=0, optimizer=8)),
    ("bf16", [], dict(weights=2, gradients=2, master=4, optimizer=8)),
    ("bf16", ["--grad-accum-fp32"], dict(weights=2, gradients=6, master=4, optimizer=8)),
    ("fp32", ["--grad-accum-fp32"], dict(weights=4, gradients=4, master=0, optimizer=8)),
    ("bf16", ["--lazy-optimizer"], dict(weights=2, gradients=2, master=4, optimizer=8)),
])  # fmt: skip
def test_bytes_a_parameter(c, precision, extra, per_parameter):
    """Mixed precision or not: 16 bytes, and 20 where bf16 gradients are summed in fp32."""
    out = dry_run(*flags(c, *extra), precision=precision)
    padded = sum(buckets(c, True))
    assert out["params"] == sum(buckets(c, False)) != padded
    want = {**per_parameter, "whole_buckets": 0, "tied_embedding": 0}
    assert {name: out["memory"][name] for name in STATE} == {k: n * padded for k, n in want.items()}
    assert sum(per_parameter.values()) == (20 if precision == "bf16" and "--grad-accum-fp32" in extra else 16)


# ---- ZeRO ----------------------------------------------------------------------------------------------------------
ODD = dict(layers=5, hidden=20, heads=2, kv_heads=2, ffn=97)
ZERO_SHAPES = {
    "gpt2": model(**ODD),
    "llama": model(**{**ODD, "kv_heads": 1}, arch="llama", tie=False),
    "tied llama": model(**ODD, arch="llama", tie=True),
}
BUCKET_MB = [0, 0.03, 0.06, 9]  # every block its own; …; all blocks and the head in one


def splits(c):
    """Does the schedule put W off?"""
    return c["pp"] > 1 and c["schedule"] in ("zb-h1", "zbv")


def chunks(c):
    """The units of each of this place's chunks: 0 the embedding, then the blocks, of which earlier stages have one more where
    they do not divide, then the head."""
    L, n = c["layers"], c["pp"] * c["v"]
    out = []
    for s in stages_of(c["schedule"], c["pp"], c["v"], c["place"]):
        first = s * (L // n) + min(s, L % n)
        blocks = range(1 + first, 1 + first + L // n + (s < L % n))
        out.append([*([0] if s == 0 else []), *blocks, *([L + 1] if s == n - 1 else [])])
    return out


def has(c, unit):
    return any(unit in chunk for chunk in chunks(c))


def holds_embedding(c):
    """As the first stage, or for the last one's tied head."""
    return has(c, 0) or (c["tie"] and has(c, c["layers"] + 1))


def grouped(c, X, megabytes):
    """The tensors of each bucket: from the back of each chunk, blocks join the head and each other, up to this many
    megabytes. Where W is put off, the head, which has none, stays alone."""
    units, out = tensors(c, vocabulary(c)), []
    head = c["layers"] + 1
    for chunk in chunks(c):
        together, last = [], None  # the unit behind
        for u in reversed(chunk):
            joins = u > 0 and last is not None and not (last == head and splits(c))
            if joins and size(units[u] + together[0]) * X <= megabytes * 1e6:
                together[0] = units[u] + together[0]
            else:
                together.insert(0, units[u])
            last = u
        out += together
    return [*([units[0]] if holds_embedding(c) and not has(c, 0) else []), *out]


def merged(c, X, megabytes):
    """Elements of each bucket."""
    return list(map(size, grouped(c, X, megabytes)))


def shard(n, ranks, rank):
    """Of n elements: lengths differ by one at most, the longer ones first."""
    return n // ranks + (rank < n % ranks)


def state(c, zero, ranks, rank=0, X=4, accum_fp32=False, megabytes=0):
    """Bytes of a rank's model state, X bytes a value."""
    all_buckets, mixed = merged(c, X, megabytes), X == 2
    whole, part = sum(all_buckets), sum(shard(n, ranks, rank) for n in all_buckets)
    fp32_sum = 4 if mixed and accum_fp32 else 0
    # The slots: buckets take turns, each slot is as large as the largest that stands in it.
    tied = all_buckets[0] if c["tie"] and holds_embedding(c) else 0
    sharing = [0 if i == 0 and tied else n for i, n in enumerate(all_buckets)]
    slots = max(sharing[0::2]) + max(sharing[1::2], default=0)
    in_use = (X + fp32_sum if zero >= 2 else 0) + (X if zero == 3 else 0)  # bytes an element, while it is whole
    return {
        "weights": X * (part if zero == 3 else whole),
        "gradients": (fp32_sum or X) * part if zero >= 2 else (X + fp32_sum) * whole,
        "master": 4 * mixed * (part if zero >= 1 else whole),
        "optimizer": 8 * (part if zero >= 1 else whole),
        "whole_buckets": in_use * slots,
        "tied_embedding": in_use * tied,
    }


def parts(c, zero, dp, rank, X, megabytes=0):
    """(group, elements) of each stretch of gradients that is summed over tp or kv once a step, on this rank of dp; or, where
    rank is None, as many as any shard could have."""
    out = []
    for bucket in grouped(c, X, megabytes):
        at, own, end = 0, 0, size(bucket)
        if zero and rank is not None:
            own = sum(shard(end, dp, r) for r in range(rank))
            end = own + shard(end, dp, rank)
        for over, stretch in itertools.groupby(bucket, key=lambda tensor: tensor[1]):
            begin, at = at, at + size(stretch)
            mine = min(at, end) - max(begin, own)
            if zero and rank is None:
                mine = min(mine, shard(size(bucket), dp, 0))
            if over and mine > 0:
                out.append((over, mine))
    return out


def staging(elements, ranks, X):
    """Of the ring, for what is smaller than its slices: two of the longest shard."""
    return 2 * -(-elements // ranks) * X if ranks > 1 else 0


def communication(c, zero, dp, X=4, accum_fp32=False, megabytes=0):
    """Bytes: the rows that --sp gathers, for two products at once, and what sums under way take in each group."""
    N, t, C, of_sums = B * c["seq"], c["tp"], c["hidden"], 4 if accum_fp32 else X
    summed = parts(c, zero, dp, None, X, megabytes)
    in_tp = [(N * C, X), (2 * N, 4), *((n, of_sums) for over, n in summed if over == "tp")]
    in_kv = [(0, X), *((n, of_sums) for over, n in summed if over == "kv")]
    return (
        2 * X * N * C * c["sp"]
        + staging(max(merged(c, X, megabytes)), dp, of_sums)
        + max(staging(n, t, x) for n, x in in_tp)
        + max(staging(n, max(t // c["kv_heads"], 1), x) for n, x in in_kv)
    )


def zero_flags(zero, accum_fp32=False, megabytes=0):
    return ["--zero", zero, "--bucket-mb", megabytes, *(["--grad-accum-fp32"] if accum_fp32 else [])]


@pytest.mark.parametrize("precision, accum_fp32", [("fp32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_held_by_zero_stage(zero, precision, accum_fp32):
    """Every term, of rank 0, which has the longest shards."""
    X = 4 if precision == "fp32" else 2
    axes = {"shape": list(ZERO_SHAPES), "ranks": [1, 2, 3, 8], "megabytes": BUCKET_MB}
    for x in covering(axes, seed=zero):
        c, ranks, megabytes = ZERO_SHAPES[x["shape"]], x["ranks"], x["megabytes"]
        run = flags(c, "--dp", ranks, *zero_flags(zero, accum_fp32, megabytes))
        memory = dry_run(*run, precision=precision)["memory"]
        want = state(c, zero, ranks, 0, X, accum_fp32, megabytes)
        assert {term: memory[term] for term in STATE} == want, label(x)
        assert memory["communication"] == communication(c, zero, ranks, X, accum_fp32 and X == 2, megabytes)


# Eight heads, for eight tp ranks: more than there are key/value heads. 104 / 8 is odd, and so are slices of 261.
EIGHTHS = dict(heads=8, kv_heads=8, hidden=24, ffn=104)
TP_SHAPES = {
    "gpt2": model(**EIGHTHS),
    "llama": model(**{**EIGHTHS, "hidden": 48, "kv_heads": 2}, arch="llama", tie=False),
    "tied llama": model(**{**EIGHTHS, "hidden": 48, "kv_heads": 4}, arch="llama"),
    "gpt2 of one k, v": model(**{**EIGHTHS, "kv_heads": 1}),
}


def test_bytes_held_by_tp():
    """Each matrix is held by slices, 1/tp of it on each rank; norms and biases of whole rows by all; and of key/value
    heads there is one at least. All of it is sharded over dp as without tp."""
    axes = {"shape": list(TP_SHAPES), "tp": [1, 2, 4, 8], "sp": [False, True], "zero": [0, 1, 2, 3], "dp": [1, 2, 3],
            "precision": ["fp32", "bf16"], "accum_fp32": [False, True], "megabytes": [0, 0.03, 9]}  # fmt: skip
    for x in covering(axes, legal=lambda x: x["tp"] > 1 or not x["sp"]):
        c = {**TP_SHAPES[x["shape"]], "tp": x["tp"], "sp": x["sp"]}
        accum_fp32, X = x["accum_fp32"] and x["precision"] == "bf16", 4 if x["precision"] == "fp32" else 2
        run = flags(c, "--dp", x["dp"], *zero_flags(x["zero"], x["accum_fp32"], x["megabytes"]))
        said = dry_run(*run, precision=x["precision"])
        assert (said["tp"], said["sp"], said["world"]) == (x["tp"], x["sp"], x["tp"] * x["dp"])
        assert said["params"] == sum(buckets(c, False))
        want = state(c, x["zero"], x["dp"], 0, X, accum_fp32, x["megabytes"])
        want["communication"] = communication(c, x["zero"], x["dp"], X, accum_fp32, x["megabytes"])
        assert {name: said["memory"][name] for name in want} == want, label(x)


def test_bytes_of_slices_by_hand():
    """One case in numbers: a llama of 2 key/value heads on 8 ranks, each with one query head and one of the two."""
    c = {**TP_SHAPES["llama"], "tp": 8}
    block = 6 * 48 + 2 * 6 * 48 + 48 * 6 + 3 * 13 * 48 + 2 * 48  # q, k and v, out, MLP, norms
    whole = 48 * 48 + 2 * 12 * 48 + 48 * 48 + 3 * 104 * 48 + 2 * 48
    assert buckets(c, True) == [64 * 48, block, block, block, 48 + 64 * 48]  # 33 tokens, or 32, in 64 rows
    assert sum(buckets(c, False)) == 2 * 261 * 48 + 3 * whole + 48


def test_the_shapes_are_awkward():
    """What the tests of ZeRO stand on: shards that differ in length, and buckets of one, several and all blocks."""
    for c in ZERO_SHAPES.values():
        # Llama's channels come in pairs, so two ranks always share evenly.
        assert all(any(n % ranks for n in buckets(c, True)) for ranks in ((2, 3, 8) if c["arch"] == "gpt2" else (3, 8)))
        for X in (4, 2):
            n_buckets = [len(merged(c, X, megabytes)) for megabytes in BUCKET_MB]
            assert n_buckets[0] == 7 and n_buckets[-1] == 2 and len(set(n_buckets)) >= 3, n_buckets


# The playbook's table, decimal GB: billions of parameters, bf16 without and with fp32 accumulation of gradients; and
# 7 billion on 8 ranks by stage.
@pytest.mark.parametrize("preset, billions, plain, accumulated", [
    ("llama-1B", 1, 16, 20), ("llama-8B", 7, 112, 140), ("llama-70B", 70, 1120, 1400), ("llama-405B", 405, 6480, 8100),
])  # fmt: skip
def test_table_of_zero_stages(preset, billions, plain, accumulated):
    def totals(*more, precision="bf16"):
        """As if the preset had this many parameters: each entry of the table is a multiple of them."""
        out = dry_run("--model", preset, *more, precision=precision)
        assert [row["stage"] for row in out["zero_table"]] == [0, 1, 2, 3]
        for row in out["zero_table"]:
            assert row["total"] == row["weights"] + row["gradients"] + row["optimizer"]
        return [row["total"] / out["params"] * billions for row in out["zero_table"]]

    assert all(close(x, plain, 1e-12) for x in totals())
    assert all(close(x, accumulated, 1e-12) for x in totals("--grad-accum-fp32"))
    assert all(close(x, plain, 1e-12) for x in totals(precision="fp32"))  # 4 + 4 + 8
    by_stage = [share / 7 * billions for share in (112, 38.5, 26.25, 14)]
    assert all(map(close, totals("--dp", 8), by_stage, [1e-12] * 4))
    # 4 bytes more for the sum, sharded with the gradients; in an fp32 build it is what the gradients are.
    more = [4 * billions / (8 if stage >= 2 else 1) for stage in range(4)]
    assert all(map(close, totals("--dp", 8, "--grad-accum-fp32"), map(sum, zip(by_stage, more)), [1e-12] * 4))
    fp32 = [billions * x for x in (16, 4 + 4 + 1, 4 + 0.5 + 1, 0.5 + 0.5 + 1)]
    assert all(map(close, totals("--dp", 8, "--grad-accum-fp32", precision="fp32"), fp32, [1e-12] * 4))


def test_table_of_zero_stages_in_words():
    """The same table, printed: this run's stage is marked, and what the table leaves out is said."""
    out = run_program(build("bf16"), "--dry-run --model llama-8B --dp 8 --zero 2".split()).stdout
    rows = re.findall(r"^  --zero (\d)((?: +\d+\.\d+){5})(  <- this run)?$", out, re.M)
    table = dry_run(*"--model llama-8B --dp 8 --zero 2".split(), precision="bf16")["zero_table"]
    assert [(stage, bool(mark)) for stage, _, mark in rows] == [("0", False), ("1", False), ("2", True), ("3", False)]
    for (_, numbers, _), row in zip(rows, table):
        want = [row[k] / GB for k in ("weights", "gradients", "optimizer", "total")] + [row["total"] / GIB]
        assert all(abs(float(x) - y) <= 1e-6 for x, y in zip(numbers.split(), want)), out
    assert "2 + 2 + 12 bytes a parameter" in out and "without padding, whole buckets in use" in out


# The playbook's chart, GiB: 8B on 8 ranks, weights, gradients and moments (8 bytes; masters have their own row).
@pytest.mark.parametrize("zero, weights, gradients, optimizer", [
    (0, 15, 15, 60), (1, 15, 15, 7.5), (2, 15, 1.875, 7.5), (3, 1.875, 1.875, 7.5),
])  # fmt: skip
def test_chart_of_zero_stages(zero, weights, gradients, optimizer):
    memory = dry_run("--model", "llama-8B", "--dp", 8, "--zero", zero, precision="bf16")["memory"]
    for name, figure in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
        assert close(memory[name] / GIB, figure, 0.01), (name, memory[name] / GIB, figure)
    assert close(memory["master"], memory["optimizer"] / 2, 1e-3)


# ---- bytes sent ----------------------------------------------------------------------------------------------------
def elements_sent(c, zero, accum, X=4, megabytes=0):
    """Elements of gradients and of weights that a rank sends a step, × (N − 1)/N."""
    all_buckets = merged(c, X, megabytes)
    psi, last = sum(all_buckets), len(all_buckets) - 1
    if zero == 0:
        return 2 * psi, 0
    if zero < 3:
        return (accum if zero == 2 else 1) * psi, psi  # the new weights, once
    still_whole = sum(all_buckets[i] for i in {0, last - 1, last})  # or, the first, not read by its backward
    return accum * psi, accum * (2 * psi - still_whole)


def bytes_sent(c, zero, accum, precision, accum_fp32=False, megabytes=0):
    X = 4 if precision == "fp32" else 2
    gradients, weights = elements_sent(c, zero, accum, X, megabytes)
    return gradients * (4 if accum_fp32 else X), weights * X


def test_bytes_sent_a_step():
    """By stage, as --dry-run says. With one micro-batch, ZeRO-1 and -2 send what DDP does, ZeRO-3 at most 3/2 of it."""
    axes = {"shape": list(ZERO_SHAPES), "zero": [0, 1, 2, 3], "accum": [1, 2, 5], "dp": [1, 2, 3, 8], "mb": BUCKET_MB}
    for precision, accum_fp32 in (("fp32", False), ("bf16", False), ("bf16", True)):
        for x in covering(axes):
            c, zero, accum, dp, megabytes = ZERO_SHAPES[x["shape"]], x["zero"], x["accum"], x["dp"], x["mb"]
            run = flags(c, "--accum", accum, "--dp", dp, *zero_flags(zero, accum_fp32, megabytes))
            sent = dry_run(*run, precision=precision)["sent_per_step"]
            want = sum(bytes_sent(c, zero, accum, precision, accum_fp32, megabytes)) * (dp - 1) / dp
            assert close(sent, want, 1e-12), label(x)
    ddp, *zero = (dry_run(*"--model llama-70B --dp 64 --zero".split(), z)["sent_per_step"] for z in range(4))
    assert zero[:2] == [ddp] * 2 and 1.4 * ddp < zero[2] < 1.5 * ddp


ONCE_A_STEP = 8 + 16  # doubles, over all ranks: the gradient's norm; the loss, and whether to stop


def two_steps(train, run, ranks, precision, by=("group", "op")):
    """The longer of two runs, by two steps; then bytes, and calls, of a step by (group, operation), of all ranks."""

    def totals(steps):
        r, sent, calls = train(*run, "--steps", steps, ranks=ranks, precision=precision), Counter(), Counter()
        for row in r.one("end")["comm"]:
            key = tuple(row[name] for name in by)
            sent[key] += row["bytes"]
            calls[key] += row["calls"]
        return r, sent, calls

    (_, *short), (r, *long) = totals(1), totals(3)
    counted = [Counter({k: (n - less[k]) / 2 for k, n in more.items()}) for more, less in zip(long, short)]
    return r, *counted


@pytest.mark.parametrize("x", covering({
    "zero": [0, 1, 2, 3],
    "accum": [1, 2, 5],
    "ranks": [2, 3, 4],
    "shape": list(ZERO_SHAPES),
    "precision": ["fp32", "bf16"],
    "accum_fp32": [False, True],
    "megabytes": [0, 0.06, 9],
    "overlap": [True, False],
}) + [{  # whose embedding's weights a backward must not gather
    "zero": 3, "accum": 2, "ranks": 2, "shape": "llama", "precision": "fp32", "accum_fp32": False, "megabytes": 0,
    "overlap": True,
}], ids=label)  # fmt: skip
def test_bytes_sent_are_counted(x, train, text):
    """What all ranks together send in a step, by operation, to the byte."""
    c, ranks = ZERO_SHAPES[x["shape"]], x["ranks"]
    run = flags(c, "--data", text, "--accum", x["accum"], "--eval-batches", 1, "--peak-tflops", 1,
                *zero_flags(x["zero"], x["accum_fp32"], x["megabytes"]))  # fmt: skip
    run += [] if x["overlap"] else ["--no-overlap"]

    _, sent, _ = two_steps(train, run, ranks, x["precision"])
    gradients, weights = bytes_sent(c, x["zero"], x["accum"], x["precision"],
                                    x["accum_fp32"] and x["precision"] == "bf16", x["megabytes"])  # fmt: skip
    assert sent["dp", "all_reduce"] == (ranks - 1) * (gradients if x["zero"] == 0 else 0)
    assert sent["dp", "reduce_scatter"] == (ranks - 1) * (gradients if x["zero"] > 0 else 0)
    assert sent["dp", "all_gather"] == (ranks - 1) * weights
    assert sent["world", "all_reduce"] == 2 * (ranks - 1) * ONCE_A_STEP
    said = dry_run(*run, "--dp", ranks, precision=x["precision"])
    assert said["sent_per_step"] == said["sent_over_dp"] and said["sent_over_tp"] == 0
    assert close(said["sent_per_step"] * ranks, sum(n for (group, _), n in sent.items() if group == "dp"), 1e-12)


def sent_over_tp(c, dp, x, X, accum_fp32):
    """Bytes, and calls, of a step by (group, operation), of all ranks together.

    Of rows [N, C], in units of a reduce-scatter or an all-gather, a micro-batch has, for embedding, block and head:
        without --sp   F 2 (one all-reduce), 4, 0       I 0, 4, 2
        with --sp      F 1, 4, 1                        I 1, 4, 1, and 0, 2, 1 that W gathers again
    then one all-reduce of the largest logit of each row, and one of two sums. Not a logit."""
    t, N, L = c["tp"], B * c["seq"], c["layers"]
    forwards = 2 if x["recompute"] == "full" else 1
    each = (forwards + 1) * 2 * L
    rows = {"reduce_scatter": each + 2, "all_gather": each + 2 * L + 3} if c["sp"] else {"all_reduce": each + 2}
    sent, calls = Counter(), Counter()

    def add(over, op, n, ranks, groups, times=1):
        """n bytes, in groups of so many ranks."""
        ways = 2 if op.startswith("all_reduce") else 1
        sent[over, op] += times * groups * ways * (ranks - 1) * n
        calls[over, op] += times * groups * ranks

    for op, times in rows.items():
        add("tp", op, N * c["hidden"] * X, t, dp, times * x["accum"])
    add("tp", "all_reduce_max", 4 * N, t, dp, x["accum"])
    add("tp", "all_reduce", 2 * 4 * N, t, dp, x["accum"])
    for rank in range(dp):  # once a step
        for over, n in parts(c, x["zero"], dp, rank, X, x["megabytes"]):
            ranks = t if over == "tp" else t // c["kv_heads"]
            add(over, "all_reduce", n * (4 if accum_fp32 else X), ranks, t // ranks)
    return sent, calls


TP_RUNS = [{
    "shape": "gpt2", "dp": 1, "tp": 4, "sp": False, "zero": 0, "accum": 2, "megabytes": 0, "precision": "fp32",
    "accum_fp32": False, "recompute": "none", "attention": "naive",
}, {
    "shape": "gpt2", "dp": 2, "tp": 2, "sp": True, "zero": 1, "accum": 1, "megabytes": 0.03, "precision": "bf16",
    "accum_fp32": True, "recompute": "full", "attention": "naive",
}, {  # two key/value heads, each on two ranks
    "shape": "llama", "dp": 1, "tp": 4, "sp": True, "zero": 0, "accum": 2, "megabytes": 0, "precision": "bf16",
    "accum_fp32": True, "recompute": "none", "attention": "flash",
}, {
    "shape": "gpt2 of one k, v", "dp": 2, "tp": 2, "sp": False, "zero": 2, "accum": 2, "megabytes": 9,
    "precision": "fp32", "accum_fp32": False, "recompute": "selective", "attention": "naive",
}, {
    "shape": "tied llama", "dp": 2, "tp": 2, "sp": True, "zero": 3, "accum": 1, "megabytes": 0, "precision": "bf16",
    "accum_fp32": False, "recompute": "full", "attention": "flash",
}]  # fmt: skip


@pytest.mark.parametrize("x", TP_RUNS, ids=label)
def test_tensor_parallel_runs(x, train, text):
    """What is sent over tp, and over dp beside it, what every rank holds; and --dry-run and --explain say the same."""
    c = {**TP_SHAPES[x["shape"]], "tp": x["tp"], "sp": x["sp"]}
    dp, world, X, accum_fp32 = x["dp"], x["dp"] * x["tp"], 4 if x["precision"] == "fp32" else 2, x["accum_fp32"]
    run = flags(c, "--data", text, "--accum", x["accum"], "--eval-batches", 1, "--peak-tflops", 1)
    run += ["--recompute", x["recompute"], "--attention", x["attention"]]
    run += zero_flags(x["zero"], accum_fp32, x["megabytes"])
    r, sent, calls = two_steps(train, run, world, x["precision"])
    want, want_calls = sent_over_tp(c, dp, x, X, accum_fp32)
    within = [over for over in ("tp", "kv") if any(over == group for group, _ in want)]
    assert Counter({k: n for k, n in sent.items() if k[0] in within}) == want
    assert Counter({k: n for k, n in calls.items() if k[0] in within}) == want_calls
    assert sent["world", "all_reduce"] == 2 * (world - 1) * ONCE_A_STEP
    data_parallel = sum(bytes_sent(c, x["zero"], x["accum"], x["precision"], accum_fp32, x["megabytes"]))
    assert sum(n for (group, _), n in sent.items() if group == "dp") == (dp - 1) * x["tp"] * data_parallel

    said = dry_run(*run, "--dp", dp, precision=x["precision"])
    assert close(said["sent_over_tp"] * world, sum(want.values()), 1e-12)
    assert close(said["sent_over_dp"] * dp, (dp - 1) * data_parallel, 1e-12)
    assert close(said["sent_per_step"], said["sent_over_dp"] + said["sent_over_tp"], 1e-12)
    wider = dry_run(*flags({**c, "vocab": 5000}), *run[len(flags(c)) :], "--dp", dp, precision=x["precision"])
    assert wider["sent_over_tp"] == said["sent_over_tp"], "of --vocab"
    explained = run_program(build(x["precision"]), [*run, "--explain"], world).stdout
    assert close(explained_over_tp(explained, c, dp, x), said["sent_over_tp"], 1e-12), explained

    check_memory(r, said, c, x["zero"], dp, X, accum_fp32, x["megabytes"])


def explained_over_tp(out, c, dp, x):
    """Bytes that a rank sends over tp in a step: the messages that --explain lists, as often as it says, added up."""
    micro_batch, once, times = 0, 0, 0
    rows = r"    (all-reduce|reduce-scatter|all-gather) +of rows, .* {2}(2 · )?(\d+) pieces? of (\d+) bytes$"
    loss = r"    all-reduce \(maximum\), then all-reduce, of (\d+) and of (\d+) bytes: no logits"
    t, messages = c["tp"], out.split("messages in a tp group")[1].split("messages of a step")[0]
    for line in messages.splitlines():
        if unit := re.match(r"  [FB] of (each block|the embedding|the head)(, and again before its backward)?$", line):
            times = (c["layers"] if unit[1] == "each block" else 1) * (2 if unit[2] else 1)
        if sent := re.match(rows, line):
            assert (sent[1] == "all-reduce") == bool(sent[2]) == (not c["sp"])
            micro_batch += times * (2 if sent[2] else 1) * int(sent[3]) * int(sent[4])
        if sent := re.match(loss, line):
            micro_batch += 2 * (t - 1) / t * (int(sent[1]) + int(sent[2]))
    for group, n in re.findall(r"^    all-reduce over (tp|kv)\b.* of (\d+) bytes of", out, re.M):
        holders = t if group == "tp" else t // c["kv_heads"]
        once += 2 * (holders - 1) / holders * int(n) / (dp if x["zero"] else 1)
    assert (once > 0) == (" +\n" in out)
    return x["accum"] * micro_batch + once


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_no_evaluation_sends_what_is_said(zero, precision, train, text, tmp_path):
    """Nothing to evaluate: no forward follows the last step. Its weights still arrive, and are counted, with the first ones."""
    (tmp_path / "short").write_bytes(text.read_bytes()[:230])  # too short to hold out a tenth
    c, ranks, steps = ZERO_SHAPES["gpt2"], 3, 3
    r = train(*flags(c), "--data", tmp_path / "short", "--zero", zero, "--steps", steps, "--peak-tflops", 1,
              ranks=ranks, precision=precision)  # fmt: skip
    assert "no evaluation" in r.stdout
    gathered = sum(x["bytes"] for x in r.one("end")["comm"] if x["group"] == "dp" and x["op"] == "all_gather")
    times = steps + (1 if zero in (1, 2) else 0)  # the initial weights, too
    assert gathered == times * (ranks - 1) * bytes_sent(c, zero, 1, precision)[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_messages_as_explained(zero, precision, text):
    """--explain lists every collective of a step: its pieces add up to what the formulas say."""
    c = model(arch="llama", layers=5, tie=False)  # every bucket divides by 4
    run = flags(c, "--data", text, "--accum", 3, *zero_flags(zero, accum_fp32=True))
    out = run_program(build(precision), [*run, "--explain"], 4).stdout
    total, times = 0, 1
    for line in out.split("messages of a step")[1].splitlines():
        if re.match(r"  in (the|its) .*(micro-batch|backward)", line):
            times = 3 if zero >= 2 else 1
            assert ("of the last micro-batch," in line) == (zero < 2)
        elif line.startswith("  after"):
            times = 1
        found = re.match(r"    (?:all-reduce|all-gather|reduce-scatter) of (.+?) +(2 · )?3 pieces of (\d+) bytes", line)
        if found:
            blocks = re.fullmatch(r"block (\d) to block (\d), each", found[1])
            n = abs(int(blocks[1]) - int(blocks[2])) + 1 if blocks else 1
            total += times * n * (2 if found[2] else 1) * 3 * int(found[3])
    assert total == sum(bytes_sent(c, zero, 3, precision, accum_fp32=True)) * 3 / 4, out
    if zero == 3:
        assert "not gathered for the backward: block 4 and head (still whole), embedding (its backward reads" in out
    n = buckets(c, True)[1] // 4
    for rank in range(4):
        held = f"shard of block 0: elements {rank * n} to {(rank + 1) * n - 1}"
        assert bool(re.search(rf"^  rank {rank}: .*{held}$", out, re.M)) == (zero > 0), out


# ---- activations ---------------------------------------------------------------------------------------------------
def most_blocks(c):
    """Of a chunk."""
    return max(sum(0 < u <= c["layers"] for u in chunk) for chunk in chunks(c))


def peaks(c):
    """The most micro-batches at a time, counted by chunk: between F and the end of W; between I and the end of W; and of the
    last stage, where this place has it, between F and I."""
    p, v, m, r = c["pp"], c["v"], c["accum"], c["place"]
    if p == 1:
        return 1, 1, 1
    in_flight = {"afab": m, "1f1b": min(p - r, m), "interleaved": min(2 * (p - r - 1) + (v - 1) * p + 1, m * v),
                 "zb-h1": p, "zbv": 2 * p}  # fmt: skip
    waiting = {"zb-h1": r + 1, "zbv": 2 * r + 1}
    heads = (m if c["schedule"] == "afab" else 1) * has(c, c["layers"] + 1)
    return in_flight[c["schedule"]], waiting.get(c["schedule"], 1), heads


def activations(c, X, recompute, attention):
    """The table of train.h, term by term; X bytes a value. What is shared between blocks is counted once."""
    T, C, t = c["seq"], c["hidden"], c["tp"]
    N, (A, KV, F), gpt2 = B * T, widths(c), c["arch"] == "gpt2"
    R = N // t if c["sp"] else N  # rows of the residual stream
    norm = 4 * R * (2 if gpt2 else 1)  # mean and rstd, or rstd: fp32, one a token
    x = X * R * C
    H = c["heads"] // t
    inner = {
        "norm1": norm, "h1": x, "qkv": X * N * (A + 2 * KV), "lse": 4 * N * H * (attention == "flash"),
        "o": X * N * A, "x_mid": x, "norm2": norm, "h2": x,
        "up": X * N * F * (1 if gpt2 else 2), "act": X * N * F,
    }  # fmt: skip
    probs = X * N * H * T * (attention == "naive")
    in_flight, waiting, heads = peaks(c)
    blocks, head = most_blocks(c), heads * (norm + x + x)
    kept = in_flight * blocks
    if recompute == "full":  # W that is put off needs what its I has computed again
        rebuilt = 1 + (waiting * blocks if splits(c) else 0)
        return kept * x + rebuilt * sum(inner.values()) + probs + head
    return kept * (x + sum(inner.values())) + (1 if recompute == "selective" else kept) * probs + head


def output_gradients(c, X):
    """Of down for two blocks at once, of up, out and qkv, and sums for two norms' vectors, for one: in GPT-2 9 C a token, and
    once more C. Where W is put off, all of that for each block that waits. And of the embedding."""
    N, C, (A, KV, F) = B * c["seq"], c["hidden"], widths(c)
    R, U = N // c["tp"] if c["sp"] else N, F if c["arch"] == "gpt2" else 2 * F
    x, block = R * C, R * C + N * U + N * (A + 2 * KV) + 4 * C
    if splits(c):
        return X * (peaks(c)[1] * most_blocks(c) * (x + block) + x * has(c, 0))
    return X * ((2 if most_blocks(c) > 1 or has(c, 0) else 1) * x + block)


def logits(c, X):
    """Of this rank's padded slice; of each row, the largest here and of all, two sums, and the loss. Where the head is."""
    N, heads = B * c["seq"], peaks(c)[2]
    return X * heads * N * vocabulary(c) + 5 * 4 * N * (heads > 0)


def check_activations(c, recompute, attention, precision):
    X = 4 if precision == "fp32" else 2
    memory = dry_run(*flags(c, "--recompute", recompute, "--attention", attention), precision=precision)["memory"]
    N, C, (_, _, F) = B * c["seq"], c["hidden"], widths(c)
    assert memory["activations"] == activations(c, X, recompute, attention)
    assert memory["dout"] == output_gradients(c, X)
    assert memory["logits"] == logits(c, X)
    assert memory["communication"] == communication(c, 0, 1, X=X)
    # Working memory is not of the tables; it is not a second set of activations either.
    assert X * N * (C + F) <= memory["workspace"]
    assert memory["peak"] == sum(memory[name] for name in CATEGORIES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["flash", "naive"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("arch, kv_heads", [("gpt2", 4), ("gpt2", 2), ("llama", 4), ("llama", 1)])
def test_activations(arch, kv_heads, recompute, attention, precision):
    check_activations(model(arch=arch, kv_heads=kv_heads), recompute, attention, precision)


def test_activations_of_a_tp_rank():
    for x in covering({
        "shape": [("gpt2", 8), ("gpt2", 2), ("llama", 4), ("llama", 1)], "tp": [2, 4, 8], "sp": [False, True],
        "recompute": ["none", "selective", "full"], "attention": ["flash", "naive"], "precision": ["fp32", "bf16"],
    }):  # fmt: skip
        (arch, kv_heads), tp, sp, *others = x.values()
        check_activations(model(arch=arch, heads=8, kv_heads=kv_heads, tp=tp, sp=sp), *others)


def test_bytes_a_token_and_channel():
    """In the words of train.h: 8 + (8 + 4f)/t for gpt2, 8 + (4 + 4g + 6f)/t for llama, with --sp 8/t, too; bf16, and
    statistics beside it. Where t exceeds the key/value heads, g/t is one head."""
    layouts = (1, False), (2, False), (2, True), (8, False), (8, True)
    for arch, (t, sp) in itertools.product(("gpt2", "llama"), layouts):
        c = model(arch=arch, heads=8, kv_heads=4 if arch == "llama" else 8, tp=t, sp=sp)
        one, two = (dry_run(*flags({**c, "layers": L}), precision="bf16")["memory"]["activations"] for L in (1, 2))
        N, rows, f, g_over_t = B * c["seq"], t if sp else 1, 3, max(0.5 / t, 1 / 8)
        want = 8 / rows + ((8 + 4 * f) / t if arch == "gpt2" else (4 + 6 * f) / t + 4 * g_over_t)
        stats = 4 * N * ((4 if arch == "gpt2" else 2) / rows + 8 / t)  # of the norms, and lse of 8 heads
        assert two - one == want * N * c["hidden"] + stats


def test_recomputation_saves_what_it_says():
    """Naive attention: selective leaves one matrix, full leaves x of each block and one block's inside."""
    c = model(layers=10, seq=48)
    held = {r: dry_run(*flags(c, "--attention", "naive", "--recompute", r))["memory"]["activations"]
            for r in ("none", "selective", "full")}  # fmt: skip
    assert held["none"] - held["selective"] == 9 * 4 * B * 4 * 48 * 48
    assert held["full"] < 0.25 * held["selective"]


def test_flops_done_again():
    """What full recomputation does again: a forward of all blocks, whichever buckets they lie in."""
    c = ZERO_SHAPES["llama"]
    want = 2 * sum(buckets(c, False)[1:-1]) + 4 * c["layers"] * c["hidden"] * c["seq"]
    for megabytes in BUCKET_MB:
        run = ["--dry-run", *flags(c, "--recompute", "full", "--bucket-mb", megabytes)]
        (gigaflop,) = re.findall(r"recomputed beside it (\S+)", run_program(build(), run).stdout)
        assert close(float(gigaflop), want / GB, 0.01), megabytes


# ---- predicted and measured ----------------------------------------------------------------------------------------
def check_memory(r, said, c, zero, dp, X, accum_fp32, megabytes):
    """What every rank held in the end is what was predicted, in each category, but for what belongs to its shards."""
    tp = c["tp"]
    assert r.one("start")["predicted"] == said["memory"]
    rows = r.one("end")["memory"]
    assert [row.pop("rank") for row in rows] == list(range(dp * tp))
    for rank, row in enumerate(rows):
        live, predicted = row.pop("live"), row.pop("predicted")
        assert predicted == row, f"rank {rank} itself"
        want = {**said["memory"], **state(c, zero, dp, rank // tp, X, accum_fp32, megabytes)}
        want["peak"] = sum(want[name] for name in CATEGORIES)
        assert row == want, f"rank {rank}"
        assert rank > 0 or row == said["memory"]
        assert list(live) == list(row) and all(live[name] <= row[name] for name in row), f"rank {rank}: {live}\n{row}"
        for name in ("weights", "gradients", "master", "optimizer", "tied_embedding"):
            assert live[name] == row[name], name
        assert (live["whole_buckets"] > 0) == (zero >= 2) and live["activations"] > 0
        assert live["peak"] < row["peak"]  # the logits have gone when all output gradients are there


@pytest.mark.parametrize("x", covering({
    "shape": list(ZERO_SHAPES),
    "ranks": [1, 2, 3],
    "zero": [0, 1, 2, 3],
    "megabytes": [0, 0.06],
    "precision": ["fp32", "bf16"],
    "recompute": ["none", "selective", "full"],
    "attention": ["flash", "naive"],
    "option": ["--seed 1", "--lazy-optimizer", "--grad-accum-fp32"],
}), ids=label)  # fmt: skip
def test_predicted_is_measured(x, train, text):
    """--dry-run, the run's own prediction, and what every rank held in the end: the same bytes in each category, but
    for shards, of which the first ranks have the longer ones. No more is ever live than is held."""
    c, ranks, accum_fp32 = ZERO_SHAPES[x["shape"]], x["ranks"], x["option"] == "--grad-accum-fp32"
    run = flags(c, "--recompute", x["recompute"], "--attention", x["attention"], *x["option"].split())
    run += ["--zero", x["zero"], "--bucket-mb", x["megabytes"]]
    run += ["--data", text, "--steps", 2, "--accum", 2, "--sample", 3, "--peak-tflops", 1]
    r = train(*run, ranks=ranks, precision=x["precision"])
    said = dry_run(*run, "--dp", ranks, precision=x["precision"])
    assert r.one("start")["zero"] == said["zero"] == x["zero"]
    assert (said["memory"]["communication"] > 0) == (ranks > 1)
    check_memory(r, said, c, x["zero"], ranks, 4 if x["precision"] == "fp32" else 2, accum_fp32, x["megabytes"])

    table = dict(re.findall(r"^  (\w+) +\d+\.\d+ +(\d+\.\d+)$", r.stdout, re.M))
    assert list(table) == [*CATEGORIES, "total"]
    for name in CATEGORIES:
        assert table[name] == f"{said['memory'][name] / GB:.6f}"


PIPELINES = [{  # c: what is not as in MODEL
    "c": dict(pp=2, schedule="afab", accum=3), "dp": 1, "zero": 0,
}, {
    "c": dict(pp=3, accum=5, layers=5, arch="llama", kv_heads=2, tie=False), "dp": 1, "zero": 1, "precision": "bf16",
    "recompute": "full",
}, {  # fewer micro-batches than stages
    "c": dict(pp=4, accum=2, layers=6), "dp": 1, "zero": 0,
}, {
    "c": dict(pp=2, accum=3, layers=5), "dp": 2, "zero": 3, "megabytes": 0.04,
}, {
    "c": dict(pp=2, schedule="interleaved", v=2, accum=4, layers=5, tp=2, sp=True), "dp": 1, "zero": 0, "precision": "bf16",
    "accum_fp32": True, "recompute": "selective", "attention": "naive",
}, {
    "c": dict(pp=3, schedule="interleaved", v=3, accum=3, layers=10, arch="llama"), "dp": 1, "zero": 0,
}, {
    "c": dict(pp=4, schedule="zb-h1", accum=5, layers=6), "dp": 1, "zero": 0, "recompute": "full",
}, {
    "c": dict(pp=2, schedule="zb-h1", accum=3, arch="llama", tie=False), "dp": 2, "zero": 2, "precision": "bf16",
    "megabytes": 9, "attention": "naive",
}, {
    "c": dict(pp=2, schedule="zbv", v=2, accum=3, layers=6), "dp": 2, "zero": 3, "precision": "bf16", "accum_fp32": True,
    "megabytes": 9, "attention": "naive",
}, {
    "c": dict(pp=3, schedule="zbv", v=2, accum=6, layers=7, arch="llama"), "dp": 1, "zero": 0, "recompute": "full",
}, {  # without --sp every tp rank sends all rows
    "c": dict(pp=2, schedule="zb-h1", accum=2, tp=2), "dp": 1, "zero": 1,
}]  # fmt: skip
PIPELINE = dict(megabytes=0, precision="fp32", accum_fp32=False, recompute="none", attention="flash")


def channels(c):
    """Bytes that each of a place's channels has sent, and messages that went through it, in a step."""
    n, turn = c["pp"] * c["v"], c["pp"] if c["schedule"] == "zbv" else None  # the stage that has the one before it here
    message = B * c["seq"] // (c["tp"] if c["sp"] else 1) * c["hidden"]
    out = {}
    for s in stages_of(c["schedule"], c["pp"], c["v"], c["place"]):
        if s + 1 < n and s + 1 != turn:
            out[f"F to stage {s + 1}"], out[f"I to stage {s}"] = message, 0
        if s > 0 and s != turn:
            out[f"F to stage {s}"], out[f"I to stage {s - 1}"] = 0, message
    return {name: c["accum"] * items for name, items in out.items()}


def gathers(c, X, megabytes):
    """How often ZeRO-3 gathers each bucket's weights in a step: F and I read them, unless they are whole from before. What is
    gathered takes the slot of every second bucket; beside a pass of a unit comes the next bucket of the chunk; and I lets go
    of its own. A tied embedding has a place of its own, and the head reads it, too."""
    all_buckets, last = merged(c, X, megabytes), c["layers"] + 1
    units = [size(unit) for unit in tensors(c, vocabulary(c))]
    tied, copy = c["tie"] and holds_embedding(c), holds_embedding(c) and not has(c, 0)
    bucket, first, place = {}, {}, int(copy)  # of a unit its bucket, of a bucket its first unit
    for chunk in chunks(c):
        left = all_buckets[place]
        for u in chunk:
            if left == 0:
                place, left = place + 1, all_buckets[place + 1]
            bucket[u], left = place, left - units[u]
            first.setdefault(place, u)
        place += 1
    whole, count = set(), [0] * len(all_buckets)

    def slot(i):
        return "own" if i == 0 and tied else i % 2

    def gather(i):
        nonlocal whole
        count[i] += i not in whole
        whole = {j for j in whole if slot(j) != slot(i)} | {i}

    for letter, k, _ in rank_plan(c["schedule"], c["pp"], c["v"], c["accum"], c["place"]):
        chunk = chunks(c)[k]
        for u in {"F": chunk, "W": []}.get(letter, chunk[::-1]):
            i, forward = bucket[u], letter == "F"
            if forward or u > 0:  # the embedding's I reads nothing
                if tied and u == last:
                    gather(0)
                gather(i)
                following = i + 1 if forward else i - 1
                if first.get(following) in chunk and (forward or first[following] > 0):
                    gather(following)
            if not forward and u == first[i]:
                whole.discard(i)
            if not forward and u == last and copy:
                whole.discard(0)
    return count


def sent_over_dp(c, dp, x, X):
    """Bytes of a place's group of dp ranks, in a step, by operation."""
    all_buckets, zero, of_sums = merged(c, X, x["megabytes"]), x["zero"], 4 if x["accum_fp32"] else X
    whole = (dp - 1) * sum(all_buckets)
    if zero == 0:
        return {"all_reduce": 2 * whole * of_sums}
    gathered = X * whole
    if zero == 3:
        gathered = X * (dp - 1) * sum(n * times for n, times in zip(all_buckets, gathers(c, X, x["megabytes"])))
    return {"reduce_scatter": whole * of_sums * (c["accum"] if zero > 1 else 1), "all_gather": gathered}


@pytest.mark.parametrize("x", [{**PIPELINE, **x} for x in PIPELINES], ids=label)
def test_pipelines(x, train, text):
    """What every rank holds is what its stages are made of, and the schedule's peaks times a micro-batch; what it sends are a
    message a micro-batch to each neighbour, of which it has v times as many with v chunks, and once a step its part of a
    tied embedding; over dp, it sends what it would without a pipeline, once a step at ZeRO-0 and -1, else after every W."""
    c, dp, X = model(**x["c"]), x["dp"], 4 if x["precision"] == "fp32" else 2
    p, stage, of_sums = c["pp"], dp * c["tp"], 4 if x["accum_fp32"] else X
    run = flags(c, "--data", text, "--eval-batches", 1, "--peak-tflops", 1, "--recompute", x["recompute"],
                "--attention", x["attention"], *zero_flags(x["zero"], x["accum_fp32"], x["megabytes"]))  # fmt: skip
    r, sent, calls = two_steps(train, run, p * stage, x["precision"], by=("rank", "group", "op"))
    assert {group for _, group, _ in sent} <= {"world", "pp", "dp", "tp", "kv", "tied"}
    said, over_dp, over_pp = dry_run(*run, "--dp", dp, precision=x["precision"])["stages"], Counter(), Counter()
    for rank, row in enumerate(r.one("end")["memory"]):
        here, dp_rank = {**c, "place": rank // stage}, rank // c["tp"] % dp
        # held
        want = state(here, x["zero"], dp, dp_rank, X, x["accum_fp32"], x["megabytes"])
        want["activations"] = activations(here, X, x["recompute"], x["attention"])
        want["dout"], want["logits"] = output_gradients(here, X), logits(here, X)
        assert {name: row[name] for name in want} == want, f"rank {rank}"
        live, predicted = row["live"], row["predicted"]
        assert predicted == {name: row[name] for name in predicted}, f"rank {rank}"
        assert rank % stage or said[here["place"]]["memory"] == predicted, f"rank {rank}"
        assert all(live[name] <= row[name] for name in live) and live["activations"] > 0, f"rank {rank}: {live}\n{row}"
        if c["layers"] % (p * c["v"]) == 0 and x["recompute"] == "none":  # no chunk is smaller than its place
            assert live["activations"] == row["activations"], f"rank {rank}"
        # sent
        own = channels(here)
        got = sent[rank, "pp", "send"], calls[rank, "pp", "send"]  # calls: at both ends
        assert got == (X * sum(own.values()), c["accum"] * len(own)), f"rank {rank}"
        assert not any(n for (_, group, op), n in calls.items() if group == "pp" and op != "send")
        embedding = merged(here, X, x["megabytes"])[0] if holds_embedding(here) else 0
        ties = c["tie"] and embedding and not (has(here, 0) and has(here, c["layers"] + 1))
        part = (shard(embedding, dp, dp_rank) if x["zero"] else embedding) * ties
        assert (sent[rank, "tied", "all_reduce"], calls[rank, "tied", "all_reduce"]) == (part * of_sums, ties), f"rank {rank}"
        over_pp[here["place"]] += (X * sum(own.values()) + part * of_sums) / stage
        for (of, group, op), n in sent.items():
            over_dp[here["place"], op] += n if of == rank and group == "dp" else 0
        buffers = row["communication"] - communication(here, x["zero"], dp, X, x["accum_fp32"], x["megabytes"])
        buffers -= staging(part, 2, of_sums)
        message, leave = max(own.values()) // c["accum"] * X, len(own) // 2
        arrive = leave + 2 * (c["schedule"] == "zbv" and here["place"] == p - 1)  # two from itself, where the V turns
        assert buffers % message == 0 and 2 * leave + arrive <= buffers // message <= 2 * leave + arrive * c["accum"]
    for place in range(p):
        for op, n in sent_over_dp({**c, "place": place}, dp, x, X).items():
            assert over_dp[place, op] == c["tp"] * n, (place, op)
        assert close(said[place]["sent_over_dp"] * dp, sum(sent_over_dp({**c, "place": place}, dp, x, X).values()), 1e-12)
        assert close(said[place]["sent_over_pp"], over_pp[place], 1e-12)
    assert sum(n for (_, group, _), n in sent.items() if group == "world") == 2 * (p * stage - 1) * ONCE_A_STEP


@pytest.mark.parametrize("schedule, v, peaks", [
    ("afab", 1, [16] * 4), ("1f1b", 1, [4, 3, 2, 1]), ("interleaved", 2, [11, 9, 7, 5]), ("zb-h1", 1, [4] * 4),
    ("zbv", 2, [8] * 4),
])  # fmt: skip
def test_places_of_a_large_pipeline(schedule, v, peaks):
    """Answered by one process for 256 ranks: 80 layers in stages of 20, or chunks of 10, micro-batches of 8192 tokens."""
    run = f"--model llama-70B --dp 8 --tp 8 --pp 4 --accum 16 --micro-batch 1 --schedule {schedule} --virtual-stages {v}"
    out = dry_run(*run.split(), precision="bf16")
    assert out["world"] == 256 and [row["layers"] for row in out["stages"]] == [20] * 4
    assert sorted(s for row in out["stages"] for s in row["stages"]) == list(range(4 * v))
    C, F, N = 8192, 28672, 8192
    # train.h: 8 + (4 + 4g + 6f)/t bytes a token and channel with g = 8/64; fp32, two sums of squares and lse of 8 heads.
    block = N * (C * (8 + (4 + 4 / 8 + 6 * F / C) / 8) + 4 * (2 + 8))
    head = N * (4 * C + 4)
    for r, row in enumerate(out["stages"]):
        heads = (16 if schedule == "afab" else 1) * (r == (0 if schedule == "zbv" else 3))
        assert row["memory"]["activations"] == peaks[r] * 20 / v * block + heads * head, r
        x = N * C * 2  # C + 2F + C + (C + 2 · 1024) beside it, sliced by 8, and four vectors
        if schedule in ("zb-h1", "zbv"):
            waiting = r + 1 if v == 1 else 2 * r + 1
            one = 2 * x + 2 * N * (2 * F + C + 2048) / 8 + 2 * 4 * C
            assert row["memory"]["dout"] == waiting * 20 / v * one + x * (r == 0), r
        neighbours = {"interleaved": [3, 4, 4, 3], "zbv": [2, 4, 4, 2]}.get(schedule, [1, 2, 2, 1])[r]
        assert row["sent_over_pp"] == neighbours * 16 * x, r


def test_staging_of_the_ring():
    """Four lanes of two slices of at most 512 KiB, whatever the model; less where the largest shard is smaller."""
    c = model()
    for dp in (2, 3, 8):
        shard = -(-max(buckets(c, True)) // dp)
        assert dry_run(*flags(c), "--dp", dp)["memory"]["communication"] == 2 * 4 * shard
    assert dry_run("--model", "gpt2-124M", "--dp", 2)["memory"]["communication"] == 2 * 4 * (512 << 10)


def test_the_ledger_counts_real_memory(train, text):
    """The process grows by what the ledger says: 16 bytes a parameter, activations and all."""

    def run(hidden):
        r = train(*"--layers 2 --heads 8 --seq 64 --micro-batch 16 --steps 2 --peak-tflops 1".split(),
                  "--hidden", hidden, "--data", text, "--sample", 1)  # fmt: skip
        process = float(re.search(r"the whole process +(\d+\.\d+)", r.stdout)[1]) * GB
        return process, r.one("end")["memory"][0]["peak"]

    small, large = run(32), run(768)
    assert large[1] - small[1] > 0.3 * GB, "too small to tell"
    assert close(large[0] - small[0], large[1] - small[1], 0.08), (small, large)


def test_dry_run_takes_no_memory():
    """The largest preset on 1,024 ranks, in 2 GB of address space, at once."""
    began = time.monotonic()
    r = run_program(
        "prlimit", ["--as=2000000000", build(), "--dry-run", "--json", "--model", "llama-405B", "--dp", 1024]
    )
    assert r.code == 0 and time.monotonic() - began < 10, f"{r}"
    assert json.loads(r.stdout)["memory"]["peak"] > 6480 * GB


def resident(pid):
    """What a process holds in memory, or 0 where it has gone."""
    try:
        with open(f"/proc/{pid}/status") as f:
            found = re.search(r"VmRSS:\s+(\d+) kB", f.read())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


def test_lazy_optimizer_comes_at_the_end_of_step_1(text, tmp_path):
    """While the first step's many micro-batches go by, the moments are held by an eager run only; then by both."""
    run = ["--layers", 2, "--hidden", 512, "--heads", 8, "--seq", 16, "--micro-batch", 1, "--accum", 30, "--data", text,
           "--steps", 1, "--peak-tflops", 1]  # fmt: skip
    during = {}
    for lazy in ([], ["--lazy-optimizer"]):
        log = tmp_path / f"log-{len(lazy)}"
        process = subprocess.Popen(
            list(map(str, [build(), *run, "--log", log, *lazy])), env=environment(), stdout=subprocess.DEVNULL
        )
        samples = []
        while process.poll() is None:
            now, events = resident(process.pid), log.read_text() if log.exists() else ""
            if '"start"' in events and '"step"' not in events:
                samples.append(now)
            time.sleep(0.005)
        assert process.returncode == 0
        (end,) = [e for e in map(json.loads, log.read_text().splitlines()) if e["event"] == "end"]
        assert end["memory"][0]["optimizer"] == dry_run(*run, *lazy)["memory"]["optimizer"]
        during[bool(lazy)] = statistics.median(samples)  # not the last, in which the moments come
    optimizer = end["memory"][0]["optimizer"]
    assert optimizer > 50e6, "too small to tell"
    assert abs(during[False] - during[True] - optimizer) < 0.2 * optimizer, during


# ---- files ---------------------------------------------------------------------------------------------------------
def header_bytes(path):
    with open(path, "rb") as f:
        return 8 + int.from_bytes(f.read(8), "little")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("c", SHAPES[1:3], ids=lambda c: c["arch"])
def test_bytes_of_a_checkpoint(c, precision, train, text, tmp_path):
    """12 bytes a true parameter: 4 of weights, 8 of moments; the vocabulary's padding stays at home."""
    train(*flags(c), "--data", text, "--steps", 1, "--save", tmp_path / "ckpt", precision=precision, ranks=2)
    weights, optimizer = (tmp_path / "ckpt/step-00000001" / f"{n}.safetensors" for n in ("weights", "optimizer"))
    n = sum(buckets(c, False))
    assert weights.stat().st_size == 4 * n + header_bytes(weights)
    assert optimizer.stat().st_size == 8 * n + header_bytes(optimizer)
    assert header_bytes(weights) + header_bytes(optimizer) < 40_000
    assert dry_run(*flags(c))["checkpoint_bytes"] == 12 * n
    files = sorted(p.name for p in weights.parent.iterdir())
    assert files == ["complete", "optimizer.safetensors", "weights.safetensors"]


def test_checkpoints_hold_masters(train, text, tmp_path):
    """A bf16 build keeps what bf16 cannot: at a learning rate of 0, every bit of fp32 weights that came in goes out."""
    c = model(arch="llama", tie=False)
    r = np.random.default_rng(0)
    shapes = {name: p.shape for name, p in reference.Model({**c, "rope_theta": 1e4}).named_parameters()}
    weights = {name: r.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    reference.save_safetensors(tmp_path / "init.safetensors", weights, {})
    train(*flags(c), "--data", text, "--init", tmp_path / "init.safetensors", "--lr", 0, "--steps", 1,
          "--save", tmp_path / "ckpt", precision="bf16")  # fmt: skip
    saved, _ = reference.load_safetensors(tmp_path / "ckpt/step-00000001/weights.safetensors")
    assert set(saved) == set(weights)
    for name, w in weights.items():
        assert saved[name].dtype == np.float32 and np.array_equal(saved[name], w), name


# ---- published figures ---------------------------------------------------------------------------------------------
def test_the_blog_posts_run():
    """Its model, on one rank and on eight: parameters, bytes, accumulation, activations, FLOPs."""
    run = "--model llama-0.5B --micro-batch 4 --seq 2048 --batch-tokens 524288".split()
    one, eight = dry_run(*run), dry_run(*run, "--dp", 8)
    assert round(one["params"] / 1e6, 1) == 489.3
    assert round(16 * one["params"] / GB, 1) == 7.8
    assert round(one["checkpoint_bytes"] / GB, 1) == 5.9
    assert (one["accum"], eight["accum"]) == (64, 8)
    assert one["tokens_per_step"] == eight["tokens_per_step"] == 524288
    classic = one["classic_activations"]
    assert round(classic["flash"] / GB, 1) == 8.6
    assert round(classic["matrix"] / GB) == 49
    assert round((16 * one["params"] + classic["flash"]) / GB, 1) == 16.4
    assert round(one["flops_per_token"] / 1e9, 1) == 3.7
    assert one["flops_per_token"] == 6 * one["params"] + 12 * 24 * 1280 * 2048  # PaLM, appendix B


def test_the_blog_posts_run_in_words():
    run = "--dry-run --model llama-0.5B --micro-batch 4 --seq 2048 --batch-tokens 524288".split()
    out = run_program(build(), run).stdout
    for words in ("489.3 M", "16 bytes each: 7.8 GB", "12 bytes each: 5.9 GB", "accumulation 64", "3.69 GFLOP a token"):
        assert words in out, f"{words}\n{out}"
    table = re.findall(r"^  .*?(\d+\.\d\d) +\d+\.\d{4}$", out, re.M)  # GB of the classic estimates
    flash, matrix, _, _, both = map(float, table)
    assert (round(flash, 1), round(matrix), round(both, 1)) == (8.6, 49, 16.4), out


# The playbook's charts of recomputation, GiB of activations of one sequence: none at s = 1k, 2k, 4k, 8k; selective and
# full at 1k.
CHARTS = {
    "llama-1B": ([3.564, 12.129, 44.258, 168.516], 1.0645, 0.0645),
    "llama-8B": ([9.254, 28.508, 97.016, 354.031], 4.254, 0.254),
    "llama-70B": ([46.26, 142.5, 485.0, 1770], 21.258, 1.258),
    "llama-405B": ([145.7, 448.9, 1527.8, 5575.6], 66.95, 3.953),
}


def published(x, figure):
    """x agrees with the figure in all of the figure's digits, give or take one in the last."""
    digits = len(str(figure).partition(".")[2])
    return abs(x - figure) <= 1.01 * 10**-digits


@pytest.mark.parametrize("preset", CHARTS)
def test_charts_of_recomputation(preset):
    none, selective, full = CHARTS[preset]
    for k, figure in zip((1, 2, 4, 8), none):
        classic = dry_run("--model", preset, "--micro-batch", 1, "--seq", 1024 * k)["classic_activations"]
        assert published(classic["matrix"] / GIB, figure), (k, classic["matrix"] / GIB, figure)
        if k == 1:
            assert published(classic["selective"] / GIB, selective)
            assert published(classic["full"] / GIB, full)


# The playbook's charts of tensor and sequence parallelism: GiB of activations with flash attention, none recomputed.
@pytest.mark.parametrize("preset, seq, layout, figure, formula", [
    ("llama-70B", 1024, "", 21.25, "34 + 5as/h"), ("llama-70B", 1024, "--tp 8", 8.125, "10 + 24/t + 5as/ht"),
    ("llama-70B", 1024, "--tp 16", 7.1875, "10 + 24/t + 5as/ht"),
    ("llama-70B", 1024, "--tp 8 --sp", 2.65625, "(34 + 5as/h)/t"),
    ("llama-70B", 1024, "--tp 16 --sp", 1.328125, "(34 + 5as/h)/t"),
    ("llama-70B", 16384, "--tp 16", 115, "10 + 24/t + 5as/ht"),
    ("llama-70B", 16384, "--tp 16 --sp", 21.25, "(34 + 5as/h)/t"),
    ("llama-8B", 131072, "--tp 2", 352, "10 + 24/t + 5as/ht"),
])  # fmt: skip
def test_charts_of_tensor_parallelism(preset, seq, layout, figure, formula):
    run = ["--model", preset, "--seq", seq, "--micro-batch", 1, *layout.split()]
    assert dry_run(*run)["classic_activations"]["flash"] == figure * GIB
    out = run_program(build(), ["--dry-run", *run]).stdout
    t = layout.split()[1] if layout else "1"
    assert "2-byte values with dropout, s·b·h·L times" in out and f"\n  {formula}, t = {t}\n" in out, out
    assert re.search(rf"^  no recomputation, flash attention .* {figure:.4f}$", out, re.M), out


# The playbook's table: GB of parameters, gradients and optimizer, in bf16, without and with fp32 gradient accumulation.
@pytest.mark.parametrize("preset, billions, plain, accumulated", [
    ("llama-1B", 1, 16, 20), ("llama-8B", 8, 128, 160), ("llama-70B", 70, 1120, 1400), ("llama-405B", 405, 6480, 8100),
])  # fmt: skip
def test_table_of_model_memory(preset, billions, plain, accumulated):
    for extra, figure in (([], plain), (["--grad-accum-fp32"], accumulated)):
        out = dry_run("--model", preset, *extra, precision="bf16")
        state = sum(out["memory"][name] for name in STATE)
        assert close(state / GB * billions / (out["params"] / GB), figure, 1e-3)  # the table rounds the parameters


# ---- context parallelism -------------------------------------------------------------------------------------------
def test_charts_of_context_parallelism():
    """The playbook's: 8B at 128k tokens on two tp ranks holds 352 GiB of activations; four ranks that share the sequence, 88
    each. Full recomputation alone leaves more than a GPU of 80 GB has; with both, it fits."""
    run = "--model llama-8B --seq 131072 --micro-batch 1 --tp 2 --dp 1 --pp 1".split()
    for cp, figure, tokens in ((1, 352, ""), (4, 88, ", s = 32768 here, the s in 5as/h 131072")):
        said = dry_run(*run, "--cp", cp)
        assert said["classic_activations"]["flash"] == figure * GIB
        assert close(said["classic_activations"]["matrix"] / GIB, (22 + 2.5 * 32 * 2**17 / 4096) * 16 / cp, 0.001)
        state, full = said["classic_state"], said["classic_activations"]["full"]
        assert close(state, 16 * said["params"] / 2, 1e-3) and full == (2 * 32 + 1) * GIB / 2 / cp
        assert (state + full > 80 * GIB) == (cp == 1) and (state + full < 80 * GB) == (cp == 4)
        out = run_program(build(), ["--dry-run", *run, "--cp", cp]).stdout
        assert re.search(rf"^  no recomputation, flash attention .* {figure:.4f}$", out, re.M), out
        assert f"\n  10 + 24/t + 5as/ht, t = 2{tokens}\n" in out
        assert f"(with full recomputation instead: {(state + full) / GB:.2f} GB, {(state + full) / GIB:.4f} GiB)" in out


def tokens_of(T, cp, order, r):
    """Positions that rank r has: of 2·cp chunks the r-th from the front and the r-th from the back, or the r-th of cp."""
    if order == "contiguous":
        return np.split(np.arange(T), cp)[r]
    chunks = np.split(np.arange(T), 2 * cp)
    return np.concatenate([chunks[r], chunks[-1 - r]])


def pairs(T, cp, order, r):
    """Of a query and a key that it sees, itself and those before: a query at position q has q + 1."""
    return int((tokens_of(T, cp, order, r) + 1).sum())


def imbalance(T, cp, order):
    work = [pairs(T, cp, order, r) for r in range(cp)]
    return max(work) / statistics.mean(work)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_attentions_work_by_rank(cp, order):
    """In either order: the run's, and beside it the other one."""
    T = 2 * cp * 5
    run = [*flags(model(arch="llama", seq=T)), "--cp", cp, "--cp-order", order]
    said, out = dry_run(*run), run_program(build(), ["--dry-run", *run]).stdout
    assert (said["cp"], said["local_seq"], said["world"], said["tokens_per_step"]) == (cp, T // cp, cp, B * T)
    assert ("attention" in said) == ("attention, pairs" in out) == (cp > 1)
    assert f"{cp} rank{'s' * (cp > 1)} = dp 1 × {f'cp {cp} × ' * (cp > 1)}tp 1, " in out
    if cp == 1:
        return
    assert said["cp_order"] == order
    for name, of in said["attention"].items():
        assert of["pairs"] == [pairs(T, cp, name, r) for r in range(cp)], name
        assert close(of["most_over_mean"], imbalance(T, cp, name), 1e-12), name
    assert said["attention"]["zigzag"]["most_over_mean"] == 1 and len(said["attention"]) == 2
    ours, other = re.search(r"attention, pairs of .*: (\w+ .*)\n  --cp-order (.*)\n", out).groups()
    zigzag, contiguous = (ours, other) if order == "zigzag" else (other, ours)
    assert zigzag == f"zigzag {pairs(T, cp, 'zigzag', 0)} on each of {cp} cp ranks"
    listed = [str(pairs(T, cp, "contiguous", r)) for r in range(cp)]
    listed = ", ".join(listed) if cp <= 8 else ", ".join(listed[:7]) + f" … {listed[-1]}"
    mean = f"{imbalance(T, cp, 'contiguous'):.3f}"
    assert contiguous == f"contiguous {listed} by cp rank, the most {mean} times the mean"


CP_RUN = dict(shape="gpt2", cp=2, order="zigzag", dp=1, tp=1, sp=False, pp=1, zero=0, accum=1, precision="fp32",
              accum_fp32=False, recompute="none", megabytes=0)  # fmt: skip
CP_RUNS = [{"cp": 4, "accum": 2}, {  # one key/value head for each of its two tp ranks
    "shape": "llama", "cp": 3, "tp": 2, "sp": True, "zero": 2, "accum": 2, "precision": "bf16", "recompute": "full",
}, {  # and one for both
    "shape": "gpt2 of one k, v", "cp": 3, "order": "contiguous", "tp": 2, "zero": 3, "precision": "bf16",
    "accum_fp32": True,
}, {"shape": "tied llama", "cp": 2, "dp": 2, "zero": 1, "recompute": "selective"}, {  # of three layers, two and one
    "shape": "llama", "cp": 2, "pp": 2, "accum": 3, "precision": "bf16",
}]  # fmt: skip


def ring_bytes(c, cp, X, recompute, layers):
    """Of a rank, block by block and micro-batch: keys and values come by the other ranks in every forward and backward, and
    their gradients, in fp32, visit as many; of the key/value heads here, one at least."""
    elements = B * c["seq"] // cp * 2 * widths(c)[1]
    return layers * (cp - 1) * elements * (X * (3 if recompute == "full" else 2) + 4)


def explained_over_cp(out, layers):
    """Bytes that a rank sends over cp in a micro-batch: the messages that --explain lists."""
    total, times = 0, 0
    for line in out.split("messages in a cp group")[1].split("\nmessages")[0].splitlines():
        if unit := re.match(r"  [FBI] of each block(, and again before its backward)?$", line):
            times = layers * (2 if unit[1] else 1)
        if sent := re.match(r"    shift of .* {2}(\d+) pieces? of (\d+) bytes$", line):
            total += times * int(sent[1]) * int(sent[2])
    return total


def check_explained_tokens(out, c, x):
    """Which tokens of which sequences each rank has: every one of them once in each place of the pipeline."""
    tp, seen = c["tp"], Counter()
    lines = re.findall(r"^  ranks? (\d+).*: in micro-batch j, tokens (\S+)(?: and (\S+))? of sequences (\d+) to (\d+) of",
                       out, re.M)  # fmt: skip
    assert [int(line[0]) for line in lines] == list(range(0, x["pp"] * x["dp"] * x["cp"] * tp, tp)), out
    for i, (_, *spans, first, last) in enumerate(lines):
        ends = [tuple(map(int, span.split("-"))) for span in spans if span]
        tokens = [t for a, b in ends for t in range(a, b + 1)]
        assert tokens == list(tokens_of(c["seq"], x["cp"], x["order"], i % x["cp"])), out
        seen.update((s, t) for s in range(int(first), int(last) + 1) for t in tokens)
    assert len(seen) == x["dp"] * B * c["seq"] and set(seen.values()) == {x["pp"]}


@pytest.mark.parametrize("x", [{**CP_RUN, **x} for x in CP_RUNS], ids=label)
def test_context_parallel_runs(x, train, text):
    """What is sent over cp and what attention has done, counted by rank, are what the formulas and --dry-run say; gradients
    and shards are of dp · cp ranks; over tp go the rows that are here; and activations are those of 1/cp of the tokens."""
    c = {**TP_SHAPES[x["shape"]], "tp": x["tp"], "sp": x["sp"], "pp": x["pp"], "accum": x["accum"]}
    cp, dp_cp, X = x["cp"], x["dp"] * x["cp"], 4 if x["precision"] == "fp32" else 2
    world, here = dp_cp * x["tp"] * x["pp"], {**c, "seq": c["seq"] // cp}
    run = flags(c, "--data", text, "--eval-batches", 1, "--peak-tflops", 1)
    run += ["--accum", x["accum"]] if x["pp"] == 1 else []
    run += ["--cp", cp, "--cp-order", x["order"], "--recompute", x["recompute"]]
    run += zero_flags(x["zero"], x["accum_fp32"], x["megabytes"])
    r, sent, calls = two_steps(train, run, world, x["precision"], by=("rank", "group", "op"))
    said = dry_run(*run, "--dp", x["dp"], precision=x["precision"])
    places = said["stages"] if x["pp"] > 1 else [{**said, "layers": c["layers"]}]
    start = r.one("start")
    assert (start["world"], start["dp"], start["cp"], start["cp_order"]) == (world, x["dp"], cp, x["order"])

    assert Counter(op for _, group, op in sent if group == "cp") == {"shift": world}
    work = {row["rank"]: row["pairs"] for row in r.one("end")["attention"]}
    for rank in range(world):
        place = places[rank // (dp_cp * x["tp"])]
        want = x["accum"] * ring_bytes(c, cp, X, x["recompute"], place["layers"])
        assert sent[rank, "cp", "shift"] == want == place["sent_over_cp"], f"rank {rank}"
        passes = 3 if x["recompute"] == "full" else 2
        assert calls[rank, "cp", "shift"] == x["accum"] * place["layers"] * (cp - 1) * (passes + 1), f"rank {rank}"
        seen = 3 * x["accum"] * B * passes * place["layers"]  # sequences, in three steps
        assert work[rank] == seen * pairs(c["seq"], cp, x["order"], rank // x["tp"] % cp), f"rank {rank}"
    other = "zigzag" if x["order"] == "contiguous" else "contiguous"
    ours, theirs = (f"{imbalance(c['seq'], cp, order):.3f}" for order in (x["order"], other))
    least, most = min(work.values()), max(work.values())
    counted = f"{least} to {most}" if most > least else least
    words = f"a rank computed {counted} pairs of a query and a key of one head, in both passes of all steps; the most in a cp group: "
    assert f"{words}{ours} times the mean ({other}: {theirs})" in r.stdout, r.stdout
    explained = run_program(build(x["precision"]), [*run, "--explain"], world).stdout
    check_explained_tokens(explained, c, x)
    assert x["accum"] * explained_over_cp(explained, places[0]["layers"]) == places[0]["sent_over_cp"], explained

    over_dp = sum(n for (_, group, _), n in sent.items() if group == "dp")
    if x["pp"] > 1:
        assert said["stages"][0]["sent_over_pp"] == x["accum"] * B * here["seq"] * c["hidden"] * X
        assert close(over_dp, sum(row["sent_over_dp"] for row in places) * dp_cp * x["tp"], 1e-12)
        return
    data_parallel = sum(bytes_sent(c, x["zero"], x["accum"], x["precision"], x["accum_fp32"]))
    assert over_dp == (dp_cp - 1) * x["tp"] * data_parallel and close(said["sent_over_dp"] * dp_cp, over_dp / x["tp"], 1e-12)
    want, _ = sent_over_tp(here, dp_cp, x, X, x["accum_fp32"])
    over_tp = sum(n for (_, group, _), n in sent.items() if group in ("tp", "kv"))
    assert over_tp == sum(want.values()) and close(said["sent_over_tp"] * world, over_tp, 1e-12)
    if x["tp"] > 1:
        assert close(explained_over_tp(explained, here, dp_cp, x), said["sent_over_tp"], 1e-12), explained
    terms = said["sent_over_dp"] + said["sent_over_cp"] + said["sent_over_tp"]
    assert close(said["sent_per_step"], terms, 1e-12)
    rank = run_program(build(x["precision"]), ["--dry-run", *run, "--dp", x["dp"]]).stdout
    shifts = f"  {said['sent_over_cp'] / GB:.6f} GB of keys and values over cp, forward"
    assert shifts in rank and f", dp {x['dp']} × cp {cp}" in rank, rank

    check_memory(r, said, c, x["zero"], dp_cp, X, x["accum_fp32"], x["megabytes"])
    assert said["memory"]["activations"] == activations(here, X, x["recompute"], "flash")


@pytest.mark.parametrize("run, fits", [
    ("--seq 2048", True), ("--seq 2050", False), ("--seq 2048 --attention naive", False),
    ("--seq 24 --cp 3", True), ("--seq 42 --cp 3", False), ("--seq 42 --cp 3 --cp-order contiguous", True),
])  # fmt: skip
def test_more_context_parallel_ranks_are_suggested(run, fits):
    """Where a rank would be too large, and twice as many could share a sequence."""
    cp = run.split()[3] if "--cp" in run else 1
    r = run_program(build(), ["--arch", "llama", "--layers", 96, "--hidden", 12288, "--heads", 96, *run.split()], int(cp))
    assert r.code and bool(re.search(r"smaller: .*, a larger --cp, ", r.stderr)) == fits, f"{r}"
    assert re.search(r"smaller: --micro-batch, --seq, .*a larger --tp, ", r.stderr), f"{r}"

"""A mixture of experts: extremes of routing, whose bytes and memory, what balances it, and what is refused.

That every layout is the same model is test_law.py's (--experts is an axis of it) and, for the whole of five dimensions, the
first test's here. Whatever may be said of routing without running it, is written here again.
"""
import re

import numpy as np
import pytest

import reference
from conftest import ROOT, Run, build, close, run_program
from test_memory import dry_run

C, F, LAYERS, SEQ, BATCH = 32, 24, 2, 16, 16
MODEL = f"--arch llama --layers {LAYERS} --heads 4 --kv-heads 2 --hidden {C} --ffn {F} --seq {SEQ} --peak-tflops 1".split()
LAW = (("loss", 2e-5), ("grad_norm", 2e-4))


def layout(text, flags, dp=1, accum=1, batch=BATCH):
    return [*MODEL, "--data", text, "--micro-batch", batch // dp // accum, "--accum", accum, "--eval-batches", 1, *flags.split()]


def same(got, want, first=1):
    """From this step on, the law; and the same experts, in all that is said of routers but what goes to other ranks."""
    for a, b in zip(*([e["router"] for e in r.events("step") if e["step"] >= first] for r in (got, want)), strict=True):
        for key in b.keys() - {"sent", "sent_groups", "margin", "balance_loss"}:
            assert a[key] == b[key], f"{key}: {a}, {b}\n{got}\n{want}"
        assert close(a.get("balance_loss", 0), b.get("balance_loss", 0), 2e-5), f"{a}, {b}\n{got}\n{want}"
    for key, tolerance in LAW:
        a, b = ([e[key] for e in r.events("step") if e["step"] >= first] for r in (got, want))
        assert all(close(x, y, tolerance) for x, y in zip(a, b, strict=True)), f"{key}: {a}, {b}\n{got}\n{want}"


def test_five_dimensions(train, text):
    """All of them at a time: 16 ranks, of which two share the experts; two steps."""
    run = ["--model", "moe-tiny", "--steps", 2, "--data", text, "--eval-batches", 1, "--eval-every", 1, "--peak-tflops", 1]
    want = train(*run, "--micro-batch", 8)
    got = train(*run, "--micro-batch", 1, *"--dp 2 --tp 2 --sp --cp 2 --pp 2 --ep 2 --zero 1 --accum 4".split(), ranks=16)
    same(got, want)
    for a, b in zip(got.events("val"), want.events("val"), strict=True):
        assert close(a["loss"], b["loss"], 2e-5), f"{got}\n{want}"
    for r, tp in (got, 2), (want, 1):  # all ranks of tp send a copy; evaluations are not counted
        sent = sum(e["router"]["sent"] for e in r.events("step"))
        assert sum(row["sent"] for row in r.one("end")["experts"]) == sent * tp, f"{r}"
        assert (sent > 0) == (tp > 1)


# ---- extremes ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def started(train, text, tmp_path):
    """started(flags, change) → the path of a run's initial weights, of which change(tensors) has made others."""

    def started(flags, change):
        train(*layout(text, flags), "--steps", 1, "--lr", 0, "--min-lr", 0, "--save", tmp_path / "start")
        path = tmp_path / "start" / "step-00000001" / "weights.safetensors"
        tensors, meta = reference.load_safetensors(path)
        change(tensors)
        reference.save_safetensors(tmp_path / "changed.safetensors", tensors, meta)
        return tmp_path / "changed.safetensors"

    return started


def favours(*experts):
    """All tokens go there, and no other expert gets one."""

    def change(tensors):
        for name, value in tensors.items():
            if name.endswith("router.balance"):
                value[:] = 0
                value[list(experts)] = 100

    return change


@pytest.mark.parametrize("experts", [(5,), (2, 3), (0, 7)], ids=str)
def test_all_tokens_to_one_rank_or_two(experts, train, text, started):
    """Ranks that get no token at all join in; the ones that get them have more room made, which the ledger says."""
    flags = f"--experts 8 --topk {len(experts)} --balance bias"
    start = started(flags, favours(*experts))
    run = {"flags": f"{flags} --steps 3 --init {start}"}
    want = train(*layout(text, **run))
    share = [1 / len(experts) if e in experts else 0 for e in range(8)]
    assert all(row == share for e in want.events("step") for row in e["router"]["share"]), f"{want}"
    for ranks, dp, more in (4, 4, "--ep 4"), (4, 4, "--ep 2 --zero 3"), (4, 2, "--ep 2 --tp 2 --sp --recompute full"):
        got = train(*layout(text, f"{run['flags']} {more}", dp), ranks=ranks)
        same(got, want)
        more_held = [row["activations"] - row["predicted"]["activations"] for row in got.one("end")["memory"]]
        if len(experts) == 1:  # its ranks hold what all ep ranks send, and no other needs more room than for an even load
            assert max(more_held) > 0 and min(more_held) == 0, more_held


# ---- bytes -------------------------------------------------------------------------------------------------------------
def all_to_all(run):
    """Bytes that each rank sent by all-to-all, by the counters of its group."""
    return {row["rank"]: row["bytes"] for row in run.one("end")["comm"] if row["op"] == "all_to_all"}


SHAPES = [
    (2, 2, "--ep 2 --experts 8 --topk 2", "fp32"),
    (4, 4, "--ep 4 --experts 8 --topk 3 --balance none --shared-experts 1", "bf16"),
    (4, 2, "--ep 2 --tp 2 --sp --experts 4 --topk 1 --balance bias --recompute full", "fp32"),
    (4, 2, "--ep 2 --pp 2 --schedule zb-h1 --experts 8 --topk 2", "fp32"),
    (4, 2, "--ep 2 --cp 2 --experts 8 --topk 2 --moe-every 2", "bf16"),
]


SHORT = 8  # sequences a step


@pytest.fixture
def short(text, tmp_path):
    """Too short to hold out a tenth: a run with no evaluation."""
    (tmp_path / "short").write_bytes(text.read_bytes()[: 10 * SEQ])
    return tmp_path / "short"


@pytest.mark.parametrize("ranks, dp, flags, precision", SHAPES, ids=str)
def test_bytes_are_what_the_routing_says(ranks, dp, flags, precision, train, short):
    """A copy of a token goes there and home, forward and backward; recomputed, forward twice. The copies are counted where they
    are routed, the bytes where they are sent."""
    r = train(*layout(short, flags, dp, 2, SHORT), "--steps", 2, ranks=ranks, precision=precision)
    assert "no evaluation" in r.stdout
    copy = C * (4 if precision == "fp32" else 2) * (3 if "full" in flags else 2)
    want = {row["rank"]: (row["sent"] + row["received"]) * copy for row in r.one("end")["experts"]}
    assert all_to_all(r) == want and min(want.values()) > 0, f"{r}"
    tp = ranks // dp // (2 if "--pp" in flags or "--cp" in flags else 1)
    sent = sum(e["router"]["sent"] for e in r.events("step"))
    assert sent * tp == sum(row["sent"] for row in r.one("end")["experts"]) == sum(row["received"] for row in r.one("end")["experts"])


EVEN = [(2, 2, "--ep 2"), (4, 4, "--ep 4 --recompute full --zero 2"), (4, 2, "--ep 2 --tp 2 --sp"), (4, 2, "--ep 2 --cp 2 --zero 1"),
        (4, 4, "--ep 2 --zero 3 --bucket-mb 0 --layers 4")]  # fmt: skip


@pytest.mark.parametrize("ranks, dp, more", EVEN, ids=str)
def test_bytes_of_an_even_routing(ranks, dp, more, train, short):
    """Where each token goes to all experts: of tokens·k·C, 1 − 1/ep leave the rank, each time. So says a dry run; and of what goes
    over all groups in a step, too."""
    flags, ep, k, layers = f"--experts 4 --topk 4 {more}", int(more.split()[1]), 4, 4 if "layers" in more else LAYERS
    run = layout(short, flags, dp, 1, SHORT)
    if "--layers" in more:
        at = run.index("--layers")
        del run[at : at + 2]
    runs = [train(*run, "--steps", steps, ranks=ranks) for steps in (1, 3)]
    copies = SHORT // dp * SEQ // (2 if "--cp" in more else 1) * k
    times = layers * (6 if "full" in more else 4)
    each = copies * C * 4 * (ep - 1) // ep
    for r, steps in zip(runs, (1, 3)):
        assert all_to_all(r) == dict.fromkeys(range(ranks), steps * times * each), f"{r}"
        assert [e["router"]["load"] for e in r.events("step")] == [1] * steps
    said = dry_run(*run, "--ranks", ranks)
    told = layers * (ep - 1) * 4 * 4  # how many copies there are for each expert
    assert said["sent_over_ep"] == times * each + told
    for rank in range(ranks):
        a, b = (sum(row["bytes"] for row in r.one("end")["comm"] if row["rank"] == rank and row["group"] != "world") for r in runs)
        assert abs(b - a - 2 * said["sent_per_step"]) <= 2 * 64, (rank, (b - a) / 2, said["sent_per_step"])


# ---- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp, ep, precision", [(4, 2, "fp32"), (4, 4, "fp32"), (4, 2, "bf16")])
def test_bytes_held_of_experts(dp, ep, precision, zero, train, text):
    """A rank has E/ep experts; of their optimizer state and, by stage, of all else, a share of dp/ep replicas."""
    X, state = (4, 8) if precision == "fp32" else (2, 12)
    names, held = ("weights", "gradients", "optimizer", "master", "whole_buckets"), []
    for experts in 8, 4:
        flags = f"--experts {experts} --topk 2 --balance none --ep {ep} --zero {zero} --bucket-mb 0"
        r = train(*layout(text, flags, dp), "--steps", 1, ranks=dp, precision=precision)
        rows = r.one("end")["memory"]
        assert all(row[name] == row["predicted"][name] for name in names for row in rows), rows
        held.append([sum(row[name] for name in names) for row in rows])

    def bytes_of(n, ranks, slots):
        """Of n parameters that so many ranks share: what stays, and the slots in which they are whole for a while."""
        weights, gradients, own = n / ranks if zero == 3 else n, n / ranks if zero >= 2 else n, n / ranks if zero else n
        return X * (weights + gradients + slots * ((zero == 3) + (zero >= 2))) + state * own

    four = LAYERS * 4 * 3 * C * F // ep  # of a rank, and each of its two blocks has a slot
    want = bytes_of(four, dp // ep, four) + bytes_of(LAYERS * 4 * C, dp, 0)  # a router's slot is the larger embedding's
    assert [a - b for a, b in zip(*held)] == [want] * dp, (held, want)


# ---- balance -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks, flags", [(1, ""), (4, "--ep 4 --dp 4"), (2, "--ep 2 --dp 2 --zero 2")], ids=str)
def test_no_token_goes_to_too_many_groups(ranks, flags, train, text):
    """Of four groups of two experts a token may go to two; without the limit, some go to three or all four."""
    run = f"--experts 8 --topk 3 --route-groups 4 {flags}"
    limited = train(*layout(text, f"{run} --route-nodes 2 --balance bias", ranks), "--steps", 10, ranks=ranks)
    free = train(*layout(text, f"{run} --route-nodes 4 --balance bias", ranks), "--steps", 10, ranks=ranks)
    assert {e["router"]["most_groups"] for e in limited.events("step")} == {2}
    assert max(e["router"]["most_groups"] for e in free.events("step")) == 3
    assert all(e["router"]["groups"] <= 2 for e in limited.events("step"))
    groups = [sum(e["router"]["groups"] for e in r.events("step")) for r in (limited, free)]
    assert groups[0] < groups[1]


SKEW = [2, 2, 1, 1, 1, 1, 0.5, 0.5]  # an expert whose scores vary more is more often among the best


def test_bias_balances_as_aux_does(train, tmp_path):
    """On this repository's text, from a router that prefers two experts: after 200 steps, over the last 20, no expert of any
    block gets a fifth more than the mean; and the loss is that of aux, or better."""
    run = "--arch llama --layers 2 --heads 4 --hidden 64 --ffn 64 --seq 64 --micro-batch 16 --experts 8 --topk 2".split()
    run += "--peak-tflops 1 --eval-batches 4 --eval-every 0 --warmup 10".split()
    loss, load = {}, {}
    for balance in "bias", "aux":
        train(*run, "--balance", balance, "--steps", 1, "--lr", 0, "--min-lr", 0, "--save", tmp_path / balance)
        tensors, meta = reference.load_safetensors(tmp_path / balance / "step-00000001" / "weights.safetensors")
        for name, value in tensors.items():
            if name.endswith("router.weight"):
                value *= np.array(SKEW, np.float32)[:, None]
            if name.endswith("router.balance"):
                value[:] = 0
        reference.save_safetensors(tmp_path / f"{balance}.safetensors", tensors, meta)
        r = train(*run, "--balance", balance, "--steps", 200, "--lr", 6e-4, "--init", tmp_path / f"{balance}.safetensors")
        shares = np.array([e["router"]["share"] for e in r.events("step")])  # [step, block, expert]
        load[balance] = [8 * shares[:10].mean(0).max(), 8 * shares[-20:].mean(0).max()]
        loss[balance] = r.events("val")[-1]["loss"]
    print(loss, load)
    assert load["bias"][0] > 2 and load["bias"][1] < 1.2, load
    assert loss["bias"] < 1.001 * loss["aux"], loss


# ---- fewer bits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision, more", [("fp32", "--fp8 e4m3"), ("fp32", "--matmul bf16"), ("bf16", ""), ("bf16", "--grad-accum-fp32")])
def test_fewer_bits(precision, more, train, text):
    """All experts are chosen, so that no rounding sends a token elsewhere: not fp32's curve, but near it."""
    run = "--experts 4 --topk 4 --balance none --steps 20 --lr 3e-3 --min-lr 3e-3 --warmup 2"
    want = train(*layout(text, run)).curve("loss")
    got = train(*layout(text, f"{run} --ep 2 {more}", 2, 2), ranks=2, precision=precision).curve("loss")
    gaps = [abs(a - b) for a, b in zip(got, want, strict=True)]
    print(f"largest gap {max(gaps):.4f} on the way from {want[0]:.2f} to {want[-1]:.2f}")
    assert 0 < max(gaps) < 0.03 and want[-1] < want[0] - 1, gaps


# ---- checkpoints -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("balance", ["aux", "bias"])
def test_a_checkpoint_goes_to_any_number_of_ranks(balance, train, text, tmp_path):
    """Saved with two expert-parallel ranks, resumed with four, with one, and again with two."""
    run = f"--experts 8 --topk 2 --balance {balance} --shared-experts 1 --lr 3e-3 --min-lr 3e-3"
    want = train(*layout(text, run), "--steps", 6)
    train(*layout(text, f"{run} --ep 2 --tp 2 --zero 3", 2), "--steps", 2, "--save", tmp_path, ranks=4)
    for step, ranks, dp, more in (4, 4, 4, "--ep 4 --zero 2"), (5, 1, 1, ""), (6, 2, 1, "--pp 2"):
        got = train(*layout(text, f"{run} {more}", dp), "--steps", step, "--save", tmp_path, "--resume", tmp_path, ranks=ranks)
        first = got.events("step")[0]["step"]
        assert first > 2
        steps = [e for e in want.events("step") if e["step"] <= step]
        same(got, Run(want.command, 0, "", "", steps), first)


# ---- what is refused, and what is said ---------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, ranks, said", [
    ("--experts 8 --ep 3", 3, "--ep 3 does not divide 8 experts; nearest: 1"),
    ("--experts 8 --ep 2", 3, "--ep 2 does not divide --dp 3; nearest: 1"),
    ("--experts 8 --ep 2 --tp 2", 2, "--ep 2 does not divide --dp 1; nearest: 1"),
    ("--ep 2", 2, "--ep 2: the model has no experts; nearest: 1, or --experts 2"),
    ("--experts 4 --topk 5", 1, "--topk 5: more than --experts 4; nearest: 4"),
    ("--experts 8 --topk 3 --route-groups 4 --route-nodes 1", 1,
     "--route-nodes 1: 2 experts a group make 2, fewer than --topk 3; nearest: 2"),
    ("--experts 8 --route-groups 3", 1, "--route-groups 3 does not divide 8 experts; nearest: 2 or 4"),
    ("--experts 8 --route-groups 4 --route-nodes 5", 1, "--route-nodes 5: more than --route-groups 4; nearest: 4"),
    ("--experts 8 --expert-ffn 77 --tp 2", 2, "--tp 2 does not divide --expert-ffn 77; nearest: 1"),
    ("--experts 8 --moe-every 9", 1, "--moe-every 9: more than --layers 2, so that no block has experts; nearest: 2"),
    ("--experts 2000", 1, "--experts 2000: outside 0 to 1024; nearest: 1024"),
    ("--experts 8 --balance loss", 1, "--balance loss: not one of aux|bias|none; nearest: bias"),
])  # fmt: skip
def test_refused(flags, ranks, said, text):
    r = run_program(build(), [*MODEL, "--data", text, *flags.split(), "--steps", 1], ranks)
    assert (r.code, r.stderr) == (2, f"train: {said}\n"), f"{r}"


MOST = {  # what is published: billions of parameters, and of those that a token uses
    "mixtral-8x7B": (46.7, 12.9),
}


@pytest.mark.parametrize("name", MOST)
def test_parameters_of_a_preset(name):
    """All of them, and the active ones; a token's FLOPs are six a parameter of the latter, but for the embedding."""
    said = dry_run("--model", name)
    assert (round(said["params"] * 1e-9, 1), round(said["active_params"] * 1e-9, 1)) == MOST[name], said


def test_the_cluster_of_the_readme():
    """512 ranks, all five dimensions: what the README says of them, and the job has the same flags."""
    text = (ROOT / "README.md").read_text()
    (flags,) = re.findall(r"--dry-run --ranks 512 (--model mixtral-8x7B .*)$", text, re.M)
    assert f"--nodes 64 dev/slurm/train.sbatch {flags} --data " in text
    said = dry_run("--ranks", 512, *flags.split(), precision="bf16")
    assert [said[x] for x in ("world", "dp", "ep", "cp", "tp", "pp", "sp")] == [512, 8, 8, 2, 8, 4, True]
    assert f"It says {said['memory']['peak'] * 1e-9:.0f} GB a rank, a bubble of " in text and said["tokens_per_step"] == 1 << 20
    assert f"a bubble of {100 * 9 / 57:.1f} %" in text  # 3 (F + I + W) of 16 · 3 + 9
    out = run_program(build("bf16"), ["--explain", "--ranks", 512, *flags.split()]).stdout  # a line is a tp group
    groups = [tuple(map(int, line)) for line in re.findall(r"^  ranks (\d+) to (\d+): ", out, re.M)]
    assert groups == [(8 * host, 8 * host + 7) for host in range(64)], out

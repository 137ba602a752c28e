"""The law: every layout is the same model.

However a run is laid out (data-, tensor-, context- and pipeline-parallel ranks, schedule, ZeRO stage, recomputation,
…), ten steps give the loss and the gradient norm of the one-rank run of the same global batch, and evaluations its
loss. (But for a mixture of experts where two are within rounding of each other, and another one is chosen: the program says of
every step what was chosen, in a hash, and how near that was.) AXES holds every option and its legal values, `legal` says which go together; a new strategy adds its axis and its
rule here, and all of it is then crossed with all else: by pairs (make test), and by the product (make law). Where only
the order of messages differs, not even a bit may.
"""
import itertools
import random
import re

import numpy as np
import pytest

from conftest import SEED, build, checkpoint_bytes, close, covering, draw, label, run_program, together
from test_cases import shard

STEPS = 10
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4
MARGIN = 1e-5  # of scores, within which other sums may choose another expert
BATCH = 72  # sequences a step, over all ranks: divides by almost every dp × accum below
MOST_RANKS = 8

# What is trained: a layout is held against the one-rank run with the same values of these.
MODEL_AXES = {
    "arch": ["gpt2", "llama"],
    "kv_heads": [8, 2],
    "tie": [True, False],
    # gpt2's position table has the preset's 64 rows: the others get no gradient, and decay. Nothing cuts 11; --cp 4 and 8
    # cut 16, 3 cuts 12, and 2 both: 12 into zig-zag's chunks of 3.
    "seq": [16, 11, 12],
    "ffn": [152, 77],  # with 77, which no --tp cuts, shards are unequal: see test_shards_are_unequal
    "experts": [
        "",  # none
        "--experts 8 --topk 2",
        "--experts 4 --topk 1 --shared-experts 1 --moe-every 2 --balance none",
        "--experts 8 --topk 3 --balance bias --route-groups 4 --route-nodes 2",
    ],
    "layers": [3, 9],  # 9 for up to 9 stages: equal ones where these are 3 or 9, else some are a block longer
}
# What all of these share, if a case says nothing else.
MODEL = {"heads": 8, "hidden": 32, "vocab": 256, "batch": BATCH, "seed": 7, "lr": 3e-3, "grad_clip": 1}
# Nine layers or more of so few channels are unruly at that rate: the order of sums alone, on one rank, moves a step's norm by 1e-2.
DEEP = {"lr": 1e-3}
# How it is laid out. The first value of each is the one-rank run's.
LAYOUT_AXES = {
    "pp": [1, 2, 3, 4],
    "schedule": ["1f1b", "afab", "interleaved 2", "interleaved 3", "zb-h1", "zbv"],  # and the stages a rank
    "dp": [1, 2, 3, 4, 6, 8],
    "ep": [1, 2, 4],
    "tp": [1, 2, 4, 8],
    "sp": [False, True],
    "cp": [1, 2, 3, 4, 8],
    "cp_order": ["zigzag", "contiguous"],
    "zero": [0, 1, 2, 3],
    "accum": [1, 3, 8],
    "recompute": ["none", "selective", "full"],
    "attention": ["flash", "naive"],
    "bucket_mb": [0, 0.08, 1000],  # every block alone; the last with the head, others by twos if small; all in one
    "no_overlap": [False, True],
    "grad_accum_fp32": [False, True],
    "lazy_optimizer": [False, True],
    "eval": [True, False],  # evaluation leaves training alone
}
AXES = {**MODEL_AXES, **LAYOUT_AXES}


def ranks(x):
    return x["dp"] * x["tp"] * x["cp"] * x["pp"]


def stages(x):
    name, _, chunks = x["schedule"].partition(" ")
    return x["pp"] * (2 if name == "zbv" else int(chunks or 1))


def schedule_takes(x):
    """Has the schedule micro-batches enough, and each stage a block? Alone, a rank has no order but these two."""
    name, m, p = x["schedule"].split()[0], x["accum"], x["pp"]
    if p == 1:
        return name in ("1f1b", "afab")
    enough = {"zb-h1": m >= p, "zbv": m >= 2 * p - 1, "interleaved": m % p == 0}
    return enough.get(name, True) and stages(x) <= x["layers"]


def sequence_divides(x):
    """--cp cuts it into parts, two a rank if zig-zag, and --sp each rank's tokens. With one rank neither an order nor --sp
    does anything."""
    if (x["sp"] and x["tp"] == 1) or (x["cp"] == 1 and x["cp_order"] != "zigzag"):
        return False
    zigzag = x["cp"] > 1 and x["cp_order"] == "zigzag"
    return x["seq"] % (x["cp"] * (2 if zigzag else 1)) == 0 and not (x["sp"] and x["seq"] // x["cp"] % x["tp"])


def legal(x, most_ranks=MOST_RANKS):
    if x["arch"] == "gpt2" and not x["tie"]:
        return False  # gpt2's head is tied
    if x["dp"] % x["ep"] or (x["ep"] > 1 and not x["experts"]):
        return False
    if ranks(x) > most_ranks or x["ffn"] % x["tp"] or not schedule_takes(x) or not sequence_divides(x):
        return False
    if x["cp"] > 1 and x["attention"] == "naive":  # whole rows of scores need the whole sequence
        return False
    return x.get("batch", BATCH) % (x["dp"] * x["accum"]) == 0


def flags(x, data, steps=STEPS):
    x = {**MODEL, **(DEEP if x["layers"] >= 9 else {}), **x}
    schedule, _, chunks = x["schedule"].partition(" ")
    out = ["--arch", x["arch"], "--layers", x["layers"], "--heads", x["heads"], "--kv-heads", x["kv_heads"]]
    out += ["--hidden", x["hidden"], "--ffn", x["ffn"], "--vocab", x["vocab"], "--seq", x["seq"]]
    out += ["--data", data[x["vocab"]], "--seed", x["seed"], "--steps", steps]
    out += ["--lr", x["lr"], "--min-lr", x["lr"] / 3, "--warmup", 3, "--weight-decay", 0.1]
    out += ["--grad-clip", x["grad_clip"]]
    out += ["--peak-tflops", 1]  # measures nothing
    out += ["--micro-batch", x["batch"] // (x["dp"] * x["accum"]), "--accum", x["accum"]]
    out += ["--tp", x["tp"], *(["--sp"] if x["sp"] else []), "--pp", x["pp"], "--schedule", schedule]
    out += [*x["experts"].split(), *(["--ep", x["ep"]] if x["experts"] else [])]
    out += ["--cp", x["cp"], "--cp-order", x["cp_order"]] if x["cp"] > 1 else []
    out += ["--virtual-stages", chunks] if chunks else []
    out += ["--recompute", x["recompute"], "--attention", x["attention"]]
    out += ["--zero", x["zero"], "--bucket-mb", x["bucket_mb"], *(["--no-overlap"] if x["no_overlap"] else [])]
    out += ["--tie"] if x["tie"] and x["arch"] == "llama" else []
    out += ["--grad-accum-fp32"] if x["grad_accum_fp32"] else []
    out += ["--lazy-optimizer"] if x["lazy_optimizer"] else []
    out += ["--val", data[x["vocab"]]] if x["vocab"] == 257 else []  # a text holds out its own
    return [*out, "--eval-batches", 1, "--eval-every", 3 if x["eval"] else 0]


def one_rank(x):
    """The run that x must equal."""
    return {**x, **{name: values[0] for name, values in LAYOUT_AXES.items()}}


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    """The text with its bytes in another order, so that they come from every tp rank's slice of the vocabulary: as it
    is, they are below 128. By size of the vocabulary: 256 are a text to the program, 257 come in a shard."""
    directory, tokens = tmp_path_factory.mktemp("data"), 37 * np.frombuffer(text.read_bytes(), np.uint8).astype(int)
    files = {256: directory / "text", 257: directory / "shard.bin"}
    files[256].write_bytes((tokens % 256).astype(np.uint8).tobytes())
    shard(files[257], tokens % 257)
    return files


COPIES = "all copies of every weight are alike"


def has_copies(x):
    over_pp = x["pp"] > 1 and x["tie"] and x["schedule"] != "zbv"  # whose ends are both the first rank's
    return x["tp"] > 1 or (x["dp"] * x["cp"] > 1 and x["zero"] < 3) or over_pp


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    """launch(layout) → Run; launch(layout, again=True) runs even what has run before. Where a weight has copies, they
    are compared. (Twice, not every step: who compares first waits for weights that the next forward is to wait for.)"""
    directory, numbers, done = tmp_path_factory.mktemp("law"), itertools.count(), {}

    def launch(x, again=False, steps=STEPS):
        key = (label(x), steps)
        if again or key not in done:
            log, copies = directory / f"{next(numbers)}.jsonl", has_copies(x)
            compare = ["--check-replicas", steps // 2] if copies else []
            r = run_program(build(), [*flags(x, data, steps), *compare], ranks(x), log=log)
            assert r.code == 0, f"{r}"
            assert len(r.events("step")) == steps, f"{r}"
            assert not copies or COPIES in r.stdout, f"{r}"
            done[key] = r
        return done[key]

    return launch


def steps_with_the_same_experts(got, want):
    """How many, from the first on, until two experts were too near each other."""
    for i, (a, b) in enumerate(zip(got.curve("router"), want.curve("router"))):
        if a["hash"] != b["hash"]:
            assert min(a["margin"], b["margin"]) < MARGIN, f"step {i}: {a}, one rank {b}\n$ {got.command}\n$ {want.command}"
            return i
    return STEPS


def obey(launch, x):
    want, got = launch(one_rank(x)), launch(x)
    same = steps_with_the_same_experts(got, want) if x["experts"] else STEPS
    assert same >= 3, f"experts within rounding of each other: another seed is needed\n$ {got.command}"
    losses = list(zip(got.curve("loss"), want.curve("loss")))[:same]
    norms = list(zip(got.curve("grad_norm"), want.curve("grad_norm")))[:same]
    assert same < STEPS or losses[-1][1] < losses[0][1] - 0.3, f"the one-rank run did not learn: {losses}"
    wrong = [f"step {i}: loss {a}, one rank {b}" for i, (a, b) in enumerate(losses) if not close(a, b, LOSS_TOLERANCE)]
    wrong += [f"step {i}: norm {a}, one rank {b}" for i, (a, b) in enumerate(norms) if not close(a, b, NORM_TOLERANCE)]
    validation = {e["step"]: e["loss"] for e in want.events("val")}
    found = {e["step"]: e["loss"] for e in got.events("val")}
    assert list(found) == (list(validation) if x["eval"] else [STEPS]), f"{got}"
    wrong += [f"validation at step {i}: loss {a}, one rank {validation[i]}" for i, a in found.items()
              if i <= same and not close(a, validation[i], LOSS_TOLERANCE)]  # fmt: skip
    assert not wrong, "\n".join([*wrong, "", f"$ {got.command}", f"$ {want.command}"])


# Fewer numbers of ranks, of which make law has all; only products that are few enough are drawn.
FEWER = together(
    {**AXES, "dp": [1, 2, 3, 8], "cp": [1, 2, 3, 4]}, ["pp", "dp", "tp", "cp", "schedule", "accum", "layers"],
    lambda x: ranks(x) <= MOST_RANKS and schedule_takes(x),
)  # fmt: skip


@pytest.mark.parametrize("x", covering(FEWER, legal, SEED, tries=600, most=2500), ids=label)
def test_every_pair_of_options(launch, x):
    obey(launch, x)


@pytest.mark.parametrize("x", draw(AXES, legal, 4, SEED), ids=label)
def test_random_layouts(launch, x):
    obey(launch, x)


def layout(**options):
    return {**{name: values[0] for name, values in AXES.items()}, **options}


# Heads, key/value heads and tokens that powers of two do not divide. A smaller batch: these models are larger.
SIXTHS = {"heads": 6, "hidden": 192, "kv_heads": 6, "ffn": 768, "seq": 48, "batch": 6, "lr": 1e-3}
UNEVEN = [
    {**SIXTHS, "tp": 3},
    {**SIXTHS, "arch": "llama", "kv_heads": 3, "tp": 3, "sp": True},
    # each key/value head held by three ranks, and all of that twice
    {**SIXTHS, "kv_heads": 2, "hidden": 48, "ffn": 96, "lr": 3e-3, "dp": 2, "tp": 6, "sp": True, "zero": 3},
    {"vocab": 257, "batch": 24, "tp": 4, "dp": 2, "zero": 1},  # slices of 65 and 64 tokens
    {"vocab": 257, "batch": 24, "tp": 4, "sp": True, "arch": "llama", "tie": False},
    {"vocab": 257, "batch": 24, "tp": 4, "sp": True, "pp": 2, "accum": 3, "arch": "llama"},
]


@pytest.mark.parametrize("options", UNEVEN, ids=label)
def test_uneven_slices(launch, options):
    obey(launch, layout(**options))


MULTIPLIED = ("arch", "dp", "tp", "sp", "zero", "recompute")


def product():
    """Every layout without a pipeline × architecture; all else, which meets the rest by pairs above, is drawn."""
    r = random.Random(SEED)
    for values in itertools.product(*(AXES[name] for name in MULTIPLIED)):
        fixed, x = {**dict(zip(MULTIPLIED, values)), "pp": 1, "layers": 3}, {}
        if fixed["dp"] * fixed["tp"] > MOST_RANKS or (fixed["sp"] and fixed["tp"] == 1):
            continue
        while not x or not legal(x):
            x = {**{name: r.choice(axis) for name, axis in AXES.items()}, **fixed}
        yield x


def micro_batches(schedule, p):
    """The fewest that the schedule takes, those with which it first takes another course, and more."""
    return {"zb-h1": (p, p + 1, 2 * p), "zbv": (2 * p - 1, 2 * p, 2 * p + 2), "interleaved": (p, 2 * p, 3 * p)}.get(
        schedule.split()[0], (1, p - 1, p, 2 * p + 1) if p > 2 else (1, 2, 5))  # fmt: skip


def pipelines():
    """Every pipeline × schedule × micro-batches × tensor-parallel ranks × ZeRO stage, where there is room for a second
    data-parallel rank; each with one architecture and then, with other micro-batches, the other. All else is drawn."""
    r, n = random.Random(SEED), 0
    for p, schedule, tp, zero in itertools.product((2, 3, 4), AXES["schedule"], (1, 2), AXES["zero"]):
        if zero and p * tp * 2 > MOST_RANKS:
            continue
        for m in micro_batches(schedule, p):
            fixed = {"arch": AXES["arch"][n % 2], "pp": p, "schedule": schedule, "accum": m, "tp": tp, "zero": zero}
            fixed["layers"] = max(9, stages(fixed)) if stages(fixed) > 3 else r.choice(AXES["layers"])
            x, n = {}, n + 1
            while not x or not legal(x) or (zero and x["dp"] == 1):
                x = {**{name: r.choice(axis) for name, axis in AXES.items()}, "batch": r.choice([BATCH, 70, 80]), **fixed}
            yield x


def contexts():
    """Every number of context-parallel ranks × tensor-parallel ones, with --sp and without × one stage or two × ZeRO stage.
    Architectures and orders take turns, so that all four meet each of the former; schedules, too. Zig-zag's chunks are odd
    numbers of tokens, and so is what contiguous ranks have, if no --sp cuts it. All else is drawn."""
    r, schedules = random.Random(SEED), itertools.cycle(AXES["schedule"])
    slices = (1, False), (2, False), (2, True)
    for n, (cp, (tp, sp), pp) in enumerate(itertools.product((2, 3, 4, 8), slices, (1, 2))):
        most = max(MOST_RANKS, cp * tp * pp)
        if most > 2 * MOST_RANKS:
            continue
        for zero in AXES["zero"]:
            arch, order = AXES["arch"][(n + zero) % 2], AXES["cp_order"][(n + zero) // 2 % 2]
            fixed = {"arch": arch, "pp": pp, "tp": tp, "sp": sp, "cp": cp, "cp_order": order, "zero": zero}
            fixed["seq"] = cp * (6 if sp or order == "zigzag" else 7)
            fixed["schedule"], x = next(schedules) if pp > 1 else "1f1b", {}
            while not x or not legal(x, most):
                x = {**{name: r.choice(axis) for name, axis in AXES.items()}, **fixed}
            yield x


@pytest.mark.law
@pytest.mark.parametrize("x", product(), ids=label)
def test_product(launch, x):
    obey(launch, x)


@pytest.mark.law
@pytest.mark.parametrize("x", pipelines(), ids=label)
def test_pipelines(launch, x):
    obey(launch, x)


@pytest.mark.law
@pytest.mark.parametrize("x", contexts(), ids=label)
def test_contexts(launch, x):
    obey(launch, x)


@pytest.mark.parametrize("other", [{"arch": "llama"}, {"seq": 11}, {"kv_heads": 2}, {"ffn": 77}, {"layers": 9}], ids=label)
def test_law_tells_models_apart(launch, other):
    """The tolerances are tight enough to see a difference: another model breaks the law at every step, but for luck."""
    a, b = launch(layout()), launch(layout(**other))
    assert sum(map(close, a.curve("loss"), b.curve("loss"), [LOSS_TOLERANCE] * STEPS)) <= 1
    assert sum(map(close, a.curve("grad_norm"), b.curve("grad_norm"), [NORM_TOLERANCE] * STEPS)) <= 1


@pytest.mark.parametrize("arch, bucket, parts", [
    ("gpt2", "block 0", (2, 3, 4, 6, 8)), ("gpt2", "block 1", (2, 3, 4, 6, 8)), ("gpt2", "block 1-head", (4, 8)),
    ("gpt2", "embedding", (3, 6)), ("llama", "block 0", (3, 6)),
])  # fmt: skip
def test_shards_are_unequal(arch, bucket, parts, data):
    """What the law stands on: its buckets cannot be cut into equal parts. (A llama block is a multiple of hidden.)"""
    x = layout(arch=arch, ffn=77, bucket_mb=0.08 if "-" in bucket else 0)
    out = run_program(build(), [*flags(x, data), "--explain"]).stdout
    (elements,) = re.findall(rf"^  {bucket}: (\d+) elements", out, re.M)
    assert all(int(elements) % n for n in parts), elements


# ---- to the bit ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [
    {}, {"dp": 3, "accum": 2, "arch": "llama", "zero": 3}, {"dp": 8},
    {"tp": 4, "sp": True, "kv_heads": 2, "accum": 2}, {"cp": 2, "tp": 2, "sp": True, "kv_heads": 2, "zero": 2},
    {"pp": 3, "accum": 8, "schedule": "zb-h1", "dp": 2, "zero": 1, "no_overlap": True},
    {"pp": 2, "accum": 8, "schedule": "zbv", "dp": 2, "zero": 3, "layers": 4, "arch": "llama"},
], ids=label)  # fmt: skip
def test_same_layout_same_bits(launch, options):
    a, b = launch(layout(**options)), launch(layout(**options), again=True)
    for key in ("loss", "grad_norm"):
        assert a.curve(key) == b.curve(key), f"{a.command}"


BUILDS = {"fp32": ("fp32", []), "bf16": ("bf16", []), "bf16, sums in fp32": ("bf16", ["--grad-accum-fp32"])}


@pytest.fixture
def outcome(data, tmp_path):
    """outcome(build, option=value, …) → what four steps leave behind: losses, norms, and the checkpoint's bytes."""
    numbers = itertools.count()

    def outcome(kind, **options):
        precision, switches = BUILDS[kind]
        x, directory = layout(**{"ffn": 77, **options}), tmp_path / f"{next(numbers)}"
        r = run_program(build(precision), [*flags(x, data, 4), *switches, "--save", directory], ranks(x),
                        log=f"{directory}.log")  # fmt: skip
        assert r.code == 0, f"{r}"
        return r.curve("loss"), r.curve("grad_norm"), checkpoint_bytes(directory, 4)

    return outcome


@pytest.mark.parametrize("options, clip, waits", [
    ({"dp": 2, "tp": 2, "sp": True, "ffn": 152}, 1, 0), ({"dp": 3}, 0, 1), ({"dp": 2, "cp": 2}, 0.5, 2), ({"dp": 8}, 0, 3),
], ids=lambda x: label(x) if isinstance(x, dict) else None)  # fmt: skip
@pytest.mark.parametrize("kind", BUILDS)
def test_one_micro_batch_same_bits_at_every_stage(kind, options, clip, waits, outcome):
    """The same messages, the same sums; and one of the stages once more, with --no-overlap."""
    run = {"kind": kind, **options, "grad_clip": clip}
    want = outcome(**run)
    for zero in (1, 2, 3):
        assert outcome(**run, zero=zero) == want, f"--zero {zero}"
    assert outcome(**run, zero=waits, no_overlap=True) == want, f"--zero {waits} --no-overlap"


PIPES = [(2, "1f1b"), (2, "afab"), (2, "interleaved 2"), (2, "zb-h1"), (2, "zbv"), (3, "1f1b"), (4, "afab")]


@pytest.mark.parametrize("tie, arch", [(False, "llama"), (True, "gpt2")])
def test_a_pipeline_moves_no_bit(tie, arch, outcome):
    """Every stage takes micro-batches in their order: the sums are one rank's. But for a tied embedding's, of which each
    end sums up its own, wherever the stages and whatever the schedule; and zbv's head is micro-batches ahead. (The norm is
    summed stage by stage: it may differ in a double's last digits, and is not to clip.)"""
    run = {"kind": "fp32", "arch": arch, "tie": tie, "accum": 4, "batch": 24, "layers": 4, "grad_clip": 0}
    outcomes = {pipe: outcome(**run, pp=pipe[0], schedule=pipe[1]) for pipe in PIPES if not tie or pipe[1] != "zbv"}
    want = outcomes[PIPES[0]] if tie else outcome(**run)
    losses, norms, checkpoint = range(3)
    for pipe, got in outcomes.items():
        assert got[losses] == want[losses] and got[checkpoint] == want[checkpoint], pipe
        assert all(map(close, got[norms], want[norms], [1e-14] * 4)), pipe


def test_a_head_ahead_sums_in_fp32(outcome):
    """zbv's head is micro-batches ahead of the embedding that shares its weights: each one's gradient goes to the fp32 sum by
    itself all the same, as where both ends sum up by themselves. Before the first step only the order of these sums differs."""
    run = {"kind": "bf16, sums in fp32", "accum": 8, "batch": 24, "layers": 4, "pp": 2}
    want, got = outcome(**run, schedule="1f1b")[1], outcome(**run, schedule="zbv")[1]
    assert close(got[0], want[0], 1e-9), (got, want)


def test_a_pipeline_writes_the_same_text(data, tmp_path):
    def written(**options):
        x = layout(accum=3, layers=4, **options)
        r = run_program(build(), [*flags(x, data, 4), "--sample", 40], ranks(x))
        assert r.code == 0, f"{r}"
        return re.search(r"sample of.*?(?=\nmemory)", r.stdout, re.S).group()

    want = written()
    for options in {"pp": 2}, {"pp": 2, "schedule": "zbv"}, {"pp": 3, "dp": 2, "zero": 3}:
        assert written(**options) == want, options


@pytest.mark.parametrize("arch, dp, bucket_mb, waits", [("gpt2", 2, 0, (0, 3)), ("llama", 3, 0.08, (1, 2))])
@pytest.mark.parametrize("kind", BUILDS)
def test_many_micro_batches_two_orders_of_sums(kind, arch, dp, bucket_mb, waits, outcome):
    """Stages 0 and 1 sum up a rank's micro-batches first, 2 and 3 the ranks' gradients first."""
    run = {"kind": kind, "dp": dp, "accum": 5, "batch": 240, "arch": arch, "tie": arch == "gpt2", "bucket_mb": bucket_mb}
    stage = [outcome(**run, zero=zero) for zero in range(4)]
    assert stage[0] == stage[1] and stage[2] == stage[3]
    for a, b in zip(stage[0][1], stage[2][1]):
        assert close(a, b, 2e-2), "nor are they far from each other"
    exact = kind == "bf16, sums in fp32"  # a few numbers of 8 bits: no sum of them is rounded, whatever its order
    assert exact or stage[0] != stage[2], "it is not after every micro-batch that stage 2 reduces"
    for zero in waits:
        assert outcome(**run, zero=zero, no_overlap=True) == stage[zero], f"--zero {zero} --no-overlap"


def test_bf16_is_as_near_at_every_stage(data, tmp_path):
    """Five bf16 sums over ranks instead of one take no run further from the fp32 one: the mean distance of the losses
    over 40 steps and three models."""
    sums = dict.fromkeys(("stage 0", "stage 2", "stage 3"), 0.0)
    for seed in (1, 2, 3):

        def losses(precision, **options):
            x = layout(seed=seed, batch=240, **options)
            r = run_program(build(precision), flags(x, data, 40), ranks(x), log=tmp_path / "log")
            assert r.code == 0, f"{r}"
            (tmp_path / "log").unlink()
            return np.array(r.curve("loss"))

        exact = losses("fp32")
        for zero in (0, 2, 3):
            sums[f"stage {zero}"] += np.abs(losses("bf16", dp=4, accum=5, zero=zero) - exact).mean()
    assert 0 < sums["stage 0"] and max(sums.values()) <= 1.5 * sums["stage 0"], sums

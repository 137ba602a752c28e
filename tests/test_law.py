"""The law: every layout is the same model.

However a run is laid out (data- and tensor-parallel ranks, ZeRO stage, recomputation, …), ten steps give the loss and
the gradient norm of the one-rank run of the same global batch. AXES holds every option and its legal values, `legal`
says which go together; a new strategy adds its axis and its rule here, and all of it is then crossed with all else: by
pairs (make test), and by the product (make law). Where only the order of messages differs, not even a bit may.
"""
import itertools
import random
import re

import numpy as np
import pytest

from conftest import SEED, build, checkpoint_bytes, close, covering, draw, label, run_program
from test_cases import shard

STEPS = 10
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4
BATCH = 240  # sequences a step, over all ranks: divides by every dp × accum below
MOST_RANKS = 8
LAYERS = 3

# What is trained: a layout is held against the one-rank run with the same values of these.
MODEL_AXES = {
    "arch": ["gpt2", "llama"],
    "kv_heads": [8, 2],
    "tie": [True, False],
    # gpt2's position table has the preset's 64 rows: the others get no gradient, and decay. No --sp cuts 11.
    "seq": [16, 11],
    "ffn": [152, 77],  # with 77, which no --tp cuts, shards are unequal: see test_shards_are_unequal
}
# What all of these share, if a case says nothing else.
MODEL = {"heads": 8, "hidden": 32, "vocab": 256, "batch": BATCH, "seed": 7, "lr": 3e-3, "grad_clip": 1}
# How it is laid out. The first value of each is the one-rank run's.
LAYOUT_AXES = {
    "dp": [1, 2, 3, 4, 6, 8],
    "tp": [1, 2, 4, 8],
    "sp": [False, True],
    "zero": [0, 1, 2, 3],
    "accum": [1, 2, 5],
    "recompute": ["none", "selective", "full"],
    "attention": ["flash", "naive"],
    "bucket_mb": [0, 0.08, 1000],  # every block alone; the last with the head, others by twos if small; all in one
    "no_overlap": [False, True],
    "grad_accum_fp32": [False, True],
    "lazy_optimizer": [False, True],
    "eval": [False, True],  # evaluation leaves training alone
}
AXES = {**MODEL_AXES, **LAYOUT_AXES}


def ranks(x):
    return x["dp"] * x["tp"]


def legal(x):
    if x["arch"] == "gpt2" and not x["tie"]:
        return False  # gpt2's head is tied
    if ranks(x) > MOST_RANKS or x["ffn"] % x["tp"]:
        return False
    if x["sp"] and (x["tp"] == 1 or x["seq"] % x["tp"]):  # with one tp rank it does nothing
        return False
    return BATCH % (x["dp"] * x["accum"]) == 0


def flags(x, data, steps=STEPS):
    x = {**MODEL, **x}
    out = ["--arch", x["arch"], "--layers", LAYERS, "--heads", x["heads"], "--kv-heads", x["kv_heads"]]
    out += ["--hidden", x["hidden"], "--ffn", x["ffn"], "--vocab", x["vocab"], "--seq", x["seq"]]
    out += ["--data", data[x["vocab"]], "--seed", x["seed"], "--steps", steps]
    out += ["--lr", x["lr"], "--min-lr", x["lr"] / 3, "--warmup", 3, "--weight-decay", 0.1]
    out += ["--grad-clip", x["grad_clip"]]
    out += ["--peak-tflops", 1]  # measures nothing
    out += ["--micro-batch", x["batch"] // (x["dp"] * x["accum"]), "--accum", x["accum"]]
    out += ["--tp", x["tp"], *(["--sp"] if x["sp"] else [])]
    out += ["--recompute", x["recompute"], "--attention", x["attention"]]
    out += ["--zero", x["zero"], "--bucket-mb", x["bucket_mb"], *(["--no-overlap"] if x["no_overlap"] else [])]
    out += ["--tie"] if x["tie"] and x["arch"] == "llama" else []
    out += ["--grad-accum-fp32"] if x["grad_accum_fp32"] else []
    out += ["--lazy-optimizer"] if x["lazy_optimizer"] else []
    out += ["--eval-every", 3, "--eval-batches", 2] if x["eval"] else ["--eval-every", 0]
    return out


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


@pytest.fixture(scope="module")
def launch(data, tmp_path_factory):
    """launch(layout) → Run; launch(layout, again=True) runs even what has run before. Where a weight has copies, they
    are compared. (Twice, not every step: who compares first waits for weights that the next forward is to wait for.)"""
    directory, numbers, done = tmp_path_factory.mktemp("law"), itertools.count(), {}

    def launch(x, again=False, steps=STEPS):
        key = (label(x), steps)
        if again or key not in done:
            log, copies = directory / f"{next(numbers)}.jsonl", x["tp"] > 1 or (x["dp"] > 1 and x["zero"] < 3)
            compare = ["--check-replicas", steps // 2] if copies else []
            r = run_program(build(), [*flags(x, data, steps), *compare], ranks(x), log=log)
            assert r.code == 0, f"{r}"
            assert len(r.events("step")) == steps, f"{r}"
            assert not copies or COPIES in r.stdout, f"{r}"
            done[key] = r
        return done[key]

    return launch


def obey(launch, x):
    want, got = launch(one_rank(x)), launch(x)
    losses = list(zip(got.curve("loss"), want.curve("loss")))
    norms = list(zip(got.curve("grad_norm"), want.curve("grad_norm")))
    assert losses[-1][1] < losses[0][1] - 0.3, f"the one-rank run did not learn: {losses}"
    wrong = [f"step {i}: loss {a}, one rank {b}" for i, (a, b) in enumerate(losses) if not close(a, b, LOSS_TOLERANCE)]
    wrong += [f"step {i}: norm {a}, one rank {b}" for i, (a, b) in enumerate(norms) if not close(a, b, NORM_TOLERANCE)]
    assert not wrong, "\n".join([*wrong, "", f"$ {got.command}", f"$ {want.command}"])
    if x["eval"]:
        assert got.events("val"), f"no validation\n{got}"


@pytest.mark.parametrize("x", covering(AXES, legal, SEED, tries=200), ids=label)
def test_every_pair_of_options(launch, x):
    obey(launch, x)


@pytest.mark.parametrize("x", draw(AXES, legal, 6, SEED), ids=label)
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
]


@pytest.mark.parametrize("options", UNEVEN, ids=label)
def test_uneven_slices(launch, options):
    obey(launch, layout(**options))


MULTIPLIED, DRAWS = ("arch", "dp", "tp", "sp", "zero", "recompute"), 2


def product():
    """Every layout × architecture, twice where ranks only share data; all else, which meets the rest by pairs above,
    is drawn."""
    r = random.Random(SEED)
    for *values, again in itertools.product(*(AXES[name] for name in MULTIPLIED), range(DRAWS)):
        fixed, x = dict(zip(MULTIPLIED, values)), {}
        if ranks(fixed) > MOST_RANKS or (fixed["sp"] and fixed["tp"] == 1) or (again and fixed["tp"] > 1):
            continue
        while not x or not legal(x):
            x = {**{name: r.choice(axis) for name, axis in AXES.items()}, **fixed}
        yield x


@pytest.mark.law
@pytest.mark.parametrize("x", product(), ids=label)
def test_product(launch, x):
    obey(launch, x)


@pytest.mark.parametrize("other", [{"arch": "llama"}, {"seq": 11}, {"kv_heads": 2}, {"ffn": 77}], ids=label)
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
    {"tp": 4, "sp": True, "kv_heads": 2, "accum": 2},
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
    ({"dp": 2, "tp": 2, "sp": True, "ffn": 152}, 1, 0), ({"dp": 3}, 0, 1), ({"dp": 4}, 0.5, 2), ({"dp": 8}, 0, 3),
], ids=lambda x: label(x) if isinstance(x, dict) else None)  # fmt: skip
@pytest.mark.parametrize("kind", BUILDS)
def test_one_micro_batch_same_bits_at_every_stage(kind, options, clip, waits, outcome):
    """The same messages, the same sums; and one of the stages once more, with --no-overlap."""
    run = {"kind": kind, **options, "grad_clip": clip}
    want = outcome(**run)
    for zero in (1, 2, 3):
        assert outcome(**run, zero=zero) == want, f"--zero {zero}"
    assert outcome(**run, zero=waits, no_overlap=True) == want, f"--zero {waits} --no-overlap"


@pytest.mark.parametrize("arch, dp, bucket_mb, waits", [("gpt2", 2, 0, (0, 3)), ("llama", 3, 0.08, (1, 2))])
@pytest.mark.parametrize("kind", BUILDS)
def test_many_micro_batches_two_orders_of_sums(kind, arch, dp, bucket_mb, waits, outcome):
    """Stages 0 and 1 sum up a rank's micro-batches first, 2 and 3 the ranks' gradients first."""
    run = {"kind": kind, "dp": dp, "accum": 5, "arch": arch, "tie": arch == "gpt2", "bucket_mb": bucket_mb}
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
            x = layout(seed=seed, **options)
            r = run_program(build(precision), flags(x, data, 40), ranks(x), log=tmp_path / "log")
            assert r.code == 0, f"{r}"
            (tmp_path / "log").unlink()
            return np.array(r.curve("loss"))

        exact = losses("fp32")
        for zero in (0, 2, 3):
            sums[f"stage {zero}"] += np.abs(losses("bf16", dp=4, accum=5, zero=zero) - exact).mean()
    assert 0 < sums["stage 0"] and max(sums.values()) <= 1.5 * sums["stage 0"], sums

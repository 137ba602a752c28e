"""The law: every layout is the same model.

However a run is laid out (ranks, accumulation, recomputation, attention, …), ten steps give the loss and the gradient
norm of the one-rank run of the same global batch. AXES holds every option and its legal values, `legal` says which go
together; a new strategy adds its axis and its rule here, and all of it is then crossed with all else: by pairs
(make test), and by the whole product (make law).
"""
import itertools
import random

import pytest

from conftest import SEED, build, close, covering, draw, label, run_program

STEPS = 10
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4
BATCH = 120  # sequences a step, over all ranks: divides by every ranks × accum below

# What is trained: a layout is held against the one-rank run with the same values of these.
MODEL_AXES = {
    "arch": ["gpt2", "llama"],
    "kv_heads": [8, 2],
    "tie": [True, False],
    "seq": [16, 11],
}
# How it is laid out. The first value of each is the one-rank run's.
LAYOUT_AXES = {
    "ranks": [1, 2, 3, 4, 6, 8],
    "accum": [1, 2, 5],
    "recompute": ["none", "selective", "full"],
    "attention": ["flash", "naive"],
    "grad_accum_fp32": [False, True],
    "lazy_optimizer": [False, True],
    "eval": [False, True],  # evaluation leaves training alone
}
AXES = {**MODEL_AXES, **LAYOUT_AXES}


def legal(x):
    if x["arch"] == "gpt2" and not x["tie"]:
        return False  # gpt2's head is tied
    return BATCH % (x["ranks"] * x["accum"]) == 0


def flags(x, text, steps=STEPS):
    out = ["--arch", x["arch"], "--layers", 2, "--heads", 8, "--hidden", 64, "--ffn", 152, "--seed", 7]
    out += ["--kv-heads", x["kv_heads"], "--seq", x["seq"], "--data", text, "--steps", steps]
    out += ["--lr", 3e-3, "--min-lr", 1e-3, "--warmup", 3, "--weight-decay", 0.1, "--grad-clip", 1]
    out += ["--micro-batch", BATCH // (x["ranks"] * x["accum"]), "--accum", x["accum"]]
    out += ["--recompute", x["recompute"], "--attention", x["attention"]]
    out += ["--tie"] if x["tie"] and x["arch"] == "llama" else []
    out += ["--grad-accum-fp32"] if x["grad_accum_fp32"] else []
    out += ["--lazy-optimizer"] if x["lazy_optimizer"] else []
    out += ["--eval-every", 3, "--eval-batches", 2] if x["eval"] else ["--eval-every", 0]
    return out


def one_rank(x):
    """The run that x must equal."""
    return {**x, **{name: values[0] for name, values in LAYOUT_AXES.items()}}


@pytest.fixture(scope="module")
def launch(text, tmp_path_factory):
    """launch(layout) → Run; launch(layout, again=True) runs even what has run before."""
    directory, numbers, done = tmp_path_factory.mktemp("law"), itertools.count(), {}

    def launch(x, again=False, steps=STEPS):
        key = (label(x), steps)
        if again or key not in done:
            log = directory / f"{next(numbers)}.jsonl"
            r = run_program(build(), flags(x, text, steps), x["ranks"], log=log)
            assert r.code == 0, f"{r}"
            assert len(r.events("step")) == steps, f"{r}"
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


@pytest.mark.parametrize("x", covering(AXES, legal, SEED), ids=label)
def test_every_pair_of_options(launch, x):
    obey(launch, x)


@pytest.mark.parametrize("x", draw(AXES, legal, 6, SEED), ids=label)
def test_random_layouts(launch, x):
    obey(launch, x)


def whole_product():
    """Every model × layout; the switches, which meet the rest by pairs above, are drawn: the product stays an afternoon's."""
    r, switches = random.Random(SEED), [name for name, values in LAYOUT_AXES.items() if values == [False, True]]
    multiplied = {name: values for name, values in AXES.items() if name not in switches}
    for values in itertools.product(*multiplied.values()):
        x = dict(zip(multiplied, values))
        if legal(x):
            yield {**x, **{name: r.random() < 0.5 for name in switches}}


@pytest.mark.law
@pytest.mark.parametrize("x", whole_product(), ids=label)
def test_whole_product(launch, x):
    obey(launch, x)


def layout(**options):
    return {**{name: values[0] for name, values in AXES.items()}, **options}


@pytest.mark.parametrize("other", [{"arch": "llama"}, {"seq": 11}, {"kv_heads": 2}], ids=label)
def test_law_tells_models_apart(launch, other):
    """The tolerances are tight enough to see a difference: another model breaks the law at every step."""
    a, b = launch(layout()), launch(layout(**other))
    assert not any(map(close, a.curve("loss"), b.curve("loss"), [LOSS_TOLERANCE] * STEPS))
    assert not any(map(close, a.curve("grad_norm"), b.curve("grad_norm"), [NORM_TOLERANCE] * STEPS))


@pytest.mark.parametrize("options", [{}, {"ranks": 3, "accum": 2, "arch": "llama"}, {"ranks": 8}], ids=label)
def test_same_layout_same_bits(launch, options):
    a, b = launch(layout(**options)), launch(layout(**options), again=True)
    for key in ("loss", "grad_norm"):
        assert a.curve(key) == b.curve(key), f"{a.command}"


@pytest.mark.parametrize("ranks, accum", [(2, 1), (2, 5), (3, 1), (8, 1)])
def test_bytes_of_data_parallelism(launch, ranks, accum):
    """Every step, each rank sends 2 (N − 1)/N of the gradient, once however many micro-batches there are, and of one
    double: the sum of squares."""
    x = layout(ranks=ranks, accum=accum)
    long, short = launch(x), launch(x, steps=2)
    gradient, steps = 4 * long.one("start")["params"] + 8, STEPS - 2
    sent = []
    for rank in range(ranks):
        per_run = [sum(c["bytes"] for c in r.one("end")["comm"] if c["rank"] == rank and c["group"] == "dp" and
                       c["op"] in ("all_reduce", "reduce_scatter", "all_gather")) for r in (long, short)]  # fmt: skip
        sent.append((per_run[0] - per_run[1]) / steps)
    # Shards differ by an element: what single ranks send differs too, the sum over the ring does not.
    assert sum(sent) == 2 * (ranks - 1) * gradient, sent
    assert all(close(s, 2 * (ranks - 1) / ranks * gradient, 1e-3) for s in sent), sent

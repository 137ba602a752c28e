"""The whole program on CUDA, played by dev/emu: the same model as on the CPU, in whatever order its streams run.

EMU_SEED chooses that order: under one seed the compute stream runs ahead as far as events let it, under another the groups'
streams do, under the third anything may come first. A wait or an event that is missing gives other numbers under one of them.
"""
import itertools
import random
import re
import subprocess

import pytest

from conftest import SEED, build, checkpoint_bytes, close, covering, label, make_text, run_program
from test_faults import ENDLESS, culprit
from test_law import LOSS_TOLERANCE, NORM_TOLERANCE, steps_with_the_same_experts

STEPS, BATCH, LAYERS = 7, 8, 2
# With --ffn 37, which no --tp cuts, shards are unequal; no --sp cuts 11 tokens; one key/value head is held by both tp ranks.
EXPERTS = ["", "--experts 4 --topk 2 --route-groups 2 --route-nodes 1 --shared-experts 1"]
MODEL_AXES = {"arch": ["gpt2", "llama"], "kv_heads": [2, 1], "ffn": [48, 37], "seq": [12, 11], "experts": EXPERTS}
MOST_RANKS = 4
LAYOUT_AXES = {
    "dp": [1, 2, 4],
    "ep": [1, 2],
    "tp": [1, 2],
    "sp": [False, True],
    "cp": [1],  # more below
    "cp_order": ["zigzag"],
    "zero": [0, 1, 2, 3],
    "comm": ["mpi", "nccl"],
    "seed": [1, 2, 3],
    "accum": [1, 2],
    "recompute": ["none", "full"],
    "attention": ["flash", "naive"],
    "bucket_mb": [0, 1000],
    "no_overlap": [False, True],
    "lazy_optimizer": [False, True],
}
AXES = {**MODEL_AXES, **LAYOUT_AXES}
SEEDS = LAYOUT_AXES["seed"]


def ranks(x):
    return x["dp"] * x["tp"] * x["cp"]


def legal(x):
    if x["dp"] % x["ep"] or (x["ep"] > 1 and not x["experts"]):
        return False
    cut = x["ffn"] % x["tp"] == 0 and not (x["sp"] and (x["tp"] == 1 or x["seq"] % x["tp"]))
    return cut and ranks(x) <= MOST_RANKS


def flags(x):
    out = ["--arch", x["arch"], "--layers", x.get("layers", LAYERS), "--heads", 2, "--kv-heads", x["kv_heads"], "--hidden", 32]
    out += ["--ffn", x["ffn"], "--seq", x["seq"], "--lr", 3e-3, "--warmup", 3, "--peak-tflops", 1, "--eval-every", 0]
    out += ["--micro-batch", BATCH // (x["dp"] * x["accum"]), "--accum", x["accum"], "--zero", x["zero"], "--tp", x["tp"]]
    out += ["--cp", x["cp"], "--cp-order", x["cp_order"]] if x["cp"] > 1 else []
    out += [*x["experts"].split(), *(["--ep", x["ep"]] if x["experts"] else [])]
    out += ["--recompute", x["recompute"], "--attention", x["attention"], "--bucket-mb", x["bucket_mb"]]
    return out + [f"--{name.replace('_', '-')}" for name in ("sp", "no_overlap", "lazy_optimizer") if x[name]]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text, its bytes in another order: they come from every tp rank's slice of the vocabulary."""
    path = tmp_path_factory.mktemp("words") / "text.txt"
    path.write_bytes(bytes(37 * byte % 256 for byte in make_text(20_000)))
    return path


@pytest.fixture(scope="module")
def launch(words, tmp_path_factory):
    """launch(layout) → Run on the emulator; launch(layout, "cpu") → by one rank on the CPU."""
    directory, numbers, done = tmp_path_factory.mktemp("emu"), itertools.count(), {}

    def launch(x, device="emu", more=(), precision="fp32"):
        if device == "cpu":
            x = {**x, **{name: values[0] for name, values in LAYOUT_AXES.items()}}
        key = (label(x), device, more, precision)
        if key not in done:
            log = directory / f"{next(numbers)}.jsonl"
            command = ["--data", words, "--steps", STEPS, *flags(x), *more]
            env = {"EMU_SEED": str(x["seed"])}
            if device == "emu":
                command += ["--comm", x["comm"]]
            done[key] = run_program(build(precision, device=device), command, ranks(x), log=log, env=env)
            assert done[key].code == 0, f"EMU_SEED={x['seed']}\n{done[key]}"
        return done[key]

    return launch


def obey(launch, x):
    want, got = launch(x, "cpu"), launch(x)
    wrong, same = [], steps_with_the_same_experts(got, want) if x["experts"] else STEPS
    assert same >= 3, f"experts within rounding of each other: another seed is needed\n$ {got.command}"
    for key, tolerance in ("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE):
        pairs = list(zip(got.curve(key), want.curve(key), strict=True))
        assert len(pairs) == STEPS
        wrong += [f"step {i}: {key} {a}, on the CPU {b}" for i, (a, b) in enumerate(pairs[:same]) if not close(a, b, tolerance)]
    losses = want.curve("loss")
    assert losses[-1] < losses[0] - 0.3, f"the CPU's run did not learn: {losses}"
    assert not wrong, "\n".join([*wrong, f"EMU_SEED={x['seed']}", f"$ {got.command}", f"$ {want.command}"])


def layout(**options):
    return {**{name: values[0] for name, values in AXES.items()}, **options}


@pytest.mark.parametrize("x", covering(AXES, legal, SEED, most=2500), ids=label)
def test_every_pair_of_options(launch, x):
    obey(launch, x)


MULTIPLIED = ("dp", "tp", "sp", "zero", "comm", "seed")


def product():
    """All else is drawn. One dp rank has no stages."""
    r = random.Random(SEED)
    for values in itertools.product(*(AXES[name] for name in MULTIPLIED)):
        fixed, x = dict(zip(MULTIPLIED, values), cp=1), {}
        if ranks(fixed) > MOST_RANKS or (fixed["sp"] and fixed["tp"] == 1) or (fixed["zero"] and fixed["dp"] == 1):
            continue
        while not x or not legal(x):
            x = {**{name: r.choice(axis) for name, axis in AXES.items()}, **fixed}
        yield x


@pytest.mark.law
@pytest.mark.parametrize("x", product(), ids=label)
def test_product(launch, x):
    obey(launch, x)


# ---- context parallelism ---------------------------------------------------------------------------------------------
RING = {"bucket_mb": 1000, "kv_heads": 1, "recompute": "full"}


@pytest.mark.parametrize("options", [
    {"cp": 2, "tp": 2, "sp": True, "comm": "nccl", "seed": 2, "arch": "llama", "accum": 2},
    {"cp": 3, "zero": 2, "comm": "mpi", "seed": 1, "bucket_mb": 0, "recompute": "none"},
], ids=label)  # fmt: skip
def test_a_ring(launch, options):
    """Keys and values go round while the compute stream is at the block before: whatever comes first."""
    obey(launch, layout(**{**RING, **options}))


def rings():
    """cp 2, 3 and 4 × who carries messages × who comes first × architecture. The other options take turns, or are drawn."""
    r, n = random.Random(SEED), 0
    for cp, comm, seed, arch in itertools.product((2, 3, 4), LAYOUT_AXES["comm"], SEEDS, AXES["arch"]):
        x = {name: r.choice(axis) for name, axis in AXES.items()}
        x |= {"dp": 1, "tp": 1, "sp": False, "attention": "flash", "seq": 24 if cp == 4 else 12, "zero": n % 4}
        x |= {"cp": cp, "cp_order": ("zigzag", "contiguous")[n // 4 % 2], "comm": comm, "seed": seed, "arch": arch}
        if cp == 2 and n % 3:
            x |= {"dp": 2} if n % 3 == 1 else {"tp": 2, "sp": n % 2 == 0, "ffn": 48}
        n += 1
        yield x


@pytest.mark.law
@pytest.mark.parametrize("x", rings(), ids=label)
def test_rings(launch, x):
    obey(launch, x)


# ---- pipelines -------------------------------------------------------------------------------------------------------
# 5 blocks: unequal stages. So many micro-batches that every buffer is used again.
PIPE = "--layers 5 --heads 2 --hidden 32 --seq 12 --lr 3e-3 --warmup 2 --peak-tflops 1 --steps 3 --eval-every 2 --eval-batches 1".split()
ARCHS = {"gpt2": [], "llama": ["--arch", "llama", "--kv-heads", 1, "--ffn", 48]}
# schedule: its flags, and micro-batches a step
SCHEDULES = {
    "1f1b": (["--schedule", "1f1b"], 5), "afab": (["--schedule", "afab"], 5), "zb-h1": (["--schedule", "zb-h1"], 5),
    "interleaved": (["--schedule", "interleaved", "--virtual-stages", 2], 6), "zbv": (["--schedule", "zbv"], 5),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(words, tmp_path_factory):
    """one_rank(arch, sequences a micro-batch, micro-batches) → Run on the CPU."""
    directory, done = tmp_path_factory.mktemp("one"), {}

    def one_rank(arch, size, m):
        if (arch, size, m) not in done:
            command = [*PIPE, *ARCHS[arch], "--data", words, "--micro-batch", size, "--accum", m, "--sample", 20]
            done[arch, size, m] = run_program(build(), command, log=directory / f"{arch}-{size}-{m}.jsonl")
            assert done[arch, size, m].code == 0, f"{done[arch, size, m]}"
        return done[arch, size, m]

    return one_rank


def obey_in_a_pipeline(train, words, one_rank, arch, schedule, ranks, seed, *more, dp=1, precision="fp32"):
    flags, m = SCHEDULES[schedule]
    want = one_rank(arch, 2, m)
    command = [*PIPE, *ARCHS[arch], *flags, "--data", words, "--micro-batch", 2 // dp, "--accum", m, "--pp", 2, "--sample", 20]
    got = train(*command, *more, ranks=ranks, device="emu", precision=precision, env={"EMU_SEED": str(seed)})
    factor = 1 if precision == "fp32" else 1000
    for key, tolerance in ("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE):
        pairs = list(zip(got.curve(key), want.curve(key), strict=True))
        assert all(close(a, b, factor * tolerance) for a, b in pairs), f"{key} {pairs}\nEMU_SEED={seed}\n$ {got.command}"
    for a, b in zip(got.events("val"), want.events("val"), strict=True):
        assert close(a["loss"], b["loss"], factor * LOSS_TOLERANCE)
    if precision == "fp32":  # and the text
        assert got.stdout.split("sample of")[1].split("memory")[0] == want.stdout.split("sample of")[1].split("memory")[0]


@pytest.mark.parametrize("schedule, seed", [("afab", 2), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 2), ("zbv", 1)])
def test_a_pipeline_over_nccl(train, words, one_rank, schedule, seed):
    """Under one of the two unlucky orders (make law: both). NCCL's rules are checked by the way: both ends start messages
    in one order."""
    arch = "llama" if schedule in ("interleaved", "zbv") else "gpt2"
    obey_in_a_pipeline(train, words, one_rank, arch, schedule, 2, seed, "--comm", "nccl")


@pytest.mark.parametrize("schedule, ranks, seed, precision, more", [
    ("1f1b", 2, 1, "fp32", {"--comm": "mpi"}), ("zbv", 2, 2, "fp32", {"--comm": "mpi", "--recompute": "full"}),
    ("zb-h1", 4, 1, "fp32", {"--comm": "nccl", "--tp": 2}), ("interleaved", 4, 2, "fp32", {"--comm": "nccl", "--zero": 2}),
    ("zb-h1", 2, 2, "bf16", {"--comm": "nccl"}),
    pytest.param("afab", 2, 1, "bf16", {"--comm": "nccl"}, marks=pytest.mark.law),
    pytest.param("1f1b", 4, 3, "bf16", {"--comm": "nccl", "--cp": 2}, marks=pytest.mark.law),
], ids=str)  # fmt: skip
def test_a_pipeline_with_all_else(train, words, one_rank, schedule, ranks, seed, precision, more):
    dp = 2 if "--zero" in more else 1
    flags = [f for pair in more.items() for f in pair]
    obey_in_a_pipeline(train, words, one_rank, "gpt2", schedule, ranks, seed, *flags, dp=dp, precision=precision)


@pytest.mark.law
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("comm", ["nccl", "mpi"])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", [[], ["--recompute", "full"], ["--tp", 2], ["--zero", 1], ["--zero", 3]], ids=str)
def test_pipelines(train, words, one_rank, schedule, arch, comm, seed, layout):
    if "--tp" in layout and arch == "llama":
        layout = [*layout, "--sp"]
    dp, ranks = 2 if "--zero" in layout else 1, 4 if "--zero" in layout or "--tp" in layout else 2
    obey_in_a_pipeline(train, words, one_rank, arch, schedule, ranks, seed, *layout, "--comm", comm, dp=dp)


@pytest.mark.law
@pytest.mark.parametrize("schedule, cp, precision, comm, seed, more", [
    ("1f1b", 2, "fp32", "nccl", 1, []), ("zb-h1", 2, "fp32", "nccl", 2, ["--cp-order", "contiguous"]),
    ("zbv", 2, "fp32", "mpi", 3, ["--recompute", "full"]), ("interleaved", 3, "fp32", "nccl", 2, ["--zero", 2]),
    ("afab", 3, "fp32", "mpi", 1, ["--cp-order", "contiguous"]), ("zb-h1", 2, "bf16", "mpi", 1, ["--zero", 3]),
    ("zbv", 3, "bf16", "nccl", 2, []), ("1f1b", 2, "fp32", "nccl", 3, ["--tp", 2]),
], ids=str)  # fmt: skip
def test_rings_in_a_pipeline(train, words, one_rank, schedule, cp, precision, comm, seed, more):
    arch = "gpt2" if schedule in ("zb-h1", "afab") else "llama"
    ranks = 2 * cp * (2 if "--tp" in more else 1)
    flags = ["--cp", cp, "--comm", comm, *more]
    obey_in_a_pipeline(train, words, one_rank, arch, schedule, ranks, seed, *flags, precision=precision)


@pytest.mark.parametrize("zero, comm, seed", [(2, "nccl", 1), (2, "mpi", 2), (3, "nccl", 3)])
def test_slots_that_buckets_share(launch, zero, comm, seed):
    """With four blocks each of the two slots is taken again while the sum of who had it before may be under way."""
    obey(launch, layout(layers=4, dp=2, zero=zero, comm=comm, seed=seed, accum=2))


@pytest.mark.parametrize("options", [
    {"dp": 2, "zero": 0, "comm": "mpi", "accum": 2}, {"dp": 2, "zero": 2, "comm": "nccl", "accum": 2},
    {"tp": 2, "sp": True, "comm": "nccl", "arch": "llama", "kv_heads": 1},
    {"dp": 2, "ep": 2, "tp": 2, "sp": True, "comm": "nccl", "experts": EXPERTS[1], "layers": 1},
    pytest.param({"cp": 2, "comm": "nccl", "arch": "llama", "kv_heads": 1, "accum": 2}, marks=pytest.mark.law),
], ids=label)  # fmt: skip
def test_the_order_of_streams_changes_no_bit(launch, options):
    """By the ring every sum has one order; on two ranks NCCL's has, too, as a + b = b + a."""
    runs = [launch(layout(**options, seed=seed)) for seed in SEEDS]
    assert len({tuple(r.curve("loss")) for r in runs}) == 1
    assert len({tuple(r.curve("grad_norm")) for r in runs}) == 1
    obey(launch, layout(**options))


CURVE = "--arch llama --layers 2 --heads 2 --hidden 64 --ffn 96 --seq 32 --micro-batch 4 --lr 2e-3 --warmup 10 --steps 50".split()


@pytest.mark.parametrize("name, precision, more", [("bf16", "bf16", []), ("fp8", "fp32", ["--fp8", "hybrid"])])
def test_fifty_steps_in_fewer_bits(train, words, name, precision, more):
    """Not the same curve as fp32's on the CPU, but within 0.02 of it."""
    flags = [*CURVE, "--data", words, "--eval-every", 0, "--peak-tflops", 1]
    want = train(*flags).curve("loss")
    got = train(*flags, *more, precision=precision, device="emu", env={"EMU_SEED": "3"}).curve("loss")
    gaps = [abs(a - b) for a, b in zip(got, want, strict=True)]
    print(f"{name}: largest gap {max(gaps):.4f}")
    assert 0 < max(gaps) <= 0.02, gaps
    assert want[-1] < want[0] - 1


# ---- beside the numbers ----------------------------------------------------------------------------------------------
def test_evaluation_sample_and_replicas(train, words):
    flags = ["--data", words, *"--layers 2 --heads 2 --hidden 32 --seq 16 --steps 4 --eval-every 2 --eval-batches 2".split()]
    flags += ["--sample", 30, "--check-replicas", 1, "--peak-tflops", 1]
    cpu = train(*flags, "--micro-batch", 4)
    layouts = "--micro-batch 2 --zero 1 --comm nccl", "--micro-batch 2 --zero 3 --comm mpi", "--micro-batch 4 --tp 2 --sp --comm nccl"
    for layout in layouts:
        emu = train(*flags, *layout.split(), ranks=2, device="emu", env={"EMU_SEED": "2"})
        for a, b in zip(emu.events("val"), cpu.events("val"), strict=True):
            assert close(a["loss"], b["loss"], LOSS_TOLERANCE)
        assert emu.stdout.split("sample of")[1].split("memory")[0] == cpu.stdout.split("sample of")[1].split("memory")[0]
        assert ("all copies of every weight are alike" in emu.stdout) == ("--zero 3" not in layout), emu.stdout


@pytest.mark.parametrize("first, then", [("emu", "cpu"), ("cpu", "emu")])
def test_a_checkpoint_goes_to_another_device(train, words, tmp_path, first, then):
    flags = ["--data", words, *"--layers 2 --heads 2 --hidden 32 --seq 16 --eval-every 0 --peak-tflops 1".split()]
    whole = train(*flags, "--micro-batch", 4, "--steps", 6).curve("loss")
    train(*flags, "--micro-batch", 2, "--zero", 3, "--steps", 3, "--min-lr", 1e-4, "--save", tmp_path, ranks=2, device=first)
    assert len(checkpoint_bytes(tmp_path, 3)) == 2
    rest = train(*flags, "--micro-batch", 4, "--steps", 6, "--resume", tmp_path, device=then).curve("loss")
    again = train(*flags, "--micro-batch", 4, "--steps", 6, "--resume", tmp_path, device=first).curve("loss")
    for a, b in zip(rest, again, strict=True):
        assert close(a, b, LOSS_TOLERANCE)
    assert close(rest[0], whole[3], 1e-2)  # with another schedule of the learning rate


def test_memory(train, words):
    """Every byte that the program asks for is predicted, as on the CPU; what the device holds beside them has rows of its own:
    the emulator's cuBLASLt takes 8 MB and a communicator of NCCL 4; allocations are rounded up to 256 bytes."""
    flags = ["--data", words, *"--layers 2 --heads 2 --hidden 32 --seq 16 --micro-batch 2 --steps 2 --peak-tflops 1".split()]
    mpi = train(*flags, "--zero", 3, "--comm", "mpi", ranks=2, device="emu").one("end")["memory"]
    assert [row["libraries"] for row in mpi] == [8e6, 8e6]
    r = train(*flags, "--zero", 3, "--comm", "nccl", ranks=2, device="emu")
    predicted = r.one("start")["predicted"]
    for row in r.one("end")["memory"]:
        beside = {"context", "libraries", "unaccounted", "peak"}
        assert (row["context"], row["libraries"]) == (500e6, 12e6) and 0 < row["unaccounted"] < 256 * 100, row
        for name in predicted.keys() - beside:
            assert abs(row[name] - predicted[name]) <= 4 * 100, name  # shards differ by an element
        assert row["peak"] >= sum(row[name] for name in ("context", "weights", "optimizer"))
    table = r.stdout.split("memory of a rank")[1]
    assert re.search(r"\n  context +0\.\d+ +0\.\d+\n", table), table


def test_bytes_are_those_of_a_ring(train, words):
    """What is counted for NCCL is what the ring counts, message by message."""
    flags = ["--data", words, *"--layers 2 --heads 2 --kv-heads 1 --hidden 32 --seq 16 --micro-batch 1 --steps 2 --peak-tflops 1".split()]
    layouts = *((3, ["--ffn", 37, "--zero", zero]) for zero in (0, 2, 3)), (2, ["--ffn", 38, "--tp", 2, "--sp"])
    for ranks, layout in layouts:
        nccl, mpi, cpu = (
            {(e["rank"], e["group"], e["op"]): (e["calls"], e["bytes"]) for e in r.one("end")["comm"] if e["group"] != "world"}
            for r in (train(*flags, *layout, "--comm", "nccl", ranks=ranks, device="emu"),
                      train(*flags, *layout, "--comm", "mpi", ranks=ranks, device="emu"),
                      train(*flags, *layout, ranks=ranks))
        )  # fmt: skip
        assert nccl == mpi == cpu and nccl


# ---- what is refused -------------------------------------------------------------------------------------------------
REFUSED = {
    "nccl on a shared GPU": (
        2, ["--comm", "nccl"], {"EMU_DEVICES": "1"}, 2, "--comm nccl: 2 ranks share a GPU, and NCCL takes one each; nearest: mpi"),
    "no GPU": (2, [], {"EMU_DEVICES": "0"}, 2, "no GPU here .*; nearest: make DEVICE=cpu"),
    "fp8 on an A100": (1, ["--fp8", "e4m3"], {"EMU_ARCH": "80"}, 2, r"--fp8 e4m3: .*sm_80.* has no fp8 .*; nearest: leave the flag out"),
    "wide heads": (1, ["--hidden", 272, "--heads", 2], {}, 2, r"--hidden 272: 136 channels a head; .* 128 at most; nearest: --heads 4, or --attention naive"),
    "a small GPU": (1, [], {"EMU_MEMORY": "0.501"}, 2, r"a rank needs 0\.\d{3} GB, 0\.001 GB are free; smaller: .*--micro-batch.*"),
    "half of one": (2, ["--comm", "mpi"], {"EMU_DEVICES": "1", "EMU_MEMORY": "0.56"}, 2, r"a rank needs 0\.037 GB, 0\.030 GB are free; .*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(train, name):
    ranks, more, env, code, line = REFUSED[name]
    flags = "--layers 2 --heads 2 --hidden 64 --seq 16 --steps 2 --peak-tflops 1 --data README.md".split()
    flags = [f for i, f in enumerate(flags) if not (flags[i].startswith("--") and flags[i] in more or i and flags[i - 1] in more)]
    r = train(*flags, *more, ranks=ranks, device="emu", fails=True, env=env)
    assert r.code == code, f"{r}"
    assert re.fullmatch(line, culprit(r.stderr)), r.stderr


def test_ranks_that_share_a_gpu(train, words):
    """Where nothing was asked for it is said what is taken."""
    flags = ["--data", words, *"--layers 1 --heads 2 --hidden 32 --seq 16 --micro-batch 1 --steps 2 --peak-tflops 1".split()]
    shared = "2 ranks share a GPU: their messages go through the host (--comm mpi)"
    assert shared in train(*flags, ranks=2, device="emu", env={"EMU_DEVICES": "1"}).stdout
    assert shared not in train(*flags, ranks=2, device="emu").stdout
    # Whether a host has too few GPUs is one question for all ranks, also for those that see enough.
    mpirun, program = ["mpirun", "--oversubscribe", "-n"], [build(device="emu"), *flags, "--zero", 2]
    sees = ([count, "-x", f"EMU_DEVICES={devices}", *program] for count, devices in ((2, 1), (1, 8)))
    r = run_program(mpirun[0], [*mpirun[1:], *next(sees), ":", "-n", *next(sees)])
    assert r.code == 0 and shared in r.stdout, f"{r}"


def test_nccl_on_the_cpu_is_refused(train):
    r = train("--comm", "nccl", fails=True)
    assert (r.code, culprit(r.stderr)) == (2, "--comm nccl: this build computes on the CPU; nearest: mpi")


# What is asked for, where the GPU is so much smaller than a run needs: AdamW's moments, in the first step; cuBLASLt, at the
# first product; NCCL, before there is a model.
TOO_SMALL = {
    "optimizer": (1, ["--lazy-optimizer"], 0.002, r"0\.\d+ GB of optimizer"),
    "cuBLASLt": (1, [], 0.002, "what is asked of libraries"),
    "NCCL": (2, ["--comm", "nccl"], None, "what is asked of libraries"),
}


@pytest.mark.parametrize("what", TOO_SMALL)
def test_out_of_memory_says_what_and_what_would_help(what, train, words):
    ranks, more, less, asked = TOO_SMALL[what]
    flags = ["--data", words, *"--layers 2 --heads 2 --hidden 128 --seq 16 --micro-batch 1 --steps 2 --peak-tflops 1".split()]
    peak = train(*flags, device="emu").one("end")["memory"][0]["peak"] * 1e-9 if less else 0.503
    r = train(*flags, *more, ranks=ranks, device="emu", fails=True, env={"EMU_MEMORY": f"{peak - (less or 0):.6f}"})
    assert r.code == 3, f"{r}"
    lines = r.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("train: "))
    assert re.fullmatch(rf"train: (rank \d: )?no memory for {asked}, with 0\.\d+ GB held; smaller: --micro-batch, --seq, .*", lines[first])
    assert lines[first + 1].startswith("memory of a rank") and re.match("  context +0", lines[first + 13]), r.stderr


def test_a_resumed_run_is_not_lazy(train, words, tmp_path):
    """Its moments are in the checkpoint: they are counted before the start, like those of any other run."""
    flags = ["--data", words, *"--layers 2 --heads 2 --hidden 128 --seq 16 --micro-batch 1 --peak-tflops 1".split()]
    peak = train(*flags, "--steps", 1, "--save", tmp_path, device="emu").one("end")["memory"][0]["peak"] * 1e-9
    resume = [*flags, "--steps", 2, "--resume", tmp_path, "--lazy-optimizer"]
    r = train(*resume, device="emu", fails=True, env={"EMU_MEMORY": f"{peak - 0.010:.6f}"})
    assert r.code == 2 and culprit(r.stderr).startswith("a rank needs"), f"{r}"
    assert "--lazy-optimizer changes nothing" in train(*resume, device="emu").stdout


# ---- what goes wrong on one rank -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def faulty():
    return build(program="tests/train_with_faults", device="emu")


@pytest.mark.parametrize("comm", ["nccl", "mpi"])
@pytest.mark.parametrize("kind", ["stop", "sleep"])
def test_the_culprit_is_named(faulty, kind, comm):
    r = run_program(faulty, [*ENDLESS, "--comm", comm, "--zero", 2], 3, timeout=90, env={"FAULT": f"{kind}:2:9"})
    assert r.code == 3, f"{r}"
    seen = {"stop": "rank 2 has not been heard of for", "sleep": "rank 2 has not come; it last started"}[kind]
    assert culprit(r.stderr).startswith(seen), r.stderr


@pytest.mark.parametrize("kind", ["skip", "swap"])
def test_nccl_calls_that_do_not_fit(faulty, kind):
    """A call left out meets another one, of another size or kind, and both are named."""
    r = run_program(faulty, [*ENDLESS, "--comm", "nccl", "--zero", 2], 2, timeout=90, env={"FAULT": f"{kind}:1:13"})
    assert r.code == 3, f"{r}"
    assert "rank 1 is in" in r.stderr and "where rank 0 is in" in r.stderr, r.stderr


# ---- builds ----------------------------------------------------------------------------------------------------------
def test_one_rank_without_mpi(words):
    r = run_program(build(mpi=0, device="emu"), ["--data", words, "--steps", 2, "--layers", 1, "--seq", 16, "--micro-batch", 1])
    assert r.code == 0, f"{r}"
    assert not re.search(r"lib(mpi|nccl)\.", subprocess.run(["ldd", build(mpi=0, device="emu")], capture_output=True, text=True).stdout)

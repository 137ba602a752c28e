"""Runs that end before their end: resumed, told to stop, killed, and what they leave behind."""

import json
import os
import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest

import reference
from conftest import SEED, Run, build, checkpoint_bytes, close, covering, environment, label, together

BATCH = 12  # sequences a step, for one, two and three ranks
MODEL = "--layers 2 --hidden 32 --heads 4"
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4  # the law's
FLAT = "--lr 3e-3 --min-lr 3e-3"  # a learning rate that does not depend on --steps
SECONDS = 60


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def flags(text, *more, ranks=1, seq=32):
    """The run's flags, then more: strings of several words, or single values."""
    words = [w for part in more for w in (part.split() if isinstance(part, str) else [part])]
    step = ["--micro-batch", BATCH // ranks, "--warmup", 3, "--peak-tflops", 1]
    return [*MODEL.split(), "--seq", seq, "--data", text, *step, *words]


def checkpoints(directory):
    return sorted(int(p.name[5:]) for p in directory.glob("step-*") if (p / "complete").exists())


def curves(run, first=1):
    """(loss, gradient norm, learning rate) of every step from `first` on."""
    return {e["step"]: (e["loss"], e["grad_norm"], e["lr"]) for e in run.events("step") if e["step"] >= first}


def notes(run):
    return [line for line in run.stdout.splitlines() if line.startswith("note:")]


# ---- runs in the background ----------------------------------------------------------------------------------------
class Running:
    def __init__(self, command, log, **env):
        self.command, self.log, self.out, self.err = list(map(str, command)), log, f"{log}.out", f"{log}.err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment(**env),
                start_new_session=True,
            )  # fmt: skip

    def events(self):
        """Of the log's whole lines: the last may still be on its way."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_step(self, n):
        until = time.monotonic() + SECONDS
        while not [e for e in self.events() if e["event"] == "step" and e["step"] >= n]:
            assert self.process.poll() is None, f"it ended before step {n}\n{self.finish()}"
            assert time.monotonic() < until, f"not at step {n} after {SECONDS} s: {self.command}"
            time.sleep(0.002)

    def processes(self):
        """This one and all below it."""
        parent = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as f:
                    parent[int(pid)] = int(f.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                pass
        found = [self.process.pid]
        for pid in found:
            found += [child for child, p in parent.items() if p == pid]
        return found

    def ranks(self):
        """Processes of the program under mpirun, by rank."""
        found = {}
        for pid in self.processes():
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    rank = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)", f.read())
            except (FileNotFoundError, ProcessLookupError):
                rank = None
            if rank:
                found[int(rank[1])] = pid
        return found

    def kill_all(self):
        """As if the power had failed: no process gets to do anything more."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def finish(self, seconds=SECONDS):
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            code = None
        with open(self.out) as out, open(self.err) as err:
            return Run(" ".join(self.command), code, out.read(), err.read(), self.events())


@pytest.fixture
def start(tmp_path):
    """start(flags, ranks, launcher=[…], precision) → Running; ended with the test at the latest."""
    running = []

    def start(words, ranks=1, launcher=(), precision="fp32"):
        log = tmp_path / f"running-{len(running)}"
        by_program = ["--ranks", ranks] if ranks > 1 and not launcher else []
        running.append(Running([*launcher, build(precision), *by_program, *words, "--log", log], log))
        return running[-1]

    yield start
    for r in running:
        if r.process.poll() is None:
            r.kill_all()


# ---- the same run, in two parts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision, model", [
    ("fp32", "--arch gpt2 --accum 2"),
    ("fp32", "--arch llama --kv-heads 2 --lazy-optimizer"),
    ("bf16", "--arch gpt2 --recompute full"),
    ("bf16", "--arch llama --accum 2 --grad-accum-fp32"),
])  # fmt: skip
def test_bit_for_bit(precision, model, ranks, train, text, tmp_path):
    """Saving on the way changes nothing, and neither does going on from there: losses, norms, rates and final bytes."""
    run = flags(text, model, "--steps 9", ranks=ranks)
    whole = train(*run, "--save", tmp_path / "whole", ranks=ranks, precision=precision)
    saving = train(*run, *f"--save-every 4 --keep 9 --save {tmp_path}/parts".split(), ranks=ranks, precision=precision)
    assert checkpoints(tmp_path / "parts") == [4, 8, 9]
    assert curves(saving) == curves(whole)
    for step in (4, 8):
        last = tmp_path / f"from-{step}"
        resumed = train(*run, "--resume", tmp_path / f"parts/step-{step:08d}", "--save", last, ranks=ranks,
                        precision=precision)  # fmt: skip
        assert curves(resumed) == curves(whole, step + 1)
        assert resumed.one("val") == whole.one("val") and not notes(resumed)
        assert checkpoint_bytes(last, 9) == checkpoint_bytes(tmp_path / "whole", 9)
    assert checkpoint_bytes(tmp_path / "parts", 9) == checkpoint_bytes(tmp_path / "whole", 9)


@pytest.mark.parametrize("before, after", [(1, 2), (1, 3), (3, 1), (2, 3)])
def test_another_number_of_ranks(before, after, train, text, tmp_path):
    """Not the same bits, but the same model, as the law has it."""
    whole = train(*flags(text, "--steps 9", ranks=before), ranks=before)
    save = ["--save-every", 4, "--keep", 9, "--save", tmp_path / "ckpt"]
    train(*flags(text, "--steps 9", ranks=before), *save, ranks=before)
    resume = ["--resume", tmp_path / "ckpt/step-00000004"]
    resumed = train(*flags(text, "--steps 9", ranks=after), *resume, ranks=after)
    want, got = curves(whole, 5), curves(resumed)
    assert list(got) == list(want) and not notes(resumed)
    for step, (loss, norm, lr) in got.items():
        assert close(loss, want[step][0], LOSS_TOLERANCE) and close(norm, want[step][1], NORM_TOLERANCE), (
            step,
            got,
            want,
        )
        assert lr == want[step][2]


@pytest.mark.parametrize("before, after", [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_precision(before, after, train, text, tmp_path):
    """A checkpoint is fp32 whatever wrote it."""
    whole = train(*flags(text, FLAT, "--steps 40"), precision=before)
    train(*flags(text, FLAT, "--steps 20", "--save", tmp_path / "ckpt"), precision=before)
    resumed = train(*flags(text, FLAT, "--steps 40", "--resume", tmp_path / "ckpt"), precision=after)
    assert close(resumed.curve("loss")[0], whole.curve("loss")[20], 5e-3)
    assert close(resumed.curve("loss")[-1], whole.curve("loss")[-1], 2e-2)


# ---- on another layout ---------------------------------------------------------------------------------------------
RESHARD_BATCH = 24  # for every dp × accum below


def laid_out(text, *more, rate=FLAT, dp=1, tp=1, sp=False, cp=1, cp_order="zigzag", pp=1, schedule="1f1b", zero=0,
             bucket_mb=0, accum=1, ffn=77):  # fmt: skip
    """The flags of a run of odd sizes: hardly a shard begins where a tensor does, nor where another layout's does. No
    --tp cuts --ffn 77; above --tp 2, two ranks or more hold the same key/value head; of three stages the first is longer."""
    model = f"--layers 4 --hidden 32 --heads 8 --kv-heads 2 --ffn {ffn} --seq 16 --warmup 3 --peak-tflops 1".split()
    step = ["--micro-batch", RESHARD_BATCH // (dp * accum), "--accum", accum, "--data", text, *rate.split()]
    layout = ["--tp", tp, *(["--sp"] if sp else []), "--zero", zero, "--bucket-mb", bucket_mb]
    layout += ["--cp", cp, "--cp-order", cp_order] if cp > 1 else []
    layout += ["--pp", pp, "--schedule", schedule] if pp > 1 else []
    return [*model, *step, *layout, *[w for part in more for w in str(part).split()]]


def ranks_of(layout):
    return layout.get("dp", 1) * layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)


def obeys_the_law(got, want):
    """The same steps, and the law's tolerances."""
    assert list(got) == list(want)
    for step, (loss, norm, _) in got.items():
        assert close(loss, want[step][0], LOSS_TOLERANCE), f"step {step}: loss {loss}, not {want[step][0]}"
        assert close(norm, want[step][1], NORM_TOLERANCE), f"step {step}: norm {norm}, not {want[step][1]}"


def test_four_ranks_then_two_then_one(train, text, tmp_path):
    whole, got = curves(train(*laid_out(text, "--steps 30"))), {}
    save = ["--save", tmp_path / "ckpt"]
    for steps, ranks, zero in ((10, 4, 3), (20, 2, 1), (30, 1, 0)):
        resume = ["--resume", tmp_path / "ckpt"] if got else []
        r = train(*laid_out(text, "--steps", steps, dp=ranks, zero=zero), *save, *resume, ranks=ranks)
        assert not notes(r), f"{r}"
        got |= curves(r)
    obeys_the_law(got, whole)


# A checkpoint knows nothing of who wrote it. Each layout writes one and goes on from that of the one before.
CHAIN = [
    {"tp": 4, "sp": True, "dp": 2, "zero": 2},
    {},
    {"tp": 8},
    {"dp": 3, "zero": 3},
    {"cp": 2, "cp_order": "contiguous", "tp": 2, "zero": 1},
    {"tp": 4, "sp": True, "bucket_mb": 1000},
]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_parts_of_sequences_then_whole_ones(arch, train, text, tmp_path):
    """Whoever sees which tokens, the weights are all there; with --zero they are shared out over dp and cp together."""
    save, model, got = ["--save", tmp_path / "ckpt"], ["--arch", arch], {}
    whole = train(*laid_out(text, *model, "--steps", 8))
    for i, layout in enumerate(({"cp": 2, "zero": 3}, {}, {"cp": 4, "dp": 2, "zero": 1}, {"dp": 2, "zero": 3})):
        resume = ["--resume", tmp_path / "ckpt"] if got else []
        r = train(*laid_out(text, *model, "--steps", 2 * (i + 1), **layout), *save, *resume, ranks=ranks_of(layout))
        assert not notes(r), f"{r}"
        got |= curves(r)
    obeys_the_law(got, curves(whole))
    assert close(r.one("val")["loss"], whole.one("val")["loss"], LOSS_TOLERANCE)


def test_from_slices_to_other_slices(train, text, tmp_path):
    """Key/value heads that two or four ranks hold are written once, and read by each; the validation loss at the end,
    too, is the one-rank run's."""
    save, size, got = ["--save", tmp_path / "ckpt"], {"ffn": 152}, {}
    whole = train(*laid_out(text, "--steps", 2 * len(CHAIN), **size))
    for i, layout in enumerate(CHAIN):
        resume = ["--resume", tmp_path / "ckpt"] if got else []
        r = train(*laid_out(text, "--steps", 2 * (i + 1), **size, **layout), *save, *resume, ranks=ranks_of(layout))
        assert not notes(r), f"{r}"
        got |= curves(r)
    obeys_the_law(got, curves(whole))
    assert close(r.one("val")["loss"], whole.one("val")["loss"], LOSS_TOLERANCE)


# Four stages' checkpoint is read by one, one's by two. zbv has both ends of the model on rank 0, 1f1b on two ranks; and
# interleaved blocks 0 and 2, not 0 and 1.
PIPELINES = [
    {"pp": 4, "zero": 1},
    {},
    {"pp": 2, "dp": 2, "zero": 3, "accum": 2},
    {"pp": 2, "schedule": "zbv", "accum": 3},
    {"pp": 2, "accum": 2},
    {"pp": 2, "schedule": "interleaved", "accum": 2, "tp": 2, "sp": True},
]


@pytest.mark.parametrize("tie", [[], ["--tie"]], ids=["untied", "tied"])
def test_from_stages_to_other_stages(tie, train, text, tmp_path):
    save, model, got = ["--save", tmp_path / "ckpt"], ["--arch llama", *tie], {}
    size = {"ffn": 76}
    whole = train(*laid_out(text, *model, "--steps", 2 * len(PIPELINES), **size))
    for i, layout in enumerate(PIPELINES):
        resume = ["--resume", tmp_path / "ckpt"] if got else []
        run = laid_out(text, *model, "--steps", 2 * (i + 1), **size, **layout)
        r = train(*run, *save, *resume, ranks=ranks_of(layout))
        assert not notes(r), f"{r}"
        got |= curves(r)
    obeys_the_law(got, curves(whole))
    assert close(r.one("val")["loss"], whole.one("val")["loss"], LOSS_TOLERANCE)


@pytest.mark.parametrize("precision, more, layout", [
    ("fp32", "", {"pp": 3, "accum": 3, "schedule": "zb-h1"}),
    ("bf16", "--grad-accum-fp32 --arch llama --tie", {"pp": 2, "dp": 2, "zero": 3, "accum": 3, "schedule": "zbv"}),
])  # fmt: skip
def test_a_pipeline_bit_for_bit(precision, more, layout, train, text, tmp_path):
    """Saved on the way and resumed, the same stages go on as if nothing had happened."""

    def part(steps, name, *resume):
        run = [*laid_out(text, more, "--steps", steps, **layout), "--save", tmp_path / name]
        return train(*run, *resume, ranks=ranks_of(layout), precision=precision)

    whole = curves(part(6, "whole"))
    assert curves(part(3, "parts")) | curves(part(6, "parts", "--resume", tmp_path / "parts")) == whole
    assert checkpoint_bytes(tmp_path / "parts", 6) == checkpoint_bytes(tmp_path / "whole", 6)


def test_the_same_weights_whoever_holds_them(train, text, tmp_path):
    """Initial values do not depend on the layout, nor does what is done with them: files of the same bytes, the same
    validation loss, the same sample, whose first contexts neither --sp nor --cp divides."""
    size, still, seen = {"ffn": 152, "rate": "--lr 0 --min-lr 0"}, "--arch llama --steps 1 --sample 40", []
    for i, layout in enumerate(({}, {"tp": 4}, {"tp": 4, "sp": True}, {"dp": 2, "tp": 2, "sp": True, "zero": 3},
                                {"pp": 4}, {"pp": 2, "schedule": "zbv", "accum": 3, "tp": 2, "zero": 1},
                                {"cp": 2}, {"cp": 2, "cp_order": "contiguous"}, {"cp": 4, "tp": 2, "sp": True, "zero": 3},
                                {"cp": 2, "cp_order": "contiguous", "pp": 2, "dp": 2})):  # fmt: skip
        run = [*laid_out(text, still, **size, **layout), "--save", tmp_path / f"{i}"]
        r = train(*run, ranks=ranks_of(layout))
        (sample,) = re.findall("sample of 40 bytes.*:\n((?s:.*))\nmemory", r.stdout)
        weights = (tmp_path / f"{i}/step-00000001/weights.safetensors").read_bytes()
        seen.append((weights, sample, r.one("val")["loss"]))
        assert seen[-1][:2] == seen[0][:2], f"{r}"
        assert close(seen[-1][2], seen[0][2], LOSS_TOLERANCE)


FROM = {
    "dp": [1, 2, 3, 4], "tp": [1, 2, 4], "sp": [False, True], "cp": [1, 2], "pp": [1, 2, 3], "zero": [0, 1, 2, 3],
    "bucket_mb": [0, 0.08, 1000], "accum": [1, 4],
}  # fmt: skip
INTO = {f"then_{name}": values for name, values in FROM.items()}


def few(x):
    return ranks_of({name.removeprefix("then_"): n for name, n in x.items()}) <= 6


AXES = {"ffn": [77, 76], **FROM, **INTO}
for when in "", "then_":
    AXES = together(AXES, [f"{when}{name}" for name in ("dp", "tp", "cp", "pp")], few)


def layouts(x):
    """Pipelines of two ranks have whichever of two schedules their micro-batches suffice for."""
    found = [{name: x[f"{when}{name}"] for name in FROM} for when in ("", "then_")]
    return [{**y, "schedule": "zbv" if y["pp"] == 2 and y["accum"] == 4 else "1f1b"} for y in found]


def legal(x):
    return all(
        x["ffn"] % y["tp"] == 0 and (y["tp"] > 1 or not y["sp"])
        and RESHARD_BATCH % (y["dp"] * y["accum"]) == 0 for y in layouts(x)
    )  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the checkpoints are that several cases start from, and the one-rank runs' curves, once they are known."""
    return tmp_path_factory.mktemp("kept"), {}


@pytest.mark.parametrize("x", covering(AXES, legal, SEED, tries=200, most=2500), ids=label)
def test_from_any_layout_into_any_other(x, kept, train, text):
    directory, whole = kept
    size, (before, after) = {"ffn": x["ffn"]}, layouts(x)
    if x["ffn"] not in whole:
        whole[x["ffn"]] = curves(train(*laid_out(text, "--steps 7", **size)), 5)
    place = directory / label(size | before)
    if not place.exists():
        train(*laid_out(text, "--steps 4", **size, **before), "--save", place, ranks=ranks_of(before))
    resumed = train(*laid_out(text, "--steps 7", **size, **after), "--resume", place, ranks=ranks_of(after))
    obeys_the_law(curves(resumed), whole[x["ffn"]])


@pytest.mark.parametrize("precision, more, ranks, stages", [
    ("fp32", "", 2, (3, 0, 2)), ("fp32", "--arch llama", 3, (0, 1, 3)),
    ("bf16", "", 3, (2, 3, 1)), ("bf16", "--grad-accum-fp32 --arch llama", 2, (1, 2, 0)),
])  # fmt: skip
def test_another_stage_bit_for_bit(precision, more, ranks, stages, train, text, tmp_path):
    """Only who holds what is another: the run goes on as if nothing had happened."""

    def part(steps, zero, name, *resume):
        run = [*laid_out(text, more, "--steps", steps, dp=ranks, zero=zero), "--save", tmp_path / name]
        return train(*run, *resume, ranks=ranks, precision=precision)

    whole, got = curves(part(9, stages[0], "whole")), {}
    for steps, zero in zip((3, 6, 9), stages):
        got |= curves(part(steps, zero, "parts", *(["--resume", tmp_path / "parts"] if got else [])))
    assert got == whole
    assert checkpoint_bytes(tmp_path / "parts", 9) == checkpoint_bytes(tmp_path / "whole", 9)


@pytest.mark.parametrize("precision, more", [
    ("fp32", ""), ("bf16", ""), ("bf16", "--grad-accum-fp32 --arch llama --tie"),
])  # fmt: skip
def test_nothing_is_rounded_on_the_way(precision, more, train, text, tmp_path):
    """Masters and moments go from layout to layout as they are. At a learning rate of 0 the weights stay, and where next
    to nothing is left of the gradient the moments only decay: whatever the layout, the same bytes."""

    def saved(name, *flags, **layout):
        run = [*laid_out(text, more, *flags, ffn=76, **layout), "--save", tmp_path / name]
        train(*run, ranks=ranks_of(layout), precision=precision)
        return tmp_path / name

    before = saved("before", "--steps 4", dp=3, tp=2, sp=True, zero=2)
    still = {"rate": "--lr 0 --min-lr 0 --grad-clip 1e-300"}
    layouts = ({}, {"dp": 2, "zero": 1}, {"dp": 3, "zero": 3}, {"tp": 4, "bucket_mb": 0.08},
               {"dp": 2, "tp": 2, "sp": True, "zero": 3, "bucket_mb": 1000})  # fmt: skip
    after = [saved(f"after-{i}", "--steps 5 --resume", before, **still, **x) for i, x in enumerate(layouts)]
    one, *others = (checkpoint_bytes(directory, 5) for directory in after)
    assert all(other == one for other in others)

    def tensors(directory, step, name):
        return reference.load_safetensors(directory / f"step-{step:08d}" / f"{name}.safetensors")[0]

    old, new = (tensors(d, step, "weights") for d, step in ((before, 4), (after[0], 5)))
    assert old.keys() == new.keys() and all(np.array_equal(old[name], new[name]) for name in old)
    old, new = (tensors(d, step, "optimizer") for d, step in ((before, 4), (after[0], 5)))
    for name, x in old.items():
        assert np.array_equal(new[name], x * np.float32(0.9 if name.endswith(".m") else 0.95)), name


# ---- told to end ---------------------------------------------------------------------------------------------------
MPIRUN = ["mpirun", "-n", 2, "--oversubscribe"]


@pytest.mark.parametrize("ranks, launcher, sent", [
    (1, [], signal.SIGUSR1), (1, [], signal.SIGTERM),
    (2, [], signal.SIGUSR1), (2, [], signal.SIGTERM),
    (2, MPIRUN, signal.SIGUSR1),
], ids=["USR1", "TERM", "ranks-USR1", "ranks-TERM", "mpirun-USR1"])  # fmt: skip
def test_signal_saves_and_ends(ranks, launcher, sent, start, train, text, tmp_path):
    """Exit code 0, a checkpoint of the last step that the log has, and from there on as if nothing had happened."""
    run = flags(text, FLAT, ranks=ranks)
    r = start([*run, "--steps", 10**6, "--save", tmp_path / "ckpt"], ranks, launcher)
    r.wait_for_step(5)
    r.process.send_signal(sent)
    r = r.finish()
    assert r.code == 0, f"{r}"
    last = max(curves(r))
    assert f"asked to end at step {last}, saved" in r.stdout.replace("\r", "\n"), f"{r}"
    assert checkpoints(tmp_path / "ckpt") == [last]
    assert r.one("end")["loss"] == curves(r)[last][0]

    end = ["--steps", last + 3]
    whole = train(*run, *end, "--save", tmp_path / "whole", ranks=ranks)
    resumed = train(*run, *end, "--resume", tmp_path / "ckpt", "--save", tmp_path / "ckpt", ranks=ranks)
    assert {**curves(r), **curves(resumed)} == curves(whole)
    assert checkpoint_bytes(tmp_path / "ckpt", last + 3) == checkpoint_bytes(tmp_path / "whole", last + 3)


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 1), (3, 2), (2, 3)])
def test_signal_without_save(ranks, zero, start, text, tmp_path):
    """Weights may be on their way when the last step is done, and no forward awaits them."""
    run = [*flags(text, ranks=ranks), "--zero", zero, "--steps", 10**6]
    run[run.index("--hidden") + 1] = 512
    r = start(run, ranks)
    r.wait_for_step(2)
    r.process.send_signal(signal.SIGTERM)
    r = r.finish()
    assert r.code == 0 and "nothing saved without --save" in r.stdout, f"{r}"


def test_signal_while_sampling(start, text):
    """What has been drawn is shown, and said to be less."""
    r = start([*flags(text), "--steps", 1, "--sample", 10**6])
    r.wait_for_step(1)
    time.sleep(0.5)
    r.process.send_signal(signal.SIGTERM)
    r = r.finish()
    count = re.search(r"sample of (\d+) bytes after step 1, asked to end:", r.stdout)
    assert r.code == 0 and count and int(count[1]) < 10**6, f"{r}"


def test_signal_to_one_rank_ends_all(start, text, tmp_path):
    """Slurm signals every rank; a user with kill signals one. All save the same step."""
    r = start([*flags(text, ranks=2), "--steps", 10**6, "--save", tmp_path / "ckpt"], 2)
    r.wait_for_step(2)
    os.kill(r.ranks()[1], signal.SIGUSR1)
    r = r.finish()
    assert r.code == 0 and checkpoints(tmp_path / "ckpt") == [max(curves(r))], f"{r}"


# ---- killed --------------------------------------------------------------------------------------------------------
def alive(pids):
    """Those that have not ended; one that has, and of which nobody has taken note yet, is no more."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as f:
                found += [pid] if f.read().rpartition(")")[2].split()[0] not in "ZX" else []
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def strike(running, victim, random):
    """Kills one rank, mpirun, or all: every process of the job ends in seconds, the one in front not with code 0."""
    everyone, ranks = running.processes(), list(running.ranks().values())
    launcher = [pid for pid in everyone[1:] if pid not in ranks][:1]  # its parent is the one in front
    for pid in {"rank": [random.choice(ranks or everyone)], "mpirun": launcher, "all": everyone}[victim]:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while running.process.poll() is None or alive(everyone):
        assert time.monotonic() < until, f"{victim} killed, and processes {alive(everyone)} go on: {running.command}"
        time.sleep(0.01)
    assert running.process.returncode != 0, f"{running.finish()}"


@pytest.mark.parametrize("ranks, kills", [(1, 6), (2, 7), (3, 7), (4, 6)])
def test_killed_at_any_moment(ranks, kills, start, train, text, tmp_path):
    """Again and again, while it saves every step: the newest checkpoint loads, and the run goes on from there, to the
    bit on as many ranks at any stage, and as the law has it on any other number."""
    r, directory, seen, halves = random.Random(SEED * 10 + ranks), tmp_path / "ckpt", {}, 0

    def run(ranks, *more):
        return laid_out(text, *more, dp=ranks, zero=r.choice((0, 1, 2, 3)) if ranks > 1 else 0)

    for i in range(kills):
        first = checkpoints(directory)[-1] if i else 0
        resume = ["--resume", directory] if i else []
        save = ["--steps", 10**6, "--save-every", 1, "--save", directory]
        running = start([*run(ranks), *resume, *save], ranks)
        running.wait_for_step(first + 1 + r.randrange(4))
        time.sleep(r.random() * 0.05)
        victim = r.choice(("rank", "mpirun", "all")) if ranks > 1 else "all"
        strike(running, victim, r)
        halves += any(directory.glob(".step-*.partial"))
        for step, values in curves(Run("", None, "", "", running.events())).items():
            assert seen.setdefault(step, values) == values, f"step {step} is another; next, {victim} was killed"
    newest = checkpoints(directory)[-1]
    print(f"{ranks} ranks, seed {SEED}: killed {kills} times, {halves} in a save; at step {newest}")
    assert newest >= kills
    whole = train(*run(ranks), "--save", tmp_path / "whole", "--steps", newest + 2, ranks=ranks)
    other = r.choice([n for n in (1, 2, 3, 4) if n != ranks])
    elsewhere = train(*run(other), "--resume", directory, "--steps", newest + 2, ranks=other)
    obeys_the_law(curves(elsewhere), curves(whole, newest + 1))
    resumed = train(*run(ranks), "--resume", directory, "--save", directory, "--steps", newest + 2, ranks=ranks)
    assert {**seen, **curves(resumed)} == {**curves(whole), **{k: v for k, v in seen.items() if k > newest + 2}}
    assert checkpoint_bytes(directory, newest + 2) == checkpoint_bytes(tmp_path / "whole", newest + 2)
    left = {p.name for p in directory.iterdir()}
    assert left == {".lock", *(f"step-{s:08d}" for s in checkpoints(directory))}, "half-written files stay"


def test_one_rank_killed(start, train, text, tmp_path):
    """The others end in seconds, exit code 3, one line; what was saved before loads."""
    run = flags(text, "--save-every 1", "--save", tmp_path / "ckpt", ranks=2)
    r = start([*run, "--steps", 10**6], 2)
    r.wait_for_step(3)
    ranks = r.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    done = r.finish(20)
    assert done.code == 3, f"{done}"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and re.search(r"^train: a rank was ended by signal 9 \(Killed\)", lines[0]), f"{done}"
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{ranks[0]}"):
        assert time.monotonic() < until, "rank 0 goes on"
        time.sleep(0.05)
    newest = checkpoints(tmp_path / "ckpt")[-1]
    resumed = train(*run, "--resume", tmp_path / "ckpt", "--steps", newest + 1, ranks=2)
    assert resumed.one("step")["step"] == newest + 1


def test_what_a_crash_leaves(train, text, tmp_path):
    """A stale lock, a half-written checkpoint and one without its marker: neither taken for whole, nor in the way."""
    run = flags(text, "--save", tmp_path / "ckpt")
    train(*run, "--steps", 3)
    for name in (".step-00000004.partial", "step-00000009"):
        (tmp_path / "ckpt" / name).mkdir()
        (tmp_path / "ckpt" / name / "weights.safetensors").write_bytes(b"half of it")
    (tmp_path / "ckpt/.lock").write_bytes(b"left by 12345")
    (tmp_path / "ckpt/step-notes.txt").write_text("the user's own")
    resumed = train(*run, "--steps", 4, "--resume", tmp_path / "ckpt")
    assert list(curves(resumed)) == [4]
    left = {p.name for p in (tmp_path / "ckpt").iterdir()}
    assert left == {".lock", "step-notes.txt", "step-00000003", "step-00000004"}


def test_keep(train, text, tmp_path):
    for keep, want in ((1, [6]), (3, [4, 5, 6])):
        directory = tmp_path / str(keep)
        train(*flags(text, f"--steps 6 --save-every 1 --keep {keep} --save {directory}"))
        assert checkpoints(directory) == want
        assert {p.name for p in directory.iterdir()} == {".lock", *(f"step-{s:08d}" for s in want)}
    train(*flags(text, f"--steps 6 --save-every 2 --save {tmp_path}/default"))
    assert checkpoints(tmp_path / "default") == [4, 6]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_save_into_one_directory(ranks, start, train, text, tmp_path):
    """The second is refused, in one line, while the first lives; then it may."""
    run = flags(text, "--save", tmp_path / "ckpt", ranks=ranks)
    first = start([*run, "--steps", 10**6])
    first.wait_for_step(1)
    second = start([*run, "--steps", 10**6], ranks).finish()
    lines = second.stderr.splitlines()
    assert second.code == 2 and not second.events("step"), f"{second}"
    assert len(lines) == 1 and re.search("^train: .*another running program saves into .*ckpt", lines[0]), f"{second}"
    first.process.send_signal(signal.SIGTERM)
    assert first.finish().code == 0
    train(*run, "--steps", 1, ranks=ranks)


# ---- what may differ -----------------------------------------------------------------------------------------------
def test_more_steps(train, text, tmp_path):
    """The schedule is that of the new --steps; the data goes on."""
    train(*flags(text, "--steps 6", "--save", tmp_path / "ckpt"))
    resumed = train(*flags(text, "--steps 10", "--resume", tmp_path / "ckpt"))
    assert list(curves(resumed)) == [7, 8, 9, 10] and not notes(resumed)
    rates = [reference.learning_rate(step, 10, lr=1e-3, min_lr=1e-4, warmup=3) for step in range(6, 10)]
    assert all(map(close, resumed.curve("lr"), rates, [1e-6] * 4)), (resumed.curve("lr"), rates)


def test_what_is_said_in_one_line(train, text, tmp_path):
    """Another global batch, other data: allowed, and noted."""
    train(*flags(text, "--steps 3", "--save", tmp_path / "ckpt"))
    again = ["--steps", 5, "--resume", tmp_path / "ckpt"]
    (note,) = notes(train(*flags(text, "--accum 2"), *again))
    assert re.search(rf"{BATCH} sequences a step, this run takes {2 * BATCH}", note)
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[:30_000])
    (note,) = notes(train(*flags(other), *again))
    assert re.search("other data", note)
    assert not notes(train(*flags(text), *again))


def test_model_comes_from_the_checkpoint(train, text, tmp_path):
    """--resume alone knows the model; --init too."""
    saved = train(*flags(text, "--arch llama --kv-heads 2 --ffn 40 --steps 3", "--save", tmp_path / "ckpt"))
    for source in (["--resume", tmp_path / "ckpt"], ["--init", tmp_path / "ckpt/step-00000003/weights.safetensors"]):
        r = train("--data", text, "--micro-batch", BATCH, "--steps", 4, *source, "--save", tmp_path / "again")
        assert r.one("start")["params"] == saved.one("start")["params"]
        assert r.one("start")["tokens_per_step"] == saved.one("start")["tokens_per_step"]
        _, meta = reference.load_safetensors(tmp_path / "again/step-00000004/weights.safetensors")
        assert (meta["arch"], meta["kv_heads"], meta["ffn"], meta["seq"]) == ("llama", "2", "40", "32")


def test_longer_sequences(train, text, tmp_path):
    """Rotary positions have no table that ends; a learned table serves what is shorter."""
    train(*flags(text, "--arch llama --steps 3", "--save", tmp_path / "llama"))
    r = train(*flags(text, "--arch llama --steps 5 --resume", tmp_path / "llama", seq=80))
    assert list(curves(r)) == [4, 5] and r.one("start")["tokens_per_step"] == 80 * BATCH
    train(*flags(text, "--arch gpt2 --steps 3", "--save", tmp_path / "gpt2"))
    r = train(*flags(text, "--steps 5 --resume", tmp_path / "gpt2", seq=20))
    assert list(curves(r)) == [4, 5] and r.one("start")["tokens_per_step"] == 20 * BATCH


def test_init_takes_weights_only(train, text, tmp_path):
    """The trained model, with nothing else of its run: steps, schedule and moments start anew."""
    trained = train(*flags(text, "--steps 60 --lr 3e-3", "--save", tmp_path / "ckpt"))
    weights = tmp_path / "ckpt/step-00000060/weights.safetensors"
    r = train(*flags(text, "--steps 1 --lr 0 --grad-clip 0 --init", weights, "--save", tmp_path / "init"))
    assert r.one("val")["loss"] == trained.one("val")["loss"]
    step = r.one("step")
    assert step["step"] == 1 and step["loss"] < 4
    saved, _ = reference.load_safetensors(tmp_path / "init/step-00000001/weights.safetensors")
    moments, _ = reference.load_safetensors(tmp_path / "init/step-00000001/optimizer.safetensors")
    for name, w in reference.load_safetensors(weights)[0].items():
        assert np.array_equal(saved[name], w), name
    first = np.sqrt(sum(float((m.astype(float) ** 2).sum()) for name, m in moments.items() if name.endswith(".m")))
    assert close(first, 0.1 * step["grad_norm"], 1e-4), "the first moment is (1 − β1) g, and nothing older"
    warm = train(*flags(text, "--steps 30 --lr 3e-3 --init", weights))
    assert close(warm.curve("lr")[0], 1e-3, 1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_looking_changes_nothing(ranks, train, text, tmp_path):
    """Evaluation every step and a sample at the end leave losses, norms and the checkpoint as they were."""
    plain = train(*flags(text, "--steps 8", "--save", tmp_path / "plain", ranks=ranks), ranks=ranks)
    looked = train(*flags(text, "--steps 8 --eval-every 1 --sample 50", "--save", tmp_path / "looked", ranks=ranks),
                   ranks=ranks)  # fmt: skip
    assert len(looked.events("val")) == 8 and len(plain.events("val")) == 1
    assert curves(looked) == curves(plain)
    assert checkpoint_bytes(tmp_path / "looked", 8) == checkpoint_bytes(tmp_path / "plain", 8)


# ---- what must not be lost, and what a resumed run must know -----------------------------------------------------------
def test_other_peoples_files_stay(train, text, tmp_path):
    for step in (2, 7):
        (tmp_path / f"ckpt/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"ckpt/step-{step:08d}/mine.txt").write_text("mine")
    train(*flags(text, "--steps 2 --save", tmp_path / "ckpt"))
    assert checkpoints(tmp_path / "ckpt") == [2]
    assert len(list((tmp_path / "ckpt").rglob("mine.txt"))) == 2


def test_seed_and_sequence_come_from_the_checkpoint(train, text, tmp_path):
    """Resumed with nothing but its data and batch, a run sees the data that it would have seen."""
    whole = train(*flags(text, FLAT, "--steps 6 --seed 7", seq=16))
    train(*flags(text, FLAT, "--steps 3 --seed 7 --save", tmp_path / "ckpt", seq=16))
    batch = ["--micro-batch", BATCH, "--warmup", 3, *FLAT.split(), "--peak-tflops", 1]
    resumed = train("--data", text, *batch, "--resume", tmp_path / "ckpt", "--steps", 6)
    assert curves(resumed) == curves(whole, 4)


def test_a_refused_run_leaves_the_log_alone(start, train, text, tmp_path):
    running = start(flags(text, "--steps 1000000 --save", tmp_path / "ckpt"))
    running.wait_for_step(3)
    command = [build(), *flags(text, "--steps 5 --save", tmp_path / "ckpt", "--log", running.log)]
    r = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment())
    assert r.returncode == 2 and "another running program" in r.stderr, r
    running.wait_for_step(len(running.events()) + 2)  # events() reads every line: none may be torn
    running.process.send_signal(signal.SIGTERM)
    assert running.finish().code == 0


def test_a_resumed_run_appends_to_the_log(text, tmp_path):
    log = ["--log", tmp_path / "log"]
    for more in (["--steps", 2], ["--steps", 4, "--resume", tmp_path / "ckpt"]):
        command = [build(), *flags(text, "--save", tmp_path / "ckpt"), *more, *log]
        subprocess.run(list(map(str, command)), check=True, capture_output=True, env=environment())
    steps = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [e["step"] for e in steps if e["event"] == "step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("delay", [0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3])
def test_a_signal_during_the_start_is_not_lost(delay, start, text, tmp_path):
    running = start(flags(text, "--steps 1000000 --save", tmp_path / "ckpt", ranks=2), ranks=2)
    time.sleep(delay)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish(30).code is not None, "it trains on"


def test_later_checkpoints_are_noticed(train, text, tmp_path):
    train(*flags(text, "--steps 4 --save", tmp_path / "ckpt"))
    r = train(*flags(text, "--steps 2 --save", tmp_path / "ckpt"))
    assert len(notes(r)) == 1 and "already holds step 4" in notes(r)[0], f"{r}"

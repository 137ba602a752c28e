"""--trace: what happened when, on every rank, as the file tells it; and dev/plot.py, which draws it."""
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from conftest import ROOT, build, environment, make, run_program

STEPS, ACCUM, LAYERS, EVAL_BATCHES = 3, 2, 4, 2


# ---- reading ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Span:
    begin: int  # nanoseconds
    end: int
    name: str
    number: int
    bytes: int


class Trace:
    """spans[rank][track], memory[rank]: [(ns, {category: bytes})…], in the order of the file."""

    def __init__(self, path):
        with open(path) as f:
            self.events = json.load(f)["traceEvents"]
        self.process, self.track, self.order = {}, {}, {}
        for e in self.events:
            key = e["pid"], e.get("tid")
            if e["ph"] == "M":
                where = {"process_name": self.process, "thread_name": self.track}.get(e["name"], self.order)
                where[key] = e["args"].get("name", e["args"].get("sort_index"))
        self.spans, self.memory = defaultdict(lambda: defaultdict(list)), defaultdict(list)
        for e in self.events:
            if e["ph"] == "X":
                begin, long, args = round(1e3 * e["ts"]), round(1e3 * e["dur"]), e["args"]
                s = Span(begin, begin + long, e["name"], args.get("number"), args.get("bytes", 0))
                self.spans[e["pid"]][self.track[e["pid"], e["tid"]]].append(s)
            elif e["ph"] == "C":
                assert e["name"] == "memory"
                self.memory[e["pid"]].append((round(1e3 * e["ts"]), e["args"]))
            else:
                assert e["ph"] == "M"

    def live(self, rank, at, category):
        """Just after this moment."""
        return [sample.get(category, 0) for t, sample in self.memory[rank] if t <= at][-1]

    def named(self, rank, name):
        return [s for s in self.spans[rank]["compute"] if s.name == name]


# ---- what trace.c writes (test_trace.c) ---------------------------------------------------------------------------
VARIANTS = {"plain": [], "without MPI": ["MPI=0"], "sanitized": ["SANITIZE=address,undefined"]}


@pytest.fixture(scope="module")
def known():
    """known(variant) → the program of test_trace.c."""
    suffix = {"plain": "", "without MPI": "-nompi", "sanitized": "-sanitized"}

    return lambda variant: make(f"build/cpu-fp32{suffix[variant]}/tests/test_trace", *VARIANTS[variant])


@pytest.mark.parametrize("ranks, variant", [(1, "plain"), (3, "plain"), (1, "without MPI"), (2, "sanitized")])
def test_what_is_written(known, tmp_path, ranks, variant):
    r = run_program(known(variant), [tmp_path / "t"], ranks, timeout=20, env={"ASAN_OPTIONS": "detect_leaks=0"})
    assert r.code == 0 and r.stderr == "", f"{r}"
    t = Trace(tmp_path / "t")
    assert sorted(t.process.items()) == [((r, None), f"rank {r}") for r in range(ranks)]
    tracks = ["compute", 'a "quoted" \\ group', "clock", "zeta"]
    for rank in range(ranks):
        assert [t.track[rank, i] for i in range(4)] == tracks and set(t.spans[rank]) == set(tracks)
        assert [t.order[rank, i] for i in (None, 0, 1, 2, 3)] == [rank, 0, 1, 2, 3]
        outer, *inner = t.spans[rank]["compute"]
        n = 5000 * (rank + 1)
        assert (outer.name, outer.number, outer.bytes) == ("outer", None, 0)
        assert [(s.name, s.number, s.bytes) for s in inner] == [("inner", i, i) for i in range(n)]
        assert all(a.end <= b.begin for a, b in zip(inner, inner[1:]))
        assert outer.begin <= inner[0].begin and inner[-1].end <= outer.end
        (odd,) = t.spans[rank][tracks[1]]
        assert (odd.name, odd.bytes) == ("two\nlines, µ", 7)
        live = [sample for _, sample in t.memory[rank]]
        assert live[0] == {"weights": 1000, "optimizer": 0, "activations": 0}
        assert [x["activations"] for x in live[1:-1]] == [64 * (i % 2) for i in range(1, n)]
        assert live[-1] == {"weights": 2000, "optimizer": 300, "activations": 64}


def test_clocks_that_are_wrong(known, tmp_path):
    """Each tick's number is the real time; the trace's must be that, but for where it begins to count, on all ranks."""
    r = run_program(known("plain"), [tmp_path / "t"], 3)
    assert r.code == 0, f"{r}"
    t = Trace(tmp_path / "t")
    zero = [s.begin - s.number for rank in range(3) for s in t.spans[rank]["clock"]]
    assert len(zero) == 15 and max(zero) - min(zero) < 15_000, zero  # ns; 100 ms at 1 or 2 ms a second are 100,000
    assert all(0 <= s.begin < 60e9 for rank in range(3) for s in t.spans[rank]["clock"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk(known, ranks):
    r = run_program(known("plain"), ["/dev/full"], ranks)
    assert r.code == 3 and r.stderr.count("\n") == 1 and "--trace /dev/full: No space left" in r.stderr, f"{r}"


# ---- runs of the program --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """runs(ranks, zero, *flags) → (Trace, Run), each run once."""
    done = {}

    def run(ranks, zero, *flags):
        key = ranks, zero, *flags
        if key not in done:
            d = tmp_path_factory.mktemp("trace")
            flags = ["--data", text, "--zero", zero, "--steps", STEPS, "--accum", ACCUM, "--micro-batch", 2,
                     "--eval-batches", EVAL_BATCHES, *flags]  # fmt: skip
            r = run_program(build(), [*flags, "--quiet", "--trace", d / "trace.json"], ranks, log=d / "log")
            assert r.code == 0, f"{r}"
            done[key] = Trace(d / "trace.json"), r, d
        return done[key]

    return run


CASES = [(1, 0), (2, 0), (2, 2), (3, 3)]


@pytest.mark.parametrize("ranks, zero", CASES)
def test_ranks_and_tracks(runs, ranks, zero):
    t, _, _ = runs(ranks, zero)
    assert sorted(t.process.values()) == [f"rank {r}" for r in range(ranks)]
    for r in range(ranks):
        tracks = [name for (pid, _), name in sorted(t.track.items()) if pid == r]
        assert tracks == (["compute"] if ranks == 1 else ["compute", "dp", "world"])


@pytest.mark.parametrize("ranks, zero", CASES)
def test_spans_nest(runs, ranks, zero):
    t, _, _ = runs(ranks, zero)
    for tracks in t.spans.values():
        for spans in tracks.values():
            around = []
            for s in spans:
                assert 0 <= s.begin <= s.end
                while around and around[-1].end <= s.begin:
                    around.pop()
                assert not around or s.end <= around[-1].end, f"{s} and {around[-1]}"
                around.append(s)


@pytest.mark.parametrize("ranks, zero", CASES)
def test_passes_and_their_units(runs, ranks, zero):
    t, _, _ = runs(ranks, zero)
    blocks = [("block", l) for l in range(LAYERS)]
    units = [("embedding", None), *blocks, ("head", None)]
    for r in range(ranks):
        spans = t.spans[r]["compute"]
        passes = [s for s in spans if s.name in ("forward", "backward", "optimizer")]
        step = [(p, micro) for micro in range(ACCUM) for p in ("forward", "backward")]
        expected = [x for n in range(STEPS) for x in [*step, ("optimizer", n + 1)]]
        expected += [("forward", micro) for micro in range(EVAL_BATCHES * ACCUM)]
        assert [(p.name, p.number) for p in passes] == expected
        for p in passes:
            inside = [s for s in spans if p.begin <= s.begin and s.end <= p.end and s is not p]
            found = [(s.name, s.number) for s in inside if not s.name.startswith("wait")]
            letter, order = {"forward": (" F", units), "backward": (" B", units[::-1]), "optimizer": ("", [])}[p.name]
            assert found == [(name + letter, n) for name, n in order]


@pytest.mark.parametrize("ranks, zero", CASES)
def test_every_collective_is_there(runs, ranks, zero):
    """As often, and with as many bytes, as the log counts them."""
    t, r, _ = runs(ranks, zero)
    for rank in range(ranks):
        for group in "dp", "world":
            calls, sent = Counter(), Counter()
            for s in t.spans[rank][group]:
                calls[s.name] += 1
                sent[s.name] += s.bytes
            rows = [x for x in r.one("end")["comm"] if x["rank"] == rank and x["group"] == group and ranks > 1]
            logged = {x["op"]: (x["calls"], x["bytes"]) for x in rows}
            if group == "dp":
                assert {op: (calls[op], sent[op]) for op in calls} == logged
            else:  # some come before the trace begins; the end event's own numbers travel after they were counted
                assert all(calls[op] <= n + (op == "all_gather") for op, (n, _) in logged.items())
                assert ranks == 1 or calls["all_reduce"] >= STEPS


@pytest.mark.parametrize("ranks, zero", [c for c in CASES if c[0] > 1])
def test_clocks_agree(runs, ranks, zero):
    """No rank is done with a sum or a gather before the last one has begun it."""
    t, _, _ = runs(ranks, zero)
    for group in "dp", "world":
        works = defaultdict(list)
        for rank in range(ranks):
            for s in t.spans[rank][group]:
                if s.name != "broadcast":  # its root waits for nobody
                    works[s.number].append(s)
        assert works
        for spans in works.values():
            assert len(spans) == ranks and len({s.name for s in spans}) == 1, spans
            assert max(s.begin for s in spans) <= min(s.end for s in spans), spans


@pytest.mark.parametrize("ranks, zero", CASES)
def test_memory_is_the_ledgers(runs, ranks, zero):
    t, r, _ = runs(ranks, zero)
    for rank in range(ranks):
        samples = [x for _, x in t.memory[rank]]
        assert all(a != b for a, b in zip(samples, samples[1:]))
        (row,) = [x["live"] for x in r.one("end")["memory"] if x["rank"] == rank]
        assert max(sum(x.values()) for x in samples) == row.pop("peak")
        assert {k: max(x[k] for x in samples) for k in samples[0]} == {k: v for k, v in row.items() if v}


@pytest.mark.parametrize("ranks, zero", CASES)
def test_activations_rise_and_fall(runs, ranks, zero):
    t, _, _ = runs(ranks, zero)
    for rank in range(ranks):
        forwards, backwards = t.named(rank, "forward"), t.named(rank, "backward")
        for f, b in zip(forwards, backwards):
            inside = [x["activations"] for at, x in t.memory[rank] if f.begin <= at < f.end]
            assert inside == sorted(inside) and len(set(inside) - {0}) == LAYERS + 1  # blocks and head
            assert t.live(rank, f.begin, "activations") == 0 == t.live(rank, b.end, "activations")
            assert t.live(rank, b.end, "dout") == 0 == t.live(rank, b.end, "logits")


@pytest.mark.parametrize("ranks, zero", CASES)
def test_gradients_grow_in_the_first_backward(runs, ranks, zero):
    t, _, _ = runs(ranks, zero)
    for rank in range(ranks):
        b = t.named(rank, "backward")[0]
        inside = [x["gradients"] for at, x in t.memory[rank] if b.begin <= at < b.end]
        assert t.live(rank, b.begin, "gradients") == 0
        assert inside == sorted(inside) and len(set(inside)) >= LAYERS + 1


def test_the_optimizer_appears_at_the_end_of_step_1(runs):
    for flags, early in ((), True), (("--lazy-optimizer",), False):
        t, _, _ = runs(2, 0, *flags)
        for rank in range(2):
            first = t.named(rank, "optimizer")[0]
            assert (t.live(rank, first.begin, "optimizer") > 0) == early
            assert t.live(rank, first.end, "optimizer") > 0


# ---- pipelines ------------------------------------------------------------------------------------------------------
def rank_plan(schedule, p, v, m, r):
    """What rank r of p does in a step of m micro-batches, as [(letter, chunk, micro-batch)…]: F forward, I input gradients,
    W weight gradients, B both. Every chunk takes micro-batches in their order."""
    if schedule == "afab":
        order = [("F", 0)] * m + [("B", 0)] * m
    elif schedule == "1f1b":
        ahead = min(p - 1 - r, m)
        order = [("F", 0)] * ahead + [("F", 0), ("B", 0)] * (m - ahead) + [("B", 0)] * ahead
    elif schedule == "interleaved":
        ahead = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        chunks = [c for _ in range(m // p) for c in range(v) for _ in range(p)]
        forwards, backwards = [("F", c) for c in chunks], [("B", v - 1 - c) for c in chunks]
        order, rest = forwards[:ahead], len(chunks) - ahead
        for pair in zip(forwards[ahead:], backwards):
            order += pair
        order += backwards[rest:]
    elif schedule == "zb-h1":
        order, done = [], 0
        for letter, _, micro in rank_plan("1f1b", p, 1, m, r):
            order.append(("F" if letter == "F" else "I", 0))
            if letter == "B" and micro >= r:
                order.append(("W", 0))
                done += 1
        order += [("W", 0)] * (m - done)
    else:
        F0, F1, I0, I1, W0, W1 = [(letter, chunk) for letter in "FIW" for chunk in (0, 1)]
        order = [F0] * (2 * p - 2 * r - 1) + [F1, F0] * r + [F1, I1, W1] * (p - r)
        while order.count(F1) < m:
            order += [*([F0] if order.count(F0) < m else []), I0, W0, F1, I1, W1]
        order += [I0, I1] * r + [I0, W0] * (p - r)
        order += [W1] * (m - order.count(W1))
        order += [W0] * (m - order.count(W0))
    seen = Counter()
    plan = []
    for action in order:
        plan.append((*action, seen[action]))
        seen[action] += 1
    return plan


def stages_of(schedule, p, v, r):
    """By chunk."""
    return [r, 2 * p - 1 - r] if schedule == "zbv" else [c * p + r for c in range(v)]


SCHEDULES = {  # p, v, m, more
    "afab": (3, 1, 2, []),
    "1f1b": (3, 1, 4, ["--no-overlap"]),
    "interleaved": (3, 2, 6, ["--recompute", "full"]),
    "zb-h1": (3, 1, 4, []),
    "zbv": (3, 2, 5, []),
}
PASSES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def pass_name(letter, chunk, v):
    return PASSES[letter] + (f" of chunk {chunk}" if v > 1 else "")


@pytest.fixture(scope="module")
def scheduled(text, tmp_path_factory):
    """scheduled(schedule) → Trace of two steps, run once."""
    done = {}

    def run(schedule):
        if schedule not in done:
            p, v, m, more = SCHEDULES[schedule]
            d = tmp_path_factory.mktemp("schedule")
            flags = ["--data", text, "--layers", p * v + 1, "--pp", p, "--schedule", schedule, "--accum", m, *more]
            flags += ["--micro-batch", 2, "--steps", 2, "--eval-batches", 1, "--peak-tflops", 1, "--quiet"]
            r = run_program(build(), [*flags, "--trace", d / "trace.json"], p, log=d / "log", env={"OMP_NUM_THREADS": "1"})
            assert r.code == 0, f"{r}"
            done[schedule] = Trace(d / "trace.json")
        return done[schedule]

    return run


def actions(t, rank, v):
    """The spans of whole passes and of the optimizer, in their order."""
    names = {"optimizer", *(pass_name(letter, c, v) for letter in PASSES for c in range(v))}
    return [s for s in t.spans[rank]["compute"] if s.name in names]


def inside(t, rank, action):
    """The spans of its units."""
    units = ("embedding", "block", "head")
    return [
        s for s in t.spans[rank]["compute"]
        if s.name.split()[0] in units and action.begin <= s.begin and s.end <= action.end
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_does_what_the_schedule_says(scheduled, schedule):
    """Two steps; then the forwards of an evaluation. Each pass goes through the blocks of its stage, W last to first, too."""
    t, (p, v, m, _) = scheduled(schedule), SCHEDULES[schedule]
    n = p * v
    for rank in range(p):
        plan = rank_plan(schedule, p, v, m, rank)
        step = [(pass_name(letter, chunk, v), micro) for letter, chunk, micro in plan]
        want = [*step, ("optimizer", 1), *step, ("optimizer", 2)]
        found = actions(t, rank, v)
        evaluated = [(s.name, s.number) for s in found[len(want) :]]
        assert [(s.name, s.number) for s in found[: len(want)]] == want
        forwards = [(pass_name("F", chunk, v), micro) for chunk in range(v) for micro in range(m)]
        assert sorted(evaluated, key=lambda x: x[0]) == forwards  # each chunk's in their order
        for span, (letter, chunk, _) in zip(found, plan):
            s = stages_of(schedule, p, v, rank)[chunk]
            first = s + (s > 0)  # the first stage has one more
            units = [("block", l) for l in range(first, first + (2 if s == 0 else 1))]
            units = [*([("embedding", None)] if s == 0 else []), *units, *([("head", None)] if s == n - 1 else [])]
            both = "B" if letter == "I" else letter  # the ends have no W of their own
            want = [(f"{unit} {letter if unit == 'block' else both}", number) for unit, number in units]
            want = [x for x in want if letter != "W" or x[0] == "block W"]
            got = [(x.name, x.number) for x in inside(t, rank, span)]
            assert got == (want if letter == "F" else want[::-1]), (rank, span)


def messages(t, schedule):
    """Of all messages of two steps: (what sends or receives, is it sent?, its span, the action's, the action's units')."""
    p, v, m, _ = SCHEDULES[schedule]
    found = []
    for rank in range(p):
        stages, spans = stages_of(schedule, p, v, rank), iter(actions(t, rank, v))
        for step in range(2):
            for letter, chunk, micro in rank_plan(schedule, p, v, m, rank):
                span, forward = next(spans), letter == "F"
                s, letter = stages[chunk], "F" if forward else "I"
                for track, sent in ((f"F to stage {s + 1}" if forward else f"I to stage {s - 1}", True),
                                    (f"{letter} to stage {s}", False)):  # fmt: skip
                    works = [x for x in t.spans[rank].get(track, []) if x.number == step * m + micro + 1]
                    if works and span.name[0] != "w":
                        found.append((f"rank {rank} {span.name} {micro}", sent, works[0], span, inside(t, rank, span)))
            next(spans)  # the optimizer
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_come_before_they_are_needed(scheduled, schedule):
    """They are received, posted before the action begins; then its units begin, and when the last one ends its own message
    leaves. Both ends have every message, and the sender its bytes."""
    t, (p, v, m, _) = scheduled(schedule), SCHEDULES[schedule]
    found = messages(t, schedule)
    edges = p * v - 1 - (schedule == "zbv")  # at the turn of the V both stages are one rank's
    assert [sum(sent == x for _, sent, *_ in found) for x in (True, False)] == [2 * 2 * m * edges] * 2
    for what, sent, work, action, units in found:
        assert (work.bytes > 0) == sent, what
        if sent:
            assert units[-1].end <= work.begin, what
        else:
            assert work.begin <= action.begin and work.end <= units[0].begin, what


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_leave_while_compute_goes_on(scheduled, schedule):
    """From every rank that has something to compute then; with --no-overlap, never."""
    t, (p, v, _, more) = scheduled(schedule), SCHEDULES[schedule]
    beside = Counter()
    for what, sent, work, *_ in messages(t, schedule):
        rank = int(what.split()[1])
        units = [s for s in t.spans[rank]["compute"] if s.name.split()[0] in ("embedding", "block", "head")]
        if sent and any(work.begin < s.begin < work.end for s in units):
            beside[rank] += 1
    assert bool(beside) == ("--no-overlap" not in more), beside


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_bytes_of_a_pipeline_return(scheduled, schedule):
    """After a step every category is where it was before; activations and output gradients at nothing. In between they are in
    use for as many micro-batches as the schedule has in flight."""
    t, (p, v, m, more) = scheduled(schedule), SCHEDULES[schedule]
    for rank in range(p):
        ends = [s.end for s in t.named(rank, "optimizer")]
        first, second = ([x for at, x in t.memory[rank] if at <= end][-1] for end in ends)
        assert first == second and all(first.get(x, 0) == 0 for x in ("activations", "dout", "logits")), (first, second)
        count, most = Counter(), 0
        for letter, chunk, _ in rank_plan(schedule, p, v, m, rank):
            count["in flight"] += letter == "F"
            most = max(most, count["in flight"])
            count["in flight"] -= letter in "BW"
        assert count["in flight"] == 0
        if rank == 1 and not more:  # which has one block a stage, and neither end
            one = min(x["activations"] for _, x in t.memory[rank] if x.get("activations"))
            assert max(x["activations"] for at, x in t.memory[rank] if at <= ends[-1]) == most * one


def test_no_trace_unless_asked_for(text, tmp_path):
    flags = ["--data", text, "--steps", 1, "--micro-batch", 1, "--quiet"]
    r = run_program(build(), flags, log=tmp_path / "log", cwd=tmp_path)
    assert r.code == 0 and os.listdir(tmp_path) == ["log"], f"{r}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_path_that_cannot_be_written(text, tmp_path, ranks):
    path = tmp_path / "nowhere" / "trace.json"
    r = run_program(build(), ["--data", text, "--steps", 1, "--trace", path], ranks, log=tmp_path / "log")
    assert r.code == 2 and r.stderr.count("\n") == 1 and f"--trace {path}: No such file" in r.stderr, f"{r}"
    assert r.events("step") == []


# ---- dev/plot.py ----------------------------------------------------------------------------------------------------
def plot(*arguments, **env):
    command = [sys.executable, ROOT / "dev/plot.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**env))


def refused(r, said):
    assert r.returncode == 2 and r.stdout == "" and r.stderr.count("\n") == 1, f"{r}"
    assert r.stderr.startswith("plot.py: ") and said in r.stderr, r.stderr


BLUE, ORANGE, GREEN, RED, TEAL = "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2"
PICTURES = {  # with which colours
    "loss": ("loss", "log", [], [BLUE]),
    "memory": ("memory", "trace.json", ["--steps", "1:3"], ["#5b6f84", "#b07aa1", ORANGE, GREEN, "#edc948", BLUE]),
    "trace": ("trace", "trace.json", ["--steps", "2"], [BLUE, ORANGE, TEAL, "#8cd17d"]),
    "one rank's": ("trace", "trace.json", ["--rank", "1", "--from", "0", "--to", "1e9"], [BLUE, ORANGE]),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures(runs, tmp_path, picture):
    command, source, flags, colours = PICTURES[picture]
    _, _, d = runs(3, 3)
    r = plot(command, d / source, *flags, "-o", tmp_path / "x.png")
    assert r.returncode == 0 and r.stdout + r.stderr == "", f"{r}"
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    import matplotlib.image
    import numpy

    pixels = (matplotlib.image.imread(tmp_path / "x.png")[:, :, :3] * 255).round().astype(int)
    for c in colours:
        rgb = [int(c[i : i + 2], 16) for i in (1, 3, 5)]
        count = (abs(pixels - numpy.array(rgb)).max(axis=2) <= 2).sum()
        assert count > (100 if command == "loss" else 600), f"{count} pixels of {c}"  # a legend's patch has 300
    white = (pixels == 255).all(axis=2).mean()
    assert 0.2 < white < 0.98


@pytest.mark.parametrize("picture", PICTURES)
def test_pages(runs, tmp_path, picture):
    """Whole in themselves, and written where there is no matplotlib."""
    command, source, flags, _ = PICTURES[picture]
    _, _, d = runs(3, 3)
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    without = {"PYTHONPATH": str(tmp_path)}
    r = plot(command, d / source, *flags, "-o", tmp_path / "x.html", **without)
    assert r.returncode == 0 and r.stdout + r.stderr == "", f"{r}"
    page = (tmp_path / "x.html").read_text()
    assert "http" not in page and "src=" not in page and "import" not in page
    (line,) = [x for x in page.splitlines() if x.startswith("const picture = ")]
    numbers = json.loads(line.removeprefix("const picture = ").removesuffix(";"))
    if command == "loss":
        assert [len(x["points"]) for x in numbers["lines"]] == [STEPS, 1]
    if command == "memory":
        assert {"weights", "activations", "optimizer"} <= {a["name"] for a in numbers["areas"]}
        assert {len(a["values"]) for a in numbers["areas"]} == {len(numbers["times"])}
        assert [s[0] for s in numbers["steps"]] == [1, 2, 3]
        assert [s[2] for s in numbers["steps"][:2]] == [s[1] for s in numbers["steps"][1:]]
    if command == "trace":
        rows = [(x["rank"], x["track"]) for x in numbers["rows"]]
        assert rows == [(r, t) for r in ((1,) if picture != "trace" else (0, 1, 2)) for t in ("compute", "dp", "world")]
        assert {"forward", "backward", "optimizer", "wait", "all_gather"} <= set(numbers["kinds"])
    if node := shutil.which("node"):
        script = page[page.index("<script>") + 8 : page.index("</script>")]
        (tmp_path / "x.js").write_text(script)
        checked = subprocess.run([node, "--check", tmp_path / "x.js"], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stderr
    refused(plot(command, d / source, "-o", tmp_path / "x.png", **without), "needs matplotlib")


def test_several_logs_in_one_picture(tmp_path):
    for name in "a", "b":
        events = [{"event": "step", "step": s, "loss": None if s == 3 else 1 / s} for s in (1, 2, 2, 3, 4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    for out in "x.png", "x.html":
        r = plot("loss", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", tmp_path / out)
        assert r.returncode == 0 and r.stderr == "", f"{r}"
    page = (tmp_path / "x.html").read_text()
    assert '"name":"a, train"' in page and '"name":"b, train"' in page
    assert page.count('"points":[[1,1.0],[2,0.5],[3,null],[4,0.25]]') == 2


def test_what_plot_refuses(runs, tmp_path):
    _, _, d = runs(3, 3)
    trace, out = d / "trace.json", tmp_path / "x.html"
    files = {"not": "no json\n", "list": "[]", "empty": '{"traceEvents":[]}', "odd": '{"traceEvents":[{"ph":"X"}]}'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for command in "memory", "trace":
        refused(plot(command, tmp_path / "missing", "-o", out), "missing: No such file or directory")
        refused(plot(command, tmp_path / "not", "-o", out), "not: not a --trace file")
        refused(plot(command, tmp_path / "list", "-o", out), "list: not a --trace file")
        refused(plot(command, tmp_path / "odd", "-o", out), "odd: not a --trace file")
        refused(plot(command, tmp_path / "empty", "-o", out), "empty: a trace without any event")
        refused(plot(command, trace, "-o", out, "--rank", "7"), "--rank 7: ")
        refused(plot(command, trace, "-o", out, "--steps", "0:2"), "has steps 1:3")
        refused(plot(command, trace, "-o", out, "--steps", "x"), "--steps x: neither")
        refused(plot(command, trace, "-o", out, "--from", "5", "--to", "4"), "--from 5 --to 4: ")
        refused(plot(command, trace, "-o", tmp_path / "x.gif"), "neither .png nor .html")
        refused(plot(command, trace, "-o", tmp_path / "nowhere/x.html"), "nowhere/x.html: No such file or directory")
    refused(plot("loss", tmp_path / "not", "-o", out), "line 1 is no event")
    refused(plot("loss", d / "trace.json", "-o", out), "line 1 is no event")
    refused(plot("losses", d / "log", "-o", out), "invalid choice")
    assert not out.exists()


def test_the_log_of_a_killed_run(tmp_path):
    """Its last line may be half there; the others are drawn."""
    lines = [json.dumps({"event": "step", "step": n, "loss": 3.0 - n}) + "\n" for n in (1, 2, 3)]
    (tmp_path / "log").write_text("".join(lines)[:-9])
    r = plot("loss", tmp_path / "log", "-o", tmp_path / "x.html")
    assert r.returncode == 0 and "[[1,2.0],[2,1.0]]" in (tmp_path / "x.html").read_text(), r.stderr


# ---- dev/plot.py pipeline -------------------------------------------------------------------------------------------
PIPELINES = {  # ranks of one pipeline, how many pipelines, stages a rank, micro-batches
    "1f1b": (3, 1, 1, 4),
    "zb-h1": (3, 1, 1, 4),
    "zbv": (2, 2, 2, 3),
}


@pytest.fixture(scope="module")
def pipelines(text, tmp_path_factory):
    """pipelines(schedule) → the path of its trace: 2 steps, an evaluation after each."""
    done = {}

    def run(schedule):
        if schedule not in done:
            p, dp, _, m = PIPELINES[schedule]
            done[schedule] = tmp_path_factory.mktemp("pipeline") / "trace.json"
            flags = ["--data", text, "--pp", p, "--schedule", schedule, "--accum", m, "--micro-batch", 1, "--layers", 4, "--seq", 32]
            evaluates = ["--eval-every", 1, "--eval-batches", 2]
            flags = [*flags, "--hidden", 32, "--heads", 2, "--steps", 2, *evaluates, "--quiet", "--trace", done[schedule]]
            r = run_program(build(), flags, p * dp)
            assert r.code == 0, f"{r}"
        return done[schedule]

    return run


def page_numbers(path, *arguments):
    r = plot(*arguments, "-o", path)
    assert r.returncode == 0 and r.stdout + r.stderr == "", f"{r}"
    (line,) = [x for x in path.read_text().splitlines() if x.startswith("const picture = ")]
    return json.loads(line.removeprefix("const picture = ").removesuffix(";"))


@pytest.mark.parametrize("schedule, flags, ranks", [("1f1b", [], (0, 1, 2)), ("zbv", [], (0, 2)), ("zbv", ["--rank", "3"], (1, 3))])
@pytest.mark.parametrize("step", [1, 2])
def test_a_pipelines_boxes_are_its_actions(pipelines, tmp_path, schedule, flags, ranks, step):
    _, _, v, m = PIPELINES[schedule]
    t = Trace(pipelines(schedule))
    p = page_numbers(tmp_path / "x.html", "pipeline", pipelines(schedule), *flags, "--steps", step)
    assert [row["rank"] for row in p["rows"]] == list(ranks) and p["chunks"] == v and not p["units"]
    for row in p["rows"]:
        ends = [0] + [s.begin for s in t.named(row["rank"], "optimizer")]
        spans = [s for s in t.spans[row["rank"]]["compute"] if ends[step - 1] <= s.begin < ends[step]]
        spans = [s for s in spans if s.name.split(" of chunk")[0] in ("forward", "backward", "input gradients", "weight gradients")]
        boxes = row["boxes"]
        spans = spans[-len(boxes) :]  # before them come the forwards of an evaluation
        names = [kind + (f" of chunk {chunk}" if v > 1 else "") for _, _, kind, chunk, _, _ in boxes]
        assert [(s.name, s.number) for s in spans] == [(name, b[4]) for name, b in zip(names, boxes)]
        kinds = ("forward", "backward") if schedule == "1f1b" else ("forward", "input gradients", "weight gradients")
        assert sorted((b[2], b[3], b[4]) for b in boxes) == sorted((k, c, i) for k in kinds for c in range(v) for i in range(m))
        for s, (begin, end, *_, waits) in zip(spans, boxes):
            inside = [w for w in t.spans[row["rank"]]["compute"] if s.begin <= w.begin and w.end <= s.end]
            inside = [w for w in inside if w.name.startswith("wait") and w.end > w.begin]
            assert abs(end * 1e6 - s.end) < 2 and begin * 1e6 > s.begin - 2
            kept = [(b, e) for b, e in waits if e > b]
            assert sum(w.end > begin * 1e6 + 2 for w in inside) == len(kept)  # the others are before the box
            assert all(begin <= b <= e <= end for b, e in kept)
        busy = sum(b[1] - b[0] - sum(e - d for d, e in b[5]) for b in boxes)
        assert abs(row["idle"] - (1 - busy / (p["range"][1] - p["range"][0]))) < 1e-6


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("replayed", [[], ["--replay", "1:1:1"]], ids=["measured", "replayed"])
def test_arrows_join_boxes_of_one_micro_batch(pipelines, tmp_path, schedule, replayed):
    ranks, _, v, m = PIPELINES[schedule]
    p = page_numbers(tmp_path / "x.html", "pipeline", pipelines(schedule), *replayed)
    turns = schedule == "zbv"  # where a stage hands on to one of the same rank
    assert len(p["arrows"]) == 2 * m * (ranks * v - 1 - turns)
    for a, leaves, b, arrives, kind in p["arrows"]:
        of = {i: [x for x in p["rows"][i]["boxes"] if x[2] == kind] for i in (a, b)}
        to = [x[4] for x in of[b] if x[0] == arrives]
        assert len(to) == 1 and to[0] in [x[4] for x in of[a] if x[0] <= leaves <= x[1]], (a, leaves, b, arrives)
        assert leaves < arrives + 0.1  # ms: clocks agree but for microseconds


@pytest.mark.parametrize(
    "schedule, times, end, kept",
    [
        ("1f1b", "1:1:1", 18, [3, 2, 1]),
        ("1f1b", "1:2:1.5", 27, [3, 2, 1]),
        ("zb-h1", "1:1:1", 14, [3, 3, 3]),
        ("zbv", "1:1:1", 9.5, [2, 2]),
    ],
)
def test_a_replay_takes_what_the_schedule_does(pipelines, tmp_path, schedule, times, end, kept):
    """As pp_1f1b.c's table says: 3 ranks, 4 micro-batches; 2 ranks, 3 micro-batches, where F of a chunk takes a half."""
    p = page_numbers(tmp_path / "x.html", "pipeline", pipelines(schedule), "--replay", times, "--title", "a name")
    assert p["range"] == [0, end] and p["units"] and p["title"].startswith("a name: ") and "not measured" in p["note"]
    ranks, _, _, m = PIPELINES[schedule]
    for row, k in zip(p["rows"], kept):
        assert row["kept"] == k and row["idle"] == pytest.approx(1 - m * sum(map(float, times.split(":"))) / end)
    p = page_numbers(tmp_path / "x.html", "pipeline", pipelines(schedule), "--replay", times, "--steps", "1:2", "--to", 99)
    assert p["range"] == [0, 99] and p["end"] == 2 * end and [s[0] for s in p["steps"]] == [1, 2]


def test_pictures_of_a_pipeline(pipelines, tmp_path):
    import matplotlib.image
    import numpy

    for flags in [], ["--replay", "1:1:1", "--steps", "1:2"]:
        r = plot("pipeline", pipelines("zbv"), *flags, "-o", tmp_path / "x.png")
        assert r.returncode == 0 and r.stdout + r.stderr == "", f"{r}"
        pixels = (matplotlib.image.imread(tmp_path / "x.png")[:, :, :3] * 255).round().astype(int)
        for c in (BLUE, ORANGE, "#7fa832") if flags else ():  # a box that is measured may be thin
            rgb = [int(c[i : i + 2], 16) for i in (1, 3, 5)]
            assert (abs(pixels - numpy.array(rgb)).max(axis=2) <= 8).sum() > 4000, c
        assert (pixels == 255).all(axis=2).mean() > 0.3


def test_a_page_of_a_pipeline_is_whole_in_itself(pipelines, tmp_path):
    page_numbers(tmp_path / "x.html", "pipeline", pipelines("zbv"))
    page = (tmp_path / "x.html").read_text()
    assert "http" not in page and "src=" not in page and "import" not in page


def test_other_pictures_of_a_pipelines_trace(pipelines, tmp_path):
    p = page_numbers(tmp_path / "x.html", "trace", pipelines("zbv"), "--steps", 2)
    kinds = {"forward", "input gradients", "weight gradients", "send", "optimizer"}
    assert kinds <= set(p["kinds"]) and "backward" not in p["kinds"]
    assert ["weight gradients"] * 4 == [s[3] for row in p["rows"] for s in row["spans"] if s[5] == "block W" and s[6] == 1][:4]
    p = page_numbers(tmp_path / "x.html", "memory", pipelines("zbv"), "--steps", 1)
    assert {x[2] for x in p["passes"]} == {"forward", "input gradients", "weight gradients", "optimizer"}


def test_what_a_picture_of_a_pipeline_refuses(runs, pipelines, tmp_path):
    trace, out = pipelines("1f1b"), tmp_path / "x.html"
    _, _, d = runs(3, 3)
    refused(plot("pipeline", d / "trace.json", "-o", out), "trace.json: no pipeline in this trace")
    (tmp_path / "not").write_text("no json\n")
    refused(plot("pipeline", tmp_path / "not", "-o", out), "not: not a --trace file")
    refused(plot("pipeline", trace, "-o", out, "--rank", "3"), "--rank 3: ")
    refused(plot("pipeline", trace, "-o", out, "--steps", "2:3"), "has steps 1:2")
    for times in "1", "1:1", "a:1:1", "1:-1:1", "0:0:0", "nan:1:1":
        refused(plot("pipeline", trace, "-o", out, f"--replay={times}"), f"--replay {times}: not three times")
    events = json.loads(trace.read_text())["traceEvents"]
    first = next(i for i, e in enumerate(events) if e["name"] == "send")
    (tmp_path / "less").write_text(json.dumps({"traceEvents": events[:first] + events[first + 1 :]}))
    refused(plot("pipeline", tmp_path / "less", "-o", out), "are not those of its passes")
    assert not out.exists()

"""--trace: what happened when, on every rank, as the file tells it; and dev/plot.py, which draws it."""
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest

from conftest import BUILD_SECONDS, ROOT, build, environment, run_program

STEPS, ACCUM, LAYERS = 3, 2, 4


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

    def make(variant):
        target = f"build/cpu-fp32{suffix[variant]}/tests/test_trace"
        command = ["make", "-s", "-C", str(ROOT), *VARIANTS[variant], target]
        made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        assert made.returncode == 0, made.stderr
        return ROOT / target

    return make


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
            flags = ["--data", text, "--zero", zero, "--steps", STEPS, "--accum", ACCUM, "--micro-batch", 2, *flags]
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

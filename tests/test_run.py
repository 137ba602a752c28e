"""What a user sees of a run: help, lines, logs, evaluation, samples, and the options that change how it computes."""

import json
import os
import pty
import re
import select
import subprocess
import time

import numpy as np
import pytest

from conftest import ROOT, build, checkpoint_bytes, close, environment, make, make_text, run_program
from test_trace import Trace

TINY = "--layers 2 --hidden 32 --heads 4 --seq 32 --peak-tflops 1".split()
LEARNING = ["--lr", 5e-3, "--warmup", 5]
MEMORY = "rank weights gradients master optimizer activations dout logits communication workspace peak".split()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---- what is printed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [["--help"], ["--steps", "nonsense", "--help"]], ids=["alone", "amid-mistakes"])
def test_help(words):
    """Every flag with its default, in groups; whatever else stands beside it."""
    r = run_program(build(), words)
    assert r.code == 0 and not r.stderr, f"{r}"
    headings = [line for line in r.stdout.splitlines() if re.fullmatch(r"[a-z]+", line)]
    assert headings == "model experts data step parallel memory precision run".split()
    for flag, default in (("--steps N", "(200)"), ("--lr X", "(0.001)"), ("--recompute none|selective|full", "(none)"),
                          ("--data FILE…", ""), ("--save PATH", ""), ("--quiet", ""), ("--ranks N", ""),
                          ("--cp N", "(1)"), ("--cp-order zigzag|contiguous", "(zigzag)")):  # fmt: skip
        (line,) = [line for line in r.stdout.splitlines() if line.startswith(f"  {flag} ")]
        assert line.endswith(default), line
    assert "(-1)" not in r.stdout, "a default that is none"
    assert max(map(len, r.stdout.splitlines())) < 260


def test_help_on_many_ranks_comes_once():
    r = run_program("mpirun", ["-n", 2, "--oversubscribe", build(), "--help"])
    assert r.code == 0 and r.stdout.count("usage:") == 1, f"{r}"


def test_bare_run(tmp_path):
    """No flag at all: it learns this repository's text. (A log beside it, to look at.)"""
    make("build/repository.txt")
    r = run_program(build(), [], log=tmp_path / "log")
    assert r.code == 0 and not r.stderr, f"{r}"
    losses = r.curve("loss")
    assert len(losses) == 200 and 4.8 < losses[0] < 6.2
    quarters = [sum(losses[i : i + 50]) / 50 for i in range(0, 200, 50)]  # the text, so the curve, is new at each commit
    assert quarters[3] < losses[0] - 1.5, f"from {losses[0]}, quarters {quarters}"
    assert quarters[3] + 0.1 < quarters[1] < quarters[0] - 0.3, f"it does not fall: {quarters}"
    assert r.one("val")["loss"] < losses[0] - 1.5
    rates = [e["peak_flops"] for e in (r.one("start"), r.one("end"))]
    assert all(1e9 < rate < 1e13 for rate in rates), rates
    assert re.search(r"^MFU: PaLM's convention, against a 1024³ sgemm", r.stdout, re.M)


def steps_printed(text):
    return [int(n) for n in re.findall(r"step (\d+)/\d+  loss \d+\.\d{4}  norm ", text)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_lines(ranks, text):
    """Where standard output is no terminal there is a line a step, and nothing is written over."""
    command = [
        build(),
        *(["--ranks", ranks] if ranks > 1 else []),
        *TINY,
        "--data",
        text,
        "--steps",
        7,
        "--eval-every",
        3,
    ]
    r = subprocess.run(list(map(str, command)), capture_output=True, env=environment())  # bytes: text would hide a \r
    assert r.returncode == 0 and not r.stderr, r
    assert b"\r" not in r.stdout and b"\x1b" not in r.stdout, r.stdout
    lines = [line for line in r.stdout.decode().split("\n") if line.startswith("step ") and "  loss " in line]
    assert steps_printed("\n".join(lines)) == list(range(1, 8))
    assert all(line.count("step") == 1 for line in lines), lines


def on_a_terminal(command, seconds=60):
    """What the command writes to a terminal, and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(list(map(str, command)), stdout=theirs, stderr=theirs, stdin=theirs, env=environment())
    os.close(theirs)
    out, until = b"", time.monotonic() + seconds
    while time.monotonic() < until and select.select([ours], [], [], until - time.monotonic())[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says EIO where the other end is closed
            break
        if not part:
            break
        out += part
    process.kill() if time.monotonic() >= until else None
    os.close(ours)
    return out.decode().replace("\r\n", "\n"), process.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_status_line_on_a_terminal(ranks, text):
    """One line that is written over, the last one stays; other lines stand clear of it."""
    out, code = on_a_terminal(
        [build(), *(["--ranks", 2] if ranks > 1 else []), *TINY, "--data", text, "--steps", 7, "--eval-every", 3]
    )
    assert code == 0 and steps_printed(out) == list(range(1, 8)), out
    (line,) = [line for line in out.split("\n") if "step 1/7" in line]
    assert line.count("\r") >= 3 and re.match(r"\r?step 1/7 .*\rstep 2/7 .*\rstep 3/7 ", line), repr(out)
    assert re.search(r"^step 3: validation loss \d+\.\d{4}$", out, re.M), repr(out)
    assert re.search(r"^\r?(step 7/7 .*|.*\rstep 7/7 .*)\nstep 7: validation", out, re.M), repr(out)


@pytest.mark.parametrize("ranks", [1, 2])
def test_quiet(ranks, train, text):
    r = train(*TINY, "--data", text, "--steps", 3, "--sample", 20, "--eval-every", 1, "--quiet", ranks=ranks)
    assert (r.stdout, r.stderr) == ("", "")
    assert len(r.events("step")) == len(r.events("val")) == 3


def test_what_changes_nothing_is_said(train, text):
    """Legal, without effect, and said in one line, which names the flag."""
    for options, precision in ((["--recompute", "selective"], "fp32"), (["--grad-accum-fp32"], "fp32"),
                               (["--matmul", "bf16"], "bf16")):  # fmt: skip
        run = [*TINY, "--data", text, "--steps", 2]
        r, plain = train(*run, *options, precision=precision), train(*run, precision=precision)
        (line,) = [line for line in r.stdout.splitlines() if "changes nothing" in line]
        assert line.startswith(options[0])
        assert r.curve("loss") == plain.curve("loss")
        assert "changes nothing" not in plain.stdout


@pytest.mark.parametrize("ranks, options, where", [
    (1, ["--zero", 2], "one data-parallel rank holds all shards"),
    (1, ["--sp"], "one tensor-parallel rank holds all rows"),
    (1, ["--cp-order", "contiguous"], "one context-parallel rank holds whole sequences"),
    (1, ["--no-overlap"], "one rank sends no messages"),
    (1, ["--comm", "mpi"], "one rank sends no messages"),
    (1, ["--check-replicas", 1], "every weight is held once"),
    (2, ["--zero", 3, "--check-replicas", 1], "every weight is held once"),
], ids=["zero", "sp", "cp-order", "no-overlap", "comm", "check-replicas", "check-replicas-of-shards"])  # fmt: skip
def test_what_changes_nothing_here_is_said(ranks, options, where, train, text):
    """What depends on the number of ranks, or on another flag: said once, not by every rank."""
    run = [*TINY, "--data", text, "--steps", 2]
    r, plain = train(*run, *options, ranks=ranks), train(*run, *options[:-2], ranks=ranks)
    (line,) = [line for line in r.stdout.splitlines() if "changes nothing" in line]
    assert re.match(rf"{options[-2 if len(options) > 1 else 0]}\b.* changes nothing: {where}$", line), line
    assert (r.curve("loss"), r.curve("grad_norm")) == (plain.curve("loss"), plain.curve("grad_norm"))
    assert "changes nothing" not in plain.stdout


def test_what_has_an_effect_is_not_said_to_have_none(train, text):
    run = [*TINY, "--data", text, "--steps", 2, "--check-replicas", 1, "--no-overlap"]
    for zero in (1, 2):
        assert "changes nothing" not in train(*run, "--zero", zero, ranks=2).stdout


@pytest.mark.parametrize("zero, ranks, precision", [
    (0, 2, "fp32"), (0, 3, "bf16"), (1, 3, "fp32"), (1, 2, "bf16"), (2, 2, "fp32"), (2, 3, "bf16"), (3, 2, "fp32"),
])  # fmt: skip
def test_sound_replicas(zero, ranks, precision, train, text, tmp_path):
    """Replicas that are alike are compared in silence, and nothing changes by it."""
    run = [*TINY, "--ffn", 77, "--data", text, "--steps", 5, "--accum", 2, "--zero", zero]
    outcomes = []
    for name, check in (("checked", ["--check-replicas", 2]), ("plain", [])):
        r = train(*run, *check, "--save", tmp_path / name, ranks=ranks, precision=precision)
        assert not r.stderr and "differ" not in r.stdout, f"{r}"
        outcomes.append((r.curve("loss"), r.curve("grad_norm"), checkpoint_bytes(tmp_path / name, 5)))
    assert outcomes[0] == outcomes[1]


def test_one_rank_shares_no_directory():
    """With Open MPI's default, two programs that start at a time would now and then take their directory from each other."""
    r = run_program(build(), ["--dry-run"], env={"TMPDIR": "/dev/null"})
    assert r.code == 0 and not r.stderr, f"{r}"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_overlap(zero, text, tmp_path):
    """With it, no unit computes while a message of the group is on its way; without it, some do."""
    run = [*TINY, "--data", text, "--steps", 3, "--accum", 2, "--zero", zero, "--quiet", "--trace", tmp_path / "trace"]
    for switch in ([], ["--no-overlap"]):
        r = run_program(build(), [*run, *switch], 2)
        assert r.code == 0, f"{r}"
        rank = Trace(tmp_path / "trace").spans[0]
        units = [s for s in rank["compute"] if re.fullmatch("(embedding|block|head) [FB]", s.name)]
        overlapped = [(a, b) for a in units for b in rank["dp"] if a.begin < b.end and b.begin < a.end]
        assert units and rank["dp"] and bool(overlapped) == (not switch), overlapped


def test_explain(text):
    """Who holds what and who says what to whom, and the end: nothing is trained."""
    r = run_program(build(), [*TINY, "--data", text, "--accum", 3, "--explain"], 4)
    assert r.code == 0 and not r.stderr, f"{r}"
    assert "grid: 4 ranks = dp 4" in r.stdout
    for rank in range(4):
        assert re.search(rf"rank {rank}: .*sequences {8 * rank} to {8 * rank + 7} of each 32", r.stdout), r.stdout
    for name, shape in (("wte.weight", "256 × 32"), ("wpe.weight", "64 × 32"), ("blocks.0.attention.q.bias", "32 × 1"),
                        ("blocks.0.mlp.up.weight", "128 × 32"), ("norm.bias", "32 × 1")):  # fmt: skip
        assert re.search(rf"{re.escape(name)} +{shape} ", r.stdout), f"{name} {shape}\n{r.stdout}"
    elements = {name: int(n) for name, n in re.findall(r"^  (embedding|block 0|head): (\d+) elements", r.stdout, re.M)}
    assert elements == {"embedding": (256 + 64) * 32, "block 0": 12 * 32 * 32 + 13 * 32, "head": 64}
    messages = re.findall(r"all-reduce of (embedding|block 0|block 1|head) .* 2 · 3 pieces of (\d+) bytes", r.stdout)
    want = [("head", 64), ("block 1", 12704), ("block 0", 12704), ("embedding", 10240)]
    assert messages == [(name, str(n * 4 // 4)) for name, n in want], r.stdout
    assert "in the backward of the last micro-batch, when" in r.stdout and not steps_printed(r.stdout), "it went on to train"


def test_explain_of_tensor_parallelism(text):
    """Which rows or columns of each matrix each tp rank holds; and whose gradients are sums of parts: with --sp, of
    what all ranks hold; and of key/value heads that two of them hold."""

    def cut(n, slices, holders=1):
        begins = [i * n // slices for i in range(slices + 1)]
        return " | ".join(f"{a}-{b - 1}" for a, b in zip(begins, begins[1:]) for _ in range(holders))

    r = run_program(build(), ["--model", "llama-tiny", "--data", text, "--tp", 8, "--sp", "--explain"], 16)
    assert r.code == 0 and not r.stderr and "grid: 16 ranks = dp 2 × tp 8" in r.stdout, f"{r}"
    for dp in range(2):
        line = f"ranks {8 * dp} to {8 * dp + 7}: in micro-batch j, sequences {8 * dp} to {8 * dp + 7} of each 16"
        assert line in r.stdout, r.stdout
    attention, mlp = "blocks.0.attention", "blocks.0.mlp"
    keys = f"rows by key/value heads: {cut(64, 4, 2)} +"
    want = {
        "wte.weight": f"rows: {cut(256, 8)}", "head.weight": f"rows: {cut(256, 8)}", "norm.weight": "whole +",
        "blocks.0.norm1.weight": "whole +", "blocks.0.norm2.weight": "whole +",
        f"{attention}.q.weight": f"rows by heads: {cut(128, 8)}", f"{attention}.k.weight": keys,
        f"{attention}.v.weight": keys, f"{attention}.out.weight": f"columns: {cut(128, 8)}",
        f"{mlp}.gate.weight": f"rows: {cut(352, 8)}", f"{mlp}.up.weight": f"rows: {cut(352, 8)}",
        f"{mlp}.down.weight": f"columns: {cut(352, 8)}",
    }  # fmt: skip
    parameters = re.compile(r"^    (\S+) +\d+ × \d+ +(.*)$", re.M)
    assert dict(parameters.findall(r.stdout)) == want, r.stdout

    r = run_program(build(), [*TINY, "--data", text, "--vocab", 257, "--tp", 4, "--explain"], 4)
    gpt2 = dict(parameters.findall(r.stdout))
    assert gpt2["wte.weight"] == "rows: 0-64 | 65-128 | 129-192 | 193-256", "the first has the one that is left over"
    assert gpt2[f"{attention}.k.bias"] == f"rows by key/value heads: {cut(32, 4)}"
    assert gpt2[f"{mlp}.up.bias"] == f"rows: {cut(128, 4)}"
    whole = "wpe.weight", f"{attention}.out.bias", f"{mlp}.down.bias", "norm.bias"
    assert all(gpt2[name] == "whole" for name in whole)
    assert not any(where.endswith("+") for where in gpt2.values()) and "hold parts of" not in r.stdout, r.stdout


@pytest.mark.parametrize("command, grid", [
    ("mpirun --oversubscribe -n 8 ./train --zero 2 --tp 8 --steps 2", "dp 1 × tp 8"),
    ("./train --ranks 8 --zero 2 --tp 4 --steps 2", "dp 2 × tp 4"),
])  # fmt: skip
def test_tensor_parallelism_at_once(command, grid):
    """The README's two commands, as they stand there: what they say of themselves."""
    words = [str(build()) if word == "./train" else word for word in command.split()]
    r = run_program(words[0], words[1:])
    assert r.code == 0 and not r.stderr, f"{r}"
    assert f"8 ranks ({grid}) of 1 thread on " in r.stdout and steps_printed(r.stdout) == [1, 2], r.stdout
    assert ("--zero 2 changes nothing: one data-parallel rank" in r.stdout) == (grid == "dp 1 × tp 8")
    groups = set(re.findall(r"^  (\w+) +(?:all|reduce)_\w+ +\d+ +\d+\.\d+ +\d+\.\d+$", r.stdout, re.M))
    assert groups == ({"world", "tp"} if grid == "dp 1 × tp 8" else {"world", "dp", "tp"}), r.stdout


def test_dry_run_in_words(train, text):
    """Says, and ends: no file is read or written, no rank started."""
    r = run_program(build(), [*TINY, "--ranks", 64, "--tp", 4, "--accum", 2, "--dry-run", "--save", "/nowhere/at/all"])
    assert r.code == 0 and not r.stderr and not steps_printed(r.stdout), f"{r}"
    grid = "64 ranks = dp 16 × tp 4"
    assert f"{grid}, 8 sequences of 32 tokens a micro-batch, accumulation 2: 8192 tokens a step" in r.stdout


PIPELINE = [*"--model llama-tiny --ranks 8 --pp 4 --layers 8 --accum".split()]


def test_picture_of_a_schedule():
    """The pictures at the top of pp_1f1b.c, as --dry-run draws them."""
    head = (ROOT / "pp_1f1b.c").read_text()
    rows = re.findall(r"^//     (\d)   (.{22})(?: +\d   (.*))?$", head, re.M)
    assert len(rows) == 4
    for column, schedule in enumerate(("afab", "1f1b"), 1):
        out = run_program(build(), [*PIPELINE, 4, "--schedule", schedule, "--dry-run"]).stdout
        drawn = dict(re.findall(r"^  rank (\d)   ([\d.b]+)$", out, re.M))
        for row in rows:
            assert drawn[row[0]].replace(".", " ").rstrip() == row[column].rstrip(), f"{schedule}\n{out}"
        assert "simulated     9 units: idle fraction 42.86 % of the time, overhead 75.00 % of the work" in out, out
    assert re.search(r"in flight, by rank:  simulated 4 3 2 1\n +formula   4 3 2 1\n", out), out


@pytest.mark.parametrize("schedule, m", [("1f1b", 12), ("interleaved", 12), ("zb-h1", 12), ("zbv", 12), ("afab", 60)])
def test_every_action_is_in_the_picture(schedule, m):
    """Each micro-batch's F, and I and W or B, once a chunk and rank, and as many dots as the bubble has units; what does not
    fit a line is counted."""
    out = run_program(build(), [*PIPELINE, m, "--schedule", schedule, "--dry-run"]).stdout
    chunks, width = (2 if schedule in ("interleaved", "zbv") else 1), (2 if schedule in ("zb-h1", "zbv") else 1)
    idle = int(re.search(r"simulated +(\d+) units", out)[1])
    rows = re.findall(r"^  rank (\d)   (.*?)(?: … (\d+) more)?$", out.split("pipeline  ")[0], re.M)
    of_chunk = re.findall(r"^    chunk  (.*)$", out, re.M)
    assert [row[0] for row in rows] == list("0123") and len(of_chunk) == (4 if chunks == 2 else 0)
    for i, (_, line, more) in enumerate(rows):
        assert len(line) // width + int(more or 0) == 3 * m * chunks + idle, out
        if more:
            assert len(line) == 104, out
            continue
        assert line.count(".") == idle * width, out
        passes = list(re.finditer(r"[biw]\d|\d", line))
        drawn = sorted(f"{a[0]} {of_chunk[i][a.end() - 1] if of_chunk else 0}" for a in passes)
        want = [f"{letter}{k % 10} {c}" for letter in (["", "i", "w"] if width == 2 else ["", "b"])
                for k in range(m) for c in range(chunks)]  # fmt: skip
        assert drawn == sorted(want), out


def test_dry_run_of_a_pipeline():
    """Every place of it, and more of the one that needs the most memory."""
    run = [*PIPELINE, 4, "--tie", "--zero", 1, "--dry-run"]
    out, said = run_program(build(), run).stdout, json.loads(run_program(build(), [*run, "--json"]).stdout)
    holds = dict(re.findall(r"^  rank (\d)  .* {3}(\S.*)$", out, re.M))
    want = ["embedding, blocks 0-1", "blocks 2-3", "blocks 4-5", "blocks 6-7, head and a copy of the embedding"]
    assert list(holds.items()) == [(str(r), text) for r, text in enumerate(want)], out
    assert "8 ranks = pp 4 × dp 2 × tp 1, " in out
    peaks = [s["memory"]["peak"] for s in said["stages"]]
    largest = peaks.index(max(peaks))
    assert said["pp_rank"] == largest and said["memory"] == said["stages"][largest]["memory"]
    assert f"of pipeline rank {largest}, which needs the most memory:" in out
    assert [s["layers"] for s in said["stages"]] == [2] * 4
    tied = 256 * 128  # the last stage has a copy
    assert sum(s["params"] for s in said["stages"]) == said["params"] + tied
    assert said["schedule"]["in_flight"] == [4, 3, 2, 1] and said["schedule"]["pending_w"] == [0] * 4
    for r, s in enumerate(said["stages"]):
        message = 4 * 4 * 8 * 64 * 128  # 4 micro-batches of [8 · 64, 128] of fp32
        assert s["sent_over_pp"] == (2 * message if r in (1, 2) else message + tied * 4 / 2), r


def test_explain_of_a_pipeline(text):
    run = ["--model", "llama-tiny", "--data", text, "--ranks", 8, "--pp", 2, "--layers", 8, "--tp", 2, "--tie", "--accum", 2]
    out = run_program(build(), [*run, "--explain"]).stdout
    grid = out.split("grid: 8 ranks = pp 2 × dp 2 × tp 2\n")[1].split("\n\n")[0]
    want = ["pipeline rank 0: embedding, blocks 0-3", "ranks 0 to 1:", "ranks 2 to 3:",
            "pipeline rank 1: blocks 4-7, head and a copy of the embedding", "ranks 4 to 5:", "ranks 6 to 7:"]  # fmt: skip
    assert re.findall(r"^(?:  )?(pipeline rank .*|ranks .*?:)", grid, re.M) == want, out
    messages = re.findall(r"^    (to  |from) pipeline rank (\d): of ([FB]), micro-batch (\d), stage (\d) to stage (\d)$", out, re.M)
    assert messages == [("to  ", "1", "F", "0", "0", "1"), ("to  ", "1", "F", "1", "0", "1"),
                        ("from", "1", "B", "0", "1", "0"), ("from", "1", "B", "1", "1", "0")], out  # fmt: skip
    assert "each [512, 128] of fp32, 262144 bytes" in out
    assert f"over pipeline ranks 0 and 1 of {256 * 128 // 2 * 4} bytes of the tied embedding's gradient\n" in out, out
    run = ["--layers", 8, "--ranks", 8, "--pp", 2, "--schedule", "zbv", "--accum", 4, "--zero", 3, "--data", text]
    out = run_program(build(), [*run, "--explain"]).stdout
    assert "pipeline rank 0: stage 0: embedding, blocks 0-1; stage 3: blocks 6-7, head\n" in out
    assert "tied embedding's gradient" not in out
    assert "(4 + 0) · 3 pieces of" in out, f"gathers of the head\n{out}"


def test_counters_of_a_pipeline(train, text):
    """Channels are as many as stages need, and differ from rank to rank: they count as their group's messages."""
    r = train("--model", "llama-tiny", "--layers", 6, "--pp", 3, "--schedule", "interleaved", "--data", text, "--steps", 2,
              "--accum", 3, "--eval-every", 9, "--tie", ranks=3)  # fmt: skip
    start, end = r.one("start"), r.one("end")
    assert (start["pp"], start["virtual_stages"], start["schedule"], start["dp"]) == (3, 2, "interleaved", 1)
    assert "3 ranks (pp 3 × dp 1 × tp 1, interleaved) of " in r.stdout, r.stdout
    calls = {row["rank"]: row["calls"] for row in end["comm"] if (row["group"], row["op"]) == ("pp", "send")}
    assert {row["group"] for row in end["comm"]} <= {"world", "pp", "tied"}
    # Stages 0 … 5 on ranks 0 1 2 0 1 2: five pairs of neighbours, on both sides of each F and B; and F alone to evaluate.
    micro, n_eval = 2 * 3, calls[0] // 3 - 2 * 2 * 3
    assert [calls[r] for r in range(3)] == [3 * (2 * micro + n_eval), 4 * (2 * micro + n_eval), 3 * (2 * micro + n_eval)]
    tied = {row["rank"] for row in end["comm"] if row["group"] == "tied"}
    assert tied == {0, 2}
    for row in end["memory"]:
        assert row["predicted"] == {key: row[key] for key in row["predicted"]}, row
    assert re.findall(r"^  total, pipeline (\d) +(\S+) +\2$", r.stdout, re.M)[-1][0] == "2", r.stdout


# ---- the log -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2])
def test_log(ranks, text, tmp_path):
    log = tmp_path / "log.jsonl"
    run = [*TINY, "--data", text, "--steps", 4, "--eval-every", 2, "--micro-batch", 8 // ranks, "--accum", 2,
           "--zero", 2]  # fmt: skip
    r = run_program(build(), run, ranks, log=log, env={"LC_ALL": "de_DE.UTF-8"})
    assert r.code == 0, f"{r}"
    assert [e["event"] for e in r.log] == "start step step val step step val end".split()

    start = r.one("start")
    assert (start["world"], start["dp"], start["zero"], start["tokens_per_step"]) == (ranks, ranks, 2, 8 * 2 * 32)
    assert (start["tp"], start["sp"]) == (1, False)
    assert start["params"] == start["active_params"] == (256 + 64) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64
    for e in r.events("step"):
        assert set("step loss grad_norm lr ms tokens_per_s mfu".split()) <= set(e)
        assert close(e["tokens_per_s"], start["tokens_per_step"] / e["ms"] * 1e3, 1e-9)
        assert close(e["mfu"], e["tokens_per_s"] * start["flops_per_token"] / (1e12 * ranks), 1e-9)
        assert close(e["lr"], 1e-3 * e["step"] / 20, 1e-6)
    assert [e["step"] for e in r.events("val")] == [2, 4]

    end = r.one("end")
    assert end["loss"] == r.curve("loss")[-1]
    assert [set(MEMORY) <= set(row) for row in end["memory"]] == [True] * ranks
    assert sorted(row["rank"] for row in end["memory"]) == list(range(ranks))
    for row in end["comm"]:
        assert set("rank group op calls bytes exposed_ms".split()) == set(row)
    reduced = {row["rank"]: row for row in end["comm"] if (row["group"], row["op"]) == ("dp", "reduce_scatter")}
    assert sorted(reduced) == (list(range(ranks)) if ranks > 1 else [])  # four steps of two micro-batches
    assert all(row["bytes"] >= 4 * 2 * start["params"] * 4 // 2 for row in reduced.values())

    for number in re.findall(r'"(?:loss|grad_norm)":([^,}]+)', log.read_text()):
        digits = re.sub(r"e.*|[-.]", "", number).lstrip("0")
        assert len(digits) >= 9, f"{number} has fewer than 9 significant digits"


def test_log_is_written_as_it_goes(text, tmp_path):
    """Someone looks at a run of slow steps: each event is there as soon as it happens."""
    log = tmp_path / "log.jsonl"
    command = [
        build(),
        *TINY,
        "--data",
        text,
        "--micro-batch",
        1,
        "--accum",
        1000,
        "--steps",
        4,
        "--quiet",
        "--log",
        log,
    ]
    process = subprocess.Popen(list(map(str, command)), env=environment())
    seen = set()
    while process.poll() is None:
        seen.add(log.read_text().count('"event":"step"') if log.exists() else 0)
        time.sleep(0.01)
    assert process.returncode == 0 and {1, 2, 3} <= seen, seen
    for line in log.read_text().split("\n")[:-1]:
        json.loads(line)


# ---- evaluation and samples ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_evaluation_is_the_same_everywhere(arch, train, text, tmp_path):
    """13 windows, in batches of 12 and of fewer: the last, partial one counts as what it is, on 1, 2 and 3 ranks."""
    val = tmp_path / "val.txt"
    val.write_bytes(make_text(13 * 32 + 20, seed=5))
    train(*TINY, "--arch", arch, "--data", text, "--steps", 60, *LEARNING, "--save", tmp_path / "ckpt")
    init = tmp_path / "ckpt/step-00000060/weights.safetensors"
    run = [*TINY, "--init", init, "--data", text, "--val", val, "--steps", 1, "--lr", 0]
    one = train(*run, "--micro-batch", 1).one("val")["loss"]  # 8 global batches of one: windows 0 to 7
    all_windows = train(*run, "--micro-batch", 1, "--eval-batches", 99).one("val")["loss"]
    assert not close(one, all_windows, 1e-4)
    for ranks, micro_batch, accum in ((1, 12, 1), (1, 5, 1), (2, 6, 1), (3, 4, 1), (3, 2, 2), (2, 20, 1)):
        r = train(*run, "--micro-batch", micro_batch, "--accum", accum, ranks=ranks)
        assert close(r.one("val")["loss"], all_windows, 1e-6), (ranks, micro_batch, accum)
    for ranks, micro_batch in ((1, 8), (2, 4)):  # the first 8 windows
        r = train(*run, "--micro-batch", micro_batch, "--eval-batches", 1, ranks=ranks)
        assert close(r.one("val")["loss"], one, 1e-6)


def test_evaluation_of_the_last_tenth(train, text, tmp_path):
    """Without --val: what the training does not see. The same as if it were cut off by hand."""
    whole = text.read_bytes()
    cut = len(whole) - len(whole) // 10
    (tmp_path / "train.txt").write_bytes(whole[:cut])
    (tmp_path / "val.txt").write_bytes(whole[cut:])
    a = train(*TINY, "--data", text, "--steps", 6)
    b = train(*TINY, "--data", tmp_path / "train.txt", "--val", tmp_path / "val.txt", "--steps", 6)
    assert a.curve("loss") == b.curve("loss") and a.one("val") == b.one("val")


def sample_of(r, n):
    found = re.search(rf"sample of {n} (?:bytes|tokens) after step \d+:\n(.{{{n}}})\n", r.stdout, re.S)
    assert found, f"{r}"
    return found[1]


def test_sample(train, text):
    """The same again, on two ranks, and longer begins like shorter; another seed or another model: something else."""
    run = [*TINY, "--data", text, *LEARNING, "--steps", 60]
    a, again = (sample_of(train(*run, "--sample", 200), 200) for _ in range(2))
    assert a == again
    assert sample_of(train(*run, "--sample", 90), 90) == a[:90]
    assert sample_of(train(*run, "--sample", 200, "--seed", 5), 200) != a
    assert sum(c.islower() or c in " .,?!\n" for c in a) > 150, "not a word learned"
    still = [*TINY, "--data", text, "--steps", 1, "--lr", 0, "--sample", 200]
    one, two = (sample_of(train(*still, "--micro-batch", 4 // n, ranks=n), 200) for n in (1, 2))
    assert one == two != a


# ---- batches -------------------------------------------------------------------------------------------------------
def test_batch_tokens(train, text):
    """Says how many tokens a step takes; the accumulation follows, and the run is the one with that --accum."""
    run = [*TINY, "--data", text, "--steps", 3, "--micro-batch", 2]
    for ranks, accum in ((1, 6), (2, 3)):
        a = train(*run, "--batch-tokens", 384, ranks=ranks)
        b = train(*run, "--accum", accum, ranks=ranks)
        assert a.one("start")["tokens_per_step"] == 384
        assert a.curve("loss") == b.curve("loss")
        both = train(*run, "--batch-tokens", 384, "--accum", accum, ranks=ranks)
        assert both.curve("loss") == b.curve("loss")
    parts = train(*run, "--batch-tokens", 384, "--cp", 2, ranks=2)  # as one rank: two have a sequence
    assert parts.one("start")["tokens_per_step"] == 384
    assert parts.curve("loss") == train(*run, "--accum", 6, "--cp", 2, ranks=2).curve("loss")


# ---- precision -----------------------------------------------------------------------------------------------------
def test_matmul_bf16(train, text):
    """Inputs of products rounded to bf16: other numbers, near by, and it learns as well."""
    run = [*TINY, "--data", text, *LEARNING, "--steps", 100]
    exact, rounded = (train(*run, "--matmul", kind).curve("loss") for kind in ("fp32", "bf16"))
    assert exact == train(*run).curve("loss")
    assert not any(map(close, exact, rounded, [1e-8] * 100))
    assert all(map(close, rounded, exact, [2e-2] * 100)), max(abs(a - b) for a, b in zip(exact, rounded))
    assert rounded[-1] < rounded[0] - 2


def test_bf16_build(train, text):
    run = [*TINY, "--data", text, *LEARNING, "--steps", 100]
    exact, rounded = train(*run).curve("loss"), train(*run, precision="bf16").curve("loss")
    assert not any(map(close, exact, rounded, [1e-8] * 100))
    assert all(map(close, rounded, exact, [3e-2] * 100)), max(abs(a - b) for a, b in zip(exact, rounded))
    assert rounded[-1] < rounded[0] - 2


def test_fp32_accumulation(train, text):
    """Sums of 64 bf16 gradients lose digits that fp32 sums keep: the norm comes nearer to that of an fp32 build."""
    run = [*TINY, "--data", text, "--micro-batch", 1, "--accum", 64, "--steps", 5, "--grad-clip", 0]
    exact = train(*run)
    coarse, fine = (train(*run, *more, precision="bf16") for more in ([], ["--grad-accum-fp32"]))
    distance = [np.abs(np.subtract(r.curve("grad_norm"), exact.curve("grad_norm"))).mean() for r in (coarse, fine)]
    assert distance[1] < 0.5 * distance[0], distance
    assert all(map(close, fine.curve("loss"), exact.curve("loss"), [5e-3] * 5))
    long = [*TINY, "--data", text, *LEARNING, "--micro-batch", 2, "--accum", 4, "--steps", 100, "--grad-accum-fp32"]
    losses = train(*long, precision="bf16").curve("loss")
    assert losses[-1] < losses[0] - 2


def test_without_mpi(text, tmp_path):
    """A build with MPI=0 links no MPI and is the same program on one rank."""
    libraries = subprocess.run(["ldd", build(mpi=0)], capture_output=True, text=True).stdout
    assert "openblas" in libraries and "libmpi" not in libraries
    run = [*TINY, "--data", text, "--steps", 5, "--eval-every", 2, "--save", tmp_path / "ckpt"]
    alone, with_mpi = (run_program(build(mpi=m), run, log=tmp_path / f"log{m}") for m in (0, 1))
    assert alone.code == with_mpi.code == 0 and not alone.stderr, f"{alone}"
    assert alone.curve("loss") == with_mpi.curve("loss") and alone.events("val") == with_mpi.events("val")
    more = run_program(build(mpi=0), [*run[:-2], "--ranks", 1])
    assert more.code == 0, f"{more}"
    refused = run_program(build(mpi=0), run, 2)
    assert refused.code == 2 and len(refused.stderr.splitlines()) == 1, f"{refused}"
    assert re.search(r"^train: --ranks 2 needs MPI.*nearest: --ranks 1$", refused.stderr.strip()), f"{refused}"


# ---- shards of tokens ----------------------------------------------------------------------------------------------
SHARDS = {"uint16": (20240520, 1, "<u2", 50257), "uint32": (20240801, 7, "<u4", 128256)}


def write_shard(path, kind, tokens):
    magic, version, dtype, _ = SHARDS[kind]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


@pytest.mark.parametrize("kind", SHARDS)
def test_a_shard_of_bytes_is_the_text(kind, train, text, tmp_path):
    """The same tokens from either kind of file: the same run, to the bit."""
    raw = text.read_bytes()
    (tmp_path / "train.txt").write_bytes(raw[:50_000])
    (tmp_path / "val.txt").write_bytes(raw[50_000:])
    write_shard(tmp_path / "train.bin", kind, list(raw[:50_000]))
    write_shard(tmp_path / "val.bin", kind, list(raw[50_000:]))
    runs = [train(*TINY, "--steps", 8, "--vocab", 256, "--data", tmp_path / f"train.{end}", "--val",
                  tmp_path / f"val.{end}") for end in ("txt", "bin")]  # fmt: skip
    assert runs[0].curve("loss") == runs[1].curve("loss") and runs[0].one("val") == runs[1].one("val")


@pytest.mark.parametrize("kind, low", [("uint16", 40_000), ("uint32", 70_000)])
def test_shards_train(kind, low, train, tmp_path):
    """Several files, tokens that need all their bits: what is learned is which of them occur, and in which order."""
    paths = [write_shard(tmp_path / f"{i}.bin", kind, low + 13 * (np.arange(2000 + 500 * i) % 20)) for i in range(3)]
    run = [
        *TINY,
        "--data",
        *paths[:2],
        "--val",
        paths[2],
        "--steps",
        20,
        "--micro-batch",
        2,
        "--lr",
        1e-2,
        "--warmup",
        3,
    ]
    r = train(*run, "--eval-every", 10, "--eval-batches", 1, ranks=2)
    vocabulary = SHARDS[kind][3]
    assert f"vocabulary {vocabulary}" in r.stdout
    losses = r.curve("loss")
    assert close(losses[0], np.log(vocabulary), 0.05)
    assert losses[-1] < 0.55 * losses[0] and r.events("val")[-1]["loss"] < 0.6 * losses[0], losses
    refused = train(*run, "--vocab", low, fails=True)
    found = re.search(rf"token (\d+) is (\d+), outside the vocabulary of {low}; --vocab", refused.stderr)
    assert refused.code == 2 and found and int(found[2]) == low + 13 * (int(found[1]) % 20), f"{refused}"


def test_several_files_are_all_read(train, tmp_path):
    """A model that has seen only the first file has not learned the second."""
    files = [tmp_path / f"{c}.txt" for c in "ab"]
    for path in files:
        path.write_bytes(path.stem.encode() * 4000)
    run = [*TINY, "--val", files[1], "--steps", 30, "--lr", 1e-2, "--warmup", 3]
    both, one = (train(*run, "--data", *data).one("val")["loss"] for data in (files, files[:1]))
    assert both < 1.2 and one > 3, (both, one)


def test_beyond_four_gigabytes(train, tmp_path):
    """Offsets are wider than 32 bits: of 5 GB of zeros, the last tenth alone begins with something else: it is found."""
    large = tmp_path / "large.txt"
    with open(large, "wb") as f:
        f.truncate(5 * 10**9)
        f.seek(45 * 10**8)
        f.write(b"ab" * 5000)  # the first windows of the validation
    r = train(*TINY, "--data", large, "--steps", 20, "--micro-batch", 2, "--lr", 1e-2, "--warmup", 1)
    assert r.curve("loss")[-1] < 1 and r.one("val")["loss"] > 4


def test_initial_values(train, text, tmp_path):
    """Normal with the layer's standard deviation, another draw for every tensor and seed, the same on every layout."""
    import reference

    def weights(seed, ranks, name):
        flags = ["--data", text, "--hidden", 64, "--layers", 2, "--seq", 16, "--micro-batch", 6 // ranks, "--seed", seed]
        train(*flags, "--steps", 1, "--lr", 0, "--save", tmp_path / name, ranks=ranks)
        return reference.load_safetensors(tmp_path / name / "step-00000001" / "weights.safetensors")[0]

    one, three, other = weights(1, 1, "a"), weights(1, 3, "b"), weights(2, 1, "c")
    seen = set()
    for name, w in one.items():
        assert (w == three[name]).all(), name
        if w.ndim == 1:
            assert (w == (1 if name.endswith("weight") else 0)).all(), name
            continue
        residual = name.endswith(("out.weight", "down.weight"))
        assert abs(w.std() / (0.02 / (2 if residual else 1)) - 1) < 0.08, name
        assert abs(w.mean()) < 0.002 and not (w == other[name]).any(), name
        assert float(w.flat[0]) not in seen, f"{name} starts like another tensor"
        seen.add(float(w.flat[0]))

#!/usr/bin/env python3
"""make bench: speed and memory, beside PyTorch, in one run on this machine.

Contestants take turns, so that a busy minute hits all of them; each figure is the median over the turns. The model:
6 layers, 256 channels, 8 heads, vocabulary 256, 8 sequences of 256 tokens, fp32, 2 threads. Work a token is PaLM's
6N + 12·L·C·T (N without the input embedding's lookup, the head once), whatever a program really computes. Two ranks of one
thread share the same 8 sequences, on the same two cores.
"""
import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
L, C, H, V, B, T = 6, 256, 8, 256, 8, 256
THREADS = 2
TOKENS = B * T
MULTIPLIED = 12 * L * C * C + V * C  # the weights of the matrix products; the tied table counts as the head
WORK = 6 * MULTIPLIED + 12 * L * C * T  # a token


def measure(command, threads=THREADS):
    """Runs a command; returns its standard output and the most memory that it held, in bytes."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen([str(c) for c in command], stdout=out, stderr=err, env=env, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode != 0:
            sys.exit(f"bench: {' '.join(map(str, command))}: exit code {process.returncode}\n{out.read()}{err.read()}")
        return out.read(), usage.ru_maxrss * 1024


def ours(data, steps, precision="fp32", *more, ranks=1):
    """{ms a step, sgemm rate, flops, peak bytes}"""
    with tempfile.TemporaryDirectory() as d:
        command = [ROOT / f"build/cpu-{precision}/train", "--arch", "gpt2", "--layers", L, "--hidden", C, "--heads", H]
        command += ["--seq", T, "--micro-batch", B // ranks, "--accum", 1, "--steps", steps, "--data", data]
        command += ["--log", f"{d}/log", "--ranks", ranks, *more]
        _, peak = measure(command, THREADS // ranks)
        with open(f"{d}/log") as f:
            events = [json.loads(line) for line in f]
    assert events[0]["world"] == ranks and events[0]["threads"] == THREADS // ranks
    assert events[0]["cores"] >= THREADS // ranks, "a rank is bound to fewer cores than it has threads"
    step_ms = [e["ms"] for e in events if e["event"] == "step"][2:]
    end = events[-1]
    return {"ms": statistics.median(step_ms), "sgemm": end["peak_flops"], "flops": end["flops"], "peak": peak}


def pytorch(data, steps):
    command = [sys.executable, ROOT / "dev/bench/torch_model.py", "--data", data, "--steps", steps]
    command += ["--hidden", C, "--layers", L, "--heads", H, "--vocab", V, "--batch", B, "--seq", T, "--threads", THREADS]
    out, peak = measure(command)
    return {**json.loads(out), "peak": peak}


def progress(what):
    if sys.stderr.isatty():
        print(f"\r{what:<60}\r", end="", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description="speed and memory, beside PyTorch")
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first two are not counted")
    parser.add_argument("--turns", type=int, default=5)
    a = parser.parse_args()
    for precision in ("fp32", "bf16"):
        subprocess.run(["make", "-s", "-C", ROOT, "DEVICE=cpu", f"PRECISION={precision}", f"build/cpu-{precision}/train"], check=True)

    contestants = {
        "ours": lambda d: ours(d, a.steps),
        "PyTorch": lambda d: pytorch(d, a.steps),
        "ours, bf16 storage": lambda d: ours(d, a.steps, "bf16"),
        "ours, --recompute full": lambda d: ours(d, a.steps, "fp32", "--recompute", "full"),
        **{f"ours, 2 ranks, --zero {z}": lambda d, z=z: ours(d, a.steps, "fp32", "--zero", z, ranks=2) for z in range(4)},
    }
    turns = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as d:
        data = f"{d}/text.txt"  # what it says does not matter to speed; too short to hold out a tenth and evaluate
        with open(data, "wb") as f:
            f.write(random.Random(0).randbytes(TOKENS + T))
        for turn in range(a.turns):
            for name, run in contestants.items():
                progress(f"turn {turn + 1} of {a.turns}: {name}")
                turns[name].append(run(data))
    progress("")

    ms = {name: statistics.median(t["ms"] for t in runs) for name, runs in turns.items()}
    peak = {name: max(t["peak"] for t in runs) for name, runs in turns.items()}
    sgemm = {name: statistics.median(t["sgemm"] for t in turns[name]) for name in ("ours", "PyTorch")}
    version = turns["PyTorch"][0]["torch"]
    print(f"{platform.machine()}, {THREADS} of {os.cpu_count()} cores, PyTorch {version}; {a.turns} turns of {a.steps} steps")
    print(f"GPT-2: L={L} C={C} H={H} V={V} B={B} T={T}, {WORK / 1e6:.1f} MFLOP a token (PaLM's convention)")
    print(f"1024³ sgemm: {sgemm['ours'] / 1e9:.1f} GFLOP/s in ours, {sgemm['PyTorch'] / 1e9:.1f} in PyTorch; the bar takes the faster\n")
    print(f"{'':<24}{'ms a step':>11}{'fastest':>10}{'tokens/s':>10}{'% of sgemm':>12}{'peak MB':>9}")
    for name, runs in turns.items():
        tokens = TOKENS / ms[name] * 1e3
        rate = sgemm["PyTorch" if name == "PyTorch" else "ours"]
        print(f"{name:<24}{ms[name]:>11.1f}{min(t['ms'] for t in runs):>10.1f}{tokens:>10.0f}"
              f"{100 * tokens * WORK / rate:>12.1f}{peak[name] / 1e6:>9.0f}")  # fmt: skip
    print()

    def bar(what, value, limit, at_least=True):
        verdict = "pass" if (value >= limit if at_least else value <= limit) else "miss"
        print(f"{verdict}  {what:<52}{value:>7.2f}  ({'≥' if at_least else '≤'} {limit})")

    def ratio(name, to):  # of two contestants' speeds, turn by turn
        return statistics.median(b["ms"] / a["ms"] for a, b in zip(turns[name], turns[to]))

    total = {name: sum(turns[name][0]["flops"].values()) for name in ("ours", "ours, --recompute full")}
    more = 100 * (total["ours, --recompute full"] / total["ours"] - 1)
    slower = 100 * (ms["ours, --recompute full"] / ms["ours"] - 1)
    bar("work of ours ÷ 1024³ sgemm", TOKENS / ms["ours"] * 1e3 * WORK / max(sgemm.values()), 0.8)
    bar("tokens/s, ours ÷ PyTorch", ratio("ours", "PyTorch"), 1.25)
    bar("peak memory, ours ÷ PyTorch", peak["ours"] / peak["PyTorch"], 1, at_least=False)
    bar("tokens/s, bf16 storage ÷ fp32", ratio("ours, bf16 storage", "ours"), 0.7)
    for zero, limit in ((0, 0.95), (2, 0.9), (3, 0.8)):
        bar(f"tokens/s, 2 ranks × 1 thread, --zero {zero} ÷ 1 × 2", ratio(f"ours, 2 ranks, --zero {zero}", "ours"), limit)
    verdict = "pass" if 30 <= more <= 40 else "miss"
    print(f"{verdict}  {'--recompute full: more compute, %, counted':<52}{more:>7.1f}  (30 to 40)")
    print(f"      {'--recompute full: more time, %':<52}{slower:>7.1f}")


if __name__ == "__main__":
    main()

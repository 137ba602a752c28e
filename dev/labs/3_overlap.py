#!/usr/bin/env python3
"""Lab 3: messages that hide behind the backward (dev/labs/3_overlap.md).

    python3 dev/labs/3_overlap.py
"""
import json
import math
import subprocess

import lab

RANKS = 2
LAYERS, HIDDEN, SEQ, VOCAB, MICRO = 8, 256, 64, 256, 16
VARIANTS = {
    "--no-overlap": ["--no-overlap"],
    "overlap": [],
    "overlap, --bucket-mb 7": ["--bucket-mb", 7],
    "overlap, --bucket-mb 14": ["--bucket-mb", 14],
    "overlap, --bucket-mb 100": ["--bucket-mb", 100],
}


def sizes():
    """Elements of the embedding, of a block, of the head."""
    C = HIDDEN
    return VOCAB * C + SEQ * C, 12 * C * C + 13 * C, 2 * C


def buckets(megabytes):
    """How many: the embedding, and from the head backwards what comes together up to so many MB."""
    _, block, head = sizes()
    n, here = 2, head
    for _ in range(LAYERS):
        fits = lab.FLOAT * (here + block) <= megabytes * 1e6
        n, here = (n, here + block) if fits else (n + 1, block)
    return n


CLUSTER = [str(lab.ROOT / "dev/cluster.sh"), str(RANKS)]


def has_cluster():
    done = subprocess.run([*CLUSTER, "--", "true"], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"\nno cluster in a box here, so messages cross memory, as fast as that is:\n  {done.stderr.strip()}")
    return done.returncode == 0


def spans(trace):
    """What rank 0 did, in ms: (track, name, begin, end)."""
    events = json.loads(trace.read_text())["traceEvents"]
    track = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == 0}
    return [(track[e["tid"]], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
            for e in events if e["ph"] == "X" and e["pid"] == 0]  # fmt: skip


def one_step(trace):
    """The last step that the trace has: from its forward on, until its optimizer is done."""
    all_spans = spans(trace)
    end = max(s[3] for s in all_spans if s[1] == "optimizer")
    begin = max(s[2] for s in all_spans if s[1] == "forward" and s[2] < end)
    return [(track, name, x - begin, y - begin) for track, name, x, y in all_spans if begin <= x and y <= end]


def run(a, name, launcher, steps, *more):
    trace = a.out.resolve() / f"3_overlap.{name}.trace.json"
    flags = ["--layers", LAYERS, "--hidden", HIDDEN, "--seq", SEQ, "--vocab", VOCAB, "--micro-batch", MICRO]
    flags += ["--steps", steps, "--trace", trace, *more]
    return lab.train(a, *flags, ranks=RANKS, launcher=launcher), trace


def backward_alone(a, launcher, steps):
    """Milliseconds of a backward while nothing is sent: the first of two micro-batches."""
    _, trace = run(a, "alone", launcher, steps, "--accum", 2)
    backwards = [y - x for track, name, x, y in spans(trace) if (track, name) == ("compute", "backward")]
    return lab.median(backwards[::2])


def draw(plt, traces):
    from plot import KINDS

    figure, axes = plt.subplots(figsize=(13, 0.9 * len(traces) + 1.5), layout="constrained")
    for i, (name, trace) in enumerate(traces.items()):
        for track, what, begin, end in one_step(trace):
            kind = what.split()[0]
            if kind in KINDS and track in ("compute", "dp"):
                row = (i, 0.36) if track == "compute" else (i + 0.4, 0.3)
                axes.broken_barh([(begin, end - begin)], row, facecolors=KINDS[kind], edgecolors="white", lw=0.5)
    shown = ["forward", "backward", "wait", "all_reduce", "optimizer"]
    patches = [plt.Rectangle((0, 0), 1, 1, color=KINDS[k]) for k in shown]
    axes.legend(patches, shown, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(shown), frameon=False)
    axes.set_yticks([i + 0.35 for i in range(len(traces))], traces)
    axes.set_ylim(len(traces), -0.1)
    axes.set_xlabel("ms of one step of rank 0; above what it computes, below what travels")
    return figure


def main():
    a = lab.begin(__doc__, rate="Mbit/s of the link; else it is as slow as a backward")
    steps = 2 if a.quick else 8
    boxed, mpirun = has_cluster(), ["--", "mpirun", "-n", RANKS]
    alone = backward_alone(a, [*CLUSTER, *mpirun] if boxed else [], steps)
    embedding, block, head = sizes()
    parameters = embedding + LAYERS * block + head
    sent = 2 * lab.FLOAT * parameters * (RANKS - 1) / RANKS
    as_slow = math.ceil(sent * 8 / alone / 1e3)  # bits a millisecond are kbit/s
    rate = a.rate or as_slow
    print(f"\na backward alone takes {alone:.0f} ms, a step sends {lab.mb(sent)} MB: "
          f"a link of {as_slow} Mbit/s is as slow, this one {f'has {rate}' if boxed else 'is memory'}")  # fmt: skip
    tokens = MICRO * SEQ
    flops = 4 * parameters * tokens / (alone / 1e3)
    condition = lab.FLOAT / 2 * (RANKS - 1) / RANKS * flops / (rate / 8 * 1e6) / tokens
    if boxed:
        print(f"it can hide where (1/T) · ((N−1)/N) · F/B · (4 bytes / 2) ≤ 1; with T = {tokens}, N = {RANKS}, "
              f"F = {flops / 1e9:.1f} GFLOP/s, B = {rate / 8:.1f} MB/s that is {condition:.2f}")  # fmt: skip
    launcher = [*CLUSTER, "--rate", f"{rate}mbit", *mpirun] if boxed else []
    runs, traces = {}, {}
    for name, more in VARIANTS.items():
        short = name.split()[-1] if "mb" in name else name.strip("-")
        runs[name], traces[name] = run(a, short, launcher, steps, *more)
    rows, worst = [], runs["--no-overlap"]
    for name, r in runs.items():
        megabytes = VARIANTS[name][1] if "--bucket-mb" in VARIANTS[name] else 0
        rows.append([name, buckets(megabytes), lab.mb(r.bytes / steps), f"{r.ms:.0f}", f"{r.exposed_ms:.0f}",
                     f"{r.exposed_ms / worst.exposed_ms:.2f}", f"{r.loss[-1]:.4f}"])  # fmt: skip
    lab.table(["run", "buckets", "MB sent a step", "ms a step", "ms exposed", "of --no-overlap", "last loss"], rows)
    print(f"\nto zoom in: python3 dev/plot.py trace {lab.shown(traces['overlap'])} -o overlap.html")
    if plt := lab.pyplot("the steps"):
        lab.save(draw(plt, traces), a, "3_overlap.png")


if __name__ == "__main__":
    main()

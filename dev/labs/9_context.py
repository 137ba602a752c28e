#!/usr/bin/env python3
"""Lab 9: one sequence on several ranks, and who has which tokens (dev/labs/9_context.md).

    python3 dev/labs/9_context.py
"""
import bisect
import json
from types import SimpleNamespace

import lab

RANKS = 4  # of the work and the memory; times have two, with a core each
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 4, 128, 8, 4, 352
KEYS = 2 * KV_HEADS * HIDDEN // HEADS  # E: elements of a token's keys and values
ORDERS = ["contiguous", "zigzag"]
MODEL = ["--model", "llama-tiny"]
LONG = ["--model", "llama-8B", "--seq", 131072, "--micro-batch", 1, "--tp", 2]  # the Playbook's case


# ---- formulas -------------------------------------------------------------------------------------------------------
def tokens(order, r, cp, T):
    """Which tokens of a sequence rank r has."""
    if order == "contiguous":
        return list(range(r * T // cp, (r + 1) * T // cp))
    c = T // (2 * cp)
    return [*range(r * c, (r + 1) * c), *range((2 * cp - 1 - r) * c, (2 * cp - r) * c)]


def work(order, cp, T):
    """[rank][step of the ring]: pairs of its queries and the keys that are there, counted one query at a time."""
    own = [tokens(order, r, cp, T) for r in range(cp)]
    return [[sum(bisect.bisect_right(own[r - s], q) for q in own[r]) for s in range(cp)] for r in range(cp)]


def lasts(pairs):
    """All wait for the rank that has most to do, at every step."""
    return sum(map(max, zip(*pairs)))


def sent(cp, N):
    """Bytes that a rank with N tokens sends round the ring in a step of training: keys and values in either pass, and
    their gradients in one."""
    return LAYERS * (cp - 1) * N * KEYS * (2 * lab.FLOAT + 4)


def activations(N):
    """Bytes that a rank keeps of N tokens: x, h1, x_mid, h2, q and o; k and v; gate, up, their product; a number for each
    of two norms and each head. The model's head keeps what enters and what leaves its norm."""
    block = 6 * HIDDEN + KEYS + 3 * FFN + 2 + HEADS
    return lab.FLOAT * N * (LAYERS * block + 2 * HIDDEN + 1)


# ---- who computes how much ------------------------------------------------------------------------------------------
def measure(a, cp, order, T, batch):
    """A run of some steps. What leaves before the first and after the last is what a shorter run sends too."""
    f = [*MODEL, "--seq", T, "--micro-batch", batch, "--cp", cp, "--warmup", 5]
    f += ["--cp-order", order] if cp > 1 else []
    steps = 2 if a.quick else 10
    run = lab.train(a, *f, "--steps", steps, ranks=cp)
    short = lab.train(a, *f, "--steps", 1, ranks=cp) if cp > 1 else run
    run.counted = [n / (steps * batch * LAYERS * 2) for n in run.pairs]  # of a sequence, in one pass of one layer
    for group in "cp", "dp":
        for what in "bytes", "calls":
            more = run.mean(what, group) - short.mean(what, group)
            setattr(run, f"{group}_{what}", more / (steps - 1))
    return run


def shares(a):
    """The same sequences on one rank, two and four, in both orders."""
    T, batch = (64, 2) if a.quick else (256, 2)
    shapes = [(1, ORDERS[0]), *((cp, order) for cp in (2, RANKS) for order in ORDERS)]
    runs = {shape: measure(a, *shape, T, batch) for shape in shapes}
    shared = SimpleNamespace(T=T, runs=runs, pairs={order: work(order, RANKS, T) for order in ORDERS})
    show_work(shared)
    show_messages(runs, T * batch)
    return shared


def show_work(shared):
    T, rows = shared.T, []
    for order, pairs in shared.pairs.items():
        counted = shared.runs[RANKS, order].counted
        for r, steps in enumerate(pairs):
            rows.append([f"{order}, rank {r}", *steps, sum(steps), f"{counted[r]:.0f}",
                         f"{counted[r] * RANKS / sum(counted):.3f}"])  # fmt: skip
    print(f"\npairs of a query and a key that it may see, of a head and a sequence of {T} tokens on {RANKS} ranks:\n"
          "by the order of tokens at each step of the ring, and as the ranks have counted them")  # fmt: skip
    lab.table(["rank", *(f"step {s}" for s in range(RANKS)), "in all", "counted", "of the mean"], rows)
    contiguous, zigzag = map(lasts, shared.pairs.values())
    print("\nif every step of the ring lasts as long as the rank with most needs: "
          f"contiguous {contiguous}, zigzag {zigzag}; {contiguous / zigzag:.3f} times as long")  # fmt: skip


def show_messages(runs, tokens):
    rows = []
    for (cp, order), run in runs.items():
        apart = max(abs(x - y) for x, y in zip(run.loss, runs[1, ORDERS[0]].loss))
        both = 2 * lab.FLOAT * run.start["params"] * (cp - 1) / cp
        name = f"--cp {cp} {order}" if cp > 1 else "--cp 1"
        rows.append([name, lab.mb(run.cp_bytes), lab.mb(sent(cp, tokens // cp)), f"{run.cp_calls:.0f}",
                     lab.mb(run.dp_bytes), lab.mb(both), f"{run.loss[-1]:.4f}", f"{apart:.1e}"])  # fmt: skip
    print("\nsent by a rank in a step, MB: round the ring, by formula L·(cp−1)·N·E·12, N tokens a rank and "
          f"E = {KEYS};\nand for the gradients' sum, 4·2Ψ·(cp−1)/cp")  # fmt: skip
    columns = ["run", "ring", "by formula", "messages", "gradients", "their formula", "last loss", "apart by"]
    lab.table(columns, rows)


# ---- memory ---------------------------------------------------------------------------------------------------------
WAYS = {"naive": ["--attention", "naive"], **{f"cp {n}": ["--cp", n] for n in (1, 2, RANKS)}}


def memory(a):
    """What a rank keeps of one sequence, by its length."""
    lengths, measured = ([256, 512], [256]) if a.quick else ([1024, 2048, 4096, 8192], [1024, 2048])
    rows, kept, most = [], {}, f"cp {RANKS}"
    for T in lengths:
        for way, cut in WAYS.items():
            f = [*MODEL, "--seq", T, "--micro-batch", 1, *cut]
            if T in measured:
                kept[T, way] = lab.train(a, *f, "--steps", 1, ranks=cut[1] if way != "naive" else 1).memory
            else:
                kept[T, way] = lab.plan(*f)["memory"]
        held = [kept[T, way]["activations"] for way in WAYS] + [activations(T // RANKS)]
        whole = [kept[T, most]["communication"], kept[T, "naive"]["peak"], kept[T, most]["peak"]]
        rows.append([T, *map(lab.mb, held + whole), "run" if T in measured else "--dry-run"])
    print("\nactivations of a rank, MB, one sequence of T tokens: with the T×T matrix of each head (naive, one rank),\n"
          f"and with flash attention on 1, 2 and {RANKS} ranks; buffers for messages; and the whole memory of two")  # fmt: skip
    lab.table(["T", *WAYS, "by formula", "buffers", "all of naive", f"all of {most}", "from"], rows)
    rows = []
    for cp in 1, 2, 4, 8:
        p = lab.plan(*LONG, "--cp", cp)
        act = p["classic_activations"]
        sizes = [*(act[x] for x in ("matrix", "flash", "full")), p["classic_state"]]
        rows.append([f"--tp 2 --cp {cp}", p["local_seq"], *(f"{n / 2**30:.1f}" for n in sizes)])
    print("\nllama-8B with 131072 tokens a sequence, GiB of a rank by the classic estimate: activations with the T×T\n"
          "matrix, with flash attention, with full recomputation; and 16 bytes a parameter")  # fmt: skip
    lab.table(["run", "tokens a rank", "T×T kept", "flash", "full", "state"], rows)
    return SimpleNamespace(lengths=lengths, measured=measured, kept=kept)


# ---- time -----------------------------------------------------------------------------------------------------------
def waits(trace):
    """Of each step: its ms, and those of them in which each rank waits for a message."""
    ranks = {}
    for e in json.loads(trace.read_text())["traceEvents"]:
        if e["ph"] == "X" and e["tid"] == 0:
            ranks.setdefault(e["pid"], []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    found = {}  # [step]: of each rank
    for _, events in sorted(ranks.items()):
        ends = [end for _, end, name in events if name == "optimizer"]
        begins = [begin for begin, _, name in sorted(events) if name == "forward"]  # a validation's come later
        for step, (begin, end) in enumerate(zip(begins, ends)):
            idle = sum(y - x for x, y, name in events if name.startswith("wait for") and begin <= x < end)
            found.setdefault(step, []).append(((end - begin) / 1e3, idle / 1e3))
    return [SimpleNamespace(ms=max(ms for ms, _ in step), waits=[w for _, w in step]) for step in found.values()]


def times(a):
    """Two ranks, each with a core; the orders by turns: what else the machine does comes and goes."""
    steps_of = {}
    for T, steps, rounds in [(128, 2, 1)] if a.quick else [(1024, 4, 3), (2048, 3, 3), (4096, 2, 2)]:
        for _ in range(rounds):
            for order in ORDERS:
                trace = a.out.resolve() / f"9_context.{order}.{T}.trace.json"
                f = [*MODEL, "--seq", T, "--micro-batch", 1, "--cp", 2, "--cp-order", order, "--steps", steps]
                lab.train(a, *f, "--trace", trace, ranks=2)
                steps_of[T, order] = steps_of.get((T, order), []) + waits(trace)
    found = {run: min(those, key=lambda step: step.ms) for run, those in steps_of.items()}
    rows = []
    for (T, order), x in found.items():
        rows.append([f"T {T}, {order}", f"{x.ms:.0f}", *(f"{w:.0f}" for w in x.waits), f"{evenly(x):.0f}",
                     f"{100 * (x.ms / found[T, 'zigzag'].ms - 1):+.0f} %"])  # fmt: skip
    alone = lasts(work(ORDERS[0], 2, T)) / lasts(work(ORDERS[1], 2, T))
    print("\ntwo ranks with a core each: ms of the quickest step, and how much of it each rank waits for messages; what\n"
          "it would take if both waited for none and shared that time; how much longer it is than with zigzag (by the\n"
          f"pairs, attention alone takes {alone:.3f} times as long)")  # fmt: skip
    lab.table(["run", "ms a step", "rank 0 waits", "rank 1 waits", "shared evenly", "longer"], rows)
    return found


def evenly(x):
    return x.ms - sum(x.waits) / len(x.waits)


# ---- the picture ----------------------------------------------------------------------------------------------------
def draw(plt, shared, kept, timed):
    figure, (bars, speed, lines) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    colours = ["#5b6f84", "#76b7b2", "#f28e2b", "#edc948"]
    mean = sum(map(sum, shared.pairs["zigzag"])) / RANKS
    for i, order in enumerate(ORDERS):
        x = [i * (RANKS + 1) + r for r in range(RANKS)]
        below, counted = [0] * RANKS, shared.runs[RANKS, order].counted
        for s in range(RANKS):
            heights = [steps[s] for steps in shared.pairs[order]]
            bars.bar(x, heights, 0.7, below, color=colours[s], label=None if i else f"step {s}")
            below = [n + h for n, h in zip(below, heights)]
        bars.plot(x, counted, "k_", ms=24, mew=1.5, label="counted" if i == 0 else None)
        text = f"{order}: most = {max(counted) * RANKS / sum(counted):.2f} × mean"
        bars.text(sum(x) / RANKS, 1.05 * lasts(shared.pairs["contiguous"]), text, ha="center", fontsize=9)
    bars.axhline(mean, color="k", lw=1, ls=":", label="mean")
    ranks = [i * (RANKS + 1) + r for i in range(2) for r in range(RANKS)]
    bars.set_xticks(ranks, [f"{r}" for _ in ORDERS for r in range(RANKS)])
    bars.set(xlabel="rank", title=f"pairs of a query and a key, T = {shared.T}")
    lengths = sorted({T for T, _ in timed})
    for i, T in enumerate(lengths):
        for k, order in enumerate(ORDERS):
            x, unit = timed[T, order], timed[T, "zigzag"].ms
            place, idle, first = i + (k - 0.5) * 0.38, (x.ms - evenly(x)) / unit, i == 0
            speed.bar(place, x.ms / unit - idle, 0.34, color=colours[k], label=order if first else None)
            speed.bar(place, idle, 0.34, x.ms / unit - idle, color="#e15759", alpha=0.6,
                      label="a rank waits, mean" if first and k else None)  # fmt: skip
    speed.axhline(1.5, color="k", lw=1, ls=":", label="1.5: attention alone")
    speed.set_xticks(range(len(lengths)), [f"T = {T}" for T in lengths])
    speed.set(title="a step on two ranks, zigzag = 1")
    for way, colour in zip(WAYS, ["#e15759", *colours]):
        mb = [kept.kept[T, way]["activations"] / 1e6 for T in kept.lengths]
        label = "T×T matrix, one rank" if way == "naive" else f"flash, {way}"
        lines.plot(kept.lengths, mb, color=colour, lw=1.4, label=label)
        for T, y in zip(kept.lengths, mb):
            lines.plot(T, y, "o", color=colour, mfc=colour if T in kept.measured else "white")
    lines.set_xscale("log", base=2)
    lines.set_yscale("log")
    lines.set_xticks(kept.lengths, [f"{T}" for T in kept.lengths])
    lines.minorticks_off()
    lines.set(xlabel="tokens of a sequence (full dot: measured; else --dry-run)", title="activations of a rank, MB")
    bars.set_ylim(0, 1.3 * bars.get_ylim()[1])
    speed.set_ylim(0, 1.35 * max(1.5, speed.get_ylim()[1]))
    for ax, columns in (bars, 3), (speed, 2), (lines, 1):
        ax.legend(frameon=False, loc="upper left" if ax is lines else "upper center", ncols=columns, fontsize=9)
    return figure


def main():
    a = lab.begin(__doc__)
    shared = shares(a)
    kept = memory(a)
    timed = times(a)
    if plt := lab.pyplot("the bars"):
        lab.save(draw(plt, shared, kept, timed), a, "9_context.png")


if __name__ == "__main__":
    main()

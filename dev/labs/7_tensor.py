#!/usr/bin/env python3
"""Lab 7: every matrix in slices, and what that sends (dev/labs/7_tensor.md).

    python3 dev/labs/7_tensor.py
"""
import math
from types import SimpleNamespace

import lab

FFN = 4  # channels of the MLP, over C
LAYERS, HIDDEN, HEADS, SEQ, VOCAB, BATCH = 4, 128, 8, 64, 256, 32
TENSOR = [(1, ""), (2, ""), (2, "--sp"), (4, ""), (4, "--sp")]
PIPED = 8  # micro-batches of --pp 2, which cut the same batch
# The Ultra-Scale Playbook's tokens/s of an H100: 8 in one host, 16 in two; of a pipeline only what is lost.
PLAYBOOK = {"--dp 2": (40150, 37610, "1B"), "--tp 2": (10903, 6246, "3B"), "--tp 2 --sp": (10889, 6159, "3B"),
            "--pp 2": (100, 85.1, None)}  # fmt: skip


# ---- formulas -------------------------------------------------------------------------------------------------------
def activations(tp, sp):
    """Bytes that a rank keeps from forward to backward: what all keep (--sp: their rows of it), and a slice."""
    tokens, floats = BATCH * SEQ, lab.FLOAT / 2  # train.h counts for values of two bytes
    block, slice_of_block = 8 * floats * HIDDEN, (8 + 4 * FFN) * floats * HIDDEN
    norms = 4 * lab.FLOAT  # mean and 1/deviation of a row, two norms; attention keeps a number a head
    head = 2 * lab.FLOAT * (HIDDEN + 1)  # what enters the last norm and what leaves it
    whole = tokens * (LAYERS * (block + norms) + head)
    cut = tokens * LAYERS * (slice_of_block + HEADS * lab.FLOAT)
    return whole / (tp if sp else 1), cut / tp


def parameters():
    C = HIDDEN
    return VOCAB * C + SEQ * C + LAYERS * (12 * C * C + 13 * C) + 2 * C


def sent(ranks, dp, sp, batch=BATCH):
    """Bytes that a rank sends in a step of one micro-batch, and how that is written."""
    L, C, tokens = LAYERS, HIDDEN, batch * SEQ
    if dp:
        elements, formula = 2 * parameters(), "2Ψ"
    else:  # an all-reduce is 2; the loss needs three numbers a row, and sp once a step sums small gradients
        sums, small = (10 * L + 5, 6 * L + 2) if sp else (8 * L + 4, 0)
        elements = sums * tokens * C + 6 * tokens + 2 * small * C
        formula = f"({'10L + 5' if sp else '8L + 4'})·N·C + …"
    return lab.FLOAT * elements * (ranks - 1) / ranks, formula


# ---- one host -------------------------------------------------------------------------------------------------------
def flags(ranks, dp, sp, batch=BATCH):
    cut = ["--micro-batch", batch // ranks] if dp else ["--micro-batch", batch, "--tp", ranks]
    size = ["--layers", LAYERS, "--hidden", HIDDEN, "--heads", HEADS, "--seq", SEQ, "--vocab", VOCAB]
    return [*size, *cut, *(["--sp"] if sp else [])]


def pipeline(batch):
    """Flags of two stages, and bytes that a rank sends a step: the residual stream, or its gradient, of every token; and
    half of the tied embedding's sum, of which both need the whole."""
    cut = flags(PIPED, True, "", batch)  # a micro-batch is as small as a share of a dp rank
    elements = batch * SEQ * HIDDEN + (VOCAB + SEQ) * HIDDEN
    return [*cut, "--accum", PIPED, "--pp", 2], lab.FLOAT * elements


def words(ranks, dp, sp):
    return f"--{'dp' if dp else 'tp'} {ranks}{' --sp' if sp else ''}"


def measure(a, ranks, dp, sp):
    """A run of some steps. What leaves before the first and after the last is what a shorter run sends too."""
    f, steps = [*flags(ranks, dp, sp), "--warmup", 5, "--steps"], 2 if a.quick else 10
    run = lab.train(a, *f, steps, ranks=ranks)
    short = lab.train(a, *f, 1, ranks=ranks) if ranks > 1 else run
    for what in "bytes", "calls":
        setattr(run, f"{what}_a_step", (run.mean(what, "dp", "tp") - short.mean(what, "dp", "tp")) / (steps - 1))
    return run


def show_memory(runs):
    rows = []
    for tp, sp in TENSOR:
        all_keep, cut = activations(tp, sp)
        m = runs[tp, False, sp].memory
        held = sum(m[x] for x in ("weights", "gradients", "optimizer"))
        rows.append([words(tp, False, sp), lab.mb(m["activations"]), lab.mb(all_keep + cut), lab.mb(all_keep),
                     lab.mb(cut), lab.mb(m["communication"]), lab.mb(held)])  # fmt: skip
    print("\nheld by rank 0, MB: activations as measured; by formula what all keep (--sp: cut by rows), and slices")
    lab.table(["run", "activations", "by formula", "rows", "slices", "communication", "weights to optimizer"], rows)
    two, four = (runs[tp, False, ""].memory["activations"] for tp in (2, 4))
    print(f"\nwithout --sp, however many share, each keeps 2 · {lab.mb(four)} − {lab.mb(two)} = "
          f"{lab.mb(2 * four - two)} MB")  # fmt: skip


def show_messages(runs):
    rows = []
    for (ranks, dp, sp), run in runs.items():
        predicted, formula = sent(ranks, dp, sp) if ranks > 1 else (0, "0")
        apart = max(abs(x - y) for x, y in zip(run.loss, runs[1, False, ""].loss))
        rows.append([words(ranks, dp, sp), lab.mb(run.bytes_a_step), lab.mb(predicted), formula,
                     f"{run.calls_a_step:.0f}", f"{run.loss[-1]:.4f}", f"{apart:.1e}"])  # fmt: skip
    print(f"\nsent by a rank in a step, MB; the same {BATCH} sequences in every row, so the same losses; "
          f"Ψ = {parameters()}, N·C = {BATCH * SEQ * HIDDEN}")  # fmt: skip
    lab.table(["run", "sent", "by formula", "elements × (ranks−1)/ranks", "messages", "last loss", "apart by"], rows)


# ---- two hosts ------------------------------------------------------------------------------------------------------
def crossing(a):
    """Two ranks on one host, then on two with links between them; None where no cluster can be."""
    if why := lab.why_no_cluster():
        print(f"\nno cluster in a box here, so nothing crosses hosts: {why}")
        return None
    batch, steps, rounds = (8, 2, 1) if a.quick else (64, 3, 3)
    shapes, runs = [(2, True, ""), (2, False, ""), (2, False, "--sp")], {}
    ways = {words(*shape): (flags(*shape, batch), sent(*shape, batch)[0]) for shape in shapes}
    ways["--pp 2"] = pipeline(batch)

    def measure_all(rate):
        launcher = lab.cluster(2, 2, "--rate", f"{rate}mbit") if rate else lab.cluster(1, 2)
        for name, (cut, _) in ways.items():
            run = lab.train(a, *cut, "--steps", steps, launcher=launcher)
            key = name, rate
            runs[key] = min(run, runs.get(key, run), key=lambda r: r.quickest_ms)

    for _ in range(rounds):
        measure_all(0)
    alone = runs["--tp 2", 0].quickest_ms
    as_slow = math.ceil(sent(2, False, "", batch)[0] * 8 / alone / 1e3)  # bits a millisecond are kbit/s
    rates = [a.rate] if a.rate else [math.ceil(as_slow / n) for n in ([2] if a.quick else [2, 5])]
    print(f"\na step of --tp 2 on one host takes {alone:.0f} ms; what it sends takes as long at {as_slow} Mbit/s")
    for _ in range(rounds):  # side by side: what else the machine does comes and goes
        for rate in rates if a.quick else [0, *rates]:
            measure_all(rate)
    rows = []
    for rate in [0, *rates]:
        for name, (_, n) in ways.items():
            run, wire = runs[name, rate], n * 8 / rate / 1e3 if rate else 0
            rows.append([name, run.start["hosts"], rate or "memory", lab.mb(n), f"{wire:.0f}",
                         f"{runs[name, 0].quickest_ms + wire:.0f}", f"{run.quickest_ms:.0f}",
                         f"{tokens_per_s(run):.0f}", percent(runs, name, rate)])  # fmt: skip
    print(f"\ntwo ranks and {batch} sequences on one host, and on two with a link of so many Mbit/s; the quickest step")
    columns = ["run", "hosts", "Mbit/s", "MB a step", "ms on the link", "if none hid", "ms a step", "tokens/s", "change"]
    lab.table(columns, rows)
    rows = []
    for name, (before, after, model) in PLAYBOOK.items():
        rows.append([name, *(percent(runs, name, rate) for rate in rates),
                     f"{100 * (after / before - 1):+.{0 if model else 1}f} %",
                     f"{before} → {after}" if model else "-", model or "-"])  # fmt: skip
    print("\nwhat crossing costs; of another machine, the Playbook's: groups of 8 H100s in one host, and of 16 in two")
    lab.table(["run", *(f"{rate} Mbit/s" for rate in rates), "Playbook", "tokens/s a GPU", "model"], rows)
    return SimpleNamespace(runs=runs, rates=rates)


def tokens_per_s(run):
    return 1e3 * run.start["tokens_per_step"] / run.quickest_ms


def left(runs, name, rate):
    """Percent of one host's tokens/s."""
    return 100 * tokens_per_s(runs[name, rate]) / tokens_per_s(runs[name, 0])


def percent(runs, name, rate):
    return f"{round(left(runs, name, rate)) - 100:+d} %"


# ---- the picture ----------------------------------------------------------------------------------------------------
def draw(plt, runs, crossed):
    figure, axes = plt.subplots(1, 3 if crossed else 2, figsize=(16 if crossed else 11, 4.5), layout="constrained")
    memory, messages = axes[:2]
    for i, (tp, sp) in enumerate(TENSOR):
        all_keep, cut = activations(tp, sp)
        memory.bar(i, all_keep / 1e6, 0.6, color="#f28e2b", label="rows (--sp cuts them)" if i == 0 else None)
        memory.bar(i, cut / 1e6, 0.6, all_keep / 1e6, color="#5b6f84", label="slices" if i == 0 else None)
        measured = runs[tp, False, sp].memory["activations"] / 1e6
        memory.plot([i - 0.4, i + 0.4], [measured, measured], "k--", lw=1.2, label="measured" if i == 0 else None)
    memory.set_xticks(range(len(TENSOR)), [words(tp, False, sp).replace(" --", "\n--") for tp, sp in TENSOR])
    memory.set(ylabel="MB a rank", title="activations")
    names = [key for key in runs if key[0] > 1]
    for i, key in enumerate(names):
        messages.bar(i, runs[key].bytes_a_step / 1e6, 0.6, color="#76b7b2" if key[1] else "#e15759")
        messages.plot(i, sent(*key)[0] / 1e6, "k_", ms=30, label="formula" if i == 0 else None)
    messages.set_xticks(range(len(names)), [words(*key).replace(" --", "\n--") for key in names])
    messages.set(ylabel="MB a rank and step", title="sent, the same batch")
    if crossed:
        links = axes[2]
        for i, (name, (before, after, _)) in enumerate(PLAYBOOK.items()):
            heights = [left(crossed.runs, name, rate) for rate in crossed.rates] + [100 * after / before]
            x = [k + (i - 1.5) * 0.2 for k in range(len(heights))]
            links.bar(x, heights, 0.18, label=name, color=("#76b7b2", "#e15759", "#ff9d9a", "#5b6f84")[i])
        names = [*(f"{rate} Mbit/s" for rate in crossed.rates), "Playbook,\nH100s"]
        links.set_xticks(range(len(names)), names)
        links.axhline(100, color="k", lw=1.2, ls="--")
        links.set(ylabel="% of one host's tokens/s", title="the group on two hosts")
    for ax in axes:
        ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
        ax.legend(frameon=False, loc="upper right", ncols=2 if crossed and ax is axes[-1] else 3)
    return figure


def main():
    a = lab.begin(__doc__, rate="Mbit/s of the link between hosts; else what --tp 2 sends takes two steps, then five")
    shapes = [(1, False, ""), *((n, True, "") for n in (2, 4)), *((tp, False, sp) for tp, sp in TENSOR[1:])]
    runs = {shape: measure(a, *shape) for shape in shapes}
    show_memory(runs)
    show_messages(runs)
    crossed = crossing(a)
    if plt := lab.pyplot("the bars"):
        lab.save(draw(plt, runs, crossed), a, "7_tensor.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Lab 4: what ZeRO shards, and what it sends for that (dev/labs/4_zero.md).

    python3 dev/labs/4_zero.py
"""
import lab

RANKS = 4
LAYERS, HIDDEN, SEQ, VOCAB = 8, 128, 64, 256
BATCH = 4  # sequences a step and rank: one micro-batch of 4, or 4 of 1
ACCUMS = [1, 4]
ROWS = ["weights", "gradients", "optimizer", "tied_embedding", "whole_buckets"]
COLOURS = ["#5b6f84", "#f28e2b", "#b07aa1", "#ffbe7d", "#edc948"]  # of dev/plot.py


def buckets():
    """Elements of the embedding, of each block and of the head."""
    C = HIDDEN
    block = 12 * C * C + 13 * C  # qkv 3C², out C², the MLP's two 4C²; biases and norms 13C
    return [VOCAB * C + SEQ * C, *[block] * LAYERS, 2 * C]


def held(stage):
    """Bytes that a rank holds, by ledger row: 4 of weights, 4 of gradients, 8 of AdamW's moments a parameter."""
    b, X = buckets(), lab.FLOAT
    whole = sum(b)
    shard = sum(-(-n // RANKS) for n in b)  # rank 0's: where N does not divide a bucket, the longest
    slots = max(b[2::2]) + max(b[1::2])  # two, for buckets by turns; the tied embedding has memory of its own
    what_is_whole = {0: 0, 1: 0, 2: 1, 3: 2}[stage]  # gradients; weights too
    return {
        "weights": X * (shard if stage >= 3 else whole),
        "gradients": X * (shard if stage >= 2 else whole),
        "optimizer": 2 * 4 * (shard if stage >= 1 else whole),
        "tied_embedding": X * what_is_whole * b[0],
        "whole_buckets": X * what_is_whole * slots,
    }


def sent(stage, a):
    """Bytes that a rank sends a step."""
    b = buckets()
    psi, spared = sum(b), b[0] + b[-1] + b[-2]  # spared: whole all the same when ZeRO-3's backward begins
    elements = [2 * psi, 2 * psi, (a + 1) * psi, a * (3 * psi - spared)][stage]
    return lab.FLOAT * elements * (RANKS - 1) / RANKS


FORMULA = ["2Ψ", "2Ψ", "(a+1)Ψ", "a(3Ψ − Ψ₀ − Ψ₋₁ − Ψ₋₂)"]


def draw(plt, runs):
    figure, (memory, messages) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    below = [0.0] * 4
    for name, colour in zip(ROWS, COLOURS):
        values = [runs[stage, 1].memory[name] / 1e6 for stage in range(4)]
        memory.bar(range(4), values, 0.6, below, label=name, color=colour)
        below = [x + y for x, y in zip(below, values)]
    for stage in range(4):
        total = sum(held(stage).values()) / 1e6
        memory.plot([stage - 0.4, stage + 0.4], [total, total], "k--", lw=1.2, label=None if stage else "formula")
    memory.set(ylabel="MB a rank", title=f"held, {RANKS} ranks", xlabel="--zero")
    for i, accum in enumerate(ACCUMS):
        x = [stage + (i - 0.5) * 0.38 for stage in range(4)]
        messages.bar(x, [runs[s, accum].sent / 1e6 for s in range(4)], 0.34, label=f"--accum {accum}")
        messages.plot(x, [sent(s, accum) / 1e6 for s in range(4)], "k_", ms=24, label=None if i else "formula")
    messages.set(ylabel="MB a rank and step", title="sent, the same batch", xlabel="--zero")
    for axes in (memory, messages):
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_xticks(range(4))
        axes.legend(frameon=False)
    return figure


def measure(a, stage, accum):
    """A run of some steps. What leaves before the first and after the last is what a shorter run sends too."""
    flags = ["--layers", LAYERS, "--hidden", HIDDEN, "--seq", SEQ, "--vocab", VOCAB, "--zero", stage]
    flags += ["--accum", accum, "--micro-batch", BATCH // accum, "--warmup", 5]
    few, more = 1, 4 if a.quick else 20
    short, run = (lab.train(a, *flags, "--steps", n, ranks=RANKS) for n in (few, more))
    run.sent = (run.bytes - short.bytes) / (more - few)
    return run


def main():
    a = lab.begin(__doc__)
    runs = {(stage, accum): measure(a, stage, accum) for accum in ACCUMS for stage in range(4)}
    print(f"\nheld by rank 0 of {RANKS}, MB; Ψ = {sum(buckets())} parameters")
    rows = []
    for stage in range(4):
        memory = runs[stage, 1].memory
        total = sum(memory[name] for name in ROWS)
        rows.append([f"--zero {stage}", *(lab.mb(memory[name]) for name in ROWS), lab.mb(total),
                     lab.mb(sum(held(stage).values()))])  # fmt: skip
    lab.table(["stage", *ROWS, "together", "by formula"], rows)
    print("\nsent by a rank in a step, MB; the same 16 sequences in every row, so the same losses")
    rows = []
    for accum in ACCUMS:
        for stage in range(4):
            run = runs[stage, accum]
            apart = max(abs(x - y) for x, y in zip(run.loss, runs[0, 1].loss))
            rows.append([f"--zero {stage} --accum {accum}", lab.mb(run.sent), lab.mb(sent(stage, accum)), FORMULA[stage],
                         f"{run.ms:.0f}", f"{run.loss[-1]:.4f}", f"{apart:.1e}"])  # fmt: skip
    lab.table(["run", "sent", "by formula", "elements × (N−1)/N", "ms a step", "last loss", "apart by"], rows)
    if plt := lab.pyplot("the bars"):
        lab.save(draw(plt, runs), a, "4_zero.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Lab 2: one batch, cut in many ways (dev/labs/2_accumulation.md).

    python3 dev/labs/2_accumulation.py
"""
import lab

BATCH = 16  # sequences a step
# ranks, accumulation, micro-batch: each product is the batch
SPLITS = [(1, 1, 16), (1, 4, 4), (1, 16, 1), (2, 1, 8), (2, 4, 2)]
OTHER_BATCHES = [(1, 1, 4), (1, 4, 16)]


def draw(plt, runs):
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", width_ratios=[3, 2])
    for i, (split, run) in enumerate(runs.items()):
        of_the_batch = split in SPLITS
        style = {"lw": 6 - i, "alpha": 0.7} if of_the_batch else {"lw": 1.5, "ls": "--"}  # wide below, narrow on top
        name = "{} × {} × {}".format(*split) + ("" if of_the_batch else f" = {split[0] * split[1] * split[2]}")
        curves.plot(range(1, len(run.loss) + 1), run.loss, label=name, **style)
    curves.set(xlabel="step", ylabel="training loss", title="ranks × accumulation × micro-batch")
    curves.legend(frameon=False)
    names = ["{} × {} × {}".format(*s) for s in SPLITS]
    bars.barh(names, [runs[s].memory["activations"] / 1e6 for s in SPLITS], color="#59a14f")
    bars.invert_yaxis()
    bars.set(xlabel="activations of a rank, MB", title=f"the same {BATCH} sequences a step")
    return figure


def main():
    a = lab.begin(__doc__)
    runs, rows = {}, []
    for split in SPLITS + OTHER_BATCHES:
        ranks, accum, micro = split
        steps = 4 if a.quick else 40
        flags = ["--accum", accum, "--micro-batch", micro, "--steps", steps, "--warmup", 5]
        runs[split] = run = lab.train(a, *flags, ranks=ranks)
        first = runs[SPLITS[0]].loss
        apart = max(abs(x - y) for x, y in zip(run.loss, first))
        activations = run.memory["activations"]
        rows.append([f"{ranks} × {accum} × {micro}", ranks * accum * micro, f"{run.loss[-1]:.4f}", f"{apart:.1e}",
                     lab.mb(activations), lab.mb(activations / micro), lab.mb(run.memory["peak"]),
                     f"{run.tokens_per_s:.0f}"])  # fmt: skip
    lab.table(["ranks × accum × micro-batch", "batch", "last loss", "apart by", "activations MB", "a sequence",
               "in all MB", "tokens/s"], rows)  # fmt: skip
    print("\n(apart by: the largest distance from the first row's losses, over all steps)")
    if plt := lab.pyplot("the curves"):
        lab.save(draw(plt, runs), a, "2_accumulation.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Lab 10: experts, who gets the tokens, and what their way costs (dev/labs/10_experts.md).

    python3 dev/labs/10_experts.py
"""
from types import SimpleNamespace

import lab

RANKS = 4
LAYERS, HIDDEN, SEQ, EXPERTS, TOPK, FFN = 4, 128, 64, 8, 2, 352
BATCH = 16  # sequences a step, over all ranks
MODEL = ["--model", "moe-tiny"]
BALANCES = ["none", "aux", "bias"]
SMALL = ["--layers", 2, "--hidden", 64, "--ffn", 64]  # learns in seconds, and slowly enough for a bias to follow


# ---- formulas -------------------------------------------------------------------------------------------------------
def over_ep(k, ep):
    """Bytes that a rank sends for the experts in a step, where routing is even: a copy of each token goes there and home,
    forward and backward, and stays in one case of ep."""
    return LAYERS * 4 * (BATCH // ep * SEQ) * k * HIDDEN * lab.FLOAT * (ep - 1) / ep


def over_tp(tp):
    """The same layers in slices: one sum over the ranks forward and one backward, of all tokens' rows; a sum is sent twice."""
    return LAYERS * 2 * 2 * BATCH * SEQ * HIDDEN * lab.FLOAT * (tp - 1) / tp


def expert_parameters():
    return 3 * HIDDEN * FFN


# ---- who gets the tokens --------------------------------------------------------------------------------------------
def mean(values):
    return sum(values) / len(values)


def balances(a):
    """The same start and the same text, with each way of balancing."""
    steps = 4 if a.quick else 300
    f = [*MODEL, *SMALL, "--micro-batch", BATCH // RANKS, "--ep", RANKS, "--steps", steps, "--lr", 6e-4]
    runs = {way: lab.train(a, *f, "--balance", way, ranks=RANKS) for way in BALANCES}
    last, rows = max(1, steps // 10), []
    for way, run in runs.items():
        loads = [r["load"] for r in run.routers]
        shares = [100 * share for r in run.routers[-last:] for block in r["share"] if block for share in block]
        rows.append([way, f"{loads[0]:.2f}", f"{max(loads):.2f}", f"{mean(loads[-last:]):.2f}", f"{min(shares):.1f} %",
                     f"{max(shares):.1f} %", f"{mean(run.loss[-last:]):.4f}"])  # fmt: skip
    print(f"\nload: the fullest expert of the worst block, over the mean of all {EXPERTS}; at the first step, at most, and over\n"
          f"the last {last} of {steps}, as are the least and the largest share of a block's copies, and the loss")  # fmt: skip
    lab.table(["--balance", "first", "most", "last", "least share", "largest", "loss"], rows)
    rows = []
    for way, run in runs.items():
        even = run.memory["predicted"]["activations"]
        for rank, memory in enumerate(run.memories):
            e = run.experts[rank]
            rows.append([f"{way}, rank {rank}", e["sent"], e["received"], lab.mb(memory["activations"]), lab.mb(even),
                         f"{memory['activations'] / even:.2f}"])  # fmt: skip
    print("\ncopies of tokens that left each rank in the run, and came; activations in MB, at most, and where all is even")
    lab.table(["run", "left", "came", "activations", "even", "times"], rows)
    return runs


# ---- bytes ----------------------------------------------------------------------------------------------------------
def measure(a, *flags):
    """Bytes that a rank sends in a step, by group, and copies of the same steps: of all but the first, for what leaves before
    it and after the last a run of one step sends, too. (That is an evaluation; so no weight moves.)"""
    steps = 2 if a.quick else 3
    f = [*MODEL, *flags, "--lr", 0, "--min-lr", 0]
    run, short = (lab.train(a, *f, "--steps", n, ranks=RANKS) for n in (steps, 1))
    run.sent = {g: (run.mean("bytes", g) - short.mean("bytes", g)) / (steps - 1) for g in ("ep", "tp")}
    run.copies = sum(r["sent"] for r in run.routers[1:]) / (steps - 1) / RANKS
    return run


def bytes_of_both(a):
    """Experts over the ranks, or each of them in slices."""
    rows, found, cut = [], {}, ["--micro-batch", BATCH, "--tp", RANKS]
    thin = measure(a, *cut, "--layers", LAYERS // 2)
    sliced = measure(a, *cut)
    half = (sliced.sent["tp"] - thin.sent["tp"]) / (LAYERS // 2) * LAYERS / 2  # of every block, the MLP's half
    gates = LAYERS * 2 * BATCH * SEQ * TOPK * lab.FLOAT * (RANKS - 1) / RANKS
    for k in 1, 2, 4, 8:
        run = found[k] = measure(a, "--topk", k, "--micro-batch", BATCH // RANKS, "--ep", RANKS, "--balance", "none")
        counted = run.copies * 4 * HIDDEN * lab.FLOAT
        told = LAYERS * (RANKS - 1) * EXPERTS * 4
        rows.append([f"--ep {RANKS} --topk {k}", lab.mb(run.sent["ep"] - told), lab.mb(counted), lab.mb(over_ep(k, RANKS)),
                     f"{over_ep(k, RANKS) / over_tp(RANKS):.2f}"])  # fmt: skip
    rows.append([f"--tp {RANKS}", lab.mb(half - gates / 2), "-", lab.mb(over_tp(RANKS)), "1.00"])
    print(f"\nsent by a rank in a step for the experts, MB, of {BATCH} sequences: tokens' copies by --ep, as the routers count\n"
          "them, and if all experts got as many, 4·L·(N/ep)·k·C·(ep−1)/ep; the sums of --tp, 4·L·N·C·(tp−1)/tp; and "
          "formula over --tp's")  # fmt: skip
    lab.table(["run", "sent", "by its routing", "even", "of --tp"], rows)
    return SimpleNamespace(ep={k: run.sent["ep"] for k, run in found.items()}, tp=half - gates / 2)


# ---- groups ---------------------------------------------------------------------------------------------------------
def groups(a):
    """One group of experts a rank, as if each were a host: to how many does a token travel?"""
    rows = []
    for most in 2, 3, 4:
        f = ["--topk", 4, "--route-groups", RANKS, "--route-nodes", most, "--micro-batch", BATCH // RANKS, "--ep", RANKS]
        run = lab.train(a, *MODEL, *f, "--balance", "bias", "--steps", 2 if a.quick else 20, ranks=RANKS)
        met, sent, tokens = (mean([r[x] for r in run.routers]) for x in ("groups", "sent_groups", "sent"))
        rows.append([f"--route-nodes {most}", max(r["most_groups"] for r in run.routers), f"{met:.3f}", f"{sent:.0f}", f"{tokens:.0f}"])
    print("\nfour experts a token, two a group: groups that it meets, at most and in the mean; copies that leave their group in a step, and their rank")
    lab.table(["run", "most", "mean", "left the group", "left the rank"], rows)


# ---- memory ---------------------------------------------------------------------------------------------------------
def memory(a):
    rows = []
    for ep in 1, 2, 4, 8:
        p = lab.plan(*MODEL, "--dp", 8, "--ep", ep, "--micro-batch", 2)
        of_experts = LAYERS * EXPERTS // ep * expert_parameters()
        rows.append([f"--dp 8 --ep {ep}", lab.mb(p["memory"]["weights"]), lab.mb(4 * of_experts), lab.mb(p["memory"]["optimizer"]),
                     lab.mb(p["sent_over_ep"]), lab.mb(p["sent_per_step"] - p["sent_over_ep"])])  # fmt: skip
    print(f"\nmoe-tiny on 8 ranks, {p['params']} parameters of which a token uses {p['active_params']}: MB of a rank, and of them\n"
          "its experts' weights by 4·L·E/ep·3·C·F; sent by a rank in a step for tokens, and for gradients (--dry-run)")  # fmt: skip
    lab.table(["run", "weights", "experts'", "optimizer", "tokens", "gradients"], rows)
    rows = []
    for name in "mixtral-8x7B", "deepseek-v3":
        p = lab.plan("--model", name)
        rows.append([name, f"{p['params'] * 1e-9:.1f}", f"{p['active_params'] * 1e-9:.1f}", f"{p['params'] / p['active_params']:.1f}"])
    print("\nparameters, in billions: all, those that a token uses, and how many times as many there are")
    lab.table(["model", "all", "active", "times"], rows)


# ---- the picture ----------------------------------------------------------------------------------------------------
def draw(plt, runs, sent):
    figure, (load, shares, lines) = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    colours = dict(zip(BALANCES, ["#e15759", "#76b7b2", "#5b6f84"]))
    for way, run in runs.items():
        loads = [r["load"] for r in run.routers]
        load.plot(range(1, len(loads) + 1), loads, color=colours[way], lw=1.2, label=f"--balance {way}")
    load.axhline(1, color="k", lw=1, ls=":")
    load.set(xlabel="step", title="load: the fullest expert over the mean")
    for i, (way, run) in enumerate(runs.items()):
        last = run.routers[-max(1, len(run.routers) // 10) :]
        block = [mean([r["share"][-1][e] for r in last]) for e in range(EXPERTS)]
        shares.bar([e + (i - 1) * 0.27 for e in range(EXPERTS)], [100 * s for s in sorted(block, reverse=True)], 0.25,
                   color=colours[way], label=f"--balance {way}")  # fmt: skip
    shares.axhline(100 / EXPERTS, color="k", lw=1, ls=":")
    shares.set(xlabel="experts of the last block, the fullest first", title="share of the copies at the end, %")
    lines.plot(list(sent.ep), [n / 1e6 for n in sent.ep.values()], "o-", color="#f28e2b", label=f"--ep {RANKS}: tokens' copies")
    lines.axhline(sent.tp / 1e6, color="#5b6f84", label=f"--tp {RANKS}: sums of all tokens' rows")
    lines.axvline(RANKS, color="k", lw=1, ls=":", label="as many experts a token as ranks")
    lines.set_xscale("log", base=2)
    lines.set_xticks(list(sent.ep), list(map(str, sent.ep)))
    lines.set(xlabel="experts a token (--topk)", title="sent by a rank in a step for the experts, MB")
    for ax in load, shares, lines:
        ax.set_ylim(0, 1.25 * ax.get_ylim()[1])
        ax.legend(frameon=False, loc="upper left" if ax is lines else "upper right", fontsize=9)
    return figure


def main():
    a = lab.begin(__doc__)
    runs = balances(a)
    sent = bytes_of_both(a)
    groups(a)
    memory(a)
    if plt := lab.pyplot("the lines"):
        lab.save(draw(plt, runs, sent), a, "10_experts.png")


if __name__ == "__main__":
    main()

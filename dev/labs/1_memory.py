#!/usr/bin/env python3
"""Lab 1: where the bytes of one rank go (dev/labs/1_memory.md).

    python3 dev/labs/1_memory.py
"""
import sys

import lab
from plot import has_matplotlib

# gpt2-tiny: 4 layers, 8 heads, 128 channels, 4 · 128 in the MLP. A run is what differs from that.
BASE = dict(layers=4, heads=8, hidden=128, seq=64, micro_batch=8, recompute="none", attention="flash")
RUNS = [
    {},
    dict(micro_batch=16),
    dict(seq=256, micro_batch=2),
    dict(hidden=256),
    dict(layers=8),
    dict(recompute="full"),
    dict(seq=256, attention="naive"),
    dict(seq=256, attention="naive", recompute="selective"),
    dict(seq=256, attention="naive", recompute="full"),
    dict(seq=256),
]
TIMELINE = dict(layers=8, micro_batch=16, seq=128)
ROWS = ["weights", "gradients", "optimizer", "dout", "logits", "workspace", "activations"]
PRESETS = ["llama-0.5B", "llama-1B", "llama-3B", "llama-8B", "llama-70B"]
CARD = 80e9


def activations(c):
    """Bytes, in words: what each block of GPT-2 keeps for its backward; a float has four, so 16 + 4f becomes 32 + 8f."""
    tokens, C, f = c["micro_batch"] * c["seq"], c["hidden"], 4
    x = 4 * C * tokens  # one [tokens, C]
    rest = (28 + 8 * f) * C * tokens + 16 * tokens  # all else, and two norms' mean and 1/deviation
    scores = 4 * c["heads"] * tokens * (c["seq"] if c["attention"] == "naive" else 1)  # matrix, or a sum a row
    head = 2 * x + 8 * tokens
    if c["recompute"] == "full":  # blocks keep what comes in, and take turns with the rest
        return c["layers"] * x + rest + scores + head
    if c["recompute"] == "selective" and c["attention"] == "naive":  # take turns with the matrix
        return c["layers"] * (x + rest) + scores + head
    return c["layers"] * (x + rest + scores) + head


def flags(c):
    return [x for name, value in c.items() for x in (f"--{name.replace('_', '-')}", value)]


def where_the_bytes_go(a):
    rows = []
    for change in RUNS:
        c = {**BASE, **change}
        run = lab.train(a, *flags(c), "--steps", 1 if a.quick else 6)
        m = run.memory
        name = " ".join(f"{key.replace('_', '-')} {value}" for key, value in change.items()) or "gpt2-tiny"
        rows.append([name, *(lab.mb(m[r]) for r in ROWS), lab.mb(activations(c)), lab.mb(m["peak"]),
                     lab.mb(run.start["predicted"]["peak"]), f"{run.tokens_per_s:.0f}"])  # fmt: skip
    print("\nmemory of one rank, MB")
    lab.table(["run", *ROWS, "by formula", "in all", "predicted", "tokens/s"], rows)


def what_a_card_holds():
    """From dry runs of one and two sequences, which need no memory: what is there at all, and what a sequence adds."""
    rows = []
    for preset in PRESETS:
        row = []
        for recompute in "none", "full":
            one, two = (lab.plan("--model", preset, "--seq", 2048, "--micro-batch", b, "--recompute", recompute)
                        for b in (1, 2))  # fmt: skip
            each = two["memory"]["peak"] - one["memory"]["peak"]
            row += [f"{each / 1e9:.2f}", max(0, int((CARD - one["memory"]["peak"]) // each + 1))]
        state = 16 * one["params"]
        rows.append([preset, f"{one['params'] / 1e9:.2f}", f"{state / 1e9:.1f}", *row])
    print("\nwhat 80 GB would hold, sequences of 2,048 tokens, everything in 4 bytes (GB)")
    lab.table(["model", "parameters, 10⁹", "16 bytes each", "a sequence adds", "fit", "with recompute full", "fit then"],
              rows)  # fmt: skip


def timeline(a):
    trace = a.out / "1_memory.trace.json"
    lab.train(a, *flags({**BASE, **TIMELINE}), "--steps", 3, "--lazy-optimizer", "--trace", trace.resolve())
    picture = a.out / ("1_memory.png" if has_matplotlib() else "1_memory.html")
    plot = ["memory", trace.resolve(), "--steps", "1:3", "-o", picture.resolve()]
    lab.execute([sys.executable, lab.ROOT / "dev/plot.py", *plot])
    print(f"\npicture: {lab.shown(picture)}")
    if picture.suffix == ".html":
        print("(a .png of it takes matplotlib: `make test` brings it into build/venv)")


def main():
    a = lab.begin(__doc__)
    where_the_bytes_go(a)
    what_a_card_holds()
    timeline(a)


if __name__ == "__main__":
    main()

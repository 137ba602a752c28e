#!/usr/bin/env python3
"""Lab 8: five orders of work in a pipeline, and what its messages cost (dev/labs/8_pipeline.md).

    python3 dev/labs/8_pipeline.py
"""
import math
import os
import pathlib
import re
import signal
import threading
import time
from types import SimpleNamespace

import lab
import plot

RANKS, V = 4, 2  # of the five schedules; chunks a rank, where a schedule has several
LAYERS, HIDDEN, HEADS, SEQ, VOCAB, MICRO = 8, 128, 8, 64, 256, 8
FFN = 4  # channels of the MLP, over C
SCHEDULES = ["afab", "1f1b", "interleaved", "zb-h1", "zbv"]
COUNTS = [4, 8, 16]
SHOWN = 8  # micro-batches of the picture's pipelines


# ---- formulas, with F, I and W of a rank's layers taking 1 each ------------------------------------------------------
def chunks(schedule):
    return V if schedule in ("interleaved", "zbv") else 1


def takes(schedule, m):
    return {"interleaved": m % RANKS == 0, "zb-h1": m >= RANKS, "zbv": m >= 2 * RANKS - 1}.get(schedule, True)


def idle(schedule, m, p=RANKS):
    """The share of a step in which a rank waits: of the bubble and of 3m of work."""
    bubble = (p - 1) * {"afab": 3, "1f1b": 3, "interleaved": 3 / V, "zb-h1": 1, "zbv": 1 / V}[schedule]
    return bubble / (3 * m + bubble)


def in_flight(schedule, m, r, p=RANKS):
    """Micro-batches of which rank r keeps the activations; one chunk of v counts 1/v."""
    if schedule == "interleaved":
        return min(2 * (p - r - 1) + (V - 1) * p + 1, m * V) / V
    return {"afab": m, "1f1b": min(p - r, m), "zb-h1": p, "zbv": 2 * p / V}[schedule]


def activations(schedule, m, r):
    """Bytes of these: what each block keeps of a token, as in lab 7; and, where the head is, what enters and leaves it."""
    block = lab.FLOAT * ((4 + 4 + 2 * FFN) * HIDDEN + 4 + HEADS)  # four rows, q k v o, the MLP's two; norms; attention
    head = 2 * lab.FLOAT * (HIDDEN + 1) if r == (0 if schedule == "zbv" else RANKS - 1) else 0
    heads = m if schedule == "afab" else 1  # elsewhere its backward comes next
    return MICRO * SEQ * (in_flight(schedule, m, r) * LAYERS / RANKS * block + heads * head)


def messages(schedule, m):
    """Of all ranks in a step: from each stage to the next, and back; the V of zbv turns round within a rank."""
    return 2 * m * (RANKS * chunks(schedule) - 1 - (schedule == "zbv"))


# ---- four ranks on two cores ------------------------------------------------------------------------------------------
class Turns:
    """While they run, ranks that have no core of their own take turns: two cores are four, each half as fast.

    Every SLOT those whose turn ends are stopped, and the next ones go on. So a rank that waits leaves its core to nobody, as
    on a machine with a core for each."""

    SLOT = 2e-3  # seconds: much less than any F

    def __init__(self, ranks, word):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.ranks, self.word, self.groups = ranks, word.encode(), math.ceil(ranks / cores)
        self.over, self.pids, self.thread = threading.Event(), {}, threading.Thread(target=self.run)

    def find(self):
        """The ranks' processes: those that a launcher has numbered and that have this word on their command line."""
        for d in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if self.word in (d / "cmdline").read_bytes().split(b"\0") and (d / "exe").resolve() == lab.PROGRAM.resolve():
                    rank = re.search(rb"(?:^|\0)(?:OMPI_COMM_WORLD|PMI)_RANK=(\d+)", (d / "environ").read_bytes())
                    self.pids.update({int(rank[1]): int(d.name)} if rank else {})
            except OSError:  # it has ended, or is somebody else's
                pass

    def tell(self, number, ranks):
        for r in ranks:
            try:
                os.kill(self.pids[r], number)
            except ProcessLookupError:
                self.over.set()

    def run(self):
        while len(self.pids) < self.ranks and not self.over.wait(0.02):
            self.find()
        turn = 0
        while not self.over.is_set():
            mine = [r for r in self.pids if r * self.groups // self.ranks == turn]
            self.tell(signal.SIGSTOP, self.pids.keys() - mine)
            self.tell(signal.SIGCONT, mine)
            turn = (turn + 1) % self.groups
            time.sleep(self.SLOT)
        self.tell(signal.SIGCONT, self.pids)

    def __enter__(self):
        if self.groups > 1:
            self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        if self.groups > 1:
            self.thread.join()


# ---- the schedules -----------------------------------------------------------------------------------------------------
def flags(m):
    return ["--layers", LAYERS, "--hidden", HIDDEN, "--heads", HEADS, "--seq", SEQ, "--vocab", VOCAB,
            "--micro-batch", MICRO, "--accum", m]  # fmt: skip


def picture(trace, step, replay=None):
    """A step as dev/plot.py draws it: measured; or replayed with times for F, I and W, and messages that take none."""
    return plot.pipeline_picture(SimpleNamespace(files=trace, rank=0, steps=str(step), begin=None, end=None,
                                                 replay=replay, title=None))  # fmt: skip


def mean_idle(pic):
    return sum(row["idle"] for row in pic["rows"]) / len(pic["rows"])


def quickest(trace, steps):
    """Of the steps but for the first, which warms up."""
    return min((picture(trace, n) for n in range(2, steps + 1)), key=lambda p: p["range"][1] - p["range"][0])


def passes(pic):
    """How long F, I and W take, the median of all: where B is one, half of it each."""
    lasts = {kind: lab.median(times) for kind in plot.LETTERS.values()
             if (times := [b[1] - b[0] - sum(y - x for x, y in b[5]) for row in pic["rows"] for b in row["boxes"]
                           if b[2] == kind])}  # fmt: skip
    half = lasts.get("backward", 0) / 2
    v = 1 + max(b[3] for row in pic["rows"] for b in row["boxes"])
    return [v * lasts.get(kind, half) for kind in ("forward", "input gradients", "weight gradients")]


def measure(a, schedule, m):
    """A run of some steps, and the quickest of them but for the first."""
    steps = 2 if a.quick else 4
    trace = a.out.resolve() / f"8_pipeline.{schedule}.{m}.trace.json"
    cut = [*flags(m), "--pp", RANKS, "--schedule", schedule]
    with Turns(RANKS, str(trace)):
        run = lab.train(a, *cut, "--steps", steps, "--trace", trace, ranks=RANKS)
    pic = quickest(trace, steps)
    f, i, w = passes(pic)
    return SimpleNamespace(
        run=run, pic=pic, idle=mean_idle(pic), own=mean_idle(picture(trace, steps, f"{f}:{i}:{w}")),
        simulated=lab.plan(*cut)["schedule"]["idle_fraction"], kept=[row["kept"] for row in pic["rows"]],
        held=[rank["activations"] for rank in run.memories], sent=len(pic["arrows"]),
    )  # fmt: skip


def show_schedules(found):
    rows = []
    for (schedule, m), x in found.items():
        rows.append([f"{schedule}, m = {m}", percent(idle(schedule, m)), percent(x.simulated), percent(x.own),
                     percent(x.idle), f"{x.run.quickest_ms:.0f}", f"{x.run.loss[-1]:.4f}"])  # fmt: skip
    print(f"\n{RANKS} ranks, m micro-batches: the share of a step in which a rank is idle, where F, I and W take one time\n"
          "(by formula, simulated), where they take what they took in this run (replayed), and as measured")  # fmt: skip
    lab.table(["run", "formula", "simulated", "replayed", "measured", "ms a step", "last loss"], rows)
    rows = []
    for (schedule, m), x in found.items():
        held = [activations(schedule, m, r) for r in range(RANKS)]
        rows.append([f"{schedule}, m = {m}", " ".join(f"{n:g}" for n in x.kept),
                     " ".join(f"{in_flight(schedule, m, r):g}" for r in range(RANKS)), lab.mb(max(x.held)),
                     lab.mb(max(held)), x.sent, messages(schedule, m)])  # fmt: skip
    print("\nmicro-batches in flight on ranks 0 to 3; activations of the rank that keeps most, MB; a step's messages")
    lab.table(["run", "in flight", "expected", "activations", "by formula", "messages", "2m × edges"], rows)


def percent(share):
    return f"{100 * share:.1f} %"


# ---- two hosts ---------------------------------------------------------------------------------------------------------
WAYS = {"--tp 2": ["--tp", 2]}
WAYS |= {f"--pp 2 {s}": ["--pp", 2, "--schedule", s] for s in ("afab", "1f1b", "interleaved", "zbv")}


def crossing(a):
    """Two ranks, each with a core, on one host; then on two, with and without overlap; None where no cluster can be."""
    if why := lab.why_no_cluster():
        print(f"\nno cluster in a box here, so nothing crosses hosts: {why}")
        return None
    m, steps, found, traces = SHOWN, 2 if a.quick else 3, {}, {}

    def measure_way(name, rate, *more):
        launcher = lab.cluster(2, 2, "--rate", f"{rate}mbit") if rate else lab.cluster(1, 2)
        key, words = (name, bool(rate), bool(more)), [name.split()[-1], "link" if rate else "host", *more]
        traces[key] = a.out.resolve() / f"8_pipeline.2.{'.'.join(words)}.trace.json"
        run = lab.train(a, *flags(m), *WAYS[name], *more, "--steps", steps, "--trace", traces[key], launcher=launcher)
        found[key] = min(run, found.get(key, run), key=lambda r: r.quickest_ms)

    ways = ["--pp 2 afab", "--pp 2 1f1b"] if a.quick else list(WAYS)
    for name in ways:
        measure_way(name, 0)
    pic = picture(traces["--pp 2 1f1b", False, False], steps)
    f = min(b[1] - b[0] for row in pic["rows"] for b in row["boxes"] if b[2] == "forward")
    message = MICRO * SEQ * HIDDEN * lab.FLOAT
    rate = a.rate or math.ceil(message * 8 / f / 1e3)  # bits a millisecond are kbit/s
    print(f"\ntwo ranks: F of a rank's layers takes {f:.1f} ms or more; a message, {lab.mb(message)} MB, takes "
          f"{message * 8 / rate / 1e3:.1f} on a link of {rate} Mbit/s")  # fmt: skip
    for again in range(1 if a.quick else 2):  # side by side: what else the machine does comes and goes
        for name in ways:
            if again:
                measure_way(name, 0)
            if name != "--tp 2":
                measure_way(name, rate, "--no-overlap")
            if name != "--tp 2" or not again:  # that one is slow, and far from the others
                measure_way(name, rate)
    rows = []
    for name in ways:
        host, link, naive = (found.get((name, *key)) for key in ((False, False), (True, False), (True, True)))
        expected, sent = ["-", "-"], "-"
        if name != "--tp 2":
            pic, schedule = quickest(traces[name, False, False], steps), name.split()[-1]
            fiw, wire = passes(pic), message * 8 / rate / 1e3
            before = played(pic, schedule, fiw, 0)
            expected = [longer(before, played(pic, schedule, fiw, wire, waits)) for waits in (False, True)]
            sent = sum(x[0] == 0 for x in pic["arrows"])
        rows.append([name, sent, ms(host), ms(link), slower(host, link), expected[0], ms(naive), slower(host, naive),
                     expected[1], f"{link.loss[-1]:.4f}"])  # fmt: skip
    print(f"\nms of the quickest step of {m} micro-batches on one host, and on two with that link; how much longer that\n"
          "is, and how much longer one host's order takes when it is played with such messages")  # fmt: skip
    columns = ["run", "rank 0 sends", "one host", "two hosts", "longer", "played"]
    columns += ["--no-overlap", "that longer", "that played", "last loss"]
    lab.table(columns, rows)
    return SimpleNamespace(found=found, ways=ways, rate=rate)


def played(pic, schedule, fiw, x, waits=False):
    """How long the order of a step takes where a message is under way for x, and, where it waits, its sender as long."""
    p, v = len(pic["rows"]), chunks(schedule)
    cost = dict(zip(("forward", "input gradients", "weight gradients"), (t / v for t in fiw)))
    cost["backward"] = cost["input gradients"] + cost["weight gradients"]
    left = [[(kind, chunk, micro) for _, _, kind, chunk, micro, _ in row["boxes"] if kind in cost] for row in pic["rows"]]
    free, wire, there = [0.0] * p, [0.0] * p, {}  # wire: until when it carries what the rank has sent
    while any(left):
        for r in range(p):
            while left[r]:
                kind, chunk, micro = left[r][0]
                s = 2 * p - 1 - r if schedule == "zbv" and chunk else chunk * p + r
                way = 1 if kind == "forward" else -1
                first = kind == "weight gradients" or s == (0 if way > 0 else p * v - 1)
                if not first and (way, s, micro) not in there:
                    break
                free[r] = max(free[r], 0 if first else there[way, s, micro]) + cost[kind]
                arrives, to = free[r], s + way
                here = schedule == "zbv" and {s, to} == {p - 1, p}
                if kind != "weight gradients" and 0 <= to < p * v and not here:
                    arrives = wire[r] = max(free[r], wire[r]) + x
                    free[r] = arrives if waits else free[r]
                if kind != "weight gradients":
                    there[way, to, micro] = arrives
                left[r].pop(0)
    return max(free)


def ms(run):
    return f"{run.quickest_ms:.0f}" if run else "-"


def slower(before, after):
    return longer(before.quickest_ms, after.quickest_ms) if after else "-"


def longer(before, after):
    return f"{100 * (after / before - 1):+.0f} %"


# ---- the picture -------------------------------------------------------------------------------------------------------
def draw(plt, found, crossed):
    figure = plt.figure(figsize=(17, 8), layout="constrained")
    grid = figure.add_gridspec(len(SCHEDULES) * 2, 2, width_ratios=[2.2, 1])
    longest = max(x.pic["range"][1] - x.pic["range"][0] for (_, m), x in found.items() if m == SHOWN)
    for i, schedule in enumerate(SCHEDULES):
        pic, axes = found[schedule, SHOWN].pic, figure.add_subplot(grid[2 * i : 2 * i + 2, 0])
        for r, row in enumerate(pic["rows"]):
            for begin, end, kind, chunk, _, waits in row["boxes"]:
                box = [(begin - pic["range"][0], end - begin)]
                colour, opaque = plot.KINDS[kind], 1 - 0.3 * chunk
                axes.broken_barh(box, (r, 0.8), facecolors=colour, edgecolors="white", lw=0.6, alpha=opaque)
                gaps = [(x - pic["range"][0], y - x) for x, y in waits]
                axes.broken_barh(gaps, (r, 0.8), facecolors="white")
        axes.set(xlim=(0, longest), ylim=(RANKS, -0.2), yticks=[], ylabel=schedule)
        axes.tick_params(labelbottom=schedule == SCHEDULES[-1])
    axes.set_xlabel(f"ms of a step of {SHOWN} micro-batches, measured; a row a rank, the second chunk paler")
    kinds = ["forward", "backward", "input gradients", "weight gradients"]
    patches = [plt.Rectangle((0, 0), 1, 1, color=plot.KINDS[k]) for k in kinds if k != "input gradients"]
    names = ["F", "B, or I alone", "W"]
    figure.axes[0].legend(patches, names, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    half = len(SCHEDULES) if crossed else 2 * len(SCHEDULES)
    bubbles = figure.add_subplot(grid[:half, 1])
    for i, schedule in enumerate(SCHEDULES):
        points = {m: x for (s, m), x in found.items() if s == schedule}
        line = bubbles.plot(list(points), [100 * idle(schedule, m) for m in points], label=schedule, lw=1.2)[0]
        aside = [m * (1 + 0.015 * (i - 2)) for m in points]
        bubbles.plot(aside, [100 * x.idle for x in points.values()], "o", color=line.get_color())
    bubbles.set_xscale("log", base=2)
    bubbles.set_xticks(COUNTS, [f"m = {m}" for m in COUNTS])
    bubbles.minorticks_off()
    bubbles.set(ylim=(0, None), title="idle, % of a step: formula (line), measured (dot)")
    bubbles.legend(frameon=False)
    if crossed:
        bars = figure.add_subplot(grid[half:, 1])
        kinds = {"one host": (False, False), "two": (True, False), "two, --no-overlap": (True, True)}
        for k, (label, key) in enumerate(kinds.items()):
            colour = ("#5b6f84", "#76b7b2", "#e15759")[k]
            for i, name in enumerate(crossed.ways):
                if run := crossed.found.get((name, *key)):
                    bars.bar(i + (k - 1) * 0.27, 1e3 * run.start["tokens_per_step"] / run.quickest_ms, 0.24, color=colour,
                             label=label if name == crossed.ways[-1] else None)  # fmt: skip
        bars.set_xticks(range(len(crossed.ways)), [name.replace(" 2 ", " 2\n") for name in crossed.ways])
        bars.set(title=f"tokens/s of two ranks; the link has {crossed.rate} Mbit/s")
        bars.set_ylim(0, 1.3 * bars.get_ylim()[1])
        bars.legend(frameon=False, ncols=3, loc="upper right")
    return figure


def main():
    a = lab.begin(__doc__, rate="Mbit/s of the link between hosts; else a message takes as long as F")
    found = {(s, m): measure(a, s, m) for m in ([SHOWN] if a.quick else COUNTS) for s in SCHEDULES if takes(s, m)}
    show_schedules(found)
    crossed = crossing(a)
    if plt := lab.pyplot("the pipelines"):
        lab.save(draw(plt, found, crossed), a, "8_pipeline.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Pictures of a run, from what it has written: a PNG (needs matplotlib), or one HTML file that needs nothing else.

    dev/plot.py loss LOG… -o loss.png            training and validation loss; one line a --log
    dev/plot.py memory TRACE -o memory.png       what is live on a rank over time, by category (--rank R; 0)
    dev/plot.py trace TRACE -o trace.png         who does what when: a row a rank and track
    dev/plot.py trace TRACE -o trace.html        the same, to zoom into (wheel), drag and point at
    dev/plot.py pipeline TRACE -o pipeline.png   a step of a pipeline (--steps; the last): micro-batches, messages, idle ranks

A LOG is what ./train --log wrote, a TRACE what --trace wrote. memory and trace show a part of the run with --steps 2:3
(both included), or with --from and --to in milliseconds of the trace; trace shows some ranks with --rank 0 1, pipeline the
pipeline that --rank is in. Where ranks share cores, each box of a pipeline is as long as the others let it be: --replay 1:1:1
keeps the order of each rank's work and its messages, but F, I and W of a rank's layers take these times, and messages none.

In a row of the trace, what lies inside something else is drawn below it:

    rank 0 compute   | forward 0                    | backward 0                       | optimizer |
                     | embedding | block 0 | block 1 | block 1 | block 0 | embedding   | wait      |
           dp                                                  | all_reduce | all_reduce |
"""
import argparse
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Colours by kind, in the order of the legends. The parts of a pass (a block) have the pass's colour, paler.
KINDS = {
    "forward": "#4e79a7",
    "backward": "#f28e2b",
    "input gradients": "#f28e2b",
    "weight gradients": "#7fa832",
    "optimizer": "#b07aa1",
    "wait": "#e15759",
    "all_reduce": "#59a14f",
    "all_reduce_max": "#86bc86",
    "reduce_scatter": "#8cd17d",
    "all_gather": "#76b7b2",
    "broadcast": "#edc948",
    "send": "#d37295",
    "shift": "#ff9da7",
    "all_to_all": "#499894",
    "barrier": "#9c755f",
    "other": "#bab0ac",
}
LETTERS = {"F": "forward", "I": "input gradients", "W": "weight gradients", "B": "backward"}
# What stays is at the bottom, what comes and goes on top of it.
MEMORY = {
    "weights": "#5b6f84",
    "master": "#a0cbe8",
    "optimizer": "#b07aa1",
    "gradients": "#f28e2b",
    "communication": "#9c755f",
    "workspace": "#bab0ac",
    "tied_embedding": "#ffbe7d",
    "whole_buckets": "#edc948",
    "activations": "#59a14f",
    "dout": "#8cd17d",
    "logits": "#e15759",
}
LINES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac"]


def refuse(message):
    print(f"plot.py: {message}", file=sys.stderr)
    sys.exit(2)


def read(path):
    try:
        return pathlib.Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        refuse(f"{path}: {getattr(e, 'strerror', None) or 'not a text file'}")


def pass_of(name):
    """(pass, chunk) of "forward of chunk 1"; (None, 0) of what is none."""
    words, _, chunk = name.partition(" of chunk ")
    return (words, int(chunk or 0)) if words in LETTERS.values() and (chunk or "0").isdigit() else (None, 0)


def number(text):
    """A loss that is not finite stands as null in a log."""
    return float("nan") if text is None else float(text)


# ---- what was written -----------------------------------------------------------------------------------------------
def read_log(path):
    """{"train": [(step, loss)…], "val": …}; where a resumed run took a step again, the later one counts."""
    found = {"step": {}, "val": {}}
    lines = read(path).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # a run that was killed has not finished it
    for n, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if event["event"] in found:
                found[event["event"]][int(event["step"])] = number(event["loss"])
        except (ValueError, TypeError, KeyError, RecursionError):
            refuse(f"{path}: line {n} is no event of a --log")
    if not found["step"] and not found["val"]:
        refuse(f"{path}: no step in it; is it a --log file?")
    return {"train": sorted(found["step"].items()), "val": sorted(found["val"].items())}


class Trace:
    """spans[rank][track]: [(begin, end, name, number, bytes)…]; memory[rank]: [(time, {category: bytes})…].

    In order of time, which is in milliseconds; the tracks in the trace's order."""

    def __init__(self, path):
        self.path, self.spans, self.memory, tracks, order = path, {}, {}, {}, {}
        try:
            events = json.loads(read(path))["traceEvents"]
            for e in events:
                key = e["pid"], e.get("tid", 0)
                if e["name"] == "thread_name":
                    tracks[key] = e["args"]["name"]
                if e["name"] == "thread_sort_index":
                    order[key] = e["args"]["sort_index"]
            for key in sorted(tracks, key=lambda k: (k[0], order.get(k, k[1]))):
                self.spans.setdefault(key[0], {})[tracks[key]] = []
            for e in events:
                begin, args = e.get("ts", 0) / 1e3, e.get("args", {})
                if e["ph"] == "X":
                    track = tracks[e["pid"], e["tid"]]
                    span = begin, (e["ts"] + e["dur"]) / 1e3, str(e["name"]) or "?", args.get("number"), args.get("bytes", 0)
                    self.spans[e["pid"]][track].append(span)
                if e["ph"] == "C" and e["name"] == "memory":
                    self.memory.setdefault(e["pid"], []).append((begin, args))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            refuse(f"{path}: not a --trace file ({type(e).__name__}: {e})")
        for rows in self.spans.values():
            for spans in rows.values():
                spans.sort(key=lambda s: (s[0], -s[1]))
        for samples in self.memory.values():
            samples.sort(key=lambda s: s[0])
        if not any(spans for rows in self.spans.values() for spans in rows.values()) and not self.memory:
            refuse(f"{path}: a trace without any event")

    def end(self):
        ends = [s[1] for rows in self.spans.values() for spans in rows.values() for s in spans]
        return max(ends + [samples[-1][0] for samples in self.memory.values()])

    def steps(self):
        """{step: (begin, end)}: a step ends with rank 0's optimizer."""
        compute = self.spans.get(0, {}).get("compute", [])
        begin, steps = min((s[0] for s in compute if pass_of(s[2])[0]), default=0), {}
        for _, end, name, n, _ in compute:
            if name == "optimizer":
                steps[len(steps) + 1 if n is None else n] = begin, end
                begin = end
        return steps

    def steps_asked_for(self, asked):
        """The first and the last of "2:3"."""
        try:
            first, last = (int(x) for x in (asked.split(":") if ":" in asked else (asked, asked)))
        except ValueError:
            refuse(f"--steps {asked}: neither a step nor two, like 2:3")
        steps = self.steps()
        if not steps:
            refuse(f"--steps {asked}: {self.path} has no step in it")
        if first not in steps or last not in steps or first > last:
            refuse(f"--steps {asked}: {self.path} has steps {min(steps)}:{max(steps)}")
        return first, last

    def steps_in(self, begin, end):
        return [[n, max(t[0], begin), min(t[1], end)] for n, t in self.steps().items() if t[0] < end and t[1] > begin]

    def window(self, a):
        """Which part of the time the command line asks for."""
        if a.steps is None:
            begin, end = a.begin if a.begin is not None else 0, a.end if a.end is not None else self.end()
            if not begin < end or begin >= self.end():
                refuse(f"--from {begin:g} --to {end:g}: the trace has 0 to {self.end():.3f} ms")
            return begin, min(end, self.end())
        first, last = self.steps_asked_for(a.steps)
        return self.steps()[first][0], self.steps()[last][1]

    def check_ranks(self, ranks, have):
        for r in ranks:
            if r not in have:
                refuse(f"--rank {r}: {self.path} has " + (f"ranks {min(have)} to {max(have)}" if have else "none"))


# ---- what is drawn --------------------------------------------------------------------------------------------------
def loss_picture(a):
    """lines: [{name, colour, dashed, points: [[x, y]…]}…]"""
    logs, lines = {path: read_log(path) for path in a.files}, []
    stems = [pathlib.Path(path).stem for path in logs]
    for i, (path, log) in enumerate(logs.items()):
        label = stems[i] if stems.count(stems[i]) == 1 else path
        for part, points in log.items():
            if points:
                name, colour = f"{label}, {part}", LINES[i % len(LINES)]
                lines.append({"name": name, "colour": colour, "dashed": part == "val", "points": points})
    return {"kind": "lines", "title": "Loss", "lines": lines}


def memory_picture(a):
    """times [n]; areas: [{name, colour, values [n]}…], from the bottom up; passes: [[begin, end, kind, name]…]"""
    trace = Trace(a.files)
    if not trace.memory:
        refuse(f"{trace.path}: no memory in this trace")
    rank = a.rank
    trace.check_ranks([rank], trace.memory)
    begin, end = trace.window(a)
    samples = [s for s in trace.memory[rank] if s[0] <= end]
    before = [s for s in samples if s[0] <= begin]
    samples = [(begin, s[1]) for s in before[-1:]] + [s for s in samples if s[0] > begin]
    if not samples:
        refuse(f"{trace.path}: no memory in this part of it")
    samples.append((end, samples[-1][1]))
    names = [n for n in MEMORY if any(s[1].get(n) for s in samples)]
    names += sorted({n for s in samples for n in s[1] if n not in MEMORY and s[1][n]})
    colours = {n: MEMORY.get(n, "#888888") for n in names}
    areas = [{"name": n, "colour": c, "values": [s[1].get(n, 0) for s in samples]} for n, c in colours.items()]
    compute = trace.spans.get(rank, {}).get("compute", [])
    passes = [s for s in compute if (pass_of(s[2])[0] or s[2] == "optimizer") and s[1] > begin and s[0] < end]
    return {
        "kind": "areas",
        "title": f"Live memory of rank {rank}",
        "range": [begin, end],
        "times": [s[0] for s in samples],
        "areas": areas,
        "passes": [[s[0], s[1], kind_of(s[2]), s[2] if s[3] is None else f"{s[2]} {s[3]}"] for s in passes],
        "steps": trace.steps_in(begin, end),
    }


def kind_of(name):
    """None: that of what it lies in."""
    word = "wait" if name.startswith("wait") else pass_of(name)[0] or name
    return word if word in KINDS else None


def lanes(spans):
    """(span, depth, kind, is it a part of a pass?): a span lies a lane deeper than the one that it begins in."""
    open_spans, out = [], []
    for s in spans:
        while open_spans and open_spans[-1][0] <= s[0]:
            open_spans.pop()
        inherited = open_spans[-1][1] if open_spans else "other"
        kind = kind_of(s[2]) or inherited
        out.append((s, len(open_spans), kind, kind != "other" and not kind_of(s[2])))
        open_spans.append((s[1], kind))
    return out


def trace_picture(a):
    """rows: [{rank, track, lanes, spans: [[begin, end, lane, kind, part, name, number, bytes]…]}…]"""
    trace = Trace(a.files)
    if not any(spans for tracks in trace.spans.values() for spans in tracks.values()):
        refuse(f"{trace.path}: no span in this trace")
    trace.check_ranks(a.ranks or [], trace.spans)
    (begin, end), rows = trace.window(a), []
    for rank in a.ranks or sorted(trace.spans):
        for track, spans in trace.spans[rank].items():
            placed = [x for x in lanes(spans) if x[0][1] > begin and x[0][0] < end]
            if placed:
                drawn = [[s[0], s[1], depth, kind, part, s[2], s[3], s[4]] for s, depth, kind, part in placed]
                rows.append({"rank": rank, "track": track, "lanes": max(d[2] for d in drawn) + 1, "spans": drawn})
    if not rows:
        refuse(f"{trace.path}: nothing happens from {begin:g} to {end:g} ms")
    title = "Who does what when"
    kinds = [k for k in KINDS if any(s[3] == k for row in rows for s in row["spans"])]
    steps = trace.steps_in(begin, end)
    return {"kind": "spans", "title": title, "range": [begin, end], "rows": rows, "kinds": kinds, "steps": steps}


# ---- a pipeline -----------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Action:
    """A pass of a chunk and micro-batch: from when what it waited for is there."""

    rank: int
    kind: str
    chunk: int
    micro: int
    begin: float
    end: float
    waits: list  # [(begin, end)…] later ones
    step: int = None  # None: of an evaluation
    after: list = field(default_factory=list)  # the actions from which messages come

    @property
    def busy(self):
        return self.end - self.begin - sum(end - begin for begin, end in self.waits)


def actions_of(rank, compute):
    """In the order of the trace; and (step, begin, end) of each optimizer."""
    out, optimizers, works = [], [], False
    for begin, end, name, n, _ in compute:
        kind, chunk = pass_of(name)
        if kind:
            out.append(Action(rank, kind, chunk, n, begin, end, []))
            works = False
        elif name == "optimizer":
            optimizers.append((n, begin, end))
        elif out and begin < out[-1].end:  # inside it
            if not name.startswith("wait"):
                works = True
            elif works:
                out[-1].waits.append((begin, end))
            else:
                out[-1].begin = end
    return out, optimizers


def find_steps(actions, optimizers):
    """The actions before an optimizer are its step's, but for the forwards of an evaluation, which come first."""
    before = float("-inf")
    for n, begin, _ in optimizers:
        mine = [a for a in actions if before <= a.begin < begin]
        before = begin
        for chunk in {a.chunk for a in mine}:
            forwards = [a for a in mine if a.chunk == chunk and a.kind == "forward"]
            back = [a for a in mine if a.chunk == chunk and a.kind in ("backward", "input gradients")]
            for a in forwards[: len(forwards) - len(back)]:
                mine.remove(a)
        for a in mine:
            a.step = n


def channels(trace):
    """{rank: {(letter, stage): (it sends, spans)}} of the channels "F to stage 2"."""
    out = {}
    for rank, tracks in trace.spans.items():
        for track, spans in tracks.items():
            found = re.fullmatch(r"([FI]) to stage (\d+)", track)
            if found and spans:
                ends = out.setdefault(rank, {})
                ends[found[1], int(found[2])] = any(s[4] for s in spans), sorted(spans, key=lambda s: s[3] or 0)
    return out


def stages_of(ends):
    """Which stages a rank holds follows from what it sends and receives; chunks are in the order of stages."""
    return sorted({to - sends if letter == "F" else to + sends for (letter, to), (sends, _) in ends.items()})


def connect(trace, ranks, ends, actions):
    """[(sender's action, receiver's, when it left)…] of all messages. A channel's k-th is of its stages' k-th passes."""
    out, holds = [], {r: stages_of(ends[r]) for r in ranks}
    for sender in ranks:
        for (letter, to), (sends, spans) in ends[sender].items():
            others = [r for r in ranks if r != sender and (letter, to) in ends[r]]
            if not sends:
                continue
            pair = []
            for r, stage in [(sender, to - 1 if letter == "F" else to + 1)] + [(r, to) for r in others]:
                kinds = ("forward",) if letter == "F" else ("backward", "input gradients")
                chunk = holds[r].index(stage) if stage in holds[r] else -1
                pair.append([a for a in actions[r] if a.chunk == chunk and a.kind in kinds])
            if len(pair) != 2 or not len(pair[0]) == len(pair[1]) == len(spans):
                refuse(f"{trace.path}: the messages of {letter} to stage {to} are not those of its passes")
            for s, a, b in zip(spans, *pair):
                b.after.append(a)
                out.append((a, b, s[0]))
    return out


def replay(trace, steps, cost):
    """Each rank's actions in their order, each as soon as the rank and its message are there."""
    now, done = 0.0, set()
    for lists in steps:
        free, left = [now] * len(lists), [list(x) for x in lists]
        while any(left):
            before = sum(map(len, left))
            for r, mine in enumerate(left):
                while mine and all(b in done or b.step != mine[0].step for b in mine[0].after):
                    a = mine.pop(0)
                    a.begin = max([free[r]] + [b.end for b in a.after if b in done])
                    free[r] = a.end = a.begin + cost[a.kind]
                    a.waits = []
                    done.add(a)
            if sum(map(len, left)) == before:
                refuse(f"{trace.path}: its ranks wait for each other's messages")
        now = max(free)


def costs(text):
    try:
        f, i, w = (float(x) for x in text.split(":"))
    except ValueError:
        f = i = w = -1
    if not (min(f, i, w) >= 0 and 0 < f + i + w < 1e9):
        refuse(f"--replay {text}: not three times, like 1:1:1")
    return {"forward": f, "input gradients": i, "weight gradients": w, "backward": i + w}


def most_in_flight(actions):
    """Micro-batches whose activations are kept at a time; a chunk of v counts 1/v."""
    last = "weight gradients" if any(a.kind == "weight gradients" for a in actions) else "backward"
    now = most = 0
    for a in actions:
        now += (a.kind == "forward") - (a.kind == last)
        most = max(most, now)
    return most / (1 + max(a.chunk for a in actions))


def pipeline_picture(a):
    """rows: [{rank, idle, kept, boxes: [[begin, end, kind, chunk, micro-batch, [wait…]]…]}…]

    arrows: [[row, time, row, time, kind]…]"""
    trace = Trace(a.files)
    ends = channels(trace)
    copies = sum(0 in stages_of(e) for e in ends.values())  # rank = place in the pipeline · copies + its pipeline
    if not copies:
        refuse(f"{trace.path}: no pipeline in this trace")
    trace.check_ranks([a.rank], ends)
    ranks = [r for r in sorted(ends) if r % copies == a.rank % copies]
    actions, optimizers = {}, {}
    for r in ranks:
        actions[r], optimizers[r] = actions_of(r, trace.spans[r].get("compute", []))
        find_steps(actions[r], optimizers[r])
    messages = connect(trace, ranks, ends, actions)
    first, last = trace.steps_asked_for(a.steps or str(max(trace.steps(), default=1)))
    steps = [[[x for x in actions[r] if x.step == n] for r in ranks] for n in range(first, last + 1)]
    if not all(mine for lists in steps for mine in lists):
        refuse(f"{trace.path}: a rank does nothing in steps {first}:{last}")
    chunks = 1 + max(x.chunk for lists in steps for mine in lists for x in mine)
    if a.replay:
        unit = costs(a.replay)
        replay(trace, steps, {k: c / chunks for k, c in unit.items()})
        each = "{:g}, {:g} and {:g}".format(*(unit[LETTERS[x]] for x in "FIW"))
        note = f"Order and messages: {{}} of a real run. Times: not measured; F, I and W of a rank's layers take {each}"
    else:
        waits = any(x.waits for lists in steps for mine in lists for x in mine)
        note = "Measured: {}" + ("; grey in a box: waiting" if waits else "")
    spans = [(min(m[0].begin for m in s), max(x.end for m in s for x in m)) for s in steps]
    rows, shown = [], {}
    for i, r in enumerate(ranks):
        boxes = []
        for lists in steps:
            for x in lists[i]:
                shown[x] = i
                boxes.append([x.begin, x.end, x.kind, x.chunk, x.micro, x.waits])
        if not a.replay:
            boxes += [[b, e, "optimizer", 0, None, []] for n, b, e in optimizers[r] if first <= n < last]
        idle = 1 - sum(x.busy for lists in steps for x in lists[i]) / sum(e - b for b, e in spans)
        rows.append({"rank": r, "idle": idle, "kept": most_in_flight(steps[0][i]), "boxes": boxes})
    arrows = []
    for x, y, left in messages:
        if x in shown and y in shown:
            leaves = x.end if a.replay else min(max(x.begin, left), x.end)
            arrows.append([shown[x], leaves, shown[y], y.begin, x.kind])
    micro = sum(x.kind == "forward" and x.chunk == 0 for x in steps[0][0])
    title = f"{a.title}: {len(ranks)} ranks, {micro} micro-batches" + (f", {chunks} chunks a rank" if chunks > 1 else "")
    end = spans[-1][1]
    return {
        "kind": "pipeline",
        "title": title,
        "note": note.format(f"step {first}" if first == last else f"steps {first} to {last}"),
        "range": [spans[0][0], max(end, a.end or end)],
        "end": end,
        "units": bool(a.replay),
        "rows": rows,
        "arrows": arrows,
        "chunks": chunks,
        "kinds": [k for k in KINDS if any(b[2] == k for row in rows for b in row["boxes"])],
        "steps": [[first + i, *s] for i, s in enumerate(spans)] if first < last else [],
    }


# ---- a PNG ----------------------------------------------------------------------------------------------------------
def pale(colour, by=0.5):
    return "#" + "".join(f"{round(int(colour[i:i + 2], 16) * (1 - by) + 255 * by):02x}" for i in (1, 3, 5))


def chunk_shade(colour, chunk, chunks):
    """Of later chunks paler."""
    return pale(colour, 0.6 * chunk / max(chunks - 1, 1))


def unit_of(largest, units):
    """(name, size) of the largest unit that is not larger than this."""
    return next(((name, size) for name, size in units if largest >= size), units[-1])


TIMES = [("s", 1e3), ("ms", 1.0), ("µs", 1e-3)]  # in milliseconds
BYTES = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)]


def time_axis(axes, begin, end):
    name, size = unit_of((end - begin) / 2, TIMES)
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_formatter(lambda t, _: f"{t / size:g}")
    axes.set_xlabel(f"time since the run began, {name}")


def mark_steps(axes, p, height, side):
    for n, begin, end in p["steps"]:
        axes.axvline(end, color="#333333", lw=0.6, ls="--")
        if end - begin > 0.05 * (p["range"][1] - p["range"][0]):
            where = {"ha": "center", "va": side, "transform": axes.get_xaxis_transform()}
            axes.text((begin + end) / 2, height, f"step {n}", **where)


def draw_lines(plt, p):
    figure, axes = plt.subplots(figsize=(9, 5))
    for line in p["lines"]:
        x, y = zip(*line["points"])
        style = {"ls": "--", "marker": "o", "ms": 5} if line["dashed"] else {"marker": "o" if len(x) == 1 else ""}
        axes.plot(x, y, color=line["colour"], label=line["name"], lw=1.5, **style)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=p["title"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def draw_areas(plt, p):
    name, size = unit_of(max(map(sum, zip(*(x["values"] for x in p["areas"])))), BYTES)
    figure, (axes, strip) = plt.subplots(
        2, 1, figsize=(12, 5.5), sharex=True, gridspec_kw={"height_ratios": [20, 1], "hspace": 0.04}
    )
    stacks = [[v / size for v in x["values"]] for x in p["areas"]]
    below = [0.0] * len(p["times"])
    for area, values in zip(p["areas"], stacks):
        above = [b + v for b, v in zip(below, values)]
        axes.fill_between(p["times"], below, above, step="post", color=area["colour"], label=area["name"], lw=0)
        below = above
    peak = max(below)
    axes.axhline(peak, color="#333333", lw=0.8, ls=":")
    axes.annotate(f"peak {peak:.4g} {name}", (1, peak), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set(ylabel=f"live memory, {name}", ylim=(0, 1.12 * peak), title=p["title"])
    mark_steps(axes, p, 0.985, "top")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for begin, end, kind, _ in p["passes"]:
        strip.axvspan(begin, end, color=KINDS[kind], lw=0)
    kinds = [k for k in KINDS if any(x[2] == k for x in p["passes"])]
    if kinds:
        patches = [plt.Rectangle((0, 0), 1, 1, color=KINDS[k]) for k in kinds]
        strip.legend(patches, kinds, loc="lower left", bbox_to_anchor=(1.0, -0.3), frameon=False)
    strip.set(yticks=[])
    for side in ("top", "right", "left"):
        strip.spines[side].set_visible(False)
    time_axis(strip, *p["range"])
    return figure


def labels(span, track):
    """What may stand in its bar, from long to short: "block 3", "3" for a "block F" with number 3."""
    (name, _, chunk), n = re.sub(" [FIWB]$", "", span[5]).partition(" of chunk "), span[6]
    if track != "compute" or name.startswith("wait") or n is None:
        return [name]
    return [f"{name} {n}" + (f", chunk {chunk}" if chunk else ""), f"{name} {n}", str(n)]


def draw_spans(plt, p):
    begin, end = p["range"]
    lanes_drawn = sum(row["lanes"] + 0.3 for row in p["rows"])
    figure, axes = plt.subplots(figsize=(14, max(2.2, 0.24 * lanes_drawn + 1.4)))
    inches_a_ms, y, ticks = 12.2 / (end - begin), 0.0, []
    for i, row in enumerate(p["rows"]):
        first = not i or row["rank"] != p["rows"][i - 1]["rank"]
        y += 0.6 if first else 0.15
        if i and first:
            axes.axhline(y - 0.3, color="#999999", lw=0.6)
        ticks.append((y + 0.5, f"rank {row['rank']}   {row['track']}" if first else row["track"]))
        for lane in range(row["lanes"]):
            here = [s for s in row["spans"] if s[2] == lane]
            colours = [pale(KINDS[s[3]]) if s[4] else KINDS[s[3]] for s in here]
            bars = [(s[0], s[1] - s[0]) for s in here]
            # A gap between bars that are wide enough; narrow ones are made wide enough to be seen.
            edges = ["white" if bar[1] * inches_a_ms > 0.05 else c for bar, c in zip(bars, colours)]
            axes.broken_barh(bars, (y + lane + 0.04, 0.92), facecolors=colours, edgecolors=edges, linewidths=0.4)
            for s in here:
                left, right = max(s[0], begin), min(s[1], end)
                for text in labels(s, row["track"]):
                    if (right - left) * inches_a_ms > 0.085 * len(text):
                        style = {"ha": "center", "va": "center", "fontsize": 7, "color": "black" if s[4] else "white"}
                        axes.text((left + right) / 2, y + lane + 0.5, text, **style)
                        break
        y += row["lanes"]
    axes.set_ylim(y + 0.15, 0)
    axes.set_yticks([t[0] for t in ticks], [t[1] for t in ticks])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    time_axis(axes, begin, end)
    mark_steps(axes, p, 1, "bottom")
    patches = [plt.Rectangle((0, 0), 1, 1, color=KINDS[k]) for k in p["kinds"]]
    above = 1 + 0.22 / figure.get_figheight()
    axes.legend(patches, p["kinds"], loc="lower left", bbox_to_anchor=(0, above), ncols=len(patches), frameon=False)
    axes.set_title(p["title"], pad=46)
    return figure


ROW, GAP = 1.0, 0.42  # of a pipeline's rows
WAITING = "#dddddd"
ARROWS = "#a0540a", "#2b4a70"  # of gradients, of activations


def pipeline_boxes(axes, p, i, row, inches_a_unit):
    top = i * (ROW + GAP)
    bars, colours = [], []
    for begin, end, kind, chunk, micro, waits in row["boxes"]:
        edges = [begin, *(t for wait in waits for t in wait), end]
        works = list(zip(edges[::2], edges[1::2]))
        bars += [(b, e - b) for b, e in [(begin, end), *works]]
        colours += [WAITING] + [chunk_shade(KINDS[kind], chunk, p["chunks"])] * len(works)
        widest = max(works, key=lambda x: x[1] - x[0])
        ink = "white" if chunk / max(p["chunks"] - 1, 1) < 0.5 else "black"
        for (left, right), ink in [(widest, ink), ((begin, end), "black")] if micro is not None else []:
            if (right - left) * inches_a_unit > 0.075 * len(str(micro)):
                style = {"ha": "center", "va": "center_baseline", "fontsize": 8, "zorder": 4}
                axes.text((left + right) / 2, top + ROW / 2, str(micro), color=ink, **style)
                break
    edges = ["white" if bar[1] * inches_a_unit > 0.03 else c for bar, c in zip(bars, colours)]
    axes.broken_barh(bars, (top, ROW), facecolors=colours, edgecolors=edges, linewidths=0.6, zorder=3)


def draw_pipeline(plt, p):
    """9 inches wide, whatever is in it, so that several pictures have the same scale."""
    n, (begin, end) = len(p["rows"]), p["range"]
    left, right, top, below = 0.62, 1.22, 0.8, 0.46  # margins, inches
    body = 0.34 * (n * (ROW + GAP) + 0.1)
    figure, height = plt.figure(figsize=(9, body + top + below)), body + top + below
    wide = 9 - left - right
    axes = figure.add_axes((left / 9, below / height, wide / 9, body / height))
    for i, row in enumerate(p["rows"]):
        pipeline_boxes(axes, p, i, row, wide / (end - begin))
        y = i * (ROW + GAP) + ROW / 2
        axes.broken_barh([(begin, p["end"] - begin)], (y - ROW / 2, ROW), color="#f1f1f1", lw=0, zorder=0)
        where = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
        axes.text(-0.01, y, f"rank {row['rank']}", ha="right", **where)
        axes.text(1.065, y, f"{100 * row['idle']:.0f} %", ha="right", **where)
        axes.text(1.128, y, f"{row['kept']:g}", ha="center", **where)
    for x, name in (1.042, "idle"), (1.128, "in flight"):
        axes.text(x, 1, name, ha="center", va="bottom", fontsize=9, color="#555555", transform=axes.transAxes)
    aside = 0.022 * (end - begin) / wide  # so that two arrows at one time, to and fro, do not cover each other
    for a, start, b, arrives, kind in p["arrows"]:
        down, shift = b > a, -aside if kind == "forward" else aside
        tail, head = a * (ROW + GAP) + ROW * down, b * (ROW + GAP) + ROW * (not down)
        arrow = {"arrowstyle": "-|>,head_width=0.08,head_length=0.15", "mutation_scale": 18, "shrinkA": 0, "shrinkB": 0}
        far = abs(a - b) > 1  # behind the boxes of the rows between
        looks = {"color": ARROWS[kind == "forward"], "lw": 0.6, "alpha": 0.7 if far else 1}
        ends = {"xy": (arrives + shift, head), "xytext": (start + shift, tail)}
        axes.annotate("", **ends, arrowprops={**arrow, **looks}, annotation_clip=False, zorder=2 if far else 5)
    axes.set_ylim(n * (ROW + GAP) - GAP + 0.1, -0.1)
    axes.set_yticks([])
    axes.tick_params(labelsize=8, color="#999999")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    time_axis(axes, begin, end)
    if p["units"]:
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("")
    mark_steps(axes, p, 1, "bottom")
    patches = [plt.Rectangle((0, 0), 1, 1, color=KINDS[k]) for k in p["kinds"]]
    letter = {name: x for x, name in LETTERS.items()}
    names = [f"{k} ({letter[k]})" if k in letter else k for k in p["kinds"]]
    if p["chunks"] > 1:
        patches.append(plt.Rectangle((0, 0), 1, 1, color=chunk_shade("#777777", 1, 2)))
        names.append("later chunks")
    for name, colour in ("activations", ARROWS[1]), ("gradients", ARROWS[0]):
        patches.append(plt.Line2D([], [], color=colour, lw=1, marker=">", ms=4, markevery=[1]))
        names.append(name)
    place = {"loc": "upper left", "bbox_to_anchor": (left / 9, 1 - 0.33 / height), "bbox_transform": figure.transFigure}
    looks = {"frameon": False, "fontsize": 8.5, "handlelength": 1.2, "handletextpad": 0.6, "columnspacing": 1.2}
    axes.legend(patches, names, ncols=len(patches), borderpad=0, borderaxespad=0, **place, **looks)
    figure.text(left / 9, 1 - 0.1 / height, p["title"], fontsize=11, fontweight="bold", va="top")
    unit = "" if p["units"] else f"; {unit_of((end - begin) / 2, TIMES)[0]} since the run began"
    figure.text(left / 9, 0.07 / height, p["note"] + unit, fontsize=8, color="#555555", va="bottom")
    return figure


def has_matplotlib(python=sys.executable):
    return subprocess.run([python, "-c", "import matplotlib"], stderr=subprocess.DEVNULL).returncode == 0


def go_where_matplotlib_is():
    """Goes on in build/venv, where only that has it."""
    venv = str(ROOT / "build/venv/bin/python")
    if not has_matplotlib() and os.path.exists(venv) and has_matplotlib(venv):
        os.execv(venv, [venv, *sys.argv])


def write_png(picture, path):
    try:
        import matplotlib
    except ImportError:
        refuse(f"{path} needs matplotlib: `make test` brings it into build/venv; or write an .html, which needs nothing")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw = {"lines": draw_lines, "areas": draw_areas, "spans": draw_spans, "pipeline": draw_pipeline}[picture["kind"]]
    if picture["kind"] != "pipeline":
        draw(plt, picture).savefig(path, dpi=110, bbox_inches="tight")
        return
    from PIL import Image  # matplotlib brings it

    whole = io.BytesIO()
    draw(plt, picture).savefig(whole, dpi=180)
    Image.open(whole).convert("RGB").quantize(255, dither=Image.Dither.NONE).save(path, optimize=True)


# ---- an HTML file ---------------------------------------------------------------------------------------------------
def without_nan(x):
    """JSON has no NaN; null in its place."""
    if isinstance(x, dict):
        return {k: without_nan(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [without_nan(v) for v in x]
    return None if x != x else x


def write_html(picture, path):
    """dev/plot.html with the picture's numbers in it."""
    page = (pathlib.Path(__file__).resolve().parent / "plot.html").read_text()
    data = json.dumps(without_nan({**picture, "colours": KINDS}), separators=(",", ":"))
    pathlib.Path(path).write_text(page.replace("/*PICTURE*/null", data.replace("</", "<\\/")))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{message} (--help says more)")


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    pictures = {"loss": loss_picture, "memory": memory_picture, "trace": trace_picture, "pipeline": pipeline_picture}
    for name, draws in pictures.items():
        command = commands.add_parser(name)
        if name == "loss":
            command.add_argument("files", metavar="LOG", nargs="+")
        else:
            command.add_argument("files", metavar="TRACE")
        command.add_argument("-o", dest="out", metavar="FILE.png|FILE.html", required=True)
        command.set_defaults(draws=draws)
        if name == "loss":
            continue
        command.add_argument("--steps", metavar="A:B", help="from step A to step B, both included")
        if name == "pipeline":
            command.add_argument("--rank", type=int, default=0, help="one of the pipeline's")
            command.add_argument("--replay", metavar="F:I:W", help="not the times measured, but these")
            command.add_argument("--to", dest="end", type=float, metavar="T", help="where the axis ends, at least")
            command.add_argument("--title", metavar="TEXT", default="Pipeline")
            continue
        command.add_argument("--from", dest="begin", type=float, metavar="MS")
        command.add_argument("--to", dest="end", type=float, metavar="MS")
        if name == "memory":
            command.add_argument("--rank", type=int, default=0)
        else:
            command.add_argument("--rank", dest="ranks", type=int, nargs="+", help="these alone")
    a = parser.parse_args()
    write = {".png": write_png, ".html": write_html}.get(pathlib.Path(a.out).suffix)
    if not write:
        refuse(f"-o {a.out}: neither .png nor .html")
    if write is write_png:
        go_where_matplotlib_is()
    try:
        write(a.draws(a), a.out)
    except OSError as e:
        refuse(f"-o {a.out}: {e.strerror}")


if __name__ == "__main__":
    main()

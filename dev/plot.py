#!/usr/bin/env python3
"""Pictures of a run, from what it has written: a PNG (needs matplotlib), or one HTML file that needs nothing else.

    dev/plot.py loss LOG… -o loss.png            training and validation loss; one line a --log
    dev/plot.py memory TRACE -o memory.png       what is live on a rank over time, by category (--rank R; 0)
    dev/plot.py trace TRACE -o trace.png         who does what when: a row a rank and track
    dev/plot.py trace TRACE -o trace.html        the same, to zoom into (wheel), drag and point at

A LOG is what ./train --log wrote, a TRACE what --trace wrote. memory and trace show a part of the run with --steps 2:3
(both included), or with --from and --to in milliseconds of the trace; trace shows some ranks with --rank 0 1.

In a row of the trace, what lies inside something else is drawn below it:

    rank 0 compute   | forward 0                    | backward 0                       | optimizer |
                     | embedding | block 0 | block 1 | block 1 | block 0 | embedding   | wait      |
           dp                                                  | all_reduce | all_reduce |
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Colours by kind, in the order of the legends. The parts of a pass (a block) have the pass's colour, paler.
KINDS = {
    "forward": "#4e79a7",
    "backward": "#f28e2b",
    "optimizer": "#b07aa1",
    "wait": "#e15759",
    "all_reduce": "#59a14f",
    "all_reduce_max": "#86bc86",
    "reduce_scatter": "#8cd17d",
    "all_gather": "#76b7b2",
    "broadcast": "#edc948",
    "barrier": "#9c755f",
    "other": "#bab0ac",
}
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
        begin, steps = min((s[0] for s in compute if s[2] == "forward"), default=0), {}
        for _, end, name, n, _ in compute:
            if name == "optimizer":
                steps[len(steps) + 1 if n is None else n] = begin, end
                begin = end
        return steps

    def steps_in(self, begin, end):
        return [[n, max(t[0], begin), min(t[1], end)] for n, t in self.steps().items() if t[0] < end and t[1] > begin]

    def window(self, a):
        """Which part of the time the command line asks for."""
        if a.steps is None:
            begin, end = a.begin if a.begin is not None else 0, a.end if a.end is not None else self.end()
            if not begin < end or begin >= self.end():
                refuse(f"--from {begin:g} --to {end:g}: the trace has 0 to {self.end():.3f} ms")
            return begin, min(end, self.end())
        try:
            first, last = (int(x) for x in (a.steps.split(":") if ":" in a.steps else (a.steps, a.steps)))
        except ValueError:
            refuse(f"--steps {a.steps}: neither a step nor two, like 2:3")
        steps = self.steps()
        if not steps:
            refuse(f"--steps {a.steps}: {self.path} has no step in it")
        if first not in steps or last not in steps or first > last:
            refuse(f"--steps {a.steps}: {self.path} has steps {min(steps)}:{max(steps)}")
        return steps[first][0], steps[last][1]

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
    passes = [s for s in compute if s[2] in ("forward", "backward", "optimizer") and s[1] > begin and s[0] < end]
    return {
        "kind": "areas",
        "title": f"Live memory of rank {rank}",
        "range": [begin, end],
        "times": [s[0] for s in samples],
        "areas": areas,
        "passes": [[s[0], s[1], s[2], s[2] if s[3] is None else f"{s[2]} {s[3]}"] for s in passes],
        "steps": trace.steps_in(begin, end),
    }


def kind_of(name):
    """A unit's F or B is told by its letter."""
    words = name.split()
    word = "wait" if words[0] == "wait" else {"F": "forward", "B": "backward"}.get(words[-1], name)
    return word if word in KINDS else None


def lanes(spans):
    """(span, depth, kind, is it a part of a pass?): a span lies a lane deeper than the one that it begins in."""
    open_spans, out = [], []
    for s in spans:
        while open_spans and open_spans[-1][0] <= s[0]:
            open_spans.pop()
        inherited = open_spans[-1][1] if open_spans else "other"
        kind = kind_of(s[2]) or inherited
        out.append((s, len(open_spans), kind, kind != "other" and s[2].split()[0] not in KINDS))
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


# ---- a PNG ----------------------------------------------------------------------------------------------------------
def pale(colour):
    return "#" + "".join(f"{round(int(colour[i:i + 2], 16) * 0.5 + 127):02x}" for i in (1, 3, 5))


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
    name, n = span[5].removesuffix(" F").removesuffix(" B"), span[6]
    if track != "compute" or name.startswith("wait") or n is None:
        return [name]
    return [f"{name} {n}", str(n)]


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

    draw = {"lines": draw_lines, "areas": draw_areas, "spans": draw_spans}[picture["kind"]]
    draw(plt, picture).savefig(path, dpi=110, bbox_inches="tight")


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
    for name, draws in ("loss", loss_picture), ("memory", memory_picture), ("trace", trace_picture):
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

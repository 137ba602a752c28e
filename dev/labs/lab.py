"""What the labs share: they run ./train, read what it has written, print a table and draw one picture.

Standard library only. The picture takes matplotlib, which `make test` puts into build/venv; a lab finds that by itself.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "build/cpu-fp32/train"
FLOAT = 4  # bytes: the formulas of the labs are for the fp32 build
sys.path.insert(0, str(ROOT / "dev"))
from plot import go_where_matplotlib_is  # noqa: E402


def stop(message):
    print(f"lab: {message}", file=sys.stderr)
    sys.exit(2)


def begin(doc, trains=True, **numbers):
    """The command line of a lab, with numbers of its own: name=help. Goes on in build/venv where only that can draw."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and short: to see that it runs")
    if trains:
        parser.add_argument("--data", metavar="FILE", help="a text of your own to train on")
    for name, words in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=words)
    parser.add_argument("--out", metavar="DIR", type=pathlib.Path, default=ROOT / "build/labs")
    a = parser.parse_args()
    go_where_matplotlib_is()
    if trains and not PROGRAM.exists():
        stop(f"no {PROGRAM.relative_to(ROOT)}: run make DEVICE=cpu first")
    a.out.mkdir(parents=True, exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)
    print(doc.strip().split("\n")[0])
    return a


def go_where_it_is(module):
    """Goes on in another Python of this machine that has the module; returns where there is none."""
    for python in str(ROOT / "build/venv/bin/python"), "/usr/bin/python3":
        if python != sys.executable and os.path.exists(python):
            if subprocess.run([python, "-c", f"import {module}"], stderr=subprocess.DEVNULL).returncode == 0:
                os.execv(python, [python, *sys.argv])


# ---- runs -----------------------------------------------------------------------------------------------------------
class Run:
    """What a run has logged: losses and milliseconds of its steps, memory of rank 0, messages among the dp ranks, work."""

    def __init__(self, log):
        steps = [e for e in log if e["event"] == "step"]
        end = log[-1]
        self.start = log[0]
        self.loss = [e["loss"] for e in steps]
        self.norm = [e["grad_norm"] for e in steps]
        self.ms = median([e["ms"] for e in steps[1:] or steps])  # the first step warms up
        self.quickest_ms = min(e["ms"] for e in steps)  # what other programs have disturbed least
        self.tokens_per_s = 1e3 * self.start["tokens_per_step"] / self.ms
        self.memories = end["memory"]  # [ranks]
        self.memory = self.memories[0]
        self.comm, self.ranks = end["comm"], len(self.memories)
        self.pairs = [rank["pairs"] for rank in end.get("attention", [])]  # of a query and a key, by rank, where cp > 1
        self.routers = [e["router"] for e in steps if "router" in e]  # what routers have done, step by step,
        self.experts = end.get("experts")  # and copies of tokens that left each rank, and came
        self.bytes = self.mean("bytes", "dp")
        self.exposed_ms = self.mean("exposed_ms", "dp") / len(steps)  # a step

    def mean(self, what, *groups):
        """The mean over the ranks of what the end of the log counts: calls, bytes or exposed_ms of these groups."""
        return sum(e[what] for e in self.comm if e["group"] in groups) / self.ranks


def median(values):
    return sorted(values)[len(values) // 2]


def execute(command):
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        stop(f"this has failed: {' '.join(map(str, command))}\n{done.stderr or done.stdout}")
    return done.stdout


def make(*options):
    """The last of these options is a file: make brings it up to date."""
    execute(["make", "-s", *options])
    return ROOT / options[-1]


def train(a, *flags, ranks=1, launcher=(), program=PROGRAM):
    """Runs ./train with these flags: by itself, or as what the launcher's words begin."""
    own = ["--ranks", ranks] if ranks > 1 and not launcher else []
    data = ["--data", pathlib.Path(a.data).resolve()] if a.data else []
    with tempfile.TemporaryDirectory() as place:
        log = pathlib.Path(place) / "log.jsonl"
        command = [*launcher, program, *own, *data, *flags, "--eval-batches", 1, "--peak-tflops", 1, "--quiet", "--log", log]
        execute(command)
        return Run([json.loads(line) for line in log.read_text().splitlines()])


def cluster(hosts, ranks, *more):
    """A launcher for train: so many ranks on a cluster in a box (dev/cluster.sh)."""
    return [str(ROOT / "dev/cluster.sh"), hosts, *more, "--", "mpirun", "-n", ranks]


def why_no_cluster():
    """None, or one line: what this machine lacks for that."""
    done = subprocess.run([str(ROOT / "dev/cluster.sh"), "2", "--", "true"], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


def plan(*flags):
    """What a run would need, by --dry-run --json."""
    return json.loads(execute([PROGRAM, *flags, "--dry-run", "--json"]))


# ---- what is shown --------------------------------------------------------------------------------------------------
def table(columns, rows):
    """Two blanks or more between columns; text to the left, numbers to the right."""
    lines = [list(columns)] + [[str(x) for x in row] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print()
    for line in lines:
        print("  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths))).rstrip())


def mb(n):
    return f"{n / 1e6:.3f}"


def pyplot(what):
    """matplotlib's pyplot, or None and a line on how to get `what`."""
    try:
        import matplotlib
    except ImportError:
        print(f"\nno matplotlib, so no picture of {what}: `make test` brings it into build/venv")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def shown(path):
    """As one would type it here."""
    return min(os.path.relpath(path), str(path), key=len)


def save(figure, a, name):
    figure.savefig(a.out / name, dpi=110, bbox_inches="tight")
    print(f"\npicture: {shown(a.out / name)}")

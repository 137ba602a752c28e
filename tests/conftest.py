"""What every test of the program uses: builds, runs, a text, and a way to cover many options with few runs."""
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))

import kernel_table  # noqa: E402
from kernels import make  # noqa: E402

# One seed for everything random in a session: SEED=$RANDOM make test draws other layouts, models and weights.
SEED = int(os.environ.get("SEED", 2026))
RUN_SECONDS = 240
# PyTorch's kernels take AMX where the processor names it, even where the system has not let it in.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
os.environ["DEVICE"] = "cpu"  # what make builds for a test that names no device, even beside a GPU


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    config.addinivalue_line("markers", "law: the whole product of layouts (make law); long")
    config.addinivalue_line("markers", "mutants: breaks the code on purpose (make mutants); long")


def pytest_report_header(config):
    return f"SEED={SEED}"


_nvcc = None  # compiles the kernels for the tests that ask for `compiled`


def pytest_collection_finish(session):
    """nvcc takes minutes: it begins now, once, with the time that tests leave which mostly wait."""
    global _nvcc
    asked = any("compiled" in getattr(item, "fixturenames", ()) for item in session.items)
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if asked and first and shutil.which("nvcc") and not session.config.option.collectonly:
        command = ["nice", "-n", "19", sys.executable, "dev/kernel_table.py", "--compile"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        _nvcc = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **quiet)


def pytest_unconfigure():
    if _nvcc and _nvcc.poll() is None:
        os.killpg(_nvcc.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def compiled():
    """(rows, broken promises) of dev/kernel_table.py."""
    if not kernel_table.nvcc_version():
        pytest.skip("no nvcc here, and the table is made with it")
    return kernel_table.rows()


# ---- building and running ----------------------------------------------------------------------------------------
def build(precision="fp32", sanitize="", mpi=1, program="train", device="cpu"):
    """The program of this variant."""
    variant = f"{device}-{precision}{'' if mpi else '-nompi'}{'-sanitized' if sanitize else ''}"
    options = [f"DEVICE={device}", f"PRECISION={precision}", f"SANITIZE={sanitize}", f"MPI={mpi}"]
    return make(f"build/{variant}/{program}", *options)


@dataclass
class Run:
    command: str
    code: int
    stdout: str
    stderr: str
    log: list = field(default_factory=list)  # the events of --log

    def events(self, kind):
        return [e for e in self.log if e["event"] == kind]

    def one(self, kind):
        found = self.events(kind)
        assert len(found) == 1, f"{len(found)} {kind} events\n{self}"
        return found[0]

    def curve(self, key):
        """A value of every step, in order."""
        steps = self.events("step")
        assert [e["step"] for e in steps] == list(range(steps[0]["step"], steps[0]["step"] + len(steps)))
        return [e[key] for e in steps]

    def __str__(self):
        return f"$ {self.command}\nexit code {self.code}\n{self.stdout}\n{self.stderr}"


def environment(**more):
    """Root may start mpirun in a container; a launcher around the tests is none of theirs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))}
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that waits for one without a core must not take its core
    env.update(more)
    return env


def run_program(program, flags, ranks=1, timeout=RUN_SECONDS, log=None, cwd=None, env=None):
    """Runs ./train with these flags ("--flag value" strings or numbers); never longer than timeout seconds."""
    command = [str(program), *(["--ranks", str(ranks)] if ranks > 1 else []), *map(str, flags)]
    if log is not None:
        command += ["--log", str(log)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd or ROOT,
        env=environment(**(env or {})),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # mpirun's ranks end when it does
        out, err = process.communicate()
        code, err = None, f"{err}\nran longer than {timeout} s"
    events = []
    if log is not None and os.path.exists(log):
        with open(log) as f:
            events = [json.loads(line) for line in f]
    return Run(" ".join(command), code, out, err, events)


@pytest.fixture
def train(tmp_path):
    """train(flag, value, …, ranks=1, precision="fp32", device="cpu", fails=False) → Run: runs the program, with a log.

    Unless it is said to fail, it must not."""
    numbers = itertools.count()

    def train(*flags, ranks=1, precision="fp32", sanitize="", device="cpu", fails=False, timeout=RUN_SECONDS, env=None):
        log = tmp_path / f"log-{next(numbers)}.jsonl"
        r = run_program(build(precision, sanitize, device=device), flags, ranks, timeout, log, env=env)
        assert fails or r.code == 0, f"{r}"
        return r

    return train


def checkpoint_bytes(directory, step):
    """What a save of this step wrote, file by file."""
    files = sorted((directory / f"step-{step:08d}").glob("*.safetensors"))
    assert len(files) == 2, files
    return [path.read_bytes() for path in files]


WORDS = """the a of and to in that it was his her with for they at on by from when we there an she been their one all
 said so up out if about who get which go me could time no make than first water down day side now part new take place
 year live back most very after thing our just name good sentence man think say great where help through much before
 line right too mean old any same tell boy follow came want show also around form three small set put end does another
 well large must big even such because turn here why ask went men read need land different home us move try kind hand
 picture again change off play spell air away animal house point page letter mother answer found study still learn""".split()


def make_text(n, seed=0):
    """n bytes that a model can learn: words after other words, in sentences."""
    r, parts, size = random.Random(seed), [], 0
    follows = {w: r.sample(WORDS, 5) for w in WORDS}
    word = r.choice(WORDS)
    while size < n:
        sentence = []
        for _ in range(r.randint(4, 12)):
            word = r.choice(follows[word])
            sentence.append(word)
        parts.append(" ".join(sentence).capitalize() + r.choice([". ", "? ", "!\n", ".\n"]))
        size += len(parts[-1])
    return "".join(parts)[:n].encode()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 60,000 bytes."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(make_text(60_000))
    return path


# ---- many options, few runs --------------------------------------------------------------------------------------
def together(axes, names, legal):
    """axes, but those of these names are one, whose values are what of their product is legal: draws waste less."""
    values = [v for v in itertools.product(*(axes[n] for n in names)) if legal(dict(zip(names, v)))]
    return {tuple(names): values, **{n: v for n, v in axes.items() if n not in names}}


def each_alone(axes):
    """{names: [their values, …], …}: an axis of one name is one of a tuple of names, like those of `together`."""
    return {n if isinstance(n, tuple) else (n,): v if isinstance(n, tuple) else [(x,) for x in v] for n, v in axes.items()}


def drawn(r, axes):
    return {name: x for names, values in axes.items() for name, x in zip(names, r.choice(values))}


def holding(axes, pair):
    """axes, but those of several names with those values alone that a case with this pair may have."""
    fixed = dict(pair)

    def fits(names, v):
        return len(names) == 1 or all(fixed.get(n, x) == x for n, x in zip(names, v))

    return {names: [v for v in values if fits(names, v)] for names, values in axes.items()}


def covering(axes, legal=lambda case: True, seed=0, tries=40, most=None):
    """Cases (dicts) such that every pair of values of two axes that is legal at all appears in one of them.

    Greedy: each case starts from a pair not seen yet, the rest is drawn at random `tries` times, and the legal draw
    that covers most new pairs stays. Pairs for which `most` draws (50 · tries) find no legal case are left out."""
    r, axes = random.Random(seed), each_alone(axes)
    of = {n: dict.fromkeys((n, v[i]) for v in values) for names, values in axes.items() for i, n in enumerate(names)}
    items = [item for values in of.values() for item in values]
    bit = {item: 1 << i for i, item in enumerate(items)}
    # Of every value, those of other axes that it has not been seen with, as a set of bits.
    wanted = {a: sum(bit[b] for b in items if b[0] != a[0]) for a in items}
    cases = []

    def seen(case):
        """The bits of a case, and how many pairs in it are new; each is counted from both its ends."""
        bits = sum(bit[item] for item in case.items())
        return bits, sum((wanted[item] & bits).bit_count() for item in case.items())

    for a, b in ((a, b) for m, n in itertools.combinations(of, 2) for a in of[m] for b in of[n]):
        if not wanted[a] & bit[b]:
            continue
        choice, best, gain = holding(axes, (a, b)), None, 0
        for draw in range((most or 50 * tries) if all(choice.values()) else 0):
            case = drawn(r, choice) | dict((a, b))
            if not legal(case):
                continue
            bits, new = seen(case)
            if new > gain:
                best, best_bits, gain = case, bits, new
            if best and draw >= tries:
                break
        if best:
            cases.append(best)
            for item in best.items():
                wanted[item] &= ~best_bits
    return cases


def draw(axes, legal, n, seed):
    """n random legal cases."""
    r, axes, cases = random.Random(seed), each_alone(axes), []
    while len(cases) < n:
        case = drawn(r, axes)
        if legal(case):
            cases.append(case)
    return cases


def label(case):
    return ",".join(f"{k}={v}" for k, v in case.items())


def close(a, b, tolerance):
    """|a − b| ≤ tolerance · |b|, and never with NaN."""
    return abs(a - b) <= tolerance * abs(b)

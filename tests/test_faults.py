"""What goes wrong on one rank ends all of them: in time, with exit code 3, and with one line that names the culprit.

The faults are in a second program (faults.c), or are signals that come from outside."""
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import time

import pytest

from conftest import ROOT, SEED, covering, environment, label, make, run_program
from test_comm import alive, children

TIMEOUT = 3  # of the program's watchdog
START = 15  # seconds that the tests allow a job to start in, on a machine with something else to do
MODEL = f"--layers 4 --hidden 32 --heads 4 --seq 16 --micro-batch 1 --quiet --data {ROOT}/README.md".split()
ENDLESS = [*MODEL, "--steps", "1000000", "--timeout", TIMEOUT]


@pytest.fixture(scope="session")
def faulty():
    return make("build/cpu-fp32/tests/train_with_faults")


def culprit(stderr):
    """The one line, without what it starts with.

    mpirun wakes a stopped rank to kill it, and in this moment Open MPI may find there that the others are gone, or a socket."""
    noise = r"\[\S+:\d+\] Read -1, expected \d+, errno = 3$|\[warn\] Epoll MOD.* Bad file descriptor$"
    lines = [x for x in stderr.splitlines() if not re.match(noise, x)]
    assert len(lines) == 1 and lines[0].startswith("train: "), stderr
    return lines[0][len("train: ") :]


OPS = "all_reduce|all_reduce_max|reduce_scatter|all_gather|broadcast|send|barrier"
STEP = rf"({OPS}) \d+ of (dp|tp|pp|kv|world|tied|[FI] to stage \d)( \(\d+ \w+\))?"
WAITS = rf"rank (\d+) has waited \d\.\d s in {STEP}$"
LOST = rf"(?:has not been heard of for \d\.\d s \(.*\); by its last report,|has not come;) it last started {STEP}; {WAITS}"


# ---- faults from within (faults.c) ----------------------------------------------------------------------------------
FAULTS = {"kind": ["stop", "sleep", "skip", "swap"], "where": [(2, 0), (3, 1), (4, 3)], "zero": [0, 2, 3]}
FAULTS["group"] = ["dp", "tp"]  # of all ranks


def may_happen(x):
    """Three ranks do not divide the heads; and a collective of tp is awaited before the next one starts."""
    return x["group"] == "dp" or (x["where"][0] != 3 and x["kind"] != "swap")


@pytest.mark.parametrize("fault", covering(FAULTS, may_happen, seed=SEED), ids=label)
def test_the_culprit_is_named(faulty, fault):
    kind, (ranks, who), zero, group = fault.values()
    began = time.monotonic()
    flags = [*ENDLESS, "--zero", zero, f"--{group}", ranks]
    if group == "tp" and zero > 1:  # which means nothing there
        flags += ["--sp"]
    r = run_program(faulty, flags, ranks, timeout=60, env={"FAULT": f"{kind}@{group}:{who}:13"})  # a step's first over dp
    assert time.monotonic() - began < START + TIMEOUT + 5, f"{r}"
    assert r.code == 3, f"{r}"
    line = culprit(r.stderr)
    assert f" of {group} " in line, line
    if kind == "stop" and who == 0:
        assert re.match(rf"rank 1: rank 0 does not answer .*; this rank has waited \d\.\d s in {STEP}$", line), line
        return
    if kind == "stop":
        seen = rf"rank {who} has not been heard of for \d\.\d s \(.*\); by its last report, it last started {STEP}; "
    elif kind == "sleep":
        seen = rf"rank {who} has not come; it last started {STEP}; "
    elif ranks > 2:
        seen = rf"rank {who} is out of order: it waits in {STEP}; "
    else:  # two that disagree: who is right?
        both = rf"rank 0 is out of step: it waits in ({STEP}); rank 1 is out of step: it waits in ({STEP})$"
        m = re.match(both, line)
        assert m and m.group(1) != m.group(5), line
        return
    m = re.match(seen + WAITS, line)
    assert m and int(m.groups()[-4]) != who, line


# ---- in a pipeline ---------------------------------------------------------------------------------------------------
# Eight micro-batches a step, and the second step: F and I number 9 are its first. Ranks of four begin with 3, 2, 1, 0 more F
# than I (the warm-up), and end with as many more I than F (the drain).
@pytest.mark.parametrize("kind, ranks, who, channel, n", [
    ("stop", 2, 1, "I to stage 0", 12),  # in the steady state
    ("stop", 4, 0, "F to stage 1", 10),  # in the warm-up
    ("stop", 4, 1, "F to stage 2", 13),
    ("stop", 4, 2, "I to stage 1", 16),  # in the drain
    ("stop", 4, 3, "I to stage 2", 12),
    ("sleep", 4, 2, "F to stage 3", 9),
])  # fmt: skip
def test_a_rank_of_a_pipeline_is_named(faulty, kind, ranks, who, channel, n):
    """Not those who wait for it, nor for those who wait for it, in turn."""
    flags, began = [*ENDLESS, "--pp", ranks, "--accum", 8], time.monotonic()
    r = run_program(faulty, flags, ranks, timeout=60, env={"FAULT": f"{kind}@{channel}:{who}:{n}"})
    assert time.monotonic() - began < START + TIMEOUT + 5, f"{r}"
    assert r.code == 3, f"{r}"
    line = culprit(r.stderr)
    if who == 0:
        assert re.match(rf"rank \d: rank 0 does not answer .*; this rank has waited \d\.\d s in {STEP}$", line), line
        return
    m = re.match(rf"rank {who} {LOST}", line)
    assert m and int(m.group(4)) != who and ("has not come" in line) == (kind == "sleep"), line


@pytest.mark.parametrize("fault, ranks, pair", [
    ("skip@F to stage 2:1:12", 4, (1, 2)),  # what comes next is taken for it; at the end of the step one is missing
    ("skip@I to stage 0:1:12", 2, (0, 1)),
    ("again@F to stage 1:1:12", 2, (0, 1)),  # the last one is awaited twice
])  # fmt: skip
def test_a_message_too_few(faulty, fault, ranks, pair):
    """Two ranks wait for each other: who is right?"""
    r = run_program(faulty, [*ENDLESS, "--pp", ranks, "--accum", 8], ranks, timeout=60, env={"FAULT": fault})
    assert r.code == 3, f"{r}"
    a, b = pair
    circle = rf"rank {a} waits for rank {b} in {STEP}; rank {b} waits for rank {a} in {STEP}(; {WAITS})?$"
    assert re.match(circle, culprit(r.stderr)), r.stderr


@pytest.mark.parametrize("one, other", [
    ("--accum 4", "--accum 8"), ("--accum 4 --schedule afab", "--accum 4"), ("--accum 4 --schedule zb-h1", "--accum 4"),
])  # fmt: skip
def test_ranks_with_different_flags(faulty, one, other):
    """Their messages would be taken for others, where they do not wait for ever."""
    ranks = [["-n", 1, faulty, *ENDLESS, "--pp", 2, *flags.split()] for flags in (one, other)]
    r = run_program("mpirun", ["--oversubscribe", *ranks[0], ":", *ranks[1]], timeout=60, env={"FAULT": "none:0:1"})
    said = [line for line in r.stderr.splitlines() if line.startswith("train: ")]
    assert r.code == 3, f"{r}"
    assert said == ["train: pipeline ranks 0 and 1 have other orders or sizes of messages; are their flags alike?"], f"{r}"


@pytest.mark.parametrize("zero", [0, 3])
def test_slow_is_not_stuck(faulty, zero):
    flags = [*MODEL, "--steps", 8, "--timeout", TIMEOUT, "--zero", zero]
    r = run_program(faulty, flags, 3, env={"FAULT": f"sleep:1:4:{TIMEOUT - 1}"})
    assert (r.code, r.stderr) == (0, ""), f"{r}"


def test_a_late_rank_changes_no_number(faulty, tmp_path):
    """It comes late to a block's sum over dp, which all others, too, must have before they sum copies over tp."""
    flags = [*MODEL, "--steps", 4, "--tp", 2, "--kv-heads", 1, "--peak-tflops", 1]
    curves = []
    for i, fault in enumerate(("none:0:1", "sleep:2:9:0.5")):  # six reductions a step
        r = run_program(faulty, flags, 4, log=tmp_path / f"{i}", env={"FAULT": fault})
        assert r.code == 0, f"{r}"
        curves.append((r.curve("loss"), r.curve("grad_norm")))
    assert curves[0] == curves[1]


# ---- faults from outside --------------------------------------------------------------------------------------------
class Job:
    """A run that would never end, some steps after its start; `rank` are its process ids."""

    def __init__(self, program, ranks, flags, log, fault):
        self.log, self.ranks, self.began = log, ranks, time.monotonic()
        self.process = subprocess.Popen(
            [str(program), "--ranks", str(ranks), *map(str, flags), "--log", str(log)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(FAULT=fault),
            start_new_session=True,
        )
        self.steps_from_now(3)
        self.mpirun = children(self.process.pid)[0]
        self.rank = [None] * ranks
        for pid in children(self.mpirun):
            with open(f"/proc/{pid}/environ") as f:
                self.rank[int(re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", f.read()).group(1))] = pid

    def steps(self):
        try:
            with open(self.log) as f:
                return f.read().count('"step"')
        except FileNotFoundError:
            return 0

    def steps_from_now(self, n):
        enough, deadline = self.steps() + n, time.monotonic() + 2 * START
        while self.steps() < enough:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "no steps"
            time.sleep(0.05)

    def signal(self, name, ranks):
        for r in ranks:
            os.kill(self.rank[r], getattr(signal, name))

    def end(self, within):
        """Waits until all of it is gone; returns exit code and stderr."""
        _, err = self.process.communicate(timeout=within)
        deadline = time.monotonic() + 5
        while any(map(alive, [self.mpirun, *self.rank])):
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)
        return self.process.returncode, err

    def kill(self):
        for pid in [self.process.pid, *(p for p in getattr(self, "rank", []) if p)]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture
def job(faulty, tmp_path):
    jobs = []

    def start(ranks, *flags, fault="none:0:1"):
        jobs.append(Job(faulty, ranks, [*ENDLESS, *flags], tmp_path / f"log-{len(jobs)}.jsonl", fault))
        return jobs[-1]

    yield start
    for j in jobs:
        j.kill()


LIMIT = TIMEOUT + 5 + 2  # the contract, and something for a machine that is busy


@pytest.mark.parametrize("ranks, who, flags", [
    (3, 1, "--zero 3"), (4, 3, "--zero 3"), (4, 2, "--zero 1 --tp 2"), (4, 2, "--zero 1 --pp 2 --accum 4"),
    (4, 1, "--pp 4 --accum 8"),
])  # fmt: skip
def test_a_stopped_rank(job, ranks, who, flags):
    j = job(ranks, *flags.split())
    j.signal("SIGSTOP", [who])
    code, err = j.end(LIMIT)
    assert code == 3 and culprit(err).startswith(f"rank {who} has not been heard of for "), err


@pytest.mark.parametrize("ranks, flags", [(3, "--zero 3"), (4, "--pp 4 --accum 8")])
def test_stopped_rank_0(job, ranks, flags):
    j = job(ranks, *flags.split())
    j.signal("SIGSTOP", [0])
    code, err = j.end(LIMIT)
    assert code == 3 and re.match(r"rank \d: rank 0 does not answer ", culprit(err)), err


def test_a_killed_rank(job):
    j = job(4, "--tp", 2, "--sp", "--pp", 2, "--accum", 4)
    j.signal("SIGKILL", [1])
    code, err = j.end(LIMIT)
    assert code == 3 and culprit(err).startswith("a rank was ended by signal 9 "), err


def test_two_stopped_ranks(job):
    j = job(4)
    j.signal("SIGSTOP", [1, 3])
    code, err = j.end(LIMIT)
    named = re.findall(r"rank (\d) has not been heard of", culprit(err))
    assert (code, named) == (3, ["1", "3"]), err


@pytest.mark.parametrize("who, everybody", [(0, True), (1, False)])
def test_a_job_that_was_stopped_goes_on(job, who, everybody):
    """One rank, for less than the timeout; then perhaps all of them (Ctrl-Z, fg), for longer."""
    j = job(3)
    j.signal("SIGSTOP", [who])
    time.sleep(TIMEOUT - 1.5)
    if everybody:
        j.signal("SIGSTOP", range(3))
        time.sleep(TIMEOUT + 1)
    j.signal("SIGCONT", range(3))
    j.steps_from_now(3)
    time.sleep(1)
    assert j.process.poll() is None


def test_a_rank_without_a_line_to_rank_0(job):
    """It says so and trains on; should it hang as well, it is the one that nobody has heard of."""
    j = job(3, fault="deaf:2:1000")
    time.sleep(TIMEOUT + 2)
    j.steps_from_now(3)
    j.signal("SIGSTOP", [2])
    code, err = j.end(LIMIT)
    said, verdict = (line for line in err.splitlines() if line.startswith("train: "))
    assert code == 3 and said.startswith("train: rank 2: cannot reach rank 0's watchdog at any of its "), err
    assert verdict.startswith("train: rank 2 was never heard of "), err


def test_the_nearest_address_need_not_answer(job):
    """Another host's ranks find nobody at the first addresses, which are the loopback's."""
    j = job(2, fault="deaf:1:1")
    time.sleep(TIMEOUT)
    j.signal("SIGSTOP", [1])
    code, err = j.end(LIMIT)
    assert code == 3 and culprit(err).startswith("rank 1 has not been heard of for "), err


def test_a_line_that_was_cut_is_laid_anew(job):
    """The watchdog is there for training, not the other way round: a lost connection ends nothing, and blames nobody."""
    j = job(3, fault="cut:1:3")
    time.sleep(2 * TIMEOUT + 3)
    j.steps_from_now(3)
    j.signal("SIGSTOP", [2])
    code, err = j.end(LIMIT)
    assert code == 3 and re.match(r"rank 2 has not been heard of for ", culprit(err)) and "rank 1 h" not in err, err


def listening(pid):
    """The ports on which this process listens at all addresses, without Open MPI's own, which begin at 1024."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        m = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        inodes |= {m.group(1)} if m else set()
    ports = set()
    for table in "/proc/net/tcp", "/proc/net/tcp6":
        if os.path.exists(table):
            with open(table) as f:
                rows = [line.split() for line in f.readlines()[1:]]
            mine = [r[1].split(":") for r in rows if r[3] == "0A" and r[9] in inodes]
            ports |= {int(port, 16) for address, port in mine if not address.strip("0")}
    return {p for p in ports if p > 10000}


def test_strangers_change_nothing(job):
    """Some say nothing, some the wrong thing, some that they are rank 1; more of them than there are places."""
    j = job(2)
    ports, calls = listening(j.rank[0]), []
    assert ports
    for port in ports:
        for i in range(100):
            calls.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            if i % 2:
                calls[-1].sendall(b"GET / HTTP/1.1\r\n" * 400)
    j.steps_from_now(3)
    j.signal("SIGSTOP", [1])
    while j.process.poll() is None and time.monotonic() < j.began + 2 * START:
        with contextlib.suppress(OSError):  # it ends at some time
            for port in ports:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as c:
                    c.sendall(struct.pack("=qi", 12345, 1) + bytes(2000))  # a report with another job's token
        time.sleep(0.2)
    code, err = j.end(LIMIT)
    assert code == 3 and culprit(err).startswith("rank 1 has not been heard of for "), err
    for c in calls:
        c.close()


# ---- errors of one rank ---------------------------------------------------------------------------------------------
def test_a_log_that_rank_0_cannot_open(faulty):
    r = run_program(faulty, [*ENDLESS, "--log", "/nowhere/log"], 3, timeout=60, env={"FAULT": "none:0:1"})
    assert r.code == 2 and culprit(r.stderr).startswith("rank 0: --log /nowhere/log: "), f"{r}"

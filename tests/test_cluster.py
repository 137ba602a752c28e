"""The cluster in a box (dev/cluster.sh), what travels between its hosts, and the template for Slurm.

Bytes are counted twice here, by the program and by something that we did not write: the network interfaces of the
hosts, and Open MPI's own monitoring of messages. Of two runs that differ in their steps alone the difference is taken,
so that start and end drop out."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, Run, build, environment, run_program

CLUSTER, TEMPLATE = ROOT / "dev/cluster.sh", ROOT / "dev/slurm/train.sbatch"
MODEL = "--layers 3 --hidden 64 --heads 4 --seq 32 --micro-batch 2 --peak-tflops 1 --quiet --eval-every 1000".split()
SECONDS = 120


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def box():
    """Skips where this machine lets nobody make namespaces; a cluster that fails for another reason is no reason."""
    alone = subprocess.run("unshare -nmp -f true || unshare -rnmp -f true", shell=True, capture_output=True, text=True)
    if alone.returncode or not shutil.which("tc"):
        pytest.skip(f"no cluster in a box here: {alone.stderr.strip() or 'no tc (iproute2)'}")


def on_cluster(hosts, *command, rate=None, counters=None, log=None, **env):
    """Runs the command on host1; with counters, returns {host: (sent, received)} beside the run."""
    flags = [hosts, *(["--rate", rate] if rate else []), *(["--counters", counters] if counters else [])]
    return run_program(CLUSTER, [*flags, "--", *command], timeout=SECONDS, log=log, env=env)


def mpirun(n, *command):
    return ["mpirun", "-n", n, *command]


def steps_in(log):
    """The steps in a log: of its whole lines, for the last may still be on its way."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [e["step"] for e in map(json.loads, lines) if e["event"] == "step"]


def traces(directory):
    """What a cluster could leave behind: processes, files, interfaces, and namespaces with a name."""
    shared = [name for name in os.listdir("/dev/shm") if re.match(r"vader_segment[.]host\d", name)]
    interfaces = [name for name in os.listdir("/sys/class/net") if re.match(r"host\d|switch", name)]
    named = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline") as command:
                if f"\0TMPDIR={directory}".encode() in b"\0" + environ.read() and int(pid) != os.getpid():
                    processes.append(f"{pid} {command.read()}")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return set([*os.listdir(directory), *shared, *interfaces, *named, *processes])


@pytest.fixture
def nothing_left(box, tmp_path, monkeypatch):
    """A directory for temporary files that is this test's alone also marks the processes below it."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    directory.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(directory))
    before = traces(directory)
    yield
    until = time.monotonic() + 10  # the kernel takes a moment
    while traces(directory) - before and time.monotonic() < until:
        time.sleep(0.1)
    assert not traces(directory) - before


# ---- hosts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hosts, ranks", [(1, 2), (2, 2), (2, 4), (2, 3), (3, 6)])
def test_ranks_are_spread(hosts, ranks, nothing_left):
    """Evenly, neighbours side by side; each host has a name, an address and a count of ranks of its own."""
    show = "echo $OMPI_COMM_WORLD_RANK $(hostname) $(ip -4 -o address show eth0 | grep -o '10[.][0-9.]*')"
    r = on_cluster(hosts, *mpirun(ranks, "sh", "-c", f"{show} $OMPI_COMM_WORLD_LOCAL_SIZE"))
    assert r.code == 0, f"{r}"
    on = [host for host in range(hosts) for _ in range(ranks // hosts + (host < ranks % hosts))]
    wanted = [f"{rank} host{h + 1} 10.0.0.{h + 1} {on.count(h)}" for rank, h in enumerate(on)]
    assert sorted(r.stdout.splitlines()) == wanted, f"{r}"


def test_the_program_on_hosts(text, tmp_path, nothing_left):
    """It sees the hosts, and trains as on one, to the bit; also where it starts mpirun itself."""
    run = [*MODEL, "--data", text, "--steps", 4]
    one = run_program(build(), run, 4, log=tmp_path / "one")
    for i, (hosts, command) in enumerate(
        [(2, mpirun(4, build())), (3, mpirun(4, build())), (2, [build(), "--ranks", 4])]
    ):
        r = on_cluster(hosts, *command, *run, log=tmp_path / f"log{i}")
        assert r.code == 0, f"{r}"
        assert r.one("start")["hosts"] == hosts and one.one("start")["hosts"] == 1
        assert r.curve("loss") == one.curve("loss") and r.events("val") == one.events("val")


def test_side_by_side(nothing_left):
    """Two clusters at once, one of them shaped: neither sees the other."""
    command = [CLUSTER, 2, "--rate", "1gbit", "--", *mpirun(2, "sh", "-c", "sleep 1; hostname")]
    started = [
        subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and sorted(out.split()) == ["host1", "host2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have run without root already")
def test_without_root(nothing_left, tmp_path):
    """A user namespace does; what the run writes is the user's own."""
    os.chmod(tmp_path, 0o777)
    for directory in tmp_path.parents:
        if directory.stat().st_mode & 0o777 == 0o700:
            os.chmod(directory, 0o755)
    nobody = ["setpriv", "--reuid", 65534, "--regid", 65534, "--clear-groups", "env", f"HOME={tmp_path}"]
    if subprocess.run([*map(str, nobody), "unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this system gives user namespaces to root alone")
    line = [*mpirun(2, "sh", "-c", "hostname"), "--rate", "100mbit"]
    r = run_program(nobody[0], [*nobody[1:], CLUSTER, 2, *line[-2:], "--counters", tmp_path / "c", "--", *line[:-2]])
    assert r.code == 0 and sorted(r.stdout.split()) == ["host1", "host2"], f"{r}"
    assert (tmp_path / "c").stat().st_uid == 65534 and counted(tmp_path / "c").keys() == {"host1", "host2"}


# ---- how it ends ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "code, command",
    [
        (0, mpirun(2, "true")),
        (7, mpirun(3, "sh", "-c", "exit $((OMPI_COMM_WORLD_RANK == 2 ? 7 : 0))")),
        (9, ["sh", "-c", "exit 9"]),
        (137, ["sh", "-c", "kill -9 $$"]),
        (137, mpirun(4, "sh", "-c", "[ $OMPI_COMM_WORLD_RANK != 3 ] || kill -9 $$; exec sleep 1000")),
    ],
)
def test_exit_codes(code, command, nothing_left):
    r = on_cluster(2, *command)
    assert r.code == code, f"{r}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_programs_own_codes(ranks, nothing_left, tmp_path):
    wrong = on_cluster(2, *mpirun(ranks, "-q", build(), *MODEL, "--data", tmp_path / "none"))
    assert wrong.code == 2 and wrong.stderr.count("train: ") == 1, f"{wrong}"


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "KILL"])
@pytest.mark.parametrize("line", ["mpirun", "plain"])
def test_interrupted(line, name, nothing_left, tmp_path):
    """A signal ends everything; after kill -9 the kernel sees to it, and the next run takes the directory away."""
    mark = tmp_path / "up"
    wait = f"touch {mark}$OMPI_COMM_WORLD_RANK; exec sleep 4321"
    command = [*mpirun(4, "sh", "-c", wait)] if line == "mpirun" else ["sh", "-c", wait]
    process = subprocess.Popen(
        list(map(str, [CLUSTER, 2, "--", *command])), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("up*"))) < (4 if line == "mpirun" else 1):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(getattr(signal, f"SIG{name}"))
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    if name == "KILL":
        assert subprocess.run([CLUSTER, "1", "--", "true"], env=environment()).returncode == 0


def test_told_to_save(text, nothing_left, tmp_path):
    """SIGUSR1 reaches the ranks of every host: they save, and end well."""
    flags = [*MODEL, "--data", text, "--steps", 10**6, "--save", tmp_path / "ckpt", "--log", tmp_path / "log"]
    command = list(map(str, [CLUSTER, 2, "--", *mpirun(2, build(), *flags)]))
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len(steps_in(tmp_path / "log")) < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert (tmp_path / f"ckpt/step-{steps_in(tmp_path / 'log')[-1]:08d}/complete").exists()


def test_interrupted_while_it_starts(nothing_left):
    """Whatever step of the set-up the signal meets."""
    for i in range(24):
        process = subprocess.Popen([CLUSTER, "2", "--", "sleep", "4321"], env=environment(), start_new_session=True)
        try:
            time.sleep(0.004 * i)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) != 0
        finally:
            process.kill()
    assert subprocess.run([CLUSTER, "1", "--", "true"], env=environment()).returncode == 0


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "how many hosts"),
        ([0, "--", "true"], "HOSTS 0: from 1 to 199; nearest: 2"),
        (["two", "--", "true"], "HOSTS two"),
        ([2, 3, "--", "true"], "3 stands before --"),
        ([2], "no command after --"),
        ([2, "--"], "no command after --"),
        ([2, "--rat", "--", "true"], "--rat is no flag"),
        ([2, "--rate", "100", "--", "true"], "--rate 100: a number and kbit, mbit or gbit"),
        ([2, "--rate"], "--rate : "),
        ([2, "--counters", "/nowhere/c", "--", "true"], "--counters /nowhere/c"),
        ([2, "--", "no-such-program"], "cannot find no-such-program"),
    ],
)
def test_wrong_lines(words, says, nothing_left):
    r = run_program(CLUSTER, words)
    assert r.code == 2 and not r.stdout and len(r.stderr.splitlines()) == 1, f"{r}"
    assert r.stderr.startswith(f"cluster.sh: {says}"), f"{r}"


def test_what_is_missing_is_named(tmp_path, nothing_left):
    """A machine without Open MPI, and one that forbids namespaces: one line, and the end."""
    for tool in "bash hostname ip tc unshare nsenter setpriv true".split():
        (tmp_path / tool).symlink_to(shutil.which(tool))
    r = on_cluster(2, "true", PATH=str(tmp_path))
    assert r.code == 2 and r.stderr.startswith("cluster.sh: missing: mpirun; "), f"{r}"
    assert len(r.stderr.splitlines()) == 1, f"{r}"
    forbids = tmp_path / "forbids"
    forbids.mkdir()
    (forbids / "unshare").write_text("#!/bin/sh\necho unshare: Operation not permitted >&2\nexit 1\n")
    (forbids / "unshare").chmod(0o755)
    r = on_cluster(2, "true", PATH=f"{forbids}:{os.environ['PATH']}")
    assert r.code == 2 and "Operation not permitted" in r.stderr and len(r.stderr.splitlines()) == 1, f"{r}"


# ---- the wire ------------------------------------------------------------------------------------------------------
# Rank 0 listens, each other rank sends it n bytes; with "both", the other way at the same time. Prints the seconds.
FLOW = """
import os, socket, sys, threading, time
n, both = int(sys.argv[1]), sys.argv[2] == "both"
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + word]) for word in ("RANK", "SIZE"))
def send(c):
    c.sendall(bytes(n))
def receive(c):
    left = n
    while left: left -= len(c.recv(min(left, 1 << 16)))
if rank == 0:
    server = socket.create_server(("10.0.0.1", 5000))
    others = [server.accept()[0] for _ in range(size - 1)]
    for c in others: c.sendall(b"x")  # now, all at once
else:
    while True:
        try: others = [socket.create_connection(("10.0.0.1", 5000))]; break
        except ConnectionRefusedError: time.sleep(0.05)
    others[0].recv(1)
began = time.monotonic()
work = [threading.Thread(target=send, args=[c]) for c in others if both or rank]
work += [threading.Thread(target=receive, args=[c]) for c in others if both or not rank]
for w in work: w.start()
for w in work: w.join()
if rank == 0: print(time.monotonic() - began)
for c in others: c.sendall(b"x"), c.recv(1)  # nobody closes before the other has everything
"""


def counted(path):
    """{host: (bytes sent, bytes received)}"""
    rows = [re.fullmatch(r"(host\d+) sent (\d+) received (\d+)", line) for line in path.read_text().splitlines()]
    return {row[1]: (int(row[2]), int(row[3])) for row in rows}


@pytest.mark.parametrize("rate, mbit, hosts, ways", [("10mbit", 10, 2, "one"), ("100mbit", 100, 2, "one"),
                                                     ("1gbit", 1000, 2, "one"), ("100mbit", 100, 2, "both"),
                                                     ("100mbit", 100, 3, "one")])  # fmt: skip
def test_rate(rate, mbit, hosts, ways, nothing_left, tmp_path):
    """Never faster than asked for, neither out of a host nor, with two that send to a third, into one; and, on a
    machine that may be busy, not much slower."""
    n = mbit * 10**6 // 8 * 3 // 2 // (hosts - 1)  # a second and a half
    command = mpirun(hosts, sys.executable, "-c", FLOW, n, ways)
    r = on_cluster(hosts, *command, rate=rate, counters=tmp_path / "c")
    assert r.code == 0, f"{r}"
    measured = 8e-6 * n * (hosts - 1) / float(r.stdout)
    assert 0.5 * mbit < measured < 1.02 * mbit, f"{measured} Mbit/s\n{r}"
    out, into = zip(*counted(tmp_path / "c").values())
    assert into[0] == pytest.approx(n * (hosts - 1), rel=0.08) and out[1:] == pytest.approx([n] * (hosts - 1), rel=0.08)
    back = out[0]
    assert back == pytest.approx(n, rel=0.08) if ways == "both" else back < 0.1 * n, (out, into)


def sent(run, rank):
    """The program's own count: bytes that this rank has sent to any group."""
    return sum(row["bytes"] for row in run.one("end")["comm"] if row["rank"] == rank)


LONG, SHORT = 45, 5  # steps


@pytest.mark.parametrize("zero", range(4))
def test_interfaces_count_the_same(zero, text, tmp_path, nothing_left):
    """Two hosts, a rank on each: what leaves a host is what its rank says it has sent, and headers."""
    run = [*MODEL, "--data", text, "--zero", zero, "--accum", 2]
    program, interface = {}, {}
    for steps in (LONG, SHORT):
        command = mpirun(2, build(), *run, "--steps", steps)
        r = on_cluster(2, *command, counters=tmp_path / "c", log=tmp_path / f"{steps}")
        assert r.code == 0, f"{r}"
        program[steps] = [sent(r, rank) for rank in range(2)]
        interface[steps] = [counted(tmp_path / "c")[f"host{rank + 1}"][0] for rank in range(2)]
    for rank in range(2):
        ours, theirs = (count[LONG][rank] - count[SHORT][rank] for count in (program, interface))
        assert ours > 20e6 and 1 <= theirs / ours < 1.05, (zero, rank, ours, theirs)


@pytest.mark.parametrize("zero", range(4))
def test_open_mpi_counts_the_same(zero, text, tmp_path):
    """Three ranks on one host, every message of the ring counted by Open MPI as it is handed over: the same sum, to
    the byte, and to the right-hand neighbour alone but for the few small ones of barriers."""
    run = [*MODEL, "--data", text, "--zero", zero, "--accum", 2]
    runs, monitored = {}, {}
    for steps in (LONG, SHORT):
        settings = dict(enable=2, enable_output=3, filename=tmp_path / f"{steps}")
        env = {f"OMPI_MCA_pml_monitoring_{key}": str(value) for key, value in settings.items()}
        runs[steps] = run_program(build(), [*run, "--steps", steps], 3, log=tmp_path / f"{steps}.log", env=env)
        assert runs[steps].code == 0, f"{runs[steps]}"
        for rank in range(3):  # lines "E from to N bytes …": messages between ranks that the program itself has sent
            lines = (tmp_path / f"{steps}.{rank}.prof").read_text()
            rows = re.findall(r"^E\t(\d+)\t(\d+)\t(\d+) bytes", lines, re.M)
            monitored[steps, rank] = {int(to): int(n) for _, to, n in rows}
    for rank in range(3):
        long, short = monitored[LONG, rank], monitored[SHORT, rank]
        to_right = long[(rank + 1) % 3] - short[(rank + 1) % 3]
        ours = sent(runs[LONG], rank) - sent(runs[SHORT], rank)
        assert ours > 20e6 and sum(long.values()) - sum(short.values()) == ours, (rank, long, short, ours)
        assert to_right >= 0.999 * ours


# ---- Slurm ---------------------------------------------------------------------------------------------------------
# What stands in for Slurm: srun is an mpirun of two ranks, and scontrol writes down what it was asked.
SRUN = """#!/bin/bash
printf '%s\\n' "$*" >>srun.calls
while [[ $1 == -* ]]; do shift; done
echo $$ >srun.pid
exec mpirun -q --oversubscribe -n 2 "$@"
"""
SCONTROL = '#!/bin/sh\necho "$@" >>scontrol.calls\n'


@pytest.fixture
def slurm(tmp_path, text):
    """slurm(steps, flag…): runs the template in a directory where srun and scontrol are ours."""
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train").symlink_to(build())
    flags = [*(word for word in MODEL if word != "--quiet"), "--data", text, "--lr", 1e-3, "--min-lr", 1e-3]
    job = dict(SLURM_JOB_ID="42", SLURM_JOB_NAME="night", SLURM_CPUS_PER_TASK="1")
    started = []

    def start(steps, *more):
        env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", STEPS=str(steps), **job)
        out = open(tmp_path / f"out{len(started)}", "w+")
        process = subprocess.Popen(
            ["bash", TEMPLATE, *map(str, flags), *map(str, more)], stdout=out, stderr=subprocess.STDOUT,
            cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process, out

    def end(process, out):
        process.wait(timeout=60)
        out.seek(0)
        return Run("train.sbatch", process.returncode, out.read(), "")

    start.end = end
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def calls(path):
    return path.read_text().splitlines() if path.exists() else []


def test_slurm_saves_and_resumes(slurm, tmp_path):
    """Told by SIGUSR1 that the time is up, it saves and asks for another turn; the next one goes on from there."""
    log = tmp_path / "runs/night/log.jsonl"
    process, out = slurm(10**6)
    until = time.monotonic() + 60
    while len(steps_in(log)) < 5:
        assert process.poll() is None and time.monotonic() < until, f"{slurm.end(process, out)}"
        time.sleep(0.02)
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
    first = slurm.end(process, out)
    assert first.code == 0 and calls(tmp_path / "scontrol.calls") == ["requeue 42"], f"{first}"
    reached = steps_in(log)[-1]
    assert (tmp_path / f"runs/night/step-{reached:08d}/complete").exists()

    second = slurm.end(*slurm(reached + 3))
    assert second.code == 0 and f"resumed runs/night/step-{reached:08d}" in second.stdout, f"{second}"
    assert steps_in(log) == list(range(1, reached + 4))
    third = slurm.end(*slurm(reached + 3))
    assert third.code == 0 and "nothing to do" in third.stdout, f"{third}"
    assert calls(tmp_path / "scontrol.calls") == ["requeue 42"], "a finished job must not come back"

    sruns = calls(tmp_path / "srun.calls")
    assert len(sruns) == 2 and all("--mpi=pmix --kill-on-bad-exit=1" in line for line in sruns)
    assert "--resume" not in sruns[0] and "--resume runs/night" in sruns[1]


def test_slurm_does_not_requeue_what_fails(slurm, tmp_path):
    r = slurm.end(*slurm(10, "--dp", 5))
    assert r.code == 2 and "train: --" in r.stdout and not calls(tmp_path / "scontrol.calls"), f"{r}"


def test_slurm_directives():
    """All stand before the first command, where Slurm stops reading them."""
    assert subprocess.run(["bash", "-n", TEMPLATE]).returncode == 0
    lines = TEMPLATE.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    wanted = "--signal=USR1@120 --requeue --ntasks-per-node --cpus-per-task --open-mode=append".split()
    given = [line.split(" ", 1)[1] for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert all(any(g.startswith(w) for g in given) for w in wanted), given
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])

"""Groups of ranks: the collectives on several numbers of ranks, how a job starts itself, and how it ends."""
import os
import re
import signal
import subprocess
import time

import pytest

from conftest import environment, make, run_program

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def program():
    return make("build/cpu-fp32/tests/test_comm")


@pytest.fixture(scope="session")
def program_on_emulator():
    return make("build/emu-fp32/tests/test_comm", "DEVICE=emu")


@pytest.fixture(scope="session")
def program_without_mpi():
    return make("build/cpu-fp32-nompi/tests/test_comm", "MPI=0")


def mpirun(n, program, *arguments, options=(), **env):
    """The program under mpirun itself, without the settings of --ranks."""
    command = ["mpirun", "-q", "--oversubscribe", "-n", str(n), *options, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**env))


# ---- the collectives (test_comm.c) --------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives(program, ranks):
    r = run_program(program, [], ranks)
    assert r.code == 0 and "[  PASSED  ] 27 test(s)" in r.stdout + r.stderr, f"{r}"


def test_collectives_without_mpi(program_without_mpi):
    r = run_program(program_without_mpi, [])
    assert r.code == 0 and "[  PASSED  ] 27 test(s)" in r.stdout + r.stderr, f"{r}"


# ---- on a device's memory, which here is the emulator's -----------------------------------------------------------
@pytest.mark.parametrize("seed, ranks", [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (1, 4), (3, 4)])
def test_collectives_on_a_device(program_on_emulator, ranks, seed):
    """In three orders of its streams: the compute stream first, the others first, any."""
    r = run_program(program_on_emulator, [], ranks, env={"EMU_SEED": str(seed)})
    assert r.code == 0 and "[  PASSED  ] 27 test(s)" in r.stdout + r.stderr, f"{r}"


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("what", ["test_shifts", "test_all_to_alls"])
def test_in_larger_rings(program, ranks, what):
    r = run_program(program, [], ranks, env={"TESTS": what})
    assert r.code == 0 and "[  PASSED  ] 1 test(s)" in r.stdout + r.stderr, f"{r}"


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_a_shift_that_nobody_waits_for_shows(program_on_emulator, transport, seed):
    r = run_program(program_on_emulator, ["ring", transport, "unawaited"], 3, env={"EMU_SEED": str(seed)})
    assert (r.code, r.stdout, r.stderr) == (0, "wrong\n", ""), f"{r}"


@pytest.mark.parametrize("how", ["asleep", "stopped"])
@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_who_does_not_come_on_a_device(program_on_emulator, transport, how):
    """By NCCL the others' hosts wait for their GPUs, and those for the third."""
    r = run_program(program_on_emulator, ["missing", transport, how], 3, timeout=40)
    group = "all on NCCL" if transport == "nccl" else "all"
    last = f"has not come; it last started all_reduce 2 of {group}"
    seen = last if how == "asleep" else "(has not been|was never) heard of"
    line = rf"train: rank 2 {seen}.*; rank \d has waited \d\.\d s in all_reduce 3 of {group} \(100 fp32\)\n"
    assert r.code == 3 and re.fullmatch(line, r.stderr), f"{r}"


# ---- a pipeline that does not move --------------------------------------------------------------------------------
WAITS = r"; rank [013] has waited \d\.\d s in send 3 of (right|left)( on NCCL)? \(100 fp32\)"


@pytest.mark.parametrize("memory, how", [("host", "asleep"), ("host", "stopped"), ("nccl", "asleep")])
def test_the_end_of_a_chain_is_named(program, program_on_emulator, memory, how):
    """Rank 0 waits for a message of 1, and 1 for one of 2."""
    r = run_program(program if memory == "host" else program_on_emulator, ["pipeline", memory, how], 4, timeout=40)
    last = "it last started send [12] of (right|left)"
    seen = f"has not come; {last}" if how == "asleep" else f"has not been heard of for .* s .*; by its last report, {last}"
    assert r.code == 3 and re.fullmatch(rf"train: rank 2 {seen}.*{WAITS}\n", r.stderr), f"{r}"


def test_a_killed_rank_ends_a_pipeline(program):
    r = run_program(program, ["pipeline", "host", "killed"], 4, timeout=30)
    assert (r.code, r.stderr.count("ended by signal 9")) == (3, 1), f"{r}"


def test_who_waits_in_a_circle(program):
    """Ranks 2 and 3 each wait for a message that the other would send later; and 1 waits for 2, and 0 for 1."""
    r = run_program(program, ["pipeline", "host", "circle"], 4, timeout=40)
    one, other = "rank 2 waits for rank 3 in send 3 of left", "rank 3 waits for rank 2 in send 3 of right"
    line = rf"train: {one} \(100 fp32\); {other} \(100 fp32\){WAITS}\n"
    assert r.code == 3 and re.fullmatch(line, r.stderr), f"{r}"


def test_a_slow_pipeline_is_not_stuck(program):
    """Two of its ranks go on for long, and the others wait for them, in turn, for longer than the timeout."""
    r = run_program(program, ["pipeline", "host", "slow"], 4, timeout=40)
    assert (r.code, r.stdout, r.stderr) == (0, "through\n", ""), f"{r}"


# ---- a ring that does not move ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "memory, how",
    [("host", how) for how in ("asleep", "stopped", "count", "left-out")]
    + [("nccl", how) for how in ("asleep", "count", "left-out")]
    + [("mpi", "asleep")],
)
def test_who_is_missing_in_a_ring(program, program_on_emulator, memory, how):
    """Rank 2 does not come to a shift. 3 waits for what it sends, 1 until it takes, and 0 has a shift that is whole."""
    r = run_program(program if memory == "host" else program_on_emulator, ["ring", memory, how], 4, timeout=40)
    group = "ring on NCCL" if memory == "nccl" else "ring"
    last = rf"it last started shift 2 of {group} \(100 fp32\)"
    said = {
        "asleep": f"has not come; {last}",
        "stopped": rf"has not been heard of for .* s \(stopped, or its host is gone\); by its last report, {last}",
        "count": rf"is out of order: it waits in shift 3 of {group} \(99 fp32\)",
        "left-out": r"is out of order: it waits in barrier 3 of world",
    }[how]
    waits = rf"rank [013] has waited \d\.\d s in (shift 3 of {group} \(100 fp32\)|barrier 3 of world)"
    line = f"train: rank 2 {said}; {waits}\n"
    if (memory, how) == ("nccl", "count"):  # the emulator's NCCL looks itself
        right = r"3 is in receive 7 \(100 float32, from 2\) where rank 2 is in send 7 \(99"
        left = r"2 is in receive 8 \(99 float32, from 1\) where rank 1 is in send 7 \(100"
        line = rf"(train: rank [0-3]: .*rank ({right}|{left}) .*\n)+"  # whichever it sees first
    assert r.code == 3 and re.fullmatch(line, r.stderr), f"{r}"


# ---- how a job ends -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(
    "mode, code, line",
    [
        ("fail-all-early", 2, "train: --tp 3 does not divide 8 heads"),
        ("fail-all", 2, "train: --tp 3 does not divide 8 heads"),
        ("fail-early", 2, "train: {rank}cannot open x"),
        ("fail", 3, "train: {rank}cannot open x"),
    ],
)
def test_one_line_and_a_code(program, mode, code, line, ranks):
    began = time.monotonic()
    r = run_program(program, [mode], ranks)
    rank = f"rank {ranks - 1}: " if ranks > 1 else ""
    assert (r.code, r.stderr, r.stdout) == (code, line.format(rank=rank) + "\n", ""), f"{r}"
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("mode, code", [("fail-all-early", 2), ("fail-all", 2), ("fail-early", 2), ("fail", 3)])
def test_one_line_under_plain_mpirun(program, mode, code):
    """Here mpirun lets a second pass between SIGTERM and SIGKILL: time for the others to say something, too."""
    r = mpirun(3, program, mode)
    assert r.returncode == code and [x[:7] for x in r.stderr.splitlines()] == ["train: "], f"{r}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_works_that_cross_are_not_added(program, ranks):
    """Every message of the two has the same size: without a mark of its own, one would be taken for the other."""
    r = run_program(program, ["crossed"], ranks, timeout=30)
    line = "rank 0 is out of (step|order): it waits in reduce_scatter \\d+ of world \\(512 fp32\\); "
    assert r.code == 3 and re.match("train: " + line, r.stderr) and r.stderr.count("\n") == 1, f"{r}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_early_rank_is_watched_over(program, ranks):
    """From its start on, even before rank 0 is there; and after its last work, until the others are through."""
    r = run_program(program, ["stopped"], ranks, timeout=30)
    assert r.code == 3 and f"train: rank {ranks - 1} has not been heard of for " in r.stderr, f"{r}"
    r = run_program(program, ["ends-early"], ranks, timeout=30)
    assert r.code == 3 and f"rank {ranks - 1} is out of " in r.stderr and "it waits in barrier" in r.stderr, f"{r}"


def test_a_killed_rank_ends_the_job(program):
    r = run_program(program, ["killed"], 3, timeout=30)
    assert r.code == 3, f"{r}"
    assert r.stderr == "train: a rank was ended by signal 9 (Killed): was there not enough memory?\n"


# ---- how it starts ------------------------------------------------------------------------------------------------
def started(r):
    """The lines that the ranks print in mode "start", in order of their ranks."""
    assert r.returncode == 0, f"{r}"
    return sorted(r.stdout.splitlines())


def run_start(program, *flags, **env):
    command = [str(program), "start", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**env))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_flag(program, ranks):
    threads = max(1, len(CORES) // ranks)
    cores = " ".join(map(str, CORES))
    assert started(run_start(program, "--a", "1 2", "--ranks", str(ranks), "b")) == [
        f"rank {r} of {ranks}, {threads} threads, omp {threads}, cores {cores}, arguments --a 1 2 b"
        for r in range(ranks)
    ]


def test_hosts_are_numbered(program):
    """By their first ranks, however the launcher deals out ranks; here in turn, to what passes for three hosts."""
    for ranks, local_sizes in (2, [1, 1]), (5, [2, 2, 1]):
        assert started(mpirun(ranks, program, "hosts")) == [
            f"rank {r}: {r // 3} of {local_sizes[r % 3]} on host {r % 3} of {len(local_sizes)}" for r in range(ranks)
        ]


def test_ranks_flag_leaves_what_the_user_set(program):
    lines = started(run_start(program, "--ranks", "2", OMP_NUM_THREADS="3"))
    assert [", 3 threads, omp 3, " in x for x in lines] == [True, True]


def test_one_rank_needs_no_mpirun(program, program_without_mpi):
    for p in program, program_without_mpi:
        assert [x[:13] for x in started(run_start(p, "--ranks", "1", PATH="/nowhere"))] == ["rank 0 of 1, "]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are bound on Linux alone")
def test_threads_under_mpirun(program):
    # Bound to one core where it may have all of them.
    one = started(mpirun(1, program, "start", options=["--bind-to", "core"]))
    cores = " ".join(map(str, CORES))
    assert one == [f"rank 0 of 1, {len(CORES)} threads, omp {len(CORES)}, cores {cores}, arguments"]
    # Two ranks with cores / 2 each: neighbouring slices.
    k = max(1, len(CORES) // 2)
    two = started(mpirun(2, program, "start", options=["--bind-to", "core"]))
    for r, line in enumerate(two):
        cores = " ".join(map(str, CORES[r * k : r * k + k] if len(CORES) > 1 else CORES))
        assert line == f"rank {r} of 2, {k} threads, omp {k}, cores {cores}, arguments"
    # The user wants more threads than that.
    two = started(mpirun(2, program, "start", options=["--bind-to", "core"], OMP_NUM_THREADS=str(len(CORES))))
    cores = " ".join(map(str, CORES))
    for r, line in enumerate(two):
        assert line == f"rank {r} of 2, {len(CORES)} threads, omp {len(CORES)}, cores {cores}, arguments"


def test_ranks_flag_under_a_launcher(program, program_without_mpi):
    assert len(started(mpirun(2, program, "start", "--ranks", "2"))) == 2
    r = mpirun(2, program, "start", "--ranks", "8")
    assert r.returncode == 2 and r.stdout == "", f"{r}"
    assert r.stderr == "train: --ranks 8, but the launcher has started 2; nearest: --ranks 2, or leave it out\n"
    r = mpirun(2, program_without_mpi, "start")
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1 and "MPI sees 1" in r.stderr, f"{r}"


def test_ranks_flag_refused(program, program_without_mpi):
    for p, flags, env, said in [
        (program, ["--ranks", "0"], {}, "--ranks 0: a run has at least 1 rank"),
        (program, ["--ranks", "2"], {"PATH": "/nowhere"}, "--ranks 2 needs mpirun"),
        (program_without_mpi, ["--ranks", "2"], {}, "--ranks 2 needs MPI, and this build has none"),
    ]:
        r = run_start(p, *flags, **env)
        assert r.returncode == 2 and r.stderr.count("\n") == 1 and said in r.stderr, f"{r}"


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, "0 1 0 1"),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, "5 8 1 4"),
        # srun: 4 + 4 + 3 ranks on three hosts, with or without PMIx
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
         | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "PMIX_RANK": "9"}, "9 11 1 3"),
        ({"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
         | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, "4 11 0 4"),
        # the shell of salloc or sbatch -n 8: one process
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_TASKS_PER_NODE": "8"}, "0 1 0 1"),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, "0 1 0 1"),
        # mpirun inside a step of srun's, one a host
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
         | {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
         | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "6 8 2 4"),
    ],
)
def test_what_the_launcher_says(program, env, expected):
    r = subprocess.run([program, "who"], capture_output=True, text=True, timeout=20, env=environment(**env))
    assert r.stdout.strip() == expected


# ---- signals ------------------------------------------------------------------------------------------------------
def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(x) for x in f.read().split()]


def alive(pid):
    """Not gone, and no zombie that waits for its parent either."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def saving(program):
    """Three ranks that wait for a signal to save; and the process in front, which got the user's command."""
    command = [str(program), "save", "--ranks", "3"]
    p = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    assert p.stdout.readline() == "ready\n"
    yield p
    p.kill()
    p.communicate(timeout=30)


ALL_SAVED = [f"rank {r} saved" for r in range(3)]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("whom", ["process", "group"])
def test_a_signal_lets_every_rank_save(saving, name, whom):
    """To the process alone (kill), or to its group (timeout(1), Slurm)."""
    (os.kill if whom == "process" else os.killpg)(saving.pid, getattr(signal, name))
    out, err = saving.communicate(timeout=30)
    assert sorted(out.splitlines()) == ALL_SAVED and err == "" and saving.returncode == 0


def test_a_signal_to_mpirun(saving):
    """Where the user starts mpirun: SIGUSR1 is forwarded."""
    os.kill(children(saving.pid)[0], signal.SIGUSR1)
    out, err = saving.communicate(timeout=30)
    assert sorted(out.splitlines()) == ALL_SAVED and err == "" and saving.returncode == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_rank_is_left_behind(saving, name):
    mpirun_pid = children(saving.pid)[0]
    ranks = children(mpirun_pid)
    assert len(ranks) == 3
    began = time.monotonic()
    os.kill(saving.pid, getattr(signal, name))
    out, _ = saving.communicate(timeout=30)  # until the last of them has closed its end
    assert saving.returncode != 0 and "saved" not in out
    while any(map(alive, [mpirun_pid, *ranks])):
        assert time.monotonic() - began < 15
        time.sleep(0.1)

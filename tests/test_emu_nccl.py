"""The emulated runtime of a program (dev/emu): streams that lie in wait, settings, NCCL by messages of MPI.

tests/emu_nccl_test.c is the program; a mode is one run of it, and each rank prints what it has seen."""
import json
import pathlib
import re
import subprocess

import pytest

from conftest import ROOT, environment, make

SEEDS = (0, 1, 2, 3)  # natural; others late; others early; any order
SOURCE = "tests/emu_test.cu"  # kernels, for those who want some


def program(checked=False, compiler="gcc"):
    build = f"build/emu-nccl{'-checked' if checked else ''}-{compiler}"
    options = ["DEVICE=emu", f"BUILD={build}", f"CC={compiler}", f"CHECKED={int(checked)}", "runtime=",
               f"cuda_sources={SOURCE}", "CFLAGS_MORE=-Idev/emu/include"]  # fmt: skip
    return make(f"{build}/tests/emu_nccl_test", *options)


def run(ranks, *mode, checked=False, **env):
    """(exit code, lines, errors) of a run."""
    command = [str(program(checked)), *mode]
    if ranks:
        command = ["mpirun", "-q", "--oversubscribe", "-n", str(ranks), *command]
    env = environment(**{k: str(v) for k, v in env.items()})
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    return r.returncode, r.stdout.splitlines(), r.stderr


def done(*args, **kwargs):
    """The lines of a run that went well, but the last."""
    code, lines, errors = run(*args, **kwargs)
    assert code == 0 and lines[-1:] == ["done"], "\n".join([*lines, errors])
    return lines[:-1]


# ---- headers -------------------------------------------------------------------------------------------------------
def names(header):
    """The enumerators of a header, and the functions it declares."""
    text = (ROOT / "dev/emu/include" / header).read_text()
    numbers = [n for body in re.findall(r"enum\s*\w*\s*\{(.*?)\}", text, re.S) for n in re.findall(r"\b(?:cuda|nccl)\w+", body)]
    numbers += re.findall(r"#define ((?:cuda|NCCL_)\w+)", text)
    return numbers, re.findall(r"^[\w ]+ \**((?:cuda|nccl)\w+)\(", text, re.M)


@pytest.mark.parametrize("header", ("cuda_runtime_api.h", "nccl.h"))
def test_headers_are_as_nvidias(header, tmp_path):
    nvidia = next((p.parent for p in sorted(pathlib.Path("/usr/local").glob("cuda*/include/" + header))), None)
    if not nvidia:
        pytest.skip(f"no NVIDIA {header} here")
    numbers, functions = names(header)
    numbers = [n for n in numbers if n not in ("NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH", "NCCL_VERSION_CODE")]
    assert len(numbers) > 20 and len(functions) > 15
    source = tmp_path / "numbers.c"
    prints = "".join(f'printf("%ld ", (long){n});' for n in numbers)
    taken = "".join(f"(void)&{f};" for f in functions)
    source.write_text(f"#include <stdio.h>\n#include <{header}>\nint main(void) {{ {prints} if (0) {{ {taken} }} return 0; }}\n")
    said = []
    for include in ROOT / "dev/emu/include", nvidia:
        exe = tmp_path / f"numbers{len(said)}"
        # Functions are only named in code that goes away.
        command = ["gcc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-isystem{include}", source, "-o", exe]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        said.append(subprocess.run([exe], capture_output=True, text=True).stdout.split())
    assert dict(zip(numbers, said[0])) == dict(zip(numbers, said[1]))


@pytest.mark.parametrize("compiler", ("gcc", "clang"))
def test_headers_are_c(compiler):
    source = "#include <nccl.h>\nint main(void) { struct cudaDeviceProp p; return (int)sizeof p == 0; }\n"
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Idev/emu/include", "-fsyntax-only", "-xc", "-"]
    assert subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True).stderr == ""


# ---- the emulator in an executable ---------------------------------------------------------------------------------
def test_shared_memory_of_an_executable():
    for checked in (False, True):
        lines = run(0, "kernel", "barriers", checked=checked)[1]
        assert lines[0].split() == [str(96 - i) for i in range(96)] + ["132"] * 96


def test_the_watcher_knows_an_executable():
    lines = (ROOT / SOURCE).read_text().splitlines()
    number = next(i for i, l in enumerate(lines, 1) if "all have written" in l)
    code, _, errors = run(0, "kernel", "barriers", checked=True, EMU_SKIP=f"{SOURCE}:{number}")
    assert code == 3 and "byte 380 of the __shared__ array x, which nothing has written" in errors
    assert f"({SOURCE}:{number + 1})" in errors
    said = run(0, "kernel", "write_past_the_end", checked=True)[1][0]
    assert "1 bytes past the end of allocation 1 of 1000 bytes" in said and SOURCE in said


def test_settings():
    assert run(0, "settings")[1][:2] == ["8 devices, cudaSuccess", "sm_90, 79500 MB of 80000"]
    code, lines, _ = run(0, "settings", EMU_DEVICES=2, EMU_MEMORY=1, EMU_ARCH=80)
    assert lines[:2] == ["2 devices, cudaSuccess", "sm_80, 500 MB of 1000"]  # a context takes 500
    assert lines[2] == "cudaSuccess cudaErrorMemoryAllocation cudaSuccess cudaErrorInvalidDevice"
    assert run(0, "settings", EMU_DEVICES=0)[1][0] == "0 devices, cudaErrorNoDevice"
    code, _, errors = run(0, "settings", EMU_MEMORY="much")
    assert (code, errors) == (2, "EMU_MEMORY=much is not a number\n")
    for name, value, most in ("EMU_DEVICES", 99999999999, 65536), ("EMU_SEED", 1.5, 2**32 - 1), ("EMU_ARCH", 1000, 129):
        code, _, errors = run(0, "settings", **{name: value})
        assert (code, errors) == (2, f"{name}={value} is no whole number up to {most}\n")


def test_the_host_may_not_look_with_mpi_either():
    code, _, errors = run(1, "host-access")
    assert code != 0 and re.search(r"host access to device memory at 0x\w+", errors), errors


def test_events_know_the_time():
    before, ms, untimed = done(1, "times")[0].split()
    assert before == "cudaErrorNotReady" and untimed == "cudaErrorInvalidResourceHandle"
    assert 50 <= float(ms) < 500


def test_questions_are_cheap():
    """In microseconds: a question where nothing runs, one that runs a copy between two of 151 allocations of a MB, one
    while another rank does not come."""
    cost = json.loads(done(2, "polling")[0])
    assert cost["nothing"] / 10000 < 20e-6
    assert 900 < cost["turns"] <= 1000 and cost["copies"] / cost["turns"] < 2e-3
    assert cost["waiting"] / 10000 < 100e-6


# ---- streams that lie in wait --------------------------------------------------------------------------------------
WHAT = pytest.mark.parametrize("what", ([], ["round"]), ids=("sum", "ring"))


@WHAT
@pytest.mark.parametrize("seed", SEEDS)
def test_with_all_events_all_is_right(seed, what):
    assert done(2, "missing", "none", *what, EMU_SEED=seed) == ["right"]


@WHAT
def test_a_missing_event_shows(what):
    """Before the collective, or what goes round a ring, and after it; and a host that reads before it has waited."""
    code, lines, _ = run(2, "missing", "before", *what, EMU_SEED=2)
    assert code and "its input was written while it was under way: is a wait or an event missing?" in lines[0], lines
    assert done(2, "missing", "after", *what, EMU_SEED=1) == ["wrong"]
    for seed in (1, 2):
        assert done(2, "missing", "host", *what, EMU_SEED=seed) == ["wrong"]


# ---- NCCL ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_collectives(ranks, seed):
    done(ranks, "collectives", EMU_SEED=seed)


def test_the_seed_orders_the_sums():
    assert len({done(4, "collectives", EMU_SEED=seed)[0] for seed in (1, 2, 5)}) > 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", (3, 4))
def test_several_communicators_at_once(ranks, seed):
    done(ranks, "several", EMU_SEED=seed)


@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize("ranks", (2, 4))
def test_messages(ranks, seed):
    done(ranks, "messages", EMU_SEED=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_a_ring(ranks, seed):
    """A send and a receive in one group of calls; of two ranks, both are with the same one."""
    done(ranks, "ring", EMU_SEED=seed)


def test_a_ring_needs_groups_of_calls():
    assert run(3, "ring-in-turns")[1] == ["all wait"]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_device_goes_on_while_the_host_waits_for_messages(seed):
    assert done(3, "host-waits", EMU_SEED=seed) == ["came 7"]


MISMATCHES = {
    "op": ("reduce-scatter 2 (100 float32)", "all-reduce 2 (100 float32)"),
    "count": ("all-reduce 2 (99 float32)", "all-reduce 2 (100 float32)"),
    "type": ("all-reduce 2 (100 int32)", "all-reduce 2 (100 float32)"),
    "root": ("broadcast 2 (100 float32, root 1)", "broadcast 2 (100 float32, root 0)"),
    "redop": ("all-reduce 2 (100 float32 max)", "all-reduce 2 (100 float32)"),
    "two sends": ("send 2 (100 float32, to 0)", "send 2 (100 float32, to 1)"),
    "two receives": ("receive 2 (100 float32, from 0)", "receive 2 (100 float32, from 1)"),
    "receive count": ("receive 2 (99 float32, from 0)", "send 2 (100 float32, to 1)"),
    "receive type": ("receive 2 (100 int32, from 0)", "send 2 (100 float32, to 1)"),
    "send alone": ("send 2 (100 float32, to 0)", "all-reduce 2 (100 float32)"),
    "ring": ("send 3 (99 float32, to 0)", "receive 3 (100 float32, from 1)"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_do_not_match(what):
    wrong, right = MISMATCHES[what]
    _, lines, errors = run(2, "mismatch", what)
    said = f"in communicator 0.0 (world ranks 0 1) rank 1 is in {wrong} where rank 0 is in {right}"
    assert lines and all(line.endswith(said) for line in lines), "\n".join([*lines, errors])
    if wrong[:4] in ("send", "rece"):  # they are between two
        return
    _, lines, errors = run(3, "mismatch", what)  # a third rank hears of it, too
    assert lines and all(wrong in line and right in line for line in lines), "\n".join([*lines, errors])


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("streams", "12")
def test_calls_in_two_orders(streams, ranks):
    _, lines, errors = run(ranks, "crossed", streams)
    small = rf"all-reduce 1 \(100 float32\) of communicator 0.1 \(world ranks 0 1\)"
    large = rf"all-reduce 1 \(100 float32\) of communicator 0.0 \(world ranks [0-2 ]+\)"
    said = (
        "world ranks 0 and 1 make their calls in different orders: call 1 between them is "
        f"{large} for the one, {small} for the other"
    )
    assert lines and all(re.search(said, line) for line in lines), "\n".join([*lines, errors])


@pytest.mark.parametrize("what", ("input", "output"))
def test_hands_off(what):
    _, lines, errors = run(2, "touched", what)
    said = f"all-reduce 1 (100 float32) of communicator 0.0 (world ranks 0 1): its {what} was written while it was under way"
    assert any(line.startswith("rank 0: invalid usage: " + said) for line in lines), "\n".join([*lines, errors])


@pytest.mark.parametrize("what", ("sent", "received"))
def test_hands_off_messages(what):
    _, lines, errors = run(2, "touched", what)
    call, side = ("send", "input") if what == "sent" else ("receive", "output")
    said = rf"rank 0: invalid usage: {call} 1 \(100 float32, \w+ 1\) of .*: its {side} was written while it was under way"
    assert any(re.match(said, line) for line in lines), "\n".join([*lines, errors])


def test_what_is_refused():
    wanted = [
        r"invalid argument: all-reduce: send buffer of 4004 bytes at \w+ is not in the device's memory",
        r"invalid argument: all-reduce: send buffer of 40 bytes at \w+ is not in the device's memory",
        r"invalid argument: all-reduce: buffers overlap, and not in place",
        r"invalid argument: all-reduce: type 6 is not in the emulator",
        r"invalid argument: broadcast: root 1 of 1 ranks",
        r"invalid argument: all-reduce: no communicator",
        r"invalid usage: send: rank 0 to itself is not in the emulator",
        r"invalid argument: send: peer 1 of 1 ranks",
        r"invalid usage: receive: rank 0 to itself is not in the emulator",
        r"invalid usage: ncclGroupEnd without ncclGroupStart",
        r"invalid argument: ncclCommInitRank: rank 0 of 1, or an id that nobody has made",
    ]
    lines = done(1, "refused")
    assert len(lines) == len(wanted) and all(map(re.fullmatch, wanted, lines)), lines


def test_one_gpu_is_not_for_two():
    _, lines, _ = run(2, "duplicate", EMU_DEVICES=1)
    said = "invalid usage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0"
    assert sorted(lines) == [f"rank {r}: {said}" for r in (0, 1)]
    assert all(line.endswith("no error") for line in run(2, "duplicate")[1])


def test_a_communicator_is_left_at_once():
    assert done(2, "aborted") == ["left"]

"""The emulator's core (dev/emu: launches, threads that meet, memory, streams): what it must do and must refuse.

Each test of tests/emu_test.cu runs in a process of its own, in several orders of blocks, warps and threads, and as two
compilers make it of the same source."""
import ctypes
import faulthandler
import re
import subprocess

import pytest

from conftest import ROOT
from kernels import in_child, make

SOURCE = "tests/emu_test.cu"
COMPILERS = ("g++", "clang++")
SEEDS = (0, 1, 2, 3)
LAUNCH_FAILURE = r"cudaErrorLaunchFailure: "


def library(compiler):
    build = f"build/emu-core-{compiler}"
    options = ["DEVICE=emu", f"CXX={compiler}", f"BUILD={build}", f"cuda_sources={SOURCE}"]
    return str(make(f"{build}/libkernels.so", *options))


def line(text, nth=0):
    """The site of the nth line of the source that holds this text."""
    found = [i for i, l in enumerate((ROOT / SOURCE).read_text().splitlines(), 1) if text in l]
    return f"{SOURCE}:{found[nth]}"


def child(name, seed, skip, compiler):
    lib = ctypes.CDLL(library(compiler))
    lib.emu_set_seed(ctypes.c_uint32(seed))
    lib.emu_set_skip(skip.encode() if skip else None)
    lib.emu_test.restype = ctypes.c_char_p
    said = lib.emu_test(name.encode()).decode()
    sites = ctypes.create_string_buffer(1 << 16)
    lib.emu_sites(sites, ctypes.c_size_t(len(sites)), ctypes.c_bool(True))
    return said, sites.value.decode().splitlines()


def ask(name, seed=0, skip=None, compiler="g++"):
    """What a test of the source says, and the sites that it has passed."""
    library(compiler)
    kind, value = in_child(lambda: child(name, seed, skip, compiler))
    assert kind == "done", value
    return value


def numbers(*args, **kwargs):
    return [int(x) for x in ask(*args, **kwargs)[0].split()]


everywhere = pytest.mark.parametrize("how", [dict(seed=s) for s in SEEDS] + [dict(seed=1, compiler="clang++")], ids=str)


# ---- launches ------------------------------------------------------------------------------------------------------
@everywhere
def test_indices_and_arguments(how):
    assert numbers("indices", **how) == [2 * i + 10 + 2 - 7 for i in range(2520)]


def test_the_seed_orders_blocks_warps_and_lanes():
    orders = [numbers("order", seed=seed) for seed in SEEDS]
    assert orders[0] == [1000 * block + t for block in range(6) for _ in range(2) for t in range(80)]
    assert orders[1] == numbers("order", seed=1) == numbers("order", seed=1, compiler="clang++")
    for order in orders[1:]:
        assert sorted(order) == sorted(orders[0])
    blocks, warps, lanes = (lambda i: i // 1000), (lambda i: i % 1000 // 32), (lambda i: i % 1000 % 32)
    for what, from_, to in ((blocks, 0, 960), (warps, 0, 1), (warps, 0, 80), (warps, 80, 160), (lanes, 0, 16)):
        assert len({tuple(map(what, order[from_:to])) for order in orders}) > 1
    twice = in_child(lambda: [child("order", 1, None, "g++")[0] for _ in range(2)])  # a seed starts anew
    assert twice == ("done", [" ".join(map(str, orders[1]))] * 2)
    assert numbers("order", seed=0x10001) == orders[1]  # the upper half is for the errors of approximate instructions


def test_limits_of_a_launch():
    ok, bad = "cudaSuccess", "cudaErrorInvalidConfiguration"
    assert ask("launch_limits")[0].split() == [ok, bad, bad, bad, bad, bad, bad, ok, ok, bad, "fine"]
    small, much, asked, more, attribute = ask("shared_memory_limits")[0].split("; ")
    assert (small, asked, attribute) == ("fine", "fine", "yes no")
    assert "49153 bytes of shared memory, cudaFuncSetAttribute for 49152" in much
    assert "100001 bytes of shared memory, cudaFuncSetAttribute for 100000" in more


@pytest.mark.parametrize("compiler", COMPILERS)
def test_launch_bounds(compiler):
    said = ask("launch_bounds", compiler=compiler)[0].split("; ")[:-1]
    small, beyond = "fine", r"cudaErrorInvalidConfiguration: the launch of bounded_\w*kernel .* beyond its __launch_bounds__"
    wanted = [small, small, small, beyond, small, beyond, beyond, beyond]  # 65, 66, 96, 97 threads; bounds 96 and 65
    assert len(said) == 8 and all(re.match(w, s) for w, s in zip(wanted, said)), said


def test_shared_memory_of_cards():
    most = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
    said = ask("shared_memory_of_cards")[0].split("; ")[:-1]
    assert said == [f"{kb * 1024} asked runs refused fails" for kb in most.values()]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_launches_that_do_not_compile(compiler, tmp_path):
    def errors(parameters, arguments):
        source = tmp_path / "launch.cpp"
        source.write_text(f"""#include <cuda_runtime.h>
            struct Big {{ char bytes[4000]; }};
            static void k({parameters}) {{}}
            int main() {{ Big big; (void)big; k->*emu::Launch("k", 1, 1)({arguments}); }}""")
        command = [compiler, "-std=gnu++17", "-w", "-I.", "-Idev/emu/include", "-fsyntax-only", source]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr

    assert errors("int, float *, Big", "1, NULL, big") == ""
    for few_or_many in ("1", "1, NULL, 2"):
        assert "as many arguments as its kernel has parameters" in errors("int, float *", few_or_many)
    assert "4 KB at most" in errors("Big, double[13], Big", "big, NULL, big")
    assert "parameters are values" in errors("int &", "1")
    assert errors("int *", "big") != "" and errors("int *", "1") != ""


# ---- where threads meet --------------------------------------------------------------------------------------------
@everywhere
def test_barriers(how):
    assert numbers("barriers", **how) == [96 - i for i in range(96)] + [32 + 100] * 96


@everywhere
def test_shuffles_and_votes(how):
    got = numbers("shuffles", **how)
    lanes = range(64)
    x = [i * i for i in lanes]
    wrap = lambda u: u - (1 << 32) if u >> 31 else u  # printed as int
    halves = [0xFFFF if i % 32 < 16 else 0xFFFF0000 for i in lanes]
    warp = lambda i: range(i & ~31, (i & ~31) + 32)
    half = lambda i: [j for j in warp(i) if halves[i] >> (j % 32) & 1]
    want = [
        [x[(i & ~31) + 5] for i in lanes],
        [x[(i & ~7) + (i + 3) % 8] for i in lanes],
        [x[i - 3] if i % 16 >= 3 else x[i] for i in lanes],
        [x[i + 3] if i % 16 < 13 else x[i] for i in lanes],
        [x[i ^ 9] if (i ^ 9) // 8 <= i // 8 else x[i] for i in lanes],
        [x[i ^ 6] for i in lanes],
        [x[i ^ 1] if i % 32 < 16 else x[i + 2] if i % 16 < 14 else x[i] for i in lanes],
        [3 * x[(i & ~31) + 7] for i in lanes],
        [wrap(sum(1 << (j % 32) for j in half(i) if j % 5 == 0)) for i in lanes],
        [2 if i < 32 else 1 for i in lanes],
        [wrap(sum(1 << (j % 32) for j in warp(i) if j % 7 == i % 7)) for i in lanes],
        [-x[i & ~31] for i in lanes],
        [sum(x[j] for j in half(i)) for i in lanes],
    ]
    for k, numbers_ in enumerate(want):
        assert got[64 * k : 64 * k + 64] == numbers_, k


@everywhere
def test_a_warp_may_have_fewer_lanes(how):
    assert numbers("partial_warp", **how) == [i + (i ^ 1) for i in range(40)]


@everywhere
def test_atomics(how):
    integers, bits, wide, real = ask("atomics", **how)[0].split("; ")
    i, u = [int(x) for x in integers.split()], [int(x) for x in bits.split()]
    assert i == [20, -30, 4, -5] and u[:4] == [0x3FF, 0, 0 ^ 1 ^ 2 ^ 3 ^ 4 ^ 5 ^ 6 ^ 7 ^ 8 ^ 9, 7]
    assert 1 <= u[4] <= 10 and int(wide) == 10 << 40 and float(real) == 5


REFUSED = {
    "two_barriers": r"__syncthreads: other threads of the block wait at __syncthreads",
    "ended_before_barrier": r"ended while others wait for it at __syncthreads|\d+ threads of the block have ended",
    "warp_meets_in_two_places": r"mask ffffffff: lanes \w+ of the warp wait at __(shfl_sync|syncwarp)",
    "masks_overlap": r"deadlock|lanes \w+ of the warp wait at __syncwarp",
    "mask_lacks_itself": r"the mask fffffffe lacks the thread itself",
    "shuffle_from_outside": r"lane \d+ takes a value of lane 20, which takes no part",
    "half_meets_barrier": r"deadlock: .*: threads 0-0 at __syncthreads .*, 1-1 at __syncwarp .*, 2-63",
    "lane_alone": r"deadlock: these wait for others: threads 0-62 at __syncthreads .*, 63-63 at __shfl_sync",
    "ended_before_syncwarp": r"ended while others of its warp wait for it at __syncwarp|lanes \w+ .* have ended",
}


@everywhere
@pytest.mark.parametrize("name", REFUSED)
def test_threads_that_do_not_meet(name, how):
    said = ask(name, **how)[0]
    assert re.match(LAUNCH_FAILURE + r"divergent_kernel, block \(0,0,0\), thread \(\d+,0,0\): ", said)
    assert re.search(REFUSED[name], said) and re.search(rf"{SOURCE}:\d+", said), said


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_meet(seed):
    assert ask("nothing_divergent", seed)[0] == ask("a_warp_meets_alone", seed)[0] == "fine"


# ---- what is left out ----------------------------------------------------------------------------------------------
def test_a_skipped_barrier_shows():
    right = numbers("barriers")
    for site in (line("all have written"), line("all have read")):
        assert any(numbers("barriers", seed, skip=site) != right for seed in SEEDS), site
    assert numbers("barriers", skip=line("x[threadIdx.x] = threadIdx.x + 1")) == right  # no site


def test_a_skipped_guard_shows():
    assert ask("guards")[0] == "fine"
    said = ask("guards", skip=line("IN_RANGE"))[0]
    assert said == "cudaErrorLaunchFailure: written past the end of an allocation of 60 bytes by kernel guard_kernel"


@pytest.mark.parametrize("compiler", COMPILERS)
def test_sites_are_noted(compiler):
    assert ask("guards", compiler=compiler)[1] == [f"guard {line('IN_RANGE')} guard_kernel"]
    barriers = map(line, ("all have written", "all have read", "__syncthreads_count(", "__syncthreads_and("))
    assert ask("barriers", compiler=compiler)[1] == sorted(f"barrier {site} barrier_kernel" for site in barriers)
    assert f"barrier {line('a small warp')} partial_kernel" in ask("partial_warp", compiler=compiler)[1]


# ---- memory --------------------------------------------------------------------------------------------------------
@everywhere
def test_memory_is_poisoned(how):
    assert numbers("shared_memory_is_poisoned", **how) == [0xFFFFFFFF] * 3
    assert numbers("new_memory", **how) == [0, -1]


WRITES = {
    "write_past_the_end": r"written past the end of an allocation of 1000 bytes by kernel write_kernel",
    "write_far_past_the_end": r"write_kernel, .* access to 0x\w+, 1024 bytes past the start of an allocation of 1000",
    "write_before_the_start": r"written before the start of an allocation of 1000 bytes by kernel write_kernel",
    "write_to_null": r"write_kernel, .* access to \(nil\), which is no device memory",
    "write_to_freed": r"write_kernel, .* access to 0x\w+, which is no device memory",
    "first_of_two_faults": r"two_faults_kernel, .* access to 0xf+, which is no device memory",
    "misaligned": r"vector_kernel, .* access that is not aligned to its size",
    "stack_overflow": r"deep_kernel, .* the thread's stack overflows",
    "past_dynamic_shared_memory": r"smem_kernel wrote past the end of its 1000 bytes of dynamic shared memory",
}


@everywhere
@pytest.mark.parametrize("name", WRITES)
def test_writes_out_of_place(name, how):
    said = ask(name, **how)[0]
    if name in ("past_dynamic_shared_memory", "misaligned"):
        fine, said = said.split("; ")
        assert fine == "fine"  # the same in its place
    assert re.match(LAUNCH_FAILURE + WRITES[name], said), said


@everywhere
def test_an_error_stays_until_a_reset(how):
    null, state, divergent, threads = ask("reset", **how)[0].split("; ")
    assert "access to (nil)" in null and state == "sticky" and "__syncthreads" in divergent and threads == "1024"


@pytest.mark.parametrize("name", ("host_access", "host_access_to_new", "host_access_after_a_question"))
def test_the_host_may_not_look(name):
    library("g++")
    kind, said = in_child(lambda: (faulthandler.disable(), child(name, 0, None, "g++")))
    assert kind == "failed" and "ended with -11" in said and re.search(r"host access to device memory at 0x\w+\n", said)


def test_copies():
    assert ask("copies")[0].split() == ["yes"] * 3 + ["no"] * 9 + ["yes", "no", "3"]


# ---- streams and events --------------------------------------------------------------------------------------------
def test_streams_run_in_some_order():
    orders = [numbers("streams", seed) for seed in range(1, 21)]
    for order in orders:
        at = {what: i for i, what in enumerate(order)}
        assert sorted(order) == [10, 11, 12, 20, 21, 22, 30, 40, 41]
        assert at[10] < at[11] < at[30] < at[12] and at[20] < at[21] < at[30] < at[22] and at[40] < at[41]
    for a, b in ((10, 20), (11, 20), (12, 22), (40, 10), (41, 30)):  # free of each other
        assert len({order.index(a) < order.index(b) for order in orders}) == 2, (a, b)


def test_events_order_streams():
    orders = set()
    for seed in range(1, 11):
        before, after, order = ask("events", seed)[0].split("; ")
        assert (before, after) == ("not ready", "ready")
        order = tuple(int(x) for x in order.split())
        assert order.index(10) < order.index(11) < order.index(20) and order.index(11) < order.index(12)
        orders.add(order)
    assert len(orders) == 2


def test_a_copy_happens_in_its_turn():
    assert ask("deferred")[0] == "2"


def test_moods():
    """The extremes: the compute stream as early as events allow, the others as early as events allow."""
    assert numbers("moods", 1) == numbers("moods", 4) == [10, 11, 12, 13, 20, 21, 22]
    assert numbers("moods", 2) == numbers("moods", 5) == [20, 21, 10, 11, 22, 12, 13]
    assert len({tuple(numbers("moods", seed)) for seed in range(3, 31, 3)}) > 2


def test_a_missing_event_shows():
    right = 0x01010101
    assert [numbers("copied_in_order", seed) for seed in SEEDS] == [[right]] * len(SEEDS)
    assert numbers("copied_too_early", 2) == [0] == numbers("read_too_early", 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_are_turns(seed):
    questions, *order = numbers("questions", seed)
    assert sorted(order) == [10, 11, 20] and order.index(10) < order.index(11)
    assert 2 <= questions <= 4 if seed in (0, 3) else 150 < questions <= 210, questions

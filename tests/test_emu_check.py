"""Does the checked emulator see? Faults planted in tests/emu_faults.cu, and kernels whose traffic can be counted by hand."""
import ctypes
import json
import re

import pytest

from conftest import ROOT
from kernels import SEEDS, in_child, make

SOURCE = "tests/emu_faults.cu"
BUILD = "build/emu-fp32-faults"

# kernel: what the emulator must say, and about which lines, found in the source by what stands on them
FAULTS = {
    "barrier_missing": r"race: (read|write) of byte \d+ of the __shared__ array x|nothing has written",
    "barrier_too_late": r"race: (read|write) of byte \d+ of the __shared__ array x, .* with no barrier between",
    "syncwarp_missing": r"race: .*no __syncwarp or barrier between|nothing has written",
    "shuffle_for_syncwarp": r"race: .*no __syncwarp or barrier between",
    "half_of_a_warp": r"race: .*no __syncwarp or barrier between|nothing has written",
    "syncwarp_for_barrier": r"race: .*with no barrier between|nothing has written",
    "two_blocks_write_one_place": r"race: write of byte 0 of allocation \d+ .* write by another block's thread 0",
    "a_block_reads_what_another_writes": r"race: (read|write) of byte \d+ of allocation .* by another block's thread",
    "two_sums": r"race: (read|write) of byte \d+ of the __shared__ array shared",
    "first_reader_writes": r"race: .*no __syncwarp or barrier between",
    "first_of_two_warps_writes": r"race: .*with no barrier between",
    "memcpy_races": r"race: (read|write) of byte \d+ of the __shared__ array x|nothing has written",
    "long_memcpy_races": r"race: (read|write) of byte \d+ of the __shared__ array x|nothing has written",
    "half_words": r"race: write of byte \d+ of allocation \d+",
    "plain_beside_atomic": r"race: .*atomicAdd",
    "wait_missing": r"read of byte \d+ of the __shared__ array x while cp.async .* is writing it",
    "barrier_after_wait_missing": r"race: .*no (__syncwarp or )?barrier between|while cp.async|nothing has written",
    "wait_for_too_few": r"while cp.async of thread \d+, issued at tests/emu_faults.cu:\d+, is writing it",
    "buffer_refilled_too_early": r"race: .*cp.async|while cp.async",
    "read_past_the_end": r"read of 4 bytes at 0x\w+, 4 bytes past the end of allocation 2 of 4092 bytes",
    "write_past_the_end": r"write of 4 bytes at 0x\w+, 4 bytes past the end of allocation 1 of 4092 bytes",
    "vector_past_the_end": r"write of 16 bytes at 0x\w+, 4 bytes past the end of allocation 1 of 4092 bytes",
    "write_before_the_start": r"write of 4 bytes at 0x\w+, 4 bytes before the start of allocation 1",
    "past_dynamic_shared_memory": r"4 bytes past the end of the 256 bytes of dynamic shared memory",
    "memset_past_the_end": r"write of 16 bytes at 0x\w+, 4 bytes past the end of allocation 1 of 4092 bytes",
    "array_of_another_kernel": r"write of 4 bytes at 0x\w+, (\d+ bytes (past|before) the .* of the __shared__|which is no)",
    "misaligned": r"write of 16 bytes at 0x\w+8, which is not aligned to its size",
    "host_memory": r"read of 4 bytes at 0x\w+, which is no memory of the device",
    "freed_memory": r"in allocation 4 of 4092 bytes, which has been freed",
    "unwritten_shared": r"the __shared__ array x, which nothing has written",
    "unwritten_global": r"byte \d+ of allocation 3 of 4092 bytes, which nothing has written",
    "partly_written_vector": r"read of 16 bytes at byte 16 of allocation 3 of 4092 bytes, which nothing has written",
}


@pytest.fixture(scope="module")
def library():
    options = ["DEVICE=emu", "CHECKED=1", f"BUILD={BUILD}", f"cuda_sources={SOURCE}"]
    return str(make(f"{BUILD}/libkernels.so", *options))


def ask(library, function, *args, seeds=(0,), counters=False):
    """What a function of the faults' library says, in a process of its own, with the first of the seeds that makes it say
    something, and what was counted."""

    def child():
        lib = ctypes.CDLL(library)
        lib.emu_watch(True, True, counters)
        getattr(lib, function).restype = ctypes.c_char_p
        for seed in seeds:
            lib.emu_set_seed(ctypes.c_uint32(seed))
            said = getattr(lib, function)(*args)
            assert said is not None, f"{args}: no such kernel"
            if said:
                break
        lib.emu_counters.restype = ctypes.c_size_t
        text = ctypes.create_string_buffer(lib.emu_counters(None, 0, False))
        lib.emu_counters(text, len(text), False)
        return said.decode(), json.loads(text.value)

    kind, value = in_child(child, 60)
    assert kind == "done", value
    return value


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(library, name):
    lines = (ROOT / SOURCE).read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if f"void {name}(" in line)
    last = next(i for i in range(first, len(lines)) if lines[i - 1] == "}")
    for seed in (0, 1):
        said, _ = ask(library, "emu_fault", name.encode(), True, seeds=[seed])
        assert re.search(FAULTS[name], said), f"{name}, seed {seed}: {said!r}"
        assert "block (" in said and "thread (" in said, said
        places = [int(n) for n in re.findall(rf"{SOURCE}:(\d+)", said)]
        assert places and all(first < n < last for n in places), f"{name} is lines {first}-{last}: {said}"


@pytest.mark.parametrize("name", FAULTS)
def test_no_false_alarm(library, name):
    said, _ = ask(library, "emu_fault", name.encode(), False, seeds=(0, *SEEDS))
    assert said == "", f"{name}: {said}"


def counted(library, name):
    said, kernels = ask(library, "emu_counted", name.encode(), counters=True)
    assert said == "" and len(kernels) == 1, (said, kernels)
    return kernels[0]


# label: (requests' wavefronts without conflicts, extra ones)
WAVEFRONTS = {
    "words 1": (2, 0),  # a store and a load
    "words 2": (2, 2),
    "words 31": (2, 0),
    "words 32": (2, 62),
    "one word": (2, 0),  # all lanes read one word: no conflict
    "vectors": (8, 0),  # 16 bytes a lane: four quarters of a warp
    "matrices": (32 + 4, 4 * 7),  # 32 rows written; four phases of 8 rows, all in the same four banks
    "matrices, swizzled": (32 + 4, 0),
}


@pytest.mark.parametrize("name", WAVEFRONTS)
def test_bank_conflicts(library, name):
    kernel = counted(library, name)
    fewest, extra = WAVEFRONTS[name]
    assert (kernel["wavefronts"], kernel["extra_wavefronts"]) == (fewest + extra, extra), kernel


# label: sectors of 32 bytes of the load, and how few would do; the store of 128 bytes always takes 4
SECTORS = {"strided 1": (4, 4), "strided 2": (8, 4), "strided 8": (32, 4)}


@pytest.mark.parametrize("name", SECTORS)
def test_sectors(library, name):
    kernel = counted(library, name)
    sectors, ideal = SECTORS[name]
    assert (kernel["sectors"], kernel["ideal_sectors"]) == (sectors + 4, ideal + 4), kernel


def test_bytes_of_each_array(library):
    kernel = counted(library, "rows")
    tables = {a["number"]: {k: v for k, v in a.items() if k != "address"} for a in kernel["allocations"]}
    assert kernel["grid"] == [4, 1, 1] and kernel["block"] == [64, 1, 1] and kernel["launches"] == 1
    assert tables == {
        1: dict(number=1, size=4092, read=0, written=1024, unique_read=0, unique_written=1024),
        2: dict(number=2, size=4092, read=1024, written=0, unique_read=1024, unique_written=0),
        3: dict(number=3, size=4092, read=1024, written=0, unique_read=256, unique_written=0),
    }
    assert (kernel["global_read"], kernel["global_written"]) == (2048, 1024)
    assert kernel["in_16_bytes"] == 0 and kernel["barriers"] == 4 and kernel["sectors"] == kernel["ideal_sectors"] == 96
    assert kernel["shared_read"] == kernel["shared_written"] == kernel["atomics"] == 0


def test_bytes_moved_16_at_a_time(library):
    kernel = counted(library, "vectors")
    assert kernel["global_read"] == kernel["global_written"] == 512 and kernel["in_16_bytes"] == 1024
    assert kernel["shared_read"] == kernel["shared_written"] == 512
    assert kernel["sectors"] == kernel["ideal_sectors"] == 32


def test_meetings_are_counted_by_name(library):
    assert counted(library, "one word")["meets"] == {"__syncwarp": 1}
    assert counted(library, "matrices")["meets"] == {"__syncwarp": 1, "ldmatrix": 1}

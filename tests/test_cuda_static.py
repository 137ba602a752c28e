"""What can be known of the CUDA sources without running them: their text, and what nvcc makes of them."""
import difflib
import re
import shutil
import subprocess

import pytest

import kernel_table
from conftest import ROOT, make, run_program
from kernels import DEVICE, PRECISIONS, Kernels, declarations, isolated, prototypes
from test_faults import culprit

SOURCES = sorted((ROOT / "kernels").glob("*.cu"))
HEADERS = sorted((ROOT / "kernels").glob("*.cuh"))


def without_comments(path):
    """The text of a source; lines stay where they are."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(), flags=re.S)


def lines_of(paths):
    for path in paths:
        for number, line in enumerate(without_comments(path).splitlines(), 1):
            yield f"{path.name}:{number}", line


# ---- the text --------------------------------------------------------------------------------------------------------
def test_machine_instructions_stand_in_one_file():
    found = [where for where, line in lines_of(SOURCES + HEADERS) if re.search(r"\basm\b", line)]
    assert all(where.startswith("ptx.cuh:") for where in found), found


ASM = r"\basm( volatile)?\s*\(((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\((?:[^()]|\([^()]*\))*\))*)\)"
ORDERED = r"\b(ld|st|cp|ldmatrix|stmatrix|bar|barrier|mbarrier|fence|membar|atom|red|wgmma|prefetch|discard|griddepcontrol)\b"


def unordered(text):
    """The asm statements that touch memory or wait, and that the compiler might drop or move."""
    for volatile, body in re.findall(ASM, text):
        instruction = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', body))
        if re.search(ORDERED, instruction) and not (volatile and '"memory"' in body):
            yield instruction


def test_instructions_that_touch_memory_stay_where_they_stand():
    text = without_comments(ROOT / "kernels/ptx.cuh")
    assert len(re.findall(ASM, text)) == len(re.findall(r"\basm\b", text)), "an asm statement that this test cannot read"
    assert not list(unordered(text))
    # …and the test would see one that does not
    copies = re.findall(r"asm volatile\(\s*\"cp\.async", text)
    assert copies and list(unordered(text.replace("asm volatile(", "asm(")))
    assert list(unordered(text.replace(': "memory"', ":")))


LAUNCH = r"(?P<kernel>\w+)(?:<(?:[^<>\n]|<[^<>\n]*>)*>)?(?:\n *)?<<<.*>>>\("  # as dev/emu can read it


def launches_not_looked_after(text):
    """Kernels after whose launch no launched() comes; the branches of an if may share one."""
    waiting, branch = [], False
    for m in re.finditer(rf"{LAUNCH}|launched\(|\belse\b|^\}}", text, re.M):
        if m.group() == "else":
            branch = True
            continue
        if m.group() == "}" or (m["kernel"] and not branch):
            yield from waiting
        waiting = [*(waiting if branch else []), m["kernel"]] if m["kernel"] else []
        branch = False


def test_every_launch_is_looked_after():
    for path in SOURCES:
        text = without_comments(path)
        assert text.count("<<<") == text.count(">>>(") == len(re.findall(LAUNCH, text)), path.name
        assert not list(launches_not_looked_after(text)), path.name
        for launched in re.findall(r"launched\(.*?\);", text):
            assert list(launches_not_looked_after(text.replace(launched, ""))), f"{path.name}: {launched} goes unmissed"


def test_kernels_say_their_bounds():
    for where, line in lines_of(SOURCES + HEADERS):
        if "__global__" in line:
            assert re.search(r"static __global__ void __launch_bounds__\(.+\)", line), f"{where}: {line.strip()}"


# ---- the libraries -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_both_halves_are_whole(precision):
    ladder = re.findall(r"\w+", declarations("kernels/ladder.h"))
    cpu, device = Kernels("cpu", precision), Kernels(DEVICE, precision)
    assert len(prototypes()) > 40
    assert not [name for name in prototypes() if not device.has(name)]
    assert not [name for name in prototypes() if not cpu.has(name) and name not in ladder]


# ---- the compiler ------------------------------------------------------------------------------------------------------
def test_launch_bounds_are_kept(compiled):
    _, broken = compiled
    assert not broken, "\n".join(broken)


def test_table_is_what_nvcc_makes(compiled):
    lines, _ = compiled
    kept = kernel_table.TABLE.read_text()
    version = kernel_table.nvcc_version()
    if f"nvcc {version};" not in kept:
        pytest.skip(f"the table was made by another nvcc than {version}")
    changed = list(difflib.unified_diff(kept.splitlines(), kernel_table.text(lines).splitlines(), "checked in", "now", n=0))
    assert not changed, "\n".join([*changed, "renew it: python dev/kernel_table.py > tests/kernel_table.txt"])


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="a GPU here: dev/gpu_check.sh runs the program")
def test_cuda_builds_links_and_says_that_there_is_no_gpu(compiled):
    """With cuBLASLt and NCCL, every warning an error. The kernels are those that dev/kernel_table.py has compiled, but for one."""
    directory = {mpi: f"build/cuda-bf16-sm_90a{'' if mpi else '-nompi'}" for mpi in (1, 0)}
    for mpi in 1, 0:
        program = ROOT / directory[mpi] / "train"
        shutil.copytree(kernel_table.CACHE / "bf16", program.parent / "kernels", shutil.copy, dirs_exist_ok=True)
        (program.parent / "kernels/grad_norm.o").unlink()
        options = ["DEVICE=cuda", "PRECISION=bf16", f"MPI={mpi}", "CUDA_ARCH=-arch=sm_90a", f"BUILD={directory[mpi]}"]
        make(f"{directory[mpi]}/train", *options)
        needed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        assert "libcublasLt" in needed and ("libnccl" in needed) == ("libmpi" in needed) == bool(mpi), needed
        for ranks in (1, 2) if mpi else (1,):
            r = run_program(program, ["--steps", 2], ranks)
            assert r.code == 2, f"{r}"
            assert re.fullmatch("no GPU here .*; nearest: make DEVICE=cpu", culprit(r.stderr)), r.stderr
        assert run_program(program, ["--dry-run", "--model", "gpt2-124M"]).code == 0

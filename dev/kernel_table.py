#!/usr/bin/env python3
"""What nvcc makes of every CUDA kernel, without a GPU: python dev/kernel_table.py > tests/kernel_table.txt

Each kernels/*.cu is compiled once a precision for sm_80, sm_89 and sm_90a (spills, local memory and warnings are errors).
A row of the table is a kernel: what its __launch_bounds__ promise, what ptxas gave it, and what follows:

    warps      that run at once on a multiprocessor: what registers, shared memory and block slots leave room for
    tensor     instructions of the tensor cores in the machine code: a product that became something slower shows
    dynamic    shared memory asked for at the launch, and conflicts, wavefronts that bank conflicts cost beyond those that
               the bytes need: both as the emulator saw them, at the sizes of kernel_cases.SMALL (of a template's
               instance that does not run at these, what the other instances show)

The file is checked in, so that a change of a kernel shows what it costs; tests/test_cuda_static.py keeps it true.
"""
import argparse
import concurrent.futures
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "dev")]

import kernel_cases  # noqa: E402
import kernels as harness  # noqa: E402

CACHE = ROOT / "build/kernel_table"
TABLE = ROOT / "tests/kernel_table.txt"
ARCHS = ("80", "89", "90a")
FLAGS = "-I. -std=c++17 -O3 -t2 -Xptxas -v,-warn-spills,-warn-lmem-usage -Werror all-warnings -Xcompiler -fPIC,-Wall,-Wextra,-Werror"
FLAGS = [*FLAGS.split(), *(f"-gencode=arch=compute_{a},code=[sm_{a},compute_{a}]" for a in ARCHS[:2]),
         "-gencode=arch=compute_90a,code=sm_90a"]

# What a multiprocessor has: registers, bytes of shared memory in all and of one block, threads, blocks.
CARDS = {"80": (65536, 164 << 10, 163 << 10, 2048, 32), "89": (65536, 100 << 10, 99 << 10, 1536, 24),
         "90a": (65536, 228 << 10, 227 << 10, 2048, 32)}
RESERVED = 1 << 10  # bytes of shared memory that each block costs beyond its own

# Tensor-core instructions, by the lowest 12 bits of a machine instruction's 16 bytes.
HMMA, OPCODES = 0x23C, {0x23C: "HMMA", 0x27A: "QMMA"}
HMMA_BF16 = 1 << 82  # else fp16, as which Hopper multiplies fp8 numbers that come through mma.sync


def nvcc_version():
    nvcc = shutil.which("nvcc")
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    return found and found.group(1)


# ---- compiling one file ----------------------------------------------------------------------------------------------
def short(mangled):
    """_Z… → layernorm_forward_kernel<float, 4>"""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
    name = re.sub(r"^void |\((?:int|bool|\w+ \w+|\w+)\)(?=[\d-])", "", name)  # template arguments come with their types
    depth, end = 0, len(name)
    for i, c in enumerate(name):  # up to the parenthesis that opens the parameters
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            end = i
            break
    return name[:end].replace("__nv_bfloat16", "bf16").replace(" const", "")  # no blanks but after a comma


def tensor_instructions(cubin):
    """{mangled name: {"HMMA.BF16": n, …}}, from the sections .text.NAME of a cubin (an ELF file)."""
    data, counts = cubin.read_bytes(), {}
    table, size, n, names = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(n)]
    for name, _, _, _, start, length in sections:
        at = sections[names][4] + name
        name = data[at : data.index(b"\0", at)].decode()
        if not name.startswith(".text."):
            continue
        found = counts.setdefault(name[len(".text.") :], {})
        for i in range(start, start + length, 16):
            instruction = int.from_bytes(data[i : i + 16], "little")
            opcode = OPCODES.get(instruction & 0xFFF)
            if opcode:
                opcode += ".BF16" if instruction & 0xFFF == HMMA and instruction & HMMA_BF16 else ""
                found[opcode] = found.get(opcode, 0) + 1
    return counts


def parameter_bytes(head):
    """Of a kernel, from its PTX: .param .u64 NAME, or .param .align 8 .b8 NAME[96]"""
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?", head)
    return sum(int(bits) // 8 * int(n or 1) for bits, n in found)


def compiled(source, precision):
    """One file's kernels: {name: {"threads", "blocks", …, arch: {"registers", "shared", "tensor"}}}. Its object stays in CACHE."""
    with tempfile.TemporaryDirectory() as keep:
        flags = [*FLAGS, *(["-DPRECISION_BF16"] if precision == "bf16" else []), "--keep", "--keep-dir", keep]
        command = ["nvcc", *flags, "-c", str(source.relative_to(ROOT)), "-o", f"{keep}/out.o"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if made.returncode:
            said = re.sub(r"ptxas info.*\n(    .*\n)?", "", made.stdout + made.stderr)
            raise SystemExit(f"{' '.join(command)}\n{said}")
        kernels, mangled = {}, {}
        used = r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?Used (\d+) registers(.*?)\n"
        for name, arch, registers, rest in re.findall(used, made.stdout + made.stderr, re.S):
            mangled.setdefault(name, short(name))
            shared = re.search(r"(\d+) bytes smem", rest)
            kernels.setdefault(mangled[name], {})[arch] = {
                "registers": int(registers), "shared": int(shared.group(1)) if shared else 0}
        if len({*mangled.values()}) < len(mangled):
            raise SystemExit(f"{source.name}: two kernels have one name: {sorted(mangled.values())}")
        for arch in ARCHS:
            stem = f"{source.stem}.compute_{arch}"
            cubin = pathlib.Path(keep, f"{stem}.cubin" if arch == "90a" else f"{stem}.sm_{arch}.cubin")
            counts = tensor_instructions(cubin)
            for name in mangled:
                kernels[mangled[name]][arch]["tensor"] = counts[name]
            ptx = pathlib.Path(keep, f"{stem}.ptx").read_text()
            for name, head, body in re.findall(r"\.entry (\w+)\((.*?)\n\{(.*?)\n\}", ptx, re.S):
                threads, blocks = re.search(r"\.maxntid (\d+)", head), re.search(r"\.minnctapersm (\d+)", head)
                kernels[mangled[name]].update(
                    threads=int(threads.group(1)) if threads else None,
                    blocks=int(blocks.group(1)) if blocks else 1,
                    dynamic=bool(re.search(r"\bsmem\b", body)),
                    parameters=parameter_bytes(head),
                    float_atomics=re.findall(r"\b(?:atom|red)\.\S*\.(?:b?f16|f32|f64)\S*", body),
                )
        (CACHE / precision).mkdir(exist_ok=True)
        shutil.copy(f"{keep}/out.o", CACHE / precision / f"{source.stem}.o")
    return kernels


def cached(name, parts, make):
    """make(), remembered by the content of `parts` (texts and paths)."""
    content = [p.read_text() if isinstance(p, pathlib.Path) else p for p in (*parts, pathlib.Path(__file__))]
    path = CACHE / f"{name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.json"
    if not path.exists():
        made = json.dumps(make())
        for stale in CACHE.glob(f"{name}-*.json"):
            stale.unlink()
        path.write_text(made)
    return json.loads(path.read_text())


def headers():
    return [p for pattern in ("*.h", "*.cuh") for p in sorted((ROOT / "kernels").glob(pattern))]


# ---- what the emulator saw -----------------------------------------------------------------------------------------------
def watched(precision):
    """{kernel or template: [most dynamic shared memory, wavefronts, those of them that conflicts cost]}"""
    harness.library("emu", precision, checked=True)
    seen = {}
    for operation in kernel_cases.CASES:
        for name in harness.rungs(operation):
            for D in (64, 96, 128) if "attention" in name else (64,):
                sizes = dataclasses.replace(kernel_cases.SMALL, D=D)
                kind, got = harness.in_child(lambda: kernel_cases.count(name, precision, sizes))
                if kind != "done":
                    raise SystemExit(f"{name} {precision}: {got}")
                for c in got["kernels"]:
                    for kernel in {short(c["symbol"]), c["kernel"]}:
                        k = seen.setdefault(kernel, [0, 0, 0])
                        k[0] = max(k[0], c["dynamic_smem"])
                        k[1] += c["wavefronts"]
                        k[2] += c["extra_wavefronts"]
    return seen


# ---- what follows ------------------------------------------------------------------------------------------------------
def up(x, multiple):
    return -(-x // multiple) * multiple


def warps(kernel, arch, dynamic):
    """Warps of a multiprocessor that run at once; 0: a block does not fit there."""
    registers, memory, block, threads, blocks = CARDS[arch]
    used, shared = kernel[arch], kernel[arch]["shared"] + dynamic
    if shared > block:
        return 0
    of_block = up(kernel["threads"], 32) // 32
    of_registers = registers // up(used["registers"] * 32, 256) // of_block
    return of_block * min(of_registers, memory // up(shared + RESERVED, 128), threads // kernel["threads"], blocks)


def broken_promises(name, kernel, dynamic):
    """What a kernel may not do, and what of its __launch_bounds__(threads, blocks) cannot be kept: registers on any card, shared
    memory on the largest."""
    if kernel["threads"] is None:
        yield f"{name}: no __launch_bounds__"
        return
    if kernel["parameters"] > 4096:
        yield f"{name}: {kernel['parameters']} bytes of parameters, of 4,096"
    if kernel["float_atomics"]:
        yield f"{name}: sums whose order no one knows: {', '.join(kernel['float_atomics'])}"
    for arch in ARCHS:
        registers = up(kernel[arch]["registers"], 8) * kernel["threads"] * kernel["blocks"]
        if registers > 65536:
            yield f"{name}, sm_{arch}: {registers} registers in {kernel['blocks']} blocks, of 65,536"
    shared = (max(kernel[a]["shared"] for a in ARCHS) + dynamic) * kernel["blocks"]
    if shared > 227 << 10:
        yield f"{name}: {shared} bytes of shared memory in {kernel['blocks']} blocks, of 227 KB"


def each(values):
    """80/89/90a, or one where all are the same."""
    return values[0] if len(set(values)) == 1 else "/".join(values)


def all_compiled(only=None):
    """{(source, precision): its kernels}; minutes, the first time, and who asks meanwhile waits."""
    sources = [s for s in sorted((ROOT / "kernels").glob("*.cu")) if not only or s.stem in only]
    version = nvcc_version()
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock, concurrent.futures.ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = {(s, p): pool.submit(cached, f"{s.stem}-{p}", [version, s, p, *headers()], lambda s=s, p=p: compiled(s, p))
                for s in sources for p in harness.PRECISIONS}
        return {job: kernels.result() for job, kernels in made.items()}


def rows(only=None):
    """(rows as lists of words, broken promises)"""
    made = all_compiled(only)
    everything = [*headers(), *sorted((ROOT / "kernels").glob("*.cu")), *sorted((ROOT / "dev/emu").glob("**/*.[ch]*"))]
    everything += [ROOT / "dev/kernel_cases.py", ROOT / "tests/kernels.py"]
    seen = {p: cached(f"watched-{p}", everything, lambda: watched(p)) for p in harness.PRECISIONS}
    lines, broken = [], []
    for (source, precision), kernels in made.items():
        for name, k in sorted(kernels.items()):
            unseen = seen[precision].get(name.split("<")[0], [None, 0, 0])
            dynamic, wavefronts, extra = seen[precision].get(name, unseen)
            if k["dynamic"] and dynamic is None:
                broken.append(f"{source.name} {precision} {name}: no case of dev/kernel_cases.py runs it")
            dynamic = dynamic if k["dynamic"] and dynamic else 0
            broken += broken_promises(f"{source.name} {precision} {name}", k, dynamic)
            tensor = [" ".join(f"{n}·{op}" for op, n in sorted(k[a]["tensor"].items())) or "-" for a in ARCHS]
            lines.append([source.name, precision, name.replace(", ", ","), f"{k['threads']}×{k['blocks']}",
                          each([str(k[a]["registers"]) for a in ARCHS]), each([str(k[a]["shared"]) for a in ARCHS]),
                          str(dynamic) if k["dynamic"] else "-", each([str(warps(k, a, dynamic)) for a in ARCHS]),
                          f"{extra / wavefronts:.1%}" if wavefronts else "-", each(tensor)])
    return lines, broken


COLUMNS = ("file", "precision", "kernel", "threads×blocks", "registers", "shared", "dynamic", "warps", "conflicts", "tensor")
HEAD = """# nvcc {version}; sm_80/sm_89/sm_90a, or one number where they agree. Made by: python dev/kernel_table.py > tests/kernel_table.txt
# threads×blocks: __launch_bounds__; registers a thread; shared memory a block in bytes, declared and dynamic (at
# kernel_cases.SMALL: longer rows take more); warps that run at once on a multiprocessor; conflicts: extra wavefronts of
# shared memory; tensor: instructions.
"""


def text(lines):
    table = [COLUMNS, *lines]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    body = "".join("  ".join(w.ljust(n) for w, n in zip(row, widths)).rstrip() + "\n" for row in table)
    return HEAD.format(version=nvcc_version()) + body


def main():
    parser = argparse.ArgumentParser(description="What nvcc makes of every CUDA kernel.")
    parser.add_argument("file", nargs="*", help="names of files of kernels/ without .cu (all)")
    parser.add_argument("--compile", action="store_true", help="no table yet: only what takes so long, for the next run")
    args = parser.parse_args()
    if args.compile:
        all_compiled(args.file)
        return
    lines, broken = rows(args.file)
    print(text(lines), end="")
    sys.exit("\n".join(broken) or None)


if __name__ == "__main__":
    main()

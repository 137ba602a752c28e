"""What the CUDA kernels of one file move and do, counted by the checked emulator (make emu-kernel K=layernorm).

The columns are those of dev/emu/README.md, "Reading the counts".

Every function of kernels/K.cu (but rope_table) runs once at a size that is named, and the earlier rungs of its ladder. Under a
kernel stands what it does with each array (a/b/c where several lie in one allocation). The line of the function holds all that
its kernels move against what the operation must. The device is an sm_90; what cuBLASLt does there is not counted.
"""
import os
import pathlib
import re
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "dev")]

import kernel_cases  # noqa: E402
from kernel_table import short  # noqa: E402
from kernels import Fp8Matrix, Kernels, library, prototypes  # noqa: E402

ROWS = kernel_cases.Sizes(B=2, T=1024, C=768, H=4, KV=2, D=64, F=1024, V=5003, Vp=5120, n=1 << 20)
PRODUCTS = kernel_cases.SMALL  # whose naive rungs do N·C·F multiplications, one emulated load each
HEAD = ("kernel", "grid × block", "smem", "read", "written", "×once", "16 B", "sectors", "conflicts", "barriers", "meets",
        "mma", "registers")  # fmt: skip


# ---- names ---------------------------------------------------------------------------------------------------------
def functions(file):
    """What kernels/FILE.cu defines of the operations that kernel_cases can call, and of their ladders."""
    text, ladder = ((ROOT / "kernels" / name).read_text() for name in (f"{file}.cu", "ladder.h"))
    defined = [name for name in prototypes() if re.search(rf"\bvoid {name}\(", text)]
    return sorted(n for n in defined if n in kernel_cases.CASES or re.search(rf"\b{n}\b", ladder))


def parameters(function):
    """The names that the header gives to a function's parameters."""
    text = "".join((ROOT / "kernels" / header).read_text() for header in ("kernels.h", "ladder.h"))
    text = re.sub(r"//.*|/\*.*?\*/", "", text)
    found = re.search(rf"\b{function}\(([^)]*)\);", text)
    if not found:  # declared by a type: NormForward layernorm_forward, …
        shape = re.search(rf"^(\w+) (?:\w+,\s*)*{function}\b", text, flags=re.M)[1]
        found = re.search(rf"typedef void {shape}\(([^)]*)\);", text)
    return [p.split()[-1].lstrip("*") for p in found[1].split(",")]


def pointers(function, args):
    """{address: name} of the arrays that a function is given."""
    found = {}
    for name, value in zip(parameters(function), args):
        if isinstance(value, Fp8Matrix):
            found.update({value.q: name, value.scale: f"{name}.scale"})
        elif isinstance(value, int):
            found.setdefault(value, name)
    return found


def registers(file, precision):
    """{kernel: registers on sm_90a}, of the table that dev/kernel_table.py made, without blanks in its names."""
    table = ROOT / "tests/kernel_table.txt"
    rows = [re.split(r" {2,}", line) for line in table.read_text().splitlines()] if table.exists() else []
    rows = [row for row in rows if len(row) > 4 and row[:2] == [f"{file}.cu", precision]]
    return {row[2]: row[4].split("/")[-1] for row in rows}


# ---- the table -----------------------------------------------------------------------------------------------------
def percent(part, whole, digits=0):
    return f"{100 * part / whole:.{digits}f} %" if whole else "-"


def product(dims):
    return "·".join(str(n) for n in dims if n > 1) or "1"


def cells(kernel, registers):
    moved = kernel["global_read"] + kernel["global_written"]
    once = sum(a["unique_read"] + a["unique_written"] for a in kernel["allocations"])
    meets = sum(n for what, n in kernel["meets"].items() if not what.startswith(("mma", "ldmatrix", "__syncwarp")))
    name = short(kernel["symbol"]).replace(", ", ",")
    return (
        name, f"{product(kernel['grid'])} × {product(kernel['block'])}", f"{kernel['dynamic_smem']:,}",
        f"{kernel['global_read']:,}", f"{kernel['global_written']:,}", f"{moved / once:.3f}",
        percent(kernel["in_16_bytes"], moved), percent(kernel["ideal_sectors"], kernel["sectors"]),
        percent(kernel["extra_wavefronts"], kernel["wavefronts"], 1), f"{kernel['barriers']:,}", f"{meets:,}",
        ", ".join(f"{n:,} {shape}" for shape, n in kernel["mma"].items()) or "-", registers.get(name, "-"),
    )  # fmt: skip


def arrays(kernel, names):
    for a in kernel["allocations"]:
        inside = [n for at, n in names.items() if a["address"] <= at < a["address"] + a["size"]]
        for verb in ("read", "written"):
            if a[verb]:
                times, once = a[verb] / a["unique_" + verb], a["unique_" + verb]
                yield f"{'/'.join(inside) or 'array %d' % a['number']} {verb} {times:.2f} × {once:,}"


def report(file, precision):
    sizes = PRODUCTS if file in ("matmul", "fp8_gemm", "flash_attention", "naive_attention") else ROWS
    rows, of_ptxas = [], registers(file, precision)
    building = threading.Timer(2, print, ["building the checked emulator"], {"file": sys.stderr})
    building.start()
    try:
        library("emu", precision, checked=True)
    finally:
        building.cancel()
    with Kernels("emu", precision, checked=True) as k:
        k.watch(races=True, uninitialised=True, counters=True)
        for name in functions(file):
            case, made = kernel_cases.made(name, k, sizes)
            k.counters()
            k.call(name, *case.args)
            kernels, names = k.counters(), pointers(name, case.args)
            made.free()
            moved = sum(kernel["global_read"] + kernel["global_written"] for kernel in kernels)
            share = f"{moved:,} bytes, {moved / case.moved:.3f} of what must be"
            rows.append((f"{name}: {share if kernels else 'all by cuBLASLt, uncounted'}", []))
            for kernel in kernels:
                rows[-1][1].append((cells(kernel, of_ptxas), "; ".join(arrays(kernel, names))))
    widths = [max(map(len, column)) for column in zip(HEAD, *(c for _, lines in rows for c, _ in lines))]

    def show(row):
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))

    print(f"kernels/{file}.cu, {precision}, on an sm_90, at {sizes}\n\n{show(HEAD)}")
    for title, lines in rows:
        print(f"\n{title}")
        for row, about in lines:
            print(f"{show(row)}\n    {about}")


if __name__ == "__main__":
    file = sys.argv[1] if len(sys.argv) > 1 else ""
    known = sorted(p.stem for p in (ROOT / "kernels").glob("*.cu"))
    if file not in known:
        sys.exit(f"make emu-kernel K=…, with one of: {' '.join(known)}")
    report(file, os.environ.get("PRECISION", "bf16"))

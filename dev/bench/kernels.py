#!/usr/bin/env python3
"""Every CUDA kernel and every rung of its ladder: how near to what the machine can do?

    KERNEL_DEVICE=cuda build/venv/bin/python dev/bench/kernels.py [NAME…]   on a GPU: time, and the share of the ceilings
    build/venv/bin/python dev/bench/kernels.py [NAME…]                      on the emulator: what moves and is done, no time

(after dev/deps.sh test; any other python3 with numpy and pytest will do). NAME is an operation, how one begins, or a file
of kernels/.

Each is held against the ceiling that binds it: a copy within the device's memory, or cuBLASLt's bf16 product of 8192³ (fp8
may pass it, fp32 cannot reach it). Sizes are those of GPT-2 124M, on so many tokens that a call lasts long beside its launch
(cross_entropy_rescale and fp8_quantize_blocks have little to do at any size); flash attention also runs with 16 heads of 128
channels over 8,192 tokens. Calls go round over copies of the arguments that together are far larger than the L2 cache, so that
nothing is found there that a training step would not find. A figure is the median of a few runs, each long enough for the
clock; both ceilings are measured before and after.
"""
import argparse
import ctypes
import mmap
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "dev"), str(ROOT / "dev/emu")]


def nothing(why):
    print(f"kernels.py: {why}: nothing was measured", file=sys.stderr)
    sys.exit(2)


try:
    import kernel_cases
    from kernel_cases import SMALL, Arrays, Sizes, count, made
    from kernel_report import functions
    from kernels import DEVICE, PRECISIONS, Kernels, in_child, library, rungs
except ModuleNotFoundError as missing:
    nothing(f"no {missing.name} here (build/venv/bin/python dev/bench/kernels.py has it, after dev/deps.sh test)")

RUNS, RUN_SECONDS = 5, 0.02  # a figure is the median of so many, each about so long or 200 calls
GPT2 = {"16k tokens": Sizes(), "65k tokens": Sizes(B=32)}
LONG = {"8k·128 causal": Sizes(B=1, T=8192, H=16, KV=16, D=128), "8k·128": Sizes(B=1, T=8192, H=16, KV=16, D=128, causal=False)}
BEYOND_L2 = 400e6  # bytes that calls in turn touch, several times the L2 of any GPU


# ---- time ------------------------------------------------------------------------------------------------------------
class Clock:
    """Seconds of the device between two events."""

    def __init__(self, k):
        self.lib = k.lib
        self.stream = ctypes.c_void_p.in_dll(k.lib, "compute_stream")
        self.k, self.events = k, [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in self.events:
            k._ok(self.lib.cudaEventCreate(ctypes.byref(event)))

    def seconds(self, calls):
        ms = ctypes.c_float()
        self.k._ok(self.lib.cudaEventRecord(self.events[0], self.stream))
        for call in calls:
            call()
        self.k._ok(self.lib.cudaEventRecord(self.events[1], self.stream))
        self.k._ok(self.lib.cudaEventSynchronize(self.events[1]))
        self.k.synchronize()
        self.k._ok(self.lib.cudaEventElapsedTime(ctypes.byref(ms), *self.events))
        return ms.value / 1e3

    def median(self, calls):
        """Seconds of one call; `calls` do the same on different arrays, in turn."""
        for call in calls:
            call()
        once = self.seconds(calls) / len(calls)
        n = max(1, min(200, round(RUN_SECONDS / once)))
        return statistics.median(self.seconds([calls[i % len(calls)] for i in range(n)]) / n for _ in range(RUNS))


def copy_ceiling(k, clock):
    """Bytes a second, read and written, of a copy within the device's memory."""
    arrays, size = Arrays(k), 1 << 30
    to, from_ = arrays.f32(size // 4), arrays.f32(size // 4)
    copy = k.lib.cudaMemcpyAsync
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    seconds = clock.median([lambda: k._ok(copy(to, from_, size, 3, clock.stream))])
    arrays.free()
    return 2 * size / seconds


def product_ceiling(clock, bf16):
    """Operations a second of cuBLASLt's product of bf16 matrices."""
    n, arrays = 8192, Arrays(bf16)
    args = [arrays.floatX(n * n), arrays.floatX(n * n), arrays.floatX(n * n), None, n, n, n]
    call = bf16.prepared("matmul_forward", *args, arrays.workspace("matmul", n, n, n))
    seconds = clock.median([call])
    arrays.free()
    return 2.0 * n**3 / seconds


def ceilings():
    """(bytes a second, operations a second), in a process of its own"""
    with Kernels("cuda", "bf16") as k:
        clock = Clock(k)
        return copy_ceiling(k, clock), product_ceiling(clock, k)


def measure(name, precision, sizes):
    """(seconds, bytes moved, operations) of one call"""
    with Kernels("cuda", precision) as k:
        made_ = [made(name, k, sizes)]
        case = made_[0][0]
        made_ += [made(name, k, sizes) for _ in range(min(16, round(BEYOND_L2 / case.moved)) - 1)]
        seconds = Clock(k).median([k.prepared(name, *c.args) for c, _ in made_])
        for _, arrays in made_:
            arrays.free()
        return seconds, case.moved, case.flops


def sizes_of(name):
    """{what it is called: size}"""
    tokens = "16k tokens" if name.startswith(("cross_entropy", "naive_attention")) else "65k tokens"  # some gigabytes
    return {tokens: GPT2[tokens], **(LONG if name.startswith("flash_attention") else {})}


def measure_all(jobs, copy, product, at):
    """One row a job, printed as soon as it is known; at[0:8] says which is under way."""
    for i in range(int.from_bytes(at[:8], "little"), len(jobs)):
        at[:8] = i.to_bytes(8, "little")
        name, precision, label = jobs[i]
        seconds, moved, flops = measure(name, precision, sizes_of(name)[label])
        share = max(moved / copy, flops / product) / seconds  # of the ceiling that binds it
        rate = f"{flops / seconds / 1e12:8.1f}" if flops else " " * 8
        figures = f"{seconds * 1e6:10.1f} {moved / seconds / 1e9:7.0f} {rate}  {share:5.0%}"
        print(f"{name:40} {precision} {label:13} {figures}", flush=True)


def on_gpu(names, precisions):
    """False where a kernel failed; those after it are measured by a new process."""
    kind, before = in_child(ceilings)
    if kind != "done":
        print(f"the ceilings: {before}")
        return False
    copy, product = before
    print(f"device copy {copy / 1e9:,.0f} GB/s, cuBLASLt bf16 {product / 1e12:,.0f} TFLOP/s")
    print(f"{'operation':40} {'':4} {'':13} {'µs':>10} {'GB/s':>7} {'TFLOP/s':>8}  share", flush=True)
    jobs, at, well = [(name, p, s) for p in precisions for name in names for s in sizes_of(name)], mmap.mmap(-1, 8), True
    while True:
        kind, got = in_child(lambda: measure_all(jobs, copy, product, at), 600)
        if kind == "done":
            break
        i, well = int.from_bytes(at[:8], "little"), False
        print(f"{jobs[i][0]:40} {jobs[i][1]} {jobs[i][2]:13} {got.strip().splitlines()[-1]}", flush=True)
        at[:8] = (i + 1).to_bytes(8, "little")
    kind, after = in_child(ceilings)
    if kind == "done":
        print(f"the ceilings afterwards: {after[0] / copy:.0%} and {after[1] / product:.0%} of that")
    return well and kind == "done"


# ---- counts ------------------------------------------------------------------------------------------------------------
def on_emulator(names, precisions, sizes):
    """One row a kernel that a call starts; the first says what the call has to move at least, and its scratch memory."""
    well = True
    print(f"{'operation':37} {'':4} {'least':>11} {'scratch':>11}  {'kernel':32} {'read':>11} {'written':>11}  16 B  sectors  conflicts")
    for precision in precisions:
        for name in names:
            kind, got = in_child(lambda: count(name, precision, sizes), 120)
            if kind != "done":
                well = False
                print(f"{name:37} {precision} {got.strip().splitlines()[-1]}", flush=True)
                continue
            call = f"{name:37} {precision} {got['moved']:11,} {got['scratch']:11,}"
            for c in got["kernels"]:
                bytes_, kernel = c["global_read"] + c["global_written"], f"{c['launches']}·{c['kernel']}"
                print(f"{call:66}  {kernel:32} {c['global_read']:11,} {c['global_written']:11,}",
                      f" {c['in_16_bytes'] / max(bytes_, 1):4.0%}  {c['ideal_sectors'] / max(c['sectors'], 1):7.0%}",
                      f" {c['extra_wavefronts'] / max(c['wavefronts'], 1):8.1%}",
                      "".join(f"  {n:,}·{shape}" for shape, n in c["mma"].items()), flush=True)
                call = ""
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="operations, or files of kernels/ without .cu (all)")
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="(both)")
    args = parser.parse_args()
    files = [name for name in args.name if (ROOT / f"kernels/{name}.cu").exists()]
    chosen = tuple(args.name + [f for name in files for f in functions(name)])
    operations = [n for n in kernel_cases.CASES if not chosen or n.startswith(chosen)]
    if not operations:
        sys.exit(f"none of {', '.join(kernel_cases.CASES)} begins with {' or '.join(args.name)}")
    if DEVICE == "cuda" and not subprocess.getoutput("nvidia-smi -L").startswith("GPU"):
        nothing("no GPU here (nvidia-smi -L names none)")
    names = [rung for operation in operations for rung in rungs(operation)]
    precisions, start = args.precision or ["bf16", "fp32"], time.monotonic()
    for precision in {*precisions, "bf16"}:
        library(DEVICE, precision, checked=DEVICE == "emu")
    well = on_gpu(names, precisions) if DEVICE == "cuda" else on_emulator(names, precisions, SMALL)
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Lab 6: what a kernel asks of memory (dev/labs/6_kernels.md).

    python3 dev/labs/6_kernels.py
"""
import os
import subprocess
import sys

import lab

# Rungs, slow to fast (kernels/ladder.h). fp8_gemm itself is not among them: there cuBLASLt multiplies, uncounted.
LADDERS = {
    "layernorm_forward": ["layernorm_forward_naive", "layernorm_forward_warp", "layernorm_forward"],
    "fp8_gemm": ["fp8_gemm_naive", "fp8_gemm_mma"],
    "adamw_update": ["adamw_update_naive", "adamw_update"],
}
RUNGS = [rung for rungs in LADDERS.values() for rung in rungs]
X = 2  # bytes of a bf16 number
TILE, SECTOR = 128, 32
BANDWIDTH, FLOPS = 3350, 989e12  # an H100 SXM: GB/s of its memory, operations a second of dense bf16 products
PRECISION = "bf16"


# ---- predictions ------------------------------------------------------------------------------------------------------
def must(operation, s):
    """Bytes: every operand once."""
    return {
        "layernorm_forward": 4 * s.N * s.C * X + 2 * s.C * X + 8 * s.N,  # inp, residual, sum, out; weight, bias; statistics
        "fp8_gemm": (s.N + s.F) * s.C + s.N * s.F * X,
        "adamw_update": 28 * s.n,  # weight, master, m and v read and written, the gradient read
    }[operation]


def asked(rung, s):
    """Bytes that all threads together load and store, as one would count in the source."""
    M, K, N = s.N, s.C, s.F
    return {
        # a row: inp, residual; sum written and read 4 times; out; weight, bias
        "layernorm_forward_naive": 10 * s.N * s.C * X + 8 * s.N,
        "layernorm_forward_warp": 10 * s.N * s.C * X + 8 * s.N,
        # inp, residual, sum, out once; weight and bias for each block of 8 rows, at most 4 · 128 blocks
        "layernorm_forward": 4 * s.N * s.C * X + 8 * s.N + min(s.N // 8, 512) * 2 * s.C * X,
        # an element of the result: K of a row and of a column, two scales a tile, a bias; and itself
        "fp8_gemm_naive": M * N * (2 * K + 8 * K // TILE + 2 * X),
        # 128 × 128 elements: a tile of each side for each 128 of K, and the scales of these
        "fp8_gemm_mma": M // TILE * (N // TILE) * (K // TILE) * 2 * (TILE * TILE + 4 * TILE) + M * N * 2 * X,
        "adamw_update_naive": 28 * s.n,
        "adamw_update": 28 * s.n,
    }[rung]


def operation_of(rung):
    return next(operation for operation, rungs in LADDERS.items() if rung in rungs)


# ---- counts -----------------------------------------------------------------------------------------------------------
def tools():
    """The harness of the kernels' tests, which runs them on the emulator."""
    sys.path[:0] = [str(lab.ROOT / "tests"), str(lab.ROOT / "dev")]
    try:
        import kernel_cases
        import kernels
    except ModuleNotFoundError as missing:
        lab.go_where_it_is(missing.name)
        lab.stop(f"no {missing.name} here; dev/deps.sh emu says what the emulator takes")
    directory = f"build/emu-{PRECISION}-checked"
    if not (lab.ROOT / directory / "libkernels.so").exists():
        print(f"\nbuilding the emulator that watches every access ({directory}): some minutes")
    try:
        kernels.library("emu", PRECISION, checked=True)
    except AssertionError as failed:
        lab.stop(str(failed))
    return kernel_cases, kernels


def sizes(cases, operation, quick):
    """Small, for the emulator; multiples of a tile."""
    if operation == "fp8_gemm":
        return cases.Sizes(B=1, T=TILE, C=2 * TILE, F=2 * TILE)
    return cases.Sizes(B=2, T=128 if quick else 512, C=768, n=1 << 18)


def count(cases, kernels, a):
    """{rung: counts}, each of one call"""
    counts, rows = {}, []
    for rung in RUNGS:
        s = sizes(cases, operation_of(rung), a.quick)
        kind, got = kernels.in_child(lambda: cases.count(rung, PRECISION, s), 120)
        if kind != "done":
            lab.stop(f"{rung}: {got}")

        def total(name):
            return sum(kernel[name] for kernel in got["kernels"])

        c = counts[rung] = {"must": got["moved"], "asked": total("global_read") + total("global_written"),
                            "sectors": SECTOR * total("sectors")}  # fmt: skip
        mma = sum(n for kernel in got["kernels"] for n in kernel["mma"].values())
        rows.append([rung, lab.mb(c["must"]), lab.mb(asked(rung, s)), lab.mb(c["asked"]), f"{c['asked'] / c['must']:.2f}",
                     f"{total('in_16_bytes') / c['asked']:.0%}", lab.mb(c["sectors"]), total("wavefronts"),
                     total("extra_wavefronts"), total("barriers"), mma])  # fmt: skip
    print("\none call on the emulator, bf16, MB; sectors: what comes if no cache keeps anything, in pieces of 32 bytes")
    lab.table(["rung", "must", "asked, predicted", "asked", "of must", "16 B", "sectors", "wavefronts", "conflicts",
               "barriers", "mma"], rows)  # fmt: skip
    return counts


# ---- time -------------------------------------------------------------------------------------------------------------
def has_gpu():
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.startswith("GPU")
    except OSError:
        return False


def microseconds(text):
    """{rung: µs}, of what dev/bench/kernels.py prints."""
    lines = [line.split() for line in text.splitlines()]
    return {w[0]: float(w[4]) for w in lines if len(w) > 5 and w[0] in RUNGS and w[2:4] == ["65k", "tokens"]}


def measure():
    python = lab.ROOT / "build/venv/bin/python"
    python = python if python.exists() else sys.executable
    os.environ["KERNEL_DEVICE"] = "cuda"
    bench = [python, lab.ROOT / "dev/bench/kernels.py", *LADDERS, "--precision", PRECISION]
    return microseconds(lab.execute(bench))


def times(cases, a, counts):
    """At the size that dev/bench/kernels.py times: all bytes by formula, sectors as many to a byte as counted."""
    large, rows = cases.Sizes(B=32), []  # GPT-2 124M, 65,536 tokens
    bandwidth = 1e9 * (a.bandwidth or BANDWIDTH)
    gpu = has_gpu()
    took = measure() if gpu and not a.quick else {}
    for rung in RUNGS:
        c, operation = counts[rung], operation_of(rung)
        bytes_ = must(operation, large), asked(rung, large), asked(rung, large) * c["sectors"] / c["asked"]
        products = f"{1e6 * 2.0 * large.N * large.C * large.F / FLOPS:.0f}" if operation == "fp8_gemm" else "-"
        row = [rung, *(f"{1e6 * n / bandwidth:.0f}" for n in bytes_), products]
        rows.append([*row, f"{took[rung]:.0f}" if rung in took else "-"])
    print(f"\nµs of a call at GPT-2 124M's size, 65,536 tokens, at {bandwidth / 1e9:,.0f} GB/s, if its time is that of")
    lab.table(["rung", "what must move", "what is asked", "sectors", "bf16 products", "measured"], rows)
    if not took:
        print("\n(nothing measured: " + ("--quick)" if gpu else "nvidia-smi finds no GPU here)"))


# ---- leaving something out ----------------------------------------------------------------------------------------------
def call(cases, kernels, rung, site):
    """One call, watched, with the barrier (or wait …) at this site left out → the sites that it passed."""
    import ctypes

    def child():
        with kernels.Kernels("emu", PRECISION, checked=True) as k:
            case, _ = cases.made(rung, k, sizes(cases, operation_of(rung), True))
            k.lib.emu_set_skip(site and site.encode())
            k.call(rung, *case.args)
            k.lib.emu_sites.restype = ctypes.c_size_t
            text = ctypes.create_string_buffer(k.lib.emu_sites(None, 0, False))
            k.lib.emu_sites(text, len(text), False)
        return [line.split()[:2] for line in text.value.decode().splitlines()]

    kind, value = kernels.in_child(child, 60)
    return value if kind == "done" else value.strip().splitlines()[-1].removeprefix("AssertionError: ")


def leave_out(cases, kernels, rung, site):
    said = call(cases, kernels, rung, site)
    file, line = site.rsplit(":", 1)
    source = (lab.ROOT / file).read_text().splitlines()[int(line) - 1].strip()
    print(f"\n{rung} without {site}  {source}\n    {said if isinstance(said, str) else '(nothing is said)'}")


def break_it(cases, kernels):
    """Every barrier and wait of the last rungs."""
    for rung in ("layernorm_forward", "fp8_gemm_mma"):
        for kind, site in call(cases, kernels, rung, None):
            if kind in ("barrier", "wait"):
                leave_out(cases, kernels, rung, site)


def break_there(cases, kernels, site):
    """The rungs that pass this site."""
    passing = [rung for rung in RUNGS if site in [place for _, place in call(cases, kernels, rung, None)]]
    for rung in passing:
        leave_out(cases, kernels, rung, site)
    if not passing:
        lab.stop(f"EMU_SKIP={site}: nothing that these kernels wait for or guard stands there ({', '.join(RUNGS)})")


# ---- the picture ------------------------------------------------------------------------------------------------------
def draw(plt, counts):
    figure, all_axes = plt.subplots(1, len(LADDERS), figsize=(14, 3.6), layout="constrained")
    for axes, (operation, rungs) in zip(all_axes, LADDERS.items()):
        for i, rung in enumerate(rungs):
            for j, (what, colour) in enumerate((("asked", "#4e79a7"), ("sectors", "#f28e2b"))):
                megabytes, times = counts[rung][what] / 1e6, counts[rung][what] / counts[rung]["must"]
                bar = axes.bar(i + (j - 0.5) * 0.38, megabytes, 0.36, color=colour, label=None if i else what)
                axes.bar_label(bar, [f"{times:,.{1 if times < 100 else 0}f} ×"])
        axes.axhline(counts[rungs[0]]["must"] / 1e6, color="k", ls="--", lw=1.2, label="what must move")
        axes.set_xticks(range(len(rungs)), [rung.removeprefix(operation).strip("_") or "last" for rung in rungs])
        axes.set(title=operation, ylabel="MB", yscale="log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, counts[rungs[0]]["must"] / 2e6), 2 * high)
    all_axes[1].legend(frameon=False, loc="upper right")
    return figure


def main():
    a = lab.begin(__doc__, trains=False, bandwidth=f"GB/s of the card's memory ({BANDWIDTH}: an H100's)")
    site = os.environ.pop("EMU_SKIP", None)  # for one call alone
    cases, kernels = tools()
    if site:
        return break_there(cases, kernels, site)
    counts = count(cases, kernels, a)
    times(cases, a, counts)
    print("\nwhat the emulator says where a barrier or wait is left out:")
    break_it(cases, kernels)
    if plt := lab.pyplot("the bars"):
        lab.save(draw(plt, counts), a, "6_kernels.png")


if __name__ == "__main__":
    main()

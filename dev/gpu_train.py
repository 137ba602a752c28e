#!/usr/bin/env python3
"""The training program on this machine's GPU: how fast it is, and the law against the CPU. A part of dev/gpu_check.sh.

    dev/gpu_train.py               build/cuda-fp32/train and build/cuda-bf16/train, built before
    dev/gpu_train.py --device emu  the same runs, tiny, on the emulator: to see that this script works

GPT-2 124M on sequences of 1,024 tokens, in bf16 and, where the card has it, in fp8: tokens a second and MFU, the median of the
steps after the first five. Then the law: ten steps in fp32 on the GPU, by 1 rank and, where MPI is there, by 2 and 4 that
share the GPU (--comm mpi) or, where there are as many, have one each (NCCL), at each ZeRO stage, with the matrices cut among
them (--tp, --sp), the sequences (--cp, both orders) and the layers (--pp, each schedule), give the loss (2e-5) and the gradient
norm (2e-4) of the same run on one CPU rank.
Standard library only. Ends with 1 where the law is broken or a run fails.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOSS, NORM = 2e-5, 2e-4
SMALL = "--layers 4 --heads 8 --hidden 64 --ffn 152 --seq 48 --lr 3e-3 --warmup 3 --steps 10 --eval-every 0".split()
BATCH = 8  # sequences a step
SECONDS = 60  # that a run may take
ZERO = [f"--zero {stage}" for stage in range(4)]
SCHEDULES = [f"--pp 2 --accum 4 --schedule {s}" for s in ("afab", "1f1b", "interleaved", "zb-h1", "zbv")]
LAYOUTS = {  # by ranks
    1: [""],
    2: [*ZERO, "--tp 2", "--tp 2 --sp", "--cp 2", "--cp 2 --cp-order contiguous", *SCHEDULES],
    4: [*ZERO, "--tp 4", "--tp 4 --sp", "--tp 2 --sp --zero 3", "--cp 4", "--cp 2 --tp 2 --sp --zero 3",
        "--pp 2 --accum 4 --schedule zbv --zero 3", "--pp 2 --accum 4 --schedule zb-h1 --tp 2 --sp"],
}  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=["cuda", "emu"], default="cuda")
device = parser.parse_args().device


def program(device, precision):
    """The program of this build, the newer one of that with MPI and that for one rank; None where there is neither."""
    built = [ROOT / "build" / f"{device}-{precision}{mpi}" / "train" for mpi in ("", "-nompi")]
    return max(filter(pathlib.Path.exists, built), key=lambda path: path.stat().st_mtime, default=None)


def run(path, *flags):
    """The events of a run's log, or its last words."""
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as directory:
        log = pathlib.Path(directory) / "log"
        command = [path, *map(str, flags), "--timeout", 20, "--log", log]
        try:
            done = subprocess.run(list(map(str, command)), env=env, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"not done in {SECONDS} s"
        if done.returncode:
            return (done.stderr or done.stdout).strip().split("\n")[-1] or f"ended with {done.returncode}"
        return [json.loads(line) for line in log.read_text().splitlines()]


def gpus():
    if device == "emu":
        return 8
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return sum(line.startswith("GPU") for line in listed.splitlines())


def steps(events):
    return [e for e in events if e["event"] == "step"]


def the_law():
    """Every layout in turn; says how far each is from the CPU, and whether all are near enough."""
    cpu, here = program("cpu", "fp32"), program(device, "fp32")
    if not here:
        print(f"the law: no {device}-fp32 program was built")
        return False
    if not cpu:
        print("the law: skipped, for no cpu-fp32 program was built")
        return True
    mpi = "nompi" not in str(here) and shutil.which("mpirun")
    if not mpi:
        print("one rank alone: no MPI here")
    good = True
    print(f"\n{'against one CPU rank':72}{'loss':>12}{'norm':>12}")
    for arch in "gpt2", "llama":
        model = ["--arch", arch, *SMALL]
        want = run(cpu, *model, "--micro-batch", BATCH)
        if isinstance(want, str):
            print(f"the CPU run failed: {want}")
            return False
        for ranks, comm in [(r, c) for r in (LAYOUTS if mpi else (1,)) for c in ("mpi", "nccl")]:
            if comm == "nccl" and not 1 < ranks <= gpus():
                continue
            for layout in LAYOUTS[ranks]:
                name = f"{arch}, {ranks} rank{'s' * (ranks > 1)}, {comm}, {layout}"
                layout = layout.split()
                tp, cp, pp, accum = (int(dict(zip(layout, layout[1:])).get(f, 1)) for f in ("--tp", "--cp", "--pp", "--accum"))
                layout += ["--micro-batch", BATCH // (ranks // tp // cp // pp * accum), "--comm", comm]
                got = run(here, *model, *layout, *(["--ranks", ranks] if ranks > 1 else []))
                if isinstance(got, str):
                    print(f"{name:72} failed: {got}")
                    good = False
                    continue
                pairs = list(zip(steps(got), steps(want)))
                loss, norm = (max(abs(a[k] / b[k] - 1) for a, b in pairs) for k in ("loss", "grad_norm"))
                kept = len(pairs) == 10 and loss <= LOSS and norm <= NORM  # false for NaN
                print(f"{name:72}{loss:12.1e}{norm:12.1e}{'' if kept else '   BROKEN'}")
                good &= kept
    return good


def speed():
    """GPT-2 124M in bf16, and in fp8 where the card has it."""
    here = program(device, "bf16")
    if not here:
        print(f"speed: no {device}-bf16 program was built")
        return False
    model, good = ["--model", "gpt2-124M", "--micro-batch", 16, "--steps", 25], True
    if device == "emu":
        model = ["--model", "gpt2-tiny", "--layers", 1, "--micro-batch", 1, "--steps", 7]
    bf16 = None
    print(f"{' '.join(map(str, model))}\n{'':20}{'tokens/s':>12}{'MFU':>8}{'peak GB':>10}{'loss':>8}")
    for name, more in ("bf16", []), ("fp8 e4m3", ["--fp8", "e4m3"]), ("fp8 hybrid", ["--fp8", "hybrid"]):
        events = run(here, *model, "--comm", "mpi", "--eval-every", 0, *more)
        if isinstance(events, str):
            print(f"{name:20}{events}")
            good &= "has no fp8" in events
            continue
        later = steps(events)[5:]
        rate = statistics.median(e["tokens_per_s"] for e in later)
        mfu = later[-1]["mfu"] and f"{100 * statistics.median(e['mfu'] for e in later):.1f} %"
        memory = [e for e in events if e["event"] == "end"][0]["memory"][0]["peak"]
        bf16 = bf16 or rate
        print(f"{name:20}{rate:12,.0f}{mfu or '-':>8}{memory * 1e-9:10.2f}{later[-1]['loss']:8.3f}   {rate / bf16:.2f} of bf16")
    return good


sys.exit(0 if [speed(), the_law()] == [True, True] else 1)

"""Bad input, bad flags, bad files and bad luck: one line on stderr, the right exit code, and no traceback.

2 is the user's to mend (a flag, a file), 3 is the run's (a number that is none, a full disk). The line names the flag
or the file, the value, and where there is one the nearest right value.
"""

import json
import os
import re
import shutil
import subprocess
import time

import numpy as np
import pytest

import reference
from conftest import build, make_text, run_program
from test_trace import Trace

USAGE, RUNTIME = 2, 3
SANITIZE = "address,undefined"
CPU_ENV = {"OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}  # MPI's and OpenBLAS's own are not ours to free
SECONDS = 20

# Every case is this run, with some flags put in place of its own.
BASE = "--data text.txt --layers 2 --hidden 32 --heads 4 --seq 32 --micro-batch 4 --steps 3 --peak-tflops 1"


def split(flags):
    """{"--flag": its words}."""
    out = {}
    for word in flags if isinstance(flags, list) else flags.split(" "):
        if word.startswith("--"):
            out[word] = []
        else:
            out[next(reversed(out))].append(word)
    return out


def words(flags):
    """The base run's flags with these in place of the same ones of its own; a value may be empty, none twice."""
    merged = {**{k: v for k, v in split(BASE).items() if k not in split(flags)}, **split(flags)}
    return [w for flag, values in merged.items() for w in [flag, *values]]


# name: (flags, exit code, what the line says)
CASES = {
    # -- data
    "validation of another kind": ("--val good.bin", 2, r"--val good.bin: another kind of tokens"),
    "an empty path": ([*"--steps 3 --save".split(), ""], 2, r"--save: its value is empty"),
    "metadata with a zero": ("--init zero.safetensors", 2, r"zero.safetensors: its metadata says heads = 0"),
    "metadata of another architecture": ("--init bert.safetensors", 2, r"its metadata says arch = bert; known: gpt2.llama"),
    "a tensor too many": ("--init more.safetensors", 2, r"more.safetensors: holds \d+ tensors, this model has \d+"),
    "weights that the last update spoils": (
        "--lr 1000 --min-lr 1000 --warmup 0 --weight-decay 1000 --grad-clip 0 --steps 60 --save unsaved", 3,
        r"step \d+: (the weights are not finite; this step is not saved|the loss is)",
    ),
    "exactly B·T tokens": ("--data exact.txt", 2, r"--data exact.txt: 3 sequences of 32 tokens, one step takes [48]"),
    "less than a global step": ("--data short.txt --accum 4", 2, r"short.txt: 6 sequences of 32 .*takes (16|32)"),
    "exactly T tokens": ("--data window.txt", 2, r"window.txt holds 32 tokens; --seq 32 needs 33 .*nearest: --seq 31"),
    "one token": ("--data one.txt", 2, r"one.txt holds 1 tokens; the shortest sequence needs 2"),
    "empty text": ("--data empty.txt", 2, r"empty.txt is empty"),
    "missing file": ("--data text.txt missing.txt", 2, r"missing.txt: No such file"),
    "directory": ("--data empty_dir", 2, r"empty_dir is a directory"),
    "device": ("--data /dev/null", 2, r"/dev/null is not a file"),
    "cut in its header": ("--data header.bin", 2, r"header.bin is cut short: 1000 bytes, .*1024"),
    "empty shard": ("--data no_tokens.bin", 2, r"no_tokens.bin holds 0 tokens"),
    "wrong magic": ("--data magic.bin", 2, r"magic.bin is no token shard: magic 12345"),
    "wrong version": ("--data version.bin", 2, r"version.bin: version 9"),
    "count above the file": ("--data count.bin", 2, r"count.bin: the header says 5001 tokens, the file holds 5000"),
    "negative count": ("--data negative.bin", 2, r"negative.bin: the header says -5000 tokens"),
    "two kinds of file": ("--data text.txt good.bin", 2, r"text.txt is a text, good.bin is a shard of uint16"),
    "token outside the vocabulary": (
        "--data tokens.bin --vocab 256", 2, r"tokens.bin: token \d+ is 300, outside .* 256; --vocab 301"),
    "text outside the vocabulary": ("--vocab 64", 2, r"text.txt: token \d+ is \d+, outside the vocabulary of 64"),
    "validation below a window": ("--val exact.txt window.txt", 2, r"window.txt holds 32 tokens; --seq 32 needs 33"),
    "missing validation": ("--val missing.txt", 2, r"missing.txt: No such file"),
    "evaluation of nothing": ("--data good.bin --eval-every 1", 2, r"--eval-every 1: needs --val"),
    # -- flags
    "unknown flag": ("--stepz 3", 2, r"--stepz: no such flag; nearest: --steps$"),
    "flag without its dash": ("--microbatch 3", 2, r"--microbatch: no such flag; nearest: --micro-batch$"),
    "no flag": ("--dry-run text.txt", 2, r"text.txt: not a flag"),
    "one dash": ("--quiet -v", 2, r"-v: not a flag"),
    "equals sign": ("--beta1=0.9", 2, r"--beta1=0.9: write the value after a space; nearest: --beta1 0.9$"),
    "no value, at the end": ("--beta1", 2, r"--beta1: needs a value"),
    "no value": ("--warmup --quiet", 2, r"--warmup: needs a value"),
    "no file": ("--data --quiet", 2, r"--data: needs a value"),
    "empty value": ("--warmup ", 2, r"--warmup : not a whole number"),
    "not a number": ("--micro-batch abc", 2, r"--micro-batch abc: not a whole number"),
    "trailing junk": ("--seq 32tokens", 2, r"--seq 32tokens: not a whole number"),
    "trailing junk of a real": ("--lr 1e-3x", 2, r"--lr 1e-3x: not a number"),
    "fraction": ("--micro-batch 2.6", 2, r"--micro-batch 2.6: not a whole number; nearest: 3"),
    "negative": ("--micro-batch -1", 2, r"--micro-batch -1: outside 1 to"),
    "zero steps": ("--steps 0", 2, r"--steps 0: outside 1 to .*nearest: 1"),
    "huge": ("--steps 1e99", 2, r"--steps 1e99: outside"),
    "not even a double": ("--steps 1e999", 2, r"--steps 1e999: not a whole number"),
    "nan": ("--lr nan", 2, r"--lr nan: not a number"),
    "inf": ("--lr inf", 2, r"--lr inf: not a number"),
    "beta of one": ("--beta2 1", 2, r"--beta2 1: outside 0 to 0.999999"),
    "choice": ("--recompute ful", 2, r"--recompute ful: not one of none\|selective\|full; nearest: full$"),
    "schedule": ("--schedule 1f1", 2, r"--schedule 1f1: not one of afab\|.*\|zbv\|gpipe; nearest: 1f1b$"),
    "preset": ("--model gpt2-125M", 2, r"--model gpt2-125M: .*nearest: gpt2-124M$"),
    "stage above the last": ("--zero 4", 2, r"--zero 4: .*nearest: 3$"),
    "stage below the first": ("--zero -1", 2, r"--zero -1: .*nearest: 0$"),
    "stage between two": ("--zero 1.5", 2, r"--zero 1.5: .*nearest: [12]$"),
    "stage in words": ("--zero three", 2, r"--zero three: "),
    "stage by another name": ("--zero-stage 3", 2, r"--zero-stage: no such flag; nearest: --zero$"),
    "bucket below nothing": ("--bucket-mb -1", 2, r"--bucket-mb -1: outside 0 to .*nearest: 0$"),
    "bucket without a size": ("--bucket-mb nan", 2, r"--bucket-mb nan: not a number"),
    "bucket with a unit": ("--bucket-mb 25MB", 2, r"--bucket-mb 25MB: not a number"),
    "switch with a value": ("--no-overlap yes", 2, r"yes: not a flag"),
    "the switch's other side": ("--overlap", 2, r"--overlap: no such flag; nearest: --no-overlap$"),
    "replicas before the start": ("--check-replicas -1", 2, r"--check-replicas -1: outside 0 to .*nearest: 0$"),
    "replicas of half a step": ("--check-replicas 0.5", 2, r"--check-replicas 0.5: not a whole number"),
    "no patience": ("--timeout 0", 2, r"--timeout 0: outside 1 to .*nearest: 1$"),
    "endless patience": ("--timeout inf", 2, r"--timeout inf: not a number"),
    # -- what does not go together
    "hidden over heads": ("--hidden 33", 2, r"--hidden 33: not a multiple of --heads = 4; nearest: 32 or 36$"),
    "hidden below heads": ("--hidden 3", 2, r"--hidden 3: not a multiple of --heads = 4; nearest: 4$"),
    "no heads": ("--heads 0", 2, r"--heads 0: outside 1 to .*nearest: 1$"),
    "heads over kv-heads": ("--kv-heads 3", 2, r"--kv-heads\b.* 3; nearest"),
    "kv-heads above heads": ("--kv-heads 8", 2, r"--kv-heads\b.* 8; nearest"),
    "odd heads with rotation": ("--arch llama --hidden 12", 2, r"--hidden 12: 3 channels a head .*nearest: 16$"),
    "dp": ("--dp 3", 2, r"--dp 3: the run has (1 rank\b.*; nearest: 1|2 ranks\b.*; nearest: 2)$"),
    "tp over heads": ("--heads 8 --tp 3", 2, r"--tp 3 does not divide 8 attention heads; nearest: 2 or 4$"),
    "tp beyond ranks": ("--tp 4", 2, r"--tp 4: needs 4 ranks, .*; the run has [12]; nearest: --ranks 4, or --tp [12]$"),
    "pp beyond ranks": (
        "--layers 4 --pp 4", 2, r"--pp 4: needs 4 ranks, .*; the run has [12]; nearest: --ranks 4, or --pp [12]$"),
    "pp beyond layers": ("--layers 1 --pp 2", 2, r"--pp 2: 2 stages, and --layers 1; nearest: --pp 1(, or --layers 2)?$"),
    "cp beyond ranks": ("--cp 4", 2, r"--cp 4: needs 4 ranks, .*; the run has [12]; nearest: --ranks 4, or --cp [12]$"),
    "seq over cp": (
        "--cp 2 --seq 30", 2, r"--seq 30: --cp-order zigzag cuts it into 2 · --cp 2 equal parts; nearest: 28 or 32$"),
    "cp beyond the sequence": ("--cp 4 --seq 4", 2, r"--seq 4: .* 2 · --cp 4 equal parts; nearest: --cp [12]$"),
    "whole rows over cp": ("--cp 2 --attention naive", 2, r"--attention naive: .* --cp 2 .*; nearest: flash$"),
    "order of parts": ("--cp 2 --cp-order zig-zag", 2, r"--cp-order zig-zag: not one of zigzag\|contiguous; nearest: zigzag$"),
    "resume in parts": ("--resume ckpt --steps 4 --cp 3 --seq 64", 2, r"--seq 64: .* 2 · --cp 3 equal parts; nearest: 60$"),
    "stages that a schedule has not": (
        "--virtual-stages 3", 2, r"--virtual-stages 3: --schedule 1f1b has 1 a rank; nearest: 1, or --schedule interleaved$"),
    "batch-tokens": (
        "--batch-tokens 1000", 2, r"--batch-tokens 1000: not a multiple of .* = (128; .* 896|256; .* 768) or 1024$"),
    "batch-tokens below one batch": ("--batch-tokens 100", 2, r"--batch-tokens 100: .*nearest: (128|256)$"),
    "batch-tokens and accum": ("--batch-tokens 512 --accum 3", 2, r"--accum 3: --batch-tokens 512 needs [24];"),
    "min-lr above lr": ("--min-lr 0.1", 2, r"--min-lr 0.1: above --lr 0.001"),
    "save-every alone": ("--save-every 2", 2, r"--save-every 2: needs --save"),
    "json alone": ("--json", 2, r"--json: goes with --dry-run"),
    "init and resume": ("--init init.safetensors --resume ckpt", 2, r"--init init.safetensors: --resume brings"),
    "too large for any machine": (
        "--model gpt3-175B --layers 96 --heads 96 --hidden 12288", 2,
        r"needs \d+\.\d+ GB, \d+\.\d+ GB are free; smaller: .*--micro-batch.*--recompute full"),
    # -- where to write
    "log nowhere": ("--log nowhere/log.jsonl", 2, r"--log nowhere/log.jsonl: No such file"),
    "log is a directory": ("--log empty_dir", 2, r"--log empty_dir: Is a directory"),
    "trace nowhere": ("--trace nowhere/trace.json", 2, r"--trace nowhere/trace.json: No such file"),
    "trace is a directory": ("--trace empty_dir", 2, r"--trace empty_dir: Is a directory"),
    "save into a file": ("--save text.txt", 2, r"text.txt: (Not a directory|File exists)"),
    # -- checkpoints
    "resume nothing": ("--resume empty_dir", 2, r"empty_dir has no checkpoint"),
    "resume nowhere": ("--resume nowhere", 2, r"nowhere does not exist"),
    "resume a file": ("--resume text.txt", 2, r"text.txt is a file"),
    "resume a step that is not there": ("--resume ckpt/step-00000001", 2, r"does not exist; nearest: ckpt/step-0+3$"),
    "resume another model": ("--resume ckpt --hidden 64", 2, r"--hidden 64: .*holds another model; nearest: 32$"),
    "resume more layers": ("--resume ckpt --layers 3", 2, r"--layers 3: .*another model; nearest: 2$"),
    "resume other kv-heads": ("--resume ckpt --kv-heads 2", 2, r"--kv-heads 2: .*another model; nearest: 4$"),
    "resume another architecture": ("--resume ckpt --arch llama", 2, r"--arch llama: .*another model; nearest: gpt2$"),
    "resume untied as tied": ("--resume llama --tie", 2, r"--tie: .*leave the flag out"),
    "resume longer than the table": ("--resume ckpt --seq 128", 2, r"--seq 128: longer than the position table .* 64$"),
    "resume at the end": ("--resume ckpt", 2, r"--steps 3: .*stands at step 3 already; nearest: 4$"),
    "weights cut short": ("--resume cut_weights --steps 4", 2, r"cut_weights/step-0+3/weights.safetensors"),
    "optimizer cut short": ("--resume cut_optimizer --steps 4", 2, r"cut_optimizer/step-0+3/optimizer.safetensors"),
    "no optimizer": ("--resume no_optimizer --steps 4", 2, r"step-0+3/optimizer.safetensors: No such file"),
    "init missing": ("--init missing.safetensors", 2, r"missing.safetensors: No such file"),
    "init empty": ("--init empty.txt", 2, r"empty.txt is cut short"),
    "init a text": ("--init text.txt", 2, r"text.txt is .*no safetensors file"),
    "init a directory": ("--init empty_dir", 2, r"empty_dir is a directory"),
    "init in its header": ("--init header.safetensors", 2, r"header.safetensors is cut short"),
    "init lacks a tensor": ("--init lacks.safetensors", 2, r"lacks.safetensors: .*blocks.1.mlp.up.bias"),
    "init of another shape": (
        "--init shape.safetensors", 2, r"shape.safetensors: blocks.1.mlp.up.bias .*127.*128"),
    "init longer than the table": ("--init init.safetensors --seq 65", 2, r"--seq 65: longer than the position table"),
    # -- numbers that are none
    "weights that are NaN": (
        "--init nan.safetensors --save unsaved", 3,
        r"step 1: the loss is -?nan, .*began on rank 0, in the gradient of norm.bias; nothing is saved"),
    "a learning rate that explodes": (
        "--lr 1000 --warmup 0 --weight-decay 1000 --steps 99 --save unsaved", 3,
        r"step [2-9]: .*(nan|inf), .*began on rank \d, in the gradient of [\w.]+; nothing is saved"),
}  # fmt: skip


def shard(path, tokens, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def truncate(path, bytes_off):
    os.truncate(path, path.stat().st_size - bytes_off)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with everything that the cases name, in which they run."""
    d = tmp_path_factory.mktemp("cases")
    for name, size in {"text": 20_000, "exact": 4 * 32, "short": 200, "window": 32, "one": 1, "empty": 0}.items():
        (d / f"{name}.txt").write_bytes(make_text(size))
    (d / "three.txt").write_bytes(bytes(i % 3 for i in range(5000)))
    (d / "empty_dir").mkdir()
    tokens = np.arange(5000) % 200
    shard(d / "good.bin", tokens)
    (d / "header.bin").write_bytes((d / "good.bin").read_bytes()[:1000])
    shard(d / "no_tokens.bin", [])
    shard(d / "magic.bin", tokens, magic=12345)
    shard(d / "version.bin", tokens, version=9)
    shard(d / "count.bin", tokens, count=5001)
    shard(d / "negative.bin", tokens, count=-5000)
    shard(d / "tokens.bin", np.where(tokens % 16 == 7, 300, tokens))  # in every window, of either rank

    for name, more in {"ckpt": [], "llama": ["--arch", "llama"]}.items():
        r = run_program(build(), words(["--save", name, *more]), cwd=d, env=CPU_ENV)
        assert r.code == 0, f"{r}"
    for name in ("cut_weights", "cut_optimizer", "no_optimizer"):
        shutil.copytree(d / "ckpt", d / name)
    truncate(d / "cut_weights/step-00000003/weights.safetensors", 4)
    truncate(d / "cut_optimizer/step-00000003/optimizer.safetensors", 1000)
    (d / "no_optimizer/step-00000003/optimizer.safetensors").unlink()

    weights, meta = reference.load_safetensors(d / "ckpt/step-00000003/weights.safetensors")
    bias = "blocks.1.mlp.up.bias"

    def init(name, changed):
        reference.save_safetensors(d / f"{name}.safetensors", changed, meta)

    init("init", weights)
    init("lacks", {k: v for k, v in weights.items() if k != bias})
    init("shape", {**weights, bias: weights[bias][:-1]})
    init("more", {**weights, "blocks.2.mlp.up.bias": weights[bias]})
    for name, key, value in (("zero", "heads", "0"), ("bert", "arch", "bert")):
        reference.save_safetensors(d / f"{name}.safetensors", weights, {**meta, key: value})
    init("nan", {**weights, bias: np.full_like(weights[bias], np.nan)})
    (d / "header.safetensors").write_bytes((d / "init.safetensors").read_bytes()[:100])
    return d


def own_lines(text):
    return [line for line in text.splitlines() if line.startswith("train: ")]


def check(r, place, code, pattern):
    """The program's line, alone, and nothing left of a run that must not leave anything."""
    assert r.code == code, f"exit code {code} expected\n{r}"
    lines = r.stderr.splitlines()
    assert len(lines) == 1 and own_lines(r.stderr) == lines, f"one line expected\n{r}"
    assert re.search(pattern, lines[0]), f"expected: {pattern}\n{r}"
    check_nothing_saved(place / "unsaved")


def check_nothing_saved(directory):
    assert {p.name for p in directory.glob("*")} <= {".lock"}


@pytest.mark.parametrize("name", CASES)
def test_alone(name, place):
    flags, code, pattern = CASES[name]
    check(run_program(build(), words(flags), timeout=SECONDS, cwd=place, env=CPU_ENV), place, code, pattern)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name, place):
    """Every rank ends, in seconds, and one of them speaks."""
    flags, code, pattern = CASES[name]
    check(run_program(build(), words(flags), 2, timeout=SECONDS, cwd=place, env=CPU_ENV), place, code, pattern)


def test_one_speaks_where_the_end_is_slow(place):
    """All four find a file that cannot be used, and rank 0's word to end them arrives when all have had their turn."""
    flags, code, pattern = CASES["token outside the vocabulary"]
    program, late = build(program="tests/train_with_faults"), {**CPU_ENV, "FAULT": "late:0:1:2"}
    check(run_program(program, words(flags), 4, timeout=SECONDS, cwd=place, env=late), place, code, pattern)


@pytest.mark.parametrize("name", CASES)
def test_sanitized(name, place):
    flags, code, pattern = CASES[name]
    r = run_program(build(sanitize=SANITIZE), words(flags), timeout=3 * SECONDS, cwd=place, env=CPU_ENV)
    check(r, place, code, pattern)


BY_HAND = [
    "exactly B·T tokens", "token outside the vocabulary", "unknown flag", "not a number", "dp", "log nowhere",
    "trace nowhere", "no patience", "save into a file", "resume another model", "resume at the end",
    "weights cut short", "init of another shape", "weights that are NaN", "too large for any machine",
]  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_mpirun_by_hand(name, place):
    """mpirun adds lines of its own; the program's stands among them once."""
    flags, code, pattern = CASES[name]
    command = ["-n", 2, "--oversubscribe", build(), *words(flags)]
    r = run_program("mpirun", command, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == code, f"exit code {code} expected\n{r}"
    lines = own_lines(r.stderr)
    assert len(lines) == 1 and re.search(pattern, lines[0]), f"once expected: {pattern}\n{r}"
    check_nothing_saved(place / "unsaved")


FAULTY = "tests/train_with_faults"  # faults.c: what happens on one rank alone


@pytest.mark.parametrize("zero, ranks, who, call, parameter", [
    (0, 2, 1, 9 + 3, "blocks.1.mlp.up"), (1, 3, 2, 9 + 6, "blocks.0.mlp.down"),
    (2, 2, 0, 3, "blocks.1.mlp.up"), (2, 3, 1, 9 + 1, "wte"),
    (3, 2, 1, 5, "blocks.1.attention.k"), (3, 4, 3, 9 + 8, "blocks.0.attention.out"),
    ("0 --tp 2 --sp", 2, 1, 9 + 3, "blocks.1.mlp.up"),
])  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_not_a_number_on_one_rank(zero, ranks, who, call, parameter, precision, place):
    """After the sum every rank has it; the one where it began is named, with the parameter. (In each of the two
    micro-batches, nine products give weights' gradients: the head's, then a block's mlp.down, mlp.up, attention.out, and qkv.)"""
    flags = f"--zero {zero} --accum 2 --micro-batch 2 --save unsaved --save-every 1"
    env = {**CPU_ENV, "FAULT": f"nan:{who}:{call}"}
    r = run_program(build(precision, program=FAULTY), words(flags), ranks, timeout=SECONDS, cwd=place, env=env)
    began = rf"it began on rank {who}, in the gradient of {parameter}.weight; nothing is saved"
    check(r, place, RUNTIME, rf"step 1: the loss is \d.*, the gradient's norm -?nan; {began}")


@pytest.mark.parametrize("flags, ranks, who, call, parameter, precision", [
    ("--zero 0", 2, 0, 4 + 2, "blocks.0.mlp.up", "fp32"), ("--zero 1", 4, 3, 5 + 1, "wte", "bf16"),
    ("--zero 2", 4, 2, 3, "blocks.1.mlp.up", "fp32"), ("--zero 3", 4, 1, 4, "blocks.0.attention.k", "bf16"),
    ("--zero 3 --schedule zbv --layers 4 --accum 4", 4, 0, 5 + 5 + 1, "blocks.0.mlp.down", "fp32"),
])  # fmt: skip
def test_not_a_number_in_one_stage(flags, ranks, who, call, parameter, precision, place):
    """As above, of two stages: four products in the first, five in the second, which has the head. (zbv's rank 0 has two: the
    first, and the last, which is two micro-batches ahead on the way back.)"""
    flags = f"--pp 2 --micro-batch 2 --save unsaved --save-every 1 {'' if '--accum' in flags else '--accum 2 '}{flags}"
    env = {**CPU_ENV, "FAULT": f"nan:{who}:{call}"}
    r = run_program(build(precision, program=FAULTY), words(flags), ranks, timeout=SECONDS, cwd=place, env=env)
    began = rf"it began on rank {who}, in the gradient of {parameter}.weight; nothing is saved"
    check(r, place, RUNTIME, rf"step 1: the loss is \d.*, the gradient's norm -?nan; {began}")


def one_replica_differs(place, kind, who, call, line, flags, ranks, precision="fp32"):
    """A bit of one weight (a moment, a master), flipped on one rank after an update (four: a bucket each) of step 2."""
    env = {**CPU_ENV, "FAULT": f"{kind}:{who}:{4 + call}"}
    run = words(f"--micro-batch 2 --check-replicas 2 --save unsaved --steps 6 {flags}".strip())
    r = run_program(build(precision, program=FAULTY), run, ranks, timeout=SECONDS, cwd=place, env=env)
    check(r, place, RUNTIME, rf"step 2: rank {who}'s copy of {line}$")


@pytest.mark.parametrize("ranks, who, call, bucket", [
    (2, 1, 1, "w[tp]e"), (3, 0, 2, r"blocks\.0\."), (3, 1, 4, r"norm\."), (4, 2, 3, r"blocks\.1\."),
])  # fmt: skip
@pytest.mark.parametrize("precision, kind", [("fp32", "flip"), ("bf16", "flip"), ("fp32", "drift"), ("bf16", "master")])
def test_one_replica_differs(ranks, who, call, bucket, precision, kind, place):
    others = "rank 0's" if ranks == 2 else "the other ranks'"
    one_replica_differs(place, kind, who, call, rf"{bucket}[\w.]+ differs from {others}", "", ranks, precision)


@pytest.mark.parametrize("flags, ranks, kind, who, call, line", [
    ("--tp 2 --sp", 2, "flip", 1, 4, "norm.bias differs from rank 0's"),  # every tp rank has all of a norm,
    ("--tp 2", 4, "flip", 1, 4, "norm.bias differs from the other ranks'"),  # and every rank of dp, too
    ("--tp 2 --zero 3", 4, "flip", 3, 4, "norm.bias differs from rank 2's"),  # or a shard of it
    ("--tp 2 --zero 1", 4, "drift", 1, 4, "norm.weight differs from rank 0's"),  # of which the moments always are
    ("--tp 2", 4, "flip", 3, 1, "wte.weight differs from rank 1's"),  # a slice of the vocabulary, the same over dp
    ("--tp 4 --arch llama --kv-heads 2 --ffn 8", 4, "flip", 3, 2, "blocks.0.attention.v.weight differs from rank 2's"),
])  # fmt: skip
def test_one_replica_differs_over_tp(flags, ranks, kind, who, call, line, place):
    one_replica_differs(place, kind, who, call, line, flags, ranks)


def test_ranks_that_do_not_fit_the_launcher(place):
    r = run_program("mpirun", ["-n", 3, "--oversubscribe", build(), *words("--ranks 2")], cwd=place, env=CPU_ENV)
    lines = own_lines(r.stderr)
    assert r.code == USAGE and len(lines) == 1, f"{r}"
    assert re.search(r"--ranks 2, but the launcher has started 3; nearest: --ranks 3", lines[0]), f"{r}"


@pytest.mark.parametrize("flags, pattern", [
    ("--ranks 0", r"--ranks 0: outside 1 to"),
    ("--ranks 2.5", r"--ranks 2.5: not a whole number"),
    ("--ranks 2 --dp 3", r"--dp 3: the run has 2 ranks\b.*; nearest: 2$"),
    ("--ranks", r"--ranks: needs a value"),
    ("--ranks 6 --tp 4", r"--tp 4: needs 4 ranks, .*; the run has 6; nearest: --ranks 4 or 8, or --tp 2$"),
    ("--ranks 4 --tp 2 --dp 3", r"--dp 3: the run has 4 ranks and --tp 2; nearest: 2$"),
    ("--ranks 16 --tp 16", r"--tp 16 does not divide 4 attention heads; nearest: 4$"),
    ("--ranks 4 --tp 4 --heads 6 --kv-heads 2 --hidden 48", r"--tp 4 does not divide 6 .*; nearest: 2 or 6$"),
    ("--ranks 3 --tp 3 --heads 6 --kv-heads 2 --hidden 48",
     r"--tp 3 can neither split nor copy 2 key/value heads evenly; nearest: 2 or 6$"),
    ("--ranks 4 --tp 4 --ffn 6", r"--tp 4 does not divide --ffn 6; nearest: 2$"),
    ("--ranks 4 --tp 4 --vocab 3 --data three.txt", r"--tp 4 is more than the 3 tokens of the vocabulary; nearest: 2$"),
    ("--ranks 4 --tp 4 --sp --seq 62", r"--seq 62: --sp cuts it into --tp 4 equal parts; nearest: 60 or 64$"),
    ("--ranks 4 --tp 4 --sp --seq 3", r"--seq 3: --sp cuts it into --tp 4 equal parts; nearest: 4$"),
    ("--tp 0", r"--tp 0: outside 1 to .*nearest: 1$"),
    ("--tp x", r"--tp x: not a whole number"),
    ("--tp --sp", r"--tp: needs a value"),
    ("--ranks 4 --tp 2 --batch-tokens 200", r"--batch-tokens 200: not a multiple of .* dp = 256; nearest: 256$"),
    ("--dry-run --ranks 16 --tp 8 --heads 8 --dp 4", r"--dp 4: the run has 16 ranks and --tp 8; nearest: 2$"),
    ("--explain --tp 3", r"--tp 3 does not divide 4 attention heads; nearest: 2 or 4$"),
    # What cp cuts: a sequence, in one part or two a rank, and with --sp in as many of each again;
    ("--cp 0", r"--cp 0: outside 1 to .*nearest: 1$"),
    ("--cp 2.5", r"--cp 2.5: not a whole number"),
    ("--ranks 4 --cp 4 --seq 100", r"--seq 100: --cp-order zigzag cuts it into 2 · --cp 4 equal parts; nearest: 96 or 104$"),
    ("--ranks 4 --cp 4 --cp-order contiguous --seq 99",
     r"--seq 99: --cp-order contiguous cuts it into --cp 4 equal parts; nearest: 96 or 100$"),
    ("--ranks 8 --cp 2 --tp 4 --sp --seq 36",  # 36 is a multiple of 2 · 2 and of 4
     r"--seq 36: --cp-order zigzag .* 2 · --cp 2 equal parts, and --sp each rank's tokens into --tp 4; nearest: 32 or 40$"),
    ("--ranks 6 --cp 2 --tp 3 --sp --seq 42 --heads 6 --hidden 48 --ffn 48", r"--seq 42: .* --tp 3; nearest: 36 or 48$"),
    ("--ranks 6 --cp 2 --tp 3 --sp --seq 44 --cp-order contiguous --heads 6 --hidden 48 --ffn 48",
     r"--seq 44: --cp-order contiguous cuts it into --cp 2 .*, and --sp .* --tp 3; nearest: 42 or 48$"),
    ("--ranks 8 --cp 2 --tp 4 --seq 30", r"--seq 30: .* into 2 · --cp 2 equal parts; nearest: 28 or 32$"),  # without --sp
    ("--ranks 3 --cp 3 --init init.safetensors --seq 64", r"--seq 64: .* 2 · --cp 3 equal parts; nearest: 60$"),
    ("--ranks 3 --cp 3 --arch llama --resume llama --seq 64 --steps 4", r"--seq 64: .* --cp 3 .*; nearest: 60 or 66$"),
    # of one shorter than that, not all ranks get some;
    ("--ranks 64 --cp 64 --seq 32", r"--seq 32: .* 2 · --cp 64 equal parts; nearest: --cp 16, or --seq 128$"),
    ("--ranks 64 --cp 64 --seq 32 --cp-order contiguous", r"--seq 32: .* into --cp 64 .*; nearest: --cp 32, or --seq 64$"),
    ("--ranks 8 --dp 1 --cp 8 --seq 8", r"--seq 8: .* 2 · --cp 8 equal parts; nearest: --cp 4 --dp 2, or --seq 16$"),
    ("--ranks 6 --cp 6 --seq 4", r"--seq 4: .* 2 · --cp 6 equal parts; nearest: --cp 2, or --seq 12$"),
    ("--ranks 4 --cp 64 --seq 32", r"--seq 32: .* 2 · --cp 64 equal parts; nearest: --cp 4$"),
    ("--ranks 4 --cp 4 --init init.safetensors --seq 7", r"--seq 7: .* nearest: --cp 1, or --seq 8$"),
    ("--dry-run --cp 48 --init init.safetensors --seq 60", r"--seq 60: .* 2 · --cp 48 equal parts; nearest: --cp 30$"),
    # a whole row of scores is no rank's;
    ("--ranks 2 --cp 2 --attention naive", r"--attention naive: it keeps whole rows .* --cp 2 ranks .*; nearest: flash$"),
    # and the world, and the batch.
    ("--ranks 6 --cp 4", r"--cp 4: needs 4 ranks, .*; the run has 6; nearest: --ranks 4 or 8, or --cp 2$"),
    ("--ranks 6 --cp 4 --seq 72", r"--cp 4: needs 4 ranks, .*; the run has 6; nearest: --ranks 4 or 8, or --cp 3$"),
    ("--ranks 6 --cp 2 --tp 2 --sp", r"--tp 2 --cp 2: needs 4 ranks, .*; the run has 6; nearest: --ranks 4 or 8, or --cp 1$"),
    ("--ranks 6 --cp 2 --tp 4 --pp 2", r"--tp 4 --cp 2 --pp 2: needs 16 .*; nearest: --ranks 16, or --tp 2 --cp 1 --pp 1$"),
    ("--ranks 12 --cp 4 --tp 2", r"--tp 2 --cp 4: needs 8 .*; nearest: --ranks 8 or 16, or --cp 2$"),
    ("--ranks 6 --dp 2 --cp 4", r"--dp 2: with --cp 4 it takes 8 ranks, the run has 6; nearest: --ranks 8$"),
    ("--ranks 8 --cp 2 --tp 2 --dp 3", r"--dp 3: the run has 8 ranks and --tp 2 --cp 2; nearest: 2$"),
    ("--dry-run --ranks 100000 --cp 3 --seq 36", r"--cp 3: needs 3 ranks, .* has 100000; nearest: --ranks 99999, or --cp 2$"),
    ("--ranks 4 --cp 2 --batch-tokens 200",  # which counts the whole sequences of two ranks of dp
     r"--batch-tokens 200: not a multiple of micro-batch · seq · dp = 256; nearest: 256$"),
    ("--ranks 6 --cp 2 --pp 4 --layers 3", r"--pp 4: 4 stages, and --layers 3; nearest: --pp 3$"),
    # The pipeline's ranks: of the world,
    ("--pp 0", r"--pp 0: outside 1 to .*nearest: 1$"),
    ("--pp 1.5", r"--pp 1.5: not a whole number"),
    ("--ranks 8 --pp 3 --layers 3", r"--pp 3: needs 3 ranks, .*; the run has 8; nearest: --ranks 6 or 9, or --pp 2$"),
    ("--ranks 6 --tp 2 --pp 4 --layers 4", r"--tp 2 --pp 4: needs 8 .*; the run has 6; nearest: --ranks 8, or --pp 3$"),
    ("--ranks 6 --tp 4 --pp 2", r"--tp 4 --pp 2: needs 8 .*; the run has 6; nearest: --ranks 8, or --tp 2 --pp 1$"),
    ("--ranks 6 --pp 4 --accum 4 --schedule interleaved --virtual-stages 2 --layers 12",
     r"--pp 4: needs 4 ranks, .*; the run has 6; nearest: --ranks 4 or 8, or --pp 2$"),  # 3 does not divide 4
    ("--ranks 10 --tp 4 --pp 5 --layers 5", r"--tp 4 --pp 5: needs 20 .*; nearest: --ranks 20, or --tp 2$"),
    ("--ranks 8 --tp 2 --pp 2 --dp 3", r"--dp 3: the run has 8 ranks and --tp 2 --pp 2; nearest: 2$"),
    ("--ranks 8 --pp 2 --dp 3", r"--dp 3: the run has 8 ranks and --pp 2; nearest: 4$"),
    ("--dry-run --ranks 8 --pp 2 --dp 8", r"--dp 8: the run has 8 ranks and --pp 2; nearest: 4$"),
    # and of the layers;
    ("--ranks 8 --pp 8 --layers 7", r"--pp 8: 8 stages, and --layers 7; nearest: --pp 4, or --layers 8$"),
    ("--ranks 8 --dp 1 --pp 8 --layers 7", r"--pp 8: 8 stages, and .*; nearest: --pp 4 --dp 2, or --layers 8$"),
    ("--ranks 8 --pp 8 --layers 3", r"--pp 8: 8 stages, and --layers 3; nearest: --pp 2, or --layers 8$"),
    ("--dry-run --pp 8 --layers 5", r"--pp 8: 8 stages, and --layers 5; nearest: --pp 5, or --layers 8$"),
    ("--ranks 4 --pp 4 --layers 4 --schedule interleaved --virtual-stages 2 --accum 4",
     r"--pp 4 --virtual-stages 2: 8 stages, and --layers 4; nearest: --pp 2, or --layers 8$"),
    ("--ranks 4 --pp 4 --layers 4 --schedule interleaved --virtual-stages 2",  # of accum 1 none but 1 pp is a divisor
     r"--pp 4 --virtual-stages 2: 8 stages, and --layers 4; nearest: --pp 2, or --layers 8$"),
    ("--dry-run --pp 4 --layers 7 --schedule interleaved --accum 8",
     r"--pp 4 --schedule interleaved: 8 stages, .*; nearest: --pp 2, or --layers 8$"),  # 3 does not divide 8
    ("--ranks 2 --pp 2 --layers 5 --schedule interleaved --virtual-stages 3",
     r"--pp 2 --virtual-stages 3: 6 stages, and --layers 5; nearest: --virtual-stages 2, or --layers 6$"),
    ("--ranks 4 --pp 4 --layers 7 --schedule zbv --accum 7",
     r"--pp 4 --schedule zbv: 8 stages, and --layers 7; nearest: --pp 2, or --layers 8$"),
    ("--ranks 4 --pp 4 --init init.safetensors", r"--pp 4: 4 stages, and --layers 2; nearest: --pp 2$"),
    # stages a rank,
    ("--virtual-stages 17", r"--virtual-stages 17: outside 1 to 16; nearest: 16$"),
    ("--schedule interleaved --virtual-stages 1",
     r"--virtual-stages 1: --schedule interleaved has 2 or more a rank; nearest: 2, or --schedule 1f1b$"),
    ("--schedule zbv --virtual-stages 4",
     r"--virtual-stages 4: --schedule zbv has 2 a rank; nearest: 2, or --schedule interleaved$"),
    ("--schedule gpipe --virtual-stages 2",
     r"--virtual-stages 2: --schedule afab has 1 a rank; nearest: 1, or --schedule interleaved$"),
    # and micro-batches.
    ("--ranks 4 --pp 4 --layers 8 --schedule interleaved --accum 6",
     r"--accum 6: --schedule interleaved takes a multiple of --pp 4; nearest: 4 or 8$"),
    ("--ranks 4 --pp 4 --layers 8 --schedule interleaved --accum 3", r"--accum 3: .* multiple of --pp 4; nearest: 4$"),
    ("--ranks 4 --pp 4 --layers 4 --schedule zb-h1", r"--accum 1: --schedule zb-h1 needs at least --pp 4 .*; nearest: 4$"),
    ("--ranks 4 --pp 4 --layers 4 --schedule zb-h1 --accum 3", r"--accum 3: --schedule zb-h1 needs .*; nearest: 4$"),
    ("--ranks 4 --pp 4 --layers 8 --schedule zbv --accum 6",
     r"--accum 6: --schedule zbv needs at least 2 · --pp 4 − 1 micro-batches; nearest: 7$"),
    ("--ranks 8 --pp 4 --layers 8 --schedule zbv --batch-tokens 512",
     r"--batch-tokens 512: 2 micro-batches, but --schedule zbv needs .*; nearest: 1792$"),
    ("--ranks 4 --pp 4 --layers 8 --schedule interleaved --batch-tokens 768",
     r"--batch-tokens 768: 6 micro-batches, but --schedule interleaved takes .*; nearest: 512 or 1024$"),
    ("--ranks 4 --pp 4 --layers 8 --schedule interleaved --batch-tokens 700",
     r"--batch-tokens 700: not a multiple of micro-batch · seq · dp = 128; nearest: 512 or 1024$"),
])  # fmt: skip
def test_ranks(flags, pattern, place):
    check(run_program(build(), words(flags), timeout=SECONDS, cwd=place, env=CPU_ENV), place, USAGE, pattern)


@pytest.mark.parametrize("flags, world", [
    ("--tp 8", 8), ("--dp 4 --tp 8", 32), ("--ranks 16 --tp 8 --sp", 16),
    ("--tp 6 --heads 6 --kv-heads 2 --hidden 48", 6),
    ("--pp 4", 4), ("--dp 4 --tp 2 --pp 4", 32), ("--ranks 32 --tp 2 --pp 4 --dp 4", 32),
    ("--pp 4 --accum 3 --schedule afab", 4), ("--pp 4 --accum 3 --schedule 1f1b", 4),  # fewer micro-batches than stages
    ("--pp 4 --accum 4 --schedule zb-h1", 4), ("--pp 2 --accum 3 --schedule zbv", 2),
    ("--pp 2 --accum 2 --schedule interleaved", 2), ("--dp 2 --pp 2 --schedule interleaved --batch-tokens 2048", 4),
    ("--pp 2 --accum 4 --schedule interleaved --virtual-stages 3 --layers 6", 2),
    ("--cp 4", 4), ("--cp 32", 32), ("--cp 64 --cp-order contiguous", 64), ("--dp 4 --tp 2 --cp 4 --pp 2", 64),
    ("--ranks 64 --dp 4 --tp 2 --cp 4 --pp 2 --sp", 64), ("--cp 3 --seq 33 --cp-order contiguous", 3),
    ("--cp 2 --tp 3 --sp --seq 36 --heads 6 --hidden 48 --ffn 48", 6), ("--ranks 8 --cp 2 --batch-tokens 2048", 8),
])  # fmt: skip
def test_one_process_answers_for_any_grid(flags, world, place):
    r = run_program(build(), ["--dry-run", "--json", *flags.split()], timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and not r.stderr and json.loads(r.stdout)["world"] == world, f"{r}"


@pytest.mark.parametrize("flags", [
    "--ranks 6 --cp 4 --seq 72", "--ranks 12 --tp 4 --cp 2 --pp 3", "--ranks 20 --tp 4 --sp --cp 5 --pp 2 --seq 80",
    "--ranks 96 --tp 8 --sp --cp 16 --seq 96", "--ranks 96 --tp 8 --sp --cp 16 --seq 96 --cp-order contiguous",
    "--tp 8 --sp --cp 3 --seq 100", "--ranks 48 --cp 48 --dp 1 --seq 36", "--ranks 24 --dp 3 --cp 8 --seq 12 --tp 4 --sp",
    "--ranks 6 --cp 2 --tp 4 --pp 2", "--ranks 8 --cp 2 --pp 8 --layers 7", "--ranks 6 --cp 4 --pp 8 --layers 7",
    "--ranks 12 --cp 2 --pp 4 --accum 4 --schedule interleaved --layers 12", "--cp 2 --attention naive",
])  # fmt: skip
def test_what_is_nearest_is_legal(flags, place):
    """No suggestion leads to another refusal."""

    def run(of):
        command = ["--dry-run", "--json", *(w for flag, values in of.items() for w in [flag, *values])]
        return run_program(build(), command, timeout=SECONDS, cwd=place, env=CPU_ENV)

    refused = run(split(flags))
    check(refused, place, USAGE, r"nearest: ")
    flag, nearest = re.search(r"train: (--[\w-]+).*nearest: (.*)$", refused.stderr.strip()).groups()
    for words in re.split(",? or ", nearest):
        flag = words.split()[0] if words.startswith("--") else flag
        r = run({**split(flags), **split(words if words.startswith("--") else f"{flag} {words}")})
        assert r.code == 0 and not r.stderr, f"{words}: {r}"


def test_gpipe_is_afab(place):
    run = "--dry-run --json --pp 2 --accum 4".split()
    afab, gpipe, other = [
        run_program(build(), [*run, "--schedule", s], timeout=SECONDS, cwd=place, env=CPU_ENV)
        for s in ("afab", "gpipe", "1f1b")
    ]
    assert afab.code == 0 and afab.stdout == gpipe.stdout != other.stdout, f"{afab}{gpipe}{other}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_stages(schedule, place):
    flags = words(f"--pp 3 --layers 3 --accum 2 --schedule {schedule} --steps 1")
    r = run_program(build(), flags, 3, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and not r.stderr, f"{r}"


@pytest.mark.parametrize("flags, ranks, without", [
    ("--schedule zbv --virtual-stages 2", 1, ["--virtual-stages", "--schedule"]),
    ("--schedule gpipe", 1, ["--schedule"]),
    ("--schedule gpipe --accum 2", 1, []),  # which keeps both
    ("--pp 2 --schedule 1f1b --virtual-stages 1 --no-overlap --check-replicas 1", 2, []),  # a tied embedding
    ("--arch llama --pp 2 --check-replicas 1", 2, ["--check-replicas"]),
    ("--pp 2 --schedule zbv --accum 3 --layers 4 --check-replicas 1", 2, ["--check-replicas"]),  # both ends are rank 0's
])  # fmt: skip
def test_what_has_no_effect_in_a_pipeline(flags, ranks, without, place):
    r = run_program(build(), words(f"{flags} --steps 1"), ranks, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and re.findall("^(.*) changes nothing: ", r.stdout, re.M) == without, f"{r}"


@pytest.mark.parametrize("flags, ranks, without", [
    ("--cp 2 --zero 2 --check-replicas 1 --no-overlap --comm mpi", 2, []),  # as over dp
    ("--cp 2 --zero 3 --check-replicas 1", 2, ["--check-replicas"]),
    ("--cp-order zigzag", 2, ["--cp-order"]), ("--cp 2 --cp-order contiguous", 2, []),
])  # fmt: skip
def test_what_has_no_effect_over_cp(flags, ranks, without, place):
    r = run_program(build(), words(f"{flags} --steps 1"), ranks, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and re.findall("^(.*) changes nothing: ", r.stdout, re.M) == without, f"{r}"


@pytest.mark.parametrize("flags, says", [
    ("--zero 2 --cp 2", True), ("--zero 1 --cp 2", False), ("--zero 2", True), ("--zero 3", True), ("--zero 1", False), ("--zero 2 --accum 1", False)])  # fmt: skip
def test_zero_1_is_best_in_a_pipeline(flags, says, place):
    run = words(f"--pp 2 --micro-batch 2 --steps 1 {'' if 'accum' in flags else '--accum 2 '}{flags}")
    r = run_program(build(), run, 4, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and ("--zero 1 sends less" in r.stdout) == says, f"{r}"


def test_norms_have_copies_at_every_stage(place):
    """Over tp, so that here --check-replicas does something, and --no-overlap, too."""
    flags = words("--tp 2 --sp --zero 3 --check-replicas 1 --no-overlap --steps 1")
    r = run_program(build(), flags, 2, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and re.findall("^(.*) changes nothing: ", r.stdout, re.M) == ["--zero 3"], f"{r}"
    assert "all copies of every weight are alike" in r.stdout, f"{r}"


def test_no_overlap_over_tp(place):
    """Without it, what W needs is on its way as soon as what I needs, and is waited for, has come."""
    for switch in ("", " --no-overlap"):
        flags = words(f"--tp 2 --sp --steps 2 --quiet --trace {place / 'trace'}{switch}")
        r = run_program(build(), flags, 2, timeout=SECONDS, cwd=place, env=CPU_ENV)
        assert r.code == 0, f"{r}"
        rank = Trace(place / "trace").spans[0]
        waits = [s for s in rank["compute"] if s.name == "wait for all_gather"]
        inside = [(a, b) for a in waits for b in rank["tp"] if a.begin < b.begin < a.end]
        assert waits and rank["tp"] and bool(inside) == (not switch), inside


@pytest.mark.parametrize("flag", ["--log", "--trace"])
def test_only_rank_0_cannot_open_its_file(flag, place):
    """The others learn of it, at once."""
    began = time.monotonic()
    r = run_program(build(), words(f"{flag} nowhere/file --steps 100000"), 4, timeout=60, cwd=place, env=CPU_ENV)
    assert time.monotonic() - began < 15
    check(r, place, USAGE, rf"{flag} nowhere/file: No such file")


@pytest.mark.parametrize("zero, ranks, first", [*((zero, 2, 0) for zero in range(4)), ("2 --pp 2", 4, 2)])
def test_not_a_number_at_every_stage(zero, ranks, first, place):
    """Wherever a gradient is kept, it is looked at before its sum; all ranks have a NaN in theirs, the first is named: of a
    pipeline, the first of the last stage."""
    flags = f"--zero {zero} --accum 2 --micro-batch 2 --init nan.safetensors --save unsaved --save-every 1"
    r = run_program(build(), words(flags), ranks, timeout=SECONDS, cwd=place, env=CPU_ENV)
    check(r, place, RUNTIME, rf"step 1: the loss is -?nan, .*it began on rank {first}, in the gradient of norm.bias;")


def test_too_large_says_so_before_it_takes_memory(place):
    """With 2 GB of address space; the table and the flags that help come all the same, on one rank or two."""
    run = ["--as=2000000000", build(), *words("--model gpt3-175B --layers 96 --heads 96 --hidden 12288")]
    r = run_program("prlimit", run, timeout=SECONDS, cwd=place, env=CPU_ENV)
    check(r, place, USAGE, r"needs \d{4}\.\d+ GB.*--micro-batch, --seq, --recompute full")
    for row in ("weights", "gradients", "optimizer", "activations", "total"):
        assert re.search(rf"^  {row} +\d+\.\d+$", r.stdout, re.M), f"{r}"


def test_validation_smaller_than_a_batch(place):
    """Legal: one window of a global batch of 8; it counts once."""
    (place / "val.txt").write_bytes(make_text(40))
    log = place / "val.jsonl"
    losses = []
    for ranks, micro_batch in ((1, 1), (1, 8), (2, 4)):
        flags = words(f"--val val.txt --lr 0 --steps 1 --micro-batch {micro_batch}")
        r = run_program(build(), flags, ranks, log=log, cwd=place, env=CPU_ENV)
        assert r.code == 0 and not r.stderr, f"{r}"
        losses.append(r.one("val")["loss"])
    assert max(losses) - min(losses) < 1e-6 * losses[0], losses


# ---- a disk that fills up ------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path):
    """A file system on which one checkpoint of the base run fits, and two do not."""
    d = tmp_path / "disk"
    d.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(d)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk: {done.stderr.strip()}")
    yield d
    subprocess.run(["umount", str(d)], check=True)


@pytest.mark.parametrize("ranks, flags", [(1, "--micro-batch 4"), (2, "--micro-batch 2"), (2, "--pp 2 --micro-batch 4")])
def test_full_disk(ranks, flags, small_disk, place, tmp_path):
    """The save fails, the run ends, and the checkpoint before it is whole."""
    again = words(f"--resume {small_disk} --save {tmp_path / 'large'} --steps 6 {flags}")
    flags = words(f"--save {small_disk} --save-every 2 --steps 6 {flags}")
    r = run_program(build(), flags, ranks, timeout=SECONDS, log=tmp_path / "log", cwd=place, env=CPU_ENV)
    check(r, place, RUNTIME, r"step-0+4\.partial/\w+\.safetensors: No space left on device")
    assert [e["step"] for e in r.events("step")] == [1, 2, 3, 4]
    assert sorted(p.name for p in small_disk.iterdir()) == [".lock", "step-00000002"]

    r = run_program(build(), again, ranks, timeout=SECONDS, log=tmp_path / "again", cwd=place, env=CPU_ENV)
    assert r.code == 0 and not r.stderr, f"{r}"
    assert [e["step"] for e in r.events("step")] == [3, 4, 5, 6]


def test_full_disk_for_the_log(small_disk, place):
    """A log that ends in the middle of a line is noticed."""
    with open(small_disk / "filler", "wb") as f:
        f.write(bytes(680 << 10))
    flags = words(f"--steps 2000 --quiet --log {small_disk / 'log'}")
    r = run_program(build(), flags, timeout=SECONDS, cwd=place, env=CPU_ENV)
    check(r, place, RUNTIME, r"--log .*/log: No space left on device")


# ---- under the sanitizers, what is legal ---------------------------------------------------------------------------
SANITIZED = [
    "--arch gpt2 --attention flash --recompute none",
    "--arch gpt2 --attention naive --recompute selective --vocab 261",
    "--arch llama --attention flash --recompute full --kv-heads 2 --seq 19",
    "--arch llama --attention naive --recompute none --matmul bf16 --tie",
    "--arch gpt2 --zero 1 --bucket-mb 0.06 --ffn 77 --check-replicas 2",
    "--arch gpt2 --zero 2 --ffn 77 --check-replicas 2 --no-overlap",
    "--arch llama --zero 3 --ffn 77 --layers 3",
    "--arch llama --zero 3 --tie --bucket-mb 1000 --lazy-optimizer",
]  # fmt: skip
OVER_TP = [
    "--arch gpt2 --tp 2 --sp --vocab 261 --zero 2 --check-replicas 2",
    "--arch llama --tp 2 --kv-heads 1 --recompute full --attention naive --grad-accum-fp32",
]


@pytest.mark.parametrize("options, ranks", [*((o, n) for n in (1, 2) for o in SANITIZED), *((o, 2) for o in OVER_TP)])
def test_sanitized_training(options, ranks, place, tmp_path):
    """Training, evaluation, a sample, a save and a resume without a word from ASan or UBSan."""
    run = words(f"{options} --accum 2 --eval-every 2 --save {tmp_path}/ckpt --sample 40")
    for more in ([], ["--resume", tmp_path / "ckpt", "--steps", 5]):
        if more:
            run.remove("--steps"), run.remove("3")
        r = run_program(build(sanitize=SANITIZE), [*run, *more], ranks, cwd=place, env=CPU_ENV)
        assert r.code == 0 and not r.stderr, f"{r}"


@pytest.mark.parametrize("flags, says", [
    ("--dp 1000000 --micro-batch 1000000 --seq 100000000 --batch-tokens 524288",
     r"--(layers 4 .* would need|[a-z-]+ 10+: outside 1 to)"),
    ("--dp 100000 --tp 8 --pp 10000 --layers 10000", r"--dp 100000 --tp 8 --pp 10000: 8000000000 ranks, more than"),
    ("--pp 10000 --layers 10000 --accum 1000000", r"--accum 1000000: 1000000 micro-batches through 10000 stages, more than"),
    ("--dp 100000 --micro-batch 100000 --seq 10000000 --batch-tokens 1 --pp 2 --schedule zb-h1",
     r"--batch-tokens 1: one micro-batch of all ranks is 10{17}; nearest: a smaller --micro-batch$"),
    ("--micro-batch 1 --seq 1 --batch-tokens 1e12", r"--batch-tokens 10{12}: 10{12} micro-batches through 1 stages, more"),
    ("--micro-batch 100000 --seq 10000000 --accum 1000000 --schedule afab", r"--layers 4 .* would need"),
    ("--dp 100000 --tp 8 --cp 10000 --seq 20000", r"--dp 100000 --tp 8 --cp 10000: 8000000000 ranks, more than"),
    ("--cp 10000 --seq 9999999", r"--seq 9999999: .* 2 · --cp 10000 equal parts; nearest: 9980000 or 10000000$"),
    ("--cp 9999 --tp 8 --sp --seq 9999999", r"--seq 9999999: .* --cp 9999 .*, and --sp .*; nearest: 9999000$"),
    ("--micro-batch 100000 --seq 10000000 --accum 100 --schedule afab", r"--layers 4 .* would need"),
    ("--micro-batch 100000 --seq 10000000 --accum 20 --dp 100000 --cp 10000",
     r"--micro-batch 100000 --accum 20 --dp 100000: 2.0e\+18 tokens a step; nearest: fewer$"),
])  # fmt: skip
def test_largest_numbers(flags, says, place):
    """Flags at the ends of their ranges, or just beyond: products of them are no undefined behaviour."""
    r = run_program(build(sanitize=SANITIZE), ["--dry-run", *flags.split()], timeout=SECONDS, cwd=place, env=CPU_ENV)
    check(r, place, USAGE, says)


def test_a_rank_needs_memory_for_its_part(place):
    """What is refused above is no more than others have, on 10,000 ranks."""
    flags = "--dry-run --json --cp 10000 --micro-batch 100000 --seq 10000000 --accum 100 --schedule afab".split()
    r = run_program(build(), flags, timeout=SECONDS, cwd=place, env=CPU_ENV)
    assert r.code == 0 and not r.stderr, f"{r}"


def test_the_good_files_train(place):
    """What the bad files differ from is legal: their difference is what is refused."""
    r = run_program(build(), words("--data good.bin --vocab 256"), cwd=place, env=CPU_ENV)
    assert r.code == 0 and not r.stderr, f"{r}"

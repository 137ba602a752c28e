"""One harness for both halves of every kernel: the library of a device, arrays between guards, bars that NaN cannot pass.

    cpu    kernels/*.c, the definition
    emu    kernels/*.cu on the emulator (dev/emu), checked=True with every access watched
    cuda   kernels/*.cu on a GPU

A test runs one function of a Kernels on the device and on the CPU and holds both against a truth in double precision:

    @isolated
    def test_gelu(precision):
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            got, reference = forward(k, N, F), forward(cpu, N, F)
        check("out", got, truth, cpu=reference, K=1, precision=precision)

KERNEL_DEVICE=emu|cuda|cpu says which device stands for "the device" (emu, if nothing is said). To work on one kernel in a
directory of its own: KERNEL_BUILD=build/mine- KERNEL_SOURCES="kernels/gelu.cu kernels/matmul.cu".
"""
import ctypes
import faulthandler
import fcntl
import functools
import importlib
import inspect
import json
import os
import pathlib
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import traceback

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICE = os.environ.get("KERNEL_DEVICE", "emu")
PRECISIONS = ("fp32", "bf16")
SEEDS = (1, 2, 3)  # of the order of blocks and threads
GUARD = 256  # bytes before and after an array; keeps its alignment
BUILD_SECONDS, TEST_SECONDS = 900, 240
FP8_E4M3, FP8_E5M2 = 0, 1


# ---- building ------------------------------------------------------------------------------------------------------
@functools.cache
def wrong_with(target, options):
    """What make says where it fails; asked at most once a process (and its children)."""
    (ROOT / "build").mkdir(exist_ok=True)
    command = ["make", "-s", f"-j{os.cpu_count()}", "-C", str(ROOT), *options, target]
    with open(ROOT / "build/make.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes that test may want the same file
        made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    return "\n".join(made.stderr.splitlines()[-20:]) or "it fails" if made.returncode else ""


def make(target, *options):
    """The path of what `make OPTIONS TARGET` makes."""
    said = wrong_with(target, options)
    assert not said, f"no {target} with {options}:\n{said}"
    return ROOT / target


def library(device, precision, checked=False):
    """The path of the kernels' library of this device."""
    prefix = os.environ.get("KERNEL_BUILD", "build/") if device != "cpu" else "build/"
    directory = f"{prefix}{device}-{precision}{'-checked' if checked else ''}"
    options = [f"DEVICE={device}", f"PRECISION={precision}", f"CHECKED={int(checked)}", f"BUILD={directory}", "MPI=0"]
    if "KERNEL_SOURCES" in os.environ:
        options.append(f"cuda_sources={os.environ['KERNEL_SOURCES']}")
    return make(f"{directory}/libkernels.so", *options)


# ---- one test, one process -----------------------------------------------------------------------------------------
def isolated(test, seconds=TEST_SECONDS):
    """The test runs in a child: a crash, exit() or hang is this test's failure, and libraries meet in no process.

    The parent builds what a test with a `precision` will load, so that children need not ask make again."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        given = inspect.signature(test).bind(*args, **kwargs).arguments
        if "precision" in given:
            library("cpu", given["precision"])
            library(DEVICE, given["precision"], DEVICE == "emu" and given.get("checked", False))
        kind, value = in_child(functools.partial(test, *args, **kwargs), seconds)
        if kind == "skipped":
            pytest.skip(value)
        if kind != "done":
            pytest.fail(value, pytrace=False)

    return run


def answer_of(function):
    try:
        return "done", function()
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException:
        return "failed", traceback.format_exc()


def in_child(function, seconds=TEST_SECONDS):
    """Runs function() in a forked process → ("done", its result), ("failed", text) or ("skipped", text)."""
    sys.stdout.flush(), sys.stderr.flush()
    with tempfile.TemporaryFile() as errors:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(readable)
                os.dup2(errors.fileno(), 2)
                faulthandler.enable(2)  # where a crash came from
                with os.fdopen(writable, "wb") as out:
                    pickle.dump(answer_of(function), out)
                sys.stdout.flush()
            finally:
                os._exit(0)  # no handlers of the parent's, and never its next test
        os.close(writable)
        answer = bytearray()
        with os.fdopen(readable, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], seconds)[0] and (part := pipe.read(1 << 20)):
                answer += part
            late = not select.select([pipe], [], [], 0)[0]
        if late:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-4000:]
    if late:
        return "failed", f"ran longer than {seconds} s\n{said}"
    if not answer:
        return "failed", f"the process ended with {os.waitstatus_to_exitcode(status)}\n{said}"
    kind, value = pickle.loads(bytes(answer))
    return kind, f"{value}\n{said}" if kind == "failed" else value


# ---- numbers -------------------------------------------------------------------------------------------------------
def to_bf16(x):
    """The bits (uint16) of float numbers rounded to bf16, ties to even; NaN stays NaN."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(x, precision):
    """What the precision makes of x, in double."""
    x = np.asarray(x, np.float32)
    return (from_bf16(to_bf16(x)) if precision == "bf16" else x).astype(np.float64)


def torch_bf16(function, *arrays):
    """function of these arrays as PyTorch computes it in bf16 on the CPU, in double (a tuple where it gives several)."""
    import torch

    made = function(*(torch.from_numpy(np.asarray(a, np.float32)).bfloat16() for a in arrays))
    outs = tuple(o.detach().float().numpy().astype(np.float64) for o in (made if isinstance(made, tuple) else (made,)))
    return outs if isinstance(made, tuple) else outs[0]


KINDS = ("random", "one_hot", "constant", "huge")


def filled(r, rows, C, kind="random"):
    """[rows, C] of inputs; r is a numpy.random.Generator. No sum of the constant rows is exact in fp32."""
    x = r.uniform(-1, 1, (rows, C))
    if kind == "one_hot":
        x = np.where(np.arange(C) == np.arange(rows)[:, None] % C, 1e4, 0.0)
    if kind == "constant":
        x = np.broadcast_to(100.1 + np.arange(rows)[:, None], (rows, C)).copy()
    return x * 1e4 if kind == "huge" else x


# ---- bars ----------------------------------------------------------------------------------------------------------
def rel_l2(got, truth):
    """‖got − truth‖ / ‖truth‖; 0 of nothing but zeros, inf where a number is not finite."""
    got, truth = np.asarray(got, np.float64).ravel(), np.asarray(truth, np.float64).ravel()
    assert got.shape == truth.shape, f"{got.shape} and {truth.shape}"
    if not np.isfinite(got).all() or not np.isfinite(truth).all():
        return np.inf
    size = max(np.abs(truth).max(initial=0), np.abs(got).max(initial=0)) or 1.0  # so that no square overflows
    error, norm = np.linalg.norm(got / size - truth / size), np.linalg.norm(truth / size)
    return error / norm if norm else np.inf if error else 0.0


HALF_ULP = 2.0**-9  # of bf16, relative: what rounding the exact result once may cost


def check(name, got, truth, *, precision, K=1, cpu=None, torch=None, largest=None):
    """The bars. K is the length of the longest sum behind an element.

    fp32   rel_l2 ≤ max(2 × the CPU half's, 2⁻²²·√K)
    bf16   rel_l2 ≤ 2 × that of `torch`, the same computed by PyTorch in bf16 (or of a result rounded once)
    and no element is off by more than `largest` × the truth's largest (2⁻²⁰·√K; 2⁻⁶ in bf16, two units in the last place).
    Where the truth is infinite the result is that infinity; NaN is never right. A precision="fp32" output of a bf16
    build (statistics, losses) may be held to the bar of bf16's inputs by giving `torch`."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, f"{name}: {got.shape}, not {truth.shape}"
    assert not np.isnan(truth).any(), f"{name}: the truth holds NaN"
    finite = np.isfinite(truth)
    wrong = np.flatnonzero(~(np.isfinite(got) if finite.all() else np.where(finite, np.isfinite(got), got == truth)))
    assert not wrong.size, f"{name}: {wrong.size} of {got.size} not finite or not {truth.flat[wrong[0]]}, first at " + str(
        np.unravel_index(wrong[0], got.shape))

    def error(x):
        return rel_l2(np.asarray(x, np.float64)[finite], truth[finite])

    if torch is not None or precision == "bf16":
        assert torch is not None, f"{name}: in bf16 the bar is PyTorch's error"
        bar, off = 2 * max(error(torch), 0.51 * HALF_ULP), 2.0**-6
    else:
        assert cpu is not None, f"{name}: in fp32 the bar is the CPU half's error"
        bar, off = max(3 * error(cpu), 2.0**-22 * K**0.5), 2.0**-20 * K**0.5  # the CPU's is another on another CPU
    assert error(got) <= bar, f"{name}: relative L2 error {error(got):.3g}, bar {bar:.3g}"
    off = (off if largest is None else largest) * np.abs(truth[finite]).max(initial=0)
    distance = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, truth, 0)), 0)
    at = np.unravel_index(distance.argmax(), distance.shape)
    assert distance[at] <= off, f"{name}{list(map(int, at))} is {got[at]:.9g}, not {truth[at]:.9g} (± {off:.3g})"


def raw(x):
    return x.tobytes() if isinstance(x, np.ndarray) else bytes(x)


def same_bits(k, run):
    """run(k) → dict of arrays or bytes, under three orders of blocks and threads: the same bits each time. → the dict"""
    first = None
    for seed in SEEDS:
        k.seed(seed)
        got = run(k)
        first = first or got
        for name in first:
            assert raw(first[name]) == raw(got[name]), f"{name}: other bits with seed {seed}"
    return first


# ---- the contract, as ctypes sees it --------------------------------------------------------------------------------
class AttentionShape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in ("B", "Tq", "Tk", "H", "KV", "D", "q_stride", "kv_stride", "o_stride")] + [
        ("causal", ctypes.c_bool), ("q_tokens", ctypes.c_size_t), ("kv_tokens", ctypes.c_size_t)]


class AdamW(ctypes.Structure):
    _fields_ = [(n, ctypes.c_float) for n in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")] + [
        ("step", ctypes.c_long), ("decay", ctypes.c_void_p), ("n_decay", ctypes.c_size_t)]


class Fp8Matrix(ctypes.Structure):
    _fields_ = [("q", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("format", ctypes.c_int), ("blocks", ctypes.c_bool)]


class MoeRouting(ctypes.Structure):
    _fields_ = [("experts", ctypes.c_size_t), ("topk", ctypes.c_size_t), ("sigmoid", ctypes.c_bool),
                ("groups", ctypes.c_size_t), ("group_limit", ctypes.c_size_t)]


class KernelFlops(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in (
        "gemm_forward", "gemm_backward", "attention_forward", "attention_backward", "gemm_fp8")]


TYPES = {"float": ctypes.c_float, "double": ctypes.c_double, "size_t": ctypes.c_size_t, "int": ctypes.c_int,
         "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "long": ctypes.c_long, "bool": ctypes.c_bool,
         "Fp8Format": ctypes.c_int, "AttentionShape": AttentionShape, "AdamW": AdamW, "Fp8Matrix": Fp8Matrix,
         "MoeRouting": MoeRouting}


def declarations(*headers):
    return "".join(re.sub(r"//.*|^#.*|/\*.*?\*/", "", (ROOT / h).read_text(), flags=re.M) for h in headers)


def rungs(name):
    """The operation's ladder, slow to fast: the functions of ladder.h with its name and a suffix, then itself."""
    return [*re.findall(rf"\b{name}_\w+", declarations("kernels/ladder.h")), name]


@functools.lru_cache(None)
def prototypes():
    """{function: (result, [types of the arguments])}, read from kernels.h and ladder.h: the one place that says them."""
    text = declarations("kernels/kernels.h", "kernels/ladder.h")

    def arguments(list_):
        for argument in filter(None, map(str.strip, list_.split(","))):
            words = argument.replace("const ", "").split()
            if words == ["void"]:
                continue
            yield ctypes.c_void_p if "*" in argument else TYPES[words[0]]

    found, shapes = {}, {}
    for name, list_ in re.findall(r"typedef void (\w+)\(([^)]*)\);", text):
        shapes[name] = (None, list(arguments(list_)))
    for result, name, list_ in re.findall(r"^(void|size_t) (\w+)\(([^)]*)\);", text, flags=re.M):
        found[name] = (ctypes.c_size_t if result == "size_t" else None, list(arguments(list_)))
    for shape, names in re.findall(r"^(\w+) ([\w, \n]+);", text, flags=re.M):
        if shape in shapes:
            found.update((name.strip(), shapes[shape]) for name in names.split(","))
    return found


# ---- a device's kernels ----------------------------------------------------------------------------------------------
class Buffer:
    """An array in device memory, between guards. Where something takes a pointer, the Buffer itself will do."""

    def __init__(self, kernels, array, is_floatX, written, shift, poisoned=False):
        self.kernels, self.is_floatX, self.written = kernels, is_floatX, written
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.guard = 0 if kernels.checked else GUARD  # the checked emulator knows where an array ends, for reads too
        before = b"\xff" * (self.guard + shift * array.itemsize)
        self.image = before + array.tobytes() + b"\xff" * self.guard
        self.start = len(before)
        self.base = kernels._malloc(max(len(self.image), 1))
        if not (poisoned and kernels.checked):  # there it is NaN already, and known as never written
            kernels._to_device(self.base, self.image)
        self._as_parameter_ = ctypes.c_void_p(self.base + self.start)

    @property
    def ptr(self):
        return self.base + self.start

    def bits(self):
        return self.kernels._to_host(self.ptr, self.nbytes)

    def get(self):
        """What stands there now: floatX as float32, everything else as it is."""
        x = np.frombuffer(self.bits(), self.dtype).reshape(self.shape)
        return from_bf16(x) if self.is_floatX and self.dtype == np.uint16 else x

    def check(self):
        now = self.kernels._to_host(self.base, len(self.image))
        end = self.start + self.nbytes
        what = f"array of {self.nbytes} bytes ({self.shape})"
        assert now[: self.start] == self.image[: self.start], f"{what}: written before its beginning"
        assert now[end:] == self.image[end:], f"{what}: written beyond its end"
        assert self.written or now == self.image, f"{what}: an input was written"


class Kernels:
    """The library of one device and precision. As a context manager it checks every array at the end and frees it."""

    allocations = 0  # of device memory so far: the number that the emulator's counters give the next one is one more

    def __init__(self, device=DEVICE, precision="fp32", checked=False):
        self.device, self.precision, self.checked = device, precision, checked and device == "emu"
        self.lib = ctypes.CDLL(str(library(device, precision, self.checked)))
        self.buffers, self.kept = [], []
        if device == "cpu":
            libc = ctypes.CDLL(None)
            libc.aligned_alloc.restype, libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
            libc.free.argtypes = [ctypes.c_void_p]
            self._malloc = lambda bytes_: libc.aligned_alloc(64, (bytes_ + 63) // 64 * 64)
            self._free = libc.free
        else:
            self.lib.cudaGetErrorString.restype = ctypes.c_char_p
            self.lib.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            self.lib.cudaFree.argtypes = [ctypes.c_void_p]
            self.lib.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            self._free = lambda pointer: self._ok(self.lib.cudaFree(pointer))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:  # an earlier failure says more than a guard does
            self.finish()

    # device memory
    def _ok(self, code):
        assert code == 0, self.lib.cudaGetErrorString(code).decode()

    def _malloc(self, bytes_):
        pointer = ctypes.c_void_p()
        self._ok(self.lib.cudaMalloc(ctypes.byref(pointer), bytes_))
        Kernels.allocations += 1
        return pointer.value

    def _to_device(self, pointer, data):
        if self.device == "cpu":
            ctypes.memmove(pointer, data, len(data))
        elif data:
            self._ok(self.lib.cudaMemcpy(pointer, data, len(data), 1))

    def _to_host(self, pointer, bytes_):
        if self.device == "cpu":
            return ctypes.string_at(pointer, bytes_)
        data = ctypes.create_string_buffer(bytes_)
        if bytes_:
            self._ok(self.lib.cudaMemcpy(data, pointer, bytes_, 2))
        return data.raw

    def _keep(self, buffer):
        self.buffers.append(buffer)
        return buffer

    def put(self, array, written=False, shift=0):
        """This array as it is (int32, float32, float64, uint8 …), `shift` elements off alignment; written: it may change."""
        return self._keep(Buffer(self, np.ascontiguousarray(array), False, written, shift))

    def floatX(self, array, written=False, shift=0):
        """These numbers rounded to the precision; rounded() says what becomes of them."""
        array = np.ascontiguousarray(array, np.float32)
        return self._keep(Buffer(self, to_bf16(array) if self.precision == "bf16" else array, True, written, shift))

    def out(self, *shape, dtype=None, shift=0):
        """An output, poisoned: NaN as any float, −1 as an integer. floatX unless a dtype is given."""
        real = np.dtype(dtype or (np.uint16 if self.precision == "bf16" else np.float32))
        poison = np.frombuffer(b"\xff" * (int(np.prod(shape)) * real.itemsize), real).reshape(shape)
        return self._keep(Buffer(self, poison, dtype is None, True, shift, poisoned=True))

    def workspace(self, name, *args):
        """As many bytes as NAME_workspace(args) asks for, poisoned."""
        return self.out(self.call(f"{name}_workspace", *args), dtype=np.uint8)

    # structs
    def adamw(self, decay=(), **fields):
        ranges = np.array(decay, np.uintp)
        self.kept.append(ranges)  # host memory, read when the kernel is called
        return AdamW(decay=ranges.ctypes.data, n_decay=ranges.size // 2, **fields)

    def fp8_matrix(self, q, scale, format, blocks=False):
        return Fp8Matrix(q.ptr, scale.ptr, format, blocks)

    # calls
    def has(self, name):
        return hasattr(self.lib, name)

    def prepared(self, name, *args):
        """A call of a function of kernels.h or ladder.h (Buffers and None for pointers), to be made any number of times."""
        result, types = prototypes()[name]
        assert len(args) == len(types), f"{name} takes {len(types)} arguments, not {len(args)}"
        function = getattr(self.lib, name)
        function.restype, function.argtypes = result, types
        return functools.partial(function, *(a._as_parameter_ if isinstance(a, Buffer) else a for a in args))

    def call(self, name, *args):
        """Calls it once; fails with what the device says afterwards."""
        got = self.prepared(name, *args)()
        self.synchronize()
        return got

    def synchronize(self):
        if self.device != "cpu":
            self._ok(self.lib.cudaDeviceSynchronize())
            self._ok(self.lib.cudaGetLastError())

    def seed(self, seed):
        """Another order of blocks and threads, where there is a choice: on the emulator."""
        if self.device == "emu":
            self.lib.emu_set_seed(ctypes.c_uint32(seed))

    def watch(self, races=True, uninitialised=True, counters=False):
        """What the checked emulator looks after (dev/emu/check.cpp)."""
        self.lib.emu_watch(*map(ctypes.c_bool, (races, uninitialised, counters)))

    def counters(self):
        """What kernels did since the last call, with watch(counters=True): [{"kernel": …, "global_read": …, …}]"""
        self.lib.emu_counters.restype = ctypes.c_size_t
        size = self.lib.emu_counters(None, ctypes.c_size_t(0), ctypes.c_bool(False))
        text = ctypes.create_string_buffer(size)
        self.lib.emu_counters(text, ctypes.c_size_t(size), ctypes.c_bool(True))
        return json.loads(text.value)

    @property
    def flops(self):
        return KernelFlops.in_dll(self.lib, "kernel_flops")

    def finish(self):
        """Guards intact, inputs as they were; then the memory is given back."""
        self.synchronize()
        for buffer in self.buffers:
            buffer.check()
        for buffer in self.buffers:
            self._free(buffer.base)
        self.buffers, self.kept = [], []


# ---- every small case, in this process -------------------------------------------------------------------------------
def small_cases(file=""):
    """(file and name, run) of what the tests of kernels keep small: SMALL in tests/test_cuda_FILE*.py."""
    for path in sorted((ROOT / "tests").glob(f"test_cuda_{file}*.py")):
        if "\nSMALL = " in path.read_text():
            for name, run in importlib.import_module(path.stem).SMALL:
                yield f"{path.stem} {name}", run


def main(precision="fp32", file=""):
    """For a tool that watches a process: python tests/kernels.py [fp32|bf16] [FILE]"""
    for name, run in small_cases(file):
        with Kernels(DEVICE, precision) as k:
            run(k)
        print(f"{precision} {name}", flush=True)


if __name__ == "__main__":
    sys.modules["kernels"] = sys.modules["__main__"]  # the tests import this module, not another copy
    main(*sys.argv[1:])

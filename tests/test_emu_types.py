"""The emulator's types, instructions and matrix products: what dev/emu says in place of NVIDIA's headers and hardware.

Types are compared with NVIDIA's own functions, bit for bit, where nvcc is installed. Instructions run in
tests/ptx_test.cu, whose answers are worked out again here from the layouts alone; KERNEL_DEVICE=cuda asks a GPU the
same questions. cuBLASLt's products are compared with numpy's."""
import ctypes
import re
import shutil
import subprocess

import numpy as np
import pytest

from conftest import ROOT
from kernels import DEVICE, SEEDS, from_bf16, isolated, make, to_bf16

emulated = pytest.mark.skipif(DEVICE != "emu", reason="asks the emulator what a device does not tell")
BUILD = ROOT / "build" / f"{DEVICE}-types"
LANES = 32


# ---- types -----------------------------------------------------------------------------------------------------------
def types_program(compiler, *options):
    """tests/types_test.cu made by this compiler: a function from (what, bytes in) to bytes out."""
    program = BUILD / f"types_{compiler}"
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-I.", "-O2", *options, "tests/types_test.cu", "-o", program]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr

    def run(what, numbers=b""):
        return subprocess.run([program, what], input=bytes(numbers), capture_output=True, check=True).stdout

    return run


@pytest.fixture(scope="module")
def types():
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc: nothing to compare with")
    ours = types_program("g++", "-x", "c++", "-Idev/emu/include", "-std=gnu++17", "-DEMU", "-march=native")
    return ours, types_program("nvcc", "-std=c++17", "-arch=sm_80")


def same(types, what, numbers=np.zeros(0, np.uint32)):
    ours, theirs = (np.frombuffer(run(what, numbers.tobytes()), np.uint8) for run in types)
    assert ours.size > 0 and ours.size == theirs.size
    wrong = (ours != theirs).reshape(max(len(numbers), 1), -1).any(1)
    first = np.ravel(numbers[wrong[: len(numbers)]])[:4]
    assert not wrong.any(), f"{wrong.sum()} differ, the first for {[hex(x) for x in first]}"


def test_conversions_to_float(types):
    same(types, "to_float")  # every bf16, fp16 and fp8 number


def test_conversions_from_float(types):
    # every bf16, the middle to the next, and what lies beside both; the same for the coarser fp8; anything
    bf16 = np.arange(1 << 16, dtype=np.uint32) << 16
    fp8 = np.arange(1 << 13, dtype=np.uint32) << 19
    beside = [-1, 0, 1]
    near = [bf16 + d for d in beside] + [bf16 + 0x8000 + d for d in beside] + [fp8 + 0x40000 + d for d in beside]
    anything = np.random.default_rng(1).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    same(types, "from_float", np.concatenate([*near, anything]).astype(np.uint32))


def test_bf16_arithmetic(types):
    rng = np.random.default_rng(2)
    pairs = rng.integers(0, 1 << 32, (1 << 16, 2), dtype=np.uint32)
    pairs[: 1 << 15] = pairs[: 1 << 15] & 0x83FFFFFF | 0x3C000000  # most of them of like size, so that sums round
    special = [0, 1, 0x8000, 0x8001, 0x80, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0]
    corners = np.stack(np.meshgrid(special, special), -1).reshape(-1, 2).astype(np.uint32) << 16
    same(types, "arithmetic", np.concatenate([pairs, corners]))


def test_numbers_of_cublaslt(types):
    same(types, "numbers")


# ---- wrappers --------------------------------------------------------------------------------------------------------
def wrappers(path):
    """{name: parameters} of the functions of this header that kernels call."""
    text = re.sub(r"//[^\n]*|\\\n", "", path.read_text())
    found = {}
    function = r"static (?:__device__ )?inline (\w+) (\w+)\(((?:[^()]|\([^()]*\))*)\) \{"
    for kind, name, given in re.findall(function, text):
        names = re.findall(r"^MMA_FP8\((\w+)", text, re.M) if name == "name" else [name]  # the macro makes several
        found.update(dict.fromkeys(names, (kind, re.sub(r"(, )?EMU_HERE|\s", "", given))))
    return found


def test_every_wrapper_has_a_twin():
    real, twins = wrappers(ROOT / "kernels/ptx.cuh"), wrappers(ROOT / "dev/emu/ptx.h")
    assert len(real) > 5 and real == twins


# ---- instructions ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def library():
    """tests/ptx_test.cu for this device, with the emulator's core around it."""
    directory = BUILD.relative_to(ROOT)
    options = [f"DEVICE={DEVICE}", "PRECISION=bf16", f"BUILD={directory}", "MPI=0"]
    return make(f"{directory}/libkernels.so", *options, "cuda_sources=kernels/../tests/ptx_test.cu")


def call(lib, name, *args):
    def pointer(a):
        return a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a

    function = getattr(lib, name)
    status = function(*map(pointer, args))
    lib.ptx_error.restype = ctypes.c_char_p
    assert status == 0, lib.ptx_error().decode()


def seeded(lib, seed):
    if DEVICE == "emu":
        lib.emu_set_seed(ctypes.c_uint32(seed))


@pytest.mark.parametrize("transposed", [False, True])
@isolated
def test_ldmatrix(library, transposed):
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)  # every element another
    out = np.zeros((LANES, 4, 2), np.uint16)
    call(ctypes.CDLL(library), "ptx_ldmatrix", out, matrices, int(transposed))
    for lane in range(LANES):
        for j in range(4):
            m = matrices[j].T if transposed else matrices[j]
            assert list(out[lane, j]) == [m[lane // 4, 2 * (lane % 4)], m[lane // 4, 2 * (lane % 4) + 1]]


def fragments(a, b, d):
    """The registers of each lane: a [16, K], b [K, 8] (bytes or 16-bit words), d [16, 8], as PTX lays them out."""
    per = a.shape[1] // 8  # elements in a register
    g, t = np.arange(LANES) // 4, np.arange(LANES) % 4
    e = np.arange(per)
    halves = a.shape[1] // 2
    left = [a[(g + 8 * (i % 2))[:, None], per * t[:, None] + halves * (i // 2) + e] for i in range(4)]
    right = [b[per * t[:, None] + halves * i + e, g[:, None]] for i in range(2)]
    sums = [d[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]
    return tuple(np.ascontiguousarray(np.stack(x, 1)) for x in (left, right, sums))


def mma(lib, a, b, d, formats):
    left, right, sums = fragments(a, b, np.asarray(d, np.float32))
    call(lib, "ptx_mma", sums, left, right, formats)
    out = np.zeros((16, 8), np.float32)
    for lane in range(LANES):
        for i in range(4):
            out[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = sums[lane, i]
    return out


FP8 = {"e4m3": (3, 7), "e5m2": (2, 15)}  # bits of the mantissa, bias


def fp8_values(codes, kind):
    codes, (mantissa, bias) = codes.astype(int), FP8[kind]
    exponent, fraction = (codes & 0x7F) >> mantissa, (codes & (1 << mantissa) - 1) / (1 << mantissa)
    magnitude = np.where(exponent, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return np.where(codes & 0x80, -magnitude, magnitude)


def whole_numbers(rng, kind, *shape):
    """Codes of whole numbers −4..4: their products add up to the same whatever the order and the precision."""
    codes = np.arange(256, dtype=np.uint8)
    values = fp8_values(codes, kind)
    return rng.choice(codes[(np.abs(values) <= 4) & (values == np.round(values))], shape)


@isolated
def test_mma_bf16(library):
    lib, rng = ctypes.CDLL(library), np.random.default_rng(3)
    a, b, d = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    assert np.array_equal(mma(lib, to_bf16(a), to_bf16(b), d, 0), d + a @ b)
    a, b, d = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    truth = d + from_bf16(to_bf16(a)).astype(float) @ from_bf16(to_bf16(b))
    assert np.abs(mma(lib, to_bf16(a), to_bf16(b), d, 0) - truth).max() < 2e-6


@pytest.mark.parametrize("formats, kinds", enumerate(["e4m3 e4m3", "e4m3 e5m2", "e5m2 e4m3", "e5m2 e5m2"], 1))
@isolated
def test_mma_fp8(library, formats, kinds):
    lib, rng = ctypes.CDLL(library), np.random.default_rng(4)
    if lib.ptx_arch() < 89:
        pytest.skip("this GPU has no fp8")
    of_a, of_b = kinds.split()
    d = rng.integers(-9, 10, (16, 8)).astype(np.float32)
    a, b = whole_numbers(rng, of_a, 16, 32), whole_numbers(rng, of_b, 32, 8)
    assert np.array_equal(mma(lib, a, b, d, formats), d + fp8_values(a, of_a) @ fp8_values(b, of_b))
    # every code of a once in two products, but for infinities and NaN
    largest = {"e4m3": 0x7E, "e5m2": 0x7B}
    a = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(16, 32)
    a[(a & 0x7F) > largest[of_a]] = 0
    one = np.zeros((32, 8), np.uint8)
    one[5::8] = {"e4m3": 0x38, "e5m2": 0x3C}[of_b]  # picks four elements of a row
    truth = fp8_values(a, of_a)[:, 5::8].sum(1, keepdims=True) + np.zeros(8)
    close = 1e-6 if DEVICE == "emu" else 2**-10  # some tensor cores keep fewer bits
    assert np.allclose(mma(lib, a, one, np.zeros((16, 8)), formats), truth, rtol=close, atol=0)


@emulated
@isolated
def test_short_fp8_sums(library):
    """With 14 bits a sum of 4,096 no longer notices quarters, and notices halves: what promotion is for."""
    lib = ctypes.CDLL(library)
    a, d = np.zeros((16, 32), np.uint8), np.full((16, 8), 4096.0)
    a[:] = 0x28  # 1/4
    b = np.full((32, 8), 0x38, np.uint8)  # 1
    assert np.all(mma(lib, a, b, d, 1) == 4096 + 8)
    lib.emu_set_fp8_bits(14)
    assert np.all(mma(lib, a, b, d, 1) == 4096)
    assert np.all(mma(lib, a, b, 0 * d, 1) == 8)
    a[:] = 0x30  # 1/2
    assert np.all(mma(lib, a, b, d, 1) == 4096 + 16)
    assert np.all(mma(lib, a, b, -d, 1) == -4096 + 16)
    a[0, 0] = 0x7F
    assert np.isnan(mma(lib, a, b, d, 1)[0]).all()
    inf, one = np.full((16, 32), 0x7C, np.uint8), np.full((32, 8), 0x3C, np.uint8)  # of E5M2
    assert np.all(mma(lib, inf, one, d, 4) == np.inf)


@isolated
def test_exp2_approx(library):
    lib, rng = ctypes.CDLL(library), np.random.default_rng(5)
    x = np.concatenate([rng.uniform(-125, 127, 4000), rng.uniform(-2, 2, 4000), -np.arange(130.0)]).astype(np.float32)
    truth = np.exp2(x.astype(float)).astype(np.float32)

    def exp2(x, seed=1):
        seeded(lib, seed)
        y = np.zeros_like(x)
        call(lib, "ptx_exp2", y, x, ctypes.c_size_t(x.size))
        return y

    y, normal = exp2(x), truth >= np.float32(2.0**-126)
    ulps = y.view(np.int32).astype(int) - truth.view(np.int32)
    assert np.abs(ulps[normal & (x > -125.9)]).max() <= 2
    assert np.all(y[x < -126.1] == 0)
    edges = np.array([-np.inf, np.inf, np.nan, 1e-40, -1e-40, -200, 200], np.float32)
    got = exp2(edges)
    assert got[0] == 0 and got[1] == np.inf and np.isnan(got[2]) and got[5] == 0 and got[6] == np.inf
    assert np.abs(got[3:5].view(np.int32) - np.float32(1).view(np.int32)).max() <= 2
    if DEVICE == "emu":  # another seed of errors, other errors; the order's seed leaves them alone
        assert set(ulps[normal & (x > -125.9)]) == {-2, -1, 0, 1, 2}
        assert np.array_equal(exp2(x, 2), y) and not np.array_equal(exp2(x, 0x10001), y)


def pipeline(lib, bytes_of_last=12, n=5, pending=1):
    """(what the kernel sums, what it should sum) of n tiles of two warps."""
    tiles = np.random.default_rng(6).integers(1, 100, (n, 64, 4)).astype(np.float32)
    sums = np.zeros((64, 4), np.float32)
    given = tiles.copy()
    tiles[-1].view(np.uint8)[:, bytes_of_last:] = 0
    call(lib, "ptx_pipeline", sums, given, n, ctypes.c_uint32(bytes_of_last), pending)
    return sums, tiles.sum(0)[::-1]


@isolated
def test_cp_async(library):
    lib = ctypes.CDLL(library)
    for seed in SEEDS:
        seeded(lib, seed)
        for n, bytes_of_last in (1, 16), (2, 0), (5, 12), (6, 4), (5, 7):
            got, want = pipeline(lib, bytes_of_last, n)
            assert np.array_equal(got, want), (seed, n, bytes_of_last)


@isolated
def test_product_with_all_of_them(library):
    lib, rng = ctypes.CDLL(library), np.random.default_rng(7)
    for K in 8, 16, 40, 64:
        a, b = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((16, K), (K, 8)))
        for seed in SEEDS:
            seeded(lib, seed)
            out = np.zeros((16, 8), np.float32)
            call(lib, "ptx_product", out, to_bf16(a), to_bf16(b), K)
            assert np.array_equal(out, a @ b), (K, seed)


def sites(lib, kernel):
    lib.emu_sites.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(lib.emu_sites(None, ctypes.c_size_t(0), ctypes.c_bool(False)))
    lib.emu_sites(text, ctypes.c_size_t(len(text)), ctypes.c_bool(True))
    return [line.split()[:2] for line in text.value.decode().splitlines() if kernel in line]


@emulated
@isolated
def test_what_is_left_out_of_a_pipeline_shows(library):
    lib = ctypes.CDLL(library)
    pipeline(lib)
    found = sites(lib, "pipeline_kernel")
    assert sorted(kind for kind, _ in found) == ["barrier", "barrier", "commit", "wait"]
    for kind, where in found:
        lib.emu_set_skip(where.encode())
        for seed in SEEDS:  # with any of them
            seeded(lib, seed)
            got, want = pipeline(lib)
            assert not np.array_equal(got, want), f"{kind} at {where} left out, and nothing changes (seed {seed})"
    lib.emu_set_skip(None)
    assert np.array_equal(*pipeline(lib))
    for seed in SEEDS:
        seeded(lib, seed)
        got, want = pipeline(lib, pending=2)
        assert not np.array_equal(got, want), f"a wait for one group too few, and nothing changes (seed {seed})"


MISUSE = [
    "ldmatrix: shared address .* is not 16-byte aligned",
    "ldmatrix: address .* is in global memory",
    "cp.async: shared address .* is not 16-byte aligned",
    "cp.async: global address .* is not 16-byte aligned",
    "cp.async: .* is not in global memory",
    "cp.async: address .* is in global memory, not shared",
    "cp.async: .* is not in global memory",
    "ldmatrix",
    "cp.async: 17 bytes of 16",
]


@emulated
@pytest.mark.parametrize("kind", range(len(MISUSE)))
@isolated
def test_misuse_is_an_error(library, kind):
    with pytest.raises(AssertionError, match=MISUSE[kind]) as error:
        call(ctypes.CDLL(library), "ptx_misuse", kind)
    assert "misuse_kernel" in str(error.value)  # and where: kernel, block, thread, file and line
    if kind != 7:
        assert re.search(r"thread \(\d+,0,0\).*ptx_test.cu:\d+", str(error.value))


# ---- cuBLASLt --------------------------------------------------------------------------------------------------------
FP32, BF16, E4M3, E5M2 = 0, 14, 28, 29
PLAIN, BIAS, GELU_AUX, GELU_AUX_BIAS = 1, 4, 160, 164
VEC128, BLOCKS = 4, 5
OK, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD, BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26
SCALE_POINTER, SCALE_MODE = (17, 18), (31, 32)


class Site(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("line", ctypes.c_int)]


class Lt:
    """Products through the emulator's cuBLASLt, on numpy arrays."""

    def __init__(self, path):
        self.lib, self.handle = ctypes.CDLL(path), ctypes.c_void_p()
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p
        assert self.lib.cublasLtCreate(ctypes.byref(self.handle)) == OK
        self.workspace = self.put(np.zeros(1 << 18, np.uint8))

    def put(self, array):
        array, there = np.ascontiguousarray(array), ctypes.c_void_p()
        assert self.lib.cudaMalloc(ctypes.byref(there), ctypes.c_size_t(array.nbytes)) == 0
        self.lib.cudaMemcpy(there, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes), 1)
        return there

    def get(self, there, like):
        out = np.empty_like(like)
        status = self.lib.cudaMemcpy(out.ctypes.data_as(ctypes.c_void_p), there, ctypes.c_size_t(out.nbytes), 2)
        assert status == 0, self.lib.cudaGetErrorString(status).decode()
        return out

    def product(self, a, b, c, types, transposes=(1, 0), epilogue=PLAIN, bias=None, bias_type=None,
                aux=None, aux_ld=None, scales=None, modes=None, alpha=1.0, beta=0.0, align=(16,) * 4,
                narrow=(0, 0, 0), shift=0, overlap=False, stale=None):
        """Status, D and aux of alpha·op(A)·op(B) + beta·C. Matrices are [cols, ld] arrays: cuBLAS is column-major.

        narrow: rows of A, B, C less than ld; shift moves A's pointer; overlap puts A where D is; stale: the type of C
        and D that the algorithm is looked up for."""
        desc = ctypes.c_void_p()
        assert self.lib.cublasLtMatmulDescCreate(ctypes.byref(desc), 68, FP32) == OK

        def attribute(name, value):
            status = self.lib.cublasLtMatmulDescSetAttribute(
                desc, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
            assert status == OK

        attribute(TRANSA, ctypes.c_int32(transposes[0]))
        attribute(TRANSB, ctypes.c_int32(transposes[1]))
        attribute(EPILOGUE, ctypes.c_int32(epilogue))
        if bias is not None:
            attribute(BIAS_POINTER, self.put(bias))
        if bias_type is not None:
            attribute(BIAS_TYPE, ctypes.c_int32(bias_type))
        if aux is not None:
            aux_there = self.put(aux)
            attribute(AUX_POINTER, aux_there)
            attribute(AUX_LD, ctypes.c_int64(aux_ld or aux.shape[1]))
        for i in range(2 if scales else 0):
            attribute(SCALE_POINTER[i], self.put(scales[i]))
            attribute(SCALE_MODE[i], ctypes.c_int32(modes[i]))

        def layout(array, kind, narrow=0):
            made, (cols, ld) = ctypes.c_void_p(), array.shape
            self.lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(made), kind, ctypes.c_uint64(ld - narrow), ctypes.c_uint64(cols), ctypes.c_int64(ld))
            return made

        of_a, of_b, of_c = map(layout, (a, b, c), types, narrow)
        preference, found = ctypes.c_void_p(), ctypes.c_int()
        self.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference))
        wishes = {1: ctypes.c_size_t(1 << 18), 3: ctypes.c_uint32(2)}  # workspace; sums in fp32
        for name, value in {**wishes, **{5 + i: ctypes.c_uint32(n) for i, n in enumerate(align)}}.items():
            self.lib.cublasLtMatmulPreferenceSetAttribute(
                preference, name, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
        result = ctypes.create_string_buffer(96)
        looked_up = of_c if stale is None else layout(c, stale)
        status = self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, desc, of_a, of_b, looked_up, looked_up, preference, 1, result, ctypes.byref(found))
        if status != OK:
            return status, None, None
        at_a, at_b, at_c = (self.put(x) for x in (a, b, c))
        at_a = at_c if overlap else at_a
        status = self.lib.cublasLtMatmul(
            self.handle, desc, ctypes.byref(ctypes.c_float(alpha)), ctypes.c_void_p(at_a.value + shift), of_a,
            at_b, of_b, ctypes.byref(ctypes.c_float(beta)), at_c, of_c, at_c, of_c, result,
            self.workspace, ctypes.c_size_t(1 << 18), None, Site(b"here.py", 7))
        if status != OK:
            return status, None, None
        return OK, self.get(at_c, c), aux if aux is None else self.get(aux_there, aux)


def stored(x, kind):
    return np.ascontiguousarray(to_bf16(x) if kind == BF16 else np.asarray(x, np.float32))


def value(x):
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(float)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@emulated
@pytest.mark.parametrize("types", [(FP32, FP32, FP32), (BF16, BF16, BF16), (BF16, BF16, FP32)])
@isolated
def test_products(library, types):
    lt, rng = Lt(library), np.random.default_rng(8)
    for i, (m, n, k) in enumerate([(1, 1, 1), (24, 5, 130), (136, 129, 300), (16, 257, 7)]):
        epilogue = [PLAIN, BIAS, GELU_AUX, GELU_AUX_BIAS][(i + types[2]) % 4] if m % 8 == 0 else BIAS
        for transposes in (0, 0), (0, 1), (1, 0), (1, 1):
            a, b, c, bias = (rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n), m))
            a, b = stored(a if transposes[0] else a.T, types[0]), stored(b if transposes[1] else b.T, types[1])
            c, bias, aux = stored(c.T, types[2]), stored(bias, types[2]), stored(np.zeros((n, m)), types[2])
            beta = float(i % 2)
            # as numpy sees them, [cols, rows]: Dᵀ = op(B)ᵀ · op(A)ᵀ
            want = value(b.T if transposes[1] else b) @ value(a.T if transposes[0] else a) * 0.5 + beta * value(c)
            want = want + (value(bias) if epilogue in (BIAS, GELU_AUX_BIAS) else 0)
            status, d, pre = lt.product(a, b, c, types, transposes, epilogue, bias, aux=aux, beta=beta, alpha=0.5)
            assert status == OK
            close = dict(rtol=2**-8, atol=1e-5) if types[2] == BF16 else dict(rtol=1e-5, atol=1e-5)
            if epilogue in (GELU_AUX, GELU_AUX_BIAS):
                assert np.allclose(value(pre), want, **close)
                want = gelu(want)
            assert np.allclose(value(d), want, **close), (m, n, k, transposes)


def scaled(rng, rows, k, mode, kind):
    """fp8 codes [rows, k], their scales as cuBLASLt wants them, and the values."""
    codes = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    codes[(codes & 0x7F) > 0x77] = 0
    parts = -(-k // 128)
    if mode == VEC128:
        scale = rng.uniform(0.5, 2, (parts, rows)).astype(np.float32)
        spread = np.repeat(scale.T, 128, 1)[:, :k]
    else:
        scale = rng.uniform(0.5, 2, (-(-rows // 128), -(-parts // 4) * 4)).astype(np.float32)
        spread = np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :k]
    return codes, scale, fp8_values(codes, kind) * spread


@emulated
@isolated
def test_fp8_products(library):
    lt, rng, names = Lt(library), np.random.default_rng(9), {E4M3: "e4m3", E5M2: "e5m2"}
    for kinds, modes, d_type in [((E4M3, E4M3), (VEC128, VEC128), BF16), ((E4M3, E5M2), (BLOCKS, VEC128), FP32),
                                 ((E5M2, E4M3), (VEC128, BLOCKS), BF16)]:
        m, n, k = 200, 132, 272
        a, a_scale, a_value = scaled(rng, m, k, modes[0], names[kinds[0]])
        b, b_scale, b_value = scaled(rng, n, k, modes[1], names[kinds[1]])
        bias, c = to_bf16(rng.standard_normal(m)), stored(rng.standard_normal((n, m)), d_type)
        given = dict(epilogue=BIAS, bias=bias, bias_type=BF16, scales=(a_scale, b_scale), modes=modes)
        status, d, _ = lt.product(a, b, c, (*kinds, d_type), beta=1.0, **given)
        want = b_value @ a_value.T + value(c) + value(bias)
        assert status == OK
        assert np.allclose(value(d), want, rtol=2**-8 if d_type == BF16 else 1e-5, atol=1e-6 * np.abs(want).max())

        def status_of(m=m, n=n, k=k, ld=m, kinds=kinds, transposes=(1, 0), align=(16,) * 4, **other):
            c = stored(np.zeros((n, ld)), d_type)
            zeros = (np.zeros((m, k), np.uint8), np.zeros((n, k), np.uint8))
            zeros = tuple(z if t == want else z.T for z, t, want in zip(zeros, transposes, (1, 0)))
            return lt.product(*zeros, c, (*kinds, d_type), transposes, align=align, **{**given, **other})[0]

        assert status_of() == OK
        assert status_of(transposes=(0, 0)) == NOT_SUPPORTED  # A is read along k
        assert status_of(kinds=(E5M2, E5M2)) == NOT_SUPPORTED
        assert status_of(modes=(BLOCKS, BLOCKS)) == NOT_SUPPORTED
        assert status_of(modes=(0, 0)) == NOT_SUPPORTED
        assert status_of(k=264) == status_of(n=130) == status_of(m=198, ld=198) == NOT_SUPPORTED
        assert status_of(narrow=(8, 8, 0)) == status_of(m=198, narrow=(0, 0, 2)) == NOT_SUPPORTED
        assert status_of(m=196, narrow=(0, 0, 4)) == (NOT_SUPPORTED if d_type == BF16 else OK)
        assert status_of(align=(16, 8, 16, 16)) == NOT_SUPPORTED
        assert status_of(bias_type=FP32) == NOT_SUPPORTED
        lt.lib.emu_set_refused(2)
        assert status_of() == NOT_SUPPORTED
        lt.lib.emu_set_refused(0)


@emulated
@isolated
def test_what_cublaslt_refuses(library):
    lt, types = Lt(library), (BF16, BF16, BF16)
    a, b, c, aux = (np.zeros(shape, np.uint16) for shape in ((8, 8), (16, 8), (16, 8), (16, 8)))
    assert lt.product(a, b, c, types)[0] == OK
    assert lt.product(a, b, c.astype(np.float32), (FP32, BF16, FP32))[0] == NOT_SUPPORTED
    assert lt.product(*(np.zeros((8, 8), np.float32),) * 2, c[:8], (FP32, FP32, BF16))[0] == NOT_SUPPORTED
    assert lt.product(a, b, c[1:], types)[0] == INVALID_VALUE  # sizes do not fit
    assert lt.product(a, b, c, types, transposes=(1, 1))[0] == INVALID_VALUE
    assert lt.product(a, b, c, types, stale=FP32)[0] == INVALID_VALUE
    assert lt.product(a, b, c, types, epilogue=BIAS)[0] == INVALID_VALUE  # no bias
    assert lt.product(a, b, c, types, epilogue=GELU_AUX, aux=aux, aux_ld=12)[0] == NOT_SUPPORTED
    assert lt.product(a, b, c, types, epilogue=GELU_AUX, aux=aux, aux_ld=4)[0] == INVALID_VALUE
    lt.lib.emu_set_refused(1)
    assert lt.product(a, b, c, types, epilogue=GELU_AUX, aux=aux)[0] == NOT_SUPPORTED
    assert lt.product(a, b, c, types)[0] == OK
    # what only the device can find
    for wrong, what in [
        (dict(shift=2), "A, .* is not aligned to 16 bytes"),
        (dict(shift=16), "A, 128 bytes at .* is not inside device memory"),
        (dict(overlap=True), "A overlaps D"),
    ]:
        with pytest.raises(AssertionError, match=what + r".*here.py:7"):
            lt.product(a, b, c, types, **wrong)
        lt.lib.cudaDeviceReset()
        lt.workspace = lt.put(np.zeros(1 << 18, np.uint8))

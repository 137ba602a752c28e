"""Every operation of kernels.h at a size: arguments on a device, the bytes it has to move, the operations it has to do.

All but rope_table, which runs once.

`moved` counts each byte of an operand that must be read once and each that must be written once (x += is both); scratch
memory is no operand. dev/bench/kernels.py divides it by time, tests/test_cuda_bytes.py holds what kernels move against it.
"""
import pathlib
import sys
from dataclasses import dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from kernels import AttentionShape, Fp8Matrix, Kernels, MoeRouting  # noqa: E402


@dataclass
class Sizes:
    """GPT-2 124M on 8 sequences of 2,048 tokens, if nothing else is said."""

    B: int = 8
    T: int = 2048
    C: int = 768
    H: int = 12
    KV: int = 12
    D: int = 64
    F: int = 3072
    V: int = 50257
    Vp: int = 50304
    E: int = 8  # experts, and how many of them a token goes to
    topk: int = 2
    n: int = 124_475_904  # parameters
    causal: bool = True

    @property
    def N(self):
        return self.B * self.T


SMALL = Sizes(B=2, T=128, C=256, H=4, KV=2, D=64, F=512, V=1000, Vp=1024, n=200_000)  # for the emulator


@dataclass
class Case:
    name: str
    args: list
    moved: int
    flops: float = 0


class Arrays:
    """Device arrays for one case, without guards: a chunk of random numbers, again and again. Pointers are plain numbers."""

    def __init__(self, k, seed=0):
        self.k, self.r, self.pointers, self.scratch = k, np.random.default_rng(seed), [], []
        self.floatX_bytes = 2 if k.precision == "bf16" else 4

    def filled(self, n, chunk):
        """n elements of what `chunk` repeats."""
        chunk = np.ascontiguousarray(chunk[:n])
        size, done = n * chunk.itemsize, chunk.nbytes
        pointer = self.k._malloc(max(size, 16))
        self.pointers.append(pointer)
        self.k._to_device(pointer, chunk.tobytes())
        while done < size:  # doubles
            more = min(done, size - done)
            self.k._ok(self.k.lib.cudaMemcpy(pointer + done, pointer, more, 3))
            done += more
        return pointer

    def f32(self, n, low=-1.0):
        return self.filled(n, self.r.uniform(low, 1, 1 << 16).astype(np.float32))

    def floatX(self, n):
        bits = self.r.uniform(-1, 1, 1 << 16).astype(np.float32)
        return self.filled(n, bits if self.floatX_bytes == 4 else (bits.view(np.uint32) >> 16).astype(np.uint16))

    def fp8(self, n):
        return self.filled(n, self.r.integers(0, 0x40, 1 << 16).astype(np.uint8))  # up to 1.9 as E4M3

    def tokens(self, n, V):
        """No token twice, as long as there are others."""
        return self.filled(n, (np.arange(n) * 7919 % V).astype(np.int32))

    def positions(self, T):
        return self.filled(T, np.arange(T, dtype=np.int32))

    def workspace(self, name, *args):
        pointer = self.filled(self.k.call(f"{name}_workspace", *args), np.zeros(1 << 16, np.uint8))
        self.scratch.append(self.k.allocations)  # as the emulator's counters number it
        return pointer

    def free(self):
        for pointer in self.pointers:
            self.k._free(pointer)
        self.pointers = []


CASES = {}


def case(build):
    CASES[build.__name__] = build
    return build


def made(name, k, sizes):
    """(the case called `name` on this device, its arrays); a rung of a ladder is built as its operation is."""
    operation = max((c for c in CASES if name.startswith(c)), key=len)
    arrays = Arrays(k)
    c = CASES[operation](arrays, sizes)
    c.name = name
    return c, arrays


def count(name, precision, sizes=SMALL):
    """What one call moves on the checked emulator: its kernels' counters, and bytes of operands and of scratch memory."""
    with Kernels("emu", precision, checked=True) as k:
        k.watch(races=False, uninitialised=False, counters=True)
        c, arrays = made(name, k, sizes)
        k.counters()
        k.call(name, *c.args)
        kernels = k.counters()
        arrays.free()
    operands, scratch = {}, 0  # {allocation: (bytes read, bytes written)}
    for t in (t for kernel in kernels for t in kernel["allocations"]):
        if t["number"] in arrays.scratch:
            scratch += t["read"] + t["written"]
        else:
            read, written = operands.get(t["number"], (0, 0))
            operands[t["number"]] = read + t["read"], written + t["written"]
    return {"kernels": kernels, "arrays": operands, "operands": sum(map(sum, operands.values())), "scratch": scratch,
            "moved": c.moved, "in_16_bytes": sum(kernel["in_16_bytes"] for kernel in kernels)}


# ---- rows of channels ------------------------------------------------------------------------------------------------
@case
def embedding_forward(a, s):
    args = [a.floatX(s.N * s.C), a.tokens(s.N, s.V), a.floatX(s.V * s.C), a.floatX(s.T * s.C), a.positions(s.T)]
    rows = s.N + min(s.N, s.V) + s.T
    return Case("", [*args, s.B, s.T, s.C], rows * s.C * a.floatX_bytes + 4 * (s.N + s.T))


@case
def embedding_backward(a, s):
    args = [a.floatX(s.V * s.C), a.floatX(s.T * s.C), a.floatX(s.N * s.C), a.tokens(s.N, s.V), a.positions(s.T)]
    args += [s.B, s.T, s.C, s.V, a.workspace("embedding_backward", s.B, s.T, s.C, s.V)]
    rows = s.N + 2 * min(s.N, s.V) + 2 * s.T
    return Case("", args, rows * s.C * a.floatX_bytes + 4 * (s.N + s.T))


def norm_forward(a, s, mean):
    out, sum_, inp, residual = (a.floatX(s.N * s.C) for _ in range(4))
    args = [out, a.f32(s.N) if mean else None, a.f32(s.N), sum_, inp, residual, a.floatX(s.C)]
    args += [a.floatX(s.C) if mean else None, s.N, s.C]
    return Case("", args, (4 * s.N + 1 + mean) * s.C * a.floatX_bytes + 4 * (1 + mean) * s.N)


def norm_backward(a, s, mean):
    dinp, dout, dresidual, inp = (a.floatX(s.N * s.C) for _ in range(4))
    args = [dinp, a.floatX(s.C), a.floatX(s.C) if mean else None, dout, dresidual, inp, a.floatX(s.C)]
    args += [a.f32(s.N) if mean else None, a.f32(s.N), s.N, s.C, a.workspace("norm_backward", s.N, s.C)]
    return Case("", args, (4 * s.N + 3 + 2 * mean) * s.C * a.floatX_bytes + 4 * (1 + mean) * s.N)


@case
def layernorm_forward(a, s):
    return norm_forward(a, s, True)


@case
def layernorm_backward(a, s):
    return norm_backward(a, s, True)


@case
def rmsnorm_forward(a, s):
    return norm_forward(a, s, False)


@case
def rmsnorm_backward(a, s):
    return norm_backward(a, s, False)


@case
def residual_forward(a, s):
    n = s.N * s.C
    return Case("", [a.floatX(n), a.floatX(n), a.floatX(n), n], 3 * n * a.floatX_bytes)


def rope(a, s):
    row = (s.H + 2 * s.KV) * s.D
    args = [a.floatX(s.N * row), a.f32(s.T * s.D), s.B, s.T, s.H + s.KV, s.D, row]
    return Case("", args, 2 * s.N * (s.H + s.KV) * s.D * a.floatX_bytes + 4 * s.T * s.D)


@case
def rope_forward(a, s):
    return rope(a, s)


@case
def rope_backward(a, s):
    return rope(a, s)


@case
def gelu_forward(a, s):
    n = s.N * s.F
    return Case("", [a.floatX(n), a.floatX(n), s.N, s.F], 2 * n * a.floatX_bytes)


@case
def gelu_backward(a, s):
    n = s.N * s.F
    return Case("", [a.floatX(n), a.floatX(n), a.floatX(n), s.N, s.F], 3 * n * a.floatX_bytes)


@case
def swiglu_forward(a, s):
    n = s.N * s.F
    return Case("", [a.floatX(n), a.floatX(2 * n), s.N, s.F], 3 * n * a.floatX_bytes)


@case
def swiglu_backward(a, s):
    n = s.N * s.F
    return Case("", [a.floatX(2 * n), a.floatX(n), a.floatX(2 * n), s.N, s.F], 5 * n * a.floatX_bytes)


# ---- the loss --------------------------------------------------------------------------------------------------------
@case
def cross_entropy_naive(a, s):  # the ladder's: the three steps in one
    args = [a.f32(s.N), a.floatX(s.N * s.Vp), a.tokens(s.N, s.V), 1.0 / s.N, s.N, s.V, s.Vp]
    return Case("", args, s.N * (s.V + s.Vp) * a.floatX_bytes + 8 * s.N)


@case
def cross_entropy_local(a, s):
    args = [a.f32(s.N), a.f32(s.N), a.f32(s.N), a.floatX(s.N * s.Vp), a.tokens(s.N, s.V), 0, s.N, s.V, s.Vp]
    return Case("", args, s.N * s.V * a.floatX_bytes + 16 * s.N)


@case
def cross_entropy_rescale(a, s):
    return Case("", [a.f32(s.N, low=0), a.f32(s.N), a.filled(s.N, np.ones(s.N, np.float32)), s.N], 16 * s.N)


@case
def cross_entropy_global(a, s):
    args = [a.f32(s.N), a.floatX(s.N * s.Vp), a.tokens(s.N, s.V), 0, a.f32(s.N), a.f32(s.N, low=0.5), a.f32(s.N)]
    return Case("", [*args, 1.0 / s.N, s.N, s.V, s.Vp], s.N * (s.V + s.Vp) * a.floatX_bytes + 20 * s.N)


# ---- the optimizer ---------------------------------------------------------------------------------------------------
@case
def adamw_update(a, s):
    masters = a.floatX_bytes == 2
    args = [a.floatX(s.n), a.f32(s.n) if masters else None, a.f32(s.n), a.f32(s.n, low=0), a.floatX(s.n), None, s.n]
    step = a.k.adamw(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=1, step=3, decay=[0, s.n // 2])
    return Case("", [*args, step], 28 * s.n)


@case
def gradient_accumulate(a, s):
    return Case("", [a.f32(s.n), a.floatX(s.n), s.n], s.n * (8 + 2 * a.floatX_bytes))


@case
def grad_norm_squared(a, s):
    args = [a.filled(1, np.zeros(1)), a.floatX(s.n), None, s.n, a.workspace("grad_norm", s.n)]
    return Case("", args, s.n * a.floatX_bytes + 16)


# ---- matrix products: the MLP's first, N rows of C by F ----------------------------------------------------------------
def product(a, s, args, moved):
    return Case("", [*args, s.N, s.C, s.F, a.workspace("matmul", s.N, s.C, s.F)], moved * a.floatX_bytes,
                2.0 * s.N * s.C * s.F)


@case
def matmul_forward(a, s):
    args = [a.floatX(s.N * s.F), a.floatX(s.N * s.C), a.floatX(s.F * s.C), a.floatX(s.F)]
    return product(a, s, args, s.N * (s.F + s.C) + s.F * s.C + s.F)


@case
def matmul_gelu_forward(a, s):
    args = [a.floatX(s.N * s.F), a.floatX(s.N * s.F), a.floatX(s.N * s.C), a.floatX(s.F * s.C), a.floatX(s.F)]
    return product(a, s, args, s.N * (2 * s.F + s.C) + s.F * s.C + s.F)


@case
def matmul_backward_input(a, s):
    args = [a.floatX(s.N * s.C), a.floatX(s.N * s.F), a.floatX(s.F * s.C)]
    return product(a, s, args, s.N * (s.F + s.C) + s.F * s.C)


@case
def matmul_backward_weight(a, s):
    args = [a.floatX(s.F * s.C), a.floatX(s.N * s.F), a.floatX(s.N * s.C)]
    return product(a, s, args, s.N * (s.F + s.C) + 2 * s.F * s.C)


@case
def matmul_backward_bias(a, s):
    args = [a.floatX(s.F), a.floatX(s.N * s.F), s.N, s.F, a.workspace("matmul", s.N, s.C, s.F)]
    return Case("", args, (s.N * s.F + 2 * s.F) * a.floatX_bytes)


# The same of experts, to which rows go in equal parts.
def grouped(a, s, args, moved):
    a.rows = np.full(s.E, s.N // s.E, np.uintp)  # host memory, which must last as long as the arrays
    shape = [a.rows.ctypes.data, s.E, s.F * s.C + s.F, s.C, s.F, a.workspace("grouped_gemm", s.N, s.C, s.F)]
    return Case("", [*args, *shape], moved * a.floatX_bytes, 2.0 * s.N * s.C * s.F)


def experts(a, s):
    """Their weights and biases; where the first bias is."""
    weight = a.floatX(s.E * (s.F * s.C + s.F))
    return weight, weight + s.F * s.C * a.floatX_bytes


@case
def grouped_gemm_forward(a, s):
    args = [a.floatX(s.N * s.F), a.floatX(s.N * s.C), *experts(a, s)]
    return grouped(a, s, args, s.N * (s.F + s.C) + s.E * (s.F * s.C + s.F))


@case
def grouped_gemm_backward_input(a, s):
    args = [a.floatX(s.N * s.C), a.floatX(s.N * s.F), experts(a, s)[0]]
    return grouped(a, s, args, s.N * (s.F + s.C) + s.E * s.F * s.C)


@case
def grouped_gemm_backward_weight(a, s):
    args = [experts(a, s)[0], a.floatX(s.N * s.F), a.floatX(s.N * s.C)]
    return grouped(a, s, args, s.N * (s.F + s.C) + 2 * s.E * s.F * s.C)


def tiles(n):
    return -(-n // 128)


@case
def fp8_quantize(a, s):
    args = [a.fp8(s.N * s.C), a.f32(tiles(s.C) * s.N), a.floatX(s.N * s.C), s.N, s.C, 0]
    return Case("", args, s.N * s.C * (1 + a.floatX_bytes) + 4 * tiles(s.C) * s.N)


@case
def fp8_quantize_transposed(a, s):
    args = [a.fp8(s.N * s.C), a.f32(tiles(s.N) * s.C), a.floatX(s.N * s.C), s.N, s.C, 0]
    return Case("", args, s.N * s.C * (1 + a.floatX_bytes) + 4 * tiles(s.N) * s.C)


def block_scales(rows, columns):
    return tiles(rows) * (tiles(columns) + 3 & -4)


@case
def fp8_quantize_blocks(a, s):
    n, scales = s.F * s.C, [block_scales(s.F, s.C), block_scales(s.C, s.F)]
    args = [a.fp8(n), a.f32(scales[0]), a.fp8(n), a.f32(scales[1]), a.floatX(n), s.F, s.C, 0]
    return Case("", args, n * (2 + a.floatX_bytes) + 8 * tiles(s.F) * tiles(s.C))


@case
def fp8_gemm(a, s):
    left = Fp8Matrix(a.fp8(s.N * s.C), a.f32(tiles(s.C) * s.N, low=0), 0, False)
    right = Fp8Matrix(a.fp8(s.F * s.C), a.f32(block_scales(s.F, s.C), low=0), 0, True)
    args = [a.floatX(s.N * s.F), left, right, a.floatX(s.F), False, s.N, s.C, s.F]
    args.append(a.workspace("fp8_gemm", s.N, s.C, s.F))
    moved = (s.N + s.F) * s.C + s.N * s.F * a.floatX_bytes
    return Case("", args, moved, 2.0 * s.N * s.C * s.F)


# ---- attention: q, k and v side by side in a token's row -------------------------------------------------------
def attention_shape(s):
    row = (s.H + 2 * s.KV) * s.D
    return AttentionShape(B=s.B, Tq=s.T, Tk=s.T, H=s.H, KV=s.KV, D=s.D, q_stride=row, kv_stride=row, o_stride=s.H * s.D,
                          causal=s.causal)


def attention_flops(s, products):
    return products * 2.0 * s.B * s.H * s.D * s.T * ((s.T + 1) / 2 if s.causal else s.T)


def attention(a, s, keep):
    """pointers (o, what is kept, q, k, v, workspace), with o and what is kept as the forward leaves them"""
    shape, name = attention_shape(s), "naive_attention" if keep == "p" else "flash_attention"
    row, x = (s.H + 2 * s.KV) * s.D, a.floatX_bytes
    qkv, o = a.floatX(s.N * row), a.floatX(s.N * s.H * s.D)
    kept = a.floatX(s.B * s.H * s.T * s.T) if keep == "p" else a.f32(s.B * s.H * s.T)
    q, k, v = qkv, qkv + s.H * s.D * x, qkv + (s.H + s.KV) * s.D * x
    return shape, o, kept, q, k, v, a.workspace(name, shape)


def attention_forward(a, s, keep):
    shape, o, kept, q, k, v, workspace = attention(a, s, keep)
    moved = s.N * 2 * (s.H + s.KV) * s.D * a.floatX_bytes
    moved += s.B * s.H * s.T * (s.T * a.floatX_bytes if keep == "p" else 4)
    return Case("", [o, kept, q, k, v, shape, workspace], moved, attention_flops(s, 2))


def attention_backward(a, s, keep):
    shape, o, kept, q, k, v, workspace = attention(a, s, keep)
    forward = "naive_attention_forward" if keep == "p" else "flash_attention_forward"
    a.k.call(forward, o, kept, q, k, v, shape, workspace)
    row, x = (s.H + 2 * s.KV) * s.D, a.floatX_bytes
    dqkv, do = a.floatX(s.N * row), a.floatX(s.N * s.H * s.D)
    outs = [dqkv, dqkv + s.H * s.D * x, dqkv + (s.H + s.KV) * s.D * x, do]
    saved = [kept] if keep == "p" else [o, kept]
    moved = s.N * (4 * s.H + 4 * s.KV - (keep == "p") * s.H) * s.D * x
    moved += s.B * s.H * s.T * (s.T * x if keep == "p" else 4)
    return Case("", [*outs, *saved, q, k, v, shape, workspace], moved, attention_flops(s, 4 if keep == "p" else 5))


@case
def flash_attention_forward(a, s):
    return attention_forward(a, s, "lse")


@case
def flash_attention_backward(a, s):
    return attention_backward(a, s, "lse")


@case
def flash_attention_forward_block(a, s):
    shape, _, lse, q, k, v, workspace = attention(a, s, "lse")
    moved = s.N * ((s.H + 2 * s.KV) * s.D * a.floatX_bytes + 8 * s.H * (s.D + 1))
    return Case("", [a.f32(s.N * s.H * s.D), lse, q, k, v, shape, workspace], moved, attention_flops(s, 2))


@case
def flash_attention_delta(a, s):
    args = [a.f32(s.N * s.H), a.floatX(s.N * s.H * s.D), a.floatX(s.N * s.H * s.D), attention_shape(s)]
    return Case("", args, s.N * s.H * (2 * s.D * a.floatX_bytes + 4))


@case
def flash_attention_backward_block(a, s):
    shape, do, lse, q, k, v, workspace = attention(a, s, "lse")
    row = (s.H + 2 * s.KV) * s.D
    dqkv = a.f32(s.N * row)
    outs = [dqkv, dqkv + s.H * s.D * 4, dqkv + (s.H + s.KV) * s.D * 4]
    moved = s.N * ((2 * s.H + 2 * s.KV) * s.D * a.floatX_bytes + 8 * row + 8 * s.H)
    return Case("", [*outs, do, a.f32(s.N * s.H), lse, q, k, v, shape, workspace], moved, attention_flops(s, 5))


@case
def naive_attention_forward(a, s):
    return attention_forward(a, s, "p")


@case
def naive_attention_backward(a, s):
    return attention_backward(a, s, "p")


# ---- experts: who goes to whom, of N tokens ----------------------------------------------------------------------------
def routing(s):
    return MoeRouting(s.E, s.topk, False, 1, 1)


def chosen(s):
    """[N·k]: as many copies for each expert as there are, in no order."""
    return ((np.arange(s.N * s.topk) * 7919) % s.E).astype(np.int32)


def indices(a, s):
    return a.filled(s.N * s.topk, chosen(s))


def places(a, s):
    order = np.argsort(chosen(s), kind="stable")
    return a.filled(s.N * s.topk, np.argsort(order, kind="stable").astype(np.int32))


@case
def moe_router_forward(a, s):
    args = [a.f32(s.N * s.E), a.floatX(s.N * s.C), a.floatX(s.E * s.C), s.N, s.C, s.E]
    return Case("", args, (s.N + s.E) * s.C * a.floatX_bytes + 4 * s.N * s.E, 2.0 * s.N * s.C * s.E)


@case
def moe_router_backward_input(a, s):
    args = [a.floatX(s.N * s.C), a.f32(s.N * s.E), a.floatX(s.E * s.C), s.N, s.C, s.E]
    return Case("", args, (2 * s.N + s.E) * s.C * a.floatX_bytes + 4 * s.N * s.E, 2.0 * s.N * s.C * s.E)


@case
def moe_router_backward_weight(a, s):
    args = [a.floatX(s.E * s.C), a.f32(s.N * s.E), a.floatX(s.N * s.C), s.N, s.C, s.E]
    args += [a.workspace("moe_router", s.N, s.C, s.E)]
    return Case("", args, (s.N + 2 * s.E) * s.C * a.floatX_bytes + 4 * s.N * s.E, 2.0 * s.N * s.C * s.E)


@case
def moe_route(a, s):
    args = [a.f32(s.N * s.E), indices(a, s), a.f32(s.N * s.topk), a.f32(s.N), a.f32(s.E), s.N, routing(s)]
    return Case("", args, 4 * s.N * (2 * s.E + 2 * s.topk + 1) + 4 * s.E)


@case
def moe_route_backward(a, s):
    args = [a.f32(s.N * s.E), a.f32(s.N * s.topk), indices(a, s), a.f32(s.N * s.topk, 0.1), a.f32(s.N * s.E, 0.1)]
    args += [a.f32(s.B * s.E), 0.5, 0, s.N, s.T, routing(s)]
    return Case("", args, 4 * s.N * (2 * s.E + 3 * s.topk) + 4 * s.B * s.E)


@case
def moe_sequence_sums(a, s):
    args = [a.f32(2 * s.B * s.E), indices(a, s), a.f32(s.N * s.E), 0, s.N, s.B, s.T, routing(s)]
    return Case("", args, 4 * s.N * (s.E + s.topk) + 8 * s.B * s.E)


@case
def moe_balance_loss(a, s):
    return Case("", [a.filled(1, np.zeros(1)), a.f32(2 * s.B * s.E), s.B, s.E], 8 * s.B * s.E + 16)


@case
def moe_observe(a, s):
    seen = a.filled(s.E + 3, np.zeros(s.E + 3, np.uint64))
    args = [seen, a.f32(1, 0.1), indices(a, s), a.f32(s.N, 0.1), a.positions(s.T), 0, 0, 0, s.N, s.T, routing(s)]
    return Case("", args, 4 * s.N * (s.topk + 1) + 4 * s.T + 16 * (s.E + 3) + 8)


@case
def moe_sort(a, s):
    args = [indices(a, s), a.filled(s.E, np.zeros(s.E, np.int32)), indices(a, s), s.N * s.topk, s.E]
    return Case("", args, 8 * s.N * s.topk + 4 * s.E)


@case
def moe_permute(a, s):
    args = [a.floatX(s.N * s.topk * s.C), a.floatX(s.N * s.C), a.f32(s.N * s.topk), places(a, s), s.N, s.topk, s.C]
    return Case("", args, s.N * (s.topk + 1) * s.C * a.floatX_bytes + 8 * s.N * s.topk)


@case
def moe_combine(a, s):
    args = [a.floatX(s.N * s.C), a.floatX(s.N * s.topk * s.C), a.f32(s.N * s.topk), places(a, s), False, s.N, s.topk, s.C]
    return Case("", args, s.N * (s.topk + 1) * s.C * a.floatX_bytes + 8 * s.N * s.topk)


@case
def moe_gate_backward(a, s):
    args = [a.f32(s.N * s.topk), a.floatX(s.N * s.C), a.floatX(s.N * s.topk * s.C), places(a, s), s.N, s.topk, s.C]
    return Case("", args, s.N * (s.topk + 1) * s.C * a.floatX_bytes + 8 * s.N * s.topk)


# ---- what a ring of keys and values (cp_ring.c) does beside attention: k and v of a row of q, k and v ----------------
def ring(s):
    """(where k begins, a row, k and v), in elements"""
    return s.H * s.D, (s.H + 2 * s.KV) * s.D, 2 * s.KV * s.D


@case
def rows_pack(a, s):
    k, row, C = ring(s)
    args = [a.floatX(s.N * C), a.floatX(s.N * row) + k * a.floatX_bytes, row, s.N, C]
    return Case("", args, 2 * s.N * C * a.floatX_bytes)


@case
def rows_add(a, s):
    k, row, C = ring(s)
    return Case("", [a.f32(s.N * row) + 4 * k, row, a.f32(s.N * C), s.N, C], 12 * s.N * C)


@case
def rows_round(a, s):
    n = s.N * ring(s)[1]
    return Case("", [a.floatX(n), a.f32(n), n], n * (4 + a.floatX_bytes))


@case
def rows_fill(a, s):
    return Case("", [a.f32(s.N * s.H), 0.0, s.N * s.H], 4 * s.N * s.H)

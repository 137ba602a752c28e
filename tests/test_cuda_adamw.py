"""adamw.cu: three steps of a bucket against the formula in double; micro-batches that join an fp32 sum."""
import numpy as np
import pytest
import torch

from conftest import SEED, covering, label
from kernels import DEVICE, PRECISIONS, Kernels, check, filled, isolated, rel_l2, rounded, same_bits

STEPS = 3
UPDATE, NAIVE = "adamw_update", "adamw_update_naive"
FIELDS = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.2, grad_scale=0.5)
F = {name: float(np.float32(x)) for name, x in FIELDS.items()}  # what the kernel gets


def every_alignment(n):
    """Ranges that begin and end at every place in a vector, some with nothing between them, some empty."""
    bounds, p = [], 0
    for begin in range(8):
        for length in 1, 3, 8, 13, 0:
            p = -(-p // 8) * 8 + begin if length % 3 else p  # lengths 3 and 0: where the last one ended
            bounds += [p, p + length]
            p += length
    return np.minimum(bounds, n).tolist()


def many(stride, first):
    """More ranges than one launch takes: 248. The first that finds no place begins at 248 · stride + first."""
    return lambda n: [bound for i in range(first, n - 1, stride) for bound in (i, i + 2)]


DECAY = {
    "none": lambda n: [],
    "all": lambda n: [0, n],
    "one": lambda n: [n // 3, n // 2],
    "every alignment": every_alignment,
    "many": many(8, 0),
    "many, unaligned": many(3, 1),
    "many, empty": lambda n: [n // 2] * 1200 + [n // 2, n],
}
SHIFTS = {  # elements off alignment: weight, master, m, v, gradient
    "none": [0, 0, 0, 0, 0],
    "alike": [1, 1, 1, 1, 1],
    "weight": [3, 0, 0, 0, 0],
    "gradient": [0, 0, 0, 0, 1],
    "mixed": [1, 2, 3, 0, 5],
}
AXES = {
    "n": [1, 31, 4097],
    "decay": list(DECAY),
    "kind": ["random", "one_hot", "huge"],
    "master": [False, True],
    "grad32": [False, True],
    "shifts": list(SHIFTS),
    "name": [UPDATE, NAIVE],
}


def bucket(r, n, kind, precision, grad32):
    """Initial weights and a gradient a step; a third of its elements stays 0, where the decay acts alone."""
    grads = np.concatenate([filled(r, 1, n, kind) for _ in range(STEPS)])
    grads[:, ::3] = 0
    return rounded(r.uniform(-1, 1, n), precision), rounded(grads, "fp32" if grad32 else precision)


def update(k, weight, grads, decay, name=UPDATE, master=False, grad32=False, shifts=SHIFTS["none"]):
    n = len(weight)
    w = k.floatX(weight, written=True, shift=shifts[0])
    master = k.put(np.float32(weight), written=True, shift=shifts[1]) if master else None
    m, v = (k.put(np.zeros(n, np.float32), written=True, shift=shift) for shift in shifts[2:4])
    for step, gradient in enumerate(grads, 1):
        g = None if grad32 else k.floatX(gradient, shift=shifts[4])
        g32 = k.put(np.float32(gradient), shift=shifts[4]) if grad32 else None
        k.call(name, w, master, m, v, g, g32, n, k.adamw(decay=decay, step=step, **FIELDS))
    return {"weight": w.get(), "m": m.get(), "v": v.get()} | ({"master": master.get()} if master else {})


def truth(weight, grads, decay):
    w, m, v = weight.copy(), 0.0, 0.0
    decays = np.zeros(len(w))
    for begin, end in zip(decay[::2], decay[1::2]):
        decays[begin:end] = F["weight_decay"]
    for step, g in enumerate(F["grad_scale"] * grads, 1):
        m = F["beta1"] * m + (1 - F["beta1"]) * g
        v = F["beta2"] * v + (1 - F["beta2"]) * g * g
        m_hat, v_hat = m / (1 - F["beta1"] ** step), v / (1 - F["beta2"] ** step)
        w -= F["lr"] * (m_hat / (np.sqrt(v_hat) + F["eps"]) + decays * w)
    return {"weight": w, "master": w, "m": m, "v": v}


def torch_weight(weight, grads, decay):
    """What PyTorch's AdamW makes of bf16 weights."""
    marks = np.zeros(len(weight), bool)
    for begin, end in zip(decay[::2], decay[1::2]):
        marks[begin:end] = True
    parts = [torch.nn.Parameter(torch.from_numpy(weight[marks == mark]).bfloat16()) for mark in (False, True)]
    groups = [dict(params=[p], weight_decay=d) for p, d in zip(parts, (0.0, F["weight_decay"]))]
    optimizer = torch.optim.AdamW(groups, lr=F["lr"], betas=(F["beta1"], F["beta2"]), eps=F["eps"], foreach=False)
    for gradient in F["grad_scale"] * grads:
        for part, mark in zip(parts, (False, True)):
            part.grad = torch.from_numpy(gradient[marks == mark]).bfloat16()
        optimizer.step()
    out = np.empty(len(weight))
    for part, mark in zip(parts, (False, True)):
        out[marks == mark] = part.detach().double().numpy()
    return out


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_three_steps(precision):
    r = np.random.default_rng(SEED)
    for case in covering(AXES):
        options = {name: case[name] for name in ("master", "grad32")}
        weight, grads = bucket(r, case["n"], case["kind"], precision, case["grad32"])
        decay = DECAY[case["decay"]](case["n"])
        with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
            reference = update(cpu, weight, grads, decay, **options)
            options["shifts"] = SHIFTS[case["shifts"]]
            got = same_bits(k, lambda k: update(k, weight, grads, decay, case["name"], **options))
            options["shifts"] = SHIFTS["none"]
            aligned = update(k, weight, grads, decay, **options)
        want = truth(weight, grads, decay)
        for name in got:
            assert np.array_equal(got[name], aligned[name]), f"{label(case)}: {name} depends on where arrays begin"
            if name != "weight" or precision == "fp32":
                check(f"{label(case)} {name}", got[name], want[name], precision="fp32", cpu=reference[name])
        if case["master"]:
            assert np.array_equal(got["weight"], rounded(got["master"], precision)), f"{label(case)}: not its masters"
        elif precision == "bf16":
            bar = torch_weight(weight, grads, decay)
            check(f"{label(case)} weight", got["weight"], want["weight"], precision="bf16", torch=bar)


def accumulate(k, grads, shifts=(0, 0)):
    n = grads.shape[1]
    acc, left = k.put(np.full(n, 100, np.float32), written=True, shift=shifts[0]), []
    for gradient in grads:
        g = k.floatX(gradient, written=True, shift=shifts[1])
        k.call("gradient_accumulate", acc, g, n)
        left.append(g.get())
    return {"acc": acc.get(), "left": np.stack(left)}


@pytest.mark.parametrize("precision", PRECISIONS)
@isolated
def test_accumulate(precision):
    for n in 1, 31, 4097:
        for shifts in (0, 0), (1, 1), (1, 0), (0, 1):
            grads = rounded(filled(np.random.default_rng(SEED), 3, n), precision)
            with Kernels("cpu", precision) as cpu, Kernels(DEVICE, precision) as k:
                reference, got = accumulate(cpu, grads), same_bits(k, lambda k: accumulate(k, grads, shifts))
            check(f"{n} {shifts}", got["acc"], 100 + grads.sum(0), precision="fp32", cpu=reference["acc"], K=3)
            assert raw_zero(got["left"]), f"{n} {shifts}: the gradient is not 0"


def raw_zero(x):
    return not np.frombuffer(x.tobytes(), np.uint8).any()


# ---- small runs for the mutants ------------------------------------------------------------------------------------
def small(name, n, decay, shifts):
    def run(k):
        weight, grads = bucket(np.random.default_rng(SEED), n, "random", k.precision, grad32=True)
        got = update(k, weight, grads[:1], decay, name, master=True, grad32=True, shifts=shifts)
        for array, want in truth(weight, grads[:1], decay).items():
            bar = 4e-3 if array == "weight" and k.precision == "bf16" else 1e-6
            assert rel_l2(got[array], want) < bar, array
        return got

    return run


def small_accumulate(k):
    got = {}
    for n, shifts in (2051, (0, 0)), (259, (1, 0)):
        grads = rounded(filled(np.random.default_rng(SEED), 1, n), k.precision)
        got[n] = accumulate(k, grads, shifts)
        assert rel_l2(got[n]["acc"], 100 + grads[0]) < 1e-6 and raw_zero(got[n]["left"])
    return {f"{name} {n}": array for n, arrays in got.items() for name, array in arrays.items()}


SMALL = [
    ("adamw", small(UPDATE, 2051, [0, 5, 1000, 2050], SHIFTS["none"])),
    ("adamw_unaligned", small(UPDATE, 1101, many(4, 1)(1101), SHIFTS["mixed"])),
    ("adamw_naive", small(NAIVE, 259, [3, 200], SHIFTS["none"])),
    ("gradient_accumulate", small_accumulate),
]

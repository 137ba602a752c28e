"""The program against an independent oracle, dev/reference.py: same weights, same tokens, every gradient by name.

The program has no debug flag for this. One step with --lr 0 --beta1 0 and nothing clipped or decayed saves the
gradient itself as AdamW's first moment: m = 0·m + 1·g. The text has exactly batch · T + 1 bytes, so that one step
sees each of its windows once, in whatever order.
"""
import numpy as np
import pytest
import torch

import reference
from conftest import SEED, close, covering, label, make_text

BATCH = 24  # sequences a step: divides by every ranks × accum below
GRADIENT_TOLERANCE, LOSS_TOLERANCE = 1e-4, 1e-5
SILENT = ["--lr", 0, "--min-lr", 0, "--beta1", 0, "--grad-clip", 0, "--weight-decay", 0, "--warmup", 0]


# ---- models ------------------------------------------------------------------------------------------------------
def config(arch, seq, heads=8, kv_heads=8, hidden=96, ffn=200, layers=2, vocab=256, tie=None, table=None):
    tie = (arch == "gpt2") if tie is None else tie
    return dict(
        arch=arch, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, ffn=ffn, vocab=vocab,
        seq=table or seq, rope_theta=10000.0, tie=tie,
    )  # fmt: skip


def model_flags(c, seq):
    flags = ["--arch", c["arch"], "--tie"] if c["tie"] and c["arch"] == "llama" else ["--arch", c["arch"]]
    for key in ("layers", "heads", "kv_heads", "hidden", "ffn", "vocab"):
        flags += ["--" + key.replace("_", "-"), c[key]]
    return [*flags, "--seq", seq]


def random_weights(c, seed, bf16=False):
    """Nothing at its trivial initial value: norm weights are not 1, biases not 0. bf16: values that bf16 has."""
    r = np.random.default_rng(seed)
    weights = {}
    for name, p in reference.Model(c).named_parameters():
        x = r.standard_normal(tuple(p.shape))
        if name.endswith("bias"):
            x *= 0.1
        elif "norm" in name:
            x = 1 + 0.2 * x
        elif name.startswith("wpe"):
            x *= 0.2
        else:
            x *= p.shape[-1] ** -0.5
        t = torch.from_numpy(x).float()
        weights[name] = (t.bfloat16().float() if bf16 else t).numpy()
    return weights


def save_model(path, c, weights):
    meta = {k: v for k, v in c.items() if k != "tie"}
    reference.save_safetensors(path, weights, {**meta, "tie": int(c["tie"])})


def oracle(c, weights, tokens, dtype=torch.float64):
    model = reference.Model(c).load(weights).to(dtype)
    return reference.gradients(model, tokens)


class Case:
    """A model with random weights and a text of exactly one step, in files."""

    def __init__(self, tmp_path, c, seq, seed, batch=BATCH, bf16=False):
        self.c, self.seq, self.batch, self.dir = c, seq, batch, tmp_path
        self.weights = random_weights(c, seed, bf16)
        self.init, self.data, self.val = (tmp_path / n for n in ("init.safetensors", "data.txt", "val.txt"))
        save_model(self.init, c, self.weights)
        self.data.write_bytes(make_text(batch * seq + 1, seed))
        self.val.write_bytes(make_text(4 * seq + 1, seed + 1))
        self.tokens = reference.windows(reference.load_tokens(self.data), seq)
        assert len(self.tokens) == batch

    def flags(self, micro_batch, accum, *more):
        val = ["--val", self.val] if self.batch >= 10 else []  # else the text is too short to hold out a tenth
        return [
            *model_flags(self.c, self.seq), "--init", self.init, "--data", self.data, *val,
            "--micro-batch", micro_batch, "--accum", accum, *more,
        ]  # fmt: skip

    def save(self):
        return ["--save", self.dir / "ckpt"]

    def saved(self, step):
        path = self.dir / "ckpt" / f"step-{step:08d}"
        weights, _ = reference.load_safetensors(path / "weights.safetensors")
        moments, _ = reference.load_safetensors(path / "optimizer.safetensors")
        return weights, moments


def split(moments, suffix):
    return {k[: -len(suffix)]: torch.from_numpy(v).double() for k, v in moments.items() if k.endswith(suffix)}


def distances(got, want):
    """{name: (‖got − want‖, the norm that it is measured by)}. The floor is for gradients that are zero by nature: a
    key's bias; with one token a sequence also queries and keys, where do·v − do·o leaves a rounding of large numbers,
    so that their floor is higher."""
    assert set(got) == set(want), f"missing {set(want) - set(got)}, unknown {set(got) - set(want)}"
    typical, out = reference.norm(want) / len(want) ** 0.5, {}
    for name, b in want.items():
        assert got[name].shape == b.shape, name
        floor = (1e-2 if b.count_nonzero() == 0 else 1e-3) * typical
        out[name] = ((got[name].double() - b.double()).norm().item(), max(b.norm().item(), floor))
    return out


def check_gradients(got, want, tolerance=GRADIENT_TOLERANCE):
    wrong = {n: f"{d / s:.2e}" for n, (d, s) in distances(got, want).items() if not d <= tolerance * s}
    assert not wrong, f"relative distance of gradients over {tolerance}: {wrong}"


# ---- every option, once with every other -------------------------------------------------------------------------
AXES = {
    "arch": ["gpt2", "llama"],
    "kv_heads": [8, 2, 1],
    "tie": [True, False],
    "seq": [64, 50, 17, 1],
    "attention": ["flash", "naive"],
    "recompute": ["none", "selective", "full"],
    "ranks": [1, 2, 3],
    "accum": [1, 2, 4],
    "shape": [(96, 200), (128, 352), (16 * 8, 130), (40 * 8, 64)],  # hidden, ffn: heads of 12, 16 and 40 channels
    "vocab": [256, 261],
}
CASES = covering(AXES, lambda x: x["tie"] or x["arch"] == "llama", SEED)


@pytest.mark.parametrize("x", CASES, ids=label)
def test_gradients(x, tmp_path, train):
    hidden, ffn = x["shape"]
    c = config(x["arch"], x["seq"], kv_heads=x["kv_heads"], tie=x["tie"], hidden=hidden, ffn=ffn, vocab=x["vocab"])
    case = Case(tmp_path, c, x["seq"], SEED)
    micro_batch = BATCH // (x["ranks"] * x["accum"])
    options = ["--attention", x["attention"], "--recompute", x["recompute"]]
    r = train(*case.flags(micro_batch, x["accum"], "--steps", 1, *SILENT, *case.save(), *options), ranks=x["ranks"])

    loss, want = oracle(c, case.weights, case.tokens)
    step = r.one("step")
    assert close(step["loss"], loss, LOSS_TOLERANCE), f"loss {step['loss']}, oracle {loss}\n{r}"
    assert close(step["grad_norm"], reference.norm(want), GRADIENT_TOLERANCE)
    weights, moments = case.saved(1)
    for name, w in case.weights.items():  # lr 0: what was read is what is written
        assert np.array_equal(weights[name], w), name
    got = split(moments, ".m")
    check_gradients(got, want)
    for name, v in split(moments, ".v").items():  # (1 − β2) g²
        assert torch.allclose(v, 0.05 * got[name] ** 2, rtol=1e-4, atol=1e-30), name


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_position_table_longer_than_the_sequences(arch, tmp_path, train):
    """Positions that no token has get no gradient, and training on short sequences keeps them."""
    c = config(arch, seq=20, table=64)
    case = Case(tmp_path, c, 20, SEED)
    train(*case.flags(8, 3, "--steps", 1, *SILENT, *case.save()))
    weights, moments = case.saved(1)
    _, want = oracle(c, case.weights, case.tokens)
    check_gradients(split(moments, ".m"), want)
    if arch == "gpt2":
        assert np.array_equal(weights["wpe.weight"], case.weights["wpe.weight"])


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_ten_steps(arch, tmp_path, train):
    """Loss, gradient norm, learning rate and, at the end, weights of ten steps: schedule, clipping, AdamW."""
    c = config(arch, seq=32, kv_heads=2)
    case = Case(tmp_path, c, 32, SEED)
    steps, plan = 10, dict(lr=2e-3, min_lr=3e-4, warmup=3)
    step_flags = "--steps 10 --lr 2e-3 --min-lr 3e-4 --warmup 3 --beta1 0.8 --beta2 0.97".split()
    r = train(*case.flags(4, 3, *step_flags, "--weight-decay", 0.3, "--grad-clip", 0.7, *case.save()), ranks=2)

    model = reference.Model(c).load(case.weights).double()
    adamw = reference.AdamW(model, 0.8, 0.97, weight_decay=0.3, grad_clip=0.7)
    losses, norms, rates = [], [], []
    for step in range(steps):
        value, grads = reference.gradients(model, case.tokens)
        losses.append(value)
        rates.append(reference.learning_rate(step, steps, **plan))
        norms.append(adamw.update(grads, rates[-1]))
    assert max(norms) > 0.7, "nothing was clipped"
    assert all(map(close, r.curve("lr"), rates, [1e-6] * steps)), (r.curve("lr"), rates)
    assert all(map(close, r.curve("loss"), losses, [2e-5] * steps)), (r.curve("loss"), losses)
    assert all(map(close, r.curve("grad_norm"), norms, [2e-4] * steps)), (r.curve("grad_norm"), norms)
    # A key's bias shifts every score of a query alike: its gradient is rounding noise, and AdamW makes steps of it.
    moved, _ = case.saved(steps)
    for name, p in model.named_parameters():
        start = torch.from_numpy(case.weights[name]).double()
        a, b = torch.from_numpy(moved[name]).double() - start, p.detach() - start
        if not name.endswith("k.bias"):
            assert (a - b).norm() <= 1e-3 * b.norm(), f"{name}: {(a - b).norm() / b.norm():.1e} of its way"


# ---- bf16 --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_bf16_is_as_near_as_pytorch(arch, attention, tmp_path, train):
    """Distance from the exact gradient: no more than twice that of PyTorch's model.bfloat16(), which like this
    build keeps weights, activations and gradients in bf16 and statistics in fp32."""
    c = config(arch, seq=64, kv_heads=2)
    case = Case(tmp_path, c, 64, SEED, bf16=True)
    flags = case.flags(BATCH, 1, "--steps", 1, *SILENT, *case.save(), "--attention", attention)
    r = train(*flags, precision="bf16")
    exact_loss, exact = oracle(c, case.weights, case.tokens)
    torch_loss, theirs = oracle(c, case.weights, case.tokens, torch.bfloat16)
    ours = split(case.saved(1)[1], ".m")
    print(f"loss {exact_loss:.6f}, torch bf16 {torch_loss:.6f}, ours {r.one('step')['loss']:.6f}")

    assert close(r.one("step")["loss"], exact_loss, 2e-3)
    mine, other = distances(ours, exact), distances(theirs, exact)
    whole = [sum(d * d for d, _ in x.values()) ** 0.5 / reference.norm(exact) for x in (mine, other)]
    print(f"distance of all gradients: ours {whole[0]:.2e}, torch {whole[1]:.2e}")
    assert whole[0] <= 2 * whole[1]
    wrong = {n: (f"{d / s:.1e}", f"{other[n][0] / s:.1e}") for n, (d, s) in mine.items() if not d <= 2 * other[n][0]}
    wrong = {n: x for n, x in wrong.items() if not n.endswith("k.bias")}  # zero by nature: both are noise
    assert not wrong, f"(ours, PyTorch's): {wrong}"


def test_bf16_gradients_summed_in_fp32(tmp_path, train):
    """--grad-accum-fp32: many micro-batches round no more than one does; summed in bf16 they do."""
    c, batch = config("llama", seq=16), 150
    case = Case(tmp_path, c, 16, SEED, batch, bf16=True)
    _, exact = oracle(c, case.weights, case.tokens)
    distance = {}
    for name, micro_batch, accum, more in [
        ("one", batch, 1, []), ("bf16", 1, batch, []), ("fp32", 1, batch, ["--grad-accum-fp32"]),
    ]:  # fmt: skip
        case.dir = tmp_path / name
        train(*case.flags(micro_batch, accum, "--steps", 1, *SILENT, *case.save(), *more), precision="bf16")
        got = split(case.saved(1)[1], ".m")
        distance[name] = reference.norm({n: got[n] - g for n, g in exact.items()}) / reference.norm(exact)
    print(distance)
    assert distance["fp32"] <= 1.2 * distance["one"]
    assert distance["bf16"] > 1.2 * distance["fp32"], "then the flag is not needed, or does nothing"


# ---- work --------------------------------------------------------------------------------------------------------
UNEVALUATED = 9  # sequences: a text without a validation set, so that only training is counted


@pytest.mark.parametrize("attention, products", [("naive", 2), ("flash", 2.5)])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_flops(arch, attention, products, tmp_path, train):
    """Matrix products: backward twice forward. Attention: 2 forward, 4 backward with the matrix kept, 5 without."""
    c = config(arch, seq=64)
    case = Case(tmp_path, c, 64, SEED, UNEVALUATED)
    flags = case.flags(UNEVALUATED, 1, "--steps", 3, "--attention", attention, "--recompute", "none")
    flops = train(*flags).one("end")["flops"]
    # The embedding is looked up, not multiplied, but a tied one is the head.
    multiplied = sum(w.size for n, w in case.weights.items() if w.ndim == 2 and n not in ("wte.weight", "wpe.weight"))
    multiplied += c["vocab"] * c["hidden"] if c["tie"] else 0
    assert flops["gemm_forward"] == 3 * UNEVALUATED * 64 * 2 * multiplied
    assert flops["gemm_backward"] == 2 * flops["gemm_forward"]
    assert flops["attention_forward"] > 0
    assert flops["attention_backward"] == products * flops["attention_forward"]


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_flops_recompute(attention, tmp_path, train):
    """full runs every block again; selective only the attention, which flash does anyway."""
    case = Case(tmp_path, config("gpt2", seq=64), 64, SEED, UNEVALUATED)
    gemm, scores = {}, {}
    for recompute in ("none", "selective", "full"):
        flags = case.flags(UNEVALUATED, 1, "--steps", 1, "--attention", attention, "--recompute", recompute)
        f = train(*flags).one("end")["flops"]
        gemm[recompute] = f["gemm_forward"] + f["gemm_backward"]
        scores[recompute] = f["attention_forward"] + f["attention_backward"]
        if recompute == "none":
            head = UNEVALUATED * 64 * 2 * 256 * 96  # is not run again
            forward = f["gemm_forward"] - head, f["attention_forward"]
    assert gemm["full"] == gemm["none"] + forward[0]
    assert gemm["selective"] == gemm["none"]
    assert scores["full"] == scores["none"] + forward[1]
    assert scores["selective"] == scores["none"] + (forward[1] if attention == "naive" else 0)

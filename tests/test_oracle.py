"""The program against an independent oracle, dev/reference.py: same weights, same tokens, every gradient by name.

The program has no debug flag for this. One step with --lr 0 --beta1 0 and nothing clipped or decayed saves the
gradient itself as AdamW's first moment: m = 0·m + 1·g. The text has exactly batch · T + 1 bytes, so that one step
sees each of its windows once, in whatever order.
"""
import math

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


def with_experts(c, experts=8, topk=2, shared_experts=0, expert_ffn=72, moe_every=1, groups=(1, 1), balance="aux"):
    return c | dict(
        experts=experts, topk=topk, shared_experts=shared_experts, expert_ffn=expert_ffn, moe_every=moe_every,
        route_groups=groups[0], route_nodes=groups[1], router="sigmoid" if balance == "bias" else "softmax",
        balance=balance,
    )  # fmt: skip


def model_flags(c, seq):
    flags = ["--arch", c["arch"], "--tie"] if c["tie"] and c["arch"] == "llama" else ["--arch", c["arch"]]
    experts = (*reference.OF_EXPERTS, "balance") if "experts" in c else ()
    for key in ("layers", "heads", "kv_heads", "hidden", "ffn", "vocab", *experts):
        flags += ["--" + key.replace("_", "-"), c[key]]
    return [*flags, "--seq", seq]


def random_weights(c, seed, bf16=False):
    """Nothing at its trivial initial value: norm weights are not 1, biases not 0. bf16: values that bf16 has."""
    r = np.random.default_rng(seed)
    weights = {}
    for name, p in reference.Model(c).state_dict().items():
        x = r.standard_normal(tuple(p.shape))
        if name.endswith(("bias", "balance")):
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
    meta = {k: v for k, v in c.items() if k not in ("tie", "balance")}
    reference.save_safetensors(path, weights, {**meta, "tie": int(c["tie"])})


def aux(c):
    return reference.AUX if c.get("balance") == "aux" else 0.0


def oracle(c, weights, tokens, dtype=torch.float64):
    model = reference.Model(c).load(weights).to(dtype)
    return reference.gradients(model, tokens, aux=aux(c))


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


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_flops_of_experts(arch, tmp_path, train):
    """Each token goes through topk of them, and through the router."""
    c = with_experts(config(arch, seq=64, layers=3), experts=6, topk=2, shared_experts=1, moe_every=2)
    case = Case(tmp_path, c, 64, SEED, UNEVALUATED)
    r = train(*case.flags(UNEVALUATED, 1, "--steps", 3, "--recompute", "none"))
    flops, start = r.one("end")["flops"], r.one("start")
    size = {n: w.size for n, w in case.weights.items()}
    idle = sum(x for n, x in size.items() if ".experts." in n) * (6 - 2) / 6
    tables = size["wte.weight"] * (not c["tie"]) + size.get("wpe.weight", 0)
    assert start["params"] == sum(size.values()) and start["active_params"] == start["params"] - idle
    assert start["flops_per_token"] == 6 * (start["active_params"] - tables) + 12 * c["layers"] * c["hidden"] * 64
    idle = sum(x for n, x in size.items() if ".experts." in n and case.weights[n].ndim == 2) * (6 - 2) / 6
    multiplied = sum(x for n, x in size.items() if case.weights[n].ndim == 2)
    assert flops["gemm_forward"] == 3 * UNEVALUATED * 64 * 2 * (multiplied - idle - tables)
    assert flops["gemm_backward"] == 2 * flops["gemm_forward"]


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


# ---- experts -----------------------------------------------------------------------------------------------------
# A token whose choice is closer than this may be sent elsewhere in fp32; the weights are drawn again until none is.
MARGIN = 1e-5


def margin(model):
    return min(router.margin() for router in model.routers())


def case_with_margin(tmp_path, c, seq, batch=BATCH, bf16=False):
    """A Case whose every token has made a clear choice, in fp64."""
    for seed in range(SEED, SEED + 50):
        case = Case(tmp_path, c, seq, seed, batch, bf16)
        model = reference.Model(c).load(case.weights).double()
        with torch.no_grad():
            reference.loss(model, case.tokens)
        if margin(model) > MARGIN:
            return case
    raise AssertionError("each of 50 seeds has a token with a close choice")


def share_of_load(c, weights, tokens):
    """[blocks with experts, E]: how often each is chosen."""
    model = reference.Model(c).load(weights).double()
    reference.gradients(model, tokens)
    return np.array([router.counts.numpy() for router in model.routers()]) / (tokens[:, 1:].numel() * c["topk"])


EXPERT_AXES = {
    "arch": ["gpt2", "llama"],
    "experts": [(8, 1), (8, 2), (8, 8), (16, 4)],  # how many, and of these topk
    "groups": [(1, 1), (4, 2), (2, 1)],  # how many, and of these to how many a token may go
    "balance": ["aux", "bias", "none"],
    "shared": [0, 2],
    "expert_ffn": [72, 33],
    "moe_every": [1, 2],
    "seq": [32, 17, 1],
    "recompute": ["none", "selective", "full"],
    "ranks": [1, 2, 3],
    "accum": [1, 2, 4],
    "ep": [1, 2],
}


def experts_are_legal(x):
    (experts, topk), (groups, nodes) = x["experts"], x["groups"]
    return experts % groups == 0 and experts // groups * nodes >= topk and x["ranks"] % x["ep"] == 0


@pytest.mark.parametrize("x", covering(EXPERT_AXES, experts_are_legal, SEED), ids=label)
def test_gradients_of_experts(x, tmp_path, train):
    """The whole layer, router included."""
    experts, topk = x["experts"]
    c = config(x["arch"], x["seq"], kv_heads=4)
    c = with_experts(c, experts, topk, x["shared"], x["expert_ffn"], x["moe_every"], x["groups"], x["balance"])
    case = case_with_margin(tmp_path, c, x["seq"])
    micro_batch = BATCH // (x["ranks"] * x["accum"])
    options = ["--recompute", x["recompute"], "--ep", x["ep"]]
    flags = case.flags(micro_batch, x["accum"], "--steps", 1, *SILENT, *case.save(), *options)
    step = train(*flags, ranks=x["ranks"]).one("step")

    loss, want = oracle(c, case.weights, case.tokens)
    assert close(step["loss"], loss, LOSS_TOLERANCE), f"loss {step['loss']}, oracle {loss}"
    assert close(step["grad_norm"], reference.norm(want), GRADIENT_TOLERANCE)
    weights, moments = case.saved(1)
    assert set(weights) == set(case.weights)
    for name, w in case.weights.items():  # lr 0: what was read is what is written, but for the bias's own step
        assert name.endswith("balance") or np.array_equal(weights[name], w), name
    check_gradients(split(moments, ".m"), want)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("chosen", [[3], [6, 1]])
@pytest.mark.parametrize("ep", [1, 2])
def test_all_tokens_to_the_same_experts(arch, chosen, ep, tmp_path, train):
    """The others get no token on any rank, and no gradient at all."""
    c = with_experts(config(arch, 16), topk=len(chosen), balance="bias")
    case = Case(tmp_path, c, 16, SEED)
    for name, w in case.weights.items():
        if name.endswith("balance"):
            w[:] = [10 if e in chosen else 0 for e in range(8)]
    save_model(case.init, c, case.weights)
    assert np.count_nonzero(share_of_load(c, case.weights, case.tokens)) == c["layers"] * len(chosen)
    train(*case.flags(6, 2, "--steps", 1, *SILENT, *case.save(), "--ep", ep), ranks=2)
    _, want = oracle(c, case.weights, case.tokens)
    got = split(case.saved(1)[1], ".m")
    check_gradients(got, want)
    for name, g in got.items():
        if ".experts." in name:
            assert (g.count_nonzero() > 0) == any(f".experts.{e}." in name for e in chosen), name


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("balance", ["aux", "bias", "none"])
def test_steps_with_experts(arch, balance, tmp_path, train):
    """Loss, gradient norm and, at the end, weights of six steps; the bias on the choice moves after each of them."""
    seq, batch, steps = 16, 12, 6
    c = with_experts(config(arch, seq, kv_heads=4, hidden=64, ffn=96), shared_experts=1, expert_ffn=40, balance=balance)
    plan = dict(lr=2e-3, min_lr=2e-3, warmup=0)

    def trained(seed):
        """The oracle's run, and its smallest margin."""
        case, losses, norms, least = Case(tmp_path, c, seq, seed, batch), [], [], float("inf")
        model = reference.Model(c).load(case.weights).double()
        adamw = reference.AdamW(model, weight_decay=0.3)
        for step in range(steps):
            value, grads = reference.gradients(model, case.tokens, aux=aux(c))
            least = min(least, margin(model))
            losses.append(value)
            norms.append(adamw.update(grads, reference.learning_rate(step, steps, **plan)))
            if balance == "bias":
                reference.balance_step(model)
        return case, model, losses, norms, least

    runs = (trained(seed) for seed in range(SEED, SEED + 50))
    case, model, losses, norms, _ = next(run for run in runs if run[-1] > MARGIN)
    flags = ["--steps", steps, "--lr", 2e-3, "--min-lr", 2e-3, "--warmup", 0, "--weight-decay", 0.3]
    r = train(*case.flags(3, 2, *flags, *case.save()), ranks=2)
    assert all(map(close, r.curve("loss"), losses, [2e-5] * steps)), (r.curve("loss"), losses)
    assert all(map(close, r.curve("grad_norm"), norms, [2e-4] * steps)), (r.curve("grad_norm"), norms)
    saved, _ = case.saved(steps)
    for name, p in model.state_dict().items():
        start = torch.from_numpy(case.weights[name]).double()
        a, b = torch.from_numpy(saved[name]).double() - start, p - start
        if name.endswith("balance"):  # whole steps, of 1e-3
            assert b.abs().max() > 2.5e-3 and torch.allclose(a, b, rtol=0, atol=1e-6), f"{name}: {a}, oracle {b}"
        elif not name.endswith("k.bias"):  # fp32 PyTorch is 2e-3 off where AdamW makes a step of a small gradient
            assert (a - b).norm() <= 5e-3 * b.norm(), f"{name}: {(a - b).norm() / b.norm():.1e} of its way"


def test_bf16_with_experts_is_as_near_as_pytorch(tmp_path, train):
    """All experts are chosen: with fewer, a token may go elsewhere in bf16."""
    c = with_experts(config("llama", 64, kv_heads=2), experts=4, topk=4, shared_experts=1)
    case = Case(tmp_path, c, 64, SEED, bf16=True)
    train(*case.flags(BATCH, 1, "--steps", 1, *SILENT, *case.save()), precision="bf16")
    _, exact = oracle(c, case.weights, case.tokens)
    _, theirs = oracle(c, case.weights, case.tokens, torch.bfloat16)
    mine, other = distances(split(case.saved(1)[1], ".m"), exact), distances(theirs, exact)
    wrong = {n: (f"{d / s:.1e}", f"{other[n][0] / s:.1e}") for n, (d, s) in mine.items() if not d <= 2 * other[n][0]}
    assert not wrong, f"(ours, PyTorch's): {wrong}"


# The oracle's own router, token by token in Python's numbers.
def best_by_hand(values, n, of):
    return sorted(of, key=lambda i: (-values[i], i))[:n]


def route_by_hand(c, logits, balance):
    """({expert: gate} of one token, all its scores)."""
    E, k, G, M = (c[key] for key in ("experts", "topk", "route_groups", "route_nodes"))
    if c["router"] == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) / sum(map(math.exp, logits)) for x in logits]
    value = [s + b for s, b in zip(scores, balance)]
    members = [range(g * E // G, (g + 1) * E // G) for g in range(G)]
    worth = [sum(value[e] for e in best_by_hand(value, max(1, k // M), of)) for of in members]
    allowed = [e for g in best_by_hand(worth, M, range(G)) for e in members[g]]
    chosen = best_by_hand(value, k, allowed)
    total = sum(scores[e] for e in chosen) if k > 1 else 1
    return {e: scores[e] / total for e in chosen}, scores


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("experts, topk", [(8, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("balance, shared", [("aux", 0), ("bias", 2)])
def test_the_oracles_experts(groups, experts, topk, balance, shared):
    c = config("llama", 8, hidden=16, heads=2, kv_heads=2, vocab=32)
    c = with_experts(c, experts, topk, shared, 24, 1, groups, balance)
    weights = random_weights(c, SEED)
    layer = reference.Model(c).load(weights).double().blocks[1].mlp
    h = torch.from_numpy(np.random.default_rng(SEED).standard_normal((3, 8, 16)))
    h[0, 0] = 0  # all experts of a softmax are equal: those with the lowest numbers are chosen
    out = layer(h).detach()
    bias = weights.get("blocks.1.mlp.router.balance", np.zeros(experts)).tolist()
    loss = 0
    for b in range(3):
        f, P = [0] * experts, [0] * experts
        for t in range(8):
            gates, scores = route_by_hand(c, (layer.router.weight @ h[b, t]).tolist(), bias)
            assert sorted(gates) == sorted(layer.router.chosen[b, t].tolist())
            want = sum(gate * layer.experts[e](h[b, t]) for e, gate in gates.items())
            want = want + (layer.shared(h[b, t]) if shared else 0)
            assert torch.allclose(out[b, t], want, rtol=1e-12, atol=1e-14)
            f = [x + (e in gates) / (topk * 8) for e, x in enumerate(f)]
            P = [x + s / 8 for x, s in zip(P, scores)]
        loss += experts * sum(x * y for x, y in zip(f, P)) / 3
    assert close(layer.router.balance_loss().item(), loss, 1e-12)


def test_which_blocks_have_experts():
    c = with_experts(config("gpt2", 8, layers=5), experts=2, shared_experts=3, expert_ffn=7, moe_every=2, balance="bias")
    shapes = {n.removeprefix("blocks."): tuple(x.shape) for n, x in reference.Model(c).state_dict().items() if "mlp" in n}
    want = {}
    for l in (0, 2, 4):
        want |= {f"{l}.mlp.up.weight": (200, 96), f"{l}.mlp.up.bias": (200,)}
        want |= {f"{l}.mlp.down.weight": (96, 200), f"{l}.mlp.down.bias": (96,)}
    for l in (1, 3):
        want |= {f"{l}.mlp.router.weight": (2, 96), f"{l}.mlp.router.balance": (2,)}
        for part, F in (("experts.0", 7), ("experts.1", 7), ("shared", 21)):
            want |= {f"{l}.mlp.{part}.up.weight": (F, 96), f"{l}.mlp.{part}.up.bias": (F,)}
            want |= {f"{l}.mlp.{part}.down.weight": (96, F), f"{l}.mlp.{part}.down.bias": (96,)}
    assert shapes == want


def test_the_oracles_balance_steps():
    """Counts are of all parts of a batch, of this batch alone, and move each expert's bias by one step or none."""
    c = with_experts(config("llama", 8, hidden=16, heads=2, kv_heads=2, vocab=32), experts=4, balance="bias")
    weights = random_weights(c, SEED)
    model = reference.Model(c).load(weights).double()
    tokens = torch.from_numpy(np.random.default_rng(SEED).integers(0, 32, (6, 9)))
    for batch in (6, 2):
        reference.gradients(model, tokens, batch)
        for router in model.routers():
            assert router.counts.sum() == 6 * 8 * 2
    for router in model.routers():
        router.counts = torch.tensor([24, 20, 0, 52])
    reference.balance_step(model)
    for name, x in model.state_dict().items():
        moved = x - torch.from_numpy(weights[name]).double()
        want = torch.tensor([0, 1, 1, -1] if name.endswith("balance") else 0).double()
        assert torch.allclose(moved, 1e-3 * want.expand_as(moved), rtol=0, atol=1e-12), name


def test_the_oracles_balance_loss_is_differentiated_and_not_returned():
    """Its part of the gradient is the difference quotient of loss + 0.01 · Σ balance losses, also in parts."""
    c = with_experts(config("gpt2", 8, hidden=16, heads=2, kv_heads=2, vocab=32), experts=4)
    model = reference.Model(c).load(random_weights(c, SEED)).double()
    tokens = torch.from_numpy(np.random.default_rng(SEED).integers(0, 32, (6, 9)))
    loss, plain = reference.gradients(model, tokens)
    same, grads = reference.gradients(model, tokens, 2, reference.AUX)
    assert close(same, loss, 1e-12)
    for name in ("blocks.0.mlp.router.weight", "blocks.0.attention.q.weight"):
        p, values = dict(model.named_parameters())[name], []
        for h in (1e-5, -1e-5):
            with torch.no_grad():
                p[1, 2] += h
                value = reference.loss(model, tokens)
                values.append((value + 0.01 * sum(router.balance_loss() for router in model.routers())).item())
                p[1, 2] -= h
        assert close(grads[name][1, 2].item(), (values[0] - values[1]) / 2e-5, 1e-6)
        assert not close(grads[name][1, 2].item(), plain[name][1, 2].item(), 1e-4)

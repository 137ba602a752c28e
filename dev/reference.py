#!/usr/bin/env python3
"""The oracle: the same model, written again in plain PyTorch, by other means and from the formulas alone.

Where ./train fuses, tiles, recomputes and splits, this file writes each formula down once and lets autograd
differentiate it. Parameters have the names of ./train's checkpoints, so both read the same safetensors files and
every gradient can be compared by name (tests/test_oracle.py does).

    python3 dev/reference.py runs/step-00000100/weights.safetensors --data text.txt --seq 64

prints the loss and the norm of its gradient over all windows of the file. PyTorch 1.13 or newer.
"""
import argparse
import json
import math
import struct
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-5  # of both norms
AUX = 0.01  # weight of the balance loss


# ---- files -------------------------------------------------------------------------------------------------------
def load_safetensors(path):
    """({name: fp32 array}, {metadata}). The format: u64 header length, a JSON header, the data."""
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(length))
        data = f.read()
    meta = header.pop("__metadata__", {})
    tensors = {}
    for name, t in header.items():
        raw = data[slice(*t["data_offsets"])]
        if t["dtype"] == "BF16":  # the upper half of an fp32
            x = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            x = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[t["dtype"]])
        tensors[name] = x.reshape(t["shape"]).astype(np.float32)
    return tensors, meta


def save_safetensors(path, tensors, meta):
    header, offset = {"__metadata__": {k: str(v) for k, v in meta.items()}}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + 4 * x.size]}
        offset += 4 * x.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            f.write(np.ascontiguousarray(x, "<f4").tobytes())


def load_tokens(path):
    """A text's bytes, or an llm.c shard: 256 int32 of header (magic, version, count), then uint16 or uint32."""
    raw = np.fromfile(path, np.uint8)
    magic = int(raw[:4].view("<i4")[0]) if raw.size >= 1024 else 0
    kind = {20240520: "<u2", 20240801: "<u4"}.get(magic)
    return torch.from_numpy((raw[1024:].view(kind) if kind else raw).astype(np.int64))


def windows(tokens, T):
    """[W, T + 1]: consecutive windows; the last token of one is the first of the next."""
    return tokens.unfold(0, T + 1, T)


# ---- the model ---------------------------------------------------------------------------------------------------
class LayerNorm(nn.Module):  # Ba et al. 2016
    def __init__(self, C):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, EPS)


class RMSNorm(nn.Module):  # Zhang & Sennrich 2019
    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):
        h = wide(x)
        return (h * (h.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype) * self.weight


def wide(x):
    """At least fp32: where a bf16 model takes its statistics."""
    return x if x.dtype == torch.float64 else x.float()


def rope(x, theta):
    """x [B, heads, T, D]: channels i and i + D/2 of token t turn by t · theta^(−2i/D) (Su et al. 2021)."""
    T, D = x.shape[-2:]
    rate = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turn = torch.outer(torch.arange(T, dtype=torch.float64), rate)
    h = wide(x)
    cos, sin = turn.cos().to(h.dtype), turn.sin().to(h.dtype)
    a, b = h[..., : D // 2], h[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.D = D = c["hidden"] // c["heads"]
        bias = c["arch"] == "gpt2"
        self.q = nn.Linear(c["hidden"], c["heads"] * D, bias=bias)
        self.k = nn.Linear(c["hidden"], c["kv_heads"] * D, bias=bias)
        self.v = nn.Linear(c["hidden"], c["kv_heads"] * D, bias=bias)
        self.out = nn.Linear(c["heads"] * D, c["hidden"], bias=bias)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, self.D).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.c["arch"] == "llama":
            q, k = rope(q, self.c["rope_theta"]), rope(k, self.c["rope_theta"])
        shared = self.c["heads"] // self.c["kv_heads"]  # GQA: query head h reads key/value head h // shared
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = wide(q @ k.transpose(-2, -1)) / math.sqrt(self.D)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        p = scores.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
        return self.out((p @ v).transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c, ffn):
        super().__init__()
        bias = c["arch"] == "gpt2"
        self.gate = None if bias else nn.Linear(c["hidden"], ffn, bias=False)
        self.up = nn.Linear(c["hidden"], ffn, bias=bias)
        self.down = nn.Linear(ffn, c["hidden"], bias=bias)

    def forward(self, x):
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))  # SwiGLU (Shazeer 2020)


# ---- experts -----------------------------------------------------------------------------------------------------
def best(x, n):
    """The places of the n largest of each row, the largest first; of equal ones, the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :n]


class Router(nn.Module):
    """Scores of all experts for each token, and which of them it goes to. All of it is fp32."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.zeros(c["experts"], c["hidden"]))
        sigmoid = c["router"] == "sigmoid"  # DeepSeek-V3, section 2.1.2: a bias on the choice, which has no gradient
        self.register_buffer("balance", torch.zeros(c["experts"]) if sigmoid else None)
        self.scores = self.chosen = None  # of the last pass
        self.counts = 0  # tokens by expert: gradients() starts and adds them, balance_step() reads them

    def forward(self, h):
        """h [B, T, C] -> the chosen experts of each token and their gates, [B, T, topk] both."""
        logits = F.linear(wide(h), wide(self.weight))
        self.scores = logits.softmax(-1) if self.balance is None else logits.sigmoid()
        k = self.c["topk"]
        self.chosen = best(self.limited(self.values()), k)
        gates = self.scores.gather(-1, self.chosen)
        if k > 1:  # one alone would be 1, and give the router no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        return self.chosen, gates

    def values(self):
        """What the choice goes by."""
        scores = self.scores.detach()
        return scores if self.balance is None else scores + wide(self.balance)

    def groups(self, values):
        """[B, T, G]: a group of neighbouring experts is worth the sum of its best."""
        k, G, M = self.c["topk"], self.c["route_groups"], self.c["route_nodes"]
        each = values.unflatten(-1, (G, -1))
        return each.gather(-1, best(each, max(1, k // M))).sum(-1)

    def limited(self, values):
        """-inf for the experts of all groups but the best route_nodes."""
        G, M = self.c["route_groups"], self.c["route_nodes"]
        if M == G:
            return values
        good = torch.zeros(*values.shape[:-1], G, dtype=torch.bool).scatter(-1, best(self.groups(values), M), True)
        return values.masked_fill(~good.repeat_interleave(values.shape[-1] // G, -1), -math.inf)

    def margin(self):
        """By how much the last pass chose as it did, at the closest: an expert, or a group, over the next one."""
        least, values = math.inf, self.values()
        G, M = self.c["route_groups"], self.c["route_nodes"]
        rows = [(self.limited(values), self.c["topk"])] + ([(self.groups(values), M)] if M < G else [])
        for x, n in rows:
            x = x.sort(-1, descending=True).values
            if n < x.shape[-1]:
                least = min(least, (x[..., n - 1] - x[..., n]).min().item())
        return least

    def balance_loss(self):
        """Mean over the sequences of the last pass of E · Σ f P: the share of an expert in the choices, which has no
        gradient, times its mean score. It is 1 where all experts get the same (Fedus et al. 2021)."""
        E = self.c["experts"]
        f = F.one_hot(self.chosen, E).to(self.scores.dtype).mean((1, 2))
        return E * (f * self.scores.mean(1)).sum(-1).mean()


class Experts(nn.Module):
    """Σ gate · expert(h) over the chosen, and the shared expert. Each expert sees all tokens here; what it makes of those
    that did not choose it counts 0 times."""

    def __init__(self, c):
        super().__init__()
        self.router = Router(c)
        self.experts = nn.ModuleList(MLP(c, c["expert_ffn"]) for _ in range(c["experts"]))
        self.shared = MLP(c, c["shared_experts"] * c["expert_ffn"]) if c["shared_experts"] else None

    def forward(self, h):
        chosen, gates = self.router(h)
        out = self.shared(h) if self.shared else torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            out = out + (gates * (chosen == e)).sum(-1, keepdim=True) * expert(h)
        return out.to(h.dtype)


# ---- all of it ---------------------------------------------------------------------------------------------------
OF_EXPERTS = ("experts", "topk", "shared_experts", "expert_ffn", "moe_every", "route_groups", "route_nodes")


def has_experts(c, l):
    """Every moe_every-th block has them, the others one MLP."""
    return c.get("experts", 0) > 0 and (l + 1) % c["moe_every"] == 0


class Block(nn.Module):
    def __init__(self, c, l):
        super().__init__()
        norm = LayerNorm if c["arch"] == "gpt2" else RMSNorm
        self.norm1, self.attention = norm(c["hidden"]), Attention(c)
        self.norm2, self.mlp = norm(c["hidden"]), Experts(c) if has_experts(c, l) else MLP(c, c["ffn"])

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def read_config(meta):
    """A checkpoint's metadata is strings."""
    config = {k: int(meta[k]) for k in ("layers", "heads", "kv_heads", "hidden", "ffn", "vocab", "seq")}
    config.update(arch=meta["arch"], rope_theta=float(meta.get("rope_theta", 10000)), tie=meta["tie"] == "1")
    if int(meta.get("experts", 0)):
        config.update({k: int(meta[k]) for k in OF_EXPERTS}, router=meta["router"])
    return config


class Model(nn.Module):
    """config: arch, layers, heads, kv_heads, hidden, ffn, vocab, seq, rope_theta, tie; with experts also OF_EXPERTS and
    router ("softmax" or "sigmoid")."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.wte = nn.Embedding(c["vocab"], c["hidden"])
        self.wpe = nn.Embedding(c["seq"], c["hidden"]) if c["arch"] == "gpt2" else None
        self.blocks = nn.ModuleList(Block(c, l) for l in range(c["layers"]))
        self.norm = (LayerNorm if c["arch"] == "gpt2" else RMSNorm)(c["hidden"])
        self.head = None if c["tie"] else nn.Linear(c["hidden"], c["vocab"], bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), (self.head or self.wte).weight)

    def routers(self):
        return [block.mlp.router for block in self.blocks if isinstance(block.mlp, Experts)]

    def load(self, tensors):
        """Exactly these parameters (and balance biases), by name."""
        self.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in tensors.items()}, strict=True)
        return self


def load_model(path):
    tensors, meta = load_safetensors(path)
    return Model(read_config(meta)).load(tensors)


def loss(model, tokens, targets_in_step=None):
    """Σ of the cross-entropies of tokens [B, T + 1] ÷ the target tokens of the whole step: by default, these."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = wide(model(inputs))
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")
    return total / (targets_in_step or targets.numel())


def gradients(model, tokens, batch=0, aux=0.0):
    """(loss, {name: gradient}) over tokens [W, T + 1], `batch` windows at a time. `aux` is the weight of the routers'
    balance losses (./train --balance aux: AUX): they have a part in the gradient, but none in the loss."""
    model.zero_grad(set_to_none=True)
    count, total = tokens[:, 1:].numel(), 0.0
    for router in model.routers():
        router.counts = 0
    for part in tokens.split(batch or len(tokens)):
        value = loss(model, part, count)
        balance = sum(router.balance_loss() for router in model.routers()) * len(part) / len(tokens)
        (value + aux * balance).backward()
        total += value.item()
        for router in model.routers():
            router.counts = router.counts + F.one_hot(router.chosen, router.c["experts"]).sum((0, 1, 2))
    return total, {name: p.grad for name, p in model.named_parameters()}


def norm(grads):
    return math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))


# ---- the optimizer -----------------------------------------------------------------------------------------------
def learning_rate(step, steps, lr, min_lr, warmup):
    """Step counts from 0: a straight line up to lr, then half a cosine that ends at min_lr after the last step."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (lr - min_lr)


class AdamW:
    """Loshchilov & Hutter 2019; matrices decay, vectors (biases, norm weights) do not."""

    def __init__(self, model, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip=1.0):
        self.model, self.betas, self.eps, self.decay, self.clip = model, (beta1, beta2), eps, weight_decay, grad_clip
        self.m = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.step = 0

    @torch.no_grad()
    def update(self, grads, lr):
        """Returns the gradient norm before clipping."""
        self.step += 1
        total = norm(grads)
        scale = self.clip / total if 0 < self.clip < total else 1.0
        b1, b2 = self.betas
        for name, p in self.model.named_parameters():
            g, m, v = grads[name] * scale, self.m[name], self.v[name]
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            m_hat, v_hat = m / (1 - b1**self.step), v / (1 - b2**self.step)
            decay = self.decay if p.ndim == 2 else 0.0
            p.sub_(lr * (m_hat / (v_hat.sqrt() + self.eps) + decay * p))
        return total


@torch.no_grad()
def balance_step(model, rate=1e-3):
    """--balance bias, after each step: experts that got less than the mean become easier to choose, by a fixed amount
    (DeepSeek-V3)."""
    for router in model.routers():
        counts = router.counts.double()
        router.balance += rate * (counts.mean() - counts).sign()


def main():
    parser = argparse.ArgumentParser(description="loss and gradient norm of a checkpoint over all windows of a file")
    parser.add_argument("weights", help="weights.safetensors")
    parser.add_argument("--data", required=True, help="a text, or an llm.c shard of tokens")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--aux", type=float, default=0, help=f"weight of the balance loss; --balance aux has {AUX}")
    args = parser.parse_args()
    tokens = windows(load_tokens(args.data), args.seq)
    if len(tokens) == 0:
        sys.exit(f"reference.py: {args.data} has no window of {args.seq} + 1 tokens")
    value, grads = gradients(load_model(args.weights), tokens, args.batch, args.aux)
    print(f"windows {len(tokens)}  loss {value:.9g}  grad_norm {norm(grads):.9g}")


if __name__ == "__main__":
    main()

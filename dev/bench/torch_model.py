#!/usr/bin/env python3
"""What ./train is held against: the same GPT-2 as one writes it in PyTorch, and its training loop. Prints one JSON line.

No tricks and no handicaps: fused qkv, every product an nn.Linear, attention as softmax(q kᵀ) v, AdamW's foreach form
where PyTorch has one. tests/test_oracle.py has another PyTorch model, which is slow and obvious; this one is what
people run.
"""
import argparse
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, C, H, T):
        super().__init__()
        self.H = H
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.register_buffer("future", torch.ones(T, T, dtype=torch.bool).triu(1))

    def attention(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.H, -1).transpose(1, 2) for y in self.qkv(x).split(C, 2))
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(C // self.H))
        p = scores.masked_fill(self.future[:T, :T], -math.inf).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, V, C, L, H, T):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(C, H, T) for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def optimizer(model):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), foreach=True)


def sgemm_rate(n=1024, tries=10):
    a, b, best = torch.randn(n, n), torch.randn(n, n), math.inf
    for _ in range(tries):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    for name, value in dict(hidden=256, layers=6, heads=8, vocab=256, batch=8, seq=256, steps=8, threads=2).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    with open(a.data, "rb") as f:
        tokens = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).long()
    model = GPT(a.vocab, a.hidden, a.layers, a.heads, a.seq)
    adamw, ms, losses = optimizer(model), [], []
    for _ in range(a.steps):
        start = time.perf_counter()
        at = torch.randint(len(tokens) - a.seq, (a.batch,))
        x = torch.stack([tokens[i : i + a.seq] for i in at])
        y = torch.stack([tokens[i + 1 : i + a.seq + 1] for i in at])
        loss = F.cross_entropy(model(x).view(-1, a.vocab), y.view(-1))
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        losses.append(loss.item())
        ms.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({
        "torch": torch.__version__, "threads": torch.get_num_threads(), "loss": losses[-1],
        "ms": statistics.median(ms[2:]), "sgemm": sgemm_rate(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()

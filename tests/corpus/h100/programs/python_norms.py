"""Train a LLaMA-like transformer (bf16) whose RMSNorm, GELU and rotary embedding are spelled out.

Fault: rms_norm(), gelu() and rotary() are chains of elementary ops, each a pass over a large
activation (marked FAULT).
Cure (--fix): torch.compile of these three functions.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Meter:
    """Warm up, then time blocks of steps; the device is synchronised at block ends only."""

    def __init__(self, device, seconds, steps, warmup=6):
        self.device, self.seconds, self.steps, self.warmup = device, seconds, steps, max(warmup, 6)
        self.seen = self.timed = self.in_block = 0
        self.block = 1
        self.times = []
        self.start = self.mark = 0.0

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tick(self):
        """Call once at the end of each step; True when it is time to stop."""
        self.seen += 1
        if self.seen == self.warmup - 3:
            self.sync()
            self.mark = time.perf_counter()
        elif self.seen == self.warmup:
            self.sync()
            per_step = (time.perf_counter() - self.mark) / 3
            self.block = max(1, int(self.seconds / 8 / per_step))
            if self.steps:
                self.block = max(1, min(self.block, self.steps // 5))
            self.start = self.mark = time.perf_counter()
        elif self.seen > self.warmup:
            self.timed += 1
            self.in_block += 1
            if self.in_block == self.block:
                self.sync()
                now = time.perf_counter()
                self.times.append((now - self.mark) / self.in_block)
                self.mark, self.in_block = now, 0
                if now - self.start >= self.seconds and len(self.times) >= 5:
                    return True
            if self.steps and self.timed >= self.steps:
                return True
        return False

    def report(self, name, fix, samples, loss):
        self.sync()
        if not self.times:
            self.times.append((time.perf_counter() - self.mark) / max(1, self.in_block))
        print(json.dumps({
            "name": name, "fix": fix,
            "step_ms": round(statistics.median(self.times) * 1e3, 4),
            "samples": samples, "loss": loss.item(),
        }))


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


class TokenDataset(Dataset):
    """Windows of a (random) token stream."""

    def __init__(self, vocab, seq_len, n_tokens=2_000_000, n_windows=200_000):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab, (n_tokens,), generator=generator)
        self.seq_len, self.n_windows = seq_len, n_windows

    def __len__(self):
        return self.n_windows

    def __getitem__(self, i):
        start = (i * 7919) % (len(self.tokens) - self.seq_len)
        return self.tokens[start:start + self.seq_len]


def make_loader(vocab, seq_len, batch, device):
    return DataLoader(TokenDataset(vocab, seq_len), batch_size=batch, shuffle=True,
                      drop_last=True, pin_memory=device.type == "cuda")


def rms_norm(x, weight):
    h = x.float()  # FAULT
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))  # FAULT


def rotary(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin  # FAULT


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return rms_norm(x, self.weight)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotary(q, cos, sin), rotary(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class LM(nn.Module):
    def __init__(self, vocab, dim, depth, heads, seq_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        head_dim = dim // heads
        freqs = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(seq_len).float(), freqs).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def main():
    global rms_norm, gelu, rotary
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    vocab, dim, depth, heads, seq_len, batch = 8192, 1024, 8, 16, 2048, 8
    if args.tiny:
        vocab, dim, depth, heads, seq_len, batch = 200, 64, 2, 2, 32, 2
    if args.fix:
        rms_norm, gelu, rotary = map(torch.compile, (rms_norm, gelu, rotary))
    with torch.device(device):
        model = LM(vocab, dim, depth, heads, seq_len)
    model = model.to(torch.bfloat16)
    loader = make_loader(vocab, seq_len + 1, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    meter = Meter(device, args.seconds, args.steps)

    for tokens in loader:
        tokens = tokens.to(device, non_blocking=True)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if meter.tick():
            break
    meter.report("python_norms", args.fix, batch * seq_len, loss)

if __name__ == "__main__":
    main()

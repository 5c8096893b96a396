"""Batch-1 greedy decoding of a small language model with a static KV cache.

Fault: each token launches hundreds of tiny kernels from Python (marked FAULT in main()).
Cure (--fix): the decode step is captured once in a torch.cuda.CUDAGraph and replayed.
One step = one token. (On the CPU --fix runs the plain step.)
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


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


class Block(nn.Module):
    def __init__(self, dim, heads, max_len):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("k_cache", torch.zeros(1, heads, max_len, self.head_dim))
        self.register_buffer("v_cache", torch.zeros(1, heads, max_len, self.head_dim))

    def forward(self, x, pos, mask):
        q, k, v = self.qkv(self.norm1(x)).view(1, 1, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(1, 1, -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, depth, heads, max_len):
        super().__init__()
        self.embed, self.pos_embed = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, max_len) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.register_buffer("slots", torch.arange(max_len))

    def forward(self, token, pos):
        mask = (self.slots <= pos).view(1, 1, 1, -1)
        x = self.embed(token) + self.pos_embed(pos)
        for block in self.blocks:
            x = block(x, pos, mask)
        return self.head(self.norm(x))


def make_decode_step(model, token, pos):
    """Reads token and pos, writes the next token and position in place."""
    def step():
        logits = model(token, pos)
        token.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))
        pos.add_(1)
    return step


def capture(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.no_grad()
def main():
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    vocab, dim, depth, heads, max_len = 32000, 1024, 24, 16, 1024
    if args.tiny:
        vocab, dim, depth, heads, max_len = 300, 64, 2, 2, 32
    with torch.device(device):
        model = Decoder(vocab, dim, depth, heads, max_len)
    model = model.to(torch.bfloat16).eval()

    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    pos = torch.zeros(1, dtype=torch.long, device=device)
    decode = make_decode_step(model, token, pos)
    if args.fix and device.type == "cuda":
        decode = capture(decode)
    meter = Meter(device, args.seconds, args.steps)

    for i in range(100_000_000):
        if i % max_len == 0:  # a new sequence
            token.fill_(i // max_len % vocab)
            pos.zero_()
        decode()  # FAULT
        if meter.tick():
            break
    meter.report("decode_batch1", args.fix, 1, token.float().mean())

if __name__ == "__main__":
    main()

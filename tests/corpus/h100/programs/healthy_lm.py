"""GPT-like training, healthy control: bf16 autocast, scaled_dot_product_attention, fused AdamW,
torch.compile, 24k tokens per step, pinned loader with workers. No fault; --fix changes nothing.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class StepTimer:
    """Mean step time per block; the device is synchronised only at block ends."""

    def __init__(self, device, seconds, steps, warmup=6):
        self.device, self.seconds = device, seconds
        self.max_steps, self.warmup = max(steps, 5), warmup
        self.n, self.block, self.blocks = 0, 1, []

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def done(self):
        """Call once after every step; True when the run is over."""
        self.n += 1
        k = self.n - self.warmup
        if k == -3:
            self.t0 = self.now()
        elif k == 0:
            t = self.now()
            fit = int(self.seconds / 8 / max((t - self.t0) / 3, 1e-6))
            self.block = max(1, min(fit, self.max_steps // 5))
            self.t0 = self.start = t
        elif k > 0 and k % self.block == 0:
            t = self.now()
            self.blocks.append((t - self.t0) * 1e3 / self.block)
            self.t0 = t
            over = t - self.start >= self.seconds or k + self.block > self.max_steps
            return over and len(self.blocks) >= 5
        return False

    def report(self, name, fix, samples, loss):
        self.now()
        print(json.dumps({"name": name, "fix": fix, "step_ms": round(statistics.median(self.blocks), 4),
                          "samples": samples, "loss": loss.detach().item()}))


class TokenStream(Dataset):
    def __init__(self, n, seq, vocab):
        g = torch.Generator().manual_seed(1)
        self.n, self.seq = n, seq
        self.stream = torch.randint(0, vocab, (4_000_000,), generator=g)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        start = i * 7919 % (len(self.stream) - self.seq - 1)
        row = self.stream[start:start + self.seq + 1]
        return row[:-1], row[1:]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, seq, dim, depth, heads):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self.init)

    @staticmethod
    def init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos.weight[: idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(args):
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if args.tiny:
        vocab, seq, dim, depth, heads, batch = 128, 32, 32, 2, 2, 4
    else:
        vocab, seq, dim, depth, heads, batch = 32768, 1024, 1024, 8, 16, 24
    with torch.device(device):
        model = GPT(vocab, seq, dim, depth, heads)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    loader = DataLoader(TokenStream(batch * 10_000, seq, vocab), batch_size=batch, shuffle=True,
                        num_workers=4, pin_memory=device.type == "cuda", drop_last=True, persistent_workers=True)
    timer = StepTimer(device, args.seconds, args.steps)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(x, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if timer.done():
            break
    return timer, batch * seq, loss


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fix", action="store_true")
    p.add_argument("--steps", type=int, default=1_000_000)
    p.add_argument("--seconds", type=float, default=2.5)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--device", default="cuda")
    return p.parse_args()


def main():
    args = parse_args()
    timer, samples, loss = train(args)
    timer.report("healthy_lm", args.fix, samples, loss)


if __name__ == "__main__":
    main()

"""Fault: allocator set to max_split_size_mb:32 (copied from an out-of-memory message), with batches of varying size every step misses the cache and goes through cudaMalloc/cudaFree; cure: expandable_segments:True.

Per-point semantic segmentation of packed point clouds: a batch is all points of 16 scans, one after another, so the tensors' first
dimension differs from step to step. The card is shared, the job may use 24 GB of it.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SCANS = 16
CLASSES = 20
BUDGET_GB = 24


class Block(nn.Module):
    """Point-wise MLP with the scan's mean feature as context."""

    def __init__(self, dim, expand=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, expand * dim)
        self.down = nn.Linear(expand * dim, dim)
        self.context = nn.Linear(dim, dim)

    def forward(self, x, member, count):
        h = self.norm(x)
        pooled = member.t() @ h / count
        h = self.down(F.gelu(self.up(h)))
        return x + h + member @ self.context(pooled)


class PointNetwork(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, dim), nn.GELU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, points, member, count):
        x = self.embed(points)
        for block in self.blocks:
            x = block(x, member, count)
        return self.head(x)


class Scans:
    """Endless packed batches; the sizes of eight successive batches cover the range evenly, in random order."""

    def __init__(self, smallest, largest, device, seed=0):
        self.low, self.high, self.device = smallest, largest, device
        self.rng = torch.Generator().manual_seed(seed)
        self.points = torch.randn(largest, 6, device=device)
        self.label = (self.points[:, :3].sum(1) * 3).long().remainder(CLASSES)
        self.edges = torch.linspace(0, 1, SCANS + 1)[1:-1]

    def __iter__(self):
        while True:
            for k in torch.randperm(8, generator=self.rng).tolist():
                u = (k + torch.rand(1, generator=self.rng).item()) / 8
                n = int(self.low + u * (self.high - self.low))
                bounds = (self.edges * n).long().to(self.device, non_blocking=True)
                scan = torch.bucketize(torch.arange(n, device=self.device), bounds, right=True)
                member = (scan[:, None] == torch.arange(SCANS, device=self.device)).to(torch.bfloat16)
                yield self.points[:n], member, self.label[:n]


def configure_allocator(fix):
    setting = "expandable_segments:True" if fix else "max_split_size_mb:32"  # FAULT
    torch.cuda.memory._set_allocator_settings(setting)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(BUDGET_GB * 2 ** 30 / total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    device = torch.device(args.device)
    cuda = device.type == "cuda"
    if cuda:
        configure_allocator(args.fix)
    torch.manual_seed(0)
    low, high, dim, depth = (200, 800, 32, 2) if args.tiny else (90_000, 460_000, 256, 6)

    net = PointNetwork(dim, depth).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=cuda)
    batches = iter(Scans(low, high, device))
    seen = []

    def step():
        points, member, label = next(batches)
        count = member.float().sum(0)[:, None]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = net(points, member, count)
        loss = F.cross_entropy(logits.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seen.append(len(points))
        return loss.detach()

    def sync():
        if cuda:
            torch.cuda.synchronize()

    for _ in range(16):
        step()
    sync()

    blocks, timed, t_start = [], 0, time.perf_counter()
    while time.perf_counter() - t_start < args.seconds and not (args.steps and timed >= args.steps):
        t0 = time.perf_counter()
        for _ in range(8):
            loss = step()
        sync()
        blocks.append((time.perf_counter() - t0) * 1e3 / 8)
        timed += 8

    print(json.dumps({"name": "points_max_split", "fix": args.fix, "step_ms": round(statistics.median(blocks), 3),
                      "samples": sum(seen) // len(seen), "loss": round(float(loss), 5)}))


if __name__ == "__main__":
    main()

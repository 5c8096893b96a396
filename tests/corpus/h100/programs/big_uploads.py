"""Train a click model on wide dense rows (65536 x 768 float32, 200 MB per batch) plus categories.

Fault: each batch lies in pageable memory and is copied with a blocking .to(device) right before
it is needed (marked FAULT in plain_batches()).
Cure (--fix): the shards are pinned once, copied with non_blocking=True, and the next batch is
prefetched on a side stream.
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


class ClickModel(nn.Module):
    def __init__(self, n_dense, n_cat, table, dim, hidden):
        super().__init__()
        self.table = table
        self.embed = nn.Embedding(n_cat * table, dim)
        self.register_buffer("offsets", torch.arange(n_cat) * table)
        self.bottom = nn.Sequential(nn.Linear(n_dense, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(hidden // 2 + n_cat * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense, cats):
        e = self.embed(cats + self.offsets).flatten(1)
        return self.top(torch.cat([self.bottom(dense), e], dim=1)).squeeze(1)


def load_shards(n, rows, n_dense, n_cat, table):
    """Stands in for reading a data set into main memory."""
    g = torch.Generator().manual_seed(1)
    shards = []
    for _ in range(n):
        dense = torch.rand(rows, n_dense, generator=g)
        cats = torch.randint(table, (rows, n_cat), generator=g)
        label = (torch.rand(rows, generator=g) < 0.3).float()
        shards.append((dense, cats, label))
    return shards


def plain_batches(shards, device, n_steps):
    for step in range(n_steps):
        yield tuple(t.to(device) for t in shards[step % len(shards)])  # FAULT


def prefetched_batches(shards, device, n_steps):
    if device.type != "cuda":
        yield from plain_batches(shards, device, n_steps)
        return
    shards = [tuple(t.pin_memory() for t in shard) for shard in shards]
    stream = torch.cuda.Stream()

    def fetch(step):
        with torch.cuda.stream(stream):
            return tuple(t.to(device, non_blocking=True) for t in shards[step % len(shards)])

    following = fetch(0)
    for step in range(n_steps):
        torch.cuda.current_stream().wait_stream(stream)
        batch = following
        for t in batch:
            t.record_stream(torch.cuda.current_stream())
        following = fetch(step + 1)
        yield batch


def main():
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    rows, n_dense, n_cat, table, dim, hidden = 65536, 768, 8, 50_000, 16, 1024
    if args.tiny:
        rows, n_dense, n_cat, table, dim, hidden = 256, 32, 4, 100, 8, 64
    with torch.device(device):
        model = ClickModel(n_dense, n_cat, table, dim, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shards = load_shards(3, rows, n_dense, n_cat, table)
    batches = prefetched_batches if args.fix else plain_batches
    meter = Meter(device, args.seconds, args.steps)

    for dense, cats, label in batches(shards, device, 1_000_000):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logit = model(dense, cats)
        loss = F.binary_cross_entropy_with_logits(logit.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if meter.tick():
            break
    meter.report("big_uploads", args.fix, rows, loss)

if __name__ == "__main__":
    main()

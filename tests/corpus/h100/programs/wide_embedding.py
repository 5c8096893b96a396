"""Recommendation model: user history -> next-item score, one 2M-row item table.

Fault: the 2,000,000 x 64 table has dense gradients and is updated by dense Adam
(lines marked FAULT in build()): each step writes, reads and updates the whole table
and its moments although about 90,000 rows are touched. Cure: sparse=True and SparseAdam.
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


class ClickBatches(Dataset):
    """Whole batches of (history, candidate, dense features, label)."""

    def __init__(self, n, batch, items, history):
        self.n, self.batch, self.items, self.history = n, batch, items, history

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        hist = torch.randint(0, self.items, (self.batch, self.history), generator=g)
        item = torch.randint(0, self.items, (self.batch,), generator=g)
        dense = torch.rand(self.batch, 13, generator=g)
        label = (torch.rand(self.batch, generator=g) < 0.3).float()
        return hist, item, dense, label


class Ranker(nn.Module):
    def __init__(self, items, dim, sparse):
        super().__init__()
        self.items = nn.Embedding(items, dim, sparse=sparse)
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(4 * dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
                                 nn.Linear(256, 1))

    def forward(self, hist, item, dense):
        user = self.items(hist).mean(1)
        cand = self.items(item)
        feats = torch.cat([user, cand, user * cand, self.bottom(dense)], 1)
        return self.top(feats).squeeze(1)


def build(args, items, dim, device):
    with torch.device(device):
        if args.fix:
            model = Ranker(items, dim, sparse=True)
        else:
            model = Ranker(items, dim, sparse=False)  # FAULT
    rest = [p for n, p in model.named_parameters() if not n.startswith("items.")]
    if args.fix:
        table_opt = torch.optim.SparseAdam([model.items.weight], lr=1e-3)
    else:
        table_opt = torch.optim.Adam([model.items.weight], lr=1e-3)  # FAULT
    return model, [table_opt, torch.optim.Adam(rest, lr=1e-3)]


def train(args):
    device = torch.device(args.device)
    torch.manual_seed(0)
    items, dim, batch, history = (5000, 8, 32, 5) if args.tiny else (2_000_000, 64, 4096, 20)
    model, opts = build(args, items, dim, device)
    loader = DataLoader(ClickBatches(100_000, batch, items, history), batch_size=None, num_workers=4,
                        pin_memory=device.type == "cuda")
    timer = StepTimer(device, args.seconds, args.steps)
    for data in loader:
        hist, item, dense, label = (t.to(device, non_blocking=True) for t in data)
        loss = F.binary_cross_entropy_with_logits(model(hist, item, dense), label)
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        if timer.done():
            break
    return timer, batch, loss


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
    timer.report("wide_embedding", args.fix, samples, loss)


if __name__ == "__main__":
    main()

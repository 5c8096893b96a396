"""Fault: dense gradients for a big embedding table, so Adagrad sweeps all rows each step. Cure: nn.Embedding(sparse=True).

Click-through-rate ranker (one shared table with per-field offsets, pairwise-interaction term plus an MLP) trained with
Lightning in bf16-mixed. Adagrad leaves rows without a gradient as they are, so both variants train the same model.
"""
import argparse
import json
import statistics
import time
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore")


class ShardOnDevice:
    """The click log of one shard, resident on the device, cut into batches again and again."""

    def __init__(self, field_sizes, rows, batch, device):
        g = torch.Generator(device=device).manual_seed(2)
        cols = [(torch.rand(rows, generator=g, device=device).pow(2) * s).long() for s in field_sizes]
        self.cat = torch.stack(cols, 1)
        self.dense = torch.randn(rows, 13, generator=g, device=device)
        self.click = (torch.rand(rows, generator=g, device=device) < 0.2).float()
        self.batch, self.n = batch, rows // batch

    def __iter__(self):
        i = 0
        while True:
            s = slice(i * self.batch, (i + 1) * self.batch)
            yield self.cat[s], self.dense[s], self.click[s]
            i = (i + 1) % self.n


class Ranker(L.LightningModule):
    def __init__(self, field_sizes, dim, widths, sparse):
        super().__init__()
        offsets = torch.tensor([0] + list(field_sizes[:-1])).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.table = nn.Embedding(sum(field_sizes), dim, sparse=sparse)  # FAULT
        nn.init.normal_(self.table.weight, std=0.01)
        sizes = [len(field_sizes) * dim + 13] + widths
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Linear(a, b), nn.ReLU(inplace=True)]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, cat, dense):
        e = self.table(cat + self.offsets)
        pair = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        deep = self.mlp(torch.cat([e.flatten(1), dense], 1)).squeeze(1)
        return pair + deep

    def training_step(self, batch, batch_idx):
        cat, dense, click = batch
        return F.binary_cross_entropy_with_logits(self(cat, dense).float(), click)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.02)


class Clock(L.Callback):
    def __init__(self, seconds, steps, warmup=10, block=10):
        self.seconds, self.limit, self.warmup, self.block = seconds, steps, warmup, block
        self.times, self.seen, self.in_block = [], 0, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen += 1
        self.loss = outputs["loss"]
        timed = self.seen - self.warmup
        if timed < 0:
            return
        last = self.limit and timed >= self.limit
        self.in_block += timed > 0
        if timed == 0 or self.in_block == self.block or last:
            if module.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if timed == 0:
                self.began = now
            else:
                self.times.append((now - self.mark) / self.in_block)
            self.mark, self.in_block = now, 0
            trainer.should_stop = bool(last or now - self.began > self.seconds)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--fix", action="store_true")
    ap.add_argument("--tiny", action="store_true")
    ap.add_argument("--seconds", type=float, default=2.5)
    ap.add_argument("--steps", type=int, default=0)
    ap.add_argument("--device", default="cuda")
    args = ap.parse_args()
    L.seed_everything(0, verbose=False)
    torch.set_float32_matmul_precision("high")
    if args.tiny:
        field_sizes, dim, widths, batch, rows = [50, 7, 120, 1000], 8, [16, 8], 64, 1024
    else:
        field_sizes = [2_000_000, 3_000_000, 1_500_000, 2_500_000, 800_000, 400_000, 150_000, 90_000, 60_000, 50_000,
                       40_000, 30_000]  # users, items, shops, ...; the few low-cardinality fields are in the dense part
        dim, widths, batch, rows = 32, [1024, 1024, 512], 32_768, 32_768 * 24
    data = ShardOnDevice(field_sizes, rows, batch, args.device)
    with torch.device(args.device):
        model = Ranker(field_sizes, dim, widths, sparse=args.fix)
    clock = Clock(args.seconds, args.steps)
    trainer = L.Trainer(accelerator="gpu" if args.device == "cuda" else "cpu", devices=1, precision="bf16-mixed",
                        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[clock])
    trainer.fit(model, data)
    print(json.dumps({"name": "ads_ranker", "fix": args.fix, "step_ms": round(1e3 * statistics.median(clock.times), 3),
                      "samples": batch, "loss": round(float(clock.loss), 5)}))


if __name__ == "__main__":
    main()

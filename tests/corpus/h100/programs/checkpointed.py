"""Train a 16-layer GPT-2-like model (about 150M parameters) under bf16 autocast, batch 8 x 1024.

Fault: activation checkpointing on every block although there is plenty of memory, so each block's
forward runs twice (marked FAULT in build_model()).
Cure (--fix): no checkpointing.
"""
import argparse
import json
import statistics
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


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


def build_model(args, device):
    sizes = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=16, n_head=12)
    if args.tiny:
        sizes = dict(vocab_size=500, n_positions=64, n_embd=64, n_layer=3, n_head=2)
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        bos_token_id=0, eos_token_id=0)
    with torch.device(device):
        model = GPT2LMHeadModel(config)
    if not args.fix:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # FAULT
    return model.train()


def main():
    args = parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = build_model(args, device)
    batch = 2 if args.tiny else 8
    seq_len = model.config.n_positions
    loader = make_loader(model.config.vocab_size, seq_len, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    meter = Meter(device, args.seconds, args.steps)

    for tokens in loader:
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if meter.tick():
            break
    meter.report("checkpointed", args.fix, batch * seq_len, loss)

if __name__ == "__main__":
    main()

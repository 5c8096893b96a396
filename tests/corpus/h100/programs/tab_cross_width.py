"""Fault: the feature vector of a deep-and-cross net is 1613 wide (odd), so every bf16 matmul is misaligned; cure: zero-pad the width to a multiple of 64.

Click prediction on tabular data: 13 numeric columns and 40 categorical ones (embedding size 40), three full-matrix cross layers
(DCN-v2) and a deep branch. The padding columns stay exactly zero, so the padded model computes the same function.
"""
import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x"""

    def __init__(self, width, padded, scale=0.02):
        super().__init__()
        weight = torch.zeros(padded, padded)
        weight[:width, :width] = torch.randn(width, width) * scale
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(padded))

    def forward(self, x0, x):
        return torch.addcmul(x, x0, F.linear(x, self.weight, self.bias))


class InputLinear(nn.Module):
    def __init__(self, width, padded, out):
        super().__init__()
        weight = torch.zeros(out, padded)
        weight[:, :width] = torch.randn(out, width) * width ** -0.5
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class DeepCross(nn.Module):
    def __init__(self, n_dense, n_cat, vocab, dim, hidden, n_cross=3, multiple=1):
        super().__init__()
        width = n_dense + n_cat * dim  # FAULT
        padded = -(-width // multiple) * multiple
        self.extra = padded - width
        self.table = nn.Embedding(n_cat * vocab, dim)
        nn.init.normal_(self.table.weight, std=0.05)
        self.cross = nn.ModuleList(CrossLayer(width, padded) for _ in range(n_cross))
        self.deep = nn.Sequential(InputLinear(width, padded, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU())
        self.out_cross = InputLinear(width, padded, 8)
        self.out_deep = nn.Linear(hidden // 2, 8)

    def forward(self, dense, cat):
        parts = [dense, self.table(cat).flatten(1)]
        if self.extra:
            parts.append(dense.new_zeros(dense.shape[0], self.extra))
        x0 = torch.cat(parts, dim=1).to(torch.bfloat16)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return (self.out_cross(x) + self.out_deep(self.deep(x0))).float().mean(1)


def synthetic(rows, n_dense, n_cat, vocab, device):
    dense = torch.randn(rows, n_dense, device=device)
    # a few very frequent values and a long tail, as in click logs
    cat = (torch.rand(rows, n_cat, device=device) ** 2 * vocab).long()
    label = (dense[:, 0] + 0.5 * dense[:, 1] * dense[:, 2] + (cat[:, 0] % 3 - 1.0) > 0).float()
    cat += torch.arange(n_cat, device=device) * vocab
    return dense, cat, label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    device = torch.device(args.device)
    torch.manual_seed(7)
    if args.tiny:
        rows, n_dense, n_cat, vocab, dim, hidden, block = 128, 5, 6, 50, 6, 32, 5
    else:
        rows, n_dense, n_cat, vocab, dim, hidden, block = 32768, 13, 40, 5000, 40, 1024, 10

    model = DeepCross(n_dense, n_cat, vocab, dim, hidden, multiple=64 if args.fix else 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5, fused=device.type == "cuda")
    torch.manual_seed(8)
    batches = [synthetic(rows, n_dense, n_cat, vocab, device) for _ in range(6)]

    step = 0
    samples = []
    t_begin = None
    while True:
        if device.type == "cuda":
            torch.cuda.synchronize()
        t0 = time.perf_counter()
        if step >= 10 and t_begin is None:
            t_begin, first = t0, step
        if t_begin is not None:
            if t0 - t_begin >= args.seconds or (args.steps and step - first >= args.steps):
                break
        for _ in range(block):
            dense, cat, label = batches[step % len(batches)]
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logit = model(dense, cat)
            loss = F.binary_cross_entropy_with_logits(logit, label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
        if t_begin is not None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - t0) * 1e3 / block)

    print(json.dumps({"name": "tab_cross_width", "fix": args.fix, "step_ms": round(statistics.median(samples), 3),
                      "samples": rows, "loss": round(loss.item(), 5)}))


if __name__ == "__main__":
    main()

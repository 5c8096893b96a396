"""Image classifier training with a running confusion matrix.

Fault: each step moves the logits to the CPU and counts the confusion matrix and per-class
scores in Python/numpy loops (lines marked FAULT in HostMetrics.update()); the GPU idles
meanwhile. Cure: torch.bincount on the GPU, read once at the end.
"""
import argparse
import json
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


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


class HostMetrics:
    def __init__(self, classes):
        self.classes = classes
        self.matrix = np.zeros((classes, classes), dtype=np.int64)
        self.f1 = 0.0

    def update(self, logits, labels):
        probs = logits.detach().float().softmax(1).cpu().numpy()  # FAULT
        truth = labels.cpu().numpy()
        for row, t in zip(probs, truth):  # FAULT
            self.matrix[t, np.argmax(row)] += 1  # FAULT
        scores = []
        for c in range(self.classes):  # FAULT
            tp = self.matrix[c, c]
            fp = self.matrix[:, c].sum() - tp
            fn = self.matrix[c, :].sum() - tp
            scores.append(2 * tp / max(2 * tp + fp + fn, 1))
        self.f1 = float(np.mean(scores))

    def score(self):
        return self.f1


class DeviceMetrics:
    def __init__(self, classes, device):
        self.classes = classes
        self.matrix = torch.zeros(classes * classes, dtype=torch.int64, device=device)

    def update(self, logits, labels):
        index = labels * self.classes + logits.detach().argmax(1)
        self.matrix += torch.bincount(index, minlength=self.classes**2)

    def score(self):
        m = self.matrix.view(self.classes, self.classes).double()
        return (2 * m.diag() / (m.sum(0) + m.sum(1)).clamp(min=1)).mean().item()


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout),
                         nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(conv(c, c), conv(c, c))

    def forward(self, x):
        return x + self.body(x)


def build_model(width, blocks, classes):
    layers, cin = [conv(3, width)], width
    for stage in range(3):
        cout = width * 2**stage
        layers.append(conv(cin, cout, 2))
        layers += [Residual(cout) for _ in range(blocks)]
        cin = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes))


def train(args):
    device = torch.device(args.device)
    torch.manual_seed(0)
    width, blocks, size, batch, classes, n = (8, 1, 16, 16, 10, 64) if args.tiny else (64, 3, 64, 512, 100, 8192)
    with torch.device(device):
        model = build_model(width, blocks, classes).to(memory_format=torch.channels_last)
        images = torch.randn(n, 3, size, size, dtype=torch.float16)
        labels = torch.randint(0, classes, (n,))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    metrics = DeviceMetrics(classes, device) if args.fix else HostMetrics(classes)
    timer = StepTimer(device, args.seconds, args.steps)
    for epoch in range(1_000_000):
        for index in torch.randperm(n, device=device).split(batch):
            x = images[index].float().contiguous(memory_format=torch.channels_last)
            y = labels[index]
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(x)
                loss = F.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            metrics.update(logits, y)
            if timer.done():
                metrics.score()
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
    timer.report("host_metric", args.fix, samples, loss)


if __name__ == "__main__":
    main()

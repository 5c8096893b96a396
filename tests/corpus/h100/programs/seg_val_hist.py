"""Fault: validation moves the full class logits to the host and does argmax + confusion matrix in numpy; cure: argmax and histogram on the GPU.

Street-scene segmentation with a small U-Net (bf16, channels_last). Every few steps the mIoU on a held-out batch is updated with
the `fast_hist` helper that is passed from repository to repository.
"""
import argparse
import json
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

NUM_CLASSES = 19
IGNORE = 255


def conv_block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, base=32, depth=4, classes=NUM_CLASSES):
        super().__init__()
        widths = [base * 2 ** i for i in range(depth + 1)]
        self.stem = conv_block(3, widths[0])
        self.down = nn.ModuleList(conv_block(a, b) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.fuse = nn.ModuleList(conv_block(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, fuse in zip(reversed(self.up), reversed(self.fuse)):
            x = fuse(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


def fast_hist(pred, label, n):
    keep = label < n
    return np.bincount(n * label[keep] + pred[keep], minlength=n * n).reshape(n, n)


def gpu_hist(pred, label, n):
    index = torch.where(label < n, n * label + pred, n * n)
    return torch.bincount(index.flatten(), minlength=n * n + 1)[: n * n].view(n, n)


class Evaluator:
    def __init__(self, on_gpu, amp):
        self.on_gpu, self.amp = on_gpu, amp
        self.history = []

    @torch.no_grad()
    def __call__(self, model, images, labels):
        model.eval()
        with self.amp():
            logits = model(images).float()
        if self.on_gpu:
            hist = gpu_hist(logits.argmax(1), labels, NUM_CLASSES).cpu().numpy()
        else:
            pred = logits.cpu().numpy().argmax(axis=1)  # FAULT
            hist = fast_hist(pred.ravel(), labels.cpu().numpy().ravel(), NUM_CLASSES)  # FAULT
        iou = np.diag(hist) / np.maximum(hist.sum(0) + hist.sum(1) - np.diag(hist), 1)
        self.history.append(float(iou.mean()))
        model.train()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fix", action="store_true")
    p.add_argument("--seconds", type=float, default=2.5)
    p.add_argument("--steps", type=int, default=0)
    p.add_argument("--tiny", action="store_true")
    p.add_argument("--device", default="cuda")
    a = p.parse_args()

    size, batch, val_batch, every, base = (64, 2, 2, 4, 8) if a.tiny else (512, 8, 2, 8, 32)
    dev = torch.device(a.device)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True

    def amp():
        return torch.autocast(dev.type, dtype=torch.bfloat16, enabled=dev.type == "cuda")

    model = UNet(base).to(dev, memory_format=torch.channels_last)
    fused = dev.type == "cuda"
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)

    pool = [torch.randn(batch, 3, size, size, device=dev).contiguous(memory_format=torch.channels_last) for _ in range(4)]
    truth = []
    for img in pool:  # labels that can be learnt: smoothed brightness in bands
        level = F.avg_pool2d(img.mean(1, keepdim=True), 15, 1, 7)[:, 0] * 60 + NUM_CLASSES / 2
        lab = level.long().clamp(0, NUM_CLASSES - 1)
        lab[:, :4] = IGNORE
        truth.append(lab)
    val_x, val_y = pool[-1][:val_batch], truth[-1][:val_batch]
    evaluate = Evaluator(a.fix, amp)

    def train_step(i):
        x, y = pool[i % 3], truth[i % 3]
        opt.zero_grad(set_to_none=True)
        with amp():
            loss = F.cross_entropy(model(x), y, ignore_index=IGNORE)
        loss.backward()
        opt.step()
        return loss.detach()

    def sync():
        if dev.type == "cuda":
            torch.cuda.synchronize()

    def run_block(first):  # one validation period
        for i in range(first, first + every):
            loss = train_step(i)
        evaluate(model, val_x, val_y)
        return loss

    done = 0
    for _ in range(2):
        run_block(done)
        done += every
    sync()

    times, timed = [], 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < a.seconds and (not a.steps or timed < a.steps):
        t0 = time.perf_counter()
        loss = run_block(done)
        sync()
        times.append((time.perf_counter() - t0) / every * 1e3)
        done += every
        timed += every
    print(f"mIoU {evaluate.history[0]:.4f} -> {evaluate.history[-1]:.4f}")
    print(json.dumps({"name": "seg_val_hist", "fix": a.fix, "step_ms": round(statistics.median(times), 3),
                      "samples": batch, "loss": round(float(loss), 5)}))


if __name__ == "__main__":
    main()

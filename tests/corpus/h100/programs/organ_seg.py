"""Multi-organ segmentation of CT slices: 2-D U-Net, cross entropy + soft Dice over 32 classes.

cured: same loss and gradients up to the rounding of the sums.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda"
CLASSES, SIZE, BATCH, WIDTH, POOL = 32, 512, 12, 32, 48
LR, LOG_EVERY = 1e-2, 50
BLOCK = 5
if os.environ.get("TINY"):
    DEVICE = "cpu"
    CLASSES, SIZE, BATCH, WIDTH, POOL = 5, 32, 2, 8, 6


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, cin, classes, w):
        super().__init__()
        widths = [w, 2 * w, 4 * w, 8 * w, 16 * w]
        self.stem = DoubleConv(cin, w)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths, widths[1:]))
        self.merge = nn.ModuleList(DoubleConv(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x):
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge)):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(x)


class DiceLoss(nn.Module):
    def __init__(self, n_classes, joint, smooth=1e-5):
        super().__init__()
        self.n_classes = n_classes
        self.joint = joint
        self.smooth = smooth

    def one_hot(self, target, like):
        out = torch.zeros_like(like)
        return out.scatter_(1, target.unsqueeze(1), 1.0)

    def class_dice(self, score, target, dims=None):
        intersect = torch.sum(score * target, dim=dims)
        y_sum = torch.sum(target, dim=dims)
        z_sum = torch.sum(score * score, dim=dims)
        return 1 - (2 * intersect + self.smooth) / (z_sum + y_sum + self.smooth)

    def forward(self, logits, target):
        probs = torch.softmax(logits, dim=1)
        target = self.one_hot(target, probs.detach())
        if self.joint:
            return self.class_dice(probs, target, dims=(0, 2, 3)).mean()
        loss = 0.0
        for c in range(self.n_classes):
            loss = loss + self.class_dice(probs[:, c], target[:, c])
        return loss / self.n_classes


def build(cured):
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    net = UNet(1, CLASSES, WIDTH).to(DEVICE, memory_format=torch.channels_last).train()
    dice = DiceLoss(CLASSES, joint=cured)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4, nesterov=True, fused=True)

    # the slices of this fold fit on the device, labels as bytes
    g = torch.Generator(device=DEVICE).manual_seed(1)
    coarse = torch.randint(CLASSES, (POOL, 1, SIZE // 16, SIZE // 16), generator=g, device=DEVICE)
    labels = F.interpolate(coarse.float(), scale_factor=16, mode="nearest").to(torch.uint8)[:, 0]
    slices = labels.unsqueeze(1).half() / CLASSES + 0.1 * torch.randn(
        POOL, 1, SIZE, SIZE, generator=g, device=DEVICE).half()
    running = {"i": 0, "loss": torch.zeros((), device=DEVICE)}

    def step():
        pick = torch.randint(POOL, (BATCH,), generator=g, device=DEVICE)
        x, y = slices[pick].float(), labels[pick].long()
        if running["i"] % 2:
            x, y = x.flip(-1), y.flip(-1)
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = net(x)
        logits = logits.float()
        loss = 0.5 * F.cross_entropy(logits, y) + 0.5 * dice(logits, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running["i"] += 1
        running["loss"] += loss.detach()
        if running["i"] % LOG_EVERY == 0:
            running["mean"] = running["loss"].item() / LOG_EVERY
            running["loss"].zero_()
        return loss.detach()

    return step


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def run(cured: bool, seconds: float) -> float:
    step = build(cured)
    for _ in range(8):
        step()
    sync()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        t0 = time.perf_counter()
        for _ in range(BLOCK):
            step()
        sync()
        times.append((time.perf_counter() - t0) / BLOCK * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--cured", action="store_true")
    ap.add_argument("--seconds", type=float, default=4)
    a = ap.parse_args()
    print(json.dumps({"name": "organ_seg", "cured": a.cured, "step_ms": run(a.cured, a.seconds)}))

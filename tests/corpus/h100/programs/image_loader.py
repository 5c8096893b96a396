"""Train ResNet-18 on images that are prepared on the CPU.

Fault: the DataLoader prepares every image in the main process (num_workers=0, no pinned memory),
marked FAULT in make_loader().
Cure (--fix): num_workers=8, persistent_workers=True, pin_memory=True and non-blocking copies.
"""
import argparse
import json
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch.utils.data import DataLoader, Dataset


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


MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


class NoiseImages(Dataset):
    """Stands in for a folder of pictures: noise, then the usual augmentations."""

    def __init__(self, length, size):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        pixels = rng.integers(0, 256, (self.size * 5 // 4, self.size * 3 // 2, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        width, height = image.size
        scale = rng.uniform(0.5, 1.0)
        w, h = int(width * scale), int(height * scale)
        left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        image = image.crop((left, top, left + w, top + h))
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        array = (np.asarray(image, dtype=np.float32) / 255.0 - MEAN) / STD
        tensor = torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1)))
        return tensor, int(rng.integers(0, 1000))


def make_loader(dataset, batch, args):
    if args.fix:
        return DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True,
                          num_workers=2 if args.tiny else 8, persistent_workers=True,
                          pin_memory=args.device.startswith("cuda"))
    return DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True, num_workers=0)  # FAULT


def main():
    args = parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    batch, size = (4, 64) if args.tiny else (64, 224)
    loader = make_loader(NoiseImages(200_000, size), batch, args)

    with torch.device(device):
        model = torchvision.models.resnet18(num_classes=1000)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    # with workers, use up the batches that were prefetched during start-up before timing
    meter = Meter(device, args.seconds, args.steps, warmup=30 if args.fix else 6)

    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if meter.tick():
            break
    meter.report("image_loader", args.fix, batch, loss)

if __name__ == "__main__":
    main()

"""Fault: every photo goes through ToTensor and Normalize (float32) on the CPU, one by one, before the upload; cure: upload the uint8 batch and do the same arithmetic on the GPU.

Photo tagging service: decoded 256x256 thumbnails come in, a ResNet-50 (bf16, channels_last) puts tags on them.
A step is one batch of photos.
"""
import argparse
import itertools
import json
import statistics
import time
from collections import deque

import numpy as np
import torch
from torchvision import transforms as T
from torchvision.models import resnet18, resnet50

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Uploader:
    """A ring of page-locked buffers, so that an upload can be under way while the next batch is prepared."""

    def __init__(self, shape, dtype, device, depth=4):
        self.cuda, self.device = device.type == "cuda", device
        self.free = deque((torch.empty(shape, dtype=dtype, pin_memory=self.cuda),
                           torch.cuda.Event() if self.cuda else None) for _ in range(depth))

    def send(self, images):
        buf, event = self.free.popleft()
        if self.cuda:
            event.synchronize()         # the upload of four batches ago
        for row, image in zip(buf, images):
            row.copy_(image)
        out = buf.to(self.device, non_blocking=True) if self.cuda else buf.clone()
        if self.cuda:
            event.record()
        self.free.append((buf, event))
        return out


class Tagger:
    def __init__(self, args, batch, size):
        self.device = torch.device(args.device)
        self.late = args.fix
        if self.late:
            self.prepare = lambda photo: torch.from_numpy(np.ascontiguousarray(photo))
            self.uploader = Uploader((batch, size, size, 3), torch.uint8, self.device)
            self.mean = torch.tensor(MEAN, device=self.device).view(3, 1, 1)
            self.std = torch.tensor(STD, device=self.device).view(3, 1, 1)
        else:
            self.prepare = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])
            self.uploader = Uploader((batch, 3, size, size), torch.float32, self.device)
        self.size = size
        with self.device:
            net = resnet18(num_classes=50) if args.tiny else resnet50(num_classes=5000)
        self.net = net.eval().to(self.device, torch.bfloat16, memory_format=torch.channels_last)

    def crop(self, photo):
        top, left = (photo.shape[0] - self.size) // 2, (photo.shape[1] - self.size) // 2
        return photo[top:top + self.size, left:left + self.size]

    @torch.inference_mode()
    def tag(self, photos, k=5):
        x = self.uploader.send(self.prepare(self.crop(p)) for p in photos)  # FAULT
        if self.late:
            x = x.permute(0, 3, 1, 2).float().div_(255).sub_(self.mean).div_(self.std)
        x = x.to(torch.bfloat16, memory_format=torch.channels_last)
        return self.net(x).float().softmax(-1).topk(k)


def incoming(batch, side):
    """Endless batches of decoded thumbnails (HWC, uint8)."""
    rng = np.random.default_rng(0)
    store = rng.integers(0, 256, (4 * batch, side, side, 3), dtype=np.uint8)
    for i in itertools.count():
        yield [store[(i * batch + j) % len(store)] for j in range(batch)]


def main():
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--fix", action="store_true")
    cli.add_argument("--seconds", type=float, default=2.5)
    cli.add_argument("--steps", type=int, default=0)
    cli.add_argument("--tiny", action="store_true")
    cli.add_argument("--device", default="cuda")
    args = cli.parse_args()

    torch.manual_seed(0)
    batch, side, size = (4, 40, 32) if args.tiny else (64, 256, 224)
    tagger = Tagger(args, batch, size)
    stream = incoming(batch, side)
    wait = torch.cuda.synchronize if tagger.device.type == "cuda" else (lambda: None)

    checksum = tagger.tag(next(stream)).values.mean().item()
    for _ in range(9):
        tagger.tag(next(stream))
    wait()

    block_ms, done = [], 0
    deadline = time.perf_counter() + args.seconds
    while time.perf_counter() < deadline:
        n = 8 if not args.steps else min(8, args.steps - done)
        if n <= 0:
            break
        t0 = time.perf_counter()
        tags = [tagger.tag(next(stream)) for _ in range(n)]
        wait()
        block_ms.append(1e3 * (time.perf_counter() - t0) / n)
        done += n
        del tags
    print(json.dumps(dict(name="photo_tagger", fix=args.fix, step_ms=round(statistics.median(block_ms), 3),
                          samples=batch, loss=checksum)))


if __name__ == "__main__":
    main()

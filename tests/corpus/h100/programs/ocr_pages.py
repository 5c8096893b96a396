"""Fault: cudnn.benchmark is on although nearly every page has another shape, so each convolution is searched again; cure: off.

Document reading: text lines cut from a page go through a CRNN recogniser and a greedy CTC decoder. One step is one page
(all its lines as one batch, padded to its longest line). Both give the same text up to half-precision rounding.
"""
import argparse
import json
import os
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

DEVICE = "cuda"
DTYPE = torch.float16
LINE_HEIGHT = 48
LINES = (10, 24)                       # lines on a page, fewest and most
WIDTHS = (80, 1280)                    # pixels
CHANNELS = (64, 128, 256, 256, 512, 512, 512)
HIDDEN, ALPHABET = 256, 512
POOL, WORKERS = 2000, 4
BLOCK = 6
if os.environ.get("TINY"):
    DEVICE, DTYPE, WORKERS = "cpu", torch.float32, 1
    LINES, WIDTHS, POOL = (2, 4), (40, 120), 50
    CHANNELS, HIDDEN, ALPHABET = (8, 8, 16, 16, 16, 16, 16), 16, 40

BLANK = 0


class PageLines(Dataset):
    """Line crops as the layout detector leaves them: fixed height, own width, grouped by page."""

    def __init__(self, pages=100_000, seed=0):
        rng = np.random.default_rng(seed)
        low, high = WIDTHS
        widths = np.clip(rng.lognormal(np.log(high * 0.35), 0.35, POOL), low, high).astype(int)
        self.crops = [rng.integers(0, 256, (LINE_HEIGHT, w), dtype=np.uint8) for w in widths]
        self.pages, self.seed = pages, seed

    def __len__(self):
        return self.pages

    def __getitem__(self, page):
        rng = np.random.default_rng((self.seed, page))
        crops = [self.crops[i] for i in rng.integers(0, POOL, rng.integers(LINES[0], LINES[1] + 1))]
        width = -(-max(c.shape[1] for c in crops) // 4) * 4
        lines = np.full((len(crops), 1, LINE_HEIGHT, width), 255, np.uint8)
        for row, crop in zip(lines, crops):
            row[0, :, : crop.shape[1]] = crop
        return torch.from_numpy(lines)


class Crnn(nn.Module):
    def __init__(self):
        super().__init__()
        pools = (nn.MaxPool2d(2), nn.MaxPool2d(2), None, nn.MaxPool2d((2, 1)), None, nn.MaxPool2d((2, 1)), None)
        layers, last = [], 1
        for i, (channels, pool) in enumerate(zip(CHANNELS, pools)):
            kernel, pad = ((LINE_HEIGHT // 16, 3), (0, 1)) if i == len(pools) - 1 else (3, 1)
            layers += [nn.Conv2d(last, channels, kernel, padding=pad), nn.ReLU(inplace=True)]
            if pool:
                layers.append(pool)
            last = channels
        self.cnn = nn.Sequential(*layers)
        self.rnn = nn.LSTM(last, HIDDEN, num_layers=2, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, ALPHABET)

    def forward(self, lines):
        features = self.cnn(lines).squeeze(2)                  # lines, channels, time
        states, _ = self.rnn(features.permute(2, 0, 1).contiguous())
        return self.head(states)                               # time, lines, alphabet


class Reader:
    def __init__(self, model):
        self.model = model
        self.pending = None

    def read(self, lines):
        """Submits a page; returns the previous page's symbols (lines, time), 0 where nothing new was read."""
        x = lines.to(DEVICE, non_blocking=True).to(DTYPE).sub_(127.5).div_(127.5)
        best = self.model(x).argmax(-1).to(torch.int16).t()
        fresh = torch.ones_like(best, dtype=torch.bool)
        fresh[:, 1:] = best[:, 1:] != best[:, :-1]
        symbols = (best * fresh).to("cpu", non_blocking=True)
        done = None
        if DEVICE == "cuda":
            done = torch.cuda.Event()
            done.record()
        previous, self.pending = self.pending, (symbols, done)
        return self.finish(previous)

    @staticmethod
    def finish(page):
        if page is None:
            return None
        symbols, done = page
        if done is not None:
            done.synchronize()
        return symbols.numpy()


def build():
    torch.manual_seed(0)
    model = Crnn().to(DEVICE, DTYPE).eval()
    model.rnn.flatten_parameters()
    return model


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def run(cured: bool, seconds: float) -> float:
    torch.backends.cudnn.benchmark = not cured  # FAULT
    loader = DataLoader(PageLines(), batch_size=None, num_workers=WORKERS, pin_memory=DEVICE == "cuda")
    pages, reader, symbols_read = iter(loader), Reader(build()), 0

    def block(n):
        nonlocal symbols_read
        for _ in range(n):
            symbols = reader.read(next(pages))
            if symbols is not None:
                symbols_read += int(np.count_nonzero(symbols))
        sync()

    block(8)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        block(BLOCK)
        times.append((time.perf_counter() - start) / BLOCK * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cured", action="store_true")
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    print(json.dumps({"name": "ocr_pages", "cured": args.cured, "step_ms": run(args.cured, args.seconds)}))

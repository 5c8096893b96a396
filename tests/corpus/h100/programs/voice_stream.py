"""Fault: the vocoder is served with weight norm still on its 116 convolutions, so every chunk rebuilds every weight; cure: remove the parametrizations after loading.

Streaming text-to-speech, second stage: a HiFi-GAN style generator turns short chunks of mel frames of a few
concurrent voices into audio. A step is one chunk for all voices.
"""
import argparse
import json
import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

SLOPE = 0.1


def conv(cin, cout, k, dilation=1):
    return weight_norm(nn.Conv1d(cin, cout, k, dilation=dilation, padding=(k - 1) * dilation // 2))  # FAULT


class ResBlock(nn.Module):
    def __init__(self, channels, k, dilations=(1, 3, 5)):
        super().__init__()
        self.wide = nn.ModuleList([conv(channels, channels, k, d) for d in dilations])
        self.plain = nn.ModuleList([conv(channels, channels, k) for _ in dilations])

    def forward(self, x):
        for a, b in zip(self.wide, self.plain):
            y = a(F.leaky_relu(x, SLOPE))
            x = x + b(F.leaky_relu(y, SLOPE))
        return x


class Generator(nn.Module):
    def __init__(self, mels=80, width=512, rates=(4, 4, 2, 2, 2, 2), kernels=(3, 7, 11)):
        super().__init__()
        self.pre = conv(mels, width, 7)
        self.ups, self.mrf = nn.ModuleList(), nn.ModuleList()
        for r in rates:
            up = nn.ConvTranspose1d(width, width // 2, 2 * r, r, padding=r // 2)
            self.ups.append(weight_norm(up))  # FAULT
            width //= 2
            self.mrf.append(nn.ModuleList([ResBlock(width, k) for k in kernels]))
        self.post = conv(width, 1, 7)

    def forward(self, mel):
        x = self.pre(mel)
        for up, group in zip(self.ups, self.mrf):
            x = up(F.leaky_relu(x, SLOPE))
            x = sum(block(x) for block in group) / len(group)
        return torch.tanh(self.post(F.leaky_relu(x, SLOPE)))


def load_vocoder(device, tiny, fold):
    with torch.device(device):
        net = Generator(mels=8, width=64, rates=(4, 2)) if tiny else Generator()
    net.eval().requires_grad_(False).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    if fold:  # FAULT: by default the parametrizations stay on
        for m in net.modules():
            if parametrize.is_parametrized(m, "weight"):
                parametrize.remove_parametrizations(m, "weight", leave_parametrized=True)
    return net


class Stream:
    """Keeps the tail of the last chunk as left context, and drops its audio from the output."""

    def __init__(self, net, voices, mels, frames, context, hop, device, dtype):
        self.net, self.frames, self.cut = net, frames, context * hop
        self.mel = torch.randn(voices, mels, 64 * frames, device=device, dtype=dtype)
        self.past = self.mel[:, :, :context]
        self.context, self.t = context, context

    def next_chunk(self):
        if self.t + self.frames > self.mel.shape[2]:
            self.t = self.context
        new = self.mel[:, :, self.t:self.t + self.frames]
        window = torch.cat([self.past, new], dim=2)
        self.past, self.t = window[:, :, -self.context:], self.t + self.frames
        return self.net(window)[:, 0, self.cut:]


def main():
    ap = argparse.ArgumentParser()
    for flag in ("--fix", "--tiny"):
        ap.add_argument(flag, action="store_true")
    ap.add_argument("--seconds", type=float, default=2.5)
    ap.add_argument("--steps", type=int, default=0)
    ap.add_argument("--device", default="cuda")
    args = ap.parse_args()

    torch.manual_seed(0)
    device = torch.device(args.device)
    net = load_vocoder(device, args.tiny, fold=args.fix)
    voices, frames, context = (2, 4, 2) if args.tiny else (2, 12, 4)
    stream = Stream(net, voices, 8 if args.tiny else 80, frames, context, 8 if args.tiny else 256, device,
                    next(net.parameters()).dtype)

    def drain():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.inference_mode():
        checksum = stream.next_chunk().float().abs().mean().item()
        for _ in range(15):
            stream.next_chunk()
        drain()

        ms, played, t_end = [], 0, time.perf_counter() + args.seconds
        while time.perf_counter() < t_end:
            n = 16 if args.steps == 0 else min(16, args.steps - played)
            if n == 0:
                break
            t0 = time.perf_counter()
            audio = [stream.next_chunk() for _ in range(n)]
            drain()
            ms.append((time.perf_counter() - t0) * 1e3 / n)
            played += n
            del audio

    print(json.dumps({"name": "voice_stream", "fix": args.fix, "step_ms": median(ms), "samples": voices, "loss": checksum}))


if __name__ == "__main__":
    main()

"""Fault: fakes are not detached in the critic's step (retain_graph=True hides the error). Cure: detach, no retained graph.

The critic's backward pass then runs through the whole generator too, for gradients that are thrown away.
64x64 residual GAN, hinge loss, bf16 autocast, channels_last, fused Adam.
"""
import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F


class UpBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.n1, self.n2 = nn.BatchNorm2d(cin), nn.BatchNorm2d(cout)
        self.c1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.c2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1)

    def forward(self, x):
        h = F.relu(self.n1(x), inplace=True)
        h = self.c1(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.c2(F.relu(self.n2(h), inplace=True))
        return h + F.interpolate(self.skip(x), scale_factor=2, mode="nearest")


class Generator(nn.Module):
    def __init__(self, z, ch, ups):
        super().__init__()
        self.start = nn.Linear(z, ch * 16)
        chans = [ch // 2 ** i for i in range(ups + 1)]
        self.blocks = nn.Sequential(*[UpBlock(a, b) for a, b in zip(chans[:-1], chans[1:])])
        self.out = nn.Sequential(nn.BatchNorm2d(chans[-1]), nn.ReLU(True), nn.Conv2d(chans[-1], 3, 3, padding=1), nn.Tanh())

    def forward(self, z):
        h = self.start(z).view(len(z), -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.out(self.blocks(h))


def critic(ch, downs):
    layers, c = [nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2, True)], ch
    for _ in range(downs - 1):
        layers += [nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        c *= 2
    return nn.Sequential(*layers, nn.Conv2d(c, 1, 4))


class GAN:
    def __init__(self, tiny, device, fix):
        self.device, self.fix = device, fix
        self.z, self.batch, pool, ch, dch, ups = (8, 4, 16, 16, 8, 2) if tiny else (128, 256, 4096, 512, 96, 4)
        with torch.device(device):
            self.G = Generator(self.z, ch, ups).to(memory_format=torch.channels_last)
            self.D = critic(dch, ups).to(memory_format=torch.channels_last)
            side = 4 * 2 ** ups
            self.real = torch.rand(pool, 3, side, side).mul_(2).sub_(1).contiguous(memory_format=torch.channels_last)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-4, betas=(0.0, 0.9), fused=True)
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=2e-4, betas=(0.0, 0.9), fused=True)
        self.at = 0

    def amp(self):
        return torch.autocast(self.device, torch.bfloat16)

    def train_step(self):
        real = self.real[self.at:self.at + self.batch]
        self.at = (self.at + self.batch) % len(self.real)
        z = torch.randn(self.batch, self.z, device=self.device)

        # critic
        self.D.requires_grad_(True)
        self.opt_d.zero_grad()
        with self.amp():
            fake = self.G(z)
            seen = fake.detach() if self.fix else fake  # FAULT
            loss_d = F.relu(1 - self.D(real)).mean() + F.relu(1 + self.D(seen)).mean()
        loss_d.backward(retain_graph=not self.fix)  # FAULT
        self.opt_d.step()

        # generator
        self.D.requires_grad_(False)
        self.opt_g.zero_grad()
        with self.amp():
            loss_g = -self.D(fake).mean()
        loss_g.backward()
        self.opt_g.step()
        return loss_d.detach(), loss_g.detach()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--fix", action="store_true")
    ap.add_argument("--tiny", action="store_true")
    ap.add_argument("--seconds", type=float, default=2.5)
    ap.add_argument("--steps", type=int, default=0)
    ap.add_argument("--device", default="cuda")
    a = ap.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    gan = GAN(a.tiny, a.device, a.fix)

    def run(k):
        for _ in range(k):
            losses = gan.train_step()
        if a.device == "cuda":
            torch.cuda.synchronize()
        return losses

    run(10)
    block, done, ms = 6, 0, []
    t_end = time.perf_counter() + a.seconds
    while time.perf_counter() < t_end and (a.steps == 0 or done < a.steps):
        k = block if a.steps == 0 else min(block, a.steps - done)
        t0 = time.perf_counter()
        loss_d, loss_g = run(k)
        ms.append((time.perf_counter() - t0) * 1000 / k)
        done += k
    print(json.dumps({"name": "face_gan", "fix": a.fix, "step_ms": round(statistics.median(ms), 3),
                      "samples": gan.batch, "loss": round((loss_d + loss_g).item(), 5)}))


if __name__ == "__main__":
    main()

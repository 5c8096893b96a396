"""Fault: a frozen fp32 DiT is sampled under autocast, which does not cache casts of weights without grad, so every weight is cast to bf16 anew at every step; cure: store the weights in bf16.

Class-conditional latent diffusion: a DiT with adaLN blocks, classifier-free guidance as one doubled batch, DDIM.
A step is one denoising step of a batch of images.
"""
import argparse
import json
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class DiTBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self.ada = nn.Linear(dim, 6 * dim)

    def forward(self, x, cond):
        b, n, d = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(cond).unsqueeze(1).chunk(6, dim=-1)
        h = torch.addcmul(shift1, self.norm1(x), 1 + scale1)
        q, k, v = self.qkv(h).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = torch.addcmul(x, gate1, self.proj(h))
        h = torch.addcmul(shift2, self.norm2(x), 1 + scale2)
        return torch.addcmul(x, gate2, self.fc2(F.gelu(self.fc1(h), approximate="tanh")))


class DiT(nn.Module):
    def __init__(self, dim, depth, heads, side, patch=2, channels=4, classes=1000):
        super().__init__()
        self.dim, self.side, self.patch, self.channels = dim, side, patch, channels
        n = (side // patch) ** 2
        self.embed = nn.Linear(channels * patch * patch, dim)
        self.place = nn.Parameter(torch.randn(1, n, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(dim, channels * patch * patch)

    def forward(self, z, freqs, labels):
        b, p, s = z.shape[0], self.patch, self.side // self.patch
        x = z.view(b, self.channels, s, p, s, p).permute(0, 2, 4, 1, 3, 5).reshape(b, s * s, -1)
        x = self.embed(x) + self.place
        cond = F.silu(self.time(freqs) + self.label(labels))
        for block in self.blocks:
            x = block(x, cond)
        x = self.out(self.norm(x))
        return x.view(b, s, s, self.channels, p, p).permute(0, 3, 1, 4, 2, 5).reshape(b, self.channels, self.side, self.side)


class Sampler:
    """DDIM with guidance; all of the schedule lies on the device."""

    def __init__(self, model, images, dtype, device, steps=50, guidance=4.0):
        self.model, self.images, self.dtype, self.device = model, images, dtype, device
        self.steps, self.guidance = steps, guidance
        alpha = torch.cos(torch.linspace(0.02, 0.98, steps + 1, device=device).flip(0) * math.pi / 2) ** 2
        self.a, self.s = alpha.sqrt(), (1 - alpha).sqrt()
        t = torch.linspace(999, 0, steps, device=device)
        f = torch.exp(-math.log(1e4) * torch.arange(128, device=device) / 128)
        self.freqs = torch.cat([torch.cos(t[:, None] * f), torch.sin(t[:, None] * f)], -1).to(dtype)
        self.gen = torch.Generator(device=device).manual_seed(7)
        self.restart()

    def restart(self):
        side, ch = self.model.side, self.model.channels
        self.z = torch.randn(self.images, ch, side, side, device=self.device, generator=self.gen)
        wanted = torch.randint(0, 1000, (self.images,), device=self.device, generator=self.gen)
        self.labels = torch.cat([wanted, torch.full_like(wanted, 1000)])
        self.i = 0

    def step(self):
        if self.i == self.steps:
            self.restart()
        i = self.i
        both = torch.cat([self.z, self.z]).to(self.dtype)
        eps, free = self.model(both, self.freqs[i].expand(2 * self.images, -1), self.labels).float().chunk(2)
        eps = free + self.guidance * (eps - free)
        clean = ((self.z - self.s[i] * eps) / self.a[i]).clamp(-3, 3)
        self.z = self.a[i + 1] * clean + self.s[i + 1] * eps
        self.i += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    opt = parser.parse_args()

    torch.manual_seed(0)
    images = 2 if opt.tiny else 4
    with torch.device(opt.device):
        model = DiT(64, 2, 4, 8) if opt.tiny else DiT(2048, 12, 16, 32)
    model.eval().requires_grad_(False)
    if opt.fix:
        model.to(torch.bfloat16)
    sampler = Sampler(model, images, torch.bfloat16 if opt.fix else torch.float32, opt.device)
    cuda = opt.device.startswith("cuda")
    mixed = torch.autocast(opt.device.split(":")[0], dtype=torch.bfloat16, enabled=not opt.fix)  # FAULT

    with torch.inference_mode(), mixed:
        sampler.step()
        checksum = sampler.z.abs().mean().item()
        for _ in range(9):
            sampler.step()
        if cuda:
            torch.cuda.synchronize()
        blocks, total, stop = [], 0, time.perf_counter() + opt.seconds
        while time.perf_counter() < stop and not (opt.steps and total >= opt.steps):
            count = min(10, opt.steps - total) if opt.steps else 10
            t0 = time.perf_counter()
            for _ in range(count):
                sampler.step()
            if cuda:
                torch.cuda.synchronize()
            blocks.append((time.perf_counter() - t0) * 1000 / count)
            total += count

    blocks.sort()
    print(json.dumps({"name": "latent_sampler", "fix": opt.fix, "step_ms": blocks[len(blocks) // 2],
                      "samples": images, "loss": checksum}))


if __name__ == "__main__":
    main()

"""NeRF of one forward-facing scene: random pixels of a random training view, coarse + fine network.

cured: the pixels of a batch are another random draw (statistically the same training; with replacement, about 3 repeats
in 2048 of 762k pixels).
"""
import argparse
import json
import os
import statistics
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda"
H, W, FOCAL, VIEWS = 756, 1008, 815.0, 20
N_RAND, N_COARSE, N_FINE, CHUNK_NEAR, CHUNK_FAR = 2048, 64, 128, 1.0, 6.0
WIDTH, DEPTH, SKIP = 256, 8, 4
LR, DECAY_STEPS, LOG_EVERY = 5e-4, 250_000, 100
BLOCK = 10
if os.environ.get("TINY"):
    DEVICE = "cpu"
    H, W, FOCAL, VIEWS = 24, 32, 30.0, 3
    N_RAND, N_COARSE, N_FINE = 32, 8, 8
    WIDTH = 16


class Encoding(nn.Module):
    def __init__(self, bands):
        super().__init__()
        self.register_buffer("freq", 2.0 ** torch.arange(bands))
        self.dim = 3 + 6 * bands

    def forward(self, x):
        ang = (x.unsqueeze(-2) * self.freq.unsqueeze(-1)).flatten(-2)
        return torch.cat([x, ang.sin(), ang.cos()], dim=-1)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc_x, self.enc_d = Encoding(10), Encoding(4)
        dims = [self.enc_x.dim] + [WIDTH] * (DEPTH - 1)
        self.pts = nn.ModuleList(
            nn.Linear(d + (self.enc_x.dim if i == SKIP else 0), WIDTH) for i, d in enumerate(dims))
        self.sigma = nn.Linear(WIDTH, 1)
        self.feature = nn.Linear(WIDTH, WIDTH)
        self.view = nn.Linear(WIDTH + self.enc_d.dim, WIDTH // 2)
        self.rgb = nn.Linear(WIDTH // 2, 3)

    def forward(self, x, d):
        e = self.enc_x(x)
        h = e
        for i, layer in enumerate(self.pts):
            if i == SKIP:
                h = torch.cat([h, e.to(h.dtype)], dim=-1)
            h = F.relu(layer(h), inplace=True)
        sigma = self.sigma(h).squeeze(-1)
        f = self.feature(h)
        d = self.enc_d(d).to(f.dtype).unsqueeze(1).expand(-1, x.shape[1], -1)
        h = F.relu(self.view(torch.cat([f, d], dim=-1)), inplace=True)
        return torch.sigmoid(self.rgb(h).float()), F.relu(sigma.float())


def composite(rgb, sigma, z, norm):
    delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e3)], dim=-1) * norm
    tau = sigma * delta
    through = torch.exp(-(torch.cumsum(tau, dim=-1) - tau).clamp(max=80.0))
    weights = through * (1.0 - torch.exp(-tau))
    return (weights.unsqueeze(-1) * rgb).sum(1), weights


@torch.no_grad()
def sample_fine(z, weights, n):
    mid = 0.5 * (z[:, 1:] + z[:, :-1])
    pdf = weights[:, 1:-1] + 1e-5
    cdf = torch.cumsum(pdf / pdf.sum(-1, keepdim=True), dim=-1)
    cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], dim=-1)
    u = torch.rand(z.shape[0], n, device=z.device)
    hi = torch.searchsorted(cdf, u, right=True).clamp(1, cdf.shape[1] - 1)
    lo = hi - 1
    c0, c1 = cdf.gather(1, lo), cdf.gather(1, hi)
    m0, m1 = mid.gather(1, lo), mid.gather(1, hi)
    return m0 + (u - c0) / (c1 - c0).clamp_min(1e-5) * (m1 - m0)


def get_rays(pix, pose):
    i, j = (pix % W).float(), torch.div(pix, W, rounding_mode="floor").float()
    dirs = torch.stack([(i - 0.5 * W) / FOCAL, -(j - 0.5 * H) / FOCAL, -torch.ones_like(i)], dim=-1)
    rays_d = dirs @ pose[:, :3].T
    return pose[:, 3].expand_as(rays_d), rays_d


def render(coarse, fine, rays_o, rays_d):
    norm = rays_d.norm(dim=-1, keepdim=True)
    view = rays_d / norm
    t = torch.linspace(CHUNK_NEAR, CHUNK_FAR, N_COARSE + 1, device=rays_o.device)
    z = t[:-1] + torch.rand(rays_o.shape[0], N_COARSE, device=rays_o.device) * (t[1:] - t[:-1])
    rgb, sigma = coarse(rays_o.unsqueeze(1) + rays_d.unsqueeze(1) * z.unsqueeze(-1), view)
    rgb_c, weights = composite(rgb, sigma, z, norm)
    z, _ = torch.sort(torch.cat([z, sample_fine(z, weights.detach(), N_FINE)], dim=-1), dim=-1)
    rgb, sigma = fine(rays_o.unsqueeze(1) + rays_d.unsqueeze(1) * z.unsqueeze(-1), view)
    rgb_f, _ = composite(rgb, sigma, z, norm)
    return rgb_c, rgb_f


def build(cured):
    torch.manual_seed(0)
    np.random.seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    coarse, fine = NeRF().to(DEVICE), NeRF().to(DEVICE)
    params = list(coarse.parameters()) + list(fine.parameters())
    optimizer = torch.optim.Adam(params, lr=LR, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / DECAY_STEPS))

    # all views and poses on the device
    ramp = torch.linspace(0, 1, H * W, device=DEVICE).unsqueeze(-1)
    images = torch.stack([torch.cat([ramp, 1 - ramp, ramp * v / VIEWS], dim=-1) for v in range(VIEWS)])
    poses = torch.eye(3, 4, device=DEVICE).repeat(VIEWS, 1, 1)
    poses[:, :, 3] = 0.1 * torch.randn(VIEWS, 3, device=DEVICE)
    state = {"i": 0, "mse": torch.zeros((), device=DEVICE)}

    def step():
        view = np.random.randint(VIEWS)
        if cured:
            pix = torch.randint(H * W, (N_RAND,), device=DEVICE)
        else:
            pix = torch.from_numpy(np.random.choice(H * W, size=N_RAND, replace=False)).to(DEVICE)
        rays_o, rays_d = get_rays(pix, poses[view])
        target = images[view].index_select(0, pix)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            rgb_c, rgb_f = render(coarse, fine, rays_o, rays_d)
        mse = F.mse_loss(rgb_f, target)
        loss = mse + F.mse_loss(rgb_c, target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        state["i"] += 1
        state["mse"] += mse.detach()
        if state["i"] % LOG_EVERY == 0:
            state["psnr"] = -10.0 * np.log10(state["mse"].item() / LOG_EVERY)
            state["mse"].zero_()
        return loss.detach()

    return step


def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def run(cured: bool, seconds: float) -> float:
    step = build(cured)
    for _ in range(10):
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
    print(json.dumps({"name": "nerf_scene", "cured": a.cured, "step_ms": run(a.cured, a.seconds)}))

"""Physics-informed network for the heat equation u_t = k * u_xx.

Fault: collocation points come from numpy as float64 and the network was made .double()
to match (lines marked FAULT): all matrix products, tanh and derivatives run in float64.
Cure: float32 points and a float32 network.
"""
import argparse
import json
import statistics
import time

import numpy as np
import torch
import torch.nn as nn


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


class PINN(nn.Module):
    def __init__(self, hidden, depth):
        super().__init__()
        layers = [nn.Linear(2, hidden), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), nn.Tanh()]
        layers.append(nn.Linear(hidden, 1))
        self.net = nn.Sequential(*layers)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def sample_points(rng, n, single):
    pts = rng.uniform(0.0, 1.0, size=(n, 2))  # FAULT
    if single:
        pts = pts.astype(np.float32)
    return torch.from_numpy(pts)


def grad(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def pde_loss(model, pts, kappa=0.1):
    x = pts[:, :1].clone().requires_grad_(True)
    t = pts[:, 1:].clone().requires_grad_(True)
    u = model(x, t)
    u_x = grad(u, x)
    residual = grad(u, t) - kappa * grad(u_x, x)
    return residual.pow(2).mean()


def boundary_loss(model, pts):
    x, t = pts[:, :1], pts[:, 1:]
    start = model(x, torch.zeros_like(t)) - torch.sin(torch.pi * x)
    left, right = model(torch.zeros_like(x), t), model(torch.ones_like(x), t)
    return start.pow(2).mean() + left.pow(2).mean() + right.pow(2).mean()


def train(args):
    device = torch.device(args.device)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    hidden, depth, interior, border = (16, 3, 128, 32) if args.tiny else (512, 6, 16384, 2048)
    model = PINN(hidden, depth).to(device)
    if not args.fix:
        model = model.double()  # FAULT
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    timer = StepTimer(device, args.seconds, args.steps)
    for step in range(1_000_000_000):
        inner = sample_points(rng, interior, args.fix).to(device)
        edge = sample_points(rng, border, args.fix).to(device)
        loss = pde_loss(model, inner) + boundary_loss(model, edge)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if timer.done():
            break
    return timer, interior, loss


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
    timer.report("numpy_double", args.fix, samples, loss)


if __name__ == "__main__":
    main()

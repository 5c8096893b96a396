"""torch.compile of a model that prints from inside and reads .item(); cure: without."""
import argparse, json, statistics, time
import torch
from torch import nn

def net(width, depth, device):
    blocks = []
    for _ in range(depth):
        blocks += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*blocks).to(device)

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fix", action="store_true"); p.add_argument("--tiny", action="store_true")
    p.add_argument("--steps", type=int, default=10**9); p.add_argument("--seconds", type=float, default=2.5)
    p.add_argument("--device", default="cuda")
    a = p.parse_args(); dev = torch.device(a.device); torch.manual_seed(0)
    sync = torch.cuda.synchronize if dev.type == "cuda" else (lambda: None)
    width = 64 if a.tiny else 1024
    class Block(nn.Module):
        def __init__(self):
            super().__init__(); self.l = nn.Linear(width, width); self.n = nn.LayerNorm(width)
        def forward(self, x):
            y = torch.nn.functional.gelu(self.l(self.n(x)))
            if not a.fix and y.abs().max().item() > 1e4:  # FAULT
                y = y / 2
            return x + y
    model = nn.Sequential(*[Block() for _ in range(8)]).to(dev)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model)
    data = torch.randn(64 if a.tiny else 1024, width, device=dev)
    times, done, start, block_t, block_n = [], 0, None, None, 0
    loss = None
    while True:
        loss = run(data).square().mean()
        opt.zero_grad(); loss.backward(); opt.step()
        done += 1
        if done == 8:
            sync(); start = block_t = time.perf_counter(); block_n = 0
        elif done > 8:
            block_n += 1
            now = time.perf_counter()
            if now - block_t >= a.seconds / 8 or done >= a.steps:
                sync(); times.append((time.perf_counter() - block_t) / block_n)
                block_t, block_n = time.perf_counter(), 0
            if done >= a.steps or now - start > a.seconds:
                break
    sync()
    print(json.dumps(dict(name="compiled_breaks", fix=a.fix, step_ms=1e3 * statistics.median(times), samples=1, loss=float(loss))))

main()

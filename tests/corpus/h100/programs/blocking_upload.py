"""Pinned batches of 200 MB are uploaded on the compute stream, blocking; cure: non_blocking and a side stream one batch ahead."""
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
    width = 64 if a.tiny else 4096
    rows = 64 if a.tiny else 12288
    model = net(width, 3, dev); opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    can = dev.type == "cuda"
    host = [torch.randn(rows, width) for _ in range(3)]
    host = [h.pin_memory() for h in host] if can else host
    side = torch.cuda.Stream() if can else None
    ahead = None
    times, done, start, block_t, block_n = [], 0, None, None, 0
    loss = None
    while True:
        if a.fix and can:
            if ahead is None:
                ahead = host[0].to(dev, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            x = ahead; x.record_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ahead = host[done % 3].to(dev, non_blocking=True)
        else:
            x = host[done % 3].to(dev)  # FAULT
        with torch.autocast(dev.type, torch.bfloat16):
            loss = model(x).square().mean()
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
    print(json.dumps(dict(name="blocking_upload", fix=a.fix, step_ms=1e3 * statistics.median(times), samples=1, loss=float(loss))))

main()

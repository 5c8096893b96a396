"""A small transformer trunk with a vocabulary of 200,000 whose logits are float32 and kept whole; cure: loss in chunks of rows with bf16 logits."""
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
    width, vocabulary, rows = (32, 500, 64) if a.tiny else (1024, 200_000, 4096)
    trunk = net(width, 4, dev); head = nn.Linear(width, vocabulary, bias=False).to(dev)
    opt = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=1e-3)
    data = torch.randn(rows, width, device=dev); y = torch.randint(0, vocabulary, (rows,), device=dev)
    times, done, start, block_t, block_n = [], 0, None, None, 0
    loss = None
    while True:
        opt.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16):
            h = trunk(data)
        if a.fix:
            leaf = h.detach().requires_grad_(); loss = 0.0
            for part, target in zip(leaf.chunk(8), y.chunk(8)):
                with torch.autocast(dev.type, torch.bfloat16):
                    logits = head(part)
                one = nn.functional.cross_entropy(logits, target, reduction="sum") / rows
                one.backward(); loss = loss + one.detach()
            h.backward(leaf.grad)
        else:
            logits = head(h.float()).float()  # FAULT
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
        opt.step()
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
    print(json.dumps(dict(name="vocabulary", fix=a.fix, step_ms=1e3 * statistics.median(times), samples=1, loss=float(loss))))

main()

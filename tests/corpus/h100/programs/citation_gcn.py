"""Fault: GCNConv recomputes self-loops and the symmetric normalisation each pass of a fixed graph. Cure: cached=True.

Full-batch, transductive node classification: the graph never changes, every epoch is one step.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

ap = argparse.ArgumentParser()
ap.add_argument("--fix", action="store_true")
ap.add_argument("--tiny", action="store_true")
ap.add_argument("--seconds", type=float, default=2.5)
ap.add_argument("--steps", type=int, default=0)
ap.add_argument("--device", default="cuda")


def make_graph(nodes, edges, feats, classes, device):
    g = torch.Generator(device=device).manual_seed(1)
    half = edges // 2
    # a skewed degree distribution, as citation and web graphs have
    src = (torch.rand(half, generator=g, device=device).pow(2) * nodes).long()
    dst = torch.randint(0, nodes, (half,), generator=g, device=device)
    edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    order = edge_index[1].argsort(stable=True)
    data = Data(x=torch.randn(nodes, feats, generator=g, device=device), edge_index=edge_index[:, order].contiguous())
    data.y = torch.randint(0, classes, (nodes,), generator=g, device=device)
    data.train_idx = torch.randperm(nodes, generator=g, device=device)[:nodes // 5]
    return data


class GCN(nn.Module):
    def __init__(self, d_in, d_hidden, classes, layers, cached):
        super().__init__()
        dims = [d_in] + [d_hidden] * (layers - 1) + [classes]
        self.convs = nn.ModuleList(
            GCNConv(a, b, cached=cached)  # FAULT
            for a, b in zip(dims[:-1], dims[1:]))

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
            x = F.dropout(x, 0.5, self.training)
        return self.convs[-1](x, edge_index)


def main():
    args = ap.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    nodes, edges, feats, hidden, classes = (500, 3000, 12, 8, 5) if args.tiny else (250_000, 6_000_000, 128, 16, 16)
    data = make_graph(nodes, edges, feats, classes, args.device)
    target = data.y[data.train_idx]
    model = GCN(feats, hidden, classes, 3, cached=args.fix).to(args.device)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, fused=True)
    sync = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def epoch():
        model.train()
        opt.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out.index_select(0, data.train_idx), target)
        loss.backward()
        opt.step()
        return loss.detach()

    for _ in range(10):
        loss = epoch()
    sync()

    times, n = [], 0
    began = time.perf_counter()
    while time.perf_counter() < began + args.seconds:
        k = 10 if not args.steps else min(10, args.steps - n)
        if k == 0:
            break
        t = time.perf_counter()
        for _ in range(k):
            loss = epoch()
        sync()
        times.append((time.perf_counter() - t) / k)
        n += k
    print(json.dumps({"name": "citation_gcn", "fix": args.fix, "step_ms": round(1e3 * statistics.median(times), 3),
                      "samples": nodes, "loss": round(float(loss), 5)}))


if __name__ == "__main__":
    main()

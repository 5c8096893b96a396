"""Real memory snapshots of small programs on a GPU, each with what PyTorch itself counted.

A transformer that trains, the same with a leak, one that runs out of memory full of tensors, and
one that runs out of it in fragments. Beside each ``NAME.pickle`` stands ``NAME.json``: bytes asked
for and reserved, as ``torch.cuda.memory_stats`` gave them, to hold our sums against.

    python benchmarks/record_gpu.py --snapshots --output DIR     # calls this
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTRIES = 100_000


def train(steps: int, *, leak: bool = False, batch: int = 8) -> list[Any]:
    """A small transformer with Adam; what it keeps of each step where it leaks."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(512, 16_000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Any] = []
    for _ in range(steps):
        x = torch.randn(batch, 256, 512).cuda()
        y = torch.randint(0, 16_000, (batch * 256,)).cuda()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if leak:
            kept.append(torch.empty(4 << 20, device="cuda"))
    return kept


def full() -> list[Any]:
    """Ever larger batches, until memory runs out."""
    batch = 8
    while True:
        train(1, batch=batch)
        batch *= 2


def fragments() -> list[Any]:
    """Two of three blocks are let go of, then one is asked for that is larger than each hole."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    count = free // (96 << 20)
    tensors = [torch.empty(96 << 20, dtype=torch.uint8, device="cuda") for _ in range(count)]
    pieces = []
    for number in range(len(tensors)):
        tensors[number] = None  # type: ignore[call-overload]
        pieces.append(
            [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (45, 6, 45)]
        )
    kept = [middle for _, middle, _ in pieces]
    del pieces
    kept.append(torch.empty(90 << 20, dtype=torch.uint8, device="cuda"))
    return kept


PROGRAMS: dict[str, Callable[[], list[Any]]] = {
    "training": lambda: train(8),
    "leak": lambda: train(14, leak=True),
    "full": full,
    "fragments": fragments,
}


def record_snapshots(folder: Path) -> None:
    """All of them, one after the other."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        torch.cuda.empty_cache()
        file = folder / f"{name}.pickle"
        counted: dict[str, Any] = {"torch": torch.__version__, "out_of_memory": False}

        def save(file: Path = file, counted: dict[str, Any] = counted) -> None:
            counted["allocated"] = torch.cuda.memory_stats()["requested_bytes.all.current"]
            counted["reserved"] = torch.cuda.memory_reserved()
            torch.cuda.memory._dump_snapshot(str(file))

        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="all")
        kept: list[Any] = []
        try:
            kept = program()
            save()
        except torch.OutOfMemoryError:
            counted["out_of_memory"] = True
            save()
        torch.cuda.memory._record_memory_history(None)
        kept.clear()
        file.with_suffix(".json").write_text(json.dumps(counted, indent=2) + "\n", "utf-8")
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {counted}")

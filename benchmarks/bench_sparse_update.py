"""The cost of a sparse gradient of an embedding on a CPU, and a dense one: backward and update.

python benchmarks/bench_sparse_update.py

CPU time of one thread, so that other programs matter little. For Adagrad the sparse way takes some
0.2 ms for a table and 7 ns for each value looked up: sorting, adding up and scattering. SGD takes a
tenth, SparseAdam twice as much. The dense way takes 1 to 4 ns for each value of the table, or 0.5
with SGD and fused optimizers.
"""

from __future__ import annotations

from statistics import median
from time import thread_time

import torch

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, torch.optim.SGD),
    "Adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "Adam": (torch.optim.Adam, torch.optim.SparseAdam),
}


def update_ms(name: str, rows: int, size: int, batch: int, *, sparse: bool) -> float:
    """Return the time of a backward pass and an update with random rows, ms."""
    table = torch.nn.Embedding(rows, size, sparse=sparse)
    optimizer = OPTIMIZERS[name][sparse](table.parameters(), lr=0.01)
    took = []
    for _ in range(10):
        result = table(torch.randint(rows, (batch,)))
        optimizer.zero_grad()
        begin = thread_time()
        result.sum().backward()
        optimizer.step()
        took.append(thread_time() - begin)
    return 1e3 * median(took[3:])


def main() -> None:
    """Print both times for optimizers, batches and sizes of tables."""
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        for size in (32, 128):
            for batch in (512, 2048):
                for ratio in (1, 10, 40):
                    rows = batch * ratio
                    dense, sparse = (
                        update_ms(name, rows, size, batch, sparse=way) for way in (False, True)
                    )
                    print(
                        f"{name:8} {rows:6} × {size:3}, {batch:4} looked up: dense {dense:6.2f} ms,"
                        f" sparse {sparse:5.2f} ms ({sparse / dense:.0%})"
                    )


if __name__ == "__main__":
    main()

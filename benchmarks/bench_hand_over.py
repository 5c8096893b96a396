"""The cost of taking a ready batch over from a DataLoader's worker: queue, shared memory,
wake-up.

python benchmarks/bench_hand_over.py

Workers have nothing to do and the loop sleeps between batches, so every batch is ready when it is
asked for. What is left is the hand-over. The rules about loaders say nothing of waits that short
(``min_batch_ms``, ``min_wait_ms``).
"""

from __future__ import annotations

from statistics import median, quantiles
from time import perf_counter, sleep

import torch
from torch.utils.data import DataLoader, Dataset

BATCHES = 60


class ReadyDataset(Dataset[torch.Tensor]):
    """Samples that take no time."""

    def __init__(self, numbers: int) -> None:
        self.sample = torch.zeros(numbers)

    def __len__(self) -> int:
        return 32 * (BATCHES + 20)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def hand_over(workers: int, numbers: int) -> list[float]:
    """Seconds that ``next`` takes for batches that are ready."""
    batches = iter(DataLoader(ReadyDataset(numbers), batch_size=32, num_workers=workers))
    for _ in range(10):  # the start of the workers
        next(batches)
    took = []
    for _ in range(BATCHES):
        sleep(0.05)
        begin = perf_counter()
        next(batches)
        took.append(perf_counter() - begin)
    return took


def main() -> None:
    """Print a line for each number of workers and size of a batch."""
    print("workers  batch, KiB  median, ms  95th percentile, ms")
    for workers in (2, 6):
        for numbers in (64, 16384):
            took = hand_over(workers, numbers)
            p95 = quantiles(took, n=20)[-1]
            kib = 32 * 4 * numbers / 1024
            print(f"{workers:>7}  {kib:>10.0f}  {1e3 * median(took):>10.2f}  {1e3 * p95:>19.2f}")


if __name__ == "__main__":
    main()

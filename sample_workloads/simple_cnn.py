"""The textbook training loop, slow the way most first training scripts are."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from advisor.sample_workloads import Setup, workload

BATCH = 64  # images a step at scale 1
CLASSES = 10
POOL = 1024  # distinct images; an epoch sees them several times
EPOCH = 8192
MAX_WORKERS = 4  # loader processes of the cured variant, where there are as many cores


class Images(Dataset):
    """A map-style data set of seeded images, prepared one at a time like decoded files would be.

    An item is ``(float32 tensor of shape (3, 32, 32), int label)``. Each class has its own
    pattern of tiles under the noise, so that there is something to learn."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tiles = torch.rand(CLASSES, 3, 4, 4, generator=generator)
        patterns = tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)
        labels = torch.randint(CLASSES, (POOL,), generator=generator)
        noise = torch.rand(POOL, 3, 32, 32, generator=generator)
        self.pixels = (patterns[labels] + noise).mul_(127.5).to(torch.uint8)
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Any, int]:
        index %= POOL
        image = pad(self.pixels[index].float().div(255), (4, 4, 4, 4))
        down, right = index % 9, index // 9 % 9  # crop and flip by index: the same in any process
        image = image[:, down : down + 32, right : right + 32]
        if index % 2:
            image = image.flip(-1)
        mean, std = image.mean((1, 2), keepdim=True), image.std((1, 2), keepdim=True)
        return (image - mean) / std, self.labels[index]


def build_model() -> nn.Sequential:
    """Conv, pool, conv, pool, linear: 6,882 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, CLASSES),
    )


@workload(
    finds=("single-process-loader",),
    also=("pageable-copies", "implicit-sync", "cpu-before-first-kernel"),
    shown_on="cpu",
    cpu_scale=1.0,
    steps=8,
)
def simple_cnn(run: Setup) -> Iterator[Any]:
    """The textbook training loop: a small CNN on 32x32 images, fed by one process.

    Slow on purpose, the way most first training scripts are. The DataLoader has ``num_workers=0``:
    the training process prepares every image itself while the GPU waits. Each batch is copied
    with ``.to(device)`` from pageable memory, which blocks the host. ``loss.item()`` in each
    step makes the host wait for the GPU before it may launch the next one.

    The cure: loader workers, pinned memory with ``non_blocking=True`` copies, and losses that stay
    on the device. Both variants train the same model on the same batches."""
    torch.manual_seed(run.seed)
    loader = DataLoader(
        Images(run.seed),
        batch_size=run.size(BATCH),
        shuffle=True,
        drop_last=True,
        num_workers=min(MAX_WORKERS, os.cpu_count() or 1) if run.cured else 0,
        persistent_workers=run.cured,
        pin_memory=run.cured and run.on_gpu,
        generator=torch.Generator().manual_seed(run.seed),
    )
    model = build_model().to(run.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    while True:
        for images, labels in loader:
            images = images.to(run.device, non_blocking=run.cured)
            labels = labels.to(run.device, non_blocking=run.cured)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.detach() if run.cured else loss.item()

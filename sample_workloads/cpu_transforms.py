"""Image transforms that keep the loader's workers busy longer than the step takes.

Two workers decode 512x512 images, convert them to float, jitter and normalise all of it, and throw
most of it away in the crop at the end. They cannot keep up, and what they produce is four times as
large on the way to the GPU as the bytes it came from.

The cure: crop first, hand over bytes, and do the arithmetic on the device for the whole batch at
once. The same numbers arrive at the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(
    finds=("dataloader-wait", "cpu-bound-transforms"), shown_on="cpu", cpu_scale=1 / 8, steps=8
)

FULL, CROP = 512, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photos(Dataset):
    """Seeded images with the transforms of an image classifier."""

    def __init__(self, seed: int, late: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pixels = torch.randint(
            0, 256, (32, 3, FULL, FULL), dtype=torch.uint8, generator=generator
        )
        self.late = late  # arithmetic is left to the device
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Any, float]:
        image = self.pixels[index % 32]
        top, left = index * 37 % (FULL - CROP), index * 61 % (FULL - CROP)
        brightness = 0.8 + index % 5 / 10
        if not self.late:
            image = image.float() / 255
            for _ in range(4):  # saturation, contrast, hue, gamma: each a pass over all pixels
                image = image.clamp(0, 1).pow(1.0)
            image = (image * brightness - self.mean) / self.std
        return image[:, top : top + CROP, left : left + CROP].contiguous(), brightness


def loop(run: Setup) -> Iterator[Any]:
    """Train a classifier of one class; yields the loss of each step."""
    torch.manual_seed(run.seed)
    loader = DataLoader(
        Photos(run.seed, late=run.cured),
        batch_size=run.size(64),
        num_workers=2,
        persistent_workers=True,
        pin_memory=run.on_gpu,
    )
    mean = torch.tensor(MEAN, device=run.device)[:, None, None]
    std = torch.tensor(STD, device=run.device)[:, None, None]
    width = run.size(128, 8)
    model = nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, width, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1),
    ).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    while True:
        for images, brightness in loader:
            images = images.to(run.device, non_blocking=True)
            brightness = brightness.to(run.device, torch.float32, non_blocking=True)
            if run.cured:
                images = (images.float() / 255 * brightness[:, None, None, None] - mean) / std
            optimizer.zero_grad()
            loss = (model(images).squeeze(1) - brightness).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach()

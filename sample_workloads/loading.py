"""Data on its way to the GPU: read, decoded, padded and copied too slowly."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import sgd, wide_block

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


@workload(
    finds=("dataloader-wait", "cpu-bound-transforms"), shown_on="cpu", cpu_scale=1 / 8, steps=8
)
def cpu_transforms(run: Setup) -> Iterator[Any]:
    """Image transforms that keep the loader's workers busy longer than the step takes.

    Two workers decode 512x512 images, convert them to float, and jitter and normalise all of it.
    The crop at the end throws most of it away. They cannot keep up, and what they produce is four
    times as large on the way to the GPU as the bytes it came from.

    The cure: crop first, hand over bytes, and do the arithmetic on the device for the whole batch
    at once. The same numbers arrive at the model."""
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
    optimizer = sgd(model)

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


class Stored(Dataset):
    """Sequences of 64 vectors whose reading takes two milliseconds."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, self.width, generator=generator).expand(64, -1).contiguous()


@workload(finds=("single-process-loader",), shown_on="cpu", cpu_scale=1 / 32, steps=8)
def loader_bound(run: Setup) -> Iterator[Any]:
    """A data set on slow storage, read by the training process itself.

    Each sample takes two milliseconds to read, as from a network file system, and ``num_workers=0``
    reads one after the other between two steps. The time is spent waiting, not computing, so the
    processor looks idle and so does the GPU.

    The cure: workers that read ahead, in parallel. Waiting needs no core, so there may be more of
    them than cores."""
    width = run.size(8192, 128)
    loader = DataLoader(
        Stored(width // 16),
        batch_size=16,
        num_workers=8 if run.cured else 0,
        pin_memory=run.on_gpu,
        persistent_workers=run.cured,
    )
    model = nn.Sequential(
        nn.Linear(width // 16, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width // 16),
    ).to(run.device, run.dtype)
    optimizer = sgd(model)

    while True:
        for batch in loader:
            batch = batch.to(run.device, run.dtype, non_blocking=True)
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach()


LONGEST, ROUND = 256, 16
VOCABULARY = 4096


class Texts(Dataset):
    """Seeded tokens; 64 texts in a row are of similar length, in shuffled groups."""

    def __init__(self, seed: int, words: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = (torch.rand(1 << 12, generator=generator) ** 4 * 200 + 16).int()
        groups = lengths.sort().values.view(-1, 64)
        self.lengths = groups[torch.randperm(64, generator=generator)].flatten().tolist()
        self.tokens = torch.randint(1, words, (1 << 12, LONGEST), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, : self.lengths[index]]


class Collate:
    """Function that joins texts to one batch with its mask."""

    def __init__(self, to_longest: bool) -> None:
        self.to_longest = to_longest

    def __call__(self, texts: list[Any]) -> dict[str, Any]:
        length = LONGEST
        if not self.to_longest:
            length = -(-max(len(text) for text in texts) // ROUND) * ROUND
        tokens = torch.zeros(len(texts), length, dtype=torch.long)
        mask = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return {"input_ids": tokens, "attention_mask": mask}


@workload(finds=("padding-waste",), shown_on="cpu", cpu_scale=1 / 32, around=260)
def padding_waste(run: Setup) -> Iterator[Any]:
    """Short texts padded to the longest that could ever come.

    The tokenizer fills every batch up to 256 positions, while most texts have fewer than fifty. All
    of them go through every layer, and the loss leaves them out at the end.

    The cure: texts sorted by length, and each batch padded to its own longest. (Here both variants
    see the same texts in the same batches.)"""
    width, words = run.size(1024, 32), run.size(VOCABULARY, 64)
    loader = DataLoader(
        Texts(run.seed, words),
        batch_size=run.size(64, 8),
        collate_fn=Collate(to_longest=not run.cured),
        num_workers=2,
        persistent_workers=True,
        pin_memory=run.on_gpu,
    )
    hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(words, width), *hidden, nn.Linear(width, words))
    model = model.to(run.device)
    optimizer = sgd(model)

    while True:
        for batch in loader:
            tokens = batch["input_ids"].to(run.device, non_blocking=True)
            mask = batch["attention_mask"].to(run.device, non_blocking=True)
            optimizer.zero_grad()
            each = cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none")
            loss = (each * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            yield loss.detach()


def batches(run: Setup, width: int) -> Iterator[Any]:
    """Yield batches on the device, for ever; four distinct ones in turn."""
    host = [torch.randn(run.size(16384, 8), width) for _ in range(4)]
    if not (run.cured and run.on_gpu):
        while True:
            for batch in host:
                yield batch.to(run.device)

    host = [batch.pin_memory() for batch in host]
    side = torch.cuda.Stream()
    ahead: Any = None
    while True:
        for batch in host:
            with torch.cuda.stream(side):
                coming = batch.to(run.device, non_blocking=True)
            if ahead is not None:
                ready, event = ahead
                torch.cuda.current_stream().wait_event(event)
                ready.record_stream(torch.cuda.current_stream())
                yield ready
            event = torch.cuda.Event()
            event.record(side)
            ahead = coming, event


@workload(finds=("pageable-copies",), cpu_scale=1 / 64)
def pageable_copies(run: Setup) -> Iterator[Any]:
    """Large batches copied to the GPU from ordinary, pageable memory.

    The driver has to stage such a copy through a pinned buffer, piece by piece. The host thread
    stands still meanwhile. Nothing can be launched, and copy and compute cannot overlap.

    The cure: pinned memory, ``non_blocking=True``, and a stream of its own on which the next batch
    is copied while the present one is computed."""
    width = 2048 if run.on_gpu else 256
    model = wide_block(width).to(run.device, run.dtype)
    optimizer = sgd(model)

    for batch in batches(run, width):
        optimizer.zero_grad()
        batch = batch.to(run.dtype)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@workload(
    finds=("workers-respawned",),
    also=("dataloader-wait",),
    shown_on="cpu",
    cpu_scale=1 / 8,
    steps=12,
)
def worker_respawn(run: Setup) -> Iterator[Any]:
    """Short epochs that start their loader's workers anew each time.

    An epoch has four batches, and without ``persistent_workers`` each begins with new processes.
    They import modules and copy the data set, and nothing of the first batch is prefetched.

    The cure: ``persistent_workers=True``."""
    batch, width = 64, run.size(1024, 64)
    samples = TensorDataset(torch.randn(4 * batch, width), torch.randint(10, (4 * batch,)))
    loader = DataLoader(
        samples,
        batch_size=batch,
        num_workers=2,
        pin_memory=run.on_gpu,
        persistent_workers=run.cured,
    )
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))
    model.to(run.device)
    criterion = nn.CrossEntropyLoss()
    optimizer = sgd(model)

    while True:
        for inputs, labels in loader:
            inputs = inputs.to(run.device, non_blocking=True)
            labels = labels.to(run.device, non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            yield loss.detach()

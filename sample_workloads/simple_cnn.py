"""The textbook training loop: a small CNN on 32x32 images, fed by one process.

Slow on purpose, the way most first training scripts are:

- the DataLoader has ``num_workers=0``: every image is prepared by the training process itself,
  and the GPU waits meanwhile;
- each batch is copied with ``.to(device)`` from pageable memory, which blocks the host;
- ``loss.item()`` in each step makes the host wait for the GPU before it may launch the next step.

Findings it must produce: waiting for the data loader, with its single process as the cause (on
every device); implicit synchronisation by ``.item()`` and pageable copies (on a GPU).

The cure, ``variant="cured"``: loader workers, pinned memory with ``non_blocking=True`` copies, and
losses that stay on the device until the end. Both variants train the same model on the same
batches, so their losses agree.

    python -m advisor.sample_workloads.simple_cnn --out trace.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Variant = Literal["slow", "cured"]

BATCH = 64  # images a step at scale 1
CLASSES = 10
POOL = 1024  # distinct images; longer runs see them again
MAX_WORKERS = 4  # loader processes of the cured variant, where there are as many cores
SKIPPED = 2  # steps before the profiler starts: workers, lazy initialisation
WARMUP = 2  # steps profiled and thrown away: the profiler's own start-up cost


class Images:
    """A map-style data set of seeded images, prepared one at a time like decoded files would be.

    An item is ``(float32 tensor of shape (3, 32, 32), int label)``. Each class has its own
    pattern of tiles under the noise, so that there is something to learn.
    """

    def __init__(self, length: int, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        tiles = torch.rand(CLASSES, 3, 4, 4, generator=generator)
        patterns = tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)
        labels = torch.randint(CLASSES, (min(length, POOL),), generator=generator)
        noise = torch.rand(len(labels), 3, 32, 32, generator=generator)
        self.pixels = (patterns[labels] + noise).mul_(127.5).to(torch.uint8)
        self.labels = labels.tolist()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from torch.nn.functional import pad

        index %= len(self.labels)
        image = pad(self.pixels[index].float().div(255), (4, 4, 4, 4))
        down, right = index % 9, index // 9 % 9  # crop and flip by index: the same in any process
        image = image[:, down : down + 32, right : right + 32]
        if index % 2:
            image = image.flip(-1)
        mean, std = image.mean((1, 2), keepdim=True), image.std((1, 2), keepdim=True)
        return (image - mean) / std, self.labels[index]


def build_model() -> Any:
    """Conv, pool, conv, pool, linear: 6,882 parameters."""
    from torch import nn

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


def train(
    variant: Variant = "slow",
    device: str | None = None,
    steps: int = 20,
    scale: float = 1.0,
    step_callback: Callable[[], object] | None = None,
    seed: int = 0,
) -> list[float]:
    """Train for ``steps`` steps of ``64 * scale`` images and return the loss of each step.

    ``device`` is CUDA where there is one, else the CPU. ``step_callback`` is called at the end of
    each step. The caller's random state is left as it was. Raises ValueError for an unknown
    variant, or for less than one step or image.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    if variant not in ("slow", "cured"):
        raise ValueError(f"unknown variant {variant!r}: choose 'slow' or 'cured'")
    batch_size = round(BATCH * scale)
    if steps < 1 or batch_size < 1:
        raise ValueError(f"nothing to train: {steps} steps of {batch_size} images")

    cured = variant == "cured"
    target = torch.device(device or default_device())
    on_gpu = target.type == "cuda"
    loader: Any = DataLoader(
        Images(steps * batch_size, seed),  # one epoch
        batch_size=batch_size,
        shuffle=True,
        num_workers=min(MAX_WORKERS, os.cpu_count() or 1) if cured else 0,
        pin_memory=cured and on_gpu,
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model()
    model.to(target)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    losses: list[Any] = []
    for images, labels in loader:
        images = images.to(target, non_blocking=cured)
        labels = labels.to(target, non_blocking=cured)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if cured else loss.item())
        if step_callback is not None:
            step_callback()
    return [float(loss) for loss in losses]


def record(
    path: str | os.PathLike[str],
    *,
    variant: Variant = "slow",
    device: str | None = None,
    steps: int = 8,
    scale: float = 1.0,
    seed: int = 0,
    with_stack: bool = True,
    record_shapes: bool = True,
) -> Path:
    """Train a little under ``torch.profiler`` and write the trace of ``steps`` steps to ``path``.

    The first steps are left out of the trace. ``path`` is written whole or not at all, compressed
    when it ends in ``.gz``; its folder must exist. Returns ``path``.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    device = device or default_device()
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)
    path = Path(path)

    def export(profiler: Any) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
            plain = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(plain))
            written = plain
            if path.suffix == ".gz":
                # torch's own .gz export compresses at level 9 and keeps the job waiting.
                written = Path(folder, "trace.json.gz")
                with plain.open("rb") as source, gzip.open(written, "wb", 1) as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
            written.replace(path)

    with profile(
        activities=activities,
        schedule=schedule(wait=SKIPPED, warmup=WARMUP, active=steps, repeat=1),
        on_trace_ready=export,
        record_shapes=record_shapes,
        with_stack=with_stack,
    ) as profiler:
        train(variant, device, SKIPPED + WARMUP + steps, scale, profiler.step, seed)
    return path


def default_device() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: list[str] | None = None) -> None:
    """Run from the command line: record a trace with ``--out``, else time the loop."""
    parser = argparse.ArgumentParser(
        prog="python -m advisor.sample_workloads.simple_cnn",
        description="The textbook CNN training loop, slow on purpose, and its cure.",
    )
    parser.add_argument("--out", type=Path, help="record a trace here (.json or .json.gz)")
    parser.add_argument("--variant", choices=("slow", "cured"), default="slow")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--steps", type=int, default=8, help="steps to record or time")
    parser.add_argument("--scale", type=float, default=1.0, help=f"batch size / {BATCH}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-stack", action="store_true", help="record no Python stacks")
    options = parser.parse_args(argv)
    common = {"variant": options.variant, "device": options.device, "scale": options.scale}

    if options.out is not None:
        path = record(
            options.out,
            steps=options.steps,
            seed=options.seed,
            with_stack=not options.no_stack,
            **common,
        )
        print(f"{options.steps} steps recorded: {path} ({path.stat().st_size / 1e6:.2f} MB)")
        return

    ends: list[float] = []
    losses = train(
        steps=options.steps + SKIPPED,
        seed=options.seed,
        step_callback=lambda: ends.append(time.perf_counter()),
        **common,
    )
    step_ms = (ends[-1] - ends[SKIPPED - 1]) / options.steps * 1e3
    print(f"{options.variant}: {step_ms:.2f} ms a step on average, last loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

"""Programs of several processes: gradients that are sent too often, too late, or waited for."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import layers, sgd, train

MICRO = 4  # micro-batches an optimizer step


@workload(finds=("missing-no-sync",), processes=2, cpu_scale=1 / 32)
def ddp_accumulation(run: Setup) -> Iterator[Any]:
    """Gradient accumulation that sends the gradients after every micro-batch.

    Four micro-batches make one optimizer step, and only the sum of their gradients is needed, but
    ``DistributedDataParallel`` averages over the processes in every backward pass.

    The cure: ``model.no_sync()`` for all but the last."""
    width, batch = run.size(4096, 32), run.size(1024, 16)
    model = DistributedDataParallel(layers(run, width, 6))
    torch.manual_seed(run.seed + 1 + run.rank)
    inputs = torch.randn(MICRO, batch, width, device=run.device, dtype=run.dtype)
    optimizer = sgd(model)

    while True:
        optimizer.zero_grad()
        total = torch.zeros((), device=run.device)
        for number, micro in enumerate(inputs):
            waits = run.cured and number < MICRO - 1
            with model.no_sync() if waits else nullcontext():
                loss = (model(micro) - micro).square().mean() / MICRO
                loss.backward()
            total += loss.detach()
        optimizer.step()
        yield total


@workload(
    finds=("exposed-communication", "poor-overlap", "small-collectives"),
    processes=2,
    cpu_scale=1 / 32,
)
def ddp_exposed(run: Setup) -> Iterator[Any]:
    """Gradients that are averaged over all GPUs only after the whole backward pass.

    One all-reduce a parameter, after ``backward()``: nothing is computed meanwhile, and the network
    stands idle before.

    The cure: ``DistributedDataParallel``, which sends the gradients of the last layers while those
    of the first are still being computed."""
    width, batch = run.size(4096, 32), run.size(4096, 16)
    model: Any = layers(run, width, 8)
    if run.cured:
        model = DistributedDataParallel(model)
    torch.manual_seed(run.seed + 1 + run.rank)
    inputs = torch.randn(batch, width, device=run.device, dtype=run.dtype)
    optimizer = sgd(model)

    while True:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        if not run.cured:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        yield loss.detach()


@workload(
    finds=("straggler-rank",),
    processes=2,
    shown_on="cpu",
    cpu_scale=1 / 16,
    differs="each process sees other samples",
)
def ddp_straggler(run: Setup) -> Iterator[Any]:
    """Two processes, of which one gets three quarters of the work.

    Samples are dealt out by file, and one file is larger: its process computes longer, and the
    other waits for it in every all-reduce.

    The cure: samples dealt out evenly. (The gradient is weighted by samples, so it is the same.)"""
    width, batch = run.size(4096, 32), run.size(8192, 16)
    model = DistributedDataParallel(layers(run, width, 6))
    inputs = torch.randn(2 * batch, width, device=run.device, dtype=run.dtype)
    cut = batch if run.cured else batch // 2
    own = inputs[:cut] if run.rank == 0 else inputs[cut:]
    yield from train(sgd(model), lambda: (model(own) - own).square().mean() * len(own) / batch)

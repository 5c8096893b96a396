"""torch.compile: graphs that break, shapes that are compiled anew, operators that nothing fuses."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, workload
from advisor.sample_workloads.running import sgd, train

LIMIT = 100.0


class BrokenBlock(nn.Module):
    """A residual layer that keeps its activations in bounds."""

    def __init__(self, width: int, watched: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.watched = watched

    def forward(self, x: Any) -> Any:
        """Rows in, rows out."""
        x = x + torch.nn.functional.gelu(self.linear(x))
        if self.watched:
            if x.abs().max().item() > LIMIT:
                x = x.clamp(-LIMIT, LIMIT)
            return x
        return x.clamp(-LIMIT, LIMIT)


@workload(finds=("graph-breaks",), cpu_scale=1 / 8)
def graph_breaks(run: Setup) -> Iterator[Any]:
    """A compiled model with values that are read in the middle of it.

    ``.item()`` in each block asks whether activations have run away. The compiler cannot follow a
    decision that depends on a value. So it ends one graph there and begins another.

    The cure: ``torch.clamp``, which needs no decision; ``fullgraph=True`` makes sure. (On a CPU the
    model is traced but not compiled, so that no C++ compiler is needed.)"""
    torch._dynamo.reset()
    width, batch = run.size(512, 32), run.size(1024, 16)
    blocks = [BrokenBlock(width, watched=not run.cured) for _ in range(run.size(6, 3))]
    model = nn.Sequential(*blocks).to(run.device)
    compiled = torch.compile(model, fullgraph=run.cured, backend=run.backend)
    inputs = torch.randn(batch, width, device=run.device)
    yield from train(sgd(model), lambda: (compiled(inputs) - inputs).square().mean())


@workload(
    finds=("recompilation",), shown_on="cpu", cpu_scale=1 / 8, steps=6, around=8, stacks=False
)
def recompilation(run: Setup) -> Iterator[Any]:
    """A compiled model that meets a new shape in every step.

    With fixed shapes (``dynamic=False``) each new length is compiled anew. That takes seconds,
    where a step takes milliseconds. After eight of them ``torch.compile`` gives up and runs
    eagerly.

    Here the limit is lifted, as it often is.

    The cure: ``dynamic=True``, compiled once for all lengths. (On a CPU the model is traced but not
    compiled, so that no C++ compiler is needed; tracing anew costs enough.)"""
    torch._dynamo.reset()
    width, batch = run.size(512, 32), run.size(64, 2)
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*parts).to(run.device)
    compiled = torch.compile(model, dynamic=run.cured, backend=run.backend)
    inputs = torch.randn(batch, 512, width, device=run.device)
    optimizer = sgd(model)

    step = 0
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        while True:
            length = 64 + 37 * step % 448
            step += 1
            optimizer.zero_grad()
            x = inputs[:, :length]
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach()


def activation(x: Any, gate: Any, shift: Any) -> Any:
    """A gated GELU with a soft clip."""
    inner = 0.7978845608 * (x + 0.044715 * x * x * x)
    smooth = 0.5 * x * (1 + torch.tanh(inner))
    gated = smooth * torch.sigmoid(gate) + shift
    return 8 * torch.tanh(gated / 8)


@workload(finds=("unfused-elementwise",), cpu_scale=1 / 64)
def unfused_pointwise(run: Setup) -> Iterator[Any]:
    """An activation function written as a chain of elementwise operators.

    Each operator is a kernel that reads its inputs from memory and writes its result back for the
    next one to read. The arithmetic is free, the traffic is not.

    The cure: ``torch.compile`` for the function, which makes one kernel of the chain. (On a CPU it
    is traced but not compiled, so that no C++ compiler is needed.)"""
    rows, width = run.size(16384, 16), 4096
    function = torch.compile(activation, backend=run.backend) if run.cured else activation
    x = torch.randn(rows, width, device=run.device)
    gate = nn.Parameter(torch.randn(width, device=run.device))
    shift = nn.Parameter(torch.zeros(width, device=run.device))
    optimizer = torch.optim.SGD([gate, shift], lr=1e-3)
    yield from train(optimizer, lambda: function(x, gate, shift).square().mean())

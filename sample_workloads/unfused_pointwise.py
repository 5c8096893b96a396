"""An activation function written as a chain of elementwise operators.

Each operator is a kernel that reads its inputs from memory and writes its result back for the next
one to read: the arithmetic is free, the traffic is not.

The cure: ``torch.compile`` for the function, which makes one kernel of the chain. (On a CPU it is
traced but not compiled, so that no C++ compiler is needed.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from advisor.sample_workloads import Setup, Workload

WORKLOAD = Workload(finds=("unfused-elementwise",), cpu_scale=1 / 64)


def activation(x: Any, gate: Any, shift: Any) -> Any:
    """A gated GELU with a soft clip."""
    inner = 0.7978845608 * (x + 0.044715 * x * x * x)
    smooth = 0.5 * x * (1 + torch.tanh(inner))
    gated = smooth * torch.sigmoid(gate) + shift
    return 8 * torch.tanh(gated / 8)


def loop(run: Setup) -> Iterator[Any]:
    """Train gates and shifts; yields the loss of each step."""
    torch.manual_seed(run.seed)
    rows, width = run.size(16384, 16), 4096
    function = activation
    if run.cured:
        function = torch.compile(activation, backend="inductor" if run.on_gpu else "aot_eager")
    x = torch.randn(rows, width, device=run.device)
    gate = nn.Parameter(torch.randn(width, device=run.device))
    shift = nn.Parameter(torch.zeros(width, device=run.device))
    optimizer = torch.optim.SGD([gate, shift], lr=1e-3)

    while True:
        optimizer.zero_grad()
        loss = function(x, gate, shift).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()

"""Which passes a recording holds: whether anything was learnt in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.measure.host.names import name_matches

if TYPE_CHECKING:
    from advisor.measure import Analysis

LEARNING = (
    r"^autograd::engine|Backward\d*$|^CompiledFunctionBackward|_backward(?:_|$)|^Optimizer\.|"
    r"entire_backward|^aten::_fused_(?:adam|sgd)|^aten::_foreach_addc"
)
"""Host rows of a backward pass or of an optimizer, as PyTorch names them. Kernels do not tell: a
transposed convolution runs those that are named after a gradient."""


def forward_only(a: Analysis) -> bool:
    """Whether the loop does not train, as far as is recorded: the recorder saw forwards and nothing
    learnt, or a trace has operators and neither a backward nor an optimizer's step. What holds no
    operators does not tell."""
    recorded = a.recorded
    if recorded is not None:
        if recorded.inference:
            return True
        if any(step.phases.keys() & {"backward", "optimizer"} for step in recorded.steps):
            return False
    cpu = a.trace.cpu
    if not name_matches(cpu["name"], r"^aten::").any():
        return False
    return not name_matches(cpu["name"], LEARNING).any()

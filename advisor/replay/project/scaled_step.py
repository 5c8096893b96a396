"""A recorded step replayed with device work and host time of another length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from advisor.replay.graph import NEVER, Array, Edge

if TYPE_CHECKING:
    from advisor.replay.window import WindowReplayer

HOST_EDGES = (Edge.PROGRAM, Edge.LOADER, Edge.HANDOVER)
"""What the host's speed decides: its own threads, and the loader's workers."""


def scaled_step(
    whatif: WindowReplayer, factor: Array, *, host: float = 1.0, later: float = 0.0
) -> float:
    """The measured step, ns, by the ratio of two replays. ``factor``: new duration of each row of
    ``trace.gpu`` over the old one; ``host``: the same of host time; ``later``: ns by which kernels
    start later after their launch."""
    graph = whatif.graph
    dur, weight = graph.dur.copy(), graph.weight.copy()
    device = graph.device
    dur[device] *= factor[graph.row[device]]
    weight[np.isin(graph.edge, HOST_EDGES) & (weight > 0)] *= host
    launch = (graph.edge == Edge.LAUNCH) & (weight > NEVER)
    weight[launch] = np.maximum(weight[launch] + later, np.minimum(weight[launch], 0.0))
    return whatif.a.step_ns * whatif.plan.steady(weight, dur) / max(whatif.steady_ns, 1.0)

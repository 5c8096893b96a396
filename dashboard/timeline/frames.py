"""Call stacks without the frames of libraries: what is left moves up into their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.measure.host.names import map_names
from advisor.measure.host.stacks import frame_rank, parents

if TYPE_CHECKING:
    from advisor.measure import Analysis

OWN = 2
"""``frame_rank`` of the user's own code."""
MODULE = "nn.Module: "
"""How the profiler writes the call of a module: no line of a library, but a part of the model."""


def library_frames(a: Analysis) -> NDArray[np.bool_]:
    """Aligned with ``trace.cpu``: frames of Python of PyTorch, the standard library and installed
    packages, and built-in functions."""
    cpu = a.trace.cpu
    found = (cpu["kind"] == "python").to_numpy().copy()
    rows = np.flatnonzero(found)
    if len(rows):
        hidden = map_names(
            cpu["name"].gather(rows),
            lambda name: frame_rank(name) != OWN and not name.startswith(MODULE),
            pl.Boolean,
        )
        found[rows] = hidden.to_numpy()
    return found


def depth_without(a: Analysis, hidden: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Aligned with ``trace.cpu``: how deep each row is when rows of the mask are not there."""
    parent = parents(a.trace)
    depth = a.trace.cpu["depth"].to_numpy().astype(np.int64)
    above = np.zeros(len(depth), dtype=np.int64)
    order = np.argsort(depth, kind="stable")
    # a loop over levels, of which there are tens: a row's parent is on one before its own
    for rows in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
        inside = rows[parent[rows] >= 0]
        above[inside] = above[parent[inside]] + hidden[parent[inside]]
    found: NDArray[np.int64] = np.maximum(depth - above, 0)
    return found

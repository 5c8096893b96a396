"""Processes that stay on the cores of one NUMA node."""

from __future__ import annotations

import os
from pathlib import Path

from advisor.tune.knob import Knob
from advisor.tune.spec import Value

NODES = Path("/sys/devices/system/node")


class Affinity(Knob):
    """The cores of the node that the process starts on, for it and its children."""

    id = "affinity"
    title = "bound to one NUMA node"

    def apply(self, value: Value) -> None:
        """At once. Nothing where there is one node."""
        here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        for node in sorted(NODES.glob("node[0-9]*/cpulist")):
            own = here & _cores(node.read_text())
            if own and own != here:
                os.sched_setaffinity(0, own)
                self.met()
                return

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "numactl --cpunodebind=0 --membind=0 python train.py"


def _cores(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            found |= set(range(int(low), int(high or low) + 1))
    return found

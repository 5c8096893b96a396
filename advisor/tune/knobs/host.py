"""Processes that stay on the cores of one NUMA node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from advisor.tune.knob import Knob, Machine
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
                self.took_effect()
                return

    def lines(self, value: Value) -> str:
        return "numactl --cpunodebind=0 --membind=0 python train.py"


def _cores(text: str) -> set[int]:
    result: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            result |= set(range(int(low), int(high or low) + 1))
    return result


class Threads(Knob):
    """``torch.set_num_threads``, and the same for OpenMP and MKL before they are loaded."""

    id = "threads"
    title = "threads of an operator"
    safety = "reordered"

    def values(self, wanted: int | None, machine: Machine) -> Sequence[Value]:
        """As many as cores, half of them, one."""
        return list(dict.fromkeys([machine.cores, max(1, machine.cores // 2), 1]))

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"OMP_NUM_THREADS": str(value), "MKL_NUM_THREADS": str(value)}

    def apply(self, value: Value) -> None:
        """At once; what the program sets later is not done."""
        import torch

        torch.set_num_threads(int(value or 1))
        torch.set_num_threads = lambda count: None
        self.took_effect()

    def lines(self, value: Value) -> str:
        return f"torch.set_num_threads({value})"


class DebugSwitchesKnob(Knob):
    """Anomaly detection and launches that block."""

    id = "debug-switches-off"
    title = "debug switches off"

    def environment(self, value: Value) -> dict[str, str | None]:
        return {"CUDA_LAUNCH_BLOCKING": None, "TORCH_DISTRIBUTED_DEBUG": None}

    def apply(self, value: Value) -> None:
        """At once; what the program switches on later stays off."""
        import torch

        if os.environ.pop("CUDA_LAUNCH_BLOCKING", None):  # the program's own
            self.took_effect()
        torch.autograd.set_detect_anomaly(False)
        original = torch.set_anomaly_enabled

        def keep(on: bool, *rest: Any) -> None:
            if on:
                self.took_effect()
            original(False, *rest)

        torch.set_anomaly_enabled = keep

    def lines(self, value: Value) -> str:
        return "torch.autograd.set_detect_anomaly(False); unset CUDA_LAUNCH_BLOCKING"

"""Switches for finding errors, off."""

from __future__ import annotations

import os
from typing import Any

from advisor.tune.knob import Knob
from advisor.tune.spec import Value


class DebugSwitchesKnob(Knob):
    """Anomaly detection and launches that block."""

    id = "debug-switches-off"
    title = "debug switches off"

    def environment(self, value: Value) -> dict[str, str | None]:
        """See Lever."""
        return {"CUDA_LAUNCH_BLOCKING": None, "TORCH_DISTRIBUTED_DEBUG": None}

    def apply(self, value: Value) -> None:
        """At once; what the program switches on later stays off."""
        import torch

        if os.environ.pop("CUDA_LAUNCH_BLOCKING", None):  # the program's own
            self.met()
        torch.autograd.set_detect_anomaly(False)
        original = torch.set_anomaly_enabled

        def keep(on: bool, *rest: Any) -> None:
            if on:
                self.met()
            original(False, *rest)

        torch.set_anomaly_enabled = keep

    def lines(self, value: Value) -> str:
        """See Lever."""
        return "torch.autograd.set_detect_anomaly(False); unset CUDA_LAUNCH_BLOCKING"

"""Segments of device memory that can grow."""

from __future__ import annotations

from advisor.tune.knob import Knob
from advisor.tune.spec import Value

SETTING = "expandable_segments:True"


class AllocatorKnob(Knob):
    """``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""

    id = "expandable-segments"
    title = "memory segments that grow"
    needs_cuda = True

    def environment(self, value: Value) -> dict[str, str | None]:
        """See Lever."""
        return {"PYTORCH_CUDA_ALLOC_CONF": SETTING, "PYTORCH_ALLOC_CONF": SETTING}

    def apply(self, value: Value) -> None:
        """Torch has read it."""
        self.met()

    def lines(self, value: Value) -> str:
        """See Lever."""
        return f"PYTORCH_CUDA_ALLOC_CONF={SETTING} python train.py"

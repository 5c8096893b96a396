"""Is a run slower than a baseline that was kept? A decision for continuous integration."""

from __future__ import annotations

from advisor.compare.gate.baseline import Baseline, baseline_of
from advisor.compare.gate.decide import Bounds, Decision, decide

__all__ = ["Baseline", "Bounds", "Decision", "baseline_of", "decide"]

"""The trace again, with what was found in it as extra tracks, or without what is private."""

from __future__ import annotations

from advisor.export.rewrite import Written, rewrite
from advisor.export.tracks import tracks

__all__ = ["Written", "rewrite", "tracks"]

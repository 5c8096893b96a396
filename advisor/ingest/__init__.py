"""Readers: one file format each, all to the same tables."""

from __future__ import annotations

from advisor.ingest.directory import open_run
from advisor.ingest.kineto import ReadOptions, read_trace

__all__ = ["ReadOptions", "open_run", "read_trace"]

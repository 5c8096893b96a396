"""Export of a trace: with findings as extra tracks, or without private texts."""

from pathlib import Path
from typing import Any

from advisor.core.trace import KINETO, Trace
from advisor.export.chrome import build_tracks, write_tables
from advisor.export.rewrite import Extra, RewriteCounts, rewrite

__all__ = ["RewriteCounts", "build_tracks", "rewrite", "write_trace"]


def write_trace(
    trace: Trace, target: Path, extra: Extra | None = None, **options: Any
) -> RewriteCounts:
    """Write a trace, read from one file, to another. A Chrome trace is copied event by event;
    any other format is written from its tables. Options and errors as in :func:`rewrite`."""
    if trace.meta.format == KINETO:
        return rewrite(trace.meta.path, target, extra, **options)
    return write_tables(trace, target, extra, **options)

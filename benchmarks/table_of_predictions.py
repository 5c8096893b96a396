"""The table of past predictions that is shipped: what benchmarks write into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from advisor.replay.predictions import Prediction, append_predictions, read_predictions


def replace(path: Path, source: str, rows: Iterable[Prediction]) -> None:
    """Put lines in the place of those that the same benchmark wrote before (``pair``, ``workload``,
    ``job``, ``gpus``); those of others stay."""
    others = [row for row in read_predictions(path).predictions if row.source != source]
    path.unlink(missing_ok=True)
    append_predictions(path, sorted([*others, *rows], key=lambda row: row.source))
    path.chmod(0o644)

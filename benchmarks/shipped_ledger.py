"""The shipped ledger: what benchmarks write into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from advisor.replay.ledger import Prediction, append_to_ledger, read_ledger


def replace(path: Path, source: str, rows: Iterable[Prediction]) -> None:
    """Put lines in the place of those that the same benchmark wrote before (``pair``, ``workload``,
    ``job``, ``gpus``); those of others stay."""
    others = [row for row in read_ledger(path).predictions if row.source != source]
    path.unlink(missing_ok=True)
    append_to_ledger(path, sorted([*others, *rows], key=lambda row: row.source))
    path.chmod(0o644)

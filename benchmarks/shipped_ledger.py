"""The ledger that is shipped: what benchmarks write into ``advisor/replay/trials.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from advisor.replay import ledger


def replace(path: Path, source: str, entries: Iterable[ledger.Entry]) -> None:
    """Put lines in the place of those that the same benchmark wrote before (``pair``,
    ``workload``); those of others stay."""
    others = [one for one in ledger.read(path).entries if one.source != source]
    path.unlink(missing_ok=True)
    ledger.append(path, sorted([*others, *entries], key=lambda one: (one.source, one.of)))
    path.chmod(0o644)

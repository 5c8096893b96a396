"""Run directories as the recorder would have written them, of records made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from advisor.core import run_directory as rundir
from advisor.core.run_directory import Manifest, RankRecord


def write_run(
    folder: Path, ranks: Mapping[int, RankRecord], manifest: Manifest | None = None
) -> Path:
    """Write records as a run directory (without traces); returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    head = manifest or Manifest(run_id="test", started_unix_ns=1, entry="context")
    (folder / rundir.MANIFEST).write_bytes(msgspec.json.encode(head))
    for number, record in ranks.items():
        place = folder / f"rank{number}"
        place.mkdir(exist_ok=True)
        (place / rundir.RANK).write_bytes(msgspec.json.encode(record.rank))
        _lines(place / (rundir.INFERENCE if record.inference else rundir.STEPS), record.steps)
        _lines(place / rundir.TELEMETRY, record.samples)
        _lines(place / rundir.EVENTS, record.events)
    return folder


def _lines(file: Path, rows: Iterable[Any]) -> None:
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

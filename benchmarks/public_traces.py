"""Find the public real traces: ``tests/corpus``, and what else lies in a folder beside it.

The corpus comes first. A file that it lacks is looked for in $ADVISOR_SHARED_TRACES, else in
``../shared/traces`` beside the checkout. Tests and benchmarks find their traces here.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CORPUS = REPO / "tests" / "corpus"
BESIDE = Path(os.environ.get("ADVISOR_SHARED_TRACES", REPO.parent / "shared" / "traces"))
FOLDERS = (CORPUS, BESIDE)


def find(name: str) -> Path | None:
    """``find("nsys/a.sqlite")``: path of one file, ``None`` where no folder has it. A file that the
    corpus holds compressed is unpacked once, into the system's folder for temporary files."""
    packed = CORPUS / f"{name}.gz"
    if packed.is_file():
        return _unpacked(packed, name)
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def _unpacked(packed: Path, name: str) -> Path:
    size = packed.stat().st_size
    result = Path(tempfile.gettempdir()) / f"advisor_corpus_{os.getuid()}" / str(size) / name
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        partial = result.with_name(f"{result.name}.{os.getpid()}")
        partial.write_bytes(gzip.decompress(packed.read_bytes()))
        partial.replace(result)  # tests run in several processes
    return result


def path_of(name: str) -> Path:
    """The same, and a path in the corpus for a file that is nowhere."""
    return find(name) or CORPUS / name


def trace_names() -> list[str]:
    """All Chrome traces: ``pairs/particle_batch2.json.gz`` …"""
    return sorted(
        {path.relative_to(f).as_posix() for f in FOLDERS for path in f.rglob("*.json.gz")}
    )

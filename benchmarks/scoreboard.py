"""Right or wrong over the corpus: the first advice per file against what is known of the file.

    python benchmarks/scoreboard.py [--hta-python VENV/bin/python] [--write]
    python benchmarks/scoreboard.py --ledger    # programs of h100/ into the shipped ledger

Reads ``tests/corpus/truth.toml`` and writes ``docs/scoreboard.md`` between its marks. With an
interpreter that has HolisticTraceAnalysis, its busy share stands beside ours, for all traces that
it loads.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from public_traces import CORPUS, REPO, find, path_of

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.replay.ledger import Prediction

PAGE = REPO / "docs" / "scoreboard.md"
BEGIN, END = "<!-- scoreboard: begin -->", "<!-- scoreboard: end -->"
TRUTH = CORPUS / "truth.toml"
MAX_SPREAD = 3.0
"""Largest ratio of a range's ends: in a wider one the point is no prediction."""


class Row(NamedTuple):
    """A file: what is known, and what the report says."""

    name: str
    accepted: list[str]
    known: str
    why: str
    first: str | None
    """The leading rule; ``None``: no fix is proposed."""
    saves: tuple[float, float] | None
    """Measured, ms."""
    gain: tuple[float, float, float] | None
    """Estimated by the first finding, ms: from, most likely, to."""
    busy: float | None
    """Busy share of the analysed steps; ``None``: no GPU work."""
    unsaid: tuple[str, ...] = ()
    """Patterns of the true cure that the first fix does not contain."""

    @property
    def right(self) -> bool:
        """The first advice is one of those accepted and says the cure, or none where none is
        due."""
        accepted = self.first in self.accepted if self.accepted else self.first is None
        return accepted and not self.unsaid

    @property
    def inside(self) -> bool | None:
        """The estimated range meets what was measured; ``None``: not measured, no range."""
        if self.saves is None or self.gain is None:
            return None
        return self.gain[0] <= self.saves[1] and self.saves[0] <= self.gain[2]


def analyze(name: str) -> Report:
    """Build the report, with ranges that are not widened by the pairs they are compared with."""
    import advisor  # not where HTA runs
    from advisor.replay.ledger import without_program

    with without_program(name):
        return advisor.analyze(file_of(name))


def row(name: str, truth: dict[str, Any], report: Report | None = None) -> Row:
    """Analyse one file of the corpus, unless its ``report`` is there."""
    report = report or analyze(name)
    first = next((f for f in report.findings if not f.informational), None)
    impact = first.impact if first is not None else None
    gain = None
    if impact is not None and impact.gain_ns is not None:
        low = impact.low_ns or impact.gain_ns
        at_least = first is not None and first.costs_more_than_recorded
        high = inf if at_least else impact.high_ns or impact.gain_ns
        gain = (low / 1e6, impact.gain_ns / 1e6, high / 1e6)
    saves = tuple(truth["saves_ms"]) if "saves_ms" in truth else None
    first_id = first.rule if first is not None else None
    text = f"{first.title}\n{first.fix}\n{first.code}" if first is not None else ""
    cure = truth.get("says", ())
    unsaid = tuple(words for words in cure if not re.search(words, text, re.IGNORECASE))
    return Row(name, truth["first"], truth["known"], truth["why"], first_id, saves, gain,
               report.busy_share, unsaid)  # fmt: skip


def entry(name: str, truth: dict[str, Any]) -> Prediction | None:
    """A line of the shipped ledger, ms: of the first finding that is accepted; ``None``:
    it was not found or not measured, is a lower bound, or so wide by its own assumptions that
    its point says nothing."""
    from advisor.replay.ledger import Prediction, edit_kind

    report = analyze(name)
    accepted = (
        f
        for f in report.findings
        if f.rule in truth["first"]
        and f.edits
        and not f.costs_more_than_recorded
        and f.impact is not None
        and f.impact.gain_ns
    )
    finding = next(accepted, None)
    if finding is None or finding.impact is None or "saves_ms" not in truth:
        return None
    impact, (low, high) = finding.impact, truth["saves_ms"]
    ends = (impact.gain_ns, impact.low_ns or impact.gain_ns, impact.high_ns or impact.gain_ns)
    point, least, most = (round((ns or 0.0) / 1e6, 2) for ns in ends)
    if most > MAX_SPREAD * least:
        return None
    return Prediction(
        source="program", program=name, kind=edit_kind(finding.edits[0]),
        change=truth["why"].rpartition("; ")[2], device=report.scope.device_name or "", unit="ms",
        predicted=point, low=least, high=most,
        measured=round((low + high) / 2, 2), measured_low=low, measured_high=high,
    )  # fmt: skip


def file_of(name: str) -> str:
    """Path of a trace; serving traces are named without the end of their file names."""
    return str(find(name) or path_of(f"{name}.json.gz"))


def hta(path: str) -> float:
    """HolisticTraceAnalysis: its busy share of the whole trace. Runs in its interpreter."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        data = Path(path).read_bytes()
        file.write_bytes(gzip.decompress(data) if path.endswith(".gz") else data)
        loaded = TraceAnalysis(trace_files={0: str(file)}, trace_dir=folder)
        temporal_breakdown = loaded.get_temporal_breakdown(visualize=False)
        return 1.0 - float(temporal_breakdown["idle_time_pctg"].iloc[0]) / 100.0


def beside(python: str, name: str) -> float | None:
    """HTA's busy share; ``None``: it cannot load the file."""
    command = [python, str(Path(__file__).resolve()), "--hta", file_of(name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    with suppress(ValueError, IndexError):
        return float(json.loads(result.stdout.splitlines()[-1]))
    return None


def percent(share: float | None) -> str:
    """``84%``."""
    return "–" if share is None else f"{share:.0%}"


def format_row(r: Row, hta_cells: list[str]) -> str:
    """A line of the table."""
    expected = " or ".join(f"`{each}`" for each in r.accepted) or "none"
    first = f"`{r.first}`" if r.first else "none"
    unsaid = f" (does not say {', '.join(r.unsaid)})" if r.unsaid else ""
    mark = "right" if r.right else f"**wrong**{unsaid}"
    cells = [r.name, f"{expected}: {r.why}", r.known, first, mark, percent(r.busy)]
    return "| " + " | ".join([*cells, *hta_cells]) + " |"


def page(rows: list[Row], hta_busy: dict[str, float | None]) -> str:
    """Both tables and their sums."""
    right = sum(r.right for r in rows)
    head = ["file", "right is", "known", "first advice", "", "GPU busy"]
    head += ["HTA: busy, whole trace"] if hta_busy else []
    lines = [
        f"A regression test: first advice right on {right} of these {len(rows)} files, its rule "
        "and what its fix says.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *(format_row(r, [percent(hta_busy.get(r.name))] if hta_busy else []) for r in rows),
        "",
    ]
    measured = [r for r in rows if r.saves is not None]
    inside = sum(bool(r.inside) for r in measured)
    lines += [
        f"Ranges that contain what the fix really saved: **{inside} of {len(measured)}**.",
        "",
        "| file | first advice | estimated (range), ms | measured, ms | inside |",
        "|---|---|---:|---:|---|",
    ]
    for r in measured:
        gain = "none" if r.gain is None else f"{r.gain[1]:.1f} ({r.gain[0]:.1f} to {r.gain[2]:.1f})"
        gain = gain.replace("to inf", "or more")
        low, high = r.saves or (0.0, 0.0)
        inside_ = "yes" if r.inside else "**no**"
        lines.append(f"| {r.name} | `{r.first}` | {gain} | {low:g} to {high:g} | {inside_} |")
    return "\n".join(lines)


def main() -> None:
    """Run over the table of truths."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hta-python", help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--hta", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--ledger", action="store_true", help="write the shipped ledger")
    args = parser.parse_args()
    if args.ledger:
        from shipped_ledger import replace

        from advisor.replay.ledger import SHIPPED

        replace(SHIPPED, "program", [])  # their ranges do not depend on an earlier table
        truths = tomllib.loads(TRUTH.read_text()).items()
        lines = [
            entry(name, truth)
            for name, truth in truths
            if name.startswith("h100/") and not truth.get("cut")
        ]
        replace(SHIPPED, "program", filter(None, lines))
        return
    if args.hta:
        print(json.dumps(hta(args.hta)))
        return
    rows: list[Row] = []
    for name, truth in tomllib.loads(TRUTH.read_text()).items():
        rows.append(row(name, truth))
        print(rows[-1], file=sys.stderr)
    hta_busy = {}
    if args.hta_python:
        hta_busy = {r.name: beside(args.hta_python, r.name) for r in rows if r.busy is not None}
    text = page(rows, hta_busy)
    if not args.write:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    os.environ.setdefault("ADVISOR_HISTORY", os.devnull)
    main()

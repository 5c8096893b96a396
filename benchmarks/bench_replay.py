"""How well, and how fast, unchanged steps of real traces are replayed; the naive twin beside.

    python benchmarks/bench_replay.py [--traces DIR] [--write docs/accuracy.md] [TRACE …]

Times are CPU seconds of this thread, the best of several replays. Without --traces the public
traces are looked for in $ADVISOR_SHARED_TRACES, else ../shared/traces.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from naive_twin import naive_twin

from advisor.analysis import Analysis
from advisor.errors import AdvisorError
from advisor.ingest import read_trace
from advisor.whatif.price import WhatIf

SHARED = Path(os.environ.get("ADVISOR_SHARED_TRACES", "../shared/traces"))
BEGIN, END = "<!-- replay begin -->", "<!-- replay end -->"
ENOUGH = 500
"""Device events from which a time for each 10,000 means something."""
HEAD = (
    "trace",
    "steps",
    "device starts",
    "error",
    "naive",
    "explained",
    "naive",
    "hard parts: explained, of how many (naive)",
    "ms / 10,000",
)


def seconds(act: Callable[[], object], times: int = 5) -> float:
    """CPU time of one call, s: the best of several."""
    best = float("inf")
    for _ in range(times):
        begin = time.thread_time()
        act()
        best = min(best, time.thread_time() - begin)
    return best


def row(path: Path) -> tuple[str, ...] | None:
    """The figures of one trace; ``None``: it holds no steps with both host and device rows."""
    trace = read_trace(str(path))
    if trace.cpu.is_empty() or trace.gpu.is_empty():
        return None
    a = Analysis(trace)
    if a.steps.used.is_empty():
        return None
    whatif = WhatIf(a)
    quality, twin = whatif.quality, naive_twin(whatif.graph)
    parts = []
    for part in quality.hard:
        other = twin.hard[part.name]
        naive = "copied" if other is None else f"{other:.0%}"
        parts.append(f"{part.name} {part.explained:.0%} of {part.cases} ({naive})")
    plan = whatif.plan
    cost = seconds(plan.run) * 1e3 / quality.starts * 1e4
    return (
        path.name.split(".")[0],
        f"{quality.steps} of {quality.of_steps}",
        str(quality.starts),
        f"{quality.step_error:.2%}",
        f"{twin.step_error:.2%}",
        "–" if quality.explained is None else f"{quality.explained:.1%}",
        f"{twin.explained:.1%}",
        "; ".join(parts) or "none",
        f"{cost:.0f}" if quality.starts >= ENOUGH else "–",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """As Markdown."""
    lines = [HEAD, tuple("---" for _ in HEAD), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Print the table; write it into a document if told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--traces", type=Path, default=SHARED)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows = []
    for path in args.files or sorted(args.traces.glob("*.json.gz")):
        try:
            found = row(path)
        except AdvisorError as error:
            print(f"{path.name}: {error}")
            continue
        if found is not None:
            rows.append(found)
            print(*found, sep="  ", flush=True)
    text = f"{BEGIN}\n{table(rows)}\n{END}"
    if args.write:
        old = args.write.read_text()
        head, _, rest = old.partition(BEGIN)
        args.write.write_text(f"{head}{text}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

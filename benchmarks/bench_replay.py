"""The accuracy and the speed of a replay of unchanged steps of real traces; the naive twin
beside.

    python benchmarks/bench_replay.py [--traces DIR] [--write docs/accuracy.md] [TRACE …]

Two tables: how well steps and starts come out, and what share of the host's waiting and of the
device's idle time is explained (``explained_time``). Times are CPU seconds of this thread, the
best of several replays. Without --traces: the public traces in tests/corpus.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from explained_time import ExplainedTime, explained_time
from naive_twin import naive_twin
from public_traces import CORPUS

from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.read import read_trace
from advisor.replay.window_replayer import WindowReplayer

REPLAY, HARD = "replay", "hard parts"
"""Sections of the document that are written."""
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

HARD_HEAD = (
    "trace",
    "host waited, ms",
    "in calls",
    "explained",
    "naive",
    "the tool says",
    "device idle, ms",
    "explained",
    "naive",
    "the tool says",
)


def seconds(act: Callable[[], object], times: int = 5) -> float:
    """CPU time of one call, s: the best of several."""
    best = float("inf")
    for _ in range(times):
        begin = time.thread_time()
        act()
        best = min(best, time.thread_time() - begin)
    return best


def replayed(path: Path) -> WindowReplayer | None:
    """The replay of one trace; ``None``: it holds no steps with both host and device rows."""
    trace = read_trace(str(path))
    if trace.cpu.is_empty() or trace.gpu.is_empty():
        return None
    a = Analysis(trace)
    return None if a.steps.used.is_empty() else WindowReplayer(a)


def row(name: str, replayer: WindowReplayer) -> tuple[str, ...]:
    """Steps and starts of one trace."""
    quality, twin = replayer.quality, naive_twin(replayer.graph)
    parts = []
    for part in quality.hard:
        other = twin.hard[part.name]
        naive = "copied" if other is None else f"{other:.0%}"
        parts.append(f"{part.name} {part.explained:.0%} of {part.cases} ({naive})")
    plan = replayer.plan
    cost = seconds(plan.run) * 1e3 / quality.starts * 1e4
    return (
        name,
        f"{quality.steps} of {quality.of_steps}",
        str(quality.starts),
        f"{quality.step_error:.2%}",
        f"{twin.step_error:.2%}",
        "–" if quality.explained is None else f"{quality.explained:.1%}",
        f"{twin.explained:.1%}",
        "; ".join(parts) or "none",
        f"{cost:.0f}" if quality.starts >= ENOUGH else "–",
    )


def hard_row(name: str, replayer: WindowReplayer) -> tuple[str, ...]:
    """Waits and idle time of one trace, by brute force and as the library has them."""
    explained: ExplainedTime = explained_time(replayer.a, replayer.plan)
    explained_shares = [
        getattr(replayer.quality, f"{what}_explained", None) for what in ("waits", "idle")
    ]

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    return (
        name,
        f"{explained.waited / 1e6:.2f}",
        str(explained.waits),
        share(explained.waits_explained),
        "copied",
        share(explained_shares[0]),
        f"{explained.idle / 1e6:.2f}",
        share(explained.idle_explained),
        share(explained.idle_twin),
        share(explained_shares[1]),
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Print the table; write it into a document on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--traces", type=Path, default=CORPUS)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows, hard = [], []
    for path in args.files or sorted(args.traces.rglob("*.json.gz")):
        try:
            result = replayed(path)
        except AdvisorError as error:
            print(f"{path.name}: {error}")
            continue
        if result is not None:
            name = path.relative_to(args.traces) if path.is_relative_to(args.traces) else path
            short = str(name).removesuffix(".json.gz").removesuffix(".pt.trace")
            rows.append(row(short, result))
            hard.append(hard_row(short, result))
            print(*rows[-1], *hard[-1][1:], sep="  ", flush=True)
    if args.write:
        text = args.write.read_text()
        text = replaced(text, REPLAY, table(HEAD, rows))
        args.write.write_text(replaced(text, HARD, table(HARD_HEAD, hard)))


def replaced(text: str, section: str, content: str) -> str:
    """A document with another content between the marks of a section."""
    begin, end = f"<!-- {section} begin -->", f"<!-- {section} end -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    main()

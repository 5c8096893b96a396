"""Memory snapshots that belong to the ranks of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import SNAPSHOT
from advisor.core.snapshot import MemorySnapshot
from advisor.core.trace import Run, Trace
from advisor.read.reader import ReadOptions
from advisor.read.readers.out_of_memory_text import of_exception
from advisor.read.snapshot import MAX_BYTES, read_snapshot
from advisor.read.source import ByteSource


def with_memory(run: Run, options: ReadOptions | None) -> Run:
    """The run with the snapshot that was asked for (``ReadOptions.memory``), else with the one
    that its recorder left when memory ran out, of each rank; where that is missing, with what the
    exception's text says. Raises AdvisorError: the one that was asked for cannot be read."""
    options = options or ReadOptions()
    if options.memory is not None:
        number = _first_rank(run)
        return replace(run, snapshots={number: _read(options.memory, options)})
    if run.recording is None:
        return run
    result: dict[int, MemorySnapshot] = {}
    problems = list(run.problems)
    for number, record in run.recording.ranks.items():
        file = Path(record.folder, SNAPSHOT)
        if file.is_file():
            try:
                result[number] = _read(str(file), options)
                continue
            except AdvisorError as error:
                problems.append(str(error))
        events = [event for event in record.events if event.kind in ("oom", "end")]
        for event in reversed(events):
            text = event.data.get("message") or event.data.get("text")
            snapshot = of_exception(str(text), record.folder, event.data) if text else None
            if snapshot is not None:
                result[number] = snapshot
                break
    return replace(run, snapshots=result, problems=tuple(problems))


def join_snapshots(
    traces: list[Trace], rank_of: dict[int, int]
) -> tuple[list[Trace], dict[int, Trace]]:
    """Traces, and snapshots by rank: a snapshot that was given with traces is no window of theirs.
    ``rank_of``: of each trace, by its place. A snapshot of no rank is that of the first."""
    plain = [trace for trace in traces if trace.meta.snapshot is None]
    if not plain or len(plain) == len(traces):
        return traces, {}
    own = [rank_of[place] for place, trace in enumerate(traces) if trace.meta.snapshot is None]
    result: dict[int, Trace] = {}
    for place, trace in enumerate(traces):
        if trace.meta.snapshot is not None:
            number = rank_of[place] if rank_of[place] in own else min(own)
            if number in result:
                raise AdvisorError(
                    f"{result[number].meta.path} and {trace.meta.path}: two memory snapshots for "
                    "one rank; give one of them, or put 'rank0', 'rank1' … in the file names"
                )
            result[number] = trace
    return plain, result


def _first_rank(run: Run) -> int:
    ranks = run.ranks or (sorted(run.recording.ranks) if run.recording is not None else [])
    return ranks[0] if ranks else -1


def _read(path: str, options: ReadOptions) -> MemorySnapshot:
    source = ByteSource(path, limit=min(options.max_bytes, MAX_BYTES), peek=options.peek)
    return read_snapshot(source.blocks(), path)

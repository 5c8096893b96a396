"""What is analysed: of each rank one window, and the record where no window was reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.core.trace import blank_trace
from advisor.measure import Analysis
from advisor.measure.steps.steps import refuse_none

if TYPE_CHECKING:
    from advisor.core.run_directory import RankRecord
    from advisor.core.trace import Run


def choose(
    run: Run, window: int | None, steps: tuple[int | None, int | None] | None
) -> dict[int, Analysis]:
    """What to look at of each rank, those with a trace first: the given window (default: each
    rank's first) and steps.

    Raises AdvisorError: a window or steps that are not there.
    """
    analyses = {
        number: Analysis(
            run.traces[number, chosen], steps, _record(run, number), run.snapshots.get(number)
        )
        for number, chosen in _windows(run, window).items()
    }
    analyses |= _untraced(run, analyses)
    for number, a in analyses.items():
        if not a.record_only:
            refuse_none(a.steps, a.trace.meta.path, number, selected=steps is not None)
    return analyses


def _windows(run: Run, window: int | None) -> dict[int, int]:
    """The window to analyse of each rank."""
    chosen = {}
    if not run.traces and run.unread and window is not None:
        raise _no_window(run, window, run.unread[0][0])
    for number in run.ranks:
        have = sorted(w for r, w in run.traces if r == number)
        if window is not None and window not in have:
            raise _no_window(run, window, number)
        chosen[number] = have[0] if window is None else window
    return chosen


def _no_window(run: Run, window: int, rank: int) -> AdvisorError:
    have = sorted(w for r, w in (*run.traces, *run.unread) if r == rank)
    return AdvisorError(
        f"{run.path or 'run'}: no window {window} of rank {rank} "
        f"(windows present: {have[0]} to {have[-1]})"
    )


def _record(run: Run, number: int) -> RankRecord | None:
    """What the recorder wrote of a rank."""
    if run.recording is None:
        return None
    return run.recording.ranks.get(max(number, 0))


def _untraced(run: Run, traced: dict[int, Analysis]) -> dict[int, Analysis]:
    """The ranks of which there is a record but no trace: only some ranks were to be profiled, or
    the window was never reached."""
    if run.recording is None:
        return {}
    return {
        number: Analysis(
            blank_trace(record.folder, number), None, record, run.snapshots.get(number)
        )
        for number, record in run.recording.ranks.items()
        if number not in traced
    }

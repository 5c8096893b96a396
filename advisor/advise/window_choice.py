"""Choice of what is analysed: a window of each rank, or its record."""

from dataclasses import replace

from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import RankRecord
from advisor.core.trace import Run, Trace, blank_trace
from advisor.measure import Analysis
from advisor.measure.memory.peak_memory import order_snapshots
from advisor.measure.steps.steps import require_used_steps, require_window


def choose_windows(
    run: Run, window: int | None, steps: tuple[int | None, int | None] | None
) -> dict[int, Analysis]:
    """Return the analysis of each rank, those with a trace first, for the given window (default:
    each rank's first) and steps.

    Raises AdvisorError: a window or steps that are not there."""
    analyses = {
        number: Analysis(
            run.traces[number, chosen], steps, _record(run, number), run.snapshots.get(number)
        )
        for number, chosen in _windows(run, window).items()
    }
    for number, a in analyses.items():
        if a.only_input is SNAPSHOT:
            taken = [
                run.traces[key].meta.snapshot for key in sorted(run.traces) if key[0] == number
            ]
            a.snapshot_series = order_snapshots([each for each in taken if each is not None])
    analyses |= _untraced(run, analyses)
    if steps is not None and all(a.record_only for a in analyses.values()):
        require_window(run, "there are no steps to choose from")
    for number, a in analyses.items():
        if not a.record_only:
            require_used_steps(a.steps, a.trace.meta.path, number, selected=steps is not None)
    return analyses


def _windows(run: Run, window: int | None) -> dict[int, int]:
    """Return the window to analyse of each rank. Raises AdvisorError if it is not there."""
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
    """Return the recorder's record of a rank; ``None`` if there is none."""
    if run.recording is None:
        return None
    return run.recording.ranks.get(max(number, 0))


def _untraced(run: Run, traced: dict[int, Analysis]) -> dict[int, Analysis]:
    """Return the analyses of ranks with a record but no trace: they were not to be profiled, or
    never reached the window."""
    if run.recording is None:
        return {}
    return {
        number: Analysis(_blank(run, number, record), None, record, run.snapshots.get(number))
        for number, record in run.recording.ranks.items()
        if number not in traced
    }


def _blank(run: Run, number: int, record: RankRecord) -> Trace:
    blank = blank_trace(record.folder, number)
    return replace(blank, meta=replace(blank.meta, **run.logs))

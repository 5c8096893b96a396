"""Choice of what to analyse: a window of each rank, or the rank's record."""

from dataclasses import replace

from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.errors import AdvisorError
from advisor.core.ranks import format_ranks
from advisor.core.run_directory import RankRecord, order_windows
from advisor.core.trace import Run, Trace, blank_trace
from advisor.measure import Analysis
from advisor.measure.memory.peak_memory import order_snapshots
from advisor.measure.steps.steps import require_used_steps, require_window


def choose_windows(
    run: Run, window: int | None, steps: tuple[int | None, int | None] | None
) -> dict[int, Analysis]:
    """Return the analysis of each rank, ranks with a trace first, for the given window (default:
    each rank's first that is like the run) and steps.

    Raises AdvisorError for a missing window or missing steps."""
    analyses = {
        number: Analysis(
            run.traces[number, chosen], steps, _find_record(run, number), run.snapshots.get(number)
        )
        for number, chosen in choose_window_numbers(run, window).items()
    }
    for number, a in analyses.items():
        if a.only_input is SNAPSHOT:
            snapshots = [
                run.traces[key].meta.snapshot for key in sorted(run.traces) if key[0] == number
            ]
            a.snapshot_series = order_snapshots([each for each in snapshots if each is not None])
    analyses |= _analyse_untraced(run, analyses)
    if steps is not None and all(a.record_only for a in analyses.values()):
        require_window(run, "there are no steps to choose from")
    for number, a in analyses.items():
        if not a.record_only:
            require_used_steps(a.steps, a.trace.meta.path, number, selected=steps is not None)
    return analyses


def choose_window_numbers(run: Run, window: int | None) -> dict[int, int]:
    """Return the window of each rank to analyse. Raises AdvisorError if it is missing."""
    chosen = {}
    if not run.traces and run.unread and window is not None:
        raise _make_window_error(run, window, run.unread[0][0])
    for number in run.ranks:
        present = sorted(w for r, w in run.traces if r == number)
        if window is not None and window not in present:
            raise _make_window_error(run, window, number)
        record = _find_record(run, number)
        if record is not None:
            present = order_windows(record, present)
        chosen[number] = present[0] if window is None else window
    return chosen


def _make_window_error(run: Run, window: int, rank: int) -> AdvisorError:
    present = sorted(w for r, w in (*run.traces, *run.unread) if r == rank)
    return AdvisorError(
        f"{run.path or 'run'}: no window {window}{f' of rank {rank}' * (rank >= 0)} "
        f"(windows present: {format_ranks(present)})"
    )


def _find_record(run: Run, number: int) -> RankRecord | None:
    """Return the recorder's record of a rank, or ``None`` if there is none."""
    if run.recording is None:
        return None
    return run.recording.ranks.get(max(number, 0))


def _analyse_untraced(run: Run, traced: dict[int, Analysis]) -> dict[int, Analysis]:
    """Return the analyses of ranks with a record but no trace: they were not profiled on purpose,
    or never reached the window."""
    if run.recording is None:
        return {}
    return {
        number: Analysis(
            _make_blank_trace(run, number, record), None, record, run.snapshots.get(number)
        )
        for number, record in run.recording.ranks.items()
        if number not in traced
    }


def _make_blank_trace(run: Run, number: int, record: RankRecord) -> Trace:
    blank = blank_trace(record.folder, number)
    return replace(blank, meta=replace(blank.meta, **run.logs))

"""Several traces that are not of one run: a line each, and no headline made of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import PurePath
from typing import TYPE_CHECKING

import polars as pl

import advisor
from advisor.advise.measured import inputs, measure, step_durations
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.report import Report
from advisor.measure.host.backlog import analysed_device

if TYPE_CHECKING:
    from advisor.core.trace import Run, Trace
    from advisor.measure import Analysis

MAX_LINES = 30
FEW_ALIKE = 0.02
"""Names of operators and kernels that two windows of one program share at least: its operators are
the same, even where the kernels are chosen anew."""
ENOUGH_NAMES = 20
"""A recording with fewer names may be of anything."""
MAX_COMPARED = 16


def why_apart(run: Run) -> list[str]:
    """Why the traces cannot be of one run; empty: nothing speaks against it.

    They ran on GPUs of different models, ranks were not recorded at one time, or two of them have
    next to no operator or kernel in common.
    """
    traces = list(run.traces.values())
    if len(traces) < 2 or run.recording is not None:
        return []
    why = []
    names = sorted({name for trace in traces if (name := _model(trace))})
    if len(names) > 1:
        shown = [t.shorten(t.clean(name), 40) for name in names[:4]]
        more = [f"{len(names) - 4} more"] if len(names) > 4 else []
        why.append(f"they ran on {' and '.join([*shown, *more])}")
    firsts = [run.window(number).meta for number in run.ranks]
    if (
        len(firsts) > 1
        and all(m.clock == "unix" for m in firsts)
        and max(m.start_ns for m in firsts) > min(m.start_ns + m.end_ns for m in firsts)
    ):
        why.append("they were not recorded at the same time")
    if not why and _strange([_names(trace) for trace in traces[:MAX_COMPARED]]):
        why.append("they have no operators and kernels in common")
    return why


def apart_report(
    run: Run,
    analyses: dict[int, Analysis],
    why: list[str],
    each: Sequence[tuple[Trace, Callable[[], Report]]],
) -> Report:
    """The report of traces that are not of one run: why they are not, and the verdict of each."""
    main = next(iter(analyses))
    lines = []
    for trace, report in each[:MAX_LINES]:
        try:
            said = report().verdict
        except AdvisorError as error:
            said = str(error)
        lines.append(f"{t.shorten_path(PurePath(trace.meta.path).name, 60)}: {said}")
    if len(each) > MAX_LINES:
        lines.append(f"{len(each) - MAX_LINES:,} more traces are not looked at.")
    return Report(
        version=advisor.__version__,
        status="limited",
        verdict=f"These {len(each)} traces do not look like ranks or windows of one run: "
        f"{' and '.join(why)}. Each has a line below; give the files of one run.",
        inputs=inputs(run, analyses),
        limits=[*lines, *run.problems],
        scope=measure(analyses[main])["scope"],
        step_durations=step_durations(analyses[main]),
    )


def _model(trace: Trace) -> str | None:
    number = analysed_device(trace)
    device = None if number is None else trace.working_device(number)
    return None if device is None else device.name


def _names(trace: Trace) -> set[str]:
    """Names of operators and kernels."""
    result: set[str] = set()
    for frame, kind in ((trace.cpu, "op"), (trace.gpu, "kernel")):
        result |= set(
            frame.filter(frame["kind"] == kind)["name"].cast(pl.String).unique().to_list()
        )
    return result


def _strange(named: list[set[str]]) -> bool:
    """Two of them, with enough names each, share next to none."""
    return any(
        len(item & other) < FEW_ALIKE * min(len(item), len(other))
        for item, other in combinations(named, 2)
        if min(len(item), len(other)) >= ENOUGH_NAMES
    )

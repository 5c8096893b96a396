"""Waits of the step for the DataLoader, and how long the GPU idles during them."""

import re
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Location, Select, SkippedCheck
from advisor.core.intervals import covered_length, intersect, intervals_of, union
from advisor.core.rule import Evidence, Factor, Rule
from advisor.measure import Analysis
from advisor.measure.host.library_time import stacks_under
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    MIN_SAMPLES,
    HottestLine,
    hottest_line,
    parse_frame,
    share_in,
)
from advisor.measure.steps.named_intervals import measure_contents
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import (
    amount_per_step,
    locate_row,
    row_numbers,
    scale_edit,
    stacks_option,
)
from advisor.rules.support.library_functions import LibraryFix, LibraryUse, find_library_use

SINGLE_PROCESS = r"^enumerate\(Data(?:Loader|Pipe)\)#_SingleProcessDataLoaderIter\b"
"""Pattern of the iterator that PyTorch names when ``num_workers=0``."""
WORKERS = r"^enumerate\(Data(?:Loader|Pipe)\)#(?:[^_]|_[^S]|_S[^i])|^tf\.data::"
"""Pattern of every other iterator: worker processes, a DataPipe, or tf.data."""


MIN_TABLE_SHARE = 0.5
"""Minimum share of the loading at which table work is named as the cause."""


class LoaderWaits(NamedTuple):
    """Waits of the thread that drives the step, inside the used steps."""

    host: NDArray[np.int64]
    """Rows of ``trace.cpu``: the ``__next__`` ranges, outermost only."""
    total: int
    """Summed time that they cover, ns."""
    exposed: int
    """Part that delays the step, ns: the GPU idles and its next work comes after the wait. It is
    the whole wait if the trace has no GPU work."""
    exposed_ns: NDArray[np.int64]
    """Exposed part of each row of ``host``, ns."""
    by_step: NDArray[np.int64]
    """Exposed part in each used step, ns."""


def find_waits(a: Analysis, pattern: str) -> LoaderWaits | None:
    """Find waits whose range matches ``pattern``, or ``None`` if the used steps have none."""
    cpu = a.trace.cpu
    is_wait = name_matches(cpu["name"], pattern) & cpu["kind"].is_in(["annotation", "op"])
    if a.device_id is None and a.trace.main_thread is not None:
        is_wait &= cpu["thread"] == a.trace.main_thread
    ranges = np.flatnonzero(is_wait.to_numpy())
    if not len(ranges):
        return None
    # a nested loader's range is inside an outer range, which has its time already
    nested = np.isin(row_numbers(cpu["parent"])[ranges], ranges)
    ranges = ranges[~nested]
    ts = cpu["ts"].to_numpy()[ranges]
    end = ts + cpu["dur"].to_numpy()[ranges]
    in_steps = covered_length(ts, end, a.spans) > 0
    ranges, ts, end = ranges[in_steps], ts[in_steps], end[in_steps]
    if not len(ranges):
        return None
    wait = intersect(union(ts, end), a.spans)
    exposed = wait
    if a.device_id is not None:
        gaps = a.gaps.filter(pl.col("cause") == "loader")
        blamed = np.isin(row_numbers(gaps["host"]), ranges)
        exposed = intersect(intervals_of(gaps, blamed), a.spans)
    used = a.steps.used
    by_step = covered_length(used["ts"].to_numpy(), used["end"].to_numpy(), exposed)
    return LoaderWaits(ranges, wait.total, exposed.total, covered_length(ts, end, exposed), by_step)


def is_recurring(waits: LoaderWaits, minimum: float) -> bool:
    """Return whether the wait is more than one step's accident: without the worst step, the others
    still lose ``minimum`` ns on average. Fewer than three steps cannot be compared."""
    if len(waits.by_step) < 3:
        return True
    remaining_ns = waits.by_step.sum() - waits.by_step.max()
    return bool(remaining_ns / (len(waits.by_step) - 1) >= minimum)


def skip_single_wait(waits: LoaderWaits, loader: str) -> SkippedCheck:
    """Report a wait that does not recur as a skipped check. ``loader`` is its name."""
    longest = t.format_duration(waits.by_step.max())
    return SkippedCheck(
        what=f"whether the wait of {longest} for {loader} recurs",
        why=f"one of {len(waits.by_step)} steps has nearly all of it, as at the start of an epoch",
        record="schedule(wait=1, warmup=2, active=8) and profiler.step() in the loop",
    )


IMAGES = re.compile(r"(?:^|/)(?:torchvision|PIL|cv2|albumentations|kornia)/")
"""Pattern of files of libraries that decode and prepare images."""
_TABLES = re.compile(r"(?:^|/)(?:polars|pandas)/")
_FILE_READ_FRAMES = re.compile(r"(?:^|/)(?:io|parsers)/|parquet|\(\d+\): (?:scan|read)_")
"""Pattern of frames that read files: the table is not in memory."""
_DATASET_ITEM = r"\): __getitems?__$"


def table_of_dataset(a: Analysis) -> str | None:
    """Name the function that works on a table in memory (pandas, polars) for each sample or batch,
    where half of the stacks sampled in the loading are in this work of the Dataset. The result is
    ``None`` if they are not, or files are read."""
    stacks = [] if a.run_steps is None else [s for s in a.run_steps.stacks if s.part == "data"]
    _, in_items = share_in(stacks, _DATASET_ITEM)
    if any(_FILE_READ_FRAMES.search(frame) for stack in stacks for frame in stack.frames):
        return None
    in_items = [stack for stack in in_items if any(_TABLES.search(frame) for frame in stack.frames)]
    samples = sum(stack.samples for stack in in_items)
    line = hottest_line(in_items)
    if line is None or samples < MIN_TABLE_SHARE * sum(stack.samples for stack in stacks):
        return None
    return line.location.function


def prepares_images(a: Analysis) -> bool:
    """Return whether frames of the trace or of sampled stacks belong to a library for images."""
    stacks = [] if a.run_steps is None else a.run_steps.stacks
    return bool(name_matches(a.trace.cpu["name"], IMAGES.pattern).any()) or any(
        IMAGES.search(frame) for stack in stacks for frame in stack.frames
    )


_SAMPLER_FRAME = r"(?:^|/)torch/utils/data/dataloader\.py\(\d+\): (?:\w+\.)?_next_index$"
"""Frame of the loader in the loop's process that asks its sampler for the next batch's indices."""


MIN_SAMPLER_SHARE = 0.15
"""Minimum share of the loading to separate the sampler, as calls are assigned to lines."""


def library_of_loading(a: Analysis, waits: LoaderWaits | None = None) -> LibraryUse | None:
    """Find the library function that takes most of the loading in the loop's process, without its
    sampler: by the Python stacks of the window's ``waits``, which have times, else by stacks
    sampled outside windows. The result is ``None`` if there is none, or no stacks."""
    timed = [] if waits is None else stacks_under(a, waits.host)
    sampled = [] if a.run_steps is None else [s for s in a.run_steps.stacks if s.part == "data"]
    for stacks in (timed, sampled):
        _, sampler_stacks = share_in(stacks, _SAMPLER_FRAME)
        other_stacks = [s for s in stacks if s not in sampler_stacks]
        use = find_library_use(other_stacks, timed=stacks is timed)
        if use is not None:
            return use
    return None


class LoadingSamples(NamedTuple):
    """Parts of the loading in the loop's process, by Python stacks."""

    sampler: float
    """Share of the loader's sampler, which no worker takes over, or 0 if small or not recorded."""
    sampler_line: HottestLine | None
    """Line of the user's code with most of the sampler's time."""
    other_line: HottestLine | None
    """Line with most of the remaining time."""

    @property
    def movable_share(self) -> float:
        """Share of the loading that workers can take over."""
        return 1 - self.sampler


def sample_loading(a: Analysis, waits: LoaderWaits | None = None) -> LoadingSamples:
    """Separate the sampler from the rest of the loading, by the Python stacks of the window's
    ``waits``, else by stacks sampled outside windows."""
    stacks = [] if a.run_steps is None else [s for s in a.run_steps.stacks if s.part == "data"]
    share, sampler = share_in(stacks, _SAMPLER_FRAME)
    lines = hottest_line(sampler), hottest_line([s for s in stacks if s not in sampler])
    cpu = a.trace.cpu
    sampler_rows = np.flatnonzero(name_matches(cpu["name"], _SAMPLER_FRAME).to_numpy())
    if waits is not None and len(sampler_rows):
        loading = intersect(intervals_of(cpu, waits.host), a.spans)
        in_sampler = intersect(intervals_of(cpu, sampler_rows), loading)
        share = in_sampler.total / max(waits.total, 1)
    elif sum(s.samples for s in stacks) < MIN_SAMPLES:
        share = 0.0
    return LoadingSamples(share if share >= MIN_SAMPLER_SHARE else 0.0, *lines)


class LoadingRule(Rule):
    """Base of the rules about loading in the loop's own process, mostly in a library function."""

    remaining_call_share = Factor(
        0.1, "of a library function's time is left, with its cure", CHOSEN
    )
    worst_remaining_call_share = Factor(0.4, "of it is left, at worst", CHOSEN)
    best_saved_rest_share = Factor(
        0.5, "of the rest goes too, at best: samples fall on the code after a call", CHOSEN
    )

    def advise_library(
        self, use: LibraryUse, cure: LibraryFix, fix: str, movable_share: float, workers: int
    ) -> dict[str, Any]:
        """Return the fields of a finding about a library function. For some functions, workers (the
        ``fix`` so far) come first. ``movable_share`` is the share of the loading without the
        sampler."""
        if cure.workers_first:
            return {"fix": f"{fix} {cure.fix}"}
        workers_advice = f"Workers come second, for the rest: num_workers={workers}."
        share = use.time.share
        removed_shares = (
            share * (1 - self.remaining_call_share),
            share + (1 - share) * self.best_saved_rest_share,
            share * (1 - self.worst_remaining_call_share),
        )
        select = Select(on="host", name=SINGLE_PROCESS)
        return {
            **use.advice("the loading"),
            "fix": f"{cure.fix} {workers_advice} {cure.workers}".strip(),
            "verify": "Record again: the phase 'data' shrinks.",
            "edits": [
                scale_edit(select, *(1 - movable_share * removed for removed in removed_shares))
            ],
        }


def lines_of(use: LibraryUse | None) -> list[Location]:
    """Return the user's line that calls a library function. Empty if it is unknown."""
    return [] if use is None or use.time.location is None else [use.time.location]


def move_loading(movable_share: float, workers: int, name: str, taken: float | None = None) -> Edit:
    """Return the edit that moves loading to workers: all of it, or ``movable_share`` of it. Of
    that, the share ``taken`` stays, for lack of cores."""
    select = Select(on="host", name=name)
    if movable_share == 1:
        return Edit(op="parallelize", select=select, workers=workers)
    left = 1 - movable_share * (1 - (taken or 0.0))
    return scale_edit(
        select, min(1.0, left + 0.1 * movable_share), left, min(1.0, left + 0.2 * movable_share)
    )


class LoadingCalls(NamedTuple):
    """Recorded calls that the loading consists of."""

    evidence: list[Evidence]
    where: list[Location]
    summary: str
    """Sentence about the call that takes most of the loading, or nothing."""


BUILT_IN = re.compile(r"^<built-in (?:method|function) (\S+?)(?: of (\S+) object.*)?>$")
"""Pattern of ``<built-in method std of Tensor object at 0x7f…>``, shown as ``Tensor.std``."""
LOADING_CALL, OUTSIDE_OPERATORS = "loading: ", "outside operators"
"""Beginning of the evidence of a call inside the loading, and name of what no call covers."""
_MIN_LISTED_SHARE = 0.05
"""Minimum share of the loading at which a call inside it is listed. Smaller ones change nothing."""
MIN_SUMMARY_SHARE = 0.3
"""Minimum share of the loading at which one call is named in the summary."""


def find_loading_calls(a: Analysis, waits: LoaderWaits) -> LoadingCalls:
    """Find calls inside the loading that take its time, with the user's lines that make them."""
    evidence: list[Evidence] = []
    where: list[Location] = []
    calls = measure_contents(a, waits.host)
    summary = ""
    listed_calls = calls.filter(pl.col("ns") >= _MIN_LISTED_SHARE * waits.total).head(3)
    for row in listed_calls.iter_rows(named=True):
        text = _describe_call(a, row)
        evidence.append(amount_per_step(a, f"{LOADING_CALL}{text}", row["ns"]))
        share = row["ns"] / waits.total
        if not summary and share >= MIN_SUMMARY_SHARE:
            summary = f" {text} takes {share:.0%} of the loading."
        if row["frame"] is not None:
            ts, dur = (int(a.trace.cpu[column][row["callee"]]) for column in ("ts", "dur"))
            where.append(
                locate_row(
                    a,
                    row["frame"],
                    op=_short_name(a, row["callee"]),
                    ts_ns=ts,
                    dur_ns=dur,
                    count=row["count"],
                )
            )
    unexplained_ns = waits.total - int(calls["ns"].sum())
    has_stacks = bool((a.trace.cpu["kind"] == "python").any())
    if (
        not has_stacks
        and not calls.is_empty()
        and unexplained_ns >= _MIN_LISTED_SHARE * waits.total
    ):
        hint = f" ({stacks_option(a)} shows what)" if a.trace.meta.is_pytorch else ""
        label = f"{LOADING_CALL}{OUTSIDE_OPERATORS}{hint}"
        evidence.append(amount_per_step(a, label, unexplained_ns))
    return LoadingCalls(evidence, where, summary)


def _describe_call(a: Analysis, row: dict[str, int | None]) -> str:
    """Return ``zoom (scipy/ndimage/interpolation.py:700), called by __getitem__ (data.py:41)``."""
    callee, leaf, frame = row["callee"], row["leaf"], row["frame"]
    assert callee is not None
    text = _name_with_line(a, callee)
    if leaf is not None and _short_name(a, leaf) != _short_name(a, callee):
        text += f" with {_short_name(a, leaf)}"
    if frame is not None and frame != callee:
        text += f", called by {_name_with_line(a, frame)}"
    return text


def _name_with_line(a: Analysis, row: int) -> str:
    parsed = parse_frame(str(a.trace.cpu["name"][row]))
    if parsed is None:
        return _short_name(a, row)
    return f"{parsed.function} ({PurePath(parsed.file).name}:{parsed.line})"


def _short_name(a: Analysis, row: int) -> str:
    name = str(a.trace.cpu["name"][row])
    parsed = parse_frame(name)
    if parsed is not None:
        return parsed.function
    built_in = BUILT_IN.match(name)
    if built_in is None:
        return name
    owner = built_in[2]
    return built_in[1] if owner in (None, "module", "type") else f"{owner}.{built_in[1]}"

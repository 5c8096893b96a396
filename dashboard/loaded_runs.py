"""Session: content of the dashboard. Paths are read and analysed once, in a thread, and then only
looked at."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from advisor.advise.engine import AnalysisResult, Options, examine, open_ranks
from advisor.advise.finding_text import ranked_findings
from advisor.advise.ranks.job import files_summarised_apart
from advisor.core.errors import AdvisorError
from advisor.core.report import SCHEMA, Report
from advisor.core.report_file import read_saved
from advisor.core.report_steps import StepTime
from advisor.core.run_directory import STEPS
from advisor.core.trace import Run
from advisor.dashboard.live_run import Follower
from advisor.measure import Analysis
from advisor.measure.steps.step_records import RunSummary

if TYPE_CHECKING:
    from advisor.advise.ranks.job import RanksDone
    from advisor.compare import Comparison
    from advisor.read import ReadOptions

LoadState = Literal["unread", "loading", "ready", "failed"]
T = TypeVar("T")

WARM_MEASUREMENTS = (
    "breakdown", "gaps", "kernels", "hot_kernels", "families", "collectives", "memory",
)  # fmt: skip
"""Measurements that every page needs, made before the first page is shown."""
STEPS_BYTES = 256 << 10
"""Growth of the steps, bytes, at which a run without a window is read again: some thousand."""
MAX_OPENED = 6
"""Number of ranks of jobs, and runs of a folder, kept open: a trace of 100 MB takes a GB or two."""
MAX_RUNS = 200
"""Number of runs of a folder that are listed, the newest."""
BROKEN = "the analysis failed; see the terminal"
WATCH_SECONDS = 2.0
"""Time between two looks at a live run's folder for new windows, s."""


class LoadedRun:
    """Path that was read and analysed. Read-only, and safe to be read by several threads."""

    def __init__(self, path: str, examined: AnalysisResult) -> None:
        self.path = path
        self.examined = examined
        self._views: dict[Any, Any] = {}
        self._lock = threading.RLock()

    @property
    def report(self) -> Report:
        """Report, the same object that ``advisor analyze`` shows."""
        return self.examined.report

    @property
    def run(self) -> Run:
        """Run: traces by (rank, window), and what the recorder wrote."""
        return self.examined.run

    @property
    def analyses(self) -> dict[int, Analysis]:
        """Analyses by rank number (-1: the trace does not tell); the report is of the first."""
        return self.examined.analyses

    @property
    def main(self) -> Analysis:
        return self.examined.main

    def analysis(self, rank: int | None) -> Analysis:
        """Return a rank's measurements; the reported rank's when there is no such rank."""
        return self.main if rank is None else self.analyses.get(rank, self.main)

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """Return what ``make`` returned, called once per key: for tables that a page draws."""
        with self._lock:
            if key not in self._views:
                self._views[key] = make()
            table: T = self._views[key]
            return table


MAX_JSON: Final = 64 << 20
_KEY = re.compile(r"(\d{1,4})\.(\d{1,6})")


def saved_report(path: str) -> Report | None:
    """Read the report of several ranks that a file holds, or ``None`` for another file.

    Raises AdvisorError if the report is damaged."""
    result = read_saved(path, Report, SCHEMA, MAX_JSON)
    return result if result is not None and result.ranks is not None else None


def key_of(job: str, place: int) -> str:
    """Return the key of an entry that is a rank of a job: ``0.7`` is the eighth row of entry 0."""
    return f"{job}.{place}"


def split_key(key: str) -> tuple[str, int] | None:
    """Return the job and the row of such a key, or ``None`` for another key."""
    result = _KEY.fullmatch(key)
    return (result[1], int(result[2])) if result else None


@dataclass
class OpenedPath:
    """Path that the dashboard was opened with, and the state of its loading."""

    key: str
    """Number of the path as text: the URL's ``?run=1``, so that no path comes from a request."""
    path: str
    state: LoadState = "loading"
    progress: str = "waiting"
    """Current activity, for the progress page."""
    failure_reason: str = ""
    """Reason in one line why it is ``failed``."""
    loaded: LoadedRun | None = None
    """Loaded run when ``ready``; replaced as a whole when a live run's next window was analysed."""
    job: Report | None = None
    """Report when ``ready``, if the path is a job some of whose ranks are not read here: one of
    many ranks, or a saved report."""
    label: str = ""
    """Name for the reader; empty: by its path."""
    version: int = 0
    """Number of times that ``loaded`` was replaced."""
    summary: RunSummary | None = None
    """Summary of a run in a folder of runs, once its records were read."""
    step: StepTime | None = None
    """Step time of the run; of one that was read, its report's. ``None`` if not measured."""
    verdict: str = ""
    """Verdict of the report, also once the run was closed again."""
    gains: dict[str, float] = field(default_factory=dict)
    """Gain per step, ns, where known, by a finding's title; also once the run was closed again."""

    @property
    def report(self) -> Report | None:
        """Report on the path, once it is ready."""
        return self.job if self.loaded is None else self.loaded.report

    @property
    def name(self) -> str:
        """Name for the reader: the label, else the last part of the path."""
        if self.label:
            return self.label
        return "standard input" if self.path == "-" else Path(self.path).name or self.path


@dataclass
class DashboardSession:
    """Session of a dashboard: entries that load one after another in a thread."""

    paths: Sequence[str]
    options: Options = field(default_factory=Options)
    live: bool = False
    """Whether the first path is a run that goes on, whose folder is watched for new windows."""
    perfetto: str | None = None
    """Address of the Perfetto UI that a trace can be handed to, if any."""
    editor: str = ""
    """Address that opens a source in an editor, with ``{file}`` and ``{line}``; empty: none."""
    folder: str = ""
    """Folder whose runs the paths are, the newest first: the newest ones are read, the others when
    they are asked for."""

    def __post_init__(self) -> None:
        self.entries = [OpenedPath(str(i), str(path)) for i, path in enumerate(self.paths)]
        if self.folder:
            for entry in self.entries[1:]:
                entry.state = "unread"
        self._comparisons: dict[tuple[str, str], Comparison | str] = {}
        self._opening, self._reading = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._first = threading.Event()
        self._seen: object = None
        self.warmers: list[Callable[[LoadedRun], None]] = []
        """Functions called with what was read, before it is shown: pages make their large tables
        then, and not while somebody waits for them."""
        self.closers: list[Callable[[], None]] = []
        """Functions called when the session is closed: what was made for it goes."""
        self.follower = Follower(self.entries[0].path) if self.live else None
        """Follower of what the first path has recorded so far, if a run is followed."""

    # -- reading ----------------------------------------------------------------------------

    def start(self) -> DashboardSession:
        self._thread = threading.Thread(target=self._work, name="advisor-load", daemon=True)
        self._thread.start()
        return self

    def load(self) -> DashboardSession:
        """Load everything now, in this thread."""
        self._load_all()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every path is loaded or failed; False: not yet."""
        return self._first.wait(timeout)

    def close(self) -> None:
        """Stop watching, and leave nothing behind."""
        self._stop.set()
        for close in self.closers:
            close()

    def entry(self, key: str | None) -> OpenedPath:
        """Return the entry of a key, or the first one for any other key. A rank of a job is opened
        on the first request, and read in the background."""
        known = next((entry for entry in self.entries if entry.key == key), None)
        if known is not None and known.state == "unread":
            self._read_later(known)
        return known or self._open(key or "") or self.entries[0]

    def _read_later(self, entry: OpenedPath) -> None:
        """Read a run of the folder, and close the oldest one where many are open."""
        with self._opening:
            if entry.state != "unread":  # another request was quicker
                return
            entry.state = "loading"
            opened = [each for each in self.entries[1:] if each.loaded is not None]
            if len(opened) >= MAX_OPENED:
                opened[-1].state, opened[-1].loaded = "unread", None
        threading.Thread(target=self._read_rank, args=(entry,), daemon=True).start()

    def _open(self, key: str) -> OpenedPath | None:
        """Open a rank of a job, by the row of its report. Return ``None`` for no such row."""
        asked = split_key(key)
        with self._opening:
            job = next((item for item in self.entries if asked and item.key == asked[0]), None)
            report = None if job is None else job.report
            ranks = None if report is None else report.ranks
            if asked is None or ranks is None or asked[1] >= len(ranks.lines):
                return None
            for entry in self.entries:
                if entry.key == key_of(*asked):  # another request was quicker
                    return entry
            row = ranks.lines[asked[1]]
            made = OpenedPath(key_of(*asked), row.path, label=f"rank {row.rank}")
            opened = [e for e in self.entries if split_key(e.key) and e.state != "loading"]
            if len(opened) >= MAX_OPENED:
                self.entries.remove(opened[0])
            self.entries.append(made)
        work = threading.Thread(target=self._read_rank, args=(made,), daemon=True)
        work.start()
        return made

    def _read_rank(self, entry: OpenedPath) -> None:
        with self._reading:  # one after another: each takes as much memory as it is large
            try:
                self._load(entry, as_run=True)
                if self.folder:
                    self._compare(*self._in_order(self.entries[0].key, entry.key))
            finally:
                if entry.state == "loading":
                    self._fail(entry, BROKEN)

    def comparison(self, before: str, after: str) -> Comparison | str | None:
        """Return two entries compared, the reason why not, or ``None`` if not yet made."""
        return self._comparisons.get((before, after))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Comparisons that are made, as (before, after): the first path with each of the others. In
        a folder the first is the newest run, and so the one after. Jobs, and ranks that were opened
        of one, are not compared."""
        first, *others = self.entries
        if first.job is not None:
            return []
        runs = [
            self._in_order(first.key, entry.key)
            for entry in others
            if entry.job is None and split_key(entry.key) is None
        ]
        return [pair for pair in runs if not self.folder or pair in self._comparisons]

    def _in_order(self, first: str, other: str) -> tuple[str, str]:
        return (other, first) if self.folder else (first, other)

    def status(self) -> dict[str, Any]:
        """Return the state and progress of each entry, for the progress page."""
        return {
            "done": all(entry.state != "loading" for entry in self.entries),
            "entries": [
                {
                    "key": entry.key,
                    "name": entry.name,
                    "state": entry.state,
                    "doing": entry.progress,
                    "why": entry.failure_reason,
                    "version": entry.version,
                }
                for entry in self.entries
            ],
        }

    # -- the loading thread -----------------------------------------------------------------

    def _work(self) -> None:
        self._load_all()
        for entry in self.entries if self.folder else ():
            if self._stop.is_set():
                return
            with contextlib.suppress(AdvisorError):
                entry.summary = RunSummary.read(entry.path)
                entry.step = entry.step if entry.verdict else entry.summary.step
        for entry in self.entries[1 : 1 + MAX_OPENED] if self.folder else ():
            if entry.state == "unread" and not self._stop.is_set():
                entry.state = "loading"
                self._read_rank(entry)
        while self.live and not self._stop.wait(WATCH_SECONDS):
            self._refresh(self.entries[0])

    def _load_all(self) -> None:
        try:
            for entry in [each for each in self.entries if each.state == "loading"]:
                self._load(entry)
            for pair in self.pairs:
                self._compare(*pair)
        finally:
            for entry in self.entries[:1] if self.folder else self.entries:
                if entry.state == "loading":  # the thread dies of a bug: say so, not "loading"
                    self._fail(entry, BROKEN)
            self._first.set()

    def _load(self, entry: OpenedPath, *, as_run: bool = False) -> None:
        """Load an entry; ``as_run``: as one run, whatever it is."""

        def reading(path: str, size: int) -> None:
            entry.progress = f"reading {Path(path).name or path}: {size / 1e6:,.0f} MB"

        entry.progress = "reading"
        windows = newest_windows(entry.path) if self.live else None
        try:
            if not as_run and not self.live and self._is_saved(entry):
                return
            memory = self.options.read.memory_snapshot if entry is self.entries[0] else None
            read = replace(self.options.read, progress=reading, memory_snapshot=memory, urls=False)
            loaded = LoadedRun(entry.path, self._examined(entry, read, alone=as_run))
            for name in WARM_MEASUREMENTS:
                entry.progress = f"measuring: {name.replace('_', ' ')}"
                getattr(loaded.main, name)
            entry.progress = "measuring: tables"
            for warm in self.warmers:
                warm(loaded)
        except AdvisorError as error:
            self._fail(entry, str(error))
        except MemoryError:
            self._fail(entry, "out of memory; analyse one rank or fewer steps at a time")
        else:
            entry.loaded, entry.verdict = loaded, loaded.report.verdict
            entry.step = loaded.report.step
            entry.gains = {
                finding.title: finding.impact.gain_ns
                for finding in ranked_findings(loaded.report)
                if finding.impact is not None
                and finding.impact.currency == "step_time"
                and finding.impact.gain_ns is not None
            }
            ranks = loaded.report.ranks
            if ranks is not None and len(ranks.lines) > len(loaded.analyses):
                entry.job = loaded.report
            entry.version += 1
            entry.failure_reason = ""
            entry.state = "ready"
        self._seen = windows

    def _examined(self, entry: OpenedPath, read: ReadOptions, *, alone: bool) -> AnalysisResult:
        """Analyse a path, with progress in ``entry.progress``; ``alone``: one rank of a job."""

        def progress(done: RanksDone) -> None:
            if self._stop.is_set():
                raise AdvisorError("the dashboard was closed")
            entry.progress = f"measuring: {done.ranks:,} of {done.total:,} ranks"

        def measuring() -> None:
            entry.progress = "measuring"

        options = replace(self.options, read=read, on_progress=progress)
        if not self.live and not alone and files_summarised_apart([entry.path], options):
            return examine(entry.path, options, measuring)
        run = open_ranks(entry.path, replace(self.options, read=read))
        measuring()
        return examine(run, self._options(run))

    def _is_saved(self, entry: OpenedPath) -> bool:
        """Return whether it is a saved report of several ranks; then it is ready."""
        entry.job = saved_report(entry.path)
        if entry.job is None:
            return False
        entry.version += 1
        entry.state = "ready"
        return True

    def _fail(self, entry: OpenedPath, why: str) -> None:
        """Mark a path that cannot be shown; a live run keeps showing its window before."""
        entry.failure_reason = why
        entry.state = "ready" if entry.loaded is not None else "failed"

    def _options(self, run: Run) -> Options:
        """Return the options; of a run that goes on, for the last window that all ranks have."""
        if not self.live or self.options.window is not None:
            return self.options
        if not run.traces:
            return self.options
        common = set.intersection(*({w for r, w in run.traces if r == n} for n in run.ranks))
        if not common:
            return self.options
        return replace(self.options, window=max(common))

    def _refresh(self, entry: OpenedPath) -> None:
        if entry.state == "failed" or newest_windows(entry.path) != self._seen:
            self._load(entry)

    def _compare(self, before: str, after: str) -> None:
        first, second = self.entry(before), self.entry(after)
        if first.loaded is None or second.loaded is None:
            missing = first if first.loaded is None else second
            self._comparisons[before, after] = missing.failure_reason
            return
        from advisor.compare import compare_examined

        try:
            comparison: Comparison | str = compare_examined(
                first.loaded.examined, second.loaded.examined
            )
        except AdvisorError as error:
            comparison = str(error)
        self._comparisons[before, after] = comparison


def newest_windows(path: str) -> object:
    """Return a value that changes when a window landed; before the first, when many steps did."""
    folder = Path(path)
    windows = frozenset(str(file) for file in folder.glob("rank*/trace_w*.json*"))
    if windows:
        return windows
    sizes = 0
    for file in folder.glob(f"rank*/{STEPS}"):
        try:
            sizes += file.stat().st_size
        except OSError:  # gone meanwhile
            continue
    return sizes // STEPS_BYTES

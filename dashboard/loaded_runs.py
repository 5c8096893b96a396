"""Session of a dashboard: its paths, each read and analysed once, in a thread."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from advisor.advise.engine import AnalysisResult, Options, analyze_in_full, open_ranks
from advisor.advise.finding_text import ranked_findings
from advisor.advise.ranks.job import files_summarized_apart
from advisor.core.errors import AdvisorError
from advisor.core.finding import Impact
from advisor.core.report import SCHEMA, Report
from advisor.core.report_file import read_saved
from advisor.core.report_steps import StepTime
from advisor.core.run_directory import STEPS
from advisor.core.trace import Run
from advisor.dashboard.live_run import Follower
from advisor.measure import Analysis
from advisor.measure.steps.run_steps import RunSummary

if TYPE_CHECKING:
    from advisor.advise.ranks.job import RanksDone
    from advisor.compare import Comparison
    from advisor.read import ReadOptions

LoadState = Literal["unread", "loading", "ready", "failed"]
T = TypeVar("T")

PRECOMPUTED_MEASUREMENTS = (
    "breakdown", "gaps", "kernels", "hot_kernels", "families", "collectives", "memory",
)  # fmt: skip
"""Measurements that every page needs, computed before the first page is shown."""
STEPS_GROWTH_BYTES = 256 << 10
"""Growth of the step records, bytes, after which a run without a window is read again."""
MAX_OPEN_RUNS = 6
"""Number of a job's ranks, or of a folder's runs, kept open. A trace of 100 MB takes 1 to 2 GB."""
MAX_RUNS = 200
"""Number of runs listed of a folder, the newest ones."""
ANALYSIS_FAILED = "the analysis failed; see the terminal"
WATCH_SECONDS = 2.0
"""Time between two checks of a live run's folder for new windows, s."""


class LoadedRun:
    """Run that was read and analysed. Read-only and thread-safe."""

    def __init__(self, path: str, result: AnalysisResult) -> None:
        self.path = path
        self.result = result
        self._tables: dict[Any, Any] = {}
        self._lock = threading.RLock()

    @property
    def report(self) -> Report:
        """Report, as ``advisor analyze`` shows it."""
        return self.result.report

    @property
    def run(self) -> Run:
        """Run: traces by (rank, window), and the recorder's records."""
        return self.result.run

    @property
    def analyses(self) -> dict[int, Analysis]:
        """Analyses by rank number, -1 for a trace without one. The report is on the first."""
        return self.result.analyses

    @property
    def main(self) -> Analysis:
        """Analysis of the reported rank."""
        return self.result.main

    def analysis(self, rank: int | None) -> Analysis:
        """Return a rank's analysis, or the reported rank's if there is no such rank."""
        return self.main if rank is None else self.analyses.get(rank, self.main)

    def get_or_compute(self, key: Any, compute: Callable[[], T]) -> T:
        """Return ``compute()``, which is called once per key. Pages keep their tables here."""
        with self._lock:
            if key not in self._tables:
                self._tables[key] = compute()
            table: T = self._tables[key]
            return table


MAX_REPORT_BYTES: Final = 64 << 20
_RANK_KEY = re.compile(r"(\d{1,4})\.(\d{1,6})")


def read_saved_report(path: str) -> Report | None:
    """Read a saved report of several ranks. Return ``None`` for any other file.

    Raises AdvisorError if the report is damaged."""
    result = read_saved(path, Report, SCHEMA, MAX_REPORT_BYTES)
    return result if result is not None and result.ranks is not None else None


def rank_key(job: str, row: int) -> str:
    """Return the key of a job's rank: ``0.7`` is the rank in the eighth row of entry 0."""
    return f"{job}.{row}"


def split_rank_key(key: str) -> tuple[str, int] | None:
    """Return the job's key and the row of a rank's key, or ``None`` for any other key."""
    match = _RANK_KEY.fullmatch(key)
    return (match[1], int(match[2])) if match else None


@dataclass
class OpenedPath:
    """Path that is open in the dashboard, and the state of its loading."""

    key: str
    """Number of the path, as in the address ``?run=1``. Requests never contain a path."""
    path: str
    state: LoadState = "loading"
    progress: str = "waiting"
    """Current activity, shown on the progress card."""
    failure_reason: str = ""
    """Reason of the state ``failed``, in one line."""
    loaded: LoadedRun | None = None
    """Loaded run in the state ``ready``. A live run's next window replaces it."""
    job: Report | None = None
    """Report of a job in the state ``ready``, if some of its ranks are not loaded."""
    label: str = ""
    """Displayed name; empty: the name comes from the path."""
    version: int = 0
    """Number of times that ``loaded`` was replaced."""
    summary: RunSummary | None = None
    """Summary of a run in a folder of runs, after its records were read."""
    step: StepTime | None = None
    """Step time of the run, from its report if it was read. ``None`` if not measured."""
    verdict: str = ""
    """Verdict of the report. It is kept when the run is closed."""
    gains: dict[str, Impact] = field(default_factory=dict)
    """Known gains per step by the finding's title. They are kept when the run is closed."""

    @property
    def report(self) -> Report | None:
        """Report on the path, or ``None`` if it is not ready."""
        return self.job if self.loaded is None else self.loaded.report

    @property
    def name(self) -> str:
        """Displayed name: the label, or else the last part of the path."""
        if self.label:
            return self.label
        return "standard input" if self.path == "-" else Path(self.path).name or self.path


@dataclass
class DashboardSession:
    """Session of a dashboard. Its entries are loaded one after another in a thread."""

    paths: Sequence[str]
    options: Options = field(default_factory=Options)
    is_live: bool = False
    """Whether the first path is still being recorded. Its folder is watched for new windows."""
    perfetto: str | None = None
    """Address of the Perfetto UI that can open a trace, or ``None``."""
    editor: str = ""
    """Address that opens a source file in an editor, with ``{file}`` and ``{line}``; or empty."""
    folder: str = ""
    """Folder of the runs in ``paths``, or empty. The newest runs are first and are read at once,
    the others on request."""

    def __post_init__(self) -> None:
        self.entries = [OpenedPath(str(i), str(path)) for i, path in enumerate(self.paths)]
        if self.folder:
            for entry in self.entries[1:]:
                entry.state = "unread"
        self._comparisons: dict[tuple[str, str], Comparison | str] = {}
        self._open_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._first_load = threading.Event()
        self._fingerprint: object = None
        self.precompute_callbacks: list[Callable[[LoadedRun], None]] = []
        """Functions called with each loaded run before it is shown. Pages compute slow tables in
        them."""
        self.close_callbacks: list[Callable[[], None]] = []
        """Functions called when the session is closed. They remove temporary files."""
        self.follower = Follower(self.entries[0].path) if self.is_live else None
        """Follower of the first path, if it is still being recorded."""

    # -- reading ----------------------------------------------------------------------------

    def start(self) -> DashboardSession:
        """Load everything in a thread."""
        self._thread = threading.Thread(target=self._run_loader, name="advisor-load", daemon=True)
        self._thread.start()
        return self

    def load(self) -> DashboardSession:
        """Load everything in this thread."""
        self._load_all()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every path is loaded or failed. Return False after the timeout, s."""
        return self._first_load.wait(timeout)

    def close(self) -> None:
        """Stop watching the run, and remove temporary files."""
        self._stopped.set()
        for close in self.close_callbacks:
            close()

    def entry(self, key: str | None) -> OpenedPath:
        """Return the entry of a key, or the first entry for an unknown key.

        A rank of a job, and an unread run of a folder, is then read in a thread."""
        entry = next((entry for entry in self.entries if entry.key == key), None)
        if entry is not None and entry.state == "unread":
            self._start_reading(entry)
        return entry or self._open_rank(key or "") or self.entries[0]

    def _start_reading(self, entry: OpenedPath) -> None:
        """Read a run of the folder in a thread, and close the oldest run if too many are open."""
        with self._open_lock:
            if entry.state != "unread":  # another request was quicker
                return
            entry.state = "loading"
            open_entries = [
                candidate for candidate in self.entries[1:] if candidate.loaded is not None
            ]
            if len(open_entries) >= MAX_OPEN_RUNS:
                open_entries[-1].state, open_entries[-1].loaded = "unread", None
        threading.Thread(target=self._read_entry, args=(entry,), daemon=True).start()

    def _open_rank(self, key: str) -> OpenedPath | None:
        """Open the rank of a job that a key names. Return ``None`` if there is none."""
        job_and_row = split_rank_key(key)
        with self._open_lock:
            job = next(
                (item for item in self.entries if job_and_row and item.key == job_and_row[0]), None
            )
            report = None if job is None else job.report
            ranks = None if report is None else report.ranks
            if job_and_row is None or ranks is None or job_and_row[1] >= len(ranks.lines):
                return None
            for known in self.entries:
                if known.key == rank_key(*job_and_row):  # another request was quicker
                    return known
            row = ranks.lines[job_and_row[1]]
            entry = OpenedPath(rank_key(*job_and_row), row.path, label=f"rank {row.rank}")
            open_ranks = [
                entry
                for entry in self.entries
                if split_rank_key(entry.key) and entry.state != "loading"
            ]
            if len(open_ranks) >= MAX_OPEN_RUNS:
                self.entries.remove(open_ranks[0])
            self.entries.append(entry)
        thread = threading.Thread(target=self._read_entry, args=(entry,), daemon=True)
        thread.start()
        return entry

    def _read_entry(self, entry: OpenedPath) -> None:
        """Load an entry of a job or a folder, one at a time."""
        with self._read_lock:  # one at a time, to limit memory
            try:
                self._load(entry, as_one_run=True)
                if self.folder:
                    self._compare(*self._order_pair(self.entries[0].key, entry.key))
            finally:
                if entry.state == "loading":
                    self._fail(entry, ANALYSIS_FAILED)

    def comparison(self, before: str, after: str) -> Comparison | str | None:
        """Return a comparison, the reason why there is none, or ``None`` if not computed yet."""
        return self._comparisons.get((before, after))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of keys to compare, as (before, after): the first path with each of the others.

        In a folder the first path is the newest run, so it is the one after; only runs that were
        read are paired. Jobs and their ranks are not compared."""
        first, *others = self.entries
        if first.job is not None:
            return []
        runs = [
            self._order_pair(first.key, entry.key)
            for entry in others
            if entry.job is None and split_rank_key(entry.key) is None
        ]
        return [pair for pair in runs if not self.folder or pair in self._comparisons]

    def _order_pair(self, first: str, other: str) -> tuple[str, str]:
        """Return two keys as (before, after): in a folder the first one is newer."""
        return (other, first) if self.folder else (first, other)

    def status(self) -> dict[str, Any]:
        """Return the state and progress of each entry, for ``/_advisor/status``."""
        return {
            "done": all(entry.state != "loading" for entry in self.entries),
            "entries": [
                {
                    "key": entry.key,
                    "name": entry.name,
                    "state": entry.state,
                    "progress": entry.progress,
                    "failure_reason": entry.failure_reason,
                    "version": entry.version,
                }
                for entry in self.entries
            ],
        }

    # -- the loading thread -----------------------------------------------------------------

    def _run_loader(self) -> None:
        """Load everything, then the other runs of a folder, then watch a live run."""
        self._load_all()
        for entry in self.entries if self.folder else ():
            if self._stopped.is_set():
                return
            with contextlib.suppress(AdvisorError):
                entry.summary = RunSummary.read(entry.path)
                entry.step = entry.step if entry.verdict else entry.summary.step
        for entry in self.entries[1 : 1 + MAX_OPEN_RUNS] if self.folder else ():
            if entry.state == "unread" and not self._stopped.is_set():
                entry.state = "loading"
                self._read_entry(entry)
        while self.is_live and not self._stopped.wait(WATCH_SECONDS):
            self._refresh(self.entries[0])

    def _load_all(self) -> None:
        """Load all entries in the state ``loading``, and compare the pairs."""
        try:
            for entry in [each for each in self.entries if each.state == "loading"]:
                self._load(entry)
            for pair in self.pairs:
                self._compare(*pair)
        finally:
            for entry in self.entries[:1] if self.folder else self.entries:
                if entry.state == "loading":  # a bug ended the thread: do not stay "loading"
                    self._fail(entry, ANALYSIS_FAILED)
            self._first_load.set()

    def _load(self, entry: OpenedPath, *, as_one_run: bool = False) -> None:
        """Load an entry. ``as_one_run``: skip the checks for a saved report and for a job."""

        def report_reading(path: str, size: int) -> None:
            entry.progress = f"reading {Path(path).name or path}: {size / 1e6:,.0f} MB"

        entry.progress = "reading"
        fingerprint = recording_fingerprint(entry.path) if self.is_live else None
        try:
            if not as_one_run and not self.is_live and self._load_saved_report(entry):
                return
            memory = self.options.read.memory_snapshot if entry is self.entries[0] else None
            read_options = replace(
                self.options.read, progress=report_reading, memory_snapshot=memory, urls=False
            )
            loaded = LoadedRun(
                entry.path, self._analyze(entry, read_options, is_one_run=as_one_run)
            )
            for name in PRECOMPUTED_MEASUREMENTS:
                entry.progress = f"measuring: {name.replace('_', ' ')}"
                getattr(loaded.main, name)
            entry.progress = "measuring: tables"
            for precompute in self.precompute_callbacks:
                precompute(loaded)
        except AdvisorError as error:
            self._fail(entry, str(error))
        except MemoryError:
            self._fail(entry, "out of memory; analyse one rank or fewer steps at a time")
        else:
            entry.loaded, entry.verdict = loaded, loaded.report.verdict
            entry.step = loaded.report.step
            entry.gains = {
                finding.title: finding.impact
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
        self._fingerprint = fingerprint

    def _analyze(
        self, entry: OpenedPath, read_options: ReadOptions, *, is_one_run: bool
    ) -> AnalysisResult:
        """Analyse a path, with progress in ``entry.progress``.

        ``is_one_run``: do not summarize the path as a job of many ranks."""

        def report_progress(state: RanksDone) -> None:
            if self._stopped.is_set():
                raise AdvisorError("the dashboard was closed")
            entry.progress = f"measuring: {state.ranks:,} of {state.total:,} ranks"

        def report_measuring() -> None:
            entry.progress = "measuring"

        options = replace(self.options, read=read_options, on_progress=report_progress)
        if not self.is_live and not is_one_run and files_summarized_apart([entry.path], options):
            return analyze_in_full(entry.path, options, report_measuring)
        run = open_ranks(entry.path, replace(self.options, read=read_options))
        report_measuring()
        return analyze_in_full(run, self._options_for(run))

    def _load_saved_report(self, entry: OpenedPath) -> bool:
        """Load a saved report of several ranks. Return False for any other path."""
        entry.job = read_saved_report(entry.path)
        if entry.job is None:
            return False
        entry.version += 1
        entry.state = "ready"
        return True

    def _fail(self, entry: OpenedPath, reason: str) -> None:
        """Mark an entry as failed. A live run keeps showing its previous window."""
        entry.failure_reason = reason
        entry.state = "ready" if entry.loaded is not None else "failed"

    def _options_for(self, run: Run) -> Options:
        """Return the options. For a live run they select the last window that all ranks have."""
        if not self.is_live or self.options.window is not None:
            return self.options
        if not run.traces:
            return self.options
        common_windows = set.intersection(
            *({w for r, w in run.traces if r == n} for n in run.ranks)
        )
        if not common_windows:
            return self.options
        return replace(self.options, window=max(common_windows))

    def _refresh(self, entry: OpenedPath) -> None:
        """Load a live run again if it has new data."""
        if entry.state == "failed" or recording_fingerprint(entry.path) != self._fingerprint:
            self._load(entry)

    def _compare(self, before: str, after: str) -> None:
        """Compute the comparison of two entries."""
        before_entry, after_entry = self.entry(before), self.entry(after)
        if before_entry.loaded is None or after_entry.loaded is None:
            missing = before_entry if before_entry.loaded is None else after_entry
            self._comparisons[before, after] = missing.failure_reason
            return
        from advisor.compare import compare_examined

        try:
            comparison: Comparison | str = compare_examined(
                before_entry.loaded.result, after_entry.loaded.result
            )
        except AdvisorError as error:
            comparison = str(error)
        self._comparisons[before, after] = comparison


def recording_fingerprint(path: str) -> object:
    """Return a value that changes with a new window; before the first one, with many steps."""
    folder = Path(path)
    windows = frozenset(str(file) for file in folder.glob("rank*/trace_w*.json*"))
    if windows:
        return windows
    total_bytes = 0
    for file in folder.glob(f"rank*/{STEPS}"):
        try:
            total_bytes += file.stat().st_size
        except OSError:  # removed meanwhile
            continue
    return total_bytes // STEPS_GROWTH_BYTES

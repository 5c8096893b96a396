"""The table of past predictions: what was predicted of a change, and what was measured. And how
wide an interval is: as wide as predictions of that kind have been wrong.

``predictions.jsonl`` beside this file is ours, written by the benchmarks; a run keeps its own lines
in ``ledger.jsonl``, and the user's own file is written only where they agreed. JSON lines, appended
under a lock: lines of another schema, torn or damaged ones are skipped and counted. Holds no source
code and no names of programs, files or hosts of the user. Imports neither torch nor polars.

Errors are ratios of measured to predicted gains; where the batch grows, of the step, for the gain
is then near zero. An interval is such that four of five past errors would have been inside it, the
one to come counted in (split conformal: of n errors the one in place ⌈0.8 (n + 1)⌉ by size). Kinds
with too few of their own take all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular
from advisor.core.finding import Edit

SCHEMA = "advisor.ledger/1"
FILE = "ledger.jsonl"
SHIPPED = Path(__file__).with_name("predictions.jsonl")
VARIABLE = "ADVISOR_LEDGER"
"""Where the user's file is, in place of ``~/.local/share/advisor/ledger.jsonl``."""
MAX_BYTES = 8 << 20
MIN_RATIO = 0.05
"""A fix that brought nothing, or less, counts as this share of what was predicted."""
MAX_RATIO = 1e6
"""A line whose ratio is larger was not measured: it is damage."""
_RENAMED = {"of": "program", "knob": "knob"}
"""Fields under the names that earlier versions wrote."""


class Prediction(Struct, kw_only=True, omit_defaults=True):
    """A prediction and its measurement, in one unit."""

    schema: str = SCHEMA
    unix: int = 0
    """When, s since 1970."""
    source: Literal[
        "try", "compare", "workload", "pair", "experiment", "program", "job", "gpus", "mesh"
    ] = "try"
    """What measured it. The user's: a trial, a comparison of two runs. Ours: a trial of a bundled
    workload, a public pair of traces, an experiment of docs/accuracy.md, a program of
    tests/corpus with and without its fault, a simulated job, the same work on two GPUs (or in
    traces of two), the same model on two meshes."""
    program: str = ""
    """Ours: which of them; empty: the user's."""
    group: str = ""
    """Ours: the program that several lines are of; empty: of no other line."""
    kind: str = ""
    """What kind of change: see ``calibration``; empty: not known."""
    change: str = ""
    rule: str = ""
    """Whose fix it was; empty: no finding's."""
    knob: str = ""
    """With its setting; empty: changed by hand."""
    device: str = ""
    """Name of the GPU (or of the trace it is known by); empty: none."""
    target: str = ""
    """The other GPU, where the same work was measured on two."""
    torch: str = ""
    unit: str = ""
    """Empty: shares of the mean step (0 to 1)."""
    predicted: float = 0.0
    low: float = 0.0
    high: float = 0.0
    measured: float = 0.0
    measured_low: float = 0.0
    measured_high: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return max(self.measured / self.predicted, MIN_RATIO) if self.predicted > 0 else 1.0

    @property
    def error(self) -> float:
        """Logarithm of their ratio, without its sign."""
        return abs(math.log(self.ratio))

    @property
    def inside(self) -> bool:
        """Whether the measured interval meets the predicted one."""
        return self.measured_low <= self.high and self.measured_high >= self.low


class Table(NamedTuple):
    """What a file holds."""

    predictions: list[Prediction]
    skipped: int
    """Lines that could not be read."""


class Record(NamedTuple):
    """How predictions of one rule did."""

    trials: int
    inside: int
    low: float
    high: float
    """The smallest and the largest ratio of measured to predicted."""

    def __str__(self) -> str:
        cases = "case" if self.trials == 1 else "cases"
        low, high = f"{self.low:.0%}", f"{self.high:.0%}"
        share = high if low == high else f"{low[:-1]}–{high}"
        return f"in {self.trials} measured {cases} the real gain was {share} of the estimate"


# -- files --------------------------------------------------------------------------------------


def user_file() -> Path:
    """The user's own file, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(base) / "advisor" / FILE


def append_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Add lines, all or none of them between those of others. Raises AdvisorError."""
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in predictions)
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with _locked(descriptor):
                os.write(descriptor, lines)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be written ({error.strerror or error})") from None


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """While nobody else appends. Where there is no such lock, an append of this size is whole."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def read_predictions(path: Path) -> Table:
    """A file that may not be there, or hold lines of others. Raises AdvisorError."""
    if not path.is_file():
        return Table([], 0)
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    return decode_predictions(data)


def decode_predictions(data: bytes) -> Table:
    """Lines of a file."""
    rows, skipped = [], 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
            row = msgspec.convert(fields, Prediction)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            skipped += 1
            continue
        numbers = [row.predicted, row.low, row.high]
        numbers += [row.measured, row.measured_low, row.measured_high]
        if row.schema != SCHEMA or not all(map(math.isfinite, numbers)) or row.ratio > MAX_RATIO:
            skipped += 1
            continue
        rows.append(row)
    return Table(rows, skipped)


# -- what is known ------------------------------------------------------------------------------

left_out: ContextVar[str] = ContextVar("left_out", default="")
"""The program whose own outcome no interval may know of now."""


@contextmanager
def without_program(program: str) -> Iterator[None]:
    """Intervals as if a pair or a workload had never been measured, nor any other of its program
    (``Prediction.group``), so that a prediction of it is not compared with an interval that it
    widened itself."""
    group = next((row.group for row in shipped_predictions() if row.program == program), "")
    token = left_out.set(group or program)
    try:
        yield
    finally:
        left_out.reset(token)


@cache
def shipped_predictions() -> tuple[Prediction, ...]:
    """Ours, as the benchmarks wrote them."""
    return tuple(decode_predictions(SHIPPED.read_bytes()).predictions)


def shipped_trials() -> tuple[Prediction, ...]:
    """Those of ours in which a rule's fix was tried."""
    return tuple(row for row in shipped_predictions() if row.rule)


def all_trials() -> tuple[Prediction, ...]:
    """All trials of rules' fixes: ours, and those of the user."""
    return tuple(row for row in (*shipped_trials(), *_users()) if _counts(row))


def shipped_experiments() -> tuple[Prediction, ...]:
    """Ours in which the kind of change is known: public pairs, experiments and programs."""
    wanted = ("pair", "experiment", "program")
    return tuple(
        row for row in shipped_predictions() if row.source in wanted and row.kind and _counts(row)
    )


def _counts(row: Prediction) -> bool:
    return not left_out.get() or left_out.get() not in (row.program, row.group)


def _users() -> tuple[Prediction, ...]:
    path = user_file()
    try:
        state = path.stat()
    except OSError:
        return ()
    return _read_once(path, state.st_mtime_ns, state.st_size)


@cache
def _read_once(path: Path, _changed: int, _size: int) -> tuple[Prediction, ...]:
    try:
        return tuple(read_predictions(path).predictions)
    except AdvisorError:  # too large, or not to be read: as if there were none
        return ()


def records_by_rule(predictions: Iterable[Prediction]) -> dict[str, Record]:
    """By rule, in the order of their names."""
    by_rule: dict[str, list[Prediction]] = {}
    for row in predictions:
        if row.predicted > 0:
            by_rule.setdefault(row.rule, []).append(row)
    return {
        rule: Record(
            len(rows),
            sum(row.inside for row in rows),
            min(row.ratio for row in rows),
            max(row.ratio for row in rows),
        )
        for rule, rows in sorted(by_rule.items())
    }


COVERAGE = 0.8
"""Share of the measured gains that an interval is to hold."""
JOB_COVERAGE = 0.85
"""The same of simulated jobs: more than is promised, since real jobs differ."""
MIN_ERRORS = round(COVERAGE / (1 - COVERAGE))
"""Fewer errors than this say nothing of that share: even the largest may be too small."""
OF_THE_STEP = ("batch",)
"""Kinds whose errors are of the step, not of the gain."""
MIN_SHARE = 0.01
"""Of the step, each way: two runs of one program differ by that much."""
OTHERS = "others"
"""What no kind of fault is like: all kinds together."""


class Band(NamedTuple):
    """Where a gain lies: ns per step; of a job, measured over predicted."""

    low: float
    high: float


def error_bound(errors: Sequence[float]) -> float:
    """The error that the next one stays below with ``COVERAGE``, given those before it."""
    ordered = sorted(errors)
    place = math.ceil(COVERAGE * (len(ordered) + 1))
    return ordered[min(place, len(ordered)) - 1]


# -- by kind of edit ----------------------------------------------------------------------------


def edit_kind(edit: Edit) -> str:
    """What kind of change an edit is, as far as its errors go."""
    if edit.op == "parallelize":
        return "loader"
    if edit.op == "resize":
        return "batch"
    if edit.op == "remove_skew":
        return "ranks"
    if edit.op == "roofline":
        return "rate"
    if edit.op == "make_async":
        return "waits"
    return "device" if edit.select.on == "gpu" and edit.op != "drop_launch" else "host"


def error_of(kinds: Iterable[str], known: Sequence[Prediction]) -> float:
    """How far off predictions of these kinds are, as a logarithm; the worst of them."""
    general = [row.error for row in known if row.kind not in OF_THE_STEP]
    bounds = []
    for name in set(kinds):
        own = [row.error for row in known if row.kind == name]
        # an error of a gain says little of one of the step: where only those are known, the worst
        few = max(general) if name in OF_THE_STEP else error_bound(general)
        bounds.append(error_bound(own) if len(own) >= MIN_ERRORS else few)
    return max(bounds, default=error_bound(general))


def widened_by_kind(
    gain: float, low: float, high: float, edits: Sequence[Edit], step_ns: float
) -> Band:
    """A band (``low`` to ``high``, from the assumptions of the edits) made as wide as predictions
    of these kinds are wrong. All ns per step."""
    kinds, known = {edit_kind(edit) for edit in edits}, shipped_experiments()
    floor = MIN_SHARE * step_ns
    of_step = kinds & set(OF_THE_STEP)
    if of_step:
        left = step_ns - gain
        floor += left * (math.exp(error_of(of_step, known)) - 1)
    factor = math.exp(error_of(kinds - of_step, known)) if kinds - of_step else 1.0
    ends = (gain * factor, gain / factor, gain - floor, gain + floor)
    return Band(min(low, *ends), min(max(high, *ends), step_ns))


def worst_case(low: float, high: float, step_ns: float) -> Band:
    """A band as wide as the worst prediction so far was wrong, ns per step."""
    factor = math.exp(max(row.error for row in shipped_experiments()))
    return Band(low / factor, min(high * factor, step_ns))


# -- by rule ------------------------------------------------------------------------------------


class WidenedRange(NamedTuple):
    """A band, and what it comes from; empty: too little is known of the rule."""

    band: Band
    note: str


def widened_by_rule(
    rule: str, device: str, gain: float, band: Band, step_ns: float
) -> WidenedRange:
    """A band, ns per step, widened by what came of this rule's fixes: on the same hardware where
    there are enough of them, else on any. It never becomes narrower by this."""
    own = [row for row in all_trials() if row.rule == rule and row.predicted > 0]
    here = [row for row in own if row.device == device]
    used = here if len(here) >= MIN_ERRORS else own
    if len(used) < MIN_ERRORS:
        return WidenedRange(band, "")
    factor = math.exp(error_bound([row.error for row in used]))
    wide = Band(
        min(band.low, gain / factor), min(max(band.high, gain * factor), max(step_ns, band.high))
    )
    return WidenedRange(wide, str(records_by_rule(used)[rule]))


# -- jobs of many ranks -------------------------------------------------------------------------


def fault_kind(kind: str, *, moves: bool) -> str:
    """A kind of fault as the table has it (``imbalance that moves``: of another rank each step)."""
    return f"{kind} that moves" if moves else kind


def job_band(kind: str) -> Band:
    """Measured over predicted gains of faults of a kind (of all, where too few are known), on
    simulated jobs that were run again without their fault: that includes what the replay cannot
    know, such as what overlap hides and hosts that run ahead."""
    bands = job_bands()
    return bands.get(kind) or bands[OTHERS]


@cache
def job_bands() -> dict[str, Band]:
    """By kind. Split conformal, as many jobs left out below as above; to whole hundredths."""
    ratios: dict[str, list[float]] = {}
    for row in shipped_predictions():
        if row.source == "job":
            for name in (row.kind, OTHERS):
                ratios.setdefault(name, []).append(row.measured / row.predicted)
    bands = {}
    for name, values in ratios.items():
        outside = math.floor((1 - JOB_COVERAGE) / 2 * (len(values) + 1))
        if outside:
            values.sort()
            low, high = values[outside - 1], values[-outside]
            bands[name] = Band(math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
    return bands


# -- another mesh -------------------------------------------------------------------------------


@cache
def mesh_error(*, assumed: bool) -> float:
    """Logarithm by which the step on another device mesh may be off: as on simulated jobs; where
    links or collectives there are ``assumed``, as for published steps of one model on two meshes,
    of which neither was recorded."""
    kinds = ("simulated", "published") if assumed else ("simulated",)
    rows = [row for row in shipped_predictions() if row.source == "mesh"]
    return max(
        error_bound([row.error for row in rows if row.kind == kind] or [0.0]) for kind in kinds
    )


# -- another GPU --------------------------------------------------------------------------------


@cache
def device_error(kind: str, *, other_vendor: bool) -> float:
    """Logarithm by which the time of device work of this kind (``compute``, ``memory``) may be off
    on another GPU: the largest error of the kind; of any, for kinds that nobody measured.

    Many layers on one pair of GPUs are one pair of GPUs, and so few of these allow nothing finer.
    They are of one vendor, which says little of another's kernels: there the spread is added of the
    efficiencies that kernels of one family reach on GPUs of both, in public traces.
    """
    of_work = {name: _gpu_errors(name) for name in ("compute", "memory")}
    within = max(of_work.get(kind) or [error for own in of_work.values() for error in own])
    return math.hypot(within, error_bound(_gpu_errors("vendor"))) if other_vendor else within


@cache
def host_error() -> float:
    """Logarithm by which the host time of one program differs between machines."""
    return error_bound(_gpu_errors("host"))


def count_comparisons() -> dict[str, int]:
    """How many comparisons of two GPUs these errors rest on: of the same work, of the efficiency of
    one family of kernels on two vendors, of one operator's time on two hosts."""
    work = {
        frozenset((row.program, row.device, row.target))
        for row in shipped_predictions()
        if row.source == "gpus" and row.kind in ("compute", "memory")
    }
    vendors, hosts = len(_gpu_errors("vendor")), len(_gpu_errors("host"))
    return {"crossings": len(work), "efficiencies": vendors, "hosts": hosts}


def _gpu_errors(kind: str) -> list[float]:
    return [row.error for row in shipped_predictions() if row.source == "gpus" and row.kind == kind]

"""The table of past predictions: what was predicted of a change, and what was measured. Their
errors say how wide an interval has to be.

``predictions.jsonl`` beside this file is ours, written by the benchmarks; a run keeps its own lines
in ``ledger.jsonl``, and the user's own file is written only where they agreed. JSON lines, appended
under a lock: lines of another schema, torn or damaged ones are skipped and counted. Holds no source
code and no names of programs, files or hosts of the user. Imports neither torch nor polars.

Errors are ratios of measured to predicted gains; where the batch grows, of the step, for the gain
is then near zero. An interval is such that four of five past errors would have been inside it, the
one to come counted in (split conformal: of n errors the one in place ⌈0.8 (n + 1)⌉ by size). Kinds
with too few of their own take all of them."""

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
"""Environment variable: the user's file, else ``~/.local/share/advisor/ledger.jsonl``."""
MAX_BYTES = 8 << 20
MIN_RATIO = 0.05
"""Least ratio of measured to predicted: it stands for fixes that gained nothing, or less."""
MAX_RATIO = 1e6
"""Largest ratio of a measurement; a line with a larger one is damaged."""
_RENAMED = {"of": "program", "knob": "knob"}
"""Names of fields in earlier versions, with their present names."""


class Prediction(Struct, kw_only=True, omit_defaults=True):
    """A predicted and a measured gain, in one unit."""

    schema: str = SCHEMA
    unix: int = 0
    """Time of the measurement, s since 1970."""
    source: Literal[
        "try", "compare", "workload", "pair", "experiment", "program", "job", "gpus", "mesh"
    ] = "try"
    """Source of the measurement. The user's: a trial, a comparison of two runs. Ours: a trial of a
    bundled workload, a public pair of traces, an experiment of docs/accuracy.md, a program of
    tests/corpus with and without its fault, a simulated job, the same work on two GPUs (or in
    traces of two), the same model on two meshes."""
    program: str = ""
    """Name of our workload, pair, experiment or program; empty: the user's."""
    group: str = ""
    """Program that several of our lines are of; empty: of no other line."""
    kind: str = ""
    """Kind of change, as in ``edit_kind`` or ``fault_kind``; empty: unknown."""
    change: str = ""
    rule: str = ""
    """Rule whose fix was tried; empty: the change was no finding's."""
    knob: str = ""
    """Knob with its setting; empty: changed by hand."""
    device: str = ""
    """Name of the GPU (or of the trace it is known by); empty: none."""
    target: str = ""
    """Name of the other GPU, where the same work was measured on two."""
    torch: str = ""
    unit: str = ""
    """Unit of the figures; empty: shares of the mean step (0 to 1)."""
    predicted: float = 0.0
    low: float = 0.0
    high: float = 0.0
    measured: float = 0.0
    measured_low: float = 0.0
    measured_high: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted gain, at least ``MIN_RATIO``; 1 where no gain was predicted."""
        return max(self.measured / self.predicted, MIN_RATIO) if self.predicted > 0 else 1.0

    @property
    def error(self) -> float:
        """Absolute logarithm of ``ratio``."""
        return abs(math.log(self.ratio))

    @property
    def inside(self) -> bool:
        """Whether the measured interval overlaps the predicted one."""
        return self.measured_low <= self.high and self.measured_high >= self.low


class PredictionTable(NamedTuple):
    """Predictions read from a file."""

    predictions: list[Prediction]
    skipped: int
    """Number of lines that could not be read."""


class RuleTrackRecord(NamedTuple):
    """Past accuracy of one rule's predictions."""

    trials: int
    inside: int
    low: float
    high: float
    """Largest ratio of measured to predicted; ``low`` is the smallest."""

    def __str__(self) -> str:
        cases = "case" if self.trials == 1 else "cases"
        low, high = f"{self.low:.0%}", f"{self.high:.0%}"
        share = high if low == high else f"{low[:-1]}–{high}"
        return f"in {self.trials} measured {cases} the real gain was {share} of the estimate"


# -- files --------------------------------------------------------------------------------------


def user_file() -> Path:
    """Return the path of the user's own file, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(base) / "advisor" / FILE


def append_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Append lines, all or none of them, under a lock. Raises AdvisorError."""
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
    """Hold the append lock. Where there is no such lock, an append of this size is whole."""
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


def read_predictions(path: Path) -> PredictionTable:
    """Read a file; empty where it does not exist. Raises AdvisorError if it cannot be read."""
    if not path.is_file():
        return PredictionTable([], 0)
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    return decode_predictions(data)


def decode_predictions(data: bytes) -> PredictionTable:
    """Decode the lines of a file, and count those that cannot be read."""
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
    return PredictionTable(rows, skipped)


# -- what is known ------------------------------------------------------------------------------

excluded_program: ContextVar[str] = ContextVar("excluded_program", default="")
"""Program whose own measurements the intervals leave out at present."""


@contextmanager
def without_program(program: str) -> Iterator[None]:
    """Leave a program's measurements, and those of its group (``Prediction.group``), out of the
    intervals. A prediction of it is then not compared with an interval that it widened itself."""
    group = next((row.group for row in shipped_predictions() if row.program == program), "")
    token = excluded_program.set(group or program)
    try:
        yield
    finally:
        excluded_program.reset(token)


@cache
def shipped_predictions() -> tuple[Prediction, ...]:
    """Return our predictions, as the benchmarks wrote them."""
    return tuple(decode_predictions(SHIPPED.read_bytes()).predictions)


def shipped_trials() -> tuple[Prediction, ...]:
    """Return our predictions in which a rule's fix was tried."""
    return tuple(row for row in shipped_predictions() if row.rule)


def all_trials() -> tuple[Prediction, ...]:
    """Return all trials of rules' fixes: ours and the user's."""
    return tuple(row for row in (*shipped_trials(), *_users()) if _counts(row))


def shipped_experiments() -> tuple[Prediction, ...]:
    """Return ours whose kind of change is known: public pairs, experiments and programs."""
    wanted = ("pair", "experiment", "program")
    return tuple(
        row for row in shipped_predictions() if row.source in wanted and row.kind and _counts(row)
    )


def _counts(row: Prediction) -> bool:
    return not excluded_program.get() or excluded_program.get() not in (row.program, row.group)


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


def records_by_rule(predictions: Iterable[Prediction]) -> dict[str, RuleTrackRecord]:
    """Return each rule's record, by rule in the order of their names."""
    by_rule: dict[str, list[Prediction]] = {}
    for row in predictions:
        if row.predicted > 0:
            by_rule.setdefault(row.rule, []).append(row)
    return {
        rule: RuleTrackRecord(
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
"""Coverage for simulated jobs: above ``COVERAGE``, since real jobs differ."""
MIN_ERRORS = round(COVERAGE / (1 - COVERAGE))
"""Minimum number of errors for that coverage: with fewer even the largest may be too small."""
OF_THE_STEP = ("batch",)
"""Kinds whose errors are of the step, not of the gain."""
MIN_SHARE = 0.01
"""Share of the step, each way, by which two runs of one program differ."""
OTHERS = "others"
"""Name for all kinds of fault together, used for those without a band."""


class GainInterval(NamedTuple):
    """Range of a gain, ns per step; of a job, measured over predicted."""

    low: float
    high: float


def error_bound(errors: Sequence[float]) -> float:
    """Return the error that the next one stays below with ``COVERAGE``, given past errors."""
    ordered = sorted(errors)
    place = math.ceil(COVERAGE * (len(ordered) + 1))
    return ordered[min(place, len(ordered)) - 1]


# -- by kind of edit ----------------------------------------------------------------------------


def edit_kind(edit: Edit) -> str:
    """Return the kind of change that an edit is, by which its errors are grouped."""
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
    """Return the error of predictions of these kinds, as a logarithm; the largest of them."""
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
) -> GainInterval:
    """Return a band (``low`` to ``high``, from the edits' assumptions) widened by past errors of
    these kinds. All ns per step."""
    kinds, known = {edit_kind(edit) for edit in edits}, shipped_experiments()
    floor = MIN_SHARE * step_ns
    of_step = kinds & set(OF_THE_STEP)
    if of_step:
        left = step_ns - gain
        floor += left * (math.exp(error_of(of_step, known)) - 1)
    factor = math.exp(error_of(kinds - of_step, known)) if kinds - of_step else 1.0
    ends = (gain * factor, gain / factor, gain - floor, gain + floor)
    return GainInterval(min(low, *ends), min(max(high, *ends), step_ns))


def worst_case(low: float, high: float, limit_ns: float) -> GainInterval:
    """Return a band widened by the largest past error, ns per step, up to ``limit_ns``, the most
    that the fix can save."""
    factor = math.exp(max(row.error for row in shipped_experiments()))
    return GainInterval(low / factor, max(high, min(high * factor, limit_ns)))


# -- by rule ------------------------------------------------------------------------------------


class WidenedRange(NamedTuple):
    """A band, and the record that it was widened by; empty: too little is known of the rule."""

    band: GainInterval
    note: str


def widened_by_rule(
    rule: str, device: str, gain: float, band: GainInterval, limit_ns: float
) -> WidenedRange:
    """Return a band, ns per step, widened by past errors of this rule's fixes: on the same hardware
    where there are enough, else on any. It never becomes narrower, and ends at ``limit_ns``, the
    most that the fix can save."""
    own = [row for row in all_trials() if row.rule == rule and row.predicted > 0]
    here = [row for row in own if row.device == device]
    used = here if len(here) >= MIN_ERRORS else own
    if len(used) < MIN_ERRORS:
        return WidenedRange(band, "")
    factor = math.exp(error_bound([row.error for row in used]))
    wide = GainInterval(min(band.low, gain / factor), max(band.high, min(gain * factor, limit_ns)))
    return WidenedRange(wide, str(records_by_rule(used)[rule]))


# -- jobs of many ranks -------------------------------------------------------------------------


def fault_kind(kind: str, *, moves: bool) -> str:
    """Return a fault's kind in the table (``imbalance that moves``: another rank each step)."""
    return f"{kind} that moves" if moves else kind


def job_band(kind: str) -> GainInterval:
    """Return measured over predicted gains of faults of a kind; of all, where too few are known.
    They are of simulated jobs that ran again without the fault. The band covers what the replay
    cannot know, such as what overlap hides and hosts that run ahead."""
    bands = job_bands()
    return bands.get(kind) or bands[OTHERS]


@cache
def job_bands() -> dict[str, GainInterval]:
    """Return job bands by kind: split conformal, equal tails, rounded outwards to hundredths."""
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
            bands[name] = GainInterval(math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
    return bands


# -- another mesh -------------------------------------------------------------------------------


@cache
def mesh_error(*, assumed: bool) -> float:
    """Return the error of the step on another device mesh, as a logarithm: that of simulated jobs.
    Where links or collectives there are ``assumed``, also that of published steps of one model on
    two unrecorded meshes."""
    kinds = ("simulated", "published") if assumed else ("simulated",)
    rows = [row for row in shipped_predictions() if row.source == "mesh"]
    return max(
        error_bound([row.error for row in rows if row.kind == kind] or [0.0]) for kind in kinds
    )


# -- another GPU --------------------------------------------------------------------------------


@cache
def device_error(kind: str, *, other_vendor: bool) -> float:
    """Return the error of device work's time on another GPU, as a logarithm. It is the largest of
    the kind (``compute``, ``memory``), or of any for kinds that nobody measured.

    Many layers on one pair of GPUs are one pair of GPUs, and so few of these allow nothing finer.
    They are of one vendor. For another vendor's kernels the spread is added of the efficiencies
    that kernels of one family reach on GPUs of both, in public traces."""
    of_work = {name: _gpu_errors(name) for name in ("compute", "memory")}
    within = max(of_work.get(kind) or [error for own in of_work.values() for error in own])
    return math.hypot(within, error_bound(_gpu_errors("vendor"))) if other_vendor else within


@cache
def host_error() -> float:
    """Return how much one program's host time differs between machines, as a logarithm."""
    return error_bound(_gpu_errors("host"))


def count_comparisons() -> dict[str, int]:
    """Count the comparisons of two GPUs behind these errors: of the same work, of one kernel
    family's efficiency on two vendors, of one operator's time on two hosts."""
    work = {
        frozenset((row.program, row.device, row.target))
        for row in shipped_predictions()
        if row.source == "gpus" and row.kind in ("compute", "memory")
    }
    vendors, hosts = len(_gpu_errors("vendor")), len(_gpu_errors("host"))
    return {"crossings": len(work), "efficiencies": vendors, "hosts": hosts}


def _gpu_errors(kind: str) -> list[float]:
    return [row.error for row in shipped_predictions() if row.source == "gpus" and row.kind == kind]

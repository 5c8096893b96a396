"""The ledger: the predicted and the measured gains of past changes. Their errors show how wide an
interval has to be.

``shipped_ledger.jsonl`` next to this file is ours, written by the benchmarks. A run keeps its own
lines in ``ledger.jsonl``, and the user's own file is written only with consent. The files
have JSON lines, appended under a lock; lines of another schema and incomplete or damaged lines are
skipped and counted. They contain no source code and no names of programs, files or hosts of the
user. This module imports neither torch nor polars.

Errors are ratios of measured to predicted gains or, if the batch grows, of steps, because the gain
is then near zero. An interval would have contained four of five errors, including the next one
(split conformal: the ⌈0.8 (n + 1)⌉-th of n errors by size). Kinds with too few errors use all
errors."""

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
SHIPPED = Path(__file__).with_name("shipped_ledger.jsonl")
VARIABLE = "ADVISOR_LEDGER"
"""Environment variable with the user's file, by default ``~/.local/share/advisor/ledger.jsonl``."""
MAX_LEDGER_BYTES = 8 << 20
MIN_RATIO = 0.05
"""Minimum ratio of measured to predicted, also for fixes that gained nothing, or less."""
MAX_RATIO = 1e6
"""Maximum ratio of a measurement; a line with a larger ratio is damaged."""
_FIELD_NAMES = {"of": "program"}
"""Names of fields in earlier versions, with their present names."""


class Prediction(Struct, kw_only=True, omit_defaults=True):
    """Predicted and measured gain, in one unit."""

    schema: str = SCHEMA
    unix: int = 0
    """Time of the measurement, s since 1970."""
    source: Literal[
        "try",
        "compare",
        "workload",
        "pair",
        "experiment",
        "program",
        "recording",
        "job",
        "gpus",
        "mesh",
    ] = "try"
    """Source of the measurement. From the user: a trial, a comparison of two runs. From us: a trial
    of a bundled workload, a public pair of traces, an experiment of docs/accuracy.md, a program of
    tests/corpus with and without its fault, a recording of a CPU program and its cure, a simulated
    job, the same work on two GPUs (or in traces of two), the same model on two meshes."""
    program: str = ""
    """Name of our workload, pair, experiment or program. Empty for the user's."""
    group: str = ""
    """Program that several of our lines share. Empty if no other line shares it."""
    kind: str = ""
    """Kind of change, as in ``edit_kind`` or ``fault_kind``. Empty if unknown."""
    change: str = ""
    rule: str = ""
    """Rule whose fix was tried. Empty if the change belongs to no finding."""
    knob: str = ""
    """Knob with its setting. Empty for a change by hand."""
    device: str = ""
    """Name of the GPU, or of its trace. Empty without a GPU."""
    target: str = ""
    """Name of the other GPU, if the same work was measured on two."""
    torch: str = ""
    unit: str = ""
    """Unit of the figures. Empty for shares of the mean step (0 to 1)."""
    predicted: float = 0.0
    low: float = 0.0
    high: float = 0.0
    measured: float = 0.0
    measured_low: float = 0.0
    measured_high: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted gain, at least ``MIN_RATIO``; 1 if no gain was predicted."""
        return max(self.measured / self.predicted, MIN_RATIO) if self.predicted > 0 else 1.0

    @property
    def error(self) -> float:
        """Absolute logarithm of ``ratio``."""
        return abs(math.log(self.ratio))

    @property
    def inside(self) -> bool:
        """Whether the measured interval overlaps the predicted one."""
        return self.measured_low <= self.high and self.measured_high >= self.low


class Ledger(NamedTuple):
    """Predictions of a ledger's file."""

    predictions: list[Prediction]
    skipped: int
    """Number of lines that could not be read."""


class RuleTrackRecord(NamedTuple):
    """Past accuracy of one rule's predictions."""

    predictions: int
    inside: int
    low: float
    high: float
    """Largest ratio of measured to predicted gain; ``low`` is the smallest."""

    def __str__(self) -> str:
        cases = "case" if self.predictions == 1 else "cases"
        low, high = f"{self.low:.0%}", f"{self.high:.0%}"
        share = high if low == high else f"{low[:-1]}–{high}"
        return f"in {self.predictions} measured {cases} the real gain was {share} of the estimate"


# -- files --------------------------------------------------------------------------------------


def user_file() -> Path:
    """Return the path of the user's own file, whether it exists or not."""
    path = os.environ.get(VARIABLE)
    if path:
        return Path(path)
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111
    return Path(base) / "advisor" / FILE


def append_to_ledger(path: Path, predictions: Iterable[Prediction]) -> None:
    """Append lines, all or none of them, under a lock. Raises AdvisorError if it cannot."""
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in predictions)
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with _lock(descriptor):
                os.write(descriptor, lines)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be written ({error.strerror or error})") from None


@contextmanager
def _lock(descriptor: int) -> Iterator[None]:
    """Hold the append lock. Without lock support, an append of this size is atomic."""
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


def read_ledger(path: Path) -> Ledger:
    """Read a file; empty if it does not exist. Raises AdvisorError if it cannot be read."""
    if not path.is_file():
        return Ledger([], 0)
    try:
        data = read_regular(path, MAX_LEDGER_BYTES)
    except OSError as error:
        raise AdvisorError(f"{path}: cannot be read ({error.strerror or error})") from None
    return decode_ledger(data)


def decode_ledger(data: bytes) -> Ledger:
    """Decode the lines of a file, and count lines that cannot be read."""
    rows, skipped = [], 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            fields = {_FIELD_NAMES.get(name, name): value for name, value in fields.items()}
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
    return Ledger(rows, skipped)


# -- what is known ------------------------------------------------------------------------------

excluded_program: ContextVar[str] = ContextVar("excluded_program", default="")
"""Program whose own measurements the intervals exclude at present."""


@contextmanager
def without_program(program: str) -> Iterator[None]:
    """Exclude a program's and its group's (``Prediction.group``) measurements from the intervals.
    Then no prediction of it is compared with an interval that it widened itself."""
    group = next((row.group for row in shipped_predictions() if row.program == program), "")
    token = excluded_program.set(group or program)
    try:
        yield
    finally:
        excluded_program.reset(token)


@cache
def shipped_predictions() -> tuple[Prediction, ...]:
    """Return our predictions, as the benchmarks wrote them."""
    return tuple(decode_ledger(SHIPPED.read_bytes()).predictions)


def shipped_rule_predictions() -> tuple[Prediction, ...]:
    """Return our predictions in which a rule's fix was tried."""
    return tuple(row for row in shipped_predictions() if row.rule)


def rule_predictions() -> tuple[Prediction, ...]:
    """Return all predictions of rules' fixes: ours and the user's."""
    return tuple(
        row for row in (*shipped_rule_predictions(), *_read_user_predictions()) if _is_kept(row)
    )


def shipped_experiments() -> tuple[Prediction, ...]:
    """Return our predictions with a known kind of change: public pairs, experiments and
    programs."""
    wanted = ("pair", "experiment", "program")
    return tuple(
        row for row in shipped_predictions() if row.source in wanted and row.kind and _is_kept(row)
    )


def shipped_recordings() -> tuple[Prediction, ...]:
    """Return our predictions for recorded CPU programs, whose cures were recorded too."""
    return tuple(
        row for row in shipped_predictions() if row.source == "recording" and _is_kept(row)
    )


def _is_kept(row: Prediction) -> bool:
    return not excluded_program.get() or excluded_program.get() not in (row.program, row.group)


def _read_user_predictions() -> tuple[Prediction, ...]:
    path = user_file()
    try:
        state = path.stat()
    except OSError:
        return ()
    return _read_once(path, state.st_mtime_ns, state.st_size)


@cache
def _read_once(path: Path, _changed: int, _size: int) -> tuple[Prediction, ...]:
    try:
        return tuple(read_ledger(path).predictions)
    except AdvisorError:  # too large or unreadable: treated as absent
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
"""Share of the measured gains that an interval should contain."""
JOB_COVERAGE = 0.85
"""Coverage for simulated jobs: above ``COVERAGE``, since real jobs differ."""
MIN_ERRORS = round(COVERAGE / (1 - COVERAGE))
"""Minimum number of errors for ``COVERAGE``: with fewer, even the largest may be too small."""
OF_THE_STEP = ("batch",)
"""Kinds whose errors are of the step, not of the gain."""
_RUN_VARIATION_SHARE = 0.01
"""Share of the step, in both directions, by which two runs of one program differ."""
OTHERS = "others"
"""Name for all kinds of fault together, used for those without a range."""


class GainInterval(NamedTuple):
    """Range of a gain, ns per step or, for a job, measured over predicted."""

    low: float
    high: float


def error_bound(errors: Sequence[float]) -> float:
    """Return the bound of the next error with ``COVERAGE``, given past errors."""
    ordered = sorted(errors)
    rank_of_bound = math.ceil(COVERAGE * (len(ordered) + 1))
    return ordered[min(rank_of_bound, len(ordered)) - 1]


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


def error_of(kinds: Iterable[str], past: Sequence[Prediction]) -> float:
    """Return the largest error of predictions of these kinds, as a logarithm."""
    general = [row.error for row in past if row.kind not in OF_THE_STEP]
    bounds = []
    for name in set(kinds):
        errors = [row.error for row in past if row.kind == name]
        # errors of gains say little about errors of the step: if only they are known, take the
        # worst
        fallback = max(general) if name in OF_THE_STEP else error_bound(general)
        bounds.append(error_bound(errors) if len(errors) >= MIN_ERRORS else fallback)
    return max(bounds, default=error_bound(general))


OF_COMPUTATION = frozenset(("host", "device"))
"""Kinds of change to a CPU program's own work, whose errors are those of recorded CPU programs."""


def widened_by_kind(
    gain: float,
    low: float,
    high: float,
    edits: Sequence[Edit],
    step_ns: float,
    *,
    on_cpu: bool = False,
) -> GainInterval:
    """Return a range (``low`` to ``high``, from the edits' assumptions) widened by past errors of
    these kinds. All ns per step. ``on_cpu``: the program uses no device."""
    kinds, past = {edit_kind(edit) for edit in edits}, shipped_experiments()
    if on_cpu and kinds <= OF_COMPUTATION:
        past = shipped_recordings() or past
    floor = _RUN_VARIATION_SHARE * step_ns
    of_step = kinds & set(OF_THE_STEP)
    if of_step:
        remaining_ns = step_ns - gain
        floor += remaining_ns * (math.exp(error_of(of_step, past)) - 1)
    factor = math.exp(error_of(kinds - of_step, past)) if kinds - of_step else 1.0
    ends = (gain * factor, gain / factor, gain - floor, gain + floor)
    return GainInterval(min(low, *ends), min(max(high, *ends), step_ns))


def worst_case(low: float, high: float, limit_ns: float) -> GainInterval:
    """Return a range widened by the largest past error, ns per step, up to ``limit_ns``, the
    maximum that the fix can save."""
    factor = math.exp(max(row.error for row in shipped_experiments()))
    return GainInterval(low / factor, max(high, min(high * factor, limit_ns)))


# -- by rule ------------------------------------------------------------------------------------


class WidenedRange(NamedTuple):
    """Range, and the record that widened it. Empty if too little is known of the rule."""

    interval: GainInterval
    note: str


def widened_by_rule(
    rule: str, device: str, gain: float, interval: GainInterval, limit_ns: float
) -> WidenedRange:
    """Return a range, ns per step, widened by past errors of this rule's fixes: on the same
    hardware if there are enough, else on any. It never becomes narrower, and ends at ``limit_ns``,
    the maximum that the fix can save."""
    of_rule = [row for row in rule_predictions() if row.rule == rule and row.predicted > 0]
    on_device = [row for row in of_rule if row.device == device]
    used = on_device if len(on_device) >= MIN_ERRORS else of_rule
    if len(used) < MIN_ERRORS:
        return WidenedRange(interval, "")
    factor = math.exp(error_bound([row.error for row in used]))
    wide = GainInterval(
        min(interval.low, gain / factor), max(interval.high, min(gain * factor, limit_ns))
    )
    return WidenedRange(wide, str(records_by_rule(used)[rule]))


# -- jobs of many ranks -------------------------------------------------------------------------


def fault_kind(kind: str, *, moves: bool) -> str:
    """Return a fault's kind in the table (``imbalance that moves``: another rank each step)."""
    return f"{kind} that moves" if moves else kind


def job_range(kind: str) -> GainInterval:
    """Return measured over predicted gains of faults of a kind, or of all kinds if there are too
    few. They come from simulated jobs that ran again without the fault. The range covers what the
    replay cannot know, such as hiding by overlap and hosts that run ahead."""
    ranges = job_ranges()
    return ranges.get(kind) or ranges[OTHERS]


@cache
def job_ranges() -> dict[str, GainInterval]:
    """Return job ranges by kind: split conformal, equal tails, rounded outwards to hundredths."""
    ratios: dict[str, list[float]] = {}
    for row in shipped_predictions():
        if row.source == "job":
            for name in (row.kind, OTHERS):
                ratios.setdefault(name, []).append(row.measured / row.predicted)
    ranges = {}
    for name, values in ratios.items():
        outside = math.floor((1 - JOB_COVERAGE) / 2 * (len(values) + 1))
        if outside:
            values.sort()
            low, high = values[outside - 1], values[-outside]
            ranges[name] = GainInterval(math.floor(low * 100) / 100, math.ceil(high * 100) / 100)
    return ranges


# -- another mesh -------------------------------------------------------------------------------


@cache
def mesh_error(*, assumed: bool) -> float:
    """Return the error of the step on another device mesh, as a logarithm: the error of simulated
    jobs. If links or collectives there are ``assumed``, also the error of published steps of one
    model on two unrecorded meshes."""
    kinds = ("simulated", "published") if assumed else ("simulated",)
    rows = [row for row in shipped_predictions() if row.source == "mesh"]
    return max(
        error_bound([row.error for row in rows if row.kind == kind] or [0.0]) for kind in kinds
    )


# -- another GPU --------------------------------------------------------------------------------


@cache
def device_error(kind: str, *, other_vendor: bool) -> float:
    """Return the error of device work's time on another GPU, as a logarithm. It is the largest
    error of the kind (``compute``, ``memory``), or of any kind if none was measured.

    Many layers on one pair of GPUs count as one pair, and there are too few pairs for anything
    finer. The pairs have one vendor. For another vendor's kernels, the spread of the efficiencies
    is added that kernels of one family reach on GPUs of both vendors, in public traces."""
    of_work = {name: _gpu_errors(name) for name in ("compute", "memory")}
    within = max(of_work.get(kind) or [error for errors in of_work.values() for error in errors])
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

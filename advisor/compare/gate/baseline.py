"""What is kept of a run to hold later ones against: its steps and figures, as a small JSON."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

import advisor
from advisor.advise.words import mark_steps
from advisor.compare.compare import side
from advisor.compare.dependent import MINIMUM
from advisor.compare.findings import place
from advisor.compare.steps import (
    profiled,
    profiled_numbers,
    unprofiled,
    unprofiled_numbers,
)
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.run_directory import LARGEST

if TYPE_CHECKING:
    from advisor.advise.engine import Examined
    from advisor.measure import Analysis
from advisor.core.saved import decoded

SCHEMA = "advisor.baseline/1"
MAX_STEPS = 5000
"""Steps that are kept, the last ones: neighbours stay neighbours."""
MAX_FINDINGS = 100
MAX_BYTES = 4 << 20
"""Of a file. One has some 100 KB at most."""


class Known(Struct, kw_only=True, frozen=True):
    """A finding of the run."""

    rule: str
    """Identifier of the rule."""
    title: str
    """What is wrong."""
    place: str
    """Where; empty: not told."""


class Baseline(Struct, kw_only=True):
    """A run as far as a gate needs it. ``to_json`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Of advisor."""
    path: str = ""
    """Of the run: its name, without the folders it was in."""
    rank: int | None = None
    """The rank that is measured; ``null``: not told."""
    ranks: int = 1
    """How many there were."""
    device_name: str | None = None
    """GPU; ``null``: not told, or no device work."""
    samples: int | None = None
    """Batch size in most steps; ``null``: not recorded."""
    source: str
    """``recorder``: unprofiled steps. ``trace``: the profiled ones, which the profiler slowed."""
    step_source: str = ""
    """What a step was taken to be, as ``scope.step_source`` of a report; empty: not told."""
    numbers: list[int] = field(default_factory=list)
    """Of the steps, ascending; where they are not numbered, their places in the recording."""
    durations_ns: list[int]
    """Of the steps, ns, in order of time; at most 5,000, the last ones."""
    memory_peak_bytes: int | None = None
    """Most device memory the allocator reserved; ``null``: not measured."""
    joules: float | None = None
    """Energy a step, J; ``null``: not measured."""
    per_hour: float | None = None
    """What an hour of all GPUs cost when it was kept; ``null``: not told."""
    currency: str = ""
    """Of that."""
    findings: list[Known] = field(default_factory=list)
    """That were worth telling, those worth most first; at most 100."""

    @property
    def durations(self) -> NDArray[np.float64]:
        """The durations as a column, ns."""
        return np.array(self.durations_ns, dtype=np.float64)

    def to_json(self) -> bytes:
        """The JSON text, on one line for each field."""
        lines = (
            b"  %b: %b" % (msgspec.json.encode(name), msgspec.json.encode(getattr(self, name)))
            for name in self.__struct_fields__
        )
        return b"{\n" + b",\n".join(lines) + b"\n}\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> Baseline:
        """Read what :meth:`to_json` wrote. Raises AdvisorError for anything else."""
        found = decoded(text, cls, "baseline", SCHEMA, MAX_BYTES)
        if not all(0 <= ns < LARGEST for ns in found.durations_ns):
            raise AdvisorError("not a baseline: a step's duration is not a time")
        if len(found.numbers) != len(found.durations_ns):
            raise AdvisorError("not a baseline: its steps and their numbers are not as many")
        return found


def baseline_of(examined: Examined) -> Baseline:
    """What to keep of a run that was analysed; of several ranks, of the reported one.

    Raises AdvisorError: fewer than five steps are measured.
    """
    a, report = examined.main, examined.report
    about = side(examined)
    numbers, durations, source = _steps(a)
    if len(durations) < MINIMUM:
        unmarked = a.steps.source == "whole trace" and a.record is None
        why = (
            f"no steps are marked; {mark_steps(a.trace.meta)}"
            if unmarked
            else f"{t.count_noun(len(durations), 'step')} cannot tell slower from noise; record at "
            f"least {MINIMUM}"
        )
        raise AdvisorError(f"{about.path}: {why}")
    paid = report.cost
    told = [f for f in report.findings if f.folded_under is None]
    return Baseline(
        version=advisor.__version__,
        path=PurePath(about.path).name,
        rank=about.rank,
        ranks=about.ranks,
        device_name=about.device_name,
        samples=about.samples,
        source=source,
        step_source=report.scope.step_source,
        numbers=numbers[-MAX_STEPS:],
        durations_ns=[int(ns) for ns in durations[-MAX_STEPS:]],
        memory_peak_bytes=report.memory_peak_bytes,
        joules=None if report.energy is None else report.energy.joules,
        per_hour=None if paid is None else paid.per_hour * paid.gpus,
        currency="" if paid is None else paid.currency,
        findings=[Known(rule=f.rule, title=f.title, place=place(f)) for f in told[:MAX_FINDINGS]],
    )


def _steps(a: Analysis) -> tuple[list[int], NDArray[np.float64], str]:
    """(numbers, durations in ns, source): the recorder's unprofiled steps, else the profiled."""
    if a.recorded is not None:
        durations = unprofiled(a.record)
        if len(durations) >= MINIMUM or a.record_only:
            return unprofiled_numbers(a.record), durations, "recorder"
    return profiled_numbers(a), profiled(a), "trace"

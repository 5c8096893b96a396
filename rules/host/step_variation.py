"""Steps that take much longer than the others, from the recorded step times.

The rules of this family differ in whether the long steps come at regular distances."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, SkippedCheck
from advisor.core.intervals import Floats, Ints
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.run_directory import HostSample
from advisor.measure import Analysis
from advisor.measure.steps.periodic import LOOP_PHASES, find_periodic_work
from advisor.measure.steps.run_steps import RunSteps
from advisor.measure.steps.steps import longest_usual_step
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, GPUPROF, STEP_SERIES
from advisor.rules.support.common import (
    COMPILING,
    MOSTLY_COMPILING,
    impact_over_run,
    run_steps_of,
    steps_seen,
    time_compiling,
)
from advisor.testing import Examples, TraceBuilder

MIN_PERIOD = 5
"""Minimum period in steps. A loader with a few workers has a shorter period of its own."""
MIN_LONG_STEPS = 4
"""Minimum number of long steps for a period."""
MIN_REGULAR = 0.8
"""Minimum share of the distances that are equal, within one step."""


class LongSteps(NamedTuple):
    """Long steps among the timed ones."""

    rows: Ints
    """Positions among all steps of the record."""
    excess: Floats
    """Time of each step beyond the median, ns, including validation and checkpoints between
    steps."""
    period: int | None
    """Number of steps from one long step to the next, or ``None`` if irregular."""


def find_long_steps(run_steps: RunSteps) -> LongSteps:
    """Return the long steps of a record. Validation between two steps counts toward the later
    step."""
    steps, dur = np.flatnonzero(run_steps.timed), run_steps.timed_durations
    if not len(steps):
        return LongSteps(steps, np.zeros(0), None)
    median = float(np.median(dur))
    is_long = dur > longest_usual_step(dur)
    rows = steps[is_long]
    partly_timed = run_steps.host_is_ahead  # only some steps are timed: others may be long
    return LongSteps(rows, dur[is_long] - median, None if partly_timed else _find_period(rows))


def _find_period(rows: Ints) -> int | None:
    if len(rows) < MIN_LONG_STEPS:
        return None
    gaps = np.diff(rows)
    usual = int(np.median(gaps))
    regular = float(np.mean(np.abs(gaps - usual) <= 1))
    return usual if usual >= MIN_PERIOD and regular >= MIN_REGULAR else None


def find_causes(run_steps: RunSteps, long_steps: LongSteps) -> list[tuple[str, float]]:
    """Return phases that take longer than usual in the long steps: (phase, ns over all of them),
    largest first. Garbage collection is listed too, and also stays in its phase."""
    causes = []
    for name, values in run_steps.phases.items():
        usual = float(np.median(values[run_steps.used]))
        excess = float(np.maximum(0.0, values[long_steps.rows] - usual).sum())
        causes.append((name, excess))
    pause = float(run_steps.column("gc")[long_steps.rows].sum())
    if pause > 0:
        causes.append(("garbage collection", pause))
    return sorted(causes, key=lambda item: -item[1])


def _describe_compiling(run_steps: RunSteps, lost: float) -> str:
    """Return a sentence if compiling explains the time lost in long steps. Empty if it does not, or
    without samples."""
    spent = time_compiling(run_steps)
    if not lost or spent < MOSTLY_COMPILING * lost:
        return ""
    return f"The sampled stacks show {t.format_duration(spent)} of compiling after the warm-up. "


def _list_causes(causes: list[tuple[str, float]]) -> str:
    """Return ``other 3 ms, 1 ms in garbage collection``. Collection is part of the phases."""
    collected = {"garbage collection": "{1} in {0}"}
    return ", ".join(
        collected.get(name, "{0} {1}").format(t.host_label(name), t.format_duration(ns))
        for name, ns in causes[:3]
        if ns > 0
    )


class RegularStalls(Rule):
    """Every n-th step takes much longer than the others, over the whole run. The loop does
    something every n steps, such as logging, a checkpoint, clearing a cache, or garbage collection.

    A long step takes more than 1.5 times the median, and exceeds it by more than five median
    absolute deviations. There must be at least four, at equal distances of five or more steps. The
    phase that is longer in them shows where to look: ``other`` is the loop's own code after the
    optimizer step, ``data`` the loader. Validation loops and checkpoints that the recorder
    recognized are not part of a step and do not count. In inference, a longer forward may be the
    first pass of a new request, and is left out.

    From the stacks of a profiled window, periodic-stalls names what is saved or logged. This rule
    needs no window, but does not see the cause. If the loop's own code takes the time (``other`` or
    ``between steps``), periodic-work reports it."""

    id = "regular-stalls"
    title = "Every n-th step stalls"
    host_check = "slow steps"
    reads_record = True
    silent_in = CURED_RECORDINGS
    sources = (STEP_SERIES,)
    references = ("https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",)

    min_steps = Threshold(40, "steps", CHOSEN)
    min_share = Threshold(0.02, "of the steps' time", CHOSEN)

    verify = "Record again: no step stands out."
    falsified_by = "long steps at irregular distances in a longer run"
    confidence = 0.85

    fix = (
        "Find what the loop does every {every} steps: logging, saving, empty_cache, garbage "
        "collection. Do it less often, from another thread, or without waiting for the GPU."
    )
    cases = {
        "while data is fetched": {
            "fix": "Find what the loop does every {every} steps while it fetches data: it may open "
            "a shard or shuffle a buffer."
        },
        "compiling": COMPILING,
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if run_steps.count < self.min_steps or not run_steps.median:
            return
        stalls = find_long_steps(run_steps)
        total = float(run_steps.timed_durations.sum())
        lost = float(stalls.excess.sum())
        if stalls.period is None or lost < self.min_share * total:
            return
        causes = find_causes(run_steps, stalls)
        phase = causes[0][0] if causes else "other"
        compiling = _describe_compiling(run_steps, lost)
        if phase == "forward" and a.inference is not None:
            return
        if phase in LOOP_PHASES and not compiling and find_periodic_work(run_steps) is not None:
            return
        case = "compiling" if compiling else "while data is fetched" if phase == "data" else ""
        texts = {"fix": self.fix, **(self.case(case) if case else {})}
        texts["fix"] = texts["fix"].format(every=stalls.period)
        yield Finding(
            title=f"Every {stalls.period}th step stalls",
            summary=(
                f"{t.count_noun(len(stalls.rows), 'step')}, {stalls.period} steps apart, take "
                f"{t.format_duration(float(stalls.excess.mean()))} more than the median of "
                f"{t.format_duration(run_steps.median)}. They lose {t.format_duration(lost)} of "
                f"the run ({lost / total:.1%}). {compiling}Longer phases: {_list_causes(causes)}."
            ),
            evidence=[
                Evidence("time in stalls", lost, "ns"),
                self.compare("share of the steps' time", lost / total, "min_share"),
                Evidence("stalled steps", len(stalls.rows), "count", MIN_LONG_STEPS),
                Evidence("steps between two stalls", stalls.period, "count"),
                Evidence("longest phase in the stalled steps", phase),
                steps_seen(run_steps),
            ],
            impact=impact_over_run(lost, method="time of the stalled steps beyond the median"),
            **texts,
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "every 20 steps": _build_stalls(20, "forward"),
            "the loop's own code": (
                _build_stalls(20, "other"),
                "find_periodic_work(run_steps) is not None",
            ),
            "every 25 steps": _build_stalls(25, "data"),
            "irregular": (
                _build_stalls(0, "other", at=(12, 31, 90, 130, 190)),
                "stalls.period is None",
            ),
            "a new request every 20 tokens": (
                _build_stalls(20, "forward", inference=True),
                "a.inference is not None",
            ),
            "twice": (_build_stalls(0, "other", at=(50, 100)), "stalls.period is None"),
            "every second batch, from two workers": (
                _build_stalls(2, "data"),
                "stalls.period is None",
            ),
        }


class StepJitter(Rule):
    """Some steps take at least twice as long as the median, at irregular distances, so that the
    mean step is well above the median. In a job of several ranks every rank waits for the slowest
    of each step, so the jitter of one costs all.

    If steps suddenly become at least twice as long and stay so, the rule names the first of them.

    Jitter is reported where the 99th percentile is at least twice the median (gpuprof) and steps
    beyond that lose 3% of the time. It needs a hundred steps or more. If other programs use a
    quarter of the machine's CPUs, overall or during the long steps, they are the more likely cause.
    The rule then abstains. Steps with an unusual batch shape are compared with each other, because
    sequences of different lengths are not jitter. The summary names the phase that is longer in the
    long steps, and garbage collection in it."""

    id = "step-jitter"
    title = "Some steps take much longer than most"
    host_check = "slow steps"
    reads_record = True
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/worker_respawn.cured",
    )
    references = ("https://www.usenix.org/conference/osdi25/presentation/lin-jinkun",)

    min_steps = Threshold(100, "steps that count", CHOSEN)
    min_ratio = Threshold(2.0, "99th percentile over median", GPUPROF)
    min_excess = Threshold(0.03, "of the time, lost in steps beyond that ratio", CHOSEN)
    max_others = Threshold(
        0.25, "of the machine's CPUs; above it, other programs are the more likely cause", CHOSEN
    )

    fix = (
        "Record again on an idle machine, as another program lengthens all phases. If one phase "
        "alone is longer again, advisor record --deep samples its Python code."
    )
    cases = {
        "compiling": COMPILING,
        "may compile": {
            "fix": f"{fix} A longer 'forward' with new shapes is recompilation or autotuning."
        },
        "data": {"fix": "Look for a slow sample or a full disk: the phase 'data' is the loader."},
        "between steps": {
            "fix": "Check the loop's own code, or a wait for a batch that does not come from a "
            "DataLoader: both are in the phase 'between steps'."
        },
        "garbage collection": {"fix": "Move garbage collection to fixed steps."},
        "slower from one step on": {
            "fix": "Look for what began at that step: another program on the machine, swapping, a "
            "full disk, a throttled CPU or GPU. The machine lengthens all phases, the program one.",
            "verify": "Record again: late steps take as long as early ones.",
        },
    }
    verify = "Record again: the 99th percentile comes closer to the median."
    falsified_by = "a longer run with steps of equal length"
    confidence = 0.6

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if not run_steps.median:
            return
        timed, dur = run_steps.timed, run_steps.timed_durations
        expected = _expected_durations(
            dur, run_steps.column("shapes")[timed], run_steps.column("samples")[timed]
        )
        if (first := find_jump(dur / expected, self.min_ratio)) is not None:
            yield self._build_slower_finding(run_steps, first)
            return
        if run_steps.count < self.min_steps:
            return
        ratio = float(np.quantile(dur / expected, 0.99))
        is_long = dur > self.min_ratio * expected
        lost = float((dur - expected)[is_long].sum())
        excess = lost / float(dur.sum())
        stalls = find_long_steps(run_steps)
        if ratio < self.min_ratio or excess < self.min_excess or stalls.period is not None:
            return
        if len(stalls.rows) < 2 or find_periodic_work(run_steps) is not None:
            return  # a single long step may be coincidence
        causes = [(name, ns) for name, ns in find_causes(run_steps, stalls)[:3] if ns > 0]
        others = _cpu_share_of_others(run_steps, stalls.rows)
        if others is not None and others >= self.max_others:
            yield SkippedCheck(
                what="whether the program itself makes its steps uneven",
                missing="other load on the CPUs",
                why=f"other programs used {others:.0%} of the CPUs in these steps",
                record="a run on a machine without other load",
            )
            return
        compiling = _describe_compiling(run_steps, lost)
        is_eager = a.trains_on_host and run_steps.flag("compile") == 0
        case = "compiling" if compiling else "" if is_eager else "may compile"
        in_phase = f", in {t.host_label(causes[0][0])}" if causes else ""
        yield Finding(
            title=f"{is_long.sum()} of {len(dur):,} steps take more than twice the usual time"
            f"{in_phase}",
            summary=(
                f"These steps lose {t.format_duration(lost)} together. The median step takes "
                f"{t.format_duration(run_steps.median)}, the longest "
                f"{t.format_duration(dur.max())}. {compiling}"
                f"Longer phases: {_list_causes(causes) or 'not recorded'}. The longest: "
                f"{_list_longest(run_steps, stalls)}."
            ),
            evidence=[
                self.compare("99th percentile over the usual step", ratio, "min_ratio", ""),
                self.compare("time lost in long steps, share of all time", excess, "min_excess"),
                Evidence("long steps", len(stalls.rows), "count"),
                Evidence("longest phase in the long steps", causes[0][0] if causes else None),
                self.compare("CPUs used by other programs", others, "max_others"),
                steps_seen(run_steps),
            ],
            impact=impact_over_run(lost, method="time of the long steps beyond the usual step"),
            **self._advice(case, [name for name, _ in causes]),
        )

    def _build_slower_finding(self, run_steps: RunSteps, first: int) -> Finding:
        """Return the finding on steps that are longer from one step on."""
        steps, dur = np.flatnonzero(run_steps.timed), run_steps.timed_durations
        before, after = (float(np.median(part)) for part in (dur[:first], dur[first:]))
        late_steps = LongSteps(steps[first:], np.maximum(dur[first:] - before, 0.0), None)
        number, factor = run_steps.steps[steps[first]].n, f"{after / before:.2g}"
        lost = float(late_steps.excess.sum())
        return Finding(
            title=f"From step {number} on, steps take {factor} times as long",
            summary=(
                f"The median grows from {t.format_duration(before)} to {t.format_duration(after)} "
                f"at once, and {t.count_noun(len(late_steps.rows), 'step')} lose "
                f"{t.format_duration(lost)} together. Longer phases: "
                f"{_list_causes(find_causes(run_steps, late_steps)) or 'not recorded'}."
            ),
            evidence=[
                self.compare(
                    "median of late steps over that of early ones", after / before, "min_ratio", ""
                ),
                Evidence("long steps", len(late_steps.rows), "count"),
                steps_seen(run_steps),
            ],
            impact=impact_over_run(lost, method="time of the late steps beyond the early median"),
            **self.case("slower from one step on"),
        )

    def _advice(self, case: str, causes: Sequence[str]) -> dict[str, Any]:
        """Return the advice of the case, and that for the longer phases."""
        advice = dict(self.case(case)) if case else {"fix": self.fix}
        if case != "compiling":
            phase_fixes = [self.case(name)["fix"] for name in causes if name in self.cases]
            advice["fix"] = " ".join([advice["fix"], *phase_fixes])
        return advice

    @staticmethod
    def examples() -> Examples:
        return {
            "irregular long steps": _build_jitter(lambda n: 50 if n in _LONG else 10),
            "slower from one step on": _build_jitter(lambda n: 20 if n < 31 else 180, steps=60),
            "steps that compile": _build_jitter(lambda n: 50 if n in _LONG else 10, compiles=True),
            "even steps": (_build_jitter(lambda n: 10 + n % 3), "ratio < self.min_ratio"),
            "at regular distances": (
                _build_jitter(lambda n: 60 if n % 20 == 19 else 10),
                "stalls.period is not None",
            ),
            "batches of another shape": (
                _build_jitter(lambda n: 50 if n in _LONG else 10, shapes=True),
                "ratio < self.min_ratio",
            ),
            "one step": (
                _build_jitter(lambda n: 500 if n == 150 else 10),
                "ratio < self.min_ratio",
            ),
            "a crowded machine": (
                _build_jitter(lambda n: 50 if n in _LONG else 10, machine=99),
                "max_others",
            ),
            "a short run": (
                _build_jitter(lambda n: 50 if n in _LONG else 10, steps=80),
                "min_steps",
            ),
        }


MIN_SIDE = 5
"""Minimum number of steps on either side of a jump."""


def find_jump(ratio: Floats, times: float) -> int | None:
    """Return the first step from which on steps suddenly take ``times`` as long, and stay so.
    ``ratio`` is each duration over the usual one for its batch shape."""
    for first in range(MIN_SIDE, len(ratio) - MIN_SIDE + 1):
        before, after = ratio[:first], ratio[first:]
        if min(after[0], np.median(after[:MIN_SIDE])) < times * before[-MIN_SIDE:].max():
            continue
        stays = np.quantile(after, 0.1) > np.quantile(before, 0.9)
        if stays and np.median(after) >= times * np.median(before):
            return first
    return None


def _list_longest(run_steps: RunSteps, long_steps: LongSteps) -> str:
    """Return the numbers of the longest steps: ``steps 44, 31 and 90``."""
    rows = long_steps.rows[np.argsort(-long_steps.excess)][:3]
    named = t.list_names(str(run_steps.steps[row].n) for row in rows)
    return f"{'step' if len(rows) == 1 else 'steps'} {named}"


def _build_stalls(
    every: int, phase: str, *, at: tuple[int, ...] = (), inference: bool = False
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in b.steps(4 if inference else 0):
        with b.python("nn.Module: Decoder_0"):
            b.product(9000, wait=True)
    r = b.record_of_run()
    for n in range(200):
        is_slow = n in at or (every and n % every == every - 1)
        ms = 60.0 if is_slow else 10.0
        phases: dict[str, Any] = {"forward": 5.0} | ({phase: ms - 5} if phase != "other" else {})
        r.step(ms, **phases)
    return b


_LONG = {31, 44, 45, 77, 90, 121, 150, 171, 190, 223}


def _cpu_share_of_others(run_steps: RunSteps, rows: Ints) -> float | None:
    """Return the share of the machine's CPUs that other programs use, in the run or during these
    steps, whichever is larger. ``None`` if not recorded. A sample covers the time before it."""
    total = run_steps.rank_record.rank.cpus_total
    loads = [
        (at, max(0.0, (host.cpu - host.process_cpu / total) / 100))
        for at, host in run_steps.hosts
        if total and host.cpu is not None and host.process_cpu is not None
    ]
    if len(loads) < 3:
        return None
    at, others = (np.array([load[0] for load in loads]), np.array([load[1] for load in loads]))
    start = np.array([run_steps.steps[row].t for row in rows])
    end = start + run_steps.dur[rows]
    during_steps = ((at[:, None] > start) & (np.roll(at, 1)[:, None] < end)).any(axis=1)
    share_during_steps = float(others[during_steps].mean()) if during_steps.sum() >= 3 else 0.0
    return max(float(others.mean()), share_during_steps)


def _expected_durations(dur: Floats, shapes: Floats, samples: Floats) -> Floats:
    """Return the usual length of each step: the median of steps with the same batch shape if there
    are at least five, or else of all steps."""
    expected = np.full(len(dur), float(np.median(dur)))
    kind = np.where(np.isnan(shapes), samples, shapes)
    for value in np.unique(kind[~np.isnan(kind)]):
        same = kind == value
        if same.sum() >= 5:
            expected[same] = float(np.median(dur[same]))
    floor: Floats = np.maximum(expected, 1.0)
    return floor


def _build_jitter(
    ms: object,
    *,
    shapes: bool = False,
    steps: int = 300,
    machine: float = 20,
    compiles: bool = False,
) -> TraceBuilder:
    assert callable(ms)
    b = TraceBuilder()
    r = b.record_of_run(cpus_total=8)
    for n in range(steps):
        length = float(ms(n))
        fields = {"shapes": int(length > 20)} if shapes else {}
        r.step(length, forward=5, fields=fields)
        if compiles and n in (20, steps - 1):  # the second stretch compiles in a quarter of it
            frames = ["train.py(9): main", "torch/_dynamo/convert_frame.py(900): _compile"]
            r.event("stacks", frames=frames, stacks=[[75, [0]], [25, [0, 1]]])
    r.watch(host=HostSample(cpu=machine, process_cpu=100))
    return b

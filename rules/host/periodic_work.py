"""Work that the loop does every few steps and that takes much of the run."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.sampled_code import LEARNING, SampledCode, code_outside
from advisor.measure.host.stacks import share_in
from advisor.measure.steps.periodic import MIN_TIMES, RecurringWork, find_periodic_work
from advisor.measure.steps.run_steps import RunSteps
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import (
    CONFUSION_MATRIX,
    MOSTLY_COMPILING,
    SAVING_AND_LOGGING,
    impact_over_run,
    impact_per_step,
    run_steps_of,
    steps_seen,
    time_compiling,
)
from advisor.testing import Examples, TraceBuilder

_EVALUATION = re.compile(r"(?i)eval|valid|test|metric|accura|confusion|score|predict")
"""Pattern of names of functions and classes that evaluate a model."""


class PeriodicWork(Rule):
    """The loop does something every N steps that takes much of the run. Examples are validation,
    metrics, and computing advantages before the minibatches of a rollout. The median step does not
    contain it, and a profiled window may miss it.

    The rule counts time in and between steps outside loading, forward, backward and optimizer,
    beyond the median step's. Validation is included, garbage collection is not. The time must
    exceed half a median step and recur at equal distances. Distances may be a multiple if profiled
    steps, which do not count, are in between.

    The function is the one whose share of the sampled Python stacks is near the work's share of the
    run. It contains no backward pass and no optimizer step. The gain is at most the mean step minus
    the median step. A host that runs ahead of the GPU waits for it now and then, but loses nothing.
    In that case the GPU must idle too, and the function must not be a synchronization. Saving and
    logging are reported by saving-time."""

    id = "periodic-work"
    title = "Code that runs every few steps takes much of the run"
    reads_record = True
    is_python_time = True
    found_in = ("traces/h100/seg_val_hist",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "two recordings of an H100 with other programs on it. A Python loop over time before every "
        "16 updates: 33% of the run predicted, 37% measured. A confusion matrix on the host every "
        "8 steps: 31% predicted, 27% measured"
    )
    references = ("https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",)

    min_share = Threshold(0.05, "of the run, including the time between steps", XPROF)
    min_exposed_share = Threshold(
        0.5, "of the work must be gain if the host runs ahead, because it waits for the GPU", CHOSEN
    )
    min_samples_share = Threshold(
        0.5, "of the work's share of the run, at least, in the function's samples", TRIED_ON_TRACES
    )
    min_whole_share = Threshold(
        0.9,
        "of the work's share of the run in the code's samples: it is all of the work",
        TRIED_ON_TRACES,
    )
    min_gain_share = Threshold(
        0.5, "of the gain at least, because some of the work may have to stay", CHOSEN
    )

    fix = (
        "Compute it with operators on whole tensors instead of a Python loop, and read results "
        "once. Or run it less often, on less data, or in another thread or process while the steps "
        "continue."
    )
    code = ""
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "validation": {
            "fix": "Compute metrics on the GPU, and copy only the result to the host. Validate "
            "under torch.inference_mode() with a larger batch, on less data or less often.",
            "code": CONFUSION_MATRIX,
            "alternatives": "between steps",
        }
    }
    verify = "Record again: the mean step is near the median, with less time between the steps."
    falsified_by = "the same mean step without this work"
    assumptions = ("the work can be made shorter, less frequent or parallel",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        work = find_periodic_work(run_steps)
        if work is None:
            return
        if work.gain < self.min_share * work.step or self._is_other_work(run_steps, work):
            return
        code = code_outside(
            run_steps.stacks,
            LEARNING,
            self.min_samples_share * work.share,
            work.share / self.min_samples_share,
        )
        if code is not None and code.waits:
            return
        if run_steps.host_is_ahead and (code is None or not self._device_idles(work)):
            return
        where = f"{t.format_duration(work.per_step)} per step on average"
        yield Finding(
            title=f"Code that runs every {work.period} steps takes much of the run",
            summary=(
                f"Every {work.period} steps the loop spends {t.format_duration(work.each)} outside "
                f"loading, forward, backward and optimizer. That is {where}, {work.share:.0%} of "
                f"the {t.format_duration(work.step)} from one step to the next. "
                + self._describe_code(code, work)
            ),
            evidence=[
                Evidence("time of this work per step", work.per_step, "ns"),
                self.compare("share of the run", work.share, "min_share"),
                Evidence("steps between two occurrences", work.period, "count"),
                Evidence("occurrences recorded", work.times, "count", MIN_TIMES),
                Evidence("time of each occurrence", work.each, "ns"),
                steps_seen(run_steps),
            ],
            where=[] if code is None else [code.location],
            impact=self._estimate_impact(a, work, self._share_in_code(code, work)),
            **(self.case("validation") if work.outside and self._evaluates(code) else {}),
        )

    def _is_other_work(self, run_steps: RunSteps, work: RecurringWork) -> bool:
        """Return whether other rules report this: saving, logging, compiling, a new epoch."""
        if not work.outside and work.period == run_steps.epoch_steps:
            return True
        spent = work.per_step * int(run_steps.used.sum())
        if time_compiling(run_steps) >= MOSTLY_COMPILING * spent:
            return True
        return any(
            share_in(run_steps.stacks, pattern)[0] >= self.min_samples_share * work.share
            for pattern in SAVING_AND_LOGGING.values()
        )

    @staticmethod
    def _evaluates(code: SampledCode | None) -> bool:
        """Return whether the named code evaluates, by its names. Code that is not named may."""
        return code is None or _EVALUATION.search(f"{code.location.function}") is not None

    def _device_idles(self, work: RecurringWork) -> bool:
        """Return whether the device also idles during the work."""
        if work.outside:
            return True
        if work.on_device is not None:
            return work.on_device >= self.min_exposed_share * work.each
        return work.gain >= self.min_exposed_share * work.per_step

    def _share_in_code(self, code: SampledCode | None, work: RecurringWork) -> float:
        """Return the share of the work, by samples, in the named code; 1 if none is named."""
        share = 1.0 if code is None else code.share / work.share
        return 1.0 if share >= self.min_whole_share else share

    def _describe_code(self, code: SampledCode | None, work: RecurringWork) -> str:
        if code is None:
            return "advisor record --deep shows its lines."
        library_text = f", in {code.library_function}" if code.library_function else ""
        part = self._share_in_code(code, work)
        gain = f" The gain covers only these {part:.0%} of the work." * (part < 1)
        return f"{code.share:.0%} of the sampled stacks are in {code.place}{library_text}.{gain}"

    def _estimate_impact(self, a: Analysis, work: RecurringWork, part: float) -> Any:
        """Return the gain per step, or over the run if the work is outside the steps. ``part`` is
        the share of the work in the named code."""
        run_steps = run_steps_of(a)
        if work.outside:
            run_ns = float(run_steps.after_first_ns)
            gain = part * work.gain / work.step * run_ns
            return impact_over_run(
                0.9 * gain,
                low=self.min_gain_share * gain,
                high=gain,
                method="share of the steps beyond the median step x time after the first step",
                total=run_ns,
            )
        gain = part * work.gain / work.step * (run_steps.mean or 0.0)
        return impact_per_step(
            a,
            0.9 * gain,
            low=self.min_gain_share * gain,
            high=gain,
            method="recorded time beyond the median step",
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a loop over time before every 16 updates": _build_run(16, 40),
            "a validation on the host every 8 steps": _build_run(8, 40, outside=True),
            "advantages after every rollout": _build_run(8, 40, outside=True, work="advantages"),
            "a part of it in other functions": _build_run(16, 40, blamed=0.6),
            "without samples": _build_run(16, 40, samples=0),
            "the host waits for the GPU": (
                _build_run(16, 40, leaf="torch/cuda/__init__.py(1162): synchronize"),
                "code.waits",
            ),
            "the host runs ahead": (_build_run(16, 40, device=9.5), "not self._device_idles(work)"),
            "a checkpoint": (
                _build_run(16, 40, leaf="torch/serialization.py(1003): save"),
                "self._is_other_work(run_steps, work)",
            ),
            "a short one": (_build_run(64, 6, steps=640), "work.gain < self.min_share * work.step"),
            "at random": (_build_run(0, 40, at=(12, 31, 90, 130, 190)), "work is None"),
        }


def _build_run(
    period: int,
    ms: float,
    *,
    outside: bool = False,
    samples: int = 100,
    blamed: float = 1.0,
    leaf: str = "",
    device: float = 0.0,
    steps: int = 200,
    at: tuple[int, ...] = (),
    work: str = "evaluate",
) -> TraceBuilder:
    """Build steps of 8 ms, of which every ``period``-th takes ``ms`` more. ``blamed`` is its share
    in one function."""
    b = TraceBuilder()
    r = b.record_of_run()
    times = 0
    for n in range(steps):
        is_long = n in at or (period and n % period == period - 1)
        times += bool(is_long)
        phases: dict[str, Any] = {"between steps": ms if is_long and not outside else 0.2}
        r.step(
            7.8 + phases["between steps"],
            evaluation=ms if is_long and outside else 0.0,
            forward=3,
            backward=4,
            fields={"gpu": {"forward": device * 1e6}} if device and n % 4 == 0 else {},
            **phases,
        )
    hits = round(blamed * samples * times * ms / (times * ms + 8 * steps))
    call = "train.py(9): main"
    frames = [call, f"train.py(40): {work}", "torch/_tensor.py(9): backward", leaf or call]
    stacks = [[samples - hits, [0, 2]], [max(1, hits), [0, 1, *([3] if leaf else [])]]]
    if samples:
        r.event("stacks", frames=frames, stacks=stacks)
    return b

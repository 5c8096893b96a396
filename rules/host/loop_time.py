"""Time of the loop that is no training: its own code, and work between the steps."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Evidence, Finding, Outcomes, Rule, Select, Threshold
from advisor.core.trace import Trace
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.sampled_stacks import LOOP
from advisor.measure.steps.record import StepRecords
from advisor.measure.steps.timeline import CODE
from advisor.rules.common import figure, locate_row, of_step
from advisor.rules.kernel.facts import match_exactly
from advisor.rules.recorded import (
    LOOP_SHARE,
    OWN_PHASES,
    impact_over_run,
    impact_per_step,
    record,
    steps_seen,
)
from advisor.rules.sources import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.testing import Examples, TraceBuilder


class LoopCode(Rule):
    """Where the training computes on the CPU, the loop's own Python code adds to each step: waits
    (``time.sleep``, a server, a lock), logging, metrics, preparing a batch by hand.

    It needs Python stacks. The rule names the function of your code with most time on the main
    thread outside operators, PyTorch's own Python, the loader and waits for other threads. Where a
    GPU trains, its idle time says what the host's code costs, and other rules look at that.
    """

    id = "loop-code"
    title = "The loop's own Python code takes much of the step"
    of_python = True
    found_in: ClassVar[tuple[str, ...]] = ("workloads/python_hot_spot",)
    silent_in: ClassVar[tuple[str, ...]] = ("workloads/python_hot_spot",)
    validated_on = "a CPU recording with stacks whose samples are chosen in a loop of Python"
    references = ("https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",)

    min_share = Threshold(
        LOOP_SHARE, "of the step; four times what counts where a GPU waits", XPROF
    )
    min_ms = Threshold(0.5, "ms per step: Python around small models takes as long", CHOSEN)

    fix = (
        "Take the code out of the step: do not sleep or wait in it, compute its result once, or "
        "prepare it in a DataLoader worker. Log and save every N steps only."
    )
    code = "if step % 100 == 0:       # not in every step\n    log(metrics)"
    verify = "Record again: the step is shorter by this code's time."
    falsified_by = "the same step time without this code"
    assumptions = ("the step can go on without this code's result",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        """Time of the main thread's own Python, by the user's function."""
        if not a.trains_on_host or not a.span_ns or a.trace.main_thread is None:
            return
        cpu, spans = a.trace.cpu, a.spans
        pieces = a.timeline.look(a.trace.main_thread, spans.start, spans.end)
        own = (pieces.code == CODE["python"]) & (pieces.row >= 0)
        rows = pieces.row[own]
        frame = a.user_frame[rows].astype(np.int64)
        table = (
            pl.DataFrame({"row": rows, "frame": frame, "ns": (pieces.end - pieces.start)[own]})
            .filter((frame >= 0) & ~_of_pytorch(a.trace, rows, frame))
            .with_columns(name=pl.col("frame").replace_strict(*_names(a, frame)))
            .group_by("name")
            .agg(
                pl.col("ns").sum(),
                pl.col("row", "frame").sort_by("ns").last(),
                count=pl.col("frame").n_unique(),
            )
            .sort("ns", "name", descending=[True, False])
        )
        if table.is_empty():
            return
        name, ns, row, frame_row, count = table.row(0)
        if ns < self.min_share * a.span_ns or ns < self.min_ms * 1e6 * a.step_count:
            return
        place = locate_row(a, frame_row, op=str(cpu["name"][row]), count=count)
        yield Finding(
            summary=(
                f"{place.function} ({place.file}:{place.line}) takes {of_step(a, ns)} on the main "
                f"thread outside operators, most of it in {t.clean(str(cpu['name'][row]))}."
            ),
            evidence=[
                figure(a, "Python code of this function", ns),
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
            ],
            where=[place],
            edits=[
                Edit(
                    op="remove",
                    select=Select(on="host", kind=("python",), name=match_exactly([name])),
                )
            ],
            confidence_notes=["recording Python stacks lengthens Python time"],
        )

    @staticmethod
    def examples() -> Examples:
        b = TraceBuilder(gpu=None)
        for _ in range(4):
            with b.step(), b.python("train.py(30): main"):
                b.on_host("aten::mm", 4000)
                with b.python("train.py(12): ask_server"), b.python("<built-in function sleep>"):
                    b.host(3000)
        light, small, device = TraceBuilder(gpu=None), TraceBuilder(gpu=None), TraceBuilder()
        modules, before = TraceBuilder(gpu=None), TraceBuilder(gpu=None)
        with before.python("train.py(12): prepare"):
            before.host(60_000)
        for _ in light.steps():
            with light.python("train.py(30): main"):
                light.host(600)
                light.on_host("aten::mm", 6000)
        for _ in small.steps():
            with small.python("train.py(30): main"):
                small.host(300)
                small.on_host("aten::mm", 300)
        for _ in modules.steps():
            with modules.python("train.py(30): main"):
                with modules.python("torch/nn/modules/module.py(1773): _call_impl"):
                    modules.host(3000)
                modules.on_host("aten::mm", 3000)
        for _ in before.steps():
            before.on_host("aten::mm", 6000)
        for _ in device.steps():
            with device.python("train.py(30): main"):
                device.host(3000)
                device.product(300)
        return {
            "sleep in the loop": b,
            "Python around operators": (light, "min_share"),
            "PyTorch around small operators": (modules, "ns < self.min_share * a.span_ns"),
            "before the steps": (before, "table.is_empty()"),
            "a GPU trains": (device, "not a.trains_on_host"),
            "a small model": (small, "min_ms"),
        }


def _of_pytorch(trace: Trace, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Which rows are PyTorch's own Python around operators, which no loop can do without; saving
    and logging are the loop's."""
    parent, names = stacks.parents(trace), trace.cpu["name"].cast(pl.String)
    inside, loop = (
        stacks.nearest(parent, names.str.contains(pattern).to_numpy())[rows]
        for pattern in (
            r"(?:^|/)torch/.*\.py\(",
            r"(?:^|/)torch/(?:serialization|utils/tensorboard)",
        )
    )
    within: np.ndarray = (inside > frame) & ~(loop > frame)
    return within


def _names(a: Analysis, frame: np.ndarray) -> tuple[list[int], list[str]]:
    known = np.unique(frame[frame >= 0])
    return known.tolist(), a.trace.cpu["name"].gather(known).cast(pl.String).to_list()


class LoopPhases(LoopCode):
    """The same from the recorder's phases, where no Python stacks were recorded: ``between steps``
    and ``other`` are neither loading, forward, backward nor optimizer. Evaluation between steps is
    left out. The Python stacks that the recorder samples outside its windows name the function.
    """

    id = "loop-phases"
    sampled_part = LOOP
    reads_record = True
    found_in = ("recorded/waiting_loop.slow",)
    silent_in = ("recorded/waiting_loop.cured", "recorded/anomaly.cured", "recorded/leak.cured")
    validated_on = "a CPU recording that sleeps 0.1 s in each step; silent without"

    def check(self, a: Analysis) -> Outcomes:
        """Time of the step in phases of the loop's own code."""
        recorded = record(a)
        if not a.trains_on_host or (a.trace.cpu["kind"] == "python").any():
            return
        phases = {name: recorded.phase(name) for name in OWN_PHASES}
        spent = {
            name: float(np.median(own))
            for name, own in phases.items()
            if own is not None and len(own)
        }
        step, ns = recorded.median or 0.0, sum(spent.values())
        if not step or ns < self.min_share * step or ns < self.min_ms * 1e6:
            return
        yield Finding(
            summary=(
                f"The loop's own code takes {t.format_duration(ns)} of each step "
                f"({ns / step:.0%}), outside loading, forward, backward and optimizer. "
                + _most_of_it(recorded)
            ),
            evidence=[
                *(
                    Evidence(f"phase '{name}'", own, "ns", per="step")
                    for name, own in spent.items()
                ),
                self.compare("share", ns / step, "min_share", per="step"),
                steps_seen(recorded),
            ],
            impact=impact_per_step(a, ns),
        )

    @staticmethod
    def examples() -> Examples:
        stacks = _recorded(forward=2, backward=2)
        with stacks.step(), stacks.python("train.py(30): main"):
            stacks.host(300)
        return {
            "a wait between steps": _recorded(forward=2, backward=2, **{"between steps": 6}),
            "evaluation": (_recorded(evaluation=20, forward=3.5, backward=6), "min_share"),
            "a small model": (_recorded(0.6, forward=0.2), "min_ms"),
            "stacks": (stacks, "== 'python').any()"),
        }


def _most_of_it(recorded: StepRecords) -> str:
    line = recorded.hottest_line(LOOP)
    if line is None:
        return "advisor record --deep shows its lines."
    place, inside = line.location, f", in {line.inside}" if line.inside else ""
    return (
        f"{line.share:.0%} of the sampled stacks are in {place.function} "
        f"({place.file}:{place.line}){inside}."
    )


def _recorded(ms: float = 10, **phases: float) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    b.record_of_run().steps(60, ms, **phases)
    return b


class TimeBetweenSteps(Rule):
    """Much of the run is spent between the training steps: evaluation, checkpoints, rollouts,
    generation of samples. The recorder tells this time from that of the steps.

    Evaluation is wanted, but how often it runs and on how much data is a choice, and it needs no
    gradients and allows larger batches than training. What comes before the first step (imports,
    making the model) does not count.
    """

    id = "time-between-steps"
    title = "Much of the run is spent between the training steps"
    reads_record = True
    found_in = ("recorded/waiting_loop.slow",)
    silent_in = ("recorded/waiting_loop.cured", *CURED_RECORDINGS)
    validated_on = "a CPU recording that evaluates every twenty steps on much data"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    )

    min_share = Threshold(0.30, "of the time of steps and what lies between them", CHOSEN)
    min_steps = Threshold(20, "steps: fewer do not show how often it comes", CHOSEN)
    half = Threshold(0.5, "of that time, by evaluating half as often", CHOSEN)
    each = Threshold(0.5, "of the steps follow a pause: evaluation comes less often", CHOSEN)

    fix = (
        "Evaluate less often, or on a fixed part of the data. Run it under torch.inference_mode() "
        "with a larger batch and DataLoader workers, and save checkpoints from another thread."
    )
    code = (
        "model.eval()\n"
        "with torch.inference_mode():\n"
        "    for batch in validation:            # a larger batch_size than in training\n"
        "        metric.update(model(batch))\n"
        "model.train()"
    )
    verify = "Record again: less time between the steps."
    falsified_by = "time between the steps that the training itself needs, as rollouts do"
    assumptions = ("evaluating half as often is enough",)
    confidence = 0.6
    cases = {
        "before each step": {
            "fix": "If these are rollouts: step several environments at once, in their own "
            "processes, infer for all in one batch, and take several steps with each rollout.",
            "code": "envs = gymnasium.vector.AsyncVectorEnv([make_env] * 8)   # one process each",
            "assumptions": ("rollouts can run beside each other",),
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        """Compare the time between steps with that of the steps."""
        recorded = record(a)
        begin, end = recorded.span
        outside = recorded.outside
        if recorded.count < self.min_steps or recorded.inference or end <= begin:
            return
        whole = outside + float(recorded.dur.sum())
        if outside < self.min_share * whole:
            return
        times = sum(step.evaluation > 0 for step in recorded.steps if step.n)
        each = times >= self.each * recorded.count
        yield Finding(
            summary=(
                f"{t.format_duration(outside)} of the run ({outside / whole:.0%}) lie between the "
                f"training steps, in {t.count_noun(times, 'pause')} "
                + ("before most steps." if each else "for evaluation, checkpoints and the like.")
            ),
            evidence=[
                Evidence("time between steps", outside, "ns"),
                self.compare("share of the run", outside / whole, "min_share"),
                Evidence("pauses", times, "count"),
                steps_seen(recorded),
            ],
            impact=impact_over_run(
                self.half * outside,
                high=outside,
                method="half of the time between steps",
            ),
            **(self.case("before each step") if each else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "evaluation every ten steps": _evaluated(every=10, ms=400),
            "a rollout before each step": _evaluated(every=1, ms=12),
            "a short evaluation": (_evaluated(every=20, ms=40), "min_share"),
            "a few steps": (_evaluated(every=3, ms=400, steps=12), "min_steps"),
        }


def _evaluated(*, every: int, ms: float, steps: int = 80) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    for n in range(steps):
        r.step(10, forward=3, backward=6, evaluation=ms if n and n % every == 0 else 0)
    return b

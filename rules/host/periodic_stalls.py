"""Steps that take much longer because the loop writes a checkpoint or a log in them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import GUESSED_STEP_SOURCES, Finding, Outcomes
from advisor.core.intervals import covered_length, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import SampledStack, hottest_line, share_in
from advisor.measure.steps.periodic import find_periodic_work
from advisor.measure.steps.steps import longest_usual_step
from advisor.rules.support.citations import (
    CHOSEN,
    CURED_RECORDINGS,
    GPUPROF,
    SILENT_TRACES,
    STEP_SERIES,
    TRIED_ON_TRACES,
    XPROF,
)
from advisor.rules.support.common import (
    COMPILING,
    LOOP_SHARE,
    SAVING_AND_LOGGING,
    costliest_places,
    impact_over_run,
    impact_per_step,
    loop_phase_times,
    run_steps_of,
    steps_seen,
)
from advisor.testing import Examples, TraceBuilder


class SavingRule(Rule):
    """Base of the rules about saving and logging in the loop; it has the advice."""

    alternatives = "saving"
    references = ("https://pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html",)
    assumptions = ("writing from another thread does not slow the loop",)
    confidence = 0.8

    fix = (
        "Log every N steps, pass values on without waiting for the GPU (a non_blocking copy, read "
        "one step later), and write from another thread."
    )
    code = "if step % 50 == 0:\n    writer.add_scalar('loss', loss.item(), step)"
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "saving": {
            "fix": "Save asynchronously: copy the state, and write the copy from another thread or "
            "process. Save less often, and from one rank only if all ranks have "
            "the same state.",
            "code": "import torch.distributed.checkpoint as dcp\n"
            "state = {'model': model.state_dict()}   # and what else you save now\n"
            "future = dcp.async_save(state, checkpoint_id=path)\n"
            "# before the next save: future.result()",
        },
        "Lightning": {
            "fix": "Save less often, and the weights alone where nothing resumes from them.",
            "code": "checkpoints = ModelCheckpoint(every_n_train_steps=500, save_top_k=1,\n"
            "                              save_weights_only=True)",
            "assumptions": ("a crash may cost the steps since the last checkpoint",),
        },
        "Transformers": {
            "fix": "Save less often, and the weights alone where nothing resumes from them.",
            "code": "args = TrainingArguments(..., save_steps=500, save_total_limit=1,\n"
            "                         save_only_model=True)",
            "assumptions": ("a crash may cost the steps since the last checkpoint",),
        },
    }

    inference: ClassVar[Mapping[str, Any]] = {
        "code": "if step % 50 == 0:\n    writer.add_scalar('score', score.item(), step)"
    }


class PeriodicStalls(SavingRule):
    """Some steps take much longer than the others because the training loop itself writes a
    checkpoint or logs metrics. All GPUs of the job wait meanwhile.

    A stall is a step longer than 1.5 times the median and by more than five median absolute
    deviations. It is explained when frames or ranges that save or log take at least half of its
    time beyond the median. They must take more than in other steps, on the thread that drives the
    step. Examples are ``torch.save``, distributed checkpoint, ``save_checkpoint`` …, TensorBoard,
    W&B and MLflow. The rule needs at least two such steps among twenty or more: one may be
    coincidence, and few steps do not show what is usual. Saves on another thread block nothing and
    do not count.

    The impact is time over the recorded window, not per step: how often it happens outside is
    unknown. Evaluation is intended, and is not reported."""

    id = "periodic-stalls"
    title = "Some steps stall while the loop saves or logs"
    host_check = "slow steps"
    found_in = ("workloads/periodic_checkpoint",)
    silent_in = (*SILENT_TRACES, "workloads/periodic_checkpoint")
    validation_note = "a CPU recording that saves its state; silent with an asynchronous save"

    min_steps = Threshold(20, "steps; fewer do not show what is usual", GPUPROF)
    min_stalls = Threshold(2, "stalls; one may be coincidence", TRIED_ON_TRACES)
    min_explained = Threshold(0.5, "of the stalls' excess", TRIED_ON_TRACES)
    min_share = Threshold(0.02, "of the window", TRIED_ON_TRACES)
    min_factor = Threshold(
        1.5, "times the median step, as the step series sets steps aside", STEP_SERIES
    )
    min_deviations = Threshold(5.0, "median absolute deviations", STEP_SERIES)

    verify = "Profile as many steps again: no step takes much longer than the median."
    falsified_by = "steps that take as long without saving or logging"

    def check(self, a: Analysis) -> Outcomes:
        steps = a.steps.table.filter(pl.col("used") | pl.col("outlier"))
        main = a.trace.main_thread
        if a.steps.source == "whole trace" or steps.height < self.min_steps or main is None:
            return
        dur = steps["dur"].to_numpy()
        median = float(np.median(dur))
        is_long = dur > longest_usual_step(dur, self.min_factor, self.min_deviations)
        for cause, pattern in SAVING_AND_LOGGING.items():
            cpu = a.trace.cpu
            on_thread = cpu["kind"].is_in(["python", "annotation"]) & (cpu["thread"] == main)
            rows = np.flatnonzero((on_thread & name_matches(cpu["name"], pattern)).to_numpy())
            if not len(rows):
                continue
            ts = a.trace.cpu["ts"].to_numpy()[rows]
            end = ts + a.trace.cpu["dur"].to_numpy()[rows]
            in_cause = covered_length(
                steps["ts"].to_numpy(), steps["end"].to_numpy(), union(ts, end)
            )
            usual = float(np.median(in_cause[~is_long]))
            excess = dur - median
            excess_in_cause = np.minimum(in_cause - usual, excess)
            stalls = is_long & (excess_in_cause >= self.min_explained * excess)
            lost = float(excess_in_cause[stalls].sum())
            stall_count = int(stalls.sum())
            if stall_count < self.min_stalls or lost < self.min_share * dur.sum():
                continue
            stall_begin, stall_end = steps["ts"].to_numpy()[stalls], steps["end"].to_numpy()[stalls]
            step = np.searchsorted(stall_begin, ts, side="right") - 1
            rows_in_stalls = rows[(step >= 0) & (ts < stall_end[np.maximum(step, 0)])]
            yield Finding(
                summary=(
                    f"{t.count_noun(stall_count, 'step')} of {steps.height} take "
                    f"{t.format_duration(float(dur[stalls].mean()))} instead of "
                    f"{t.format_duration(median)}, because {cause} in them. That is "
                    f"{t.format_duration(lost)} of the recorded window ({lost / dur.sum():.1%})."
                ),
                evidence=[
                    Evidence("time in stalls", lost, "ns"),
                    self.compare("share of the window", lost / float(dur.sum()), "min_share"),
                    self.compare("stalled steps", stall_count, "min_stalls", "count"),
                    self.compare("recorded steps", steps.height, "min_steps", "count"),
                    Evidence("median step", median, "ns"),
                ],
                where=costliest_places(a, rows_in_stalls),
                impact=impact_over_run(
                    lost, method="time of the stalled steps beyond the median step"
                ),
                **(self.case("saving") if cause.startswith("a checkpoint") else {}),
            )

    @staticmethod
    def examples() -> Examples:
        save = "torch/serialization.py(900): save"
        return {
            "torch.save": _build_training(frame="torch/serialization.py(900): save"),
            "a range": _build_training(annotation="save_checkpoint"),
            "TensorBoard": _build_training(
                frame="torch/utils/tensorboard/writer.py(370): add_histogram"
            ),
            "evaluation": (_build_training(frame="train.py(90): evaluate"), "not len(rows)"),
            "no cause in the trace": (_build_training(), "not len(rows)"),
            "on another thread": (_build_training(frame=save, thread=77), "not len(rows)"),
            "few steps": (_build_training(frame=save, steps=12, every=5), "min_steps"),
            "one save": (_build_training(frame=save, steps=24, every=20), "min_stalls"),
            "in every step": (_build_training(frame=save, every=1), "not len(rows)"),
        }


class SavingTime(SavingRule):
    """The training thread saves a checkpoint or logs, and no step runs meanwhile. This rule covers
    the whole run, if no stacks were recorded, or too few steps for periodic-stalls. It takes the
    share of the recorder's sampled Python stacks in which the thread saves or logs.

    The time is that share of the mean step, and at most the time of the loop's own code outside
    loading, forward, backward and optimizer. If every step saves, loop-phases reports it."""

    id = "saving-time"
    title = "Training stops while the loop saves or logs"
    host_check = "saving"
    reads_record = True
    found_in = ("recorded/saving.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "a CPU recording that saves in every fourth step; silent without"

    min_share = Threshold(0.05, "of the sampled stacks", XPROF)
    min_samples = Threshold(8, "samples in saving or logging", TRIED_ON_TRACES)
    min_gain_share = Threshold(
        0.5, "of the time is gained at least, because copying the state remains", CHOSEN
    )

    verify = "Record again: the mean step is near the median."
    falsified_by = "the same mean step without saving or logging"

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        stacks, mean, median = run_steps.stacks, run_steps.mean, run_steps.median
        phases = loop_phase_times(run_steps).values()
        usual_ns = sum(float(np.median(times)) for times in phases)
        if not mean or not median or usual_ns >= LOOP_SHARE * median:
            return
        outside = run_steps.outside_steps_ns / int(run_steps.used.sum())
        loop_ns = sum(float(times.mean()) for times in phases) + outside
        for cause, pattern in SAVING_AND_LOGGING.items():
            share, saving = share_in(stacks, pattern)
            samples = sum(stack.samples for stack in saving)
            if share < self.min_share or samples < self.min_samples:
                continue
            line, spent = hottest_line(saving), min(share * (mean + outside), loop_ns)
            method = "share of the sampled stacks, of the mean step"
            if outside > 0.5 * loop_ns:  # the steps' times do not include it
                lost_ns = spent * int(run_steps.used.sum())
                error = 1.28 * ((1 - share) / samples) ** 0.5  # of the samples' share
                impact = impact_over_run(
                    lost_ns,
                    low=self.min_gain_share * lost_ns,
                    high=(1 + error) * lost_ns,
                    method=method,
                    total=run_steps.after_first_ns,
                )
            else:
                impact = impact_per_step(
                    a, spent, low=self.min_gain_share * spent, method=method, outside=outside
                )
            yield Finding(
                summary=(
                    f"The training thread is stopped for {share:.0%} of the run, because {cause} "
                    f"in it: {t.format_duration(spent)} per step on average."
                ),
                evidence=[
                    Evidence("time in saving or logging", spent, "ns", per="step"),
                    self.compare("share of the sampled stacks", share, "min_share"),
                    self.compare("samples in saving or logging", samples, "min_samples", "count"),
                    Evidence("median step", median, "ns"),
                    Evidence("mean step", mean, "ns"),
                    steps_seen(run_steps),
                ],
                where=[] if line is None else [line.location],
                impact=impact,
                **(self.case(_choose_case(saving)) if cause.startswith("a checkpoint") else {}),
            )

    @staticmethod
    def examples() -> Examples:
        return {
            "torch.save in every fourth step": _build_saving(every=4),
            "few samples": (_build_saving(every=4, samples=4), "min_samples"),
            "rarely": (_build_saving(every=40, samples=1000), "min_share"),
            "in every step": (_build_saving(every=1), "usual_ns >= LOOP_SHARE * median"),
            "not sampled": (_build_saving(every=4, samples=0), "share < self.min_share"),
        }


def _choose_case(stacks: Sequence[SampledStack]) -> str:
    """Return the case of the framework whose loop saves."""
    for name, pattern in (
        ("Lightning", r"^(?:lightning|pytorch_lightning)/.*model_checkpoint\.py"),
        ("Transformers", r"^transformers/trainer\.py"),
    ):
        if share_in(stacks, pattern)[0] > 0.5:
            return name
    return "saving"


def _build_saving(*, every: int, samples: int = 100) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    r = b.record_of_run()
    for n in range(80):
        save = 12.0 if n % every == every - 1 else 0.0
        phases: dict[str, Any] = {"between steps": save}
        r.step(20 + save, forward=8, backward=12, **phases)
    samples_in_save = round(samples * 12 / (12 + 20 * every))
    frames = ["train.py(9): main", "train.py(4): save", "torch/serialization.py(1003): save"]
    if samples:
        r.event(
            "stacks",
            frames=frames,
            stacks=[[samples - samples_in_save, [0]], [max(samples_in_save, 1), [0, 1, 2]]],
        )
    return b


_STEP_WORK = r"(?i)\b(?:forward|backward)\b|^aten::|^Optimizer\.step"
"""Names of work that is part of each step and cannot be done less often."""


class LongStep(Rule):
    """A step takes several times as long as the others: the loop saves a checkpoint, evaluates, or
    compiles for a new shape in it. The figures of the other steps do not show this.

    The rule names the longest step, its length and what ran in it. It compares the ranges, Python
    frames, operators and calls of the main thread with the other steps. It names the innermost one
    that explains at least half of the difference. The first step of the recording is left out,
    because it includes start-up. Repeated stalls that frames or ranges explain are reported by
    periodic-stalls. Work that the run's record shows every few steps is reported by
    periodic-work."""

    id = "long-step"
    title = "One step takes several times as long as the others"
    silent_in = SILENT_TRACES
    references = SavingRule.references

    min_steps = Threshold(4, "steps; fewer do not show what is usual", TRIED_ON_TRACES)
    min_factor = Threshold(3.0, "times the median step", TRIED_ON_TRACES)
    min_share = Threshold(0.05, "of the recorded steps' time, beyond the median", TRIED_ON_TRACES)
    min_explained = Threshold(0.5, "of the difference", TRIED_ON_TRACES)

    fix = (
        "Find what the loop does in this step. Do it less often, in another thread, or outside the "
        "steps."
    )
    cases = {
        "saving": SavingRule.cases["saving"],
        "compiling": COMPILING,
        "inside the model": {
            "fix": "Find what delays it in this step: a new shape, garbage collection, or another "
            "program on the CPU or the GPU."
        },
    }
    verify = "Profile as many steps again: none stands out."
    falsified_by = "another recording in which no step stands out"
    confidence = 0.6

    def check(self, a: Analysis) -> Outcomes:
        steps = a.steps.table.filter(pl.col("used") | pl.col("outlier")).sort("ts").slice(1)
        if (
            a.steps.source in (*GUESSED_STEP_SOURCES, "whole trace")
            or steps.height < self.min_steps
        ):
            return
        dur = steps["dur"].to_numpy()
        median, longest = float(np.median(dur)), int(dur.argmax())
        times = float(dur[longest]) / max(median, 1.0)
        excess = float(dur[longest]) - median
        if dur[longest] < self.min_factor * median or excess < self.min_share * dur.sum():
            return
        step = steps.row(longest, named=True)
        work = None if a.run_steps is None else find_periodic_work(a.run_steps)
        number = re.search(r"\d+$", step["name"])
        if work is not None and number is not None and work.contains(int(number[0])):
            return
        name, name_ns = _find_longest_name(a, steps, longest, self.min_explained * excess)
        compiling = _measure_compiling(a, step)
        if compiling < self.min_explained * excess:
            compiling = name_ns if re.search(_COMPILERS, name) else 0.0
        mean_other = a.steps.used.filter(pl.col("ts") != step["ts"])["dur"].to_numpy().mean()
        reason = f", {t.format_duration(name_ns)} of it in {labels.clean(name)}" if name else ""
        if compiling:
            reason = f", {t.format_duration(compiling)} of it compiling or loading code"
        is_saving = any(
            re.search(pattern, name) for pattern in list(SAVING_AND_LOGGING.values())[:1]
        )
        case = "compiling" if compiling else "saving" if is_saving else ""
        if not case and re.search(_STEP_WORK, name):
            case = "inside the model"
        yield Finding(
            title=f"{step['name']} takes {dur[longest] / median:.0f}× as long as the others",
            summary=(
                f"{step['name']} takes {t.format_duration(dur[longest])}{reason}; the other "
                f"profiled steps take {t.format_duration(mean_other)} on average."
            ),
            evidence=[
                Evidence("longest step", int(dur[longest]), "ns"),
                self.compare("longest step over the median", times, "min_factor", ""),
                self.compare(
                    "time beyond the median, share of the steps' time",
                    excess / float(dur.sum()),
                    "min_share",
                ),
                Evidence("longer part of the longest step", name or None),
            ],
            impact=impact_over_run(excess, method="time of this step beyond the median step"),
            **(self.case(case) if case else {}),
        )

    @staticmethod
    def examples() -> Examples:
        save = "torch/serialization.py(900): save"
        compiles = "torch/_dynamo/convert_frame.py(900): _compile"
        twice = TraceBuilder()
        for n in twice.steps(8):
            twice.product(5000 if n == 5 else 2000, wait=True)
        return {
            "a checkpoint": _build_training(frame=save, steps=8, every=6),
            "a new shape is compiled": _build_training(frame=compiles, steps=8, every=6),
            "twice as long": (twice, "min_factor"),
            "three steps": (_build_training(frame=save, steps=4, every=3), "min_steps"),
        }


_COMPILERS = (
    r"torch/_(?:dynamo|inductor|functorch)/|^Torch-Compiled|triton/.*: compile$|CachingAutotuner"
    r"|nvrtcCompileProgram|^(?:cu|hip)(?:Module|Library)Load"
)
"""Frames and calls of a compiler, or of loading compiled code."""


def _measure_compiling(a: Analysis, step: dict[str, Any]) -> float:
    """Return the time, ns, in which the device idles during a step because the host compiles or
    loads code."""
    if a.device_id is None:
        return 0.0
    gaps = a.gaps.filter(pl.col("cause") == "compile")
    ts = gaps["ts"].to_numpy()
    start, end = np.array([step["ts"]]), np.array([step["end"]])
    return float(covered_length(start, end, union(ts, ts + gaps["dur"].to_numpy()))[0])


def _find_longest_name(
    a: Analysis, steps: pl.DataFrame, index: int, min_ns: float
) -> tuple[str, float]:
    """Return the innermost name on the main thread that takes at least ``min_ns`` more in this step
    than in the mean other step, and its time, ns. The name is empty if there is none."""
    cpu = a.trace.cpu.filter(
        (pl.col("thread") == (-1 if a.trace.main_thread is None else a.trace.main_thread))
        & ~pl.col("name").cast(pl.String).is_in(steps["name"].to_list())
    ).select("name", "ts", "dur")
    start, end = steps["ts"].to_numpy(), steps["end"].to_numpy()
    ts = cpu["ts"].to_numpy()
    step = np.searchsorted(start, ts, side="right") - 1
    in_any_step = (step >= 0) & (ts < end[np.maximum(step, 0)])
    in_step = pl.Series(step == index)
    table = (
        cpu.with_columns(own=pl.col("dur") * in_step, other=pl.col("dur") * ~in_step)
        .filter(pl.Series(in_any_step))
        .group_by("name")
        .agg(pl.col("own").sum(), pl.col("other").sum() / max(1, steps.height - 1))
        .filter(pl.col("own") - pl.col("other") >= min_ns)
        .sort("own", "name")
    )
    return (str(table["name"][0]), float(table["own"][0])) if table.height else ("", 0.0)


def _build_training(
    *,
    frame: str = "",
    annotation: str = "",
    thread: int | None = None,
    steps: int = 40,
    every: int = 10,
) -> TraceBuilder:
    b = TraceBuilder()
    for n in b.steps(steps):
        b.product(2000, wait=True)
        if n % every == every - 1:
            _add_stall(b, frame, annotation, thread)
    return b


def _add_stall(b: TraceBuilder, frame: str, annotation: str, thread: int | None) -> None:
    if thread is not None:
        with b.thread(thread), b.python(frame):
            b.host(9000)
    elif frame:
        with b.python("train.py(50): after_step"), b.python(frame):
            b.host(9000)
    elif annotation:
        with b.range(annotation):
            b.host(9000)
    else:
        b.host(9000)

"""Python code in the model's forward pass that runs no operator."""

from collections import Counter

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Location, Outcomes
from advisor.core.intervals import Intervals, Ints, intersect, subtract, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host.device_reads import outermost_aten
from advisor.measure.host.stacks import (
    MIN_OF_LOOP,
    CodeOwner,
    SampledStack,
    code_owner,
    line_of_function,
    normalize_operator_name,
    parse_frame,
)
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    impact_per_step,
    of_step,
    run_steps_of,
    steps_seen,
)
from advisor.rules.support.library_functions import find_library_use
from advisor.testing import Examples, TraceBuilder

FORWARD = "advisor::forward"
"""The recorder's range around calls of the model."""
WORK_KINDS = ("op", "runtime")
MAX_NEAR = 4
"""Number of operators before or after a stretch among which the nearest one with a known line is
used."""


class ForwardCode(Rule):
    """Python inside ``forward`` lengthens each step if the training computes on the CPU. Examples
    are constant tables and masks that are recomputed, and numbers processed in loops or with NumPy.

    The rule counts stretches of the recorder's forward range without an operator. They must last a
    millisecond, or a twentieth of a short step. Python around operators takes some microseconds
    each and has its own rules. Waits for collectives do not count, such as those for buffers that
    DistributedDataParallel broadcasts.

    The function is the one in which the recorder sampled most Python stacks, outside methods named
    ``forward``. Without such samples, it is the line between those of the operators before and
    after. If half of the samples are in one kind of library function, such as one that makes a
    window, the advice is about that."""

    id = "forward-code"
    title = "The forward pass spends much of the step in Python"
    host_check = "Python inside forward"
    is_python_time = True
    reads_record = True
    found_in = ("recorded/table_in_forward.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording, torch 2.13: a table of positions made in each forward pass, 19 ms of "
        "each step predicted, 21 ms measured"
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer",
    )

    min_share = Threshold(0.10, "of the step; twice the threshold for a waiting GPU", XPROF)
    min_stretch_ms = Threshold(1.0, "ms without an operator, longer than Python around one", CHOSEN)
    min_stretch_share = Threshold(0.05, "of the step, for a shorter stretch", CHOSEN)
    min_samples = Threshold(8, "samples in a function at which it is named", TRIED_ON_TRACES)
    min_gain_share = Threshold(0.5, "of the time is gained at least; some may have to stay", CHOSEN)

    fix = (
        "Compute what does not change once, in the constructor, and keep it with register_buffer. "
        "Compute everything else with operators on whole tensors, or in the DataLoader's workers."
    )
    code = (
        'self.register_buffer("table", make_table(length), persistent=False)   # in __init__\n'
        "x = x + self.table[: x.size(1)]                                       # in forward"
    )
    verify = "Record again: forward is shorter by this time."
    falsified_by = "a result that differs from step to step"
    assumptions = ("the result can be kept, or computed with few operators",)
    confidence = 0.75
    alternatives = "forward code"

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        if not a.trains_on_host or not a.span_ns or a.trace.main_thread is None:
            return
        stretches = self._find_stretches(a)
        lengths = stretches.end - stretches.start
        step_ns = a.span_ns / a.step_count
        is_long = lengths >= min(self.min_stretch_ms * 1e6, self.min_stretch_share * step_ns)
        ns = int(lengths[is_long].sum())
        if ns < self.min_share * a.span_ns:
            return
        place = self._find_function(a) or self._find_line(
            a, stretches.start[is_long], stretches.end[is_long]
        )
        library_use = find_library_use(self._list_samples(a))
        ns_per_step = ns / a.step_count
        where = f"{place.function} ({place.file}:{place.line})" if place is not None else ""
        yield Finding(
            summary=(
                f"Inside forward no operator runs for {of_step(a, ns)}. "
                + (
                    f"The place with most samples of that time is {where}."
                    if where
                    else "advisor record --deep shows its lines."
                )
                + ("" if library_use is None else library_use.sentence("that time"))
            ),
            evidence=[
                amount_per_step(a, "forward without an operator", ns),
                amount_per_step(a, "stretches without an operator", int(is_long.sum()), "count"),
                self.compare_share(a, "forward without an operator", ns),
                Evidence("longest stretch without an operator", int(lengths.max()), "ns"),
                steps_seen(run_steps),
            ],
            where=[] if place is None else [place],
            impact=impact_per_step(
                a,
                0.9 * ns_per_step,
                low=self.min_gain_share * ns_per_step,
                high=int(lengths.sum()) / a.step_count,
                method="recorded time without an operator",
                of_median=True,
            ),
            **({} if library_use is None else library_use.advice("the forward pass")),
        )

    @staticmethod
    def _list_samples(a: Analysis) -> list[SampledStack]:
        """Return the stacks sampled in forward whose innermost frame is not PyTorch's."""
        return [
            stack
            for stack in run_steps_of(a).stacks
            if stack.part == "forward" and not stack.frames[-1].startswith("torch/")
        ]

    @staticmethod
    def _find_stretches(a: Analysis) -> Intervals:
        cpu = a.trace.cpu.filter(pl.col("thread") == a.trace.main_thread)
        forward = cpu.filter(pl.col("name").cast(pl.String) == FORWARD)
        work = cpu.filter(pl.col("kind").is_in(WORK_KINDS))
        forward_spans, work_spans = (
            union(rows["ts"].to_numpy(), (rows["ts"] + rows["dur"]).to_numpy())
            for rows in (forward, work)
        )
        waits = a.breakdown.all_communication  # of DistributedDataParallel, or of the model itself
        return subtract(subtract(intersect(forward_spans, a.spans), work_spans), waits)

    def _find_function(self, a: Analysis) -> Location | None:
        """Return the innermost function with most samples in forward, and its line with most. It is
        in the user's code or a library other than PyTorch. Methods named ``forward`` run operators,
        and do not count."""
        functions: Counter[tuple[str, str]] = Counter()
        lines: Counter[tuple[str, str, int]] = Counter()
        for stack in self._list_samples(a):
            user = next(
                (name for name in reversed(stack.frames) if code_owner(name) == CodeOwner.USER),
                None,
            )
            frame = None if user is None else parse_frame(user)
            if frame is None:
                continue
            if frame.function.rpartition(".")[2] != "forward":
                functions[frame.file, frame.function] += stack.samples
                lines[frame.file, frame.function, frame.line] += stack.samples
        if not functions:
            return None
        function, samples = functions.most_common(1)[0]
        if samples < self.min_samples:
            return None
        line = max((n, key[2]) for key, n in lines.items() if key[:2] == function)[1]
        return Location(file=function[0], line=line, function=function[1])

    @staticmethod
    def _find_line(a: Analysis, start: Ints, end: Ints) -> Location | None:
        """Return the line between the operators before and after most of the time; of several
        lines, the last."""
        stacks, main = run_steps_of(a).stacks, a.trace.main_thread
        cpu = a.trace.cpu
        ops = np.unique(outermost_aten(a))
        ops = ops[ops >= 0]
        ops = ops[(cpu["thread"].gather(ops) == main).to_numpy()]
        ts, names = cpu["ts"].to_numpy()[ops], cpu["name"].gather(ops).cast(pl.String).to_list()
        lines = {
            name: line_of_function(stacks, normalize_operator_name(name)) for name in set(names)
        }
        times: Counter[tuple[str, str, int, int]] = Counter()
        for gap_start, gap_end, op in zip(start, end, np.searchsorted(ts, start), strict=True):
            before, after = (
                next((line.location for name in nearby if (line := lines[name]) is not None), None)
                for nearby in (
                    reversed(names[max(0, op - MAX_NEAR) : op]),
                    names[op : op + MAX_NEAR],
                )
            )
            if before is None or after is None or before.function != after.function:
                continue
            if before.file == after.file and (before.line or 0) < (after.line or 0):
                key = before.file or "", before.function or "", before.line or 0, after.line or 0
                times[key] += int(gap_end - gap_start)
        if not times:
            return None
        (file, function, above, below), ns = times.most_common(1)[0]
        if ns < MIN_OF_LOOP * int((end - start).sum()):
            return None
        return Location(file=file, line=max(above + 1, below - 1), function=function)

    @staticmethod
    def examples() -> Examples:
        return {
            "a table made in each forward": _build_steps(),
            "without samples": _build_steps(samples=0),
            "in a short step": _build_steps(stretch=500, other_us=1_000),
            "Python around operators": (_build_steps(stretch=300, times=12), "min_stretch_ms"),
            "small compared with the step": (_build_steps(other_us=40_000), "min_share"),
            "the loop's own code": (
                _build_steps(in_forward=False),
                "ns < self.min_share * a.span_ns",
            ),
            "a GPU trains": (_build_steps(gpu="A100"), "not a.trains_on_host"),
            "waits for other ranks": (
                _build_steps(collective=True),
                "ns < self.min_share * a.span_ns",
            ),
        }


def _build_steps(
    *,
    stretch: float = 4_000,
    times: int = 1,
    other_us: float = 8_000,
    samples: int = 20,
    in_forward: bool = True,
    gpu: str | None = None,
    collective: bool = False,
) -> TraceBuilder:
    b = TraceBuilder(gpu, rank=0, world_size=2) if collective else TraceBuilder(gpu=gpu)
    for _ in b.steps():
        if not in_forward:
            b.host(stretch)
        with b.range(FORWARD):
            for _ in range(times):
                if collective:
                    b.host_collective("broadcast", 1344, stretch, wait=True)
                elif in_forward:
                    b.host(stretch)
                b.on_host("aten::mm", other_us / times)
        if gpu:
            b.product(other_us)
    run = b.record_of_run()
    step = (other_us + stretch * times) / 1000
    run.steps(60, step, forward=step)
    if samples:
        call = "torch/nn/modules/module.py(1789): Module._call_impl"
        frames = [call, "model.py(9): Net.forward", "model.py(30): positions"]
        run.event("stacks", frames=frames, stacks=[[samples, [0, 1, 2]], [30, [0, 1]]])
    return b

"""The loop's own code, in a trace with Python stacks."""

import re
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import labels
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.intervals import intersect, union
from advisor.core.rule import Threshold
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.library_time import stacks_of_rows
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import NESTED, SampledStack
from advisor.measure.steps.steps import rows_in_steps
from advisor.measure.steps.timeline import CODE
from advisor.rules.support.citations import CHOSEN, XPROF
from advisor.rules.support.common import Rows, amount_per_step, locate_row, of_step, scale_edit
from advisor.rules.support.kernel_work import exact_pattern
from advisor.rules.support.library_functions import find_library_use
from advisor.rules.support.loop_operators import OF_LOOP, PYTORCH, TRAINS, LoopRule
from advisor.testing import Examples, TraceBuilder


class LoopCode(LoopRule):
    """The loop's own code adds to each step where the training computes on the CPU. It waits
    (``time.sleep``, a server, a lock), logs, computes metrics, clips by hand or prepares a batch.

    It needs Python stacks. The rule counts the main thread outside the loader, calls of modules,
    the backward pass, the optimizer and waits for other threads. Operators whose gradient is
    computed do not count either. The rule names the deepest function of your code that has most of
    that time, with what it calls: Python and operators. Of a function that also trains, such as the
    loop itself, only its own Python counts, not PyTorch's around operators. In programs without
    modules and without a backward pass operators may be the model: only Python counts there. Where
    a GPU trains, its idle time says what the host's code costs, and other rules look at that."""

    id = "loop-code"
    title = "The loop's own code takes much of the step"
    found_in = ("workloads/python_hot_spot",)
    silent_in = ("workloads/python_hot_spot",)
    validation_note = (
        "CPU recordings with stacks: samples chosen in a loop of Python, a confusion matrix and a "
        "norm of gradients by hand, a simulated environment"
    )

    min_share = Threshold(0.10, "of the step; twice what counts where a GPU waits", XPROF)
    max_callee_share = Threshold(
        0.8, "of a function's time in one that it calls: that one is named", CHOSEN
    )

    def check(self, a: Analysis) -> Outcomes:
        if not a.trains_on_host or not a.span_ns or a.trace.main_thread is None:
            return
        code = LoopTime(a)
        place = code.largest(self.max_callee_share)
        if place is None:
            return
        ns, name = place.ns, place.name
        if ns < self.min_share * a.span_ns or ns < self.min_ms * 1e6 * a.step_count:
            return
        many = place.of_tensors and place.operators >= self.min_tensor_operators * a.step_count
        alone = place.largest_part == labels.clean(name)
        inside = None if alone else place.largest_part
        location = locate_row(a, place.row, op=inside, count=place.calls)
        runs = amount_per_step(a, "operators in it", place.operators, "count")
        use = None if many else find_library_use(place.stacks, timed=True)
        yield Finding(
            summary=(
                f"{location.function} ({location.file}:{location.line}) takes {of_step(a, ns)} on "
                "the main thread outside loading, forward, backward and optimizer, most of it in "
                f"{'its own Python' if alone else place.largest_part}."
                + (f" It runs {round(place.operators / a.step_count):,} operators." if many else "")
            ),
            evidence=[
                amount_per_step(a, "time of this function", ns),
                self.compare("share", ns / a.span_ns, "min_share", per=a.per),
                *([runs] if place.operators else []),
            ],
            where=[location],
            edits=[
                scale_edit(
                    Select(on="host", kind=("python",), name=exact_pattern([name])),
                    *(1 - saved * ns / place.total_ns for saved in (0.9, 1.0, 0.5)),
                )
            ],
            confidence_notes=["recording Python stacks lengthens Python time"],
            **(self.case("many operators") if many else use.advice("the step") if use else {}),
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
        clipped, learnt = TraceBuilder(gpu=None), TraceBuilder(gpu=None)
        for _ in clipped.steps():
            with clipped.python("train.py(30): main"):
                with clipped.python("nn.Module: Net_0"):
                    clipped.on_host("aten::mm", 3000)
                with clipped.python("train.py(12): clip"):
                    for _ in range(40):
                        clipped.on_host("aten::norm", 50)
        for number in learnt.steps():
            with learnt.python("train.py(30): main"):
                with learnt.python("train.py(12): loss"), learnt.op("aten::mm", sequence=number):
                    learnt.host(3000)
                node = "autograd::engine::evaluate_function: MmBackward0"
                with (
                    learnt.python("torch/_tensor.py(566): backward"),
                    learnt.op(node, sequence=number),
                ):
                    learnt.host(3000)
        return {
            "sleep in the loop": b,
            "gradients clipped one by one": clipped,
            "a loss as a function": (learnt, "ns < self.min_share * a.span_ns"),
            "Python around operators": (light, "min_share"),
            "PyTorch around small operators": (modules, "ns < self.min_share * a.span_ns"),
            "before the steps": (before, "place is None"),
            "a GPU trains": (device, "not a.trains_on_host"),
            "a small model": (small, "min_ms"),
        }


_RECORDS = r"(?:^|/)advisor/recorder/|<built-in function collect>"
"""The recorder's own code; collections of garbage, which another rule looks at."""


class FunctionTime(NamedTuple):
    """Time that a function of the user's takes in the analysed steps."""

    name: str
    """Name of its frames."""
    row: int
    """Row of one of its frames."""
    ns: int
    """Counted time, ns."""
    total_ns: int
    """All time in its frames, ns."""
    calls: int
    """Number of its calls."""
    operators: int
    """Number of operators that run in it; those inside operators are not counted."""
    largest_part: str
    """The Python or operator with most of the time."""
    of_tensors: bool
    """Whether that is an operator, a method of PyTorch or the function itself, no other library."""
    stacks: list[SampledStack]
    """Python stacks of its time; samples are µs."""


class LoopTime:
    """Time of the main thread outside loading, forward, backward and optimizer, by the functions of
    the user's code around it."""

    def __init__(self, a: Analysis) -> None:
        self._a = a
        trace = a.trace
        names = trace.cpu["name"]
        self._names = names
        self._parent = stacks.parent_rows(trace)
        own = (stacks.frame_ranks(trace) == 2) & ~name_matches(names, _RECORDS).to_numpy()
        own &= ~name_matches(names, NESTED).to_numpy()
        self._function = stacks.innermost_ancestor(self._parent, own)
        """The user's function around each row, -1: none; aligned with ``trace.cpu``."""
        trains = name_matches(names, TRAINS).to_numpy()
        graph = np.zeros(trace.cpu.height, dtype=bool)
        graph[a.forward_op[a.forward_op >= 0]] = True
        unwanted = trains | graph | name_matches(names, _RECORDS).to_numpy()
        self._left_out = stacks.innermost_ancestor(self._parent, unwanted) >= 0
        self._rows = self._counted(bool(trains.any()))
        training = self._function[np.flatnonzero(trains)]
        self._trainers = set(self._chains(training[training >= 0])["name"].to_list())

    def _counted(self, trains: bool) -> pl.DataFrame:
        """The main thread's time by row: ``row``, ``function`` (row around it), ``ns``, ``python``
        (outside operators and PyTorch's Python)."""
        a = self._a
        main = a.trace.main_thread
        assert main is not None
        pieces = a.timeline.pieces_within(main, a.spans.start, a.spans.end)
        python, dispatch = CODE["python"], CODE["dispatch"]
        wanted = (pieces.row >= 0) & np.isin(
            pieces.code, [python, dispatch] if trains else [python]
        )
        rows = pieces.row[wanted]
        frame = self._function[rows].astype(np.int64)
        inside, loop = (
            stacks.innermost_ancestor(self._parent, name_matches(self._names, pattern).to_numpy())[
                rows
            ]
            for pattern in (PYTORCH, OF_LOOP)
        )
        own = (pieces.code[wanted] == python) & ~((inside > frame) & ~(loop > frame))
        return (
            pl.DataFrame(
                {
                    "row": rows.astype(np.int64),
                    "function": frame,
                    "ns": (pieces.end - pieces.start)[wanted],
                    "python": own,
                }
            )
            .filter((pl.col("function") >= 0) & ~pl.Series(self._left_out[rows]))
            .group_by("row", "function", "python")
            .agg(pl.col("ns").sum())
        )

    def _chains(self, functions: Rows) -> pl.DataFrame:
        """All functions of the user's around these rows: ``function``, ``around``, ``name``."""
        of = np.unique(functions).astype(np.int64)
        levels, at = [], of
        while (at >= 0).any():
            of, at = of[at >= 0], at[at >= 0]
            levels.append(pl.DataFrame({"function": of, "around": at}))
            above = self._parent[at]
            at = np.where(above >= 0, self._function[np.maximum(above, 0)], -1).astype(np.int64)
        if not levels:
            return pl.DataFrame({"function": [], "around": [], "name": []})
        table = pl.concat(levels)
        return table.with_columns(name=self._names.gather(table["around"]).cast(pl.String))

    def largest(self, most: float) -> FunctionTime | None:
        """The deepest function with at least ``most`` of the time of the one that has most; of a
        function that also trains, its own Python alone counts."""
        rows = self._rows
        if rows.is_empty():
            return None
        chains = self._chains(rows["function"].to_numpy())
        helpers = chains.filter(~pl.col("name").is_in(list(self._trainers)))
        inclusive = (
            rows.join(helpers.unique(["function", "name"]), on="function")
            .group_by("name")
            .agg(pl.col("ns").sum())
        )
        named = chains.filter(pl.col("function") == pl.col("around"))
        alone = rows.filter("python").join(named, on="function")
        alone = alone.filter(pl.col("name").is_in(list(self._trainers)))
        alone = alone.group_by("name").agg(pl.col("ns").sum())
        table = pl.concat([inclusive, alone]).sort("ns", "name", descending=[True, False])
        if table.is_empty():
            return None
        name, ns = table.row(0)
        own = name in self._trainers
        if not own:
            within = helpers.filter(pl.col("name") == name)["function"].unique()
            below = (
                rows.filter(pl.col("function").is_in(within.to_list()))
                .join(helpers.unique(["function", "name"]), on="function")
                .group_by("name")
                .agg(pl.col("ns").sum())
                .filter(pl.col("ns") >= most * ns)
            )
            depth = (
                helpers.with_columns(depth=self._a.trace.cpu["depth"].gather(helpers["around"]))
                .group_by("name")
                .agg(pl.col("depth").max())
            )
            below = below.join(depth, on="name").sort("depth", "name", descending=[True, False])
            name, ns = below.row(0)[:2]
        return self._describe(name, ns, own=own)

    def _describe(self, name: str, ns: int, *, own: bool) -> FunctionTime:
        cpu = self._a.trace.cpu
        frames = np.flatnonzero((self._names == name).to_numpy())
        ts, end = (cpu["ts"].to_numpy()[frames], (cpu["ts"] + cpu["dur"]).to_numpy()[frames])
        held = intersect(union(ts, end), self._a.spans).total
        here = np.zeros(cpu.height, dtype=bool)
        here[frames] = True
        rows = self._rows.filter("python") if own else self._rows
        inside = stacks.climb_stack(self._parent, here, rows["row"].to_numpy()) >= 0
        rows = rows.filter(pl.Series(inside))
        if own:
            rows = rows.filter(pl.Series(here[rows["function"].to_numpy()]))
        called = rows.with_columns(name=self._names.gather(rows["row"]).cast(pl.String))
        called = called.with_columns(pl.col("name").str.replace(r" of .* at 0x\w+>$", ">"))
        parts = called.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name")
        operators = 0 if own else self._operators(here)
        top = parts["name"][-1]
        library = stacks.parse_frame(top) is not None and not re.search(PYTORCH, top)
        seen = frames[(end > self._a.spans.start.min()) & (ts < self._a.spans.end.max())]
        return FunctionTime(
            name=name,
            row=int(rows.sort("ns")["function"][-1]) if own else int(seen[-1]),
            ns=int(ns),
            total_ns=max(int(held), int(ns), 1),
            calls=len(seen),
            operators=operators,
            largest_part=labels.clean(top),
            of_tensors=top == name or not library,
            stacks=stacks_of_rows(self._a, rows["row"].to_numpy(), rows["ns"].to_numpy()),
        )

    def _operators(self, here: NDArray[np.bool_]) -> int:
        """Count operators of the analysed steps inside these rows, without those inside others."""
        rows = rows_in_steps(self._a, stacks.outermost_rows(self._a.trace))
        rows = rows[~self._left_out[rows]]
        return int((stacks.climb_stack(self._parent, here, rows) >= 0).sum())

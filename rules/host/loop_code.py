"""Time of the loop's own code, in traces with Python stacks."""

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
from advisor.measure.steps.timeline import CLASS_CODE
from advisor.rules.support.citations import CHOSEN, XPROF
from advisor.rules.support.common import Rows, amount_per_step, locate_row, of_step, scale_edit
from advisor.rules.support.kernel_work import exact_pattern
from advisor.rules.support.library_functions import find_library_use
from advisor.rules.support.loop_operators import (
    OF_LOOP,
    PYTORCH,
    TRAINS,
    LoopRule,
    case_by_name,
)
from advisor.testing import Examples, TraceBuilder


class LoopCode(LoopRule):
    """The loop's own code lengthens each step if the training computes on the CPU. It waits
    (``time.sleep``, a server, a lock), logs, computes metrics, clips gradients by hand or prepares
    a batch.

    The rule needs Python stacks. It counts time of the main thread outside the loader, calls of
    modules, the backward pass, the optimizer and waits for other threads. Operators whose gradient
    is computed do not count either. The rule names the deepest function of your code that has most
    of that time, including the Python and operators that it calls. In a function that also trains,
    such as the loop itself, only its own Python counts, not PyTorch's Python around operators. In
    programs without modules and without a backward pass, operators may be the model, so only Python
    counts. If a GPU trains, its idle time shows the cost of the host's code, and other rules check
    it."""

    id = "loop-code"
    title = "The loop's own code takes much of the step"
    found_in = ("workloads/python_hot_spot",)
    silent_in = ("workloads/python_hot_spot",)
    validation_note = (
        "CPU recordings with stacks: samples chosen in a loop of Python, a confusion matrix and a "
        "norm of gradients by hand, a simulated environment"
    )

    min_share = Threshold(0.10, "of the step; twice the threshold for a waiting GPU", XPROF)
    max_callee_share = Threshold(
        0.8, "of a function's time in one that it calls; then the called function is named", CHOSEN
    )

    def check(self, a: Analysis) -> Outcomes:
        if not a.trains_on_host or not a.span_ns or a.trace.main_thread is None:
            return
        code = LoopTime(a)
        function = code.largest(self.max_callee_share)
        if function is None:
            return
        ns, name = function.ns, function.name
        if ns < self.min_share * a.span_ns or ns < self.min_ms * 1e6 * a.step_count:
            return
        many = (
            function.of_tensors and function.operators >= self.min_tensor_operators * a.step_count
        )
        own_python = function.largest_part == labels.clean(name)
        main_part = None if own_python else function.largest_part
        location = locate_row(a, function.row, op=main_part, count=function.calls)
        operator_evidence = amount_per_step(
            a, "operators in this function", function.operators, "count"
        )
        use = None if many else find_library_use(function.stacks, timed=True)
        yield Finding(
            summary=(
                f"{location.function} ({location.file}:{location.line}) takes {of_step(a, ns)} on "
                "the main thread outside loading, forward, backward and optimizer, most of it in "
                f"{'its own Python' if own_python else function.largest_part}."
                + (
                    f" It runs {round(function.operators / a.step_count):,} operators."
                    if many
                    else ""
                )
            ),
            evidence=[
                amount_per_step(a, "time of this function", ns),
                self.compare_share(a, "time of this function", ns),
                *([operator_evidence] if function.operators else []),
            ],
            where=[location],
            edits=[
                scale_edit(
                    Select(on="host", kind=("python",), name=exact_pattern([name])),
                    *(1 - saved * ns / function.total_ns for saved in (0.9, 1.0, 0.5)),
                )
            ],
            confidence_notes=["recording Python stacks lengthens Python time"],
            **(
                self.case(case_by_name("many operators", location, self.cases))
                if many
                else use.advice("the step")
                if use
                else {}
            ),
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
        clipped, trained = TraceBuilder(gpu=None), TraceBuilder(gpu=None)
        for _ in clipped.steps():
            with clipped.python("train.py(30): main"):
                with clipped.python("nn.Module: Net_0"):
                    clipped.on_host("aten::mm", 3000)
                with clipped.python("train.py(12): clip"):
                    for _ in range(40):
                        clipped.on_host("aten::norm", 50)
        for number in trained.steps():
            with trained.python("train.py(30): main"):
                with trained.python("train.py(12): loss"), trained.op("aten::mm", sequence=number):
                    trained.host(3000)
                node = "autograd::engine::evaluate_function: MmBackward0"
                with (
                    trained.python("torch/_tensor.py(566): backward"),
                    trained.op(node, sequence=number),
                ):
                    trained.host(3000)
        return {
            "sleep in the loop": b,
            "gradients clipped one by one": clipped,
            "a loss as a function": (trained, "ns < self.min_share * a.span_ns"),
            "Python around operators": (light, "min_share"),
            "PyTorch around small operators": (modules, "ns < self.min_share * a.span_ns"),
            "before the steps": (before, "function is None"),
            "a GPU trains": (device, "not a.trains_on_host"),
            "a small model": (small, "min_ms"),
        }


_EXCLUDED = r"(?:^|/)advisor/recorder/|<built-in function collect>"
"""The recorder's own code, and garbage collections, which another rule checks."""


class FunctionTime(NamedTuple):
    """Time of a function of the user's code in the analysed steps."""

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
    """Number of operators that run in it, without nested ones."""
    largest_part: str
    """Name of the Python function or operator with most of the time."""
    of_tensors: bool
    """Whether that is an operator, a method of PyTorch or the function itself, not another
    library."""
    stacks: list[SampledStack]
    """Python stacks of its time; samples are in µs."""


class LoopTime:
    """Time of the main thread outside loading, forward, backward and optimizer, by function of the
    user's code."""

    def __init__(self, a: Analysis) -> None:
        self._a = a
        trace = a.trace
        names = trace.cpu["name"]
        self._names = names
        self._parent = stacks.parent_rows(trace)
        is_user = (stacks.code_owners(trace) == stacks.CodeOwner.USER) & ~name_matches(
            names, _EXCLUDED
        ).to_numpy()
        is_user &= ~name_matches(names, NESTED).to_numpy()
        self._function = stacks.innermost_ancestor(self._parent, is_user)
        """Row of the user's function around each row of ``trace.cpu``; -1 if there is none."""
        is_training = name_matches(names, TRAINS).to_numpy()
        in_graph = np.zeros(trace.cpu.height, dtype=bool)
        in_graph[a.forward_op[a.forward_op >= 0]] = True
        excluded = is_training | in_graph | name_matches(names, _EXCLUDED).to_numpy()
        self._is_excluded = stacks.innermost_ancestor(self._parent, excluded) >= 0
        self._rows = self._measure_rows(bool(is_training.any()))
        training = self._function[np.flatnonzero(is_training)]
        self._trainers = set(self._list_enclosing(training[training >= 0])["name"].to_list())

    def _measure_rows(self, trains: bool) -> pl.DataFrame:
        """Return the main thread's time by row: ``row``, ``function`` (its row), ``ns``, ``python``
        (whether outside operators and PyTorch's Python)."""
        a = self._a
        main = a.trace.main_thread
        assert main is not None
        pieces = a.timeline.pieces_within(main, a.spans.start, a.spans.end)
        python, dispatch = CLASS_CODE["python"], CLASS_CODE["dispatch"]
        is_counted = (pieces.row >= 0) & np.isin(
            pieces.code, [python, dispatch] if trains else [python]
        )
        rows = pieces.row[is_counted]
        frame = self._function[rows].astype(np.int64)
        pytorch_row, loop_row = (
            stacks.innermost_ancestor(self._parent, name_matches(self._names, pattern).to_numpy())[
                rows
            ]
            for pattern in (PYTORCH, OF_LOOP)
        )
        is_python = (pieces.code[is_counted] == python) & ~(
            (pytorch_row > frame) & ~(loop_row > frame)
        )
        return (
            pl.DataFrame(
                {
                    "row": rows.astype(np.int64),
                    "function": frame,
                    "ns": (pieces.end - pieces.start)[is_counted],
                    "python": is_python,
                }
            )
            .filter((pl.col("function") >= 0) & ~pl.Series(self._is_excluded[rows]))
            .group_by("row", "function", "python")
            .agg(pl.col("ns").sum())
        )

    def _list_enclosing(self, functions: Rows) -> pl.DataFrame:
        """Return all the user's functions around these rows: ``function``, ``around``, ``name``."""
        origins = np.unique(functions).astype(np.int64)
        levels, rows = [], origins
        while (rows >= 0).any():
            origins, rows = origins[rows >= 0], rows[rows >= 0]
            levels.append(pl.DataFrame({"function": origins, "around": rows}))
            parent = self._parent[rows]
            rows = np.where(parent >= 0, self._function[np.maximum(parent, 0)], -1).astype(np.int64)
        if not levels:
            return pl.DataFrame({"function": [], "around": [], "name": []})
        table = pl.concat(levels)
        return table.with_columns(name=self._names.gather(table["around"]).cast(pl.String))

    def largest(self, min_share: float) -> FunctionTime | None:
        """Return the deepest function with at least ``min_share`` of the largest function's time.
        In a function that also trains, only its own Python counts."""
        rows = self._rows
        if rows.is_empty():
            return None
        chains = self._list_enclosing(rows["function"].to_numpy())
        helpers = chains.filter(~pl.col("name").is_in(list(self._trainers)))
        inclusive = (
            rows.join(helpers.unique(["function", "name"]), on="function")
            .group_by("name")
            .agg(pl.col("ns").sum())
        )
        own_names = chains.filter(pl.col("function") == pl.col("around"))
        own_python = rows.filter("python").join(own_names, on="function")
        own_python = own_python.filter(pl.col("name").is_in(list(self._trainers)))
        own_python = own_python.group_by("name").agg(pl.col("ns").sum())
        table = pl.concat([inclusive, own_python]).sort("ns", "name", descending=[True, False])
        if table.is_empty():
            return None
        name, ns = table.row(0)
        is_trainer = name in self._trainers
        if not is_trainer:
            inner = helpers.filter(pl.col("name") == name)["function"].unique()
            callees = (
                rows.filter(pl.col("function").is_in(inner.to_list()))
                .join(helpers.unique(["function", "name"]), on="function")
                .group_by("name")
                .agg(pl.col("ns").sum())
                .filter(pl.col("ns") >= min_share * ns)
            )
            depth = (
                helpers.with_columns(depth=self._a.trace.cpu["depth"].gather(helpers["around"]))
                .group_by("name")
                .agg(pl.col("depth").max())
            )
            callees = callees.join(depth, on="name").sort("depth", "name", descending=[True, False])
            name, ns = callees.row(0)[:2]
        return self._describe(name, ns, only_python=is_trainer)

    def _describe(self, name: str, ns: int, *, only_python: bool) -> FunctionTime:
        cpu = self._a.trace.cpu
        frames = np.flatnonzero((self._names == name).to_numpy())
        ts, end = (cpu["ts"].to_numpy()[frames], (cpu["ts"] + cpu["dur"]).to_numpy()[frames])
        frames_ns = intersect(union(ts, end), self._a.spans).total
        in_frames = np.zeros(cpu.height, dtype=bool)
        in_frames[frames] = True
        rows = self._rows.filter("python") if only_python else self._rows
        is_inside = stacks.climb_stack(self._parent, in_frames, rows["row"].to_numpy()) >= 0
        rows = rows.filter(pl.Series(is_inside))
        if only_python:
            rows = rows.filter(pl.Series(in_frames[rows["function"].to_numpy()]))
        called = rows.with_columns(name=self._names.gather(rows["row"]).cast(pl.String))
        called = called.with_columns(pl.col("name").str.replace(r" of .* at 0x\w+>$", ">"))
        parts = called.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name")
        operators = 0 if only_python else self._count_operators(in_frames)
        top = parts["name"][-1]
        is_library = stacks.parse_frame(top) is not None and not re.search(PYTORCH, top)
        frames_in_steps = frames[(end > self._a.spans.start.min()) & (ts < self._a.spans.end.max())]
        return FunctionTime(
            name=name,
            row=int(rows.sort("ns")["function"][-1]) if only_python else int(frames_in_steps[-1]),
            ns=int(ns),
            total_ns=max(int(frames_ns), int(ns), 1),
            calls=len(frames_in_steps),
            operators=operators,
            largest_part=labels.clean(top),
            of_tensors=top == name or not is_library,
            stacks=stacks_of_rows(self._a, rows["row"].to_numpy(), rows["ns"].to_numpy()),
        )

    def _count_operators(self, in_frames: NDArray[np.bool_]) -> int:
        """Count operators of the analysed steps inside these rows, without nested ones."""
        rows = rows_in_steps(self._a, stacks.outermost_rows(self._a.trace))
        rows = rows[~self._is_excluded[rows]]
        return int((stacks.climb_stack(self._parent, in_frames, rows) >= 0).sum())

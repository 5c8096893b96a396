"""Time of the loop that is no training: its own code, and work between the steps."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import (
    HOST_CODE,
    Finding,
    Impact,
    Location,
    Outcomes,
    Select,
    impact_without_gain,
)
from advisor.core.intervals import intersect, union
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.host import stacks
from advisor.measure.host.library_time import stacks_of_rows
from advisor.measure.host.names import name_matches
from advisor.measure.host.sampled_code import model_call
from advisor.measure.host.stacks import LOOP, NESTED, HottestLine, SampledStack, parse_frame
from advisor.measure.steps.step_records import StepRecords
from advisor.measure.steps.steps import rows_in_steps
from advisor.measure.steps.timeline import CODE
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    LOOP_SHARE,
    Rows,
    amount_per_step,
    impact_over_run,
    impact_per_step,
    locate_row,
    of_step,
    own_phases,
    recorded_steps,
    row_numbers,
    scale_edit,
    steps_seen,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.rules.support.library_functions import find_library_use
from advisor.rules.support.loop_operators import (
    TRAINS,
    WholeOperators,
    backward_of,
    differentiated_operators,
    largest_operators,
    name_operators,
    operator_time,
    operators_beside_training,
    whole_operators,
)
from advisor.testing import Examples, TraceBuilder


class LoopRule(Rule):
    """Base of the rules about the loop's own code: what to do about it."""

    host_check = "the loop's own code"
    is_python_time = True
    references = ("https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",)

    min_ms = Threshold(0.5, "ms per step: Python around small models takes as long", CHOSEN)
    min_tensor_operators = Threshold(
        32, "operators per step in a function: a loop over tensors", CHOSEN
    )

    fix = (
        "Take this code out of the step: run it every N steps, compute its result once, or prepare "
        "it in a DataLoader worker. Where it waits (a sleep, a server, a lock), wait in another "
        "thread."
    )
    code = "if step % 100 == 0:       # not in every step\n    log(metrics)"
    inference: ClassVar[Mapping[str, Any]] = {
        "fix": "Compute once what is the same for many requests, and keep it. Replace loops and "
        "sorted() over elements by operators on whole tensors or NumPy arrays, such as topk. Or "
        "do this work in another process, while the model runs on the next batch. Where it waits "
        "(a sleep, a server, a lock), wait in another thread.",
        "code": "",
        "assumptions": (
            "the result can be kept, computed on whole arrays, or made beside the model",
        ),
    }
    verify = "Record again: the step is shorter by this code's time."
    falsified_by = "the same step time without this code"
    assumptions = ("the step can go on without this code's result",)
    confidence = 0.75
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "many operators": {
            "title": "A function of the loop runs many small operators in each step",
            "fix": "Run each operation once on all tensors. Use torch._foreach_norm and the like "
            "for lists of parameters, and clip_grad_norm_(foreach=True) to clip. For metrics, run "
            "one operator on the whole batch. Read results with .item() once, after the loop, or "
            "every N steps.",
            "code": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)\n"
            "# metrics: one operator on the batch, such as\n"
            "torch.bincount(target * n + predicted, minlength=n * n)",
            "assumptions": ("its work can be done on all tensors at once, or in fewer steps",),
        }
    }


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
_PYTORCH = r"(?:^|/)torch/.*\.py\("
_SORTS = r"^aten::(?:arg|m)?sort$"
_OF_LOOP = r"(?:^|/)torch/(?:serialization|utils/tensorboard)"
"""Files of PyTorch that are the loop's own code; no loop can do without its Python elsewhere."""


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
            for pattern in (_PYTORCH, _OF_LOOP)
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
        library = stacks.parse_frame(top) is not None and not re.search(_PYTORCH, top)
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


_SOME_VALUES: Mapping[str, Any] = {
    "assumptions": ("only the largest or smallest values are used",),
    "falsified_by": "a result that needs the order of all values",
    "alternatives": "sort",
}
"""Assumption of the advice for a sort."""


class _OwnCode(NamedTuple):
    """The loop's own code in a step; times in ns, of the run's step."""

    ns: float
    by_hand: float
    """Time without that of operators that nothing replaces."""
    of_window: float
    """Time of the run's step over that of the window's."""
    rows: Rows
    replaceable: Rows
    """Rows of operators that the backward pass goes through and something replaces."""
    line: HottestLine | None
    case: str
    """``the loss``, ``many operators`` or empty."""
    largest: dict[str, float]


def _gain_of(a: Analysis, own: float, what: str, *, loss: bool = False) -> Impact:
    """Return the gain of a fix for code of so much recorded time, ns of a step. A loss is
    computed all the same, in another way."""
    return impact_per_step(
        a,
        (0.4 if loss else 0.9) * own,
        low=0 if loss else 0.5 * own,
        high=own,
        method=f"recorded host time of {what}",
        of_median=not recorded_steps(a).varies,
    )


class LoopPhases(LoopRule):
    """Code between training phases adds to each step where the training computes on the CPU.
    Without stacks, which loop-code needs, this rule takes its time from the recorder's phases:
    ``between steps`` and ``other`` are neither loading, forward, backward nor optimizer. Evaluation
    between steps is left out, and so are pauses for garbage collection. The Python stacks that the
    recorder samples outside its windows name the function. Where they show that one function takes
    the time, half as much is reported. Those in calls of torch.distributed are
    no code of the loop but a wait for other ranks. Their share is left out too.

    Where half of these stacks are in one kind of library function, such as ``json.dumps``, the
    advice is about that. Products of matrices, and losses that are one function of PyTorch already,
    have no replacement. They gain nothing, and are named where they are most of this time. If their
    loss is over many classes, the labels that it ignores may save much: ignored-labels reports that
    where the recorder met the loss."""

    id = "loop-phases"
    subject = HOST_CODE
    title = "Code between the training phases takes much of the step"
    inference: ClassVar[Mapping[str, Any]] = {
        **LoopRule.inference,
        "title": "Code outside the model takes much of the step",
    }
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **LoopRule.cases,
        "the loss": {
            "title": "Operators outside the model, such as the loss, take much of the step",
            "fix": "Use PyTorch's own functions. cross_entropy takes logits and class numbers, in "
            "place of softmax, logarithm and one-hot vectors. Use binary_cross_entropy_with_logits "
            "in place of sigmoid and logarithm. torch.cdist makes distances of all pairs without a "
            "tensor of their differences. With torch.compile you fuse what has no such function.",
            "code": "loss = F.cross_entropy(logits, target)\n"
            "# not -(F.one_hot(target) * logits.softmax(-1).log()).sum(-1).mean()\n\n"
            "distances = torch.cdist(a, b)\n"
            "# not (a[:, :, None] - b[:, None]).square().sum(-1).sqrt()",
            "assumptions": ("one function of PyTorch, or a compiled one, computes the same",),
            "falsified_by": "the same step time with that function",
            "alternatives": "loss",
        },
        "scores": {
            "title": "Scores of many classes, for a loss, take much of the step",
            "fix": "Check how many labels the loss ignores: the recording does not show it. If it "
            "ignores many, compute scores only where there is a label. Loss and gradients stay the "
            "same.",
            "code": "keep = labels != -100                  # or your ignore_index\n"
            "loss = F.cross_entropy(head(hidden[keep]), labels[keep])",
            "assumptions": ("the loss ignores many labels", "only the loss uses the scores"),
            "falsified_by": "few labels that are ignored",
        },
        "products": {
            "title": "{operator} outside the model takes much of the step",
            "fix": "Check whether all of its result is used, and whether it is the same in "
            "several steps. This is one call of PyTorch already: only a smaller input or fewer "
            "calls take less time.",
            "assumptions": ("part of its result is not used, or is known from a step before",),
            "falsified_by": "a result that is used as a whole, and differs in each step",
        },
        "a sort": {
            "title": "Sorting outside the model takes much of the step",
            "fix": "Take the values that are used with torch.topk: it does not sort all. "
            "torch.kthvalue finds one value of an order.",
            "code": "values, ids = torch.topk(scores, k)     # not argsort or sort\n"
            "# the smallest: largest=False",
            **_SOME_VALUES,
        },
        "a sort before sampling": {
            "title": "Sorting outside the model takes much of the step",
            "fix": "Take the largest values with torch.topk first: it does not sort all. Then "
            "normalise, add up and sample only these.",
            "code": "values, ids = torch.topk(logits, k)     # not torch.sort(logits)\n"
            "probs = values.softmax(-1)\n"
            "token = ids.gather(-1, torch.multinomial(probs, 1))",
            **_SOME_VALUES,
        },
    }
    min_sort_share = Threshold(
        0.2, "of this time in sorts, from which they are named first", CHOSEN
    )
    max_small_us = Threshold(100, "µs per operator on average: longer ones compute", CHOSEN)
    min_operator_share = Threshold(
        1 / 3,
        "of this time in operators: otherwise a loop over tensors is not what takes it",
        CHOSEN,
    )
    min_product_share = Threshold(
        0.5, "of the operators' time in products and in losses that are one function", CHOSEN
    )
    min_classes = Threshold(1000, "classes: scores of fewer are seldom what takes time", CHOSEN)
    min_loss_share = Threshold(
        1 / 3, "of this time the backward pass goes through: it is the loss", CHOSEN
    )
    min_share = Threshold(
        LOOP_SHARE, "of the step; four times what counts where a GPU waits", XPROF
    )
    min_named_share = Threshold(
        0.10, "of the step in one function that sampled stacks name, as in loop-code", XPROF
    )
    reads_record = True
    found_in = ("recorded/waiting_loop.slow", "recorded/histograms.slow")
    silent_in = (
        "recorded/waiting_loop.cured",
        "recorded/histograms.cured",
        "recorded/anomaly.cured",
        "recorded/leak.cured",
    )
    validation_note = (
        "CPU recordings that sleep 0.1 s in each step, and that log histograms of weights and "
        "gradients; silent without"
    )

    def check(self, a: Analysis) -> Outcomes:
        recorded = recorded_steps(a)
        if not a.trains_on_host or (a.trace.cpu["kind"] == "python").any():
            return
        spent = {name: recorded.typical(own) for name, own in own_phases(recorded).items()}
        pauses = recorded.typical(recorded.column("gc")[recorded.used]) if recorded.count else 0.0
        step, ns = (
            (recorded.mean if recorded.varies else recorded.median) or 0.0,
            sum(spent.values()) - pauses,
        )
        ns = ns * recorded.loop_share if recorded.loop_share is not None else ns - _waits(a, step)
        line = recorded.hottest_line(LOOP)
        limit = self._limit(recorded, line)
        if not step or ns < limit * step or ns < self.min_ms * 1e6:
            return
        rows = operators_beside_training(a)
        differentiated = differentiated_operators(a, rows)
        learnt = min(ns, operator_time(a, differentiated) * step / max(a.step_ns, 1))
        loss = learnt >= self.min_loss_share * ns
        ns -= 0 if loss else learnt
        limit = self.min_share if loss else limit
        if ns < limit * step or ns < self.min_ms * 1e6:
            return
        operators = len(rows) / max(a.step_count, 1)
        many = (
            line is not None
            and line.library_function is None
            and operators >= self.min_tensor_operators
        )
        spent_in_them = operator_time(a, rows)
        of_window = step / max(a.step_ns, 1)
        computes = spent_in_them * of_window >= self.min_operator_share * ns
        many = many and computes
        many = many and spent_in_them <= self.max_small_us * 1e3 * operators
        whole = whole_operators(a, rows) if loss else None
        fixed = 0.0 if whole is None else operator_time(a, whole.rows)
        by_hand = ns - fixed * of_window
        replaceable = by_hand >= self.min_share * step
        if (
            whole is not None
            and fixed >= self.min_product_share * spent_in_them
            and not replaceable
        ):
            yield from self._whole(a, whole, line, fixed * of_window / step)
            return
        largest = largest_operators(a, rows) if computes else {}
        parts = differentiated[~np.isin(differentiated, [] if whole is None else whole.rows)]
        case = "the loss" if loss else "many operators" if many else ""
        code = _OwnCode(ns, by_hand, of_window, rows, parts, line, case, largest)
        gain, place, texts, sentence = self._cure(a, code)
        yield Finding(
            summary=(
                f"The loop's own code takes {t.format_duration(ns)} of the "
                f"{'mean' if recorded.varies else 'median'} step "
                f"({ns / step:.0%}), outside loading, forward, backward and optimizer. "
                + "The backward pass goes through much of it. " * loss
                + (sentence or _most_of_it(line))
                + name_operators(largest, spent_in_them)
            ),
            evidence=[
                Evidence("the loop's own code", ns, "ns", per="step"),
                *(
                    Evidence(f"phase '{name}'", own, "ns", per="step")
                    for name, own in spent.items()
                ),
                *(
                    [self.compare("share", ns / step, "min_share", per="step")]
                    if line is None or ns >= self.min_share * step
                    else [
                        self.compare(
                            "share of this function",
                            line.share * ns / step,
                            "min_named_share",
                            per="step",
                        )
                    ]
                ),
                *([Evidence("operators in it", operators, "count", per="step")] if many else []),
                steps_seen(recorded),
            ],
            where=[] if place is None else [place],
            impact=gain,
            **texts,
        )

    def _cure(
        self, a: Analysis, code: _OwnCode
    ) -> tuple[Impact, Location | None, dict[str, Any], str]:
        """Return the gain, the place and the texts of what to do about the code, and the sentence
        on a library function that takes most of it (``""``: none does)."""
        recorded, line, loss = recorded_steps(a), code.line, code.case == "the loss"
        gain = impact_per_step(a, code.by_hand, of_median=not recorded.varies)
        place = None if line is None else line.location
        if line is not None:
            own = line.share * code.by_hand
            own += backward_of(a, code.replaceable) * code.of_window if loss else 0
            gain = _gain_of(a, own, "this function", loss=loss)
        sorts = sum(own for name, own in code.largest.items() if re.search(_SORTS, name))
        most = max(code.largest.values(), default=0)
        if sorts and (sorts >= self.min_sort_share * code.ns if code.case else sorts == most):
            if code.case:  # the rest of this code stays
                gain = _gain_of(a, sorts * code.of_window, "the sorts")
            names = a.trace.cpu["name"].gather(code.rows)
            samples = name_matches(names, r"^aten::multinomial$").any()
            return gain, place, self.case("a sort before sampling" if samples else "a sort"), ""
        if code.case:
            return gain, place, self.case(code.case), ""
        use = find_library_use([each for each in recorded.stacks if each.part == LOOP])
        known = {} if use is None else use.advice("the step")
        if use is None or not known:
            return gain, place, {}, ""
        gain = _gain_of(a, use.time.share * code.ns, "this library function")
        return gain, use.time.location or place, known, use.sentence("it").strip()

    def _whole(
        self, a: Analysis, whole: WholeOperators, line: HottestLine | None, share: float
    ) -> Outcomes:
        """Report products and the like, which nothing can replace: what they are, and for a loss
        over many classes what may be left out of them."""
        scores = whole.classes >= self.min_classes
        if scores and recorded_steps(a).record.events_of("labels"):
            return  # what the loss ignores is known: ignored-labels reports it
        ns, name = operator_time(a, whole.rows), str(a.trace.cpu["name"][whole.row])
        place = None if line is None else line.location
        yield Finding(
            summary=(
                f"Products and losses outside the model's call take {share:.0%} of the step, "
                f"without their backward pass. Most of it is {whole.name(a)}"
                + ("." if place is None else f", at {place.function} ({place.file}:{place.line}).")
            ),
            evidence=[
                Evidence("products and losses beside the model", ns, "ns", per="step"),
                self.compare("share", share, "min_share", per="step"),
                *([Evidence("classes", whole.classes, "count")] if scores else []),
                steps_seen(recorded_steps(a)),
            ],
            where=[place or Location(op=name)],
            impact=impact_without_gain(
                "how many labels the loss ignores was not recorded"
                if scores
                else "the recording does not show that part of this work is not needed"
            ),
            **self.case("scores" if scores else "products", operator=labels.clean(name)),
        )

    def _limit(self, recorded: StepRecords, line: HottestLine | None) -> float:
        """Share of the step from which this time is reported: less where the sampled stacks show
        that one function takes it. Of a function that also trains, such as the loop itself,
        PyTorch's code around operators does not count."""
        if line is None:
            return float(self.min_share)
        place, own, total = line.location, 0, 0
        trains = any(
            stack.part in ("forward", "backward", "optimizer") and _position(stack, place) >= 0
            for stack in recorded.stacks
        )
        for stack in (each for each in recorded.stacks if each.part == LOOP):
            inside, total = _position(stack, place), total + stack.samples
            below = stack.frames[inside + 1 :] if inside >= 0 and trains else ()
            pytorch = any(re.search(_PYTORCH, f) and not re.search(_OF_LOOP, f) for f in below)
            own += stack.samples * (inside >= 0 and not pytorch)
        return float(min(self.min_share, self.min_named_share * total / max(own, 1)))

    @staticmethod
    def examples() -> Examples:
        stacks = _recorded(forward=2, backward=2)
        with stacks.step(), stacks.python("train.py(30): main"):
            stacks.host(300)
        loss, mined, counts, order, drawn = (_recorded(forward=2, backward=2) for _ in range(5))
        for b, learnt, name in (
            (loss, True, "aten::log"),
            (mined, True, "aten::log"),
            (counts, False, "aten::log"),
            (order, False, "aten::sort"),
            (drawn, False, "aten::sort"),
        ):
            for number in b.steps():
                with b.range("advisor::forward"), b.op("aten::linear", host_us=2000):
                    pass
                with b.op(name, sequence=number if learnt else None, host_us=6000):
                    pass
                if b is mined:
                    b.on_host("aten::sort", 3000)
                if b is drawn:
                    b.on_host("aten::multinomial", 50)
                node = "autograd::engine::evaluate_function: LogBackward0"
                with b.op(node, sequence=number if learnt else None, host_us=2000):
                    pass
        return {
            "a loss by hand": loss,
            "a sort in the loss": mined,
            "metrics by hand": counts,
            "a sort of all values": order,
            "a sort before sampling": drawn,
            "a wait between steps": _recorded(forward=2, backward=2, **{"between steps": 6}),
            "stacks were sampled": _recorded(sampled=20, forward=2, backward=2),
            "a function of a sixth of the step": _recorded(sampled=20, forward=4.3, backward=4),
            "a sixth of the step, not sampled": (_recorded(forward=4.3, backward=4), "min_share"),
            "PyTorch in the loop itself": (
                _recorded(sampled=20, clips=1, forward=4.3, backward=4),
                "min_share",
            ),
            "evaluation": (_recorded(evaluation=20, forward=3.5, backward=6), "min_share"),
            "a small model": (_recorded(0.6, forward=0.2), "min_ms"),
            "stacks": (stacks, "== 'python').any()"),
        }


def _waits(a: Analysis, step: float) -> float:
    """Waits per step for collectives that the loop itself calls, by the window, ns of the run."""
    table = a.collectives
    if a.device_id is not None or table.is_empty() or not a.step_ns:
        return 0.0
    trains = name_matches(a.trace.cpu["name"], TRAINS).to_numpy()
    of_loop = stacks.climb_stack(stacks.parent_rows(a.trace), trains, row_numbers(table["op"])) < 0
    waits = table.filter(pl.Series(of_loop))["exposed"].to_numpy().sum()
    return float(waits) / a.step_count * step / a.step_ns


def _most_of_it(line: HottestLine | None) -> str:
    if line is None:
        return "advisor record --deep shows its lines."
    place, inside = line.location, f", in {line.library_function}" if line.library_function else ""
    return (
        f"{line.share:.0%} of the sampled stacks are in {place.function} "
        f"({place.file}:{place.line}){inside}."
    )


def _position(stack: SampledStack, place: Location) -> int:
    """Return where a function's innermost frame is in a stack; -1: nowhere."""
    for index in reversed(range(len(stack.frames))):
        frame = parse_frame(stack.frames[index])
        if frame is not None and (frame.file, frame.function) == (place.file, place.function):
            return index
    return -1


def _recorded(ms: float = 10, sampled: int = 0, clips: int = 0, **phases: float) -> TraceBuilder:
    b = TraceBuilder(gpu=None)
    run = b.record_of_run()
    run.steps(60, ms, **phases)
    if sampled:
        below = "torch/nn/utils/clip_grad.py(40): clip" if clips else "train.py(12): log"
        backward = "torch/_tensor.py(623): Tensor.backward"
        frames = ["train.py(50): <module>", "train.py(30): main", below, backward]
        run.event("stacks", frames=frames, stacks=[[sampled, [0, 1, 2]], [sampled, [0, 1, 3]]])
    return b


class TimeBetweenSteps(Rule):
    """Much of the run is spent between the training steps: evaluation, checkpoints, rollouts,
    generation of samples. The recorder tells this time from that of the steps.

    Evaluation is wanted, but how often it runs and on how much data is a choice. It needs no
    gradients and allows larger batches than training. What comes before the first step (imports,
    making the model) does not count."""

    id = "time-between-steps"
    title = "Much of the run is spent between the training steps"
    verdict_role = "time between steps"
    reads_record = True
    found_in = ("recorded/waiting_loop.slow",)
    silent_in = ("recorded/waiting_loop.cured", *CURED_RECORDINGS)
    validation_note = "a CPU recording that evaluates every twenty steps on much data"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    )

    min_share = Threshold(0.30, "of the time of steps and what lies between them", CHOSEN)
    min_steps = Threshold(20, "steps: fewer do not show how often it comes", CHOSEN)
    saved_share = Factor(0.5, "of that time, by evaluating half as often", CHOSEN)
    min_paused_share = Threshold(
        0.5, "of the steps follow a pause: evaluation comes less often", CHOSEN
    )

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
    alternatives = "between steps"
    cases = {
        "before each step": {
            "fix": "If these are rollouts, step several environments at once, in their own "
            "processes. Infer for all in one batch, and take several steps with each rollout.",
            "code": "envs = gymnasium.vector.AsyncVectorEnv([make_env] * 8)   # one process each",
            "assumptions": ("rollouts can run beside each other",),
        },
        "rollouts": {
            "fix": "Call the policy once for all environments, not once for each: it takes a first "
            "dimension of samples. Step the environments in processes of their own, and take "
            "several training steps with each rollout.",
            "code": "with torch.inference_mode():\n"
            "    actions = policy(torch.as_tensor(observations))   # of all environments\n"
            "observations, rewards, *_ = envs.step(actions.cpu().numpy())",
            "assumptions": ("the policy is called for single environments, or they wait for it",),
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        recorded = recorded_steps(a)
        begin, end = recorded.span
        outside = recorded.outside_steps_ns
        steps = int(recorded.used.sum())
        if steps < self.min_steps or recorded.inference or end <= begin:
            return
        whole = recorded.after_first_ns
        if outside < self.min_share * whole:
            return
        times = sum(step.evaluation > 0 for step in recorded.steps if step.n)
        each = times >= self.min_paused_share * steps
        place = _rollout_of(recorded.stacks)
        case = "rollouts" if place is not None else "before each step" if each else ""
        what = "rollouts" if place is not None else "evaluation, checkpoints and the like"
        yield Finding(
            summary=(
                f"{t.format_duration(outside)} ({outside / whole:.0%} of the time after the first "
                f"step) lie between the training steps, in {t.count_noun(times, 'pause')} "
                + ("before most steps." if each else f"for {what}.")
            ),
            where=[] if place is None else [place],
            evidence=[
                Evidence("time between steps", outside, "ns"),
                self.compare("share of the run", outside / whole, "min_share"),
                Evidence("pauses", times, "count"),
                steps_seen(recorded),
            ],
            impact=impact_over_run(
                self.saved_share * outside, high=outside, method="half of the time between steps"
            ),
            **(self.case(case) if case else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "evaluation every ten steps": _evaluated(every=10, ms=400),
            "rollouts every ten steps": _evaluated(every=10, ms=400, rollouts=True),
            "a rollout before each step": _evaluated(every=1, ms=12),
            "a short evaluation": (_evaluated(every=20, ms=40), "min_share"),
            "a few steps": (_evaluated(every=3, ms=400, steps=12), "min_steps"),
        }


_ROLLOUT = re.compile(
    r"(?i)(?:gym(?:nasium)?|pettingzoo|envpool|stable_baselines3|torchrl)/"
    r"|: (?:\w+\.)*_?(?:(?:collect_|do_|run_)?rollouts?|act|(?:select|choose|sample)_actions?"
    r"|collect_(?:experience|trajector(?:y|ies)|samples)|self_play)$"
)
"""Frames of code that lets a policy act in environments: libraries of these, usual names."""


def _rollout_of(samples: Sequence[SampledStack]) -> Location | None:
    """Return the user's line that most sampled stacks of rollouts are in, outside of modules;
    ``None``: there are too few of them."""
    lines: Counter[str] = Counter()
    for stack in samples:
        outer = stack.frames[: model_call(stack.frames)]
        own = [frame for frame in outer if stacks.frame_rank(frame) == 2]
        if own and any(map(_ROLLOUT.search, stack.frames)):
            lines[own[-1]] += stack.samples
    frame = parse_frame(max(lines, key=lines.__getitem__)) if lines else None
    if frame is None or lines.total() < stacks.MIN_SAMPLES:
        return None
    return Location(file=frame.file, line=frame.line, function=frame.function)


def _evaluated(*, every: int, ms: float, steps: int = 80, rollouts: bool = False) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    if rollouts:
        r.event(
            "stacks",
            frames=["train.py(90): main", "train.py(40): rollout", "train.py(31): act"],
            stacks=[[20, [0, 1, 2]]],
        )
    for n in range(steps):
        r.step(10, forward=3, backward=6, evaluation=ms if n and n % every == 0 else 0)
    return b

"""Passes of a model on one input that repeat all operators before the first random one."""

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Finding, Outcomes
from advisor.core.intervals import covered_length
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.operator_arguments import inputs_at
from advisor.measure.host.module_calls import FORWARD_RANGE
from advisor.measure.host.names import name_matches
from advisor.measure.steps.steps import step_of
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    of_step,
    outermost_in_steps,
    run_steps_of,
)
from advisor.rules.support.kernel_work import scale_operators, time_of_operators, with_backward
from advisor.rules.support.repeated_inputs import read_repeats
from advisor.testing import Examples, TraceBuilder

RANDOM = (
    r"^aten::(?:bernoulli_?|native_dropout|_fused_dropout|rand\w*|normal_?|uniform_|exponential_"
    r"|multinomial|poisson|rrelu_with_noise\w*|_(?:cudnn|miopen)_rnn|miopen_rnn"
    r"|_scaled_dot_product_(?:flash|efficient|cudnn)_attention)$"
)
"""Operators that draw random numbers, or do so for some arguments."""
DROPOUT_POSITIONS = {
    "aten::_scaled_dot_product_flash_attention": 3,
    "aten::_scaled_dot_product_efficient_attention": 5,
    "aten::_scaled_dot_product_cudnn_attention": 5,
}
"""Position of the share of dropout among an operator's arguments."""


class _ModuleCall(NamedTuple):
    """Call of an outermost module."""

    step: int
    rows: list[int]
    """Rows of ``trace.cpu`` of the outermost operators before the first random one."""
    random_row: int
    """Row of the first random operator, or -1 if there is none."""
    operators: tuple[Any, ...]
    """Names of all operators, and positions in ``trace.inputs`` of those in ``rows``."""
    number: int = 0
    """Number of earlier calls of the step with equal operators."""


class RepeatedTrunk(Rule):
    """A model runs several times on one input, and dropout makes each result another: Monte-Carlo
    dropout, or several views of a batch. Everything before the first random operator is the same in
    each pass, and could run once. A part without random operators that runs several times on one
    input could run once too.

    The recorder compares module, weights and input of 12 of 60 forward passes. The trace shows
    passes with equal operators and shapes in each step, and where the first random operator is. If
    the recorder saw few inputs again, the rule is silent.

    The gain is the time of these operators in all passes but the first, with their backward
    passes."""

    id = "repeated-trunk"
    title = "Passes on one input repeat the part before dropout"
    reads_record = True
    sampled_part = "forward"
    found_in = ("recorded/dropout_samples.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "a CPU recording, torch 2.13, and its cure: 24 ms predicted, 33 ms measured. Another, an "
        "inference not in the tests: 57% of the step predicted, 73% measured"
    )
    references = ("https://arxiv.org/abs/1506.02142",)

    min_forwards = Threshold(12, "forwards that were compared: one sample", CHOSEN)
    min_repeated_ratio = Threshold(
        0.6, "of the repeated passes of a step had the input of an earlier one", CHOSEN
    )
    min_share = Threshold(0.05, "of the step in operators that run again", XPROF)
    worst_saved_share = Factor(0.6, "of the time is saved, at worst", CHOSEN)

    fix = (
        "Run the part before the first random operator once, and only the rest in each pass. "
        "Split the module into two, for example a trunk and a head."
    )
    code = (
        "z = model.trunk(x)        # once: nothing in it is random\n"
        "out = torch.stack([model.head(z) for _ in range(samples)])\n"
        "# not [model(x) for _ in range(samples)]"
    )
    cases: ClassVar[dict[str, dict[str, Any]]] = {
        "nothing random": {
            "title": "A module runs several times on one input",
            "fix": "Call the module once, and use its output again: the same input gives the same "
            "output. Gradients of all its uses add up.",
            "code": "z = encoder(x)            # once, not for each use of z\n"
            "results = [head(z) for head in heads]",
        }
    }
    verify = "Record again: the operators of this part run once per step. Compare the results."
    falsified_by = (
        "a benchmark on one input, or batch norm in training: each pass updates its averages"
    )
    assumptions = ("the operators before the first random one depend only on input and weights",)
    needs_shapes = True
    confidence = 0.85

    def check(self, a: Analysis) -> Outcomes:
        if not a.span_ns:
            return
        run_steps = run_steps_of(a)
        events = run_steps.rank_record.events_of("repeated_inputs")
        modules = [
            module for module in read_repeats(events) if module.forwards >= self.min_forwards
        ]
        module = max(modules, key=lambda module: module.same_input, default=None)
        if module is None:
            return
        calls = _find_calls(a)
        if not calls:
            return
        again = [each for each in calls if each.number]
        share, expected = 1.0, len(again) / len(calls)
        if run_steps.inference and not again and not module.has_one_input:
            # a step is one pass
            again, share, expected = calls, module.share_with_same_input, 0.5
        if module.same_input < self.min_repeated_ratio * expected * module.forwards or not again:
            return
        rows = np.array([row for each in again for row in each.rows])
        rows, _ = with_backward(a, rows)
        ns = share * time_of_operators(a, rows)
        if ns < self.min_share * a.span_ns:
            return
        random_row = calls[0].random_row
        until = ""
        if random_row >= 0:
            path = _find_module(a, random_row)
            until = f" up to the first random operator{f' (in {path})' if path else ''}"
        yield Finding(
            summary=(
                f"{module.module} got the input of an earlier call in {module.same_input:,} of "
                f"{module.forwards:,} calls that were compared. Running it again{until} takes "
                f"{of_step(a, ns)}."
            ),
            evidence=[
                amount_per_step(a, "operators that run again", ns),
                amount_per_step(a, "passes with equal operators", len(calls), "count"),
                self.compare("compared forwards", module.forwards, "min_forwards", "count"),
                self.compare(
                    f"calls of {module.module} with the input of an earlier one, of those expected",
                    module.same_input / (expected * module.forwards),
                    "min_repeated_ratio",
                ),
                self.compare_share(a, "operators that run again", ns),
            ],
            where=costliest_places(a, rows, top=1) if module.place is None else [module.place],
            edits=[scale_operators(a, rows, (ns, ns, self.worst_saved_share * ns))],
            **(self.case("nothing random") if random_row < 0 else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "dropout in the head": _build_calls(),
            "on a GPU": _build_calls(gpu="A100"),
            "with gradients": _build_calls(trains=True),
            "nothing is random": _build_calls(random=""),
            "an inference step for each pass": _build_calls(count=1, infers=True),
            "a benchmark on one input": (
                _build_calls(count=1, infers=True, again=11),
                "not again",
            ),
            "dropout at the input": (_build_calls(first=True), "not calls"),
            "other inputs": (_build_calls(again=2), "min_repeated_ratio"),
            "few compared": (_build_calls(forwards=11), "min_forwards"),
            "one pass": (_build_calls(count=1), "not again"),
            "other shapes in each pass": (_build_calls(shapes_differ=True), "not again"),
            "a short trunk": (_build_calls(us=1), "min_share"),
        }


def _find_calls(a: Analysis) -> list[_ModuleCall]:
    """Return calls with equal operators: those whose operators before the first random one take
    most of the time."""
    dur = a.trace.cpu["dur"].to_numpy()
    groups: dict[tuple[Any, ...], list[_ModuleCall]] = {}
    for each in _list_calls(a):
        calls = groups.setdefault((each.random_row < 0, each.operators), [])
        is_first = not calls or calls[-1].step != each.step
        calls.append(each._replace(number=0 if is_first else calls[-1].number + 1))
    times = {
        key: sum(int(dur[each.rows].sum()) for each in calls)
        for key, calls in groups.items()
        if 2 * len({each.step for each in calls}) > a.step_count and not _is_for_metric(a, calls)
    }
    return groups[max(times, key=lambda key: times[key])] if times else []


def _is_for_metric(a: Analysis, calls: list[_ModuleCall]) -> bool:
    """Return whether the calls are those of a second forward, which another rule reports."""
    ts = a.trace.cpu["ts"].to_numpy()[[each.rows[0] for each in calls]]
    is_second = covered_length(ts, ts + 1, a.second_forwards).any()
    return calls[0].random_row < 0 and bool(is_second)


def _list_calls(a: Analysis) -> Iterator[_ModuleCall]:
    """Yield the calls of outermost modules in the analysed steps, in order of time."""
    cpu = a.trace.cpu
    is_main = (cpu["thread"] == a.trace.main_thread).to_numpy()
    ranges = np.flatnonzero((cpu["name"] == FORWARD_RANGE).to_numpy() & is_main)
    ranges = ranges[np.argsort(cpu["ts"].to_numpy()[ranges])]
    begin = cpu["ts"].to_numpy()[ranges]
    end = begin + cpu["dur"].to_numpy()[ranges]
    table = outermost_in_steps(a)
    table = table.filter(pl.Series(is_main[table["row"].to_numpy()])).sort("ts")
    rows, names, inputs = (table[name].to_list() for name in ("row", "name", "inputs"))
    ts = table["ts"].to_numpy()
    op_end = ts + table["ns"].to_numpy()
    random_rows = _list_random_rows(a)
    random_ts = cpu["ts"].to_numpy()[random_rows]
    for index, step in enumerate(step_of(a.steps, begin).to_list()):
        start, stop = np.searchsorted(ts, (begin[index], end[index])).tolist()
        at = int(np.searchsorted(random_ts, begin[index]))
        random_row, until = -1, stop
        if at < len(random_ts) and random_ts[at] < end[index]:
            random_row = int(random_rows[at])
            until = int(np.searchsorted(op_end, random_ts[at], side="right"))
        if step is not None and start < until <= stop:
            operators = (*names[start:stop], *inputs[start:until])
            yield _ModuleCall(step, rows[start:until], random_row, operators)


def _list_random_rows(a: Analysis) -> NDArray[np.int64]:
    """Return operators that draw random numbers in the main thread, as rows by time."""
    cpu = a.trace.cpu
    is_random = name_matches(cpu["name"], RANDOM).to_numpy()
    is_random &= (cpu["thread"] == a.trace.main_thread).to_numpy()
    rows = np.flatnonzero(is_random)
    names, inputs = cpu["name"].gather(rows).to_list(), cpu["inputs"].gather(rows).to_list()
    draws = [
        name not in DROPOUT_POSITIONS
        or index is None
        or inputs_at(a, index).argument(DROPOUT_POSITIONS[name]) != 0
        for name, index in zip(names, inputs, strict=True)
    ]
    rows = rows[np.array(draws, dtype=bool)]
    by_time: NDArray[np.int64] = rows[np.argsort(cpu["ts"].to_numpy()[rows], kind="stable")]
    return by_time


def _find_module(a: Analysis, row: int) -> str:
    """Return the path of the module around a row, or an empty text."""
    calls = a.module_calls
    position = -1 if calls is None else int(calls.find(a.trace, np.array([row]))[0])
    return "" if calls is None or position < 0 else calls.paths[position]


def _build_calls(
    *,
    gpu: str | None = None,
    count: int = 4,
    random: str = "aten::bernoulli_",
    first: bool = False,
    trains: bool = False,
    infers: bool = False,
    again: int = 9,
    forwards: int = 12,
    shapes_differ: bool = False,
    us: float = 900,
) -> TraceBuilder:
    """Build steps of ``count`` calls of a trunk and a head with dropout."""
    b = TraceBuilder(gpu=gpu)
    sequence = 0
    for _ in b.steps():
        sequences = []
        for number in range(count):
            shape = [32 + number * shapes_differ, 128]
            with b.range(FORWARD_RANGE):
                if first:
                    with b.op("aten::dropout", [shape]):
                        b.on_host(random, 5, [shape])
                sequence += 1
                sequences.append(sequence)
                number_of_node = sequence if trains else None
                b.compute("aten::linear", us, [shape, [256, 128]], sequence=number_of_node)
                if random and not first:
                    with b.op("aten::dropout", [shape]):
                        b.on_host(random, 5, [shape])
                b.compute("aten::addmm", 100, [[8], shape, [128, 8]])
        for number in reversed(sequences if trains else []):
            b.compute(
                "autograd::engine::evaluate_function: AddmmBackward0", us, [], sequence=number
            )
        b.on_host("aten::gelu", 500)
        b.sync()
    run = b.record_of_run()
    run.steps(60, 5, forward=4, **({} if infers else {"backward": 0.5}))
    frames = ["train.py(70): sample", "train.py(90): main"]
    module = {"name": "Net", "frames": frames, "forwards": forwards, "same_input": again}
    run.event("repeated_inputs", forwards=forwards, again=0, modules=[module])
    return b

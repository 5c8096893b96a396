"""Recurrent networks that call their cell for each element of the sequence."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, Select
from advisor.core.rule import Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import TRIED_ON_TRACES, XPROF
from advisor.rules.support.common import (
    amount_per_step,
    costliest_places,
    example_steps,
    of_step,
    outermost_in_steps,
    per_step,
    scale_edit,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

CELL = r"^aten::(?:lstm|gru|rnn_tanh|rnn_relu)_cell$"
CLASSES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}


class RecurrentCells(Rule):
    """A loop in Python calls ``nn.LSTMCell`` or ``nn.GRUCell`` for each element of the sequence.
    Each call makes several operators and launches, in the forward pass and again in the backward
    pass. ``nn.LSTM`` and ``nn.GRU`` run the whole sequence in one operator of cuDNN or MIOpen.

    The rule counts ``aten::lstm_cell`` and similar operators outside any other operator. It adds
    the operators that run about as often in the step: those of the loop, and their backward. The
    time between them counts too."""

    id = "recurrent-cells"
    title = "A Python loop calls a recurrent cell for each element of the sequence"
    sampled_part = "forward"
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTMCell.html",
    )

    min_calls = Threshold(
        16, "calls of a cell per step; fewer are a decoding step", TRIED_ON_TRACES
    )
    min_share = Threshold(0.10, "of the step in these operators and their backward", XPROF)
    min_calls_share = Threshold(
        0.5, "of the cell's calls, for an operator to count as part of the loop", TRIED_ON_TRACES
    )
    factor = Factor(
        0.1, "of the host time remains with one operator for the sequence", TRIED_ON_TRACES
    )
    best_factor = Factor(0.03, "of that time remains, at best", TRIED_ON_TRACES)
    worst_factor = Factor(0.3, "of that time remains, at worst", TRIED_ON_TRACES)

    fix = (
        "Use nn.{name} for the whole sequence: one call, in which cuDNN runs all elements and "
        "layers. Keep the cell only if its next input depends on its output."
    )
    code = (
        "self.rnn = nn.{name}(features, hidden, num_layers=2, batch_first=True)\n"
        "output, state = self.rnn(x)        # in place of the loop over nn.{name}Cell"
    )
    verify = "Profile again: aten::_cudnn_rnn in place of the cells, and far fewer launches."
    falsified_by = "a next input that is computed from the output of the cell"
    assumptions = ("the whole input sequence is known before the first element is processed",)
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.steps.source == "whole trace":
            return
        table = outermost_in_steps(a)
        cells = table.filter(pl.col("name").str.contains(CELL))
        if len(cells) < self.min_calls * a.step_count:
            return
        loop_operators = table.filter(pl.len().over("name") >= self.min_calls_share * len(cells))
        ns = int(loop_operators["ns"].sum())
        if ns < self.min_share * a.span_ns:
            return
        kinds = cells.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name")
        name = str(kinds["name"][-1])
        module = CLASSES[name.removeprefix("aten::").removesuffix("_cell")]
        count = round(len(cells) / a.step_count)
        pattern = exact_pattern(loop_operators["name"].unique())
        yield Finding(
            summary=(
                f"{name} runs {t.count_noun(count, 'time')}{per_step(a)}, once for each element of "
                "the sequence. With the operators that run as often, and their backward, this "
                f"takes {of_step(a, ns)}."
            ),
            fix=self.fix.format(name=module),
            code=self.code.format(name=module),
            evidence=[
                self.compare("calls of the cell", count, "min_calls", "count", per=a.per),
                amount_per_step(a, "the loop's operators and their backward", ns),
                self.compare_share(a, "the loop's operators and their backward", ns),
            ],
            where=costliest_places(
                a, cells["row"].to_numpy().astype(np.int64), cells["ns"].to_numpy(), top=1
            ),
            edits=[
                scale_edit(
                    Select(on="host", kind=("op",), name=pattern, at="loop"),
                    *self.range_of("factor"),
                )
            ],
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "LSTMCell": _build_cells("aten::lstm_cell"),
            "GRUCell": _build_cells("aten::gru_cell"),
            "a step of decoding": (_build_cells("aten::lstm_cell", count=4), "min_calls"),
            "inside nn.LSTM": (
                _build_cells("aten::lstm_cell", outer="aten::lstm"),
                "len(cells) < self.min_calls * a.step_count",
            ),
            "small compared with the step": (
                _build_cells("aten::lstm_cell", other_us=200_000),
                "min_share",
            ),
        }


def _build_cells(
    name: str, count: int = 64, outer: str = "", other_us: float = 500
) -> TraceBuilder:
    def step(b: TraceBuilder) -> None:
        for _ in range(count):
            if outer:
                with b.op(outer), b.op(name):
                    b.run("aten::mm", "gemm_kernel", 4, times=2, host_us=20)
            else:
                with b.op(name):
                    b.run("aten::mm", "gemm_kernel", 4, times=2, host_us=20)
        for _ in range(count):
            with b.op("autograd::engine::evaluate_function: ThnnFusedLstmCellBackward0"):
                b.run("aten::mm", "gemm_kernel", 4, times=3, host_us=20)
        b.on_host("aten::lerp_", other_us)

    return example_steps(step)

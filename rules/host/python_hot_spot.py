"""A Python function of the user's code leaves the GPU idle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Location,
    Outcome,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.text import count_noun, format_duration
from advisor.measure import Analysis
from advisor.measure.host.host import python_gaps, python_hot_spots
from advisor.rules.common import figure, of_step, per
from advisor.rules.sources import REAL_HOST, TENSORBOARD, XPROF
from advisor.testing import TraceBuilder

MAX_NAMES = 20


def _place(spot: dict[str, Any]) -> str:
    """``tokenise (text.py:12)``; a built-in by its name."""
    if spot["function"] is None:
        return str(spot["name"])
    return f"{spot['function']} ({spot['file']}:{spot['line']})"


def _location(a: Analysis, spot: dict[str, Any]) -> Location:
    """The function, in a library with the user's line that calls it; its longest call."""
    frame = int(spot["frame"])
    file, line, function = a.location(frame)
    own = (file, line, function) == (spot["file"], spot["line"], spot["function"])
    caller = "" if own or file is None else f"called from {file.rsplit('/', 1)[-1]}:{line}"
    return Location(
        file=spot["file"],
        line=spot["line"],
        function=spot["function"] or spot["name"],
        op=caller or None,
        ts_ns=int(a.trace.cpu["ts"][frame]),
        dur_ns=int(a.trace.cpu["dur"][frame]),
        count=spot["count"],
    )


class PythonHotSpot(Rule):
    """A Python function runs while the GPU has nothing to do and waits for its thread. Making the
    function faster, or moving it off that thread, shortens the step directly.

    It needs Python stacks. Of each gap the function is named that holds most of its Python time:
    the deepest one of the user's code or of an installed library in which no more than 5 % of a
    step's device work is launched. So it is what keeps the GPU waiting, and not the call around
    the whole step. Operators, CUDA calls and the DataLoader are not counted. Only GPU
    idle time counts: a slow function costs nothing while the GPU works through its queue. A
    function that takes little time before each of many launches is launch-bound's subject, so it
    has to block the GPU for a while in each gap.

    The line is the one where the function begins, as the profiler records it. Recording stacks
    lengthens Python time, that of many small functions most.
    """

    id = "python-hot-spot"
    title = "A Python function leaves the GPU idle"
    category = "host"
    of_python = True
    found_in = ("traces/b200_eager", "traces/mi300_timesformer_inference")
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/h100_bert_small_inference",
        "traces/pairs/particle_batch128",
    )
    validated_on = (
        "b200_eager: MXFP4 quantisation in Python, 12 of 87 ms; video inference on an MI300X: "
        "images prepared in Python, a quarter of a second before the first kernel; silent on "
        "h100_bert_small_inference, whose Python is spread over all launches"
    )
    references = ("https://pytorch.org/tutorials/recipes/recipes/profiler_recipe.html",)

    min_share = Threshold(0.05, "of the step, for one function", TENSORBOARD, XPROF)
    min_gap_us = Threshold(
        100.0, "µs per gap on average: Python around one launch takes 10 to 80 µs", REAL_HOST
    )
    min_unknown = Threshold(
        0.05, "of the step, unexplained GPU idle time: enough to ask for stacks", XPROF
    )

    fix = (
        "Move the function out of the path to the next kernel launch. Compute its result once and "
        "keep it, "
        "vectorize loops over tensors or lists, or prepare it one step ahead in a DataLoader "
        "worker or another process. Log and checkpoint every N steps only."
    )
    code = (
        "class Prepared(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return map(prepare, batches)      # runs in a worker process\n"
        "for inputs in DataLoader(Prepared(), batch_size=None, num_workers=1):\n"
        "    train_step(inputs)"
    )
    verify = "Profile again with stacks: the function's idle time is gone or smaller."
    falsified_by = "the same step time when the function returns a precomputed result"
    assumptions = (
        "the step's other work can go on without its result",
        "the work becomes unnecessary, or runs where it takes nothing from the loop: in another "
        "process with a free core. A thread does not help, because of Python's GIL",
    )
    confidence = 0.75

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for functions with much idle time in few gaps."""
        if a.device_id is None or not a.span_ns:
            return
        if not (a.trace.cpu["kind"] == "python").any():
            yield from self._unknown(a)
            return
        spots = python_hot_spots(a).filter(
            pl.col("critical_ns") >= self.min_share * a.span_ns,
            pl.col("critical_ns") >= self.min_gap_us * 1000 * pl.col("gaps"),
        )
        if spots.is_empty():
            return
        spots = spots.head(3)
        total = int(spots["critical_ns"].sum())
        first = spots.row(0, named=True)
        gaps = python_gaps(a).drop_nulls("frame")
        gaps = gaps.with_columns(name=a.trace.cpu["name"].gather(gaps["frame"]))
        gaps = gaps.filter(pl.col("name").is_in(spots["name"].cast(pl.Categorical).implode()))
        yield Finding(
            summary=self._summary(a, spots.rows(named=True)),
            evidence=[
                figure(a, "GPU idle in these functions", total),
                Evidence("share", total / a.span_ns, "share", *self.limit("min_share"), per=a.per),
                *(
                    Evidence(
                        _place(spot),
                        spot["critical_ns"] / a.step_count,
                        "ns",
                    )
                    for spot in spots.iter_rows(named=True)
                ),
                Evidence(
                    "idle time per gap in the first",
                    first["critical_ns"] / max(1, first["gaps"]),
                    "ns",
                    *self.limit("min_gap_us", 1000),
                ),
            ],
            where=[_location(a, spot) for spot in spots.iter_rows(named=True)],
            edits=[self._edit(a, gaps, spot) for spot in spots["name"]],
            confidence_notes=["recording Python stacks lengthens Python time"],
        )

    @staticmethod
    def _summary(a: Analysis, spots: list[dict[str, Any]]) -> str:
        """How long the GPU idles in the worst function, and in the others."""
        first, *others = ({**s, "place": _place(s)} for s in spots)
        calls = count_noun(max(1, round(first["count"] / a.step_count)), "call")
        text = (
            f"The GPU idles for {of_step(a, first['critical_ns'])} while {first['place']} "
            f"runs ({calls}{per(a)})"
        )
        if others:
            each = (
                f"{format_duration(s['critical_ns'] / a.step_count)} in {s['place']}"
                for s in others
            )
            text += f", and for {' and '.join(each)}"
        return f"{text}."

    def _unknown(self, a: Analysis) -> Iterator[Outcome]:
        """Without stacks: how much time they might explain."""
        gaps = a.gaps
        kind = a.trace.cpu["kind"].gather(gaps["host"])
        unexplained = (gaps["cause"] == "unknown") & (kind != "runtime").fill_null(True)
        idle = int(gaps["dur"].filter(unexplained).sum())
        if idle >= self.min_unknown * a.span_ns:
            yield SkippedCheck(
                what=(
                    f"which Python code leaves the GPU idle for {of_step(a, idle)} while no "
                    "operator runs"
                ),
                why="no Python stacks were recorded",
                record="with_stack=True",
            )

    @staticmethod
    def _edit(a: Analysis, gaps: pl.DataFrame, frame: str) -> Edit:
        """The gap pieces that this function causes: by what runs in it, under its frame."""
        names = a.trace.cpu["name"].gather(gaps["host"])
        in_function = gaps["name"] == frame
        top = (
            pl.DataFrame(
                {"name": names.filter(in_function), "dur": gaps["dur"].filter(in_function)}
            )
            .group_by("name")
            .agg(pl.col("dur").sum())
            .sort("dur", descending=True)["name"]
            .head(MAX_NAMES)
            .cast(pl.String)
        )
        pattern = "|".join(re.escape(name) for name in np.sort(top.to_numpy()))
        return Edit(
            op="remove",
            select=Select(
                on="gap", cause=("python",), name=f"^(?:{pattern})$", under=f"^{re.escape(frame)}$"
            ),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A slow function before the model runs."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step(), b.python("train.py(30): train_step"):
                with b.python("text.py(12): tokenise"):
                    b.host(3000)
                with b.python("model.py(5): forward"), b.op("aten::mm"):
                    b.launch("ampere_sgemm_128x64_nn", 4000)
                b.sync()
        return {"tokenizing on the training thread": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The same function behind a full queue; many quick functions; no stacks."""
        hidden, quick, bare = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with hidden.step(), hidden.python("train.py(30): train_step"):
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 8000)
                with hidden.python("text.py(12): tokenise"):
                    hidden.host(3000)
            with quick.step(), quick.python("train.py(30): train_step"):
                for _ in range(40):
                    with quick.python("model.py(5): forward"):
                        quick.host(30)
                        quick.run("aten::add", "elementwise_kernel", 20)
            with bare.step():
                bare.host(3000)
                bare.run("aten::mm", "ampere_sgemm_128x64_nn", 4000)
                bare.sync()
        return {
            "behind a full queue": (hidden, "spots.is_empty()"),
            "many quick calls": (quick, "min_gap_us"),
            "no stacks": (bare, "not (a.trace.cpu['kind'] == 'python').any()"),
        }

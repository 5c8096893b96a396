"""torch.compile splits the model at graph breaks, and the device waits at them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Location,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import parse_frame
from advisor.measure.steps.instants import RESUME, broken_regions, graph_breaks
from advisor.rules.common import column, example_steps, figure, of_step, per, places, rows
from advisor.rules.sources import OURS, SILENT_TRACES
from advisor.testing import TraceBuilder

CAUSES = ("dispatch", "launch", "python", "unknown")


class GraphBreaks(Rule):
    """torch.compile could not compile a function as a whole because of a ``print``, ``.item()`` or
    a call it does not know. So each step leaves one compiled graph, runs Python, checks guards and
    enters the next graph, while the device idles.

    The code after a break is compiled as a function of its own, which the first part calls. So its
    ``Torch-Compiled Region`` lies inside that of the first (seen with torch 2.13). Regions one
    after the other are no breaks: every block of a model is compiled by itself there. With Python
    stacks the frame ``torch_dynamo_resume_in_…`` names the very line of the break.

    The figure is the device's idle time between the end of one graph and the start of the next.
    Kernels that could have been fused across the break, and a CUDA graph that ends there, cost
    extra and are not in it.
    """

    id = "graph-breaks"
    title = "Graph breaks split the compiled model"
    category = "compile"
    silent_in = SILENT_TRACES
    references = (
        "https://pytorch.org/docs/stable/torch.compiler_faq.html#graph-breaks",
        "https://pytorch.org/tutorials/recipes/torch_compile_fullgraph_false_graph_breaks.html",
    )

    min_share = Threshold(0.02, "of the step, idle at the breaks", OURS)

    fix = (
        "Remove what breaks the graph: prints and logging, .item() and .cpu(), conditions on "
        "tensor values (use torch.where or torch.cond). Call libraries that torch.compile cannot "
        "follow at the edge of the model, under torch.compiler.disable. The log names each reason."
    )
    code = (
        "# names each break and its reason\n"
        "# TORCH_LOGS=graph_breaks python train.py\n\n"
        "model = torch.compile(model, fullgraph=True)   # an error at the first break\n\n"
        "# .item() stays in the graph\n"
        "torch._dynamo.config.capture_scalar_outputs = True"
    )
    verify = "Profile again: one Torch-Compiled Region per call, none inside another."
    falsified_by = "torch._dynamo.explain(model)(input) that counts no break"
    assumptions = ("the code at the break can move out of the compiled function",)
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count regions inside regions, and the idle time between their graphs."""
        names = a.trace.cpu["name"]
        regions = int(name_matches(names, r"^Torch-Compiled Region").sum())
        broken = broken_regions(a)
        if not regions or a.device_id is None:
            return
        ts = a.trace.cpu["ts"].to_numpy()[broken]
        broken = broken[covered_length(ts, ts + 1, a.spans) > 0]
        if not len(broken):
            yield PassedCheck(text=f"no graph breaks in {count_noun(regions, 'compiled region')}")
            return
        gaps = a.gaps.filter(pl.col("cause").is_in(CAUSES))
        start = column(gaps, "ts")
        end = start + column(gaps, "dur")
        between = graph_breaks(a)
        idle = intersect(union(start, end), between)
        share = idle.total / a.span_ns
        if share < self.min_share:
            return
        lines = _lines(a)
        if not lines:
            yield SkippedCheck(
                what="the lines at which the graph breaks",
                why="no Python stacks were recorded",
                record="with_stack=True",
            )
        count = len(broken) / a.step_count
        yield Finding(
            summary=(
                f"{count_noun(max(1, round(count)), 'graph break')}{per(a)} leave the device idle "
                f"for {of_step(a, idle.total)}, while Python runs between two compiled graphs."
            ),
            evidence=[
                Evidence("graph breaks", count, "count", per=a.per),
                figure(a, "idle at graph breaks", idle.total),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("idle time per break", idle.total / len(broken), "ns"),
                Evidence(
                    "where the graph breaks",
                    ", ".join(f"{place.file}:{place.line}" for place in lines[:3]) or None,
                ),
            ],
            where=lines
            or places(
                a,
                rows(gaps["host"]),
                covered_length(start, end, between),
                ts=start,
                dur=end - start,
                instance=column(gaps, "gap"),
            ),
            edits=[Edit(op="remove", select=Select(on="gap", cause=CAUSES, at="graph_break"))],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Two breaks in forward; the second example has Python stacks."""
        return {"two breaks": _trace(stacks=False), "with stacks": _trace(stacks=True)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """One whole graph; blocks compiled by themselves; breaks behind a full queue."""

        def whole(b: TraceBuilder) -> None:
            with b.op("Torch-Compiled Region: 0/0"):
                _graph(b, 30)

        def blocks(b: TraceBuilder) -> None:
            for _ in range(3):
                with b.op("Torch-Compiled Region: 0/0"):
                    _graph(b, 10)

        return {
            "one graph": (example_steps(whole), "not len(broken)"),
            "blocks compiled by themselves": (example_steps(blocks), "not len(broken)"),
            "behind a full queue": (_trace(stacks=False, us=300), "share < self.min_share"),
        }


def _lines(a: Analysis) -> list[Location]:
    """The lines at which the graph breaks, those before the longest stretch first."""
    cpu = a.trace.cpu
    named = np.flatnonzero(
        (name_matches(cpu["name"], RESUME) & (cpu["kind"] == "python")).to_numpy()
    )
    ts = cpu["ts"].to_numpy()[named]
    named = named[covered_length(ts, ts + 1, a.spans) > 0]
    if not len(named):
        return []
    frames = pl.DataFrame(
        {
            "name": cpu["name"].gather(named).cast(pl.String),
            "row": named,
            "dur": cpu["dur"].gather(named),
        }
    ).sort("dur", descending=True)
    lines = []
    for name, row, count in (
        frames.group_by("name", maintain_order=True)
        .agg(pl.col("row").first(), pl.len().alias("count"))
        .head(5)
        .iter_rows()
    ):
        frame = parse_frame(name)
        if frame is None:
            continue
        lines.append(
            Location(
                file=frame.file,
                line=frame.line,
                function=frame.function,
                ts_ns=int(cpu["ts"][row]),
                dur_ns=int(cpu["dur"][row]),
                count=count,
            )
        )
    return lines


def _graph(b: TraceBuilder, kernels: int, us: float = 8) -> None:
    with b.op("CompiledFunction"):
        for _ in range(kernels):
            b.launch("triton_poi_fused_add_relu_0", us)


def _trace(*, stacks: bool, us: float = 8) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("Torch-Compiled Region: 0/0"):
            _graph(b, 10, us)
            b.host(200)
            if stacks:
                with b.python("model.py(17): torch_dynamo_resume_in_forward_at_17"):
                    _rest(b, us)
            else:
                _rest(b, us)
    return b


def _rest(b: TraceBuilder, us: float) -> None:
    with b.op("TorchDynamo Cache Lookup", host_us=15):
        pass
    with b.op("Torch-Compiled Region: 1/0"):
        _graph(b, 10, us)
        b.host(200)
        with b.op("Torch-Compiled Region: 2/0"):
            _graph(b, 10, us)

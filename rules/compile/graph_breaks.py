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
from advisor.measure.steps.moments import RESUME, broken_regions, graph_breaks
from advisor.rules.common import column, figure, of_step, per, places, rows
from advisor.rules.sources import OURS, SILENT_TRACES
from advisor.testing import TraceBuilder

CAUSES = ("dispatch", "launch", "python", "unknown")


class GraphBreaks(Rule):
    """torch.compile could not compile a function as a whole (a ``print``, ``.item()``, a call it
    does not know), so each step leaves one compiled graph, runs Python, checks guards and enters
    the next, while the device idles.

    What follows a break is compiled as a function of its own, which the first part calls, so its
    ``Torch-Compiled Region`` lies inside that of the first (seen with torch 2.13). Regions one
    after the other, as when every block of a model is compiled by itself, are no breaks. With
    Python stacks the frame ``torch_dynamo_resume_in_…`` names the very line of the break.

    Counted is the device's idle time on the way from the end of one graph to the start of the next.
    What a break costs besides, kernels that could have been fused across it and a CUDA graph that
    ends there, is not in the figure.
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
        "Take out what breaks the graph: prints and logging, .item() and .cpu(), "
        "conditions on tensor values (torch.where, torch.cond), calls of libraries that "
        "torch.compile cannot follow (torch.compiler.disable them at the edge of the "
        "model). The log names each reason."
    )
    code = (
        "# names each break and its reason\n"
        "# TORCH_LOGS=graph_breaks python train.py\n"
        "model = torch.compile(model, fullgraph=True)   # an error at the first break\n"
        "torch._dynamo.config.capture_scalar_outputs = True   # .item() stays in the graph"
    )
    verify = "Profile again: one Torch-Compiled Region for each call, none inside another."
    falsified_by = "torch._dynamo.explain(model)(input) that counts no break"
    assumptions = ("what runs at the break can be moved out of the compiled function",)
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
            yield PassedCheck(
                text=f"no graph breaks: {count_noun(regions, 'compiled region')}, none split"
            )
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
                f"{of_step(a, idle.total)} the device idles at "
                f"{count_noun(max(1, round(count)), 'graph break')}{per(a)}, while Python runs "
                "between two compiled graphs."
            ),
            evidence=[
                Evidence("graph breaks", count, "count", per=a.per),
                figure(a, "idle at them", idle.total),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("idle time a break", idle.total / len(broken), "ns"),
                Evidence("where the graph breaks", _told(lines)),
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
        whole, blocks = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with whole.step(), whole.op("Torch-Compiled Region: 0/0"):
                _graph(whole, 30)
            with blocks.step():
                for _ in range(3):
                    with blocks.op("Torch-Compiled Region: 0/0"):
                        _graph(blocks, 10)
        return {
            "one graph": (whole, "not len(broken)"),
            "blocks compiled by themselves": (blocks, "not len(broken)"),
            "behind a full queue": (_trace(stacks=False, us=300), "share < self.min_share"),
        }


def _lines(a: Analysis) -> list[Location]:
    """The lines at which the graph breaks, the longest stretch after it first."""
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
    found = []
    for name, row, count in (
        frames.group_by("name", maintain_order=True)
        .agg(pl.col("row").first(), pl.len().alias("count"))
        .head(5)
        .iter_rows()
    ):
        frame = parse_frame(name)
        if frame is None:
            continue
        found.append(
            Location(
                file=frame.file,
                line=frame.line,
                function=frame.function,
                ts_ns=int(cpu["ts"][row]),
                dur_ns=int(cpu["dur"][row]),
                count=count,
            )
        )
    return found


def _told(lines: list[Location]) -> str | None:
    return ", ".join(f"{place.file}:{place.line}" for place in lines[:3]) or None


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

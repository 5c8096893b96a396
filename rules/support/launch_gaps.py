"""GPU idle time while the host prepares the next launch, and what prevents graph capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core import text as t
from advisor.core.finding import Edit, Location, Select
from advisor.core.intervals import covered_length
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.stacks import CodeOwner, code_owner
from advisor.measure.steps.named_intervals import step_starts
from advisor.measure.steps.steps import step_of_call
from advisor.replay.selection import mask_under
from advisor.rules.support.common import costliest_places, int_column, row_numbers, scale_edit

CAUSES = ("dispatch", "launch", "python")
"""Causes of idle gaps that a shorter way to the launch would shorten. Unexplained time (Python
without stacks) is left out, so the result is an underestimate."""
MAX_PIECE_NS = 200_000
"""Maximum length of a piece, ns. Longer ones are not launch costs: dispatching one op takes some 5
to 50 µs, with stacks up to 150 µs (b200_eager). Slow functions or ops on the CPU take longer."""
_MAX_GAP_NS = 1_000_000
"""Maximum length of a gap's pieces, ns. Many short ones are not a launch cost: a loop over an
image's pixels is thousands of calls before one launch. Where the GPU waits for launches, on public
traces 96% and more of the idle time is in gaps with less than this (70% where a job also prepares
its data). It is 3% where the first kernel follows a quarter of a second of Python."""

MAX_NAMED_CAUSES = 3


class LaunchGaps(NamedTuple):
    """GPU idle time between launches in the analyzed window, and the launches themselves."""

    idle: int
    """GPU idle time in short pieces of CAUSES, ns."""
    python: int
    """Part of ``idle`` in Python code between operators, ns."""
    longer: int
    """Remaining idle time with CAUSES, ns: longer pieces, and those before a step's first launch.
    They are slow calls, not launches."""
    at_launches: bool
    """Whether most of it is between one launch and the next, not in long gaps of many calls."""
    busy_share: float
    launches: float
    """Pieces of GPU work per step, kernels of graphs included."""
    calls: float
    """Launch calls per step (a graph launch is one)."""
    kernel_ns: float
    """Median duration of a kernel."""
    short: float
    """Share of kernels below 10 µs (TraceLens's limit of a short kernel)."""
    per_launch: float
    """``idle`` per launch call, ns."""
    graph_launches: int


def measure_launch_gaps(a: Analysis) -> LaunchGaps | None:
    """Measure the gaps, or return ``None`` if there are no kernels, or no launches in the trace."""
    gpu = a.trace.gpu
    kernels = a.in_window & (gpu["kind"] == "kernel").to_numpy()
    launch = gpu["launch"].filter(pl.Series(a.in_window)).drop_nulls()
    if not kernels.any() or launch.is_empty():
        return None
    pieces = _find_launch_pieces(a)
    idle = int(pieces["dur"].sum())
    short_gaps = pieces.filter(pl.col("dur").sum().over("gap") <= _MAX_GAP_NS)
    dur = gpu["dur"].to_numpy()[kernels]
    calls = launch.n_unique()
    graphs = (a.trace.cpu["call"].gather(launch.unique()) == "graph_launch").sum()
    return LaunchGaps(
        idle=idle,
        python=int(pieces["dur"].filter(pieces["cause"] == "python").sum()),
        longer=int(a.gaps["dur"].filter(a.gaps["cause"].is_in(CAUSES)).sum()) - idle,
        at_launches=2 * int(short_gaps["dur"].sum()) >= idle,
        busy_share=a.breakdown.busy.total / a.span_ns,
        launches=int(a.in_window.sum()) / a.step_count,
        calls=calls / a.step_count,
        kernel_ns=float(np.median(dur)),
        short=float(np.mean(dur < 10_000)),
        per_launch=idle / calls,
        graph_launches=int(graphs),
    )


def idle_in_dense_layers(a: Analysis) -> int:
    """Return the idle time between launches of dense layers in the analysed window, ns."""
    return int(_find_launch_pieces(a, DENSE)["dur"].sum())


def _find_launch_pieces(a: Analysis, under: str = "") -> pl.DataFrame:
    """Return rows of ``Analysis.gaps`` in which a launch is prepared, by operators ``under`` this
    pattern. A step's first launch is left out: other rules look at the time before it."""
    short_gaps = a.gaps.filter(pl.col("cause").is_in(CAUSES) & (pl.col("dur") <= MAX_PIECE_NS))
    ts = int_column(short_gaps, "ts")
    is_before_first = covered_length(ts, ts + int_column(short_gaps, "dur"), step_starts(a)) > 0
    is_chosen = ~is_before_first
    if under:
        is_chosen &= mask_under(a, under)[row_numbers(short_gaps["host"])]
    return short_gaps.filter(pl.Series(is_chosen))


LAUNCHING = Select(on="gap", cause=CAUSES, max_ns=MAX_PIECE_NS)
REMOVE_LAUNCH_COST = Edit(op="drop_launch", select=LAUNCHING, host_ns=1000)
"""Edit that makes launches cost next to nothing."""
_CAPTURED_CAUSES = (*CAUSES, "unknown")
BEST_CASE_EDIT = scale_edit(
    Select(on="gap", cause=_CAPTURED_CAUSES, max_ns=MAX_PIECE_NS), 1.0, 0.0, 1.0
)
"""Edit of the best case: the graphs hold all code between launches, recorded or not."""
CAPTURE_STEP = (
    Edit(
        op="drop_launch",
        select=Select(on="gap", cause=_CAPTURED_CAUSES, max_ns=MAX_PIECE_NS),
        host_ns=1000,
    ),
    BEST_CASE_EDIT,
)
"""Edits of a step that is one graph: Python between operators goes too, recorded or not."""


DENSE = (
    r"^aten::(?:linear|addmm|mm|bmm|baddbmm|matmul|relu_?|gelu|silu|sigmoid|layer_norm|batch_norm)$"
    r"|^autograd::engine::evaluate_function: (?:Addmm|Mm|Bmm|T|Relu|Gelu|Silu|Sigmoid"
    r"|NativeLayerNorm|NativeBatchNorm|CudnnBatchNorm|BinaryCrossEntropyWithLogits)Backward"
)
"""Operators of dense layers, and nodes of their backward pass."""


def capture_edits(static: bool | None, waits: CaptureBlockers) -> list[Edit]:
    """Return the edits of CUDA graphs. They remove all host work of steps that launch the same
    kernels and wait for nothing, else the cost of launching, or of only the dense layers'
    launches."""
    if static and not waits.per_step:
        return [*CAPTURE_STEP]
    if waits.dense_only:
        edits = (REMOVE_LAUNCH_COST, BEST_CASE_EDIT)
        return [replace(edit, select=replace(edit.select, under=DENSE)) for edit in edits]
    return [REMOVE_LAUNCH_COST, BEST_CASE_EDIT]


def can_capture(launches: float, waits: CaptureBlockers, min_apart: int) -> bool:
    """Return whether enough launches are between two waits for the GPU to make graphs of them."""
    return launches >= min_apart * waits.per_step


def locate_gaps(a: Analysis, edits: Sequence[Edit]) -> list[Location]:
    """Return lines, or without stacks ops, behind most of the idle time that these edits end, with
    the number of gaps and the share of all idle time for launches."""
    gaps = _find_launch_pieces(a, edits[0].select.under)
    return costliest_places(
        a,
        row_numbers(gaps["host"]),
        int_column(gaps, "dur"),
        ts=int_column(gaps, "ts"),
        dur=int_column(gaps, "dur"),
        gap=int_column(gaps, "gap"),
        whole=float(_find_launch_pieces(a)["dur"].sum()),
    )


def is_compiled(a: Analysis) -> bool:
    """Return whether torch.compile's code runs."""
    pattern = r"^Torch-Compiled Region|^## Call CompiledFxGraph"
    return bool(name_matches(a.trace.cpu["name"], pattern).any())


def repeats_kernels(a: Analysis) -> bool | None:
    """Return whether every used step launches the same kernels in the same order, or ``None`` for a
    single step, or a trace without steps."""
    used = a.steps.used
    if used.height < 2 or a.steps.source == "whole trace":
        return None
    gpu, cpu = a.trace.gpu, a.trace.cpu
    kernels = (gpu["kind"] == "kernel") & gpu["launch"].is_not_null()
    kernels &= gpu["device"] == a.device_id
    work = gpu.filter(kernels).select("name", "launch", "stream", "ts")
    launched = cpu["ts"].gather(work["launch"]).to_numpy()
    steps = step_of_call(a.steps, launched)
    in_step = steps.is_not_null()
    work, launched = work.filter(in_step), launched[in_step.to_numpy()]
    step = steps.drop_nulls().to_numpy()
    index = int_column(used, "index")
    launches = np.bincount(step, minlength=index[-1] + 1)[index]
    if launches[0] == 0 or (launches != launches[0]).any():
        return False
    order = np.lexsort((work["ts"].to_numpy(), launched, work["stream"].to_numpy(), step))
    names = work["name"].to_physical().to_numpy()[order].reshape(used.height, -1)
    return bool((names == names[0]).all())


class CaptureBlockers(NamedTuple):
    """Waits for the GPU, which a CUDA graph capture does not allow."""

    per_step: int
    """Waits per step, rounded up. A copy and the sync after it in one operator are one wait."""
    own_per_step: int
    """Number of waits in the program's own code, inside the captured part."""
    names: str
    """Most frequent causes of these waits, with their line where stacks were recorded: ``aten::item
    (train.py:10)``."""
    cures: str
    """Comments in code that say how to end waits of known kinds."""
    others: str
    """Owners of the other waits in the captured part, and what they mean for a capture."""
    dense_only: bool
    """Whether sizes vary from batch to batch, except in the dense layers."""


WITHOUT_SYNC = (
    (r"item|is_nonzero|_scalar_dense|equal", 'first: torch.where(ok, x, y) in place of "if ok:"'),
    (r"::_?index|::nonzero|masked_select", "first: torch.where(mask, x, 0) in place of x[mask]"),
)
"""Operators that wait, and their replacements in a capture."""
OWN, OUTSIDE, TORCHREC, DDP_TIMERS = "own", "outside", "torchrec", "DDP"
_RANGES_OF_TORCHREC = (
    r"^## (?:.*sparse_data_dist|.*copy_batch_to_gpu|.*Awaitable|all2all_|permute_id_list_).*##$"
)
_DDP_FORWARD = "DistributedDataParallel.forward"


def find_capture_blockers(a: Analysis) -> CaptureBlockers:
    """Find waits for the GPU in the steps: number, place and owner."""
    syncs = a.syncs.filter(~pl.col("profiler"))
    syncs = syncs.with_columns(pl.coalesce("op", "host").alias("wait"))
    syncs = syncs.unique("wait", keep="first", maintain_order=True)
    in_modules = a.forward_only and a.layers is not None and a.layers.source == "module events"
    places: dict[str, int] = {}
    owners: dict[str, int] = {}
    for host, cause in syncs.select("host", "cause").iter_rows():  # at most tens per step
        owner = _find_owner(a, host, cause, in_modules=in_modules)
        owners[owner] = owners.get(owner, 0) + 1
        if owner != OWN:
            continue
        file, line, _ = a.location(host)
        place = f" ({PurePath(file).name}:{line})" if file and line else ""
        name = f"{cause}{place}"
        places[name] = places.get(name, 0) + 1
    # a place that waits only in some steps does not count
    places = {name: count for name, count in places.items() if 2 * count >= a.step_count} or places
    if OWN in owners:
        owners[OWN] = sum(places.values())
    top = sorted(places, key=lambda name: -places[name])[:MAX_NAMED_CAUSES]
    more = f" and {len(places) - len(top)} more places" if len(places) > len(top) else ""
    per_step = {owner: -(-count // a.step_count) for owner, count in owners.items()}
    return CaptureBlockers(
        -(-syncs.height // a.step_count),
        per_step.get(OWN, 0),
        ", ".join(top) + more,
        "".join(f"# {cure}\n" for name, cure in WITHOUT_SYNC if re.search(name, " ".join(places))),
        " ".join(_describe_other_waits(owner, count) for owner, count in per_step.items()).strip(),
        TORCHREC in owners,
    )


def _find_owner(a: Analysis, host: int, cause: str, *, in_modules: bool) -> str:
    """Return the owner of a wait: the program itself, a library (its name), or code around the
    model, such as code that measures it."""
    parent, names = a.trace.cpu["parent"], a.trace.cpu["name"]
    if parent[host] is not None and str(names[parent[host]]) == _DDP_FORWARD:
        return DDP_TIMERS if cause == "torch.cuda.Event.synchronize" else OWN
    row: int | None = host
    owner, in_model = "", False
    while row is not None:  # one stack
        name = str(names[row])
        in_model |= name.startswith(MODULE)
        if not owner and re.match(_RANGES_OF_TORCHREC, name):
            return TORCHREC
        if not owner and (code := code_owner(name)):
            owner = OWN if code == CodeOwner.USER else _name_library_line(name)
        row = parent[row]
    return OUTSIDE if in_modules and not in_model else owner or OWN


def package_of(frame: str) -> str:
    """Return the package of a Python frame: ``diffusers``, or ``Python`` without a package."""
    file = re.sub(r"^.*(?:site|dist)-packages/", "", frame.partition("(")[0])
    return file.lstrip("/").split("/")[0] if "/" in file else "Python"


def _name_library_line(frame: str) -> str:
    file, _, line = frame.partition("(")
    return f"{package_of(frame)} ({PurePath(file).name}:{line.partition(')')[0]})"


def _describe_other_waits(owner: str, count: int) -> str:
    waits, verb = t.count_noun(count, "wait"), "comes" if count == 1 else "come"
    if owner in (OWN, OUTSIDE):
        return ""
    if owner == TORCHREC:
        return f"{waits} per step {verb} from torchrec, for split sizes and indices that vary."
    if owner == DDP_TIMERS:
        return (
            f"Run 11 iterations before a capture: {waits} per step {verb} from DDP's own timers, "
            "which run in the first iterations and seldom later."
        )
    mask_text = ""
    if "mask" in owner:
        mask_text = " It looks at the attention mask, which torch.compile leaves out."
    return (
        f"{waits} per step {verb} from {owner}: one graph ends before it, and another "
        f"begins after it.{mask_text}"
    )

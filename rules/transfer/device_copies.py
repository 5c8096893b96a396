"""Copies within GPU memory, and copies that do not overlap with compute."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, Select
from advisor.core.intervals import intersect
from advisor.core.rule import Evidence, FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import innermost_ancestor, parent_rows
from advisor.rules.support.citations import SILENT_TRACES, TRACELENS, TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import (
    COPY_PREFETCH_CODE,
    amount_per_step,
    are_mostly_offloaded,
    busy_intervals,
    device_places,
    int_column,
    of_step,
    per_step,
    row_numbers,
    scale_edit,
)
from advisor.rules.support.framework_advice import BATCHES_AHEAD, in_any_language
from advisor.rules.support.host_waits import (
    PINNED_CALLS,
    TO_DEVICE_PINNED,
    async_edit,
    select_blocking_calls,
)
from advisor.testing import Examples, TraceBuilder

_COMPILED = r"^CompiledFunction|^(?:## )?Call CompiledFxGraph|^Torch-Compiled Region"


class DeviceCopies(Rule):
    """Tensors are copied from GPU memory to GPU memory (``clone``, ``copy_``, ``contiguous``,
    ``cat``) for a notable part of the step. Each byte is read and written, but nothing is computed.

    The rule counts copies by the copy engine or driver (``Memcpy DtoD``) that overlap with neither
    compute nor communication. Other rules check copies made by kernels. There are two causes.
    Compiled functions that replay CUDA graphs copy their inputs and outputs into and out of fixed
    buffers, unless the addresses are known to stay. Nearly all copies of a public V100 trace are of
    this kind. The program itself makes the other copies."""

    id = "device-copies"
    title = "Copies within GPU memory take part of the step"
    found_in = ("traces/v100_train_copy_heavy",)
    silent_in = public_traces(
        "a100_train_6steps two_ranks_rank0 b200_eager h100_bert_small_inference"
    )
    validation_note = (
        "v100_train_copy_heavy: 774 copies per step, 12% of it, nearly all at the boundary of CUDA "
        "graphs; silent on A100 training (0.6%) and b200_eager (0.9%)"
    )
    references = ("https://pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",)

    min_share = Threshold(0.05, "of the step", TRACELENS)
    looks_at: ClassVar[Mapping[str, str]] = {
        "DtoD": "little to gain if such copies take under {min_share:.0%} of the time"
    }

    verify = "Profile again: fewer 'Memcpy DtoD' rows, and less time in them."
    falsified_by = "a different result without the copies"
    assumptions = ("correctness does not need the copies (aliasing, in-place updates)",)

    fix = (
        "Leave tensors in place. Write results into views of one buffer instead of concatenating, "
        "and drop clones that nobody changes. Create tensors in the layout that the next operator "
        "needs, and update in place."
    )
    code = (
        "out = torch.empty(n, 2 * d, device=device)\n"
        "torch.mm(x, w1, out=out[:, :d])\n"
        "torch.mm(x, w2, out=out[:, d:])             # instead of torch.cat([a, b], dim=1)"
    )
    confidence = 0.6
    cases = {
        "at the boundary of CUDA graphs": {
            "fix": "Let CUDA graphs read tensors in place. CUDA graph trees (PyTorch 2.1 and "
            'later, the default of mode="reduce-overhead") do not copy parameters and outputs '
            "that stay at one address. Mark other inputs that stay, and compile a larger region, "
            "so that fewer tensors cross its boundary.",
            "code": "# for each input of the graph that keeps its address (a buffer)\n"
            "torch._dynamo.mark_static_address(buffer)\n"
            'step = torch.compile(train_step, mode="reduce-overhead")   # copies at its ends only',
            "assumptions": ("the tensors that are copied stay at one address",),
            "confidence": 0.75,
        },
        "at the boundary of CUDA graphs, with collectives": {
            "fix": "Let CUDA graphs read tensors in place. CUDA graph trees (PyTorch 2.1 and "
            'later, the default of mode="reduce-overhead") do not copy parameters and outputs '
            "that stay at one address. Mark other inputs that stay. Collectives between the "
            "regions prevent one graph of the whole step.",
            "code": "# for each input of the graph that keeps its address (a buffer)\n"
            "torch._dynamo.mark_static_address(buffer)",
            "assumptions": ("the tensors that are copied stay at one address",),
            "confidence": 0.75,
        },
    }

    framework_advice = {
        **in_any_language(
            "Let kernels read their input in place, and write where the output is needed. Pass "
            "pointers, offsets and strides instead of copying to a new buffer. Swap two buffers "
            "instead of copying one to the other."
        ),
        JAX: FrameworkAdvice(
            "Donate the arguments that a step replaces, so that XLA overwrites the old state.",
            "train_step = jax.jit(train_step, donate_argnums=(0,))",
        ),
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(pl.col("copy") == "DtoD")
        exposed = intersect(busy_intervals(a, copies), a.breakdown.copies).total
        share = exposed / a.span_ns
        if share < self.min_share:
            return
        graph_launches = int((a.trace.cpu["call"] == "graph_launch").sum())
        compiled_ns = self._time_in_compiled(a, copies) if graph_launches else 0
        mostly_graphs = compiled_ns > 0.5 * int(copies["exposed"].sum())
        suffix = ", with collectives" * (not a.collectives.is_empty())
        bytes_copied = int(copies["bytes"].sum())
        select = Select(on="gpu", kind=("memcpy",), copy=("DtoD",))
        copies_per_step = max(1, round(copies.height / a.step_count))
        yield Finding(
            title=f"Copies within GPU memory take {t.format_share(share)} of the {a.per}",
            summary=(
                f"The GPU does nothing but copy within its own memory for {of_step(a, exposed)}: "
                f"{t.count_noun(copies_per_step, 'copy')}{per_step(a)}, "
                f"{t.format_bytes(bytes_copied / a.step_count)} in all"
                + (", most into and out of CUDA graph buffers." if mostly_graphs else ".")
            ),
            evidence=[
                amount_per_step(a, "exposed copy time within the GPU", exposed),
                self.compare(
                    "exposed copy time within the GPU, share", share, "min_share", per=a.per
                ),
                amount_per_step(a, "copies within the GPU", copies.height, "count"),
                amount_per_step(a, "bytes copied within the GPU", bytes_copied, "bytes"),
                amount_per_step(a, "copy time inside compiled functions", compiled_ns),
                amount_per_step(a, "graph launches", graph_launches, "count"),
            ],
            where=device_places(a, copies),
            edits=[
                scale_edit(select, 0.0, 0.0, 1.0)
                if mostly_graphs
                else Edit(op="remove", select=select)
            ],
            **(self.case(f"at the boundary of CUDA graphs{suffix}") if mostly_graphs else {}),
        )

    @staticmethod
    def _time_in_compiled(a: Analysis, copies: pl.DataFrame) -> int:
        """Return the exposed time, ns, of copies by compiled functions, including those of the
        graphs."""
        is_compiled = name_matches(a.trace.cpu["name"], _COMPILED).to_numpy()
        compiled_row = np.append(innermost_ancestor(parent_rows(a.trace), is_compiled), -1)
        return int(
            int_column(copies, "exposed")[compiled_row[row_numbers(copies["op"])] >= 0].sum()
        )

    @staticmethod
    def examples() -> Examples:
        cat, graph, few, hidden, host = (TraceBuilder() for _ in range(5))
        for _ in cat.steps():
            cat.copy("DtoD", 1 << 30, op="aten::cat")
            cat.product(1000, 6, wait=True)
        for _ in graph.steps():
            with graph.op("CompiledFunction"):
                for _ in range(40):
                    graph.copy("DtoD", 50 << 20)
                graph.graph_launch([("elementwise_kernel", 100.0)] * 30)
                graph.sync()
        for _ in few.steps():
            few.copy("DtoD", 64 << 20)
            few.product(1000, 6, wait=True)
        for _ in hidden.steps():
            hidden.product(6000)
            hidden.copy("DtoD", 1 << 30, stream=13)
            hidden.sync()
        for _ in host.steps():
            host.copy("HtoD", 64 << 20)
            host.product(1000, 6, wait=True)
        return {
            "concatenations": cat,
            "into the buffers of a graph": graph,
            "few copies": (few, "min_share"),
            "hidden": (hidden, "share < self.min_share"),
            "from the host": (host, "share < self.min_share"),
        }


DIRECTIONS = ("HtoD", "DtoH")


class CopiesNotOverlapped(Rule):
    """Copies between pinned host memory and the GPU run while the GPU computes nothing. Copy
    engines work in parallel with compute, so on a separate stream, one batch ahead, the copies
    would be free.

    Copy time is exposed if it overlaps with neither compute nor communication. On the stream that
    also computes, a copy can never overlap with what is launched after it. Copies from pageable
    memory are left out, because they cannot run asynchronously (see pageable-copies). Copies within
    the GPU are left out too.

    A prefetch copies with ``non_blocking=True``, so it also removes the GPU idle time after calls
    that wait for such copies.

    Where most of the copy time is hidden already, the rule is silent. A prefetch on a separate
    stream already works there, and the exposed part only shows a lack of compute."""

    id = "copies-not-overlapped"
    title = "Copies do not overlap with compute"
    knobs = ("loader-pinning",)
    silent_in = SILENT_TRACES
    validation_note = (
        "silent on A100 and V100 training, which prefetch on a separate stream and hide 68 and 80% "
        "of their copies"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://pytorch.org/docs/stable/notes/cuda.html#cuda-streams",
    )

    min_share = Threshold(
        0.02,
        "of the step, exposed: above the noise, below the 5% from which TraceLens flags copies",
        TRACELENS,
    )
    max_overlap = Threshold(
        0.5, "of the copy time is hidden: the copies count as overlapped", TRIED_ON_TRACES
    )
    looks_at: ClassVar[Mapping[str, str]] = {
        "HtoD": "little to gain if compute hides {max_overlap:.0%} of such copies, or the others "
        "take under {min_share:.0%} of the time"
    }

    fix = (
        "Copy the next batch on a separate stream while this step computes, and let the compute "
        "stream wait for it. To send fewer bytes, copy data in the type it is stored in and "
        "convert it on the GPU."
    )
    code = COPY_PREFETCH_CODE
    verify = "Profile again: the copies overlap with kernels, on another stream."
    falsified_by = "the same step time when the loop reuses one batch on the GPU"
    assumptions = ("the next batch is known while this step runs", "memory for one more batch")
    confidence = 0.8

    framework_advice = {
        **in_any_language(
            "Copy the next piece while the GPU computes on this one, with two buffers in pinned "
            "host memory and a separate stream for copies. Keep data on the GPU that it needs "
            "again.",
            cuda="Use cudaMemcpyAsync on a separate stream, and cudaEventRecord and "
            "cudaStreamWaitEvent between the streams.",
            code="cudaMemcpyAsync(buffer[next], host + next * n, piece,\n"
            "                cudaMemcpyHostToDevice, copies);\n"
            "cudaEventRecord(arrived[next], copies);\n"
            "kernel<<<grid, block, 0, compute>>>(buffer[now], n);\n"
            "cudaStreamWaitEvent(compute, arrived[next], 0);",
            verify="Profile again: copies overlap with kernels.",
        ),
        **BATCHES_AHEAD,
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        pageable = (pl.col("memory") == "pageable").fill_null(False)
        copies = a.copies.filter(pl.col("copy").is_in(DIRECTIONS) & ~pageable)
        if copies.is_empty():
            return
        busy = busy_intervals(a, copies)
        exposed = intersect(busy, a.breakdown.copies).total
        share = exposed / a.span_ns
        overlap = 1 - exposed / busy.total if busy.total else 1.0
        if share < self.min_share or overlap >= self.max_overlap or are_mostly_offloaded(a):
            if overlap >= self.max_overlap and busy.total >= self.min_share * a.span_ns:
                yield PassedCheck(
                    text=f"compute hides {overlap:.0%} of the copy time between host and GPU "
                    f"({t.format_duration(busy.total / a.step_count)}{per_step(a)})"
                )
            return
        on_same_stream = copies.filter("same_stream")
        on_compute_share = int(on_same_stream["exposed"].sum()) / max(
            1, int(copies["exposed"].sum())
        )
        bytes_copied = int(copies["bytes"].sum())
        awaited = select_blocking_calls(a, TO_DEVICE_PINNED)
        yield Finding(
            summary=(
                f"The GPU waits for copies that could overlap for {of_step(a, exposed)}: "
                f"{t.format_bytes(bytes_copied / a.step_count)}{per_step(a)}, {overlap:.0%} hidden"
                + (". The copies run on the compute stream." if on_compute_share > 0.5 else ".")
            ),
            evidence=[
                amount_per_step(a, "exposed copy time", exposed),
                self.compare("exposed copy time, share", share, "min_share", per=a.per),
                self.compare("copy time hidden by compute", overlap, "max_overlap"),
                Evidence("copy time exposed on the compute stream", on_compute_share, "share"),
                *(
                    [amount_per_step(a, "GPU idle after calls that wait", awaited.total)]
                    if awaited.total
                    else []
                ),
                amount_per_step(a, "bytes copied", bytes_copied, "bytes"),
                Evidence(
                    "bandwidth of the copies",
                    bytes_copied / max(1, int(copies["dur"].sum())),
                    "GB/s",
                ),
            ],
            where=device_places(a, copies),
            edits=[
                *(Edit(op="overlap", select=select) for select in _select_exposed_groups(copies)),
                *([async_edit(a, awaited, *PINNED_CALLS)] if awaited.total else []),
            ],
        )

    @staticmethod
    def examples() -> Examples:
        on_compute, ahead, small, pageable, within = (TraceBuilder() for _ in range(5))
        for _ in on_compute.steps():
            on_compute.copy("HtoD", 24 << 20)
            on_compute.product(1000, 4, wait=True)
        for _ in ahead.steps():
            ahead.product(4000)
            ahead.copy("HtoD", 24 << 20, stream=13)
            ahead.sync()
        for _ in small.steps():
            small.copy("HtoD", 4096)
            small.product(1000, 4, wait=True)
        for _ in pageable.steps():
            pageable.copy("HtoD", 24 << 20, pinned=False)
            pageable.product(1000, 4, wait=True)
        for _ in within.steps():
            within.copy("DtoD", 240 << 20)
            within.product(1000, 4, wait=True)
        return {
            "on the compute stream": on_compute,
            "under compute": (ahead, "share < self.min_share"),
            "small": (small, "min_share"),
            "pageable": (pageable, "copies.is_empty()"),
            "within the GPU": (within, "copies.is_empty()"),
        }


def _select_exposed_groups(copies: pl.DataFrame) -> list[Select]:
    """Return selectors of copies with any exposed time, by direction and host memory."""
    groups = (
        copies.filter(pl.col("exposed") > 0)
        .select(pl.col("copy").cast(pl.String), pl.col("memory") == "pinned")
        .unique()
        .sort("copy", "memory", nulls_last=True)
    )
    return [
        Select(on="gpu", kind=("memcpy",), copy=(copy,), memory="pinned" if pinned else "")
        for copy, pinned in groups.iter_rows()
    ]

"""Rules for calls that block the host. They differ in the calls they select; the cost of each is
the GPU idle time after it."""

import re
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import Edit, Finding, Location, Outcomes, Select
from advisor.core.rule import Evidence, Factor, FrameworkAdvice, Rule, Threshold
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.device_reads import backward_nodes, outermost_aten
from advisor.measure.host.sampled_code import line_of_operator
from advisor.measure.host.stacks import innermost_library
from advisor.rules.support.citations import (
    ENGINE_FLOOR,
    SILENT_TRACES,
    TRIED_ON_TRACES,
    public_traces,
)
from advisor.rules.support.common import (
    amount_per_step,
    of_step,
    per_step,
    remove_at,
    row_numbers,
    runs_code_of,
    scale_edit,
    sum_column,
)
from advisor.rules.support.framework_advice import NO_READS, in_any_language
from advisor.rules.support.host_waits import (
    PINNED_CALLS,
    TO_DEVICE_PINNED,
    BlockingCalls,
    async_edit,
    count_causes,
    locate_blocking,
    select_blocking_calls,
    with_operators,
)
from advisor.rules.support.kernel_work import exact_pattern
from advisor.testing import Examples, TraceBuilder

_CALLS_METRIC = r"torchmetrics/(?:metric|collections)\.py\(\d+\): (?:\w+\.)?forward$"


class BlockingRule(Rule):
    """A rule about one kind of blocking call. A subclass selects the calls and words the result."""

    min_share = Threshold(0.01, "of the step: GPU idle after these calls", ENGINE_FLOOR)

    _sync_selects: ClassVar[tuple[Select, ...]] = ()
    """Candidates for the edit, see :func:`async_edit`."""

    def _calls(self) -> pl.Expr:
        """Return the condition for rows of ``Analysis.syncs`` to count."""
        raise NotImplementedError

    def _select(self, a: Analysis) -> BlockingCalls:
        return select_blocking_calls(a, self._calls())

    def _edits(self, a: Analysis, blocking: BlockingCalls) -> list[Edit]:
        return [async_edit(a, blocking, *self._sync_selects)]

    def _reason(self, a: Analysis, blocking: BlockingCalls) -> str:
        """Return the end of the summary: the calls after which the GPU idles, and why."""
        raise NotImplementedError

    def _details(self, a: Analysis, blocking: BlockingCalls) -> list[Evidence]:
        return [
            amount_per_step(a, "calls before idle time", blocking.reads, "count"),
            amount_per_step(a, "host blocked in these calls", sum_column(blocking.table["waited"])),
            Evidence("calls by name", count_causes(a, blocking)),
        ]

    def _advice(
        self, a: Analysis, blocking: BlockingCalls, where: list[Location]
    ) -> dict[str, Any]:
        """Return the fields of the finding that depend on where the host waits."""
        return {}

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.syncs.is_empty():
            return
        blocking = self._select(a)
        share = blocking.total / a.span_ns
        if share < self.min_share:
            return
        where = locate_blocking(a, blocking)
        yield Finding(
            summary=f"The GPU idles for {of_step(a, blocking.total)} {self._reason(a, blocking)}",
            evidence=[
                amount_per_step(a, "GPU idle after these calls", blocking.total),
                self.compare("GPU idle after these calls, share", share, "min_share", per=a.per),
                *self._details(a, blocking),
            ],
            where=where,
            **{"edits": self._edits(a, blocking), **self._advice(a, blocking, where)},
        )


class ExplicitSynchronize(BlockingRule):
    """``torch.cuda.synchronize()``, or a wait for a stream or an event, runs inside the step. The
    host cannot prepare the next work while it waits, so the GPU idles afterwards.

    The rule counts synchronizing calls outside any operator, by the GPU idle time after them. That
    lasts from the end of the awaited work to the next work that the thread launches. It counts at
    most as long as the call blocked the host. A call whose work has already finished costs nothing.
    If another stream has work during the call, only the time in which the whole GPU is idle counts.
    The synchronization that the profiler itself issues at the end of its window is not counted.

    Often the call is there for timing. CUDA events measure GPU time without blocking the host."""

    id = "explicit-synchronize"
    title = "synchronize() in the step leaves the GPU idle"
    silent_in = SILENT_TRACES
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
        "https://pytorch.org/docs/stable/generated/torch.cuda.Event.html",
    )

    fix = (
        "Remove the call. Work of one stream runs in order anyway, and streams wait for each "
        "other with wait_event() or wait_stream(). To time a step, record CUDA events and read "
        "them some steps later."
    )
    code = (
        "start = torch.cuda.Event(enable_timing=True)\n"
        "end = torch.cuda.Event(enable_timing=True)\n"
        "start.record()\n"
        "train_step(batch)\n"
        "end.record()                         # does not block the host\n"
        "# some steps later:\n"
        "if end.query():\n"
        "    print(start.elapsed_time(end))   # ms"
    )
    verify = "Profile again: the call is gone, and so is the idle time after it."
    falsified_by = "as much GPU idle time at the same place in a run without the call"
    assumptions = ("no host code reads GPU results right after the call",)
    confidence = 0.85

    framework_advice = {
        **in_any_language(
            title="A wait in the step leaves the GPU idle",
            fix="Wait only for what you need. Order work on several streams with events, and let "
            "the host wait once, for the result.",
            cuda="Replace cudaDeviceSynchronize between kernels with cudaStreamWaitEvent.",
            code="cudaEventRecord(done, producer);\ncudaStreamWaitEvent(consumer, done, 0);",
        ),
        TENSORFLOW: FrameworkAdvice(
            "Do not wait for the GPU inside the loop. " + NO_READS,
            title="A wait in the step leaves the GPU idle",
        ),
        JAX: FrameworkAdvice(
            "Call block_until_ready() only outside the loop. " + NO_READS,
            title="A wait in the step leaves the GPU idle",
        ),
    }

    _sync_selects = (
        Select(on="host", call=("sync_device",)),
        Select(on="host", call=("sync_device", "sync_event")),
        Select(on="host", call=("sync_device", "sync_event", "sync_stream")),
    )

    def _calls(self) -> pl.Expr:
        pattern = r"^torch\.cuda\.(?:synchronize|Stream\.synchronize|Event\.synchronize)$"
        return pl.col("cause").str.contains(pattern) & pl.col("op").is_null()

    def _reason(self, a: Analysis, blocking: BlockingCalls) -> str:
        calls = count_noun(blocking.per_step(a), "explicit wait")
        return f"after {calls}{per_step(a)}. The host launches nothing while it waits."

    @staticmethod
    def examples() -> Examples:
        explicit, at_end, done, hidden = (TraceBuilder() for _ in range(4))
        for _ in explicit.steps():
            explicit.product(300, 10, wait=True)
            explicit.host(1000)
        for _ in at_end.steps():
            at_end.product(300, 10)
        for _ in done.steps():
            done.product(300, 10)
            done.host(9000)
            done.sync()
            done.host(1000)
        for _ in hidden.steps():
            hidden.product(300, 5)
            hidden.product(9000, stream=13)
            hidden.sync("cudaStreamSynchronize", stream=7)
            hidden.host(1000)
        at_end.sync()
        return {
            "synchronize every step": explicit,
            "the profiler's": (at_end, "share < self.min_share"),
            "nothing to wait for": (done, "share < self.min_share"),
            "another stream": (hidden, "share < self.min_share"),
        }


class DataDependentShapes(BlockingRule):
    """The output size of an operator depends on the values of its input (``nonzero``,
    ``masked_select``, ``unique``, indexing with a boolean mask, ``repeat_interleave``). The host
    waits for the GPU to learn the size, and the GPU then idles until the host launches new work.

    The rule counts calls that really waited inside such an operator, by the GPU idle time in it and
    after it, as in implicit-sync. On CPU tensors, or with a known size
    (``repeat_interleave(output_size=…)``, indexing with integers), these operators do not wait and
    are not counted. Varying shapes also prevent CUDA graphs; the estimate does not include that."""

    id = "data-dependent-shapes"
    title = "Data-dependent shapes leave the GPU idle"
    found_in = public_traces("pairs/sam_1_fp32_many_syncs pairs/sam_3_bf16_compiled_sdpa")
    silent_in = SILENT_TRACES
    validation_note = (
        "fires on segmentation by SAM, whose authors replaced indexing with masks and nonzero "
        "because of these waits"
    )
    min_waiting_share = Threshold(
        0.5,
        "of an operator's calls wait; otherwise most of them index with integers",
        TRIED_ON_TRACES,
    )
    remaining_host_share = Factor(
        0.3, "of the operators' host time remains, with fixed shapes", TRIED_ON_TRACES
    )
    best_remaining_host_share = Factor(0.1, "of it remains, at best", TRIED_ON_TRACES)
    worst_remaining_host_share = Factor(
        0.6,
        "of it remains, at worst: without the search, the copy and the wait for the size",
        TRIED_ON_TRACES,
    )
    references = ("https://pytorch.org/docs/stable/generated/torch.nonzero.html",)

    fix = (
        "Keep shapes fixed. Use torch.where(mask, a, b) or multiply by the mask instead of "
        "boolean indexing. Pass output_size to repeat_interleave, and use "
        "torch.nonzero_static(size=…) or topk with a fixed k. Compute index lists that do not "
        "depend on GPU results on the host beforehand."
    )
    cases = {
        "in the program's own code": {
            "code": "# instead of  mean = per_token[mask].mean()\n"
            "mean = (per_token * mask).sum() / mask.sum()\n"
            "# instead of  idx = mask.nonzero()\n"
            "idx = torch.nonzero_static(mask, size=max_count, fill_value=0)"
        },
        "PyTorch Geometric normalises the graph": {
            "fix": "Normalise a fixed graph once (cached=True): the wait is in {library}. "
            "Normalise changing graphs beforehand, for layers with normalize=False.",
            "assumptions": ("the graph is the same in each step",),
            "code": "# one fixed graph\n"
            "self.conv = GCNConv(in_channels, out_channels, cached=True)\n"
            "# other graphs: once each, for layers with normalize=False\n"
            "data = torch_geometric.transforms.GCNNorm()(data)",
        },
        "torchmetrics computes each batch": {
            "fix": "Call update() of the metrics in the loop, and compute() and reset() once, at "
            "the end of the epoch. A call of the metrics themselves computes values of each batch "
            "as well, and a MetricCollection then shares nothing. The wait is in {library}. "
            "validate_args=False leaves out checks that wait.",
            "code": "self.metrics.update(prediction, label)  # instead of self.metrics(…)\n"
            "# at the end of the epoch\n"
            "values = self.metrics.compute()\n"
            "self.metrics.reset()",
            "falsified_by": "code that uses the value of each batch",
            "assumptions": ("the value of a single batch is not needed",),
        },
        "torchmetrics checks values": {
            "fix": "Leave out checks of values, which wait, with validate_args=False. The wait is "
            "in {library}.",
            "code": "MulticlassAccuracy(num_classes=classes, validate_args=False)",
        },
        "in a library": {
            "fix": "Look for an argument of {library}, where the wait is, that keeps shapes fixed "
            "or its result from step to step. Or call it once, before the loop."
        },
    }
    verify = "Profile again: these operators no longer synchronize."
    falsified_by = "as much GPU idle time at the same place in a run with fixed shapes"
    assumptions = ("fixed shapes give the same result in no more GPU time",)
    confidence = 0.85

    _OPERATORS = (
        r"^aten::(?:nonzero\w*|argwhere|where|\w*unique\w*|masked_select|masked_scatter_?|index"
        r"|index_put_?|_index_put_impl_|repeat_interleave|bincount|histc|tensor_split"
        r"|_pack_padded_sequence)$"
    )
    _sync_selects = (Select(on="host", kind=("runtime",), under=_OPERATORS),)

    def _calls(self) -> pl.Expr:
        """Return the condition; it is false where the host copies an index to the GPU."""
        to_device = (pl.col("direction") == "HtoD").fill_null(False)
        return pl.col("cause").str.contains(self._OPERATORS) & ~to_device

    def _select(self, a: Analysis) -> BlockingCalls:
        return with_operators(a, super()._select(a))

    def _edits(self, a: Analysis, blocking: BlockingCalls) -> list[Edit]:
        """Remove the waits, and most host time of operators that always wait, including their
        backward pass: operators with a fixed shape replace them."""
        edits = super()._edits(a, blocking)
        names = a.trace.cpu["name"].cast(pl.String)
        host = row_numbers(blocking.table["host"])
        always_waiting: set[str] = set()
        for op_of_row in (outermost_aten(a), backward_nodes(a)):
            op_rows = np.unique(op_of_row[op_of_row >= 0])
            waits = np.isin(op_rows, op_of_row[host])
            calls = pl.DataFrame({"name": names.gather(op_rows), "waits": waits})
            calls = calls.group_by("name").agg(pl.col("waits").mean())
            always_waiting.update(calls.filter(pl.col("waits") >= self.min_waiting_share)["name"])
        if always_waiting:
            select = Select(on="host", kind=("op",), name=exact_pattern(always_waiting))
            edits.append(scale_edit(select, *self.range_of("remaining_host_share")))
        return edits

    def _advice(
        self, a: Analysis, blocking: BlockingCalls, where: list[Location]
    ) -> dict[str, Any]:
        """Choose the advice by the library that waits: the program cannot change a library's
        shapes."""
        library = innermost_library(a, row_numbers(blocking.table["host"]), blocking.idle)
        if library is None and where and where[0].op is not None and where[0].file is None:
            line = line_of_operator(a, where[0].op)
            library = None if line is None else line.library_function
        if library is None:
            return self.case("in the program's own code")
        case = "in a library"
        if re.search(r"gcn_norm|self_loops", library) and "torch_geometric" in library:
            case = "PyTorch Geometric normalises the graph"
            edits = [*self._edits(a, blocking), *remove_at("without_gradient", gaps=True)]
            return {"edits": edits, **self.case(case, library=library)}
        elif "torchmetrics" in library:
            calls = runs_code_of(a, _CALLS_METRIC)
            case = f"torchmetrics {'computes each batch' if calls else 'checks values'}"
        return self.case(case, library=library)

    def _reason(self, a: Analysis, blocking: BlockingCalls) -> str:
        operators = count_noun(blocking.per_step(a), "operator")
        return f"after {operators}{per_step(a)} whose output size the host has to read back."

    @staticmethod
    def examples() -> Examples:
        mask, integers, host, item = (TraceBuilder() for _ in range(4))
        for _ in mask.steps():
            mask.product(300, 6)
            _add_masked_index(mask)
            mask.product(300, 6)
        for _ in integers.steps():
            integers.product(300, 6)
            integers.run("aten::index", "index_elementwise_kernel", 10)
            integers.host(400)
            integers.product(300, 6)
        for _ in host.steps():
            host.product(300, 6)
            host.on_host("aten::nonzero", 300)
            host.product(300, 6)
        for _ in item.steps():
            item.product(300, 6)
            item.item()
            item.host(400)
        return {
            "boolean indexing": mask,
            "integer indices": (integers, "a.syncs.is_empty()"),
            "a host tensor": (host, "a.syncs.is_empty()"),
            "item": (item, "share < self.min_share"),
        }


class BlockingPinnedCopy(BlockingRule):
    """A batch is in pinned memory, but ``.to(device)`` without ``non_blocking=True`` makes the host
    wait until it has arrived. The host cannot launch the next work meanwhile.

    In the trace it is a copy ``Pinned -> Device`` whose operator also waits for the stream. The
    rule counts the GPU idle time after the wait: until the next work that the thread launches, at
    most as long as it waited. The copy itself still takes its time; copies-not-overlapped checks
    whether compute could hide it."""

    id = "blocking-pinned-copy"
    title = "The host waits for copies from pinned memory"
    category = "transfer"
    knobs = ("loader-pinning",)
    silent_in = SILENT_TRACES
    references = ("https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",)

    fix = (
        "Copy with non_blocking=True. Work on the same stream sees the data in order. Do not "
        "overwrite the pinned source before the copy ends; a DataLoader with pin_memory=True "
        "takes care of that."
    )
    code = "batch = batch.to(device, non_blocking=True)"
    verify = "Profile again: no cudaStreamSynchronize is left in the copy's operator."
    falsified_by = "as much GPU idle time in a run with non_blocking=True"
    assumptions = ("the source buffer is not reused before the copy has ended",)
    confidence = 0.9

    framework_advice = in_any_language(
        "Copy asynchronously on a stream: the memory is pinned already.",
        cuda="Replace cudaMemcpy with cudaMemcpyAsync, and wait with an event where the result is "
        "needed.",
        code="cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, copies);\n"
        "cudaEventRecord(arrived, copies);\n"
        "cudaStreamWaitEvent(compute, arrived, 0);   // the host does not wait",
        falsified_by="a run with asynchronous copies in which the GPU idles as long",
    )

    _sync_selects = PINNED_CALLS

    def _calls(self) -> pl.Expr:
        return TO_DEVICE_PINNED

    def _reason(self, a: Analysis, blocking: BlockingCalls) -> str:
        copies = count_noun(max(1, round(blocking.table.height / a.step_count)), "copy")
        return f"after {copies}{per_step(a)} from pinned memory that the host waited for."

    def _details(self, a: Analysis, blocking: BlockingCalls) -> list[Evidence]:
        bytes_copied = sum_column(a.trace.gpu["bytes"].gather(blocking.table["copy"]))
        return [
            amount_per_step(a, "copies that block", blocking.table.height, "count"),
            amount_per_step(a, "host blocked in these calls", sum_column(blocking.table["waited"])),
            amount_per_step(a, "bytes copied", bytes_copied, "bytes"),
        ]

    @staticmethod
    def examples() -> Examples:
        blocking, non_blocking, pageable, hidden = (TraceBuilder() for _ in range(4))
        for _ in blocking.steps():
            blocking.to("HtoD", 24 << 20, blocking=True)
            blocking.host(500)
            blocking.product(1000, 6)
        for _ in non_blocking.steps():
            non_blocking.to("HtoD", 24 << 20)
            non_blocking.host(500)
            non_blocking.product(1000, 6)
        for _ in pageable.steps():
            pageable.to("HtoD", 24 << 20, pinned=False)
            pageable.host(500)
            pageable.product(1000, 6)
        for _ in hidden.steps():
            hidden.product(1000, 6)
            hidden.to("HtoD", 24 << 20, blocking=True, stream=13)
        return {
            "to(device) of a pinned batch": blocking,
            "non_blocking": (non_blocking, "a.syncs.is_empty()"),
            "pageable": (pageable, "share < self.min_share"),
            "behind a full queue": (hidden, "share < self.min_share"),
        }


def _add_masked_index(b: TraceBuilder) -> None:
    with b.op("aten::index"):
        with b.op("aten::nonzero"):
            b.launch("cub::DeviceReduceSingleTileKernel", 5)
            b.copy("DtoH", 8, 1.5, pinned=False, op=None)
        b.host(200)
        b.launch("index_elementwise_kernel", 10)

"""Reads of GPU values that block the host, some so often that host and GPU take turns."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import polars as pl
from msgspec import structs

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, PassedCheck, Select, SkippedCheck
from advisor.core.intervals import EMPTY, covered_length, intersect, union, union_of
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.measure.host.device_reads import COPY, VALUE
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import innermost_ancestor, parent_rows
from advisor.rules.support.citations import (
    ENGINE_FLOOR,
    FOREACH,
    SAM_LAUNCHES,
    SILENT_TRACES,
    TENSORBOARD,
    TRIED_ON_TRACES,
    XPROF,
    public_traces,
)
from advisor.rules.support.common import (
    CONFUSION_MATRIX,
    amount_per_step,
    costliest_places,
    int_column,
    of_step,
    per_step,
    row_numbers,
    scale_edit,
    sum_column,
)
from advisor.rules.support.framework_advice import READ_SELDOM, in_any_language
from advisor.rules.support.host_waits import (
    BlockingCalls,
    async_edit,
    count_causes,
    locate_blocking,
    make_calls_async,
    number_reads,
    select_blocking_calls,
    with_operators,
)
from advisor.rules.support.launch_gaps import LAUNCHING, measure_launch_gaps
from advisor.testing import Examples, TraceBuilder

_OPTIMIZER_CODE = r"^Optimizer\.|clip_grad|grad_scaler"

_READ_LATER = (
    "if step % 100 == 0:\n"
    "    print(running.item() / 100)   # one wait in 100 steps\n"
    "    running.zero_()"
)
_KEEP_ON_GPU = (
    "Keep the value on the GPU: add up {what} as tensors and read them every N steps. Replace "
    "branches on tensors with torch.where. Copy what the host does need with non_blocking=True "
    "into pinned memory, and read it one step later. torch.cuda.set_sync_debug_mode('warn') lists "
    "the other places."
)


class ImplicitSync(Rule):
    """Code reads a value that is on the GPU (``.item()``, ``.cpu()``, ``print(tensor)``,
    ``if tensor:``). The host waits until the GPU has finished, and the GPU then idles until the
    host launches new work.

    A call counts only when it really waited. It contains a copy from the GPU or a synchronization
    that ended after the call began, on the thread that goes on to launch work. Names alone prove
    nothing: ``aten::item`` on a CPU tensor never waits (a public trace has 945 of them and not one
    sync).

    The cost is never the wait itself, during which the GPU works, but the GPU idle time after it.
    That lasts from the end of the awaited work to the next work that the thread launches. Without
    the call the host would be ahead by the time it waited, so the smaller of the two counts. The
    synchronization that ends the profiler's window does not count. Data-dependent shapes and
    explicit ``synchronize()`` have their own rules.

    A wait without idle time after it can still matter: the host loses its lead, and the GPU idles
    later for launches. Where the host waits for a notable part of the step, a note says so, with
    the saving in a replay without these waits. A wait after the last launch of the recording only
    fetches the result, and does not count. The note is not ranked, because a trace does not show
    whether the host needs the values.

    Where the host is already late, the value is ready and a read does not wait. It still costs the
    time of the call and of the code around it. One example is a loop that reads values one by one
    (a norm and ``item()`` for every parameter). Another is work on data that was read (a metric in
    NumPy), during which nothing is launched. GPU idle time in both counts too. Without Python
    stacks, what the host does after a read of data is not recorded; the low end of the range leaves
    it out.

    The same wait inside the optimizer (a scaler that reads ``found_inf``, gradient clipping that
    compares the norm) is listed in the evidence."""

    id = "implicit-sync"
    title = "Reading GPU values leaves the GPU idle"
    found_in = public_traces(
        "a100_train_6steps dlrm_8ranks v100_train_copy_heavy h100/host_metric "
        "pairs/sam_1_fp32_many_syncs"
    )
    silent_in = public_traces(
        "b200_eager h100_bert_small_inference nccl_collectives mi250_train "
        "mi300_timesformer_inference"
    )
    validation_note = (
        "A100 and V100 training copy 60 times to the host in 6 steps. That blocks the host for 75 "
        "and 312 ms, but leaves the GPU idle for 0.7 and 0.6% of the time only. So both get a "
        "note, and so does one read of 0.9 ms in DLRM. Silent on video inference on an MI300X, "
        "which waits 94 ms for its result and launches nothing after it"
    )
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        "https://pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
    )

    min_share = Threshold(
        0.02, "of the step: GPU idle after these calls; twice the noise", ENGINE_FLOOR
    )
    remaining_loop_share = Factor(
        0.15, "of a loop of reads remains if one call computes and reads all values", FOREACH
    )
    best_remaining_loop_share = Factor(0.05, "of it remains, at best", FOREACH)
    min_waited = Threshold(
        0.05,
        "of the step: the host waits but the GPU does not idle; gives a note, as for the loader",
        TENSORBOARD,
        XPROF,
    )

    fix = _KEEP_ON_GPU.format(what="losses and metrics")
    code = (
        "running = torch.zeros((), device=device)   # once, before the loop\n"
        "# In each step, the sum stays on the GPU.\n"
        "running += loss.detach()\n" + _READ_LATER
    )
    verify = "Profile again: the GPU no longer idles after these calls."
    falsified_by = "as much GPU idle time at the same place in a run without these reads"
    assumptions = ("nothing before the next launch needs the value on the host",)
    confidence = 0.85
    cases = {
        "inside the optimizer": {
            "fix": f"{fix} In the optimizer: bf16 needs no gradient scaler, fused=True keeps "
            "found_inf on the GPU, and clip_grad_norm_ does not need error_if_nonfinite."
        },
        "in a loop": {
            "fix": "Read all values at once: stack them on the GPU and call .tolist() a single "
            "time, every N steps. The function torch._foreach_norm computes the norms of a whole "
            "list of tensors. " + _KEEP_ON_GPU.format(what="losses and metrics"),
            "code": "if step % 100 == 0:\n"
            "    norms = torch._foreach_norm([p.grad for p in model.parameters()])\n"
            "    values = torch.stack(norms).tolist()   # one read for all",
        },
        "the host works on what it has read": {
            "title": "The GPU idles while the host works on values read from it",
            "fix": "Do this work on the GPU: count, sort and compare with torch operators "
            "(index_add_ for a confusion matrix), and read the result at the end. Or copy without "
            "waiting, and work on it one step later, in another process.",
            "code": CONFUSION_MATRIX,
            "assumptions": ("the GPU can do the work in little time, or another process does it",),
        },
        "the GPU has other work meanwhile": {
            "title": "The host waits for GPU values and no longer runs ahead of the GPU",
            "fix": "Read values that are only logged later. Compute sizes (splits of an "
            "all-to-all, lengths) one batch ahead, or send them one batch ahead.",
            "verify": "Profile again: the host no longer waits in these calls.",
            "confidence": 0.5,
            "falsified_by": "the same step time in a run without these reads",
            "assumptions": ("the host can go on without the values",),
        },
    }

    inference = {
        "cases": {
            "in a loop": {
                "fix": "Read all values at once: stack them on the GPU and call .tolist() a single "
                "time. " + _KEEP_ON_GPU.format(what="results"),
                "code": "values = torch.stack(scores).tolist()   # one read for all",
            }
        },
        "fix": _KEEP_ON_GPU.format(what="results"),
        "code": "running = torch.zeros((), device=device)   # once, before the loop\n"
        "# In each pass, the sum stays on the GPU.\n"
        "running += score.detach()\n" + _READ_LATER,
    }
    framework_advice = {
        **in_any_language(
            "Do not read GPU results in the loop. Decide on the GPU, or read the value of an "
            "earlier iteration that has arrived meanwhile. Copy asynchronously into pinned memory, "
            "and check later whether it is there.",
            cuda="Call cudaMemcpyAsync into memory from cudaHostAlloc, then cudaEventQuery in a "
            "later iteration.",
            code="cudaMemcpyAsync(seen, value, sizeof *seen, cudaMemcpyDeviceToHost, s);\n"
            "cudaEventRecord(ready, s);\n"
            "// one iteration later:\n"
            "if (cudaEventQuery(ready) == cudaSuccess) use(*seen);",
        ),
        **READ_SELDOM,
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        if not _is_runtime_recorded(a):
            yield SkippedCheck(
                what="waits of the host for the GPU",
                why="the trace has no synchronizing or event calls, which every complete recording "
                f"of the {'HIP' if a.trace.meta.vendor == 'amd' else 'CUDA'} runtime has",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], nothing filtered",
            )
            return
        no_waits = (
            a.syncs.filter(~pl.col("profiler")).is_empty() and _waiting_share(a) < self.min_share
        )
        if no_waits and a.steps.used.height > 1:
            yield PassedCheck(text="no call inside the steps makes the host wait for the GPU")
            return
        blocking = with_operators(a, select_blocking_calls(a, self._reads()))
        loops, host_work = (
            intersect(intervals, a.breakdown.idle) for intervals in (a.read_loops, a.after_reads)
        )
        if not len(blocking.table):
            loops = host_work = EMPTY
        start = int_column(blocking.table, "ts")
        is_outside_loop = covered_length(start, start + 1, loops) == 0
        idle = int(blocking.idle[is_outside_loop].sum()) + union_of(loops, host_work).total
        share = idle / a.span_ns
        if share < self.min_share:
            yield from self._host_waits(a)
            return
        reads = blocking.reads
        in_optimizer = self._in_optimizer(a, blocking)
        evidence = [
            amount_per_step(a, "GPU idle in and after these calls", idle),
            self.compare("GPU idle in and after these calls, share", share, "min_share", per=a.per),
            amount_per_step(a, "calls before idle time", reads, "count"),
            amount_per_step(a, "host blocked in these calls", sum_column(blocking.table["waited"])),
            Evidence("calls by name", count_causes(a, blocking)),
        ]
        if in_optimizer:
            evidence.append(Evidence("GPU idle after calls in the optimizer", in_optimizer, "ns"))
        values = Select(on="host", kind=("runtime",), under=VALUE)
        copies = Select(on="host", call=("memcpy", "memcpy_blocking", "sync_stream"), under=COPY)
        edits = [async_edit(a, blocking, values, copies)]
        effect, case = "The host waits for the result and only then launches the next work.", ""
        if in_optimizer:
            case = "inside the optimizer"
        if loops.total >= self.min_share * a.span_ns:
            evidence.append(amount_per_step(a, "GPU idle in loops of reads", loops.total))
            edits += [
                Edit(op="remove", select=values),
                scale_edit(
                    Select(on="gap", at="read_loop"),
                    self.remaining_loop_share,
                    self.best_remaining_loop_share,
                    1.0,
                ),
            ]
            effect, case = "Most of them are made one by one in a loop.", "in a loop"
        if host_work.total >= self.min_share * a.span_ns:
            evidence.append(
                amount_per_step(a, "GPU idle in work on what was read", host_work.total)
            )
            edits.append(scale_edit(Select(on="gap", at="after_read"), 0.0, 0.0, 1.0))
            effect = (
                f"The host works on them for {t.format_duration(host_work.total / a.step_count)}"
            )
            effect += f"{per_step(a)} before it launches anything."
            case = "the host works on what it has read"
        yield Finding(
            summary=(
                f"The GPU idles for {of_step(a, idle)} because of "
                f"{count_noun(blocking.per_step(a), 'read')} of GPU values{per_step(a)}. {effect}"
            ),
            evidence=evidence,
            where=locate_blocking(a, blocking),
            edits=edits,
            **(self.case(case) if case else {}),
        )

    def _host_waits(self, a: Analysis) -> Iterator[Finding]:
        """Report waits of the host while the GPU has other work. The last wait of a recording, for
        its result, delays no launch."""
        is_launch = a.trace.cpu["call"].is_in(["launch", "graph_launch"])
        last_launch = a.trace.cpu["ts"].filter(is_launch).max() or 0
        blocking = select_blocking_calls(a, self._reads() & (pl.col("ts") < last_launch))
        waited = int_column(blocking.table, "waited")
        if waited.sum() < self.min_waited * a.span_ns:
            return
        calls = row_numbers(blocking.table["host"])
        reads = blocking.table.select(pl.coalesce("op", "host").n_unique()).item()
        yield Finding(
            summary=(
                f"The host waits for {of_step(a, int(waited.sum()))} in "
                f"{count_noun(-(-reads // a.step_count), 'read')}{per_step(a)} of GPU values. The "
                "GPU has work meanwhile, but the next launches come later."
            ),
            evidence=[Evidence("calls by name", count_causes(a, blocking))],
            where=costliest_places(a, calls, waited, instance=number_reads(blocking.table)),
            edits=[make_calls_async(a, calls[np.argsort(-waited, kind="stable")])],
            informational=True,
            **self.case("the GPU has other work meanwhile"),
        )

    @staticmethod
    def _reads() -> pl.Expr:
        """Return the condition for reads of values, copies to the host, and syncs in optimizer
        code."""
        to_host = pl.col("cause").str.contains(COPY) & (pl.col("direction") == "DtoH")
        return pl.col("cause").str.contains(f"{VALUE}|{_OPTIMIZER_CODE}") | to_host.fill_null(False)

    @staticmethod
    def _in_optimizer(a: Analysis, blocking: BlockingCalls) -> float:
        """Return GPU idle time per step, ns, after reads in the optimizer, clipping or a scaler."""
        optimizer_row = innermost_ancestor(
            parent_rows(a.trace), name_matches(a.trace.cpu["name"], _OPTIMIZER_CODE).to_numpy()
        )
        is_in_optimizer = optimizer_row[row_numbers(blocking.table["host"])] >= 0
        return float(blocking.idle[is_in_optimizer].sum()) / a.step_count

    @staticmethod
    def examples() -> Examples:
        item, copied, host_tensor, late, at_end, result, loop, numpy = (
            TraceBuilder() for _ in range(8)
        )
        for _ in item.steps():
            _add_work(item)
            item.item()
            item.host(1500)
        for _ in copied.steps():
            _add_work(copied)
            copied.to("DtoH", 4096, pinned=False)
            copied.host(1500)
        for _ in host_tensor.steps():
            _add_work(host_tensor)
            for _ in range(20):
                with host_tensor.op("aten::item"):
                    host_tensor.on_host("aten::_local_scalar_dense")
            host_tensor.sync()
        for _ in late.steps():
            _add_work(late)  # the GPU has long been idle when the read comes
            late.host(8000)
            late.item()
            late.host(2000)
        for _ in loop.steps():
            for _ in range(40):
                loop.run("aten::linalg_vector_norm", "reduce_kernel", 3, host_us=20)
                loop.host(10)
                loop.item()
        for _ in numpy.steps():
            _add_work(numpy)
            numpy.to("DtoH", 1 << 20, pinned=False)
            numpy.host(3000)
        for _ in at_end.steps():
            _add_work(at_end)
        at_end.sync()
        with result.step():
            _add_work(result)
            result.to("DtoH", 1 << 20, pinned=False)
        return {
            "loss.item() every step": item,
            "result.cpu() every step": copied,
            "a norm and item() for each parameter": loop,
            "a metric in NumPy": numpy,
            "item of a host tensor": (host_tensor, "waited.sum() < self.min_waited"),
            "nothing left to wait for": (late, "min_waited"),
            "the result, after the last launch": (result, "waited.sum() < self.min_waited"),
            "profiler": (at_end, "a.steps.used.height > 1"),
        }


def _add_work(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 500, [[1024, 1024], [1024, 1024]], times=10)


def _waiting_share(a: Analysis) -> float:
    """Return the share (0 to 1) of the host's steps that it spends in calls that wait. If the host
    is ahead, its steps begin and end before the device's."""
    is_sync = pl.col("call").cast(pl.String).str.starts_with("sync").fill_null(value=False)
    profiler = a.syncs.filter("profiler")["ts"].implode()
    calls = a.trace.cpu.filter(is_sync & ~pl.col("ts").is_in(profiler))
    ts = calls["ts"].to_numpy()
    waits = intersect(union(ts, ts + calls["dur"].to_numpy()), a.steps.host_spans)
    return waits.total / max(a.steps.host_spans.total, 1)


def _is_runtime_recorded(a: Analysis) -> bool:
    """Return whether calls other than launches and copies were recorded; some traces lack them."""
    calls = a.trace.cpu["call"].drop_nulls()
    return bool((~calls.is_in(["launch", "graph_launch", "memcpy", "memset"])).any())


READING_CALLS = Select(
    on="host",
    kind=("runtime",),
    call=("memcpy", "memcpy_blocking", "sync_stream", "sync_event"),
    copy=("DtoH",),
)


class HostReads(Rule):
    """The program reads GPU values so often (``.item()``, ``.cpu()``, ``if tensor:``, ``nonzero``,
    indexing with a mask) that the host never gets ahead. The host waits for the GPU, then the GPU
    waits for the next launches: they idle in turns.

    No single read costs much, because the idle time after each is short. Removing a few gains
    almost nothing, because the next read follows soon. So the rule judges them together. The host
    waits for a notable part of the step, and the GPU idles for a notable part. There are too few
    launches between two reads to fill a queue. CUDA graphs do not help: a capture allows no such
    wait.

    So many reads mean that items are processed one by one, each with its own launches. Where the
    GPU also idles for launches (as in launch-bound), working on whole batches saves most launches
    along with the reads. In one program this change reduced 19,746 launches to 5,768. The low end
    of the range is the gain from removing the reads alone. Without Python stacks the loop's own
    code between two reads is not recorded. Its idle time then counts as idle time for launches.

    Explicit synchronization and copies to the GPU are not counted."""

    id = "host-reads"
    title = "Frequent reads of GPU values make host and GPU take turns"
    found_in = public_traces(
        "pairs/sam_1_fp32_many_syncs pairs/sam_2_fp32_few_syncs pairs/sam_3_bf16_compiled_sdpa"
    )
    silent_in = SILENT_TRACES
    validation_note = (
        "fires on sam_1_fp32_many_syncs (7,023 reads among 26,796 launches). Its authors went from "
        "2,565 to 1,400 ms by encoding masks together instead of one by one. Fires on the "
        "remaining reads (275 reads, 9%; 201 and 27% once compiled in bf16). Silent on A100 and "
        "V100 training with 8 to 10 reads per step"
    )
    references = (
        "https://pytorch.org/blog/accelerating-generative-ai/",
        "https://pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    min_share = Threshold(
        0.05, "of the step, both host waiting and GPU idle; as for the loader", TENSORBOARD
    )
    looks_at: ClassVar[Mapping[str, str]] = {
        "DtoH": "reads hold up the GPU for less than {min_share:.0%} of the time"
    }
    max_value_us = Threshold(100, "µs of copying: a shorter copy reads a value", TRIED_ON_TRACES)
    max_copy_share = Threshold(
        0.5, "of a wait is the copy itself: it fetches data, not a single value", TRIED_ON_TRACES
    )
    max_apart = Threshold(30, "launches between two reads: more fill a queue", TRIED_ON_TRACES)
    remaining_launch_share = Factor(0.3, "of the launches remain with whole batches", SAM_LAUNCHES)
    max_gap_ms = Threshold(
        50.0, "ms of one idle gap between two reads: more is other work", TRIED_ON_TRACES
    )
    best_remaining_launch_share = Factor(0.05, "of the launches remain, at best", TRIED_ON_TRACES)

    fix = (
        "Compute all items as one batch instead of one by one, so that one read serves all. "
        "Replace boolean indexing with torch.where or a multiplication with the mask, branches on "
        "tensors with arithmetic, and lists of GPU tensors with one padded tensor. Read what the "
        "host needs once, at the end: one read per item costs nearly as much as several. "
        "torch.cuda.set_sync_debug_mode('warn') names each line."
    )
    code = (
        "# instead of  for m in masks:  if (m > 0).any(): keep.append(encode(m))\n"
        "wanted = (masks > 0).flatten(1).any(1)   # stays on the GPU, for all masks\n"
        "keep = encode(masks[wanted])             # one read, one call"
    )
    verify = (
        "Profile again: a handful of copies to the host per step, and a GPU that is busy while "
        "the host prepares the next work."
    )
    falsified_by = "as much GPU idle time in a run without these reads"
    assumptions = ("the host can prepare the next work without these values",)
    confidence = 0.8
    cases = {
        "launches of single items": {
            "alternatives": "launches",
            "assumptions": (
                "the host can prepare the next work without these values",
                "with whole batches, {remaining_launch_share:.0%} of the launches remain, at best "
                "{best_remaining_launch_share:.0%}, at worst all",
            ),
        }
    }

    framework_advice = {
        **in_any_language(
            "Keep data on the GPU from one piece of work to the next, and copy to the host once, "
            "at the end. Work on many items in one launch, and decide on the GPU. Where the host "
            "must read, let it read pinned memory of the previous piece while the GPU works on the "
            "next.",
            cuda="Replace cudaMemcpy after each kernel with cudaMemcpyAsync on two streams with "
            "two buffers.",
            code="for (int i = 0; i < pieces; ++i) {\n"
            "  cudaStream_t s = streams[i % 2];\n"
            "  cudaStreamSynchronize(s);        // two pieces back: done by now\n"
            "  consume(pinned[i % 2]);\n"
            "  kernel<<<grid, block, 0, s>>>(device[i % 2], n);\n"
            "  cudaMemcpyAsync(pinned[i % 2], device[i % 2], piece,\n"
            "                  cudaMemcpyDeviceToHost, s);\n"
            "}",
        ),
        **READ_SELDOM,
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.syncs.is_empty():
            return
        to_host = pl.col("direction") == "DtoH"
        fetches = select_blocking_calls(a, to_host.fill_null(False))
        copy_ns = a.trace.gpu["dur"].gather(fetches.table["copy"]).fill_null(0)
        is_value = (copy_ns < self.max_value_us * 1000) | (
            copy_ns < self.max_copy_share * fetches.table["waited"]
        )
        reads = BlockingCalls(fetches.table.filter(is_value), fetches.idle[is_value.to_numpy()])
        calls = row_numbers(reads.table["host"])
        launches = a.trace.gpu["launch"].filter(pl.Series(a.in_window)).n_unique()
        copies = fetches.table["copy"].n_unique()
        if not len(calls) or launches > self.max_apart * copies:
            return
        waited = int_column(reads.table, "waited")
        wait_ns, idle_ns = float(waited.sum()), float(a.breakdown.idle.total)
        share = min(wait_ns, idle_ns) / a.span_ns
        if share < self.min_share:
            return
        launches_saved = self._launches(a)
        yield Finding(
            summary=(
                f"The host waits for {of_step(a, int(wait_ns))} in "
                f"{count_noun(max(1, round(copies / a.step_count)), 'read')} of GPU "
                f"values{per_step(a)}, one every {launches / copies:.0f} launches. The GPU idles "
                f"for {of_step(a, int(idle_ns))}."
            ),
            evidence=[
                amount_per_step(a, "host blocked in reads", wait_ns),
                amount_per_step(a, "GPU idle", idle_ns),
                self.compare(
                    "smaller of host blocked and GPU idle, share", share, "min_share", per=a.per
                ),
                amount_per_step(a, "reads of GPU values", copies, "count"),
                self.compare("launches between reads", launches / copies, "max_apart", "count"),
                Evidence("calls by name", count_causes(a, reads)),
            ],
            where=costliest_places(a, calls, waited + 1, instance=number_reads(reads.table)),
            edits=[Edit(op="make_async", select=READING_CALLS), *launches_saved],
            **(self.case("launches of single items") if launches_saved else {}),
        )

    def _launches(self, a: Analysis) -> list[Edit]:
        """Return the edit for launches between the reads, if the GPU also waits for them."""
        gaps = measure_launch_gaps(a)
        if gaps is None or not gaps.at_launches or gaps.idle < self.min_share * a.span_ns:
            return []
        # the queue is empty between two reads, so the gaps are longer than those of one launch
        select = structs.replace(LAUNCHING, max_ns=round(self.max_gap_ms * 1e6))
        if not (a.trace.cpu["kind"] == "python").any():  # the loop's own code is not recorded
            select = structs.replace(select, cause=(*select.cause, "unknown"))
        return [
            scale_edit(select, self.remaining_launch_share, self.best_remaining_launch_share, 1.0)
        ]

    @staticmethod
    def examples() -> Examples:
        frequent, once, ready, busy, bulk = (TraceBuilder() for _ in range(5))
        for _ in frequent.steps():
            for _ in range(40):
                frequent.run("aten::mul", "elementwise_kernel", 60, times=4)
                frequent.item()
                frequent.host(120)
        for _ in once.steps():
            once.run("aten::mul", "elementwise_kernel", 60, times=120)
            once.item()
            once.host(2000)
        for _ in ready.steps():
            for _ in range(40):
                ready.run("aten::mul", "elementwise_kernel", 3)
                ready.host(400)
                ready.item()
        for _ in busy.steps():
            for _ in range(8):
                busy.product(900, 20)
                busy.item()
        for _ in bulk.steps():
            for _ in range(10):
                bulk.run("aten::mul", "elementwise_kernel", 100)
                with bulk.op("aten::copy_"):
                    bulk.copy("DtoH", 64 << 20, 5000, pinned=False, op=None)
                bulk.host(3000)
        return {
            "one read after four kernels": frequent,
            "fetched results": (bulk, "max_copy_share"),
            "one read per step": (once, "max_apart"),
            "values that are ready": (ready, "min_share"),
            "a busy GPU": (busy, "min_share"),
        }

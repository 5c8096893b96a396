"""Reads of GPU values so frequent that host and GPU take turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core.finding import Edit, Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.rules.common import column, figure, of_step, per, places, rows
from advisor.rules.elsewhere import READ_SELDOM, in_any_language
from advisor.rules.host.launch_gaps import LAUNCHING, measure_launch_gaps
from advisor.rules.sources import OURS, SAM_PAIR, SILENT_TRACES, TENSORBOARD
from advisor.rules.sync.host_waits import BlockingCalls, count_causes, select_blocking_calls
from advisor.testing import TraceBuilder

READING_CALLS = Select(
    on="host",
    kind=("runtime",),
    call=("memcpy", "memcpy_blocking", "sync_stream", "sync_event"),
    copy=("DtoH",),
)


class HostReads(Rule):
    """The program reads GPU values so often (``.item()``, ``.cpu()``, ``if tensor:``, ``nonzero``,
    indexing with a mask) that the host never gets ahead. It waits for the GPU, then the GPU waits
    for the next launches, and so on: both idle in turns.

    No single read costs much, because the idle time after each is short, and removing some of them
    gains next to nothing while another follows soon after. So they are judged together: the host
    waits for a notable part of the step, the GPU idles for a notable part, and too few launches lie
    between two reads to fill a queue. CUDA graphs do not help: a capture allows no such wait.

    So many reads mean that items are handled one by one, each with launches of its own. Where the
    GPU idles for launches too (as in launch-bound), working on whole batches saves most of these
    along with the reads: of 19,746 launches, the authors of such a program needed 5,768 after it.
    The low end of the range is that of the reads alone.

    Explicit synchronization and copies to the GPU are not counted.
    """

    id = "host-reads"
    title = "Frequent reads of GPU values make host and GPU take turns"
    category = "sync"
    found_in = (
        "traces/pairs/sam_1_fp32_many_syncs",
        "traces/pairs/sam_2_fp32_few_syncs",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    silent_in = SILENT_TRACES
    validated_on = (
        "fires on sam_1_fp32_many_syncs (7,023 reads among 26,796 launches), whose authors went "
        "from 2,565 to 1,400 ms by encoding masks together instead of one by one, and on what they "
        "left (275 reads, 9 %; 201 and 27 % once compiled in bf16); silent on "
        "A100 and V100 training with 8 to 10 reads per step"
    )
    references = (
        "https://pytorch.org/blog/accelerating-generative-ai/",
        "https://pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    min_share = Threshold(
        0.05, "of the step, both host waiting and GPU idle; as for the loader", TENSORBOARD
    )
    bulk_us = Threshold(100, "µs of copying: a shorter copy reads a value", OURS)
    bulk = Threshold(0.5, "of a wait is the copy itself: data is fetched, not a value read", OURS)
    max_apart = Threshold(30, "launches between two reads: more fill a queue", OURS)
    launches_left = Threshold(0.3, "of the launches remain once items go in batches", SAM_PAIR)
    fewest_left = Threshold(0.05, "of the launches remain, at best", OURS)

    fix = (
        "Work on whole batches instead of single items, so that one read serves them all. Replace "
        "boolean indexing with torch.where or a multiplication with the mask, `if tensor:` with "
        "arithmetic, and lists of GPU tensors with one padded tensor. Read what the host needs "
        "once, at the end. Remove all of them: one read that is left costs nearly as much. "
        "torch.cuda.set_sync_debug_mode('warn') names each line."
    )
    code = (
        "# instead of  for m in masks:  if (m > 0).any(): keep.append(encode(m))\n"
        "wanted = (masks > 0).flatten(1).any(1)   # stays on the GPU, for all masks\n"
        "encoded = encode(masks)                  # one call for the batch\n"
        "keep = encoded[wanted.nonzero().squeeze(1)]  # one read"
    )
    verify = (
        "Profile again: a handful of copies to the host per step, and a GPU that is busy while "
        "the host prepares the next work."
    )
    falsified_by = "as much GPU idle time in a run without these reads"
    assumptions = ("the host can prepare the next work without these values",)
    confidence = 0.8
    cases: ClassVar = {
        "launches of single items": {
            "alternatives": "launches",
            "assumptions": (
                "the host can prepare the next work without these values",
                "{launches_left:.0%} of the launches remain once items go in batches "
                "({fewest_left:.0%} to 100%)",
            ),
        }
    }

    elsewhere: ClassVar = {
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

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the host's time in reads with the GPU's idle time."""
        if a.device_id is None or a.syncs.is_empty():
            return
        to_host = pl.col("direction") == "DtoH"
        fetches = select_blocking_calls(a, to_host.fill_null(False))
        copy_ns = a.trace.gpu["dur"].gather(fetches.table["copy"]).fill_null(0)
        is_value = (copy_ns < self.bulk_us * 1000) | (copy_ns < self.bulk * fetches.table["waited"])
        reads = BlockingCalls(fetches.table.filter(is_value), fetches.idle[is_value.to_numpy()])
        calls = rows(reads.table["host"])
        launches = a.trace.gpu["launch"].filter(pl.Series(a.in_window)).n_unique()
        copies = fetches.table["copy"].n_unique()
        if not len(calls) or launches > self.max_apart * copies:
            return
        waited = column(reads.table, "waited")
        wait, idle = float(waited.sum()), float(a.breakdown.idle.total)
        share = min(wait, idle) / a.span_ns
        if share < self.min_share:
            return
        launches_saved = self._launches(a)
        yield Finding(
            summary=(
                f"The host waits for {of_step(a, int(wait))} in "
                f"{count_noun(max(1, round(copies / a.step_count)), 'read')} of GPU "
                f"values{per(a)}, "
                f"one every {launches / copies:.0f} launches. The GPU idles for "
                f"{of_step(a, int(idle))}."
            ),
            evidence=[
                figure(a, "host blocked in reads", wait),
                figure(a, "GPU idle", idle),
                Evidence(
                    "smaller of the two, share", share, "share", *self.limit("min_share"), per=a.per
                ),
                figure(a, "reads", copies, "count"),
                Evidence(
                    "launches between reads", launches / copies, "count", *self.limit("max_apart")
                ),
                Evidence("calls", count_causes(a, reads)),
            ],
            where=places(a, calls, waited + 1),
            edits=[Edit(op="make_async", select=READING_CALLS), *launches_saved],
            **(self.case("launches of single items") if launches_saved else {}),
        )

    def _launches(self, a: Analysis) -> list[Edit]:
        """What goes along with the reads where the GPU also waits for the launches between them."""
        gaps = measure_launch_gaps(a)
        if gaps is None or not gaps.at_launches or gaps.idle < self.min_share * a.span_ns:
            return []
        return [
            Edit(
                op="scale",
                select=LAUNCHING,
                factor=self.launches_left,
                factor_low=self.fewest_left,
                factor_high=1.0,
            )
        ]

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Masks that are handled one by one, each with a read."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                for _ in range(40):
                    b.run("aten::mul", "elementwise_kernel", 60, times=4)
                    b.item()
                    b.host(120)
        return {"one read after four kernels": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """One read per step; frequent reads that find their value ready; a GPU that never idles;
        results that are fetched, which takes as long as the copy."""
        once, ready, busy, bulk = TraceBuilder(), TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with once.step():
                once.run("aten::mul", "elementwise_kernel", 60, times=120)
                once.item()
                once.host(2000)
            with ready.step():
                for _ in range(40):
                    ready.run("aten::mul", "elementwise_kernel", 3)
                    ready.host(400)
                    ready.item()
            with busy.step():
                for _ in range(8):
                    busy.run("aten::mm", "ampere_sgemm_128x64_nn", 900, times=20)
                    busy.item()
            with bulk.step():
                for _ in range(10):
                    bulk.run("aten::mul", "elementwise_kernel", 100)
                    with bulk.op("aten::copy_"):
                        bulk.copy("DtoH", 64 << 20, 5000, pinned=False, op=None)
                    bulk.host(3000)
        return {
            "fetched results": (bulk, "bulk"),
            "one read per step": (once, "max_apart"),
            "values that are ready": (ready, "min_share"),
            "a busy GPU": (busy, "min_share"),
        }

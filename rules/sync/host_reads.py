"""Reads of device values so frequent that host and device work in turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    Rule,
    Select,
    Threshold,
)
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.rules.common import column, figure, of_step, per, places, rows
from advisor.rules.elsewhere import NO_READS, in_any_language
from advisor.rules.sources import OURS, TENSORBOARD
from advisor.rules.sync.held import Held, causes, held_by
from advisor.testing import TraceBuilder

_CALLS = ("memcpy", "memcpy_blocking", "sync_stream", "sync_event")


class HostReads(Rule):
    """The program reads values of the device so often (``.item()``, ``.cpu()``, ``if tensor:``,
    ``nonzero``, indexing with a mask) that the host never gets ahead: it waits for the device, then
    the device waits for the host's next launches, and so on. Both stand idle in turns.

    No single read costs much, for the bubble after each is short, and taking out some of them is
    worth next to nothing as long as another comes soon after. So they are looked at together: the
    host waits for a notable part of the step, the device idles for a notable part, and between two
    reads there are fewer launches than it takes to build up a queue. What can be won is the lesser
    of waiting and idling at most. CUDA graphs are no way out: a capture allows no such wait.

    Explicit synchronisation is not counted, nor are copies to the device.
    """

    id = "host-reads"
    title = "Host and device take turns: the host reads device values all the time"
    category = "sync"
    found_in = (
        "traces/pairs/sam_1_fp32_many_syncs",
        "traces/pairs/sam_2_fp32_few_syncs",
        "traces/pairs/sam_3_bf16_compiled_sdpa",
    )
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    validated_on = (
        "fires on sam_1_fp32_many_syncs (7,023 reads among 26,796 launches), whose authors went "
        "from 2,565 to 1,400 ms by encoding masks together instead of one by one, and on what they "
        "left (275 reads, 9 %; 201 and 27 % once compiled in bf16); silent on "
        "A100 and V100 training with 8 to 10 reads a step"
    )
    references = (
        "https://pytorch.org/blog/accelerating-generative-ai/",
        "https://pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    min_share = Threshold(
        0.05, "of the step, waiting and idling alike; as for the loader", TENSORBOARD
    )
    bulk_us = Threshold(100, "µs of copying below which a value is read, whatever the wait", OURS)
    bulk = Threshold(0.5, "of a wait is the copy itself: data fetched, no value that is read", OURS)
    max_apart = Threshold(30, "launches from one read to the next; fewer are no stream", OURS)

    fix = (
        "Work on whole batches instead of item by item, so that one read serves them all; "
        "replace boolean indexing by torch.where or a multiplication with the mask, "
        "`if tensor:` by arithmetic, and lists of tensors on the device by one padded "
        "tensor; read what the host does need once, at the end, in one copy. All of them "
        "count: one that is left holds the host up nearly as much as many do."
    )
    code = (
        "torch.cuda.set_sync_debug_mode('warn')  # names each line\n"
        "# instead of  for m in masks:  if (m > 0).any(): keep.append(encode(m))\n"
        "wanted = (masks > 0).flatten(1).any(1)   # stays on the device, for all masks\n"
        "encoded = encode(masks)                  # one call for the batch\n"
        "keep = encoded[wanted.nonzero().squeeze(1)]  # one read"
    )
    verify = (
        "Profile again: a handful of copies to the host a step, and a device that is busy "
        "while the host prepares the next work."
    )
    falsified_by = "a run without these reads whose device idles as much"
    assumptions = ("the work can be put so that the host does not need the values meanwhile",)
    confidence = 0.8

    elsewhere: ClassVar = {
        **in_any_language(
            "Keep data on the device from one piece of work to the next, and copy to the host "
            "once, at the end: work on many items in one launch, take decisions on the device, and "
            "where the host must read, let it read pinned memory of the piece before while the "
            "device works on the next.",
            cuda="cudaMemcpyAsync on two streams with two buffers in place of "
            "cudaMemcpy after each kernel.",
            code="for (int i = 0; i < pieces; ++i) {\n"
            "  cudaStream_t s = streams[i % 2];\n"
            "  cudaStreamSynchronize(s);        // of two pieces before: done by now\n"
            "  consume(pinned[i % 2]);\n"
            "  kernel<<<grid, block, 0, s>>>(device[i % 2], n);\n"
            "  cudaMemcpyAsync(pinned[i % 2], device[i % 2], piece,\n"
            "                  cudaMemcpyDeviceToHost, s);\n"
            "}",
        ),
        TENSORFLOW: FrameworkAdvice(NO_READS, "if step % 100 == 0:\n    print(float(loss))"),
        JAX: FrameworkAdvice(
            "JAX dispatches asynchronously, until a value is asked for. " + NO_READS,
            "if step % 100 == 0:\n    print(float(loss))",
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Hold the time in reads against the device's idle time."""
        if a.device_id is None or a.syncs.is_empty():
            return
        to_host = pl.col("direction") == "DtoH"
        every = held_by(a, to_host.fill_null(False))
        took = a.trace.gpu["dur"].gather(every.table["copy"]).fill_null(0)
        value = (took < self.bulk_us * 1000) | (took < self.bulk * every.table["waited"])
        reads = Held(every.table.filter(value), every.lost[value.to_numpy()])
        calls = rows(reads.table["host"])
        launches = a.trace.gpu["launch"].filter(pl.Series(a.in_window)).n_unique()
        copies = every.table["copy"].n_unique()
        if not len(calls) or launches > self.max_apart * copies:
            return
        waited = column(reads.table, "waited")
        wait, idle = float(waited.sum()), float(a.breakdown.idle.total)
        share = min(wait, idle) / a.span_ns
        if share < self.min_share:
            return
        yield Finding(
            summary=(
                f"{of_step(a, int(wait))} the host waits in "
                f"{count_noun(max(1, round(copies / a.step_count)), 'read')} of device values"
                f"{per(a)}, one every {launches / copies:.0f} launches, and "
                f"{of_step(a, int(idle))} the device idles: neither gets ahead of the other."
            ),
            evidence=[
                figure(a, "host waits in reads", wait),
                figure(a, "device idle", idle),
                Evidence("the lesser, share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "reads", copies, "count"),
                Evidence(
                    "launches from read to read",
                    launches / copies,
                    "count",
                    *self.limit("max_apart"),
                ),
                Evidence("by cause", causes(a, reads)),
            ],
            where=places(a, calls, waited + 1),
            edits=[
                Edit(op="asynchronous", select=Select(on="host", kind=("runtime",), call=_CALLS))
            ],
        )

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
        """A read a step; frequent reads that find their value ready; a device that never idles;
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
            "results that are fetched": (bulk, "bulk"),
            "one read a step": (once, "max_apart"),
            "values that are there already": (ready, "min_share"),
            "a device that is busy": (busy, "min_share"),
        }

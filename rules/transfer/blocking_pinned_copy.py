"""A copy from pinned memory that the host waits for although it need not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.rules.common import figure, of_step, per, total
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import ENGINE_FLOOR
from advisor.rules.sync.held import edit, held_by, where
from advisor.testing import TraceBuilder


class BlockingPinnedCopy(Rule):
    """A batch is in pinned memory, but ``.to(device)`` without ``non_blocking=True`` makes the host
    wait until it has arrived, so the host cannot launch the next work meanwhile.

    It shows as a copy ``Pinned -> Device`` whose operator also waits for the stream. Counted is the
    bubble on the device after the wait, as for every sync: idle time until the next work that the
    thread launches, at most as long as it waited. The copy itself still takes its time; that it
    could run beside compute is the subject of copies-not-overlapped.
    """

    id = "blocking-pinned-copy"
    title = "The host waits for copies that are pinned already"
    category = "transfer"
    knobs = ("loader-pinning",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    references = ("https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",)

    min_share = Threshold(0.01, "of the step, lost to bubbles", ENGINE_FLOOR)

    fix = (
        "Copy with non_blocking=True. Work on the same stream sees the data in order; only "
        "the pinned source must not be overwritten before the copy has ended, which a "
        "DataLoader with pin_memory=True takes care of."
    )
    code = "batch = batch.to(device, non_blocking=True)"
    verify = "Profile again: no cudaStreamSynchronize is left in the copy's operator."
    falsified_by = "a run with non_blocking=True whose device idles as long"
    assumptions = ("the source buffer is not reused before the copy has ended",)
    confidence = 0.9

    elsewhere: ClassVar = in_any_language(
        "Copy asynchronously, on a stream: the memory is pinned already.",
        cuda="cudaMemcpyAsync in place of cudaMemcpy; wait with an event where the result is "
        "needed.",
        code="cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, copies);\n"
        "cudaEventRecord(arrived, copies);\n"
        "cudaStreamWaitEvent(compute, arrived, 0);   // the host does not wait",
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the bubbles after blocking copies from pinned memory."""
        if a.device_id is None or a.syncs.is_empty():
            return
        pinned = (pl.col("memory") == "Pinned").fill_null(False)
        held = held_by(a, (pl.col("direction") == "HtoD").fill_null(False) & pinned)
        share = held.total / a.span_ns
        if share < self.min_share:
            return
        per_step = held.total / a.step_count
        count = max(1, round(held.table.height / a.step_count))
        moved = total(a.trace.gpu["bytes"].gather(held.table["copy"]))
        yield Finding(
            summary=(
                f"{of_step(a, held.total)} the device idles after "
                f"{count_noun(count, 'copy')}{per(a)} that the host waited for, although the "
                "source "
                "is pinned and the copy could go on alone."
            ),
            evidence=[
                Evidence("device idle after them", per_step, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "such copies", held.table.height, "count"),
                figure(a, "host waited in them", total(held.table["waited"])),
                figure(a, "bytes", moved, "bytes"),
            ],
            where=where(a, held),
            edits=[
                edit(
                    a,
                    held,
                    Select(
                        on="host", call=("sync_stream",), under=r"^aten::(?:to|_to_copy|copy_)$"
                    ),
                    Select(on="host", call=("memcpy_blocking",)),
                )
            ],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """``.to(device)`` of a pinned batch, and some host work after it."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                with b.op("aten::to"), b.op("aten::_to_copy"):
                    b.copy("HtoD", 24 << 20, blocking=True)
                b.host(500)
                _train(b)
        return {"to(device) of a pinned batch": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """With ``non_blocking=True``; from pageable memory; a wait that leaves no bubble."""
        free, pageable, hidden = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with free.step():
                with free.op("aten::to"), free.op("aten::_to_copy"):
                    free.copy("HtoD", 24 << 20)
                free.host(500)
                _train(free)
            with pageable.step():
                with pageable.op("aten::to"), pageable.op("aten::_to_copy"):
                    pageable.copy("HtoD", 24 << 20, pinned=False)
                pageable.host(500)
                _train(pageable)
            with hidden.step():
                _train(hidden)
                with hidden.op("aten::to"), hidden.op("aten::_to_copy"):
                    hidden.copy("HtoD", 24 << 20, blocking=True, stream=13)
        return {
            "non_blocking": (free, "a.syncs.is_empty()"),
            "pageable": (pageable, "share < self.min_share"),
            "behind a full queue": (hidden, "share < self.min_share"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000, times=6)

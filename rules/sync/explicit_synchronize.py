"""The program itself waits for the device inside the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core.finding import (
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
from advisor.rules.common import figure, of_step, per, total
from advisor.rules.elsewhere import NO_READS, in_any_language
from advisor.rules.sources import ENGINE_FLOOR
from advisor.rules.sync.held import causes, edit, held_by, where
from advisor.testing import TraceBuilder

_CALLS = r"^torch\.cuda\.(?:synchronize|Stream\.synchronize|Event\.synchronize)$"

_TITLE = "A wait for the device inside the step leaves it idle"
"""Where it is no call of PyTorch's."""


class ExplicitSynchronize(Rule):
    """``torch.cuda.synchronize()``, or waiting for a stream or an event, inside the step: the host
    cannot prepare the next work while it waits, so the device idles afterwards.

    Counted are synchronising calls outside any operator, by the bubble they leave: idle time of
    the device from the end of the awaited work to the next work that thread launches, at most as
    long as the call made the host wait. A call that finds its work done costs nothing, and one
    that another stream's work hides costs only what is idle. The synchronisation the profiler
    itself issues at the end of its window (in nearly every public trace) is not counted.

    Often it is there for timing: events measure device time without stopping the host.
    """

    id = "explicit-synchronize"
    title = "synchronize() inside the step makes the device wait"
    category = "sync"
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution",
        "https://pytorch.org/docs/stable/generated/torch.cuda.Event.html",
    )

    min_share = Threshold(0.01, "of the step, lost to bubbles", ENGINE_FLOOR)

    fix = (
        "Remove it: the device runs work of one stream in order anyway, and streams wait "
        "for each other with wait_event or wait_stream without the host. To time a step, "
        "record events and read them some steps later."
    )
    code = (
        "start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "start.record()\n"
        "train_step(batch)\n"
        "end.record()                     # does not stop the host\n"
        "...                              # a few steps later\n"
        "print(start.elapsed_time(end))   # ms"
    )
    verify = "Profile again: the call is gone, and the idle time after it."
    falsified_by = "a run without the call whose device idles as long at the same place"
    assumptions = ("no host code reads results of the device right after it",)
    confidence = 0.85

    elsewhere: ClassVar = {
        **in_any_language(
            title=_TITLE,
            fix="Wait only for what is needed, where it is needed: order work of several streams "
            "by events, and let the host wait once, for the result.",
            cuda="cudaStreamWaitEvent in place of cudaDeviceSynchronize between kernels.",
            code="cudaEventRecord(done, producer);\ncudaStreamWaitEvent(consumer, done, 0);",
        ),
        TENSORFLOW: FrameworkAdvice(
            "Do not wait for the device inside the loop. " + NO_READS, title=_TITLE
        ),
        JAX: FrameworkAdvice(
            "Call block_until_ready() outside of the loop only. " + NO_READS, title=_TITLE
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the bubbles after explicit waits."""
        if a.device_id is None or a.syncs.is_empty():
            return
        held = held_by(a, pl.col("cause").str.contains(_CALLS) & pl.col("op").is_null())
        share = held.total / a.span_ns
        if share < self.min_share:
            return
        count = int((held.lost > 0).sum())
        per_step = held.total / a.step_count
        yield Finding(
            summary=(
                f"{of_step(a, held.total)} the device idles after "
                f"{count_noun(max(1, round(count / a.step_count)), 'explicit wait')}{per(a)}, "
                "until "
                "the host, which stood still meanwhile, launches again."
            ),
            evidence=[
                Evidence("device idle after them", per_step, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "waits that left a bubble", count, "count"),
                figure(a, "host waited in them", total(held.table["waited"])),
                Evidence("by call", causes(a, held)),
            ],
            where=where(a, held),
            edits=[
                edit(
                    a,
                    held,
                    Select(on="host", call=("sync_device",)),
                    Select(on="host", call=("sync_device", "sync_event")),
                    Select(on="host", call=("sync_device", "sync_event", "sync_stream")),
                )
            ],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """``torch.cuda.synchronize()`` after each step, and some host work after it."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                _kernels(b, 10)
                b.sync()
                b.host(1000)
        return {"synchronize every step": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The profiler's own; one that finds the work done; one hidden by another stream."""
        own, done, hidden = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with own.step():
                _kernels(own, 10)
            with done.step():
                _kernels(done, 10)
                done.host(9000)
                done.sync()
                done.host(1000)
            with hidden.step():
                _kernels(hidden, 5)
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 9000, stream=13)
                hidden.sync("cudaStreamSynchronize", stream=7)
                hidden.host(1000)
        own.sync()
        return {
            "the profiler's": (own, "share < self.min_share"),
            "nothing to wait for": (done, "share < self.min_share"),
            "another stream": (hidden, "share < self.min_share"),
        }


def _kernels(b: TraceBuilder, count: int) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 300, times=count)

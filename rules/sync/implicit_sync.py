"""Reading a value of the device makes the host wait, and then the device waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.text import count_noun
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import nearest, parents
from advisor.rules.common import column, figure, of_step, per, places, rows, total
from advisor.rules.elsewhere import NO_READS, in_any_language
from advisor.rules.sources import ENGINE_FLOOR, TENSORBOARD, XPROF
from advisor.rules.sync.held import MAX_CORRELATIONS, Held, causes, edit, held_by, where
from advisor.testing import TraceBuilder

_VALUE = r"^aten::(?:item|is_nonzero|_local_scalar_dense|equal|allclose)$"
_COPY = r"^aten::(?:to|_to_copy|copy_|_copy_from\w*)$"
_STEP = r"^Optimizer\.|clip_grad|grad_scaler"


_READ_LATER = (
    "if step % 100 == 0:\n"
    "    print(running.item() / 100)   # one wait in 100 steps\n"
    "    running.zero_()\n"
    "# to find the others: torch.cuda.set_sync_debug_mode('warn')"
)


class ImplicitSync(Rule):
    """Code reads a value that is on the device (``.item()``, ``.cpu()``, ``print(tensor)``,
    ``if tensor:``), so the host waits until the device has finished, and the device then idles
    until the host has launched new work.

    A call counts only when it really waited: it contains a copy from the device or a
    synchronisation that ended after the call began, on the thread that goes on to launch work. The
    names alone prove nothing: ``aten::item`` on a tensor of the host never waits (a public trace
    has 945 of them and not one sync). Its cost is never the wait itself, during which the device
    works, but the bubble after it: idle time of the device between the end of the awaited work and
    the next work that thread launches. Without the call the host would be ahead by what it waited,
    so the smaller of bubble and wait is what it can cost. The synchronisation with which the
    profiler ends its own window is not counted, and neither are data-dependent shapes and explicit
    ``synchronize()``, which have rules of their own.

    Waits that leave no bubble can still matter: the host loses its lead, and the device idles later
    for launches. Where the host waits for a notable part of the step, a note says so, with what a
    replay without these waits saves; it is not ranked, for whether the host can do without the
    values is not in a trace.

    The same wait inside the optimizer (a scaler that reads ``found_inf``, gradient clipping that
    compares the norm) is named as such in the evidence.
    """

    id = "implicit-sync"
    title = "Reading device values makes the device wait"
    category = "sync"
    found_in = (
        "traces/a100_train_6steps",
        "traces/dlrm_8ranks",
        "traces/mi300_timesformer_inference",
        "traces/v100_train_copy_heavy",
    )
    silent_in = (
        "traces/b200_eager",
        "traces/h100_bert_small_inference",
        "traces/nccl_collectives",
        "traces/mi250_train",
    )
    validated_on = (
        "A100 and V100 training have 60 copies to the host in 6 steps that hold the host for 75 "
        "and 312 ms, but the device for 0.7 and 0.6 % of the time only, so what is said of them is "
        "a note; so it is where video inference on an MI300X waits 94 ms for its result, and in "
        "one read of 0.9 ms in DLRM"
    )
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        "https://pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html",
    )

    min_share = Threshold(0.02, "of the step, lost to bubbles: twice what is noise", ENGINE_FLOOR)
    min_waited = Threshold(
        0.05,
        "of the step, the host waiting without a bubble: a note; as for the loader",
        TENSORBOARD,
        XPROF,
    )

    code = "running += loss.detach()          # stays on the device\n" + _READ_LATER
    verify = "Profile again: the device's idle time after these calls is gone."
    falsified_by = "a run without these reads whose device idles as long at the same place"
    assumptions = ("nothing before the next launch needs the value on the host",)
    confidence = 0.85

    fix = (
        "Keep the value on the device: add up losses and metrics as tensors and read them "
        "every N steps; replace `if tensor:` by torch.where; copy what the host does need "
        "with non_blocking=True into pinned memory and read it a step later."
    )
    cases: ClassVar = {
        "inside the optimizer": {
            "fix": f"{fix} In the optimizer: bf16 needs no gradient scaler, fused=True keeps "
            "found_inf on the device, and clip_grad_norm_ needs no error_if_nonfinite."
        },
        "the device has other work meanwhile": {
            "title": "The host waits for device values, and loses its lead over the device",
            "fix": "If the values are needed only for logging, read them later; if they are sizes "
            "(splits of an all-to-all, lengths), compute or send them one batch ahead.",
            "verify": "Profile again: the host no longer waits in these calls.",
            "confidence": 0.5,
            "falsified_by": "a run without these reads that takes as long",
            "assumptions": ("the host can go on without the values",),
        },
    }

    inference: ClassVar = {
        "fix": "Keep the value on the device: add up results as tensors and read them every N "
        "steps; replace `if tensor:` by torch.where; copy what the host does need with "
        "non_blocking=True into pinned memory and read it a step later.",
        "code": "running += score.detach()         # stays on the device\n" + _READ_LATER,
    }
    elsewhere: ClassVar = {
        **in_any_language(
            "Do not read results of the device in the loop: decide on the device, or read the "
            "value of an earlier iteration that has arrived meanwhile; copy into pinned memory, "
            "without waiting, and look when it is there.",
            cuda="cudaMemcpyAsync into memory from cudaHostAlloc, then cudaEventQuery in a later "
            "iteration.",
            code="cudaMemcpyAsync(seen, value, sizeof *seen, cudaMemcpyDeviceToHost, s);\n"
            "cudaEventRecord(ready, s);\n"
            "// an iteration later:\n"
            "if (cudaEventQuery(ready) == cudaSuccess) use(*seen);",
        ),
        TENSORFLOW: FrameworkAdvice(NO_READS, "if step % 100 == 0:\n    print(float(loss))"),
        JAX: FrameworkAdvice(
            "JAX dispatches asynchronously, until a value is asked for. " + NO_READS,
            "if step % 100 == 0:\n    print(float(loss))",
        ),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the bubbles after reads of device values."""
        if a.device_id is None:
            return
        if not _runtime_recorded(a):
            yield SkippedCheck(
                what="waits of the host for the device",
                why="the trace holds no synchronising or event calls at all, which every "
                "complete recording of the CUDA runtime has",
                record="activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], nothing filtered",
            )
            return
        if a.syncs.filter(~pl.col("profiler")).is_empty() and a.steps.used.height > 1:
            yield PassedCheck(text="no call inside the steps makes the host wait for the device")
            return
        held = held_by(a, self._reads())
        share = held.total / a.span_ns
        if share < self.min_share:
            yield from self._no_bubble(a, held)
            return
        per_step = held.total / a.step_count
        waiting = held.table.filter(pl.Series(held.lost > 0))
        inside = self._in_optimizer(a, held)
        evidence = [
            Evidence("device idle after them", per_step, "ns", per=a.per),
            Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
            figure(a, "reads that left a bubble", waiting.height, "count"),
            figure(a, "host waited in them", total(held.table["waited"])),
            Evidence("by cause", causes(a, held)),
        ]
        if inside:
            evidence.append(Evidence("of that inside the optimizer step", inside, "ns"))
        yield Finding(
            summary=(
                f"{of_step(a, held.total)} the device idles after "
                f"{count_noun(max(1, round(waiting.height / a.step_count)), 'read')} of device "
                f"values{per(a)}: the host waits for the result and only then launches the next "
                "work."
            ),
            evidence=evidence,
            where=where(a, held),
            edits=[
                edit(
                    a,
                    held,
                    Select(on="host", kind=("runtime",), under=_VALUE),
                    Select(
                        on="host", call=("memcpy", "memcpy_blocking", "sync_stream"), under=_COPY
                    ),
                )
            ],
            **(self.case("inside the optimizer") if inside else {}),
        )

    def _no_bubble(self, a: Analysis, held: Held) -> Iterator[Finding]:
        """The host waits, and the device has other work meanwhile."""
        waited = column(held.table, "waited")
        if waited.sum() < self.min_waited * a.span_ns:
            return
        calls = rows(held.table["host"])
        reads = held.table.select(pl.coalesce("op", "host").n_unique()).item()
        worst = calls[np.argsort(-waited, kind="stable")]
        ids = a.trace.cpu["correlation"].gather(worst[:MAX_CORRELATIONS]).drop_nulls().unique()
        yield Finding(
            summary=(
                f"{of_step(a, int(waited.sum()))} the host waits in "
                f"{count_noun(-(-reads // a.step_count), 'read')}{per(a)} for values that the "
                "device computes. The device has work meanwhile, but the launches that follow come "
                "later for it."
            ),
            evidence=[Evidence("by cause", causes(a, held))],
            where=places(a, calls, waited),
            edits=[
                Edit(
                    op="asynchronous",
                    select=Select(
                        on="host", kind=("runtime",), correlation=tuple(ids.sort().to_list())
                    ),
                )
            ],
            informational=True,
            **self.case("the device has other work meanwhile"),
        )

    @staticmethod
    def _reads() -> pl.Expr:
        """Values, copies to the host, and syncs of the optimizer, of clipping or a scaler."""
        to_host = pl.col("cause").str.contains(_COPY) & (pl.col("direction") == "DtoH")
        return pl.col("cause").str.contains(f"{_VALUE}|{_STEP}") | to_host.fill_null(False)

    @staticmethod
    def _in_optimizer(a: Analysis, held: Held) -> float:
        """Bubbles a step, ns, of the reads inside ``Optimizer.step``, clipping or a scaler."""
        around = nearest(parents(a.trace), name_matches(a.trace.cpu["name"], _STEP).to_numpy())
        inside = around[rows(held.table["host"])] >= 0
        return float(held.lost[inside].sum()) / a.step_count

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """``loss.item()`` in every step; ``.cpu()`` of a result."""
        item, cpu = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with item.step():
                _work(item)
                item.item()
                item.host(1500)
            with cpu.step():
                _work(cpu)
                with cpu.op("aten::to"), cpu.op("aten::_to_copy"):
                    cpu.copy("DtoH", 4096, pinned=False)
                cpu.host(1500)
        return {"loss.item() every step": item, "result.cpu() every step": cpu}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """``aten::item`` of a host tensor; a read whose bubble is nothing; the profiler's own."""
        host, late, own = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with host.step():
                _work(host)
                for _ in range(20):
                    with host.op("aten::item"), host.op("aten::_local_scalar_dense"):
                        pass
                host.sync()
            with late.step():
                _work(late)  # the read comes when the device has long been done, and idles anyway
                late.host(8000)
                late.item()
                late.host(2000)
            with own.step():
                _work(own)
        own.sync()
        return {
            "item of a host tensor": (host, "waited.sum() < self.min_waited"),
            "nothing left to wait for": (late, "min_waited"),
            "profiler": (own, "a.steps.used.height > 1"),
        }


def _work(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 500, [[1024, 1024], [1024, 1024]], times=10)


def _runtime_recorded(a: Analysis) -> bool:
    """Calls other than launches and copies were recorded: some traces are stripped to those."""
    calls = a.trace.cpu["call"].drop_nulls()
    return bool((~calls.is_in(["launch", "graph_launch", "memcpy", "memset"])).any())

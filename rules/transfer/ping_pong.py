"""Data goes from the device to the host and comes straight back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Outcome,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.measure import Analysis
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import climb_stack, frame_rank, parents
from advisor.rules.common import device_places, figure, of_step, per, rows, total
from advisor.rules.sources import ENGINE_FLOOR, OURS
from advisor.testing import TraceBuilder

_DELIBERATE = r"^Optimizer\.step#|(?i)offload|save_on_cpu|saved_tensors_hooks"
MAX_CORRELATIONS = 500
"""An Edit names single copies only up to this many."""


class PingPong(Rule):
    """A tensor is copied to the host, and in the same call of the same function as many bytes are
    copied back: something in between was done on the CPU (``.cpu().numpy()``, a library without GPU
    support, a random permutation) that the device could do. Both copies cost time, and the first
    makes the host wait for all work before it.

    Counted are pairs: a copy to the host and the next one back of exactly the same size, both
    called directly from one and the same run of one function of the user's code, which begins and
    ends inside the step, in at least three steps. So equal sizes by chance do not count, such as a
    result that is read and the next batch that is sent by the training loop. Nor does deliberate
    offloading: copies inside the optimizer, under frames of a library, or under a name that says
    so; nor what the backward pass brings back, which runs on another thread.

    Needs Python stacks. The work in between is not priced: it moves to the device.
    """

    id = "ping-pong"
    title = "Data makes a round trip through the host"
    category = "transfer"
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
    )

    min_steps = Threshold(3, "steps with such a pair", OURS)
    min_bytes = Threshold(
        4096, "bytes: single values that are read and written have other causes", OURS
    )
    worth_asking = Threshold(
        0.01, "of the step: exposed copies below this share need no stacks", ENGINE_FLOOR
    )

    fix = (
        "Do on the device what happens between the two copies: torch has counterparts of "
        "most of NumPy (sort, unique, randperm, topk, scatter), CuPy and torchvision.ops "
        "share memory with torch tensors without a copy."
    )
    code = (
        "# before: torch.from_numpy(np.argsort(x.cpu().numpy())).to(device)\n"
        "order = torch.argsort(x)\n"
        "# a CUDA array of another library, without a copy\n"
        "y = torch.from_dlpack(cupy_array)"
    )
    verify = "Profile again: no Memcpy DtoH followed by a Memcpy HtoD of the same size."
    falsified_by = "a function that reads one thing and uploads another of the same size"
    assumptions = ("what happens in between can be done on the device, in little time",)
    confidence = 0.7

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Pair copies to the host with copies back, by the run of the function that made them."""
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(
            pl.col("copy").is_in(["HtoD", "DtoH"]) & (pl.col("bytes") >= self.min_bytes)
        )
        copies = copies.filter(pl.col("copy").n_unique().over("bytes") > 1)  # back, as many
        if copies.is_empty():
            return
        if not (a.trace.cpu["kind"] == "python").any():
            if total(copies["exposed"]) >= self.worth_asking * a.span_ns:
                yield SkippedCheck(
                    what="whether data makes a round trip through the host",
                    why="the trace has no Python stacks",
                    record="with_stack=True",
                )
            return
        table = self._pairs(a, copies)
        if table["step"].n_unique() < self.min_steps:
            return
        both = copies.filter(
            pl.col("gpu").is_in(pl.concat([table["gpu"], table["back"]]).implode())
        )
        gpu, cpu = a.trace.gpu, a.trace.cpu
        waits = a.syncs.filter(pl.col("copy").is_in(both["gpu"].implode()))
        ids = gpu["correlation"].gather(both["gpu"]).drop_nulls().unique().sort()
        calls = cpu["correlation"].gather(waits["host"]).drop_nulls().unique().sort()
        rate = table.height / a.step_count
        cost = total(both["exposed"])
        yield Finding(
            summary=(
                f"{t.count_noun(max(1, round(rate)), 'time')}{per(a)} the same function copies "
                "data "
                "to the host and as many bytes back "
                f"({t.format_bytes(total(table['bytes']) / table.height)}): {of_step(a, cost)} in "
                "copies "
                "that nothing hides, and the host waits for the first."
            ),
            evidence=[
                Evidence("round trips", rate, "count", per=a.per),
                Evidence(
                    "steps with a round trip",
                    table["step"].n_unique(),
                    "count",
                    *self.limit("min_steps"),
                ),
                figure(a, "bytes to the host", total(table["bytes"]), "bytes"),
                figure(a, "copy time that nothing hides", cost),
                figure(a, "host waits for these copies", waits.height, "count"),
            ],
            where=device_places(a, table, "bytes", "launch"),
            edits=[
                Edit(
                    op="remove",
                    select=Select(
                        on="gpu", kind=("memcpy",), correlation=tuple(ids[:MAX_CORRELATIONS])
                    ),
                ),
                *(
                    [
                        Edit(
                            op="asynchronous",
                            select=Select(
                                on="host",
                                kind=("runtime",),
                                correlation=tuple(calls[:MAX_CORRELATIONS]),
                            ),
                        )
                    ]
                    if len(calls)
                    else []
                ),
            ],
        )

    @staticmethod
    def _pairs(a: Analysis, copies: pl.DataFrame) -> pl.DataFrame:
        """``gpu`` (the copy to the host), ``back`` (the copy back), ``bytes``, ``step``, ``ts``,
        ``dur``, ``launch`` (row of cpu)."""
        cpu = a.trace.cpu
        python = (cpu["kind"] == "python").to_numpy()
        rank = map_names(cpu["name"], frame_rank, pl.Int8).fill_null(0).to_numpy()
        parent = parents(a.trace)
        copies = copies.with_columns(
            launch=a.trace.gpu["launch"].gather(copies["gpu"]).cast(pl.Int64)
        ).filter(pl.col("launch").is_not_null() & pl.col("step").is_not_null())
        launch = rows(copies["launch"])
        # the function that called: the innermost frame that is not PyTorch's or Python's own
        frame = climb_stack(parent, python & (rank > 0), launch)
        meant = climb_stack(parent, name_matches(cpu["name"], _DELIBERATE).to_numpy(), launch) >= 0
        good = (frame >= 0) & ~meant & (rank[np.maximum(frame, 0)] == 2)
        start = cpu["ts"].to_numpy()
        end = start + cpu["dur"].to_numpy()
        steps = a.steps.marks  # frames are the host's
        begin = steps["ts"].gather(copies["step"]).to_numpy()
        finish = steps["end"].gather(copies["step"]).to_numpy()
        at = np.maximum(frame, 0)
        good &= (start[at] >= begin) & (end[at] <= finish)
        copies = (
            copies.with_columns(frame=pl.Series(frame), called=cpu["ts"].gather(copies["launch"]))
            .filter(pl.Series(good))
            .sort("called")
        )
        return copies.with_columns(
            following=pl.col("copy").shift(-1).over("frame", "bytes"),
            back=pl.col("gpu").shift(-1).over("frame", "bytes"),
        ).filter((pl.col("copy") == "DtoH") & (pl.col("following") == "HtoD"))

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Sorted on the CPU in every step."""
        b = TraceBuilder()
        for _ in range(5):
            with b.step(), b.python("train.py(10): train_step"):
                _train(b)
                with b.python("model.py(30): reorder"):
                    b.copy("DtoH", 16 << 20, pinned=False)
                    with b.python("numpy/core/fromnumeric.py(1100): argsort"):
                        b.host(300)
                    b.copy("HtoD", 16 << 20, pinned=False)
                _train(b)
        return {"sorted on the CPU": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The loop reads a result and sends a batch; offloading; other sizes; no stacks; twice."""
        loop, offload, library, sizes, plain, once = (TraceBuilder() for _ in range(6))
        with loop.python("train.py(5): main"):
            for _ in range(5):
                with loop.step():
                    _train(loop)
                    loop.copy("DtoH", 16 << 20, pinned=False)
                    loop.copy("HtoD", 16 << 20, pinned=False)
        for step in range(5):
            with offload.step(), offload.python("train.py(10): train_step"):
                _train(offload)
                with offload.range("Optimizer.step#CPUAdam.step"):
                    _round_trip(offload)
            with library.step(), library.python("train.py(10): train_step"):
                _train(library)
                with library.python("deepspeed/runtime/engine.py(2000): step"):
                    _round_trip(library)
            with sizes.step(), sizes.python("train.py(10): train_step"):
                _train(sizes)
                sizes.copy("DtoH", 16 << 20, pinned=False)
                sizes.copy("HtoD", 8 << 20, pinned=False)
            with plain.step():
                _train(plain)
                _round_trip(plain)
            with once.step(), once.python("train.py(10): train_step"):
                _train(once)
                if step in (1, 3):
                    _round_trip(once)
        return {
            "a result is read, then the next batch sent": (
                loop,
                "table['step'].n_unique() < self.min_steps",
            ),
            "the optimizer lives on the host": (
                offload,
                "table['step'].n_unique() < self.min_steps",
            ),
            "a library offloads": (library, "table['step'].n_unique() < self.min_steps"),
            "other sizes": (sizes, "copies.is_empty()"),
            "no stacks": (plain, "not (a.trace.cpu['kind'] == 'python').any()"),
            "two steps only": (once, "min_steps"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 2000)


def _round_trip(b: TraceBuilder) -> None:
    b.copy("DtoH", 16 << 20, pinned=False)
    b.copy("HtoD", 16 << 20, pinned=False)

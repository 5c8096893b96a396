"""Data goes from the GPU to the host and straight back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Evidence, Finding, Outcome, Rule, SkippedCheck, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import climb_stack, frame_rank, parents
from advisor.rules.common import device_places, figure, of_step, per, rows, select_copies, total
from advisor.rules.sources import ENGINE_FLOOR, OURS, SILENT_TRACES
from advisor.rules.sync.host_waits import make_calls_async
from advisor.testing import TraceBuilder

_DELIBERATE = r"^Optimizer\.step#|(?i)offload|save_on_cpu|saved_tensors_hooks"


class PingPong(Rule):
    """A tensor is copied to the host, and the same call of the same function copies as many bytes
    back. The CPU did something in between (``.cpu().numpy()``, a library without GPU support, a
    random permutation) that the GPU could do. Both copies cost time, and the first makes the host
    wait for all work before it.

    Counted are pairs: a copy to the host and the next copy back of exactly the same size. One and
    the same run of one function of the user's code must call both directly, and begin and end
    inside the step, in at least three steps. So equal sizes by coincidence do not count, such as a
    result that the training loop reads and the next batch that it sends. Nor does deliberate
    offloading: copies inside the optimizer, under frames of a library, or under a name that says
    so; nor what the backward pass brings back, which runs on another thread.

    Needs Python stacks. The gain leaves out the work in between: it moves to the GPU.
    """

    id = "ping-pong"
    title = "Data makes a round trip through the host"
    category = "transfer"
    silent_in = SILENT_TRACES
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
    )

    min_steps = Threshold(3, "steps with such a pair", OURS)
    min_bytes = Threshold(4096, "bytes: reads and writes of single values have other causes", OURS)
    worth_asking = Threshold(
        0.01, "of the step: exposed copies below it do not ask for stacks", ENGINE_FLOOR
    )

    fix = (
        "Do the work between the two copies on the GPU. torch has most of NumPy (sort, unique, "
        "randperm, topk, scatter). CuPy shares memory with torch tensors without a copy."
    )
    code = (
        "# before: torch.from_numpy(np.argsort(x.cpu().numpy())).to(device)\n"
        "order = torch.argsort(x)\n"
        "# a CUDA array of another library, without a copy:\n"
        "y = torch.from_dlpack(cupy_array)"
    )
    verify = "Profile again: no Memcpy DtoH followed by a Memcpy HtoD of the same size."
    falsified_by = "a function that reads one tensor and uploads another of the same size"
    assumptions = ("the GPU can do the work in between, in little time",)
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
        waits = a.syncs.filter(pl.col("copy").is_in(both["gpu"].implode()))
        edits = [Edit(op="remove", select=select_copies(a, both["gpu"]))]
        if waits.height:
            edits.append(make_calls_async(a, rows(waits["host"])))
        rate = table.height / a.step_count
        cost = total(both["exposed"])
        yield Finding(
            summary=(
                f"The same function copies {t.format_bytes(total(table['bytes']) / table.height)} "
                "to the "
                f"host and back, {t.count_noun(max(1, round(rate)), 'time')}{per(a)}. The copies "
                "take "
                f"{of_step(a, cost)}, and the host waits for the first."
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
                figure(a, "exposed copy time", cost),
                figure(a, "host waits for these copies", waits.height, "count"),
            ],
            where=device_places(a, table, "bytes", "launch"),
            edits=edits,
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
        offloaded = (
            climb_stack(parent, name_matches(cpu["name"], _DELIBERATE).to_numpy(), launch) >= 0
        )
        wanted = (frame >= 0) & ~offloaded & (rank[np.maximum(frame, 0)] == 2)
        start = cpu["ts"].to_numpy()
        end = start + cpu["dur"].to_numpy()
        steps = a.steps.marks  # frames are the host's
        begin = steps["ts"].gather(copies["step"]).to_numpy()
        finish = steps["end"].gather(copies["step"]).to_numpy()
        inner = np.maximum(frame, 0)
        wanted &= (start[inner] >= begin) & (end[inner] <= finish)
        copies = (
            copies.with_columns(frame=pl.Series(frame), called=cpu["ts"].gather(copies["launch"]))
            .filter(pl.Series(wanted))
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

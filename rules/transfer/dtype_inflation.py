"""Copies that are larger than they need to be, or go back and forth."""

from contextlib import nullcontext

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select, SkippedCheck
from advisor.core.intervals import covered_length
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.shapes import OpInputs, bare_type_name
from advisor.measure.host.device_reads import DELIBERATE
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.stacks import CodeOwner, climb_stack, code_owner, parent_rows
from advisor.measure.steps.steps import step_of
from advisor.replay.selection import mask_under
from advisor.rules.support.citations import (
    ENGINE_FLOOR,
    PAGEABLE_64K,
    SILENT_TRACES,
    TRACELENS,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    of_step,
    per_step,
    row_numbers,
    scale_edit,
    select_copies,
    sum_column,
)
from advisor.rules.support.host_waits import make_calls_async
from advisor.testing import Examples, TraceBuilder

_MOVE_OPS = r"^aten::(?:_?to|_to_copy|copy_|cpu|cuda|empty\w*|pin_memory|detach_?|result_type)$"
"""Operators that move data or allocate memory."""
_MAX_NAMED = 3
"""Maximum number of operators that a fix names."""
_MIN_NAMED_SHARE = 0.2
"""Minimum time of each, as a share of the longest one's time."""
_CONVERT_OPS = r"^aten::(?:copy_|div)$"
_FLOATS = ("half", "bfloat16", "float", "double")


class DtypeInflation(Rule):
    """The host converts 8-bit data (images, masks) to floating point before it copies the data to
    the GPU. So two or four times the bytes cross the bus. If the GPU converts the bytes, the
    copy takes a quarter of the time, and the host converts nothing.

    A conversion is an ``aten::copy_`` from ``unsigned char`` into a float type, or an ``aten::div``
    of such a tensor, that launches nothing on the GPU. It counts when a copy to the GPU in the same
    step has exactly the bytes of its result. This must happen in at least half of the steps.
    ``x.to(device, dtype=torch.float32)`` counts too: PyTorch converts on the host and then copies.
    Conversions in the loader's worker processes (``ToTensor``) are not in the trace.

    The rule needs shapes. The gain covers the copy alone; the host time of the conversion comes on
    top."""

    id = "dtype-inflation"
    title = "8-bit data crosses the bus as floats"
    silent_in = SILENT_TRACES
    validation_note = (
        "operators and types as PyTorch 2.13 records a conversion on the CPU. Silent on two_ranks "
        "and b200_eager, which hold 8-bit tensors on the GPU. It has not fired on a real trace"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://pytorch.org/vision/stable/transforms.html",
    )

    min_share = Threshold(
        0.005,
        "of the step, exposed in these copies; the fix saves three quarters of it",
        TRIED_ON_TRACES,
    )
    min_bytes = Threshold(
        65536, "bytes: a smaller copy costs its latency, whatever its type", PAGEABLE_64K
    )
    min_steps_share = Threshold(0.5, "of the steps have such a copy", TRIED_ON_TRACES)
    min_asking_share = Threshold(
        0.05,
        "of the step: with less exposed copy time, the rule does not ask for shapes",
        TRACELENS,
    )

    fix = (
        "Send bytes and convert on the GPU. Keep uint8 in the dataset (PILToTensor instead of "
        "ToTensor), and divide and normalize on the GPU, with mean and std as GPU tensors."
    )
    code = (
        "x = x.to(device, non_blocking=True)            # uint8: a quarter of the bytes\n"
        "x = x.to(torch.float32).div_(255).sub_(mean).div_(std)   # on the GPU"
    )
    verify = "Profile again: the copy to the GPU has a quarter of the bytes."
    falsified_by = "augmentation on the host that needs floats"
    assumptions = ("nothing on the host needs the floats",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(
            (pl.col("copy") == "HtoD")
            & (pl.col("bytes") >= self.min_bytes)
            & pl.col("step").is_not_null()
        )
        exposed = sum_column(copies["exposed"])
        if not exposed:
            return
        if a.trace.inputs.is_empty():
            if exposed >= self.min_asking_share * a.span_ns:
                yield SkippedCheck(
                    what="whether inputs are sent in a wider type than they are stored in",
                    why="shapes and types are not recorded",
                    record="record_shapes=True",
                )
            return
        conversions = self._find_conversions(a)
        inflated = copies.join(
            conversions, on=["step", "bytes"], how="inner", maintain_order="left"
        ).filter(
            # with more copies of this size than conversions, it is unknown which were converted
            pl.len().over("step", "bytes") <= pl.col("conversions")
        )
        steps = inflated["step"].n_unique()
        cost = sum_column(inflated["exposed"])
        if steps < self.min_steps_share * a.step_count or cost < self.min_share * a.span_ns:
            return
        bytes_sent = sum_column(inflated["bytes"])
        bytes_needed = int((inflated["bytes"] // inflated["width"]).sum())
        yield Finding(
            summary=(
                f"Copying {t.format_bytes(bytes_sent / a.step_count)} of floats takes "
                f"{of_step(a, cost)}. They were {t.format_bytes(bytes_needed / a.step_count)} "
                "before the host converted them."
            ),
            evidence=[
                amount_per_step(a, "exposed copy time", cost),
                self.compare_share(a, "exposed copy time", cost),
                amount_per_step(a, "bytes sent", bytes_sent, "bytes"),
                amount_per_step(a, "bytes before the conversion", bytes_needed, "bytes"),
                Evidence("steps with such a copy", steps, "count"),
            ],
            where=device_places(a, inflated, "exposed", "made"),
            edits=[
                Edit(
                    op="scale",
                    select=select_copies(a, inflated["gpu"]),
                    factor=bytes_needed / bytes_sent,
                )
            ],
        )

    @staticmethod
    def _find_conversions(a: Analysis) -> pl.DataFrame:
        """Return conversions on the host, one row per step and size: ``made`` (row of cpu),
        ``step``, ``bytes`` of the result, ``width`` (bytes per element), ``conversions``."""
        trace = a.trace
        cpu = trace.cpu
        conversion_rows = []
        # one round per distinct input with 8-bit data, not per op
        inputs = trace.inputs.with_row_index("inputs").filter(
            pl.col("types").str.contains("unsigned char", literal=True)
        )
        for row, dims, types in inputs.select("inputs", "dims", "types").iter_rows():
            first, second = (OpInputs(dims, types).tensor(index) for index in (0, 1))
            if first is None:
                continue
            if first.dtype == "unsigned char":  # aten::div: floats of the default type
                conversion_rows.append((row, "aten::div", first.elements * 4, 4))
            elif (
                second is not None
                and second.dtype == "unsigned char"
                and bare_type_name(first.dtype) in _FLOATS
                and first.width is not None
                and first.width > 1
                and first.elements == second.elements
            ):
                conversion_rows.append(
                    (row, "aten::copy_", first.elements * first.width, first.width)
                )
        schema = {"inputs": pl.Int32, "op": pl.String, "bytes": pl.Int64, "width": pl.Int64}
        table = pl.DataFrame(conversion_rows, schema=schema, orient="row")
        calls_wide_input = (cpu["kind"] == "op") & name_matches(cpu["name"], _CONVERT_OPS)
        calls_wide_input &= cpu["inputs"].is_in(table["inputs"].implode()).fill_null(False)
        is_conversion = calls_wide_input.to_numpy()
        launch = trace.gpu["launch"].drop_nulls().to_numpy().astype(np.int64)
        on_device = np.zeros(cpu.height, dtype=bool)
        conversion_row = climb_stack(parent_rows(trace), is_conversion, launch)
        on_device[conversion_row[conversion_row >= 0]] = True
        on_host = np.flatnonzero(is_conversion & ~on_device)
        calls = pl.DataFrame(
            {
                "made": on_host,
                "inputs": cpu["inputs"].gather(on_host),
                "op": cpu["name"].gather(on_host).cast(pl.String),
                "step": step_of(a.steps, cpu["ts"].gather(on_host).to_numpy()),
            }
        )
        return (
            calls.join(table, on=["inputs", "op"], maintain_order="left")
            .group_by("step", "bytes", maintain_order=True)
            .agg(pl.col("made", "width").first(), pl.len().alias("conversions"))
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "converted, then copied": _build_training("copy_"),
            "divided, then copied": _build_training("div"),
            "x.to(device, dtype)": _build_training("direct"),
            "bytes are sent": (
                _build_training("device"),
                "steps < self.min_steps_share * a.step_count",
            ),
            "hidden under compute": (_build_training("copy_", stream=13), "not exposed"),
            "floats from the start": (_build_training("none"), "a.trace.inputs.is_empty()"),
            "only a small mask is converted": (
                _build_training("mask"),
                "steps < self.min_steps_share * a.step_count",
            ),
            "two copies, one conversion": (
                _build_training("copy_", more=1),
                "steps < self.min_steps_share * a.step_count",
            ),
            "shapes are not recorded": (
                _build_training("copy_", shapes=False),
                "a.trace.inputs.is_empty()",
            ),
        }


_IMAGES = [64, 3, 224, 224]
_COUNT = 64 * 3 * 224 * 224


def _build_training(
    how: str, *, stream: int = 7, shapes: bool = True, more: int = 0
) -> TraceBuilder:
    b = TraceBuilder()

    def convert(dims: list[int]) -> None:
        with b.op("aten::copy_", [dims, dims] if shapes else None, ["float", "unsigned char"]):
            b.host(500)

    for _ in b.steps():
        if stream != 7:
            b.product(2000, 4)
        if how == "copy_":
            convert(_IMAGES)
        elif how == "div":
            with b.op("aten::div", [_IMAGES, []], ["unsigned char", "long int"]):
                b.host(500)
        elif how == "mask":
            convert([64, 1, 224, 224])
        if how == "direct":
            with b.op("aten::copy_", [_IMAGES, _IMAGES], ["float", "unsigned char"]):
                convert(_IMAGES)
                b.copy("HtoD", 4 * _COUNT, op=None)
        elif how == "device":
            b.copy("HtoD", _COUNT)
            with b.op("aten::copy_", [_IMAGES, _IMAGES], ["float", "unsigned char"]):
                b.launch("unrolled_elementwise_kernel", 50)
        else:
            for _ in range(1 + more):
                b.copy("HtoD", 4 * _COUNT, stream=stream)
        if stream == 7:
            b.product(2000, 4)
        b.sync()
    return b


class PingPong(Rule):
    """A tensor is copied to the host, and the same call of the same function copies as many bytes
    back. The CPU did something in between (``.cpu().numpy()``, a library without GPU support, a
    random permutation) that the GPU could do. Both copies cost time, and the first makes the host
    wait for all earlier GPU work.

    The rule counts pairs: a copy to the host and the next copy back of exactly the same size. The
    same call of one function of the user's code must make both copies directly. It must begin and
    end inside the step, in at least three steps. So equal sizes by coincidence do not count, such
    as a result that the training loop reads and the next batch that it sends. Deliberate offloading
    does not count: copies inside the optimizer, under frames of a library, or under a name that
    says so. Copies back in the backward pass, which runs on another thread, do not count either.

    Without stacks, pairs count where the copy back is the next launch after the copy to the host.
    Operators on the CPU must take half of the time between them. The gain then includes their time,
    because they take little on the GPU. Where nothing between the copies is recorded (NumPy), the
    rule needs stacks, and the gain leaves that work out."""

    id = "ping-pong"
    title = "Data makes a round trip through the host"
    found_in = ("traces/h100/ping_pong",)
    silent_in = SILENT_TRACES
    validation_note = (
        "fires on an H100 whose activations are clamped on the CPU: 59 ms per step, 3 on the GPU. "
        "Silent on A100 and V100 training"
    )
    references = (
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization",
    )

    min_steps = Threshold(3, "steps with such a pair", TRIED_ON_TRACES)
    min_bytes = Threshold(
        4096, "bytes: reads and writes of single values have other causes", TRIED_ON_TRACES
    )
    min_asking_share = Threshold(
        0.01,
        "of the step: with less exposed copy time, the rule does not ask for stacks",
        ENGINE_FLOOR,
    )
    remaining_work_share = Factor(
        0.05, "of the time of operators on the CPU, once on the GPU", TRIED_ON_TRACES
    )
    best_remaining_work_share = Factor(0.0, "of that time, at best", TRIED_ON_TRACES)
    worst_remaining_work_share = Factor(0.25, "of that time, at worst", TRIED_ON_TRACES)

    fix = (
        "Do the work between the two copies on the GPU. torch has most of NumPy (sort, unique, "
        "randperm, topk, scatter). CuPy shares memory with torch tensors without a copy."
    )
    code = (
        "# before: y = work(x.cpu()).to(device), or NumPy in between\n"
        "y = work(x)   # on the GPU: torch.clamp, torch.sort, torch.where\n"
        "# a CUDA array of another library, without a copy:\n"
        "y = torch.from_dlpack(cupy_array)"
    )
    cases = {
        "operators on the CPU": {
            "fix": "Run {names} on the GPU, where the data is. Then neither copy is needed.",
            "code": "# before: y = work(x.cpu()).to(device)\ny = work(x)",
        }
    }
    verify = "Profile again: no Memcpy DtoH followed by a Memcpy HtoD of the same size."
    falsified_by = "a function that reads one tensor and uploads another of the same size"
    assumptions = ("the GPU can do the work in between, in little time",)
    confidence = 0.7

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(
            pl.col("copy").is_in(["HtoD", "DtoH"]) & (pl.col("bytes") >= self.min_bytes)
        )
        copies = copies.filter(pl.col("copy").n_unique().over("bytes") > 1)  # sizes seen both ways
        if copies.is_empty():
            return
        trips = self._find_trips(a, copies)
        is_recurring = trips["step"].n_unique() >= self.min_steps
        if not (is_recurring or (a.trace.cpu["kind"] == "python").any()):
            if sum_column(copies["exposed"]) >= self.min_asking_share * a.span_ns:
                yield SkippedCheck(
                    what="whether data makes a round trip through the host",
                    why="the trace has no Python stacks",
                    record="with_stack=True",
                )
            return
        table = trips if is_recurring else self._find_pairs(a, copies)
        if table["step"].n_unique() < self.min_steps:
            return
        trip_copies = copies.filter(
            pl.col("gpu").is_in(pl.concat([table["gpu"], table["back"]]).implode())
        )
        waits = a.syncs.filter(pl.col("copy").is_in(trip_copies["gpu"].implode()))
        edits = [Edit(op="remove", select=select_copies(a, trip_copies["gpu"]))]
        if waits.height:
            edits.append(make_calls_async(a, row_numbers(waits["host"])))
        rate = table.height / a.step_count
        cost = sum_column(trip_copies["exposed"])
        size = t.format_bytes(sum_column(table["bytes"]) / table.height)
        times = f"{t.count_noun(max(1, round(rate)), 'time')}{per_step(a)}"
        summary = (
            f"The same function copies {size} to the host and back, {times}. The copies take "
            f"{of_step(a, cost)}, and the host waits for the first."
        )
        names = ""
        if is_recurring:
            names = self._name_trip_operators(a)
            trip_ns = a.trip_intervals.total
            edits.append(
                scale_edit(
                    Select(on="gap", at="round_trip"), *self.range_of("remaining_work_share")
                )
            )
            summary = (
                f"Operators on the CPU work on {size} of data between a copy from the GPU and the "
                f"copy back, {times}. That takes {of_step(a, trip_ns)}."
            )
        yield Finding(
            summary=summary,
            evidence=[
                Evidence("round trips", rate, "count", per=a.per),
                self.compare(
                    "steps with a round trip", table["step"].n_unique(), "min_steps", "count"
                ),
                amount_per_step(a, "bytes to the host", sum_column(table["bytes"]), "bytes"),
                amount_per_step(a, "exposed copy time", cost),
                amount_per_step(a, "host waits for these copies", waits.height, "count"),
            ],
            where=device_places(a, table, "bytes", "launch"),
            edits=edits,
            **(self.case("operators on the CPU", names=names) if names else {}),
        )

    @staticmethod
    def _name_trip_operators(a: Analysis) -> str:
        """Return the names of the operators that take most time between the copies, outside the
        backward pass. Empty if none are recorded."""
        cpu = a.trace.cpu
        ts = cpu["ts"].to_numpy()
        is_between = pl.Series(covered_length(ts, ts + 1, a.trip_intervals) > 0)
        is_between &= name_matches(cpu["name"], "^aten::") & ~name_matches(cpu["name"], _MOVE_OPS)
        ops = cpu.filter(is_between & ~pl.Series(mask_under(a, r"Backward\d*$")[:-1]))
        time = ops.group_by(pl.col("name").cast(pl.String)).agg(pl.col("dur").sum())
        time = time.filter(pl.col("dur") >= _MIN_NAMED_SHARE * pl.col("dur").max())
        names = time.sort("dur", "name")["name"].to_list()[::-1][:_MAX_NAMED]
        return t.list_names(names) if names else ""

    @staticmethod
    def _find_trips(a: Analysis, copies: pl.DataFrame) -> pl.DataFrame:
        """Return the columns of ``_find_pairs`` for round trips with operators on the CPU in
        between."""
        copy_times = copies.select(pl.col("gpu").cast(pl.Int64), "step", "ts", "dur")
        return a.round_trips.join(copy_times, on="gpu", how="inner", maintain_order="left")

    @staticmethod
    def _find_pairs(a: Analysis, copies: pl.DataFrame) -> pl.DataFrame:
        """Return pairs: ``gpu`` (the copy to the host), ``back`` (the copy back), ``bytes``,
        ``step``, ``ts``, ``dur``, ``launch`` (row of cpu)."""
        cpu = a.trace.cpu
        python = (cpu["kind"] == "python").to_numpy()
        owner = map_names(cpu["name"], code_owner, pl.Int8).fill_null(0).to_numpy()
        parent = parent_rows(a.trace)
        copies = copies.with_columns(
            launch=a.trace.gpu["launch"].gather(copies["gpu"]).cast(pl.Int64)
        ).filter(pl.col("launch").is_not_null() & pl.col("step").is_not_null())
        launch = row_numbers(copies["launch"])
        # the calling function: the innermost frame outside PyTorch and Python itself
        frame = climb_stack(parent, python & (owner >= CodeOwner.LIBRARY), launch)
        is_offloaded = (
            climb_stack(parent, name_matches(cpu["name"], DELIBERATE).to_numpy(), launch) >= 0
        )
        is_wanted = (frame >= 0) & ~is_offloaded & (owner[np.maximum(frame, 0)] == CodeOwner.USER)
        start = cpu["ts"].to_numpy()
        end = start + cpu["dur"].to_numpy()
        steps = a.steps.marks  # frames have host times
        step_begin = steps["ts"].gather(copies["step"]).to_numpy()
        step_end = steps["end"].gather(copies["step"]).to_numpy()
        frame_row = np.maximum(frame, 0)
        is_wanted &= (start[frame_row] >= step_begin) & (end[frame_row] <= step_end)
        copies = (
            copies.with_columns(frame=pl.Series(frame), called=cpu["ts"].gather(copies["launch"]))
            .filter(pl.Series(is_wanted))
            .sort("called")
        )
        return copies.with_columns(
            following=pl.col("copy").shift(-1).over("frame", "bytes"),
            back=pl.col("gpu").shift(-1).over("frame", "bytes"),
        ).filter((pl.col("copy") == "DtoH") & (pl.col("following") == "HtoD"))

    @staticmethod
    def examples() -> Examples:
        reorder, loop, offload, library, sizes, plain, once, clamp, kept = (
            TraceBuilder() for _ in range(9)
        )
        for builder, annotation in ((clamp, ""), (kept, "Optimizer.step#CPUAdam.step")):
            for _ in builder.steps(5):
                builder.product(2000)
                with builder.range(annotation) if annotation else nullcontext():
                    builder.to("DtoH", 16 << 20, pinned=False)
                    builder.on_host("aten::clamp", 4000)
                    builder.to("HtoD", 16 << 20, pinned=False)
                builder.product(2000)
        for _ in range(5):
            with reorder.step(), reorder.python("train.py(10): train_step"):
                reorder.product(2000)
                with reorder.python("model.py(30): reorder"):
                    reorder.copy("DtoH", 16 << 20, pinned=False)
                    with reorder.python("numpy/core/fromnumeric.py(1100): argsort"):
                        reorder.host(300)
                    reorder.copy("HtoD", 16 << 20, pinned=False)
                reorder.product(2000)
        with loop.python("train.py(5): main"):
            for _ in loop.steps(5):
                loop.product(2000)
                loop.copy("DtoH", 16 << 20, pinned=False)
                loop.copy("HtoD", 16 << 20, pinned=False)
        for _ in offload.steps(5):
            with offload.python("train.py(10): train_step"):
                offload.product(2000)
                with offload.range("Optimizer.step#CPUAdam.step"):
                    _add_round_trip(offload)
        for _ in library.steps(5):
            with library.python("train.py(10): train_step"):
                library.product(2000)
                with library.python("deepspeed/runtime/engine.py(2000): step"):
                    _add_round_trip(library)
        for _ in sizes.steps(5):
            with sizes.python("train.py(10): train_step"):
                sizes.product(2000)
                sizes.copy("DtoH", 16 << 20, pinned=False)
                sizes.copy("HtoD", 8 << 20, pinned=False)
        for _ in plain.steps(5):
            plain.product(2000)
            _add_round_trip(plain)
        for step in once.steps(5):
            with once.python("train.py(10): train_step"):
                once.product(2000)
                if step in (1, 3):
                    _add_round_trip(once)
        return {
            "sorted on the CPU": reorder,
            "clamped on the CPU, without stacks": clamp,
            "the optimizer's state is on the host, without stacks": (
                kept,
                "not (is_recurring or (a.trace.cpu['kind'] == 'python').any())",
            ),
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
            "no stacks": (plain, "not (is_recurring or (a.trace.cpu['kind'] == 'python').any())"),
            "two steps only": (once, "min_steps"),
        }


def _add_round_trip(b: TraceBuilder) -> None:
    b.copy("DtoH", 16 << 20, pinned=False)
    b.copy("HtoD", 16 << 20, pinned=False)

"""Measurements of one rank's window, as attributes of one facade.

A pure function in its own file computes each attribute on first use; the result is cached. Nothing
here gives advice. The limits of a measurement are constants, with their reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import polars as pl

from advisor.core.auxiliary_inputs import AUXILIARY_INPUTS, SNAPSHOT
from advisor.core.finding import unit_of
from advisor.core.gpus import find_gpu, lookup
from advisor.core.intervals import Intervals, covered_length, intersect, intervals_of
from advisor.core.rule import Per
from advisor.measure.comm.comms import find_collectives
from advisor.measure.comm.flight_recorder import compare_dumps
from advisor.measure.comm.links import UNKNOWN_LINKS
from advisor.measure.device.copies import find_copies, find_offloaded
from advisor.measure.device.families import break_down
from advisor.measure.device.kernel_profiles import compiled_kernels, profiled_kernels
from advisor.measure.device.kernels import (
    find_varying_kernels,
    measure_kernels,
    model_flop_utilization,
    sum_families,
    sum_kernels,
)
from advisor.measure.host.device_reads import (
    find_time_after_reads,
    outermost_aten,
    read_loops,
    round_trips,
    trip_intervals,
)
from advisor.measure.host.gaps import idle_gaps
from advisor.measure.host.host_time import host_breakdown
from advisor.measure.host.launches import (
    LostRecords,
    analyzed_device,
    count_lost_records,
    launched_before_recording,
)
from advisor.measure.host.layers import measure_layers
from advisor.measure.host.module_calls import read_calls, step_evaluations
from advisor.measure.host.new_shapes import new_shape_calls, new_shape_spans
from advisor.measure.host.operators import measure_operators
from advisor.measure.host.rebuilt_weights import rebuilt_weights, rebuilt_weights_time
from advisor.measure.host.repeated_passes import repeated_backwards, second_forwards
from advisor.measure.host.stacks import forward_frames, forward_ops, user_frames, user_line
from advisor.measure.host.syncs import find_syncs
from advisor.measure.host.unused_gradients import (
    dropped_gradients,
    recorded_gradients,
    unused_gradient_work,
)
from advisor.measure.inference.graphs import count_missing_records
from advisor.measure.inference.inference_steps import (
    find_engine,
    find_inference_steps,
    with_attention,
)
from advisor.measure.inference.phases import measure_inference
from advisor.measure.memory.peak_memory import peak_memories
from advisor.measure.memory.trace_memory import (
    find_allocations,
    memory_by_step,
    recompute_time,
    recorded_snapshot,
)
from advisor.measure.steps.run_steps import RunSteps
from advisor.measure.steps.step_differences import compare_halves, find_one_off_rows
from advisor.measure.steps.steps import find_steps, forward_only
from advisor.measure.steps.timeline import build_timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from advisor.core.auxiliary_inputs import AuxiliaryInput, FlightRecord, FusedKernel
    from advisor.core.gpus import GpuSpec
    from advisor.core.run_directory import RankRecord
    from advisor.core.snapshot import MemorySnapshot
    from advisor.core.trace import Device, Trace
    from advisor.measure.inference.inference_steps import InferenceSteps
    from advisor.measure.memory.peak_memory import PeakMemory
    from advisor.measure.steps.steps import Steps


Measured = TypeVar("Measured")


class _Measurement(Generic[Measured]):
    """A cached measurement. ``idle_reads`` counts each use of one that treats time without recorded
    work as idle, or that is computed from such a measurement."""

    of_idle = False
    """Whether it treats time without recorded work as idle itself."""

    def __init__(self, measure: Callable[[Analysis], Measured]) -> None:
        self._measure = measure
        self.__doc__ = measure.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, a: Analysis | None, owner: type | None = None) -> Measured:
        if a is None:
            return self  # type: ignore[return-value]  # like a property, for its docstring
        cache, key = a.__dict__, f"{self._name}, of idle time"
        if key in cache:
            a.idle_reads += 1
            cached: Measured = cache[key]
            return cached
        before = a.idle_reads
        result = self._measure(a)
        a.idle_reads += self.of_idle
        # under the attribute's own name, later uses do not come here
        cache[key if a.idle_reads > before else self._name] = result
        return result


class _IdleMeasurement(_Measurement[Measured]):
    """A cached measurement that treats time without recorded work as idle: where records are lost,
    nothing may be concluded from it."""

    of_idle = True


MAX_EXCESS_WORK = 0.03
"""Maximum share by which the device's time per step of the window may exceed the run's median
step."""
MIN_DEVICE_BOUND_SHARE = 0.9
"""Minimum busy share of the run's own step at which the device limits its pace (gpu-idle: 80%)."""


class Analysis:
    """Measurements of one rank's window. ``select`` keeps a half-open range of steps.

    Frames named after a table of the trace are *aligned* with it: row i describes row i of
    ``trace.gpu`` (or ``trace.cpu``). All measurements count only instants inside ``spans``, the
    used steps."""

    def __init__(
        self,
        trace: Trace,
        select: tuple[int | None, int | None] | None = None,
        rank_record: RankRecord | None = None,
        snapshot: MemorySnapshot | None = None,
    ) -> None:
        self.trace = trace
        self.selection = select
        """Half-open range of step indices, or None."""
        self.rank_record = rank_record
        """Steps and samples of this rank from the recorder, or None if there is only a trace."""
        self.snapshot = trace.meta.snapshot if snapshot is None else snapshot
        """The allocator's snapshot of this rank, or None if none was given."""
        self.snapshot_series: tuple[MemorySnapshot, ...] = ()
        """Snapshots of this rank over the run, in order of time, if there are several."""
        self.node_links = UNKNOWN_LINKS
        """Node size, network rate and hosts as the user gave them."""
        self.idle_reads = 0
        """Number of reads of measurements that depend on when the device was idle."""

    # -- what the analysis is about ---------------------------------------------------------

    @_Measurement
    def run_steps(self) -> RunSteps | None:
        """The recorder's steps and samples of this rank, or ``None`` if there is only a trace."""
        if self.rank_record is None:
            return None
        return RunSteps(self.rank_record, self._busy_where_the_host_is_ahead)

    def _busy_where_the_host_is_ahead(self) -> float | None:
        """Return the device's mean time per step, ns, or ``None`` if the host waits for it."""
        if self.steps.ahead_ns is None:
            return None
        return self.device_busy(self.in_window).total / self.step_count

    forward_only = _Measurement(forward_only)
    """Whether the loop does not train, judging by what is recorded."""

    @_Measurement
    def auxiliary_inputs(self) -> tuple[AuxiliaryInput, ...]:
        """Inputs other than a trace and a record, given with one or alone."""
        meta = self.trace.meta
        snapshots = () if self.snapshot is None else (SNAPSHOT,)
        return tuple(kind for kind in AUXILIARY_INPUTS if kind in snapshots or kind.is_in(meta))

    @_Measurement
    def record_only(self) -> bool:
        """Whether no window was profiled: the trace is empty, but there is a record or another
        source."""
        has_other_source = self.rank_record is not None or bool(self.auxiliary_inputs)
        return has_other_source and self.trace.cpu.is_empty() and self.trace.gpu.is_empty()

    @property
    def only_input(self) -> AuxiliaryInput | None:
        """The input that replaces a trace and a record, or ``None`` if there is a trace or a
        record. Of several inputs, it is the one with the verdict."""
        return self.auxiliary_inputs[0] if self.record_only and self.rank_record is None else None

    outermost_aten = _Measurement(outermost_aten)
    """Outermost aten operator around each row of ``trace.cpu``, or -1."""

    @_Measurement
    def flight(self) -> FlightRecord | None:
        """Dumps of the flight recorder, compared across ranks, or ``None`` without dumps."""
        dumps = self.trace.meta.flight
        return compare_dumps(dumps) if dumps else None

    @_Measurement
    def steps(self) -> Steps:
        """Steps and how they were found (``steps.py``)."""
        return find_steps(self.trace, self.selection)

    @_Measurement
    def inference_steps(self) -> InferenceSteps | None:
        """Steps of inference (``inference_steps.py``), or ``None`` if the program trains or
        nothing marks them."""
        return find_inference_steps(self.trace)

    inference = _Measurement(measure_inference)
    """Steps of inference by phase, or ``None`` if there are no such steps."""

    @_Measurement
    def engine(self) -> str | None:
        """Inference engine of the program, from its marks or its frames. ``None`` if the program
        trains, or neither is recorded."""
        return find_engine(self.trace, self.inference_steps)

    @property
    def spans(self) -> Intervals:
        """Intervals of the used steps, ns: the instants that count."""
        return self.steps.spans

    @_Measurement
    def span_ns(self) -> int:
        """Length of the analysed window, ns."""
        return self.spans.total

    @_Measurement
    def step_count(self) -> int:
        """Number of used steps (1 for ``whole trace``)."""
        return max(1, self.steps.used.height)

    @property
    def per(self) -> Per:
        """Unit of the figures: per step, or per recording when no step is marked."""
        return "step" if self.record_only else unit_of(self.steps.source)

    @_Measurement
    def step_ns(self) -> float:
        """Mean duration of the used steps, ns. Without a trace, of the recorded steps."""
        if self.record_only and self.run_steps is not None:
            return self.run_steps.mean or 0.0
        return self.span_ns / self.step_count

    @_Measurement
    def device_id(self) -> int | None:
        """The analysed device, which is the one with the most device time. ``None`` if there is no
        device work."""
        return analyzed_device(self.trace)

    @property
    def trains_on_host(self) -> bool:
        """Whether no device works in the trace, nor in the recording if there is one."""
        in_recording = self.rank_record is not None and bool(self.rank_record.rank.devices)
        return self.device_id is None and not in_recording

    @_Measurement
    def device(self) -> Device | None:
        """Properties of the analysed device, if the file has them."""
        return None if self.device_id is None else self.trace.working_device(self.device_id)

    @property
    def device_name(self) -> str | None:
        """Name of the device from the driver, else from its properties. ``None`` if unknown."""
        name = None if self.device is None else self.device.name
        return self.hardware.name if name is None and self.hardware is not None else name

    @_Measurement
    def hardware(self) -> GpuSpec | None:
        """Peaks and limits of the analysed device. ``None`` if unknown, without rooflines."""
        if self.device is None:
            return None
        spec = lookup(
            self.device.name,
            sms=self.device.sms,
            memory_bytes=self.device.memory_bytes,
            compute=self.device.compute,
        )
        gpu_name = self.trace.meta.gpu
        return find_gpu(gpu_name).gpu if spec is None and gpu_name is not None else spec

    @_Measurement
    def in_window(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: on the analysed device, touching ``spans``, and not launched
        before the recording began."""
        return self.on_device & ~self.launched_before

    @_Measurement
    def lost_records(self) -> LostRecords:
        """Launches whose device work the profiler lost (``host/launches.py``), and work of graph
        replays that is not in the recording (``inference/graphs.py``)."""
        calls, graphs = count_lost_records(self.trace), count_missing_records(self.trace)
        totals = calls.launches + graphs[0], calls.lost + graphs[1]
        is_truncated = self.trace.meta.truncated and not self.trace.cpu.is_empty()
        return LostRecords(*totals, graphs[1], is_truncated)

    one_off_costs = _Measurement(find_one_off_rows)
    """Costs of first calls that take a fraction of the time when repeated."""

    new_shape_calls = _Measurement(new_shape_calls)
    """Operators that are slow on the first sight of an input shape, in most of the steps."""

    new_shape_spans = _Measurement(new_shape_spans)

    @_Measurement
    def launched_before(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: launched before the recording began (``launches.py``). The
        device is busy with this work, but it does not belong to the steps."""
        return launched_before_recording(self.trace)

    @_Measurement
    def on_device(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: on the analysed device, and touching ``spans``. Work with a
        duration of zero by the file's clock counts too."""
        gpu = self.trace.gpu
        ts = gpu["ts"].to_numpy()
        end = ts + gpu["dur"].to_numpy().clip(1)
        inside = covered_length(ts, end, self.spans) > 0
        if self.device_id is None:
            return inside
        on_this_device: NDArray[np.bool_] = (gpu["device"] == self.device_id).to_numpy()
        return inside & on_this_device

    def device_busy(self, rows: NDArray[np.bool_]) -> Intervals:
        """Return the union of the selected rows of ``trace.gpu``, clipped to ``spans``."""
        return intersect(intervals_of(self.trace.gpu, rows), self.spans)

    @_Measurement
    def unprofiled_busy_share(self) -> float | None:
        """Share of the run's own step in which the device works, or ``None`` without a device.

        The step is the run's median step if the record has it, since the profiler adds host time
        but no device work. Otherwise it is the window's step, also if that has clearly more work
        than fits in a step of the run."""
        if self.device_id is None or not self.span_ns:
            return None
        busy, window_step = self.breakdown.busy.total / self.step_count, float(self.step_ns)
        run_step = None if self.run_steps is None else self.run_steps.median
        if run_step is None or busy > (1 + MAX_EXCESS_WORK) * run_step:
            run_step = window_step
        return min(1.0, busy / min(window_step, run_step))

    @property
    def is_device_bound(self) -> bool:
        """Whether the device hardly ever idles in the run's own step, so that nothing on the host
        delays it."""
        return (self.unprofiled_busy_share or 0.0) >= MIN_DEVICE_BOUND_SHARE

    # -- time -------------------------------------------------------------------------------

    breakdown = _IdleMeasurement(break_down)
    """The step's device time in exclusive classes."""

    gaps = _IdleMeasurement(idle_gaps)
    """Idle gaps of the device, with blame."""

    step_halves = _Measurement(compare_halves)
    """Classes of time and kinds of work that take longer in the longer half of the steps."""

    syncs = _IdleMeasurement(find_syncs)
    """Host waits for the device."""

    copies = _IdleMeasurement(find_copies)
    """Copies: direction, bandwidth and the work that hid them."""

    offloaded = _Measurement(find_offloaded)
    """Copies of tensors that live on the host, or ``None`` if there are none."""

    host = _Measurement(host_breakdown)
    """Host time by thread and class."""

    timeline = _Measurement(build_timeline)
    """Exclusive activity of each host thread over time."""

    # -- device work ------------------------------------------------------------------------

    @_Measurement
    def kernels(self) -> pl.DataFrame:
        """Kernels and what is known of each, aligned with ``trace.gpu`` (``kernels.py``).

        Columns: ``family`` (one of ``families.FAMILIES``), ``communication`` (bool),
        ``tensor_core`` (bool; null if not recorded), ``eligible`` (bool: an op whose kernels could
        use tensor cores with 16-bit or TF32 inputs; null if unknown), ``dtype`` (input type as in
        GpuSpec.peak; null if unknown), ``flops`` (float of this kernel; null if unknown), ``moved``
        (bytes read and written at least once; null), ``waves`` (float; null), ``op_name``
        (categorical: the op judged responsible; null), ``occupancy`` (percent, computed if the
        device is known, else as the profiler wrote it; null), ``sdpa`` (row of ``trace.cpu``: the
        ``scaled_dot_product_attention`` op around the launch, whose name gives its backend; null),
        ``op_row`` (row of ``trace.cpu``: the op whose inputs determine the work, which is
        ``op_name`` or around it; null)."""
        return with_attention(self, measure_kernels(self))

    families = _Measurement(sum_families)
    """Device time by family."""

    hot_kernels = _Measurement(sum_kernels)
    """Device time by kernel name."""

    @_Measurement
    def fused_kernels(self) -> dict[str, FusedKernel]:
        """Kernels that inductor generated, by name, from torch.compile logs. Empty without logs."""
        log = self.trace.meta.compilation
        return {} if log is None else {kernel.name: kernel for kernel in log.kernels}

    rooflines = _Measurement(measure_operators)
    """Operators by shape, compared with the rates that the device attains."""

    layers = _Measurement(measure_layers)
    """Work by module."""

    varying_kernels = _Measurement(find_varying_kernels)
    """Kernels whose similar launches differ in duration."""

    flop_utilization = _Measurement(model_flop_utilization)
    """Model FLOP utilisation and the number format that it refers to."""

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, 0 to 1."""
        return None if self.flop_utilization is None else self.flop_utilization.share

    collectives = _IdleMeasurement(find_collectives)
    """Collectives: bytes, rates and the work that hid them."""

    read_loops = _Measurement(read_loops)
    """Host time of loops that read from the device."""

    after_reads = _Measurement(find_time_after_reads)
    """Host time of work on values read from the device."""

    round_trips = _Measurement(round_trips)
    """Copies to the host whose data goes back to the device."""

    trip_intervals = _Measurement(trip_intervals)
    """Intervals of the round trips."""

    second_forwards = _Measurement(second_forwards)
    """Host time of layers that run again in addition to the trained forward pass."""

    repeated_backwards = _Measurement(repeated_backwards)
    """Host time of autograd nodes that run more than once."""

    rebuilt_weights = _Measurement(rebuilt_weights)
    """Operators that rebuild untrained weights."""

    rebuilt_weights_time = _Measurement(rebuilt_weights_time)
    """Host time of the operators that rebuild untrained weights."""

    recorded_gradients = _Measurement(recorded_gradients)
    """Parameters with gradients that no optimizer holds, from the record."""

    dropped_gradients = _Measurement(dropped_gradients)
    unused_gradient_work = _Measurement(unused_gradient_work)
    """Work of the backward pass on dropped gradients."""

    # -- memory -----------------------------------------------------------------------------

    recompute_time = _Measurement(recompute_time)
    """Host time of recomputation."""

    memory = _Measurement(memory_by_step)
    """Device memory by step."""

    allocations = _Measurement(find_allocations)
    """Calls that allocate or free device or pinned memory."""

    @_Measurement
    def peak_memories(self) -> list[PeakMemory]:
        """Contents of the memory per device of the snapshot (``peak_memory.py``), the fullest
        first. Empty without a snapshot."""
        return [] if self.snapshot is None else peak_memories(self.snapshot)

    @_Measurement
    def gpu_and_host_peaks(self) -> list[PeakMemory]:
        """``peak_memories``, or without a snapshot the peaks from the trace's own allocator events
        (``trace_memory.py``), with the host's (device -1) last."""
        if self.snapshot is not None:
            return self.peak_memories
        recorded = recorded_snapshot(self)
        peaks = [] if recorded is None else peak_memories(recorded)
        return sorted(peaks, key=lambda peak: peak.device < 0)

    profiled_kernels = _Measurement(profiled_kernels)
    """Kernels with hardware counters, and their launches."""

    compiled_kernels = _Measurement(compiled_kernels)
    """Kernels that Triton compiled, and their launches."""

    # -- stacks -----------------------------------------------------------------------------

    @_Measurement
    def user_frame(self) -> NDArray[np.int32]:
        """Aligned with ``trace.cpu``: row of the innermost Python frame of the *user's* code around
        (or at) each host row, or -1 (``stacks.py``)."""
        return user_frames(self.trace)

    @_Measurement
    def forward_op(self) -> NDArray[np.int32]:
        """Aligned with ``trace.cpu``: for rows of the backward pass, row of the forward operator
        that created their node, or -1 (``stacks.py``)."""
        return forward_ops(self.trace)

    step_evaluations = _Measurement(step_evaluations)
    """Host time in which steps run a trained module in evaluation mode."""

    module_calls = _Measurement(read_calls)
    """The recorder's log of module calls in the window."""

    forward_frame = _Measurement(forward_frames)
    """Aligned with ``trace.cpu``: the user's frame around each row's forward operator."""

    def location(self, host_row: int | None) -> tuple[str | None, int | None, str | None]:
        """Return (file, line, function) of the user's code around a host row, all None without
        stacks."""
        return user_line(self, host_row)

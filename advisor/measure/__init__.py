"""Measurements of one rank's window: the facade whose attributes are the table of contents.

Each attribute is computed by a pure function in its own file, on first use, and kept. Nothing
here holds an opinion or a threshold.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import polars as pl

from advisor.core.finding import Per, unit_of
from advisor.core.intervals import Intervals, intersect, union

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from advisor.core.gpus import GpuSpec
    from advisor.core.report import FlightRecord, FusedKernel, Serving
    from advisor.core.run_directory import RankRecord
    from advisor.core.snapshot import MemorySnapshot
    from advisor.core.trace import Device, Trace
    from advisor.measure.device.breakdown import Breakdown
    from advisor.measure.device.kernel_profiles import MatchedKernel, ProfiledKernel
    from advisor.measure.host.launches import Lost
    from advisor.measure.host.layers import Layers
    from advisor.measure.memory.post_mortem import PostMortem
    from advisor.measure.serving.passes import Passes
    from advisor.measure.steps.record import StepRecords
    from advisor.measure.steps.step_variation import StepHalves
    from advisor.measure.steps.steps import Steps
    from advisor.measure.steps.timeline import Timeline


Measured = TypeVar("Measured")


class _OfIdle(Generic[Measured]):
    """A cached measurement that takes the device for idle where no work is recorded. That it was
    asked for is counted: where records are lost, nothing may be concluded from it."""

    def __init__(self, measure: Callable[[Analysis], Measured]) -> None:
        self._measure = measure
        self._key = f"_{measure.__name__}"
        self.__doc__ = measure.__doc__

    def __get__(self, a: Analysis | None, owner: type | None = None) -> Measured:
        if a is None:
            return self  # type: ignore[return-value]  # as a property does, for its docstring
        a.idle_reads += 1
        kept = a.__dict__
        if self._key not in kept:
            kept[self._key] = self._measure(a)
        result: Measured = kept[self._key]
        return result


class Analysis:
    """One rank's window, measured. ``select`` keeps a half-open range of steps.

    Frames named after a table of the trace are *aligned* with it: row i describes row i of
    ``trace.gpu`` (or ``trace.cpu``). All measurements count only instants inside ``spans``, the
    steps that are used.
    """

    def __init__(
        self,
        trace: Trace,
        select: tuple[int | None, int | None] | None = None,
        record: RankRecord | None = None,
        snapshot: MemorySnapshot | None = None,
    ) -> None:
        self.trace = trace
        self.selection = select
        """Half-open range of step indices, or None."""
        self.record = record
        """What the recorder wrote of this rank; None: a trace alone."""
        self.snapshot = trace.meta.snapshot if snapshot is None else snapshot
        """The allocator's snapshot of this rank; None: none was given."""
        self.snapshot_series: tuple[MemorySnapshot, ...] = ()
        """Snapshots of this rank over the run, in order of time, where there are several."""
        self.idle_reads = 0
        """How often a measurement was asked for that rests on when the device was idle."""

    # -- what the analysis is about ---------------------------------------------------------

    @cached_property
    def recorded(self) -> StepRecords | None:
        """The recorder's steps and samples of this rank (``record.py``); ``None``: a trace
        alone."""
        from advisor.measure.steps.record import StepRecords

        return None if self.record is None else StepRecords(self.record)

    @cached_property
    def forward_only(self) -> bool:
        """The loop does not train, as far as is recorded (``passes.py``)."""
        from advisor.measure.steps.steps import forward_only

        return forward_only(self)

    @cached_property
    def record_only(self) -> bool:
        """There is a record, or a memory snapshot, but nothing in the trace: no window was
        profiled."""
        meta = self.trace.meta
        known = self.record, self.snapshot, meta.kernel_profiles, meta.compilation
        return (
            (any(each is not None for each in known) or bool(meta.flight))
            and self.trace.cpu.is_empty()
            and self.trace.gpu.is_empty()
        )

    @property
    def timeless(self) -> bool:
        """There is neither a trace nor a record: a memory snapshot, hardware counters, or logs of
        torch.compile."""
        return self.record_only and self.record is None

    @property
    def snapshot_only(self) -> bool:
        """There is a memory snapshot and nothing else."""
        return self.timeless and self.snapshot is not None

    @property
    def counters_only(self) -> bool:
        """There are hardware counters of single kernels and nothing else."""
        return self.timeless and self.trace.meta.kernel_profiles is not None

    @property
    def log_only(self) -> Literal["flight recorder", "compile log"] | None:
        """There are logs and nothing else: of which kind, the one with the verdict."""
        known = self.snapshot, self.trace.meta.kernel_profiles
        if not self.timeless or any(each is not None for each in known):
            return None
        return "flight recorder" if self.flight is not None else "compile log"

    @cached_property
    def flight(self) -> FlightRecord | None:
        """Flight-recorder dumps, compared across ranks (``comm/flight.py``); ``None``: none."""
        from advisor.measure.comm.flight import compare_dumps

        dumps = self.trace.meta.flight
        return compare_dumps(dumps) if dumps else None

    @cached_property
    def steps(self) -> Steps:
        """Steps and how they were found (``steps.py``)."""
        from advisor.measure.steps.steps import find_steps

        return find_steps(self.trace, self.selection)

    @cached_property
    def passes(self) -> Passes | None:
        """Steps of inference (``serving/passes.py``); ``None``: the program trains, or nothing
        marks them."""
        from advisor.measure.serving.passes import find_passes

        return find_passes(self.trace)

    @cached_property
    def serving(self) -> Serving | None:
        """Steps of inference by phase (``serving/phases.py``); ``None``: there are none."""
        from advisor.measure.serving.phases import measure_serving

        return measure_serving(self)

    @cached_property
    def engine(self) -> str | None:
        """What serves the model, by its marks or by its frames; ``None``: it trains, or nothing
        shows."""
        from advisor.measure.serving.passes import find_engine

        return find_engine(self.trace, self.passes)

    @property
    def spans(self) -> Intervals:
        """The instants that count: the used steps, ns."""
        return self.steps.spans

    @cached_property
    def span_ns(self) -> int:
        """Length of the analysed window, ns."""
        return self.spans.total

    @cached_property
    def step_count(self) -> int:
        """Number of used steps (1 for ``whole trace``)."""
        return max(1, self.steps.used.height)

    @property
    def per(self) -> Per:
        """What figures are of: a step, or the recording when none is marked."""
        return "step" if self.record_only else unit_of(self.steps.source)

    @cached_property
    def step_ns(self) -> float:
        """Mean duration of the used steps, ns; without a trace, of the recorded ones."""
        if self.record_only and self.recorded is not None:
            return self.recorded.mean or 0.0
        return self.span_ns / self.step_count

    @cached_property
    def device_id(self) -> int | None:
        """The device that is analysed: the one with most device time; ``None``: no device work."""
        from advisor.measure.host.launches import analysed_device

        return analysed_device(self.trace)

    @property
    def trains_on_host(self) -> bool:
        """No device works in the trace, and the recording, where there is one, saw none."""
        seen = self.record is not None and bool(self.record.rank.devices)
        return self.device_id is None and not seen

    @cached_property
    def device(self) -> Device | None:
        """Properties of that device, if the file has them."""
        return None if self.device_id is None else self.trace.working_device(self.device_id)

    @property
    def device_name(self) -> str | None:
        """What the driver calls it; where it gives no name, what its properties can only be."""
        name = None if self.device is None else self.device.name
        return self.hardware.name if name is None and self.hardware is not None else name

    @cached_property
    def hardware(self) -> GpuSpec | None:
        """What that device can do; ``None``: unknown GPU, so rooflines are not measured."""
        from advisor.core.gpus import find_gpu, lookup

        if self.device is None:
            return None
        result = lookup(
            self.device.name,
            sms=self.device.sms,
            memory_bytes=self.device.memory_bytes,
            compute=self.device.compute,
        )
        named = self.trace.meta.gpu
        return find_gpu(named).gpu if result is None and named is not None else result

    @cached_property
    def in_window(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: on the analysed device, touching ``spans``, and not launched
        before the recording began."""
        return self.on_device & ~self.earlier

    @cached_property
    def lost(self) -> Lost:
        """Launches whose device work the profiler lost (``host/launches.py``), and work of graph
        replays that is not in the recording (``serving/graphs.py``)."""
        from advisor.measure.host.launches import Lost, lost_records
        from advisor.measure.serving.graphs import missing_records

        calls, graphs = lost_records(self.trace), missing_records(self.trace)
        return Lost(calls.launches + graphs[0], calls.lost + graphs[1], graphs[1])

    @cached_property
    def one_off(self) -> pl.DataFrame:
        """First calls that later ones do in a fraction of the time (``oneoff.py``): ``host`` (row
        of cpu), ``name``, ``ts``, ``dur``, ``usual`` (ns, median of the later ones), ``count``."""
        from advisor.measure.steps.oneoff import one_off

        return one_off(self)

    @cached_property
    def earlier(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: launched before the recording began (``launches.py``). The
        device is busy with it, but it is not the steps' work."""
        from advisor.measure.host.launches import earlier

        return earlier(self.trace)

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """Aligned with ``trace.gpu``: on the analysed device, and touching ``spans``. Work that
        took no time by the file's clock ran all the same."""
        from advisor.core.intervals import covered_length

        gpu = self.trace.gpu
        ts = gpu["ts"].to_numpy()
        until = ts + gpu["dur"].to_numpy().clip(1)
        inside = covered_length(ts, until, self.spans) > 0
        if self.device_id is None:
            return inside
        own: NDArray[np.bool_] = (gpu["device"] == self.device_id).to_numpy()
        return inside & own

    def device_busy(self, rows: NDArray[np.bool_]) -> Intervals:
        """Union of the selected rows of ``trace.gpu``, clipped to ``spans``."""
        gpu = self.trace.gpu
        ts = gpu["ts"].to_numpy()[rows]
        return intersect(union(ts, ts + gpu["dur"].to_numpy()[rows]), self.spans)

    # -- time -------------------------------------------------------------------------------

    @_OfIdle
    def breakdown(self) -> Breakdown:
        """The step's device time in exclusive classes, and host time (``breakdown.py``)."""
        from advisor.measure.device.breakdown import break_down

        return break_down(self)

    @_OfIdle
    def gaps(self) -> pl.DataFrame:
        """Idle gaps of the device with blame (``gaps.py``): they add up to the idle time.

        Columns: ``ts``, ``dur`` (ns, clipped to ``spans``; a gap with several causes is split
        into consecutive pieces), ``step`` (index), ``cause`` (one of ``gaps.CAUSES``),
        ``thread`` (row of threads, null: none), ``host`` (row of ``trace.cpu`` blamed, null:
        none), ``line`` (row of the innermost *user* Python frame around it, null: no stacks),
        ``next`` (row of ``trace.gpu`` that ended the gap, null: end of window), ``gap`` (number
        of the gap the piece belongs to).
        """
        from advisor.measure.host.gaps import idle_gaps

        return idle_gaps(self)

    @cached_property
    def uneven(self) -> StepHalves | None:
        """What the longer half of the used steps has more of than the shorter one
        (``uneven.py``); ``None``: they are similar, or too few."""
        from advisor.measure.steps.step_variation import uneven

        return uneven(self)

    @_OfIdle
    def syncs(self) -> pl.DataFrame:
        """Host waits for the device (``syncs.py``), one row a synchronising runtime call inside
        ``spans``: ``host`` (row of cpu), ``ts``, ``dur``, ``call``, ``kind`` (``device``,
        ``stream``, ``event``, ``memcpy``: a copy that blocked the host), ``waited`` (ns of the
        call during which the device was still working), ``bubble`` (ns the device then idled
        because the host had been held: from the end of the awaited work to the start of the next
        device work that this thread launched after the sync, idle part only), ``bubble_ts``,
        ``bubble_end`` (that span before clipping to idle time; null: no bubble), ``op`` (row of the
        innermost op around, null), ``cause`` (text: ``aten::item``, ``aten::nonzero``,
        ``torch.cuda.synchronize``, …), ``copy`` (row of gpu of the copy it waits for, null),
        ``line`` (row of the user Python frame, null), ``step``, ``profiler`` (true: issued by the
        profiler itself at the end of its window)."""
        from advisor.measure.host.syncs import find_syncs

        return find_syncs(self)

    @_OfIdle
    def copies(self) -> pl.DataFrame:
        """Copies inside ``spans`` (``copies.py``): ``gpu`` (row), ``ts``, ``dur``, ``copy``,
        ``memory`` (``pageable``, ``pinned``, null: not recorded or no host side), ``bytes``,
        ``gbps``, ``exposed`` (ns not under compute or communication), ``blocking`` (the host was
        held until it ended), ``stream``, ``op``, ``line``, ``step``, ``same_stream`` (it runs on
        the stream that most compute runs on)."""
        from advisor.measure.device.copies import find_copies

        return find_copies(self)

    @cached_property
    def host(self) -> pl.DataFrame:
        """Host time per step (``host.py``): one row a thread and class with ``thread``, ``class``
        (one of ``host.CLASSES``), ``ns`` (exclusive, inside ``spans``)."""
        from advisor.measure.host.host import host_breakdown

        return host_breakdown(self)

    @cached_property
    def timeline(self) -> Timeline:
        """What each host thread was doing at each instant (``timeline.py``)."""
        from advisor.measure.steps.timeline import build_timeline

        return build_timeline(self)

    # -- device work ------------------------------------------------------------------------

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """Aligned with ``trace.gpu`` (``kernels.py``): ``family`` (one of ``families.FAMILIES``),
        ``communication`` (bool), ``tensor_core`` (bool; null: not recorded), ``eligible`` (bool: an
        op whose kernels could use tensor cores with 16-bit or TF32 inputs; null: unknown),
        ``dtype`` (input type as in GpuSpec.peak; null: not known), ``flops`` (float of this
        kernel; null: not known), ``moved`` (bytes read and written at least once; null),
        ``waves`` (float; null), ``op_name`` (categorical: the op judged responsible; null),
        ``occupancy`` (percent, computed where the device is known, else as the profiler wrote it;
        null), ``sdpa`` (row of ``trace.cpu``: the ``scaled_dot_product_attention`` op around the
        launch, whose name says its backend; null), ``op_row`` (row of ``trace.cpu``: the op whose
        inputs tell the work, which is ``op_name`` or around it; null)."""
        from advisor.measure.device.kernels import measure_kernels
        from advisor.measure.serving.work import with_attention

        return with_attention(self, measure_kernels(self))

    @cached_property
    def families(self) -> pl.DataFrame:
        """Device time by family inside ``spans``: ``family``, ``count``, ``dur`` (ns summed),
        ``share`` (of summed compute + communication kernel time), ``flops``, ``moved``."""
        from advisor.measure.device.kernels import sum_families

        return sum_families(self)

    @cached_property
    def hot_kernels(self) -> pl.DataFrame:
        """Device time by kernel name inside ``spans``: ``name``, ``family``, ``count``, ``dur``,
        ``share``, ``occupancy`` (time-weighted percent; null), ``blocks_per_sm`` (time-weighted;
        null), ``tensor_core``, ``flops_per_s``, ``bytes_per_s``, ``roofline`` (share of the
        attainable peak; null: not measured), ``op_name``; largest ``dur`` first."""
        from advisor.measure.device.kernels import sum_kernels

        return sum_kernels(self)

    @cached_property
    def fused_kernels(self) -> dict[str, FusedKernel]:
        """What inductor generated, by name, from logs of torch.compile; empty: there are none."""
        log = self.trace.meta.compilation
        return {} if log is None else {each.name: each for each in log.kernels}

    @cached_property
    def rooflines(self) -> pl.DataFrame:
        """Operators by shape against what the device attains (``operators.py``), one row an
        operator and inputs, inside ``spans``, without communication: ``op`` (null: of a graph, or
        not linked), ``inputs`` (row of ``trace.inputs``; null: not recorded), ``family``,
        ``dtype``, ``tensor_core`` and ``kernel`` (of its longest kernel), ``calls``, ``kernels``,
        ``dur`` (ns), ``share`` (of kernel time without communication), ``flops``, ``moved``
        (bytes; null: not known), ``flops_per_s``, ``bytes_per_s``, ``attainable_flops_per_s``,
        ``attainable_bytes_per_s``, ``bound`` (``compute``, ``memory``, ``launch``, ``unknown``),
        ``efficiency`` (0 to 1; null: not judged), ``saved`` (ns that it would take less
        at the attainable rate; null), ``longest`` (row of ``trace.gpu``); largest ``dur`` first."""
        from advisor.measure.host.operators import measure_operators

        return measure_operators(self)

    @cached_property
    def layers(self) -> Layers | None:
        """Work by module (``layers.py``): the device's, else that of operators on the host.
        ``None``: no modules were recorded around any of it."""
        from advisor.measure.host.layers import measure_layers

        return measure_layers(self)

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: FLOPs of all kernels with known shapes over the step time times
        the peak of their dtype (0 to 1). ``None``: shapes or peak not known, or shapes cover
        less than 80 % of GEMM, convolution and attention time."""
        from advisor.measure.device.kernels import model_flop_utilisation

        return model_flop_utilisation(self)

    @_OfIdle
    def collectives(self) -> pl.DataFrame:
        """Collectives inside ``spans`` (``comms.py``): ``gpu`` (row), ``ts``, ``dur``,
        ``collective`` (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
        ``broadcast``, ``reduce``, ``send_recv``, ``other``), ``bytes`` (message; null),
        ``group_size`` (null), ``dtype``, ``bus_gbps`` (null: bytes or group unknown),
        ``exposed`` (ns not under compute), ``hidden_by`` (family that covered most of it; null),
        ``stream``, ``op`` (row), ``annotation`` (text of the nearest user annotation, null),
        ``group`` (process group name, null), ``step``, ``order`` (n-th of its kind and group)."""
        from advisor.measure.comm.comms import find_collectives

        return find_collectives(self)

    # -- memory -----------------------------------------------------------------------------

    @cached_property
    def memory(self) -> pl.DataFrame:
        """Device memory per step (``memory.py``): ``device``, ``step``, ``peak_allocated``,
        ``peak_reserved`` (bytes; null), ``capacity`` (bytes; null). Empty: not recorded."""
        from advisor.measure.memory.memory import memory_by_step

        return memory_by_step(self)

    @cached_property
    def allocations(self) -> pl.DataFrame:
        """Runtime calls that allocate or free device or pinned memory inside ``spans``
        (``memory.py``): ``host`` (row), ``call``, ``ts``, ``dur``, ``step``, ``line``, ``op``."""
        from advisor.measure.memory.memory import find_allocations

        return find_allocations(self)

    @cached_property
    def post_mortems(self) -> list[PostMortem]:
        """What held the memory, one a device of the snapshot (``post_mortem.py``), the fullest
        first. Empty: no snapshot."""
        from advisor.measure.memory.post_mortem import post_mortems

        return [] if self.snapshot is None else post_mortems(self.snapshot)

    @cached_property
    def memory_histories(self) -> list[PostMortem]:
        """``post_mortems``; without a snapshot, those of the trace's own allocator events
        (``memory.py``), the host's (device -1) last."""
        from advisor.measure.memory.memory import recorded_snapshot
        from advisor.measure.memory.post_mortem import post_mortems

        if self.snapshot is not None:
            return self.post_mortems
        recorded = recorded_snapshot(self)
        made = [] if recorded is None else post_mortems(recorded)
        return sorted(made, key=lambda post: post.device < 0)

    @cached_property
    def profiled_kernels(self) -> list[ProfiledKernel]:
        """The kernels of the kernel profiles, alone or beside the trace, with their launches in it
        (``kernel_profiles.py``). Empty: no profiles."""
        from advisor.measure.device.kernel_profiles import profiled_kernels

        return profiled_kernels(self)

    @cached_property
    def compiled_kernels(self) -> list[MatchedKernel]:
        """The kernels of a cache of Triton, alone or beside the trace, with their launches in it
        (``kernel_profiles.py``). Empty: none was given."""
        from advisor.measure.device.kernel_profiles import compiled_kernels

        return compiled_kernels(self)

    # -- stacks -----------------------------------------------------------------------------

    @cached_property
    def user_frame(self) -> NDArray[np.int32]:
        """Aligned with ``trace.cpu``: row of the innermost Python frame of the *user's* code
        around (or at) each host row, -1: none (``stacks.py``)."""
        from advisor.measure.host.stacks import user_frames

        return user_frames(self.trace)

    @cached_property
    def forward_op(self) -> NDArray[np.int32]:
        """Aligned with ``trace.cpu``: for rows of the backward pass, row of the forward operator
        that created their node, -1: none (``stacks.py``)."""
        from advisor.measure.host.stacks import forward_ops

        return forward_ops(self.trace)

    @cached_property
    def forward_frame(self) -> NDArray[np.int32]:
        """Aligned with ``trace.cpu``: for rows of the backward pass, row of the user's Python
        frame around the forward operator they belong to, -1: none (``stacks.py``)."""
        from advisor.measure.host.stacks import forward_frames

        return forward_frames(self)

    def location(self, host_row: int | None) -> tuple[str | None, int | None, str | None]:
        """(file, line, function) of the user's code around a host row; Nones: no stacks."""
        from advisor.measure.host.stacks import locate

        return locate(self, host_row)

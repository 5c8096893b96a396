"""TraceBuilder: a simulated host, some streams and a clock that write Kineto JSON.

It simulates a program: host calls advance the host clock, device work starts when it is launched
and its stream is free, and a synchronising call waits. The real reader reads the result, so an
example tests the same code as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from advisor.core.kernel_profile import CompiledKernel, KernelProfile
    from advisor.core.trace import Trace
    from advisor.measure import Analysis
    from advisor.testing.allocator import FakeAllocator
    from advisor.testing.record import RecordBuilder

_LIMITS: dict[str, Any] = {
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536, "warpSize": 32, "sharedMemPerBlock": 49152,
}  # fmt: skip
DEVICES: dict[str, dict[str, Any]] = {
    "A100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "totalGlobalMem": 85_094_825_984,
        "computeMajor": 8,
        "computeMinor": 0,
        "numSms": 108,
        **_LIMITS,
        "sharedMemPerMultiprocessor": 167936,
        "sharedMemPerBlockOptin": 166912,
    },
    "V100": {
        "name": "Tesla V100-SXM2-16GB",
        "totalGlobalMem": 16_945_512_448,
        "computeMajor": 7,
        "computeMinor": 0,
        "numSms": 80,
        **_LIMITS,
        "sharedMemPerMultiprocessor": 98304,
        "sharedMemPerBlockOptin": 98304,
    },
    "H100": {
        "name": "NVIDIA H100 80GB HBM3",
        "totalGlobalMem": 85_045_411_840,
        "computeMajor": 9,
        "computeMinor": 0,
        "numSms": 132,
        **_LIMITS,
        "sharedMemPerMultiprocessor": 233472,
        "sharedMemPerBlockOptin": 232448,
    },
}

MAIN = 1000
"""Number of the process and of the main thread."""
GLOO = 1077
"""Number of gloo's thread, if there is one."""


class TraceBuilder:
    """Builder of a small trace, used like a program. All times are microseconds.

    >>> b = TraceBuilder()
    >>> for _ in range(4):
    ...     with b.step():
    ...         b.loader_wait(5000, workers=0)
    ...         with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
    ...             b.launch("ampere_sgemm_128x64_nn", 900, blocks=128, threads=256)
    >>> trace = b.trace()"""

    def __init__(
        self,
        gpu: str | None = "A100",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        launch_us: float = 5.0,
        latency_us: float = 3.0,
        cuda_sync_rows: bool = False,
    ) -> None:
        self.now = 1000.0
        """Time on the clock of the current host thread, us."""
        self.events: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
        if gpu is not None:
            self.head["deviceProperties"] = [{"id": 0, **DEVICES[gpu]}]
        if rank is not None:
            self.head["distributedInfo"] = {
                "backend": "nccl",
                "rank": rank,
                "world_size": world_size or rank + 1,
            }
        self.launch_us = launch_us
        """Host time of one launch call, us."""
        self.latency_us = latency_us
        """Time from the end of a launch call to its kernel's start on an idle stream, us."""
        self.cuda_sync_rows = cuda_sync_rows
        self.tid = MAIN
        self._free: dict[int, float] = {}
        self._recorded: dict[int, float] = {}
        self._ids = 0
        self._steps = 0
        self._record: RecordBuilder | None = None
        self._snapshot: bytes | None = None
        self._profiles: list[KernelProfile] = []
        self._compiled: list[CompiledKernel] = []
        self.logs: dict[str, Any] = {}
        """Logs in addition to the trace, by fields of TraceMeta."""

    # -- host -------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Add a ``ProfilerStep#N`` range."""
        number = self._steps if number is None else number
        self._steps = number + 1
        with self.range(f"ProfilerStep#{number}"):
            yield

    def steps(self, count: int = 4) -> Iterator[int]:
        """Yield ``count`` step numbers. A loop over them runs its body inside each step."""
        for number in range(count):
            with self.step():
                yield number

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Add a user annotation."""
        with self._span("user_annotation", name, {"External id": self._next()}):
            yield

    @contextmanager
    def op(
        self,
        name: str,
        shapes: Sequence[Sequence[Any]] | None = None,
        dtypes: str | Sequence[str] = "float",
        *,
        strides: Sequence[Sequence[int]] | None = None,
        concrete: Sequence[str] | None = None,
        sequence: int | None = None,
        host_us: float = 2.0,
    ) -> Iterator[None]:
        """Add an op around its launches. ``host_us``: its own host time before them."""
        args: dict[str, Any] = {"External id": self._next()}
        if shapes is not None:
            types = [dtypes] * len(shapes) if isinstance(dtypes, str) else list(dtypes)
            args |= {"Input Dims": shapes, "Input type": types}
            if strides is not None:
                args["Input Strides"] = strides
            if concrete is not None:
                args["Concrete Inputs"] = concrete
        if sequence is not None:
            args["Sequence number"] = sequence
        with self._span("cpu_op", name, args):
            self.now += host_us
            yield
            self.now += 0.5

    def on_host(
        self,
        op: str,
        us: float = 2.0,
        shapes: Sequence[Sequence[Any]] | None = None,
        dtypes: str | Sequence[str] = "float",
        **op_args: Any,
    ) -> None:
        """Add an operator that computes on the host. ``op_args``: arguments of :meth:`op`."""
        with self.op(op, shapes, dtypes, host_us=us, **op_args):
            pass

    @contextmanager
    def python(self, frame: str) -> Iterator[None]:
        """Add a Python frame in the profiler's format: ``train.py(12): forward``."""
        with self._span("python_function", frame, {"Python id": self._next()}):
            self.now += 0.5
            yield
            self.now += 0.5

    def host(self, us: float) -> None:
        """Add host time that the trace does not explain, unless inside a :meth:`python` frame."""
        self.now += us

    def loader_wait(self, us: float, *, workers: int = 2) -> None:
        """Add a wait of the training loop for the next batch, ``us`` long."""
        iterator = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
        with self.range(f"enumerate(DataLoader)#{iterator}.__next__"):
            self.now += us

    def call(self, name: str, us: float, correlation: int | None = None, **args: Any) -> None:
        """Add any runtime call."""
        all_args = {"correlation": self._next() if correlation is None else correlation, **args}
        self._emit("cuda_runtime", name, self.now, us, MAIN, self.tid, all_args)
        self.now += us

    def overhead(self, name: str, us: float) -> None:
        """Add time that the profiler itself takes from the host thread."""
        self._emit("overhead", name, self.now, us, -1, 0, {})
        self.now += us

    @contextmanager
    def thread(self, tid: int) -> Iterator[None]:
        """Switch to another host thread, and continue with the caller when it ends (as the main
        thread does while autograd runs backward)."""
        outer, self.tid = self.tid, tid
        try:
            yield
        finally:
            self.tid = outer

    # -- device -----------------------------------------------------------------------------

    def launch(
        self,
        kernel: str,
        us: float,
        *,
        stream: int = 7,
        blocks: int = 1024,
        threads: int = 256,
        registers: int = 32,
        shared: int = 0,
        occupancy: float | None = 50,
        call: str = "cudaLaunchKernel",
        comm: dict[str, Any] | None = None,
        after: float = 0.0,
    ) -> int:
        """Launch a kernel of ``us``. Return its correlation id. ``after``: its earliest start."""
        args: dict[str, Any] = {
            "registers per thread": registers,
            "shared memory": shared,
            "grid": [blocks, 1, 1],
            "block": [threads, 1, 1],
            "queued": 0,
        }
        properties = self.head["deviceProperties"]
        if properties:
            args["blocks per SM"] = blocks / properties[0]["numSms"]
            args["warps per SM"] = args["blocks per SM"] * threads / 32
        if occupancy is not None:
            args["est. achieved occupancy %"] = occupancy
        return self._work("kernel", kernel, us, stream, call, args | (comm or {}), after)

    def run(
        self,
        op: str,
        kernel: str,
        us: float,
        shapes: Sequence[Sequence[int]] | None = None,
        dtypes: str | Sequence[str] = "float",
        *,
        times: int = 1,
        host_us: float = 2.0,
        **launch: Any,
    ) -> None:
        """Add an op around one kernel, ``times`` times. ``launch``: arguments of :meth:`launch`."""
        for _ in range(times):
            with self.op(op, shapes, dtypes, host_us=host_us):
                self.launch(kernel, us, **launch)

    def compute(
        self,
        op: str,
        us: float,
        shapes: Sequence[Sequence[Any]] | None = None,
        dtypes: str | Sequence[str] = "float",
        *,
        kernel: str = "ampere_sgemm_128x64_nn",
        host_us: float = 9.0,
        **op_args: Any,
    ) -> None:
        """Add an operator that computes for ``us``, in a kernel or, without a GPU, on the host.
        ``op_args``: arguments of :meth:`op`."""
        if not self.head["deviceProperties"]:
            self.on_host(op, us, shapes, dtypes, **op_args)
            return
        with self.op(op, shapes, dtypes, host_us=host_us, **op_args):
            self.launch(kernel, us)

    def product(self, us: float, times: int = 1, *, wait: bool = False, **launch: Any) -> None:
        """Add FP32 matrix products. ``wait``: the host waits for them, as at the end of a step."""
        self.run("aten::mm", "ampere_sgemm_128x64_nn", us, times=times, **launch)
        if wait:
            self.sync()

    def graph_launch(self, kernels: Sequence[tuple[str, float]]) -> None:
        """Add a ``cudaGraphLaunch`` of many kernels, each as (name, us)."""
        correlation = self._next()
        self.call("cudaGraphLaunch", 2 * self.launch_us, correlation)
        args = {"grid": [256, 1, 1], "block": [256, 1, 1], "graph id": 1}
        for name, us in kernels:
            self._device("kernel", name, us, 7, correlation, args)

    def copy(
        self,
        direction: str,
        size: int,
        us: float | None = None,
        *,
        pinned: bool = True,
        blocking: bool = False,
        stream: int = 7,
        op: str | None = "aten::copy_",
    ) -> None:
        """Add a copy (``HtoD``, ``DtoH``, ``DtoD``), by default at 20 GB/s pinned or 6 GB/s
        pageable.

        A blocking copy is followed by ``cudaStreamSynchronize`` inside its op, as PyTorch does
        without ``non_blocking=True``."""
        if us is None:
            us = size / (1000e3 if direction == "DtoD" else 20e3 if pinned else 6e3)
        host_memory = "Pinned" if pinned else "Pageable"
        memories = {"HtoD": (host_memory, "Device"), "DtoH": ("Device", host_memory)}.get(
            direction, ("Device", "Device")
        )
        name = f"Memcpy {direction} ({memories[0]} -> {memories[1]})"
        args = {"bytes": size, "memory bandwidth (GB/s)": size / us / 1e3}

        def add_copy() -> None:
            self._work("gpu_memcpy", name, us, stream, "cudaMemcpyAsync", args, 0.0)
            if blocking or (not pinned and direction != "DtoD"):
                self.sync("cudaStreamSynchronize", stream=stream)

        if op is None:
            add_copy()
        else:
            with self.op(op):
                add_copy()

    def to(self, direction: str, size: int, **copy: Any) -> None:
        """Add a copy made by ``tensor.to``."""
        with self.op("aten::to"), self.op("aten::_to_copy"):
            self.copy(direction, size, **copy)

    def migrate(self, direction: str, size: int, us: float, *, cause: str = "page fault") -> None:
        """Add a page migration of unified memory (``HtoD``, ``DtoH``) next to the last kernel,
        named as in Nsight Systems."""
        ends = ("Managed", "Device") if direction == "HtoD" else ("Device", "Managed")
        name = f"Memcpy {direction} ({ends[0]} -> {ends[1]}) {cause}"
        stream = {"HtoD": 101, "DtoH": 102}[direction]
        self._device("gpu_memcpy", name, us, stream, self._next(), {"bytes": size})

    def memset(self, size: int, us: float, *, stream: int = 7) -> None:
        """Add a ``cudaMemsetAsync``."""
        args = {"bytes": size, "memory bandwidth (GB/s)": size / us / 1e3}
        self._work("gpu_memset", "Memset (Device)", us, stream, "cudaMemsetAsync", args, 0.0)

    def collective(
        self,
        kind: str,
        size: int,
        us: float,
        *,
        group_size: int = 8,
        dtype: str = "Float",
        stream: int = 20,
        group: str = "0",
        arguments: bool = True,
        wait: bool = False,
        ranks: Sequence[int] = (),
        ends: tuple[int, int] | None = None,
    ) -> None:
        """Add an NCCL collective (``allreduce``, ``_allgather_base``, ``all_to_all``, …) of
        ``size`` bytes that starts when the compute stream has reached this point. ``wait``: the
        compute stream waits for its end. ``ranks``: ranks of the group, by default the first
        ``group_size``. ``ends``: source and target rank (``send``, ``recv``)."""
        width = {"Float": 4, "BFloat16": 2, "Half": 2}.get(dtype, 4)
        args = {
            "Collective name": kind,
            "In msg nelems": size // width,
            "Out msg nelems": size // width,
            "Group size": group_size,
            "dtype": dtype,
            "Process Group Name": group,
            "Process Group Ranks": list(ranks) or list(range(group_size)),
        }
        if ends is not None:
            args |= {"Src Rank": ends[0], "Dst Rank": ends[1]}
        kernel = {
            "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)",
            "_allgather_base": "ncclDevKernel_AllGather_RING_LL(...)",
            "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)",
            "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        }.get(kind, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
        display_names = {"allreduce": "all_reduce", "_reduce_scatter_base": "_reduce_scatter_base"}
        with self.range(f"nccl:{display_names.get(kind, kind)}"):
            self.launch(
                kernel,
                us,
                stream=stream,
                blocks=8,
                threads=512,
                occupancy=0,
                comm=args if arguments else None,
                call="cudaLaunchKernelExC",
                after=self._free.get(7, 0.0),
            )
        if wait:
            self.wait_stream(7, stream)

    def host_collective(
        self, kind: str, size: int, us: float, *, dtype: str = "float", wait: bool = False
    ) -> None:
        """Add a gloo collective (``allreduce``, ``barrier``, ``allgather``, …) of ``size`` bytes on
        this rank that takes ``us`` in its own thread. ``wait``: the caller waits for its end."""
        shape = [size // {"unsigned char": 1, "long int": 8}.get(dtype, 4)]
        with self.op(f"c10d::{kind}{'' if kind == 'barrier' else '_'}"):
            pass
        end = max(self.now, self._free.get(GLOO, 0.0)) + us
        args: dict[str, Any] = {"External id": self._next()}
        if kind != "barrier":
            args |= {"Input Dims": [shape], "Input type": [dtype]}
        name = kind if kind == "barrier" else kind.replace("all", "all_")
        self._emit("user_annotation", f"gloo:{name}", end - us, us, MAIN, GLOO, args)
        self._free[GLOO] = end
        if wait:
            self.now = end

    def record(self, event: int, stream: int = 7) -> None:
        """Add a ``cudaEventRecord``."""
        self._recorded[event] = self._free.get(stream, 0.0)
        self.call("cudaEventRecord", 1.0)

    def wait_stream(self, stream: int, on: int) -> None:
        """Make ``stream`` wait for all current work on stream ``on`` (record + wait event)."""
        self.call("cudaEventRecord", 1.0)
        self.call("cudaStreamWaitEvent", 1.0)
        self._free[stream] = max(self._free.get(stream, 0.0), self._free.get(on, 0.0))

    def sync(self, name: str = "cudaDeviceSynchronize", *, stream: int | None = None) -> None:
        """Make the host wait for one stream, or for all if ``stream`` is None. Without a GPU, it
        does not wait."""
        if not self.head["deviceProperties"] and not self._free:
            return
        start = self.now
        stream_ends = (
            [self._free.get(stream, 0.0)] if stream is not None else [*self._free.values(), 0.0]
        )
        self.now = max(self.now + 1.0, *stream_ends)
        correlation = {"correlation": self._next()}
        self._emit("cuda_runtime", name, start, self.now - start, MAIN, self.tid, correlation)
        if self.cuda_sync_rows:
            kind = "Context Sync" if stream is None else "Stream Sync"
            waited_stream = -1 if stream is None else stream
            args = {"cuda_sync_kind": kind, "stream": waited_stream, **correlation, "device": 0}
            self._emit("cuda_sync", kind, start, self.now - start, 0, stream or -1, args)

    def item(self, op: str = "aten::item") -> None:
        """Read a value of a device tensor: ``aten::item`` with its copy and sync."""
        with self.op(op), self.op("aten::_local_scalar_dense"):
            self.copy("DtoH", 4, 1.5, pinned=False, op=None)

    def memory(
        self, size: int, allocated: int, reserved: int, *, device: int = 0, address: int = 4096
    ) -> None:
        """Add an allocator event (``profile_memory=True``)."""
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": MAIN,
                "tid": self.tid,
                "ts": round(self.now, 3),
                "args": {
                    "Total Reserved": reserved,
                    "Total Allocated": allocated,
                    "Bytes": size,
                    "Addr": address,
                    "Device Id": device,
                    "Device Type": 1,
                },
            }
        )

    def record_of_run(self, **rank: Any) -> RecordBuilder:
        """Return the builder of the recorder's files for the run around the window, the same one on
        every call. ``rank``: fields of ``run_directory.RankInfo`` for the first call."""
        from advisor.core.run_directory import RankInfo
        from advisor.testing.record import RecordBuilder

        if self._record is None:
            self._record = RecordBuilder(RankInfo(**rank))
        return self._record

    def memory_snapshot(self, allocator: FakeAllocator) -> None:
        """Add the allocator's current snapshot."""
        self._snapshot = allocator.pickled()

    def kernel_profile(
        self,
        name: str,
        *,
        grid: tuple[int, int, int] | None,
        block: tuple[int, int, int] | None,
        metrics: dict[str, float],
    ) -> None:
        """Add hardware counters of a kernel, as from Nsight Compute."""
        from advisor.core.kernel_profile import KernelProfile, Metric

        values = {key: Metric(float(value)) for key, value in metrics.items()}
        duration = metrics.get("gpu__time_duration.sum")
        self._profiles.append(KernelProfile(name, grid, block, duration, values))

    def compiled_kernel(self, name: str, **figures: Any) -> None:
        """Add a kernel in Triton's cache for an A100. ``figures``: fields of CompiledKernel."""
        from advisor.core.kernel_profile import CompiledKernel

        defaults = {
            "target": "sm_80",
            "threads": 128,
            "num_warps": 4,
            "num_stages": (3,),
            "shared": 0,
        }
        defaults |= {"registers": 255, "local": 0, "spilled": 0, "place": ("kernels.py", 10)}
        self._compiled.append(CompiledKernel(name, **{**defaults, **figures}))

    def compile_log(
        self,
        *,
        breaks: Mapping[tuple[str, int, str], list[str]] | None = None,
        **causes: Mapping[tuple[str, int, str], float],
    ) -> None:
        """Add torch.compile's logs: graph breaks by (file, line, reason), with the functions that
        follow. ``causes``: the other lists of ``CompileLog``, with their times, ns."""
        from advisor.core.auxiliary_inputs import CompileCause, CompileLog, GraphBreak

        others = {
            name: [
                CompileCause(function="f", file=file, line=line, reason=reason, count=1, ns=ns)
                for (file, line, reason), ns in causes.get(name, {}).items()
            ]
            for name in ("recompilations", "not_compiled", "without_cuda_graphs")
        }
        self.logs["compilation"] = CompileLog(
            logs=1,
            compilations=1 + sum(map(len, others.values())),
            ns=1e9,
            inductor_ns=None,
            breaks=[
                GraphBreak(
                    file=file, line=line, function="f", reason=reason, explanation="", hint="",
                    eager=False, count=1, frames=frames,
                )
                for (file, line, reason), frames in (breaks or {}).items()
            ],
            recompilations=others["recompilations"],
            not_compiled=others["not_compiled"],
            without_cuda_graphs=others["without_cuda_graphs"],
        )  # fmt: skip

    # -- result -----------------------------------------------------------------------------

    def json(self) -> bytes:
        """Return the trace as the content of a Kineto file."""
        return msgspec.json.encode({**self.head, "traceEvents": self.events})

    def write(self, path: Path) -> Path:
        """Write the trace to a file, and return its path."""
        path.write_bytes(self.json())
        return path

    def trace(self) -> Trace:
        """Return the trace, read by the real reader, or a blank one if there are only records."""
        from advisor.core.trace import blank_trace
        from advisor.read.registry import read_bytes

        auxiliary = self._record, self._snapshot, self.logs or None
        if not self.events and any(each is not None for each in auxiliary):
            trace = blank_trace("<TraceBuilder>")
        else:
            trace = read_bytes(self.json(), "<TraceBuilder>")
        profiles = None
        if self._profiles or self._compiled:
            from advisor.core.kernel_profile import KernelProfiles

            tool = "Nsight Compute" if self._profiles else "Triton"
            profiles = KernelProfiles(
                "<TraceBuilder>", tool, tuple(self._profiles), compiled=tuple(self._compiled)
            )
        meta = replace(trace.meta, example=True, kernel_profiles=profiles)
        return replace(trace, meta=replace(meta, **self.logs))

    def analysis(self) -> Analysis:
        """Return the trace and the record as an analysis."""
        from advisor.measure import Analysis

        record = None if self._record is None else self._record.build()
        snapshot = None
        if self._snapshot is not None:
            from advisor.read.formats.memory_snapshot.tables import read_snapshot

            snapshot = read_snapshot([self._snapshot], "<TraceBuilder>")
        return Analysis(self.trace(), None, record, snapshot)

    # -- internals --------------------------------------------------------------------------

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    def _emit(
        self, cat: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        event = {
            "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3),
            "dur": round(dur, 3), "args": args,
        }  # fmt: skip
        self.events.append(event)
        return event

    @contextmanager
    def _span(self, cat: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        event = self._emit(cat, name, self.now, 0.0, MAIN, self.tid, args)
        start = self.now
        yield
        event["dur"] = round(self.now - start, 3)

    def _work(
        self,
        cat: str,
        name: str,
        us: float,
        stream: int,
        call: str,
        args: dict[str, Any],
        after: float,
    ) -> int:
        correlation = self._next()
        correlation_args = {"correlation": correlation}
        is_driver = call.startswith("cu") and not call.startswith("cuda")
        call_category = "cuda_driver" if is_driver else "cuda_runtime"
        self._emit(call_category, call, self.now, self.launch_us, MAIN, self.tid, correlation_args)
        self.now += self.launch_us
        self._device(cat, name, us, stream, correlation, args, after)
        return correlation

    def _device(
        self,
        cat: str,
        name: str,
        us: float,
        stream: int,
        correlation: int,
        args: dict[str, Any],
        after: float = 0.0,
    ) -> None:
        start = max(self.now + self.latency_us, self._free.get(stream, 0.0), after)
        self._free[stream] = start + us
        placement = {"device": 0, "context": 1, "stream": stream, "correlation": correlation}
        self._emit(cat, name, start, us, 0, stream, {**placement, **args})

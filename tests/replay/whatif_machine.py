"""A small discrete-event machine: host threads, launch queues, streams, loader workers.

Written from the CUDA programming model and the way PyTorch drives it, and from nothing in
``advisor``: predicted gains are compared with it. A program is data (statements), so the
same program runs with and without a fix. All times are microseconds.

What it does: calls put work at the end of a stream's queue as they return and find only so many
places there; a stream runs its work in order; events are recorded and waited for by streams and
by the host; copies of one direction share an engine; copies of pageable memory hold the host;
autograd's thread works while the main thread waits; loader workers each prepare every n-th batch,
at most ``prefetch`` ahead each. What it does besides, because a real machine does and the replay
does not know of it: host times, kernels and latencies vary from step to step, and kernels that
run at the same time slow each other down.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec

_ids = [count(1)]


def _id() -> int:
    return next(_ids[0])


def renumber() -> None:
    """Number statements from 1 again, for the next program: they vary by their number."""
    _ids[0] = count(1)


# -- programs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """Host time that leaves nothing in the trace (give it a frame or an op to name it)."""

    us: float
    id: int = field(default_factory=_id)


@dataclass(frozen=True)
class Span:
    """A named host event around statements: ``op``, ``python`` or ``range``."""

    kind: str
    name: str
    body: tuple[Any, ...] = ()
    args: tuple[tuple[str, Any], ...] = ()
    """Further arguments that the profiler notes, such as shapes."""


@dataclass(frozen=True)
class Kernel:
    """A kernel launch."""

    name: str
    us: float
    stream: int = 7
    launch_us: float | None = None
    blocks: int = 1024
    """Blocks of 256 threads."""
    meets: bool = False
    """A collective: its ``us`` begin when it runs on all ranks (``whatif_cluster``)."""
    id: int = field(default_factory=_id)


@dataclass(frozen=True)
class Graph:
    """A ``cudaGraphLaunch``: kernels (name, us) one after the other on a stream."""

    kernels: tuple[tuple[str, float], ...]
    stream: int = 7
    launch_us: float = 12.0
    id: int = field(default_factory=_id)


@dataclass(frozen=True)
class Copy:
    """``cudaMemcpyAsync``: ``HtoD``, ``DtoH`` or ``DtoD``."""

    direction: str
    us: float
    size: int = 1 << 20
    stream: int = 7
    pinned: bool = True
    id: int = field(default_factory=_id)


@dataclass(frozen=True)
class Record:
    """``cudaEventRecord``."""

    event: str
    stream: int = 7


@dataclass(frozen=True)
class Wait:
    """``cudaStreamWaitEvent``: the stream waits for the event as last recorded (``lag`` 1: as
    recorded the time before that)."""

    event: str
    stream: int = 7
    lag: int = 0


@dataclass(frozen=True)
class Sync:
    """The host waits: for the ``device``, a ``stream``, or an ``event`` as recorded ``lag`` + 1
    times ago."""

    what: str
    stream: int = 7
    event: str = ""
    lag: int = 0


@dataclass(frozen=True)
class Backward:
    """Statements that autograd's thread runs while this thread waits."""

    body: tuple[Any, ...]


@dataclass(frozen=True)
class Next:
    """The next batch: made here, or taken from the loader's workers."""


@dataclass(frozen=True)
class Every:
    """Statements run only in every n-th step."""

    n: int
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """The statements of each step, and the loader that feeds it."""

    body: tuple[Any, ...]
    steps: int = 8
    warmup: int = 4
    """Steps before the recorded window: its first step is a step like the others."""
    batch_us: float = 0.0
    """Work to prepare a batch."""
    uneven: float = 0.0
    """Relative standard deviation of its time between batches."""
    workers: int = 0
    prefetch: int = 2
    background: tuple[Any, ...] = ()
    """Statements that another host thread repeats on its own."""


@dataclass(frozen=True)
class Settings:
    """The machine. The last block is what the replay does not model."""

    depth: int = 1024
    """Largest number of launches in a stream that have not started."""
    launch_us: float = 5.0
    latency_us: float = 2.5
    """Time from the return of a launch to the start on an idle stream."""
    gap_us: float = 1.2
    """Time between two pieces of work of a stream."""
    graph_gap_us: float = 0.6
    event_us: float = 1.5
    """Time from the recorded event to the start of work that waited for it."""
    release_us: float = 7.0
    """Time from the end of work to the return of the call that waited for it."""
    call_us: float = 2.0
    """Time of any other call."""
    wake_us: float = 25.0
    """Time from one host thread to another."""
    hand_us: float = 1500.0
    """Time to hand over a batch that is ready, for the worker and for the main thread: the constant
    that docs/whatif.md names."""
    lost_loading_share: float = 0.1
    """Share of a batch's work by which workers slow down the main thread, as docs/whatif.md
    says."""
    sync_rows: bool = False
    """Whether to write ``cuda_sync`` rows."""
    whole_us: bool = False
    """Whether to write whole microseconds, as profilers did before 2023."""
    seed: int = 0
    host_jitter: float = 0.03
    kernel_jitter: float = 0.03
    latency_jitter: float = 0.2
    contention: float = 0.02
    """Relative slowdown of a kernel for each other one that runs meanwhile."""


QUIET = {"host_jitter": 0.0, "kernel_jitter": 0.0, "latency_jitter": 0.0, "contention": 0.0}


# -- the engine ------------------------------------------------------------------------------


class Signal:
    """An event that happens once."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.callbacks: list[Callable[[], None]] = []


MAIN, AUTOGRAD, BACKGROUND = 1, 2, 3
"""Host threads."""
Steps = Generator[float | Signal, None, None]


@dataclass
class Work:
    """A piece of device work in a queue."""

    cat: str
    name: str
    remaining_us: float
    correlation: int
    args: dict[str, Any]
    engine: str
    visible: float = 0.0
    gap: float = 0.0
    start: float = 0.0
    takes_slot: bool = True
    meets: bool = False
    is_waiting: bool = False
    """Whether it waits for other ranks."""
    done: Signal = field(default_factory=Signal)


class Stream:
    """A queue of work, records and waits."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: deque[Work | Signal | tuple[str, Signal]] = deque()
        self.running: Work | None = None
        self.ready = 0.0
        self.pending = 0
        self.waiting_launches: deque[Signal] = deque()
        self.last: Signal | None = None


@lru_cache(1 << 15)  # the run with the fix asks for the same
def _normal_noise(z: int) -> float:
    """Noise around 0 of roughly normal distribution: splitmix64, the sum of four uniforms."""
    total = 0.0
    for _ in range(4):
        z = (z + 0x9E3779B97F4A7C15) & (2**64 - 1)
        x = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        total += (x ^ (x >> 31)) / 2**64 - 0.5
    return total


class Machine:
    """Runs a program; ``events`` is its trace, ``complete`` when each recorded step was done."""

    def __init__(self, program: Program, settings: Settings) -> None:
        self.program, self.settings = program, settings
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._streams: dict[int, Stream] = {}
        self._running: dict[int, tuple[Work, Stream]] = {}
        self._version = 0
        self._updated_at = 0.0
        self._engines: dict[str, Work] = {}
        self._events: dict[str, list[tuple[Signal, int, int]]] = {}
        self._correlations = count(1)
        self._ids = count(1)
        self.events: list[dict[str, Any]] = []
        self.device: list[dict[str, Any]] = []
        self._seen: dict[tuple[int, int], int] = {}
        self.host_end: list[float] = []
        self._work_of_step: list[list[Signal]] = []
        self._step = 0
        self._is_over = False
        self._handlers: dict[type, Callable[[int, Any], Steps]] = {}
        self._start_workers()

    # time

    def run(self) -> Machine:
        """Run the machine to the end."""
        self.start_threads()
        while self._heap:
            self.process_next_event()
        return self.compute_completions()

    def start_threads(self) -> None:
        """Start the host's threads."""
        self._resume_thread(self._run_main())
        if self.program.background:
            self._resume_thread(self._run_background())

    @property
    def next(self) -> float | None:
        """Time of the next event."""
        return self._heap[0][0] if self._heap else None

    def process_next_event(self) -> None:
        """Advance to the next event."""
        self.now, _, act = heapq.heappop(self._heap)
        act()

    def compute_completions(self) -> Machine:
        """Compute when the steps were complete."""
        begin = self.program.warmup
        self.origin = self.host_end[begin - 1] if begin else 0.0
        self.complete = []
        done = 0.0
        for step, end in enumerate(self.host_end):
            ends = [s.at for s in self._work_of_step[step] if s.at is not None]
            done = max(done, end, *ends)
            if step >= begin - 1:
                self.complete.append(done)
        return self

    @property
    def period(self) -> float:
        """Time per step in the recorded window: between the completions of the step before it and
        of its last step."""
        return (self.complete[-1] - self.complete[0]) / (len(self.complete) - 1)

    def _schedule(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), act))

    def _trigger(self, signal: Signal) -> None:
        signal.at = self.now
        for act in signal.callbacks:
            self._schedule(self.now, act)
        signal.callbacks = []

    def _resume_thread(self, steps: Steps) -> None:
        def resume() -> None:
            for request in steps:
                if isinstance(request, Signal):
                    if request.at is None:
                        request.callbacks.append(resume)
                        return
                elif request > 0:
                    self._schedule(self.now + request, resume)
                    return

        self._schedule(self.now, resume)

    def _vary(self, value: float, share: float, key: int) -> float:
        """The same statement of the same step varies equally with and without a fix."""
        if not share:
            return value
        place = (key, self._step)
        turn = self._seen[place] = self._seen.get(place, 0) + 1
        z = key * 1_000_003 + self._step * 7919 + turn * 104_729 + self.settings.seed * 15_485_863
        return value * max(0.2, 1.0 + share * _normal_noise(z & (2**64 - 1)) * 1.73)

    # the device

    def stream(self, number: int) -> Stream:
        """Return a stream, made when first used."""
        return self._streams.setdefault(number, Stream(number))

    def _pump(self, s: Stream) -> None:
        while s.queue and s.running is None:
            head = s.queue[0]
            if isinstance(head, Signal):
                self._trigger(head)
            elif isinstance(head, tuple):
                signal = head[1]
                if signal.at is None:
                    signal.callbacks.append(lambda: self._pump(s))
                    return
                s.ready = max(s.ready, signal.at + self.settings.event_us)
            else:
                when = max(head.visible, s.ready + (head.gap if s.last is not None else 0.0))
                other = self._engines.get(head.engine) if head.engine else None
                if other is not None:
                    other.done.callbacks.append(lambda: self._pump(s))
                    return
                if when > self.now + 1e-9:
                    self._schedule(when, lambda: self._pump(s))
                    return
                s.queue.popleft()
                self._start(s, head)
                return
            s.queue.popleft()

    def _start(self, s: Stream, work: Work) -> None:
        work.start = self.now
        s.running, s.last = work, work.done
        if work.takes_slot:
            s.pending -= 1
            if s.waiting_launches:
                self._trigger(s.waiting_launches.popleft())
        if work.engine:
            self._engines[work.engine] = work
        work.is_waiting = work.meets and self.waits_for_ranks(work)
        self._update_progress()
        self._running[id(work)] = (work, s)
        self._schedule_next_end()

    def waits_for_ranks(self, work: Work) -> bool:
        """Return whether a collective has to wait for other ranks; alone: no."""
        return False

    def start_collective(self, work: Work, us: float, when: float) -> None:
        """All ranks are there now: the collective takes this long."""

        def start_transfer() -> None:
            self._update_progress()
            work.is_waiting, work.remaining_us = False, us
            self._schedule_next_end()

        self._schedule(when, start_transfer)

    def _update_progress(self) -> None:
        passed = (self.now - self._updated_at) * self._rate()
        for work, _ in self._running.values():
            if work.is_waiting:
                continue
            work.remaining_us -= passed if work.cat == "kernel" else self.now - self._updated_at
        self._updated_at = self.now

    def _rate(self) -> float:
        kernels = sum(w.cat == "kernel" for w, _ in self._running.values())
        return 1.0 / (1.0 + self.settings.contention * max(0, kernels - 1))

    def _schedule_next_end(self) -> None:
        """The next piece of work to end, at the present rate."""
        self._version += 1
        version, rate = self._version, self._rate()
        running = [w for w, _ in self._running.values() if not w.is_waiting]
        if not running:
            return
        rest = min(w.remaining_us / (rate if w.cat == "kernel" else 1.0) for w in running)

        def finish_ended() -> None:
            if version != self._version:
                return
            self._update_progress()
            ended = [
                (w, s)
                for w, s in self._running.values()
                if not w.is_waiting and w.remaining_us <= 1e-6
            ]
            for work, s in ended:
                self._finish_work(work, s)
            self._schedule_next_end()

        self._schedule(self.now + max(rest, 0.0), finish_ended)

    def _finish_work(self, work: Work, s: Stream) -> None:
        del self._running[id(work)]
        s.running, s.ready = None, self.now
        if work.engine:
            del self._engines[work.engine]
        self.device.append(
            {
                "ph": "X",
                "cat": work.cat,
                "name": work.name,
                "pid": 0,
                "tid": s.number,
                "ts": work.start,
                "dur": self.now - work.start,
                "args": {
                    "device": 0,
                    "context": 1,
                    "stream": s.number,
                    "correlation": work.correlation,
                    **work.args,
                },
            }
        )
        self._trigger(work.done)
        self._schedule(self.now, lambda: self._pump(s))

    # the host

    def _call(
        self, thread: int, name: str, start: float, correlation: int | None = None
    ) -> dict[str, Any]:
        number = next(self._correlations) if correlation is None else correlation
        return self._emit("cuda_runtime", name, thread, start, {"correlation": number})

    def _emit(
        self, cat: str, name: str, thread: int, start: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": thread,
            "ts": start,
            "dur": self.now - start,
            "args": args,
        }
        self.events.append(event)
        return event

    def _run_statements(self, thread: int, body: Sequence[Any]) -> Steps:
        for s in body:
            act = self._handlers.get(type(s))
            if act is None:
                act = self._handlers[type(s)] = getattr(self, f"_{type(s).__name__.lower()}")
            yield from act(thread, s)

    def _host(self, thread: int, s: Host) -> Steps:
        yield self._vary(s.us, self.settings.host_jitter, s.id)

    def _span(self, thread: int, s: Span) -> Steps:
        start = self.now
        yield from self._run_statements(thread, s.body)
        cat = {"op": "cpu_op", "python": "python_function", "range": "user_annotation"}[s.kind]
        name = "Python id" if s.kind == "python" else "External id"
        self._emit(cat, s.name, thread, start, {name: next(self._ids), **dict(s.args)})

    def _every(self, thread: int, s: Every) -> Steps:
        if self._step % s.n == 0:
            yield from self._run_statements(thread, s.body)

    def _launch(
        self, thread: int, call: str, us: float, works: list[Work], key: int, stream: int
    ) -> Steps:
        start, s = self.now, self.stream(stream)
        yield self._vary(us, self.settings.host_jitter, key + 1)
        # the place is taken in the order in which threads ask
        if s.pending >= self.settings.depth or s.waiting_launches:
            room = Signal()
            s.waiting_launches.append(room)
            yield room
        self._call(thread, call, start, works[0].correlation)
        latency = self._vary(self.settings.latency_us, self.settings.latency_jitter, key + 2)
        s.pending += 1
        for i, work in enumerate(works):
            work.takes_slot = i == 0
            work.visible = self.now + latency
            gap = self.settings.gap_us if i == 0 else self.settings.graph_gap_us
            work.gap = self._vary(gap, self.settings.latency_jitter, key + 3 + i)
            s.queue.append(work)
            if thread != BACKGROUND:
                self._work_of_step[self._step].append(work.done)
        self._pump(s)

    def _kernel_work(
        self, name: str, us: float, key: int, correlation: int, blocks: int = 1024
    ) -> Work:
        args = {
            "grid": [blocks, 1, 1],
            "block": [256, 1, 1],
            "registers per thread": 32,
            "shared memory": 0,
        }
        us = self._vary(us, self.settings.kernel_jitter, key)
        return Work("kernel", name, us, correlation, args, "")

    def _kernel(self, thread: int, s: Kernel) -> Steps:
        work = self._kernel_work(s.name, s.us, s.id, next(self._correlations), s.blocks)
        work.meets = s.meets
        us = self.settings.launch_us if s.launch_us is None else s.launch_us
        yield from self._launch(thread, "cudaLaunchKernel", us, [work], s.id, s.stream)

    def _graph(self, thread: int, s: Graph) -> Steps:
        correlation = next(self._correlations)
        works = [
            self._kernel_work(name, us, s.id * 1000 + i, correlation)
            for i, (name, us) in enumerate(s.kernels)
        ]
        yield from self._launch(thread, "cudaGraphLaunch", s.launch_us, works, s.id, s.stream)

    def _copy(self, thread: int, s: Copy) -> Steps:
        start, stream = self.now, self.stream(s.stream)
        memory = "Pinned" if s.pinned else "Pageable"
        ends = {"HtoD": (memory, "Device"), "DtoH": ("Device", memory)}.get(
            s.direction, ("Device", "Device")
        )
        work = Work(
            "gpu_memcpy",
            f"Memcpy {s.direction} ({ends[0]} -> {ends[1]})",
            self._vary(s.us, self.settings.kernel_jitter, s.id),
            next(self._correlations),
            {"bytes": s.size, "memory bandwidth (GB/s)": s.size / s.us / 1e3},
            "" if s.direction == "DtoD" else s.direction,
        )
        holds = not s.pinned and s.direction != "DtoD"
        small = s.direction == "HtoD" and s.size <= 1 << 16
        if not holds or small:
            us = self.settings.launch_us + (s.size / 20e3 if holds else 0.0)
            yield from self._launch(thread, "cudaMemcpyAsync", us, [work], s.id, s.stream)
            return
        if s.direction == "HtoD":  # staging begins when the stream has got here
            yield self.settings.call_us
            yield from self._wait_until_drained(stream)
        yield self.settings.launch_us
        work.visible = self.now + self._vary(
            self.settings.latency_us, self.settings.latency_jitter, s.id + 2
        )
        work.gap, work.takes_slot = self.settings.gap_us, False
        stream.queue.append(work)
        self._work_of_step[self._step].append(work.done)
        self._pump(stream)
        yield work.done
        yield 1.0 if s.direction == "HtoD" else self.settings.release_us
        self._call(thread, "cudaMemcpyAsync", start, work.correlation)

    def _wait_until_drained(self, s: Stream) -> Steps:
        """Until all that is in the stream now is done."""
        mark = Signal()
        s.queue.append(mark)
        self._pump(s)
        yield mark

    def _record(self, thread: int, s: Record) -> Steps:
        start, stream = self.now, self.stream(s.stream)
        yield self.settings.call_us
        signal, number = Signal(), next(self._correlations)
        stream.queue.append(signal)
        self._events.setdefault(s.event, []).append((signal, s.stream, number))
        self._call(thread, "cudaEventRecord", start, number)
        self._pump(stream)

    def _find_record(self, event: str, lag: int) -> tuple[Signal, int, int] | None:
        known = self._events.get(event, [])
        return known[-1 - lag] if len(known) > lag else None

    def _wait(self, thread: int, s: Wait) -> Steps:
        start, stream = self.now, self.stream(s.stream)
        yield self.settings.call_us
        result = self._find_record(s.event, s.lag)
        call = self._call(thread, "cudaStreamWaitEvent", start)
        if result is None:
            return
        stream.queue.append(("wait", result[0]))
        self._pump(stream)
        self._sync_row("Stream Wait Event", call, s.stream, result)

    def _sync(self, thread: int, s: Sync) -> Steps:
        start = self.now
        yield self.settings.call_us
        if s.what == "event":
            recorded = self._find_record(s.event, s.lag)
            waited = recorded is not None and recorded[0].at is None
            if recorded is not None:
                yield recorded[0]
            name, kind, stream = "cudaEventSynchronize", "Event Sync", -1
        else:
            streams = [*self._streams.values()] if s.what == "device" else [self.stream(s.stream)]
            waited = any(x.queue or x.running for x in streams)
            for each in streams:
                yield from self._wait_until_drained(each)
            recorded, stream = None, -1 if s.what == "device" else s.stream
            name = "cudaDeviceSynchronize" if s.what == "device" else "cudaStreamSynchronize"
            kind = "Context Sync" if s.what == "device" else "Stream Sync"
        if waited:
            yield self._vary(self.settings.release_us, self.settings.latency_jitter, 5)
        self._sync_row(kind, self._call(thread, name, start), stream, recorded)

    def _sync_row(
        self, kind: str, call: dict[str, Any], stream: int, recorded: tuple[Signal, int, int] | None
    ) -> None:
        if not self.settings.sync_rows:
            return
        on, record = (-1, -1) if recorded is None else (recorded[1], recorded[2])
        row = self._emit(
            "cuda_sync",
            kind,
            -1,
            call["ts"],
            {
                "cuda_sync_kind": kind,
                "stream": stream,
                "device": 0,
                "context": 1,
                "correlation": call["args"]["correlation"],
                "wait_on_stream": on,
                "wait_on_cuda_event_record_corr_id": record,
                "wait_on_cuda_event_id": 1,
            },
        )
        row["dur"] = call["dur"]

    def _backward(self, thread: int, s: Backward) -> Steps:
        done = Signal()

        def autograd() -> Steps:
            yield self._vary(self.settings.wake_us, self.settings.latency_jitter, 11)
            yield from self._run_statements(AUTOGRAD, s.body)
            self._trigger(done)

        self._resume_thread(autograd())
        yield done
        yield self._vary(self.settings.wake_us, self.settings.latency_jitter, 12)

    # the loader

    def _start_workers(self) -> None:
        """Each worker takes its orders one after the other; ``prefetch`` each from the start."""
        p = self.program
        self._ready: dict[int, Signal] = {}
        self._orders: list[deque[int]] = [deque() for _ in range(p.workers)]
        self._requested: list[Signal] = [Signal() for _ in range(p.workers)]
        self._batches_ordered = self._batches_taken = 0
        for _ in range(p.workers * p.prefetch):
            self._order_batch()
        for worker in range(p.workers):
            self._resume_thread(self._run_worker(worker))

    def _order_batch(self) -> None:
        worker = self._batches_ordered % self.program.workers
        self._ready[self._batches_ordered] = Signal()
        self._orders[worker].append(self._batches_ordered)
        self._batches_ordered += 1
        if self._requested[worker].at is None:
            self._trigger(self._requested[worker])

    def _batch_us(self, batch: int) -> float:
        share = self.program.uneven or self.settings.host_jitter
        step, self._step = self._step, batch
        us = self._vary(self.program.batch_us, share, 13)
        self._step = step
        return us

    def _run_worker(self, worker: int) -> Steps:
        while not self._is_over:
            if not self._orders[worker]:
                self._requested[worker] = Signal()
                yield self._requested[worker]
                continue
            batch = self._orders[worker].popleft()
            yield self._batch_us(batch) + self.settings.hand_us
            self._trigger(self._ready[batch])

    def _next(self, thread: int, s: Next) -> Steps:
        start, batch = self.now, self._batches_taken
        self._batches_taken += 1
        if self.program.workers:
            yield self._ready[batch]
            yield self.settings.hand_us
            yield self.settings.lost_loading_share * self.program.batch_us
            self._order_batch()
            which = "_MultiProcessingDataLoaderIter"
        else:
            yield 20.0
            inner = self.now
            yield self._batch_us(batch)
            self._emit("cpu_op", "aten::stack", thread, inner, {"External id": next(self._ids)})
            yield 5.0
            which = "_SingleProcessDataLoaderIter"
        self._emit(
            "user_annotation",
            f"enumerate(DataLoader)#{which}.__next__",
            thread,
            start,
            {"External id": next(self._ids)},
        )

    # the program

    def _run_main(self) -> Steps:
        for step in range(self.program.warmup + self.program.steps):
            self._step = step
            self._work_of_step.append([])
            start = self.now
            yield from self._run_statements(MAIN, self.program.body)
            self._emit("user_annotation", f"ProfilerStep#{step}", MAIN, start, {"External id": 0})
            self.host_end.append(self.now)
        self._is_over = True
        yield 30.0
        yield from self._sync(MAIN, Sync("device"))

    def _run_background(self) -> Steps:
        while not self._is_over:
            yield from self._run_statements(BACKGROUND, self.program.background)

    # the trace

    def json(self) -> bytes:
        """The recorded window as a Kineto file: what began in it."""
        rows = [e for e in [*self.events, *self.device] if e["ts"] >= self.origin]
        exact = 0 if self.settings.whole_us else 3
        for row in rows:
            end = round(row["ts"] + row["dur"], exact)
            row["ts"] = round(row["ts"], exact)
            row["dur"] = round(end - row["ts"], exact)
        device = {
            "id": 0,
            "name": "NVIDIA A100-SXM4-80GB",
            "numSms": 108,
            "computeMajor": 8,
            "computeMinor": 0,
            "totalGlobalMem": 85_094_825_984,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerMultiprocessor": 2048,
            "regsPerBlock": 65536,
            "regsPerMultiprocessor": 65536,
            "warpSize": 32,
            "sharedMemPerBlock": 49152,
            "sharedMemPerMultiprocessor": 167936,
        }
        return msgspec.json.encode(
            {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": rows}
        )


def run(program: Program, **settings: Any) -> Machine:
    """Run a program on a machine with these settings."""
    return Machine(program, Settings(**settings)).run()

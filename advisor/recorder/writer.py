"""Writer's thread: creates the run directory and writes what the training thread passes on.

It reads the tape and encodes records five times a second, and appends complete lines once a second.
It does everything slow: git and versions for the manifest, the directory, completed CUDA events,
the detection of slowdowns and requests. The first disk error ends the recording with one warning.

A run may last for months. After every ``SINGLE`` lines of steps, a line covers twice as many steps
as before, with their sums. Steps that differ from their neighbours keep their own lines."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from operator import sub
from pathlib import Path
from typing import Any

import msgspec

from advisor.core import run_directory as rundir
from advisor.core.cgroup import resident_memory
from advisor.recorder.folder import rank_folder, write_once
from advisor.recorder.framework_logs import CompileRecord
from advisor.recorder.inference import InferenceStep
from advisor.recorder.loaders import Batch
from advisor.recorder.repeated_steps import RepeatedBlock
from advisor.recorder.slowdown import SlowdownWatch
from advisor.recorder.steps import RecordedStep

READ_SECONDS = 0.2
"""Interval at which the tape is read, s, so that unread entries fit the caches. With reads once a
second, the training thread waited 3 to 4 µs per step for the interpreter; now it does not wait."""
EVERY_SECONDS = 1.0
"""Interval at which records are written to disk, s."""
MAX_QUEUE = 200_000
"""Maximum number of records that wait for a slow disk. Older ones are dropped."""
YIELD_SECONDS = 1e-4
"""Sleep between pieces of work, s, so that the training thread does not wait."""
MAX_WAITING = 4096
"""Maximum number of steps that wait for their CUDA events. Beyond it, the oldest one does not."""
STOP_SECONDS = 10.0
SINGLE = 10_000
"""Number of step lines after which each line covers twice as many steps."""
OUTLIER, MAX_OUTLIERS = 1.5, SINGLE // 4
"""Ratio to the last line's mean step for a step to get its own line, and maximum of such lines."""
END_BYTES = 4096
"""Size of the last steps to drop on a full disk, bytes, for the line that explains the end."""
NO_INFERENCE = threading.Event()
"""Record to ``put`` when training begins: drops the inference steps recorded before it."""
NO_STEPS = threading.Event()
"""Record to ``put`` when training steps turn out wrong: drops the ones recorded so far."""
REQUEST = "window.request"
"""File in the run directory that ``advisor window RUN`` touches to request a window."""


class Writer:
    """Writer of one rank's files. Any thread may call ``put``; the rest is for its own thread."""

    def __init__(
        self,
        *,
        out: str,
        rank: Callable[[], tuple[int, int]],
        names: list[str],
        describe: Callable[[str], tuple[rundir.Manifest, rundir.RankInfo]],
        failed: Callable[[str], None],
    ) -> None:
        self._out = out
        self._rank = rank
        self._names = names
        self._describe = describe
        self._failed = failed
        self._queue: deque[Any] = deque(maxlen=MAX_QUEUE)
        self._waiting: deque[RecordedStep | RepeatedBlock] = deque()
        self._open_wanted = threading.Event()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._files: dict[type, Lines] = {}
        self._requested_at = 0.0
        self._written_at = 0.0
        self.folder: Path | None = None
        """Folder of this rank, or ``None`` until it exists."""
        self.read: Callable[[], None] | None = None
        """Function that reads the tape and calls ``put`` with the steps."""
        self.resolve: Callable[[Any], Batch] | None = None
        """Function that describes a batch from the training thread's note."""
        self.on_open: Callable[[Path], None] | None = None
        """Function called in the writer's thread once the folder exists."""
        self.slowdown: SlowdownWatch | None = None
        self.on_window_request: Callable[[str, bool], None] | None = None
        """Function that requests a window, with the reason and whether the user asked for it."""
        self.host_is_ahead: Callable[[], bool] = lambda: False
        """Function that returns whether only device times show the duration of a step."""
        self._by_device = False

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if no thread can be started."""
        self._thread = threading.Thread(target=self._run, name="advisor writer", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Allow the creation of the run directory, because there is something to write."""
        if not self._open_wanted.is_set():
            self._open_wanted.set()
            self._wake.set()

    def put(
        self,
        record: RecordedStep
        | RepeatedBlock
        | rundir.Sample
        | rundir.Event
        | CompileRecord
        | threading.Event,
    ) -> None:
        self._queue.append(record)

    def flush(self, seconds: float = STOP_SECONDS) -> None:
        """Wait until all records put so far are on disk, for at most ``seconds``."""
        done = threading.Event()
        self._queue.append(done)
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            done.wait(seconds)

    def stop(self) -> None:
        """Write what remains and end the thread."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(READ_SECONDS)
                self._wake.clear()
                self._work()
            self._work(last=True)
        except OSError as error:
            self._failed(f"{self.folder or self._out or 'runs'}: {error.strerror or error}")
            self._write_end_reason(error)
        except Exception as error:
            # this thread runs in the user's training process, so no error may leave it
            self._failed(f"{type(error).__name__}: {error}")
        finally:
            for lines in self._files.values():
                with suppress(OSError):
                    lines.close()
            self._release_waiters()

    def _write_end_reason(self, error: OSError) -> None:
        """Write the last event on a disk that may be full, in place of some of the last steps."""
        steps, events = self._files.get(RecordedStep), self._files.get(rundir.Event)
        if events is None or not isinstance(steps, StepLines):
            return
        end = {"steps": steps.written, "reason": "disk", "message": error.strerror or str(error)}
        events.forget()
        for drop_steps in (False, True):
            with suppress(OSError):
                if drop_steps:
                    steps.shorten(END_BYTES)
                events.add(rundir.Event(t=time.perf_counter_ns(), kind="end", data=end))
                events.flush()
                return

    def _work(self, *, last: bool = False) -> None:
        if self.read is not None:
            self.read()
        if self.folder is None:
            if not self._open_wanted.is_set():
                if last:
                    self._release_waiters()
                return
            self._create_folder()
        waiters: list[threading.Event] = []
        for _ in range(len(self._queue)):
            record = self._queue.popleft()
            if isinstance(record, RecordedStep | RepeatedBlock):
                self._waiting.append(record)
            elif record is NO_INFERENCE or record is NO_STEPS:
                trains = record is NO_INFERENCE
                self._waiting = deque(
                    f for f in self._waiting if getattr(f, "trains", True) is trains
                )
                self._files[InferenceStep if trains else RecordedStep].remove()
                self.slowdown = None if self.slowdown is None else SlowdownWatch()
            elif isinstance(record, threading.Event):
                waiters.append(record)
            else:
                self._files[type(record)].add(record)
        self._write_steps(last or bool(waiters))
        now = time.monotonic()
        if last or waiters or now - self._written_at >= EVERY_SECONDS:
            self._written_at = now
            for lines in self._files.values():
                if isinstance(lines, StepLines) and (last or waiters):
                    lines.join()
                lines.flush()
            self._check_requests()
        for waiter in waiters:
            waiter.set()

    def _release_waiters(self) -> None:
        """Release all threads that wait in ``flush``, because this thread has ended."""
        for record in list(self._queue):
            if isinstance(record, threading.Event):
                record.set()

    def _create_folder(self) -> None:
        number, world = self._rank()
        folder = rank_folder(self._out, number, world)
        # the minimum first, so that a process killed now leaves a readable directory
        manifest, rank = self._describe(folder.parent.name)
        write_once(folder.parent / rundir.MANIFEST, manifest)
        write_once(folder / rundir.RANK, rank)
        self._files = {
            RecordedStep: StepLines(folder / rundir.STEPS),
            InferenceStep: StepLines(folder / rundir.INFERENCE),
            rundir.Sample: Lines(folder / rundir.TELEMETRY),
            rundir.Event: Lines(folder / rundir.EVENTS),
            CompileRecord: Lines(folder / rundir.COMPILE_LOG),
        }
        self.folder = folder
        self._requested_at = time.time()
        if self.on_open is not None:
            self.on_open(folder)

    def _write_steps(self, all_of_them: bool) -> None:
        """Write steps in order, as soon as their CUDA events have completed."""
        if not self._waiting:
            return
        resident = resident_memory()
        while self._waiting:
            result = self._waiting[0]
            if isinstance(result, RepeatedBlock):
                self._waiting.popleft()
                self._block(result, None if self._waiting else resident)
                time.sleep(YIELD_SECONDS)
                continue
            ready = result.marks is None or result.marks.done
            if not ready and not all_of_them and len(self._waiting) < MAX_WAITING:
                break
            self._waiting.popleft()
            step = self._make_row(result)
            if not self._waiting:
                step.rss = resident
            self._files[RecordedStep if result.trains else InferenceStep].add(step)
            if result.window is None and not result.exporting:
                self._check_slowdown([step.dur], sum(step.gpu.values()) if step.gpu else None)

    def _check_slowdown(self, lengths: list[int], device: int | None = None) -> None:
        """Check steps outside windows for a slowdown. ``device``: the step's device time, ns."""
        if self.slowdown is not None and self.on_window_request is not None:
            if self.host_is_ahead():
                if not self._by_device:
                    self._by_device, self.slowdown = True, SlowdownWatch()
                if device is None:
                    return
                lengths = [device]
            reason = self.slowdown.add_steps(lengths)
            if reason:
                self.on_window_request(reason, False)

    def _block(self, block: RepeatedBlock, resident: int | None) -> None:
        """Write steps that were read together, in the format of single step lines."""
        steps = self._files[RecordedStep]
        assert isinstance(steps, StepLines)
        uniform = (
            block.batches.count(block.batches[0]) == len(block.ends) if block.batches else True
        )
        if steps.every > 1 and uniform:
            self._join_block(block, steps)
            return
        if steps.every > 1 or any(0 in column for _, column in block.phases if any(column)):
            for step in block.steps():
                self._files[RecordedStep].add(self._make_row(step))
            self._check_slowdown(
                [end - start for start, end in zip(block.starts, block.ends, strict=True)]
            )
            return
        phases = [(phase, column) for phase, column in block.phases if column[0]]
        names = (json.dumps(self._names[phase]).replace("%", "%%") for phase, _ in phases)
        fields = ",".join(f"{name}:%d" for name in names)
        line = f'{{"n":%d,"t":%d,"dur":%d,"phases":{{{fields}}}%s}}\n'
        count = len(block.ends)
        lengths = list(map(sub, block.ends, block.starts))
        first = f',"micro":{block.micro}' if block.micro != 1 else ""
        ends = [first] * count
        if block.batches and uniform:
            ends = [first + self._encode_batches(block.batches[0])] * count
        elif block.batches:
            ends = [first + self._encode_batches(batches) for batches in block.batches]
        if resident is not None:
            ends[-1] += f',"rss":{resident}'
        numbers = range(block.n, block.n + count)
        columns = (numbers, block.starts, lengths, *(column for _, column in phases), ends)
        text = line * count % tuple(chain.from_iterable(zip(*columns, strict=True)))
        steps.add_lines(text.encode(), count)
        self._check_slowdown(lengths)

    def _join_block(self, block: RepeatedBlock, steps: StepLines) -> None:
        """Write steps that were read together, several per line."""
        template = rundir.StepRow(n=0, t=0, dur=0, micro=block.micro)
        self._describe_batches(template, block.batches[0] if block.batches else [])
        lengths = list(map(sub, block.ends, block.starts))
        phases = [(self._names[phase], column) for phase, column in block.phases if any(column)]
        size = 1 if steps.has_outlier(lengths) else steps.every
        for i in range(0, len(lengths), size):
            part = slice(i, i + size)
            count = len(lengths[part])
            step = msgspec.structs.replace(
                template, n=block.n + i, t=block.starts[i], dur=sum(lengths[part]), of=count,
                phases={name: ns for name, column in phases if (ns := sum(column[part]))},
                samples=None if template.samples is None else template.samples * count,
                bytes=None if template.bytes is None else template.bytes * count,
            )  # fmt: skip
            steps.add(step)
        self._check_slowdown(lengths)

    def _encode_batches(self, notes: list[Any]) -> str:
        """Return the batches' fields as JSON text that starts with a comma."""
        step = rundir.StepRow(n=0, t=0, dur=0)
        self._describe_batches(step, notes)
        values = [(name, getattr(step, name)) for name in ("samples", "bytes", "shapes", "padding")]
        return "".join(f',"{name}":{value}' for name, value in values if value is not None)

    def _make_row(self, result: RecordedStep) -> rundir.StepRow:
        names = self._names
        phases = {names[i]: ns for i, ns in enumerate(result.phases) if ns}
        step = rundir.StepRow(
            n=result.n,
            t=result.t,
            dur=sum(result.phases),
            phases=phases,
            micro=result.micro,
            window=result.window,
            gc=result.gc,
            evaluation=result.gap,
            unused_graphs=result.unused_graphs,
            exporting=result.exporting,
        )
        if result.marks is not None and result.marks.times is not None:
            step.gpu = {names[i]: ns for i, ns in enumerate(result.marks.times) if ns}
        self._describe_batches(step, result.batch)
        if result.memory is not None:
            step.allocated, step.reserved, step.peak, step.retries = result.memory
        return step

    def _describe_batches(self, step: rundir.StepRow, notes: list[Any]) -> None:
        batches = [note for note in notes if note is not None]
        if batches and self.resolve is not None:
            # batches that were not seen (from a loader without our hooks) are not counted
            for batch in map(self.resolve, batches):
                if batch.samples is not None:
                    step.samples = (step.samples or 0) + batch.samples
                step.bytes = (step.bytes or 0) + batch.bytes
                step.shapes = batch.kind
                if batch.padding is not None:
                    step.padding = batch.padding

    def _check_requests(self) -> None:
        """Request a window if the user asked for one since the last check."""
        if self.folder is None or self.on_window_request is None:
            return
        try:
            requested_at = (self.folder.parent / REQUEST).stat().st_mtime
        except OSError:
            return
        if requested_at > self._requested_at:
            self._requested_at = requested_at
            self.on_window_request("asked for", True)


class Lines:
    """Append-only file of JSON lines. ``add`` keeps records, and ``flush`` writes them in one call.
    A killed process leaves complete lines; only a full disk can cut the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._encoder = msgspec.json.Encoder()
        self._kept = bytearray()

    def add(self, record: msgspec.Struct) -> None:
        """Keep a record for the next ``flush``."""
        self._kept += (
            record.text if isinstance(record, CompileRecord) else self._encoder.encode(record)
        )
        self._kept += b"\n"

    def flush(self) -> None:
        """Write the kept records. On an OSError, they are dropped, and the file keeps no partial
        line."""
        if not self._kept:
            return
        data, self._kept = self._kept, bytearray()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self._path, flags, 0o644)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except OSError:
            complete = data.rfind(b"\n", 0, written) + 1
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written + complete)
            raise

    def forget(self) -> None:
        """Drop the kept records without writing them."""
        self._kept = bytearray()

    def remove(self) -> None:
        """Delete the file and the kept records."""
        self.close()
        self.forget()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file without writing the kept records."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class StepLines(Lines):
    """File of step lines. In a long run, one line covers several consecutive steps."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.every = 1
        """Number of steps per line, except for steps that differ from their neighbours."""
        self.written = 0
        """Number of steps so far."""
        self._lines = self._outliers = 0
        self._pending: list[rundir.StepRow] = []
        self._mean_ns = 0
        """Mean duration of a step in the last joined line, ns."""

    def add(self, record: msgspec.Struct) -> None:
        """Keep a step for the next ``flush``, alone or joined with its neighbours."""
        assert isinstance(record, rundir.StepRow)
        self.written += record.of
        if self.every == 1 or self._needs_own_line(record):
            self.join()
            self._add_line(record)
            return
        pending = self._pending
        if pending and (record.micro, record.shapes) != (pending[0].micro, pending[0].shapes):
            self.join()
        self._pending.append(record)
        if sum(step.of for step in self._pending) >= self.every:
            self.join()

    def add_lines(self, lines: bytes, count: int) -> None:
        """Keep ``count`` encoded steps for the next ``flush``, each with its line end."""
        self.written += count
        self._kept += lines
        self._count(count)

    def remove(self) -> None:
        super().remove()
        self._pending.clear()
        self.every, self.written, self._lines = 1, 0, 0

    def shorten(self, size: int) -> None:
        """Cut complete lines, at least ``size`` bytes, off the end of the file. Raises OSError."""
        lines = self._path.read_bytes()
        os.truncate(self._path, lines.rfind(b"\n", 0, max(0, len(lines) - size)) + 1)

    def _needs_own_line(self, step: rundir.StepRow) -> bool:
        """Return whether a step needs its own line: in a window, after a pause, or long."""
        if step.window is not None or step.exporting:
            return True
        is_ordinary = not (step.evaluation or step.unused_graphs)
        if is_ordinary and not self.has_outlier([step.dur // step.of]):
            return False
        self._outliers += 1
        return self._outliers <= MAX_OUTLIERS

    def has_outlier(self, lengths: list[int]) -> bool:
        """Return whether one of these durations, ns, is long compared with the last line."""
        return bool(self._mean_ns) and max(lengths) > OUTLIER * self._mean_ns

    def join(self) -> None:
        """Write the joined line, even if it is not full."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        joined = pending[-1]
        joined.n, joined.t = pending[0].n, pending[0].t
        for step in pending[:-1]:
            joined.of += step.of
            joined.dur += step.dur
            joined.gc += step.gc
            joined.evaluation += step.evaluation
            joined.unused_graphs += step.unused_graphs
            for name, ns in step.phases.items():
                joined.phases[name] = joined.phases.get(name, 0) + ns
            joined.samples = _add_known(joined.samples, step.samples)
            joined.bytes = _add_known(joined.bytes, step.bytes)
            joined.gpu = joined.gpu or step.gpu
            joined.rss = joined.rss or step.rss
        self._mean_ns = joined.dur // joined.of
        self._add_line(joined)

    def _add_line(self, step: rundir.StepRow) -> None:
        super().add(step)
        self._count(1)

    def _count(self, lines: int) -> None:
        self._lines += lines
        if self._lines >= SINGLE:
            self._lines = self._outliers = 0
            self.every *= 2


def _add_known(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b

"""Format of a recorded run on disk: the records, their files, and a reader that skips damage.

The recorder writes it, and ``read`` reads it. This module imports neither torch nor polars.

::

    runs/2026-11-21_143000_ab12/
      manifest.json             once, by the first process
      rank0/
        rank.json               once: process, device, flags
        steps.jsonl             one line per step
        inference.jsonl         the same for runs without training; removed once one trains
        telemetry.jsonl         one line per sample of GPU and host
        events.jsonl            single events: loaders, windows, warnings, out of memory, end
        trace_w0.json.gz        one per profiled window
        memory_snapshot.pickle  allocator state when memory ran out
        scalene.json            hot Python lines, from a separate pass
      rank1/ …

Files are append-only, or written under a hidden name and renamed. So a run that was killed at any
time can be read: only a torn last line is dropped and counted. Times are ns of
``time.perf_counter_ns`` in the rank's process. ``RankInfo.anchor_unix_ns`` and
``RankInfo.anchor_perf_ns`` are the same instant on both clocks."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from advisor.core.errors import AdvisorError
from advisor.core.files import format_size, open_regular, read_lines, read_regular

_T = TypeVar("_T")

SCHEMA = "advisor.run/1"
MANIFEST = "manifest.json"
RANK = "rank.json"
STEPS = "steps.jsonl"
INFERENCE = "inference.jsonl"
TELEMETRY = "telemetry.jsonl"
EVENTS = "events.jsonl"
SNAPSHOT = "memory_snapshot.pickle"
SCALENE = "scalene.json"
COMPILE_LOG = "compile.log"
"""File name of the log of torch.compile."""
NCCL_LOG, TOPOLOGY = "nccl.log", "topology.txt"
"""File names of NCCL's log, and of ``nvidia-smi topo -m`` of the node."""

MAX_RECORD_FILE_BYTES = 1 << 30
"""Maximum size of a JSON Lines file that is read, bytes. The report notes a longer file."""
MAX_EVENTS_BYTES = 16 << 20
"""Maximum size of events that are read, bytes. Decoded, they take up to twenty times as much."""
MAX_LINE_BYTES = 1 << 20
"""Maximum size of a line, bytes. The recorder writes some kilobytes, so a longer line is
damaged."""
ROOM_BYTES, ROOM_FACTOR = 300 << 20, 8
"""Maximum memory of one file's decoded records: this many bytes, or this multiple of the file's
size. Records of a run take two or three times their size."""
MAX_VALUE = 1 << 62
"""Upper bound of all times and figures."""
_MAX_GPUS = 64
"""Maximum number of GPUs in one sample. No machine has more."""
MAX_OBJECTS = 2 * _MAX_GPUS + 2
"""Maximum number of objects in a line. A sample has two per GPU."""
_MAX_STEPS = 2_000_000
"""Maximum number of steps of one rank, as a line may stand for any number of steps."""
MAX_JSON_BYTES = 4 << 20
"""Maximum size of the manifest and of rank.json, bytes. The recorder writes some kilobytes."""


DAMAGE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError, AdvisorError, ValueError)
"""Errors raised by reading a damaged JSON file."""


def trace_name(window: int) -> str:
    """Return the file name of a window's trace inside the rank's folder."""
    return f"trace_w{window}.json.gz"


_MAX_COMMAND = 120
"""Maximum length of a command line that advice repeats."""


class Manifest(Struct, kw_only=True, omit_defaults=True):
    """Description of the run as a whole, written once at its start."""

    schema: str = SCHEMA
    run_id: str = ""
    """Random identifier, the same for all ranks."""
    started_unix_ns: int = 0
    """Wall clock at the start, ns since 1970."""
    command: list[str] = field(default_factory=list)
    """Command line with credentials replaced."""
    entry: str = ""
    """Way of recording: ``decorator``, ``context``, ``command`` or ``callback``."""
    git_commit: str | None = None
    git_dirty: bool | None = None
    """Whether the working directory's repository has uncommitted changes, or ``None`` without
    one."""
    world_size: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of relevant packages: python, torch, cuda, cudnn, nccl, transformers …"""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the recorder."""

    @property
    def program(self) -> str | None:
        """File name of the program, such as ``train.py``, or ``None`` if the command has no Python
        file."""
        names = (word.replace("\\", "/").rpartition("/")[2] for word in self.command)
        return next((name for name in names if name.endswith((".py", ".pyw"))), None)

    @property
    def shell_command(self) -> str | None:
        """Command line to type, shortened if too long, or ``None`` if it has no Python file."""
        words = list(self.command)
        if self.program is None:
            return None
        if words[0].endswith((".py", ".pyw")):
            words.insert(0, "python")
        line = shlex.join(words)
        return line if len(line) <= _MAX_COMMAND else f"python {self.program}"


class RecordedDevice(Struct, kw_only=True, omit_defaults=True):
    """The GPU of a rank."""

    index: int | None = None
    """CUDA ordinal in the process."""
    name: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    capability: str | None = None
    """Compute capability, such as ``9.0``."""
    driver: str | None = None


class RankInfo(Struct, kw_only=True, omit_defaults=True):
    """Description of one process of the run, written once when its first step begins."""

    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    anchor_unix_ns: int | None = None
    """Wall clock at one instant, ns since 1970."""
    anchor_perf_ns: int | None = None
    """``time.perf_counter_ns`` at the instant of ``anchor_unix_ns``, ns."""
    devices: list[RecordedDevice] = field(default_factory=list)
    """Visible GPUs, starting with the one in use."""
    cpus: int | None = None
    """CPUs that the process may use (affinity and cgroup quota)."""
    cpus_total: int | None = None
    memory_bytes: int | None = None
    """Host memory, or the cgroup's limit if that is lower, bytes."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Framework flags that advice needs, by their torch names: ``cudnn.benchmark``,
    ``float32_matmul_precision``, ``cuda.matmul.allow_tf32``, ``autocast`` (dtype or null),
    ``compile`` (regions compiled), ``deterministic_algorithms``, ``anomaly_mode``, ``num_threads``,
    ``interop_threads``, ``numa_node_cpus``, ``numa_node_gpu``, ``start_method`` …"""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables in the allow-list."""
    ulimits: dict[str, int] = field(default_factory=dict)
    """Soft limits: ``nofile``, ``memlock``, ``nproc``."""
    shm_bytes: int | None = None
    """Size of /dev/shm."""


class StepRow(Struct, kw_only=True, omit_defaults=True, gc=False):
    """A training step, from one boundary to the next."""

    n: int
    """Number of the step, from 0."""
    of: int = 1
    """Number of steps in this line. In a long run, one line holds several consecutive steps, with
    sums of their times, samples and bytes. They are read as equal steps."""
    t: int
    """Start of the step, ns."""
    dur: int
    """Duration on the host, to the next boundary, ns."""
    phases: dict[str, int] = field(default_factory=dict)
    """Exclusive host time by phase, ns: ``data``, ``h2d``, ``forward``, ``backward``,
    ``optimizer``, or the user's phases. Other time is ``other``, or ``between steps`` before the
    first phase if no known loader is used. The phases add up to ``dur``."""
    gpu: dict[str, int] | None = None
    """Device time by phase between CUDA events, ns, or ``None`` if not measured."""
    micro: int = 1
    """Number of batches in the step (gradient accumulation)."""
    window: int | None = None
    """Open profiler window, which slowed the step, or ``None``."""
    exporting: bool = False
    """Whether another thread wrote the trace of a window during the step."""
    gc: int = 0
    """Total time of garbage collector pauses, ns."""
    samples: int | None = None
    """Batch size: first dimension of the first tensor."""
    bytes: int | None = None
    """Size of the batch's tensors, bytes."""
    shapes: int | None = None
    """Index of the batch's shapes among the ``shapes`` events, or ``None`` if unknown."""
    padding: float | None = None
    """Share of padding in the batch's mask, if it was sampled (0 to 1)."""
    allocated: int | None = None
    """Device memory in tensors at the end of the step, bytes."""
    reserved: int | None = None
    """Device memory reserved by the allocator at the end of the step, bytes."""
    peak: int | None = None
    """Peak of device memory in tensors so far, bytes."""
    retries: int | None = None
    """Number of times so far that the allocator released its cache to satisfy a request."""
    rss: int | None = None
    """Resident memory of the process, bytes (sampled)."""
    evaluation: int = 0
    """Time between the previous step and this one, such as validation and checkpoints, ns."""
    unused_graphs: int = 0
    """Number of forward passes since the previous step that built a graph without a backward
    pass."""


THROTTLE_BITS = {
    "idle": 0x1, "application clocks": 0x2, "software power cap": 0x4, "hardware slowdown": 0x8,
    "sync boost": 0x10, "software thermal": 0x20, "hardware thermal": 0x40, "power brake": 0x80,
    "display clocks": 0x100,
}  # fmt: skip
"""Bits of ``Gpu.throttle`` (nvmlClocksEventReasons)."""


class GpuSample(Struct, kw_only=True, omit_defaults=True, gc=False):
    """A sample of one GPU. A field is ``None`` if the driver does not provide it."""

    uuid: str | None = None
    utilisation: int | None = None
    """Share of the time in which any kernel ran, % (not occupancy)."""
    memory_utilisation: int | None = None
    """Share of the time in which memory was read or written, %."""
    memory_used: int | None = None
    """Memory used by all processes, bytes."""
    memory_total: int | None = None
    sm_clock: int | None = None
    """Clock of the SMs, MHz."""
    sm_clock_max: int | None = None
    memory_clock: int | None = None
    memory_clock_max: int | None = None
    throttle: int | None = None
    """Reasons for reduced clocks, bits of nvmlClocksEventReasons."""
    power: int | None = None
    """Power, mW."""
    power_limit: int | None = None
    power_limit_default: int | None = None
    """The board's own power limit, mW. ``power_limit`` is the one in force."""
    energy: int | None = None
    """Energy since the driver was loaded, mJ."""
    temperature: int | None = None
    """Temperature, °C."""
    temperature_slowdown: int | None = None
    """Temperature at which clocks are reduced, °C."""
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_tx: int | None = None
    """Bytes sent over PCIe per second."""
    pcie_rx: int | None = None
    nvlink_tx: int | None = None
    """Counter of data sent over NVLink, KiB."""
    nvlink_rx: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    xid: list[int] = field(default_factory=list)
    """Numbers of the XID errors since the previous sample."""
    processes: int | None = None
    """Number of other processes with a context on the GPU."""
    processes_bytes: int | None = None
    """Memory of these processes, bytes."""
    gpm: dict[str, float] | None = None
    """GPM metrics, % (Hopper and later): ``sm_util``, ``sm_occupancy``, ``tensor``, ``dram`` …"""


class HostSample(Struct, kw_only=True, omit_defaults=True, gc=False):
    """A sample of the host."""

    cpu: float | None = None
    """Use of all CPUs together, %."""
    process_cpu: float | None = None
    """CPU use of the process and its children, % of one CPU."""
    children_cpu: float | None = None
    """CPU use of the process's children (DataLoader workers), % of one CPU."""
    run_delay: int | None = None
    """Counter of the time that the main thread was ready to run but had no core, ns."""
    minor_faults: int | None = None
    """Counter of the page faults of the process that needed no disk (Linux)."""
    memory_available: int | None = None
    rss: int | None = None
    """Resident memory of the process, bytes."""
    children_rss: int | None = None
    """Resident memory of its children (DataLoader workers), bytes. Shared pages count for each."""
    swap_used: int | None = None
    disk_read: int | None = None
    """Counter of bytes read from disks since boot."""
    disk_write: int | None = None
    throttled: int | None = None
    """Time so far in which the cgroup's CPU quota stopped the process, µs."""
    throttled_periods: int | None = None


class Sample(Struct, kw_only=True, omit_defaults=True, gc=False):
    """A line of telemetry.jsonl."""

    t: int
    """Time of the sample, ns."""
    gpus: list[GpuSample] = field(default_factory=list)
    host: HostSample | None = None


class Event(Struct, kw_only=True, omit_defaults=True):
    """An event of the run: one line of events.jsonl. ``kind`` determines the keys of ``data``.

    ``loader``: id, workers, pin_memory, prefetch_factor, persistent_workers, batch_size, drop_last,
    dataset, item (``file(line): function`` that reads a sample), length, multiprocessing_context,
    trainer (``transformers`` where its Trainer is imported) · ``loader_iter``: id, began_ns (on the
    clock of the steps, as the event is written later), workers_started_ns, workers_ended_ns (at the
    end of the previous epoch, or ``null``), evaluation · ``shapes``: index, shapes, dtypes ·
    ``padding`` (token ids of one in five forward passes): padding (share), beyond (share in
    positions without a token in any row), rows, columns, and for rows in the order of their lengths
    split (share of positions that would be gone if the batch were split in two) · ``labels`` (of a
    forward pass, or of a loss in a stack sample): ignored (share), rows, columns, classes (of a
    loss) · ``window``: window, reason, steps, state (``open``, ``done``, ``stopped``, ``failed``,
    ``never``, ``dropped``: before the training), file, why, and for the first window fault_steps
    (first and last step in which page faults were counted, before it), minor_faults (of the process
    in these steps), memory_growth (of its largest resident memory, bytes), fault_ns (time of a page
    fault on this machine, if there were many, or ``null``) · ``collect``: file, line, function,
    times (the first, second, fourth, eighth … request for a full garbage collection) · ``stacks``:
    frames (``file(line): function``, the innermost may be ``<built-in function …>``), stacks (for
    each: samples since the previous event, and indices in ``frames``, outermost first) ·
    ``warning``: text · ``oom``: message, snapshot, allocated, reserved · ``error``: text · ``end``:
    steps, reason (``finished``, ``exception``, ``interrupted``, ``disk``: disk full), exception,
    message"""

    t: int
    """Time of the event, ns."""
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class RankRecord(Struct, kw_only=True):
    """Records of one rank, in addition to its traces."""

    rank: RankInfo
    steps: list[StepRow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    folder: str = ""
    inference: bool = False
    """Whether the steps belong to a loop of forward passes that does not train."""

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of a kind, in order."""
        return [event.data for event in self.events if event.kind == kind]

    @property
    def has_ended(self) -> bool:
        """Whether the run reached its end. Otherwise, it was killed or is still running."""
        return any(event.kind == "end" for event in self.events)


class Recording(Struct, kw_only=True):
    """Contents of a run directory, without its traces."""

    path: str
    manifest: Manifest
    ranks: dict[int, RankRecord]
    problems: list[str] = field(default_factory=list)
    """Problems: one line per damaged file, with how much of it was kept."""


def is_run(path: str | Path) -> bool:
    """Return whether the path is a run directory."""
    try:
        return Path(path, MANIFEST).is_file()
    except OSError:  # a folder without read permission
        return False


STEPS_BEFORE_WINDOW = 7
"""Maximum number of steps before a window that tell whether it is like the run."""
FIRST_COMPARED_STEP = 3
"""First step that is compared: those before it start up, even with an early window."""
FAULT_NS = 1_300
"""Usual time of a page fault, ns: 0.9 to 2.8 µs in CPU programs on two cores."""
LIKE_THE_RUN = (0.75, 2.0)
"""Range of the steps before a window, as multiples of the run's median step, in which the window is
like the run. Steps without a profiler after a window may be shorter by what it ended."""


def order_windows(record: RankRecord, windows: Sequence[int]) -> list[int]:
    """Return the windows of a rank in the order in which they are analysed: those in the
    warm-up, or in a preparation whose steps are clearly shorter or longer than the run's, come
    last."""
    unprofiled = [
        step for step in record.steps[FIRST_COMPARED_STEP:] if step.window is None and step.of == 1
    ]
    if len(windows) < 2 or not unprofiled:
        return [*windows]
    usual = median(step.dur for step in unprofiled)

    def is_in_preparation(window: int) -> bool:
        opened = min((step.n for step in record.steps if step.window == window), default=0)
        before = [step.dur for step in unprofiled if step.n < opened][-STEPS_BEFORE_WINDOW:]
        low, high = LIKE_THE_RUN
        return not before or not low * usual <= median(before) <= high * usual

    return sorted(windows, key=is_in_preparation)


def read_recording(path: str | Path) -> Recording:
    """Read a run directory without its traces.

    Raises AdvisorError if the manifest is missing, unreadable or of another schema. If a rank's
    files are missing or damaged, only the damaged parts are lost (see ``problems``). Only regular
    files are read, not pipes or devices."""
    folder = Path(path)
    try:
        manifest = _read_object(folder / MANIFEST, Manifest)
    except OSError as error:
        raise AdvisorError(f"{folder}: not a run directory ({error.strerror or error})") from None
    except DAMAGE_ERRORS as error:
        raise AdvisorError(
            f"{folder / MANIFEST}: not a manifest ({_describe_error(error)})"
        ) from None
    if manifest.schema.split("/")[0] != SCHEMA.split("/", maxsplit=1)[0]:
        schema_text = manifest.schema[:60]
        raise AdvisorError(f"{folder / MANIFEST}: schema {schema_text!r}, expected {SCHEMA!r}")
    problems: list[str] = []
    ranks: dict[int, RankRecord] = {}
    for number, sub in rank_folders(folder):
        ranks[number] = _read_rank(sub, problems)
    return Recording(path=str(folder), manifest=manifest, ranks=ranks, problems=problems)


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the ranks of a run directory with their folders, by name. Raises AdvisorError if it
    cannot be read."""
    result = []
    try:
        for sub in sorted(folder.glob("rank*")):
            number = sub.name.removeprefix("rank")
            if number.isascii() and number.isdigit() and len(number) <= 6 and sub.is_dir():
                result.append((int(number), sub))
    except OSError as error:  # a loop of links, or a folder without read permission
        raise AdvisorError(f"{folder}: cannot be read ({error.strerror or error})") from None
    return result


def _read_object(file: Path, kind: type[_T]) -> _T:
    """Read a JSON file of one object. Raises OSError, or one of ``DAMAGE_ERRORS``."""
    return msgspec.json.decode(read_regular(file, MAX_JSON_BYTES), type=kind)


def _describe_error(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _read_rank(folder: Path, problems: list[str]) -> RankRecord:
    try:
        rank = _read_object(folder / RANK, RankInfo)
    except (OSError, *DAMAGE_ERRORS):
        rank = RankInfo()
        problems.append(f"{folder / RANK}: missing or damaged")
    steps = _split_lines(_read_lines(folder / STEPS, StepRow, problems), folder / STEPS, problems)
    # a training that was killed in its first steps may leave both files, and counts as training
    inference = not steps and (folder / INFERENCE).exists()
    if inference:
        file = folder / INFERENCE
        steps = _split_lines(_read_lines(file, StepRow, problems), file, problems)
    return RankRecord(
        rank=rank,
        steps=steps,
        samples=_read_samples(folder / TELEMETRY, problems),
        events=_without_dropped(
            _read_lines(folder / EVENTS, Event, problems, max_bytes=MAX_EVENTS_BYTES)
        ),
        folder=str(folder),
        inference=inference,
    )


def _split_lines(steps: list[StepRow], file: Path, problems: list[str]) -> list[StepRow]:
    """Split each line into its steps, with the same sums."""
    if all(step.of == 1 for step in steps):
        return steps
    result: list[StepRow] = []
    for step in steps:
        count = step.of
        if len(result) + count > _MAX_STEPS:
            problems.append(f"{file}: read up to step {step.n:,}: more than {_MAX_STEPS:,}")
            break
        phases = {name: ns // count for name, ns in step.phases.items()}
        dur = sum(phases.values()) if phases else step.dur // count
        remainder = step.dur - count * dur
        equal = msgspec.structs.replace(
            step, of=1, dur=dur, phases=phases, gc=step.gc // count, gpu=None,
            evaluation=0, unused_graphs=0,
            samples=None if step.samples is None else step.samples // count,
            bytes=None if step.bytes is None else step.bytes // count,
        )  # fmt: skip
        if count > 1:  # remainders and single measurements go to the first step
            first = msgspec.structs.replace(
                equal, dur=dur + remainder, gpu=step.gpu, evaluation=step.evaluation,
                unused_graphs=step.unused_graphs,
                phases={k: ns - (count - 1) * phases[k] for k, ns in step.phases.items()},
                gc=step.gc - (count - 1) * equal.gc,
                samples=_get_remainder(step.samples, count),
                bytes=_get_remainder(step.bytes, count),
            )  # fmt: skip
            result.append(first)
            result += (
                msgspec.structs.replace(equal, n=step.n + i, t=step.t + remainder + i * dur)
                for i in range(1, count)
            )
        else:
            result.append(step)
    return result


def _get_remainder(total: int | None, count: int) -> int | None:
    return None if total is None else total - (count - 1) * (total // count)


def _without_dropped(events: list[Event]) -> list[Event]:
    """Return the events without windows before the training."""
    windows = [event for event in events if event.kind == "window"]
    dropped = {str(e.data.get("window")) for e in windows if e.data.get("state") == "dropped"}
    if not dropped:
        return events
    return [e for e in events if e.kind != "window" or str(e.data.get("window")) not in dropped]


def _read_lines(
    file: Path, kind: type[_T], problems: list[str], max_bytes: int = MAX_RECORD_FILE_BYTES
) -> list[_T]:
    result: list[_T] = []
    memory = 0
    for read, item in _iterate_lines(file, kind, problems, max_bytes):
        memory += memory_weight(item)
        if memory > max(ROOM_BYTES, ROOM_FACTOR * read):
            problems.append(f"{file}: read up to line {len(result):,}: too much for its size")
            break
        result.append(item)
    return result


def _read_samples(file: Path, problems: list[str]) -> list[Sample]:
    """Read telemetry within a memory limit: if it is too much, every second sample, or fourth …"""
    samples: list[Sample] = []
    memory, stride = 0, 1
    lines = _iterate_lines(file, Sample, problems, MAX_RECORD_FILE_BYTES)
    for number, (read, sample) in enumerate(lines):
        if number % stride:
            continue
        samples.append(sample)
        memory += memory_weight(sample)
        while memory > max(ROOM_BYTES, ROOM_FACTOR * read) and len(samples) > 1:
            stride *= 2
            del samples[1::2]
            memory = sum(map(memory_weight, samples))
    if stride > 1:
        problems.append(f"{file}: one sample in {stride} kept: too much for its size")
    return samples


def is_sane(item: object) -> bool:
    """Return whether a record's times are possible. Others are damage, and do not fit a column."""
    if isinstance(item, StepRow):
        lengths = item.dur, item.n, item.gc, *item.phases.values()
        if not 1 <= item.of <= _MAX_STEPS:
            return False
        return -MAX_VALUE < item.t < MAX_VALUE and all(
            0 <= length < MAX_VALUE for length in lengths
        )
    if isinstance(item, Sample | Event):
        return -MAX_VALUE < item.t < MAX_VALUE
    return True


def memory_weight(item: object) -> int:
    """Estimate the memory of a record, bytes. Drop GPUs beyond ``_MAX_GPUS``."""
    if isinstance(item, Sample):
        del item.gpus[_MAX_GPUS:]
        return 400 + sum(1200 + 180 * len(gpu.gpm or ()) + 40 * len(gpu.xid) for gpu in item.gpus)
    if isinstance(item, StepRow):
        return 400 + 180 * (len(item.phases) + len(item.gpu or ()))
    return 400


def _iterate_lines(
    file: Path, kind: type[_T], problems: list[str], max_bytes: int
) -> Iterator[tuple[int, _T]]:
    """Yield the records of a JSON Lines file, each with the bytes read so far. Skip damage."""
    decoder = msgspec.json.Decoder(kind)
    damaged = read = 0
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > max_bytes:
                problems.append(f"{file}: read up to {format_size(max_bytes)}")
            for line in read_lines(opened, max_bytes, MAX_LINE_BYTES):
                # do not decode large lines that would be cut down anyway
                if line is None or (kind is not Event and line.count(b"{") > MAX_OBJECTS):
                    damaged += 1
                    continue
                read += len(line)
                try:
                    item = decoder.decode(line)
                except DAMAGE_ERRORS:
                    damaged += 1
                    continue
                if not is_sane(item):
                    damaged += 1
                    continue
                yield read, item
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror or error})")
    if damaged:
        problems.append(f"{file}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")

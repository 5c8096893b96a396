"""Reader of structured logs of torch.compile (``TORCH_TRACE=FOLDER``), one file per process.

A line ``V1123 20:55:19.489000 8996 torch/_dynamo/utils.py:2350] {…}`` is a record. Lines that begin
with a tab are its payload (https://github.com/pytorch/tlparse). Only some kinds are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from advisor.core.auxiliary_inputs import CompileCause, CompileLog, FusedKernel, GraphBreak
from advisor.core.errors import AdvisorError
from advisor.core.files import cut_lines
from advisor.core.finding import Location
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

_RECORD = re.compile(rb"^V\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+:\d+\] (?=\{)")
_BREAK_KEY, _RECOMPILE_KEY, _METRICS_KEY = (
    "dynamo_graph_break_reason",
    "recompile_reasons",
    "compilation_metrics",
)
_GRAPH_KEY, _CODE_KEY = "dynamo_output_graph", "inductor_output_code"
_RECORD_KEYS = tuple(
    name.encode() for name in (_BREAK_KEY, _RECOMPILE_KEY, _METRICS_KEY, _GRAPH_KEY, _CODE_KEY)
)
_CAUSE_FIELDS = ("recompilations", "not_compiled", "without_cuda_graphs")
NAMES = "dedicated_log_torch_trace_*.log"
_MAX_LINE, MAX_PAYLOAD = 1 << 20, 2_000
"""Maximum number of characters of a record, and of lines of its payload."""
_MAX_FILES, _MAX_CAUSES, MAX_TEXT = 1_024, 10_000, 300
_MAX_CODE, _MAX_NODES, _MAX_LINES = 200_000, 100_000, 20
"""Maximum number of lines of a graph or generated code, nodes of all graphs, and lines per
kernel."""

_BREAK_PLACE = re.compile(r"^Graph break (?:in user code at|from) (.+):(\d+)$")
_STACK_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|lib(?:64)?[/\\]python\d[\d.]*t?)[/\\]")
_USELESS_HINT = re.compile(
    r"Hint: (?:If it is a|Please report|It may be possible|This graph break is fund)"
)
_GUARD_NUMBER = re.compile(r"^(?:\d+/)+\d+: ")
_NODES_LOCATION = re.compile(r"^ *# File: (.+?):(\d+) in ([^,]+)")
_NODE = re.compile(r"^ *([A-Za-z_]\w*)(?::| =|$)")
_SOURCE_NODES = re.compile(r"^ *# .*Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_KERNEL_CALL = re.compile(r"^ *((?:triton|cpp)_\w+?)(?:\.run)?(?:\(| = async_compile|$)")
_RESUME_FUNCTION = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")


class CompileLogReader(Reader):
    """Reader of one process's torch.compile log."""

    name = "torch-compile"
    meta_field = "compilation"
    description = "a torch.compile log"
    suffixes = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Pattern of torch's own names, because other logs may also be next to traces."""
        return (NAMES,)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise the log by its first record."""
        return ReaderClaim.NO if _RECORD.match(head) is None else ReaderClaim.SURE

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.core.trace import blank_trace

        log, records = _read_log(source.blocks())
        bytes_read = source.bytes_read
        return blank_trace(source.path, bytes_read=bytes_read, events_read=records, compilation=log)

    def merge(self, values: list[CompileLog]) -> CompileLog:
        return merge_logs(values)


_NO_LOG_MESSAGE = "{}: no log of torch.compile; record one with TORCH_TRACE=FOLDER"


def log_files(path: Path) -> list[Path]:
    """Return a folder's logs by their names, or the file. Raises AdvisorError if there is none."""
    paths = list(islice(path.glob(NAMES), _MAX_FILES)) if path.is_dir() else [path]
    if not paths:
        raise AdvisorError(_NO_LOG_MESSAGE.format(path))
    return paths


def read_logs(path: Path, options: ReadOptions | None = None) -> CompileLog:
    """Read a log, or the logs in a folder as one. Raises AdvisorError if there is none."""
    paths = log_files(path)
    logs = []
    read_options = options or ReadOptions()
    for file in sorted(paths):
        source = ByteSource(str(file), limit=read_options.max_bytes, peek=read_options.peek)
        if _RECORD.match(source.head()) is not None:
            logs.append(_read_log(source.blocks())[0])
    if not logs:
        raise AdvisorError(_NO_LOG_MESSAGE.format(path))
    return logs[0] if len(logs) == 1 else merge_logs(logs)


def merge_logs(logs: list[CompileLog]) -> CompileLog:
    """Merge logs of several processes. Counts and times are the largest of any process."""
    inductor = [log.inductor_ns for log in logs if log.inductor_ns is not None]
    # a number that means different functions in two logs identifies neither
    causes_of_frame: dict[str, set[Any]] = {}
    for log in logs:
        for graph_break in log.breaks:
            for frame in graph_break.frames:
                causes_of_frame.setdefault(frame, set()).add(_cause_key(graph_break))
    breaks = [
        structs.replace(
            graph_break,
            frames=sorted(
                frame
                for frame, keys in causes_of_frame.items()
                if keys == {_cause_key(graph_break)}
            ),
        )
        for graph_break in _merge_causes([log.breaks for log in logs])
    ]
    return CompileLog(
        logs=sum(log.logs for log in logs),
        compilations=max(log.compilations for log in logs),
        ns=max(log.ns for log in logs),
        inductor_ns=max(inductor, default=None),
        breaks=breaks,
        kernels=_merge_kernels(logs),
        **{name: _merge_causes([getattr(log, name) for log in logs]) for name in _CAUSE_FIELDS},
        damaged=sum(log.damaged for log in logs),
    )


def _merge_kernels(logs: list[CompileLog]) -> list[FusedKernel]:
    """Merge kernels of the same name, with all their operators and lines."""
    result: dict[str, FusedKernel] = {}
    for fused_kernel in (kernel for log in logs for kernel in log.kernels):
        merged = result.get(fused_kernel.name, fused_kernel)
        result[fused_kernel.name] = structs.replace(
            merged,
            operators=list(dict.fromkeys([*merged.operators, *fused_kernel.operators]))[
                :_MAX_LINES
            ],
            lines=list(dict.fromkeys([*merged.lines, *fused_kernel.lines]))[:_MAX_LINES],
        )
    return list(result.values())


def _cause_key(cause: GraphBreak | CompileCause) -> tuple[Any, ...]:
    return cause.file, cause.line, cause.function, cause.reason


def _merge_causes(sides: list[list[Any]]) -> list[Any]:
    """Merge causes of several processes. Of each cause the largest count is kept, largest first."""
    result: dict[Any, Any] = {}
    for side in sides:
        for cause in side:
            key = _cause_key(cause)
            if key not in result or cause.count > result[key].count:
                result[key] = cause
    return sorted(
        result.values(), key=lambda cause: (-(getattr(cause, "ns", 0) or 0), -cause.count)
    )


Causes = dict[Any, CompileCause]
Place = tuple[str | None, str | None, int | None]


@dataclass
class _LogData:
    """Data collected from one process's log. Times are in ns."""

    compilations: int = 0
    ns: float = 0.0
    inductor_ns: float | None = None
    graph_breaks: dict[Any, GraphBreak] = field(default_factory=dict)
    recompilations: Causes = field(default_factory=dict)
    not_compiled: Causes = field(default_factory=dict)
    without_cuda_graphs: Causes = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    broken_at: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Keys in ``found``, by file and line of a break and of the calls that led to it."""
    lines: dict[str, dict[str, Location]] = field(default_factory=dict)
    """Line of each node of a graph, by the number of the compilation."""
    nodes: int = 0
    kernels: dict[str, FusedKernel] = field(default_factory=dict)
    damaged: int = 0

    def breaks(self) -> list[GraphBreak]:
        """Return the graph breaks with the numbers of the functions that resume after them."""
        resumed_frames: dict[Any, list[str]] = {}
        for frame, (function, file, _) in self.places.items():
            resumed = _RESUME_FUNCTION.match(function or "")
            line = None if resumed is None else _parse_line(resumed[1])
            if file is not None and line is not None and (file, line) in self.broken_at:
                resumed_frames.setdefault(self.broken_at[file, line], []).append(frame)
        return [
            structs.replace(graph_break, frames=sorted(resumed_frames.get(key, [])))
            for key, graph_break in self.graph_breaks.items()
        ]


def _read_log(blocks: Iterable[bytes]) -> tuple[CompileLog, int]:
    """Return the log, and the number of records read."""
    log, records = _LogData(), 0
    for record, payload in _iterate_records(cut_lines(blocks, _MAX_LINE), log):
        records += 1
        number = f"{record.get('frame_id')}/{record.get('frame_compile_id')}"
        if _METRICS_KEY in record:
            _add_compilation(log, record[_METRICS_KEY])
        elif _GRAPH_KEY in record:
            _add_graph(log, number, payload)
        elif _CODE_KEY in record:
            _add_code(log, log.lines.get(number, {}), payload)
        elif (name := _string_or_empty(record["artifact"].get("name"))) == _BREAK_KEY:
            _add_break(log, payload)
        elif name == _RECOMPILE_KEY and len(log.guards) < _MAX_CAUSES:
            log.guards[number] = _find_guard(payload)
    causes = {name: _merge_causes([list(getattr(log, name).values())]) for name in _CAUSE_FIELDS}
    result = CompileLog(
        logs=1,
        compilations=log.compilations,
        ns=log.ns,
        inductor_ns=log.inductor_ns,
        breaks=_merge_causes([log.breaks()]),
        kernels=list(log.kernels.values()),
        damaged=log.damaged,
        **causes,
    )
    return result, records


def _iterate_records(
    lines: Iterable[bytes], log: _LogData
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the relevant records with their payload."""
    record: dict[str, Any] | None = None
    payload: list[str] = []
    limit = MAX_PAYLOAD
    for line in lines:
        if line[:1] != b"V" or (start := _RECORD.match(line)) is None:
            if record is not None and len(payload) < limit:
                payload.append(line.decode("utf-8", "replace").strip("\r").removeprefix("\t"))
            continue
        if record is not None:
            yield record, payload
        record, payload = None, []
        limit = MAX_PAYLOAD
        if any(name in line[: start.end() + 200] for name in _RECORD_KEYS):
            try:
                decoded = msgspec.json.decode(line[start.end() :])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                decoded = None
            is_valid = isinstance(decoded, dict) and any(
                isinstance(decoded.get(name), dict)
                for name in (_METRICS_KEY, "artifact", _GRAPH_KEY, _CODE_KEY)
            )
            limit = (
                _MAX_CODE
                if is_valid and (_GRAPH_KEY in decoded or _CODE_KEY in decoded)
                else MAX_PAYLOAD
            )
            record = decoded if is_valid else None
            log.damaged += not is_valid
    if record is not None:
        yield record, payload


def _add_break(log: _LogData, payload: list[str]) -> None:
    """Add a graph break: its place, the reason in one line, the explanation and the first hint."""
    lines = [line.strip() for line in payload]
    end = next(
        (i for i, line in enumerate(lines) if line.startswith("User code trace")), len(lines)
    )
    place = _BREAK_PLACE.match(lines[0]) if lines else None
    frames = [m for line in payload[end:] if (m := _STACK_FRAME.match(line)) is not None]
    if place is None:
        log.damaged += 1
        return
    file, line = place[1], place[2]
    user_frames = [frame for frame in frames if not LIBRARY.search(frame[1])]
    if user_frames and LIBRARY.search(file):  # use the user's line that led there
        file, line = user_frames[-1][1], user_frames[-1][2]
    frames_at_place = [frame for frame in frames if (frame[1], frame[2]) == (file, line)]
    function = frames_at_place[-1][3] if frames_at_place else None
    reason_line = next((line for line in lines[1:end] if "Reason: " in line), "")
    reason = reason_line.partition("Reason: ")[2]
    is_general = reason.startswith(("Encountered graph break", "Failed to handle graph break"))
    if is_general:
        reason_lines = lines[lines.index(reason_line) + 1 : end]
        reason = next((line for line in reason_lines if line), reason)
    notes = [line for line in lines[:end] if line.startswith(("Explanation: ", "Hint: "))]
    hints = [note for note in notes if note.startswith("Hint") and not _USELESS_HINT.match(note)]
    explanation = next((note for note in notes if note.startswith("Explanation")), "")
    graph_break = GraphBreak(
        file=_shorten(file),
        line=_parse_line(line) or 0,
        function=None if function is None else _shorten(function),
        reason=_shorten(reason),
        explanation=_shorten(explanation.removeprefix("Explanation: ")),
        hint=_shorten(hints[0].removeprefix("Hint: ") if hints else ""),
        eager="Skipping the f" in reason_line,
        count=1,
    )
    key = graph_break.file, graph_break.line, graph_break.reason
    known_break = log.graph_breaks.get(key)
    if known_break is not None:
        log.graph_breaks[key] = structs.replace(known_break, count=known_break.count + 1)
    elif len(log.graph_breaks) < _MAX_CAUSES:
        log.graph_breaks[key] = graph_break
        log.broken_at[graph_break.file, graph_break.line] = key
        for user_frame in user_frames:
            log.broken_at.setdefault(
                (_shorten(user_frame[1]), _parse_line(user_frame[2]) or 0), key
            )


def _add_graph(log: _LogData, number: str, payload: list[str]) -> None:
    """Add a graph: the line of each node."""
    lines = log.lines.setdefault(number, {})
    place: Location | None = None
    for text in payload:
        if (location_match := _NODES_LOCATION.match(text)) is not None:
            function = location_match[3].strip()
            resumed = _RESUME_FUNCTION.match(function)
            place = Location(
                file=_shorten(location_match[1]),
                line=_parse_line(location_match[2]),
                function=_shorten(function) if resumed is None else _original_function(function),
            )
        elif place is not None and (node := _NODE.match(text)) is not None:
            if log.nodes >= _MAX_NODES:
                return
            log.nodes += node[1] not in lines
            lines[node[1]] = place


def _original_function(function: str) -> str:
    """Return the function that a graph break split, from the name of its resumed part."""
    return _shorten(function.removeprefix("torch_dynamo_resume_in_").rpartition("_at_")[0])


def _add_code(log: _LogData, lines: dict[str, Location], payload: list[str]) -> None:
    """Add generated code: the operators of each kernel and their lines."""
    nodes: list[str] = []
    operators: list[str] = []
    for text in payload:
        if (source_match := _SOURCE_NODES.match(text)) is not None:
            nodes, operators = (part.split(", ") if part else [] for part in source_match.groups())
        elif "extern_kernels." in text:
            nodes = operators = []
        elif operators and (kernel := _KERNEL_CALL.match(text)) is not None:
            name = _shorten(kernel[1])
            if name not in log.kernels and len(log.kernels) >= _MAX_CAUSES:
                return
            known_kernel = log.kernels.get(name, FusedKernel(name=name, operators=[], lines=[]))
            places = [*known_kernel.lines, *(lines[node] for node in nodes if node in lines)]
            log.kernels[name] = structs.replace(
                known_kernel,
                operators=list(dict.fromkeys([*known_kernel.operators, *map(_shorten, operators)]))[
                    :_MAX_LINES
                ],
                lines=list(dict.fromkeys(places))[:_MAX_LINES],
            )
            nodes = operators = []


def _find_guard(payload: list[str]) -> str:
    """Return the guard of the newest entry, which is the first in the list."""
    lines = [line.strip().strip('"[],') for line in payload]
    text = next((line for line in lines if _GUARD_NUMBER.match(line)), "")
    return _clean_guard(text)


def _clean_guard(guard: str) -> str:
    """Return a guard without its number, its source code and the stack."""
    text = _GUARD_NUMBER.sub("", guard.partition("\n")[0].partition("\\n")[0])
    return _shorten(re.split(r"\s{2,}# ", text)[0].strip())


def _add_compilation(log: _LogData, metrics: dict[str, Any]) -> None:
    """Add a compilation: its time, and why it was repeated, failed, or has no CUDA graph."""
    number = _string_or_empty(metrics.get("compile_id"))
    frame = number.rpartition("/")[0]
    place = (
        _shorten(_string_or_empty(metrics.get("co_name"))) or None,
        _shorten(_string_or_empty(metrics.get("co_filename"))) or None,
        _parse_line(metrics.get("co_firstlineno")),
    )
    if place[0] is None:
        place = log.places.get(frame, place)
    elif len(log.places) < _MAX_CAUSES:
        log.places[frame] = place
    microseconds, seconds = metrics.get("duration_us"), metrics.get("entire_frame_compile_time_s")
    ns = (
        _number_or_zero(microseconds) * 1e3
        if _number_or_zero(microseconds)
        else _number_or_zero(seconds) * 1e9
    )
    log.compilations += 1
    log.ns += ns
    if _number_or_zero(metrics.get("inductor_compile_time_s")):
        log.inductor_ns = (log.inductor_ns or 0.0) + 1e9 * _number_or_zero(
            metrics["inductor_compile_time_s"]
        )
    guard = _clean_guard(_string_or_empty(metrics.get("recompile_reason"))) or log.guards.get(
        number, ""
    )
    fail_reason = _string_or_empty(metrics.get("fail_reason")).partition("\n")[0]
    skip_reason = _string_or_empty(metrics.get("cudagraph_skip_reason")).partition("\n")[0]
    if fail_reason:
        _add_cause(log.not_compiled, place, fail_reason, ns)
    elif guard:
        _add_cause(log.recompilations, place, guard, ns)
    if skip_reason:
        _add_cause(
            log.without_cuda_graphs,
            place,
            skip_reason.removeprefix("skipping cudagraphs due to "),
            ns,
        )


def _add_cause(
    causes: Causes, place: tuple[str | None, str | None, int | None], reason: str, ns: float
) -> None:
    function, file, line = place
    known_cause = causes.get((place, reason))
    if known_cause is None and len(causes) >= _MAX_CAUSES:
        return
    causes[place, reason] = CompileCause(
        function=function,
        file=file,
        line=line,
        reason=_shorten(reason),
        count=1 if known_cause is None else known_cause.count + 1,
        ns=ns + (0.0 if known_cause is None else known_cause.ns or 0.0),
    )


def _string_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number_or_zero(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0.0


def _parse_line(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"

"""Structured logs of torch.compile: what ``TORCH_TRACE=FOLDER`` writes, one file per process.

A line ``V1123 20:55:19.489000 8996 torch/_dynamo/utils.py:2350] {…}`` is a record; lines that begin
with a tab are its payload (https://github.com/pytorch/tlparse). Only some kinds are looked at."""

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
_BREAK, _AGAIN, _METRICS = "dynamo_graph_break_reason", "recompile_reasons", "compilation_metrics"
_GRAPH, _CODE = "dynamo_output_graph", "inductor_output_code"
_KINDS = tuple(name.encode() for name in (_BREAK, _AGAIN, _METRICS, _GRAPH, _CODE))
_CAUSES = ("recompilations", "not_compiled", "without_cuda_graphs")
NAMES = "dedicated_log_torch_trace_*.log"
MAX_LINE, MAX_PAYLOAD = 1 << 20, 2_000
"""Most characters of a record, and most lines of its payload."""
MAX_FILES, MAX_CAUSES, MAX_TEXT = 1_024, 10_000, 300
MAX_CODE, MAX_NODES, MAX_LINES = 200_000, 100_000, 20
"""Most lines of a graph or of generated code; nodes of all graphs; program lines of a kernel."""

_PLACE = re.compile(r"^Graph break (?:in user code at|from) (.+):(\d+)$")
_STACK = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|lib(?:64)?[/\\]python\d[\d.]*t?)[/\\]")
_NO_HINT = re.compile(
    r"Hint: (?:If it is a|Please report|It may be possible|This graph break is fund)"
)
_GUARD = re.compile(r"^(?:\d+/)+\d+: ")
_NODES_OF = re.compile(r"^ *# File: (.+?):(\d+) in ([^,]+)")
_NODE = re.compile(r"^ *([A-Za-z_]\w*)(?::| =|$)")
_MADE_OF = re.compile(r"^ *# .*Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_KERNEL = re.compile(r"^ *((?:triton|cpp)_\w+?)(?:\.run)?(?:\(| = async_compile|$)")
_RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")


class CompileLogReader(Reader):
    """Reader of one process's torch.compile log."""

    name = "torch-compile"
    meta_field = "compilation"
    description = "a torch.compile log"
    suffixes = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Pattern of torch's own names: other logs also lie beside traces."""
        return (NAMES,)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise the log by its first record."""
        return ReaderClaim.NO if _RECORD.match(head) is None else ReaderClaim.SURE

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.core.trace import blank_trace

        log, records = _read(source.blocks())
        read = source.bytes_read
        return blank_trace(source.path, bytes_read=read, events_read=records, compilation=log)

    def merge(self, values: list[CompileLog]) -> CompileLog:
        return merge_logs(values)


_NO_LOG = "{}: no log of torch.compile; record one with TORCH_TRACE=FOLDER"


def log_files(path: Path) -> list[Path]:
    """Return a folder's logs, by their names, or the file. Raises AdvisorError if there is none."""
    paths = list(islice(path.glob(NAMES), MAX_FILES)) if path.is_dir() else [path]
    if not paths:
        raise AdvisorError(_NO_LOG.format(path))
    return paths


def read_logs(path: Path, options: ReadOptions | None = None) -> CompileLog:
    """Read a log, or the logs in a folder, as one. Raises AdvisorError if there is none."""
    paths = log_files(path)
    logs = []
    given = options or ReadOptions()
    for file in sorted(paths):
        source = ByteSource(str(file), limit=given.max_bytes, peek=given.peek)
        if _RECORD.match(source.head()) is not None:
            logs.append(_read(source.blocks())[0])
    if not logs:
        raise AdvisorError(_NO_LOG.format(path))
    return logs[0] if len(logs) == 1 else merge_logs(logs)


def merge_logs(logs: list[CompileLog]) -> CompileLog:
    """Merge logs of several processes: counts and times are the largest of any."""
    inductor = [log.inductor_ns for log in logs if log.inductor_ns is not None]
    # a number that stands for one function here and another there names neither
    users: dict[str, set[Any]] = {}
    for log in logs:
        for each in log.breaks:
            for frame in each.frames:
                users.setdefault(frame, set()).add(_key(each))
    breaks = [
        structs.replace(
            each, frames=sorted(frame for frame, keys in users.items() if keys == {_key(each)})
        )
        for each in _most([log.breaks for log in logs])
    ]
    return CompileLog(
        logs=sum(log.logs for log in logs),
        compilations=max(log.compilations for log in logs),
        ns=max(log.ns for log in logs),
        inductor_ns=max(inductor, default=None),
        breaks=breaks,
        kernels=_kernels_of(logs),
        **{name: _most([getattr(log, name) for log in logs]) for name in _CAUSES},
        damaged=sum(log.damaged for log in logs),
    )


def _kernels_of(logs: list[CompileLog]) -> list[FusedKernel]:
    """Merge kernels of the same name: operators and lines of them all."""
    result: dict[str, FusedKernel] = {}
    for each in (kernel for log in logs for kernel in log.kernels):
        old = result.get(each.name, each)
        result[each.name] = structs.replace(
            old,
            operators=list(dict.fromkeys([*old.operators, *each.operators]))[:MAX_LINES],
            lines=list(dict.fromkeys([*old.lines, *each.lines]))[:MAX_LINES],
        )
    return list(result.values())


def _key(cause: GraphBreak | CompileCause) -> tuple[Any, ...]:
    return cause.file, cause.line, cause.function, cause.reason


def _most(sides: list[list[Any]]) -> list[Any]:
    """Merge causes of several processes: of each the one with the largest count, largest first."""
    result: dict[Any, Any] = {}
    for side in sides:
        for cause in side:
            key = _key(cause)
            if key not in result or cause.count > result[key].count:
                result[key] = cause
    return sorted(
        result.values(), key=lambda cause: (-(getattr(cause, "ns", 0) or 0), -cause.count)
    )


Causes = dict[Any, CompileCause]
Place = tuple[str | None, str | None, int | None]


@dataclass
class _Log:
    """Data collected from one process's log; times in ns."""

    compilations: int = 0
    ns: float = 0.0
    inductor_ns: float | None = None
    found: dict[Any, GraphBreak] = field(default_factory=dict)
    recompilations: Causes = field(default_factory=dict)
    not_compiled: Causes = field(default_factory=dict)
    without_cuda_graphs: Causes = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    broken_at: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Keys in ``found`` by file and line of a break and of the calls that led to it."""
    lines: dict[str, dict[str, Location]] = field(default_factory=dict)
    """Line of each node of the graph, by the number of the compilation."""
    nodes: int = 0
    kernels: dict[str, FusedKernel] = field(default_factory=dict)
    damaged: int = 0

    def breaks(self) -> list[GraphBreak]:
        """Return the graph breaks, with the numbers of the functions that resume after them."""
        following: dict[Any, list[str]] = {}
        for frame, (function, file, _) in self.places.items():
            resumed = _RESUMED.match(function or "")
            line = None if resumed is None else _line(resumed[1])
            if file is not None and line is not None and (file, line) in self.broken_at:
                following.setdefault(self.broken_at[file, line], []).append(frame)
        return [
            structs.replace(each, frames=sorted(following.get(key, [])))
            for key, each in self.found.items()
        ]


def _read(blocks: Iterable[bytes]) -> tuple[CompileLog, int]:
    """Return the log, and the number of records looked at."""
    log, records = _Log(), 0
    for record, payload in _records(cut_lines(blocks, MAX_LINE), log):
        records += 1
        number = f"{record.get('frame_id')}/{record.get('frame_compile_id')}"
        if _METRICS in record:
            _compiled(log, record[_METRICS])
        elif _GRAPH in record:
            _drawn(log, number, payload)
        elif _CODE in record:
            _generated(log, log.lines.get(number, {}), payload)
        elif (name := _text(record["artifact"].get("name"))) == _BREAK:
            _broken(log, payload)
        elif name == _AGAIN and len(log.guards) < MAX_CAUSES:
            log.guards[number] = _guard(payload)
    causes = {name: _most([list(getattr(log, name).values())]) for name in _CAUSES}
    result = CompileLog(
        logs=1,
        compilations=log.compilations,
        ns=log.ns,
        inductor_ns=log.inductor_ns,
        breaks=_most([log.breaks()]),
        kernels=list(log.kernels.values()),
        damaged=log.damaged,
        **causes,
    )
    return result, records


def _records(lines: Iterable[bytes], log: _Log) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the relevant records, with their payload."""
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
        if any(name in line[: start.end() + 200] for name in _KINDS):
            try:
                decoded = msgspec.json.decode(line[start.end() :])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                decoded = None
            whole = isinstance(decoded, dict) and any(
                isinstance(decoded.get(name), dict)
                for name in (_METRICS, "artifact", _GRAPH, _CODE)
            )
            limit = MAX_CODE if whole and (_GRAPH in decoded or _CODE in decoded) else MAX_PAYLOAD
            record = decoded if whole else None
            log.damaged += not whole
    if record is not None:
        yield record, payload


def _broken(log: _Log, payload: list[str]) -> None:
    """Add a graph break: its place, the reason in a line, the explanation and the first hint."""
    lines = [line.strip() for line in payload]
    end = next(
        (i for i, line in enumerate(lines) if line.startswith("User code trace")), len(lines)
    )
    place = _PLACE.match(lines[0]) if lines else None
    frames = [m for line in payload[end:] if (m := _STACK.match(line)) is not None]
    if place is None:
        log.damaged += 1
        return
    file, line = place[1], place[2]
    users = [frame for frame in frames if not LIBRARY.search(frame[1])]
    if users and LIBRARY.search(file):  # the user's line that led there
        file, line = users[-1][1], users[-1][2]
    own = [frame for frame in frames if (frame[1], frame[2]) == (file, line)]
    function = own[-1][3] if own else None
    head = next((line for line in lines[1:end] if "Reason: " in line), "")
    reason = head.partition("Reason: ")[2]
    general = reason.startswith(("Encountered graph break", "Failed to handle graph break"))
    if general:
        rest = lines[lines.index(head) + 1 : end]
        reason = next((line for line in rest if line), reason)
    notes = [line for line in lines[:end] if line.startswith(("Explanation: ", "Hint: "))]
    hints = [note for note in notes if note.startswith("Hint") and not _NO_HINT.match(note)]
    explanation = next((note for note in notes if note.startswith("Explanation")), "")
    found = GraphBreak(
        file=_cut(file),
        line=_line(line) or 0,
        function=None if function is None else _cut(function),
        reason=_cut(reason),
        explanation=_cut(explanation.removeprefix("Explanation: ")),
        hint=_cut(hints[0].removeprefix("Hint: ") if hints else ""),
        eager="Skipping the f" in head,
        count=1,
    )
    key = found.file, found.line, found.reason
    old = log.found.get(key)
    if old is not None:
        log.found[key] = structs.replace(old, count=old.count + 1)
    elif len(log.found) < MAX_CAUSES:
        log.found[key] = found
        log.broken_at[found.file, found.line] = key
        for each in users:
            log.broken_at.setdefault((_cut(each[1]), _line(each[2]) or 0), key)


def _drawn(log: _Log, number: str, payload: list[str]) -> None:
    """Add a graph: the line of each node."""
    lines = log.lines.setdefault(number, {})
    place: Location | None = None
    for text in payload:
        if (found := _NODES_OF.match(text)) is not None:
            function = found[3].strip()
            resumed = _RESUMED.match(function)
            place = Location(
                file=_cut(found[1]),
                line=_line(found[2]),
                function=_cut(function) if resumed is None else _original(function),
            )
        elif place is not None and (node := _NODE.match(text)) is not None:
            if log.nodes >= MAX_NODES:
                return
            log.nodes += node[1] not in lines
            lines[node[1]] = place


def _original(function: str) -> str:
    """Return the function that was split by a graph break, from its resumed part's name."""
    return _cut(function.removeprefix("torch_dynamo_resume_in_").rpartition("_at_")[0])


def _generated(log: _Log, lines: dict[str, Location], payload: list[str]) -> None:
    """Add generated code: the operators of each kernel, and their lines."""
    nodes: list[str] = []
    operators: list[str] = []
    for text in payload:
        if (made := _MADE_OF.match(text)) is not None:
            nodes, operators = (part.split(", ") if part else [] for part in made.groups())
        elif "extern_kernels." in text:
            nodes = operators = []
        elif operators and (kernel := _KERNEL.match(text)) is not None:
            name = _cut(kernel[1])
            if name not in log.kernels and len(log.kernels) >= MAX_CAUSES:
                return
            old = log.kernels.get(name, FusedKernel(name=name, operators=[], lines=[]))
            places = [*old.lines, *(lines[node] for node in nodes if node in lines)]
            log.kernels[name] = structs.replace(
                old,
                operators=list(dict.fromkeys([*old.operators, *map(_cut, operators)]))[:MAX_LINES],
                lines=list(dict.fromkeys(places))[:MAX_LINES],
            )
            nodes = operators = []


def _guard(payload: list[str]) -> str:
    """Return the guard of the newest entry, which is the first one in the list."""
    lines = [line.strip().strip('"[],') for line in payload]
    text = next((line for line in lines if _GUARD.match(line)), "")
    return _plain(text)


def _plain(guard: str) -> str:
    """Return a guard without its number, the code it comes from and the stack."""
    text = _GUARD.sub("", guard.partition("\n")[0].partition("\\n")[0])
    return _cut(re.split(r"\s{2,}# ", text)[0].strip())


def _compiled(log: _Log, metrics: dict[str, Any]) -> None:
    """Add a compilation: its time, and why it was repeated, failed, or has no CUDA graph."""
    number = _text(metrics.get("compile_id"))
    frame = number.rpartition("/")[0]
    place = (
        _cut(_text(metrics.get("co_name"))) or None,
        _cut(_text(metrics.get("co_filename"))) or None,
        _line(metrics.get("co_firstlineno")),
    )
    if place[0] is None:
        place = log.places.get(frame, place)
    elif len(log.places) < MAX_CAUSES:
        log.places[frame] = place
    micro, seconds = metrics.get("duration_us"), metrics.get("entire_frame_compile_time_s")
    ns = _number(micro) * 1e3 if _number(micro) else _number(seconds) * 1e9
    log.compilations += 1
    log.ns += ns
    if _number(metrics.get("inductor_compile_time_s")):
        log.inductor_ns = (log.inductor_ns or 0.0) + 1e9 * _number(
            metrics["inductor_compile_time_s"]
        )
    guard = _plain(_text(metrics.get("recompile_reason"))) or log.guards.get(number, "")
    failed = _text(metrics.get("fail_reason")).partition("\n")[0]
    skipped = _text(metrics.get("cudagraph_skip_reason")).partition("\n")[0]
    if failed:
        _add(log.not_compiled, place, failed, ns)
    elif guard:
        _add(log.recompilations, place, guard, ns)
    if skipped:
        _add(
            log.without_cuda_graphs, place, skipped.removeprefix("skipping cudagraphs due to "), ns
        )


def _add(
    causes: Causes, place: tuple[str | None, str | None, int | None], reason: str, ns: float
) -> None:
    function, file, line = place
    old = causes.get((place, reason))
    if old is None and len(causes) >= MAX_CAUSES:
        return
    causes[place, reason] = CompileCause(
        function=function,
        file=file,
        line=line,
        reason=_cut(reason),
        count=1 if old is None else old.count + 1,
        ns=ns + (0.0 if old is None else old.ns or 0.0),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0.0


def _line(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"

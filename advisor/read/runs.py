"""Content of a folder or URL: runs to choose from, traces, and a trace read from one."""

import os
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import MANIFEST, RANK, SCALENE, STEPS, Manifest, is_run
from advisor.core.trace import Trace
from advisor.read.reader import ReadOptions
from advisor.read.registry import is_trace_name, read_trace, refuse_unknown
from advisor.read.remote.urls import RemoteFile
from advisor.read.source import PACKINGS

MAX_FOLDERS = 2_000
"""Most folders searched on each level."""
DEPTH = 2
"""Levels searched for runs: ``runs/…`` and ``.``, of a project, that has ``runs/``."""
MAX_MANIFEST = 1 << 20
MAX_COUNTED = 64 << 20
"""Largest file of steps whose lines are counted, bytes."""


class RunLine(NamedTuple):
    """Summary of a run for a list."""

    path: Path
    started_unix_ns: int
    """Start of the run, Unix time in ns; 0: not in its manifest."""
    command: tuple[str, ...]
    """Command as it was typed."""
    steps: int | None
    """Recorded steps of its first rank; ``None``: the file is too large to count."""
    ranks: int
    windows: int
    """Number of profiled windows of its first rank."""


class SeveralRuns(AdvisorError):
    """Error for a folder that contains runs and is none."""

    def __init__(self, given: str, found: list[Path]) -> None:
        self.given = given
        self.found = found
        """Run directories, the latest start first."""
        count = "a run" if len(found) == 1 else f"{len(found)} runs"
        super().__init__(f"{given}: a folder with {count} in it; give one, such as {found[0]}")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs below a folder, the latest start first; none if it is a run itself."""
    if is_run(folder):
        return []
    paths: list[Path] = []
    level = [folder]
    for _ in range(DEPTH):
        below = [sub for item in level for sub in _folders(item)][:MAX_FOLDERS]
        paths += [sub for sub in below if is_run(sub)]
        level = [sub for sub in below if not is_run(sub)]
    keys = {path: (_read_manifest(path).started_unix_ns, path.name, str(path)) for path in paths}
    return sorted(paths, key=lambda path: keys[path], reverse=True)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in islice(entries, MAX_FOLDERS)
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def describe_run(run: Path) -> RunLine:
    """Return a run's summary. Damaged or missing facts are left out."""
    manifest = _read_manifest(run)
    ranks = sorted(
        (folder for folder in _folders(run) if folder.name.removeprefix("rank").isdecimal()),
        key=lambda folder: int(folder.name.removeprefix("rank")),
    )
    windows = sum(1 for _ in ranks[0].glob("trace_w*.json*")) if ranks else 0
    return RunLine(
        path=run,
        started_unix_ns=manifest.started_unix_ns,
        command=tuple(manifest.command),
        steps=_lines(ranks[0] / STEPS) if ranks else 0,
        ranks=len(ranks),
        windows=windows,
    )


def _read_manifest(run: Path) -> Manifest:
    """Return a run's manifest; an empty one if damaged: reading the run says what is wrong."""
    try:
        with (run / MANIFEST).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_MANIFEST), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Manifest()


def _lines(file: Path) -> int | None:
    """Count the lines of a file; ``None`` if it is larger than MAX_COUNTED."""
    try:
        if not file.is_file():
            return 0
        with file.open("rb") as opened:
            data = opened.read(MAX_COUNTED + 1)
    except OSError:
        return 0
    return None if len(data) > MAX_COUNTED else data.count(b"\n")


def wanted_traces(names: list[str]) -> list[str]:
    """Return the names of a listing, relative to its folder, that are traces. The recorder's other
    files are left out."""
    traces = named_like_traces(names)
    if any(name.rpartition("/")[2] == MANIFEST for name in names):
        own = (MANIFEST, RANK, SCALENE)
        traces = [name for name in traces if name.rpartition("/")[2] not in own]
    return without_copies(traces)


def named_like_traces(names: list[str]) -> list[str]:
    """Return files named like traces. Hidden files are left out: editors' copies."""
    exported = {name.removesuffix(".sqlite") for name in names if name.endswith(".sqlite")}
    result = []
    for name in names:
        if name.endswith((".nsys-rep", ".qdrep")) and name.rpartition(".")[0] in exported:
            continue  # nsys leaves a report beside its export
        last = name.rpartition("/")[2]
        if is_trace_name(last) and not last.startswith("."):
            result.append(name)
    return result


def read_source(source: RemoteFile, options: ReadOptions) -> Trace:
    """Read a trace, local or remote, with its URL as its path.

    Raises AdvisorError as :func:`read_trace` and :func:`open_locally` do."""
    from advisor.read.remote.fetch import open_locally

    say = options.progress
    with open_locally(
        source, max_bytes=options.max_bytes, progress=say, check=refuse_unknown
    ) as path:
        copy = str(path)
        if copy == source.at:
            return read_trace(copy, options)
        if say is not None:
            options = replace(options, progress=lambda _, size: say(source.url, size))
        try:
            trace = read_trace(copy, options)
        except AdvisorError as error:
            raise AdvisorError(str(error).replace(copy, source.url)) from None
    snapshot = trace.meta.snapshot
    if snapshot is not None and snapshot.path == copy:
        snapshot = replace(snapshot, path=source.url)
    return replace(trace, meta=replace(trace.meta, path=source.url, snapshot=snapshot))


# -- log directories of TensorFlow and JAX ---------------------------------------------------------

XPLANE = ".xplane.pb"
_TIMELINE = ".trace.json"
_PERFETTO = "perfetto_trace.json"


def without_copies(files: list[str]) -> list[str]:
    """Drop timelines from folders that have XPlane files. TensorFlow and JAX write
    ``<host>.trace.json.gz`` and ``perfetto_trace.json.gz`` from those, and leave out what would
    make them long. PyTorch's own (``.pt.trace.json``) stay."""
    recorded = {Path(file).parent for file in files if _bare(file).endswith(XPLANE)}

    def is_copy(file: str) -> bool:
        bare = _bare(file)
        timeline = bare.endswith(_TIMELINE) and not bare.endswith(".pt.trace.json")
        return Path(file).parent in recorded and (timeline or Path(bare).name == _PERFETTO)

    return [file for file in files if not is_copy(file)]


def number_hosts_as_ranks(traces: list[Trace]) -> list[Trace]:
    """Number the hosts of one recording (neighbouring files without a rank) as ranks, in the order
    of their names. A second recording of the same hosts gets the same ranks."""
    beside: dict[Path, list[Trace]] = defaultdict(list)
    for trace in traces:
        beside[Path(trace.meta.path).parent].append(trace)
    numbers: dict[str, int] = {}
    for group in beside.values():
        hosts = [trace for trace in group if _is_host(trace)]
        if len(hosts) > 1:
            for name in sorted(Path(trace.meta.path).name for trace in hosts):
                numbers.setdefault(name, len(numbers))
    ranked = []
    for trace in traces:
        number = numbers.get(Path(trace.meta.path).name) if _is_host(trace) else None
        ranked.append(
            trace if number is None else replace(trace, meta=replace(trace.meta, rank=number))
        )
    return ranked


def _is_host(trace: Trace) -> bool:
    return trace.meta.format == "xplane" and trace.meta.rank is None


def _bare(file: str) -> str:
    return next((file.removesuffix(end) for end in PACKINGS if file.endswith(end)), file)

"""Content of a folder or URL: the runs and traces in it, and reading of one of its traces."""

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

_MAX_FOLDERS = 2_000
"""Maximum number of folders searched on each level."""
_MAX_DEPTH = 2
"""Number of levels searched for runs: ``runs/…``, and a project folder that has ``runs/``."""
MAX_MANIFEST_BYTES = 1 << 20
MAX_COUNTED_BYTES = 64 << 20
"""Maximum size of a file of steps whose lines are counted, in bytes."""


class RunLine(NamedTuple):
    """Summary of a run for a list."""

    path: Path
    started_unix_ns: int
    """Start of the run, Unix time in ns, or 0 if it is not in the manifest."""
    command: tuple[str, ...]
    """Command as typed by the user."""
    steps: int | None
    """Number of recorded steps of its first rank, or ``None`` if the file is too large to count."""
    ranks: int
    windows: int
    """Number of profiled windows of its first rank."""


class SeveralRuns(AdvisorError):
    """Error for a folder that contains runs but is not a run."""

    def __init__(self, path: str, runs: list[Path]) -> None:
        self.path = path
        self.runs = runs
        """Run directories, latest start first."""
        count = "a run" if len(runs) == 1 else f"{len(runs)} runs"
        super().__init__(f"{path}: a folder with {count} in it; give one, such as {runs[0]}")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs below a folder, latest start first. Empty if the folder is a run itself."""
    if is_run(folder):
        return []
    paths: list[Path] = []
    folders = [folder]
    for _ in range(_MAX_DEPTH):
        subfolders = [subfolder for parent in folders for subfolder in _list_folders(parent)][
            :_MAX_FOLDERS
        ]
        paths += [subfolder for subfolder in subfolders if is_run(subfolder)]
        folders = [subfolder for subfolder in subfolders if not is_run(subfolder)]
    keys = {path: (_read_manifest(path).started_unix_ns, path.name, str(path)) for path in paths}
    return sorted(paths, key=lambda path: keys[path], reverse=True)


def _list_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in islice(entries, _MAX_FOLDERS)
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def describe_run(run: Path) -> RunLine:
    """Return a run's summary. Damaged or missing facts are left out."""
    manifest = _read_manifest(run)
    ranks = sorted(
        (folder for folder in _list_folders(run) if folder.name.removeprefix("rank").isdecimal()),
        key=lambda folder: int(folder.name.removeprefix("rank")),
    )
    windows = sum(1 for _ in ranks[0].glob("trace_w*.json*")) if ranks else 0
    return RunLine(
        path=run,
        started_unix_ns=manifest.started_unix_ns,
        command=tuple(manifest.command),
        steps=_count_lines(ranks[0] / STEPS) if ranks else 0,
        ranks=len(ranks),
        windows=windows,
    )


def _read_manifest(run: Path) -> Manifest:
    """Return a run's manifest, empty if damaged: the error appears when the run is read."""
    try:
        with (run / MANIFEST).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_MANIFEST_BYTES), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Manifest()


def _count_lines(file: Path) -> int | None:
    """Count the lines of a file. ``None`` if it is larger than MAX_COUNTED_BYTES."""
    try:
        if not file.is_file():
            return 0
        with file.open("rb") as opened:
            data = opened.read(MAX_COUNTED_BYTES + 1)
    except OSError:
        return 0
    return None if len(data) > MAX_COUNTED_BYTES else data.count(b"\n")


def wanted_traces(names: list[str]) -> list[str]:
    """Return the names of traces in a listing, relative to its folder. Other files of the recorder
    are left out."""
    traces = named_like_traces(names)
    if any(name.rpartition("/")[2] == MANIFEST for name in names):
        recorder_files = (MANIFEST, RANK, SCALENE)
        traces = [name for name in traces if name.rpartition("/")[2] not in recorder_files]
    return without_copies(traces)


def named_like_traces(names: list[str]) -> list[str]:
    """Return the files named like traces. Hidden files, such as copies by editors, are left out."""
    exported = {name.removesuffix(".sqlite") for name in names if name.endswith(".sqlite")}
    result = []
    for name in names:
        if name.endswith((".nsys-rep", ".qdrep")) and name.rpartition(".")[0] in exported:
            continue  # nsys leaves a report next to its export
        file_name = name.rpartition("/")[2]
        if is_trace_name(file_name) and not file_name.startswith("."):
            result.append(name)
    return result


def read_source(source: RemoteFile, options: ReadOptions) -> Trace:
    """Read a trace, local or remote, with its URL as its path.

    Raises AdvisorError like :func:`read_trace` and :func:`open_locally`."""
    from advisor.read.remote.fetch import open_locally

    report_progress = options.progress
    with open_locally(
        source, max_bytes=options.max_bytes, progress=report_progress, check=refuse_unknown
    ) as path:
        local_path = str(path)
        if local_path == source.at:
            return read_trace(local_path, options)
        if report_progress is not None:
            options = replace(options, progress=lambda _, size: report_progress(source.url, size))
        try:
            trace = read_trace(local_path, options)
        except AdvisorError as error:
            raise AdvisorError(str(error).replace(local_path, source.url)) from None
    snapshot = trace.meta.snapshot
    if snapshot is not None and snapshot.path == local_path:
        snapshot = replace(snapshot, path=source.url)
    return replace(trace, meta=replace(trace.meta, path=source.url, snapshot=snapshot))


# -- log directories of TensorFlow and JAX ---------------------------------------------------------

XPLANE = ".xplane.pb"
_TIMELINE = ".trace.json"
_PERFETTO = "perfetto_trace.json"


def without_copies(files: list[str]) -> list[str]:
    """Drop timelines from folders that have XPlane files. TensorFlow and JAX write
    ``<host>.trace.json.gz`` and ``perfetto_trace.json.gz`` from XPlane files, but shortened.
    PyTorch's own timelines (``.pt.trace.json``) stay."""
    xplane_folders = {Path(file).parent for file in files if _remove_packing(file).endswith(XPLANE)}

    def is_copy(file: str) -> bool:
        unpacked_name = _remove_packing(file)
        is_timeline = unpacked_name.endswith(_TIMELINE) and not unpacked_name.endswith(
            ".pt.trace.json"
        )
        return Path(file).parent in xplane_folders and (
            is_timeline or Path(unpacked_name).name == _PERFETTO
        )

    return [file for file in files if not is_copy(file)]


def number_hosts_as_ranks(traces: list[Trace]) -> list[Trace]:
    """Number the hosts of one recording (files without a rank in one folder) as ranks, in the order
    of their names. A second recording of the same hosts gets the same ranks."""
    by_folder: dict[Path, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_folder[Path(trace.meta.path).parent].append(trace)
    rank_of_name: dict[str, int] = {}
    for group in by_folder.values():
        hosts = [trace for trace in group if _is_host(trace)]
        if len(hosts) > 1:
            for name in sorted(Path(trace.meta.path).name for trace in hosts):
                rank_of_name.setdefault(name, len(rank_of_name))
    ranked = []
    for trace in traces:
        rank = rank_of_name.get(Path(trace.meta.path).name) if _is_host(trace) else None
        ranked.append(
            trace if rank is None else replace(trace, meta=replace(trace.meta, rank=rank))
        )
    return ranked


def _is_host(trace: Trace) -> bool:
    return trace.meta.format == "xplane" and trace.meta.rank is None


def _remove_packing(file: str) -> str:
    return next((file.removesuffix(end) for end in PACKINGS if file.endswith(end)), file)

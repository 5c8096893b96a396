"""Speed and memory of reading and analysing a trace, beside the floor.

The floor is what any reader must do that ends in the same typed structs: isal unpacks the file
and msgspec decodes the text, in pieces, in one process, and nothing else. Every figure is a
process of its own, start-up and imports included; CPU time is its user and system time with that
of its children, best of several runs; memory is measured in a separate run, as the largest sum
of the proportional set sizes (PSS) of all its processes.

    python benchmarks/bench_ingest.py [--mb 100 200 400] [--source TRACE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
POLL_S = 0.02


# -- what is measured, each in a process of its own ---------------------------------------------


def floor(path: str) -> int:
    """isal gunzip and msgspec decode into the structs that the reader uses, in its pieces."""
    from advisor.read.formats.kineto.decode import event_list
    from advisor.read.formats.kineto.json_pieces import Splitter
    from advisor.read.source import ByteSource

    return sum(len(event_list.decode(piece)) for piece in Splitter(ByteSource(path)).pieces())


def read(path: str, processes: int) -> int:
    """Our reader."""
    from advisor.read import ReadOptions, read_trace

    return read_trace(path, ReadOptions(processes=processes)).meta.events_read


def analyze_file(path: str, processes: int) -> int:
    """Read a file and find what can be found."""
    from advisor.advise.engine import analyze
    from advisor.read import ReadOptions, open_run

    report = analyze(open_run(path, ReadOptions(processes=processes)))
    return len(report.findings)


def hta(path: str) -> int:
    """HolisticTraceAnalysis, loading only: no analysis of its own is asked for."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    loaded = TraceAnalysis(trace_files={0: path}, trace_dir=str(Path(path).parent))
    return len(loaded.t.get_trace(0))


SUBJECTS: dict[str, tuple[str, Callable[[str], int]]] = {
    "floor": ("floor: gunzip + decode, 1 process", floor),
    "read1": ("advisor, reading, 1 process", lambda path: read(path, 1)),
    "read2": ("advisor, reading, 2 decoding processes", lambda path: read(path, 2)),
    "full1": ("advisor, file to findings, 1 process", lambda path: analyze_file(path, 1)),
    "full2": (
        "advisor, file to findings, 2 decoding processes",
        lambda path: analyze_file(path, 2),
    ),
    "hta": ("HolisticTraceAnalysis, loading only", hta),
}


# -- how it is measured -------------------------------------------------------------------------


@dataclass
class Measurement:
    """Figures of one subject on one file."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0
    """Bytes; 0: not measured."""
    result: int = 0


def _start(subject: str, path: Path, python: str) -> subprocess.Popen[bytes]:
    # as installed: modules are compiled once, not in every run
    return subprocess.Popen(
        [python, str(Path(__file__).resolve()), "--child", subject, str(path)],
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
    )


def timed(subject: str, path: Path, python: str) -> tuple[float, float, int]:
    """Wall time, CPU time and result of one run; raises RuntimeError when it failed."""
    before = time.perf_counter()
    child = _start(subject, path, python)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - before
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{subject} failed with exit code {child.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, json.loads(output.splitlines()[-1])


def peak_memory(subject: str, path: Path, python: str) -> int:
    """Largest summed PSS of the process tree, bytes, by polling."""
    import psutil

    child = _start(subject, path, python)
    root = psutil.Process(child.pid)
    peak = 0
    while child.poll() is None:
        total = 0
        try:
            for process in [root, *root.children(recursive=True)]:
                total += _pss(process.pid) or process.memory_info().rss
        except psutil.Error:
            pass
        peak = max(peak, total)
        time.sleep(POLL_S)
    return peak


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(
    subjects: dict[str, str], path: Path, repeat: int, *, memory: bool
) -> dict[str, Measurement]:
    """Measure all subjects on one file, in turn, so that a busy moment of the machine affects
    all equally."""
    results = {subject: Measurement() for subject in subjects}
    for _ in range(repeat):
        for subject, python in subjects.items():
            wall, cpu, result = timed(subject, path, python)
            results[subject].wall.append(wall)
            results[subject].cpu.append(cpu)
            results[subject].result = result
    if memory:
        for subject, python in subjects.items():
            results[subject].peak = peak_memory(subject, path, python)
    return results


# -- how it is shown ----------------------------------------------------------------------------

COLUMNS = ("JSON", "what", "CPU s", "× floor", "wall s", "peak MB", "peak / JSON")


def rows(size: int, measurements: dict[str, Measurement]) -> list[tuple[str, ...]]:
    """Table rows of one file."""
    base = min(measurements["floor"].cpu)
    return [
        (
            f"{size / 1e6:.0f} MB",
            SUBJECTS[subject][0],
            f"{min(f.cpu):.2f}",
            f"{min(f.cpu) / base:.2f}",
            f"{min(f.wall):.2f}",
            f"{f.peak / 1e6:.0f}" if f.peak else "-",
            f"{f.peak / size:.2f}" if f.peak else "-",
        )
        for subject, f in measurements.items()
    ]


def table(lines: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    widths = [max(len(line[i]) for line in [COLUMNS, *lines]) for i in range(len(COLUMNS))]

    def row(cells: tuple[str, ...]) -> str:
        padded = [
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [("-" * (w + 2) if i < 2 else "-" * (w + 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([row(COLUMNS), f"|{'|'.join(rule)}|", *map(row, lines)])


def _available(python: str, code: str) -> bool:
    result = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return result.returncode == 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[100, 200, 400])
    parser.add_argument("--source", help="trace to repeat (see make_big.py)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="besides the floor")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--hta-python", help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--keep", type=Path, help="folder for the traces made, used again if there")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        subject, path = args.child
        print(json.dumps(SUBJECTS[subject][1](path)))
        return

    subjects = {"floor": sys.executable, "read1": sys.executable, "read2": sys.executable}
    if _available(sys.executable, "import advisor.advise.engine"):
        subjects |= {"full1": sys.executable, "full2": sys.executable}
    python = args.hta_python or sys.executable
    if _available(python, "import hta.trace_analysis"):
        subjects["hta"] = python
    if args.only:
        subjects = {k: v for k, v in subjects.items() if k == "floor" or k in args.only}

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for megabytes in args.mb:
            path, size = _trace(folder, megabytes, args.source)
            result = measure(subjects, path, args.repeat, memory=not args.no_memory)
            lines += rows(size, result)
            print(table(lines[-len(result) :]), flush=True)
    table_text = table(lines)
    if args.markdown:
        args.markdown.write_text(_page(table_text, args.source), encoding="utf-8")


def _trace(folder: Path, megabytes: float, source: str | None) -> tuple[Path, int]:
    """Make the trace unless it is there; its path and uncompressed size."""
    sys.path.insert(0, str(HERE))
    from make_big import default_source, make, unpack

    name = Path(source).name.split(".")[0] if source else "default"
    path = folder / f"{name}_{megabytes:.0f}mb.json.gz"
    note = path.with_suffix(".size")
    if path.exists() and note.exists():
        return path, int(note.read_text())
    _, size = make(path, megabytes, unpack(source) if source else default_source())
    note.write_text(str(size))
    return path, size


def _page(table_text: str, source: str | None) -> str:
    import msgspec
    import polars

    versions = (
        f"Python {platform.python_version()}, msgspec {msgspec.__version__}, "
        f"polars {polars.__version__}, {os.cpu_count()} cores"
    )
    origin = Path(source).name if source else "the default source of benchmarks/make_big.py"
    return (
        "# Benchmarks\n\n"
        f"Written by `benchmarks/bench_ingest.py` ({versions}).\n"
        f"The traces are {origin}, repeated with shifted times and ids.\n\n"
        f"{(__doc__ or '').split(chr(10) * 2)[1]}\n\n{table_text}\n"
    )


if __name__ == "__main__":
    main()

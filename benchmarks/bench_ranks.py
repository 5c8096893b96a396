"""The cost of a job of many ranks: time, memory of the driver, bytes that its workers send.

A trace of some 20 MB (steps of a public A100 recording with NCCL) is there once for each rank,
under as many names for one file: the rank is read from the name, and each name is read as any
file. Each figure is a process of its own, start-up and imports included. The memory is the most
that the process which asked has held (``VmHWM``), and the most that one of its workers has.

    python benchmarks/bench_ranks.py [--ranks 8 64 512] [--workers 1 2] [--source TRACE] [--write]

Beside it HolisticTraceAnalysis, given an interpreter that has it: it loads all ranks, in as many
processes as there are cores, and breaks their time down. Its memory is the most that its processes
held together, sampled (RSS), since all ranks stay in it.

    python benchmarks/bench_ranks.py --hta-python VENV/bin/python [--hta-ranks 8 64] [--write]

And one rank's trace of any size (``make_big.py``), read by `advisor analyze` as a file and as a job
of one rank. The memory is what all its processes hold together, sampled (PSS: what several share is
counted once).

    python benchmarks/bench_ranks.py --one-gb 4 [--write]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from public_traces import path_of

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "ranks.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
HTA_BEGIN, HTA_END = "<!-- hta: begin -->", "<!-- hta: end -->"
ONE_BEGIN, ONE_END = "<!-- one: begin -->", "<!-- one: end -->"
STEPS = 4
"""Steps kept of the recording's six: 20 MB of text."""


def make(source: Path, target: Path) -> int:
    """The first steps of a recording, as plain JSON; its bytes."""
    trace: dict[str, Any] = json.loads(gzip.decompress(source.read_bytes()))
    events: list[dict[str, Any]] = trace["traceEvents"]
    marks = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    ends = sorted({float(e["ts"]) + float(e["dur"]) for e in marks if "dur" in e})
    if len(ends) > STEPS:
        last = ends[STEPS - 1]
        trace["traceEvents"] = [e for e in events if float(e.get("ts", 0)) <= last]
    trace.pop("distributedInfo", None)  # the name tells the rank
    target.write_text(json.dumps(trace))
    return target.stat().st_size


def measure(folder: str, workers: int) -> dict[str, float]:
    """Run one job in this process."""
    started = time.monotonic()
    from advisor.advise.engine import Options, analyze
    from advisor.advise.ranks.job import RanksDone

    last = RanksDone(total=0)

    def progress(done: RanksDone) -> None:
        nonlocal last
        last = done

    analyze(folder, Options(workers=workers, on_progress=progress))
    seconds = time.monotonic() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "read": last.read,
        "moved": last.moved,
        "memory": _most_held(),
        "worker": children.ru_maxrss << 10,
        "cpu": children.ru_utime + children.ru_stime,
    }


def hta(folder: str) -> int:
    """HolisticTraceAnalysis: load, and its temporal breakdown; the ranks there are. Runs in the
    interpreter that has it."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    files = {int(path.stem.removeprefix("rank")): str(path) for path in Path(folder).iterdir()}
    loaded = TraceAnalysis(trace_files=files, trace_dir=folder)
    return len(loaded.get_temporal_breakdown(visualize=False))


def watch(command: list[str], *, shared_once: bool = False) -> dict[str, float]:
    """Time and memory of a command and its children: RSS, or PSS (slower to ask for)."""
    import psutil

    start_s, most = time.monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            most_bytes = 0
            for one in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.Error):
                    most_bytes += (
                        one.memory_full_info().pss if shared_once else one.memory_info().rss
                    )
            most = max(most, most_bytes)
            time.sleep(0.2 if shared_once else 0.1)
        messages = process.stderr.read().decode() if process.stderr else ""
    if process.returncode:
        raise SystemExit(f"{command[0]}: {messages.strip()[-500:] or process.returncode}")
    return {"seconds": time.monotonic() - start_s, "memory": most}


def _most_held() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


def run(folder: Path, workers: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(folder)]
    result = subprocess.run(
        [*command, "--workers", str(workers)], check=True, stdout=subprocess.PIPE, text=True
    )
    results: dict[str, float] = json.loads(result.stdout)
    return results


def table(size: int, rows: list[tuple[int, int, dict[str, float]]]) -> str:
    """Markdown."""
    lines = [
        "| ranks | workers | time | a rank | CPU time of workers, a rank | driver's memory | "
        "largest worker | bytes sent to the driver |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks, workers, measured in rows:
        seconds = measured["seconds"]
        lines.append(
            f"| {ranks} | {workers} | {seconds:,.1f} s | {seconds / ranks:.2f} s | "
            f"{measured['cpu'] / ranks:.2f} s | "
            f"{measured['memory'] / 2**20:,.0f} MiB | {measured['worker'] / 2**20:,.0f} MiB | "
            f"{measured['moved'] / 1e6:,.1f} MB |"
        )
    about = (
        f"A rank's trace has {size / 1e6:.1f} MB. Measured by `benchmarks/bench_ranks.py` on "
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}; the "
        f"load average was {os.getloadavg()[0]:.0f} when it began."
    )
    return "\n".join([about, "", *lines])


def main() -> None:
    """Measure, print, and write the page where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--source", type=Path, default=path_of("a100_train_6steps.json.gz"))
    parser.add_argument("--write", action="store_true", help="into docs/ranks.md")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--hta-python", help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--hta-ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--hta", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--one-gb", type=float, help="one trace of this size, 10^9 bytes, instead")
    args = parser.parse_args()
    if args.one_gb:
        one_trace(args.one_gb, write=args.write)
        return
    if args.hta:
        print(hta(args.hta))
        return
    if args.measure:
        print(json.dumps(measure(args.measure, args.workers[0])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        one_file = Path(temporary, "trace.json")
        size = make(args.source, one_file)

        def folder(ranks: int) -> Path:
            path = Path(temporary, str(ranks))
            if not path.is_dir():
                path.mkdir()
                for rank in range(ranks):
                    os.link(one_file, path / f"rank{rank}.json")
            return path

        if args.hta_python:
            beside(args.hta_python, [(n, folder(n)) for n in args.hta_ranks], args.write)
            return
        rows: list[tuple[int, int, dict[str, float]]] = []
        load = table(size, [])
        for ranks in args.ranks:
            for workers in args.workers:
                result = run(folder(ranks), workers)
                if result["read"] != ranks:
                    raise SystemExit(f"{ranks} ranks: only {result['read']:.0f} were read")
                rows.append((ranks, workers, result))
                print(ranks, workers, {k: round(v, 1) for k, v in result.items()}, file=sys.stderr)
    text = load.partition("\n")[0] + "\n\n" + table(size, rows).partition("\n\n")[2]
    show(text, BEGIN, END, write=args.write)


def beside(python: str, jobs: list[tuple[int, Path]], write: bool) -> None:
    """HolisticTraceAnalysis and ours on the same jobs, ours measured in the same way."""
    lines = [
        "| ranks | HolisticTraceAnalysis | its memory, all processes | advisor, 2 workers | "
        "its memory, all processes |",
        "|---:|---:|---:|---:|---:|",
    ]
    me = str(Path(__file__).resolve())
    for ranks, folder in jobs:
        hta = watch([python, me, "--hta", str(folder)])
        advisor = watch([sys.executable, me, "--measure", str(folder), "--workers", "2"])
        lines.append(
            f"| {ranks} | {hta['seconds']:,.1f} s | {hta['memory'] / 2**20:,.0f} MiB | "
            f"{advisor['seconds']:,.1f} s | {advisor['memory'] / 2**20:,.0f} MiB |"
        )
        print(lines[-1], file=sys.stderr)
    show("\n".join(lines), HTA_BEGIN, HTA_END, write=write)


def one_trace(gigabytes: float, *, write: bool) -> None:
    """Measure one rank's trace of that size, as a file and as a job."""
    load = os.getloadavg()[0]
    lines = [
        "| `advisor analyze` of one trace | size | time | memory, all processes | of its size |",
        "|---|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "rank0.json")
        make = [sys.executable, str(HERE / "make_big.py"), str(path)]
        subprocess.run([*make, "--mb", str(gigabytes * 1000)], check=True, stdout=sys.stderr)
        size = path.stat().st_size
        out = str(Path(temporary, "report.json"))
        for more in ([], ["--workers", "2"]):
            command = [sys.executable, "-m", "advisor", "analyze", str(path), *more]
            result = watch([*command, "--output", out], shared_once=True)
            lines.append(
                f"| {' '.join(more) or 'as it is'} | {size / 1e9:.2f} GB | "
                f"{result['seconds']:,.0f} s | {result['memory'] / 1e9:.2f} GB | "
                f"{result['memory'] / size:.2f} |"
            )
            print(lines[-1], file=sys.stderr)
    lines.append(f"\nThe load average was {load:.0f} when it began.")
    show("\n".join(lines), ONE_BEGIN, ONE_END, write=write)


def show(text: str, begin: str, end: str, *, write: bool) -> None:
    """Print, and write the page where that is wanted."""
    print(text)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()

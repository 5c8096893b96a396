"""Speed and memory of reading a memory snapshot, beside Python's own unpickler.

The file is written by the simulated allocator of ``advisor.testing.allocator``, in the layout of
PyTorch's own writer: a training loop of as many steps as make the wanted size. The floor is
``pickle.load``, which would run whatever a stranger put into the file, and builds no table. Each
figure is a process of its own, start-up and imports included: its CPU time, the better of two runs,
and its largest resident set (Linux).

    python benchmarks/bench_snapshot.py [--mb 10 100] [--file SNAPSHOT] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def unpickle(path: str) -> int:
    """Python's own, of a file that we wrote ourselves."""
    import pickle

    with Path(path).open("rb") as file:
        result = pickle.load(file)  # noqa: S301 - written above
    return sum(map(len, result["device_traces"]))


def read(path: str) -> int:
    """Our reader, to tables."""
    from advisor.read.formats.memory_snapshot.tables import read_snapshot
    from advisor.read.source import ByteSource

    return read_snapshot(ByteSource(path).blocks(), path).events.height


def analyze_file(path: str) -> int:
    """Read a file and build its report."""
    from advisor.advise.engine import analyze

    return len(analyze(path).memory)


WAYS: dict[str, Callable[[str], int]] = {
    "pickle.load": unpickle,
    "read": read,
    "analyze": analyze_file,
}


def make(path: Path, size: int) -> None:
    """A snapshot of about so many bytes."""
    from advisor.testing.allocator import GIB, FakeAllocator, Training

    m = FakeAllocator(total=80 * GIB)
    training = Training(m, layers=24)
    while len(m.events) * 86 < size:
        training.step()
    m.write(path)


def measure(way: str, path: Path) -> tuple[float, float]:
    """CPU seconds and megabytes of one process."""
    completed = subprocess.run(
        [sys.executable, __file__, "--one", way, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    result = json.loads(completed.stdout.splitlines()[-1])
    return result["cpu"], result["kb"] / 1e3


def one(way: str, path: str) -> None:
    """Measure in a process of its own."""
    WAYS[way](path)
    status = Path("/proc/self/status").read_text()  # getrusage has the parent's too
    most = int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps({"kb": most, "cpu": time.process_time()}))


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--file", type=Path, help="a snapshot of yours instead")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "PATH"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        one(*chosen.one)
        return
    lines = ["| snapshot | way | CPU s | memory | of the file |", "|---|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        files = [chosen.file] if chosen.file else []
        for size in [] if chosen.file else chosen.mb:
            files.append(Path(folder, f"{size}.pickle"))
            make(files[-1], size * 10**6)
        for file in files:
            large = file.stat().st_size / 1e6
            for way in WAYS:
                seconds, used = min(measure(way, file) for _ in range(2))
                lines.append(
                    f"| {large:.0f} MB | {way} | {seconds:.1f} | {used:.0f} MB "
                    f"| {used / large:.1f}× |"
                )
                print(lines[-1], flush=True)
    if chosen.markdown:
        chosen.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

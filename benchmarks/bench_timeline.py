"""The timeline's speed, measured in a browser: first paint, pan and zoom, and the server's part.

    python benchmarks/bench_timeline.py [--trace FILE]... [--million] [--moves 30]

Without ``--trace`` the public A100 trace (125,000 slices). ``--million`` adds one made of copies of
it (``make_big.py``) with more than 1,000,000 slices. Prints the table of docs/timeline.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from public_traces import path_of

MILLION_MB = 330

SERVE = """
import json, os, sys, threading, time
from advisor.measure import Analysis
from advisor.dashboard.server import Access
from advisor.dashboard.app import create_app
from advisor.dashboard.server import bind
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.timeline.routes import get_rank_timeline

def rss():
    with open("/proc/self/status") as lines:
        kept = {l.split(":")[0]: l.split(":")[1] for l in lines}
    return int(kept["VmRSS"].split()[0]) * 1024, int(kept["VmHWM"].split()[0]) * 1024

def size(index):
    columns = [index.start, index.end, index.name, index.slot, index.row, index.longest]
    columns += index.slice_of_row.values()
    for level in index.pyramid.values():
        columns += [level.first_run, *level.runs]
    for counter in index.counters:
        columns += [counter.ts, counter.value]
    return sum(column.nbytes for column in columns)

began = time.perf_counter()
session = DashboardSession([sys.argv[1]]).load()
loaded = session.entries[0].loaded
read = time.perf_counter() - began
trace = loaded.main.trace
tables = sum(f.estimated_size() for f in (trace.cpu, trace.gpu, trace.sync, trace.memory))
before = rss()[0]
build = None
if sys.argv[2] == "measure":
    began = time.perf_counter()
    line = get_rank_timeline(loaded, next(iter(loaded.analyses)), session.entries[0].version)
    build = time.perf_counter() - began
    print(json.dumps({"read": read, "build": build, "tables": tables, "index": size(line.index),
        "slices": len(line.index), "rss_before": before, "rss_after": rss()[0]}), flush=True)
    sys.exit()
access = Access()
server = bind(create_app(session, access).server, access, 0)
print(json.dumps({"address": server.address}), flush=True)
server.run()
"""

TIMED = """async ([moves, kind]) => {
  const t = advisorTimeline.current, out = [];
  const info = t.data.info, whole = info.last_ns - info.first_ns;
  const wait = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  for (let i = 0; i < moves; i++) {
    // as far as the answer that is there does not reach: each move is asked for and painted
    const span = kind === 'zoom' ? whole / Math.pow(2, 1 + (i % 9)) : whole / 8;
    const at = info.first_ns + (whole - span) * ((i * 7919) % 97) / 97;
    await wait();
    const began = performance.now();
    t.setView(at, at + span);
    await t.whenSettled();
    out.push([performance.now() - began, t.answer.ms, t.answer.slices.n, t.answer.runs.n]);
  }
  return out; }"""

MARK = "name => performance.getEntriesByName(name)[0].startTime"

FRAME = """() => { const t = advisorTimeline.current, out = [];
  for (let i = 0; i < 20; i++) { const b = performance.now();
    t.painter.drawLanes(); t.painter.drawOverlay();
    t.canvas.getContext('2d').getImageData(0, 0, 1, 1); out.push(performance.now() - b); }
  return out; }"""


def serve(trace: Path, mode: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The dashboard in a process of its own, and what it said of itself."""
    import json

    child = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(trace), mode], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, json.loads(child.stdout.readline())


def measure(browser: Any, trace: Path, moves: int) -> dict[str, float]:
    """Measure a trace: the figures of a row."""
    child, result = serve(trace, "measure")
    child.wait()
    child, up = serve(trace, "serve")
    try:
        address = up["address"].rstrip("/")
        firsts, frames_at = [], []
        for _ in range(6):  # the first time includes making the index; each with an empty cache
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{address}/timeline")
            page.locator(".tl-canvas").wait_for(state="attached")
            page.evaluate("() => advisorTimeline.current.whenSettled()")
            page.locator("#content #timeline .tl-canvas").wait_for(state="attached")
            firsts.append(page.evaluate(MARK, "advisor-timeline-painted"))
            frames_at.append(page.evaluate(MARK, "advisor-frame-ready"))
            if len(firsts) < 6:
                page.close()
        rows = {kind: page.evaluate(TIMED, [moves, kind]) for kind in ("zoom", "pan")}
        frames = page.evaluate(FRAME)
        page.close()
    finally:
        child.kill()
        child.wait()
    results: dict[str, float] = {
        "slices": result["slices"],
        "first": firsts[0],
        "again": statistics.median(firsts[1:]),
        "again_worst": max(firsts[1:]),
        "around": statistics.median(frames_at[1:]),
        "build": result["build"] * 1e3,
        "tables": result["tables"],
        "index": result["index"],
        "grown": result["rss_after"] - result["rss_before"],
        "frame": statistics.median(frames),
        "server": statistics.median(r[1] for kind in rows.values() for r in kind),
        "server_worst": max(r[1] for kind in rows.values() for r in kind),
    }
    for kind, row in rows.items():
        results[kind] = statistics.median(r[0] for r in row)
        results[f"{kind}_worst"] = max(r[0] for r in row)
    return results


def table(measured: list[tuple[str, dict[str, float]]]) -> str:
    """The figures as Markdown."""
    mb = 1e6
    lines = ["| | " + " | ".join(name for name, _ in measured) + " | wanted |"]
    lines.append("|---|" + "---|" * (len(measured) + 1))

    def row(label: str, text: Any, wanted: str = "") -> None:
        cells = " | ".join(text(f) for _, f in measured)
        lines.append(f"| {label} | {cells} | {wanted} |")

    row("slices", lambda f: f"{f['slices']:,.0f}")
    row(
        "first paint, index made on the way",
        lambda f: f"{f['first']:,.0f} ms",
        "1,500 ms at 100,000",
    )
    row(
        "first paint, index there, median (worst)",
        lambda f: f"{f['again']:,.0f} ({f['again_worst']:,.0f}) ms",
    )
    row("the page's frame around it", lambda f: f"{f['around']:,.0f} ms")
    row("making the index", lambda f: f"{f['build']:,.0f} ms")
    row("zoom, median (worst)", lambda f: f"{f['zoom']:.0f} ({f['zoom_worst']:.0f}) ms", "150 ms")
    row("pan, median (worst)", lambda f: f"{f['pan']:.0f} ({f['pan_worst']:.0f}) ms", "150 ms")
    row(
        "server, a view, median (worst)",
        lambda f: f"{f['server']:.1f} ({f['server_worst']:.1f}) ms",
        "30 ms",
    )
    row("painting a frame", lambda f: f"{f['frame']:.1f} ms")
    row("tables in memory", lambda f: f"{f['tables'] / mb:.0f} MB")
    row(
        "index on top of them",
        lambda f: f"{f['index'] / mb:.0f} MB ({f['index'] / f['tables']:.2f} of the tables)",
        "1.00 (2 in all)",
    )
    row("process grew by", lambda f: f"{f['grown'] / mb:.0f} MB")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", action="append", type=Path, default=[])
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--moves", type=int, default=30)
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    traces = args.trace or [path_of("a100_train_6steps.json.gz")]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        if args.million:
            sys.path.insert(0, str(Path(__file__).parent))
            from make_big import default_source, make

            big = Path(folder, "million.json.gz")
            make(big, MILLION_MB, default_source())
            traces = [*traces, big]
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        result = []
        for trace in traces:
            began = time.perf_counter()
            result.append((trace.name.split(".")[0], measure(browser, trace, args.moves)))
            print(f"{trace}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        browser.close()
    print(table(result))


if __name__ == "__main__":
    main()

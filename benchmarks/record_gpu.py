"""Recordings of every sample workload, slow and cured, and how right the advice about each is.

Each variant runs in a process of its own: steps are timed without a profiler (blocks of steps, the
device synchronised at their ends only), then a few are recorded. Then every recording is analysed,
and a table sets the measured gain beside the predicted one, misses included. What is there already
is not run again, so an interrupted run goes on where it stopped. Nothing is downloaded. With
--jobs N, N processes start and compile beside each other; one at a time measures and records.

    python benchmarks/record_gpu.py --output tests/data/h200        # make record-h200; any GPU
    python benchmarks/record_gpu.py --output tests/data/h200 --table     # analyse, tabulate
    python benchmarks/record_gpu.py --device cpu --only simple_cnn --output /tmp/tried

In the folder: WORKLOAD/VARIANT/ with the recording (at most --limit-kb a trace; options are dropped
until it fits), results.json, README.md with the table.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # it also runs where advisor is not installed

from advisor.core.errors import AdvisorError  # noqa: E402
from advisor.sample_workloads import Setup, Workload, catalogue, find  # noqa: E402

VARIANTS = ("slow", "cured")
RESULTS = "results.json"
Results = dict[str, Any]


# -- one variant, in a process of its own ---------------------------------------------------------


def ladder(workload: Workload) -> list[dict[str, Any]]:
    """Ways to record, the fullest first; the next one is for when the file is too large."""
    steps, fewer = workload.steps, min(workload.steps, max(3, workload.steps // 2))
    full: dict[str, Any] = {"steps": steps, "stacks": workload.stacks, "memory": True}
    ways = [
        full,
        {**full, "steps": fewer},
        {**full, "steps": fewer, "memory": False},
        {**full, "steps": fewer, "stacks": False},
        {**full, "steps": fewer, "stacks": False, "memory": False},
        {"steps": min(3, steps), "stacks": False, "memory": False},
    ]
    return [way for number, way in enumerate(ways) if way not in ways[:number]]


def run_one(name: str, variant: str, options: argparse.Namespace) -> None:
    """Time and record one variant; prints one line of JSON last."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    from advisor.sample_workloads import running

    # without msgspec no run can be recorded, but traces can
    has_msgspec = importlib.util.find_spec("msgspec") is not None
    recorder = running.record_run if has_msgspec else running.record
    workload = find(name)
    folder = options.output / name / variant
    scale = workload.default_scale(options.device) if options.scale is None else options.scale
    run = Setup(variant=variant, device=options.device, scale=scale, folder=str(options.output))  # type: ignore[arg-type]
    began = time.monotonic()
    results: Results = {"scale": scale}
    if options.jobs > 1 and workload.processes == 1:
        running.drive(name, run, 2)  # what starts and compiles needs no turn
    with turn(options.output):
        results["block_ms"] = running.measure(
            name, run, seconds=options.seconds, blocks=12, most=options.seconds * 5
        )
    results["median_ms"] = statistics.median(results["block_ms"])
    left_out: list[str] = []
    for way in ladder(workload):
        shutil.rmtree(folder, ignore_errors=True)
        with turn(options.output):
            files = recorder(name, run, folder, **way)
        largest = max(_pack(file) for file in files)
        results["recorded"] = {**way, "kb": round(largest / 1e3), "left_out": list(left_out)}
        if largest <= options.limit_kb * 1e3:
            break
        left_out = [f"{largest / 1e3:.0f} kB with {way}"]
    else:
        shutil.rmtree(folder)
        results["recorded"] = None
        results["error"] = f"no recording of at most {options.limit_kb} kB: {left_out[0]}"
    results["wall_s"] = round(time.monotonic() - began, 1)
    print("\n" + json.dumps(results), flush=True)


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """The GPU for this process alone, among those of --jobs."""
    with (folder / ".turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pack(file: Path) -> int:
    """Compress a trace as well as gzip can; its size."""
    import gzip

    data = gzip.decompress(file.read_bytes())
    file.write_bytes(gzip.compress(data, 9, mtime=0))
    return file.stat().st_size


# -- all of them ----------------------------------------------------------------------------------


def record_all(options: argparse.Namespace) -> None:
    """Run what is not there yet, one process after the other, within the time."""
    deadline = time.monotonic() + options.budget * 60
    results = load(options.output)
    results.setdefault("environment", environment(options.device))
    chosen = options.only or list(catalogue())
    for name in chosen:
        find(name)
    entries: Results = results.setdefault("workloads", {})
    due = [
        (name, variant)
        for name in chosen
        for variant in VARIANTS
        if options.again or not entries.setdefault(name, {}).get(variant, {}).get("recorded")
    ]

    def one(name: str, variant: str) -> Results:
        remaining_s = deadline - time.monotonic()
        if remaining_s < 20:
            return {"error": "not run: the time was up"}
        return spawn(name, variant, options, min(remaining_s, options.timeout))

    with ThreadPoolExecutor(options.jobs) as processes:
        running = [(name, variant, processes.submit(one, name, variant)) for name, variant in due]
        for name, variant, process in running:
            recording = entries.setdefault(name, {})[variant] = process.result()
            summary_line = recording.get("error") or f"{recording['median_ms']:.3f} ms per step"
            print(f"{name}, {variant}: {summary_line}", flush=True)
            save(options.output, results)
    (options.output / ".turn").unlink(missing_ok=True)
    save(options.output, results)


def spawn(name: str, variant: str, options: argparse.Namespace, seconds: float) -> Results:
    """Run a variant in a process group of its own, which is ended when it takes too long."""
    command = [sys.executable, __file__, "--one", name, variant, "--device", options.device]
    command += ["--output", str(options.output), "--limit-kb", str(options.limit_kb)]
    command += ["--seconds", str(options.seconds), "--jobs", str(options.jobs)]
    if options.scale is not None:
        command += ["--scale", str(options.scale)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"ended after {seconds:.0f} s"}
    lines = output.strip().splitlines()
    try:
        results: Results = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        messages = [line for line in errors.strip().splitlines() if line.strip()]
        return {"error": messages[-1][:300] if messages else f"exit code {process.returncode}"}
    return results


def environment(device: str) -> Results:
    """Hardware and software of the recordings; ``None``: unknown."""
    import torch

    results: Results = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        results["gpu"] = properties.name
        results["gpus"] = torch.cuda.device_count()
        results["memory_gib"] = round(properties.total_memory / 2**30, 1)
        results["cudnn"] = torch.backends.cudnn.version()
    return results


def load(folder: Path) -> Results:
    """The results so far."""
    file = folder / RESULTS
    if not file.exists():
        return {}
    results: Results = json.loads(file.read_text(encoding="utf-8"))
    return results


def save(folder: Path, results: Results) -> None:
    """Write whole or not at all."""
    temporary = folder / f".{RESULTS}.tmp"
    temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(folder / RESULTS)


# -- what the advice says of it -------------------------------------------------------------------


def analyze_all(options: argparse.Namespace) -> None:
    """Findings and prices of every recording, and the comparison with what was measured."""
    results = load(options.output)
    for name, entry in results.get("workloads", {}).items():
        for variant in VARIANTS:
            folder = options.output / name / variant
            if entry.get(variant, {}).get("recorded") and folder.is_dir():
                entry[variant]["advice"] = advice(folder)
        workload = catalogue().get(name)
        if workload is not None:
            entry["compared"] = compared(workload, entry)
    save(options.output, results)
    (options.output / "README.md").write_text(page(results, options.limit_kb), encoding="utf-8")


@contextmanager
def all_on_trial() -> Iterator[None]:
    """Rules that were only tried on synthetic examples are ranked like the others: this is their
    trial, and the controls are one for all of them."""
    from advisor.advise.rule_loading import load_rules

    kinds = {type(rule) for rule in load_rules(config={}) if rule.validation == "synthetic"}
    try:
        for kind in kinds:
            kind.validation = "recordings"
        yield
    finally:
        for kind in kinds:
            kind.validation = "synthetic"


def advice(folder: Path) -> Results:
    """Rules in order of rank, risks, notes; gains of the ranked ones as shares of the step."""
    from advisor.advise.engine import analyze
    from advisor.read import open_run

    try:
        with all_on_trial():
            report = analyze(open_run(str(folder)))
    except AdvisorError as error:
        return {"error": str(error)}
    step = report.scope.step_ns or None
    result = []
    for finding in report.findings:
        impact = finding.impact
        gain = None if impact is None else finding.marginal_gain_ns or impact.gain_ns
        ends = (None, None) if impact is None else (impact.low_ns, impact.high_ns)
        result.append(
            {
                "rule": finding.rule,
                "priority": finding.priority,
                "folded_under": finding.folded_under,
                "share": _share(gain, step),
                "low": _share(ends[0], step),
                "high": _share(ends[1], step),
                "where": next((f"{w.file}:{w.line}" for w in finding.where if w.file), None),
            }
        )
    return {
        "verdict": report.verdict,
        "step_ms": None if step is None else step / 1e6,
        "busy_share": report.busy_share,
        "findings": result,
        "risks": [finding.rule for finding in report.risks],
        "notes": [finding.rule for finding in report.notes],
    }


def _share(ns: float | None, step: float | None) -> float | None:
    return None if ns is None or step is None else ns / step


def compared(workload: Workload, entry: Results) -> Results:
    """Check the claims about a workload: each is true, false or ``None`` where it is unknown."""
    slow, cured = entry.get("slow", {}), entry.get("cured", {})
    claims: Results = {"measured": None, "predicted": None}
    if slow.get("median_ms") and cured.get("median_ms"):
        before = slow["median_ms"] / workload.samples[0]
        after = cured["median_ms"] / workload.samples[1]
        claims["measured"] = 1 - after / before
    advice, after_cure = slow.get("advice"), cured.get("advice")
    if advice and "error" not in advice:
        claims["place"] = place(workload.finds, advice)
        expected_findings = [
            f
            for f in advice["findings"]
            if f["rule"] in (*workload.finds, *workload.also)
            and f["priority"] is not None
            and f["share"] is not None
        ]
        if expected_findings:
            claims["predicted"] = sum(f["share"] for f in expected_findings)
            claims["low"] = sum(f["low"] or 0 for f in expected_findings)
            claims["high"] = sum(
                f["high"] if f["high"] is not None else f["share"] for f in expected_findings
            )
    if after_cure and "error" not in after_cure:
        if claims.get("place"):
            claims["gone"] = place(workload.finds, after_cure) in (None, "note")
        claims["left"] = [f["rule"] for f in after_cure["findings"] if f["priority"] is not None]
        claims["left"] += after_cure["risks"]
    if not workload.finds and advice and "error" not in advice:
        claims["silent"] = (
            not [f for f in advice["findings"] if f["priority"]] and not advice["risks"]
        )
    return claims


def place(rules: tuple[str, ...], advice: Results) -> str | None:
    """Place of the first of the rules: its rank, ``risk 1``, ``note`` or ``None``."""
    ranks = [
        f["priority"]
        for f in advice["findings"]
        if f["rule"] in rules and f["priority"] is not None
    ]
    if ranks:
        return str(min(ranks))
    for number, rule in enumerate(advice["risks"], 1):
        if rule in rules:
            return f"risk {number}"
    folded = [f["folded_under"] for f in advice["findings"] if f["rule"] in rules]
    if folded:
        return f"under {folded[0]}" if folded[0] else "unranked"
    return "note" if any(rule in advice["notes"] for rule in rules) else None


# -- the page -------------------------------------------------------------------------------------

HEAD = (
    "| workload | slow, ms | cured, ms | measured | predicted | range | place "
    "| cured: gone | left |"
)


def page(results: Results, limit_kb: int) -> str:
    """The table and what it means, as Markdown."""
    env = results.get("environment", {})
    machine = env.get("gpu") or f"CPU, {env.get('cpus')} cores"
    rows = [
        _row(name, entry, catalogue()[name])
        for name, entry in results.get("workloads", {}).items()
        if name in catalogue()
    ]
    problems = [
        f"- {name}, {variant}: {entry[variant]['error']}"
        for name, entry in results.get("workloads", {}).items()
        for variant in VARIANTS
        if entry.get(variant, {}).get("error")
    ]
    cut = [
        f"- {name}, {variant}: {entry[variant]['recorded']['left_out'][0]}; recorded with "
        f"{_way(entry[variant]['recorded'])}"
        for name, entry in results.get("workloads", {}).items()
        for variant in VARIANTS
        if (entry.get(variant, {}).get("recorded") or {}).get("left_out")
    ]
    parts = [
        "# Sample workloads, recorded",
        "<!-- Written by benchmarks/record_gpu.py. -->",
        f"{machine}; torch {env.get('torch')}, CUDA {env.get('cuda')}.",
        "Step times are medians over blocks of steps without a profiler, ± half the distance "
        "between the quartiles. *Measured*: the time that the cure really takes off the same work. "
        "*Predicted*: what `advisor analyze` says of the slow recording, for the findings that the "
        "cure deals with, with the ends of their ranges added up. *Place*: rank of the expected "
        "finding (rules that are notes so far, for want of a recording, are ranked here). *Gone*: "
        "it is not in the cured recording. *Left*: what is. `–`: not measured.",
        "\n".join([HEAD, "|---|---|---|---|---|---|---|---|---|", *rows]),
        summary(results),
    ]
    if problems:
        parts.append("## Not recorded\n\n" + "\n".join(problems))
    if cut:
        parts.append(f"## Recorded in part, to stay below {limit_kb} kB\n\n" + "\n".join(cut))
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """Share of the workloads for which each claim held, of those where it is known."""
    entries = {n: e for n, e in results.get("workloads", {}).items() if n in catalogue()}
    faulty = {n: e.get("compared", {}) for n, e in entries.items() if catalogue()[n].finds}
    controls = {n: e.get("compared", {}) for n, e in entries.items() if not catalogue()[n].finds}
    top = [c["place"] in ("1", "2", "risk 1", "risk 2") for c in faulty.values() if "place" in c]
    cured = [c["gone"] for c in faulty.values() if "gone" in c]
    silent = [c["silent"] for c in controls.values() if "silent" in c]
    inside = [
        c["low"] <= c["measured"] <= c["high"]
        for c in faulty.values()
        if c.get("predicted") is not None and c.get("measured") is not None
    ]
    lines = [
        f"- expected finding at first or second place: {sum(top)} of {len(top)}",
        f"- no longer there once cured: {sum(cured)} of {len(cured)}",
        f"- controls without a finding: {sum(silent)} of {len(silent)}",
        f"- measured gain inside the predicted range: {sum(inside)} of {len(inside)}",
    ]
    return "\n".join(lines)


def _row(name: str, entry: Results, workload: Workload) -> str:
    claims = entry.get("compared", {})
    range_text = "–"
    if claims.get("predicted") is not None:
        range_text = f"{claims['low']:.0%} to {claims['high']:.0%}"
    is_gone_text = {True: "yes", False: "**no**", None: "–"}[claims.get("gone")]
    where = claims.get("place") or ("–" if "place" not in claims else "**none**")
    if not workload.finds:
        is_gone_text = "–"
        where = {True: "silent", False: "**not silent**", None: "–"}[claims.get("silent")]
    cells = [
        name,
        _time(entry.get("slow", {})),
        _time(entry.get("cured", {})),
        _percent(claims.get("measured")),
        _percent(claims.get("predicted")),
        range_text,
        where,
        is_gone_text,
        ", ".join(claims.get("left", [])) or "–",
    ]
    return f"| {' | '.join(cells)} |"


def _time(one: Results) -> str:
    blocks = one.get("block_ms") or []
    if len(blocks) < 2:
        return "–"
    low, middle, high = statistics.quantiles(blocks, n=4)
    return f"{middle:.3g} ± {(high - low) / 2:.2g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _way(recorded: Results) -> str:
    without = [word for word in ("stacks", "memory") if not recorded[word]]
    return f"{recorded['steps']} steps" + (f", without {' and '.join(without)}" if without else "")


def main(arguments: list[str]) -> int:
    """Record, analyse and tabulate; the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--output", type=Path, default=Path("runs", "recorded"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--scale", type=float, help="default: by the device")
    parser.add_argument("--seconds", type=float, default=3.0, help="to time one variant")
    parser.add_argument("--timeout", type=float, default=150.0, help="s for one variant")
    parser.add_argument("--budget", type=float, default=24.0, help="minutes for all recordings")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once")
    parser.add_argument("--limit-kb", type=int, default=300, help="largest trace")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--table", action="store_true", help="analyse and tabulate only")
    parser.add_argument(
        "--snapshots", action="store_true", help="memory snapshots of small programs instead"
    )
    parser.add_argument("--one", nargs=2, metavar=("NAME", "VARIANT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        try:
            run_one(*options.one, options)
        except AdvisorError as error:
            print(error, file=sys.stderr)
            return 1
        except (RuntimeError, OSError, ValueError, ImportError):
            traceback.print_exc()
            return 1
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.table:
        import torch

        if options.device.startswith("cuda") and not torch.cuda.is_available():
            print("no CUDA device that PyTorch can use; try --device cpu", file=sys.stderr)
            return 2
        if options.snapshots:
            from record_snapshots import record_snapshots

            record_snapshots(options.output)
            return 0
        try:
            record_all(options)
        except AdvisorError as error:
            print(error, file=sys.stderr)
            return 2
    if importlib.util.find_spec("polars") is None:
        print(f"recorded in {options.output}; where polars is installed, run this with --table")
        return 0
    analyze_all(options)
    print(summary(load(options.output)))
    print(f"table: {options.output / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

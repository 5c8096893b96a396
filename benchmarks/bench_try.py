"""Every bundled workload that this machine can show, through ``advisor try``: does the knob that
is its cure win, and by what was promised?

    python benchmarks/bench_try.py [--only NAME] [--budget 120] [--write docs/accuracy.md]
        [--ledger]

Runs the command line itself. Workloads of several processes are left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from shipped_ledger import replace

from advisor.replay import ledger
from advisor.sample_workloads import Workload, catalogue
from advisor.tune.report import FILE, Trial, TrialReport

PROGRAM = """
import sys
from advisor.sample_workloads import Setup, find, load

def main():
    name, device = sys.argv[1:]
    setup = Setup(device=device, scale=find(name).default_scale(device))
    for _ in zip(range(1_000_000), load(name)(setup)):
        pass

if __name__ == "__main__":
    main()
"""
KNOBS = {
    "loader_bound": "workers",
    "simple_cnn": "workers",
    "worker_respawn": "loader-persistent",
    "gc_pauses": "gc-freeze",
    "eval_with_grad": "no-grad-evaluation",
    "recompilation": "compile-dynamic",
    "fp32_matmul": "matmul-precision",
    "nchw_convolution": "channels-last",
    "single_tensor_optimizer": "fused-optimizer",
    "pageable_copies": "loader-pinning",
    "unfused_pointwise": "compile",
    "fragmentation": "expandable-segments",
}
"""Workloads whose cure, by their own docstring, is a knob. The others are cured by other code; in
the healthy ones nothing may win."""


def run(workload: Workload, device: str, budget: int, folder: Path) -> TrialReport | str:
    """The report, or why there is none."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    out = folder / workload.name
    words = [sys.executable, "-m", "advisor", "try", "--budget", f"{budget}s", "--out", str(out)]
    result = subprocess.run(
        [*words, "--no-progress", str(script), workload.name, device],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * budget + 300,
    )
    if not (out / FILE).is_file():
        return result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "no report"
    return TrialReport.from_json((out / FILE).read_bytes())


def interval(low: float | None, high: float | None) -> str:
    """Format a range in per cent of the step."""
    return "–" if low is None or high is None else f"{100 * low:.0f} to {100 * high:.0f}%"


def row(workload: Workload, report: TrialReport | str) -> str:
    """A line of the table."""
    cure = KNOBS.get(workload.name)
    if isinstance(report, str):
        return f"| {workload.name} | {cure or '–'} | {report} | | | | |"
    tried = [t for t in report.trials if t.knob_setting.knob == cure]
    best = next((t for t in report.winners if t in tried), tried[0] if tried else None)
    won = ", ".join(f"`{t.name}`" for t in report.winners) or "none"
    if best is None:
        return f"| {workload.name} | {cure or '–'} | not tried | – | – | – | {won} |"
    none = "no estimate" if best.predicted is None else "unclear"
    in_range = {True: "yes", False: "no", None: none}[best.inside]
    return (
        f"| {workload.name} | `{best.name}` | {best.outcome}"
        f"{': ' + best.why if best.outcome == 'dropped' else ''} "
        f"| {interval(best.predicted_low, best.predicted_high)} "
        f"| {interval(best.gain_low, best.gain_high)} | {in_range} | {won} |"
    )


def summary(reports_by_name: dict[str, TrialReport | str]) -> str:
    """Summarize the reports in sentences."""
    reports = {name: r for name, r in reports_by_name.items() if isinstance(r, TrialReport)}
    cured = [n for n in reports if n in KNOBS]
    wins = [n for n in cured if any(t.knob_setting.knob == KNOBS[n] for t in reports[n].winners)]
    predicted: list[Trial] = [
        t
        for n in cured
        for t in reports[n].winners
        if t.knob_setting.knob == KNOBS[n] and t.inside is not None
    ]
    inside = sum(bool(t.inside) for t in predicted)
    known = catalogue()
    healthy = [n for n in reports if not known[n].finds]
    unchanged = [n for n in healthy if not reports[n].winners]
    return (
        f"A knob won in {len(wins)} of {len(cured)} workloads that a knob fixes. "
        f"Of {len(predicted)} winning settings with an estimate, {inside} were within the range. "
        f"{len(unchanged)} of {len(healthy)} healthy workloads were left alone.\n"
    )


def entries(reports_by_name: dict[str, TrialReport | str], folder: Path) -> list[ledger.Prediction]:
    """Entries of the runs' own ledgers, as ours."""
    return [
        msgspec.structs.replace(row, source="workload", program=name)
        for name in reports_by_name
        for row in ledger.read_ledger(folder / name / ledger.FILE).predictions
    ]


def main() -> None:
    """Run them, print the table, write it into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=int, default=120, help="seconds a workload")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ledger", type=Path, nargs="?", const=ledger.SHIPPED)
    args = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = (
        "| workload | knob | outcome | predicted | measured | inside | what won |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    result: dict[str, TrialReport | str] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for workload in catalogue().values():
            can_show = workload.shown_on == "cpu" or device == "cuda"
            if not re.search(args.only, workload.name) or not can_show or workload.processes > 1:
                continue
            result[workload.name] = run(workload, device, args.budget, folder)
            rows.append(row(workload, result[workload.name]))
            print(rows[-1], file=sys.stderr, flush=True)
        if args.ledger:
            replace(args.ledger, "workload", entries(result, folder))
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    text = f"PyTorch {torch.__version__}, {where}{load}. {summary(result)}\n{head}" + "\n".join(
        rows
    )
    print(text)
    if args.write:
        mark = "CUDA" if device == "cuda" else "CPU"
        begin, end = f"<!-- try {mark} begin -->", f"<!-- try {mark} end -->"
        before, _, rest = args.write.read_text().partition(begin)
        _, _, after = rest.partition(end)
        args.write.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    main()

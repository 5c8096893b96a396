"""Reports made by hand, as the engine would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from advisor.core.finding import Finding, Impact, Location, PassedCheck, SkippedCheck
from advisor.core.ranks import RankLine, Ranks
from advisor.core.report import Input, Report, Scope
from advisor.core.report_replay import HardPart, Replay
from advisor.core.report_time import Family, HostShare, IdleCause, TimeShare
from advisor.core.rule import Evidence

MS = 1_000_000

HOSTILE = [
    "\x1b[31mred\x1b[0m\x1b]0;owned\x07",
    "[bold red]markup[/bold red] [link=http://x]y[/link] :smile:",
    "`tick` | pipe | <script>alert(1)</script> & @everyone #1 ![x](http://y)",
    "two\nlines\r\tand\x00nul\x9b31m",
    "right\u202eto left\u2066 \u200bzero \ud800 half",
    "宽" * 80,
    "e\u0301\u0327" * 90,
    "void ns::kernel<4, " + "at::native::Functor<float, " * 30 + "int>(int, float*, char const*)",
    "x" * 500,
]
"""Names a trace may hold: commands to a terminal, markup of three kinds, wide and endless ones."""


def make_finding(number: int = 1, name: str | None = None, **changes: Any) -> Finding:
    """A finding with a gain of 40 ms / number of a 400 ms step; ``name`` goes wherever a trace's
    would."""
    gain = 40 * MS // number
    fields: dict[str, Any] = {
        "rule": f"rule-{number}",
        "title": name or f"Finding number {number} of the step",
        "summary": f"Each step waits for {name or 'something'} that a change of one line avoids.",
        "fix": f"Do the other thing instead of {name or 'this'}, and do it once a step only.",
        "code": f"step({name!r})\n    indented = True" if name else "step(quick=True)",
        "verify": "Profile again: the wait is gone.",
        "evidence": [
            Evidence("waited a step", gain, "ns"),
            Evidence("share of the step", 0.1 / number, "share", 0.05, "XProf"),
            Evidence("waits", 12.0, "count"),
            Evidence("kind", name or "loader", ""),
            Evidence("bandwidth", None, "GB/s"),
        ],
        "where": [
            Location(
                file=name or "/home/me/project/train.py",
                line=42,
                function=name or "train_step",
                op=name or "aten::item",
                kernel=name or "void at::native::vectorized_elementwise_kernel<4, F>(int, F)",
                step=name or "ProfilerStep#3",
                count=12,
                dur_ns=3 * MS,
            )
        ],
        "confidence": 0.8,
        "confidence_notes": ["only 2 steps measured"],
        "assumptions": ["the loader can be made faster"],
        "falsified_by": "a run without it that is as slow",
        "impact": Impact(
            currency="step_time",
            gain_ns=gain,
            low_ns=gain // 2,
            high_ns=gain,
            share=gain / (400 * MS),
            method="upper bound (exposed time)",
        ),
        "category": "host",
        "severity": "warning",
        "priority": number,
        "marginal_gain_ns": gain if number == 1 else gain // 2,
        "validation": "real traces",
    }
    return Finding(**{**fields, **changes})


def make_report(count: int = 1, name: str | None = None, **changes: Any) -> Report:
    """A report on six steps of 400 ms: 300 compute, 20 communication, 10 copies, 70 idle."""
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "status": "bottlenecks" if count else "healthy",
        "verdict": f"GPU busy 82% of a 400 ms step; first: {name or 'waiting'}, gain 40 ms.",
        "inputs": [
            Input(
                path=name or "/data/traces/rank0.json.gz",
                rank=0,
                window=0,
                windows=1,
                events_read=109_123,
                events_dropped={},
                bytes_read=40_000_000,
                truncated=False,
            )
        ],
        "scope": Scope(
            rank=0,
            step_source="ProfilerStep",
            steps_found=6,
            steps_used=5,
            outliers=[name or "ProfilerStep#5"],
            span_ns=2000 * MS,
            step_ns=400.0 * MS,
            step_min_ns=390 * MS,
            step_max_ns=412 * MS,
            step_median_ns=399.5 * MS,
            device=0,
            device_name=name or "NVIDIA A100-SXM4-40GB",
            device_known=True,
            devices_seen=1,
        ),
        "time": [
            TimeShare("compute", 300.0 * MS, 0.75),
            TimeShare("communication", 20.0 * MS, 0.05),
            TimeShare("copies", 10.0 * MS, 0.025),
            TimeShare("memset", 0.0, 0.0),
            TimeShare("idle", 70.0 * MS, 0.175),
        ],
        "busy_share": 0.825,
        "communication_ns": 80.0 * MS,
        "communication_overlap": 0.75,
        "idle": [
            IdleCause(name or "loader", 40.0 * MS, 0.1),
            IdleCause("dispatch", 20.0 * MS, 0.05),
            IdleCause("unknown", 10.0 * MS, 0.025),
        ],
        "unknown_idle_share": 1 / 7,
        "host": [
            HostShare("dispatch", 200.0 * MS, 0.5),
            HostShare("python", 120.0 * MS, 0.3),
            HostShare("loader", 80.0 * MS, 0.2),
        ],
        "families": [
            Family(name or "gemm", 150.0 * MS, 0.5, 200.0),
            Family("attention", 90.0 * MS, 0.3, 24.0),
            Family("elementwise", 60.0 * MS, 0.2, 610.5),
        ],
        "mfu": 0.38,
        "memory_peak_bytes": 30 << 30,
        "memory_capacity_bytes": 40 << 30,
        "findings": [make_finding(number, name) for number in range(1, count + 1)],
        "passed": [PassedCheck(text=f"97% of copies come from pinned memory: {name or 'fine'}")],
        "not_checked": [
            SkippedCheck(
                what=f"unfused attention of {name or 'the model'}",
                why="shapes were not recorded",
                record="record_shapes=True",
                rule="unfused-attention",
            )
        ],
        "limits": [f"3 events: {name or 'negative duration'}."],
    }
    return Report(**{**fields, **changes})


def make_replay(**changes: Any) -> Replay:
    """A replay that comes within 1.2% of the steps."""
    fields: dict[str, Any] = {
        "step_ns": 401.0 * MS,
        "measured_ns": 400.0 * MS,
        "step_error": 0.012,
        "starts": 9450,
        "explained": 0.98,
        "hard": [HardPart("syncs that waited", 60, 0.95, 1000.0, 75e6)],
        "waits": 0.16,
        "waits_explained": 0.97,
        "idle": 0.12,
        "idle_explained": None,
        "steps": 5,
        "of_steps": 5,
        "critical": {"host": 300.0 * MS, "compute": 101.0 * MS},
        "critical_after": {"compute": 343.3 * MS},
        "step_after_ns": 343.3 * MS,
        "busy_after_ns": 300.0 * MS,
    }
    return Replay(**{**fields, **changes})


def make_ranks(count: int, *, aligned: bool = True) -> Ranks:
    """``count`` ranks, each a little slower than the one before."""
    lines = [
        RankLine(
            rank=rank,
            step_ns=(400.0 + rank) * MS,
            busy_share=0.8 if aligned else None,
            communication_ns=20.0 * MS if aligned else None,
            idle_ns=70.0 * MS if aligned else None,
            last_share=rank / (10 * count) if aligned else None,
            caused_wait_ns=rank * 1.0 * MS if aligned else None,
        )
        for rank in range(count)
    ]
    note = "Ranks put on one clock." if aligned else "Skew is not measured: no collectives match."
    return Ranks(
        lines=lines, aligned=aligned, alignment_error_ns=2000.0 if aligned else None, note=note
    )


@pytest.fixture
def report() -> Callable[..., Report]:
    """Return ``report(count=1, name=None, **changes)``."""
    return make_report


@pytest.fixture
def replay() -> Callable[..., Replay]:
    """Return ``replay(**changes)``."""
    return make_replay


@pytest.fixture
def finding() -> Callable[..., Finding]:
    """Return ``finding(number=1, name=None, **changes)``."""
    return make_finding


@pytest.fixture
def ranks() -> Callable[..., Ranks]:
    """Return ``ranks(count, aligned=True)``."""
    return make_ranks


@pytest.fixture(params=HOSTILE, ids=range(len(HOSTILE)))
def hostile_name(request: pytest.FixtureRequest) -> str:
    """Each of the names that a trace may hold to do harm."""
    return str(request.param)

"""The cost of collectives on a training run, worked out from the trace file itself. It uses no
code of the project, only plain Python over the JSON events. Times in µs.

The host times of the trace are kept, but for the blocking copies: a copy of pageable memory to
the host holds its thread until it is done, and with it all that the host does later. Device work
starts at its launch (plus its measured latency, 8 µs at most) and not before what it waits for.
A trace like this does not record what else it waits for besides the work before it on its
stream, so both ends are worked out:

``"all"``: for all work of any stream that was launched before it and had ended when it started.
No order that was seen is given up, so collectives made free gain at least this.

``"none"``: for nothing. The host then never waits for another stream, so nothing that is done to
the device's other streams can gain more than this.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

CALL = 10.0
"""Upper limit of the cost of a call that need not wait, µs."""
LATENCY = 8.0
GAP = 1.0


class Job:
    """Steps, runtime calls and device work of a trace."""

    def __init__(self, path: str | Path) -> None:
        with gzip.open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
        self.steps = sorted(
            (e for e in events if e["name"].startswith("ProfilerStep#") and "ser" in e["cat"]),
            key=lambda e: e["ts"],
        )
        self.begin = self.steps[0]["ts"]
        self.end = self.steps[-1]["ts"] + self.steps[-1]["dur"]
        self.calls = sorted(
            (e for e in events if e["cat"] == "cuda_runtime" and self.begin <= e["ts"] < self.end),
            key=lambda e: e["ts"],
        )
        self.work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.of_call = {e["args"]["correlation"]: e for e in self.work}

    @property
    def lengths(self) -> list[float]:
        """Measured lengths of the steps: from start to start."""
        starts = [s["ts"] for s in self.steps] + [self.end]
        return [b - a for a, b in pairwise(starts)]

    def exposed_collectives(self) -> list[float]:
        """Exposed time of collectives by step: they run and nothing else does."""
        result = []
        for begin, length in zip([s["ts"] for s in self.steps], self.lengths, strict=True):
            points: list[tuple[float, int, int]] = []
            for e in self.work:
                a, b = max(begin, e["ts"]), min(begin + length, e["ts"] + e["dur"])
                if a < b:
                    which = 0 if is_collective(e) else 1
                    points += [(a, which, 1), (b, which, -1)]
            running, since, exposed_us = [0, 0], begin, 0.0
            for at, which, change in sorted(points):
                exposed_us += at - since if running[0] and not running[1] else 0.0
                running[which] += change
                since = at
            result.append(exposed_us)
        return result

    def replay(self, *, free: bool, order: str) -> list[float]:
        """Lengths of the steps on the host; ``free``: with collectives that take no time."""
        saved = 0.0
        last: dict[Any, float] = {}
        done: list[tuple[float, float]] = []  # (measured, new) end of what was launched
        bounds: list[float] = []
        for call in self.calls:
            while len(bounds) < len(self.steps) and self.steps[len(bounds)]["ts"] <= call["ts"]:
                bounds.append(self.steps[len(bounds)]["ts"] - saved)
            work = self.of_call.get(call["args"]["correlation"])
            if work is None:
                continue
            stream = work["args"]["stream"]
            now = call["ts"] - saved
            start = now + min(max(0.0, work["ts"] - call["ts"]), LATENCY)
            start = max(start, last.get(stream, 0.0) + GAP)
            if order == "all":
                ended = [new for old, new in done[-300:] if old <= work["ts"] + 1]
                start = max([start, *ended])
            end = start + (0.0 if free and is_collective(work) else work["dur"])
            last[stream] = max(last.get(stream, 0.0), end)
            until, ran = call["ts"] + call["dur"], work["ts"] + work["dur"]
            done.append((ran, end))
            if work["cat"] == "gpu_memcpy" and until >= ran - 2 and call["dur"] > CALL:
                lag = min(max(0.0, until - ran), CALL)
                saved = until - max(now + CALL, end + lag)
        bounds.append(self.end - saved)
        return [b - a for a, b in pairwise(bounds)]


def is_collective(work: dict[str, Any]) -> bool:
    """NCCL's kernels say what they are."""
    return "nccl" in work["name"].lower()

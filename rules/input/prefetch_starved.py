"""Workers are fast enough on average, but the prefetch queue runs empty between bursts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.recorded import (
    a_step,
    device_bound,
    find_loader,
    record,
    started_at,
    steps_seen,
    workers_of,
)
from advisor.rules.sources import CHOSEN, GPUPROF, TENSORBOARD, TRACEML
from advisor.testing import TraceBuilder


class PrefetchStarved(Rule):
    """The DataLoader's workers deliver enough batches on average, but some batches take so much
    longer that the prefetch queue runs empty. The loop then waits although workers idle at other
    times. A deeper queue bridges that.

    A step is starved when it waits for data for at least a tenth of the median step. The queue is
    the cause, and not the workers' speed, when the run has stretches in which nothing waits: of all
    stretches as long as the queue (workers x prefetch_factor, at least eight steps), at least 30 %
    have no starved step. A loader that is too slow throughout waits in each of them.

    Needs worker processes. The first batch of an epoch, for which workers are started, is left out:
    the steps that follow the start of an iterator do not count.
    """

    id = "prefetch-starved"
    title = "The DataLoader's prefetch queue runs empty at times"
    category = "input"
    knobs = ("loader-prefetch", "workers")
    reads_record = True
    silent_in = ("recorded/worker_respawn.cured", "recorded/workers.cured")
    references = ("https://pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",)

    min_steps = Threshold(50, "steps: fewer do not show stretches", CHOSEN)
    starved = Threshold(0.10, "of the median step, waiting for data", TRACEML)
    min_starved = Threshold(0.05, "of the steps", CHOSEN)
    min_p95_ms = Threshold(20.0, "ms of wait at the 95th percentile", GPUPROF)
    min_share = Threshold(0.05, "of the step", TENSORBOARD)
    free = Threshold(0.30, "of the stretches have no starved step", CHOSEN)

    fix = (
        "Prefetch more batches per worker. Where the order does not matter, let ready batches "
        "overtake a slow one (in_order=False, PyTorch 2.6). Watch host memory: it holds each "
        "prefetched batch."
    )
    verify = "Record again: fewer steps wait."
    falsified_by = "the same waits with twice the prefetch_factor"
    assumptions = ("workers have spare time between slow batches",)
    confidence = 0.65

    code = (
        "DataLoader(..., num_workers={workers}, prefetch_factor={twice},\n"
        "           persistent_workers=True)"
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for steps that wait among stretches that do not."""
        recorded = record(a)
        feed = find_loader(a)
        wait = recorded.phase("data")
        if feed is None or wait is None or len(wait) < self.min_steps or not recorded.median:
            return
        workers = workers_of(feed)
        if not workers or device_bound(a):
            return
        keep = ~_steps_at_start(a)[recorded.used]
        wait = wait[keep]
        if len(wait) < self.min_steps:
            return
        factor = feed.get("prefetch_factor")
        factor = factor if isinstance(factor, int) and factor > 0 else 2
        starved = wait >= self.starved * recorded.median
        length = max(8, workers * factor)
        stretches = [
            starved[i : i + length].any() for i in range(0, len(starved) - length + 1, length)
        ]
        share = float(wait.sum()) / float(recorded.dur[recorded.used].sum())
        p95 = float(np.quantile(wait, 0.95))
        if (
            len(stretches) < 3
            or float(np.mean(stretches)) > 1 - self.free
            or starved.mean() < self.min_starved
            or p95 < self.min_p95_ms * 1e6
            or share < self.min_share
        ):
            return
        lost = float(wait[starved].sum()) / len(wait)
        yield Finding(
            summary=(
                f"{starved.mean():.0%} of the steps wait for data, up to "
                f"{t.format_duration(wait.max())}, but {1 - float(np.mean(stretches)):.0%} of the "
                f"stretches of {length} steps do not wait. The queue is too short ({workers} "
                f"workers x prefetch_factor {factor}) for batches of very different cost."
            ),
            evidence=[
                Evidence(
                    "steps that wait", float(starved.mean()), "share", *self.limit("min_starved")
                ),
                Evidence("wait at the 95th percentile", p95, "ns", *self.limit("min_p95_ms", 1e6)),
                Evidence("share", share, "share", *self.limit("min_share"), per="step"),
                Evidence(
                    "stretches without a wait",
                    1 - float(np.mean(stretches)),
                    "share",
                    *self.limit("free"),
                ),
                Evidence("prefetched batches", workers * factor, "count"),
                steps_seen(recorded),
            ],
            impact=a_step(a, lost),
            code=self.code.format(workers=workers, twice=2 * factor),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Every thirtieth batch or so is slow."""
        return {"a slow batch now and then": _run(lambda n: n % 30 < 3)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Waits in every stretch; none; no workers; only where an epoch begins."""
        return {
            "a loader that is too slow throughout": (
                _run(lambda n: n % 3 == 0),
                "float(np.mean(stretches)) > 1 - self.free",
            ),
            "no waits": (_run(lambda n: False), "starved.mean() < self.min_starved"),
            "no workers": (_run(lambda n: n % 30 < 3, workers=0), "not workers"),
            "the first batch of an epoch": (
                _run(lambda n: n % 15 == 0, epochs=15),
                "starved.mean() < self.min_starved",
            ),
        }


def _steps_at_start(a: Analysis) -> np.ndarray:
    """Steps in which, or right before which, an iterator of a loader begins."""
    recorded = record(a)
    starts = np.array(
        sorted(started_at(e) for e in recorded.record.events if e.kind == "loader_iter"),
        dtype=np.int64,
    )
    end = recorded.ts + recorded.dur
    before = np.concatenate([[0], recorded.ts[:-1]]) if len(recorded.ts) else recorded.ts
    at_start: np.ndarray = np.searchsorted(starts, end) > np.searchsorted(starts, before)
    return at_start


def _run(slow: object, *, workers: int = 2, epochs: int = 0) -> TraceBuilder:
    assert callable(slow)
    b = TraceBuilder()
    r = b.record_of_run(cpus=8)
    r.event("loader", id=1, workers=workers, prefetch_factor=2)
    for n in range(240):
        if n == 0 or (epochs and n % epochs == 0):
            r.event("loader_iter", id=1)
        r.step(50 if slow(n) else 10, data=40 if slow(n) else 0.1)
    return b

"""DataLoader workers that are started again for each epoch, and whose queue runs empty."""

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, GPUPROF, TENSORBOARD, TRACEML
from advisor.rules.support.common import (
    find_iterator_start,
    find_loader,
    impact_over_run,
    impact_per_step,
    run_steps_of,
    steps_seen,
    time_of_restart,
    workers_of,
)
from advisor.testing import Examples, TraceBuilder

BEST_WAIT_QUANTILE = 0.25
"""Quantile of the waits that all batches reach at best, while workers that have just started fill
their queue. In short epochs most batches, and so the median, are from that time."""
DEFAULT_PREFETCH = 2
"""Batches that a worker makes ahead (``prefetch_factor``, PyTorch's default)."""


class WorkersRespawned(Rule):
    """A DataLoader with ``persistent_workers=False`` (the default) restarts its worker processes
    for every epoch. The first batch of the epoch waits for the processes and for its own loading.
    Where they are spawned, it also waits for the import of every module in them.

    The cost of an epoch's start is the measured time to end the old workers and start the new ones.
    The wait for its first batch beyond the median wait comes on top. The first epoch has to start
    workers in any case, so at least one more is needed. The rule reports 2% of the epochs' time and
    more. The time to end and start workers is certainly saved. The first batch still has to be
    fetched, unless the workers can fetch it while the previous epoch ends. So the lower end of the
    range is without it."""

    id = "workers-respawned"
    title = "DataLoader workers restart for every epoch"
    knobs = ("loader-persistent",)
    reads_record = True
    found_in = ("recorded/worker_respawn.slow",)
    silent_in = ("recorded/anomaly.cured", "recorded/gc_pauses.cured", "recorded/leak.cured")
    validation_note = (
        "CPU recordings, torch 2.13: the workload worker_respawn, and four epochs of 60 steps with "
        "two workers; silent with persistent_workers=True"
    )
    references = ("https://pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",)

    min_share = Threshold(0.02, "of the epochs' time", CHOSEN)
    min_epochs = Threshold(1, "epochs beyond the first", CHOSEN)
    min_factor = Threshold(5.0, "start and first wait over the median wait", CHOSEN)

    fix = (
        "Keep the workers alive between epochs. They keep their copy of the dataset: if it changes "
        "between epochs, pass the change on to them."
    )
    code = (
        "# once, before the loop over epochs\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., num_workers=2, persistent_workers=True)"
    )
    verify = "Record two epochs: the first step of the second takes as long as the others."
    falsified_by = "the same wait at the start of an epoch with persistent workers"
    confidence = 0.9

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        feed = find_loader(a)
        if feed is None or not workers_of(feed) or feed.get("persistent_workers") is not False:
            return
        starts = [
            event
            for event in run_steps.rank_record.events
            if event.kind == "loader_iter"
            and event.data.get("id") == feed.get("id")
            and not event.data.get("evaluation")
        ][1:]
        wait = run_steps.phases.get("data")
        if len(starts) < self.min_epochs or wait is None or not run_steps.count:
            return
        median_wait = float(np.median(wait[run_steps.used]))
        best_wait = float(np.quantile(wait[run_steps.used], BEST_WAIT_QUANTILE))
        workers = workers_of(feed) or 0
        filling = np.zeros(len(wait), dtype=bool)
        end = run_steps.ts + run_steps.dur
        costs, spawns = [], []
        for event in starts:
            first = int(np.searchsorted(end, find_iterator_start(event), side="right"))
            if first >= len(wait):
                continue
            spawns.append(time_of_restart(event))
            # the batch may be fetched in the step in which the iterator starts, or in the next
            waits = wait[first : first + 2]
            costs.append(max(0.0, float(waits.max()) - median_wait))
            filling[first : first + 2 + workers * DEFAULT_PREFETCH] = True
        if len(costs) < self.min_epochs:
            return
        first_step = max(int(np.searchsorted(end, find_iterator_start(starts[0]))), 0)
        total = float((run_steps.dur + run_steps.column("evaluation"))[first_step:].sum())
        start_costs = np.array(costs) + np.array(spawns)
        lost = float(start_costs.sum())
        upper = float(np.sum(spawns)) + float(np.maximum(0.0, wait[filling] - best_wait).sum())
        if lost < self.min_share * total or float(np.median(start_costs)) < self.min_factor * max(
            median_wait, 1.0
        ):
            return
        yield Finding(
            summary=(
                f"Each of {t.count_noun(len(costs), 'epoch')} after the first spends "
                f"{t.format_duration(float(np.mean(start_costs)))} on average on restarting "
                f"{workers_of(feed)} workers and waiting for their first batch: {lost / total:.0%} "
                f"of the {t.format_duration(total)} after it."
            ),
            evidence=[
                Evidence("time lost at the starts of epochs", lost, "ns"),
                self.compare("time lost, share of the epochs' time", lost / total, "min_share"),
                Evidence("wait for a first batch, median", float(np.median(costs)), "ns"),
                Evidence("wait for a batch, median", median_wait, "ns"),
                Evidence("ending and starting workers, median", float(np.median(spawns)), "ns"),
                self.compare("epochs after the first", len(costs), "min_epochs", "count"),
            ],
            impact=impact_over_run(
                lost,
                low=min(lost, float(np.sum(spawns))),
                high=max(lost, upper),
                method="time of the first batches of epochs beyond the others",
                total=total,
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a second for each of three epochs": _build_run(),
            "the start is between two steps": _build_run(wait=30, between=700),
            "short epochs whose starts are recorded two steps later": _build_run(
                epochs=20, steps=4, wait=15, usual=1, spawn=18, between=31, late=2
            ),
            "persistent workers": (
                _build_run(persistent=True, wait=20),
                "feed.get('persistent_workers') is not False",
            ),
            "no workers": (_build_run(workers=0), "not workers_of(feed)"),
            "one epoch": (_build_run(epochs=1), "len(starts) < self.min_epochs"),
            "long epochs": (_build_run(steps=8000, epochs=3), "min_share"),
            "the iterators are of validation": (
                _build_run(evaluation=True),
                "len(starts) < self.min_epochs",
            ),
        }


def _build_run(
    *,
    workers: int = 4,
    epochs: int = 4,
    steps: int = 50,
    wait: float = 1000,
    persistent: bool = False,
    evaluation: bool = False,
    between: float = 0.0,
    usual: float = 0.2,
    spawn: float = 600,
    late: int = 0,
) -> TraceBuilder:
    """Build a run. ``late`` is the number of steps before an epoch's start is recorded; times in
    ms."""
    b = TraceBuilder()
    r = b.record_of_run(cpus=8)
    r.event("loader", id=1, workers=workers, persistent_workers=persistent)
    for epoch in range(epochs):
        fields = {
            "id": 1,
            "workers_started_ns": round(spawn * 1e6),
            "evaluation": evaluation and epoch > 0,
        }
        if late:
            fields["began_ns"] = r.now
        else:
            r.event("loader_iter", **fields)
        r.step(wait + 20, data=wait, evaluation=between)
        r.steps(max(0, late - 1), 20, data=usual)
        if late:
            r.event("loader_iter", **fields)
        r.steps(steps - max(1, late), 20, data=usual)
    return b


class PrefetchStarved(Rule):
    """The DataLoader's workers deliver enough batches on average, but some batches take so much
    longer that the prefetch queue runs empty. The loop then waits although workers idle at other
    times. A deeper queue bridges that.

    A step is starved when it waits for data for at least a tenth of the median step. The queue is
    the cause, and not the workers' speed, when the run has stretches in which no step waits. At
    least 30% of all stretches as long as the queue (workers x prefetch_factor, at least eight
    steps) have no starved step. A loader that is too slow throughout waits in each of them.

    The rule needs worker processes. The first batch of an epoch, for which workers are started, is
    left out. The steps that follow the start of an iterator do not count."""

    id = "prefetch-starved"
    title = "The DataLoader's prefetch queue runs empty at times"
    knobs = ("loader-prefetch", "workers")
    reads_record = True
    silent_in = ("recorded/worker_respawn.cured", "recorded/workers.cured")
    references = ("https://pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",)

    min_steps = Threshold(50, "steps: fewer do not show stretches", CHOSEN)
    min_wait_share = Threshold(0.10, "of the median step, waiting for data", TRACEML)
    min_starved = Threshold(0.05, "of the steps", CHOSEN)
    min_p95_ms = Threshold(20.0, "ms of wait at the 95th percentile", GPUPROF)
    min_share = Threshold(0.05, "of the step", TENSORBOARD)
    min_unstarved_share = Threshold(0.30, "of the stretches have no starved step", CHOSEN)

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
        "# keep your other arguments\n"
        "loader = DataLoader(..., num_workers={workers},\n"
        "                    prefetch_factor={twice}, persistent_workers=True)"
    )

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        feed = find_loader(a)
        wait = run_steps.phase("data")
        if feed is None or wait is None or len(wait) < self.min_steps or not run_steps.median:
            return
        workers = workers_of(feed)
        if not workers or a.is_device_bound:
            return
        is_kept = ~_find_steps_at_start(a)[run_steps.used]
        wait = wait[is_kept]
        if len(wait) < self.min_steps:
            return
        factor = feed.get("prefetch_factor")
        factor = factor if isinstance(factor, int) and factor > 0 else 2
        starved = wait >= self.min_wait_share * run_steps.median
        length = max(8, workers * factor)
        stretches = [
            starved[i : i + length].any() for i in range(0, len(starved) - length + 1, length)
        ]
        share = float(wait.sum()) / float(run_steps.dur[run_steps.used].sum())
        p95 = float(np.quantile(wait, 0.95))
        if (
            len(stretches) < 3
            or float(np.mean(stretches)) > 1 - self.min_unstarved_share
            or starved.mean() < self.min_starved
            or p95 < self.min_p95_ms * 1e6
            or share < self.min_share
        ):
            return
        lost_ns = float(wait[starved].sum()) / len(wait)
        yield Finding(
            summary=(
                f"{starved.mean():.0%} of the steps wait for data, up to "
                f"{t.format_duration(wait.max())}, but {1 - float(np.mean(stretches)):.0%} of the "
                f"stretches of {length} steps do not wait. The queue is too short ({workers} "
                f"workers x prefetch_factor {factor}) for batches of very different cost."
            ),
            evidence=[
                self.compare("steps that wait", float(starved.mean()), "min_starved"),
                self.compare("wait at the 95th percentile", p95, "min_p95_ms", "ns", times=1e6),
                self.compare("time of these waits, share", share, "min_share", per="step"),
                self.compare(
                    "stretches without a wait", 1 - float(np.mean(stretches)), "min_unstarved_share"
                ),
                Evidence("prefetched batches", workers * factor, "count"),
                steps_seen(run_steps),
            ],
            impact=impact_per_step(a, lost_ns),
            code=self.code.format(workers=workers, twice=2 * factor),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a slow batch now and then": _build_prefetch_run(lambda n: n % 30 < 3),
            "a loader that is too slow throughout": (
                _build_prefetch_run(lambda n: n % 3 == 0),
                "float(np.mean(stretches)) > 1 - self.min_unstarved_share",
            ),
            "no waits": (_build_prefetch_run(lambda _: False), "starved.mean() < self.min_starved"),
            "no workers": (_build_prefetch_run(lambda n: n % 30 < 3, workers=0), "not workers"),
            "the first batch of an epoch": (
                _build_prefetch_run(lambda n: n % 15 == 0, epochs=15),
                "starved.mean() < self.min_starved",
            ),
        }


def _find_steps_at_start(a: Analysis) -> np.ndarray:
    """Return the steps in which, or right before which, an iterator of a loader begins."""
    run_steps = run_steps_of(a)
    starts = np.array(
        sorted(
            find_iterator_start(e) for e in run_steps.rank_record.events if e.kind == "loader_iter"
        ),
        dtype=np.int64,
    )
    end = run_steps.ts + run_steps.dur
    previous_start = np.concatenate([[0], run_steps.ts[:-1]]) if len(run_steps.ts) else run_steps.ts
    at_start: np.ndarray = np.searchsorted(starts, end) > np.searchsorted(starts, previous_start)
    return at_start


def _build_prefetch_run(slow: object, *, workers: int = 2, epochs: int = 0) -> TraceBuilder:
    assert callable(slow)
    b = TraceBuilder()
    r = b.record_of_run(cpus=8)
    r.event("loader", id=1, workers=workers, prefetch_factor=2)
    for n in range(240):
        if n == 0 or (epochs and n % epochs == 0):
            r.event("loader_iter", id=1)
        r.step(50 if slow(n) else 10, data=40 if slow(n) else 0.1)
    return b

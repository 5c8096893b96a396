"""DataLoader workers are restarted for every epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.core.run_directory import LARGEST
from advisor.measure import Analysis
from advisor.rules.recorded import find_loader, over_the_run, record, started_at, workers_of
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder

BEST_WAIT = 0.25
"""Quantile of the waits that all batches come down to at best, while workers that have just started
fill their queue. In short epochs most batches, and so the median, are from that time."""
PREFETCH = 2
"""Batches that a worker makes ahead (``prefetch_factor``, PyTorch's default)."""


class WorkersRespawned(Rule):
    """A DataLoader with ``persistent_workers=False`` (the default) restarts its worker processes
    for every epoch. The first batch of the epoch waits for the processes, for the import of every
    module in them where they are spawned, and for its own loading.

    The cost of an epoch's start is the measured time to end the old workers and start the new ones,
    and the wait for its first batch beyond the median wait. The first epoch has to start workers in
    any case; at least one more is needed. Reported from 2 % of the time of the epochs. Ending and
    starting workers is saved for certain. The first batch still has to be fetched, unless the
    workers can fetch it while the previous epoch ends, so the lower end of the range is without it.
    """

    id = "workers-respawned"
    title = "DataLoader workers restart for every epoch"
    category = "input"
    knobs = ("loader-persistent",)
    reads_record = True
    found_in = ("recorded/worker_respawn.slow",)
    silent_in = (
        "recorded/worker_respawn.cured",
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/leak.cured",
    )
    validated_on = (
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
    code = "DataLoader(..., persistent_workers=True)"
    verify = "Record two epochs: the first step of the second takes as long as the others."
    falsified_by = "the same wait at the start of an epoch with persistent workers"
    confidence = 0.9

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Add up the cost of the starts of epochs."""
        recorded = record(a)
        feed = find_loader(a)
        if feed is None or not workers_of(feed) or feed.get("persistent_workers") is not False:
            return
        starts = [
            event
            for event in recorded.record.events
            if event.kind == "loader_iter"
            and event.data.get("id") == feed.get("id")
            and not event.data.get("evaluation")
        ][1:]
        wait = recorded.phases.get("data")
        if len(starts) < self.min_epochs or wait is None or not recorded.count:
            return
        usual = float(np.median(wait[recorded.used]))
        best_wait = float(np.quantile(wait[recorded.used], BEST_WAIT))
        workers = workers_of(feed) or 0
        filling = np.zeros(len(wait), dtype=bool)
        end = recorded.ts + recorded.dur
        costs, spawns = [], []
        for event in starts:
            first = int(np.searchsorted(end, started_at(event), side="right"))
            if first >= len(wait):
                continue
            both = (event.data.get(name) for name in ("workers_ended_ns", "workers_started_ns"))
            spawns.append(sum(map(_duration, both)))
            # the batch may be fetched in the step in which the iterator starts, or in the next
            near = wait[first : first + 2]
            costs.append(max(0.0, float(near.max()) - usual))
            filling[first : first + 2 + workers * PREFETCH] = True
        if len(costs) < self.min_epochs:
            return
        begin = max(int(np.searchsorted(end, started_at(starts[0]))), 0)
        time = float((recorded.dur + recorded.column("evaluation"))[begin:].sum())
        start_costs = np.array(costs) + np.array(spawns)
        lost = float(start_costs.sum())
        upper = float(np.sum(spawns)) + float(np.maximum(0.0, wait[filling] - best_wait).sum())
        if lost < self.min_share * time or float(np.median(start_costs)) < self.min_factor * max(
            usual, 1.0
        ):
            return
        yield Finding(
            summary=(
                f"Each of {t.count_noun(len(costs), 'epoch')} after the first spends "
                f"{t.format_duration(float(np.median(start_costs)))} on restarting "
                f"{workers_of(feed)} workers and waiting for their first batch: {lost / time:.1%} "
                "of the time."
            ),
            evidence=[
                Evidence("time lost", lost, "ns"),
                Evidence(
                    "share of the epochs' time", lost / time, "share", *self.limit("min_share")
                ),
                Evidence("wait for a first batch, median", float(np.median(costs)), "ns"),
                Evidence("wait for a batch, median", usual, "ns"),
                Evidence("ending and starting workers, median", float(np.median(spawns)), "ns"),
                Evidence("epochs after the first", len(costs), "count", *self.limit("min_epochs")),
            ],
            impact=over_the_run(
                lost,
                low=min(lost, float(np.sum(spawns))),
                high=max(lost, upper),
                method="time of the first batches of epochs beyond the others",
            ),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Three epochs of fifty steps, each of which begins with a second of waiting."""
        return {
            "a second for each of three epochs": _run(),
            "the start lies between two steps": _run(wait=30, between=700),
            "short epochs whose starts are recorded two steps later": _run(
                epochs=20, steps=4, wait=15, usual=1, spawn=18, between=31, late=2
            ),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Workers that stay; no workers; one epoch; long epochs; validation loops."""
        return {
            "persistent workers": (
                _run(persistent=True, wait=20),
                "feed.get('persistent_workers') is not False",
            ),
            "no workers": (_run(workers=0), "not workers_of(feed)"),
            "one epoch": (_run(epochs=1), "len(starts) < self.min_epochs"),
            "long epochs": (_run(steps=8000, epochs=3), "min_share"),
            "the iterators are of validation": (
                _run(evaluation=True),
                "len(starts) < self.min_epochs",
            ),
        }


def _duration(value: object) -> float:
    """A measured duration, ns; 0 for anything else."""
    known = isinstance(value, int | float) and 0 <= value < LARGEST
    return float(value) if known and isinstance(value, int | float) else 0.0


def _run(
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
    """``late``: steps after which the start of an epoch is recorded; all times ms."""
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

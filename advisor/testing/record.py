"""RecordBuilder: builds the recorder's files of a run in code."""

from collections.abc import Callable
from typing import Any

from advisor.core.run_directory import (
    Event,
    GpuSample,
    HostSample,
    RankInfo,
    RankRecord,
    Sample,
    StepRow,
)

MS = 1_000_000


class RecordBuilder:
    """Builder of steps, samples and events of one rank on one clock. Durations are milliseconds.

    >>> r = RecordBuilder(Rank(cpus=8))
    >>> r.event("loader", id=1, workers=2, persistent_workers=False)
    >>> r.steps(100, 20, data=5)
    >>> record = r.build()"""

    def __init__(self, rank: RankInfo | None = None) -> None:
        self.rank = rank or RankInfo()
        self.now = 1_000_000_000
        self._steps: list[StepRow] = []
        self._events: list[Event] = []
        self._samples: list[Sample] = []
        self._telemetry: list[
            tuple[Callable[[float], GpuSample | None], Callable[[float], HostSample | None]]
        ] = []

    def step(
        self,
        ms: float,
        *,
        window: int | None = None,
        gc: float = 0.0,
        evaluation: float = 0.0,
        fields: dict[str, Any] | None = None,
        **phases: float,
    ) -> None:
        """Add a step. ``phases``: milliseconds of each phase; the remaining time is ``other``.
        ``fields``: other fields of :class:`~advisor.core.run_directory.StepRow`."""
        dur = round(ms * MS)
        phase_ns = {name: round(part * MS) for name, part in phases.items()}
        phase_ns["other"] = dur - sum(phase_ns.values())
        self.now += round(evaluation * MS)
        self._steps.append(
            StepRow(
                n=len(self._steps),
                t=self.now,
                dur=dur,
                phases=phase_ns,
                window=window,
                gc=round(gc * MS),
                evaluation=round(evaluation * MS),
                **(fields or {}),
            )
        )
        self.now += dur

    def steps(self, count: int, ms: float, **same: Any) -> None:
        """Add several equal steps."""
        for _ in range(count):
            self.step(ms, **same)

    def event(self, kind: str, **data: Any) -> None:
        """Add an event at the current time."""
        self._events.append(Event(t=self.now, kind=kind, data=data))

    def watch(
        self,
        gpu: GpuSample | Callable[[float], GpuSample | None] | None = None,
        host: HostSample | Callable[[float], HostSample | None] | None = None,
    ) -> None:
        """Add telemetry over the whole run: a constant sample, or a function of the elapsed share
        of the run (0 to 1)."""
        self._telemetry.append(
            (gpu if callable(gpu) else lambda _: gpu, host if callable(host) else lambda _: host)
        )

    def build(self, *, samples: int = 40) -> RankRecord:
        """Return the record, with ``samples`` telemetry samples."""
        start = self._steps[0].t if self._steps else self.now
        result = list(self._samples)
        for gpu, host in self._telemetry:
            for number in range(samples):
                share = number / max(1, samples - 1)
                gpu_sample = gpu(share)
                time = start + round(share * (self.now - start))
                result.append(
                    Sample(
                        t=time, gpus=[] if gpu_sample is None else [gpu_sample], host=host(share)
                    )
                )
        return RankRecord(
            rank=self.rank, steps=self._steps, samples=result, events=self._events, folder="<run>"
        )

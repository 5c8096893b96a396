"""Jobs written as code, run event by event: an oracle that shares nothing with what is tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.measure.ranks.summary_schema import (
    Advice,
    Collectives,
    KernelSummary,
    RankSummary,
    StepSummary,
    pack,
)

MS = 1_000_000
BASE = 1_700_000_000 * 10**9


@dataclass
class Work:
    """Own time of a rank, ns, by class of ``RankSummary.per_step``."""

    ns: float
    name: str = "compute"


@dataclass
class Collective:
    """A collective of some ranks; ns from the last arrival to the end."""

    group: str
    members: tuple[int, ...]
    transfer: float
    kind: str = "all_reduce"
    message: int = 1 << 20


Item = Work | Collective
Program = Callable[[int, int], Sequence[Item]]
"""Maps (rank, step) to the work of that step."""


@dataclass
class JobRun:
    """The result of a run."""

    summaries: list[RankSummary]
    step_ns: float
    """Mean over ranks and steps, on the true clock."""
    waited: dict[int, float] = field(default_factory=dict)


def run(
    ranks: int,
    steps: int,
    program: Program,
    *,
    shift: Callable[[int], float] = lambda rank: 0.0,
    drift: Callable[[int], float] = lambda rank: 0.0,
    host: Callable[[int], str] = lambda rank: f"node-{rank // 8:02d}",
    path: Callable[[int], str] = lambda rank: f"rank{rank}.json",
    kernels: Callable[[int], dict[str, KernelSummary]] = lambda rank: {},
    findings: Callable[[int], list[Advice]] = lambda rank: [],
    sequenced: bool = True,
) -> JobRun:
    """Simulate a job: a Collective ends for all ranks at the last arrival plus its transfer."""
    queue = {r: [(s, item) for s in range(steps) for item in program(r, s)] for r in range(ranks)}
    at = dict.fromkeys(range(ranks), 0)
    now = dict.fromkeys(range(ranks), 0.0)
    start_times: dict[int, list[float]] = {r: [] for r in range(ranks)}
    met: dict[int, list[tuple[Collective, int, float, float, float]]] = {
        r: [] for r in range(ranks)
    }
    spent: dict[int, list[dict[str, float]]] = {r: [] for r in range(ranks)}
    own_time = dict.fromkeys(range(ranks), 0.0)
    waiting: dict[str, dict[int, float]] = {}
    blocked = dict.fromkeys(range(ranks), False)

    def advance_rank(rank: int) -> Collective | None:
        while at[rank] < len(queue[rank]):
            step, item = queue[rank][at[rank]]
            while len(start_times[rank]) <= step:
                start_times[rank].append(now[rank])
                spent[rank].append({})
                own_time[rank] = 0.0
            if isinstance(item, Collective):
                waiting.setdefault(item.group, {})[rank] = now[rank]
                blocked[rank] = True
                return item
            now[rank] += item.ns
            own_time[rank] += item.ns
            spent[rank][step][item.name] = float(spent[rank][step].get(item.name, 0.0) + item.ns)
            at[rank] += 1
        return None

    todo = list(range(ranks))
    while todo:
        ready_ranks: list[int] = []
        for rank in todo:
            item = advance_rank(rank)
            if item is None or len(waiting[item.group]) < len(item.members):
                continue
            arrivals = waiting.pop(item.group)
            done = max(arrivals.values()) + item.transfer
            for member, came in arrivals.items():
                step, other_item = queue[member][at[member]]
                assert isinstance(other_item, Collective)
                met[member].append((other_item, step, came, done, own_time[member]))
                own_time[member] = 0.0
                now[member] = done
                spent[member][step]["communication"] = spent[member][step].get(
                    "communication", 0.0
                ) + float(done - came)
                at[member] += 1
                blocked[member] = False
                ready_ranks.append(member)
        todo = ready_ranks
    assert all(at[r] == len(queue[r]) for r in range(ranks)), "the programs do not fit together"
    summaries = []
    for rank in range(ranks):
        ends = [*start_times[rank][1:], now[rank]]

        def to_rank_clock(t: float, rank: int = rank) -> int:
            return BASE + round(t + shift(rank) + drift(rank) * t)

        names = sorted({name for step in spent[rank] for name in step})
        lines = [
            StepSummary(f"ProfilerStep#{n}", to_rank_clock(b), to_rank_clock(e))
            for n, (b, e) in enumerate(zip(start_times[rank], ends, strict=True))
        ]
        per_step = {
            name: pack(np.array([round(step.get(name, 0.0)) for step in spent[rank]], np.int64))
            for name in names
        }
        mean = {name: sum(step.get(name, 0.0) for step in spent[rank]) / steps for name in names}
        summaries.append(
            RankSummary(
                rank=rank,
                path=path(rank),
                host=host(rank),
                device="NVIDIA H100",
                world=ranks,
                step_source="ProfilerStep",
                steps=lines,
                step_ns=sum(line.end - line.start for line in lines) / steps,
                time={n: v for n, v in mean.items() if not n.startswith("idle")}
                | {"idle": sum(v for n, v in mean.items() if n.startswith("idle"))},
                idle={n[6:]: v for n, v in mean.items() if n.startswith("idle: ")},
                per_step=per_step,
                communication=mean.get("communication", 0.0),
                kernels=kernels(rank),
                findings=findings(rank),
                collectives=_collectives(met[rank], to_rank_clock, sequenced),
            )
        )
    total = sum(now.values()) / ranks / steps
    return JobRun(summaries, total)


def _collectives(
    met: list[tuple[Collective, int, float, float, float]],
    own_clock: Callable[[float], int],
    sequenced: bool,
) -> Collectives:
    keys: dict[tuple[str, str, int], int] = {}
    meets: list[Collective] = []
    key, order, counts = [], [], dict[object, int]()
    for meet, step, *_ in met:
        name = (meet.group, meet.kind, meet.message)
        if name not in keys:
            keys[name] = len(meets)
            meets.append(meet)
        key.append(keys[name])
        counted = name if sequenced else (name, step)
        order.append(counts.get(counted, 0))
        counts[counted] = order[-1] + 1

    def column(values: Sequence[float]) -> np.ndarray:
        return np.array([round(value) for value in values], dtype=np.int64)

    start = [own_clock(came) for _, _, came, _, _ in met]
    end = [own_clock(done) for _, _, _, done, _ in met]
    return Collectives(
        keys=[f"{group}|{kind}|{message}" for group, kind, message in keys],
        key=pack(column(key)),
        order=pack(column(order)),
        step=pack(column([step for _, step, *_ in met])),
        start=pack(column(start)),
        end=pack(column(end)),
        exposed=pack(column([e - s for s, e in zip(start, end, strict=True)])),
        work=pack(column([work_ns for *_, work_ns in met])),
        synchronising=[meet.kind != "send_recv" for meet in meets],
        group=[meet.group for meet in meets],
        size=[len(meet.members) for meet in meets],
        kind=[meet.kind for meet in meets],
        message=[meet.message for meet in meets],
        sequenced=[sequenced for _ in meets],
    )

"""One rank comes late to the collectives, and all others wait for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import polars as pl
from msgspec.structs import replace

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Impact,
    Location,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.measure import Analysis
from advisor.measure.comm.host_comms import has_host_collectives
from advisor.measure.ranks.ranks import Alignment, Skew, align, skew, working
from advisor.rules.common import figure, of_each, total
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import CHOSEN, SIGNIFICANCE, TRACEML
from advisor.testing import TraceBuilder


class StragglerRank(Rule):
    """One rank arrives last at most collectives, so the other ranks wait for it inside theirs: the
    whole job is as slow as that rank.

    A rank *arrives* when the kernel of the collective starts on its device; where processes train
    on CPUs, when a thread of gloo begins with it and has ended the one before. Clocks of different
    hosts differ, so the traces are first put on one clock by the ends of collectives that all ranks
    leave together; where they share none, or their ends do not agree, nothing is said. A rank is
    last only when it is by more than twice the error of that alignment. What it costs is the mean
    wait of the others that no compute of theirs hides. Somebody is always last: of two ranks that
    take turns by chance, one may be at three collectives of four. So nothing is said unless a rank
    is last more often than ranks that are alike would be in one window of a hundred.

    It counts who is late, not why: a slower device, a slower input pipeline, more data or longer
    sequences, garbage collection. When only some of a job's ranks are here, a rank that is not may
    be later than all of them; the finding then says so.
    """

    id = "straggler-rank"
    title = "One rank keeps the others waiting"
    category = "distributed"
    found_in = (
        "traces/dlrm_8ranks",
        "workloads/ddp_straggler",
    )
    silent_in = (
        "traces/two_ranks",
        "workloads/ddp_straggler",
    )
    validated_on = (
        "CPU recordings, torch 2.13 with gloo: the workload ddp_straggler (predicted 30 %, "
        "measured 27 %), silent on its cure; dlrm_8ranks (NCCL, V100): rank 7 is last at 5 of 8 "
        "collectives; silent on two_ranks (NCCL)"
    )
    across_ranks = True
    references = (
        "https://arxiv.org/abs/2505.05713",
        "https://pytorch.org/docs/stable/distributed.html#collective-functions",
    )

    min_last = Threshold(0.5, "share of the collectives at which it is last", CHOSEN)
    min_share = Threshold(
        0.05, "of the step, mean exposed wait of the others: half of what TraceML warns of", TRACEML
    )
    min_collectives = Threshold(4, "matched ones", CHOSEN)
    max_chance = Threshold(
        0.01,
        "that one of ranks that are alike is last as often, by the binomial tail",
        SIGNIFICANCE,
    )

    verify = "Profile all ranks again: nobody is last at most collectives."
    assumptions = ("without the late rank the others would go on at once",)

    fix = (
        "Rank {rank} computes no longer than the others, so look at what its "
        "host does before the collectives: its input pipeline, garbage collection, "
        "logging or checkpoints of one rank only, other jobs on its host."
    )
    code = (
        "# is it the device? the same work on every rank, one after the other\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\n"
        "start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "start.record(); [a @ a for _ in range(100)]; end.record()\n"
        "torch.cuda.synchronize(); print(rank, start.elapsed_time(end), 'ms')"
    )
    falsified_by = (
        "a run in which the hosts of rank {rank} and another are swapped, and the other one is late"
    )
    cases: ClassVar = {
        "the late rank computes more": {
            "fix": "Rank {rank} computes {more} a step more than the others: give it "
            "less (balance sequence lengths, experts, pipeline stages), or compare the "
            "same {what} with the others' (clocks, temperature, other jobs)."
        },
        "the ranks train on CPUs": {
            "code": "# is it the machine? the same work on every rank, one after the other\n"
            "a = torch.randn(2048, 2048); start = time.perf_counter()\n"
            "for _ in range(20): a @ a\n"
            "print(rank, time.perf_counter() - start, 's')"
        },
    }

    confidence = 0.8

    elsewhere: ClassVar = in_any_language(
        "Find out what the rank that comes last does longer than the others, and give all ranks "
        "equal work."
    )

    def check_run(self, ranks: dict[int, Analysis]) -> Iterator[Outcome]:
        """Compare arrivals at the collectives that the ranks share."""
        alignment = align(ranks)
        if alignment.error_ns is None:
            if sum(a.device_id is not None or has_host_collectives(a) for a in ranks.values()) > 1:
                yield SkippedCheck(
                    what="whether one rank keeps the others waiting",
                    why=f"the ranks cannot be put on one clock: {alignment.reason}",
                    record="the same steps on every rank, in one run",
                )
            return
        found = skew(ranks, alignment)
        table = found.stragglers.filter(pl.col("collectives") >= self.min_collectives)
        if table.is_empty():
            return
        worst = table.sort("caused_exposed_ns", descending=True).row(0, named=True)
        step = max(a.step_ns for a in ranks.values())
        share = worst["caused_exposed_ns"] / step if step else 0.0
        if share < self.min_share or worst["last_share"] < self.min_last:
            lost = t.format_duration(worst["caused_exposed_ns"])
            unit = t.format_per(next(iter(ranks.values())).per)
            yield PassedCheck(
                text=f"no rank keeps the others waiting: the worst costs them {lost} {unit} that "
                f"no compute hides ({share:.0%}), clocks aligned to "
                f"{t.format_duration(alignment.error_ns)}"
            )
            return
        if _chance(worst["last_share"], worst["collectives"], table.height) > self.max_chance:
            yield SkippedCheck(
                what="whether one rank keeps the others waiting",
                why=f"rank {worst['rank']} is last at {worst['last']} of {worst['collectives']} "
                "collectives, which may be chance",
                record="more steps",
            )
            return
        yield self._finding(ranks, alignment, found, worst, share)

    def _finding(
        self,
        ranks: dict[int, Analysis],
        alignment: Alignment,
        found: Skew,
        worst: dict[str, Any],
        share: float,
    ) -> Finding:
        late, main = int(worst["rank"]), next(iter(ranks))
        a = ranks[main]
        others = [n for n in alignment.shift_ns if n != late]
        compute = {n: working(ranks[n]).total / ranks[n].step_count for n in ranks}
        on_host = ranks[late].device_id is None
        peers = sum(compute[n] for n in others) / len(others)
        more = compute[late] - peers
        complete = found.collectives["complete"]
        whole = bool(complete.fill_null(False).all())
        gain = worst["caused_exposed_ns"]
        uneven = more > 0.5 * gain
        finding = Finding(
            title=f"Rank {late} keeps the others waiting",
            summary=(
                f"Rank {late} arrives last at {worst['last']} of {worst['collectives']} "
                f"collectives; the others wait {t.format_duration(gain)} {of_each(a)} "
                f"({share:.0%}) for it "
                "with nothing to compute."
            ),
            evidence=[
                Evidence("late rank", late),
                Evidence("last at", worst["last_share"], "share", *self.limit("min_last")),
                Evidence("exposed wait of the others", gain, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("error of the clocks' alignment", alignment.error_ns, "ns"),
                Evidence("its compute", compute[late], "ns", per=a.per),
                Evidence("compute of the others", peers, "ns", per=a.per),
                *self._idle(ranks[late]),
            ],
            where=self._where(found, late),
            confidence=0.8 if whole else 0.5,
            confidence_notes=[]
            if whole
            else ["not all ranks of the job are here: another one may be later still"],
            falsified_by=self.falsified_by.format(rank=late),
            **(self.case("the ranks train on CPUs") if on_host else {}),
            **(
                self.case(
                    "the late rank computes more",
                    rank=late,
                    more=t.format_duration(more),
                    what="operators there" if on_host else "kernels on its device",
                )
                if uneven
                else {"fix": self.fix.format(rank=late)}
            ),
        )
        waiting = total(found.arrivals.filter(pl.col("rank") == main)["exposed_wait_ns"])
        exposed = 0 if on_host else ranks[main].breakdown.communication.total
        # the factor is for a replay without the other ranks
        left = max(0.0, 1 - waiting / exposed) if exposed else None
        comm = Select(on="gpu", family=("communication",))
        if not on_host:  # what threads of gloo do is no part of the graph
            edit = Edit(op="punctual", select=comm, factor=left, rank=late)
            finding = replace(finding, edits=[edit])
        if main == late or not exposed:
            # work that is dealt out evenly is not gone: the others get their part of it
            even = gain * len(others) / (len(others) + 1) if uneven else gain
            impact = Impact(
                currency="step_time",
                gain_ns=round(even),
                low_ns=0,
                high_ns=round(gain),
                share=share * even / gain,
                method="mean exposed wait of the other ranks"
                + (", its work dealt out evenly" if uneven else ""),
            )
            finding = replace(finding, impact=impact)
        return finding

    @staticmethod
    def _idle(a: Analysis) -> list[Evidence]:
        if a.device_id is None:
            return []
        return [figure(a, "its idle time", a.breakdown.idle.total)]

    @staticmethod
    def _where(found: Skew, late: int) -> list[Location]:
        """The collectives with the longest waits for this rank."""
        table = found.collectives.filter(pl.col("last") == late)
        return [
            Location(
                op=row["annotation"] or row["collective"],
                step=row["step"],
                dur_ns=round(row["mean_wait_ns"]),
            )
            for row in table.sort("mean_wait_ns", descending=True).head(3).iter_rows(named=True)
        ]

    @staticmethod
    def fires_on() -> dict[str, Any]:
        """One of three ranks computes longer; the others wait in the all-reduce."""
        return {
            "a slow rank": _ranks([2000.0, 2000.0, 3000.0]),
            "a slow process on a CPU": _processes([20e3, 60e3]),
        }

    @staticmethod
    def silent_on() -> dict[str, Any]:
        """Equal ranks; a rank that is late by little; ranks that take turns."""
        return {
            "equal ranks": (_ranks([2000.0, 2000.0, 2000.0]), "share < self.min_share"),
            "hardly late": (_ranks([2000.0, 2000.0, 2040.0]), "min_share"),
            "taking turns": (
                _ranks([2000.0, 2000.0, 2000.0], turn=800.0),
                "worst['last_share'] < self.min_last",
            ),
            "equal processes": (_processes([20e3, 20e3]), "share < self.min_share"),
            "late at three of four": (_ranks([2000.0, 2000.0], late=(1, 1, 0, 1)), "max_chance"),
        }


def _chance(share: float, count: int, ranks: int) -> float:
    """Bound of the probability that any of ranks that are alike is last at such a share of so many
    collectives: the tail of the binomial distribution, for each of them."""
    even, least = 1 / ranks, round(share * count)
    tail = sum(
        math.exp(_log_binomial(count, k) + k * math.log(even) + (count - k) * math.log1p(-even))
        for k in range(least, count + 1)
    )
    return min(1.0, ranks * tail)


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _ranks(
    compute: list[float], turn: float = 0.0, late: tuple[int, ...] = ()
) -> list[TraceBuilder]:
    """Ranks that compute so long in each step and then leave an all-reduce together. ``late``: the
    rank that computes longer in each step."""
    builders = [TraceBuilder(rank=n, world_size=len(compute)) for n in range(len(compute))]
    for step in range(len(late) or 6):
        work = [us + (turn if step % len(compute) == n else 0) for n, us in enumerate(compute)]
        if late:
            work[late[step]] += 1000
        for b, us in zip(builders, work, strict=True):
            with b.step():
                b.run("aten::mm", "ampere_sgemm_128x64_nn", us)
                b.collective(
                    "allreduce", 20 << 20, 300 + max(work) - us, wait=True, group_size=len(compute)
                )
                b.sync()
    return builders


def _processes(compute: list[float]) -> list[TraceBuilder]:
    """Processes that compute so long, start two all-reduces of gloo, and wait for both."""
    builders = [TraceBuilder(None, rank=n, world_size=len(compute)) for n in range(len(compute))]
    for _ in range(6):
        for b, us in zip(builders, compute, strict=True):
            with b.step():
                begin = b.now
                for part, bucket in ((0.75, 1), (0.25, 2)):
                    with b.op("aten::mm", host_us=us * part):
                        pass
                    with b.op("c10d::allreduce_"):
                        started = b.now
                    # two threads: both wait for the slowest process at once
                    done = begin + max(compute) * (0.75 if bucket == 1 else 1) + 300 * bucket
                    with b.thread(10 + bucket):
                        outer, b.now = b.now, started
                        with b.range("gloo:all_reduce"):
                            b.now = max(done, started)
                        b.now = outer
                b.now = begin + max(compute) + 1000
    return builders

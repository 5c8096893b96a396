"""One rank arrives late at the collectives, and all others wait for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import polars as pl

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
from advisor.measure.comm.comms import has_host_collectives
from advisor.measure.ranks.ranks import Alignment, Skew, align, skew, working
from advisor.rules.common import figure, of_each, total
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import CHOSEN, SIGNIFICANCE, TRACEML
from advisor.testing import TraceBuilder


class StragglerRank(Rule):
    """One rank arrives last at most collectives, so the other ranks wait for it inside theirs. The
    whole job is as slow as that rank.

    A rank *arrives* when the kernel of the collective starts on its device. Where processes train
    on CPUs, it arrives when a thread of gloo begins with the collective and has ended the one
    before. Clocks of different hosts differ, so the ranks are first put on one clock by the ends of
    collectives that all ranks leave together. Where they share none, or their ends do not agree,
    the rule abstains. A rank is last only by more than twice the error of that alignment. The cost
    is the mean wait of the other ranks that no compute of theirs hides. Somebody is always last: of
    two equal ranks, one may be last at three collectives of four. So the rule fires only when a
    rank is last more often than equal ranks would be in one window of a hundred.

    The rule says who is late, not why: a slower GPU, a slower input pipeline, more data or longer
    sequences, garbage collection. When only some of a job's ranks are recorded, another rank may be
    later than all of them, and the finding says so.
    """

    id = "straggler-rank"
    title = "Straggler: one rank keeps the others waiting"
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
        "probability that one of equal ranks is last as often, by the binomial tail",
        SIGNIFICANCE,
    )

    verify = "Profile all ranks again: no rank is last at most collectives."
    assumptions = ("without the late rank the others would continue at once",)

    fix = (
        "Check what rank {rank}'s host does before the collectives: its input pipeline, garbage "
        "collection, logging or checkpoints of one rank only, other jobs. The rank computes no "
        "longer than the others."
    )
    code = (
        "# is it the GPU? the same work on every rank, one after the other\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\n"
        "start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "start.record(); [a @ a for _ in range(100)]; end.record()\n"
        "torch.cuda.synchronize(); print(rank, start.elapsed_time(end), 'ms')"
    )
    falsified_by = (
        "a run with the hosts of rank {rank} and another swapped, in which the other one is late"
    )
    cases: ClassVar = {
        "the late rank computes more": {
            "fix": "Give rank {rank} less work (balance sequence lengths, experts, pipeline "
            "stages): it computes {more} per step longer than the others. Or compare the same "
            "{what} with the others' (clocks, temperature, other jobs)."
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
        "Find out what the last rank does longer than the others, and give all ranks equal work."
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
        arrivals = skew(ranks, alignment)
        table = arrivals.stragglers.filter(pl.col("collectives") >= self.min_collectives)
        if table.is_empty():
            return
        worst = table.sort("caused_exposed_ns", descending=True).row(0, named=True)
        step = max(a.step_ns for a in ranks.values())
        share = worst["caused_exposed_ns"] / step if step else 0.0
        if share < self.min_share or worst["last_share"] < self.min_last:
            lost = t.format_duration(worst["caused_exposed_ns"])
            unit = t.format_per(next(iter(ranks.values())).per)
            yield PassedCheck(
                text=f"no straggler: the latest rank costs the others {lost} {unit} of exposed "
                f"wait ({share:.0%}), clocks aligned to {t.format_duration(alignment.error_ns)}"
            )
            return
        p_value = _p_value(worst["last_share"], worst["collectives"], table.height)
        if p_value > self.max_chance:
            yield SkippedCheck(
                what="whether one rank keeps the others waiting",
                why=f"rank {worst['rank']} is last at {worst['last']} of {worst['collectives']} "
                "collectives, which is not significant",
                record="more steps",
            )
            return
        yield self._finding(ranks, alignment, arrivals, worst, share)

    def _finding(
        self,
        ranks: dict[int, Analysis],
        alignment: Alignment,
        arrivals: Skew,
        worst: dict[str, Any],
        share: float,
    ) -> Finding:
        late, main = int(worst["rank"]), next(iter(ranks))
        per = ranks[main].per
        others = [n for n in alignment.shift_ns if n != late]
        compute = {n: working(ranks[n]).total / ranks[n].step_count for n in ranks}
        on_host = ranks[late].device_id is None
        peers = sum(compute[n] for n in others) / len(others)
        more = compute[late] - peers
        complete = bool(arrivals.collectives["complete"].fill_null(False).all())
        gain = worst["caused_exposed_ns"]
        computes_more = more > 0.5 * gain
        exposed = 0 if on_host else ranks[main].breakdown.communication.total
        impact = None
        if main == late or not exposed:
            # work that is rebalanced is not gone: the others get their part of it
            expected = gain * len(others) / (len(others) + 1) if computes_more else gain
            impact = Impact(
                currency="step_time",
                gain_ns=round(expected),
                low_ns=0,
                high_ns=round(gain),
                share=share * expected / gain,
                method="mean exposed wait of the other ranks"
                + (", its work dealt out evenly" if computes_more else ""),
            )
        longer = {
            "rank": late,
            "more": t.format_duration(more),
            "what": "operators there" if on_host else "kernels on its GPU",
        }
        return Finding(
            title=f"Straggler: rank {late} keeps the others waiting",
            summary=(
                f"Rank {late} arrives last at {worst['last']} of {worst['collectives']} "
                f"collectives. The others wait {t.format_duration(gain)} "
                f"{of_each(ranks[main])} ({share:.0%}) for it with nothing to compute."
            ),
            evidence=[
                Evidence("late rank", late),
                Evidence("last at", worst["last_share"], "share", *self.limit("min_last")),
                Evidence("exposed wait of the others", gain, "ns", per=per),
                Evidence("share", share, "share", *self.limit("min_share"), per=per),
                Evidence("error of the clocks' alignment", alignment.error_ns, "ns"),
                Evidence("its compute", compute[late], "ns", per=per),
                Evidence("compute of the others", peers, "ns", per=per),
                *self._idle(ranks[late]),
            ],
            where=self._where(arrivals, late),
            edits=[] if on_host else [self._edit(arrivals, main, late, exposed)],
            impact=impact,
            confidence=0.8 if complete else 0.5,
            confidence_notes=[]
            if complete
            else ["not all ranks of the job are recorded: another one may be later still"],
            falsified_by=self.falsified_by.format(rank=late),
            **(self.case("the ranks train on CPUs") if on_host else {}),
            **(
                self.case("the late rank computes more", **longer)
                if computes_more
                else {"fix": self.fix.format(rank=late)}
            ),
        )

    @staticmethod
    def _edit(arrivals: Skew, main: int, late: int, exposed: int) -> Edit:
        """Let the rank arrive in time; the factor is for a replay without the other ranks."""
        waiting = total(arrivals.arrivals.filter(pl.col("rank") == main)["exposed_wait_ns"])
        left = max(0.0, 1 - waiting / exposed) if exposed else None
        communication = Select(on="gpu", family=("communication",))
        return Edit(op="punctual", select=communication, factor=left, rank=late)

    @staticmethod
    def _idle(a: Analysis) -> list[Evidence]:
        if a.device_id is None:
            return []
        return [figure(a, "its idle time", a.breakdown.idle.total)]

    @staticmethod
    def _where(arrivals: Skew, late: int) -> list[Location]:
        """The collectives with the longest waits for this rank."""
        table = arrivals.collectives.filter(pl.col("last") == late)
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


def _p_value(share: float, count: int, ranks: int) -> float:
    """Bound of the probability that any of so many equal ranks is last at such a share of so many
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
    rank that computes longer, by step."""
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

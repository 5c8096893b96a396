"""One rank's GPU runs the same kernels slower than the others."""

from __future__ import annotations

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
    Source,
    Threshold,
)
from advisor.measure import Analysis
from advisor.measure.device.families import FAMILIES
from advisor.measure.ranks.rank_kernels import compare_kernels, device_speed
from advisor.rules.common import figure
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import CHOSEN, GREYHOUND
from advisor.testing import TraceBuilder


class SlowDevice(Rule):
    """One rank's GPU needs longer than the others for the same kernels. It is late at every
    collective, and the whole job runs at its speed. Usual causes are clocks held down by heat or
    power, another process on the GPU, or a failing part.

    The rule compares compute kernels of the same name and launch size that two or more ranks ran at
    least 20 times, equally often: the median duration with the median of the other ranks' medians.
    A GPU is slow when half of its compared time runs at 1.1 times the others' or more, and three
    quarters of it above 1.05. One slow kernel shows other inputs (sparse lookups, routed tokens,
    padding), not a slow GPU. At least five kernels must be compared, and half of the compute time.

    With two ranks a slow GPU and a fast one look the same; the rule names the slower one. Kernels
    that overlap collectives are slower, so ranks that overlap differently differ a little.
    """

    id = "slow-device"
    title = "One GPU is slower than the others"
    category = "distributed"
    validated_on = (
        "silent on two_ranks, where few kernels repeat 20 times (with fewer the ratio is 1.01); "
        "has never fired on a real slow GPU"
    )
    sources = (
        Source(
            "medians of at least 20 times the same kernel", "advisor/measure/ranks/rank_kernels.py"
        ),
    )
    across_ranks = True
    references = (
        "https://arxiv.org/abs/2410.12588",
        "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
    )

    min_ratio = Threshold(1.10, "of the other ranks' median duration", GREYHOUND)
    min_slow = Threshold(1.05, "ratio from which a kernel counts as slower", CHOSEN)
    min_slow_share = Threshold(0.75, "of the compared time in such kernels", CHOSEN)
    min_kernels = Threshold(5, "kernels compared; with fewer, inputs may be the reason", CHOSEN)
    min_compared = Threshold(0.5, "of the rank's compute kernel time", CHOSEN)

    fix = (
        "Check rank {rank}'s GPU: clocks and why they are held down, temperature, power limit, "
        "other processes, ECC and link errors. Replace the GPU if nothing helps."
    )
    code = (
        "nvidia-smi --format=csv --query-gpu=index,clocks.sm,clocks.max.sm\n"
        "nvidia-smi --format=csv --query-gpu=index,temperature.gpu,power.draw\n"
        "nvidia-smi --format=csv --query-gpu=index,clocks_event_reasons.active\n"
        "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    )
    verify = (
        "Run the job with that host and another swapped: the slowness stays with the GPU, and goes "
        "with a healthy one."
    )
    falsified_by = "inputs that differ between ranks in a way the launch size does not show"
    assumptions = ("the ranks wait for each other at collectives in each step",)
    confidence = 0.7
    cases: ClassVar = {
        "the ranks have different GPUs": {
            "fix": "Give this rank less work, or replace its GPU: the ranks have different GPUs."
        }
    }
    elsewhere: ClassVar = in_any_language(
        "Check the clocks, temperature and other processes of the slower GPU. Give it less work or "
        "leave it out."
    )

    def check_run(self, ranks: dict[int, Analysis]) -> Iterator[Outcome]:
        """Compare the kernels that the ranks share."""
        ranks = {n: a for n, a in ranks.items() if a.device_id is not None}
        if len(ranks) < 2:
            return
        kernels = compare_kernels(ranks)
        speed = self._judged(ranks, kernels)
        if speed.is_empty():
            yield SkippedCheck(
                what="whether one GPU is slower than the others",
                why="too few kernels ran equally often on several ranks",
                record="more steps of the same work on every rank",
            )
            return
        worst = speed.sort("ratio", descending=True).row(0, named=True)
        if worst["ratio"] < self.min_ratio or worst["slow"] < self.min_slow_share:
            if worst["ratio"] < self.min_slow:
                yield PassedCheck(
                    text=f"the devices are equally fast: the slowest needs {worst['ratio']:.2f} "
                    f"times the others' time for the same {worst['kernels']} kernels"
                )
            return
        yield self._finding(ranks, kernels, worst)

    def _judged(self, ranks: dict[int, Analysis], kernels: pl.DataFrame) -> pl.DataFrame:
        """:func:`device_speed` of ranks with enough to compare, and ``slow``: share of the compared
        time in slower kernels."""
        if kernels.is_empty():
            return kernels
        slow = kernels.group_by("rank").agg(
            slow=pl.col("dur").filter(pl.col("ratio") >= self.min_slow).sum() / pl.col("dur").sum()
        )
        spent = pl.DataFrame(
            {
                "rank": list(ranks),
                "compute": [a.breakdown.compute.total for a in ranks.values()],
            }
        )
        return (
            device_speed(kernels)
            .join(slow, on="rank")
            .join(spent, on="rank")
            .filter(
                (pl.col("kernels") >= self.min_kernels)
                & (pl.col("compared_ns") >= self.min_compared * pl.col("compute"))
            )
        )

    def _finding(
        self, ranks: dict[int, Analysis], kernels: pl.DataFrame, worst: dict[str, Any]
    ) -> Finding:
        rank, ratio = int(worst["rank"]), float(worst["ratio"])
        a = ranks[rank]
        names = {n: b.device.name if b.device else None for n, b in ranks.items()}
        mixed = len(set(names.values())) > 1
        on_main = rank == next(iter(ranks))
        gain = a.breakdown.compute.total / a.step_count * (1 - 1 / ratio)
        waits = f"the others wait all the {t.format_duration(gain)} {t.format_per(a.per)} for it"
        families = tuple(f for f in FAMILIES if f != "communication")
        return Finding(
            summary=(
                f"Rank {rank}'s GPU takes {ratio:.2f} times as long as the others for the same "
                f"kernels ({worst['slow']:.0%} of the compared time is in slower ones). The other "
                "ranks wait for it at every collective."
            ),
            evidence=[
                Evidence("slow rank", rank),
                Evidence(
                    "duration over the others' (median by time)",
                    ratio,
                    "",
                    *self.limit("min_ratio"),
                ),
                Evidence(
                    "share of compared time in slower kernels",
                    worst["slow"],
                    "share",
                    *self.limit("min_slow_share"),
                ),
                Evidence(
                    "kernels compared", int(worst["kernels"]), "count", *self.limit("min_kernels")
                ),
                figure(a, "compute of this rank", a.breakdown.compute.total),
                Evidence("its GPU", names[rank]),
            ],
            where=[
                Location(kernel=row["name"], dur_ns=round(row["median"]), count=row["count"])
                for row in kernels.filter(pl.col("rank") == rank).head(3).iter_rows(named=True)
            ],
            edits=[
                Edit(
                    op="scale",
                    factor=1 / ratio,
                    rank=rank,
                    select=Select(on="gpu", kind=("kernel",), family=families),
                )
            ],
            impact=None
            if on_main
            else Impact(
                currency="step_time",
                gain_ns=round(gain),
                low_ns=0,
                high_ns=round(gain),
                share=gain / a.step_ns if a.step_ns else None,
                method="compute time that the slow device takes longer",
            ),
            assumptions=[] if on_main else [*self.assumptions, waits],
            confidence=0.7 if len(ranks) > 2 else 0.6,
            confidence_notes=[] if len(ranks) > 2 else ["only two ranks to compare"],
            **(
                self.case("the ranks have different GPUs")
                if mixed
                else {"fix": self.fix.format(rank=rank)}
            ),
        )

    @staticmethod
    def fires_on() -> dict[str, Any]:
        """The third of four devices at 1 / 1.25 of its clock; the first of three."""
        return {
            "third of four": _ranks([1.0, 1.02, 1.25, 0.99]),
            "the rank that is reported": _ranks([1.2, 1.0, 1.0]),
        }

    @staticmethod
    def silent_on() -> dict[str, Any]:
        """Equal GPUs; one kernel with other inputs; pipeline stages; too few kernels."""
        return {
            "equal": (_ranks([1.0, 1.03, 0.98, 1.01]), "worst['ratio'] < self.min_ratio"),
            "one kernel with more work": (
                _ranks([1.0, 1.0, 1.0], skewed=2.0),
                "worst['ratio'] < self.min_ratio",
            ),
            "other kernels on each rank": (
                _ranks([1.0, 1.5, 1.0], stages=True),
                "speed.is_empty()",
            ),
            "few kernels": (_ranks([1.0, 1.3, 1.0], kinds=2), "min_kernels"),
        }


def _ranks(
    speed: list[float], *, skewed: float = 1.0, stages: bool = False, kinds: int = 6
) -> list[TraceBuilder]:
    """Ranks that run the same kernels, each so much slower; one kernel of the last rank is skewed
    by the inputs."""
    builders = []
    for rank, slow in enumerate(speed):
        b = TraceBuilder(rank=rank, world_size=len(speed))
        for _ in range(5):
            with b.step():
                for n in range(kinds * 5):
                    kind = n % kinds
                    more = skewed if kind == 0 and rank == len(speed) - 1 else 1.0
                    name = f"stage{rank}_kernel_{kind}" if stages else f"kernel_{kind}"
                    with b.op("aten::mm"):
                        b.launch(name, (100 + 20 * kind) * slow * more, blocks=256 * (kind + 1))
                b.collective("allreduce", 25 << 20, 400, wait=True, group_size=len(speed))
                b.sync()
        builders.append(b)
    return builders

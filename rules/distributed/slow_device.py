"""A rank's device runs the same kernels more slowly than its peers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from advisor.core.finding import Finding, Outcomes, PassedCheck, SkippedCheck
from advisor.core.rule import Citation, Evidence, Rule
from advisor.measure.ranks.outliers import describe_subject
from advisor.measure.ranks.rank_work import MIN_KERNELS, compare_devices
from advisor.rules.support.across_ranks import finding_of
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import TraceBuilder

if TYPE_CHECKING:
    from advisor.measure.ranks.outliers import Deviation
    from advisor.replay.ranks.rank_comparison import RankComparison
    from advisor.replay.ranks.ranks_replay import JobGain


class SlowDevice(Rule):
    """The device of a rank needs longer than its peers for the same kernels. So the rank is late at
    every collective, and the whole job runs at its speed. Usual causes are clocks held down by heat
    or power, another process on the device, or a failing part.

    The search across ranks finds a rank that has more work of its own than the others, or arrives
    last at their collectives. Its device is slow when that work is compute and the same kernels, by
    name and launch size, take longer. This must hold for all matrix work, or for nearly all
    compute. One slow kernel shows other inputs (sparse lookups, routed tokens, padding), not a slow
    device. At least five kernels that ran 20 times or more have to be compared; with fewer the
    cause stays open.

    With two ranks a slow device and a fast one look the same, and the slower one is named. The gain
    is what the job's step loses to it when all ranks are replayed together."""

    id = "slow-device"
    title = "One GPU is slower than the others"
    validation_note = (
        "simulated jobs (docs/ranks-accuracy.md). Silent on two_ranks. Never seen to fire on a "
        "real slow device"
    )
    sources = (Citation("five kernels, 20 times each", "advisor/measure/ranks/rank_work.py"),)
    across_ranks = True
    references = (
        "https://arxiv.org/abs/2410.12588",
        "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
    )

    code = (
        "nvidia-smi --format=csv --query-gpu=index,clocks.sm,clocks.max.sm\n"
        "nvidia-smi --format=csv --query-gpu=index,temperature.gpu,power.draw\n"
        "nvidia-smi --format=csv --query-gpu=index,clocks_event_reasons.active\n"
        "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
    )
    verify = (
        "Run the job with that host and another exchanged: the slowness stays with the "
        "device, and goes with a healthy one."
    )
    falsified_by = "inputs that differ between ranks in a way the launch size does not show"
    assumptions = ("the ranks wait for each other at collectives in each step",)

    fix = (
        "Check the GPU of {ranks}: clocks and why they are held down, temperature, power limit, "
        "other processes, ECC errors (nvidia-smi -q -d PERFORMANCE,CLOCK,ECC). Replace it if it "
        "stays slow."
    )
    cases = {
        "the ranks have different GPUs": {
            "fix": "Give this GPU less work, or replace it: the ranks have different GPUs."
        }
    }

    confidence = 0.7

    framework_advice = in_any_language(
        "Look at the clocks, temperature and neighbours of the slower device; give it less work "
        "or leave it out."
    )

    def check_run(self, comparison: RankComparison) -> Outcomes:
        if not comparison.outliers:
            yield from self._report_comparison(comparison)
        for deviation, gain in comparison.outliers:
            if not deviation.slow_device:
                continue
            yield self._build_finding(comparison, deviation, gain)

    def _report_comparison(self, comparison: RankComparison) -> Outcomes:
        """Report a passed check, or what is missing to compare devices."""
        summaries = [s for s in comparison.job.summaries if s.kernels]
        if len(summaries) < 2:
            return
        slowest = max(summaries, key=lambda s: s.time.get("compute", 0.0))
        speed = compare_devices([slowest], [s for s in summaries if s is not slowest])
        if speed is None or len(speed.kernels) < MIN_KERNELS:
            yield SkippedCheck(
                what="whether one device is slower than the others",
                why="too few kernels ran equally often on several ranks",
                record="more steps of the same work on every rank",
            )
        else:
            yield PassedCheck(
                text=f"the devices are equally fast: the slowest takes "
                f"{max(0.0, speed.ratio - 1):.0%} longer for the same {len(speed.kernels)} kernels"
            )

    def _build_finding(
        self, comparison: RankComparison, deviation: Deviation, gain: JobGain | None
    ) -> Finding:
        job = comparison.job
        indices = deviation.members.rank_indices
        subject = describe_subject(job, deviation)
        slow_summary, ratio = job.summaries[indices[0]], deviation.device_slowdown or 1.0
        has_mixed_devices = len({s.device for s in job.summaries if s.device}) > 1
        finding = finding_of(comparison, deviation, gain, self._build_title(comparison, deviation))
        few_ranks = len(job.summaries) < 3
        label = "duration over the others' (half of the compared time)"
        evidence = [
            finding.evidence[0],
            Evidence(label, ratio, ""),
            *finding.evidence[1:],
            Evidence("kernels compared", deviation.kernels, "count", MIN_KERNELS, CHOSEN.name),
            Evidence("GPU of the rank", slow_summary.device or None),
        ]
        notes = [*finding.confidence_notes, *(["only two ranks to compare"] if few_ranks else [])]
        fields = {"fix": self.fix.format(ranks=subject)}
        if has_mixed_devices:
            fields |= self.case("the ranks have different GPUs")
        return replace(
            finding,
            evidence=evidence,
            confidence=min(finding.confidence, 0.6 if few_ranks else 0.7),
            confidence_notes=notes,
            falsified_by=self.falsified_by,
            **fields,
        )

    @staticmethod
    def _build_title(comparison: RankComparison, deviation: Deviation) -> str:
        subject = describe_subject(comparison.job, deviation)
        plural = len(deviation.members.rank_indices) > 1
        return f"The GPU{'s' if plural else ''} of {subject} {'are' if plural else 'is'} slow"

    @staticmethod
    def examples() -> dict[str, Any]:
        return {
            "third of four": _build_ranks([1.0, 1.02, 1.25, 0.99]),
            "the rank that is reported": _build_ranks([1.2, 1.0, 1.0]),
            "equal": (_build_ranks([1.0, 1.03, 0.98, 1.01]), "len(speed.kernels) < MIN_KERNELS"),
            "one kernel with more work": (
                _build_ranks([1.0, 1.0, 1.0], skewed=2.0),
                "not deviation.slow_device",
            ),
            "other kernels on each rank": (
                _build_ranks([1.0, 1.5, 1.0], stages=True),
                "not deviation.slow_device",
            ),
            "few kernels": (_build_ranks([1.0, 1.3, 1.0], kinds=2), "not deviation.slow_device"),
        }


def _build_ranks(
    speed: list[float], *, skewed: float = 1.0, stages: bool = False, kinds: int = 6
) -> list[TraceBuilder]:
    """Build ranks that run the same kernels, each at its own speed, and leave an all-reduce
    together. The inputs skew one kernel of the last rank."""
    kernel_us = [
        [
            (100 + 20 * (n % kinds)) * slow * (skewed if n % kinds == 0 and rank == last else 1.0)
            for n in range(kinds * 5)
        ]
        for last in [len(speed) - 1]
        for rank, slow in enumerate(speed)
    ]
    longest = max(map(sum, kernel_us))
    builders = []
    for rank, kernels in enumerate(kernel_us):
        b = TraceBuilder(rank=rank, world_size=len(speed))
        for _ in b.steps(7):
            for n, us in enumerate(kernels):
                kind = n % kinds
                name = f"stage{rank}_kernel_{kind}" if stages else f"kernel_{kind}"
                b.run("aten::mm", name, us, blocks=256 * (kind + 1))
            waits = 400 + longest - sum(kernels)
            b.collective("allreduce", 25 << 20, waits, wait=True, group_size=len(speed))
            b.sync()
        builders.append(b)
    return builders

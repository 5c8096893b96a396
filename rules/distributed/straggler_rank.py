"""A rank comes late to the collectives, so all others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, PassedCheck, SkippedCheck
from advisor.core.rule import Rule, Threshold
from advisor.measure.ranks.outliers import describe_subject
from advisor.measure.ranks.topology import LATE_SHARE, MAX_LATE_CHANCE, MIN_COLLECTIVES, MIN_LATE
from advisor.rules.support.across_ranks import find_unit, finding_of
from advisor.rules.support.citations import SIGNIFICANCE, TRACEML
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import TraceBuilder

MIN_PAUSE_STEPS = 4
MIN_PAUSE_RATIO = 3
"""Minimum ratio to the next longest step at which a step is a pause."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from advisor.measure.ranks.outliers import Deviation
    from advisor.replay.ranks.rank_comparison import RankComparison
    from advisor.replay.ranks.ranks_replay import JobGain


class StragglerRank(Rule):
    """A rank arrives last at most collectives, so the other ranks wait for it inside theirs: the
    whole job is as slow as that rank.

    A rank *arrives* when the kernel of the collective starts on its device. Where processes train
    on CPUs, it arrives when a thread of gloo begins with it and has ended the one before. Clocks of
    different hosts differ. So the rule first puts the traces on one clock, by the ends of
    collectives that all ranks leave together. Where they share none, or their ends do not agree, it
    reports nothing. A rank counts as last only if it is late by more than twice the error of that
    alignment. Its cost is the mean wait of the others that their compute does not hide. Some rank
    is always last: of two ranks that take turns by chance, one may be last at three collectives of
    four. So the rule is silent unless a rank is last more often than similar ranks would be in one
    window of a hundred.

    It counts who is late, not why: a slower device, a slower input pipeline, more data or longer
    sequences, garbage collection. When only some of a job's ranks were read, another rank may be
    later than all of them. The finding then says so."""

    id = "straggler-rank"
    title = "One rank keeps the others waiting"
    found_in = (
        "traces/dlrm_8ranks",
        "workloads/ddp_straggler",
        "recorded/rank_evaluation.slow",
    )
    silent_in = ("traces/two_ranks", "workloads/ddp_straggler")
    validation_note = (
        "CPU recordings, torch 2.13 with gloo: the workload ddp_straggler, 30% predicted, 27% "
        "measured. Evaluation on one rank, 73 ms predicted, 73 measured. Silent on their cures. "
        "Rank 7 of dlrm_8ranks (NCCL, V100) is last at 5 of 8 collectives. Silent on two_ranks "
        "(NCCL)"
    )
    across_ranks = True
    references = (
        "https://arxiv.org/abs/2505.05713",
        "https://pytorch.org/docs/stable/distributed.html#collective-functions",
    )

    min_share = Threshold(
        LATE_SHARE,
        "of the step, mean exposed wait of the others: half of TraceML's limit",
        TRACEML,
    )
    max_chance = Threshold(
        MAX_LATE_CHANCE,
        "that one of similar ranks arrives last as often, by the binomial tail",
        SIGNIFICANCE,
    )

    verify = "Profile all ranks again: no rank arrives last at most collectives."
    assumptions = ("without the late rank the others would continue at once",)

    fix = (
        "Check the host of {ranks}: CPU clock and cores bound to the process, NUMA node, garbage "
        "collection, logging or checkpoints on these ranks only, other jobs on the machine."
    )
    code = (
        "# is it the device? the same work on every rank, one after the other\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.float16)\n"
        "start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "start.record(); [a @ a for _ in range(100)]; end.record()\n"
        "torch.cuda.synchronize(); print(rank, start.elapsed_time(end), 'ms')"
    )
    cases = {
        "host": {
            "code": "start = time.perf_counter()   # on all ranks at the same time\n"
            "for _ in range(10**7): pass\n"
            "cores = len(os.sched_getaffinity(0))   # of the process\n"
            "print(rank, cores, time.perf_counter() - start, 's')"
        },
        "compute": {
            "fix": "Compare clocks, temperature and other processes of the GPU of {ranks}, which "
            "computes longer, with the others' (nvidia-smi -q -d PERFORMANCE,CLOCK,ECC). If they "
            "are equal, give it less work."
        },
        "input": {
            "fix": "Check the input of {ranks}: loader workers, CPU cores bound to the process, "
            "the storage that it reads from, larger samples in its shard.",
            "code": "# batches alone, on every rank\n"
            "start = time.perf_counter()\n"
            "for _, batch in zip(range(50), loader): pass\n"
            "print(rank, time.perf_counter() - start, 's')",
        },
        "network": {
            "fix": "Check the links of {ranks}: NVLink or PCIe errors, counters and firmware of "
            "the adapter, the switch port, NCCL's choice of network (NCCL_DEBUG=INFO).",
            "code": "# all_reduce bandwidth of these hosts, and of others\n"
            "mpirun -np 16 -H host-a:8,host-b:8 all_reduce_perf -b 8M -e 1G -f 2 -g 1",
        },
        "imbalance": {
            "fix": "Give the ranks equal work: balance experts (auxiliary loss, capacity), "
            "embedding tables by cost, or sequence lengths."
        },
        "other shapes": {
            "fix": "Give the ranks equal work: the operators of {ranks} get larger inputs. Deal "
            "out samples by length, with batches of as many tokens on each rank. Split a data set "
            "by its size and not by its files.",
            "code": "order = sorted(range(len(dataset)), key=lengths.__getitem__)\n"
            "own = order[dist.get_rank()::dist.get_world_size()]   # similar lengths everywhere",
        },
        "extra work": {
            "fix": "Find what {ranks} alone does: evaluation, metrics, logging or checkpoints. Do "
            "it every so many steps, share it among the ranks, or move it behind the loop.",
            "code": "# not in each step, and not on one rank while the others wait\n"
            "if step % 100 == 0:\n"
            "    evaluate(model, shard_of(data, rank))  # then one reduction of the sums",
        },
        "imbalance that moves": {
            "fix": "Give the ranks equal work: batches by tokens and not by samples, sorted or "
            "packed sequences."
        },
        "pipeline": {
            "fix": "Move layers from {ranks} to the others, or split it; embeddings and the loss "
            "count as layers.",
            "assumptions": (
                "the gain is of rebalanced stages, all with the same work; layers move as a whole, "
                "so less of it may be reached",
            ),
        },
        "the ranks train on CPUs": {
            "code": "# is it the machine? the same work on every rank, one after the other\n"
            "a = torch.randn(2048, 2048); start = time.perf_counter()\n"
            "for _ in range(20): a @ a\n"
            "print(rank, time.perf_counter() - start, 's')"
        },
    }

    inference = {
        "cases": {
            "imbalance": {
                "fix": "Give the ranks equal work: place experts by load, embedding tables by "
                "cost, or route requests by sequence length."
            },
            "pipeline": {
                "fix": "Move layers from {ranks} to the others, or split it; embeddings and the "
                "output layer count as layers."
            },
        }
    }

    confidence = 0.8

    framework_advice = in_any_language(
        "Find out what the rank that comes last does longer than the others, and give all ranks "
        "equal work."
    )

    def check_run(self, comparison: RankComparison) -> Outcomes:
        """Report the outliers that hold the others up, for any cause but a slow device."""
        clocks = comparison.job.joined.clocks
        if clocks.error_ns is None and comparison.job.joined.rows:
            yield SkippedCheck(
                what="whether one rank keeps the others waiting",
                why=f"the ranks cannot be put on one clock: {clocks.reason}",
                record="the same steps on every rank, in one run",
            )
        yield from self._report_pause(comparison)
        if not comparison.outliers:
            yield from self._report_pass(comparison)
            return
        for deviation, gain in comparison.outliers:
            if deviation.slow_device:
                continue
            yield self._build_finding(comparison, deviation, gain)

    def _report_pause(self, comparison: RankComparison) -> Outcomes:
        """Report a step of one rank that took far longer than its other steps, and than steps of
        all ranks. It is not a straggler: it has another cause."""
        times = comparison.job.profile.work_ns_by_step
        if (
            times.shape[1] < MIN_PAUSE_STEPS
            or not np.isfinite(times).any()
            or not comparison.job.step_ns
        ):
            return
        excess = times - np.nanmedian(times, axis=1, keepdims=True)
        order = np.argsort(np.nan_to_num(excess, nan=-np.inf), axis=None)
        (rank, step), (_, other_step) = (np.unravel_index(n, times.shape) for n in order[[-1, -2]])
        longest, next_longest = excess.flat[order[-1]], excess.flat[order[-2]]
        late_ranks = {
            index
            for deviation, _ in comparison.outliers
            for index in deviation.members.rank_indices
        }
        lost_ns = float(longest) / times.shape[1]
        if rank in late_ranks or lost_ns < self.min_share * comparison.job.step_ns:
            return
        if longest < MIN_PAUSE_RATIO * max(float(next_longest), 0.0) or other_step == step:
            return  # several pauses, or a step that is long on several ranks
        steps = comparison.job.summaries[int(rank)].steps
        name = steps[int(step)].name if step < len(steps) else f"step {step}"
        yield SkippedCheck(
            what=f"why rank {comparison.numbers[int(rank)]} pauses in one step",
            why=f"in {name} it takes {t.format_duration(float(longest))} longer than in its other "
            f"steps, and the others wait for it: once in {times.shape[1]} steps is not a straggler",
            record="stacks (with_stack=True) on this rank, and more steps; look for garbage "
            "collection, a checkpoint or logging on it",
        )

    def _report_pass(self, comparison: RankComparison) -> Outcomes:
        """Report a passed check, or why it is not certain."""
        from advisor.measure.ranks.outliers import late_chance

        job, result = comparison.job, comparison.job.waits
        steps = max(1, len(job.profile.steps))
        if job.joined.clocks.error_ns is None or not len(result.row) or not job.step_ns:
            return
        rank = int(np.argmax(result.caused_exposed_ns))
        collectives, last_count = int(result.collective_count[rank]), int(result.last_count[rank])
        lost_ns = float(result.caused_exposed_ns[rank]) / steps
        if lost_ns < self.min_share * job.step_ns:
            yield PassedCheck(
                text="no rank keeps the others waiting for long: the worst costs them "
                f"{t.format_duration(lost_ns)} "
                f"{t.format_per(find_unit(comparison))} that no compute hides "
                f"({lost_ns / job.step_ns:.0%}), "
                f"clocks aligned to {t.format_duration(job.joined.clocks.error_ns)}"
            )
            return
        if last_count < MIN_LATE * collectives or collectives < MIN_COLLECTIVES:
            return
        if late_chance(job, rank) >= self.max_chance:
            yield SkippedCheck(
                what="whether one rank keeps the others waiting",
                why=f"rank {comparison.numbers[rank]} arrives last at {last_count} of "
                f"{collectives} collectives, which may be chance",
                record="more steps",
            )
            return

    def _build_finding(
        self, comparison: RankComparison, deviation: Deviation, gain: JobGain | None
    ) -> Finding:
        subject = describe_subject(comparison.job, deviation)
        finding = finding_of(comparison, deviation, gain, _build_title(subject, deviation))
        case = "imbalance that moves" if deviation.rank_varies else deviation.kind
        advice = self.case(case, ranks=subject) if case in self.cases else {}
        if not any(summary.kernels for summary in comparison.job.summaries):
            on_host = self.case("the ranks train on CPUs")
            advice = on_host if case == "compute" else on_host | advice
            if case == "imbalance":
                advice |= self.case("other shapes", ranks=subject)
        return replace(finding, **{"fix": self.fix.format(ranks=subject), **advice})

    @staticmethod
    def examples() -> dict[str, Any]:
        return {
            "a slow rank": _build_ranks([2000.0, 2000.0, 3000.0]),
            "a slow process on a CPU": _build_processes([20e3, 60e3]),
            "longer sequences on a CPU": _build_processes([20e3, 60e3], [64, 192]),
            "late in each of four steps": _build_ranks([2000.0, 2000.0], late=(1, 1, 1, 1)),
            "equal ranks": (_build_ranks([2000.0, 2000.0, 2000.0]), "lost_ns < self.min_share"),
            "hardly late": (_build_ranks([2000.0, 2000.0, 2040.0]), "lost_ns < self.min_share"),
            "taking turns": (
                _build_ranks([2000.0, 2000.0, 2000.0], turn=800.0),
                "last_count < MIN_LATE * collectives",
            ),
            "equal processes": (_build_processes([20e3, 20e3]), "lost_ns < self.min_share"),
            "late at three of four": (
                _build_ranks([2000.0, 2000.0], late=(1, 1, 0, 1)),
                "late_chance(job, rank) >= self.max_chance",
            ),
        }


def _build_title(subject: str, deviation: Deviation) -> str:
    plural = len(deviation.members.rank_indices) > 1 and deviation.members.unit == "rank"
    name = f"{t.upper_first(subject)}"
    if deviation.rank_varies:
        return "A different rank holds up each step"
    if deviation.kind == "network":
        return f"The links of {subject} are slow"
    if deviation.kind == "pipeline":
        return f"{name} takes longer than the other stages"
    if deviation.kind == "extra work":
        return f"{name} {'do' if plural else 'does'} work that the others do not"
    if deviation.kind == "imbalance":
        return f"{name} {'have' if plural else 'has'} more work than the others"
    return f"{name} {'keep' if plural else 'keeps'} the others waiting"


def _build_ranks(
    compute: list[float], turn: float = 0.0, late: tuple[int, ...] = ()
) -> list[TraceBuilder]:
    """Build ranks that compute for these times, µs, in each step and then leave an all-reduce
    together. ``late`` names the rank that computes longer in each step."""
    builders = [TraceBuilder(rank=n, world_size=len(compute)) for n in range(len(compute))]
    for step in range(len(late) or 6):
        work = [us + (turn if step % len(compute) == n else 0) for n, us in enumerate(compute)]
        if late:
            work[late[step]] += 1000
        for b, us in zip(builders, work, strict=True):
            with b.step():
                b.product(us)
                b.collective(
                    "allreduce", 20 << 20, 300 + max(work) - us, wait=True, group_size=len(compute)
                )
                b.sync()
    return builders


def _build_processes(compute: list[float], lengths: Sequence[int] = ()) -> list[TraceBuilder]:
    """Build processes that compute for these times, µs, start two all-reduces of gloo, and wait for
    both. ``lengths`` are the lengths of the sequences that each of them gets."""
    builders = [TraceBuilder(None, rank=n, world_size=len(compute)) for n in range(len(compute))]
    for _ in range(6):
        for rank, (b, us) in enumerate(zip(builders, compute, strict=True)):
            shapes = [[lengths[rank], 64]] if lengths else None
            with b.step():
                start = b.now
                for part, bucket in ((0.75, 1), (0.25, 2)):
                    b.on_host("aten::mm", us * part, shapes)
                    with b.op("c10d::allreduce_"):
                        started = b.now
                    # two threads: both wait for the slowest process at once
                    done = start + max(compute) * (0.75 if bucket == 1 else 1) + 300 * bucket
                    with b.thread(10 + bucket):
                        outer, b.now = b.now, started
                        with b.range("gloo:all_reduce"):
                            b.now = max(done, started)
                        b.now = outer
                b.now = start + max(compute) + 1000
    return builders

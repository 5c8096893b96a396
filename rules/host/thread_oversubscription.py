"""More threads compute than there are cores."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.rules.recorded import find_loader, local_ranks, measure_it, record, workers_of
from advisor.rules.sources import CHOSEN, CURED_RECORDINGS, SAGEMAKER_CPU
from advisor.testing import TraceBuilder


class ThreadOversubscription(Rule):
    """Every training process computes with as many threads as PyTorch is set to use (by default one
    per core of the whole machine), and DataLoader workers come on top. Together they are more than
    1.5 times the cores that the processes may use, so threads wait for each other at every parallel
    operation.

    Threads that sleep cost nothing, so the cores must be busy as well: at least 90 % of them by
    this process and its workers, or of the machine. In a container, PyTorch counts the machine's
    cores and not the quota's. torchrun sets one thread per process unless told otherwise.
    """

    id = "thread-oversubscription"
    title = "More threads compute than there are cores"
    category = "host"
    knobs = ("threads",)
    reads_record = True
    found_in = ("recorded/threads.slow",)
    silent_in = ("recorded/threads.cured", *CURED_RECORDINGS)
    validated_on = "CPU recordings on two busy cores: fires with 16 threads, silent with one"
    references = ("https://pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html",)

    max_ratio = Threshold(1.5, "threads per core", CHOSEN)
    min_busy = Threshold(0.90, "of the cores", SAGEMAKER_CPU)

    verify = "Record again with both settings and compare the median step."
    falsified_by = "a median step that is no shorter with fewer threads"
    confidence = 0.6

    fix = "Give each process about {threads}."
    code = "export OMP_NUM_THREADS={best}   # in Python: torch.set_num_threads({best})"

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare threads and workers with cores."""
        recorded = record(a)
        threads, cpus = recorded.flag("num_threads"), recorded.record.rank.cpus
        if not isinstance(threads, int) or threads < 2 or not cpus:
            return
        feed = find_loader(a)
        workers = (workers_of(feed) or 0) if feed is not None else 0
        ranks = local_ranks(a)
        ratio = ranks * (threads + workers) / cpus
        if ratio <= self.max_ratio or ranks * threads <= cpus:
            return  # loader-workers looks at more workers than cores
        own, machine = recorded.host("process_cpu"), recorded.host("cpu")
        throttled = recorded.host("throttled")
        busy = max(
            ranks * float(own.mean()) / 100 / cpus if len(own) else 0.0,
            float(machine.mean()) / 100 if len(machine) else 0.0,
        )
        stopped = len(throttled) > 1 and throttled[-1] > throttled[0]
        if busy < self.min_busy and not stopped:
            return
        best = max(1, cpus // ranks - min(workers, cpus // ranks - 1))
        yield Finding(
            summary=(
                f"{count_noun(ranks, 'process')} with {threads} threads and {workers} workers each "
                f"share {count_noun(cpus, 'core')}, and {busy:.0%} of them are busy."
            ),
            evidence=[
                Evidence("threads and workers per core", ratio, "", *self.limit("max_ratio")),
                Evidence("threads per process", threads, "count"),
                Evidence("cores", cpus, "count"),
                Evidence("cores of the machine", recorded.record.rank.cpus_total, "count"),
                Evidence("busy cores", busy, "share", *self.limit("min_busy")),
                Evidence("OMP_NUM_THREADS", recorded.record.rank.env.get("OMP_NUM_THREADS")),
            ],
            impact=measure_it("the record does not show what fewer threads save; try it"),
            fix=self.fix.format(threads=count_noun(best, "thread")),
            code=self.code.format(best=best),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Eight ranks of 32 threads on 32 cores; a container of 2 CPUs on a machine of 64."""
        return {
            "eight ranks of 32 threads": _run(32, 32, ranks=8, machine=97),
            "a container's quota": _run(64, 2, own=200),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """One thread per rank; idle cores; workers only; threads not recorded."""
        return {
            "one thread per rank": (_run(1, 8, ranks=8, machine=97), "threads < 2"),
            "idle cores": (_run(32, 32, ranks=8, machine=20), "min_busy"),
            "as many threads as cores": (_run(8, 8, own=790), "ratio <= self.max_ratio"),
            "not recorded": (_run(None, 8, own=790), "not isinstance(threads, int)"),
        }


def _run(
    threads: int | None, cpus: int, *, ranks: int = 1, own: float = 50, machine: float = 10
) -> TraceBuilder:
    from advisor.core.run_directory import Host

    b = TraceBuilder()
    flags = {} if threads is None else {"num_threads": threads}
    r = b.record_of_run(cpus=cpus, flags=flags, env={"LOCAL_WORLD_SIZE": str(ranks)})
    r.steps(40, 10, forward=5)
    r.watch(host=Host(process_cpu=own, cpu=machine))
    return b

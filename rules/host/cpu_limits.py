"""Limits of the host that telemetry shows: CPU quota, NUMA placement and number of threads."""

from advisor.core import text as t
from advisor.core.finding import WHOLE_STEP, Finding, Outcomes, impact_without_gain
from advisor.core.rule import Citation, Evidence, Rule, Threshold
from advisor.core.run_directory import HostSample
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, ENGINE_FLOOR, SAGEMAKER_CPU
from advisor.rules.support.common import (
    SharedCoresRule,
    find_loader,
    impact_per_step,
    local_ranks,
    run_steps_of,
    steps_seen,
    workers_of,
)
from advisor.testing import Examples, TraceBuilder


class CpuQuota(Rule):
    """The container has a quota of CPU time per period (usually 100 ms). Once it is spent, the
    kernel stops every thread of the container until the next period, including the training loop
    and its launches. Short bursts, such as those of DataLoader workers, use it up although the
    average is low.

    The kernel counts how long threads were stopped (``cpu.stat``), summed over CPUs. The rule fires
    at 1% of the run's time."""

    id = "cpu-quota"
    title = "The container's CPU quota throttles the process"
    host_check = "CPU limits"
    reads_record = True
    sources = (
        Citation(
            "kernel documentation: a period of 100 ms",
            "https://docs.kernel.org/scheduler/sched-bwc.html",
        ),
    )
    references = ("https://docs.kernel.org/scheduler/sched-bwc.html",)

    min_share = Threshold(0.01, "throttled time over the run's time", ENGINE_FLOOR)

    fix = (
        "Raise the container's CPU limit or remove it. Until then, start fewer DataLoader workers "
        "and threads than the quota allows."
    )
    code = "# Kubernetes: resources.limits.cpu; Docker: --cpus; Slurm: --cpus-per-task"
    verify = "Record again: the throttled time does not grow."
    falsified_by = "the same median step without a quota"
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        stopped = run_steps.counter_increase("throttled")
        if stopped is None:
            return
        stopped_ns, run_ns = 1e3 * stopped[0], float(stopped[1])
        if stopped_ns < self.min_share * run_ns:
            return
        periods, _ = run_steps.counter_increase("throttled_periods") or (0, 0)
        yield Finding(
            summary=(
                f"The CPU quota stopped threads of this container for "
                f"{t.format_duration(stopped_ns)} in {t.format_duration(run_ns)}, in {periods} "
                "periods."
            ),
            evidence=[
                Evidence("time in which threads were stopped", stopped_ns, "ns"),
                self.compare(
                    "time in which threads were stopped over the run's time",
                    stopped_ns / run_ns,
                    "min_share",
                ),
                Evidence("periods with stopped threads", periods, "count"),
                Evidence("CPUs that the quota allows", run_steps.rank_record.rank.cpus, "count"),
            ],
            impact=impact_without_gain("the record does not show which steps it delayed"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "a tenth of the time": _build_throttled_run(0.1),
            "never": (_build_throttled_run(0.0), "stopped_ns < self.min_share * run_ns"),
            "hardly ever": (_build_throttled_run(0.001), "min_share"),
            "not recorded": (_build_throttled_run(None), "stopped is None"),
        }


class NumaMismatch(Rule):
    """The process is pinned to CPUs of another NUMA node than its GPU. Launches and copies cross
    the link between the sockets, and pinned host memory is on the far side.

    The rule reads the process's affinity and the PCI device's node. It ignores a process that may
    run on several nodes, because the scheduler chooses where it runs. Virtual machines often hide
    the nodes; then the rule is silent."""

    id = "numa-mismatch"
    title = "The process is pinned to another NUMA node than its GPU"
    knobs = ("affinity",)
    reads_record = True
    references = (
        "https://docs.nvidia.com/deeplearning/performance/index.html",
        "https://pytorch.org/docs/stable/elastic/numa.html",
    )

    verify = "Record again: the nodes are the same, and copies to the GPU are faster."
    falsified_by = "the same copy bandwidth from both nodes"
    confidence = 0.9

    fix = "Pin the process and its memory to node {node}."
    code = (
        "numactl --cpunodebind={node} --membind={node} python PROGRAM.py\n"
        "# torchrun (PyTorch 2.8 and later): --numa-binding=node"
    )

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        gpu, nodes = run_steps.flag("numa_node_gpu"), run_steps.flag("numa_node_cpus")
        if not isinstance(gpu, int) or not isinstance(nodes, list) or not nodes or gpu in nodes:
            return
        cpus = ", ".join(str(node) for node in nodes[:8])
        yield Finding(
            summary=(
                f"The process may only run on the CPUs of node {cpus}, but its GPU is attached to "
                f"node {gpu}. Every launch and every copy crosses the link between them."
            ),
            evidence=[
                Evidence("NUMA node of the GPU", gpu),
                Evidence("NUMA nodes of the process", cpus),
                Evidence("CPUs of the process", run_steps.rank_record.rank.cpus, "count"),
            ],
            impact=impact_without_gain(
                "only a copy from each node shows how much slower the remote node is"
            ),
            fix=self.fix.format(node=gpu),
            code=self.code.format(node=gpu),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "the other socket": _build_pinned_run(1, [0]),
            "the same node": (_build_pinned_run(1, [1]), "gpu in nodes"),
            "not pinned": (_build_pinned_run(1, [0, 1]), "gpu in nodes"),
            "nodes not recorded": (_build_pinned_run(None, [0]), "not isinstance(gpu, int)"),
        }


def _build_throttled_run(share: float | None) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run(cpus=4)
    r.steps(100, 10)
    us = 100 * 10_000

    def host(elapsed: float) -> HostSample:
        if share is None:
            return HostSample()
        return HostSample(
            throttled=round(elapsed * share * us), throttled_periods=round(elapsed * 10)
        )

    r.watch(host=host)
    return b


def _build_pinned_run(gpu: int | None, cpus: list[int]) -> TraceBuilder:
    b = TraceBuilder()
    flags = {"numa_node_cpus": cpus, "numa_nodes": 2}
    b.record_of_run(flags=flags if gpu is None else {**flags, "numa_node_gpu": gpu}).steps(10, 10)
    return b


class CpuContention(SharedCoresRule):
    """Other programs of the machine keep the cores busy, so the main thread waits for one although
    it has work. The kernel counts that time (``/proc/<pid>/schedstat``).

    The rule fires from 10% of the run, if other programs use at least a quarter of the machine's
    cores. Where this process's own workers use more than they do, see loader-workers and
    cpu-bound-transforms. A container's quota is different: see cpu-quota.

    The gain is the part of the waiting that falls to other programs, as they and the workers share
    the cores by their use. A thread also gets slower beside busy cores, which may be the same
    physical core. A step that the GPU limits gains nothing."""

    id = "cpu-contention"
    title = "Other programs take the cores that the main thread needs"
    host_check = "CPU limits"
    subject = WHOLE_STEP
    reads_record = True
    found_in = ("recorded/contention.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "CPU recordings on two cores of a training of one thread: fires beside six busy processes, "
        "silent alone"
    )
    references = ("https://docs.kernel.org/scheduler/sched-stats.html",)

    min_wait = Threshold(0.10, "of the run", CHOSEN)
    min_others = Threshold(0.25, "of the machine's cores in use by other programs", CHOSEN)

    fix = (
        "End the other programs, move them to other cores or machines, or lower their priority. In "
        "a cluster, ask the scheduler for cores of your own."
    )
    code = (
        "top -o %CPU              # which programs compute\n"
        "renice -n 19 -p PID      # of the other program: it yields to yours"
    )
    verify = "Record again: the main thread waits less for a core."
    falsified_by = "the same median step on a machine that runs nothing else"
    assumptions = ("the other programs keep their load",)
    confidence = 0.8

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        waited = run_steps.run_delay_share
        others, total = run_steps.other_programs_cores, run_steps.rank_record.rank.cpus_total
        if waited is None or others is None or not total or a.is_device_bound:
            return
        worker_cores = run_steps.worker_cores
        if waited < self.min_wait or others < max(worker_cores, self.min_others * total):
            return
        step = run_steps.mean or 0.0
        wait = waited * step
        saving = run_steps.other_programs_share or 0.0
        busy_share = others / max(total - 1, others)
        yield Finding(
            summary=(
                f"The main thread has work but no core for {t.format_duration(wait)} of each step "
                f"({waited:.0%}), while other programs use {others:.1f} of the machine's "
                f"{t.count_noun(total, 'core')}. Shared cores also run slower, which the gain "
                "includes."
            ),
            evidence=[
                self.compare("main thread without a core", waited, "min_wait"),
                self.compare(
                    "cores that other programs use", others, "min_others", "", times=total
                ),
                Evidence("cores that this process's workers use", worker_cores, "count"),
                steps_seen(run_steps),
            ],
            impact=impact_per_step(
                a,
                step * self.saving_alone(saving, busy_share, self.shared_speed),
                low=0.5 * step * self.saving_alone(saving, busy_share, self.worst_shared_speed),
                high=step * self.saving_alone(waited, busy_share, self.best_shared_speed),
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "another job keeps both cores busy": _build_contention(0.4, machine=100),
            "the machine has free cores": (
                _build_contention(0.02, machine=60),
                "waited < self.min_wait",
            ),
            "the workers use more": (
                _build_contention(0.4, machine=100, own=140, children=120),
                "others < max(worker_cores, self.min_others * total)",
            ),
            "the kernel does not count it": (
                _build_contention(None, machine=100),
                "waited is None",
            ),
        }


def _build_contention(
    waited: float | None, *, machine: float, own: float = 50, children: float | None = None
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run(cpus=2, cpus_total=2, flags={"num_threads": 1})
    r.steps(60, 10, forward=5)
    seconds = 60 * 10 / 1000
    r.watch(
        host=lambda share: HostSample(
            cpu=machine,
            process_cpu=own,
            children_cpu=children,
            run_delay=None if waited is None else round(share * seconds * 1e9 * waited),
        )
    )
    return b


class ThreadOversubscription(Rule):
    """Every training process computes with as many threads as PyTorch is set to use, by default one
    per core of the whole machine. DataLoader workers come on top. Together they exceed 1.5 times
    the cores that the processes may use, so threads wait for each other at every parallel
    operation.

    Sleeping threads cost nothing, so at least 90% of the cores must be busy as well. This process
    and its workers count, or the whole machine. In a container, PyTorch counts the machine's cores
    and not the quota's. torchrun sets one thread per process unless it is set."""

    id = "thread-oversubscription"
    title = "More threads compute than there are cores"
    host_check = "threads"
    knobs = ("threads",)
    reads_record = True
    found_in = ("recorded/threads.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = "CPU recordings on two busy cores: fires with 16 threads, silent with one"
    references = ("https://pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html",)

    max_ratio = Threshold(1.5, "threads per core", CHOSEN)
    min_busy = Threshold(0.90, "of the cores", SAGEMAKER_CPU)

    verify = "Record again with both settings and compare the median step."
    falsified_by = "a median step that is no shorter with fewer threads"
    confidence = 0.6

    fix = "Give each process about {threads}."
    code = "export OMP_NUM_THREADS={best}   # in Python: torch.set_num_threads({best})"

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        threads, cpus = run_steps.flag("num_threads"), run_steps.rank_record.rank.cpus
        if not isinstance(threads, int) or threads < 2 or not cpus:
            return
        feed = find_loader(a)
        workers = (workers_of(feed) or 0) if feed is not None else 0
        ranks = local_ranks(a)
        ratio = ranks * (threads + workers) / cpus
        if ratio <= self.max_ratio or ranks * threads <= cpus:
            return  # loader-workers checks for more workers than cores
        process_cpu, machine_cpu = run_steps.host("process_cpu"), run_steps.host("cpu")
        throttled = run_steps.host("throttled")
        busy = max(
            ranks * float(process_cpu.mean()) / 100 / cpus if len(process_cpu) else 0.0,
            float(machine_cpu.mean()) / 100 if len(machine_cpu) else 0.0,
        )
        is_throttled = len(throttled) > 1 and throttled[-1] > throttled[0]
        if busy < self.min_busy and not is_throttled:
            return
        best = max(1, cpus // ranks - min(workers, cpus // ranks - 1))
        yield Finding(
            summary=(
                f"{t.count_noun(ranks, 'process')} with {t.count_noun(threads, 'thread')}"
                + (f" and {t.count_noun(workers, 'worker')}" if workers else "")
                + (" each share" if ranks > 1 else " shares" if not workers else " share")
                + f" {t.count_noun(cpus, 'core')}, and {busy:.0%} of them are busy."
            ),
            evidence=[
                self.compare("threads and workers per core", ratio, "max_ratio", ""),
                Evidence("threads per process", threads, "count"),
                Evidence("cores of the process", cpus, "count"),
                Evidence("cores of the machine", run_steps.rank_record.rank.cpus_total, "count"),
                self.compare("busy cores", busy, "min_busy"),
                Evidence("OMP_NUM_THREADS", run_steps.rank_record.rank.env.get("OMP_NUM_THREADS")),
            ],
            impact=impact_without_gain("the record does not show what fewer threads save; try it"),
            # the step then consists of threaded operators
            costs_more_than_recorded=a.trains_on_host,
            fix=self.fix.format(threads=t.count_noun(best, "thread")),
            code=self.code.format(best=best),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "eight ranks of 32 threads": _build_threads(32, 32, ranks=8, machine=97),
            "a container's quota": _build_threads(64, 2, own=200),
            "one thread per rank": (_build_threads(1, 8, ranks=8, machine=97), "threads < 2"),
            "idle cores": (_build_threads(32, 32, ranks=8, machine=20), "min_busy"),
            "as many threads as cores": (_build_threads(8, 8, own=790), "ratio <= self.max_ratio"),
            "not recorded": (_build_threads(None, 8, own=790), "not isinstance(threads, int)"),
        }


def _build_threads(
    threads: int | None, cpus: int, *, ranks: int = 1, own: float = 50, machine: float = 10
) -> TraceBuilder:
    b = TraceBuilder()
    flags = {} if threads is None else {"num_threads": threads}
    r = b.record_of_run(cpus=cpus, flags=flags, env={"LOCAL_WORLD_SIZE": str(ranks)})
    r.steps(40, 10, forward=5)
    r.watch(host=HostSample(process_cpu=own, cpu=machine))
    return b

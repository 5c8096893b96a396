"""DataLoader workers and the cores that they may use: too few workers, too many, or busy cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, SkippedCheck, impact_without_gain
from advisor.core.rule import Evidence, Threshold
from advisor.core.run_directory import HostSample
from advisor.measure import Analysis
from advisor.measure.host.stacks import parse_frame
from advisor.rules.support.citations import (
    CHOSEN,
    CURED_RECORDINGS,
    GPUPROF,
    HAND_OVER,
    SAGEMAKER,
    SAGEMAKER_CPU,
    TENSORBOARD,
    XPROF,
)
from advisor.rules.support.common import (
    SharedCoresRule,
    cores_per_process,
    estimate_contended_loading,
    find_loader,
    impact_per_step,
    run_steps_of,
    steps_seen,
    workers_needed,
    workers_of,
)
from advisor.rules.support.loader_waits import (
    SINGLE_PROCESS,
    WORKERS,
    LoadingRule,
    library_of_loading,
    lines_of,
    move_loading,
    sample_loading,
)
from advisor.testing import Examples, TraceBuilder

MIN_CPU_SAMPLES = 3
"""Minimum number of samples of CPU use."""


class LoaderWorkers(LoadingRule):
    """The training loop waits for batches while cores are free for more DataLoader workers. Or
    there are so many workers that they and the training process take the cores from each other.

    Cores are those that the process may use: its CPU affinity, and the container's quota where that
    is lower. ``os.cpu_count()`` knows neither. The training processes of the machine
    (``LOCAL_WORLD_SIZE``) share them. Too few: workers leave more than 30% of these cores unused,
    and the loop spends at least 5% of the step in the phase ``data``. Too many: more than twice the
    cores, whatever the wait, when the CPUs are busy.

    With a profiled window the gain is replayed. Without one it follows from the loader being the
    bottleneck: W workers deliver one batch per step, so W' deliver one every W/W' steps. The step
    cannot get shorter than it is without the wait. Where a loader has no workers (0), a worker
    takes over the full wait.

    Traps: storage or memory bandwidth may limit the fetching instead of cores. Then more workers do
    not help. The GPU may have work queued during the wait; then the gain is smaller."""

    id = "loader-workers"
    title = "The number of DataLoader workers does not match the cores"
    host_check = "loading data"
    sampled_part = "data"
    knobs = ("workers",)
    reads_record = True
    found_in = ("recorded/workers.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "CPU recordings on two cores, torch 2.13, a dataset that sleeps: fires with no workers and "
        "with one, silent with two"
    )
    references = ("https://pytorch.org/docs/stable/data.html#multi-process-data-loading",)

    min_wait = Threshold(0.05, "of the step in the phase data", TENSORBOARD, XPROF)
    min_workers_per_core = Threshold(
        0.70, "workers per core: below it, cores are unused", SAGEMAKER
    )
    max_workers_per_core = Threshold(
        2.0, "workers per core: above it, workers compete for cores", SAGEMAKER
    )
    max_busy_cpus = Threshold(
        0.90, "of the cores busy: below it, too many workers cost nothing", SAGEMAKER_CPU
    )
    min_wait_ms = Threshold(
        3.0, "ms: taking over a ready batch from a worker takes as long", HAND_OVER
    )

    max_taken = Threshold(
        0.5, "of the loading would run on cores that the step needs for its own compute", CHOSEN
    )

    verify = "Record again: the phase 'data' shrinks."
    falsified_by = "the same step time when the loop reuses one batch"
    assumptions = ("cores limit the fetching, not storage",)
    confidence = 0.85

    fix = "Give the loader about {workers}: this process may use {cores}."
    code = (
        "# keep your other arguments\n"
        "loader = DataLoader(..., num_workers={best},\n"
        "                    pin_memory=torch.cuda.is_available(),\n"
        "                    persistent_workers=True)"
    )
    cases = {
        "too many": {
            "title": "More DataLoader workers than the cores can run",
            "fix": "Use about {workers}.",
            "code": "# keep your other arguments\nloader = DataLoader(..., num_workers={best})",
            "verify": "Record again with both settings and compare the median step.",
            "confidence": 0.6,
            "falsified_by": "a step that is no shorter with fewer workers",
            "assumptions": ("these workers keep the cores busy",),
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        loader = find_loader(a)
        cpus = run_steps.rank_record.rank.cpus
        if loader is None:
            return
        workers = workers_of(loader)
        wait = run_steps.phase("data")
        if workers is None or cpus is None or wait is None:
            yield SkippedCheck(
                what="whether the number of DataLoader workers matches the cores",
                why="the cores, the workers or the wait for data are not recorded",
            )
            return
        cores = cores_per_process(a, cpus)
        share = run_steps.share("data") or 0.0
        moved_share = sample_loading(a).movable_share
        share *= moved_share
        mean_wait = moved_share * float(wait.mean())
        median_wait = moved_share * float(np.median(wait))
        if (
            workers < self.min_workers_per_core * cores
            and share >= self.min_wait
            and median_wait >= self.min_wait_ms * 1e6
            and not a.is_device_bound
            and (workers > 0 or cores >= 2)
            and not self._needs_cores(a, workers, share)
        ):
            yield self._report_too_few(a, workers, cores, mean_wait, share)
        elif workers > self.max_workers_per_core * cores:
            busy = run_steps.used_cores
            if busy is not None and busy >= self.max_busy_cpus * cores:
                yield self._report_too_many(a, workers, cores, busy)

    def _needs_cores(self, a: Analysis, workers: int, share: float) -> bool:
        """Return whether this process computes on the cores that more workers would need."""
        if not workers:
            return (estimate_contended_loading(a, share) or 0.0) > self.max_taken
        busy, cores = run_steps_of(a).used_cores, run_steps_of(a).rank_record.rank.cpus
        return bool(a.trains_on_host and busy and cores and busy > self.max_busy_cpus * cores)

    def _report_too_few(
        self, a: Analysis, workers: int, cores: float, wait: float, share: float
    ) -> Finding:
        run_steps = run_steps_of(a)
        samples = sample_loading(a)
        line = samples.other_line if samples.movable_share < 1 else None
        step = run_steps.mean or 0.0
        other_ns = step - wait
        best = max(1, int(cores) - (0 if cores < 2 else 1), workers + 1)
        if not workers:
            best = min(int(cores), workers_needed(wait, other_ns) + 1)
        # without workers a batch takes the wait. One worker makes a batch while the step runs
        batch = wait if workers == 0 else workers * step
        new_step = max(other_ns, batch / best)
        gain = max(0.0, step - new_step)
        texts: dict[str, Any] = {
            "title": "The main process loads data itself (num_workers=0)"
            if workers == 0
            else "Fewer DataLoader workers than the cores allow",
            "fix": self.fix.format(
                workers=t.count_noun(best, "worker"), cores=t.count_noun(int(cores), "core")
            ),
            "code": self.code.format(best=best),
            "edits": [],
        }
        if not a.record_only:
            ratio = best if workers == 0 else max(2, round(best / workers))
            name = SINGLE_PROCESS if workers == 0 else WORKERS
            texts["edits"] = [move_loading(samples.movable_share, ratio, name)]
        use = None if workers else library_of_loading(a)
        if use is not None and use.cure is not None:
            texts |= self.advise_library(use, use.cure, texts["fix"], samples.movable_share, best)
        if a.record_only:
            texts["edits"] = []
            texts["impact"] = impact_per_step(a, gain, low=0.5 * gain)
        shared = ""
        if workers == 0 and a.record_only:
            left = new_step - other_ns
            cut = f"cut it to {t.format_duration(left)}" if left > 0 else "hide all of it"
            shared = f"; {t.count_noun(best, 'worker')} {cut} at best, and save half as much "
            shared += "at worst"
        return Finding(
            summary=(
                f"Waiting for data takes {t.format_duration(wait)} of each step ({share:.0%}) with "
                f"num_workers={workers}{shared}. This process may use "
                f"{t.count_noun(int(cores), 'core')}."
                + ("" if use is None else use.sentence("the loading"))
            ),
            evidence=[
                Evidence("wait for data", wait, "ns", per="step"),
                self.compare("wait for data, share", share, "min_wait", per="step"),
                Evidence("workers", workers, "count"),
                Evidence("cores per main process", cores, "count"),
                self.compare("workers per core", workers / cores, "min_workers_per_core", ""),
                steps_seen(run_steps),
            ],
            where=lines_of(use) or ([] if line is None else [line.location]),
            alternatives="loader",
            **texts,
        )

    def _report_too_many(self, a: Analysis, workers: int, cores: float, busy: float) -> Finding:
        best = max(1, int(cores) - 1)
        return Finding(
            summary=(
                f"{workers} workers share {t.count_noun(int(cores), 'core')} with the main "
                f"process, and all of them are busy ({busy:.1f} cores)."
            ),
            evidence=[
                Evidence("workers", workers, "count"),
                Evidence("cores per main process", cores, "count"),
                self.compare("workers per core", workers / cores, "max_workers_per_core", ""),
                self.compare("cores in use", busy, "max_busy_cpus", "", times=cores),
            ],
            impact=impact_without_gain("the record does not show what fewer workers save; try it"),
            **self.case("too many", workers=t.count_noun(best, "worker"), best=best),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "no workers on eight cores": _build_run(0, 8, data=6),
            "two workers on eight cores": _build_run(2, 8, data=6),
            "forty workers on eight busy cores": _build_run(40, 8, data=0.1, busy=780),
            "no workers, and no wait": (
                _build_run(0, 8, data=0.1),
                "workers > self.max_workers_per_core * cores",
            ),
            "as many workers as cores": (_build_run(8, 8, data=6), "min_workers_per_core"),
            "the cores belong to four ranks": (
                _build_run(2, 8, data=6, ranks=4),
                "min_workers_per_core",
            ),
            "only the hand-over of ready batches": (_build_run(2, 8, data=1.5), "min_wait_ms"),
            "one core, no workers": (
                _build_run(0, 1, data=6),
                "workers > self.max_workers_per_core * cores",
            ),
            "many workers, idle cores": (_build_run(40, 8, data=0.1, busy=200), "max_busy_cpus"),
            "training on the CPU keeps both cores busy": (
                _build_run(0, 2, data=6, busy=170),
                "workers > self.max_workers_per_core * cores",
            ),
            "cores not recorded": (_build_run(2, None, data=6), "cpus is None"),
        }


def _build_run(
    workers: int, cpus: int | None, *, data: float, ranks: int = 1, busy: float = 150
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run(cpus=cpus, env={"LOCAL_WORLD_SIZE": str(ranks)})
    r.event("loader", id=1, workers=workers)
    r.event("loader_iter", id=1)
    r.steps(60, 10, data=data, forward=2)
    r.watch(host=HostSample(process_cpu=busy))
    return b


class CpuBoundTransforms(SharedCoresRule):
    """The loop waits for data while DataLoader workers keep all its cores busy. More workers cannot
    help: the work per sample has to shrink or to move to the GPU.

    CPU use covers the training process and its workers, not the machine, so that other jobs do not
    count. Disk reads are ruled out as the cause where the disks deliver less than 500 MB/s
    (gpuprof). Network storage does not show in this figure.

    A loader without workers keeps one core busy at most; give it workers instead.

    Where the step computes on the CPU too, workers also take cores from it, whatever the wait. The
    training then gets fewer cores than PyTorch has threads. The gain is that of a training that
    gets the workers' cores too, by the CPU time of each process. It includes waits for the workers.
    Other programs that compute get their part of these cores, as the scheduler divides them. With
    several threads the gain is half of that, as they may not all have work. On a core beside a busy
    one, a thread is slower than alone: they may be one physical core, or share its memory
    bandwidth. The low end leaves half of the work to the workers, and the speed as it is. At the
    high end the training gets all of their cores, and a physical core to itself."""

    id = "cpu-bound-transforms"
    title = "All cores prepare data, and the step still waits for it"
    knobs = ("workers",)
    reads_record = True
    found_in = ("recorded/worker_cpu.slow",)
    silent_in = CURED_RECORDINGS
    validation_note = (
        "CPU recordings on two cores, torch 2.13: a dataset that decompresses a file for each "
        "sample, against one that maps it into memory"
    )
    references = (
        "https://pytorch.org/vision/stable/transforms.html#performance-considerations",
        "https://docs.nvidia.com/deeplearning/dali/user-guide/docs/",
    )

    min_wait = Threshold(0.15, "of the step", GPUPROF)
    min_cpu = Threshold(0.80, "of the cores that the process may use", GPUPROF)
    max_disk = Threshold(500e6, "bytes/s: above it, reading is the likelier cause", GPUPROF)

    fix = (
        "Do less CPU work per sample. Cache decoded samples, store images at the size you use, and "
        "augment full batches on the GPU (torchvision.transforms.v2, Kornia, DALI). Or decode on "
        "the GPU, or use a machine with more cores per GPU."
    )
    code = (
        "# decode in the dataset; augment the full batch on the GPU:\n"
        "augment = v2.Compose([\n"
        "    v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),\n"
        "    v2.ToDtype(torch.float32, scale=True)])\n"
        "images = augment(images.to('cuda', non_blocking=True))"
    )
    verify = "Record again: the phase 'data' shrinks, and the cores are less busy."
    falsified_by = "a loader that is no faster with an empty transform"
    assumptions = ("the GPU has time for the work that moves to it",)
    confidence = 0.75
    alternatives = "loader"
    cases = {
        "of a training on the CPU": {
            "title": "DataLoader workers take the cores that the step computes on",
            "fix": (
                "Do less CPU work per sample{item}. Read and decode a file once, not for each "
                "of its samples. Store samples as they are used: np.load(mmap_mode='r') reads "
                "single rows of an uncompressed .npy file."
            ),
            "code": (
                "self.x = np.load('x.npy', mmap_mode='r')   # in __init__, uncompressed\n"
                "sample = np.array(self.x[index])           # in __getitem__: one row"
            ),
            "verify": "Record again: the workers use fewer cores, and the step is shorter.",
            "falsified_by": "a step that is no shorter when the loop reuses one batch",
            "assumptions": ("the samples can be prepared with little CPU time",),
        }
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        loader = find_loader(a)
        share = run_steps.share("data")
        if loader is None or not workers_of(loader) or share is None:
            return
        taken = _measure_taken_cores(a)
        if taken is not None and taken.gain >= self.min_wait and taken.busy >= self.min_cpu:
            yield self._report_taken(a, loader, taken)
            return
        if share < self.min_wait:
            return
        cpu_percent = run_steps.host("process_cpu")
        cpus = run_steps.rank_record.rank.cpus
        if len(cpu_percent) < MIN_CPU_SAMPLES or cpus is None:
            yield SkippedCheck(
                what="whether the cores limit the DataLoader",
                why="too few samples of CPU use were recorded",
                record="a longer run, with psutil installed",
            )
            return
        cores = cores_per_process(a, cpus)
        busy = float(cpu_percent.mean()) / 100 / cores
        disk = run_steps.counter_increase("disk_read")
        disk_rate = None if disk is None else max(0.0, disk[0] * 1e9 / disk[1])
        if busy < self.min_cpu or (disk_rate or 0.0) >= self.max_disk or a.is_device_bound:
            return
        wait = share * (run_steps.mean or 0.0)
        yield Finding(
            summary=(
                f"Waiting for data takes {t.format_duration(wait)} of each step ({share:.0%}), "
                f"while the main process and its workers keep {busy:.0%} of "
                f"{t.count_noun(int(cores), 'core')} busy."
            ),
            evidence=[
                Evidence("wait for data", wait, "ns", per="step"),
                self.compare("wait for data, share", share, "min_wait", per="step"),
                self.compare("CPU use, share of the cores", busy, "min_cpu"),
                Evidence("cores per main process", cores, "count"),
                self.compare("disk reads", disk_rate, "max_disk", "bytes/s"),
                steps_seen(run_steps),
            ],
            impact=impact_per_step(a, wait),
        )

    def _report_taken(self, a: Analysis, loader: dict[str, Any], taken: TakenCores) -> Finding:
        run_steps = run_steps_of(a)
        step = run_steps.mean or 0.0
        frame = parse_frame(str(loader.get("item")))
        where = [] if frame is None else [frame.location]
        saving, busy_share = taken.gain, taken.busy_share
        return Finding(
            summary=(
                f"The workers use {taken.workers:.1f} of {taken.cores:.0f} cores, and the training "
                f"gets {taken.training:.1f} of the {t.format_number(taken.wanted)} that its "
                f"{'thread' if taken.wanted == 1 else 'threads'} can use."
            ),
            where=where,
            evidence=[
                Evidence("cores that workers use", taken.workers, "count"),
                Evidence("cores that the training gets", taken.training, "count"),
                Evidence("cores that its threads can use", taken.wanted, "count"),
                self.compare("CPU use, share of the cores", taken.busy, "min_cpu"),
                self.compare(
                    "gain if the cores sufficed, share", taken.gain, "min_wait", per="step"
                ),
                steps_seen(run_steps),
            ],
            impact=impact_per_step(
                a,
                step * self.saving_alone(saving, busy_share, self.shared_speed),
                low=0.5 * step * self.saving_alone(saving, busy_share, self.worst_shared_speed),
                high=step * self.saving_alone(taken.max_saving, busy_share, self.best_shared_speed),
                of_host=False,
            ),
            **self.case(
                "of a training on the CPU", item="" if frame is None else f" in {frame.function}"
            ),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "eight busy cores": _build_busy_cores(760),
            "workers take the core of a training on the CPU": _build_busy_cores(
                200, data=0.1, workers=2, cpus=2, children=140, threads=1
            ),
            "workers of a training on the CPU, cores are idle": (
                _build_busy_cores(160, data=0.1, workers=2, cpus=4, children=80, threads=1),
                "min_cpu",
            ),
            "other programs take more of the cores than the workers": (
                _build_busy_cores(
                    40, data=0.1, workers=2, cpus=2, children=20, threads=1, machine=97
                ),
                "share < self.min_wait",
            ),
            "idle cores": (_build_busy_cores(200), "min_cpu"),
            "the disk delivers 2 GB/s": (_build_busy_cores(760, disk=2e9), "max_disk"),
            "no wait": (_build_busy_cores(760, data=0.1), "min_wait"),
            "no workers": (_build_busy_cores(760, workers=0), "not workers_of(loader)"),
        }


class TakenCores(NamedTuple):
    """Cores of a training on the CPU and of its workers, on average."""

    cores: float
    workers: float
    training: float
    wanted: float
    """Cores that the training's threads can use."""
    busy: float
    """Share of the cores that anything uses."""
    max_saving: float
    """Share of the step that the training saves if it gets all of the workers' cores."""
    saving: float
    """Share of the step that it saves if other programs get their part of these cores."""

    @property
    def gain(self) -> float:
        """Estimated share of the step: with several threads, half of the saving."""
        return self.saving if self.wanted == 1 else 0.5 * self.saving

    @property
    def busy_share(self) -> float:
        """Share of the other cores that workers use."""
        return self.workers / max(self.cores - self.training, self.workers)


def _measure_taken_cores(a: Analysis) -> TakenCores | None:
    """Return the cores that workers take from a training on the CPU, or ``None`` if a GPU trains,
    or CPU use was not sampled by process."""
    run_steps = run_steps_of(a)
    workers, cpus = run_steps.host("children_cpu"), run_steps.rank_record.rank.cpus
    threads, used_cores = run_steps.flag("num_threads"), run_steps.used_cores
    if not a.trains_on_host or len(workers) < MIN_CPU_SAMPLES or cpus is None or used_cores is None:
        return None
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        return None
    cores = cores_per_process(a, cpus)
    worker_cores = float(workers.mean()) / 100
    other_cores = run_steps.other_programs_cores or 0.0
    training, wanted = max(0.0, used_cores - worker_cores), min(float(threads), cores)
    if not worker_cores or not training:
        return None
    max_saving = max(0.0, 1 - training / min(wanted, used_cores))
    freed = worker_cores * training / (training + other_cores)
    saving = max(0.0, 1 - training / min(wanted, training + freed))
    busy = min(1.0, (used_cores + other_cores) / cores)
    return TakenCores(cores, worker_cores, training, wanted, busy, max_saving, saving)


def _build_busy_cores(
    cpu: float,
    *,
    disk: float = 1e6,
    data: float = 6,
    workers: int = 8,
    cpus: int = 8,
    children: float | None = None,
    threads: int | None = None,
    machine: float | None = None,
) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run(cpus=cpus, flags={} if threads is None else {"num_threads": threads})
    r.event("loader", id=1, workers=workers)
    r.event("loader_iter", id=1)
    r.steps(60, 10, data=data)
    seconds = 60 * 10 / 1000
    r.watch(
        host=lambda share: HostSample(
            cpu=machine,
            process_cpu=cpu,
            children_cpu=children,
            disk_read=round(share * seconds * disk),
        )
    )
    return b

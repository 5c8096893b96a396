"""All cores prepare data, and the loop still waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, SkippedCheck, Threshold
from advisor.core.run_directory import Host
from advisor.measure import Analysis
from advisor.rules.recorded import (
    a_step,
    device_bound,
    find_loader,
    local_ranks,
    record,
    steps_seen,
    workers_of,
)
from advisor.rules.sources import GPUPROF
from advisor.testing import TraceBuilder


class CpuBoundTransforms(Rule):
    """The loop waits for data while DataLoader workers keep all its cores busy. More workers cannot
    help: the work per sample has to shrink or to move to the GPU.

    CPU use is that of the training process and its workers, not of the machine, so that other jobs
    do not count. Disk reads are ruled out as the cause where the disks deliver less than 500 MB/s
    (gpuprof). Network storage does not show there.

    A loader without workers keeps one core busy at most; give it workers instead.
    """

    id = "cpu-bound-transforms"
    title = "All cores prepare data, and the step still waits for it"
    category = "input"
    knobs = ("workers",)
    reads_record = True
    silent_in = ("recorded/worker_respawn.cured", "recorded/workers.cured")
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

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the wait for data with the CPU use."""
        recorded = record(a)
        feed = find_loader(a)
        share = recorded.share("data")
        if feed is None or not workers_of(feed) or share is None or share < self.min_wait:
            return
        usage = recorded.host("process_cpu")
        cpus = recorded.record.rank.cpus
        if len(usage) < 3 or cpus is None:
            yield SkippedCheck(
                what="whether the cores limit the DataLoader",
                why="too few samples of CPU use were recorded",
                record="a longer run, with psutil installed",
            )
            return
        cores = max(1.0, cpus / local_ranks(a))
        busy = float(usage.mean()) / 100 / cores
        disk = _disk(recorded.hosts)
        if busy < self.min_cpu or (disk or 0.0) >= self.max_disk or device_bound(a):
            return
        wait = share * (recorded.mean or 0.0)
        yield Finding(
            summary=(
                f"Waiting for data takes {t.format_duration(wait)} of each step ({share:.0%}), "
                f"while the main process and its workers keep {busy:.0%} of "
                f"{t.count_noun(int(cores), 'core')} busy."
            ),
            evidence=[
                Evidence("wait for data", wait, "ns", per="step"),
                Evidence("share", share, "share", *self.limit("min_wait"), per="step"),
                Evidence("CPU use", busy, "share", *self.limit("min_cpu")),
                Evidence("cores per main process", cores, "count"),
                Evidence("disk reads", disk, "bytes/s", *self.limit("max_disk")),
                steps_seen(recorded),
            ],
            impact=a_step(a, wait),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Eight cores at 95 %."""
        return {"eight busy cores": _run(760)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Idle cores; a fast disk read flat out; no wait; no workers."""
        return {
            "idle cores": (_run(200), "min_cpu"),
            "the disk delivers 2 GB/s": (_run(760, disk=2e9), "max_disk"),
            "no wait": (_run(760, data=0.1), "min_wait"),
            "no workers": (_run(760, workers=0), "not workers_of(feed)"),
        }


def _disk(hosts: list[tuple[int, Host]]) -> float | None:
    """Bytes per second read from disks between the first and the last sample with a count."""
    samples = [(ns, host.disk_read) for ns, host in hosts if host.disk_read is not None]
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return None
    (begin, first), (end, last) = samples[0], samples[-1]
    return max(0.0, (last - first) * 1e9 / (end - begin))


def _run(cpu: float, *, disk: float = 1e6, data: float = 6, workers: int = 8) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run(cpus=8)
    r.event("loader", id=1, workers=workers)
    r.event("loader_iter", id=1)
    r.steps(60, 10, data=data)
    seconds = 60 * 10 / 1000
    r.watch(host=lambda share: Host(process_cpu=cpu, disk_read=round(share * seconds * disk)))
    return b

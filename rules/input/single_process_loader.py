"""The training process loads its batches itself, and the device waits meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Edit, Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.measure import Analysis
from advisor.rules.common import of_step, places
from advisor.rules.input.waits import SINGLE, culprits, find_waits, in_one_step, recurs
from advisor.rules.recorded import taken_by_training
from advisor.rules.sources import CHOSEN, HAND_OVER, OURS, TENSORBOARD, XPROF
from advisor.testing import TraceBuilder


class SingleProcessLoader(Rule):
    """The DataLoader has no workers (``num_workers=0``), so the training process prepares each
    batch itself while the device is idle; workers would prepare it during the step before.

    PyTorch names the iterator in its range, ``_SingleProcessDataLoaderIter.__next__``. As for
    dataloader-wait, only the part of the loading that leaves the device idle counts. A short load
    is not worth a worker: taking a ready batch over from one (queue, shared memory, wake-up) took
    1.5 ms for 8 KiB and 4 ms for 2 MiB, measured with torch 2.13 and two busy cores. So data that
    is already in memory is better sliced as whole tensors.
    """

    id = "single-process-loader"
    title = "The DataLoader has no workers and the step waits for it"
    category = "input"
    knobs = ("workers",)
    found_in = (
        "traces/pairs/loader_autograd_workers0",
        "traces/pairs/loader_profiler_workers0",
        "workloads/loader_bound",
    )
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
        "workloads/loader_bound",
    )
    validated_on = (
        "public traces of one training with num_workers 0 and 4 (median step 155 to 121 ms); CPU "
        "recordings, torch 2.13: 80 ms of loading a step, gain priced at 65 % of the step; with 4 "
        "workers the unprofiled step went from 169 to 58 ms (65 %); a small CNN that trains on "
        "both of two cores: priced at nothing, and 26 to 55 % slower with two workers"
    )
    references = (
        "https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading",
        "https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
    )

    min_share = Threshold(0.05, "of the step", TENSORBOARD, XPROF)
    most_workers = Threshold(
        8,
        "workers, where the cores are not recorded: what shared machines give a GPU or more",
        OURS,
    )
    max_taken = Threshold(
        0.5, "of the loading, which the step would go on to take on cores that it needs", CHOSEN
    )
    min_batch_ms = Threshold(
        3.0, "ms: shorter loads gain little, a worker's hand-over takes as long", HAND_OVER
    )

    verify = (
        "Profile again: the ranges say _MultiProcessingDataLoaderIter and their exposed "
        "part is near zero."
    )
    falsified_by = "the same step time when the loop reuses one batch already on the device"
    confidence = 0.9

    fix = (
        "Load in worker processes: num_workers={needed} should keep up with the step, one "
        "or two more give slack. If the whole dataset fits in memory, index tensors a "
        "batch at a time (or keep them on the device) instead."
    )
    code = (
        "loader = DataLoader(dataset, batch_size=..., num_workers={workers},\n"
        "                    persistent_workers=True, pin_memory=True)\n"
        "for batch, target in loader:\n"
        "    batch = batch.to(device, non_blocking=True)"
    )
    assumptions = ("there are so many cores for workers", "the dataset can be pickled")
    cases: ClassVar = {
        "a batch that takes more workers than there are cores": {
            "fix": "Make a batch cheaper first: it takes {batch}, and {needed} workers would "
            "be needed to keep up. Do once what is done again for every sample (decode and resize "
            "ahead, cache, store in a few large files), work on whole batches, or move transforms "
            "to the device. {workers} workers then share what is left."
        },
        "the training computes on the same cores": {
            "fix": "Make loading cheaper rather than move it: the training itself computes on all "
            "cores, and workers would take them from it. Work on whole batches, keep what is done "
            "again for every sample (decoded, resized), or leave cores to {workers} workers with "
            "torch.set_num_threads, and measure that: advisor try --only workers.",
        },
        "training on the CPU": {
            "code": "loader = DataLoader(dataset, batch_size=..., num_workers={workers},\n"
            "                    persistent_workers=True)"
        },
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the exposed part of the loading with the step."""
        waits = find_waits(a, SINGLE)
        if waits is None:
            return
        share = waits.exposed / a.span_ns
        batch = waits.total / len(waits.host)
        if share < self.min_share or batch < self.min_batch_ms * 1e6:
            return
        if not recurs(waits, self.min_share * a.step_ns):
            yield in_one_step(waits)
            return
        per_step = waits.exposed / a.step_count
        inside = culprits(a, waits)
        rest = a.step_ns - per_step
        needed = max(1, int(np.ceil(waits.total / a.step_count / max(rest, 1.0))))
        cores = None if a.record is None else a.record.rank.cpus
        most = self.most_workers if cores is None else max(1, cores)
        free = None if a.recorded is None else a.recorded.free_cores
        idle_cores = "" if free is None else f", and {free:.1f} of them are idle"
        workers = min(needed + 1, most)
        fix, code = self.fix, self.code
        if needed > workers:
            fix = self.case("a batch that takes more workers than there are cores")["fix"]
        taken = taken_by_training(a, share)
        if taken is not None and taken > self.max_taken:
            fix = self.case("the training computes on the same cores")["fix"]
        if a.device_id is None:
            code = self.case("training on the CPU")["code"]
        beside = " beside those that the step computes on" if a.trains_on_host else ""
        idle = "nothing else runs" if a.device_id is None else "the device is idle"
        yield Finding(
            summary=(
                f"{of_step(a, waits.exposed)} {idle} while the main "
                "process itself loads the next batch (num_workers=0)." + inside.summary
            ),
            evidence=[
                Evidence("exposed loading", per_step, "ns", per=a.per),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("mean time of one batch", batch, "ns", *self.limit("min_batch_ms", 1e6)),
                Evidence("workers that would keep up", needed, "count"),
                *self._cores(taken),
                *inside.evidence,
            ],
            where=[*inside.where, *places(a, waits.host, waits.each)],
            edits=[Edit(op="spread", select=Select(on="host", name=SINGLE), workers=workers)],
            assumptions=[
                f"there are {workers} cores for workers{beside}"
                + ("" if cores is None else f" (the process may use {cores}{idle_cores})"),
                "the dataset can be pickled",
            ],
            fix=fix.format(needed=needed, workers=workers, batch=t.format_duration(batch)),
            code=code.format(workers=workers),
        )

    def _cores(self, taken: float | None) -> list[Evidence]:
        if taken is None:
            return []
        label = "of the loading, what needs cores that compute already"
        return [Evidence(label, taken, "share", *self.limit("max_taken"))]

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Loading in the training process, with a device and without."""
        device, host_only = TraceBuilder(), TraceBuilder(gpu=None)
        for _ in range(4):
            with device.step():
                device.loader_wait(5000, workers=0)
                device.run("aten::mm", "ampere_sgemm_128x64_nn", 4000)
                device.sync()
            with host_only.step():
                host_only.loader_wait(5000, workers=0)
                with host_only.op("aten::mm", host_us=4000):
                    pass
        return {"with a device": device, "training on the CPU": host_only}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Loading hidden behind the device; workers; a dataset in memory, where they would cost."""
        hidden, workers, memory = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with hidden.step():
                hidden.run("aten::mm", "ampere_sgemm_128x64_nn", 7000)
                hidden.loader_wait(5000, workers=0)
            with workers.step():
                workers.loader_wait(5000, workers=4)
                workers.run("aten::mm", "ampere_sgemm_128x64_nn", 4000)
                workers.sync()
            with memory.step():
                memory.loader_wait(300, workers=0)
                memory.run("aten::mm", "ampere_sgemm_128x64_nn", 2000)
                memory.sync()
        return {
            "hidden behind device work": (hidden, "share < self.min_share"),
            "workers": (workers, "waits is None"),
            "in memory": (memory, "min_batch_ms"),
        }
